//! The control loops that the leader runs.
//!
//! A capability is a folder with its own state and one [`Reconciler`], which says what it reads. To add one, register it in
//! [`loops`]: nothing else has to know it. All loops share the leader's fence, run side by side, and end before the Lease is
//! released. A loop that waits for the API server holds up no other.

#[cfg(test)]
pub mod tests;

use std::{future::Future, sync::Arc, time::Duration};

use api::ErrorChain;
use client::fence::LeaseFence;
use futures::{FutureExt, future::BoxFuture};
use kube::Client;
use plan::{certs::CertPolicy, claims::ClaimOptions};
use tokio::{task::JoinSet, time::timeout};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::{
    Error,
    blocks::BlockController,
    cache::{CacheSource, ClusterCache},
    claims::ClaimController,
    lease::election::{self, Candidate, Leader},
    metrics::Metrics,
    networks::NetworkController,
    nodelabels::NodeLabelController,
    services::ServiceController,
    task::{TaskExit, named, unexpected_exit, wait_for_all},
    webhook::certs::rotate::{CertRotator, WebhookService},
};

/// How often to reconcile without a change. The cache is driven by watches, so this is only a safety net.
pub const RESYNC: Duration = Duration::from_mins(10);
/// How long to wait for the watch to deliver an own write before it is sent again. Watches are much faster than this.
pub const EXPECTATION_TTL: Duration = Duration::from_secs(1);
/// The delay after a failed request.
pub const MIN_RETRY: Duration = Duration::from_secs(1);
/// How long to wait after a change for the rest of its burst.
const DEBOUNCE: Duration = Duration::from_millis(10);
/// How long a leader's loop may take to finish its current step.
const LOOP_GRACE: Duration = Duration::from_secs(3);

/// How long the loops of a lost term may take to end. The process exits then, because the replica could never lead again.
const STEP_DOWN_TIMEOUT: Duration = Duration::from_secs(30);

/// What the leader's loops need.
#[derive(Clone)]
pub struct LeaderConfig {
    pub client: Client,
    pub cache: ClusterCache,
    pub metrics: Arc<Metrics>,
    pub service: WebhookService,
    pub policy: CertPolicy,
    pub claims: ClaimOptions,
}

/// What a loop needs while this replica leads.
pub struct LeaderContext {
    pub client: Client,
    pub cache: ClusterCache,
    pub metrics: Arc<Metrics>,
    pub fence: LeaseFence,
}

/// One capability's reconcile function.
pub trait Reconciler: Send + 'static {
    const NAME: &'static str;
    /// What it reads: the loop starts once these have been listed, and reconciles when one of them changes.
    const SOURCES: &'static [CacheSource];

    /// Reconciles once. Returns when to reconcile again without a change.
    fn reconcile(&mut self) -> impl Future<Output = Duration> + Send;
}

/// One loop, ready to be spawned.
pub struct LeaderLoop {
    name: &'static str,
    task: BoxFuture<'static, ()>,
}

impl LeaderLoop {
    fn new(name: &'static str, task: impl Future<Output = ()> + Send + 'static) -> Self {
        Self { name, task: task.boxed() }
    }

    fn reconcile<R: Reconciler>(reconciler: R, cache: &ClusterCache, stop: &CancellationToken) -> Self {
        Self::new(R::NAME, run(reconciler, cache.clone(), stop.clone()))
    }
}

/// Every loop of the leader. Each ends soon after `stop`.
fn loops(config: LeaderConfig, fence: LeaseFence, stop: &CancellationToken) -> Vec<LeaderLoop> {
    let LeaderConfig { client, cache, metrics, service, policy, claims } = config;
    let rotator = CertRotator::new(client.clone(), service, policy, metrics.clone(), fence.clone());
    let context = LeaderContext { client, cache, metrics, fence };
    let cache = &context.cache;
    vec![
        LeaderLoop::new("certificates", rotator.run(stop.clone())),
        LeaderLoop::reconcile(NetworkController::new(&context), cache, stop),
        LeaderLoop::reconcile(BlockController::new(&context), cache, stop),
        LeaderLoop::reconcile(NodeLabelController::new(&context), cache, stop),
        LeaderLoop::new("services", ServiceController::new(&context).run(stop.clone())),
        LeaderLoop::new("claims", ClaimController::new(&context, claims).run(stop.clone())),
    ]
}

/// Runs a reconciler until `stop`. A reconcile that has started is finished first.
async fn run<R: Reconciler>(mut reconciler: R, cache: ClusterCache, stop: CancellationToken) {
    if stop.run_until_cancelled(cache.synced(R::SOURCES)).await.is_none() {
        return;
    }
    let mut changes = cache.subscribe(R::SOURCES);
    loop {
        changes.mark_seen();
        let requeue_after = reconciler.reconcile().await;
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(requeue_after) => {}
            () = changes.changed() => tokio::time::sleep(DEBOUNCE).await,
        }
    }
}

/// Acquires the Lease and runs the leader's loops until `resign` is cancelled. A replica that loses the Lease ends its loops
/// and stands for election again: it goes on serving the webhook, which an API server that was silent needs most afterwards.
pub async fn lead(
    mut candidate: Candidate,
    config: LeaderConfig,
    resign: CancellationToken,
) -> Result<(), Error> {
    loop {
        let Some(leader) = candidate.acquire(&resign).await else {
            return Ok(());
        };
        if resign.is_cancelled() {
            leader.release().await;
            return Ok(());
        }
        // Each term has its own fence, and loops that know nothing of an earlier term.
        let stop = resign.child_token();
        let loops = loops(config.clone(), leader.fence(), &stop);
        match run_loops(leader, loops, stop).await? {
            Some(next) => candidate = next,
            None => return Ok(()),
        }
    }
}

/// How a term ended.
enum TermEnd {
    Resigned,
    Lost(election::Error),
    Failed(Error),
}

/// Runs the loops, and releases the Lease after all of them have ended. Returns the candidate of the next term if this replica
/// lost the Lease.
async fn run_loops(
    mut leader: Leader,
    loops: Vec<LeaderLoop>,
    resign: CancellationToken,
) -> Result<Option<Candidate>, Error> {
    let mut tasks: JoinSet<TaskExit> = JoinSet::new();
    for LeaderLoop { name, task } in loops {
        tasks.spawn(named(name, task.map(Ok)));
    }
    let end = tokio::select! {
        biased;
        () = resign.cancelled() => TermEnd::Resigned,
        lost = leader.run() => TermEnd::Lost(lost),
        error = unexpected_exit(&mut tasks) => TermEnd::Failed(error),
    };
    let result = match end {
        TermEnd::Lost(lost) => {
            // Another replica may lead already: abort the loops at once. There is no Lease to release.
            warn!(error = %ErrorChain(&lost), "lost the lease; ending the leader's loops and standing for election again");
            let step_down = async {
                tasks.shutdown().await;
                leader.step_down().await
            };
            let candidate = timeout(STEP_DOWN_TIMEOUT, step_down).await;
            return candidate.map(Some).map_err(|_| Error::StepDown(STEP_DOWN_TIMEOUT));
        }
        TermEnd::Resigned => Ok(None),
        TermEnd::Failed(error) => Err(error),
    };
    resign.cancel();
    if timeout(LOOP_GRACE, wait_for_all(&mut tasks)).await.is_err() {
        warn!("a leader's loop did not finish its step in time; aborting it");
    }
    tasks.shutdown().await;
    leader.release().await;
    result
}
