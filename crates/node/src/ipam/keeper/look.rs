//! What has changed by itself: time has passed, sandboxes have gone, others have answered.

use std::collections::{BTreeMap, BTreeSet};

use api::{Chain, ipblock};
use plan::ipam::{Block, Stage};
use tokio::time::Instant;
use tracing::warn;

use super::{
    BUSY, CROWDED, DOUBT, IN_VAIN, Keeper, Lender, NAMED, REMEMBERED_FOR, SHUNNED, SILENT, Silent, UNCERTAIN,
};
use crate::{event::EventReason, ipam::Want, watch::ObjectWatch};

impl Keeper {
    /// Forgets what is past, and notes since when blocks are empty.
    pub(super) async fn tidy(&mut self) {
        let now = Instant::now();
        self.full.retain(|_, until| *until > now);
        self.refused.retain(|_, until| *until > now);
        // How patient it was is remembered for a while.
        self.silent.retain(|_, one| one.until + SHUNNED.1 > now);
        self.crowded.retain(|_, one| one.until + CROWDED.1 > now);
        self.refusals.retain(|_, one| one.until + REMEMBERED_FOR > now);
        self.uncertain.retain(|_, at| *at + UNCERTAIN > now);
        let pace = self.pace.tell;
        self.told.retain(|_, at| *at + pace > now);
        let (mut empty, mut asked, mut doubtful) = (BTreeSet::new(), BTreeMap::new(), Vec::new());
        self.ipam.look(|ledger| {
            for (block, holding) in ledger.holdings() {
                match holding.stage {
                    Stage::Open if ledger.is_empty(block) => _ = empty.insert(block.clone()),
                    Stage::Doubtful => doubtful.push((block.clone(), ledger.is_empty(block))),
                    Stage::Asked => _ = asked.insert(block.clone(), holding.network.clone()),
                    _ => {}
                }
            }
        });
        self.believe(doubtful, &mut empty).await;
        self.idle.retain(|block, _| empty.contains(block));
        for block in empty {
            self.idle.entry(block).or_insert(now);
        }
        self.asked.retain(|block, _| asked.contains_key(block));
        let names: BTreeSet<String> =
            asked.iter().filter_map(|(block, network)| self.around(block, network)).collect();
        self.lenders.retain(|name, _| names.contains(name));
        for name in names {
            let watch = || Lender {
                watch: ObjectWatch::one(self.api.clone(), &name),
                read: false,
                heard: None,
                seen: None,
            };
            self.lenders.entry(name.clone()).or_insert_with(watch);
        }
        self.judge(asked, now);
    }

    /// Doubtful blocks can go once no sandbox is left that was there when they became so.
    pub(super) async fn believe(&mut self, doubtful: Vec<(Block, bool)>, empty: &mut BTreeSet<Block>) {
        self.witnesses.retain(|block, _| doubtful.iter().any(|(one, _)| one == block));
        self.tell_doubts(&doubtful);
        if doubtful.is_empty() {
            return;
        }
        let now = Instant::now();
        if now < self.next_doubt {
            let gone = doubtful.iter().filter(|(block, empty)| *empty && self.idle.contains_key(block));
            empty.extend(gone.map(|(block, _)| block.clone()));
            return;
        }
        self.next_doubt = now + DOUBT.min(self.pace.sweep);
        let Ok(live) = (self.sandboxes)().await else { return };
        for (block, is_empty) in doubtful {
            let (since, witnesses) = self.witnesses.entry(block.clone()).or_insert((now, BTreeSet::new()));
            if *since + self.pace.young >= now {
                // Those that were being made when it began are listed by and by.
                witnesses.extend(live.iter().cloned());
            } else if is_empty && witnesses.is_disjoint(&live) {
                empty.insert(block);
            }
        }
    }

    /// Tells of blocks that have become doubtful, and of all of them after a start.
    fn tell_doubts(&mut self, doubtful: &[(Block, bool)]) {
        let before = std::mem::take(&mut self.doubts_told);
        self.doubts_told = doubtful.iter().map(|(block, _)| block.clone()).collect();
        let mut new: BTreeMap<(String, String), Vec<String>> = BTreeMap::new();
        for block in self.doubts_told.difference(&before) {
            let named = self.ipam.look(|ledger| Some(ledger.holdings().get(block)?.network.clone()));
            let network = (named.unwrap_or_default(), block.network.clone());
            new.entry(network).or_default().push(block.range.to_string());
        }
        for ((name, uid), ranges) in new {
            let more = ranges.len().saturating_sub(NAMED);
            let named = ranges.into_iter().take(NAMED).collect::<Vec<_>>().join(", ");
            let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
            let note = format!(
                "node {} has lost its record of who has the addresses of {named}{rest}: pods keep theirs, new pods get none of \
                these until the machine is started anew; drain and reboot it when it suits you",
                self.me.node
            );
            self.events.record(&name, &uid, EventReason::AddressBlockUnverified, note);
        }
    }

    /// Answers to what was asked of other nodes.
    pub(super) fn judge(&mut self, asked: BTreeMap<Block, String>, now: Instant) {
        for (block, network) in asked {
            let Some(lender) = self.around(&block, &network).and_then(|name| self.lenders.get(&name)) else {
                continue;
            };
            let since = *self.asked.entry(block.clone()).or_insert(now);
            let object = self.objects.as_ref().and_then(|all| all.get(&ipblock::name(&network, block.range)));
            let (Some(object), Some(around)) = (object, &lender.seen) else { continue };
            let address = block.range.addr();
            let granted = around.status.lent.iter().any(|lent| lent.block == object.uid);
            let refused = around.status.refused.contains(&object.uid);
            // Who has much to do is waited for a little longer.
            let heard = lender.heard.map_or(since, |at| at.max(since));
            let patience = (heard + SILENT).min(since + BUSY);
            let silent = !granted && patience <= now;
            if !refused && !silent {
                continue;
            }
            let node = &around.spec.holder.node;
            let why = if refused {
                format!("address {address} of network {network:?} is in use on node {node}")
            } else {
                format!(
                    "node {node} holds the block of address {address} of network {network:?} and does not answer: \
                    is it up? If it is gone for good, delete its Node"
                )
            };
            let believed = if refused { IN_VAIN } else { SILENT };
            self.refused.insert((block.network.clone(), address), now + believed);
            self.ipam.answer(Want::Address(block.network.clone(), address), why.clone());
            if silent {
                let holder = around.spec.holder.clone();
                let before = self.silent.get(&holder.uid);
                // However many addresses it was asked for, it is silent once.
                if before.is_none_or(|one| one.until <= now) {
                    let shunned = before.map_or(SHUNNED.0, |one| (one.shunned * 2).min(SHUNNED.1));
                    self.silent
                        .insert(holder.uid, Silent { node: holder.node, until: now + shunned, shunned });
                }
                let record = self.ipam.look(|ledger| ledger.given_up(&block));
                if let Err(error) = self.ipam.note(record) {
                    warn!(error = %Chain(&error), "an address that nobody lends is still asked for");
                }
            }
        }
    }
}
