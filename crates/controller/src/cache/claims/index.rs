//! The index of claims, virtual machines and pods. Every change returns what it concerns.

mod pods;
mod snapshot;

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use api::{ipamclaim::FINALIZER, ipblock::HolderRef, selection::NadRef};
use jiff::Timestamp;
use plan::{
    claims::{
        ClaimPod, ClaimState, MachineNetwork, ObjectKey, OwnerKind, ReservedIn, Resolution, VmFacts,
        VmiFacts, Wanted,
        machine::{KindState, KindsKnown},
        names,
    },
    network::BlockState,
};

use super::ClaimWork;

/// How long a deleted claim may keep the finalizer before it counts as stuck.
const STUCK_AFTER: Duration = Duration::from_secs(60);

type Work = Vec<ClaimWork>;

/// See the module.
pub struct ClaimIndex {
    vms: HashMap<ObjectKey, Arc<VmFacts>>,
    vmis: HashMap<ObjectKey, Arc<VmiFacts>>,
    claims: HashMap<ObjectKey, Arc<ClaimState>>,
    by_uid: HashMap<Arc<str>, ObjectKey>,
    /// The claims of each machine, by the name of their owner.
    of_machine: HashMap<ObjectKey, BTreeSet<ObjectKey>>,
    /// The claims without an owner that we made before, by their namespace and their label.
    of_label: HashMap<ObjectKey, BTreeSet<ObjectKey>>,
    /// Since when each deleted claim has been known to be deleted.
    deleting_since: HashMap<ObjectKey, Timestamp>,
    pods: HashMap<ObjectKey, Arc<ClaimPod>>,
    /// By the claim that a pod refers to.
    pods_of_claim: HashMap<ObjectKey, BTreeSet<ObjectKey>>,
    /// By the instance that controls a launcher.
    pods_of_machine: HashMap<ObjectKey, BTreeSet<ObjectKey>>,
    /// The pods of the list in progress; None between lists.
    listing: Option<HashSet<ObjectKey>>,
    /// The machines that name a NAD.
    nads: HashMap<NadRef, BTreeSet<ObjectKey>>,
    resolutions: HashMap<ObjectKey, Resolution>,
    /// The claims with a resolution of each machine.
    resolved: HashMap<ClaimWork, BTreeSet<ObjectKey>>,
    /// By the UID of the network.
    on_network: HashMap<Arc<str>, BTreeSet<ObjectKey>>,
    /// By the name of the block.
    reserved: HashMap<Arc<str>, ReservingBlock>,
    /// The networks whose claims wait for addresses.
    waiting: HashSet<Arc<str>>,
    kinds: KindsKnown,
}

impl Default for ClaimIndex {
    fn default() -> Self {
        Self {
            vms: HashMap::new(),
            vmis: HashMap::new(),
            claims: HashMap::new(),
            by_uid: HashMap::new(),
            of_machine: HashMap::new(),
            of_label: HashMap::new(),
            deleting_since: HashMap::new(),
            pods: HashMap::new(),
            pods_of_claim: HashMap::new(),
            pods_of_machine: HashMap::new(),
            listing: None,
            nads: HashMap::new(),
            resolutions: HashMap::new(),
            resolved: HashMap::new(),
            on_network: HashMap::new(),
            reserved: HashMap::new(),
            waiting: HashSet::new(),
            kinds: KindsKnown { vm: KindState::NotServed, vmi: KindState::NotServed },
        }
    }
}

/// What a reconcile of the addresses of a network reads.
#[derive(Debug, Default)]
pub struct NetworkSnapshot {
    /// The claims that get addresses of it.
    pub wanted: Vec<Wanted>,
    /// The same claims, each with the pods that refer to it.
    pub claims: Vec<(Arc<ClaimState>, Vec<Arc<ClaimPod>>)>,
}

/// A block that has addresses of claims.
struct ReservingBlock {
    /// The UID of its network.
    network: Arc<str>,
    network_name: Arc<str>,
    /// The UIDs of the claims.
    claims: HashSet<Arc<str>>,
}

fn insert(map: &mut HashMap<ObjectKey, BTreeSet<ObjectKey>>, at: ObjectKey, key: &ObjectKey) {
    map.entry(at).or_default().insert(key.clone());
}

fn remove(map: &mut HashMap<ObjectKey, BTreeSet<ObjectKey>>, at: &ObjectKey, key: &ObjectKey) {
    if let Some(all) = map.get_mut(at) {
        all.remove(key);
        if all.is_empty() {
            map.remove(at);
        }
    }
}

/// Where the index has a claim. It depends on the claim alone, so that what else is known does not matter.
enum ClaimEntry {
    /// Namespace and name of the owner.
    Owner(ObjectKey),
    /// Namespace and label.
    Label(ObjectKey),
}

impl ClaimEntry {
    fn key(&self) -> &ObjectKey {
        match self {
            Self::Owner(key) | Self::Label(key) => key,
        }
    }
}

fn entry_of(claim: &ClaimState) -> Option<ClaimEntry> {
    let namespace = claim.key.namespace.clone();
    match &claim.owner {
        Some(owner) if owner.kind == OwnerKind::Other => None,
        Some(owner) => Some(ClaimEntry::Owner(ObjectKey { namespace, name: owner.name.clone() })),
        None => {
            let ours = claim.finalizers.iter().any(|one| one == FINALIZER);
            let name = claim.label.clone().filter(|_| ours)?;
            Some(ClaimEntry::Label(ObjectKey { namespace, name }))
        }
    }
}

impl ClaimIndex {
    pub fn vm(&self, key: &ObjectKey) -> Option<&Arc<VmFacts>> {
        self.vms.get(key)
    }

    pub fn vmi(&self, key: &ObjectKey) -> Option<&Arc<VmiFacts>> {
        self.vmis.get(key)
    }

    pub fn claim(&self, key: &ObjectKey) -> Option<&Arc<ClaimState>> {
        self.claims.get(key)
    }

    pub fn kinds(&self) -> KindsKnown {
        self.kinds
    }

    /// The claims of a machine, by their owner or their label.
    pub fn claims_of(&self, machine: &ObjectKey) -> Vec<Arc<ClaimState>> {
        let owned = self.of_machine.get(machine).into_iter().flatten();
        let label = names::label_value(&machine.name);
        // The label of a machine with a long name can be the name of another machine.
        let is_other = label == *machine.name && self.long_name_of(&machine.namespace, &label).is_some();
        let label = ObjectKey { namespace: machine.namespace.clone(), name: label.into() };
        let labelled = self.of_label.get(&label).filter(|_| !is_other).into_iter().flatten();
        owned.chain(labelled).filter_map(|key| self.claims.get(key)).cloned().collect()
    }

    /// The machine whose name is too long for a label, and is shortened to this one.
    fn long_name_of(&self, namespace: &str, label: &str) -> Option<&ObjectKey> {
        self.vms.keys().chain(self.vmis.keys()).find(|key| {
            *key.namespace == *namespace
                && *key.name != *label
                && label.len() < key.name.len()
                && names::label_value(&key.name) == label
        })
    }

    /// The pods whose controller is an instance of this name, and those that refer to one of these claims.
    pub fn pods_of(&self, machine: &ObjectKey, claims: &[Arc<ClaimState>]) -> Vec<Arc<ClaimPod>> {
        let launchers = self.pods_of_machine.get(machine).into_iter().flatten();
        let referring = claims.iter().filter_map(|claim| self.pods_of_claim.get(&claim.key)).flatten();
        let keys: BTreeSet<&ObjectKey> = launchers.chain(referring).collect();
        keys.into_iter().filter_map(|key| self.pods.get(key)).cloned().collect()
    }

    /// The pods that refer to a claim.
    pub fn pods_of_claim(&self, claim: &ObjectKey) -> Vec<Arc<ClaimPod>> {
        let keys = self.pods_of_claim.get(claim).into_iter().flatten();
        keys.filter_map(|key| self.pods.get(key)).cloned().collect()
    }

    /// All pods that are launchers or refer to a claim.
    pub fn pods(&self) -> impl Iterator<Item = &ClaimPod> {
        self.pods.values().map(Arc::as_ref)
    }

    /// The claim of a UID.
    pub fn claim_of_uid(&self, uid: &str) -> Option<&Arc<ClaimState>> {
        self.claims.get(self.by_uid.get(uid)?)
    }

    /// The network whose blocks have a reservation for the claim of this UID.
    pub fn reserved_in(&self, uid: &str) -> Option<ReservedIn> {
        let block = self.reserved.values().find(|block| block.claims.contains(uid))?;
        Some(ReservedIn { network: block.network.to_string(), network_name: block.network_name.to_string() })
    }

    /// The machine that a claim belongs to now. A claim without an owner that we made before belongs to that of its label.
    fn machine_of(&self, claim: &ClaimState) -> Option<ObjectKey> {
        match entry_of(claim)? {
            ClaimEntry::Owner(machine) => Some(machine),
            ClaimEntry::Label(label) => {
                Some(self.long_name_of(&label.namespace, &label.name).cloned().unwrap_or(label))
            }
        }
    }

    /// The index that has an entry.
    fn entries(&mut self, entry: &ClaimEntry) -> &mut HashMap<ObjectKey, BTreeSet<ObjectKey>> {
        match entry {
            ClaimEntry::Owner(_) => &mut self.of_machine,
            ClaimEntry::Label(_) => &mut self.of_label,
        }
    }

    fn work_of(&self, claim: &ClaimState) -> ClaimWork {
        match self.machine_of(claim) {
            Some(machine) => ClaimWork::Machine(machine),
            None => ClaimWork::Lone(claim.key.clone()),
        }
    }

    fn network_of(&self, claim: &ObjectKey) -> Option<ClaimWork> {
        match self.resolutions.get(claim)? {
            Resolution::Allocate { network, .. } => Some(ClaimWork::Network(network.as_str().into())),
            Resolution::NotOurs | Resolution::Failed { .. } => None,
        }
    }

    /// The networks that have a reservation for a claim.
    fn reserving(&self, uid: &str) -> Work {
        let blocks = self.reserved.values().filter(|block| block.claims.contains(uid));
        let networks: BTreeSet<&Arc<str>> = blocks.map(|block| &block.network).collect();
        networks.into_iter().cloned().map(ClaimWork::Network).collect()
    }

    pub fn machines_and_lone(&self) -> Work {
        let machines = self.vms.keys().chain(self.vmis.keys()).cloned().map(ClaimWork::Machine);
        let work: BTreeSet<ClaimWork> =
            machines.chain(self.claims.values().map(|claim| self.work_of(claim))).collect();
        work.into_iter().collect()
    }

    pub fn everything(&mut self) -> Work {
        let mut work = self.machines_and_lone();
        let networks: BTreeSet<&Arc<str>> =
            self.on_network.keys().chain(self.reserved.values().map(|block| &block.network)).collect();
        work.extend(networks.into_iter().cloned().map(ClaimWork::Network));
        work
    }

    pub fn users_of(&self, nad: &NadRef) -> Work {
        let machines = self.nads.get(nad).into_iter().flatten().cloned();
        let mut work: Work = machines.map(ClaimWork::Machine).collect();
        let lone = self.claims.values().filter(|claim| *claim.key.namespace == *nad.namespace);
        work.extend(lone.map(|claim| self.work_of(claim)).filter(|work| matches!(work, ClaimWork::Lone(_))));
        work
    }

    pub fn set_vm(&mut self, key: &ObjectKey, new: Option<VmFacts>) -> Work {
        let new = new.map(Arc::new);
        let old = match &new {
            Some(new) => self.vms.insert(key.clone(), Arc::clone(new)),
            None => self.vms.remove(key),
        };
        if old == new {
            return Vec::new();
        }
        self.reindex_nads(key, old.as_deref().map_or(&[][..], |vm| &vm.networks[..]));
        vec![ClaimWork::Machine(key.clone())]
    }

    pub fn set_vmi(&mut self, key: &ObjectKey, new: Option<VmiFacts>) -> Work {
        let new = new.map(Arc::new);
        let old = match &new {
            Some(new) => self.vmis.insert(key.clone(), Arc::clone(new)),
            None => self.vmis.remove(key),
        };
        if old == new {
            return Vec::new();
        }
        self.reindex_nads(key, old.as_deref().map_or(&[][..], |vmi| &vmi.networks[..]));
        vec![ClaimWork::Machine(key.clone())]
    }

    /// Updates the NADs of a machine, whose VirtualMachine or instance had these networks before.
    fn reindex_nads(&mut self, key: &ObjectKey, old: &[MachineNetwork]) {
        for network in old {
            if let Some(machines) = self.nads.get_mut(&network.nad) {
                machines.remove(key);
                if machines.is_empty() {
                    self.nads.remove(&network.nad);
                }
            }
        }
        let vm = self.vms.get(key).into_iter().flat_map(|vm| vm.networks.iter());
        let vmi = self.vmis.get(key).into_iter().flat_map(|vmi| vmi.networks.iter());
        for network in vm.chain(vmi) {
            self.nads.entry(network.nad.clone()).or_default().insert(key.clone());
        }
    }

    pub fn set_claim(&mut self, key: &ObjectKey, new: Option<ClaimState>) -> Work {
        let new = new.map(Arc::new);
        let old = match &new {
            Some(new) => self.claims.insert(key.clone(), Arc::clone(new)),
            None => self.claims.remove(key),
        };
        if old == new {
            return Vec::new();
        }
        let mut work: Work = self.network_of(key).into_iter().collect();
        if let Some(old) = &old {
            if let Some(entry) = entry_of(old) {
                remove(self.entries(&entry), entry.key(), key);
            }
            if new.as_ref().is_none_or(|new| new.uid != old.uid) {
                self.by_uid.remove(old.uid.as_str());
                self.deleting_since.remove(key);
                work.extend(self.reserving(&old.uid));
            }
            work.push(self.work_of(old));
        }
        if let Some(new) = &new {
            if let Some(entry) = entry_of(new) {
                insert(self.entries(&entry), entry.key().clone(), key);
            }
            self.by_uid.insert(new.uid.as_str().into(), key.clone());
            if new.deleting {
                self.deleting_since.entry(key.clone()).or_insert_with(Timestamp::now);
            }
            work.push(self.work_of(new));
        } else {
            self.forget_resolution(key);
        }
        work.dedup();
        work
    }

    fn forget_resolution(&mut self, key: &ObjectKey) {
        if let Some(Resolution::Allocate { network, .. }) = self.resolutions.remove(key)
            && let Some(claims) = self.on_network.get_mut(network.as_str())
        {
            claims.remove(key);
            if claims.is_empty() {
                self.on_network.remove(network.as_str());
            }
        }
    }

    pub fn set_resolutions(
        &mut self,
        work: &ClaimWork,
        resolutions: impl IntoIterator<Item = (ObjectKey, Resolution)>,
    ) -> Work {
        let mut changed = Vec::new();
        let mut resolved = BTreeSet::new();
        for (key, resolution) in resolutions {
            resolved.insert(key.clone());
            if self.resolutions.get(&key) == Some(&resolution) {
                continue;
            }
            changed.extend(self.network_of(&key));
            self.forget_resolution(&key);
            if let Resolution::Allocate { network, .. } = &resolution {
                self.on_network.entry(network.as_str().into()).or_default().insert(key.clone());
            }
            self.resolutions.insert(key.clone(), resolution);
            changed.extend(self.network_of(&key));
        }
        let before = if resolved.is_empty() {
            self.resolved.remove(work)
        } else {
            self.resolved.insert(work.clone(), resolved.clone())
        };
        for key in before.into_iter().flatten().filter(|key| !resolved.contains(key)) {
            // Another machine may have the name now.
            let taken = self.resolved.iter().any(|(other, keys)| other != work && keys.contains(&key));
            if !taken {
                changed.extend(self.network_of(&key));
                self.forget_resolution(&key);
            }
        }
        changed.sort_unstable();
        changed.dedup();
        changed
    }

    pub fn forget_plans(&mut self) {
        self.resolutions.clear();
        self.resolved.clear();
        self.on_network.clear();
        self.waiting.clear();
    }

    pub fn set_waiting(&mut self, network: &str, waiting: bool) {
        if waiting {
            self.waiting.insert(network.into());
        } else {
            self.waiting.remove(network);
        }
    }

    pub fn set_block(&mut self, name: &str, block: &BlockState) -> Work {
        let spec = &block.object.spec;
        let ours = spec.holder.is_claims() || spec.lender.as_ref().is_some_and(HolderRef::is_claims);
        let network: Arc<str> = spec.network_uid.as_str().into();
        let uids: HashSet<Arc<str>> =
            block.object.status.claims.iter().map(|claimed| claimed.uid.as_str().into()).collect();
        if spec.holder.is_claims() && !uids.is_empty() {
            let block = ReservingBlock {
                network: network.clone(),
                network_name: spec.network.as_str().into(),
                claims: uids,
            };
            self.reserved.insert(name.into(), block);
        } else {
            self.reserved.remove(name);
        }
        if ours || self.waiting.contains(&network) { vec![ClaimWork::Network(network)] } else { Vec::new() }
    }

    pub fn delete_block(&mut self, name: &str) -> Work {
        let mut networks: BTreeSet<Arc<str>> = self.waiting.iter().cloned().collect();
        networks.extend(self.reserved.remove(name).map(|block| block.network));
        networks.into_iter().map(ClaimWork::Network).collect()
    }

    pub fn set_kinds(&mut self, set: impl FnOnce(&mut KindsKnown)) -> Work {
        let before = self.kinds;
        set(&mut self.kinds);
        if before == self.kinds { Vec::new() } else { self.machines_and_lone() }
    }

    pub fn missing_vms(&self, listed: &HashSet<ObjectKey>) -> Vec<ObjectKey> {
        self.vms.keys().filter(|key| !listed.contains(key)).cloned().collect()
    }

    pub fn missing_vmis(&self, listed: &HashSet<ObjectKey>) -> Vec<ObjectKey> {
        self.vmis.keys().filter(|key| !listed.contains(key)).cloned().collect()
    }

    pub fn missing_claims(&self, listed: &HashSet<ObjectKey>) -> Vec<ObjectKey> {
        self.claims.keys().filter(|key| !listed.contains(key)).cloned().collect()
    }
}
