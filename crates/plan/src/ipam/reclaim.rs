//! When a holder releases an empty block, and which blocks of gone nodes are deleted.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use api::ipblock::HolderRef;

use super::{
    BlockKey, BlockPlanInput, BlockStep, Family, Holding, Ledger, LedgerRecord, ObservedIpBlock, Pool, Stage,
    Timings,
    acquire::{is_of_family, reserve},
};
use crate::bridge::Uid;

/// Since when the blocks of a holder are empty.
#[derive(Debug, Default)]
pub struct IdleBlocks(BTreeMap<BlockKey, Instant>);

impl IdleBlocks {
    /// Records which blocks are empty now.
    pub fn track(&mut self, empty: BTreeSet<BlockKey>, now: Instant) {
        self.0.retain(|block, _| empty.contains(block));
        for block in empty {
            self.0.entry(block).or_insert(now);
        }
    }

    pub fn contains(&self, block: &BlockKey) -> bool {
        self.0.contains_key(block)
    }

    /// The blocks that have been empty long enough to be released.
    pub fn expired(&self, timings: &Timings, now: Instant) -> BTreeSet<BlockKey> {
        let expired = self.0.iter().filter(|(block, since)| **since + timings.idle_time(block) <= now);
        expired.map(|(block, _)| block.clone()).collect()
    }

    /// When each block has been empty long enough.
    pub fn deadlines(&self, timings: &Timings) -> impl Iterator<Item = Instant> {
        self.0.iter().map(|(block, since)| *since + timings.idle_time(block))
    }
}

/// Releases idle blocks that can be spared, one at a time.
pub(super) fn release_idle(
    ledger: &Ledger,
    input: BlockPlanInput<'_>,
    network: &str,
    pool: &Pool,
) -> Option<BlockStep> {
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

/// The blocks of deleted nodes, without those whose addresses are lent to other holders: these stay until the borrowers
/// return them. A holder that is not a Node is never gone.
///
/// `is_gone` is asked only about Nodes.
pub fn abandoned<'a>(
    objects: impl IntoIterator<Item = &'a ObservedIpBlock> + Clone,
    is_gone: impl Fn(&HolderRef) -> bool,
) -> Vec<&'a ObservedIpBlock> {
    let is_gone = |holder: &HolderRef| holder.is_node() && is_gone(holder);
    let mut holders: BTreeMap<&Uid, &HolderRef> = BTreeMap::new();
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

#[cfg(test)]
mod tests {
    use api::ipblock::LentAddress;

    use super::{
        super::tests::{block, claims, ip, observed, other},
        *,
    };

    #[test]
    fn a_block_is_idle_from_when_it_became_empty_and_an_address_for_a_shorter_time() {
        let (mut idle, timings, start) = (IdleBlocks::default(), Timings::default(), Instant::now());
        let (whole, single) = (block("10.0.0.0/28"), block("10.0.1.1/32"));
        idle.track(BTreeSet::from([whole.clone(), single.clone()]), start);
        idle.track(BTreeSet::from([whole.clone(), single.clone()]), start + timings.idle_address);
        assert_eq!(idle.expired(&timings, start + timings.idle_address), BTreeSet::from([single.clone()]));
        assert_eq!(idle.expired(&timings, start + timings.idle_block).len(), 2);
        assert_eq!(idle.deadlines(&timings).min(), Some(start + timings.idle_address));
        // A block that was used in between starts again.
        idle.track(BTreeSet::from([single]), start);
        idle.track(BTreeSet::from([whole.clone()]), start + timings.idle_block);
        assert!(idle.contains(&whole) && idle.expired(&timings, start + timings.idle_block).is_empty());
    }

    #[test]
    fn the_blocks_of_a_holder_that_is_not_a_node_are_never_abandoned() {
        let mut lending = observed("10.0.0.0/28", "1", other());
        lending.status.lent = vec![LentAddress { address: ip("10.0.0.3"), block: "2".to_owned() }];
        let objects = [
            lending,
            observed("10.0.0.3/32", "2", claims()),
            observed("10.0.0.16/28", "3", claims()),
            observed("10.0.0.32/28", "4", other()),
        ];
        let uids = |objects: &[ObservedIpBlock]| {
            abandoned(objects, |_| true).into_iter().map(|one| one.uid.clone()).collect::<Vec<_>>()
        };
        assert_eq!(uids(&objects), ["4"], "block 1 lends an address to the other holder");
        assert_eq!(uids(&objects[..1]), ["1"]);
    }
}
