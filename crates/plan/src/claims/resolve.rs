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
use serde_json::Value;

use super::ClaimState;
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
    Failed { reason: AllocationReason, message: String },
}

/// The network whose blocks have a reservation for a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReservedIn {
    /// The UID of the BridgeNetwork.
    pub network: Uid,
    pub network_name: String,
}

fn failed(message: String) -> Resolution {
    Resolution::Failed { reason: AllocationReason::InternalError, message }
}

/// The network of a claim of a virtual machine: that of the NAD which the interface names. `interface` is the logical
/// network, `addresses` the annotation of the instance. A claim that has a reservation needs no request.
pub fn for_machine(
    interface: &str,
    nad: &NadRef,
    config: &NadNetwork,
    addresses: Option<&str>,
    networks: &dyn Fn(&str) -> Option<Uid>,
    reserved: bool,
) -> Resolution {
    let NadIpam::Patchbay { network: network_name } = &config.ipam else { return Resolution::NotOurs };
    let Some(network) = networks(network_name) else {
        return failed(format!("BridgeNetwork {network_name:?} does not exist"));
    };
    let requested = match requested(addresses, interface) {
        Ok(requested) => requested,
        Err(_) if reserved => Vec::new(),
        Err(message) => return failed(message),
    };
    Resolution::Allocate { network, network_name: network_name.clone(), nad: nad.clone(), requested }
}

/// The network of a claim whose owner is not a virtual machine: that of the persistent NADs in its namespace with its
/// config name. A claim that has a reservation stays on its network, whatever NADs say. `networks` returns the UID of the
/// BridgeNetwork of a name.
pub fn for_lone(
    claim: &ClaimState,
    nads_in_namespace: &[(NadRef, &NadNetwork)],
    networks: &dyn Fn(&str) -> Option<Uid>,
    reserved_in: Option<&ReservedIn>,
) -> Resolution {
    let named = nads_in_namespace.iter().filter(|(_, config)| config.name == *claim.network);
    let mut found: BTreeMap<&str, &NadRef> = BTreeMap::new();
    let mut others = false;
    for (nad, config) in named {
        match &config.ipam {
            NadIpam::Patchbay { network } if config.persistent => {
                let first = found.entry(network).or_insert(nad);
                *first = (*first).min(nad);
            }
            NadIpam::Patchbay { .. } => {}
            NadIpam::Ovn | NadIpam::Other => others |= config.persistent,
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
    match (found.next(), found.next()) {
        (None, _) if others => Resolution::NotOurs,
        (None, _) => failed(format!(
            "no NetworkAttachmentDefinition of namespace {} with patchbay-ipam and allowPersistentIPs has the config name {:?}",
            claim.key.namespace,
            cut(&claim.network)
        )),
        (Some((one, at)), Some((two, and))) => failed(format!(
            "NADs {at} (network {one}) and {and} (network {two}) both have the config name {:?}; give one of them another name",
            cut(&claim.network)
        )),
        (Some((name, nad)), None) => match networks(name) {
            None => failed(format!("BridgeNetwork {name:?} does not exist")),
            Some(network) => Resolution::Allocate {
                network,
                network_name: name.to_owned(),
                nad: nad.clone(),
                requested: Vec::new(),
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
fn cut(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(MAX_QUOTE) {
        Some((end, _)) => format!("{}…", &text[..end]).into(),
        None => text.into(),
    }
}
