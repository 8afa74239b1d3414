//! The client of the daemon's CNI socket.

use std::{
    env, fmt, io,
    os::{fd::BorrowedFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use wire::socket::{CALL_TIMEOUT, FrameReader, Message, Reply, Request, receive, send};

const DEFAULT_SOCKET: &str = "/run/patchbay/cni.sock";
/// How long an ADD waits for a daemon that restarts. The kubelet repeats a failed sandbox only ten seconds later or more.
pub const RESTART_TIMEOUT: Duration = Duration::from_secs(10);
/// How often a waiting ADD connects again.
const CONNECT_INTERVAL: Duration = Duration::from_millis(100);

/// The daemon did not reply.
#[derive(Debug)]
pub enum Error {
    /// No daemon listens on the socket.
    Connect(PathBuf, io::Error),
    /// The connection failed, or the call timed out.
    Broken(io::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the patchbay node daemon does not answer on this node (")?;
        match self {
            Self::Connect(path, error) => write!(f, "{}: {error}", path.display())?,
            Self::Broken(error) => write!(f, "connection lost during the call: {error}")?,
        }
        f.write_str("): check its pod in namespace patchbay-system; the runtime retries the call")
    }
}

impl Error {
    /// Whether the daemon restarts: no daemon listens, or it stopped before it read the request.
    fn is_restart(&self) -> bool {
        use io::ErrorKind::{BrokenPipe, ConnectionRefused, ConnectionReset, NotFound};
        match self {
            Self::Connect(_, error) => matches!(error.kind(), NotFound | ConnectionRefused),
            // The kernel resets a connection that is closed with unread data. After the daemon has read the request, it is an
            // end of file.
            Self::Broken(error) => matches!(error.kind(), ConnectionReset | BrokenPipe),
        }
    }
}

/// Sends the request, which is in the frame, with the descriptor and waits for the reply. Waits up to `restart` for a daemon
/// that listens, and sends it how long.
pub fn call(
    request: &Request,
    frame: &[u8],
    descriptor: Option<BorrowedFd<'_>>,
    restart: Duration,
) -> Result<Reply, Error> {
    let path =
        env::var_os("PATCHBAY_CNI_SOCKET").map_or_else(|| PathBuf::from(DEFAULT_SOCKET), PathBuf::from);
    let started = Instant::now();
    let mut later = None;
    loop {
        let frame = later.as_deref().unwrap_or(frame);
        let error = match try_call(&path, frame, descriptor, started + CALL_TIMEOUT) {
            Err(error) if error.is_restart() => error,
            result => return result,
        };
        let left = restart.saturating_sub(started.elapsed());
        if left.is_zero() {
            return Err(error);
        }
        thread::park_timeout(left.min(CONNECT_INTERVAL));
        later = request.after_waiting(started.elapsed()).encode().ok();
    }
}

fn try_call(
    path: &Path,
    frame: &[u8],
    descriptor: Option<BorrowedFd<'_>>,
    deadline: Instant,
) -> Result<Reply, Error> {
    let socket = UnixStream::connect(path).map_err(|error| Error::Connect(path.to_owned(), error))?;
    exchange(&socket, frame, descriptor, deadline).map_err(Error::Broken)
}

fn exchange(
    socket: &UnixStream,
    frame: &[u8],
    descriptor: Option<BorrowedFd<'_>>,
    deadline: Instant,
) -> io::Result<Reply> {
    socket.set_write_timeout(Some(CALL_TIMEOUT))?;
    send(socket, frame, descriptor)?;
    let (mut reader, mut buffer) = (FrameReader::default(), [0; 8 * 1024]);
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        socket.set_read_timeout(Some(left))?;
        let length = receive(socket, &mut buffer, &mut None)?;
        if length == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        reader.feed(buffer.get(..length).unwrap_or_default());
        let message = reader.message().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        match message {
            Some(Message::Reply(reply)) => return Ok(reply),
            Some(Message::Request(_)) => return Err(io::ErrorKind::InvalidData.into()),
            None => {}
        }
    }
}
