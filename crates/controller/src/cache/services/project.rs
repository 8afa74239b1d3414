//! Projects pods, EndpointSlices and Services to what the planner of services reads.

use std::{net::IpAddr, sync::Arc};

use api::{
    NetworkServiceSpec, NetworkServiceStatus,
    network_status::NETWORK_STATUS_ANNOTATION,
    networkservice::{Protocol, SERVICE_NAME_LABEL, SERVICE_NETWORK_ANNOTATION, TargetPort},
};
use client::decode::{Lenient, Object};
use jiff::Timestamp;
use k8s_openapi::{
    api::{
        core::v1::{self as core, Service},
        discovery::v1::{self as discovery, EndpointSlice},
    },
    apimachinery::pkg::{
        apis::meta::v1::{OwnerReference, Time},
        util::intstr::IntOrString,
    },
};
use kube::core::ApiResource;
use plan::services::{
    ClusterIp, ContainerPort, Endpoint, EndpointConditions, EndpointPort, EndpointPorts, Families, Family,
    Hints, Labels, ObservedEndpoint, ObservedService, ObservedSlice, OwnerRef, PodFacts, PodPhase,
    ServicePort, ServiceType, interfaces,
};
use serde::Deserialize;

use crate::{cache::project::resource, services::ServiceKey};

/// The annotations of a Service that are read. Others can be long.
const READ_ANNOTATIONS: [&str; 2] = ["patchbay.dev/", "service.kubernetes.io/topology-"];

/// A pod without the fields that no endpoint depends on.
pub type EndpointPod = Object<EndpointPodSpec, EndpointPodStatus>;
pub type NetworkServiceObject = Object<Lenient<NetworkServiceSpec>, Lenient<NetworkServiceStatus>>;

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct EndpointPodSpec {
    node_name: Option<String>,
    hostname: Option<String>,
    subdomain: Option<String>,
    host_network: bool,
    containers: Vec<ContainerPorts>,
    init_containers: Vec<ContainerPorts>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct ContainerPorts {
    ports: Vec<PodPort>,
    restart_policy: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct PodPort {
    name: Option<String>,
    container_port: i64,
    protocol: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct EndpointPodStatus {
    phase: Option<String>,
    conditions: Vec<PodCondition>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct PodCondition {
    r#type: String,
    status: String,
    last_transition_time: Option<Time>,
}

pub fn network_services() -> ApiResource {
    resource(api::GROUP, api::VERSION, "NetworkService", "networkservices")
}

pub fn services() -> ApiResource {
    resource("", "v1", "Service", "services")
}

pub fn endpoints() -> ApiResource {
    resource("", "v1", "Endpoints", "endpoints")
}

pub fn slices() -> ApiResource {
    resource("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices")
}

pub fn service(object: Service) -> Option<(ServiceKey, ObservedService)> {
    let Service { metadata, spec, .. } = object;
    let spec = spec.unwrap_or_default();
    let key = ServiceKey::new(metadata.namespace.as_deref()?, metadata.name.as_deref()?);
    let mut annotations = metadata.annotations.unwrap_or_default();
    annotations.retain(|name, _| READ_ANNOTATIONS.iter().any(|prefix| name.starts_with(prefix)));
    let observed = ObservedService {
        uid: metadata.uid?,
        resource_version: metadata.resource_version?,
        created: metadata.creation_timestamp.map_or(Timestamp::UNIX_EPOCH, |time| time.0),
        deleting: metadata.deletion_timestamp.is_some(),
        labels: metadata.labels.unwrap_or_default(),
        annotations,
        owners: metadata.owner_references.unwrap_or_default().into_iter().map(owner).collect(),
        r#type: match spec.type_.as_deref() {
            None | Some("ClusterIP") => ServiceType::ClusterIp,
            Some("ExternalName") => ServiceType::ExternalName,
            Some(_) => ServiceType::Other,
        },
        cluster_ip: match spec.cluster_ip.as_deref() {
            Some("None") => ClusterIp::None,
            None | Some("") => ClusterIp::Unset,
            Some(address) => ClusterIp::Assigned(address.to_owned()),
        },
        selector: spec.selector.unwrap_or_default(),
        ports: spec.ports.unwrap_or_default().into_iter().filter_map(service_port).collect(),
        publish_not_ready: spec.publish_not_ready_addresses.unwrap_or_default(),
        families: Families::new(spec.ip_families.iter().flatten().map(String::as_str)),
        traffic_distribution: spec.traffic_distribution,
    };
    Some((key, observed))
}

fn owner(owner: OwnerReference) -> OwnerRef {
    OwnerRef {
        api_version: owner.api_version,
        kind: owner.kind,
        name: owner.name,
        uid: owner.uid,
        controller: owner.controller,
        block_owner_deletion: owner.block_owner_deletion,
    }
}

/// None if the API server would not have accepted the port.
fn service_port(port: core::ServicePort) -> Option<ServicePort> {
    let target = match port.target_port {
        Some(IntOrString::String(name)) => TargetPort::Name(name),
        Some(IntOrString::Int(number)) if number != 0 => TargetPort::Number(number),
        Some(IntOrString::Int(_)) | None => TargetPort::Number(port.port),
    };
    Some(ServicePort {
        name: port.name.unwrap_or_default(),
        port: u16::try_from(port.port).ok()?,
        protocol: Protocol::parse(port.protocol.as_deref())?,
        target,
        app_protocol: port.app_protocol,
    })
}

/// None if the pod has no name or UID.
pub fn pod(object: EndpointPod) -> Option<PodFacts> {
    let Object { metadata, spec, status, .. } = object;
    let status = status.unwrap_or_default();
    let namespace: Arc<str> = metadata.namespace?.into();
    let annotation = metadata.annotations.as_ref().and_then(|all| all.get(NETWORK_STATUS_ANNOTATION));
    let ready = status.conditions.into_iter().find(|condition| condition.r#type == "Ready");
    let finished = matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"));
    Some(PodFacts {
        interfaces: interfaces(annotation.map(String::as_str), &namespace),
        name: metadata.name?.into(),
        uid: metadata.uid?.into(),
        labels: Arc::new(Labels::new(metadata.labels.unwrap_or_default())),
        node: not_empty(spec.node_name),
        phase: if finished { PodPhase::Finished } else { PodPhase::Active },
        deleting: metadata.deletion_timestamp.is_some(),
        ready: ready.as_ref().is_some_and(|ready| ready.status == "True"),
        ready_since: ready.and_then(|ready| ready.last_transition_time).map(|time| time.0),
        created: metadata.creation_timestamp.map_or(Timestamp::UNIX_EPOCH, |time| time.0),
        hostname: not_empty(spec.hostname),
        subdomain: not_empty(spec.subdomain),
        host_network: spec.host_network,
        ports: named_ports(spec.containers, spec.init_containers),
        namespace,
    })
}

fn not_empty(text: Option<String>) -> Option<Arc<str>> {
    text.filter(|text| !text.is_empty()).map(Arc::from)
}

/// The named ports of the containers, then those of the sidecars.
fn named_ports(
    containers: Vec<ContainerPorts>,
    init_containers: Vec<ContainerPorts>,
) -> Arc<[ContainerPort]> {
    let sidecars =
        init_containers.into_iter().filter(|container| container.restart_policy.as_deref() == Some("Always"));
    let ports = containers.into_iter().chain(sidecars).flat_map(|container| container.ports);
    let named = ports.filter_map(|port| {
        Some(ContainerPort {
            name: port.name.filter(|name| !name.is_empty())?.into(),
            protocol: Protocol::parse(port.protocol.as_deref())?,
            port: u16::try_from(port.container_port).ok()?,
        })
    });
    named.collect()
}

/// A slice, with the Service that its label names. The name is empty without the label.
pub fn slice(object: EndpointSlice) -> Option<(ServiceKey, ObservedSlice)> {
    let EndpointSlice { metadata, address_type, endpoints, ports } = object;
    let namespace: Arc<str> = metadata.namespace?.into();
    let labels = metadata.labels.unwrap_or_default();
    let service = labels.get(SERVICE_NAME_LABEL).map_or("", String::as_str).into();
    let network = metadata.annotations.and_then(|mut all| all.remove(SERVICE_NETWORK_ANNOTATION));
    let slice = ObservedSlice {
        name: metadata.name?.into(),
        uid: metadata.uid?.into(),
        resource_version: metadata.resource_version?.into(),
        generation: metadata.generation.unwrap_or_default(),
        deleting: metadata.deletion_timestamp.is_some(),
        labels: Arc::new(Labels::new(labels)),
        network: network.map(Arc::from),
        owner: metadata.owner_references.unwrap_or_default().into_iter().find_map(service_owner),
        family: Family::parse(&address_type),
        ports: ports
            .unwrap_or_default()
            .into_iter()
            .map(slice_port)
            .collect::<Option<Vec<_>>>()
            .map(EndpointPorts::new),
        endpoints: endpoints
            .into_iter()
            .map(|one| endpoint(one, &namespace).map_or(ObservedEndpoint::Altered, ObservedEndpoint::Known))
            .collect(),
    };
    Some((ServiceKey { namespace, name: service }, slice))
}

fn service_owner(owner: OwnerReference) -> Option<Arc<str>> {
    let is_service = owner.api_version == "v1" && owner.kind == "Service";
    let controls = owner.controller == Some(true) && owner.block_owner_deletion == Some(true);
    (is_service && controls).then(|| owner.uid.into())
}

fn slice_port(port: discovery::EndpointPort) -> Option<EndpointPort> {
    Some(EndpointPort {
        name: port.name.unwrap_or_default().into(),
        protocol: Protocol::parse(Some(port.protocol.as_deref()?))?,
        port: u16::try_from(port.port?).ok()?,
        app_protocol: port.app_protocol.map(Arc::from),
    })
}

/// None if the endpoint has a form that Patchbay does not write.
fn endpoint(endpoint: discovery::Endpoint, namespace: &str) -> Option<Endpoint> {
    let discovery::Endpoint {
        addresses,
        conditions,
        deprecated_topology,
        hints,
        hostname,
        node_name,
        target_ref,
        zone,
    } = endpoint;
    let [text] = &addresses[..] else { return None };
    let address: IpAddr = text.parse().ok()?;
    // Canonical text (R14).
    if address.to_string() != *text || !deprecated_topology.unwrap_or_default().is_empty() {
        return None;
    }
    let conditions = conditions?;
    let target = target_ref?;
    let plain = target.kind.as_deref() == Some("Pod")
        && target.namespace.as_deref() == Some(namespace)
        && target.resource_version.is_none()
        && target.api_version.is_none()
        && target.field_path.is_none();
    if !plain {
        return None;
    }
    let (node, zone) = (node_name.map(Arc::from), zone.map(Arc::from));
    Some(Endpoint {
        address,
        hints: slice_hints(hints, node.as_deref(), zone.as_deref())?,
        hostname: hostname.map(Arc::from),
        pod: target.name?.into(),
        pod_uid: target.uid?.into(),
        node,
        zone,
        conditions: EndpointConditions {
            ready: conditions.ready?,
            serving: conditions.serving?,
            terminating: conditions.terminating?,
        },
    })
}

/// None if the hints are not those that follow from node and zone.
fn slice_hints(
    hints: Option<discovery::EndpointHints>,
    node: Option<&str>,
    zone: Option<&str>,
) -> Option<Hints> {
    let Some(hints) = hints else { return Some(Hints::None) };
    let zones: Vec<String> = hints.for_zones.unwrap_or_default().into_iter().map(|zone| zone.name).collect();
    let nodes: Vec<String> = hints.for_nodes.unwrap_or_default().into_iter().map(|node| node.name).collect();
    let zones_match = zones.iter().map(String::as_str).eq(zone);
    match &nodes[..] {
        [] if zones.is_empty() => Some(Hints::None),
        [] => zones_match.then_some(Hints::Zone),
        [one] => (zones_match && Some(one.as_str()) == node).then_some(Hints::Node),
        _ => None,
    }
}
