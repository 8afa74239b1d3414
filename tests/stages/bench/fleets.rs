//! The numbers of many simulated nodes that hand out addresses.

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

use super::Row;

const PODS: usize = 1000;
/// How long one pod waits in a call, and all of them together.
const CALL: Duration = Duration::from_secs(8);
const ALL: Duration = Duration::from_secs(120);

/// A thousand pods on fleets of nodes, on a control plane without nodes of its own.
pub async fn measure(lab: &Lab, rows: &mut Vec<Row>) -> Result<()> {
    let path = patchbay::manifests_dir().join("00-crds.yaml");
    lab.kubectl(&["apply", "-f", path.to_str().context("a path in UTF-8")?])?;
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
            let outcome = play(lab, &mut fleet, nodes).await;
            let measured = outcome.with_context(|| fleet.summary());
            fleet.shutdown().await;
            let measured = measured?;
            print_progress(&measured);
            rows.push(Row(format!("{PODS} ADDs from {nodes} simulated nodes, {what}"), measured));
        }
    }
    Ok(())
}

async fn play(lab: &Lab, fleet: &mut Fleet, nodes: usize) -> Result<String> {
    fleet.start_all()?;
    let mark = lab.audit_offset()?;
    let begun = Instant::now();
    let tries = join_all((0..PODS).map(|pod| start(fleet, pod % nodes, pod))).await;
    let took = begun.elapsed();
    let (tries, late): (Vec<_>, Vec<_>) = tries.into_iter().partition(Result::is_ok);
    let again = tries.into_iter().flatten().sum::<usize>().saturating_sub(PODS - late.len());
    let owners = fleet.check_no_duplicates()?;
    // Too slow is a number like others; the table says so.
    let missed = if let Some(why) = late.into_iter().find_map(Result::err) {
        print_progress(format!("{why:#}\n{}", fleet.summary()));
        // Calls that nobody waits for any more come to their end.
        tokio::time::sleep(CALL).await;
        format!("NOT ENDED, {owners} of {PODS} have an address: ")
    } else {
        ensure!(owners == PODS, "{owners} addresses are held");
        String::new()
    };
    let blocks = fleet.objects().await?.len();
    let mut verbs: BTreeMap<String, usize> = BTreeMap::new();
    for asked in lab.requests_since(mark)?.into_iter().filter(|asked| asked.resource.starts_with("ipblocks"))
    {
        *verbs.entry(asked.verb).or_default() += 1;
    }
    for pod in 0..PODS {
        fleet.delete(pod % nodes, &name(pod))?;
    }
    // Started anew and in a hurry, nodes give back at once what nobody has.
    fleet.timings = FAST;
    for number in 0..nodes {
        fleet.crash(number).await;
        fleet.start(number)?;
    }
    let begun = Instant::now();
    fleet.wait_until_released(ALL).await?;
    let requests: Vec<String> = verbs.iter().map(|(verb, count)| format!("{count} {verb}")).collect();
    Ok(format!(
        "{missed}{:.2} s, {again} tried again, 0 duplicates, 0 leaks (all given back in {:.1} s); {blocks} objects, requests: {}",
        took.as_secs_f64(),
        begun.elapsed().as_secs_f64(),
        requests.join(", ")
    ))
}

fn name(pod: usize) -> String {
    format!("pod-{pod}")
}

/// Calls until there is an address, as a kubelet does, and says how often.
async fn start(fleet: &Fleet, number: usize, pod: usize) -> Result<usize> {
    let tries = std::cell::Cell::new(0);
    wait::until(ALL, &format!("an address for pod {pod} on node {number}"), || async {
        tries.set(tries.get() + 1);
        fleet.add(number, &name(pod), Vec::new(), CALL).await??;
        Ok(Some(tries.get()))
    })
    .await
}
