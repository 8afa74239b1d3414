//! Tests of the publication of a node's NodeNetwork.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    future::pending,
    sync::atomic::{AtomicU64, Ordering},
};

use http::{Request, Response};
use kube::client::Body;
use serde_json::json;

use super::*;

/// Addresses of a first run. The directory is not needed after the journal is open.
fn ipam() -> Arc<Ipam> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let dir = std::env::temp_dir().join(format!("patchbay-controller-{}-{number}", std::process::id()));
    let ipam = Ipam::open(&dir, "boot", crate::ipam::Metrics::default()).unwrap();
    fs::remove_dir_all(&dir).unwrap();
    Arc::new(ipam)
}

/// A controller whose API server holds no objects and sends no events.
fn controller() -> NodeController {
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
    let config = NodeConfig {
        name: "a".into(),
        ignored: IfNamePatterns::default(),
        sysctls: PathBuf::new(),
        metrics,
        runtime: tokio::sync::watch::channel(RuntimeStatus::Unknown).1,
        state_problem: tokio::sync::watch::channel(None).1,
        ipam: ipam(),
    };
    NodeController::new(client, config, monitor, bridges, Arc::new(Health::new()))
}

/// The state directory was lost, and pods keep addresses of claims. Annotations of pods decide until a reboot.
#[tokio::test]
async fn a_lost_address_journal_reports_no_addresses_of_claims() {
    for (listed, expected) in [(false, true), (true, false)] {
        let mut controller = controller();
        let mut status = json!({"vtep": null, "interfaces": []});
        if listed {
            status["claimAddresses"] = json!([{"networkUID": "u", "addresses": ["10.0.0.3"]}]);
        }
        let own = json!({"metadata": {"name": "a", "uid": "u", "resourceVersion": "1"}, "status": status});
        controller.apply_node_networks(ObjectEvent::Synced(vec![watched(own)]));
        controller.ipam.close(BTreeMap::new());
        controller.ipam.record_complete();
        let report = controller.ipam.lease_report().borrow().clone();
        assert_eq!(report.unwrap().report.claims.is_some(), expected);
    }
}

fn watched(object: serde_json::Value) -> WatchedNodeNetwork {
    WatchedNodeNetwork::read(&serde_json::from_value(object).unwrap(), "a", &mut SharedUids::default())
}

/// ADDs of claims wait for it.
#[tokio::test]
async fn a_stored_status_acknowledges_the_report_that_it_has() {
    let mut controller = controller();
    let internal_ips = Vec::new();
    controller.state.node_info = Some(NodeInfo { name: "a".into(), uid: "u".into(), internal_ips });
    controller.state.observed = Some(KernelState::default());
    controller.apply_node_networks(ObjectEvent::Synced(Vec::new()));
    assert!(matches!(controller.publish().await, PublishOutcome::Written));
    assert_eq!(controller.ipam.published(), 0, "the leases are not known yet");
    controller.ipam.close(BTreeMap::new());
    assert!(matches!(controller.publish().await, PublishOutcome::Pending(None)), "it has this status");
    assert_eq!(controller.ipam.published(), 1);
    controller.ipam.record_complete();
    controller.state.last_write = None;
    controller.state.retry_at = Some(Instant::now() + Duration::from_secs(9));
    assert!(matches!(controller.publish().await, PublishOutcome::Pending(Some(_))));
    assert_eq!(controller.ipam.published(), 1, "it is not stored yet");
    controller.state.retry_at = None;
    assert!(matches!(controller.publish().await, PublishOutcome::Written));
    assert_eq!(controller.ipam.published(), 2);
}

fn object(version: &str) -> WatchedNodeNetwork {
    watched(json!({"metadata": {"name": "a", "uid": "u", "resourceVersion": version}}))
}

#[tokio::test]
async fn a_list_older_than_the_last_write_is_ignored() {
    let mut controller = controller();
    controller.apply_node_networks(ObjectEvent::Synced(vec![object("10")]));
    controller.apply_node_networks(ObjectEvent::Synced(vec![object("9")]));
    assert_eq!(controller.state.server.clone().map(WatchedNodeNetwork::Own), Some(object("10")));
    controller.apply_node_networks(ObjectEvent::Synced(Vec::new()));
    assert_eq!(controller.state.server, None);
}

#[tokio::test]
async fn a_returning_api_server_resets_the_write_backoff() {
    let mut controller = controller();
    controller.state.retry_at = Some(Instant::now() + Duration::from_secs(30));
    controller.apply_node_networks(ObjectEvent::Failed(watch::Error::Deadline(Duration::from_secs(10))));
    assert!(controller.state.retry_at.is_some());
    controller.apply_node_networks(ObjectEvent::Resumed);
    assert_eq!(controller.state.retry_at, None);
    controller.state.retry_at = Some(Instant::now() + Duration::from_secs(30));
    controller.apply_node_networks(ObjectEvent::Synced(Vec::new()));
    assert_eq!(controller.state.retry_at, None);
}

#[tokio::test]
async fn a_successful_observation_keeps_the_write_backoff() {
    let mut controller = controller();
    let fail = |controller: &mut NodeController| {
        let source = client::request::Error::Timeout(Duration::from_secs(10));
        controller.publish_failed(&node_network::Error { name: "a".into(), source })
    };
    for _ in 0..8 {
        fail(&mut controller);
    }
    // Due at once.
    controller.state.pending_event = Some(Instant::now() - Duration::from_secs(1));
    controller.observe().await;
    assert!(controller.state.observed.is_some());
    assert!(fail(&mut controller) - Instant::now() > Duration::from_secs(5));
}

#[tokio::test]
async fn a_vtep_on_loopback_keeps_its_links_to_the_peers_while_they_have_no_route() {
    let mut controller = controller();
    controller.state.node_info = Some(NodeInfo {
        name: "a".to_owned(),
        uid: "u".to_owned(),
        internal_ips: vec!["127.0.0.1".parse().unwrap()],
    });
    controller.state.pending_event = Some(Instant::now() - Duration::from_secs(1));
    controller.observe().await;
    // Local addresses: the kernel has no unicast route to them.
    let peer = |name: &str, vtep: &str| {
        let vtep = json!({"address": vtep, "interface": "lo", "mtu": 1500});
        watched(json!({"metadata": {"name": name}, "status": {"vtep": vtep}}))
    };
    controller.apply_node_networks(ObjectEvent::Synced(vec![peer("b", "127.0.0.2")]));
    controller.state.peer_routes.links = vec![7];
    let peer_links =
        |controller: &NodeController| controller.state.observed.as_ref().unwrap().peer_links.clone();
    controller.look_up_peer_routes().await;
    assert_eq!(peer_links(&controller), [7]);
    let looked_up = controller.state.peer_routes.looked_up;
    controller.look_up_peer_routes().await;
    assert_eq!(controller.state.peer_routes.looked_up, looked_up, "at most one lookup in five seconds");
    controller.apply_node_networks(ObjectEvent::Changed(peer("c", "127.0.0.3")));
    controller.look_up_peer_routes().await;
    assert_ne!(controller.state.peer_routes.looked_up, looked_up, "a new peer is looked up immediately");

    controller.apply_node_networks(ObjectEvent::Synced(Vec::new()));
    controller.look_up_peer_routes().await;
    assert_eq!(peer_links(&controller), Vec::<u32>::new());
}

#[tokio::test(start_paused = true)]
async fn an_idle_loop_keeps_its_heartbeat() {
    let controller = controller();
    let health = Arc::clone(&controller.health);
    let stop = CancellationToken::new();
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(controller.run(stop.clone()));
    for _ in 0..30 {
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert_eq!(health.stalled(), None);
    }
    stop.cancel();
    tasks.join_next().await.unwrap().unwrap().unwrap();
}
