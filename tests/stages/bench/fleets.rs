//! Measures IPAM with many simulated nodes.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use e2e::{
    fleet::{FAST, Fleet},
    patchbay,
};
use futures::future::join_all;
use lab::{Lab, print_progress, wait};
use node::ipam::Timings;
use serde_json::json;

use super::BenchRow;

const PODS: usize = 1000;
/// The timeout of one ADD, and of all pods together.
const ADD_TIMEOUT: Duration = Duration::from_secs(8);
const TOTAL_TIMEOUT: Duration = Duration::from_secs(120);

/// Allocates 1000 addresses on fleets of simulated nodes, on a lab without real nodes.
pub async fn measure(lab: &Lab, rows: &mut Vec<BenchRow>) -> Result<()> {
    let path = patchbay::manifests_dir().join("00-crds.yaml");
    lab.kubectl(&["apply", "-f", path.to_str().context("the path is not UTF-8")?])?;
    lab.kubectl(&["wait", "--for=condition=Established", "crd/ipblocks.patchbay.dev", "--timeout=30s"])?;
    let exact = json!({
        "subnets": ["10.82.0.0/22"],
        "exclude": ["10.82.3.240/28", "10.82.3.232/30", "10.82.3.236/31", "10.82.3.238/32"],
    });
    for (what, spec) in
        [("spare addresses", json!({"subnets": ["10.81.0.0/16"]})), ("addresses == pods", exact)]
    {
        for nodes in [10_usize, 256] {
            print_progress(format!("{PODS} pods on {nodes} nodes, {what} …"));
            let name = format!("f{nodes}-{}", rows.len());
            let mut clients = Vec::new();
            for _ in 0..nodes.div_ceil(32) {
                clients.push(lab.client().await?);
            }
            let mut fleet = Fleet::new(
                clients,
                &name,
                &serde_json::from_value(spec.clone())?,
                nodes,
                Timings::default(),
            )?;
            let outcome = allocate(lab, &mut fleet, nodes).await;
            let measured = outcome.with_context(|| fleet.summary());
            fleet.shutdown().await;
            let measured = measured?;
            print_progress(&measured);
            rows.push(BenchRow(format!("{PODS} ADDs from {nodes} simulated nodes, {what}"), measured));
        }
    }
    Ok(())
}

async fn allocate(lab: &Lab, fleet: &mut Fleet, nodes: usize) -> Result<String> {
    fleet.start_all()?;
    let offset = lab.audit_offset()?;
    let start = Instant::now();
    let attempts = join_all((0..PODS).map(|pod| add_until_success(fleet, pod % nodes, pod))).await;
    let elapsed = start.elapsed();
    let (attempts, failed): (Vec<_>, Vec<_>) = attempts.into_iter().partition(Result::is_ok);
    let retries = attempts.into_iter().flatten().sum::<usize>().saturating_sub(PODS - failed.len());
    let owners = fleet.check_no_duplicates()?;
    // A timeout is a result, too: report it in the table.
    let incomplete = if let Some(why) = failed.into_iter().find_map(Result::err) {
        print_progress(format!("{why:#}\n{}", fleet.summary()));
        // Let the abandoned calls finish.
        tokio::time::sleep(ADD_TIMEOUT).await;
        format!("INCOMPLETE, {owners} of {PODS} have an address: ")
    } else {
        ensure!(owners == PODS, "{owners} addresses are held");
        String::new()
    };
    let blocks = fleet.objects().await?.len();
    let mut verbs: BTreeMap<String, usize> = BTreeMap::new();
    for request in
        lab.requests_since(offset)?.into_iter().filter(|request| request.resource.starts_with("ipblocks"))
    {
        *verbs.entry(request.verb).or_default() += 1;
    }
    for pod in 0..PODS {
        fleet.delete(pod % nodes, &pod_name(pod))?;
    }
    // Restarted with short timings, nodes release unused blocks at once.
    fleet.timings = FAST;
    for number in 0..nodes {
        fleet.crash(number).await;
        fleet.start(number)?;
    }
    let start = Instant::now();
    fleet.wait_until_released(TOTAL_TIMEOUT).await?;
    let requests: Vec<String> = verbs.iter().map(|(verb, count)| format!("{count} {verb}")).collect();
    Ok(format!(
        "{incomplete}{:.2} s, {retries} retries, 0 duplicates, 0 leaks (all blocks released in {:.1} s); {blocks} objects, requests: {}",
        elapsed.as_secs_f64(),
        start.elapsed().as_secs_f64(),
        requests.join(", ")
    ))
}

fn pod_name(pod: usize) -> String {
    format!("pod-{pod}")
}

/// Repeats ADD until it succeeds, as the kubelet does; returns the number of attempts.
async fn add_until_success(fleet: &Fleet, number: usize, pod: usize) -> Result<usize> {
    let attempts = std::cell::Cell::new(0);
    wait::until(TOTAL_TIMEOUT, &format!("an address for pod {pod} on node {number}"), || async {
        attempts.set(attempts.get() + 1);
        fleet.add(number, &pod_name(pod), Vec::new(), ADD_TIMEOUT).await??;
        Ok(Some(attempts.get()))
    })
    .await
}
