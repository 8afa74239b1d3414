//! Deleting a link without waiting for the kernel to tidy up after it.

use std::{
    io,
    os::{fd::AsFd as _, unix::net::UnixStream},
    thread,
};

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};
use nix::{
    errno::Errno,
    libc::MSG_DONTWAIT,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};

use crate::{
    Error,
    dump::Asker,
    message,
    request::{CHANGE, Request, link_header},
};

const DELETE_LINK: u16 = 17;
/// `RTMGRP_LINK`
const LINKS: u32 = 1;
const BUFFER: usize = 8 * 1024;

/// Deletes a link, and returns as soon as nobody can see it or its other end any more.
///
/// The call that deletes comes back only when the last reader of the link is known to be gone, which takes the kernel
/// several times as long; so it is made by a thread of its own, which ends by itself. It is the event that counts.
pub fn delete(index: u32) -> Result<(), Error> {
    let mut events = Socket::new(NETLINK_ROUTE).map_err(Error::Open)?;
    events.bind(&SocketAddr::new(0, LINKS)).map_err(Error::Open)?;
    // Closed when the thread ends, whatever it ends with.
    let (ended, end) = UnixStream::pair().map_err(Error::Open)?;
    let thread = thread::Builder::new().name("unlink".to_owned()).spawn(move || {
        let _end = end;
        let request = Request::new(DELETE_LINK, CHANGE, &link_header(index, 0, 0));
        Asker::open()?.change("delete the link", request)
    });
    let thread = thread.map_err(Error::Open)?;
    if seen(&events, &ended, index)? {
        return Ok(());
    }
    let stopped = |_| Error::Ask { what: "end of a link", source: io::Error::other("the thread panicked") };
    thread.join().map_err(stopped)?
}

/// Waits for word that the link is gone: whether it came before the thread ended.
fn seen(events: &Socket, ended: &UnixStream, index: u32) -> Result<bool, Error> {
    let failed = |source: io::Error| Error::Read { what: "events", source };
    let mut buffer = vec![0; BUFFER];
    loop {
        let mut both =
            [PollFd::new(events.as_fd(), PollFlags::POLLIN), PollFd::new(ended.as_fd(), PollFlags::POLLIN)];
        match poll(&mut both, PollTimeout::NONE) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(failed(errno.into())),
        }
        let [event, end] = both.map(|one| one.any().unwrap_or(false));
        if end {
            return Ok(false);
        }
        if !event {
            continue;
        }
        match events.recv_from(&mut buffer.as_mut_slice(), MSG_DONTWAIT) {
            Ok((length, from)) if from.port_number() == 0 => {
                let datagram = buffer.get(..length).unwrap_or(&buffer);
                if message::messages(datagram).any(|message| is_end_of(&message, index)) {
                    return Ok(true);
                }
            }
            Ok(_) => {}
            // Words were lost; those about this link may be among them, and then the end of the thread tells.
            Err(error) if error.raw_os_error() == Some(Errno::ENOBUFS as i32) => {}
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(error) => return Err(failed(error)),
        }
    }
}

fn is_end_of(message: &message::Message<'_>, index: u32) -> bool {
    message.kind == DELETE_LINK && message::link(message.body).is_some_and(|link| link.index == index)
}
