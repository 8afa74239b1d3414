//! The configuration of multus on this node, as far as hot-plug follows it.
//!
//! It is read where multus has it: the file of its plugin in the directory of the container runtime, and that of the running
//! daemon of the thick plugin in the container of the daemon. `plan::hotplug::decide_multus` decides what counts when they are
//! not there: the last configuration is saved, because multus deletes its file when it stops.

mod daemon;
mod files;

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use api::ErrorChain;
pub use files::under;
use files::{FileFacts, config_dirs, read_node, read_regular};
use plan::hotplug::{MultusConfig, MultusFacts, MultusState, decide_multus, mounts_cni_config};
use tokio::{sync::Notify, task::spawn_blocking, time::Instant};
use tracing::{debug, info, warn};
use wire::cri::CniDirs;

use crate::{
    cri::ContainerRuntime,
    host_mounts::HostMounts,
    pods::{OwnPods, PodPhase},
    store::atomic,
};

/// The file with the last configuration of multus.
const LAST_CONFIG_FILE: &str = "multus.json";
/// How long the configuration is used before its files are checked for changes.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// How long the directories of the container runtime are used before it is asked again.
const RUNTIME_INTERVAL: Duration = Duration::from_secs(60);

/// Reads the configuration of multus, and again when it may have changed. Clones share it.
#[derive(Clone)]
pub struct MultusConfigReader(Arc<ReaderState>);

struct ReaderState {
    host: HostMounts,
    /// `/`; another directory in tests.
    root: PathBuf,
    /// What is read besides files; None in tests.
    node: Option<NodeSources>,
    cache: Mutex<ReaderCache>,
    changed: Notify,
}

/// What shows whether the node has multus.
pub struct NodeSources {
    pub runtime: ContainerRuntime,
    pub pods: OwnPods,
    /// A directory of the daemon, for the last configuration.
    pub dir: PathBuf,
}

#[derive(Default)]
struct ReaderCache {
    checked: Option<Instant>,
    state: Option<Arc<MultusState>>,
    /// The last configuration of multus.
    last: Option<MultusConfig>,
    /// Whether the file with the last configuration was read.
    loaded: bool,
    /// The directories of the container runtime, and when it named them.
    dirs: Option<(CniDirs, Instant)>,
}

impl MultusConfigReader {
    pub fn new(host: HostMounts, node: NodeSources) -> Self {
        Self::with(host, PathBuf::from("/"), Some(node))
    }

    /// Reads the files of a node whose root is this directory. Its runtime names no directories, and it has no pods.
    #[cfg(test)]
    pub fn at(host: HostMounts, root: PathBuf) -> Self {
        Self::with(host, root, None)
    }

    fn with(host: HostMounts, root: PathBuf, node: Option<NodeSources>) -> Self {
        Self(Arc::new(ReaderState { host, root, node, cache: Mutex::default(), changed: Notify::new() }))
    }

    /// What counts as the configuration now.
    pub async fn read(&self) -> Arc<MultusState> {
        {
            let mut cache = self.cache();
            let current = cache.checked.is_some_and(|at| at.elapsed() < CHECK_INTERVAL);
            if let Some(state) = cache.state.as_ref().filter(|_| current) {
                return Arc::clone(state);
            }
            // One of several concurrent callers checks.
            cache.checked = Some(Instant::now());
        }
        self.load_last_config().await;
        let dirs = self.runtime_dirs().await;
        let (unchecked, pod) = self.check_pods(dirs.as_ref());
        let (root, last) = (self.0.root.clone(), self.cache().last.clone());
        let read = match dirs {
            Some(dirs) => self.0.host.run(move || read_node(&root, &dirs, last.as_ref())).await,
            // A file in a directory that the runtime does not use may be left over, and not isolate.
            None => Ok(FileFacts::default()),
        };
        let facts = match read {
            Ok(files) => MultusFacts {
                config: files.config,
                unreadable: files.unreadable,
                installed: files.installed,
                pod,
                unchecked,
            },
            Err(error) => MultusFacts { unreadable: Some(error.to_string()), pod, ..MultusFacts::default() },
        };
        self.update(facts).await
    }

    /// Waits until [`MultusConfigReader::read`] returns something else. For one consumer. Cancel safe.
    pub async fn changed(&self) {
        self.0.changed.notified().await;
    }

    async fn update(&self, facts: MultusFacts) -> Arc<MultusState> {
        let (state, changed_last) = {
            let mut cache = self.cache();
            let (state, last) = decide_multus(facts, cache.last.as_ref());
            let changed = (cache.last != last).then(|| last.clone());
            cache.last = last;
            let before = cache.state.get_or_insert_with(|| {
                self.0.changed.notify_one();
                Arc::new(state.clone())
            });
            if **before != state {
                info!(isolation = ?state.config.namespace_isolation, problem = state.problem, "the configuration of multus changed");
                *before = Arc::new(state);
                self.0.changed.notify_one();
            }
            (Arc::clone(before), changed)
        };
        if let Some(last) = changed_last {
            self.save_last_config(last).await;
        }
        state
    }

    /// The directories that the container runtime uses; None if it has not said so yet.
    async fn runtime_dirs(&self) -> Option<CniDirs> {
        let Some(node) = &self.0.node else { return Some(CniDirs::default()) };
        let known = self.cache().dirs.clone();
        if let Some((dirs, _)) = known.as_ref().filter(|(_, at)| at.elapsed() < RUNTIME_INTERVAL) {
            return Some(dirs.clone());
        }
        match node.runtime.cni_dirs().await {
            Ok(dirs) => {
                self.cache().dirs = Some((dirs.clone(), Instant::now()));
                Some(dirs)
            }
            Err(error) => {
                debug!(error = %ErrorChain(&error), "cannot read the CNI directories of the container runtime");
                known.map(|(dirs, _)| dirs)
            }
        }
    }

    /// What is not known yet of the node, and a pod that installs or runs multus.
    fn check_pods(&self, dirs: Option<&CniDirs>) -> (Option<&'static str>, Option<String>) {
        let Some(node) = &self.0.node else { return (None, None) };
        let Some(dirs) = dirs else { return (Some("the container runtime does not answer"), None) };
        let Some(pods) = node.pods.snapshot() else {
            return (Some("the pods of the node have not been listed"), None);
        };
        let dirs = config_dirs(dirs);
        let found = pods.values().find(|pod| {
            !matches!(pod.phase, PodPhase::Succeeded | PodPhase::Failed)
                && mounts_cni_config(pod.multus_host_paths.iter().map(Path::new), &dirs)
        });
        (None, found.map(|pod| format!("{}/{}", pod.namespace, pod.name)))
    }

    /// The file with the last configuration.
    fn last_config_file(&self) -> Option<PathBuf> {
        self.0.node.as_ref().map(|node| node.dir.join(LAST_CONFIG_FILE))
    }

    /// Reads the configuration that an earlier run of the daemon saved. What is not readable is not known.
    async fn load_last_config(&self) {
        let Some(path) = self.last_config_file().filter(|_| !self.cache().loaded) else { return };
        let read = spawn_blocking(move || read_regular(&path)).await;
        let last = read.ok().and_then(Result::ok).and_then(|text| serde_json::from_slice(&text).ok());
        let mut cache = self.cache();
        if !std::mem::replace(&mut cache.loaded, true) && cache.last.is_none() {
            cache.last = last;
        }
    }

    /// Writes the configuration for later runs.
    async fn save_last_config(&self, last: Option<MultusConfig>) {
        let Some(path) = self.last_config_file() else { return };
        let written = spawn_blocking(move || match last {
            Some(config) => atomic::replace(&path, path.with_extension("new"), &serde_json::to_vec(&config)?),
            None => atomic::remove(&path).map(|_| ()),
        });
        if let Err(error) = written.await.map_err(io::Error::other).flatten() {
            warn!(%error, "cannot save the last configuration of multus");
        }
    }

    fn cache(&self) -> MutexGuard<'_, ReaderCache> {
        self.0.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
