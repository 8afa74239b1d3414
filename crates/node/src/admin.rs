//! The admin socket: health, readiness and metrics, for whoever is root on the node.

use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt as _, PermissionsExt as _},
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

use crate::{Error, health::Health};

/// What the name begins with that a socket has until it is ready; the number of the process follows.
const TEMPORARY: &str = ".node.";

/// Where the socket is.
pub fn path(run_dir: &Path) -> PathBuf {
    run_dir.join("node.sock")
}

/// Opens the socket under a name of its own and renames it over the old one: in a rolling update the older daemon
/// still serves those that it has, and there is no moment without a socket.
pub fn bind(run_dir: &Path) -> Result<UnixListener, Error> {
    let path = path(run_dir);
    let temporary = run_dir.join(format!("{TEMPORARY}{}", std::process::id()));
    let open = || {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(run_dir)?;
        sweep(run_dir)?;
        let listener = UnixListener::bind(&temporary)?;
        fs::set_permissions(&temporary, fs::Permissions::from_mode(0o600))?;
        fs::rename(&temporary, &path)?;
        Ok(listener)
    };
    open().map_err(|source| Error::Socket { path: path.clone(), source })
}

/// Removes what processes that were killed between opening and renaming left behind.
fn sweep(run_dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(run_dir)? {
        let entry = entry?;
        if entry.file_name().to_str().is_some_and(is_temporary) {
            match fs::remove_file(entry.path()) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
    }
    Ok(())
}

/// The numbers of a process, and nothing that somebody else could mean.
fn is_temporary(name: &str) -> bool {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    name.strip_prefix(TEMPORARY).is_some_and(|rest| rest.split('.').all(number))
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
    verdict("not alive", health.hang())
}

async fn ready(State(health): State<Arc<Health>>) -> (StatusCode, String) {
    verdict("not ready", health.problem())
}

fn verdict(not: &str, problem: Option<String>) -> (StatusCode, String) {
    match problem {
        None => (StatusCode::OK, "ok\n".to_owned()),
        Some(problem) => (StatusCode::SERVICE_UNAVAILABLE, format!("{not}: {problem}\n")),
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
