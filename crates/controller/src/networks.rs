//! The leader's controller for BridgeNetworks: plans with `plan::network` and applies the plan.

mod apply;
mod pending;
#[cfg(test)]
mod tests;

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use api::{ErrorChain, selection::NadRef};
use futures::{StreamExt, stream};
use jiff::Timestamp;
use kube::Client;
use plan::network::{self, AbandonedBlock, ClusterPlan, NetworkPlan, NodeLabelPatch};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use self::{
    apply::{ApplyOutcome, Error, NetworkWriter},
    pending::PendingState,
};
use crate::{
    cache::ClusterCache,
    lease::fence::{LeaseFence, now},
    live_reads::LiveResults,
    metrics::Metrics,
};

/// How long to wait after a change for the rest of its burst.
const DEBOUNCE: Duration = Duration::from_millis(10);
/// The number of networks that are written at a time.
const MAX_CONCURRENT_NETWORKS: usize = 8;
/// How often to reconcile without a change. The cache is driven by watches, so this is only a safety net.
const RESYNC: Duration = Duration::from_mins(10);

/// Reconciles all BridgeNetworks.
pub struct NetworkController {
    cache: ClusterCache,
    metrics: Arc<Metrics>,
    writer: NetworkWriter,
    pending: PendingState,
}

impl NetworkController {
    pub fn new(client: Client, cache: ClusterCache, metrics: Arc<Metrics>, fence: LeaseFence) -> Self {
        let writer = NetworkWriter::new(client, cache.clone(), metrics.clone(), fence);
        Self { cache, metrics, writer, pending: PendingState::default() }
    }

    /// Runs until `stop`. A reconcile that has started is finished first.
    pub async fn run(mut self, stop: CancellationToken) {
        if stop.run_until_cancelled(self.cache.synced()).await != Some(true) {
            return;
        }
        let mut changes = self.cache.changes();
        loop {
            changes.mark_unchanged();
            let requeue_after = self.reconcile().await;
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(requeue_after) => {}
                changed = changes.changed() => match changed {
                    Ok(()) => tokio::time::sleep(DEBOUNCE).await,
                    Err(_) => return,
                },
            }
        }
    }

    /// Plans once and applies the plan. Returns when to reconcile again without a change.
    async fn reconcile(&mut self) -> Duration {
        let ClusterPlan { networks, orphan_nads, node_labels, abandoned_blocks, requeue_after } = self.plan();
        self.pending.prune(&self.cache.state(), now());
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
            match self.pending.wait(&self.cache.state(), &plan, now()) {
                Some(wait) => requeue_after = requeue_after.min(wait),
                None => due.push(plan),
            }
        }
        let (orphans, rest): (Vec<_>, Vec<_>) =
            orphan_nads.into_iter().partition(|(_, nad)| !self.pending.deletion_pending(&nad.uid, now()));
        if !rest.is_empty() {
            requeue_after = requeue_after.min(pending::EXPECTATION_TTL);
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
        requeue_after = requeue_after.min(self.patch_node_labels(node_labels).await);
        requeue_after = requeue_after.min(self.delete_abandoned_blocks(abandoned_blocks).await);
        for (at, nad) in orphans {
            self.pending.deletion_sent(nad.uid.clone(), now());
            if let Err(error) = self.writer.delete_orphan(&at, &nad, &live).await {
                requeue_after = requeue_after.min(failed(&error, "could not delete an orphan NAD"));
            }
        }
        requeue_after
    }

    async fn delete_abandoned_blocks(&mut self, blocks: Vec<AbandonedBlock>) -> Duration {
        let mut requeue_after = RESYNC;
        for block in blocks {
            if self.pending.deletion_pending(&block.uid, now()) {
                requeue_after = requeue_after.min(pending::EXPECTATION_TTL);
                continue;
            }
            self.pending.deletion_sent(block.uid.clone(), now());
            if let Err(error) = self.writer.delete_abandoned_block(&block).await {
                requeue_after = requeue_after.min(failed(&error, "could not delete an abandoned IPBlock"));
            }
        }
        requeue_after
    }

    async fn patch_node_labels(&mut self, patches: Vec<NodeLabelPatch>) -> Duration {
        let mut requeue_after = RESYNC;
        for patch in patches {
            if self.pending.labels_pending(&patch, now()) {
                requeue_after = requeue_after.min(pending::EXPECTATION_TTL);
                continue;
            }
            match self.writer.patch_node_labels(&patch).await {
                Ok(()) => self.pending.labels_written(patch, now()),
                Err(error) => {
                    requeue_after = requeue_after.min(failed(&error, "could not set the labels of a Node"));
                }
            }
        }
        requeue_after
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

    fn plan(&mut self) -> ClusterPlan {
        let started = now();
        let mut state = self.cache.state();
        self.pending.observe_nads(&std::mem::take(&mut state.changed_nads));
        state.track_missing_nodes(started);
        let plan = network::plan(&state, Timestamp::now());
        state.record_plan(&plan);
        self.metrics.planned(state.networks.len(), state.users.len(), started.elapsed());
        plan
    }

    /// Adds rejections to the cache, so that the next plan reports them in the status.
    fn record_rejected(&mut self, plan: &NetworkPlan, rejected: &[(NadRef, String)]) {
        for (at, cause) in rejected {
            debug!(network = plan.name, nad = %at, cause, "the API server rejected a NAD, retrying");
            self.pending.rejected(&plan.uid, at, now());
        }
        self.cache.update(|state| {
            let known = state.rejected.get(&plan.uid).cloned().unwrap_or_default();
            let mut all = known.clone();
            all.extend(rejected.iter().cloned());
            let changed = all != known;
            if changed {
                state.rejected.insert(plan.uid.clone(), all);
            }
            changed
        });
    }

    /// Adds a failed live read to the cache, or removes it after a successful one.
    fn record_live_read(&mut self, plan: &NetworkPlan, failed: Option<&String>) -> Duration {
        let Some(cause) = failed else {
            if plan.removes_finalizer() {
                self.pending.live_read_succeeded(&plan.uid);
                self.cache.state().live_read_failed.remove(&plan.uid);
            }
            return RESYNC;
        };
        let wait = self.pending.live_read_failed(&plan.uid, now());
        warn!(network = plan.name, error = cause, ?wait, "could not read from the API server, retrying");
        self.cache.update(|state| {
            state.live_read_failed.insert(plan.uid.clone(), cause.clone()).as_ref() != Some(cause)
        });
        wait
    }

    /// Forgets rejections and failed live reads of steps that are no longer planned.
    fn forget_resolved(&mut self, plans: &[NetworkPlan]) {
        let planned: HashMap<&str, HashSet<&NadRef>> =
            plans.iter().map(|plan| (plan.uid.as_str(), plan.nads().collect())).collect();
        let is_planned = |uid: &str, at: &NadRef| planned.get(uid).is_some_and(|all| all.contains(at));
        self.pending.retain_rejected(is_planned);
        let finalizing: HashSet<&str> =
            plans.iter().filter(|plan| plan.removes_finalizer()).map(|plan| plan.uid.as_str()).collect();
        // No plan depends on the entries that are dropped, so subscribers need no notification.
        let mut state = self.cache.state();
        state.live_read_failed.retain(|uid, _| finalizing.contains(uid.as_str()));
        state.rejected.retain(|uid, all| {
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
                self.record_rejected(plan, rejected);
                let mut wait = self.record_live_read(plan, outcome.live_read_failed.as_ref());
                if let Some(error) = &outcome.status_write_failed {
                    wait = wait.min(self.pending.status_write_failed(plan, now()));
                    warn!(network = plan.name, error, "could not write the status of a network, retrying");
                }
                self.cache.state().confirm_unused(&outcome.confirmed_unused);
                for step in &plan.steps {
                    self.cache.state().record_write(&plan.uid, step, |at| outcome.wrote(at));
                }
                self.pending.written(plan, outcome, now());
                let next =
                    if conflicted { self.pending.conflicted(plan, now()) } else { pending::EXPECTATION_TTL };
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

fn failed(error: &Error, what: &'static str) -> Duration {
    if !error.is_conflict() {
        warn!(error = %ErrorChain(error), "{what}, retrying");
    }
    pending::MIN_RETRY
}
