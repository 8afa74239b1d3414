//! Tables of the decisions about claims.

mod allocate;
mod life;
mod lone;
mod names;
mod publish;
mod shown;

use std::{net::IpAddr, sync::Arc};

use api::{
    IPAMClaimStatus,
    ipamclaim::{ClaimAnnotations, FINALIZER, RecordedAddresses},
    nad::{NadIpam, NadNetwork},
    selection::NadRef,
};
use jiff::Timestamp;

use super::*;

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn key(name: &str) -> ObjectKey {
    ObjectKey::new("ns", name)
}

fn owner(kind: OwnerKind, uid: &str) -> OwnerRef {
    OwnerRef { kind, name: "vm1".into(), uid: uid.to_owned() }
}

fn vm_owner(uid: &str) -> OwnerRef {
    owner(OwnerKind::VirtualMachine, uid)
}

fn vmi_owner(uid: &str) -> OwnerRef {
    owner(OwnerKind::VirtualMachineInstance, uid)
}

/// A network on NAD `ns/blue`.
fn network(name: &str) -> MachineNetwork {
    MachineNetwork {
        name: name.into(),
        nad: NadRef::new("ns", "blue"),
        pod_interface: interface(name),
        absent: false,
        in_status: false,
    }
}

fn interface(name: &str) -> Arc<str> {
    format!("pod{:011x}", api::digest::digest([name]) & 0xfff_ffff_ffff).into()
}

fn vm(uid: &str, networks: &[MachineNetwork]) -> VmFacts {
    VmFacts { uid: uid.to_owned(), deleting: false, networks: networks.to_vec() }
}

fn vmi(uid: &str, controller: Option<OwnerRef>, networks: &[MachineNetwork]) -> VmiFacts {
    VmiFacts {
        uid: uid.to_owned(),
        controller,
        deleting: false,
        finished: false,
        active_pods: 1,
        networks: networks.to_vec(),
        addresses: None,
    }
}

/// A claim of Patchbay on network `blue`, with the empty interface that ipam-extensions writes.
fn claim(name: &str, owner: Option<OwnerRef>) -> ClaimState {
    ClaimState {
        key: key(name),
        uid: format!("uid-{name}"),
        version: "7".to_owned(),
        created: at(0),
        deleting: false,
        owner_count: usize::from(owner.is_some()),
        owner,
        finalizers: vec![FINALIZER.to_owned()],
        label: Some("vm1".into()),
        network: "blue".into(),
        interface: "".into(),
        annotations: ClaimAnnotations { managed: true, ..ClaimAnnotations::default() },
        status: IPAMClaimStatus::default(),
    }
}

/// A claim whose addresses a pod may have had.
fn used(mut claim: ClaimState) -> ClaimState {
    claim.annotations.recorded = Some(RecordedAddresses { uid: claim.uid.clone(), ips: Vec::new() });
    claim
}

/// A claim from a backup, with the addresses that it had.
fn restored(name: &str, addresses: &[&str]) -> ClaimState {
    let mut claim = claim(name, None);
    let ips = addresses.iter().map(|text| text.parse().unwrap()).collect();
    claim.annotations.recorded = Some(RecordedAddresses { uid: "before".to_owned(), ips });
    claim
}

/// A launcher of an instance; each element is a logical network and a claim.
fn launcher(vmi: &str, elements: &[(&str, Option<&str>)]) -> ClaimPod {
    let element = |(name, claim): &(&str, Option<&str>)| PodElement {
        interface: Some(interface(name)),
        nad: NadRef::new("ns", "blue"),
        claim: claim.map(Into::into),
    };
    ClaimPod {
        key: key("virt-launcher"),
        uid: "pod".to_owned(),
        created: at(0),
        deleting: false,
        launcher: true,
        controller: Some(vmi_owner(vmi)),
        elements: elements.iter().map(element).collect(),
        attached: Box::default(),
        primary: Box::default(),
        has_status: false,
    }
}

fn showing(mut pod: ClaimPod, name: &str, addresses: &[&str]) -> ClaimPod {
    pod.key = key(name);
    pod.has_status = true;
    pod.attached = Box::new([Attached {
        interface: interface("blue"),
        nad: Some(NadRef::new("ns", "blue")),
        ips: addresses.iter().map(|text| ip(text)).collect(),
    }]);
    pod
}

fn config(name: &str, ipam: NadIpam) -> NadNetwork {
    NadNetwork { name: name.to_owned(), persistent: true, ipam }
}

fn patchbay(network: &str) -> NadIpam {
    NadIpam::Patchbay { network: network.to_owned() }
}
