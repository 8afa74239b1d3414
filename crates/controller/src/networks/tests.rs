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
use plan::network::Network;
use serde_json::{Value, json};

use super::*;
use crate::lease::fence::tests::fence;

/// An API server that has little and agrees to almost everything.
#[derive(Default)]
struct Server {
    /// What it was asked: method, address and body.
    asked: Mutex<Vec<(String, String, String)>>,
    /// What lists hold whose address ends so.
    lists: Mutex<Vec<(&'static str, Value)>>,
    /// What is refused: a method, the end of the address, and the words.
    refusals: Mutex<Vec<(&'static str, &'static str, String)>>,
}

impl Server {
    fn answer(&self, method: &str, path: &str, body: String) -> http::Response<Body> {
        self.asked.lock().unwrap().push((method.to_owned(), path.to_owned(), body));
        let refusals = self.refusals.lock().unwrap();
        if let Some((_, _, why)) = refusals.iter().find(|(m, end, _)| *m == method && path.ends_with(end)) {
            let status = serde_json::to_vec(&Status::failure(why, "InternalError").with_code(500)).unwrap();
            return http::Response::builder().status(500).body(Body::from(status)).unwrap();
        }
        let answer = if method == "GET" {
            let lists = self.lists.lock().unwrap();
            let items = lists.iter().find(|(end, _)| path.ends_with(end));
            let items = items.map_or_else(|| json!([]), |(_, items)| items.clone());
            json!({"apiVersion": "v1", "kind": "List", "metadata": {}, "items": items})
        } else {
            json!({"apiVersion": "v1", "kind": "Any", "metadata": {"name": "any"}})
        };
        http::Response::new(Body::from(answer.to_string().into_bytes()))
    }

    /// The addresses that were asked by this method, one after the other.
    fn asked(&self, method: &str) -> Vec<String> {
        let asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        asked.iter().filter(|(how, ..)| how == method).map(|(_, path, _)| path.clone()).collect()
    }

    /// What was last written to the status of a network.
    fn status(&self, name: &str) -> Option<String> {
        let asked = self.asked.lock().unwrap();
        let end = format!("bridgenetworks/{name}/status");
        asked
            .iter()
            .rev()
            .find(|(how, path, _)| how == "PATCH" && path.ends_with(&end))
            .map(|it| it.2.clone())
    }
}

fn steward() -> (Steward, Arc<Server>) {
    let server = Arc::new(Server::default());
    let shared = server.clone();
    let service = tower::service_fn(move |request: http::Request<Body>| {
        let server = shared.clone();
        async move {
            let (parts, body) = request.into_parts();
            let body = String::from_utf8(body.collect_bytes().await.unwrap().to_vec()).unwrap();
            Ok::<_, Infallible>(server.answer(parts.method.as_str(), parts.uri.path(), body))
        }
    });
    let client = Client::new(service, "ns");
    let cluster = Cluster::new();
    cluster.world().attachments = Some([].into());
    let fence = fence(Duration::from_hours(1));
    (Steward::new(client, cluster, Arc::default(), fence), server)
}

/// A network whose deletion began long ago.
fn going(name: &str, finalizers: &[&str]) -> Network {
    let spec = json!({"attachment": {"namespaces": ["ns"]}});
    Network {
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

fn put(steward: &Steward, network: Network) {
    steward.cluster.world().networks.insert(network.name.clone(), network);
}

#[tokio::test(start_paused = true)]
async fn however_many_networks_go_everything_is_listed_once() {
    let (mut steward, server) = steward();
    for number in 0..20 {
        put(&steward, going(&format!("a{number}"), &[FINALIZER_USERS, FINALIZER_NODES]));
        put(&steward, going(&format!("b{number}"), &[FINALIZER_NODES]));
    }
    let pod = json!({"metadata": {
        "namespace": "ns", "name": "late", "annotations": {"k8s.v1.cni.cncf.io/networks": "a7"},
    }});
    let node = json!({"metadata": {"name": "n"}, "status": {"networks": []}});
    *server.lists.lock().unwrap() = vec![("/pods", json!([pod])), ("/nodenetworks", json!([node]))];
    steward.round().await;
    let lists = server.asked("GET");
    let times = |end: &str| lists.iter().filter(|path| path.ends_with(end)).count();
    let kinds =
        ["/pods", "/cronjobs", "/virtualmachines", "/nodenetworks", "/network-attachment-definitions"];
    assert_eq!(kinds.map(times), [1; 5], "{lists:?}");
    assert!(
        lists[0].ends_with("/network-attachment-definitions"),
        "users are looked for when those are gone"
    );
    let released = server.asked("PATCH");
    assert_eq!(released.len(), 39, "{released:?}");
    assert!(!released.iter().any(|path| path.ends_with("/a7")), "somebody has just begun to use it");
}

#[tokio::test(start_paused = true)]
async fn a_list_that_fails_is_told_in_the_status_and_asked_for_again() {
    let rows =
        [("/pods", [FINALIZER_USERS, FINALIZER_NODES].as_slice()), ("/nodenetworks", &[FINALIZER_NODES])];
    for (list, finalizers) in rows {
        let (mut steward, server) = steward();
        put(&steward, going("blue", finalizers));
        server.refusals.lock().unwrap().push(("GET", list, "etcd is away".to_owned()));
        steward.round().await;
        assert_eq!(server.asked("PATCH"), [""; 0]);
        steward.round().await;
        let told = server.status("blue").unwrap();
        assert!(told.contains("deletion is under way") && told.contains("etcd is away"), "{told}");
        let asked = server.asked("GET").len();
        // The status is seen, as written.
        let written = steward.plan().turns.remove(0).status.unwrap();
        steward.cluster.world().networks.get_mut("blue").unwrap().status = *written;
        let pause = steward.round().await;
        assert_eq!(server.asked("GET").len(), asked, "not at once");
        assert!(pause <= memory::FIRST_RETRY, "{pause:?}");
        server.refusals.lock().unwrap().clear();
        tokio::time::advance(memory::FIRST_RETRY * 2).await;
        steward.round().await;
        let patches = server.asked("PATCH");
        assert!(patches.last().unwrap().ends_with("/bridgenetworks/blue"), "{patches:?}");
        assert!(steward.cluster.world().unanswered.is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn a_status_that_cannot_be_written_delays_no_deletion() {
    let (mut steward, server) = steward();
    let finalizers = [FINALIZER_USERS, FINALIZER_NODES];
    put(
        &steward,
        Network { deleting: None, spec: Err("mtu: lots".to_owned()), ..going("blue", &finalizers) },
    );
    server.refusals.lock().unwrap().push(("PATCH", "/status", "type mismatch".to_owned()));
    for _ in 0..10 {
        tokio::time::advance(memory::FIRST_RETRY).await;
        steward.round().await;
    }
    let told = server.asked("PATCH");
    assert_eq!(told.len(), 4, "at 1, 2, 4 and 8 seconds: {told:?}");
    put(&steward, going("blue", &finalizers));
    steward.round().await;
    let last = server.asked("PATCH").pop().unwrap();
    assert!(last.ends_with("/bridgenetworks/blue"), "{last}");
}

#[tokio::test(start_paused = true)]
async fn a_status_takes_the_place_of_all_that_was_read() {
    let (mut steward, server) = steward();
    put(&steward, Network { deleting: None, ..going("blue", &[FINALIZER_USERS, FINALIZER_NODES]) });
    steward.round().await;
    let patch: Value = serde_json::from_str(&server.status("blue").unwrap()).unwrap();
    assert_eq!(patch[0], json!({"op": "replace", "path": "/metadata/resourceVersion", "value": "1"}));
    assert_eq!((&patch[1]["op"], &patch[1]["path"]), (&json!("add"), &json!("/status")));
    assert_eq!(patch[1]["value"]["conditions"][0]["type"], "Ready");
}
