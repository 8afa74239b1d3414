//! Leases of addresses that an IPAMClaim has. The address belongs to the claims allocator: several attachments of this node
//! can have it, none of them owns it, and the end of one releases nothing.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use serde::{Deserialize, Serialize};

use super::{AddressInfo, AllocationError, AttachmentKey, BlockKey, Grant, Lease, Ledger};
use crate::bridge::Uid;

/// The IPAMClaim that a lease serves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseClaim {
    pub uid: Uid,
    /// Its name in the namespace of the pod.
    pub name: String,
    /// Whether another live pod had the addresses when this attachment got them.
    #[serde(default)]
    pub shared: bool,
    /// The path of the pod's network namespace.
    #[serde(default)]
    pub netns: String,
}

/// The attachments that have each address of a claim, by the network's UID.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClaimedAddresses(BTreeMap<Uid, BTreeMap<IpAddr, BTreeSet<AttachmentKey>>>);

impl ClaimedAddresses {
    pub fn insert(&mut self, lease: &Lease) {
        let network = self.0.entry(lease.network.clone()).or_default();
        for address in &lease.addresses {
            network.entry(*address).or_default().insert(lease.key.clone());
        }
    }

    pub fn remove(&mut self, lease: &Lease) {
        let Some(network) = self.0.get_mut(&lease.network) else { return };
        for address in &lease.addresses {
            let Some(keys) = network.get_mut(address) else { continue };
            keys.remove(&lease.key);
            if keys.is_empty() {
                network.remove(address);
            }
        }
        if network.is_empty() {
            self.0.remove(&lease.network);
        }
    }

    /// The attachments that have an address.
    pub fn keys(&self, network: &str, address: IpAddr) -> impl Iterator<Item = &AttachmentKey> {
        self.0.get(network).and_then(|network| network.get(&address)).into_iter().flatten()
    }

    /// The addresses of each network, by its UID.
    pub fn by_network(&self) -> impl Iterator<Item = (&Uid, Vec<IpAddr>)> {
        self.0.iter().map(|(network, addresses)| (network, addresses.keys().copied().collect()))
    }

    /// The addresses in the range of a block.
    pub fn in_block(&self, block: &BlockKey) -> impl Iterator<Item = IpAddr> {
        let range = block.range.network()..=block.range.broadcast();
        let network = self.0.get(&block.network).into_iter();
        network.flat_map(move |addresses| addresses.range(range.clone())).map(|(address, _)| *address)
    }
}

impl Ledger {
    /// The lease of a claim's addresses, with what the CNI result says about them. A repeated request for the same attachment
    /// gets the same grant. On this node only attachments of one claim share an address.
    pub fn serve(&self, mut lease: Lease, infos: Vec<AddressInfo>) -> Result<Grant, AllocationError> {
        lease.addresses = infos.iter().map(|info| info.net.addr()).collect();
        let claim = |lease: &Lease| lease.claim.as_ref().map(|claim| claim.uid.clone());
        if let Some(before) = self.grant(&lease.key).filter(|grant| grant.lease.is_same_attachment(&lease)) {
            let has = &before.lease.addresses;
            let other = lease.addresses.iter().find(|address| !has.contains(address));
            return match other.or_else(|| lease.addresses.first()) {
                Some(&requested) if other.is_some() || claim(&before.lease) != claim(&lease) => {
                    Err(AllocationError::OtherAddress { current: has.clone(), requested })
                }
                _ => Ok(before),
            };
        }
        for address in &lease.addresses {
            let foreign = |key: &&AttachmentKey| {
                **key != lease.key && self.leases().get(*key).is_none_or(|held| claim(held) != claim(&lease))
            };
            let mut holders = self.holders(&lease.network, *address);
            if let Some(key) = holders.find(foreign) {
                let pod = self.leases().get(key).map(|held| held.pod.clone()).unwrap_or_default();
                return Err(AllocationError::InUse { address: *address, pod });
            }
        }
        Ok(Grant { lease, infos })
    }
}
