//! Decides which blocks a node acquires, lends, reports and releases.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use super::{BlockGrid, BlockKey, Family, Holding, Ledger, LedgerRecord, Stage};
use crate::bridge::Uid;
use api::{
    IPBlockSpec, IPBlockStatus,
    ipam::{IpFamilyStatus, IpamSpec},
    ipblock::{self, LentAddress, MAX_DRAINING_PODS, MAX_SPARE_RANGES, MAX_STATUS_ADDRESSES, NodeRef},
};

/// An IPBlock, as last observed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedIpBlock {
    pub uid: Uid,
    pub spec: IPBlockSpec,
    pub status: IPBlockStatus,
}

/// The addresses that a network offers to pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    pub name: String,
    pub grids: Vec<BlockGrid>,
    pub routes: Vec<api::ipam::Route>,
    /// Whether pods can join the network; false while it is being deleted.
    pub active: bool,
}

impl Pool {
    /// The pool of a network with these block lengths. Leaves out a family whose block length is not known yet.
    pub fn new(name: &str, ipam: &IpamSpec, lengths: impl Fn(Family) -> Option<u8>, active: bool) -> Self {
        let grids = Family::ALL.iter().filter_map(|family| BlockGrid::new(ipam, *family, lengths(*family)?));
        Self { name: name.to_owned(), grids: grids.collect(), routes: ipam.routes.clone(), active }
    }

    pub fn grid(&self, family: Family) -> Option<&BlockGrid> {
        self.grids.iter().find(|grid| grid.family() == family)
    }
}

/// Addresses that waiting ADDs of this node need.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PendingRequests {
    /// How many ADDs wait for any address, by the UID of the network.
    pub any: BTreeMap<(Uid, Family), usize>,
    /// Specific addresses, with the UID of the network.
    pub addresses: BTreeSet<(Uid, IpAddr)>,
}

/// What [`plan`] decides from, besides the ledger.
#[derive(Debug, Clone, Copy)]
pub struct BlockPlanInput<'a> {
    /// This node.
    pub holder: &'a NodeRef,
    /// The boot ID of this node's machine; empty if unknown. `None` if the API server does not keep boot IDs.
    pub boot: Option<&'a str>,
    /// By UID; a network that is missing is deleted.
    pub networks: &'a BTreeMap<Uid, Arc<Pool>>,
    /// The IPBlocks that this node holds and those that borrow from it, by name.
    pub objects: &'a BTreeMap<String, ObservedIpBlock>,
    /// The enclosing block of each single address that this node borrows; `None` if it has no holder. A missing entry has
    /// not been read yet.
    pub lenders: &'a BTreeMap<BlockKey, Option<ObservedIpBlock>>,
    pub pending: &'a PendingRequests,
    /// The networks and families without a free block.
    pub exhausted: &'a BTreeSet<(Uid, Family)>,
    /// The blocks that have been empty long enough to be released.
    pub idle: &'a BTreeSet<BlockKey>,
    /// The blocks whose status was written a moment ago.
    pub reported: &'a BTreeSet<BlockKey>,
    /// The UIDs of IPBlocks whose borrowed address has been returned.
    pub returned: &'a BTreeSet<Uid>,
}

/// A step that the daemon applies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BlockStep {
    /// Journal this record.
    Record(LedgerRecord),
    /// Read the IPBlock of a block that the watch does not show.
    Lookup(BlockKey),
    /// Read the borrower's IPBlock of a lent address that the watch does not show.
    LookupLent { block: BlockKey, address: IpAddr, object: Uid },
    /// Delete the IPBlock if it has this UID.
    Delete { block: BlockKey, object: Uid },
    /// Write the current boot ID to the IPBlock if it has this UID. The daemon allocates nothing from a block that carries
    /// another boot ID.
    UpdateBoot { block: BlockKey, object: Uid },
    /// Write the status of the IPBlock.
    UpdateStatus { block: BlockKey, object: Uid, status: IPBlockStatus },
    /// Acquire a block, or borrow `missing` addresses if no block is free.
    Acquire { network: Uid, family: Family, missing: usize },
    /// Acquire the block of an address, or borrow the address.
    AcquireAddress { network: Uid, address: IpAddr },
}

/// The kind of API request that a step needs. The API server may reject one kind and accept another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RequestKind {
    Lookup,
    Delete,
    UpdateBoot,
    UpdateStatus,
    Acquire,
}

impl BlockStep {
    /// The UID of the network and the kind of API request; `None` for a record.
    pub fn request_kind(&self) -> Option<(&str, RequestKind)> {
        match self {
            Self::Record(_) => None,
            Self::Lookup(block) | Self::LookupLent { block, .. } => {
                Some((&block.network, RequestKind::Lookup))
            }
            Self::Delete { block, .. } => Some((&block.network, RequestKind::Delete)),
            Self::UpdateBoot { block, .. } => Some((&block.network, RequestKind::UpdateBoot)),
            Self::UpdateStatus { block, .. } => Some((&block.network, RequestKind::UpdateStatus)),
            Self::Acquire { network, .. } | Self::AcquireAddress { network, .. } => {
                Some((network, RequestKind::Acquire))
            }
        }
    }
}

/// Plans the next steps. If any is a record, the caller applies it and plans again before it does anything else.
pub fn plan(ledger: &Ledger, input: BlockPlanInput<'_>) -> Vec<BlockStep> {
    // Lent addresses are recorded before their block serves any pod.
    let mut steps = record_unknown_blocks(ledger, input);
    if steps.is_empty() && !ledger.is_complete() {
        steps.push(BlockStep::Record(LedgerRecord::Complete));
    }
    for (block, holding) in ledger.holdings() {
        steps.extend(plan_holding(ledger, input, block, holding));
    }
    steps.extend(plan_lending(ledger, input));
    if steps.iter().any(|step| matches!(step, BlockStep::Record(_))) {
        return steps;
    }
    for (block, holding) in ledger.holdings() {
        steps.extend(update_boot(input, block, holding));
    }
    steps.extend(lookup_lent(ledger, input));
    for (network, pool) in input.networks {
        steps.extend(release_idle(ledger, input, network, pool));
        steps.extend(acquire(ledger, input, network, pool));
    }
    for (block, holding) in ledger.holdings() {
        steps.extend(report_status(ledger, input, block, holding));
    }
    steps
}

/// Whether the holder may allocate from a block that the API server has, as far as boots are concerned.
///
/// A block that carries no boot ID may be used: if its journal is lost, all of its addresses count as in use. A block that
/// carries the ID of another boot may not: if the journal were lost now, the addresses of this boot would count as free.
pub fn carries_boot(object: &ObservedIpBlock, boot: &str) -> bool {
    object.spec.boot_id.is_empty() || object.spec.boot_id == boot
}

/// Whether the holder has allocated nothing from a block since its machine booted.
fn is_of_another_boot(object: &ObservedIpBlock, boot: Option<&str>) -> bool {
    boot.is_some_and(|boot| !boot.is_empty() && !carries_boot(object, boot))
}

/// Marks an open block with the current boot. The journal has it as open before, so whatever the daemon allocates from it
/// in this boot is recorded or, if the journal is lost, protected by the mark.
fn update_boot(input: BlockPlanInput<'_>, block: &BlockKey, holding: &Holding) -> Option<BlockStep> {
    let object = object(input, block, holding).filter(|_| holding.stage == Stage::Open)?;
    let outdated = input.boot.is_some_and(|boot| object.spec.boot_id != boot);
    outdated.then(|| BlockStep::UpdateBoot { block: block.clone(), object: object.uid.clone() })
}

/// The IPBlock of a block, if this node holds it.
fn object<'a>(input: BlockPlanInput<'a>, block: &BlockKey, holding: &Holding) -> Option<&'a ObservedIpBlock> {
    let object = input.objects.get(&ipblock::name(&holding.network, block.range))?;
    let ours = object.spec.network_uid == block.network && object.spec.holder.uid == input.holder.uid;
    ours.then_some(object)
}

fn plan_holding(
    ledger: &Ledger,
    input: BlockPlanInput<'_>,
    block: &BlockKey,
    holding: &Holding,
) -> Option<BlockStep> {
    let found = object(input, block, holding);
    let acquired = |object: &ObservedIpBlock| {
        BlockStep::Record(LedgerRecord::Acquired { block: block.clone(), object: object.uid.clone() })
    };
    match (holding.stage, found) {
        // The network no longer serves addresses of this family, so the request to the lender is moot.
        (Stage::Acquiring, Some(object)) if object.spec.lender.is_some() && !is_in_service(input, block) => {
            Some(BlockStep::Record(ledger.abandon(block)))
        }
        (Stage::Acquiring, Some(object)) => match lending_answer(input, block, object) {
            LendingAnswer::Granted => Some(acquired(object)),
            LendingAnswer::Refused => Some(BlockStep::Record(ledger.abandon(block))),
            LendingAnswer::Pending => None,
        },
        (Stage::Open, Some(object)) if holding.object.as_ref() != Some(&object.uid) => {
            // A new IPBlock of a borrowed address is a new request, which the lender has to answer.
            let network = holding.network.clone();
            let reacquire = || BlockStep::Record(LedgerRecord::Acquiring { block: block.clone(), network });
            Some(if object.spec.lender.is_some() { reacquire() } else { acquired(object) })
        }
        (Stage::Lost, Some(object)) if object.spec.lender.is_none() => Some(acquired(object)),
        (Stage::Releasing, Some(object)) => {
            Some(BlockStep::Delete { block: block.clone(), object: object.uid.clone() })
        }
        (Stage::Releasing, None) => Some(BlockStep::Record(LedgerRecord::Dropped { block: block.clone() })),
        (Stage::Lost, _) if ledger.is_empty(block) => {
            Some(BlockStep::Record(LedgerRecord::Dropped { block: block.clone() }))
        }
        (Stage::Acquiring | Stage::Open | Stage::Unverified, None) => Some(BlockStep::Lookup(block.clone())),
        (Stage::Open | Stage::Unverified, Some(_))
            if !input.networks.contains_key(&block.network)
                && ledger.is_empty(block)
                // Pods may use addresses of an unverified block that the ledger does not know.
                && (holding.stage == Stage::Open || input.idle.contains(block)) =>
        {
            Some(BlockStep::Record(LedgerRecord::Releasing { block: block.clone() }))
        }
        (Stage::Open | Stage::Lost | Stage::Unverified, _) => None,
    }
}

/// Whether the network still serves addresses of the block's family.
fn is_in_service(input: BlockPlanInput<'_>, block: &BlockKey) -> bool {
    let pool = input.networks.get(&block.network).filter(|pool| pool.active);
    pool.is_some_and(|pool| pool.grid(Family::of(block.range.addr())).is_some())
}

/// How the lender answered a borrow request.
enum LendingAnswer {
    Granted,
    Refused,
    Pending,
}

/// Whether this node may use a block that it acquires. A whole block is granted by its IPBlock alone.
fn lending_answer(input: BlockPlanInput<'_>, block: &BlockKey, object: &ObservedIpBlock) -> LendingAnswer {
    let Some(lender) = &object.spec.lender else { return LendingAnswer::Granted };
    let enclosing = match input.lenders.get(block) {
        None => return LendingAnswer::Pending,
        // The enclosing block has no holder now; the next attempt finds out who acquires it.
        Some(None) => return LendingAnswer::Refused,
        Some(Some(enclosing)) => enclosing,
    };
    if enclosing.spec.network_uid != block.network || enclosing.spec.holder.uid != lender.uid {
        return LendingAnswer::Refused;
    }
    let address = block.range.addr();
    if enclosing.status.lent.iter().any(|lent| lent.address == address && lent.block == object.uid) {
        return LendingAnswer::Granted;
    }
    if enclosing.status.refused.contains(&object.uid) {
        LendingAnswer::Refused
    } else {
        LendingAnswer::Pending
    }
}

/// Records IPBlocks of this node that the ledger does not know.
fn record_unknown_blocks(ledger: &Ledger, input: BlockPlanInput<'_>) -> Vec<BlockStep> {
    let ours = input.objects.values().filter(|object| object.spec.holder.uid == input.holder.uid);
    let blocks = ours.map(|object| {
        let block = BlockKey { network: object.spec.network_uid.clone(), range: object.spec.cidr };
        (block, object)
    });
    let mut steps = Vec::new();
    for (block, object) in blocks {
        let network = object.spec.network.clone();
        match ledger.holdings().get(&block) {
            // All pods that had addresses of it ended with the boot that the block carries.
            Some(holding) if holding.stage == Stage::Unverified && is_of_another_boot(object, input.boot) => {
                steps.push(BlockStep::Record(LedgerRecord::Acquiring { block, network }));
            }
            // What its status says is lent is lent, whatever the journal has forgotten: after a boot, the journal may come
            // from a backup of the disk.
            Some(holding)
                if matches!(holding.stage, Stage::Unverified | Stage::Acquiring)
                    || (holding.stage == Stage::Open && is_of_another_boot(object, input.boot)) =>
            {
                let new = |lent: &&LentAddress| {
                    !holding.lent.contains_key(&lent.address) && !input.returned.contains(&lent.block)
                };
                let lent = object.status.lent.iter().filter(new);
                steps.extend(lent.map(|lent| {
                    let (block, address, object) = (block.clone(), lent.address, lent.block.clone());
                    BlockStep::Record(LedgerRecord::Lent { block, address, object })
                }));
            }
            Some(_) => {}
            // A create request that had been abandoned succeeded after all. Such a block lends nothing; one that does has
            // been used, and the journal is older than the block.
            None if ledger.is_complete() && object.status.lent.is_empty() => {
                steps.push(BlockStep::Record(LedgerRecord::Acquiring { block: block.clone(), network }));
                steps.push(BlockStep::Record(LedgerRecord::Releasing { block }));
            }
            None if is_of_another_boot(object, input.boot) => {
                steps.push(BlockStep::Record(LedgerRecord::Acquiring { block, network }));
            }
            None => steps.push(BlockStep::Record(LedgerRecord::Unverified {
                block,
                network,
                object: object.uid.clone(),
            })),
        }
    }
    steps
}

/// Looks up lent addresses whose borrower IPBlock the watch does not show. The borrower may have returned them, or the
/// IPBlock may carry the label of an earlier Node of this name.
fn lookup_lent(ledger: &Ledger, input: BlockPlanInput<'_>) -> Vec<BlockStep> {
    let present: BTreeSet<&Uid> = input.objects.values().map(|object| &object.uid).collect();
    let mut steps = Vec::new();
    for (block, holding) in ledger.holdings() {
        let unseen = holding.lent.iter().filter(|(_, object)| !present.contains(object));
        steps.extend(unseen.map(|(address, object)| BlockStep::LookupLent {
            block: block.clone(),
            address: *address,
            object: object.clone(),
        }));
    }
    steps
}

/// The IPBlocks of other nodes that borrow an address from this node.
fn lending_requests(input: BlockPlanInput<'_>) -> impl Iterator<Item = &ObservedIpBlock> {
    input.objects.values().filter(|object| {
        let is_request = object.spec.lender.as_ref().is_some_and(|lender| lender.uid == input.holder.uid);
        is_request && object.spec.cidr.prefix_len() == object.spec.cidr.max_prefix_len()
    })
}

/// The block of this node that contains the address of a borrow request.
fn enclosing_holding<'a>(
    ledger: &'a Ledger,
    request: &ObservedIpBlock,
) -> Option<(&'a BlockKey, &'a Holding)> {
    let found = ledger.holding_of(&request.spec.network_uid, request.spec.cidr.addr());
    found.filter(|(block, _)| !block.is_single())
}

fn plan_lending(ledger: &Ledger, input: BlockPlanInput<'_>) -> Vec<BlockStep> {
    let mut steps = Vec::new();
    let mut granted = BTreeSet::new();
    for request in lending_requests(input) {
        let address = request.spec.cidr.addr();
        let Some((block, holding)) = enclosing_holding(ledger, request) else { continue };
        if may_lend(ledger, block, holding, address) && granted.insert((block, address)) {
            let (block, object) = (block.clone(), request.uid.clone());
            steps.push(BlockStep::Record(LedgerRecord::Lent { block, address, object }));
        }
    }
    steps
}

fn may_lend(ledger: &Ledger, block: &BlockKey, holding: &Holding, address: IpAddr) -> bool {
    let used = ledger.used(block).any(|(used, _)| used == address);
    holding.stage == Stage::Open
        && !used
        && !holding.lent.contains_key(&address)
        && holding.lent.len() < MAX_STATUS_ADDRESSES
}

/// How many free addresses a node keeps before it acquires another block.
fn reserve(ledger: &Ledger, network: &str, grid: &BlockGrid) -> usize {
    let mut used = ledger.holdings_of(network).filter(|(block, _)| is_of_family(block, grid));
    if !used.any(|(block, _)| ledger.used(block).next().is_some()) {
        return 0;
    }
    (grid.block_size() / 4).max(1)
}

fn is_of_family(block: &BlockKey, grid: &BlockGrid) -> bool {
    Family::of(block.range.addr()) == grid.family()
}

/// Releases idle blocks that can be spared, one at a time.
fn release_idle(ledger: &Ledger, input: BlockPlanInput<'_>, network: &str, pool: &Pool) -> Option<BlockStep> {
    let idle = |block: &&BlockKey| input.idle.contains(*block) && ledger.is_empty(block);
    let releasable = |holding: &Holding| matches!(holding.stage, Stage::Open | Stage::Unverified);
    let mut blocks =
        ledger.holdings_of(network).filter(|(_, holding)| releasable(holding)).map(|(block, _)| block);
    let block = blocks.find(|block| idle(block) && can_spare(ledger, input, network, pool, block))?;
    Some(BlockStep::Record(LedgerRecord::Releasing { block: block.clone() }))
}

/// Whether the other blocks have enough free addresses.
fn can_spare(
    ledger: &Ledger,
    input: BlockPlanInput<'_>,
    network: &str,
    pool: &Pool,
    block: &BlockKey,
) -> bool {
    let family = Family::of(block.range.addr());
    let Some(grid) = pool.grid(family).filter(|_| pool.active) else { return true };
    if input.pending.any.contains_key(&(network.to_owned(), family)) {
        return false;
    }
    // No reserve is borrowed: another node may need this address.
    if block.is_single() && grid.block_size() > 1 {
        return true;
    }
    let others =
        ledger.holdings_of(network).filter(|(other, _)| *other != block && is_of_family(other, grid));
    let free: usize = others.map(|(other, _)| ledger.free_count(other, grid)).sum();
    free >= reserve(ledger, network, grid)
}

fn acquire(ledger: &Ledger, input: BlockPlanInput<'_>, network: &str, pool: &Pool) -> Vec<BlockStep> {
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

/// Writes the status of a block: at once if a borrower waits for the answer, otherwise at intervals.
fn report_status(
    ledger: &Ledger,
    input: BlockPlanInput<'_>,
    block: &BlockKey,
    holding: &Holding,
) -> Option<BlockStep> {
    let object = object(input, block, holding)?;
    if !matches!(holding.stage, Stage::Open | Stage::Unverified) {
        return None;
    }
    let status = status(ledger, input, block, holding);
    let now = &object.status;
    let urgent = (&status.lent, &status.refused) != (&now.lent, &now.refused);
    let due = status != *now && !input.reported.contains(block);
    let object = object.uid.clone();
    (urgent || due).then(|| BlockStep::UpdateStatus { block: block.clone(), object, status })
}

fn status(ledger: &Ledger, input: BlockPlanInput<'_>, block: &BlockKey, holding: &Holding) -> IPBlockStatus {
    let pool = input.networks.get(&block.network);
    let grid = pool.and_then(|pool| pool.grid(Family::of(block.range.addr())));
    let lent =
        holding.lent.iter().map(|(address, object)| LentAddress { address: *address, block: object.clone() });
    let borrowers = lending_requests(input).filter(|request| {
        enclosing_holding(ledger, request).is_some_and(|(enclosing, _)| enclosing == block)
    });
    let refused =
        borrowers.filter(|request| holding.lent.get(&request.spec.cidr.addr()) != Some(&request.uid));
    let used: Vec<IpAddr> = ledger.used(block).map(|(address, _)| address).collect();
    let outside = ledger.used(block).filter(|(address, _)| !grid.is_some_and(|grid| grid.contains(*address)));
    let draining = outside.filter_map(|(address, key)| {
        let pod = &ledger.leases().get(key)?.pod;
        Some(format!("{}/{} {address}", pod.namespace, pod.name))
    });
    IPBlockStatus {
        used: i32::try_from(used.len()).unwrap_or(i32::MAX),
        free: grid.map_or(0, |grid| i32::try_from(ledger.free_count(block, grid)).unwrap_or(i32::MAX)),
        spare: grid.map_or_else(Vec::new, |grid| spare_ranges(ledger, block, holding, grid)),
        lent: lent.collect(),
        refused: refused.map(|request| request.uid.clone()).take(MAX_STATUS_ADDRESSES).collect(),
        closed: holding.stage != Stage::Open,
        draining: draining.take(MAX_DRAINING_PODS).collect(),
    }
}

/// The first ranges of free addresses, as text.
fn spare_ranges(ledger: &Ledger, block: &BlockKey, holding: &Holding, grid: &BlockGrid) -> Vec<String> {
    if holding.stage != Stage::Open || block.is_single() {
        return Vec::new();
    }
    let used: BTreeSet<IpAddr> = ledger.used(block).map(|(address, _)| address).collect();
    let taken = |address: IpAddr| used.contains(&address) || holding.lent.contains_key(&address);
    let text = |(first, last): (IpAddr, IpAddr)| format!("{first}-{last}");
    grid.free_spans(block.range, taken).take(MAX_SPARE_RANGES).map(text).collect()
}

/// The free addresses that the status of a block reports. Without a status, any address may be free.
pub fn spare_addresses(object: &ObservedIpBlock, grid: &BlockGrid) -> Vec<IpAddr> {
    let status = &object.status;
    if status.closed {
        return Vec::new();
    }
    if status.spare.is_empty() && status.used == 0 && status.free == 0 && status.lent.is_empty() {
        return grid.free_spans(object.spec.cidr, |_| false).flat_map(addresses_between).collect();
    }
    let spans = status.spare.iter().filter_map(|text| {
        let (first, last) = text.split_once('-')?;
        Some((first.parse().ok()?, last.parse().ok()?))
    });
    let inside = |address: &IpAddr| object.spec.cidr.contains(address) && grid.contains(*address);
    spans.flat_map(addresses_between).filter(inside).collect()
}

/// The addresses of a range, at most as many as a block may list.
fn addresses_between((first, last): (IpAddr, IpAddr)) -> Vec<IpAddr> {
    let (mut all, mut address) = (Vec::new(), first);
    while address <= last && all.len() < MAX_STATUS_ADDRESSES {
        all.push(address);
        address = super::ledger::next_address(address);
    }
    all
}

/// An address to borrow and the block that it is in: a free address of another node's block, chosen by the seed. Skips
/// refused addresses and holders that do not answer.
pub fn lending_candidate(
    objects: &[ObservedIpBlock],
    grid: &BlockGrid,
    holder: &NodeRef,
    refused: &BTreeSet<IpAddr>,
    silent: &BTreeSet<Uid>,
    seed: u64,
) -> Option<(IpAddr, ObservedIpBlock)> {
    let whole = |object: &&ObservedIpBlock| object.spec.cidr.prefix_len() < object.spec.cidr.max_prefix_len();
    let singles: BTreeSet<IpAddr> =
        objects.iter().filter(|object| !whole(object)).map(|object| object.spec.cidr.addr()).collect();
    let reachable = |object: &&ObservedIpBlock| {
        object.spec.holder.uid != holder.uid && !silent.contains(&object.spec.holder.uid)
    };
    let others = objects.iter().filter(whole).filter(reachable);
    let mut all: Vec<(IpAddr, &ObservedIpBlock)> = Vec::new();
    for object in others.filter(|object| Family::of(object.spec.cidr.addr()) == grid.family()) {
        let free = spare_addresses(object, grid);
        let open =
            free.into_iter().filter(|address| !singles.contains(address) && !refused.contains(address));
        all.extend(open.map(|address| (address, object)));
    }
    let index = usize::try_from(seed % u64::try_from(all.len()).ok().filter(|count| *count > 0)?).ok()?;
    all.get(index).map(|(address, object)| (*address, (*object).clone()))
}

/// The blocks of deleted nodes, without those whose addresses are lent to other nodes: these stay until the borrowers return
/// them.
pub fn abandoned<'a>(
    objects: impl IntoIterator<Item = &'a ObservedIpBlock> + Clone,
    is_gone: impl Fn(&NodeRef) -> bool,
) -> Vec<&'a ObservedIpBlock> {
    let mut holders: BTreeMap<&Uid, &NodeRef> = BTreeMap::new();
    for object in objects.clone() {
        holders.insert(&object.uid, &object.spec.holder);
    }
    let used = |object: &ObservedIpBlock| {
        let lent = object.status.lent.iter();
        // A borrower that is gone too never returns the address.
        lent.filter_map(|lent| holders.get(&lent.block)).any(|holder| !is_gone(holder))
    };
    objects.into_iter().filter(|object| is_gone(&object.spec.holder) && !used(object)).collect()
}

/// The address counts of one family of a network, summed over its blocks.
pub fn network_status<'a>(
    family: Family,
    grid: Option<&BlockGrid>,
    length: u8,
    blocks: impl IntoIterator<Item = (&'a IPBlockSpec, &'a IPBlockStatus)>,
) -> IpFamilyStatus {
    let (mut used, mut closed, mut count) = (0_i64, 0_i64, 0_i32);
    for (spec, status) in blocks {
        if Family::of(spec.cidr.addr()) == family {
            let size = grid.map_or(1, |grid| grid.addresses_in(spec.cidr));
            // Addresses of removed subnets do not reduce the free count.
            if size > 0 {
                used = used.saturating_add(status.used.into());
            }
            // A closed block has no free address.
            if status.closed && grid.is_some() {
                let lent = i64::try_from(status.lent.len()).unwrap_or(i64::MAX);
                let size = i64::try_from(size).unwrap_or(i64::MAX);
                closed = closed
                    .saturating_add(size.saturating_sub(lent).saturating_sub(status.used.into()).max(0));
            }
            count = count.saturating_add(1);
        }
    }
    let addresses = grid.map_or(0, |grid| i64::try_from(grid.addresses()).unwrap_or(i64::MAX));
    IpFamilyStatus {
        block_length: length,
        addresses,
        used,
        free: addresses.saturating_sub(used).saturating_sub(closed).max(0),
        blocks: count,
    }
}
