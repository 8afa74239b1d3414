//! The links in a pod's network namespace, and their peers on the host.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    os::fd::AsFd,
};

use api::Mac;
use nix::errno::Errno;
use plan::nodenetwork::AdminState;

use crate::{
    Error,
    message::{self, GET_LINK, NEW_LINK, ObservedPeer},
    namespace,
    netlink::Netlink,
    nsid,
    request::{CHANGE, NetlinkRequest, link_header},
    veth::delete_link,
};

/// A link in a pod's network namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodLink {
    /// Identifies the link as long as it stays in this namespace, also if it is renamed.
    pub index: u32,
    /// Bytes that are not UTF-8 are escaped as `\xNN`.
    pub name: String,
    pub mac: Option<Mac>,
    /// Such as `veth` or `macvlan`. None for hardware and the loopback device.
    pub kind: Option<String>,
    pub mtu: u32,
    /// Whether it is set up. It may have no carrier.
    pub up: bool,
    pub peer: Option<LinkPeer>,
}

/// The other end of a veth, or the lower link of a macvlan, VLAN and the like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkPeer {
    pub index: u32,
    pub place: PeerPlace,
}

/// The network namespace of a peer, which its index belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerPlace {
    /// The namespace of the calling thread.
    Host,
    /// The namespace of the link itself.
    SameNamespace,
    Other,
}

impl PodLink {
    /// The index of the veth end on the host. None for other kinds: their lower link has many upper links and stays when
    /// this one is deleted.
    pub fn host_peer(&self) -> Option<u32> {
        let peer = self.peer.filter(|_| self.kind.as_deref() == Some("veth"))?;
        (peer.place == PeerPlace::Host).then_some(peer.index)
    }
}

/// Lists the links of a network namespace. Blocks for one dump. Call it in the host's network namespace.
pub fn links_in(namespace: impl AsFd) -> Result<Vec<PodLink>, Error> {
    let host = File::open("/proc/thread-self/ns/net").map_err(Error::Enter)?;
    let (listed, host_nsid) = namespace::within(namespace, || {
        let mut netlink = Netlink::open()?;
        let listed = netlink.dump("list links", message::get_links, |message| {
            let link = (message.kind == NEW_LINK).then(|| message::parse_link(message.body)).flatten()?;
            Some((link, message::parse_peer(message.body)))
        })?;
        if netlink.is_partial() {
            return Err(Error::Interrupted("list links"));
        }
        // After the dump, which assigns an ID to the namespace of each peer.
        Ok::<_, Error>((listed, nsid::find(&mut netlink, &host)?))
    })??;
    let place = |nsid: Option<i32>| match nsid {
        None => PeerPlace::SameNamespace,
        nsid if nsid == host_nsid => PeerPlace::Host,
        Some(_) => PeerPlace::Other,
    };
    let peer = |peer: ObservedPeer| LinkPeer { index: peer.index, place: place(peer.nsid) };
    let link = |(link, observed): (plan::nodenetwork::Link, Option<ObservedPeer>)| PodLink {
        index: link.index,
        name: link.name,
        mac: link.mac,
        kind: link.kind,
        mtu: link.mtu,
        up: link.admin == AdminState::Up,
        peer: observed.map(peer),
    };
    Ok(listed.into_iter().map(link).collect())
}

/// Deletes a link of a network namespace and returns whether it existed. Blocks until the link is gone.
pub fn delete_in(namespace: impl AsFd, index: u32) -> Result<bool, Error> {
    match namespace::within(namespace, || delete_link(index))? {
        Ok(()) => Ok(true),
        Err(error) if error.errno() == Some(Errno::ENODEV as i32) => Ok(false),
        Err(error) => Err(error),
    }
}

/// A link of the host, as far as it was recorded. The kernel may give the index to another link later.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostLink {
    pub index: u32,
    pub name: Option<String>,
    pub mac: Option<Mac>,
}

/// Deletes a veth of the calling thread's network namespace, and with it its other end. A link of another kind, one with
/// another name or MAC address than recorded, and one that does not exist, is left alone.
pub fn delete_veth(veth: &HostLink) -> Result<(), Error> {
    let index = veth.index;
    let request = NetlinkRequest::new(GET_LINK, CHANGE, &link_header(index, 0, 0));
    let link = Netlink::open()?.get("get link", request, |message| {
        (message.kind == NEW_LINK).then(|| message::parse_link(message.body)).flatten()
    })?;
    let is_recorded = |link: &plan::nodenetwork::Link| {
        link.kind.as_deref() == Some("veth")
            && veth.name.as_ref().is_none_or(|name| *name == link.name)
            && (veth.mac.is_none() || veth.mac == link.mac)
    };
    if !link.as_ref().is_some_and(is_recorded) {
        return Ok(());
    }
    match delete_link(index) {
        Err(error) if error.errno() != Some(Errno::ENODEV as i32) => Err(error),
        _ => Ok(()),
    }
}

/// The indexes of all links in the network namespace of the calling thread. Blocks for one dump.
pub fn link_indexes() -> Result<BTreeSet<u32>, Error> {
    let indexes = Netlink::open()?.dump("list links", message::get_links, |message| {
        (message.kind == NEW_LINK).then(|| message::parse_link(message.body)).flatten().map(|link| link.index)
    })?;
    Ok(indexes.into_iter().collect())
}

/// Those of these links that exist in the network namespace of the calling thread, by index. Blocks for one request per
/// link.
pub fn existing_links(indexes: impl IntoIterator<Item = u32>) -> Result<BTreeMap<u32, HostLink>, Error> {
    const IFLA_EXT_MASK: u16 = 29;
    const RTEXT_FILTER_SKIP_STATS: u32 = 1 << 3;

    let mut netlink = Netlink::open()?;
    let mut existing = BTreeMap::new();
    // Index 0 would be a request without an index, which the kernel rejects.
    for index in indexes.into_iter().filter(|&index| index != 0 && i32::try_from(index).is_ok()) {
        let request = NetlinkRequest::new(GET_LINK, CHANGE, &link_header(index, 0, 0))
            .number(IFLA_EXT_MASK, RTEXT_FILTER_SKIP_STATS);
        let found = netlink.get("get link", request, |message| {
            (message.kind == NEW_LINK).then(|| message::parse_link(message.body)).flatten()
        })?;
        existing.extend(found.map(|link| (index, HostLink { index, name: Some(link.name), mac: link.mac })));
    }
    Ok(existing)
}
