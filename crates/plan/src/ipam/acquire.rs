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
    #[error(
        "address blocks of an earlier network {network:?} still exist and cover these addresses; the pod starts once they are gone: \
        see their holders in `kubectl get ipblocks`"
    )]
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
        "{holder} holds the block of address {address} of network {network:?} and does not answer: {}", remedy(.holder)
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
    /// A holder that does not answer.
    pub silent: Option<Box<HolderRef>>,
    /// A holder that lends no addresses.
    pub other_holder: Option<HolderRef>,
}

impl std::fmt::Display for ExhaustedHint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(holder) = &self.silent {
            write!(f, "; {holder} may have free addresses and does not answer: {}", remedy(holder))?;
        }
        if let Some(holder) = &self.other_holder {
            write!(f, "; {holder} holds blocks of the network and lends no addresses")?;
        }
        Ok(())
    }
}

/// What to do about a holder that does not answer.
fn remedy(holder: &HolderRef) -> &'static str {
    if holder.is_node() {
        "check the node, or delete its Node if it is gone for good"
    } else {
        "check that the patchbay controller runs"
    }
}

fn holder_or_another(holder: Option<&HolderRef>) -> String {
    holder.map_or_else(|| "another node".to_owned(), ToString::to_string)
}

fn with_space(holder: Option<&HolderRef>) -> String {
    holder.map_or_else(String::new, |holder| format!(" {holder}"))
}

/// Whether two ranges have a common address.
pub fn overlap(one: IpNet, other: IpNet) -> bool {
    one.contains(&other) || other.contains(&one)
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
            Some(holder) if !holder.lends() => {
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
    /// The blocks of earlier networks of the name that still exist, by the UID of the network. An earlier network gets no new
    /// ones, so one list finds all of them. Without a list there is no entry.
    former: BTreeMap<Uid, BTreeSet<IpNet>>,
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
        self.former.retain(|uid, _| exists(uid));
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
            if self.is_listed(&key.0) { SearchStart::Guess } else { SearchStart::List }
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
        let former = all.extract_if(.., |object| object.spec.network_uid != network);
        self.former.insert(network.to_owned(), former.map(|object| object.spec.cidr).collect());
        all
    }

    /// Whether [`Self::is_shadowed`] is known.
    pub fn is_listed(&self, network: &str) -> bool {
        self.former.contains_key(network)
    }

    /// Whether a block of an earlier network of the name has addresses of a range. It can have another length, so the names do
    /// not always conflict.
    pub fn is_shadowed(&self, network: &str, range: IpNet) -> bool {
        self.former.get(network).is_some_and(|former| former.iter().any(|one| overlap(*one, range)))
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
            held.contains(&range)
                || taken.is_some_and(|taken| taken.contains(&range))
                || self.is_shadowed(network, range)
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
        if waiting && self.former.get(&key.0).is_some_and(|former| !former.is_empty()) {
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{
        super::tests::{block, claims, grid, ip, ipam, me, net, not_lending, observed, other},
        *,
    };

    fn key() -> (Uid, Family) {
        ("net".to_owned(), Family::V4)
    }

    #[test]
    fn holders_search_at_different_blocks_and_skip_taken_and_held_ones() {
        let grid = grid(&ipam(&["10.0.0.0/24"], &[], &[]));
        let first = |holder: &HolderRef| {
            BlockSearch::default().next_block(holder, "net", &grid, &Ledger::default()).unwrap()
        };
        assert_eq!(first(&me()), first(&me()), "without attempts between, the choice is the same");
        assert_ne!(first(&me()), first(&other()));
        let mut search = BlockSearch::default();
        let mut found = BTreeSet::new();
        while let Some(range) = search.next_block(&claims(), "net", &grid, &Ledger::default()) {
            assert!(found.insert(range), "{range} is taken");
            search.mark_taken("net", range);
        }
        assert_eq!(found.len(), 16, "every block is found by any kind of holder");
        // A list replaces what was seen before.
        search.observe_list("net", vec![observed("10.0.0.0/28", "1", other())]);
        let mut ledger = Ledger::default();
        for number in 2..16_u32 {
            let range = format!("10.0.0.{}/28", number * 16);
            ledger.apply(&super::super::LedgerRecord::Acquiring {
                block: block(&range),
                network: "blue".to_owned(),
            });
        }
        assert_eq!(search.next_block(&me(), "net", &grid, &ledger), Some(net("10.0.0.16/28")));
    }

    #[test]
    fn an_exhausted_network_is_searched_again_for_waiting_adds_or_later() {
        let (mut search, now) = (BlockSearch::default(), Instant::now());
        assert_eq!(
            search.start(&key(), false, false),
            SearchStart::List,
            "blocks of an earlier network may exist"
        );
        search.observe_list("net", Vec::new());
        assert_eq!(search.start(&key(), false, false), SearchStart::Guess);
        assert_eq!(search.found_none(&key(), false, now), NoFreeBlock::Wait);
        assert_eq!(search.exhausted(), BTreeSet::from([key()]));
        assert_eq!(search.start(&key(), false, false), SearchStart::Skip, "no reserve is borrowed");
        assert_eq!(search.start(&key(), true, true), SearchStart::Skip, "other borrowers are ahead");
        assert_eq!(search.start(&key(), true, false), SearchStart::List);
        assert_eq!(search.found_none(&key(), true, now), NoFreeBlock::Borrow);
        search.expire(now + EXHAUSTED_TTL);
        assert_eq!(search.start(&key(), false, false), SearchStart::Guess);
    }

    #[test]
    fn blocks_of_an_earlier_network_of_the_name_take_ranges_but_do_not_exhaust_the_network() {
        let (mut search, now) = (BlockSearch::default(), Instant::now());
        let mut old = observed("10.0.0.0/28", "1", other());
        old.spec.network_uid = "earlier".to_owned();
        let listed = search.observe_list("net", vec![old, observed("10.0.0.16/28", "2", other())]);
        assert_eq!(listed.iter().map(|one| one.uid.as_str()).collect::<Vec<_>>(), ["2"]);
        assert_eq!(search.found_none(&key(), true, now), NoFreeBlock::NameReused);
        assert!(search.exhausted().is_empty());
        search.observe_list("net", listed);
        assert_eq!(search.found_none(&key(), true, now), NoFreeBlock::Borrow);
        search.retain_networks(|_| false);
        assert_eq!(search.start(&key(), false, false), SearchStart::Skip);
    }

    /// A subnet was added after the length of the blocks was chosen, so the names of the blocks do not conflict.
    #[test]
    fn no_block_overlaps_one_of_an_earlier_network_of_the_name() {
        let grid = grid(&ipam(&["10.0.0.0/24"], &[], &[]));
        for (former, free) in [("10.0.0.4/30", 15), ("10.0.0.0/27", 14), ("10.0.0.0/23", 0)] {
            let mut search = BlockSearch::default();
            let mut old = observed(former, "1", other());
            old.spec.network_uid = "earlier".to_owned();
            search.observe_list("net", vec![old]);
            let mut found = 0;
            while let Some(range) = search.next_block(&me(), "net", &grid, &Ledger::default()) {
                assert!(range.prefix_len() == 28 && !overlap(range, net(former)), "{range} {former}");
                search.mark_taken("net", range);
                found += 1;
            }
            assert_eq!(found, free, "{former}");
            assert!(search.is_shadowed("net", net("10.0.0.0/28")));
        }
    }

    #[test]
    fn a_requested_address_is_borrowed_from_holders_that_lend() {
        let (whole, address) = (block("10.0.0.0/28"), ip("10.0.0.3"));
        let requested = RequestedAddress { network: "net", name: "blue", address, block: &whole };
        let source =
            |holder, may_borrow| requested.source(Some(&observed("10.0.0.0/28", "1", holder)), may_borrow);
        for lender in [other(), claims()] {
            assert_eq!(source(lender.clone(), true), AddressSource::Lender(lender));
        }
        assert_eq!(requested.source(None, true), AddressSource::Released);
        let text = |source| match source {
            AddressSource::Unavailable(error) => error.to_string(),
            source => panic!("{source:?}"),
        };
        assert_eq!(
            text(source(not_lending(), true)),
            "other/holder holds the block of address 10.0.0.3 of network \"blue\" and lends no addresses: request \
            another address"
        );
        assert_eq!(text(source(other(), false)), "address 10.0.0.3 of network \"blue\" belongs to node b");
        assert_eq!(
            text(requested.source(None, false)),
            "address 10.0.0.3 of network \"blue\" belongs to another node"
        );
        let mut earlier = observed("10.0.0.0/28", "1", other());
        earlier.spec.network_uid = "earlier".to_owned();
        assert!(text(requested.source(Some(&earlier), true)).contains("an earlier network \"blue\""));
        let single = block("10.0.0.3/32");
        let requested = RequestedAddress { block: &single, ..requested };
        let only = observed("10.0.0.3/32", "1", claims());
        assert!(text(requested.source(Some(&only), true)).ends_with("belongs to ipamclaims/patchbay"));
    }

    #[test]
    fn an_unanswered_create_is_pending_until_the_api_server_cannot_process_it_any_more() {
        let (mut creates, now) = (UnansweredCreates::default(), Instant::now());
        creates.insert(block("10.0.0.0/28"), now);
        let last = now + UNANSWERED_CREATE_TTL.saturating_sub(Duration::from_millis(1));
        assert!(creates.is_pending(&block("10.0.0.0/28"), last));
        assert!(!creates.is_pending(&block("10.0.0.16/28"), last));
        assert_eq!(creates.deadlines().collect::<Vec<_>>(), [now + UNANSWERED_CREATE_TTL]);
        creates.expire(now + UNANSWERED_CREATE_TTL);
        assert_eq!(creates.deadlines().count(), 0);
    }
}
