//! The Lease: taken, renewed and given back as `plan::lease` says.

#[cfg(test)]
mod tests;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use api::{CONTROLLER_FIELD_MANAGER, ErrorChain, names::LEASE_NAME};
use jiff::Timestamp;
use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
};
use kube::{Api, Client, ResourceExt, api::ObjectMeta, api::PostParams};
use plan::lease::{self, Office, Record, Seen, Turn};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::{
    call::{self, Line},
    metrics::{Call, Metrics},
    tenure::{Tenure, now},
};

/// The mark of a release, an annotation that names who gave the Lease back. Whoever takes it removes the mark.
const RELEASED_BY: &str = "patchbay.dev/released-by";

/// Keeps a fight with another writer from becoming a storm.
const BREATH: Duration = Duration::from_millis(100);

/// Why this replica does not lead any more.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("another replica, {0}, holds the lease")]
    Taken(String),
    #[error("the lease could not be renewed in time")]
    Late(#[source] Option<call::Error>),
}

/// How a candidate behaves.
#[derive(Clone, Debug)]
pub struct Settings {
    pub namespace: String,
    pub identity: String,
    pub term: Duration,
    pub renew: Duration,
    pub look: Duration,
}

/// A replica that would lead.
pub struct Candidate {
    api: Api<Lease>,
    settings: Settings,
    metrics: Arc<Metrics>,
    line: Line,
    known: Option<Known>,
}

/// The Lease as last seen, and what the rule remembers of it.
struct Known {
    lease: Option<Lease>,
    seen: Seen,
}

/// A replica that leads.
pub struct Leader {
    candidate: Candidate,
    until: watch::Sender<Instant>,
}

/// Who is to stand in the Lease.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Holder {
    Me,
    Nobody,
}

impl Candidate {
    pub fn new(client: Client, settings: Settings, metrics: Arc<Metrics>) -> Self {
        let api = Api::namespaced(client, &settings.namespace);
        // A call may take a fifth of a term, so that a leader has several tries before its time is over.
        let deadline = (settings.term / 5).clamp(Duration::from_millis(500), call::DEADLINE);
        let line = Line::new(metrics.clone(), Call::Lease, deadline);
        Self { api, settings, metrics, line, known: None }
    }

    /// Tries until this replica leads, or is told to stop. A write that is under way is awaited: the Lease must not be
    /// left naming one that has gone.
    pub async fn win(mut self, stop: &CancellationToken) -> Option<Leader> {
        loop {
            let pause = match self.try_win(stop).await {
                Ok(Ok(until)) => {
                    info!(identity = self.settings.identity, "leads");
                    self.metrics.leads(true);
                    return Some(Leader { candidate: self, until: watch::Sender::new(until) });
                }
                Ok(Err(pause)) => pause,
                Err(error) if error.is_conflict() => Duration::ZERO,
                Err(error) => {
                    warn!(error = %ErrorChain(&error), "the lease cannot be reached, tried again");
                    self.settings.look
                }
            };
            let pause = pause.min(self.settings.look).max(BREATH);
            if stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
                self.withdraw().await;
                return None;
            }
        }
    }

    /// One look and, if it is our turn, one write: until when we lead, or how long to wait.
    async fn try_win(&mut self, stop: &CancellationToken) -> Result<Result<Instant, Duration>, call::Error> {
        let Some(known) = stop.run_until_cancelled(self.look()).await else {
            return Ok(Err(Duration::ZERO));
        };
        let seen = known?.seen.clone();
        if let Turn::Wait(rest) = self.turn(&seen) {
            debug!(holder = seen.holder(), ?rest, "another replica leads");
            return Ok(Err(rest));
        }
        let until = lease::tenure(self.write(Holder::Me).await?, self.settings.term);
        Ok(if now() < until { Ok(until) } else { Err(Duration::ZERO) })
    }

    /// Gives back what was taken without ever leading: a write that came too late, or whose answer was lost.
    async fn withdraw(&mut self) {
        if self.known.as_ref().is_some_and(|known| known.seen.is_open()) && self.look().await.is_err() {
            return;
        }
        if self.known.as_ref().is_some_and(|known| self.turn(&known.seen) == Turn::Keep) {
            self.release().await;
        }
    }

    fn turn(&self, seen: &Seen) -> Turn {
        lease::turn(seen, &self.settings.identity, self.settings.term, now())
    }

    fn holds(&self) -> bool {
        self.known.as_ref().is_some_and(|known| known.seen.holder() == Some(&self.settings.identity))
    }

    /// Writes nobody into the Lease, so that another replica can take it at once.
    async fn release(&mut self) {
        for _ in 0..2 {
            match self.write(Holder::Nobody).await {
                Ok(_) => return info!(identity = self.settings.identity, "released the lease"),
                Err(error) if error.is_conflict() => {}
                Err(error) => {
                    return warn!(error = %ErrorChain(&error), "the lease was not released, others have to wait for its end");
                }
            }
            if self.look().await.is_err() || !self.holds() {
                return;
            }
        }
    }

    async fn look(&mut self) -> Result<&Known, call::Error> {
        let lease = self.line.read(self.api.get_opt(LEASE_NAME)).await?;
        Ok(self.saw(lease))
    }

    fn saw(&mut self, lease: Option<Lease>) -> &Known {
        let record = lease.as_ref().map(record);
        let seen = match self.known.take() {
            Some(known) => known.seen.look(record, now()),
            None => Seen::first(record, now()),
        };
        self.known.insert(Known { lease, seen })
    }

    /// Writes over exactly what was last seen, and says when that was *started*.
    async fn write(&mut self, holder: Holder) -> Result<Instant, call::Error> {
        let lease = self.known.as_ref().and_then(|known| known.lease.clone());
        let exists = lease.is_some();
        let lease = written(lease, holder, &self.settings, Timestamp::now());
        if let (Holder::Me, Some(known), Some(renewed)) = (holder, &mut self.known, record(&lease).renewed) {
            known.seen.attempt(&self.settings.identity, renewed);
        }
        let params =
            PostParams { field_manager: Some(CONTROLLER_FIELD_MANAGER.to_owned()), ..PostParams::default() };
        let started = now();
        let lease = if exists {
            self.line.change(self.api.replace(LEASE_NAME, &params, &lease)).await?
        } else {
            self.line.create(self.api.create(&params, &lease)).await?
        };
        self.saw(Some(lease));
        Ok(started)
    }
}

impl Leader {
    pub fn tenure(&self) -> Tenure {
        Tenure::new(&self.until)
    }

    /// Renews for as long as it can; returns why it no longer leads.
    pub async fn keep(&mut self) -> Error {
        let lost = loop {
            let rest = self.rest().min(self.candidate.settings.renew);
            tokio::time::sleep(rest).await;
            if let Err(lost) = self.renew().await {
                break lost;
            }
        };
        self.candidate.metrics.leads(false);
        lost
    }

    fn rest(&self) -> Duration {
        self.until.borrow().saturating_duration_since(now())
    }

    /// Tries until one renewal succeeds or the time in office is over.
    async fn renew(&mut self) -> Result<(), Error> {
        let mut last = None;
        loop {
            let me = self.candidate.settings.identity.as_str();
            if let Some(known) = &self.candidate.known
                && lease::office(&known.seen, me, *self.until.borrow(), now()) == Office::GiveUp
            {
                let holder = known.seen.holder().filter(|holder| *holder != me);
                return Err(holder.map_or(Error::Late(last), |holder| Error::Taken(holder.to_owned())));
            }
            let rest = self.rest();
            let attempt = match tokio::time::timeout(rest, self.candidate.write(Holder::Me)).await {
                Ok(Ok(started)) => {
                    self.until.send_replace(lease::tenure(started, self.candidate.settings.term));
                    return Ok(());
                }
                Ok(Err(error)) if error.is_conflict() => {
                    match tokio::time::timeout(self.rest(), self.candidate.look()).await {
                        Ok(Ok(_)) => {
                            tokio::time::sleep(BREATH.min(self.rest())).await;
                            continue;
                        }
                        Ok(Err(error)) => error,
                        Err(_) => call::Error::Deadline(rest),
                    }
                }
                Ok(Err(error)) => error,
                Err(_) => call::Error::Deadline(rest),
            };
            warn!(error = %ErrorChain(&attempt), "the lease was not renewed, tried again");
            last = Some(attempt);
            let pause = (self.candidate.settings.renew / 4).min(self.rest());
            tokio::time::sleep(pause).await;
        }
    }

    /// Gives the Lease back. Only after the leader's loops have ended.
    pub async fn release(mut self) {
        self.candidate.metrics.leads(false);
        self.candidate.release().await;
    }
}

fn record(lease: &Lease) -> Record {
    let spec = lease.spec.clone().unwrap_or_default();
    Record {
        holder: spec.holder_identity,
        renewed: spec.renew_time.map(|time| time.0.into()),
        transitions: spec.lease_transitions.unwrap_or_default(),
        term: spec.lease_duration_seconds.and_then(|n| u64::try_from(n).ok()).map(Duration::from_secs),
        released: lease.annotations().contains_key(RELEASED_BY),
        version: lease.resource_version().unwrap_or_default(),
    }
}

/// The Lease to write over the one that was seen. What others keep in it survives.
fn written(seen: Option<Lease>, holder: Holder, settings: &Settings, time: Timestamp) -> Lease {
    let mut lease = seen.unwrap_or_else(|| Lease {
        metadata: ObjectMeta {
            name: Some(LEASE_NAME.to_owned()),
            namespace: Some(settings.namespace.clone()),
            ..ObjectMeta::default()
        },
        spec: None,
    });
    lease.metadata.managed_fields = None;
    let fresh = lease.spec.is_none();
    let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
    // What the API server keeps of it, so that our own writing is known when it is seen again.
    let time = MicroTime(Timestamp::from_microsecond(time.as_microsecond()).unwrap_or(time));
    let seconds = settings.term.as_millis().div_ceil(1000);
    spec.renew_time = Some(time.clone());
    match holder {
        Holder::Me => {
            spec.lease_duration_seconds = Some(i32::try_from(seconds).unwrap_or(i32::MAX));
            if spec.holder_identity.as_ref() != Some(&settings.identity) {
                spec.acquire_time = Some(time);
                let transitions = spec.lease_transitions.unwrap_or_default();
                spec.lease_transitions = Some(if fresh { 0 } else { transitions.saturating_add(1) });
            }
            spec.holder_identity = Some(settings.identity.clone());
            lease.annotations_mut().remove(RELEASED_BY);
        }
        Holder::Nobody => {
            // Like client-go: the shortest term, for those who look at it rather than at the mark.
            spec.lease_duration_seconds = Some(1);
            spec.holder_identity = Some(String::new());
            lease.annotations_mut().insert(RELEASED_BY.to_owned(), settings.identity.clone());
        }
    }
    lease
}
