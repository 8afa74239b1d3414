//! The sandboxes of this node's pods, and their network namespaces.
//!
//! The container runtime is asked for all sandboxes at once, and concurrent callers share the answer. A list stays valid
//! for [`LIST_MAX_AGE`], until a namespace file appears or vanishes ([`NamespaceWatch`]), or until it lacks what is looked
//! for. The namespace of a sandbox never changes, so it is asked for once.

mod watch;

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    os::{fd::OwnedFd, unix::fs::OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use nix::{
    fcntl::OFlag,
    sys::statfs::{NSFS_MAGIC, fstatfs},
};
use plan::hotplug::own_network_stack;
use tokio::time::Instant;
pub use watch::{NamespaceEvent, NamespaceWatch};
use wire::cri::{SandboxInfo, SandboxNetwork};

use crate::{
    cri::{self, ContainerRuntime, Sandbox},
    host_mounts::HostMounts,
};

/// How long a list of sandboxes is used again, unless it is invalidated earlier.
const LIST_MAX_AGE: Duration = Duration::from_secs(1);

/// Finds the sandboxes of pods. Clones share the cache.
#[derive(Clone)]
pub struct SandboxLocator(Arc<LocatorState>);

struct LocatorState {
    runtime: ContainerRuntime,
    host: HostMounts,
    /// Held while the runtime lists its sandboxes: one list at a time.
    listing: tokio::sync::Mutex<()>,
    cache: Mutex<LocatorCache>,
}

#[derive(Default)]
struct LocatorCache {
    /// Counts the invalidations.
    generation: u64,
    listed: Option<Listed>,
    /// By sandbox ID.
    networks: BTreeMap<String, SandboxFacts>,
}

/// The network of a sandbox, and its runtime if that has a network stack of its own.
type SandboxFacts = (PodNetwork, Option<String>);

/// The last answer of the runtime.
#[derive(Clone)]
struct Listed {
    /// When the runtime was asked.
    started: Instant,
    generation: u64,
    result: Result<Arc<SandboxList>, Arc<cri::Error>>,
}

/// All sandboxes of this node, also those that have stopped and are not yet removed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SandboxList(Vec<Sandbox>);

/// The sandbox in which a pod runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodSandbox {
    /// The container ID of CNI.
    pub id: String,
    /// The namespace and name of the pod, as the runtime knows them.
    pub pod_namespace: String,
    pub pod_name: String,
    pub attempt: u32,
    pub network: PodNetwork,
    /// The runtime, if it has a network stack of its own.
    pub own_network_stack: Option<String>,
}

/// The network namespace of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodNetwork {
    /// A namespace with this path on the host, as the runtime writes it: CNI_NETNS.
    Namespace(String),
    /// The namespace of the host.
    Host,
    /// The runtime has removed the namespace, or has not made it yet.
    Unavailable,
}

/// Why a sandbox could not be looked up. Look again later.
#[derive(Debug, Clone, thiserror::Error)]
pub enum LocateError {
    #[error("list the sandboxes of the container runtime")]
    List(#[source] Arc<cri::Error>),
    #[error("find the network namespace of sandbox {id}")]
    Network { id: String, source: Arc<cri::Error> },
}

impl SandboxList {
    /// The sandbox in which a pod runs: of those that are ready, the one with the highest attempt. `uid` is the UID by
    /// which the runtime knows the pod.
    pub fn running(&self, uid: &str) -> Option<&Sandbox> {
        let of_pod = self.0.iter().filter(|sandbox| sandbox.ready && sandbox.pod_uid == uid);
        of_pod.max_by_key(|sandbox| sandbox.attempt)
    }

    /// The IDs of the sandboxes that run. The runtime does not list one that is being created.
    pub fn running_ids(&self) -> BTreeSet<String> {
        self.0.iter().filter(|sandbox| sandbox.ready).map(|sandbox| sandbox.id.clone()).collect()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Sandbox> {
        self.0.iter()
    }
}

impl SandboxLocator {
    pub fn new(runtime: ContainerRuntime, host: HostMounts) -> Self {
        let (listing, cache) = (tokio::sync::Mutex::default(), Mutex::default());
        Self(Arc::new(LocatorState { runtime, host, listing, cache }))
    }

    /// Discards the cached list: sandboxes have come or gone.
    pub fn invalidate(&self) {
        self.cache().generation += 1;
    }

    /// The sandboxes as the runtime lists them now. Concurrent callers share a list.
    pub async fn list(&self) -> Result<Arc<SandboxList>, LocateError> {
        let requested = Instant::now();
        let _turn = self.0.listing.lock().await;
        // Another caller listed while this one waited.
        let shared = self.cache().listed.clone().filter(|listed| listed.started >= requested);
        let result = match shared {
            Some(listed) => listed.result,
            None => self.request_list().await,
        };
        result.map_err(LocateError::List)
    }

    /// The sandbox in which a pod runs; None if it does not run. `uid` is the UID by which the runtime knows the pod.
    pub async fn locate(&self, uid: &str) -> Result<Option<PodSandbox>, LocateError> {
        let cached = self.cached().and_then(|list| list.running(uid).cloned());
        let sandbox = match cached {
            Some(sandbox) => Some(sandbox),
            None => self.list().await?.running(uid).cloned(),
        };
        let Some(Sandbox { id, pod_namespace, pod_name, attempt, .. }) = sandbox else { return Ok(None) };
        let network = self.network(&id).await?;
        Ok(network.map(|(network, own_network_stack)| PodSandbox {
            id,
            pod_namespace,
            pod_name,
            attempt,
            network,
            own_network_stack,
        }))
    }

    /// Opens a namespace by its path on the host. An error of the kind NotFound means that the namespace is gone.
    pub async fn open(&self, path: &str) -> io::Result<OwnedFd> {
        let path = PathBuf::from(path);
        self.0.host.run(move || open_namespace(&path)).await?
    }

    /// The network of a sandbox; None if the sandbox does not exist any more.
    async fn network(&self, id: &str) -> Result<Option<SandboxFacts>, LocateError> {
        if let Some(known) = self.cache().networks.get(id) {
            return Ok(Some(known.clone()));
        }
        let info = self.0.runtime.sandbox_info(id).await.map_err(|source| {
            let (id, source) = (id.to_owned(), Arc::new(source));
            LocateError::Network { id, source }
        })?;
        let Some(SandboxInfo { pid, network, runtime_type, runtime_handler }) = info else {
            self.invalidate();
            return Ok(None);
        };
        let (network, constant) = match (network, pid) {
            (SandboxNetwork::Path(path), _) => (PodNetwork::Namespace(path), true),
            (SandboxNetwork::Host, _) => (PodNetwork::Host, true),
            // The number may be of another process later.
            (SandboxNetwork::OfProcess, Some(pid)) => {
                (PodNetwork::Namespace(format!("/proc/{pid}/ns/net")), false)
            }
            (SandboxNetwork::OfProcess, None) | (SandboxNetwork::Closed | SandboxNetwork::Unknown, _) => {
                (PodNetwork::Unavailable, false)
            }
        };
        let found = (network, own_network_stack(runtime_type.as_deref(), runtime_handler.as_deref()));
        if constant {
            self.cache().networks.insert(id.to_owned(), found.clone());
        }
        Ok(Some(found))
    }

    async fn request_list(&self) -> Result<Arc<SandboxList>, Arc<cri::Error>> {
        let (started, generation) = (Instant::now(), self.cache().generation);
        let result = self.0.runtime.sandboxes().await;
        let result = result.map(|sandboxes| Arc::new(SandboxList(sandboxes))).map_err(Arc::new);
        let mut cache = self.cache();
        if let Ok(list) = &result {
            let ids: BTreeSet<&str> = list.iter().map(|sandbox| sandbox.id.as_str()).collect();
            cache.networks.retain(|id, _| ids.contains(id.as_str()));
        }
        cache.listed = Some(Listed { started, generation, result: result.clone() });
        result
    }

    /// The last list, if it is still valid.
    fn cached(&self) -> Option<Arc<SandboxList>> {
        let cache = self.cache();
        let Listed { started, generation, result } = cache.listed.as_ref()?;
        let valid = *generation == cache.generation && started.elapsed() < LIST_MAX_AGE;
        result.as_ref().ok().filter(|_| valid).cloned()
    }

    fn cache(&self) -> MutexGuard<'_, LocatorCache> {
        // No change of the cache is left half done by a panic.
        self.0.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Opens a file that is a namespace. While a runtime removes a namespace, its file exists and is an ordinary one.
pub fn open_namespace(path: &Path) -> io::Result<OwnedFd> {
    let flags = (OFlag::O_CLOEXEC | OFlag::O_NONBLOCK).bits();
    let file = std::fs::OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    if fstatfs(&file)?.filesystem_type() != NSFS_MAGIC {
        let text = format!("{} is not a namespace", path.display());
        return Err(io::Error::new(io::ErrorKind::NotFound, text));
    }
    Ok(OwnedFd::from(file))
}

#[cfg(test)]
mod tests;
