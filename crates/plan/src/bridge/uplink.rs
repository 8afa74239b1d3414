//! The uplink: a link of the node that becomes a port of the bridge, unless the node itself uses it, and that is restored
//! when the network no longer needs it.

use std::net::IpAddr;

use super::{
    Action, LinkRecord, LocalNetwork, OriginalLink, decide::NetworkProblem, index::LinkIndex, is_pod_port,
    reason,
};
use crate::nodenetwork::{AdminState, Link};

/// The decision about the uplink of one network.
#[derive(Default)]
pub struct UplinkDecision {
    /// Restores a recorded uplink that is no longer desired.
    pub release: Vec<Action>,
    /// The uplink for the record, which is written before the link changes.
    pub original: Option<OriginalLink>,
    /// Makes the link a port.
    pub attach: Vec<Action>,
    pub problem: Option<NetworkProblem>,
}

/// Compares the desired uplink with the recorded one. Attaches nothing while the bridge does not exist.
pub fn decide(
    links: &LinkIndex<'_>,
    network: &LocalNetwork,
    mtu: u32,
    bridge: Option<&Link>,
) -> UplinkDecision {
    let uid = network.uid.as_str();
    let recorded = recorded(links, uid);
    let link = network.uplink.as_ref().and_then(|name| links.by_name(name.as_str()));
    let mut decision = UplinkDecision::default();
    if let Some(original) = recorded
        && link.is_none_or(|link| link.index != original.index)
    {
        decision.release = restore(links, uid, original, bridge);
    }
    let Some(name) = &network.uplink else {
        return decision;
    };
    let Some(link) = link else {
        decision.problem = Some(NetworkProblem::new(
            reason::UPLINK_MISSING,
            format!(
                "this node has no link {name}; connect it, set spec.uplink to another link, or exclude the node with \
                 spec.nodeSelector"
            ),
        ));
        return decision;
    };
    let recorded_link = recorded.filter(|original| original.index == link.index);
    let port = bridge.is_some_and(|bridge| link.master == Some(bridge.index));
    if !port && let Some(why) = refused(links, uid, link) {
        decision.problem = Some(NetworkProblem::new(
            reason::UPLINK_REFUSED,
            format!(
                "link {name} cannot be the uplink: {why}; set spec.uplink to another link, or free this one"
            ),
        ));
        decision.original = recorded_link.cloned();
        return decision;
    }
    decision.original = Some(recorded_link.cloned().unwrap_or_else(|| OriginalLink {
        name: link.name.clone(),
        index: link.index,
        admin: link.admin,
        mtu: link.mtu,
    }));
    if let Some(bridge) = bridge {
        decision.attach = attach(link, bridge, mtu);
    }
    decision
}

/// Sets the master first: a changed uplink is then always a port, by which the restore recognizes it.
fn attach(link: &Link, bridge: &Link, mtu: u32) -> Vec<Action> {
    let mut actions = Vec::new();
    if link.master != Some(bridge.index) {
        actions.push(Action::SetMaster { link: link.index, bridge: bridge.index });
    }
    if link.mtu < mtu {
        actions.push(Action::SetMtu { link: link.index, mtu });
    }
    if link.admin == AdminState::Down {
        actions.push(Action::SetAdmin { link: link.index, admin: AdminState::Up });
    }
    actions
}

/// The recorded uplink. A record of an earlier boot does not count: link indexes change with each boot.
pub fn recorded<'a>(links: &LinkIndex<'a>, uid: &str) -> Option<&'a OriginalLink> {
    let record: &LinkRecord = links.input.records.get(uid)?;
    record.uplink.as_ref().filter(|_| record.boot == links.input.boot)
}

/// Restores an uplink. One that is neither a port of the bridge nor free is in use elsewhere and is left alone.
pub fn restore(
    links: &LinkIndex<'_>,
    uid: &str,
    original: &OriginalLink,
    bridge: Option<&Link>,
) -> Vec<Action> {
    let Some(link) = links.link(original.index) else {
        return Vec::new();
    };
    let port = bridge.is_some_and(|bridge| link.master == Some(bridge.index));
    if !port && refused(links, uid, link).is_some() {
        return Vec::new();
    }
    let mut actions = Vec::new();
    if link.mtu != original.mtu {
        actions.push(Action::SetMtu { link: link.index, mtu: original.mtu });
    }
    if link.admin != original.admin {
        actions.push(Action::SetAdmin { link: link.index, admin: original.admin });
    }
    if port {
        actions.push(Action::ClearMaster { link: link.index });
    }
    actions
}

/// Why a link cannot be the uplink: the node uses it, or it cannot be a port.
fn refused(links: &LinkIndex<'_>, uid: &str, link: &Link) -> Option<String> {
    let input = links.input;
    let named =
        |index: u32| links.link(index).map_or_else(|| format!("link {index}"), |link| link.name.clone());
    let has = |address: &IpAddr| link.addresses.iter().any(|own| own.net.addr() == *address);
    if link.loopback {
        return Some("it is the loopback interface".to_owned());
    }
    if links.owner(link).is_some()
        || is_pod_port(&link.name)
        || link.alias.starts_with(api::LINK_ALIAS_PREFIX)
    {
        return Some("Patchbay owns it".to_owned());
    }
    if let Some(record) = links.other_networks_uplink(uid, link) {
        return Some(format!("BridgeNetwork {} has not released it yet", record.name));
    }
    if link.kind.as_deref() == Some("bridge") {
        return Some("it is a bridge, and a bridge cannot be a port of another bridge".to_owned());
    }
    if input.observed.default_routes.contains(&link.index) {
        return Some("it carries the default route of the node".to_owned());
    }
    if let Some(address) = input.node.internal_ips.iter().find(|address| has(address)) {
        return Some(format!("it has {address}, an InternalIP of the node"));
    }
    if input.api_links.contains(&link.index) {
        return Some("it carries the connection to the API server".to_owned());
    }
    if let Some(own) = link.addresses.iter().find(|own| !link_local(own.net.addr())) {
        return Some(format!("it has the address {}", own.net));
    }
    if let Some(master) = link.master {
        return Some(format!("it is a port of {}", named(master)));
    }
    links.upper_links(link).next().map(|other| format!("link {} is stacked on it", other.name))
}

fn link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}
