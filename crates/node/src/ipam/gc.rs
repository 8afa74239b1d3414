//! Releases the leases of attachments and sandboxes that no longer exist.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use futures::future::BoxFuture;
use nix::time::{ClockId, clock_gettime};
use plan::ipam::{AttachmentKey, Lease, LedgerRecord, Timings};
use tracing::{debug, info, warn};
use wire::cni::Error;

use super::{Ipam, replies::not_recorded};

/// How soon garbage collection runs again after the container runtime did not answer, and while the deletion of a network
/// waits for its leases.
const GC_RETRY: Duration = Duration::from_secs(60);

/// Lists the IDs of the container runtime's sandboxes.
pub type ListSandboxes =
    Box<dyn Fn(SandboxFilter) -> BoxFuture<'static, Result<BTreeSet<String>, String>> + Send + Sync>;

/// Which sandboxes to list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SandboxFilter {
    /// Every sandbox: none of them loses its lease.
    All,
    /// Those that may use an address of a network: neither the daemon's own nor one on the host's network. As long as one of
    /// them exists, an unverified block stays closed.
    Witnesses,
}

/// Collects the leases of sandboxes that the container runtime no longer lists, at intervals.
#[derive(Debug, Clone, Copy)]
pub struct GarbageCollector {
    next: Instant,
}

impl GarbageCollector {
    /// The first collection is due now.
    pub fn new(now: Instant) -> Self {
        Self { next: now }
    }

    pub fn is_due(&self, now: Instant) -> bool {
        now >= self.next
    }

    pub fn next(&self) -> Instant {
        self.next
    }

    /// Makes the next collection due now.
    pub fn expedite(&mut self, now: Instant) {
        self.next = now;
    }

    /// Releases the leases of sandboxes that no longer exist.
    pub async fn collect(&mut self, ipam: &Ipam, list: &ListSandboxes, timings: &Timings, now: Instant) {
        self.next = now + timings.gc_interval;
        // Sandboxes that are created during the list call are not in its result.
        let started = uptime();
        let live = match list(SandboxFilter::All).await {
            Ok(live) => live,
            Err(problem) => {
                // The runtime may only be restarting.
                self.next = Instant::now() + GC_RETRY.min(timings.gc_interval);
                return debug!(problem, "cannot list sandboxes; leases are not collected");
            }
        };
        if let Err(error) = ipam.gc_sandboxes(&live, started, timings) {
            warn!(%error, "cannot release leases of sandboxes that no longer exist; retrying");
        }
        // The deletion of a network waits for its leases.
        if ipam.is_close_pending() {
            self.next = now + GC_RETRY.min(timings.gc_interval);
        }
    }
}

/// Seconds since boot, unaffected by changes of the clock.
pub fn uptime() -> i64 {
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(0, |time| time.tv_sec())
}

impl Ipam {
    /// CNI GC: releases the leases of a network's configuration that are not in `valid`.
    pub fn gc_config(
        &self,
        network: &str,
        config: &str,
        valid: &BTreeSet<AttachmentKey>,
    ) -> Result<usize, Error> {
        let keys = self.lock().ledger.leases_outside(network, config, valid);
        self.release_all(keys, "released addresses of an attachment that the runtime no longer lists")
    }

    /// Releases the leases whose sandbox was not live when the runtime listed the sandboxes.
    pub fn gc_sandboxes(
        &self,
        live: &BTreeSet<String>,
        listed: i64,
        timings: &Timings,
    ) -> Result<usize, Error> {
        let keys = {
            let state = self.lock();
            let is_closed = |uid: &str| state.closed.as_ref().is_some_and(|closed| closed.contains_key(uid));
            state.ledger.leases_without_sandbox(live, listed, timings, is_closed)
        };
        let count = self.release_all(keys, "released addresses of a sandbox that no longer exists")?;
        self.metrics.collected.inc_by(count as u64);
        Ok(count)
    }

    fn release_all(&self, keys: Vec<AttachmentKey>, message: &str) -> Result<usize, Error> {
        let mut state = self.lock();
        let held = keys.into_iter().filter_map(|key| state.ledger.leases().get(&key).cloned());
        let held: Vec<Lease> = held.collect();
        if held.is_empty() {
            return Ok(0);
        }
        let records: Vec<LedgerRecord> =
            held.iter().map(|lease| LedgerRecord::Freed(lease.key.clone())).collect();
        self.append(&mut state, &records).map_err(|error| not_recorded(&error))?;
        for lease in &held {
            info!(container = lease.key.container, addresses = ?lease.addresses, "{message}");
        }
        self.update_metrics(&state);
        drop(state);
        self.changed.notify_all();
        self.wake.notify_one();
        self.repairs.signal();
        Ok(held.len())
    }
}
