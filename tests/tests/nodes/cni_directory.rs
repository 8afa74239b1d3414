//! The directory of CNI plugins on a node.

use anyhow::{Result, ensure};
use e2e::patchbay;
use kube::Client;
use lab::Lab;

const DIRECTORY: &str = "/opt/cni/bin";
const PLUGINS: [&str; 2] = ["/opt/cni/bin/patchbay-bridge", "/opt/cni/bin/patchbay-ipam"];

pub async fn the_plugin_is_installed_into_a_directory_of_another_user(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let node = lab.node("node-1");
    let owner = node.output(&["stat", "-c", "%u:%g", DIRECTORY])?;
    // The owner after an install from the official archives of the CNI plugins or with Kubespray.
    node.output(&["chown", "1001:1001", DIRECTORY])?;
    let outcome = check_installation(&lab, &client).await;
    node.output(&["chown", owner.trim(), DIRECTORY])?;
    outcome
}

async fn check_installation(lab: &Lab, client: &Client) -> Result<()> {
    let node = lab.node("node-1");
    ensure!(
        node.output(&["stat", "-c", "%a", DIRECTORY])?.trim() == "755",
        "only the owner must be able to write"
    );
    node.output(&["rm", "-f", PLUGINS[0], PLUGINS[1]])?;
    patchbay::restart_daemon(lab, client, "node-1").await?;
    for plugin in PLUGINS {
        let installed = node.output(&["stat", "-c", "%u %a", plugin])?;
        ensure!(installed.trim() == "0 755", "{plugin}: {installed}");
    }
    ensure!(node.output(&["stat", "-c", "%u", DIRECTORY])?.trim() == "1001", "the directory keeps its owner");
    Ok(())
}
