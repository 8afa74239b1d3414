//! The ledger of one node: the blocks that it holds, and the addresses that its pods have.
//!
//! Only [`LedgerRecord`]s change it, so a journal of them restores it. A record that does not apply changes nothing: any
//! sequence of records yields a ledger.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use api::ipblock;
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::{
    AddressRequest, AllocationError, BlockGrid, Family, LeaseClaim, Shortage, Timings,
    claimed::ClaimedAddresses,
    request::{repeat, validate},
};
use crate::bridge::Uid;

/// The identity of a block: its network and its range.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct BlockKey {
    /// The UID of the network.
    pub network: Uid,
    pub range: IpNet,
}

impl BlockKey {
    /// Whether it is a single address, which may lie in the block of another node.
    pub fn is_single(&self) -> bool {
        self.range.prefix_len() == self.range.max_prefix_len()
    }
}

/// The identity of an attachment: an interface of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct AttachmentKey {
    pub container: String,
    pub interface: String,
}

/// The pod that a sandbox belongs to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodRef {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

/// The addresses of an attachment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    #[serde(rename = "place")]
    pub key: AttachmentKey,
    pub pod: PodRef,
    /// The UID of the network.
    pub network: Uid,
    /// The name of the CNI configuration that requested them.
    pub config: String,
    /// The boot ID of the node at allocation. No sandbox survives a reboot.
    pub boot: String,
    /// When it was allocated, in seconds since that boot.
    pub since: i64,
    pub addresses: Vec<IpAddr>,
    /// None if the addresses are of a block of this node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<LeaseClaim>,
}

/// What the CNI result says about an address. It stays the same for the life of the lease, even if the subnet changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddressInfo {
    /// The address with the prefix length of its subnet.
    pub net: IpNet,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<IpAddr>,
}

/// A lease with what the CNI result says about its addresses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    #[serde(flatten)]
    pub lease: Lease,
    /// Empty in journals of versions that did not record it.
    #[serde(rename = "told", default)]
    pub infos: Vec<AddressInfo>,
}

impl Grant {
    pub fn info(&self, address: IpAddr) -> Option<AddressInfo> {
        self.infos.iter().find(|info| info.net.addr() == address).copied()
    }
}

/// The lifecycle of a block on this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// The create request is journaled; the IPBlock may or may not exist.
    #[serde(rename = "Asked")]
    Acquiring,
    /// Pods get addresses from it.
    Open,
    /// Its IPBlock is being deleted.
    #[serde(rename = "Closing")]
    Releasing,
    /// Its IPBlock is gone or has another holder.
    Lost,
    /// This node holds it and does not know which of its addresses are in use.
    #[serde(rename = "Doubtful")]
    Unverified,
}

/// A block that this node holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holding {
    /// The name of the network.
    pub network: String,
    pub stage: Stage,
    /// The UID of the IPBlock, once known.
    pub object: Option<Uid>,
    /// Where the next search for a free address starts.
    pub next: Option<IpAddr>,
    /// Addresses lent to other nodes, each with the UID of the borrower's IPBlock.
    pub lent: BTreeMap<IpAddr, Uid>,
}

/// A change of the ledger. The journal stores these, so their serialized form must not change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum LedgerRecord {
    /// The daemon is about to create the IPBlock.
    #[serde(rename = "asked")]
    Acquiring {
        block: BlockKey,
        network: String,
    },
    /// This node holds the block under this IPBlock.
    #[serde(rename = "took")]
    Acquired {
        block: BlockKey,
        object: Uid,
    },
    /// This node holds the block and does not know which of its addresses are in use.
    #[serde(rename = "doubted")]
    Unverified {
        block: BlockKey,
        network: String,
        object: Uid,
    },
    #[serde(rename = "closing")]
    Releasing {
        block: BlockKey,
    },
    Lost {
        block: BlockKey,
    },
    /// This node no longer holds the block.
    Dropped {
        block: BlockKey,
    },
    Lent {
        block: BlockKey,
        address: IpAddr,
        object: Uid,
    },
    Returned {
        block: BlockKey,
        address: IpAddr,
    },
    Leased(Grant),
    Freed(AttachmentKey),
    /// The node booted: no earlier sandbox exists any more, whether the ledger knows it or not. An empty boot ID means that
    /// earlier records are damaged: the boot and leases of claims may be among the lost ones.
    Booted(String),
    /// Earlier records may be missing: the journal was lost or is damaged. Holds across restarts until
    /// [`Self::Complete`].
    #[serde(rename = "unsure")]
    Incomplete,
    /// The ledger knows all blocks of this node again, some perhaps as unverified.
    #[serde(rename = "sure")]
    Complete,
    /// A holding at the time the journal was compacted.
    Holding {
        block: BlockKey,
        holding: Holding,
    },
}

/// All blocks and leases of one node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ledger {
    /// The last boot ID; empty if unknown.
    boot: String,
    /// Whether this node may hold blocks that the ledger does not know.
    incomplete: bool,
    /// Whether attachments of this boot may have addresses of claims that the ledger does not know.
    lacks_claims: bool,
    holdings: BTreeMap<BlockKey, Holding>,
    leases: BTreeMap<AttachmentKey, Lease>,
    /// What CNI results said about leased addresses, where recorded.
    infos: BTreeMap<AttachmentKey, Vec<AddressInfo>>,
    /// The attachment that has each address, by the network's UID.
    owners: BTreeMap<Uid, BTreeMap<IpAddr, AttachmentKey>>,
    /// The attachments that have addresses of claims.
    claimed: ClaimedAddresses,
}

impl Ledger {
    pub fn holdings(&self) -> &BTreeMap<BlockKey, Holding> {
        &self.holdings
    }

    /// The last boot ID; empty if unknown.
    pub fn boot(&self) -> &str {
        &self.boot
    }

    /// Whether the ledger knows all blocks of this node: no pod has an address from any other block.
    pub fn is_complete(&self) -> bool {
        !self.incomplete
    }

    /// Whether attachments may have addresses of claims that the ledger does not know.
    pub(super) fn may_lack_claims(&self) -> bool {
        self.lacks_claims
    }

    pub(super) fn claimed(&self) -> &ClaimedAddresses {
        &self.claimed
    }

    pub fn leases(&self) -> &BTreeMap<AttachmentKey, Lease> {
        &self.leases
    }

    /// The lease of an attachment, with what its CNI result said.
    pub fn grant(&self, key: &AttachmentKey) -> Option<Grant> {
        let lease = self.leases.get(key)?.clone();
        Some(Grant { lease, infos: self.infos.get(key).cloned().unwrap_or_default() })
    }

    fn owner(&self, network: &str, address: IpAddr) -> Option<&AttachmentKey> {
        self.owners.get(network)?.get(&address)
    }

    /// The attachments of this node that have an address: one that owns it, or those of a claim.
    pub(super) fn holders(&self, network: &str, address: IpAddr) -> impl Iterator<Item = &AttachmentKey> {
        self.owner(network, address).into_iter().chain(self.claimed.keys(network, address))
    }

    /// Whether an address of a holding is lent, or a pod of this node has it.
    pub(super) fn is_taken(&self, network: &str, holding: &Holding, address: IpAddr) -> bool {
        holding.lent.contains_key(&address) || self.holders(network, address).next().is_some()
    }

    /// The addresses of a block that pods of this node own; those of claims belong to the claims allocator.
    pub fn used(&self, block: &BlockKey) -> impl Iterator<Item = (IpAddr, &AttachmentKey)> {
        let owners = self.owners.get(&block.network).into_iter();
        let range = block.range.network()..=block.range.broadcast();
        owners.flat_map(move |owners| owners.range(range.clone())).map(|(address, key)| (*address, key))
    }

    /// Whether no pod uses an address of the block and none is lent.
    pub fn is_empty(&self, block: &BlockKey) -> bool {
        self.used(block).next().is_none()
            && self.holdings.get(block).is_none_or(|holding| holding.lent.is_empty())
    }

    /// The record that abandons the acquisition of a block. A block in use keeps its IPBlock, so that no other node gets
    /// its addresses.
    pub fn abandon(&self, block: &BlockKey) -> LedgerRecord {
        let block = block.clone();
        if self.is_empty(&block) { LedgerRecord::Releasing { block } } else { LedgerRecord::Lost { block } }
    }

    /// The most specific holding that contains an address: a single address before its enclosing block.
    pub fn holding_of(&self, network: &str, address: IpAddr) -> Option<(&BlockKey, &Holding)> {
        let mut all = self.holdings_of(network).filter(|(block, _)| block.range.contains(&address));
        let first = all.next()?;
        Some(all.fold(
            first,
            |best, next| {
                if next.0.range.prefix_len() > best.0.range.prefix_len() { next } else { best }
            },
        ))
    }

    /// The holdings of a network.
    pub fn holdings_of(&self, network: &str) -> impl Iterator<Item = (&BlockKey, &Holding)> {
        let first = BlockKey { network: network.to_owned(), range: IpNet::default() };
        let network = network.to_owned();
        self.holdings.range(first..).take_while(move |(block, _)| block.network == network)
    }

    /// How many addresses of a block can be allocated now.
    pub fn free_count(&self, block: &BlockKey, grid: &BlockGrid) -> usize {
        let Some(holding) = self.holdings.get(block).filter(|holding| holding.stage == Stage::Open) else {
            return 0;
        };
        let all = usize::try_from(grid.addresses_in(block.range)).unwrap_or(usize::MAX);
        let used = self.used(block).filter(|(address, _)| grid.contains(*address)).count();
        let lent = holding.lent.keys().filter(|address| grid.contains(**address)).count();
        // A pod of this node can still have the address of a claim that is gone.
        let claimed = self.claimed.in_block(block).filter(|address| {
            let counted =
                holding.lent.contains_key(address) || self.owner(&block.network, *address).is_some();
            grid.contains(*address) && !counted
        });
        all.saturating_sub(used).saturating_sub(lent).saturating_sub(claimed.count())
    }

    /// The lease that a request gets. A repeated request for the same attachment gets the same grant.
    pub fn offer(&self, request: AddressRequest<'_>) -> Result<Grant, Shortage> {
        let AddressRequest { mut lease, grids, confirmed, requested } = request;
        if let Some(before) = self.grant(&lease.key).filter(|grant| grant.lease.is_same_attachment(&lease)) {
            return repeat(before, grids, requested).map_err(Shortage::Rejected);
        }
        validate(requested, grids).map_err(Shortage::Rejected)?;
        let (mut infos, mut missing) = (Vec::new(), Vec::new());
        for grid in grids {
            let family = grid.family();
            let found = match requested.iter().map(IpNet::addr).find(|address| Family::of(*address) == family)
            {
                Some(address) => Some(self.offer_requested(&lease, address, confirmed)?),
                None => self.offer_any(&lease.network, grid, confirmed),
            };
            match found {
                Some(address) => {
                    lease.addresses.push(address);
                    infos.push(grid.address_info(address));
                }
                None => missing.push(family),
            }
        }
        if missing.is_empty() { Ok(Grant { lease, infos }) } else { Err(Shortage::Families(missing)) }
    }

    fn offer_requested(
        &self,
        lease: &Lease,
        address: IpAddr,
        confirmed: &BTreeMap<String, Uid>,
    ) -> Result<IpAddr, Shortage> {
        let mut others = self.holders(&lease.network, address).filter(|owner| **owner != lease.key);
        if let Some(owner) = others.next() {
            let pod = self.leases.get(owner).map(|lease| lease.pod.clone()).unwrap_or_default();
            return Err(Shortage::Rejected(AllocationError::InUse { address, pod }));
        }
        match self.holding_of(&lease.network, address) {
            Some((_, holding)) if holding.lent.contains_key(&address) => {
                Err(Shortage::Rejected(AllocationError::Lent(address)))
            }
            Some((block, holding)) if holding.serves(block, confirmed) => Ok(address),
            _ => Err(Shortage::Address(address)),
        }
    }

    /// Prefers borrowed addresses, which serve no other purpose, then the fullest block, so that others become empty.
    fn offer_any(
        &self,
        network: &str,
        grid: &BlockGrid,
        confirmed: &BTreeMap<String, Uid>,
    ) -> Option<IpAddr> {
        let ours = |block: &BlockKey| Family::of(block.range.addr()) == grid.family();
        let open = self
            .holdings_of(network)
            .filter(|(block, holding)| holding.serves(block, confirmed) && ours(block));
        let mut open: Vec<_> =
            open.map(|(block, holding)| (self.free_count(block, grid), block, holding)).collect();
        open.retain(|(free, ..)| *free > 0);
        let (_, block, holding) =
            open.into_iter().min_by_key(|(free, block, _)| (!block.is_single(), *free))?;
        grid.free_in(block.range, holding.next, |address| self.is_taken(&block.network, holding, address))
    }

    /// The leases of sandboxes from an earlier boot.
    pub fn leases_of_other_boots(&self, boot: &str) -> Vec<AttachmentKey> {
        let other = |lease: &&Lease| !same_boot(&lease.boot, boot);
        self.leases.values().filter(other).map(|lease| lease.key.clone()).collect()
    }

    /// The leases whose sandbox is not live. The runtime listed the sandboxes at `listed`, and lists one only some time after its
    /// ADD, so younger leases are kept. `is_closed` says whether the network of this UID is being deleted.
    pub fn leases_without_sandbox(
        &self,
        live: &BTreeSet<String>,
        listed: i64,
        timings: &Timings,
        is_closed: impl Fn(&str) -> bool,
    ) -> Vec<AttachmentKey> {
        let is_old = |lease: &Lease| {
            let closed = is_closed(&lease.network);
            let min_age = if closed { timings.min_closed_lease_age } else { timings.min_lease_age };
            lease.since < listed.saturating_sub(i64::try_from(min_age.as_secs()).unwrap_or(i64::MAX))
        };
        let dead = |lease: &&Lease| !live.contains(&lease.key.container) && is_old(lease);
        self.leases.values().filter(dead).map(|lease| lease.key.clone()).collect()
    }

    /// The leases of a network's CNI configuration that are not in `valid`.
    pub fn leases_outside(
        &self,
        network: &str,
        config: &str,
        valid: &BTreeSet<AttachmentKey>,
    ) -> Vec<AttachmentKey> {
        let of_config = |lease: &Lease| lease.config == config && lease.network == network;
        let other = |lease: &&Lease| of_config(lease) && !valid.contains(&lease.key);
        self.leases.values().filter(other).map(|lease| lease.key.clone()).collect()
    }

    pub fn apply(&mut self, record: &LedgerRecord) {
        match record {
            LedgerRecord::Acquiring { block, network } => {
                self.set_holding(block, network, Stage::Acquiring, None);
            }
            LedgerRecord::Acquired { block, object } => {
                if let Some(holding) = self.holdings.get_mut(block) {
                    (holding.stage, holding.object) = (Stage::Open, Some(object.clone()));
                }
            }
            LedgerRecord::Unverified { block, network, object } => {
                self.set_holding(block, network, Stage::Unverified, Some(object.clone()));
            }
            LedgerRecord::Releasing { block } => self.set_stage(block, Stage::Releasing),
            LedgerRecord::Lost { block } => self.set_stage(block, Stage::Lost),
            LedgerRecord::Dropped { block } => _ = self.holdings.remove(block),
            LedgerRecord::Lent { block, address, object } => {
                if let Some(holding) = self.holdings.get_mut(block) {
                    holding.lent.insert(*address, object.clone());
                }
            }
            LedgerRecord::Returned { block, address } => {
                if let Some(holding) = self.holdings.get_mut(block) {
                    holding.lent.remove(address);
                }
            }
            LedgerRecord::Leased(grant) => self.apply_lease(grant),
            LedgerRecord::Freed(key) => self.apply_free(key),
            LedgerRecord::Booted(boot) => self.apply_boot(boot),
            LedgerRecord::Incomplete => self.incomplete = true,
            LedgerRecord::Complete => self.incomplete = false,
            LedgerRecord::Holding { block, holding } => {
                self.holdings.insert(block.clone(), holding.clone());
            }
        }
    }

    fn set_holding(&mut self, block: &BlockKey, network: &str, stage: Stage, object: Option<Uid>) {
        let holding =
            Holding { network: network.to_owned(), stage, object, next: None, lent: BTreeMap::new() };
        // Lent addresses stay lent when the IPBlock changes.
        let lent = self.holdings.remove(block).map(|old| old.lent).unwrap_or_default();
        self.holdings.insert(block.clone(), Holding { lent, ..holding });
    }

    /// After a reboot no sandbox with an unknown address is left. An unverified block goes back to `Acquiring` and not to
    /// `Open`, because a borrowed address may never have been lent.
    fn apply_boot(&mut self, boot: &str) {
        if !same_boot(&self.boot, boot) {
            let unverified = self.holdings.values_mut().filter(|holding| holding.stage == Stage::Unverified);
            unverified.for_each(|holding| holding.stage = Stage::Acquiring);
            self.lacks_claims = false;
        }
        self.lacks_claims |= boot.is_empty();
        boot.clone_into(&mut self.boot);
    }

    fn set_stage(&mut self, block: &BlockKey, stage: Stage) {
        if let Some(holding) = self.holdings.get_mut(block) {
            holding.stage = stage;
        }
    }

    fn apply_lease(&mut self, grant: &Grant) {
        let Grant { lease, infos } = grant;
        // An attachment has one lease; the new one replaces the old one.
        self.apply_free(&lease.key);
        self.leases.insert(lease.key.clone(), lease.clone());
        if !infos.is_empty() {
            self.infos.insert(lease.key.clone(), infos.clone());
        }
        if lease.claim.is_some() {
            return self.claimed.insert(lease);
        }
        let owners = self.owners.entry(lease.network.clone()).or_default();
        for address in &lease.addresses {
            owners.insert(*address, lease.key.clone());
        }
        for address in &lease.addresses {
            let block = self.holding_of(&lease.network, *address).map(|(block, _)| block.clone());
            if let Some(holding) = block.and_then(|block| self.holdings.get_mut(&block)) {
                holding.next = Some(next_address(*address));
            }
        }
    }

    fn apply_free(&mut self, key: &AttachmentKey) {
        self.infos.remove(key);
        let Some(lease) = self.leases.remove(key) else { return };
        if lease.claim.is_some() {
            return self.claimed.remove(&lease);
        }
        let Some(owners) = self.owners.get_mut(&lease.network) else { return };
        for address in &lease.addresses {
            if owners.get(address) == Some(key) {
                owners.remove(address);
            }
        }
        if owners.is_empty() {
            self.owners.remove(&lease.network);
        }
    }

    /// The records that restore this ledger from an empty one.
    pub fn records(&self) -> impl Iterator<Item = LedgerRecord> {
        // Leases before holdings: applying a lease moves `Holding::next`, which the holding then sets.
        let damaged = self.lacks_claims.then(|| LedgerRecord::Booted(String::new()));
        let boot = (!self.boot.is_empty()).then(|| LedgerRecord::Booted(self.boot.clone()));
        let leases = self.leases.keys().filter_map(|key| self.grant(key)).map(LedgerRecord::Leased);
        let holding = |(block, holding): (&BlockKey, &Holding)| LedgerRecord::Holding {
            block: block.clone(),
            holding: holding.clone(),
        };
        let incomplete = self.incomplete.then_some(LedgerRecord::Incomplete);
        damaged
            .into_iter()
            .chain(boot)
            .chain(incomplete)
            .chain(leases)
            .chain(self.holdings.iter().map(holding))
    }
}

impl Lease {
    /// Whether both belong to one sandbox, interface and network.
    pub(super) fn is_same_attachment(&self, other: &Self) -> bool {
        let same_pod = self.pod.uid.is_empty() || other.pod.uid.is_empty() || self.pod.uid == other.pod.uid;
        let same_boot = same_boot(&self.boot, &other.boot);
        self.key == other.key && self.network == other.network && same_boot && same_pod
    }
}

impl Holding {
    /// Whether pods get addresses from it: the API server must be known to have exactly this IPBlock.
    fn serves(&self, block: &BlockKey, confirmed: &BTreeMap<String, Uid>) -> bool {
        let observed = || confirmed.get(&ipblock::name(&self.network, block.range));
        self.stage == Stage::Open && self.object.is_some() && observed() == self.object.as_ref()
    }
}

/// An unknown boot ID matches every other.
fn same_boot(boot: &str, other: &str) -> bool {
    boot == other || boot.is_empty() || other.is_empty()
}

/// The next address, wrapping around.
pub fn next_address(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(four) => IpAddr::V4(four.to_bits().wrapping_add(1).into()),
        IpAddr::V6(six) => IpAddr::V6(six.to_bits().wrapping_add(1).into()),
    }
}
