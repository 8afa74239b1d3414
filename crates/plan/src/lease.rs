//! Leader election: when a candidate may acquire the Lease, when it must wait, and when a leader has to stop.
//!
//! Only the local clock counts. A record is judged by the local instant at which it was last observed to *change*; the times
//! that other replicas wrote into it are compared for equality and never against a clock. A candidate acquires the Lease
//! after it observed no change for a full lease duration; a leader acts for two thirds of a lease duration after the *start*
//! of its last successful write. The write reaches the API server after it was started, and other candidates observe it
//! later still. So at least a third of a lease duration lies between the two, more than clocks of different speeds can
//! consume.
//!
//! Other writers may change the Lease too: a user with kubectl, a tool. So a record without a holder is not free by that
//! alone. It is free at once if it carries the release annotation, which only a replica that led and has stopped sets, and
//! which every replica that acquires the Lease removes: while the annotation is present, no replica has acquired the Lease
//! since. In every other case the last leader may not know that it lost the Lease, and a full lease duration has to pass, as
//! after a deletion.
//!
//! Two first observations need no wait, because nothing can be known and a new cluster should not wait: no Lease at all, and
//! one that was never renewed. A user who deletes the Lease of a running leader and starts a new replica within the same ten
//! seconds therefore gets two leaders.

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant, SystemTime};

/// The longest lease duration that a candidate may be configured with. A record that claims more is capped to this.
pub const MAX_LEASE_DURATION: Duration = Duration::from_mins(1);

/// The Lease as the API server returned it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseRecord {
    /// `None` and the empty string both mean that the Lease has no holder.
    pub holder: Option<String>,
    /// The renew time that the holder wrote: compared for equality, never read as a time.
    pub renew_time: Option<SystemTime>,
    pub transitions: i32,
    /// The lease duration that the holder announced.
    pub duration: Option<Duration>,
    /// Whether the record carries the release annotation.
    pub released: bool,
    pub resource_version: String,
}

/// What a candidate knows about the Lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedLease {
    holder: Holder,
    duration: Option<Duration>,
    record: Option<LeaseRecord>,
    changed_at: Instant,
    /// If the record names this candidate: whether this candidate wrote it, in this process or an earlier one.
    written_by_us: bool,
    /// Holder and renew time of a write whose outcome is unknown.
    pending_write: Option<(String, SystemTime)>,
}

/// Which replica may act as leader.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Holder {
    Free,
    /// The Lease names no holder but was not released: its last holder may not know yet.
    Unknown,
    Named(String),
}

/// What a candidate does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElectionDecision {
    /// Write ourselves into the observed record, with its resourceVersion. A conflict means that another writer was first.
    Acquire,
    /// We hold the Lease: renew it, with its resourceVersion.
    Renew,
    /// Another replica holds the Lease. It is free if nothing changes for this long.
    Wait(Duration),
}

/// What a leader does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenewDecision {
    Renew,
    /// Stop acting now.
    StepDown,
}

impl ObservedLease {
    /// The first observation. `now` is the instant at which the response had arrived, not when the request was sent.
    pub fn first(record: Option<LeaseRecord>, now: Instant) -> Self {
        let holder = match &record {
            Some(record) if record.renew_time.is_some() => holder(record),
            Some(LeaseRecord { holder: Some(holder), .. }) if !holder.is_empty() => {
                Holder::Named(holder.clone())
            }
            Some(_) | None => Holder::Free,
        };
        let duration = record.as_ref().and_then(|record| record.duration);
        Self { holder, duration, record, changed_at: now, written_by_us: true, pending_write: None }
    }

    /// A further observation. The instant of the last change moves only if something changed.
    #[must_use]
    pub fn observe(self, record: Option<LeaseRecord>, now: Instant) -> Self {
        if record == self.record {
            return self;
        }
        let holder = record.as_ref().map_or(Holder::Unknown, holder);
        let duration = record.as_ref().and_then(|record| record.duration);
        // A holder that is no longer named keeps the longest duration known of it.
        let duration = if holder == Holder::Unknown { duration.max(self.duration) } else { duration };
        let written_by_us = self.pending_write.is_some_and(|(me, renew_time)| {
            holder == Holder::Named(me)
                && record.as_ref().is_some_and(|record| record.renew_time == Some(renew_time))
        });
        Self { holder, duration, record, changed_at: now, written_by_us, pending_write: None }
    }

    /// Remembers a write before it is sent, so that it is recognised in a later observation even if its response is lost. A
    /// record that names this candidate without such a write comes from another writer, and the previous leader may not know
    /// about it yet.
    pub fn record_attempt(&mut self, me: &str, renew_time: SystemTime) {
        self.pending_write = Some((me.to_owned(), renew_time));
    }

    /// Whether the outcome of the last write is unknown.
    pub fn write_pending(&self) -> bool {
        self.pending_write.is_some()
    }

    /// The record to overwrite, or `None` if the Lease has to be created.
    pub fn record(&self) -> Option<&LeaseRecord> {
        self.record.as_ref()
    }

    pub fn holder(&self) -> Option<&str> {
        match &self.holder {
            Holder::Named(holder) => Some(holder),
            Holder::Free | Holder::Unknown => None,
        }
    }
}

fn holder(record: &LeaseRecord) -> Holder {
    match &record.holder {
        Some(holder) if !holder.is_empty() => Holder::Named(holder.clone()),
        Some(_) | None if record.released => Holder::Free,
        Some(_) | None => Holder::Unknown,
    }
}

/// What the candidate `me`, configured with `lease_duration`, does at `now`.
pub fn decide_election(
    observed: &ObservedLease,
    me: &str,
    lease_duration: Duration,
    now: Instant,
) -> ElectionDecision {
    // The longer of the holder's duration and ours counts, so that replicas with different settings are safe together.
    let duration = observed.duration.unwrap_or_default().min(MAX_LEASE_DURATION).max(lease_duration);
    let expires = observed.changed_at + duration;
    match &observed.holder {
        Holder::Named(holder) if holder == me && observed.written_by_us => ElectionDecision::Renew,
        Holder::Named(_) | Holder::Unknown if now < expires => ElectionDecision::Wait(expires - now),
        Holder::Free | Holder::Named(_) | Holder::Unknown => ElectionDecision::Acquire,
    }
}

/// Until when a leader may act whose last successful write was *started* at `started`.
pub fn fence_until(started: Instant, lease_duration: Duration) -> Instant {
    started + lease_duration * 2 / 3
}

/// What the leader `me`, which may act `until`, does at `now`.
pub fn decide_renewal(observed: &ObservedLease, me: &str, until: Instant, now: Instant) -> RenewDecision {
    match observed.holder() {
        // Another writer cleared or deleted the record. No replica holds the Lease, so writing it again repairs it.
        None if now < until => RenewDecision::Renew,
        Some(holder) if holder == me && now < until => RenewDecision::Renew,
        Some(_) | None => RenewDecision::StepDown,
    }
}
