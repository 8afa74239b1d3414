//! Watches a network namespace for changes and observes its state.

use std::{
    future::poll_fn,
    io,
    net::IpAddr,
    os::fd::AsFd,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use netlink_sys::{AsyncSocket as _, SocketAddr, TokioSocket, protocols::NETLINK_ROUTE};
use nix::errno::Errno;
use plan::nodenetwork::KernelState;
use tokio::{runtime::Handle, sync::Mutex, task, time::timeout};

use crate::{Error, message, namespace, netlink::Netlink};

/// `RTMGRP_LINK | RTMGRP_NEIGH | RTMGRP_IPV4_IFADDR | RTMGRP_IPV4_ROUTE | RTMGRP_IPV6_IFADDR | RTMGRP_IPV6_ROUTE`, and
/// `RTNLGRP_NEXTHOP`, which a kernel without nexthop objects ignores.
const GROUPS: u32 = 0x1 | 0x4 | 0x10 | 0x40 | 0x100 | 0x400 | 1 << 31;
/// Bounds one call, so that a storm of events cannot block it forever.
const MAX_EVENTS_PER_CALL: usize = 4096;
const OBSERVE_TIMEOUT: Duration = Duration::from_secs(10);
/// Each event is one message. The start of a longer one is enough.
const BUFFER_SIZE: usize = 8 * 1024;

/// Watches the links, addresses and default routes of one network namespace.
///
/// Events wait in the socket's bounded receive buffer. The kernel reports events that do not fit as one overrun.
pub struct Monitor {
    events: TokioSocket,
    netlink: Arc<Mutex<Netlink>>,
}

/// The changes since the last call of [`Monitor::changed`]. Observe again to learn what changed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LinkChanges {
    /// The number of relevant events.
    pub events: u64,
    /// How often the kernel dropped events.
    pub overruns: u64,
}

impl Monitor {
    /// Watches the network namespace of the calling thread. Must be called inside a tokio runtime.
    pub fn open() -> Result<Self, Error> {
        let mut events = TokioSocket::new(NETLINK_ROUTE).map_err(Error::Open)?;
        events.socket_mut().bind(&SocketAddr::new(0, GROUPS)).map_err(Error::Open)?;
        Ok(Self { events, netlink: Arc::new(Mutex::new(Netlink::open()?)) })
    }

    /// Watches another network namespace. Must be called inside a tokio runtime.
    pub fn open_in(namespace: impl AsFd) -> Result<Self, Error> {
        let runtime = Handle::current();
        namespace::within(namespace, || {
            let _entered = runtime.enter();
            Self::open()
        })?
    }

    /// Waits for a change and consumes all queued events. Cancel safe: no event is lost.
    pub async fn changed(&self) -> Result<LinkChanges, Error> {
        loop {
            let drained = poll_fn(|context| self.drain(context)).await;
            match drained.map_err(|source| Error::Receive { what: "watch links", source })? {
                LinkChanges { events: 0, overruns: 0 } => {}
                changed => return Ok(changed),
            }
        }
    }

    fn drain(&self, context: &mut Context<'_>) -> Poll<io::Result<LinkChanges>> {
        let mut changed = LinkChanges::default();
        let mut buffer = [0; BUFFER_SIZE];
        for read in 0..MAX_EVENTS_PER_CALL {
            let mut rest = buffer.as_mut_slice();
            let received = self.events.poll_recv(context, &mut rest);
            let length = BUFFER_SIZE - rest.len();
            match received {
                Poll::Pending if read == 0 => return Poll::Pending,
                Poll::Pending => break,
                Poll::Ready(Ok(())) => changed.events += count_relevant(&buffer[..length]),
                Poll::Ready(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Poll::Ready(Err(error)) if error.raw_os_error() == Some(Errno::ENOBUFS as i32) => {
                    changed.overruns += 1;
                }
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
            }
        }
        Poll::Ready(Ok(changed))
    }

    /// The current state of the kernel.
    pub async fn observe(&self) -> Result<KernelState, Error> {
        self.query(Netlink::observe).await
    }

    /// The links that routes to these addresses use.
    pub async fn route_links(&self, addresses: Vec<IpAddr>) -> Result<Vec<u32>, Error> {
        self.query(move |netlink| netlink.route_links(&addresses)).await
    }

    async fn query<T: Send + 'static>(
        &self,
        query: impl FnOnce(&mut Netlink) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let netlink = Arc::clone(&self.netlink);
        let answer = async {
            // A query that timed out holds the lock until the kernel answers: there is never a second thread.
            let mut netlink = netlink.lock_owned().await;
            // On a blocking thread: the kernel answers under the RTNL lock, which can be held for long on a busy node.
            task::spawn_blocking(move || query(&mut netlink)).await.map_err(|_| Error::RuntimeStopped)?
        };
        timeout(OBSERVE_TIMEOUT, answer).await.unwrap_or(Err(Error::Deadline { limit: OBSERVE_TIMEOUT }))
    }
}

/// Counts the messages that can change the observed state. A truncated message counts.
fn count_relevant(datagram: &[u8]) -> u64 {
    let mut messages = message::parse_messages(datagram).peekable();
    if messages.peek().is_none() {
        return 1;
    }
    messages.map(|message| u64::from(message::affects_observed(&message))).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn observe_times_out_and_never_uses_a_second_thread() {
        let monitor = Monitor::open().unwrap();
        // Another observation waits for the kernel.
        let stuck = Arc::clone(&monitor.netlink).lock_owned().await;
        for _ in 0..3 {
            let error = monitor.observe().await.unwrap_err();
            assert!(matches!(error, Error::Deadline { .. }), "{error}");
        }
        // No thread waits for the lock: only the monitor and the stuck observation hold the socket.
        assert_eq!(Arc::strong_count(&monitor.netlink), 2);
        drop(stuck);
        assert!(!monitor.observe().await.unwrap().links.is_empty());
    }
}
