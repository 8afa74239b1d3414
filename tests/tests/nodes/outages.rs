//! Outages of controllers, node daemons, nodes and the API server.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use e2e::{
    bridge::{
        WAIT_TIMEOUT, add_address, attached_pod, attachment_for, condition, delete_network, link, networks,
        start_network, start_pod_with_address, start_pods_with_addresses, wait_deleted, wait_for_event,
        wait_reachable,
    },
    patchbay::{self, NAMESPACE},
};
use k8s_openapi::api::core::v1::Pod;
use lab::{
    Lab, Topology,
    test_namespace::{TestNamespace, with_namespace},
    wait,
};
use serde_json::json;

use crate::{
    addresses::{net1_addresses, wait_for_used},
    idle::patchbay_writes,
    nics::{interfaces, nodenetworks, wait_for_nic},
};

pub async fn a_deleted_leader_is_replaced_within_15_s(lab: Lab) -> Result<()> {
    let lease_holder = || {
        lab.kubectl(&[
            "-n",
            NAMESPACE,
            "get",
            "lease",
            "patchbay-controller",
            "-o",
            "jsonpath={.spec.holderIdentity}",
        ])
    };
    let leader = lease_holder()?;
    lab.kubectl(&["-n", NAMESPACE, "delete", "pod", &leader, "--force", "--grace-period=0"])?;
    let replaced = || async {
        let now = lease_holder()?;
        Ok((now != leader && !now.is_empty()).then_some(()))
    };
    let ((), took) = wait::within(Duration::from_secs(15), "a new leader", replaced).await?;
    println!("replaced after {took:?}");
    patchbay::wait_ready(&lab).await
}

pub async fn an_api_server_outage_restarts_no_daemon(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let restarts = || {
        lab.kubectl(&[
            "-n",
            NAMESPACE,
            "get",
            "pods",
            "-l",
            "app.kubernetes.io/component=node",
            "-o",
            "jsonpath={.items[*].status.containerStatuses[0].restartCount}",
        ])
    };
    let before = restarts()?;
    // Connections hang, later they are refused. In both cases a NIC appears during the outage.
    lab.pause("apiserver")?;
    lab.node("node-1").output(&["ip", "link", "add", "nic8", "type", "veth", "peer", "vethnic8"])?;
    tokio::time::sleep(Duration::from_secs(12)).await;
    lab.resume("apiserver")?;
    let took = wait_for_nic(&client, "node-1", "nic8", true).await?;
    println!("published {took:?} after the API server resumed");
    lab.kill("apiserver")?;
    lab.node("node-1").output(&["ip", "link", "add", "nic7", "type", "veth", "peer", "vethnic7"])?;
    lab.up(Topology::Nodes(2)).await?;
    let took = wait_for_nic(&client, "node-1", "nic7", true).await?;
    println!("published {took:?} after the API server restarted");
    lab.node("node-1").output(&["ip", "link", "del", "nic7"])?;
    lab.node("node-1").output(&["ip", "link", "del", "nic8"])?;
    wait_for_nic(&client, "node-1", "nic8", false).await?;
    ensure!(
        restarts()? == before,
        "a daemon was restarted: {} restarts before, {} after",
        before,
        restarts()?
    );
    patchbay::wait_ready(&lab).await
}

pub async fn a_node_catches_up_after_a_partition(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    start_network(&client, "part", json!({})).await?;
    lab.partition("node-2")?;
    let partitioned = Instant::now();
    lab.node("node-2").output(&["ip", "link", "add", "nic5", "type", "veth", "peer", "vethnic5"])?;
    delete_network(&client, "part").await?;
    // The leader may be on that node: another one takes over after ten seconds.
    let object = wait::until(WAIT_TIMEOUT, "the network to wait for node-2", || async {
        let object = networks(&client).get("part").await?;
        let (_, _, message) = condition(&object, "Ready");
        Ok((message.contains("node-2") && link(&lab, "node-1", "br-part").is_none()).then_some(object))
    })
    .await?;
    println!("{}", condition(&object, "Ready").2);
    // Long enough for a write to time out.
    tokio::time::sleep(Duration::from_secs(12).saturating_sub(partitioned.elapsed())).await;
    let unpublished = !interfaces(&client, "node-2").await?.contains_key("nic5");
    ensure!(link(&lab, "node-2", "br-part").is_some(), "the partitioned node must keep the bridge");
    lab.heal("node-2")?;
    ensure!(unpublished, "the partitioned node published a NIC");
    let (published, deleted) =
        tokio::try_join!(wait_for_nic(&client, "node-2", "nic5", true), wait_deleted(&client, "part"),)?;
    println!("after the partition: NIC published in {published:?}, network deleted in {deleted:?}");
    ensure!(link(&lab, "node-2", "br-part").is_none(), "the bridge was not deleted");
    lab.node("node-2").output(&["ip", "link", "del", "nic5"])?;
    wait_for_nic(&client, "node-2", "nic5", false).await?;
    patchbay::wait_ready(&lab).await
}

pub async fn nodenetworks_follow_joining_and_leaving_nodes(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let started = Instant::now();
    let name = lab.add_node().await?;
    wait::until(WAIT_TIMEOUT, "the new node's NodeNetwork", || async {
        Ok(nodenetworks(&client).get_opt(&name).await?.filter(|n| n.status.is_some()).map(|_| ()))
    })
    .await?;
    println!("the new node published after {:?}", started.elapsed());
    lab.remove_node(&name).await?;
    wait::until(WAIT_TIMEOUT, "its NodeNetwork to be deleted", || async {
        Ok(nodenetworks(&client).get_opt(&name).await?.is_none().then_some(()))
    })
    .await?;
    println!("joined and removed in {:?}", started.elapsed());
    // As an admin does for a node that is off: otherwise Kubernetes counts its pods for a minute.
    let on_node = format!("--field-selector=spec.nodeName={name}");
    lab.kubectl(&["delete", "pods", "-A", &on_node, "--force", "--grace-period=0"])?;
    patchbay::wait_ready(&lab).await
}

pub async fn patchbay_can_be_uninstalled_and_reinstalled(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let links = || lab.node("node-1").output(&["ip", "-br", "link", "show", "type", "veth"]);
    let before = links()?;
    let file = patchbay::manifests_dir().join("10-patchbay.yaml");
    let file = file.to_str().context("the path is not UTF-8")?;
    let start = Instant::now();
    lab.kubectl(&["delete", "-f", file, "--timeout=90s"])?;
    println!("removed in {:?}", start.elapsed());
    ensure!(lab.kubectl(&["get", "namespace", NAMESPACE]).is_err(), "the namespace was not deleted");
    // It fails closed, so it must not outlive the controllers.
    wait::until(WAIT_TIMEOUT, "the webhook of launcher pods to be deleted", || async {
        Ok(lab.kubectl(&["get", "mutatingwebhookconfiguration", "patchbay"]).is_err().then_some(()))
    })
    .await?;
    ensure!(nodenetworks(&client).get_opt("node-1").await?.is_some(), "custom resources were deleted");
    let eths =
        |text: &str| text.lines().filter(|l| l.starts_with("eth")).map(str::to_owned).collect::<Vec<_>>();
    ensure!(eths(&before) == eths(&links()?) && eths(&before).len() == 3, "links were changed");
    patchbay::install(&lab).await?;
    let offset = lab.audit_offset()?;
    lab.node("node-1").output(&["ip", "link", "add", "nic6", "type", "veth", "peer", "vethnic6"])?;
    wait_for_nic(&client, "node-1", "nic6", true).await?;
    lab.node("node-1").output(&["ip", "link", "del", "nic6"])?;
    ensure!(!patchbay_writes(&lab, offset)?.is_empty(), "the audit log has no writes");
    Ok(())
}

pub async fn while_the_daemon_is_down_pods_are_deleted_and_new_ones_wait(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let test = with_namespace(&lab, "down", async |ns: &TestNamespace| {
        start_network(&client, "down", json!({"attachment": attachment_for(ns)})).await?;
        let ipam = json!({"attachment": attachment_for(ns), "ipam": {"subnets": ["10.55.0.0/24"]}});
        start_network(&client, "ipam", ipam).await?;
        let (_, running, _) = tokio::try_join!(
            start_pods_with_addresses(
                ns,
                [("client", "node-1", "down", "10.3.0.1/24"), ("server", "node-1", "down", "10.3.0.2/24")]
            ),
            ns.start_pod(attached_pod("running", "node-1", "ipam")),
            ns.start_pod(attached_pod("deleted", "node-1", "ipam")),
        )?;
        let before = net1_addresses(&running)?;
        wait_for_used(&client, "ipam", 2).await?;
        // The node selector keeps the DaemonSet from recreating the pod on node-1.
        lab.kubectl(&["label", "node", "node-2", "lab/daemon=wanted"])?;
        patchbay::patch_daemons(&client, json!({"nodeSelector": {"lab/daemon": "wanted"}})).await?;
        wait::until(WAIT_TIMEOUT, "node-1 to have no daemon", || async {
            Ok(patchbay::daemon_pod(&client, "node-1").await.is_err().then_some(()))
        })
        .await?;
        wait_reachable(ns, "client", "10.3.0.2").await?;
        ns.create_pod(attached_pod("new-client", "node-1", "down")).await?;
        wait_for_event(ns, "does not answer").await?;
        ns.create_pod(attached_pod("new", "node-1", "ipam")).await?;
        lab.kubectl(&["-n", &ns.namespace, "delete", "pod", "server", "deleted", "--now", "--timeout=120s"])?;
        let tombstones = lab.node("node-1").output(&["ls", "/var/lib/patchbay/tombstones"])?;
        ensure!(!tombstones.trim().is_empty(), "no tombstone");
        patchbay::patch_daemons(&client, json!({"nodeSelector": {"lab/daemon": null}})).await?;
        patchbay::wait_ready(&lab).await?;
        ns.wait_pod_ready("new-client").await?;
        // No address is lost or assigned twice, and the address of the deleted pod is released.
        let new = ns.wait_pod_ready("new").await?;
        wait_for_used(&client, "ipam", 2).await?;
        ensure!(net1_addresses(&new)? != before, "{before:?} was assigned twice");
        ensure!(
            net1_addresses(&ns.pods().get("running").await?)? == before,
            "the pod no longer has {before:?}"
        );
        // A DEL that raced with the start of the daemon leaves one until the next scan.
        wait::until(WAIT_TIMEOUT, "the tombstones to be applied", || async {
            let tombstones = lab.node("node-1").output(&["ls", "/var/lib/patchbay/tombstones"])?;
            ensure!(tombstones.trim().is_empty(), "{tombstones}");
            Ok(Some(()))
        })
        .await?;
        lab.kubectl(&["label", "node", "node-2", "lab/daemon-"]).map(drop)
    });
    Box::pin(test).await?;
    for name in ["down", "ipam"] {
        delete_network(&client, name).await?;
        wait_deleted(&client, name).await?;
    }
    Ok(())
}

pub async fn after_a_reboot_pods_recover_and_lost_nics_are_not_published(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    with_namespace(&lab, "reboot", async |ns: &TestNamespace| {
        let ipam = json!({"subnets": ["10.57.0.0/24"]});
        let spec = json!({"overlay": {"vni": 31}, "attachment": attachment_for(ns), "ipam": ipam});
        start_network(&client, "boot", spec).await?;
        tokio::try_join!(
            start_pod_with_address(ns, "client", "node-1", "boot", "10.2.0.1/24"),
            ns.start_pod(attached_pod("server-0", "node-2", "boot")),
            ns.start_pod(attached_pod("server-1", "node-2", "boot")),
        )?;
        let restarts = |pod: &Pod| {
            let statuses = pod.status.iter().flat_map(|s| s.container_statuses.iter().flatten());
            statuses.map(|s| s.restart_count).sum::<i32>()
        };
        lab.node("node-2").output(&["ip", "link", "add", "nic7", "type", "veth", "peer", "vethnic7"])?;
        wait_for_nic(&client, "node-2", "nic7", true).await?;
        let started = Instant::now();
        lab.reboot("node-2").await?;
        println!("rebooted after {:?}", started.elapsed());
        wait_for_nic(&client, "node-2", "nic7", false).await.context("a NIC that was lost in the reboot")?;
        println!("published after {:?}", started.elapsed());
        for name in ["server-0", "server-1"] {
            wait::until(WAIT_TIMEOUT, "the pod to restart", || async {
                let pod = ns.pods().get(name).await?;
                let ready = pod.status.iter().flat_map(|s| s.conditions.iter().flatten());
                let ready = ready.filter(|c| c.type_ == "Ready").any(|c| c.status == "True");
                Ok((ready && restarts(&pod) > 0).then_some(()))
            })
            .await?;
        }
        add_address(ns, "server-0", "net1", "10.2.0.2/24")?;
        wait_reachable(ns, "client", "10.2.0.2").await?;
        // The pods have new sandboxes with new addresses; the old addresses are released.
        wait_for_used(&client, "boot", 3).await
    })
    .await?;
    patchbay::wait_ready(&lab).await?;
    delete_network(&client, "boot").await?;
    wait_deleted(&client, "boot").await.map(drop)
}
