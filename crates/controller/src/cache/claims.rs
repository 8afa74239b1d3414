//! The IPAMClaims with their virtual machines and pods: what the controller for claims and both webhooks read.
//!
//! Pods and virtual machines are many, so this cache has its own lock. Every change marks what it concerns in the queue.

mod index;
pub mod project;
#[cfg(test)]
mod tests;
mod watches;

use std::{
    collections::HashSet,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use api::selection::NadRef;
use jiff::Timestamp;
use plan::{
    claims::{ClaimPod, ClaimState, ObjectKey, Resolution, VmFacts, VmiFacts, machine::KindState},
    network::BlockState,
};

pub use self::index::{ClaimIndex, NetworkSnapshot};
use crate::{
    metrics::ClaimTotals,
    queue::{QueueKey, WorkQueue},
};

/// What is reconciled at a time.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ClaimWork {
    /// The claims of the virtual machine of this name.
    Machine(ObjectKey),
    /// A claim that no virtual machine owns.
    Lone(ObjectKey),
    /// The addresses of the claims on the network of this UID.
    Network(Arc<str>),
}

/// All claims share the workers.
impl QueueKey for ClaimWork {
    type Group = ();
    const MAX_RUNNING_PER_GROUP: usize = usize::MAX;

    fn group(&self) {}
}

impl fmt::Display for ClaimWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Machine(key) => write!(f, "virtual machine {key}"),
            Self::Lone(key) => write!(f, "IPAMClaim {key}"),
            Self::Network(uid) => write!(f, "network {uid}"),
        }
    }
}

/// The claims, their virtual machines and their pods.
#[derive(Default)]
pub struct ClaimCache {
    index: Mutex<ClaimIndex>,
    queue: WorkQueue<ClaimWork>,
}

impl ClaimCache {
    /// What has to be reconciled.
    pub fn queue(&self) -> &WorkQueue<ClaimWork> {
        &self.queue
    }

    /// Reads the index. `read` must be short, and must not lock the rest of the cache.
    pub fn read<T>(&self, read: impl FnOnce(&ClaimIndex) -> T) -> T {
        read(&self.lock())
    }

    /// What a reconcile of a network reads.
    pub fn network(&self, uid: &str) -> NetworkSnapshot {
        self.lock().network(uid)
    }

    /// Forgets what a leader planned. The next one plans everything again.
    pub fn forget_plans(&self) {
        self.lock().forget_plans();
    }

    /// Marks everything: a new leader has reconciled nothing.
    pub fn mark_all(&self) {
        self.change(ClaimIndex::everything);
    }

    /// Marks the machines and claims whose network may have changed, and the addresses of the network itself.
    pub fn mark_network(&self, uid: &str) {
        self.change(|index| {
            let mut work = index.machines_and_lone();
            work.push(ClaimWork::Network(uid.into()));
            work
        });
    }

    /// Marks what uses this NAD.
    pub fn mark_nad(&self, nad: &NadRef) {
        self.change(|index| index.users_of(nad));
    }

    /// Records the networks of a machine's claims. Claims that it had before and that are missing have none.
    pub fn set_resolutions(
        &self,
        work: &ClaimWork,
        resolutions: impl IntoIterator<Item = (ObjectKey, Resolution)>,
    ) {
        self.change(|index| index.set_resolutions(work, resolutions));
    }

    /// Whether a claim on this network waits for an address, so that any change of its blocks matters.
    pub fn set_waiting(&self, network: &str, waiting: bool) {
        self.lock().set_waiting(network, waiting);
    }

    pub fn apply_pod(&self, namespace: &str, name: &str, uid: &str, pod: Option<&ClaimPod>) {
        self.change(|index| index.apply_pod(namespace, name, uid, pod));
    }

    pub fn delete_pod(&self, namespace: &str, name: &str) {
        self.change(|index| index.delete_pod(&ObjectKey::new(namespace, name)));
    }

    pub fn start_pod_list(&self) {
        self.lock().start_pod_list();
    }

    pub fn finish_pod_list(&self) {
        self.change(ClaimIndex::finish_pod_list);
    }

    /// Records what a block reserves.
    pub fn set_block(&self, name: &str, block: &BlockState) {
        self.change(|index| index.set_block(name, block));
    }

    pub fn delete_block(&self, name: &str) {
        self.change(|index| index.delete_block(name));
    }

    /// The numbers for the metrics.
    pub fn totals(&self, now: Timestamp) -> ClaimTotals {
        self.lock().totals(now)
    }

    pub fn set_vm(&self, key: &ObjectKey, new: Option<VmFacts>) {
        self.change(|index| index.set_vm(key, new));
    }

    pub fn set_vmi(&self, key: &ObjectKey, new: Option<VmiFacts>) {
        self.change(|index| index.set_vmi(key, new));
    }

    pub fn set_claim(&self, key: &ObjectKey, new: Option<ClaimState>) {
        self.change(|index| index.set_claim(key, new));
    }

    fn retain_vms(&self, listed: &HashSet<ObjectKey>) {
        let gone = self.lock().missing_vms(listed);
        for key in gone {
            self.set_vm(&key, None);
        }
    }

    fn retain_vmis(&self, listed: &HashSet<ObjectKey>) {
        let gone = self.lock().missing_vmis(listed);
        for key in gone {
            self.set_vmi(&key, None);
        }
    }

    fn retain_claims(&self, listed: &HashSet<ObjectKey>) {
        let gone = self.lock().missing_claims(listed);
        for key in gone {
            self.set_claim(&key, None);
        }
    }

    pub fn set_vm_kind(&self, state: KindState) {
        self.change(|index| index.set_kinds(|kinds| kinds.vm = state));
    }

    pub fn set_vmi_kind(&self, state: KindState) {
        self.change(|index| index.set_kinds(|kinds| kinds.vmi = state));
    }

    fn change(&self, change: impl FnOnce(&mut ClaimIndex) -> Vec<ClaimWork>) {
        let work = change(&mut self.lock());
        for key in work {
            self.queue.mark_after(&key, Duration::ZERO);
        }
    }

    fn lock(&self) -> MutexGuard<'_, ClaimIndex> {
        // Nothing that holds the lock can panic in the middle of a change.
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
