//! Validation of networks and their users, and the answers of validating and mutating handlers.

mod claims;

use axum::{
    body::{Body, to_bytes},
    http,
};
use futures::FutureExt as _;
use jiff::Timestamp;
use plan::{
    network::{ClusterState, NetworkState, NodeState},
    users::{UserIndex, WorkloadRefs},
};
use serde_json::{Map, Value, json};
use tower::ServiceExt;

use super::*;
use crate::webhook::server::tests::unreachable_client;

fn network(name: &str, spec: &Value, deleting: bool) -> NetworkState {
    NetworkState {
        name: name.to_owned(),
        uid: format!("uid-{name}"),
        version: "1".to_owned(),
        generation: 1,
        created: Timestamp::UNIX_EPOCH,
        deleting: deleting.then_some(Timestamp::UNIX_EPOCH),
        finalizers: vec![api::bridgenetwork::FINALIZER_USERS.to_owned()],
        spec: Ok(serde_json::from_value(spec.clone()).unwrap()),
        status: serde_json::from_value(json!({"mtu": 1500})).unwrap(),
    }
}

/// One node, the network `blue`, and the network `old` that is being deleted.
fn cluster() -> ClusterState {
    let attachment = json!({"bridge": "br-blue", "attachment": {"namespaces": ["ns"]}});
    let networks = [
        network("blue", &attachment, false),
        network("old", &json!({"attachment": {"namespaces": ["ns"]}}), true),
    ];
    ClusterState {
        networks: networks.map(|network| (network.name.clone(), network)).into(),
        nodes: [(
            "n".to_owned(),
            NodeState { uid: "n".to_owned(), labels: [].into(), not_ready_reason: None },
        )]
        .into(),
        nads: Some([].into()),
        ..ClusterState::default()
    }
}

fn map(value: Value) -> Map<String, Value> {
    serde_json::from_value(value).unwrap()
}

fn bridge(name: &str, spec: &Value, old: Option<&Value>) -> AdmissionDecision {
    let object = map(json!({"metadata": {"name": name}, "spec": spec}));
    let old = old.map(|spec| map(json!({"metadata": {"name": name}, "spec": spec})));
    network::validate(&cluster(), &UserIndex::default(), name, Some(&object), old.as_ref())
}

fn assert_denied(decision: &AdmissionDecision, text: &str) {
    assert!(matches!(decision, AdmissionDecision::Deny(message) if message.contains(text)), "{decision:?}");
}

#[test]
fn a_conflicting_network_is_denied_unless_it_shares_no_node() {
    assert_denied(&bridge("red", &json!({"bridge": "br-blue"}), None), "belongs to BridgeNetwork blue");
    let elsewhere = json!({"bridge": "br-blue", "nodeSelector": {"matchLabels": {"no": "such"}}});
    assert_eq!(bridge("red", &elsewhere, None), AdmissionDecision::Allow);
    let same = json!({"attachment": {"name": "blue", "namespaces": ["other", "ns"]}});
    assert_denied(
        &bridge("red", &same, None),
        "BridgeNetwork blue already manages NetworkAttachmentDefinition ns/blue",
    );
}

#[test]
fn an_update_without_a_spec_change_or_during_deletion_is_never_denied() {
    let conflict = json!({"bridge": "br-blue"});
    assert_eq!(bridge("red", &conflict, Some(&conflict)), AdmissionDecision::Allow);
    assert_denied(&bridge("red", &conflict, Some(&json!({}))), "belongs to");
    let deleting = map(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}, "spec": conflict}));
    assert_eq!(
        network::validate(&cluster(), &UserIndex::default(), "red", Some(&deleting), None),
        AdmissionDecision::Allow
    );
    for junk in [json!({"spec": 7}), json!({"spec": {"mtu": "x"}}), json!({})] {
        assert_eq!(
            network::validate(&cluster(), &UserIndex::default(), "red", Some(&map(junk)), None),
            AdmissionDecision::Allow
        );
    }
}

#[test]
fn the_mtu_of_a_network_with_users_can_only_be_raised() {
    let (cluster, mut users) = (cluster(), UserIndex::default());
    let validate = |users: &UserIndex, mtu: i32| {
        let object =
            map(json!({"spec": {"bridge": "br-blue", "mtu": mtu, "attachment": {"namespaces": ["ns"]}}}));
        let old = map(json!({"spec": {"bridge": "br-blue"}}));
        network::validate(&cluster, users, "blue", Some(&object), Some(&old))
    };
    assert_eq!(validate(&users, 1400), AdmissionDecision::Allow);
    users.apply(WorkloadKind::Pod, &pod("blue"));
    assert_denied(&validate(&users, 1400), "cannot be lowered from 1500 to 1400");
    assert_eq!(validate(&users, 9000), AdmissionDecision::Allow);
}

#[test]
fn an_update_is_not_denied_for_fields_that_it_does_not_change() {
    let spec = |selector: &str, namespaces: &[&str]| json!({"nodeSelector": {"matchLabels": {"zone": selector}}, "attachment": {"name": "blue", "namespaces": namespaces}});
    let old = spec("a", &["ns"]);
    assert_eq!(bridge("red", &spec("b", &["ns", "other"]), Some(&old)), AdmissionDecision::Allow);
    assert_denied(
        &bridge("red", &spec("b", &["ns"]), Some(&spec("a", &["other"]))),
        "already manages NetworkAttachmentDefinition",
    );
    let (cluster, mut users) = (cluster(), UserIndex::default());
    users.apply(WorkloadKind::Pod, &pod("blue"));
    let validate = |new: Value| {
        let old =
            map(json!({"spec": {"bridge": "br-blue", "mtu": 1400, "attachment": {"namespaces": ["ns"]}}}));
        network::validate(&cluster, &users, "blue", Some(&map(json!({"spec": new}))), Some(&old))
    };
    let more = json!({"bridge": "br-blue", "mtu": 1400, "attachment": {"namespaces": ["ns", "other"]}});
    assert_eq!(
        validate(more),
        AdmissionDecision::Allow,
        "users hold the MTU at 1500, and the update does not change it"
    );
    assert_denied(
        &validate(json!({"bridge": "br-blue", "mtu": 1300})),
        "cannot be lowered from 1500 to 1300",
    );
}

fn object(kind: WorkloadKind, value: Value) -> WorkloadRefs {
    user::workload_refs(kind, "ns", Some(&map(value)))
}

fn pod(networks: &str) -> WorkloadRefs {
    let annotations = json!({"k8s.v1.cni.cncf.io/networks": networks});
    object(WorkloadKind::Pod, json!({"metadata": {"name": "p", "annotations": annotations}, "spec": {}}))
}

fn validate_user(
    cluster: &ClusterState,
    kind: WorkloadKind,
    new: &WorkloadRefs,
    old: &WorkloadRefs,
) -> AdmissionDecision {
    validate_with(cluster, &UserIndex::default(), kind, new, old)
}

fn validate_with(
    cluster: &ClusterState,
    users: &UserIndex,
    kind: WorkloadKind,
    new: &WorkloadRefs,
    old: &WorkloadRefs,
) -> AdmissionDecision {
    user::validate(cluster, users, kind, new, &user::added_references(new, old))
}

fn no_refs() -> WorkloadRefs {
    user::workload_refs(WorkloadKind::Pod, "ns", None)
}

#[test]
fn a_new_reference_to_a_network_being_deleted_is_denied_for_every_kind() {
    let annotated = json!({"metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": "old"}}});
    let machine = json!({"networks": [{"multus": {"networkName": "ns/old"}}]});
    for kind in WorkloadKind::ALL {
        let value = match kind {
            WorkloadKind::Pod => json!({"metadata": annotated["metadata"]}),
            WorkloadKind::CronJob => json!({"spec": {"jobTemplate": {"spec": {"template": annotated}}}}),
            WorkloadKind::VirtualMachine => json!({"spec": {"template": {"spec": machine}}}),
            WorkloadKind::VirtualMachineInstance => json!({"spec": machine}),
            WorkloadKind::DaemonSet
            | WorkloadKind::Deployment
            | WorkloadKind::Job
            | WorkloadKind::ReplicaSet
            | WorkloadKind::StatefulSet => {
                json!({"spec": {"template": annotated}})
            }
        };
        let mut value = value;
        if value.get("metadata").is_none() {
            value["metadata"] = json!({"name": "x"});
        }
        assert_denied(
            &validate_user(&cluster(), kind, &object(kind, value), &no_refs()),
            "BridgeNetwork old, which is being deleted",
        );
    }
}

#[test]
fn existing_references_and_objects_of_existing_users_are_allowed() {
    let validate = |cluster: &ClusterState, new: &WorkloadRefs, old: &WorkloadRefs| {
        validate_user(cluster, WorkloadKind::Pod, new, old)
    };
    assert_eq!(validate(&cluster(), &pod("blue"), &no_refs()), AdmissionDecision::Allow);
    assert_eq!(validate(&cluster(), &pod("old"), &pod("blue,old")), AdmissionDecision::Allow);
    assert_denied(&validate(&cluster(), &pod("blue,old"), &pod("blue")), "ns/old");
    let owner = json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "set", "uid": "u", "controller": true}]);
    let owned = object(
        WorkloadKind::Pod,
        json!({"metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": "old"}, "ownerReferences": owner}}),
    );
    assert_denied(&validate(&cluster(), &owned, &no_refs()), "old");
    let mut users = UserIndex::default();
    let set = json!({"metadata": {"name": "set", "namespace": "ns"}, "spec": {"template": {"metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": "old"}}}}});
    users.apply(WorkloadKind::ReplicaSet, &object(WorkloadKind::ReplicaSet, set));
    let decision = validate_with(&cluster(), &users, WorkloadKind::Pod, &owned, &no_refs());
    assert_eq!(decision, AdmissionDecision::Allow);
}

#[test]
fn an_object_that_cannot_be_parsed_has_no_references() {
    for junk in
        [json!({"spec": 7}), json!({"metadata": 7}), json!({"metadata": {}, "spec": {"template": []}})]
    {
        for kind in WorkloadKind::ALL {
            let refs = object(kind, junk.clone());
            assert_eq!(
                validate_user(&cluster(), kind, &refs, &no_refs()),
                AdmissionDecision::Allow,
                "{junk}"
            );
        }
    }
}

#[test]
fn validation_time_does_not_depend_on_the_number_of_attachments() {
    let mut cluster = cluster();
    for number in 0..1000 {
        let name = format!("deleting-{number}");
        cluster.networks.insert(name.clone(), network(&name, &json!({}), true));
        let template = plan::network::NadState {
            uid: name.clone(),
            version: "1".to_owned(),
            deleting: false,
            network: Some(name.clone()),
            network_uid: Some(format!("uid-{name}")),
            origin: None,
            config: None,
            joins: None,
            network_config: Err("none".to_owned()),
        };
        let all = cluster.nads.as_mut().unwrap();
        for namespace in 0..10 {
            let at = api::selection::NadRef::new(format!("n{namespace}"), name.as_str());
            let origin = Some(api::nad::origin_digest(&format!("uid-{name}"), &at));
            all.insert(at, plan::network::NadState { origin, ..template.clone() });
        }
    }
    let unrelated = pod("blue");
    // The best of several runs, so that other load on the machine does not count.
    let best = (0..20).map(|_| {
        let start = Instant::now();
        assert_eq!(
            validate_user(&cluster, WorkloadKind::Pod, &unrelated, &no_refs()),
            AdmissionDecision::Allow
        );
        start.elapsed()
    });
    let best = best.min().unwrap();
    assert!(best.as_micros() < 2000, "{best:?}");
    assert_denied(
        &validate_user(&cluster, WorkloadKind::Pod, &pod("n7/deleting-7"), &no_refs()),
        "deleting-7",
    );
}

/// The body of the response to a request that creates the pod `p`, if every path has this handler.
async fn answer(handler_of: fn(WebhookPath) -> Handler) -> String {
    let state = Arc::new(WebhookState::new(
        Arc::default(),
        Arc::default(),
        crate::cache::ClusterCache::new(),
        unreachable_client(),
        plan::claims::ClaimOptions::default(),
    ));
    state.readiness.set_synced();
    let review = json!({
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "u-1",
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "operation": "CREATE",
            "userInfo": {},
            "object": {"metadata": {"name": "p"}},
        },
    });
    let request = http::Request::post(VALIDATE_USERS).body(Body::from(review.to_string())).unwrap();
    let response = routes(handler_of).with_state(state.clone()).oneshot(request).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
    let review: Value = serde_json::from_slice(&body).unwrap();
    let counted = if review["response"]["allowed"] == true { "Allowed" } else { "Denied" };
    let text = state.metrics.text().unwrap();
    assert!(text.contains(&format!("{{path=\"ValidateUsers\",result=\"{counted}\"}} 1")), "{text}");
    String::from_utf8(body.to_vec()).unwrap()
}

/// Labels an object with its own name.
fn label<'a>(
    _: &'a WebhookState,
    request: &'a ReviewedRequest,
    _: &'a Source,
) -> BoxFuture<'a, Result<MutationDecision, RequestError>> {
    let add = json!([{"op": "add", "path": "/metadata/labels", "value": {"name": request.name()}}]);
    mutation(MutationDecision::Patch(serde_json::from_value(add).unwrap()))
}

fn mutation<'a>(decision: MutationDecision) -> BoxFuture<'a, Result<MutationDecision, RequestError>> {
    std::future::ready(Ok(decision)).boxed()
}

#[tokio::test]
async fn the_patch_of_a_mutating_handler_is_sent_in_base64() {
    let body = answer(|_| Handler::Mutate(label)).await;
    // The base64 of [{"op":"add","path":"/metadata/labels","value":{"name":"p"}}].
    let encoded = "W3sib3AiOiJhZGQiLCJwYXRoIjoiL21ldGFkYXRhL2xhYmVscyIsInZhbHVlIjp7Im5hbWUiOiJwIn19XQ==";
    let review: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(
        review,
        json!({
            "apiVersion": "admission.k8s.io/v1",
            "kind": "AdmissionReview",
            "response": {"uid": "u-1", "allowed": true, "patchType": "JSONPatch", "patch": encoded},
        })
    );
    let ByteString(text) = serde_json::from_value(review["response"]["patch"].clone()).unwrap();
    let patch: Patch = serde_json::from_slice(&text).unwrap();
    let mut pod = json!({"metadata": {"name": "p"}});
    json_patch::patch(&mut pod, &patch).unwrap();
    assert_eq!(pod, json!({"metadata": {"name": "p", "labels": {"name": "p"}}}));
}

#[tokio::test]
async fn a_mutating_handler_without_changes_answers_as_a_validating_one() {
    let unchanged =
        answer(|_| Handler::Mutate(|_, _, _| mutation(MutationDecision::Patch(Patch::default())))).await;
    assert_eq!(unchanged, answer(|_| Handler::Validate(|_, _| AdmissionDecision::Allow)).await);
    assert_eq!(
        unchanged,
        r#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","response":{"allowed":true,"uid":"u-1"}}"#
    );
    let denied = answer(|_| Handler::Validate(|_, _| AdmissionDecision::Deny("no".to_owned()))).await;
    assert_eq!(
        denied,
        r#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","response":{"allowed":false,"status":{"code":403,"message":"no","reason":"Forbidden"},"uid":"u-1"}}"#
    );
    let invalid = |_| Handler::Mutate(|_, _, _| mutation(MutationDecision::Invalid("no".to_owned())));
    assert_eq!(
        answer(invalid).await,
        r#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","response":{"allowed":false,"status":{"code":400,"message":"no","reason":"BadRequest"},"uid":"u-1"}}"#
    );
}
