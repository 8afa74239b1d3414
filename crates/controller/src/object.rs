//! Objects as they come from the API server, cut down to what anything is decided by.
//!
//! A part that cannot be understood is no reason to lose the object: whoever wrote it may be newer than this program, and
//! one bad object must not stop the others.

use std::collections::BTreeMap;

use api::{
    BridgeNetworkSpec, BridgeNetworkStatus, IPBlockSpec, IPBlockStatus, NetworkOnNode, Vtep,
    bridgenetwork::{NAD_NETWORK_LABEL, NAD_ORIGIN_ANNOTATION, NAD_UID_ANNOTATION},
    nad::{NetworkAttachmentDefinitionSpec, network_of},
    selection::{DEFAULT_NETWORK_ANNOTATION, NETWORKS_ANNOTATION},
};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::core::{ApiResource, GroupVersionKind, Object};
use plan::{
    network::{Attachment, Block, Network, Node, Report},
    users::{Facts, Kind},
};
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, IgnoredAny},
};
use serde_json::{Map, Value};

/// A part of an object, or why it cannot be understood. What is missing is read as if it were empty.
#[derive(Clone, Debug)]
pub struct Part<T>(pub Result<T, String>);

impl<'de, T: DeserializeOwned> Deserialize<'de> for Part<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Option::<Value>::deserialize(deserializer)?;
        let value = value.unwrap_or_else(|| Value::Object(Map::new()));
        Ok(Self(serde_json::from_value(value).map_err(|error| error.to_string())))
    }
}

impl<T: Default> Default for Part<T> {
    fn default() -> Self {
        Self(Ok(T::default()))
    }
}

impl<T: Default> Part<T> {
    fn or_default(self) -> T {
        self.0.unwrap_or_default()
    }
}

/// Nothing of this part is read.
#[derive(Clone, Debug, Default)]
pub struct Skipped;

impl<'de> Deserialize<'de> for Skipped {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Option::<IgnoredAny>::deserialize(deserializer).map(|_| Self)
    }
}

pub type NetworkObject = Object<Part<BridgeNetworkSpec>, Part<BridgeNetworkStatus>>;
pub type NodeObject = Object<Skipped, Part<NodeStatus>>;
pub type ReportObject = Object<Skipped, Part<ReportStatus>>;
/// One that cannot be read is nobody's to free.
pub type BlockObject = Object<Part<Option<IPBlockSpec>>, Part<IPBlockStatus>>;
pub type AttachmentObject = Object<Part<NetworkAttachmentDefinitionSpec>, Skipped>;
pub type WorkloadObject = Object<Part<WorkloadSpec>, Part<WorkloadStatus>>;

#[derive(Clone, Debug, Default, Deserialize)]
pub struct NodeStatus {
    #[serde(default)]
    conditions: Vec<KubeCondition>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct KubeCondition {
    #[serde(default)]
    r#type: String,
    #[serde(default)]
    status: String,
    #[serde(default)]
    reason: String,
}

/// Its links are left out: no rule here asks for them, and they are most of the object.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct ReportStatus {
    vtep: Option<Vtep>,
    #[serde(default)]
    networks: Vec<NetworkOnNode>,
}

/// The spec of any kind that makes pods.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WorkloadSpec {
    template: Option<Template>,
    job_template: Option<JobTemplate>,
    networks: Option<Vec<VmNetwork>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct JobTemplate {
    spec: Option<JobSpec>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct JobSpec {
    template: Option<Template>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct Template {
    metadata: Option<TemplateMeta>,
    spec: Option<TemplateSpec>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct TemplateMeta {
    annotations: Option<BTreeMap<String, Value>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct TemplateSpec {
    networks: Option<Vec<VmNetwork>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct VmNetwork {
    multus: Option<Multus>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Multus {
    network_name: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub struct WorkloadStatus {
    phase: Option<String>,
    conditions: Option<Vec<KubeCondition>>,
}

/// How a kind is addressed.
pub fn resource(group: &str, version: &str, kind: &str, plural: &str) -> ApiResource {
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural)
}

pub fn networks() -> ApiResource {
    resource(api::GROUP, api::VERSION, "BridgeNetwork", "bridgenetworks")
}

pub fn reports() -> ApiResource {
    resource(api::GROUP, api::VERSION, "NodeNetwork", "nodenetworks")
}

pub fn blocks() -> ApiResource {
    resource(api::GROUP, api::VERSION, "IPBlock", "ipblocks")
}

pub fn nodes() -> ApiResource {
    resource("", "v1", "Node", "nodes")
}

pub fn attachments() -> ApiResource {
    use api::nad::{NAD_GROUP, NAD_PLURAL};
    resource(NAD_GROUP, "v1", "NetworkAttachmentDefinition", NAD_PLURAL)
}

pub fn workloads(kind: Kind) -> ApiResource {
    let plural = match kind {
        Kind::CronJob => "cronjobs",
        Kind::DaemonSet => "daemonsets",
        Kind::Deployment => "deployments",
        Kind::Job => "jobs",
        Kind::Pod => "pods",
        Kind::ReplicaSet => "replicasets",
        Kind::StatefulSet => "statefulsets",
        Kind::VirtualMachine => "virtualmachines",
        Kind::VirtualMachineInstance => "virtualmachineinstances",
    };
    resource(kind.group(), "v1", kind.name(), plural)
}

/// The network, and whether its deletion has begun; when that was first seen is for the cache to say.
pub fn network(object: NetworkObject, now: Timestamp) -> Option<Network> {
    let Object { metadata, spec, status, .. } = object;
    Some(Network {
        name: metadata.name?,
        uid: metadata.uid?,
        version: metadata.resource_version?,
        generation: metadata.generation.unwrap_or_default(),
        created: metadata.creation_timestamp.map_or(now, |time| time.0),
        deleting: metadata.deletion_timestamp.map(|_| now),
        finalizers: metadata.finalizers.unwrap_or_default(),
        spec: spec.0,
        status: status.map(Part::or_default).unwrap_or_default(),
    })
}

pub fn node(object: NodeObject) -> Option<(String, Node)> {
    let status = object.status.map(Part::or_default).unwrap_or_default();
    // A Node that nobody has said anything about is no worse than any other.
    let ready = status.conditions.into_iter().find(|condition| condition.r#type == "Ready");
    let silent = ready.filter(|ready| ready.status != "True").map(|ready| ready.reason);
    let labels = object.metadata.labels.unwrap_or_default();
    Some((object.metadata.name?, Node { uid: object.metadata.uid?, labels, silent }))
}

pub fn report(object: ReportObject) -> Option<(String, Report)> {
    let status = object.status.map(Part::or_default).unwrap_or_default();
    let networks = status.networks.into_iter().map(|network| (network.uid.clone(), network)).collect();
    Some((object.metadata.name?, Report { vtep: status.vtep, networks }))
}

pub fn block(object: BlockObject) -> Option<(String, Block)> {
    let Object { metadata, spec, status, .. } = object;
    let status = status.map(Part::or_default).unwrap_or_default();
    let object = plan::ipam::ObservedIpBlock { uid: metadata.uid?, spec: spec.or_default()?, status };
    Some((metadata.name?, Block { version: metadata.resource_version?, object }))
}

pub fn attachment(object: AttachmentObject) -> Option<(api::selection::NadRef, Attachment)> {
    let Object { metadata, spec, .. } = object;
    let config = spec.or_default().config;
    let mark = |map: &Option<BTreeMap<String, String>>, key: &str| map.as_ref()?.get(key).cloned();
    let attachment = Attachment {
        deleting: metadata.deletion_timestamp.is_some(),
        network: mark(&metadata.labels, NAD_NETWORK_LABEL),
        network_uid: mark(&metadata.annotations, NAD_UID_ANNOTATION),
        place: mark(&metadata.annotations, NAD_ORIGIN_ANNOTATION),
        uid: metadata.uid?,
        version: metadata.resource_version?,
        joins: config.as_deref().and_then(network_of),
        config,
    };
    Some((api::selection::NadRef::new(metadata.namespace?, metadata.name?), attachment))
}

/// What a pod says about networks: all of it is in its metadata.
pub fn pod(metadata: &ObjectMeta) -> Facts {
    let annotation = |key: &str| metadata.annotations.as_ref().and_then(|all| all.get(key)).cloned();
    Facts {
        namespace: metadata.namespace.clone().unwrap_or_default(),
        name: metadata.name.clone().unwrap_or_default(),
        networks: annotation(NETWORKS_ANNOTATION),
        default_network: annotation(DEFAULT_NETWORK_ANNOTATION),
        multus: Vec::new(),
        finished: false,
        owner: owner(metadata),
    }
}

/// A pod of a list of metadata, without the fields that say who wrote what: they are most of it.
#[derive(Clone, Debug, Deserialize)]
pub struct PodObject {
    metadata: PodMeta,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodMeta {
    namespace: Option<String>,
    name: Option<String>,
    annotations: Option<BTreeMap<String, String>>,
    owner_references: Option<Vec<OwnerReference>>,
}

/// What a listed pod says about networks.
pub fn listed_pod(object: PodObject) -> Facts {
    let PodMeta { namespace, name, annotations, owner_references } = object.metadata;
    pod(&ObjectMeta { namespace, name, annotations, owner_references, ..ObjectMeta::default() })
}

/// What an object of any kind says about networks.
pub fn workload(kind: Kind, object: WorkloadObject) -> Facts {
    let Object { metadata, spec, status, .. } = object;
    let spec = spec.or_default();
    let template = match kind {
        Kind::Pod | Kind::VirtualMachineInstance => None,
        Kind::CronJob => spec.job_template.and_then(|job| job.spec).and_then(|spec| spec.template),
        Kind::DaemonSet
        | Kind::Deployment
        | Kind::Job
        | Kind::ReplicaSet
        | Kind::StatefulSet
        | Kind::VirtualMachine => spec.template,
    };
    let own = pod(&metadata);
    let (annotations, networks) = match (kind, template) {
        (Kind::Pod, _) => (None, None),
        (Kind::VirtualMachineInstance, _) => (None, spec.networks),
        (_, Some(template)) => (
            template.metadata.and_then(|metadata| metadata.annotations),
            template.spec.and_then(|spec| spec.networks),
        ),
        (_, None) => (None, None),
    };
    let annotation = |key: &str| annotations.as_ref()?.get(key)?.as_str().map(str::to_owned);
    let itself = matches!(kind, Kind::Pod | Kind::VirtualMachineInstance);
    let multus = networks.into_iter().flatten().filter_map(|network| network.multus?.network_name);
    Facts {
        networks: if itself { own.networks } else { annotation(NETWORKS_ANNOTATION) },
        default_network: if itself { own.default_network } else { annotation(DEFAULT_NETWORK_ANNOTATION) },
        multus: multus.collect(),
        finished: finished(kind, status.map(Part::or_default).unwrap_or_default()),
        namespace: own.namespace,
        name: own.name,
        owner: own.owner,
    }
}

fn finished(kind: Kind, status: WorkloadStatus) -> bool {
    let ended = |condition: KubeCondition| {
        condition.status == "True" && (condition.r#type == "Complete" || condition.r#type == "Failed")
    };
    match kind {
        Kind::Pod => status.phase.is_some_and(|phase| phase == "Succeeded" || phase == "Failed"),
        Kind::Job => status.conditions.into_iter().flatten().any(ended),
        Kind::CronJob
        | Kind::DaemonSet
        | Kind::Deployment
        | Kind::ReplicaSet
        | Kind::StatefulSet
        | Kind::VirtualMachine
        | Kind::VirtualMachineInstance => false,
    }
}

/// What controls an object, if that is of a kind which is indexed itself.
fn owner(metadata: &ObjectMeta) -> Option<(Kind, String)> {
    let owners = metadata.owner_references.as_ref()?;
    let owner = owners.iter().find(|owner| owner.controller == Some(true))?;
    let group = owner.api_version.rsplit_once('/').map_or("", |(group, _)| group);
    Some((Kind::find(group, &owner.kind)?, owner.name.clone()))
}
