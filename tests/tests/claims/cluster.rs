//! A cluster without nodes: virt-controller creates launcher pods, and the test writes what kubelets, multus and
//! virt-handlers would.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use e2e::replica::Replica;
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
    core::{ApiResource, GroupVersionKind},
};
use lab::{Lab, wait};
use serde_json::{Value, json};

use crate::TIMEOUT;

pub const NETWORKS: &str = "k8s.v1.cni.cncf.io/networks";

pub fn resource(group: &str, version: &str, kind: &str, plural: &str) -> ApiResource {
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural)
}

pub fn claims() -> ApiResource {
    resource("k8s.cni.cncf.io", "v1alpha1", "IPAMClaim", "ipamclaims")
}

pub fn blocks() -> ApiResource {
    resource("patchbay.dev", "v1alpha1", "IPBlock", "ipblocks")
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

pub fn pods() -> ApiResource {
    resource("", "v1", "Pod", "pods")
}

pub fn vms() -> ApiResource {
    resource("kubevirt.io", "v1", "VirtualMachine", "virtualmachines")
}

pub fn vmis() -> ApiResource {
    resource("kubevirt.io", "v1", "VirtualMachineInstance", "virtualmachineinstances")
}

pub fn is_not_found(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.is_not_found())
}

/// The cluster as one test sees it, with its own namespace.
#[derive(Clone)]
pub struct TestCluster {
    pub client: Client,
    pub namespace: String,
}

/// A machine with the pod network and these secondary networks: logical name and NAD.
pub fn virtual_machine(name: &str, secondary: &[(&str, &str)]) -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": name},
        "spec": {"runStrategy": "Always", "template": {
            "metadata": {"labels": {"kubevirt.io/domain": name}},
            "spec": instance_spec(secondary),
        }},
    })
}

pub fn instance_spec(secondary: &[(&str, &str)]) -> Value {
    let mut interfaces = vec![json!({"name": "default", "masquerade": {}})];
    let mut networks = vec![json!({"name": "default", "pod": {}})];
    for (name, nad) in secondary {
        interfaces.push(json!({"name": name, "bridge": {}}));
        networks.push(json!({"name": name, "multus": {"networkName": nad}}));
    }
    json!({
        "domain": {
            "devices": {"disks": [{"name": "root", "disk": {"bus": "virtio"}}], "interfaces": interfaces},
            "resources": {"requests": {"memory": "64Mi"}},
        },
        "networks": networks,
        "volumes": [{"name": "root", "containerDisk": {"image": "localhost/lab:1"}}],
    })
}

impl TestCluster {
    /// Creates the namespace of a test.
    pub async fn new(lab: &Lab, namespace: &str) -> Result<Self> {
        let cluster = Self { client: lab.client().await?, namespace: namespace.to_owned() };
        let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}});
        cluster.apply_in(&resource("", "v1", "Namespace", "namespaces"), None, &object).await?;
        let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}});
        cluster.apply(&resource("", "v1", "ServiceAccount", "serviceaccounts"), &account).await?;
        cluster.install_nad_crd().await?;
        Ok(cluster)
    }

    async fn install_nad_crd(&self) -> Result<()> {
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
        self.apply_in(&crds(), None, &crd).await?;
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &nads());
        wait::until(TIMEOUT, "the NAD kind to be served", || async {
            Ok(Some(api.list(&ListParams::default().limit(1)).await?))
        })
        .await
        .map(drop)
    }

    /// A BridgeNetwork with persistent addresses, whose NAD in the namespace of the test has its name.
    pub async fn create_network(&self, name: &str, subnets: &[&str]) -> Result<()> {
        let object = json!({
            "apiVersion": "patchbay.dev/v1alpha1", "kind": "BridgeNetwork", "metadata": {"name": name},
            "spec": {"attachment": {"namespaces": [self.namespace]}, "ipam": {"subnets": subnets, "persistent": true}},
        });
        self.apply_in(&bridge_networks(), None, &object).await?;
        wait::until(TIMEOUT, &format!("NAD {name}"), || async {
            Ok(self.get(&nads(), name).await?.filter(|nad| {
                nad["spec"]["config"].as_str().is_some_and(|text| text.contains("allowPersistentIPs"))
            }))
        })
        .await
        .map(drop)
    }

    pub async fn create_nad(&self, name: &str, config: &str) -> Result<()> {
        let object = json!({"apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
            "metadata": {"name": name}, "spec": {"config": config}});
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

    pub async fn delete(&self, resource: &ApiResource, name: &str, params: &DeleteParams) -> Result<()> {
        match self.api(resource).delete(name, params).await {
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

    pub async fn create_vm(&self, vm: &Value) -> Result<Value> {
        let created = self.create(&vms(), vm).await.context("create the VM")?;
        Ok(serde_json::to_value(created)?)
    }

    /// Waits until the claim exists and satisfies a condition.
    pub async fn wait_for_claim(&self, name: &str, holds: impl Fn(&Value) -> bool) -> Result<Value> {
        wait::until(TIMEOUT, &format!("IPAMClaim {}/{name}", self.namespace), || async {
            let claim = self.get(&claims(), name).await?.context("it does not exist")?;
            ensure!(holds(&claim), "{claim:#}");
            Ok(Some(claim))
        })
        .await
    }

    /// Waits until the claim has this many addresses.
    pub async fn wait_for_addresses(&self, name: &str, count: usize) -> Result<Value> {
        self.wait_for_claim(name, |claim| addresses(claim).len() == count).await
    }

    /// Waits until the allocation failed with this reason. Returns the message.
    pub async fn wait_for_failure(&self, name: &str, reason: &str) -> Result<String> {
        let claim = self.wait_for_claim(name, |claim| condition(claim)["reason"] == reason).await?;
        ensure!(condition(&claim)["status"] == "False" && addresses(&claim).is_empty(), "{claim:#}");
        Ok(condition(&claim)["message"].as_str().context("message")?.to_owned())
    }

    pub async fn wait_until_gone(&self, resource: &ApiResource, name: &str) -> Result<()> {
        wait::until(TIMEOUT, &format!("{} {name} to be deleted", resource.kind), || async {
            let left = self.get(resource, name).await?;
            ensure!(left.is_none(), "{:#}", left.unwrap_or_default());
            Ok(Some(()))
        })
        .await
    }

    /// Waits for the launcher pod of the instance that runs now.
    pub async fn wait_for_launcher(&self, vm: &str) -> Result<Value> {
        wait::until(TIMEOUT, &format!("a launcher of {vm}"), || async {
            let Some(vmi) = self.get(&vmis(), vm).await? else { return Ok(None) };
            let uid = vmi["metadata"]["uid"].as_str().context("metadata.uid")?;
            let params = ListParams::default().labels(&format!("kubevirt.io/created-by={uid}"));
            let all = self.api(&pods()).list(&params).await?;
            let mut live = all.items.into_iter().filter(|pod| pod.metadata.deletion_timestamp.is_none());
            Ok(live.next().map(serde_json::to_value).transpose()?)
        })
        .await
    }

    /// Waits for an event with this reason. Returns its note.
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

    /// The reservations for a claim: addresses in the blocks of the controller.
    pub async fn reservations(&self, uid: &Value) -> Result<Vec<String>> {
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &blocks());
        let mut found = Vec::new();
        for block in api.list(&ListParams::default()).await?.items {
            let claimed = block.data["status"]["claims"].as_array().cloned().unwrap_or_default();
            ensure!(
                claimed.is_empty() || block.data["spec"]["holder"]["node"] == "ipamclaims/patchbay",
                "{}",
                block.name_any()
            );
            let ours = claimed.iter().filter(|claimed| claimed["uid"] == *uid);
            found.extend(ours.filter_map(|claimed| claimed["address"].as_str().map(str::to_owned)));
        }
        found.sort();
        Ok(found)
    }

    /// Starts a controller and waits until it leads. The previous leader must be dead: its Lease is deleted, not awaited.
    pub async fn start_leader(&self, lab: &Lab) -> Result<Replica> {
        self.start_leader_with(lab, &[]).await
    }

    /// The same with more arguments.
    pub async fn start_leader_with(&self, lab: &Lab, arguments: &'static [&'static str]) -> Result<Replica> {
        let leases = resource("coordination.k8s.io", "v1", "Lease", "leases");
        let api: Api<DynamicObject> =
            Api::namespaced_with(self.client.clone(), e2e::patchbay::NAMESPACE, &leases);
        match api.delete("patchbay-controller", &DeleteParams::default()).await {
            Err(error) if !is_not_found(&error) => return Err(error).context("delete the Lease"),
            _ => {}
        }
        let replica = Replica::start_ready(lab, 1, arguments).await?;
        // The first leader creates it. A launcher pod that is created before has no reference.
        e2e::patchbay::wait_for_pod_webhook(lab).await?;
        Ok(replica)
    }

    /// Waits until the controller has written nothing for [`QUIET`]. Returns the offset from then on.
    pub async fn wait_until_quiet(lab: &Lab) -> Result<lab::audit::AuditOffset> {
        e2e::quiet::wait_until_quiet(lab, QUIET, e2e::quiet::is_controller_write).await
    }

    /// The writes of the controller since the offset, without its Lease and its certificates.
    pub fn controller_writes(lab: &Lab, offset: lab::audit::AuditOffset) -> Result<Vec<String>> {
        let others =
            ["leases", "secrets", "validatingwebhookconfigurations", "mutatingwebhookconfigurations"];
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

pub fn addresses(claim: &Value) -> Vec<String> {
    let ips = claim["status"]["ips"].as_array().cloned().unwrap_or_default();
    ips.iter().filter_map(|ip| ip.as_str().map(str::to_owned)).collect()
}

pub fn condition(claim: &Value) -> Value {
    let conditions = claim["status"]["conditions"].as_array().cloned().unwrap_or_default();
    conditions.into_iter().find(|one| one["type"] == "IPsAllocated").unwrap_or_default()
}

/// The claims that the networks annotation of a pod refers to.
pub fn references(pod: &Value) -> Result<Vec<String>> {
    let text = pod["metadata"]["annotations"][NETWORKS].as_str().context("the networks annotation")?;
    let elements: Vec<Value> = serde_json::from_str(text)?;
    Ok(elements
        .iter()
        .filter_map(|element| element["ipam-claim-reference"].as_str().map(str::to_owned))
        .collect())
}

/// How long something that must not happen is watched for.
pub const QUIET: Duration = Duration::from_secs(3);
