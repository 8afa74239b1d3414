//! Who counts as a user, and what people see of it.

use anyhow::{Context as _, Result, ensure};
use kube::{
    ResourceExt as _,
    api::{ListParams, Patch, PatchParams},
};
use lab::{Lab, wait};
use serde_json::{Value, json};

use crate::{
    GONE, SOON,
    cluster::{Cluster, User, condition, resource},
    spec, start, workloads,
};

/// An object of this kind that names this network of the test's namespace.
fn of(cluster: &Cluster, kind: &str, name: &str, network: &str) -> Result<(User, Value)> {
    let found = workloads::all().into_iter().find(|(user, _)| user.resource.kind == kind);
    Ok(workloads::naming(found.with_context(|| kind.to_owned())?, name, &cluster.namespace, network))
}

async fn ended(cluster: &Cluster, pod: &str, phase: &str) -> Result<()> {
    let api = cluster.api(&resource("", "v1", "Pod", "pods"), Some(&cluster.namespace));
    let patch = Patch::Merge(json!({"status": {"phase": phase}}));
    api.patch_status(pod, &PatchParams::default(), &patch).await.map(drop).context("end a pod")
}

/// A Job that runs; its pods wait for a node for ever.
async fn job(cluster: &Cluster, name: &str, deadline: Option<u32>) -> Result<User> {
    let (user, mut object) = of(cluster, "Job", name, &cluster.namespace)?;
    object["spec"]["suspend"] = json!(false);
    object["spec"]["backoffLimit"] = json!(0);
    object["spec"]["activeDeadlineSeconds"] = json!(deadline);
    cluster.user((user, object)).await
}

pub async fn the_finished_hold_nothing(lab: Lab) -> Result<()> {
    let (cluster, replica) = start(&lab, "ends").await?;
    let outcome = async {
        cluster.create("ends", spec(&cluster)).await?;
        cluster.nad("ends", "ends").await?;
        cluster.pod("well", "ends").await?;
        cluster.pod("badly", "ends").await?;
        let complete = job(&cluster, "complete", None).await?;
        let failed = job(&cluster, "failed", Some(1)).await?;
        let running = |it: &Value| it["status"]["users"]["first"].to_string().contains("Job ends/complete");
        cluster.until("ends", "users", running).await?;
        cluster.delete("ends").await?;
        cluster.reason("ends", "Ready", "DeletionBlocked").await?;
        ended(&cluster, "well", "Succeeded").await?;
        ended(&cluster, "badly", "Failed").await?;
        let pods = cluster.api(&resource("", "v1", "Pod", "pods"), Some("ends"));
        let of_job = ListParams::default().labels("job-name=complete");
        let pod = wait::until(SOON, "the Job's pod", || async { Ok(pods.list(&of_job).await?.items.pop()) })
            .await?;
        let whole = json!(["Job ends/complete", format!("Pod ends/{}", pod.name_any())]);
        cluster.until("ends", "the last Job", |it| it["status"]["users"]["first"] == whole).await?;
        ended(&cluster, &pod.name_any(), "Succeeded").await?;
        cluster.gone("ends", GONE).await?;
        // All of them are still there.
        for (user, kind) in [(&complete, "Complete"), (&failed, "Failed")] {
            let job = cluster.api(&user.resource, Some("ends")).get(&user.name).await?;
            let found = condition(&json!({"status": job.data["status"]}), kind).cloned();
            ensure!(found.is_some_and(|it| it["status"] == "True"), "{job:?}");
        }
        for pod in ["well", "badly"] {
            pods.get(pod).await?;
        }
        cluster.sweep_users().await
    };
    outcome.await.with_context(|| replica.tail())
}

pub async fn what_a_counted_object_makes_is_not_counted_again(lab: Lab) -> Result<()> {
    let (cluster, replica) = start(&lab, "twice").await?;
    let outcome = async {
        cluster.create("twice", spec(&cluster)).await?;
        cluster.nad("twice", "twice").await?;
        let deployment = cluster.user(of(&cluster, "Deployment", "web", "twice")?).await?;
        let sets = cluster.api(&resource("apps", "v1", "ReplicaSet", "replicasets"), Some("twice"));
        wait::until(SOON, "its ReplicaSet", || async {
            Ok(sets.list(&ListParams::default()).await?.items.pop())
        })
        .await?;
        // One more of the same kind, made later: once it is counted, the other was seen.
        cluster.user(of(&cluster, "ReplicaSet", "alone", "twice")?).await?;
        let vm = cluster.user(of(&cluster, "VirtualMachine", "vm", "twice")?).await?;
        let uid = cluster.uid(&vm).await?;
        let instance = of(&cluster, "VirtualMachineInstance", "vm", "twice")?;
        cluster.user(workloads::controlled(instance, &vm, &uid)).await?;
        cluster.user(of(&cluster, "VirtualMachineInstance", "alone", "twice")?).await?;
        let first = json!([
            "Deployment twice/web",
            "ReplicaSet twice/alone",
            "VirtualMachine twice/vm",
            "VirtualMachineInstance twice/alone",
        ]);
        let counted = |it: &Value| it["status"]["users"] == json!({"count": 4, "first": first});
        cluster.until("twice", "each once", counted).await?;
        // A live pod counts although its Deployment does.
        cluster.merge(&deployment.resource, Some("twice"), "web", &json!({"spec": {"replicas": 1}})).await?;
        cluster.until("twice", "the pod too", |it| it["status"]["users"]["count"] == 5).await?;
        cluster.sweep_users().await?;
        cluster.delete("twice").await?;
        cluster.gone("twice", GONE).await
    };
    outcome.await.with_context(|| replica.tail())
}

pub async fn people_see_how_many_use_it_and_the_first_ten(lab: Lab) -> Result<()> {
    let (cluster, replica) = start(&lab, "many").await?;
    let outcome = async {
        cluster.node("many-a", 1500).await?;
        let mut overlay = spec(&cluster);
        overlay["overlay"] = json!({"vni": 1010});
        cluster.create("many", overlay).await?;
        cluster.nad("many", "many").await?;
        cluster.report("many-a", "many", true).await?;
        for number in 10..23 {
            cluster.pod(&format!("pod-{number}"), "many").await?;
        }
        cluster.user(of(&cluster, "VirtualMachine", "vm", "many")?).await?;
        let network = cluster.until("many", "all", |it| it["status"]["users"]["count"] == 14).await?;
        let first: Vec<String> = (10..20).map(|number| format!("Pod many/pod-{number}")).collect();
        ensure!(network["status"]["users"]["first"] == json!(first), "{network:#}");
        let message = format!("used by 14 in all: {}, …", first.join(", "));
        ensure!(condition(&network, "InUse").is_some_and(|it| it["message"] == message), "{network:#}");
        cluster.condition("many", "Ready", "True").await?;
        let text = lab.kubectl(&["get", "bnet", "many"])?;
        println!("{text}");
        let mut rows = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let (head, row) = (rows.next().unwrap_or_default(), rows.next().unwrap_or_default());
        let seen =
            |column: &str| head.iter().position(|one| *one == column).and_then(|at| row.get(at)).copied();
        for (column, value) in
            [("NAME", "many"), ("BRIDGE", "br-many"), ("MTU", "1450"), ("NODES", "1/1"), ("USERS", "14")]
        {
            ensure!(seen(column) == Some(value), "{column} is not {value}:\n{text}");
        }
        ensure!(seen("AGE").is_some_and(|age| age.ends_with('s')), "{text}");
        cluster.sweep_users().await?;
        cluster.unlist("many-a").await?;
        cluster.delete("many").await?;
        cluster.gone("many", GONE).await
    };
    outcome.await.with_context(|| replica.tail())
}
