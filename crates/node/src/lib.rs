//! The node side of Patchbay: one daemon per node, for its own node only.
//!
//! It looks at the kernel through `link`, asks `plan` what to do, and writes to the API server. No global state: several
//! daemons run in one process, each with its own client, directory and network namespace.

mod admin;
mod args;
mod daemon;
mod health;
mod metrics;
mod object;
mod probe;
mod watch;

use std::{path::PathBuf, pin::pin, sync::Arc, time::Duration};

use futures::future::{Either, select};
use kube::{Client, Config};
use link::Monitor;
use tokio::{
    signal::unix::{SignalKind, signal},
    task::JoinSet,
    time::timeout,
};
use tokio_util::sync::CancellationToken;
use tracing::info;

pub use args::{Args, ProbeArgs};
pub use probe::{Probe, probe};

use crate::{daemon::Daemon, health::Health, metrics::Metrics};

/// How long the parts of the daemon may take to finish. A pod has ten seconds.
const GRACE: Duration = Duration::from_secs(8);

/// Why the daemon cannot run, or a probe has no good answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("find the API server: run inside a pod, or set KUBECONFIG")]
    Config(#[source] kube::config::InferConfigError),
    #[error("make a client for the API server")]
    Client(#[source] kube::Error),
    #[error("listen for signals")]
    Signals(#[source] std::io::Error),
    #[error("listen to the kernel")]
    Kernel(#[source] link::Error),
    #[error("open the admin socket {path}")]
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

/// Runs the daemon until SIGTERM or SIGINT.
pub async fn run(args: Args) -> Result<(), Error> {
    let mut config = Config::infer().await.map_err(Error::Config)?;
    // Its own retries hide a struggling API server for minutes; watches and writes have their own.
    config.default_retry = false;
    let agent = concat!("patchbay-node/", env!("CARGO_PKG_VERSION"));
    if let (Ok(name), Ok(value)) = ("user-agent".parse(), agent.parse()) {
        config.headers.push((name, value));
    }
    let client = Client::try_from(config).map_err(Error::Client)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(Error::Signals)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(Error::Signals)?;

    let stop = CancellationToken::new();
    let daemon = pin!(run_with(client, args, stop.clone()));
    let asked = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    match select(daemon, pin!(asked)).await {
        Either::Left((result, _)) => result,
        Either::Right(((), daemon)) => {
            info!("asked to stop; links stay as they are");
            stop.cancel();
            daemon.await
        }
    }
}

/// Runs a daemon in this network namespace until `stop`.
pub async fn run_with(client: Client, args: Args, stop: CancellationToken) -> Result<(), Error> {
    let monitor = Monitor::open().map_err(Error::Kernel)?;
    run_in(client, args, monitor, stop).await
}

/// Runs a daemon for the network namespace of `monitor` until `stop`.
pub async fn run_in(
    client: Client,
    args: Args,
    monitor: Monitor,
    stop: CancellationToken,
) -> Result<(), Error> {
    let Args { node_name, ignore_interfaces, state_dir, run_dir, host_root } = args;
    info!(
        node = node_name,
        ignore_interfaces = %ignore_interfaces,
        state_dir = %state_dir.display(),
        run_dir = %run_dir.display(),
        host_root = %host_root.display(),
        "starting"
    );
    let health = Arc::new(Health::new());
    let (metrics, registry) = Metrics::new();
    let listener = admin::bind(&run_dir)?;
    let daemon = Daemon::new(client, node_name, ignore_interfaces, monitor, metrics, Arc::clone(&health));

    // Ends with us even if the caller never asks to stop.
    let stop = stop.child_token();
    let mut parts = JoinSet::new();
    parts.spawn(admin::serve(listener, health, registry, stop.clone()));
    parts.spawn(daemon.run(stop.clone()));
    let first = finished(&mut parts, &stop).await;
    stop.cancel();
    let rest = async {
        let mut result = first;
        while !parts.is_empty() {
            result = result.and(finished(&mut parts, &stop).await);
        }
        result
    };
    // What has not finished by then is dropped with the JoinSet.
    timeout(GRACE, rest).await.unwrap_or(Ok(()))
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

/// An error with all its causes, on one line.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        // Some libraries repeat the cause in their own text.
        if !text.ends_with(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::fs;

    use clap::Parser;

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
        tasks.spawn(run_with(client, args, stop.clone()));

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

    #[test]
    fn a_chain_names_every_cause_once() {
        let cause = std::io::Error::other("no route");
        let error = Error::Kernel(link::Error::Open(cause));
        assert_eq!(chain(&error), "listen to the kernel: open a netlink socket: no route");
    }
}
