//! What a pod asks for, and why it does not get it.

use std::{collections::BTreeMap, net::IpAddr};

use ipnet::IpNet;

use super::{Family, Grant, Lease, Pod, Space, Told};
use crate::bridge::Uid;

/// What a pod asks for.
#[derive(Debug, Clone)]
pub struct Ask<'a> {
    /// The lease as it should become, without addresses.
    pub lease: Lease,
    pub spaces: &'a [Space],
    /// The UIDs of this node's blocks that the API server is known to have, by their name. No other gives anything.
    pub seen: &'a BTreeMap<String, Uid>,
    /// Addresses that it must be, at most one of a family. The length is that of the subnet, or the full one if nobody
    /// said any.
    pub requested: &'a [IpNet],
}

/// Why there is no lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lack {
    /// No address of these families is at hand.
    Families(Vec<Family>),
    /// This address was asked for, and it is not in a block of this node.
    Address(IpAddr),
    Refused(Refusal),
}

/// Why there will be no lease.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("address {0} is in no subnet of the network: ask for one that is, or for none")]
    Outside(IpAddr),
    #[error(
        "address {0} is not given to pods: it is excluded, a gateway, or the first or last one of its subnet"
    )]
    Reserved(IpAddr),
    #[error(
        "address {address} is asked for with length /{asked}, but its subnet {subnet} has /{has}: ask for \
        {address}/{has}, or for {address} without a length", has = subnet.prefix_len()
    )]
    Length { address: IpAddr, asked: u8, subnet: IpNet },
    #[error("two addresses of one family are asked for, {0} and {1}: a pod gets one of each")]
    Two(IpAddr, IpAddr),
    #[error("address {address} is in use by pod {namespace}/{name}", namespace = pod.namespace, name = pod.name)]
    Used { address: IpAddr, pod: Pod },
    #[error("address {0} is lent to another node, whose pods may have it")]
    Lent(IpAddr),
    #[error("the interface already has {} of this network, and not {asked}: delete it first", list(.has))]
    Other { has: Vec<IpAddr>, asked: IpAddr },
}

fn list(addresses: &[IpAddr]) -> String {
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// What an interface has that asks again. What it was told nobody may remember; then it is told what holds today.
pub fn again(before: Grant, spaces: &[Space], requested: &[IpNet]) -> Result<Grant, Refusal> {
    for asked in requested {
        let address = asked.addr();
        if !before.lease.addresses.contains(&address) {
            return Err(Refusal::Other { has: before.lease.addresses, asked: address });
        }
        if let Some(told) = before.told(address) {
            check_length(*asked, told.net.trunc())?;
        }
    }
    let today = |address: IpAddr| {
        let space = spaces.iter().find(|space| space.family() == Family::of(address));
        space.map_or(Told { net: address.into(), gateway: None }, |space| space.told(address))
    };
    let addresses = before.lease.addresses.iter();
    let told = addresses.map(|address| before.told(*address).unwrap_or_else(|| today(*address))).collect();
    Ok(Grant { told, ..before })
}

/// Whether these can be had at all.
pub fn check(requested: &[IpNet], spaces: &[Space]) -> Result<(), Refusal> {
    for (number, asked) in requested.iter().enumerate() {
        let address = asked.addr();
        let same = |other: &&IpNet| other.addr().is_ipv4() == address.is_ipv4();
        if let Some(other) = requested.iter().take(number).find(same) {
            return Err(Refusal::Two(other.addr(), address));
        }
        let Some(subnet) = spaces.iter().find_map(|space| space.subnet_of(address)) else {
            return Err(Refusal::Outside(address));
        };
        check_length(*asked, subnet)?;
        if !spaces.iter().any(|space| space.contains(address)) {
            return Err(Refusal::Reserved(address));
        }
    }
    Ok(())
}

/// Whether an address is asked for as it is in its subnet. The full length is what those write who mean an address alone.
fn check_length(asked: IpNet, subnet: IpNet) -> Result<(), Refusal> {
    let length = asked.prefix_len();
    if length == asked.max_prefix_len() || length == subnet.prefix_len() {
        return Ok(());
    }
    Err(Refusal::Length { address: asked.addr(), asked: length, subnet })
}
