//! The directory of CNI plugins on a node.

use std::time::Duration;

use anyhow::{Result, ensure};
use e2e::patchbay::{self, NAMESPACE};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client, api::DeleteParams};
use lab::{Lab, wait};

const DIRECTORY: &str = "/opt/cni/bin";
const PLUGINS: [&str; 2] = ["/opt/cni/bin/patchbay-bridge", "/opt/cni/bin/patchbay-ipam"];

pub async fn the_plugin_is_installed_into_a_directory_of_another_user(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let node = lab.node("node-1");
    let owner = node.output(&["stat", "-c", "%u:%g", DIRECTORY])?;
    // The owner after an install from the official archives of the CNI plugins or with Kubespray.
    node.output(&["chown", "1001:1001", DIRECTORY])?;
    let outcome = restart_daemon(&lab, &client).await;
    node.output(&["chown", owner.trim(), DIRECTORY])?;
    outcome
}

async fn restart_daemon(lab: &Lab, client: &Client) -> Result<()> {
    let node = lab.node("node-1");
    ensure!(
        node.output(&["stat", "-c", "%a", DIRECTORY])?.trim() == "755",
        "only the owner must be able to write"
    );
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let old = patchbay::daemon_pod(client, "node-1").await?;
    node.output(&["rm", "-f", PLUGINS[0], PLUGINS[1]])?;
    pods.delete(&old, &DeleteParams::default()).await?;
    wait::until(Duration::from_secs(90), "a new daemon that is ready", || async {
        let Ok(name) = patchbay::daemon_pod(client, "node-1").await else { return Ok(None) };
        let pod = pods.get_opt(&name).await?.filter(|_| name != old);
        let conditions = pod.and_then(|pod| pod.status?.conditions).unwrap_or_default();
        Ok(conditions.iter().any(|one| one.type_ == "Ready" && one.status == "True").then_some(()))
    })
    .await?;
    for plugin in PLUGINS {
        let installed = node.output(&["stat", "-c", "%u %a", plugin])?;
        ensure!(installed.trim() == "0 755", "{plugin}: {installed}");
    }
    ensure!(node.output(&["stat", "-c", "%u", DIRECTORY])?.trim() == "1001", "the directory keeps its owner");
    Ok(())
}
