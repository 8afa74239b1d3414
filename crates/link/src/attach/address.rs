//! The addresses of the inner end.

use std::{fs, io, net::IpAddr, path::Path};

use ipnet::{IpNet, Ipv4Net};
use nix::errno::Errno;

use super::{Attach, Error, is};
use crate::{
    dump::{Asker, none_if},
    message::{self, NEW_ADDRESS},
    request::{CREATE, Request, wire},
};

/// How many addresses are told that nobody asked for. Whoever has rights in the sandbox can add any number.
const FOREIGN: usize = 8;

/// Prepares the inner end for its addresses, in the namespace that it is in and before it is up: whatever the sandbox
/// has for new links, IPv6 is on if it is needed, and who has an address says so when the link comes up or its hardware
/// address is set.
pub fn prepare(wanted: &Attach<'_>) -> Result<(), Error> {
    let settings = wanted.proc_root.join("sys/net");
    let of = |family: &str| settings.join(family).join("conf").join(wanted.inside.as_str());
    if wanted.addresses.iter().any(|address| address.addr().is_ipv4()) {
        set(&of("ipv4").join("arp_notify"), "1")?;
    }
    if wanted.needs_ipv6() {
        if !settings.join("ipv6").exists() {
            return Err(Error::NoIpv6);
        }
        set(&of("ipv6").join("disable_ipv6"), "0")?;
        set(&of("ipv6").join("ndisc_notify"), "1")?;
    }
    Ok(())
}

/// Writes only what is different: the kernel locks all links for some of these.
fn set(path: &Path, value: &str) -> Result<(), Error> {
    let written = || match fs::read_to_string(path)?.trim() {
        same if same == value => Ok(()),
        _ => fs::write(path, value),
    };
    written().map_err(|source: io::Error| Error::Sysctl { path: path.to_owned(), source })
}

/// Gives the link an address. One that it has is fine.
pub fn put(inner: &mut Asker, link: u32, address: IpNet) -> Result<(), crate::Error> {
    match inner.change("add an address", request(link, address)) {
        Err(error) if is(&error, Errno::EEXIST) => Ok(()),
        result => result,
    }
}

fn request(link: u32, address: IpNet) -> Request {
    const IFA_ADDRESS: u16 = 1;
    const IFA_LOCAL: u16 = 2;
    const IFA_BROADCAST: u16 = 4;
    /// Whoever hands out the address knows that nobody else has it; to ask around would take a second or two.
    const IFA_F_NODAD: u8 = 2;

    let (family, _, bytes) = wire(address.addr());
    let flags = if address.addr().is_ipv6() { IFA_F_NODAD } else { 0 };
    let mut header = [family, address.prefix_len(), flags, 0, 0, 0, 0, 0];
    header[4..].copy_from_slice(&link.to_ne_bytes());
    let request = Request::new(NEW_ADDRESS, CREATE, &header)
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

/// The address of everybody in the subnet; two stations and one need none (RFC 3021).
fn broadcast(net: Ipv4Net) -> Option<[u8; 4]> {
    (net.prefix_len() < 31).then(|| net.broadcast().octets())
}

/// Whether all of these are the sandbox's own by now. With IPv6 the kernel gives its answer, and even shows the address
/// as good, before it takes packets to it.
pub fn all_usable(inner: &mut Asker, addresses: &[IpNet]) -> Result<bool, crate::Error> {
    for address in addresses.iter().filter(|address| address.addr().is_ipv6()) {
        if !is_own(inner, address.addr())? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether packets to an address stay here.
fn is_own(inner: &mut Asker, address: IpAddr) -> Result<bool, crate::Error> {
    const RTA_DST: u16 = 1;
    /// `NLM_F_REQUEST`
    const ASK: u16 = 1;

    let (family, length, bytes) = wire(address);
    let header = [family, length, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let request = Request::new(message::GET_ROUTE, ASK, &header).attribute(RTA_DST, &bytes);
    let own = inner.exchange("find the way to an address", request, |answer| {
        (answer.kind == message::NEW_ROUTE).then(|| message::stays(answer.body))
    });
    match own {
        // No way at all is none to here.
        Err(crate::Error::Refused { .. }) => Ok(false),
        result => Ok(result?.unwrap_or(false)),
    }
}

/// The addresses that a link was given: not those that a router or a lease gave it, which end one day.
pub fn given(inner: &mut Asker, link: u32) -> Result<Vec<IpNet>, crate::Error> {
    let found = inner.collect(
        "addresses",
        |sequence| message::get_addresses_of(sequence, link),
        |message| (message.kind == NEW_ADDRESS).then(|| message::placed(message.body)).flatten(),
    );
    // A kernel that cannot filter tells those of all.
    let ours = none_if(found, &[Errno::ENODEV])?.into_iter().filter(|one| one.link == link && one.permanent);
    Ok(ours.map(|one| one.net).collect())
}

/// Both lists, wanted and found, as they are told to a person: in the same order, so that they are equal if the same
/// addresses are in both.
pub fn compare(wanted: &[IpNet], found: &[IpNet]) -> (String, String) {
    let mut names: Vec<IpNet> = wanted.to_vec();
    names.sort_unstable();
    names.dedup();
    let there = names.iter().filter(|net| found.contains(net)).map(ToString::to_string);
    let mut foreign: Vec<&IpNet> =
        found.iter().filter(|net| !names.contains(net) && !is_link_local(net.addr())).collect();
    foreign.sort_unstable();
    let more = foreign.len().saturating_sub(FOREIGN);
    let told = there.chain(foreign.into_iter().take(FOREIGN).map(ToString::to_string));
    let told = told.chain((more > 0).then(|| format!("{more} more")));
    (joined(names.iter().map(ToString::to_string)), joined(told))
}

fn joined(all: impl Iterator<Item = String>) -> String {
    let all: Vec<String> = all.collect();
    if all.is_empty() { "empty".to_owned() } else { all.join(", ") }
}

/// Every link that knows IPv6 has one.
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
    fn what_is_missing_and_what_is_foreign_make_a_difference_and_order_does_not() {
        for (wanted, found, told) in [
            ("10.0.0.1/24 fd00::1/64", "fd00::1/64 10.0.0.1/24 fe80::1/64", None),
            ("10.0.0.1/24 10.0.0.1/24", "10.0.0.1/24", None),
            ("10.0.0.1/24", "", Some(("10.0.0.1/24", "empty"))),
            ("10.0.0.1/24", "10.0.0.1/16", Some(("10.0.0.1/24", "10.0.0.1/16"))),
            ("10.0.0.1/24", "10.0.0.2/24 10.0.0.1/24", Some(("10.0.0.1/24", "10.0.0.1/24, 10.0.0.2/24"))),
        ] {
            let (wanted, found) = compare(&nets(wanted), &nets(found));
            match told {
                None => assert_eq!(wanted, found),
                Some(told) => assert_eq!((wanted.as_str(), found.as_str()), told),
            }
        }
    }

    #[test]
    fn a_sandbox_full_of_addresses_makes_no_long_message() {
        let many: Vec<IpNet> = (0..=255).map(|n| format!("10.0.1.{n}/32").parse().unwrap()).collect();
        let (_, found) = compare(&nets("10.0.0.1/24"), &many);
        assert!(found.ends_with("10.0.1.7/32, 248 more"), "{found}");
    }

    #[test]
    fn small_subnets_have_no_broadcast_address() {
        let of = |net: &str| broadcast(net.parse().unwrap());
        assert_eq!(of("10.0.0.1/24"), Some([10, 0, 0, 255]));
        assert_eq!(of("10.0.0.1/30"), Some([10, 0, 0, 3]));
        assert_eq!((of("10.0.0.1/31"), of("10.0.0.1/32")), (None, None));
    }
}
