//! Tracks what can be released: empty blocks, and unverified blocks whose witnesses are gone.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use plan::ipam::{BlockKey, Ledger, Stage, UnverifiedBlock};

use super::controller::BlockController;
use crate::{event::EventReason, ipam::gc::SandboxFilter};

/// How many ranges an event lists.
const MAX_NAMED_RANGES: usize = 5;

/// The blocks of a ledger that a reconcile tracks.
#[derive(Debug, Default)]
pub struct TrackedBlocks {
    /// Open blocks without an address in use.
    empty: BTreeSet<BlockKey>,
    unverified: Vec<UnverifiedBlock>,
    /// Blocks that are being acquired, with the name of their network.
    pub acquiring: BTreeMap<BlockKey, String>,
}

impl TrackedBlocks {
    pub fn of(ledger: &Ledger) -> Self {
        let mut tracked = Self::default();
        for (block, holding) in ledger.holdings() {
            let (block, empty) = (block.clone(), ledger.is_empty(block));
            match holding.stage {
                Stage::Open if empty => _ = tracked.empty.insert(block),
                Stage::Unverified => tracked.unverified.push(UnverifiedBlock { block, empty }),
                Stage::Acquiring => _ = tracked.acquiring.insert(block, holding.network.clone()),
                Stage::Open | Stage::Releasing | Stage::Lost => {}
            }
        }
        tracked
    }
}

impl BlockController {
    /// Records since when blocks can be released.
    pub(super) async fn track_idle(&mut self, tracked: &mut TrackedBlocks, now: Instant) {
        let new = self.verification.track(&tracked.unverified);
        self.report_unverified(new);
        let mut empty = std::mem::take(&mut tracked.empty);
        empty.extend(self.unused_unverified(&tracked.unverified, now).await);
        self.idle.track(empty, now);
    }

    /// The unverified blocks that no sandbox can have an address of. The sandboxes are listed at intervals.
    async fn unused_unverified(&mut self, unverified: &[UnverifiedBlock], now: Instant) -> Vec<BlockKey> {
        if unverified.is_empty() {
            return Vec::new();
        }
        if !self.verification.start_check(&self.timings, now) {
            let unused = unverified.iter().filter(|one| one.empty && self.idle.contains(&one.block));
            return unused.map(|one| one.block.clone()).collect();
        }
        let Ok(live) = (self.sandboxes)(SandboxFilter::Witnesses).await else { return Vec::new() };
        self.verification.check(unverified, &live, &self.timings, now)
    }

    /// Reports blocks that have become unverified, and all unverified ones after a start of the daemon.
    fn report_unverified(&mut self, blocks: Vec<BlockKey>) {
        let mut new: BTreeMap<(String, String), Vec<String>> = BTreeMap::new();
        for block in blocks {
            let named = self.ipam.with_ledger(|ledger| Some(ledger.holdings().get(&block)?.network.clone()));
            let network = (named.unwrap_or_default(), block.network);
            new.entry(network).or_default().push(block.range.to_string());
        }
        for ((name, uid), ranges) in new {
            let note = unverified_note(&self.holder.node, &ranges);
            self.events.record(&name, &uid, EventReason::AddressBlockUnverified, note);
        }
    }
}

fn unverified_note(node: &str, ranges: &[String]) -> String {
    let more = ranges.len().saturating_sub(MAX_NAMED_RANGES);
    let named = ranges.iter().take(MAX_NAMED_RANGES).map(String::as_str).collect::<Vec<_>>().join(", ");
    let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!(
        "node {node} has lost its record of which pods have the addresses of {named}{rest}: these pods keep them, new pods get \
        none of them until the node reboots; drain and reboot it"
    )
}

#[cfg(test)]
mod tests {
    use plan::ipam::LedgerRecord;

    use super::*;

    #[test]
    fn an_event_names_the_first_ranges() {
        let ranges: Vec<String> = (0..7).map(|number| format!("10.0.{number}.0/28")).collect();
        let note = unverified_note("a", &ranges[..1]);
        assert!(note.starts_with("node a has lost") && note.contains(" of 10.0.0.0/28: "), "{note}");
        let note = unverified_note("a", &ranges);
        assert!(note.contains("10.0.4.0/28 and 2 more: ") && !note.contains("10.0.5.0"), "{note}");
    }

    #[test]
    fn open_empty_unverified_and_acquiring_blocks_are_tracked() {
        let block = |range: &str| BlockKey { network: "net".to_owned(), range: range.parse().unwrap() };
        let network = || "blue".to_owned();
        let mut ledger = Ledger::default();
        for (range, open) in [("10.0.0.0/28", true), ("10.0.0.16/28", false)] {
            ledger.apply(&LedgerRecord::Acquiring { block: block(range), network: network() });
            if open {
                ledger.apply(&LedgerRecord::Acquired { block: block(range), object: range.to_owned() });
            }
        }
        let (doubted, object) = (block("10.0.0.32/28"), "object".to_owned());
        ledger.apply(&LedgerRecord::Unverified { block: doubted.clone(), network: network(), object });
        let tracked = TrackedBlocks::of(&ledger);
        assert_eq!(tracked.empty, BTreeSet::from([block("10.0.0.0/28")]));
        assert_eq!(tracked.acquiring, BTreeMap::from([(block("10.0.0.16/28"), network())]));
        assert_eq!(tracked.unverified, [UnverifiedBlock { block: doubted, empty: true }]);
        let (block, address) = (block("10.0.0.0/28"), "10.0.0.1".parse().unwrap());
        ledger.apply(&LedgerRecord::Lent { block, address, object: "borrower".to_owned() });
        assert!(TrackedBlocks::of(&ledger).empty.is_empty(), "a lent address is in use");
    }
}
