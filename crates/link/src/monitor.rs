//! Word of changes, and a look at everything.

use std::{
    future::poll_fn,
    io,
    os::fd::AsFd,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use netlink_sys::{AsyncSocket as _, SocketAddr, TokioSocket, protocols::NETLINK_ROUTE};
use nix::errno::Errno;
use plan::nodenetwork::KernelState;
use tokio::{runtime::Handle, sync::Mutex, task, time::timeout};

use crate::{Error, dump::Asker, message, namespace};

/// `RTMGRP_LINK | RTMGRP_NEIGH | RTMGRP_IPV4_IFADDR | RTMGRP_IPV4_ROUTE | RTMGRP_IPV6_IFADDR | RTMGRP_IPV6_ROUTE`, and
/// `RTNLGRP_NEXTHOP`, which a kernel that knows no nexthops ignores.
const GROUPS: u32 = 0x1 | 0x4 | 0x10 | 0x40 | 0x100 | 0x400 | 1 << 31;
/// How many events one call reads at most, so that a storm cannot keep it for ever.
const BATCH: usize = 4096;
/// How long one look may take.
const LOOK: Duration = Duration::from_secs(10);
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
    pub async fn observe(&self) -> Result<KernelState, Error> {
        let asker = Arc::clone(&self.asker);
        let look = async {
            // Held by a look that was given up until the kernel lets go of it: there is never a second thread.
            let mut asker = asker.lock_owned().await;
            // The kernel answers under a lock that a busy node holds for long: not on a thread of the runtime.
            task::spawn_blocking(move || asker.observe()).await.map_err(|_| Error::Stopped)?
        };
        timeout(LOOK, look).await.unwrap_or(Err(Error::Deadline { limit: LOOK }))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_kernel_that_does_not_answer_is_given_up_and_asked_by_one_thread_only() {
        let monitor = Monitor::open().unwrap();
        // Another look waits for the kernel.
        let stuck = Arc::clone(&monitor.asker).lock_owned().await;
        for _ in 0..3 {
            let error = monitor.observe().await.unwrap_err();
            assert!(matches!(error, Error::Deadline { .. }), "{error}");
        }
        // No thread waits for its turn: the asker is the monitor's and the stuck look's.
        assert_eq!(Arc::strong_count(&monitor.asker), 2);
        drop(stuck);
        assert!(!monitor.observe().await.unwrap().links.is_empty());
    }
}
