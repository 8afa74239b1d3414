//! Services that the user owns and that have the annotations of Patchbay.

use std::sync::Arc;

use api::{
    IfName, LabelSelector,
    networkservice::{
        HOSTNAMES_ANNOTATION, Hostnames, INTERFACE_ANNOTATION, SELECTOR_ANNOTATION,
        SERVICE_NETWORK_ANNOTATION,
    },
    selection::NadRef,
};

use super::{ClusterIp, ObservedService, ServiceSpec, ServiceType, SliceOwner, TrafficDistribution};

/// The annotations that ask for hints of the built-in controller if they are `Auto`; it then decides about hints alone (R28).
/// As there, the deprecated one comes first.
const TOPOLOGY_ANNOTATIONS: [&str; 2] =
    ["service.kubernetes.io/topology-aware-hints", "service.kubernetes.io/topology-mode"];

/// A valid Service that the user owns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AnnotatedService {
    pub spec: ServiceSpec,
    pub owner: SliceOwner,
}

/// Why a Service with annotations of Patchbay gets no slices. Its slices are deleted, and a Warning event has this note.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceFault {
    /// The reason of the event.
    pub reason: &'static str,
    /// What to change.
    pub note: String,
}

/// Whether a Service asks for slices by its annotations. The Service of a NetworkService does not: its annotations are
/// ignored.
pub fn is_annotated(service: &ObservedService) -> bool {
    let asks = [SERVICE_NETWORK_ANNOTATION, SELECTOR_ANNOTATION];
    asks.iter().any(|key| service.annotations.contains_key(*key))
        && !service.is_controlled_by_network_service()
}

/// Reads an annotated Service. `None` if it is not annotated.
pub fn annotated_service(
    namespace: &Arc<str>,
    name: &Arc<str>,
    service: &ObservedService,
) -> Option<Result<AnnotatedService, ServiceFault>> {
    is_annotated(service).then(|| {
        let spec = read(namespace, name, service)?;
        let owner = service.slice_owner(&spec);
        Ok(AnnotatedService { spec, owner })
    })
}

fn read(
    namespace: &Arc<str>,
    name: &Arc<str>,
    service: &ObservedService,
) -> Result<ServiceSpec, ServiceFault> {
    let fault = |reason, note: String| ServiceFault { reason, note };
    if service.r#type == ServiceType::ExternalName {
        let note = "the Service has the type ExternalName and cannot have endpoints; set spec.type to ClusterIP and spec.clusterIP to None";
        return Err(fault("ExternalName", note.to_owned()));
    }
    if !service.selector.is_empty() {
        let note = format!(
            "the Service has a selector, so Kubernetes publishes the primary addresses of the pods; remove spec.selector and select pods with the annotation {SELECTOR_ANNOTATION}"
        );
        return Err(fault("SelectorSet", note));
    }
    if let ClusterIp::Assigned(address) = &service.cluster_ip {
        let note = format!(
            "the Service has the cluster IP {address}, but only headless Services are supported; create it again with spec.clusterIP: None"
        );
        return Err(fault("ClusterIPSet", note));
    }
    let bad = |key: &str, note: String| fault("BadAnnotation", format!("annotation {key} {note}"));
    let annotation = |key: &str| service.annotations.get(key).map(|value| value.trim());
    let required = |key: &str, form: &str| {
        let value = annotation(key).filter(|value| !value.is_empty());
        value.ok_or_else(|| bad(key, format!("is missing or empty; set it to {form}")))
    };
    let network = required(SERVICE_NETWORK_ANNOTATION, "[namespace/]name of a NetworkAttachmentDefinition")?;
    let network = parse_network(network, namespace).ok_or_else(|| {
        let note = format!(
            "{:?} is invalid; set it to [namespace/]name of a NetworkAttachmentDefinition",
            quote(network)
        );
        bad(SERVICE_NETWORK_ANNOTATION, note)
    })?;
    let selector = required(SELECTOR_ANNOTATION, "a label selector such as app=db")?;
    let selector: LabelSelector = selector.parse().map_err(|error| {
        bad(SELECTOR_ANNOTATION, format!("{:?} is not a label selector: {error}", quote(selector)))
    })?;
    let interface = annotation(INTERFACE_ANNOTATION).map(str::parse::<IfName>).transpose();
    let interface = interface.map_err(|error| {
        bad(
            INTERFACE_ANNOTATION,
            format!("is invalid: {error}; set it to the name of an interface such as net1"),
        )
    })?;
    let hostnames = annotation(HOSTNAMES_ANNOTATION).map_or(Some(Hostnames::None), Hostnames::parse);
    let hostnames = hostnames
        .ok_or_else(|| bad(HOSTNAMES_ANNOTATION, "is invalid; set it to None or PodName".to_owned()))?;
    Ok(ServiceSpec {
        namespace: namespace.clone(),
        name: name.clone(),
        network,
        interface,
        selector,
        ports: service.ports.clone(),
        publish_not_ready: service.publish_not_ready,
        hostnames,
        traffic: traffic(service),
    })
}

/// `[namespace/]name` of characters that names of Kubernetes objects have.
fn parse_network(text: &str, namespace: &str) -> Option<NadRef> {
    let valid = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '.' | '/');
    text.chars().all(valid).then(|| NadRef::parse(text, namespace))?
}

fn traffic(service: &ObservedService) -> Option<TrafficDistribution> {
    let mode = TOPOLOGY_ANNOTATIONS.iter().find_map(|key| service.annotations.get(*key));
    if mode.is_some_and(|mode| matches!(mode.as_str(), "Auto" | "auto")) {
        return None;
    }
    match service.traffic_distribution.as_deref()? {
        "PreferClose" | "PreferSameZone" => Some(TrafficDistribution::SameZone),
        "PreferSameNode" => Some(TrafficDistribution::SameNode),
        _ => None,
    }
}

/// A bounded part of a text that a user wrote.
fn quote(text: &str) -> String {
    text.chars().take(64).collect()
}
