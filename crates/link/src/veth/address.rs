//! IP addresses of the pod end.

use std::{
    fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
};

use api::IfName;
use ipnet::{IpNet, Ipv4Net};
use nix::errno::Errno;

use super::{Announce, Error, VethConfig, is};
use crate::{
    message::{self, DELETE_ADDRESS, NEW_ADDRESS},
    netlink::{Netlink, empty_if},
    request::{CHANGE, CREATE, NetlinkRequest, address_parts},
};

/// How many unexpected addresses a message names. A privileged pod can add any number of them.
const MAX_UNEXPECTED: usize = 8;

/// Sets the sysctls of the pod end. Call it in the sandbox, before the link is up.
///
/// Overrides the sandbox's defaults for new links: IPv6 is enabled if it is needed, and the kernel announces addresses
/// when the link comes up or its MAC address is set, unless the link is quiet.
pub fn prepare_sysctls(config: &VethConfig<'_>) -> Result<(), Error> {
    if config.needs_ipv6() {
        if !config.proc_root.join("sys/net/ipv6").exists() {
            return Err(Error::NoIpv6);
        }
        set_sysctl(&conf(config.proc_root, "ipv6", config.inside).join("disable_ipv6"), "0")?;
    }
    set_notify(config.proc_root, config.inside, config.addresses, config.announce)
}

/// Sets whether the kernel announces addresses of these families. Call it in the sandbox.
pub fn set_notify(
    proc_root: &Path,
    link: &IfName,
    addresses: &[IpNet],
    announce: Announce,
) -> Result<(), Error> {
    let value = match announce {
        Announce::Now => "1",
        Announce::Later => "0",
    };
    if addresses.iter().any(|address| address.addr().is_ipv4()) {
        set_sysctl(&conf(proc_root, "ipv4", link).join("arp_notify"), value)?;
    }
    if addresses.iter().any(|address| address.addr().is_ipv6()) {
        set_sysctl(&conf(proc_root, "ipv6", link).join("ndisc_notify"), value)?;
    }
    Ok(())
}

/// The directory of a link's sysctls.
fn conf(proc_root: &Path, family: &str, link: &IfName) -> PathBuf {
    proc_root.join("sys/net").join(family).join("conf").join(link.as_str())
}

/// Writes only if the value differs: for some sysctls the kernel takes the RTNL lock.
fn set_sysctl(path: &Path, value: &str) -> Result<(), Error> {
    let write = || match fs::read_to_string(path)?.trim() {
        current if current == value => Ok(()),
        _ => fs::write(path, value),
    };
    write().map_err(|source: io::Error| Error::Sysctl { path: path.to_owned(), source })
}

/// Adds an address to the link. Succeeds if the link has it.
pub fn add(pod_netlink: &mut Netlink, link: u32, address: IpNet) -> Result<(), crate::Error> {
    match pod_netlink.execute("add an address", request((NEW_ADDRESS, CREATE), link, address)) {
        Err(error) if is(&error, Errno::EEXIST) => Ok(()),
        result => result,
    }
}

/// Deletes an address of the link. Succeeds if the link does not have it.
pub fn delete(pod_netlink: &mut Netlink, link: u32, address: IpNet) -> Result<(), crate::Error> {
    match pod_netlink.execute("delete an address", request((DELETE_ADDRESS, CHANGE), link, address)) {
        Err(error) if is(&error, Errno::EADDRNOTAVAIL) => Ok(()),
        result => result,
    }
}

fn request((kind, message_flags): (u16, u16), link: u32, address: IpNet) -> NetlinkRequest {
    const IFA_ADDRESS: u16 = 1;
    const IFA_LOCAL: u16 = 2;
    const IFA_BROADCAST: u16 = 4;
    /// Skips duplicate address detection, which takes 1 to 2 s: IPAM guarantees that the address is unique.
    const IFA_F_NODAD: u8 = 2;

    let (family, _, bytes) = address_parts(address.addr());
    let flags = if address.addr().is_ipv6() { IFA_F_NODAD } else { 0 };
    let mut header = [family, address.prefix_len(), flags, 0, 0, 0, 0, 0];
    header[4..].copy_from_slice(&link.to_ne_bytes());
    let request = NetlinkRequest::new(kind, message_flags, &header)
        .attribute(IFA_LOCAL, &bytes)
        .attribute(IFA_ADDRESS, &bytes);
    match address {
        IpNet::V4(net) => match broadcast(net) {
            Some(all) => request.attribute(IFA_BROADCAST, &all),
            None => request,
        },
        IpNet::V6(_) => request,
    }
}

/// The broadcast address of the subnet. A /31 and a /32 have none (RFC 3021).
fn broadcast(net: Ipv4Net) -> Option<[u8; 4]> {
    (net.prefix_len() < 31).then(|| net.broadcast().octets())
}

/// Whether the sandbox accepts packets to all of these addresses. For IPv6 the kernel acknowledges an address, and even
/// lists it as valid, before it does.
pub fn all_usable(pod_netlink: &mut Netlink, addresses: &[IpNet]) -> Result<bool, crate::Error> {
    for address in addresses.iter().filter(|address| address.addr().is_ipv6()) {
        if !is_local(pod_netlink, address.addr())? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether the kernel delivers packets to this address locally.
fn is_local(pod_netlink: &mut Netlink, address: IpAddr) -> Result<bool, crate::Error> {
    const RTA_DST: u16 = 1;
    /// `NLM_F_REQUEST`
    const REQUEST: u16 = 1;

    let (family, length, bytes) = address_parts(address);
    let header = [family, length, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let request = NetlinkRequest::new(message::GET_ROUTE, REQUEST, &header).attribute(RTA_DST, &bytes);
    let local = pod_netlink.exchange("look up the route to an address", request, |response| {
        (response.kind == message::NEW_ROUTE).then(|| message::is_local_route(response.body))
    });
    match local {
        // Without a route, the address is not local.
        Err(crate::Error::Rejected { .. }) => Ok(false),
        result => Ok(result?.unwrap_or(false)),
    }
}

/// The permanent addresses of a link, without those from router advertisements or DHCP.
pub fn list_permanent(pod_netlink: &mut Netlink, link: u32) -> Result<Vec<IpNet>, crate::Error> {
    let found = pod_netlink.dump(
        "list addresses",
        |sequence| message::get_addresses_of(sequence, link),
        |message| (message.kind == NEW_ADDRESS).then(|| message::parse_address(message.body)).flatten(),
    );
    // An older kernel does not filter by link.
    let permanent =
        empty_if(found, &[Errno::ENODEV])?.into_iter().filter(|entry| entry.link == link && entry.permanent);
    Ok(permanent.map(|entry| entry.net).collect())
}

/// Formats the desired and the observed addresses in the same order, so that the texts are equal if the lists have the
/// same addresses. Link-local addresses are left out.
pub fn describe_lists(desired: &[IpNet], observed: &[IpNet]) -> (String, String) {
    let mut desired: Vec<IpNet> = desired.to_vec();
    desired.sort_unstable();
    desired.dedup();
    let present = desired.iter().filter(|net| observed.contains(net)).map(ToString::to_string);
    let mut unexpected: Vec<&IpNet> =
        observed.iter().filter(|net| !desired.contains(net) && !is_link_local(net.addr())).collect();
    unexpected.sort_unstable();
    let more = unexpected.len().saturating_sub(MAX_UNEXPECTED);
    let listed = present.chain(unexpected.into_iter().take(MAX_UNEXPECTED).map(ToString::to_string));
    let listed = listed.chain((more > 0).then(|| format!("{more} more")));
    (join(desired.iter().map(ToString::to_string)), join(listed))
}

fn join(addresses: impl Iterator<Item = String>) -> String {
    let addresses: Vec<String> = addresses.collect();
    if addresses.is_empty() { "empty".to_owned() } else { addresses.join(", ") }
}

fn is_link_local(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(address) if address.is_unicast_link_local())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nets(text: &str) -> Vec<IpNet> {
        text.split_whitespace().map(|net| net.parse().unwrap()).collect()
    }

    #[test]
    fn missing_and_unexpected_addresses_differ_and_order_does_not() {
        for (desired, observed, difference) in [
            ("10.0.0.1/24 fd00::1/64", "fd00::1/64 10.0.0.1/24 fe80::1/64", None),
            ("10.0.0.1/24 10.0.0.1/24", "10.0.0.1/24", None),
            ("10.0.0.1/24", "", Some(("10.0.0.1/24", "empty"))),
            ("10.0.0.1/24", "10.0.0.1/16", Some(("10.0.0.1/24", "10.0.0.1/16"))),
            ("10.0.0.1/24", "10.0.0.2/24 10.0.0.1/24", Some(("10.0.0.1/24", "10.0.0.1/24, 10.0.0.2/24"))),
        ] {
            let (desired, observed) = describe_lists(&nets(desired), &nets(observed));
            match difference {
                None => assert_eq!(desired, observed),
                Some(difference) => assert_eq!((desired.as_str(), observed.as_str()), difference),
            }
        }
    }

    #[test]
    fn a_sandbox_with_many_addresses_gets_a_short_message() {
        let many: Vec<IpNet> = (0..=255).map(|n| format!("10.0.1.{n}/32").parse().unwrap()).collect();
        let (_, observed) = describe_lists(&nets("10.0.0.1/24"), &many);
        assert!(observed.ends_with("10.0.1.7/32, 248 more"), "{observed}");
    }

    #[test]
    fn small_subnets_have_no_broadcast_address() {
        let broadcast_of = |net: &str| broadcast(net.parse().unwrap());
        assert_eq!(broadcast_of("10.0.0.1/24"), Some([10, 0, 0, 255]));
        assert_eq!(broadcast_of("10.0.0.1/30"), Some([10, 0, 0, 3]));
        assert_eq!((broadcast_of("10.0.0.1/31"), broadcast_of("10.0.0.1/32")), (None, None));
    }
}
