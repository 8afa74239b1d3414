//! The loop: what comes in from the kernel and the API server, and what is done about it.

use std::{collections::BTreeSet, fs, path::PathBuf, sync::Arc, time::Duration};

use api::{BridgeNetwork, Chain, NodeNetworkStatus, Patterns};
use futures::FutureExt as _;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client, ResourceExt as _,
    api::{ApiResource, DynamicObject},
    runtime::{utils::Backoff as _, watcher::DefaultBackoff},
};
use link::{Changed, Monitor};
use plan::nodenetwork::{self as rules, Facts, Netfilter, Observed, Picture, Publish, Writes};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::{
    Error,
    bridges::{Around, Bridges},
    health::{Component, Health, HealthChange},
    metrics::{Metrics, ObserveLabels, ResultLabel, WatchLabels, WatchedKind},
    network::Labels,
    object::{self, Known, Object},
    watch::{self, Seen, Watch},
};

/// How often the loop turns at least, to show that it can.
const HEARTBEAT: Duration = Duration::from_secs(20);

/// How often a turn goes on after a write: a network is listed, made, and told to be ready.
const MAX_PASSES: usize = 4;

/// What became of a publication.
enum PublishOutcome {
    Written,
    /// When to come back, unless something happens before.
    Pending(Option<Instant>),
}

/// Keeps the bridge networks and the NodeNetwork of one node.
pub struct NodeController {
    name: String,
    ignored: Patterns,
    monitor: Monitor,
    object: Object,
    nodes: Api<Node>,
    networks: Api<DynamicObject>,
    bridges: Bridges,
    /// Where the kernel's settings are.
    sysctls: PathBuf,
    metrics: Metrics,
    health: Arc<Health>,
    state: ControllerState,
}

/// What a daemon is told at its start.
pub struct NodeConfig {
    pub name: String,
    pub ignored: Patterns,
    pub sysctls: PathBuf,
    pub metrics: Metrics,
}

/// What is known, and what was done.
#[derive(Default)]
struct ControllerState {
    facts: Option<Facts>,
    labels: Labels,
    observed: Option<Observed>,
    netfilter: bool,
    /// Whether the API server has said what it has.
    synced: bool,
    server: Option<Known>,
    written: Option<rules::Written>,
    last_write: Option<Instant>,
    /// The first event since the last look.
    pending_event: Option<Instant>,
    last_observe: Option<Instant>,
    /// How long to wait after looks that failed one after the other.
    observe_backoff: DefaultBackoff,
    /// No write is tried before, after a failure.
    retry_at: Option<Instant>,
    /// How long to wait after writes that failed one after the other.
    write_backoff: DefaultBackoff,
}

impl NodeController {
    pub fn new(
        client: Client,
        settings: NodeConfig,
        monitor: Monitor,
        bridges: Bridges,
        health: Arc<Health>,
    ) -> Self {
        let NodeConfig { name, ignored, sysctls, metrics } = settings;
        let networks = ApiResource::erase::<BridgeNetwork>(&());
        Self {
            object: Object::new(client.clone(), name.clone(), metrics.clone()),
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
            state: ControllerState { pending_event: Some(Instant::now()), ..ControllerState::default() },
        }
    }

    /// Runs until `stop`. The API server may come and go; only the kernel falling silent ends it.
    pub async fn run(mut self, stop: CancellationToken) -> Result<(), Error> {
        let mut node = Watch::one(self.nodes.clone(), &self.name);
        let mut nodes = Watch::all(self.object.api().clone());
        let mut networks = Watch::all(self.networks.clone());
        loop {
            let Some(wake) = stop.run_until_cancelled(self.reconcile()).await else {
                return Ok(());
            };
            let beat = Instant::now() + HEARTBEAT;
            let wake = wake.map_or(beat, |at| at.min(beat));
            tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(()),
                seen = node.next() => self.apply_node(seen),
                seen = nodes.next() => self.apply_node_networks(seen),
                seen = networks.next() => self.apply_networks(seen),
                // One event is enough to look; the kernel keeps the others until then.
                changed = self.monitor.changed(), if self.state.pending_event.is_none() => {
                    self.record_kernel_events(changed.map_err(Error::Kernel)?);
                }
                () = sleep_until(wake) => {}
            }
        }
    }

    /// Does what is due, and says when to come back unless something happens before.
    async fn reconcile(&mut self) -> Option<Instant> {
        self.health.heartbeat();
        let due = self.observe().await;
        let mut wakes = [due, None, None];
        for _ in 0..MAX_PASSES {
            self.health.heartbeat();
            wakes[1] = self.reconcile_bridges().await;
            self.health.heartbeat();
            match self.publish().await {
                PublishOutcome::Written => {}
                PublishOutcome::Pending(at) => {
                    wakes[2] = at;
                    break;
                }
            }
        }
        wakes.into_iter().flatten().min()
    }

    /// Makes the links of the networks what they should be.
    async fn reconcile_bridges(&mut self) -> Option<Instant> {
        let ControllerState { facts, observed, synced: true, server, labels, .. } = &mut self.state else {
            return None;
        };
        let listed: BTreeSet<String> = server
            .iter()
            .filter_map(|known| known.record.status.as_ref())
            .flat_map(|status| status.networks.iter().map(|network| network.uid.clone()))
            .collect();
        let around = Around { facts: facts.as_ref()?, labels, ignored: &self.ignored, listed: &listed };
        match self.bridges.converge(&self.monitor, around, observed.as_mut()?).await {
            Ok(again) => again,
            Err(error) => Some(self.observe_failed(&error)),
        }
    }

    /// Looks at the kernel if it is time to.
    async fn observe(&mut self) -> Option<Instant> {
        let event = self.state.pending_event?;
        let last = self.state.last_observe.map(Instant::into_std);
        let at = Instant::from_std(rules::look(event.into_std(), last));
        if Instant::now() < at {
            return Some(at);
        }
        // What happened before the look is seen by it; what happens meanwhile leads to another.
        if let Some(Ok(changed)) = self.monitor.changed().now_or_never() {
            self.record_kernel_events(changed);
        }
        self.state.pending_event = None;
        let seen = self.monitor.observe().await;
        self.state.last_observe = Some(Instant::now());
        self.metrics.observations.get_or_create(&ObserveLabels { result: ResultLabel::of(&seen) }).inc();
        match seen {
            Ok(observed) => {
                debug!(links = observed.links.len(), "looked at the kernel");
                if self.health.ok(Component::Kernel) == HealthChange::Changed {
                    info!(links = observed.links.len(), "can look at the kernel");
                }
                self.state.observe_backoff.reset();
                if observed.partial {
                    debug!("the kernel was interrupted each time, looking again");
                    self.state.pending_event = Some(Instant::now());
                }
                self.state.observed = Some(observed);
                self.state.netfilter = self.netfilter();
                None
            }
            Err(error) => Some(self.observe_failed(&error)),
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
    fn observe_failed(&mut self, error: &link::Error) -> Instant {
        let problem = Chain(error).to_string();
        if self.health.fail(Component::Kernel, problem.clone()) == HealthChange::Changed {
            warn!(error = problem, "cannot look at the kernel, trying again");
        }
        let again = Instant::now() + self.state.observe_backoff.next().unwrap_or_default();
        self.state.pending_event = Some(again);
        // Nothing is decided on an older picture: since then pods may have joined.
        self.state.observed = None;
        again
    }

    /// Writes the NodeNetwork if it is to be written now.
    async fn publish(&mut self) -> PublishOutcome {
        let now = Instant::now();
        let Some((facts, wanted, decision)) = self.plan_publish(now) else {
            return PublishOutcome::Pending(None);
        };
        self.metrics.interfaces.set(i64::try_from(wanted.interfaces.len()).unwrap_or(i64::MAX));
        let writes = match decision {
            Publish::Nothing => {
                self.mark_published();
                return PublishOutcome::Pending(None);
            }
            Publish::At(at) => return PublishOutcome::Pending(Some(Instant::from_std(at))),
            Publish::Now(_) if self.state.retry_at.is_some_and(|until| now < until) => {
                return PublishOutcome::Pending(self.state.retry_at);
            }
            Publish::Now(writes) => writes,
        };
        let result = self.object.write(&facts, &wanted, writes).await;
        // The end counts, so that a second lies between the last request of this write and the first of the next.
        self.state.last_write = Some(Instant::now());
        match result {
            Ok(known) => {
                self.publish_succeeded(facts, wanted, writes, known);
                PublishOutcome::Written
            }
            Err(error) => PublishOutcome::Pending(Some(self.publish_failed(&error))),
        }
    }

    /// Asks the rules. None as long as too little is known.
    fn plan_publish(&self, now: Instant) -> Option<(Facts, NodeNetworkStatus, Publish)> {
        let ControllerState { facts, observed, synced: true, server, written, last_write, netfilter, .. } =
            &self.state
        else {
            return None;
        };
        let facts = facts.as_ref()?;
        // Until the networks are known, what stands there is kept: it may be of links that are there.
        let before = server.as_ref().and_then(|known| known.record.status.as_ref());
        let before = before.map_or(&[][..], |status| &status.networks);
        let picture = Picture {
            observed: observed.as_ref()?,
            facts,
            ignored: &self.ignored,
            server: server.as_ref().map(|known| &known.record),
            written: written.as_ref(),
            last_write: last_write.map(Instant::into_std),
            networks: self.bridges.reports().unwrap_or(before),
            netfilter: if *netfilter { Netfilter::On } else { Netfilter::Off },
        };
        let wanted = rules::status(&picture, Timestamp::now());
        let decision = rules::publish(&picture, &wanted, now.into_std());
        Some((facts.clone(), wanted, decision))
    }

    fn publish_succeeded(
        &mut self,
        facts: Facts,
        wanted: NodeNetworkStatus,
        writes: Writes,
        known: Option<Known>,
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
            self.state.written = Some(rules::Written { uid: facts.uid, wanted, got: known.record.clone() });
            self.state.server = Some(known);
        }
        self.mark_published();
    }

    /// The API server has what it should have.
    fn mark_published(&mut self) {
        self.health.ok(Component::Publish);
        self.state.retry_at = None;
        self.state.write_backoff.reset();
    }

    fn publish_failed(&mut self, error: &object::Error) -> Instant {
        let problem = Chain(error).to_string();
        if error.is_missing() {
            // Somebody deleted it between two looks: the next write makes it anew.
            self.state.server = None;
        }
        let delay = self.state.write_backoff.next().unwrap_or_default();
        if error.is_conflict() {
            debug!(node = self.name, ?delay, "somebody else wrote at the same time, trying again");
        } else if self.health.fail(Component::Publish, problem.clone()) == HealthChange::Changed {
            warn!(node = self.name, error = problem, ?delay, "cannot publish, trying again");
        }
        let again = Instant::now() + delay;
        self.state.retry_at = Some(again);
        again
    }

    fn record_kernel_events(&mut self, changed: Changed) {
        self.metrics.events.inc_by(changed.events);
        self.metrics.overruns.inc_by(changed.overruns);
        self.state.pending_event.get_or_insert_with(Instant::now);
    }

    fn apply_node(&mut self, seen: Seen<Node>) {
        let node = match seen {
            Seen::Synced(nodes) => {
                self.watch_recovered(Component::NodeWatch, WatchedKind::Node);
                nodes.into_iter().next()
            }
            Seen::Changed(node) => Some(node),
            Seen::Gone(_) => None,
            Seen::Failed(error) => return self.watch_failed(Component::NodeWatch, WatchedKind::Node, &error),
        };
        if node.is_some() {
            if self.health.ok(Component::Node) == HealthChange::Changed {
                info!(node = self.name, "the Node is there");
            }
        } else {
            let problem = format!("there is no Node named {}; waiting for it", self.name);
            if self.health.fail(Component::Node, problem) == HealthChange::Changed {
                warn!(node = self.name, "there is no such Node, waiting for it; is --node-name right?");
            }
        }
        self.state.facts = node.as_ref().map(object::facts);
        if node.is_none() {
            self.bridges.lose_own_node();
        }
        self.state.labels = node.and_then(|node| node.metadata.labels).unwrap_or_default();
    }

    fn apply_networks(&mut self, seen: Seen<DynamicObject>) {
        match seen {
            Seen::Synced(objects) => {
                self.watch_recovered(Component::NetworkWatch, WatchedKind::BridgeNetwork);
                self.bridges.see_all_networks(&objects);
            }
            Seen::Changed(object) => self.bridges.see_network(&object),
            Seen::Gone(object) => self.bridges.lose_network(&object),
            Seen::Failed(error) => {
                self.watch_failed(Component::NetworkWatch, WatchedKind::BridgeNetwork, &error)
            }
        }
    }

    fn apply_node_networks(&mut self, seen: Seen<DynamicObject>) {
        match seen {
            Seen::Synced(objects) => {
                self.watch_recovered(Component::NodeNetworkWatch, WatchedKind::NodeNetwork);
                self.state.synced = true;
                let server = self.state.server.take();
                let own = objects.iter().find(|object| object.name_any() == self.name);
                self.state.server = own.map(|object| Known::latest(server, Known::read(object)));
                self.bridges.see_all_nodes(&objects, &self.name);
                // The API server is back: what waits is written now.
                self.state.retry_at = None;
            }
            Seen::Changed(object) if object.name_any() == self.name => {
                let server = self.state.server.take();
                self.state.server = Some(Known::latest(server, Known::read(&object)));
            }
            Seen::Changed(object) => self.bridges.see_node(&object),
            Seen::Gone(object) if object.name_any() == self.name => {
                let gone = Known::read(&object);
                if self.state.server.as_ref().is_some_and(|server| server.is_same_object(&gone)) {
                    self.state.server = None;
                }
            }
            Seen::Gone(object) => self.bridges.lose_node(&object),
            Seen::Failed(error) => {
                self.watch_failed(Component::NodeNetworkWatch, WatchedKind::NodeNetwork, &error)
            }
        }
    }

    fn watch_recovered(&self, component: Component, kind: WatchedKind) {
        if self.health.ok(component) == HealthChange::Changed {
            info!(node = self.name, ?kind, "watching");
        }
    }

    fn watch_failed(&self, component: Component, kind: WatchedKind, error: &watch::Error) {
        self.metrics.watch_failures.get_or_create(&WatchLabels { kind }).inc();
        let problem = format!("watch {kind:?}: {}", Chain(error));
        if self.health.fail(component, problem.clone()) == HealthChange::Changed {
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
    fn daemon() -> NodeController {
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
        let settings =
            NodeConfig { name: "a".into(), ignored: Patterns::default(), sysctls: PathBuf::new(), metrics };
        NodeController::new(client, settings, monitor, bridges, Arc::new(Health::new()))
    }

    fn object(version: &str) -> DynamicObject {
        serde_json::from_value(json!({"metadata": {"name": "a", "uid": "u", "resourceVersion": version}}))
            .unwrap()
    }

    #[tokio::test]
    async fn a_list_that_is_older_than_the_last_write_replaces_nothing() {
        let mut daemon = daemon();
        daemon.apply_node_networks(Seen::Synced(vec![object("10")]));
        daemon.apply_node_networks(Seen::Synced(vec![object("9")]));
        assert_eq!(daemon.state.server, Some(Known::read(&object("10"))));
        daemon.apply_node_networks(Seen::Synced(Vec::new()));
        assert_eq!(daemon.state.server, None);
    }

    #[tokio::test]
    async fn an_api_server_that_is_back_is_written_to_at_once() {
        let mut daemon = daemon();
        daemon.state.retry_at = Some(Instant::now() + Duration::from_secs(30));
        daemon.apply_node_networks(Seen::Failed(watch::Error::Deadline));
        assert!(daemon.state.retry_at.is_some());
        daemon.apply_node_networks(Seen::Synced(Vec::new()));
        assert_eq!(daemon.state.retry_at, None);
    }

    #[tokio::test]
    async fn looks_at_the_kernel_say_nothing_about_writes_that_fail() {
        let mut daemon = daemon();
        let fail = |daemon: &mut NodeController| {
            daemon.publish_failed(&object::Error::Deadline { name: "a".into() })
        };
        for _ in 0..8 {
            fail(&mut daemon);
        }
        // Due at once.
        daemon.state.pending_event = Some(Instant::now() - Duration::from_secs(1));
        daemon.observe().await;
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
            assert_eq!(health.stalled(), None);
        }
        stop.cancel();
        tasks.join_next().await.unwrap().unwrap().unwrap();
    }
}
