//! Measures hot-plug: latency alone and in a crowd, API writes, leaks, memory.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use e2e::{
    hotplug::{
        NETWORKS, bridge_config, create_bridge_nad, create_record_nad, element, host_local_addresses,
        network_name, plain_pod,
    },
    status_watch::StatusWatch,
};
use futures::future::try_join_all;
use kube::api::{Patch, PatchParams};
use lab::{
    Lab,
    audit::{AuditOffset, AuditedRequest},
    print_progress,
    test_namespace::{TestNamespace, with_namespace},
};
use serde_json::{Value, json};

use super::{BenchRow, memory_on, percentiles, plugin::PluginTimer};

const ROUNDS: usize = 40;
const CROWD: usize = 50;
const CROWD_ROUNDS: usize = 3;
const QUICK_ROUNDS: usize = 20;
/// Pods on one node, each with [`ATTACHMENTS`] networks, for the memory of the daemon.
const PODS: usize = 110;
const ATTACHMENTS: usize = 4;
const LIMIT: Duration = Duration::from_secs(120);

/// The original on a machine of this kind: p50 and p99 in microseconds.
const ORIGINAL_ONE: (u64, u64) = (600_000, 1_000_000);
const ORIGINAL_CROWD: (u64, u64) = (5_000_000, 11_600_000);
const ORIGINAL_MEMORY_MB: f64 = 42.0;

/// Runs all measurements of hot-plug on a lab with two nodes.
pub async fn measure(lab: &Lab, rows: &mut Vec<BenchRow>) -> Result<()> {
    with_namespace(lab, "bench", async |ns: &TestNamespace| {
        let watch = Arc::new(StatusWatch::start(ns));
        for number in 0..ATTACHMENTS {
            create_bridge_nad(ns, &format!("n{number}"), &format!("10.{}.0.0/16", 200 + number)).await?;
        }
        create_record_nad(ns, "hang", "10.210.0.0/24", &json!({"add": {"hang": 600}})).await?;
        create_record_nad(ns, "fat", "10.211.0.0/24", &json!({"add": {"hang": 2, "memory": 30}})).await?;
        let bench = HotplugBench { ns, watch: &watch };
        bench.start_pods().await?;
        bench.one_pod(rows).await?;
        bench.plugin_floor(rows)?;
        bench.quick_edits(rows).await?;
        bench.crowd(rows, "50 pods edited at once").await?;
        bench.hanging(rows).await?;
        bench.memory(rows).await?;
        bench.at_rest(rows).await?;
        bench.many_plugins(rows).await
    })
    .await
}

struct HotplugBench<'a> {
    ns: &'a TestNamespace,
    watch: &'a StatusWatch,
}

/// The pods of node-1 come first.
fn pod_name(number: usize) -> String {
    format!("p{number}")
}

/// Every second pod of a crowd is on node-2.
fn crowd() -> Vec<String> {
    (0..CROWD / 2).flat_map(|number| [pod_name(number), format!("q{number}")]).collect()
}

impl HotplugBench<'_> {
    async fn start_pods(&self) -> Result<()> {
        print_progress(format!("starting {} pods …", PODS + CROWD / 2));
        let start = |name: String, node: &'static str| async move {
            self.ns.create_pod(plain_pod(&name, node)).await?;
            anyhow::Ok(name)
        };
        let first = (0..PODS).map(|number| start(pod_name(number), "node-1"));
        let second = (0..CROWD / 2).map(|number| start(format!("q{number}"), "node-2"));
        let mut names = try_join_all(first).await?;
        names.extend(try_join_all(second).await?);
        for name in names {
            lab::wait::until(Duration::from_secs(300), &format!("pod {name} to be Ready"), || async {
                let pod = self.ns.pods().get(&name).await?;
                let conditions = pod.status.and_then(|s| s.conditions).unwrap_or_default();
                Ok(conditions.iter().any(|c| c.type_ == "Ready" && c.status == "True").then_some(()))
            })
            .await?;
        }
        if super::wait_idle().await.is_err() {
            print_progress("the machine is busy with other work; times are upper bounds");
        }
        Ok(())
    }

    /// Edits a pod and waits for its status; returns the microseconds from the edit to the status.
    async fn edit(&self, pod: &str, networks: &[Value], expected: &[&str]) -> Result<u64> {
        let start = Instant::now();
        let patch = json!({"metadata": {"annotations": {NETWORKS: Value::from(networks).to_string()}}});
        self.ns.pods().patch(pod, &PatchParams::default(), &Patch::Merge(&patch)).await?;
        let seen = self.watch.wait(pod, expected, LIMIT).await?;
        Ok(u64::try_from(seen.duration_since(start).as_micros()).unwrap_or(u64::MAX))
    }

    async fn one_pod(&self, rows: &mut Vec<BenchRow>) -> Result<()> {
        print_progress("plug and unplug of one pod …");
        let lab = &self.ns.lab;
        let (mut plugs, mut unplugs) = (Vec::new(), Vec::new());
        let offset = lab.audit_offset()?;
        for _ in 0..ROUNDS {
            plugs.push(self.edit("p0", &[element("n0", "net1")], &["net1"]).await?);
            // Let the machine become idle: events and log lines follow the status.
            tokio::time::sleep(Duration::from_millis(200)).await;
            unplugs.push(self.edit("p0", &[], &[]).await?);
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        tokio::time::sleep(Duration::from_secs(2)).await;
        let writes = self.daemon_writes(offset)?;
        rows.push(latency("one pod: edit to status of a plug", &plugs, ORIGINAL_ONE));
        rows.push(latency("one pod: edit to status of an unplug", &unplugs, ORIGINAL_ONE));
        let count = |events: bool| writes.iter().filter(|w| (w.resource == "events") == events).count();
        let per = |count: usize| count as f64 / (2 * ROUNDS) as f64;
        rows.push(BenchRow::new(
            "API writes per plug or unplug, status / events",
            format!("{:.2} / {:.2}", per(count(false)), per(count(true))),
        ));
        Ok(())
    }

    /// The time of the plugins themselves, one call at a time.
    fn plugin_floor(&self, rows: &mut Vec<BenchRow>) -> Result<()> {
        let timer = PluginTimer::new(&self.ns.lab)?;
        let mut config = bridge_config(self.ns, "floor", "10.212.0.0/16");
        config["bridge"] = json!("br-floor");
        let count = ROUNDS.to_string();
        let [add, del] = timer.times::<2>("bridge", &config, &["--count", &count])?;
        for (what, times) in [("ADD", add), ("DEL", del)] {
            let (p50, p99) = percentiles(times);
            rows.push(BenchRow::new(
                &format!("floor: {what} of bridge with host-local alone, p50 / p99 of {ROUNDS}"),
                format!("{} / {} ms", p50 / 1000, p99 / 1000),
            ));
        }
        Ok(())
    }

    async fn quick_edits(&self, rows: &mut Vec<BenchRow>) -> Result<()> {
        print_progress("seven quick edits …");
        let edits: [Vec<Value>; 7] = [
            vec![element("n0", "net1")],
            vec![element("n0", "net1"), element("n1", "net2")],
            vec![element("n1", "net2")],
            vec![],
            vec![element("n2", "net1"), element("n0", "net2")],
            vec![element("n0", "net1"), element("n2", "net3")],
            vec![element("n1", "net1"), element("n0", "net2"), element("n2", "net3")],
        ];
        let (mut wrong, mut times) = (0, Vec::new());
        for round in 0..QUICK_ROUNDS {
            let (last, first) = edits.split_last().context("seven edits")?;
            for edit in first {
                let patch = json!({"metadata": {"annotations": {NETWORKS: json!(edit).to_string()}}});
                self.ns.pods().patch("p0", &PatchParams::default(), &Patch::Merge(&patch)).await?;
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            times.push(self.edit("p0", last, &["net1", "net2", "net3"]).await?);
            let pod = e2e::hotplug::LivePod::find(self.ns, "p0").await?;
            for (network, interface) in [("n1", "net1"), ("n0", "net2"), ("n2", "net3")] {
                let held = host_local_addresses(&self.ns.lab, "node-1", &network_name(self.ns, network));
                let right = pod.status(interface).await?["name"]
                    == format!("{}/{network}", self.ns.namespace)
                    && pod.addresses(interface).is_ok_and(|all| all.is_superset(&held) && held.len() == 1);
                if !right {
                    wrong += 1;
                    print_progress(format!("round {round}: {interface} is wrong; {network} holds {held:?}"));
                }
            }
            self.edit("p0", &[], &[]).await?;
        }
        let leaked = self.held_addresses();
        rows.push(BenchRow::new(
            &format!("seven quick edits, {QUICK_ROUNDS} rounds: wrong interfaces / leaked addresses"),
            format!("{wrong} / {leaked} (original: 6 of 7 rounds wrong, over 25 leaked per node)"),
        ));
        let (p50, p99) = percentiles(times);
        rows.push(BenchRow::new(
            "last of seven quick edits to its status, p50 / p99",
            format!("{} / {} ms", p50 / 1000, p99 / 1000),
        ));
        Ok(())
    }

    /// The addresses of all networks that host-local holds on both nodes.
    fn held_addresses(&self) -> usize {
        let count = |node: &str| -> usize {
            let networks = (0..ATTACHMENTS).map(|number| network_name(self.ns, &format!("n{number}")));
            networks.map(|network| host_local_addresses(&self.ns.lab, node, &network).len()).sum()
        };
        count("node-1") + count("node-2")
    }

    async fn crowd(&self, rows: &mut Vec<BenchRow>, what: &str) -> Result<()> {
        print_progress(format!("{what} …"));
        let (mut plugs, mut unplugs) = (Vec::new(), Vec::new());
        let (names, networks) = (crowd(), [element("n0", "net1")]);
        for _ in 0..CROWD_ROUNDS {
            plugs.extend(try_join_all(names.iter().map(|name| self.edit(name, &networks, &["net1"]))).await?);
            unplugs.extend(try_join_all(names.iter().map(|name| self.edit(name, &[], &[]))).await?);
        }
        rows.push(latency(&format!("{what}: plug"), &plugs, ORIGINAL_CROWD));
        rows.push(latency(&format!("{what}: unplug"), &unplugs, ORIGINAL_CROWD));
        ensure!(self.held_addresses() == 0, "{} addresses leaked", self.held_addresses());
        Ok(())
    }

    async fn hanging(&self, rows: &mut Vec<BenchRow>) -> Result<()> {
        let set = async |networks: Value| -> Result<()> {
            for name in ["p100", "p101", "p102"] {
                let patch = json!({"metadata": {"annotations": {NETWORKS: networks.to_string()}}});
                self.ns.pods().patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await?;
            }
            Ok(())
        };
        set(json!([element("hang", "net1")])).await?;
        tokio::time::sleep(Duration::from_secs(3)).await;
        self.crowd(rows, "the same while a plugin hangs in three other pods").await?;
        set(json!([])).await
    }

    async fn memory(&self, rows: &mut Vec<BenchRow>) -> Result<()> {
        print_progress(format!("{PODS} pods with {ATTACHMENTS} attachments each …"));
        let lab = &self.ns.lab;
        let before = memory_on(lab, "node-1", "node")?;
        let names: Vec<String> = (1..=ATTACHMENTS).map(|number| format!("net{number}")).collect();
        let expected: Vec<&str> = names.iter().map(String::as_str).collect();
        let networks: Vec<Value> =
            (0..ATTACHMENTS).map(|number| element(&format!("n{number}"), &names[number])).collect();
        let start = Instant::now();
        let pods: Vec<String> = (0..PODS).map(pod_name).collect();
        try_join_all(pods.iter().map(|name| self.edit(name, &networks, &expected))).await?;
        let took = start.elapsed();
        tokio::time::sleep(Duration::from_secs(3)).await;
        let after = memory_on(lab, "node-1", "node")?;
        let mib = |kib: u64| kib as f64 / 1024.0;
        rows.push(BenchRow::new(
            &format!(
                "node daemon: memory without and with {PODS} pods × {ATTACHMENTS} attachments on its node"
            ),
            format!(
                "{:.1} and {:.1} MiB (original: {ORIGINAL_MEMORY_MB} MB); plugged in {:.1} s",
                mib(before),
                mib(after),
                took.as_secs_f64()
            ),
        ));
        Ok(())
    }

    /// The daemon has all attachments of the measurement before.
    async fn at_rest(&self, rows: &mut Vec<BenchRow>) -> Result<()> {
        print_progress("one minute at rest …");
        let lab = &self.ns.lab;
        tokio::time::sleep(Duration::from_secs(5)).await;
        let (offset, before) = (lab.audit_offset()?, cpu_ticks(lab, "node-1")?);
        tokio::time::sleep(Duration::from_secs(60)).await;
        let (writes, after) = (self.daemon_writes(offset)?, cpu_ticks(lab, "node-1")?);
        rows.push(BenchRow::new(
            "one minute at rest with these attachments: API writes / CPU time of the daemon",
            format!("{} / {} ms", writes.len(), (after - before) * 10),
        ));
        let pods: Vec<String> = (0..PODS).map(pod_name).collect();
        try_join_all(pods.iter().map(|name| self.edit(name, &[], &[]))).await?;
        ensure!(self.held_addresses() == 0, "{} addresses leaked", self.held_addresses());
        Ok(())
    }

    async fn many_plugins(&self, rows: &mut Vec<BenchRow>) -> Result<()> {
        print_progress("50 plugins with 30 MiB each …");
        let lab = &self.ns.lab;
        let before = daemon_pid(lab, "node-1")?;
        let pods: Vec<String> = (0..CROWD).map(pod_name).collect();
        let networks = [element("fat", "net1")];
        let start = Instant::now();
        try_join_all(pods.iter().map(|name| self.edit(name, &networks, &["net1"]))).await?;
        let survived = daemon_pid(lab, "node-1")? == before;
        rows.push(BenchRow::new(
            &format!("{CROWD} plugins at once on a node, each with 30 MiB for 2 s"),
            format!(
                "all attached after {:.1} s; daemon {}",
                start.elapsed().as_secs_f64(),
                if survived { "not killed" } else { "KILLED" }
            ),
        ));
        try_join_all(pods.iter().map(|name| self.edit(name, &[], &[]))).await.map(drop)
    }

    /// The writes of the daemons to the pods of the benchmark, and their events.
    fn daemon_writes(&self, offset: AuditOffset) -> Result<Vec<AuditedRequest>> {
        let mut requests = self.ns.lab.requests_since(offset)?;
        requests.retain(|request| {
            request.user_agent.starts_with("patchbay-node")
                && request.is_write()
                && request.namespace == self.ns.namespace
        });
        Ok(requests)
    }
}

/// A row with both percentiles and their ratios to those of the original.
fn latency(what: &str, micros: &[u64], original: (u64, u64)) -> BenchRow {
    let (p50, p99) = percentiles(micros.to_vec());
    let ms = |micros: u64| micros / 1000;
    BenchRow::new(
        &format!("{what}, p50 / p99 of {}", micros.len()),
        format!(
            "{} / {} ms; original {} / {} ms: ratio {:.2} / {:.2}",
            ms(p50),
            ms(p99),
            ms(original.0),
            ms(original.1),
            p50 as f64 / original.0 as f64,
            p99 as f64 / original.1 as f64
        ),
    )
}

/// The pid of the daemon on a node, as a pid of the node.
fn daemon_pid(lab: &Lab, node: &str) -> Result<String> {
    let script = "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline 2>/dev/null | \
                  grep -q '^/usr/bin/patchbay node' && echo ${p#/proc/}; done; true";
    let text = lab.node(node).output(&["sh", "-c", script])?;
    text.lines().next().map(str::to_owned).with_context(|| format!("no daemon runs on {node}"))
}

/// The CPU time of the daemon in clock ticks of 10 ms.
fn cpu_ticks(lab: &Lab, node: &str) -> Result<u64> {
    let stat = lab.node(node).output(&["cat", &format!("/proc/{}/stat", daemon_pid(lab, node)?)])?;
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
    let ticks = |index: usize| fields.get(index).and_then(|text| text.parse::<u64>().ok());
    Ok(ticks(11).context("utime")? + ticks(12).context("stime")?)
}
