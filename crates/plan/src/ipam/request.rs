//! What a pod asks for, and why it does not get it.

use std::{collections::BTreeMap, net::IpAddr};

use ipnet::IpNet;

use super::{AddressInfo, BlockGrid, Family, Grant, Lease, PodRef};
use crate::bridge::Uid;

/// What a pod asks for.
#[derive(Debug, Clone)]
pub struct AddressRequest<'a> {
    /// The lease as it should become, without addresses.
    pub lease: Lease,
    pub grids: &'a [BlockGrid],
    /// The UIDs of this node's blocks that the API server is known to have, by their name. No other gives anything.
    pub confirmed: &'a BTreeMap<String, Uid>,
    /// Addresses that it must be, at most one of a family. The length is that of the subnet, or the full one if nobody
    /// said any.
    pub requested: &'a [IpNet],
}

/// Why there is no lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Shortage {
    /// No address of these families is at hand.
    Families(Vec<Family>),
    /// This address was asked for, and it is not in a block of this node.
    Address(IpAddr),
    Rejected(AllocationError),
}

/// Why there will be no lease.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AllocationError {
    #[error("address {0} is in no subnet of the network: ask for one that is, or for none")]
    OutsideSubnets(IpAddr),
    #[error(
        "address {0} is not given to pods: it is excluded, a gateway, or the first or last one of its subnet"
    )]
    Reserved(IpAddr),
    #[error(
        "address {address} is asked for with length /{requested}, but its subnet {subnet} has /{has}: ask for \
        {address}/{has}, or for {address} without a length", has = subnet.prefix_len()
    )]
    PrefixLength { address: IpAddr, requested: u8, subnet: IpNet },
    #[error("two addresses of one family are asked for, {0} and {1}: a pod gets one of each")]
    SameFamily(IpAddr, IpAddr),
    #[error("address {address} is in use by pod {namespace}/{name}", namespace = pod.namespace, name = pod.name)]
    InUse { address: IpAddr, pod: PodRef },
    #[error("address {0} is lent to another node, whose pods may have it")]
    Lent(IpAddr),
    #[error("the interface already has {} of this network, and not {requested}: delete it first", list(.current))]
    OtherAddress { current: Vec<IpAddr>, requested: IpAddr },
}

fn list(addresses: &[IpAddr]) -> String {
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// What an interface has that asks again. What it was told nobody may remember; then it is told what holds today.
pub fn repeat(before: Grant, grids: &[BlockGrid], requested: &[IpNet]) -> Result<Grant, AllocationError> {
    for requested_net in requested {
        let address = requested_net.addr();
        if !before.lease.addresses.contains(&address) {
            return Err(AllocationError::OtherAddress {
                current: before.lease.addresses,
                requested: address,
            });
        }
        if let Some(info) = before.info(address) {
            check_length(*requested_net, info.net.trunc())?;
        }
    }
    let info_today = |address: IpAddr| {
        let grid = grids.iter().find(|grid| grid.family() == Family::of(address));
        grid.map_or(AddressInfo { net: address.into(), gateway: None }, |grid| grid.address_info(address))
    };
    let addresses = before.lease.addresses.iter();
    let infos =
        addresses.map(|address| before.info(*address).unwrap_or_else(|| info_today(*address))).collect();
    Ok(Grant { infos, ..before })
}

/// Whether these can be had at all.
pub fn validate(requested: &[IpNet], grids: &[BlockGrid]) -> Result<(), AllocationError> {
    for (number, requested_net) in requested.iter().enumerate() {
        let address = requested_net.addr();
        let same = |other: &&IpNet| other.addr().is_ipv4() == address.is_ipv4();
        if let Some(other) = requested.iter().take(number).find(same) {
            return Err(AllocationError::SameFamily(other.addr(), address));
        }
        let Some(subnet) = grids.iter().find_map(|grid| grid.subnet_of(address)) else {
            return Err(AllocationError::OutsideSubnets(address));
        };
        check_length(*requested_net, subnet)?;
        if !grids.iter().any(|grid| grid.contains(address)) {
            return Err(AllocationError::Reserved(address));
        }
    }
    Ok(())
}

/// Whether an address is asked for as it is in its subnet. The full length is what those write who mean an address alone.
fn check_length(requested_net: IpNet, subnet: IpNet) -> Result<(), AllocationError> {
    let length = requested_net.prefix_len();
    if length == requested_net.max_prefix_len() || length == subnet.prefix_len() {
        return Ok(());
    }
    Err(AllocationError::PrefixLength { address: requested_net.addr(), requested: length, subnet })
}
