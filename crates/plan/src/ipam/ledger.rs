//! The ledger of one node: the blocks that it holds, and who has which address.
//!
//! It changes by [`LedgerRecord`]s only, so a journal of them is all that has to be kept. A record that does not fit changes
//! nothing: whatever a disk may bring back, there is a ledger.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use api::ipblock;
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::{
    AddressRequest, AllocationError, BlockGrid, Family, Shortage,
    request::{repeat, validate},
};
use crate::bridge::Uid;

/// A range of a network.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct BlockKey {
    /// The UID of the network.
    pub network: Uid,
    pub range: IpNet,
}

impl BlockKey {
    /// Whether it is one address, which may be a part of somebody else's block.
    pub fn is_single(&self) -> bool {
        self.range.prefix_len() == self.range.max_prefix_len()
    }
}

/// An interface of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct AttachmentKey {
    pub container: String,
    pub interface: String,
}

/// Whose sandbox it is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodRef {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

/// Addresses of an interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    #[serde(rename = "place")]
    pub key: AttachmentKey,
    pub pod: PodRef,
    /// The UID of the network.
    pub network: Uid,
    /// The name of the configuration that asked.
    pub config: String,
    /// The boot of the node in which it was made: none of its sandboxes outlives it.
    pub boot: String,
    /// When it was made, in seconds since that boot.
    pub since: i64,
    pub addresses: Vec<IpAddr>,
}

/// What a pod is told about one of its addresses, for as long as it has it: whatever becomes of the subnet meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddressInfo {
    /// The address with the length of its subnet.
    pub net: IpNet,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<IpAddr>,
}

/// A lease with what the pod is told about it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    #[serde(flatten)]
    pub lease: Lease,
    /// Nothing in journals of the time before it was kept.
    #[serde(rename = "told", default)]
    pub infos: Vec<AddressInfo>,
}

impl Grant {
    /// What was told about an address.
    pub fn info(&self, address: IpAddr) -> Option<AddressInfo> {
        self.infos.iter().find(|info| info.net.addr() == address).copied()
    }
}

/// How a block stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// It is being made: perhaps it is there, perhaps it will never be.
    #[serde(rename = "Asked")]
    Acquiring,
    /// Addresses are handed out of it.
    Open,
    /// It is being given back.
    #[serde(rename = "Closing")]
    Releasing,
    /// It is not there any more, or not as it was.
    Lost,
    /// It is this node's, and it is not known which of its addresses are in use.
    #[serde(rename = "Doubtful")]
    Unverified,
}

/// A block that this node holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holding {
    /// The name of the network.
    pub network: String,
    pub stage: Stage,
    /// The UID of the object, once it is known.
    pub object: Option<Uid>,
    /// Where the next search for a free address begins.
    pub next: Option<IpAddr>,
    /// Single addresses that others hand out, each with the UID of the object that asked for it.
    pub lent: BTreeMap<IpAddr, Uid>,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum LedgerRecord {
    /// The object of a block is about to be created.
    #[serde(rename = "asked")]
    Acquiring {
        block: BlockKey,
        network: String,
    },
    /// The block is held, and this is its object.
    #[serde(rename = "took")]
    Acquired {
        block: BlockKey,
        object: Uid,
    },
    /// The same, but nobody knows which of its addresses are in use.
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
    /// It is held no more.
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
    /// The node was started. What sandboxes had before is free, known or not.
    Booted(String),
    /// Something that happened before may not be known: the journal was lost, or is damaged. Holds until [`Self::Complete`],
    /// however often the daemon is started meanwhile.
    #[serde(rename = "unsure")]
    Incomplete,
    /// All blocks of this node are known again, if only as doubtful.
    #[serde(rename = "sure")]
    Complete,
    /// A holding as it stood when the journal was written anew.
    Holding {
        block: BlockKey,
        holding: Holding,
    },
}

/// All that one node knows about addresses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ledger {
    /// The boot of the node that was last seen; empty if none was.
    boot: String,
    /// Whether this node may hold blocks that are not known here.
    incomplete: bool,
    holdings: BTreeMap<BlockKey, Holding>,
    leases: BTreeMap<AttachmentKey, Lease>,
    /// What those who have addresses were told about them, as far as that is known.
    infos: BTreeMap<AttachmentKey, Vec<AddressInfo>>,
    /// Who has an address, by the network's UID.
    owners: BTreeMap<Uid, BTreeMap<IpAddr, AttachmentKey>>,
}

impl Ledger {
    pub fn holdings(&self) -> &BTreeMap<BlockKey, Holding> {
        &self.holdings
    }

    /// The boot of the node that was last seen.
    pub fn boot(&self) -> &str {
        &self.boot
    }

    /// Whether all blocks of this node are known here: nothing was ever handed out of another one.
    pub fn is_complete(&self) -> bool {
        !self.incomplete
    }

    pub fn leases(&self) -> &BTreeMap<AttachmentKey, Lease> {
        &self.leases
    }

    /// What an interface has, and was told about it.
    pub fn grant(&self, key: &AttachmentKey) -> Option<Grant> {
        let lease = self.leases.get(key)?.clone();
        Some(Grant { lease, infos: self.infos.get(key).cloned().unwrap_or_default() })
    }

    /// The addresses of a block that pods of this node have.
    pub fn used(&self, block: &BlockKey) -> impl Iterator<Item = (IpAddr, &AttachmentKey)> {
        let owners = self.owners.get(&block.network).into_iter();
        let range = block.range.network()..=block.range.broadcast();
        owners.flat_map(move |owners| owners.range(range.clone())).map(|(address, key)| (*address, key))
    }

    /// Whether nobody has anything of a block.
    pub fn is_empty(&self, block: &BlockKey) -> bool {
        self.used(block).next().is_none()
            && self.holdings.get(block).is_none_or(|holding| holding.lent.is_empty())
    }

    /// What becomes of a block that is asked for in vain. One that was asked for again while a pod has of it keeps its
    /// object: as long as it is there, no other node gets the address.
    pub fn abandon(&self, block: &BlockKey) -> LedgerRecord {
        let block = block.clone();
        if self.is_empty(&block) { LedgerRecord::Releasing { block } } else { LedgerRecord::Lost { block } }
    }

    /// The holding that an address is in: a single one before the block around it.
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

    /// How many addresses of a block can be handed out now.
    pub fn free_count(&self, block: &BlockKey, grid: &BlockGrid) -> usize {
        let Some(holding) = self.holdings.get(block).filter(|holding| holding.stage == Stage::Open) else {
            return 0;
        };
        let all = usize::try_from(grid.addresses_in(block.range)).unwrap_or(usize::MAX);
        let used = self.used(block).filter(|(address, _)| grid.contains(*address)).count();
        let lent = holding.lent.keys().filter(|address| grid.contains(**address)).count();
        all.saturating_sub(used).saturating_sub(lent)
    }

    /// The lease that a pod gets. Asked again for the same interface it is the same, and the same is told.
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
        let owner = self.owners.get(&lease.network).and_then(|owners| owners.get(&address));
        if let Some(owner) = owner.filter(|owner| **owner != lease.key) {
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

    /// Borrowed ones first: they are of no use otherwise. Then the block with the fewest left, so that others become empty.
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
        let owners = self.owners.get(network);
        let taken = |address: IpAddr| {
            holding.lent.contains_key(&address) || owners.is_some_and(|owners| owners.contains_key(&address))
        };
        grid.free_in(block.range, holding.next, taken)
    }

    /// The leases of sandboxes that an earlier boot of the node had.
    pub fn leases_of_other_boots(&self, boot: &str) -> Vec<AttachmentKey> {
        let other = |lease: &&Lease| !same_boot(&lease.boot, boot);
        self.leases.values().filter(other).map(|lease| lease.key.clone()).collect()
    }

    /// The leases of sandboxes that are not there, but for young ones: a sandbox is listed a little after it has its
    /// addresses.
    pub fn leases_without_sandbox(&self, live: &BTreeSet<String>, before: i64) -> Vec<AttachmentKey> {
        let dead = |lease: &&Lease| lease.since < before && !live.contains(&lease.key.container);
        self.leases.values().filter(dead).map(|lease| lease.key.clone()).collect()
    }

    /// The leases of a configuration of a network, but for these places.
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
                self.set_holding(block, network, Stage::Acquiring, None)
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
        // What was lent stays lent, whatever becomes of the object.
        let lent = self.holdings.remove(block).map(|old| old.lent).unwrap_or_default();
        self.holdings.insert(block.clone(), Holding { lent, ..holding });
    }

    /// Nobody can have anything that is not known: all who could are gone. What is doubtful is as good as just asked for;
    /// a borrowed address may never have been lent.
    fn apply_boot(&mut self, boot: &str) {
        if !same_boot(&self.boot, boot) {
            let unverified = self.holdings.values_mut().filter(|holding| holding.stage == Stage::Unverified);
            unverified.for_each(|holding| holding.stage = Stage::Acquiring);
        }
        boot.clone_into(&mut self.boot);
    }

    fn set_stage(&mut self, block: &BlockKey, stage: Stage) {
        if let Some(holding) = self.holdings.get_mut(block) {
            holding.stage = stage;
        }
    }

    fn apply_lease(&mut self, grant: &Grant) {
        let Grant { lease, infos } = grant;
        // One interface, one lease: what it had before is gone.
        self.apply_free(&lease.key);
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
        self.leases.insert(lease.key.clone(), lease.clone());
        if !infos.is_empty() {
            self.infos.insert(lease.key.clone(), infos.clone());
        }
    }

    fn apply_free(&mut self, key: &AttachmentKey) {
        self.infos.remove(key);
        let Some(lease) = self.leases.remove(key) else { return };
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

    /// How many records it takes to make this ledger.
    pub fn record_count(&self) -> usize {
        self.holdings.len() + self.leases.len()
    }

    /// Records that make this ledger out of an empty one.
    pub fn records(&self) -> impl Iterator<Item = LedgerRecord> {
        // Leases first: each of them moves the place where the next search begins.
        let boot = (!self.boot.is_empty()).then(|| LedgerRecord::Booted(self.boot.clone()));
        let leases = self.leases.keys().filter_map(|key| self.grant(key)).map(LedgerRecord::Leased);
        let holding = |(block, holding): (&BlockKey, &Holding)| LedgerRecord::Holding {
            block: block.clone(),
            holding: holding.clone(),
        };
        let incomplete = self.incomplete.then_some(LedgerRecord::Incomplete);
        boot.into_iter().chain(incomplete).chain(leases).chain(self.holdings.iter().map(holding))
    }
}

impl Lease {
    /// Whether two are of one sandbox, interface and network.
    fn is_same_attachment(&self, other: &Self) -> bool {
        let same_pod = self.pod.uid.is_empty() || other.pod.uid.is_empty() || self.pod.uid == other.pod.uid;
        let same_boot = same_boot(&self.boot, &other.boot);
        self.key == other.key && self.network == other.network && same_boot && same_pod
    }
}

impl Holding {
    /// Whether addresses are handed out of it: the API server must be known to have just this object.
    fn serves(&self, block: &BlockKey, confirmed: &BTreeMap<String, Uid>) -> bool {
        let observed = || confirmed.get(&ipblock::name(&self.network, block.range));
        self.stage == Stage::Open && self.object.is_some() && observed() == self.object.as_ref()
    }
}

/// A boot that nobody knows is not another one.
fn same_boot(boot: &str, other: &str) -> bool {
    boot == other || boot.is_empty() || other.is_empty()
}

/// The address after this one, around the end.
pub fn next_address(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(four) => IpAddr::V4(four.to_bits().wrapping_add(1).into()),
        IpAddr::V6(six) => IpAddr::V6(six.to_bits().wrapping_add(1).into()),
    }
}
