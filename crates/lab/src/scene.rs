//! A place for one test: a fresh namespace in a lab, pods in it, and everything told when the test fails.

use std::{process::Command, time::Duration};

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, ListParams, PostParams},
};
use serde_json::{Value, json};

use crate::{image::LAB_IMAGE, lab::Lab, machine::capture, program::Programs, wait};

/// A lab and a namespace of one's own in it.
#[derive(Clone)]
pub struct Scene {
    pub lab: Lab,
    pub client: Client,
    pub namespace: String,
}

/// A pod to be made.
#[derive(Clone, Debug)]
pub struct PodSpec {
    name: String,
    object: Value,
}

/// A pod that pauses until told to stop.
pub fn pod(name: &str) -> PodSpec {
    PodSpec {
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

impl PodSpec {
    /// Puts it on a node, past the scheduler.
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

    /// Gives its container a capability, such as NET_ADMIN.
    #[must_use]
    pub fn capability(mut self, name: &str) -> Self {
        self.object["spec"]["containers"][0]["securityContext"]["capabilities"]["add"] = json!([name]);
        self
    }

    /// The object as it will be sent.
    #[must_use]
    pub fn object(self) -> Value {
        self.object
    }

    /// What it runs instead of pausing.
    #[must_use]
    pub fn command(mut self, argv: &[&str]) -> Self {
        self.object["spec"]["containers"][0]["command"] = json!(argv);
        self
    }
}

impl Scene {
    /// Runs a test in a fresh namespace; on failure its error carries a dump, and the namespace goes away in any case.
    pub async fn play<F>(lab: &Lab, name: &str, test: F) -> Result<()>
    where
        F: AsyncFnOnce(&Scene) -> Result<()>,
    {
        let client = lab.client().await?;
        let namespaces: Api<Namespace> = Api::all(client.clone());
        let prefix: String =
            name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).take(40).collect();
        let fresh: Namespace = serde_json::from_value(json!({
            "metadata": {"generateName": format!("{prefix}-"), "labels": {"lab": "scene"}},
        }))?;
        let namespace =
            namespaces.create(&PostParams::default(), &fresh).await.context("make a namespace")?.name_any();
        let scene = Self { lab: lab.clone(), client, namespace };
        let outcome = match test(&scene).await {
            Ok(()) => Ok(()),
            Err(e) => Err(e.context(lab.dump())),
        };
        let gone = DeleteParams::background().grace_period(0);
        // The pods first, and at once: a namespace that goes leaves each of them its full time to stop.
        let _ = scene.pods().delete_collection(&gone, &ListParams::default()).await;
        let deleted = namespaces.delete(&scene.namespace, &gone).await.context("delete the namespace");
        // Why the test failed says more than why its namespace stays.
        outcome.and(deleted.map(|_| ()))
    }

    pub fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Makes a pod; does not wait.
    pub async fn create(&self, spec: PodSpec) -> Result<Pod> {
        let pod: Pod = serde_json::from_value(spec.object).context("build the pod")?;
        // The namespace's ServiceAccount is made a moment after the namespace.
        wait::until(Duration::from_secs(30), &format!("pod {} to be accepted", spec.name), || async {
            match self.pods().create(&PostParams::default(), &pod).await {
                Ok(made) => Ok(Some(made)),
                Err(kube::Error::Api(e)) if e.is_forbidden() && e.message.contains("serviceaccount") => {
                    Ok(None)
                }
                Err(e) => Err(e.into()),
            }
        })
        .await
    }

    /// Waits until a pod runs and is ready.
    pub async fn ready(&self, name: &str) -> Result<Pod> {
        wait::until(Duration::from_secs(60), &format!("pod {name} to be ready"), || async {
            Ok(self.pods().get_opt(name).await?.filter(is_ready))
        })
        .await
    }

    /// Makes a pod and waits for it.
    pub async fn start(&self, spec: PodSpec) -> Result<Pod> {
        let name = spec.name.clone();
        self.create(spec).await?;
        self.ready(&name).await
    }

    /// Runs a command in a pod and returns what it printed.
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
    /// Runs kubectl as administrator and returns what it printed.
    pub fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        let program = Programs::prepare()?.path("kubectl")?;
        capture(Command::new(program).args(arguments).env("KUBECONFIG", self.kubeconfig()))
    }
}
