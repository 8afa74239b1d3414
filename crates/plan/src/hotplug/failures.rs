//! Failed attempts of a pod and their backoff. The caller has the clock.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use super::{AttachmentKey, AttemptKey, RemovePurpose, RemoveStep, text::one_line};

/// The delay before the first retry.
pub const MIN_RETRY: Duration = Duration::from_secs(1);
/// The longest delay between retries. Retries never end.
pub const MAX_RETRY: Duration = Duration::from_secs(30);
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
}

/// A failed attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailedAttempt {
    pub error: String,
    /// It is not retried until the caller ends the backoff or its inputs change.
    pub in_backoff: bool,
    fingerprint: Fingerprint,
    /// How often it failed with the same inputs.
    count: u32,
    /// In how many of these attempts the plugin itself reported an error or did not exist.
    plugin_errors: u32,
    /// Counts the recorded failures of the pod.
    order: u64,
    /// A plugin was not started: the step waits for other calls of plugins.
    waits: bool,
}

/// When an attempt failed last, whatever its inputs were. What failed earlier is less.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum LastFailure {
    Never,
    /// Counts the recorded failures of the pod.
    At(u64),
}

/// The delay before the next attempt, after this many failed ones: 1 s, doubled up to 30 s. The caller adds jitter.
pub fn retry_delay(failures: u32) -> Duration {
    let doubled = 1_u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX);
    MIN_RETRY.saturating_mul(doubled).min(MAX_RETRY)
}

impl FailedAttempt {
    /// How often the attempt failed with the same inputs.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Whether a plugin was not started because other calls of plugins run.
    pub fn is_wait(&self) -> bool {
        self.waits
    }

    /// In how many attempts with the same inputs the plugin itself reported an error or did not exist.
    pub fn plugin_errors(&self) -> u32 {
        self.plugin_errors
    }
}

impl Failures {
    /// Records that an attempt failed, and starts its backoff. Returns its delay, without jitter.
    pub fn record(&mut self, attempt: AttemptKey, fingerprint: Fingerprint, error: &str) -> Duration {
        let before = self.attempts.get(&attempt).filter(|failure| failure.fingerprint == fingerprint);
        let count = before.map_or(0, |failure| failure.count).saturating_add(1);
        let plugin_errors = before.map_or(0, |failure| failure.plugin_errors);
        let error = one_line(error, MAX_ERROR);
        self.recorded = self.recorded.saturating_add(1);
        let order = self.recorded;
        let failure =
            FailedAttempt { error, in_backoff: true, fingerprint, count, plugin_errors, order, waits: false };
        self.attempts.insert(attempt, failure);
        retry_delay(count)
    }

    /// Records that a plugin was not started because other calls of plugins run. That is no failed attempt: the delay, which is
    /// returned, does not grow.
    pub fn record_wait(&mut self, attempt: AttemptKey, fingerprint: Fingerprint, reason: &str) -> Duration {
        let before = self.attempts.get(&attempt).filter(|failure| failure.fingerprint == fingerprint);
        let counts = before.map_or((0, 0), |failure| (failure.count, failure.plugin_errors));
        self.record(attempt.clone(), fingerprint, reason);
        if let Some(failure) = self.attempts.get_mut(&attempt) {
            ((failure.count, failure.plugin_errors), failure.waits) = (counts, true);
        }
        MIN_RETRY
    }

    /// Counts that the recorded failure is an error that the plugin reported, or that the plugin does not exist. A plugin that
    /// hangs, is killed or is not started says nothing about the next attempt.
    pub fn count_plugin_error(&mut self, attempt: &AttemptKey) {
        if let Some(failure) = self.attempts.get_mut(attempt) {
            failure.plugin_errors = failure.plugin_errors.saturating_add(1);
        }
    }

    /// Ends the backoff of an attempt: its delay is over.
    pub fn end_backoff(&mut self, attempt: &AttemptKey) {
        if let Some(failure) = self.attempts.get_mut(attempt) {
            failure.in_backoff = false;
        }
    }

    /// Ends the backoff of all attempts, for example because the runtime answers again.
    pub fn end_all_backoffs(&mut self) {
        self.attempts.values_mut().for_each(|failure| failure.in_backoff = false);
    }

    /// Forgets a failure: the attempt succeeded.
    pub fn clear(&mut self, attempt: &AttemptKey) {
        self.attempts.remove(attempt);
    }

    /// Forgets all failures but those in [`PodPlan::failing`](super::PodPlan::failing).
    pub fn retain(&mut self, attempts: &[AttemptKey]) {
        let attempts: BTreeSet<&AttemptKey> = attempts.iter().collect();
        self.attempts.retain(|attempt, _| attempts.contains(attempt));
    }

    /// Starts the backoff of the next re-plug of an attachment. The caller calls it before each step whose purpose is
    /// [`RemovePurpose::Replug`], and ends the backoff of the returned attempt after the returned delay.
    pub fn start_replug(&mut self, step: &RemoveStep) -> Option<(AttemptKey, Duration)> {
        if step.purpose != RemovePurpose::Replug {
            return None;
        }
        let attempt = AttemptKey::Replug(step.record.key.clone());
        let delay = self.record(attempt.clone(), REPLUG, "the link was deleted");
        Some((attempt, delay))
    }

    /// Whether the next re-plug of this attachment must wait.
    pub(super) fn delays_replug(&self, key: &AttachmentKey) -> bool {
        let failure = self.get(&AttemptKey::Replug(key.clone()), REPLUG);
        failure.is_some_and(|failure| failure.in_backoff)
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
