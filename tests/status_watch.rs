//! Observes the network-status of all pods of a namespace through one watch, so that measurements do not poll.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use futures::{StreamExt as _, pin_mut};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    ResourceExt as _,
    runtime::{WatchStreamExt as _, watcher},
};
use lab::test_namespace::TestNamespace;
use tokio::{sync::watch, task::JoinSet};

use crate::hotplug::statuses;

/// The interfaces in network-status by pod, without those of the default network.
type InterfacesByPod = Arc<BTreeMap<String, BTreeSet<String>>>;

/// The observed status of the pods of a namespace.
pub struct StatusWatch {
    pods: watch::Receiver<InterfacesByPod>,
    /// Ends with this value.
    _task: JoinSet<()>,
}

impl StatusWatch {
    pub fn start(ns: &TestNamespace) -> Self {
        let (sender, pods) = watch::channel(InterfacesByPod::default());
        let events = watcher(ns.pods(), watcher::Config::default()).default_backoff();
        let mut task = JoinSet::new();
        task.spawn(async move {
            let events = events.applied_objects();
            pin_mut!(events);
            while let Some(event) = events.next().await {
                let Ok(pod) = event else { continue };
                let interfaces = interfaces(&pod);
                sender.send_modify(|all| {
                    Arc::make_mut(all).insert(pod.name_any(), interfaces);
                });
            }
        });
        Self { pods, _task: task }
    }

    /// Waits until the status of a pod lists exactly these interfaces; returns when that was seen.
    pub async fn wait(&self, pod: &str, expected: &[&str], limit: Duration) -> Result<Instant> {
        let expected: BTreeSet<String> = expected.iter().map(|&name| name.to_owned()).collect();
        let mut pods = self.pods.clone();
        let seen = pods.wait_for(|all| all.get(pod) == Some(&expected));
        tokio::time::timeout(limit, seen)
            .await
            .with_context(|| format!("pod {pod} does not have {expected:?} after {limit:?}"))?
            .context("the watch of pods ended")?;
        Ok(Instant::now())
    }
}

fn interfaces(pod: &Pod) -> BTreeSet<String> {
    let entries = statuses(pod).unwrap_or_default();
    entries.iter().filter_map(|entry| entry["interface"].as_str().map(str::to_owned)).collect()
}
