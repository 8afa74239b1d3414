use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
};

use client::{
    events::{EventLimits, EventSender, EventSource, Repeats},
    request::{ApiCall, DEFAULT_TIMEOUT},
};
use http::{Request, Response};
use kube::{Client, client::Body};
use serde_json::{Value, json};
use tokio::{task::JoinSet, time::timeout};

use super::*;

/// Events that the API server has got.
type Sent = Arc<Mutex<Vec<(String, Value)>>>;

struct Bench {
    pods: OwnPods,
    state: watch::Receiver<PeerState>,
    sent: Sent,
    _tasks: JoinSet<()>,
}

fn recorder() -> (EventRecorder, EventSender, Sent) {
    let sent = Sent::default();
    let recorded = Arc::clone(&sent);
    let service = tower::service_fn(move |request: Request<Body>| {
        let recorded = Arc::clone(&recorded);
        async move {
            let (parts, body) = request.into_parts();
            let body = body.collect_bytes().await.unwrap();
            let event = serde_json::from_slice(&body).unwrap();
            recorded.lock().unwrap().push((parts.uri.path().to_owned(), event));
            let text = r#"{"metadata":{"name":"e"},"eventTime":null}"#;
            Ok::<_, Infallible>(
                Response::builder().status(201).body(Body::from(text.as_bytes().to_vec())).unwrap(),
            )
        }
    });
    let source = EventSource {
        controller: "patchbay-node",
        instance: "node-1".to_owned(),
        window: Duration::from_secs(300),
        repeats: Repeats::Separate,
        limits: EventLimits::default(),
    };
    let call = ApiCall::new(DEFAULT_TIMEOUT, || ());
    let (recorder, sender) = events::recorder(Client::new(service, "default"), source, call);
    (recorder, sender, sent)
}

fn start(namespaces: &[&str]) -> Bench {
    let pods = OwnPods::unlisted();
    let (recorder, sender, sent) = recorder();
    let namespaces = namespaces.iter().copied().map(str::to_owned).collect();
    let (peers, state) = peers(pods.clone(), namespaces, "node-1", recorder);
    let mut tasks = JoinSet::new();
    tasks.spawn(sender.run(CancellationToken::new()));
    tasks.spawn(async move { peers.run(CancellationToken::new()).await.unwrap() });
    Bench { pods, state, sent, _tasks: tasks }
}

fn pod(namespace: &str, app: &str, phase: &str) -> Value {
    json!({
        "metadata": {"name": "p", "namespace": namespace, "uid": format!("{namespace}-{app}"), "labels": {"app": app}},
        "status": {"phase": phase},
    })
}

impl Bench {
    /// Waits for a state, and returns after how long it came.
    async fn reaches(&mut self, expected: PeerState) -> Duration {
        let start = Instant::now();
        timeout(Duration::from_secs(60), self.state.wait_for(|state| *state == expected))
            .await
            .unwrap()
            .unwrap();
        start.elapsed()
    }

    async fn reasons(&self) -> Vec<String> {
        // Lets the sender run.
        tokio::time::sleep(Duration::from_secs(1)).await;
        let sent = self.sent.lock().unwrap();
        sent.iter().map(|(_, event)| event["reason"].as_str().unwrap().to_owned()).collect()
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_is_plugged_before_the_pods_are_known() {
    let mut bench = start(&[]);
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(*bench.state.borrow(), PeerState::Unknown);
    bench.pods.list(vec![pod("default", "web", "Running")]);
    let waited = bench.reaches(PeerState::Absent).await;
    assert!(waited < Duration::from_secs(1), "a node without the controller need not wait: {waited:?}");
    assert_eq!(bench.reasons().await, [] as [String; 0]);
}

#[tokio::test(start_paused = true)]
async fn hotplug_resumes_five_seconds_after_the_controller_left() {
    let mut bench = start(&[]);
    let peer = pod("kube-system", PEER_APP, "Running");
    bench.pods.list(vec![peer.clone()]);
    bench.reaches(PeerState::Present).await;
    bench.pods.list(vec![]);
    tokio::time::sleep(Duration::from_secs(4)).await;
    // It comes back in time: the delay starts again.
    bench.pods.list(vec![peer]);
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(*bench.state.borrow(), PeerState::Present);
    bench.pods.list(vec![pod("default", "web", "Running")]);
    let waited = bench.reaches(PeerState::Absent).await;
    assert!(waited >= RESUME_DELAY && waited < RESUME_DELAY + Duration::from_secs(1), "{waited:?}");

    assert_eq!(bench.reasons().await, ["HotplugStandDown", "HotplugResumed"]);
    let sent = bench.sent.lock().unwrap();
    let (path, event) = &sent[0];
    assert!(path.contains("/namespaces/default/events"), "{path}");
    assert_eq!(
        (&event["regarding"]["kind"], &event["regarding"]["name"]),
        (&json!("Node"), &json!("node-1"))
    );
    assert_eq!(event["type"], "Warning");
    let note = event["note"].as_str().unwrap();
    assert!(note.contains("kube-system/p") && note.contains("delete its DaemonSet"), "{note}");
}

#[tokio::test(start_paused = true)]
async fn only_a_running_pod_in_a_trusted_namespace_counts() {
    for (namespace, phase, expected) in [
        ("kube-system", "Running", PeerState::Present),
        ("kube-system", "Pending", PeerState::Present),
        ("kube-system", "Succeeded", PeerState::Absent),
        ("kube-system", "Failed", PeerState::Absent),
        ("net", "Running", PeerState::Present),
        ("tenant", "Running", PeerState::Absent),
    ] {
        let mut bench = start(&["net"]);
        bench.pods.list(vec![pod(namespace, PEER_APP, phase)]);
        bench.reaches(expected).await;
    }
    let mut bench = start(&[]);
    bench.pods.list(vec![pod("kube-system", "multus", "Running")]);
    bench.reaches(PeerState::Absent).await;
}
