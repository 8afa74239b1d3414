//! Failed attempts of a pod and their backoff. The caller has the clock.
//!
//! The failed ADDs and DELs of a pod share one backoff. When it ends, the attempt that failed longest ago is retried. Attempts
//! that did not fail with their inputs do not wait. A retry that succeeds ends the backoff of all: one cause may have made
//! them fail.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use super::{AttachmentKey, AttemptKey, RemovePurpose, RemoveStep, Step, text::one_line};

/// The delay before the first retry.
pub const MIN_RETRY: Duration = Duration::from_secs(1);
/// The longest delay between retries while attempts of the pod fail for less than [`LONG_STREAK`]. Retries never end.
pub const MAX_RETRY: Duration = Duration::from_secs(30);
/// After this time without a retry that succeeds, the delay grows up to [`MAX_LONG_RETRY`].
const LONG_STREAK: Duration = Duration::from_mins(30);
/// The longest delay between retries.
const MAX_LONG_RETRY: Duration = Duration::from_mins(5);
/// A wake-up shortens a delay to this part at most: a failed attempt may cause the wake-up itself.
const WAKE_DIVISOR: u32 = 10;
/// A first failure with new inputs counts as a failed retry if more than one in this time was recorded, after
/// [`FIRST_FAILURES_BURST`]. Otherwise a pod that is edited all the time would have no backoff.
const FIRST_FAILURE_INTERVAL: Duration = Duration::from_secs(30);
/// 240 first failures at once: of 64 elements, each with an ADD and a DEL, and some edits.
const FIRST_FAILURES_BURST: Duration = Duration::from_hours(2);
/// How often a failure with the same inputs is reported, whatever its error is.
const REPORT_INTERVAL: Duration = Duration::from_mins(5);
/// The maximum length of an error in bytes. Plugins write it.
const MAX_ERROR: usize = 512;
/// Re-plugs do not depend on inputs.
const REPLUG: Fingerprint = Fingerprint(0);

/// What an attempt depends on: the element, the configuration, the sandbox. If it changes, a failure no longer counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub(super) u64);

/// The failed attempts of one pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Failures {
    attempts: BTreeMap<AttemptKey, FailedAttempt>,
    /// How many failures were recorded.
    recorded: u64,
    streak: Option<Streak>,
    /// When the pod has all its first failures again.
    first_failures_until: Option<Instant>,
}

/// A failed attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailedAttempt {
    pub error: String,
    fingerprint: Fingerprint,
    /// How often it failed with the same inputs.
    count: u32,
    /// When it failed first with the same inputs.
    since: Instant,
    /// The same for attempts in which the plugin itself reported an error or did not exist.
    plugin_errors_since: Option<Instant>,
    /// When it was last due for a report.
    reported: Option<Instant>,
    /// Counts the recorded failures of the pod.
    order: u64,
    /// The end of a delay of its own: of a wait or a re-plug.
    until: Option<Instant>,
    /// A plugin was not started: the step waits for other calls of plugins.
    waits: bool,
}

/// Failed attempts of a pod without a retry that succeeded. It goes on while the annotation is edited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Streak {
    since: Instant,
    /// When an attempt failed last.
    last: Instant,
    delay: Duration,
    /// When the next failed attempt may be retried.
    retry_at: Instant,
}

/// When an attempt failed last, whatever its inputs were. What failed earlier is less.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum LastFailure {
    Never,
    /// Counts the recorded failures of the pod.
    At(u64),
}

/// The part of a delay after which a retry may run. The caller adds jitter of up to a quarter of it.
fn earliest(delay: Duration) -> Duration {
    delay * 4 / 5
}

/// The delay before the next re-plug, after this many: 1 s, doubled up to 30 s.
pub(super) fn replug_delay(replugs: u32) -> Duration {
    let doubled = 1_u32.checked_shl(replugs.saturating_sub(1)).unwrap_or(u32::MAX);
    MIN_RETRY.saturating_mul(doubled).min(MAX_RETRY)
}

impl Streak {
    fn new(now: Instant) -> Self {
        Self { since: now, last: now, delay: MIN_RETRY, retry_at: now + earliest(MIN_RETRY) }
    }

    fn double_delay(&mut self, now: Instant) {
        let is_long = now.duration_since(self.since) >= LONG_STREAK;
        self.delay = (self.delay * 2).min(if is_long { MAX_LONG_RETRY } else { MAX_RETRY });
    }

    /// The earliest retry after a wake-up.
    fn wake_at(&self) -> Instant {
        self.last + (self.delay / WAKE_DIVISOR).max(MIN_RETRY)
    }
}

impl FailedAttempt {
    /// Whether it is the first failure with the same inputs.
    pub fn is_first(&self) -> bool {
        self.count == 1
    }

    /// Whether a plugin was not started because other calls of plugins run.
    pub fn is_wait(&self) -> bool {
        self.waits
    }

    /// For how long it has been failing with the same inputs.
    pub(super) fn failing_for(&self, now: Instant) -> Duration {
        if self.count == 0 { Duration::ZERO } else { now.duration_since(self.since) }
    }

    /// For how long the plugin itself has been reporting errors or not existed.
    pub(super) fn plugin_failing_for(&self, now: Instant) -> Duration {
        self.plugin_errors_since.map_or(Duration::ZERO, |since| now.duration_since(since))
    }
}

impl Failures {
    /// Records that an attempt failed. Returns whether to report it: a failure with the same inputs is reported once per
    /// [`REPORT_INTERVAL`].
    pub fn record(
        &mut self,
        attempt: AttemptKey,
        fingerprint: Fingerprint,
        error: &str,
        now: Instant,
    ) -> bool {
        let is_retry = self.get(&attempt, fingerprint).is_some_and(|failure| failure.count > 0);
        let counts = is_retry || !self.take_first_failure(now);
        self.extend_streak(is_retry, counts, now);
        let reported = self.attempts.get(&attempt).filter(|_| counts).and_then(|failure| failure.reported);
        let reported = reported.filter(|at| now.duration_since(*at) < REPORT_INTERVAL);
        let failure = self.insert(attempt, fingerprint, error, now);
        failure.count = failure.count.saturating_add(1);
        (failure.waits, failure.reported) = (false, reported.or(Some(now)));
        reported.is_none()
    }

    /// Records that a plugin was not started because other calls of plugins run. That is no failed attempt: the delay does not
    /// grow. Returns whether to report it.
    pub fn record_wait(
        &mut self,
        attempt: AttemptKey,
        fingerprint: Fingerprint,
        reason: &str,
        now: Instant,
    ) -> bool {
        let waited = self.get(&attempt, fingerprint).is_some_and(|failure| failure.waits);
        let failure = self.insert(attempt, fingerprint, reason, now);
        (failure.waits, failure.until) = (true, Some(now + earliest(MIN_RETRY)));
        !waited
    }

    /// Replaces the last failure of an attempt. What is counted with the same inputs stays.
    fn insert(
        &mut self,
        attempt: AttemptKey,
        fingerprint: Fingerprint,
        error: &str,
        now: Instant,
    ) -> &mut FailedAttempt {
        self.recorded = self.recorded.saturating_add(1);
        let before = self.attempts.remove(&attempt);
        let reported = before.as_ref().and_then(|failure| failure.reported);
        let same = before.filter(|failure| failure.fingerprint == fingerprint && failure.count > 0);
        let failure = FailedAttempt {
            error: one_line(error, MAX_ERROR),
            fingerprint,
            count: same.as_ref().map_or(0, |failure| failure.count),
            since: same.as_ref().map_or(now, |failure| failure.since),
            plugin_errors_since: same.and_then(|failure| failure.plugin_errors_since),
            reported,
            order: self.recorded,
            until: None,
            waits: false,
        };
        self.attempts.entry(attempt).or_insert(failure)
    }

    /// `is_retry`: the attempt failed before with the same inputs. `counts`: the delay grows.
    fn extend_streak(&mut self, is_retry: bool, counts: bool, now: Instant) {
        let is_over = |streak: &Streak| now.duration_since(streak.last) >= MAX_LONG_RETRY;
        if !self.has_failed_attempts() && self.streak.as_ref().is_some_and(is_over) {
            self.streak = None;
        }
        let Some(streak) = &mut self.streak else {
            self.streak = Some(Streak::new(now));
            return;
        };
        streak.last = now;
        if counts {
            streak.double_delay(now);
        }
        // Otherwise first failures would keep the others from their retry.
        if is_retry {
            streak.retry_at = now + earliest(streak.delay);
        }
    }

    /// Whether an attempt with new inputs may still fail without effect on the delay.
    fn has_first_failures(&self, now: Instant) -> bool {
        self.first_failures_until.is_none_or(|until| until < now + FIRST_FAILURES_BURST)
    }

    fn take_first_failure(&mut self, now: Instant) -> bool {
        let has_some = self.has_first_failures(now);
        if has_some {
            let until = self.first_failures_until.map_or(now, |until| until.max(now));
            self.first_failures_until = Some(until + FIRST_FAILURE_INTERVAL);
        }
        has_some
    }

    /// Whether ADDs or DELs have failed.
    fn has_failed_attempts(&self) -> bool {
        let failed = |(attempt, failure): (&AttemptKey, &FailedAttempt)| {
            !matches!(attempt, AttemptKey::Replug(_)) && failure.count > 0
        };
        self.attempts.iter().any(failed)
    }

    /// Counts that the recorded failure is an error that the plugin reported, or that the plugin does not exist. A plugin that
    /// hangs, is killed or is not started says nothing about the next attempt.
    pub fn note_plugin_error(&mut self, attempt: &AttemptKey, now: Instant) {
        if let Some(failure) = self.attempts.get_mut(attempt) {
            failure.plugin_errors_since.get_or_insert(now);
        }
    }

    /// Whether an attempt must wait.
    pub(super) fn is_delayed(&self, attempt: &AttemptKey, fingerprint: Fingerprint, now: Instant) -> bool {
        let last = self.attempts.get(attempt);
        let same = last.filter(|failure| failure.fingerprint == fingerprint);
        if same.and_then(|failure| failure.until).is_some_and(|until| now < until) {
            return true;
        }
        let Some(streak) = &self.streak else { return false };
        if same.is_some_and(|failure| failure.count > 0) {
            return now < streak.retry_at;
        }
        // What an ADD left behind is removed at once.
        let is_first_del = last.is_none() && matches!(attempt, AttemptKey::Remove(_));
        !is_first_del && !self.has_first_failures(now) && now < streak.wake_at()
    }

    /// When an attempt that must wait now may be tried, without jitter.
    pub fn next_retry(&self, now: Instant) -> Option<Instant> {
        let streak = self.streak.as_ref();
        let retry = streak.filter(|_| self.has_failed_attempts()).map(|streak| streak.retry_at);
        let first = streak.filter(|_| !self.has_first_failures(now)).map(Streak::wake_at);
        let own = self.attempts.values().filter_map(|failure| failure.until);
        own.chain(retry).chain(first).filter(|at| *at > now).min()
    }

    /// Whether [`Self::wake`] has an effect.
    pub fn can_wake(&self, now: Instant) -> bool {
        self.has_failed_attempts()
            && self.streak.is_some_and(|streak| now.max(streak.wake_at()) < streak.retry_at)
    }

    /// Brings the next retry forward, because something changed on the node that may have repaired its cause.
    pub fn wake(&mut self, now: Instant) {
        if let Some(streak) = &mut self.streak {
            streak.retry_at = streak.retry_at.min(now.max(streak.wake_at()));
        }
    }

    /// Forgets the failure of a step that succeeded. A retry that succeeds ends the backoff of all attempts, unless it only
    /// cleans up after a failed ADD.
    pub fn succeed(&mut self, step: &Step) {
        let Some((attempt, _)) = step.attempt() else { return };
        let failed = self.attempts.remove(attempt).is_some_and(|failure| failure.count > 0);
        if failed && !step.is_cleanup() {
            self.streak = None;
        }
    }

    /// Forgets all failures but those in [`PodPlan::failing`](super::PodPlan::failing).
    pub fn retain(&mut self, attempts: &[AttemptKey]) {
        let attempts: BTreeSet<&AttemptKey> = attempts.iter().collect();
        self.attempts.retain(|attempt, _| attempts.contains(attempt));
    }

    /// Starts the backoff of the next re-plug of an attachment. The caller calls it before each step whose purpose is
    /// [`RemovePurpose::Replug`].
    pub fn start_replug(&mut self, step: &RemoveStep, now: Instant) {
        if step.purpose != RemovePurpose::Replug {
            return;
        }
        let attempt = AttemptKey::Replug(step.record.key.clone());
        let failure = self.insert(attempt, REPLUG, "the link was deleted", now);
        failure.count = failure.count.saturating_add(1);
        failure.until = Some(now + earliest(replug_delay(failure.count)));
    }

    /// Whether the next re-plug of this attachment must wait.
    pub(super) fn delays_replug(&self, key: &AttachmentKey, now: Instant) -> bool {
        let failure = self.get(&AttemptKey::Replug(key.clone()), REPLUG);
        failure.and_then(|failure| failure.until).is_some_and(|until| now < until)
    }

    /// Whether an attempt failed, whatever its inputs were.
    pub(super) fn has_failed(&self, attempt: &AttemptKey) -> bool {
        self.attempts.contains_key(attempt)
    }

    /// When an attempt failed last. A change of its inputs does not matter: otherwise an attempt that always fails would come
    /// first after each of them.
    pub(super) fn last_failure(&self, attempt: &AttemptKey) -> LastFailure {
        self.attempts.get(attempt).map_or(LastFailure::Never, |failure| LastFailure::At(failure.order))
    }

    /// The attempts that failed.
    pub fn attempts(&self) -> impl Iterator<Item = &AttemptKey> {
        self.attempts.keys()
    }

    /// The failure of an attempt, if it failed with the same inputs.
    pub fn get(&self, attempt: &AttemptKey, fingerprint: Fingerprint) -> Option<&FailedAttempt> {
        self.attempts.get(attempt).filter(|failure| failure.fingerprint == fingerprint)
    }

    pub fn is_empty(&self) -> bool {
        self.attempts.is_empty()
    }
}
