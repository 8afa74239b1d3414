//! BridgeNetworks on two nodes: links, traffic, repair and deletion, as users see them.
#![allow(clippy::print_stdout, reason = "a test without the standard harness prints what it measured")]

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use e2e::{
    Suite,
    bridge::{
        SOON, address_of, condition, create, delete, gone, host_state, in_pod, join, link, lost, member,
        networks, on_node, reaches, ready, start,
    },
    patchbay, tests,
};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use lab::{
    Lab, Shape,
    audit::{Asked, Mark},
    scene::Scene,
    wait,
};
use serde_json::{Value, json};

const NODES: [&str; 2] = ["node-1", "node-2"];

fn main() -> ExitCode {
    Suite {
        name: "t-bridges",
        shape: Shape::Nodes(2),
        set_up: |lab| Box::pin(async move { patchbay::install(&lab).await }),
        tests: tests![
            a_network_is_ready_on_both_nodes_within_2_s_and_pods_of_a_node_reach_each_other,
            pods_of_different_nodes_reach_each_other_over_the_overlay_up_to_its_mtu,
            an_uplink_connects_pods_with_what_is_behind_it_and_comes_back_as_it_was,
            a_pod_on_a_node_without_the_network_waits_and_starts_when_it_comes,
            what_people_do_to_links_is_repaired_within_1_s,
            a_network_in_use_is_not_deleted_and_goes_within_3_s_of_its_last_user,
            an_uplink_that_a_node_needs_is_refused_there_and_not_elsewhere,
            links_and_attachments_of_others_are_left_alone,
            a_vxlan_port_that_another_program_holds_is_a_reason_on_that_node_alone,
            a_network_of_small_packets_has_pods_too,
            edits_converge_in_place_and_lose_no_packet,
            pods_come_and_go_while_the_daemon_is_away,
            pods_come_back_after_a_reboot_of_their_node,
            a_partitioned_node_holds_up_a_deletion_until_it_is_back,
            a_node_that_is_gone_holds_up_nothing,
            nothing_is_written_while_nothing_changes_and_little_when_something_does,
            each_capability_of_the_daemon_is_needed,
            no_call_was_refused_for_lack_of_rights,
        ],
    }
    .run()
}

fn in_namespace(scene: &Scene) -> Value {
    json!({"namespaces": [scene.namespace]})
}

async fn a_network_is_ready_on_both_nodes_within_2_s_and_pods_of_a_node_reach_each_other(
    lab: Lab,
) -> Result<()> {
    Scene::play(&lab, "local", async |scene: &Scene| {
        let client = &scene.client;
        let before = host_state(&lab, "node-1")?;
        create(client, "local", json!({"attachment": in_namespace(scene)})).await?;
        let took = ready(client, "local", SOON).await?;
        println!("ready on two nodes after {took:?}");
        for node in NODES {
            let bridge = link(&lab, node, "br-local").context("the bridge")?;
            ensure!(bridge["mtu"] == 1500 && bridge["flags"].to_string().contains("\"UP\""), "{bridge}");
            let addresses = lab.node(node).output(&["ip", "-o", "addr", "show", "dev", "br-local"])?;
            ensure!(addresses.trim().is_empty(), "the bridge has no address: {addresses}");
            let off = lab.node(node).output(&["cat", "/proc/sys/net/ipv6/conf/br-local/disable_ipv6"])?;
            ensure!(off.trim() == "1", "IPv6 is on");
            let object = Api::<Node>::all(client.clone()).get(node).await?;
            ensure!(
                object.labels().get("network.patchbay.dev/local").is_some_and(|v| v == "true"),
                "no label on {node}"
            );
        }
        let table = lab.kubectl(&["get", "bnet", "local"])?;
        ensure!(table.contains("br-local") && table.contains("1500") && table.contains("2/2"), "{table}");
        join(scene, "a", "node-1", "local", "10.9.0.1/24").await?;
        join(scene, "b", "node-1", "local@lan", "10.9.0.9/24").await.err().context("net1 is named lan")?;
        address_of(scene, "b", "lan", "10.9.0.2/24")?;
        reaches(scene, "a", "10.9.0.2").await?;
        let object = networks(client).get("local").await?;
        wait::until(Duration::from_secs(3), "two users", || async {
            let users = networks(client).get("local").await?.status.and_then(|s| s.users).unwrap_or_default();
            Ok((users.count == 2 && users.first.iter().all(|u| u.contains(&scene.namespace))).then_some(()))
        })
        .await?;
        ensure!(condition(&object, "Conflict").0 != "True", "{object:?}");
        // A requested hardware address is honoured.
        let request = r#"[{"name": "local", "mac": "02:00:00:aa:bb:01"}]"#;
        scene.start(member("c", "node-1", request)).await?;
        let mac = scene.exec("c", &["cat", "/sys/class/net/net1/address"])?;
        ensure!(mac.trim() == "02:00:00:aa:bb:01", "{mac}");
        for name in ["a", "b", "c"] {
            scene.pods().delete(name, &DeleteParams::default().grace_period(0)).await?;
        }
        delete(client, "local").await?;
        gone(client, "local", Duration::from_secs(15)).await?;
        let after = host_state(&lab, "node-1")?;
        ensure!(before == after, "before:\n{before}\nafter:\n{after}");
        for node in NODES {
            let object = Api::<Node>::all(client.clone()).get(node).await?;
            ensure!(!object.labels().contains_key("network.patchbay.dev/local"), "the label stays on {node}");
        }
        Ok(())
    })
    .await
}

async fn pods_of_different_nodes_reach_each_other_over_the_overlay_up_to_its_mtu(lab: Lab) -> Result<()> {
    Scene::play(&lab, "overlay", async |scene: &Scene| {
        let client = &scene.client;
        let spec = json!({"mtu": 9000, "overlay": {"vni": 4711}, "attachment": in_namespace(scene)});
        start(client, "over", spec).await?;
        // Another beside it.
        start(client, "over2", json!({"overlay": {"vni": 4712}, "attachment": in_namespace(scene)})).await?;
        let object = networks(client).get("over").await?;
        ensure!(object.status.as_ref().and_then(|s| s.mtu) == Some(1450), "{object:?}");
        let (reduced, _, why) = condition(&object, "MtuReduced");
        ensure!(reduced == "True" && why.contains("1450"), "{why}");
        let config = lab.kubectl(&[
            "-n",
            &scene.namespace,
            "get",
            "net-attach-def",
            "over",
            "-o",
            "jsonpath={.spec.config}",
        ])?;
        ensure!(serde_json::from_str::<Value>(&config)?["mtu"] == 1450, "{config}");
        let a = join(scene, "a", "node-1", "over", "10.8.0.1/24").await?;
        join(scene, "b", "node-2", "over", "10.8.0.2/24").await?;
        join(scene, "c", "node-2", "over2", "10.8.0.3/24").await?;
        for (pod, address) in [("a", "fd00:8::1/64"), ("b", "fd00:8::2/64")] {
            address_of(scene, pod, "net1", address)?;
        }
        reaches(scene, "a", "10.8.0.2").await?;
        reaches(scene, "a", "fd00:8::2").await?;
        // A packet as large as the network, never to be cut on the way; and one byte more.
        let ping = |size: &str| {
            in_pod(
                &lab,
                &a,
                &["/usr/bin/ping", "-M", "do", "-c", "3", "-i", "0.2", "-W", "2", "-s", size, "10.8.0.2"],
            )
        };
        ensure!(lost(&ping("1422")?)? == 0, "a packet of 1450 bytes passes");
        ensure!(ping("1423").is_err(), "a packet of 1451 bytes passed");
        ensure!(
            scene.exec("a", &["ping", "-c", "1", "-W", "1", "10.8.0.3"]).is_err(),
            "networks are kept apart"
        );
        // TCP too, with more than fits into one packet.
        let text = "x".repeat(4000);
        scene.start(member("d", "node-2", "over").command(&["tool", "echo", "7000"])).await?;
        address_of(scene, "d", "net1", "10.8.0.4/24")?;
        wait::until(Duration::from_secs(5), "an answer over TCP", || async {
            let answer = scene.exec("a", &["tool", "ask", "tcp", "10.8.0.4:7000", &text])?;
            Ok(answer.contains(&text).then_some(()))
        })
        .await?;
        Ok(())
    })
    .await?;
    let client = lab.client().await?;
    for name in ["over", "over2"] {
        delete(&client, name).await?;
    }
    for name in ["over", "over2"] {
        gone(&client, name, Duration::from_secs(30)).await?;
    }
    ensure!(
        link(&lab, "node-1", "vx-over").is_none() && link(&lab, "node-2", "br-over").is_none(),
        "links stay"
    );
    Ok(())
}

async fn an_uplink_connects_pods_with_what_is_behind_it_and_comes_back_as_it_was(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    for (node, mtu, state) in [("node-1", "1400", "down"), ("node-2", "1500", "up")] {
        lab.node(node).output(&["ip", "link", "set", "eth1", "mtu", mtu])?;
        lab.node(node).output(&["ip", "link", "set", "eth1", state])?;
    }
    let before = [host_state(&lab, "node-1")?, host_state(&lab, "node-2")?];
    Scene::play(&lab, "uplink", async |scene: &Scene| {
        start(&client, "up", json!({"uplink": "eth1", "attachment": in_namespace(scene)})).await?;
        let eth1 = link(&lab, "node-1", "eth1").context("the uplink")?;
        ensure!(eth1["master"] == "br-up" && eth1["mtu"] == 1500, "{eth1}");
        join(scene, "a", "node-1", "up", "10.7.0.1/24").await?;
        join(scene, "b", "node-2", "up", "10.7.0.2/24").await?;
        reaches(scene, "a", "10.7.0.2").await
    })
    .await?;
    delete(&client, "up").await?;
    gone(&client, "up", Duration::from_secs(30)).await?;
    let after = [host_state(&lab, "node-1")?, host_state(&lab, "node-2")?];
    lab.node("node-1").output(&["ip", "link", "set", "eth1", "mtu", "1500", "up"])?;
    ensure!(before == after, "before: {before:#?}\nafter: {after:#?}");
    Ok(())
}

async fn a_pod_on_a_node_without_the_network_waits_and_starts_when_it_comes(lab: Lab) -> Result<()> {
    Scene::play(&lab, "waits", async |scene: &Scene| {
        let client = &scene.client;
        let spec = json!({
            "nodeSelector": {"matchLabels": {"lab/zone": "a"}}, "attachment": in_namespace(scene),
        });
        create(client, "zone", spec).await?;
        wait::until(Duration::from_secs(5), "the attachment", || async {
            lab.kubectl(&["-n", &scene.namespace, "get", "net-attach-def", "zone"]).map(Some)
        })
        .await?;
        scene.create(member("p", "node-2", "zone")).await?;
        let refused = wait::until(Duration::from_secs(20), "the reason in the pod's events", || async {
            let events = lab.kubectl(&[
                "-n",
                &scene.namespace,
                "get",
                "events",
                "-o",
                "jsonpath={.items[*].message}",
            ])?;
            Ok(events.contains("not selected").then_some(events))
        })
        .await?;
        println!("the pod's events say: {}", refused.chars().take(300).collect::<String>());
        ensure!(link(&lab, "node-2", "br-zone").is_none(), "no plugin makes a bridge");
        lab.kubectl(&["label", "node", "node-2", "lab/zone=a"])?;
        ready(client, "zone", SOON).await?;
        scene.ready("p").await?;
        let object = networks(client).get("zone").await?;
        ensure!(object.status.and_then(|s| s.nodes).is_some_and(|n| n.summary == "1/1"), "one node");
        // The node leaves: the pod keeps its link until it goes.
        lab.kubectl(&["label", "node", "node-2", "lab/zone-"])?;
        wait::until(Duration::from_secs(5), "the reason", || async {
            let entry = on_node(client, "node-2", "zone").await?;
            Ok(entry.filter(|entry| entry["reason"] == "InUse"))
        })
        .await?;
        ensure!(link(&lab, "node-2", "br-zone").is_some(), "the bridge of a running pod");
        scene.pods().delete("p", &DeleteParams::default().grace_period(0)).await?;
        wait::until(Duration::from_secs(10), "the bridge to go", || async {
            Ok(link(&lab, "node-2", "br-zone").is_none().then_some(()))
        })
        .await?;
        delete(client, "zone").await?;
        gone(client, "zone", Duration::from_secs(5)).await.map(drop)
    })
    .await
}

/// How long until `right` holds after `wrong` was done on node-1.
async fn repaired(lab: &Lab, what: &str, wrong: &[&str], right: impl Fn() -> bool) -> Result<Duration> {
    lab.node("node-1").output(wrong).with_context(|| what.to_owned())?;
    let start = Instant::now();
    wait::until(Duration::from_secs(1), &format!("repair of {what}"), || async { Ok(right().then_some(())) })
        .await?;
    println!("{what}: repaired after {:?}", start.elapsed());
    Ok(start.elapsed())
}

async fn what_people_do_to_links_is_repaired_within_1_s(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    Scene::play(&lab, "drift", async |scene: &Scene| {
        start(&client, "drift", json!({"overlay": {"vni": 99}, "attachment": in_namespace(scene)})).await?;
        join(scene, "a", "node-1", "drift", "10.6.0.1/24").await?;
        join(scene, "b", "node-2", "drift", "10.6.0.2/24").await?;
        reaches(scene, "a", "10.6.0.2").await?;
        let bridge =
            |key: &'static str| link(&lab, "node-1", "br-drift").map(|l| l[key].clone()).unwrap_or_default();
        let vxlan =
            |key: &'static str| link(&lab, "node-1", "vx-drift").map(|l| l[key].clone()).unwrap_or_default();
        let up = |flags: &Value| flags.to_string().contains("\"UP\"");
        let flood = || {
            lab.node("node-1")
                .output(&["bridge", "fdb", "show", "dev", "vx-drift"])
                .is_ok_and(|text| text.contains("00:00:00:00:00:00 dst 172.30.0.12"))
        };
        ensure!(flood(), "the flood list has the other node");
        let ports = lab.node("node-1").output(&["ls", "/sys/class/net/br-drift/brif"])?;
        let port = ports
            .split_whitespace()
            .find(|name| name.starts_with("veth"))
            .context("the pod's port")?
            .to_owned();
        let port_master = || link(&lab, "node-1", &port).is_some_and(|l| l["master"] == "br-drift");
        repaired(&lab, "mtu", &["ip", "link", "set", "br-drift", "mtu", "1000"], || bridge("mtu") == 1450)
            .await?;
        repaired(&lab, "down", &["ip", "link", "set", "br-drift", "down"], || up(&bridge("flags"))).await?;
        repaired(&lab, "vxlan mtu", &["ip", "link", "set", "vx-drift", "mtu", "1000"], || {
            vxlan("mtu") == 1450
        })
        .await?;
        repaired(&lab, "vxlan down", &["ip", "link", "set", "vx-drift", "down"], || {
            up(&vxlan("flags")) && flood()
        })
        .await?;
        repaired(&lab, "vxlan port", &["ip", "link", "set", "vx-drift", "nomaster"], || {
            vxlan("master") == "br-drift"
        })
        .await?;
        repaired(&lab, "vxlan deleted", &["ip", "link", "del", "vx-drift"], || {
            vxlan("master") == "br-drift" && up(&vxlan("flags")) && flood()
        })
        .await?;
        let entry = ["bridge", "fdb", "del", "00:00:00:00:00:00", "dev", "vx-drift", "dst", "172.30.0.12"];
        repaired(&lab, "flood entry", &entry, flood).await?;
        let entry = ["bridge", "fdb", "append", "00:00:00:00:00:00", "dev", "vx-drift", "dst", "192.0.2.9"];
        repaired(&lab, "foreign flood entry", &entry, || {
            lab.node("node-1")
                .output(&["bridge", "fdb", "show", "dev", "vx-drift"])
                .is_ok_and(|t| !t.contains("192.0.2.9"))
        })
        .await?;
        repaired(&lab, "address", &["ip", "addr", "add", "10.6.0.77/24", "dev", "br-drift"], || {
            lab.node("node-1")
                .output(&["ip", "-o", "addr", "show", "dev", "br-drift"])
                .is_ok_and(|t| t.trim().is_empty())
        })
        .await?;
        repaired(&lab, "pod's port", &["ip", "link", "set", &port, "nomaster"], port_master).await?;
        repaired(&lab, "bridge deleted", &["ip", "link", "del", "br-drift"], || {
            up(&bridge("flags")) && vxlan("master") == "br-drift" && port_master()
        })
        .await?;
        reaches(scene, "a", "10.6.0.2").await?;
        // The attachment.
        let begun = Instant::now();
        lab.kubectl(&["-n", &scene.namespace, "delete", "net-attach-def", "drift"])?;
        wait::until(Duration::from_secs(1), "the attachment to be back", || async {
            lab.kubectl(&["-n", &scene.namespace, "get", "net-attach-def", "drift"]).map(Some)
        })
        .await?;
        println!("attachment deleted: back after {:?}", begun.elapsed());
        let daemon = patchbay::daemon(&client, "node-1").await?;
        let metrics = lab.kubectl(&[
            "-n",
            patchbay::NAMESPACE,
            "exec",
            &daemon,
            "--",
            "/usr/bin/patchbay",
            "probe",
            "metrics",
        ])?;
        let repairs = metrics
            .lines()
            .find_map(|l| l.strip_prefix("patchbay_node_repairs_total "))
            .context("the metric")?;
        ensure!(repairs.trim().parse::<f64>()? >= 11.0, "{repairs}");
        wait::until(Duration::from_secs(5), "an event", || async {
            let events =
                lab.kubectl(&["get", "events", "-A", "--field-selector", "involvedObject.name=drift"])?;
            Ok(events.contains("Repaired").then_some(()))
        })
        .await
    })
    .await?;
    delete(&client, "drift").await?;
    gone(&client, "drift", Duration::from_secs(30)).await.map(drop)
}

async fn a_network_in_use_is_not_deleted_and_goes_within_3_s_of_its_last_user(lab: Lab) -> Result<()> {
    Scene::play(&lab, "used", async |scene: &Scene| {
        let client = &scene.client;
        start(client, "used", json!({"attachment": in_namespace(scene)})).await?;
        join(scene, "a", "node-1", "used", "10.5.0.1/24").await?;
        join(scene, "b", "node-1", "used", "10.5.0.2/24").await?;
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
        let refused = scene
            .pods()
            .create(&PostParams::default(), &serde_json::from_value(member("c", "node-1", "used").object())?)
            .await;
        match refused {
            Err(kube::Error::Api(e)) if e.message.contains("used") && e.message.contains("delet") => {
                println!("{}", e.message);
            }
            other => bail!("{other:?}"),
        }
        reaches(scene, "a", "10.5.0.2").await?;
        lab.kubectl(&["-n", &scene.namespace, "get", "net-attach-def", "used"])?;
        ensure!(
            link(&lab, "node-1", "br-used").is_some() && link(&lab, "node-2", "br-used").is_some(),
            "links stay"
        );
        scene.pods().delete("a", &DeleteParams::default().grace_period(0)).await?;
        wait::until(Duration::from_secs(3), "one user", || async {
            let users = networks(client).get("used").await?.status.and_then(|s| s.users).unwrap_or_default();
            Ok((users.count == 1).then_some(()))
        })
        .await?;
        lab.kubectl(&["-n", &scene.namespace, "delete", "pod", "b", "--now"])?;
        let took = gone(client, "used", Duration::from_secs(3)).await?;
        println!("gone {took:?} after its last user");
        ensure!(
            link(&lab, "node-1", "br-used").is_none() && link(&lab, "node-2", "br-used").is_none(),
            "links stay"
        );
        Ok(())
    })
    .await
}

async fn an_uplink_that_a_node_needs_is_refused_there_and_not_elsewhere(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    lab.node("node-1").output(&["ip", "addr", "add", "192.0.2.1/24", "dev", "eth2"])?;
    create(&client, "needed", json!({"uplink": "eth2"})).await?;
    let refused = wait::until(Duration::from_secs(3), "node-1 to refuse", || async {
        let (one, two) =
            (on_node(&client, "node-1", "needed").await?, on_node(&client, "node-2", "needed").await?);
        let ready = two.is_some_and(|entry| entry["ready"] == true);
        Ok(one.filter(|entry| ready && entry["ready"] == false && entry["reason"] == "UplinkRefused"))
    })
    .await?;
    println!("{refused}");
    ensure!(refused["message"].as_str().is_some_and(|m| m.contains("192.0.2.1")), "{refused}");
    let object = wait::until(Duration::from_secs(2), "the network's status", || async {
        let object = networks(&client).get("needed").await?;
        let named = object
            .status
            .as_ref()
            .is_some_and(|s| s.not_ready.iter().any(|n| n.node == "node-1" && n.reason == "UplinkRefused"));
        Ok(named.then_some(object))
    })
    .await?;
    ensure!(condition(&object, "Ready").0 == "False", "{object:?}");
    ensure!(link(&lab, "node-1", "eth2").is_some_and(|l| l["master"].is_null()), "the NIC was touched");
    lab.node("node-1").output(&["ip", "addr", "del", "192.0.2.1/24", "dev", "eth2"])?;
    ready(&client, "needed", SOON).await?;
    delete(&client, "needed").await?;
    gone(&client, "needed", Duration::from_secs(5)).await?;
    // The link of the default route, of the node's address and of the API connection.
    create(&client, "needed", json!({"uplink": "eth0"})).await?;
    for node in NODES {
        wait::until(Duration::from_secs(3), "both nodes to refuse", || async {
            Ok(on_node(&client, node, "needed").await?.filter(|entry| entry["reason"] == "UplinkRefused"))
        })
        .await?;
    }
    delete(&client, "needed").await?;
    gone(&client, "needed", Duration::from_secs(5)).await.map(drop)
}

async fn links_and_attachments_of_others_are_left_alone(lab: Lab) -> Result<()> {
    Scene::play(&lab, "foreign", async |scene: &Scene| {
        let client = &scene.client;
        lab.node("node-1").output(&["ip", "link", "add", "br-mine", "type", "bridge"])?;
        let before = host_state(&lab, "node-1")?;
        let nad = json!({
            "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
            "metadata": {"name": "mine", "namespace": scene.namespace},
            "spec": {"config": "{\"cniVersion\":\"0.3.1\",\"type\":\"bridge\",\"bridge\":\"x\"}"},
        });
        apply(&lab, &nad)?;
        let get = ["-n", &scene.namespace, "get", "net-attach-def", "mine", "-o", "yaml"];
        let nad_before = lab.kubectl(&get)?;
        create(client, "mine", json!({"attachment": in_namespace(scene)})).await?;
        let object = wait::until(Duration::from_secs(3), "the conflict", || async {
            let object = networks(client).get("mine").await?;
            Ok((condition(&object, "Conflict").0 == "True").then_some(object))
        })
        .await?;
        let (_, _, message) = condition(&object, "Conflict");
        println!("{message}");
        ensure!(message.contains(&format!("{}/mine", scene.namespace)), "{message}");
        let entry = wait::until(Duration::from_secs(3), "the reason on the node", || async {
            Ok(on_node(client, "node-1", "mine").await?.filter(|entry| entry["reason"] == "ForeignLink"))
        })
        .await?;
        ensure!(entry["message"].as_str().is_some_and(|m| m.contains("br-mine")), "{entry}");
        delete(client, "mine").await?;
        gone(client, "mine", Duration::from_secs(5)).await?;
        // A foreign link alone is a conflict too.
        create(client, "link", json!({"bridge": "br-mine"})).await?;
        let object = wait::until(Duration::from_secs(3), "the conflict over a link", || async {
            let object = networks(client).get("link").await?;
            Ok((condition(&object, "Conflict").0 == "True").then_some(object))
        })
        .await?;
        let (_, _, about) = condition(&object, "Conflict");
        println!("{about}");
        ensure!(about.contains("node-1") && about.contains("br-mine"), "{about}");
        delete(client, "link").await?;
        gone(client, "link", Duration::from_secs(5)).await?;
        ensure!(host_state(&lab, "node-1")? == before, "the foreign bridge was touched");
        ensure!(lab.kubectl(&get)? == nad_before, "the foreign attachment was touched");
        lab.node("node-1").output(&["ip", "link", "del", "br-mine"]).map(drop)
    })
    .await
}

fn apply(lab: &Lab, object: &Value) -> Result<()> {
    let path = std::env::temp_dir().join(format!("patchbay-e2e-{}.json", std::process::id()));
    std::fs::write(&path, object.to_string())?;
    let outcome = lab.kubectl(&["apply", "-f", path.to_str().context("a path")?]);
    std::fs::remove_file(&path)?;
    outcome.map(drop)
}

async fn a_vxlan_port_that_another_program_holds_is_a_reason_on_that_node_alone(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let mut holder = lab.node("node-1").command("tool")?.args(["echo", "4790"]).spawn()?;
    let held = async {
        wait::until(Duration::from_secs(5), "the port to be held", || async {
            let sockets = lab.node("node-1").output(&["cat", "/proc/net/udp", "/proc/net/udp6"])?;
            Ok(sockets.contains(":12B6 ").then_some(()))
        })
        .await?;
        create(&client, "held", json!({"overlay": {"vni": 8, "port": 4790}})).await?;
        wait::until(Duration::from_secs(3), "the reason on node-1", || async {
            let (one, two) =
                (on_node(&client, "node-1", "held").await?, on_node(&client, "node-2", "held").await?);
            let ready = two.is_some_and(|entry| entry["ready"] == true);
            Ok(one.filter(|entry| ready && entry["reason"] == "PortInUse"))
        })
        .await
    };
    let entry = held.await;
    // The program that was started is `nsenter`, which waits for the one inside.
    lab.node("node-1").output(&["sh", "-c", "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline 2>/dev/null | grep -q '^[^ ]*tool echo 4790' && kill -9 ${p#/proc/}; done; true"])?;
    holder.wait()?;
    println!("{}", entry?["message"]);
    ready(&client, "held", Duration::from_secs(40)).await?;
    delete(&client, "held").await?;
    gone(&client, "held", Duration::from_secs(5)).await.map(drop)
}

async fn a_network_of_small_packets_has_pods_too(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    Scene::play(&lab, "small", async |scene: &Scene| {
        start(&client, "small", json!({"mtu": 600, "attachment": in_namespace(scene)})).await?;
        join(scene, "a", "node-1", "small", "10.12.0.1/24").await?;
        join(scene, "b", "node-1", "small", "10.12.0.2/24").await?;
        reaches(scene, "a", "10.12.0.2").await?;
        let mtu = scene.exec("a", &["cat", "/sys/class/net/net1/mtu"])?;
        ensure!(mtu.trim() == "600", "{mtu}");
        Ok(())
    })
    .await?;
    delete(&client, "small").await?;
    gone(&client, "small", Duration::from_secs(30)).await.map(drop)
}

async fn edits_converge_in_place_and_lose_no_packet(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    Scene::play(&lab, "edits", async |scene: &Scene| {
        start(&client, "edit", json!({"mtu": 1400, "attachment": in_namespace(scene)})).await?;
        let a = join(scene, "a", "node-1", "edit", "10.4.0.1/24").await?;
        join(scene, "b", "node-1", "edit", "10.4.0.2/24").await?;
        reaches(scene, "a", "10.4.0.2").await?;
        let index = |l: &Option<Value>| l.as_ref().map(|l| l["ifindex"].clone());
        let before = index(&link(&lab, "node-1", "br-edit"));
        let pinging = {
            let lab = lab.clone();
            std::thread::spawn(move || {
                in_pod(&lab, &a, &["/usr/bin/ping", "-c", "60", "-i", "0.05", "-W", "1", "10.4.0.2"])
            })
        };
        let change = async |spec: Value| -> Result<()> {
            let patch = Patch::Merge(json!({"spec": spec}));
            networks(&client).patch("edit", &PatchParams::default(), &patch).await?;
            ready(&client, "edit", Duration::from_secs(3)).await.map(drop)
        };
        change(json!({"mtu": 1480})).await?;
        change(json!({"uplink": "eth1"})).await?;
        wait::until(Duration::from_secs(3), "pods with the old MTU to be counted", || async {
            let status = networks(&client).get("edit").await?.status.unwrap_or_default();
            Ok((status.mtu == Some(1480) && status.pods_with_old_mtu == Some(2)).then_some(()))
        })
        .await?;
        let summary = pinging.join().map_err(|_| anyhow::anyhow!("ping panicked"))??;
        ensure!(lost(&summary)? == 0, "{summary}");
        ensure!(index(&link(&lab, "node-1", "br-edit")) == before, "the bridge was made anew");
        ensure!(link(&lab, "node-1", "br-edit").is_some_and(|l| l["mtu"] == 1480), "the new MTU");
        // Lowering is refused while pods are on it, and so are changes of what cannot change.
        for (spec, words) in [
            (json!({"mtu": 1300}), "the MTU cannot go from 1480 down to 1300"),
            (json!({"bridge": "other"}), "spec.bridge cannot be changed"),
            (json!({"overlay": {"vni": 5}}), "spec.overlay cannot be set"),
            (json!({"attachment": {"name": "x"}}), "spec.attachment.name cannot be changed"),
            (json!({"uplink": "a/b"}), "spec.uplink"),
        ] {
            let patch = Patch::Merge(json!({"spec": spec}));
            match networks(&client).patch("edit", &PatchParams::default(), &patch).await {
                Err(kube::Error::Api(e)) if e.message.contains(words) => {}
                other => bail!("{spec}: {other:?}"),
            }
        }
        change(json!({"uplink": null})).await?;
        ensure!(link(&lab, "node-1", "eth1").is_some_and(|l| l["master"].is_null()), "the uplink is back");
        Ok(())
    })
    .await?;
    delete(&client, "edit").await?;
    gone(&client, "edit", Duration::from_secs(30)).await.map(drop)
}

async fn pods_come_and_go_while_the_daemon_is_away(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    Scene::play(&lab, "away", async |scene: &Scene| {
        start(&client, "away", json!({"attachment": in_namespace(scene)})).await?;
        join(scene, "a", "node-1", "away", "10.3.0.1/24").await?;
        join(scene, "b", "node-1", "away", "10.3.0.2/24").await?;
        // Nobody puts it back on this node.
        let keep_off = json!({"spec": {"template": {"spec": {"nodeSelector": {"lab/daemon": "wanted"}}}}});
        let daemons: Api<k8s_openapi::api::apps::v1::DaemonSet> =
            Api::namespaced(client.clone(), patchbay::NAMESPACE);
        lab.kubectl(&["label", "node", "node-2", "lab/daemon=wanted"])?;
        daemons.patch("patchbay-node", &PatchParams::default(), &Patch::Merge(&keep_off)).await?;
        wait::until(Duration::from_secs(60), "node-1 to be without a daemon", || async {
            Ok(patchbay::daemon(&client, "node-1").await.is_err().then_some(()))
        })
        .await?;
        reaches(scene, "a", "10.3.0.2").await?;
        scene.create(member("c", "node-1", "away")).await?;
        wait::until(Duration::from_secs(30), "the reason in the pod's events", || async {
            let events = lab.kubectl(&[
                "-n",
                &scene.namespace,
                "get",
                "events",
                "-o",
                "jsonpath={.items[*].message}",
            ])?;
            Ok(events.contains("does not answer").then_some(()))
        })
        .await?;
        lab.kubectl(&["-n", &scene.namespace, "delete", "pod", "b", "--now", "--timeout=30s"])?;
        let tombstones = lab.node("node-1").output(&["ls", "/var/lib/patchbay/tombstones"])?;
        ensure!(!tombstones.trim().is_empty(), "no tombstone");
        let back = json!({"spec": {"template": {"spec": {"nodeSelector": {"lab/daemon": null}}}}});
        daemons.patch("patchbay-node", &PatchParams::default(), &Patch::Merge(&back)).await?;
        patchbay::ready(&lab).await?;
        scene.ready("c").await?;
        let tombstones = lab.node("node-1").output(&["ls", "/var/lib/patchbay/tombstones"])?;
        ensure!(tombstones.trim().is_empty(), "{tombstones}");
        lab.kubectl(&["label", "node", "node-2", "lab/daemon-"]).map(drop)
    })
    .await?;
    delete(&client, "away").await?;
    gone(&client, "away", Duration::from_secs(30)).await.map(drop)
}

async fn pods_come_back_after_a_reboot_of_their_node(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    Scene::play(&lab, "reboot", async |scene: &Scene| {
        start(&client, "boot", json!({"overlay": {"vni": 31}, "attachment": in_namespace(scene)})).await?;
        join(scene, "a", "node-1", "boot", "10.2.0.1/24").await?;
        for name in ["b", "c"] {
            scene.start(member(name, "node-2", "boot")).await?;
        }
        let restarts = |pod: &Pod| {
            let statuses = pod.status.iter().flat_map(|s| s.container_statuses.iter().flatten());
            statuses.map(|s| s.restart_count).sum::<i32>()
        };
        lab.reboot("node-2").await?;
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
        reaches(scene, "a", "10.2.0.2").await
    })
    .await?;
    patchbay::ready(&lab).await?;
    delete(&client, "boot").await?;
    gone(&client, "boot", Duration::from_secs(30)).await.map(drop)
}

async fn a_partitioned_node_holds_up_a_deletion_until_it_is_back(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    start(&client, "part", json!({})).await?;
    lab.partition("node-2")?;
    delete(&client, "part").await?;
    // The leader may be on that node: another one follows after ten seconds.
    let object = wait::until(Duration::from_secs(25), "node-2 to be waited for", || async {
        let object = networks(&client).get("part").await?;
        let (_, _, message) = condition(&object, "Ready");
        Ok((message.contains("node-2") && link(&lab, "node-1", "br-part").is_none()).then_some(object))
    })
    .await?;
    println!("{}", condition(&object, "Ready").2);
    ensure!(link(&lab, "node-2", "br-part").is_some(), "the partitioned node knows nothing of it");
    lab.heal("node-2")?;
    gone(&client, "part", Duration::from_secs(90)).await?;
    ensure!(link(&lab, "node-2", "br-part").is_none(), "the link stays");
    Ok(())
}

async fn a_node_that_is_gone_holds_up_nothing(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    start(&client, "lost", json!({})).await?;
    lab.partition("node-2")?;
    lab.kubectl(&["delete", "node", "node-2", "--wait=false"])?;
    delete(&client, "lost").await?;
    gone(&client, "lost", Duration::from_secs(30)).await?;
    ensure!(link(&lab, "node-2", "br-lost").is_some(), "the partitioned node knows nothing of it");
    // It comes back, and cleans up what no longer exists.
    lab.heal("node-2")?;
    lab.reboot("node-2").await?;
    patchbay::ready(&lab).await?;
    wait::until(Duration::from_secs(30), "the leftover to go", || async {
        Ok(link(&lab, "node-2", "br-lost").is_none().then_some(()))
    })
    .await
}

/// What the two programs wrote since the mark, leases and events apart.
fn writes(lab: &Lab, mark: Mark) -> Result<Vec<Asked>> {
    let ours = |a: &Asked| {
        a.agent.starts_with("patchbay-") && a.is_write() && a.resource != "leases" && a.resource != "events"
    };
    Ok(lab.asked_since(mark)?.into_iter().filter(ours).collect())
}

async fn nothing_is_written_while_nothing_changes_and_little_when_something_does(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let mark = lab.audit_mark()?;
    start(&client, "rest", json!({"attachment": {"namespaces": ["default"]}})).await?;
    let made = writes(&lab, mark)?;
    println!("{} writes to make a network on two nodes", made.len());
    ensure!(made.len() <= 14, "{made:#?}");
    // What was coalesced comes within a second.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let mark = lab.audit_mark()?;
    let quiet = Duration::from_secs(if e2e::soak() { 120 } else { 10 });
    tokio::time::sleep(quiet).await;
    let found = writes(&lab, mark)?;
    ensure!(found.is_empty(), "{found:#?}");
    delete(&client, "rest").await?;
    gone(&client, "rest", Duration::from_secs(5)).await.map(drop)
}

async fn each_capability_of_the_daemon_is_needed(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let daemons: Api<k8s_openapi::api::apps::v1::DaemonSet> =
        Api::namespaced(client.clone(), patchbay::NAMESPACE);
    let with = async |capabilities: &[&str]| -> Result<()> {
        let patch = json!({"spec": {"template": {"spec": {"containers": [
            {"name": "node", "securityContext": {"capabilities": {"add": capabilities}}},
        ]}}}});
        daemons.patch("patchbay-node", &PatchParams::default(), &Patch::Strategic(&patch)).await?;
        patchbay::ready(&lab).await
    };
    let all = daemons.get("patchbay-node").await?;
    let all =
        json!(all)["spec"]["template"]["spec"]["containers"][0]["securityContext"]["capabilities"]["add"]
            .clone();
    ensure!(all == json!(["NET_ADMIN", "SYS_ADMIN"]), "{all}: each needs its part of this test");
    with(&["SYS_ADMIN"]).await?;
    create(&client, "caps", json!({"attachment": {"namespaces": ["default"]}})).await?;
    let entry = wait::until(Duration::from_secs(5), "the kernel's refusal", || async {
        Ok(on_node(&client, "node-1", "caps").await?.filter(|entry| entry["reason"] == "KernelRefused"))
    })
    .await?;
    println!("without NET_ADMIN: {}", entry["message"]);
    with(&["NET_ADMIN"]).await?;
    ready(&client, "caps", Duration::from_secs(40)).await?;
    let joined = Scene::play(&lab, "caps", async |scene: &Scene| {
        scene.create(member("p", "node-1", "default/caps")).await?;
        wait::until(Duration::from_secs(20), "the refusal in the pod's events", || async {
            let events = lab.kubectl(&[
                "-n",
                &scene.namespace,
                "get",
                "events",
                "-o",
                "jsonpath={.items[*].message}",
            ])?;
            Ok(events.contains("enter the network namespace").then_some(()))
        })
        .await?;
        with(&["NET_ADMIN", "SYS_ADMIN"]).await?;
        scene.ready("p").await.map(drop)
    })
    .await;
    with(&["NET_ADMIN", "SYS_ADMIN"]).await?;
    delete(&client, "caps").await?;
    gone(&client, "caps", Duration::from_secs(30)).await?;
    joined
}

async fn no_call_was_refused_for_lack_of_rights(lab: Lab) -> Result<()> {
    let refused: Vec<Asked> = lab
        .asked_since(Mark::START)?
        .into_iter()
        .filter(|a| a.agent.starts_with("patchbay-") && (a.code == 401 || a.code == 403))
        .collect();
    ensure!(refused.is_empty(), "{refused:#?}");
    Ok(())
}
