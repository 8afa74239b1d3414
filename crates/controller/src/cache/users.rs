//! The users of networks: an index behind a lock of its own.

use std::{
    collections::BTreeSet,
    sync::{Mutex, MutexGuard},
};

use api::selection::NadRef;
use plan::users::{UserIndex, UserLookup, UserSummary, WorkloadKind};

/// The index of users.
#[derive(Default)]
pub struct UserCache(Mutex<UserIndex>);

impl UserCache {
    /// The number of objects that name any NAD.
    pub fn len(&self) -> usize {
        self.index().len()
    }

    /// Updates the index and returns what `update` returns.
    pub fn update<T>(&self, update: impl FnOnce(&mut UserIndex) -> T) -> T {
        update(&mut self.index())
    }

    fn index(&self) -> MutexGuard<'_, UserIndex> {
        super::lock(&self.0)
    }
}

impl UserLookup for UserCache {
    fn summary(&self, nads: &BTreeSet<NadRef>, first: usize) -> UserSummary {
        self.index().summary(nads, first)
    }

    fn is_used(&self, nad: &NadRef) -> bool {
        self.index().is_used(nad)
    }

    fn references_of(&self, kind: WorkloadKind, namespace: &str, name: &str) -> Vec<NadRef> {
        self.index().references_of(kind, namespace, name).cloned().collect()
    }
}
