//! The replica's cache of the cluster, which the leader's plans and the webhook of every replica read.

pub mod project;
pub mod watches;

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use plan::{network::ClusterState, users::WorkloadKind};
use tokio::sync::watch as channel;

/// A watched kind. The cache is synced once every source has been listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CacheSource {
    Networks,
    Nodes,
    NodeNetworks,
    Namespaces,
    Nads,
    Blocks,
    Users(WorkloadKind),
}

/// The observed state of the cluster. Cheap to clone.
#[derive(Clone)]
pub struct ClusterCache(Arc<CacheInner>);

struct CacheInner {
    state: Mutex<ClusterState>,
    /// Counts the changes.
    changes: channel::Sender<u64>,
    unlisted: channel::Sender<HashSet<CacheSource>>,
}

impl ClusterCache {
    pub fn new() -> Self {
        let users = WorkloadKind::ALL.into_iter().map(CacheSource::Users);
        let unlisted = [
            CacheSource::Networks,
            CacheSource::Nodes,
            CacheSource::NodeNetworks,
            CacheSource::Namespaces,
            CacheSource::Nads,
            CacheSource::Blocks,
        ];
        Self(Arc::new(CacheInner {
            state: Mutex::default(),
            changes: channel::Sender::new(0),
            unlisted: channel::Sender::new(unlisted.into_iter().chain(users).collect()),
        }))
    }

    /// The locked state. Never held over an await.
    pub fn state(&self) -> MutexGuard<'_, ClusterState> {
        // Nothing that holds the lock can panic in the middle of a change.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Updates the state and notifies the subscribers if `update` returns true.
    pub fn update(&self, update: impl FnOnce(&mut ClusterState) -> bool) {
        let changed = update(&mut self.state());
        if changed {
            self.notify();
        }
    }

    /// Subscribes to changes.
    pub fn changes(&self) -> channel::Receiver<u64> {
        self.0.changes.subscribe()
    }

    /// Marks a source as listed: its first list is complete, or its kind does not exist.
    pub fn mark_listed(&self, source: CacheSource) {
        let first = self.0.unlisted.send_if_modified(|unlisted| unlisted.remove(&source));
        if first {
            self.notify();
        }
    }

    /// Resolves once every source has been listed.
    pub async fn synced(&self) -> bool {
        self.0.unlisted.subscribe().wait_for(HashSet::is_empty).await.is_ok()
    }

    fn notify(&self) {
        self.0.changes.send_modify(|count| *count = count.wrapping_add(1));
    }
}
