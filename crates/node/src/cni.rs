//! The CNI server: what the shim is asked by the runtime, done in this process.
//!
//! It makes and removes links of pods and nothing else. Which networks there are and how they stand it reads from a
//! [`Networks`], which the rest of the daemon keeps up to date; a network that is not ready is answered with "try again
//! later" and the reason, and the runtime does.

mod address;
mod call;
mod caller;
mod door;
mod install;
mod metrics;
mod tombstone;

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
use door::Door;
use metrics::Outcome;

/// How long the shim may take to say what it wants, and to take the answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long calls may go on after a stop.
const GRACE: Duration = Duration::from_secs(5);
/// Two calls for one interface never run at the same time, and seldom two for different ones have to wait.
const LOCKS: usize = 1024;
/// How often tombstones are looked for.
const ROUND: Duration = Duration::from_secs(20);

/// Every network that this node knows of.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Networks {
    /// Whether all of them have been read from the API server.
    pub synced: bool,
    /// This node, once it is known.
    pub node: Option<NodeRef>,
    pub by_name: BTreeMap<String, NetworkView>,
}

/// A network, as far as a pod that joins it has to know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkView {
    pub uid: String,
    pub state: State,
    /// What it says about addresses, if it has any.
    pub ipam: Option<Arc<Pool>>,
}

/// How a network stands on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// Its bridge is there. One that is being deleted but still has users takes more of them: a pod that slipped in
    /// is not stranded.
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
    /// Its links are being taken away.
    Removing,
}

/// Where things are.
#[derive(Debug, Clone)]
pub struct Places {
    /// Directory for sockets.
    pub run_dir: PathBuf,
    /// Directory for what must survive a restart; the shim leaves its tombstones there.
    pub state_dir: PathBuf,
    /// Where `/proc` of the host is.
    pub proc_root: PathBuf,
}

/// The server.
pub struct Server {
    listener: UnixListener,
    shared: Arc<Shared>,
}

/// What every call needs.
struct Shared {
    networks: watch::Receiver<Arc<Networks>>,
    ipam: Arc<Ipam>,
    tombstones: PathBuf,
    proc_root: PathBuf,
    locks: Vec<Mutex<()>>,
    metrics: Metrics,
}

impl Server {
    /// Opens the socket.
    pub fn bind(
        places: &Places,
        networks: watch::Receiver<Arc<Networks>>,
        ipam: Arc<Ipam>,
        metrics: Metrics,
    ) -> Result<Self, Error> {
        let Places { run_dir, state_dir, proc_root } = places;
        let shared = Shared {
            networks,
            ipam,
            tombstones: state_dir.join(frames::TOMBSTONES),
            proc_root: proc_root.clone(),
            locks: (0..LOCKS).map(|_| Mutex::new(())).collect(),
            metrics,
        };
        Ok(Self { listener: socket::bind(run_dir, frames::NAME)?, shared: Arc::new(shared) })
    }

    /// Applies the tombstones, then serves until `stop`.
    pub async fn run(self, stop: CancellationToken) -> Result<(), Error> {
        let Self { listener, shared } = self;
        let sweeping = Arc::clone(&shared);
        spawn_blocking(move || {
            tombstone::tidy(&sweeping.tombstones);
            sweeping.bury();
        })
        .await
        .map_err(Error::Panicked)?;

        let serving = Arc::clone(&shared);
        let door = Door::open(listener, move |stream| serving.converse(&stream)).map_err(Error::Threads)?;
        // A shim that found nobody a moment before we listened writes its tombstone a moment after.
        let mut rounds = interval(ROUND);
        while stop.run_until_cancelled(rounds.tick()).await.is_some() {
            let sweeping = Arc::clone(&shared);
            let round = spawn_blocking(move || sweeping.bury());
            if let Some(Err(error)) = stop.run_until_cancelled(round).await {
                warn!(error = %ErrorChain(&error), "tombstones could not be looked at");
            }
        }
        let left = spawn_blocking(move || door.close(GRACE)).await.map_err(Error::Panicked)?;
        if !left {
            warn!("a CNI call did not end in time and is cut off");
        }
        Ok(())
    }
}

/// Reads one request and the descriptor that came with it.
fn read(stream: &UnixStream) -> io::Result<(Request, Option<OwnedFd>)> {
    stream.set_read_timeout(Some(PATIENCE))?;
    let (mut reader, mut descriptor, mut buffer) = (frames::Reader::default(), None, [0; 8 * 1024]);
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

impl Shared {
    /// One connection: one request, one reply.
    fn converse(&self, stream: &UnixStream) {
        let started = Instant::now();
        let (request, namespace) = match read(stream) {
            Ok(read) => read,
            Err(error) => return warn!(error = %ErrorChain(&error), "a CNI call cannot be read"),
        };
        let version = Version::of(&request.stdin);
        let verb = request.command.parse::<Verb>().ok();
        let Request { command, container_id, ifname, .. } = &request;
        let serve = || self.serve(&request, namespace.as_ref(), &Caller::of(stream));
        // What is locked meanwhile is used by others as it is, and everything is compared before it is changed.
        let answer = catch_unwind(AssertUnwindSafe(serve)).unwrap_or_else(|_| {
            Err(protocol::Error::new(Code::Io, "the call failed inside the node daemon: see its log"))
        });
        self.metrics.count(verb, Outcome::of(&answer), started.elapsed());
        let reply = match answer {
            Ok(stdout) => Reply { exit: 0, stdout },
            Err(error) => {
                info!(command, container_id, ifname, code = error.code as u32, %error, "a CNI call was refused");
                Reply { exit: 1, stdout: error.render(version) }
            }
        };
        let Ok(frame) = reply.encode() else { return };
        let mut out = stream;
        let sent = stream.set_write_timeout(Some(PATIENCE)).and_then(|()| out.write_all(&frame));
        if sent.is_err() {
            warn!(command, container_id, ifname, "nobody waited for the answer to a CNI call");
        }
    }

    /// Held while something is done to the pair of this host's end.
    fn lock(&self, host: &IfName) -> Option<MutexGuard<'_, ()>> {
        let place = usize::try_from(digest([host.as_str()]) % LOCKS as u64).ok()?;
        Some(self.locks.get(place)?.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Does what the shim was asked while nobody answered it.
    fn bury(&self) {
        tombstone::each(&self.tombstones, |path, request| match self.delete_if(request, || path.exists()) {
            Ok(()) => true,
            Err(error) => {
                warn!(container_id = request.container_id, %error, "a pod's link cannot be deleted yet");
                false
            }
        });
    }
}

/// Where the socket is.
pub fn path(run_dir: &Path) -> PathBuf {
    run_dir.join(frames::NAME)
}

#[cfg(test)]
mod tests;
