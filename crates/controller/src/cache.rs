//! The replica's cache of the cluster, which the leader's plans and the webhook of every replica read.
//!
//! Readers work on snapshots. Each of the two locks is held only to take a snapshot, to apply one watch event or to process
//! one batch: see [`UserCache`] for the users of networks, of which there are many.

pub mod claims;
mod handover;
mod pods;
pub mod project;
pub mod services;
mod users;
pub mod watches;

use std::{
    collections::{BTreeSet, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use api::selection::NadRef;
use plan::{
    network::{ClusterState, DeletedNad},
    shared_map::SharedMap,
    users::WorkloadKind,
};
use tokio::sync::watch as channel;

pub use self::users::UserCache;
use self::{claims::ClaimCache, services::ServiceCache};

/// A watched kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CacheSource {
    Networks,
    Nodes,
    NodeNetworks,
    Namespaces,
    Nads,
    Blocks,
    Claims,
    Users(WorkloadKind),
}

impl CacheSource {
    pub const ALL: [Self; 16] = [
        Self::Networks,
        Self::Nodes,
        Self::NodeNetworks,
        Self::Namespaces,
        Self::Nads,
        Self::Blocks,
        Self::Claims,
        Self::Users(WorkloadKind::CronJob),
        Self::Users(WorkloadKind::DaemonSet),
        Self::Users(WorkloadKind::Deployment),
        Self::Users(WorkloadKind::Job),
        Self::Users(WorkloadKind::Pod),
        Self::Users(WorkloadKind::ReplicaSet),
        Self::Users(WorkloadKind::StatefulSet),
        Self::Users(WorkloadKind::VirtualMachine),
        Self::Users(WorkloadKind::VirtualMachineInstance),
    ];
}

/// The observed state of the cluster. Cheap to clone.
#[derive(Clone)]
pub struct ClusterCache(Arc<CacheInner>);

struct CacheInner {
    state: Mutex<ClusterState>,
    users: UserCache,
    services: ServiceCache,
    claims: ClaimCache,
    subscribers: Mutex<Vec<Subscriber>>,
    nad_trackers: Mutex<Vec<Weak<Mutex<BTreeSet<NadRef>>>>>,
    unlisted: channel::Sender<HashSet<CacheSource>>,
}

struct Subscriber {
    sources: HashSet<CacheSource>,
    wake: channel::Sender<()>,
}

/// Reports changes of the sources of one subscriber.
pub struct CacheChanges(channel::Receiver<()>);

impl CacheChanges {
    /// Forgets the changes so far. Call before the snapshot is taken.
    pub fn mark_seen(&mut self) {
        self.0.mark_unchanged();
    }

    /// Resolves after a change.
    pub async fn changed(&mut self) {
        if self.0.changed().await.is_err() {
            // The cache is gone, so it does not change any more.
            std::future::pending::<()>().await;
        }
    }
}

/// The NADs that were created, changed or deleted, even if a later event undid the change.
pub struct ChangedNads(Arc<Mutex<BTreeSet<NadRef>>>);

impl ChangedNads {
    /// The changes since the last call. Call before the snapshot is taken, so that the snapshot contains them.
    pub fn take(&self) -> BTreeSet<NadRef> {
        std::mem::take(&mut *lock(&self.0))
    }
}

impl ClusterCache {
    pub fn new() -> Self {
        Self(Arc::new(CacheInner {
            state: Mutex::default(),
            users: UserCache::default(),
            services: ServiceCache::default(),
            claims: ClaimCache::default(),
            subscribers: Mutex::default(),
            nad_trackers: Mutex::default(),
            unlisted: channel::Sender::new(HashSet::from(CacheSource::ALL)),
        }))
    }

    /// The state as it is now. Later changes do not reach it.
    pub fn snapshot(&self) -> ClusterState {
        lock(&self.0.state).clone()
    }

    /// The users of networks.
    pub fn users(&self) -> &UserCache {
        &self.0.users
    }

    /// The services on networks, with a lock and a wake-up of their own.
    pub fn services(&self) -> &ServiceCache {
        &self.0.services
    }

    /// The IPAMClaims with their virtual machines and pods, with a lock and a wake-up of their own.
    pub fn claims(&self) -> &ClaimCache {
        &self.0.claims
    }

    /// Reads the state without a copy. `read` must be short.
    pub fn read<T>(&self, read: impl FnOnce(&ClusterState) -> T) -> T {
        read(&lock(&self.0.state))
    }

    /// Updates the state, and wakes the subscribers of `source` if `update` returns true.
    pub fn update(&self, source: CacheSource, update: impl FnOnce(&mut ClusterState) -> bool) {
        let changed = update(&mut lock(&self.0.state));
        if changed {
            self.wake(source);
        }
    }

    /// Replaces the list of NADs that the leader deleted. No plan of another loop depends on it.
    pub fn publish_deleted_nads(&self, deleted: SharedMap<NadRef, DeletedNad>) {
        lock(&self.0.state).deleted_nads = deleted;
    }

    /// Subscribes to changes of these sources.
    pub fn subscribe(&self, sources: &[CacheSource]) -> CacheChanges {
        let (wake, changes) = channel::channel(());
        let sources = sources.iter().copied().collect();
        lock(&self.0.subscribers).push(Subscriber { sources, wake });
        CacheChanges(changes)
    }

    /// Wakes the subscribers of `source`.
    pub fn wake(&self, source: CacheSource) {
        lock(&self.0.subscribers).retain(|subscriber| {
            if subscriber.sources.contains(&source) {
                subscriber.wake.send_replace(());
            }
            !subscriber.wake.is_closed()
        });
    }

    /// Records changes of NADs from now on, until the result is dropped.
    pub fn track_nads(&self) -> ChangedNads {
        let changed = Arc::default();
        lock(&self.0.nad_trackers).push(Arc::downgrade(&changed));
        ChangedNads(changed)
    }

    fn record_changed_nad(&self, at: &NadRef) {
        lock(&self.0.nad_trackers).retain(|tracker| {
            let Some(changed) = tracker.upgrade() else { return false };
            lock(&changed).insert(at.clone());
            true
        });
    }

    /// Marks a source as listed: its first list is complete, or its kind does not exist.
    pub fn mark_listed(&self, source: CacheSource) {
        let first = self.0.unlisted.send_if_modified(|unlisted| unlisted.remove(&source));
        if first {
            self.wake(source);
        }
    }

    /// Resolves once these sources have been listed.
    pub async fn synced(&self, sources: &[CacheSource]) {
        let synced =
            |unlisted: &HashSet<CacheSource>| !sources.iter().any(|source| unlisted.contains(source));
        // The sender lives as long as `self`.
        let _ = self.0.unlisted.subscribe().wait_for(synced).await;
    }
}

/// Nothing that holds one of these locks can panic in the middle of a change.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use plan::network::NamespacePhase;

    use super::*;

    #[tokio::test]
    async fn a_change_wakes_only_the_subscribers_of_its_source() {
        let cache = ClusterCache::new();
        let mut namespaces = cache.subscribe(&[CacheSource::Namespaces, CacheSource::Nodes]);
        let mut blocks = cache.subscribe(&[CacheSource::Blocks]);
        let add = |name: &'static str| {
            cache.update(CacheSource::Namespaces, |state| {
                state.namespaces.insert(name.to_owned(), NamespacePhase::Active)
            });
        };
        add("a");
        assert!(namespaces.changed().now_or_never().is_some() && blocks.changed().now_or_never().is_none());
        assert!(namespaces.changed().now_or_never().is_none(), "reported once");
        add("a");
        assert!(namespaces.changed().now_or_never().is_none(), "nothing changed");
        add("b");
        namespaces.mark_seen();
        assert!(namespaces.changed().now_or_never().is_none());
        drop(blocks);
        add("c");
        assert_eq!(lock(&cache.0.subscribers).len(), 1, "a dropped subscriber is forgotten");
    }

    #[tokio::test]
    async fn each_reader_waits_only_for_its_own_sources() {
        let cache = ClusterCache::new();
        let nodes = [CacheSource::Nodes, CacheSource::Networks];
        assert!(cache.synced(&[]).now_or_never().is_some());
        cache.mark_listed(CacheSource::Nodes);
        assert!(cache.synced(&nodes).now_or_never().is_none());
        cache.mark_listed(CacheSource::Networks);
        assert!(cache.synced(&nodes).now_or_never().is_some());
        assert!(cache.synced(&CacheSource::ALL).now_or_never().is_none());
        for source in CacheSource::ALL {
            cache.mark_listed(source);
        }
        assert!(cache.synced(&CacheSource::ALL).now_or_never().is_some());
    }

    #[test]
    fn every_kind_of_user_is_a_source() {
        for kind in WorkloadKind::ALL {
            assert!(CacheSource::ALL.contains(&CacheSource::Users(kind)), "{kind:?}");
        }
    }

    #[test]
    fn a_snapshot_does_not_change() {
        let cache = ClusterCache::new();
        let before = cache.snapshot();
        cache.update(CacheSource::Namespaces, |state| {
            state.namespaces.insert("a".to_owned(), NamespacePhase::Active)
        });
        assert!(before.namespaces.is_empty() && cache.snapshot().namespaces.len() == 1);
    }

    #[test]
    fn nad_changes_are_recorded_for_each_tracker_until_it_is_dropped() {
        let cache = ClusterCache::new();
        let (one, two) = (cache.track_nads(), cache.track_nads());
        let at = NadRef::new("ns", "blue");
        cache.record_changed_nad(&at);
        assert_eq!((one.take(), one.take()), (BTreeSet::from([at.clone()]), BTreeSet::new()));
        drop(one);
        cache.record_changed_nad(&at);
        assert_eq!(lock(&cache.0.nad_trackers).len(), 1);
        assert_eq!(two.take(), BTreeSet::from([at]));
    }
}
