//! What has changed by itself: time has passed, sandboxes have gone, others have answered.

use std::collections::{BTreeMap, BTreeSet};

use api::{ErrorChain, ipblock};
use plan::ipam::{BlockKey, Stage};
use tokio::time::Instant;
use tracing::warn;

use super::{
    BACKOFF_MEMORY, BUSY_LENDER_TIMEOUT, BlockController, CONTENTION_BACKOFF, LENDER_BACKOFF, LENDER_TIMEOUT,
    LenderWatch, MAX_NAMED_RANGES, REFUSED_TTL, SandboxFilter, SilentLender, UNANSWERED_CREATE_TTL,
    VERIFY_INTERVAL,
};
use crate::{event::EventReason, ipam::PendingRequest, watch::ObjectWatch};

impl BlockController {
    /// Forgets what is past, and notes since when blocks are empty.
    pub(super) async fn refresh(&mut self) {
        let now = Instant::now();
        self.exhausted.retain(|_, until| *until > now);
        self.refused_addresses.retain(|_, until| *until > now);
        // How patient it was is remembered for a while.
        self.silent_lenders.retain(|_, one| one.until + LENDER_BACKOFF.1 > now);
        self.contended.retain(|_, one| one.until + CONTENTION_BACKOFF.1 > now);
        self.rejected.retain(|_, one| one.until + BACKOFF_MEMORY > now);
        self.unanswered_creates.retain(|_, at| *at + UNANSWERED_CREATE_TTL > now);
        let interval = self.timings.status_interval;
        self.reported.retain(|_, at| *at + interval > now);
        let (mut empty, mut acquiring, mut unverified) = (BTreeSet::new(), BTreeMap::new(), Vec::new());
        self.ipam.with_ledger(|ledger| {
            for (block, holding) in ledger.holdings() {
                match holding.stage {
                    Stage::Open if ledger.is_empty(block) => _ = empty.insert(block.clone()),
                    Stage::Unverified => unverified.push((block.clone(), ledger.is_empty(block))),
                    Stage::Acquiring => _ = acquiring.insert(block.clone(), holding.network.clone()),
                    _ => {}
                }
            }
        });
        self.verify_blocks(unverified, &mut empty).await;
        self.idle.retain(|block, _| empty.contains(block));
        for block in empty {
            self.idle.entry(block).or_insert(now);
        }
        self.borrowing_since.retain(|block, _| acquiring.contains_key(block));
        let names: BTreeSet<String> =
            acquiring.iter().filter_map(|(block, network)| self.enclosing_block(block, network)).collect();
        self.lenders.retain(|name, _| names.contains(name));
        for name in names {
            let watch = || LenderWatch {
                watch: ObjectWatch::one(self.api.clone(), &name),
                synced: false,
                last_update: None,
                block: None,
            };
            self.lenders.entry(name.clone()).or_insert_with(watch);
        }
        self.check_lenders(acquiring, now);
    }

    /// Doubtful blocks can go once no sandbox is left that was there when they became so.
    pub(super) async fn verify_blocks(
        &mut self,
        unverified: Vec<(BlockKey, bool)>,
        empty: &mut BTreeSet<BlockKey>,
    ) {
        self.witnesses.retain(|block, _| unverified.iter().any(|(one, _)| one == block));
        self.report_unverified(&unverified);
        if unverified.is_empty() {
            return;
        }
        let now = Instant::now();
        if now < self.next_verify {
            let released = unverified.iter().filter(|(block, empty)| *empty && self.idle.contains_key(block));
            empty.extend(released.map(|(block, _)| block.clone()));
            return;
        }
        self.next_verify = now + VERIFY_INTERVAL.min(self.timings.gc_interval);
        let Ok(live) = (self.sandboxes)(SandboxFilter::Witnesses).await else { return };
        for (block, is_empty) in unverified {
            let (since, witnesses) = self.witnesses.entry(block.clone()).or_insert((now, BTreeSet::new()));
            if *since + self.timings.min_lease_age >= now {
                // Those that were being made when it began are listed by and by.
                witnesses.extend(live.iter().cloned());
            } else if is_empty && witnesses.is_disjoint(&live) {
                empty.insert(block);
            }
        }
    }

    /// Tells of blocks that have become doubtful, and of all of them after a start.
    fn report_unverified(&mut self, unverified: &[(BlockKey, bool)]) {
        let before = std::mem::take(&mut self.unverified_reported);
        self.unverified_reported = unverified.iter().map(|(block, _)| block.clone()).collect();
        let mut new: BTreeMap<(String, String), Vec<String>> = BTreeMap::new();
        for block in self.unverified_reported.difference(&before) {
            let named = self.ipam.with_ledger(|ledger| Some(ledger.holdings().get(block)?.network.clone()));
            let network = (named.unwrap_or_default(), block.network.clone());
            new.entry(network).or_default().push(block.range.to_string());
        }
        for ((name, uid), ranges) in new {
            let more = ranges.len().saturating_sub(MAX_NAMED_RANGES);
            let named = ranges.into_iter().take(MAX_NAMED_RANGES).collect::<Vec<_>>().join(", ");
            let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
            let note = format!(
                "node {} has lost its record of who has the addresses of {named}{rest}: pods keep theirs, new pods get none of \
                these until the machine is started anew; drain and reboot it when it suits you",
                self.holder.node
            );
            self.events.record(&name, &uid, EventReason::AddressBlockUnverified, note);
        }
    }

    /// Answers to what was acquiring of other nodes.
    pub(super) fn check_lenders(&mut self, acquiring: BTreeMap<BlockKey, String>, now: Instant) {
        for (block, network) in acquiring {
            let Some(lender) =
                self.enclosing_block(&block, &network).and_then(|name| self.lenders.get(&name))
            else {
                continue;
            };
            let since = *self.borrowing_since.entry(block.clone()).or_insert(now);
            let object = self.objects.as_ref().and_then(|all| all.get(&ipblock::name(&network, block.range)));
            let (Some(object), Some(enclosing)) = (object, &lender.block) else { continue };
            let address = block.range.addr();
            let granted = enclosing.status.lent.iter().any(|lent| lent.block == object.uid);
            let refused = enclosing.status.refused.contains(&object.uid);
            // Who has much to do is waited for a little longer.
            let last_update = lender.last_update.map_or(since, |at| at.max(since));
            let give_up_at = (last_update + LENDER_TIMEOUT).min(since + BUSY_LENDER_TIMEOUT);
            let silent = !granted && give_up_at <= now;
            if !refused && !silent {
                continue;
            }
            let node = &enclosing.spec.holder.node;
            let why = if refused {
                format!("address {address} of network {network:?} is in use on node {node}")
            } else {
                format!(
                    "node {node} holds the block of address {address} of network {network:?} and does not answer: \
                    is it up? If it is gone for good, delete its Node"
                )
            };
            let ttl = if refused { REFUSED_TTL } else { LENDER_TIMEOUT };
            self.refused_addresses.insert((block.network.clone(), address), now + ttl);
            self.ipam.fail_request(PendingRequest::Address(block.network.clone(), address), why.clone());
            if silent {
                let holder = enclosing.spec.holder.clone();
                let before = self.silent_lenders.get(&holder.uid);
                // However many addresses it was acquiring for, it is silent once.
                if before.is_none_or(|one| one.until <= now) {
                    let backoff =
                        before.map_or(LENDER_BACKOFF.0, |one| (one.backoff * 2).min(LENDER_BACKOFF.1));
                    self.silent_lenders.insert(
                        holder.uid,
                        SilentLender { node: holder.node, until: now + backoff, backoff },
                    );
                }
                let record = self.ipam.with_ledger(|ledger| ledger.abandon(&block));
                if let Err(error) = self.ipam.record(record) {
                    warn!(error = %ErrorChain(&error), "an address that nobody lends is still acquiring for");
                }
            }
        }
    }
}
