//! The Lease: taken, renewed and given back as `plan::lease` says.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use api::CONTROLLER_MANAGER;
use jiff::Timestamp;
use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
};
use kube::{Api, Client, ResourceExt, api::ObjectMeta, api::PostParams};
use plan::lease::{self, Office, Record, Seen, Turn};
use tokio::sync::watch;
use tracing::{debug, info, warn};

use crate::{
    call,
    error::Chain,
    metrics::{Call, Metrics},
};

/// The name of the Lease.
pub const LEASE: &str = "patchbay-controller";

/// Why this replica does not lead any more.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("another replica, {0}, holds the lease")]
    Taken(String),
    #[error("the lease could not be renewed in time")]
    Late(#[source] Option<call::Error>),
    #[error("the time in office is over")]
    Over,
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

/// Until when a leader's loops may write. They ask before each write, because a process that was stopped for a
/// while wakes up in the middle of anything.
#[derive(Clone, Debug)]
pub struct Tenure(watch::Receiver<Instant>);

/// Who is to stand in the Lease.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Holder {
    Me,
    Nobody,
}

impl Tenure {
    pub fn check(&self) -> Result<(), Error> {
        if now() < *self.0.borrow() { Ok(()) } else { Err(Error::Over) }
    }
}

impl Candidate {
    pub fn new(client: Client, settings: Settings, metrics: Arc<Metrics>) -> Self {
        let api = Api::namespaced(client, &settings.namespace);
        Self { api, settings, metrics, known: None }
    }

    /// Tries until this replica leads.
    pub async fn win(mut self) -> Leader {
        loop {
            let pause = match self.try_win().await {
                Ok(Ok(until)) => {
                    info!(identity = self.settings.identity, "leads");
                    self.metrics.leads(true);
                    return Leader { candidate: self, until: watch::Sender::new(until) };
                }
                Ok(Err(pause)) => pause,
                Err(error) if error.is_conflict() => Duration::ZERO,
                Err(error) => {
                    warn!(error = %Chain(&error), "the lease cannot be reached, tried again");
                    self.settings.look
                }
            };
            tokio::time::sleep(pause.min(self.settings.look)).await;
        }
    }

    /// One look and, if it is our turn, one write: until when we lead, or how long to wait.
    async fn try_win(&mut self) -> Result<Result<Instant, Duration>, call::Error> {
        let seen = self.look().await?.seen.clone();
        if let Turn::Wait(rest) = lease::turn(&seen, &self.settings.identity, self.settings.term, now()) {
            debug!(holder = seen.holder(), ?rest, "another replica leads");
            return Ok(Err(rest));
        }
        let until = lease::tenure(self.write(Holder::Me).await?, self.settings.term);
        Ok(if now() < until { Ok(until) } else { Err(Duration::ZERO) })
    }

    /// A call may take a fifth of a term, so that a leader has several tries before its time is over.
    fn deadline(&self) -> Duration {
        (self.settings.term / 5).clamp(Duration::from_millis(500), call::DEADLINE)
    }

    async fn look(&mut self) -> Result<&Known, call::Error> {
        let call = self.api.get_opt(LEASE);
        let lease = call::within(self.deadline(), &self.metrics, Call::Lease, call).await?;
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
        let params =
            PostParams { field_manager: Some(CONTROLLER_MANAGER.to_owned()), ..PostParams::default() };
        let started = now();
        let call = async {
            if exists {
                self.api.replace(LEASE, &params, &lease).await
            } else {
                self.api.create(&params, &lease).await
            }
        };
        let lease = call::within(self.deadline(), &self.metrics, Call::Lease, call).await?;
        self.saw(Some(lease));
        Ok(started)
    }
}

impl Leader {
    pub fn tenure(&self) -> Tenure {
        Tenure(self.until.subscribe())
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
                        Ok(Ok(_)) => continue,
                        Ok(Err(error)) => error,
                        Err(_) => call::Error::Deadline(rest),
                    }
                }
                Ok(Err(error)) => error,
                Err(_) => call::Error::Deadline(rest),
            };
            warn!(error = %Chain(&attempt), "the lease was not renewed, tried again");
            last = Some(attempt);
            let pause = (self.candidate.settings.renew / 4).min(self.rest());
            tokio::time::sleep(pause).await;
        }
    }

    /// Gives the Lease back, so that another replica can take it at once. Only after the leader's loops have ended.
    pub async fn release(mut self) {
        self.candidate.metrics.leads(false);
        for _ in 0..2 {
            match self.candidate.write(Holder::Nobody).await {
                Ok(_) => return info!(identity = self.candidate.settings.identity, "released the lease"),
                Err(error) if error.is_conflict() => {}
                Err(error) => {
                    return warn!(error = %Chain(&error), "the lease was not released, others have to wait for its end");
                }
            }
            let me = self.candidate.settings.identity.clone();
            match self.candidate.look().await {
                Ok(known) if known.lease.is_some() && known.seen.holder() == Some(&me) => {}
                Ok(_) | Err(_) => return,
            }
        }
    }
}

/// tokio's clock, so that a test can stop it.
fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

fn record(lease: &Lease) -> Record {
    let spec = lease.spec.clone().unwrap_or_default();
    Record {
        holder: spec.holder_identity,
        renewed: spec.renew_time.map(|time| time.0.into()),
        transitions: spec.lease_transitions.unwrap_or_default(),
        term: spec.lease_duration_seconds.and_then(|n| u64::try_from(n).ok()).map(Duration::from_secs),
        version: lease.resource_version().unwrap_or_default(),
    }
}

/// The Lease to write over the one that was seen. What others keep in it survives.
fn written(seen: Option<Lease>, holder: Holder, settings: &Settings, time: Timestamp) -> Lease {
    let mut lease = seen.unwrap_or_else(|| Lease {
        metadata: ObjectMeta {
            name: Some(LEASE.to_owned()),
            namespace: Some(settings.namespace.clone()),
            ..ObjectMeta::default()
        },
        spec: None,
    });
    lease.metadata.managed_fields = None;
    let fresh = lease.spec.is_none();
    let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
    let time = MicroTime(time);
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
        }
        Holder::Nobody => {
            // Like client-go: the shortest term, for those who look at it rather than at the holder.
            spec.lease_duration_seconds = Some(1);
            spec.holder_identity = Some(String::new());
        }
    }
    lease
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        Settings {
            namespace: "ns".to_owned(),
            identity: "me".to_owned(),
            term: Duration::from_millis(9500),
            renew: Duration::from_secs(2),
            look: Duration::from_secs(2),
        }
    }

    fn time(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn spec(lease: &Lease) -> &LeaseSpec {
        lease.spec.as_ref().unwrap()
    }

    #[test]
    fn a_new_lease_starts_with_no_transition_and_a_term_rounded_up() {
        let lease = written(None, Holder::Me, &settings(), time(7));
        let expected = LeaseSpec {
            holder_identity: Some("me".to_owned()),
            lease_duration_seconds: Some(10),
            lease_transitions: Some(0),
            acquire_time: Some(MicroTime(time(7))),
            renew_time: Some(MicroTime(time(7))),
            ..LeaseSpec::default()
        };
        assert_eq!((lease.name_any().as_str(), spec(&lease)), (LEASE, &expected));
    }

    #[test]
    fn renewing_moves_only_the_renew_time() {
        let taken = written(None, Holder::Me, &settings(), time(7));
        let renewed = written(Some(taken.clone()), Holder::Me, &settings(), time(9));
        let expected = LeaseSpec { renew_time: Some(MicroTime(time(9))), ..spec(&taken).clone() };
        assert_eq!(spec(&renewed), &expected);
    }

    #[test]
    fn taking_over_counts_a_transition_and_keeps_what_others_wrote() {
        let mut foreign = written(None, Holder::Me, &settings(), time(1));
        foreign.metadata.resource_version = Some("42".to_owned());
        foreign.labels_mut().insert("kept".to_owned(), "yes".to_owned());
        let rival = LeaseSpec {
            holder_identity: Some("rival".to_owned()),
            lease_transitions: Some(4),
            ..spec(&foreign).clone()
        };
        foreign.spec = Some(rival);
        let taken = written(Some(foreign), Holder::Me, &settings(), time(9));
        assert_eq!(spec(&taken).lease_transitions, Some(5));
        assert_eq!(spec(&taken).acquire_time, Some(MicroTime(time(9))));
        assert_eq!(taken.resource_version().as_deref(), Some("42"));
        assert_eq!(taken.labels().get("kept").map(String::as_str), Some("yes"));
    }

    #[test]
    fn a_released_lease_is_free_and_remembers_its_transitions() {
        let taken = written(None, Holder::Me, &settings(), time(7));
        let released = written(Some(taken), Holder::Nobody, &settings(), time(8));
        let seen = Seen::first(Some(record(&released)), now());
        assert_eq!(lease::turn(&seen, "other", Duration::from_secs(10), now()), Turn::Take);
        assert_eq!(spec(&released).lease_transitions, Some(0));
    }

    #[test]
    fn a_lease_with_nonsense_in_it_is_read() {
        let lease = Lease {
            spec: Some(LeaseSpec { lease_duration_seconds: Some(-3), ..LeaseSpec::default() }),
            ..Lease::default()
        };
        let record = record(&lease);
        assert_eq!((record.term, record.holder), (None, None));
    }

    #[tokio::test(start_paused = true)]
    async fn a_tenure_ends_by_itself() {
        let sender = watch::Sender::new(now() + Duration::from_secs(6));
        let tenure = Tenure(sender.subscribe());
        assert!(tenure.check().is_ok());
        tokio::time::advance(Duration::from_secs(6)).await;
        assert!(tenure.check().is_err());
    }
}
