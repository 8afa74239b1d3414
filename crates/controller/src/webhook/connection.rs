//! Limits on connections to the TLS listener: how many there are, and how long one may be idle.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use axum_server::accept::Accept;
use futures::{FutureExt, future::BoxFuture};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, Sleep},
};

/// More than all API servers and scrapers of a cluster need.
const MAX_CONNECTIONS: usize = 256;

/// The HTTP/2 preface, which distinguishes it from HTTP/1; until it has arrived, no other timeout applies.
const PREFACE_BYTES: usize = 24;

/// How long a new connection may take to send them.
const PREFACE_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a connection may be idle afterwards. API servers close idle connections after 90 s or ping every 30 s, so
/// none of theirs is cut.
const IDLE_TIMEOUT: Duration = Duration::from_mins(2);

/// An acceptor that limits the connections of an inner one.
#[derive(Clone)]
pub struct LimitedAcceptor<A> {
    inner: A,
    permits: Arc<Semaphore>,
}

impl<A> LimitedAcceptor<A> {
    pub fn new(inner: A) -> Self {
        Self { inner, permits: Arc::new(Semaphore::new(MAX_CONNECTIONS)) }
    }
}

impl<A, I, S> Accept<I, S> for LimitedAcceptor<A>
where
    A: Accept<I, S>,
    A::Future: Send + 'static,
    A::Stream: Send,
    A::Service: Send,
{
    type Stream = IdleTimeoutStream<A::Stream>;
    type Service = A::Service;
    type Future = BoxFuture<'static, io::Result<(Self::Stream, Self::Service)>>;

    fn accept(&self, stream: I, service: S) -> Self::Future {
        let permit = self.permits.clone().try_acquire_owned();
        let accepted = self.inner.accept(stream, service);
        async move {
            let permit = permit.map_err(|_| io::Error::other("too many connections"))?;
            let (stream, service) = accepted.await?;
            Ok((IdleTimeoutStream::new(stream, permit), service))
        }
        .boxed()
    }
}

/// A connection that fails when it is idle for too long.
pub struct IdleTimeoutStream<T> {
    stream: T,
    bytes_read: usize,
    idle_timer: Pin<Box<Sleep>>,
    _permit: OwnedSemaphorePermit,
}

impl<T> IdleTimeoutStream<T> {
    fn new(stream: T, permit: OwnedSemaphorePermit) -> Self {
        Self {
            stream,
            bytes_read: 0,
            idle_timer: Box::pin(tokio::time::sleep(PREFACE_TIMEOUT)),
            _permit: permit,
        }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for IdleTimeoutStream<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        if let Poll::Ready(result) = Pin::new(&mut self.stream).poll_read(cx, buf) {
            self.bytes_read = self.bytes_read.saturating_add(buf.filled().len() - before);
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
    use axum_server::accept::DefaultAcceptor;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

    use super::*;

    async fn accept(
        acceptor: &LimitedAcceptor<DefaultAcceptor>,
    ) -> io::Result<(DuplexStream, IdleTimeoutStream<DuplexStream>)> {
        let (client, server) = duplex(64);
        let (server, ()) = acceptor.accept(server, ()).await?;
        Ok((client, server))
    }

    #[tokio::test]
    async fn a_connection_above_the_limit_is_rejected_until_another_ends() {
        let acceptor = LimitedAcceptor::new(DefaultAcceptor);
        let mut open = Vec::new();
        for _ in 0..MAX_CONNECTIONS {
            open.push(accept(&acceptor).await.unwrap());
        }
        assert!(accept(&acceptor).await.is_err());
        open.pop();
        assert!(accept(&acceptor).await.is_ok());
    }

    async fn idle_timeout(server: &mut IdleTimeoutStream<DuplexStream>) -> (io::ErrorKind, u64) {
        let start = Instant::now();
        let error = server.read_u8().await.unwrap_err();
        (error.kind(), start.elapsed().as_secs())
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_connection_times_out_sooner_before_its_preface_than_after() {
        let acceptor = LimitedAcceptor::new(DefaultAcceptor);
        let (_client, mut server) = accept(&acceptor).await.unwrap();
        assert_eq!(idle_timeout(&mut server).await, (io::ErrorKind::TimedOut, 10));
        let (mut client, mut server) = accept(&acceptor).await.unwrap();
        client.write_all(b"PRI").await.unwrap();
        server.read_exact(&mut [0; 3]).await.unwrap();
        tokio::time::advance(Duration::from_secs(5)).await;
        assert_eq!(idle_timeout(&mut server).await, (io::ErrorKind::TimedOut, 5));
        let (mut client, mut server) = accept(&acceptor).await.unwrap();
        for _ in 0..3 {
            client.write_all(&[b'x'; PREFACE_BYTES]).await.unwrap();
            server.read_exact(&mut [0; PREFACE_BYTES]).await.unwrap();
            tokio::time::advance(Duration::from_secs(100)).await;
        }
        assert_eq!(idle_timeout(&mut server).await, (io::ErrorKind::TimedOut, 20));
    }
}
