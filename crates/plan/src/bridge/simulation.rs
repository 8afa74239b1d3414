//! A simulated kernel: applies plans and checks that they converge from any state.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use api::{IfName, Mac, Vtep};
use jiff::Timestamp;
use proptest::prelude::*;

use super::{
    Action, BridgeInput, BridgePlan, Desired, LinkKind, LinkRecord, LocalNetwork, Overlay, Peer, Settled,
    is_pod_port, ownership_alias, ownership_mac, plan,
};
use crate::nodenetwork::{Address, AdminState, FloodEntry, KernelState, Link, NodeInfo, OperState, Vxlan};

/// A plan that still has steps after this many passes does not converge.
const PASSES: usize = 8;
/// The first index of links that the simulation creates.
const FIRST_CREATED: u32 = 100;

pub fn link(index: u32, name: &str, kind: &str) -> Link {
    Link {
        index,
        name: name.to_owned(),
        kind: Some(kind.to_owned()).filter(|kind| !kind.is_empty()),
        mac: Some(Mac::from([2, 0, 0, 0, 1, u8::try_from(index % 256).unwrap()])),
        mtu: 1500,
        admin: AdminState::Up,
        oper: OperState::Up,
        loopback: false,
        master: None,
        lower: None,
        alias: String::new(),
        addresses: Vec::new(),
        ipv6_disabled: Some(false),
        ipv4_isolated: Some(false),
        vxlan: None,
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

/// A simulated node: its kernel, its records, and its view of the cluster.
#[derive(Debug, Clone)]
pub struct SimNode {
    pub observed: KernelState,
    pub records: BTreeMap<String, LinkRecord>,
    pub settled: BTreeMap<String, Settled>,
    pub networks: Vec<LocalNetwork>,
    pub peers: Vec<Peer>,
    pub vtep: Option<Vtep>,
    pub node: NodeInfo,
    pub boot: String,
    /// The networks that the NodeNetwork does not list yet.
    pub unlisted: BTreeSet<String>,
    pub failures: BTreeMap<String, super::ApplyFailure>,
    pub api_links: BTreeSet<u32>,
    pub next: u32,
}

impl SimNode {
    /// A node with the loopback interface, `eth0` with the node's address, and these links.
    pub fn new(links: &[Link]) -> Self {
        let address = |net: &str| Address { net: net.parse().unwrap(), temporary: false };
        let lo = Link { loopback: true, addresses: vec![address("127.0.0.1/8")], ..link(1, "lo", "") };
        let eth0 = Link { addresses: vec![address("10.0.0.1/24")], ..link(2, "eth0", "") };
        let links: Vec<Link> = [lo, eth0].iter().chain(links).cloned().collect();
        Self {
            next: FIRST_CREATED,
            observed: KernelState { links, default_routes: vec![2], ..KernelState::default() },
            records: BTreeMap::new(),
            settled: BTreeMap::new(),
            networks: Vec::new(),
            peers: Vec::new(),
            vtep: Some(Vtep {
                address: "10.0.0.1".parse().unwrap(),
                interface: "eth0".to_owned(),
                mtu: 1500,
            }),
            node: NodeInfo {
                name: "node-1".to_owned(),
                uid: "node-uid".to_owned(),
                internal_ips: vec!["10.0.0.1".parse().unwrap()],
            },
            boot: "boot-1".to_owned(),
            unlisted: BTreeSet::new(),
            failures: BTreeMap::new(),
            api_links: BTreeSet::new(),
        }
    }

    pub fn with(mut self, networks: &[LocalNetwork]) -> Self {
        self.networks = networks.to_vec();
        self
    }

    pub fn plan(&self) -> BridgePlan {
        let all = self.networks.iter().map(|network| network.uid.clone());
        let listed = all.filter(|uid| !self.unlisted.contains(uid)).collect();
        plan(&BridgeInput {
            node: &self.node,
            boot: &self.boot,
            vtep: self.vtep.as_ref(),
            networks: &self.networks,
            peers: &self.peers,
            observed: &self.observed,
            records: &self.records,
            listed: &listed,
            failures: &self.failures,
            api_links: &self.api_links,
            settled: &self.settled,
        })
    }

    pub fn find(&self, name: &str) -> Option<&Link> {
        self.observed.links.iter().find(|link| link.name == name)
    }

    pub fn get(&mut self, name: &str) -> &mut Link {
        self.observed.links.iter_mut().find(|link| link.name == name).unwrap()
    }

    fn at(&mut self, index: u32) -> &mut Link {
        self.observed
            .links
            .iter_mut()
            .find(|link| link.index == index)
            .expect("steps refer to existing links")
    }

    pub fn add(&mut self, mut link: Link) -> u32 {
        assert!(self.find(&link.name).is_none(), "{} exists", link.name);
        link.index = self.next;
        self.next += 1;
        self.observed.links.push(link);
        self.next - 1
    }

    pub fn delete(&mut self, index: u32) {
        self.observed.links.retain(|link| link.index != index);
        self.observed.floods.retain(|flood| flood.link != index);
        for link in &mut self.observed.links {
            link.master = link.master.filter(|&master| master != index);
        }
    }

    pub fn pod(&mut self, network: &str, number: u32) -> u32 {
        let bridge = self.find(&format!("br-{network}")).map(|bridge| bridge.index);
        let port = Link {
            master: bridge,
            mtu: 1400,
            alias: crate::attachment::alias(&format!("uid-{network}"), "nad", &number.to_string(), "net1"),
            ..link(0, &format!("veth{number:011x}"), "veth")
        };
        self.add(port)
    }

    pub fn apply(&mut self, network: &str, action: &Action) {
        match action.clone() {
            Action::WriteRecord(record) => _ = self.records.insert(network.to_owned(), record),
            Action::RemoveRecord => {
                _ = self.records.remove(network).expect("only existing records are removed");
            }
            Action::CreateBridge { name, mac, mtu } => {
                let ipv6_disabled = (mtu > 1280).then_some(false);
                let base = link(0, name.as_str(), "bridge");
                self.add(Link {
                    mac: Some(mac),
                    mtu: mtu - 1,
                    admin: AdminState::Down,
                    ipv6_disabled,
                    ..base
                });
            }
            Action::CreateVxlan { name, mac, mtu, overlay: Overlay { vni, port }, local, bridge } => {
                let vxlan = Some(Vxlan { vni, port, local: Some(local) });
                let same =
                    |link: &&Link| link.vxlan.is_some_and(|other| (other.vni, other.port) == (vni, port));
                assert_eq!(self.observed.links.iter().find(same), None);
                let ipv6_disabled = (mtu >= 1280).then_some(false);
                let base =
                    Link { master: Some(bridge), ipv6_disabled, vxlan, ..link(0, name.as_str(), "vxlan") };
                self.add(Link { mac: Some(mac), mtu, admin: AdminState::Down, ..base });
            }
            Action::Delete { link } => self.delete(link),
            Action::Rename { link, name } => {
                assert!(self.find(name.as_str()).is_none(), "{name} exists");
                self.at(link).name = name.to_string();
            }
            Action::SetAlias { link, alias } => self.at(link).alias = alias,
            Action::SetMac { link, mac } => self.at(link).mac = Some(mac),
            Action::SetMtu { link, mtu } => {
                let link = self.at(link);
                link.mtu = mtu;
                link.ipv6_disabled = if mtu < 1280 { None } else { link.ipv6_disabled.or(Some(false)) };
            }
            Action::SetAdmin { link, admin } => self.at(link).admin = admin,
            Action::DisableIpv6 { name } => {
                let link = self.get(&name);
                link.ipv6_disabled = Some(true);
                link.addresses.retain(|address| address.net.addr().is_ipv4());
            }
            Action::IsolateIpv4 { name } => self.get(&name).ipv4_isolated = Some(true),
            Action::RemoveAddress { link, address } => {
                self.at(link).addresses.retain(|own| own.net != address);
            }
            Action::SetMaster { link, bridge } => {
                assert_eq!(self.at(bridge).kind.as_deref(), Some("bridge"));
                self.at(link).master = Some(bridge);
            }
            Action::ClearMaster { link } => self.at(link).master = None,
            Action::AddFlood { vxlan, to } => self.observed.floods.push(FloodEntry { link: vxlan, to }),
            Action::RemoveFlood { vxlan, to } => {
                self.observed.floods.retain(|flood| *flood != FloodEntry { link: vxlan, to });
            }
        }
    }

    /// One pass that crashes after this many steps.
    fn pass(&mut self, steps: usize) -> BridgePlan {
        let plan = self.plan();
        self.settled.clone_from(&plan.settled);
        for step in plan.steps.iter().take(steps) {
            self.apply(&step.network, &step.action);
        }
        plan
    }

    /// Plans and applies until no steps are left.
    pub fn settle(&mut self) -> BridgePlan {
        let mut last = BridgePlan::default();
        for _ in 0..PASSES {
            last = self.pass(usize::MAX);
            if last.steps.is_empty() {
                return last;
            }
        }
        panic!("no convergence after {PASSES} passes: {:#?}", last.steps);
    }
}

/// The link that a step changes.
fn touched(action: &Action) -> Option<u32> {
    match action {
        Action::WriteRecord(_)
        | Action::RemoveRecord
        | Action::CreateBridge { .. }
        | Action::CreateVxlan { .. }
        | Action::DisableIpv6 { .. }
        | Action::IsolateIpv4 { .. } => None,
        Action::Delete { link }
        | Action::Rename { link, .. }
        | Action::SetAlias { link, .. }
        | Action::SetMac { link, .. }
        | Action::SetMtu { link, .. }
        | Action::SetAdmin { link, .. }
        | Action::RemoveAddress { link, .. }
        | Action::SetMaster { link, .. }
        | Action::ClearMaster { link } => Some(*link),
        Action::AddFlood { vxlan, .. } | Action::RemoveFlood { vxlan, .. } => Some(*vxlan),
    }
}

/// An event between two passes; the numbers select the variation.
#[derive(Debug, Clone, Copy)]
enum NodeEvent {
    /// A network is created, changed or deleted.
    Network(u8, u8),
    /// Another program changes a link.
    Drift(u8, u8),
    /// The daemon crashes after this many steps.
    Crash(u8),
    Pass,
    Pod(u8),
    PodDeleted(u8),
    Peers(u8),
    Reboot,
    NodeRecreated,
}

fn events() -> impl Strategy<Value = Vec<NodeEvent>> {
    let event = prop_oneof![
        4 => (any::<u8>(), any::<u8>()).prop_map(|(which, how)| NodeEvent::Network(which, how)),
        4 => (any::<u8>(), any::<u8>()).prop_map(|(which, how)| NodeEvent::Drift(which, how)),
        4 => (0..6_u8).prop_map(NodeEvent::Crash),
        4 => Just(NodeEvent::Pass),
        1 => any::<u8>().prop_map(NodeEvent::Pod),
        1 => any::<u8>().prop_map(NodeEvent::PodDeleted),
        1 => any::<u8>().prop_map(NodeEvent::Peers),
        1 => Just(NodeEvent::Reboot),
        1 => Just(NodeEvent::NodeRecreated),
    ];
    proptest::collection::vec(event, 0..30)
}

/// Links that Patchbay does not own, some with names or VNIs that the networks need.
fn foreign_links(which: u8) -> Vec<Link> {
    let has = |bit: u8| which & (1 << bit) != 0;
    let address = Address { net: "192.0.2.1/24".parse().unwrap(), temporary: false };
    let mut links = vec![
        Link { admin: AdminState::Down, mtu: 1300, ..link(10, "eth1", "") },
        Link { mtu: 9000, ..link(11, "eth2", "") },
        Link { addresses: vec![address], ..link(12, "eth3", "") },
        Link { alias: "patchbay/bridge/uid-n0".to_owned(), ..link(13, "eth4", "") },
        Link { alias: "patchbay/bridge/".to_owned(), ..link(14, "virbr9", "bridge") },
    ];
    if has(0) {
        links.push(link(20, "br-n1", "bridge"));
    }
    if has(1) {
        links.push(link(21, "vx-n2", "vxlan"));
    }
    if has(2) {
        let vxlan = Some(Vxlan { vni: 2, port: 4789, local: None });
        links.push(Link { vxlan, ..link(22, "vxlan2", "vxlan") });
    }
    if has(3) {
        links.push(Link { lower: Some(11), ..link(23, "eth2.5", "vlan") });
    }
    links
}

struct BridgeSim {
    node: SimNode,
    foreign_links: Vec<Link>,
    pods: u32,
}

impl BridgeSim {
    fn new(which: u8) -> Self {
        let foreign_links = foreign_links(which);
        Self { node: SimNode::new(&foreign_links), foreign_links, pods: 0 }
    }

    /// Applies the first steps of a pass, and checks that no step changes a foreign link other than an uplink.
    fn pass(&mut self, steps: usize) -> BridgePlan {
        let plan = self.node.plan();
        self.node.settled.clone_from(&plan.settled);
        for step in plan.steps.iter().take(steps) {
            if let Some(index) = touched(&step.action) {
                let uplink = matches!(index, 10 | 11)
                    && matches!(
                        step.action,
                        Action::SetMtu { .. }
                            | Action::SetAdmin { .. }
                            | Action::SetMaster { .. }
                            | Action::ClearMaster { .. }
                    );
                let foreign = index <= 2 || self.foreign_links.iter().any(|link| link.index == index);
                assert!(uplink || !foreign, "{step:?}");
            }
            self.node.apply(&step.network, &step.action);
        }
        plan
    }

    fn settle(&mut self) {
        let mut steps = Vec::new();
        for _ in 0..PASSES {
            let plan = self.pass(usize::MAX);
            if plan.steps.is_empty() {
                return;
            }
            steps = plan.steps;
        }
        panic!("no convergence: {steps:#?}\n{:#?}", self.node);
    }

    fn handle(&mut self, event: NodeEvent) {
        match event {
            NodeEvent::Network(which, how) => self.edit(which % 4, how),
            NodeEvent::Drift(which, how) => self.drift(which, how),
            NodeEvent::Crash(steps) => _ = self.pass(usize::from(steps)),
            NodeEvent::Pass => _ = self.pass(usize::MAX),
            NodeEvent::Pod(which) => {
                let label = format!("n{}", which % 4);
                let bridge = self.node.find(&format!("br-{label}"));
                if bridge.is_some_and(|bridge| bridge.index >= FIRST_CREATED) {
                    self.pods += 1;
                    self.node.pod(&label, self.pods);
                }
            }
            NodeEvent::PodDeleted(which) => {
                let ports: Vec<u32> = self.pods();
                if let Some(&index) = ports.get(usize::from(which) % ports.len().max(1)) {
                    self.node.delete(index);
                }
            }
            NodeEvent::Peers(which) => {
                self.node.peers = (0..4_u8)
                    .filter(|n| which & (1 << n) != 0)
                    .map(|n| Peer {
                        node: format!("peer-{n}"),
                        vtep: Some(IpAddr::from([10, 0, 0, 10 + n])),
                        networks: (0..4)
                            .filter(|m| (which >> 4) & (1 << m) != 0)
                            .map(|m| format!("uid-n{m}").into())
                            .collect(),
                    })
                    .collect();
            }
            NodeEvent::Reboot => {
                let fresh = SimNode::new(&self.foreign_links);
                self.node.observed = fresh.observed;
                self.node.boot += "+";
                self.node.settled.clear();
            }
            NodeEvent::NodeRecreated => self.node.node.uid += "+",
        }
    }

    fn pods(&self) -> Vec<u32> {
        let links = self.node.observed.links.iter();
        links.filter(|link| is_pod_port(&link.name)).map(|link| link.index).collect()
    }

    fn edit(&mut self, which: u8, how: u8) {
        let label = format!("n{which}");
        let uid = format!("uid-{label}");
        let networks = &mut self.node.networks;
        let Some(at) = networks.iter().position(|network| network.uid == uid) else {
            let mut new = network(&label);
            new.created = Timestamp::from_second(i64::from(how % 3)).unwrap();
            new.mtu = Some([1400, 1280, 1450, 576][usize::from(how / 4) % 4]);
            new.uplink = [None, Some(name("eth1")), Some(name("eth2")), Some(name("eth3"))]
                [usize::from(how) % 4]
                .clone();
            if new.uplink.is_none() {
                new.overlay = Some(Overlay { vni: u32::from(1 + which % 3), port: 4789 });
            }
            networks.push(new);
            return;
        };
        match how % 6 {
            0 => _ = networks.remove(at),
            1 => networks[at].desired = Desired::Absent,
            2 => networks[at].desired = Desired::Present,
            3 => networks[at].mtu = Some([1400, 1280, 1450, 576, 1000][usize::from(how / 6) % 5]),
            4 if networks[at].overlay.is_none() => {
                networks[at].uplink =
                    [None, Some(name("eth1")), Some(name("eth2"))][usize::from(how / 6) % 3].clone();
            }
            _ => {
                if let Some(overlay) = &mut networks[at].overlay {
                    overlay.port = [4789, 4790][usize::from(how / 6) % 2];
                }
            }
        }
    }

    fn drift(&mut self, which: u8, how: u8) {
        // Includes an uplink while it is a port of a bridge.
        let changeable = |link: &&Link| link.index >= FIRST_CREATED || link.master.is_some();
        let indexes: Vec<u32> =
            self.node.observed.links.iter().filter(changeable).map(|link| link.index).collect();
        let Some(&index) = indexes.get(usize::from(which) % indexes.len().max(1)) else { return };
        let pod = is_pod_port(&self.node.at(index).name);
        let foreign = self.node.find("virbr9").unwrap().index;
        let link = self.node.at(index);
        let owned =
            !pod && index >= FIRST_CREATED && (link.alias.starts_with("patchbay/") || how.is_multiple_of(2));
        match how % 10 {
            0 if index >= FIRST_CREATED => self.node.delete(index),
            1 => link.mtu = 1401,
            2 => link.admin = AdminState::Down,
            3 => link.master = None,
            4 if pod || link.kind.as_deref() == Some("vxlan") => link.master = Some(foreign),
            5 if owned => link.mac = Some(Mac::from([2, 9, 9, 9, 9, 9])),
            6 if owned && link.mac.is_some_and(|mac| mac.octets()[1] != 9) => {
                link.alias = "edited".to_owned();
            }
            7 if owned => {
                link.addresses.push(Address { net: "10.7.0.1/24".parse().unwrap(), temporary: false });
            }
            8 if owned => {
                link.ipv6_disabled = link.ipv6_disabled.map(|_| false);
                link.ipv4_isolated = Some(false);
                link.name = format!("edited{index}");
            }
            9 if link.kind.as_deref() == Some("vxlan") => {
                self.node.observed.floods.push(FloodEntry { link: index, to: "10.0.0.99".parse().unwrap() });
            }
            _ => {}
        }
    }
}

proptest! {
    #[test]
    fn every_sequence_of_events_converges_and_removal_leaves_no_trace(which in 0..16_u8, events in events()) {
        let mut sim = BridgeSim::new(which);
        for event in events {
            sim.handle(event);
        }
        sim.settle();
        prop_assert_eq!(sim.node.plan().steps, vec![]);
        // A network is reported as ready only if its bridge is up.
        for report in sim.node.plan().networks {
            let bridge = sim.node.find(&report.bridge).filter(|bridge| bridge.index >= FIRST_CREATED);
            prop_assert!(!report.ready || bridge.is_some_and(|bridge| bridge.admin == AdminState::Up), "{:?}", report);
        }

        for index in sim.pods() {
            sim.node.delete(index);
        }
        for network in &mut sim.node.networks {
            network.desired = Desired::Absent;
        }
        sim.settle();
        let before = SimNode::new(&sim.foreign_links).observed;
        prop_assert_eq!(&sim.node.observed, &before);
        prop_assert!(sim.node.records.is_empty());
        prop_assert_eq!(sim.node.plan().networks, vec![]);
    }
}

#[test]
fn converges_after_a_crash_at_any_step_of_creation_and_removal() {
    let up = LocalNetwork { uplink: Some(name("eth1")), ..network("up") };
    let over = LocalNetwork { overlay: Some(Overlay { vni: 7, port: 4789 }), ..network("over") };
    let eth1 = || Link { admin: AdminState::Down, mtu: 1300, ..link(10, "eth1", "") };
    let peers = vec![Peer {
        node: "peer".to_owned(),
        vtep: Some("10.0.0.2".parse().unwrap()),
        networks: [over.uid.as_str().into()].into(),
    }];
    let mut whole =
        SimNode { peers: peers.clone(), ..SimNode::new(&[eth1()]).with(&[up.clone(), over.clone()]) };
    assert!(whole.settle().networks.iter().all(|report| report.ready));
    for first in 0..16 {
        for second in 0..16 {
            let mut node =
                SimNode { peers: peers.clone(), ..SimNode::new(&[eth1()]).with(&[up.clone(), over.clone()]) };
            node.pass(first);
            node.pass(second);
            node.settle();
            assert_eq!(node.observed.links.len(), whole.observed.links.len());
            assert!(node.plan().networks.iter().all(|report| report.ready));

            for network in &mut node.networks {
                network.desired = Desired::Absent;
            }
            node.pass(first);
            node.pass(second);
            node.settle();
            assert_eq!(node.observed, SimNode::new(&[eth1()]).observed);
            assert_eq!(node.records, BTreeMap::new());
        }
    }
}

#[test]
fn leftovers_are_recognized_by_alias_or_ownership_mac_and_removed() {
    let mut node = SimNode::new(&[]);
    let before = node.observed.clone();
    let bridge = node
        .add(Link { alias: ownership_alias("deleted", LinkKind::Bridge), ..link(0, "br-deleted", "bridge") });
    node.add(Link {
        master: Some(bridge),
        alias: ownership_alias("deleted", LinkKind::Vxlan),
        ..link(0, "vx-deleted", "vxlan")
    });
    node.networks = vec![LocalNetwork { desired: Desired::Absent, ..network("left") }];
    let mac = Some(ownership_mac("uid-left", "node-uid", LinkKind::Bridge));
    node.add(Link { mac, ..link(0, "br-left", "bridge") });
    node.settle();
    assert_eq!(node.observed, before);
}
