//! The leader's controller for BridgeNetworks: plans with `plan::network` and applies the plan.

mod apply;
mod pending;
#[cfg(test)]
pub mod tests;

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use api::{ErrorChain, selection::NadRef};
use client::fence::now;
use futures::{StreamExt, stream};
use jiff::Timestamp;
use plan::{
    network::{self, ClusterState, NetworkPlan, NetworkRecords, NetworksPlan},
    shared_map::SharedMap,
};
use tracing::{debug, warn};

use self::{
    apply::{ApplyOutcome, Error, NetworkWriter},
    pending::PendingState,
};
use crate::{
    cache::{CacheSource, ChangedNads, ClusterCache},
    leader::{EXPECTATION_TTL, LeaderContext, MIN_RETRY, RESYNC, Reconciler},
    live_reads::LiveResults,
    metrics::Metrics,
};

/// The number of networks that are written at a time.
const MAX_CONCURRENT_NETWORKS: usize = 8;
/// The delay before a plan that reports a problem in the status.
const AT_ONCE: Duration = Duration::from_millis(10);

/// Reconciles all BridgeNetworks.
pub struct NetworkController {
    cache: ClusterCache,
    metrics: Arc<Metrics>,
    writer: NetworkWriter,
    changed_nads: ChangedNads,
    records: NetworkRecords,
    pending: PendingState,
}

impl NetworkController {
    pub fn new(context: &LeaderContext) -> Self {
        // Those of an earlier term may be wrong: another leader may have created them again.
        context.cache.publish_deleted_nads(SharedMap::default());
        Self {
            writer: NetworkWriter::new(context),
            cache: context.cache.clone(),
            metrics: context.metrics.clone(),
            changed_nads: context.cache.track_nads(),
            records: NetworkRecords::default(),
            pending: PendingState::default(),
        }
    }

    async fn apply(
        &self,
        plans: Vec<NetworkPlan>,
        live: &LiveResults,
    ) -> Vec<(NetworkPlan, Result<ApplyOutcome, Error>)> {
        let applied = stream::iter(plans).map(async |plan| {
            let outcome = self.writer.apply(&plan, live).await;
            (plan, outcome)
        });
        applied.buffer_unordered(MAX_CONCURRENT_NETWORKS).collect().await
    }

    /// Plans on a snapshot, which the plan is returned with.
    fn plan(&mut self) -> (ClusterState, NetworksPlan) {
        let started = now();
        // Before the snapshot, so that it contains these changes.
        self.pending.observe_nads(&self.changed_nads.take());
        let mut state = self.cache.snapshot();
        let users = self.cache.users();
        let plan = network::plan(&state, users, &self.records, Timestamp::now());
        self.records.record_plan(&state, &plan);
        state.record_deleted_nads(&plan);
        self.cache.publish_deleted_nads(state.deleted_nads.clone());
        self.metrics.planned(state.networks.len(), users.len(), started.elapsed());
        (state, plan)
    }

    /// Records rejections, so that the next plan reports them in the status. Returns when to make that plan.
    fn record_rejected(&mut self, plan: &NetworkPlan, rejected: &[(NadRef, String)]) -> Duration {
        for (at, cause) in rejected {
            debug!(network = plan.name, nad = %at, cause, "the API server rejected a NAD, retrying");
            self.pending.rejected(&plan.uid, at, now());
        }
        let mut news = false;
        for (at, cause) in rejected {
            let known = self.records.rejected.entry(plan.uid.clone()).or_default();
            news |= known.insert(at.clone(), cause.clone()).as_ref() != Some(cause);
        }
        if news { AT_ONCE } else { RESYNC }
    }

    /// Records a failed live read, or forgets it after a successful one. Returns when to plan again.
    fn record_live_read(&mut self, plan: &NetworkPlan, failed: Option<&String>) -> Duration {
        let Some(cause) = failed else {
            if plan.removes_finalizer() {
                self.pending.live_read_succeeded(&plan.uid);
                self.records.live_read_failed.remove(&plan.uid);
            }
            return RESYNC;
        };
        let wait = self.pending.live_read_failed(&plan.uid, now());
        warn!(network = plan.name, error = cause, ?wait, "could not read from the API server, retrying");
        let known = self.records.live_read_failed.insert(plan.uid.clone(), cause.clone());
        // The next plan reports it in the status.
        if known.as_ref() == Some(cause) { wait } else { AT_ONCE }
    }

    fn confirm_unused(&self, nads: &BTreeSet<NadRef>) {
        if !nads.is_empty() {
            let mut state = self.cache.snapshot();
            state.confirm_unused(nads);
            self.cache.publish_deleted_nads(state.deleted_nads);
        }
    }

    /// Forgets rejections and failed live reads of steps that are no longer planned.
    fn forget_resolved(&mut self, plans: &[NetworkPlan]) {
        let planned: HashMap<&str, HashSet<&NadRef>> =
            plans.iter().map(|plan| (plan.uid.as_str(), plan.nads().collect())).collect();
        let is_planned = |uid: &str, at: &NadRef| planned.get(uid).is_some_and(|all| all.contains(at));
        self.pending.retain_rejected(is_planned);
        let finalizing: HashSet<&str> =
            plans.iter().filter(|plan| plan.removes_finalizer()).map(|plan| plan.uid.as_str()).collect();
        self.records.live_read_failed.retain(|uid, _| finalizing.contains(uid.as_str()));
        self.records.rejected.retain(|uid, all| {
            all.retain(|at, _| is_planned(uid, at));
            !all.is_empty()
        });
    }

    /// Records what was written. Returns when to reconcile again.
    fn record_outcome(&mut self, plan: &NetworkPlan, outcome: Result<ApplyOutcome, Error>) -> Duration {
        match outcome {
            Ok(outcome) => {
                let ApplyOutcome { conflicted, rejected, .. } = &outcome;
                let conflicted = *conflicted;
                let mut wait = self.record_rejected(plan, rejected);
                wait = wait.min(self.record_live_read(plan, outcome.live_read_failed.as_ref()));
                if let Some(error) = &outcome.status_write_failed {
                    wait = wait.min(self.pending.status_write_failed(plan, now()));
                    warn!(network = plan.name, error, "could not write the status of a network, retrying");
                }
                self.confirm_unused(&outcome.confirmed_unused);
                for step in &plan.steps {
                    self.records.record_write(&plan.uid, step, |at| outcome.wrote(at));
                }
                self.pending.written(plan, outcome, now());
                let next = if conflicted { self.pending.conflicted(plan, now()) } else { EXPECTATION_TTL };
                next.min(wait)
            }
            Err(error) if error.is_conflict() => {
                debug!(network = plan.name, "conflict with another writer, planning again");
                self.pending.conflicted(plan, now())
            }
            Err(error) => {
                let wait = self.pending.failed(plan, now());
                warn!(network = plan.name, error = %ErrorChain(&error), ?wait, "could not reconcile a network, retrying");
                wait
            }
        }
    }
}

impl Reconciler for NetworkController {
    const NAME: &'static str = "networks";
    const SOURCES: &'static [CacheSource] = &CacheSource::ALL;

    /// Plans once and applies the plan.
    async fn reconcile(&mut self) -> Duration {
        let (state, NetworksPlan { networks, orphan_nads, requeue_after }) = self.plan();
        self.pending.prune(&state, now());
        let mut requeue_after = requeue_after.unwrap_or(RESYNC);
        self.forget_resolved(&networks);
        let mut due = Vec::new();
        for mut plan in networks {
            if let Some(wait) = self.pending.drop_backed_off(&mut plan, now()) {
                requeue_after = requeue_after.min(wait);
            }
            if plan.steps.is_empty() && plan.status.is_none() {
                continue;
            }
            match self.pending.wait(&state, &plan, now()) {
                Some(wait) => requeue_after = requeue_after.min(wait),
                None => due.push(plan),
            }
        }
        let (orphans, rest): (Vec<_>, Vec<_>) =
            orphan_nads.into_iter().partition(|(_, nad)| !self.pending.deletion_pending(&nad.uid, now()));
        if !rest.is_empty() {
            requeue_after = requeue_after.min(EXPECTATION_TTL);
        }
        // The live reads start after the plan, so they are newer than everything that the plan is based on.
        let (guarded, plain): (Vec<NetworkPlan>, Vec<NetworkPlan>) =
            due.into_iter().partition(NetworkPlan::needs_live_read);
        let none = LiveResults::none();
        let guarded = async {
            let live = self.writer.read_live(&guarded, &orphans).await;
            (self.apply(guarded, &live).await, live)
        };
        let (plain, (guarded, live)) = futures::join!(self.apply(plain, &none), guarded);
        for (plan, outcome) in plain.into_iter().chain(guarded) {
            requeue_after = requeue_after.min(self.record_outcome(&plan, outcome));
        }
        for (at, nad) in orphans {
            self.pending.deletion_sent(nad.uid.clone(), now());
            if let Err(error) = self.writer.delete_orphan(&at, &nad, &live).await {
                requeue_after = requeue_after.min(failed(&error, "could not delete an orphan NAD"));
            }
        }
        requeue_after
    }
}

fn failed(error: &Error, what: &'static str) -> Duration {
    if !error.is_conflict() {
        warn!(error = %ErrorChain(error), "{what}, retrying");
    }
    MIN_RETRY
}
