//! Pods as API objects, written in place of kubelets and multus.

use anyhow::{Context as _, Result};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod, ServiceAccount};
use kube::{
    Api, Client,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

/// How many Nodes the pods are distributed over.
const NODES: usize = 100;
/// Requests in flight.
const PARALLEL: usize = 64;

/// Whether a pod is ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readiness {
    Ready,
    Unready,
}

/// Writes pods of one namespace.
#[derive(Clone)]
pub struct PodWriter {
    client: Client,
    pub namespace: &'static str,
}

/// A pod to create.
pub struct NewPod {
    pub name: String,
    /// Its addresses and its node follow from it.
    pub number: usize,
    pub labels: Value,
    /// `namespace/name` of the NAD, if the pod has an address there.
    pub nad: Option<String>,
}

/// Creates the Nodes that the pods are on.
pub async fn create_nodes(client: &Client) -> Result<()> {
    let nodes: Api<Node> = Api::all(client.clone());
    for number in 0..NODES {
        let labels = json!({"topology.kubernetes.io/zone": format!("zone-{}", number % 3)});
        let node = serde_json::from_value(json!({"metadata": {"name": node(number), "labels": labels}}))?;
        nodes.create(&PostParams::default(), &node).await.context("create a Node")?;
    }
    Ok(())
}

fn node(number: usize) -> String {
    format!("node-{}", number % NODES)
}

impl PodWriter {
    /// Creates the namespace with the ServiceAccount that a controller would create in it.
    pub async fn create(client: &Client, namespace: &'static str) -> Result<Self> {
        let object: Namespace = serde_json::from_value(json!({"metadata": {"name": namespace}}))?;
        Api::all(client.clone())
            .create(&PostParams::default(), &object)
            .await
            .context("create a namespace")?;
        let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
        let account = serde_json::from_value(json!({"metadata": {"name": "default"}}))?;
        accounts.create(&PostParams::default(), &account).await.context("create a ServiceAccount")?;
        Ok(Self { client: client.clone(), namespace })
    }

    fn api(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), self.namespace)
    }

    /// Creates pods.
    pub async fn create_all(&self, pods: impl IntoIterator<Item = NewPod>) -> Result<()> {
        let pods = stream::iter(pods).map(|pod| async move { self.create_pod(&pod).await });
        pods.buffer_unordered(PARALLEL).try_collect().await
    }

    /// Creates a pod. It has no status yet.
    pub async fn create_pod(&self, pod: &NewPod) -> Result<()> {
        let NewPod { name, number, labels, nad } = pod;
        let status = nad.as_ref().map(|nad| {
            let status = json!([
                {"name": "default-network", "interface": "eth0", "ips": [primary(*number)], "default": true},
                {"name": nad, "interface": "net1", "ips": [secondary(*number)], "mac": "02:00:00:00:00:01"},
            ]);
            json!({"k8s.v1.cni.cncf.io/network-status": status.to_string()})
        });
        let container = json!({
            "name": "main", "image": "example/web:1", "ports": [{"name": "http", "containerPort": 8080}],
            "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}},
        });
        let object = serde_json::from_value(json!({
            "metadata": {"name": name, "labels": labels, "annotations": status},
            "spec": {
                "nodeName": node(*number), "containers": [container], "automountServiceAccountToken": false,
                "terminationGracePeriodSeconds": 30,
            },
        }))?;
        self.api()
            .create(&PostParams::default(), &object)
            .await
            .with_context(|| format!("create pod {name}"))?;
        Ok(())
    }

    /// Sets the status of pods, given by name and number.
    pub async fn set_all(
        &self,
        pods: impl IntoIterator<Item = (String, usize)>,
        readiness: Readiness,
    ) -> Result<()> {
        let pods =
            stream::iter(pods).map(|(name, number)| async move { self.set(&name, number, readiness).await });
        pods.buffer_unordered(PARALLEL).try_collect().await
    }

    /// Sets the status of a pod, as its kubelet does.
    pub async fn set(&self, name: &str, number: usize, readiness: Readiness) -> Result<()> {
        let ready = if readiness == Readiness::Ready { "True" } else { "False" };
        let condition = |kind: &str, status: &str| json!({"type": kind, "status": status});
        let patch = json!({"status": {
            "phase": "Running", "podIP": primary(number), "podIPs": [{"ip": primary(number)}],
            "conditions": [
                condition("Initialized", "True"), condition("Ready", ready),
                condition("ContainersReady", ready), condition("PodScheduled", "True"),
            ],
        }});
        let patch = Patch::Merge(&patch);
        let patched = self.api().patch_status(name, &PatchParams::default(), &patch).await;
        patched.with_context(|| format!("patch the status of pod {name}"))?;
        Ok(())
    }

    /// Deletes a pod. With a grace period it stays until its kubelet deletes it with none.
    pub async fn delete(&self, name: &str, grace_period: u32) -> Result<()> {
        let params = DeleteParams::default().grace_period(grace_period);
        self.api().delete(name, &params).await.with_context(|| format!("delete pod {name}"))?;
        Ok(())
    }

    pub async fn delete_all(&self, names: impl IntoIterator<Item = String>) -> Result<()> {
        let names = stream::iter(names).map(|name| async move { self.delete(&name, 0).await });
        names.buffer_unordered(PARALLEL).try_collect().await
    }
}

/// The address on the cluster network.
fn primary(number: usize) -> String {
    format!("10.{}.{}.{}", 128 + number / 62_500, number / 250 % 250, number % 250 + 1)
}

/// The address on the secondary network.
fn secondary(number: usize) -> String {
    format!("10.{}.{}.{}", 64 + number / 62_500, number / 250 % 250, number % 250 + 1)
}
