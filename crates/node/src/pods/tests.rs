use std::{convert::Infallible, future::pending, time::Duration};

use futures::FutureExt as _;
use http::{Request, Response};
use kube::client::Body;
use serde_json::{Value, json};
use tokio::{sync::mpsc, task::JoinSet, time::timeout};

use super::*;

/// A server that answers each request with the next reply, and reports the path and query of each request.
struct Server {
    replies: mpsc::UnboundedSender<(u16, String)>,
    requests: mpsc::UnboundedReceiver<String>,
}

fn server() -> (Client, Server) {
    let (replies, queue) = mpsc::unbounded_channel::<(u16, String)>();
    let (sender, requests) = mpsc::unbounded_channel();
    let queue = Arc::new(tokio::sync::Mutex::new(queue));
    let service = tower::service_fn(move |request: Request<Body>| {
        let (queue, sender) = (Arc::clone(&queue), sender.clone());
        async move {
            sender.send(request.uri().to_string()).unwrap();
            let Some((status, text)) = queue.lock().await.recv().await else { pending().await };
            let response = Response::builder().status(status).body(Body::from(text.into_bytes()));
            Ok::<_, Infallible>(response.unwrap())
        }
    });
    (Client::new(service, "default"), Server { replies, requests })
}

fn pod(uid: &str, version: &str, changes: &Value) -> Value {
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": format!("pod-{uid}"), "namespace": "ns", "uid": uid, "resourceVersion": version,
            "labels": {"app": "x", "tier": "y"},
            "annotations": {"k8s.v1.cni.cncf.io/networks": "blue", "patchbay.dev/x": "1", "other": "2"},
            "managedFields": [{"manager": "kubelet", "fieldsV1": {"f:metadata": {}}}],
        },
        "spec": {"nodeName": "node-1", "containers": [{"name": "c", "image": "i"}]},
        "status": {"phase": "Running", "podIP": "10.0.0.1"},
    });
    for (pointer, value) in changes.as_object().into_iter().flatten() {
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        pod.pointer_mut(parent).unwrap()[key] = value.clone();
    }
    pod
}

fn list(version: &str, pods: &[Value]) -> (u16, String) {
    (200, json!({"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": version}, "items": pods}).to_string())
}

fn events(events: &[(&str, Value)]) -> (u16, String) {
    let line = |(kind, object): &(&str, Value)| json!({"type": kind, "object": object}).to_string() + "\n";
    (200, events.iter().map(line).collect())
}

fn failure(code: u16) -> (u16, String) {
    (code, json!({"kind": "Status", "code": code, "message": "no", "reason": "no"}).to_string())
}

/// Waits until the watch has failed.
async fn informed(health: &Health) -> String {
    let failed = async {
        while health.warnings().is_empty() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    timeout(Duration::from_secs(60), failed).await.unwrap();
    health.warnings().concat()
}

fn decoded(object: Value) -> OwnPod {
    serde_json::from_value::<PodObject>(object).unwrap().into_pod().unwrap()
}

async fn changes(changes: &mut PodChanges, count: usize) -> Vec<PodUid> {
    let mut all = Vec::new();
    while all.len() < count {
        all.push(timeout(Duration::from_secs(60), changes.next()).await.unwrap());
    }
    assert_eq!(changes.next().now_or_never(), None, "nothing more changed");
    all
}

#[test]
fn only_what_is_used_of_a_pod_is_decoded() {
    let owner = |kind: &str, controller| {
        json!({"apiVersion": "kubevirt.io/v1", "kind": kind, "name": "vm1",
        "uid": format!("uid-{kind}"), "controller": controller})
    };
    let owners = [owner("Other", Value::Null), owner("VirtualMachineInstance", json!(true))];
    let changes = json!({"/metadata/ownerReferences": owners,
        "/metadata/creationTimestamp": "2026-01-02T00:00:00Z"});
    let object: PodObject = serde_json::from_value(pod("a", "1", &changes)).unwrap();
    assert_eq!(object.metadata.managed_fields, None);
    let decoded = object.into_pod().unwrap();
    let annotations = [("k8s.v1.cni.cncf.io/networks", "blue"), ("patchbay.dev/x", "1")];
    let expected = OwnPod {
        uid: "a".to_owned(),
        namespace: "ns".to_owned(),
        name: "pod-a".to_owned(),
        phase: PodPhase::Running,
        created: "2026-01-02T00:00:00Z".parse().unwrap(),
        deleted: None,
        controller: Some(OwnerRef {
            kind: OwnerKind::VirtualMachineInstance,
            name: "vm1".into(),
            uid: "uid-VirtualMachineInstance".to_owned(),
        }),
        host_network: false,
        multus_host_paths: Vec::new(),
        annotations: annotations.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
        labels: BTreeMap::from([("app".to_owned(), "x".to_owned())]),
    };
    assert_eq!(decoded, expected);
    assert_eq!((decoded.networks(), decoded.network_status()), (Some("blue"), None));
    assert_eq!(decoded.runtime_uid(), "a");
    assert_eq!((decoded.label("app"), decoded.is_virt_launcher()), (Some("x"), false));
}

#[test]
fn unusual_pods_are_decoded() {
    let object = json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u"}});
    assert_eq!(decoded(object).phase, PodPhase::Unknown);
    let changes = json!({
        "/status/phase": "Dreaming", "/spec/hostNetwork": true,
        "/metadata/deletionTimestamp": "2026-01-01T00:00:00Z",
        "/metadata/annotations": {
            "k8s.v1.cni.cncf.io/network-status": "[]", "kubernetes.io/config.hash": "static",
            "kubernetes.io/config.mirror": "static", "network.patchbay.dev/y": "", "notpatchbay.dev/z": "", "patchbay.dev.example/z": "",
        },
    });
    let unusual = decoded(pod("a", "1", &changes));
    assert_eq!((unusual.phase, unusual.host_network), (PodPhase::Unknown, true));
    assert_eq!(unusual.deleted, Some("2026-01-01T00:00:00Z".parse().unwrap()));
    assert_eq!((unusual.network_status(), unusual.runtime_uid()), (Some("[]"), "static"));
    assert_eq!(unusual.annotations.len(), 4, "{:?}", unusual.annotations);
    let changes = json!({"/metadata/annotations": {"kubernetes.io/config.hash": "static"}});
    assert_eq!(decoded(pod("a", "1", &changes)).runtime_uid(), "a");
    let machine = decoded(pod("a", "1", &json!({"/metadata/labels": {"kubevirt.io": "virt-launcher"}})));
    assert!(machine.is_virt_launcher());
    let without_uid = serde_json::from_value::<PodObject>(json!({"metadata": {"name": "p"}})).unwrap();
    assert_eq!(without_uid.into_pod(), None);
}

#[test]
fn the_mounts_of_a_pod_are_kept_only_if_a_container_names_multus() {
    let volumes = json!([
        {"name": "cni", "hostPath": {"path": "/etc/cni/net.d", "type": ""}}, {"name": "config", "configMap": {"name": "c"}},
    ]);
    let paths = |containers: Value, init_containers: Value| {
        let changes = json!({
            "/spec/containers": containers, "/spec/initContainers": init_containers, "/spec/volumes": volumes,
        });
        decoded(pod("a", "1", &changes)).multus_host_paths
    };
    let plain = || json!([{"name": "c", "image": "example/app:1"}]);
    for named in [
        json!([{"name": "kube-multus", "image": "i"}]),
        json!([{"name": "c", "image": "ghcr.io/k8snetworkplumbingwg/multus-cni:v4"}]),
        json!([{"name": "c", "image": "i", "command": ["/usr/src/Multus-CNI/bin/daemon"]}]),
        json!([{"name": "c", "image": "i", "args": ["-t", "multus"]}]),
    ] {
        assert_eq!(paths(named.clone(), Value::Null), ["/etc/cni/net.d"], "{named}");
        assert_eq!(paths(plain(), named), ["/etc/cni/net.d"]);
    }
    assert!(paths(plain(), plain()).is_empty());
}

#[tokio::test(start_paused = true)]
async fn nothing_is_requested_before_a_consumer_subscribes() {
    let (client, mut server) = server();
    let (pods, watch) = own_pods(client, "node-1", Arc::new(Health::new()));
    let stop = CancellationToken::new();
    let mut tasks = JoinSet::new();
    tasks.spawn(watch.run(stop.clone()));
    assert!(timeout(Duration::from_secs(3600), server.requests.recv()).await.is_err());
    let _changes = pods.subscribe();
    let request = timeout(Duration::from_secs(1), server.requests.recv()).await.unwrap().unwrap();
    assert!(request.starts_with("/api/v1/pods?"), "{request}");
    assert!(request.contains("fieldSelector=spec.nodeName%3Dnode-1"), "{request}");
    stop.cancel();
    tasks.join_next().await.unwrap().unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_watch_without_consumers_ends_on_stop_only() {
    let (client, _server) = server();
    let (pods, watch) = own_pods(client, "node-1", Arc::new(Health::new()));
    drop(pods);
    let stop = CancellationToken::new();
    let mut tasks = JoinSet::new();
    tasks.spawn(watch.run(stop.clone()));
    assert!(timeout(Duration::from_secs(60), tasks.join_next()).await.is_err());
    stop.cancel();
    tasks.join_next().await.unwrap().unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn consumers_see_each_changed_pod_once_and_share_the_snapshot() {
    let (client, server) = server();
    let (pods, watch) = own_pods(client, "node-1", Arc::new(Health::new()));
    let mut tasks = JoinSet::new();
    tasks.spawn(watch.run(CancellationToken::new()));
    let mut first = pods.subscribe();
    assert_eq!((pods.snapshot(), pods.get("a")), (None, None));
    server.replies.send(list("1", &[pod("a", "1", &json!({})), pod("b", "1", &json!({}))])).unwrap();
    assert_eq!(changes(&mut first, 2).await, ["a", "b"]);
    assert_eq!(pods.snapshot().unwrap().len(), 2);

    // A late consumer gets what exists; a dropped one is forgotten.
    let mut second = pods.subscribe();
    drop(pods.subscribe());
    assert_eq!(changes(&mut second, 2).await, ["a", "b"]);
    let replies = events(&[
        ("MODIFIED", pod("b", "2", &json!({"/status/podIP": "10.0.0.2"}))),
        ("ADDED", pod("c", "3", &json!({}))),
        ("MODIFIED", pod("c", "4", &json!({"/status/phase": "Failed"}))),
        ("DELETED", pod("a", "5", &json!({}))),
    ]);
    server.replies.send(replies).unwrap();
    for consumer in [&mut first, &mut second] {
        // Pod b changed in nothing that is used.
        let mut seen = BTreeSet::new();
        while seen.len() < 2 || pods.get("a").is_some() {
            seen.insert(timeout(Duration::from_secs(60), consumer.next()).await.unwrap());
        }
        assert_eq!(seen, BTreeSet::from(["a".to_owned(), "c".to_owned()]));
    }
    assert_eq!(pods.get("c").unwrap().phase, PodPhase::Failed);
    assert_eq!(pods.snapshot().unwrap().keys().collect::<Vec<_>>(), ["b", "c"]);
    assert_eq!(pods.lock().subscribers.len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_failed_watch_informs_and_the_next_list_reports_what_was_missed() {
    let (client, server) = server();
    let health = Arc::new(Health::new());
    let ready = health.problem();
    let (pods, watch) = own_pods(client, "node-1", Arc::clone(&health));
    let mut tasks = JoinSet::new();
    tasks.spawn(watch.run(CancellationToken::new()));
    let mut consumer = pods.subscribe();
    server.replies.send(list("1", &["a", "b", "c"].map(|uid| pod(uid, "1", &json!({}))))).unwrap();
    assert_eq!(changes(&mut consumer, 3).await, ["a", "b", "c"]);

    server.replies.send(failure(500)).unwrap();
    let warning = informed(&health).await;
    assert!(warning.starts_with("watch the pods of this node: "), "{warning}");
    assert_eq!(health.problem(), ready, "readiness does not depend on it");
    assert_eq!(pods.snapshot().unwrap().len(), 3, "the last state stays");

    let deleted = json!({"/metadata/deletionTimestamp": "2026-01-01T00:00:00Z"});
    server.replies.send(list("9", &[pod("a", "1", &json!({})), pod("c", "8", &deleted)])).unwrap();
    assert_eq!(changes(&mut consumer, 2).await, ["b", "c"]);
    assert_eq!((pods.get("b"), pods.get("c").unwrap().deleted.is_some()), (None, true));
    assert_eq!(health.warnings(), [] as [String; 0]);

    // After an overload the watch resumes. The list that checks its version is not used.
    server.replies.send(failure(503)).unwrap();
    informed(&health).await;
    server.replies.send(list("9", &[])).unwrap();
    server.replies.send(events(&[("DELETED", pod("a", "10", &json!({})))])).unwrap();
    assert_eq!(changes(&mut consumer, 1).await, ["a"]);
    assert_eq!(health.warnings(), [] as [String; 0]);
}
