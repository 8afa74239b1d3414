//! Watches the links of all network namespaces of a node through one socket in the host's namespace.
//!
//! The kernel delivers the events of each namespace that has an ID in the namespace of the socket
//! (`NETLINK_LISTEN_ALL_NSID`, needs the capability NET_BROADCAST). No socket is opened in a pod's namespace: it would keep
//! the namespace alive after the pod.

use std::{
    io::{self, IoSliceMut},
    os::fd::{AsFd, AsRawFd as _},
    sync::{Mutex, PoisonError},
};

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};
use nix::{
    cmsg_space,
    errno::Errno,
    libc::{NETLINK_LISTEN_ALL_NSID, SOL_NETLINK},
    sys::socket::{ControlMessageOwned, MsgFlags, NetlinkAddr, RecvMsg, recvmsg, setsockopt, sockopt},
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    runtime::Handle,
};

use crate::{
    Error,
    message::{self, LinkEvent},
    namespace,
    netlink::Netlink,
    nsid,
};

/// `RTMGRP_LINK` and `RTNLGRP_NSID`
const GROUPS: u32 = 0x1 | 1 << 27;
/// How many events are handled at once.
const BATCH: usize = 4096;
/// Bounds one call, so that a storm of events cannot block it forever. More than the receive buffer holds.
const MAX_BATCHES_PER_CALL: usize = 8;
/// Each event is one message of about 2 KiB. A device with many virtual functions has longer ones, which are truncated.
const BUFFER_SIZE: usize = 16 * 1024;
/// Holds a few thousand events, for example of all pods of a node that end at once.
const RECEIVE_BUFFER: usize = 8 * 1024 * 1024;

/// Watches the links of all network namespaces.
///
/// Events wait in the socket's bounded receive buffer. The kernel reports events that do not fit as one overrun.
pub struct NamespaceLinkMonitor {
    events: AsyncFd<Socket>,
    /// Held from receiving events until they are handled.
    handling: Mutex<()>,
    netlink: Mutex<Netlink>,
}

/// A change of a link, or of the namespaces themselves.
///
/// `nsid` is the ID of the link's namespace ([`NamespaceLinkMonitor::nsid`]), or None for the namespace of the monitor. The
/// kernel assigns the ID of a destroyed namespace again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NamespaceLinkEvent {
    /// The link left its namespace.
    ///
    /// `moved`: it was moved to another namespace and exists there. If it is deleted there, no event follows unless that
    /// namespace also has an ID. For a veth, the removal of its host end follows then.
    Removed { nsid: Option<i32>, index: u32, moved: bool },
    /// The link was created, moved here, renamed or changed.
    Changed { nsid: Option<i32>, index: u32 },
    /// The namespace is being destroyed. Its ID is free; its links vanish without events.
    NamespaceRemoved { nsid: i32 },
    /// The kernel dropped events: look at every namespace again.
    Overrun,
}

impl NamespaceLinkMonitor {
    /// Watches from the network namespace of the calling thread. Must be called inside a tokio runtime.
    pub fn open() -> Result<Self, Error> {
        let mut events = Socket::new(NETLINK_ROUTE).map_err(Error::Open)?;
        events.set_non_blocking(true).map_err(Error::Open)?;
        // Without NET_ADMIN, the largest buffer that net.core.rmem_max allows.
        if setsockopt(&events, sockopt::RcvBufForce, &RECEIVE_BUFFER).is_err() {
            _ = setsockopt(&events, sockopt::RcvBuf, &RECEIVE_BUFFER);
        }
        // Before the bind, so that the first event already has its ID.
        events.set_listen_all_namespaces(true).map_err(Error::AllNamespaces)?;
        events.bind(&SocketAddr::new(0, GROUPS)).map_err(Error::Open)?;
        Ok(Self {
            events: register(events)?,
            handling: Mutex::default(),
            netlink: Mutex::new(Netlink::open()?),
        })
    }

    /// Watches from another network namespace. Must be called inside a tokio runtime.
    pub fn open_in(namespace: impl AsFd) -> Result<Self, Error> {
        let runtime = Handle::current();
        namespace::within(namespace, || {
            let _entered = runtime.enter();
            Self::open()
        })?
    }

    /// The ID of a namespace, for as long as the namespace exists. Assigns one if it has none: events arrive only from
    /// namespaces that have one. Observe the links after this call. Does not keep the namespace alive.
    pub fn nsid(&self, namespace: impl AsFd) -> Result<i32, Error> {
        let mut netlink = self.netlink.lock().unwrap_or_else(PoisonError::into_inner);
        nsid::find_or_assign(&mut netlink, namespace)
    }

    /// Waits for events and passes all queued ones to `handle`. Cancel safe: no event is lost.
    pub async fn wait(&self, mut handle: impl FnMut(&[NamespaceLinkEvent])) -> Result<(), Error> {
        loop {
            let mut ready = self.events.readable().await.map_err(failed)?;
            let mut handled = false;
            let drained = ready.try_io(|socket| {
                let (events, end) = self.receive_queued(socket.get_ref(), &mut handle);
                handled = events > 0;
                end
            });
            // The error at the end of the queue makes the runtime wait.
            if let Ok(Err(source)) = drained {
                return Err(failed(source));
            }
            if handled {
                return Ok(());
            }
        }
    }

    /// Passes all queued events to `handle` without waiting.
    ///
    /// The kernel queues the event of a removal before it releases the lock that a list of links also takes. So, if a list
    /// does not contain a link, the event that says why was handled when this call returns, here or by [`Self::wait`].
    pub fn handle_queued(&self, mut handle: impl FnMut(&[NamespaceLinkEvent])) -> Result<(), Error> {
        match self.receive_queued(self.events.get_ref(), &mut handle).1 {
            Err(source) if source.kind() != io::ErrorKind::WouldBlock => Err(failed(source)),
            _ => Ok(()),
        }
    }

    /// Handles the queued events. Returns their number, and the error at the end of the queue if it was reached.
    fn receive_queued(
        &self,
        socket: &Socket,
        handle: &mut impl FnMut(&[NamespaceLinkEvent]),
    ) -> (usize, io::Result<()>) {
        let _handling = self.handling.lock().unwrap_or_else(PoisonError::into_inner);
        let mut count = 0;
        for _ in 0..MAX_BATCHES_PER_CALL {
            let mut events = Vec::new();
            let drained = drain(socket, &mut events);
            count += events.len();
            if !events.is_empty() {
                handle(&events);
            }
            if drained.is_err() {
                return (count, drained);
            }
        }
        (count, Ok(()))
    }
}

fn failed(source: io::Error) -> Error {
    Error::Receive { what: "watch links", source }
}

/// Registers the socket with the runtime.
#[expect(
    deprecated,
    reason = "its replacement is unsafe; a netlink_sys socket owns its descriptor and never changes it, which is what that one \
              asks for"
)]
fn register(socket: Socket) -> Result<AsyncFd<Socket>, Error> {
    AsyncFd::with_interest(socket, Interest::READABLE).map_err(Error::Open)
}

fn drain(socket: &Socket, events: &mut Vec<NamespaceLinkEvent>) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_SIZE];
    let mut control = cmsg_space!(i32);
    for _ in 0..BATCH {
        let event = match receive(socket, &mut buffer, &mut control) {
            Ok(event) => event,
            Err(Errno::EINTR) => None,
            Err(Errno::ENOBUFS) => Some(NamespaceLinkEvent::Overrun),
            Err(errno) => return Err(errno.into()),
        };
        // A new link sends several events at once.
        if event.is_some() && event != events.last().copied() {
            events.extend(event);
        }
    }
    Ok(())
}

/// Receives one datagram. None if it does not matter.
fn receive(
    socket: &Socket,
    buffer: &mut [u8],
    control: &mut [u8],
) -> Result<Option<NamespaceLinkEvent>, Errno> {
    let mut slices = [IoSliceMut::new(buffer)];
    let received =
        recvmsg::<NetlinkAddr>(socket.as_raw_fd(), &mut slices, Some(control), MsgFlags::MSG_DONTWAIT)?;
    if received.address.is_none_or(|from| from.pid() != 0) {
        return Ok(None);
    }
    let (length, nsid) = (received.bytes, sender_nsid(&received)?);
    let Some(message) = buffer.get(..length).and_then(message::parse_event) else { return Ok(None) };
    Ok(match (message.kind, message::parse_link_event(&message)) {
        (_, Some(LinkEvent::Changed { index })) => Some(NamespaceLinkEvent::Changed { nsid, index }),
        (_, Some(LinkEvent::Removed { index, moved })) => {
            Some(NamespaceLinkEvent::Removed { nsid, index, moved })
        }
        // The IDs of the monitor's namespace, not those that other namespaces use.
        (nsid::DELETE_NSID, None) if nsid.is_none() => {
            message::parse_nsid(message.body).map(|nsid| NamespaceLinkEvent::NamespaceRemoved { nsid })
        }
        _ => None,
    })
}

/// The ID of the namespace that an event comes from. None for the namespace of the socket.
fn sender_nsid(received: &RecvMsg<'_, '_, NetlinkAddr>) -> Result<Option<i32>, Errno> {
    Ok(received.cmsgs()?.find_map(|control| match control {
        ControlMessageOwned::Unknown(control)
            if (control.cmsg_header.cmsg_level, control.cmsg_header.cmsg_type)
                == (SOL_NETLINK, NETLINK_LISTEN_ALL_NSID) =>
        {
            control.data_bytes.first_chunk().map(|bytes| i32::from_ne_bytes(*bytes))
        }
        _ => None,
    }))
}
