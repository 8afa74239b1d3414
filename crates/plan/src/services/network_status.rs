//! The interfaces of a pod, from its network-status annotation.

use std::{net::IpAddr, sync::Arc};

use api::{
    network_status::{NETWORK_STATUS_ANNOTATION, NetworkStatusList},
    selection::NadRef,
};
use serde::Deserialize;
use serde_json::Value;

use super::{InterfaceFault, PodInterface};

/// How many entries of a pod are read. A pod can have 64 networks, and a plugin may create several interfaces.
const MAX_ENTRIES: usize = 256;
/// How many addresses a pod can have in endpoints. A user who may edit a pod may edit its annotation, and each address costs an
/// endpoint in every Service that selects the pod.
const MAX_ADDRESSES: usize = 128;
/// How many faults of a pod are reported.
const MAX_FAULTS: usize = 8;

/// The part of an entry that endpoints depend on. Other keys do not matter, whatever they contain.
#[derive(Deserialize)]
struct Entry {
    #[serde(default)]
    name: String,
    #[serde(default)]
    interface: Option<String>,
    #[serde(default)]
    ips: Option<Vec<Value>>,
    #[serde(default)]
    default: Option<bool>,
}

/// Reads the network-status annotation of a pod in `namespace`. The entry of the pod's default network is left out.
///
/// The error says why the text as a whole cannot be read. An entry that names a NAD and cannot be read, and an address that
/// no endpoint can have, are faults of that entry.
pub fn interfaces(text: Option<&str>, namespace: &str) -> Result<Box<[PodInterface]>, Arc<str>> {
    let list = NetworkStatusList::parse(text).map_err(|error| error.to_string())?;
    let (mut interfaces, mut room) = (Vec::new(), Room { addresses: MAX_ADDRESSES, faults: MAX_FAULTS });
    if list.entries().len() > MAX_ENTRIES {
        return Err(format!("{NETWORK_STATUS_ANNOTATION} has more than {MAX_ENTRIES} elements").into());
    }
    for (index, entry) in list.entries().iter().enumerate() {
        match serde_json::from_str::<Entry>(entry.text()).ok().filter(|_| entry.text().starts_with('{')) {
            Some(entry) => interfaces.extend(interface(&entry, namespace, &mut room)),
            None => interfaces.push(unreadable(entry.text(), index, namespace)?),
        }
    }
    Ok(interfaces.into())
}

/// How much more of a pod is read.
struct Room {
    addresses: usize,
    faults: usize,
}

fn interface(entry: &Entry, namespace: &str, room: &mut Room) -> Option<PodInterface> {
    if entry.default == Some(true) {
        return None;
    }
    let nad = Arc::new(NadRef::parse(&entry.name, namespace)?);
    let (mut addresses, mut faults) = (Vec::new(), Vec::new());
    for text in entry.ips.iter().flatten() {
        if room.addresses == 0 {
            let fault = format!("the rest (only {MAX_ADDRESSES} addresses of a pod are published)");
            faults.push(InterfaceFault::Address(fault.into()));
            break;
        }
        match address(text) {
            Ok(address) if addresses.contains(&address) => {}
            Ok(address) => {
                room.addresses -= 1;
                addresses.push(address);
            }
            Err(fault) if room.faults > 0 => {
                room.faults -= 1;
                faults.push(InterfaceFault::Address(fault.into()));
            }
            Err(_) => {}
        }
    }
    let interface = entry.interface.as_deref().unwrap_or_default().into();
    Some(PodInterface { nad, interface, addresses: addresses.into(), faults: faults.into() })
}

/// An entry with a key of a wrong type. Without a name it may be about any network, so the whole text counts as unreadable.
fn unreadable(text: &str, index: usize, namespace: &str) -> Result<PodInterface, Arc<str>> {
    let value: Value = serde_json::from_str(text).unwrap_or_default();
    let nad = value["name"].as_str().and_then(|name| NadRef::parse(name, namespace));
    let nad = nad.ok_or_else(|| format!("element [{index}] is not an object with the name of a network"))?;
    let fault = format!("element [{index}] has a value of a wrong type");
    let faults = [InterfaceFault::Entry(fault.into())];
    let interface = value["interface"].as_str().unwrap_or_default().into();
    Ok(PodInterface { nad: Arc::new(nad), interface, addresses: Box::default(), faults: faults.into() })
}

/// An address that an EndpointSlice can contain (R14, R15); otherwise its text and what is wrong.
fn address(text: &Value) -> Result<IpAddr, String> {
    let Some(text) = text.as_str() else { return Err("a value that is not a string".to_owned()) };
    let fault = |why: &str| Err(format!("{:?} ({why})", text.chars().take(64).collect::<String>()));
    let Ok(address) = text.parse::<IpAddr>() else { return fault("not an IP address") };
    match address {
        _ if address.is_unspecified() => fault("the unspecified address"),
        _ if address.is_loopback() => fault("a loopback address"),
        _ if address.is_multicast() => fault("a multicast address"),
        IpAddr::V4(v4) if v4.is_link_local() => fault("a link-local address"),
        IpAddr::V4(v4) if v4.is_broadcast() => fault("the broadcast address"),
        IpAddr::V6(v6) if v6.is_unicast_link_local() => fault("a link-local address"),
        IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some() => fault("an IPv4 address in IPv6 form"),
        _ => Ok(address),
    }
}
