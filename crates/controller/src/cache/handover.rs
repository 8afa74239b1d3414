//! Hands the indexes of pods over from one watch of pods to another, without a gap.
//!
//! The old watch maintains the index until the new one has listed all pods. The two watches are at different
//! resourceVersions, so each pod is taken from the one that is ahead: the index never moves back to an older state of a pod,
//! and never loses one that exists.

use std::collections::{HashMap, HashSet};

use plan::{
    claims::ClaimPod,
    users::{WorkloadKind, WorkloadRefs},
};

use super::{UserCache, claims::ClaimCache};

/// What the metadata of a pod say.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PodRecord {
    pub uid: String,
    pub refs: WorkloadRefs,
    /// Of a launcher, and of a pod that refers to a claim.
    pub claims: Option<Box<ClaimPod>>,
}

/// The indexes of what the metadata of pods say.
#[derive(Clone, Copy)]
pub struct PodIndexes<'a> {
    pub users: &'a UserCache,
    pub claims: &'a ClaimCache,
}

impl PodIndexes<'_> {
    /// Returns whether the users of networks changed.
    pub fn apply(&self, pod: &PodRecord) -> bool {
        self.claims.apply_pod(&pod.refs.namespace, &pod.refs.name, &pod.uid, pod.claims.as_deref());
        self.users.apply(WorkloadKind::Pod, &pod.refs)
    }

    /// Returns whether the users of networks changed.
    pub fn delete(&self, namespace: &str, name: &str) -> bool {
        self.claims.delete_pod(namespace, name);
        self.users.delete(WorkloadKind::Pod, namespace, name)
    }

    pub fn start_relist(&self) {
        self.claims.start_pod_list();
        self.users.start_relist(WorkloadKind::Pod);
    }

    /// Returns whether the users of networks changed.
    pub fn finish_relist(&self) -> bool {
        self.claims.finish_pod_list();
        self.users.finish_relist(WorkloadKind::Pod)
    }
}

type PodKey = (String, String);

/// After how many pods other watches get their turn.
const BATCH: usize = 500;

/// What both watches delivered while the new one listed.
#[derive(Default)]
pub struct Handover {
    /// The pods of the new watch's list that an index has.
    listed: Vec<PodRecord>,
    /// The last change of each pod that the old watch delivered, by its resourceVersion; None if the pod was deleted.
    changes: HashMap<PodKey, (u64, Option<PodRecord>)>,
}

/// The changes that the old watch delivered before the new one: the new one delivers them again.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ReplayedChanges(HashMap<PodKey, u64>);

fn key(refs: &WorkloadRefs) -> PodKey {
    (refs.namespace.clone(), refs.name.clone())
}

impl Handover {
    /// The new watch starts a list.
    pub fn start_list(&mut self) {
        self.listed.clear();
    }

    /// The new watch lists a pod.
    pub fn list(&mut self, pod: &PodRecord) {
        // A relist removes the others.
        let refs = &pod.refs;
        if refs.networks.is_some() || refs.default_network.is_some() || pod.claims.is_some() {
            self.listed.push(pod.clone());
        }
    }

    /// The old watch delivers a change, which the index has already.
    pub fn applied(&mut self, pod: &PodRecord, position: Option<u64>) {
        self.changes.insert(key(&pod.refs), (position.unwrap_or_default(), Some(pod.clone())));
    }

    pub fn deleted(&mut self, refs: &WorkloadRefs, position: Option<u64>) {
        self.changes.insert(key(refs), (position.unwrap_or_default(), None));
    }

    /// Brings the indexes to the state of the new watch, whose list is complete at `position`, or to that of the old watch
    /// for pods that changed since. Returns whether that changed the users of networks.
    pub async fn complete(self, indexes: PodIndexes<'_>, position: Option<u64>) -> (bool, ReplayedChanges) {
        let Self { listed, mut changes } = self;
        let position = position.unwrap_or(u64::MAX);
        changes.retain(|_, (version, _)| *version > position);
        let mut changed = false;
        indexes.start_relist();
        let newer: HashSet<PodKey> = changes.keys().cloned().collect();
        for batch in listed.chunks(BATCH) {
            for pod in batch.iter().filter(|pod| !newer.contains(&key(&pod.refs))) {
                changed |= indexes.apply(pod);
            }
            tokio::task::yield_now().await;
        }
        for pod in changes.values().filter_map(|(_, pod)| pod.as_ref()) {
            changed |= indexes.apply(pod);
        }
        changed |= indexes.finish_relist();
        (changed, ReplayedChanges(changes.into_iter().map(|(key, (version, _))| (key, version)).collect()))
    }
}

impl ReplayedChanges {
    /// Whether the old watch delivered a change of this pod that is at least as new.
    pub fn contains(&mut self, refs: &WorkloadRefs, position: Option<u64>) -> bool {
        if self.0.is_empty() {
            return false;
        }
        let Some(position) = position else { return false };
        let replayed = self.0.get(&key(refs)).is_some_and(|version| position <= *version);
        // Positions only grow, so the rest cannot be delivered again.
        self.0.retain(|_, version| *version > position);
        replayed
    }

    /// The watch lists again: nothing is replayed.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use api::selection::NadRef;
    use plan::users::UserLookup as _;

    use super::*;

    fn pod(name: &str, networks: Option<&str>) -> PodRecord {
        let refs = WorkloadRefs {
            namespace: "ns".to_owned(),
            name: name.to_owned(),
            networks: networks.map(str::to_owned),
            ..WorkloadRefs::default()
        };
        PodRecord { uid: name.to_owned(), refs, claims: None }
    }

    async fn complete(
        handover: Handover,
        users: &UserCache,
        position: Option<u64>,
    ) -> (bool, ReplayedChanges) {
        let claims = ClaimCache::default();
        handover.complete(PodIndexes { users, claims: &claims }, position).await
    }

    fn uses(users: &UserCache, name: &str) -> bool {
        !users.references_of(WorkloadKind::Pod, "ns", name).is_empty()
    }

    /// An index with these pods, all users of one NAD.
    fn users(names: &[&str]) -> UserCache {
        let users = UserCache::default();
        for name in names {
            users.apply(WorkloadKind::Pod, &pod(name, Some("blue")).refs);
        }
        users
    }

    #[tokio::test]
    async fn a_pod_of_both_watches_stays_and_one_that_neither_has_is_removed() {
        let users = users(&["both", "gone"]);
        let mut handover = Handover::default();
        handover.list(&pod("both", Some("blue")));
        handover.list(&pod("new", Some("blue")));
        handover.list(&pod("plain", None));
        let (changed, replayed) = complete(handover, &users, Some(10)).await;
        assert!(changed && uses(&users, "both") && uses(&users, "new") && !uses(&users, "gone"));
        assert_eq!((users.len(), replayed), (2, ReplayedChanges::default()));
    }

    #[tokio::test]
    async fn a_change_after_the_list_is_kept_and_its_replay_ignored() {
        // The list is at version 10; the old watch is ahead.
        let users = users(&["created"]);
        let mut handover = Handover::default();
        handover.list(&pod("deleted", Some("blue")));
        handover.list(&pod("attached", None));
        handover.applied(&pod("created", Some("blue")), Some(11));
        handover.deleted(&pod("deleted", Some("blue")).refs, Some(12));
        users.apply(WorkloadKind::Pod, &pod("attached", Some("blue")).refs);
        handover.applied(&pod("attached", Some("blue")), Some(14));
        let (changed, mut replayed) = complete(handover, &users, Some(10)).await;
        assert!(!changed && uses(&users, "created") && !uses(&users, "deleted") && uses(&users, "attached"));
        assert!(users.is_used(&NadRef::new("ns", "blue")));
        assert!(replayed.contains(&pod("created", Some("blue")).refs, Some(11)));
        assert!(replayed.contains(&pod("attached", None).refs, Some(13)), "an older state");
        assert!(replayed.contains(&pod("attached", Some("blue")).refs, Some(14)));
        assert!(!replayed.contains(&pod("attached", None).refs, Some(15)));
        assert_eq!(replayed, ReplayedChanges::default(), "nothing is left to ignore");
    }

    #[tokio::test]
    async fn a_deletion_that_only_the_list_shows_removes_the_pod() {
        // The old watch delivered version 8 of the pod; it was deleted at 9, and the list is at 10.
        let users = users(&["deleted"]);
        let mut handover = Handover::default();
        handover.applied(&pod("deleted", Some("blue")), Some(8));
        let (changed, _) = complete(handover, &users, Some(10)).await;
        assert!(changed && !uses(&users, "deleted"));
    }

    #[tokio::test]
    async fn versions_that_are_not_numbers_hand_the_list_over() {
        let users = users(&["old"]);
        let mut handover = Handover::default();
        handover.applied(&pod("old", Some("blue")), None);
        handover.list(&pod("new", Some("blue")));
        let (_, mut replayed) = complete(handover, &users, None).await;
        assert!(uses(&users, "new") && !uses(&users, "old"));
        assert!(!replayed.contains(&pod("new", None).refs, None));
    }
}
