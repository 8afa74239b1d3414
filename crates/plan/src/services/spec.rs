//! What a service publishes: from a NetworkService or from a Service that the user owns.

use std::{net::IpAddr, sync::Arc};

use api::{
    IfName, LabelSelector, NetworkServiceSpec,
    networkservice::{Hostnames, NetworkServicePort, TargetPort},
    selection::NadRef,
};
use ipnet::IpNet;

use super::{Family, FaultReason, PodFacts, ServicePort};

/// The desired content of the slices of a Service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceSpec {
    pub namespace: Arc<str>,
    /// The name of the Service.
    pub name: Arc<str>,
    pub network: NadRef,
    pub interface: Option<IfName>,
    pub selector: LabelSelector,
    pub ports: Vec<ServicePort>,
    pub publish_not_ready: bool,
    pub hostnames: Hostnames,
    /// `spec.trafficDistribution` of a Service that the user owns.
    pub traffic: Option<TrafficDistribution>,
}

/// The IP families of a Service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Families {
    pub ipv4: bool,
    pub ipv6: bool,
}

/// Which endpoints clients prefer (R28).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TrafficDistribution {
    /// PreferClose or PreferSameZone.
    SameZone,
    /// PreferSameNode.
    SameNode,
}

/// What is known about the NAD of a service.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum NetworkState {
    /// The NAD exists, or a BridgeNetwork is about to create it again. The addresses of its BridgeNetwork, if it belongs to
    /// one that has subnets: only these count.
    Found { addresses: Option<Arc<NetworkAddresses>> },
    /// The NAD does not exist. Published endpoints stay while their pods have the address; none is added.
    #[default]
    NotFound,
    /// The NAD joins this BridgeNetwork, which does not exist or cannot be read, so that its subnets are not known. As above.
    NoBridgeNetwork(Arc<str>),
    /// The cluster does not serve the kind NetworkAttachmentDefinition.
    KindNotServed,
}

/// Which addresses pods can have on a BridgeNetwork with subnets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NetworkAddresses {
    pub subnets: Vec<IpNet>,
    /// The ranges in the subnets that are never allocated.
    pub exclude: Vec<IpNet>,
    pub gateways: Vec<IpAddr>,
}

impl NetworkAddresses {
    /// Why no pod has this address on the network.
    pub(super) fn fault(&self, address: IpAddr) -> Option<FaultReason> {
        let contain = |ranges: &[IpNet]| ranges.iter().any(|range| range.contains(&address));
        if !contain(&self.subnets) {
            Some(FaultReason::AddressOutsideSubnets)
        } else if self.gateways.contains(&address) || contain(&self.exclude) {
            Some(FaultReason::AddressReserved)
        } else {
            None
        }
    }
}

impl ServiceSpec {
    /// The spec of a NetworkService; an error says which field is invalid. CEL rejects such objects, but an older release may
    /// have stored one.
    pub fn from_network_service(
        namespace: &str,
        name: &str,
        spec: &NetworkServiceSpec,
    ) -> Result<Self, String> {
        let network = NadRef::parse(&spec.network, namespace)
            .ok_or_else(|| format!("spec.network {:?} is not [namespace/]name", spec.network))?;
        if spec.selector.is_empty() {
            return Err("spec.selector is empty".to_owned());
        }
        let ports = spec.ports.iter().map(service_port).collect::<Result<_, _>>()?;
        Ok(Self {
            namespace: namespace.into(),
            name: name.into(),
            network,
            interface: spec.interface.clone(),
            selector: LabelSelector { match_labels: spec.selector.clone(), ..LabelSelector::default() },
            ports,
            publish_not_ready: spec.publish_not_ready_addresses,
            hostnames: spec.hostnames,
            traffic: None,
        })
    }

    /// Whether the service selects a pod, by its namespace and labels.
    pub fn selects(&self, pod: &PodFacts) -> bool {
        *pod.namespace == *self.namespace && self.selector.matches_by(|key| pod.labels.get(key))
    }
}

fn service_port(port: &NetworkServicePort) -> Result<ServicePort, String> {
    let number = |number: i32| match u16::try_from(number) {
        Ok(number) if number > 0 => Ok(number),
        _ => Err(format!("port {number} is not in 1-65535")),
    };
    let own = number(port.port)?;
    if let Some(TargetPort::Number(target)) = port.target_port {
        number(target)?;
    }
    Ok(ServicePort {
        name: port.name.clone().unwrap_or_default(),
        port: own,
        protocol: port.protocol,
        target: port.target_port.clone().unwrap_or(TargetPort::Number(i32::from(own))),
        app_protocol: port.app_protocol.clone(),
    })
}

impl Families {
    pub const DUAL: Self = Self { ipv4: true, ipv6: true };

    /// Reads `ipFamilies` of a Service. An empty list means both: the API server has not set it.
    pub fn new<'a>(texts: impl IntoIterator<Item = &'a str>) -> Self {
        let mut families = Self { ipv4: false, ipv6: false };
        for family in texts.into_iter().filter_map(Family::parse) {
            match family {
                Family::Ipv4 => families.ipv4 = true,
                Family::Ipv6 => families.ipv6 = true,
            }
        }
        if families.ipv4 || families.ipv6 { families } else { Self::DUAL }
    }

    pub fn contains(self, family: Family) -> bool {
        match family {
            Family::Ipv4 => self.ipv4,
            Family::Ipv6 => self.ipv6,
        }
    }

    pub fn iter(self) -> impl Iterator<Item = Family> {
        Family::ALL.into_iter().filter(move |family| self.contains(*family))
    }
}

impl NetworkState {
    pub fn is_found(&self) -> bool {
        matches!(self, Self::Found { .. })
    }
}
