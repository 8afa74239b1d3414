//! What the controller remembers between two reconciles of a service. It only saves writes and events; all of it may be lost.

use std::{
    collections::HashMap,
    hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher, Hash},
    time::{Duration, Instant},
};

use client::retry::{Backoff, Retry};
use jiff::Timestamp;

use crate::leader::{EXPECTATION_TTL, MIN_RETRY};

const MAX_RETRY: Duration = Duration::from_mins(1);
/// The delays after conflicts with other writers. The watch delivers their change sooner than the first one, unless it fails.
const MIN_CONFLICT_RETRY: Duration = Duration::from_millis(100);
const MAX_CONFLICT_RETRY: Duration = Duration::from_secs(10);
/// The endpoints of a Service whose NetworkService does not exist are withdrawn after this time.
const ORPHAN_GRACE: Duration = Duration::from_secs(5);

/// The events of one service: at once up to this number, then one per interval.
const EVENT_BURST: u32 = 25;
/// How often a warning is repeated that holds. The API server forgets events after an hour, and may reject one.
const REPORT_INTERVAL: Duration = Duration::from_mins(30);
/// When an event is recorded again that the full queue of events did not take.
const DROPPED_EVENT_RETRY: Duration = Duration::from_secs(10);
const EVENT_INTERVAL: Duration = Duration::from_mins(1);
/// The warnings of one service that are remembered. At one event per interval, the next ones would wait for days.
const MAX_REPORTED: usize = 4096;

pub struct ServiceRecord {
    /// There is nothing to remember.
    gone: bool,
    /// When the slices were planned that were last written: the retry of a failed write has the same cause as the first.
    pub last_planned: Option<Timestamp>,
    /// The delays after failures: from 1 s, doubled to 60 s, without end.
    retry: Retry,
    conflicts: Backoff,
    /// The last of these delays.
    conflict_delay: Duration,
    /// Whether this reconcile had a conflict.
    conflicted: bool,
    /// Whether this reconcile failed.
    failed: bool,
    /// The delays between writes of a Service that does not stay what is planned, because another writer changes it back.
    service_writes: Retry,
    /// The same between creations.
    service_creates: Retry,
    /// The last of these delays.
    service_delay: Duration,
    /// Since when the Service is as planned.
    service_in_place: Option<Instant>,
    /// A digest of what the Service was planned from.
    service_desired: Option<u64>,
    /// What another client changes back, while it does.
    pub changed_back: Option<String>,
    /// Why the Service could not be written.
    pub service_failure: Option<String>,
    /// The UID of the Service that belongs to a NetworkService that does not exist, and since when.
    orphan: Option<(String, Instant)>,
    pub status_written_at: Option<Instant>,
    /// The resourceVersion of the NetworkService before its status was written.
    status: Option<PendingWrite<String>>,
    /// The resourceVersion of the Service before it was written; None if it did not exist.
    service: Option<PendingWrite<Option<String>>>,
    /// Digests of the warnings that hold and were recorded, and when they were.
    reported: HashMap<u64, Instant>,
    /// How many events may be recorded, and since when.
    events: (u32, Option<Instant>),
}

/// A write that the watch has not delivered, while it shows the state before.
struct PendingWrite<B> {
    before: B,
    until: Instant,
}

impl<B: PartialEq> PendingWrite<B> {
    fn new(before: B, now: Instant) -> Self {
        Self { before, until: now + EXPECTATION_TTL }
    }

    fn remaining(&self, current: &B, now: Instant) -> Option<Duration> {
        let rest = self.until.saturating_duration_since(now);
        (self.before == *current && !rest.is_zero()).then_some(rest)
    }
}

impl Default for ServiceRecord {
    fn default() -> Self {
        Self {
            gone: false,
            last_planned: None,
            // One leader retries, so the delays need no random part.
            retry: Retry::new(Backoff::exact(MIN_RETRY, MAX_RETRY)),
            conflicts: Backoff::exact(MIN_CONFLICT_RETRY, MAX_CONFLICT_RETRY),
            conflict_delay: MIN_CONFLICT_RETRY,
            conflicted: false,
            failed: false,
            service_writes: Retry::new(Backoff::exact(MIN_RETRY, MAX_RETRY)),
            service_creates: Retry::new(Backoff::exact(MIN_RETRY, MAX_RETRY)),
            service_delay: Duration::ZERO,
            service_in_place: None,
            service_desired: None,
            changed_back: None,
            service_failure: None,
            orphan: None,
            status_written_at: None,
            status: None,
            service: None,
            reported: HashMap::new(),
            events: (EVENT_BURST, None),
        }
    }
}

impl ServiceRecord {
    /// Forgets everything: the service is gone.
    pub fn clear(&mut self) {
        *self = Self { gone: true, ..Self::default() };
    }

    pub fn is_gone(&self) -> bool {
        self.gone
    }

    /// Records a failed reconcile. Returns when to retry: the delay doubles once per reconcile, however many of its writes fail
    /// (R34).
    pub fn record_failure(&mut self, now: Instant) -> Duration {
        if std::mem::replace(&mut self.failed, true) {
            return self.retry.remaining(now).unwrap_or(MIN_RETRY);
        }
        self.retry.failed(now)
    }

    /// Records that another writer was first. Returns when to plan again; the delay doubles once per reconcile.
    pub fn record_conflict(&mut self) -> Duration {
        if !std::mem::replace(&mut self.conflicted, true) {
            self.conflict_delay = self.conflicts.next_delay();
        }
        self.conflict_delay
    }

    /// Whether a conflict with this delay is the first one.
    pub fn is_first_conflict(delay: Duration) -> bool {
        delay <= MIN_CONFLICT_RETRY
    }

    /// Ends a reconcile: one without conflicts ends their delays, and one without failures theirs.
    pub fn finish(&mut self) {
        if !std::mem::take(&mut self.conflicted) {
            self.conflicts.reset();
        }
        if !std::mem::take(&mut self.failed) {
            self.retry.succeeded();
        }
    }

    /// Records what the Service is planned from. A user who changes that does not wait for the delays of earlier writes.
    pub fn service_planned(&mut self, desired: impl Hash) {
        let desired = digest(desired);
        if self.service_desired.replace(desired) != Some(desired) {
            self.reset_service_delays();
        }
    }

    pub fn service_written(&mut self, before: Option<String>, now: Instant) {
        // The first write after a creation is not delayed.
        let writes = if before.is_some() { &mut self.service_writes } else { &mut self.service_creates };
        self.service_delay = writes.failed(now);
        self.service_in_place = None;
        self.service_failure = None;
        self.service = Some(PendingWrite::new(before, now));
    }

    /// Records that the Service could not be written. Returns when to try again.
    pub fn service_failed(&mut self, error: String, now: Instant) -> Duration {
        self.service_failure = Some(error);
        self.service_in_place = None;
        self.service_delay = self.service_writes.failed(now);
        self.service_delay
    }

    /// Records that the Service is as planned. Returns when to check again whether it stays so, if another client changed it
    /// back before.
    pub fn service_in_place(&mut self, now: Instant) -> Option<Duration> {
        self.service_failure = None;
        let since = *self.service_in_place.get_or_insert(now);
        let rest = self.service_delay.saturating_sub(now.saturating_duration_since(since));
        if rest.is_zero() {
            self.changed_back = None;
        }
        self.changed_back.as_ref().map(|_| rest)
    }

    /// Records that the Service waits for its next write, because the last one did not last. The message counts from the
    /// second write on: a user may change a Service once.
    pub fn service_changed_back(&mut self, message: String) {
        if self.service_delay > MIN_RETRY {
            self.changed_back = Some(message);
        }
    }

    /// Records that the Service is not as planned. If it was for longer than the last delay, no other writer works against
    /// the controller, and the delays start again.
    pub fn service_drifted(&mut self, now: Instant) {
        let in_place = self.service_in_place.take();
        if in_place.is_some_and(|since| now.saturating_duration_since(since) > self.service_delay) {
            self.reset_service_delays();
        }
    }

    fn reset_service_delays(&mut self) {
        self.service_writes.succeeded();
        self.service_creates.succeeded();
        self.service_delay = Duration::ZERO;
        self.changed_back = None;
    }

    /// How long to wait before the Service is written again, or created.
    pub fn paces_service(&self, create: bool, now: Instant) -> Option<Duration> {
        let creates = if create { self.service_creates.remaining(now) } else { None };
        self.service_writes.remaining(now).max(creates)
    }

    /// Records that the Service with this UID belongs to a NetworkService that does not exist. Returns how long to wait for
    /// the garbage collector, which deletes it, or for the NetworkService, if its watch is behind.
    pub fn awaits_orphan(&mut self, uid: &str, now: Instant) -> Option<Duration> {
        let since = match &self.orphan {
            Some((known, since)) if known == uid => *since,
            _ => {
                self.orphan = Some((uid.to_owned(), now));
                now
            }
        };
        let rest = ORPHAN_GRACE.saturating_sub(now.saturating_duration_since(since));
        (!rest.is_zero()).then_some(rest)
    }

    /// How long to wait for the watch to deliver a write of the Service.
    pub fn awaits_service(&self, current: Option<&String>, now: Instant) -> Option<Duration> {
        self.service.as_ref()?.remaining(&current.cloned(), now)
    }

    pub fn status_written(&mut self, before: &str, now: Instant) {
        self.status_written_at = Some(now);
        self.status = Some(PendingWrite::new(before.to_owned(), now));
    }

    /// How long to wait for the watch to deliver a write of the status.
    pub fn awaits_status(&self, current: &String, now: Instant) -> Option<Duration> {
        self.status.as_ref()?.remaining(current, now)
    }

    /// The warnings to record now: those that were not recorded since they began to hold, or long ago, at most as many as may
    /// be recorded. Warnings that no longer hold are forgotten. The time says when to ask again; None if nothing holds.
    pub fn unreported<W: Hash>(
        &mut self,
        warnings: impl IntoIterator<Item = W>,
        now: Instant,
    ) -> (Vec<W>, Option<Duration>) {
        self.refill_events(now);
        let mut holding: HashMap<u64, Instant> = HashMap::new();
        let (mut due, mut repeats, mut withheld) = (Vec::new(), Vec::new(), false);
        for warning in warnings {
            let digest = digest(&warning);
            if holding.contains_key(&digest) || holding.len() >= MAX_REPORTED {
                continue;
            }
            match self.reported.get(&digest).copied() {
                Some(at) => {
                    holding.insert(digest, at);
                    if now.saturating_duration_since(at) >= REPORT_INTERVAL {
                        repeats.push((digest, warning));
                    }
                }
                None if self.take_event() => {
                    holding.insert(digest, now);
                    due.push(warning);
                }
                None => withheld = true,
            }
        }
        // New warnings come first.
        for (digest, warning) in repeats {
            if self.take_event() {
                holding.insert(digest, now);
                due.push(warning);
            } else {
                withheld = true;
            }
        }
        self.reported = holding;
        let repeat = |at: &Instant| REPORT_INTERVAL.saturating_sub(now.saturating_duration_since(*at));
        let next =
            if withheld { Some(self.next_event(now)) } else { self.reported.values().map(repeat).min() };
        (due, next)
    }

    /// Records that the event about a warning was dropped. Returns when to record it again.
    pub fn event_dropped(&mut self, warning: impl Hash) -> Duration {
        self.reported.remove(&digest(warning));
        self.events.0 = (self.events.0 + 1).min(EVENT_BURST);
        DROPPED_EVENT_RETRY
    }

    /// Takes the permission to record an event, if there is one.
    fn take_event(&mut self) -> bool {
        let left = self.events.0.checked_sub(1);
        self.events.0 = left.unwrap_or_default();
        left.is_some()
    }

    /// How long until another event may be recorded.
    fn next_event(&self, now: Instant) -> Duration {
        let passed = self.events.1.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        EVENT_INTERVAL.saturating_sub(passed).max(MIN_RETRY)
    }

    fn refill_events(&mut self, now: Instant) {
        let (left, since) = self.events;
        let Some(since) = since.filter(|_| left < EVENT_BURST) else {
            self.events = (EVENT_BURST, Some(now));
            return;
        };
        let intervals = now.saturating_duration_since(since).as_secs() / EVENT_INTERVAL.as_secs();
        let gained = u32::try_from(intervals).unwrap_or(EVENT_BURST).min(EVENT_BURST - left);
        if gained > 0 {
            self.events = (left + gained, Some(now));
        }
    }
}

fn digest(value: impl Hash) -> u64 {
    BuildHasherDefault::<DefaultHasher>::default().hash_one(value)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn retries_double_from_1_s_to_60_s_and_start_again_after_a_success_as_r34_says() {
        let (mut record, now) = (ServiceRecord::default(), Instant::now());
        let fail = |record: &mut ServiceRecord| {
            // The slices and the status fail.
            let delays = (record.record_failure(now), record.record_failure(now));
            assert_eq!(delays.0, delays.1, "one failure per reconcile");
            record.finish();
            delays.0.as_secs()
        };
        let delays: Vec<u64> = (0..9).map(|_| fail(&mut record)).collect();
        assert_eq!(delays, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
        record.finish();
        assert_eq!(fail(&mut record), 1);
    }

    #[test]
    fn a_service_that_is_changed_back_is_written_less_and_less_often() {
        let (mut record, now) = (ServiceRecord::default(), Instant::now());
        let second = Duration::from_secs(1);
        record.service_written(None, now);
        assert_eq!(record.paces_service(false, now), None, "it was created");
        assert_eq!(record.paces_service(true, now), Some(second), "another creation waits");
        for seconds in [1, 2, 4] {
            record.service_written(Some("1".to_owned()), now);
            assert_eq!(record.paces_service(false, now), Some(second * seconds));
        }
        assert_eq!(record.service_failed("denied".to_owned(), now), second * 8);
        record.service_in_place(now);
        assert_eq!(record.service_failure, None);
        record.service_in_place(now + second * 8);
        record.service_drifted(now + second * 8);
        assert_eq!(record.service_failed("denied".to_owned(), now), second * 16, "it was in place for 8 s");
        record.service_in_place(now);
        record.service_drifted(now + second * 17);
        assert_eq!(record.paces_service(true, now), None);
        record.service_written(Some("1".to_owned()), now);
        assert_eq!(record.paces_service(false, now), Some(second));
    }

    #[test]
    fn a_service_counts_as_changed_back_until_it_stayed_in_place_for_the_last_delay() {
        let (mut record, now) = (ServiceRecord::default(), Instant::now());
        let second = Duration::from_secs(1);
        let written = || Some("1".to_owned());
        record.service_written(written(), now);
        record.service_changed_back("labels".to_owned());
        assert_eq!(record.changed_back, None, "one change");
        record.service_written(written(), now);
        record.service_changed_back("labels".to_owned());
        assert_eq!(record.changed_back.as_deref(), Some("labels"));
        assert_eq!(record.service_in_place(now), Some(second * 2));
        assert_eq!(record.service_in_place(now + second), Some(second));
        assert_eq!(record.changed_back.as_deref(), Some("labels"));
        assert_eq!(record.service_in_place(now + second * 2), None);
        assert_eq!(record.changed_back, None);
    }

    #[test]
    fn a_change_of_the_networkservice_does_not_wait_for_the_delays_of_earlier_writes() {
        let (mut record, now) = (ServiceRecord::default(), Instant::now());
        record.service_planned(1);
        record.service_written(Some("1".to_owned()), now);
        record.service_planned(1);
        assert!(record.paces_service(false, now).is_some());
        record.service_planned(2);
        assert_eq!(record.paces_service(false, now), None);
    }

    #[test]
    fn a_warning_that_holds_is_repeated() {
        let (mut record, now) = (ServiceRecord::default(), Instant::now());
        let later = now + REPORT_INTERVAL / 3;
        assert_eq!(record.unreported(["a"], now), (vec!["a"], Some(REPORT_INTERVAL)));
        assert_eq!(record.unreported(["a", "b"], later), (vec!["b"], Some(REPORT_INTERVAL / 3 * 2)));
        assert_eq!(
            record.unreported(["a", "b"], now + REPORT_INTERVAL),
            (vec!["a"], Some(REPORT_INTERVAL / 3))
        );
        assert_eq!(record.unreported([""; 0], now + REPORT_INTERVAL), (vec![], None));
    }

    #[test]
    fn a_warning_whose_event_was_dropped_is_recorded_again() {
        let (mut record, now) = (ServiceRecord::default(), Instant::now());
        assert_eq!(report(&mut record, &["a", "b"], now), ["a", "b"]);
        assert_eq!(record.event_dropped("b"), DROPPED_EVENT_RETRY);
        assert_eq!(report(&mut record, &["a", "b"], now), ["b"]);
        for _ in 0..100 {
            record.event_dropped("b");
            assert_eq!(report(&mut record, &["a", "b"], now), ["b"], "a dropped event counts for no limit");
        }
    }

    #[test]
    fn conflicts_are_retried_soon_and_less_often_if_the_watch_does_not_deliver_their_cause() {
        let mut record = ServiceRecord::default();
        let conflict = |record: &mut ServiceRecord| {
            let delay = record.record_conflict();
            assert_eq!(record.record_conflict(), delay, "one conflict per reconcile");
            record.finish();
            delay.as_millis()
        };
        let delays: Vec<u128> = (0..9).map(|_| conflict(&mut record)).collect();
        assert_eq!(delays, [100, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000]);
        record.finish();
        assert_eq!(conflict(&mut record), 100);
    }

    #[test]
    fn a_write_is_awaited_while_the_cache_shows_the_version_before_it() {
        let (mut record, now) = (ServiceRecord::default(), Instant::now());
        let version = |text: &str| text.to_owned();
        record.service_written(None, now);
        assert!(record.awaits_service(None, now).is_some());
        assert!(record.awaits_service(Some(&version("1")), now).is_none());
        record.status_written("7", now);
        assert!(record.awaits_status(&version("7"), now).is_some());
        assert!(record.awaits_status(&version("8"), now).is_none());
        assert!(record.awaits_status(&version("7"), now + EXPECTATION_TTL).is_none());
    }

    fn report(record: &mut ServiceRecord, pods: &[&str], now: Instant) -> Vec<String> {
        record.unreported(pods.iter().map(|pod| (*pod).to_owned()), now).0
    }

    #[test]
    fn a_warning_is_reported_once_until_it_no_longer_holds() {
        let (mut record, now) = (ServiceRecord::default(), Instant::now());
        assert_eq!(report(&mut record, &["a"], now), ["a"]);
        assert_eq!(report(&mut record, &["a", "b"], now), ["b"]);
        assert_eq!(report(&mut record, &["a", "b"], now), [""; 0]);
        assert_eq!(report(&mut record, &["b"], now), [""; 0]);
        assert_eq!(report(&mut record, &["a", "b"], now), ["a"]);
    }

    #[test]
    fn warnings_beyond_the_limit_are_reported_later() {
        let (mut record, now) = (ServiceRecord::default(), Instant::now());
        let pods: Vec<String> = (0..30).map(|number| format!("pod-{number}")).collect();
        let pods: Vec<&str> = pods.iter().map(String::as_str).collect();
        assert_eq!(report(&mut record, &pods, now).len(), 25);
        assert_eq!(report(&mut record, &pods, now).len(), 0);
        assert_eq!(report(&mut record, &pods, now + EVENT_INTERVAL), ["pod-25"]);
        assert_eq!(report(&mut record, &pods, now + EVENT_INTERVAL * 10).len(), 4);
    }

    #[test]
    fn warnings_that_were_withheld_are_due_with_the_next_event() {
        let (mut record, now) = (ServiceRecord::default(), Instant::now());
        let (new, due) = record.unreported(0..26, now);
        assert_eq!((new.len(), due), (25, Some(EVENT_INTERVAL)));
        let (new, due) = record.unreported(0..26, now + EVENT_INTERVAL / 4);
        assert_eq!((new.len(), due), (0, Some(EVENT_INTERVAL * 3 / 4)));
        let (new, due) = record.unreported(0..26, now + EVENT_INTERVAL);
        assert_eq!((new, due), (vec![25], REPORT_INTERVAL.checked_sub(EVENT_INTERVAL)));
        let (new, due) = record.unreported(0..26, now + EVENT_INTERVAL * 9);
        assert_eq!((new, due), (vec![], REPORT_INTERVAL.checked_sub(EVENT_INTERVAL * 9)));
    }

    #[test]
    fn every_one_of_many_warnings_is_reported_in_the_end() {
        let (mut record, mut now) = (ServiceRecord::default(), Instant::now());
        let mut reported = HashSet::new();
        for _ in 0..1000 {
            let (new, due) = record.unreported(0..1000, now);
            reported.extend(new);
            now += due.expect("they hold");
        }
        assert_eq!(reported.len(), 1000);
    }
}
