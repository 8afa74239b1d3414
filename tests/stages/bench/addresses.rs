//! Measures IPAM: `patchbay-ipam` compared with `host-local`, API requests, and the daemon's memory.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use e2e::bridge;
use kube::Client;
use lab::{Lab, audit::AuditedRequest, print_progress, wait};
use serde_json::{Value, json};

use super::{BenchRow, compare, memory_on, plugin::PluginTimer};

const NETWORK: &str = "bench-ipam";
/// Rounds per plugin, and calls per round. Rounds are short, so that other load affects both plugins alike.
const SEQUENTIAL: (usize, usize) = (40, 10);
const PARALLEL: (usize, usize) = (20, 48);
const ALLOCATIONS: usize = 1000;

/// Runs all IPAM measurements on a lab with two nodes.
pub async fn measure(lab: &Lab, rows: &mut Vec<BenchRow>) -> Result<()> {
    let client = lab.client().await?;
    let timer = PluginTimer::new(lab)?;
    plugin_size(lab, rows)?;
    create_network(&client).await?;
    compare_plugins(&timer, rows)?;
    delete_network(&client).await?;
    // A new network, so that all blocks are acquired for these allocations.
    create_network(&client).await?;
    allocate_many(lab, &client, &timer, rows).await?;
    delete_network(&client).await
}

async fn create_network(client: &Client) -> Result<()> {
    bridge::start_network(client, NETWORK, json!({"ipam": {"subnets": ["10.80.0.0/16"]}})).await
}

async fn delete_network(client: &Client) -> Result<()> {
    bridge::delete_network(client, NETWORK).await?;
    bridge::wait_deleted(client, NETWORK).await.map(drop)
}

fn ours() -> Value {
    json!({"cniVersion": "1.0.0", "name": "ours", "type": "bridge", "ipam": {"type": "patchbay-ipam", "network": NETWORK}})
}

fn reference() -> Value {
    json!({"cniVersion": "1.0.0", "name": "ref", "type": "bridge", "ipam": {"type": "host-local", "subnet": "10.80.0.0/16"}})
}

/// The size of the installed plugin.
fn plugin_size(lab: &Lab, rows: &mut Vec<BenchRow>) -> Result<()> {
    let size = lab.node("node-1").output(&["stat", "-L", "-c", "%s", "/opt/cni/bin/patchbay-ipam"])?;
    let size: u64 = size.trim().parse().context("parse the size of the plugin")?;
    rows.push(BenchRow::new("patchbay-ipam: size of the plugin", format!("{:.2} MB", size as f64 / 1e6)));
    Ok(())
}

/// Measures our plugin and the reference plugin alternately in one run.
fn compare_plugins(timer: &PluginTimer, rows: &mut Vec<BenchRow>) -> Result<()> {
    print_progress("IPAM plugins …");
    let plugins = [("patchbay-ipam", ours()), ("host-local", reference())];
    for (mode, parallel, (rounds, calls)) in [("sequential", 1, SEQUENTIAL), ("8 in parallel", 8, PARALLEL)] {
        let (count, parallel) = (calls.to_string(), parallel.to_string());
        let arguments = ["--ipam", "--count", &count, "--parallel", &parallel];
        // Warm-up: creates directories, acquires the first block, fills the page cache.
        for (plugin, config) in &plugins {
            timer.times::<2>(plugin, config, &arguments)?;
        }
        let mut all = [[const { Vec::new() }; 2], [const { Vec::new() }; 2]];
        for round in 0..rounds {
            for index in [round % 2, (round + 1) % 2] {
                let (plugin, config) = &plugins[index];
                let times = timer.times::<2>(plugin, config, &arguments)?;
                all[index].iter_mut().zip(times).for_each(|(all, more)| all.extend(more));
            }
        }
        let [[add, del], [reference_add, reference_del]] = all;
        for (verb, ours, reference) in [("ADD", add, reference_add), ("DEL", del, reference_del)] {
            ensure!(ours.len() == rounds * calls && reference.len() == ours.len(), "{} calls", ours.len());
            let count = ours.len();
            let what =
                format!("{verb} of patchbay-ipam compared with host-local, {mode}, p50 / p99 of {count}");
            rows.push(BenchRow(what, compare(ours, reference)));
        }
    }
    Ok(())
}

/// Measures the API requests and the daemon's memory for many allocations.
async fn allocate_many(
    lab: &Lab,
    client: &Client,
    timer: &PluginTimer,
    rows: &mut Vec<BenchRow>,
) -> Result<()> {
    print_progress("1000 addresses on one node …");
    let before = memory_on(lab, "node-1", "node")?;
    let offset = lab.audit_offset()?;
    let count = ALLOCATIONS.to_string();
    let arguments = ["--ipam", "--count", &count, "--parallel", "8", "--verbs"];
    let [times] = timer.times("patchbay-ipam", &ours(), &[&arguments[..], &["ADD"]].concat())?;
    ensure!(times.len() == ALLOCATIONS, "{} addresses", times.len());
    // Includes the last status update of the blocks.
    wait_usage_reported(client).await?;
    let after = memory_on(lab, "node-1", "node")?;
    let blocks = list(client).await?.len();
    let by_node = |request: &&AuditedRequest| {
        request.user_agent.starts_with("patchbay-node") && request.resource.starts_with("ipblocks")
    };
    let audited = lab.requests_since(offset)?;
    let requests: Vec<&AuditedRequest> =
        audited.iter().filter(by_node).filter(|request| request.verb != "watch").collect();
    let (creates, others): (Vec<&AuditedRequest>, Vec<&AuditedRequest>) =
        requests.iter().partition(|request| request.verb == "create");
    rows.push(BenchRow(
        format!("API requests of the daemon for {ALLOCATIONS} ADDs with spare addresses"),
        format!(
            "{} ({} creates, {} others) for {blocks} blocks",
            requests.len(),
            creates.len(),
            others.len()
        ),
    ));
    rows.push(BenchRow(
        format!("node daemon: memory before and after {ALLOCATIONS} allocations"),
        format!("{:.1} and {:.1} MiB", before as f64 / 1024.0, after as f64 / 1024.0),
    ));
    timer.times::<1>("patchbay-ipam", &ours(), &[&arguments[..], &["DEL"]].concat())?;
    Ok(())
}

async fn list(client: &Client) -> Result<Vec<api::IPBlock>> {
    let params = kube::api::ListParams::default().labels(&format!("patchbay.dev/network={NETWORK}"));
    Ok(kube::Api::<api::IPBlock>::all(client.clone()).list(&params).await?.items)
}

/// Waits until the status of the blocks counts all allocations.
async fn wait_usage_reported(client: &Client) -> Result<()> {
    wait::until(Duration::from_secs(60), "the blocks to report their usage", || async {
        let used =
            list(client).await?.iter().filter_map(|block| Some(block.status.as_ref()?.used)).sum::<i32>();
        ensure!(usize::try_from(used)? == ALLOCATIONS, "{used} addresses are reported");
        Ok(Some(()))
    })
    .await
}
