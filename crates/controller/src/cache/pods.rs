//! The watch of pods, which feeds three indexes: the users of networks, the pods of IPAMClaims and the endpoints of services.
//!
//! While no service needs the endpoints of pods, pods are watched by their metadata alone. Otherwise whole pods are watched,
//! of which only the used fields are decoded. The switch starts the other watch beside the current one and hands the indexes
//! over once the other has listed all pods: see [`Handover`].

use std::time::Duration;

use client::{
    decode::MetadataObject,
    watch::{StreamEvent, WatchConfig},
};
use futures::{StreamExt as _, stream::BoxStream};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, core::ApiResource};
use plan::{services::PodFacts, users::WorkloadKind};
use tokio::time::{Instant, sleep_until};
use tracing::info;

use super::{
    CacheSource,
    handover::{Handover, PodIndexes, PodRecord, ReplayedChanges},
    project,
    services::project::{self as service_project, EndpointPod},
    watches::{CacheFiller, LIVE_PODS},
};
use crate::{metrics::ApiCallKind, watch::positioned_events};

/// How long the endpoints of pods are kept after the last service is gone, so that a service that is created again does not
/// list all pods again.
pub const KEEP_ENDPOINTS: Duration = Duration::from_secs(60);

/// What is watched of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PodDetail {
    /// Names and annotations: the users of networks.
    Metadata,
    /// Also readiness, ports and the like: the endpoints of services.
    Endpoint,
}

/// What one event says to the indexes.
struct PodUpdate {
    record: PodRecord,
    /// None in a watch of metadata.
    facts: Option<PodFacts>,
}

type PodStream = BoxStream<'static, (StreamEvent<PodUpdate>, Option<u64>)>;

/// A watch of pods.
struct PodWatch {
    detail: PodDetail,
    stream: PodStream,
}

/// A watch that is about to replace the current one.
struct NextWatch {
    watch: PodWatch,
    handover: Handover,
}

impl NextWatch {
    async fn poll(next: &mut Option<Self>) -> Option<(StreamEvent<PodUpdate>, Option<u64>)> {
        match next {
            Some(next) => next.watch.stream.next().await,
            None => std::future::pending().await,
        }
    }
}

/// The watch that maintains the index of users, and the one that replaces it.
struct PodWatches<'a> {
    filler: &'a CacheFiller,
    current: PodWatch,
    /// Whether the current watch has listed all pods.
    listed: bool,
    replayed: ReplayedChanges,
    next: Option<NextWatch>,
    /// Since when no service needs endpoints.
    unneeded_since: Option<Instant>,
}

impl CacheFiller {
    /// Watches pods. Never returns.
    pub(super) async fn pods(&self) {
        let mut needed = self.cache.services().needs_pods();
        let mut watches = PodWatches {
            filler: self,
            current: self.pod_watch(PodDetail::Metadata),
            listed: false,
            replayed: ReplayedChanges::default(),
            next: None,
            unneeded_since: None,
        };
        loop {
            let is_needed = *needed.borrow_and_update();
            watches.select_detail(is_needed);
            let keep_until = watches.unneeded_since.map(|since| since + KEEP_ENDPOINTS);
            let expired = async {
                match keep_until.filter(|until| *until > Instant::now()) {
                    Some(until) => sleep_until(until).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                event = watches.current.stream.next() => match event {
                    Some((event, position)) => watches.current_event(event, position),
                    None => return,
                },
                event = NextWatch::poll(&mut watches.next) => match event {
                    Some((event, position)) => watches.next_event(event, position).await,
                    None => return,
                },
                changed = needed.changed() => if changed.is_err() {
                    // The cache is gone.
                    return;
                },
                () = expired => {}
            }
        }
    }

    fn pod_indexes(&self) -> PodIndexes<'_> {
        PodIndexes { users: self.cache.users(), claims: self.cache.claims() }
    }

    fn pod_watch(&self, detail: PodDetail) -> PodWatch {
        let pods = ApiResource::erase::<Pod>(&());
        let config = WatchConfig::all().fields(LIVE_PODS);
        let (metrics, call) = (self.metrics.clone(), ApiCallKind::WatchUsers);
        let stream = match detail {
            PodDetail::Metadata => {
                let api = Api::all_with(self.client.clone(), &pods);
                let events = positioned_events(api, config, metrics, call);
                let read = |object: MetadataObject| PodUpdate {
                    record: project::pod_record(&object.metadata),
                    facts: None,
                };
                events.map(move |(event, position)| (map_event(event, read), position)).boxed()
            }
            PodDetail::Endpoint => {
                let api = Api::all_with(self.client.clone(), &pods);
                let events = positioned_events(api, config, metrics, call);
                let read = |object: EndpointPod| PodUpdate {
                    record: project::pod_record(&object.metadata),
                    facts: service_project::pod(object),
                };
                events.map(move |(event, position)| (map_event(event, read), position)).boxed()
            }
        };
        PodWatch { detail, stream }
    }
}

fn map_event<K, T>(event: StreamEvent<K>, read: impl Fn(K) -> T) -> StreamEvent<T> {
    match event {
        StreamEvent::ListStarted => StreamEvent::ListStarted,
        StreamEvent::Applied(object) => StreamEvent::Applied(read(object)),
        StreamEvent::Deleted(object) => StreamEvent::Deleted(read(object)),
        StreamEvent::ListDone => StreamEvent::ListDone,
        StreamEvent::Resumed => StreamEvent::Resumed,
        StreamEvent::NotServed(error) => StreamEvent::NotServed(error),
        StreamEvent::Failed(error) => StreamEvent::Failed(error),
    }
}

impl PodWatches<'_> {
    /// Starts or ends the watch that shall replace the current one.
    fn select_detail(&mut self, needed: bool) {
        let now = Instant::now();
        self.unneeded_since = match (needed, self.unneeded_since) {
            (true, _) => None,
            (false, since) => Some(since.unwrap_or(now)),
        };
        let expired = self.unneeded_since.is_some_and(|since| now >= since + KEEP_ENDPOINTS);
        let desired = match self.current.detail {
            _ if needed => PodDetail::Endpoint,
            PodDetail::Endpoint if !expired => PodDetail::Endpoint,
            PodDetail::Endpoint | PodDetail::Metadata => PodDetail::Metadata,
        };
        if self.next.as_ref().is_some_and(|next| next.watch.detail != desired) {
            self.cancel_next();
        }
        // The current watch is listed first: readiness of the webhook waits for it.
        if self.listed && self.next.is_none() && self.current.detail != desired {
            info!(?desired, "switching the watch of pods");
            let watch = self.filler.pod_watch(desired);
            self.next = Some(NextWatch { watch, handover: Handover::default() });
        }
    }

    fn cancel_next(&mut self) {
        let Some(next) = self.next.take() else { return };
        if next.watch.detail == PodDetail::Endpoint {
            self.filler.cache.services().clear_pods();
        }
    }

    /// An event of the watch that maintains the index of users.
    fn current_event(&mut self, event: StreamEvent<PodUpdate>, position: Option<u64>) {
        let cache = &self.filler.cache;
        let indexes = self.filler.pod_indexes();
        let pods = CacheSource::Users(WorkloadKind::Pod);
        let changed = match &event {
            StreamEvent::NotServed(_) | StreamEvent::Failed(_) | StreamEvent::Resumed => false,
            StreamEvent::ListStarted => {
                // Its list cannot be merged with that of another watch.
                self.listed = false;
                self.cancel_next();
                self.replayed.clear();
                indexes.start_relist();
                false
            }
            StreamEvent::Applied(update) => {
                if let Some(next) = &mut self.next {
                    next.handover.applied(&update.record, position);
                }
                !self.replayed.contains(&update.record.refs, position) && indexes.apply(&update.record)
            }
            StreamEvent::Deleted(PodUpdate { record: PodRecord { refs, .. }, .. }) => {
                if let Some(next) = &mut self.next {
                    next.handover.deleted(refs, position);
                }
                !self.replayed.contains(refs, position) && indexes.delete(&refs.namespace, &refs.name)
            }
            StreamEvent::ListDone => {
                self.listed = true;
                indexes.finish_relist()
            }
        };
        if changed {
            cache.wake(pods);
        }
        if matches!(event, StreamEvent::ListDone) {
            cache.mark_listed(pods);
        }
        if self.current.detail == PodDetail::Endpoint {
            self.index_endpoints(event);
        }
    }

    /// An event of the watch that shall replace the current one.
    async fn next_event(&mut self, event: StreamEvent<PodUpdate>, position: Option<u64>) {
        let Some(next) = &mut self.next else { return };
        let complete = matches!(event, StreamEvent::ListDone);
        match &event {
            StreamEvent::ListStarted => next.handover.start_list(),
            StreamEvent::Applied(update) => next.handover.list(&update.record),
            StreamEvent::Deleted(_)
            | StreamEvent::ListDone
            | StreamEvent::Resumed
            | StreamEvent::NotServed(_)
            | StreamEvent::Failed(_) => {}
        }
        if next.watch.detail == PodDetail::Endpoint {
            self.index_endpoints(event);
        }
        if complete {
            self.replace_current(position).await;
        }
    }

    async fn replace_current(&mut self, position: Option<u64>) {
        let Some(NextWatch { watch, handover }) = self.next.take() else { return };
        let cache = &self.filler.cache;
        self.current = watch;
        let (changed, replayed) = handover.complete(self.filler.pod_indexes(), position).await;
        self.replayed = replayed;
        if changed {
            cache.wake(CacheSource::Users(WorkloadKind::Pod));
        }
        if self.current.detail == PodDetail::Metadata {
            cache.services().clear_pods();
        }
        info!(detail = ?self.current.detail, "switched the watch of pods");
    }

    fn index_endpoints(&self, event: StreamEvent<PodUpdate>) {
        let services = self.filler.cache.services();
        match event {
            StreamEvent::ListStarted => services.start_pod_list(),
            StreamEvent::Applied(PodUpdate { facts: Some(facts), .. }) => services.apply_pod(facts),
            StreamEvent::Deleted(PodUpdate { record: PodRecord { refs, .. }, .. }) => {
                services.delete_pod(&refs.namespace, &refs.name);
            }
            StreamEvent::ListDone => services.finish_pod_list(),
            StreamEvent::Applied(_)
            | StreamEvent::Resumed
            | StreamEvent::NotServed(_)
            | StreamEvent::Failed(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tokio::task::JoinSet;

    use super::*;
    use crate::{
        cache::services::tests::{add_network_service, key, list_all, remove_network_service},
        leader::tests::FakeApiServer,
    };

    const STEP: Duration = Duration::from_millis(100);

    #[tokio::test(start_paused = true)]
    async fn whole_pods_are_watched_only_while_a_service_needs_them() {
        let (context, server) = FakeApiServer::start();
        let status = json!([{"name": "ns/blue", "interface": "net1", "ips": ["192.168.9.1"]}]).to_string();
        let annotations =
            json!({"k8s.v1.cni.cncf.io/networks": "blue", "k8s.v1.cni.cncf.io/network-status": status});
        let pod = json!({
            "metadata": {"namespace": "ns", "name": "p", "uid": "u", "resourceVersion": "4", "labels": {"app": "db"},
                "annotations": annotations},
            "spec": {"containers": []},
        });
        *server.lists.lock().unwrap() = vec![("/pods", json!([pod]))];
        let cache = context.cache.clone();
        let services = cache.services();
        let filler = CacheFiller { client: context.client, cache: cache.clone(), metrics: context.metrics };
        let mut tasks = JoinSet::new();
        tasks.spawn(async move { filler.pods().await });
        tokio::time::sleep(STEP).await;
        cache.synced(&[CacheSource::Users(WorkloadKind::Pod)]).await;
        list_all(services);
        services.clear_pods();
        add_network_service(services, "ns", "db", "db");
        assert!(services.snapshot(&key("db")).is_none(), "the pods are not listed");
        assert_eq!(cache.users().len(), 1);
        tokio::time::sleep(STEP).await;
        assert_eq!(services.snapshot(&key("db")).unwrap().pods.len(), 1);
        assert_eq!(cache.users().len(), 1);
        // The endpoints are kept for a while, in case that the service comes back.
        remove_network_service(services, "db");
        tokio::time::sleep(KEEP_ENDPOINTS / 2).await;
        add_network_service(services, "ns", "db", "db");
        assert!(services.snapshot(&key("db")).is_some());
        remove_network_service(services, "db");
        for _ in 0..KEEP_ENDPOINTS.as_secs() + 30 {
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert_eq!(cache.users().len(), 1, "the users are never lost");
        }
        add_network_service(services, "ns", "db", "db");
        assert!(services.snapshot(&key("db")).is_none(), "the endpoints were forgotten");
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(services.snapshot(&key("db")).unwrap().pods.len(), 1);
    }
}
