//! Which claims a virtual machine has: when they are created, deleted, and lose their finalizer.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use api::{
    ipamclaim::ADDRESSES_ANNOTATION,
    nad::{NadIpam, NadNetwork},
    selection::NadRef,
};
use ipnet::IpNet;
use jiff::{SignedDuration, Timestamp};

use super::{
    ClaimOptions, ClaimPod, ClaimState, MachineNetwork, NadLookup, ObjectKey, OwnerKind, OwnerRef,
    PodElement, ReservedIn, Resolution, VmFacts, VmiFacts,
    names::{self, ClaimName},
    owner::{has_addresses, is_adopted, keeps_until, life_step},
    resolve,
    unplug::{delete, is_in_plan, unplug_step},
};
use crate::bridge::Uid;

pub use super::owner::finalizer_step;

/// What is known about the objects of a kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KindState {
    /// The cluster does not have the kind, so no object of it exists.
    Absent,
    /// The kind could not be listed: nothing is known about its objects.
    NotServed,
    Listed,
}

/// What is known about the kinds of KubeVirt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KindsKnown {
    pub vm: KindState,
    pub vmi: KindState,
}

impl KindsKnown {
    pub const LISTED: Self = Self { vm: KindState::Listed, vmi: KindState::Listed };
}

/// One virtual machine, that is the VirtualMachine and the VirtualMachineInstance of a name, and its claims.
#[derive(Clone, Copy)]
pub struct MachineInput<'a> {
    pub key: &'a ObjectKey,
    pub vm: Option<&'a VmFacts>,
    pub vmi: Option<&'a VmiFacts>,
    pub kinds: KindsKnown,
    /// The claims whose owner is a VirtualMachine or an instance of this name, and those without any owner whose label is
    /// [`names::label_value`](super::names::label_value) of this name.
    pub claims: &'a [&'a ClaimState],
    /// The claim of a name in the namespace.
    pub in_namespace: &'a dyn Fn(&str) -> Option<ClaimState>,
    /// The live launchers of the instance, and the live pods that reference one of the claims.
    pub pods: &'a [&'a ClaimPod],
    pub nads: &'a dyn Fn(&NadRef) -> NadLookup,
    /// The UID of the BridgeNetwork of a name.
    pub networks: &'a dyn Fn(&str) -> Option<Uid>,
    /// The network whose blocks have a reservation for the claim of this UID.
    pub reserved_in: &'a dyn Fn(&str) -> Option<ReservedIn>,
    pub options: ClaimOptions,
    pub now: Timestamp,
}

/// What to write for a virtual machine. A plan on unchanged objects is empty, except for events.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MachinePlan {
    pub steps: Vec<ClaimStep>,
    /// The network of each claim that the machine uses, by the key of the claim. A claim without an entry is not
    /// allocated, and keeps what it has.
    pub resolutions: BTreeMap<ObjectKey, Resolution>,
    /// Problems that hold now. The caller records each when it appears, not in every pass.
    pub events: Vec<ClaimEvent>,
    /// The claims without a virtual machine that are kept, each with the event about it.
    pub kept: Vec<(ObjectKey, ClaimEvent)>,
    /// Whether a step may follow after these without another change.
    pub requeue: bool,
    /// After this time, a step follows without a change.
    pub requeue_after: Option<SignedDuration>,
}

/// One write.
#[derive(Debug, Clone, PartialEq)]
pub enum ClaimStep {
    Create(ClaimDraft),
    /// Replaces the owner references by this one controller reference.
    SetOwner {
        claim: ObjectKey,
        uid: Uid,
        version: String,
        owner: OwnerRef,
    },
    /// Sets the annotation by which Patchbay deletes the claim with its interface.
    Mark {
        claim: ObjectKey,
        uid: Uid,
        version: String,
    },
    /// Sets `spec.network`.
    SetNetwork {
        claim: ObjectKey,
        uid: Uid,
        version: String,
        network: String,
        /// Recorded when the claim was written.
        event: ClaimEvent,
    },
    Delete {
        claim: ObjectKey,
        uid: Uid,
        version: String,
        why: DeleteReason,
        /// The caller first checks with a live list that no IPBlock of this network has a reservation for the claim: the
        /// cached blocks may be older than the cached claim.
        unreserved_in: Option<String>,
        /// The caller first checks with live reads that the machine is what the decision is based on: the current one may
        /// need the claim.
        unchanged: Vec<UnchangedCheck>,
        /// Recorded when the deletion was accepted.
        event: ClaimEvent,
    },
    /// Replaces the finalizers, if all checks hold.
    RemoveFinalizer {
        claim: ObjectKey,
        uid: Uid,
        version: String,
        left: Vec<String>,
        gone: Vec<GoneCheck>,
    },
}

impl ClaimStep {
    /// The claim that the step writes.
    pub fn claim(&self) -> &ObjectKey {
        match self {
            Self::Create(draft) => &draft.key,
            Self::SetOwner { claim, .. }
            | Self::Mark { claim, .. }
            | Self::SetNetwork { claim, .. }
            | Self::Delete { claim, .. }
            | Self::RemoveFinalizer { claim, .. } => claim,
        }
    }

    /// The version that the write is based on; none for a create.
    pub fn version(&self) -> Option<&str> {
        match self {
            Self::Create(_) => None,
            Self::SetOwner { version, .. }
            | Self::Mark { version, .. }
            | Self::SetNetwork { version, .. }
            | Self::Delete { version, .. }
            | Self::RemoveFinalizer { version, .. } => Some(version),
        }
    }
}

/// A claim to create, with the finalizer `kubevirt.io/persistent-ipam`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimDraft {
    pub key: ObjectKey,
    /// The value of the label `kubevirt.io/vm`.
    pub label: String,
    pub owner: OwnerRef,
    /// `spec.network`
    pub network: String,
    /// `spec.interface`
    pub interface: Arc<str>,
    /// Recorded when the claim was created.
    pub event: ClaimEvent,
}

/// Why a claim is deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeleteReason {
    /// The interface was unplugged, or the machine is gone and left the claim without an owner. The caller first checks with a
    /// live list that no pod references the claim.
    Unplugged,
    /// The interface is on another network now.
    Replaced,
}

/// What a live read must confirm before a claim is deleted: the current object of this name is the cached one, as far as
/// claims depend on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UnchangedCheck {
    Vm { key: ObjectKey, cached: Option<VmFacts> },
    Vmi { key: ObjectKey, cached: Option<VmiFacts> },
}

/// What a live read must confirm before a finalizer is removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GoneCheck {
    /// No object of this name has this UID.
    Object { kind: OwnerKind, key: ObjectKey, uid: Uid },
    /// No VirtualMachineInstance of this name is controlled by the VirtualMachine of this UID.
    NoInstanceOf { key: ObjectKey, vm: Uid },
    /// No VirtualMachineInstance of this name has this UID, or it is being deleted and has no active pods.
    Inactive { key: ObjectKey, uid: Uid },
    /// No object of this kind has this name.
    Name { kind: OwnerKind, key: ObjectKey },
    /// No live pod uses the claim.
    Unused { claim: ObjectKey },
    /// ipam-extensions does not run.
    NoIpamExtensions,
}

/// An Event on the VirtualMachine and its instance.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClaimEvent {
    pub warning: bool,
    pub reason: &'static str,
    pub note: String,
}

impl ClaimEvent {
    pub(super) fn warning(reason: &'static str, note: String) -> Self {
        Self { warning: true, reason, note }
    }
}

/// The reason of events about a claim that is not as the machine needs it.
pub(super) const CONFLICT: &str = "IPAMClaimConflict";
/// The reason of events about a claim that stays although its network or its virtual machine is gone.
pub(super) const KEPT: &str = "IPAMClaimKept";

/// The owner of the claims of an instance: its VirtualMachine by the controller reference, else the instance itself.
pub fn desired_owner(key: &ObjectKey, vmi: &VmiFacts) -> OwnerRef {
    let controller = vmi.controller.as_ref().filter(|it| it.kind == OwnerKind::VirtualMachine);
    controller.cloned().unwrap_or_else(|| OwnerRef {
        kind: OwnerKind::VirtualMachineInstance,
        name: key.name.clone(),
        uid: vmi.uid.clone(),
    })
}

/// Whether the owner of a claim is this instance or its VirtualMachine, by UID.
pub fn fits(claim: &ClaimState, vmi: &VmiFacts) -> bool {
    let Some(owner) = &claim.owner else { return false };
    match owner.kind {
        OwnerKind::VirtualMachineInstance => owner.uid == vmi.uid,
        OwnerKind::VirtualMachine => vmi.controller.as_ref().is_some_and(|it| it.uid == owner.uid),
        OwnerKind::Other => false,
    }
}

/// Whether the instance started without a reference to a claim for this network: some live launcher of it has the network
/// and no reference. All pods of one instance are alike, so it gets none until it restarts.
pub fn started_without(vmi_uid: &str, network: &MachineNetwork, pods: &[&ClaimPod]) -> bool {
    let launchers = pods.iter().filter(|pod| pod.is_launcher_of(vmi_uid));
    let mut elements = launchers.flat_map(|pod| &pod.elements);
    elements.any(|element| element.claim.is_none() && is_element_of(element, network))
}

/// Whether an element is for a network. An element with an ordinal name of KubeVirt, or without one, is compared by NAD.
pub(super) fn is_element_of(element: &PodElement, network: &MachineNetwork) -> bool {
    match element.interface.as_deref() {
        Some(interface) if !is_ordinal(interface) => *interface == *network.pod_interface,
        _ => element.nad == network.nad,
    }
}

/// Whether the name of an interface is `net` and a number.
pub(super) fn is_ordinal(interface: &str) -> bool {
    let digits = interface.strip_prefix("net").unwrap_or_default();
    !digits.is_empty() && digits.chars().all(|c| c.is_ascii_digit())
}

/// Plans the next writes.
pub fn plan(input: &MachineInput<'_>) -> MachinePlan {
    let mut plan = MachinePlan::default();
    let mut replaced = BTreeSet::new();
    if let Some(vmi) = input.vmi.filter(|_| input.kinds.vmi == KindState::Listed) {
        let names = names::assign(input.key, vmi, input.pods, input.in_namespace);
        let mut seen = BTreeSet::new();
        for network in vmi.networks.iter().filter(|network| seen.insert(&network.name)) {
            if let Some(name) = names.get(&network.name) {
                plan_network(input, vmi, network, name, &mut plan, &mut replaced);
            }
        }
    } else if input.vmi.is_none() {
        resolve_stopped(input, &mut plan);
    }
    for claim in input.claims {
        let step = life_step(input, claim, replaced.contains(&claim.uid));
        let step = step.or_else(|| unplug_step(input, claim)).or_else(|| mark(input, claim, &plan));
        plan.steps.extend(step);
        if let Some((until, event)) = keeps_until(input, claim) {
            plan.kept.push((claim.key.clone(), event));
            let rest = until.map(|until| until.duration_since(input.now));
            plan.requeue_after = rest.into_iter().chain(plan.requeue_after).min();
        }
    }
    plan
}

/// Marks a claim of another controller, or of a version without the mark, when the machine has its interface: from then on
/// it is ours.
fn mark(input: &MachineInput<'_>, claim: &ClaimState, plan: &MachinePlan) -> Option<ClaimStep> {
    let is_planned = plan.steps.iter().any(|step| *step.claim() == claim.key);
    let marks = !claim.annotations.managed && claim.has_finalizer() && !claim.deleting && !is_planned;
    (marks && is_in_plan(input, claim)).then(|| ClaimStep::Mark {
        claim: claim.key.clone(),
        uid: claim.uid.clone(),
        version: claim.version.clone(),
    })
}

/// The claim of one network of an instance.
fn plan_network(
    input: &MachineInput<'_>,
    vmi: &VmiFacts,
    network: &MachineNetwork,
    name: &ClaimName,
    plan: &mut MachinePlan,
    replaced: &mut BTreeSet<Uid>,
) {
    let interface = &network.name;
    let existing = (input.in_namespace)(name.as_str());
    let ours = existing.as_ref().filter(|claim| fits(claim, vmi));
    let config = match (input.nads)(&network.nad) {
        NadLookup::Absent => return,
        NadLookup::Invalid(cause) => {
            let nad = &network.nad;
            plan.events.push(ClaimEvent::warning(
                "NetworkConfigInvalid",
                format!(
                    "NAD {nad} of interface {interface}: {cause}; correct the config of the NAD; until then the address is not persistent"
                ),
            ));
            return;
        }
        NadLookup::Found(config) => config,
    };
    if let Some(claim) = ours {
        if is_moved(input, claim, &config) {
            replaced.insert(claim.uid.clone());
            plan.requeue = true;
            if !claim.deleting {
                plan.steps.push(replace(input, interface, claim, &config));
            }
            return;
        }
        plan.steps.extend(set_network(network, claim, &config));
        use_claim(input, vmi, network, claim, &config, plan);
        return;
    }
    // A pod that got a reference before persistence was switched off still needs its claim.
    let key = ObjectKey { namespace: input.key.namespace.clone(), name: name.as_str().into() };
    let referenced = || input.pods.iter().any(|pod| pod.is_launcher_of(&vmi.uid) && pod.references(&key));
    let wanted = config.persistent && !started_without(&vmi.uid, network, input.pods) || referenced();
    if !wanted || network.absent || vmi.deleting || vmi.finished {
        return;
    }
    if is_foreign(&network.nad, &config, &input.key.namespace, input.options) {
        plan.events.push(ClaimEvent::warning(
            "ForeignNamespaceNetwork",
            format!(
                "NAD {} of interface {interface} is an OVN-Kubernetes network of another namespace, where OVN-Kubernetes \
                 does not find the claim; use a NAD of namespace {}, or set --reference-foreign-nads",
                network.nad, input.key.namespace
            ),
        ));
        return;
    }
    if let ClaimName::Suffixed { conflict: Some(conflict), .. } = name {
        plan.events.push(ClaimEvent::warning(CONFLICT, conflict.clone()));
    }
    if let Some(claim) = existing {
        plan.requeue = true;
        plan.events.extend(occupied(input, vmi, interface, &claim));
        return;
    }
    let note = format!("created IPAMClaim {key} for interface {interface} on network {}", config.name);
    plan.steps.push(ClaimStep::Create(ClaimDraft {
        key,
        label: names::label_value(&input.key.name),
        owner: desired_owner(input.key, vmi),
        network: config.name,
        interface: network.pod_interface.clone(),
        event: ClaimEvent { warning: false, reason: "IPAMClaimCreated", note },
    }));
}

/// Whether OVN-Kubernetes would look for the claim in another namespace than that of the machine.
pub fn is_foreign(nad: &NadRef, config: &NadNetwork, namespace: &str, options: ClaimOptions) -> bool {
    config.ipam == NadIpam::Ovn && nad.namespace != namespace && !options.reference_foreign_nads
}

/// The event about a claim that has the name which the machine needs. `None` if the machine takes it over.
fn occupied(
    input: &MachineInput<'_>,
    vmi: &VmiFacts,
    interface: &str,
    claim: &ClaimState,
) -> Option<ClaimEvent> {
    let key = &claim.key;
    let note = match &claim.owner {
        Some(owner) => format!(
            "IPAMClaim {key} of an earlier {} {} still exists; interface {interface} waits until it is gone",
            owner.kind, owner.name
        ),
        None if is_adopted(input, claim, vmi) => return None,
        None => format!(
            "IPAMClaim {key} belongs to no virtual machine; interface {interface} waits until it is gone: delete it if no pod uses it"
        ),
    };
    Some(ClaimEvent::warning(CONFLICT, note))
}

/// Resolves a claim of the machine, and reports what its user should know.
fn use_claim(
    input: &MachineInput<'_>,
    vmi: &VmiFacts,
    network: &MachineNetwork,
    claim: &ClaimState,
    config: &NadNetwork,
    plan: &mut MachinePlan,
) {
    let reserved = (input.reserved_in)(&claim.uid);
    let addresses = vmi.addresses.as_deref();
    let resolution = resolve::for_machine(
        &network.name,
        &network.nad,
        config,
        addresses,
        input.networks,
        reserved.as_ref(),
        claim,
    );
    plan.events.extend(reserved.as_ref().and_then(|reserved| kept(network, claim, config, reserved)));
    if let Resolution::Allocate { requested, .. } = &resolution {
        let published = published_addresses(claim);
        let other = requested.iter().find(|address| !published.contains(address));
        if let Some(address) = other.filter(|_| !published.is_empty()) {
            let has = published.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            plan.events.push(ClaimEvent::warning(
                CONFLICT,
                format!(
                    "annotation {ADDRESSES_ANNOTATION} requests {address}, but IPAMClaim {} has {has}; to change it, stop \
                     the VM and delete the IPAMClaim",
                    claim.key
                ),
            ));
        }
    }
    plan.resolutions.insert(claim.key.clone(), resolution);
    let used = input.pods.iter().any(|pod| pod.references(&claim.key));
    if claim.deleting && used && !vmi.deleting && has_addresses(input, claim) {
        let note = format!(
            "IPAMClaim {} was deleted; the virtual machine keeps its addresses until it stops",
            claim.key
        );
        plan.events.push(ClaimEvent::warning("IPAMClaimDeleted", note));
    }
}

/// The event about a claim that keeps its addresses while its NAD says that they are not persistent.
fn kept(
    network: &MachineNetwork,
    claim: &ClaimState,
    config: &NadNetwork,
    reserved: &ReservedIn,
) -> Option<ClaimEvent> {
    let note = || {
        format!(
            "NAD {} of interface {} has no persistent addresses now; IPAMClaim {} keeps those that it has. If this is a \
             mistake, set spec.ipam and spec.ipam.persistent of BridgeNetwork {} before the VM restarts",
            network.nad, network.name, claim.key, reserved.network_name
        )
    };
    (!config.persistent).then(|| ClaimEvent::warning(KEPT, note()))
}

/// Whether the interface of a claim is on another network now. The BridgeNetwork that the claim has a reservation in
/// decides; without one, the name of the config.
fn is_moved(input: &MachineInput<'_>, claim: &ClaimState, config: &NadNetwork) -> bool {
    let is_renamed = *claim.network != *config.name;
    let Some(reserved) = (input.reserved_in)(&claim.uid) else { return is_renamed };
    match &config.ipam {
        NadIpam::Patchbay { network } => {
            (input.networks)(network).map_or(is_renamed, |network| network != reserved.network)
        }
        // The network has lost spec.ipam, or the NAD its IPAM: the interface is where it was.
        NadIpam::Other => is_renamed,
        NadIpam::Ovn => true,
    }
}

/// Deletes a claim whose interface is on another network now.
fn replace(input: &MachineInput<'_>, interface: &str, claim: &ClaimState, config: &NadNetwork) -> ClaimStep {
    let note =
        format!("interface {interface} moved to network {}; replacing IPAMClaim {}", config.name, claim.key);
    let mut step = delete(input, claim, DeleteReason::Replaced, note);
    if let ClaimStep::Delete { unreserved_in, .. } = &mut step
        && let NadIpam::Patchbay { network } = &config.ipam
        && (input.reserved_in)(&claim.uid).is_none()
    {
        *unreserved_in = Some(network.clone());
    }
    step
}

/// Corrects `spec.network` of a claim whose interface did not move: a user edited the claim, or renamed the config of the
/// NAD. The claim keeps its UID, so that the machine keeps its addresses and its MAC address.
fn set_network(network: &MachineNetwork, claim: &ClaimState, config: &NadNetwork) -> Option<ClaimStep> {
    if *claim.network == *config.name {
        return None;
    }
    let note = format!(
        "IPAMClaim {} was edited: spec.network was {:?}, but interface {} is on network {:?} of NAD {}; set spec.network, \
         the addresses stay",
        claim.key,
        resolve::cut(&claim.network),
        network.name,
        config.name,
        network.nad
    );
    Some(ClaimStep::SetNetwork {
        claim: claim.key.clone(),
        uid: claim.uid.clone(),
        version: claim.version.clone(),
        network: config.name.clone(),
        event: ClaimEvent::warning(CONFLICT, note),
    })
}

/// A stopped machine keeps its claims: those with a reservation are resolved by the template of the VirtualMachine. Those
/// that have only published or recorded addresses have lost their reservation, and request the same addresses again.
fn resolve_stopped(input: &MachineInput<'_>, plan: &mut MachinePlan) {
    let Some(vm) = input.vm else { return };
    for claim in input.claims.iter().filter(|claim| is_owned_by(claim, &vm.uid)) {
        let network = vm.networks.iter().find(|network| is_claim_of(input.key, claim, network));
        let Some(network) = network else { continue };
        let nad = network.nad.clone();
        let (reserved, requested) = match (input.reserved_in)(&claim.uid) {
            Some(reserved) => {
                if let NadLookup::Found(config) = (input.nads)(&nad) {
                    plan.events.extend(kept(network, claim, &config, &reserved));
                }
                (Some(reserved), Vec::new())
            }
            None => (lost_reservation(input, claim, &nad), resolve::former(claim)),
        };
        let Some(ReservedIn { network, network_name }) = reserved else { continue };
        let resolution = Resolution::Allocate { network, network_name, nad, requested };
        plan.resolutions.insert(claim.key.clone(), resolution);
    }
}

/// The network whose addresses a claim without a reservation has published.
fn lost_reservation(input: &MachineInput<'_>, claim: &ClaimState, nad: &NadRef) -> Option<ReservedIn> {
    if claim.deleting || resolve::former(claim).is_empty() {
        return None;
    }
    let NadLookup::Found(config) = (input.nads)(nad) else { return None };
    let NadIpam::Patchbay { network: network_name } = config.ipam else { return None };
    if *claim.network != *config.name {
        return None;
    }
    Some(ReservedIn { network: (input.networks)(&network_name)?, network_name })
}

fn published_addresses(claim: &ClaimState) -> Vec<IpAddr> {
    claim.published().iter().map(IpNet::addr).collect()
}

pub(super) fn is_owned_by(claim: &ClaimState, uid: &str) -> bool {
    claim.owner.as_ref().is_some_and(|owner| owner.uid == uid)
}

/// Whether a claim can be that of a network of the machine.
pub(super) fn is_claim_of(key: &ObjectKey, claim: &ClaimState, network: &MachineNetwork) -> bool {
    if claim.interface == network.pod_interface {
        return true;
    }
    let legacy = names::compose_key(&key.name, &network.name);
    let is_named = *claim.key.name == *legacy
        || *claim.key.name == *names::suffixed(&legacy, &key.namespace, &key.name, &network.name);
    is_named && names::is_for(claim, &network.pod_interface)
}
