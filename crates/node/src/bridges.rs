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

use api::{Chain, NetworkOnNode, Patterns};
use kube::{ResourceExt as _, api::DynamicObject, runtime::watcher::DefaultBackoff};
use link::{Changer, Monitor};
use plan::{
    bridge::{self as rules, Action, Failure, Peer, Record, Settled, Step, Uid, View, reason},
    nodenetwork::{self, Facts, Observed},
};
use tokio::{sync::watch, task, time::Instant};
use tracing::{debug, info, warn};

use crate::{
    cni::{NetworkView, Networks, State},
    event::{Events, Reason},
    metrics::{Change, Metrics, Outcome, Verb},
    network::{self, Known, Labels},
    record::{self, Records},
};

/// How often to look again after changes before the rest is left to the next turn.
const PASSES: usize = 12;
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
    peers: Option<BTreeMap<String, Peer>>,
    pauses: BTreeMap<Uid, Pause>,
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
            peers: None,
            pauses: BTreeMap::new(),
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
        self.networks = Some(objects.iter().filter_map(read).collect());
    }

    pub fn see_network(&mut self, object: &DynamicObject) {
        if let (Some(networks), Some((uid, known))) = (&mut self.networks, read(object)) {
            networks.insert(uid, known);
        }
    }

    pub fn lose_network(&mut self, object: &DynamicObject) {
        if let (Some(networks), Some(uid)) = (&mut self.networks, object.uid()) {
            networks.remove(&uid);
        }
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
        for _ in 0..PASSES {
            let api_links = self.api_links(around)?;
            let plan = self.plan(around, observed, &api_links);
            self.note(&plan.left_out);
            self.reports = plan.networks;
            // Pods are told before links change: whoever joined meanwhile is seen by the look that follows, and whoever
            // joins after it sees that the network is not to be joined.
            if self.publish(around.labels, observed) {
                *observed = monitor.observe().await?;
                continue;
            }
            self.settled = plan.settled;
            let due: Vec<Step> = plan.steps.into_iter().filter(|step| self.is_due(step)).collect();
            if due.is_empty() {
                break;
            }
            self.apply(due).await;
            *observed = monitor.observe().await?;
        }
        self.rest();
        Ok(self.pauses.values().map(|pause| pause.until).min())
    }

    fn plan(&self, around: Around<'_>, observed: &Observed, api_links: &BTreeSet<u32>) -> rules::Plan {
        let Around { facts, labels, ignored, listed } = around;
        let networks: Vec<_> =
            self.networks.iter().flat_map(BTreeMap::values).map(|known| known.on(labels)).collect();
        let peers: Vec<Peer> = self.peers.iter().flat_map(BTreeMap::values).cloned().collect();
        let failures = self.pauses.iter().map(|(uid, pause)| (uid.clone(), pause.failure.clone())).collect();
        rules::plan(&View {
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
        })
    }

    /// Asked for only if some network wants a NIC of the node.
    fn api_links(&mut self, around: Around<'_>) -> Result<BTreeSet<u32>, link::Error> {
        let wanted = self
            .networks
            .iter()
            .flat_map(BTreeMap::values)
            .any(|known| known.on(around.labels).uplink.is_some());
        let Some(hands) = self.hands.as_mut().filter(|_| wanted) else { return Ok(BTreeSet::new()) };
        let mut links = BTreeSet::new();
        for &server in &self.servers {
            links.extend(hands.changer.route_to(server)?);
        }
        Ok(links)
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

    /// Makes the changes, each network's in order up to its first failure.
    async fn apply(&mut self, steps: Vec<Step>) {
        let Some(hands) = self.hands.take() else { return };
        // Netlink and the disk may block.
        let done = task::spawn_blocking(move || work(hands, steps)).await;
        let (hands, done) = match done {
            Ok(done) => done,
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        };
        self.records = hands.records.all().clone();
        self.hands = Some(hands);
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
                Err(error) => self.fail(&step, &error),
            }
        }
        for uid in repaired {
            self.metrics.repairs.inc();
            if let Some(known) = self.networks.as_ref().and_then(|networks| networks.get(&uid)) {
                let note = "links of this network were changed by hand on this node and have been put right";
                self.events.tell(known.name(), &uid, Reason::Repaired, note.to_owned());
            }
        }
    }

    fn fail(&mut self, step: &Step, error: &Refusal) {
        let failure = failure(&step.action, error);
        let known = self.networks.as_ref().and_then(|networks| networks.get(&step.network));
        let before = self.pauses.remove(&step.network);
        if before.as_ref().is_none_or(|before| before.failure != failure) {
            warn!(network = step.network, action = ?step.action, error = %Chain(error), "a change failed and is tried again");
            if let Some(known) = known {
                self.events.tell(known.name(), known.uid(), Reason::Failed, failure.message.clone());
            }
        }
        let mut backoff = before.map(|before| before.backoff).unwrap_or_default();
        let delay = backoff.next().unwrap_or(LONGEST_PAUSE).min(LONGEST_PAUSE);
        self.pauses.insert(step.network.clone(), Pause { failure, until: Instant::now() + delay, backoff });
    }

    /// Forgets the failures of networks that are well, or gone.
    fn rest(&mut self) {
        let listed: BTreeSet<&Uid> = self.reports.iter().map(|one| &one.uid).collect();
        self.pauses.retain(|uid, _| listed.contains(uid) && !self.settled.contains_key(uid));
        let ready = self.reports.iter().filter(|one| one.ready).count();
        self.metrics.networks.set(i64::try_from(self.reports.len()).unwrap_or(i64::MAX));
        self.metrics.networks_ready.set(i64::try_from(ready).unwrap_or(i64::MAX));
    }

    /// Tells the CNI server what pods can join, and says whether that was news.
    fn publish(&self, labels: &Labels, observed: &Observed) -> bool {
        let reports: BTreeMap<&str, &NetworkOnNode> =
            self.reports.iter().map(|report| (report.uid.as_str(), report)).collect();
        let index = |name: &str| observed.links.iter().find(|link| link.name == name).map(|link| link.index);
        let state = |known: &Known| {
            if known.is_undone() {
                return State::Removing;
            }
            if !known.selects(labels) {
                return State::NotSelected;
            }
            let Some(report) = reports.get(known.uid()) else {
                return State::NotReady { reason: "Pending".to_owned(), message: String::new() };
            };
            match (report.ready, index(&report.bridge), known.mtu()) {
                (true, Some(bridge_index), Some(mtu)) => {
                    State::Ready { bridge_index, mtu, removing: known.is_deleted() }
                }
                _ => State::NotReady { reason: report.reason.clone(), message: report.message.clone() },
            }
        };
        let by_name = self
            .networks
            .iter()
            .flat_map(BTreeMap::values)
            .map(|known| {
                let view = NetworkView { uid: known.uid().to_owned(), state: state(known) };
                (known.name().to_owned(), view)
            })
            .collect();
        let now = Networks { synced: true, by_name };
        self.tell.send_if_modified(|before| {
            let changed = **before != now;
            if changed {
                *before = Arc::new(now);
            }
            changed
        })
    }
}

fn read(object: &DynamicObject) -> Option<(Uid, Known)> {
    let known = Known::read(object);
    if known.is_none() {
        debug!(network = object.name_any(), "a BridgeNetwork cannot be read and is left alone");
    }
    known.map(|known| (known.uid().to_owned(), known))
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
        format!("{}: {}", Verb::of(action).sentence(), Chain(error))
    };
    Failure { reason: reason.to_owned(), message }
}

#[cfg(test)]
pub mod tests {
    use kube::Client;

    use super::*;

    /// Networks of a node that knows of none, and would fail to change anything.
    pub fn bridges(client: Client, metrics: Metrics) -> Bridges {
        let state = std::env::temp_dir().join(format!("patchbay-bridges-{}", std::process::id()));
        let records = Records::open(&state).unwrap();
        std::fs::remove_dir_all(&state).unwrap();
        Bridges::new(Tools {
            boot: "boot".to_owned(),
            changer: Changer::open(std::path::Path::new("/nowhere")).unwrap(),
            records,
            servers: Vec::new(),
            tell: watch::channel(Arc::default()).0,
            events: Events::new(client, "a").0,
            metrics,
        })
    }

    fn step(action: Action) -> Step {
        Step { network: "u".to_owned(), action, repair: false }
    }

    #[tokio::test]
    async fn a_network_that_fails_waits_and_says_why() {
        let client = Client::try_from(kube::Config::new("http://127.0.0.1:1".parse().unwrap())).unwrap();
        let mut bridges = bridges(client, Metrics::default());
        // The record's directory is gone.
        let record = Record {
            uid: "u".to_owned(),
            name: "blue".to_owned(),
            boot: "boot".to_owned(),
            bridge: "br-blue".parse().unwrap(),
            vxlan: "vx-blue".parse().unwrap(),
            node_uid: "n".to_owned(),
            uplink: None,
        };
        bridges.apply(vec![step(Action::Record(record)), step(Action::Delete { link: u32::MAX })]).await;
        let pause = &bridges.pauses["u"];
        assert_eq!(pause.failure.reason, "RecordFailed");
        assert!(
            pause.failure.message.starts_with("write down what is found: write the record"),
            "{:?}",
            pause.failure
        );
        assert!(!bridges.is_due(&step(Action::Forget)));
        assert!(bridges.records.is_empty());
    }
}
