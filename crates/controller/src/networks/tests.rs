use std::{
    convert::Infallible,
    sync::{Mutex, PoisonError},
};

use api::{
    BridgeNetworkSpec, BridgeNetworkStatus,
    bridgenetwork::{FINALIZER_NODES, FINALIZER_USERS},
};
use axum::http;
use kube::{client::Body, core::Status};
use plan::network::NetworkState;
use serde_json::{Value, json};

use super::*;
use crate::lease::fence::tests::fence;

/// An API server that returns the given lists and accepts every write that is not rejected.
#[derive(Default)]
struct FakeApiServer {
    /// The requests: method, path and body.
    requests: Mutex<Vec<(String, String, String)>>,
    /// The items of lists, by the end of the path.
    lists: Mutex<Vec<(&'static str, Value)>>,
    /// The requests to reject: method, end of the path, and message.
    rejections: Mutex<Vec<(&'static str, &'static str, String)>>,
    /// The resourceVersion of objects after a write.
    version_after_write: Mutex<Option<&'static str>>,
}

impl FakeApiServer {
    fn respond(&self, method: &str, path: &str, body: String) -> http::Response<Body> {
        self.requests.lock().unwrap().push((method.to_owned(), path.to_owned(), body));
        let rejections = self.rejections.lock().unwrap();
        if let Some((_, _, why)) = rejections.iter().find(|(m, end, _)| *m == method && path.ends_with(end)) {
            let status = serde_json::to_vec(&Status::failure(why, "InternalError").with_code(500)).unwrap();
            return http::Response::builder().status(500).body(Body::from(status)).unwrap();
        }
        let response = if method == "GET" {
            let lists = self.lists.lock().unwrap();
            let items = lists.iter().find(|(end, _)| path.ends_with(end));
            let items = items.map_or_else(|| json!([]), |(_, items)| items.clone());
            json!({"apiVersion": "v1", "kind": "List", "metadata": {}, "items": items})
        } else {
            let version = *self.version_after_write.lock().unwrap();
            json!({"apiVersion": "v1", "kind": "Any", "metadata": {"name": "any", "resourceVersion": version}})
        };
        http::Response::new(Body::from(response.to_string().into_bytes()))
    }

    /// The paths of the requests with this method, in order.
    fn paths(&self, method: &str) -> Vec<String> {
        let requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        requests.iter().filter(|(how, ..)| how == method).map(|(_, path, _)| path.clone()).collect()
    }

    /// The last patch of a network's status.
    fn status(&self, name: &str) -> Option<String> {
        let requests = self.requests.lock().unwrap();
        let end = format!("bridgenetworks/{name}/status");
        requests
            .iter()
            .rev()
            .find(|(how, path, _)| how == "PATCH" && path.ends_with(&end))
            .map(|it| it.2.clone())
    }
}

fn controller() -> (NetworkController, Arc<FakeApiServer>) {
    let server = Arc::new(FakeApiServer::default());
    let shared = server.clone();
    let service = tower::service_fn(move |request: http::Request<Body>| {
        let server = shared.clone();
        async move {
            let (parts, body) = request.into_parts();
            let body = String::from_utf8(body.collect_bytes().await.unwrap().to_vec()).unwrap();
            Ok::<_, Infallible>(server.respond(parts.method.as_str(), parts.uri.path(), body))
        }
    });
    let client = Client::new(service, "ns");
    let cache = ClusterCache::new();
    cache.state().nads = Some([].into());
    let fence = fence(Duration::from_hours(1));
    (NetworkController::new(client, cache, Arc::default(), fence), server)
}

/// A network whose deletion started long ago.
fn deleting(name: &str, finalizers: &[&str]) -> NetworkState {
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
    controller.cache.state().networks.insert(network.name.clone(), network);
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
        let written = controller.plan().networks.remove(0).status.unwrap();
        controller.cache.state().networks.get_mut("blue").unwrap().status = *written;
        let requeue_after = controller.reconcile().await;
        assert_eq!(server.paths("GET").len(), reads, "the read backs off");
        assert!(requeue_after <= pending::MIN_RETRY, "{requeue_after:?}");
        server.rejections.lock().unwrap().clear();
        tokio::time::advance(pending::MIN_RETRY * 2).await;
        controller.reconcile().await;
        let patches = server.paths("PATCH");
        assert!(patches.last().unwrap().ends_with("/bridgenetworks/blue"), "{patches:?}");
        assert!(controller.cache.state().live_read_failed.is_empty());
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
        tokio::time::advance(pending::MIN_RETRY).await;
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
            tokio::time::advance(pending::MIN_RETRY).await;
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
