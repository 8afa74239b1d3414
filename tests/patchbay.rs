//! Patchbay in a lab: installed from its image and manifests, as a user would do it.

use std::{
    fmt::Write as _,
    path::PathBuf,
    time::{Duration, UNIX_EPOCH},
};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::{apps::v1::DaemonSet, core::v1::Pod};
use kube::{
    Api, Client, ResourceExt,
    api::{ListParams, Patch, PatchParams},
};
use lab::{Lab, wait};
use serde_json::{Value, json};

use crate::{baseline::Release, repository};

/// The image reference in the manifests.
pub const IMAGE_REFERENCE: &str = concat!("localhost/patchbay:v", env!("CARGO_PKG_VERSION"));
/// The namespace of Patchbay's own pods.
pub const NAMESPACE: &str = "patchbay-system";

const WORKLOADS: [&str; 2] = ["deployment/patchbay-controller", "daemonset/patchbay-node"];

/// The image archive that `make image` builds.
pub fn image_tar() -> PathBuf {
    repository().join("target/image/patchbay.tar")
}

/// The directory of the manifests.
pub fn manifests_dir() -> PathBuf {
    repository().join("deploy/install")
}

/// Loads the image, applies the manifests, and waits until controller and daemons are ready.
pub async fn install(lab: &Lab) -> Result<()> {
    let release = Release::current();
    let reused = lab.kubectl(&["-n", NAMESPACE, "get", "daemonset", "patchbay-node"]).is_ok();
    install_release(lab, &release).await?;
    if !reused {
        return wait_for_pod_webhook(lab).await;
    }
    // The pods of an earlier run keep its image until their template changes.
    let built = std::fs::metadata(&release.image)?.modified()?.duration_since(UNIX_EPOCH)?;
    let annotations = json!({"lab/image-built": built.as_millis().to_string()});
    let patch = json!({"spec": {"template": {"metadata": {"annotations": annotations}}}}).to_string();
    for workload in WORKLOADS {
        lab.kubectl(&["-n", NAMESPACE, "patch", workload, "-p", &patch])?;
    }
    wait_ready(lab).await?;
    wait_for_pod_webhook(lab).await
}

/// The same with any version of the product. Another one that is installed already is upgraded or downgraded.
pub async fn install_release(lab: &Lab, release: &Release) -> Result<()> {
    let Release { image, manifests } = release;
    ensure!(image.exists(), "{} does not exist; run `make image`", image.display());
    lab.load_image(image)?;
    let generation = |workload: &str| {
        let arguments = ["-n", NAMESPACE, "get", workload, "-o", "jsonpath={.metadata.generation}"];
        lab.kubectl(&arguments).unwrap_or_default()
    };
    let before = WORKLOADS.map(generation);
    lab.kubectl(&["apply", "-f", manifests.to_str().context("the path is not UTF-8")?])?;
    for (workload, before) in WORKLOADS.into_iter().zip(before) {
        // Versions in development have the same image tag, so that their manifests can be equal.
        if !before.is_empty() && generation(workload) == before {
            lab.kubectl(&["-n", NAMESPACE, "rollout", "restart", workload])?;
        }
    }
    wait_ready(lab).await
}

/// Waits until the leader has created the webhook configuration of launcher pods.
pub async fn wait_for_pod_webhook(lab: &Lab) -> Result<()> {
    wait::until(Duration::from_secs(60), "the MutatingWebhookConfiguration patchbay", || async {
        Ok(lab.kubectl(&["get", "mutatingwebhookconfiguration", "patchbay"]).is_ok().then_some(()))
    })
    .await
}

/// Waits until controller and daemons are ready and every node has a NodeNetwork.
pub async fn wait_ready(lab: &Lab) -> Result<()> {
    for workload in WORKLOADS {
        lab.kubectl(&["-n", NAMESPACE, "rollout", "status", workload, "--timeout=90s"])?;
    }
    let nodes = lab.nodes();
    wait::until(Duration::from_secs(60), "a NodeNetwork for each node", || async {
        let names = lab.kubectl(&["get", "nodenetworks", "-o", "name"])?;
        Ok(nodes.iter().all(|n| names.contains(n.as_str())).then_some(()))
    })
    .await
}

/// Patches the pod template of the daemons and replaces all of them in parallel; does not wait for them.
pub async fn patch_daemons(client: &Client, pod_spec: Value) -> Result<()> {
    let daemons: Api<DaemonSet> = Api::namespaced(client.clone(), NAMESPACE);
    let strategy = json!({"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "100%"}});
    let patch = json!({"spec": {"updateStrategy": strategy, "template": {"spec": pod_spec}}});
    let patch = Patch::Strategic(&patch);
    daemons.patch("patchbay-node", &PatchParams::default(), &patch).await.context("patch the DaemonSet")?;
    Ok(())
}

/// Changes the container of the daemons, and waits until all of them run with it.
pub async fn patch_daemon_container(lab: &Lab, change: Value) -> Result<()> {
    let mut container = change;
    container["name"] = json!("node");
    patch_daemons(&lab.client().await?, json!({"containers": [container]})).await?;
    wait_ready(lab).await
}

/// Runs a test with a variable in the environment of the daemons.
pub async fn with_daemon_variable<F>(lab: &Lab, name: &str, value: &str, test: F) -> Result<()>
where
    F: AsyncFnOnce() -> Result<()>,
{
    with_daemon_variables(lab, &[(name, value)], test).await
}

/// The same with several variables.
pub async fn with_daemon_variables<F>(lab: &Lab, variables: &[(&str, &str)], test: F) -> Result<()>
where
    F: AsyncFnOnce() -> Result<()>,
{
    let set: Vec<Value> =
        variables.iter().map(|(name, value)| json!({"name": name, "value": value})).collect();
    let unset: Vec<Value> =
        variables.iter().map(|(name, _)| json!({"name": name, "$patch": "delete"})).collect();
    patch_daemon_container(lab, json!({"env": set})).await?;
    let outcome = test().await;
    patch_daemon_container(lab, json!({"env": unset})).await?;
    outcome
}

/// The name of the daemon's pod on a node.
pub async fn daemon_pod(client: &Client, node: &str) -> Result<String> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let all = pods.list(&ListParams::default().labels("app.kubernetes.io/component=node")).await?;
    let on_node = |p: &&Pod| p.spec.as_ref().and_then(|s| s.node_name.as_deref()) == Some(node);
    all.items
        .iter()
        .filter(|pod| pod.metadata.deletion_timestamp.is_none())
        .find(on_node)
        .map(ResourceExt::name_any)
        .with_context(|| format!("no daemon pod on {node}"))
}

/// The pid of the daemon on a node, as a pid of the node.
pub fn daemon_pid(lab: &Lab, node: &str) -> Result<String> {
    let script = "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline 2>/dev/null | \
                  grep -q '^/usr/bin/patchbay node' && echo ${p#/proc/}; done; true";
    let text = lab.node(node).output(&["sh", "-c", script])?;
    let pid = text.lines().next().map(|pid| pid.trim().to_owned());
    pid.filter(|pid| !pid.is_empty()).with_context(|| format!("no daemon runs on {node}"))
}

/// The output of `patchbay probe` of the daemon on a node, also while the container runtime does not answer.
pub fn probe_daemon(lab: &Lab, node: &str, probe: &str) -> Result<String> {
    let pid = daemon_pid(lab, node)?;
    lab.node(node).output(&["nsenter", "-t", &pid, "-m", "/usr/bin/patchbay", "probe", probe])
}

/// Deletes the daemon's pod on a node without a grace period, and waits until the new one is ready.
pub async fn restart_daemon(lab: &Lab, client: &Client, node: &str) -> Result<()> {
    let old = daemon_pod(client, node).await?;
    lab.kubectl(&["-n", NAMESPACE, "delete", "pod", &old, "--force", "--grace-period=0"])?;
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    wait::until(Duration::from_secs(90), &format!("a new daemon on {node} that is ready"), || async {
        let Ok(name) = daemon_pod(client, node).await else { return Ok(None) };
        let pod = pods.get_opt(&name).await?.filter(|_| name != old);
        let conditions = pod.and_then(|pod| pod.status?.conditions).unwrap_or_default();
        Ok(conditions.iter().any(|one| one.type_ == "Ready" && one.status == "True").then_some(()))
    })
    .await
}

/// Diagnostics of the lab and of Patchbay, for the error of a failed test.
pub fn dump(lab: &Lab) -> String {
    let mut text = lab.dump();
    let mut section = |title: &str, arguments: &[&str]| {
        let output = lab.kubectl(arguments).unwrap_or_else(|e| format!("{e:#}"));
        let _ = writeln!(text, "--- {title}\n{}", output.trim_end());
    };
    section("bridgenetworks", &["get", "bridgenetworks", "-o", "yaml", "--request-timeout=5s"]);
    section("nodenetworks", &["get", "nodenetworks", "-o", "yaml", "--request-timeout=5s"]);
    section("networkservices", &["get", "networkservices", "-A", "-o", "yaml", "--request-timeout=5s"]);
    for component in ["controller", "node"] {
        let selector = format!("app.kubernetes.io/component={component}");
        section(
            component,
            &["-n", NAMESPACE, "logs", "-l", &selector, "--tail=40", "--prefix", "--request-timeout=5s"],
        );
    }
    text
}
