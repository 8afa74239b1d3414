//! Taking blocks, and borrowing single addresses when none is left.

use std::{collections::BTreeSet, net::IpAddr};

use api::{digest::digest, ipblock};
use ipnet::IpNet;
use plan::ipam::{BlockGrid, BlockKey, Family, ObservedIpBlock, Pool, Stage, lending_candidate};
use tokio::time::Instant;
use tracing::debug;

use super::{
    BlockController, BlockError, CONTENTION_BACKOFF, Contention, CreateOutcome, EVENT_INTERVAL,
    EXHAUSTED_TTL, FIRST_STATUS_DELAY, LIST_TTL, MAX_ATTEMPTS, MAX_COLLISIONS, REFUSED_TTL, SilentLender,
    with_timeout,
};
use crate::{event::EventReason, ipam::PendingRequest};

impl BlockController {
    pub(super) async fn acquire(
        &mut self,
        network: &str,
        family: Family,
        missing: usize,
    ) -> Result<bool, BlockError> {
        let Some(pool) = self.pools.get(network).cloned() else { return Ok(false) };
        let Some(grid) = pool.grid(family) else { return Ok(false) };
        let key = (network.to_owned(), family);
        let waiting = self.ipam.lock().waiters.contains_key(&PendingRequest::Any(network.to_owned(), family));
        let exhausted = self.exhausted.contains_key(&key);
        let contended = self.contended.get(&key).is_some_and(|one| one.until > Instant::now());
        if exhausted && (!waiting || contended) {
            return Ok(false);
        }
        let mut listed = if exhausted { Some(self.list_blocks(network, &pool).await?) } else { None };
        for _ in 0..MAX_ATTEMPTS {
            let Some(range) = self.choose_block(network, grid) else {
                if listed.is_some() {
                    break;
                }
                // What was seen before may have been given back.
                listed = Some(self.list_blocks(network, &pool).await?);
                continue;
            };
            let block = BlockKey { network: network.to_owned(), range };
            if let CreateOutcome::Created = self.create_block(&block, &pool.name, None).await? {
                self.ipam.metrics.acquired.inc();
                self.report_soon(block);
                return Ok(true);
            }
            self.taken_ranges.entry(network.to_owned()).or_default().insert(range);
            if listed.is_none() {
                listed = Some(self.list_blocks(network, &pool).await?);
            }
        }
        self.exhausted.insert(key, Instant::now() + EXHAUSTED_TTL);
        debug!(network = pool.name, ?family, "no block is left");
        // Blocks of an earlier network of this name are on their way out: no reason to say that all is used up.
        if waiting && self.reused_names.contains(network) {
            self.exhausted.remove(&(network.to_owned(), family));
            self.ipam.fail_request(
                PendingRequest::Any(network.to_owned(), family),
                reused_name_message(&pool.name),
            );
            return Ok(false);
        }
        match listed.filter(|_| waiting) {
            Some(listed) => self.borrow(network, &pool, grid, listed, missing).await,
            None => Ok(false),
        }
    }

    /// Pods come in bursts: how a new block is used is told after the first of them.
    pub(super) fn report_soon(&mut self, block: BlockKey) {
        let now = Instant::now();
        let head_start = self.timings.status_interval.saturating_sub(FIRST_STATUS_DELAY);
        self.reported.insert(block, now.checked_sub(head_start).unwrap_or(now));
    }

    /// A block that is not taken_ranges to be taken, another one on each node.
    pub(super) fn choose_block(&mut self, network: &str, grid: &BlockGrid) -> Option<IpNet> {
        let taken_ranges = self.taken_ranges.get(network);
        let held: BTreeSet<IpNet> = self
            .ipam
            .with_ledger(|ledger| ledger.holdings_of(network).map(|(block, _)| block.range).collect());
        self.attempts += 1;
        let start = digest([self.holder.uid.as_str(), network, &self.attempts.to_string()]);
        let taken = |range: IpNet| {
            held.contains(&range) || taken_ranges.is_some_and(|taken_ranges| taken_ranges.contains(&range))
        };
        grid.free_block(u128::from(start), taken)
    }

    /// Asks others for addresses. What they have to spare is listed, and one that was listed a moment ago may be somebody's
    /// by now: after a few of these the list is too old, and the next one is asked for a moment later.
    pub(super) async fn borrow(
        &mut self,
        network: &str,
        pool: &Pool,
        grid: &BlockGrid,
        listed: Vec<ObservedIpBlock>,
        missing: usize,
    ) -> Result<bool, BlockError> {
        let family = grid.family();
        let (mut requested, mut collisions) = (0, 0);
        while requested < missing.min(MAX_ATTEMPTS) && collisions < MAX_COLLISIONS {
            let Some((address, enclosing)) = self.lending_candidate(network, grid, &listed) else { break };
            let block = BlockKey { network: network.to_owned(), range: address.into() };
            // Tried once only, whatever comes of it: what the list says of it is old by then.
            self.refused_addresses.insert((network.to_owned(), address), Instant::now() + REFUSED_TTL);
            if let CreateOutcome::Created =
                self.create_block(&block, &pool.name, Some(enclosing.spec.holder)).await?
            {
                self.ipam.metrics.borrowed.inc();
                self.report_soon(block.clone());
                self.borrowing_since.insert(block, Instant::now());
                requested += 1;
            } else {
                collisions += 1;
            }
        }
        let key = (network.to_owned(), family);
        if requested >= missing {
            self.contended.remove(&key);
            return Ok(true);
        }
        let incoming =
            |block: &BlockKey, stage| stage == Stage::Acquiring && Family::of(block.range.addr()) == family;
        let incoming = self
            .ipam
            .with_ledger(|ledger| ledger.holdings_of(network).any(|(block, one)| incoming(block, one.stage)));
        let tried = self
            .refused_addresses
            .keys()
            .any(|(uid, address)| uid == network && Family::of(*address) == family);
        if tried || incoming {
            self.back_off_contended(key);
        } else {
            self.contended.remove(&key);
            let holders: BTreeSet<String> = listed.iter().map(|one| one.spec.holder.uid.clone()).collect();
            // Others who come for an address in the same moment need no list of their own.
            let now = Instant::now();
            let listing = self.list_cache.entry(network.to_owned()).or_insert((now, Vec::new()));
            if listing.0 + LIST_TTL <= now || listing.0 == now {
                *listing = (now, listed);
            }
            self.report_exhausted(network, pool, family, &holders);
        }
        Ok(requested > 0)
    }

    /// An address that somebody else may lend, and the block that it is in.
    fn lending_candidate(
        &mut self,
        network: &str,
        grid: &BlockGrid,
        listed: &[ObservedIpBlock],
    ) -> Option<(IpAddr, ObservedIpBlock)> {
        let now = Instant::now();
        let tried = self.refused_addresses.keys().filter(|(uid, _)| uid == network);
        let tried = tried.map(|(_, address)| *address).collect();
        let silent =
            self.silent_lenders.iter().filter(|(_, one)| one.until > now).map(|(uid, _)| uid.clone());
        let silent = silent.collect();
        self.attempts += 1;
        let seed = digest([self.holder.uid.as_str(), network, &self.attempts.to_string()]);
        lending_candidate(listed, grid, &self.holder, &tried, &silent, seed)
    }

    /// Each node waits a little longer every time, and none as long as the others.
    fn back_off_contended(&mut self, key: (String, Family)) {
        let (first, longest) = CONTENTION_BACKOFF;
        let pause = self.contended.get(&key).map_or(first, |one| (one.pause * 2).min(longest));
        let spread = digest([self.holder.uid.as_str(), &key.0, &self.attempts.to_string()]) % 100;
        let spread = u32::try_from(spread).unwrap_or(0);
        self.contended.insert(key, Contention { until: Instant::now() + pause * (50 + spread) / 100, pause });
    }

    pub(super) fn report_exhausted(
        &mut self,
        network: &str,
        pool: &Pool,
        family: Family,
        holders: &BTreeSet<String>,
    ) {
        let family_name = match family {
            Family::V4 => "IPv4",
            Family::V6 => "IPv6",
        };
        let mut why = format!(
            "network {:?} has no free {family_name} address left: add a subnet to spec.ipam.subnets of the BridgeNetwork, or \
            delete pods that use it",
            pool.name
        );
        let now = Instant::now();
        let mut silent =
            self.silent_lenders.iter().filter(|(uid, one)| one.until > now && holders.contains(*uid));
        if let Some((_, SilentLender { node, .. })) = silent.next() {
            why = format!(
                "{why}; node {node} may have some and does not answer: is it up? If it is gone for good, delete its Node"
            );
        }
        self.ipam.metrics.exhausted.inc();
        let last = self.exhausted_events.get(network);
        if last.is_none_or(|last| *last + EVENT_INTERVAL <= now) {
            self.exhausted_events.insert(network.to_owned(), now);
            self.events.record(&pool.name, network, EventReason::AddressesExhausted, why.clone());
        }
        self.ipam.fail_request(PendingRequest::Any(network.to_owned(), family), why);
    }

    pub(super) async fn acquire_address(
        &mut self,
        network: &str,
        address: IpAddr,
    ) -> Result<bool, BlockError> {
        let Some(pool) = self.pools.get(network).cloned() else { return Ok(false) };
        let grid = pool.grid(Family::of(address));
        let Some(range) = grid.and_then(|grid| grid.block_of(address)) else { return Ok(false) };
        let block = BlockKey { network: network.to_owned(), range };
        let held = self.ipam.with_ledger(|ledger| Some(ledger.holding_of(network, address)?.1.stage));
        if let Some(stage @ (Stage::Unverified | Stage::Lost)) = held {
            let state =
                if stage == Stage::Lost { "was taken from this node" } else { "is not taken_ranges in full" };
            let why = format!(
                "address {address} of network {:?} lies in a block of this node that {state}, so it may be in use: ask \
                for another",
                pool.name
            );
            self.ipam.fail_request(PendingRequest::Address(network.to_owned(), address), why);
            return Ok(false);
        }
        let whole = self.ipam.with_ledger(|ledger| ledger.holdings().contains_key(&block));
        if !whole && let CreateOutcome::Created = self.create_block(&block, &pool.name, None).await? {
            self.ipam.metrics.acquired.inc();
            self.report_soon(block);
            return Ok(true);
        }
        let single = BlockKey { network: network.to_owned(), range: address.into() };
        let enclosing = with_timeout(self.api.get_opt(&ipblock::name(&pool.name, range))).await?;
        if enclosing.as_ref().is_some_and(|enclosing| enclosing.spec.network_uid != network) {
            let request = PendingRequest::Address(network.to_owned(), address);
            self.ipam.fail_request(request, reused_name_message(&pool.name));
            return Ok(false);
        }
        let holder = enclosing.map(|enclosing| enclosing.spec.holder);
        let refused = self.refused_addresses.contains_key(&(network.to_owned(), address));
        let request = PendingRequest::Address(network.to_owned(), address);
        if single == block || refused || whole {
            let node =
                holder.map_or_else(|| "another node".to_owned(), |holder| format!("node {}", holder.node));
            self.ipam.fail_request(
                request,
                format!("address {address} of network {:?} belongs to {node}", pool.name),
            );
            return Ok(false);
        }
        // It has just gone: looked at again.
        let Some(holder) = holder else { return Ok(true) };
        if let CreateOutcome::Created = self.create_block(&single, &pool.name, Some(holder)).await? {
            self.ipam.metrics.borrowed.inc();
            self.report_soon(single.clone());
            self.borrowing_since.insert(single, Instant::now());
            return Ok(true);
        }
        let found = with_timeout(self.api.get_opt(&ipblock::name(&pool.name, single.range))).await?;
        let node = found.map_or_else(String::new, |found| format!(" node {}", found.spec.holder.node));
        self.ipam
            .fail_request(request, format!("address {address} of network {:?} is lent to{node}", pool.name));
        Ok(false)
    }
}

fn reused_name_message(network: &str) -> String {
    format!("address blocks of an earlier network {network:?} are still being freed: tried again")
}
