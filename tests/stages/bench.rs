//! `make bench`: measures Patchbay on a lab of this machine and prints the table of docs/numbers.md.
#![allow(clippy::cast_precision_loss, reason = "approximate numbers for people")]

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use lab::{Lab, Topology, print_progress, wait};

mod addresses;
mod bridges;
mod claims;
mod compare;
mod fleets;
mod hotplug;
pub mod plugin;
mod services;

use crate::{image, packages, step::build_lab};

const NAMES: &str = "jsonpath={.status.interfaces[*].name}";
const NIC_ROUNDS: usize = 30;

struct BenchRow(String, String);

impl BenchRow {
    fn new(what: &str, measured: String) -> Self {
        Self(what.to_owned(), measured)
    }
}

/// The 50th and 99th percentile, by nearest rank: the least value that this share of the values does not exceed.
fn percentiles(mut values: Vec<u64>) -> (u64, u64) {
    values.sort_unstable();
    let at = |percent: usize| {
        let rank = (values.len() * percent).div_ceil(100);
        values.get(rank.saturating_sub(1)).copied().unwrap_or(0)
    };
    (at(50), at(99))
}

/// Compares our durations with those of a reference, in microseconds: p50 / p99 of both, and their ratios.
fn compare(ours: Vec<u64>, reference: Vec<u64>) -> String {
    let (a, b) = (percentiles(ours), percentiles(reference));
    let ms = |micros: u64| format!("{:.1} ms", micros as f64 / 1000.0);
    format!(
        "{} / {}, reference {} / {}: ratio {:.2} / {:.2}",
        ms(a.0),
        ms(a.1),
        ms(b.0),
        ms(b.1),
        a.0 as f64 / b.0 as f64,
        a.1 as f64 / b.1 as f64
    )
}

/// A part of the benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum BenchPart {
    /// The lab itself, and NodeNetworks.
    Nodes,
    Bridges,
    /// IPAM on real nodes.
    Addresses,
    /// Plug and unplug of interfaces of running pods.
    Hotplug,
    /// IPAM on many simulated nodes.
    Fleets,
    /// NetworkServices, next to the EndpointSlice controller of Kubernetes.
    Services,
    /// IPAMClaims of virtual machines, and the webhook for their pods.
    Claims,
    /// This version compared with the baseline, installed alternately in one lab.
    Compare,
}

/// Measures everything, or one part, and takes the lab down.
pub fn run(only: Option<BenchPart>) -> Result<()> {
    let tar = packages::prepare_while(|| {
        build_lab()?;
        // Simulated nodes run in this process and need no image.
        if only == Some(BenchPart::Fleets) { Ok(None) } else { image::build().map(Some) }
    })?;
    // These need the program of the image, but no node that runs it.
    let tar = tar.filter(|_| !matches!(only, Some(BenchPart::Services | BenchPart::Claims)));
    let lab = Lab::new("bench".parse()?);
    lab.down()?;
    let selected = |part| only.is_none_or(|only| only == part);
    let mut rows = Vec::new();
    if only != Some(BenchPart::Compare) {
        let measured = measure(&lab, tar.as_deref(), selected);
        lab.down()?;
        rows.extend(measured?);
    }
    if selected(BenchPart::Compare) {
        let compared = compare::run(&lab);
        lab.down()?;
        rows.extend(compared?);
    }
    println!("| what | measured |\n|---|---|");
    for BenchRow(what, measured) in rows {
        println!("| {what} | {measured} |");
    }
    Ok(())
}

/// Waits until the CPU usage is below a quarter: a cluster that has just started is busy.
async fn wait_idle() -> Result<()> {
    wait::until(Duration::from_secs(60), "the machine to be idle", || async {
        let before = cpu_ticks()?;
        tokio::time::sleep(Duration::from_secs(2)).await;
        let after = cpu_ticks()?;
        Ok((4 * (after.0 - before.0) < after.1 - before.1).then_some(()))
    })
    .await
}

/// Busy and total CPU ticks since boot.
fn cpu_ticks() -> Result<(u64, u64)> {
    let text = fs::read_to_string("/proc/stat").context("read /proc/stat")?;
    let line = text.lines().next().context("/proc/stat is empty")?;
    let numbers: Vec<u64> =
        line.split_whitespace().skip(1).filter_map(|number| number.parse().ok()).collect();
    let idle: u64 = numbers.iter().skip(3).take(2).sum();
    let all: u64 = numbers.iter().take(8).sum();
    Ok((all.saturating_sub(idle), all))
}

fn measure(lab: &Lab, tar: Option<&Path>, selected: impl Fn(BenchPart) -> bool) -> Result<Vec<BenchRow>> {
    // In a fleet, each pod that waits for an address blocks a thread.
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(64).max_blocking_threads(2048).enable_all().build()?;
    let seconds = |d: Duration| format!("{:.1} s", d.as_secs_f64());
    let mut rows = Vec::new();
    if selected(BenchPart::Services) {
        // A lab of its own: nothing but the measured controllers may act on its objects.
        runtime.block_on(lab.up(Topology::ControlPlaneOnly))?;
        let measured = runtime.block_on(services::measure(lab, &mut rows));
        lab.down()?;
        measured?;
    }
    if selected(BenchPart::Claims) {
        runtime.block_on(lab.up(Topology::ControlPlaneOnly))?;
        let measured = runtime.block_on(claims::measure(lab, &mut rows));
        lab.down()?;
        measured?;
    }
    if selected(BenchPart::Nodes) || selected(BenchPart::Fleets) {
        let start = Instant::now();
        runtime.block_on(lab.up(Topology::ControlPlaneOnly))?;
        rows.push(BenchRow::new("lab: control plane ready", seconds(start.elapsed())));
        if selected(BenchPart::Fleets) {
            runtime.block_on(fleets::measure(lab, &mut rows))?;
        }
        lab.down()?;
    }
    let Some(tar) = tar else { return Ok(rows) };
    let start = Instant::now();
    runtime.block_on(lab.up(Topology::Nodes(2)))?;
    rows.push(BenchRow::new("lab: two nodes Ready, multus and DNS ready", seconds(start.elapsed())));
    rows.push(BenchRow::new(
        "lab: memory of control plane and two nodes",
        format!("{} MiB", lab.status().memory() >> 20),
    ));
    rows.push(BenchRow::new("image", format!("{:.1} MB", fs::metadata(tar)?.len() as f64 / 1e6)));
    let start = Instant::now();
    runtime.block_on(e2e::patchbay::install(lab))?;
    rows.push(BenchRow::new(
        "kubectl apply to controller and daemons ready on two nodes",
        seconds(start.elapsed()),
    ));
    if runtime.block_on(wait_idle()).is_err() {
        print_progress("the machine is busy with other work; times are upper bounds");
    }
    if selected(BenchPart::Nodes) {
        runtime.block_on(nics(lab, &mut rows))?;
    }
    if selected(BenchPart::Bridges) {
        runtime.block_on(bridges::measure(lab, &mut rows))?;
    }
    if selected(BenchPart::Addresses) {
        runtime.block_on(addresses::measure(lab, &mut rows))?;
    }
    if selected(BenchPart::Hotplug) {
        runtime.block_on(hotplug::measure(lab, &mut rows))?;
    }
    for (what, program) in
        [("controller: memory (largest replica)", "controller"), ("node daemon: memory (largest)", "node")]
    {
        rows.push(BenchRow::new(what, format!("{:.1} MiB", memory(lab, program)? as f64 / 1024.0)));
    }
    Ok(rows)
}

async fn wait_published(lab: &Lab, nic: &str, expected: bool) -> Result<()> {
    wait::until(Duration::from_secs(3), "the NodeNetwork to be updated", || async {
        let names = lab.kubectl(&["get", "nodenetwork", "node-1", "-o", NAMES])?;
        Ok((names.split(' ').any(|n| n == nic) == expected).then_some(()))
    })
    .await
}

/// Measures how long an idle node takes to publish a new NIC, and the number of API writes.
async fn nics(lab: &Lab, rows: &mut Vec<BenchRow>) -> Result<()> {
    let mut times = Vec::new();
    let mut writes = 0;
    for round in 0..NIC_ROUNDS {
        // A daemon writes its NodeNetwork at most once a second.
        tokio::time::sleep(Duration::from_millis(1100)).await;
        let offset = lab.audit_offset()?;
        let name = format!("nic{round}");
        lab.node("node-1").output(&[
            "ip",
            "link",
            "add",
            &name,
            "type",
            "veth",
            "peer",
            &format!("veth{name}"),
        ])?;
        let start = Instant::now();
        wait_published(lab, &name, true).await?;
        times.push(start.elapsed());
        let ours = |a: &lab::audit::AuditedRequest| a.user_agent.starts_with("patchbay-node") && a.is_write();
        writes += lab.requests_since(offset)?.iter().filter(|a| ours(a)).count();
        lab.node("node-1").output(&["ip", "link", "del", &name])?;
        wait_published(lab, &name, false).await?;
    }
    times.sort();
    let at = |percent: usize| {
        format!("{} ms", times[(times.len() * percent / 100).min(times.len() - 1)].as_millis())
    };
    rows.push(BenchRow::new(
        "new NIC to its publication in NodeNetwork, p50 / p99",
        format!("{} / {}", at(50), at(99)),
    ));
    rows.push(BenchRow::new("API writes for a new NIC", format!("{:.1}", writes as f64 / NIC_ROUNDS as f64)));
    let offset = lab.audit_offset()?;
    print_progress("one idle minute …");
    tokio::time::sleep(Duration::from_secs(60)).await;
    let requests = lab.requests_since(offset)?;
    let ours = requests.iter().filter(|a| a.user_agent.starts_with("patchbay-") && a.is_write());
    let (leases, others): (Vec<_>, Vec<_>) = ours.partition(|a| a.resource == "leases");
    rows.push(BenchRow::new(
        "API writes in an idle minute, leader's Lease / others",
        format!("{} / {}", leases.len(), others.len()),
    ));
    Ok(())
}

/// The resident memory in KiB of the largest `patchbay PROGRAM` process on any node.
fn memory(lab: &Lab, program: &str) -> Result<u64> {
    let sizes = lab.nodes().into_iter().filter_map(|node| memory_on(lab, &node, program).ok());
    sizes.max().with_context(|| format!("no {program} is running"))
}

/// The resident memory in KiB of the largest `patchbay PROGRAM` process on one node.
fn memory_on(lab: &Lab, node: &str, program: &str) -> Result<u64> {
    let script = format!(
        "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline 2>/dev/null | grep -q '^/usr/bin/patchbay {program} ' && grep VmRSS $p/status; done; true"
    );
    let text = lab.node(node).output(&["sh", "-c", &script])?;
    let sizes = text.lines().filter_map(|l| l.split_whitespace().nth(1)?.parse::<u64>().ok());
    sizes.max().with_context(|| format!("no {program} is running on {node}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_the_nearest_rank() {
        assert_eq!(percentiles(vec![]), (0, 0));
        assert_eq!(percentiles(vec![7]), (7, 7));
        assert_eq!(percentiles(vec![2, 1]), (1, 2));
        assert_eq!(percentiles((1..=100).rev().collect()), (50, 99));
        assert_eq!(percentiles((1..=101).collect()), (51, 100));
    }
}
