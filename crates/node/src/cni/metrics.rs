//! What can be counted about CNI calls.

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

/// The numbers of the CNI server.
#[derive(Debug, Clone)]
pub struct Metrics {
    calls: Family<Call, Counter>,
    durations: Family<Asked, Histogram>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Call {
    command: Command,
    result: Outcome,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Asked {
    command: Command,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
enum Command {
    Add,
    Del,
    Check,
    Status,
    Gc,
    Version,
    Unknown,
}

/// How a call ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum Outcome {
    Ok,
    /// The runtime was asked to try again.
    Later,
    Error,
}

impl Outcome {
    pub fn of<T>(answer: &Result<T, Error>) -> Self {
        match answer {
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
    /// Shows the numbers.
    pub fn register(&self, registry: &mut Registry) {
        registry.register("cni_calls", "CNI calls", self.calls.clone());
        let help = "How long CNI calls took in the daemon";
        registry.register_with_unit("cni_duration", help, Unit::Seconds, self.durations.clone());
    }

    pub fn count(&self, verb: Option<Verb>, result: Outcome, took: Duration) {
        let command = match verb {
            Some(Verb::Add) => Command::Add,
            Some(Verb::Del) => Command::Del,
            Some(Verb::Check) => Command::Check,
            Some(Verb::Status) => Command::Status,
            Some(Verb::Gc) => Command::Gc,
            Some(Verb::Version) => Command::Version,
            None => Command::Unknown,
        };
        self.calls.get_or_create(&Call { command, result }).inc();
        self.durations.get_or_create(&Asked { command }).observe(took.as_secs_f64());
    }
}
