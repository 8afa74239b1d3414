//! Drift: changed links are repaired; foreign links and NADs are not touched; unusable uplinks and ports are reported.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use e2e::{
    bridge::{
        WAIT_TIMEOUT, attachment_for, condition, create_network, delete_network, host_state, link, networks,
        node_report, start_network, start_pods_with_addresses, wait_deleted, wait_reachable, wait_ready,
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

/// How soon drift must be repaired.
const REPAIR_LIMIT: Duration = Duration::from_secs(1);

/// Runs `damage` on node-1, and asserts that it is repaired in time.
async fn damage_and_wait(
    lab: &Lab,
    what: &str,
    damage: &[&str],
    is_repaired: impl Fn() -> bool,
) -> Result<()> {
    lab.node("node-1").output(damage).with_context(|| what.to_owned())?;
    let repaired = || async { Ok(is_repaired().then_some(())) };
    let ((), took) = wait::within(REPAIR_LIMIT, &format!("repair of {what}"), repaired).await?;
    println!("{what}: repaired after {took:?}");
    Ok(())
}

pub async fn link_drift_is_repaired_within_1_s(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    with_namespace(&lab, "drift", async |ns: &TestNamespace| {
        start_network(&client, "drift", json!({"overlay": {"vni": 99}, "attachment": attachment_for(ns)}))
            .await?;
        start_pods_with_addresses(
            ns,
            [("client", "node-1", "drift", "10.6.0.1/24"), ("server", "node-2", "drift", "10.6.0.2/24")],
        )
        .await?;
        wait_reachable(ns, "client", "10.6.0.2").await?;
        let bridge =
            |key: &'static str| link(&lab, "node-1", "br-drift").map(|l| l[key].clone()).unwrap_or_default();
        let vxlan =
            |key: &'static str| link(&lab, "node-1", "vx-drift").map(|l| l[key].clone()).unwrap_or_default();
        let is_up = |flags: &Value| flags.to_string().contains("\"UP\"");
        let has_flood_entry = || {
            lab.node("node-1")
                .output(&["bridge", "fdb", "show", "dev", "vx-drift"])
                .is_ok_and(|text| text.contains("00:00:00:00:00:00 dst 172.30.0.12"))
        };
        ensure!(has_flood_entry(), "the flood list lacks the other node");
        let ports = lab.node("node-1").output(&["ls", "/sys/class/net/br-drift/brif"])?;
        let port = ports
            .split_whitespace()
            .find(|name| name.starts_with("veth"))
            .context("the pod's port")?
            .to_owned();
        let is_port = || link(&lab, "node-1", &port).is_some_and(|l| l["master"] == "br-drift");
        damage_and_wait(&lab, "mtu", &["ip", "link", "set", "br-drift", "mtu", "1000"], || {
            bridge("mtu") == 1450
        })
        .await?;
        damage_and_wait(&lab, "down", &["ip", "link", "set", "br-drift", "down"], || is_up(&bridge("flags")))
            .await?;
        damage_and_wait(&lab, "vxlan mtu", &["ip", "link", "set", "vx-drift", "mtu", "1000"], || {
            vxlan("mtu") == 1450
        })
        .await?;
        damage_and_wait(&lab, "vxlan down", &["ip", "link", "set", "vx-drift", "down"], || {
            is_up(&vxlan("flags")) && has_flood_entry()
        })
        .await?;
        damage_and_wait(&lab, "vxlan port", &["ip", "link", "set", "vx-drift", "nomaster"], || {
            vxlan("master") == "br-drift"
        })
        .await?;
        damage_and_wait(&lab, "vxlan deleted", &["ip", "link", "del", "vx-drift"], || {
            vxlan("master") == "br-drift" && is_up(&vxlan("flags")) && has_flood_entry()
        })
        .await?;
        let entry = ["bridge", "fdb", "del", "00:00:00:00:00:00", "dev", "vx-drift", "dst", "172.30.0.12"];
        damage_and_wait(&lab, "flood entry", &entry, has_flood_entry).await?;
        let entry = ["bridge", "fdb", "append", "00:00:00:00:00:00", "dev", "vx-drift", "dst", "192.0.2.9"];
        damage_and_wait(&lab, "foreign flood entry", &entry, || {
            lab.node("node-1")
                .output(&["bridge", "fdb", "show", "dev", "vx-drift"])
                .is_ok_and(|t| !t.contains("192.0.2.9"))
        })
        .await?;
        damage_and_wait(&lab, "address", &["ip", "addr", "add", "10.6.0.77/24", "dev", "br-drift"], || {
            lab.node("node-1")
                .output(&["ip", "-o", "addr", "show", "dev", "br-drift"])
                .is_ok_and(|t| t.trim().is_empty())
        })
        .await?;
        damage_and_wait(&lab, "pod's port", &["ip", "link", "set", &port, "nomaster"], is_port).await?;
        damage_and_wait(&lab, "bridge deleted", &["ip", "link", "del", "br-drift"], || {
            is_up(&bridge("flags")) && vxlan("master") == "br-drift" && is_port()
        })
        .await?;
        wait_reachable(ns, "client", "10.6.0.2").await?;
        // A deleted NAD.
        lab.kubectl(&["-n", &ns.namespace, "delete", "net-attach-def", "drift", "--wait=false"])?;
        let recreated =
            || async { lab.kubectl(&["-n", &ns.namespace, "get", "net-attach-def", "drift"]).map(Some) };
        let (_, took) = wait::within(REPAIR_LIMIT, "the NAD to be recreated", recreated).await?;
        println!("NAD deleted: recreated after {took:?}");
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
            .context("patchbay_node_repairs_total")?;
        ensure!(repairs.trim().parse::<f64>()? >= 11.0, "{repairs}");
        wait::until(WAIT_TIMEOUT, "an event Repaired", || async {
            let events =
                lab.kubectl(&["get", "events", "-A", "--field-selector", "involvedObject.name=drift"])?;
            Ok(events.contains("Repaired").then_some(()))
        })
        .await
    })
    .await?;
    delete_network(&client, "drift").await?;
    wait_deleted(&client, "drift").await.map(drop)
}

pub async fn an_uplink_that_a_node_needs_is_rejected_only_on_that_node(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    lab.node("node-1").output(&["ip", "addr", "add", "192.0.2.1/24", "dev", "eth2"])?;
    create_network(&client, "needed", json!({"uplink": "eth2"})).await?;
    let rejected = wait::until(WAIT_TIMEOUT, "node-1 to reject the uplink", || async {
        let (one, two) = (
            node_report(&client, "node-1", "needed").await?,
            node_report(&client, "node-2", "needed").await?,
        );
        let ready = two.is_some_and(|entry| entry["ready"] == true);
        Ok(one.filter(|entry| ready && entry["ready"] == false && entry["reason"] == "UplinkRefused"))
    })
    .await?;
    println!("{rejected}");
    ensure!(rejected["message"].as_str().is_some_and(|m| m.contains("192.0.2.1")), "{rejected}");
    let object = wait::until(WAIT_TIMEOUT, "the network's status", || async {
        let object = networks(&client).get("needed").await?;
        let reported = object
            .status
            .as_ref()
            .is_some_and(|s| s.not_ready.iter().any(|n| n.node == "node-1" && n.reason == "UplinkRefused"));
        Ok(reported.then_some(object))
    })
    .await?;
    ensure!(condition(&object, "Ready").0 == "False", "{object:?}");
    ensure!(link(&lab, "node-1", "eth2").is_some_and(|l| l["master"].is_null()), "the NIC was changed");
    lab.node("node-1").output(&["ip", "addr", "del", "192.0.2.1/24", "dev", "eth2"])?;
    wait_ready(&client, "needed").await?;
    delete_network(&client, "needed").await?;
    wait_deleted(&client, "needed").await?;
    // eth0 has the default route, the node's address and the connection to the API server.
    create_network(&client, "needed", json!({"uplink": "eth0"})).await?;
    for node in NODES {
        wait::until(WAIT_TIMEOUT, "both nodes to reject the uplink", || async {
            Ok(node_report(&client, node, "needed").await?.filter(|entry| entry["reason"] == "UplinkRefused"))
        })
        .await?;
    }
    delete_network(&client, "needed").await?;
    wait_deleted(&client, "needed").await.map(drop)
}

pub async fn foreign_links_and_nads_are_not_touched(lab: Lab) -> Result<()> {
    with_namespace(&lab, "foreign", async |ns: &TestNamespace| {
        let client = &ns.client;
        lab.node("node-1").output(&["ip", "link", "add", "br-theirs", "type", "bridge"])?;
        let before = host_state(&lab, "node-1")?;
        let nad = json!({
            "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
            "metadata": {"name": "theirs", "namespace": ns.namespace},
            "spec": {"config": "{\"cniVersion\":\"0.3.1\",\"type\":\"bridge\",\"bridge\":\"x\"}"},
        });
        apply(&lab, &nad)?;
        let get = ["-n", &ns.namespace, "get", "net-attach-def", "theirs", "-o", "yaml"];
        let nad_before = lab.kubectl(&get)?;
        create_network(client, "theirs", json!({"attachment": attachment_for(ns)})).await?;
        let object = wait::until(WAIT_TIMEOUT, "condition Conflict", || async {
            let object = networks(client).get("theirs").await?;
            Ok((condition(&object, "Conflict").0 == "True").then_some(object))
        })
        .await?;
        let (_, _, message) = condition(&object, "Conflict");
        println!("{message}");
        ensure!(message.contains(&format!("{}/theirs", ns.namespace)), "{message}");
        let entry = wait::until(WAIT_TIMEOUT, "reason ForeignLink on node-1", || async {
            Ok(node_report(client, "node-1", "theirs")
                .await?
                .filter(|entry| entry["reason"] == "ForeignLink"))
        })
        .await?;
        ensure!(entry["message"].as_str().is_some_and(|m| m.contains("br-theirs")), "{entry}");
        delete_network(client, "theirs").await?;
        wait_deleted(client, "theirs").await?;
        // A foreign link alone is also a conflict.
        create_network(client, "link", json!({"bridge": "br-theirs"})).await?;
        let object = wait::until(WAIT_TIMEOUT, "condition Conflict", || async {
            let object = networks(client).get("link").await?;
            Ok((condition(&object, "Conflict").0 == "True").then_some(object))
        })
        .await?;
        let (_, _, message) = condition(&object, "Conflict");
        println!("{message}");
        ensure!(message.contains("node-1") && message.contains("br-theirs"), "{message}");
        delete_network(client, "link").await?;
        wait_deleted(client, "link").await?;
        ensure!(host_state(&lab, "node-1")? == before, "the foreign bridge was changed");
        ensure!(lab.kubectl(&get)? == nad_before, "the foreign NAD was changed");
        lab.node("node-1").output(&["ip", "link", "del", "br-theirs"]).map(drop)
    })
    .await
}

fn apply(lab: &Lab, object: &Value) -> Result<()> {
    let path = std::env::temp_dir().join(format!("patchbay-e2e-{}.json", std::process::id()));
    std::fs::write(&path, object.to_string())?;
    let outcome = lab.kubectl(&["apply", "-f", path.to_str().context("the path is not UTF-8")?]);
    std::fs::remove_file(&path)?;
    outcome.map(drop)
}

pub async fn a_vxlan_port_in_use_fails_only_on_that_node(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let mut holder = lab.node("node-1").command("tool")?.args(["echo", "4790"]).spawn()?;
    let port_in_use = async {
        wait::until(WAIT_TIMEOUT, "the port to be in use", || async {
            let sockets = lab.node("node-1").output(&["cat", "/proc/net/udp", "/proc/net/udp6"])?;
            Ok(sockets.contains(":12B6 ").then_some(()))
        })
        .await?;
        create_network(&client, "port-in-use", json!({"overlay": {"vni": 8, "port": 4790}})).await?;
        wait::until(WAIT_TIMEOUT, "reason PortInUse on node-1", || async {
            let (one, two) = (
                node_report(&client, "node-1", "port-in-use").await?,
                node_report(&client, "node-2", "port-in-use").await?,
            );
            let ready = two.is_some_and(|entry| entry["ready"] == true);
            Ok(one.filter(|entry| ready && entry["reason"] == "PortInUse"))
        })
        .await
    };
    let entry = port_in_use.await;
    // The child process is `nsenter`, which waits for the process inside the namespace.
    lab.node("node-1").output(&["sh", "-c", "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline 2>/dev/null | grep -q '^[^ ]*tool echo 4790' && kill -9 ${p#/proc/}; done; true"])?;
    holder.wait()?;
    println!("{}", entry?["message"]);
    wait_ready(&client, "port-in-use").await?;
    delete_network(&client, "port-in-use").await?;
    wait_deleted(&client, "port-in-use").await.map(drop)
}
