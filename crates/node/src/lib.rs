//! The node daemon of Patchbay. Each node runs one, and each manages only its own node.
//!
//! It observes the kernel through `link`, lets `plan` decide, changes links, and writes to the API server. [`run`] starts all
//! of it; the caller provides the API client and handles signals.

mod admin;
mod args;
mod attach;
mod bridges;
mod claims;
pub mod cni;
mod controller;
pub mod cri;
pub mod event;
mod executor;
mod health;
mod host_mounts;
mod hotplug;
pub mod ipam;
mod link_records;
mod metrics;
mod network;
mod network_snapshot;
mod node_network;
mod pods;
mod probe;
mod repairs;
mod socket;
#[cfg(test)]
mod state_compat;
mod store;
mod watch;

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use api::ErrorChain;
use kube::Client;
use link::{LinkEditor, Monitor};
use plan::nodenetwork::RuntimeStatus;
use tokio::{
    net::lookup_host,
    runtime::Handle,
    sync::watch::{self as channel, Sender},
    task::JoinSet,
    time::timeout,
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

pub use args::{Args, ForgetArgs, ProbeArgs};
pub use hotplug::parse_plugin_timeout;
pub use probe::{Probe, forget, probe};

use crate::{
    attach::Attacher,
    bridges::{BridgeController, Deps},
    claims::{Announcer, AnnouncerTask, ClaimLookup},
    controller::{NodeConfig, NodeController},
    cri::ContainerRuntime,
    event::Events,
    health::{Component, Health, HealthChange},
    hotplug::{AttachmentJournal, HotplugConfig, RecordDropper},
    ipam::{BlockController, Ipam, SandboxFilter, Timings},
    link_records::LinkRecords,
    metrics::Metrics,
    network_snapshot::NetworksWriter,
};

/// How often the daemon checks that the CNI plugin is installed.
const PLUGIN_CHECK_INTERVAL: Duration = Duration::from_secs(20);

/// Timeout for resolving the API server's name.
const DNS_TIMEOUT: Duration = Duration::from_secs(3);

/// How long the tasks of the daemon may take to stop. A pod has ten seconds.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(8);

/// The daemon cannot run, or a probe failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("open a netlink socket")]
    Kernel(#[source] link::Error),
    #[error("open the socket {path}")]
    Socket { path: PathBuf, source: std::io::Error },
    #[error("read the link records")]
    Records(#[source] link_records::Error),
    #[error("read the address journal")]
    Ipam(#[source] ipam::JournalError),
    #[error("read the settings of hot-plug")]
    HotplugConfig(#[source] hotplug::ConfigError),
    #[error("read the hot-plug journal")]
    HotplugJournal(#[source] hotplug::JournalError),
    #[error("serve the admin socket")]
    Serve(#[source] std::io::Error),
    #[error("start the worker threads for CNI calls")]
    Threads(#[source] std::io::Error),
    #[error("a task of the daemon panicked")]
    Panicked(#[source] tokio::task::JoinError),
    #[error("a task of the daemon exited unexpectedly")]
    Exited,
    #[error("cannot query the daemon at {path} (is it running?)")]
    Query { path: PathBuf, source: std::io::Error },
    #[error("the daemon at {path} did not respond within {} s", limit.as_secs())]
    Timeout { path: PathBuf, limit: Duration },
    #[error("{response}")]
    NotOk { response: String },
}

/// Runs the daemon in the current network namespace until `stop`.
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
        pod_uid,
        gc_interval,
        hotplug,
    } = args;
    let hotplug = hotplug.settings(runtime_socket).map_err(Error::HotplugConfig)?;
    info!(
        node = node_name,
        ignore_interfaces = %ignore_interfaces,
        state_dir = %state_dir.display(),
        run_dir = %run_dir.display(),
        host_root = %host_root.display(),
        cni_bin_dir = %cni_bin_dir.display(),
        shim = %shim.display(),
        api_server,
        ?pod_uid,
        ?gc_interval,
        ?hotplug,
        "starting"
    );
    let host = Host::detect(&host_root);
    let health = Arc::new(Health::new());
    let (metrics, mut registry) = Metrics::new();
    let (events, sender) = Events::new(client.clone(), &node_name);
    let published = NetworksWriter::default();
    let networks = published.subscribe();
    let (boot, block_events) = (host.boot_id.clone(), events.clone());
    let deps = Deps {
        boot: host.boot.clone(),
        editor: LinkEditor::open(&host.sysctls).map_err(Error::Kernel)?,
        records: LinkRecords::open(&state_dir).map_err(Error::Records)?,
        servers: resolve_api_server(api_server.as_deref()).await,
        published,
        events,
        metrics: metrics.clone(),
    };
    let cni_metrics = cni::Metrics::default();
    cni_metrics.register(&mut registry);
    let ipam_metrics = ipam::Metrics::default();
    ipam_metrics.register(&mut registry);
    let hotplug_metrics = hotplug::Metrics::default();
    hotplug_metrics.register(&mut registry);
    let executor_metrics = executor::Metrics::default();
    executor_metrics.register(&mut registry);
    let claim_metrics = claims::Metrics::default();
    claim_metrics.register(&mut registry);
    let (runtime_status, runtime) = channel::channel(RuntimeStatus::default());
    let ipam = open_ipam(&state_dir, boot, ipam_metrics).await?;
    let attachments = open_attachment_journal(&state_dir).await?;
    let container_runtime = ContainerRuntime::new(&host_root, hotplug.runtime_socket.clone(), pod_uid);
    let blocks = BlockController::new(
        Arc::clone(&ipam),
        client.clone(),
        networks.clone(),
        block_events,
        sandbox_lister(container_runtime.clone(), runtime_status, Arc::clone(&health)),
        Timings {
            gc_interval,
            min_lease_age: gc_interval.max(plan::ipam::limits::SANDBOX_CREATION_TIMEOUT),
            ..Timings::default()
        },
    );
    let repairs = ipam.repairs();
    let (state_problem, addresses) = (ipam.journal_problem(), Arc::clone(&ipam));
    let (journal, journal_problem) = (Arc::clone(&ipam), ipam.journal_problem());
    let mount_namespace = host.proc.join("1/ns/mnt");
    let (pods, pod_watch) = pods::own_pods(client.clone(), &node_name, Arc::clone(&health));
    let (persistent, persistent_watch) = claims::persistent_nads(client.clone(), pods.clone());
    let announcer = Announcer::default();
    let announcer_task = AnnouncerTask::new(
        announcer.clone(),
        client.clone(),
        Arc::clone(&ipam),
        &host.proc,
        &mount_namespace,
        claim_metrics.clone(),
    );
    let lookup = ClaimLookup {
        client: client.clone(),
        runtime: Handle::current(),
        pods: pods.clone(),
        networks: networks.clone(),
        persistent,
        ipam: Arc::clone(&ipam),
        metrics: claim_metrics,
    };
    let attacher = Arc::new(Attacher::new(networks, ipam, &state_dir, host.proc, announcer));
    let cni = cni::CniServer::bind(&run_dir, attacher, lookup, cni_metrics)?;
    let (name, ignored, sysctls) = (node_name.clone(), ignore_interfaces, host.sysctls);
    let config = NodeConfig { name, ignored, sysctls, metrics, runtime, state_problem, ipam: addresses };
    let monitor = Monitor::open().map_err(Error::Kernel)?;
    let controller = NodeController::new(
        client.clone(),
        config,
        monitor,
        BridgeController::new(deps),
        Arc::clone(&health),
    );
    let listener = admin::bind(&run_dir)?;

    // Cancelled when this function returns, even if the caller never cancels `stop`.
    let stop = stop.child_token();
    let mut tasks = JoinSet::new();
    let plugin_health = Arc::clone(&health);
    health.register(&mut registry);
    tasks.spawn(pod_watch.run(stop.clone()));
    tasks.spawn(persistent_watch.run(stop.clone()));
    tasks.spawn(announcer_task.run(stop.clone()));
    tasks.spawn(reap_orphans(stop.clone()));
    let config = HotplugConfig {
        client,
        node: &node_name,
        pods,
        settings: hotplug,
        runtime: container_runtime,
        journal: attachments,
        boot: host.boot,
        mount_namespace: &mount_namespace,
        health: Arc::clone(&health),
        metrics: hotplug_metrics,
        executor: executor::ExecutorConfig::default(),
        executor_metrics,
        repairs,
    };
    let dropper = start_hotplug(config, &mut tasks, &stop);
    tasks.spawn(report_journal(journal_problem, Arc::clone(&health), stop.clone()));
    tasks.spawn(admin::serve(listener, health, registry, dropper, stop.clone()));
    tasks.spawn(controller.run(stop.clone()));
    tasks.spawn(sender.run(stop.clone()));
    // The socket exists before the plugin that connects to it.
    tasks.spawn(keep_plugin_installed(shim, cni_bin_dir, plugin_health, stop.clone()));
    tasks.spawn(cni.run(stop.clone()));
    tasks.spawn(blocks.run(stop.clone()));
    tasks.spawn(journal.retry_journal(stop.clone()));
    supervise(tasks, stop).await
}

/// Reads the address journal. Waits while the previous daemon still holds its lock.
async fn open_ipam(state_dir: &Path, boot: String, metrics: ipam::Metrics) -> Result<Arc<Ipam>, Error> {
    let state_dir = state_dir.to_owned();
    let opened = tokio::task::spawn_blocking(move || Ipam::open(&state_dir, &boot, metrics)).await;
    Ok(Arc::new(opened.map_err(Error::Panicked)?.map_err(Error::Ipam)?))
}

/// Reads the journal of hot-plug. Waits while the previous daemon still holds its lock.
async fn open_attachment_journal(state_dir: &Path) -> Result<AttachmentJournal, Error> {
    let state_dir = state_dir.to_owned();
    let opened = tokio::task::spawn_blocking(move || AttachmentJournal::open(&state_dir)).await;
    opened.map_err(Error::Panicked)?.map_err(Error::HotplugJournal)
}

/// Starts hot-plug. A daemon that lacks a capability for it still does everything else.
fn start_hotplug(
    config: HotplugConfig<'_>,
    tasks: &mut JoinSet<Result<(), Error>>,
    stop: &CancellationToken,
) -> Option<RecordDropper> {
    let health = Arc::clone(&config.health);
    let started = hotplug::start(config, tasks, stop);
    if let Err(error) = &started {
        let problem = format!("hot-plug cannot start: {}", ErrorChain(error));
        warn!(error = problem, "interfaces of running pods are neither attached nor detached");
        health.fail(Component::Hotplug, problem);
    }
    started.ok()
}

/// Reaps what CNI plugins leave behind, until `stop`.
async fn reap_orphans(stop: CancellationToken) -> Result<(), Error> {
    let _ = stop.run_until_cancelled(executor::CHILDREN.reap()).await;
    Ok(())
}

/// Lists sandboxes for IPAM, and reports whether the container runtime was found.
fn sandbox_lister(
    runtime: ContainerRuntime,
    status: Sender<RuntimeStatus>,
    health: Arc<Health>,
) -> ipam::ListSandboxes {
    Box::new(move |filter| {
        let (runtime, status, health) = (runtime.clone(), status.clone(), Arc::clone(&health));
        Box::pin(async move {
            let listed = match filter {
                SandboxFilter::All => runtime.live().await,
                SandboxFilter::Witnesses => runtime.witnesses().await,
            };
            let listed = listed.map_err(|error| ErrorChain(&error).to_string());
            match &listed {
                Ok(_) => health.ok(Component::Runtime),
                Err(problem) => health.fail(Component::Runtime, format!("list the sandboxes: {problem}")),
            };
            report_runtime(&status, runtime.socket(), listed.as_ref().err());
            listed
        })
    })
}

/// Informs in health why the address journal cannot be written, until `stop`. Pods that need no address are still served.
async fn report_journal(
    mut problem: channel::Receiver<Option<String>>,
    health: Arc<Health>,
    stop: CancellationToken,
) -> Result<(), Error> {
    loop {
        let current = problem.borrow_and_update().clone();
        match current {
            None => health.ok(Component::Journal),
            Some(problem) => {
                health.fail(Component::Journal, format!("the address journal cannot be written: {problem}"))
            }
        };
        // The journal outlives this task.
        let Some(Ok(())) = stop.run_until_cancelled(problem.changed()).await else {
            stop.cancelled().await;
            return Ok(());
        };
    }
}

/// Publishes and logs a change of the runtime's status.
fn report_runtime(status: &Sender<RuntimeStatus>, socket: Option<PathBuf>, problem: Option<&String>) {
    let new = match problem {
        None => RuntimeStatus::Found(socket.unwrap_or_default().display().to_string()),
        Some(problem) => RuntimeStatus::NotFound(problem.clone()),
    };
    let changed = status.send_if_modified(|old| {
        let changed = *old != new;
        old.clone_from(&new);
        changed
    });
    match new {
        RuntimeStatus::Found(socket) if changed => info!(socket, "found the container runtime"),
        RuntimeStatus::NotFound(problem) if changed => {
            warn!(problem, "cannot list sandboxes: addresses of deleted sandboxes are not released");
        }
        _ => {}
    }
}

/// Paths and the boot id of the host.
struct Host {
    /// Unique per boot.
    boot: String,
    /// The kernel's boot id; empty if it cannot be read.
    boot_id: String,
    /// `/proc` of the host.
    proc: PathBuf,
    /// `/proc/sys` of the host. Network sysctls belong to the namespace of the process that accesses them.
    sysctls: PathBuf,
}

impl Host {
    /// Prefers the host's `/proc`: in a pod, `/proc/sys` is read-only.
    fn detect(root: &Path) -> Self {
        let mounted = root.join("proc");
        let proc = if mounted.join("sys/net").is_dir() { mounted } else { PathBuf::from("/proc") };
        let sysctls = proc.join("sys");
        let read = |name: &str| fs::read_to_string(sysctls.join("kernel/random").join(name)).ok();
        // An unreadable boot id must not make all boots look equal, so a unique value replaces it.
        let known = read("boot_id").map(|boot| boot.trim().to_owned());
        let boot = known.clone().or_else(|| read("uuid"));
        let boot = boot.unwrap_or_else(|| format!("{:?} {}", SystemTime::now(), std::process::id()));
        Self { boot: boot.trim().to_owned(), boot_id: known.unwrap_or_default(), proc, sysctls }
    }
}

/// Installs the CNI plugin and reinstalls it when it is missing: an upgrade of other plugins may empty the directory. A
/// node without the plugin still publishes its NodeNetwork, but is not ready.
async fn keep_plugin_installed(
    shim: PathBuf,
    bin_dir: PathBuf,
    health: Arc<Health>,
    stop: CancellationToken,
) -> Result<(), Error> {
    let mut ticks = tokio::time::interval(PLUGIN_CHECK_INTERVAL);
    while stop.run_until_cancelled(ticks.tick()).await.is_some() {
        let (shim, bin_dir) = (shim.clone(), bin_dir.clone());
        let installed = tokio::task::spawn_blocking(move || cni::install(&shim, &bin_dir)).await;
        match installed.map_err(Error::Panicked)? {
            Ok(written) => {
                if health.ok(Component::Plugin) == HealthChange::Changed || written {
                    info!(written, "the CNI plugin is installed");
                }
            }
            Err(error) => {
                let problem = format!(
                    "the CNI plugin is not installed, so pods cannot be attached on this node: {}",
                    ErrorChain(&error)
                );
                if health.fail(Component::Plugin, problem.clone()) == HealthChange::Changed {
                    warn!(error = problem, "cannot install the CNI plugin; retrying");
                }
            }
        }
    }
    Ok(())
}

/// Resolves the addresses of the API server. Failing to do so does not block the start: a link without a global address
/// rarely carries the route to the API server.
async fn resolve_api_server(host: Option<&str>) -> Vec<IpAddr> {
    let Some(host) = host else { return Vec::new() };
    let Ok(Ok(found)) = timeout(DNS_TIMEOUT, lookup_host((host, 443))).await else {
        warn!(host, "cannot resolve the address of the API server");
        return Vec::new();
    };
    found.map(|address| address.ip()).collect()
}

/// Waits for the first task to exit, stops the others, and returns the first error.
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
        warn!("not all tasks stopped in time; aborting the rest");
    }
    info!("stopped; links are left unchanged");
    result
}

/// Waits for one task. A task that exits before `stop` is an error.
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
    struct TestCli {
        #[command(flatten)]
        args: Args,
    }

    #[tokio::test]
    async fn the_daemon_survives_a_missing_api_server_and_stops_on_request() {
        // Nothing listens on port 1. The test only reads from the kernel, which needs no privileges.
        let client = Client::try_from(Config::new("http://127.0.0.1:1".parse().unwrap())).unwrap();
        let run_dir = std::env::temp_dir().join(format!("patchbay-node-{}-away", std::process::id()));
        let mut args = TestCli::parse_from(["patchbay", "--node-name", "a"]).args;
        args.run_dir.clone_from(&run_dir);
        args.state_dir = run_dir.join("state");
        args.cni_bin_dir = run_dir.join("bin");
        let stop = CancellationToken::new();
        let mut tasks = JoinSet::new();
        tasks.spawn(run(client, args, stop.clone()));

        let not_ready = async {
            loop {
                match probe(&run_dir, Probe::Ready).await {
                    Err(Error::NotOk { response }) if response.contains("watch Node:") => return response,
                    _ => tokio::task::yield_now().await,
                }
            }
        };
        let response = timeout(Duration::from_secs(20), not_ready).await.unwrap();
        assert!(response.contains("has not been published yet"), "{response}");
        assert_eq!(probe(&run_dir, Probe::Live).await.unwrap(), "ok\n");
        assert!(tasks.try_join_next().is_none());

        stop.cancel();
        let ended = timeout(Duration::from_secs(10), tasks.join_next()).await.unwrap();
        assert!(matches!(ended, Some(Ok(Ok(())))), "{ended:?}");
        fs::remove_dir_all(run_dir).unwrap();
    }

    #[tokio::test]
    async fn a_missing_container_runtime_is_reported_with_what_to_do() {
        let (sender, status) = channel::channel(RuntimeStatus::default());
        let root = std::env::temp_dir().join("patchbay-node-without-runtime");
        let (runtime, health) = (ContainerRuntime::new(&root, None, Some("uid".to_owned())), Health::new());
        let health = Arc::new(health);
        let list = sandbox_lister(runtime, sender, Arc::clone(&health));
        assert!(list(SandboxFilter::All).await.is_err());
        assert!(health.warnings()[0].contains("set --runtime-socket"), "{:?}", health.warnings());
        let problem = match &*status.borrow() {
            RuntimeStatus::NotFound(problem) => problem.clone(),
            other => panic!("{other:?}"),
        };
        assert!(problem.contains("set --runtime-socket"), "{problem}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_error_is_returned_even_if_other_tasks_hang() {
        let mut tasks = JoinSet::new();
        tasks.spawn(async { Err(Error::Exited) });
        tasks.spawn(std::future::pending());
        assert!(matches!(supervise(tasks, CancellationToken::new()).await, Err(Error::Exited)));
    }

    #[tokio::test]
    async fn an_error_during_shutdown_is_returned() {
        let mut tasks = JoinSet::new();
        tasks.spawn(async { Ok(()) });
        tasks.spawn(async { Err(Error::Serve(std::io::Error::other("late"))) });
        let stop = CancellationToken::new();
        stop.cancel();
        assert!(matches!(supervise(tasks, stop).await, Err(Error::Serve(_))));
    }
}
