//! The effective MTU of overlays: it rises only when spec.mtu changes.

use anyhow::{Context as _, Result, ensure};
use kube::api::DeleteParams;
use lab::Lab;
use serde_json::{Value, json};

use crate::{
    cluster::{TestCluster, bridge_networks, condition, resource},
    start_controller,
};

fn overlay(cluster: &TestCluster, vni: u32) -> Value {
    json!({"overlay": {"vni": vni}, "nodeSelector": cluster.node_selector(),
        "attachment": {"namespaces": [cluster.namespace]}})
}

/// Waits until the controller reports that a higher MTU is possible, and checks that it has not been applied.
async fn wait_for_higher_possible(cluster: &TestCluster, name: &str, mtu: i32, message: &str) -> Result<()> {
    let network = cluster.wait_for_reason(name, "MtuReduced", "HigherPossible").await?;
    let reported = &condition(&network, "MtuReduced").context("MtuReduced")?["message"];
    println!("{reported}");
    ensure!(reported.as_str() == Some(message), "{reported}");
    ensure!(network["status"]["mtu"] == mtu, "{network:#}");
    Ok(())
}

async fn delete_node(cluster: &TestCluster, name: &str) -> Result<()> {
    let nodes = resource("", "v1", "Node", "nodes");
    cluster.api(&nodes, None).delete(name, &DeleteParams::default()).await?;
    Ok(())
}

pub async fn an_overlay_keeps_its_mtu_when_a_node_with_a_small_mtu_leaves(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "mtu").await?;
    let outcome = async {
        cluster.create_node("mtu-a", 1500).await?;
        cluster.create_node("mtu-b", 1400).await?;
        cluster.create_network("mtu-unset", overlay(&cluster, 41)).await?;
        let mut explicit = overlay(&cluster, 42);
        explicit["mtu"] = json!(1450);
        cluster.create_network("mtu-explicit", explicit).await?;
        for name in ["mtu-unset", "mtu-explicit"] {
            cluster.wait_for(name, "the MTU of the small node", |it| it["status"]["mtu"] == 1350).await?;
        }
        let pod = cluster.create_pod("client", "mtu-unset, mtu-explicit").await?;
        for name in ["mtu-unset", "mtu-explicit"] {
            cluster.wait_for_condition(name, "InUse", "True").await?;
        }
        delete_node(&cluster, "mtu-b").await?;
        let possible = "MTU is 1350; 1450 is possible on the current nodes";
        wait_for_higher_possible(
            &cluster,
            "mtu-unset",
            1350,
            &format!("{possible}; set spec.mtu to 1450 to raise it"),
        )
        .await?;
        let twice = format!(
            "{possible}; to raise it, set spec.mtu to 1449, wait until status.mtuFittedFrom.specMtu is 1449, then set \
             spec.mtu to 1450"
        );
        wait_for_higher_possible(&cluster, "mtu-explicit", 1350, &twice).await?;
        // A new node with the small MTU can join: nothing has to come down.
        cluster.create_node("mtu-c", 1400).await?;
        let network = cluster.wait_for_reason("mtu-unset", "MtuReduced", "Fits").await?;
        ensure!(network["status"]["mtu"] == 1350, "{network:#}");
        // The edits below need the node deleted: a change that is fitted while the node exists counts as fitted.
        delete_node(&cluster, "mtu-c").await?;
        for name in ["mtu-unset", "mtu-explicit"] {
            cluster.wait_for_reason(name, "MtuReduced", "HigherPossible").await?;
        }
        cluster.patch_spec("mtu-unset", json!({"mtu": 1450})).await?;
        for mtu in [1449, 1450] {
            cluster.patch_spec("mtu-explicit", json!({"mtu": mtu})).await?;
            cluster.wait_for("mtu-explicit", "the raised MTU", |it| it["status"]["mtu"] == mtu).await?;
        }
        for name in ["mtu-unset", "mtu-explicit"] {
            let network = cluster.wait_for(name, "the raised MTU", |it| it["status"]["mtu"] == 1450).await?;
            ensure!(network["status"]["mtuFittedFrom"]["specMtu"] == 1450, "{network:#}");
        }
        cluster.delete_workload(&pod).await?;
        for name in ["mtu-unset", "mtu-explicit"] {
            cluster.delete_network(name).await?;
            cluster.wait_until_deleted_in_time(name).await?;
        }
        Ok(())
    };
    let outcome: Result<()> = outcome.await;
    outcome.with_context(|| replica.tail())
}

pub async fn the_mtu_of_a_status_of_an_older_version_does_not_rise(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "older").await?;
    cluster.create_node("older-a", 1500).await.with_context(|| replica.tail())?;
    let mut spec = overlay(&cluster, 43);
    spec["mtu"] = json!(9000);
    cluster.create_network("older", spec).await.with_context(|| replica.tail())?;
    cluster
        .wait_for("older", "its MTU", |it| it["status"]["mtu"] == 1450)
        .await
        .with_context(|| replica.tail())?;
    drop(replica);
    // The status as an older version would leave it if a node with a smaller MTU had existed.
    let status = json!({"status": {"mtu": 1400, "mtuFittedFrom": null}});
    let patch = kube::api::Patch::Merge(&status);
    let api = cluster.api(&bridge_networks(), None);
    api.patch_status("older", &kube::api::PatchParams::default(), &patch).await?;
    let replica = cluster.start_leader(&lab).await?;
    let outcome = async {
        let message = "MTU is 1400; 1450 is possible on the current nodes; set spec.mtu to 1450 to raise it";
        wait_for_higher_possible(&cluster, "older", 1400, message).await?;
        let recorded = |it: &Value| it["status"]["mtuFittedFrom"]["specMtu"] == 9000;
        cluster.wait_for("older", "the recorded spec.mtu", recorded).await?;
        cluster.wait_for_webhook().await?;
        cluster.patch_spec("older", json!({"mtu": 1450})).await?;
        cluster.wait_for("older", "the raised MTU", |it| it["status"]["mtu"] == 1450).await?;
        cluster.delete_network("older").await?;
        cluster.wait_until_deleted_in_time("older").await
    };
    outcome.await.with_context(|| replica.tail())
}
