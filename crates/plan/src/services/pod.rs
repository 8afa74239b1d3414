//! What the planner knows about a pod.

use std::{fmt, net::IpAddr, sync::Arc};

use api::{
    network_status::NETWORK_STATUS_ANNOTATION,
    networkservice::{Protocol, VIRTUAL_MACHINE_LABEL},
    selection::NadRef,
};
use jiff::Timestamp;

use super::Labels;

/// A pod, reduced to what its endpoints depend on. Texts that many pods share are meant to be interned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodFacts {
    pub namespace: Arc<str>,
    pub name: Arc<str>,
    pub uid: Arc<str>,
    pub labels: Arc<Labels>,
    /// `spec.nodeName`, if the pod is scheduled.
    pub node: Option<Arc<str>>,
    pub phase: PodPhase,
    /// Whether the pod has a deletion timestamp.
    pub deleting: bool,
    /// Whether the condition Ready is True. The kubelet includes the readiness gates in it.
    pub ready: bool,
    /// `lastTransitionTime` of the condition Ready.
    pub ready_since: Option<Timestamp>,
    pub created: Timestamp,
    /// `spec.hostname`.
    pub hostname: Option<Arc<str>>,
    /// `spec.subdomain`.
    pub subdomain: Option<Arc<str>>,
    pub host_network: bool,
    /// The named ports of the containers, then those of the init containers that restart always (sidecars).
    pub ports: Arc<[ContainerPort]>,
    /// The interfaces of the network-status annotation, from [`interfaces`](super::interfaces); an error if its text is not a
    /// JSON list.
    pub interfaces: Result<Box<[PodInterface]>, Arc<str>>,
}

/// The phase of a pod, as far as endpoints depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PodPhase {
    /// Pending, Running or Unknown.
    Active,
    /// Succeeded or Failed: the pod has no endpoints.
    Finished,
}

/// A named port of a container.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ContainerPort {
    pub name: Box<str>,
    pub protocol: Protocol,
    pub port: u16,
}

/// An interface of a pod on a secondary network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodInterface {
    /// The NAD.
    pub nad: Arc<NadRef>,
    /// The name of the interface in the pod. Empty if it is not reported.
    pub interface: Arc<str>,
    /// The addresses that an EndpointSlice may contain.
    pub addresses: Box<[IpAddr]>,
    /// What of the entry is left out.
    pub faults: Box<[InterfaceFault]>,
}

/// Why a part of an entry of the network-status annotation is left out.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum InterfaceFault {
    /// A text in `ips` that no endpoint can have as address.
    Address(Box<str>),
    /// The entry cannot be read.
    Entry(Box<str>),
}

/// Why a pod, or one of its addresses or names, is missing in a service.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodFault {
    pub pod: Arc<str>,
    pub reason: FaultReason,
    /// What is wrong, without the name of the pod.
    pub detail: Arc<str>,
}

/// The reason of an event about a [`PodFault`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FaultReason {
    /// The network-status annotation cannot be read.
    BadNetworkStatus,
    /// An entry of the network-status annotation cannot be read.
    BadNetworkStatusEntry,
    /// An address that an EndpointSlice cannot contain.
    BadAddress,
    /// An address outside of the subnets of the BridgeNetwork.
    AddressOutsideSubnets,
    /// An address that the BridgeNetwork allocates to no pod.
    AddressReserved,
    /// The name of the pod is not a DNS label, so it gets no DNS name.
    BadHostname,
}

impl PodFacts {
    /// The virtual machine that the pod runs, by the label of KubeVirt.
    pub fn virtual_machine(&self) -> Option<&str> {
        self.labels.get(VIRTUAL_MACHINE_LABEL).filter(|value| !value.is_empty())
    }

    /// Whether the pod is ready and is not being deleted.
    pub fn takes_traffic(&self) -> bool {
        self.ready && !self.deleting
    }
}

impl FaultReason {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::BadNetworkStatus | Self::BadNetworkStatusEntry => "BadNetworkStatus",
            Self::BadAddress => "BadAddress",
            Self::AddressOutsideSubnets => "AddressOutsideSubnets",
            Self::AddressReserved => "AddressReserved",
            Self::BadHostname => "BadHostname",
        }
    }
}

/// The note of the event.
impl fmt::Display for PodFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pod, reason, detail } = self;
        match reason {
            FaultReason::BadNetworkStatus => write!(f, "pod {pod} has no endpoint: {detail}"),
            FaultReason::BadNetworkStatusEntry => {
                write!(f, "pod {pod}: {detail} in {NETWORK_STATUS_ANNOTATION} and is left out")
            }
            FaultReason::BadAddress => {
                write!(
                    f,
                    "pod {pod}: {detail} in its network-status cannot be an endpoint and is left out; correct the IPAM of the network"
                )
            }
            FaultReason::AddressOutsideSubnets => write!(
                f,
                "pod {pod}: address {detail} is outside of the subnets of the BridgeNetwork and is left out; add its subnet to spec.ipam.subnets or give the pod another address"
            ),
            FaultReason::AddressReserved => write!(
                f,
                "pod {pod}: address {detail} is a gateway of the BridgeNetwork or excluded by it and is left out; correct spec.ipam or give the pod another address"
            ),
            FaultReason::BadHostname => write!(
                f,
                "pod {pod} gets no DNS name: its name is not a DNS label (at most 63 characters, no dot); {detail}"
            ),
        }
    }
}
