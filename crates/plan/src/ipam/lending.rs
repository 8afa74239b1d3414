//! Which addresses a holder lends, and when a lent address counts as returned.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Instant,
};

use api::ipblock::MAX_STATUS_ADDRESSES;

use super::{
    BlockKey, BlockPlanInput, BlockStep, Holding, Ledger, LedgerRecord, ObservedIpBlock, Stage, Timings,
};
use crate::bridge::Uid;

/// How many UIDs of returned IPBlocks are remembered.
const MAX_REMEMBERED_UIDS: usize = 1024;

/// The checks of lent addresses whose borrower IPBlock the watch does not show.
#[derive(Debug, Default)]
pub struct LentChecks {
    /// When the IPBlock was last seen to exist.
    checked: BTreeMap<(BlockKey, IpAddr), Instant>,
    /// The UIDs of IPBlocks whose borrowed address has been returned.
    returned: BTreeSet<Uid>,
}

impl LentChecks {
    pub fn is_due(&self, block: &BlockKey, address: IpAddr, timings: &Timings, now: Instant) -> bool {
        let checked = self.checked.get(&(block.clone(), address));
        checked.is_none_or(|at| *at + timings.lent_check_interval() <= now)
    }

    pub fn mark_existing(&mut self, block: &BlockKey, address: IpAddr, now: Instant) {
        self.checked.insert((block.clone(), address), now);
    }

    /// The IPBlock is gone, or another one has its name.
    pub fn mark_gone(&mut self, block: &BlockKey, address: IpAddr) {
        self.checked.remove(&(block.clone(), address));
    }

    pub fn mark_returned(&mut self, object: &str) {
        if self.returned.len() > MAX_REMEMBERED_UIDS {
            self.returned.clear();
        }
        self.returned.insert(object.to_owned());
    }

    pub fn returned(&self) -> &BTreeSet<Uid> {
        &self.returned
    }

    /// When the next checks are due.
    pub fn deadlines(&self, timings: &Timings) -> impl Iterator<Item = Instant> {
        let interval = timings.lent_check_interval();
        self.checked.values().map(move |at| *at + interval)
    }
}

/// Looks up lent addresses whose borrower IPBlock the watch does not show. The borrower may have returned them, or the
/// IPBlock may carry the label of an earlier Node of this name.
pub(super) fn lookup_lent(ledger: &Ledger, input: BlockPlanInput<'_>) -> Vec<BlockStep> {
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

/// The IPBlocks of other holders that borrow an address from this one.
pub(super) fn lending_requests(input: BlockPlanInput<'_>) -> impl Iterator<Item = &ObservedIpBlock> {
    input.objects.values().filter(|object| {
        let is_request = object.spec.lender.as_ref().is_some_and(|lender| lender.uid == input.holder.uid);
        is_request && object.spec.cidr.prefix_len() == object.spec.cidr.max_prefix_len()
    })
}

/// The block of this holder that contains the address of a borrow request.
pub(super) fn enclosing_holding<'a>(
    ledger: &'a Ledger,
    request: &ObservedIpBlock,
) -> Option<(&'a BlockKey, &'a Holding)> {
    let found = ledger.holding_of(&request.spec.network_uid, request.spec.cidr.addr());
    found.filter(|(block, _)| !block.is_single())
}

/// Records the free addresses that other holders request as lent, each once.
pub(super) fn plan_lending(ledger: &Ledger, input: BlockPlanInput<'_>) -> Vec<BlockStep> {
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
    holding.stage == Stage::Open
        && !ledger.is_taken(&block.network, holding, address)
        && holding.lent.len() < MAX_STATUS_ADDRESSES
}

#[cfg(test)]
mod tests {
    use super::{
        super::tests::{block, ip},
        *,
    };

    #[test]
    fn a_lent_address_is_checked_at_intervals_and_a_return_is_remembered() {
        let (mut checks, timings, now) = (LentChecks::default(), Timings::default(), Instant::now());
        let (whole, address) = (block("10.0.0.0/28"), ip("10.0.0.3"));
        assert!(checks.is_due(&whole, address, &timings, now));
        checks.mark_existing(&whole, address, now);
        let next = now + timings.lent_check_interval();
        assert!(
            !checks.is_due(&whole, address, &timings, now) && checks.is_due(&whole, address, &timings, next)
        );
        assert_eq!(checks.deadlines(&timings).collect::<Vec<_>>(), [next]);
        checks.mark_gone(&whole, address);
        assert_eq!(checks.deadlines(&timings).count(), 0);
        checks.mark_returned("request");
        assert!(checks.returned().contains("request"));
    }
}
