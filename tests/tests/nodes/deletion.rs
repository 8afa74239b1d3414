//! Deletion of networks with users, with deleted nodes, and on nodes that a network no longer selects.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use e2e::{
    bridge::{
        AMID, condition, create, delete, gone, in_namespace, join_all, link, member, networks, on_node,
        reaches, ready, start, told,
    },
    patchbay,
};
use kube::api::{DeleteParams, PostParams};
use lab::{Lab, scene::Scene, wait};
use serde_json::json;

pub async fn a_pod_waits_until_its_node_has_the_network(lab: Lab) -> Result<()> {
    Scene::play(&lab, "unselected", async |scene: &Scene| {
        let client = &scene.client;
        let spec = json!({
            "nodeSelector": {"matchLabels": {"lab/zone": "a"}}, "attachment": in_namespace(scene),
        });
        create(client, "zone", spec).await?;
        wait::until(AMID, "the NAD", || async {
            lab.kubectl(&["-n", &scene.namespace, "get", "net-attach-def", "zone"]).map(Some)
        })
        .await?;
        scene.create(member("client", "node-2", "zone")).await?;
        let events = told(scene, "not selected", Duration::from_secs(20)).await?;
        println!("events of the pod: {}", events.chars().take(300).collect::<String>());
        ensure!(link(&lab, "node-2", "br-zone").is_none(), "the CNI plugin must not create the bridge");
        lab.kubectl(&["label", "node", "node-2", "lab/zone=a"])?;
        ready(client, "zone", AMID).await?;
        scene.ready("client").await?;
        let object = networks(client).get("zone").await?;
        ensure!(
            object.status.and_then(|s| s.nodes).is_some_and(|n| n.summary == "1/1"),
            "one node is selected"
        );
        // The network no longer selects the node: the pod keeps its link until it is deleted.
        lab.kubectl(&["label", "node", "node-2", "lab/zone-"])?;
        wait::until(AMID, "reason InUse", || async {
            let entry = on_node(client, "node-2", "zone").await?;
            Ok(entry.filter(|entry| entry["reason"] == "InUse"))
        })
        .await?;
        ensure!(link(&lab, "node-2", "br-zone").is_some(), "the bridge of a running pod was deleted");
        scene.pods().delete("client", &DeleteParams::default().grace_period(0)).await?;
        wait::until(AMID, "the bridge to be deleted", || async {
            Ok(link(&lab, "node-2", "br-zone").is_none().then_some(()))
        })
        .await?;
        delete(client, "zone").await?;
        gone(client, "zone", AMID).await.map(drop)
    })
    .await
}

pub async fn a_network_in_use_is_deleted_within_3_s_of_its_last_user(lab: Lab) -> Result<()> {
    Scene::play(&lab, "used", async |scene: &Scene| {
        let client = &scene.client;
        start(client, "used", json!({"attachment": in_namespace(scene)})).await?;
        join_all(
            scene,
            [("client", "node-1", "used", "10.5.0.1/24"), ("server", "node-1", "used", "10.5.0.2/24")],
        )
        .await?;
        lab.kubectl(&["delete", "bnet", "used", "--wait=false", "--cascade=foreground"])?;
        let blocked = wait::until(Duration::from_secs(3), "the condition InUse", || async {
            let object = networks(client).get("used").await?;
            let (status, _, message) = condition(&object, "InUse");
            Ok((status == "True" && message.contains('2')).then_some(object))
        })
        .await?;
        let users = blocked.status.and_then(|s| s.users).context("status.users")?;
        ensure!(users.first.len() == 2, "{users:?}");
        // The webhook rejects new users and names the network.
        let rejected = scene
            .pods()
            .create(
                &PostParams::default(),
                &serde_json::from_value(member("new-client", "node-1", "used").object())?,
            )
            .await;
        match rejected {
            Err(kube::Error::Api(e)) if e.message.contains("used") && e.message.contains("delet") => {
                println!("{}", e.message);
            }
            other => bail!("{other:?}"),
        }
        reaches(scene, "client", "10.5.0.2").await?;
        lab.kubectl(&["-n", &scene.namespace, "get", "net-attach-def", "used"])?;
        ensure!(
            link(&lab, "node-1", "br-used").is_some() && link(&lab, "node-2", "br-used").is_some(),
            "links were deleted while in use"
        );
        scene.pods().delete("client", &DeleteParams::default().grace_period(0)).await?;
        wait::until(Duration::from_secs(3), "one user", || async {
            let users = networks(client).get("used").await?.status.and_then(|s| s.users).unwrap_or_default();
            Ok((users.count == 1).then_some(()))
        })
        .await?;
        lab.kubectl(&["-n", &scene.namespace, "delete", "pod", "server", "--now"])?;
        let took = gone(client, "used", Duration::from_secs(3)).await?;
        println!("deleted {took:?} after its last user");
        ensure!(
            link(&lab, "node-1", "br-used").is_none() && link(&lab, "node-2", "br-used").is_none(),
            "links were not deleted"
        );
        Ok(())
    })
    .await
}

pub async fn a_deleted_node_does_not_block_deletion(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    start(&client, "lost", json!({})).await?;
    lab.partition("node-2")?;
    lab.kubectl(&["delete", "node", "node-2", "--wait=false"])?;
    delete(&client, "lost").await?;
    gone(&client, "lost", Duration::from_secs(30)).await?;
    ensure!(link(&lab, "node-2", "br-lost").is_some(), "the partitioned node must keep the bridge");
    // After the partition, the node deletes the leftover bridge.
    lab.heal("node-2")?;
    lab.reboot("node-2").await?;
    patchbay::ready(&lab).await?;
    wait::until(Duration::from_secs(30), "the leftover bridge to be deleted", || async {
        Ok(link(&lab, "node-2", "br-lost").is_none().then_some(()))
    })
    .await
}
