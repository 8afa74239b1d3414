//! Connections to the TLS listener: so many at a time, and none that stays silent.

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
const MOST: usize = 256;

/// HTTP/2 is told from HTTP/1 by its first 24 bytes; until then no other deadline runs.
const PREFACE: usize = 24;

/// How long a new connection may take for them.
const FIRST_SILENCE: Duration = Duration::from_secs(10);

/// How long a connection may say nothing afterwards. API servers close idle ones after 90 s, or ping every 30 s: none of theirs is cut.
const LATER_SILENCE: Duration = Duration::from_mins(2);

/// An acceptor that limits what another one accepts.
#[derive(Clone)]
pub struct Limited<A> {
    inner: A,
    room: Arc<Semaphore>,
}

impl<A> Limited<A> {
    pub fn new(inner: A) -> Self {
        Self { inner, room: Arc::new(Semaphore::new(MOST)) }
    }
}

impl<A, I, S> Accept<I, S> for Limited<A>
where
    A: Accept<I, S>,
    A::Future: Send + 'static,
    A::Stream: Send,
    A::Service: Send,
{
    type Stream = Connection<A::Stream>;
    type Service = A::Service;
    type Future = BoxFuture<'static, io::Result<(Self::Stream, Self::Service)>>;

    fn accept(&self, stream: I, service: S) -> Self::Future {
        let room = self.room.clone().try_acquire_owned();
        let accepted = self.inner.accept(stream, service);
        async move {
            let room = room.map_err(|_| io::Error::other("too many connections"))?;
            let (stream, service) = accepted.await?;
            Ok((Connection::new(stream, room), service))
        }
        .boxed()
    }
}

/// A connection that fails when nothing is heard on it for too long.
pub struct Connection<T> {
    stream: T,
    heard: usize,
    silence: Pin<Box<Sleep>>,
    _room: OwnedSemaphorePermit,
}

impl<T> Connection<T> {
    fn new(stream: T, room: OwnedSemaphorePermit) -> Self {
        Self { stream, heard: 0, silence: Box::pin(tokio::time::sleep(FIRST_SILENCE)), _room: room }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Connection<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        if let Poll::Ready(result) = Pin::new(&mut self.stream).poll_read(cx, buf) {
            self.heard = self.heard.saturating_add(buf.filled().len() - before);
            if self.heard >= PREFACE {
                self.silence.as_mut().reset(Instant::now() + LATER_SILENCE);
            }
            return Poll::Ready(result);
        }
        ready!(self.silence.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Connection<T> {
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
        acceptor: &Limited<DefaultAcceptor>,
    ) -> io::Result<(DuplexStream, Connection<DuplexStream>)> {
        let (far, near) = duplex(64);
        let (near, ()) = acceptor.accept(near, ()).await?;
        Ok((far, near))
    }

    #[tokio::test]
    async fn one_connection_too_many_is_turned_away_until_another_ends() {
        let acceptor = Limited::new(DefaultAcceptor);
        let mut open = Vec::new();
        for _ in 0..MOST {
            open.push(accept(&acceptor).await.unwrap());
        }
        assert!(accept(&acceptor).await.is_err());
        open.pop();
        assert!(accept(&acceptor).await.is_ok());
    }

    async fn silence(near: &mut Connection<DuplexStream>) -> (io::ErrorKind, u64) {
        let begun = Instant::now();
        let error = near.read_u8().await.unwrap_err();
        (error.kind(), begun.elapsed().as_secs())
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_connection_is_cut_soon_at_first_and_later_when_it_has_spoken() {
        let acceptor = Limited::new(DefaultAcceptor);
        let (_far, mut near) = accept(&acceptor).await.unwrap();
        assert_eq!(silence(&mut near).await, (io::ErrorKind::TimedOut, 10));
        let (mut far, mut near) = accept(&acceptor).await.unwrap();
        far.write_all(b"PRI").await.unwrap();
        near.read_exact(&mut [0; 3]).await.unwrap();
        tokio::time::advance(Duration::from_secs(5)).await;
        assert_eq!(silence(&mut near).await, (io::ErrorKind::TimedOut, 5));
        let (mut far, mut near) = accept(&acceptor).await.unwrap();
        for _ in 0..3 {
            far.write_all(&[b'x'; PREFACE]).await.unwrap();
            near.read_exact(&mut [0; PREFACE]).await.unwrap();
            tokio::time::advance(Duration::from_secs(100)).await;
        }
        assert_eq!(silence(&mut near).await, (io::ErrorKind::TimedOut, 20));
    }
}
