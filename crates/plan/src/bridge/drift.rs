//! Keeping a link that we made as it should be, in place.

use api::IfName;

use super::{Action, LinkKind, ownership_alias, ownership_mac};
use crate::nodenetwork::{AdminState, Link};

/// The smallest MTU with which a link has IPv6. The kernel forgets its settings for IPv6 below.
const IPV6_MTU: u32 = 1280;

/// What a link of ours should be.
pub struct DesiredLink<'a> {
    pub uid: &'a str,
    /// The UID of the Node that its ownership_mac is made with.
    pub node_uid: &'a str,
    pub kind: LinkKind,
    pub name: &'a IfName,
    pub mtu: u32,
    /// The bridge that it is a port of.
    pub master: Option<u32>,
}

/// The changes that make a link what it should be. It is set up last.
pub fn link_drift(link: &Link, desired: &DesiredLink<'_>) -> Vec<Action> {
    let DesiredLink { uid, node_uid, kind, name, mtu, master } = *desired;
    let index = link.index;
    let mut actions = Vec::new();
    // The alias first: with it the ownership_mac may change and the link is still ours.
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
    // A link that the kernel tells nothing of has no IPv6, until its MTU is large enough for it.
    let comes_back = link.ipv6_disabled.is_none() && link.mtu < IPV6_MTU && mtu >= IPV6_MTU;
    if link.ipv6_disabled == Some(false) || comes_back {
        actions.push(Action::DisableIpv6 { name: name.to_string() });
    }
    if link.ipv4_isolated == Some(false) {
        actions.push(Action::IsolateIpv4 { name: name.to_string() });
    }
    // Those of IPv6 go with it.
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
