//! Expectations: own writes that the watch has not delivered yet. They only save requests, and all of them may be lost.

use std::{
    collections::HashMap,
    hash::Hash,
    time::{Duration, Instant},
};

/// Writes by the key of their object, each with what was written or what was true before it.
#[derive(Clone, Debug)]
pub struct Expectations<K, B = ()> {
    ttl: Duration,
    entries: HashMap<K, (B, Instant)>,
}

impl<K: Eq + Hash, B> Expectations<K, B> {
    /// Each write is expected for at most `ttl`.
    pub fn new(ttl: Duration) -> Self {
        Self { ttl, entries: HashMap::new() }
    }

    /// Records a write. Forgets the expired ones.
    pub fn expect(&mut self, key: K, before: B, now: Instant) {
        self.entries.retain(|_, (_, until)| *until > now);
        self.entries.insert(key, (before, now + self.ttl));
    }

    /// How long the write may still be expected, if `unseen` says of the state before it that the watch still shows that.
    pub fn remaining(&self, key: &K, now: Instant, unseen: impl FnOnce(&B) -> bool) -> Option<Duration> {
        let (before, until) = self.entries.get(key)?;
        let rest = until.saturating_duration_since(now);
        (!rest.is_zero() && unseen(before)).then_some(rest)
    }
}
