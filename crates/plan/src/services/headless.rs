//! The headless Service of a NetworkService: whether it is created, changed, adopted or left alone.

use std::collections::BTreeMap;

use api::{
    GROUP, VERSION,
    networkservice::{ADOPT_ANNOTATION, Protocol, TargetPort},
};
use jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::{Families, ServiceSpec, SliceOwner};

/// The kind of a NetworkService in owner references.
const KIND: &str = "NetworkService";

/// A NetworkService, as far as its Service depends on it.
#[derive(Debug, Clone, Copy)]
pub struct NetworkServiceFacts<'a> {
    pub uid: &'a str,
    pub labels: &'a BTreeMap<String, String>,
    pub spec: &'a ServiceSpec,
}

/// A Service in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedService {
    pub uid: String,
    pub resource_version: String,
    pub created: Timestamp,
    /// Whether the Service has a deletion timestamp.
    pub deleting: bool,
    pub labels: BTreeMap<String, String>,
    pub annotations: BTreeMap<String, String>,
    pub owners: Vec<OwnerRef>,
    pub r#type: ServiceType,
    pub cluster_ip: ClusterIp,
    pub selector: BTreeMap<String, String>,
    pub ports: Vec<ServicePort>,
    pub publish_not_ready: bool,
    /// `spec.ipFamilies`.
    pub families: Families,
    /// `spec.trafficDistribution`.
    pub traffic_distribution: Option<String>,
}

/// An owner reference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnerRef {
    pub api_version: String,
    pub kind: String,
    pub name: String,
    pub uid: String,
    pub controller: Option<bool>,
    pub block_owner_deletion: Option<bool>,
}

/// `spec.type` of a Service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServiceType {
    ClusterIp,
    ExternalName,
    /// NodePort, LoadBalancer, or a type that a later API server adds.
    Other,
}

/// `spec.clusterIP` of a Service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClusterIp {
    /// `None`: the Service is headless.
    None,
    /// Empty, as for ExternalName.
    Unset,
    Assigned(String),
}

/// A port of a Service, with its defaults filled in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServicePort {
    /// Empty if the port has none.
    pub name: String,
    pub port: u16,
    pub protocol: Protocol,
    pub target: TargetPort,
    pub app_protocol: Option<String>,
}

/// What to do about a client that works against the controller.
const STOP_CLIENT: &str = "find the client in metadata.managedFields of the Service and stop it";

/// What happens to the Service of a NetworkService.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServiceDecision {
    /// The Service is as planned.
    Keep,
    /// The Service does not exist: create this object.
    Create(Value),
    /// Apply this JSON merge patch, which carries UID and resourceVersion. `adopt` if the Service belonged to another owner or
    /// to none.
    Patch { patch: Value, adopt: bool },
    /// The Service is controlled by the NetworkService but has a cluster IP, which cannot be removed: delete it with this UID
    /// and resource version. It is created again once it is gone.
    Delete { uid: String, resource_version: String },
    /// The Service is being deleted: wait until it is gone.
    Wait,
    /// The Service is not controlled by the NetworkService. No slice is planned.
    Taken { message: String },
}

/// Decides what happens to the Service of a NetworkService.
pub fn decide_service(
    facts: &NetworkServiceFacts<'_>,
    observed: Option<&ObservedService>,
) -> ServiceDecision {
    let Some(service) = observed else { return ServiceDecision::Create(new_service(facts)) };
    let controlled = is_controlled_by(facts.uid, service);
    if !controlled && !may_adopt(facts, service) {
        return ServiceDecision::Taken { message: taken(facts, service) };
    }
    if service.deleting {
        return ServiceDecision::Wait;
    }
    match &service.cluster_ip {
        ClusterIp::Assigned(_) if controlled => ServiceDecision::Delete {
            uid: service.uid.clone(),
            resource_version: service.resource_version.clone(),
        },
        _ => match patch(facts, service) {
            None => ServiceDecision::Keep,
            Some(patch) => ServiceDecision::Patch { patch, adopt: !controlled },
        },
    }
}

/// Whether the NetworkService with this UID controls the Service.
pub fn is_controlled_by(uid: &str, service: &ObservedService) -> bool {
    service.owners.iter().any(|owner| owner.uid == uid && owner.controller == Some(true))
}

/// Why a Service that a NetworkService controls must not have its slices (R7, R8); `None` if it takes them, even if something
/// else of it is not as planned.
pub fn why_no_slices(service: &ObservedService) -> Option<&'static str> {
    match (service.r#type, &service.cluster_ip) {
        (ServiceType::ExternalName, _) => Some("has the type ExternalName"),
        (ServiceType::Other, _) => Some("is not of the type ClusterIP"),
        (ServiceType::ClusterIp, ClusterIp::Assigned(_)) => Some("has a cluster IP"),
        (ServiceType::ClusterIp, ClusterIp::Unset) => Some("is not headless"),
        (ServiceType::ClusterIp, ClusterIp::None) if service.selector.is_empty() => None,
        (ServiceType::ClusterIp, ClusterIp::None) => {
            Some("has a selector, so Kubernetes publishes the primary addresses of the pods")
        }
    }
}

/// Why no endpoints are published for the Service of a NetworkService, although none of a third party has its name.
/// `failure` is the error of the last write.
pub fn withheld(name: &str, service: Option<&ObservedService>, failure: Option<&str>) -> String {
    let state = match service {
        None => "does not exist",
        Some(service) => why_no_slices(service).unwrap_or("is not handed over yet"),
    };
    let cause = match (service, failure) {
        (Some(service), _) if service.deleting => {
            "it is being deleted and is created again once it is gone".to_owned()
        }
        (_, Some(failure)) => format!("it could not be written: {failure}"),
        (None, None) => {
            "another client deletes it; find the client in the audit log of the API server and stop it"
                .to_owned()
        }
        (Some(_), None) => format!("another client changes it back; {STOP_CLIENT}"),
    };
    format!("Service {name} {state}; {cause}")
}

/// What to do about a client that changes the fields of this patch of a Service back.
pub fn changed_back(name: &str, patch: &Value) -> String {
    let fields = |part: &'static str| {
        let keys = patch[part].as_object().into_iter().flat_map(Map::keys);
        keys.filter(|key| !matches!(key.as_str(), "uid" | "resourceVersion"))
            .map(move |key| format!("{part}.{key}"))
    };
    let fields: Vec<String> = fields("metadata").chain(fields("spec")).collect();
    format!("another client changes {} of Service {name} back; {STOP_CLIENT}", fields.join(", "))
}

/// Whether the annotation on the Service names this NetworkService, and the Service can become what is planned.
fn may_adopt(facts: &NetworkServiceFacts<'_>, service: &ObservedService) -> bool {
    service.annotations.get(ADOPT_ANNOTATION).is_some_and(|uid| uid == facts.uid)
        && !service.deleting
        && service.r#type == ServiceType::ClusterIp
        && service.cluster_ip == ClusterIp::None
}

fn taken(facts: &NetworkServiceFacts<'_>, service: &ObservedService) -> String {
    let name = &facts.spec.name;
    let controller = service.owners.iter().find(|owner| owner.controller == Some(true));
    let of = controller.map_or_else(
        || "exists and is not controlled by this NetworkService".to_owned(),
        |owner| format!("is controlled by {} {}", owner.kind, owner.name),
    );
    if service.deleting {
        return format!("Service {name} {of} and is being deleted; it is created again once it is gone");
    }
    if service.r#type != ServiceType::ClusterIp || service.cluster_ip != ClusterIp::None {
        return format!("Service {name} {of} and is not headless; delete it or rename the NetworkService");
    }
    format!(
        "Service {name} {of}; delete it, rename the NetworkService, or annotate the Service with {ADOPT_ANNOTATION}={} to hand it over",
        facts.uid
    )
}

/// The object that is created.
fn new_service(facts: &NetworkServiceFacts<'_>) -> Value {
    let spec = facts.spec;
    let mut metadata = json!({
        "name": &*spec.name,
        "namespace": &*spec.namespace,
        "ownerReferences": [own_reference(facts)],
    });
    if !facts.labels.is_empty() {
        metadata["labels"] = json!(facts.labels);
    }
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            "publishNotReadyAddresses": spec.publish_not_ready,
            "ports": ports(&spec.ports),
        },
    })
}

/// The merge patch that makes the Service what [`new_service`] would be, except for annotations and owners that do not
/// control it.
fn patch(facts: &NetworkServiceFacts<'_>, service: &ObservedService) -> Option<Value> {
    let (mut metadata, mut spec) = (Map::new(), Map::new());
    let labels = label_changes(facts.labels, &service.labels);
    if !labels.is_empty() {
        metadata.insert("labels".to_owned(), Value::Object(labels));
    }
    if let Some(owners) = owners(facts, service) {
        metadata.insert("ownerReferences".to_owned(), owners);
    }
    if service.r#type != ServiceType::ClusterIp || service.cluster_ip != ClusterIp::None {
        spec.insert("type".to_owned(), "ClusterIP".into());
        spec.insert("externalName".to_owned(), Value::Null);
        spec.insert("clusterIP".to_owned(), "None".into());
        spec.insert("clusterIPs".to_owned(), json!(["None"]));
    }
    if !service.selector.is_empty() {
        spec.insert("selector".to_owned(), Value::Null);
    }
    if service.families != Families::DUAL {
        // The API server sets both families of a Service that is created without selector, and adds the missing one here.
        spec.insert("ipFamilyPolicy".to_owned(), "RequireDualStack".into());
    }
    if service.publish_not_ready != facts.spec.publish_not_ready {
        spec.insert("publishNotReadyAddresses".to_owned(), facts.spec.publish_not_ready.into());
    }
    if service.ports != facts.spec.ports {
        spec.insert("ports".to_owned(), ports(&facts.spec.ports));
    }
    if metadata.is_empty() && spec.is_empty() {
        return None;
    }
    metadata.insert("uid".to_owned(), service.uid.as_str().into());
    metadata.insert("resourceVersion".to_owned(), service.resource_version.as_str().into());
    let mut patch = Map::from_iter([("metadata".to_owned(), Value::Object(metadata))]);
    if !spec.is_empty() {
        patch.insert("spec".to_owned(), Value::Object(spec));
    }
    Some(Value::Object(patch))
}

fn label_changes(
    desired: &BTreeMap<String, String>,
    observed: &BTreeMap<String, String>,
) -> Map<String, Value> {
    let set = desired.iter().filter(|(key, value)| observed.get(*key) != Some(*value));
    let set = set.map(|(key, value)| (key.clone(), Value::from(value.as_str())));
    let removed = observed.keys().filter(|key| !desired.contains_key(*key));
    set.chain(removed.map(|key| (key.clone(), Value::Null))).collect()
}

/// The owner references with that of the NetworkService, which replaces any other controller; `None` if nothing changes.
fn owners(facts: &NetworkServiceFacts<'_>, service: &ObservedService) -> Option<Value> {
    let own = OwnerRef {
        api_version: format!("{GROUP}/{VERSION}"),
        kind: KIND.to_owned(),
        name: facts.spec.name.to_string(),
        uid: facts.uid.to_owned(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    };
    if service.owners.contains(&own) {
        return None;
    }
    let others = service.owners.iter().filter(|owner| owner.uid != own.uid && owner.controller != Some(true));
    Some(others.map(reference).chain([own_reference(facts)]).collect())
}

fn own_reference(facts: &NetworkServiceFacts<'_>) -> Value {
    json!({
        "apiVersion": format!("{GROUP}/{VERSION}"),
        "kind": KIND,
        "name": &*facts.spec.name,
        "uid": facts.uid,
        "controller": true,
        "blockOwnerDeletion": true,
    })
}

fn reference(owner: &OwnerRef) -> Value {
    let mut reference = json!({
        "apiVersion": owner.api_version,
        "kind": owner.kind,
        "name": owner.name,
        "uid": owner.uid,
    });
    if let Some(controller) = owner.controller {
        reference["controller"] = controller.into();
    }
    if let Some(block) = owner.block_owner_deletion {
        reference["blockOwnerDeletion"] = block.into();
    }
    reference
}

fn ports(ports: &[ServicePort]) -> Value {
    let port = |port: &ServicePort| {
        let mut value = json!({"port": port.port, "protocol": port.protocol, "targetPort": port.target});
        if !port.name.is_empty() {
            value["name"] = port.name.as_str().into();
        }
        if let Some(app_protocol) = &port.app_protocol {
            value["appProtocol"] = app_protocol.as_str().into();
        }
        value
    };
    ports.iter().map(port).collect()
}

impl ObservedService {
    /// Whether a NetworkService controls the Service.
    pub fn is_controlled_by_network_service(&self) -> bool {
        let group = |owner: &OwnerRef| owner.api_version.split('/').next() == Some(GROUP);
        self.owners.iter().any(|owner| owner.controller == Some(true) && owner.kind == KIND && group(owner))
    }

    /// What the slices of the Service share.
    pub fn slice_owner(&self, spec: &ServiceSpec) -> SliceOwner {
        SliceOwner {
            service: spec.name.clone(),
            uid: self.uid.as_str().into(),
            created: self.created,
            deleting: self.deleting,
            headless: !matches!(self.cluster_ip, ClusterIp::Assigned(_)),
            families: self.families,
            labels: self.labels.clone(),
            network: spec.network.to_string().into(),
        }
    }
}
