//! The loop: what comes in from the kernel and the API server, and what is done about it.

use std::{collections::BTreeSet, fs, path::PathBuf, sync::Arc, time::Duration};

use api::{BridgeNetwork, ErrorChain, IfNamePatterns, NodeNetworkStatus};
use futures::FutureExt as _;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client, ResourceExt as _,
    api::{ApiResource, DynamicObject},
    runtime::{utils::Backoff as _, watcher::DefaultBackoff},
};
use link::{LinkChanges, Monitor};
use plan::nodenetwork::{
    self as rules, KernelState, Netfilter, NodeInfo, PublishDecision, PublishInput, WriteParts,
};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::{
    Error,
    bridges::{BridgeController, NodeContext},
    health::{Health, News, Part},
    metrics::{Kind, Look, Metrics, Outcome, Watched},
    network::Labels,
    node_network::{self, NodeNetworkClient, ServerObject},
    watch::{self, ObjectEvent, ObjectWatch},
};

/// How often the loop turns at least, to show that it can.
const HEARTBEAT: Duration = Duration::from_secs(20);

/// How often a turn goes on after a write: a network is listed, made, and told to be ready.
const ROUNDS: usize = 4;

/// What became of a publication.
enum Published {
    Written,
    /// When to come back, unless something happens before.
    Not(Option<Instant>),
}

/// Keeps the bridge networks and the NodeNetwork of one node.
pub struct Daemon {
    name: String,
    ignored: IfNamePatterns,
    monitor: Monitor,
    object: NodeNetworkClient,
    nodes: Api<Node>,
    networks: Api<DynamicObject>,
    bridges: BridgeController,
    /// Where the kernel's settings are.
    sysctls: PathBuf,
    metrics: Metrics,
    health: Arc<Health>,
    state: State,
}

/// What a daemon is told at its start.
pub struct Settings {
    pub name: String,
    pub ignored: IfNamePatterns,
    pub sysctls: PathBuf,
    pub metrics: Metrics,
}

/// What is known, and what was done.
#[derive(Default)]
struct State {
    facts: Option<NodeInfo>,
    labels: Labels,
    observed: Option<KernelState>,
    netfilter: bool,
    /// Whether the API server has said what it has.
    synced: bool,
    server: Option<ServerObject>,
    written: Option<rules::LastWrite>,
    last_write: Option<Instant>,
    /// The first event since the last look.
    event: Option<Instant>,
    last_look: Option<Instant>,
    /// How long to wait after looks that failed one after the other.
    look_backoff: DefaultBackoff,
    /// No write is tried before, after a failure.
    pause: Option<Instant>,
    /// How long to wait after writes that failed one after the other.
    write_backoff: DefaultBackoff,
}

impl Daemon {
    pub fn new(
        client: Client,
        settings: Settings,
        monitor: Monitor,
        bridges: BridgeController,
        health: Arc<Health>,
    ) -> Self {
        let Settings { name, ignored, sysctls, metrics } = settings;
        let networks = ApiResource::erase::<BridgeNetwork>(&());
        Self {
            object: NodeNetworkClient::new(client.clone(), name.clone(), metrics.clone()),
            nodes: Api::all(client.clone()),
            networks: Api::all_with(client, &networks),
            name,
            ignored,
            monitor,
            bridges,
            sysctls,
            metrics,
            health,
            // The first look is owed from the beginning.
            state: State { event: Some(Instant::now()), ..State::default() },
        }
    }

    /// Runs until `stop`. The API server may come and go; only the kernel falling silent ends it.
    pub async fn run(mut self, stop: CancellationToken) -> Result<(), Error> {
        let mut node = ObjectWatch::one(self.nodes.clone(), &self.name);
        let mut nodes = ObjectWatch::all(self.object.api().clone());
        let mut networks = ObjectWatch::all(self.networks.clone());
        loop {
            let Some(wake) = stop.run_until_cancelled(self.turn()).await else {
                return Ok(());
            };
            let beat = Instant::now() + HEARTBEAT;
            let wake = wake.map_or(beat, |at| at.min(beat));
            tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(()),
                seen = node.next() => self.see_node(seen),
                seen = nodes.next() => self.see_nodes(seen),
                seen = networks.next() => self.see_networks(seen),
                // One event is enough to look; the kernel keeps the others until then.
                changed = self.monitor.changed(), if self.state.event.is_none() => {
                    self.hear(changed.map_err(Error::Kernel)?);
                }
                () = sleep_until(wake) => {}
            }
        }
    }

    /// Does what is due, and says when to come back unless something happens before.
    async fn turn(&mut self) -> Option<Instant> {
        self.health.turned();
        let due = self.look().await;
        let mut wakes = [due, None, None];
        for _ in 0..ROUNDS {
            self.health.turned();
            wakes[1] = self.converge().await;
            self.health.turned();
            match self.publish().await {
                Published::Written => {}
                Published::Not(at) => {
                    wakes[2] = at;
                    break;
                }
            }
        }
        wakes.into_iter().flatten().min()
    }

    /// Makes the links of the networks what they should be.
    async fn converge(&mut self) -> Option<Instant> {
        let State { facts, observed, synced: true, server, labels, .. } = &mut self.state else {
            return None;
        };
        let listed: BTreeSet<String> = server
            .iter()
            .filter_map(|known| known.state.status.as_ref())
            .flat_map(|status| status.networks.iter().map(|network| network.uid.clone()))
            .collect();
        let around = NodeContext { node: facts.as_ref()?, labels, ignored: &self.ignored, listed: &listed };
        match self.bridges.reconcile(&self.monitor, around, observed.as_mut()?).await {
            Ok(again) => again,
            Err(error) => Some(self.blind(&error)),
        }
    }

    /// Looks at the kernel if it is time to.
    async fn look(&mut self) -> Option<Instant> {
        let event = self.state.event?;
        let last = self.state.last_look.map(Instant::into_std);
        let at = Instant::from_std(rules::next_observation(event.into_std(), last));
        if Instant::now() < at {
            return Some(at);
        }
        // What happened before the look is seen by it; what happens meanwhile leads to another.
        if let Some(Ok(changed)) = self.monitor.changed().now_or_never() {
            self.hear(changed);
        }
        self.state.event = None;
        let seen = self.monitor.observe().await;
        self.state.last_look = Some(Instant::now());
        self.metrics.looks.get_or_create(&Look { result: Outcome::of(&seen) }).inc();
        match seen {
            Ok(observed) => {
                debug!(links = observed.links.len(), "looked at the kernel");
                if self.health.well(Part::Kernel) == News::Changed {
                    info!(links = observed.links.len(), "can look at the kernel");
                }
                self.state.look_backoff.reset();
                if observed.partial {
                    debug!("the kernel was interrupted each time, looking again");
                    self.state.event = Some(Instant::now());
                }
                self.state.observed = Some(observed);
                self.state.netfilter = self.netfilter();
                None
            }
            Err(error) => Some(self.blind(&error)),
        }
    }

    /// Whether bridged packets are shown to iptables. A kernel without that has no such setting.
    fn netfilter(&self) -> bool {
        ["bridge-nf-call-iptables", "bridge-nf-call-ip6tables"].iter().any(|name| {
            fs::read_to_string(self.sysctls.join("net/bridge").join(name))
                .is_ok_and(|text| text.trim() == "1")
        })
    }

    /// The kernel could not be looked at; says when to try again.
    fn blind(&mut self, error: &link::Error) -> Instant {
        let problem = ErrorChain(error).to_string();
        if self.health.ill(Part::Kernel, problem.clone()) == News::Changed {
            warn!(error = problem, "cannot look at the kernel, trying again");
        }
        let again = Instant::now() + self.state.look_backoff.next().unwrap_or_default();
        self.state.event = Some(again);
        // Nothing is decided on an older picture: since then pods may have joined.
        self.state.observed = None;
        again
    }

    /// Writes the NodeNetwork if it is to be written now.
    async fn publish(&mut self) -> Published {
        let now = Instant::now();
        let Some((facts, wanted, decision)) = self.decide(now) else { return Published::Not(None) };
        self.metrics.interfaces.set(i64::try_from(wanted.interfaces.len()).unwrap_or(i64::MAX));
        let writes = match decision {
            PublishDecision::Nothing => {
                self.settled();
                return Published::Not(None);
            }
            PublishDecision::At(at) => return Published::Not(Some(Instant::from_std(at))),
            PublishDecision::Now(_) if self.state.pause.is_some_and(|until| now < until) => {
                return Published::Not(self.state.pause);
            }
            PublishDecision::Now(writes) => writes,
        };
        let result = self.object.write(&facts, &wanted, writes).await;
        // The end counts, so that a second lies between the last request of this write and the first of the next.
        self.state.last_write = Some(Instant::now());
        match result {
            Ok(known) => {
                self.wrote(facts, wanted, writes, known);
                Published::Written
            }
            Err(error) => Published::Not(Some(self.failed(&error))),
        }
    }

    /// Asks the rules. None as long as too little is known.
    fn decide(&self, now: Instant) -> Option<(NodeInfo, NodeNetworkStatus, PublishDecision)> {
        let State { facts, observed, synced: true, server, written, last_write, netfilter, .. } = &self.state
        else {
            return None;
        };
        let facts = facts.as_ref()?;
        // Until the networks are known, what stands there is kept: it may be of links that are there.
        let before = server.as_ref().and_then(|known| known.state.status.as_ref());
        let before = before.map_or(&[][..], |status| &status.networks);
        let picture = PublishInput {
            observed: observed.as_ref()?,
            node: facts,
            ignored: &self.ignored,
            server: server.as_ref().map(|known| &known.state),
            written: written.as_ref(),
            last_write: last_write.map(Instant::into_std),
            networks: self.bridges.reports().unwrap_or(before),
            netfilter: if *netfilter { Netfilter::On } else { Netfilter::Off },
        };
        let wanted = rules::status(&picture, Timestamp::now());
        let decision = rules::publish(&picture, &wanted, now.into_std());
        Some((facts.clone(), wanted, decision))
    }

    fn wrote(
        &mut self,
        facts: NodeInfo,
        wanted: NodeNetworkStatus,
        writes: WriteParts,
        known: Option<ServerObject>,
    ) {
        info!(
            node = self.name,
            interfaces = wanted.interfaces.len(),
            object = writes.object,
            status = writes.status,
            "published"
        );
        self.metrics.interfaces.set(i64::try_from(wanted.interfaces.len()).unwrap_or(i64::MAX));
        self.metrics.published.set(Timestamp::now().as_duration().as_secs_f64());
        if let Some(known) = known {
            self.state.written =
                Some(rules::LastWrite { uid: facts.uid, desired: wanted, accepted: known.state.clone() });
            self.state.server = Some(known);
        }
        self.settled();
    }

    /// The API server has what it should have.
    fn settled(&mut self) {
        self.health.well(Part::Publish);
        self.state.pause = None;
        self.state.write_backoff.reset();
    }

    fn failed(&mut self, error: &node_network::Error) -> Instant {
        let problem = ErrorChain(error).to_string();
        if error.is_missing() {
            // Somebody deleted it between two looks: the next write makes it anew.
            self.state.server = None;
        }
        let delay = self.state.write_backoff.next().unwrap_or_default();
        if error.is_conflict() {
            debug!(node = self.name, ?delay, "somebody else wrote at the same time, trying again");
        } else if self.health.ill(Part::Publish, problem.clone()) == News::Changed {
            warn!(node = self.name, error = problem, ?delay, "cannot publish, trying again");
        }
        let again = Instant::now() + delay;
        self.state.pause = Some(again);
        again
    }

    fn hear(&mut self, changed: LinkChanges) {
        self.metrics.events.inc_by(changed.events);
        self.metrics.overruns.inc_by(changed.overruns);
        self.state.event.get_or_insert_with(Instant::now);
    }

    fn see_node(&mut self, seen: ObjectEvent<Node>) {
        let node = match seen {
            ObjectEvent::Synced(nodes) => {
                self.recovered(Part::NodeWatch, Kind::Node);
                nodes.into_iter().next()
            }
            ObjectEvent::Changed(node) => Some(node),
            ObjectEvent::Deleted(_) => None,
            ObjectEvent::Failed(error) => return self.broken(Part::NodeWatch, Kind::Node, &error),
        };
        if node.is_some() {
            if self.health.well(Part::Node) == News::Changed {
                info!(node = self.name, "the Node is there");
            }
        } else {
            let problem = format!("there is no Node named {}; waiting for it", self.name);
            if self.health.ill(Part::Node, problem) == News::Changed {
                warn!(node = self.name, "there is no such Node, waiting for it; is --node-name right?");
            }
        }
        self.state.facts = node.as_ref().map(node_network::node_info);
        if node.is_none() {
            self.bridges.clear_own_node();
        }
        self.state.labels = node.and_then(|node| node.metadata.labels).unwrap_or_default();
    }

    fn see_networks(&mut self, seen: ObjectEvent<DynamicObject>) {
        match seen {
            ObjectEvent::Synced(objects) => {
                self.recovered(Part::NetworkWatch, Kind::BridgeNetwork);
                self.bridges.replace_networks(&objects);
            }
            ObjectEvent::Changed(object) => self.bridges.apply_network(&object),
            ObjectEvent::Deleted(object) => self.bridges.delete_network(&object),
            ObjectEvent::Failed(error) => self.broken(Part::NetworkWatch, Kind::BridgeNetwork, &error),
        }
    }

    fn see_nodes(&mut self, seen: ObjectEvent<DynamicObject>) {
        match seen {
            ObjectEvent::Synced(objects) => {
                self.recovered(Part::NodesWatch, Kind::NodeNetwork);
                self.state.synced = true;
                let server = self.state.server.take();
                let own = objects.iter().find(|object| object.name_any() == self.name);
                self.state.server =
                    own.map(|object| ServerObject::latest(server, ServerObject::read(object)));
                self.bridges.replace_peers(&objects, &self.name);
                // The API server is back: what waits is written now.
                self.state.pause = None;
            }
            ObjectEvent::Changed(object) if object.name_any() == self.name => {
                let server = self.state.server.take();
                self.state.server = Some(ServerObject::latest(server, ServerObject::read(&object)));
            }
            ObjectEvent::Changed(object) => self.bridges.apply_peer(&object),
            ObjectEvent::Deleted(object) if object.name_any() == self.name => {
                let gone = ServerObject::read(&object);
                if self.state.server.as_ref().is_some_and(|server| server.is_same_object(&gone)) {
                    self.state.server = None;
                }
            }
            ObjectEvent::Deleted(object) => self.bridges.delete_peer(&object),
            ObjectEvent::Failed(error) => self.broken(Part::NodesWatch, Kind::NodeNetwork, &error),
        }
    }

    fn recovered(&self, part: Part, kind: Kind) {
        if self.health.well(part) == News::Changed {
            info!(node = self.name, ?kind, "watching");
        }
    }

    fn broken(&self, part: Part, kind: Kind, error: &watch::Error) {
        self.metrics.watch_failures.get_or_create(&Watched { kind }).inc();
        let problem = format!("watch {kind:?}: {}", ErrorChain(error));
        if self.health.ill(part, problem.clone()) == News::Changed {
            warn!(node = self.name, ?kind, error = problem, "a watch failed and is tried again");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{convert::Infallible, future::pending};

    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::json;

    use super::*;

    /// A daemon whose API server has nothing, and nothing ever changes there.
    fn daemon() -> Daemon {
        let service = tower::service_fn(async |request: Request<Body>| {
            if request.uri().query().is_some_and(|query| query.contains("watch=")) {
                pending::<()>().await;
            }
            let list = r#"{"apiVersion":"v1","kind":"List","metadata":{"resourceVersion":"5"},"items":[]}"#;
            Ok::<_, Infallible>(Response::new(Body::from(list.as_bytes().to_vec())))
        });
        let client = Client::new(service, "default");
        let monitor = Monitor::open().unwrap();
        let (metrics, _) = Metrics::new();
        let bridges = crate::bridges::tests::bridges(client.clone(), metrics.clone());
        let settings = Settings {
            name: "a".into(),
            ignored: IfNamePatterns::default(),
            sysctls: PathBuf::new(),
            metrics,
        };
        Daemon::new(client, settings, monitor, bridges, Arc::new(Health::new()))
    }

    fn object(version: &str) -> DynamicObject {
        serde_json::from_value(json!({"metadata": {"name": "a", "uid": "u", "resourceVersion": version}}))
            .unwrap()
    }

    #[tokio::test]
    async fn a_list_that_is_older_than_the_last_write_replaces_nothing() {
        let mut daemon = daemon();
        daemon.see_nodes(ObjectEvent::Synced(vec![object("10")]));
        daemon.see_nodes(ObjectEvent::Synced(vec![object("9")]));
        assert_eq!(daemon.state.server, Some(ServerObject::read(&object("10"))));
        daemon.see_nodes(ObjectEvent::Synced(Vec::new()));
        assert_eq!(daemon.state.server, None);
    }

    #[tokio::test]
    async fn an_api_server_that_is_back_is_written_to_at_once() {
        let mut daemon = daemon();
        daemon.state.pause = Some(Instant::now() + Duration::from_secs(30));
        daemon.see_nodes(ObjectEvent::Failed(watch::Error::Deadline));
        assert!(daemon.state.pause.is_some());
        daemon.see_nodes(ObjectEvent::Synced(Vec::new()));
        assert_eq!(daemon.state.pause, None);
    }

    #[tokio::test]
    async fn looks_at_the_kernel_say_nothing_about_writes_that_fail() {
        let mut daemon = daemon();
        let fail = |daemon: &mut Daemon| daemon.failed(&node_network::Error::Deadline { name: "a".into() });
        for _ in 0..8 {
            fail(&mut daemon);
        }
        // Due at once.
        daemon.state.event = Some(Instant::now() - Duration::from_secs(1));
        daemon.look().await;
        assert!(daemon.state.observed.is_some());
        assert!(fail(&mut daemon) - Instant::now() > Duration::from_secs(5));
    }

    #[tokio::test(start_paused = true)]
    async fn a_loop_with_nothing_to_do_still_turns() {
        let daemon = daemon();
        let health = Arc::clone(&daemon.health);
        let stop = CancellationToken::new();
        let mut tasks = tokio::task::JoinSet::new();
        tasks.spawn(daemon.run(stop.clone()));
        for _ in 0..30 {
            tokio::time::sleep(Duration::from_secs(10)).await;
            assert_eq!(health.hang(), None);
        }
        stop.cancel();
        tasks.join_next().await.unwrap().unwrap().unwrap();
    }
}
