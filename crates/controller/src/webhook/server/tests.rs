mod flood;

use std::net::IpAddr;

use api::names::{MUTATE_POD, VALIDATE_NODENETWORKS};
use axum::{
    body::{Body, to_bytes},
    http::{self, Request},
};
use plan::{claims::ObjectKey, network::NodeState};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tower::ServiceExt;

use super::*;
use crate::{
    cache::{CacheSource, claims::project},
    webhook::slots::{Slot, Source},
};

/// A cache that holds one Node.
fn cluster() -> ClusterCache {
    let cluster = ClusterCache::new();
    let node = NodeState { uid: "n-1".to_owned(), labels: [].into(), not_ready_reason: None };
    cluster.update(CacheSource::Nodes, |state| state.nodes.insert("worker-1".to_owned(), node));
    cluster
}

/// A client whose requests are never answered.
pub fn unreachable_client() -> Client {
    let service = tower::service_fn(async |_: Request<kube::client::Body>| {
        std::future::pending::<Result<http::Response<kube::client::Body>, kube::Error>>().await
    });
    Client::new(service, "ns")
}

/// The state of a synced replica whose cache holds one Node.
fn state() -> Arc<WebhookState> {
    let readiness = Arc::new(Readiness::default());
    readiness.set_synced();
    Arc::new(WebhookState::new(
        readiness,
        Arc::default(),
        cluster(),
        unreachable_client(),
        ClaimOptions::default(),
    ))
}

async fn send(router: Router, request: Request<Body>) -> (StatusCode, String) {
    let response = router.oneshot(request).await.unwrap();
    let status = response.status();
    let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
    (status, String::from_utf8(body.to_vec()).unwrap())
}

async fn fetch(router: Router, path: &str) -> (StatusCode, String) {
    send(router, Request::get(path).body(Body::empty()).unwrap()).await
}

async fn post(state: &Arc<WebhookState>, body: impl Into<Body>) -> (StatusCode, String) {
    let request = Request::post(VALIDATE_NODENETWORKS).header("content-type", "application/json");
    send(router(state.clone()), request.body(body.into()).unwrap()).await
}

fn review(operation: &str, name: &str) -> Value {
    let object = json!({
        "apiVersion": "patchbay.dev/v1alpha1",
        "kind": "NodeNetwork",
        "metadata": {"name": name},
    });
    json!({
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "u-1",
            "kind": {"group": "patchbay.dev", "version": "v1alpha1", "kind": "NodeNetwork"},
            "resource": {"group": "patchbay.dev", "version": "v1alpha1", "resource": "nodenetworks"},
            "name": name,
            "operation": operation,
            "userInfo": {"username": "user"},
            "object": if operation == "DELETE" { Value::Null } else { object.clone() },
            "oldObject": if operation == "CREATE" { Value::Null } else { object },
        },
    })
}

async fn validate(state: &Arc<WebhookState>, review: &Value) -> Value {
    let (status, body) = post(state, review.to_string()).await;
    assert_eq!(status, StatusCode::OK, "{body}");
    let response: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(
        (&response["apiVersion"], &response["kind"]),
        (&json!("admission.k8s.io/v1"), &json!("AdmissionReview"))
    );
    assert_eq!(response["response"]["uid"], "u-1");
    response["response"].clone()
}

#[tokio::test]
async fn healthz_is_ok_from_the_start_and_readyz_reports_what_is_missing() {
    let readiness = Arc::new(Readiness::default());
    let router = || health_router(readiness.clone());
    assert_eq!(fetch(router(), "/healthz").await, (StatusCode::OK, "ok\n".to_owned()));
    let unready = |reason: &str| (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n"));
    assert_eq!(fetch(router(), "/readyz").await, unready("caches not synced"));
    readiness.set_synced();
    assert_eq!(fetch(router(), "/readyz").await, unready("no webhook certificate loaded"));
    readiness.set_certificate_loaded();
    assert_eq!(fetch(router(), "/readyz").await, (StatusCode::OK, "ok\n".to_owned()));
    readiness.set_draining();
    assert_eq!(fetch(router(), "/readyz").await, unready("shutting down"));
    assert_eq!(fetch(router(), "/healthz").await.0, StatusCode::OK);
}

#[tokio::test]
async fn the_plain_listener_serves_health_and_nothing_else() {
    let router = health_router(Arc::default());
    for path in ["/metrics", VALIDATE_NODENETWORKS, "/"] {
        assert_eq!(fetch(router.clone(), path).await.0, StatusCode::NOT_FOUND);
    }
}

#[tokio::test]
async fn a_nodenetwork_is_admitted_only_if_its_node_exists() {
    let state = state();
    assert_eq!(validate(&state, &review("CREATE", "worker-1")).await["allowed"], true);
    let denied = validate(&state, &review("CREATE", "missing")).await;
    assert_eq!((&denied["allowed"], &denied["status"]["code"]), (&json!(false), &json!(403)));
    let message = denied["status"]["message"].as_str().unwrap();
    assert!(message.starts_with("Node \"missing\" does not exist"), "{message}");
}

#[tokio::test]
async fn updates_and_deletes_of_a_nodenetwork_are_always_allowed() {
    let state = state();
    for operation in ["UPDATE", "DELETE", "CONNECT"] {
        assert_eq!(validate(&state, &review(operation, "missing")).await["allowed"], true, "{operation}");
    }
}

#[tokio::test]
async fn a_generated_name_is_read_from_the_object() {
    let mut review = review("CREATE", "worker-1");
    review["request"]["name"] = json!("");
    assert_eq!(validate(&state(), &review).await["allowed"], true);
    review["request"]["object"]["metadata"] = json!({});
    assert_eq!(validate(&state(), &review).await["allowed"], false);
}

#[tokio::test]
async fn malformed_bodies_are_rejected_and_the_next_request_succeeds() {
    let state = state();
    let mut without = review("CREATE", "x");
    without["request"] = Value::Null;
    let mut pods = review("CREATE", "x");
    pods["request"]["resource"] = json!({"group": "", "version": "v1", "resource": "pods"});
    let mut old = review("CREATE", "x");
    old["apiVersion"] = json!("admission.k8s.io/v1beta1");
    let mut unknown = review("CREATE", "x");
    unknown["request"]["operation"] = json!("EXPLODE");
    let mut list = review("CREATE", "x");
    list["request"]["object"] = json!([1, 2, 3]);
    let mut long_uid = review("CREATE", "x");
    long_uid["request"]["uid"] = json!("u".repeat(65));
    let bodies = [
        Vec::new(),
        b"{".to_vec(),
        b"null".to_vec(),
        b"\xff\xfe\x00".to_vec(),
        "[".repeat(100_000).into_bytes(),
        without.to_string().into_bytes(),
        pods.to_string().into_bytes(),
        old.to_string().into_bytes(),
        unknown.to_string().into_bytes(),
        list.to_string().into_bytes(),
        long_uid.to_string().into_bytes(),
    ];
    for body in bodies {
        let shown = String::from_utf8_lossy(&body[..body.len().min(60)]).into_owned();
        assert_eq!(post(&state, body).await.0, StatusCode::BAD_REQUEST, "{shown}");
    }
    let huge = vec![b' '; 3 * 1024 * 1024 + 1];
    assert_eq!(post(&state, huge).await.0, StatusCode::PAYLOAD_TOO_LARGE);
    assert_eq!(validate(&state, &review("CREATE", "worker-1")).await["allowed"], true);
}

fn stalled_body() -> Body {
    Body::from_stream(futures::stream::pending::<io::Result<Vec<u8>>>())
}

#[tokio::test(start_paused = true)]
async fn a_body_that_never_ends_times_out() {
    assert_eq!(post(&state(), stalled_body()).await.0, StatusCode::REQUEST_TIMEOUT);
}

#[tokio::test(start_paused = true)]
async fn a_slow_body_gives_way_to_another_request_of_its_source() {
    let state = state();
    let mut slow = tokio::task::JoinSet::new();
    for _ in 0..admission::MAX_CONCURRENT_BODIES {
        let state = state.clone();
        slow.spawn(async move { post(&state, stalled_body()).await.0 });
    }
    while state.bodies.held() < admission::MAX_CONCURRENT_BODIES {
        tokio::task::yield_now().await;
    }
    let start = Instant::now();
    assert_eq!(validate(&state, &review("CREATE", "worker-1")).await["allowed"], true);
    assert_eq!(start.elapsed().as_secs(), 1);
    assert_eq!(slow.join_all().await, [StatusCode::REQUEST_TIMEOUT; admission::MAX_CONCURRENT_BODIES]);
}

#[tokio::test(start_paused = true)]
async fn a_request_above_the_concurrency_limit_is_asked_to_retry() {
    let state = state();
    let source = Source::new([10, 0, 0, 1].into());
    let take = |_| state.bodies.try_take(&source).filter(Slot::settle).unwrap();
    let validated: Vec<Slot> = (0..admission::MAX_CONCURRENT_BODIES).map(take).collect();
    let start = Instant::now();
    let (status, _) = post(&state, review("CREATE", "worker-1").to_string()).await;
    assert_eq!((status, start.elapsed().as_secs()), (StatusCode::SERVICE_UNAVAILABLE, 2));
    drop(validated);
    assert_eq!(validate(&state, &review("CREATE", "worker-1")).await["allowed"], true);
}

#[tokio::test]
async fn request_text_is_truncated_in_messages() {
    let long = "ä".repeat(100_000);
    let denied = validate(&state(), &review("CREATE", &long)).await;
    assert!(denied["status"]["message"].as_str().unwrap().chars().count() < 400);
    let edits: [fn(&mut Value, &str); 3] = [
        |review, long| review["apiVersion"] = json!(long),
        |review, long| review["request"]["resource"]["resource"] = json!(long),
        |review, long| review["request"]["operation"] = json!(long),
    ];
    for edit in edits {
        let mut review = review("CREATE", "worker-1");
        edit(&mut review, &long);
        let (status, text) = post(&state(), review.to_string()).await;
        assert_eq!(status, StatusCode::BAD_REQUEST);
        assert!(text.chars().count() < 300, "{} characters", text.len());
    }
}

#[tokio::test]
async fn the_plain_listener_speaks_http_1_only() {
    let listener = listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    let addr = listener.local_addr().unwrap();
    let request = async {
        let mut stream = tokio::net::TcpStream::connect(addr).await.unwrap();
        stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
        let mut response = [0; 9];
        let read = stream.read(&mut response).await.unwrap();
        String::from_utf8_lossy(&response[..read]).into_owned()
    };
    // HTTP/2 would start with a SETTINGS frame.
    tokio::select! {
        served = serve_plain(listener, health_router(Arc::default()), Handle::new()) => served.unwrap(),
        response = request => assert!(response.is_empty() || response.starts_with("HTTP/1.1"), "{response:?}"),
    }
}

#[tokio::test]
async fn a_shutdown_before_the_listener_serves_is_not_lost() {
    let listener = listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    let handle = Handle::new();
    handle.graceful_shutdown(Some(Duration::from_secs(3)));
    let serve = serve_plain(listener, health_router(Arc::default()), handle);
    tokio::time::timeout(Duration::from_secs(2), serve).await.unwrap().unwrap();
}

#[tokio::test]
async fn no_request_is_validated_before_the_caches_have_synced() {
    let state = Arc::new(WebhookState::new(
        Arc::default(),
        Arc::default(),
        cluster(),
        unreachable_client(),
        ClaimOptions::default(),
    ));
    let (status, _) = post(&state, review("CREATE", "worker-1").to_string()).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
}

#[tokio::test]
async fn admission_accepts_only_post() {
    assert_eq!(fetch(router(state()), VALIDATE_NODENETWORKS).await.0, StatusCode::METHOD_NOT_ALLOWED);
}

/// Every pod may read them, and the controller looks at all claims to count them.
#[tokio::test(start_paused = true)]
async fn claims_are_counted_at_most_once_a_second_however_often_metrics_are_read() {
    let state = state();
    let pending = async || {
        let (_, text) = fetch(router(state.clone()), "/metrics").await;
        let line =
            text.lines().find_map(|line| line.strip_prefix("patchbay_ipam_claims{state=\"Pending\"} "));
        line.unwrap().to_owned()
    };
    assert_eq!(pending().await, "0");
    let claim = serde_json::from_value(json!({
        "metadata": {"namespace": "ns", "name": "c", "uid": "c", "resourceVersion": "1"},
        "spec": {"network": "blue", "interface": "net1"},
    }));
    state.cluster.claims().set_claim(&ObjectKey::new("ns", "c"), project::claim(claim.unwrap()));
    assert_eq!(pending().await, "0");
    tokio::time::advance(CLAIM_COUNT_INTERVAL).await;
    assert_eq!(pending().await, "1");
}

#[tokio::test]
async fn metrics_count_requests_by_path_and_result() {
    let state = state();
    validate(&state, &review("CREATE", "worker-1")).await;
    validate(&state, &review("CREATE", "missing")).await;
    validate(&state, &review("CREATE", "missing")).await;
    post(&state, "junk").await;
    state.metrics.leads(true);
    state.metrics.api_error(crate::metrics::ApiCallKind::Lease);
    let (status, text) = fetch(router(state), "/metrics").await;
    assert_eq!(status, StatusCode::OK);
    for line in [
        "patchbay_leader 1",
        "patchbay_webhook_certificate_expiry_timestamp_seconds 0",
        "patchbay_api_errors_total{call=\"Lease\"} 1",
        "patchbay_admission_requests_total{path=\"ValidateNodeNetworks\",result=\"Allowed\"} 1",
        "patchbay_admission_requests_total{path=\"ValidateNodeNetworks\",result=\"Denied\"} 2",
        "patchbay_admission_requests_total{path=\"ValidateNodeNetworks\",result=\"Malformed\"} 1",
    ] {
        assert!(text.lines().any(|it| it == line), "{line} is missing in\n{text}");
    }
}
