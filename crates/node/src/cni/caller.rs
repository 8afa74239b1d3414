//! The plugin process that waits for the reply to a CNI call.

use std::os::{
    fd::{AsFd as _, BorrowedFd},
    unix::net::UnixStream,
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use wire::cni::{Code, Error};

/// The other end of a connection.
#[derive(Debug)]
pub struct Caller<'a>(BorrowedFd<'a>);

impl<'a> Caller<'a> {
    pub fn of(stream: &'a UnixStream) -> Self {
        Self(stream.as_fd())
    }

    /// Whether the plugin has closed its end. One that only shut down its writing side still reads the reply.
    pub fn is_disconnected(&self) -> bool {
        // poll reports POLLHUP even if it is not requested.
        let mut fds = [PollFd::new(self.0, PollFlags::empty())];
        let polled = poll(&mut fds, PollTimeout::ZERO).is_ok();
        polled && fds.iter().filter_map(PollFd::revents).any(|events| events.contains(PollFlags::POLLHUP))
    }

    /// Fails if the plugin has disconnected, so that nothing is created without a reader of the result.
    pub fn check_connected(&self) -> Result<(), Error> {
        if !self.is_disconnected() {
            return Ok(());
        }
        Err(Error::new(Code::TryAgainLater, "the CNI plugin disconnected; nothing was changed"))
    }
}
