//! What is kept of one pod and of one service.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use api::{NetworkServiceStatus, selection::NadRef};
use client::fence::now;
use plan::services::{
    Labels, NodeZones, ObservedService, ObservedSlice, PodFacts, ServiceSpec, annotated_service, is_annotated,
};

use super::{expectations::SliceExpectations, network_service::ObservedNetworkService};
use crate::services::ServiceKey;

/// How long repairs of slices that others changed are collected (R32).
pub const REPAIR_DELAY: Duration = Duration::from_secs(1);

pub struct StoredPod {
    pub content: PodContent,
    /// The last list that contained the pod.
    pub list: u32,
}

/// What is kept of a pod.
#[derive(Clone, PartialEq, Eq)]
pub enum PodContent {
    /// It reports no secondary network. Services only count it.
    Plain(Arc<Labels>),
    Endpoint(Arc<PodFacts>),
}

impl PodContent {
    pub fn new(pod: PodFacts) -> Self {
        match &pod.interfaces {
            Ok(interfaces) if interfaces.is_empty() => Self::Plain(pod.labels),
            _ => Self::Endpoint(Arc::new(pod)),
        }
    }

    pub fn labels(&self) -> &Labels {
        match self {
            Self::Plain(labels) => labels,
            Self::Endpoint(pod) => &pod.labels,
        }
    }

    pub fn facts(&self) -> Option<&Arc<PodFacts>> {
        match self {
            Self::Plain(_) => None,
            Self::Endpoint(pod) => Some(pod),
        }
    }

    pub fn equals(&self, pod: &PodFacts) -> bool {
        match self {
            Self::Plain(labels) => {
                *labels == pod.labels && matches!(&pod.interfaces, Ok(interfaces) if interfaces.is_empty())
            }
            Self::Endpoint(known) => **known == *pod,
        }
    }
}

/// Everything about the services of one name.
#[derive(Default)]
pub struct ServiceEntry {
    pub network_service: Option<Arc<ObservedNetworkService>>,
    pub service: Option<Arc<ObservedService>>,
    /// By name.
    pub slices: BTreeMap<Arc<str>, Arc<ObservedSlice>>,
    /// EndpointSlices of other managers: their names and managers.
    pub foreign_slices: Vec<(Arc<str>, Arc<str>)>,
    pub has_endpoints: bool,
    /// The NAD of the addresses that the service publishes.
    pub network: Option<NadRef>,
    /// The pods that the service selects, by name; None for those without secondary network.
    pub members: BTreeMap<Arc<str>, Option<Arc<PodFacts>>>,
    pub expectations: SliceExpectations,
    /// A reconcile waits for the watch to deliver own writes.
    pub awaits_slices: bool,
    /// The status that the controller wrote and that the watch has not delivered.
    pub written_status: Option<NetworkServiceStatus>,
}

impl ServiceEntry {
    /// Whether there is anything to reconcile.
    pub fn is_tracked(&self) -> bool {
        self.needs_pods() || !self.slices.is_empty()
    }

    /// Whether the endpoints of pods may be published.
    pub fn needs_pods(&self) -> bool {
        self.network_service.is_some() || self.service.as_ref().is_some_and(|service| is_annotated(service))
    }

    pub fn is_empty(&self) -> bool {
        self.network_service.is_none()
            && self.service.is_none()
            && self.slices.is_empty()
            && self.foreign_slices.is_empty()
            && !self.has_endpoints
    }

    /// What the service publishes: that of the NetworkService, unless the Service belongs to a user who annotated it.
    pub fn spec(&self, namespace: &Arc<str>, name: &Arc<str>) -> Option<ServiceSpec> {
        let annotated = self.service.as_ref().and_then(|service| annotated_service(namespace, name, service));
        match (annotated, &self.network_service) {
            (_, Some(network_service)) if network_service.controls(self.service.as_deref()) => {
                network_service.spec.clone().ok()
            }
            (Some(annotated), _) => annotated.ok().map(|annotated| annotated.spec),
            (None, Some(network_service)) => network_service.spec.clone().ok(),
            (None, None) => None,
        }
    }

    /// Whether a change of a slice needs a reconcile: soon if it was an own write that a reconcile waits for, later if it is
    /// a change by others.
    pub fn wake(&mut self, key: &ServiceKey, own: bool) -> Option<(ServiceKey, Duration)> {
        let delay = match (self.awaits_slices, own) {
            (true, _) if !self.expectations.is_stale(&self.slices, now()) => {
                self.awaits_slices = false;
                Duration::ZERO
            }
            (true, _) | (false, true) => return None,
            (false, false) => REPAIR_DELAY,
        };
        Some((key.clone(), delay))
    }
}

/// What a reconcile of one service reads.
#[derive(Default)]
pub struct ServiceSnapshot {
    pub name: Arc<str>,
    pub network_service: Option<Arc<ObservedNetworkService>>,
    pub service: Option<Arc<ObservedService>>,
    pub slices: Vec<Arc<ObservedSlice>>,
    pub foreign_slices: Vec<(Arc<str>, Arc<str>)>,
    pub has_endpoints: bool,
    /// Whether `foreign_slices` and `has_endpoints` are complete.
    pub foreign_listed: bool,
    /// The selected pods that report a secondary network.
    pub pods: Vec<Arc<PodFacts>>,
    /// The number of selected pods without one.
    pub plain_pods: usize,
    /// The Nodes with their zones.
    pub zones: Arc<NodeZones>,
    /// The cache does not show own writes of slices yet.
    pub stale: bool,
}
