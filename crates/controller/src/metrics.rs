//! What a replica counts.

use std::{
    fmt,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::Registry,
};

use crate::admission::Path;

/// Which calls fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum Call {
    Lease,
    Secret,
    WebhookConfiguration,
    Network,
    Attachment,
    Node,
    Event,
    List,
    WatchNodes,
    WatchNetworks,
    WatchNodeNetworks,
    WatchNamespaces,
    WatchAttachments,
    WatchBlocks,
    Block,
    WatchKinds,
    WatchUsers,
    WatchSecret,
    WatchWebhookConfiguration,
}

/// What became of an admission request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum Outcome {
    Allowed,
    Denied,
    Malformed,
    Unavailable,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CallLabels {
    call: Call,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AdmissionLabels {
    path: Path,
    result: Outcome,
}

/// The metrics of one replica.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    leader: Gauge,
    certificate_expiry: Gauge,
    api_errors: Family<CallLabels, Counter>,
    admissions: Family<AdmissionLabels, Counter>,
    networks: Gauge,
    users: Gauge,
    attachment_repairs: Counter,
    plan_duration: Histogram,
}

impl Default for Metrics {
    fn default() -> Self {
        let metrics = Self {
            registry: Registry::with_prefix("patchbay"),
            leader: Gauge::default(),
            certificate_expiry: Gauge::default(),
            api_errors: Family::default(),
            admissions: Family::default(),
            networks: Gauge::default(),
            users: Gauge::default(),
            attachment_repairs: Counter::default(),
            plan_duration: Histogram::new(exponential_buckets(0.000_1, 4.0, 8)),
        };
        metrics.registered()
    }
}

impl Metrics {
    fn registered(mut self) -> Self {
        let registry = &mut self.registry;
        registry.register("leader", "Whether this replica leads", self.leader.clone());
        registry.register(
            "webhook_certificate_expiry_timestamp_seconds",
            "When the served webhook certificate expires, 0 before one is loaded",
            self.certificate_expiry.clone(),
        );
        registry.register("api_errors", "Calls to the API server that failed", self.api_errors.clone());
        registry.register("admission_requests", "Admission requests answered", self.admissions.clone());
        registry.register("networks", "BridgeNetworks there are", self.networks.clone());
        registry.register("network_users", "Objects that name a network", self.users.clone());
        let repairs = "Attachments that somebody changed or deleted and that were put right";
        registry.register("attachment_repairs", repairs, self.attachment_repairs.clone());
        let plan = "How long it takes to decide what to write";
        registry.register("network_plan_duration_seconds", plan, self.plan_duration.clone());
        self
    }

    pub fn leads(&self, leads: bool) {
        self.leader.set(i64::from(leads));
    }

    pub fn certificate_expires(&self, at: SystemTime) {
        let seconds = at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        self.certificate_expiry.set(i64::try_from(seconds).unwrap_or(i64::MAX));
    }

    /// A look of the leader at all there is.
    pub fn planned(&self, networks: usize, users: usize, took: Duration) {
        self.networks.set(i64::try_from(networks).unwrap_or(i64::MAX));
        self.users.set(i64::try_from(users).unwrap_or(i64::MAX));
        self.plan_duration.observe(took.as_secs_f64());
    }

    pub fn attachment_repaired(&self) {
        self.attachment_repairs.inc();
    }

    pub fn api_error(&self, call: Call) {
        self.api_errors.get_or_create(&CallLabels { call }).inc();
    }

    pub fn admission(&self, path: Path, result: Outcome) {
        self.admissions.get_or_create(&AdmissionLabels { path, result }).inc();
    }

    /// The text that Prometheus reads.
    pub fn text(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry)?;
        Ok(text)
    }
}
