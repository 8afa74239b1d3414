//! Completes records that are made of CNI results with what identifies their links later.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{
    AttachmentRecord, HostLink, LinkIdentity, ObservedLink, RecordPhase, links::same_mac,
    records::normalize_mac,
};

/// Records the index and the end on the host of links whose record is made of a CNI result. Results have only names and MAC
/// addresses, which do not find a link again after it was renamed or moved. `links` are those of the sandbox's
/// namespace.
///
/// A link is that of the record if its end on the host has a name of the CNI result, or if it has the recorded name and MAC
/// address. A result without an interface in the pod, as of CNI 0.2.0, means the link with the requested name.
pub fn identify_links(
    record: &mut AttachmentRecord,
    links: &[ObservedLink],
    host_links: &BTreeMap<u32, HostLink>,
) {
    let requested = record.key.interface.as_str();
    let RecordPhase::Attached(attached) = &mut record.phase else { return };
    let named = |name: &str| links.iter().find(|link| link.name == name && !link.placeholder);
    if attached.links.is_empty() && named(requested).is_some() {
        attached.links.push(LinkIdentity { name: requested.to_owned(), ..LinkIdentity::default() });
    }
    let host_names = host_interfaces(&attached.result);
    let host_link = |link: &ObservedLink| host_links.get(&link.peer?);
    let of_host = |link: &&ObservedLink| host_link(link).is_some_and(|host| host_names.contains(&host.name));
    let mut of_host = links.iter().filter(of_host);
    // Of several links it is not known which one is which.
    let of_host = match (attached.links.as_slice(), of_host.next(), of_host.next()) {
        ([_], Some(link), None) => Some(link),
        _ => None,
    };
    for identity in attached.links.iter_mut().filter(|identity| identity.index.is_none()) {
        let named = named(&identity.name).filter(|link| same_mac(identity, link));
        let Some(link) = of_host.or(named) else { continue };
        let host = host_link(link);
        *identity = LinkIdentity {
            index: Some(link.index),
            name: identity.name.clone(),
            mac: identity
                .mac
                .take()
                .filter(|mac| !normalize_mac(mac).is_empty())
                .or_else(|| link.mac.clone()),
            peer: link.peer,
            peer_name: host.map(|host| host.name.clone()),
            peer_mac: host.and_then(|host| host.mac.clone()),
            moved: false,
        };
    }
}

/// As [`identify_links`], for a record that is made of its result alone. Returns whether a link belongs to it for certain: one
/// that only has the name may be another one.
pub fn identify_rebuilt(
    record: &mut AttachmentRecord,
    links: &[ObservedLink],
    host_links: &BTreeMap<u32, HostLink>,
) -> bool {
    let recorded = record.attached().map_or(&[][..], |attached| &attached.links).iter();
    let with_mac =
        recorded.filter(|link| link.mac.as_deref().is_some_and(|mac| !normalize_mac(mac).is_empty()));
    let with_mac: Vec<String> = with_mac.map(|link| link.name.clone()).collect();
    identify_links(record, links, host_links);
    let Some(attached) = record.attached() else { return false };
    let host_names = host_interfaces(&attached.result);
    attached.links.iter().any(|link| {
        let of_host = link.peer_name.as_ref().is_some_and(|name| host_names.contains(name));
        link.index.is_some() && (of_host || with_mac.contains(&link.name))
    })
}

/// The interfaces of a CNI result that are on the host.
fn host_interfaces(result: &str) -> Vec<String> {
    let result: Value = serde_json::from_str(result).unwrap_or_default();
    let interfaces = result.get("interfaces").and_then(Value::as_array);
    let text = |interface: &Value, key: &str| {
        interface.get(key).and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    let on_host = interfaces.into_iter().flatten().filter(|interface| text(interface, "sandbox").is_empty());
    on_host.map(|interface| text(interface, "name")).filter(|name| !name.is_empty()).collect()
}
