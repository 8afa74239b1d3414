//! The uplink: a link of the node that becomes a port, if the node does not need it, and goes back as it was.

use std::net::IpAddr;

use super::{Action, Found, Network, Record, decide::Problem, pod_port, reason, seen::Seen};
use crate::nodenetwork::{Admin, Link};

/// What to do about the uplink of one network.
#[derive(Default)]
pub struct Draft {
    /// Gives back what is not wanted any more.
    pub back: Vec<Action>,
    /// What the record has to say before anything is touched.
    pub found: Option<Found>,
    /// Makes it a port.
    pub take: Vec<Action>,
    pub problem: Option<Problem>,
}

/// Compares the wanted uplink with the recorded one. Nothing is taken while there is no bridge.
pub fn draft(seen: &Seen<'_>, network: &Network, mtu: u32, bridge: Option<&Link>) -> Draft {
    let uid = network.uid.as_str();
    let recorded = recorded(seen, uid);
    let link = network.uplink.as_ref().and_then(|name| seen.named(name.as_str()));
    let mut draft = Draft::default();
    if let Some(found) = recorded
        && link.is_none_or(|link| link.index != found.index)
    {
        draft.back = back(seen, uid, found, bridge);
    }
    let Some(name) = &network.uplink else {
        return draft;
    };
    let Some(link) = link else {
        draft.problem = Some(Problem::new(
            reason::UPLINK_MISSING,
            format!(
                "this node has no link {name}; connect it, name another in spec.uplink, or leave the node out with \
                 spec.nodeSelector"
            ),
        ));
        return draft;
    };
    let known = recorded.filter(|found| found.index == link.index);
    let port = bridge.is_some_and(|bridge| link.master == Some(bridge.index));
    if !port && let Some(why) = refused(seen, uid, link) {
        draft.problem = Some(Problem::new(
            reason::UPLINK_REFUSED,
            format!("link {name} cannot be the uplink: {why}; name another in spec.uplink, or free this one"),
        ));
        draft.found = known.cloned();
        return draft;
    }
    draft.found = Some(known.cloned().unwrap_or_else(|| Found {
        name: link.name.clone(),
        index: link.index,
        admin: link.admin,
        mtu: link.mtu,
    }));
    if let Some(bridge) = bridge {
        draft.take = take(link, bridge, mtu);
    }
    draft
}

/// A port first, then changed: so whatever was changed is a port, and is known by that when it is given back.
fn take(link: &Link, bridge: &Link, mtu: u32) -> Vec<Action> {
    let mut actions = Vec::new();
    if link.master != Some(bridge.index) {
        actions.push(Action::Join { link: link.index, bridge: bridge.index });
    }
    if link.mtu < mtu {
        actions.push(Action::SetMtu { link: link.index, mtu });
    }
    if link.admin == Admin::Down {
        actions.push(Action::SetAdmin { link: link.index, admin: Admin::Up });
    }
    actions
}

/// The uplink that the record speaks of. What it says of an earlier boot says nothing about the links of this one.
pub fn recorded<'a>(seen: &Seen<'a>, uid: &str) -> Option<&'a Found> {
    let record: &Record = seen.view.records.get(uid)?;
    record.uplink.as_ref().filter(|_| record.boot == seen.view.boot)
}

/// Makes an uplink what it was. One that somebody has taken for something else since is left alone.
pub fn back(seen: &Seen<'_>, uid: &str, found: &Found, bridge: Option<&Link>) -> Vec<Action> {
    let Some(link) = seen.link(found.index) else {
        return Vec::new();
    };
    let port = bridge.is_some_and(|bridge| link.master == Some(bridge.index));
    if !port && refused(seen, uid, link).is_some() {
        return Vec::new();
    }
    let mut actions = Vec::new();
    if link.mtu != found.mtu {
        actions.push(Action::SetMtu { link: link.index, mtu: found.mtu });
    }
    if link.admin != found.admin {
        actions.push(Action::SetAdmin { link: link.index, admin: found.admin });
    }
    if port {
        actions.push(Action::Part { link: link.index });
    }
    actions
}

/// Why the node needs a link, or why it cannot be a port.
fn refused(seen: &Seen<'_>, uid: &str, link: &Link) -> Option<String> {
    let view = seen.view;
    let named =
        |index: u32| seen.link(index).map_or_else(|| format!("link {index}"), |link| link.name.clone());
    let has = |address: &IpAddr| link.addresses.iter().any(|own| own.net.addr() == *address);
    if link.loopback {
        return Some("it is the loopback".to_owned());
    }
    if seen.owner(link).is_some() || pod_port(&link.name) || link.alias.starts_with(api::LINK_ALIAS_PREFIX) {
        return Some("it belongs to a network of Patchbay".to_owned());
    }
    if let Some(record) = seen.uplink_of_another(uid, link) {
        return Some(format!("BridgeNetwork {} has not given it back yet", record.name));
    }
    if link.kind.as_deref() == Some("bridge") {
        return Some("it is a bridge, and a bridge is no port of another".to_owned());
    }
    if view.observed.default_routes.contains(&link.index) {
        return Some("it carries the default route of the node".to_owned());
    }
    if let Some(address) = view.facts.internal_ips.iter().find(|address| has(address)) {
        return Some(format!("it has {address}, the address of the node"));
    }
    if view.api_links.contains(&link.index) {
        return Some("the connection to the API server goes over it".to_owned());
    }
    if let Some(own) = link.addresses.iter().find(|own| !link_local(own.net.addr())) {
        return Some(format!("it has the address {}", own.net));
    }
    if let Some(master) = link.master {
        return Some(format!("it is a port of {}", named(master)));
    }
    seen.on_top(link).next().map(|other| format!("link {} lies on it", other.name))
}

fn link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}
