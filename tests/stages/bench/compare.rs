//! Compares this version with the baseline: both are installed alternately in one lab, three times each.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use e2e::{baseline::Release, bridge, patchbay};
use kube::Client;
use lab::{Lab, Topology, print_progress, wait};
use serde_json::{Value, json};

use super::{BenchRow, memory, percentiles, plugin::PluginTimer, wait_idle};

/// In each round, both versions are installed and measured twice.
const ROUNDS: usize = 3;
const CALLS: &str = "200";
const NETWORKS: usize = 8;
const REPAIRS: usize = 10;

/// What is measured of a version, in the order of [`Sample`].
const WHAT: [&str; 8] = [
    "patchbay-bridge ADD, µs",
    "patchbay-bridge DEL, µs",
    "patchbay-ipam ADD, µs",
    "patchbay-ipam DEL, µs",
    "network created to Ready, µs",
    "bridge changed to repaired, µs",
    "node daemon memory, KiB",
    "controller memory, KiB",
];

/// The medians of one round.
type Sample = [u64; WHAT.len()];

/// Measures both versions in one lab and reports the median of the rounds' medians, and their ratio.
pub fn run(lab: &Lab) -> Result<Vec<BenchRow>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let releases = [Release::baseline()?, Release::current()];
    runtime.block_on(lab.up(Topology::Nodes(2)))?;
    let mut samples: [Vec<Sample>; 2] = [Vec::new(), Vec::new()];
    for round in 0..ROUNDS {
        // In this order, a machine that slows down affects both alike.
        for which in [0, 1, 1, 0] {
            print_progress(format!(
                "round {} of {ROUNDS}, {} …",
                round + 1,
                ["baseline", "this version"][which]
            ));
            samples[which].push(runtime.block_on(sample(lab, &releases[which]))?);
        }
    }
    let median = |samples: &[Sample], column: usize| {
        let mut values: Vec<u64> = samples.iter().map(|sample| sample[column]).collect();
        values.sort_unstable();
        values[values.len() / 2]
    };
    let row = |(column, what): (usize, &&str)| {
        let (old, new) = (median(&samples[0], column), median(&samples[1], column));
        let all = |samples: &[Sample]| {
            samples.iter().map(|sample| sample[column].to_string()).collect::<Vec<_>>().join(" ")
        };
        BenchRow(
            (*what).to_owned(),
            format!(
                "{:.2} ({old} [{}] to {new} [{}])",
                new as f64 / old as f64,
                all(&samples[0]),
                all(&samples[1])
            ),
        )
    };
    Ok(WHAT.iter().enumerate().map(row).collect())
}

async fn sample(lab: &Lab, release: &Release) -> Result<Sample> {
    patchbay::install_release(lab, release).await?;
    if wait_idle().await.is_err() {
        print_progress("the machine is busy with other work; times are upper bounds");
    }
    let client = lab.client().await?;
    let timer = PluginTimer::new(lab)?;
    bridge::start_network(&client, "bench", json!({"ipam": {"subnets": ["10.80.0.0/16"]}})).await?;
    let link = json!({"cniVersion": "1.0.0", "name": "bench", "type": "patchbay-bridge", "network": "bench"});
    let ipam = json!({"type": "patchbay-ipam", "network": "bench"});
    let address = json!({"cniVersion": "1.0.0", "name": "ours", "type": "bridge", "ipam": ipam});
    let call = |plugin: &str, config: &Value, arguments: &[&str]| {
        // Warm-up: acquires the first block, fills the page cache.
        timer.times::<2>(plugin, config, &[&["--count", "5"], arguments].concat())?;
        let times = timer.times::<2>(plugin, config, &[&["--count", CALLS], arguments].concat())?;
        anyhow::Ok(times.map(|times| percentiles(times).0))
    };
    let [bridge_add, bridge_del] = call("patchbay-bridge", &link, &[])?;
    let [ipam_add, ipam_del] = call("patchbay-ipam", &address, &["--ipam"])?;
    let repair = repair_time(lab).await?;
    delete_network(&client, "bench").await?;
    let created = creation_time(&client).await?;
    Ok([
        bridge_add,
        bridge_del,
        ipam_add,
        ipam_del,
        created,
        repair,
        memory(lab, "node")?,
        memory(lab, "controller")?,
    ])
}

async fn delete_network(client: &Client, name: &str) -> Result<()> {
    bridge::delete_network(client, name).await?;
    bridge::wait_deleted(client, name).await.map(drop)
}

/// The median time from a change of a bridge's MTU to its repair.
async fn repair_time(lab: &Lab) -> Result<u64> {
    let node = lab.node("node-1");
    let mut times = Vec::new();
    let expected = node.output(&["cat", "/sys/class/net/br-bench/mtu"])?;
    for _ in 0..REPAIRS {
        // Repairs are throttled: an idle node repairs without delay.
        tokio::time::sleep(Duration::from_millis(500)).await;
        let start = Instant::now();
        node.output(&["ip", "link", "set", "br-bench", "mtu", "1000"])?;
        wait::until(Duration::from_secs(3), "the repair of the MTU", || async {
            let mtu = node.output(&["cat", "/sys/class/net/br-bench/mtu"])?;
            Ok((mtu == expected).then_some(()))
        })
        .await?;
        times.push(u64::try_from(start.elapsed().as_micros())?);
    }
    Ok(percentiles(times).0)
}

/// The median time from the creation of an overlay network to its condition Ready.
async fn creation_time(client: &Client) -> Result<u64> {
    let mut times = Vec::new();
    for _ in 0..NETWORKS {
        let spec = json!({"overlay": {"vni": 77}, "attachment": {"namespaces": ["default"]}});
        let start = Instant::now();
        bridge::create_network(client, "bench", spec).await?;
        bridge::wait_ready(client, "bench").await?;
        times.push(u64::try_from(start.elapsed().as_micros()).context("the time does not fit a u64")?);
        delete_network(client, "bench").await?;
    }
    Ok(percentiles(times).0)
}
