//! A simulated node in a network namespace: the daemon's observe, plan, apply loop without the daemon.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, UdpSocket},
    os::fd::AsRawFd as _,
    path::Path,
    process::{self, Command},
    time::Duration,
};

use api::{IfName, IfNamePatterns, NetworkOnNode, Vtep};
use jiff::Timestamp;
use link::{Error, LinkEditor, Monitor};
use plan::{
    bridge::{
        self, Action, BridgeInput, BridgePlan, BridgeStep, Desired, LinkRecord, LocalNetwork, Overlay, Peer,
        Settled,
    },
    nodenetwork::{KernelState, Link, NodeInfo},
};
use tokio::{
    runtime::{Builder, Runtime},
    time::timeout,
};

pub use super::netns::Namespace;

/// A plan that is not empty after this many passes never settles.
const MAX_PASSES: usize = 8;

impl Namespace {
    /// Runs a command line in the namespace.
    pub fn run(&self, line: &str) {
        let mut arguments = line.split_whitespace();
        let program = arguments.next().unwrap();
        let run = || Command::new(program).args(arguments).output();
        let output = self.within(run).expect("install the package iproute2");
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    }

    pub fn ip(&self, arguments: &str) {
        self.run(&format!("ip {arguments}"));
    }

    /// The path by which other programs open the namespace.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", process::id(), self.0.as_raw_fd())
    }

    /// Creates a veth pair between this namespace and another.
    pub fn pair(&self, here: &str, other: &Self, there: &str) {
        self.ip(&format!("link add {here} type veth peer name {there} netns {}", other.path()));
    }

    pub fn socket(&self, address: &str) -> UdpSocket {
        self.within(|| UdpSocket::bind(address)).unwrap()
    }
}

/// Whether a datagram of this size arrives within three seconds. Neighbour discovery takes some of them.
pub fn reaches(from: &UdpSocket, to: &UdpSocket, size: usize) -> bool {
    (0..30).any(|_| delivers(from, to, size))
}

/// Whether one datagram arrives within 100 ms.
pub fn delivers(from: &UdpSocket, to: &UdpSocket, size: usize) -> bool {
    to.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let address = to.local_addr().unwrap();
    let mut buffer = vec![0; size + 1];
    // A missing route is an error of the send call.
    _ = from.send_to(&vec![7; size], address);
    to.recv(&mut buffer).is_ok_and(|received| received == size)
}

pub struct Host {
    pub ns: Namespace,
    pub networks: Vec<LocalNetwork>,
    pub peers: Vec<Peer>,
    pub node: NodeInfo,
    pub records: BTreeMap<String, LinkRecord>,
    pub settled: BTreeMap<String, Settled>,
    pub editor: LinkEditor,
    monitor: Monitor,
    runtime: Runtime,
}

impl Host {
    pub fn new(name: &str) -> Self {
        let ns = Namespace::new();
        ns.ip("link set lo up");
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let monitor = {
            let _entered = runtime.enter();
            Monitor::open_in(&ns.0).unwrap()
        };
        let editor = LinkEditor::open_in(&ns.0, Path::new("/proc/sys")).unwrap();
        Self {
            networks: Vec::new(),
            peers: Vec::new(),
            node: NodeInfo { name: name.to_owned(), uid: format!("uid-of-{name}"), internal_ips: Vec::new() },
            records: BTreeMap::new(),
            settled: BTreeMap::new(),
            editor,
            monitor,
            runtime,
            ns,
        }
    }

    pub fn observe(&self) -> KernelState {
        self.runtime.block_on(self.monitor.observe()).unwrap()
    }

    pub fn link(&self, name: &str) -> Link {
        self.find(name).unwrap_or_else(|| panic!("no link {name}"))
    }

    pub fn find(&self, name: &str) -> Option<Link> {
        self.observe().links.into_iter().find(|link| link.name == name)
    }

    pub fn vtep(&self, observed: &KernelState) -> Option<Vtep> {
        let ignored: IfNamePatterns = "none".parse().unwrap();
        plan::nodenetwork::vtep(observed, &self.node, &ignored)
    }

    pub fn plan(&self) -> BridgePlan {
        let observed = self.observe();
        let vtep = self.vtep(&observed);
        let listed: BTreeSet<String> = self.networks.iter().map(|network| network.uid.clone()).collect();
        bridge::plan(&BridgeInput {
            node: &self.node,
            boot: "boot",
            vtep: vtep.as_ref(),
            networks: &self.networks,
            peers: &self.peers,
            observed: &observed,
            records: &self.records,
            listed: &listed,
            failures: &BTreeMap::new(),
            api_links: &BTreeSet::new(),
            settled: &self.settled,
        })
    }

    pub fn apply(&mut self, step: &BridgeStep) -> Result<(), Error> {
        match &step.action {
            Action::WriteRecord(record) => _ = self.records.insert(step.network.clone(), record.clone()),
            Action::RemoveRecord => _ = self.records.remove(&step.network),
            action => self.editor.apply(action)?,
        }
        Ok(())
    }

    /// Plans and applies until the plan is empty, and returns the applied steps.
    pub fn settle(&mut self) -> Vec<BridgeStep> {
        let mut steps = Vec::new();
        for _ in 0..MAX_PASSES {
            let plan = self.plan();
            self.settled = plan.settled;
            if plan.steps.is_empty() {
                return steps;
            }
            for step in plan.steps {
                self.apply(&step).unwrap_or_else(|error| panic!("{step:?}: {error:?}"));
                steps.push(step);
            }
        }
        panic!("not settled after {MAX_PASSES} passes: {steps:#?}");
    }

    /// Applies this many steps, then simulates a restart of the daemon. False if the plan was empty before.
    pub fn stop_after(&mut self, steps: usize) -> bool {
        let mut left = steps;
        for _ in 0..MAX_PASSES {
            let plan = self.plan();
            if plan.steps.is_empty() {
                return false;
            }
            for step in plan.steps {
                if left == 0 {
                    self.settled.clear();
                    return true;
                }
                left -= 1;
                self.apply(&step).unwrap();
            }
        }
        panic!("not settled after {MAX_PASSES} passes");
    }

    /// Removes all networks from this node.
    pub fn remove_all(&mut self) {
        for network in &mut self.networks {
            network.desired = Desired::Absent;
        }
    }

    /// Whether the kernel reports a change within 100 ms. Consumes all queued events.
    pub fn changed(&self) -> bool {
        let within = Duration::from_millis(100);
        let changed = || self.runtime.block_on(async { timeout(within, self.monitor.changed()).await });
        let mut any = false;
        while let Ok(changed) = changed() {
            any |= changed.unwrap().events > 0;
        }
        any
    }

    /// Observes after each event until the condition holds.
    pub fn until(&self, condition: impl Fn(&KernelState) -> bool) -> KernelState {
        self.runtime.block_on(async {
            loop {
                let observed = self.monitor.observe().await.unwrap();
                if condition(&observed) {
                    return observed;
                }
                timeout(Duration::from_secs(10), self.monitor.changed()).await.expect("an event").unwrap();
            }
        })
    }

    pub fn report(&self, name: &str) -> Option<NetworkOnNode> {
        self.plan().networks.into_iter().find(|network| network.name == name)
    }

    /// Attaches a pod with this address to the bridge of a network.
    pub fn pod(&self, network: &LocalNetwork, number: u32, address: &str) -> Namespace {
        let pod = Namespace::new();
        let port = format!("veth{number:011x}");
        let alias = plan::attachment::alias(&network.uid, "nad", &format!("container{number}"), "net1");
        let mtu = network.mtu.unwrap();
        self.ns.ip(&format!(
            "link add {port} mtu {mtu} master {} type veth peer name net1 mtu {mtu} netns {}",
            network.bridge,
            pod.path()
        ));
        self.ns.ip(&format!("link set {port} up"));
        self.ns.ip(&format!("link set {port} alias {alias}"));
        pod.ip("link set net1 up");
        pod.ip(&format!("address add {address} dev net1 nodad"));
        pod
    }
}

pub fn name(text: &str) -> IfName {
    text.parse().unwrap()
}

pub fn network(label: &str) -> LocalNetwork {
    LocalNetwork {
        name: label.to_owned(),
        uid: format!("uid-{label}"),
        generation: 1,
        created: Timestamp::UNIX_EPOCH,
        bridge: name(&format!("br-{label}")),
        vxlan: name(&format!("vx-{label}")),
        mtu: Some(1400),
        uplink: None,
        overlay: None,
        desired: Desired::Present,
    }
}

pub fn overlay(label: &str, vni: u32) -> LocalNetwork {
    LocalNetwork { overlay: Some(Overlay { vni, port: 4789 }), ..network(label) }
}

/// Two connected nodes, each a peer of the other in all networks.
pub fn two_nodes(networks: &[LocalNetwork], addresses: [&str; 2]) -> [Host; 2] {
    let mut hosts = [Host::new("one"), Host::new("two")];
    hosts[0].ns.pair("eth0", &hosts[1].ns, "eth0");
    let ips: Vec<IpAddr> =
        addresses.iter().map(|net| net.split('/').next().unwrap().parse().unwrap()).collect();
    for (n, host) in hosts.iter_mut().enumerate() {
        host.ns.ip("link set eth0 up");
        let nodad = if ips[n].is_ipv6() { "nodad" } else { "" };
        host.ns.ip(&format!("address add {} dev eth0 {nodad}", addresses[n]));
        host.node.internal_ips = vec![ips[n]];
        host.networks = networks.to_vec();
        host.peers = vec![Peer {
            node: "other".to_owned(),
            vtep: Some(ips[1 - n]),
            networks: networks.iter().map(|network| network.uid.as_str().into()).collect(),
        }];
    }
    hosts
}
