//! Who may begin to use a network that is going: admission of every kind, through the API server.

use anyhow::{Context as _, Result, ensure};
use e2e::replica::Replica;
use kube::ResourceExt as _;
use lab::{Lab, wait};
use serde_json::{Value, json};

use crate::{
    GONE, SOON,
    cluster::{Cluster, User, condition, resource},
    spec, start, workloads,
};

/// How often users were judged.
fn judged(replica: &Replica) -> Result<u64> {
    replica.metric("patchbay_admission_requests_total", "ValidateUsers")
}

async fn refusal(cluster: &Cluster, (user, object): &(User, Value)) -> Result<String> {
    match cluster.post(&user.resource, Some(&cluster.namespace), object).await {
        Ok(_) => anyhow::bail!("{} was let in: {object}", user.resource.kind),
        Err(kube::Error::Api(status)) => Ok(status.message),
        Err(error) => Err(error.into()),
    }
}

pub async fn while_a_network_goes_no_kind_begins_to_use_it(lab: Lab) -> Result<()> {
    let (cluster, replica) = start(&lab, "refuse").await?;
    let outcome = async {
        cluster.create("refuse", spec(&cluster)).await?;
        cluster.nad("refuse", "refuse").await?;
        let named = |(number, one), word: &str, network: &str| {
            workloads::naming(one, &format!("{word}-{number}"), "refuse", network)
        };
        let all = || workloads::all().into_iter().enumerate();
        for one in all() {
            cluster.user(named(one.clone(), "held", "refuse")).await?;
            cluster.user(named(one, "free", "elsewhere")).await?;
        }
        let count = all().count();
        cluster.until("refuse", "all users", |it| it["status"]["users"]["count"] == count).await?;
        cluster.delete("refuse").await?;
        cluster.reason("refuse", "Ready", "DeletionBlocked").await?;
        for one in all() {
            let new = named(one.clone(), "new", "refuse");
            let kind = &new.0.resource.kind;
            let told = refusal(&cluster, &new).await?;
            let sentence = format!(
                "this {kind} names NetworkAttachmentDefinition refuse/refuse of BridgeNetwork refuse, which is being deleted"
            );
            ensure!(told.contains(&sentence), "{told}");
            // What adds no reference passes, and so does what names something else.
            let label = json!({"metadata": {"labels": {"seen": "again"}}});
            let (resource, held) = (&new.0.resource, format!("held-{}", one.0));
            cluster.merge(resource, Some("refuse"), &held, &label).await?;
            cluster.user(named(one.clone(), "other", "elsewhere")).await?;
            // The template of a Job cannot be changed at all.
            if kind != "Job" {
                let (free, patch) = (format!("free-{}", one.0), workloads::edit(&new.1));
                let told = cluster.merge(resource, Some("refuse"), &free, &patch).await;
                let told = told.err().with_context(|| format!("a {kind} began to name it"))?;
                ensure!(format!("{told:#}").contains(&sentence), "{told:#}");
            }
        }
        println!("{}", refusal(&cluster, &named((0, workloads::all().remove(0)), "new", "refuse")).await?);
        // Whoever names nothing is not even asked about.
        let before = judged(&replica)?;
        for one in all() {
            cluster.user(workloads::plain(named(one, "plain", "refuse"))).await?;
        }
        ensure!(judged(&replica)? == before, "the webhook was asked about objects that name nothing");
        Ok(())
    };
    let outcome: Result<()> = outcome.await;
    outcome.with_context(|| replica.tail())?;
    finish(&cluster).await.with_context(|| replica.tail())
}

/// Removes all users, and sees the network go.
async fn finish(cluster: &Cluster) -> Result<()> {
    cluster.sweep_users().await?;
    cluster.gone(&cluster.namespace, GONE).await
}

pub async fn what_a_user_makes_is_let_in(lab: Lab) -> Result<()> {
    let (cluster, replica) = start(&lab, "makes").await?;
    let outcome = async {
        cluster.create("makes", spec(&cluster)).await?;
        cluster.nad("makes", "makes").await?;
        let of = |kind: &str, name: &str, network: &str| -> Result<(User, Value)> {
            let found = workloads::all().into_iter().find(|(user, _)| user.resource.kind == kind);
            Ok(workloads::naming(found.with_context(|| kind.to_owned())?, name, "makes", network))
        };
        let deployment = cluster.user(of("Deployment", "user", "makes")?).await?;
        let machine = cluster.user(of("VirtualMachine", "user", "makes")?).await?;
        let stranger = cluster.user(of("VirtualMachine", "stranger", "elsewhere")?).await?;
        cluster.until("makes", "both", |it| it["status"]["users"]["count"] == 2).await?;
        cluster.delete("makes").await?;
        cluster.reason("makes", "Ready", "DeletionBlocked").await?;
        // A rollout goes on: the next ReplicaSet and its pod come.
        let patch = json!({"spec": {"replicas": 1, "template": {"metadata": {"labels": {"round": "two"}}}}});
        cluster.merge(&deployment.resource, Some("makes"), "user", &patch).await?;
        let pods = cluster.api(&resource("", "v1", "Pod", "pods"), Some("makes"));
        let pod = wait::until(SOON, "a pod of the rollout", || async {
            let all = pods.list(&kube::api::ListParams::default().labels("round=two")).await?;
            Ok(all.items.into_iter().next())
        })
        .await?;
        ensure!(pod.owner_references().iter().any(|it| it.kind == "ReplicaSet"), "{pod:?}");
        let instance = |name: &str| of("VirtualMachineInstance", name, "makes");
        let uid = cluster.uid(&machine).await?;
        cluster.user(workloads::controlled(instance("user")?, &machine, &uid)).await?;
        let uid = cluster.uid(&stranger).await?;
        let told = refusal(&cluster, &workloads::controlled(instance("stranger")?, &stranger, &uid)).await?;
        ensure!(told.contains("which is being deleted"), "{told}");
        // The pod counts beside its Deployment; ReplicaSet and VirtualMachineInstance do not.
        let first = json!([
            "Deployment makes/user",
            format!("Pod makes/{}", pod.name_any()),
            "VirtualMachine makes/user"
        ]);
        cluster.until("makes", "three users", |it| it["status"]["users"]["first"] == first).await?;
        finish(&cluster).await
    };
    outcome.await.with_context(|| replica.tail())
}

pub async fn without_a_controller_pods_are_made_and_networks_are_not(lab: Lab) -> Result<()> {
    let (cluster, mut replica) = start(&lab, "ignore").await?;
    cluster.create("ignore", spec(&cluster)).await?;
    cluster.nad("ignore", "ignore").await?;
    replica.signal(nix::sys::signal::Signal::SIGKILL)?;
    replica.ends_within(SOON).await?;
    cluster.delete("ignore").await?;
    for (number, one) in workloads::all().into_iter().enumerate() {
        let user = workloads::naming(one, &format!("user-{number}"), "ignore", "ignore");
        cluster.user(user).await?;
    }
    let told = cluster.refusal("unseen", spec(&cluster)).await?;
    ensure!(told.contains("failed calling webhook"), "{told}");
    // They came after the deletion, which nobody told them of: they hold the network all the same.
    let replica = cluster.lead(&lab).await?;
    let outcome = async {
        let network = cluster.reason("ignore", "Ready", "DeletionBlocked").await?;
        println!("{}", condition(&network, "Ready").context("Ready")?["message"]);
        ensure!(network["status"]["users"]["count"] == workloads::all().len(), "{network:#}");
        cluster.nad("ignore", "ignore").await?;
        finish(&cluster).await
    };
    outcome.await.with_context(|| replica.tail())
}
