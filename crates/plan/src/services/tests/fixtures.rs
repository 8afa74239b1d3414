//! Valid pods, services and slices, which tests change in one point.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use api::{
    LabelSelector,
    networkservice::{Hostnames, Protocol, TargetPort},
    selection::NadRef,
};
use jiff::Timestamp;

use crate::services::{
    ContainerPort, DesiredEndpoints, EndpointInput, Families, Labels, NetworkState, NodeZones, ObservedSlice,
    PodFacts, PodInterface, PodPhase, ServicePort, ServiceSpec, SliceOwner, endpoints,
};

/// The namespace of every object.
pub const NAMESPACE: &str = "shop";
/// The UID of the Service.
pub const SERVICE_UID: &str = "service-uid";

pub fn time(second: i64) -> Timestamp {
    Timestamp::from_second(1_700_000_000 + second).unwrap()
}

pub fn blue() -> NadRef {
    NadRef::new(NAMESPACE, "blue")
}

/// A ready pod on node `n1` with these addresses on the network `blue`.
pub fn pod(name: &str, addresses: &[&str]) -> PodFacts {
    PodFacts {
        namespace: NAMESPACE.into(),
        name: name.into(),
        uid: format!("uid-{name}").into(),
        labels: Arc::new(Labels::new([("app", "db")])),
        node: Some("n1".into()),
        phase: PodPhase::Active,
        deleting: false,
        ready: true,
        ready_since: Some(time(0)),
        created: time(0),
        hostname: None,
        subdomain: None,
        host_network: false,
        ports: Arc::new([]),
        interfaces: Ok(Box::new([interface("net1", addresses)])),
    }
}

pub fn interface(name: &str, addresses: &[&str]) -> PodInterface {
    PodInterface {
        nad: Arc::new(blue()),
        interface: name.into(),
        addresses: addresses.iter().map(|text| address(text)).collect(),
        faults: Box::default(),
    }
}

pub fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Pods `p000`, `p001` ... with one IPv4 address each.
pub fn pods(count: usize) -> Vec<PodFacts> {
    (0..count).map(|index| pod(&format!("p{index:03}"), &[&ipv4(index)])).collect()
}

pub fn ipv4(index: usize) -> String {
    format!("10.1.{}.{}", index / 250, index % 250 + 1)
}

/// The service `db` on the network `blue`, with one port.
pub fn spec() -> ServiceSpec {
    ServiceSpec {
        namespace: NAMESPACE.into(),
        name: "db".into(),
        network: blue(),
        interface: None,
        selector: LabelSelector {
            match_labels: BTreeMap::from([("app".to_owned(), "db".to_owned())]),
            ..LabelSelector::default()
        },
        ports: vec![port("pg", 5432, TargetPort::Number(5432))],
        publish_not_ready: false,
        hostnames: Hostnames::None,
        traffic: None,
    }
}

pub fn port(name: &str, port: u16, target: TargetPort) -> ServicePort {
    ServicePort { name: name.to_owned(), port, protocol: Protocol::Tcp, target, app_protocol: None }
}

pub fn container_port(name: &str, protocol: Protocol, port: u16) -> ContainerPort {
    ContainerPort { name: name.into(), protocol, port }
}

/// Node `n1` in zone `z1`, `n2` in zone `z2` and `n3` without a zone.
pub fn nodes() -> NodeZones {
    let nodes = [("n1", Some("z1")), ("n2", Some("z2")), ("n3", None)];
    nodes.into_iter().map(|(name, zone)| (name.into(), zone.map(Into::into))).collect()
}

/// The Service `db` with IPv4 only, so that tests of packing see no placeholder of IPv6.
pub fn owner() -> SliceOwner {
    SliceOwner {
        service: "db".into(),
        uid: SERVICE_UID.into(),
        created: time(-100),
        deleting: false,
        headless: true,
        families: Families { ipv4: true, ipv6: false },
        labels: BTreeMap::from([("team".to_owned(), "storage".to_owned())]),
        network: blue().to_string().into(),
    }
}

pub fn found() -> NetworkState {
    NetworkState::Found { addresses: None }
}

/// The endpoints of these pods, with the defaults of this file.
pub fn desired<'a>(spec: &ServiceSpec, pods: impl IntoIterator<Item = &'a PodFacts>) -> DesiredEndpoints {
    desired_on(spec, &found(), &[], pods)
}

pub fn desired_on<'a>(
    spec: &ServiceSpec,
    network: &NetworkState,
    published: &[&ObservedSlice],
    pods: impl IntoIterator<Item = &'a PodFacts>,
) -> DesiredEndpoints {
    let input = EndpointInput { spec, families: Families::DUAL, nodes: &nodes(), network, published };
    endpoints(&input, pods)
}
