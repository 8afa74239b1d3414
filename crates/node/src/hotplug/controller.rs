//! Wakes the workers of pods: one per pod that needs hot-plug, or that has attachments of it.
//!
//! Changes of pods, NADs, links and namespace files only wake a worker, which then observes everything itself. Wake-ups
//! that a worker has not noticed count once.

use std::{
    collections::{BTreeSet, HashMap},
    panic::AssertUnwindSafe,
    sync::Arc,
    time::Duration,
};

use api::{
    ErrorChain,
    attachments::{ATTACHMENTS_ANNOTATION, CONFIRM_ANNOTATION},
    digest::digest,
    network_status::NetworkStatusList,
    selection::NadRef,
};
use futures::FutureExt as _;
use plan::hotplug::PlugMode;
use tokio::{
    select,
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep, sleep_until},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info, warn};

use super::{
    Deps, Problem,
    metrics::FailureReason,
    multus_cache::EndedAttachments,
    namespaces::LinkChanges,
    peers::PeerState,
    sandboxes::NamespaceEvent,
    worker::{PodWorker, Wake},
};
use crate::{
    Error,
    pods::{OwnPod, PodChanges, PodPhase},
};

/// How long after the end of a namespace the results of multus-dynamic-networks-controller are looked through.
const ENDED_SCAN_DELAY: Duration = Duration::from_secs(5);
/// How often that is tried again.
const ENDED_SCAN_RETRY: Duration = Duration::from_secs(30);
/// How long the worker of a pod waits after a panic.
const PANIC_RETRY: Duration = Duration::from_secs(30);
/// How long to wait after the kernel's events could not be read.
const EVENT_RETRY: Duration = Duration::from_secs(1);
/// How long after lost events all pods are looked at, and how often at most: a pod can cause an overrun at any time.
const OVERRUN_DELAY: Duration = Duration::from_secs(1);
/// How long plugins may take at the stop of the daemon. It ends shortly after.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(7);

/// Wakes the workers.
pub struct Controller {
    deps: Arc<Deps>,
    /// None if hot-plug is off: what ended is seen on the node.
    changes: Option<PodChanges>,
    /// None if hot-plug is off.
    peers: Option<watch::Receiver<PeerState>>,
    mode: watch::Sender<PlugMode>,
    /// By the UID that the container runtime uses.
    workers: HashMap<String, Arc<Wake>>,
    tasks: JoinSet<String>,
    /// Pods of the API server that were seen.
    seen: HashMap<String, SeenPod>,
    /// When to look for attachments that multus-dynamic-networks-controller left behind.
    ended_scan: Option<Instant>,
    /// When to look at all pods, because the kernel dropped events.
    overrun: Option<Instant>,
    ended_scans: JoinSet<Result<EndedScan, String>>,
}

/// The result of a search for attachments of ended sandboxes.
struct EndedScan {
    /// The pods that had some.
    pods: BTreeSet<String>,
    /// Search again.
    incomplete: bool,
}

/// What is remembered of a pod.
struct SeenPod {
    runtime_uid: String,
    /// The digest of its networks annotation.
    networks: u64,
}

impl Controller {
    /// `mode` is what the workers of `deps` read.
    pub fn new(
        deps: Arc<Deps>,
        peers: Option<watch::Receiver<PeerState>>,
        mode: watch::Sender<PlugMode>,
    ) -> Self {
        let changes = peers.is_some().then(|| deps.pods.subscribe());
        Self {
            deps,
            changes,
            peers,
            mode,
            workers: HashMap::new(),
            tasks: JoinSet::new(),
            seen: HashMap::new(),
            ended_scan: Some(Instant::now()),
            overrun: None,
            ended_scans: JoinSet::new(),
        }
    }

    /// Runs until `stop`. Then it starts nothing new, and waits for the running plugins.
    pub async fn run(mut self, stop: CancellationToken) -> Result<(), Error> {
        self.set_mode(&stop);
        self.forget_requests().await;
        self.wake_recorded(&stop);
        let deps = Arc::clone(&self.deps);
        let mut journal = deps.journal.problem();
        loop {
            deps.report(Problem::Journal, journal.borrow_and_update().clone());
            let (ended_scan, overrun) = (self.ended_scan, self.overrun);
            select! {
                () = stop.cancelled() => break,
                uid = next_change(&mut self.changes) => self.pod_changed(&uid, &stop),
                nad = deps.nads.changed() => self.nad_changed(&nad),
                // Isolation and default networks may have changed.
                () = deps.dropped.notified() => self.workers.values().for_each(|wake| wake.wake()),
                () = deps.multus.changed() => self.workers.values().for_each(|wake| wake.wake()),
                event = deps.next_namespace_event() => self.namespace_changed(event, &stop),
                read = deps.monitor.wait(|events| deps.watched.apply(events)) => if let Err(error) = read {
                    warn!(error = %ErrorChain(&error), "cannot read link events of pods, retrying");
                    self.wake_recorded(&stop);
                    sleep(EVENT_RETRY).await;
                },
                changes = deps.watched.changes() => self.links_changed(changes, &stop),
                () = sleep_until_due(overrun) => self.overrun_ended(&stop),
                () = next_peer_state(&mut self.peers) => self.set_mode(&stop),
                Ok(()) = journal.changed() => {
                    self.workers.values().for_each(|wake| wake.wake());
                    self.forget_requests().await;
                    self.wake_recorded(&stop);
                }
                () = sleep_until_due(ended_scan) => self.start_ended_scan(),
                Some(scanned) = self.ended_scans.join_next() => self.scanned(scanned, &stop),
                Some(ended) = self.tasks.join_next() => self.worker_ended(ended, &stop)?,
            }
        }
        let drained = deps.executor.drain(DRAIN_TIMEOUT);
        let workers = async { while self.tasks.join_next().await.is_some() {} };
        if !futures::join!(drained, workers).0 {
            warn!(
                "CNI plugins still run at the stop of the daemon; its next start finishes their attachments"
            );
        }
        Ok(())
    }

    /// While hot-plug is off, an edit has no effect. So it must have none when hot-plug is switched on again.
    async fn forget_requests(&self) {
        if self.peers.is_some() {
            return;
        }
        for pod in self.deps.journal.pods() {
            if let Err(error) = self.deps.journal.set_requested(&pod, BTreeSet::new()).await {
                warn!(error = %error, "cannot record yet that hot-plug is off");
                return;
            }
        }
    }

    fn pod_changed(&mut self, uid: &str, stop: &CancellationToken) {
        let Some(pod) = self.deps.pods.get(uid) else {
            let Some(seen) = self.seen.remove(uid) else { return };
            self.deps.forget_pod(&seen.runtime_uid, uid);
            if self.has_work(&seen.runtime_uid) {
                self.wake(&seen.runtime_uid, stop).wake();
            }
            return;
        };
        let runtime_uid = pod.runtime_uid().to_owned();
        self.deps.note_pod(&runtime_uid, uid);
        let networks = digest([pod.networks().unwrap_or_default()]);
        let seen = SeenPod { runtime_uid: runtime_uid.clone(), networks };
        let before = self.seen.insert(uid.to_owned(), seen);
        if let Some(before) = before.as_ref().filter(|before| before.runtime_uid != runtime_uid) {
            self.deps.forget_pod(&before.runtime_uid, uid);
        }
        if !is_relevant(&pod) && !self.has_work(&runtime_uid) {
            return;
        }
        let wake = self.wake(&runtime_uid, stop);
        if before.is_some_and(|before| before.networks != networks) {
            wake.wake_changed();
        } else {
            wake.wake();
        }
    }

    /// Whether the pod has a worker, or attachments of hot-plug.
    fn has_work(&self, runtime_uid: &str) -> bool {
        self.workers.contains_key(runtime_uid) || !self.deps.journal.records_of(runtime_uid).is_empty()
    }

    fn nad_changed(&self, nad: &NadRef) {
        for wake in self.workers.values().filter(|wake| wake.wants(nad)) {
            wake.wake();
        }
    }

    fn namespace_changed(&mut self, event: NamespaceEvent, stop: &CancellationToken) {
        let pods = match event {
            NamespaceEvent::Created(_) => return,
            NamespaceEvent::Deleted(path) => {
                self.deps.locator.invalidate();
                let mut pods = self.deps.journal.pods_in(|netns| netns == path);
                pods.extend(self.deps.sandbox_owner(&path));
                pods
            }
            NamespaceEvent::CheckAll => {
                self.deps.locator.invalidate();
                let workers = self.workers.keys().cloned();
                self.deps.journal.pods().into_iter().chain(workers).collect()
            }
        };
        self.ended_scan.get_or_insert_with(|| Instant::now() + ENDED_SCAN_DELAY);
        for pod in pods {
            self.wake(&pod, stop).wake();
        }
    }

    fn links_changed(&mut self, changes: LinkChanges, stop: &CancellationToken) {
        if changes.overrun {
            self.overrun.get_or_insert_with(|| Instant::now() + OVERRUN_DELAY);
        }
        for pod in changes.pods {
            self.wake(&pod, stop).wake();
        }
    }

    /// Looks at every pod again, because events of its links may be lost.
    fn overrun_ended(&mut self, stop: &CancellationToken) {
        self.overrun = None;
        for pod in self.deps.watched.pods() {
            self.wake(&pod, stop).wake();
        }
    }

    /// Publishes what hot-plug may do, and lets all workers look again if that changed.
    fn set_mode(&mut self, stop: &CancellationToken) {
        let mode = match self.peers.as_ref().map(|peers| peers.borrow().clone()) {
            None => PlugMode::Off,
            Some(PeerState::Unknown | PeerState::Present) => PlugMode::StandDown,
            Some(PeerState::Absent) => PlugMode::On,
        };
        if self.mode.send_replace(mode) == mode {
            return;
        }
        info!(?mode, "the mode of hot-plug changed");
        for wake in self.workers.values() {
            wake.wake();
        }
        self.wake_recorded(stop);
    }

    /// Wakes the workers of all pods with records.
    fn wake_recorded(&mut self, stop: &CancellationToken) {
        for pod in self.deps.journal.pods() {
            self.wake(&pod, stop).wake();
        }
    }

    /// The worker of a pod. Starts it if there is none.
    fn wake(&mut self, runtime_uid: &str, stop: &CancellationToken) -> &Wake {
        let (deps, tasks) = (&self.deps, &mut self.tasks);
        self.workers.entry(runtime_uid.to_owned()).or_insert_with(|| {
            let wake = Arc::new(Wake::default());
            let (uid, started) = (runtime_uid.to_owned(), Arc::clone(&wake));
            tasks.spawn(supervise(Arc::clone(deps), uid, started, stop.clone()));
            wake
        })
    }

    fn worker_ended(
        &mut self,
        ended: Result<String, tokio::task::JoinError>,
        stop: &CancellationToken,
    ) -> Result<(), Error> {
        let uid = match ended {
            Ok(uid) => uid,
            Err(error) => {
                // `supervise` catches panics.
                error!(error = %error, "a worker of hot-plug was aborted");
                return Err(Error::Panicked(error));
            }
        };
        let woken = self.workers.remove(&uid).is_some_and(|wake| wake.is_woken());
        if woken {
            self.wake(&uid, stop).wake();
        }
        Ok(())
    }

    fn start_ended_scan(&mut self) {
        self.ended_scan = None;
        if self.ended_scans.is_empty() {
            self.ended_scans.spawn(ended_scan(Arc::clone(&self.deps)));
        } else {
            self.ended_scan = Some(Instant::now() + ENDED_SCAN_DELAY);
        }
    }

    fn scanned(
        &mut self,
        scanned: Result<Result<EndedScan, String>, tokio::task::JoinError>,
        stop: &CancellationToken,
    ) {
        match scanned.unwrap_or_else(|error| Err(text(error))) {
            Ok(EndedScan { pods, incomplete }) => {
                for pod in pods {
                    self.wake(&pod, stop).wake();
                }
                if incomplete {
                    self.ended_scan.get_or_insert_with(|| Instant::now() + ENDED_SCAN_RETRY);
                }
            }
            Err(problem) => {
                debug!(problem, "cannot look for attachments of ended sandboxes, retrying");
                self.ended_scan.get_or_insert_with(|| Instant::now() + ENDED_SCAN_RETRY);
            }
        }
    }
}

fn text(error: impl std::error::Error + 'static) -> String {
    ErrorChain(&error).to_string()
}

/// Takes over the attachments that multus-dynamic-networks-controller left behind in ended sandboxes, and those of which the
/// journal was lost: records them, so that the workers of their pods remove them.
async fn ended_scan(deps: Arc<Deps>) -> Result<EndedScan, String> {
    if !deps.journal.is_loaded() {
        return Err("the hot-plug journal was not read yet".to_owned());
    }
    let listed = deps.locator.list().await;
    deps.report_runtime(listed.as_ref().err());
    let running = listed.map_err(text)?.running_ids();
    let EndedAttachments { records, mut incomplete } =
        deps.recorded.ended(running, deps.journal.keys()).await.map_err(text)?;
    let mut pods = BTreeSet::new();
    for record in records {
        let known = deps.journal.records_of(&record.pod.runtime_uid);
        if known.iter().any(|known| known.key == record.key) {
            // One of several results for the same interface.
            incomplete = true;
            continue;
        }
        pods.insert(record.pod.runtime_uid.clone());
        // In memory if the disk is full: then the next start finds it again.
        let _ = deps.journal.update(record).await;
    }
    Ok(EndedScan { pods, incomplete })
}

/// Runs the worker of a pod. One that panics is started again later, so that a fault that one pod causes ends nothing else.
async fn supervise(deps: Arc<Deps>, uid: String, wake: Arc<Wake>, stop: CancellationToken) -> String {
    loop {
        let worker = PodWorker::new(Arc::clone(&deps), uid.clone(), Arc::clone(&wake), stop.clone());
        if Box::pin(AssertUnwindSafe(worker.run()).catch_unwind()).await.is_ok() {
            return uid;
        }
        error!(pod_uid = uid, "the worker of a pod panicked; its attachments wait for the next attempt");
        deps.metrics.failed(FailureReason::Panic);
        if stop.run_until_cancelled(sleep(PANIC_RETRY)).await.is_none() {
            return uid;
        }
    }
}

/// Whether hot-plug may have to do something for a pod. A pod without networks costs nothing.
fn is_relevant(pod: &OwnPod) -> bool {
    let networks = pod.networks().is_some_and(|networks| !networks.trim().is_empty());
    if !matches!(pod.phase, PodPhase::Running) {
        return networks && matches!(pod.phase, PodPhase::Pending);
    }
    let reports = [ATTACHMENTS_ANNOTATION, CONFIRM_ANNOTATION];
    networks || reports.iter().any(|name| pod.annotation(name).is_some()) || has_secondary_network(pod)
}

/// Whether network-status lists more than the cluster's default network.
fn has_secondary_network(pod: &OwnPod) -> bool {
    let Some(text) = pod.network_status() else { return false };
    let Ok(list) = NetworkStatusList::parse(Some(text)) else { return false };
    let statuses = list.entries().iter().filter_map(|entry| entry.status());
    statuses.filter(|status| !status.default && status.name.contains('/')).count() > 0
}

async fn sleep_until_due(due: Option<Instant>) {
    match due {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

async fn next_change(changes: &mut Option<PodChanges>) -> String {
    match changes {
        Some(changes) => changes.next().await,
        None => std::future::pending().await,
    }
}

async fn next_peer_state(peers: &mut Option<watch::Receiver<PeerState>>) {
    let changed = match peers {
        Some(peers) => peers.changed().await,
        None => std::future::pending().await,
    };
    if changed.is_err() {
        // Its task has ended, because the daemon stops.
        std::future::pending::<()>().await;
    }
}
