//! The container runtime of this node: which sandboxes it has.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use http::uri::PathAndQuery;
use tokio::time::timeout;
use tonic::{
    Code, Request, Status,
    client::Grpc,
    transport::{self, Endpoint},
};
use tonic_prost::ProstCodec;
use wire::cri::{self, ListPodSandboxRequest, ListPodSandboxResponse, PodSandbox, PodSandboxState};

/// Where runtimes listen if nobody says otherwise.
const DEFAULT_SOCKETS: [&str; 3] =
    ["run/containerd/containerd.sock", "run/crio/crio.sock", "run/k3s/containerd/containerd.sock"];

/// For a connection and its answer.
const CRI_TIMEOUT: Duration = Duration::from_secs(10);

/// The largest answer that is read: a sandbox with long annotations takes some tens of kilobytes.
const MAX_RESPONSE: usize = 64 * 1024 * 1024;

/// Why it is not known which sandboxes there are.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("there is no container runtime at {}: say where it listens", tried.join(", "))]
    Missing { tried: Vec<String> },
    #[error("connect to the container runtime at {}", path.display())]
    Connect { path: PathBuf, source: transport::Error },
    #[error("what listens at {} does not speak CRI v1: is that switched off in it, or is it too old?", path.display())]
    NoCri { path: PathBuf, source: Box<Status> },
    #[error("ask the container runtime at {} for its sandboxes", path.display())]
    List { path: PathBuf, source: Box<Status> },
    #[error("the container runtime at {} gave no answer within {} s", path.display(), limit.as_secs())]
    Timeout { path: PathBuf, limit: Duration },
}

/// A sandbox of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sandbox {
    /// What CNI calls the container id.
    pub id: String,
    /// Of the pod, like namespace and name.
    pub uid: String,
    pub namespace: String,
    pub name: String,
    /// Whether it lives. One in a state that nobody has heard of does: nothing is taken from it.
    pub ready: bool,
}

/// A container runtime, asked anew each time.
#[derive(Debug, Clone)]
pub struct ContainerRuntime {
    sockets: Vec<PathBuf>,
}

impl ContainerRuntime {
    /// The runtime behind the first of these sockets that is there when it is asked. If that one does not answer, no
    /// other is asked: it would say that the sandboxes of this one are gone.
    pub fn new(sockets: Vec<PathBuf>) -> Self {
        Self { sockets }
    }

    /// The runtime where they usually are, on the host whose files are below this root.
    pub fn discover(root: &Path) -> Self {
        Self::new(DEFAULT_SOCKETS.iter().map(|socket| root.join(socket)).collect())
    }

    /// All sandboxes that it has, also those that have ended and are not yet removed.
    pub async fn sandboxes(&self) -> Result<Vec<Sandbox>, Error> {
        let Some(path) = self.sockets.iter().find(|path| path.exists()) else {
            let tried = self.sockets.iter().map(|path| path.display().to_string()).collect();
            return Err(Error::Missing { tried });
        };
        let answer = timeout(CRI_TIMEOUT, list(path)).await;
        let answer =
            answer.unwrap_or_else(|_| Err(Error::Timeout { path: path.clone(), limit: CRI_TIMEOUT }))?;
        Ok(answer.items.into_iter().map(Sandbox::from).collect())
    }
}

async fn list(path: &Path) -> Result<ListPodSandboxResponse, Error> {
    let connect = |source| Error::Connect { path: path.to_owned(), source };
    // Named like this the path is not a part of the request: as its authority it would be refused.
    let endpoint = Endpoint::from_shared(format!("unix:{}", path.display())).map_err(connect)?;
    let channel = endpoint.connect().await.map_err(connect)?;
    let ask = |status: Status| {
        let (path, source) = (path.to_owned(), Box::new(status));
        match source.code() {
            Code::Unimplemented => Error::NoCri { path, source },
            _ => Error::List { path, source },
        }
    };
    let mut client = Grpc::new(channel).max_decoding_message_size(MAX_RESPONSE);
    client.ready().await.map_err(|error| ask(Status::from_error(error.into())))?;
    let method = PathAndQuery::from_static(cri::LIST_POD_SANDBOX);
    let codec = ProstCodec::default();
    let answer = client.unary(Request::new(ListPodSandboxRequest {}), method, codec).await;
    answer.map(tonic::Response::into_inner).map_err(ask)
}

impl From<PodSandbox> for Sandbox {
    fn from(sandbox: PodSandbox) -> Self {
        let ready = sandbox.state != i32::from(PodSandboxState::NotReady);
        let pod = sandbox.metadata.unwrap_or_default();
        Self { id: sandbox.id, uid: pod.uid, namespace: pod.namespace, name: pod.name, ready }
    }
}

#[cfg(test)]
mod tests;
