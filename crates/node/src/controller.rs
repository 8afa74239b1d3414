//! The node's reconcile loop: observes the kernel and the API server, changes links, and publishes the NodeNetwork.

use std::{collections::BTreeSet, fs, net::IpAddr, path::PathBuf, sync::Arc, time::Duration};

use api::{BridgeNetwork, ErrorChain, IfNamePatterns, NodeNetworkStatus};
use client::{
    retry::Backoff,
    watch::{self, ObjectEvent, ObjectWatch, WatchConfig},
};
use futures::FutureExt as _;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client, api::ApiResource};
use link::{LinkChanges, Monitor};
use plan::nodenetwork::{
    self as rules, KernelState, Netfilter, NodeInfo, PublishDecision, PublishInput, RuntimeStatus, WriteParts,
};
use tokio::{
    sync::watch::Receiver,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::{
    Error,
    bridges::{BridgeController, NodeContext},
    health::{Component, Health, HealthChange},
    ipam::{Ipam, NumberedReport},
    metrics::{Metrics, ObserveLabels, ResultLabel, WatchLabels, WatchedKind},
    network::{Labels, NetworkObject, SharedUids, WatchedNetwork},
    node_network::{self, NodeNetworkClient, ServerObject, WatchedNodeNetwork},
    watch::backoff,
};

/// Longest time between two passes of the loop, so that a stall is detected.
const HEARTBEAT: Duration = Duration::from_secs(20);

/// Limits route lookups for a VTEP on a loopback interface. The monitor ignores events of routes that are not default
/// routes, so a change of a route to a peer is noticed at the next pass after this time.
const MIN_ROUTE_LOOKUP_INTERVAL: Duration = Duration::from_secs(5);

/// NodeNetworks are large: one of 100 networks has more than 100 kB.
const NODE_NETWORK_PAGE_SIZE: u32 = 20;

/// Passes after successive writes: a network is listed, its links are created, and it is reported ready.
const MAX_PASSES: usize = 4;

/// The result of publishing the NodeNetwork.
enum PublishOutcome {
    Written,
    /// Not written; when to reconcile again, if not at the next event.
    Pending(Option<Instant>),
}

/// Reconciles the bridge networks of one node and publishes its NodeNetwork.
pub struct NodeController {
    name: String,
    ignored: IfNamePatterns,
    monitor: Monitor,
    object: NodeNetworkClient,
    nodes: Api<Node>,
    networks: Api<NetworkObject>,
    bridges: BridgeController,
    /// `/proc/sys` of the host.
    sysctls: PathBuf,
    metrics: Metrics,
    runtime: Receiver<RuntimeStatus>,
    state_problem: Receiver<Option<String>>,
    ipam: Arc<Ipam>,
    leases: Receiver<Option<NumberedReport>>,
    health: Arc<Health>,
    state: ControllerState,
}

/// Settings of a [`NodeController`].
pub struct NodeConfig {
    pub name: String,
    pub ignored: IfNamePatterns,
    pub sysctls: PathBuf,
    pub metrics: Metrics,
    /// Whether the container runtime was found.
    pub runtime: Receiver<RuntimeStatus>,
    /// Why the daemon cannot write its state to disk.
    pub state_problem: Receiver<Option<String>>,
    pub ipam: Arc<Ipam>,
}

/// What the controller observed and wrote.
#[derive(Default)]
struct ControllerState {
    node_info: Option<NodeInfo>,
    labels: Labels,
    observed: Option<KernelState>,
    peer_routes: PeerRoutes,
    netfilter: bool,
    /// Whether the NodeNetworks have been listed.
    synced: bool,
    server: Option<ServerObject>,
    written: Option<rules::LastWrite>,
    last_write: Option<Instant>,
    /// The first kernel event since the last observation.
    pending_event: Option<Instant>,
    last_observe: Option<Instant>,
    /// Backoff after failed observations.
    observe_backoff: Backoff,
    /// The earliest next write after a failed one.
    retry_at: Option<Instant>,
    /// Backoff after failed writes.
    write_backoff: Backoff,
}

/// The last lookup of the routes to the peers.
#[derive(Default)]
struct PeerRoutes {
    targets: BTreeSet<IpAddr>,
    links: Vec<u32>,
    looked_up: Option<Instant>,
}

impl NodeController {
    pub fn new(
        client: Client,
        config: NodeConfig,
        monitor: Monitor,
        bridges: BridgeController,
        health: Arc<Health>,
    ) -> Self {
        let NodeConfig { name, ignored, sysctls, metrics, runtime, state_problem, ipam } = config;
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
            runtime,
            state_problem,
            leases: ipam.lease_report(),
            ipam,
            health,
            // The first pass observes the kernel.
            state: ControllerState { pending_event: Some(Instant::now()), ..ControllerState::default() },
        }
    }

    /// Runs until `stop`. Retries while the API server is unavailable; fails only if the kernel's event stream fails.
    pub async fn run(mut self, stop: CancellationToken) -> Result<(), Error> {
        let mut node = ObjectWatch::new(self.nodes.clone(), WatchConfig::one(&self.name).backoff(backoff()));
        let (own, mut uids) = (self.name.clone(), SharedUids::default());
        let mut nodes = ObjectWatch::projected(
            self.object.api().clone(),
            WatchConfig::all().backoff(backoff()).page_size(NODE_NETWORK_PAGE_SIZE),
            move |object| WatchedNodeNetwork::read(&object, &own, &mut uids),
        );
        let mut networks =
            ObjectWatch::projected(self.networks.clone(), WatchConfig::all().backoff(backoff()), |object| {
                WatchedNetwork::read(&object)
            });
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
                // One event triggers an observation; the kernel queues the others until then.
                changed = self.monitor.changed(), if self.state.pending_event.is_none() => {
                    self.record_kernel_events(changed.map_err(Error::Kernel)?);
                }
                () = next_change(&mut self.runtime) => {}
                () = next_change(&mut self.state_problem) => {}
                () = next_change(&mut self.leases) => {}
                () = sleep_until(wake) => {}
            }
        }
    }

    /// Runs one pass. Returns when to run the next one if no event arrives earlier.
    async fn reconcile(&mut self) -> Option<Instant> {
        self.health.heartbeat();
        let due = self.observe().await;
        self.look_up_peer_routes().await;
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

    /// Reconciles the links of the bridge networks. Returns when to reconcile again.
    async fn reconcile_bridges(&mut self) -> Option<Instant> {
        let ControllerState { node_info, observed, synced: true, server, labels, .. } = &mut self.state
        else {
            return None;
        };
        let listed: BTreeSet<String> = server
            .iter()
            .filter_map(|server| server.state.status.as_ref())
            .flat_map(|status| status.networks.iter().map(|network| network.uid.clone()))
            .collect();
        let context =
            NodeContext { node: node_info.as_ref()?, labels, ignored: &self.ignored, listed: &listed };
        match self.bridges.reconcile(&self.monitor, context, observed.as_mut()?).await {
            Ok(requeue_at) => requeue_at,
            Err(error) => Some(self.observe_failed(&error)),
        }
    }

    /// Observes the kernel if an event is pending and due. Returns when the next observation is due.
    async fn observe(&mut self) -> Option<Instant> {
        let event = self.state.pending_event?;
        let last = self.state.last_observe.map(Instant::into_std);
        let at = Instant::from_std(rules::next_observation(event.into_std(), last));
        if Instant::now() < at {
            return Some(at);
        }
        // The observation covers earlier events; an event during the observation triggers another one.
        if let Some(Ok(changed)) = self.monitor.changed().now_or_never() {
            self.record_kernel_events(changed);
        }
        self.state.pending_event = None;
        let seen = self.monitor.observe().await;
        self.state.last_observe = Some(Instant::now());
        self.metrics.observations.get_or_create(&ObserveLabels { result: ResultLabel::of(&seen) }).inc();
        match seen {
            Ok(observed) => {
                debug!(links = observed.links.len(), "observed the kernel's links");
                if self.health.ok(Component::Kernel) == HealthChange::Changed {
                    info!(links = observed.links.len(), "observing the kernel's links works");
                }
                self.state.observe_backoff.reset();
                if observed.partial {
                    debug!("the dump of the links was inconsistent; observing again");
                    self.state.pending_event = Some(Instant::now());
                }
                self.state.observed = Some(observed);
                self.state.netfilter = self.netfilter();
                None
            }
            Err(error) => Some(self.observe_failed(&error)),
        }
    }

    /// Looks up which links lead to the peers, if the VTEP is on a loopback interface: they decide its MTU.
    async fn look_up_peer_routes(&mut self) {
        let ControllerState { node_info: Some(node), observed: Some(observed), peer_routes, .. } =
            &mut self.state
        else {
            return;
        };
        let peers = self.bridges.peer_vteps();
        let targets = rules::peer_route_targets(observed, node, &self.ignored, peers);
        if targets.is_empty() {
            *peer_routes = PeerRoutes::default();
            observed.peer_links.clear();
            return;
        }
        let recent = |at: Instant| at.elapsed() < MIN_ROUTE_LOOKUP_INTERVAL;
        if peer_routes.targets != targets || !peer_routes.looked_up.is_some_and(recent) {
            match self.monitor.route_links(targets.iter().copied().collect()).await {
                // While no peer has a route, the last links stay: an outage of the underlay does not change its MTU.
                Ok(links) if links.is_empty() => {}
                Ok(links) => peer_routes.links = links,
                Err(error) => {
                    warn!(error = %ErrorChain(&error), "cannot look up the routes to the other nodes; retrying");
                }
            }
            peer_routes.targets = targets;
            peer_routes.looked_up = Some(Instant::now());
        }
        observed.peer_links.clone_from(&peer_routes.links);
    }

    /// Whether iptables sees bridged packets. A kernel without br_netfilter has no such sysctl.
    fn netfilter(&self) -> bool {
        ["bridge-nf-call-iptables", "bridge-nf-call-ip6tables"].iter().any(|name| {
            fs::read_to_string(self.sysctls.join("net/bridge").join(name))
                .is_ok_and(|text| text.trim() == "1")
        })
    }

    /// Records a failed observation. Returns when to retry.
    fn observe_failed(&mut self, error: &link::Error) -> Instant {
        let problem = ErrorChain(error).to_string();
        if self.health.fail(Component::Kernel, problem.clone()) == HealthChange::Changed {
            warn!(error = problem, "cannot observe the kernel's links; retrying");
        }
        let again = Instant::now() + self.state.observe_backoff.next_delay();
        self.state.pending_event = Some(again);
        // An older observation must not be used: pods may have been attached since.
        self.state.observed = None;
        again
    }

    /// Writes the NodeNetwork if it differs and a write is due.
    async fn publish(&mut self) -> PublishOutcome {
        let now = Instant::now();
        // Before the status is planned, so that it has this report or a later one.
        let report = self.leases.borrow().as_ref().map(|leases| leases.number);
        let Some((node_info, desired, decision)) = self.plan_publish(now) else {
            return PublishOutcome::Pending(None);
        };
        self.metrics.interfaces.set(i64::try_from(desired.interfaces.len()).unwrap_or(i64::MAX));
        let writes = match decision {
            PublishDecision::Nothing => {
                self.mark_published(report);
                return PublishOutcome::Pending(None);
            }
            PublishDecision::At(at) => return PublishOutcome::Pending(Some(Instant::from_std(at))),
            PublishDecision::Now(_) if self.state.retry_at.is_some_and(|until| now < until) => {
                return PublishOutcome::Pending(self.state.retry_at);
            }
            PublishDecision::Now(writes) => writes,
        };
        let result = self.object.write(&node_info, &desired, writes).await;
        // Measured from the end of the write, so that a second passes between its last request and the next write.
        self.state.last_write = Some(Instant::now());
        match result {
            Ok(accepted) => {
                self.publish_succeeded(node_info, desired, writes, accepted);
                self.mark_published(report);
                PublishOutcome::Written
            }
            Err(error) => PublishOutcome::Pending(Some(self.publish_failed(&error))),
        }
    }

    /// Plans the next write. `None` until the Node, the NodeNetworks and the kernel have been read.
    fn plan_publish(&self, now: Instant) -> Option<(NodeInfo, NodeNetworkStatus, PublishDecision)> {
        let ControllerState {
            node_info, observed, synced: true, server, written, last_write, netfilter, ..
        } = &self.state
        else {
            return None;
        };
        let node_info = node_info.as_ref()?;
        // Until the networks have been read, keep the published ones: their links may exist.
        let before = server.as_ref().and_then(|server| server.state.status.as_ref());
        let before = before.map_or(&[][..], |status| &status.networks);
        let (state_problem, leases) = (self.state_problem.borrow(), self.leases.borrow());
        let input = PublishInput {
            observed: observed.as_ref()?,
            node: node_info,
            ignored: &self.ignored,
            server: server.as_ref().map(|server| &server.state),
            written: written.as_ref(),
            last_write: last_write.map(Instant::into_std),
            networks: self.bridges.reports().unwrap_or(before),
            leases: leases.as_ref().map(|leases| &leases.report),
            netfilter: if *netfilter { Netfilter::On } else { Netfilter::Off },
            runtime: &self.runtime.borrow(),
            state_problem: state_problem.as_deref(),
        };
        let desired = rules::status(&input, Timestamp::now());
        let decision = rules::publish(&input, &desired, now.into_std());
        Some((node_info.clone(), desired, decision))
    }

    fn publish_succeeded(
        &mut self,
        node_info: NodeInfo,
        desired: NodeNetworkStatus,
        writes: WriteParts,
        accepted: Option<ServerObject>,
    ) {
        info!(
            node = self.name,
            interfaces = desired.interfaces.len(),
            object = writes.object,
            status = writes.status,
            "published"
        );
        self.metrics.interfaces.set(i64::try_from(desired.interfaces.len()).unwrap_or(i64::MAX));
        self.metrics.published.set(Timestamp::now().as_duration().as_secs_f64());
        if let Some(accepted) = accepted {
            self.state.written =
                Some(rules::LastWrite { uid: node_info.uid, desired, accepted: accepted.state.clone() });
            self.state.server = Some(accepted);
        }
    }

    /// Records that the NodeNetwork is up to date, with the lease report of this number.
    fn mark_published(&mut self, report: Option<u64>) {
        if let Some(number) = report {
            self.ipam.set_published(number);
        }
        self.health.ok(Component::Publish);
        self.state.retry_at = None;
        self.state.write_backoff.reset();
    }

    fn publish_failed(&mut self, error: &node_network::Error) -> Instant {
        let problem = ErrorChain(error).to_string();
        if error.is_missing() {
            // The object was deleted; the next write recreates it.
            self.state.server = None;
        }
        let delay = self.state.write_backoff.next_delay();
        if error.is_conflict() {
            debug!(node = self.name, ?delay, "write conflict; retrying");
        } else if self.health.fail(Component::Publish, problem.clone()) == HealthChange::Changed {
            warn!(node = self.name, error = problem, ?delay, "cannot publish the NodeNetwork; retrying");
        }
        let again = Instant::now() + delay;
        self.state.retry_at = Some(again);
        again
    }

    fn record_kernel_events(&mut self, changed: LinkChanges) {
        self.metrics.events.inc_by(changed.events);
        self.metrics.overruns.inc_by(changed.overruns);
        self.state.pending_event.get_or_insert_with(Instant::now);
    }

    fn apply_node(&mut self, seen: ObjectEvent<Node>) {
        let node = match seen {
            ObjectEvent::Synced(nodes) => {
                self.watch_recovered(Component::NodeWatch, WatchedKind::Node);
                nodes.into_iter().next()
            }
            ObjectEvent::Changed(node) => Some(node),
            ObjectEvent::Deleted(_) => None,
            ObjectEvent::Resumed => return self.watch_recovered(Component::NodeWatch, WatchedKind::Node),
            ObjectEvent::Failed(error) => {
                return self.watch_failed(Component::NodeWatch, WatchedKind::Node, &error);
            }
        };
        if node.is_some() {
            if self.health.ok(Component::Node) == HealthChange::Changed {
                info!(node = self.name, "the Node exists");
            }
        } else {
            let problem = format!("there is no Node named {}; waiting for it", self.name);
            if self.health.fail(Component::Node, problem) == HealthChange::Changed {
                warn!(node = self.name, "the Node does not exist; waiting for it. Check --node-name");
            }
        }
        self.state.node_info = node.as_ref().map(node_network::node_info);
        if node.is_none() {
            self.bridges.clear_own_node();
        }
        self.state.labels = node.and_then(|node| node.metadata.labels).unwrap_or_default();
    }

    fn apply_networks(&mut self, seen: ObjectEvent<WatchedNetwork>) {
        match seen {
            ObjectEvent::Synced(networks) => {
                self.watch_recovered(Component::NetworkWatch, WatchedKind::BridgeNetwork);
                self.bridges.replace_networks(networks);
            }
            ObjectEvent::Changed(network) => self.bridges.apply_network(network),
            ObjectEvent::Deleted(network) => self.bridges.delete_network(&network),
            ObjectEvent::Resumed => self.watch_recovered(Component::NetworkWatch, WatchedKind::BridgeNetwork),
            ObjectEvent::Failed(error) => {
                self.watch_failed(Component::NetworkWatch, WatchedKind::BridgeNetwork, &error);
            }
        }
    }

    fn apply_node_networks(&mut self, seen: ObjectEvent<WatchedNodeNetwork>) {
        match seen {
            ObjectEvent::Synced(all) => {
                self.node_networks_recovered();
                let is_first = !std::mem::replace(&mut self.state.synced, true);
                let server = self.state.server.take();
                let (mut own, mut peers) = (None, Vec::with_capacity(all.len()));
                for one in all {
                    match one {
                        WatchedNodeNetwork::Own(object) => own = Some(object),
                        WatchedNodeNetwork::Peer(peer) => peers.push(peer),
                    }
                }
                let status = own.as_ref().and_then(|object| object.state.status.as_ref());
                if is_first && status.is_some_and(|status| status.claim_addresses.is_some()) {
                    self.ipam.expect_former_claims();
                }
                self.state.server = own.map(|object| ServerObject::latest(server, object));
                self.bridges.replace_peers(peers);
            }
            ObjectEvent::Changed(WatchedNodeNetwork::Own(object)) => {
                let server = self.state.server.take();
                self.state.server = Some(ServerObject::latest(server, object));
            }
            ObjectEvent::Changed(WatchedNodeNetwork::Peer(peer)) => self.bridges.apply_peer(peer),
            ObjectEvent::Deleted(WatchedNodeNetwork::Own(deleted)) => {
                if self.state.server.as_ref().is_some_and(|server| server.is_same_object(&deleted)) {
                    self.state.server = None;
                }
            }
            ObjectEvent::Deleted(WatchedNodeNetwork::Peer(peer)) => self.bridges.delete_peer(&peer),
            ObjectEvent::Resumed => self.node_networks_recovered(),
            ObjectEvent::Failed(error) => {
                self.watch_failed(Component::NodeNetworkWatch, WatchedKind::NodeNetwork, &error);
            }
        }
    }

    fn node_networks_recovered(&mut self) {
        self.watch_recovered(Component::NodeNetworkWatch, WatchedKind::NodeNetwork);
        // The API server is back: skip the backoff.
        self.state.retry_at = None;
    }

    fn watch_recovered(&self, component: Component, kind: WatchedKind) {
        if self.health.ok(component) == HealthChange::Changed {
            info!(node = self.name, ?kind, "watch established");
        }
    }

    fn watch_failed(&self, component: Component, kind: WatchedKind, error: &watch::Error) {
        self.metrics.watch_failures.get_or_create(&WatchLabels { kind }).inc();
        let problem = format!("watch {kind:?}: {}", ErrorChain(error));
        if self.health.fail(component, problem.clone()) == HealthChange::Changed {
            warn!(node = self.name, ?kind, error = problem, "watch failed; retrying");
        }
    }
}

/// Waits for the next change; forever if there is no sender.
async fn next_change<T>(receiver: &mut Receiver<T>) {
    if receiver.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

#[cfg(test)]
mod tests;
