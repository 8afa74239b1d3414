//! The effective MTU of overlays: it rises only when spec.mtu changes.

use anyhow::{Context as _, Result, ensure};
use kube::api::DeleteParams;
use lab::Lab;
use serde_json::{Value, json};

use crate::{
    GONE,
    cluster::{Cluster, condition, resource},
    start,
};

fn overlay(cluster: &Cluster, vni: u32) -> Value {
    json!({"overlay": {"vni": vni}, "nodeSelector": cluster.selector(),
        "attachment": {"namespaces": [cluster.namespace]}})
}

/// Waits until the controller reports that a higher MTU is possible, and checks that it has not been applied.
async fn held(cluster: &Cluster, name: &str, mtu: i32, message: &str) -> Result<()> {
    let network = cluster.reason(name, "MtuReduced", "HigherPossible").await?;
    let reported = &condition(&network, "MtuReduced").context("MtuReduced")?["message"];
    println!("{reported}");
    ensure!(reported.as_str() == Some(message), "{reported}");
    ensure!(network["status"]["mtu"] == mtu, "{network:#}");
    Ok(())
}

async fn delete_node(cluster: &Cluster, name: &str) -> Result<()> {
    let nodes = resource("", "v1", "Node", "nodes");
    cluster.api(&nodes, None).delete(name, &DeleteParams::default()).await?;
    Ok(())
}

pub async fn an_overlay_keeps_its_mtu_when_a_node_with_a_small_mtu_leaves(lab: Lab) -> Result<()> {
    let (cluster, replica) = start(&lab, "mtu").await?;
    let outcome = async {
        cluster.node("mtu-a", 1500).await?;
        cluster.node("mtu-b", 1400).await?;
        cluster.create("mtu-unset", overlay(&cluster, 41)).await?;
        let mut explicit = overlay(&cluster, 42);
        explicit["mtu"] = json!(1450);
        cluster.create("mtu-explicit", explicit).await?;
        for name in ["mtu-unset", "mtu-explicit"] {
            cluster.until(name, "the MTU of the small node", |it| it["status"]["mtu"] == 1350).await?;
        }
        let pod = cluster.pod("user", "mtu-unset, mtu-explicit").await?;
        for name in ["mtu-unset", "mtu-explicit"] {
            cluster.condition(name, "InUse", "True").await?;
        }
        delete_node(&cluster, "mtu-b").await?;
        let possible = "MTU is 1350; 1450 is possible on the current nodes";
        held(&cluster, "mtu-unset", 1350, &format!("{possible}; set spec.mtu to 1450 to raise it")).await?;
        let twice = format!(
            "{possible}; to raise it, set spec.mtu to 1449, wait until status.mtuFittedFrom.specMtu is 1449, then set \
             spec.mtu to 1450"
        );
        held(&cluster, "mtu-explicit", 1350, &twice).await?;
        // A new node with the small MTU can join: nothing has to come down.
        cluster.node("mtu-c", 1400).await?;
        let network = cluster.reason("mtu-unset", "MtuReduced", "Fits").await?;
        ensure!(network["status"]["mtu"] == 1350, "{network:#}");
        // The edits below must find the node gone: a change that is fitted to the small node counts as fitted.
        delete_node(&cluster, "mtu-c").await?;
        for name in ["mtu-unset", "mtu-explicit"] {
            cluster.reason(name, "MtuReduced", "HigherPossible").await?;
        }
        cluster.edit("mtu-unset", json!({"mtu": 1450})).await?;
        for mtu in [1449, 1450] {
            cluster.edit("mtu-explicit", json!({"mtu": mtu})).await?;
            cluster.until("mtu-explicit", "the raised MTU", |it| it["status"]["mtu"] == mtu).await?;
        }
        for name in ["mtu-unset", "mtu-explicit"] {
            let network = cluster.until(name, "the raised MTU", |it| it["status"]["mtu"] == 1450).await?;
            ensure!(network["status"]["mtuFittedFrom"]["specMtu"] == 1450, "{network:#}");
        }
        cluster.remove(&pod).await?;
        for name in ["mtu-unset", "mtu-explicit"] {
            cluster.delete(name).await?;
            cluster.gone(name, GONE).await?;
        }
        Ok(())
    };
    let outcome: Result<()> = outcome.await;
    outcome.with_context(|| replica.tail())
}

pub async fn the_mtu_of_a_status_of_an_older_version_does_not_rise(lab: Lab) -> Result<()> {
    let (cluster, replica) = start(&lab, "older").await?;
    cluster.node("older-a", 1500).await.with_context(|| replica.tail())?;
    let mut spec = overlay(&cluster, 43);
    spec["mtu"] = json!(9000);
    cluster.create("older", spec).await.with_context(|| replica.tail())?;
    cluster
        .until("older", "its MTU", |it| it["status"]["mtu"] == 1450)
        .await
        .with_context(|| replica.tail())?;
    drop(replica);
    // The status as an older version would have left it when a node with a smaller MTU was there.
    let status = json!({"status": {"mtu": 1400, "mtuFittedFrom": null}});
    let patch = kube::api::Patch::Merge(&status);
    let api = cluster.api(&resource("patchbay.dev", "v1alpha1", "BridgeNetwork", "bridgenetworks"), None);
    api.patch_status("older", &kube::api::PatchParams::default(), &patch).await?;
    let replica = cluster.lead(&lab).await?;
    let outcome = async {
        let message = "MTU is 1400; 1450 is possible on the current nodes; set spec.mtu to 1450 to raise it";
        held(&cluster, "older", 1400, message).await?;
        let recorded = |it: &Value| it["status"]["mtuFittedFrom"]["specMtu"] == 9000;
        cluster.until("older", "the recorded spec.mtu", recorded).await?;
        cluster.webhook_answers().await?;
        cluster.edit("older", json!({"mtu": 1450})).await?;
        cluster.until("older", "the raised MTU", |it| it["status"]["mtu"] == 1450).await?;
        cluster.delete("older").await?;
        cluster.gone("older", GONE).await
    };
    outcome.await.with_context(|| replica.tail())
}
