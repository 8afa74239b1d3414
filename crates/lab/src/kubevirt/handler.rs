//! The task that stands in for the virt-handlers of all nodes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    time::Duration,
};

use anyhow::{Context as _, Result};
use futures::{StreamExt as _, pin_mut};
use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DynamicObject, PostParams},
    runtime::{WatchStreamExt as _, watcher},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use tokio::{sync::watch, task::JoinSet};

use super::{
    api::watched_instances,
    guest::{MigrationOutcome, next_step},
    launcher_pod::{LauncherPod, LauncherState},
};
use crate::{lab::Lab, progress::print_progress};

/// How soon a failed write is repeated.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Namespace and name of an instance.
type InstanceKey = (String, String);

/// Stands in for the virt-handlers of all nodes as long as the value lives.
///
/// It writes what virt-handler writes and virt-controller or a user reads: phase, node, interfaces, the condition
/// LiveMigratable, and the state of migrations with their abort and failure. It ends the launcher of a guest that is gone.
///
/// It does not imitate: a guest (nothing answers in a launcher pod but its kernel), the wiring between pod interface and
/// guest (no bridge `k6t-…` and no tap; the addresses stay on the pod interface), DHCP, the guest agent and its addresses,
/// the time that a boot, a shutdown or a migration takes, post-copy, pause, volumes and their hot-plug, CPU and memory
/// hot-plug, SR-IOV, dedicated CPUs, SELinux, decentralized migrations, heartbeats of nodes, and events.
pub struct VirtHandler {
    outcome: watch::Sender<MigrationOutcome>,
    /// Ends with this value.
    _task: JoinSet<()>,
}

impl VirtHandler {
    /// Serves the instances of one namespace, or of all.
    pub async fn start(lab: &Lab, namespace: Option<&str>) -> Result<Self> {
        let (outcome, changes) = watch::channel(MigrationOutcome::default());
        let handler = HandlerTask {
            lab: lab.clone(),
            client: lab.client().await?,
            outcome: changes,
            instances: BTreeMap::new(),
            pods: BTreeMap::new(),
            lists: PendingLists { instances: true, pods: true },
            failed: BTreeSet::new(),
        };
        let namespace = namespace.map(str::to_owned);
        let mut task = JoinSet::new();
        task.spawn(handler.run(namespace));
        Ok(Self { outcome, _task: task })
    }

    /// Decides how migrations end from now on, also those that run.
    pub fn set_migrations(&self, outcome: MigrationOutcome) {
        self.outcome.send_replace(outcome);
    }
}

struct HandlerTask {
    lab: Lab,
    client: Client,
    outcome: watch::Receiver<MigrationOutcome>,
    instances: BTreeMap<InstanceKey, Value>,
    /// By UID. Deleted pods stay as long as their instance.
    pods: BTreeMap<String, LauncherPod>,
    lists: PendingLists,
    /// The instances whose last write failed.
    failed: BTreeSet<InstanceKey>,
}

/// The lists that have not been received completely. Until then, a missing pod means nothing.
struct PendingLists {
    instances: bool,
    pods: bool,
}

impl HandlerTask {
    async fn run(mut self, namespace: Option<String>) {
        let namespace = namespace.as_deref();
        let pods: Api<Pod> = match namespace {
            Some(namespace) => Api::namespaced(self.client.clone(), namespace),
            None => Api::all(self.client.clone()),
        };
        let launchers = watcher::Config::default().labels("kubevirt.io=virt-launcher");
        let pods = watcher(pods, launchers).default_backoff();
        let instances = watched_instances(&self.client, namespace);
        let instances = watcher(instances, watcher::Config::default()).default_backoff();
        pin_mut!(pods, instances);
        let mut outcome = self.outcome.clone();
        let mut retry = tokio::time::interval(RETRY_INTERVAL);
        loop {
            let changed: BTreeSet<InstanceKey> = tokio::select! {
                Some(event) = instances.next() => self.instance_event(event),
                Some(event) = pods.next() => self.pod_event(event),
                Ok(()) = outcome.changed() => self.instances.keys().cloned().collect(),
                _ = retry.tick() => std::mem::take(&mut self.failed),
            };
            if self.lists.instances || self.lists.pods {
                continue;
            }
            for key in changed {
                if let Err(e) = self.reconcile(&key).await {
                    print_progress(format!("virt-handler: {}/{}: {e:#}", key.0, key.1));
                    self.failed.insert(key);
                }
            }
        }
    }

    /// Returns the instances to reconcile.
    fn instance_event(
        &mut self,
        event: watcher::Result<watcher::Event<DynamicObject>>,
    ) -> BTreeSet<InstanceKey> {
        match event {
            Ok(watcher::Event::Apply(object) | watcher::Event::InitApply(object)) => {
                let key = (object.namespace().unwrap_or_default(), object.name_any());
                if let Ok(value) = serde_json::to_value(object) {
                    self.instances.insert(key.clone(), value);
                }
                [key].into()
            }
            Ok(watcher::Event::Delete(object)) => {
                let uid = object.uid().unwrap_or_default();
                self.instances.remove(&(object.namespace().unwrap_or_default(), object.name_any()));
                self.pods.retain(|_, pod| pod.instance != uid);
                BTreeSet::new()
            }
            Ok(watcher::Event::InitDone) => {
                self.lists.instances = false;
                self.instances.keys().cloned().collect()
            }
            Ok(watcher::Event::Init) | Err(_) => BTreeSet::new(),
        }
    }

    /// Returns the instances to reconcile.
    fn pod_event(&mut self, event: watcher::Result<watcher::Event<Pod>>) -> BTreeSet<InstanceKey> {
        let (pod, exists) = match event {
            Ok(watcher::Event::Apply(pod) | watcher::Event::InitApply(pod)) => (pod, true),
            Ok(watcher::Event::Delete(pod)) => (pod, false),
            Ok(watcher::Event::InitDone) => {
                self.lists.pods = false;
                return self.instances.keys().cloned().collect();
            }
            Ok(watcher::Event::Init) | Err(_) => return BTreeSet::new(),
        };
        let Some(mut launcher) = LauncherPod::read(&pod) else { return BTreeSet::new() };
        if !exists {
            launcher.state = LauncherState::Deleted;
        }
        let uid = launcher.instance.clone();
        self.pods.insert(launcher.uid.clone(), launcher);
        let of_pod = self.instances.iter().filter(|(_, i)| i["metadata"]["uid"] == uid.as_str());
        of_pod.map(|(key, _)| key.clone()).collect()
    }

    async fn reconcile(&mut self, key: &InstanceKey) -> Result<()> {
        let Some(instance) = self.instances.get(key) else { return Ok(()) };
        let uid = &instance["metadata"]["uid"];
        let pods: Vec<LauncherPod> =
            self.pods.values().filter(|pod| *uid == pod.instance.as_str()).cloned().collect();
        let now = serde_json::to_value(Time(Timestamp::now()))?;
        let outcome = *self.outcome.borrow();
        let step = next_step(instance, &pods, outcome, now.as_str().unwrap_or_default());
        for pod in &step.ended {
            self.lab.signal_guest(pod, Signal::SIGTERM)?;
        }
        let Some(next) = step.instance else { return Ok(()) };
        let object: DynamicObject = serde_json::from_value(next).context("read the instance")?;
        let api = watched_instances(&self.client, Some(&key.0));
        match api.replace(&key.1, &PostParams::default(), &object).await {
            Ok(written) => {
                self.instances.insert(key.clone(), serde_json::to_value(written)?);
                Ok(())
            }
            // The event of that change follows.
            Err(kube::Error::Api(e)) if e.is_conflict() || e.is_not_found() => Ok(()),
            Err(e) => Err(e).context("write the instance"),
        }
    }
}

impl Lab {
    /// Signals the guest of a launcher pod, by the pod's UID: with SIGTERM it shuts down, with SIGKILL it crashes.
    pub fn signal_guest(&self, pod_uid: &str, signal: Signal) -> Result<()> {
        let cgroup = format!("/pod{pod_uid}/");
        for pid in self.processes() {
            // Processes may exit meanwhile.
            let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
            let program = read("cmdline").split('\0').next().unwrap_or_default().to_owned();
            let of_guest = ["/virt-launcher-monitor", "/container-disk"].iter().any(|n| program.ends_with(n));
            if of_guest && read("cgroup").contains(&cgroup) {
                let _ = kill(Pid::from_raw(pid), signal);
            }
        }
        Ok(())
    }
}
