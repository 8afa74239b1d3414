//! The leader's controller for IPAMClaims: plans with `plan::claims` and applies the plan.
//!
//! Each virtual machine and the addresses of each network are reconciled on their own, several at a time. One that fails
//! or waits delays no other. Everything that is remembered between reconciles can be lost: the API server has the rest.

mod apply;
mod crd;
mod events;
mod live;
mod machines;
mod networks;
mod overlay;
mod records;
#[cfg(test)]
mod tests;

use std::{
    collections::HashMap,
    panic::AssertUnwindSafe,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use client::{events::EventSender, retry::Retry};
use futures::FutureExt as _;
use plan::{
    claims::{ClaimOptions, ClaimSchema},
    users::WorkloadKind,
};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::error;

pub use self::machines::nad_lookup;
use self::{
    apply::ClaimWriter,
    crd::CrdKeeper,
    events::ClaimEvents,
    live::LiveClaims,
    records::{MachineRecord, NetworkRecord},
};
use crate::{
    cache::{CacheSource, ClusterCache, claims::ClaimWork},
    leader::LeaderContext,
    metrics::Metrics,
    queue::{Pause, WorkQueue},
};

/// How many machines and networks are reconciled at a time.
const MAX_CONCURRENT: usize = 32;
/// How long a key waits after a panic.
const PANIC_RETRY: Duration = Duration::from_secs(30);
/// The least time between two reconciles of a network, so that claims that are created together are written together.
const WRITE_INTERVAL: Duration = Duration::from_millis(20);
/// What a reconcile reads.
const SOURCES: [CacheSource; 9] = [
    CacheSource::Networks,
    CacheSource::Nodes,
    CacheSource::NodeNetworks,
    CacheSource::Nads,
    CacheSource::Blocks,
    CacheSource::Claims,
    CacheSource::Users(WorkloadKind::Pod),
    CacheSource::Users(WorkloadKind::VirtualMachine),
    CacheSource::Users(WorkloadKind::VirtualMachineInstance),
];

/// Reconciles all claims.
pub struct ClaimController {
    workers: Arc<ClaimWorkers>,
    events: EventSender,
    crd: CrdKeeper,
}

/// What the workers share.
struct ClaimWorkers {
    cache: ClusterCache,
    metrics: Arc<Metrics>,
    writer: ClaimWriter,
    live: LiveClaims,
    events: ClaimEvents,
    options: ClaimOptions,
    /// The fields that the stored CRD keeps.
    schema: Arc<Mutex<ClaimSchema>>,
    /// What is remembered between two reconciles. A worker takes the record of its key.
    machines: Mutex<HashMap<ClaimWork, MachineRecord>>,
    networks: Mutex<HashMap<ClaimWork, NetworkRecord>>,
}

/// When a key is reconciled again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Next {
    /// Without a change.
    requeue_after: Option<Duration>,
    /// Also after a change.
    pause: Pause,
}

impl Next {
    /// After a change.
    const ON_CHANGE: Self = Self { requeue_after: None, pause: Pause::Burst };

    fn after(requeue_after: Duration) -> Self {
        Self { requeue_after: Some(requeue_after), ..Self::ON_CHANGE }
    }

    /// Not sooner than after this time, whatever changes.
    fn not_before(self, pause: Duration) -> Self {
        Self { pause: Pause::Always(pause), ..self }
    }

    /// Also after this time.
    fn or_after(self, delay: Option<Duration>) -> Self {
        let requeue_after = match (self.requeue_after, delay) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        };
        Self { requeue_after, ..self }
    }
}

impl ClaimController {
    pub fn new(context: &LeaderContext, options: ClaimOptions) -> Self {
        let (recorder, sender) = events::recorder(context);
        let schema = Arc::new(Mutex::new(ClaimSchema::default()));
        let workers = ClaimWorkers {
            cache: context.cache.clone(),
            metrics: context.metrics.clone(),
            writer: ClaimWriter::new(context),
            live: LiveClaims::new(context),
            events: recorder,
            options,
            schema: Arc::clone(&schema),
            machines: Mutex::default(),
            networks: Mutex::default(),
        };
        Self { workers: Arc::new(workers), events: sender, crd: CrdKeeper::new(context, schema) }
    }

    /// Reconciles until `stop`. Reconciles that have started are finished first.
    pub async fn run(self, stop: CancellationToken) {
        let Self { workers, events, crd } = self;
        let reconcile = async {
            // What the stored CRD keeps is known before the first status is written.
            if stop.run_until_cancelled(crd.established()).await.is_none()
                || stop.run_until_cancelled(workers.cache.synced(&SOURCES)).await.is_none()
            {
                return;
            }
            let claims = workers.cache.claims();
            claims.forget_plans();
            let _term = claims.queue().start_term();
            claims.mark_all();
            run_workers(&workers, stop.clone()).await;
        };
        let keep = stop.run_until_cancelled(crd.run());
        futures::join!(events.run(stop.clone()), keep, reconcile);
    }
}

async fn run_workers(workers: &Arc<ClaimWorkers>, stop: CancellationToken) {
    let queue = workers.cache.claims().queue().clone();
    let mut running: JoinSet<(ClaimWork, Next)> = JoinSet::new();
    loop {
        while running.len() < MAX_CONCURRENT {
            let Some(key) = queue.take() else { break };
            running.spawn(supervise(Arc::clone(workers), key));
        }
        tokio::select! {
            () = stop.cancelled() => break,
            () = queue.changed() => {}
            Some(finished) = running.join_next() => finish(&queue, finished),
        }
    }
    while running.join_next().await.is_some() {}
}

/// Reconciles a key. A panic that one key causes ends nothing else.
async fn supervise(workers: Arc<ClaimWorkers>, key: ClaimWork) -> (ClaimWork, Next) {
    let next = AssertUnwindSafe(workers.run(&key)).catch_unwind().await.unwrap_or_else(|_| {
        error!(%key, "the reconcile of IPAMClaims panicked");
        Next::after(PANIC_RETRY).not_before(PANIC_RETRY)
    });
    (key, next)
}

fn finish(queue: &WorkQueue<ClaimWork>, finished: Result<(ClaimWork, Next), tokio::task::JoinError>) {
    // `supervise` catches panics, and a worker is aborted only with the whole set.
    let Ok((key, next)) = finished else { return };
    queue.finish(&key, next.pause);
    if let Some(delay) = next.requeue_after {
        queue.mark_after(&key, delay);
    }
}

impl ClaimWorkers {
    /// Reconciles one key with its record.
    async fn run(&self, key: &ClaimWork) -> Next {
        match key {
            ClaimWork::Machine(_) | ClaimWork::Lone(_) => {
                let mut record = take(&self.machines, key);
                let next = match key {
                    ClaimWork::Machine(machine) => self.machine(key, machine, &mut record).await,
                    ClaimWork::Lone(claim) => self.lone(key, claim, &mut record).await,
                    ClaimWork::Network(_) => Next::ON_CHANGE,
                };
                if !record.is_default() {
                    lock(&self.machines).insert(key.clone(), record);
                }
                next
            }
            ClaimWork::Network(uid) => {
                let mut record = take(&self.networks, key);
                let next = self.network(uid, &mut record).await;
                if !record.is_default() {
                    lock(&self.networks).insert(key.clone(), record);
                }
                next.not_before(WRITE_INTERVAL)
            }
        }
    }

    fn schema(&self) -> ClaimSchema {
        *lock(&self.schema)
    }
}

fn take<R: Default>(records: &Mutex<HashMap<ClaimWork, R>>, key: &ClaimWork) -> R {
    lock(records).remove(key).unwrap_or_default()
}

/// Nothing that holds one of these locks can panic in the middle of a change.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The wait after a failure: of this key only.
fn failed(retry: &mut Retry) -> Next {
    let wait = retry.failed(client::fence::now());
    // Changes do not cause more requests than retries do at first.
    Next::after(wait).not_before(wait.min(crate::leader::MIN_RETRY))
}
