//! Networks go when nobody uses them, and nodes come to them and leave them.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use e2e::{
    bridge::{
        WAIT_TIMEOUT, attached_pod, attachment_for, condition, create_network, delete_network, link,
        networks, node_report, start_network, start_pods_with_addresses, wait_deleted, wait_for_event,
        wait_reachable, wait_ready,
    },
    patchbay,
};
use kube::api::{DeleteParams, PostParams};
use lab::{
    Lab,
    test_namespace::{TestNamespace, with_namespace},
    wait,
};
use serde_json::json;

pub async fn a_pod_on_a_node_without_the_network_waits_and_starts_when_it_comes(lab: Lab) -> Result<()> {
    with_namespace(&lab, "waits", async |ns: &TestNamespace| {
        let client = &ns.client;
        let spec = json!({
            "nodeSelector": {"matchLabels": {"lab/zone": "a"}}, "attachment": attachment_for(ns),
        });
        create_network(client, "zone", spec).await?;
        wait::until(WAIT_TIMEOUT, "the attachment", || async {
            lab.kubectl(&["-n", &ns.namespace, "get", "net-attach-def", "zone"]).map(Some)
        })
        .await?;
        ns.create_pod(attached_pod("p", "node-2", "zone")).await?;
        let refused = wait_for_event(ns, "not selected", Duration::from_secs(20)).await?;
        println!("the pod's events say: {}", refused.chars().take(300).collect::<String>());
        ensure!(link(&lab, "node-2", "br-zone").is_none(), "no plugin makes a bridge");
        lab.kubectl(&["label", "node", "node-2", "lab/zone=a"])?;
        wait_ready(client, "zone", WAIT_TIMEOUT).await?;
        ns.wait_pod_ready("p").await?;
        let object = networks(client).get("zone").await?;
        ensure!(object.status.and_then(|s| s.nodes).is_some_and(|n| n.summary == "1/1"), "one node");
        // The node leaves: the pod keeps its link until it goes.
        lab.kubectl(&["label", "node", "node-2", "lab/zone-"])?;
        wait::until(WAIT_TIMEOUT, "the reason", || async {
            let entry = node_report(client, "node-2", "zone").await?;
            Ok(entry.filter(|entry| entry["reason"] == "InUse"))
        })
        .await?;
        ensure!(link(&lab, "node-2", "br-zone").is_some(), "the bridge of a running pod");
        ns.pods().delete("p", &DeleteParams::default().grace_period(0)).await?;
        wait::until(WAIT_TIMEOUT, "the bridge to go", || async {
            Ok(link(&lab, "node-2", "br-zone").is_none().then_some(()))
        })
        .await?;
        delete_network(client, "zone").await?;
        wait_deleted(client, "zone", WAIT_TIMEOUT).await.map(drop)
    })
    .await
}

pub async fn a_network_in_use_is_not_deleted_and_goes_within_3_s_of_its_last_user(lab: Lab) -> Result<()> {
    with_namespace(&lab, "used", async |ns: &TestNamespace| {
        let client = &ns.client;
        start_network(client, "used", json!({"attachment": attachment_for(ns)})).await?;
        start_pods_with_addresses(
            ns,
            [("a", "node-1", "used", "10.5.0.1/24"), ("b", "node-1", "used", "10.5.0.2/24")],
        )
        .await?;
        lab.kubectl(&["delete", "bnet", "used", "--wait=false", "--cascade=foreground"])?;
        let waits = wait::until(Duration::from_secs(3), "the condition InUse", || async {
            let object = networks(client).get("used").await?;
            let (status, _, message) = condition(&object, "InUse");
            Ok((status == "True" && message.contains('2')).then_some(object))
        })
        .await?;
        let users = waits.status.and_then(|s| s.users).context("users")?;
        ensure!(users.first.len() == 2, "{users:?}");
        // New users are refused, with a sentence.
        let refused = ns
            .pods()
            .create(
                &PostParams::default(),
                &serde_json::from_value(attached_pod("c", "node-1", "used").object())?,
            )
            .await;
        match refused {
            Err(kube::Error::Api(e)) if e.message.contains("used") && e.message.contains("delet") => {
                println!("{}", e.message);
            }
            other => bail!("{other:?}"),
        }
        wait_reachable(ns, "a", "10.5.0.2").await?;
        lab.kubectl(&["-n", &ns.namespace, "get", "net-attach-def", "used"])?;
        ensure!(
            link(&lab, "node-1", "br-used").is_some() && link(&lab, "node-2", "br-used").is_some(),
            "links stay"
        );
        ns.pods().delete("a", &DeleteParams::default().grace_period(0)).await?;
        wait::until(Duration::from_secs(3), "one user", || async {
            let users = networks(client).get("used").await?.status.and_then(|s| s.users).unwrap_or_default();
            Ok((users.count == 1).then_some(()))
        })
        .await?;
        lab.kubectl(&["-n", &ns.namespace, "delete", "pod", "b", "--now"])?;
        let took = wait_deleted(client, "used", Duration::from_secs(3)).await?;
        println!("gone {took:?} after its last user");
        ensure!(
            link(&lab, "node-1", "br-used").is_none() && link(&lab, "node-2", "br-used").is_none(),
            "links stay"
        );
        Ok(())
    })
    .await
}

pub async fn a_node_that_is_gone_holds_up_nothing(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    start_network(&client, "lost", json!({})).await?;
    lab.partition("node-2")?;
    lab.kubectl(&["delete", "node", "node-2", "--wait=false"])?;
    delete_network(&client, "lost").await?;
    wait_deleted(&client, "lost", Duration::from_secs(30)).await?;
    ensure!(link(&lab, "node-2", "br-lost").is_some(), "the partitioned node knows nothing of it");
    // It comes back, and cleans up what no longer exists.
    lab.heal("node-2")?;
    lab.reboot("node-2").await?;
    patchbay::wait_ready(&lab).await?;
    wait::until(Duration::from_secs(30), "the leftover to go", || async {
        Ok(link(&lab, "node-2", "br-lost").is_none().then_some(()))
    })
    .await
}
