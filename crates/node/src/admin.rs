//! The admin socket: liveness, readiness and metrics, for root on the node.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header},
    response::IntoResponse,
    routing::get,
};
use prometheus_client::{encoding::text::encode, registry::Registry};
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;

use crate::{Error, health::Health, socket};

const SOCKET_NAME: &str = "node.sock";

/// The path of the socket.
pub fn path(run_dir: &Path) -> PathBuf {
    run_dir.join(SOCKET_NAME)
}

/// Opens the socket. Must be called inside a tokio runtime.
pub fn bind(run_dir: &Path) -> Result<UnixListener, Error> {
    let listener = socket::bind(run_dir, SOCKET_NAME)?;
    let listener = listener.set_nonblocking(true).and_then(|()| UnixListener::from_std(listener));
    listener.map_err(Error::Serve)
}

/// Serves the socket until `stop`.
pub async fn serve(
    listener: UnixListener,
    health: Arc<Health>,
    registry: Registry,
    stop: CancellationToken,
) -> Result<(), Error> {
    let router = router(health, registry);
    let serving = axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned());
    serving.await.map_err(Error::Serve)
}

fn router(health: Arc<Health>, registry: Registry) -> Router {
    Router::new()
        .route("/healthz", get(live).with_state(Arc::clone(&health)))
        .route("/readyz", get(ready).with_state(health))
        .route("/metrics", get(metrics).with_state(Arc::new(registry)))
}

async fn live(State(health): State<Arc<Health>>) -> (StatusCode, String) {
    response("not alive", health.stalled())
}

async fn ready(State(health): State<Arc<Health>>) -> (StatusCode, String) {
    let (status, text) = response("not ready", health.problem());
    let warnings: Vec<String> = health.warnings().iter().map(|text| format!("warning: {text}\n")).collect();
    (status, text + &warnings.concat())
}

fn response(failure: &str, problem: Option<String>) -> (StatusCode, String) {
    match problem {
        None => (StatusCode::OK, "ok\n".to_owned()),
        Some(problem) => (StatusCode::SERVICE_UNAVAILABLE, format!("{failure}: {problem}\n")),
    }
}

async fn metrics(State(registry): State<Arc<Registry>>) -> impl IntoResponse {
    let mut text = String::new();
    match encode(&mut text, &registry) {
        Ok(()) => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([(header::CONTENT_TYPE, kind)], text).into_response()
        }
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}
