//! Projects virtual machines, claims and pods to the fields that decisions about claims depend on.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use api::{
    IPAMClaimSpec, IPAMClaimStatus,
    ipamclaim::{ADDRESSES_ANNOTATION, CLAIM_KEY, ClaimAnnotations, PRIMARY_CLAIM_ANNOTATION, VM_LABEL},
    network_status::{NETWORK_STATUS_ANNOTATION, NetworkStatusList},
    selection::{DEFAULT_NETWORK_ANNOTATION, NETWORKS_ANNOTATION, NadRef, NetworkSelection},
};
use client::decode::{Lenient, Object};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::core::ApiResource;
use plan::{
    claims::{
        Attached, ClaimPod, ClaimState, MachineNetwork, ObjectKey, OwnerKind, OwnerRef, PodElement, VmFacts,
        VmiFacts,
    },
    users::{WorkloadKind, WorkloadRefs},
};
use serde::Deserialize;
use serde_json::Value;

use crate::cache::project::{self, resource};

/// The label and value of KubeVirt's launcher pods.
const LAUNCHER_LABEL: (&str, &str) = ("kubevirt.io", "virt-launcher");

pub type ClaimObject = Object<Lenient<IPAMClaimSpec>, Lenient<IPAMClaimStatus>>;
pub type MachineObject = Object<Lenient<MachineSpec>, Lenient<MachineStatus>>;

/// The spec of a VirtualMachine, which has a template, or of a VirtualMachineInstance.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct MachineSpec {
    #[serde(default, deserialize_with = "client::decode::or_default")]
    template: Option<Template>,
    #[serde(default, deserialize_with = "client::decode::valid_items")]
    networks: Vec<Network>,
    #[serde(default, deserialize_with = "client::decode::or_default")]
    domain: Domain,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct Template {
    #[serde(default, deserialize_with = "client::decode::or_default")]
    metadata: TemplateMeta,
    #[serde(default, deserialize_with = "client::decode::or_default")]
    spec: InstanceSpec,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct TemplateMeta {
    #[serde(default, deserialize_with = "client::decode::or_default")]
    annotations: BTreeMap<String, Value>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct InstanceSpec {
    #[serde(default, deserialize_with = "client::decode::valid_items")]
    networks: Vec<Network>,
    #[serde(default, deserialize_with = "client::decode::or_default")]
    domain: Domain,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct Domain {
    #[serde(default, deserialize_with = "client::decode::or_default")]
    devices: Devices,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct Devices {
    #[serde(default, deserialize_with = "client::decode::valid_items")]
    interfaces: Vec<Interface>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct Interface {
    #[serde(default)]
    name: String,
    #[serde(default)]
    state: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct Network {
    #[serde(default)]
    name: String,
    multus: Option<Multus>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Multus {
    network_name: Option<String>,
    #[serde(default)]
    default: bool,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MachineStatus {
    #[serde(default)]
    phase: Option<String>,
    /// The node of each pod, by the UID of the pod.
    #[serde(default, deserialize_with = "client::decode::or_default")]
    active_pods: BTreeMap<String, String>,
    #[serde(default, deserialize_with = "client::decode::valid_items")]
    interfaces: Vec<Interface>,
}

pub fn claims() -> ApiResource {
    resource(api::nad::NAD_GROUP, "v1alpha1", "IPAMClaim", "ipamclaims")
}

/// The namespace and name of an object.
pub fn key(metadata: &ObjectMeta) -> Option<ObjectKey> {
    Some(ObjectKey::new(metadata.namespace.as_deref()?, metadata.name.as_deref()?))
}

/// The NADs that a machine names, for the index of users.
pub fn machine_refs(kind: WorkloadKind, object: &MachineObject) -> WorkloadRefs {
    let own = project::pod(&object.metadata);
    let Ok(spec) = &object.spec.0 else {
        return WorkloadRefs { networks: None, default_network: None, ..own };
    };
    let multus = |networks: &[Network]| {
        let named = networks.iter().filter_map(|network| network.multus.as_ref());
        named.filter_map(|multus| multus.network_name.clone()).collect()
    };
    if kind == WorkloadKind::VirtualMachineInstance {
        return WorkloadRefs { multus: multus(&spec.networks), ..own };
    }
    let template = spec.template.as_ref();
    let annotation =
        |key: &str| template?.metadata.annotations.get(key).and_then(Value::as_str).map(str::to_owned);
    WorkloadRefs {
        networks: annotation(NETWORKS_ANNOTATION),
        default_network: annotation(DEFAULT_NETWORK_ANNOTATION),
        multus: template.map(|template| multus(&template.spec.networks)).unwrap_or_default(),
        ..own
    }
}

pub fn vm(object: &MachineObject) -> Option<VmFacts> {
    let Object { metadata, spec, .. } = object;
    let template = spec.0.as_ref().ok().and_then(|spec| spec.template.as_ref());
    let namespace = metadata.namespace.as_deref()?;
    Some(VmFacts {
        networks: template
            .map(|it| networks(namespace, &it.spec.networks, &it.spec.domain, &[]))
            .unwrap_or_default(),
        uid: metadata.uid.clone()?,
        deleting: metadata.deletion_timestamp.is_some(),
    })
}

pub fn vmi(object: &MachineObject) -> Option<VmiFacts> {
    let Object { metadata, spec, status, .. } = object;
    let namespace = metadata.namespace.as_deref()?;
    let status = status.as_ref().and_then(|status| status.0.as_ref().ok());
    let interfaces = status.map_or(&[][..], |status| &status.interfaces);
    let spec = spec.0.as_ref().ok();
    let addresses = metadata.annotations.as_ref().and_then(|all| all.get(ADDRESSES_ANNOTATION));
    let phase = status.and_then(|status| status.phase.as_deref());
    Some(VmiFacts {
        networks: spec
            .map(|spec| networks(namespace, &spec.networks, &spec.domain, interfaces))
            .unwrap_or_default(),
        controller: controller(metadata.owner_references.as_deref()),
        deleting: metadata.deletion_timestamp.is_some(),
        finished: matches!(phase, Some("Succeeded" | "Failed")),
        active_pods: status.map_or(0, |status| status.active_pods.len()),
        addresses: addresses.map(|text| text.as_str().into()),
        uid: metadata.uid.clone()?,
    })
}

/// The secondary networks of a machine. A network without an interface is none.
fn networks(
    namespace: &str,
    networks: &[Network],
    domain: &Domain,
    status: &[Interface],
) -> Vec<MachineNetwork> {
    let interfaces = &domain.devices.interfaces;
    let interface = |name: &str| interfaces.iter().find(|interface| interface.name == name);
    let network = |network: &Network| {
        let multus = network.multus.as_ref().filter(|multus| !multus.default)?;
        let nad = NadRef::parse(multus.network_name.as_deref()?, namespace)?;
        let absent = interface(&network.name)?.state.as_deref() == Some("absent");
        let in_status = status.iter().any(|interface| interface.name == network.name);
        let pod_interface = pod_interface_name(&network.name).into();
        Some(MachineNetwork { name: network.name.as_str().into(), nad, pod_interface, absent, in_status })
    };
    networks.iter().filter_map(network).collect()
}

/// The name that KubeVirt gives to the pod interface of a secondary network.
pub fn pod_interface_name(network: &str) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, network.as_bytes());
    // Eleven hexadecimal digits: five bytes and a half.
    let number = digest.as_ref().iter().take(6).fold(0_u64, |number, byte| (number << 8) | u64::from(*byte));
    format!("pod{:011x}", number >> 4)
}

fn owner(reference: &OwnerReference) -> OwnerRef {
    let kind = OwnerKind::of(&reference.api_version, &reference.kind);
    OwnerRef { kind, name: reference.name.as_str().into(), uid: reference.uid.clone() }
}

fn controller(owners: Option<&[OwnerReference]>) -> Option<OwnerRef> {
    owners?.iter().find(|owner| owner.controller == Some(true)).map(owner)
}

pub fn claim(object: ClaimObject) -> Option<ClaimState> {
    let Object { metadata, spec, status, .. } = object;
    let owners = metadata.owner_references.clone().unwrap_or_default();
    let spec = spec.or_default();
    Some(ClaimState {
        key: key(&metadata)?,
        uid: metadata.uid?,
        version: metadata.resource_version?,
        created: metadata.creation_timestamp.map_or(Timestamp::UNIX_EPOCH, |time| time.0),
        deleting: metadata.deletion_timestamp.is_some(),
        owner: controller(Some(&owners)).or_else(|| match owners.as_slice() {
            [only] => Some(owner(only)),
            _ => None,
        }),
        owner_count: owners.len(),
        annotations: ClaimAnnotations::read(metadata.annotations.as_ref()),
        finalizers: metadata.finalizers.unwrap_or_default(),
        label: metadata.labels.and_then(|labels| labels.get(VM_LABEL).map(|label| label.as_str().into())),
        network: spec.network.into(),
        interface: spec.interface.into(),
        status: status.map(Lenient::or_default).unwrap_or_default(),
    })
}

/// A pod that is a launcher or refers to a claim.
pub fn claim_pod(metadata: &ObjectMeta) -> Option<ClaimPod> {
    let refers = |key| annotation(metadata, key).is_some_and(may_refer);
    let is_primary = annotation(metadata, PRIMARY_CLAIM_ANNOTATION).is_some();
    if !is_launcher(metadata)
        && !is_primary
        && !refers(NETWORKS_ANNOTATION)
        && !refers(DEFAULT_NETWORK_ANNOTATION)
    {
        return None;
    }
    any_pod(metadata).filter(|pod| pod.launcher || pod.claim_names().next().is_some())
}

/// The claims of the primary network of a pod. OVN-Kubernetes reads both annotations.
fn primary(metadata: &ObjectMeta, namespace: &str) -> Box<[Arc<str>]> {
    let named = annotation(metadata, PRIMARY_CLAIM_ANNOTATION).filter(|name| !name.is_empty());
    let default = elements(annotation(metadata, DEFAULT_NETWORK_ANNOTATION), namespace);
    let default = default.into_iter().filter_map(|element| element.claim);
    named.map(Into::into).into_iter().chain(default).collect()
}

/// Whether a networks annotation can refer to a claim. Multus ignores the case of keys and decodes escapes in them.
fn may_refer(networks: &str) -> bool {
    networks.to_ascii_lowercase().contains(CLAIM_KEY) || networks.contains("\\u")
}

fn annotation<'a>(metadata: &'a ObjectMeta, key: &str) -> Option<&'a str> {
    metadata.annotations.as_ref().and_then(|all| all.get(key)).map(String::as_str)
}

fn is_launcher(metadata: &ObjectMeta) -> bool {
    let label = metadata.labels.as_ref().and_then(|labels| labels.get(LAUNCHER_LABEL.0));
    label.is_some_and(|is| is == LAUNCHER_LABEL.1)
}

/// Any pod. One that does not refer to a claim may still have its addresses: a user may have removed the reference.
pub fn any_pod(metadata: &ObjectMeta) -> Option<ClaimPod> {
    let key = key(metadata)?;
    let status = annotation(metadata, NETWORK_STATUS_ANNOTATION);
    Some(ClaimPod {
        uid: metadata.uid.clone()?,
        created: metadata.creation_timestamp.as_ref().map_or(Timestamp::UNIX_EPOCH, |time| time.0),
        deleting: metadata.deletion_timestamp.is_some(),
        launcher: is_launcher(metadata),
        controller: controller(metadata.owner_references.as_deref()),
        elements: elements(annotation(metadata, NETWORKS_ANNOTATION), &key.namespace),
        primary: primary(metadata, &key.namespace),
        attached: attached(status, &key.namespace),
        has_status: status.is_some(),
        key,
    })
}

/// The networks that a pod requests. Invalid ones are left out.
pub fn elements(annotation: Option<&str>, namespace: &str) -> Box<[PodElement]> {
    let selection = NetworkSelection::parse(annotation);
    let elements = selection.entries.into_iter().filter_map(|entry| entry.element.ok());
    elements
        .map(|element| PodElement {
            interface: element.interface.as_ref().map(|name| name.as_str().into()),
            nad: element.reference(namespace),
            claim: element.ipam_claim.filter(|claim| !claim.is_empty()).map(Into::into),
        })
        .collect()
}

/// The attachments of a pod, without its primary network.
fn attached(annotation: Option<&str>, namespace: &str) -> Box<[Attached]> {
    let Ok(list) = NetworkStatusList::parse(annotation) else { return Box::default() };
    let statuses = list.entries().iter().filter_map(|entry| entry.status());
    statuses
        .filter(|status| !status.default)
        .map(|status| Attached {
            interface: status.interface.as_str().into(),
            nad: NadRef::parse(&status.name, namespace),
            ips: status.ips.iter().filter_map(|ip| ip.parse::<IpAddr>().ok()).collect(),
        })
        .collect()
}
