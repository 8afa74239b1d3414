//! What needs many pods or many minutes: part of `make soak`. Run it alone with `PATCHBAY_SOAK=1`.
#![allow(clippy::print_stdout, reason = "a test without the standard harness prints its measurements")]

use std::{
    collections::BTreeSet,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use e2e::{
    Suite,
    bridge::{
        WAIT_TIMEOUT, blocks, condition, delete_network, end_pod_without_del, networks, start_network,
        wait_deleted,
    },
    hotplug::{
        LivePod, create_bridge_nad, element, host_local_addresses, network_name, plain_pod, start_live_pod,
        statuses, wait_addresses_within,
    },
    patchbay::{self, daemon_pid, with_daemon_variable},
    run_suites, tests,
};
use futures::{StreamExt as _, TryStreamExt as _, future::try_join_all, stream};
use kube::api::ListParams;
use lab::{
    Lab, Topology,
    test_namespace::{TestNamespace, with_namespace},
    wait,
};
use serde_json::{Value, json};

const NODE: &str = "node-1";
/// Five times what Kubernetes recommends for a node.
const PODS: usize = 500;
/// How many pods start at a time, so that each starts within the timeout of one.
const STARTS: usize = 12;
/// How many pods are looked into at a time.
const CHECKS: usize = 8;
/// The timeout for a change of all pods.
const TIMEOUT: Duration = Duration::from_mins(5);
/// What the daemon may use for all pods, in MiB: an eighth of the limit in its manifest.
const MEMORY_OF_PODS: u64 = 64;

fn main() -> ExitCode {
    run_suites(&[Suite {
        name: "t-crowd",
        topology: Topology::Nodes(2),
        set_up: |lab| Box::pin(async move { patchbay::install(&lab).await }),
        tests: tests![
            // On another node.
            five_hundred_pods_of_a_node_are_hot_plugged
                + a_network_is_deleted_although_a_del_of_its_last_pod_never_came,
            addresses_of_sandboxes_that_ended_without_del_are_collected,
        ],
    }])
}

/// The resident memory of a node's daemon in MiB.
fn daemon_memory(lab: &Lab) -> Result<u64> {
    let status = lab.node(NODE).output(&["cat", &format!("/proc/{}/status", daemon_pid(lab, NODE)?)])?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).context("VmRSS")?;
    let kib: u64 = line.split_whitespace().nth(1).context("a size")?.parse()?;
    Ok(kib / 1024)
}

/// Sets the networks of all pods, and waits until each reports these interfaces and has their links.
async fn edit_all(pods: &[LivePod], networks: &Value, interfaces: &[&str]) -> Result<()> {
    let start = Instant::now();
    try_join_all(pods.iter().map(|pod| pod.set_networks(networks))).await?;
    // One list for all pods: a poll of each would be most of the load.
    let ns = &pods[0].ns;
    wait::until(TIMEOUT, &format!("all pods to report {interfaces:?}"), || async {
        let all = ns.pods().list(&ListParams::default()).await?.items;
        let differs = |entries: Vec<Value>| {
            !entries
                .iter()
                .map(|one| one["interface"].as_str().unwrap_or_default())
                .eq(interfaces.iter().copied())
        };
        let late = all.iter().filter(|pod| statuses(pod).is_ok_and(differs)).map(kube::ResourceExt::name_any);
        let late: Vec<String> = late.collect();
        ensure!(late.is_empty(), "{} of {} do not: {:?} …", late.len(), all.len(), late.first());
        Ok(Some(()))
    })
    .await?;
    println!("{} pods report {interfaces:?} after {:?}", pods.len(), start.elapsed());
    let checks: Vec<_> = pods.iter().map(|pod| pod.wait_interfaces(interfaces)).collect();
    stream::iter(checks).buffer_unordered(CHECKS).try_collect().await
}

pub async fn five_hundred_pods_of_a_node_are_hot_plugged(lab: Lab) -> Result<()> {
    with_namespace(&lab, "crowd", async |ns: &TestNamespace| {
        create_bridge_nad(ns, "blue", "10.164.0.0/16").await?;
        let network = network_name(ns, "blue");
        let (start, before) = (Instant::now(), daemon_memory(&lab)?);
        let starts = (0..PODS).map(|number| start_live_pod(ns, plain_pod(&format!("p{number}"), NODE)));
        let pods: Vec<LivePod> = stream::iter(starts).buffer_unordered(STARTS).try_collect().await?;
        println!("{PODS} pods run after {:?}", start.elapsed());
        let daemon = daemon_pid(&lab, NODE)?;
        edit_all(&pods, &json!([element("blue", "net1")]), &["net1"]).await?;
        let held = host_local_addresses(&lab, NODE, &network);
        let owned = pods.iter().map(|pod| pod.address("net1")).collect::<Result<BTreeSet<String>>>()?;
        ensure!(held == owned && owned.len() == PODS, "{} addresses for {PODS} pods", owned.len());
        ensure!(daemon_pid(&lab, NODE)? == daemon, "the daemon was restarted");
        let plugged = daemon_memory(&lab)?;

        // The next daemon finds all of them as they are.
        let indices = pods.iter().map(|pod| pod.link_index("net1")).collect::<Result<Vec<u64>>>()?;
        let start = Instant::now();
        patchbay::restart_daemon(&lab, &ns.client, NODE).await?;
        println!("the next daemon is ready after {:?}", start.elapsed());
        let daemon = daemon_pid(&lab, NODE)?;
        // It handles an edit only when it knows the pods.
        pods[0].set_networks(&json!([element("blue", "net1"), element("blue", "net2")])).await?;
        let took = pods[0].wait_interfaces_within(TIMEOUT, &["net1", "net2"]).await?;
        println!("the next daemon plugged {took:?} after an edit");
        ensure!(pods.iter().map(|pod| pod.link_index("net1")).collect::<Result<Vec<u64>>>()? == indices);
        let restarted = daemon_memory(&lab)?;

        edit_all(&pods, &json!([]), &[]).await?;
        let took = wait_addresses_within(TIMEOUT, &lab, NODE, &network, 0).await?;
        let unplugged = daemon_memory(&lab)?;
        println!("all addresses were released {took:?} later");
        println!("memory of the daemon in MiB: {before} before, {plugged} plugged, {restarted} restarted, {unplugged} at the end");
        ensure!(daemon_pid(&lab, NODE)? == daemon, "the daemon was restarted");
        for memory in [plugged, restarted, unplugged] {
            ensure!(memory <= before + MEMORY_OF_PODS, "the daemon uses {memory} MiB, and {before} before");
        }
        Ok(())
    })
    .await
}

/// An address counts until five minutes after it was given, whatever the interval of the collection is.
pub async fn a_network_is_deleted_although_a_del_of_its_last_pod_never_came(lab: Lab) -> Result<()> {
    with_namespace(&lab, "closed", async |ns: &TestNamespace| {
        let client = &ns.client;
        start_network(client, "closed", json!({"ipam": {"subnets": ["10.66.0.0/24"]}})).await?;
        end_pod_without_del(ns, "node-2", "closed").await?;
        delete_network(client, "closed").await?;
        wait::until(WAIT_TIMEOUT, "the condition InUse", || async {
            let (status, _, message) = condition(&networks(client).get("closed").await?, "InUse");
            let pod = format!("node node-2: 1 ({}/lost)", ns.namespace);
            Ok((status == "True" && message.contains(&pod)).then_some(()))
        })
        .await?;
        let limit = Duration::from_mins(5) + Duration::from_secs(90);
        let ((), took) = wait::within(limit, "the network to be deleted", || async {
            Ok(networks(client).get_opt("closed").await?.is_none().then_some(()))
        })
        .await?;
        println!("deleted {took:?} after its last pod, which ended without DEL");
        Ok(())
    })
    .await
}

/// A lease is collected five minutes after it was made at the earliest: a sandbox may take so long to appear.
pub async fn addresses_of_sandboxes_that_ended_without_del_are_collected(lab: Lab) -> Result<()> {
    with_daemon_variable(&lab, "PATCHBAY_GC_INTERVAL", "1s", async || {
        with_namespace(&lab, "swept", async |ns: &TestNamespace| {
            let client = &ns.client;
            start_network(client, "swept", json!({"ipam": {"subnets": ["10.65.0.0/24"]}})).await?;
            let start = Instant::now();
            end_pod_without_del(ns, NODE, "swept").await?;
            let collected = || async {
                let all = blocks(client, "swept").await?;
                let used = all.iter().filter_map(|block| block.status.as_ref()).map(|status| status.used);
                anyhow::Ok(used.sum::<i32>() == 0)
            };
            wait::expired(Duration::from_secs(20)).await;
            ensure!(!collected().await?, "a DEL released the address, or it was collected too early");
            wait::until(TIMEOUT * 2, "the address to be collected", || async {
                Ok(collected().await?.then_some(()))
            })
            .await?;
            println!("collected {:?} after its pod was created", start.elapsed());
            delete_network(client, "swept").await?;
            wait_deleted(client, "swept").await.map(drop)
        })
        .await
    })
    .await
}
