//! Who waits for the answer to a call: the shim at the other end of the connection, as long as it lives.

use std::os::{
    fd::{AsFd as _, BorrowedFd},
    unix::net::UnixStream,
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use wire::cni::{Code, Error};

/// The other end of a connection, as calls that run see it.
#[derive(Debug)]
pub struct Caller<'a>(BorrowedFd<'a>);

impl<'a> Caller<'a> {
    pub fn of(stream: &'a UnixStream) -> Self {
        Self(stream.as_fd())
    }

    /// Whether nobody is there any more, as the kernel knows it now. One that has only ended its own words still listens.
    pub fn is_disconnected(&self) -> bool {
        // A hang-up is told without being asked for.
        let mut one = [PollFd::new(self.0, PollFlags::empty())];
        let told = poll(&mut one, PollTimeout::ZERO).is_ok();
        told && one.iter().filter_map(PollFd::revents).any(|events| events.contains(PollFlags::POLLHUP))
    }

    /// Refuses to begin anything for nobody.
    pub fn check_connected(&self) -> Result<(), Error> {
        if !self.is_disconnected() {
            return Ok(());
        }
        Err(Error::new(Code::TryAgainLater, "the plugin that asked has gone: nothing was done"))
    }
}
