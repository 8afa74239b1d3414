//! Pods that are created while their network or their NAD is being deleted, with and without admission.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use e2e::replica::Replica;
use lab::{Lab, wait};
use serde_json::{Value, json};

use crate::{
    TIMEOUT,
    cluster::{TestCluster, condition},
    network_spec, start_controller,
    watch_log::{ChangeType, ObjectKind, WatchLog},
};

/// How many networks are deleted concurrently.
const CONCURRENCY: u64 = 12;

/// Pseudo-random delays, the same in every run.
fn random_delays(mut seed: u64) -> impl FnMut(u64) -> Duration {
    move |milliseconds| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        Duration::from_micros((seed >> 33) % (milliseconds * 1000))
    }
}

/// How often a pod and the deletion of its network ended in which way.
#[derive(Debug, Default)]
struct DeletionRaces {
    /// The webhook rejected the pod.
    rejected: usize,
    /// The pod was admitted and kept the network until it was deleted.
    admitted: usize,
    /// The pod was created after the network was gone.
    late: usize,
}

/// Deletes a network and creates a pod on it concurrently.
async fn race_pod_with_deletion(
    cluster: &TestCluster,
    watch_log: &WatchLog,
    number: u64,
) -> Result<DeletionRaces> {
    let mut delay = random_delays(4711 + number * 7919);
    let name = format!("race-{number}");
    let (delete_after, create_after) =
        (delay(40), if number.is_multiple_of(4) { delay(1500) } else { delay(40) });
    cluster.create_network(&name, network_spec(cluster)).await?;
    cluster.wait_for_nad(&cluster.namespace, &name).await?;
    let create = async {
        tokio::time::sleep(create_after).await;
        cluster.pod_is_rejected(&name, &name).await
    };
    let delete = async {
        tokio::time::sleep(delete_after).await;
        cluster.delete_network(&name).await
    };
    let (rejected, deleted) = tokio::join!(create, delete);
    deleted?;
    if rejected? {
        cluster.wait_until_deleted(&name).await?;
        return Ok(DeletionRaces { rejected: 1, ..DeletionRaces::default() });
    }
    let created = watch_log.wait_for(ObjectKind::Pod, &name, ChangeType::Added).await?;
    let kept = wait::until(TIMEOUT, &format!("{name} to be blocked or deleted"), || async {
        let Some(network) = cluster.get_network(&name).await? else { return Ok(Some(false)) };
        let reason = condition(&network, "Ready").map(|it| it["reason"].clone());
        Ok((reason == Some(Value::from("DeletionBlocked"))).then_some(true))
    })
    .await?;
    if !kept {
        let gone = watch_log.wait_for(ObjectKind::Network, &name, ChangeType::Deleted).await?;
        ensure!(
            gone < created,
            "the network of an admitted pod was deleted at {gone}, the pod exists since {created}"
        );
        cluster.delete_workload(&cluster.pod_ref(&name)).await?;
        return Ok(DeletionRaces { late: 1, ..DeletionRaces::default() });
    }
    // The network and its NAD must stay as long as the pod exists.
    cluster.wait_for_nad(&cluster.namespace, &name).await?;
    let started = Instant::now();
    while started.elapsed() < Duration::from_millis(1500) {
        let network = cluster.get_network(&name).await?.context("the network of a pod was deleted")?;
        let has_finalizer = network["metadata"]["finalizers"].to_string().contains("patchbay.dev/users");
        ensure!(has_finalizer, "the nodes may remove the links of a pod: {network:#}");
        let nad = cluster.get_nad(&cluster.namespace, &name).await?;
        ensure!(nad.is_some(), "the NAD of a pod was deleted");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    cluster.delete_workload(&cluster.pod_ref(&name)).await?;
    cluster.wait_until_deleted_in_time(&name).await?;
    Ok(DeletionRaces { admitted: 1, ..DeletionRaces::default() })
}

/// A test whose rounds all ended alike runs up to this many.
const MAX_ROUNDS: u64 = 80;

pub async fn no_pod_loses_its_network_in_a_race_with_deletion(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "race").await?;
    let rounds = if e2e::soak() { 1000 } else { 20 };
    let watch_log = WatchLog::start(&cluster).await?;
    let all = async {
        let mut races = DeletionRaces::default();
        for first in (0..MAX_ROUNDS.max(rounds)).step_by(20) {
            // On a busy machine the first rounds may all end alike.
            if first >= rounds && races.rejected > 0 && races.admitted > 0 {
                break;
            }
            let batch =
                (first..first + 20).map(|number| race_pod_with_deletion(&cluster, &watch_log, number));
            for (number, one) in (first..).zip(futures::future::join_all(batch).await) {
                let one = one.with_context(|| format!("round {number}"))?;
                races.rejected += one.rejected;
                races.admitted += one.admitted;
                races.late += one.late;
            }
        }
        Ok(races)
    };
    let races = watch_log.record_during(all).await.with_context(|| replica.tail())?;
    println!("{races:?}");
    ensure!(
        races.rejected > 0 && races.admitted > 0,
        "only one outcome occurred; the race was not exercised"
    );
    Ok(())
}

/// Enables or disables the review of pods, by the objectSelector of the webhook.
async fn set_pod_review(cluster: &TestCluster, replica: &Replica, enabled: bool) -> Result<()> {
    let selector = if enabled { json!({}) } else { json!({"matchLabels": {"reviewed": "never"}}) };
    cluster.set_pod_webhook_selector(&selector).await?;
    let reviewed = || replica.metric("patchbay_admission_requests_total", "ValidateUsers");
    wait::until(TIMEOUT, "the objectSelector to be in force", || async {
        let before = reviewed()?;
        cluster.dry_run_pod("probe", "no-such-network").await?;
        Ok(((reviewed()? > before) == enabled).then_some(()))
    })
    .await
}

/// How many unreviewed pods had which outcome.
#[derive(Debug, Default)]
struct RaceOutcomes {
    /// The pod kept the network and its NAD until it was deleted.
    kept: usize,
    /// Of these: the NAD was deleted and recreated.
    recreated: usize,
    /// The pod was created after its NAD was deleted and the last live read: it never had a link.
    after_nad: usize,
    /// The pod was created after the nodes were released.
    after_release: usize,
}

/// Creates a pod, unreviewed, while its network is being deleted.
async fn create_unreviewed_pod(
    cluster: &TestCluster,
    watch_log: &WatchLog,
    number: u64,
    outcomes: &mut RaceOutcomes,
) -> Result<()> {
    let name = format!("unreviewed-{number}");
    let mut delay = random_delays(815 + number * 7919);
    cluster.create_network(&name, network_spec(cluster)).await?;
    cluster.wait_for_nad(&cluster.namespace, &name).await?;
    cluster.delete_network(&name).await?;
    match number % 3 {
        0 => {
            watch_log.wait_for(ObjectKind::Nad, &name, ChangeType::Deleted).await?;
            tokio::time::sleep(delay(12)).await;
        }
        _ => tokio::time::sleep(Duration::from_millis(700) + delay(600)).await,
    }
    let pod = cluster.create_pod(&name, &name).await?;
    let blocked = wait::until(TIMEOUT, &format!("{name} to be blocked or released"), || async {
        let Some(network) = cluster.get_network(&name).await? else { return Ok(Some(false)) };
        if !network["metadata"]["finalizers"].to_string().contains("patchbay.dev/users") {
            return Ok(Some(false));
        }
        let reason = condition(&network, "Ready").map(|it| it["reason"].clone());
        Ok((reason == Some(Value::from("DeletionBlocked"))).then_some(true))
    })
    .await?;
    if blocked {
        cluster.wait_for_nad(&cluster.namespace, &name).await?;
        // Gives a wrong deletion time to happen; the watch log would show it.
        tokio::time::sleep(delay(400)).await;
        cluster.delete_workload(&pod).await?;
        cluster.wait_until_deleted_in_time(&name).await?;
    } else {
        cluster.wait_until_deleted_in_time(&name).await?;
        cluster.delete_workload(&pod).await?;
    }
    check_order(watch_log, &name, outcomes).await
}

/// Checks the order of changes of a finished round by their resource versions.
async fn check_order(watch_log: &WatchLog, name: &str, outcomes: &mut RaceOutcomes) -> Result<()> {
    let created = watch_log.wait_for(ObjectKind::Pod, name, ChangeType::Added).await?;
    let deleted = watch_log.wait_for(ObjectKind::Pod, name, ChangeType::Deleted).await?;
    watch_log.wait_for(ObjectKind::Network, name, ChangeType::Deleted).await?;
    let released = watch_log
        .wait_for(ObjectKind::Network, name, ChangeType::Modified { users_finalizer: false })
        .await?;
    let nad_added = watch_log.versions(ObjectKind::Nad, name, ChangeType::Added);
    let nad_deleted = watch_log.versions(ObjectKind::Nad, name, ChangeType::Deleted);
    let last_before =
        |all: &[u64], until: u64| all.iter().copied().filter(|it| *it < until).max().unwrap_or_default();
    if released < created {
        outcomes.after_release += 1;
    } else if deleted < released {
        ensure!(
            last_before(&nad_added, deleted) > last_before(&nad_deleted, deleted),
            "{name}: the pod existed from {created} to {deleted}; its NAD was added at {nad_added:?} and deleted at {nad_deleted:?}"
        );
        outcomes.kept += 1;
        outcomes.recreated += usize::from(nad_added.len() > 1);
    } else {
        ensure!(
            last_before(&nad_deleted, created) > last_before(&nad_added, created),
            "{name}: the pod existed from {created}, its NAD was deleted at {nad_deleted:?}, the nodes were released at {released}"
        );
        outcomes.after_nad += 1;
    }
    Ok(())
}

pub async fn pods_that_bypass_admission_keep_their_network_and_nad(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "unreviewed").await?;
    let rounds = if e2e::soak() { 504 } else { CONCURRENCY };
    set_pod_review(&cluster, &replica, false).await?;
    let watch_log = WatchLog::start(&cluster).await?;
    let all = async {
        let mut outcomes = RaceOutcomes::default();
        for first in (0..MAX_ROUNDS.max(rounds)).step_by(usize::try_from(CONCURRENCY)?) {
            if first >= rounds && outcomes.kept > 0 {
                break;
            }
            let batch = (first..first + CONCURRENCY).map(async |number| {
                let mut outcomes = RaceOutcomes::default();
                create_unreviewed_pod(&cluster, &watch_log, number, &mut outcomes).await.map(|()| outcomes)
            });
            for one in futures::future::try_join_all(batch).await? {
                outcomes.kept += one.kept;
                outcomes.recreated += one.recreated;
                outcomes.after_nad += one.after_nad;
                outcomes.after_release += one.after_release;
            }
        }
        Ok(outcomes)
    };
    let outcomes: Result<RaceOutcomes> = watch_log.record_during(all).await;
    set_pod_review(&cluster, &replica, true).await?;
    let outcomes = outcomes.with_context(|| replica.tail())?;
    println!("{outcomes:?}");
    ensure!(outcomes.kept > 0, "no pod kept its network");
    ensure!(outcomes.recreated > 0 || !e2e::soak(), "no NAD was recreated; the race was not exercised");
    Ok(())
}

/// Removes the namespace from the list while a pod there starts to use the network. Returns what happened to the NAD: if
/// the pod was created before the NAD was deleted, the controller must recreate it.
async fn race_pod_with_namespace_removal(
    cluster: &TestCluster,
    watch_log: &WatchLog,
    number: u64,
) -> Result<&'static str> {
    let mut delay = random_delays(1234 + number * 7919);
    let name = format!("leave-{number}");
    cluster.create_network(&name, network_spec(cluster)).await?;
    cluster.wait_for_nad(&cluster.namespace, &name).await?;
    let create = async {
        match number % 3 {
            0 => {
                watch_log.wait_for(ObjectKind::Nad, &name, ChangeType::Deleted).await?;
                tokio::time::sleep(delay(12)).await;
            }
            // Mostly before the controller has seen the new list.
            1 => tokio::time::sleep(delay(20)).await,
            _ => tokio::time::sleep(delay(500)).await,
        }
        cluster.create_pod(&name, &name).await
    };
    let remove_namespace = cluster.patch_spec(&name, json!({"attachment": {"namespaces": null}}));
    let (pod, ()) = tokio::try_join!(create, remove_namespace)?;
    let created = watch_log.wait_for(ObjectKind::Pod, &name, ChangeType::Added).await?;
    let last =
        |change| watch_log.versions(ObjectKind::Nad, &name, change).into_iter().max().unwrap_or_default();
    let outcome =
        wait::until(TIMEOUT, &format!("{name} to keep its NAD, or the pod to be too late"), || async {
            let network = cluster.get_network(&name).await?.context("the network does not exist")?;
            let (added, deleted) = (last(ChangeType::Added), last(ChangeType::Deleted));
            let counted = network["status"]["users"]["count"] == 1
                && network["status"]["observedGeneration"] == network["metadata"]["generation"];
            if added > deleted {
                return Ok(counted.then_some(if deleted > 0 { "recreated" } else { "kept" }));
            }
            Ok((created > deleted).then_some("late"))
        })
        .await?;
    cluster.delete_workload(&pod).await?;
    wait::until(TIMEOUT, &format!("the NAD of {name} to be deleted"), || async {
        Ok(cluster.get_nad(&cluster.namespace, &name).await?.is_none().then_some(()))
    })
    .await?;
    cluster.delete_network(&name).await?;
    cluster.wait_until_deleted_in_time(&name).await?;
    Ok(outcome)
}

pub async fn no_pod_loses_its_nad_when_its_namespace_leaves_the_list(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "leave").await?;
    let watch_log = WatchLog::start(&cluster).await?;
    let rounds = if e2e::soak() { 504 } else { CONCURRENCY * 2 };
    let all = async {
        let mut outcomes = std::collections::BTreeMap::<&str, usize>::new();
        for first in (0..MAX_ROUNDS.max(rounds)).step_by(usize::try_from(CONCURRENCY)?) {
            if first >= rounds && outcomes.len() > 1 {
                break;
            }
            let batch = (first..first + CONCURRENCY)
                .map(|number| race_pod_with_namespace_removal(&cluster, &watch_log, number));
            for outcome in futures::future::try_join_all(batch).await? {
                *outcomes.entry(outcome).or_default() += 1;
            }
        }
        Ok(outcomes)
    };
    let outcomes = watch_log.record_during(all).await.with_context(|| replica.tail())?;
    println!("{outcomes:?}");
    ensure!(outcomes.len() > 1, "only one outcome occurred; the race was not exercised");
    ensure!(
        outcomes.contains_key("recreated") || !e2e::soak(),
        "no NAD was recreated; the race was not exercised"
    );
    Ok(())
}
