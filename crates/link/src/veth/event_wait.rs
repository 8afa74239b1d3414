//! Waits for work that the kernel does after it has acknowledged a request.

use std::{
    io,
    os::fd::AsFd as _,
    time::{Duration, Instant},
};

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};
use nix::{
    errno::Errno,
    libc::MSG_DONTWAIT,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};

use crate::Error;

const BUFFER_SIZE: usize = 8 * 1024;
/// The kernel needs milliseconds, and up to a second for deferred work.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(1);

/// A multicast group of rtnetlink.
#[derive(Debug, Clone, Copy)]
pub enum EventGroup {
    /// `RTMGRP_LINK`
    Links = 0x1,
    /// `RTMGRP_IPV6_ROUTE`
    Ipv6Routes = 0x400,
}

/// A socket that receives the events of one group in one network namespace.
pub struct EventSocket(Socket);

impl EventSocket {
    /// Subscribes in the network namespace of the calling thread.
    pub fn open(group: EventGroup) -> Result<Self, Error> {
        let mut socket = Socket::new(NETLINK_ROUTE).map_err(Error::Open)?;
        socket.bind(&SocketAddr::new(0, group as u32)).map_err(Error::Open)?;
        Ok(Self(socket))
    }

    /// Checks the condition now and after each event, up to [`SETTLE_TIMEOUT`]. Returns whether it holds.
    pub fn wait_until(&self, mut condition: impl FnMut() -> Result<bool, Error>) -> Result<bool, Error> {
        let deadline = Instant::now() + SETTLE_TIMEOUT;
        loop {
            if condition()? {
                return Ok(true);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            self.wait_event(left)?;
        }
    }

    /// Waits for one event and discards it.
    fn wait_event(&self, left: Duration) -> Result<(), Error> {
        let failed = |source: io::Error| Error::Receive { what: "wait for events", source };
        // At least 1 ms: with 0 the last fraction of a millisecond would be a busy loop.
        let left = u16::try_from(left.as_millis()).unwrap_or(u16::MAX).max(1);
        let mut one = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        match poll(&mut one, PollTimeout::from(left)) {
            Ok(0) | Err(Errno::EINTR) => return Ok(()),
            Ok(_) => {}
            Err(errno) => return Err(failed(errno.into())),
        }
        // Lost events do not matter: the caller checks its condition again in any case.
        match self.0.recv_from(&mut vec![0; BUFFER_SIZE].as_mut_slice(), MSG_DONTWAIT) {
            Err(error) if error.raw_os_error() == Some(Errno::ENOBUFS as i32) => Ok(()),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                Ok(())
            }
            result => result.map(|_| ()).map_err(failed),
        }
    }
}
