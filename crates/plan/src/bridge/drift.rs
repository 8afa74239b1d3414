//! Drift of a link that the daemon created, repaired in place.

use api::IfName;

use super::{Action, LinkKind, ownership_alias, ownership_mac};
use crate::nodenetwork::{AdminState, Link};

/// The smallest MTU of a link with IPv6. Below it the kernel drops the IPv6 settings of the link.
const IPV6_MTU: u32 = 1280;

/// The desired state of a link that the daemon created.
pub struct DesiredLink<'a> {
    pub uid: &'a str,
    /// The Node UID from which its ownership MAC is derived.
    pub node_uid: &'a str,
    pub kind: LinkKind,
    pub name: &'a IfName,
    pub mtu: u32,
    /// The bridge of which it is a port.
    pub master: Option<u32>,
}

/// The changes that bring a link to its desired state. Setting it up comes last.
pub fn link_drift(link: &Link, desired: &DesiredLink<'_>) -> Vec<Action> {
    let DesiredLink { uid, node_uid, kind, name, mtu, master } = *desired;
    let index = link.index;
    let mut actions = Vec::new();
    // The alias comes first: it identifies the link while the ownership MAC changes.
    let alias = ownership_alias(uid, kind);
    if link.alias != alias {
        actions.push(Action::SetAlias { link: index, alias });
    }
    let mac = ownership_mac(uid, node_uid, kind);
    if link.mac != Some(mac) {
        actions.push(Action::SetMac { link: index, mac });
    }
    if link.name != name.as_str() {
        actions.push(Action::Rename { link: index, name: name.clone() });
    }
    if link.mtu != mtu {
        actions.push(Action::SetMtu { link: index, mtu });
    }
    // A link without IPv6 settings gets IPv6 back, enabled, once its MTU is large enough.
    let ipv6_returns = link.ipv6_disabled.is_none() && link.mtu < IPV6_MTU && mtu >= IPV6_MTU;
    if link.ipv6_disabled == Some(false) || ipv6_returns {
        actions.push(Action::DisableIpv6 { name: name.to_string() });
    }
    if link.ipv4_isolated == Some(false) {
        actions.push(Action::IsolateIpv4 { name: name.to_string() });
    }
    // Disabling IPv6 removes the IPv6 addresses.
    let addresses = link.addresses.iter().map(|address| address.net).filter(|net| net.addr().is_ipv4());
    actions.extend(addresses.map(|address| Action::RemoveAddress { link: index, address }));
    match master {
        Some(bridge) if link.master != master => actions.push(Action::SetMaster { link: index, bridge }),
        None if link.master.is_some() => actions.push(Action::ClearMaster { link: index }),
        _ => {}
    }
    if link.admin == AdminState::Down {
        actions.push(Action::SetAdmin { link: index, admin: AdminState::Up });
    }
    actions
}
