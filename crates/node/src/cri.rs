//! The client of the node's container runtime (CRI v1): which sandboxes exist.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use api::ErrorChain;
use http::uri::PathAndQuery;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
    time::{Instant, timeout, timeout_at},
};
use tonic::{
    Code, Request, Status,
    client::Grpc,
    transport::{self, Channel, Endpoint},
};
use tonic_prost::ProstCodec;
use wire::cri::{
    self, CniDirs, ListPodSandboxRequest, ListPodSandboxResponse, Message, NamespaceMode, PodSandbox,
    PodSandboxState, PodSandboxStatusRequest, PodSandboxStatusResponse, SandboxInfo, StatusRequest,
    StatusResponse,
};

/// Default sockets of containerd, CRI-O, K3s and RKE2, k0s, MicroK8s, and cri-dockerd.
pub const DEFAULT_SOCKETS: [&str; 6] = [
    "/run/containerd/containerd.sock",
    "/run/crio/crio.sock",
    "/run/k3s/containerd/containerd.sock",
    "/run/k0s/containerd.sock",
    "/var/snap/microk8s/common/run/containerd.sock",
    "/run/cri-dockerd.sock",
];

/// Timeout for connecting to one runtime and listing its sandboxes.
const CRI_TIMEOUT: Duration = Duration::from_secs(10);

/// Timeout for reading the configuration of CRI-O.
const CONFIG_TIMEOUT: Duration = Duration::from_secs(2);

/// Bounds the configuration of CRI-O.
const MAX_CONFIG: u64 = 1024 * 1024;

/// The largest accepted response: a sandbox with long annotations takes tens of kilobytes.
const MAX_RESPONSE: usize = 64 * 1024 * 1024;

/// The sandboxes of this node could not be listed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "--pod-uid is not set, so the daemon cannot tell which container runtime runs it: set it from metadata.uid of the pod"
    )]
    NoPodUid,
    #[error("none of the sockets {} exists: set --runtime-socket to the socket that the kubelet uses", tried.join(", "))]
    NoSocket { tried: Vec<String> },
    #[error(
        "no container runtime lists this daemon's pod ({}): set --runtime-socket to the socket that the kubelet uses",
        causes(attempts)
    )]
    NotFound { attempts: Vec<Error> },
    #[error("connect to {}", path.display())]
    Connect { path: PathBuf, source: transport::Error },
    #[error("{} does not serve CRI v1: it is disabled there, or the runtime is too old", path.display())]
    NoCri { path: PathBuf, source: Box<Status> },
    #[error("list the sandboxes at {}", path.display())]
    List { path: PathBuf, source: Box<Status> },
    #[error("read the status of sandbox {id} at {}", path.display())]
    Status { path: PathBuf, id: String, source: Box<Status> },
    #[error("read the status of sandbox {id} at {}", path.display())]
    Info { path: PathBuf, id: String, source: cri::InfoError },
    #[error("read the status of the runtime at {}", path.display())]
    RuntimeStatus { path: PathBuf, source: Box<Status> },
    #[error("{} did not respond within {} s", path.display(), limit.as_secs())]
    Timeout { path: PathBuf, limit: Duration },
    #[error("{} does not run this pod", path.display())]
    OtherRuntime { path: PathBuf },
}

fn causes(attempts: &[Error]) -> String {
    let text = |error: &Error| match error {
        // The gRPC status repeats the message.
        Error::NoCri { .. } => error.to_string(),
        _ => ErrorChain(error).to_string(),
    };
    attempts.iter().map(text).collect::<Vec<_>>().join("; ")
}

/// A pod sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sandbox {
    /// The container ID of CNI.
    pub id: String,
    pub pod_uid: String,
    pub pod_namespace: String,
    pub pod_name: String,
    /// Its number among the sandboxes of the pod: the last one has the highest.
    pub attempt: u32,
    /// Whether it runs. An unknown state counts as running.
    pub ready: bool,
}

/// The container runtime that runs this daemon's pod.
///
/// A node can have several runtimes, and all but one do not know the pods of Kubernetes. The right one lists the daemon's
/// own pod.
#[derive(Debug, Clone)]
pub struct ContainerRuntime(Arc<RuntimeState>);

#[derive(Debug)]
struct RuntimeState {
    /// Where the host's root is mounted.
    host_root: PathBuf,
    /// Paths on the host.
    candidates: Vec<PathBuf>,
    own_pod: Option<String>,
    cache: Mutex<RuntimeCache>,
}

#[derive(Debug, Default)]
struct RuntimeCache {
    /// The socket that listed the daemon's pod last.
    socket: Option<PathBuf>,
    /// The connection to that socket. It connects again by itself when the runtime has restarted.
    channel: Option<(PathBuf, Channel)>,
    /// By sandbox ID, whether the sandbox uses the host's network. That never changes during its life.
    host_network: BTreeMap<String, bool>,
}

/// The sandboxes that a runtime listed, and the connection to it.
struct Listing {
    path: PathBuf,
    channel: Channel,
    sandboxes: Vec<Sandbox>,
}

impl ContainerRuntime {
    /// A runtime that listens on `socket`, or else on one of the [`DEFAULT_SOCKETS`]. All are paths on the host.
    pub fn new(host_root: &Path, socket: Option<PathBuf>, own_pod: Option<String>) -> Self {
        let candidates = match socket {
            Some(socket) => vec![socket],
            None => DEFAULT_SOCKETS.iter().map(PathBuf::from).collect(),
        };
        // A sandbox without metadata has an empty UID, too.
        let own_pod = own_pod.filter(|uid| !uid.is_empty());
        let (host_root, cache) = (host_root.to_owned(), Mutex::default());
        Self(Arc::new(RuntimeState { host_root, candidates, own_pod, cache }))
    }

    /// The socket that listed the daemon's pod last.
    pub fn socket(&self) -> Option<PathBuf> {
        self.0.cache().socket.clone()
    }

    /// All sandboxes, also those that have stopped and are not yet removed.
    pub async fn sandboxes(&self) -> Result<Vec<Sandbox>, Error> {
        Ok(self.0.list().await?.sandboxes)
    }

    /// What the runtime says about a sandbox; None if it does not exist. Asks the runtime that listed the daemon's pod
    /// last.
    pub async fn sandbox_info(&self, id: &str) -> Result<Option<SandboxInfo>, Error> {
        let (path, channel) = self.0.connected().await?;
        let request = PodSandboxStatusRequest { pod_sandbox_id: id.to_owned(), verbose: true };
        let status = timeout(CRI_TIMEOUT, unary(&channel, cri::POD_SANDBOX_STATUS, request)).await;
        let status: PodSandboxStatusResponse = match status {
            Err(_) => return Err(Error::Timeout { path, limit: CRI_TIMEOUT }),
            Ok(Err(status)) if status.code() == Code::NotFound => return Ok(None),
            Ok(Err(status)) => {
                return Err(Error::Status { path, id: id.to_owned(), source: Box::new(status) });
            }
            Ok(Ok(status)) => status,
        };
        let mut info = SandboxInfo::parse(&status.info).map_err(|source| Error::Info {
            path,
            id: id.to_owned(),
            source,
        })?;
        let handler = status.status.map(|status| status.runtime_handler).filter(|name| !name.is_empty());
        info.runtime_handler = info.runtime_handler.or(handler);
        Ok(Some(info))
    }

    /// The directories of CNI that the runtime uses. A runtime need not name them.
    pub async fn cni_dirs(&self) -> Result<CniDirs, Error> {
        let (path, channel) = self.0.connected().await?;
        let status =
            timeout(CRI_TIMEOUT, unary(&channel, cri::STATUS, StatusRequest { verbose: true })).await;
        let status: StatusResponse = match status {
            Err(_) => return Err(Error::Timeout { path, limit: CRI_TIMEOUT }),
            Ok(Err(status)) if status.code() == Code::Unimplemented => StatusResponse::default(),
            Ok(Err(status)) => return Err(Error::RuntimeStatus { path, source: Box::new(status) }),
            Ok(Ok(status)) => status,
        };
        let dirs = CniDirs::parse(&status.info);
        if dirs.config.is_some() {
            return Ok(dirs);
        }
        // CRI-O. Any other runtime closes the connection, or says nothing.
        let config = timeout(CONFIG_TIMEOUT, read_crio_config(&self.0.mounted(&path))).await;
        let config = config.ok().and_then(Result::ok).unwrap_or_default();
        Ok(CniDirs::parse_crio(&String::from_utf8_lossy(&config)))
    }

    /// The IDs of all sandboxes, also of those that have stopped and are not yet removed.
    pub async fn live(&self) -> Result<BTreeSet<String>, Error> {
        let Listing { sandboxes, .. } = self.0.list().await?;
        Ok(sandboxes.into_iter().map(|sandbox| sandbox.id).collect())
    }

    /// The IDs of the sandboxes that may use an address of a network: all but the daemon's own, which is another one after
    /// each upgrade, and those on the host's network.
    pub async fn witnesses(&self) -> Result<BTreeSet<String>, Error> {
        let Listing { channel, sandboxes, .. } = self.0.list().await?;
        let ids: BTreeSet<&String> = sandboxes.iter().map(|sandbox| &sandbox.id).collect();
        let mut known = std::mem::take(&mut self.0.cache().host_network);
        known.retain(|id, _| ids.contains(id));
        let deadline = Instant::now() + CRI_TIMEOUT;
        let mut witnesses = BTreeSet::new();
        for Sandbox { id, pod_uid, .. } in &sandboxes {
            if Some(pod_uid) == self.0.own_pod.as_ref() {
                continue;
            }
            if !known.contains_key(id) {
                let request = PodSandboxStatusRequest { pod_sandbox_id: id.clone(), verbose: false };
                let status = unary(&channel, cri::POD_SANDBOX_STATUS, request);
                // A sandbox without an answer counts: too many witnesses keep a block closed, too few open it too early.
                if let Ok(Ok(status)) = timeout_at(deadline, status).await {
                    known.insert(id.clone(), is_host_network(&status));
                }
            }
            if known.get(id) != Some(&true) {
                witnesses.insert(id.clone());
            }
        }
        self.0.cache().host_network = known;
        Ok(witnesses)
    }
}

impl RuntimeState {
    fn cache(&self) -> MutexGuard<'_, RuntimeCache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection to the runtime that listed the daemon's pod last.
    async fn connected(&self) -> Result<(PathBuf, Channel), Error> {
        let connected = self.cache().channel.clone();
        if let Some(connected) = connected {
            return Ok(connected);
        }
        // Listing finds the runtime and connects to it.
        let Listing { path, channel, .. } = self.list().await?;
        Ok((path, channel))
    }

    /// Lists the sandboxes of the first candidate that lists the daemon's own pod, the last successful one first.
    async fn list(&self) -> Result<Listing, Error> {
        let Some(own_pod) = &self.own_pod else { return Err(Error::NoPodUid) };
        let last = self.cache().socket.clone();
        let others = self.candidates.iter().filter(|path| Some(*path) != last.as_ref());
        let mut attempts = Vec::new();
        for path in last.iter().chain(others).filter(|path| self.mounted(path).exists()) {
            let listed = timeout(CRI_TIMEOUT, self.list_at(path)).await;
            match listed.unwrap_or_else(|_| Err(Error::Timeout { path: path.clone(), limit: CRI_TIMEOUT })) {
                Ok(listing) if listing.sandboxes.iter().any(|sandbox| sandbox.pod_uid == *own_pod) => {
                    let mut cache = self.cache();
                    cache.socket = Some(path.clone());
                    cache.channel = Some((path.clone(), listing.channel.clone()));
                    drop(cache);
                    return Ok(listing);
                }
                Ok(_) => attempts.push(Error::OtherRuntime { path: path.clone() }),
                Err(error) => attempts.push(error),
            }
        }
        if attempts.is_empty() {
            let tried = self.candidates.iter().map(|path| path.display().to_string()).collect();
            return Err(Error::NoSocket { tried });
        }
        Err(Error::NotFound { attempts })
    }

    async fn list_at(&self, path: &Path) -> Result<Listing, Error> {
        let cached = self.cache().channel.clone().filter(|(connected, _)| connected == path);
        if let Some((_, channel)) = cached {
            // The connection may be stale: a runtime that has restarted is asked again over a new one.
            if let Ok(listing) = list_over(path, channel).await {
                return Ok(listing);
            }
            self.cache().channel = None;
        }
        let connect = |source| Error::Connect { path: path.to_owned(), source };
        // With `unix:` the path does not become the authority of the request, which the server would reject.
        let endpoint = Endpoint::from_shared(format!("unix:{}", self.mounted(path).display()));
        let channel = endpoint.map_err(connect)?.connect().await.map_err(connect)?;
        list_over(path, channel).await
    }

    /// Where a path of the host is found in the daemon's container.
    fn mounted(&self, path: &Path) -> PathBuf {
        // `/var/run` is an absolute symbolic link to `/run`, which would lead out of the mounted root.
        let run = path.strip_prefix("/var/run").map(|rest| Path::new("run").join(rest));
        let relative = run.unwrap_or_else(|_| path.strip_prefix("/").unwrap_or(path).to_owned());
        self.host_root.join(relative)
    }
}

/// The configuration that CRI-O serves at its socket, with HTTP headers.
async fn read_crio_config(socket: &Path) -> io::Result<Vec<u8>> {
    let mut stream = UnixStream::connect(socket).await?;
    stream.write_all(b"GET /config HTTP/1.0\r\nHost: crio\r\n\r\n").await?;
    let mut config = Vec::new();
    stream.take(MAX_CONFIG).read_to_end(&mut config).await?;
    Ok(config)
}

async fn list_over(path: &Path, channel: Channel) -> Result<Listing, Error> {
    let listed = unary(&channel, cri::LIST_POD_SANDBOX, ListPodSandboxRequest {}).await;
    let response: ListPodSandboxResponse = listed.map_err(|status| {
        let (path, source) = (path.to_owned(), Box::new(status));
        match source.code() {
            Code::Unimplemented => Error::NoCri { path, source },
            _ => Error::List { path, source },
        }
    })?;
    let sandboxes = response.items.into_iter().map(Sandbox::from).collect();
    Ok(Listing { path: path.to_owned(), channel, sandboxes })
}

async fn unary<Q, A>(channel: &Channel, method: &'static str, request: Q) -> Result<A, Status>
where
    Q: Message + Send + Sync + 'static,
    A: Message + Default + Send + Sync + 'static,
{
    let mut client = Grpc::new(channel.clone()).max_decoding_message_size(MAX_RESPONSE);
    client.ready().await.map_err(|error| Status::from_error(error.into()))?;
    let (method, codec) = (PathAndQuery::from_static(method), ProstCodec::default());
    client.unary(Request::new(request), method, codec).await.map(tonic::Response::into_inner)
}

/// Whether a sandbox uses the host's network; no if the runtime does not report it.
fn is_host_network(response: &PodSandboxStatusResponse) -> bool {
    let linux = response.status.as_ref().and_then(|status| status.linux.as_ref());
    let options = linux.and_then(|linux| linux.namespaces.as_ref()?.options.as_ref());
    options.is_some_and(|options| options.network == i32::from(NamespaceMode::Node))
}

impl From<PodSandbox> for Sandbox {
    fn from(sandbox: PodSandbox) -> Self {
        let ready = sandbox.state != i32::from(PodSandboxState::NotReady);
        let pod = sandbox.metadata.unwrap_or_default();
        let (id, attempt) = (sandbox.id, pod.attempt);
        Self { id, pod_uid: pod.uid, pod_namespace: pod.namespace, pod_name: pod.name, attempt, ready }
    }
}

#[cfg(test)]
pub mod tests;
