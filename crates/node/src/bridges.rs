//! The bridge networks of this node: what is network of them, what is done about them, and what is said.
//!
//! Decides nothing: `plan::bridge` does. Looks again after each round of changes until nothing is left to do, and lets
//! a network that fails wait without holding up the others.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use api::{Chain, NetworkOnNode, Patterns, ipblock::Holder};
use kube::{ResourceExt as _, api::DynamicObject, runtime::watcher::DefaultBackoff};
use link::{Changer, Monitor};
use plan::{
    bridge::{
        self as rules, Action, ApplyFailure, BridgeInput, BridgeStep, LinkRecord, Peer, Settled, Uid, reason,
    },
    nodenetwork::{self, KernelState, NodeInfo},
};
use tokio::{sync::watch, task, time::Instant};
use tracing::{debug, info, warn};

use crate::{
    cni::{NetworkView, Networks, State},
    event::{EventReason, Events},
    link_records::{self, LinkRecords},
    metrics::{Change, Metrics, Outcome, Verb},
    network::{self, Labels, ParsedNetwork},
};

/// How long to go on with changes before the rest is left to the next turn.
const RECONCILE_BUDGET: Duration = Duration::from_secs(2);
/// How many changes are made between two looks.
const MAX_STEPS_PER_PASS: usize = 128;
/// How often a network is repaired in one turn before somebody else must be at execute.
const MAX_REPAIRS: usize = 8;
/// The least time between two events about repairs of one network.
const MIN_REPAIR_EVENT_INTERVAL: Duration = Duration::from_secs(60);

pub const UNREADABLE: &str = "Unreadable";
const UNREADABLE_MESSAGE: &str = "this daemon cannot read the BridgeNetwork, and leaves its links as they are; is the \
    daemon older than the kind?";

/// How long to wait at most before a network that failed is tried again.
const MAX_BACKOFF: Duration = Duration::from_secs(30);

/// What makes changes.
struct LinkExecutor {
    changer: Changer,
    records: LinkRecords,
}

/// The networks of one node.
pub struct BridgeController {
    boot: String,
    /// None only while they are at execute.
    executor: Option<LinkExecutor>,
    records: BTreeMap<Uid, LinkRecord>,
    /// None until the API server has said what there is.
    networks: Option<BTreeMap<Uid, ParsedNetwork>>,
    /// The names of BridgeNetworks that cannot be read.
    unreadable: BTreeMap<Uid, String>,
    peers: Option<BTreeMap<String, Peer>>,
    backoffs: BTreeMap<Uid, NetworkBackoff>,
    /// When a repair was last told of.
    repair_events: BTreeMap<Uid, Instant>,
    /// What was right after the last plan.
    settled: BTreeMap<Uid, Settled>,
    reports: Vec<NetworkOnNode>,
    /// The names of the networks that were too many.
    omitted: Vec<String>,
    /// Where the connection to the API server goes.
    servers: Vec<IpAddr>,
    published: watch::Sender<Arc<Networks>>,
    events: Events,
    metrics: Metrics,
}

/// A network that failed, and when to try again.
struct NetworkBackoff {
    failure: ApplyFailure,
    until: Instant,
    backoff: DefaultBackoff,
}

/// What is network of the node itself.
#[derive(Clone, Copy)]
pub struct NodeContext<'a> {
    pub node: &'a NodeInfo,
    pub labels: &'a Labels,
    pub ignored: &'a Patterns,
    /// The networks that the NodeNetwork lists at the API server.
    pub listed: &'a BTreeSet<Uid>,
}

/// What the networks are made with.
pub struct Deps {
    pub boot: String,
    pub changer: Changer,
    pub records: LinkRecords,
    pub servers: Vec<IpAddr>,
    pub published: watch::Sender<Arc<Networks>>,
    pub events: Events,
    pub metrics: Metrics,
}

/// A step and what became of it.
type StepResult = (BridgeStep, Result<(), StepError>);

/// Why a step was not made.
#[derive(Debug, thiserror::Error)]
enum StepError {
    #[error(transparent)]
    Kernel(#[from] link::Error),
    #[error(transparent)]
    Disk(#[from] link_records::Error),
}

impl BridgeController {
    pub fn new(deps: Deps) -> Self {
        let Deps { boot, changer, records, servers, published, events, metrics } = deps;
        Self {
            boot,
            records: records.all().clone(),
            executor: Some(LinkExecutor { changer, records }),
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

    /// What to publish. None as long as too little is network: an empty list would say that there are no links.
    pub fn reports(&self) -> Option<&[NetworkOnNode]> {
        (self.networks.is_some() && self.peers.is_some()).then_some(&self.reports)
    }

    pub fn replace_networks(&mut self, objects: &[DynamicObject]) {
        self.unreadable.clear();
        self.networks = Some(BTreeMap::new());
        for object in objects {
            self.apply_network(object);
        }
    }

    pub fn apply_network(&mut self, object: &DynamicObject) {
        let (Some(networks), Some(uid)) = (&mut self.networks, object.uid()) else { return };
        if let Some(network) = ParsedNetwork::read(object) {
            self.unreadable.remove(&uid);
            networks.insert(uid, network);
        } else {
            warn!(
                network = object.name_any(),
                "a BridgeNetwork cannot be read: its links are left as they are"
            );
            networks.remove(&uid);
            self.unreadable.insert(uid, object.name_any());
        }
    }

    pub fn delete_network(&mut self, object: &DynamicObject) {
        if let (Some(networks), Some(uid)) = (&mut self.networks, object.uid()) {
            networks.remove(&uid);
            self.unreadable.remove(&uid);
        }
    }

    /// This node has no Node: what it holds of the cluster may be given to others.
    pub fn clear_own_node(&self) {
        self.published.send_if_modified(|networks| {
            let had = networks.node.is_some();
            if had {
                Arc::make_mut(networks).node = None;
            }
            had
        });
    }

    /// The NodeNetworks of all nodes but `own`.
    pub fn replace_peers(&mut self, objects: &[DynamicObject], own: &str) {
        let others = objects.iter().filter(|object| object.name_any() != own);
        self.peers = Some(others.map(|object| (object.name_any(), network::peer(object))).collect());
    }

    pub fn apply_peer(&mut self, object: &DynamicObject) {
        if let Some(peers) = &mut self.peers {
            peers.insert(object.name_any(), network::peer(object));
        }
    }

    pub fn delete_peer(&mut self, object: &DynamicObject) {
        if let Some(peers) = &mut self.peers {
            peers.remove(&object.name_any());
        }
    }

    /// Changes the kernel until it is as it should be, and says when to come back for what failed.
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
            // Pods are told before links change: whoever joined meanwhile is seen by the look that follows, and whoever
            // joins after it sees that the network is not to be joined.
            if self.publish(context, observed) {
                *observed = monitor.observe().await?;
                if started.elapsed() > RECONCILE_BUDGET {
                    return Ok(Some(Instant::now()));
                }
                continue;
            }
            self.settled = plan.settled;
            let waiting: BTreeSet<Uid> = plan.steps.iter().map(|step| step.network.clone()).collect();
            let mut due: Vec<BridgeStep> = plan.steps.into_iter().filter(|step| self.is_due(step)).collect();
            if due.is_empty() {
                return Ok(self.next_retry(&waiting));
            }
            if started.elapsed() > RECONCILE_BUDGET {
                // Others have their turn too: word of changes, and the NodeNetwork.
                self.next_retry(&waiting);
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
            *observed = monitor.observe().await?;
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
        let peers: Vec<Peer> = self.peers.iter().flat_map(BTreeMap::values).cloned().collect();
        let failures =
            self.backoffs.iter().map(|(uid, backoff)| (uid.clone(), backoff.failure.clone())).collect();
        let mut plan = rules::plan(&BridgeInput {
            node,
            boot: &self.boot,
            vtep: nodenetwork::vtep(observed, node, ignored).as_ref(),
            networks: &networks,
            peers: &peers,
            observed,
            records: &self.records,
            listed,
            failures: &failures,
            settled: &self.settled,
            api_links,
        });
        // A network that cannot be read is not one that is gone.
        plan.steps.retain(|step| !self.unreadable.contains_key(&step.network));
        for report in plan.networks.iter_mut().filter(|report| self.unreadable.contains_key(&report.uid)) {
            (report.ready, report.reason) = (false, UNREADABLE.to_owned());
            UNREADABLE_MESSAGE.clone_into(&mut report.message);
        }
        if observed.partial {
            // What was not told may be the link of a pod.
            let takes = |action: &Action| matches!(action, Action::Delete { .. } | Action::RemoveRecord);
            plan.steps.retain(|step| !takes(&step.action));
        }
        plan
    }

    /// Asked for only if some network wants a NIC of the node. As long as the way cannot be told, it may be any link.
    async fn api_links(&mut self, context: NodeContext<'_>, observed: &KernelState) -> BTreeSet<u32> {
        let mut all = self.networks.iter().flat_map(BTreeMap::values);
        let wanted = all.any(|network| network.on(context.labels).uplink.is_some());
        let Some(mut executor) = self.executor.take_if(|_| wanted) else { return BTreeSet::new() };
        let servers = self.servers.clone();
        let asked = task::spawn_blocking(move || {
            let ways = servers.into_iter().map(|server| executor.changer.route_to(server));
            let ways = ways.collect::<Result<Vec<_>, _>>();
            (executor, ways)
        });
        let (executor, ways) = finished(asked.await);
        self.executor = Some(executor);
        match ways {
            Ok(ways) => ways.into_iter().flatten().collect(),
            Err(error) => {
                warn!(error = %Chain(&error), "cannot tell which link leads to the API server: no uplink is taken");
                observed.links.iter().map(|link| link.index).collect()
            }
        }
    }

    /// Says which networks are too many for this node, once.
    fn log_omitted(&mut self, omitted: &[String]) {
        if self.omitted != omitted {
            warn!(networks = ?omitted, "this node has too many networks and takes no part in the youngest");
            self.omitted = omitted.to_vec();
        }
    }

    fn is_due(&self, step: &BridgeStep) -> bool {
        self.backoffs.get(&step.network).is_none_or(|backoff| backoff.until <= Instant::now())
    }

    /// Makes the changes, each network's in order up to its first failure, and returns the networks that were repaired.
    async fn apply(&mut self, steps: Vec<BridgeStep>) -> BTreeSet<Uid> {
        let Some(executor) = self.executor.take() else { return BTreeSet::new() };
        // Netlink and the disk may block.
        let (executor, done) = finished(task::spawn_blocking(move || execute(executor, steps)).await);
        self.records = executor.records.all().clone();
        self.executor = Some(executor);
        let mut repaired = BTreeSet::new();
        for (step, result) in done {
            let change = Change { verb: Verb::of(&step.action), result: Outcome::of(&result) };
            self.metrics.changes.get_or_create(&change).inc();
            match result {
                Ok(()) => {
                    info!(network = step.network, action = ?step.action, repair = step.repair, "changed");
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

    /// Once a minute is enough, however often it happens: the metric counts.
    fn record_repair_event(&mut self, uid: &Uid) {
        let now = Instant::now();
        if self.repair_events.get(uid).is_some_and(|told| now < *told + MIN_REPAIR_EVENT_INTERVAL) {
            return;
        }
        if let Some(network) = self.networks.as_ref().and_then(|networks| networks.get(uid)) {
            let note = "links of this network were changed by hand on this node and have been put right";
            self.events.record(network.name(), uid, EventReason::Repaired, note.to_owned());
            self.repair_events.insert(uid.clone(), now);
        }
    }

    fn step_failed(&mut self, step: &BridgeStep, error: &StepError) {
        debug!(network = step.network, action = ?step.action, error = %Chain(error), "a change failed");
        self.back_off(&step.network, failure(&step.action, error));
    }

    /// Lets a network wait, longer each time.
    fn back_off(&mut self, uid: &Uid, failure: ApplyFailure) {
        let before = self.backoffs.remove(uid);
        if before.as_ref().is_none_or(|before| before.failure != failure) {
            warn!(
                network = uid,
                reason = failure.reason,
                error = failure.message,
                "a network waits and is tried again"
            );
            if let Some(network) = self.networks.as_ref().and_then(|networks| networks.get(uid)) {
                self.events.record(network.name(), uid, EventReason::Failed, failure.message.clone());
            }
        }
        let mut backoff = before.map(|before| before.backoff).unwrap_or_default();
        let delay = backoff.next().unwrap_or(MAX_BACKOFF).min(MAX_BACKOFF);
        self.backoffs.insert(uid.clone(), NetworkBackoff { failure, until: Instant::now() + delay, backoff });
    }

    /// Forgets the failures of networks that have nothing to do any more, and says when to come back for the others.
    fn next_retry(&mut self, waiting: &BTreeSet<Uid>) -> Option<Instant> {
        self.backoffs.retain(|uid, _| waiting.contains(uid));
        self.repair_events.retain(|_, told| told.elapsed() < MIN_REPAIR_EVENT_INTERVAL);
        let ready = self.reports.iter().filter(|one| one.ready).count();
        self.metrics.networks.set(i64::try_from(self.reports.len()).unwrap_or(i64::MAX));
        self.metrics.networks_ready.set(i64::try_from(ready).unwrap_or(i64::MAX));
        self.backoffs.values().map(|backoff| backoff.until).min()
    }

    /// Tells the CNI server what pods can join, and says whether that was news.
    fn publish(&self, context: NodeContext<'_>, observed: &KernelState) -> bool {
        let NodeContext { node, labels, .. } = context;
        let node = Holder { node: node.name.clone(), uid: node.uid.clone() };
        let reports: BTreeMap<&str, &NetworkOnNode> =
            self.reports.iter().map(|report| (report.uid.as_str(), report)).collect();
        let indexes: BTreeMap<&str, u32> =
            observed.links.iter().map(|link| (link.name.as_str(), link.index)).collect();
        let told = Arc::clone(&self.published.borrow());
        // A change in place is no reason to send pods away from a bridge that they could join before.
        let was_ready = |network: &ParsedNetwork, bridge: u32| {
            told.by_name.get(network.name()).is_some_and(|view| {
                let same = |state: &State| matches!(state, State::Ready { bridge_index, .. } if *bridge_index == bridge);
                view.uid == network.uid() && same(&view.state)
            })
        };
        let state = |network: &ParsedNetwork| {
            if network.is_undone() {
                return State::Removing;
            }
            if !network.selects(labels) {
                return State::NotSelected;
            }
            let Some(report) = reports.get(network.uid()) else {
                return State::NotReady { reason: "Pending".to_owned(), message: String::new() };
            };
            let mtu = network.mtu().min(report.mtu.and_then(|mtu| u32::try_from(mtu).ok()));
            match (indexes.get(report.bridge.as_str()), mtu) {
                (Some(&bridge_index), Some(mtu))
                    if report.ready
                        || report.reason == reason::APPLYING && was_ready(network, bridge_index) =>
                {
                    State::Ready { bridge_index, mtu, removing: network.is_deleted() }
                }
                _ => State::NotReady { reason: report.reason.clone(), message: report.message.clone() },
            }
        };
        let unreadable = self.unreadable.iter().map(|(uid, name)| {
            let (reason, message) = (UNREADABLE.to_owned(), UNREADABLE_MESSAGE.to_owned());
            let state = State::NotReady { reason, message };
            (name.clone(), NetworkView { uid: uid.clone(), state, ipam: None })
        });
        let by_name = self
            .networks
            .iter()
            .flat_map(BTreeMap::values)
            .map(|network| {
                let (uid, ipam) = (network.uid().to_owned(), network.ipam());
                let view = NetworkView { uid, state: state(network), ipam };
                (network.name().to_owned(), view)
            })
            .chain(unreadable)
            .collect();
        let now = Networks { synced: true, node: Some(node), by_name };
        self.published.send_if_modified(|before| {
            let changed = **before != now;
            if changed {
                *before = Arc::new(now);
            }
            changed
        })
    }
}

/// What a thread for blocking execute returned. One that panicked takes the daemon with it.
fn finished<T>(ended: Result<T, task::JoinError>) -> T {
    ended.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
}

fn link_contention() -> ApplyFailure {
    let message =
        "another program of this node changes the links of this network again and again; find and stop it";
    ApplyFailure { reason: reason::LINK_CONTENTION.to_owned(), message: message.to_owned() }
}

fn execute(mut executor: LinkExecutor, steps: Vec<BridgeStep>) -> (LinkExecutor, Vec<StepResult>) {
    let mut failed: BTreeSet<Uid> = BTreeSet::new();
    let mut done = Vec::with_capacity(steps.len());
    for step in steps {
        if failed.contains(&step.network) {
            continue;
        }
        let result = match &step.action {
            Action::WriteRecord(record) => executor.records.put(record.clone()).map_err(StepError::from),
            Action::RemoveRecord => executor.records.remove(&step.network).map_err(StepError::from),
            action => executor.changer.apply(action).map_err(StepError::from),
        };
        if result.is_err() {
            failed.insert(step.network.clone());
        }
        done.push((step, result));
    }
    (executor, done)
}

/// What to say about a step that failed.
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
        "another program of this node has the UDP port of the VXLAN; choose another spec.overlay.port, or stop that \
         program"
            .to_owned()
    } else {
        format!("{}: {}", Verb::of(action).sentence(), Chain(error))
    };
    ApplyFailure { reason: reason.to_owned(), message }
}

#[cfg(test)]
pub mod tests;
