//! The node side of Patchbay: one daemon per node, for its own node only.
//!
//! It looks at the kernel through `link`, asks `plan` what to do, and writes to the API server. [`run`] is all of it;
//! signals and the way to the API server are the caller's.

mod admin;
mod args;
pub mod cni;
mod daemon;
mod health;
mod metrics;
mod object;
mod probe;
mod socket;
mod watch;

use std::{path::PathBuf, sync::Arc, time::Duration};

use kube::Client;
use link::Monitor;
use tokio::{task::JoinSet, time::timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

pub use args::{Args, ProbeArgs};
pub use probe::{Probe, probe};

use crate::{daemon::Daemon, health::Health, metrics::Metrics};

/// How long the parts of the daemon may take to finish. A pod has ten seconds.
const GRACE: Duration = Duration::from_secs(8);

/// Why the daemon cannot run, or a probe has no good answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("listen to the kernel")]
    Kernel(#[source] link::Error),
    #[error("open the socket {path}")]
    Socket { path: PathBuf, source: std::io::Error },
    #[error("serve the admin socket")]
    Serve(#[source] std::io::Error),
    #[error("a part of the daemon panicked")]
    Panicked(#[source] tokio::task::JoinError),
    #[error("a part of the daemon ended by itself")]
    Ended,
    #[error("ask the daemon at {path}: is it running?")]
    Ask { path: PathBuf, source: std::io::Error },
    #[error("the daemon at {path} gave no answer within {} s", limit.as_secs())]
    Deadline { path: PathBuf, limit: Duration },
    #[error("{answer}")]
    Refused { answer: String },
}

/// Runs a daemon in this network namespace until `stop`.
pub async fn run(client: Client, args: Args, stop: CancellationToken) -> Result<(), Error> {
    let Args { node_name, ignore_interfaces, state_dir, run_dir, host_root } = args;
    info!(
        node = node_name,
        ignore_interfaces = %ignore_interfaces,
        state_dir = %state_dir.display(),
        run_dir = %run_dir.display(),
        host_root = %host_root.display(),
        "starting"
    );
    let monitor = Monitor::open().map_err(Error::Kernel)?;
    let health = Arc::new(Health::new());
    let (metrics, registry) = Metrics::new();
    let listener = admin::bind(&run_dir)?;
    let daemon = Daemon::new(client, node_name, ignore_interfaces, monitor, metrics, Arc::clone(&health));

    // Ends with us even if the caller never asks to stop.
    let stop = stop.child_token();
    let mut parts = JoinSet::new();
    parts.spawn(admin::serve(listener, health, registry, stop.clone()));
    parts.spawn(daemon.run(stop.clone()));
    all(parts, stop).await
}

/// Waits for the first part to end, asks the others to, and says why the first one failed that did.
async fn all(mut parts: JoinSet<Result<(), Error>>, stop: CancellationToken) -> Result<(), Error> {
    let mut result = finished(&mut parts, &stop).await;
    stop.cancel();
    let rest = async {
        while !parts.is_empty() {
            let next = finished(&mut parts, &stop).await;
            if result.is_ok() {
                result = next;
            }
        }
    };
    if timeout(GRACE, rest).await.is_err() {
        warn!("not everything ended in time, the rest is cut off");
    }
    info!("stopped; links stay as they are");
    result
}

/// Waits for one part. Parts end when they are asked to and not before.
async fn finished(parts: &mut JoinSet<Result<(), Error>>, stop: &CancellationToken) -> Result<(), Error> {
    match parts.join_next().await {
        Some(Ok(Ok(()))) if !stop.is_cancelled() => Err(Error::Ended),
        Some(Ok(result)) => result,
        Some(Err(error)) => Err(Error::Panicked(error)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use clap::Parser;
    use kube::Config;

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    #[tokio::test]
    async fn an_api_server_that_is_away_never_ends_the_daemon_and_a_stop_does() {
        // Port 1 answers nobody. The kernel is only read, which needs no rights.
        let client = Client::try_from(Config::new("http://127.0.0.1:1".parse().unwrap())).unwrap();
        let run_dir = std::env::temp_dir().join(format!("patchbay-node-{}-away", std::process::id()));
        let mut args = Cli::parse_from(["patchbay", "--node-name", "a"]).args;
        args.run_dir.clone_from(&run_dir);
        let stop = CancellationToken::new();
        let mut tasks = JoinSet::new();
        tasks.spawn(run(client, args, stop.clone()));

        let said = async {
            loop {
                match probe(&run_dir, Probe::Ready).await {
                    Err(Error::Refused { answer }) if answer.contains("watch Node a") => return answer,
                    _ => tokio::task::yield_now().await,
                }
            }
        };
        let answer = timeout(Duration::from_secs(20), said).await.unwrap();
        assert!(answer.contains("has not been published yet"), "{answer}");
        assert_eq!(probe(&run_dir, Probe::Live).await.unwrap(), "ok\n");
        assert!(tasks.try_join_next().is_none());

        stop.cancel();
        let ended = timeout(Duration::from_secs(10), tasks.join_next()).await.unwrap();
        assert!(matches!(ended, Some(Ok(Ok(())))), "{ended:?}");
        fs::remove_dir_all(run_dir).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_failure_is_told_even_if_the_rest_never_ends() {
        let mut parts = JoinSet::new();
        parts.spawn(async { Err(Error::Ended) });
        parts.spawn(std::future::pending());
        assert!(matches!(all(parts, CancellationToken::new()).await, Err(Error::Ended)));
    }

    #[tokio::test]
    async fn a_failure_on_the_way_out_is_told_too() {
        let mut parts = JoinSet::new();
        parts.spawn(async { Ok(()) });
        parts.spawn(async { Err(Error::Serve(std::io::Error::other("late"))) });
        let stop = CancellationToken::new();
        stop.cancel();
        assert!(matches!(all(parts, stop).await, Err(Error::Serve(_))));
    }
}
