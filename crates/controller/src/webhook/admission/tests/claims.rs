//! AdmissionReviews in, patches and denials out: the webhooks of launcher pods and of references to IPAMClaims.

use std::{convert::Infallible, sync::Mutex};

use kube::{Client, core::Status};
use plan::claims::{ClaimOptions, ObjectKey};

use super::*;
use crate::cache::{
    ClusterCache,
    claims::project::{self as claims_project, ClaimObject, MachineObject},
    project as cache_project,
};
use crate::webhook::slots::FairSlots;

const NETWORKS: &str = "k8s.v1.cni.cncf.io/networks";
const VMI: &str = "/apis/kubevirt.io/v1/namespaces/ns/virtualmachineinstances/vm1";
const RED: &str = "/apis/k8s.cni.cncf.io/v1/namespaces/ns/network-attachment-definitions/red";

fn interface(network: &str) -> String {
    claims_project::pod_interface_name(network)
}

fn vm_owner() -> Value {
    json!([{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "vm1", "uid": "v", "controller": true}])
}

/// An instance whose networks are each on the NAD of the same name; `name=nad` names another NAD.
fn vmi(networks: &[&str]) -> Value {
    let networks = networks.iter().map(|text| text.split_once('=').unwrap_or((text, text)));
    let interfaces: Vec<Value> =
        networks.clone().map(|(name, _)| json!({"name": name, "bridge": {}})).collect();
    let multus: Vec<Value> =
        networks.map(|(name, nad)| json!({"name": name, "multus": {"networkName": nad}})).collect();
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"namespace": "ns", "name": "vm1", "uid": "i", "resourceVersion": "1", "ownerReferences": vm_owner()},
        "spec": {"domain": {"devices": {"interfaces": interfaces}}, "networks": multus},
        "status": {"phase": "Scheduling"},
    })
}

fn nad(name: &str) -> Value {
    let config = json!({
        "cniVersion": "1.0.0", "name": name, "type": "patchbay-bridge", "allowPersistentIPs": true,
        "ipam": {"type": "patchbay-ipam", "network": name},
    });
    json!({
        "apiVersion": "k8s.cni.cncf.io/v1",
        "kind": "NetworkAttachmentDefinition",
        "metadata": {"namespace": "ns", "name": name, "uid": format!("nad-{name}"), "resourceVersion": "1"},
        "spec": {"config": config.to_string()},
    })
}

/// A webhook with its cache, and an API server for what the cache does not have.
struct Webhook {
    state: Arc<WebhookState>,
    reads: Arc<Mutex<Vec<String>>>,
}

impl Webhook {
    /// The cache has NAD `blue`, the claim `vm1.blue` and, if given, the instance. The API server has these objects, by path.
    fn new(cached: Option<Value>, live: &[(&str, Value)]) -> Self {
        Self::with_options(cached, live, ClaimOptions::default())
    }

    fn with_options(cached: Option<Value>, live: &[(&str, Value)], options: ClaimOptions) -> Self {
        let reads = Arc::new(Mutex::new(Vec::new()));
        let cluster = ClusterCache::new();
        let (at, blue) = cache_project::nad(serde_json::from_value(nad("blue")).unwrap()).unwrap();
        cluster.update(CacheSource::Nads, |state| {
            state.nads = Some([(at, blue)].into());
            true
        });
        if let Some(vmi) = cached {
            let object: MachineObject = serde_json::from_value(vmi).unwrap();
            cluster.claims().set_vmi(&ObjectKey::new("ns", "vm1"), claims_project::vmi(&object));
        }
        let claim: ClaimObject = serde_json::from_value(json!({
            "metadata": {"namespace": "ns", "name": "vm1.blue", "uid": "c", "resourceVersion": "1",
                "ownerReferences": vm_owner(), "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {"network": "blue", "interface": interface("blue")},
            "status": {"ips": []},
        }))
        .unwrap();
        cluster.claims().set_claim(&ObjectKey::new("ns", "vm1.blue"), claims_project::claim(claim));
        let client = api_server(live, &reads);
        let state = WebhookState::new(Arc::default(), Arc::default(), cluster, client, options);
        state.readiness.set_synced();
        Self { state: Arc::new(state), reads }
    }

    fn with_client(self, client: Client) -> Self {
        let cluster = self.state.cluster.clone();
        let state = WebhookState::new(Arc::default(), Arc::default(), cluster, client, self.state.claims);
        state.readiness.set_synced();
        Self { state: Arc::new(state), ..self }
    }

    fn reads(&self) -> Vec<String> {
        std::mem::take(&mut self.reads.lock().unwrap())
    }

    /// The `response` of the AdmissionReview.
    async fn review(&self, path: &str, object: &Value, old: Option<&Value>) -> Value {
        let (code, body) = self.post(path, object, old).await;
        assert_eq!(code, StatusCode::OK, "{body}");
        serde_json::from_str::<Value>(&body).unwrap()["response"].take()
    }

    /// The code and the body of the response.
    async fn post(&self, path: &str, object: &Value, old: Option<&Value>) -> (StatusCode, String) {
        self.send(review_request(path, "ns", object, old)).await
    }

    async fn send(&self, request: http::Request<Body>) -> (StatusCode, String) {
        let response = router().with_state(Arc::clone(&self.state)).oneshot(request).await.unwrap();
        let code = response.status();
        let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
        (code, String::from_utf8(body.to_vec()).unwrap())
    }

    /// The networks annotation after the patch; `None` if there is no patch. Nothing else may change.
    async fn mutate(&self, pod: &Value, old: Option<&Value>) -> Option<String> {
        let response = self.review(MUTATE_POD, pod, old).await;
        assert_eq!(response["allowed"], true, "{response}");
        let ByteString(text) = serde_json::from_value(response.get("patch")?.clone()).unwrap();
        let patch: Patch = serde_json::from_slice(&text).unwrap();
        let mut patched = pod.clone();
        json_patch::patch(&mut patched, &patch).unwrap();
        let networks = patched["metadata"]["annotations"][NETWORKS].take();
        let mut expected = pod.clone();
        expected["metadata"]["annotations"][NETWORKS].take();
        assert_eq!(patched, expected, "only the annotation changes");
        networks.as_str().map(str::to_owned)
    }
}

/// The request of an API server about a pod in this namespace.
fn review_request(path: &str, namespace: &str, pod: &Value, old: Option<&Value>) -> http::Request<Body> {
    let review = json!({
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "u-1",
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "operation": if old.is_some() { "UPDATE" } else { "CREATE" },
            "namespace": namespace,
            "userInfo": {"username": "system:serviceaccount:kubevirt:kubevirt-controller"},
            "object": pod,
            "oldObject": old,
        },
    });
    http::Request::post(path).body(Body::from(review.to_string())).unwrap()
}

/// The same from a client with this address.
fn from_client(client: u8, mut request: http::Request<Body>) -> http::Request<Body> {
    request.extensions_mut().insert(ConnectInfo(SocketAddr::from(([10, 0, 0, client], 1))));
    request
}

/// An API server that never answers reads in other namespaces than `ns`.
fn hanging_elsewhere(live: &[(&str, Value)]) -> Client {
    let answers = api_server(live, &Arc::default());
    let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
        let client = answers.clone();
        async move {
            if !request.uri().path().contains("/namespaces/ns/") {
                std::future::pending::<()>().await;
            }
            client.send(request).await
        }
    });
    Client::new(service, "ns")
}

fn api_server(live: &[(&str, Value)], reads: &Arc<Mutex<Vec<String>>>) -> Client {
    let live: Vec<(String, Value)> =
        live.iter().map(|(path, object)| ((*path).to_owned(), object.clone())).collect();
    let reads = Arc::clone(reads);
    let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
        let path = request.uri().path().to_owned();
        reads.lock().unwrap().push(path.clone());
        let found = live.iter().find(|(at, _)| *at == path).map(|(_, object)| object.clone());
        async move {
            let (code, body) = match found {
                // A Status has the code of the response.
                Some(object) => {
                    (object["code"].as_u64().map_or(200, |code| code.try_into().unwrap()), object)
                }
                None => (404, json!(Status::failure("no", "NotFound").with_code(404))),
            };
            let response = http::Response::builder().status(code).body(Body::from(body.to_string()));
            Ok::<_, Infallible>(response.unwrap())
        }
    });
    Client::new(service, "ns")
}

fn launcher(networks: &str) -> Value {
    json!({
        "metadata": {
            "generateName": "virt-launcher-vm1-",
            "labels": {"kubevirt.io": "virt-launcher"},
            "annotations": {NETWORKS: networks, "kubevirt.io/domain": "vm1"},
            "ownerReferences": [{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": "vm1", "uid": "i", "controller": true}],
        },
        "spec": {"containers": [{"name": "compute"}]},
    })
}

/// The reference of each element.
fn references(text: &str) -> Vec<Value> {
    let elements: Vec<Value> = serde_json::from_str(text).unwrap();
    elements.iter().map(|element| element["ipam-claim-reference"].clone()).collect()
}

#[tokio::test]
async fn the_comma_form_becomes_json_with_a_reference() {
    let webhook = Webhook::new(Some(vmi(&["blue"])), &[]);
    let text = webhook.mutate(&launcher("ns/blue"), None).await.unwrap();
    let elements: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        elements,
        json!([{"name": "blue", "namespace": "ns", "ipam-claim-reference": "vm1.blue"}]),
        "{text}"
    );
    assert_eq!(webhook.reads(), [""; 0], "the cache has everything");
    assert_eq!(webhook.mutate(&launcher(&text), None).await, None, "a second call changes nothing");
}

#[tokio::test]
async fn all_other_bytes_of_json_elements_stay() {
    let webhook = Webhook::new(Some(vmi(&["blue"])), &[]);
    let interface = interface("blue");
    let element = format!(
        r#"{{ "name":"blue","namespace":"ns" , "interface":"{interface}","cni-args":{{"x":1.50,"y":"\u00e9"}},"x-unknown":[1, 2,3]"#
    );
    let text = webhook.mutate(&launcher(&format!("[{element}}}]")), None).await.unwrap();
    assert!(text.contains(&element), "{text}");
    assert_eq!(references(&text), ["vm1.blue"]);
}

#[tokio::test]
async fn two_elements_of_one_nad_get_their_own_claims() {
    let webhook = Webhook::new(Some(vmi(&["blue", "second=blue"])), &[]);
    let element = |network: &str| json!({"name": "blue", "namespace": "ns", "interface": interface(network)});
    let pod = launcher(&json!([element("blue"), element("second")]).to_string());
    let text = webhook.mutate(&pod, None).await.unwrap();
    assert_eq!(references(&text), ["vm1.blue", "vm1.second"]);
}

#[tokio::test]
async fn an_update_restores_the_references_that_kubevirt_drops() {
    let webhook = Webhook::new(Some(vmi(&["blue"])), &[]);
    let element = json!({"name": "blue", "namespace": "ns", "interface": interface("blue")});
    let mut referring = element.clone();
    referring["ipam-claim-reference"] = json!("vm1.blue");
    let old = launcher(&json!([referring]).to_string());
    let new = launcher(&json!([element]).to_string());
    let text = webhook.mutate(&new, Some(&old)).await.unwrap();
    assert_eq!(references(&text), ["vm1.blue"]);
    assert_eq!(webhook.mutate(&new, Some(&new)).await, None, "the annotation did not change");
}

#[tokio::test]
async fn an_annotation_that_cannot_be_parsed_is_a_bad_request() {
    let webhook = Webhook::new(Some(vmi(&["blue"])), &[]);
    for networks in ["[{\"name\": \"blue\"", "{\"name\": \"blue\"}"] {
        let response = webhook.review(MUTATE_POD, &launcher(networks), None).await;
        assert_eq!(response["allowed"], false, "{networks}");
        assert_eq!(response["status"]["code"], 400, "{networks}");
        let message = response["status"]["message"].as_str().unwrap();
        assert!(message.starts_with("failed to parse pod network selection elements: "), "{message}");
    }
}

#[tokio::test]
async fn a_nad_that_does_not_exist_affects_only_its_own_element() {
    let webhook = Webhook::new(Some(vmi(&["blue", "red"])), &[]);
    let text = webhook.mutate(&launcher("ns/red,ns/blue"), None).await.unwrap();
    assert_eq!(references(&text), [Value::Null, json!("vm1.blue")]);
    assert_eq!(webhook.reads(), [RED], "only the missing NAD is read");
}

/// A pod that started without its reference would have none until its machine restarts.
#[tokio::test]
async fn a_nad_that_cannot_be_read_is_a_server_error_with_the_cause() {
    let failure = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": "etcd has no leader", "reason": "InternalError", "code": 500});
    let webhook = Webhook::new(Some(vmi(&["red"])), &[(RED, failure)]);
    let (code, body) = webhook.post(MUTATE_POD, &launcher("ns/red"), None).await;
    assert_eq!(code, StatusCode::INTERNAL_SERVER_ERROR, "{body}");
    assert!(body.contains("ns/red") && body.contains("etcd has no leader"), "{body}");
}

#[tokio::test]
async fn an_ovn_nad_of_another_namespace_is_referenced_only_with_the_flag() {
    let path = "/apis/k8s.cni.cncf.io/v1/namespaces/other/network-attachment-definitions/ovn";
    let config = json!({"name": "tenant", "type": "ovn-k8s-cni-overlay", "allowPersistentIPs": true});
    let mut ovn = nad("ovn");
    (ovn["metadata"]["namespace"], ovn["spec"]["config"]) = (json!("other"), json!(config.to_string()));
    for reference_foreign_nads in [false, true] {
        let options = ClaimOptions { reference_foreign_nads, ..ClaimOptions::default() };
        let webhook = Webhook::with_options(Some(vmi(&["anet=other/ovn"])), &[(path, ovn.clone())], options);
        let text = webhook.mutate(&launcher("other/ovn"), None).await;
        let found = text.map(|text| references(&text));
        assert_eq!(found, reference_foreign_nads.then(|| vec![json!("vm1.anet")]));
    }
}

#[tokio::test]
async fn what_the_cache_does_not_have_is_read_from_the_api_server() {
    let webhook = Webhook::new(None, &[(VMI, vmi(&["red"])), (RED, nad("red"))]);
    let text = webhook.mutate(&launcher("ns/red"), None).await.unwrap();
    assert_eq!(references(&text), ["vm1.red"]);
    assert_eq!(webhook.reads(), [VMI, RED]);

    let plugged = Webhook::new(Some(vmi(&["blue"])), &[(VMI, vmi(&["blue", "red"])), (RED, nad("red"))]);
    let element = json!({"name": "red", "namespace": "ns", "interface": interface("red")});
    let text = plugged.mutate(&launcher(&json!([element]).to_string()), None).await.unwrap();
    assert_eq!(references(&text), ["vm1.red"], "plugged after the cache was filled");
}

/// It would start with addresses that no claim has. The cache alone does not refuse it.
#[tokio::test]
async fn a_launcher_whose_instance_does_not_exist_is_refused() {
    let mut later = vmi(&["blue"]);
    later["metadata"]["uid"] = json!("later");
    for (cached, live) in
        [(None, vec![]), (None, vec![(VMI, later.clone())]), (Some(later.clone()), vec![(VMI, later)])]
    {
        let webhook = Webhook::new(cached, &live);
        let response = webhook.review(MUTATE_POD, &launcher("ns/blue"), None).await;
        let message = "VirtualMachineInstance ns/vm1 (UID i), which owns this launcher pod, does not exist; create the virtual \
            machine, and let KubeVirt create its pod";
        assert_eq!((&response["allowed"], &response["status"]["message"]), (&json!(false), &json!(message)));
        assert_eq!(webhook.reads(), [VMI], "the API server says so");
        // A pod that ends is none that starts.
        let mut ending = launcher("ns/blue");
        ending["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        assert_eq!(webhook.mutate(&ending, Some(&launcher("ns/red"))).await, None);
    }
}

/// The elements of a pod, of which an API server with this name prefix has none.
fn absent_nads(count: usize) -> String {
    (0..count).map(|number| format!("ns/absent-{number}")).collect::<Vec<_>>().join(",")
}

#[tokio::test]
async fn nads_that_decide_nothing_are_not_read() {
    let webhook = Webhook::new(Some(vmi(&["blue"])), &[]);
    let pod = launcher(&format!("{},ns/blue", absent_nads(4095)));
    let text = webhook.mutate(&pod, None).await.unwrap();
    assert_eq!(references(&text).last(), Some(&json!("vm1.blue")));
    assert_eq!(webhook.reads(), [""; 0], "the instance has none of them");
}

#[tokio::test]
async fn a_pod_with_many_nads_that_the_cache_does_not_have_is_refused_with_the_reason() {
    let names: Vec<String> = (0..17).map(|number| format!("absent-{number}")).collect();
    let networks: Vec<&str> = names.iter().map(String::as_str).collect();
    let webhook = Webhook::new(Some(vmi(&networks)), &[]);
    let response = webhook.review(MUTATE_POD, &launcher(&absent_nads(17)), None).await;
    assert_eq!(response["allowed"], false, "{response}");
    let message = response["status"]["message"].as_str().unwrap();
    assert!(
        message.contains("17 NetworkAttachmentDefinitions") && message.contains("ns/absent-0"),
        "{message}"
    );
    assert_eq!(webhook.reads(), [""; 0]);
    assert_eq!(webhook.mutate(&launcher(&absent_nads(16)), None).await, None);
    assert_eq!(webhook.reads().len(), 16);
}

/// With an API server that answers no read, the requests that need one leave room for all others.
#[tokio::test(start_paused = true)]
async fn reads_that_hang_do_not_hold_up_requests_that_need_none() {
    let hanging = Webhook::new(Some(vmi(&["blue"])), &[]).with_client(unreachable_client());
    let pod = launcher("ns/red");
    let unknown = json!([{"name": "red", "namespace": "ns", "interface": interface("red")}]).to_string();
    let reading = futures::future::join_all(
        (0..32).map(async |_| hanging.post(MUTATE_POD, &launcher(&unknown), None).await),
    );
    let known = async {
        tokio::task::yield_now().await;
        let start = tokio::time::Instant::now();
        for _ in 0..100 {
            assert!(hanging.mutate(&launcher("ns/blue"), None).await.is_some());
            assert_eq!(hanging.mutate(&pod, None).await, None);
        }
        start.elapsed()
    };
    let (reading, took) = futures::join!(reading, known);
    assert!(took < Duration::from_millis(100), "{took:?}");
    let busy = reading.iter().filter(|(code, _)| *code == StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(busy.clone().count(), 32 - MAX_LIVE_REVIEWS);
    assert!(busy.clone().all(|(_, body)| body.contains("does not know yet")));
    let failed = reading.iter().filter(|(code, _)| *code == StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(failed.count(), MAX_LIVE_REVIEWS);
}

/// A pod without credentials posts reviews that name instances which do not exist; so can the tenant of another namespace
/// through the API server.
#[tokio::test(start_paused = true)]
async fn reads_of_another_client_or_namespace_do_not_keep_a_launcher_from_its_own() {
    type Forged = fn(usize) -> (u8, String);
    let floods: [Forged; 3] =
        [|_| (2, "other".to_owned()), |number| (2, format!("made-up-{number}")), |_| (1, "other".to_owned())];
    for flood in floods {
        let client = hanging_elsewhere(&[(VMI, vmi(&["red"])), (RED, nad("red"))]);
        let webhook = Webhook::new(None, &[]).with_client(client);
        let forged = (0..32).map(async |number| {
            let (client, namespace) = flood(number);
            let request = review_request(MUTATE_POD, &namespace, &launcher("blue"), None);
            webhook.send(from_client(client, request)).await.0
        });
        let launcher = async {
            while webhook.state.live_reads.held() < MAX_LIVE_REVIEWS {
                tokio::task::yield_now().await;
            }
            let start = tokio::time::Instant::now();
            let request = from_client(1, review_request(MUTATE_POD, "ns", &launcher("ns/red"), None));
            (webhook.send(request).await, start.elapsed())
        };
        let (forged, ((code, body), took)) = futures::join!(futures::future::join_all(forged), launcher);
        assert_eq!(code, StatusCode::OK, "{body}");
        assert!(body.contains("patch") && took <= Duration::from_millis(100), "{took:?} {body}");
        assert!(forged.iter().all(StatusCode::is_server_error), "{forged:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_launcher_beside_many_dry_runs_with_thousands_of_absent_nads_is_admitted_promptly() {
    let names: Vec<String> = (0..4096).map(|number| format!("absent-{number}")).collect();
    let networks: Vec<&str> = names.iter().map(String::as_str).collect();
    let live = [(RED, nad("red"))];
    let webhook = Webhook::new(Some(vmi(&networks)), &live).with_client(hanging_elsewhere(&live));
    let mut other = vmi(&["red"]);
    other["metadata"]["name"] = json!("vm2");
    let other = claims_project::vmi(&serde_json::from_value::<MachineObject>(other).unwrap());
    webhook.state.cluster.claims().set_vmi(&ObjectKey::new("ns", "vm2"), other);
    let pod = launcher(&absent_nads(4096));
    let dry_runs = (0..32).map(|_| webhook.review(MUTATE_POD, &pod, None));
    let mut beside = launcher("ns/red");
    beside["metadata"]["ownerReferences"][0]["name"] = json!("vm2");
    let beside = async {
        tokio::task::yield_now().await;
        let start = tokio::time::Instant::now();
        (webhook.mutate(&beside, None).await, start.elapsed())
    };
    let (refused, (networks, took)) = futures::join!(futures::future::join_all(dry_runs), beside);
    assert!(networks.is_some() && took < Duration::from_millis(100), "{took:?}");
    for response in refused {
        let message = response["status"]["message"].as_str().unwrap();
        assert!(message.contains("4096 NetworkAttachmentDefinitions"), "{message}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_connection_is_not_given_to_another_client_while_its_request_is_answered() {
    let webhook = Webhook::new(None, &[]).with_client(unreachable_client());
    let connections = FairSlots::new(1, Duration::ZERO);
    let [api_server, other] = [1, 2].map(|client| Source::new([10, 0, 0, client].into()));
    let connection = Arc::new(connections.try_take(&api_server).unwrap());
    let mut request = review_request(MUTATE_POD, "ns", &launcher("ns/blue"), None);
    request.extensions_mut().insert(Arc::clone(&connection));
    let taken = async {
        while webhook.state.live_reads.held() == 0 {
            tokio::task::yield_now().await;
        }
        connections.try_take(&other).is_some()
    };
    let ((code, _), taken) = futures::join!(webhook.send(request), taken);
    assert!(code == StatusCode::INTERNAL_SERVER_ERROR && !taken && !connection.lost().is_cancelled());
    assert!(connections.try_take(&other).is_some(), "the request was answered");
}

#[tokio::test]
async fn pods_that_are_no_launchers_stay_as_they_are() {
    let webhook = Webhook::new(Some(vmi(&["blue"])), &[]);
    let mut plain = launcher("ns/blue");
    plain["metadata"]["labels"] = json!({});
    assert_eq!(webhook.mutate(&plain, None).await, None);
    // Labels and annotations make no launcher: the validating webhook would reject its reference.
    for owners in [json!(null), vm_owner()] {
        let mut unowned = launcher("ns/blue");
        unowned["metadata"]["ownerReferences"] = owners;
        assert_eq!(webhook.mutate(&unowned, None).await, None);
        assert_eq!(webhook.review(VALIDATE_CLAIMS, &unowned, None).await["allowed"], true);
    }
    assert_eq!(webhook.mutate(&launcher(" "), None).await, None);
    assert_eq!(webhook.reads(), [""; 0]);
}

#[tokio::test]
async fn a_forged_reference_is_denied_and_that_of_a_launcher_is_not() {
    let webhook = Webhook::new(Some(vmi(&["blue"])), &[]);
    let networks = |claim: &str| json!([{"name": "blue", "ipam-claim-reference": claim}]).to_string();
    let allowed = webhook.review(VALIDATE_CLAIMS, &launcher(&networks("vm1.blue")), None).await;
    assert_eq!(allowed, json!({"uid": "u-1", "allowed": true}));

    let mut forged = launcher(&networks("vm1.blue"));
    forged["metadata"].as_object_mut().unwrap().remove("ownerReferences");
    forged["metadata"]["labels"] = json!({});
    let message = "pod is not a launcher of VirtualMachine ns/vm1, which owns IPAMClaim ns/vm1.blue; remove \
        ipam-claim-reference from element [0] of k8s.v1.cni.cncf.io/networks";
    assert_eq!(
        webhook.review(VALIDATE_CLAIMS, &forged, None).await,
        json!({
            "uid": "u-1",
            "allowed": false,
            "status": {"code": 403, "reason": "Forbidden", "message": message},
        })
    );
    forged["metadata"]["annotations"][NETWORKS] = json!(networks("not-yet"));
    let unknown = webhook.review(VALIDATE_CLAIMS, &forged, None).await;
    assert_eq!(unknown["allowed"], true, "a claim that does not exist yet");
}
