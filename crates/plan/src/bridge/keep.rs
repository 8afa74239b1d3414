//! Keeping a link that we made as it should be, in place.

use api::IfName;

use super::{Action, Made, alias, mark};
use crate::nodenetwork::{Admin, Link};

/// The smallest MTU with which a link has IPv6. The kernel forgets its settings for IPv6 below.
const IPV6_MTU: u32 = 1280;

/// What a link of ours should be.
pub struct Shape<'a> {
    pub uid: &'a str,
    /// The UID of the Node that its mark is made with.
    pub node_uid: &'a str,
    pub made: Made,
    pub name: &'a IfName,
    pub mtu: u32,
    /// The bridge that it is a port of.
    pub master: Option<u32>,
}

/// The changes that make a link what it should be. It is set up last.
pub fn keep(link: &Link, shape: &Shape<'_>) -> Vec<Action> {
    let Shape { uid, node_uid, made, name, mtu, master } = *shape;
    let index = link.index;
    let mut actions = Vec::new();
    // The alias first: with it the mark may change and the link is still ours.
    let alias = alias(uid, made);
    if link.alias != alias {
        actions.push(Action::SetAlias { link: index, alias });
    }
    let mac = mark(uid, node_uid, made);
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
    let comes_back = link.ipv6_off.is_none() && link.mtu < IPV6_MTU && mtu >= IPV6_MTU;
    if link.ipv6_off == Some(false) || comes_back {
        actions.push(Action::DisableIpv6 { name: name.to_string() });
    }
    if link.ipv4_deaf == Some(false) {
        actions.push(Action::DeafenIpv4 { name: name.to_string() });
    }
    // Those of IPv6 go with it.
    let addresses = link.addresses.iter().map(|address| address.net).filter(|net| net.addr().is_ipv4());
    actions.extend(addresses.map(|address| Action::RemoveAddress { link: index, address }));
    match master {
        Some(bridge) if link.master != master => actions.push(Action::Join { link: index, bridge }),
        None if link.master.is_some() => actions.push(Action::Part { link: index }),
        _ => {}
    }
    if link.admin == Admin::Down {
        actions.push(Action::SetAdmin { link: index, admin: Admin::Up });
    }
    actions
}
