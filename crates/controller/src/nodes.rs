//! Which Nodes there are: a cache of their metadata.

use futures::TryStreamExt;
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client, ResourceExt,
    core::PartialObjectMeta,
    runtime::{
        WatchStreamExt,
        reflector::{self, ObjectRef, Store, store::Writer},
        watcher::watcher,
    },
};

use crate::{
    metrics::{Call, Metrics},
    watch,
};

/// The Nodes as last seen. Cheap to clone.
#[derive(Clone)]
pub struct Nodes(Store<PartialObjectMeta<Node>>);

/// The other end of [`Nodes`]: what fills it.
pub type Filler = Writer<PartialObjectMeta<Node>>;

impl Nodes {
    pub fn new() -> (Self, Filler) {
        let (store, writer) = reflector::store();
        (Self(store), writer)
    }

    pub fn exists(&self, name: &str) -> bool {
        self.0.get(&ObjectRef::new(name)).is_some()
    }

    /// Resolves once the first list is complete; `false` if it never will be.
    pub async fn synced(&self) -> bool {
        self.0.wait_until_ready().await.is_ok()
    }
}

/// Keeps the cache filled; ends only when it is dropped.
pub async fn follow(client: Client, filler: Filler, metrics: &Metrics) {
    let stream = watcher(Api::<PartialObjectMeta<Node>>::all(client), watch::all())
        .default_backoff()
        .modify(|node| {
            // Nodes carry kilobytes of annotations that no rule here reads.
            node.managed_fields_mut().clear();
            node.annotations_mut().clear();
        })
        .reflect(filler)
        .inspect_err(|error| watch::failed(metrics, Call::WatchNodes, error));
    watch::drain(stream).await;
}
