//! The CNI server: what the shim is asked by the runtime, done in this process.
//!
//! It makes and removes links of pods and nothing else. Which networks there are and how they stand it reads from a
//! [`Networks`], which the rest of the daemon keeps up to date; a network that is not ready is answered with "try again
//! later" and the reason, and the runtime does.

mod address;
mod call;
mod caller;
mod install;
mod metrics;
mod tombstone;

use std::{
    collections::BTreeMap,
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use api::{Chain, IfName, digest::digest, ipblock::Holder};
use plan::ipam::Rules;
use tokio::{
    io::{AsyncWriteExt as _, Interest},
    net::{UnixListener, UnixStream},
    sync::watch,
    task::{JoinSet, spawn_blocking},
    time::{Instant, interval, sleep, timeout, timeout_at},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};
use wire::{
    cni::{self as protocol, Code, Verb, Version},
    socket::{self as frames, Message, Reply, Request},
};

use crate::{Error, ipam::Ipam, socket};

pub use install::{Error as InstallError, install};
pub use metrics::Metrics;

use caller::{Caller, hung_up};
use metrics::Outcome;

/// How many calls are served at a time; others wait in the socket's queue.
const CALLS: usize = 256;
/// How long one call may take, less than the shim waits.
const DEADLINE: Duration = Duration::from_secs(20);
/// How long calls may go on after a stop.
const GRACE: Duration = Duration::from_secs(5);
/// How long to leave the socket alone after it could not be accepted from.
const PAUSE: Duration = Duration::from_millis(100);
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
    pub node: Option<Holder>,
    pub by_name: BTreeMap<String, NetworkView>,
}

/// A network, as far as a pod that joins it has to know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkView {
    pub uid: String,
    pub state: State,
    /// What it says about addresses, if it has any.
    pub ipam: Option<Arc<Rules>>,
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
    /// Opens the socket. Must be called inside a tokio runtime.
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

        let mut calls = JoinSet::new();
        let mut rounds = interval(ROUND);
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                // A shim that found nobody a moment before we listened writes its tombstone a moment after.
                _ = rounds.tick() => {
                    let sweeping = Arc::clone(&shared);
                    // Beside the calls: one that waits for an address may hold what a tombstone is about.
                    calls.spawn(async move {
                        if spawn_blocking(move || sweeping.bury()).await.is_err() {
                            warn!("tombstones could not be looked at");
                        }
                    });
                }
                Some(ended) = calls.join_next() => ended.map_err(Error::Panicked)?,
                accepted = listener.accept(), if calls.len() < CALLS => match accepted {
                    Ok((stream, _)) => {
                        calls.spawn(converse(Arc::clone(&shared), stream));
                    }
                    Err(error) => {
                        warn!(error = %Chain(&error), "cannot accept a CNI call");
                        sleep(PAUSE).await;
                    }
                },
            }
        }
        let rest = async { while calls.join_next().await.is_some() {} };
        if timeout(GRACE, rest).await.is_err() {
            warn!("a CNI call did not end in time and is cut off");
        }
        Ok(())
    }
}

/// One connection: one request, one reply.
async fn converse(shared: Arc<Shared>, mut stream: UnixStream) {
    let started = Instant::now();
    let deadline = started + DEADLINE;
    let (request, namespace) = match timeout_at(deadline, read(&stream)).await {
        Ok(Ok(read)) => read,
        Ok(Err(error)) => return warn!(error = %Chain(&error), "a CNI call cannot be read"),
        Err(_) => return debug!("a CNI call was never finished"),
    };
    let version = Version::of(&request.stdin);
    let verb = request.command.parse::<Verb>().ok();
    let (command, container_id, ifname) =
        (request.command.clone(), request.container_id.clone(), request.ifname.clone());
    let caller = match Caller::of(&stream) {
        Ok(caller) => caller,
        Err(error) => return warn!(error = %Chain(&error), "a CNI call cannot be served"),
    };
    let serving = Arc::clone(&shared);
    let mut served = spawn_blocking(move || serving.serve(&request, namespace.as_ref(), &caller));
    let ended = async {
        tokio::select! {
            ended = &mut served => return ended,
            () = hung_up(&stream) => {}
        }
        // The call itself knows best how far it is: what waits in it learns that it waits for nobody.
        let waiting = Arc::clone(&shared.ipam);
        spawn_blocking(move || waiting.look_again()).await?;
        served.await
    };
    let answer = match timeout_at(deadline, ended).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(_)) => {
            Err(protocol::Error::new(Code::Io, "the call failed inside the node daemon: see its log"))
        }
        Err(_) => {
            let msg = format!("the call was not done within {} s: tried again", DEADLINE.as_secs());
            Err(protocol::Error::new(Code::TryAgainLater, msg))
        }
    };
    shared.metrics.count(verb, Outcome::of(&answer), started.elapsed());
    let reply = match answer {
        Ok(stdout) => Reply { exit: 0, stdout },
        Err(error) => {
            info!(command, container_id, ifname, code = error.code as u32, %error, "a CNI call was refused");
            Reply { exit: 1, stdout: error.render(version) }
        }
    };
    let Ok(frame) = reply.encode() else { return };
    if !matches!(timeout(GRACE, stream.write_all(&frame)).await, Ok(Ok(()))) {
        warn!(command, container_id, ifname, "nobody waited for the answer to a CNI call");
    }
}

/// Reads one request and the descriptor that came with it.
async fn read(stream: &UnixStream) -> io::Result<(Request, Option<OwnedFd>)> {
    let (mut reader, mut descriptor, mut buffer) = (frames::Reader::default(), None, vec![0; 16 * 1024]);
    loop {
        let receive = || frames::receive(stream, &mut buffer, &mut descriptor);
        let length = stream.async_io(Interest::READABLE, receive).await?;
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
