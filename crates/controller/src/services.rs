//! The leader's controller for NetworkServices and for Services that users annotate: plans with `plan::services` and applies
//! the plan.
//!
//! Each service is reconciled on its own, several at a time. A service that fails or waits delays no other.

mod apply;
mod network;
mod reconcile;
mod record;
mod slice_object;
#[cfg(test)]
mod tests;

use std::{
    collections::HashMap,
    fmt,
    panic::AssertUnwindSafe,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use api::CONTROLLER_FIELD_MANAGER;
use client::events::{self, EventLimits, EventRecorder, EventSender, EventSource, Repeats};
use futures::FutureExt as _;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::error;

use self::{apply::ServiceWriter, record::ServiceRecord};
use crate::{
    cache::{CacheSource, ClusterCache},
    leader::LeaderContext,
    metrics::{ApiCallKind, Metrics},
    queue::{Pause, QueueKey, WorkQueue},
};

/// The services that have to be reconciled.
pub type ServiceQueue = WorkQueue<ServiceKey>;

/// The namespace and name of a Service. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceKey {
    pub namespace: Arc<str>,
    pub name: Arc<str>,
}

impl ServiceKey {
    pub fn new(namespace: &str, name: &str) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }
}

/// A webhook or a quota can make every write to a namespace hang.
impl QueueKey for ServiceKey {
    type Group = Arc<str>;
    const MAX_RUNNING_PER_GROUP: usize = MAX_CONCURRENT_PER_NAMESPACE;

    fn group(&self) -> Arc<str> {
        self.namespace.clone()
    }
}

impl fmt::Display for ServiceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// The number of services that are reconciled at a time.
const MAX_CONCURRENT_SERVICES: usize = 32;
/// The number of services of one namespace that are reconciled at a time.
const MAX_CONCURRENT_PER_NAMESPACE: usize = 8;
/// How long a service waits after a panic.
const PANIC_RETRY: Duration = Duration::from_secs(30);
/// The same warning is recorded once in this time.
const EVENT_WINDOW: Duration = Duration::from_mins(10);
const EVENT_LIMITS: EventLimits = EventLimits { queue: 256, remembered: 2048 };
/// What a reconcile reads of the cluster, besides the services themselves.
const SOURCES: [CacheSource; 4] =
    [CacheSource::Networks, CacheSource::Nodes, CacheSource::Nads, CacheSource::Namespaces];

/// Reconciles all services.
pub struct ServiceController {
    workers: Arc<ServiceWorkers>,
    events: EventSender,
}

/// What the workers share.
struct ServiceWorkers {
    cache: ClusterCache,
    metrics: Arc<Metrics>,
    writer: ServiceWriter,
    recorder: EventRecorder,
    /// What is remembered between two reconciles of a service. A worker takes the record of its service.
    records: Mutex<HashMap<ServiceKey, ServiceRecord>>,
}

/// When a service is reconciled again.
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

    /// The earlier of both times, the longer of both pauses.
    fn merge(self, other: Self) -> Self {
        let requeue_after = match (self.requeue_after, other.requeue_after) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        };
        let pause = match (self.pause, other.pause) {
            (Pause::Always(one), Pause::Always(other)) => Pause::Always(one.max(other)),
            (always @ Pause::Always(_), _) | (_, always) => always,
        };
        Self { requeue_after, pause }
    }
}

impl ServiceController {
    pub fn new(context: &LeaderContext) -> Self {
        let LeaderContext { client, cache, metrics, fence } = context;
        let source = EventSource {
            controller: CONTROLLER_FIELD_MANAGER,
            instance: "services".to_owned(),
            window: EVENT_WINDOW,
            repeats: Repeats::Separate,
            limits: EVENT_LIMITS,
        };
        let call = metrics.api_call(ApiCallKind::Event).fenced(fence.clone());
        let (recorder, events) = events::recorder(client.clone(), source, call);
        let workers = ServiceWorkers {
            cache: cache.clone(),
            metrics: metrics.clone(),
            writer: ServiceWriter::new(context),
            recorder,
            records: Mutex::default(),
        };
        Self { workers: Arc::new(workers), events }
    }

    /// Reconciles until `stop`. Reconciles that have started are finished first.
    pub async fn run(self, stop: CancellationToken) {
        let Self { workers, events } = self;
        if stop.run_until_cancelled(workers.cache.synced(&SOURCES)).await.is_none() {
            return;
        }
        let services = workers.cache.services();
        services.forget_own_writes();
        let _term = services.queue().start_term();
        services.mark_all();
        futures::join!(events.run(stop.clone()), run_workers(&workers, stop));
    }
}

async fn run_workers(workers: &Arc<ServiceWorkers>, stop: CancellationToken) {
    let queue = workers.cache.services().queue().clone();
    let mut running: JoinSet<(ServiceKey, Next)> = JoinSet::new();
    loop {
        while running.len() < MAX_CONCURRENT_SERVICES {
            let Some(key) = queue.take() else { break };
            let workers = Arc::clone(workers);
            running.spawn(supervise(workers, key));
        }
        tokio::select! {
            () = stop.cancelled() => break,
            () = queue.changed() => {}
            Some(finished) = running.join_next() => finish(&queue, finished),
        }
    }
    while running.join_next().await.is_some() {}
}

/// Reconciles a service. A panic that one service causes ends nothing else.
async fn supervise(workers: Arc<ServiceWorkers>, key: ServiceKey) -> (ServiceKey, Next) {
    let next = AssertUnwindSafe(workers.run(&key)).catch_unwind().await.unwrap_or_else(|_| {
        error!(service = %key, "the reconcile of a service panicked");
        Next::after(PANIC_RETRY).not_before(PANIC_RETRY)
    });
    (key, next)
}

fn finish(queue: &ServiceQueue, finished: Result<(ServiceKey, Next), tokio::task::JoinError>) {
    // `supervise` catches panics, and a worker is aborted only with the whole set.
    let Ok((key, next)) = finished else { return };
    queue.finish(&key, next.pause);
    if let Some(delay) = next.requeue_after {
        queue.mark_after(&key, delay);
    }
}

impl ServiceWorkers {
    /// Reconciles one service with its record.
    async fn run(&self, key: &ServiceKey) -> Next {
        let mut record = self.with_records(|records| records.remove(key)).unwrap_or_default();
        let next = self.reconcile(key, &mut record).await;
        record.finish();
        if !record.is_gone() {
            self.with_records(|records| records.insert(key.clone(), record));
        }
        next
    }

    fn with_records<T>(&self, access: impl FnOnce(&mut HashMap<ServiceKey, ServiceRecord>) -> T) -> T {
        access(&mut self.records.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
