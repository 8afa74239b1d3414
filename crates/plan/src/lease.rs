//! Who leads: when a candidate may take the Lease, when it must wait, and when a leader has to stop.
//!
//! Only the own clock counts. A record is judged by the local instant at which it was last seen to *change*; the times that
//! another party wrote into it are compared for equality and never against a clock. A follower takes the Lease after it
//! saw no change for a full term; a leader acts for two thirds of a term after the *start* of its last successful write. The
//! write reaches the API server after it was started and is seen after it arrived, so between the two lies at least a
//! third of a term, which is more than clocks that run at different speeds can eat.
//!
//! Others may write the Lease too: a person with kubectl, a tool. So a record without a holder is not free by that alone. It is
//! free at once if it bears the mark of a release, which only a replica that led and has stopped puts there and every
//! replica that takes the Lease removes: as long as the mark stands, none of ours has taken it since. In every other case
//! whoever led may not know yet, and a full term has to pass, as after a deletion.
//!
//! Two first looks go without a wait, because nothing can be known and a new cluster should not wait: no Lease at all, and one that
//! nobody ever renewed. Whoever deletes the Lease under a leader and starts a new replica in the same ten seconds has two.

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
    /// It bears the mark of a release.
    pub released: bool,
    /// The resourceVersion.
    pub version: String,
}

/// What a candidate knows of the Lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    holder: Holder,
    term: Option<Duration>,
    record: Option<Record>,
    at: Instant,
    /// The record, should it name us, is one that we wrote, now or in an earlier life.
    ours: bool,
    /// Holder and renewal of the write whose fate is open.
    attempt: Option<(String, SystemTime)>,
}

/// Who may act as leader.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Holder {
    Nobody,
    /// The Lease names nobody, but was not given back: its last holder may not know yet.
    Somebody,
    Named(String),
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
        let holder = match &record {
            Some(record) if record.renewed.is_some() => holder(record),
            Some(Record { holder: Some(holder), .. }) if !holder.is_empty() => Holder::Named(holder.clone()),
            Some(_) | None => Holder::Nobody,
        };
        let term = record.as_ref().and_then(|record| record.term);
        Self { holder, term, record, at: now, ours: true, attempt: None }
    }

    /// A further look. The instant moves only if something changed.
    #[must_use]
    pub fn look(self, record: Option<Record>, now: Instant) -> Self {
        if record == self.record {
            return self;
        }
        let holder = record.as_ref().map_or(Holder::Somebody, holder);
        let term = record.as_ref().and_then(|record| record.term);
        // The term of one who is no longer named is the last one known.
        let term = if holder == Holder::Somebody { term.max(self.term) } else { term };
        let ours = self.attempt.is_some_and(|(me, renewed)| {
            holder == Holder::Named(me) && record.as_ref().is_some_and(|it| it.renewed == Some(renewed))
        });
        Self { holder, term, record, at: now, ours, attempt: None }
    }

    /// Remembers what is about to be written, so that it is known when it is seen, even if the answer is lost. A record that
    /// names us without our doing is somebody else's writing: the one who led may not know yet.
    pub fn attempt(&mut self, me: &str, renewed: SystemTime) {
        self.attempt = Some((me.to_owned(), renewed));
    }

    /// Whether the fate of our last write is not known yet.
    pub fn is_open(&self) -> bool {
        self.attempt.is_some()
    }

    /// The record to write over, or `None` if there is no Lease and it has to be created.
    pub fn record(&self) -> Option<&Record> {
        self.record.as_ref()
    }

    pub fn holder(&self) -> Option<&str> {
        match &self.holder {
            Holder::Named(holder) => Some(holder),
            Holder::Nobody | Holder::Somebody => None,
        }
    }
}

fn holder(record: &Record) -> Holder {
    match &record.holder {
        Some(holder) if !holder.is_empty() => Holder::Named(holder.clone()),
        Some(_) | None if record.released => Holder::Nobody,
        Some(_) | None => Holder::Somebody,
    }
}

/// What the candidate `me` with the term `own` does at `now`.
pub fn turn(seen: &Seen, me: &str, own: Duration, now: Instant) -> Turn {
    // The holder's term counts if it is longer, so that replicas with different settings stay safe with each other.
    let term = seen.term.unwrap_or_default().min(LONGEST_TERM).max(own);
    match &seen.holder {
        Holder::Named(holder) if holder == me && seen.ours => Turn::Keep,
        Holder::Named(_) | Holder::Somebody if now < seen.at + term => Turn::Wait(seen.at + term - now),
        Holder::Nobody | Holder::Named(_) | Holder::Somebody => Turn::Take,
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
