//! The numbers of bridge networks.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use e2e::bridge;
use kube::Client;
use lab::{Lab, print_progress, wait};
use serde_json::json;

use super::{Row, beside, memory, plugin::Stopwatch, shares};

const CALLS: usize = 200;
const ROUNDS: usize = 20;
const MANY: usize = 200;

/// Everything that is measured of bridge networks on a lab of two nodes.
pub async fn measure(lab: &Lab, rows: &mut Vec<Row>) -> Result<()> {
    let client = lab.client().await?;
    plugins(lab, &client, rows).await?;
    creation(lab, &client, rows).await?;
    drift(lab, &client, rows).await?;
    many(lab, &client, rows).await
}

/// Our plugin next to the reference one, in one run, alternating.
async fn plugins(lab: &Lab, client: &Client, rows: &mut Vec<Row>) -> Result<()> {
    print_progress("CNI plugins …");
    bridge::start_network(client, "bench", json!({})).await?;
    let ours = json!({"cniVersion": "1.0.0", "name": "bench", "type": "patchbay-bridge", "network": "bench"});
    let reference = json!({"cniVersion": "1.0.0", "name": "ref", "type": "bridge", "bridge": "br-ref"});
    let stopwatch = Stopwatch::new(lab)?;
    let call = |plugin: &str, config: &serde_json::Value, count: usize| {
        let [add, del] = stopwatch.times(plugin, config, &["--count", &count.to_string()])?;
        anyhow::Ok((add, del))
    };
    // Once, so that both have their bridge and their pages.
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
        let what =
            format!("{what} of patchbay-bridge next to the reference bridge plugin, p50 / p99 of {CALLS}");
        rows.push(Row(what, beside(ours, reference)));
    }
    bridge::delete_network(client, "bench").await?;
    bridge::wait_deleted(client, "bench", Duration::from_secs(10)).await.map(drop)
}

async fn creation(lab: &Lab, client: &Client, rows: &mut Vec<Row>) -> Result<()> {
    print_progress("networks that come and go …");
    let (mut made, mut removed, mut writes) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let mark = lab.audit_offset()?;
        let spec = json!({"overlay": {"vni": 77}, "attachment": {"namespaces": ["default"]}});
        let begun = Instant::now();
        bridge::create_network(client, "bench", spec).await?;
        bridge::wait_ready(client, "bench", Duration::from_secs(10)).await?;
        made.push(micros(begun.elapsed()));
        let asked = lab.requests_since(mark)?;
        let ours = |a: &&lab::audit::AuditedRequest| {
            a.user_agent.starts_with("patchbay-") && a.is_write() && a.resource != "leases"
        };
        writes.push(asked.iter().filter(ours).count() as u64);
        let begun = Instant::now();
        bridge::delete_network(client, "bench").await?;
        bridge::wait_deleted(client, "bench", Duration::from_secs(10)).await?;
        removed.push(micros(begun.elapsed()));
    }
    for (what, times) in
        [("overlay network: apply to Ready on two nodes", made), ("overlay network: delete to gone", removed)]
    {
        let (half, most) = shares(times);
        rows.push(Row(
            format!("{what}, p50 / p99 of {ROUNDS}"),
            format!("{} / {} ms", half / 1000, most / 1000),
        ));
    }
    rows.push(Row(
        "API writes to make an overlay network on two nodes, p50".to_owned(),
        shares(writes).0.to_string(),
    ));
    Ok(())
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

async fn drift(lab: &Lab, client: &Client, rows: &mut Vec<Row>) -> Result<()> {
    print_progress("drift …");
    bridge::start_network(client, "bench", json!({})).await?;
    let mut times = Vec::new();
    for _ in 0..ROUNDS * 2 {
        // A node at rest.
        tokio::time::sleep(Duration::from_millis(500)).await;
        lab.node("node-1").output(&["ip", "link", "set", "br-bench", "mtu", "1000"])?;
        let begun = Instant::now();
        wait::until(Duration::from_secs(3), "repair", || async {
            let mtu = lab.node("node-1").output(&["cat", "/sys/class/net/br-bench/mtu"])?;
            Ok((mtu.trim() == "1500").then_some(()))
        })
        .await?;
        times.push(micros(begun.elapsed()));
    }
    let (half, most) = shares(times);
    rows.push(Row(
        format!("a bridge changed by hand to its repair, p50 / p99 of {}", ROUNDS * 2),
        format!("{} / {} ms", half / 1000, most / 1000),
    ));
    bridge::delete_network(client, "bench").await?;
    bridge::wait_deleted(client, "bench", Duration::from_secs(10)).await.map(drop)
}

/// Whether one more network costs the same, however many there are.
async fn many(lab: &Lab, client: &Client, rows: &mut Vec<Row>) -> Result<()> {
    print_progress("many networks …");
    let before = memory(lab, "node")?;
    let mut costs = Vec::new();
    for batch in 0..4 {
        let begun = Instant::now();
        let names: Vec<String> = (0..MANY / 4).map(|n| format!("bench-{batch}-{n}")).collect();
        for name in &names {
            bridge::create_network(client, name, json!({"mtu": 1400})).await?;
        }
        for name in &names {
            bridge::wait_ready(client, name, Duration::from_secs(120)).await?;
        }
        costs.push(begun.elapsed() / u32::try_from(MANY / 4)?);
    }
    let after = memory(lab, "node")?;
    let text: Vec<String> = costs.iter().map(|cost| format!("{}", cost.as_millis())).collect();
    rows.push(Row(format!("time per network of the first to the fourth {}, ms", MANY / 4), text.join(", ")));
    rows.push(Row(
        format!("node daemon: memory (largest) without and with {MANY} networks"),
        format!("{:.1} and {:.1} MiB", before as f64 / 1024.0, after as f64 / 1024.0),
    ));
    rows.push(Row(
        format!("controller: memory (largest replica) with {MANY} networks"),
        format!("{:.1} MiB", memory(lab, "controller")? as f64 / 1024.0),
    ));
    lab.kubectl(&["delete", "bnet", "--all", "--timeout=120s"]).map(drop)
}
