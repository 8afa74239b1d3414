//! The controller of this node's bridge networks: applies the plans of `plan::bridge` and publishes the outcome.
//!
//! All decisions are in `plan::bridge`. The controller observes the kernel after each batch of steps and plans again, until
//! no steps are left. A network whose step fails backs off without delaying the others.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use api::{ErrorChain, IfNamePatterns, NetworkOnNode, ipblock::NodeRef};
use client::retry::Backoff;
use link::{LinkEditor, Monitor};
use plan::{
    bridge::{
        self as rules, Action, ApplyFailure, BridgeInput, BridgeStep, LinkRecord, Peer, Settled, Uid, reason,
    },
    nodenetwork::{self, KernelState, NodeInfo},
};
use tokio::{task, time::Instant};
use tracing::{debug, info, warn};

use crate::{
    event::{EventReason, Events},
    link_records::{self, LinkRecords},
    metrics::{ChangeLabels, ChangeVerb, Metrics, ResultLabel},
    network::{Labels, ParsedNetwork, WatchedNetwork},
    network_snapshot::{NetworkState, NetworkView, Networks, NetworksWriter},
};

/// Bounds one reconcile; the remaining steps are left to the next one.
const RECONCILE_BUDGET: Duration = Duration::from_secs(2);
/// Bounds the steps between two observations of the kernel.
const MAX_STEPS_PER_PASS: usize = 128;
/// More repairs of one network in one reconcile mean that another program keeps changing its links.
const MAX_REPAIRS: usize = 8;
/// Limits the events about repairs of one network.
const MIN_REPAIR_EVENT_INTERVAL: Duration = Duration::from_secs(60);

pub const UNREADABLE: &str = "Unreadable";
const UNREADABLE_MESSAGE: &str = "this daemon cannot parse the BridgeNetwork and does not change its links; upgrade \
    the daemon if it is older than the CRD";

/// Bounds the backoff of a failed network.
const MAX_BACKOFF: Duration = Duration::from_secs(30);

/// Executes steps: on the kernel and on the link records.
struct LinkExecutor {
    editor: LinkEditor,
    records: LinkRecords,
}

/// A network that cannot be parsed.
struct UnreadableNetwork {
    name: String,
    deleted: bool,
}

/// Reconciles the bridge networks of one node.
pub struct BridgeController {
    boot: String,
    /// None only while a blocking thread uses it.
    executor: Option<LinkExecutor>,
    records: BTreeMap<Uid, LinkRecord>,
    /// None until the first list from the API server.
    networks: Option<BTreeMap<Uid, ParsedNetwork>>,
    /// The names of BridgeNetworks that cannot be parsed.
    unreadable: BTreeMap<Uid, UnreadableNetwork>,
    /// The other nodes, sorted by name. None until the first list from the API server.
    peers: Option<Vec<Peer>>,
    backoffs: BTreeMap<Uid, NetworkBackoff>,
    /// The time of the last event about a repair.
    repair_events: BTreeMap<Uid, Instant>,
    /// [`rules::BridgePlan::settled`] of the last plan.
    settled: BTreeMap<Uid, Settled>,
    reports: Vec<NetworkOnNode>,
    /// The names of the networks beyond the limit.
    omitted: Vec<String>,
    /// The addresses of the API server.
    servers: Vec<IpAddr>,
    /// The networks for the CNI server and IPAM.
    published: NetworksWriter,
    events: Events,
    metrics: Metrics,
}

/// The failure of a network, and when to retry.
struct NetworkBackoff {
    failure: ApplyFailure,
    until: Instant,
    backoff: Backoff,
}

/// The state of the node that a reconcile needs.
#[derive(Clone, Copy)]
pub struct NodeContext<'a> {
    pub node: &'a NodeInfo,
    pub labels: &'a Labels,
    pub ignored: &'a IfNamePatterns,
    /// The networks that the NodeNetwork lists at the API server.
    pub listed: &'a BTreeSet<Uid>,
}

/// The dependencies of a [`BridgeController`].
pub struct Deps {
    pub boot: String,
    pub editor: LinkEditor,
    pub records: LinkRecords,
    pub servers: Vec<IpAddr>,
    pub published: NetworksWriter,
    pub events: Events,
    pub metrics: Metrics,
}

type StepResult = (BridgeStep, Result<(), StepError>);

/// Why a step failed.
#[derive(Debug, thiserror::Error)]
enum StepError {
    #[error(transparent)]
    Kernel(#[from] link::Error),
    #[error(transparent)]
    Disk(#[from] link_records::Error),
}

impl BridgeController {
    pub fn new(deps: Deps) -> Self {
        let Deps { boot, editor, records, servers, published, events, metrics } = deps;
        Self {
            boot,
            records: records.all().clone(),
            executor: Some(LinkExecutor { editor, records }),
            networks: None,
            unreadable: BTreeMap::new(),
            peers: None,
            backoffs: BTreeMap::new(),
            repair_events: BTreeMap::new(),
            settled: BTreeMap::new(),
            reports: Vec::new(),
            omitted: Vec::new(),
            servers,
            published,
            events,
            metrics,
        }
    }

    /// The networks for the NodeNetwork. None before the first lists: an empty list would mean that the node has no links.
    pub fn reports(&self) -> Option<&[NetworkOnNode]> {
        (self.networks.is_some() && self.peers.is_some()).then_some(&self.reports)
    }

    pub fn replace_networks(&mut self, all: Vec<WatchedNetwork>) {
        self.unreadable.clear();
        self.networks = Some(BTreeMap::new());
        for network in all {
            self.apply_network(network);
        }
    }

    pub fn apply_network(&mut self, network: WatchedNetwork) {
        let WatchedNetwork { name, uid, deleted, parsed } = network;
        let (Some(networks), Some(uid)) = (&mut self.networks, uid) else { return };
        if let Some(network) = parsed {
            self.unreadable.remove(&uid);
            networks.insert(uid, network);
        } else {
            warn!(network = name, "cannot parse BridgeNetwork; its links are not changed");
            networks.remove(&uid);
            self.unreadable.insert(uid, UnreadableNetwork { name, deleted });
        }
    }

    pub fn delete_network(&mut self, network: &WatchedNetwork) {
        if let (Some(networks), Some(uid)) = (&mut self.networks, &network.uid) {
            networks.remove(uid);
            self.unreadable.remove(uid);
        }
    }

    /// The Node object does not exist: other nodes may acquire the address blocks that this node holds.
    pub fn clear_own_node(&self) {
        self.published.clear_node();
    }

    /// Replaces all peers.
    pub fn replace_peers(&mut self, mut peers: Vec<Peer>) {
        peers.sort_by(|one, other| one.node.cmp(&other.node));
        self.peers = Some(peers);
    }

    pub fn apply_peer(&mut self, peer: Peer) {
        let Some(peers) = &mut self.peers else { return };
        match peers.binary_search_by(|one| one.node.cmp(&peer.node)) {
            Ok(index) => peers[index] = peer,
            Err(index) => peers.insert(index, peer),
        }
    }

    pub fn delete_peer(&mut self, peer: &Peer) {
        if let Some(peers) = &mut self.peers {
            peers.retain(|one| one.node != peer.node);
        }
    }

    /// The VTEPs of all peers.
    pub fn peer_vteps(&self) -> impl Iterator<Item = IpAddr> {
        self.peers.iter().flatten().filter_map(|peer| peer.vtep)
    }

    /// Applies plans until no steps are left, and returns when to retry failed networks.
    pub async fn reconcile(
        &mut self,
        monitor: &Monitor,
        context: NodeContext<'_>,
        observed: &mut KernelState,
    ) -> Result<Option<Instant>, link::Error> {
        if self.networks.is_none() || self.peers.is_none() {
            return Ok(None);
        }
        let api_links = self.api_links(context, observed).await;
        let started = Instant::now();
        let mut repairs: BTreeMap<Uid, usize> = BTreeMap::new();
        loop {
            let plan = self.plan(context, observed, &api_links);
            self.log_omitted(&plan.omitted);
            self.reports = plan.networks;
            // The CNI server learns of a change before the links change. An ADD that ran before is visible in the
            // observation that follows; a later ADD finds the network not ready.
            if self.publish(context, observed) {
                observe_again(monitor, observed).await?;
                if started.elapsed() > RECONCILE_BUDGET {
                    return Ok(Some(Instant::now()));
                }
                continue;
            }
            self.settled = plan.settled;
            let pending: BTreeSet<Uid> = plan.steps.iter().map(|step| step.network.clone()).collect();
            let mut due: Vec<BridgeStep> = plan.steps.into_iter().filter(|step| self.is_due(step)).collect();
            if due.is_empty() {
                return Ok(self.next_retry(&pending));
            }
            if started.elapsed() > RECONCILE_BUDGET {
                // Let the loop handle events and write the NodeNetwork.
                self.next_retry(&pending);
                return Ok(Some(Instant::now()));
            }
            due.truncate(MAX_STEPS_PER_PASS);
            for uid in self.apply(due).await {
                let count = repairs.entry(uid.clone()).or_default();
                *count += 1;
                if *count > MAX_REPAIRS {
                    self.back_off(&uid, link_contention());
                }
            }
            observe_again(monitor, observed).await?;
        }
    }

    fn plan(
        &self,
        context: NodeContext<'_>,
        observed: &KernelState,
        api_links: &BTreeSet<u32>,
    ) -> rules::BridgePlan {
        let NodeContext { node, labels, ignored, listed } = context;
        let networks: Vec<_> =
            self.networks.iter().flat_map(BTreeMap::values).map(|network| network.on(labels)).collect();
        let failures =
            self.backoffs.iter().map(|(uid, backoff)| (uid.clone(), backoff.failure.clone())).collect();
        let mut plan = rules::plan(&BridgeInput {
            node,
            boot: &self.boot,
            vtep: nodenetwork::vtep(observed, node, ignored).as_ref(),
            networks: &networks,
            peers: self.peers.as_deref().unwrap_or_default(),
            observed,
            records: &self.records,
            listed,
            failures: &failures,
            settled: &self.settled,
            api_links,
        });
        // An unreadable network is not a deleted one.
        plan.steps.retain(|step| !self.unreadable.contains_key(&step.network));
        for report in plan.networks.iter_mut().filter(|report| self.unreadable.contains_key(&report.uid)) {
            (report.ready, report.reason) = (false, UNREADABLE.to_owned());
            UNREADABLE_MESSAGE.clone_into(&mut report.message);
        }
        if observed.partial {
            // A link that is missing from the dump may belong to a pod.
            let removes = |action: &Action| matches!(action, Action::Delete { .. } | Action::RemoveRecord);
            plan.steps.retain(|step| !removes(&step.action));
        }
        plan
    }

    /// The links that carry the connection to the API server. Looked up only if a network has an uplink. If the lookup
    /// fails, all links count.
    async fn api_links(&mut self, context: NodeContext<'_>, observed: &KernelState) -> BTreeSet<u32> {
        let mut all = self.networks.iter().flat_map(BTreeMap::values);
        let wanted = all.any(|network| network.on(context.labels).uplink.is_some());
        let Some(mut executor) = self.executor.take_if(|_| wanted) else { return BTreeSet::new() };
        let servers = self.servers.clone();
        let lookup = task::spawn_blocking(move || {
            let routes = servers.into_iter().map(|server| executor.editor.route_to(server));
            let routes = routes.collect::<Result<Vec<_>, _>>();
            (executor, routes)
        });
        let (executor, routes) = join(lookup.await);
        self.executor = Some(executor);
        match routes {
            Ok(routes) => routes.into_iter().flatten().collect(),
            Err(error) => {
                warn!(error = %ErrorChain(&error), "cannot find the link to the API server; no uplink is attached");
                observed.links.iter().map(|link| link.index).collect()
            }
        }
    }

    /// Logs the networks beyond the limit when they change.
    fn log_omitted(&mut self, omitted: &[String]) {
        if self.omitted != omitted {
            warn!(networks = ?omitted, "too many networks for one node; the youngest are omitted");
            self.omitted = omitted.to_vec();
        }
    }

    fn is_due(&self, step: &BridgeStep) -> bool {
        self.backoffs.get(&step.network).is_none_or(|backoff| backoff.until <= Instant::now())
    }

    /// Applies the steps of each network in order up to its first failure, and returns the repaired networks.
    async fn apply(&mut self, steps: Vec<BridgeStep>) -> BTreeSet<Uid> {
        let Some(executor) = self.executor.take() else { return BTreeSet::new() };
        // Netlink and the disk may block.
        let (executor, results) = join(task::spawn_blocking(move || execute(executor, steps)).await);
        self.records = executor.records.all().clone();
        self.executor = Some(executor);
        let mut repaired = BTreeSet::new();
        for (step, result) in results {
            let change =
                ChangeLabels { verb: ChangeVerb::of(&step.action), result: ResultLabel::of(&result) };
            self.metrics.changes.get_or_create(&change).inc();
            match result {
                Ok(()) => {
                    info!(network = step.network, action = ?step.action, repair = step.repair, "applied step");
                    if step.repair {
                        repaired.insert(step.network);
                    }
                }
                Err(error) => self.step_failed(&step, &error),
            }
        }
        for uid in &repaired {
            self.metrics.repairs.inc();
            self.record_repair_event(uid);
        }
        repaired
    }

    /// Records at most one event per minute; the metric counts all repairs.
    fn record_repair_event(&mut self, uid: &Uid) {
        let now = Instant::now();
        if self.repair_events.get(uid).is_some_and(|last| now < *last + MIN_REPAIR_EVENT_INTERVAL) {
            return;
        }
        if let Some(network) = self.networks.as_ref().and_then(|networks| networks.get(uid)) {
            let note = "another program changed links of this network on this node; the daemon repaired them";
            self.events.record(network.name(), uid, EventReason::Repaired, note.to_owned());
            self.repair_events.insert(uid.clone(), now);
        }
    }

    fn step_failed(&mut self, step: &BridgeStep, error: &StepError) {
        debug!(network = step.network, action = ?step.action, error = %ErrorChain(error), "step failed");
        self.back_off(&step.network, failure(&step.action, error));
    }

    /// Delays the next attempt of a network, longer each time.
    fn back_off(&mut self, uid: &Uid, failure: ApplyFailure) {
        let previous = self.backoffs.remove(uid);
        if previous.as_ref().is_none_or(|previous| previous.failure != failure) {
            warn!(
                network = uid,
                reason = failure.reason,
                error = failure.message,
                "cannot apply network, backing off"
            );
            if let Some(network) = self.networks.as_ref().and_then(|networks| networks.get(uid)) {
                self.events.record(network.name(), uid, EventReason::Failed, failure.message.clone());
            }
        }
        let mut backoff = previous.map(|previous| previous.backoff).unwrap_or_default();
        let delay = backoff.next_delay().min(MAX_BACKOFF);
        self.backoffs.insert(uid.clone(), NetworkBackoff { failure, until: Instant::now() + delay, backoff });
    }

    /// Clears the backoff of networks without pending steps, and returns the next retry of the others.
    fn next_retry(&mut self, pending: &BTreeSet<Uid>) -> Option<Instant> {
        self.backoffs.retain(|uid, _| pending.contains(uid));
        self.repair_events.retain(|_, last| last.elapsed() < MIN_REPAIR_EVENT_INTERVAL);
        let ready = self.reports.iter().filter(|report| report.ready).count();
        self.metrics.networks.set(i64::try_from(self.reports.len()).unwrap_or(i64::MAX));
        self.metrics.networks_ready.set(i64::try_from(ready).unwrap_or(i64::MAX));
        self.backoffs.values().map(|backoff| backoff.until).min()
    }

    /// Publishes to the CNI server which networks pods can join, and returns whether that changed.
    fn publish(&self, context: NodeContext<'_>, observed: &KernelState) -> bool {
        let NodeContext { node, labels, .. } = context;
        let node = NodeRef { node: node.name.clone(), uid: node.uid.clone() };
        let reports: BTreeMap<&str, &NetworkOnNode> =
            self.reports.iter().map(|report| (report.uid.as_str(), report)).collect();
        let indexes: BTreeMap<&str, u32> =
            observed.links.iter().map(|link| (link.name.as_str(), link.index)).collect();
        let previous = self.published.current();
        // Pods can still join a bridge that was ready while it is changed in place.
        let was_ready = |network: &ParsedNetwork, bridge: u32| {
            previous.by_name.get(network.name()).is_some_and(|view| {
                let same = |state: &NetworkState| matches!(state, NetworkState::Ready { bridge_index, .. } if *bridge_index == bridge);
                view.uid == network.uid() && same(&view.state)
            })
        };
        let state = |network: &ParsedNetwork| {
            if network.is_terminating() {
                return NetworkState::Removing;
            }
            if !network.selects(labels) {
                return NetworkState::NotSelected;
            }
            let Some(report) = reports.get(network.uid()) else {
                return NetworkState::NotReady { reason: "Pending".to_owned(), message: String::new() };
            };
            let mtu = network.mtu().min(report.mtu.and_then(|mtu| u32::try_from(mtu).ok()));
            match (indexes.get(report.bridge.as_str()), mtu) {
                (Some(&bridge_index), Some(mtu))
                    if report.ready
                        || report.reason == reason::APPLYING && was_ready(network, bridge_index) =>
                {
                    NetworkState::Ready { bridge_index, mtu }
                }
                _ => {
                    NetworkState::NotReady { reason: report.reason.clone(), message: report.message.clone() }
                }
            }
        };
        let unreadable = self.unreadable.iter().map(|(uid, network)| {
            let (reason, message) = (UNREADABLE.to_owned(), UNREADABLE_MESSAGE.to_owned());
            let state = NetworkState::NotReady { reason, message };
            let (uid, closed) = (uid.clone(), network.deleted);
            (network.name.clone(), NetworkView { uid, state, closed, ipam: None, has_claims: false })
        });
        let by_name = self
            .networks
            .iter()
            .flat_map(BTreeMap::values)
            .map(|network| {
                let (uid, ipam) = (network.uid().to_owned(), network.ipam());
                let (closed, has_claims) = (network.is_deleted(), network.has_claims());
                let view = NetworkView { uid, state: state(network), closed, ipam, has_claims };
                (network.name().to_owned(), view)
            })
            .chain(unreadable)
            .collect();
        self.published.publish(Networks { synced: true, node: Some(node), by_name })
    }
}

/// Observes the kernel again. The links to the peers stay those that the caller looked up.
async fn observe_again(monitor: &Monitor, observed: &mut KernelState) -> Result<(), link::Error> {
    let peer_links = std::mem::take(&mut observed.peer_links);
    *observed = KernelState { peer_links, ..monitor.observe().await? };
    Ok(())
}

/// The result of a blocking task. Resumes its panic, which ends the daemon.
fn join<T>(result: Result<T, task::JoinError>) -> T {
    result.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
}

fn link_contention() -> ApplyFailure {
    let message = "another program on this node keeps changing the links of this network; find and stop it";
    ApplyFailure { reason: reason::LINK_CONTENTION.to_owned(), message: message.to_owned() }
}

fn execute(mut executor: LinkExecutor, steps: Vec<BridgeStep>) -> (LinkExecutor, Vec<StepResult>) {
    let mut failed: BTreeSet<Uid> = BTreeSet::new();
    let mut results = Vec::with_capacity(steps.len());
    for step in steps {
        if failed.contains(&step.network) {
            continue;
        }
        let result = match &step.action {
            Action::WriteRecord(record) => executor.records.put(record.clone()).map_err(StepError::from),
            Action::RemoveRecord => executor.records.remove(&step.network).map_err(StepError::from),
            action => executor.editor.apply(action).map_err(StepError::from),
        };
        if result.is_err() {
            failed.insert(step.network.clone());
        }
        results.push((step, result));
    }
    (executor, results)
}

/// The reason and message of a failed step.
fn failure(action: &Action, error: &StepError) -> ApplyFailure {
    const EADDRINUSE: i32 = 98;
    let errno = match error {
        StepError::Kernel(error) => error.errno(),
        StepError::Disk(_) => None,
    };
    let reason = match (error, errno) {
        (StepError::Disk(_), _) => reason::RECORD,
        (_, Some(EADDRINUSE)) => reason::PORT_IN_USE,
        _ => reason::REFUSED,
    };
    let message = if reason == reason::PORT_IN_USE {
        "another program on this node uses the UDP port of the VXLAN; set another spec.overlay.port, or stop that \
         program"
            .to_owned()
    } else {
        let (change, cause) = (ChangeVerb::of(action).sentence(), ErrorChain(error).to_string());
        if cause.starts_with(change) { cause } else { format!("{change}: {cause}") }
    };
    ApplyFailure { reason: reason.to_owned(), message }
}

#[cfg(test)]
pub mod tests;
