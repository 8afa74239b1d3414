//! Which blocks a holder may allocate from after its journal was lost or its machine booted.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use api::ipblock::LentAddress;

use super::{
    BlockKey, BlockPlanInput, BlockStep, Holding, Ledger, LedgerRecord, ObservedIpBlock, Stage, Timings,
    blocks::{is_ours, object},
};

/// An unverified block of a ledger.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnverifiedBlock {
    pub block: BlockKey,
    /// Whether the ledger knows no address of it that is in use.
    pub empty: bool,
}

/// The unverified blocks of a holder and their witnesses: sandboxes that may have addresses of them.
#[derive(Debug, Default)]
pub struct Verification {
    /// When a block became unverified, and the sandboxes that existed or were being created then.
    witnesses: BTreeMap<BlockKey, (Instant, BTreeSet<String>)>,
    /// The unverified blocks of the last call of [`Self::track`].
    known: BTreeSet<BlockKey>,
    /// When the sandboxes are listed next.
    next_check: Option<Instant>,
}

impl Verification {
    /// Records which blocks are unverified now, and returns those that were not before.
    pub fn track(&mut self, unverified: &[UnverifiedBlock]) -> Vec<BlockKey> {
        let now: BTreeSet<BlockKey> = unverified.iter().map(|one| one.block.clone()).collect();
        self.witnesses.retain(|block, _| now.contains(block));
        let new = now.difference(&self.known).cloned().collect();
        self.known = now;
        new
    }

    /// Whether to list the sandboxes now. If so, schedules the next check.
    pub fn start_check(&mut self, timings: &Timings, now: Instant) -> bool {
        let due = self.next_check.is_none_or(|at| at <= now);
        if due {
            self.next_check = Some(now + timings.verify_interval());
        }
        due
    }

    /// The unverified blocks of which no pod has an address: no sandbox is left that existed when they became unverified.
    pub fn check(
        &mut self,
        unverified: &[UnverifiedBlock],
        live: &BTreeSet<String>,
        timings: &Timings,
        now: Instant,
    ) -> Vec<BlockKey> {
        let mut unused = Vec::new();
        for UnverifiedBlock { block, empty } in unverified {
            let (since, witnesses) = self.witnesses.entry(block.clone()).or_insert((now, BTreeSet::new()));
            if *since + timings.min_lease_age >= now {
                // The runtime lists sandboxes that were being created at that time only later.
                witnesses.extend(live.iter().cloned());
            } else if *empty && witnesses.is_disjoint(live) {
                unused.push(block.clone());
            }
        }
        unused
    }

    /// When the next check is due.
    pub fn deadline(&self) -> Option<Instant> {
        self.next_check.filter(|_| !self.witnesses.is_empty())
    }
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
pub(super) fn update_boot(
    input: BlockPlanInput<'_>,
    block: &BlockKey,
    holding: &Holding,
) -> Option<BlockStep> {
    let object = object(input, block, holding).filter(|_| holding.stage == Stage::Open)?;
    let outdated = input.boot.is_some_and(|boot| object.spec.boot_id != boot);
    outdated.then(|| BlockStep::UpdateBoot { block: block.clone(), object: object.uid.clone() })
}

/// Records IPBlocks of the holder that its ledger does not know.
pub(super) fn record_unknown_blocks(ledger: &Ledger, input: BlockPlanInput<'_>) -> Vec<BlockStep> {
    let ours = input.objects.values().filter(|object| is_ours(object, input.holder));
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{super::tests::block, *};

    fn sandboxes(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn an_unverified_block_is_unused_once_no_early_sandbox_is_left() {
        let (mut verification, timings, start) =
            (Verification::default(), Timings::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let unverified = [UnverifiedBlock { block: block("10.0.0.0/28"), empty: true }];
        assert_eq!(verification.track(&unverified), [block("10.0.0.0/28")]);
        assert_eq!(verification.track(&unverified), [], "it is reported once");
        let mut check = |live: &[&str], now| {
            assert!(verification.start_check(&timings, now));
            assert!(!verification.start_check(&timings, now), "the sandboxes are listed once a minute");
            verification.check(&unverified, &sandboxes(live), &timings, now)
        };
        assert_eq!(check(&["old"], at(0)), []);
        assert_eq!(check(&["starting"], at(600)), [], "it was being created");
        assert_eq!(check(&["starting", "new"], at(661)), []);
        assert_eq!(check(&["new"], at(722)), [block("10.0.0.0/28")]);
        assert_eq!(verification.deadline(), Some(at(782)));
        assert_eq!(verification.track(&[]), []);
        assert_eq!(verification.deadline(), None);
    }

    #[test]
    fn an_unverified_block_with_known_addresses_in_use_is_not_unused() {
        let (mut verification, timings, now) = (Verification::default(), Timings::default(), Instant::now());
        let unverified = [UnverifiedBlock { block: block("10.0.0.0/28"), empty: false }];
        verification.check(&unverified, &BTreeSet::new(), &timings, now);
        let later = now + timings.min_lease_age * 2;
        assert_eq!(verification.check(&unverified, &BTreeSet::new(), &timings, later), []);
    }
}
