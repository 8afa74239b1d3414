use api::{NetworkOnNode, bridgenetwork::READY_LABEL_PREFIX};
use plan::network::{NetworkState, NodeReport, NodeState};
use serde_json::json;

use super::*;
use crate::{leader::tests::FakeApiServer, networks::tests::deleting};

/// A Node without labels, and its report that the network is ready.
pub fn ready_on(network: &NetworkState) -> (NodeState, NodeReport) {
    let entry = json!({
        "uid": network.uid, "name": network.name, "observedGeneration": 1, "ready": true, "reason": "Ready",
        "message": "", "bridge": "br",
    });
    let entry: NetworkOnNode = serde_json::from_value(entry).unwrap();
    let node = NodeState { uid: "uid-n".to_owned(), labels: [].into(), not_ready_reason: None };
    (node, NodeReport { networks: [(network.uid.clone(), entry)].into(), ..NodeReport::default() })
}

#[tokio::test(start_paused = true)]
async fn labels_are_patched_once_and_again_if_the_watch_does_not_deliver_them() {
    let (context, server) = FakeApiServer::start();
    let network = NetworkState { deleting: None, ..deleting("blue", &[]) };
    context.cache.update(CacheSource::Nodes, |state| {
        let (node, report) = ready_on(&network);
        state.nodes.insert("n".to_owned(), node);
        state.reports.insert("n".to_owned(), report);
        state.networks.insert("blue".to_owned(), network)
    });
    let mut controller = NodeLabelController::new(&context);
    controller.reconcile().await;
    let requests = server.requests.lock().unwrap().clone();
    let expected =
        json!({"metadata": {"uid": "uid-n", "labels": {format!("{READY_LABEL_PREFIX}blue"): "true"}}});
    assert_eq!(serde_json::from_str::<serde_json::Value>(&requests[0].2).unwrap(), expected);
    assert_eq!(controller.reconcile().await, EXPECTATION_TTL);
    assert_eq!(server.paths("PATCH").len(), 1);
    tokio::time::advance(EXPECTATION_TTL).await;
    controller.reconcile().await;
    assert_eq!(server.paths("PATCH").len(), 2);
    context.cache.update(CacheSource::Nodes, |state| {
        let label = format!("{READY_LABEL_PREFIX}blue");
        state.nodes.get_mut("n").unwrap().labels.insert(label, "true".to_owned()).is_none()
    });
    assert_eq!(controller.reconcile().await, RESYNC);
    assert_eq!(server.paths("PATCH").len(), 2);
}
