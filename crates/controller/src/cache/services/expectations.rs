//! Own writes of the slices of one service that the watch has not delivered yet (R31).
//!
//! A plan that is made from a cache without them would repeat the writes.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use plan::services::ObservedSlice;

/// How long a write is expected. It ends only the wait for a slice that was deleted before the cache showed it.
const TTL: Duration = Duration::from_secs(10);

#[derive(Default)]
pub struct SliceExpectations {
    /// By the name of the slice.
    written: HashMap<Arc<str>, ExpectedSlice>,
    /// By the UID of the slice: when it was deleted.
    deleted: HashMap<Arc<str>, Instant>,
}

struct ExpectedSlice {
    uid: Arc<str>,
    generation: i64,
    at: Instant,
}

impl SliceExpectations {
    /// A slice was created or updated, and has this generation now.
    pub fn written(&mut self, name: &str, uid: &str, generation: i64, now: Instant) {
        self.written.insert(name.into(), ExpectedSlice { uid: uid.into(), generation, at: now });
    }

    pub fn deleted(&mut self, name: &str, uid: &str, now: Instant) {
        self.written.remove(name);
        self.deleted.insert(uid.into(), now);
    }

    /// The watch delivered a slice. Returns whether it shows an own write, or the state before one.
    pub fn observe(&mut self, slice: &ObservedSlice) -> bool {
        if self.deleted.contains_key(&slice.uid) {
            return true;
        }
        let Some(expected) = self.written.get(&slice.name).filter(|expected| expected.uid == slice.uid)
        else {
            return false;
        };
        let own = slice.generation <= expected.generation;
        if slice.generation >= expected.generation {
            self.written.remove(&slice.name);
        }
        own
    }

    /// The watch delivered the deletion of a slice. Returns whether it was an own one.
    pub fn observe_deletion(&mut self, uid: &str) -> bool {
        self.written.retain(|_, expected| *expected.uid != *uid);
        self.deleted.remove(uid).is_some()
    }

    /// A list that was requested at `started` is complete: it shows all earlier writes.
    pub fn relisted(&mut self, started: Instant) {
        self.written.retain(|_, expected| expected.at >= started);
        self.deleted.retain(|_, at| *at >= started);
    }

    /// Whether the cache does not show an own write. Forgets the writes that it shows.
    pub fn is_stale(&mut self, slices: &BTreeMap<Arc<str>, Arc<ObservedSlice>>, now: Instant) -> bool {
        let expired = |at: &Instant| now.saturating_duration_since(*at) >= TTL;
        self.written.retain(|name, expected| {
            let shown = slices
                .get(name)
                .is_some_and(|slice| slice.uid == expected.uid && slice.generation >= expected.generation);
            !shown && !expired(&expected.at)
        });
        self.deleted.retain(|uid, at| slices.values().any(|slice| slice.uid == *uid) && !expired(at));
        !self.written.is_empty() || !self.deleted.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use plan::services::{EndpointPorts, Family};

    use super::*;

    fn slice(name: &str, generation: i64) -> ObservedSlice {
        ObservedSlice {
            name: name.into(),
            uid: format!("uid-{name}").into(),
            resource_version: "1".into(),
            generation,
            deleting: false,
            labels: Arc::default(),
            network: None,
            owner: None,
            family: Some(Family::Ipv4),
            ports: Some(EndpointPorts::default()),
            endpoints: Vec::new(),
        }
    }

    fn cache(slices: &[(&str, i64)]) -> BTreeMap<Arc<str>, Arc<ObservedSlice>> {
        slices.iter().map(|(name, generation)| ((*name).into(), Arc::new(slice(name, *generation)))).collect()
    }

    #[test]
    fn a_cache_without_an_own_write_is_stale() {
        let (mut own, now) = (SliceExpectations::default(), Instant::now());
        assert!(!own.is_stale(&cache(&[("a", 1)]), now));
        own.written("a", "uid-a", 2, now);
        assert!(own.is_stale(&cache(&[("a", 1)]), now), "an older generation");
        assert!(own.is_stale(&cache(&[]), now), "a missing slice");
        assert!(!own.is_stale(&cache(&[("a", 2)]), now));
        own.deleted("a", "uid-a", now);
        assert!(own.is_stale(&cache(&[("a", 2)]), now), "a deleted slice");
        assert!(!own.is_stale(&cache(&[]), now));
    }

    #[test]
    fn only_changes_by_others_are_repaired() {
        let (mut own, now) = (SliceExpectations::default(), Instant::now());
        own.written("a", "uid-a", 2, now);
        assert!(own.observe(&slice("a", 1)), "the state before the write");
        assert!(own.observe(&slice("a", 2)));
        assert!(!own.observe(&slice("a", 2)), "another change without a new generation");
        own.written("a", "uid-a", 3, now);
        assert!(!own.observe(&slice("a", 4)));
        own.deleted("a", "uid-a", now);
        assert!(
            own.observe(&slice("a", 4)) && own.observe_deletion("uid-a") && !own.observe_deletion("uid-a")
        );
    }

    #[test]
    fn a_write_that_never_shows_is_expected_for_a_limited_time() {
        let (mut own, now) = (SliceExpectations::default(), Instant::now());
        own.written("a", "uid-a", 1, now);
        assert!(own.is_stale(&cache(&[]), now + TTL / 2));
        assert!(!own.is_stale(&cache(&[]), now + TTL));
        own.written("a", "uid-a", 1, now);
        own.relisted(now);
        assert!(own.is_stale(&cache(&[]), now), "the list may have been answered before the write");
        own.relisted(now + Duration::from_millis(1));
        assert!(!own.is_stale(&cache(&[]), now));
    }
}
