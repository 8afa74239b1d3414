use std::{net::IpAddr, time::Duration};

use api::{
    BridgeNetworkStatus,
    ipblock::{ClaimedAddress, HolderRef},
};
use plan::{claims::release::RELEASE_DELAY, network::NetworkState};
use serde_json::{Value, json};

use super::*;
use crate::{blocks::tests::block, leader::tests::FakeApiServer, networks::tests::deleting};

const BLOCK: &str = "/ipblocks/blue.10.0.0.0-28/status";

/// Workers whose cache has network `blue` and a reservation for claim `ns/c`, which does not exist.
fn workers(spec: Value) -> (Arc<ClaimWorkers>, Arc<FakeApiServer>) {
    let (context, server) = FakeApiServer::start();
    let network = NetworkState {
        deleting: None,
        spec: serde_json::from_value(spec).map_err(|error| error.to_string()),
        status: BridgeNetworkStatus::default(),
        ..deleting("blue", &[])
    };
    context.cache.update(CacheSource::Networks, |state| state.networks.insert("blue".to_owned(), network));
    let mut reserved = block("blue.10.0.0.0-28", "uid-blue", "any");
    reserved.object.spec.network = "blue".to_owned();
    reserved.object.spec.holder = HolderRef::claims();
    let address: IpAddr = "10.0.0.3".parse().unwrap();
    reserved.object.status.claims =
        vec![ClaimedAddress { address, claim: "ns/c".to_owned(), uid: "uid-c".to_owned() }];
    context
        .cache
        .update(CacheSource::Blocks, |state| state.blocks.insert("blue.10.0.0.0-28".to_owned(), reserved));
    (ClaimController::new(&context, ClaimOptions::default()).workers, server)
}

/// Reconciles the network for twice as long as a reservation must be releasable. Returns whether it was released.
async fn is_released(workers: &ClaimWorkers, server: &FakeApiServer) -> bool {
    let mut record = NetworkRecord::default();
    for _ in 0..2 * RELEASE_DELAY.as_secs() {
        workers.network(&"uid-blue".into(), &mut record).await;
        tokio::time::advance(Duration::from_secs(1)).await;
    }
    let requests = server.requests.lock().unwrap();
    let mut writes = requests.iter().filter(|(method, path, _)| method == "PATCH" && path.ends_with(BLOCK));
    writes.any(|(.., body)| serde_json::from_str::<Value>(body).unwrap()["status"]["claims"] == json!([]))
}

#[tokio::test(start_paused = true)]
async fn a_network_that_lost_its_ipam_releases_addresses() {
    let (workers, server) = workers(json!({"attachment": {"namespaces": ["ns"]}}));
    assert!(is_released(&workers, &server).await);
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_has_an_address_keeps_it_however_it_refers_to_the_claim() {
    let status = json!([{"name": "ns/blue", "interface": "net1", "ips": ["10.0.0.3"]}]).to_string();
    let other = json!([{"name": "ns/blue", "interface": "net1", "ips": ["10.0.0.4"]}]).to_string();
    for (networks, status, held) in [
        ("blue", Some(&status), true),
        (r#"[{"name":"blue","IPAM-Claim-Reference":"c"}]"#, None, true),
        ("blue", Some(&other), false),
    ] {
        let (workers, server) = workers(json!({"attachment": {"namespaces": ["ns"]}}));
        let mut pod = json!({"metadata": {
            "namespace": "ns", "name": "p", "uid": "p-1", "annotations": {"k8s.v1.cni.cncf.io/networks": networks},
        }});
        if let Some(status) = status {
            pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/network-status"] = json!(status);
        }
        *server.lists.lock().unwrap() = vec![("/namespaces/ns/pods", json!([pod]))];
        assert_eq!(is_released(&workers, &server).await, !held, "{networks} {status:?}");
        let lists = server.paths("GET").iter().filter(|path| path.ends_with("/pods")).count();
        assert!(!held || lists == 1, "{lists}: a pod that the cache does not have causes one list per delay");
    }
}
