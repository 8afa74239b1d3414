//! Expectations: own writes that the watch has not delivered yet.
//!
//! A plan that is made from a cache without them would repeat the write. They only save requests: every one of them
//! expires, and all of them may be lost.

use std::{
    collections::HashMap,
    hash::Hash,
    time::{Duration, Instant},
};

/// Writes by the key of their object, each with what was true before the write (`B`): the resourceVersion that the cache
/// shows until the watch delivers the write, what was written, or nothing if the key is a UID.
#[derive(Clone, Debug)]
pub struct Expectations<K, B = ()> {
    ttl: Duration,
    entries: HashMap<K, (B, Instant)>,
}

impl<K: Eq + Hash, B> Expectations<K, B> {
    /// Each write is expected for at most `ttl`. Watches are much faster.
    pub fn new(ttl: Duration) -> Self {
        Self { ttl, entries: HashMap::new() }
    }

    /// Records a write. Forgets the expired ones.
    pub fn expect(&mut self, key: K, before: B, now: Instant) {
        self.prune(now);
        self.entries.insert(key, (before, now + self.ttl));
    }

    /// How long the write may still be expected, if `unseen` says of the state before it that the watch still shows that.
    pub fn remaining(&self, key: &K, now: Instant, unseen: impl FnOnce(&B) -> bool) -> Option<Duration> {
        let (before, until) = self.entries.get(key)?;
        let rest = until.saturating_duration_since(now);
        (!rest.is_zero() && unseen(before)).then_some(rest)
    }

    /// Whether a write of this key has not expired.
    pub fn is_pending(&self, key: &K, now: Instant) -> bool {
        self.remaining(key, now, |_| true).is_some()
    }

    /// Keeps only the expectations that `unseen` accepts: the watch delivered the others.
    pub fn retain(&mut self, mut unseen: impl FnMut(&K, &B) -> bool) {
        self.entries.retain(|key, (before, _)| unseen(key, before));
    }

    /// Forgets the expectation of one key.
    pub fn remove(&mut self, key: &K) {
        self.entries.remove(key);
    }

    /// Forgets what has expired.
    pub fn prune(&mut self, now: Instant) {
        self.entries.retain(|_, (_, until)| *until > now);
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(1);

    #[test]
    fn a_write_is_expected_while_the_cache_shows_the_version_before_it() {
        let mut writes = Expectations::new(TTL);
        let start = Instant::now();
        writes.expect("blue", Some("7"), start);
        assert_eq!(writes.remaining(&"blue", start, |before| *before == Some("7")), Some(TTL));
        let delivered = writes.remaining(&"blue", start, |before| *before == Some("8"));
        assert_eq!(delivered, None, "the cache shows another version");
        assert_eq!(writes.remaining(&"red", start, |_| true), None);
        writes.retain(|_, before| before.is_none());
        assert!(writes.is_empty());
    }

    #[test]
    fn an_expectation_expires_and_is_forgotten() {
        let mut deletions = Expectations::new(TTL);
        let start = Instant::now();
        deletions.expect("uid-1", (), start);
        assert!(deletions.is_pending(&"uid-1", start + TTL / 2));
        assert!(!deletions.is_pending(&"uid-1", start + TTL));
        deletions.expect("uid-2", (), start + TTL);
        assert_eq!(deletions.len(), 1, "the expired one is gone");
        deletions.remove(&"uid-2");
        assert!(deletions.is_empty());
    }
}
