//! Borrows single addresses from other nodes, and follows the answers of their lenders.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use api::{
    ErrorChain, IPBlock,
    ipblock::{self, HolderRef},
};
use futures::future::{FutureExt as _, pending, select_all};
use kube::Api;
use plan::ipam::{
    AcquireError, BlockGrid, BlockKey, BorrowFailure, BorrowOutcome, ObservedIpBlock, Pool, WaitingRequest,
    limits::LENDER_TIMEOUT,
};
use tracing::warn;

use super::{
    controller::{BlockController, MAX_ATTEMPTS, now},
    ipblocks::{BlockError, CreateOutcome},
    observed::observed,
};
use crate::{
    ipam::waiters::PendingRequest,
    watch::{ObjectEvent, ObjectWatch},
};

/// How many borrow requests may collide with other nodes before the list of blocks counts as stale.
const MAX_COLLISIONS: usize = 3;

/// Watches of the enclosing blocks of the addresses that this node borrows, by name.
#[derive(Default)]
pub struct LenderWatches(BTreeMap<String, LenderWatch>);

struct LenderWatch {
    watch: ObjectWatch<IPBlock>,
    /// Whether the block has been read.
    synced: bool,
    /// When its holder last changed it.
    last_update: Option<Instant>,
    /// `None` if it has no holder.
    block: Option<ObservedIpBlock>,
}

impl LenderWatches {
    /// Watches these blocks and no others.
    fn set(&mut self, api: &Api<IPBlock>, names: BTreeSet<String>) {
        self.0.retain(|name, _| names.contains(name));
        for name in names {
            let watch = || LenderWatch {
                watch: ObjectWatch::one(api.clone(), &name),
                synced: false,
                last_update: None,
                block: None,
            };
            self.0.entry(name.clone()).or_insert_with(watch);
        }
    }

    /// The next event of a block that this node borrows from.
    pub async fn next(&mut self) -> (String, ObjectEvent<IPBlock>) {
        if self.0.is_empty() {
            return pending().await;
        }
        let next = self.0.iter_mut().map(|(name, lender)| {
            async move {
                let event = lender.watch.next().await;
                (name.clone(), event)
            }
            .boxed()
        });
        select_all(next).await.0
    }

    pub fn apply_event(&mut self, name: &str, event: ObjectEvent<IPBlock>) {
        let Some(lender) = self.0.get_mut(name) else { return };
        let block = match event {
            ObjectEvent::Synced(all) => all.into_iter().next(),
            ObjectEvent::Changed(one) => {
                lender.last_update = Some(now());
                Some(one)
            }
            ObjectEvent::Deleted(_) => None,
            ObjectEvent::Failed(_) => return,
        };
        (lender.synced, lender.block) = (true, block.and_then(observed).map(|(_, object)| object));
    }

    /// Whether the block of this name has been read.
    pub fn is_read(&self, name: &str) -> bool {
        self.0.get(name).is_some_and(|lender| lender.synced)
    }

    /// The block of this name, if it has been read and has a holder.
    pub fn block(&self, name: &str) -> Option<ObservedIpBlock> {
        self.0.get(name)?.block.clone()
    }

    /// When a lender that updates its block counts as silent.
    pub fn deadlines(&self) -> impl Iterator<Item = Instant> {
        self.0.values().filter_map(|lender| Some(lender.last_update? + LENDER_TIMEOUT))
    }
}

impl BlockController {
    /// Borrows addresses from other nodes. Addresses in `listed` may have been allocated since: after [`MAX_COLLISIONS`] the
    /// list is stale, and the node lists again after a backoff.
    pub(super) async fn borrow(
        &mut self,
        network: &str,
        pool: &Pool,
        grid: &BlockGrid,
        listed: Vec<ObservedIpBlock>,
        missing: usize,
    ) -> Result<bool, BlockError> {
        let (mut requested, mut collisions) = (0, 0);
        while requested < missing.min(MAX_ATTEMPTS) && collisions < MAX_COLLISIONS {
            let (seed, now) = (self.search.next_seed(&self.holder, network), now());
            let candidate = self.borrowing.candidate(&self.holder, network, grid, &listed, (seed, now));
            let Some((address, lender)) = candidate else { break };
            self.borrowing.mark_tried(network, address, now);
            let block = BlockKey { network: network.to_owned(), range: address.into() };
            match self.request_address(block, &pool.name, lender).await? {
                CreateOutcome::Created => requested += 1,
                CreateOutcome::Exists => collisions += 1,
            }
        }
        let (key, now) = ((network.to_owned(), grid.family()), now());
        let seed = self.search.seed(&self.holder, network);
        let borrowing = &mut self.borrowing;
        let outcome = self
            .ipam
            .with_ledger(|ledger| borrowing.after_requests(&key, (requested, missing), ledger, (seed, now)));
        if outcome == BorrowOutcome::Exhausted {
            let hint = self.borrowing.exhausted_hint(&listed, now);
            self.lists.reuse(network, listed, now);
            let family = grid.family();
            let error = AcquireError::Exhausted { network: pool.name.clone(), family, hint };
            self.report_exhausted(network, &pool.name, family, &error);
        }
        Ok(outcome == BorrowOutcome::Complete || requested > 0)
    }

    /// Creates the IPBlock that asks the lender for an address.
    pub(super) async fn request_address(
        &mut self,
        block: BlockKey,
        network: &str,
        lender: HolderRef,
    ) -> Result<CreateOutcome, BlockError> {
        let outcome = self.create_block(&block, network, Some(lender)).await?;
        if let CreateOutcome::Created = outcome {
            self.ipam.metrics.borrowed.inc();
            self.reports.mark_created(block.clone(), &self.timings, now());
            self.borrowing.mark_requested(block, now());
        }
        Ok(outcome)
    }

    /// Follows the lenders of the addresses that this node acquires, by the name of their network. Fails the ADDs that wait
    /// for an address that is refused or not granted in time, and abandons the latter.
    pub(super) fn check_lenders(&mut self, acquiring: &BTreeMap<BlockKey, String>, now: Instant) {
        self.borrowing.retain_requests(|block| acquiring.contains_key(block));
        let enclosing = acquiring.iter().filter_map(|(block, network)| self.enclosing_block(block, network));
        let enclosing = enclosing.collect();
        self.lenders.set(&self.api, enclosing);
        for (block, network) in acquiring {
            let name = self.enclosing_block(block, network);
            let Some(lender) = name.and_then(|name| self.lenders.0.get(&name)) else { continue };
            let object = self.objects.get(&ipblock::name(network, block.range)).map(|object| &object.uid);
            let request = WaitingRequest {
                block,
                network,
                object,
                enclosing: lender.block.as_ref(),
                last_update: lender.last_update,
            };
            let Some(BorrowFailure { error, abandon }) = self.borrowing.check(request, now) else { continue };
            let request = PendingRequest::Address(block.network.clone(), block.range.addr());
            self.ipam.fail_request(request, error.to_string());
            if abandon {
                let record = self.ipam.with_ledger(|ledger| ledger.abandon(block));
                if let Err(error) = self.ipam.record(record) {
                    warn!(error = %ErrorChain(&error), "cannot journal that a borrow request was given up");
                }
            }
        }
    }
}
