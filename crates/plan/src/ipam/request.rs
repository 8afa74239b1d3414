//! Requests for addresses, and why they fail.

use std::{collections::BTreeMap, net::IpAddr};

use ipnet::IpNet;

use super::{AddressInfo, BlockGrid, Family, Grant, Lease, PodRef};
use crate::bridge::Uid;

/// A request for the addresses of an attachment.
#[derive(Debug, Clone)]
pub struct AddressRequest<'a> {
    /// The lease to fill, without addresses.
    pub lease: Lease,
    pub grids: &'a [BlockGrid],
    /// The UIDs of this node's IPBlocks that the API server is known to have, by name. No other block serves addresses.
    pub confirmed: &'a BTreeMap<String, Uid>,
    /// The addresses that the pod requires, at most one per family. The prefix length is that of the subnet, or the full
    /// length if the pod gave none.
    pub requested: &'a [IpNet],
}

/// Why a request gets no lease now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Shortage {
    /// This node has no free address of these families.
    Families(Vec<Family>),
    /// The requested address is in no open block of this node.
    Address(IpAddr),
    Rejected(AllocationError),
}

/// Why a request is invalid or conflicts with another lease.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AllocationError {
    #[error("address {0} is in no subnet of the network: request one that is, or none")]
    OutsideSubnets(IpAddr),
    #[error(
        "address {0} is reserved: it is excluded, a gateway, or the first or last address of its subnet; request another"
    )]
    Reserved(IpAddr),
    #[error(
        "address {address} is requested with prefix length /{requested}, but its subnet {subnet} has /{has}: request \
        {address}/{has}, or {address} without a length", has = subnet.prefix_len()
    )]
    PrefixLength { address: IpAddr, requested: u8, subnet: IpNet },
    #[error("two addresses of one family are requested, {0} and {1}: request at most one per family")]
    SameFamily(IpAddr, IpAddr),
    #[error("address {address} is in use by pod {namespace}/{name}", namespace = pod.namespace, name = pod.name)]
    InUse { address: IpAddr, pod: PodRef },
    #[error("address {0} is lent to another node and may be in use there")]
    Lent(IpAddr),
    #[error("the interface already has {} of this network, not {requested}: delete the pod first", list(.current))]
    OtherAddress { current: Vec<IpAddr>, requested: IpAddr },
}

fn list(addresses: &[IpAddr]) -> String {
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// The grant of a repeated request. If the ledger has no record of the earlier CNI result, it follows the current subnets.
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

/// Whether a pod may request these addresses.
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

/// Whether the prefix length is that of the subnet. The full length means a bare address.
fn check_length(requested_net: IpNet, subnet: IpNet) -> Result<(), AllocationError> {
    let length = requested_net.prefix_len();
    if length == requested_net.max_prefix_len() || length == subnet.prefix_len() {
        return Ok(());
    }
    Err(AllocationError::PrefixLength { address: requested_net.addr(), requested: length, subnet })
}
