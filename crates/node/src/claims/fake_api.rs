//! An API server in memory, with one virtual machine that has a claim.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    sync::{Arc, Mutex},
};

use axum::body::Body;
use http::{Request, Response};
use kube::Client;
use serde_json::{Value, json};
use tokio::sync::mpsc;

/// The objects of the API server, and what was requested.
#[derive(Default)]
pub struct FakeApi(Mutex<ApiState>);

#[derive(Default)]
struct ApiState {
    /// By their path, such as `ipamclaims/vm1.blue`.
    objects: BTreeMap<String, Value>,
    pods: BTreeMap<String, Value>,
    watches: Vec<mpsc::UnboundedSender<String>>,
    requests: Vec<String>,
    /// Requests whose path contains this fail.
    fault: Option<&'static str>,
}

impl FakeApi {
    /// A claim of `vm1` with addresses of network `blue`, reserved in two IPBlocks.
    pub fn with_claim(addresses: [&str; 2], blocks: [&str; 2]) -> Arc<Self> {
        let api = Self::default();
        let owner = |kind: &str, uid: &str| json!([{"apiVersion": "kubevirt.io/v1", "kind": kind, "name": "vm1", "uid": uid, "controller": true}]);
        api.set(
            "ipamclaims/vm1.blue",
            json!({"apiVersion": "k8s.cni.cncf.io/v1alpha1", "kind": "IPAMClaim",
                "metadata": {"name": "vm1.blue", "namespace": "ns", "uid": "claim-uid",
                    "ownerReferences": owner("VirtualMachine", "vm-uid")},
                "spec": {"network": "blue", "interface": ""}, "status": {"ips": addresses}}),
        );
        api.set(
            "virtualmachineinstances/vm1",
            json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
                "metadata": {"name": "vm1", "namespace": "ns", "uid": "vmi-uid",
                    "ownerReferences": owner("VirtualMachine", "vm-uid")}}),
        );
        for (address, range) in addresses.into_iter().zip(blocks) {
            let name = api::ipblock::name("blue", range.parse().unwrap());
            let address = address.split('/').next().unwrap();
            api.set(
                &format!("ipblocks/{name}"),
                json!({"apiVersion": "patchbay.dev/v1alpha1", "kind": "IPBlock",
                    "metadata": {"name": name, "uid": range},
                    "spec": {"network": "blue", "networkUID": "uid-blue", "cidr": range,
                        "holder": {"node": "ipamclaims/patchbay", "uid": "ipamclaims-patchbay"}},
                    "status": {"used": 1, "free": 1,
                        "claims": [{"address": address, "claim": "ns/vm1.blue", "uid": "claim-uid"}]}}),
            );
        }
        Arc::new(api)
    }

    /// A launcher of `vm1` whose element for interface `net1` references the claim.
    pub fn launcher(name: &str) -> Value {
        let networks = json!([{"name": "blue", "interface": "net1", "ipam-claim-reference": "vm1.blue"}]);
        let owner = json!([{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": "vm1",
            "uid": "vmi-uid", "controller": true}]);
        json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": "ns", "uid": format!("uid-{name}"), "resourceVersion": "1",
                "creationTimestamp": "2026-01-01T00:00:00Z", "ownerReferences": owner,
                "labels": {"kubevirt.io": "virt-launcher", "kubevirt.io/created-by": "vmi-uid",
                    "vmi.kubevirt.io/id": "vm1"},
                "annotations": {"k8s.v1.cni.cncf.io/networks": networks.to_string()}},
            "spec": {}, "status": {"phase": "Pending"}})
    }

    pub fn client(self: &Arc<Self>) -> Client {
        let api = Arc::clone(self);
        let service = tower::service_fn(move |request: Request<kube::client::Body>| {
            let response = api.respond(request.uri().path(), request.uri().query().unwrap_or_default());
            async move { Ok::<_, Infallible>(response) }
        });
        Client::new(service, "default")
    }

    pub fn set(&self, path: &str, object: Value) {
        self.0.lock().unwrap().objects.insert(path.to_owned(), object);
    }

    pub fn remove(&self, path: &str) {
        self.0.lock().unwrap().objects.remove(path).unwrap();
    }

    /// Changes an object or a pod.
    pub fn edit(&self, path: &str, change: impl FnOnce(&mut Value)) {
        let mut state = self.0.lock().unwrap();
        let state = &mut *state;
        change(state.objects.get_mut(path).or_else(|| state.pods.get_mut(path)).unwrap());
    }

    pub fn set_pod(&self, pod: Value) {
        let mut state = self.0.lock().unwrap();
        state.send("ADDED", &pod);
        state.pods.insert(pod["metadata"]["name"].as_str().unwrap().to_owned(), pod);
    }

    pub fn delete_pod(&self, name: &str) {
        let mut state = self.0.lock().unwrap();
        let mut pod = state.pods.remove(name).unwrap();
        pod["metadata"]["resourceVersion"] = "2".into();
        state.send("DELETED", &pod);
    }

    pub fn fail(&self, fault: Option<&'static str>) {
        self.0.lock().unwrap().fault = fault;
    }

    /// The requests since the last call: the kind and the name, or the selectors of a list.
    pub fn requests(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap().requests)
    }

    fn respond(&self, path: &str, query: &str) -> Response<Body> {
        let mut state = self.0.lock().unwrap();
        let parts: Vec<&str> = path.rsplit('/').take(2).collect();
        let is_list = parts[0] == "pods";
        let selectors: Vec<&str> = query.split('&').filter(|part| part.contains("Selector=")).collect();
        let key = if is_list { selectors.join("&") } else { format!("{}/{}", parts[1], parts[0]) };
        if query.contains("watch=") {
            let (sender, mut events) = mpsc::unbounded_channel();
            state.watches.push(sender);
            let body = futures::stream::poll_fn(move |context| {
                events.poll_recv(context).map(|line| line.map(Ok::<_, Infallible>))
            });
            return Response::new(Body::from_stream(body));
        }
        state.requests.push(key.clone());
        let status = |code: u16| {
            let reason = if code == 404 { "NotFound" } else { "InternalError" };
            let status = json!({"kind": "Status", "status": "Failure", "code": code, "message": "no",
                "reason": reason});
            (code, status)
        };
        let (code, body) = if state.fault.is_some_and(|fault| key.contains(fault)) {
            status(500)
        } else if is_list {
            let named = |pod: &&Value| {
                let name = pod["metadata"]["name"].as_str().unwrap();
                !query.contains("metadata.name") || query.contains(&format!("metadata.name%3D{name}"))
            };
            let labelled = |pod: &&Value| {
                !query.contains("labelSelector=") || pod["metadata"]["labels"]["vmi.kubevirt.io/id"] == "vm1"
            };
            let items: Vec<&Value> = state.pods.values().filter(named).filter(labelled).collect();
            (
                200,
                json!({"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items}),
            )
        } else {
            state.objects.get(&key).map_or_else(|| status(404), |object| (200, object.clone()))
        };
        Response::builder().status(code).body(Body::from(body.to_string())).unwrap()
    }
}

impl ApiState {
    fn send(&mut self, event: &str, pod: &Value) {
        let line = json!({"type": event, "object": pod}).to_string() + "\n";
        self.watches.retain(|sender| sender.send(line.clone()).is_ok());
    }
}
