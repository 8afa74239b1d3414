//! The two listeners: health in the clear, admission and metrics over TLS.

#[cfg(test)]
mod tests;

use std::{
    io,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use axum_server::{Handle, Server, tls_rustls::RustlsConfig};
use hyper_util::rt::TokioTimer;
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;

use crate::{admission, cache::ClusterCache, connection::Limited, metrics::Metrics};

/// A client that does not even finish its headers is let go.
const SLOWEST_HEADERS: Duration = Duration::from_secs(10);

/// Whether this replica should be sent requests.
#[derive(Debug, Default)]
pub struct Readiness {
    synced: AtomicBool,
    certificate: AtomicBool,
    draining: AtomicBool,
}

/// What the handlers know.
pub struct Replica {
    pub readiness: Arc<Readiness>,
    pub metrics: Arc<Metrics>,
    pub cluster: ClusterCache,
    /// Room for bodies that are read and judged: bounds the memory that any number of requests can take.
    pub bodies: Semaphore,
}

impl Replica {
    pub fn new(readiness: Arc<Readiness>, metrics: Arc<Metrics>, cluster: ClusterCache) -> Self {
        Self { readiness, metrics, cluster, bodies: Semaphore::new(admission::MOST_BODIES) }
    }
}

impl Readiness {
    pub fn synced(&self) {
        self.synced.store(true, Ordering::Relaxed);
    }

    pub fn is_synced(&self) -> bool {
        self.synced.load(Ordering::Relaxed)
    }

    pub fn has_certificate(&self) {
        self.certificate.store(true, Ordering::Relaxed);
    }

    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Ready, or why not.
    pub fn state(&self) -> Result<(), &'static str> {
        if self.draining.load(Ordering::Relaxed) {
            Err("shutting down")
        } else if !self.is_synced() {
            Err("the caches are not filled yet")
        } else if !self.certificate.load(Ordering::Relaxed) {
            Err("no webhook certificate yet")
        } else {
            Ok(())
        }
    }
}

/// What the plain listener serves.
pub fn health_router(readiness: Arc<Readiness>) -> Router {
    Router::new().route("/healthz", get(async || "ok\n")).route("/readyz", get(ready)).with_state(readiness)
}

async fn ready(State(readiness): State<Arc<Readiness>>) -> Response {
    match readiness.state() {
        Ok(()) => "ok\n".into_response(),
        Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")).into_response(),
    }
}

/// What the TLS listener serves.
pub fn router(replica: Arc<Replica>) -> Router {
    Router::new().route("/metrics", get(metrics)).merge(admission::router()).with_state(replica)
}

async fn metrics(State(replica): State<Arc<Replica>>) -> Response {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    match replica.metrics.text() {
        Ok(text) => ([(header::CONTENT_TYPE, kind)], text).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// Opens a listener. Where the kernel has no IPv6, "any address" means any IPv4 address.
pub fn listen(addr: SocketAddr) -> io::Result<TcpListener> {
    let listener = match TcpListener::bind(addr) {
        Err(_) if addr.is_ipv6() && addr.ip().is_unspecified() && TcpListener::bind("[::1]:0").is_err() => {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, addr.port()))
        }
        other => other,
    }?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Serves in the clear until the handle says stop.
pub async fn serve_plain(
    listener: TcpListener,
    router: Router,
    handle: Handle<SocketAddr>,
) -> io::Result<()> {
    // HTTP/1 only: an HTTP/2 connection that has not sent its preface yet has no deadline.
    let mut server = axum_server::from_tcp(listener)?.handle(handle).http1_only();
    limit(&mut server);
    server.serve(router.into_make_service()).await
}

/// Serves over TLS as soon as there is a certificate, until the handle says stop.
pub async fn serve_tls(
    listener: TcpListener,
    router: Router,
    handle: Handle<SocketAddr>,
    certificate: impl Future<Output = Option<RustlsConfig>>,
) -> io::Result<()> {
    let Some(tls) = certificate.await else {
        return Ok(());
    };
    let mut server = axum_server::from_tcp_rustls(listener, tls)?.map(Limited::new).handle(handle);
    limit(&mut server);
    server.serve(router.into_make_service()).await
}

/// The first certificate, or nothing if the replica closes before there is one.
pub async fn first_certificate(
    mut tls: watch::Receiver<Option<RustlsConfig>>,
    close: CancellationToken,
) -> Option<RustlsConfig> {
    close.run_until_cancelled(tls.wait_for(Option::is_some)).await?.ok()?.clone()
}

fn limit<A>(server: &mut Server<SocketAddr, A>) {
    server.http_builder().http1().timer(TokioTimer::new()).header_read_timeout(SLOWEST_HEADERS);
    server.http_builder().http2().timer(TokioTimer::new());
}
