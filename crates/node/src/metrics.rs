//! What can be counted.

use std::sync::atomic::AtomicU64;

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::{Registry, Unit},
};

/// The numbers of one daemon.
#[derive(Debug, Clone, Default)]
pub struct Metrics {
    pub writes: Family<Write, Counter>,
    pub looks: Family<Look, Counter>,
    pub events: Counter,
    pub overruns: Counter,
    pub watch_failures: Family<Watched, Counter>,
    pub interfaces: Gauge,
    pub published: Gauge<f64, AtomicU64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Write {
    pub part: Written,
    pub result: Outcome,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Look {
    pub result: Outcome,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Watched {
    pub kind: Kind,
}

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum Written {
    Object,
    Status,
    /// The owners again, to remove those that somebody else added.
    Owners,
    /// The status again, to remove what somebody else put there.
    Repair,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum Outcome {
    Ok,
    Error,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum Kind {
    Node,
    NodeNetwork,
}

impl Outcome {
    pub fn of<T, E>(result: &Result<T, E>) -> Self {
        if result.is_ok() { Self::Ok } else { Self::Error }
    }
}

impl Metrics {
    /// The numbers, and the registry that shows them.
    pub fn new() -> (Self, Registry) {
        let metrics = Self::default();
        let mut all = Registry::with_prefix("patchbay_node");
        all.register("writes", "Writes to the NodeNetwork", metrics.writes.clone());
        all.register("looks", "Looks at all links of the node", metrics.looks.clone());
        all.register("events", "Events of the kernel about links", metrics.events.clone());
        all.register("overruns", "Times that the kernel threw events away", metrics.overruns.clone());
        all.register("watch_failures", "Failures of a watch", metrics.watch_failures.clone());
        all.register("interfaces", "Links listed in the NodeNetwork", metrics.interfaces.clone());
        let help = "When the NodeNetwork was last written, in seconds since 1970";
        all.register_with_unit("last_publish_timestamp", help, Unit::Seconds, metrics.published.clone());
        (metrics, all)
    }
}
