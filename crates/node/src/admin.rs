//! The admin socket: liveness, readiness and metrics, and dropping records of hot-plug, for root on the node.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use axum::{
    Router,
    extract::{Path as UrlPath, State},
    http::{StatusCode, header},
    response::IntoResponse,
    routing::{get, post},
};
use prometheus_client::{encoding::text::encode, registry::Registry};
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;

use crate::{Error, health::Health, hotplug::RecordDropper, socket};

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
    dropper: Option<RecordDropper>,
    stop: CancellationToken,
) -> Result<(), Error> {
    let router = router(health, registry, dropper);
    let serving = axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned());
    serving.await.map_err(Error::Serve)
}

fn router(health: Arc<Health>, registry: Registry, dropper: Option<RecordDropper>) -> Router {
    Router::new()
        .route("/healthz", get(live).with_state(Arc::clone(&health)))
        .route("/readyz", get(ready).with_state(health))
        .route("/metrics", get(metrics).with_state(Arc::new(registry)))
        .route("/forget/{namespace}/{pod}/{interface}", post(forget).with_state(dropper))
}

async fn forget(
    State(dropper): State<Option<RecordDropper>>,
    UrlPath((namespace, pod, interface)): UrlPath<(String, String, String)>,
) -> (StatusCode, String) {
    let Some(dropper) = dropper else {
        return (StatusCode::SERVICE_UNAVAILABLE, "hot-plug does not run on this node\n".to_owned());
    };
    match dropper.forget(&namespace, &pod, &interface).await {
        Ok(text) => (StatusCode::OK, text),
        Err(text) => (StatusCode::CONFLICT, text),
    }
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
