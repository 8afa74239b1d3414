//! Admission of every kind of workload while its network is being deleted.

use anyhow::{Context as _, Result, ensure};
use e2e::{patchbay, replica::Replica};
use kube::ResourceExt as _;
use lab::{Lab, wait};
use serde_json::{Value, json};

use crate::{
    TIMEOUT,
    cluster::{TestCluster, Workload, condition, resource},
    network_spec, start_controller, workloads,
};

/// The number of reviewed workloads.
fn reviewed(replica: &Replica) -> Result<u64> {
    replica.metric("patchbay_admission_requests_total", "ValidateUsers")
}

/// The error of a workload that must be rejected.
async fn rejection(cluster: &TestCluster, (workload, object): &(Workload, Value)) -> Result<String> {
    cluster.wait_for_rejection(&workload.resource, object).await
}

pub async fn a_terminating_network_accepts_no_new_users_of_any_kind(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "refuse").await?;
    let outcome = async {
        cluster.create_network("refuse", network_spec(&cluster)).await?;
        cluster.wait_for_nad("refuse", "refuse").await?;
        let workload = |(number, template), prefix: &str, network: &str| {
            workloads::from_template(template, &format!("{prefix}-{number}"), "refuse", network)
        };
        let all = || workloads::all().into_iter().enumerate();
        for template in all() {
            cluster.create_workload(workload(template.clone(), "existing", "refuse")).await?;
            cluster.create_workload(workload(template, "free", "elsewhere")).await?;
        }
        let count = all().count();
        cluster.wait_for("refuse", "all users", |it| it["status"]["users"]["count"] == count).await?;
        cluster.delete_network("refuse").await?;
        cluster.wait_for_reason("refuse", "Ready", "DeletionBlocked").await?;
        for template in all() {
            let new = workload(template.clone(), "new", "refuse");
            let kind = &new.0.resource.kind;
            let error = rejection(&cluster, &new).await?;
            let expected = format!(
                "this {kind} references NetworkAttachmentDefinition refuse/refuse of BridgeNetwork refuse, which is being deleted"
            );
            ensure!(error.contains(&expected), "{error}");
            // An update that adds no reference and a reference to another network are admitted.
            let label = json!({"metadata": {"labels": {"updated": "yes"}}});
            let (resource, existing) = (&new.0.resource, format!("existing-{}", template.0));
            cluster.merge_patch(resource, Some("refuse"), &existing, &label).await?;
            cluster.create_workload(workload(template.clone(), "other", "elsewhere")).await?;
            // The template of a Job is immutable.
            if kind != "Job" {
                let (free, patch) = (format!("free-{}", template.0), workloads::reference_patch(&new.1));
                let error = cluster.wait_for_patch_rejection(resource, &free, &patch).await?;
                ensure!(error.contains(&expected), "{error}");
            }
        }
        println!(
            "{}",
            rejection(&cluster, &workload((0, workloads::all().remove(0)), "new", "refuse")).await?
        );
        // Match conditions keep workloads without networks away from the webhook. kube-controller-manager creates the
        // ReplicaSets of the Deployments above, which have networks.
        wait::until(TIMEOUT, "a ReplicaSet of each Deployment", || async {
            let deployments = cluster.count(&resource("apps", "v1", "Deployment", "deployments")).await?;
            let sets = cluster.count(&resource("apps", "v1", "ReplicaSet", "replicasets")).await?;
            Ok((sets >= deployments).then_some(()))
        })
        .await?;
        let before = reviewed(&replica)?;
        for template in all() {
            cluster
                .create_workload(workloads::without_networks(workload(template, "plain", "refuse")))
                .await?;
        }
        ensure!(reviewed(&replica)? == before, "the webhook reviewed workloads without networks");
        Ok(())
    };
    let outcome: Result<()> = outcome.await;
    outcome.with_context(|| replica.tail())?;
    delete_all_users(&cluster).await.with_context(|| replica.tail())
}

/// Deletes all workloads and waits until the network is deleted.
async fn delete_all_users(cluster: &TestCluster) -> Result<()> {
    cluster.delete_workloads().await?;
    cluster.wait_until_deleted_in_time(&cluster.namespace).await
}

pub async fn children_of_existing_users_are_admitted(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "children").await?;
    let outcome = async {
        cluster.create_network("children", network_spec(&cluster)).await?;
        cluster.wait_for_nad("children", "children").await?;
        let workload = |kind: &str, name: &str, network: &str| -> Result<(Workload, Value)> {
            let found = workloads::all().into_iter().find(|(workload, _)| workload.resource.kind == kind);
            Ok(workloads::from_template(found.with_context(|| kind.to_owned())?, name, "children", network))
        };
        let deployment = cluster.create_workload(workload("Deployment", "user", "children")?).await?;
        let vm = cluster.create_workload(workload("VirtualMachine", "user", "children")?).await?;
        let other_vm = cluster.create_workload(workload("VirtualMachine", "other", "elsewhere")?).await?;
        cluster.wait_for("children", "two users", |it| it["status"]["users"]["count"] == 2).await?;
        cluster.delete_network("children").await?;
        cluster.wait_for_reason("children", "Ready", "DeletionBlocked").await?;
        // A rollout continues: the new ReplicaSet and its pod are admitted.
        let patch =
            json!({"spec": {"replicas": 1, "template": {"metadata": {"labels": {"revision": "two"}}}}});
        cluster.merge_patch(&deployment.resource, Some("children"), "user", &patch).await?;
        let pods = cluster.api(&resource("", "v1", "Pod", "pods"), Some("children"));
        let pod = wait::until(TIMEOUT, "a pod of the rollout", || async {
            let all = pods.list(&kube::api::ListParams::default().labels("revision=two")).await?;
            Ok(all.items.into_iter().next())
        })
        .await?;
        ensure!(pod.owner_references().iter().any(|it| it.kind == "ReplicaSet"), "{pod:?}");
        let instance = |name: &str| workload("VirtualMachineInstance", name, "children");
        let uid = cluster.uid_of(&vm).await?;
        cluster.create_workload(workloads::controlled(instance("user")?, &vm, &uid)).await?;
        let uid = cluster.uid_of(&other_vm).await?;
        let error = rejection(&cluster, &workloads::controlled(instance("other")?, &other_vm, &uid)).await?;
        ensure!(error.contains("which is being deleted"), "{error}");
        // The pod counts in addition to its Deployment; ReplicaSet and VirtualMachineInstance do not.
        let first = json!([
            "Deployment children/user",
            format!("Pod children/{}", pod.name_any()),
            "VirtualMachine children/user"
        ]);
        cluster.wait_for("children", "three users", |it| it["status"]["users"]["first"] == first).await?;
        delete_all_users(&cluster).await
    };
    outcome.await.with_context(|| replica.tail())
}

pub async fn without_a_controller_pods_are_admitted_and_networks_are_rejected(lab: Lab) -> Result<()> {
    let (cluster, mut replica) = start_controller(&lab, "ignore").await?;
    cluster.create_network("ignore", network_spec(&cluster)).await?;
    cluster.wait_for_nad("ignore", "ignore").await?;
    replica.signal(nix::sys::signal::Signal::SIGKILL)?;
    replica.wait_for_exit(TIMEOUT).await?;
    cluster.delete_network("ignore").await?;
    for (number, template) in workloads::all().into_iter().enumerate() {
        let workload = workloads::from_template(template, &format!("user-{number}"), "ignore", "ignore");
        cluster.create_workload(workload).await?;
    }
    let error = cluster.create_error("unreviewed", network_spec(&cluster)).await?;
    ensure!(error.contains("failed calling webhook"), "{error}");
    // The workloads were created after the deletion without a review, and still block it.
    let replica = cluster.start_leader(&lab).await?;
    let outcome = async {
        let network = cluster.wait_for_reason("ignore", "Ready", "DeletionBlocked").await?;
        println!("{}", condition(&network, "Ready").context("Ready")?["message"]);
        ensure!(network["status"]["users"]["count"] == workloads::all().len(), "{network:#}");
        cluster.wait_for_nad("ignore", "ignore").await?;
        delete_all_users(&cluster).await
    };
    outcome.await.with_context(|| replica.tail())
}

/// The command of docs/install.md for a webhook that fails closed while no controller runs.
const REMOVE_WEBHOOKS: &str =
    "delete validatingwebhookconfigurations,mutatingwebhookconfigurations patchbay --ignore-not-found";

pub async fn without_a_controller_one_command_ends_the_webhooks_and_apply_brings_them_back(
    lab: Lab,
) -> Result<()> {
    let page = std::fs::read_to_string(e2e::repository().join("docs/install.md"))?;
    ensure!(page.contains(&format!("kubectl {REMOVE_WEBHOOKS}\n")), "docs/install.md has another command");
    let (cluster, mut replica) = start_controller(&lab, "stuck").await?;
    patchbay::wait_for_pod_webhook(&lab).await?;
    replica.signal(nix::sys::signal::Signal::SIGKILL)?;
    replica.wait_for_exit(TIMEOUT).await?;
    let pods = resource("", "v1", "Pod", "pods");
    let create = async |networks: &str, name: &str| {
        let metadata = json!({"name": name, "labels": {"kubevirt.io": "virt-launcher"},
            "annotations": {"k8s.v1.cni.cncf.io/networks": networks}});
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata,
            "spec": {"containers": [{"name": "c", "image": "localhost/lab:1"}]}});
        cluster.create_object(&pods, Some("stuck"), &pod).await
    };
    let referring = r#"[{"name":"blue","ipam-claim-reference":"vm1.blue"}]"#;
    let outcome = async {
        for networks in ["blue", referring] {
            let refused = create(networks, "refused").await.err().map(|error| error.to_string());
            let refused = refused.with_context(|| format!("a pod with {networks} was admitted"))?;
            ensure!(refused.contains("failed calling webhook"), "{refused}");
        }
        lab.kubectl(&REMOVE_WEBHOOKS.split(' ').collect::<Vec<_>>())?;
        for (networks, name) in [("blue", "plain"), (referring, "referring")] {
            // The API server notices a moment later.
            wait::until(TIMEOUT, "the pod to be admitted", || async {
                Ok(Some(create(networks, name).await?))
            })
            .await?;
        }
        cluster.create_network("stuck", network_spec(&cluster)).await
    };
    let outcome = outcome.await;
    lab.kubectl(&["apply", "-f", patchbay::manifests_dir().to_str().context("the path is not UTF-8")?])?;
    outcome?;
    let replica = cluster.start_leader(&lab).await?;
    patchbay::wait_for_pod_webhook(&lab).await.with_context(|| replica.tail())?;
    cluster.wait_for_webhook().await.with_context(|| replica.tail())?;
    cluster.delete_network("stuck").await?;
    delete_all_users(&cluster).await.with_context(|| replica.tail())
}
