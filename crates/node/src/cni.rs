//! The CNI server. It handles the calls that the runtime makes to the Patchbay plugins on this node.
//!
//! The server creates and removes links of pods and nothing else. It reads the networks and their state from [`Networks`],
//! which the controller of this node keeps up to date. ADD to a network that is not ready fails with "try again later" and
//! the reason; the runtime retries.

pub(crate) mod address;
mod caller;
mod commands;
mod install;
mod metrics;
mod thread_pool;
pub(crate) mod tombstone;

use std::{
    collections::BTreeMap,
    io::{self, Write as _},
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream},
    },
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use api::{ErrorChain, IfName, digest::digest, ipblock::NodeRef};
use plan::ipam::Pool;
use tokio::{sync::watch, task::spawn_blocking, time::interval};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};
use wire::{
    cni::{self as protocol, Code, Verb, Version},
    socket::{self as frames, Message, Reply, Request},
};

use crate::{Error, ipam::Ipam, socket};

pub use install::{Error as InstallError, install};
pub use metrics::Metrics;

use caller::Caller;
use metrics::CniResultLabel;
use thread_pool::ThreadPool;

/// How long the plugin may take to send its request, and to read the reply.
const IO_TIMEOUT: Duration = Duration::from_secs(5);
/// How long running calls may continue after a stop.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);
/// Locks for host interfaces. Calls for one interface never run concurrently; two interfaces rarely share a lock.
const LOCK_SHARDS: usize = 1024;
/// How often the server applies tombstones.
const TOMBSTONE_INTERVAL: Duration = Duration::from_secs(20);

/// The networks that this node knows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Networks {
    /// Whether the list from the API server is complete.
    pub synced: bool,
    /// This node, once its Node has been read.
    pub node: Option<NodeRef>,
    pub by_name: BTreeMap<String, NetworkView>,
}

/// A network as the CNI server sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkView {
    pub uid: String,
    pub state: NetworkState,
    /// Its address pool, if it has IPAM.
    pub ipam: Option<Arc<Pool>>,
}

/// The state of a network on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NetworkState {
    /// The bridge exists. A network that is being deleted but still has users accepts more pods, so that a pod that was
    /// created just before is not stranded.
    Ready {
        bridge_index: u32,
        mtu: u32,
        removing: bool,
    },
    NotReady {
        reason: String,
        message: String,
    },
    /// The network's selector does not match this node.
    NotSelected,
    /// The daemon is removing its links.
    Removing,
}

/// Directories of the CNI server.
#[derive(Debug, Clone)]
pub struct CniPaths {
    /// Holds the sockets.
    pub run_dir: PathBuf,
    /// Survives a restart; the plugin writes its tombstones there.
    pub state_dir: PathBuf,
    /// `/proc` of the host.
    pub proc_root: PathBuf,
}

/// Listens on the CNI socket.
pub struct CniServer {
    listener: UnixListener,
    handler: Arc<CniHandler>,
}

/// Handles CNI calls; shared by all worker threads.
struct CniHandler {
    networks: watch::Receiver<Arc<Networks>>,
    ipam: Arc<Ipam>,
    tombstones: PathBuf,
    proc_root: PathBuf,
    locks: Vec<Mutex<()>>,
    metrics: Metrics,
}

impl CniServer {
    /// Opens the socket.
    pub fn bind(
        paths: &CniPaths,
        networks: watch::Receiver<Arc<Networks>>,
        ipam: Arc<Ipam>,
        metrics: Metrics,
    ) -> Result<Self, Error> {
        let CniPaths { run_dir, state_dir, proc_root } = paths;
        let handler = CniHandler {
            networks,
            ipam,
            tombstones: state_dir.join(frames::TOMBSTONE_DIR),
            proc_root: proc_root.clone(),
            locks: (0..LOCK_SHARDS).map(|_| Mutex::new(())).collect(),
            metrics,
        };
        Ok(Self { listener: socket::bind(run_dir, frames::SOCKET_NAME)?, handler: Arc::new(handler) })
    }

    /// Applies the tombstones, then serves until `stop`.
    pub async fn run(self, stop: CancellationToken) -> Result<(), Error> {
        let Self { listener, handler } = self;
        let startup = Arc::clone(&handler);
        spawn_blocking(move || {
            tombstone::remove_abandoned(&startup.tombstones);
            startup.apply_tombstones();
        })
        .await
        .map_err(Error::Panicked)?;

        let connections = Arc::clone(&handler);
        let pool = ThreadPool::start(listener, move |stream| connections.handle_connection(&stream))
            .map_err(Error::Threads)?;
        // A plugin that could not connect just before the server listened writes its tombstone just after.
        let mut ticks = interval(TOMBSTONE_INTERVAL);
        while stop.run_until_cancelled(ticks.tick()).await.is_some() {
            let handler = Arc::clone(&handler);
            let applied = spawn_blocking(move || handler.apply_tombstones());
            if let Some(Err(error)) = stop.run_until_cancelled(applied).await {
                warn!(error = %ErrorChain(&error), "applying tombstones failed; retrying");
            }
        }
        let drained = spawn_blocking(move || pool.drain(DRAIN_TIMEOUT)).await.map_err(Error::Panicked)?;
        if !drained {
            warn!("a CNI call did not finish in time and was aborted");
        }
        Ok(())
    }
}

/// Reads one request and the file descriptor that came with it.
fn read_request(stream: &UnixStream) -> io::Result<(Request, Option<OwnedFd>)> {
    stream.set_read_timeout(Some(IO_TIMEOUT))?;
    let (mut reader, mut descriptor, mut buffer) = (frames::FrameReader::default(), None, [0; 8 * 1024]);
    loop {
        let length = frames::receive(stream, &mut buffer, &mut descriptor)?;
        if length == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        reader.feed(buffer.get(..length).unwrap_or_default());
        match reader.message().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))? {
            Some(Message::Request(request)) => return Ok((request, descriptor)),
            Some(Message::Reply(_)) => return Err(io::ErrorKind::InvalidData.into()),
            None => {}
        }
    }
}

impl CniHandler {
    /// Handles one connection: one request, one reply.
    fn handle_connection(&self, stream: &UnixStream) {
        let started = Instant::now();
        let (request, namespace) = match read_request(stream) {
            Ok(read) => read,
            Err(error) => return warn!(error = %ErrorChain(&error), "cannot read a CNI request"),
        };
        let version = Version::of(&request.stdin);
        let verb = request.command.parse::<Verb>().ok();
        let Request { command, container_id, ifname, .. } = &request;
        let serve = || self.serve(&request, namespace.as_ref(), &Caller::of(stream));
        // State behind a poisoned lock stays usable: every change is preceded by a comparison with the kernel.
        let result = catch_unwind(AssertUnwindSafe(serve)).unwrap_or_else(|_| {
            Err(protocol::Error::new(
                Code::Io,
                "the call panicked inside the node daemon; see the daemon's log",
            ))
        });
        self.metrics.count(verb, CniResultLabel::of(&result), started.elapsed());
        let reply = match result {
            Ok(stdout) => Reply { exit: 0, stdout },
            Err(error) => {
                info!(command, container_id, ifname, code = error.code as u32, %error, "CNI call failed");
                Reply { exit: 1, stdout: error.render(version) }
            }
        };
        let Ok(frame) = reply.encode() else { return };
        let mut out = stream;
        let sent = stream.set_write_timeout(Some(IO_TIMEOUT)).and_then(|()| out.write_all(&frame));
        if sent.is_err() {
            warn!(
                command,
                container_id, ifname, "cannot send the reply to a CNI call: the plugin has exited"
            );
        }
    }

    /// Locks the pair of links with this host end.
    fn lock(&self, host: &IfName) -> Option<MutexGuard<'_, ()>> {
        let shard = usize::try_from(digest([host.as_str()]) % LOCK_SHARDS as u64).ok()?;
        Some(self.locks.get(shard)?.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Runs the DEL calls that the plugin recorded while the daemon did not answer.
    fn apply_tombstones(&self) {
        tombstone::apply_all(&self.tombstones, |path, request| {
            match self.delete_if(request, || path.exists()) {
                Ok(()) => true,
                Err(error) => {
                    warn!(container_id = request.container_id, %error, "cannot apply a tombstone; retrying");
                    false
                }
            }
        });
    }
}

/// The path of the socket.
pub fn path(run_dir: &Path) -> PathBuf {
    run_dir.join(frames::SOCKET_NAME)
}

#[cfg(test)]
mod tests;
