//! The worker of one pod: observes, plans, applies one step, and starts again until the plan has no step. Then it writes
//! the annotations and waits until it is woken or a backoff ends.

use std::{
    collections::{BTreeMap, BTreeSet},
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use api::{ErrorChain, attachments::AttachmentState, selection::NadRef};
use client::{
    events::PriorWorkGuard,
    retry::{Backoff, Retry},
};
use plan::hotplug::{
    AnnotationUpdate, AttemptKey, DesiredPod, FailedAttempt, Failures, MAX_RETRY, MIN_RETRY, NadState,
    ObservedPod, Origin, PlanInput, PlugMode, PodEvent, PodIdentity, PodLifecycle, PodPlan, RemovePurpose,
    Reported, SandboxState, Step, plan,
};
use tokio::{
    select,
    sync::Notify,
    time::{sleep, sleep_until},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::{
    Deps,
    apply::{AttachmentStepError, StepOutcome, names_process},
    metrics::{PlugOperation, StateCounts, WriteResult},
    observe::{Observation, ObservedCache, annotations_of, desired_pod, ended_pod, requested_nads},
    pod_status::{PodAnnotations, PodTarget, WriteOutcome, WriteWarnings},
};
use crate::{pods::OwnPod, repairs::RepairReceiver};

/// A step that takes longer is reported in the annotation.
const REPORT_AFTER: Duration = Duration::from_secs(2);
/// How long the watch may take to deliver a write of the daemon.
const EXPECTATION_TTL: Duration = Duration::from_secs(10);
/// How often the sandbox of a pod that has ended is looked for, until it has ended too.
const ENDING_POLL: Duration = Duration::from_secs(10);
/// How often a pod with refused or failed elements is looked at again: files of the node and links of others cause no event.
const REFUSED_POLL: Duration = Duration::from_secs(30);

/// Wakes a worker, and has what others read of it.
#[derive(Debug, Default)]
pub struct Wake {
    notify: Notify,
    state: Mutex<WakeState>,
}

#[derive(Debug, Default)]
struct WakeState {
    /// When the pod changed that the worker has not handled yet.
    changed: Option<Instant>,
    /// The NADs that the pod waits for.
    wanted_nads: BTreeSet<NadRef>,
}

impl Wake {
    pub fn wake(&self) {
        self.notify.notify_one();
    }

    /// Wakes the worker because the request of its pod changed.
    pub fn wake_changed(&self) {
        self.lock().changed.get_or_insert_with(Instant::now);
        self.notify.notify_one();
    }

    async fn notified(&self) {
        self.notify.notified().await;
    }

    /// Awaits `resolved`, the state of these NADs. One that changes meanwhile wakes the worker.
    async fn wanting<T>(&self, nads: BTreeSet<NadRef>, resolved: impl Future<Output = T>) -> T {
        self.lock().wanted_nads.extend(nads);
        resolved.await
    }

    pub fn wants(&self, nad: &NadRef) -> bool {
        self.lock().wanted_nads.contains(nad)
    }

    /// Whether the worker was woken and has not noticed.
    pub fn is_woken(&self) -> bool {
        use futures::FutureExt as _;
        self.notify.notified().now_or_never().is_some()
    }

    fn lock(&self) -> MutexGuard<'_, WakeState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The worker of one pod.
pub struct PodWorker {
    deps: Arc<Deps>,
    /// The UID by which the container runtime knows the pod.
    uid: String,
    wake: Arc<Wake>,
    stop: CancellationToken,
    cache: ObservedCache,
    failures: Failures,
    repairs: RepairReceiver,
    reported: Reported,
    written: Option<WrittenAnnotations>,
    /// What the daemon wrote last. If it must be written again, another writer has reverted it.
    last_written: Option<PodAnnotations>,
    reverted: Retry,
    /// The API server confirmed the annotations after the last ADD or DEL.
    confirmed: bool,
    observing: Retry,
    writing: Retry,
    write_warnings: WriteWarnings,
    last_mode: Option<PlugMode>,
    counts: StateCounts,
    retrying: bool,
    /// When the pod changed that this pass handles.
    changed: Option<Instant>,
    /// What this pass did.
    done: BTreeSet<DoneStep>,
    /// While a step and the write of its status are running and take no longer than usual.
    event_delay: Option<PriorWorkGuard>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum DoneStep {
    Added,
    Removed,
}

/// Annotations that the daemon wrote, until the watch delivers them.
#[derive(Debug)]
struct WrittenAnnotations {
    pod: String,
    before: PodAnnotations,
    after: PodAnnotations,
    until: Instant,
}

impl WrittenAnnotations {
    /// How long the watch may still take to deliver them. None if that time is over: nothing is expected any more, and a
    /// wait of zero would reconcile without end.
    fn unseen_for(&self, now: Instant) -> Option<Duration> {
        self.until.checked_duration_since(now).filter(|wait| !wait.is_zero())
    }
}

/// What a worker waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    /// Nothing is left to do for the pod, and there will not be.
    Ended,
    /// To be woken.
    Idle,
    RetryAt(Instant),
}

impl PodWorker {
    pub fn new(deps: Arc<Deps>, uid: String, wake: Arc<Wake>, stop: CancellationToken) -> Self {
        let repairs = deps.repairs.subscribe();
        let retry = || Retry::new(Backoff::new(MIN_RETRY, MAX_RETRY.mul_f64(0.8)));
        Self {
            deps,
            uid,
            wake,
            stop,
            cache: ObservedCache::default(),
            failures: Failures::default(),
            repairs,
            reported: Reported::default(),
            written: None,
            last_written: None,
            reverted: retry(),
            confirmed: false,
            observing: retry(),
            writing: retry(),
            write_warnings: WriteWarnings::default(),
            last_mode: None,
            counts: StateCounts::default(),
            retrying: false,
            changed: None,
            done: BTreeSet::new(),
            event_delay: None,
        }
    }

    /// Works until the pod and its attachments are gone, or until `stop`. Returns the UID of the pod.
    pub async fn run(mut self) -> String {
        let (wake, stop) = (Arc::clone(&self.wake), self.stop.clone());
        'worker: while !stop.is_cancelled() {
            // A wake-up from before counts for this pass. One that is left at the end starts another worker.
            let _ = wake.is_woken();
            let mut next = self.reconcile().await;
            if next == Next::Ended && !self.deps.knows_ends() {
                next = Next::RetryAt(Instant::now() + ENDING_POLL);
            }
            self.event_delay = None;
            self.count_retry(&next);
            if next == Next::Ended {
                self.forget_records().await;
                break;
            }
            loop {
                let timer = async {
                    match next {
                        Next::RetryAt(at) => sleep_until(at.into()).await,
                        Next::Idle | Next::Ended => std::future::pending().await,
                    }
                };
                select! {
                    () = stop.cancelled() => break 'worker,
                    () = wake.notified() => break,
                    () = timer => break,
                    () = self.repairs.changed(), if self.failures.can_wake(Instant::now()) => {
                        self.failures.wake(Instant::now());
                        let retry = self.failures.next_retry(Instant::now()).unwrap_or_else(Instant::now);
                        next = match next {
                            Next::RetryAt(at) => Next::RetryAt(at.min(retry)),
                            Next::Idle | Next::Ended => Next::RetryAt(retry),
                        };
                    }
                }
            }
        }
        self.deps.metrics.count_attachments(self.counts, StateCounts::default());
        self.count_retry(&Next::Idle);
        self.deps.watched.forget(&self.uid);
        self.deps.note_sandbox(&self.uid, None);
        self.uid
    }

    /// Forgets attachments of Multus whose DEL was started and not finished: Multus runs it at the end of the pod. And which
    /// of them were requested.
    async fn forget_records(&self) {
        if let Err(error) = self.deps.journal.set_requested(&self.uid, BTreeSet::new()).await {
            debug!(error = %error, "the end of a pod cannot be recorded yet");
        }
        let records = self.deps.journal.records_of(&self.uid);
        for record in records.iter().filter(|record| record.origin == Origin::PodStart) {
            if let Err(error) = self.deps.journal.remove(record.key.clone()).await {
                debug!(error = %error, "the end of a pod cannot be recorded yet");
            }
        }
    }

    /// Applies steps until there is none.
    async fn reconcile(&mut self) -> Next {
        loop {
            if self.stop.is_cancelled() {
                return Next::Idle;
            }
            // A change after the pod is read is not of this pass.
            let changed = self.wake.lock().changed.take();
            self.changed = self.changed.or(changed);
            let pod = self.deps.pod(&self.uid);
            let Some(desired) = self.desired(pod.as_deref()) else { return Next::Ended };
            let annotations = self.annotations(pod.as_deref());
            let mode = self.mode();
            if desired.lifecycle == PodLifecycle::Pending
                && self.deps.journal.records_of(&self.uid).is_empty()
            {
                if mode == PlugMode::On {
                    self.reported.note_request(&desired);
                }
                return Next::Idle;
            }
            let Observation { mut observed, mut mode, mut incomplete } =
                self.deps.observe(&desired, &annotations, &mut self.cache, mode).await;
            // The runtime may have said that another pod is meant.
            let uid_of = |pod: Option<&OwnPod>| pod.map(|pod| pod.uid.clone());
            if uid_of(self.deps.pod(&self.uid).as_deref()) != uid_of(pod.as_deref()) {
                continue;
            }
            observed.annotations_confirmed = self.confirmed;
            let resolved = self.deps.resolve_nads(&desired);
            let nads = self.wake.wanting(requested_nads(&desired), resolved).await;
            if nads.is_none() {
                (mode, incomplete) = (PlugMode::Off, true);
            }
            let waits_for_nads = nads.is_none();
            let nads = nads.unwrap_or_default();
            let unknown =
                |nad: &NadState| matches!(nad, NadState::Unknown { .. } | NadState::IsolationUnknown { .. });
            incomplete |= nads.values().any(unknown);
            let planned = self.plan(&desired, &observed, &nads, mode, None);
            self.failures.retain(&planned.failing);
            self.want_nads(&planned, waits_for_nads.then_some(&desired));
            let PodPlan { step, states, requested, annotations: update, events, .. } = planned;
            self.count_states(states.iter().map(|state| state.state));
            for event in events {
                warn!(pod = %name(&desired.pod), reason = event.reason.as_str(), "{}", event.note);
                self.deps.events.record(&desired.pod, event);
            }
            if let Some(requested) = requested
                && let Err(error) = self.deps.journal.set_requested(&self.uid, requested).await
            {
                debug!(error = %error, "the requested attachments of a pod cannot be recorded yet");
            }
            if let Some(step) = step {
                self.run_step(step, &desired, &observed, &nads, mode).await;
                continue;
            }
            let retry = if incomplete { Some(self.observing.failed(Instant::now())) } else { None };
            if !incomplete {
                self.observing.succeeded();
            }
            if let (Some(update), Some(pod)) = (update, pod.as_deref()) {
                match self.write(pod, &annotations, update).await {
                    Written::Yes => continue,
                    Written::Later(delay) => return self.next(&desired, &observed, retry, Some(delay)),
                    Written::Gone => {}
                }
            }
            self.report_duration();
            return self.next(&desired, &observed, retry, None);
        }
    }

    /// The pod as the API server describes it. None if nothing is left of it.
    fn desired(&self, pod: Option<&OwnPod>) -> Option<DesiredPod> {
        if let Some(pod) = pod {
            return Some(desired_pod(pod));
        }
        let records = self.deps.journal.records_of(&self.uid);
        let identity = records.first().map(|record| record.pod.clone()).or_else(|| self.cache.identity())?;
        Some(ended_pod(PodIdentity { runtime_uid: self.uid.clone(), ..identity }))
    }

    /// What hot-plug may do. Until the pods were listed, it is unknown what is desired.
    fn mode(&mut self) -> PlugMode {
        let mode = if self.deps.pods_are_known() { *self.deps.mode.borrow() } else { PlugMode::Off };
        if self.last_mode.replace(mode) != Some(mode) {
            // The other controller may have attached and detached interfaces.
            self.cache.forget_identified();
        }
        mode
    }

    fn plan(
        &mut self,
        desired: &DesiredPod,
        observed: &ObservedPod,
        nads: &BTreeMap<NadRef, NadState>,
        mode: PlugMode,
        running: Option<&AttemptKey>,
    ) -> PodPlan {
        let (failures, now) = (&self.failures, Instant::now());
        let input = PlanInput { desired, observed, failures, now, mode, running };
        let resolve = |nad: &NadRef| nads.get(nad).cloned().unwrap_or(NadState::Missing);
        plan(input, resolve, &mut self.reported)
    }

    async fn run_step(
        &mut self,
        step: Step,
        desired: &DesiredPod,
        observed: &ObservedPod,
        nads: &BTreeMap<NadRef, NadState>,
        mode: PlugMode,
    ) {
        if let Step::Remove(remove) = &step {
            self.failures.start_replug(remove, Instant::now());
        }
        let deps = Arc::clone(&self.deps);
        self.event_delay = Some(deps.events.delay());
        let mut applied = pin!(deps.apply(step.clone()));
        let outcome = select! {
            outcome = &mut applied => outcome,
            () = sleep(REPORT_AFTER) => {
                self.event_delay = None;
                let report = self.report_running(&step, desired, observed, nads, mode);
                futures::join!(applied, report).0
            }
        };
        self.finish_step(step, &desired.pod, outcome);
    }

    /// Writes what is pending, because the step takes long.
    async fn report_running(
        &mut self,
        step: &Step,
        desired: &DesiredPod,
        observed: &ObservedPod,
        nads: &BTreeMap<NadRef, NadState>,
        mode: PlugMode,
    ) {
        let Some((attempt, _)) = step.attempt() else { return };
        let running = self.plan(desired, observed, nads, mode, Some(attempt));
        let (Some(update), Some(pod)) = (running.annotations, self.deps.pod(&self.uid)) else { return };
        let annotations = self.annotations(Some(&pod));
        let observed = PodAnnotations {
            network_status: observed.network_status.clone(),
            attachments: observed.attachments.clone(),
        };
        // The plan is of older annotations.
        if annotations == observed {
            self.write(&pod, &annotations, update).await;
        }
    }

    fn finish_step(&mut self, step: Step, pod: &PodIdentity, outcome: StepOutcome) {
        self.confirmed &= matches!(step, Step::Forget(_));
        if matches!(step, Step::Remove(_)) {
            self.cache.forget_recorded();
        }
        let event = match outcome {
            StepOutcome::Done => {
                self.failures.succeed(&step);
                self.step_succeeded(&step)
            }
            StepOutcome::Skipped => None,
            StepOutcome::Failed(error) => self.step_failed(&step, pod, &error),
        };
        if let Some(event) = event {
            self.deps.events.record(pod, event);
        }
    }

    /// Returns the event to record.
    fn step_succeeded(&mut self, step: &Step) -> Option<PodEvent> {
        match step {
            Step::Add(add) => {
                self.done.insert(DoneStep::Added);
                Some(add.added())
            }
            Step::Remove(remove) => {
                self.done.insert(DoneStep::Removed);
                if !step.is_cleanup() {
                    self.deps.repairs.signal();
                }
                remove.removed()
            }
            Step::Finish(..) | Step::Forget(_) => None,
        }
    }

    /// Records that a step failed. Returns the event to record.
    fn step_failed(
        &mut self,
        step: &Step,
        pod: &PodIdentity,
        error: &AttachmentStepError,
    ) -> Option<PodEvent> {
        let (attempt, fingerprint) = step.attempt()?;
        let now = Instant::now();
        self.deps.metrics.failed(error.reason);
        let is_reported = if error.is_wait() {
            self.failures.record_wait(attempt.clone(), fingerprint, &error.text, now)
        } else {
            self.failures.record(attempt.clone(), fingerprint, &error.text, now)
        };
        if error.is_of_plugin() {
            self.failures.note_plugin_error(attempt, now);
        }
        if !is_reported {
            debug!(pod = %name(pod), error = error.text, "a step of hot-plug failed again");
            return None;
        }
        warn!(pod = %name(pod), error = error.text, "a step of hot-plug failed, retrying");
        let is_first = self.failures.get(attempt, fingerprint).is_none_or(FailedAttempt::is_first);
        match step {
            _ if error.is_wait() => None,
            Step::Add(add) => Some(add.failed(&error.text)),
            // The pod is gone, and the retries may go on for long.
            Step::Remove(remove) if remove.purpose == RemovePurpose::SandboxEnded && !is_first => None,
            Step::Remove(remove) => Some(remove.failed(&error.text)),
            Step::Finish(..) | Step::Forget(_) => None,
        }
    }

    /// The annotations of the pod: those that the daemon wrote until the watch delivers them.
    fn annotations(&mut self, pod: Option<&OwnPod>) -> PodAnnotations {
        let Some(pod) = pod else { return PodAnnotations::default() };
        let current = annotations_of(pod);
        let unseen = self.written.as_ref().filter(|written| {
            written.pod == pod.uid && written.before == current && Instant::now() < written.until
        });
        if let Some(written) = unseen {
            return written.after.clone();
        }
        self.written = None;
        current
    }

    async fn write(&mut self, pod: &OwnPod, before: &PodAnnotations, update: AnnotationUpdate) -> Written {
        let after = PodAnnotations { network_status: update.network_status, attachments: update.attachments };
        let target = PodTarget { namespace: &pod.namespace, name: &pod.name, uid: &pod.uid };
        if let Some(delay) = self.rewrite_delay(&after) {
            return Written::Later(delay);
        }
        match self.deps.writer.write(target, before, &after).await {
            WriteOutcome::Written => {
                self.deps.metrics.wrote_status(WriteResult::Ok);
                self.writing.succeeded();
                self.write_warnings = WriteWarnings::default();
                self.confirmed = true;
                // What the watch shows until it delivers the write.
                let shown = annotations_of(pod);
                let until = Instant::now() + EXPECTATION_TTL;
                if self.last_written.replace(after.clone()).as_ref() == Some(&after) {
                    self.reverted.failed(Instant::now());
                }
                self.written = Some(WrittenAnnotations { pod: pod.uid.clone(), before: shown, after, until });
                Written::Yes
            }
            WriteOutcome::Conflict => {
                self.deps.metrics.wrote_status(WriteResult::Conflict);
                self.written = None;
                self.confirmed = false;
                Written::Later(self.writing.failed(Instant::now()))
            }
            WriteOutcome::Gone => Written::Gone,
            WriteOutcome::Failed(error) => {
                self.deps.metrics.wrote_status(WriteResult::Error);
                self.deps.metrics.failed(super::metrics::FailureReason::Status);
                let delay = self.writing.failed(Instant::now());
                let pod = format_args!("{}/{}", pod.namespace, pod.name);
                if self.write_warnings.is_new(&error) {
                    warn!(%pod, error = %ErrorChain(&error), "the API server rejects the annotations of a pod, retrying; allow the write, or remove other annotations of the pod if all are too long");
                } else {
                    debug!(%pod, error = %ErrorChain(&error), "cannot write the annotations of a pod, retrying");
                }
                Written::Later(delay)
            }
        }
    }

    /// How long to wait before the same annotations are written again. The first repetition is immediate, the next ones are
    /// not: another writer reverts them.
    fn rewrite_delay(&mut self, after: &PodAnnotations) -> Option<Duration> {
        if self.last_written.as_ref() != Some(after) {
            self.reverted.succeeded();
        }
        self.reverted.remaining(Instant::now())
    }

    fn want_nads(&self, planned: &PodPlan, unresolved: Option<&DesiredPod>) {
        let rests = [AttachmentState::Attached, AttachmentState::Kept];
        let unattached = planned.states.iter().filter(|state| !rests.contains(&state.state));
        let nads = unattached.filter_map(|state| {
            let (namespace, name) = state.network.split_once('/')?;
            Some(NadRef::new(namespace, name))
        });
        self.wake.lock().wanted_nads =
            nads.chain(unresolved.map(requested_nads).unwrap_or_default()).collect();
    }

    fn next(
        &self,
        desired: &DesiredPod,
        observed: &ObservedPod,
        observing: Option<Duration>,
        writing: Option<Duration>,
    ) -> Next {
        let ended = desired.lifecycle == PodLifecycle::Ended;
        // Multus runs the DEL of what it attached when the pod started.
        let journal = self.deps.journal.records_of(&self.uid);
        let records = || journal.iter().map(|record| &**record).chain(&observed.records);
        let left = records().any(|record| record.origin != Origin::PodStart);
        if ended && !left {
            return Next::Ended;
        }
        let now = Instant::now();
        let ending = ended || desired.lifecycle == PodLifecycle::Terminating;
        // Without a watch of pods, every pod counts as ended.
        let noticed = *self.deps.mode.borrow() == PlugMode::Off
            && self.deps.namespace_watch.get().is_some()
            && has_end_events(records().map(|record| record.netns.as_str()));
        let polls = ending && observed.sandbox != SandboxState::Absent && left && !noticed;
        let refused = !ended && !self.wake.lock().wanted_nads.is_empty();
        // If another writer restored the old values, the watch shows nothing new.
        let unseen = self.written.as_ref().and_then(|written| written.unseen_for(now));
        let delays =
            [observing, writing, unseen, polls.then_some(ENDING_POLL), refused.then_some(REFUSED_POLL)];
        let retries = delays.into_iter().flatten().map(|delay| now + delay);
        // Pods whose attempts failed together are not retried together.
        let jitter = |at: Instant| now + Backoff::new(at - now, at - now).next_delay();
        match retries.chain(self.failures.next_retry(now).map(jitter)).min() {
            Some(at) => Next::RetryAt(at),
            None => Next::Idle,
        }
    }

    fn report_duration(&mut self) {
        let done = std::mem::take(&mut self.done);
        let Some(changed) = self.changed.take() else { return };
        if done.contains(&DoneStep::Added) {
            self.deps.metrics.observe(PlugOperation::Plug, changed.elapsed());
        } else if done.contains(&DoneStep::Removed) {
            self.deps.metrics.observe(PlugOperation::Unplug, changed.elapsed());
        }
    }

    fn count_states(&mut self, states: impl Iterator<Item = AttachmentState>) {
        let counts = StateCounts::of(states);
        self.deps.metrics.count_attachments(self.counts, counts);
        self.counts = counts;
    }

    fn count_retry(&mut self, next: &Next) {
        let retrying = matches!(next, Next::RetryAt(_)) && !self.failures.is_empty();
        self.deps.metrics.set_retrying(self.retrying, retrying);
        self.retrying = retrying;
    }
}

/// Whether annotations were written.
enum Written {
    Yes,
    /// Try again after this time, or when the watch delivers the pod.
    Later(Duration),
    /// The pod does not exist.
    Gone,
}

/// Whether the end of each of these namespaces is an event of inotify. The kernel reports no change below /proc.
fn has_end_events<'a>(mut netns: impl Iterator<Item = &'a str>) -> bool {
    !netns.any(names_process)
}

fn name(pod: &PodIdentity) -> String {
    format!("{}/{}", pod.namespace, pod.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_namespace_of_a_process_is_no_event() {
        assert!(has_end_events(["/var/run/netns/cni-1", "/run/process"].into_iter()));
        assert!(!has_end_events(["/var/run/netns/cni-1", "/proc/812/ns/net"].into_iter()));
    }

    #[tokio::test]
    async fn a_nad_that_is_created_while_the_nads_are_read_wakes_the_worker() {
        let (wake, late) = (Wake::default(), NadRef::new("default", "late"));
        assert!(!wake.wants(&late));
        let resolved = wake.wanting(BTreeSet::from([late.clone()]), async { wake.wants(&late) });
        assert!(resolved.await);
    }

    #[test]
    fn annotations_that_the_watch_did_not_deliver_in_time_are_not_waited_for() {
        let now = Instant::now();
        let annotations = || PodAnnotations { network_status: None, attachments: None };
        let unseen_for = |until: Instant| {
            let (before, after) = (annotations(), annotations());
            WrittenAnnotations { pod: "u".to_owned(), before, after, until }.unseen_for(now)
        };
        assert_eq!(unseen_for(now + Duration::from_secs(1)), Some(Duration::from_secs(1)));
        assert_eq!(unseen_for(now), None);
    }
}
