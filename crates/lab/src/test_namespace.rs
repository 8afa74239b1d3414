//! A fresh Kubernetes namespace per test, with the pods in it. A failed test's error carries a dump of the lab.

use std::{process::Command, time::Duration};

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, ListParams, PostParams},
};
use serde_json::{Value, json};

use crate::{image::LAB_IMAGE, lab::Lab, machine::capture, program::Programs, wait};

/// A lab and a namespace in it that one test owns.
#[derive(Clone)]
pub struct TestNamespace {
    pub lab: Lab,
    pub client: Client,
    pub namespace: String,
}

/// Builds the object of a test pod.
#[derive(Clone, Debug)]
pub struct PodBuilder {
    name: String,
    object: Value,
}

/// A pod that sleeps until it is terminated.
pub fn pod(name: &str) -> PodBuilder {
    PodBuilder {
        name: name.to_owned(),
        object: json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "annotations": {}, "labels": {"app": name}},
            "spec": {
                "terminationGracePeriodSeconds": 2,
                "containers": [{"name": "main", "image": LAB_IMAGE, "imagePullPolicy": "Never"}],
                "tolerations": [{"operator": "Exists"}],
            },
        }),
    }
}

impl PodBuilder {
    /// Binds the pod to a node without the scheduler.
    #[must_use]
    pub fn on(mut self, node: &str) -> Self {
        self.object["spec"]["nodeName"] = json!(node);
        self
    }

    #[must_use]
    pub fn annotation(mut self, key: &str, value: &str) -> Self {
        self.object["metadata"]["annotations"][key] = json!(value);
        self
    }

    #[must_use]
    pub fn label(mut self, key: &str, value: &str) -> Self {
        self.object["metadata"]["labels"][key] = json!(value);
        self
    }

    /// Adds a capability to the container, such as `NET_ADMIN`.
    #[must_use]
    pub fn capability(mut self, name: &str) -> Self {
        self.object["spec"]["containers"][0]["securityContext"]["capabilities"]["add"] = json!([name]);
        self
    }

    /// The pod is ready while this command succeeds in its container; checked every second.
    #[must_use]
    pub fn ready_if(mut self, argv: &[&str]) -> Self {
        self.object["spec"]["containers"][0]["readinessProbe"] =
            json!({"exec": {"command": argv}, "periodSeconds": 1, "failureThreshold": 1});
        self
    }

    /// Sets the hostname of the pod and the name of the headless Service under which DNS knows it.
    #[must_use]
    pub fn hostname(mut self, hostname: &str, subdomain: &str) -> Self {
        self.object["spec"]["hostname"] = json!(hostname);
        self.object["spec"]["subdomain"] = json!(subdomain);
        self
    }

    /// The finished object.
    #[must_use]
    pub fn object(self) -> Value {
        self.object
    }

    /// Replaces the container's command.
    #[must_use]
    pub fn command(mut self, argv: &[&str]) -> Self {
        self.object["spec"]["containers"][0]["command"] = json!(argv);
        self
    }
}

/// Runs a test in a fresh namespace and deletes the namespace afterwards. The error of a failed test carries a dump.
pub async fn with_namespace<F>(lab: &Lab, name: &str, test: F) -> Result<()>
where
    F: AsyncFnOnce(&TestNamespace) -> Result<()>,
{
    let client = lab.client().await?;
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let prefix: String =
        name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).take(40).collect();
    let object: Namespace = serde_json::from_value(json!({
        "metadata": {"generateName": format!("{prefix}-"), "labels": {"lab": "test"}},
    }))?;
    let namespace =
        namespaces.create(&PostParams::default(), &object).await.context("create a namespace")?.name_any();
    let ns = TestNamespace { lab: lab.clone(), client, namespace };
    let outcome = test(&ns).await.map_err(|e| e.context(lab.dump()));
    let params = DeleteParams::background().grace_period(0);
    // Pods first, with no grace period: namespace deletion would give each its full grace period.
    let _ = ns.pods().delete_collection(&params, &ListParams::default()).await;
    let deleted = namespaces.delete(&ns.namespace, &params).await.context("delete the namespace");
    // The test's error takes precedence over an error of the clean-up.
    outcome.and(deleted.map(|_| ()))
}

impl TestNamespace {
    pub fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Creates a pod without waiting for it.
    pub async fn create_pod(&self, pod: PodBuilder) -> Result<Pod> {
        let object: Pod = serde_json::from_value(pod.object).context("build the pod")?;
        // The controller manager creates the namespace's default ServiceAccount a moment after the namespace.
        wait::until(Duration::from_secs(60), &format!("pod {} to be admitted", pod.name), || async {
            match self.pods().create(&PostParams::default(), &object).await {
                Ok(created) => Ok(Some(created)),
                Err(kube::Error::Api(e)) if e.is_forbidden() && e.message.contains("serviceaccount") => {
                    Ok(None)
                }
                Err(e) => Err(e.into()),
            }
        })
        .await
    }

    /// Waits until a pod is Ready.
    pub async fn wait_pod_ready(&self, name: &str) -> Result<Pod> {
        wait::until(Duration::from_secs(60), &format!("pod {name} to be Ready"), || async {
            Ok(self.pods().get_opt(name).await?.filter(is_ready))
        })
        .await
    }

    /// Creates a pod and waits until it is Ready.
    pub async fn start_pod(&self, pod: PodBuilder) -> Result<Pod> {
        let name = pod.name.clone();
        self.create_pod(pod).await?;
        self.wait_pod_ready(&name).await
    }

    /// Runs a command in a pod and returns its output.
    pub fn exec(&self, pod: &str, argv: &[&str]) -> Result<String> {
        let mut arguments = vec!["-n", &self.namespace, "exec", pod, "--"];
        arguments.extend(argv);
        self.lab.kubectl(&arguments)
    }
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|s| s.conditions.as_deref()).unwrap_or_default();
    conditions.iter().any(|c| c.type_ == "Ready" && c.status == "True")
}

impl Lab {
    /// Runs kubectl as administrator and returns its output.
    pub fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        let program = Programs::prepare()?.path("kubectl")?;
        capture(Command::new(program).args(arguments).env("KUBECONFIG", self.kubeconfig()))
    }
}
