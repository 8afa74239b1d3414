//! Acquires blocks, and the blocks of requested addresses.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    time::{Duration, Instant},
};

use api::ipblock;
use plan::ipam::{
    AcquireError, AddressSource, BlockKey, Family, NoFreeBlock, ObservedIpBlock, RequestedAddress,
    SearchStart, limits::LIST_TTL,
};
use tracing::debug;

use super::{
    controller::{BlockController, MAX_ATTEMPTS, now},
    ipblocks::{BlockError, CreateOutcome, with_timeout},
    observed::observed,
};
use crate::{event::EventReason, ipam::waiters::PendingRequest};

/// The minimum time between two events of one network.
const EVENT_INTERVAL: Duration = Duration::from_secs(60);

/// Recent lists of blocks, by the UID of the network.
#[derive(Default)]
pub struct RecentLists(BTreeMap<String, (Instant, Vec<ObservedIpBlock>)>);

impl RecentLists {
    pub fn retain_networks(&mut self, exists: impl Fn(&str) -> bool) {
        self.0.retain(|uid, _| exists(uid));
    }

    pub fn get(&self, network: &str, now: Instant) -> Option<Vec<ObservedIpBlock>> {
        let (_, all) = self.0.get(network).filter(|(at, _)| *at + LIST_TTL > now)?;
        Some(all.clone())
    }

    /// Other ADDs that need an address now reuse this list. Reuse does not prolong its life.
    pub fn reuse(&mut self, network: &str, listed: Vec<ObservedIpBlock>, now: Instant) {
        if self.get(network, now).is_none() {
            self.0.insert(network.to_owned(), (now, listed));
        }
    }
}

/// When an event last reported that a network is exhausted, by its UID.
#[derive(Default)]
pub struct ExhaustedEvents(BTreeMap<String, Instant>);

impl ExhaustedEvents {
    pub fn retain_networks(&mut self, exists: impl Fn(&str) -> bool) {
        self.0.retain(|uid, _| exists(uid));
    }

    /// Whether to record an event now; the next one is then due later.
    fn take_due(&mut self, network: &str, now: Instant) -> bool {
        let due = self.0.get(network).is_none_or(|last| *last + EVENT_INTERVAL <= now);
        if due {
            self.0.insert(network.to_owned(), now);
        }
        due
    }
}

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
        let request = PendingRequest::Any(network.to_owned(), family);
        let waiting = self.ipam.is_waiting(&request);
        let contended = self.borrowing.is_contended(&key, now());
        let mut listed = match self.search.start(&key, waiting, contended) {
            SearchStart::Skip => return Ok(false),
            SearchStart::List => Some(self.list_blocks(network, &pool.name).await?),
            SearchStart::Guess => None,
        };
        for _ in 0..MAX_ATTEMPTS {
            let (search, holder) = (&mut self.search, &self.holder);
            let range = self.ipam.with_ledger(|ledger| search.next_block(holder, network, grid, ledger));
            let Some(range) = range else {
                if listed.is_some() {
                    break;
                }
                // Ranges seen as taken may have been released.
                listed = Some(self.list_blocks(network, &pool.name).await?);
                continue;
            };
            let block = BlockKey { network: network.to_owned(), range };
            if self.acquire_block(block, &pool.name).await? {
                return Ok(true);
            }
            self.search.mark_taken(network, range);
            if listed.is_none() {
                listed = Some(self.list_blocks(network, &pool.name).await?);
            }
        }
        debug!(network = pool.name, ?family, "no block is free");
        match (self.search.found_none(&key, waiting, now()), listed) {
            (NoFreeBlock::NameReused, _) => {
                let error = AcquireError::NameReused { network: pool.name.clone() };
                self.ipam.fail_request(request, error.to_string());
                Ok(false)
            }
            (NoFreeBlock::Borrow, Some(listed)) => self.borrow(network, &pool, grid, listed, missing).await,
            (NoFreeBlock::Borrow | NoFreeBlock::Wait, _) => Ok(false),
        }
    }

    /// Creates the IPBlock of a whole block; returns whether this node has it now.
    async fn acquire_block(&mut self, block: BlockKey, network: &str) -> Result<bool, BlockError> {
        let CreateOutcome::Created = self.create_block(&block, network, None).await? else {
            return Ok(false);
        };
        self.ipam.metrics.acquired.inc();
        self.reports.mark_created(block, &self.timings, now());
        Ok(true)
    }

    /// Fails the ADDs of an exhausted network.
    pub(super) fn report_exhausted(
        &mut self,
        network: &str,
        name: &str,
        family: Family,
        error: &AcquireError,
    ) {
        self.ipam.metrics.exhausted.inc();
        if self.exhausted_events.take_due(network, now()) {
            self.events.record(name, network, EventReason::AddressesExhausted, error.to_string());
        }
        self.ipam.fail_request(PendingRequest::Any(network.to_owned(), family), error.to_string());
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
        let requested = RequestedAddress { network, name: &pool.name, address, block: &block };
        if let Err(error) = self.ipam.with_ledger(|ledger| requested.check_own_block(ledger)) {
            return Ok(self.fail_address(network, address, &error));
        }
        // A block that shadows it may be gone since the last list.
        if !self.search.is_listed(network) || self.search.is_shadowed(network, range) {
            self.list_blocks(network, &pool.name).await?;
        }
        if self.search.is_shadowed(network, range) {
            let error = AcquireError::NameReused { network: pool.name.clone() };
            return Ok(self.fail_address(network, address, &error));
        }
        let held = self.ipam.with_ledger(|ledger| ledger.holdings().contains_key(&block));
        if !held && self.acquire_block(block.clone(), &pool.name).await? {
            return Ok(true);
        }
        let enclosing = self.get_block(&ipblock::name(&pool.name, range)).await?;
        let may_borrow = !held && !self.borrowing.is_tried(network, address);
        let lender = match requested.source(enclosing.as_ref(), may_borrow) {
            AddressSource::Lender(lender) => lender,
            AddressSource::Released => return Ok(true),
            AddressSource::Unavailable(error) => return Ok(self.fail_address(network, address, &error)),
        };
        let single = BlockKey { network: network.to_owned(), range: address.into() };
        if let CreateOutcome::Created = self.request_address(single, &pool.name, lender).await? {
            return Ok(true);
        }
        let borrower = self.get_block(&ipblock::name(&pool.name, address.into())).await?;
        let holder = borrower.map(|borrower| borrower.spec.holder);
        let error = AcquireError::LentTo { address, network: pool.name.clone(), holder };
        Ok(self.fail_address(network, address, &error))
    }

    /// Fails the ADDs that wait for an address. Returns false: nothing changed.
    fn fail_address(&self, network: &str, address: IpAddr, error: &AcquireError) -> bool {
        let request = PendingRequest::Address(network.to_owned(), address);
        self.ipam.fail_request(request, error.to_string());
        false
    }

    async fn get_block(&mut self, name: &str) -> Result<Option<ObservedIpBlock>, BlockError> {
        let found = with_timeout(self.api.get_opt(name)).await?;
        Ok(found.and_then(observed).map(|(_, object)| object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_reused_for_a_second_and_reuse_does_not_prolong_it() {
        let (mut lists, start) = (RecentLists::default(), Instant::now());
        lists.reuse("net", Vec::new(), start);
        let later = start + LIST_TTL / 2;
        assert!(lists.get("net", later).is_some() && lists.get("other", later).is_none());
        lists.reuse("net", Vec::new(), later);
        assert!(lists.get("net", start + LIST_TTL).is_none());
        lists.reuse("net", Vec::new(), start + LIST_TTL);
        lists.retain_networks(|_| false);
        assert!(lists.get("net", start + LIST_TTL).is_none());
    }

    #[test]
    fn an_exhausted_network_has_one_event_a_minute() {
        let (mut events, start) = (ExhaustedEvents::default(), Instant::now());
        assert!(events.take_due("net", start));
        assert!(!events.take_due("net", start + EVENT_INTERVAL / 2));
        assert!(events.take_due("other", start + EVENT_INTERVAL / 2));
        assert!(events.take_due("net", start + EVENT_INTERVAL));
    }
}
