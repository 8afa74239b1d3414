//! Pods that slip in while a network goes, admission or not.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use e2e::replica::Replica;
use lab::{Lab, wait};
use serde_json::{Value, json};

use crate::{
    GONE, SOON,
    cluster::{Cluster, condition},
    spec, start,
    watch_log::{Fate, History, Kind},
};

/// How many networks go at a time.
const AT_ONCE: u64 = 12;

/// Numbers that are the same in every run.
fn dice(mut seed: u64) -> impl FnMut(u64) -> Duration {
    move |milliseconds| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        Duration::from_micros((seed >> 33) % (milliseconds * 1000))
    }
}

/// One network, one pod, in some order of time.
async fn interleave(cluster: &Cluster, number: u64) -> Result<&'static str> {
    let mut roll = dice(4711 + number * 7919);
    let name = format!("race-{number}");
    let (before, after) = (roll(40), if number.is_multiple_of(4) { roll(1500) } else { roll(40) });
    cluster.create(&name, spec(cluster)).await?;
    cluster.nad(&cluster.namespace, &name).await?;
    let make = async {
        tokio::time::sleep(after).await;
        cluster.refused(&name, &name).await
    };
    let delete = async {
        tokio::time::sleep(before).await;
        cluster.delete(&name).await
    };
    let (refused, deleted) = tokio::join!(make, delete);
    deleted?;
    if refused? {
        cluster.gone(&name, SOON * 2).await?;
        return Ok("refused");
    }
    // Admitted: whatever was under way, the network and its attachment stay for as long as the pod does.
    cluster.reason(&name, "Ready", "DeletionBlocked").await?;
    cluster.nad(&cluster.namespace, &name).await?;
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(1500) {
        let network = cluster.network(&name).await?.context("the network went from under a pod")?;
        let held = network["metadata"]["finalizers"].to_string().contains("patchbay.dev/users");
        ensure!(held, "the nodes may undo it under a pod: {network:#}");
        let nad = cluster.find_nad(&cluster.namespace, &name).await?;
        ensure!(nad.is_some(), "the attachment went from under a pod");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    cluster.remove(&cluster.pod_named(&name)).await?;
    cluster.gone(&name, GONE).await?;
    Ok("held")
}

pub async fn no_pod_is_stranded_whatever_comes_first(lab: Lab) -> Result<()> {
    let (cluster, replica) = start(&lab, "race").await?;
    let rounds = if e2e::soak() { 1000 } else { 20 };
    let (mut refused, mut held) = (0, 0);
    for first in (0..rounds).step_by(20) {
        let batch = (first..first + 20).map(|number| interleave(&cluster, number));
        for (number, outcome) in (first..).zip(futures::future::join_all(batch).await) {
            match outcome.with_context(|| format!("round {number}\n{}", replica.tail()))? {
                "refused" => refused += 1,
                "held" => held += 1,
                other => bail!("{other}"),
            }
        }
    }
    println!("{rounds} rounds: {refused} pods refused, {held} held their network");
    ensure!(refused > 0 && held > 0, "one outcome only shows too little");
    Ok(())
}

/// Whether pods are judged. None is while a selector of objects selects none.
async fn judge_pods(cluster: &Cluster, replica: &Replica, on: bool) -> Result<()> {
    let selector = if on { json!({}) } else { json!({"matchLabels": {"judged": "never"}}) };
    cluster.select_pods(&selector).await?;
    let judged = || replica.metric("patchbay_admission_requests_total", "ValidateUsers");
    wait::until(SOON, "pods to be judged or not", || async {
        let before = judged()?;
        cluster.rehearse("probe", "nobody").await?;
        Ok(((judged()? > before) == on).then_some(()))
    })
    .await
}

/// What became of a pod that nobody refused.
#[derive(Debug, Default)]
struct Tally {
    /// It held the network and its attachment until it went.
    held: usize,
    /// Of these: the attachment had gone and came back.
    back: usize,
    /// It came when its attachment had gone and the last look was over: it never had a link to lose.
    late: usize,
    /// It came when the nodes were free to undo.
    after: usize,
}

async fn slip_in(cluster: &Cluster, history: &History, number: u64, tally: &mut Tally) -> Result<()> {
    let name = format!("slip-{number}");
    let mut roll = dice(815 + number * 7919);
    cluster.create(&name, spec(cluster)).await?;
    cluster.nad(&cluster.namespace, &name).await?;
    cluster.delete(&name).await?;
    match number % 3 {
        0 => {
            history.saw(Kind::Attachment, &name, Fate::Gone).await?;
            tokio::time::sleep(roll(12)).await;
        }
        _ => tokio::time::sleep(Duration::from_millis(700) + roll(600)).await,
    }
    let pod = cluster.pod(&name, &name).await?;
    let blocked = wait::until(SOON, &format!("{name} to wait or to go"), || async {
        let Some(network) = cluster.network(&name).await? else { return Ok(Some(false)) };
        if !network["metadata"]["finalizers"].to_string().contains("patchbay.dev/users") {
            return Ok(Some(false));
        }
        let reason = condition(&network, "Ready").map(|it| it["reason"].clone());
        Ok((reason == Some(Value::from("DeletionBlocked"))).then_some(true))
    })
    .await?;
    if blocked {
        cluster.nad(&cluster.namespace, &name).await?;
        // Long enough for anything wrong that is under way to happen: the history tells.
        tokio::time::sleep(roll(400)).await;
        cluster.remove(&pod).await?;
        cluster.gone(&name, GONE).await?;
    } else {
        cluster.gone(&name, GONE).await?;
        cluster.remove(&pod).await?;
    }
    judge(history, &name, tally).await
}

/// What the order of versions says about one round that is over.
async fn judge(history: &History, name: &str, tally: &mut Tally) -> Result<()> {
    let made = history.saw(Kind::Pod, name, Fate::Made).await?;
    let ended = history.saw(Kind::Pod, name, Fate::Gone).await?;
    history.saw(Kind::Network, name, Fate::Gone).await?;
    let released = history.saw(Kind::Network, name, Fate::Changed { held: false }).await?;
    let came = history.versions(Kind::Attachment, name, Fate::Made);
    let went = history.versions(Kind::Attachment, name, Fate::Gone);
    let last =
        |all: &[u64], until: u64| all.iter().copied().filter(|it| *it < until).max().unwrap_or_default();
    if released < made {
        tally.after += 1;
    } else if ended < released {
        ensure!(
            last(&came, ended) > last(&went, ended),
            "{name}: the pod ran from {made} to {ended} and its attachment did not come back: {came:?}, {went:?}"
        );
        tally.held += 1;
        tally.back += usize::from(came.len() > 1);
    } else {
        ensure!(
            last(&went, made) > last(&came, made),
            "{name}: the pod was there from {made}, its attachment until {went:?}, and at {released} the nodes were let loose"
        );
        tally.late += 1;
    }
    Ok(())
}

pub async fn pods_that_nobody_refuses_hold_what_they_name(lab: Lab) -> Result<()> {
    let (cluster, replica) = start(&lab, "slip").await?;
    let rounds = if e2e::soak() { 504 } else { AT_ONCE };
    judge_pods(&cluster, &replica, false).await?;
    let history = History::begin(&cluster).await?;
    let all = async {
        let mut tally = Tally::default();
        for first in (0..rounds).step_by(usize::try_from(AT_ONCE)?) {
            let batch = (first..first + AT_ONCE).map(async |number| {
                let mut tally = Tally::default();
                slip_in(&cluster, &history, number, &mut tally).await.map(|()| tally)
            });
            for one in futures::future::try_join_all(batch).await? {
                tally.held += one.held;
                tally.back += one.back;
                tally.late += one.late;
                tally.after += one.after;
            }
        }
        Ok(tally)
    };
    let tally: Result<Tally> = history.beside(all).await;
    judge_pods(&cluster, &replica, true).await?;
    let tally = tally.with_context(|| replica.tail())?;
    println!("{rounds} rounds: {tally:?}");
    ensure!(tally.held > 0, "no pod held anything");
    ensure!(tally.back > 0 || !e2e::soak(), "no attachment had to come back: that shows too little");
    Ok(())
}

/// One network whose namespace leaves the list while a pod there begins to use it; says what became of its attachment. A
/// pod that was there before the attachment went must have it back.
async fn leave(cluster: &Cluster, history: &History, number: u64) -> Result<&'static str> {
    let mut roll = dice(1234 + number * 7919);
    let name = format!("leave-{number}");
    cluster.create(&name, spec(cluster)).await?;
    cluster.nad(&cluster.namespace, &name).await?;
    let begin = async {
        match number % 3 {
            0 => {
                history.saw(Kind::Attachment, &name, Fate::Gone).await?;
                tokio::time::sleep(roll(12)).await;
            }
            _ => tokio::time::sleep(roll(500)).await,
        }
        cluster.pod(&name, &name).await
    };
    let unlist = cluster.edit(&name, json!({"attachment": {"namespaces": null}}));
    let (pod, ()) = tokio::try_join!(begin, unlist)?;
    let made = history.saw(Kind::Pod, &name, Fate::Made).await?;
    let last = |fate| history.versions(Kind::Attachment, &name, fate).into_iter().max().unwrap_or_default();
    let fate =
        wait::until(SOON, &format!("{name} to have its attachment or never to have had it"), || async {
            let network = cluster.network(&name).await?.context("the network")?;
            let (came, went) = (last(Fate::Made), last(Fate::Gone));
            let known = network["status"]["users"]["count"] == 1
                && network["status"]["observedGeneration"] == network["metadata"]["generation"];
            if came > went {
                return Ok(known.then_some(if went > 0 { "back" } else { "kept" }));
            }
            Ok((made > went).then_some("late"))
        })
        .await?;
    cluster.remove(&pod).await?;
    wait::until(SOON, &format!("no attachment of {name}"), || async {
        Ok(cluster.find_nad(&cluster.namespace, &name).await?.is_none().then_some(()))
    })
    .await?;
    cluster.delete(&name).await?;
    cluster.gone(&name, GONE).await?;
    Ok(fate)
}

pub async fn no_pod_is_stranded_by_a_namespace_that_leaves_the_list(lab: Lab) -> Result<()> {
    let (cluster, replica) = start(&lab, "leave").await?;
    let history = History::begin(&cluster).await?;
    let rounds = if e2e::soak() { 504 } else { AT_ONCE * 2 };
    let all = async {
        let mut fates = std::collections::BTreeMap::<&str, usize>::new();
        for first in (0..rounds).step_by(usize::try_from(AT_ONCE)?) {
            let batch = (first..first + AT_ONCE).map(|number| leave(&cluster, &history, number));
            for fate in futures::future::try_join_all(batch).await? {
                *fates.entry(fate).or_default() += 1;
            }
        }
        Ok(fates)
    };
    let fates = history.beside(all).await.with_context(|| replica.tail())?;
    println!("{rounds} rounds: {fates:?}");
    ensure!(fates.len() > 1, "one outcome only shows too little");
    ensure!(
        fates.contains_key("back") || !e2e::soak(),
        "no attachment had to come back: that shows too little"
    );
    Ok(())
}
