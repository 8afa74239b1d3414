//! Which workloads count as users, and how the status shows them.

use anyhow::{Context as _, Result, ensure};
use kube::{
    ResourceExt as _,
    api::{ListParams, Patch, PatchParams},
};
use lab::{Lab, wait};
use serde_json::{Value, json};

use crate::{
    TIMEOUT,
    cluster::{TestCluster, Workload, condition, resource},
    network_spec, start_controller, workloads,
};

/// A workload of this kind on this network of the test's namespace.
fn workload(cluster: &TestCluster, kind: &str, name: &str, network: &str) -> Result<(Workload, Value)> {
    let found = workloads::all().into_iter().find(|(workload, _)| workload.resource.kind == kind);
    Ok(workloads::from_template(found.with_context(|| kind.to_owned())?, name, &cluster.namespace, network))
}

async fn set_phase(cluster: &TestCluster, pod: &str, phase: &str) -> Result<()> {
    let api = cluster.api(&resource("", "v1", "Pod", "pods"), Some(&cluster.namespace));
    let patch = Patch::Merge(json!({"status": {"phase": phase}}));
    api.patch_status(pod, &PatchParams::default(), &patch).await.map(drop).context("set the phase of a pod")
}

/// Creates a running Job. Its pods are never scheduled.
async fn create_job(cluster: &TestCluster, name: &str, deadline: Option<u32>) -> Result<Workload> {
    let (job, mut object) = workload(cluster, "Job", name, &cluster.namespace)?;
    object["spec"]["suspend"] = json!(false);
    object["spec"]["backoffLimit"] = json!(0);
    object["spec"]["activeDeadlineSeconds"] = json!(deadline);
    cluster.create_workload((job, object)).await
}

pub async fn finished_pods_and_jobs_do_not_count_as_users(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "finished").await?;
    let outcome = async {
        cluster.create_network("finished", network_spec(&cluster)).await?;
        cluster.wait_for_nad("finished", "finished").await?;
        cluster.create_pod("succeeded", "finished").await?;
        cluster.create_pod("failed", "finished").await?;
        let complete = create_job(&cluster, "complete", None).await?;
        let failed = create_job(&cluster, "failed-job", Some(1)).await?;
        let running =
            |it: &Value| it["status"]["users"]["first"].to_string().contains("Job finished/complete");
        cluster.wait_for("finished", "users", running).await?;
        cluster.delete_network("finished").await?;
        cluster.wait_for_reason("finished", "Ready", "DeletionBlocked").await?;
        set_phase(&cluster, "succeeded", "Succeeded").await?;
        set_phase(&cluster, "failed", "Failed").await?;
        let pods = cluster.api(&resource("", "v1", "Pod", "pods"), Some("finished"));
        let of_job = ListParams::default().labels("job-name=complete");
        let pod =
            wait::until(TIMEOUT, "the Job's pod", || async { Ok(pods.list(&of_job).await?.items.pop()) })
                .await?;
        let expected = json!(["Job finished/complete", format!("Pod finished/{}", pod.name_any())]);
        cluster.wait_for("finished", "the last Job", |it| it["status"]["users"]["first"] == expected).await?;
        set_phase(&cluster, &pod.name_any(), "Succeeded").await?;
        cluster.wait_until_deleted_in_time("finished").await?;
        // The finished pods and Jobs still exist.
        for (workload, kind) in [(&complete, "Complete"), (&failed, "Failed")] {
            let job = cluster.api(&workload.resource, Some("finished")).get(&workload.name).await?;
            let found = condition(&json!({"status": job.data["status"]}), kind).cloned();
            ensure!(found.is_some_and(|it| it["status"] == "True"), "{job:?}");
        }
        for pod in ["succeeded", "failed"] {
            pods.get(pod).await?;
        }
        cluster.delete_workloads().await
    };
    outcome.await.with_context(|| replica.tail())
}

pub async fn children_of_counted_workloads_are_not_counted_again(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "counted").await?;
    let outcome = async {
        cluster.create_network("counted", network_spec(&cluster)).await?;
        cluster.wait_for_nad("counted", "counted").await?;
        let deployment = cluster.create_workload(workload(&cluster, "Deployment", "web", "counted")?).await?;
        let sets = cluster.api(&resource("apps", "v1", "ReplicaSet", "replicasets"), Some("counted"));
        wait::until(TIMEOUT, "its ReplicaSet", || async {
            Ok(sets.list(&ListParams::default()).await?.items.pop())
        })
        .await?;
        // A later object of the same kind: once it is counted, the controller has seen the earlier one.
        cluster.create_workload(workload(&cluster, "ReplicaSet", "standalone", "counted")?).await?;
        let vm = cluster.create_workload(workload(&cluster, "VirtualMachine", "vm", "counted")?).await?;
        let uid = cluster.uid_of(&vm).await?;
        let instance = workload(&cluster, "VirtualMachineInstance", "vm", "counted")?;
        cluster.create_workload(workloads::controlled(instance, &vm, &uid)).await?;
        cluster
            .create_workload(workload(&cluster, "VirtualMachineInstance", "standalone", "counted")?)
            .await?;
        let first = json!([
            "Deployment counted/web",
            "ReplicaSet counted/standalone",
            "VirtualMachine counted/vm",
            "VirtualMachineInstance counted/standalone",
        ]);
        let counted = |it: &Value| it["status"]["users"] == json!({"count": 4, "first": first});
        cluster.wait_for("counted", "each workload once", counted).await?;
        // A running pod counts in addition to its Deployment.
        cluster
            .merge_patch(&deployment.resource, Some("counted"), "web", &json!({"spec": {"replicas": 1}}))
            .await?;
        cluster.wait_for("counted", "the pod in addition", |it| it["status"]["users"]["count"] == 5).await?;
        cluster.delete_workloads().await?;
        cluster.delete_network("counted").await?;
        cluster.wait_until_deleted_in_time("counted").await
    };
    outcome.await.with_context(|| replica.tail())
}

pub async fn the_status_shows_the_user_count_and_the_first_ten(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "many").await?;
    let outcome = async {
        cluster.create_node("many-a", 1500).await?;
        let mut overlay = network_spec(&cluster);
        overlay["overlay"] = json!({"vni": 1010});
        cluster.create_network("many", overlay).await?;
        cluster.wait_for_nad("many", "many").await?;
        cluster.report_network("many-a", "many", true).await?;
        for number in 10..23 {
            cluster.create_pod(&format!("pod-{number}"), "many").await?;
        }
        cluster.create_workload(workload(&cluster, "VirtualMachine", "vm", "many")?).await?;
        let network = cluster.wait_for("many", "14 users", |it| it["status"]["users"]["count"] == 14).await?;
        let first: Vec<String> = (10..20).map(|number| format!("Pod many/pod-{number}")).collect();
        ensure!(network["status"]["users"]["first"] == json!(first), "{network:#}");
        let message = format!("used by 14 in total: {}, …", first.join(", "));
        ensure!(condition(&network, "InUse").is_some_and(|it| it["message"] == message), "{network:#}");
        cluster.wait_for_condition("many", "Ready", "True").await?;
        let text = lab.kubectl(&["get", "bnet", "many"])?;
        println!("{text}");
        let mut rows = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let (head, row) = (rows.next().unwrap_or_default(), rows.next().unwrap_or_default());
        let cell = |column: &str| {
            head.iter().position(|title| *title == column).and_then(|index| row.get(index)).copied()
        };
        for (column, value) in
            [("NAME", "many"), ("BRIDGE", "br-many"), ("MTU", "1450"), ("NODES", "1/1"), ("USERS", "14")]
        {
            ensure!(cell(column) == Some(value), "{column} is not {value}:\n{text}");
        }
        ensure!(cell("AGE").is_some_and(|age| age.ends_with('s')), "{text}");
        cluster.delete_workloads().await?;
        cluster.clear_report("many-a").await?;
        cluster.delete_network("many").await?;
        cluster.wait_until_deleted_in_time("many").await
    };
    outcome.await.with_context(|| replica.tail())
}
