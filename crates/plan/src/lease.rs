//! Who leads: when a candidate may take the Lease, when it must wait, and when a leader has to stop.
//!
//! Only the own clock counts. A record is judged by the local instant at which it was last seen to *change*; the times that
//! another party wrote into it are compared for equality and never against a clock. A follower takes the Lease after it
//! saw no change for a full term; a leader acts for two thirds of a term after the *start* of its last successful write. The
//! write reaches the API server after it was started and is seen after it arrived, so between the two lies at least a
//! third of a term, which is more than clocks that run at different speeds can eat.

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant, SystemTime};

/// No candidate is configured with a longer term, so a record that claims more is not believed.
pub const LONGEST_TERM: Duration = Duration::from_mins(1);

/// The Lease as the API server showed it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// `None` and the empty string both mean that nobody holds it.
    pub holder: Option<String>,
    /// What the holder wrote as the time of its renewal: compared, never read as a time.
    pub renewed: Option<SystemTime>,
    pub transitions: i32,
    /// The term that the holder announced.
    pub term: Option<Duration>,
    /// The resourceVersion.
    pub version: String,
}

/// What a candidate knows of the Lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The last known holder. A Lease that was deleted keeps it: its holder may not know yet.
    holder: Option<String>,
    term: Option<Duration>,
    record: Option<Record>,
    at: Instant,
}

/// What a candidate does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Write ourselves into the record just seen, with its version. A conflict means that another was quicker.
    Take,
    /// We hold it: renew, with its version.
    Keep,
    /// Another holds it. Look again, and if nothing has changed after this long, it is free.
    Wait(Duration),
}

/// What a leader does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Office {
    /// Still ours: write again.
    Renew,
    /// Stop acting now.
    GiveUp,
}

impl Seen {
    /// The first look, at `now`: the instant at which the answer was in our hands, not when it was asked for.
    pub fn first(record: Option<Record>, now: Instant) -> Self {
        Self { holder: holder(record.as_ref()), term: term(record.as_ref()), record, at: now }
    }

    /// A further look. The instant moves only if something changed.
    #[must_use]
    pub fn look(self, record: Option<Record>, now: Instant) -> Self {
        match record {
            same if same == self.record => self,
            None => Self { record: None, at: now, ..self },
            changed => Self::first(changed, now),
        }
    }

    /// The record to write over, or `None` if there is no Lease and it has to be created.
    pub fn record(&self) -> Option<&Record> {
        self.record.as_ref()
    }

    pub fn holder(&self) -> Option<&str> {
        self.holder.as_deref()
    }
}

fn holder(record: Option<&Record>) -> Option<String> {
    record?.holder.clone().filter(|holder| !holder.is_empty())
}

fn term(record: Option<&Record>) -> Option<Duration> {
    record?.term
}

/// What the candidate `me` with the term `own` does at `now`.
pub fn turn(seen: &Seen, me: &str, own: Duration, now: Instant) -> Turn {
    // The holder's term counts if it is longer, so that replicas with different settings stay safe with each other.
    let term = seen.term.unwrap_or_default().min(LONGEST_TERM).max(own);
    match seen.holder() {
        Some(holder) if holder == me => Turn::Keep,
        Some(_) if now < seen.at + term => Turn::Wait(seen.at + term - now),
        Some(_) | None => Turn::Take,
    }
}

/// Until when a leader may act whose last successful write was *started* at `started`.
pub fn tenure(started: Instant, term: Duration) -> Instant {
    started + term * 2 / 3
}

/// What the leader `me`, who may act `until`, does at `now`.
pub fn office(seen: &Seen, me: &str, until: Instant, now: Instant) -> Office {
    match seen.holder() {
        // Emptied or unwritten under our feet: nobody else holds it, so writing again heals it.
        None if now < until => Office::Renew,
        Some(holder) if holder == me && now < until => Office::Renew,
        Some(_) | None => Office::GiveUp,
    }
}
