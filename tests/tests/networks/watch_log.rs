//! What happened in the cluster, in the order in which the API server took it in: versions of one store can be compared.

use std::{convert::Infallible, time::Duration};

use anyhow::{Context as _, Result, bail};
use futures::{StreamExt as _, TryFutureExt as _};
use kube::{
    ResourceExt as _,
    api::{DynamicObject, ListParams, WatchEvent, WatchParams},
    core::ApiResource,
};
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::{
    SOON,
    cluster::{self, Cluster},
};

/// What is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Network,
    Attachment,
    Pod,
}

/// What became of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Made,
    /// Changed; whether it bears the finalizer that keeps nodes from undoing.
    Changed {
        held: bool,
    },
    Gone,
}

#[derive(Clone, Debug)]
pub struct Change {
    pub kind: Kind,
    pub name: String,
    pub fate: Fate,
    pub version: u64,
}

pub struct History {
    cluster: Cluster,
    from: [String; 3],
    seen: watch::Sender<Vec<Change>>,
}

fn resource(kind: Kind) -> ApiResource {
    match kind {
        Kind::Network => cluster::networks(),
        Kind::Attachment => cluster::nads(),
        Kind::Pod => cluster::resource("", "v1", "Pod", "pods"),
    }
}

impl History {
    /// Begins now; what is in it comes by [`Self::record`].
    pub async fn begin(cluster: &Cluster) -> Result<Self> {
        let mut from = [const { String::new() }; 3];
        for (kind, from) in [Kind::Network, Kind::Attachment, Kind::Pod].into_iter().zip(&mut from) {
            let listed = cluster.api(&resource(kind), None).list(&ListParams::default().limit(1)).await?;
            *from = listed.metadata.resource_version.context("a version")?;
        }
        Ok(Self { cluster: cluster.clone(), from, seen: watch::Sender::new(Vec::new()) })
    }

    /// Watches until it is dropped, while something else goes on.
    pub async fn beside<T>(&self, other: impl Future<Output = Result<T>>) -> Result<T> {
        let [network, attachment, pod] = &self.from;
        let all = futures::future::try_join3(
            self.record(Kind::Network, network.clone()),
            self.record(Kind::Attachment, attachment.clone()),
            self.record(Kind::Pod, pod.clone()),
        );
        tokio::select! {
            ended = all.map_ok(|(never, ..)| match never {}) => ended,
            done = other => done,
        }
    }

    async fn record(&self, kind: Kind, mut version: String) -> Result<Infallible> {
        let namespace = (kind != Kind::Network).then_some(self.cluster.namespace.as_str());
        let api = self.cluster.api(&resource(kind), namespace);
        // The API server ends every watch after a while.
        loop {
            let mut events = api.watch(&WatchParams::default(), &version).await?.boxed();
            while let Some(event) = events.next().await {
                let (object, fate): (DynamicObject, fn(&Value) -> Fate) = match event? {
                    WatchEvent::Added(object) => (object, |_| Fate::Made),
                    WatchEvent::Modified(object) => (object, |it| Fate::Changed { held: held(it) }),
                    WatchEvent::Deleted(object) => (object, |_| Fate::Gone),
                    WatchEvent::Bookmark(_) => continue,
                    WatchEvent::Error(status) => bail!("the watch ended: {status:?}"),
                };
                version = object.resource_version().context("a version")?;
                let fate = fate(&json!(object.finalizers()));
                let change = Change { kind, name: object.name_any(), fate, version: version.parse()? };
                self.seen.send_modify(|all| all.push(change));
            }
        }
    }

    /// Waits for a change.
    pub async fn saw(&self, kind: Kind, name: &str, fate: Fate) -> Result<u64> {
        self.saw_within(SOON, kind, name, fate).await
    }

    pub async fn saw_within(&self, limit: Duration, kind: Kind, name: &str, fate: Fate) -> Result<u64> {
        let mut seen = self.seen.subscribe();
        let found = || self.versions(kind, name, fate).first().copied();
        let waited = tokio::time::timeout(limit, seen.wait_for(|_| found().is_some())).await;
        waited.with_context(|| format!("{kind:?} {name} was not {fate:?} in {limit:?}"))??;
        found().context("it was seen")
    }

    /// The versions at which this happened.
    pub fn versions(&self, kind: Kind, name: &str, fate: Fate) -> Vec<u64> {
        let seen = self.seen.borrow();
        let same = seen.iter().filter(|it| it.kind == kind && it.name == name && it.fate == fate);
        same.map(|it| it.version).collect()
    }
}

fn held(finalizers: &Value) -> bool {
    finalizers.as_array().is_some_and(|all| all.iter().any(|it| it == "patchbay.dev/users"))
}
