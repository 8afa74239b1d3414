//! When a holder acquires a block, which one, and why it gets none.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Instant,
};

use api::{digest::digest, ipblock::HolderRef};
use ipnet::IpNet;

use super::{
    BlockGrid, BlockKey, BlockPlanInput, BlockStep, Family, Ledger, ObservedIpBlock, Pool, Stage,
    limits::{EXHAUSTED_TTL, UNANSWERED_CREATE_TTL},
};
use crate::bridge::Uid;

/// Why a holder gets no block or address now. The message is for the pod that waits.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AcquireError {
    #[error(
        "network {network:?} has no free {family} address left: add a subnet to spec.ipam.subnets of the BridgeNetwork, or \
        delete pods that use it{hint}"
    )]
    Exhausted { network: String, family: Family, hint: ExhaustedHint },
    #[error("address blocks of an earlier network {network:?} are still being deleted; the kubelet retries")]
    NameReused { network: String },
    #[error(
        "address {address} of network {network:?} is in a block that {state}, so it may be in use: request another"
    )]
    BlockClosed { address: IpAddr, network: String, state: &'static str },
    #[error("address {address} of network {network:?} belongs to {}", holder_or_another(.holder.as_ref()))]
    BelongsTo { address: IpAddr, network: String, holder: Option<HolderRef> },
    #[error("address {address} of network {network:?} is lent to{}", with_space(.holder.as_ref()))]
    LentTo { address: IpAddr, network: String, holder: Option<HolderRef> },
    #[error("address {address} of network {network:?} is in use on {holder}")]
    InUse { address: IpAddr, network: String, holder: HolderRef },
    #[error(
        "{holder} holds the block of address {address} of network {network:?} and does not answer: check the node, or delete \
        its Node if it is gone for good"
    )]
    Silent { address: IpAddr, network: String, holder: HolderRef },
    #[error(
        "{holder} holds the block of address {address} of network {network:?} and lends no addresses: request another address"
    )]
    NotLent { address: IpAddr, network: String, holder: HolderRef },
}

/// Who may have free addresses of a network that is exhausted for this holder.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExhaustedHint {
    /// The name of a node that does not answer.
    pub silent_node: Option<String>,
    /// A holder that is not a Node: it lends no addresses.
    pub other_holder: Option<HolderRef>,
}

impl std::fmt::Display for ExhaustedHint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(node) = &self.silent_node {
            write!(
                f,
                "; node {node} may have free addresses and does not answer: check the node, or delete its Node if it is gone \
                for good"
            )?;
        }
        if let Some(holder) = &self.other_holder {
            write!(f, "; {holder} holds blocks of the network and lends no addresses")?;
        }
        Ok(())
    }
}

fn holder_or_another(holder: Option<&HolderRef>) -> String {
    holder.map_or_else(|| "another node".to_owned(), ToString::to_string)
}

fn with_space(holder: Option<&HolderRef>) -> String {
    holder.map_or_else(String::new, |holder| format!(" {holder}"))
}

/// What a holder does about a requested address whose block it does not hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AddressSource {
    /// Borrow it.
    Lender(HolderRef),
    /// The block was released a moment ago: acquire the block.
    Released,
    Unavailable(AcquireError),
}

/// Where a holder can get a requested address.
#[derive(Debug, Clone, Copy)]
pub struct RequestedAddress<'a> {
    /// The UID of the network.
    pub network: &'a str,
    /// The name of the network.
    pub name: &'a str,
    pub address: IpAddr,
    /// The block that the address is in.
    pub block: &'a BlockKey,
}

impl RequestedAddress<'_> {
    /// Fails if this holder has the block and cannot allocate from it.
    pub fn check_own_block(&self, ledger: &Ledger) -> Result<(), AcquireError> {
        let state = match ledger.holding_of(self.network, self.address).map(|(_, holding)| holding.stage) {
            Some(Stage::Lost) => "this node has lost",
            Some(Stage::Unverified) => "is unverified",
            None | Some(Stage::Acquiring | Stage::Open | Stage::Releasing) => return Ok(()),
        };
        Err(AcquireError::BlockClosed { address: self.address, network: self.name.to_owned(), state })
    }

    /// What to do if another holder has the block. `enclosing` is the IPBlock of the block, if it exists; `may_borrow` is
    /// false if the address was refused a moment ago or this holder has the block.
    pub fn source(&self, enclosing: Option<&ObservedIpBlock>, may_borrow: bool) -> AddressSource {
        let (address, network) = (self.address, self.name.to_owned());
        if enclosing.is_some_and(|enclosing| enclosing.spec.network_uid != self.network) {
            return AddressSource::Unavailable(AcquireError::NameReused { network });
        }
        let holder = enclosing.map(|enclosing| enclosing.spec.holder.clone());
        if self.block.is_single() || !may_borrow {
            return AddressSource::Unavailable(AcquireError::BelongsTo { address, network, holder });
        }
        match holder {
            None => AddressSource::Released,
            Some(holder) if !holder.is_node() => {
                AddressSource::Unavailable(AcquireError::NotLent { address, network, holder })
            }
            Some(holder) => AddressSource::Lender(holder),
        }
    }
}

/// Where a holder searches for a free block, and the networks that have none.
#[derive(Debug, Default)]
pub struct BlockSearch {
    /// Ranges that other holders were seen to have, by the UID of the network.
    taken: BTreeMap<Uid, BTreeSet<IpNet>>,
    /// Until when a network is assumed to have no free block.
    exhausted: BTreeMap<(Uid, Family), Instant>,
    /// The UIDs of networks for whose name blocks of an earlier network still exist.
    reused_names: BTreeSet<Uid>,
    /// Varies the choice of blocks and addresses.
    attempts: u64,
}

/// How a search for a block starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SearchStart {
    /// With a guess, and without a list of the blocks.
    Guess,
    /// With a list of the blocks.
    List,
    /// Not now.
    Skip,
}

/// What a holder does if a network has no free block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoFreeBlock {
    /// Blocks of an earlier network of this name are being deleted: the network is not exhausted.
    NameReused,
    /// Borrow single addresses.
    Borrow,
    /// No ADD waits, and a reserve is not borrowed.
    Wait,
}

impl BlockSearch {
    /// Forgets deleted networks.
    pub fn retain_networks(&mut self, exists: impl Fn(&str) -> bool) {
        self.taken.retain(|uid, _| exists(uid));
        self.reused_names.retain(|uid| exists(uid));
    }

    pub fn expire(&mut self, now: Instant) {
        self.exhausted.retain(|_, until| *until > now);
    }

    /// The networks that have no free block.
    pub fn exhausted(&self) -> BTreeSet<(Uid, Family)> {
        self.exhausted.keys().cloned().collect()
    }

    /// How to start. `waiting`: whether an ADD waits. `contended`: whether this holder backs off from other borrowers.
    pub fn start(&self, key: &(Uid, Family), waiting: bool, contended: bool) -> SearchStart {
        if !self.exhausted.contains_key(key) {
            SearchStart::Guess
        } else if !waiting || contended {
            SearchStart::Skip
        } else {
            SearchStart::List
        }
    }

    /// The blocks of this network in a complete list of the blocks of its name. Blocks of a deleted network of this name
    /// occupy names too.
    pub fn observe_list(&mut self, network: &str, mut all: Vec<ObservedIpBlock>) -> Vec<ObservedIpBlock> {
        self.taken.insert(network.to_owned(), all.iter().map(|object| object.spec.cidr).collect());
        let count = all.len();
        all.retain(|object| object.spec.network_uid == network);
        if all.len() < count {
            self.reused_names.insert(network.to_owned());
        } else {
            self.reused_names.remove(network);
        }
        all
    }

    pub fn mark_taken(&mut self, network: &str, range: IpNet) {
        self.taken.entry(network.to_owned()).or_default().insert(range);
    }

    /// A block that is not known to be taken. Holders start their search at different blocks.
    pub fn next_block(
        &mut self,
        holder: &HolderRef,
        network: &str,
        grid: &BlockGrid,
        ledger: &Ledger,
    ) -> Option<IpNet> {
        let start = self.next_seed(holder, network);
        let held: BTreeSet<IpNet> = ledger.holdings_of(network).map(|(block, _)| block.range).collect();
        let taken = self.taken.get(network);
        grid.free_block(u128::from(start), |range| {
            held.contains(&range) || taken.is_some_and(|taken| taken.contains(&range))
        })
    }

    /// A number that differs between holders and from the one before.
    pub fn next_seed(&mut self, holder: &HolderRef, network: &str) -> u64 {
        self.attempts += 1;
        self.seed(holder, network)
    }

    /// A number that differs between holders.
    pub fn seed(&self, holder: &HolderRef, network: &str) -> u64 {
        digest([holder.uid.as_str(), network, &self.attempts.to_string()])
    }

    /// Records that a search found no free block.
    pub fn found_none(&mut self, key: &(Uid, Family), waiting: bool, now: Instant) -> NoFreeBlock {
        if waiting && self.reused_names.contains(&key.0) {
            self.exhausted.remove(key);
            return NoFreeBlock::NameReused;
        }
        self.exhausted.insert(key.clone(), now + EXHAUSTED_TTL);
        if waiting { NoFreeBlock::Borrow } else { NoFreeBlock::Wait }
    }
}

/// Blocks whose create request was not answered: the API server may still process it.
#[derive(Debug, Default)]
pub struct UnansweredCreates(BTreeMap<BlockKey, Instant>);

impl UnansweredCreates {
    pub fn expire(&mut self, now: Instant) {
        self.0.retain(|_, at| *at + UNANSWERED_CREATE_TTL > now);
    }

    pub fn insert(&mut self, block: BlockKey, now: Instant) {
        self.0.insert(block, now);
    }

    pub fn remove(&mut self, block: &BlockKey) {
        self.0.remove(block);
    }

    /// Whether the IPBlock may still be created.
    pub fn is_pending(&self, block: &BlockKey, now: Instant) -> bool {
        self.0.get(block).is_some_and(|at| *at + UNANSWERED_CREATE_TTL > now)
    }

    /// When each of them counts as not created.
    pub fn deadlines(&self) -> impl Iterator<Item = Instant> {
        self.0.values().map(|at| *at + UNANSWERED_CREATE_TTL)
    }
}

/// How many free addresses a holder keeps before it acquires another block.
pub(super) fn reserve(ledger: &Ledger, network: &str, grid: &BlockGrid) -> usize {
    let mut used = ledger.holdings_of(network).filter(|(block, _)| is_of_family(block, grid));
    if !used.any(|(block, _)| ledger.used(block).next().is_some()) {
        return 0;
    }
    (grid.block_size() / 4).max(1)
}

pub(super) fn is_of_family(block: &BlockKey, grid: &BlockGrid) -> bool {
    Family::of(block.range.addr()) == grid.family()
}

/// Acquires blocks for the ADDs that wait and for the reserve.
pub(super) fn acquire(
    ledger: &Ledger,
    input: BlockPlanInput<'_>,
    network: &str,
    pool: &Pool,
) -> Vec<BlockStep> {
    let mut steps = Vec::new();
    for grid in pool.grids.iter().filter(|_| pool.active) {
        let key = (network.to_owned(), grid.family());
        let waiting = input.pending.any.get(&key).copied().unwrap_or(0);
        let all = || ledger.holdings_of(network).filter(|(block, _)| is_of_family(block, grid));
        let free: usize = all().map(|(block, _)| ledger.free_count(block, grid)).sum();
        let acquiring = all().filter(|(_, holding)| holding.stage == Stage::Acquiring);
        let incoming: usize =
            acquiring.map(|(block, _)| if block.is_single() { 1 } else { grid.block_size() }).sum();
        let exhausted = input.exhausted.contains(&key);
        // No reserve is borrowed.
        let wanted = waiting + if exhausted { 0 } else { reserve(ledger, network, grid) };
        let missing = wanted.saturating_sub(free.saturating_add(incoming));
        if missing > 0 {
            steps.push(BlockStep::Acquire { network: network.to_owned(), family: grid.family(), missing });
        }
    }
    let addresses = input.pending.addresses.iter().filter(|(uid, _)| uid == network);
    for (_, address) in addresses.filter(|_| pool.active) {
        // An address in an open, acquiring or releasing block needs no step. For an unverified or lost block, the step
        // reports why the address is not available.
        let stage = ledger.holding_of(network, *address).map(|(_, holding)| holding.stage);
        if matches!(stage, None | Some(Stage::Unverified | Stage::Lost)) {
            steps.push(BlockStep::AcquireAddress { network: network.to_owned(), address: *address });
        }
    }
    steps
}
