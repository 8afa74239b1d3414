//! Deletes a link without waiting for the kernel to free it.

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
    Error, message,
    netlink::Netlink,
    request::{CHANGE, NetlinkRequest, link_header},
};

const DELETE_LINK: u16 = 17;
/// `RTMGRP_LINK`
const LINK_GROUP: u32 = 1;
const BUFFER_SIZE: usize = 8 * 1024;

/// Deletes a link and returns when neither it nor its peer is visible any more.
///
/// The delete request is acknowledged only after an RCU grace period, which takes several times as long as the deletion.
/// A separate thread sends it and waits for the acknowledgement; this function returns on the `RTM_DELLINK` event.
pub fn delete_link(index: u32) -> Result<(), Error> {
    let mut events = Socket::new(NETLINK_ROUTE).map_err(Error::Open)?;
    events.bind(&SocketAddr::new(0, LINK_GROUP)).map_err(Error::Open)?;
    // The thread closes its end when it exits, also by a panic.
    let (exited, exit_guard) = UnixStream::pair().map_err(Error::Open)?;
    let thread = thread::Builder::new().name("unlink".to_owned()).spawn(move || {
        let _guard = exit_guard;
        let request = NetlinkRequest::new(DELETE_LINK, CHANGE, &link_header(index, 0, 0));
        Netlink::open()?.execute("delete the link", request)
    });
    let thread = thread.map_err(Error::Open)?;
    if wait_for_event(&events, &exited, index)? {
        return Ok(());
    }
    let panicked =
        |_| Error::Send { what: "delete the link", source: io::Error::other("the thread panicked") };
    thread.join().map_err(panicked)?
}

/// Waits for the event that the link was deleted. Returns false if the thread exited first.
fn wait_for_event(events: &Socket, exited: &UnixStream, index: u32) -> Result<bool, Error> {
    let failed = |source: io::Error| Error::Receive { what: "wait for events", source };
    let mut buffer = vec![0; BUFFER_SIZE];
    loop {
        let mut both =
            [PollFd::new(events.as_fd(), PollFlags::POLLIN), PollFd::new(exited.as_fd(), PollFlags::POLLIN)];
        match poll(&mut both, PollTimeout::NONE) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(failed(errno.into())),
        }
        let [event, exit] = both.map(|one| one.any().unwrap_or(false));
        if exit {
            return Ok(false);
        }
        if !event {
            continue;
        }
        match events.recv_from(&mut buffer.as_mut_slice(), MSG_DONTWAIT) {
            Ok((length, from)) if from.port_number() == 0 => {
                let datagram = buffer.get(..length).unwrap_or(&buffer);
                if message::parse_messages(datagram).any(|message| is_deletion_of(&message, index)) {
                    return Ok(true);
                }
            }
            Ok(_) => {}
            // Events were lost, perhaps the one for this link. Then the exit of the thread ends the wait.
            Err(error) if error.raw_os_error() == Some(Errno::ENOBUFS as i32) => {}
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(error) => return Err(failed(error)),
        }
    }
}

fn is_deletion_of(message: &message::NetlinkMessage<'_>, index: u32) -> bool {
    message.kind == DELETE_LINK && message::parse_link(message.body).is_some_and(|link| link.index == index)
}
