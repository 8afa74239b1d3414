//! Observes the EndpointSlices of a namespace through one watch, so that measurements do not poll.

use std::{
    collections::HashMap,
    pin::pin,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use futures::StreamExt as _;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::{
    Api, Client, ResourceExt as _,
    runtime::{WatchStreamExt as _, watcher},
};
use tokio::{sync::watch, task::JoinSet};

/// What the slices say about a pod.
#[derive(Debug, Clone)]
struct SeenPod {
    slice: String,
    ready: bool,
    /// When `ready` got this value.
    since: Instant,
}

/// The content of all slices of the namespace.
#[derive(Debug, Default)]
struct SeenSlices {
    pods: HashMap<String, SeenPod>,
    /// The pods of each slice.
    slices: HashMap<String, Vec<String>>,
    /// How many pods are ready.
    ready: usize,
    last_event: Option<Instant>,
}

/// The observed endpoints of a namespace, by pod.
pub struct SliceWatch {
    seen: watch::Receiver<SeenSlices>,
    /// Ends with this value.
    _task: JoinSet<()>,
}

impl SliceWatch {
    pub fn start(client: Client, namespace: &str) -> Self {
        let (sender, seen) = watch::channel(SeenSlices::default());
        let api: Api<EndpointSlice> = Api::namespaced(client, namespace);
        let events = watcher(api, watcher::Config::default()).default_backoff();
        let mut task = JoinSet::new();
        task.spawn(async move {
            let mut events = pin!(events);
            while let Some(event) = events.next().await {
                let now = Instant::now();
                match event {
                    Ok(watcher::Event::Apply(slice) | watcher::Event::InitApply(slice)) => {
                        sender.send_modify(|seen| seen.apply(&slice, now));
                    }
                    Ok(watcher::Event::Delete(slice)) => {
                        sender.send_modify(|seen| seen.remove(&slice.name_any(), now));
                    }
                    Ok(watcher::Event::Init | watcher::Event::InitDone) | Err(_) => {}
                }
            }
        });
        Self { seen, _task: task }
    }

    /// Waits until a pod is in a slice with this readiness; returns when that was seen.
    pub async fn wait_pod(&self, pod: &str, ready: bool, timeout: Duration) -> Result<Instant> {
        let what = format!("pod {pod} to be {}", if ready { "ready" } else { "unready" });
        self.wait(timeout, &what, |seen| seen.pods.get(pod).is_some_and(|one| one.ready == ready)).await?;
        let seen = self.seen.borrow();
        seen.pods.get(pod).map(|one| one.since).context("the pod left its slice")
    }

    /// Waits until the slices have exactly this many pods, and this many ready ones.
    pub async fn wait_counts(&self, total: usize, ready: usize, timeout: Duration) -> Result<()> {
        let what = format!("{total} endpoints, {ready} of them ready");
        self.wait(timeout, &what, |seen| seen.pods.len() == total && seen.ready == ready).await
    }

    /// Waits until no event came for a while; returns when the last one came.
    pub async fn wait_quiet(&self, pause: Duration, timeout: Duration) -> Result<Option<Instant>> {
        let start = Instant::now();
        let mut seen = self.seen.clone();
        while start.elapsed() < timeout {
            seen.mark_unchanged();
            if tokio::time::timeout(pause, seen.changed()).await.is_err() {
                return Ok(self.seen.borrow().last_event);
            }
        }
        anyhow::bail!("slices still change after {timeout:?}")
    }

    async fn wait(&self, timeout: Duration, what: &str, met: impl Fn(&SeenSlices) -> bool) -> Result<()> {
        let mut seen = self.seen.clone();
        let found = tokio::time::timeout(timeout, seen.wait_for(met)).await.map(|found| found.map(drop));
        let count = || {
            let seen = self.seen.borrow();
            format!(
                "{what}: waited {timeout:?}; slices have {} endpoints, {} ready",
                seen.pods.len(),
                seen.ready
            )
        };
        found.with_context(count)?.context("the watch of slices ended")
    }
}

impl SeenSlices {
    fn apply(&mut self, slice: &EndpointSlice, now: Instant) {
        let name = slice.name_any();
        let mut pods = Vec::with_capacity(slice.endpoints.len());
        for endpoint in &slice.endpoints {
            let Some(pod) = endpoint.target_ref.as_ref().and_then(|target| target.name.clone()) else {
                continue;
            };
            let ready = endpoint.conditions.as_ref().and_then(|all| all.ready).unwrap_or(true);
            self.set(&pod, &name, ready, now);
            pods.push(pod);
        }
        let before = self.slices.insert(name.clone(), pods).unwrap_or_default();
        let now_in_slice: std::collections::HashSet<&String> = self.slices[&name].iter().collect();
        let gone: Vec<String> = before.into_iter().filter(|pod| !now_in_slice.contains(pod)).collect();
        self.forget(&gone, &name);
        self.last_event = Some(now);
    }

    fn remove(&mut self, slice: &str, now: Instant) {
        let pods = self.slices.remove(slice).unwrap_or_default();
        self.forget(&pods, slice);
        self.last_event = Some(now);
    }

    fn set(&mut self, pod: &str, slice: &str, ready: bool, now: Instant) {
        if let Some(known) = self.pods.get_mut(pod) {
            slice.clone_into(&mut known.slice);
            if known.ready != ready {
                (known.ready, known.since) = (ready, now);
                self.ready = if ready { self.ready + 1 } else { self.ready - 1 };
            }
            return;
        }
        self.ready += usize::from(ready);
        self.pods.insert(pod.to_owned(), SeenPod { slice: slice.to_owned(), ready, since: now });
    }

    /// Forgets pods that left a slice, unless another slice has them.
    fn forget(&mut self, pods: &[String], slice: &str) {
        for pod in pods {
            if self.pods.get(pod).is_some_and(|one| one.slice == slice)
                && let Some(one) = self.pods.remove(pod)
            {
                self.ready -= usize::from(one.ready);
            }
        }
    }
}
