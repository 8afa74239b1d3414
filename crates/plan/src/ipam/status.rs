//! What a holder writes to the status of its IPBlocks and when, and the address counts of a network.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::{Duration, Instant},
};

use api::{
    IPBlockSpec, IPBlockStatus,
    ipam::IpFamilyStatus,
    ipblock::{LentAddress, MAX_DRAINING_PODS, MAX_SPARE_RANGES, MAX_STATUS_ADDRESSES},
};

use super::{
    BlockGrid, BlockKey, BlockPlanInput, BlockStep, Family, Holding, Ledger, Stage, Timings,
    blocks::object,
    lending::{enclosing_holding, lending_requests},
};

/// The delay of the first status update of a new block.
const FIRST_STATUS_DELAY: Duration = Duration::from_secs(2);

/// When the status of each block was last written.
#[derive(Debug, Default)]
pub struct StatusReports(BTreeMap<BlockKey, Instant>);

impl StatusReports {
    pub fn expire(&mut self, timings: &Timings, now: Instant) {
        self.0.retain(|_, at| *at + timings.status_interval > now);
    }

    pub fn mark_written(&mut self, block: BlockKey, now: Instant) {
        self.0.insert(block, now);
    }

    /// Delays the first status update of a new block until a burst of pods has got addresses from it.
    pub fn mark_created(&mut self, block: BlockKey, timings: &Timings, now: Instant) {
        let head_start = timings.status_interval.saturating_sub(FIRST_STATUS_DELAY);
        self.0.insert(block, now.checked_sub(head_start).unwrap_or(now));
    }

    /// The blocks whose status was written a moment ago.
    pub fn recent(&self) -> BTreeSet<BlockKey> {
        self.0.keys().cloned().collect()
    }

    /// When the status of each block may be written again.
    pub fn deadlines(&self, timings: &Timings) -> impl Iterator<Item = Instant> {
        let interval = timings.status_interval;
        self.0.values().map(move |at| *at + interval)
    }
}

/// Writes the status of a block: at once if a borrower waits for the answer, otherwise at intervals.
pub(super) fn report_status(
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
        claims: Vec::new(),
    }
}

/// The first ranges of free addresses, as text.
fn spare_ranges(ledger: &Ledger, block: &BlockKey, holding: &Holding, grid: &BlockGrid) -> Vec<String> {
    if holding.stage != Stage::Open || block.is_single() {
        return Vec::new();
    }
    let taken = |address: IpAddr| ledger.is_taken(&block.network, holding, address);
    let text = |(first, last): (IpAddr, IpAddr)| format!("{first}-{last}");
    grid.free_spans(block.range, taken).take(MAX_SPARE_RANGES).map(text).collect()
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

#[cfg(test)]
mod tests {
    use super::{super::tests::block, *};

    #[test]
    fn a_status_is_written_at_intervals_and_the_first_one_after_two_seconds() {
        let (mut reports, timings, start) = (StatusReports::default(), Timings::default(), Instant::now());
        reports.mark_written(block("10.0.0.0/28"), start);
        reports.mark_created(block("10.0.0.16/28"), &timings, start + timings.status_interval);
        let created = start + timings.status_interval + FIRST_STATUS_DELAY;
        assert_eq!(
            reports.deadlines(&timings).collect::<Vec<_>>(),
            [start + timings.status_interval, created]
        );
        assert_eq!(reports.recent().len(), 2);
        reports.expire(&timings, start + timings.status_interval);
        assert_eq!(reports.recent(), BTreeSet::from([block("10.0.0.16/28")]));
        reports.expire(&timings, created);
        assert!(reports.recent().is_empty());
    }
}
