//! The client of the daemon's CNI socket.

use std::{
    env, fmt, io,
    os::{fd::BorrowedFd, unix::net::UnixStream},
    path::PathBuf,
    time::{Duration, Instant},
};

use wire::socket::{FrameReader, Message, Reply, receive, send};

const DEFAULT_SOCKET: &str = "/run/patchbay/cni.sock";
/// Longer than the daemon lets a call wait, shorter than the plugin timeout of runtimes.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

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

/// Sends the frame with the descriptor and waits for the reply.
pub fn call(frame: &[u8], descriptor: Option<BorrowedFd<'_>>) -> Result<Reply, Error> {
    let path =
        env::var_os("PATCHBAY_CNI_SOCKET").map_or_else(|| PathBuf::from(DEFAULT_SOCKET), PathBuf::from);
    let socket = UnixStream::connect(&path).map_err(|error| Error::Connect(path, error))?;
    exchange(&socket, frame, descriptor).map_err(Error::Broken)
}

fn exchange(socket: &UnixStream, frame: &[u8], descriptor: Option<BorrowedFd<'_>>) -> io::Result<Reply> {
    let deadline = Instant::now() + CALL_TIMEOUT;
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
