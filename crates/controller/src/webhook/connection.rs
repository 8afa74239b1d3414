//! Limits on the connections to a listener: how many there are, and how long one may be idle.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::{Extension, middleware::AddExtension};
use axum_server::accept::Accept;
use futures::{FutureExt, future::BoxFuture};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::{Instant, Sleep, timeout},
};
use tokio_util::sync::WaitForCancellationFutureOwned;
use tower::Layer as _;

use super::slots::{FairSlots, Slot, Source};

/// More than all API servers and scrapers of a cluster need.
const MAX_CONNECTIONS: usize = 128;

/// How long a TLS handshake may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(2);

/// The HTTP/2 preface, which distinguishes it from HTTP/1; until it has arrived, no other timeout applies.
const PREFACE_BYTES: usize = 24;

/// How long a new connection may take to send them.
const PREFACE_TIMEOUT: Duration = Duration::from_secs(2);

/// How long a connection may be idle afterwards. API servers close idle connections after 90 s or ping every 30 s, so
/// none of theirs is cut.
const IDLE_TIMEOUT: Duration = Duration::from_mins(2);

/// An acceptor that limits the connections of an inner one. While there are too many, the source with the most of them loses
/// those that are idle for the longest time. Requests carry the slot of their connection, to settle it while they are
/// answered.
#[derive(Clone)]
pub struct LimitedAcceptor<A> {
    inner: A,
    slots: FairSlots,
}

impl<A> LimitedAcceptor<A> {
    pub fn new(inner: A) -> Self {
        Self { inner, slots: FairSlots::new(MAX_CONNECTIONS, Duration::ZERO) }
    }
}

impl<A, S> Accept<TcpStream, S> for LimitedAcceptor<A>
where
    A: Accept<TcpStream, S>,
    A::Future: Send + 'static,
    A::Stream: Send,
    A::Service: Send,
{
    type Stream = IdleTimeoutStream<A::Stream>;
    type Service = AddExtension<A::Service, Arc<Slot>>;
    type Future = BoxFuture<'static, io::Result<(Self::Stream, Self::Service)>>;

    fn accept(&self, stream: TcpStream, service: S) -> Self::Future {
        let slot = stream.peer_addr().map(|client| self.slots.try_take(&Source::new(client.ip())));
        let accepted = self.inner.accept(stream, service);
        async move {
            let slot = Arc::new(slot?.ok_or_else(|| io::Error::other("too many connections"))?);
            let handshake = slot.lost().run_until_cancelled(timeout(HANDSHAKE_TIMEOUT, accepted)).await;
            let (stream, service) = handshake.ok_or_else(connection_lost)???;
            let service = Extension(Arc::clone(&slot)).layer(service);
            Ok((IdleTimeoutStream::new(stream, slot), service))
        }
        .boxed()
    }
}

fn connection_lost() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, "another client needs the connection")
}

/// A connection that fails when it is idle for too long, or when another client needs its slot.
pub struct IdleTimeoutStream<T> {
    stream: T,
    bytes_read: usize,
    idle_timer: Pin<Box<Sleep>>,
    lost: Pin<Box<WaitForCancellationFutureOwned>>,
    slot: Arc<Slot>,
}

impl<T> IdleTimeoutStream<T> {
    fn new(stream: T, slot: Arc<Slot>) -> Self {
        Self {
            stream,
            bytes_read: 0,
            idle_timer: Box::pin(tokio::time::sleep(PREFACE_TIMEOUT)),
            lost: Box::pin(slot.lost().clone().cancelled_owned()),
            slot,
        }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for IdleTimeoutStream<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.lost.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(connection_lost()));
        }
        let before = buf.filled().len();
        if let Poll::Ready(result) = Pin::new(&mut self.stream).poll_read(cx, buf) {
            self.bytes_read = self.bytes_read.saturating_add(buf.filled().len() - before);
            self.slot.touch();
            if self.bytes_read >= PREFACE_BYTES {
                self.idle_timer.as_mut().reset(Instant::now() + IDLE_TIMEOUT);
            }
            return Poll::Ready(result);
        }
        ready!(self.idle_timer.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for IdleTimeoutStream<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use axum_server::accept::DefaultAcceptor;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::{TcpListener, TcpSocket},
    };

    use super::*;

    /// A client with this address, and the accepted connection.
    async fn accept(
        acceptor: &LimitedAcceptor<DefaultAcceptor>,
        client: u8,
    ) -> io::Result<(TcpStream, IdleTimeoutStream<TcpStream>)> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let socket = TcpSocket::new_v4()?;
        socket.bind((IpAddr::from([127, 0, 0, client]), 0).into())?;
        let (client, server) = tokio::try_join!(socket.connect(listener.local_addr()?), listener.accept())?;
        let (server, _service) = acceptor.accept(server.0, ()).await?;
        Ok((client, server))
    }

    #[tokio::test]
    async fn a_connection_above_the_limit_is_rejected_unless_its_source_has_fewer() {
        let acceptor = LimitedAcceptor::new(DefaultAcceptor);
        let mut open = Vec::new();
        for _ in 0..MAX_CONNECTIONS {
            open.push(accept(&acceptor, 2).await.unwrap());
        }
        assert!(accept(&acceptor, 2).await.is_err(), "the same source");
        let other = accept(&acceptor, 3).await.unwrap();
        let (_, first) = &mut open[0];
        assert_eq!(first.read_u8().await.unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
        drop(other);
        assert!(accept(&acceptor, 2).await.is_ok());
    }

    /// A TLS handshake that never ends.
    #[derive(Clone)]
    struct EndlessHandshake;

    impl Accept<TcpStream, ()> for EndlessHandshake {
        type Stream = TcpStream;
        type Service = ();
        type Future = std::future::Pending<io::Result<(TcpStream, ())>>;

        fn accept(&self, _: TcpStream, (): ()) -> Self::Future {
            std::future::pending()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_handshake_that_does_not_finish_ends_and_frees_its_connection() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let connect = TcpStream::connect(listener.local_addr().unwrap());
        let (_client, server) = tokio::try_join!(connect, listener.accept()).unwrap();
        let acceptor = LimitedAcceptor::new(EndlessHandshake);
        let start = Instant::now();
        let error = acceptor.accept(server.0, ()).await.err().unwrap();
        assert_eq!((error.kind(), start.elapsed().as_secs()), (io::ErrorKind::TimedOut, 2));
        assert_eq!(acceptor.slots.held(), 0);
    }

    async fn idle_timeout(server: &mut IdleTimeoutStream<TcpStream>) -> (io::ErrorKind, u64) {
        let start = Instant::now();
        let error = server.read_u8().await.unwrap_err();
        (error.kind(), start.elapsed().as_secs())
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_connection_times_out_sooner_before_its_preface_than_after() {
        let acceptor = LimitedAcceptor::new(DefaultAcceptor);
        let (_client, mut server) = accept(&acceptor, 1).await.unwrap();
        assert_eq!(idle_timeout(&mut server).await, (io::ErrorKind::TimedOut, 2));
        let (mut client, mut server) = accept(&acceptor, 1).await.unwrap();
        client.write_all(b"PRI").await.unwrap();
        server.read_exact(&mut [0; 3]).await.unwrap();
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(idle_timeout(&mut server).await, (io::ErrorKind::TimedOut, 1));
        let (mut client, mut server) = accept(&acceptor, 1).await.unwrap();
        for _ in 0..3 {
            client.write_all(&[b'x'; PREFACE_BYTES]).await.unwrap();
            server.read_exact(&mut [0; PREFACE_BYTES]).await.unwrap();
            tokio::time::advance(Duration::from_secs(100)).await;
        }
        assert_eq!(idle_timeout(&mut server).await, (io::ErrorKind::TimedOut, 20));
    }
}
