//! Acquires, renews and releases the Lease as `plan::lease` decides.

#[cfg(test)]
mod tests;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use api::{CONTROLLER_FIELD_MANAGER, ErrorChain, names::LEASE_NAME};
use client::{
    fence::{LeaseFence, now},
    request::{self, ApiCall},
};
use jiff::Timestamp;
use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
};
use kube::{Api, Client, ResourceExt, api::ObjectMeta, api::PostParams};
use plan::lease::{self, ElectionDecision, LeaseRecord, ObservedLease, RenewDecision};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::metrics::{ApiCallKind, Metrics};

/// The release annotation: names the replica that released the Lease. The replica that acquires the Lease removes it.
const RELEASED_BY: &str = "patchbay.dev/released-by";

/// The minimum wait after a conflict.
const CONFLICT_RETRY: Duration = Duration::from_millis(100);

/// Why this replica no longer leads.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("replica {0} holds the lease")]
    HeldByOther(String),
    #[error("the lease was not renewed in time")]
    RenewTimeout(#[source] Option<request::Error>),
}

/// How a candidate behaves.
#[derive(Clone, Debug)]
pub struct ElectionConfig {
    pub namespace: String,
    pub identity: String,
    pub lease_duration: Duration,
    /// How often the leader renews the Lease.
    pub renew_interval: Duration,
    /// How often the other replicas try to acquire it.
    pub retry_period: Duration,
}

/// A replica that tries to become the leader.
pub struct Candidate {
    api: Api<Lease>,
    config: ElectionConfig,
    metrics: Arc<Metrics>,
    call: ApiCall,
    last: Option<LeaseSnapshot>,
}

/// The Lease as last read, and the history of observations that decisions need.
struct LeaseSnapshot {
    lease: Option<Lease>,
    observed: ObservedLease,
}

/// A replica that leads.
pub struct Leader {
    candidate: Candidate,
    until: watch::Sender<Instant>,
}

/// What a write does to the Lease.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LeaseWrite {
    /// Names this replica as the holder: acquires or renews.
    Hold,
    Release,
}

impl Candidate {
    pub fn new(client: Client, config: ElectionConfig, metrics: Arc<Metrics>) -> Self {
        let api = Api::namespaced(client, &config.namespace);
        // A fifth of the lease duration, so that a leader can retry several times before its fence expires.
        let timeout = (config.lease_duration / 5).clamp(Duration::from_millis(500), request::DEFAULT_TIMEOUT);
        let call = metrics.api_call_within(timeout, ApiCallKind::Lease);
        Self { api, config, metrics, call, last: None }
    }

    /// Tries until this replica leads or `stop` is cancelled. Awaits a write that is in flight: the Lease must not be left
    /// naming a replica that has stopped.
    /// A replica that led before has observed the Lease ever since, so the rules for the next term are the same.
    pub async fn acquire(mut self, stop: &CancellationToken) -> Option<Leader> {
        loop {
            let wait = match self.try_acquire(stop).await {
                Ok(Ok(until)) => {
                    info!(identity = self.config.identity, "became leader");
                    self.metrics.leads(true);
                    return Some(Leader { candidate: self, until: watch::Sender::new(until) });
                }
                Ok(Err(wait)) => wait,
                Err(error) if error.is_conflict() => Duration::ZERO,
                Err(error) => {
                    warn!(error = %ErrorChain(&error), "could not acquire the lease; retrying");
                    self.config.retry_period
                }
            };
            let wait = wait.min(self.config.retry_period).max(CONFLICT_RETRY);
            if stop.run_until_cancelled(tokio::time::sleep(wait)).await.is_none() {
                self.release_unconfirmed().await;
                return None;
            }
        }
    }

    /// Reads the Lease and, if it is free or ours, writes it. Returns until when this replica leads, or how long to wait.
    async fn try_acquire(
        &mut self,
        stop: &CancellationToken,
    ) -> Result<Result<Instant, Duration>, request::Error> {
        let Some(snapshot) = stop.run_until_cancelled(self.refresh()).await else {
            return Ok(Err(Duration::ZERO));
        };
        let observed = snapshot?.observed.clone();
        if let ElectionDecision::Wait(remaining) = self.decide(&observed) {
            debug!(holder = observed.holder(), ?remaining, "another replica leads");
            return Ok(Err(remaining));
        }
        let until = lease::fence_until(self.write(LeaseWrite::Hold).await?, self.config.lease_duration);
        Ok(if now() < until { Ok(until) } else { Err(Duration::ZERO) })
    }

    /// Releases a Lease that was acquired without ever leading: the write was too late, or its response was lost.
    async fn release_unconfirmed(&mut self) {
        let write_pending = self.last.as_ref().is_some_and(|last| last.observed.write_pending());
        if write_pending && self.refresh().await.is_err() {
            return;
        }
        if self.last.as_ref().is_some_and(|last| self.decide(&last.observed) == ElectionDecision::Renew) {
            self.release().await;
        }
    }

    fn decide(&self, observed: &ObservedLease) -> ElectionDecision {
        lease::decide_election(observed, &self.config.identity, self.config.lease_duration, now())
    }

    fn is_holder(&self) -> bool {
        self.last.as_ref().is_some_and(|last| last.observed.holder() == Some(&self.config.identity))
    }

    /// Clears the holder, so that another replica can acquire the Lease at once.
    async fn release(&mut self) {
        for _ in 0..2 {
            match self.write(LeaseWrite::Release).await {
                Ok(_) => return info!(identity = self.config.identity, "released the lease"),
                Err(error) if error.is_conflict() => {}
                Err(error) => {
                    return warn!(error = %ErrorChain(&error), "could not release the lease; other replicas wait until it expires");
                }
            }
            if self.refresh().await.is_err() || !self.is_holder() {
                return;
            }
        }
    }

    async fn refresh(&mut self) -> Result<&LeaseSnapshot, request::Error> {
        let lease = self.call.read(self.api.get_opt(LEASE_NAME)).await?;
        Ok(self.observe(lease))
    }

    fn observe(&mut self, lease: Option<Lease>) -> &LeaseSnapshot {
        let record = lease.as_ref().map(lease_record);
        let observed = match self.last.take() {
            Some(last) => last.observed.observe(record, now()),
            None => ObservedLease::first(record, now()),
        };
        self.last.insert(LeaseSnapshot { lease, observed })
    }

    /// Overwrites exactly the Lease that was last read. Returns when the write was *started*.
    async fn write(&mut self, write: LeaseWrite) -> Result<Instant, request::Error> {
        let lease = self.last.as_ref().and_then(|last| last.lease.clone());
        let exists = lease.is_some();
        let lease = updated_lease(lease, write, &self.config, Timestamp::now());
        let renew_time = lease_record(&lease).renew_time;
        if let (LeaseWrite::Hold, Some(last), Some(renew_time)) = (write, &mut self.last, renew_time) {
            last.observed.record_attempt(&self.config.identity, renew_time);
        }
        let params =
            PostParams { field_manager: Some(CONTROLLER_FIELD_MANAGER.to_owned()), ..PostParams::default() };
        let started = now();
        let lease = if exists {
            self.call.change(self.api.replace(LEASE_NAME, &params, &lease)).await?
        } else {
            self.call.create(self.api.create(&params, &lease)).await?
        };
        self.observe(Some(lease));
        Ok(started)
    }
}

impl Leader {
    pub fn fence(&self) -> LeaseFence {
        LeaseFence::new(&self.until)
    }

    /// Renews the Lease until that fails; returns why this replica no longer leads.
    pub async fn run(&mut self) -> Error {
        loop {
            let wait = self.remaining().min(self.candidate.config.renew_interval);
            tokio::time::sleep(wait).await;
            if let Err(lost) = self.renew().await {
                return lost;
            }
        }
    }

    fn remaining(&self) -> Duration {
        self.until.borrow().saturating_duration_since(now())
    }

    /// Retries until one renewal succeeds or the fence expires.
    async fn renew(&mut self) -> Result<(), Error> {
        let mut last_error = None;
        loop {
            let me = self.candidate.config.identity.as_str();
            if let Some(last) = &self.candidate.last
                && lease::decide_renewal(&last.observed, me, *self.until.borrow(), now())
                    == RenewDecision::StepDown
            {
                let other = last.observed.holder().filter(|holder| *holder != me);
                return Err(other
                    .map_or(Error::RenewTimeout(last_error), |other| Error::HeldByOther(other.to_owned())));
            }
            let remaining = self.remaining();
            let error = match tokio::time::timeout(remaining, self.candidate.write(LeaseWrite::Hold)).await {
                Ok(Ok(started)) => {
                    let until = lease::fence_until(started, self.candidate.config.lease_duration);
                    self.until.send_replace(until);
                    return Ok(());
                }
                Ok(Err(error)) if error.is_conflict() => {
                    match tokio::time::timeout(self.remaining(), self.candidate.refresh()).await {
                        Ok(Ok(_)) => {
                            tokio::time::sleep(CONFLICT_RETRY.min(self.remaining())).await;
                            continue;
                        }
                        Ok(Err(error)) => error,
                        Err(_) => request::Error::Timeout(remaining),
                    }
                }
                Ok(Err(error)) => error,
                Err(_) => request::Error::Timeout(remaining),
            };
            warn!(error = %ErrorChain(&error), "could not renew the lease; retrying");
            last_error = Some(error);
            let wait = (self.candidate.config.renew_interval / 4).min(self.remaining());
            tokio::time::sleep(wait).await;
        }
    }

    /// Closes the fence, and stands for election again once nothing of this term is left that could write. Call only after the
    /// leader's loops were aborted.
    pub async fn step_down(self) -> Candidate {
        self.until.send_replace(now());
        self.candidate.metrics.leads(false);
        self.until.closed().await;
        self.candidate
    }

    /// Releases the Lease. Call only after the leader's loops have ended.
    pub async fn release(mut self) {
        self.candidate.metrics.leads(false);
        self.candidate.release().await;
    }
}

fn lease_record(lease: &Lease) -> LeaseRecord {
    let spec = lease.spec.clone().unwrap_or_default();
    LeaseRecord {
        holder: spec.holder_identity,
        renew_time: spec.renew_time.map(|time| time.0.into()),
        transitions: spec.lease_transitions.unwrap_or_default(),
        duration: spec.lease_duration_seconds.and_then(|n| u64::try_from(n).ok()).map(Duration::from_secs),
        released: lease.annotations().contains_key(RELEASED_BY),
        resource_version: lease.resource_version().unwrap_or_default(),
    }
}

/// The Lease to write over the one that was read. Fields of other writers survive.
fn updated_lease(
    current: Option<Lease>,
    write: LeaseWrite,
    config: &ElectionConfig,
    time: Timestamp,
) -> Lease {
    let mut lease = current.unwrap_or_else(|| Lease {
        metadata: ObjectMeta {
            name: Some(LEASE_NAME.to_owned()),
            namespace: Some(config.namespace.clone()),
            ..ObjectMeta::default()
        },
        spec: None,
    });
    lease.metadata.managed_fields = None;
    let is_new = lease.spec.is_none();
    let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
    // Truncated to the precision that the API server stores, so that our own write is recognised when it is read again.
    let time = MicroTime(Timestamp::from_microsecond(time.as_microsecond()).unwrap_or(time));
    let seconds = config.lease_duration.as_millis().div_ceil(1000);
    spec.renew_time = Some(time.clone());
    match write {
        LeaseWrite::Hold => {
            spec.lease_duration_seconds = Some(i32::try_from(seconds).unwrap_or(i32::MAX));
            if spec.holder_identity.as_ref() != Some(&config.identity) {
                spec.acquire_time = Some(time);
                let transitions = spec.lease_transitions.unwrap_or_default();
                spec.lease_transitions = Some(if is_new { 0 } else { transitions.saturating_add(1) });
            }
            spec.holder_identity = Some(config.identity.clone());
            lease.annotations_mut().remove(RELEASED_BY);
        }
        LeaseWrite::Release => {
            // As client-go does: the shortest duration, for clients that do not know the release annotation.
            spec.lease_duration_seconds = Some(1);
            spec.holder_identity = Some(String::new());
            lease.annotations_mut().insert(RELEASED_BY.to_owned(), config.identity.clone());
        }
    }
    lease
}
