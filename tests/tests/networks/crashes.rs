//! Controllers that die in the middle of a deletion, and kinds that go away.

use anyhow::{Context as _, Result, ensure};
use e2e::replica::{self, Replica};
use kube::api::{DeleteParams, Patch, PatchParams};
use lab::{Lab, wait};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::{
    GONE, SOON,
    cluster::{self, Cluster, condition},
    spec, start,
    watch_log::{Fate, History, Kind},
    workloads,
};

fn holds(network: Option<&Value>, finalizer: &str) -> bool {
    network.is_some_and(|it| it["metadata"]["finalizers"].to_string().contains(finalizer))
}

async fn kill(replica: &mut Replica) -> Result<()> {
    replica.signal(Signal::SIGKILL)?;
    replica.ends_within(SOON).await.map(drop)
}

pub async fn kill_9_between_two_steps_of_a_deletion_loses_nothing(lab: Lab) -> Result<()> {
    let (cluster, mut replica) = start(&lab, "aim").await?;
    cluster.node("aim-a", 1500).await?;
    let history = History::begin(&cluster).await?;
    let rounds = if e2e::soak() { 40 } else { 2 };
    let all = async {
        let mut hits = 0;
        for round in 0..rounds {
            let name = format!("aim-{round}");
            cluster.create(&name, spec(&cluster)).await?;
            cluster.nad("aim", &name).await?;
            cluster.delete(&name).await?;
            history.saw(Kind::Attachment, &name, Fate::Gone).await?;
            kill(&mut replica).await?;
            let hit = holds(cluster.network(&name).await?.as_ref(), "patchbay.dev/users");
            hits += usize::from(hit);
            // Nobody is there who could refuse it.
            let pod = if hit && round % 2 == 0 { Some(cluster.pod(&name, &name).await?) } else { None };
            replica = cluster.lead(&lab).await?;
            if let Some(pod) = pod {
                cluster.reason(&name, "Ready", "DeletionBlocked").await?;
                cluster.nad("aim", &name).await?;
                let freed = history.versions(Kind::Network, &name, Fate::Changed { held: false });
                ensure!(freed.is_empty(), "{name}: the nodes were let loose under a pod");
                cluster.remove(&pod).await?;
            }
            cluster.gone(&name, GONE).await?;
        }
        println!("killed {hits} of {rounds} times between the attachment and the release");
        ensure!(hits > 0, "the kill came too late every time");
        // Between the release and the end: a node still has its links.
        cluster.create("last", spec(&cluster)).await?;
        cluster.finalizer("last", "patchbay.dev/nodes", true).await?;
        cluster.report("aim-a", "last", true).await?;
        cluster.label("aim-a", "last", true).await?;
        cluster.delete("last").await?;
        history.saw(Kind::Network, "last", Fate::Changed { held: false }).await?;
        kill(&mut replica).await?;
        replica = cluster.lead(&lab).await?;
        let waits = cluster.reason("last", "Ready", "Deleting").await?;
        ensure!(holds(Some(&waits), "patchbay.dev/nodes"), "{waits:#}");
        ensure!(cluster.find_nad("aim", "last").await?.is_none(), "the attachment came back for nobody");
        cluster.unlist("aim-a").await?;
        cluster.gone("last", GONE).await?;
        cluster.label("aim-a", "last", false).await
    };
    history.beside(all).await.with_context(|| Replica::log(&lab, 1))
}

/// Two at once; the leader dies in the middle of a deletion.
async fn take_over(lab: &Lab, cluster: &Cluster, history: &History) -> Result<()> {
    let quick = ["--lease-term", "2s", "--lease-renew", "500ms", "--lease-look", "500ms"];
    cluster.free_lease().await?;
    let mut first = Replica::ready(lab, 1, &quick).await?;
    let _second = Replica::ready(lab, 2, &quick).await?;
    replica::serve(lab, &[1, 2])?;
    let held = cluster.pod("held", "held").await?;
    cluster.condition("held", "InUse", "True").await?;
    for name in ["held", "goes"] {
        cluster.delete(name).await?;
    }
    cluster.reason("held", "Ready", "DeletionBlocked").await?;
    history.saw(Kind::Attachment, "goes", Fate::Gone).await?;
    kill(&mut first).await?;
    let between = holds(cluster.network("goes").await?.as_ref(), "patchbay.dev/users");
    println!("the leader died {} the release", if between { "before" } else { "after" });
    replica::serve(lab, &[2])?;
    // Admission is not only the leader's.
    wait::until(SOON, "the other replica to refuse", || async {
        let refused = cluster.refused("new", "held").await?;
        if !refused {
            cluster.remove(&cluster.pod_named("new")).await?;
        }
        Ok(refused.then_some(()))
    })
    .await?;
    cluster.gone("goes", GONE + SOON).await?;
    ensure!(cluster.find_nad("two", "held").await?.is_some(), "taken from under a pod");
    cluster.remove(&held).await?;
    cluster.gone("held", GONE).await
}

pub async fn another_replica_ends_what_the_leader_began(lab: Lab) -> Result<()> {
    let (cluster, replica) = start(&lab, "two").await?;
    for name in ["held", "goes"] {
        cluster.create(name, spec(&cluster)).await?;
        cluster.nad("two", name).await?;
    }
    drop(replica);
    let history = History::begin(&cluster).await?;
    let outcome = history.beside(take_over(&lab, &cluster, &history)).await;
    replica::serve(&lab, &[1])?;
    outcome.with_context(|| format!("{}\n{}", Replica::log(&lab, 1), Replica::log(&lab, 2)))
}

async fn uninstall(cluster: &Cluster, kind: &str) -> Result<()> {
    let api = cluster.api(&cluster::definitions(), None);
    api.delete(kind, &DeleteParams::default()).await?;
    wait::until(SOON * 2, &format!("the kind {kind} to go"), || async {
        Ok(api.get_opt(kind).await?.is_none().then_some(()))
    })
    .await
}

async fn serve_machines(cluster: &Cluster, served: bool) -> Result<()> {
    let patch = json!([{"op": "replace", "path": "/spec/versions/0/served", "value": served}]);
    let patch = Patch::Json::<()>(serde_json::from_value(patch)?);
    let api = cluster.api(&cluster::definitions(), None);
    let patched = api.patch("virtualmachines.kubevirt.io", &PatchParams::default(), &patch).await;
    patched.map(drop).context("change what is served")
}

pub async fn a_kind_that_is_served_no_more_holds_nothing_up_and_counts_when_it_is_again(
    lab: Lab,
) -> Result<()> {
    let (cluster, replica) = start(&lab, "unserved").await?;
    let outcome = async {
        cluster.node("unserved-a", 1500).await?;
        for name in ["unserved", "served"] {
            cluster.create(name, spec(&cluster)).await?;
            cluster.nad("unserved", name).await?;
            cluster.user(workloads::virtual_machine(name, name)).await?;
            cluster.condition(name, "InUse", "True").await?;
        }
        cluster.delete("unserved").await?;
        cluster.reason("unserved", "Ready", "DeletionBlocked").await?;
        serve_machines(&cluster, false).await?;
        let gone = cluster.gone("unserved", SOON * 2).await;
        let unused = cluster.condition("served", "InUse", "False").await;
        serve_machines(&cluster, true).await?;
        gone.and(unused.map(drop))?;
        // Nobody has touched the machine since it was listed: only a new list tells of it.
        wait::until(SOON * 6, "the machine to count again", || async {
            let network = cluster.network("served").await?.context("the network")?;
            let used = condition(&network, "InUse").is_some_and(|it| it["status"] == "True");
            Ok(used.then_some(()))
        })
        .await?;
        cluster.sweep_users().await?;
        cluster.delete("served").await?;
        cluster.gone("served", GONE).await
    };
    outcome.await.with_context(|| replica.tail())
}

pub async fn kinds_that_vanish_hold_nothing_up(lab: Lab) -> Result<()> {
    let (cluster, replica) = start(&lab, "vanish").await?;
    let outcome = async {
        cluster.node("vanish-a", 1500).await?;
        for name in ["vanish", "stays"] {
            cluster.create(name, spec(&cluster)).await?;
            cluster.nad("vanish", name).await?;
        }
        cluster.report("vanish-a", "stays", true).await?;
        cluster.condition("stays", "Ready", "True").await?;
        cluster.user(workloads::virtual_machine("vm", "vanish")).await?;
        cluster.condition("vanish", "InUse", "True").await?;
        cluster.delete("vanish").await?;
        cluster.reason("vanish", "Ready", "DeletionBlocked").await?;
        uninstall(&cluster, "virtualmachineinstances.kubevirt.io").await?;
        uninstall(&cluster, "virtualmachines.kubevirt.io").await?;
        cluster.gone("vanish", GONE).await?;
        // With all attachments of all networks.
        uninstall(&cluster, "network-attachment-definitions.k8s.cni.cncf.io").await?;
        cluster.reason("stays", "Ready", "AttachmentsMissing").await?;
        // Who names one still waits for it.
        let pod = cluster.pod("user", "stays").await?;
        cluster.condition("stays", "InUse", "True").await?;
        cluster.delete("stays").await?;
        cluster.reason("stays", "Ready", "DeletionBlocked").await?;
        cluster.create("short", json!({"nodeSelector": cluster.selector()})).await?;
        cluster.finalizer("short", "patchbay.dev/users", true).await?;
        cluster.delete("short").await?;
        cluster.gone("short", GONE).await?;
        // Back again, for as long as it is needed.
        cluster.install_attachments().await?;
        cluster.nad("vanish", "stays").await?;
        cluster.remove(&pod).await?;
        cluster.unlist("vanish-a").await?;
        cluster.gone("stays", GONE).await
    };
    outcome.await.with_context(|| replica.tail())
}
