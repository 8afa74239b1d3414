//! The bridge networks of this node: what is known of them, what is done about them, and what is said.
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
    bridge::{self as rules, Action, Failure, Peer, Record, Settled, Step, Uid, View, reason},
    nodenetwork::{self, Facts, Observed},
};
use tokio::{sync::watch, task, time::Instant};
use tracing::{debug, info, warn};

use crate::{
    cni::{NetworkState, NetworkView, Networks},
    event::{Events, Reason},
    metrics::{ChangeLabels, ChangeVerb, Metrics, ResultLabel},
    network::{self, Known, Labels},
    record::{self, Records},
};

/// How long to go on with changes before the rest is left to the next turn.
const LONGEST_TURN: Duration = Duration::from_secs(2);
/// How many changes are made between two looks.
const BATCH: usize = 128;
/// How often a network is repaired in one turn before somebody else must be at work.
const REPAIRS: usize = 8;
/// The least time between two events about repairs of one network.
const BETWEEN_EVENTS: Duration = Duration::from_secs(60);

pub const UNREADABLE: &str = "Unreadable";
const UNREADABLE_MESSAGE: &str = "this daemon cannot read the BridgeNetwork, and leaves its links as they are; is the \
    daemon older than the kind?";

/// How long to wait at most before a network that failed is tried again.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// What makes changes.
struct Hands {
    changer: Changer,
    records: Records,
}

/// The networks of one node.
pub struct Bridges {
    boot: String,
    /// None only while they are at work.
    hands: Option<Hands>,
    records: BTreeMap<Uid, Record>,
    /// None until the API server has said what there is.
    networks: Option<BTreeMap<Uid, Known>>,
    /// The names of BridgeNetworks that cannot be read.
    unreadable: BTreeMap<Uid, String>,
    peers: Option<BTreeMap<String, Peer>>,
    pauses: BTreeMap<Uid, Pause>,
    /// When a repair was last told of.
    told: BTreeMap<Uid, Instant>,
    /// What was right after the last plan.
    settled: BTreeMap<Uid, Settled>,
    reports: Vec<NetworkOnNode>,
    /// The names of the networks that were too many.
    left_out: Vec<String>,
    /// Where the connection to the API server goes.
    servers: Vec<IpAddr>,
    tell: watch::Sender<Arc<Networks>>,
    events: Events,
    metrics: Metrics,
}

/// A network that failed, and when to try again.
struct Pause {
    failure: Failure,
    until: Instant,
    backoff: DefaultBackoff,
}

/// What is known of the node itself.
#[derive(Clone, Copy)]
pub struct Around<'a> {
    pub facts: &'a Facts,
    pub labels: &'a Labels,
    pub ignored: &'a Patterns,
    /// The networks that the NodeNetwork lists at the API server.
    pub listed: &'a BTreeSet<Uid>,
}

/// What the networks are made with.
pub struct Tools {
    pub boot: String,
    pub changer: Changer,
    pub records: Records,
    pub servers: Vec<IpAddr>,
    pub tell: watch::Sender<Arc<Networks>>,
    pub events: Events,
    pub metrics: Metrics,
}

/// A step and what became of it.
type Done = (Step, Result<(), Refusal>);

/// Why a step was not made.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error(transparent)]
    Kernel(#[from] link::Error),
    #[error(transparent)]
    Disk(#[from] record::Error),
}

impl Bridges {
    pub fn new(tools: Tools) -> Self {
        let Tools { boot, changer, records, servers, tell, events, metrics } = tools;
        Self {
            boot,
            records: records.all().clone(),
            hands: Some(Hands { changer, records }),
            networks: None,
            unreadable: BTreeMap::new(),
            peers: None,
            pauses: BTreeMap::new(),
            told: BTreeMap::new(),
            settled: BTreeMap::new(),
            reports: Vec::new(),
            left_out: Vec::new(),
            servers,
            tell,
            events,
            metrics,
        }
    }

    /// What to publish. None as long as too little is known: an empty list would say that there are no links.
    pub fn reports(&self) -> Option<&[NetworkOnNode]> {
        (self.networks.is_some() && self.peers.is_some()).then_some(&self.reports)
    }

    pub fn see_all_networks(&mut self, objects: &[DynamicObject]) {
        self.unreadable.clear();
        self.networks = Some(BTreeMap::new());
        for object in objects {
            self.see_network(object);
        }
    }

    pub fn see_network(&mut self, object: &DynamicObject) {
        let (Some(networks), Some(uid)) = (&mut self.networks, object.uid()) else { return };
        if let Some(known) = Known::read(object) {
            self.unreadable.remove(&uid);
            networks.insert(uid, known);
        } else {
            warn!(
                network = object.name_any(),
                "a BridgeNetwork cannot be read: its links are left as they are"
            );
            networks.remove(&uid);
            self.unreadable.insert(uid, object.name_any());
        }
    }

    pub fn lose_network(&mut self, object: &DynamicObject) {
        if let (Some(networks), Some(uid)) = (&mut self.networks, object.uid()) {
            networks.remove(&uid);
            self.unreadable.remove(&uid);
        }
    }

    /// This node has no Node: what it holds of the cluster may be given to others.
    pub fn lose_own_node(&self) {
        self.tell.send_if_modified(|networks| {
            let had = networks.node.is_some();
            if had {
                Arc::make_mut(networks).node = None;
            }
            had
        });
    }

    /// The NodeNetworks of all nodes but `own`.
    pub fn see_all_nodes(&mut self, objects: &[DynamicObject], own: &str) {
        let others = objects.iter().filter(|object| object.name_any() != own);
        self.peers = Some(others.map(|object| (object.name_any(), network::peer(object))).collect());
    }

    pub fn see_node(&mut self, object: &DynamicObject) {
        if let Some(peers) = &mut self.peers {
            peers.insert(object.name_any(), network::peer(object));
        }
    }

    pub fn lose_node(&mut self, object: &DynamicObject) {
        if let Some(peers) = &mut self.peers {
            peers.remove(&object.name_any());
        }
    }

    /// Changes the kernel until it is as it should be, and says when to come back for what failed.
    pub async fn converge(
        &mut self,
        monitor: &Monitor,
        around: Around<'_>,
        observed: &mut Observed,
    ) -> Result<Option<Instant>, link::Error> {
        if self.networks.is_none() || self.peers.is_none() {
            return Ok(None);
        }
        let api_links = self.api_links(around, observed).await;
        let begun = Instant::now();
        let mut repairs: BTreeMap<Uid, usize> = BTreeMap::new();
        loop {
            let plan = self.plan(around, observed, &api_links);
            self.note(&plan.left_out);
            self.reports = plan.networks;
            // Pods are told before links change: whoever joined meanwhile is seen by the look that follows, and whoever
            // joins after it sees that the network is not to be joined.
            if self.publish(around, observed) {
                *observed = monitor.observe().await?;
                if begun.elapsed() > LONGEST_TURN {
                    return Ok(Some(Instant::now()));
                }
                continue;
            }
            self.settled = plan.settled;
            let waiting: BTreeSet<Uid> = plan.steps.iter().map(|step| step.network.clone()).collect();
            let mut due: Vec<Step> = plan.steps.into_iter().filter(|step| self.is_due(step)).collect();
            if due.is_empty() {
                return Ok(self.rest(&waiting));
            }
            if begun.elapsed() > LONGEST_TURN {
                // Others have their turn too: word of changes, and the NodeNetwork.
                self.rest(&waiting);
                return Ok(Some(Instant::now()));
            }
            due.truncate(BATCH);
            for uid in self.apply(due).await {
                let count = repairs.entry(uid.clone()).or_default();
                *count += 1;
                if *count > REPAIRS {
                    self.pause(&uid, fought());
                }
            }
            *observed = monitor.observe().await?;
        }
    }

    fn plan(&self, around: Around<'_>, observed: &Observed, api_links: &BTreeSet<u32>) -> rules::Plan {
        let Around { facts, labels, ignored, listed } = around;
        let networks: Vec<_> =
            self.networks.iter().flat_map(BTreeMap::values).map(|known| known.on(labels)).collect();
        let peers: Vec<Peer> = self.peers.iter().flat_map(BTreeMap::values).cloned().collect();
        let failures = self.pauses.iter().map(|(uid, pause)| (uid.clone(), pause.failure.clone())).collect();
        let mut plan = rules::plan(&View {
            facts,
            boot: &self.boot,
            vtep: nodenetwork::vtep(observed, facts, ignored).as_ref(),
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
            let takes = |action: &Action| matches!(action, Action::Delete { .. } | Action::Forget);
            plan.steps.retain(|step| !takes(&step.action));
        }
        plan
    }

    /// Asked for only if some network wants a NIC of the node. As long as the way cannot be told, it may be any link.
    async fn api_links(&mut self, around: Around<'_>, observed: &Observed) -> BTreeSet<u32> {
        let mut all = self.networks.iter().flat_map(BTreeMap::values);
        let wanted = all.any(|known| known.on(around.labels).uplink.is_some());
        let Some(mut hands) = self.hands.take_if(|_| wanted) else { return BTreeSet::new() };
        let servers = self.servers.clone();
        let asked = task::spawn_blocking(move || {
            let ways = servers.into_iter().map(|server| hands.changer.route_to(server));
            let ways = ways.collect::<Result<Vec<_>, _>>();
            (hands, ways)
        });
        let (hands, ways) = finished(asked.await);
        self.hands = Some(hands);
        match ways {
            Ok(ways) => ways.into_iter().flatten().collect(),
            Err(error) => {
                warn!(error = %Chain(&error), "cannot tell which link leads to the API server: no uplink is taken");
                observed.links.iter().map(|link| link.index).collect()
            }
        }
    }

    /// Says which networks are too many for this node, once.
    fn note(&mut self, left_out: &[String]) {
        if self.left_out != left_out {
            warn!(networks = ?left_out, "this node has too many networks and takes no part in the youngest");
            self.left_out = left_out.to_vec();
        }
    }

    fn is_due(&self, step: &Step) -> bool {
        self.pauses.get(&step.network).is_none_or(|pause| pause.until <= Instant::now())
    }

    /// Makes the changes, each network's in order up to its first failure, and returns the networks that were repaired.
    async fn apply(&mut self, steps: Vec<Step>) -> BTreeSet<Uid> {
        let Some(hands) = self.hands.take() else { return BTreeSet::new() };
        // Netlink and the disk may block.
        let (hands, done) = finished(task::spawn_blocking(move || work(hands, steps)).await);
        self.records = hands.records.all().clone();
        self.hands = Some(hands);
        let mut repaired = BTreeSet::new();
        for (step, result) in done {
            let change =
                ChangeLabels { verb: ChangeVerb::of(&step.action), result: ResultLabel::of(&result) };
            self.metrics.changes.get_or_create(&change).inc();
            match result {
                Ok(()) => {
                    info!(network = step.network, action = ?step.action, repair = step.repair, "changed");
                    if step.repair {
                        repaired.insert(step.network);
                    }
                }
                Err(error) => self.fail(&step, &error),
            }
        }
        for uid in &repaired {
            self.metrics.repairs.inc();
            self.tell_of_repair(uid);
        }
        repaired
    }

    /// Once a minute is enough, however often it happens: the metric counts.
    fn tell_of_repair(&mut self, uid: &Uid) {
        let now = Instant::now();
        if self.told.get(uid).is_some_and(|told| now < *told + BETWEEN_EVENTS) {
            return;
        }
        if let Some(known) = self.networks.as_ref().and_then(|networks| networks.get(uid)) {
            let note = "links of this network were changed by hand on this node and have been put right";
            self.events.tell(known.name(), uid, Reason::Repaired, note.to_owned());
            self.told.insert(uid.clone(), now);
        }
    }

    fn fail(&mut self, step: &Step, error: &Refusal) {
        debug!(network = step.network, action = ?step.action, error = %Chain(error), "a change failed");
        self.pause(&step.network, failure(&step.action, error));
    }

    /// Lets a network wait, longer each time.
    fn pause(&mut self, uid: &Uid, failure: Failure) {
        let before = self.pauses.remove(uid);
        if before.as_ref().is_none_or(|before| before.failure != failure) {
            warn!(
                network = uid,
                reason = failure.reason,
                error = failure.message,
                "a network waits and is tried again"
            );
            if let Some(known) = self.networks.as_ref().and_then(|networks| networks.get(uid)) {
                self.events.tell(known.name(), uid, Reason::Failed, failure.message.clone());
            }
        }
        let mut backoff = before.map(|before| before.backoff).unwrap_or_default();
        let delay = backoff.next().unwrap_or(LONGEST_PAUSE).min(LONGEST_PAUSE);
        self.pauses.insert(uid.clone(), Pause { failure, until: Instant::now() + delay, backoff });
    }

    /// Forgets the failures of networks that have nothing to do any more, and says when to come back for the others.
    fn rest(&mut self, waiting: &BTreeSet<Uid>) -> Option<Instant> {
        self.pauses.retain(|uid, _| waiting.contains(uid));
        self.told.retain(|_, told| told.elapsed() < BETWEEN_EVENTS);
        let ready = self.reports.iter().filter(|one| one.ready).count();
        self.metrics.networks.set(i64::try_from(self.reports.len()).unwrap_or(i64::MAX));
        self.metrics.networks_ready.set(i64::try_from(ready).unwrap_or(i64::MAX));
        self.pauses.values().map(|pause| pause.until).min()
    }

    /// Tells the CNI server what pods can join, and says whether that was news.
    fn publish(&self, around: Around<'_>, observed: &Observed) -> bool {
        let Around { facts, labels, .. } = around;
        let node = Holder { node: facts.name.clone(), uid: facts.uid.clone() };
        let reports: BTreeMap<&str, &NetworkOnNode> =
            self.reports.iter().map(|report| (report.uid.as_str(), report)).collect();
        let indexes: BTreeMap<&str, u32> =
            observed.links.iter().map(|link| (link.name.as_str(), link.index)).collect();
        let told = Arc::clone(&self.tell.borrow());
        // A change in place is no reason to send pods away from a bridge that they could join before.
        let was_ready = |known: &Known, bridge: u32| {
            told.by_name.get(known.name()).is_some_and(|view| {
                let same = |state: &NetworkState| matches!(state, NetworkState::Ready { bridge_index, .. } if *bridge_index == bridge);
                view.uid == known.uid() && same(&view.state)
            })
        };
        let state = |known: &Known| {
            if known.is_undone() {
                return NetworkState::Removing;
            }
            if !known.selects(labels) {
                return NetworkState::NotSelected;
            }
            let Some(report) = reports.get(known.uid()) else {
                return NetworkState::NotReady { reason: "Pending".to_owned(), message: String::new() };
            };
            let mtu = known.mtu().min(report.mtu.and_then(|mtu| u32::try_from(mtu).ok()));
            match (indexes.get(report.bridge.as_str()), mtu) {
                (Some(&bridge_index), Some(mtu))
                    if report.ready
                        || report.reason == reason::APPLYING && was_ready(known, bridge_index) =>
                {
                    NetworkState::Ready { bridge_index, mtu, removing: known.is_deleted() }
                }
                _ => {
                    NetworkState::NotReady { reason: report.reason.clone(), message: report.message.clone() }
                }
            }
        };
        let unreadable = self.unreadable.iter().map(|(uid, name)| {
            let (reason, message) = (UNREADABLE.to_owned(), UNREADABLE_MESSAGE.to_owned());
            let state = NetworkState::NotReady { reason, message };
            (name.clone(), NetworkView { uid: uid.clone(), state, ipam: None })
        });
        let by_name = self
            .networks
            .iter()
            .flat_map(BTreeMap::values)
            .map(|known| {
                let (uid, ipam) = (known.uid().to_owned(), known.ipam());
                let view = NetworkView { uid, state: state(known), ipam };
                (known.name().to_owned(), view)
            })
            .chain(unreadable)
            .collect();
        let now = Networks { synced: true, node: Some(node), by_name };
        self.tell.send_if_modified(|before| {
            let changed = **before != now;
            if changed {
                *before = Arc::new(now);
            }
            changed
        })
    }
}

/// What a thread for blocking work returned. One that panicked takes the daemon with it.
fn finished<T>(ended: Result<T, task::JoinError>) -> T {
    ended.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
}

fn fought() -> Failure {
    let message =
        "another program of this node changes the links of this network again and again; find and stop it";
    Failure { reason: "Fought".to_owned(), message: message.to_owned() }
}

fn work(mut hands: Hands, steps: Vec<Step>) -> (Hands, Vec<Done>) {
    let mut failed: BTreeSet<Uid> = BTreeSet::new();
    let mut done = Vec::with_capacity(steps.len());
    for step in steps {
        if failed.contains(&step.network) {
            continue;
        }
        let result = match &step.action {
            Action::Record(record) => hands.records.put(record.clone()).map_err(Refusal::from),
            Action::Forget => hands.records.remove(&step.network).map_err(Refusal::from),
            action => hands.changer.apply(action).map_err(Refusal::from),
        };
        if result.is_err() {
            failed.insert(step.network.clone());
        }
        done.push((step, result));
    }
    (hands, done)
}

/// What to say about a step that failed.
fn failure(action: &Action, error: &Refusal) -> Failure {
    const EADDRINUSE: i32 = 98;
    let errno = match error {
        Refusal::Kernel(error) => error.errno(),
        Refusal::Disk(_) => None,
    };
    let reason = match (error, errno) {
        (Refusal::Disk(_), _) => reason::RECORD,
        (_, Some(EADDRINUSE)) => reason::PORT_IN_USE,
        _ => reason::REFUSED,
    };
    let message = if reason == reason::PORT_IN_USE {
        "another program of this node has the UDP port of the VXLAN; choose another spec.overlay.port, or stop that \
         program"
            .to_owned()
    } else {
        format!("{}: {}", ChangeVerb::of(action).sentence(), Chain(error))
    };
    Failure { reason: reason.to_owned(), message }
}

#[cfg(test)]
pub mod tests;
