//! The node side of Patchbay: one daemon per node, for its own node only.
//!
//! It looks at the kernel through `link`, asks `plan` what to do, and writes to the API server. [`run`] is all of it;
//! signals and the way to the API server are the caller's.

mod admin;
mod args;
mod bridges;
pub mod cni;
mod controller;
pub mod cri;
pub mod event;
mod health;
pub mod ipam;
mod metrics;
mod network;
mod object;
mod probe;
mod record;
mod socket;
mod watch;

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use api::Chain;
use kube::Client;
use link::{Changer, Monitor};
use tokio::{net::lookup_host, task::JoinSet, time::timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

pub use args::{Args, ProbeArgs};
pub use probe::{Probe, probe};

use crate::{
    bridges::{Bridges, Tools},
    controller::{NodeConfig, NodeController},
    cri::ContainerRuntime,
    event::Events,
    health::{Component, Health, HealthChange},
    ipam::{Ipam, Keeper, Pace},
    metrics::Metrics,
    record::Records,
};

/// How often the CNI plugin is looked at.
const PLUGIN_CHECK_INTERVAL: Duration = Duration::from_secs(20);

/// How long it can take at most from a sandbox's first address until the runtime lists it: the kubelet gives up after four
/// minutes.
const SANDBOX_CREATION_TIMEOUT: Duration = Duration::from_secs(300);

/// What the name of this daemon's own pod begins with.
const OWN_POD: &str = "patchbay-node";

/// How long the API server's name may take to be found.
const DNS_TIMEOUT: Duration = Duration::from_secs(3);

/// How long the tasks of the daemon may take to finish. A pod has ten seconds.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(8);

/// Why the daemon cannot run, or a probe has no good answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("listen to the kernel")]
    Kernel(#[source] link::Error),
    #[error("open the socket {path}")]
    Socket { path: PathBuf, source: std::io::Error },
    #[error("read what is kept about networks")]
    Records(#[source] record::Error),
    #[error("read what is kept about addresses")]
    Ipam(#[source] ipam::JournalError),
    #[error("serve the admin socket")]
    Serve(#[source] std::io::Error),
    #[error("start the threads that serve CNI calls")]
    Threads(#[source] std::io::Error),
    #[error("a part of the daemon panicked")]
    Panicked(#[source] tokio::task::JoinError),
    #[error("a part of the daemon ended by itself")]
    Exited,
    #[error("ask the daemon at {path}: is it running?")]
    Query { path: PathBuf, source: std::io::Error },
    #[error("the daemon at {path} gave no answer within {} s", limit.as_secs())]
    Timeout { path: PathBuf, limit: Duration },
    #[error("{answer}")]
    NotOk { answer: String },
}

/// Runs a daemon in this network namespace until `stop`.
pub async fn run(client: Client, args: Args, stop: CancellationToken) -> Result<(), Error> {
    let Args {
        node_name,
        ignore_interfaces,
        state_dir,
        run_dir,
        host_root,
        cni_bin_dir,
        shim,
        api_server,
        runtime_socket,
        gc_interval,
    } = args;
    info!(
        node = node_name,
        ignore_interfaces = %ignore_interfaces,
        state_dir = %state_dir.display(),
        run_dir = %run_dir.display(),
        host_root = %host_root.display(),
        cni_bin_dir = %cni_bin_dir.display(),
        shim = %shim.display(),
        api_server,
        ?runtime_socket,
        ?gc_interval,
        "starting"
    );
    let host = Host::detect(&host_root);
    let health = Arc::new(Health::new());
    let (metrics, mut registry) = Metrics::new();
    let (events, sender) = Events::new(client.clone(), &node_name);
    let (tell, networks) = tokio::sync::watch::channel(Arc::default());
    let (boot, tell_of) = (host.boot_id.clone(), events.clone());
    let tools = Tools {
        boot: host.boot.clone(),
        changer: Changer::open(&host.sysctls).map_err(Error::Kernel)?,
        records: Records::open(&state_dir).map_err(Error::Records)?,
        servers: resolve_api_server(api_server.as_deref()).await,
        tell,
        events,
        metrics: metrics.clone(),
    };
    let paths = cni::CniPaths { run_dir: run_dir.clone(), state_dir, proc_root: host.proc };
    let calls = cni::Metrics::default();
    calls.register(&mut registry);
    let numbers = ipam::Metrics::default();
    numbers.register(&mut registry);
    let ipam = open_ipam(&paths.state_dir, boot, numbers).await?;
    let keeper = Keeper::new(
        Arc::clone(&ipam),
        client.clone(),
        networks.clone(),
        tell_of,
        sandboxes(&host_root, runtime_socket),
        Pace { sweep: gc_interval, young: gc_interval.max(SANDBOX_CREATION_TIMEOUT), ..Pace::default() },
    );
    let cni = cni::CniServer::bind(&paths, networks, ipam, calls)?;
    let settings = NodeConfig { name: node_name, ignored: ignore_interfaces, sysctls: host.sysctls, metrics };
    let monitor = Monitor::open().map_err(Error::Kernel)?;
    let daemon = NodeController::new(client, settings, monitor, Bridges::new(tools), Arc::clone(&health));
    let listener = admin::bind(&run_dir)?;

    // Ends with us even if the caller never asks to stop.
    let stop = stop.child_token();
    let mut tasks = JoinSet::new();
    let plugged = Arc::clone(&health);
    tasks.spawn(admin::serve(listener, health, registry, stop.clone()));
    tasks.spawn(daemon.run(stop.clone()));
    tasks.spawn(sender.run(stop.clone()));
    // The socket is there before the plugin that looks for it.
    tasks.spawn(keep_plugin_installed(shim, cni_bin_dir, plugged, stop.clone()));
    tasks.spawn(cni.run(stop.clone()));
    tasks.spawn(keeper.run(stop.clone()));
    supervise(tasks, stop).await
}

/// Reads the journal of addresses. The daemon before this one may still have it.
async fn open_ipam(state_dir: &Path, boot: String, numbers: ipam::Metrics) -> Result<Arc<Ipam>, Error> {
    let state_dir = state_dir.to_owned();
    let opened = tokio::task::spawn_blocking(move || Ipam::open(&state_dir, &boot, numbers)).await;
    Ok(Arc::new(opened.map_err(Error::Panicked)?.map_err(Error::Ipam)?))
}

/// Asks the runtime of the host which sandboxes it has.
fn sandboxes(host_root: &Path, socket: Option<PathBuf>) -> ipam::Sandboxes {
    let runtime = match socket {
        Some(socket) => {
            ContainerRuntime::new(vec![host_root.join(socket.strip_prefix("/").unwrap_or(&socket))])
        }
        None => ContainerRuntime::discover(host_root),
    };
    Box::new(move || {
        let runtime = runtime.clone();
        Box::pin(async move {
            let found = runtime.sandboxes().await.map_err(|error| Chain(&error).to_string())?;
            // A node can have a second runtime, which truly says that it has none of the sandboxes here.
            if !found.iter().any(|sandbox| sandbox.name.starts_with(OWN_POD)) {
                return Err("this runtime does not run the daemon's own pod: say which one does".to_owned());
            }
            // The daemon's own one has no address of ours, and is another one after each upgrade.
            let others = found.into_iter().filter(|sandbox| !sandbox.name.starts_with(OWN_POD));
            Ok(others.map(|sandbox| sandbox.id).collect())
        })
    })
}

/// What is needed of the host beside its network.
struct Host {
    /// Another one for each time that the host was started.
    boot: String,
    /// The same, or empty if it cannot be read.
    boot_id: String,
    /// What the kernel shows as files.
    proc: PathBuf,
    /// The kernel's settings; those of the network are of the namespace that asks.
    sysctls: PathBuf,
}

impl Host {
    /// In a pod `/proc/sys` cannot be written, and the host's can.
    fn detect(root: &Path) -> Self {
        let mounted = root.join("proc");
        let proc = if mounted.join("sys/net").is_dir() { mounted } else { PathBuf::from("/proc") };
        let sysctls = proc.join("sys");
        let read = |name: &str| fs::read_to_string(sysctls.join("kernel/random").join(name)).ok();
        // One that cannot be read must not make all boots one: a number that never comes again makes none equal.
        let known = read("boot_id").map(|boot| boot.trim().to_owned());
        let boot = known.clone().or_else(|| read("uuid"));
        let boot = boot.unwrap_or_else(|| format!("{:?} {}", SystemTime::now(), std::process::id()));
        Self { boot: boot.trim().to_owned(), boot_id: known.unwrap_or_default(), proc, sysctls }
    }
}

/// Keeps the CNI plugin in place: whoever upgrades the other plugins of a node may empty their directory. A node without
/// it still publishes, and says what is missing.
async fn keep_plugin_installed(
    shim: PathBuf,
    bin_dir: PathBuf,
    health: Arc<Health>,
    stop: CancellationToken,
) -> Result<(), Error> {
    let mut rounds = tokio::time::interval(PLUGIN_CHECK_INTERVAL);
    while stop.run_until_cancelled(rounds.tick()).await.is_some() {
        let (shim, bin_dir) = (shim.clone(), bin_dir.clone());
        let installed = tokio::task::spawn_blocking(move || cni::install(&shim, &bin_dir)).await;
        match installed.map_err(Error::Panicked)? {
            Ok(written) => {
                if health.ok(Component::Plugin) == HealthChange::Changed || written {
                    info!(written, "the CNI plugin is in place");
                }
            }
            Err(error) => {
                let problem = format!("pods cannot join networks on this node: {}", Chain(&error));
                if health.fail(Component::Plugin, problem.clone()) == HealthChange::Changed {
                    warn!(error = problem, "the CNI plugin is not in place");
                }
            }
        }
    }
    Ok(())
}

/// The addresses of the API server. One that cannot be found is no reason to wait: without a global address, a link
/// hardly leads anywhere.
async fn resolve_api_server(host: Option<&str>) -> Vec<IpAddr> {
    let Some(host) = host else { return Vec::new() };
    let Ok(Ok(found)) = timeout(DNS_TIMEOUT, lookup_host((host, 443))).await else {
        warn!(host, "the address of the API server cannot be found");
        return Vec::new();
    };
    found.map(|address| address.ip()).collect()
}

/// Waits for the first part to end, asks the others to, and says why the first one failed that did.
async fn supervise(mut tasks: JoinSet<Result<(), Error>>, stop: CancellationToken) -> Result<(), Error> {
    let mut result = next_result(&mut tasks, &stop).await;
    stop.cancel();
    let rest = async {
        while !tasks.is_empty() {
            let next = next_result(&mut tasks, &stop).await;
            if result.is_ok() {
                result = next;
            }
        }
    };
    if timeout(SHUTDOWN_GRACE, rest).await.is_err() {
        warn!("not everything ended in time, the rest is cut off");
    }
    info!("stopped; links stay as they are");
    result
}

/// Waits for one part. Parts end when they are asked to and not before.
async fn next_result(tasks: &mut JoinSet<Result<(), Error>>, stop: &CancellationToken) -> Result<(), Error> {
    match tasks.join_next().await {
        Some(Ok(Ok(()))) if !stop.is_cancelled() => Err(Error::Exited),
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
        args.state_dir = run_dir.join("state");
        args.cni_bin_dir = run_dir.join("bin");
        let stop = CancellationToken::new();
        let mut tasks = JoinSet::new();
        tasks.spawn(run(client, args, stop.clone()));

        let said = async {
            loop {
                match probe(&run_dir, Probe::Ready).await {
                    Err(Error::NotOk { answer }) if answer.contains("watch Node:") => return answer,
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
        let mut tasks = JoinSet::new();
        tasks.spawn(async { Err(Error::Exited) });
        tasks.spawn(std::future::pending());
        assert!(matches!(supervise(tasks, CancellationToken::new()).await, Err(Error::Exited)));
    }

    #[tokio::test]
    async fn a_failure_on_the_way_out_is_told_too() {
        let mut tasks = JoinSet::new();
        tasks.spawn(async { Ok(()) });
        tasks.spawn(async { Err(Error::Serve(std::io::Error::other("late"))) });
        let stop = CancellationToken::new();
        stop.cancel();
        assert!(matches!(supervise(tasks, stop).await, Err(Error::Serve(_))));
    }
}
