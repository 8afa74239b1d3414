//! The API server of the simulation, and what really is the case on the nodes.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use api::{
    IPBlockSpec, IPBlockStatus,
    digest::digest,
    ipam::IpamSpec,
    ipblock::{self, HolderRef},
    nad::{NadIpam, NadNetwork},
    selection::NadRef,
};
use ipnet::IpNet;
use jiff::Timestamp;

use crate::{
    claims::{ClaimPod, ClaimState, ObjectKey, VmFacts, VmiFacts},
    ipam::{ObservedIpBlock, Pool},
    network::BlockState,
};

pub const NAMESPACE: &str = "ns";
/// How long the sandbox of a pod may take to go, and the network-status of a pod to appear. Less than
/// [`RELEASE_DELAY`](crate::claims::release::RELEASE_DELAY), which is that many seconds.
pub const MAX_DELAY: u64 = 6;
/// Versions that a stale snapshot may be behind.
const MAX_HISTORY: usize = 60;

/// The objects of the cluster.
#[derive(Debug, Clone, Default)]
pub struct Objects {
    pub vms: BTreeMap<Arc<str>, Vm>,
    pub vmis: BTreeMap<Arc<str>, VmiFacts>,
    pub claims: BTreeMap<ObjectKey, ClaimState>,
    pub pods: BTreeMap<ObjectKey, ClaimPod>,
    pub blocks: BTreeMap<String, BlockState>,
    pub nads: BTreeMap<NadRef, NadNetwork>,
}

/// A VirtualMachine, with what the simulation needs besides.
#[derive(Debug, Clone)]
pub struct Vm {
    pub facts: VmFacts,
    pub running: bool,
    pub deletion: Option<Deletion>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deletion {
    Background,
    Foreground,
    Orphan,
}

/// The addresses that a sandbox has on an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxAddresses {
    pub pod: ObjectKey,
    pub interface: Arc<str>,
    pub nad: NadRef,
    /// The UID of the network.
    pub network: String,
    pub addresses: Vec<IpAddr>,
    /// What identifies the machine over all its restarts.
    pub life: String,
    pub node: String,
    /// Whether its ADD has succeeded. Before that it has a lease, and runs nothing.
    pub running: bool,
    pub since: u64,
    /// When the sandbox goes, once its pod is gone.
    pub until: Option<u64>,
}

pub struct World {
    pub live: Arc<Objects>,
    history: Vec<Arc<Objects>>,
    /// The number of the first version in the history.
    first: usize,
    pub clock: u64,
    next_uid: u64,
    pub pools: BTreeMap<String, Pool>,
    pub sandboxes: Vec<SandboxAddresses>,
    /// The addresses of claims that the NodeNetwork of each node lists, with the UID of their network.
    pub reports: BTreeMap<String, BTreeSet<(String, IpAddr)>>,
    /// The nodes whose daemon does not run.
    pub down: BTreeSet<String>,
    /// The ordinary leases: network UID and address, with the UID of the node.
    pub leases: BTreeMap<(String, IpAddr), String>,
    /// The life of each instance, by UID.
    pub lives: BTreeMap<String, String>,
    /// What each interface of each machine got at its last ADD, by life and interface: the UID of the claim and the addresses.
    pub served: BTreeMap<(String, Arc<str>), (String, Vec<IpAddr>)>,
    /// The UIDs of the claims that the user gave up: the interface was unplugged or moved, the claim was deleted by hand, or the
    /// VirtualMachine was deleted alone before a launcher of its instance referenced the claim. The next claim may have other
    /// addresses.
    pub given_up: BTreeSet<String>,
    /// `spec.network` of each claim when it was created, by UID.
    created_on: BTreeMap<String, Arc<str>>,
    /// The logical networks that VMs may have, each with its NAD.
    pub networks: Vec<(Arc<str>, NadRef)>,
    /// Whether the cluster comes to rest.
    pub settling: bool,
}

pub fn nad(name: &str) -> NadRef {
    NadRef::new(NAMESPACE, name)
}

pub fn key(name: &str) -> ObjectKey {
    ObjectKey::new(NAMESPACE, name)
}

/// The node that a pod runs on.
pub fn node_of(pod: &ClaimPod) -> String {
    let [one, other] = nodes().map(|node| node.node);
    if digest([pod.uid.as_str()]).is_multiple_of(2) { one } else { other }
}

pub fn nodes() -> [HolderRef; 2] {
    ["a", "b"].map(|node| HolderRef { node: node.to_owned(), uid: format!("node-{node}") })
}

fn pool(name: &str, subnets: &[&str], seed: u64) -> Pool {
    let ipam = IpamSpec {
        subnets: subnets.iter().map(|text| text.parse().unwrap()).collect(),
        ..IpamSpec::default()
    };
    let short = u8::try_from(seed % 2).unwrap();
    let length = |family| Some(if family == crate::ipam::Family::V4 { 30 - short } else { 126 - short });
    Pool::new(name, &ipam, length, true)
}

impl World {
    pub fn new(seed: u64) -> Self {
        let blue: &[&str] =
            if seed.is_multiple_of(3) { &["10.0.0.0/29"] } else { &["10.0.0.0/28", "fd00::/124"] };
        let pools = [("net-blue", "blue", blue), ("net-red", "red", &["10.1.0.0/29"])];
        let pools = pools.map(|(uid, name, subnets)| (uid.to_owned(), pool(name, subnets, seed)));
        let config = |name: &str| NadNetwork {
            name: name.to_owned(),
            persistent: true,
            ipam: NadIpam::Patchbay { network: name.to_owned() },
        };
        let nads = ["blue", "red"].map(|name| (nad(name), config(name)));
        let live = Arc::new(Objects { nads: nads.into(), ..Objects::default() });
        Self {
            history: vec![live.clone()],
            live,
            first: 0,
            clock: 0,
            next_uid: 0,
            pools: pools.into(),
            sandboxes: Vec::new(),
            reports: nodes().map(|node| (node.node, BTreeSet::new())).into(),
            down: BTreeSet::new(),
            leases: BTreeMap::new(),
            lives: BTreeMap::new(),
            served: BTreeMap::new(),
            given_up: BTreeSet::new(),
            created_on: BTreeMap::new(),
            networks: vec![("n1".into(), nad("blue")), ("N1".into(), nad("blue")), ("n2".into(), nad("red"))],
            settling: false,
        }
    }

    /// The number of the current version.
    pub fn revision(&self) -> usize {
        self.first + self.history.len() - 1
    }

    /// A version of the past, or the oldest that is known.
    pub fn at(&self, revision: usize) -> Arc<Objects> {
        let index = revision.saturating_sub(self.first).min(self.history.len() - 1);
        self.history[index].clone()
    }

    /// The oldest version that a snapshot may have.
    pub fn oldest(&self) -> usize {
        self.first
    }

    pub fn change<T>(&mut self, change: impl FnOnce(&mut Objects) -> T) -> T {
        let mut objects = (*self.live).clone();
        let result = change(&mut objects);
        self.live = Arc::new(objects);
        self.history.push(self.live.clone());
        if self.history.len() > MAX_HISTORY {
            self.history.remove(0);
            self.first += 1;
        }
        result
    }

    pub fn uid(&mut self) -> String {
        self.next_uid += 1;
        format!("uid-{}", self.next_uid)
    }

    /// A resourceVersion that no object had before.
    pub fn version(&self) -> String {
        (self.revision() + 1).to_string()
    }

    /// Objects are created in minutes, so that the time for which claims without a machine are kept passes.
    pub fn now(&self) -> Timestamp {
        Timestamp::from_second(i64::try_from(self.clock).unwrap() * 1200).unwrap()
    }

    pub fn network_uid(&self, name: &str) -> Option<String> {
        self.pools.iter().find(|(_, pool)| pool.name == name).map(|(uid, _)| uid.clone())
    }

    /// Time passes: sandboxes of gone pods go, network-status appears, and what the user gave up is noted.
    pub fn tick(&mut self) {
        self.clock += 1;
        self.give_up_unplugged();
        let clock = self.clock;
        self.sandboxes.retain(|sandbox| {
            let is_live = sandbox.until.is_none_or(|until| until > clock);
            is_live && (sandbox.running || clock < sandbox.since + MAX_DELAY)
        });
        let late = |sandbox: &&SandboxAddresses| {
            sandbox.running && sandbox.until.is_none() && clock >= sandbox.since + MAX_DELAY
        };
        let late: BTreeSet<ObjectKey> =
            self.sandboxes.iter().filter(late).map(|sandbox| sandbox.pod.clone()).collect();
        for pod in late {
            self.show(&pod);
        }
    }

    /// Writes the network-status of a pod.
    pub fn show(&mut self, pod: &ObjectKey) {
        let attached = self.sandboxes.iter().filter(|it| it.running && it.pod == *pod && it.until.is_none());
        let attached: Box<[_]> = attached
            .map(|it| crate::claims::Attached {
                interface: it.interface.clone(),
                nad: Some(it.nad.clone()),
                ips: it.addresses.clone().into(),
            })
            .collect();
        if self.live.pods.get(pod).is_some_and(|one| !one.has_status || one.attached != attached) {
            self.change(|objects| {
                let one = objects.pods.get_mut(pod).unwrap();
                (one.attached, one.has_status) = (attached, true);
            });
        }
    }

    /// The pod is gone; its sandbox stays for a moment.
    pub fn remove_pod(&mut self, pod: &ObjectKey) {
        self.change(|objects| objects.pods.remove(pod));
        let until = self.clock + 1 + self.clock % MAX_DELAY;
        for sandbox in self.sandboxes.iter_mut().filter(|it| it.pod == *pod) {
            sandbox.until.get_or_insert(until);
        }
    }

    /// Deletes a claim as the API server does.
    pub fn delete_claim(&mut self, key: &ObjectKey) {
        let version = self.version();
        self.change(|objects| {
            let Some(claim) = objects.claims.get_mut(key) else { return };
            if claim.finalizers.is_empty() {
                objects.claims.remove(key);
            } else if !claim.deleting {
                (claim.deleting, claim.version) = (true, version);
            }
        });
    }

    /// Notes the claims whose interface the template of the VirtualMachine does not have, or has on another network.
    fn give_up_unplugged(&mut self) {
        for claim in self.live.claims.values() {
            let created_on =
                self.created_on.entry(claim.uid.clone()).or_insert_with(|| claim.network.clone());
            let Some(owner) = &claim.owner else { continue };
            let Some(vm) = self.live.vms.values().find(|vm| vm.facts.uid == owner.uid) else { continue };
            let is_plugged = vm.facts.networks.iter().any(|network| {
                network.pod_interface == claim.interface
                    && !network.absent
                    && *network.nad.name == **created_on
            });
            if !is_plugged {
                self.given_up.insert(claim.uid.clone());
            }
        }
    }

    /// Creates a block, unless one has the name.
    pub fn create_block(
        &mut self,
        uid: &str,
        range: IpNet,
        holder: HolderRef,
        lender: Option<HolderRef>,
    ) -> bool {
        let network = self.pools[uid].name.clone();
        let name = ipblock::name(&network, range);
        if self.live.blocks.contains_key(&name) {
            return false;
        }
        let spec = IPBlockSpec {
            network,
            network_uid: uid.to_owned(),
            cidr: range,
            holder,
            lender,
            boot_id: String::new(),
        };
        let object = ObservedIpBlock { uid: self.uid(), spec, status: IPBlockStatus::default() };
        let block = BlockState { version: self.version(), object };
        self.change(|objects| objects.blocks.insert(name, block));
        true
    }
}
