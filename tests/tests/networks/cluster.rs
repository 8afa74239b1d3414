//! A cluster without nodes, in which the test writes what kubelets and node daemons would write.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use e2e::{bridge::DELETION_LIMIT, replica::Replica};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
    core::{ApiResource, GroupVersionKind},
};
use lab::{Lab, wait};
use serde_json::{Value, json};

use crate::{TIMEOUT, workloads};

/// The cluster as one test sees it: with its own namespace, and a label that selects its own nodes.
#[derive(Clone)]
pub struct TestCluster {
    pub client: Client,
    pub namespace: String,
}

pub fn resource(group: &str, version: &str, kind: &str, plural: &str) -> ApiResource {
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural)
}

pub fn bridge_networks() -> ApiResource {
    resource("patchbay.dev", "v1alpha1", "BridgeNetwork", "bridgenetworks")
}

pub fn nads() -> ApiResource {
    resource("k8s.cni.cncf.io", "v1", "NetworkAttachmentDefinition", "network-attachment-definitions")
}

pub fn crds() -> ApiResource {
    resource("apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions")
}

fn is_not_found(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.is_not_found())
}

impl TestCluster {
    pub async fn new(lab: &Lab, namespace: &str) -> Result<Self> {
        let cluster = Self { client: lab.client().await?, namespace: namespace.to_owned() };
        cluster.create_namespace(namespace).await?;
        Ok(cluster)
    }

    pub async fn create_namespace(&self, name: &str) -> Result<()> {
        let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
        self.apply(&resource("", "v1", "Namespace", "namespaces"), None, &object).await?;
        let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": name}});
        self.apply(&resource("", "v1", "ServiceAccount", "serviceaccounts"), Some(name), &account)
            .await
            .map(drop)
    }

    pub async fn install_nad_crd(&self) -> Result<()> {
        self.install_crd("k8s.cni.cncf.io", "NetworkAttachmentDefinition", "network-attachment-definitions")
            .await
    }

    /// The CRDs of KubeVirt that the controller reads, with open schemas.
    pub async fn install_kubevirt_crds(&self) -> Result<()> {
        self.install_crd("kubevirt.io", "VirtualMachine", "virtualmachines").await?;
        self.install_crd("kubevirt.io", "VirtualMachineInstance", "virtualmachineinstances").await
    }

    async fn install_crd(&self, group: &str, kind: &str, plural: &str) -> Result<()> {
        let open_schema = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
        let crd = json!({
            "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {"name": format!("{plural}.{group}")},
            "spec": {
                "group": group, "scope": "Namespaced",
                "names": {"plural": plural, "singular": kind.to_lowercase(), "kind": kind},
                "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": open_schema}}],
            },
        });
        self.apply(&crds(), None, &crd).await?;
        let api = self.api(&resource(group, "v1", kind, plural), None);
        wait::until(TIMEOUT, &format!("{kind} to be served"), || async {
            Ok(Some(api.list(&ListParams::default().limit(1)).await?))
        })
        .await
        .map(drop)
    }

    pub fn api(&self, resource: &ApiResource, namespace: Option<&str>) -> Api<DynamicObject> {
        match namespace {
            Some(namespace) => Api::namespaced_with(self.client.clone(), namespace, resource),
            None => Api::all_with(self.client.clone(), resource),
        }
    }

    pub async fn apply(
        &self,
        resource: &ApiResource,
        namespace: Option<&str>,
        object: &Value,
    ) -> Result<DynamicObject> {
        let name = object["metadata"]["name"].as_str().context("metadata.name")?;
        let params = PatchParams::apply("test").force();
        let applied = self.api(resource, namespace).patch(name, &params, &Patch::Apply(object)).await;
        applied.with_context(|| format!("apply {} {name}", resource.kind))
    }

    pub async fn create_object(
        &self,
        resource: &ApiResource,
        namespace: Option<&str>,
        object: &Value,
    ) -> kube::Result<DynamicObject> {
        let object = serde_json::from_value(object.clone()).map_err(kube::Error::SerdeError)?;
        self.api(resource, namespace).create(&PostParams::default(), &object).await
    }

    /// Selects the nodes of this test.
    pub fn node_selector(&self) -> Value {
        json!({"matchLabels": {"test": self.namespace}})
    }

    /// Creates a Node and its NodeNetwork, with a VTEP on a link of this MTU.
    pub async fn create_node(&self, name: &str, mtu: i32) -> Result<()> {
        let nodes = resource("", "v1", "Node", "nodes");
        let labels = json!({"test": self.namespace});
        let object =
            json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}});
        let node = self.apply(&nodes, None, &object).await?;
        let owner = json!([{"apiVersion": "v1", "kind": "Node", "name": name, "uid": node.uid()}]);
        let object = json!({"apiVersion": "patchbay.dev/v1alpha1", "kind": "NodeNetwork",
            "metadata": {"name": name, "ownerReferences": owner}});
        let node_networks = resource("patchbay.dev", "v1alpha1", "NodeNetwork", "nodenetworks");
        wait::until(TIMEOUT, "the NodeNetwork to be admitted", || async {
            self.apply(&node_networks, None, &object).await.map(Some)
        })
        .await?;
        self.set_vtep_mtu(name, mtu).await
    }

    pub async fn set_vtep_mtu(&self, node: &str, mtu: i32) -> Result<()> {
        self.set_vtep(node, "10.0.0.1", mtu).await
    }

    pub async fn set_vtep(&self, node: &str, address: &str, mtu: i32) -> Result<()> {
        let status = json!({"vtep": {"address": address, "interface": "eth0", "mtu": mtu}});
        self.patch_node_network_status(node, status).await
    }

    async fn patch_node_network_status(&self, node: &str, status: Value) -> Result<()> {
        let node_networks = resource("patchbay.dev", "v1alpha1", "NodeNetwork", "nodenetworks");
        let patch = Patch::Merge(json!({"status": status}));
        let patched =
            self.api(&node_networks, None).patch_status(node, &PatchParams::default(), &patch).await;
        patched.map(drop).with_context(|| format!("patch the status of NodeNetwork {node}"))
    }

    /// Reports in place of the daemon that the node has the network, ready or not.
    pub async fn report_network(&self, node: &str, network: &str, ready: bool) -> Result<()> {
        let object = self.get_network(network).await?.context("the network does not exist")?;
        let entry = json!({"uid": object["metadata"]["uid"], "name": network, "bridge": "br-x", "ready": ready,
            "observedGeneration": object["metadata"]["generation"], "reason": if ready { "Ready" } else { "Broken" },
            "message": "written by the test"});
        self.patch_node_network_status(node, json!({"networks": [entry]})).await
    }

    /// Reports in place of the daemon that the node has no networks.
    pub async fn clear_report(&self, node: &str) -> Result<()> {
        self.patch_node_network_status(node, json!({"networks": []})).await
    }

    pub async fn get_network(&self, name: &str) -> Result<Option<Value>> {
        let found = self.api(&bridge_networks(), None).get_opt(name).await?;
        found.map(|object| serde_json::to_value(object).context("serialize the object")).transpose()
    }

    pub async fn create_network(&self, name: &str, spec: Value) -> Result<()> {
        let object = json!({"apiVersion": "patchbay.dev/v1alpha1", "kind": "BridgeNetwork", "metadata": {"name": name}, "spec": spec});
        self.create_object(&bridge_networks(), None, &object)
            .await
            .map(drop)
            .with_context(|| format!("create network {name}"))
    }

    pub async fn delete_network(&self, name: &str) -> Result<()> {
        self.api(&bridge_networks(), None)
            .delete(name, &DeleteParams::default())
            .await
            .map(drop)
            .with_context(|| format!("delete network {name}"))
    }

    /// The error of a create request that must be rejected.
    pub async fn create_error(&self, name: &str, spec: Value) -> Result<String> {
        match self.create_network(name, spec.clone()).await {
            Ok(()) => bail!("{name} {spec} was admitted"),
            Err(error) => Ok(format!("{error:#}")),
        }
    }

    pub async fn patch_spec(&self, name: &str, spec: Value) -> Result<()> {
        self.merge_patch(&bridge_networks(), None, name, &json!({"spec": spec})).await
    }

    pub async fn merge_patch(
        &self,
        resource: &ApiResource,
        namespace: Option<&str>,
        name: &str,
        patch: &Value,
    ) -> Result<()> {
        let patched =
            self.api(resource, namespace).patch(name, &PatchParams::default(), &Patch::Merge(patch)).await;
        patched.map(drop).with_context(|| format!("patch {} {name}", resource.kind))
    }

    pub async fn patch_node_labels(&self, node: &str, labels: Value) -> Result<()> {
        let nodes = resource("", "v1", "Node", "nodes");
        self.merge_patch(&nodes, None, node, &json!({"metadata": {"labels": labels}})).await
    }

    /// Sets the Ready condition of a Node to Unknown, as when its kubelet stops reporting.
    pub async fn set_node_not_ready(&self, node: &str) -> Result<()> {
        let conditions = json!([{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown",
            "lastTransitionTime": null, "lastHeartbeatTime": null}]);
        let patch = Patch::Merge(json!({"status": {"conditions": conditions}}));
        let api = self.api(&resource("", "v1", "Node", "nodes"), None);
        api.patch_status(node, &PatchParams::default(), &patch)
            .await
            .map(drop)
            .context("set a Node not ready")
    }

    pub async fn get_nad(&self, namespace: &str, name: &str) -> Result<Option<Value>> {
        let found = self.api(&nads(), Some(namespace)).get_opt(name).await?;
        found.map(|object| serde_json::to_value(object).context("serialize the object")).transpose()
    }

    pub async fn wait_for_nad(&self, namespace: &str, name: &str) -> Result<Value> {
        wait::until(TIMEOUT, &format!("NAD {namespace}/{name}"), || self.get_nad(namespace, name)).await
    }

    /// Waits until the network satisfies the predicate.
    pub async fn wait_for(
        &self,
        name: &str,
        what: &str,
        predicate: impl Fn(&Value) -> bool,
    ) -> Result<Value> {
        wait::until(TIMEOUT, &format!("network {name}: {what}"), || async {
            let network = self.get_network(name).await?.context("the network does not exist")?;
            ensure!(
                predicate(&network),
                "{:#}",
                json!([network["metadata"]["finalizers"], network["status"]])
            );
            Ok(Some(network))
        })
        .await
    }

    pub async fn wait_for_condition(&self, name: &str, kind: &str, status: &str) -> Result<Value> {
        let what = format!("{kind} {status}");
        self.wait_for(name, &what, |network| {
            condition(network, kind).is_some_and(|it| it["status"] == status)
        })
        .await
    }

    pub async fn wait_for_reason(&self, name: &str, kind: &str, reason: &str) -> Result<Value> {
        let what = format!("{kind} with reason {reason}");
        self.wait_for(name, &what, |network| {
            condition(network, kind).is_some_and(|it| it["reason"] == reason)
        })
        .await
    }

    pub async fn wait_for_finalizer(&self, name: &str, finalizer: &str, present: bool) -> Result<()> {
        let has = |network: &Value| {
            network["metadata"]["finalizers"]
                .as_array()
                .is_some_and(|all| all.iter().any(|it| it == finalizer))
        };
        self.wait_for(name, finalizer, |network| has(network) == present).await.map(drop)
    }

    pub async fn wait_until_deleted(&self, name: &str) -> Result<()> {
        wait::until(TIMEOUT, &format!("network {name} to be deleted"), || self.deleted(name)).await
    }

    /// The same within the product's limit for a network without users.
    pub async fn wait_until_deleted_in_time(&self, name: &str) -> Result<()> {
        let what = format!("network {name} to be deleted");
        let ((), _) = wait::within(DELETION_LIMIT, &what, || self.deleted(name)).await?;
        Ok(())
    }

    async fn deleted(&self, name: &str) -> Result<Option<()>> {
        let network = self.get_network(name).await?;
        ensure!(network.is_none(), "{:#}", network.unwrap_or_default());
        Ok(Some(()))
    }

    pub async fn has_label(&self, node: &str, network: &str) -> Result<bool> {
        let object = self.api(&resource("", "v1", "Node", "nodes"), None).get(node).await?;
        Ok(object
            .labels()
            .get(&format!("network.patchbay.dev/{network}"))
            .is_some_and(|value| value == "true"))
    }

    pub async fn wait_for_label(&self, node: &str, network: &str, present: bool) -> Result<()> {
        wait::until(TIMEOUT, &format!("label of {network} on {node}: {present}"), || async {
            Ok((self.has_label(node, network).await? == present).then_some(()))
        })
        .await
    }

    /// The writes of the controller since the offset, without its Lease.
    pub fn controller_writes(lab: &Lab, offset: lab::audit::AuditOffset) -> Result<Vec<String>> {
        let ours = |a: &lab::audit::AuditedRequest| {
            a.is_write() && a.user.ends_with("patchbay-controller") && a.resource != "leases"
        };
        let requests = lab.requests_since(offset)?.into_iter().filter(ours);
        Ok(requests
            .map(|a| format!("{} {} {}/{} {}", a.verb, a.resource, a.namespace, a.name, a.code))
            .collect())
    }

    /// Waits for an event with this reason.
    pub async fn wait_for_event(&self, reason: &str) -> Result<()> {
        let api = self.api(&resource("events.k8s.io", "v1", "Event", "events"), Some("default"));
        wait::until(TIMEOUT, &format!("an event {reason}"), || async {
            let all = api.list(&ListParams::default()).await?;
            Ok(all.items.iter().any(|event| event.data["reason"] == reason).then_some(()))
        })
        .await
    }

    /// Starts a controller and waits until it leads. The previous leader must be dead: its Lease is deleted, not awaited.
    pub async fn start_leader(&self, lab: &Lab) -> Result<Replica> {
        self.delete_lease().await?;
        Replica::start_ready(lab, 1, &[]).await
    }

    pub async fn delete_lease(&self) -> Result<()> {
        let leases = self
            .api(&resource("coordination.k8s.io", "v1", "Lease", "leases"), Some(e2e::patchbay::NAMESPACE));
        match leases.delete("patchbay-controller", &DeleteParams::default()).await {
            Err(error) if !is_not_found(&error) => Err(error).context("delete the Lease"),
            _ => Ok(()),
        }
    }

    pub fn pod_object(name: &str, networks: &str) -> Value {
        json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "annotations": {"k8s.v1.cni.cncf.io/networks": networks}},
            "spec": {"containers": [{"name": "c", "image": "none"}], "terminationGracePeriodSeconds": 0}})
    }

    /// Creates a pod, which is never scheduled.
    pub async fn create_pod(&self, name: &str, networks: &str) -> Result<Workload> {
        let pod = self.pod_ref(name);
        let object = Self::pod_object(name, networks);
        self.create_object(&pod.resource, Some(&self.namespace), &object)
            .await
            .with_context(|| format!("create pod {name}"))?;
        Ok(pod)
    }

    /// Creates a pod with dry run: admission runs, nothing is stored.
    pub async fn dry_run_pod(&self, name: &str, networks: &str) -> Result<()> {
        let object = serde_json::from_value(Self::pod_object(name, networks))?;
        let params = PostParams { dry_run: true, ..PostParams::default() };
        let api = self.api(&resource("", "v1", "Pod", "pods"), Some(&self.namespace));
        api.create(&params, &object).await.map(drop).context("create a pod with dry run")
    }

    /// Sets the objectSelector of the webhook for pods.
    pub async fn set_pod_webhook_selector(&self, selector: &Value) -> Result<()> {
        const WEBHOOK: &str = "pods.users.patchbay.dev";
        let configurations = resource(
            "admissionregistration.k8s.io",
            "v1",
            "ValidatingWebhookConfiguration",
            "validatingwebhookconfigurations",
        );
        let api = self.api(&configurations, None);
        let object = api.get("patchbay").await?;
        let mut webhooks = object.data["webhooks"].as_array().into_iter().flatten();
        let index = webhooks.position(|it| it["name"] == WEBHOOK).context("the webhook for pods")?;
        let patch = json!([
            {"op": "test", "path": format!("/webhooks/{index}/name"), "value": WEBHOOK},
            {"op": "add", "path": format!("/webhooks/{index}/objectSelector"), "value": selector},
        ]);
        let patch = Patch::Json::<()>(serde_json::from_value(patch)?);
        api.patch("patchbay", &PatchParams::default(), &patch)
            .await
            .map(drop)
            .context("set the objectSelector for pods")
    }

    pub fn pod_ref(&self, name: &str) -> Workload {
        Workload {
            resource: resource("", "v1", "Pod", "pods"),
            namespace: self.namespace.clone(),
            name: name.to_owned(),
        }
    }

    /// Creates a workload of any kind.
    pub async fn create_workload(&self, (workload, object): (Workload, Value)) -> Result<Workload> {
        let workload = Workload { namespace: self.namespace.clone(), ..workload };
        let created = self.create_object(&workload.resource, Some(&self.namespace), &object).await;
        created.with_context(|| format!("create {} {}", workload.resource.kind, workload.name))?;
        Ok(workload)
    }

    /// Creates a pod on these networks. Returns whether the webhook rejects it.
    pub async fn pod_is_rejected(&self, name: &str, networks: &str) -> Result<bool> {
        let object = Self::pod_object(name, networks);
        match self.create_object(&resource("", "v1", "Pod", "pods"), Some(&self.namespace), &object).await {
            Ok(_) => Ok(false),
            Err(kube::Error::Api(status)) if status.message.contains("which is being deleted") => Ok(true),
            Err(error) => Err(error).context("neither created nor rejected by the webhook"),
        }
    }

    /// Waits until the webhook rejects an object, and returns its message. The webhook of users fails open after 2 s, so that
    /// a busy controller may let one through; a dry run leaves nothing behind.
    pub async fn wait_for_rejection(&self, kind: &ApiResource, object: &Value) -> Result<String> {
        let parsed: DynamicObject = serde_json::from_value(object.clone())?;
        let params = PostParams { dry_run: true, ..PostParams::default() };
        let api = self.api(kind, Some(&self.namespace));
        wait::until(TIMEOUT, &format!("a {} to be rejected", kind.kind), || async {
            rejection(api.create(&params, &parsed).await)
        })
        .await
    }

    /// The same for a change of an existing object.
    pub async fn wait_for_patch_rejection(
        &self,
        kind: &ApiResource,
        name: &str,
        patch: &Value,
    ) -> Result<String> {
        let params = PatchParams { dry_run: true, ..PatchParams::default() };
        let api = self.api(kind, Some(&self.namespace));
        wait::until(TIMEOUT, &format!("a change of {} {name} to be rejected", kind.kind), || async {
            rejection(api.patch(name, &params, &Patch::Merge(patch)).await)
        })
        .await
    }

    /// The number of objects of a kind in the namespace of the test.
    pub async fn count(&self, kind: &ApiResource) -> Result<usize> {
        Ok(self.api(kind, Some(&self.namespace)).list(&ListParams::default()).await?.items.len())
    }

    /// Deletes all pods of this test.
    pub async fn delete_pods(&self) -> Result<()> {
        let params = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        let api = self.api(&resource("", "v1", "Pod", "pods"), Some(&self.namespace));
        api.delete_collection(&params, &ListParams::default()).await.map(drop).context("delete pods")
    }

    /// Deletes all objects of a kind. Repeats the request, because the API server ends it after a minute.
    pub async fn delete_all(&self, kind: &ApiResource) -> Result<()> {
        let params = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        let api = self.api(kind, Some(&self.namespace));
        wait::until(
            Duration::from_secs(900),
            &format!("all objects of kind {} to be deleted", kind.kind),
            || async {
                let outcome = api.delete_collection(&params, &ListParams::default()).await;
                let left = api.list(&ListParams::default().limit(1)).await?;
                ensure!(left.items.is_empty(), "objects remain: {outcome:?}");
                Ok(Some(()))
            },
        )
        .await
    }

    /// Deletes all workloads of this test and their children.
    pub async fn delete_workloads(&self) -> Result<()> {
        for (workload, _) in workloads::all() {
            let api = self.api(&workload.resource, Some(&self.namespace));
            let deleted = api.delete_collection(&DeleteParams::background(), &ListParams::default()).await;
            deleted.with_context(|| format!("delete all objects of kind {}", workload.resource.kind))?;
        }
        self.delete_pods().await
    }

    pub async fn uid_of(&self, workload: &Workload) -> Result<String> {
        let object = self.api(&workload.resource, Some(&self.namespace)).get(&workload.name).await?;
        object.uid().context("metadata.uid")
    }

    pub async fn delete_workload(&self, workload: &Workload) -> Result<()> {
        let params = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::background() };
        match self.api(&workload.resource, Some(&workload.namespace)).delete(&workload.name, &params).await {
            Err(error) if is_not_found(&error) => Ok(()),
            other => other.map(drop).with_context(|| format!("delete {}", workload.name)),
        }
    }

    /// Waits until the webhook responds: it rejects a NodeNetwork without a Node.
    pub async fn wait_for_webhook(&self) -> Result<()> {
        let object = json!({"apiVersion": "patchbay.dev/v1alpha1", "kind": "NodeNetwork", "metadata": {"name": "no-such-node"}});
        let node_networks = resource("patchbay.dev", "v1alpha1", "NodeNetwork", "nodenetworks");
        wait::until(Duration::from_secs(60), "the webhook to respond", || async {
            let rejected = self.create_object(&node_networks, None, &object).await;
            ensure!(
                matches!(&rejected, Err(kube::Error::Api(it)) if it.message.contains("does not exist; the Patchbay daemon")),
                "{rejected:?}"
            );
            Ok(Some(()))
        })
        .await
    }
}

/// A reference to an object that uses a network.
#[derive(Clone, Debug)]
pub struct Workload {
    pub resource: ApiResource,
    pub namespace: String,
    pub name: String,
}

pub fn condition<'a>(network: &'a Value, kind: &str) -> Option<&'a Value> {
    network["status"]["conditions"].as_array()?.iter().find(|condition| condition["type"] == kind)
}

/// The message of a rejected request; `None` if it was admitted.
fn rejection(outcome: kube::Result<DynamicObject>) -> Result<Option<String>> {
    match outcome {
        Ok(_) => Ok(None),
        Err(kube::Error::Api(status)) => Ok(Some(status.message)),
        Err(error) => Err(error.into()),
    }
}
