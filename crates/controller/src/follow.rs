//! The watches that fill the [`Cluster`].

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Debug,
    future::Future,
    pin::{Pin, pin},
    sync::Arc,
};

use api::selection::NadRef;
use futures::{Stream, StreamExt, TryStreamExt};
use jiff::Timestamp;
use k8s_openapi::{
    api::core::v1::{Namespace, Pod},
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, Client, Resource,
    core::{ApiResource, PartialObjectMeta},
    runtime::{
        WatchStreamExt,
        watcher::{self, Event, watcher},
    },
};
use plan::{
    network::{self, World},
    users::{Facts, Kind},
};
use serde::de::DeserializeOwned;
use tracing::info;

use crate::{
    cluster::{Cluster, Source},
    metrics::{Call, Metrics},
    object, watch,
};

/// Pods that have ended use nothing, and leave a watch that selects so.
pub const LIVE_PODS: &str = "status.phase!=Succeeded,status.phase!=Failed";

/// Keeps one cluster filled.
#[derive(Clone)]
pub struct Follower {
    pub client: Client,
    pub cluster: Cluster,
    pub metrics: Arc<Metrics>,
}

/// One of several objects came, went, or was listed.
enum News<K> {
    Begin,
    Here(K),
    Gone(K),
    End,
    /// The kind is not served in the version that is asked for.
    Unserved,
}

impl Follower {
    /// All watches at once; ends only when it is dropped.
    pub async fn follow(self) {
        let (networks, nodes, reports, namespaces) =
            (self.networks(), self.nodes(), self.reports(), self.namespaces());
        let blocks = self.blocks();
        let workloads = [
            Kind::CronJob,
            Kind::DaemonSet,
            Kind::Deployment,
            Kind::Job,
            Kind::ReplicaSet,
            Kind::StatefulSet,
        ];
        let workloads = futures::future::join_all(workloads.map(|kind| self.workloads(kind)));
        let machines = [Kind::VirtualMachine, Kind::VirtualMachineInstance];
        let machines = futures::future::join_all(machines.map(|kind| self.machines(kind)));
        futures::join!(
            networks,
            nodes,
            reports,
            namespaces,
            blocks,
            self.pods(),
            workloads,
            machines,
            self.attachments()
        );
    }

    fn all<K>(&self, resource: &ApiResource, call: Call) -> impl Stream<Item = News<K>> + use<K>
    where
        K: Resource<DynamicType = ApiResource> + Clone + Debug + DeserializeOwned + Send + 'static,
    {
        news(watcher(Api::all_with(self.client.clone(), resource), watch::all()), self.metrics.clone(), call)
    }

    async fn networks(&self) {
        let put = |world: &mut World, object| {
            let mut network = object::network(object, Timestamp::now())?;
            let old = world.networks.get(&network.name).filter(|old| old.uid == network.uid);
            if let (Some(since), Some(_)) = (old.and_then(|old| old.deleting), network.deleting) {
                network.deleting = Some(since);
            }
            Some((network.name.clone(), network))
        };
        let stream = self.all(&object::networks(), Call::WatchNetworks);
        self.keep(Source::Networks, stream, |world| Some(&mut world.networks), put).await;
    }

    async fn nodes(&self) {
        let stream = self.all(&object::nodes(), Call::WatchNodes);
        self.keep(Source::Nodes, stream, |world| Some(&mut world.nodes), |_, it| object::node(it)).await;
    }

    async fn reports(&self) {
        let stream = self.all(&object::reports(), Call::WatchNodeNetworks);
        self.keep(Source::Reports, stream, |world| Some(&mut world.reports), |_, it| object::report(it))
            .await;
    }

    async fn blocks(&self) {
        let stream = self.all(&object::blocks(), Call::WatchBlocks);
        self.keep(Source::Blocks, stream, |world| Some(&mut world.blocks), |_, it| object::block(it)).await;
    }

    async fn namespaces(&self) {
        let api = Api::<PartialObjectMeta<Namespace>>::all(self.client.clone());
        let stream = news(watcher(api, watch::all()), self.metrics.clone(), Call::WatchNamespaces);
        let put = |_: &mut World, object: PartialObjectMeta<Namespace>| {
            let state = match object.metadata.deletion_timestamp {
                Some(_) => network::Namespace::Terminating,
                None => network::Namespace::Active,
            };
            Some((object.metadata.name?, state))
        };
        self.keep(Source::Namespaces, stream, |world| Some(&mut world.namespaces), put).await;
    }

    async fn attachments(&self) {
        let follow = || {
            self.cluster.change(|world| {
                world.attachments.get_or_insert_default();
                true
            });
            let stream = self.all(&object::attachments(), Call::WatchAttachments);
            let map: fn(&mut World) -> Option<&mut BTreeMap<NadRef, network::Attachment>> =
                |world| world.attachments.as_mut();
            self.keep(Source::Attachments, stream, map, |world, it| {
                let (at, one) = object::attachment(it)?;
                world.stirred.insert(at.clone());
                Some((at, one))
            })
        };
        let clear = |world: &mut World| world.attachments.take().is_some();
        self.optional("network-attachment-definitions.k8s.cni.cncf.io", Source::Attachments, follow, clear)
            .await;
    }

    async fn pods(&self) {
        let api = Api::<PartialObjectMeta<Pod>>::all(self.client.clone());
        let stream = watcher(api, watch::all().fields(LIVE_PODS));
        let stream = news(stream, self.metrics.clone(), Call::WatchUsers);
        self.index(Kind::Pod, stream, |object| object::pod(&object.metadata)).await;
    }

    async fn workloads(&self, kind: Kind) {
        let stream = self.all(&object::workloads(kind), Call::WatchUsers);
        self.index(kind, stream, move |object| object::workload(kind, object)).await;
    }

    async fn machines(&self, kind: Kind) {
        let name = match kind {
            Kind::VirtualMachine => "virtualmachines.kubevirt.io",
            _ => "virtualmachineinstances.kubevirt.io",
        };
        let clear = |world: &mut World| world.users.clear(kind);
        let follow = || async move {
            loop {
                self.workloads(kind).await;
                info!(kind = name, "the kind is not served any more, asked for again");
            }
        };
        self.optional(name, Source::Users(kind), follow, clear).await;
    }

    /// Keeps one map of the world equal to what a watch shows.
    async fn keep<K, Key, Value>(
        &self,
        source: Source,
        stream: impl Stream<Item = News<K>>,
        map: impl Fn(&mut World) -> Option<&mut BTreeMap<Key, Value>>,
        read: impl Fn(&mut World, K) -> Option<(Key, Value)>,
    ) where
        Key: Ord + Clone,
        Value: PartialEq,
    {
        let mut stream = pin!(stream);
        // What the list that is under way has named; between lists there is none.
        let mut listing: Option<BTreeSet<Key>> = None;
        while let Some(news) = stream.next().await {
            let complete = source.is_complete(&news);
            self.cluster.change(|world| match news {
                News::Unserved => false,
                News::Begin => {
                    listing = Some(BTreeSet::new());
                    false
                }
                News::Here(object) => {
                    let Some((key, value)) = read(world, object) else { return false };
                    if let Some(seen) = &mut listing {
                        seen.insert(key.clone());
                    }
                    let Some(map) = map(world) else { return false };
                    let news = map.get(&key) != Some(&value);
                    map.insert(key, value);
                    news
                }
                News::Gone(object) => {
                    let Some((key, _)) = read(world, object) else { return false };
                    map(world).is_some_and(|map| map.remove(&key).is_some())
                }
                News::End => {
                    let (Some(map), Some(seen)) = (map(world), listing.take()) else { return false };
                    let before = map.len();
                    map.retain(|key, _| seen.contains(key));
                    map.len() != before
                }
            });
            if complete {
                self.cluster.listed(source);
            }
        }
    }

    /// Keeps the index of users equal to what a watch of one kind shows. Ends when a kind that was listed is served no
    /// more: nobody can use anything by it, and a watch that went on later would not tell of those that are there.
    async fn index<K>(&self, kind: Kind, stream: impl Stream<Item = News<K>>, read: impl Fn(K) -> Facts) {
        let mut stream = pin!(stream);
        let mut listed = false;
        while let Some(news) = stream.next().await {
            let complete = Source::Users(kind).is_complete(&news);
            let lost = matches!(news, News::Unserved) && complete && listed;
            listed |= matches!(news, News::End);
            // Read before the lock is taken: an annotation can be long.
            let news = match news {
                News::Begin => News::Begin,
                News::Here(object) => News::Here(read(object)),
                News::Gone(object) => News::Gone(read(object)),
                News::End => News::End,
                News::Unserved => News::Unserved,
            };
            self.cluster.change(|world| match news {
                News::Unserved => complete && world.users.clear(kind),
                News::Begin => {
                    world.users.begin(kind);
                    false
                }
                News::Here(facts) => world.users.apply(kind, &facts),
                News::Gone(facts) => world.users.delete(kind, &facts.namespace, &facts.name),
                News::End => world.users.end(kind),
            });
            if complete {
                self.cluster.listed(Source::Users(kind));
            }
            if lost {
                return;
            }
        }
    }

    /// Follows a kind for as long as the cluster has it.
    async fn optional<F: Future<Output = ()>>(
        &self,
        name: &str,
        source: Source,
        follow: impl Fn() -> F,
        clear: impl Fn(&mut World) -> bool,
    ) {
        let api = Api::<PartialObjectMeta<CustomResourceDefinition>>::all(self.client.clone());
        let stream = watcher(api, watch::only(name));
        let mut definition = pin!(news(stream, self.metrics.clone(), Call::WatchKinds));
        let mut following: Option<Pin<Box<F>>> = None;
        let mut listed = false;
        loop {
            let news = tokio::select! {
                news = definition.next() => news,
                () = until_gone(&mut following) => None,
            };
            let there = match news {
                None => return,
                Some(News::Begin) => {
                    listed = false;
                    continue;
                }
                Some(News::Here(_)) => {
                    listed = true;
                    true
                }
                Some(News::Gone(_) | News::Unserved) => false,
                Some(News::End) => listed,
            };
            if there && following.is_none() {
                info!(kind = name, "the cluster has the kind");
                following = Some(Box::pin(follow()));
            } else if !there {
                if following.take().is_some() {
                    info!(kind = name, "the cluster has the kind no more");
                }
                self.cluster.change(&clear);
                self.cluster.listed(source);
            }
        }
    }
}

/// Polls what is followed; nothing followed never ends.
async fn until_gone<F: Future<Output = ()>>(following: &mut Option<Pin<Box<F>>>) {
    match following {
        Some(following) => following.await,
        None => std::future::pending().await,
    }
}

/// A watch that goes on whatever happens.
fn news<K: Resource + Clone + Debug + Send + 'static>(
    stream: impl Stream<Item = watcher::Result<Event<K>>> + Send,
    metrics: Arc<Metrics>,
    call: Call,
) -> impl Stream<Item = News<K>> {
    let stream = stream.default_backoff().inspect_err(move |error| watch::failed(&metrics, call, error));
    stream.filter_map(async |event| {
        Some(match event {
            Ok(Event::Init) => News::Begin,
            Ok(Event::InitApply(object) | Event::Apply(object)) => News::Here(object),
            Ok(Event::Delete(object)) => News::Gone(object),
            Ok(Event::InitDone) => News::End,
            Err(
                watcher::Error::InitialListFailed(kube::Error::Api(status))
                | watcher::Error::WatchStartFailed(kube::Error::Api(status)),
            ) if status.code == 404 => News::Unserved,
            Err(_) => return None,
        })
    })
}

impl Source {
    /// Whether all there is has been listed. A kind of others that has a definition and is not served has no objects
    /// that could be waited for; it is asked for again.
    fn is_complete<K>(self, news: &News<K>) -> bool {
        use Kind::{VirtualMachine, VirtualMachineInstance};
        let of_others =
            matches!(self, Self::Attachments | Self::Users(VirtualMachine | VirtualMachineInstance));
        matches!(news, News::End) || of_others && matches!(news, News::Unserved)
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_kind_of_others_that_is_not_served_holds_nobody_up() {
        let failure = || {
            let status = Status::failure("the server could not find it", "NotFound").with_code(404);
            Err(watcher::Error::InitialListFailed(kube::Error::Api(Box::new(status))))
        };
        let forbidden = Status::failure("no", "Forbidden").with_code(403);
        let forbidden = Err(watcher::Error::InitialListFailed(kube::Error::Api(Box::new(forbidden))));
        let events = [forbidden, failure(), Ok(Event::Init), Ok(Event::InitDone), failure()];
        let stream = futures::stream::iter(events).boxed();
        let told: Vec<News<PartialObjectMeta<Pod>>> =
            news(stream, Arc::default(), Call::WatchUsers).collect().await;
        let complete = |source: Source| told.iter().map(|one| source.is_complete(one)).collect::<Vec<_>>();
        for source in [Source::Attachments, Source::Users(Kind::VirtualMachine)] {
            assert_eq!(complete(source), [true, false, true, true]);
        }
        for source in [Source::Nodes, Source::Users(Kind::Pod)] {
            assert_eq!(complete(source), [false, false, true, false]);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn users_of_a_kind_that_is_served_no_more_are_forgotten_and_those_of_others_kept() {
        let missing = || {
            let status = Status::failure("the server could not find it", "NotFound").with_code(404);
            kube::Error::Api(Box::new(status))
        };
        let user = || {
            let object = serde_json::json!({"metadata": {
                "namespace": "ns", "name": "x", "annotations": {"k8s.v1.cni.cncf.io/networks": "blue"},
            }});
            serde_json::from_value::<PartialObjectMeta<Pod>>(object).unwrap()
        };
        let failures = [watcher::Error::InitialListFailed, watcher::Error::WatchStartFailed];
        for (kind, left) in [(Kind::VirtualMachine, 0), (Kind::VirtualMachineInstance, 0), (Kind::Pod, 1)] {
            for failure in failures {
                let client = Client::new(
                    tower::service_fn(async |_: axum::http::Request<kube::client::Body>| {
                        std::future::pending::<Result<axum::http::Response<kube::client::Body>, kube::Error>>(
                        )
                        .await
                    }),
                    "ns",
                );
                let follower = Follower { client, cluster: Cluster::new(), metrics: Arc::default() };
                let begin = [Err(failure(missing())), Ok(Event::Init)];
                let end = [Ok(Event::InitApply(user())), Ok(Event::InitDone), Err(failure(missing()))];
                let events = futures::stream::iter(begin.into_iter().chain(end));
                let stream = events.chain(futures::stream::pending()).boxed();
                let stream = news(stream, Arc::default(), Call::WatchUsers);
                let index = follower.index(kind, stream, |it| object::pod(&it.metadata));
                let ended = tokio::time::timeout(std::time::Duration::from_mins(1), index).await;
                assert_eq!(ended.is_ok(), left == 0, "{kind:?}: it is listed anew");
                assert_eq!(follower.cluster.world().users.len(), left, "{kind:?}");
            }
        }
    }
}
