//! The watches that fill the [`ClusterCache`].

use std::{
    collections::BTreeSet,
    fmt::Debug,
    future::Future,
    pin::{Pin, pin},
    sync::Arc,
};

use api::{networkservice::ZONE_LABEL, selection::NadRef};
use client::{
    decode::MetadataObject,
    watch::{StreamEvent, WatchConfig},
};
use futures::{Stream, StreamExt};
use jiff::Timestamp;
use k8s_openapi::{
    api::core::v1::Namespace, apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{Api, Client, Resource, core::ApiResource};
use plan::{
    network::{self, ClusterState},
    shared_map::SharedMap,
    users::{WorkloadKind, WorkloadRefs},
};
use serde::de::DeserializeOwned;
use tracing::info;

use crate::{
    cache::{CacheSource, ClusterCache, project},
    metrics::{ApiCallKind, Metrics},
    watch::events,
};

/// Selects pods that have not finished. A pod that finishes leaves the watch as if it were deleted.
pub const LIVE_PODS: &str = "status.phase!=Succeeded,status.phase!=Failed";

/// Fills a cache from watches.
#[derive(Clone)]
pub struct CacheFiller {
    pub client: Client,
    pub cache: ClusterCache,
    pub metrics: Arc<Metrics>,
}

impl CacheFiller {
    /// Runs all watches. Never returns.
    pub async fn run(self) {
        let (networks, nodes, node_networks, namespaces) =
            (self.networks(), self.nodes(), self.node_networks(), self.namespaces());
        let blocks = self.blocks();
        let workloads = [
            WorkloadKind::CronJob,
            WorkloadKind::DaemonSet,
            WorkloadKind::Deployment,
            WorkloadKind::Job,
            WorkloadKind::ReplicaSet,
            WorkloadKind::StatefulSet,
        ];
        let workloads = futures::future::join_all(workloads.map(|kind| self.workloads(kind)));
        let virtual_machines = [WorkloadKind::VirtualMachine, WorkloadKind::VirtualMachineInstance];
        let virtual_machines = futures::future::join_all(virtual_machines.map(|kind| self.machines(kind)));
        futures::join!(
            networks,
            nodes,
            node_networks,
            namespaces,
            blocks,
            self.pods(),
            self.services(),
            self.claims(),
            workloads,
            virtual_machines,
            self.nads()
        );
    }

    pub fn all<K>(
        &self,
        resource: &ApiResource,
        call: ApiCallKind,
    ) -> impl Stream<Item = StreamEvent<K>> + use<K>
    where
        K: Resource<DynamicType = ApiResource> + Clone + Debug + DeserializeOwned + Send + 'static,
    {
        self.selected(resource, WatchConfig::all(), call)
    }

    pub fn selected<K>(
        &self,
        resource: &ApiResource,
        config: WatchConfig,
        call: ApiCallKind,
    ) -> impl Stream<Item = StreamEvent<K>> + use<K>
    where
        K: Resource<DynamicType = ApiResource> + Clone + Debug + DeserializeOwned + Send + 'static,
    {
        events(Api::all_with(self.client.clone(), resource), config, self.metrics.clone(), call)
    }

    async fn networks(&self) {
        let read = |state: &ClusterState, object| {
            let mut network = project::network(object, Timestamp::now())?;
            let old = state.networks.get(&network.name).filter(|old| old.uid == network.uid);
            if let (Some(since), Some(_)) = (old.and_then(|old| old.deleting), network.deleting) {
                network.deleting = Some(since);
            }
            if old.is_none_or(|old| old.spec != network.spec) {
                // Its NADs or subnets may have changed.
                self.cache.services().mark_all();
            }
            if old.is_none_or(|old| project::changes_claims(old, &network)) {
                self.cache.claims().mark_network(&network.uid);
            }
            Some((network.name.clone(), network))
        };
        let stream = self.all(&project::networks(), ApiCallKind::WatchNetworks);
        let removed = |_: &String| {
            self.cache.services().mark_all();
            self.cache.claims().mark_all();
        };
        self.mirror(CacheSource::Networks, stream, |state| Some(&mut state.networks), read, removed).await;
    }

    async fn nodes(&self) {
        let services = self.cache.services();
        let stream = self.all(&project::nodes(), ApiCallKind::WatchNodes);
        let read = |_: &ClusterState, object| {
            let (name, node) = project::node(object)?;
            services.set_node(&name, node.labels.get(ZONE_LABEL).map(String::as_str));
            Some((name, node))
        };
        let removed = |name: &String| services.delete_node(name);
        self.mirror(CacheSource::Nodes, stream, |state| Some(&mut state.nodes), read, removed).await;
    }

    async fn node_networks(&self) {
        let stream = self.all(&project::node_networks(), ApiCallKind::WatchNodeNetworks);
        self.mirror(
            CacheSource::NodeNetworks,
            stream,
            |state| Some(&mut state.reports),
            |_, it| project::node_report(it),
            |_| {},
        )
        .await;
    }

    async fn blocks(&self) {
        let stream = self.all(&project::blocks(), ApiCallKind::WatchBlocks);
        let claims = self.cache.claims();
        let read = |_: &ClusterState, object| {
            let (name, block) = project::block(object)?;
            claims.set_block(&name, &block);
            Some((name, block))
        };
        let removed = |name: &String| claims.delete_block(name);
        self.mirror(CacheSource::Blocks, stream, |state| Some(&mut state.blocks), read, removed).await;
    }

    async fn namespaces(&self) {
        let stream = self.all(&ApiResource::erase::<Namespace>(&()), ApiCallKind::WatchNamespaces);
        self.mirror_namespaces(stream).await;
    }

    /// Mirrors a watch of namespaces. A change of the phase marks the services of the namespace: a service of a namespace
    /// that is terminating is not reconciled in full, and a namespace of the same name can follow at once.
    pub async fn mirror_namespaces(&self, stream: impl Stream<Item = StreamEvent<MetadataObject>>) {
        let services = self.cache.services();
        let read = |state: &ClusterState, object: MetadataObject| {
            let phase = match object.metadata.deletion_timestamp {
                Some(_) => network::NamespacePhase::Terminating,
                None => network::NamespacePhase::Active,
            };
            let name = object.metadata.name?;
            if state.namespaces.get(&name).is_some_and(|known| *known != phase) {
                services.mark_namespace(&name);
            }
            Some((name, phase))
        };
        let removed = |name: &String| services.mark_namespace(name);
        self.mirror(CacheSource::Namespaces, stream, |state| Some(&mut state.namespaces), read, removed)
            .await;
    }

    async fn nads(&self) {
        let (services, claims) = (self.cache.services(), self.cache.claims());
        let watch = || {
            self.cache.update(CacheSource::Nads, |state| {
                state.nads.get_or_insert_default();
                services.mark_all();
                claims.mark_all();
                true
            });
            let stream = self.all(&project::nads(), ApiCallKind::WatchAttachments);
            let map: fn(&mut ClusterState) -> Option<&mut SharedMap<NadRef, network::NadState>> =
                |state| state.nads.as_mut();
            let read = |state: &ClusterState, object| {
                let (at, nad) = project::nad(object)?;
                self.cache.record_changed_nad(&at);
                let known = state.nads.as_ref().and_then(|all| all.get(&at));
                if known.is_none_or(|known| known.joins != nad.joins) {
                    services.mark_network(&at);
                }
                if known.is_none_or(|known| known.network_config != nad.network_config) {
                    claims.mark_nad(&at);
                }
                Some((at, nad))
            };
            self.mirror(CacheSource::Nads, stream, map, read, |at| {
                services.mark_network(at);
                claims.mark_nad(at);
            })
        };
        let clear = || {
            self.cache.update(CacheSource::Nads, |state| {
                services.mark_all();
                claims.mark_all();
                state.nads.take().is_some()
            });
        };
        self.watch_optional(
            "network-attachment-definitions.k8s.cni.cncf.io",
            CacheSource::Nads,
            watch,
            clear,
        )
        .await;
    }

    async fn workloads(&self, kind: WorkloadKind) {
        let stream = self.all(&project::workloads(kind), ApiCallKind::WatchUsers);
        self.index_users(kind, stream, move |object| project::workload(kind, object)).await;
    }

    /// Mirrors a watch into one map of the state. `read` and `removed` are called while the state is locked, so that a reader
    /// that they wake finds the change.
    async fn mirror<K, Key, Value>(
        &self,
        source: CacheSource,
        stream: impl Stream<Item = StreamEvent<K>>,
        map: impl Fn(&mut ClusterState) -> Option<&mut SharedMap<Key, Value>>,
        read: impl Fn(&ClusterState, K) -> Option<(Key, Value)>,
        removed: impl Fn(&Key),
    ) where
        Key: Ord + Clone,
        Value: PartialEq,
    {
        let mut stream = pin!(stream);
        // The keys of the list in progress; None between lists.
        let mut listing: Option<BTreeSet<Key>> = None;
        while let Some(event) = stream.next().await {
            let complete = source.is_complete(&event);
            self.cache.update(source, |state| match event {
                StreamEvent::NotServed(_) | StreamEvent::Failed(_) | StreamEvent::Resumed => false,
                StreamEvent::ListStarted => {
                    listing = Some(BTreeSet::new());
                    false
                }
                StreamEvent::Applied(object) => {
                    let Some((key, value)) = read(state, object) else { return false };
                    if let Some(seen) = &mut listing {
                        seen.insert(key.clone());
                    }
                    let Some(map) = map(state) else { return false };
                    let changed = map.get(&key) != Some(&value);
                    map.insert(key, value);
                    changed
                }
                StreamEvent::Deleted(object) => {
                    let Some((key, _)) = read(state, object) else { return false };
                    removed(&key);
                    map(state).is_some_and(|map| map.remove(&key))
                }
                StreamEvent::ListDone => {
                    let (Some(map), Some(seen)) = (map(state), listing.take()) else { return false };
                    let gone: Vec<Key> = map.keys().filter(|key| !seen.contains(key)).cloned().collect();
                    gone.iter().fold(false, |_, key| {
                        removed(key);
                        map.remove(key)
                    })
                }
            });
            if complete {
                self.cache.mark_listed(source);
            }
        }
    }

    /// Mirrors a watch of one kind into the index of users. Returns when a kind that was listed is no longer served: its
    /// objects cannot use anything, and a watch that resumed later would not list the existing ones.
    pub(super) async fn index_users<K>(
        &self,
        kind: WorkloadKind,
        stream: impl Stream<Item = StreamEvent<K>>,
        read: impl Fn(K) -> WorkloadRefs,
    ) {
        let mut stream = pin!(stream);
        let mut listed = false;
        while let Some(event) = stream.next().await {
            let complete = CacheSource::Users(kind).is_complete(&event);
            let no_longer_served = matches!(event, StreamEvent::NotServed(_)) && complete && listed;
            listed |= matches!(event, StreamEvent::ListDone);
            // Parsed before the lock is taken: an annotation can be long.
            let event = match event {
                StreamEvent::ListStarted => StreamEvent::ListStarted,
                StreamEvent::Applied(object) => StreamEvent::Applied(read(object)),
                StreamEvent::Deleted(object) => StreamEvent::Deleted(read(object)),
                StreamEvent::ListDone => StreamEvent::ListDone,
                StreamEvent::Resumed => StreamEvent::Resumed,
                StreamEvent::NotServed(error) => StreamEvent::NotServed(error),
                StreamEvent::Failed(error) => StreamEvent::Failed(error),
            };
            let users = self.cache.users();
            let changed = match event {
                StreamEvent::NotServed(_) => complete && users.clear(kind),
                StreamEvent::Failed(_) | StreamEvent::Resumed => false,
                StreamEvent::ListStarted => {
                    users.start_relist(kind);
                    false
                }
                StreamEvent::Applied(refs) => users.apply(kind, &refs),
                StreamEvent::Deleted(refs) => users.delete(kind, &refs.namespace, &refs.name),
                StreamEvent::ListDone => users.finish_relist(kind),
            };
            if changed {
                self.cache.wake(CacheSource::Users(kind));
            }
            if complete {
                self.cache.mark_listed(CacheSource::Users(kind));
            }
            if no_longer_served {
                return;
            }
        }
    }

    /// Watches a kind for as long as its CustomResourceDefinition exists.
    pub(super) async fn watch_optional<F: Future<Output = ()>>(
        &self,
        name: &str,
        source: CacheSource,
        watch: impl Fn() -> F,
        clear: impl Fn(),
    ) {
        let definitions = ApiResource::erase::<CustomResourceDefinition>(&());
        let config = WatchConfig::one(name);
        let stream = self.selected::<MetadataObject>(&definitions, config, ApiCallKind::WatchKinds);
        let mut definition = pin!(stream);
        let mut watching: Option<Pin<Box<F>>> = None;
        let mut listed = false;
        loop {
            let event = tokio::select! {
                event = definition.next() => event,
                () = poll_watch(&mut watching) => None,
            };
            let exists = match event {
                None => return,
                Some(StreamEvent::ListStarted) => {
                    listed = false;
                    continue;
                }
                Some(StreamEvent::Failed(_) | StreamEvent::Resumed) => continue,
                Some(StreamEvent::Applied(_)) => {
                    listed = true;
                    true
                }
                Some(StreamEvent::Deleted(_) | StreamEvent::NotServed(_)) => false,
                Some(StreamEvent::ListDone) => listed,
            };
            if exists && watching.is_none() {
                info!(kind = name, "the kind exists, watching it");
                watching = Some(Box::pin(watch()));
            } else if !exists {
                if watching.take().is_some() {
                    info!(kind = name, "the kind no longer exists, stopped watching it");
                }
                clear();
                self.cache.mark_listed(source);
            }
        }
    }
}

/// Polls the watch. Without one, never resolves.
async fn poll_watch<F: Future<Output = ()>>(watching: &mut Option<Pin<Box<F>>>) {
    match watching {
        Some(watching) => watching.await,
        None => std::future::pending().await,
    }
}

impl CacheSource {
    /// Whether the source counts as listed after this event. A third-party kind that has a CustomResourceDefinition but is
    /// not served has no objects to wait for; the watch retries it.
    pub(super) fn is_complete<K>(self, event: &StreamEvent<K>) -> bool {
        use WorkloadKind::{VirtualMachine, VirtualMachineInstance};
        let third_party =
            matches!(self, Self::Nads | Self::Claims | Self::Users(VirtualMachine | VirtualMachineInstance));
        matches!(event, StreamEvent::ListDone) || third_party && matches!(event, StreamEvent::NotServed(_))
    }
}

#[cfg(test)]
mod tests {
    use client::watch::Error;
    use futures::stream;
    use kube::core::Status;

    use super::*;

    fn missing() -> kube::Error {
        let status = Status::failure("the server could not find it", "NotFound").with_code(404);
        kube::Error::Api(Box::new(status))
    }

    #[test]
    fn a_third_party_kind_that_is_not_served_does_not_block_the_sync() {
        let forbidden = kube::Error::Api(Box::new(Status::failure("no", "Forbidden").with_code(403)));
        let events: [StreamEvent<MetadataObject>; 6] = [
            StreamEvent::Failed(Error::List(forbidden)),
            StreamEvent::NotServed(Error::List(missing())),
            StreamEvent::ListStarted,
            StreamEvent::ListDone,
            StreamEvent::Resumed,
            StreamEvent::NotServed(Error::Start(missing())),
        ];
        let complete =
            |source: CacheSource| events.iter().map(|one| source.is_complete(one)).collect::<Vec<_>>();
        for source in [CacheSource::Nads, CacheSource::Users(WorkloadKind::VirtualMachine)] {
            assert_eq!(complete(source), [false, true, false, true, false, true]);
        }
        for source in [CacheSource::Nodes, CacheSource::Users(WorkloadKind::Pod)] {
            assert_eq!(complete(source), [false, false, false, true, false, false]);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn users_of_a_kind_that_is_no_longer_served_are_forgotten() {
        let user = || {
            let object = serde_json::json!({"metadata": {
                "namespace": "ns", "name": "x", "annotations": {"k8s.v1.cni.cncf.io/networks": "blue"},
            }});
            serde_json::from_value::<MetadataObject>(object).unwrap()
        };
        for (kind, left) in [
            (WorkloadKind::VirtualMachine, 0),
            (WorkloadKind::VirtualMachineInstance, 0),
            (WorkloadKind::Pod, 1),
        ] {
            for failure in [Error::List, Error::Start] {
                let client = Client::new(
                    tower::service_fn(async |_: axum::http::Request<kube::client::Body>| {
                        std::future::pending::<Result<axum::http::Response<kube::client::Body>, kube::Error>>(
                        )
                        .await
                    }),
                    "ns",
                );
                let filler = CacheFiller { client, cache: ClusterCache::new(), metrics: Arc::default() };
                let events = [
                    StreamEvent::NotServed(failure(missing())),
                    StreamEvent::ListStarted,
                    StreamEvent::Applied(user()),
                    StreamEvent::ListDone,
                    StreamEvent::NotServed(failure(missing())),
                ];
                let stream = stream::iter(events).chain(stream::pending());
                let mirror = filler.index_users(kind, stream, |it| project::pod(&it.metadata));
                let ended = tokio::time::timeout(std::time::Duration::from_mins(1), mirror).await;
                assert_eq!(ended.is_ok(), left == 0, "{kind:?}: the watch is restarted");
                assert_eq!(filler.cache.users().len(), left, "{kind:?}");
            }
        }
    }
}
