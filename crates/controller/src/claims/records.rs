//! What is remembered between two reconciles of a key. All of it can be lost.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use client::retry::{Backoff, Retry};
use plan::{
    claims::{ClaimEvent, ObjectKey, release::Candidate},
    ipam::limits::{LENDER_BACKOFF, LENDER_TIMEOUT, REFUSED_TTL},
};

use super::overlay::Overlay;
use crate::leader::EXPECTATION_TTL;

/// How long nothing is reserved after the API server dropped a reservation.
const DROPPED_RETRY: Duration = Duration::from_secs(30);

/// The first and the longest delay between plans that wait for another claim to go.
const MIN_REQUEUE: Duration = Duration::from_millis(50);
const MAX_REQUEUE: Duration = Duration::from_secs(30);

fn retry() -> Retry {
    Retry::new(Backoff::default())
}

/// Of one virtual machine, or of a claim without one.
pub struct MachineRecord {
    /// The problems that were reported.
    pub reported: BTreeSet<ClaimEvent>,
    /// The claims without a virtual machine that were reported to be kept.
    kept: BTreeSet<(ObjectKey, ClaimEvent)>,
    /// What the last event said about a claim without a network, where only events say so.
    said: HashMap<ObjectKey, String>,
    /// Own writes that the watch has not delivered: the version that each was based on, None for a create.
    written: HashMap<ObjectKey, (Option<String>, Instant)>,
    pub retry: Retry,
    /// How many plans in a row had to wait for another claim to go.
    pub requeues: u32,
    failing: bool,
}

impl Default for MachineRecord {
    fn default() -> Self {
        Self {
            reported: BTreeSet::new(),
            kept: BTreeSet::new(),
            said: HashMap::new(),
            written: HashMap::new(),
            retry: retry(),
            requeues: 0,
            failing: false,
        }
    }
}

impl MachineRecord {
    pub fn is_default(&self) -> bool {
        self.reported.is_empty()
            && self.kept.is_empty()
            && self.said.is_empty()
            && self.written.is_empty()
            && self.requeues == 0
            && !self.failing
    }

    /// The delay before the next plan that waits for another claim to go: doubled each time.
    pub fn requeue_delay(&mut self) -> Duration {
        let delay = MIN_REQUEUE.saturating_mul(1 << self.requeues.min(10)).min(MAX_REQUEUE);
        self.requeues = self.requeues.saturating_add(1);
        delay
    }

    /// Whether a step that is based on this version repeats an own write. Returns how long to wait for the watch.
    pub fn is_written(&self, claim: &ObjectKey, version: Option<&str>, now: Instant) -> Option<Duration> {
        let (base, at) = self.written.get(claim)?;
        let rest = (*at + EXPECTATION_TTL).saturating_duration_since(now);
        (base.as_deref() == version && !rest.is_zero()).then_some(rest)
    }

    pub fn wrote(&mut self, claim: &ObjectKey, version: Option<&str>, now: Instant) {
        self.written.insert(claim.clone(), (version.map(str::to_owned), now));
    }

    /// Forgets writes that the watch has had time to deliver.
    pub fn prune(&mut self, now: Instant) {
        self.written.retain(|_, (_, at)| *at + EXPECTATION_TTL > now);
    }

    pub fn succeeded(&mut self) {
        self.retry.succeeded();
        self.failing = false;
    }

    pub fn failed(&mut self) {
        self.failing = true;
    }

    /// Whether a message about a claim is not the one that was said last.
    pub fn says(&mut self, claim: &ObjectKey, message: &str) -> bool {
        let last = self.said.insert(claim.clone(), message.to_owned());
        last.as_deref() != Some(message)
    }

    /// Forgets what was said about claims that have no problem any more.
    pub fn retain_said(&mut self, fails: impl Fn(&ObjectKey) -> bool) {
        self.said.retain(|claim, _| fails(claim));
    }

    /// The claims that were not reported to be kept yet.
    pub fn new_kept(&mut self, kept: Vec<(ObjectKey, ClaimEvent)>) -> Vec<(ObjectKey, ClaimEvent)> {
        let now: BTreeSet<_> = kept.into_iter().collect();
        let new = now.difference(&self.kept).cloned().collect();
        self.kept = now;
        new
    }

    /// The problems that were not reported yet. The others are forgotten once they are gone.
    pub fn new_events(&mut self, events: &[ClaimEvent]) -> Vec<ClaimEvent> {
        let now: BTreeSet<ClaimEvent> = events.iter().cloned().collect();
        let new = now.difference(&self.reported).cloned().collect();
        self.reported = now;
        new
    }
}

/// Of the addresses of one network.
pub struct NetworkRecord {
    pub overlay: Overlay,
    pub retry: Retry,
    /// Since when each own block has been unused.
    pub idle_since: BTreeMap<String, Instant>,
    /// Since when each reservation has been releasable.
    pub releasable_since: BTreeMap<Candidate, Instant>,
    /// The same, also after a live read did not confirm it.
    pub unused_since: BTreeMap<Candidate, Instant>,
    /// Since when the Nodes of pods that hold back a candidate have been missing.
    pub missing_since: BTreeMap<Arc<str>, Instant>,
    /// Since when each borrowed address has waited for its lender.
    pub asked_since: BTreeMap<String, Instant>,
    /// Until when each lender is not asked, and how long it was last.
    silent: BTreeMap<String, (Instant, Duration)>,
    /// Until when each address is not tried.
    tried: BTreeMap<IpAddr, Instant>,
    /// Until when nothing is reserved, because the API server drops reservations.
    pub dropped_until: Option<Instant>,
    /// When each claim without addresses was first seen, by its UID.
    pub first_seen: HashMap<String, Instant>,
    /// What was last said about a claim whose CRD keeps no conditions, by its UID.
    pub said: HashMap<String, String>,
    failing: bool,
}

impl Default for NetworkRecord {
    fn default() -> Self {
        Self {
            overlay: Overlay::default(),
            retry: retry(),
            idle_since: BTreeMap::new(),
            releasable_since: BTreeMap::new(),
            unused_since: BTreeMap::new(),
            missing_since: BTreeMap::new(),
            asked_since: BTreeMap::new(),
            silent: BTreeMap::new(),
            tried: BTreeMap::new(),
            dropped_until: None,
            first_seen: HashMap::new(),
            said: HashMap::new(),
            failing: false,
        }
    }
}

impl NetworkRecord {
    pub fn is_default(&self) -> bool {
        self.overlay.is_empty()
            && self.idle_since.is_empty()
            && self.releasable_since.is_empty()
            && self.asked_since.is_empty()
            && self.silent.is_empty()
            && self.tried.is_empty()
            && self.dropped_until.is_none()
            && self.first_seen.is_empty()
            && self.said.is_empty()
            && !self.failing
    }

    pub fn succeeded(&mut self) {
        self.retry.succeeded();
        self.failing = false;
    }

    pub fn failed(&mut self) {
        self.failing = true;
    }

    /// Forgets what has expired.
    pub fn prune(&mut self, now: Instant) {
        self.silent.retain(|_, (until, last)| *until + *last > now);
        self.tried.retain(|_, until| *until > now);
        self.dropped_until = self.dropped_until.filter(|until| *until > now);
    }

    pub fn dropped(&mut self, now: Instant) {
        self.dropped_until = Some(now + DROPPED_RETRY);
    }

    /// The lender did not answer.
    pub fn lender_silent(&mut self, lender: &str, now: Instant) {
        let last = self.silent.get(lender).map(|(_, last)| *last);
        let wait = LENDER_BACKOFF.after(last);
        self.silent.insert(lender.to_owned(), (now + wait, wait));
    }

    pub fn silent(&self, now: Instant) -> BTreeSet<String> {
        let silent = self.silent.iter().filter(|(_, (until, _))| *until > now);
        silent.map(|(lender, _)| lender.clone()).collect()
    }

    pub fn try_later(&mut self, address: IpAddr, refused: bool, now: Instant) {
        self.tried.insert(address, now + if refused { REFUSED_TTL } else { LENDER_TIMEOUT });
    }

    pub fn tried(&self) -> BTreeSet<IpAddr> {
        self.tried.keys().copied().collect()
    }

    /// How long until the first of these times.
    pub fn next_expiry(&self, now: Instant) -> Option<Duration> {
        let silent = self.silent.values().map(|(until, _)| *until);
        let times = silent.chain(self.tried.values().copied()).chain(self.dropped_until);
        times.filter(|until| *until > now).min().map(|until| until - now)
    }
}

/// Keeps the first time of each key that still holds.
pub fn track<K: Ord + Clone>(
    since: &mut BTreeMap<K, Instant>,
    now: Instant,
    holds: impl IntoIterator<Item = K>,
) {
    let mut old = std::mem::take(since);
    *since = holds.into_iter().map(|key| (key.clone(), old.remove(&key).unwrap_or(now))).collect();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_that_waits_for_another_claim_is_repeated_less_and_less_often() {
        let mut record = MachineRecord::default();
        let delays: Vec<Duration> = (0..40).map(|_| record.requeue_delay()).collect();
        assert_eq!(delays[..3], [50, 100, 200].map(Duration::from_millis));
        assert!(delays.is_sorted() && delays[39] == MAX_REQUEUE, "{delays:?}");
        assert!(!record.is_default(), "the count is kept");
    }
}
