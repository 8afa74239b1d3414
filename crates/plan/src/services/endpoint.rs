//! Endpoints as EndpointSlices contain them.

use std::{net::IpAddr, sync::Arc};

use api::networkservice::Protocol;

/// The address type of a slice (R11).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    Ipv4,
    Ipv6,
}

/// One address of one pod (R13). The target is a pod in the namespace of the Service (R24).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    pub address: IpAddr,
    pub hostname: Option<Arc<str>>,
    /// `targetRef.name`.
    pub pod: Arc<str>,
    /// `targetRef.uid`.
    pub pod_uid: Arc<str>,
    pub node: Option<Arc<str>>,
    pub zone: Option<Arc<str>>,
    pub conditions: EndpointConditions,
    pub hints: Hints,
}

/// The conditions of an endpoint (R22). All three are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EndpointConditions {
    pub ready: bool,
    pub serving: bool,
    pub terminating: bool,
}

/// `hints` of an endpoint (R28). They only repeat its zone and node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Hints {
    #[default]
    None,
    /// `forZones: [zone]`.
    Zone,
    /// `forZones: [zone]` if the zone is known, and `forNodes: [node]`.
    Node,
}

/// One port of a slice (R17).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndpointPort {
    /// The name of the Service port; empty if it has none.
    pub name: Arc<str>,
    pub protocol: Protocol,
    pub port: u16,
    pub app_protocol: Option<Arc<str>>,
}

/// The ports of a slice. Two lists with the same ports in another order are equal; so are no list and an empty one.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndpointPorts(Arc<[EndpointPort]>);

impl Family {
    pub const ALL: [Self; 2] = [Self::Ipv4, Self::Ipv6];

    pub fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::Ipv4 } else { Self::Ipv6 }
    }

    /// `addressType` of a slice.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ipv4 => "IPv4",
            Self::Ipv6 => "IPv6",
        }
    }

    /// Reads `addressType` of a slice or an entry of `ipFamilies`.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|family| family.as_str() == text)
    }
}

impl EndpointPorts {
    pub fn new(ports: impl IntoIterator<Item = EndpointPort>) -> Self {
        let mut ports: Vec<EndpointPort> = ports.into_iter().collect();
        ports.sort_unstable();
        Self(ports.into())
    }

    pub fn as_slice(&self) -> &[EndpointPort] {
        &self.0
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
