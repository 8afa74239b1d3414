//! Programs, nodes and the API server go away and come back.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use e2e::{
    bridge::{
        add_address, attached_pod, attachment_for, condition, delete_network, link, networks, start_network,
        start_pod_with_address, start_pods_with_addresses, wait_deleted, wait_for_event, wait_reachable,
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
    addresses::{addresses, used},
    nics::{interfaces, nodenetworks, shows},
    rest::writes,
};

pub async fn a_leader_pod_that_is_deleted_is_followed_within_15_s(lab: Lab) -> Result<()> {
    let holder = || {
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
    let leader = holder()?;
    lab.kubectl(&["-n", NAMESPACE, "delete", "pod", &leader, "--force", "--grace-period=0"])?;
    let start = Instant::now();
    wait::until(Duration::from_secs(15), "another leader", || async {
        let now = holder()?;
        Ok((now != leader && !now.is_empty()).then_some(()))
    })
    .await?;
    println!("followed after {:?}", start.elapsed());
    patchbay::wait_ready(&lab).await
}

pub async fn a_silent_api_server_is_survived(lab: Lab) -> Result<()> {
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
    // Connections that hang, then connections that are refused; something happens while nobody can be told.
    lab.pause("apiserver")?;
    lab.node("node-1").output(&["ip", "link", "add", "nic8", "type", "veth", "peer", "vethnic8"])?;
    tokio::time::sleep(Duration::from_secs(12)).await;
    lab.resume("apiserver")?;
    let took = shows(&client, "node-1", "nic8", true, Duration::from_secs(60)).await?;
    println!("published {took:?} after the API server woke up");
    lab.kill("apiserver")?;
    lab.node("node-1").output(&["ip", "link", "add", "nic7", "type", "veth", "peer", "vethnic7"])?;
    lab.up(Topology::Nodes(2)).await?;
    let took = shows(&client, "node-1", "nic7", true, Duration::from_secs(60)).await?;
    println!("published {took:?} after the API server was back");
    lab.node("node-1").output(&["ip", "link", "del", "nic7"])?;
    lab.node("node-1").output(&["ip", "link", "del", "nic8"])?;
    shows(&client, "node-1", "nic8", false, Duration::from_secs(5)).await?;
    ensure!(restarts()? == before, "no daemon was restarted: {} then {}", before, restarts()?);
    patchbay::wait_ready(&lab).await
}

pub async fn what_a_node_misses_during_a_partition_is_made_up_for_after_it(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    start_network(&client, "part", json!({})).await?;
    lab.partition("node-2")?;
    let cut = Instant::now();
    lab.node("node-2").output(&["ip", "link", "add", "nic5", "type", "veth", "peer", "vethnic5"])?;
    delete_network(&client, "part").await?;
    // The leader may be on that node: another one follows after ten seconds.
    let object = wait::until(Duration::from_secs(25), "node-2 to be waited for", || async {
        let object = networks(&client).get("part").await?;
        let (_, _, message) = condition(&object, "Ready");
        Ok((message.contains("node-2") && link(&lab, "node-1", "br-part").is_none()).then_some(object))
    })
    .await?;
    println!("{}", condition(&object, "Ready").2);
    // Long enough for a write to be given up.
    tokio::time::sleep(Duration::from_secs(12).saturating_sub(cut.elapsed())).await;
    let unknown = !interfaces(&client, "node-2").await?.contains_key("nic5");
    ensure!(link(&lab, "node-2", "br-part").is_some(), "the partitioned node knows nothing of it");
    lab.heal("node-2")?;
    ensure!(unknown, "a cut-off node cannot have told anybody");
    let (published, deleted) = tokio::try_join!(
        shows(&client, "node-2", "nic5", true, Duration::from_secs(45)),
        wait_deleted(&client, "part", Duration::from_secs(90)),
    )?;
    println!("after the partition ended: NIC published {published:?}, network gone {deleted:?}");
    ensure!(link(&lab, "node-2", "br-part").is_none(), "the link stays");
    lab.node("node-2").output(&["ip", "link", "del", "nic5"])?;
    shows(&client, "node-2", "nic5", false, Duration::from_secs(5)).await?;
    patchbay::wait_ready(&lab).await
}

pub async fn a_node_that_joins_or_leaves_is_followed(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let begun = Instant::now();
    let name = lab.add_node().await?;
    wait::until(Duration::from_secs(60), "the new node's NodeNetwork", || async {
        Ok(nodenetworks(&client).get_opt(&name).await?.filter(|n| n.status.is_some()).map(|_| ()))
    })
    .await?;
    println!("the new node published after {:?}", begun.elapsed());
    lab.remove_node(&name).await?;
    wait::until(Duration::from_secs(60), "its NodeNetwork to go with it", || async {
        Ok(nodenetworks(&client).get_opt(&name).await?.is_none().then_some(()))
    })
    .await?;
    println!("all of it took {:?}", begun.elapsed());
    // As an admin does whose machine is off: otherwise Kubernetes counts its pods for a minute.
    let lost = format!("--field-selector=spec.nodeName={name}");
    lab.kubectl(&["delete", "pods", "-A", &lost, "--force", "--grace-period=0"])?;
    patchbay::wait_ready(&lab).await
}

pub async fn kubernetes_can_be_left_without_patchbay_and_get_it_back(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let links = || lab.node("node-1").output(&["ip", "-br", "link", "show", "type", "veth"]);
    let before = links()?;
    let file = patchbay::manifests_dir().join("10-patchbay.yaml");
    let file = file.to_str().context("a path in UTF-8")?;
    let start = Instant::now();
    lab.kubectl(&["delete", "-f", file, "--timeout=90s"])?;
    println!("removed in {:?}", start.elapsed());
    ensure!(lab.kubectl(&["get", "namespace", NAMESPACE]).is_err(), "the namespace is gone");
    ensure!(nodenetworks(&client).get_opt("node-1").await?.is_some(), "objects of the kinds stay");
    let eths =
        |text: &str| text.lines().filter(|l| l.starts_with("eth")).map(str::to_owned).collect::<Vec<_>>();
    ensure!(eths(&before) == eths(&links()?) && eths(&before).len() == 3, "links are as they were");
    patchbay::install(&lab).await?;
    let mark = lab.audit_offset()?;
    lab.node("node-1").output(&["ip", "link", "add", "nic6", "type", "veth", "peer", "vethnic6"])?;
    shows(&client, "node-1", "nic6", true, Duration::from_secs(2)).await?;
    lab.node("node-1").output(&["ip", "link", "del", "nic6"])?;
    ensure!(!writes(&lab, mark)?.is_empty(), "the audit log sees it");
    Ok(())
}

pub async fn pods_come_and_go_while_the_daemon_is_away(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let play = with_namespace(&lab, "away", async |ns: &TestNamespace| {
        start_network(&client, "away", json!({"attachment": attachment_for(ns)})).await?;
        let ipam = json!({"attachment": attachment_for(ns), "ipam": {"subnets": ["10.55.0.0/24"]}});
        start_network(&client, "kept", ipam).await?;
        let (_, stay, _) = tokio::try_join!(
            start_pods_with_addresses(
                ns,
                [("a", "node-1", "away", "10.3.0.1/24"), ("b", "node-1", "away", "10.3.0.2/24")]
            ),
            ns.start_pod(attached_pod("stay", "node-1", "kept")),
            ns.start_pod(attached_pod("go", "node-1", "kept")),
        )?;
        let before = addresses(&stay)?;
        used(&client, "kept", 2).await?;
        // Nobody puts it back on this node.
        lab.kubectl(&["label", "node", "node-2", "lab/daemon=wanted"])?;
        patchbay::patch_daemons(&client, json!({"nodeSelector": {"lab/daemon": "wanted"}})).await?;
        wait::until(Duration::from_secs(60), "node-1 to be without a daemon", || async {
            Ok(patchbay::daemon_pod(&client, "node-1").await.is_err().then_some(()))
        })
        .await?;
        wait_reachable(ns, "a", "10.3.0.2").await?;
        ns.create_pod(attached_pod("c", "node-1", "away")).await?;
        wait_for_event(ns, "does not answer", Duration::from_secs(30)).await?;
        ns.create_pod(attached_pod("come", "node-1", "kept")).await?;
        lab.kubectl(&["-n", &ns.namespace, "delete", "pod", "b", "go", "--now", "--timeout=30s"])?;
        let tombstones = lab.node("node-1").output(&["ls", "/var/lib/patchbay/tombstones"])?;
        ensure!(!tombstones.trim().is_empty(), "no tombstone");
        patchbay::patch_daemons(&client, json!({"nodeSelector": {"lab/daemon": null}})).await?;
        patchbay::wait_ready(&lab).await?;
        ns.wait_pod_ready("c").await?;
        // No address is lost, none is given twice, and what went meanwhile is free.
        let come = ns.wait_pod_ready("come").await?;
        used(&client, "kept", 2).await?;
        ensure!(addresses(&come)? != before, "{before:?} was given twice");
        ensure!(addresses(&ns.pods().get("stay").await?)? == before, "it has others than {before:?}");
        let tombstones = lab.node("node-1").output(&["ls", "/var/lib/patchbay/tombstones"])?;
        ensure!(tombstones.trim().is_empty(), "{tombstones}");
        lab.kubectl(&["label", "node", "node-2", "lab/daemon-"]).map(drop)
    });
    Box::pin(play).await?;
    for name in ["away", "kept"] {
        delete_network(&client, name).await?;
        wait_deleted(&client, name, Duration::from_secs(30)).await?;
    }
    Ok(())
}

pub async fn after_a_reboot_pods_come_back_and_nics_that_went_are_not_published(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    with_namespace(&lab, "reboot", async |ns: &TestNamespace| {
        let ipam = json!({"subnets": ["10.57.0.0/24"]});
        let spec = json!({"overlay": {"vni": 31}, "attachment": attachment_for(ns), "ipam": ipam});
        start_network(&client, "boot", spec).await?;
        tokio::try_join!(
            start_pod_with_address(ns, "a", "node-1", "boot", "10.2.0.1/24"),
            ns.start_pod(attached_pod("b", "node-2", "boot")),
            ns.start_pod(attached_pod("c", "node-2", "boot")),
        )?;
        let restarts = |pod: &Pod| {
            let statuses = pod.status.iter().flat_map(|s| s.container_statuses.iter().flatten());
            statuses.map(|s| s.restart_count).sum::<i32>()
        };
        lab.node("node-2").output(&["ip", "link", "add", "nic7", "type", "veth", "peer", "vethnic7"])?;
        shows(&client, "node-2", "nic7", true, Duration::from_secs(2)).await?;
        let begun = Instant::now();
        lab.reboot("node-2").await?;
        println!("rebooted after {:?}", begun.elapsed());
        shows(&client, "node-2", "nic7", false, Duration::from_secs(60))
            .await
            .context("what a reboot took")?;
        println!("published after {:?}", begun.elapsed());
        for name in ["b", "c"] {
            wait::until(Duration::from_secs(90), "the pod to be back", || async {
                let pod = ns.pods().get(name).await?;
                let ready = pod.status.iter().flat_map(|s| s.conditions.iter().flatten());
                let ready = ready.filter(|c| c.type_ == "Ready").any(|c| c.status == "True");
                Ok((ready && restarts(&pod) > 0).then_some(()))
            })
            .await?;
        }
        add_address(ns, "b", "net1", "10.2.0.2/24")?;
        wait_reachable(ns, "a", "10.2.0.2").await?;
        // Their sandboxes are others, with other addresses; what the old ones had is free.
        used(&client, "boot", 3).await
    })
    .await?;
    patchbay::wait_ready(&lab).await?;
    delete_network(&client, "boot").await?;
    wait_deleted(&client, "boot", Duration::from_secs(30)).await.map(drop)
}
