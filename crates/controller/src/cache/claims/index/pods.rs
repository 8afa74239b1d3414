//! The pods of the index.

use std::{
    collections::{BTreeSet, HashSet},
    sync::Arc,
};

use plan::claims::{ClaimPod, ObjectKey, OwnerKind};

use super::{ClaimIndex, Work, insert, remove};
use crate::cache::claims::ClaimWork;

impl ClaimIndex {
    pub fn apply_pod(&mut self, namespace: &str, name: &str, uid: &str, pod: Option<&ClaimPod>) -> Work {
        let key = ObjectKey::new(namespace, name);
        if let Some(listing) = &mut self.listing {
            listing.insert(key.clone());
        }
        let old = self.pods.get(&key);
        if old.map(Arc::as_ref) == pod {
            return Vec::new();
        }
        let Some(pod) = pod else {
            // A pod that referred to a claim holds its addresses until it is gone.
            return if old.is_some_and(|old| old.uid != uid) { self.delete_pod(&key) } else { Vec::new() };
        };
        let mut work = self.delete_pod(&key);
        for claim in pod.claim_names() {
            let claim = ObjectKey { namespace: key.namespace.clone(), name: claim.clone() };
            insert(&mut self.pods_of_claim, claim, &key);
        }
        if let Some(machine) = machine_of_pod(pod) {
            insert(&mut self.pods_of_machine, machine, &key);
        }
        self.pods.insert(key, Arc::new(pod.clone()));
        work.extend(self.work_of_pod(pod));
        work.sort_unstable();
        work.dedup();
        work
    }

    pub fn delete_pod(&mut self, key: &ObjectKey) -> Work {
        let Some(pod) = self.pods.remove(key) else { return Vec::new() };
        for claim in pod.claim_names() {
            let claim = ObjectKey { namespace: key.namespace.clone(), name: claim.clone() };
            remove(&mut self.pods_of_claim, &claim, key);
        }
        if let Some(machine) = machine_of_pod(&pod) {
            remove(&mut self.pods_of_machine, &machine, key);
        }
        self.work_of_pod(&pod)
    }

    /// What a change of a pod concerns: its machine, and the claims that it refers to.
    fn work_of_pod(&self, pod: &ClaimPod) -> Work {
        let mut work: Work = machine_of_pod(pod).map(ClaimWork::Machine).into_iter().collect();
        for claim in pod.claim_names() {
            let key = ObjectKey { namespace: pod.key.namespace.clone(), name: claim.clone() };
            work.extend(self.network_of(&key));
            work.extend(self.claims.get(&key).map(|claim| self.work_of(claim)));
        }
        // The claim may be gone while its addresses are reserved until the pod is gone.
        if !pod.attached.is_empty() || !pod.elements.is_empty() {
            let is_gone = |uid: &Arc<str>| !self.by_uid.contains_key(uid);
            let blocks = self.reserved.values().filter(|block| block.claims.iter().any(is_gone));
            let networks: BTreeSet<&Arc<str>> = blocks.map(|block| &block.network).collect();
            work.extend(networks.into_iter().cloned().map(ClaimWork::Network));
        }
        work
    }

    pub fn start_pod_list(&mut self) {
        self.listing = Some(HashSet::new());
    }

    pub fn finish_pod_list(&mut self) -> Work {
        let Some(listed) = self.listing.take() else { return Vec::new() };
        let gone: Vec<ObjectKey> = self.pods.keys().filter(|key| !listed.contains(key)).cloned().collect();
        gone.iter().flat_map(|key| self.delete_pod(key)).collect()
    }
}

/// The name of the instance that controls a launcher, which is also that of its VirtualMachine.
fn machine_of_pod(pod: &ClaimPod) -> Option<ObjectKey> {
    let controller = pod.controller.as_ref().filter(|it| it.kind == OwnerKind::VirtualMachineInstance)?;
    Some(ObjectKey { namespace: pod.key.namespace.clone(), name: controller.name.clone() })
}
