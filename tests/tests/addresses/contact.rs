//! Nodes that lose contact with the API server.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use e2e::fleet::{FAST, Fleet};
use lab::{Lab, Topology, wait};
use node::ipam::Timings;
use serde_json::json;

use crate::{TIMEOUT, add, clients, spec};

/// What production allows for minutes.
const GRACE: Duration = Duration::from_secs(3);

pub async fn a_node_cut_off_from_the_api_server_stops_allocating_when_its_time_is_over(
    lab: Lab,
) -> Result<()> {
    let timings = Timings { offline_grace: GRACE, ..FAST };
    let ipam = spec(json!({"subnets": ["10.9.0.0/24"]}))?;
    let mut fleet = Fleet::new(clients(&lab, 1).await?, "cut", &ipam, 2, timings)?;
    fleet.start_all()?;
    let kept = [add(&fleet, 0, "before").await?, add(&fleet, 0, "kept").await?].concat();
    let cut = Instant::now();
    lab.kill("apiserver")?;
    // From the block that the node holds.
    ensure!(fleet.status(0)?.is_ok(), "{:?}", fleet.status(0)?);
    add(&fleet, 0, "during").await?;
    wait::until(TIMEOUT, "the node to stop allocating", || async {
        Ok(fleet.status(0)?.is_err().then_some(()))
    })
    .await?;
    let took = cut.elapsed();
    println!("stopped allocating {took:?} after the cut");
    ensure!(took >= GRACE, "stopped after {took:?}, before its time was over");
    let late = fleet.add(0, "late", Vec::new(), TIMEOUT).await?.err().context("allocated while cut off")?;
    ensure!(late.msg.contains("has lost the API server"), "{late}");
    // Pods can end meanwhile, and what is released stays unallocated as well.
    fleet.delete(0, "before")?;
    ensure!(fleet.add(0, "later", Vec::new(), TIMEOUT).await?.is_err(), "allocated a released address");
    // Other components may have exited without the API server.
    lab.up(Topology::ControlPlaneOnly).await?;
    wait::until(TIMEOUT, "the nodes to allocate again", || async {
        let ready = fleet.status(0)?.and(fleet.status(1)?);
        ready.map(Some).map_err(|error| anyhow!("{error}"))
    })
    .await?;
    let after = [add(&fleet, 0, "after").await?, add(&fleet, 1, "other").await?].concat();
    ensure!(!after.contains(&kept[1]), "{after:?} repeats an address of {kept:?}");
    ensure!(fleet.check_no_duplicates()? == 4, "{}", fleet.describe());
    for (number, container) in [(0, "kept"), (0, "during"), (0, "after"), (1, "other")] {
        fleet.delete(number, container)?;
    }
    fleet.wait_until_released(TIMEOUT).await?;
    fleet.shutdown().await;
    Ok(())
}
