//! The metrics of a replica.

use std::{
    collections::BTreeMap,
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
    WatchNetworkServices,
    WatchServices,
    WatchSlices,
    WatchEndpoints,
    NetworkService,
    Service,
    Slice,
    WatchSecret,
    WatchWebhookConfiguration,
    WatchClaims,
    Claim,
    ClaimStatus,
    Machine,
    Crd,
}

/// How an EndpointSlice was written. Variant names are label values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum SliceVerb {
    Create,
    Update,
    Delete,
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

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PathLabels {
    path: WebhookPath,
}

/// The state of an IPAMClaim. Variant names are label values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, EncodeLabelValue)]
pub enum ClaimMetricState {
    Allocated,
    Pending,
    Failed,
    NotOurs,
    Terminating,
}

impl ClaimMetricState {
    pub const ALL: [Self; 5] =
        [Self::Allocated, Self::Pending, Self::Failed, Self::NotOurs, Self::Terminating];
}

/// The IPAMClaims of the cluster at the time of a scrape.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimTotals {
    pub states: BTreeMap<ClaimMetricState, usize>,
    /// Claims whose deletion waits for our finalizer.
    pub stuck: usize,
    /// The age of the oldest claim that has no addresses yet.
    pub oldest_pending: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ClaimLabels {
    state: ClaimMetricState,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SliceLabels {
    verb: SliceVerb,
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
    services: Gauge,
    slice_writes: Family<SliceLabels, Counter>,
    service_duration: Histogram,
    admission_duration: Family<PathLabels, Histogram, fn() -> Histogram>,
    claims: Family<ClaimLabels, Gauge>,
    stuck_finalizers: Gauge,
    oldest_pending: Gauge,
    allocation_duration: Histogram,
}

fn admission_histogram() -> Histogram {
    Histogram::new(exponential_buckets(0.000_25, 2.0, 12))
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
            services: Gauge::default(),
            slice_writes: Family::default(),
            service_duration: Histogram::new(exponential_buckets(0.000_1, 4.0, 8)),
            admission_duration: Family::new_with_constructor(admission_histogram),
            claims: Family::default(),
            stuck_finalizers: Gauge::default(),
            oldest_pending: Gauge::default(),
            allocation_duration: Histogram::new(exponential_buckets(0.005, 2.0, 12)),
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
        let services = "Number of NetworkServices and of Services with the annotations of Patchbay";
        registry.register("network_services", services, self.services.clone());
        registry.register("endpointslice_writes", "Written EndpointSlices", self.slice_writes.clone());
        let reconcile = "Duration of reconciling one service, with its writes";
        registry.register("service_reconcile_duration_seconds", reconcile, self.service_duration.clone());
        let admission = "Duration of answering an admission request";
        registry.register("admission_duration_seconds", admission, self.admission_duration.clone());
        registry.register("ipam_claims", "Number of IPAMClaims", self.claims.clone());
        let stuck = "IPAMClaims that have been deleted for more than a minute and still have the finalizer";
        registry.register("ipam_claim_stuck_finalizers", stuck, self.stuck_finalizers.clone());
        let oldest = "Age of the oldest IPAMClaim without addresses";
        registry.register("ipam_claim_oldest_pending_seconds", oldest, self.oldest_pending.clone());
        let allocation = "Time from the first observation of an IPAMClaim until its addresses are published";
        registry.register(
            "ipam_claim_allocation_duration_seconds",
            allocation,
            self.allocation_duration.clone(),
        );
        self
    }

    pub fn leads(&self, leads: bool) {
        self.leader.set(i64::from(leads));
        if !leads {
            // Only the leader counts these.
            for gauge in [&self.networks, &self.users, &self.services] {
                gauge.set(0);
            }
        }
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

    /// Records one reconcile of a service.
    pub fn service_reconciled(&self, services: usize, took: Duration) {
        self.services.set(i64::try_from(services).unwrap_or(i64::MAX));
        self.service_duration.observe(took.as_secs_f64());
    }

    pub fn slice_written(&self, verb: SliceVerb) {
        self.slice_writes.get_or_create(&SliceLabels { verb }).inc();
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

    /// Records how long the answer to an admission request took.
    pub fn admission_took(&self, path: WebhookPath, took: Duration) {
        self.admission_duration.get_or_create(&PathLabels { path }).observe(took.as_secs_f64());
    }

    /// Records that the addresses of a new claim were published.
    pub fn claim_allocated(&self, took: Duration) {
        self.allocation_duration.observe(took.as_secs_f64());
    }

    /// Sets the numbers of IPAMClaims, before they are read.
    pub fn set_claims(&self, totals: &ClaimTotals) {
        let gauge = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        for state in ClaimMetricState::ALL {
            let count = totals.states.get(&state).copied().unwrap_or_default();
            self.claims.get_or_create(&ClaimLabels { state }).set(gauge(count));
        }
        self.stuck_finalizers.set(gauge(totals.stuck));
        self.oldest_pending.set(i64::try_from(totals.oldest_pending.as_secs()).unwrap_or(i64::MAX));
    }

    /// Encodes the metrics in the OpenMetrics text format.
    pub fn text(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry)?;
        Ok(text)
    }
}
