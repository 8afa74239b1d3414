//! A lab without nodes, with the test in place of kubelets and daemons.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use e2e::replica::Replica;
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
    core::{ApiResource, GroupVersionKind},
};
use lab::{Lab, wait};
use serde_json::{Value, json};

use crate::{SOON, users};

/// One test's share of the cluster: a namespace of its own, and nodes with a label of its own.
#[derive(Clone)]
pub struct Cluster {
    pub client: Client,
    pub namespace: String,
}

pub fn resource(group: &str, version: &str, kind: &str, plural: &str) -> ApiResource {
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural)
}

pub fn networks() -> ApiResource {
    resource("patchbay.dev", "v1alpha1", "BridgeNetwork", "bridgenetworks")
}

pub fn nads() -> ApiResource {
    resource("k8s.cni.cncf.io", "v1", "NetworkAttachmentDefinition", "network-attachment-definitions")
}

pub fn definitions() -> ApiResource {
    resource("apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions")
}

fn is_missing(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.is_not_found())
}

impl Cluster {
    pub async fn new(lab: &Lab, namespace: &str) -> Result<Self> {
        let cluster = Self { client: lab.client().await?, namespace: namespace.to_owned() };
        cluster.make_namespace(namespace).await?;
        Ok(cluster)
    }

    pub async fn make_namespace(&self, name: &str) -> Result<()> {
        let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
        self.apply(&resource("", "v1", "Namespace", "namespaces"), None, &object).await?;
        let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": name}});
        self.apply(&resource("", "v1", "ServiceAccount", "serviceaccounts"), Some(name), &account)
            .await
            .map(drop)
    }

    pub async fn install_attachments(&self) -> Result<()> {
        self.install("k8s.cni.cncf.io", "NetworkAttachmentDefinition", "network-attachment-definitions").await
    }

    /// As much of KubeVirt as anybody here reads.
    pub async fn install_machines(&self) -> Result<()> {
        self.install("kubevirt.io", "VirtualMachine", "virtualmachines").await?;
        self.install("kubevirt.io", "VirtualMachineInstance", "virtualmachineinstances").await
    }

    async fn install(&self, group: &str, kind: &str, plural: &str) -> Result<()> {
        let open = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
        let definition = json!({
            "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {"name": format!("{plural}.{group}")},
            "spec": {
                "group": group, "scope": "Namespaced",
                "names": {"plural": plural, "singular": kind.to_lowercase(), "kind": kind},
                "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": open}}],
            },
        });
        self.apply(&definitions(), None, &definition).await?;
        let api = self.api(&resource(group, "v1", kind, plural), None);
        wait::until(SOON * 2, &format!("the kind {kind}"), || async {
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
        let name = object["metadata"]["name"].as_str().context("a name")?;
        let params = PatchParams::apply("test").force();
        let applied = self.api(resource, namespace).patch(name, &params, &Patch::Apply(object)).await;
        applied.with_context(|| format!("apply {} {name}", resource.kind))
    }

    pub async fn post(
        &self,
        resource: &ApiResource,
        namespace: Option<&str>,
        object: &Value,
    ) -> kube::Result<DynamicObject> {
        let object = serde_json::from_value(object.clone()).map_err(kube::Error::SerdeError)?;
        self.api(resource, namespace).create(&PostParams::default(), &object).await
    }

    /// A selector of this test's nodes.
    pub fn selector(&self) -> Value {
        json!({"matchLabels": {"test": self.namespace}})
    }

    /// Makes a Node, and a NodeNetwork with a tunnel end point on a link of this MTU.
    pub async fn node(&self, name: &str, mtu: i32) -> Result<()> {
        let nodes = resource("", "v1", "Node", "nodes");
        let labels = json!({"test": self.namespace});
        let object =
            json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}});
        let made = self.apply(&nodes, None, &object).await?;
        let owner = json!([{"apiVersion": "v1", "kind": "Node", "name": name, "uid": made.uid()}]);
        let object = json!({"apiVersion": "patchbay.dev/v1alpha1", "kind": "NodeNetwork",
            "metadata": {"name": name, "ownerReferences": owner}});
        let reports = resource("patchbay.dev", "v1alpha1", "NodeNetwork", "nodenetworks");
        wait::until(SOON * 4, "the NodeNetwork to be admitted", || async {
            self.apply(&reports, None, &object).await.map(Some)
        })
        .await?;
        self.vtep(name, mtu).await
    }

    pub async fn vtep(&self, node: &str, mtu: i32) -> Result<()> {
        self.vtep_at(node, "10.0.0.1", mtu).await
    }

    pub async fn vtep_at(&self, node: &str, address: &str, mtu: i32) -> Result<()> {
        let status = json!({"vtep": {"address": address, "interface": "eth0", "mtu": mtu}});
        self.patch_report(node, status).await
    }

    async fn patch_report(&self, node: &str, status: Value) -> Result<()> {
        let reports = resource("patchbay.dev", "v1alpha1", "NodeNetwork", "nodenetworks");
        let patch = Patch::Merge(json!({"status": status}));
        let patched = self.api(&reports, None).patch_status(node, &PatchParams::default(), &patch).await;
        patched.map(drop).with_context(|| format!("the status of NodeNetwork {node}"))
    }

    /// Says in place of the daemon that the network is there, and works or not.
    pub async fn report(&self, node: &str, network: &str, ready: bool) -> Result<()> {
        let object = self.network(network).await?.context("the network")?;
        let entry = json!({"uid": object["metadata"]["uid"], "name": network, "bridge": "br-x", "ready": ready,
            "observedGeneration": object["metadata"]["generation"], "reason": if ready { "Ready" } else { "Broken" },
            "message": "said by the test"});
        self.patch_report(node, json!({"networks": [entry]})).await
    }

    /// The daemon has undone all that it had.
    pub async fn unlist(&self, node: &str) -> Result<()> {
        self.patch_report(node, json!({"networks": []})).await
    }

    pub async fn network(&self, name: &str) -> Result<Option<Value>> {
        let found = self.api(&networks(), None).get_opt(name).await?;
        found.map(|object| serde_json::to_value(object).context("a value")).transpose()
    }

    pub async fn create(&self, name: &str, spec: Value) -> Result<()> {
        let object = json!({"apiVersion": "patchbay.dev/v1alpha1", "kind": "BridgeNetwork", "metadata": {"name": name}, "spec": spec});
        self.post(&networks(), None, &object)
            .await
            .map(drop)
            .with_context(|| format!("create network {name}"))
    }

    pub async fn delete(&self, name: &str) -> Result<()> {
        self.api(&networks(), None).delete(name, &DeleteParams::default()).await.map(drop).context("delete")
    }

    /// What somebody is told who asks for such a network.
    pub async fn refusal(&self, name: &str, spec: Value) -> Result<String> {
        match self.create(name, spec.clone()).await {
            Ok(()) => bail!("{name} {spec} was let in"),
            Err(error) => Ok(format!("{error:#}")),
        }
    }

    pub async fn edit(&self, name: &str, spec: Value) -> Result<()> {
        self.merge(&networks(), None, name, &json!({"spec": spec})).await
    }

    pub async fn merge(
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

    pub async fn relabel(&self, node: &str, labels: Value) -> Result<()> {
        let nodes = resource("", "v1", "Node", "nodes");
        self.merge(&nodes, None, node, &json!({"metadata": {"labels": labels}})).await
    }

    /// The node's kubelet is heard of no more.
    pub async fn silence(&self, node: &str) -> Result<()> {
        let conditions = json!([{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown",
            "lastTransitionTime": null, "lastHeartbeatTime": null}]);
        let patch = Patch::Merge(json!({"status": {"conditions": conditions}}));
        let api = self.api(&resource("", "v1", "Node", "nodes"), None);
        api.patch_status(node, &PatchParams::default(), &patch).await.map(drop).context("silence a node")
    }

    pub async fn find_nad(&self, namespace: &str, name: &str) -> Result<Option<Value>> {
        let found = self.api(&nads(), Some(namespace)).get_opt(name).await?;
        found.map(|object| serde_json::to_value(object).context("a value")).transpose()
    }

    pub async fn nad(&self, namespace: &str, name: &str) -> Result<Value> {
        wait::until(SOON, &format!("attachment {namespace}/{name}"), || self.find_nad(namespace, name)).await
    }

    /// Waits until the network is as it should be.
    pub async fn until(&self, name: &str, what: &str, look: impl Fn(&Value) -> bool) -> Result<Value> {
        wait::until(SOON, &format!("network {name}: {what}"), || async {
            let network = self.network(name).await?.context("the network is not there")?;
            ensure!(look(&network), "{:#}", json!([network["metadata"]["finalizers"], network["status"]]));
            Ok(Some(network))
        })
        .await
    }

    pub async fn condition(&self, name: &str, kind: &str, status: &str) -> Result<Value> {
        let what = format!("{kind} {status}");
        self.until(name, &what, |network| condition(network, kind).is_some_and(|it| it["status"] == status))
            .await
    }

    pub async fn reason(&self, name: &str, kind: &str, reason: &str) -> Result<Value> {
        let what = format!("{kind} because {reason}");
        self.until(name, &what, |network| condition(network, kind).is_some_and(|it| it["reason"] == reason))
            .await
    }

    pub async fn finalizer(&self, name: &str, finalizer: &str, there: bool) -> Result<()> {
        let has = |network: &Value| {
            network["metadata"]["finalizers"]
                .as_array()
                .is_some_and(|all| all.iter().any(|it| it == finalizer))
        };
        self.until(name, finalizer, |network| has(network) == there).await.map(drop)
    }

    pub async fn gone(&self, name: &str, within: Duration) -> Result<()> {
        wait::until(within, &format!("network {name} to go"), || async {
            let network = self.network(name).await?;
            ensure!(network.is_none(), "{:#}", network.unwrap_or_default());
            Ok(Some(()))
        })
        .await
    }

    pub async fn has_label(&self, node: &str, network: &str) -> Result<bool> {
        let object = self.api(&resource("", "v1", "Node", "nodes"), None).get(node).await?;
        Ok(object
            .labels()
            .get(&format!("network.patchbay.dev/{network}"))
            .is_some_and(|value| value == "true"))
    }

    pub async fn label(&self, node: &str, network: &str, there: bool) -> Result<()> {
        wait::until(SOON, &format!("label of {network} on {node}: {there}"), || async {
            Ok((self.has_label(node, network).await? == there).then_some(()))
        })
        .await
    }

    /// What the controller wrote since then, beside its Lease.
    pub fn writes(lab: &Lab, mark: lab::audit::AuditOffset) -> Result<Vec<String>> {
        let ours = |a: &lab::audit::AuditedRequest| {
            a.is_write() && a.user.ends_with("patchbay-controller") && a.resource != "leases"
        };
        let asked = lab.requests_since(mark)?.into_iter().filter(ours);
        Ok(asked
            .map(|a| format!("{} {} {}/{} {}", a.verb, a.resource, a.namespace, a.name, a.code))
            .collect())
    }

    /// Whether an event of this reason was told.
    pub async fn events_tell(&self, reason: &str) -> Result<()> {
        let api = self.api(&resource("events.k8s.io", "v1", "Event", "events"), Some("default"));
        wait::until(SOON, &format!("an event {reason}"), || async {
            let all = api.list(&ListParams::default()).await?;
            Ok(all.items.iter().any(|event| event.data["reason"] == reason).then_some(()))
        })
        .await
    }

    /// A controller that is the only one and leads. Whoever led before is dead: nobody waits for its Lease to end.
    pub async fn lead(&self, lab: &Lab) -> Result<Replica> {
        self.free_lease().await?;
        Replica::ready(lab, 1, &[]).await
    }

    pub async fn free_lease(&self) -> Result<()> {
        let leases = self
            .api(&resource("coordination.k8s.io", "v1", "Lease", "leases"), Some(e2e::patchbay::NAMESPACE));
        match leases.delete("patchbay-controller", &DeleteParams::default()).await {
            Err(error) if !is_missing(&error) => Err(error).context("free the Lease"),
            _ => Ok(()),
        }
    }

    fn pod_object(name: &str, networks: &str) -> Value {
        json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "annotations": {"k8s.v1.cni.cncf.io/networks": networks}},
            "spec": {"containers": [{"name": "c", "image": "none"}], "terminationGracePeriodSeconds": 0}})
    }

    /// Makes a pod, which nobody ever starts.
    pub async fn pod(&self, name: &str, networks: &str) -> Result<User> {
        let pod = self.pod_named(name);
        let object = Self::pod_object(name, networks);
        self.post(&pod.resource, Some(&self.namespace), &object)
            .await
            .with_context(|| format!("make pod {name}"))?;
        Ok(pod)
    }

    /// Asks whether there could be such a pod, and makes none.
    pub async fn rehearse(&self, name: &str, networks: &str) -> Result<()> {
        let object = serde_json::from_value(Self::pod_object(name, networks))?;
        let params = PostParams { dry_run: true, ..PostParams::default() };
        let api = self.api(&resource("", "v1", "Pod", "pods"), Some(&self.namespace));
        api.create(&params, &object).await.map(drop).context("rehearse a pod")
    }

    /// Which pods the webhook is asked about, beside its other conditions.
    pub async fn select_pods(&self, selector: &Value) -> Result<()> {
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
        let at = webhooks.position(|it| it["name"] == WEBHOOK).context("the webhook of pods")?;
        let patch = json!([
            {"op": "test", "path": format!("/webhooks/{at}/name"), "value": WEBHOOK},
            {"op": "add", "path": format!("/webhooks/{at}/objectSelector"), "value": selector},
        ]);
        let patch = Patch::Json::<()>(serde_json::from_value(patch)?);
        api.patch("patchbay", &PatchParams::default(), &patch).await.map(drop).context("select pods")
    }

    pub fn pod_named(&self, name: &str) -> User {
        User {
            resource: resource("", "v1", "Pod", "pods"),
            namespace: self.namespace.clone(),
            name: name.to_owned(),
        }
    }

    /// Makes a user of any kind.
    pub async fn user(&self, (user, object): (User, Value)) -> Result<User> {
        let user = User { namespace: self.namespace.clone(), ..user };
        let made = self.post(&user.resource, Some(&self.namespace), &object).await;
        made.with_context(|| format!("make {} {}", user.resource.kind, user.name))?;
        Ok(user)
    }

    /// Makes a pod that names this; whether the webhook refuses it.
    pub async fn refused(&self, name: &str, networks: &str) -> Result<bool> {
        let object = Self::pod_object(name, networks);
        match self.post(&resource("", "v1", "Pod", "pods"), Some(&self.namespace), &object).await {
            Ok(_) => Ok(false),
            Err(kube::Error::Api(status)) if status.message.contains("which is being deleted") => Ok(true),
            Err(error) => Err(error).context("neither made nor refused"),
        }
    }

    /// Deletes every pod of this test.
    pub async fn sweep_pods(&self) -> Result<()> {
        let params = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        let api = self.api(&resource("", "v1", "Pod", "pods"), Some(&self.namespace));
        api.delete_collection(&params, &ListParams::default()).await.map(drop).context("delete pods")
    }

    /// Deletes every object of a kind, however many there are: the API server ends a request after a minute.
    pub async fn sweep_all(&self, kind: &ApiResource) -> Result<()> {
        let params = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        let api = self.api(kind, Some(&self.namespace));
        wait::until(Duration::from_secs(900), &format!("every {} to be deleted", kind.kind), || async {
            let outcome = api.delete_collection(&params, &ListParams::default()).await;
            let left = api.list(&ListParams::default().limit(1)).await?;
            ensure!(left.items.is_empty(), "some are left: {outcome:?}");
            Ok(Some(()))
        })
        .await
    }

    /// Deletes every object of this test that can use a network, and what they made.
    pub async fn sweep_users(&self) -> Result<()> {
        for (user, _) in users::all() {
            let api = self.api(&user.resource, Some(&self.namespace));
            let deleted = api.delete_collection(&DeleteParams::background(), &ListParams::default()).await;
            deleted.with_context(|| format!("delete every {}", user.resource.kind))?;
        }
        self.sweep_pods().await
    }

    pub async fn uid(&self, user: &User) -> Result<String> {
        let object = self.api(&user.resource, Some(&self.namespace)).get(&user.name).await?;
        object.uid().context("a UID")
    }

    pub async fn remove(&self, user: &User) -> Result<()> {
        let params = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::background() };
        match self.api(&user.resource, Some(&user.namespace)).delete(&user.name, &params).await {
            Err(error) if is_missing(&error) => Ok(()),
            other => other.map(drop).with_context(|| format!("delete {}", user.name)),
        }
    }

    /// The webhook is called and answers: a network that cannot be is refused by it.
    pub async fn webhook_answers(&self) -> Result<()> {
        let object = json!({"apiVersion": "patchbay.dev/v1alpha1", "kind": "NodeNetwork", "metadata": {"name": "nobody"}});
        let reports = resource("patchbay.dev", "v1alpha1", "NodeNetwork", "nodenetworks");
        wait::until(Duration::from_secs(20), "the webhook to answer", || async {
            let refused = self.post(&reports, None, &object).await;
            ensure!(
                matches!(&refused, Err(kube::Error::Api(it)) if it.message.contains("there is no Node")),
                "{refused:?}"
            );
            Ok(Some(()))
        })
        .await
    }
}

/// Something that uses a network.
#[derive(Clone, Debug)]
pub struct User {
    pub resource: ApiResource,
    pub namespace: String,
    pub name: String,
}

pub fn condition<'a>(network: &'a Value, kind: &str) -> Option<&'a Value> {
    network["status"]["conditions"].as_array()?.iter().find(|condition| condition["type"] == kind)
}
