//! `make bench`: the numbers, taken on a lab of this machine. Printed as a table that docs/numbers.md keeps.
#![allow(clippy::cast_precision_loss, reason = "numbers for the eye")]

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use lab::{Lab, Topology, print_progress, wait};

mod addresses;
mod bridges;
mod fleets;
pub mod plugin;

use crate::{
    image, packages,
    step::{cargo, show},
};

const NAMES: &str = "jsonpath={.status.interfaces[*].name}";
const ROUNDS: usize = 30;

struct Row(String, String);

impl Row {
    fn new(what: &str, measured: String) -> Self {
        Self(what.to_owned(), measured)
    }
}

/// The values that half and 99 of 100 stay below.
fn shares(mut values: Vec<u64>) -> (u64, u64) {
    values.sort_unstable();
    let at = |share: usize| {
        values.get((values.len() * share / 100).min(values.len().saturating_sub(1))).copied().unwrap_or(0)
    };
    (at(50), at(99))
}

/// Ours next to somebody else's, in microseconds: both, and what share of it ours takes.
fn beside(ours: Vec<u64>, other: Vec<u64>) -> String {
    let (a, b) = (shares(ours), shares(other));
    let ms = |micros: u64| format!("{:.1} ms", micros as f64 / 1000.0);
    format!(
        "{} / {} next to {} / {}: {:.2} / {:.2} of it",
        ms(a.0),
        ms(a.1),
        ms(b.0),
        ms(b.1),
        a.0 as f64 / b.0 as f64,
        a.1 as f64 / b.1 as f64
    )
}

/// A part of the numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// The lab itself, and NICs.
    Nodes,
    Bridges,
    /// Addresses on real nodes.
    Addresses,
    /// Addresses on many simulated nodes.
    Fleets,
}

/// Measures everything there is, or a part of it, and takes the lab down.
pub fn run(only: Option<Part>) -> Result<()> {
    packages::prepare()?;
    show(&mut cargo(&["build", "--locked", "-p", "lab"]))?;
    // Simulated nodes run in this process.
    let tar = if only == Some(Part::Fleets) { None } else { Some(image::build()?) };
    let lab = Lab::new("bench".parse()?);
    lab.down()?;
    let rows = measure(&lab, tar.as_deref(), |part| only.is_none_or(|only| only == part));
    lab.down()?;
    println!("| what | measured |\n|---|---|");
    for Row(what, measured) in rows? {
        println!("| {what} | {measured} |");
    }
    Ok(())
}

/// Waits until less than a quarter of the processors is used: a cluster that has just begun has much to do.
async fn rest() -> Result<()> {
    wait::until(Duration::from_secs(60), "the machine to be at rest", || async {
        let before = ticks()?;
        tokio::time::sleep(Duration::from_secs(2)).await;
        let after = ticks()?;
        Ok((4 * (after.0 - before.0) < after.1 - before.1).then_some(()))
    })
    .await
}

/// What the processors have done since the start of the machine: work, and everything.
fn ticks() -> Result<(u64, u64)> {
    let text = fs::read_to_string("/proc/stat").context("read /proc/stat")?;
    let line = text.lines().next().context("the first line of /proc/stat")?;
    let numbers: Vec<u64> = line.split_whitespace().skip(1).filter_map(|word| word.parse().ok()).collect();
    let idle: u64 = numbers.iter().skip(3).take(2).sum();
    let all: u64 = numbers.iter().take(8).sum();
    Ok((all.saturating_sub(idle), all))
}

fn measure(lab: &Lab, tar: Option<&Path>, wanted: impl Fn(Part) -> bool) -> Result<Vec<Row>> {
    // Every pod of a fleet that waits for its address has a thread.
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(64).max_blocking_threads(2048).enable_all().build()?;
    let seconds = |d: Duration| format!("{:.1} s", d.as_secs_f64());
    let mut rows = Vec::new();
    if wanted(Part::Nodes) || wanted(Part::Fleets) {
        let begun = Instant::now();
        runtime.block_on(lab.up(Topology::ControlPlaneOnly))?;
        rows.push(Row::new("lab: control plane ready", seconds(begun.elapsed())));
        if wanted(Part::Fleets) {
            runtime.block_on(fleets::measure(lab, &mut rows))?;
        }
        lab.down()?;
    }
    let Some(tar) = tar else { return Ok(rows) };
    let begun = Instant::now();
    runtime.block_on(lab.up(Topology::Nodes(2)))?;
    rows.push(Row::new("lab: two nodes Ready, multus and DNS answering", seconds(begun.elapsed())));
    rows.push(Row::new(
        "lab: memory of two nodes and control plane",
        format!("{} MiB", lab.status().memory() >> 20),
    ));
    rows.push(Row::new("image", format!("{:.1} MB", fs::metadata(tar)?.len() as f64 / 1e6)));
    let begun = Instant::now();
    runtime.block_on(e2e::patchbay::install(lab))?;
    rows.push(Row::new("kubectl apply to everything ready on two nodes", seconds(begun.elapsed())));
    if runtime.block_on(rest()).is_err() {
        print_progress("the machine has other work: times are upper bounds");
    }
    if wanted(Part::Nodes) {
        runtime.block_on(nics(lab, &mut rows))?;
    }
    if wanted(Part::Bridges) {
        runtime.block_on(bridges::measure(lab, &mut rows))?;
    }
    if wanted(Part::Addresses) {
        runtime.block_on(addresses::measure(lab, &mut rows))?;
    }
    for (what, program) in
        [("controller: memory (largest replica)", "controller"), ("node daemon: memory (largest)", "node")]
    {
        rows.push(Row::new(what, format!("{:.1} MiB", memory(lab, program)? as f64 / 1024.0)));
    }
    Ok(rows)
}

async fn shows(lab: &Lab, nic: &str, there: bool) -> Result<()> {
    wait::until(Duration::from_secs(3), "the NIC to come or go", || async {
        let names = lab.kubectl(&["get", "nodenetwork", "node-1", "-o", NAMES])?;
        Ok((names.split(' ').any(|n| n == nic) == there).then_some(()))
    })
    .await
}

/// How long a new NIC takes to show, on a node at rest; and what it costs.
async fn nics(lab: &Lab, rows: &mut Vec<Row>) -> Result<()> {
    let mut times = Vec::new();
    let mut writes = 0;
    for round in 0..ROUNDS {
        // A node at rest: it writes at most once a second.
        tokio::time::sleep(Duration::from_millis(1100)).await;
        let mark = lab.audit_offset()?;
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
        let begun = Instant::now();
        shows(lab, &name, true).await?;
        times.push(begun.elapsed());
        let ours = |a: &lab::audit::AuditedRequest| a.user_agent.starts_with("patchbay-node") && a.is_write();
        writes += lab.requests_since(mark)?.iter().filter(|a| ours(a)).count();
        lab.node("node-1").output(&["ip", "link", "del", &name])?;
        shows(lab, &name, false).await?;
    }
    times.sort();
    let at =
        |share: usize| format!("{} ms", times[(times.len() * share / 100).min(times.len() - 1)].as_millis());
    rows.push(Row::new("new NIC to kubectl showing it, p50 / p99", format!("{} / {}", at(50), at(99))));
    rows.push(Row::new("API writes for a new NIC", format!("{:.1}", writes as f64 / ROUNDS as f64)));
    let mark = lab.audit_offset()?;
    print_progress("a minute of rest …");
    tokio::time::sleep(Duration::from_secs(60)).await;
    let asked = lab.requests_since(mark)?;
    let ours = asked.iter().filter(|a| a.user_agent.starts_with("patchbay-") && a.is_write());
    let (leases, others): (Vec<_>, Vec<_>) = ours.partition(|a| a.resource == "leases");
    rows.push(Row::new(
        "API writes in a minute of rest, the leader's Lease / everything else",
        format!("{} / {}", leases.len(), others.len()),
    ));
    Ok(())
}

/// The resident memory in KiB of the largest process of a program on any node.
fn memory(lab: &Lab, program: &str) -> Result<u64> {
    let sizes = lab.nodes().into_iter().filter_map(|node| memory_on(lab, &node, program).ok());
    sizes.max().with_context(|| format!("no {program} runs"))
}

/// The same on one node.
fn memory_on(lab: &Lab, node: &str, program: &str) -> Result<u64> {
    let script = format!(
        "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline 2>/dev/null | grep -q '^/usr/bin/patchbay {program} ' && grep VmRSS $p/status; done; true"
    );
    let text = lab.node(node).output(&["sh", "-c", &script])?;
    let sizes = text.lines().filter_map(|l| l.split_whitespace().nth(1)?.parse::<u64>().ok());
    sizes.max().with_context(|| format!("no {program} runs on {node}"))
}
