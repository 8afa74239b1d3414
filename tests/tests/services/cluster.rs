//! A cluster without nodes, in which the test writes Nodes, pods and their network-status.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc, time::Duration};

use anyhow::{Context as _, Result, ensure};
use api::networkservice::{MANAGED_BY_LABEL, SERVICE_NAME_LABEL, SLICE_MANAGER};
use e2e::replica::Replica;
use k8s_openapi::{
    api::{core::v1::Service, discovery::v1::EndpointSlice},
    apimachinery::pkg::apis::meta::v1::MicroTime,
    jiff::Timestamp,
};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
    core::{ApiResource, GroupVersionKind},
};
use lab::{Lab, wait};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::TIMEOUT;

/// The Nodes of the tests. Without heartbeats, Kubernetes would set their pods to not ready.
pub const NODES: [&str; 2] = ["node-a", "node-b"];
/// Less than the time after which a Node without heartbeat counts as lost.
const HEARTBEAT: Duration = Duration::from_secs(4);

/// The cluster as one test sees it, with its own namespace.
#[derive(Clone)]
pub struct TestCluster {
    pub client: Client,
    pub namespace: String,
    /// Sends heartbeats for the Nodes.
    heartbeats: Arc<JoinSet<()>>,
}

/// The endpoints of a service: address, pod and whether it is ready.
pub type Endpoints = BTreeSet<(IpAddr, String, bool)>;

pub fn resource(group: &str, version: &str, kind: &str, plural: &str) -> ApiResource {
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural)
}

pub fn network_services() -> ApiResource {
    resource("patchbay.dev", "v1alpha1", "NetworkService", "networkservices")
}

pub fn nads() -> ApiResource {
    resource("k8s.cni.cncf.io", "v1", "NetworkAttachmentDefinition", "network-attachment-definitions")
}

pub fn pods() -> ApiResource {
    resource("", "v1", "Pod", "pods")
}

pub fn services() -> ApiResource {
    resource("", "v1", "Service", "services")
}

pub fn slices() -> ApiResource {
    resource("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices")
}

fn is_not_found(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.is_not_found())
}

/// A pod that the test creates.
#[derive(Clone, Debug)]
pub struct TestPod {
    pub name: String,
    pub labels: Value,
    /// The network-status annotation.
    pub status: Option<String>,
    pub ready: bool,
    pub node: String,
    pub spec: Value,
}

impl TestPod {
    /// A ready pod of the application `app` with these addresses on the NAD `blue`.
    pub fn new(name: &str, app: &str, addresses: &[&str]) -> Self {
        Self {
            name: name.to_owned(),
            labels: json!({"app": app}),
            status: Some(network_status("blue", addresses)),
            ready: true,
            node: "node-a".to_owned(),
            spec: json!({}),
        }
    }

    pub fn ready(self, ready: bool) -> Self {
        Self { ready, ..self }
    }

    pub fn status(self, status: &str) -> Self {
        Self { status: Some(status.to_owned()), ..self }
    }

    fn object(&self) -> Value {
        let mut annotations = json!({});
        if let Some(status) = &self.status {
            annotations["k8s.v1.cni.cncf.io/network-status"] = json!(status);
        }
        let mut spec = json!({
            "nodeName": self.node,
            "containers": [{"name": "c", "image": "none"}],
            // No controller evicts it from a Node without kubelet.
            "tolerations": [{"operator": "Exists"}],
            "terminationGracePeriodSeconds": 0,
        });
        for (key, value) in self.spec.as_object().into_iter().flatten() {
            spec[key] = value.clone();
        }
        json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": self.name, "labels": self.labels, "annotations": annotations}, "spec": spec})
    }
}

/// The annotation of a pod with a primary address and these addresses on a network.
pub fn network_status(network: &str, addresses: &[&str]) -> String {
    json!([
        {"name": "primary", "interface": "eth0", "ips": ["10.244.0.7"], "default": true},
        {"name": network, "interface": "net1", "ips": addresses},
    ])
    .to_string()
}

impl TestCluster {
    /// Creates the namespace of a test, the Nodes and the NAD `blue`.
    pub async fn new(lab: &Lab, namespace: &str) -> Result<Self> {
        let cluster = Self::without_nads(lab, namespace).await?;
        cluster.install_nad_crd().await?;
        cluster.create_nad("blue").await?;
        Ok(cluster)
    }

    /// The same without the kind of NADs.
    pub async fn without_nads(lab: &Lab, namespace: &str) -> Result<Self> {
        let client = lab.client().await?;
        let mut cluster = Self { client, namespace: namespace.to_owned(), heartbeats: Arc::default() };
        cluster.create_namespace(namespace).await?;
        cluster.create_node("node-a", Some("zone-1")).await?;
        cluster.create_node("node-b", None).await?;
        let mut heartbeats = JoinSet::new();
        let sender = cluster.clone();
        heartbeats.spawn(async move {
            loop {
                for node in NODES {
                    // A failed one is followed by the next.
                    let _ = sender.send_heartbeat(node).await;
                }
                tokio::time::sleep(HEARTBEAT).await;
            }
        });
        cluster.heartbeats = Arc::new(heartbeats);
        Ok(cluster)
    }

    /// The same cluster as another user.
    pub fn as_user(&self, client: Client) -> Self {
        Self { client, ..self.clone() }
    }

    async fn send_heartbeat(&self, node: &str) -> Result<()> {
        let lease = json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": node},
            "spec": {"holderIdentity": node, "leaseDurationSeconds": 40, "renewTime": MicroTime(Timestamp::now())}});
        let leases = resource("coordination.k8s.io", "v1", "Lease", "leases");
        self.apply_in(&leases, Some("kube-node-lease"), &lease).await
    }

    /// The same cluster with another namespace.
    pub async fn sibling(&self, namespace: &str) -> Result<Self> {
        let cluster = Self { namespace: namespace.to_owned(), ..self.clone() };
        cluster.create_namespace(namespace).await?;
        cluster.create_nad("blue").await?;
        Ok(cluster)
    }

    pub async fn create_namespace(&self, name: &str) -> Result<()> {
        let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
        self.apply_in(&resource("", "v1", "Namespace", "namespaces"), None, &object).await?;
        let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": name}});
        self.apply_in(&resource("", "v1", "ServiceAccount", "serviceaccounts"), Some(name), &account).await
    }

    pub async fn install_nad_crd(&self) -> Result<()> {
        let open_schema = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
        let crd = json!({
            "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {"name": "network-attachment-definitions.k8s.cni.cncf.io"},
            "spec": {
                "group": "k8s.cni.cncf.io", "scope": "Namespaced",
                "names": {"plural": "network-attachment-definitions", "singular": "network-attachment-definition", "kind": "NetworkAttachmentDefinition"},
                "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": open_schema}}],
            },
        });
        let crds =
            resource("apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions");
        self.apply_in(&crds, None, &crd).await?;
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &nads());
        wait::until(TIMEOUT, "the NAD kind to be served", || async {
            Ok(Some(api.list(&ListParams::default().limit(1)).await?))
        })
        .await
        .map(drop)
    }

    /// Creates a Node whose kubelet is ready.
    async fn create_node(&self, name: &str, zone: Option<&str>) -> Result<()> {
        let mut object =
            json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {}}});
        if let Some(zone) = zone {
            object["metadata"]["labels"]["topology.kubernetes.io/zone"] = json!(zone);
        }
        let nodes = resource("", "v1", "Node", "nodes");
        self.apply_in(&nodes, None, &object).await?;
        self.send_heartbeat(name).await?;
        let now = Timestamp::now().to_string();
        let ready = json!({"status": {"conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady",
            "lastHeartbeatTime": now, "lastTransitionTime": now}]}});
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &nodes);
        let patched = api.patch_status(name, &PatchParams::default(), &Patch::Merge(&ready)).await;
        patched.map(drop).with_context(|| format!("set Node {name} ready"))
    }

    pub async fn create_nad(&self, name: &str) -> Result<()> {
        let object = json!({"apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
            "metadata": {"name": name}, "spec": {"config": "{\"cniVersion\": \"1.0.0\", \"type\": \"macvlan\"}"}});
        self.apply(&nads(), &object).await
    }

    pub fn api(&self, resource: &ApiResource) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), &self.namespace, resource)
    }

    pub async fn apply_in(
        &self,
        resource: &ApiResource,
        namespace: Option<&str>,
        object: &Value,
    ) -> Result<()> {
        let name = object["metadata"]["name"].as_str().context("metadata.name")?;
        let api: Api<DynamicObject> = match namespace {
            Some(namespace) => Api::namespaced_with(self.client.clone(), namespace, resource),
            None => Api::all_with(self.client.clone(), resource),
        };
        let params = PatchParams::apply("test").force();
        let applied = api.patch(name, &params, &Patch::Apply(object)).await;
        applied.map(drop).with_context(|| format!("apply {} {name}", resource.kind))
    }

    /// Applies an object in the namespace of the test.
    pub async fn apply(&self, resource: &ApiResource, object: &Value) -> Result<()> {
        self.apply_in(resource, Some(&self.namespace), object).await
    }

    pub async fn create(&self, resource: &ApiResource, object: &Value) -> Result<DynamicObject, kube::Error> {
        let object = serde_json::from_value(object.clone()).map_err(kube::Error::SerdeError)?;
        self.api(resource).create(&PostParams::default(), &object).await
    }

    pub async fn merge_patch(&self, resource: &ApiResource, name: &str, patch: &Value) -> Result<()> {
        let patched = self.api(resource).patch(name, &PatchParams::default(), &Patch::Merge(patch)).await;
        patched.map(drop).with_context(|| format!("patch {} {name}", resource.kind))
    }

    /// Deletes an object, which may be gone already.
    pub async fn delete(&self, resource: &ApiResource, name: &str) -> Result<()> {
        let params = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::background() };
        match self.api(resource).delete(name, &params).await {
            Err(error) if !is_not_found(&error) => {
                Err(error).with_context(|| format!("delete {} {name}", resource.kind))
            }
            _ => Ok(()),
        }
    }

    pub async fn get(&self, resource: &ApiResource, name: &str) -> Result<Option<Value>> {
        let found = self.api(resource).get_opt(name).await?;
        found.map(|object| serde_json::to_value(object).context("serialize the object")).transpose()
    }

    /// A NetworkService on the NAD `blue` that selects the application of its name.
    pub fn service_spec(app: &str) -> Value {
        json!({"network": "blue", "selector": {"app": app}, "ports": [{"name": "pg", "port": 5432}]})
    }

    pub async fn create_service(&self, name: &str, spec: Value) -> Result<String> {
        let object = json!({"apiVersion": "patchbay.dev/v1alpha1", "kind": "NetworkService",
            "metadata": {"name": name, "labels": {"team": "db"}}, "spec": spec});
        let created = self.create(&network_services(), &object).await;
        let created = created.with_context(|| format!("create NetworkService {name}"))?;
        created.uid().context("metadata.uid")
    }

    /// Creates a pod and sets its status. Returns its creation time, in whole seconds, and its UID.
    pub async fn create_pod(&self, pod: &TestPod) -> Result<(Timestamp, String)> {
        let created = self.create(&pods(), &pod.object()).await;
        let created = created.with_context(|| format!("create pod {}", pod.name))?;
        self.set_ready(&pod.name, pod.ready).await?;
        let time = created.creation_timestamp().context("metadata.creationTimestamp")?;
        Ok((time.0, created.uid().context("metadata.uid")?))
    }

    pub async fn set_ready(&self, pod: &str, ready: bool) -> Result<()> {
        let status = json!({"status": {"phase": "Running", "conditions": [
            {"type": "Ready", "status": if ready { "True" } else { "False" }, "lastTransitionTime": Timestamp::now().to_string()},
        ]}});
        let patched =
            self.api(&pods()).patch_status(pod, &PatchParams::default(), &Patch::Merge(&status)).await;
        patched.map(drop).with_context(|| format!("set the status of pod {pod}"))
    }

    pub async fn set_network_status(&self, pod: &str, status: Option<&str>) -> Result<()> {
        let patch = json!({"metadata": {"annotations": {"k8s.v1.cni.cncf.io/network-status": status}}});
        self.merge_patch(&pods(), pod, &patch).await
    }

    /// The slices of a service that Patchbay manages.
    pub async fn slices(&self, service: &str) -> Result<Vec<EndpointSlice>> {
        let api: Api<EndpointSlice> = Api::namespaced(self.client.clone(), &self.namespace);
        let selector = format!("{SERVICE_NAME_LABEL}={service},{MANAGED_BY_LABEL}={SLICE_MANAGER}");
        Ok(api.list(&ListParams::default().labels(&selector)).await?.items)
    }

    /// The union of the endpoints of all own slices.
    pub async fn endpoints(&self, service: &str) -> Result<Endpoints> {
        let mut found = Endpoints::new();
        for endpoint in self.slices(service).await?.into_iter().flat_map(|slice| slice.endpoints) {
            let [address] = &endpoint.addresses[..] else { anyhow::bail!("not one address: {endpoint:?}") };
            let pod = endpoint.target_ref.and_then(|target| target.name).context("targetRef.name")?;
            let ready = endpoint.conditions.and_then(|conditions| conditions.ready).context("ready")?;
            found.insert((address.parse()?, pod, ready));
        }
        Ok(found)
    }

    /// Waits until the service has exactly these endpoints: address, pod and whether it is ready.
    pub async fn wait_for_endpoints(&self, service: &str, expected: &[(&str, &str, bool)]) -> Result<()> {
        let parse = |(address, pod, ready): &(&str, &str, bool)| {
            anyhow::Ok((address.parse()?, (*pod).to_owned(), *ready))
        };
        let expected: Endpoints = expected.iter().map(parse).collect::<Result<_>>()?;
        self.wait_for_model(TIMEOUT, service, &expected).await
    }

    pub async fn wait_for_model(&self, timeout: Duration, service: &str, expected: &Endpoints) -> Result<()> {
        let what = format!("the endpoints of {}/{service}", self.namespace);
        wait::until(timeout, &what, || async {
            let found = self.endpoints(service).await?;
            ensure!(found == *expected, "found {found:?}, expected {expected:?}");
            Ok(Some(()))
        })
        .await
    }

    /// Waits until the condition has this status and reason.
    pub async fn wait_for_condition(
        &self,
        name: &str,
        kind: &str,
        status: &str,
        reason: &str,
    ) -> Result<Value> {
        let what = format!("NetworkService {name}: {kind} {status} with reason {reason}");
        wait::until(TIMEOUT, &what, || async {
            let object = self.get(&network_services(), name).await?.context("it does not exist")?;
            let conditions = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
            let found = conditions.into_iter().find(|condition| {
                condition["type"] == kind && condition["status"] == status && condition["reason"] == reason
            });
            ensure!(found.is_some(), "{:#}", object["status"]);
            Ok(found)
        })
        .await
    }

    pub async fn wait_for_service(&self, name: &str) -> Result<Service> {
        let api: Api<Service> = Api::namespaced(self.client.clone(), &self.namespace);
        wait::until(TIMEOUT, &format!("Service {name}"), || async { Ok(api.get_opt(name).await?) }).await
    }

    pub async fn wait_until_gone(&self, resource: &ApiResource, name: &str) -> Result<()> {
        wait::until(TIMEOUT, &format!("{} {name} to be deleted", resource.kind), || async {
            Ok(self.get(resource, name).await?.is_none().then_some(()))
        })
        .await
    }

    /// Waits for an event with this reason in the namespace of the test. Returns its note.
    pub async fn wait_for_event(&self, kind: &str, name: &str, reason: &str) -> Result<String> {
        let api = self.api(&resource("events.k8s.io", "v1", "Event", "events"));
        wait::until(TIMEOUT, &format!("an event {reason} about {kind} {name}"), || async {
            let all = api.list(&ListParams::default()).await?;
            let found = all.items.iter().find(|event| {
                let regarding = &event.data["regarding"];
                event.data["reason"] == reason && regarding["kind"] == kind && regarding["name"] == name
            });
            Ok(found.and_then(|event| event.data["note"].as_str().map(str::to_owned)))
        })
        .await
    }

    /// Starts a controller and waits until it leads. The previous leader must be dead: its Lease is deleted, not awaited.
    pub async fn start_leader(&self, lab: &Lab) -> Result<Replica> {
        self.delete_lease().await?;
        Replica::start_ready(lab, 1, &[]).await
    }

    pub async fn delete_lease(&self) -> Result<()> {
        let leases = resource("coordination.k8s.io", "v1", "Lease", "leases");
        let api: Api<DynamicObject> =
            Api::namespaced_with(self.client.clone(), e2e::patchbay::NAMESPACE, &leases);
        match api.delete("patchbay-controller", &DeleteParams::default()).await {
            Err(error) if !is_not_found(&error) => Err(error).context("delete the Lease"),
            _ => Ok(()),
        }
    }

    /// The writes of the controller since the offset, without its Lease and its certificates.
    pub fn controller_writes(lab: &Lab, offset: lab::audit::AuditOffset) -> Result<Vec<String>> {
        let others = ["leases", "secrets", "validatingwebhookconfigurations"];
        let ours = |request: &lab::audit::AuditedRequest| {
            request.is_write()
                && request.user.ends_with("patchbay-controller")
                && !others.contains(&request.resource.as_str())
        };
        let requests = lab.requests_since(offset)?.into_iter().filter(ours);
        Ok(requests
            .map(|it| format!("{} {} {}/{} {}", it.verb, it.resource, it.namespace, it.name, it.code))
            .collect())
    }
}
