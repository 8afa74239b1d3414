use api::{
    BridgeNetworkSpec, BridgeNetworkStatus,
    bridgenetwork::{FINALIZER_NODES, FINALIZER_USERS},
};
use plan::network::NetworkState;
use serde_json::{Value, json};

use super::*;
use crate::leader::tests::FakeApiServer;

fn controller() -> (NetworkController, Arc<FakeApiServer>) {
    let (context, server) = FakeApiServer::start();
    (NetworkController::new(&context), server)
}

/// A network whose deletion started long ago.
pub fn deleting(name: &str, finalizers: &[&str]) -> NetworkState {
    let spec = json!({"attachment": {"namespaces": ["ns"]}});
    NetworkState {
        name: name.to_owned(),
        uid: format!("uid-{name}"),
        version: "1".to_owned(),
        generation: 2,
        created: Timestamp::UNIX_EPOCH,
        deleting: Some(Timestamp::UNIX_EPOCH),
        finalizers: finalizers.iter().map(|one| (*one).to_owned()).collect(),
        spec: serde_json::from_value::<BridgeNetworkSpec>(spec).map_err(|error| error.to_string()),
        status: BridgeNetworkStatus::default(),
    }
}

fn add(controller: &NetworkController, network: NetworkState) {
    controller
        .cache
        .update(CacheSource::Networks, |state| state.networks.insert(network.name.clone(), network));
}

#[tokio::test(start_paused = true)]
async fn every_kind_is_listed_once_however_many_networks_are_deleted() {
    let (mut controller, server) = controller();
    for number in 0..20 {
        add(&controller, deleting(&format!("a{number}"), &[FINALIZER_USERS, FINALIZER_NODES]));
        add(&controller, deleting(&format!("b{number}"), &[FINALIZER_NODES]));
    }
    let pod = json!({"metadata": {
        "namespace": "ns", "name": "late", "annotations": {"k8s.v1.cni.cncf.io/networks": "a7"},
    }});
    let node = json!({"metadata": {"name": "n"}, "status": {"networks": []}});
    *server.lists.lock().unwrap() = vec![("/pods", json!([pod])), ("/nodenetworks", json!([node]))];
    controller.reconcile().await;
    let lists = server.paths("GET");
    let times = |end: &str| lists.iter().filter(|path| path.ends_with(end)).count();
    let kinds =
        ["/pods", "/cronjobs", "/virtualmachines", "/nodenetworks", "/network-attachment-definitions"];
    assert_eq!(kinds.map(times), [1; 5], "{lists:?}");
    assert!(lists[0].ends_with("/network-attachment-definitions"), "users are listed after the NADs");
    let released = server.paths("PATCH");
    assert_eq!(released.len(), 39, "{released:?}");
    assert!(!released.iter().any(|path| path.ends_with("/a7")), "it has a new user");
}

#[tokio::test(start_paused = true)]
async fn a_failed_live_read_is_reported_in_the_status_and_retried() {
    let rows =
        [("/pods", [FINALIZER_USERS, FINALIZER_NODES].as_slice()), ("/nodenetworks", &[FINALIZER_NODES])];
    for (list, finalizers) in rows {
        let (mut controller, server) = controller();
        add(&controller, deleting("blue", finalizers));
        server.rejections.lock().unwrap().push(("GET", list, "etcd is away".to_owned()));
        controller.reconcile().await;
        assert_eq!(server.paths("PATCH"), [""; 0]);
        controller.reconcile().await;
        let status = server.status("blue").unwrap();
        assert!(status.contains("deletion in progress") && status.contains("etcd is away"), "{status}");
        let reads = server.paths("GET").len();
        // The watch delivers the status.
        let written = controller.plan().1.networks.remove(0).status.unwrap();
        add(&controller, NetworkState { status: *written, ..deleting("blue", finalizers) });
        let requeue_after = controller.reconcile().await;
        assert_eq!(server.paths("GET").len(), reads, "the read backs off");
        assert!(requeue_after <= MIN_RETRY, "{requeue_after:?}");
        server.rejections.lock().unwrap().clear();
        tokio::time::advance(MIN_RETRY * 2).await;
        controller.reconcile().await;
        let patches = server.paths("PATCH");
        assert!(patches.last().unwrap().ends_with("/bridgenetworks/blue"), "{patches:?}");
        assert!(controller.records.live_read_failed.is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn a_rejected_status_does_not_delay_the_deletion() {
    let (mut controller, server) = controller();
    let finalizers = [FINALIZER_USERS, FINALIZER_NODES];
    add(
        &controller,
        NetworkState { deleting: None, spec: Err("mtu: lots".to_owned()), ..deleting("blue", &finalizers) },
    );
    server.rejections.lock().unwrap().push(("PATCH", "/status", "type mismatch".to_owned()));
    for _ in 0..10 {
        tokio::time::advance(MIN_RETRY).await;
        controller.reconcile().await;
    }
    let patches = server.paths("PATCH");
    assert_eq!(patches.len(), 4, "at 1, 2, 4 and 8 seconds: {patches:?}");
    add(&controller, deleting("blue", &finalizers));
    controller.reconcile().await;
    let last = server.paths("PATCH").pop().unwrap();
    assert!(last.ends_with("/bridgenetworks/blue"), "{last}");
}

#[tokio::test(start_paused = true)]
async fn a_status_that_an_older_crd_drops_backs_off() {
    for (version, expected) in [("1", 4), ("2", 10)] {
        let (mut controller, server) = controller();
        let finalizers = [FINALIZER_USERS, FINALIZER_NODES];
        add(&controller, NetworkState { deleting: None, ..deleting("blue", &finalizers) });
        *server.version_after_write.lock().unwrap() = Some(version);
        for _ in 0..10 {
            tokio::time::advance(MIN_RETRY).await;
            controller.reconcile().await;
        }
        let end = "/bridgenetworks/blue/status";
        let writes = server.paths("PATCH").iter().filter(|path| path.ends_with(end)).count();
        assert_eq!(writes, expected, "resourceVersion 1 before and {version} after the write");
    }
}

#[tokio::test(start_paused = true)]
async fn a_status_write_replaces_the_whole_status() {
    let (mut controller, server) = controller();
    add(
        &controller,
        NetworkState { deleting: None, ..deleting("blue", &[FINALIZER_USERS, FINALIZER_NODES]) },
    );
    controller.reconcile().await;
    let patch: Value = serde_json::from_str(&server.status("blue").unwrap()).unwrap();
    assert_eq!(patch[0], json!({"op": "replace", "path": "/metadata/resourceVersion", "value": "1"}));
    assert_eq!((&patch[1]["op"], &patch[1]["path"]), (&json!("add"), &json!("/status")));
    assert_eq!(patch[1]["value"]["conditions"][0]["type"], "Ready");
}
