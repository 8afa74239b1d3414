//! What the decisions about claims need of the objects of a cluster.

use std::{fmt, net::IpAddr, sync::Arc};

use api::{
    IPAMClaimStatus,
    ipamclaim::{ClaimAnnotations, FINALIZER, RecordedAddresses},
    nad::NadNetwork,
    selection::NadRef,
};
use jiff::Timestamp;

use crate::bridge::Uid;

/// The namespace and the name of an object.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectKey {
    pub namespace: Arc<str>,
    pub name: Arc<str>,
}

impl ObjectKey {
    pub fn new(namespace: impl Into<Arc<str>>, name: impl Into<Arc<str>>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }

    /// Parses namespace/name.
    pub fn parse(text: &str) -> Option<Self> {
        let (namespace, name) = text.split_once('/')?;
        Some(Self::new(namespace, name))
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// The kind of an owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum OwnerKind {
    VirtualMachine,
    VirtualMachineInstance,
    /// Any other kind. Claims with such an owner are not changed.
    Other,
}

impl OwnerKind {
    pub const API_VERSION: &str = "kubevirt.io/v1";

    /// The kind of an owner reference.
    pub fn of(api_version: &str, kind: &str) -> Self {
        match (api_version.split_once('/').map(|(group, _)| group), kind) {
            (Some("kubevirt.io"), "VirtualMachine") => Self::VirtualMachine,
            (Some("kubevirt.io"), "VirtualMachineInstance") => Self::VirtualMachineInstance,
            _ => Self::Other,
        }
    }
}

impl fmt::Display for OwnerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::VirtualMachine => "VirtualMachine",
            Self::VirtualMachineInstance => "VirtualMachineInstance",
            Self::Other => "object",
        })
    }
}

/// The controller of an object.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OwnerRef {
    pub kind: OwnerKind,
    pub name: Arc<str>,
    pub uid: Uid,
}

/// A secondary network of a virtual machine: an interface and its `multus` network that is not the default one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineNetwork {
    /// The logical name, by which interface and network are connected.
    pub name: Arc<str>,
    pub nad: NadRef,
    /// The hashed name of the pod's interface: `pod` and 11 hexadecimal digits.
    pub pod_interface: Arc<str>,
    /// Whether the state of the interface is `absent`, so it is being unplugged.
    pub absent: bool,
    /// Whether the status of the instance lists the interface. Always false in [`VmFacts`].
    pub in_status: bool,
}

/// A VirtualMachine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmFacts {
    pub uid: Uid,
    pub deleting: bool,
    /// Those of its template, in the order of the spec.
    pub networks: Vec<MachineNetwork>,
}

/// A VirtualMachineInstance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmiFacts {
    pub uid: Uid,
    pub controller: Option<OwnerRef>,
    pub deleting: bool,
    /// Whether its phase is Succeeded or Failed.
    pub finished: bool,
    /// The length of `status.activePods`.
    pub active_pods: usize,
    /// In the order of the spec.
    pub networks: Vec<MachineNetwork>,
    /// The annotation `network.kubevirt.io/addresses`.
    pub addresses: Option<Box<str>>,
}

/// A live pod that is a launcher of a virtual machine or references a claim. A terminating pod is live.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimPod {
    pub key: ObjectKey,
    pub uid: Uid,
    pub created: Timestamp,
    pub deleting: bool,
    /// Whether it has the label of launcher pods.
    pub launcher: bool,
    /// The instance that a launcher runs.
    pub controller: Option<OwnerRef>,
    /// The elements of its networks annotation, in order.
    pub elements: Box<[PodElement]>,
    /// The claims of its primary network, which its other annotations name.
    pub primary: Box<[Arc<str>]>,
    /// What its network-status shows, without the default network.
    pub attached: Box<[Attached]>,
    /// Whether it has a network-status.
    pub has_status: bool,
}

/// An element of a networks annotation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodElement {
    /// The requested name of the interface.
    pub interface: Option<Arc<str>>,
    pub nad: NadRef,
    /// The name of the referenced claim, in the namespace of the pod.
    pub claim: Option<Arc<str>>,
}

/// An attachment that a network-status shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attached {
    pub interface: Arc<str>,
    /// The NAD, if the name of the entry is one.
    pub nad: Option<NadRef>,
    pub ips: Box<[IpAddr]>,
}

impl ClaimPod {
    /// Whether it references a claim of its namespace.
    pub fn references(&self, claim: &ObjectKey) -> bool {
        self.key.namespace == claim.namespace
            && self.elements.iter().any(|element| element.claim.as_ref() == Some(&claim.name))
    }

    /// Whether it references a claim of its namespace, also for its primary network.
    pub fn uses(&self, claim: &ObjectKey) -> bool {
        self.references(claim) || self.key.namespace == claim.namespace && self.primary.contains(&claim.name)
    }

    /// The names of the claims that it uses. A name can occur several times.
    pub fn claim_names(&self) -> impl Iterator<Item = &Arc<str>> {
        self.elements.iter().filter_map(|element| element.claim.as_ref()).chain(&self.primary)
    }

    /// Whether its network-status shows an address.
    pub fn shows(&self, address: IpAddr) -> bool {
        self.attached.iter().any(|attached| attached.ips.contains(&address))
    }

    /// Whether it is a launcher of this instance.
    pub fn is_launcher_of(&self, vmi: &str) -> bool {
        let controller = self.controller.as_ref().filter(|_| self.launcher);
        controller.is_some_and(|it| it.kind == OwnerKind::VirtualMachineInstance && it.uid == vmi)
    }
}

/// An IPAMClaim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimState {
    pub key: ObjectKey,
    pub uid: Uid,
    /// The resourceVersion.
    pub version: String,
    pub created: Timestamp,
    pub deleting: bool,
    /// The controller reference; if there is none, the only owner reference.
    pub owner: Option<OwnerRef>,
    /// The number of owner references.
    pub owner_count: usize,
    pub finalizers: Vec<String>,
    /// The value of the label `kubevirt.io/vm`.
    pub label: Option<Arc<str>>,
    /// `spec.network`: the name of a CNI config.
    pub network: Arc<str>,
    /// `spec.interface`.
    pub interface: Arc<str>,
    pub annotations: ClaimAnnotations,
    pub status: IPAMClaimStatus,
}

impl ClaimState {
    /// Whether Patchbay created the claim, or a virtual machine once had its interface while Patchbay ran. Patchbay deletes
    /// no other. Versions without the mark filled in `spec.interface`, which ipam-extensions leaves empty, and set label, owner
    /// and finalizer.
    pub fn is_ours(&self) -> bool {
        let is_complete = || self.label.is_some() && self.has_machine_owner() && self.has_finalizer();
        self.annotations.managed || super::names::is_hashed(&self.interface) && is_complete()
    }

    pub fn has_finalizer(&self) -> bool {
        self.finalizers.iter().any(|one| one == FINALIZER)
    }

    /// Whether no pod ever had addresses of this claim, for example because it was created from a backup. The record is
    /// written before the status, so a status beside the record of another UID was restored too.
    pub fn is_unused(&self) -> bool {
        let recorded = self.annotations.recorded.as_ref();
        recorded.map_or(self.status.ips.is_empty(), |recorded| recorded.uid != self.uid)
    }

    /// The addresses that it requests if it has no others: those that it had before a backup.
    pub fn recorded(&self) -> Vec<IpAddr> {
        let recorded = self.annotations.recorded.iter();
        recorded.flat_map(RecordedAddresses::addresses).map(|address| address.to_canonical()).collect()
    }

    /// Whether a VirtualMachine or its instance owns it.
    pub fn has_machine_owner(&self) -> bool {
        self.owner.as_ref().is_some_and(|owner| owner.kind != OwnerKind::Other)
    }

    /// The addresses of `status.ips`, with their prefix lengths. Leaves out what is no address.
    pub fn published(&self) -> Vec<ipnet::IpNet> {
        let parse = |text: &String| text.parse().ok().or_else(|| Some(text.parse::<IpAddr>().ok()?.into()));
        self.status.ips.iter().filter_map(parse).collect()
    }
}

/// A NAD that an interface names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NadLookup {
    Absent,
    /// Why its config cannot be read.
    Invalid(String),
    Found(NadNetwork),
}

/// The settings of the controller that concern claims.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ClaimOptions {
    /// `--keep-unplugged-claims`
    pub keep_unplugged: bool,
    /// `--reference-foreign-nads`
    pub reference_foreign_nads: bool,
}

/// The status fields that the stored CRD keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClaimSchema {
    pub conditions: bool,
    pub owner_pod: bool,
}

impl Default for ClaimSchema {
    fn default() -> Self {
        Self { conditions: true, owner_pod: true }
    }
}
