//! Who waits for the answer to a call: the shim at the other end of the connection, as long as it lives.

use std::{
    io,
    os::fd::{AsFd as _, OwnedFd},
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tokio::net::UnixStream;
use wire::cni::{Code, Error};

/// The other end of a connection, as calls that run see it.
#[derive(Debug)]
pub struct Caller(OwnedFd);

impl Caller {
    pub fn of(stream: &UnixStream) -> io::Result<Self> {
        stream.as_fd().try_clone_to_owned().map(Self)
    }

    /// Whether nobody is there any more, as the kernel knows it now. One that has only ended its own words still listens.
    pub fn is_gone(&self) -> bool {
        // A hang-up is told without being asked for.
        let mut one = [PollFd::new(self.0.as_fd(), PollFlags::empty())];
        let told = poll(&mut one, PollTimeout::ZERO).is_ok();
        told && one.iter().filter_map(PollFd::revents).any(|events| events.contains(PollFlags::POLLHUP))
    }

    /// Refuses to begin anything for nobody.
    pub fn is_there(&self) -> Result<(), Error> {
        if !self.is_gone() {
            return Ok(());
        }
        Err(Error::new(Code::TryAgainLater, "the plugin that asked has gone: nothing was done"))
    }
}

/// Waits until nothing more is said at the other end. What is said beyond the request means nothing.
pub async fn hung_up(stream: &UnixStream) {
    let mut rest = [0; 512];
    while stream.readable().await.is_ok() {
        match stream.try_read(&mut rest) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => return,
        }
    }
}
