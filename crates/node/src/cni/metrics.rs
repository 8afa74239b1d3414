//! Metrics of CNI calls.

use std::time::Duration;

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{
        counter::Counter,
        family::Family,
        histogram::{Histogram, exponential_buckets},
    },
    registry::{Registry, Unit},
};
use wire::cni::{Code, Error, Verb};

/// Metrics of the CNI server.
#[derive(Debug, Clone)]
pub struct Metrics {
    calls: Family<CniCallLabels, Counter>,
    durations: Family<CniCommandLabels, Histogram>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CniCallLabels {
    command: CniCommand,
    result: CniResultLabel,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CniCommandLabels {
    command: CniCommand,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
enum CniCommand {
    Add,
    Del,
    Check,
    Status,
    Gc,
    Version,
    Unknown,
}

/// The result of a call, as a label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum CniResultLabel {
    Ok,
    /// The runtime retries.
    Later,
    Error,
}

impl CniResultLabel {
    pub fn of<T>(result: &Result<T, Error>) -> Self {
        match result {
            Ok(_) => Self::Ok,
            Err(Error { code: Code::TryAgainLater | Code::NotAvailable, .. }) => Self::Later,
            Err(_) => Self::Error,
        }
    }
}

impl Default for Metrics {
    fn default() -> Self {
        // From half a millisecond to eight seconds.
        let durations = || Histogram::new(exponential_buckets(0.0005, 2.0, 15));
        Self { calls: Family::default(), durations: Family::new_with_constructor(durations) }
    }
}

impl Metrics {
    pub fn register(&self, registry: &mut Registry) {
        registry.register("cni_calls", "CNI calls", self.calls.clone());
        let help = "Duration of CNI calls in the daemon";
        registry.register_with_unit("cni_duration", help, Unit::Seconds, self.durations.clone());
    }

    pub fn count(&self, verb: Option<Verb>, result: CniResultLabel, took: Duration) {
        let command = match verb {
            Some(Verb::Add) => CniCommand::Add,
            Some(Verb::Del) => CniCommand::Del,
            Some(Verb::Check) => CniCommand::Check,
            Some(Verb::Status) => CniCommand::Status,
            Some(Verb::Gc) => CniCommand::Gc,
            Some(Verb::Version) => CniCommand::Version,
            None => CniCommand::Unknown,
        };
        self.calls.get_or_create(&CniCallLabels { command, result }).inc();
        self.durations.get_or_create(&CniCommandLabels { command }).observe(took.as_secs_f64());
    }
}
