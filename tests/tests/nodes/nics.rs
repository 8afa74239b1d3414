//! NodeNetworks: which NICs nodes publish, how fast, and with how few writes.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use api::NodeNetwork;
use e2e::bridge::WAIT_TIMEOUT;
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams},
};
use lab::{
    Lab,
    test_namespace::{TestNamespace, pod, with_namespace},
    wait,
};
use serde_json::{Value, json};

use crate::idle::{patchbay_writes, wait_until_idle};

pub fn nodenetworks(client: &Client) -> Api<NodeNetwork> {
    Api::all(client.clone())
}

/// The interfaces that a node publishes, by name.
pub async fn interfaces(client: &Client, node: &str) -> Result<BTreeMap<String, Value>> {
    let object = nodenetworks(client).get(node).await?;
    let status = serde_json::to_value(object.status)?;
    let list = status["interfaces"].as_array().cloned().unwrap_or_default();
    Ok(list.into_iter().map(|i| (i["name"].as_str().unwrap_or_default().to_owned(), i)).collect())
}

/// Waits until a NodeNetwork lists a NIC or not, and returns how long that took.
pub async fn wait_for_nic(client: &Client, node: &str, nic: &str, present: bool) -> Result<Duration> {
    let start = Instant::now();
    wait::until(WAIT_TIMEOUT, &nic_change(node, nic, present), || is_listed(client, node, nic, present))
        .await?;
    Ok(start.elapsed())
}

/// The same within the product's limit. Writes are limited to one per second, so the limit holds for an idle node.
async fn wait_for_nic_in_time(client: &Client, node: &str, nic: &str, present: bool) -> Result<Duration> {
    let what = nic_change(node, nic, present);
    let ((), took) =
        wait::within(Duration::from_secs(1), &what, || is_listed(client, node, nic, present)).await?;
    Ok(took)
}

fn nic_change(node: &str, nic: &str, present: bool) -> String {
    format!("{nic} to {} NodeNetwork {node}", if present { "appear in" } else { "disappear from" })
}

async fn is_listed(client: &Client, node: &str, nic: &str, present: bool) -> Result<Option<()>> {
    Ok((interfaces(client, node).await?.contains_key(nic) == present).then_some(()))
}

pub async fn every_node_publishes_its_nics_and_its_vtep_address(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    for (node, address) in [("node-1", "172.30.0.11"), ("node-2", "172.30.0.12")] {
        let found = interfaces(&client, node).await?;
        ensure!(found.keys().eq(["eth0", "eth1", "eth2"]), "{found:#?}");
        let first = &found["eth0"];
        ensure!(first["defaultRoute"] == true && first["state"] == "Up" && first["mtu"] == 1500, "{first}");
        ensure!(first["addresses"][0] == format!("{address}/24"), "{first}");
        ensure!(found["eth1"].get("defaultRoute").is_none_or(|v| v == false), "{}", found["eth1"]);
        let mac = lab.node(node).output(&["cat", "/sys/class/net/eth1/address"])?;
        ensure!(found["eth1"]["mac"] == mac.trim(), "{}", found["eth1"]);
        let object = nodenetworks(&client).get(node).await?;
        let status = serde_json::to_value(&object.status)?;
        ensure!(status["vtep"]["address"] == address && status["vtep"]["interface"] == "eth0", "{status}");
        let owners = object.metadata.owner_references.unwrap_or_default();
        ensure!(owners.len() == 1 && owners[0].kind == "Node" && owners[0].name == node, "{owners:?}");
    }
    let table = lab.kubectl(&["get", "nnet"])?;
    ensure!(table.contains("172.30.0.11") && table.contains("eth0"), "{table}");
    Ok(())
}

pub async fn twenty_starting_pods_cause_no_write(lab: Lab) -> Result<()> {
    let offset = wait_until_idle(&lab).await?;
    with_namespace(&lab, "twenty", async |ns: &TestNamespace| {
        let names: Vec<String> = (0..20).map(|n| format!("p{n}")).collect();
        for (number, name) in names.iter().enumerate() {
            ns.create_pod(pod(name).on(if number % 2 == 0 { "node-1" } else { "node-2" })).await?;
        }
        for name in &names {
            ns.wait_pod_ready(name).await?;
        }
        let links = lab.node("node-1").output(&["ls", "/sys/class/net"])?;
        ensure!(links.matches("veth").count() >= 10, "the pods have no links: {links}");
        Ok(())
    })
    .await?;
    let found = patchbay_writes(&lab, offset)?;
    ensure!(found.is_empty(), "{found:?}");
    Ok(())
}

pub async fn nic_changes_are_published_within_1_s(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let node = lab.node("node-2");
    for round in 0..if e2e::soak() { 50 } else { 3 } {
        let offset = wait_until_idle(&lab).await?;
        node.output(&[
            "ip",
            "link",
            "add",
            "nic9",
            "up",
            "mtu",
            "1400",
            "address",
            "02:00:00:00:09:01",
            "type",
            "veth",
            "peer",
            "vethnic9",
        ])?;
        let added = wait_for_nic_in_time(&client, "node-2", "nic9", true).await?;
        let nic = interfaces(&client, "node-2").await?.remove("nic9").context("the NIC")?;
        ensure!(nic["mac"] == "02:00:00:00:09:01" && nic["mtu"] == 1400 && nic["kind"] == "veth", "{nic}");
        wait_until_idle(&lab).await?;
        node.output(&["ip", "link", "del", "nic9"])?;
        let removed = wait_for_nic_in_time(&client, "node-2", "nic9", false).await?;
        println!("round {round}: added after {added:?}, removed after {removed:?}");
        let found = patchbay_writes(&lab, offset)?;
        ensure!(found.len() <= 3, "{found:?}");
    }
    Ok(())
}

pub async fn a_flapping_nic_causes_at_most_one_write_per_second(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let node = lab.node("node-1");
    let (offset, started) = (lab.audit_offset()?, Instant::now());
    while started.elapsed() < Duration::from_secs(5) {
        for state in ["down", "up"] {
            node.output(&["ip", "link", "set", "eth2", state])?;
        }
    }
    let seconds = started.elapsed().as_secs();
    wait::until(WAIT_TIMEOUT, "the last state to be published", || async {
        Ok((interfaces(&client, "node-1").await?["eth2"]["state"] == "Up").then_some(()))
    })
    .await?;
    let found = patchbay_writes(&lab, offset)?;
    println!("{} writes in {seconds} s of flapping", found.len());
    ensure!(!found.is_empty() && found.len() as u64 <= seconds + 2, "{} writes in {seconds} s", found.len());
    Ok(())
}

pub async fn nodenetwork_drift_is_repaired(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let api = nodenetworks(&client);
    // The last state of the flapping NIC of an earlier test may not be published yet.
    wait_until_idle(&lab).await?;
    let before = api.get("node-1").await?;
    let wrong = json!({"status": {"vtep": {"address": "192.0.2.1", "interface": "eth9", "mtu": 1500}, "interfaces": []}});
    api.patch_status("node-1", &PatchParams::default(), &Patch::Merge(&wrong))
        .await
        .context("edit the status")?;
    wait::until(WAIT_TIMEOUT, "the status to be repaired", || async {
        Ok((api.get("node-1").await?.status == before.status).then_some(()))
    })
    .await?;
    let foreign = json!({"metadata": {"ownerReferences": [
        {"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "00000000-0000-0000-0000-000000000000"},
    ]}});
    api.patch("node-1", &PatchParams::default(), &Patch::Merge(&foreign))
        .await
        .context("add a foreign owner")?;
    wait::until(WAIT_TIMEOUT, "the foreign owner to be removed", || async {
        let owners =
            api.get_opt("node-1").await?.and_then(|n| n.metadata.owner_references).unwrap_or_default();
        Ok((owners.len() == 1 && owners[0].kind == "Node").then_some(()))
    })
    .await?;
    api.delete("node-1", &DeleteParams::default()).await.context("delete the NodeNetwork")?;
    wait::until(WAIT_TIMEOUT, "a new NodeNetwork", || async {
        let now = api.get_opt("node-1").await?;
        Ok(now
            .filter(|n| {
                n.uid() != before.uid()
                    && serde_json::to_value(&n.status).is_ok_and(|s| s["vtep"]["address"] == "172.30.0.11")
            })
            .map(|_| ()))
    })
    .await
}
