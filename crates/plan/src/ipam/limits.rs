//! Time limits of a block holder. They are the same for every holder; the caller passes the current time.

use std::time::{Duration, Instant};

use super::BlockKey;

/// A holder without contact to the API server must not allocate after this time: another holder may have its blocks by
/// then.
pub const OFFLINE_LIMIT: Duration = Duration::from_mins(5);
/// How long a broken watch can go unnoticed: until the server should have ended the watch and the next one should have
/// been answered.
pub const UNNOTICED_BREAK: Duration = Duration::from_secs(150);
/// How long a holder allocates after it noticed that contact was lost.
pub const OFFLINE_GRACE: Duration = OFFLINE_LIMIT.saturating_sub(UNNOTICED_BREAK);
/// How long a lender may take to answer.
pub const LENDER_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a lender may take to answer if it updates its block meanwhile: it is busy, not down.
pub const BUSY_LENDER_TIMEOUT: Duration = Duration::from_secs(15);
/// How long a holder does not borrow from a lender that did not answer: first and longest.
pub const LENDER_BACKOFF: Backoff =
    Backoff { first: Duration::from_secs(5), longest: Duration::from_secs(60) };
/// How long a holder waits before it lists again while others borrow the same addresses: first and longest.
pub const CONTENTION_BACKOFF: Backoff =
    Backoff { first: Duration::from_millis(100), longest: Duration::from_secs(2) };
/// How long a refused address is not requested again. The status of its block shows when it is free.
pub const REFUSED_TTL: Duration = Duration::from_millis(500);
/// How long a holder assumes that a network has no free block.
pub const EXHAUSTED_TTL: Duration = Duration::from_secs(30);
/// How long the API server may still process a create request that timed out.
pub const UNANSWERED_CREATE_TTL: Duration = Duration::from_secs(90);
/// How long a list of blocks is reused.
pub const LIST_TTL: Duration = Duration::from_secs(1);
/// How often a holder checks a lent address whose borrower IPBlock the watch does not show.
const LENT_CHECK_INTERVAL: Duration = Duration::from_secs(60);
/// How often a holder checks whether an unverified block can be released.
const VERIFY_INTERVAL: Duration = Duration::from_secs(60);

/// Longest time from a sandbox's first address until the runtime lists the sandbox: the kubelet gives up after four minutes.
pub const SANDBOX_CREATION_TIMEOUT: Duration = Duration::from_secs(300);

/// The time limits that a holder can set.
#[derive(Debug, Clone, Copy)]
pub struct Timings {
    /// How long an empty block is held.
    pub idle_block: Duration,
    /// How long an unused borrowed address is held.
    pub idle_address: Duration,
    /// The minimum time between two status updates of a block.
    pub status_interval: Duration,
    /// How often leases of sandboxes that no longer exist are collected.
    pub gc_interval: Duration,
    /// The age at which a lease is collected if the runtime does not list its sandbox.
    pub min_lease_age: Duration,
    /// The same for leases of networks that are being deleted. The runtime lists a sandbox only some time after its ADD.
    pub min_closed_lease_age: Duration,
    /// How long the holder allocates after it noticed that contact was lost.
    pub offline_grace: Duration,
}

impl Default for Timings {
    fn default() -> Self {
        Self {
            idle_block: Duration::from_secs(300),
            idle_address: Duration::from_secs(3),
            status_interval: Duration::from_secs(5),
            gc_interval: Duration::from_secs(600),
            min_lease_age: Duration::from_secs(600),
            min_closed_lease_age: SANDBOX_CREATION_TIMEOUT,
            offline_grace: OFFLINE_GRACE,
        }
    }
}

impl Timings {
    /// How long a block is held after it became empty.
    pub fn idle_time(&self, block: &BlockKey) -> Duration {
        if block.is_single() { self.idle_address } else { self.idle_block }
    }

    pub fn verify_interval(&self) -> Duration {
        VERIFY_INTERVAL.min(self.gc_interval)
    }

    pub fn lent_check_interval(&self) -> Duration {
        LENT_CHECK_INTERVAL.min(self.gc_interval)
    }
}

/// A wait that doubles from the first to the longest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    pub first: Duration,
    pub longest: Duration,
}

impl Backoff {
    /// The wait after `last`, or the first one.
    pub fn after(self, last: Option<Duration>) -> Duration {
        last.map_or(self.first, |last| (last * 2).min(self.longest))
    }
}

/// Contact of a holder with the API server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Contact {
    /// The holder has not read its blocks yet.
    Never,
    Now,
    /// Contact was lost. The holder may allocate until this time.
    Lost {
        allocate_until: Instant,
    },
}

impl Contact {
    /// Whether the holder may still allocate: no other holder can have its blocks yet.
    pub fn is_fresh(self, now: Instant) -> bool {
        match self {
            Self::Never => false,
            Self::Now => true,
            Self::Lost { allocate_until } => now < allocate_until,
        }
    }

    /// The contact after an observation. The first loss counts.
    #[must_use]
    pub fn observe(self, new: Self) -> Self {
        match (self, new) {
            (Self::Lost { allocate_until }, Self::Lost { .. }) => Self::Lost { allocate_until },
            (Self::Never, Self::Lost { .. }) => Self::Never,
            (_, new) => new,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::NODE_GONE_GRACE;

    #[test]
    fn a_holder_stops_before_the_blocks_of_its_gone_node_are_freed() {
        assert!(OFFLINE_LIMIT < NODE_GONE_GRACE);
        assert_eq!(OFFLINE_GRACE + UNNOTICED_BREAK, OFFLINE_LIMIT);
    }

    #[test]
    fn a_holder_allocates_until_the_grace_after_the_first_loss_is_over() {
        let lost = Instant::now();
        let later = lost + Duration::from_secs(60);
        let lost_at = |at| Contact::Lost { allocate_until: at + OFFLINE_GRACE };
        assert!(!Contact::Never.is_fresh(lost));
        assert_eq!(Contact::Never.observe(lost_at(lost)), Contact::Never, "it has read nothing yet");
        let contact = Contact::Now.observe(lost_at(lost)).observe(lost_at(later));
        assert_eq!(contact, lost_at(lost));
        assert!(contact.is_fresh(lost + OFFLINE_GRACE.saturating_sub(Duration::from_millis(1))));
        assert!(!contact.is_fresh(lost + OFFLINE_GRACE));
        assert!(contact.observe(Contact::Now).is_fresh(lost + OFFLINE_LIMIT));
    }

    #[test]
    fn a_backoff_doubles_to_its_longest_wait() {
        let backoff = Backoff { first: Duration::from_secs(5), longest: Duration::from_secs(12) };
        let mut waits = vec![backoff.after(None)];
        for _ in 0..3 {
            waits.push(backoff.after(waits.last().copied()));
        }
        assert_eq!(waits.iter().map(Duration::as_secs).collect::<Vec<_>>(), [5, 10, 12, 12]);
    }
}
