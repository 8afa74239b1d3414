//! The metrics of a replica.

use std::{
    fmt,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use client::request::{ApiCall, DEFAULT_TIMEOUT};
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

use crate::webhook::admission::WebhookPath;

/// The kind of a request to the API server. Variant names are label values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum ApiCallKind {
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

/// The result of an admission request. Variant names are label values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum AdmissionOutcome {
    Allowed,
    Denied,
    Malformed,
    Unavailable,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CallLabels {
    call: ApiCallKind,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AdmissionLabels {
    path: WebhookPath,
    result: AdmissionOutcome,
}

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
        registry.register("leader", "Whether this replica is the leader", self.leader.clone());
        registry.register(
            "webhook_certificate_expiry_timestamp_seconds",
            "When the served webhook certificate expires, 0 before one is loaded",
            self.certificate_expiry.clone(),
        );
        registry.register("api_errors", "Failed requests to the API server", self.api_errors.clone());
        registry.register("admission_requests", "Answered admission requests", self.admissions.clone());
        registry.register("networks", "Number of BridgeNetworks", self.networks.clone());
        registry.register("network_users", "Objects that reference a network", self.users.clone());
        let repairs = "NetworkAttachmentDefinitions that were changed or deleted and then repaired";
        registry.register("attachment_repairs", repairs, self.attachment_repairs.clone());
        let plan = "Duration of planning all networks";
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

    /// Records one planning pass of the leader.
    pub fn planned(&self, networks: usize, users: usize, took: Duration) {
        self.networks.set(i64::try_from(networks).unwrap_or(i64::MAX));
        self.users.set(i64::try_from(users).unwrap_or(i64::MAX));
        self.plan_duration.observe(took.as_secs_f64());
    }

    pub fn attachment_repaired(&self) {
        self.attachment_repairs.inc();
    }

    /// Sends requests of this kind, and counts the failed ones.
    pub fn api_call(self: &Arc<Self>, call: ApiCallKind) -> ApiCall {
        self.api_call_within(DEFAULT_TIMEOUT, call)
    }

    /// Like [`Self::api_call`], with another timeout.
    pub fn api_call_within(self: &Arc<Self>, timeout: Duration, call: ApiCallKind) -> ApiCall {
        let metrics = Arc::clone(self);
        ApiCall::new(timeout, move || metrics.api_error(call))
    }

    pub fn api_error(&self, call: ApiCallKind) {
        self.api_errors.get_or_create(&CallLabels { call }).inc();
    }

    pub fn admission(&self, path: WebhookPath, result: AdmissionOutcome) {
        self.admissions.get_or_create(&AdmissionLabels { path, result }).inc();
    }

    /// Encodes the metrics in the OpenMetrics text format.
    pub fn text(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry)?;
        Ok(text)
    }
}
