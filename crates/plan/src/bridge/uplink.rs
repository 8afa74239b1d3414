//! The uplink: a link of the node that becomes a port, if the node does not need it, and goes back as it was.

use std::net::IpAddr;

use super::{
    Action, LinkRecord, LocalNetwork, OriginalLink, decide::NetworkProblem, index::LinkIndex, is_pod_port,
    reason,
};
use crate::nodenetwork::{AdminState, Link};

/// What to do about the uplink of one network.
#[derive(Default)]
pub struct UplinkDecision {
    /// Gives back what is not wanted any more.
    pub release: Vec<Action>,
    /// What the record has to say before anything is touched.
    pub original: Option<OriginalLink>,
    /// Makes it a port.
    pub attach: Vec<Action>,
    pub problem: Option<NetworkProblem>,
}

/// Compares the wanted uplink with the recorded one. Nothing is taken while there is no bridge.
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
                "this node has no link {name}; connect it, name another in spec.uplink, or leave the node out with \
                 spec.nodeSelector"
            ),
        ));
        return decision;
    };
    let known = recorded.filter(|original| original.index == link.index);
    let port = bridge.is_some_and(|bridge| link.master == Some(bridge.index));
    if !port && let Some(why) = refused(links, uid, link) {
        decision.problem = Some(NetworkProblem::new(
            reason::UPLINK_REFUSED,
            format!("link {name} cannot be the uplink: {why}; name another in spec.uplink, or free this one"),
        ));
        decision.original = known.cloned();
        return decision;
    }
    decision.original = Some(known.cloned().unwrap_or_else(|| OriginalLink {
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

/// A port first, then changed: so whatever was changed is a port, and is known by that when it is given back.
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

/// The uplink that the record speaks of. What it says of an earlier boot says nothing about the links of this one.
pub fn recorded<'a>(links: &LinkIndex<'a>, uid: &str) -> Option<&'a OriginalLink> {
    let record: &LinkRecord = links.input.records.get(uid)?;
    record.uplink.as_ref().filter(|_| record.boot == links.input.boot)
}

/// Makes an uplink what it was. One that somebody has taken for something else since is left alone.
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

/// Why the node needs a link, or why it cannot be a port.
fn refused(links: &LinkIndex<'_>, uid: &str, link: &Link) -> Option<String> {
    let input = links.input;
    let named =
        |index: u32| links.link(index).map_or_else(|| format!("link {index}"), |link| link.name.clone());
    let has = |address: &IpAddr| link.addresses.iter().any(|own| own.net.addr() == *address);
    if link.loopback {
        return Some("it is the loopback".to_owned());
    }
    if links.owner(link).is_some() || is_pod_port(&link.name) || link.alias.starts_with(api::LINK_ALIAS) {
        return Some("it belongs to a network of Patchbay".to_owned());
    }
    if let Some(record) = links.other_networks_uplink(uid, link) {
        return Some(format!("BridgeNetwork {} has not given it back yet", record.name));
    }
    if link.kind.as_deref() == Some("bridge") {
        return Some("it is a bridge, and a bridge is no port of another".to_owned());
    }
    if input.observed.default_routes.contains(&link.index) {
        return Some("it carries the default route of the node".to_owned());
    }
    if let Some(address) = input.node.internal_ips.iter().find(|address| has(address)) {
        return Some(format!("it has {address}, the address of the node"));
    }
    if input.api_links.contains(&link.index) {
        return Some("the connection to the API server goes over it".to_owned());
    }
    if let Some(own) = link.addresses.iter().find(|own| !link_local(own.net.addr())) {
        return Some(format!("it has the address {}", own.net));
    }
    if let Some(master) = link.master {
        return Some(format!("it is a port of {}", named(master)));
    }
    links.upper_links(link).next().map(|other| format!("link {} lies on it", other.name))
}

fn link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}
