//! Word of changes, and a look at everything.

use std::{
    future::poll_fn,
    io,
    os::fd::AsFd,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
};

use netlink_sys::{AsyncSocket as _, SocketAddr, TokioSocket, protocols::NETLINK_ROUTE};
use nix::errno::Errno;
use plan::nodenetwork::Observed;
use tokio::{runtime::Handle, task};

use crate::{Error, dump::Asker, message, namespace};

/// `RTMGRP_LINK | RTMGRP_IPV4_IFADDR | RTMGRP_IPV4_ROUTE | RTMGRP_IPV6_IFADDR | RTMGRP_IPV6_ROUTE`
const GROUPS: u32 = 0x1 | 0x10 | 0x40 | 0x100 | 0x400;
/// How many events one call reads at most, so that a storm cannot keep it for ever.
const BATCH: usize = 4096;
/// An event is one message; of a longer one the beginning is enough.
const BUFFER: usize = 8 * 1024;

/// The links, addresses and default routes of one network namespace.
///
/// The queue of events is the kernel's own: it is bounded, and what does not fit is told as one overrun.
pub struct Monitor {
    events: TokioSocket,
    asker: Arc<Mutex<Asker>>,
}

/// Something changed; look at everything.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Changed {
    /// The events that told so.
    pub events: u64,
    /// How often the kernel had to throw events away.
    pub overruns: u64,
}

impl Monitor {
    /// Watches the network namespace of this thread. Must be called inside a tokio runtime.
    pub fn open() -> Result<Self, Error> {
        let mut events = TokioSocket::new(NETLINK_ROUTE).map_err(Error::Open)?;
        events.socket_mut().bind(&SocketAddr::new(0, GROUPS)).map_err(Error::Open)?;
        Ok(Self { events, asker: Arc::new(Mutex::new(Asker::open()?)) })
    }

    /// Watches another network namespace. Must be called inside a tokio runtime.
    pub fn open_in(namespace: impl AsFd) -> Result<Self, Error> {
        let runtime = Handle::current();
        namespace::within(namespace, || {
            let _entered = runtime.enter();
            Self::open()
        })?
    }

    /// Waits until something changed, and takes all events that are there. May be dropped at any time: nothing is lost.
    pub async fn changed(&self) -> Result<Changed, Error> {
        loop {
            let drained = poll_fn(|context| self.drain(context)).await;
            match drained.map_err(|source| Error::Read { what: "events", source })? {
                Changed { events: 0, overruns: 0 } => {}
                changed => return Ok(changed),
            }
        }
    }

    fn drain(&self, context: &mut Context<'_>) -> Poll<io::Result<Changed>> {
        let mut changed = Changed::default();
        let mut buffer = [0; BUFFER];
        for read in 0..BATCH {
            let mut rest = buffer.as_mut_slice();
            let received = self.events.poll_recv(context, &mut rest);
            let length = BUFFER - rest.len();
            match received {
                Poll::Pending if read == 0 => return Poll::Pending,
                Poll::Pending => break,
                Poll::Ready(Ok(())) => changed.events += count(&buffer[..length]),
                Poll::Ready(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Poll::Ready(Err(error)) if error.raw_os_error() == Some(Errno::ENOBUFS as i32) => {
                    changed.overruns += 1;
                }
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
            }
        }
        Poll::Ready(Ok(changed))
    }

    /// What the kernel has now.
    pub async fn observe(&self) -> Result<Observed, Error> {
        let asker = Arc::clone(&self.asker);
        // The kernel answers under a lock that a busy node holds for long: not on a thread of the runtime.
        let look =
            task::spawn_blocking(move || asker.lock().unwrap_or_else(PoisonError::into_inner).observe());
        look.await.map_err(|_| Error::Stopped)?
    }
}

/// How many of the messages can change what is looked at. One that is cut off counts.
fn count(datagram: &[u8]) -> u64 {
    let mut messages = message::messages(datagram).peekable();
    if messages.peek().is_none() {
        return 1;
    }
    messages.map(|message| u64::from(message::matters(&message))).sum()
}
