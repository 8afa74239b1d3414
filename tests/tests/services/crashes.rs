//! Controllers that are killed or restarted.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use e2e::{
    quiet::{is_controller_write, wait_until_quiet},
    replica::Replica,
};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use lab::{Lab, wait};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::{
    TIMEOUT,
    cluster::{Endpoints, TestCluster, TestPod, network_services, slices},
    start_controller,
};

pub async fn doubled_slices_become_one(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "doubled").await?;
    let outcome = async {
        cluster.create_pod(&TestPod::new("db-0", "db", &["192.168.9.1"])).await?;
        cluster.create_service("db", TestCluster::service_spec("db")).await?;
        cluster.wait_for_condition("db", "Ready", "True", "Ready").await?;
        // A former leader whose create was delayed writes the same slice again.
        let slice = cluster.slices("db").await?.into_iter().find(|slice| slice.address_type == "IPv4");
        let mut copy: Value = serde_json::to_value(slice.context("a slice of IPv4")?)?;
        for field in ["name", "uid", "resourceVersion", "generation", "creationTimestamp", "managedFields"] {
            copy["metadata"].as_object_mut().context("metadata")?.remove(field);
        }
        cluster.create(&slices(), &copy).await?;
        wait::until(TIMEOUT, "one slice of each family", || async {
            let slices = cluster.slices("db").await?;
            ensure!(slices.len() == 2, "{} slices", slices.len());
            Ok(Some(()))
        })
        .await?;
        cluster.wait_for_endpoints("db", &[("192.168.9.1", "db-0", true)]).await
    };
    outcome.await.with_context(|| replica.tail())
}

const KILL_ROUNDS: u64 = 4;
const KILLED_PODS: usize = 120;

pub async fn a_leader_killed_while_it_writes_leaves_no_doubled_endpoints(lab: Lab) -> Result<()> {
    let (cluster, mut replica) = start_controller(&lab, "killed").await?;
    let outcome = async {
        let address = |number: usize| format!("192.168.{}.{}", 10 + number / 200, 1 + number % 200);
        stream::iter(0..KILLED_PODS)
            .map(|number| {
                let cluster = cluster.clone();
                async move {
                    cluster
                        .create_pod(&TestPod::new(&format!("db-{number}"), "db", &[&address(number)]))
                        .await
                        .map(drop)
                }
            })
            .buffer_unordered(16)
            .try_collect::<Vec<()>>()
            .await?;
        let expected: Endpoints = (0..KILLED_PODS)
            .map(|number| anyhow::Ok((address(number).parse()?, format!("db-{number}"), true)))
            .collect::<Result<_>>()?;
        for round in 0..KILL_ROUNDS {
            let names: Vec<String> = (0..8).map(|number| format!("db-{round}-{number}")).collect();
            for name in &names {
                cluster.create_service(name, TestCluster::service_spec("db")).await?;
            }
            // Killed as soon as some of the slices exist.
            wait::until(TIMEOUT, "the first slices", || async {
                let mut found = 0;
                for name in &names {
                    found += cluster.slices(name).await?.len();
                }
                Ok((found > usize::try_from(round)? * 4).then_some(()))
            })
            .await?;
            replica.signal(Signal::SIGKILL)?;
            replica.wait_for_exit(TIMEOUT).await?;
            replica = cluster.start_leader(&lab).await?;
            for name in &names {
                cluster.wait_for_model(TIMEOUT, name, &expected).await?;
                wait::until(TIMEOUT, "no doubled endpoints", || async {
                    let slices = cluster.slices(name).await?;
                    let endpoints: usize = slices.iter().map(|slice| slice.endpoints.len()).sum();
                    // 120 endpoints in two slices of IPv4, and a placeholder of IPv6.
                    ensure!(endpoints == KILLED_PODS, "{endpoints} endpoints in {} slices", slices.len());
                    ensure!(slices.len() == 3, "{} slices", slices.len());
                    Ok(Some(()))
                })
                .await?;
                cluster.wait_for_condition(name, "Ready", "True", "Ready").await?;
            }
        }
        Ok(())
    };
    let outcome: Result<()> = outcome.await;
    outcome.with_context(|| Replica::log(&lab, 1))
}

/// How long a restarted controller is observed after it is ready.
const OBSERVATION: Duration = Duration::from_secs(8);

pub async fn a_restarted_controller_writes_nothing(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "restart").await?;
    let outcome = async {
        for number in 1..=20 {
            let address = format!("192.168.9.{number}");
            cluster.create_pod(&TestPod::new(&format!("db-{number}"), "db", &[&address])).await?;
        }
        for number in 0..10 {
            cluster.create_service(&format!("db-{number}"), TestCluster::service_spec("db")).await?;
        }
        for number in 0..10 {
            wait::until(TIMEOUT, "the counts", || async {
                let object = cluster.get(&network_services(), &format!("db-{number}")).await?;
                Ok(object.filter(|it| it["status"]["endpoints"]["summary"] == "20/20"))
            })
            .await?;
        }
        anyhow::Ok(())
    };
    outcome.await.with_context(|| replica.tail())?;
    // The counts of services of other tests may follow.
    wait_until_quiet(&lab, Duration::from_secs(6), is_controller_write).await?;
    drop(replica);
    let offset = lab.audit_offset()?;
    let replica = cluster.start_leader(&lab).await?;
    let outcome = async {
        // It works: a change is written.
        wait::until(TIMEOUT, "the new leader to reconcile", || async {
            Ok((replica.metric("patchbay_service_reconcile_duration_seconds_count", "")? >= 10).then_some(()))
        })
        .await?;
        // Only a fixed time can show that nothing is written.
        tokio::time::sleep(OBSERVATION).await;
        let mut writes = TestCluster::controller_writes(&lab, offset)?;
        // A new leader repeats the warnings about faults that other tests left behind.
        writes.retain(|write| !write.contains(" events ") || write.contains(" restart/"));
        ensure!(writes.is_empty(), "{writes:?}");
        cluster.set_ready("db-1", false).await?;
        wait::until(TIMEOUT, "the change to be written", || async {
            let endpoints = cluster.endpoints("db-0").await?;
            Ok(endpoints.iter().any(|(_, pod, ready)| pod == "db-1" && !ready).then_some(()))
        })
        .await?;
        let patch = json!({"metadata": {"labels": {"seen": "1"}}});
        cluster.merge_patch(&network_services(), "db-0", &patch).await
    };
    outcome.await.with_context(|| replica.tail())
}

/// The standby has no more than the Lease to wait for: its caches are filled.
pub async fn a_standby_goes_on_when_the_leader_is_killed(lab: Lab) -> Result<()> {
    let (cluster, mut leader) = start_controller(&lab, "standby").await?;
    let standby = Replica::start_ready(&lab, 2, &[]).await?;
    let outcome = async {
        cluster.create_service("db", TestCluster::service_spec("db")).await?;
        cluster.create_pod(&TestPod::new("db-0", "db", &["192.168.9.1"])).await?;
        cluster.wait_for_endpoints("db", &[("192.168.9.1", "db-0", true)]).await?;
        leader.signal(Signal::SIGKILL)?;
        leader.wait_for_exit(TIMEOUT).await?;
        cluster.create_pod(&TestPod::new("db-1", "db", &["192.168.9.2"])).await?;
        cluster.set_ready("db-0", false).await?;
        cluster
            .wait_for_endpoints("db", &[("192.168.9.1", "db-0", false), ("192.168.9.2", "db-1", true)])
            .await?;
        // One slice of each family, as before.
        let slices = cluster.slices("db").await?;
        ensure!(slices.len() == 2, "{slices:?}");
        Ok(())
    };
    outcome.await.with_context(|| standby.tail())
}
