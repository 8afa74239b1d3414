//! Controllers that are killed during a deletion, and CRDs that are deleted or no longer served.

use anyhow::{Context as _, Result, ensure};
use e2e::replica::{self, Replica};
use kube::api::{DeleteParams, Patch, PatchParams};
use lab::{Lab, wait};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::{
    TIMEOUT,
    cluster::{self, TestCluster, condition},
    network_spec, start_controller,
    watch_log::{ChangeType, ObjectKind, WatchLog},
    workloads,
};

fn has_finalizer(network: Option<&Value>, finalizer: &str) -> bool {
    network.is_some_and(|it| it["metadata"]["finalizers"].to_string().contains(finalizer))
}

async fn kill(replica: &mut Replica) -> Result<()> {
    replica.signal(Signal::SIGKILL)?;
    replica.wait_for_exit(TIMEOUT).await.map(drop)
}

/// After this many rounds without a kill at the right time the test fails.
const MAX_ROUNDS: usize = 12;

pub async fn a_controller_killed_between_deletion_steps_resumes(lab: Lab) -> Result<()> {
    let (cluster, mut replica) = start_controller(&lab, "killed").await?;
    cluster.create_node("killed-a", 1500).await?;
    let watch_log = WatchLog::start(&cluster).await?;
    let rounds = if e2e::soak() { 40 } else { 2 };
    let all = async {
        let (mut hits, mut round) = (0, 0);
        // On a busy machine a kill may come too late.
        while round < rounds || (hits == 0 && round < MAX_ROUNDS) {
            let name = format!("killed-{round}");
            cluster.create_network(&name, network_spec(&cluster)).await?;
            cluster.wait_for_nad("killed", &name).await?;
            cluster.delete_network(&name).await?;
            watch_log.wait_for(ObjectKind::Nad, &name, ChangeType::Deleted).await?;
            kill(&mut replica).await?;
            let not_released =
                has_finalizer(cluster.get_network(&name).await?.as_ref(), "patchbay.dev/users");
            hits += usize::from(not_released);
            // No controller runs, so the webhook cannot reject the pod.
            let pod = if not_released && round % 2 == 0 {
                Some(cluster.create_pod(&name, &name).await?)
            } else {
                None
            };
            replica = cluster.start_leader(&lab).await?;
            if let Some(pod) = pod {
                cluster.wait_for_reason(&name, "Ready", "DeletionBlocked").await?;
                cluster.wait_for_nad("killed", &name).await?;
                let released = watch_log.versions(
                    ObjectKind::Network,
                    &name,
                    ChangeType::Modified { users_finalizer: false },
                );
                ensure!(released.is_empty(), "{name}: the nodes were released while a pod uses it");
                cluster.delete_workload(&pod).await?;
            }
            cluster.wait_until_deleted_in_time(&name).await?;
            round += 1;
        }
        println!("killed {hits} of {round} times between NAD deletion and release");
        ensure!(hits > 0, "every kill came too late");
        // Killed between release and completion: a node still has its links.
        cluster.create_network("last", network_spec(&cluster)).await?;
        cluster.wait_for_finalizer("last", "patchbay.dev/nodes", true).await?;
        cluster.report_network("killed-a", "last", true).await?;
        cluster.wait_for_label("killed-a", "last", true).await?;
        cluster.delete_network("last").await?;
        watch_log
            .wait_for(ObjectKind::Network, "last", ChangeType::Modified { users_finalizer: false })
            .await?;
        kill(&mut replica).await?;
        replica = cluster.start_leader(&lab).await?;
        let terminating = cluster.wait_for_reason("last", "Ready", "Deleting").await?;
        ensure!(has_finalizer(Some(&terminating), "patchbay.dev/nodes"), "{terminating:#}");
        ensure!(cluster.get_nad("killed", "last").await?.is_none(), "the NAD was recreated without a user");
        cluster.clear_report("killed-a").await?;
        cluster.wait_until_deleted_in_time("last").await?;
        cluster.wait_for_label("killed-a", "last", false).await
    };
    watch_log.record_during(all).await.with_context(|| Replica::log(&lab, 1))
}

const SHORT_LEASE: [&str; 6] =
    ["--lease-duration", "2s", "--lease-renew", "500ms", "--lease-retry-period", "500ms"];

/// Runs two replicas and kills the leader during a deletion.
async fn fail_over(lab: &Lab, cluster: &TestCluster, watch_log: &WatchLog) -> Result<()> {
    cluster.delete_lease().await?;
    let mut first = Replica::start_ready(lab, 1, &SHORT_LEASE).await?;
    let _second = Replica::start_ready(lab, 2, &SHORT_LEASE).await?;
    replica::set_webhook_endpoints(lab, &[1, 2])?;
    let client = cluster.create_pod("client", "in-use").await?;
    cluster.wait_for_condition("in-use", "InUse", "True").await?;
    for name in ["in-use", "unused"] {
        cluster.delete_network(name).await?;
    }
    cluster.wait_for_reason("in-use", "Ready", "DeletionBlocked").await?;
    watch_log.wait_for(ObjectKind::Nad, "unused", ChangeType::Deleted).await?;
    kill(&mut first).await?;
    let before_release = has_finalizer(cluster.get_network("unused").await?.as_ref(), "patchbay.dev/users");
    println!("the leader was killed {} the release", if before_release { "before" } else { "after" });
    replica::set_webhook_endpoints(lab, &[2])?;
    // Every replica serves admission, not only the leader.
    wait::until(TIMEOUT, "the other replica to reject the pod", || async {
        let rejected = cluster.pod_is_rejected("new", "in-use").await?;
        if !rejected {
            cluster.delete_workload(&cluster.pod_ref("new")).await?;
        }
        Ok(rejected.then_some(()))
    })
    .await?;
    cluster.wait_until_deleted("unused").await?;
    ensure!(cluster.get_nad("two", "in-use").await?.is_some(), "the NAD of a pod was deleted");
    cluster.delete_workload(&client).await?;
    cluster.wait_until_deleted_in_time("in-use").await
}

pub async fn another_replica_finishes_the_deletion_of_a_killed_leader(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "two").await?;
    for name in ["in-use", "unused"] {
        cluster.create_network(name, network_spec(&cluster)).await?;
        cluster.wait_for_nad("two", name).await?;
    }
    drop(replica);
    let watch_log = WatchLog::start(&cluster).await?;
    let outcome = watch_log.record_during(fail_over(&lab, &cluster, &watch_log)).await;
    replica::set_webhook_endpoints(&lab, &[1])?;
    outcome.with_context(|| format!("{}\n{}", Replica::log(&lab, 1), Replica::log(&lab, 2)))
}

async fn delete_crd(cluster: &TestCluster, name: &str) -> Result<()> {
    let api = cluster.api(&cluster::crds(), None);
    api.delete(name, &DeleteParams::default()).await?;
    wait::until(TIMEOUT, &format!("CRD {name} to be deleted"), || async {
        Ok(api.get_opt(name).await?.is_none().then_some(()))
    })
    .await
}

async fn serve_vms(cluster: &TestCluster, served: bool) -> Result<()> {
    let patch = json!([{"op": "replace", "path": "/spec/versions/0/served", "value": served}]);
    let patch = Patch::Json::<()>(serde_json::from_value(patch)?);
    let api = cluster.api(&cluster::crds(), None);
    let patched = api.patch("virtualmachines.kubevirt.io", &PatchParams::default(), &patch).await;
    patched.map(drop).context("set spec.versions[0].served")
}

pub async fn an_unserved_crd_does_not_block_deletion_and_counts_again_when_served(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "unserved").await?;
    let outcome = async {
        cluster.create_node("unserved-a", 1500).await?;
        for name in ["unserved", "served"] {
            cluster.create_network(name, network_spec(&cluster)).await?;
            cluster.wait_for_nad("unserved", name).await?;
            cluster.create_workload(workloads::virtual_machine(name, name)).await?;
            cluster.wait_for_condition(name, "InUse", "True").await?;
        }
        cluster.delete_network("unserved").await?;
        cluster.wait_for_reason("unserved", "Ready", "DeletionBlocked").await?;
        serve_vms(&cluster, false).await?;
        let deleted = cluster.wait_until_deleted("unserved").await;
        let unused = cluster.wait_for_condition("served", "InUse", "False").await;
        serve_vms(&cluster, true).await?;
        deleted.and(unused.map(drop))?;
        // The VM does not change, so only a new list shows it to the controller.
        wait::until(TIMEOUT, "the VM to count again", || async {
            let network = cluster.get_network("served").await?.context("the network does not exist")?;
            let used = condition(&network, "InUse").is_some_and(|it| it["status"] == "True");
            Ok(used.then_some(()))
        })
        .await?;
        cluster.delete_workloads().await?;
        cluster.delete_network("served").await?;
        cluster.wait_until_deleted_in_time("served").await
    };
    outcome.await.with_context(|| replica.tail())
}

pub async fn deleted_crds_do_not_block_deletion(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "crds").await?;
    let outcome = async {
        cluster.create_node("crds-a", 1500).await?;
        for name in ["vm-user", "pod-user"] {
            cluster.create_network(name, network_spec(&cluster)).await?;
            cluster.wait_for_nad("crds", name).await?;
        }
        cluster.report_network("crds-a", "pod-user", true).await?;
        cluster.wait_for_condition("pod-user", "Ready", "True").await?;
        cluster.create_workload(workloads::virtual_machine("vm", "vm-user")).await?;
        cluster.wait_for_condition("vm-user", "InUse", "True").await?;
        cluster.delete_network("vm-user").await?;
        cluster.wait_for_reason("vm-user", "Ready", "DeletionBlocked").await?;
        delete_crd(&cluster, "virtualmachineinstances.kubevirt.io").await?;
        delete_crd(&cluster, "virtualmachines.kubevirt.io").await?;
        cluster.wait_until_deleted_in_time("vm-user").await?;
        // This deletes all NADs of all networks.
        delete_crd(&cluster, "network-attachment-definitions.k8s.cni.cncf.io").await?;
        cluster.wait_for_reason("pod-user", "Ready", "AttachmentsMissing").await?;
        // A pod that refers to a deleted NAD still counts as a user.
        let pod = cluster.create_pod("client", "pod-user").await?;
        cluster.wait_for_condition("pod-user", "InUse", "True").await?;
        cluster.delete_network("pod-user").await?;
        cluster.wait_for_reason("pod-user", "Ready", "DeletionBlocked").await?;
        cluster.create_network("without-nads", json!({"nodeSelector": cluster.node_selector()})).await?;
        cluster.wait_for_finalizer("without-nads", "patchbay.dev/users", true).await?;
        cluster.delete_network("without-nads").await?;
        cluster.wait_until_deleted_in_time("without-nads").await?;
        // The NAD is recreated for the user that remains.
        cluster.install_nad_crd().await?;
        cluster.wait_for_nad("crds", "pod-user").await?;
        cluster.delete_workload(&pod).await?;
        cluster.clear_report("crds-a").await?;
        cluster.wait_until_deleted_in_time("pod-user").await
    };
    outcome.await.with_context(|| replica.tail())
}
