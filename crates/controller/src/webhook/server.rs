//! The two listeners: health over plain HTTP, admission and metrics over TLS.

#[cfg(test)]
pub mod tests;

use std::{
    io,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    sync::{
        Arc, Mutex, PoisonError,
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
use jiff::Timestamp;
use kube::Client;
use plan::claims::ClaimOptions;
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;

use super::{admission, connection::LimitedAcceptor, slots::FairSlots};
use crate::{cache::ClusterCache, metrics::Metrics};

/// How long a client may take to send its headers.
const HEADER_READ_TIMEOUT: Duration = Duration::from_secs(10);

/// How often the claims are counted for `/metrics`, which every pod may read as often as it likes.
const CLAIM_COUNT_INTERVAL: Duration = Duration::from_secs(1);

/// Bounds what a connection can make the replica buffer. Its window has room for all its streams, so that the body of a
/// request that waits holds up no other. API servers open more connections when they need more streams.
const MAX_STREAMS: u32 = 32;
const STREAM_WINDOW_BYTES: u32 = 16 * 1024;
const HTTP1_BUFFER_BYTES: usize = 64 * 1024;

/// Whether this replica is ready to serve requests.
#[derive(Debug, Default)]
pub struct Readiness {
    synced: AtomicBool,
    certificate: AtomicBool,
    draining: AtomicBool,
}

/// The state that the request handlers share.
pub struct WebhookState {
    pub readiness: Arc<Readiness>,
    pub metrics: Arc<Metrics>,
    pub cluster: ClusterCache,
    /// For what the cache does not have.
    pub client: Client,
    pub claims: ClaimOptions,
    /// To read and validate a body: bounds the memory that concurrent requests take.
    pub bodies: FairSlots,
    /// For requests that read what the cache does not have.
    pub live_reads: FairSlots,
    /// To wait for one of these.
    pub live_read_queue: FairSlots,
    claims_counted: Mutex<Option<Instant>>,
}

impl WebhookState {
    pub fn new(
        readiness: Arc<Readiness>,
        metrics: Arc<Metrics>,
        cluster: ClusterCache,
        client: Client,
        claims: ClaimOptions,
    ) -> Self {
        let bodies = FairSlots::new(admission::MAX_CONCURRENT_BODIES, admission::BODY_GRACE);
        let live_reads =
            FairSlots::new(admission::MAX_LIVE_REVIEWS, admission::LIVE_READ_GRACE).of_bounded_work();
        let live_read_queue = FairSlots::new(admission::MAX_WAITING_REVIEWS, Duration::ZERO);
        let claims_counted = Mutex::default();
        Self {
            readiness,
            metrics,
            cluster,
            client,
            claims,
            bodies,
            live_reads,
            live_read_queue,
            claims_counted,
        }
    }
}

impl WebhookState {
    /// Updates the metrics that count claims, once per [`CLAIM_COUNT_INTERVAL`].
    fn count_claims(&self) {
        let mut counted = self.claims_counted.lock().unwrap_or_else(PoisonError::into_inner);
        if counted.is_none_or(|at| at.elapsed() >= CLAIM_COUNT_INTERVAL) {
            self.metrics.set_claims(&self.cluster.claims().totals(Timestamp::now()));
            *counted = Some(Instant::now());
        }
    }
}

impl Readiness {
    pub fn set_synced(&self) {
        self.synced.store(true, Ordering::Relaxed);
    }

    pub fn is_synced(&self) -> bool {
        self.synced.load(Ordering::Relaxed)
    }

    pub fn set_certificate_loaded(&self) {
        self.certificate.store(true, Ordering::Relaxed);
    }

    pub fn set_draining(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Ready, or why not.
    pub fn check(&self) -> Result<(), &'static str> {
        if self.draining.load(Ordering::Relaxed) {
            Err("shutting down")
        } else if !self.is_synced() {
            Err("caches not synced")
        } else if !self.certificate.load(Ordering::Relaxed) {
            Err("no webhook certificate loaded")
        } else {
            Ok(())
        }
    }
}

/// The routes of the plain listener.
pub fn health_router(readiness: Arc<Readiness>) -> Router {
    Router::new().route("/healthz", get(async || "ok\n")).route("/readyz", get(ready)).with_state(readiness)
}

async fn ready(State(readiness): State<Arc<Readiness>>) -> Response {
    match readiness.check() {
        Ok(()) => "ok\n".into_response(),
        Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")).into_response(),
    }
}

/// The routes of the TLS listener.
pub fn router(state: Arc<WebhookState>) -> Router {
    Router::new().route("/metrics", get(metrics)).merge(admission::router()).with_state(state)
}

async fn metrics(State(state): State<Arc<WebhookState>>) -> Response {
    let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    state.count_claims();
    match state.metrics.text() {
        Ok(text) => ([(header::CONTENT_TYPE, content_type)], text).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// Opens a listener. If the kernel has no IPv6, the unspecified address means any IPv4 address.
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

/// Serves plain HTTP until the handle shuts it down.
pub async fn serve_plain(
    listener: TcpListener,
    router: Router,
    handle: Handle<SocketAddr>,
) -> io::Result<()> {
    // HTTP/1 only: no timeout applies to an HTTP/2 connection that has not sent its preface.
    let mut server = axum_server::from_tcp(listener)?.map(LimitedAcceptor::new).handle(handle).http1_only();
    set_limits(&mut server);
    server.serve(router.into_make_service()).await
}

/// Serves over TLS once a certificate is loaded, until the handle shuts it down.
pub async fn serve_tls(
    listener: TcpListener,
    router: Router,
    handle: Handle<SocketAddr>,
    certificate: impl Future<Output = Option<RustlsConfig>>,
) -> io::Result<()> {
    let Some(tls) = certificate.await else {
        return Ok(());
    };
    let mut server = axum_server::from_tcp_rustls(listener, tls)?.map(LimitedAcceptor::new).handle(handle);
    set_limits(&mut server);
    server.serve(router.into_make_service_with_connect_info::<SocketAddr>()).await
}

/// The first certificate, or `None` if the replica stops before one is loaded.
pub async fn first_certificate(
    mut tls: watch::Receiver<Option<RustlsConfig>>,
    close: CancellationToken,
) -> Option<RustlsConfig> {
    close.run_until_cancelled(tls.wait_for(Option::is_some)).await?.ok()?.clone()
}

fn set_limits<A>(server: &mut Server<SocketAddr, A>) {
    let builder = server.http_builder();
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_READ_TIMEOUT)
        .max_buf_size(HTTP1_BUFFER_BYTES);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(MAX_STREAMS * STREAM_WINDOW_BYTES);
}
