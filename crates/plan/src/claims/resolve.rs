//! From which network a claim gets its addresses.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use api::{
    ipamclaim::{ADDRESSES_ANNOTATION, AllocationReason},
    nad::{NadIpam, NadNetwork},
    selection::NadRef,
};
use ipnet::IpNet;
use serde_json::Value;

use super::{ClaimState, Failure};
use crate::bridge::Uid;

/// From which network a claim gets its addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resolution {
    /// Patchbay allocates them.
    Allocate {
        /// The UID of the BridgeNetwork.
        network: Uid,
        network_name: String,
        nad: NadRef,
        requested: Vec<IpAddr>,
    },
    /// Another IPAM allocates them: the status of the claim is not written.
    NotOurs,
    /// Why no network can be determined.
    Failed { reason: AllocationReason, message: String, report: FailureReport },
}

/// Where a failure is reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureReport {
    /// In the status of the claim, and by an event.
    Status,
    /// By an event: another IPAM may write the status.
    Event,
}

impl Resolution {
    /// Why no network can be determined, and where to report it.
    pub fn failure(&self) -> Option<(Failure, FailureReport)> {
        match self {
            Self::Failed { reason, message, report } => {
                Some((Failure { reason: *reason, message: message.clone() }, *report))
            }
            Self::Allocate { .. } | Self::NotOurs => None,
        }
    }
}

/// The network whose blocks have a reservation for a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReservedIn {
    /// The UID of the BridgeNetwork.
    pub network: Uid,
    pub network_name: String,
}

fn failed(report: FailureReport, message: String) -> Resolution {
    Resolution::Failed { reason: AllocationReason::InternalError, message, report }
}

fn no_network(name: &str) -> Resolution {
    let message =
        format!("BridgeNetwork {name:?} does not exist; create it, or correct ipam.network in the NAD");
    failed(FailureReport::Status, message)
}

/// The network of a claim of a virtual machine: that of the NAD which the interface names. `interface` is the logical
/// network, `addresses` the annotation of the instance. A claim that has a reservation needs no request, and stays on its
/// network while the NAD has no IPAM.
pub fn for_machine(
    interface: &str,
    nad: &NadRef,
    config: &NadNetwork,
    addresses: Option<&str>,
    networks: &dyn Fn(&str) -> Option<Uid>,
    reserved: Option<&ReservedIn>,
    claim: &ClaimState,
) -> Resolution {
    let (network, network_name) = match (&config.ipam, reserved) {
        (NadIpam::Patchbay { network: name }, _) => match networks(name) {
            Some(network) => (network, name),
            None => return no_network(name),
        },
        (NadIpam::Other, Some(ReservedIn { network, network_name })) => (network.clone(), network_name),
        (NadIpam::Other | NadIpam::Ovn, _) => return Resolution::NotOurs,
    };
    let mut requested = match requested(addresses, interface) {
        Ok(requested) => requested,
        Err(_) if reserved.is_some() => Vec::new(),
        Err(message) => return failed(FailureReport::Status, message),
    };
    // A restored status is no reservation: another claim may have its addresses.
    if reserved.is_none() && (claim.is_unused() || claim.published().is_empty()) {
        let is_requested = |one: &IpAddr| requested.iter().any(|other| other.is_ipv4() == one.is_ipv4());
        let recorded: Vec<IpAddr> = claim.recorded().into_iter().filter(|one| !is_requested(one)).collect();
        requested.extend(recorded);
    }
    Resolution::Allocate { network, network_name: network_name.clone(), nad: nad.clone(), requested }
}

/// The addresses that a claim without a reservation had: the published ones, else those that it had before a backup.
pub(super) fn former(claim: &ClaimState) -> Vec<IpAddr> {
    let published: Vec<IpAddr> = claim.published().iter().map(IpNet::addr).collect();
    if published.is_empty() { claim.recorded() } else { published }
}

/// The network of a claim whose owner is not a virtual machine: that of the persistent NADs in its namespace with its
/// config name. A claim that has a reservation stays on its network, whatever NADs say. `networks` returns the UID of the
/// BridgeNetwork of a name.
///
/// The status of a claim that may be for another IPAM is not written: OVN-Kubernetes has a NAD of the name, or no NAD of
/// the name is for `patchbay-ipam`.
pub fn for_lone(
    claim: &ClaimState,
    nads_in_namespace: &[(NadRef, &NadNetwork)],
    networks: &dyn Fn(&str) -> Option<Uid>,
    reserved_in: Option<&ReservedIn>,
) -> Resolution {
    let named = nads_in_namespace.iter().filter(|(_, config)| config.name == *claim.network);
    let mut found: BTreeMap<&str, &NadRef> = BTreeMap::new();
    let (mut ovn, mut others, mut switched_off): (Option<&NadRef>, bool, bool) = (None, false, false);
    for (nad, config) in named {
        match &config.ipam {
            NadIpam::Patchbay { network } if config.persistent => {
                let first = found.entry(network).or_insert(nad);
                *first = (*first).min(nad);
            }
            NadIpam::Patchbay { .. } => switched_off = true,
            NadIpam::Ovn if config.persistent => ovn = Some(ovn.map_or(nad, |first| first.min(nad))),
            NadIpam::Other if config.persistent => others = true,
            NadIpam::Ovn | NadIpam::Other => {}
        }
    }
    if let Some(ReservedIn { network, network_name }) = reserved_in {
        let nad = found.get(network_name.as_str()).or_else(|| found.values().next());
        let nad =
            nad.map_or_else(|| NadRef::new(&*claim.key.namespace, &*claim.network), |nad| (*nad).clone());
        let (network, network_name) = (network.clone(), network_name.clone());
        return Resolution::Allocate { network, network_name, nad, requested: Vec::new() };
    }
    let mut found = found.into_iter();
    let conflict = |report, one: &str, two: &str| {
        let message = format!(
            "NADs {one} and {two} both have the config name {:?}; give one of them another name",
            cut(&claim.network)
        );
        failed(report, message)
    };
    match (found.next(), found.next()) {
        (None, _) if others || ovn.is_some() => Resolution::NotOurs,
        // Another IPAM serves it.
        (None, _) if !switched_off && !claim.status.ips.is_empty() => Resolution::NotOurs,
        (None, _) => {
            let report = if switched_off { FailureReport::Status } else { FailureReport::Event };
            let message = format!(
                "no NetworkAttachmentDefinition of namespace {} with patchbay-ipam and allowPersistentIPs has the config name \
                 {:?}; create one, or correct spec.network of the IPAMClaim",
                claim.key.namespace,
                cut(&claim.network)
            );
            failed(report, message)
        }
        (Some((one, at)), Some((two, and))) if ovn.is_none() => conflict(
            FailureReport::Status,
            &format!("{at} (network {one})"),
            &format!("{and} (network {two})"),
        ),
        (Some((name, nad)), _) => match (ovn, networks(name)) {
            (Some(ovn), _) => conflict(
                FailureReport::Event,
                &format!("{nad} (network {name})"),
                &format!("{ovn} (OVN-Kubernetes)"),
            ),
            (None, None) => no_network(name),
            (None, Some(network)) => Resolution::Allocate {
                network,
                network_name: name.to_owned(),
                nad: nad.clone(),
                requested: if claim.is_unused() || claim.published().is_empty() {
                    claim.recorded()
                } else {
                    Vec::new()
                },
            },
        },
    }
}

/// The addresses that the annotation `network.kubevirt.io/addresses` requests for a logical network. The error is the
/// message of the condition.
pub fn requested(annotation: Option<&str>, network: &str) -> Result<Vec<IpAddr>, String> {
    let Some(annotation) = annotation.filter(|text| !text.trim().is_empty()) else { return Ok(Vec::new()) };
    parse_requested(annotation, network).map_err(|cause| {
        let example = serde_json::json!({cut(network): ["10.0.0.4"]});
        let example = example.to_string().replace("\":[", "\": [");
        format!("annotation {ADDRESSES_ANNOTATION}: {cause}; write {example}")
    })
}

fn parse_requested(annotation: &str, network: &str) -> Result<Vec<IpAddr>, String> {
    let value: Value = serde_json::from_str(annotation).map_err(|error| error.to_string())?;
    let map = value.as_object().ok_or("it is not a JSON map")?;
    let Some(list) = map.get(network).filter(|list| !list.is_null()) else { return Ok(Vec::new()) };
    let list = list.as_array().ok_or_else(|| format!("the value of {:?} is not a list", cut(network)))?;
    let mut addresses = Vec::new();
    for item in list {
        let text = item.as_str().ok_or_else(|| format!("{} is not a string", cut(&item.to_string())))?;
        let address: IpAddr = text.parse().map_err(|_| format!("{:?} is not an IP address", cut(text)))?;
        addresses.push(address.to_canonical());
    }
    let families: BTreeSet<bool> = addresses.iter().map(IpAddr::is_ipv4).collect();
    if families.len() < addresses.len() {
        return Err(format!("{:?} requests two addresses of one family", cut(network)));
    }
    Ok(addresses)
}

/// The characters of a user's text that a message quotes.
const MAX_QUOTE: usize = 64;

/// Cuts a text that a message quotes.
pub(super) fn cut(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(MAX_QUOTE) {
        Some((end, _)) => format!("{}…", &text[..end]).into(),
        None => text.into(),
    }
}
