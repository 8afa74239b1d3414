//! Metrics of hot-plug.

use std::time::Duration;

use api::attachments::AttachmentState;
use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::{Registry, Unit},
};

#[derive(Debug, Clone)]
pub struct Metrics {
    attachments: Family<StateLabels, Gauge>,
    durations: Family<OperationLabels, Histogram>,
    failures: Family<FailureLabels, Counter>,
    pending_retries: Gauge,
    status_writes: Family<WriteLabels, Counter>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabels {
    state: StateLabel,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
enum StateLabel {
    Attached,
    Pending,
    Failed,
    Refused,
    Removing,
    Kept,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OperationLabels {
    operation: PlugOperation,
}

/// What a pass of a worker did to a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum PlugOperation {
    Plug,
    Unplug,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FailureLabels {
    reason: FailureReason,
}

/// Why something failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum FailureReason {
    /// The plugin reported an error.
    Plugin,
    PluginMissing,
    Timeout,
    /// A signal ended the plugin.
    Signaled,
    /// The plugin printed no CNI result.
    InvalidOutput,
    /// Too many plugins run.
    Busy,
    /// The host's mount namespace or a file in it.
    Host,
    Journal,
    Route,
    /// The links of a pod.
    Links,
    /// The container runtime.
    Runtime,
    /// The write of the pod's status.
    Status,
    /// A fault of the daemon.
    Panic,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WriteLabels {
    result: WriteResult,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum WriteResult {
    Ok,
    Conflict,
    Error,
}

/// The attachments of one pod, by state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StateCounts([i64; 6]);

const STATES: [StateLabel; 6] = [
    StateLabel::Attached,
    StateLabel::Pending,
    StateLabel::Failed,
    StateLabel::Refused,
    StateLabel::Removing,
    StateLabel::Kept,
];

impl StateCounts {
    pub fn of(states: impl IntoIterator<Item = AttachmentState>) -> Self {
        let mut counts = Self::default();
        for state in states {
            let place = match state {
                AttachmentState::Attached => 0,
                AttachmentState::Pending => 1,
                AttachmentState::Failed => 2,
                AttachmentState::Refused => 3,
                AttachmentState::Removing => 4,
                AttachmentState::Kept => 5,
            };
            counts.0[place] += 1;
        }
        counts
    }
}

impl Default for Metrics {
    fn default() -> Self {
        // From ten milliseconds to 80 seconds.
        let durations = || Histogram::new(exponential_buckets(0.01, 2.0, 14));
        Self {
            attachments: Family::default(),
            durations: Family::new_with_constructor(durations),
            failures: Family::default(),
            pending_retries: Gauge::default(),
            status_writes: Family::default(),
        }
    }
}

impl Metrics {
    pub fn register(&self, registry: &mut Registry) {
        let help = "Attachments that hot-plug handles, by state";
        registry.register("hotplug_attachments", help, self.attachments.clone());
        let help = "Time from the change of a pod to its written status";
        registry.register_with_unit("hotplug_duration", help, Unit::Seconds, self.durations.clone());
        registry.register("hotplug_failures", "Failures of hot-plug by reason", self.failures.clone());
        let help = "Pods with a failed operation that waits for its retry";
        registry.register("hotplug_pending_retries", help, self.pending_retries.clone());
        registry.register("hotplug_status_writes", "Writes to pods/status", self.status_writes.clone());
    }

    /// Replaces the counts of a pod.
    pub fn count_attachments(&self, old: StateCounts, new: StateCounts) {
        for (place, state) in STATES.into_iter().enumerate() {
            let change = new.0[place] - old.0[place];
            if change != 0 {
                self.attachments.get_or_create(&StateLabels { state }).inc_by(change);
            }
        }
    }

    pub fn observe(&self, operation: PlugOperation, took: Duration) {
        self.durations.get_or_create(&OperationLabels { operation }).observe(took.as_secs_f64());
    }

    pub fn failed(&self, reason: FailureReason) {
        self.failures.get_or_create(&FailureLabels { reason }).inc();
    }

    pub fn wrote_status(&self, result: WriteResult) {
        self.status_writes.get_or_create(&WriteLabels { result }).inc();
    }

    /// Replaces whether a pod waits for a retry.
    pub fn set_retrying(&self, old: bool, new: bool) {
        self.pending_retries.inc_by(i64::from(new) - i64::from(old));
    }
}
