//! The names and the labels of claims: those of ipam-extensions, and a suffix where these collide.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use api::digest::digest;

use super::{
    ClaimPod, ClaimState, MachineNetwork, ObjectKey, VmiFacts,
    machine::{desired_owner, fits, is_element_of},
};

/// The maximum length of the name of an object.
const MAX_NAME: usize = 253;
/// The maximum length of the value of a label.
const MAX_LABEL: usize = 63;
/// The length of a hyphen and a digest.
const SUFFIX: usize = 9;

/// The name that ipam-extensions gives to the claim of a network: all maximal runs of valid characters, joined by dots. If
/// it is cut, it may be invalid.
pub fn compose_key(vmi: &str, network: &str) -> String {
    let joined = format!("{vmi}.{network}").to_lowercase();
    let valid = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let runs = joined.split(|c| !valid(c)).map(|run| run.trim_matches('-')).filter(|run| !run.is_empty());
    let mut name = runs.collect::<Vec<_>>().join(".");
    name.truncate(MAX_NAME);
    name
}

/// The name of a claim whose legacy name is in use or invalid.
pub fn suffixed(legacy: &str, namespace: &str, vmi: &str, network: &str) -> String {
    with_digest(legacy, MAX_NAME, digest(["claim", namespace, vmi, network]))
}

/// The value of the label `kubevirt.io/vm`.
pub fn label_value(vmi: &str) -> String {
    if vmi.len() <= MAX_LABEL {
        return vmi.to_owned();
    }
    with_digest(vmi, MAX_LABEL, digest(["vm", vmi]))
}

fn with_digest(text: &str, length: usize, digest: u64) -> String {
    let cut: String = text.chars().take_while(char::is_ascii).take(length - SUFFIX).collect();
    let cut = cut.trim_end_matches(|c: char| !c.is_ascii_alphanumeric());
    format!("{cut}-{:08x}", digest & 0xffff_ffff)
}

/// The name of the claim of a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClaimName {
    /// The name that ipam-extensions gives.
    Legacy(String),
    /// Another one, because that name belongs to another claim or is invalid.
    Suffixed {
        name: String,
        /// The text of the event if the legacy name belongs to another claim.
        conflict: Option<String>,
    },
}

impl ClaimName {
    pub fn as_str(&self) -> &str {
        match self {
            Self::Legacy(name) | Self::Suffixed { name, .. } => name,
        }
    }
}

/// Whether a claim may be for a pod interface. ipam-extensions leaves `spec.interface` empty, and others write what they
/// like; only another name of the form that KubeVirt gives excludes it.
pub(super) fn is_for(claim: &ClaimState, pod_interface: &str) -> bool {
    &*claim.interface == pod_interface || !is_hashed(&claim.interface)
}

/// Whether the name of an interface is the hashed one that KubeVirt gives.
pub(super) fn is_hashed(interface: &str) -> bool {
    let digits = interface.strip_prefix("pod").unwrap_or_default();
    digits.len() == 11 && digits.chars().all(|c| c.is_ascii_hexdigit())
}

/// Assigns a name of a claim to each network of an instance, by logical name. `pods` are its live launchers;
/// `in_namespace` returns the claim of a name in its namespace.
///
/// A network keeps its name while its claim exists and while a launcher references it, unless the claim belongs to a machine
/// of another name. A claim of an earlier machine of the same name keeps the legacy name assigned: the machine waits until
/// that claim is gone.
pub fn assign(
    key: &ObjectKey,
    vmi: &VmiFacts,
    pods: &[&ClaimPod],
    in_namespace: &dyn Fn(&str) -> Option<ClaimState>,
) -> BTreeMap<Arc<str>, ClaimName> {
    let mut names = BTreeMap::new();
    let mut taken: BTreeMap<String, &MachineNetwork> = BTreeMap::new();
    // Networks whose legacy claim names their interface come first, so that the order of the spec does not matter to them.
    let named = |network: &MachineNetwork| {
        let found = in_namespace(&compose_key(&key.name, &network.name));
        found.is_some_and(|claim| fits(&claim, vmi) && claim.interface == network.pod_interface)
    };
    let (first, rest): (Vec<_>, Vec<_>) = vmi.networks.iter().partition(|network| named(network));
    let mut seen = BTreeSet::new();
    for network in first.into_iter().chain(rest).filter(|network| seen.insert(network.name.clone())) {
        let name = assign_one(key, vmi, network, pods, &taken, in_namespace);
        if let ClaimName::Legacy(name) = &name {
            taken.insert(name.clone(), network);
        }
        names.insert(network.name.clone(), name);
    }
    names
}

fn assign_one(
    key: &ObjectKey,
    vmi: &VmiFacts,
    network: &MachineNetwork,
    pods: &[&ClaimPod],
    taken: &BTreeMap<String, &MachineNetwork>,
    in_namespace: &dyn Fn(&str) -> Option<ClaimState>,
) -> ClaimName {
    let legacy = compose_key(&key.name, &network.name);
    let name = suffixed(&legacy, &key.namespace, &key.name, &network.name);
    // All pods of an instance reference the same claim.
    let referenced = |claim: &str| {
        let launchers = pods.iter().filter(|pod| pod.is_launcher_of(&vmi.uid));
        let mut elements = launchers.flat_map(|pod| &pod.elements);
        elements.any(|one| one.claim.as_deref() == Some(claim) && is_element_of(one, network))
    };
    let is_other_machine = |claim: ClaimState| {
        let owner = claim.owner.as_ref().filter(|_| claim.has_machine_owner());
        !fits(&claim, vmi) && owner.is_some_and(|owner| owner.name != key.name)
    };
    let is_referenced = referenced(&legacy);
    // Two machines whose names collide may both have started before either had its claim.
    if is_referenced && !in_namespace(&legacy).is_some_and(is_other_machine) {
        return ClaimName::Legacy(legacy);
    }
    if referenced(&name) {
        return ClaimName::Suffixed { name, conflict: None };
    }
    let existing = in_namespace(&name);
    if existing.is_some_and(|claim| fits(&claim, vmi) && is_for(&claim, &network.pod_interface)) {
        return ClaimName::Suffixed { name, conflict: None };
    }
    if !legacy.ends_with(|c: char| c.is_ascii_alphanumeric()) {
        return ClaimName::Suffixed { name, conflict: None };
    }
    let owner = desired_owner(key, vmi);
    let conflict = |belongs: String| {
        let namespace = &key.namespace;
        let restart = if is_referenced {
            "; restart the VM to use it, because its pod references the claim of another virtual machine"
        } else {
            ""
        };
        Some(format!(
            "IPAMClaim {namespace}/{legacy} belongs to {belongs}; interface {} uses IPAMClaim {namespace}/{name} \
             instead{restart}",
            network.name
        ))
    };
    let conflict = if let Some(other) = taken.get(&legacy) {
        conflict(format!("interface {} of {} {}", other.name, owner.kind, owner.name))
    } else if let Some(claim) = in_namespace(&legacy) {
        match &claim.owner {
            _ if fits(&claim, vmi) && is_for(&claim, &network.pod_interface) => None,
            Some(occupant) if fits(&claim, vmi) => {
                conflict(format!("another interface of {} {}", occupant.kind, occupant.name))
            }
            // A predecessor: the machine was created again under its name.
            Some(occupant) if (occupant.kind, &occupant.name) == (owner.kind, &owner.name) => None,
            Some(occupant) => conflict(format!("{} {}", occupant.kind, occupant.name)),
            // It lost its owner with a VirtualMachine that was deleted alone, and a pod of this instance uses it.
            None if claim.owner_count == 0 && is_adoptable(key, &claim, vmi, pods) => None,
            None => conflict("no virtual machine".to_owned()),
        }
    } else {
        None
    };
    if conflict.is_some() { ClaimName::Suffixed { name, conflict } } else { ClaimName::Legacy(legacy) }
}

/// Whether an instance takes over a claim without an owner: one of its launchers references the claim, or no pod ever had
/// its addresses, because it was created from a backup.
pub(super) fn is_adoptable(key: &ObjectKey, claim: &ClaimState, vmi: &VmiFacts, pods: &[&ClaimPod]) -> bool {
    let ours = claim.label.as_deref() == Some(&label_value(&key.name));
    if ours && claim.is_unused() {
        return true;
    }
    ours && pods.iter().any(|pod| pod.is_launcher_of(&vmi.uid) && pod.references(&claim.key))
}
