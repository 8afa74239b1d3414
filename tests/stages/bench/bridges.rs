//! Measures BridgeNetworks.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use e2e::bridge;
use kube::Client;
use lab::{Lab, print_progress, wait};
use serde_json::json;

use super::{BenchRow, compare, memory, percentiles, plugin::PluginTimer};

const CALLS: usize = 200;
const ROUNDS: usize = 20;
const NETWORKS: usize = 200;

/// Runs all BridgeNetwork measurements on a lab with two nodes.
pub async fn measure(lab: &Lab, rows: &mut Vec<BenchRow>) -> Result<()> {
    let client = lab.client().await?;
    compare_plugins(lab, &client, rows).await?;
    create_and_delete(lab, &client, rows).await?;
    repair(lab, &client, rows).await?;
    create_many(lab, &client, rows).await
}

/// Measures our plugin and the reference plugin alternately in one run.
async fn compare_plugins(lab: &Lab, client: &Client, rows: &mut Vec<BenchRow>) -> Result<()> {
    print_progress("CNI plugins …");
    bridge::start_network(client, "bench", json!({})).await?;
    let ours = json!({"cniVersion": "1.0.0", "name": "bench", "type": "patchbay-bridge", "network": "bench"});
    let reference = json!({"cniVersion": "1.0.0", "name": "ref", "type": "bridge", "bridge": "br-ref"});
    let timer = PluginTimer::new(lab)?;
    let call = |plugin: &str, config: &serde_json::Value, count: usize| {
        let [add, del] = timer.times(plugin, config, &["--count", &count.to_string()])?;
        anyhow::Ok((add, del))
    };
    // Warm-up: creates the bridges, fills the page cache.
    call("patchbay-bridge", &ours, 5)?;
    call("bridge", &reference, 5)?;
    let mut all = [(Vec::new(), Vec::new()), (Vec::new(), Vec::new())];
    for _ in 0..10 {
        for (times, (plugin, config)) in
            all.iter_mut().zip([("patchbay-bridge", &ours), ("bridge", &reference)])
        {
            let (add, del) = call(plugin, config, CALLS / 10)?;
            times.0.extend(add);
            times.1.extend(del);
        }
    }
    lab.node("node-1").output(&["ip", "link", "del", "br-ref"])?;
    let [ours, reference] = all;
    for (what, ours, reference) in [("ADD", ours.0, reference.0), ("DEL", ours.1, reference.1)] {
        ensure!(ours.len() == CALLS && reference.len() == CALLS, "{} calls", ours.len());
        let what = format!(
            "{what} of patchbay-bridge compared with the reference bridge plugin, p50 / p99 of {CALLS}"
        );
        rows.push(BenchRow(what, compare(ours, reference)));
    }
    bridge::delete_network(client, "bench").await?;
    bridge::wait_deleted(client, "bench").await.map(drop)
}

async fn create_and_delete(lab: &Lab, client: &Client, rows: &mut Vec<BenchRow>) -> Result<()> {
    print_progress("creating and deleting networks …");
    let (mut created, mut deleted, mut writes) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let offset = lab.audit_offset()?;
        let spec = json!({"overlay": {"vni": 77}, "attachment": {"namespaces": ["default"]}});
        let start = Instant::now();
        bridge::create_network(client, "bench", spec).await?;
        bridge::wait_ready(client, "bench").await?;
        created.push(micros(start.elapsed()));
        let requests = lab.requests_since(offset)?;
        let ours = |a: &&lab::audit::AuditedRequest| {
            a.user_agent.starts_with("patchbay-") && a.is_write() && a.resource != "leases"
        };
        writes.push(requests.iter().filter(ours).count() as u64);
        let start = Instant::now();
        bridge::delete_network(client, "bench").await?;
        bridge::wait_deleted(client, "bench").await?;
        deleted.push(micros(start.elapsed()));
    }
    for (what, times) in [
        ("overlay network: apply to Ready on two nodes", created),
        ("overlay network: delete to deleted", deleted),
    ] {
        let (p50, p99) = percentiles(times);
        rows.push(BenchRow(
            format!("{what}, p50 / p99 of {ROUNDS}"),
            format!("{} / {} ms", p50 / 1000, p99 / 1000),
        ));
    }
    rows.push(BenchRow(
        "API writes to create an overlay network on two nodes, p50".to_owned(),
        percentiles(writes).0.to_string(),
    ));
    Ok(())
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

async fn repair(lab: &Lab, client: &Client, rows: &mut Vec<BenchRow>) -> Result<()> {
    print_progress("repairing drift …");
    bridge::start_network(client, "bench", json!({})).await?;
    let mut times = Vec::new();
    for _ in 0..ROUNDS * 2 {
        // Lets the node become idle.
        tokio::time::sleep(Duration::from_millis(500)).await;
        lab.node("node-1").output(&["ip", "link", "set", "br-bench", "mtu", "1000"])?;
        let start = Instant::now();
        wait::until(Duration::from_secs(3), "the repair of the MTU", || async {
            let mtu = lab.node("node-1").output(&["cat", "/sys/class/net/br-bench/mtu"])?;
            Ok((mtu.trim() == "1500").then_some(()))
        })
        .await?;
        times.push(micros(start.elapsed()));
    }
    let (p50, p99) = percentiles(times);
    rows.push(BenchRow(
        format!("manual change of a bridge to its repair, p50 / p99 of {}", ROUNDS * 2),
        format!("{} / {} ms", p50 / 1000, p99 / 1000),
    ));
    bridge::delete_network(client, "bench").await?;
    bridge::wait_deleted(client, "bench").await.map(drop)
}

/// Measures whether the cost per network stays constant as the number of networks grows.
async fn create_many(lab: &Lab, client: &Client, rows: &mut Vec<BenchRow>) -> Result<()> {
    print_progress("many networks …");
    let before = memory(lab, "node")?;
    let mut costs = Vec::new();
    for batch in 0..4 {
        let start = Instant::now();
        let names: Vec<String> = (0..NETWORKS / 4).map(|n| format!("bench-{batch}-{n}")).collect();
        for name in &names {
            bridge::create_network(client, name, json!({"mtu": 1400})).await?;
        }
        for name in &names {
            bridge::wait_ready(client, name).await?;
        }
        costs.push(start.elapsed() / u32::try_from(NETWORKS / 4)?);
    }
    let after = memory(lab, "node")?;
    let text: Vec<String> = costs.iter().map(|cost| format!("{}", cost.as_millis())).collect();
    rows.push(BenchRow(
        format!("time per network, first to fourth batch of {}, ms", NETWORKS / 4),
        text.join(", "),
    ));
    rows.push(BenchRow(
        format!("node daemon: memory (largest) without and with {NETWORKS} networks"),
        format!("{:.1} and {:.1} MiB", before as f64 / 1024.0, after as f64 / 1024.0),
    ));
    rows.push(BenchRow(
        format!("controller: memory (largest replica) with {NETWORKS} networks"),
        format!("{:.1} MiB", memory(lab, "controller")? as f64 / 1024.0),
    ));
    lab.kubectl(&["delete", "bnet", "--all", "--timeout=120s"]).map(drop)
}
