//! Quiet links: the pod end of a pair whose addresses another pod still has.
//!
//! A quiet link has `IFF_NOARP` from before it is up. The kernel then answers neither ARP requests nor neighbour
//! solicitations, and does not join the solicited-node groups of the link's addresses. [`announce`] ends this.

use std::{os::fd::BorrowedFd, path::Path};

use api::IfName;
use ipnet::IpNet;

use super::{
    Error, IFF_NOARP, IFLA_ADDRESS, IFLA_IFNAME, SET_LINK, address,
    event_wait::{EventGroup, EventSocket},
    find, is_veth,
};
use crate::{
    namespace,
    netlink::Netlink,
    request::{CHANGE, NetlinkRequest, link_header},
};

/// When the addresses of a new pair are announced to the neighbours.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Announce {
    /// At once.
    #[default]
    Now,
    /// By [`announce`]. Until then the link is quiet.
    Later,
}

/// What [`announce`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnnounceOutcome {
    Announced,
    /// The namespace has no veth of this name: the pod has moved it, and announces the addresses itself.
    NoLink,
}

/// Ends the quiet of a pod end and announces its addresses to all neighbours. A repeated call announces them again.
pub fn announce(
    namespace: BorrowedFd<'_>,
    link: &IfName,
    proc_root: &Path,
) -> Result<AnnounceOutcome, Error> {
    namespace::within(namespace, || {
        let mut netlink = Netlink::open()?;
        let Some(found) = find(&mut netlink, link)?.filter(is_veth) else {
            return Ok(AnnounceOutcome::NoLink);
        };
        let Some(mac) = found.mac else { return Ok(AnnounceOutcome::NoLink) };
        let addresses = address::list_permanent(&mut netlink, found.index)?;
        address::set_notify(proc_root, link, &addresses, Announce::Now)?;
        let by_index = |flags, mask| link_header(found.index, flags, mask);
        let answering = NetlinkRequest::new(SET_LINK, CHANGE, &by_index(0, IFF_NOARP));
        netlink.execute("answer neighbours", answering)?;
        rejoin(&mut netlink, found.index, &addresses)?;
        let same = NetlinkRequest::new(SET_LINK, CHANGE, &by_index(0, 0));
        netlink.execute("announce the addresses", same.attribute(IFLA_ADDRESS, &mac.octets()))?;
        Ok(AnnounceOutcome::Announced)
    })?
}

/// Adds the IPv6 addresses again: the kernel joins the group of an address, without which no solicitation arrives, only when
/// the address is added.
fn rejoin(netlink: &mut Netlink, link: u32, addresses: &[IpNet]) -> Result<(), Error> {
    let events = EventSocket::open(EventGroup::Ipv6Routes)?;
    let ipv6 = || addresses.iter().copied().filter(|address| address.addr().is_ipv6());
    for address in ipv6() {
        address::delete(netlink, link, address)?;
        address::add(netlink, link, address)?;
    }
    // A timeout is not an error: the link is configured correctly.
    events.wait_until(|| address::all_usable(netlink, addresses))?;
    Ok(())
}

/// Announces the addresses to the neighbours by setting the MAC address to its current value, for which the kernel
/// sends gratuitous ARP and unsolicited neighbour advertisements. Those it sent when the link came up were too early:
/// the link had no address and the port did not forward.
pub(super) fn announce_new(pod_netlink: &mut Netlink, inside: &IfName, mac: api::Mac) -> Result<(), Error> {
    let same = NetlinkRequest::new(SET_LINK, CHANGE, &link_header(0, 0, 0))
        .text(IFLA_IFNAME, inside.as_str())
        .attribute(IFLA_ADDRESS, &mac.octets());
    Ok(pod_netlink.execute("announce the addresses", same)?)
}
