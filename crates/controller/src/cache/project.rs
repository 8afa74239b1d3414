//! Projects API objects to the fields that decisions depend on.
//!
//! A part that cannot be parsed does not drop the object: a newer version may have written it, and one bad object must not
//! stop the others.

use std::collections::BTreeMap;

use api::{
    BridgeNetworkSpec, BridgeNetworkStatus, ClaimAddresses, ClosedNetwork, IPBlockSpec, IPBlockStatus,
    NetworkOnNode, Vtep,
    bridgenetwork::{NAD_NETWORK_LABEL, NAD_ORIGIN_ANNOTATION, NAD_UID_ANNOTATION},
    nad::{NadNetwork, NetworkAttachmentDefinitionSpec, network_of},
    selection::{DEFAULT_NETWORK_ANNOTATION, NETWORKS_ANNOTATION},
};
use client::decode::{Ignored, Lenient, Object};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::core::{ApiResource, GroupVersionKind};
use plan::{
    network::{BlockState, NadState, NetworkState, NodeReport, NodeState},
    users::{WorkloadKind, WorkloadRefs},
};
use serde::Deserialize;
use serde_json::Value;

use super::{claims, handover::PodRecord};

pub type NetworkObject = Object<Lenient<BridgeNetworkSpec>, Lenient<BridgeNetworkStatus>>;
pub type NodeObject = Object<Ignored, Lenient<NodeStatus>>;
pub type NodeNetworkObject = Object<Ignored, Lenient<NodeNetworkReport>>;
/// A block whose spec cannot be parsed is left alone.
pub type BlockObject = Object<Lenient<Option<IPBlockSpec>>, Lenient<IPBlockStatus>>;
pub type NadObject = Object<Lenient<NetworkAttachmentDefinitionSpec>, Ignored>;
pub type WorkloadObject = Object<Lenient<WorkloadSpec>, Lenient<WorkloadStatus>>;

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

/// The status of a NodeNetwork without its links, which are most of the object and not needed here.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeNetworkReport {
    vtep: Option<Vtep>,
    #[serde(default)]
    networks: Vec<NetworkOnNode>,
    #[serde(default)]
    closed_networks: Vec<ClosedNetwork>,
    claim_addresses: Option<Vec<ClaimAddresses>>,
}

/// The spec of any kind that creates pods.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WorkloadSpec {
    template: Option<PodTemplate>,
    job_template: Option<JobTemplate>,
    networks: Option<Vec<VmNetwork>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct JobTemplate {
    spec: Option<JobSpec>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct JobSpec {
    template: Option<PodTemplate>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct PodTemplate {
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
    multus: Option<MultusNetwork>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct MultusNetwork {
    network_name: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub struct WorkloadStatus {
    phase: Option<String>,
    conditions: Option<Vec<KubeCondition>>,
}

/// The API resource of a kind.
pub fn resource(group: &str, version: &str, kind: &str, plural: &str) -> ApiResource {
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural)
}

pub fn networks() -> ApiResource {
    resource(api::GROUP, api::VERSION, "BridgeNetwork", "bridgenetworks")
}

pub fn node_networks() -> ApiResource {
    resource(api::GROUP, api::VERSION, "NodeNetwork", "nodenetworks")
}

pub fn blocks() -> ApiResource {
    resource(api::GROUP, api::VERSION, "IPBlock", "ipblocks")
}

pub fn nodes() -> ApiResource {
    resource("", "v1", "Node", "nodes")
}

pub fn nads() -> ApiResource {
    use api::nad::{NAD_GROUP, NAD_PLURAL};
    resource(NAD_GROUP, "v1", "NetworkAttachmentDefinition", NAD_PLURAL)
}

pub fn workloads(kind: WorkloadKind) -> ApiResource {
    let plural = match kind {
        WorkloadKind::CronJob => "cronjobs",
        WorkloadKind::DaemonSet => "daemonsets",
        WorkloadKind::Deployment => "deployments",
        WorkloadKind::Job => "jobs",
        WorkloadKind::Pod => "pods",
        WorkloadKind::ReplicaSet => "replicasets",
        WorkloadKind::StatefulSet => "statefulsets",
        WorkloadKind::VirtualMachine => "virtualmachines",
        WorkloadKind::VirtualMachineInstance => "virtualmachineinstances",
    };
    resource(kind.group(), "v1", kind.name(), plural)
}

/// Projects a network. `deleting` is set to `now`; the cache keeps the time of the first observation.
pub fn network(object: NetworkObject, now: Timestamp) -> Option<NetworkState> {
    let Object { metadata, spec, status, .. } = object;
    Some(NetworkState {
        name: metadata.name?,
        uid: metadata.uid?,
        version: metadata.resource_version?,
        generation: metadata.generation.unwrap_or_default(),
        created: metadata.creation_timestamp.map_or(now, |time| time.0),
        deleting: metadata.deletion_timestamp.map(|_| now),
        finalizers: metadata.finalizers.unwrap_or_default(),
        spec: spec.0,
        status: status.map(Lenient::or_default).unwrap_or_default(),
    })
}

/// Whether claims on a network may get other addresses after this change.
pub fn changes_claims(old: &NetworkState, new: &NetworkState) -> bool {
    let lengths = |network: &NetworkState| {
        let ipam = network.status.ipam.as_ref();
        let length = |family: Option<&api::ipam::IpFamilyStatus>| family.map(|family| family.block_length);
        (length(ipam.and_then(|ipam| ipam.ipv4.as_ref())), length(ipam.and_then(|ipam| ipam.ipv6.as_ref())))
    };
    old.spec != new.spec
        || old.deleting != new.deleting
        || old.finalizers != new.finalizers
        || lengths(old) != lengths(new)
}

pub fn node(object: NodeObject) -> Option<(String, NodeState)> {
    let status = object.status.map(Lenient::or_default).unwrap_or_default();
    // A Node without a Ready condition counts as ready.
    let ready = status.conditions.into_iter().find(|condition| condition.r#type == "Ready");
    let not_ready_reason = ready.filter(|ready| ready.status != "True").map(|ready| ready.reason);
    let labels = object.metadata.labels.unwrap_or_default();
    Some((object.metadata.name?, NodeState { uid: object.metadata.uid?, labels, not_ready_reason }))
}

pub fn node_report(object: NodeNetworkObject) -> Option<(String, NodeReport)> {
    let status = object.status.map(Lenient::or_default).unwrap_or_default();
    let networks = status.networks.into_iter().map(|network| (network.uid.clone(), network)).collect();
    let closed = status.closed_networks.into_iter().map(|network| (network.uid.clone(), network)).collect();
    let claims =
        |all: Vec<ClaimAddresses>| all.into_iter().map(|it| (it.network_uid, it.addresses)).collect();
    let claim_addresses = status.claim_addresses.map(claims);
    Some((object.metadata.name?, NodeReport { vtep: status.vtep, networks, closed, claim_addresses }))
}

pub fn block(object: BlockObject) -> Option<(String, BlockState)> {
    let Object { metadata, spec, status, .. } = object;
    let status = status.map(Lenient::or_default).unwrap_or_default();
    let object = plan::ipam::ObservedIpBlock { uid: metadata.uid?, spec: spec.or_default()?, status };
    Some((metadata.name?, BlockState { version: metadata.resource_version?, object }))
}

pub fn nad(object: NadObject) -> Option<(api::selection::NadRef, NadState)> {
    let Object { metadata, spec, .. } = object;
    let config = spec.or_default().config;
    let name = metadata.name?;
    let value = |map: &Option<BTreeMap<String, String>>, key: &str| map.as_ref()?.get(key).cloned();
    let nad = NadState {
        deleting: metadata.deletion_timestamp.is_some(),
        network: value(&metadata.labels, NAD_NETWORK_LABEL),
        network_uid: value(&metadata.annotations, NAD_UID_ANNOTATION),
        origin: value(&metadata.annotations, NAD_ORIGIN_ANNOTATION),
        uid: metadata.uid?,
        version: metadata.resource_version?,
        joins: config.as_deref().and_then(network_of),
        network_config: NadNetwork::read(config.as_deref(), &name).map_err(|error| error.to_string()),
        config,
    };
    Some((api::selection::NadRef::new(metadata.namespace?, name), nad))
}

/// The NADs that a pod names, all of them in its metadata.
pub fn pod(metadata: &ObjectMeta) -> WorkloadRefs {
    let annotation = |key: &str| metadata.annotations.as_ref().and_then(|all| all.get(key)).cloned();
    WorkloadRefs {
        namespace: metadata.namespace.clone().unwrap_or_default(),
        name: metadata.name.clone().unwrap_or_default(),
        networks: annotation(NETWORKS_ANNOTATION),
        default_network: annotation(DEFAULT_NETWORK_ANNOTATION),
        multus: Vec::new(),
        finished: false,
        owner: owner(metadata),
    }
}

/// What the metadata of a pod say to the indexes of pods.
pub fn pod_record(metadata: &ObjectMeta) -> PodRecord {
    PodRecord {
        uid: metadata.uid.clone().unwrap_or_default(),
        refs: pod(metadata),
        claims: claims::project::claim_pod(metadata).map(Box::new),
    }
}

/// A pod of a metadata list, without managedFields, which are most of it.
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

/// The NADs that a listed pod names.
pub fn listed_pod(object: PodObject) -> WorkloadRefs {
    let PodMeta { namespace, name, annotations, owner_references } = object.metadata;
    pod(&ObjectMeta { namespace, name, annotations, owner_references, ..ObjectMeta::default() })
}

/// The NADs that an object of any kind names.
pub fn workload(kind: WorkloadKind, object: WorkloadObject) -> WorkloadRefs {
    let Object { metadata, spec, status, .. } = object;
    let spec = spec.or_default();
    let template = match kind {
        WorkloadKind::Pod | WorkloadKind::VirtualMachineInstance => None,
        WorkloadKind::CronJob => spec.job_template.and_then(|job| job.spec).and_then(|spec| spec.template),
        WorkloadKind::DaemonSet
        | WorkloadKind::Deployment
        | WorkloadKind::Job
        | WorkloadKind::ReplicaSet
        | WorkloadKind::StatefulSet
        | WorkloadKind::VirtualMachine => spec.template,
    };
    let own = pod(&metadata);
    let (annotations, networks) = match (kind, template) {
        (WorkloadKind::Pod, _) => (None, None),
        (WorkloadKind::VirtualMachineInstance, _) => (None, spec.networks),
        (_, Some(template)) => (
            template.metadata.and_then(|metadata| metadata.annotations),
            template.spec.and_then(|spec| spec.networks),
        ),
        (_, None) => (None, None),
    };
    let annotation = |key: &str| annotations.as_ref()?.get(key)?.as_str().map(str::to_owned);
    let is_pod = matches!(kind, WorkloadKind::Pod | WorkloadKind::VirtualMachineInstance);
    let multus = networks.into_iter().flatten().filter_map(|network| network.multus?.network_name);
    WorkloadRefs {
        networks: if is_pod { own.networks } else { annotation(NETWORKS_ANNOTATION) },
        default_network: if is_pod { own.default_network } else { annotation(DEFAULT_NETWORK_ANNOTATION) },
        multus: multus.collect(),
        finished: finished(kind, status.map(Lenient::or_default).unwrap_or_default()),
        namespace: own.namespace,
        name: own.name,
        owner: own.owner,
    }
}

fn finished(kind: WorkloadKind, status: WorkloadStatus) -> bool {
    let ended = |condition: KubeCondition| {
        condition.status == "True" && (condition.r#type == "Complete" || condition.r#type == "Failed")
    };
    match kind {
        WorkloadKind::Pod => status.phase.is_some_and(|phase| phase == "Succeeded" || phase == "Failed"),
        WorkloadKind::Job => status.conditions.into_iter().flatten().any(ended),
        WorkloadKind::CronJob
        | WorkloadKind::DaemonSet
        | WorkloadKind::Deployment
        | WorkloadKind::ReplicaSet
        | WorkloadKind::StatefulSet
        | WorkloadKind::VirtualMachine
        | WorkloadKind::VirtualMachineInstance => false,
    }
}

/// The controlling owner of an object, if its kind is indexed.
fn owner(metadata: &ObjectMeta) -> Option<(WorkloadKind, String)> {
    let owners = metadata.owner_references.as_ref()?;
    let owner = owners.iter().find(|owner| owner.controller == Some(true))?;
    let group = owner.api_version.rsplit_once('/').map_or("", |(group, _)| group);
    Some((WorkloadKind::find(group, &owner.kind)?, owner.name.clone()))
}
