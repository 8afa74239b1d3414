//! The numbers of addresses: our plugin next to `host-local`, and what it costs the API server and the daemon.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use e2e::bridge;
use kube::Client;
use lab::{Lab, audit::AuditedRequest, print_progress, wait};
use serde_json::{Value, json};

use super::{Row, beside, memory_on, plugin::Stopwatch};

const NETWORK: &str = "bench-ipam";
/// The turns that each plugin has, and the calls of a turn. Short ones, so that what else goes on meets both alike.
const ALONE: (usize, usize) = (40, 10);
const EIGHT: (usize, usize) = (20, 48);
const MANY: usize = 1000;

/// Everything that is measured of addresses on a lab of two nodes.
pub async fn measure(lab: &Lab, rows: &mut Vec<Row>) -> Result<()> {
    let client = lab.client().await?;
    let stopwatch = Stopwatch::new(lab)?;
    size(lab, rows)?;
    start(&client).await?;
    plugins(&stopwatch, rows)?;
    end(&client).await?;
    // Another network: every block of it is taken for these.
    start(&client).await?;
    many(lab, &client, &stopwatch, rows).await?;
    end(&client).await
}

async fn start(client: &Client) -> Result<()> {
    bridge::start_network(client, NETWORK, json!({"ipam": {"subnets": ["10.80.0.0/16"]}})).await
}

async fn end(client: &Client) -> Result<()> {
    bridge::delete_network(client, NETWORK).await?;
    bridge::wait_deleted(client, NETWORK, Duration::from_secs(20)).await.map(drop)
}

fn ours() -> Value {
    json!({"cniVersion": "1.0.0", "name": "ours", "type": "bridge", "ipam": {"type": "patchbay-ipam", "network": NETWORK}})
}

fn reference() -> Value {
    json!({"cniVersion": "1.0.0", "name": "ref", "type": "bridge", "ipam": {"type": "host-local", "subnet": "10.80.0.0/16"}})
}

/// The plugin as it lies on a node.
fn size(lab: &Lab, rows: &mut Vec<Row>) -> Result<()> {
    let size = lab.node("node-1").output(&["stat", "-L", "-c", "%s", "/opt/cni/bin/patchbay-ipam"])?;
    let size: u64 = size.trim().parse().context("the size of the plugin")?;
    rows.push(Row::new("patchbay-ipam: the plugin", format!("{:.2} MB", size as f64 / 1e6)));
    Ok(())
}

/// Our plugin next to the reference one, in one run, in turns.
fn plugins(stopwatch: &Stopwatch, rows: &mut Vec<Row>) -> Result<()> {
    print_progress("address plugins …");
    let both = [("patchbay-ipam", ours()), ("host-local", reference())];
    for (how, at_once, (turns, calls)) in [("alone", 1, ALONE), ("eight at once", 8, EIGHT)] {
        let (count, at_once) = (calls.to_string(), at_once.to_string());
        let words = ["--addresses", "--count", &count, "--at-once", &at_once];
        // Once, so that both have their directories, their first block and their pages.
        for (plugin, config) in &both {
            stopwatch.times::<2>(plugin, config, &words)?;
        }
        let mut all = [[const { Vec::new() }; 2], [const { Vec::new() }; 2]];
        for turn in 0..turns {
            for place in [turn % 2, (turn + 1) % 2] {
                let (plugin, config) = &both[place];
                let times = stopwatch.times::<2>(plugin, config, &words)?;
                all[place].iter_mut().zip(times).for_each(|(all, more)| all.extend(more));
            }
        }
        let [[add, del], [reference_add, reference_del]] = all;
        for (verb, ours, reference) in [("ADD", add, reference_add), ("DEL", del, reference_del)] {
            ensure!(ours.len() == turns * calls && reference.len() == ours.len(), "{} calls", ours.len());
            let count = ours.len();
            let what = format!("{verb} of patchbay-ipam next to host-local, {how}, p50 / p99 of {count}");
            rows.push(Row(what, beside(ours, reference)));
        }
    }
    Ok(())
}

/// What many addresses that stay cost the API server, and the daemon.
async fn many(lab: &Lab, client: &Client, stopwatch: &Stopwatch, rows: &mut Vec<Row>) -> Result<()> {
    print_progress("a thousand addresses on one node …");
    let before = memory_on(lab, "node-1", "node")?;
    let mark = lab.audit_offset()?;
    let count = MANY.to_string();
    let words = ["--addresses", "--count", &count, "--at-once", "8", "--verbs"];
    let [times] = stopwatch.times("patchbay-ipam", &ours(), &[&words[..], &["ADD"]].concat())?;
    ensure!(times.len() == MANY, "{} addresses", times.len());
    // The last word about how much of them is used belongs to it.
    told(client).await?;
    let after = memory_on(lab, "node-1", "node")?;
    let taken = list(client).await?.len();
    let by_node = |asked: &&AuditedRequest| {
        asked.user_agent.starts_with("patchbay-node") && asked.resource.starts_with("ipblocks")
    };
    let asked = lab.requests_since(mark)?;
    let requests: Vec<&AuditedRequest> =
        asked.iter().filter(by_node).filter(|asked| asked.verb != "watch").collect();
    let (creates, others): (Vec<&AuditedRequest>, Vec<&AuditedRequest>) =
        requests.iter().partition(|asked| asked.verb == "create");
    rows.push(Row(
        format!("API requests of the node for {MANY} ADDs with spare addresses"),
        format!("{} ({} creates, {} others) for {taken} blocks", requests.len(), creates.len(), others.len()),
    ));
    rows.push(Row(
        format!("node daemon: memory before and with {MANY} allocations more"),
        format!("{:.1} and {:.1} MiB", before as f64 / 1024.0, after as f64 / 1024.0),
    ));
    stopwatch.times::<1>("patchbay-ipam", &ours(), &[&words[..], &["DEL"]].concat())?;
    Ok(())
}

async fn list(client: &Client) -> Result<Vec<api::IPBlock>> {
    let params = kube::api::ListParams::default().labels(&format!("patchbay.dev/network={NETWORK}"));
    Ok(kube::Api::<api::IPBlock>::all(client.clone()).list(&params).await?.items)
}

/// Waits until the blocks tell of all addresses.
async fn told(client: &Client) -> Result<()> {
    wait::until(Duration::from_secs(60), "the blocks to tell what is used", || async {
        let used = list(client).await?.iter().filter_map(|one| Some(one.status.as_ref()?.used)).sum::<i32>();
        ensure!(usize::try_from(used)? == MANY, "{used} are told of");
        Ok(Some(()))
    })
    .await
}
