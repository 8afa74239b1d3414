//! Hot-plug: attaches and detaches interfaces of the running pods of this node.
//!
//! A [`Controller`] wakes one worker per pod. The worker observes the pod, lets `plan::hotplug` decide, applies one step,
//! and starts again.

mod apply;
mod config;
mod controller;
mod events;
mod forget;
mod journal;
mod metrics;
mod multus_cache;
mod multus_watch;
pub mod nads;
mod namespaces;
mod observe;
mod peers;
mod pod_namespace;
mod pod_status;
mod sandboxes;
mod worker;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io,
    path::Path,
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::Duration,
};

use api::ErrorChain;
use client::request::{ApiCall, DEFAULT_TIMEOUT};
use kube::Client;
use link::NamespaceLinkMonitor;
use plan::hotplug::{MultusConfig, PlugMode};
use tokio::{
    sync::{Notify, watch},
    task::JoinSet,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

pub use self::{
    config::{ConfigError, HotplugArgs, HotplugMode, HotplugSettings, parse_plugin_timeout},
    forget::RecordDropper,
    journal::{AttachmentJournal, Error as JournalError},
    metrics::Metrics,
};
use self::{
    config::{MultusConfigReader, NodeSources},
    controller::Controller,
    events::PodEvents,
    multus_cache::MultusCacheReader,
    nads::Nads,
    namespaces::WatchedNamespaces,
    pod_namespace::PodNamespaces,
    pod_status::PodStatusWriter,
    sandboxes::{LocateError, NamespaceEvent, NamespaceWatch, SandboxLocator},
};
use crate::{
    Error,
    cri::ContainerRuntime,
    executor::{self, Executor, ExecutorConfig},
    health::{Component, Health, HealthChange},
    host_mounts::HostMounts,
    pods::{OwnPod, OwnPods},
    repairs::Repairs,
};

/// What workers share.
struct Deps {
    pods: OwnPods,
    nads: Nads,
    locator: SandboxLocator,
    namespaces: PodNamespaces,
    host: HostMounts,
    /// None while the kernel refuses to watch directories.
    namespace_watch: OnceLock<NamespaceWatch>,
    next_namespace_poll: Mutex<Option<Instant>>,
    monitor: Arc<NamespaceLinkMonitor>,
    watched: WatchedNamespaces,
    recorded: MultusCacheReader,
    multus: MultusConfigReader,
    settings: HotplugSettings,
    writer: PodStatusWriter,
    executor: Executor,
    journal: AttachmentJournal,
    events: PodEvents,
    metrics: Metrics,
    health: Arc<Health>,
    /// The boot ID of the node.
    boot: String,
    mode: watch::Receiver<PlugMode>,
    /// Records were dropped for an administrator.
    dropped: Arc<Notify>,
    /// The UIDs at the API server of the pods whose annotation names a UID of the container runtime. They differ for static
    /// pods, and any user can write such an annotation.
    mirror_pods: Mutex<HashMap<String, BTreeSet<String>>>,
    /// Namespace and name of the pod that has such a UID, as the container runtime reports them.
    runtime_pods: Mutex<HashMap<String, (String, String)>>,
    /// The pods by the path of the namespace of their sandbox.
    sandbox_owners: Mutex<BTreeMap<String, String>>,
    problems: Mutex<BTreeMap<Problem, String>>,
    repairs: Repairs,
}

/// How often namespaces are checked while their directories cannot be watched.
const NAMESPACE_POLL: Duration = Duration::from_secs(10);

/// What can be wrong with hot-plug as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Problem {
    Journal,
    Runtime,
    NamespaceWatch,
    Multus,
}

impl Deps {
    /// A pod, by the UID that the container runtime uses.
    ///
    /// A pod with this UID at the API server comes before a mirror pod whose annotation names it. Of several mirror pods that
    /// one counts whose namespace and name the container runtime reports.
    fn pod(&self, runtime_uid: &str) -> Option<Arc<OwnPod>> {
        if let Some(pod) = self.pods.get(runtime_uid) {
            return (pod.runtime_uid() == runtime_uid).then_some(pod);
        }
        let mirror_pods = lock(&self.mirror_pods).get(runtime_uid).cloned().unwrap_or_default();
        let pods = mirror_pods.iter().filter_map(|uid| self.pods.get(uid));
        let mut pods: Vec<_> = pods.filter(|pod| pod.runtime_uid() == runtime_uid).collect();
        let reported = lock(&self.runtime_pods).get(runtime_uid).cloned();
        let is_reported = |pod: &Arc<OwnPod>| {
            reported
                .as_ref()
                .is_some_and(|(namespace, name)| (namespace, name) == (&pod.namespace, &pod.name))
        };
        let at = pods.iter().position(is_reported).unwrap_or_default();
        (at < pods.len()).then(|| pods.swap_remove(at))
    }

    /// Whether it is known which pods exist, and what was attached to them.
    fn pods_are_known(&self) -> bool {
        self.pods.is_listed() && self.journal.is_loaded()
    }

    /// Whether a pod that is not known does not exist any more. Without a watch of pods, what ended is seen on the node.
    fn knows_ends(&self) -> bool {
        self.settings.mode != HotplugMode::On || self.pods_are_known()
    }

    /// Notes that the annotation of a pod names this UID of the runtime.
    fn note_pod(&self, runtime_uid: &str, uid: &str) {
        if runtime_uid != uid {
            lock(&self.mirror_pods).entry(runtime_uid.to_owned()).or_default().insert(uid.to_owned());
        }
    }

    fn forget_pod(&self, runtime_uid: &str, uid: &str) {
        let mut mirror_pods = lock(&self.mirror_pods);
        let Some(uids) = mirror_pods.get_mut(runtime_uid) else { return };
        uids.remove(uid);
        if uids.is_empty() {
            mirror_pods.remove(runtime_uid);
            lock(&self.runtime_pods).remove(runtime_uid);
        }
    }

    /// Notes which pod has a UID that annotations of pods name, as the runtime reports it.
    fn note_runtime_pod(&self, runtime_uid: &str, namespace: &str, name: &str) {
        // In the order in which `forget_pod` locks.
        if lock(&self.mirror_pods).contains_key(runtime_uid) {
            let pod = (namespace.to_owned(), name.to_owned());
            lock(&self.runtime_pods).insert(runtime_uid.to_owned(), pod);
        }
    }

    /// The pod whose sandbox has this namespace.
    fn sandbox_owner(&self, netns: &str) -> Option<String> {
        lock(&self.sandbox_owners).get(netns).cloned()
    }

    /// Replaces the namespace of a pod's sandbox.
    fn note_sandbox(&self, runtime_uid: &str, netns: Option<&str>) {
        let mut owners = lock(&self.sandbox_owners);
        owners.retain(|path, uid| uid != runtime_uid || Some(path.as_str()) == netns);
        if let Some(netns) = netns {
            owners.insert(netns.to_owned(), runtime_uid.to_owned());
        }
    }

    /// The next change of namespace files. Cancel safe.
    async fn next_namespace_event(&self) -> NamespaceEvent {
        if let Some(watch) = self.namespace_watch.get() {
            return watch.next().await;
        }
        // The deadline outlives a caller that is cancelled.
        let due = *lock(&self.next_namespace_poll).get_or_insert_with(|| Instant::now() + NAMESPACE_POLL);
        sleep_until(due).await;
        *lock(&self.next_namespace_poll) = None;
        self.open_namespace_watch();
        NamespaceEvent::CheckAll
    }

    /// Starts to watch the directories of namespaces. The limit of inotify instances is one of the whole node, and other
    /// programs may have used it up.
    fn open_namespace_watch(&self) {
        let opened = NamespaceWatch::new(self.host.clone());
        let problem = opened.as_ref().err().map(|error| {
            format!(
                "the directories of network namespaces cannot be watched, so namespaces are checked every {} s: {error}; \
                 raise fs.inotify.max_user_instances on the node",
                NAMESPACE_POLL.as_secs()
            )
        });
        if let Ok(watch) = opened {
            // Only the controller opens it.
            let _ = self.namespace_watch.set(watch);
        }
        self.report(Problem::NamespaceWatch, problem);
    }

    fn report_runtime(&self, error: Option<&LocateError>) {
        let problem =
            error.map(|error| format!("interfaces of pods are not attached: {}", ErrorChain(error)));
        self.report(Problem::Runtime, problem);
    }

    /// Replaces a problem in health.
    fn report(&self, kind: Problem, problem: Option<String>) {
        let mut problems = lock(&self.problems);
        match problem {
            Some(problem) => problems.insert(kind, problem),
            None => problems.remove(&kind),
        };
        let text: Vec<&str> = problems.values().map(String::as_str).collect();
        if text.is_empty() {
            if self.health.ok(Component::Hotplug) == HealthChange::Changed {
                info!("hot-plug works again");
            }
        } else if self.health.fail(Component::Hotplug, text.join("; ")) == HealthChange::Changed {
            warn!(problem = text.join("; "), "hot-plug has a problem; retrying");
        }
    }
}

/// Nothing that holds one of these locks can panic.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What hot-plug needs of the daemon.
pub struct HotplugConfig<'a> {
    pub client: Client,
    pub node: &'a str,
    pub pods: OwnPods,
    pub settings: HotplugSettings,
    pub runtime: ContainerRuntime,
    pub journal: AttachmentJournal,
    pub boot: String,
    /// The mount namespace of the host.
    pub mount_namespace: &'a Path,
    pub health: Arc<Health>,
    pub metrics: Metrics,
    /// The plugin directories and the timeout come from `settings`.
    pub executor: ExecutorConfig,
    pub executor_metrics: executor::Metrics,
    /// Released addresses of the node are signalled here.
    pub repairs: Repairs,
}

/// Why hot-plug cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("enter the mount namespace of the host")]
    HostMounts(#[source] io::Error),
    #[error("watch the links of pods")]
    Links(#[source] link::Error),
}

/// Starts the tasks of hot-plug. Must be called in a tokio runtime.
pub fn start(
    config: HotplugConfig<'_>,
    tasks: &mut JoinSet<Result<(), Error>>,
    stop: &CancellationToken,
) -> Result<RecordDropper, StartError> {
    let HotplugConfig {
        client, node, pods, settings, runtime, journal, boot, health, metrics, repairs, ..
    } = config;
    let host = HostMounts::open(config.mount_namespace).map_err(StartError::HostMounts)?;
    let monitor = Arc::new(NamespaceLinkMonitor::open().map_err(StartError::Links)?);
    let sources = NodeSources { runtime: runtime.clone(), pods: pods.clone(), dir: journal.dir().to_owned() };
    let multus = MultusConfigReader::new(host.clone(), sources);
    // Each call of a plugin sets them anew.
    let plugin_dirs = settings.plugin_dirs(&MultusConfig::default());
    let own_results = config.executor.cache_dir.clone();
    let executor_config = ExecutorConfig { plugin_dirs, timeout: settings.plugin_timeout, ..config.executor };
    let executor = Executor::new(host.clone(), executor_config, config.executor_metrics);
    let (nads, nad_watch) =
        nads::nads(client.clone(), host.clone(), multus.clone(), settings.isolation.clone());
    let (events, sender) = PodEvents::new(client.clone(), node);
    let locator = SandboxLocator::new(runtime, host.clone());
    let (mode, mode_receiver) = watch::channel(PlugMode::Off);
    let peers = (settings.mode == HotplugMode::On).then(|| {
        let (watch, state) =
            peers::peers(pods.clone(), settings.peer_namespaces.clone(), node, events.recorder());
        tasks.spawn(watch.run(stop.clone()));
        tasks.spawn(nad_watch.run(stop.clone()));
        state
    });
    let deps = Deps {
        pods,
        nads,
        namespaces: PodNamespaces::new(locator.clone(), Arc::clone(&monitor)),
        locator,
        host: host.clone(),
        namespace_watch: OnceLock::new(),
        next_namespace_poll: Mutex::default(),
        monitor,
        watched: WatchedNamespaces::new(repairs.clone()),
        recorded: MultusCacheReader::new(host, multus.clone(), own_results, boot.clone()),
        multus,
        settings,
        writer: PodStatusWriter::new(client, ApiCall::new(DEFAULT_TIMEOUT, || ())),
        executor,
        journal,
        events,
        metrics,
        health,
        boot,
        mode: mode_receiver,
        dropped: Arc::default(),
        mirror_pods: Mutex::default(),
        runtime_pods: Mutex::default(),
        sandbox_owners: Mutex::default(),
        problems: Mutex::default(),
        repairs,
    };
    deps.open_namespace_watch();
    tasks.spawn(sender.run(stop.clone()));
    let deps = Arc::new(deps);
    if deps.settings.mode == HotplugMode::On {
        tasks.spawn(multus_watch::run(Arc::clone(&deps), node.to_owned(), stop.clone()));
    }
    let dropper = RecordDropper {
        journal: deps.journal.clone(),
        locator: deps.locator.clone(),
        recorded: deps.recorded.clone(),
        dropped: Arc::clone(&deps.dropped),
    };
    tasks.spawn(Controller::new(deps, peers, mode).run(stop.clone()));
    Ok(dropper)
}

#[cfg(test)]
mod tests;
