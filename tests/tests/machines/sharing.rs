//! A subnet that claims and nodes share to its last address.

use std::{collections::BTreeSet, net::IpAddr};

use anyhow::{Context as _, Result, ensure};
use e2e::{
    bridge::{attached_pod, attachment_for, start_network, wait_for_event, wait_reachable},
    machine::TestVm,
};
use k8s_openapi::api::core::v1::Pod;
use kube::{ResourceExt as _, api::DeleteParams};
use lab::{
    Lab,
    kubevirt::VirtHandler,
    test_namespace::{TestNamespace, with_namespace},
};
use serde_json::{Value, json};

use super::end_network;

/// A /28 has 14 addresses.
const ADDRESSES: usize = 14;

/// The address of `net1` of a pod.
fn address(pod: &Pod) -> Result<IpAddr> {
    let text = pod.annotations().get("k8s.v1.cni.cncf.io/network-status").context("network-status")?;
    let entries: Vec<Value> = serde_json::from_str(text)?;
    let entry = entries.iter().find(|entry| entry["interface"] == "net1").context("no entry of net1")?;
    Ok(entry["ips"][0].as_str().context("no address")?.parse()?)
}

pub async fn machines_and_pods_share_a_subnet_to_its_last_address(lab: Lab) -> Result<()> {
    with_namespace(&lab, "machine-shared", async |ns: &TestNamespace| {
        let _handler = VirtHandler::start(&lab, Some(&ns.namespace)).await?;
        let ipam = json!({"subnets": ["10.79.0.0/28"], "persistent": true});
        let spec = json!({"overlay": {"vni": 79}, "attachment": attachment_for(ns), "ipam": ipam});
        start_network(&ns.client, "shared", spec).await?;
        let first = TestVm { ns, name: "first" };
        first.create(&[("blue", "shared", None)]).await?;
        first.wait_running(None).await?;
        let mut used = BTreeSet::from_iter(first.wait_attached("blue").await?.ips);
        // The nodes borrow what the controller's block has left.
        let names: Vec<String> = (1..ADDRESSES).map(|number| format!("pod-{number}")).collect();
        for (number, name) in names.iter().enumerate() {
            ns.create_pod(attached_pod(name, ["node-1", "node-2"][number % 2], "shared")).await?;
        }
        for name in &names {
            let given = address(&ns.wait_pod_ready(name).await?)?;
            ensure!(used.insert(given), "{name} got {given}, which is in use: {used:?}");
        }
        ensure!(used.len() == ADDRESSES, "{used:?}");
        // A machine waits with a reason, and borrows the address that a node frees.
        let second = TestVm { ns, name: "second" };
        second.create(&[("blue", "shared", None)]).await?;
        wait_for_event(ns, "network \"shared\" has no free IPv4 address left").await?;
        let freed = address(&ns.pods().get(&names[0]).await?)?;
        ns.pods().delete(&names[0], &DeleteParams::default().grace_period(0)).await?;
        second.wait_running(None).await?;
        let taken = second.wait_attached("blue").await?.ips;
        ensure!(taken == [freed], "{taken:?} is not {freed}");
        wait_reachable(ns, &names[1], &freed.to_string()).await?;
        // A pod gets the address of a deleted machine.
        let freed = first.wait_attached("blue").await?.ips;
        first.delete().await?;
        let last = ns.start_pod(attached_pod("last", "node-2", "shared")).await?;
        ensure!(freed == [address(&last)?], "{last:?}");
        wait_reachable(ns, "last", &taken[0].to_string()).await
    })
    .await?;
    end_network(&lab.client().await?, "shared").await
}
