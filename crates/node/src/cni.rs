//! The CNI server. It handles the calls that the runtime makes to the Patchbay plugins on this node.
//!
//! The server reads calls from its socket, translates them into calls of the [`Attacher`], and writes the answers. ADD to a
//! network that is not ready fails with "try again later" and the reason; the runtime retries.

pub(crate) mod address;
mod caller;
mod commands;
mod install;
mod metrics;
mod thread_pool;
pub(crate) mod tombstone;

use std::{
    io::{self, Write as _},
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream},
    },
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicUsize},
    time::{Duration, Instant},
};

use api::ErrorChain;
use tokio::{task::spawn_blocking, time::interval};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};
use wire::{
    cni::{self as protocol, Code, Verb, Version},
    socket::{self as frames, Message, Reply, Request},
};

use crate::{Error, attach::Attacher, claims::ClaimLookup, socket};

pub use crate::network_snapshot::{NetworkState, NetworkView, Networks};
pub use install::{Error as InstallError, install};
pub use metrics::Metrics;

use caller::Caller;
use metrics::CniResultLabel;
use thread_pool::ThreadPool;

/// How long the plugin may take to send its request, and to read the reply.
const IO_TIMEOUT: Duration = Duration::from_secs(5);
/// How long running calls may continue after a stop.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);
/// How often the server applies tombstones.
const TOMBSTONE_INTERVAL: Duration = Duration::from_secs(20);

/// Listens on the CNI socket.
pub struct CniServer {
    listener: UnixListener,
    handler: Arc<CniHandler>,
}

/// Handles CNI calls; shared by all worker threads.
struct CniHandler {
    attacher: Arc<Attacher>,
    claims: ClaimLookup,
    metrics: Metrics,
    /// How many ADDs wait for the networks.
    waiting: AtomicUsize,
}

impl CniServer {
    /// Opens the socket in a directory.
    pub fn bind(
        run_dir: &Path,
        attacher: Arc<Attacher>,
        claims: ClaimLookup,
        metrics: Metrics,
    ) -> Result<Self, Error> {
        let handler = Arc::new(CniHandler { attacher, claims, metrics, waiting: AtomicUsize::new(0) });
        Ok(Self { listener: socket::bind(run_dir, frames::SOCKET_NAME)?, handler })
    }

    /// Applies the tombstones, then serves until `stop`.
    pub async fn run(self, stop: CancellationToken) -> Result<(), Error> {
        let Self { listener, handler } = self;
        let startup = Arc::clone(&handler);
        spawn_blocking(move || {
            tombstone::remove_abandoned(startup.attacher.tombstones());
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
        // What a panic left behind stays usable: every change is preceded by a comparison with the kernel.
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

    /// Runs the DEL calls that the plugin recorded while the daemon did not answer.
    fn apply_tombstones(&self) {
        tombstone::apply_all(self.attacher.tombstones(), |path, request| {
            let detach = |id| self.attacher.detach_if(&id, commands::scope(request), || path.exists());
            match commands::attachment_id(request).and_then(detach) {
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
