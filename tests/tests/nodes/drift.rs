//! Links that people change are repaired; links and addresses of others are left alone.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use e2e::{
    bridge::{
        READY_LIMIT, WAIT_TIMEOUT, attachment_for, condition, create_network, delete_network, host_state,
        link, networks, node_report, start_network, start_pods_with_addresses, wait_deleted, wait_reachable,
        wait_ready,
    },
    patchbay,
};
use lab::{
    Lab,
    test_namespace::{TestNamespace, with_namespace},
    wait,
};
use serde_json::{Value, json};

use crate::NODES;

/// How long until `right` holds after `wrong` was done on node-1.
async fn repaired(lab: &Lab, what: &str, wrong: &[&str], right: impl Fn() -> bool) -> Result<Duration> {
    lab.node("node-1").output(wrong).with_context(|| what.to_owned())?;
    let start = Instant::now();
    wait::until(Duration::from_secs(1), &format!("repair of {what}"), || async { Ok(right().then_some(())) })
        .await?;
    println!("{what}: repaired after {:?}", start.elapsed());
    Ok(start.elapsed())
}

pub async fn what_people_do_to_links_is_repaired_within_1_s(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    with_namespace(&lab, "drift", async |ns: &TestNamespace| {
        start_network(&client, "drift", json!({"overlay": {"vni": 99}, "attachment": attachment_for(ns)}))
            .await?;
        start_pods_with_addresses(
            ns,
            [("a", "node-1", "drift", "10.6.0.1/24"), ("b", "node-2", "drift", "10.6.0.2/24")],
        )
        .await?;
        wait_reachable(ns, "a", "10.6.0.2").await?;
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
        wait_reachable(ns, "a", "10.6.0.2").await?;
        // The attachment.
        let begun = Instant::now();
        lab.kubectl(&["-n", &ns.namespace, "delete", "net-attach-def", "drift"])?;
        wait::until(Duration::from_secs(1), "the attachment to be back", || async {
            lab.kubectl(&["-n", &ns.namespace, "get", "net-attach-def", "drift"]).map(Some)
        })
        .await?;
        println!("attachment deleted: back after {:?}", begun.elapsed());
        let daemon = patchbay::daemon_pod(&client, "node-1").await?;
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
    delete_network(&client, "drift").await?;
    wait_deleted(&client, "drift", Duration::from_secs(30)).await.map(drop)
}

pub async fn an_uplink_that_a_node_needs_is_refused_there_and_not_elsewhere(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    lab.node("node-1").output(&["ip", "addr", "add", "192.0.2.1/24", "dev", "eth2"])?;
    create_network(&client, "needed", json!({"uplink": "eth2"})).await?;
    let refused = wait::until(Duration::from_secs(3), "node-1 to refuse", || async {
        let (one, two) = (
            node_report(&client, "node-1", "needed").await?,
            node_report(&client, "node-2", "needed").await?,
        );
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
    wait_ready(&client, "needed", READY_LIMIT).await?;
    delete_network(&client, "needed").await?;
    wait_deleted(&client, "needed", Duration::from_secs(5)).await?;
    // The link of the default route, of the node's address and of the API connection.
    create_network(&client, "needed", json!({"uplink": "eth0"})).await?;
    for node in NODES {
        wait::until(Duration::from_secs(3), "both nodes to refuse", || async {
            Ok(node_report(&client, node, "needed").await?.filter(|entry| entry["reason"] == "UplinkRefused"))
        })
        .await?;
    }
    delete_network(&client, "needed").await?;
    wait_deleted(&client, "needed", Duration::from_secs(5)).await.map(drop)
}

pub async fn links_and_attachments_of_others_are_left_alone(lab: Lab) -> Result<()> {
    with_namespace(&lab, "foreign", async |ns: &TestNamespace| {
        let client = &ns.client;
        lab.node("node-1").output(&["ip", "link", "add", "br-mine", "type", "bridge"])?;
        let before = host_state(&lab, "node-1")?;
        let nad = json!({
            "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
            "metadata": {"name": "mine", "namespace": ns.namespace},
            "spec": {"config": "{\"cniVersion\":\"0.3.1\",\"type\":\"bridge\",\"bridge\":\"x\"}"},
        });
        apply(&lab, &nad)?;
        let get = ["-n", &ns.namespace, "get", "net-attach-def", "mine", "-o", "yaml"];
        let nad_before = lab.kubectl(&get)?;
        create_network(client, "mine", json!({"attachment": attachment_for(ns)})).await?;
        let object = wait::until(Duration::from_secs(3), "the conflict", || async {
            let object = networks(client).get("mine").await?;
            Ok((condition(&object, "Conflict").0 == "True").then_some(object))
        })
        .await?;
        let (_, _, message) = condition(&object, "Conflict");
        println!("{message}");
        ensure!(message.contains(&format!("{}/mine", ns.namespace)), "{message}");
        let entry = wait::until(Duration::from_secs(3), "the reason on the node", || async {
            Ok(node_report(client, "node-1", "mine").await?.filter(|entry| entry["reason"] == "ForeignLink"))
        })
        .await?;
        ensure!(entry["message"].as_str().is_some_and(|m| m.contains("br-mine")), "{entry}");
        delete_network(client, "mine").await?;
        wait_deleted(client, "mine", Duration::from_secs(5)).await?;
        // A foreign link alone is a conflict too.
        create_network(client, "link", json!({"bridge": "br-mine"})).await?;
        let object = wait::until(Duration::from_secs(3), "the conflict over a link", || async {
            let object = networks(client).get("link").await?;
            Ok((condition(&object, "Conflict").0 == "True").then_some(object))
        })
        .await?;
        let (_, _, about) = condition(&object, "Conflict");
        println!("{about}");
        ensure!(about.contains("node-1") && about.contains("br-mine"), "{about}");
        delete_network(client, "link").await?;
        wait_deleted(client, "link", Duration::from_secs(5)).await?;
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

pub async fn a_vxlan_port_that_another_program_holds_is_a_reason_on_that_node_alone(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let mut holder = lab.node("node-1").command("tool")?.args(["echo", "4790"]).spawn()?;
    let held = async {
        wait::until(WAIT_TIMEOUT, "the port to be held", || async {
            let sockets = lab.node("node-1").output(&["cat", "/proc/net/udp", "/proc/net/udp6"])?;
            Ok(sockets.contains(":12B6 ").then_some(()))
        })
        .await?;
        create_network(&client, "held", json!({"overlay": {"vni": 8, "port": 4790}})).await?;
        wait::until(WAIT_TIMEOUT, "the reason on node-1", || async {
            let (one, two) = (
                node_report(&client, "node-1", "held").await?,
                node_report(&client, "node-2", "held").await?,
            );
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
    wait_ready(&client, "held", Duration::from_secs(40)).await?;
    delete_network(&client, "held").await?;
    wait_deleted(&client, "held", WAIT_TIMEOUT).await.map(drop)
}
