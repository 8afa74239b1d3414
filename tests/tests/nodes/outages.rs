//! Programs, nodes and the API server go away and come back.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use e2e::{
    bridge::{
        address_of, condition, delete, gone, in_namespace, join, join_all, link, member, networks, reaches,
        start, told,
    },
    patchbay::{self, NAMESPACE},
};
use k8s_openapi::api::core::v1::Pod;
use lab::{Lab, Shape, scene::Scene, wait};
use serde_json::json;

use crate::{
    addresses::{addresses, used},
    idle::writes,
    nics::{interfaces, nodenetworks, shows},
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
    patchbay::ready(&lab).await
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
    lab.up(Shape::Nodes(2)).await?;
    let took = shows(&client, "node-1", "nic7", true, Duration::from_secs(60)).await?;
    println!("published {took:?} after the API server was back");
    lab.node("node-1").output(&["ip", "link", "del", "nic7"])?;
    lab.node("node-1").output(&["ip", "link", "del", "nic8"])?;
    shows(&client, "node-1", "nic8", false, Duration::from_secs(5)).await?;
    ensure!(restarts()? == before, "no daemon was restarted: {} then {}", before, restarts()?);
    patchbay::ready(&lab).await
}

pub async fn what_a_node_misses_during_a_partition_is_made_up_for_after_it(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    start(&client, "part", json!({})).await?;
    lab.partition("node-2")?;
    let cut = Instant::now();
    lab.node("node-2").output(&["ip", "link", "add", "nic5", "type", "veth", "peer", "vethnic5"])?;
    delete(&client, "part").await?;
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
        gone(&client, "part", Duration::from_secs(90)),
    )?;
    println!("after the partition ended: NIC published {published:?}, network gone {deleted:?}");
    ensure!(link(&lab, "node-2", "br-part").is_none(), "the link stays");
    lab.node("node-2").output(&["ip", "link", "del", "nic5"])?;
    shows(&client, "node-2", "nic5", false, Duration::from_secs(5)).await?;
    patchbay::ready(&lab).await
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
    patchbay::ready(&lab).await
}

pub async fn kubernetes_can_be_left_without_patchbay_and_get_it_back(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let links = || lab.node("node-1").output(&["ip", "-br", "link", "show", "type", "veth"]);
    let before = links()?;
    let file = patchbay::manifests().join("10-patchbay.yaml");
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
    let mark = lab.audit_mark()?;
    lab.node("node-1").output(&["ip", "link", "add", "nic6", "type", "veth", "peer", "vethnic6"])?;
    shows(&client, "node-1", "nic6", true, Duration::from_secs(2)).await?;
    lab.node("node-1").output(&["ip", "link", "del", "nic6"])?;
    ensure!(!writes(&lab, mark)?.is_empty(), "the audit log sees it");
    Ok(())
}

pub async fn pods_come_and_go_while_the_daemon_is_away(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let play = Scene::play(&lab, "away", async |scene: &Scene| {
        start(&client, "away", json!({"attachment": in_namespace(scene)})).await?;
        let ipam = json!({"attachment": in_namespace(scene), "ipam": {"subnets": ["10.55.0.0/24"]}});
        start(&client, "kept", ipam).await?;
        let (_, stay, _) = tokio::try_join!(
            join_all(scene, [("a", "node-1", "away", "10.3.0.1/24"), ("b", "node-1", "away", "10.3.0.2/24")]),
            scene.start(member("stay", "node-1", "kept")),
            scene.start(member("go", "node-1", "kept")),
        )?;
        let before = addresses(&stay)?;
        used(&client, "kept", 2).await?;
        // Nobody puts it back on this node.
        lab.kubectl(&["label", "node", "node-2", "lab/daemon=wanted"])?;
        patchbay::change_daemons(&client, json!({"nodeSelector": {"lab/daemon": "wanted"}})).await?;
        wait::until(Duration::from_secs(60), "node-1 to be without a daemon", || async {
            Ok(patchbay::daemon(&client, "node-1").await.is_err().then_some(()))
        })
        .await?;
        reaches(scene, "a", "10.3.0.2").await?;
        scene.create(member("c", "node-1", "away")).await?;
        told(scene, "does not answer", Duration::from_secs(30)).await?;
        scene.create(member("come", "node-1", "kept")).await?;
        lab.kubectl(&["-n", &scene.namespace, "delete", "pod", "b", "go", "--now", "--timeout=30s"])?;
        let tombstones = lab.node("node-1").output(&["ls", "/var/lib/patchbay/tombstones"])?;
        ensure!(!tombstones.trim().is_empty(), "no tombstone");
        patchbay::change_daemons(&client, json!({"nodeSelector": {"lab/daemon": null}})).await?;
        patchbay::ready(&lab).await?;
        scene.ready("c").await?;
        // No address is lost, none is given twice, and what went meanwhile is free.
        let come = scene.ready("come").await?;
        used(&client, "kept", 2).await?;
        ensure!(addresses(&come)? != before, "{before:?} was given twice");
        ensure!(addresses(&scene.pods().get("stay").await?)? == before, "it has others than {before:?}");
        let tombstones = lab.node("node-1").output(&["ls", "/var/lib/patchbay/tombstones"])?;
        ensure!(tombstones.trim().is_empty(), "{tombstones}");
        lab.kubectl(&["label", "node", "node-2", "lab/daemon-"]).map(drop)
    });
    Box::pin(play).await?;
    for name in ["away", "kept"] {
        delete(&client, name).await?;
        gone(&client, name, Duration::from_secs(30)).await?;
    }
    Ok(())
}

pub async fn after_a_reboot_pods_come_back_and_nics_that_went_are_not_published(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    Scene::play(&lab, "reboot", async |scene: &Scene| {
        let ipam = json!({"subnets": ["10.57.0.0/24"]});
        let spec = json!({"overlay": {"vni": 31}, "attachment": in_namespace(scene), "ipam": ipam});
        start(&client, "boot", spec).await?;
        tokio::try_join!(
            join(scene, "a", "node-1", "boot", "10.2.0.1/24"),
            scene.start(member("b", "node-2", "boot")),
            scene.start(member("c", "node-2", "boot")),
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
                let pod = scene.pods().get(name).await?;
                let ready = pod.status.iter().flat_map(|s| s.conditions.iter().flatten());
                let ready = ready.filter(|c| c.type_ == "Ready").any(|c| c.status == "True");
                Ok((ready && restarts(&pod) > 0).then_some(()))
            })
            .await?;
        }
        address_of(scene, "b", "net1", "10.2.0.2/24")?;
        reaches(scene, "a", "10.2.0.2").await?;
        // Their sandboxes are others, with other addresses; what the old ones had is free.
        used(&client, "boot", 3).await
    })
    .await?;
    patchbay::ready(&lab).await?;
    delete(&client, "boot").await?;
    gone(&client, "boot", Duration::from_secs(30)).await.map(drop)
}
