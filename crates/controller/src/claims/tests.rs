use std::{net::IpAddr, time::Duration};

use api::{
    BridgeNetworkStatus,
    ipblock::{ClaimedAddress, HolderRef},
};
use plan::{
    claims::{ClaimState, Failure, FailureReport, ObjectKey, machine::KindState, release::RELEASE_DELAY},
    network::{NetworkState, NodeState},
};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::*;
use crate::{
    blocks::tests::block,
    cache::{claims::project, project as cache_project},
    leader::tests::FakeApiServer,
    networks::tests::deleting,
};

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
        let mut pod = json!({
            "metadata": {
                "namespace": "ns", "name": "p", "uid": "p-1", "annotations": {"k8s.v1.cni.cncf.io/networks": networks},
            },
            "spec": {"nodeName": "n", "containers": []},
        });
        if let Some(status) = status {
            pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/network-status"] = json!(status);
        }
        *server.lists.lock().unwrap() = vec![("/namespaces/ns/pods", json!([pod]))];
        assert_eq!(is_released(&workers, &server).await, !held, "{networks} {status:?}");
        let lists = server.paths("GET").iter().filter(|path| path.ends_with("/pods")).count();
        assert!(!held || lists == 1, "{lists}: a pod that the cache does not have causes one list per delay");
    }
}

/// Tenants write annotations. The daemon knows which addresses interfaces have.
#[tokio::test(start_paused = true)]
async fn a_forged_network_status_keeps_no_address_that_the_daemon_does_not_report() {
    let status = json!([{"name": "ns/blue", "interface": "net1", "ips": ["10.0.0.3"]}]).to_string();
    let pod = json!({
        "metadata": {
            "namespace": "ns", "name": "p", "uid": "p-1",
            "annotations": {"k8s.v1.cni.cncf.io/networks": "blue", "k8s.v1.cni.cncf.io/network-status": status},
        },
        "spec": {"nodeName": "n", "containers": []},
    });
    for (addresses, held) in [(json!([]), false), (json!(["10.0.0.3"]), true)] {
        let (workers, server) = workers(json!({"attachment": {"namespaces": ["ns"]}}));
        let report = json!({
            "metadata": {"name": "n"},
            "status": {"claimAddresses": [{"networkUID": "uid-blue", "addresses": addresses}]},
        });
        let (_, cached) =
            cache_project::node_report(serde_json::from_value(report.clone()).unwrap()).unwrap();
        workers.cache.update(CacheSource::Nodes, |state| {
            let node = NodeState { uid: "uid-n".to_owned(), labels: [].into(), not_ready_reason: None };
            state.nodes.insert("n".to_owned(), node);
            state.reports.insert("n".to_owned(), cached)
        });
        *server.lists.lock().unwrap() =
            vec![("/namespaces/ns/pods", json!([pod])), ("/nodenetworks", json!([report]))];
        let released = is_released(&workers, &server).await;
        assert_eq!(released, !held, "{addresses} {:?}", server.paths("GET"));
    }
}

/// A claim of VirtualMachine `vm1`, with the finalizer.
fn machine_claim(name: &str) -> ClaimState {
    let object = json!({
        "metadata": {
            "namespace": "ns", "name": name, "uid": name, "resourceVersion": "1",
            "creationTimestamp": "2026-01-01T00:00:00Z", "deletionTimestamp": "2026-01-01T00:00:01Z",
            "finalizers": ["kubevirt.io/persistent-ipam"], "labels": {"kubevirt.io/vm": "vm1"},
            "ownerReferences": [{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "vm1", "uid": "v", "controller": true}],
        },
        "spec": {"network": "blue", "interface": "pod0123456789a"},
    });
    project::claim(serde_json::from_value(object).unwrap()).unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_cannot_be_cleaned_stops_no_other() {
    let (context, server) = FakeApiServer::start();
    let claims = context.cache.claims();
    claims.set_vm_kind(KindState::Listed);
    claims.set_vmi_kind(KindState::Listed);
    for name in ["vm1.a", "vm1.b", "vm1.c"] {
        claims.set_claim(&ObjectKey::new("ns", name), Some(machine_claim(name)));
    }
    server.rejections.lock().unwrap().push(("PATCH", "/ipamclaims/vm1.b", "a policy denies it".to_owned()));
    let workers = ClaimController::new(&context, ClaimOptions::default()).workers;
    let key = ObjectKey::new("ns", "vm1");
    let mut record = MachineRecord::default();
    let next = workers.machine(&ClaimWork::Machine(key.clone()), &key, &mut record).await;
    let requests = server.requests.lock().unwrap();
    let cleaned = requests.iter().filter(|(method, ..)| method == "PATCH").map(|(_, path, body)| {
        assert_eq!(serde_json::from_str::<Value>(body).unwrap()["metadata"]["finalizers"], json!([]));
        path.rsplit('/').next().unwrap()
    });
    assert_eq!(cleaned.collect::<Vec<_>>(), ["vm1.a", "vm1.b", "vm1.c"]);
    assert!(next.requeue_after.is_some(), "the rejected one is tried again");
}

/// A VirtualMachine or an instance `vm1` with these interfaces.
fn machine(kind: &str, uid: &str, interfaces: &[&str]) -> Value {
    let spec = json!({
        "domain": {"devices": {"interfaces": interfaces.iter().map(|name| json!({"name": name})).collect::<Vec<_>>()}},
        "networks": interfaces.iter().map(|name| json!({"name": name, "multus": {"networkName": name}})).collect::<Vec<_>>(),
    });
    let owner = json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "vm1", "uid": "v", "controller": true});
    let (spec, owners) = match kind {
        "VirtualMachine" => (json!({"template": {"spec": spec}}), json!([])),
        _ => (spec, json!([owner])),
    };
    json!({
        "apiVersion": "kubevirt.io/v1", "kind": kind, "spec": spec,
        "metadata": {"namespace": "ns", "name": "vm1", "uid": uid, "resourceVersion": "1", "ownerReferences": owners},
    })
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_only_the_current_machine_needs_is_not_deleted() {
    let (vm_path, vmi_path) = ("/virtualmachines/vm1", "/virtualmachineinstances/vm1");
    for (in_template, in_instance, deleted) in
        [(&["blue"][..], &[][..], false), (&[], &["blue"], false), (&[], &[], true)]
    {
        let (context, server) = FakeApiServer::start();
        let claims = context.cache.claims();
        claims.set_vm_kind(KindState::Listed);
        claims.set_vmi_kind(KindState::Listed);
        let key = ObjectKey::new("ns", "vm1");
        let cached = |kind, uid| serde_json::from_value(machine(kind, uid, &[])).unwrap();
        claims.set_vm(&key, project::vm(&cached("VirtualMachine", "v")));
        claims.set_vmi(&key, project::vmi(&cached("VirtualMachineInstance", "i")));
        let claim = ClaimState { deleting: false, ..machine_claim("vm1.blue") };
        claims.set_claim(&ObjectKey::new("ns", "vm1.blue"), Some(claim));
        *server.objects.lock().unwrap() = vec![
            (vm_path, machine("VirtualMachine", "v", in_template)),
            (vmi_path, machine("VirtualMachineInstance", "i", in_instance)),
        ];
        let workers = ClaimController::new(&context, ClaimOptions::default()).workers;
        let mut record = MachineRecord::default();
        let next = workers.machine(&ClaimWork::Machine(key.clone()), &key, &mut record).await;
        let deletes = server.paths("DELETE");
        assert_eq!(deletes.len(), usize::from(deleted), "{in_template:?} {in_instance:?}: {deletes:?}");
        assert_eq!(next.requeue_after.is_none(), deleted, "planned again when the watch shows the machine");
    }
}

/// The CRD of another project keeps no conditions, and the status of another IPAM is not ours to write.
#[tokio::test(start_paused = true)]
async fn a_failure_that_the_status_cannot_have_is_one_event() {
    let keeps = ClaimSchema::default();
    let prunes = ClaimSchema { conditions: false, ..keeps };
    let failure = |message: &str| Failure {
        reason: api::ipamclaim::AllocationReason::InternalError,
        message: message.to_owned(),
    };
    for (schema, report, messages, expected) in [
        (prunes, FailureReport::Status, &["one", "one"][..], 1),
        (prunes, FailureReport::Status, &["one", "two", "two"], 2),
        (keeps, FailureReport::Event, &["one", "one"], 1),
    ] {
        let (context, server) = FakeApiServer::start();
        let ClaimController { workers, events, .. } = ClaimController::new(&context, ClaimOptions::default());
        *lock(&workers.schema) = schema;
        let stop = CancellationToken::new();
        let mut sending = JoinSet::new();
        sending.spawn(events.run(stop.clone()));
        let claim = ClaimState { owner: None, owner_count: 0, deleting: false, ..machine_claim("c") };
        let mut record = MachineRecord::default();
        for message in messages {
            workers.report_failure(&claim, &failure(message), report, &mut record).await.unwrap();
        }
        assert!(!record.is_default(), "what was said is remembered");
        tokio::time::sleep(Duration::from_secs(5)).await;
        stop.cancel();
        sending.join_all().await;
        let posted: Vec<String> = server.paths("POST");
        assert!(posted.iter().all(|path| path.ends_with("/events")), "{posted:?}");
        assert_eq!(posted.len(), expected, "{messages:?}");
        assert_eq!(server.paths("PATCH"), [""; 0]);
    }
}
