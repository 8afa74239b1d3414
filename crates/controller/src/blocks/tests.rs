use api::{IPBlockSpec, IPBlockStatus, bridgenetwork::FINALIZER_NODES, ipblock::HolderRef};
use plan::{ipam::ObservedIpBlock, network::BlockState};
use serde_json::json;

use super::*;
use crate::{leader::tests::FakeApiServer, networks::tests::deleting};

/// A block of a network, held by a Node.
pub fn block(name: &str, network: &str, node: &str) -> BlockState {
    let spec = IPBlockSpec {
        network: "any".to_owned(),
        network_uid: network.to_owned(),
        cidr: "10.0.0.0/28".parse().unwrap(),
        holder: HolderRef { node: node.to_owned(), uid: format!("uid-{node}") },
        lender: None,
        boot_id: String::new(),
    };
    let object = ObservedIpBlock { uid: format!("uid-{name}"), spec, status: IPBlockStatus::default() };
    BlockState { version: "7".to_owned(), object }
}

/// A block of the holder of claims: no Node is waited for.
fn claims_block(name: &str, network: &str) -> BlockState {
    let mut state = block(name, network, "any");
    state.object.spec.holder = HolderRef::claims();
    state
}

#[tokio::test(start_paused = true)]
async fn one_list_of_networks_serves_a_round_of_deletions() {
    let (context, server) = FakeApiServer::start();
    context.cache.update(CacheSource::Blocks, |state| {
        for number in 0..20 {
            let name = format!("gone-{number}");
            state.blocks.insert(name.clone(), claims_block(&name, &format!("uid-n{number}")));
        }
        // The cache misses a network that exists.
        state.blocks.insert("kept".to_owned(), claims_block("kept", "uid-new"))
    });
    let existing =
        json!({"metadata": {"name": "new", "uid": "uid-new", "finalizers": ["patchbay.dev/users"]}});
    *server.lists.lock().unwrap() = vec![("/bridgenetworks", json!([existing]))];
    let mut controller = BlockController::new(&context);
    controller.reconcile().await;
    assert_eq!(server.paths("GET").iter().filter(|path| path.ends_with("/bridgenetworks")).count(), 1);
    let deleted = server.paths("DELETE");
    assert_eq!(deleted.len(), 20, "{deleted:?}");
    assert!(!deleted.iter().any(|path| path.ends_with("/kept")), "{deleted:?}");
    let requests = server.requests.lock().unwrap().clone();
    for (_, path, body) in requests.iter().filter(|(method, ..)| method == "DELETE") {
        let body: serde_json::Value = serde_json::from_str(body).unwrap();
        let name = path.rsplit('/').next().unwrap();
        assert_eq!(
            body["preconditions"],
            json!({"uid": format!("uid-{name}"), "resourceVersion": "7"}),
            "{path}"
        );
    }
    // The watch has not delivered the deletions: they are not repeated.
    let wait = controller.reconcile().await;
    assert_eq!(server.paths("DELETE").len(), 20);
    assert!(wait <= EXPECTATION_TTL, "{wait:?}");
    assert_eq!(requests.len(), server.requests.lock().unwrap().len(), "no live read without a deletion");
}

#[tokio::test(start_paused = true)]
async fn blocks_of_a_network_that_is_being_released_are_deleted_after_a_live_read() {
    let (context, server) = FakeApiServer::start();
    context.cache.update(CacheSource::Blocks, |state| {
        state.networks.insert("blue".to_owned(), deleting("blue", &[FINALIZER_NODES]));
        state.blocks.insert("b".to_owned(), claims_block("b", "uid-blue"))
    });
    let live = |finalizer: &str| {
        json!([{"metadata": {
            "name": "blue", "uid": "uid-blue", "finalizers": [finalizer], "deletionTimestamp": "2026-01-01T00:00:00Z",
        }}])
    };
    let mut controller = BlockController::new(&context);
    *server.lists.lock().unwrap() = vec![("/bridgenetworks", live("patchbay.dev/users"))];
    controller.reconcile().await;
    assert_eq!(server.paths("DELETE"), [""; 0], "the API server still has the users finalizer");
    tokio::time::advance(EXPECTATION_TTL * 2).await;
    *server.lists.lock().unwrap() = vec![("/bridgenetworks", live(FINALIZER_NODES))];
    controller.reconcile().await;
    assert_eq!(server.paths("DELETE").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn blocks_of_a_gone_node_are_deleted_after_the_grace_period_and_a_live_read() {
    let (context, server) = FakeApiServer::start();
    context.cache.update(CacheSource::Blocks, |state| {
        let network = network::NetworkState { deleting: None, ..deleting("blue", &[]) };
        state.networks.insert("blue".to_owned(), network);
        state.blocks.insert("b".to_owned(), block("b", "uid-blue", "n"))
    });
    let mut controller = BlockController::new(&context);
    let wait = controller.reconcile().await;
    assert_eq!((server.requests.lock().unwrap().len(), wait), (0, network::NODE_GONE_GRACE));
    tokio::time::advance(network::NODE_GONE_GRACE).await;
    *server.lists.lock().unwrap() = vec![("/nodes", json!([{"metadata": {"name": "n", "uid": "uid-n"}}]))];
    controller.reconcile().await;
    assert_eq!((server.paths("GET").len(), server.paths("DELETE").len()), (1, 0), "the Node exists");
    tokio::time::advance(EXPECTATION_TTL * 2).await;
    server.lists.lock().unwrap().clear();
    controller.reconcile().await;
    assert_eq!(server.paths("DELETE").len(), 1);
}
