//! Waiting for what the kernel does after it has answered.

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

const BUFFER: usize = 8 * 1024;
/// The kernel takes milliseconds, and at most a second if it is in no hurry.
const PATIENCE: Duration = Duration::from_secs(1);

/// What word is given of.
#[derive(Debug, Clone, Copy)]
pub enum Group {
    /// `RTMGRP_LINK`
    Links = 0x1,
    /// `RTMGRP_IPV6_ROUTE`
    Ipv6Routes = 0x400,
}

/// Word of changes in one network namespace.
pub struct Events(Socket);

impl Events {
    /// Listens from now on, in the network namespace of this thread.
    pub fn open(group: Group) -> Result<Self, Error> {
        let mut socket = Socket::new(NETLINK_ROUTE).map_err(Error::Open)?;
        socket.bind(&SocketAddr::new(0, group as u32)).map_err(Error::Open)?;
        Ok(Self(socket))
    }

    /// Looks again after each event until it is so. Whether it is, in the end.
    pub fn until(&self, mut is_so: impl FnMut() -> Result<bool, Error>) -> Result<bool, Error> {
        let end = Instant::now() + PATIENCE;
        loop {
            if is_so()? {
                return Ok(true);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            self.wait(left)?;
        }
    }

    /// Waits for some event, and takes it.
    fn wait(&self, left: Duration) -> Result<(), Error> {
        let failed = |source: io::Error| Error::Read { what: "events", source };
        // At least one, or the last part of a millisecond would be spent asking again and again.
        let left = u16::try_from(left.as_millis()).unwrap_or(u16::MAX).max(1);
        let mut one = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        match poll(&mut one, PollTimeout::from(left)) {
            Ok(0) | Err(Errno::EINTR) => return Ok(()),
            Ok(_) => {}
            Err(errno) => return Err(failed(errno.into())),
        }
        // Words that were lost are no reason to stop: everything is looked at again in any case.
        match self.0.recv_from(&mut vec![0; BUFFER].as_mut_slice(), MSG_DONTWAIT) {
            Err(error) if error.raw_os_error() == Some(Errno::ENOBUFS as i32) => Ok(()),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                Ok(())
            }
            result => result.map(|_| ()).map_err(failed),
        }
    }
}
