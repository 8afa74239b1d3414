//! The client of the admin socket, for the kubelet's exec probes.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
    time::timeout,
};

use crate::{Error, admin};

const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
/// The daemon lists the sandboxes of the container runtime.
const FORGET_TIMEOUT: Duration = Duration::from_secs(30);
/// More than any response has.
const MAX_RESPONSE: u64 = 4 * 1024 * 1024;

/// What to query.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Probe {
    /// Whether the daemon is alive.
    Live,
    /// Whether the daemon is ready, and if not, why.
    Ready,
    /// The daemon's metrics, in the text format of Prometheus.
    Metrics,
}

impl Probe {
    fn path(self) -> &'static str {
        match self {
            Self::Live => "/healthz",
            Self::Ready => "/readyz",
            Self::Metrics => "/metrics",
        }
    }
}

/// Queries the daemon that serves `run_dir` and returns the body. A status other than 200 is an error.
///
/// Only the daemon of the same container can be ready. One that was deleted without a grace period may still serve the
/// socket when the next one starts.
pub async fn probe(run_dir: &Path, endpoint: Probe) -> Result<String, Error> {
    let path = admin::path(run_dir);
    if endpoint == Probe::Ready && is_served_elsewhere(&path, mount_namespace).await {
        let response = "not ready: the daemon of another pod still serves this node; the probe is repeated";
        return Err(Error::NotOk { response: response.to_owned() });
    }
    respond(path, PROBE_TIMEOUT, format!("GET {}", endpoint.path())).await
}

/// Has the daemon drop the record of an attachment without DEL. Returns what it dropped.
pub async fn forget(run_dir: &Path, pod: &str, interface: &str) -> Result<String, Error> {
    respond(admin::path(run_dir), FORGET_TIMEOUT, format!("POST /forget/{pod}/{interface}")).await
}

async fn respond(path: PathBuf, limit: Duration, line: String) -> Result<String, Error> {
    let response = match timeout(limit, request(&path, &line)).await {
        Err(_) => return Err(Error::Timeout { path, limit }),
        Ok(Err(source)) => return Err(Error::Query { path, source }),
        Ok(Ok(response)) => response,
    };
    match parse_response(&response) {
        Some((200, body)) => Ok(body.to_owned()),
        Some((_, body)) => Err(Error::NotOk { response: body.trim_end().to_owned() }),
        None => {
            let source = io::Error::new(io::ErrorKind::InvalidData, "the response is not HTTP");
            Err(Error::Query { path, source })
        }
    }
}

/// Whether a process in another mount namespace, and so in another container, serves the socket.
async fn is_served_elsewhere(path: &Path, mount_namespace: impl Fn(&str) -> io::Result<PathBuf>) -> bool {
    let Ok(stream) = UnixStream::connect(path).await else { return false };
    let Some(peer) = stream.peer_cred().ok().and_then(|peer| peer.pid()) else { return false };
    match (mount_namespace("self"), mount_namespace(&peer.to_string())) {
        (Ok(own), Ok(other)) => own != other,
        // It has ended, or the probe may not look at it.
        _ => false,
    }
}

fn mount_namespace(process: &str) -> io::Result<PathBuf> {
    fs::read_link(format!("/proc/{process}/ns/mnt"))
}

async fn request(path: &Path, line: &str) -> io::Result<String> {
    let mut stream = UnixStream::connect(path).await?;
    stream.write_all(format!("{line} HTTP/1.0\r\n\r\n").as_bytes()).await?;
    let mut response = String::new();
    stream.take(MAX_RESPONSE).read_to_string(&mut response).await?;
    Ok(response)
}

/// Splits an HTTP/1.0 response into status and body.
fn parse_response(response: &str) -> Option<(u16, &str)> {
    let (head, body) = response.split_once("\r\n\r\n")?;
    let status = head.strip_prefix("HTTP/1.")?.split(' ').nth(1)?.parse().ok()?;
    Some((status, body))
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{FileTypeExt as _, PermissionsExt as _},
        path::PathBuf,
        sync::Arc,
    };

    use tokio::{net::UnixListener, task::JoinSet};
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::{
        health::{Component, Health},
        metrics::Metrics,
    };

    /// Removed on drop.
    struct ProbeDir(PathBuf);

    impl ProbeDir {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("patchbay-node-{}-{name}", std::process::id()));
            _ = fs::remove_dir_all(&path);
            Self(path)
        }
    }

    impl Drop for ProbeDir {
        fn drop(&mut self) {
            _ = fs::remove_dir_all(&self.0);
        }
    }

    fn serve(
        listener: UnixListener,
        health: &Arc<Health>,
        stop: &CancellationToken,
    ) -> JoinSet<Result<(), Error>> {
        let (metrics, registry) = Metrics::new();
        metrics.events.inc_by(7);
        let mut tasks = JoinSet::new();
        tasks.spawn(admin::serve(listener, Arc::clone(health), registry, None, stop.clone()));
        tasks
    }

    #[tokio::test]
    async fn only_a_daemon_of_the_same_container_is_ready() {
        let dir = ProbeDir::new("elsewhere");
        let listener = admin::bind(&dir.0).unwrap();
        let path = admin::path(&dir.0);
        assert!(!is_served_elsewhere(&path, mount_namespace).await, "this process serves it");
        let other = |process: &str| Ok(PathBuf::from(format!("mnt:[{process}]")));
        assert!(is_served_elsewhere(&path, other).await);
        let gone = |_: &str| Err(io::ErrorKind::NotFound.into());
        assert!(!is_served_elsewhere(&path, gone).await);
        drop(listener);
        // A process that another test forks has the socket until it executes its program.
        let closed = async {
            while is_served_elsewhere(&path, other).await {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let closed = timeout(Duration::from_secs(30), closed).await;
        assert!(closed.is_ok(), "the query says why it fails");
    }

    #[tokio::test]
    async fn the_admin_socket_reports_liveness_readiness_and_metrics() {
        let dir = ProbeDir::new("responses");
        let health = Arc::new(Health::new());
        let stop = CancellationToken::new();
        let mut tasks = serve(admin::bind(&dir.0).unwrap(), &health, &stop);

        assert_eq!(probe(&dir.0, Probe::Live).await.unwrap(), "ok\n");
        let error = probe(&dir.0, Probe::Ready).await.unwrap_err().to_string();
        assert!(error.starts_with("not ready: the links of this node have not been read yet;"), "{error}");
        for component in [
            Component::Kernel,
            Component::NodeWatch,
            Component::NetworkWatch,
            Component::NodeNetworkWatch,
            Component::Publish,
            Component::Plugin,
        ] {
            health.ok(component);
        }
        assert_eq!(probe(&dir.0, Probe::Ready).await.unwrap(), "ok\n");
        health.fail(Component::Journal, "the disk is full".to_owned());
        assert_eq!(probe(&dir.0, Probe::Ready).await.unwrap(), "ok\nwarning: the disk is full\n");
        let metrics = probe(&dir.0, Probe::Metrics).await.unwrap();
        assert!(metrics.contains("patchbay_node_events_total 7\n"), "{metrics}");

        let error = forget(&dir.0, "shop/web", "net1").await.unwrap_err().to_string();
        assert_eq!(error, "hot-plug does not run on this node");

        stop.cancel();
        tasks.join_next().await.unwrap().unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_new_daemon_takes_over_the_socket_of_a_running_one() {
        let dir = ProbeDir::new("generations");
        let stop = CancellationToken::new();
        let (old, new) = (Arc::new(Health::new()), Arc::new(Health::new()));
        for component in [
            Component::Kernel,
            Component::NodeWatch,
            Component::NetworkWatch,
            Component::NodeNetworkWatch,
            Component::Publish,
            Component::Plugin,
        ] {
            new.ok(component);
        }
        let _old = serve(admin::bind(&dir.0).unwrap(), &old, &stop);
        assert!(probe(&dir.0, Probe::Ready).await.is_err());
        let _new = serve(admin::bind(&dir.0).unwrap(), &new, &stop);
        assert_eq!(probe(&dir.0, Probe::Ready).await.unwrap(), "ok\n");

        let socket = fs::metadata(admin::path(&dir.0)).unwrap();
        assert!(socket.file_type().is_socket());
        assert_eq!(socket.permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(&dir.0).unwrap().count(), 1);
    }

    #[tokio::test]
    async fn stale_sockets_of_a_killed_daemon_are_removed_and_nothing_else() {
        let dir = ProbeDir::new("left");
        fs::create_dir_all(&dir.0).unwrap();
        for name in [".node.1", ".node.4711.0", ".node.", ".node.1.x", "node.1", "cni.sock"] {
            fs::write(dir.0.join(name), "").unwrap();
        }
        let _listener = admin::bind(&dir.0).unwrap();
        let mut left: Vec<_> =
            fs::read_dir(&dir.0).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, [".node.", ".node.1.x", "cni.sock", "node.1", "node.sock"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_daemon_whose_loop_stalls_is_not_alive() {
        let dir = ProbeDir::new("stalled");
        let health = Arc::new(Health::new());
        let stop = CancellationToken::new();
        let _tasks = serve(admin::bind(&dir.0).unwrap(), &health, &stop);
        assert_eq!(probe(&dir.0, Probe::Live).await.unwrap(), "ok\n");
        tokio::time::advance(Duration::from_secs(60)).await;
        let error = probe(&dir.0, Probe::Live).await.unwrap_err().to_string();
        assert_eq!(error, "not alive: the reconcile loop made no progress for 60 s");
        health.heartbeat();
        assert_eq!(probe(&dir.0, Probe::Live).await.unwrap(), "ok\n");
    }

    #[tokio::test]
    async fn a_missing_daemon_is_an_error_that_names_the_socket() {
        let dir = ProbeDir::new("absent");
        let error = probe(&dir.0, Probe::Live).await.unwrap_err();
        assert!(matches!(&error, Error::Query { path, .. } if path.ends_with("node.sock")), "{error}");
        // A socket without a server.
        drop(admin::bind(&dir.0).unwrap());
        assert!(matches!(probe(&dir.0, Probe::Live).await, Err(Error::Query { .. })));
    }

    #[tokio::test(start_paused = true)]
    async fn a_probe_of_a_hanging_daemon_times_out() {
        let dir = ProbeDir::new("hangs");
        let _listener = admin::bind(&dir.0).unwrap();
        assert!(matches!(probe(&dir.0, Probe::Live).await, Err(Error::Timeout { .. })));
    }

    #[test]
    fn only_http_is_a_response() {
        assert_eq!(parse_response("HTTP/1.0 200 OK\r\na: b\r\n\r\nok"), Some((200, "ok")));
        assert_eq!(parse_response("HTTP/1.1 503 Service Unavailable\r\n\r\n"), Some((503, "")));
        for nonsense in ["", "ok", "HTTP/1.0 x\r\n\r\n", "HTTP/2 200\r\n\r\n"] {
            assert_eq!(parse_response(nonsense), None);
        }
    }
}
