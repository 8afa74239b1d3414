//! The product in a lab: installed from its image and its manifests, as a user would do it.

use std::{fmt::Write as _, path::PathBuf, time::Duration};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::{apps::v1::DaemonSet, core::v1::Pod};
use kube::{
    Api, Client, ResourceExt,
    api::{ListParams, Patch, PatchParams},
};
use lab::{Lab, wait};
use serde_json::{Value, json};

use crate::{baseline::Release, repository};

/// The image that the manifests name.
pub const IMAGE_REFERENCE: &str = concat!("localhost/patchbay:v", env!("CARGO_PKG_VERSION"));
/// Where it is installed.
pub const NAMESPACE: &str = "patchbay-system";

/// Where `make image` puts the image.
pub fn image_tar() -> PathBuf {
    repository().join("target/image/patchbay.tar")
}

/// The directory of the manifests.
pub fn manifests_dir() -> PathBuf {
    repository().join("deploy/install")
}

/// Loads the image, applies the manifests, and waits until both programs are ready everywhere.
pub async fn install(lab: &Lab) -> Result<()> {
    install_release(lab, &Release::current()).await
}

/// The same with any version of the product. Another one that is installed already is upgraded or downgraded.
pub async fn install_release(lab: &Lab, release: &Release) -> Result<()> {
    let Release { image, manifests } = release;
    ensure!(image.exists(), "{} does not exist: run `make image`", image.display());
    lab.load_image(image)?;
    lab.kubectl(&["apply", "-f", manifests.to_str().context("a path in UTF-8")?])?;
    wait_ready(lab).await
}

/// Waits until both programs are ready and every node has its NodeNetwork.
pub async fn wait_ready(lab: &Lab) -> Result<()> {
    for what in ["deployment/patchbay-controller", "daemonset/patchbay-node"] {
        lab.kubectl(&["-n", NAMESPACE, "rollout", "status", what, "--timeout=90s"])?;
    }
    let nodes = lab.nodes();
    wait::until(Duration::from_secs(10), "a NodeNetwork for each node", || async {
        let names = lab.kubectl(&["get", "nodenetworks", "-o", "name"])?;
        Ok(nodes.iter().all(|n| names.contains(n.as_str())).then_some(()))
    })
    .await
}

/// Changes the pods of the node daemons, all at the same time, and does not wait for them.
pub async fn patch_daemons(client: &Client, pods: Value) -> Result<()> {
    let daemons: Api<DaemonSet> = Api::namespaced(client.clone(), NAMESPACE);
    let at_once = json!({"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "100%"}});
    let patch = json!({"spec": {"updateStrategy": at_once, "template": {"spec": pods}}});
    let patch = Patch::Strategic(&patch);
    daemons.patch("patchbay-node", &PatchParams::default(), &patch).await.context("change the DaemonSet")?;
    Ok(())
}

/// The pod of a node's daemon.
pub async fn daemon_pod(client: &Client, node: &str) -> Result<String> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let all = pods.list(&ListParams::default().labels("app.kubernetes.io/component=node")).await?;
    let on_node = |p: &&Pod| p.spec.as_ref().and_then(|s| s.node_name.as_deref()) == Some(node);
    all.items.iter().find(on_node).map(ResourceExt::name_any).context("the node's daemon")
}

/// The lab and the product in it, for a failure's text.
pub fn dump(lab: &Lab) -> String {
    let mut text = lab.dump();
    let mut tell = |what: &str, arguments: &[&str]| {
        let found = lab.kubectl(arguments).unwrap_or_else(|e| format!("{e:#}"));
        let _ = writeln!(text, "--- {what}\n{}", found.trim_end());
    };
    tell("bridgenetworks", &["get", "bridgenetworks", "-o", "yaml", "--request-timeout=5s"]);
    tell("nodenetworks", &["get", "nodenetworks", "-o", "yaml", "--request-timeout=5s"]);
    for component in ["controller", "node"] {
        let selector = format!("app.kubernetes.io/component={component}");
        tell(
            component,
            &["-n", NAMESPACE, "logs", "-l", &selector, "--tail=40", "--prefix", "--request-timeout=5s"],
        );
    }
    text
}
