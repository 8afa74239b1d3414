//! Which addresses CNI ADD gives to a pod that references a claim.
//!
//! All objects are live reads. Any doubt is an error: an attachment of a claim never gets other addresses.

use std::{net::IpAddr, sync::Arc};

use api::ipamclaim::IPS_ALLOCATED;
use ipnet::IpNet;

use super::{ClaimPod, ClaimState, ObjectKey, OwnerKind, OwnerRef, VmiFacts, machine, names};
use crate::{bridge::Uid, ipam::ObservedIpBlock};

#[cfg(test)]
mod tests;

/// The claim of a lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldClaim {
    pub uid: Uid,
    pub name: String,
    /// Whether another live pod held the addresses at the first ADD.
    pub shared: bool,
}

/// What [`decide`] decides from: live reads.
#[derive(Debug, Clone, Copy)]
pub struct ServeInput<'a> {
    pub pod: &'a ClaimPod,
    pub ifname: &'a str,
    /// The name of the CNI config.
    pub config_name: &'a str,
    /// The addresses that the element requests. A bare address has the full prefix length.
    pub requested: &'a [IpNet],
    /// The name of the claim that the element references.
    pub claim_name: &'a str,
    pub claim: Option<&'a ClaimState>,
    /// The instance that controls the pod.
    pub vmi: Option<&'a VmiFacts>,
    /// The IPBlocks that may have the reservations.
    pub blocks: &'a [ObservedIpBlock],
    pub network_uid: &'a str,
    /// Live pods of the namespace that may hold the addresses; may include the pod itself.
    pub others: &'a [ClaimPod],
    /// The claim of the lease that the attachment has already.
    pub known: Option<&'a HeldClaim>,
}

/// The element of a pod's networks annotation for an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ElementMatch {
    /// No element is for the interface, and none needs to be: the pod has nothing to do with claims, or the interface is not a
    /// secondary one.
    None,
    /// The element has no reference.
    Ordinary,
    /// The name of the referenced claim.
    Claim(Arc<str>),
    /// The pod has references or is a launcher, and no element is for the secondary interface.
    Doubt,
}

/// The addresses that an attachment gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Serving {
    pub addresses: Vec<IpNet>,
    pub claim: HeldClaim,
}

/// Why an attachment gets no addresses. The text is the message of the CNI error.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ServeError {
    #[error("IPAMClaim {0} does not exist yet; the pod starts once the patchbay controller has created it")]
    Missing(ObjectKey),
    #[error("IPAMClaim {claim} has no addresses yet{state}; the pod starts once it has")]
    NoAddresses {
        claim: ObjectKey,
        /// ` (reason: message)` of the condition, if there is one.
        state: String,
    },
    #[error(
        "IPAMClaim {claim} belongs to {} {} (UID {}), this pod runs {}; the pod starts once the claim of its own virtual \
        machine exists", owner.kind, owner.name, owner.uid, instance(.runs.as_deref())
    )]
    OtherMachine { claim: ObjectKey, owner: Box<OwnerRef>, runs: Option<Box<OwnerRef>> },
    #[error(
        "IPAMClaim {claim} is for network {network}, this attachment is of network {config}; the pod starts once the claim \
        is replaced"
    )]
    OtherNetwork { claim: ObjectKey, network: Arc<str>, config: String },
    #[error(
        "address {address} of IPAMClaim {claim} is not reserved for it in any IPBlock; the kubelet retries"
    )]
    NotReserved { claim: ObjectKey, address: String },
    #[error(
        "address {address} is reserved for IPAMClaim {claim} and missing in its status; the kubelet retries"
    )]
    NotPublished { claim: ObjectKey, address: IpAddr },
    #[error(
        "{instance}, which owns launcher pod {pod}, does not exist; the network has persistent addresses, so the pod gets none: \
        delete the pod"
    )]
    NoInstance { pod: ObjectKey, instance: String },
    #[error("IPAMClaim {claim} serves pod {pod} already; delete that pod, or give this one another claim")]
    InUse { claim: ObjectKey, pod: ObjectKey },
    #[error(
        "pod {pod} has no element for interface {interface} in k8s.v1.cni.cncf.io/networks; the kubelet retries"
    )]
    NoElement { pod: ObjectKey, interface: String },
    #[error("the element requests {requested}, but IPAMClaim {claim} has {has}; remove ips from the element")]
    Requested { claim: ObjectKey, requested: String, has: String },
}

/// Whether the runtime can repeat an ADD that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServeCode {
    /// CNI error 11.
    Retry,
    /// CNI error 7: the user must change the pod.
    Invalid,
}

impl ServeError {
    pub fn code(&self) -> ServeCode {
        match self {
            Self::Missing(_)
            | Self::NoAddresses { .. }
            | Self::OtherMachine { .. }
            | Self::OtherNetwork { .. }
            | Self::NotReserved { .. }
            | Self::NotPublished { .. }
            | Self::InUse { .. }
            | Self::NoInstance { .. }
            | Self::NoElement { .. } => ServeCode::Retry,
            Self::Requested { .. } => ServeCode::Invalid,
        }
    }
}

fn instance(runs: Option<&OwnerRef>) -> String {
    match runs {
        Some(OwnerRef { kind, name, uid }) => format!("{kind} {name} (UID {uid})"),
        None => "no virtual machine".to_owned(),
    }
}

/// Checks that the instance of a launcher without a reference exists: `vmi` is the one of the name that the pod says.
pub fn check_instance(pod: &ClaimPod, vmi: Option<&VmiFacts>) -> Result<(), ServeError> {
    let is_instance = |owner: &&OwnerRef| owner.kind == OwnerKind::VirtualMachineInstance;
    let Some(owner) = pod.controller.as_ref().filter(is_instance).filter(|_| pod.launcher) else {
        return Ok(());
    };
    if vmi.is_some_and(|vmi| vmi.uid == owner.uid) {
        return Ok(());
    }
    Err(ServeError::NoInstance { pod: pod.key.clone(), instance: instance(Some(owner)) })
}

/// Finds the element for an interface: the one that requests its name. Multus names the interface of an element without a
/// request after the place of the element.
pub fn element(pod: &ClaimPod, ifname: &str) -> ElementMatch {
    let named = pod.elements.iter().find(|element| element.interface.as_deref() == Some(ifname));
    let place = ifname.strip_prefix("net").and_then(|number| number.parse::<usize>().ok());
    let by_place = || pod.elements.get(place?.checked_sub(1)?).filter(|element| element.interface.is_none());
    match named.or_else(by_place) {
        Some(element) => element.claim.clone().map_or(ElementMatch::Ordinary, ElementMatch::Claim),
        // The default network, for example on eth0, has no element.
        None if !is_secondary(ifname) => ElementMatch::None,
        None if pod.launcher || pod.elements.iter().any(|element| element.claim.is_some()) => {
            ElementMatch::Doubt
        }
        None => ElementMatch::None,
    }
}

/// Whether Multus or KubeVirt names secondary interfaces like this.
fn is_secondary(ifname: &str) -> bool {
    machine::is_ordinal(ifname) || names::is_hashed(ifname)
}

/// Decides which addresses the pod gets.
pub fn decide(input: &ServeInput<'_>) -> Result<Serving, ServeError> {
    let key = ObjectKey::new(Arc::clone(&input.pod.key.namespace), input.claim_name);
    if element(input.pod, input.ifname) != ElementMatch::Claim(Arc::clone(&key.name)) {
        let (pod, interface) = (input.pod.key.clone(), input.ifname.to_owned());
        return Err(ServeError::NoElement { pod, interface });
    }
    let Some(claim) = input.claim else { return Err(ServeError::Missing(key)) };
    check_owner(input, claim, &key)?;
    if *claim.network != *input.config_name {
        let (network, config) = (Arc::clone(&claim.network), input.config_name.to_owned());
        return Err(ServeError::OtherNetwork { claim: key, network, config });
    }
    let addresses = addresses(input, claim, &key)?;
    check_requested(input.requested, &addresses, &key)?;
    let holds = |pod: &&ClaimPod| {
        pod.uid != input.pod.uid
            && (pod.references(&key) || addresses.iter().any(|address| pod.shows(address.addr())))
    };
    let holders: Vec<&ClaimPod> = input.others.iter().filter(holds).collect();
    let shared = if claim.has_machine_owner() {
        // A repeated ADD keeps the MAC address and the link of the first one.
        let known = input.known.filter(|known| known.uid == claim.uid);
        known.map_or(!holders.is_empty(), |known| known.shared)
    } else {
        let known = input.known.is_some_and(|known| known.uid == claim.uid);
        check_alone(input.pod, &holders, &addresses, &key, known)?;
        false
    };
    let claim = HeldClaim { uid: claim.uid.clone(), name: input.claim_name.to_owned(), shared };
    Ok(Serving { addresses, claim })
}

/// The claim of a virtual machine serves launchers of its instance, by UID.
fn check_owner(input: &ServeInput<'_>, claim: &ClaimState, key: &ObjectKey) -> Result<(), ServeError> {
    let Some(owner) = claim.owner.as_ref().filter(|owner| owner.kind != OwnerKind::Other) else {
        return Ok(());
    };
    let fits = |vmi: &VmiFacts| input.pod.is_launcher_of(&vmi.uid) && machine::fits(claim, vmi);
    if input.vmi.is_some_and(fits) {
        return Ok(());
    }
    let instance = |it: &&OwnerRef| it.kind == OwnerKind::VirtualMachineInstance && input.pod.launcher;
    let runs = input.pod.controller.as_ref().filter(instance).cloned().map(Box::new);
    Err(ServeError::OtherMachine { claim: key.clone(), owner: Box::new(owner.clone()), runs })
}

/// The addresses of the claim. Each must be reserved for its UID in an IPBlock of the network, and no family that has a
/// reservation may be missing.
fn addresses(input: &ServeInput<'_>, claim: &ClaimState, key: &ObjectKey) -> Result<Vec<IpNet>, ServeError> {
    if claim.status.ips.is_empty() {
        let condition = claim.status.conditions.iter().find(|condition| condition.r#type == IPS_ALLOCATED);
        let state = condition
            .map_or_else(String::new, |condition| format!(" ({}: {})", condition.reason, condition.message));
        return Err(ServeError::NoAddresses { claim: key.clone(), state });
    }
    let blocks = input
        .blocks
        .iter()
        .filter(|it| it.spec.network_uid == input.network_uid && it.spec.holder.is_claims());
    let reserved: Vec<IpAddr> = blocks
        .flat_map(|block| block.status.claims.iter().filter(|it| block.spec.cidr.contains(&it.address)))
        .filter(|reserved| reserved.uid == claim.uid)
        .map(|reserved| reserved.address)
        .collect();
    let check = |text: &String| {
        let net: Option<IpNet> = text.parse().ok();
        let not_reserved = || ServeError::NotReserved { claim: key.clone(), address: text.clone() };
        net.filter(|net| reserved.contains(&net.addr())).ok_or_else(not_reserved)
    };
    let addresses: Vec<IpNet> = claim.status.ips.iter().map(check).collect::<Result<_, _>>()?;
    // A user has removed the address of one family.
    let is_missing = |one: &&IpAddr| !addresses.iter().any(|net| net.addr().is_ipv4() == one.is_ipv4());
    match reserved.iter().find(is_missing) {
        Some(&address) => Err(ServeError::NotPublished { claim: key.clone(), address }),
        None => Ok(addresses),
    }
}

fn check_requested(requested: &[IpNet], has: &[IpNet], key: &ObjectKey) -> Result<(), ServeError> {
    let same = |net: &&IpNet| {
        let bare = net.prefix_len() == net.max_prefix_len();
        !has.iter().any(|has| has == *net || (bare && has.addr() == net.addr()))
    };
    let Some(other) = requested.iter().find(same) else { return Ok(()) };
    let bare = other.prefix_len() == other.max_prefix_len();
    let has: Vec<String> = has.iter().map(ToString::to_string).collect();
    Err(ServeError::Requested {
        claim: key.clone(),
        requested: if bare { other.addr().to_string() } else { other.to_string() },
        has: has.join(", "),
    })
}

/// A claim without a virtual machine serves one live pod, and all nodes agree on it: the pod that shows an address, else the
/// oldest one.
///
/// A hot-plug adds a reference to a pod that runs, so the order of creation does not say which of such a pod and another one
/// was served first. While neither shows an address, both wait, unless the attachment has its lease already (`known`).
fn check_alone(
    pod: &ClaimPod,
    holders: &[&ClaimPod],
    addresses: &[IpNet],
    key: &ObjectKey,
    known: bool,
) -> Result<(), ServeError> {
    let shows = |pod: &ClaimPod| addresses.iter().any(|address| pod.shows(address.addr()));
    let age = |pod: &ClaimPod| (pod.created, pod.uid.clone());
    let precedes = |other: &ClaimPod| match (shows(other), shows(pod)) {
        (true, true) => age(other) < age(pod),
        (false, false) => !known && (other.has_status || pod.has_status || age(other) < age(pod)),
        (other_shows, _) => other_shows,
    };
    let first = holders.iter().filter(|other| precedes(other));
    match first.min_by_key(|other| (!shows(other), age(other))) {
        Some(first) => Err(ServeError::InUse { claim: key.clone(), pod: first.key.clone() }),
        None => Ok(()),
    }
}
