//! Objects of the API server, as far as decisions about claims need them.

use api::selection::NetworkSelection;
use api::{
    IPAMClaim, IPBlock,
    ipamclaim::{ClaimAnnotations, VM_LABEL},
    network_status::NetworkStatusList,
    selection::NadRef,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use plan::{
    claims::{Attached, ClaimPod, ClaimState, ObjectKey, OwnerKind, OwnerRef, PodElement, VmiFacts},
    ipam::ObservedIpBlock,
};

use crate::pods::{self, OwnPod};

pub fn claim_pod(pod: &OwnPod) -> ClaimPod {
    let namespace = pod.namespace.as_str();
    let selection = NetworkSelection::parse(pod.networks());
    let elements = selection.elements().map(|(_, element)| PodElement {
        interface: element.interface.as_ref().map(|name| name.as_str().into()),
        nad: element.reference(namespace),
        claim: element.ipam_claim.as_deref().filter(|name| !name.is_empty()).map(Into::into),
    });
    // What cannot be read shows no address; the reference still counts.
    let status = NetworkStatusList::parse(pod.network_status()).unwrap_or_default();
    let entries = status.entries().iter().filter_map(|entry| entry.status()).filter(|entry| !entry.default);
    let attached = entries.map(|entry| Attached {
        interface: entry.interface.as_str().into(),
        nad: NadRef::parse(&entry.name, namespace),
        ips: entry.ips.iter().filter_map(|ip| ip.parse().ok()).collect(),
    });
    ClaimPod {
        key: ObjectKey::new(namespace, pod.name.as_str()),
        uid: pod.uid.clone(),
        created: pod.created,
        deleting: pod.deleted.is_some(),
        launcher: pod.is_virt_launcher(),
        controller: pod.controller.clone(),
        elements: elements.collect(),
        attached: attached.collect(),
        // Only the controller needs them.
        primary: Box::default(),
        has_status: pod.network_status().is_some(),
    }
}

pub fn claim_state(claim: IPAMClaim) -> ClaimState {
    let IPAMClaim { metadata, spec, status } = claim;
    let owners = metadata.owner_references.unwrap_or_default();
    let owner_count = owners.len();
    let only = owners.first().filter(|_| owner_count == 1).map(|owner| OwnerRef {
        kind: OwnerKind::of(&owner.api_version, &owner.kind),
        name: owner.name.as_str().into(),
        uid: owner.uid.clone(),
    });
    ClaimState {
        key: ObjectKey::new(metadata.namespace.unwrap_or_default(), metadata.name.unwrap_or_default()),
        uid: metadata.uid.unwrap_or_default(),
        version: metadata.resource_version.unwrap_or_default(),
        created: metadata.creation_timestamp.map(|at| at.0).unwrap_or_default(),
        deleting: metadata.deletion_timestamp.is_some(),
        owner: pods::controller(owners).or(only),
        owner_count,
        annotations: ClaimAnnotations::read(metadata.annotations.as_ref()),
        finalizers: metadata.finalizers.unwrap_or_default(),
        label: metadata.labels.and_then(|mut labels| labels.remove(VM_LABEL)).map(Into::into),
        network: spec.network.into(),
        interface: spec.interface.into(),
        status: status.unwrap_or_default(),
    }
}

/// A VirtualMachineInstance of which only the metadata are known.
pub fn instance(metadata: ObjectMeta) -> VmiFacts {
    VmiFacts {
        uid: metadata.uid.unwrap_or_default(),
        controller: pods::controller(metadata.owner_references.unwrap_or_default()),
        deleting: metadata.deletion_timestamp.is_some(),
        finished: false,
        active_pods: 0,
        networks: Vec::new(),
        addresses: None,
    }
}

pub fn block(block: IPBlock) -> ObservedIpBlock {
    let IPBlock { metadata, spec, status } = block;
    ObservedIpBlock { uid: metadata.uid.unwrap_or_default(), spec, status: status.unwrap_or_default() }
}
