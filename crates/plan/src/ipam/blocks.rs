//! Decides which blocks a holder acquires, lends, reports and releases, from what it has and observes.
//!
//! The holder is usually a node; nothing here depends on that.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use api::{
    IPBlockSpec, IPBlockStatus,
    ipblock::{self, HolderRef},
};

use super::{
    BlockKey, Family, Holding, Ledger, LedgerRecord, Pool, Stage,
    acquire::acquire,
    borrow::{LendingAnswer, lending_answer},
    lending::{lookup_lent, plan_lending},
    reclaim::release_idle,
    status::report_status,
    verify::{record_unknown_blocks, update_boot},
};
use crate::bridge::Uid;

/// An IPBlock, as last observed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedIpBlock {
    pub uid: Uid,
    pub spec: IPBlockSpec,
    pub status: IPBlockStatus,
}

/// Addresses that waiting ADDs of the holder need.
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
    pub holder: &'a HolderRef,
    /// The boot ID of the holder's machine; empty if unknown. `None` if the API server does not keep boot IDs.
    pub boot: Option<&'a str>,
    /// By UID; a network that is missing is deleted.
    pub networks: &'a BTreeMap<Uid, Arc<Pool>>,
    /// The IPBlocks of the holder and those that borrow from it, by name.
    pub objects: &'a BTreeMap<String, ObservedIpBlock>,
    /// The enclosing block of each single address that the holder borrows; `None` if it has no holder. A missing entry has
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

/// A step that the holder applies.
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
    /// Write the current boot ID to the IPBlock if it has this UID. The holder allocates nothing from a block that carries
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

/// Whether an IPBlock belongs to the holder. The name counts too: no Node has the name of a holder that is not a Node.
pub fn is_ours(object: &ObservedIpBlock, holder: &HolderRef) -> bool {
    object.spec.holder == *holder
}

/// The IPBlock of a block, if the holder has it.
pub(super) fn object<'a>(
    input: BlockPlanInput<'a>,
    block: &BlockKey,
    holding: &Holding,
) -> Option<&'a ObservedIpBlock> {
    let object = input.objects.get(&ipblock::name(&holding.network, block.range))?;
    let ours = object.spec.network_uid == block.network && is_ours(object, input.holder);
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
