//! Deletion of networks with users, with deleted nodes, and on nodes that a network no longer selects.

use anyhow::{Context as _, Result, ensure};
use e2e::{
    bridge::{
        WAIT_TIMEOUT, attached_pod, attachment_for, condition, create_network, delete_network, link,
        networks, node_report, start_network, start_pods_with_addresses, wait_deleted, wait_deleted_in_time,
        wait_for_event, wait_reachable, wait_ready,
    },
    hotplug::create_nad,
    patchbay,
};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, PostParams};
use lab::{
    Lab,
    test_namespace::{TestNamespace, with_namespace},
    wait,
};
use serde_json::json;

use crate::addresses::{blocks, net1_addresses};

pub async fn a_pod_waits_until_its_node_has_the_network(lab: Lab) -> Result<()> {
    with_namespace(&lab, "unselected", async |ns: &TestNamespace| {
        let client = &ns.client;
        let spec = json!({
            "nodeSelector": {"matchLabels": {"lab/zone": "a"}}, "attachment": attachment_for(ns),
        });
        create_network(client, "zone", spec).await?;
        wait::until(WAIT_TIMEOUT, "the NAD", || async {
            lab.kubectl(&["-n", &ns.namespace, "get", "net-attach-def", "zone"]).map(Some)
        })
        .await?;
        ns.create_pod(attached_pod("client", "node-2", "zone")).await?;
        let events = wait_for_event(ns, "does not select this node").await?;
        println!("events of the pod: {}", events.chars().take(300).collect::<String>());
        ensure!(link(&lab, "node-2", "br-zone").is_none(), "the CNI plugin must not create the bridge");
        lab.kubectl(&["label", "node", "node-2", "lab/zone=a"])?;
        wait_ready(client, "zone").await?;
        ns.wait_pod_ready("client").await?;
        let object = networks(client).get("zone").await?;
        ensure!(
            object.status.and_then(|s| s.nodes).is_some_and(|n| n.summary == "1/1"),
            "one node is selected"
        );
        // The network no longer selects the node: the pod keeps its link until it is deleted.
        lab.kubectl(&["label", "node", "node-2", "lab/zone-"])?;
        wait::until(WAIT_TIMEOUT, "reason InUse", || async {
            let entry = node_report(client, "node-2", "zone").await?;
            Ok(entry.filter(|entry| entry["reason"] == "InUse"))
        })
        .await?;
        ensure!(link(&lab, "node-2", "br-zone").is_some(), "the bridge of a running pod was deleted");
        ns.pods().delete("client", &DeleteParams::default().grace_period(0)).await?;
        wait::until(WAIT_TIMEOUT, "the bridge to be deleted", || async {
            Ok(link(&lab, "node-2", "br-zone").is_none().then_some(()))
        })
        .await?;
        delete_network(client, "zone").await?;
        wait_deleted(client, "zone").await.map(drop)
    })
    .await
}

pub async fn a_network_in_use_is_deleted_within_3_s_of_its_last_user(lab: Lab) -> Result<()> {
    with_namespace(&lab, "used", async |ns: &TestNamespace| {
        let client = &ns.client;
        start_network(client, "used", json!({"attachment": attachment_for(ns)})).await?;
        start_pods_with_addresses(
            ns,
            [("client", "node-1", "used", "10.5.0.1/24"), ("server", "node-1", "used", "10.5.0.2/24")],
        )
        .await?;
        lab.kubectl(&["delete", "bnet", "used", "--wait=false", "--cascade=foreground"])?;
        let blocked = wait::until(WAIT_TIMEOUT, "the condition InUse", || async {
            let object = networks(client).get("used").await?;
            let (status, _, message) = condition(&object, "InUse");
            Ok((status == "True" && message.contains('2')).then_some(object))
        })
        .await?;
        let users = blocked.status.and_then(|s| s.users).context("status.users")?;
        ensure!(users.first.len() == 2, "{users:?}");
        // The webhook rejects new users and names the network.
        // A dry run, because the webhook fails open after 2 s.
        let new_client = serde_json::from_value(attached_pod("new-client", "node-1", "used").object())?;
        let dry_run = PostParams { dry_run: true, ..PostParams::default() };
        let message = wait::until(WAIT_TIMEOUT, "the pod to be rejected", || async {
            match ns.pods().create(&dry_run, &new_client).await {
                Err(kube::Error::Api(e)) => Ok(Some(e.message)),
                other => other.map(|_| None).context("create a pod"),
            }
        })
        .await?;
        ensure!(message.contains("used") && message.contains("delet"), "{message}");
        wait_reachable(ns, "client", "10.5.0.2").await?;
        lab.kubectl(&["-n", &ns.namespace, "get", "net-attach-def", "used"])?;
        ensure!(
            link(&lab, "node-1", "br-used").is_some() && link(&lab, "node-2", "br-used").is_some(),
            "links were deleted while in use"
        );
        ns.pods().delete("client", &DeleteParams::default().grace_period(0)).await?;
        wait::until(WAIT_TIMEOUT, "one user", || async {
            let users = networks(client).get("used").await?.status.and_then(|s| s.users).unwrap_or_default();
            Ok((users.count == 1).then_some(()))
        })
        .await?;
        lab.kubectl(&["-n", &ns.namespace, "delete", "pod", "server", "--now"])?;
        let took = wait_deleted_in_time(client, "used").await?;
        println!("deleted {took:?} after its last user");
        ensure!(
            link(&lab, "node-1", "br-used").is_none() && link(&lab, "node-2", "br-used").is_none(),
            "links were not deleted"
        );
        Ok(())
    })
    .await
}

/// Annotations are written by tenants: a pod keeps its interface when its networks annotation cannot be parsed.
pub async fn an_address_holds_its_network_although_no_annotation_names_it(lab: Lab) -> Result<()> {
    with_namespace(&lab, "holds", async |ns: &TestNamespace| {
        let client = &ns.client;
        // Two addresses, so that every one that is not free is missed.
        let spec = || json!({"ipam": {"subnets": ["10.61.0.0/30"]}});
        start_network(client, "tiny", spec()).await?;
        let config = json!({
            "cniVersion": "1.0.0", "name": "lan", "type": "macvlan", "master": "eth1", "mode": "bridge",
            "ipam": {"type": "patchbay-ipam", "network": "tiny"},
        });
        create_nad(ns, "lan", &config).await?;
        let web = ns.start_pod(attached_pod("web-0", "node-1", "lan")).await?;
        let addresses = net1_addresses(&web)?;
        let broken = r#"k8s.v1.cni.cncf.io/networks=[{"name":"lan","#;
        lab.kubectl(&["-n", &ns.namespace, "annotate", "pod", "web-0", "--overwrite", broken])?;
        delete_network(client, "tiny").await?;
        let message = wait::until(WAIT_TIMEOUT, "the condition InUse", || async {
            let object = networks(client).get("tiny").await?;
            let (status, reason, message) = condition(&object, "InUse");
            Ok((status == "True" && reason == "AddressesInUse").then_some(message))
        })
        .await?;
        let pod = format!("node node-1: 1 ({}/web-0)", ns.namespace);
        ensure!(message.contains(&pod), "{message}");
        ensure!(create_network(client, "tiny", spec()).await.is_err(), "the network was created again");
        let second: Pod = serde_json::from_value(attached_pod("web-1", "node-1", "lan").object())?;
        let refused = ns.pods().create(&PostParams::default(), &second).await.err();
        let refused = refused.context("a pod of a network that is being deleted was admitted")?.to_string();
        ensure!(refused.contains("tiny"), "{refused}");
        // No block of the network is deleted, however long its deletion takes.
        ensure!(!blocks(client, "tiny").await?.is_empty(), "the block of a used address was deleted");
        ns.exec("web-0", &["ip", "addr", "show", "net1"])?;
        lab.kubectl(&["-n", &ns.namespace, "delete", "pod", "web-0", "--now"])?;
        wait_deleted(client, "tiny").await?;
        ensure!(blocks(client, "tiny").await?.is_empty(), "blocks of a deleted network are left");

        // The new network of the name allocates every address again, and each once.
        start_network(client, "tiny", spec()).await?;
        let [first, second] = [
            ns.start_pod(attached_pod("web-1", "node-1", "lan")).await?,
            ns.start_pod(attached_pod("web-2", "node-2", "lan")).await?,
        ];
        let (first, second) = (net1_addresses(&first)?, net1_addresses(&second)?);
        ensure!(first != second && (first == addresses || second == addresses), "{first:?} {second:?}");
        Ok(())
    })
    .await?;
    let client = lab.client().await?;
    delete_network(&client, "tiny").await?;
    wait_deleted(&client, "tiny").await.map(drop)
}

pub async fn a_deleted_node_does_not_block_deletion(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    start_network(&client, "lost", json!({})).await?;
    lab.partition("node-2")?;
    lab.kubectl(&["delete", "node", "node-2", "--wait=false"])?;
    delete_network(&client, "lost").await?;
    wait_deleted(&client, "lost").await?;
    ensure!(link(&lab, "node-2", "br-lost").is_some(), "the partitioned node must keep the bridge");
    // After the partition, the node deletes the leftover bridge.
    lab.heal("node-2")?;
    lab.reboot("node-2").await?;
    patchbay::wait_ready(&lab).await?;
    wait::until(WAIT_TIMEOUT, "the leftover bridge to be deleted", || async {
        Ok(link(&lab, "node-2", "br-lost").is_none().then_some(()))
    })
    .await
}
