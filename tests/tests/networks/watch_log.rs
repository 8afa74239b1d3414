//! Records watch events of networks, NADs and pods. Their resource versions come from one etcd, so they give a total order.

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
    TIMEOUT,
    cluster::{self, TestCluster},
};

/// The recorded kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectKind {
    Network,
    Nad,
    Pod,
}

/// What happened to an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeType {
    Added,
    Modified {
        /// Whether the object has the finalizer that keeps nodes from removing their links.
        users_finalizer: bool,
    },
    Deleted,
}

#[derive(Clone, Debug)]
pub struct ObjectChange {
    pub kind: ObjectKind,
    pub name: String,
    pub change: ChangeType,
    pub version: u64,
}

/// The changes since the start, in order of arrival.
pub struct WatchLog {
    cluster: TestCluster,
    start_versions: [String; 3],
    changes: watch::Sender<Vec<ObjectChange>>,
}

fn resource(kind: ObjectKind) -> ApiResource {
    match kind {
        ObjectKind::Network => cluster::bridge_networks(),
        ObjectKind::Nad => cluster::nads(),
        ObjectKind::Pod => cluster::resource("", "v1", "Pod", "pods"),
    }
}

impl WatchLog {
    /// Takes the current resource versions; [`Self::record_during`] records the changes since then.
    pub async fn start(cluster: &TestCluster) -> Result<Self> {
        let mut start_versions = [const { String::new() }; 3];
        for (kind, version) in
            [ObjectKind::Network, ObjectKind::Nad, ObjectKind::Pod].into_iter().zip(&mut start_versions)
        {
            let listed = cluster.api(&resource(kind), None).list(&ListParams::default().limit(1)).await?;
            *version = listed.metadata.resource_version.context("a resource version")?;
        }
        Ok(Self { cluster: cluster.clone(), start_versions, changes: watch::Sender::new(Vec::new()) })
    }

    /// Records changes while the future runs.
    pub async fn record_during<T>(&self, other: impl Future<Output = Result<T>>) -> Result<T> {
        let [network, nad, pod] = &self.start_versions;
        let all = futures::future::try_join3(
            self.record(ObjectKind::Network, network.clone()),
            self.record(ObjectKind::Nad, nad.clone()),
            self.record(ObjectKind::Pod, pod.clone()),
        );
        tokio::select! {
            ended = all.map_ok(|(never, ..)| match never {}) => ended,
            done = other => done,
        }
    }

    async fn record(&self, kind: ObjectKind, mut version: String) -> Result<Infallible> {
        let namespace = (kind != ObjectKind::Network).then_some(self.cluster.namespace.as_str());
        let api = self.cluster.api(&resource(kind), namespace);
        // The API server ends every watch after some time.
        loop {
            let mut events = api.watch(&WatchParams::default(), &version).await?.boxed();
            while let Some(event) = events.next().await {
                let (object, change): (DynamicObject, fn(&Value) -> ChangeType) = match event? {
                    WatchEvent::Added(object) => (object, |_| ChangeType::Added),
                    WatchEvent::Modified(object) => (object, |finalizers| ChangeType::Modified {
                        users_finalizer: has_users_finalizer(finalizers),
                    }),
                    WatchEvent::Deleted(object) => (object, |_| ChangeType::Deleted),
                    WatchEvent::Bookmark(_) => continue,
                    WatchEvent::Error(status) => bail!("the watch ended: {status:?}"),
                };
                version = object.resource_version().context("a resource version")?;
                let change = change(&json!(object.finalizers()));
                let change =
                    ObjectChange { kind, name: object.name_any(), change, version: version.parse()? };
                self.changes.send_modify(|all| all.push(change));
            }
        }
    }

    /// Waits for a change and returns its resource version.
    pub async fn wait_for(&self, kind: ObjectKind, name: &str, change: ChangeType) -> Result<u64> {
        self.wait_for_within(TIMEOUT, kind, name, change).await
    }

    pub async fn wait_for_within(
        &self,
        limit: Duration,
        kind: ObjectKind,
        name: &str,
        change: ChangeType,
    ) -> Result<u64> {
        let mut changes = self.changes.subscribe();
        let found = || self.versions(kind, name, change).first().copied();
        let waited = tokio::time::timeout(limit, changes.wait_for(|_| found().is_some())).await;
        waited.with_context(|| format!("{kind:?} {name} was not {change:?} within {limit:?}"))??;
        found().context("the change was recorded")
    }

    /// The resource versions of all such changes.
    pub fn versions(&self, kind: ObjectKind, name: &str, change: ChangeType) -> Vec<u64> {
        let changes = self.changes.borrow();
        let matching = changes.iter().filter(|it| it.kind == kind && it.name == name && it.change == change);
        matching.map(|it| it.version).collect()
    }
}

fn has_users_finalizer(finalizers: &Value) -> bool {
    finalizers.as_array().is_some_and(|all| all.iter().any(|it| it == "patchbay.dev/users"))
}
