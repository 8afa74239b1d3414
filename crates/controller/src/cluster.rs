//! What this replica knows of the cluster: one cache for the leader's plans and for the webhook of every replica.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use plan::network::World;
use tokio::sync::watch;

/// What has to be listed once before anything can be decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    Networks,
    Nodes,
    Reports,
    Namespaces,
    Attachments,
    Blocks,
    Users(plan::users::Kind),
}

/// The cluster as last seen. Cheap to clone.
#[derive(Clone)]
pub struct Cluster(Arc<Inner>);

struct Inner {
    world: Mutex<World>,
    /// Counts the changes.
    changes: watch::Sender<u64>,
    missing: watch::Sender<HashSet<Source>>,
}

impl Cluster {
    pub fn new() -> Self {
        let users = plan::users::Kind::ALL.into_iter().map(Source::Users);
        let missing = [
            Source::Networks,
            Source::Nodes,
            Source::Reports,
            Source::Namespaces,
            Source::Attachments,
            Source::Blocks,
        ];
        Self(Arc::new(Inner {
            world: Mutex::default(),
            changes: watch::Sender::new(0),
            missing: watch::Sender::new(missing.into_iter().chain(users).collect()),
        }))
    }

    /// The world, for a look. Never held over an await.
    pub fn world(&self) -> MutexGuard<'_, World> {
        // Nothing that holds it can panic half way through a change.
        self.0.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the world; whoever waits for changes is woken if there was one.
    pub fn change(&self, change: impl FnOnce(&mut World) -> bool) {
        let changed = change(&mut self.world());
        if changed {
            self.0.changes.send_modify(|count| *count = count.wrapping_add(1));
        }
    }

    pub fn changes(&self) -> watch::Receiver<u64> {
        self.0.changes.subscribe()
    }

    /// A first list is complete, or will never come because the kind does not exist.
    pub fn listed(&self, source: Source) {
        let news = self.0.missing.send_if_modified(|missing| missing.remove(&source));
        if news {
            self.0.changes.send_modify(|count| *count = count.wrapping_add(1));
        }
    }

    /// Resolves once everything has been listed.
    pub async fn synced(&self) -> bool {
        self.0.missing.subscribe().wait_for(HashSet::is_empty).await.is_ok()
    }
}
