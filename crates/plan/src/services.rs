//! NetworkServices: which EndpointSlices a Service on a secondary network has.
//!
//! The controller keeps a [`PodFacts`] for each pod that a service may select and an [`ObservedSlice`] for each EndpointSlice
//! of a service. For each change it calls, in this order:
//!
//! 1. [`decide_service`] for a NetworkService, or [`annotated_service`] for a Service that the user owns;
//! 2. [`endpoints`], which derives the endpoints from the selected pods;
//! 3. [`pack`], which distributes them over the slices and returns only the slices that change;
//! 4. [`status`] and [`decide_status_write`], after the plan was applied.
//!
//! A plan that is applied twice is empty the second time. The cost of a plan is linear in the endpoints of one service;
//! slices that do not change are neither copied nor compared with each other.
//!
//! Comments cite the rules R1 to R39 for EndpointSlices, which the appendix of `docs/adr/0009-network-services.md` lists.

mod annotated;
mod duplicates;
mod endpoint;
mod endpoints;
mod headless;
mod labels;
mod network_status;
mod pack;
mod pod;
mod slice;
mod spec;
mod status;
#[cfg(test)]
mod tests;
mod warnings;

pub use annotated::{AnnotatedService, ServiceFault, annotated_service, is_annotated};
pub use duplicates::DuplicateAddress;
pub use endpoint::{Endpoint, EndpointConditions, EndpointPort, EndpointPorts, Family, Hints};
pub use endpoints::{DesiredEndpoints, EndpointGroup, EndpointInput, NodeZones, endpoints};
pub use headless::{
    ClusterIp, NetworkServiceFacts, ObservedService, OwnerRef, ServiceDecision, ServicePort, ServiceType,
    changed_back, decide_service, is_controlled_by, why_no_slices, withheld,
};
pub use labels::Labels;
pub use network_status::interfaces;
pub use pack::{PackInput, SlicePlan, pack, withdraw};
pub use pod::{ContainerPort, FaultReason, InterfaceFault, PodFacts, PodFault, PodInterface, PodPhase};
pub use slice::{
    MAX_ENDPOINTS, ObservedEndpoint, ObservedSlice, SliceContent, SliceOwner, SliceTarget, SliceUpdate,
};
pub use spec::{Families, NetworkAddresses, NetworkState, ServiceSpec, TrafficDistribution};
pub use status::{
    COUNTS_INTERVAL, ForeignKind, ForeignObject, ServiceState, StatusEvent, StatusInput, StatusPlan,
    StatusWrite, WriteFault, decide_status_write, status,
};
pub use warnings::service_warnings;
