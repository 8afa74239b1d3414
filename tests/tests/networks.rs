//! The controller's part of BridgeNetworks: a real controller process against a real API server. The tests write Nodes and
//! NodeNetworks in place of kubelets and node daemons.
#![allow(clippy::print_stdout, reason = "a test without the standard harness prints its measurements")]

#[path = "networks/admission.rs"]
mod admission;
#[path = "networks/cluster.rs"]
mod cluster;
#[path = "networks/conflicts.rs"]
mod conflicts;
#[path = "networks/crashes.rs"]
mod crashes;
#[path = "networks/memory.rs"]
mod memory;
#[path = "networks/mtu.rs"]
mod mtu;
#[path = "networks/nad_repair.rs"]
mod nad_repair;
#[path = "networks/races.rs"]
mod races;
#[path = "networks/user_count.rs"]
mod user_count;
#[path = "networks/watch_log.rs"]
mod watch_log;
#[path = "networks/workloads.rs"]
mod workloads;

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use admission::{
    a_terminating_network_accepts_no_new_users_of_any_kind, children_of_existing_users_are_admitted,
    without_a_controller_one_command_ends_the_webhooks_and_apply_brings_them_back,
    without_a_controller_pods_are_admitted_and_networks_are_rejected,
};
use anyhow::{Context as _, Result, ensure};
use cluster::{TestCluster, condition};
use conflicts::{
    a_node_with_a_smaller_mtu_joins_an_overlay_in_use, an_uplink_or_a_vni_serves_one_network_per_node,
    the_older_of_two_concurrent_conflicting_networks_wins,
};
use crashes::{
    a_controller_killed_between_deletion_steps_resumes,
    an_unserved_crd_does_not_block_deletion_and_counts_again_when_served,
    another_replica_finishes_the_deletion_of_a_killed_leader, deleted_crds_do_not_block_deletion,
};
use e2e::{
    Suite,
    quiet::{is_controller_write, wait_until_quiet},
    replica,
    replica::Replica,
    run_suites, tests,
};
use futures::{StreamExt as _, TryStreamExt as _};
use kube::api::DeleteParams;
use lab::{Lab, Topology, wait};
use memory::{
    a_page_of_pods_with_large_annotations_fits_into_the_memory_limit,
    memory_stays_small_with_many_nodes_of_100_networks,
};
use mtu::{
    an_overlay_keeps_its_mtu_when_a_node_with_a_small_mtu_leaves,
    the_mtu_of_a_status_of_an_older_version_does_not_rise,
};
use nad_repair::{
    an_invalid_stored_network_can_be_deleted, every_nad_repair_is_counted_once,
    foreign_status_fields_are_reverted_without_a_write_loop, nads_follow_the_list_of_namespaces,
};
use races::{
    no_pod_loses_its_nad_when_its_namespace_leaves_the_list,
    no_pod_loses_its_network_in_a_race_with_deletion, pods_that_bypass_admission_keep_their_network_and_nad,
};
use serde_json::{Value, json};
use user_count::{
    children_of_counted_workloads_are_not_counted_again, finished_pods_and_jobs_do_not_count_as_users,
    the_status_shows_the_user_count_and_the_first_ten,
};

/// The timeout for waits that are not about time; generous, since other suites run in parallel.
const TIMEOUT: Duration = Duration::from_secs(60);
/// How soon a NAD that was changed or deleted must be repaired.
const REPAIR_LIMIT: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    run_suites(&[Suite {
        name: "t-networks",
        topology: Topology::ControlPlaneOnly,
        set_up: |lab| {
            Box::pin(async move {
                replica::install(&lab, 2)?;
                replica::set_webhook_endpoints(&lab, &[1])
            })
        },
        tests: tests![
            crds_installed_later_are_detected,
            a_network_gets_nads_status_and_node_labels_and_is_deleted_in_order,
            invalid_specs_are_rejected_with_a_reason,
            own_nads_are_repaired_and_foreign_nads_are_not_touched,
            every_nad_repair_is_counted_once,
            nads_follow_the_list_of_namespaces,
            an_invalid_stored_network_can_be_deleted,
            foreign_status_fields_are_reverted_without_a_write_loop,
            every_kind_of_workload_blocks_deletion_until_it_is_deleted,
            a_terminating_network_accepts_no_new_users_of_any_kind,
            children_of_existing_users_are_admitted,
            without_a_controller_one_command_ends_the_webhooks_and_apply_brings_them_back,
            without_a_controller_pods_are_admitted_and_networks_are_rejected,
            finished_pods_and_jobs_do_not_count_as_users,
            children_of_counted_workloads_are_not_counted_again,
            the_status_shows_the_user_count_and_the_first_ten,
            a_recreated_namespace_gets_its_nad_back,
            the_webhook_rejects_conflicts_and_the_controller_resolves_the_rest,
            an_uplink_or_a_vni_serves_one_network_per_node,
            the_older_of_two_concurrent_conflicting_networks_wins,
            a_node_with_a_smaller_mtu_joins_an_overlay_in_use,
            an_overlay_keeps_its_mtu_when_a_node_with_a_small_mtu_leaves,
            the_mtu_of_a_status_of_an_older_version_does_not_rise,
            deletion_ignores_deleted_nodes_and_waits_for_nodes_that_are_not_ready,
            an_idle_controller_writes_nothing,
            the_controller_can_change_only_its_own_node_labels,
            a_controller_killed_after_any_step_resumes,
            a_controller_killed_between_deletion_steps_resumes,
            another_replica_finishes_the_deletion_of_a_killed_leader,
            an_unserved_crd_does_not_block_deletion_and_counts_again_when_served,
            deleted_crds_do_not_block_deletion,
            pods_that_bypass_admission_keep_their_network_and_nad,
            no_pod_loses_its_network_in_a_race_with_deletion,
            no_pod_loses_its_nad_when_its_namespace_leaves_the_list,
            a_controller_with_thousands_of_users_stays_small_and_fast,
            memory_stays_small_with_many_nodes_of_100_networks,
            a_page_of_pods_with_large_annotations_fits_into_the_memory_limit,
        ],
    }])
}

/// Starts a controller, waits until it leads and its webhook responds, and creates the namespace of this test.
async fn start_controller(lab: &Lab, name: &str) -> Result<(TestCluster, Replica)> {
    let cluster = TestCluster::new(lab, name).await?;
    cluster.install_nad_crd().await?;
    cluster.install_kubevirt_crds().await?;
    let replica = cluster.start_leader(lab).await?;
    cluster.wait_for_webhook().await.with_context(|| replica.tail())?;
    Ok((cluster, replica))
}

/// A network on the nodes of this test, with a NAD in its namespace.
fn network_spec(cluster: &TestCluster) -> Value {
    json!({"nodeSelector": cluster.node_selector(), "attachment": {"namespaces": [cluster.namespace]}})
}

async fn crds_installed_later_are_detected(lab: Lab) -> Result<()> {
    let cluster = TestCluster::new(&lab, "late").await?;
    let replica = cluster.start_leader(&lab).await?;
    let outcome = async {
        cluster.wait_for_webhook().await?;
        cluster.create_node("late-a", 1500).await?;
        cluster.create_network("late", network_spec(&cluster)).await?;
        cluster.report_network("late-a", "late", true).await?;
        let network = cluster.wait_for_reason("late", "Ready", "AttachmentsMissing").await?;
        println!("{}", condition(&network, "Ready").context("Ready")?["message"]);
        // A network can be deleted without the CRDs.
        cluster.create_network("without-nads", json!({"nodeSelector": cluster.node_selector()})).await?;
        cluster.wait_for_finalizer("without-nads", "patchbay.dev/users", true).await?;
        cluster.delete_network("without-nads").await?;
        cluster.wait_until_deleted_in_time("without-nads").await?;
        cluster.install_nad_crd().await?;
        cluster.wait_for_nad("late", "late").await?;
        cluster.wait_for_condition("late", "Ready", "True").await?;
        cluster.install_kubevirt_crds().await?;
        let vm = cluster.create_workload(workloads::virtual_machine("vm", "late")).await?;
        cluster.wait_for_condition("late", "InUse", "True").await?;
        cluster.delete_workload(&vm).await?;
        cluster.wait_for_condition("late", "InUse", "False").await?;
        cluster.clear_report("late-a").await?;
        cluster.delete_network("late").await?;
        cluster.wait_until_deleted_in_time("late").await
    };
    outcome.await.with_context(|| replica.tail())
}

async fn a_network_gets_nads_status_and_node_labels_and_is_deleted_in_order(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "basic").await?;
    cluster.create_node("basic-a", 1500).await?;
    let outcome = async {
        let started = Instant::now();
        let mut spec = network_spec(&cluster);
        spec["overlay"] = json!({"vni": 17});
        cluster.create_network("basic", spec).await?;
        let nad = cluster.wait_for_nad("basic", "basic").await?;
        ensure!(nad["spec"]["config"].as_str().is_some_and(|it| it.contains("\"mtu\":1450")), "{nad}");
        println!("NAD created after {:?}", started.elapsed());
        cluster.report_network("basic-a", "basic", true).await?;
        let network = cluster.wait_for_condition("basic", "Ready", "True").await?;
        ensure!(
            network["status"]["mtu"] == 1450 && network["status"]["nodes"]["summary"] == "1/1",
            "{network}"
        );
        cluster.wait_for_label("basic-a", "basic", true).await?;
        let pod = cluster.create_pod("client", "basic").await?;
        cluster.wait_for_condition("basic", "InUse", "True").await?;
        // Foreground deletion removes nothing either.
        let foreground = DeleteParams::foreground();
        cluster.api(&cluster::bridge_networks(), None).delete("basic", &foreground).await?;
        let network = cluster.wait_for_reason("basic", "Ready", "DeletionBlocked").await?;
        println!("{}", condition(&network, "Ready").context("Ready")?["message"]);
        let pod_kind = cluster::resource("", "v1", "Pod", "pods");
        let error =
            cluster.wait_for_rejection(&pod_kind, &TestCluster::pod_object("new-client", "basic")).await?;
        ensure!(error.contains("which is being deleted"), "{error}");
        ensure!(cluster.get_nad("basic", "basic").await?.is_some(), "the NAD was deleted");
        cluster.delete_workload(&pod).await?;
        let started = Instant::now();
        cluster.wait_for_finalizer("basic", "patchbay.dev/users", false).await?;
        ensure!(cluster.get_nad("basic", "basic").await?.is_none(), "the NAD still exists");
        cluster.clear_report("basic-a").await?;
        cluster.wait_until_deleted_in_time("basic").await?;
        println!("deleted {:?} after its last user", started.elapsed());
        cluster.wait_for_label("basic-a", "basic", false).await
    };
    outcome.await.with_context(|| replica.tail())
}

async fn invalid_specs_are_rejected_with_a_reason(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "valid").await?;
    let long = "x".repeat(51);
    let rows = [
        ("UPPER", json!({}), "RFC 1123"),
        (long.as_str(), json!({}), "at most 50 characters"),
        ("a.dot", json!({}), "at most 50 characters"),
        ("bad", json!({"bridge": "br/0"}), "spec.bridge"),
        ("bad", json!({"bridge": "sixteen-bytes-xx"}), "spec.bridge"),
        ("bad", json!({"bridge": "; reboot"}), "spec.bridge"),
        ("bad", json!({"bridge": ".."}), "spec.bridge"),
        ("bad", json!({"bridge": "lo"}), "reserved by the kernel"),
        ("bad", json!({"bridge": ""}), "spec.bridge"),
        ("bad", json!({"mtu": 575}), "spec.mtu"),
        ("bad", json!({"mtu": 9217}), "spec.mtu"),
        ("bad", json!({"mtu": "1500"}), "spec.mtu"),
        ("bad", json!({"overlay": {}}), "spec.overlay.vni"),
        ("bad", json!({"overlay": {"vni": 0}}), "spec.overlay.vni"),
        ("bad", json!({"overlay": {"vni": 16_777_216}}), "spec.overlay.vni"),
        ("bad", json!({"overlay": {"vni": 1, "port": 65536}}), "spec.overlay.port"),
        ("bad", json!({"uplink": "lo"}), "loopback"),
        ("bad", json!({"uplink": "eth1", "overlay": {"vni": 1}}), "mutually exclusive"),
        ("bad", json!({"uplink": "eth1", "bridge": "eth1"}), "different names"),
        ("bad", json!({"attachment": {"name": "A"}}), "spec.attachment.name"),
        ("bad", json!({"attachment": {"namespaces": ["a", "a"]}}), "Duplicate"),
        ("bad", json!({"attachment": {"namespaces": ["a/b"]}}), "spec.attachment.namespaces"),
        (
            "bad",
            json!({"nodeSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]}}),
            "need values",
        ),
    ];
    for (name, spec, expected) in rows {
        let error = cluster.create_error(name, spec.clone()).await?;
        ensure!(error.contains(expected), "{name} {spec}: {error}");
    }
    let outcome = async {
        let whole = json!({"bridge": "br-valid", "overlay": {"vni": 1}, "attachment": {"name": "nad"}, "nodeSelector": cluster.node_selector()});
        cluster.create_network("valid", whole).await?;
        cluster.create_network("plain", json!({"nodeSelector": cluster.node_selector()})).await?;
        for (name, patch, expected) in [
            ("valid", json!({"bridge": "other"}), "spec.bridge cannot be changed"),
            ("valid", json!({"bridge": null}), "spec.bridge cannot be changed"),
            ("plain", json!({"bridge": "br-set"}), "spec.bridge cannot be changed"),
            ("valid", json!({"overlay": {"vni": 2}}), "spec.overlay.vni cannot be changed"),
            ("valid", json!({"overlay": null}), "spec.overlay cannot be set or unset"),
            ("plain", json!({"overlay": {"vni": 2}}), "spec.overlay cannot be set or unset"),
            ("valid", json!({"attachment": {"name": "other"}}), "spec.attachment.name cannot be changed"),
            ("valid", json!({"attachment": null}), "spec.attachment.name cannot be changed"),
            ("plain", json!({"attachment": {"name": "set"}}), "spec.attachment.name cannot be changed"),
        ] {
            let error = cluster
                .patch_spec(name, patch.clone())
                .await
                .err()
                .with_context(|| format!("{name} {patch} was admitted"))?;
            ensure!(format!("{error:#}").contains(expected), "{patch}: {error:#}");
        }
        for name in ["valid", "plain"] {
            cluster.delete_network(name).await?;
            cluster.wait_until_deleted_in_time(name).await?;
        }
        Ok(())
    };
    let outcome: Result<()> = outcome.await;
    outcome.with_context(|| replica.tail())
}

async fn own_nads_are_repaired_and_foreign_nads_are_not_touched(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "repair").await?;
    let outcome = async {
        let foreign = json!({"apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
            "metadata": {"name": "theirs"}, "spec": {"config": "{\"type\": \"bridge\"}"}});
        cluster.create_object(&cluster::nads(), Some("repair"), &foreign).await?;
        cluster.create_network("repair", network_spec(&cluster)).await?;
        cluster.create_network("theirs", network_spec(&cluster)).await?;
        let nad = cluster.wait_for_nad("repair", "repair").await?;
        cluster.wait_for("repair", "status.mtu", |network| network["status"]["mtu"] == 1500).await?;
        let network = cluster.wait_for_condition("theirs", "Conflict", "True").await?;
        let message = &condition(&network, "Conflict").context("Conflict")?["message"];
        ensure!(message.as_str().is_some_and(|it| it.contains("repair/theirs")), "{message}");
        let api = cluster.api(&cluster::nads(), Some("repair"));
        api.delete("repair", &DeleteParams::default()).await?;
        let recreated = || cluster.get_nad("repair", "repair");
        let (_, took) = wait::within(REPAIR_LIMIT, "the NAD to be recreated", recreated).await?;
        println!("recreated after {took:?}");
        for patch in [
            json!({"spec": {"config": "{}"}}),
            json!({"metadata": {"labels": {"patchbay.dev/network": null}}}),
        ] {
            cluster.merge_patch(&cluster::nads(), Some("repair"), "repair", &patch).await?;
            let repaired = || async {
                let now = cluster.wait_for_nad("repair", "repair").await?;
                let same =
                    now["spec"] == nad["spec"] && now["metadata"]["labels"] == nad["metadata"]["labels"];
                Ok(same.then_some(()))
            };
            let ((), took) = wait::within(REPAIR_LIMIT, &format!("{patch} to be reverted"), repaired).await?;
            println!("repaired after {took:?}");
        }
        for name in ["repair", "theirs"] {
            cluster.delete_network(name).await?;
            cluster.wait_until_deleted_in_time(name).await?;
        }
        let left = cluster.get_nad("repair", "theirs").await?.context("the foreign NAD was deleted")?;
        ensure!(left["spec"] == foreign["spec"] && left["metadata"].get("labels").is_none(), "{left}");
        ensure!(cluster.get_nad("repair", "repair").await?.is_none(), "our own NAD was not deleted");
        cluster.wait_for_event("AttachmentRepaired").await
    };
    outcome.await.with_context(|| replica.tail())
}

async fn every_kind_of_workload_blocks_deletion_until_it_is_deleted(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "users").await?;
    let all = workloads::all();
    let blocks_deletion = async |number: usize, workload: (cluster::Workload, Value)| {
        let name = format!("used-{number}");
        cluster.create_network(&name, network_spec(&cluster)).await?;
        cluster.wait_for_nad("users", &name).await?;
        let workload =
            cluster.create_workload(workloads::from_template(workload, &name, "users", &name)).await?;
        let what = format!("{} users/{}", workload.resource.kind, workload.name);
        cluster
            .wait_for(&name, &what, |network| network["status"]["users"]["first"] == json!([what]))
            .await?;
        cluster.delete_network(&name).await?;
        cluster.wait_for_reason(&name, "Ready", "DeletionBlocked").await?;
        cluster.delete_workload(&workload).await?;
        let started = Instant::now();
        cluster.wait_until_deleted_in_time(&name).await.with_context(|| what.clone())?;
        println!("{what}: deleted after {:?}", started.elapsed());
        anyhow::Ok(())
    };
    let checks = all.into_iter().enumerate().map(|(number, workload)| blocks_deletion(number, workload));
    let results = futures::future::join_all(checks).await;
    results.into_iter().collect::<Result<Vec<()>>>().map(drop).with_context(|| replica.tail())
}

async fn a_recreated_namespace_gets_its_nad_back(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "recreated").await?;
    let outcome = async {
        cluster.create_node("recreated-a", 1500).await?;
        cluster.create_namespace("tenant").await?;
        let tenant = TestCluster { namespace: "tenant".to_owned(), ..cluster.clone() };
        let spec = json!({"nodeSelector": cluster.node_selector(), "attachment": {"namespaces": ["tenant"]}});
        cluster.create_network("recreated", spec).await?;
        cluster.report_network("recreated-a", "recreated", true).await?;
        tenant.wait_for_nad("tenant", "recreated").await?;
        tenant.create_pod("client", "recreated").await?;
        cluster.wait_for_condition("recreated", "InUse", "True").await?;
        let namespaces = cluster::resource("", "v1", "Namespace", "namespaces");
        let api = cluster.api(&namespaces, None);
        api.delete("tenant", &DeleteParams::default()).await?;
        wait::until(TIMEOUT, "the namespace to be deleted", || async {
            Ok(api.get_opt("tenant").await?.is_none().then_some(()))
        })
        .await?;
        cluster.wait_for_reason("recreated", "Ready", "AttachmentsMissing").await?;
        cluster.create_namespace("tenant").await?;
        cluster.wait_for_nad("tenant", "recreated").await?;
        cluster.wait_for_condition("recreated", "Ready", "True").await?;
        cluster.clear_report("recreated-a").await?;
        cluster.delete_network("recreated").await?;
        cluster.wait_until_deleted_in_time("recreated").await
    };
    outcome.await.with_context(|| replica.tail())
}

async fn the_webhook_rejects_conflicts_and_the_controller_resolves_the_rest(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "conflict").await?;
    let outcome = async {
        cluster.create_node("conflict-a", 1500).await?;
        let selector = |value: &str| json!({"matchLabels": {"test": "conflict", "half": value}});
        cluster.patch_node_labels("conflict-a", json!({"half": "one"})).await?;
        let whole = json!({"bridge": "br-conflict", "overlay": {"vni": 99}, "nodeSelector": selector("one"), "attachment": {"name": "conflict", "namespaces": ["conflict"]}});
        cluster.create_network("conflict", whole.clone()).await?;
        cluster.wait_for_nad("conflict", "conflict").await?;
        for (field, value, expected) in [
            ("bridge", json!("br-conflict"), "bridge br-conflict belongs to BridgeNetwork conflict"),
            ("overlay", json!({"vni": 99}), "VNI 99 on port 4789 belongs to BridgeNetwork conflict"),
            ("uplink", json!("br-conflict"), "link br-conflict belongs to BridgeNetwork conflict"),
        ] {
            let error = cluster
                .create_error("second", json!({field: value, "nodeSelector": cluster.node_selector()}))
                .await?;
            ensure!(error.contains(expected), "{error}");
        }
        let same = json!({"nodeSelector": selector("two"), "attachment": {"name": "conflict", "namespaces": ["conflict"]}});
        let error = cluster.create_error("second", same).await?;
        ensure!(
            error.contains(
                "BridgeNetwork conflict already manages NetworkAttachmentDefinition conflict/conflict"
            ),
            "{error}"
        );
        // Without a common node both are admitted. A new node label then creates the conflict, unseen by the webhook.
        cluster
            .create_network(
                "second",
                json!({"bridge": "br-conflict", "nodeSelector": {"matchLabels": {"second": "yes"}}}),
            )
            .await?;
        cluster.wait_for_condition("second", "Conflict", "False").await?;
        cluster.patch_node_labels("conflict-a", json!({"second": "yes"})).await?;
        let network = cluster.wait_for_condition("second", "Conflict", "True").await?;
        println!("{}", condition(&network, "Conflict").context("Conflict")?["message"]);
        cluster.wait_for_condition("conflict", "Conflict", "False").await?;
        // An edit that adds no conflict is admitted.
        cluster.patch_spec("second", json!({"mtu": 1400})).await?;
        // While the network is in use, spec.mtu can raise its MTU but not lower it.
        let pod = cluster.create_pod("client", "conflict").await?;
        cluster.wait_for_condition("conflict", "InUse", "True").await?;
        let error = cluster
            .patch_spec("conflict", json!({"mtu": 1000}))
            .await
            .err()
            .context("lowered while in use")?;
        ensure!(format!("{error:#}").contains("cannot be lowered from 1450 to 1000"), "{error:#}");
        cluster.set_vtep_mtu("conflict-a", 9000).await?;
        cluster.wait_for_reason("conflict", "MtuReduced", "HigherPossible").await?;
        cluster.patch_spec("conflict", json!({"mtu": 8950})).await?;
        cluster.wait_for("conflict", "the higher MTU", |network| network["status"]["mtu"] == 8950).await?;
        cluster.set_vtep_mtu("conflict-a", 1400).await?;
        cluster.wait_for_reason("conflict", "MtuReduced", "NodeLimit").await?;
        cluster.delete_workload(&pod).await?;
        cluster.wait_for("conflict", "the lower MTU", |network| network["status"]["mtu"] == 1350).await?;
        for name in ["second", "conflict"] {
            cluster.delete_network(name).await?;
            cluster.wait_until_deleted_in_time(name).await?;
        }
        cluster.wait_for_event("Conflict").await
    };
    outcome.await.with_context(|| replica.tail())
}

async fn deletion_ignores_deleted_nodes_and_waits_for_nodes_that_are_not_ready(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "not-ready").await?;
    let outcome = async {
        for node in ["not-ready-a", "not-ready-b"] {
            cluster.create_node(node, 1500).await?;
        }
        cluster.create_network("not-ready", network_spec(&cluster)).await?;
        cluster.wait_for_finalizer("not-ready", "patchbay.dev/nodes", true).await?;
        for node in ["not-ready-a", "not-ready-b"] {
            cluster.report_network(node, "not-ready", true).await?;
        }
        cluster.wait_for_condition("not-ready", "Ready", "True").await?;
        cluster.set_node_not_ready("not-ready-b").await?;
        cluster
            .wait_for("not-ready", "the node that is not ready", |it| {
                it["status"]["notReady"][0]["reason"] == "NodeNotReady"
            })
            .await?;
        cluster.delete_network("not-ready").await?;
        cluster.wait_for_finalizer("not-ready", "patchbay.dev/users", false).await?;
        cluster.clear_report("not-ready-a").await?;
        let waits_for_b = |network: &Value| {
            let message =
                condition(network, "Ready").and_then(|it| it["message"].as_str()).unwrap_or_default();
            message.contains("not-ready-b (NodeNotReady") && !message.contains("not-ready-a")
        };
        cluster.wait_for("not-ready", "to wait for the node that is not ready", waits_for_b).await?;
        let nodes = cluster::resource("", "v1", "Node", "nodes");
        cluster.api(&nodes, None).delete("not-ready-b", &DeleteParams::default()).await?;
        cluster.wait_until_deleted_in_time("not-ready").await
    };
    outcome.await.with_context(|| replica.tail())
}

async fn an_idle_controller_writes_nothing(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "idle").await?;
    let outcome = async {
        cluster.create_node("idle-a", 1500).await?;
        let offset = lab.audit_offset()?;
        cluster.create_network("idle", network_spec(&cluster)).await?;
        cluster.wait_for_nad("idle", "idle").await?;
        cluster.report_network("idle-a", "idle", true).await?;
        cluster.wait_for_label("idle-a", "idle", true).await?;
        cluster.wait_for_condition("idle", "Ready", "True").await?;
        let idle = wait_until_quiet(&lab, Duration::from_secs(2), is_controller_write).await?;
        let writes = TestCluster::controller_writes(&lab, offset)?;
        println!("{} writes for a new network: {writes:?}", writes.len());
        let offset = idle;
        tokio::time::sleep(Duration::from_secs(4)).await;
        let writes = TestCluster::controller_writes(&lab, offset)?;
        ensure!(writes.is_empty(), "while idle: {writes:?}");
        // A burst of users causes one status write per second.
        let (offset, started) = (lab.audit_offset()?, Instant::now());
        for number in 0..30 {
            cluster.create_pod(&format!("pod-{number}"), "idle").await?;
        }
        cluster.wait_for("idle", "all users", |network| network["status"]["users"]["count"] == 30).await?;
        let writes = TestCluster::controller_writes(&lab, offset)?;
        let seconds = started.elapsed().as_secs();
        ensure!(writes.len() as u64 <= seconds + 2, "30 pods, {seconds} s: {writes:?}");
        cluster.delete_pods().await?;
        cluster.clear_report("idle-a").await?;
        cluster.delete_network("idle").await?;
        cluster.wait_until_deleted_in_time("idle").await
    };
    outcome.await.with_context(|| replica.tail())
}

async fn the_controller_can_change_only_its_own_node_labels(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "policy").await?;
    cluster.create_node("policy-a", 1500).await?;
    let mut config = lab.client_config().await?;
    config.auth_info.impersonate =
        Some("system:serviceaccount:patchbay-system:patchbay-controller".to_owned());
    let controller = TestCluster { client: kube::Client::try_from(config)?, ..cluster.clone() };
    for labels in [json!({"other": "x"}), json!({"test": null}), json!({"test": "other"})] {
        let error = controller.patch_node_labels("policy-a", labels.clone()).await.err();
        let error = format!("{:#}", error.with_context(|| format!("{labels} was admitted"))?);
        ensure!(error.contains("may only change labels"), "{error}");
    }
    let unknown = json!({"network.patchbay.dev/unknown": "true"});
    controller.patch_node_labels("policy-a", unknown).await.with_context(|| replica.tail())?;
    // The label names no network, so the controller removes it.
    cluster.wait_for_label("policy-a", "unknown", false).await.with_context(|| replica.tail())
}

async fn a_controller_killed_after_any_step_resumes(lab: Lab) -> Result<()> {
    let (cluster, mut replica) = start_controller(&lab, "kill").await?;
    cluster.create_node("kill-a", 1500).await?;
    let has_finalizer = |network: &Option<Value>, finalizer: &str| {
        let all = network.as_ref().and_then(|it| it["metadata"]["finalizers"].as_array());
        all.is_some_and(|all| all.iter().any(|it| it == finalizer))
    };
    let steps: [&str; 7] = ["finalizers", "nad", "status", "label", "blocked", "nad deleted", "released"];
    cluster.create_network("kill", network_spec(&cluster)).await?;
    for step in steps {
        match step {
            "label" => cluster.report_network("kill-a", "kill", true).await?,
            "blocked" => {
                cluster.create_pod("client", "kill").await?;
                cluster.delete_network("kill").await?;
            }
            "nad deleted" => cluster.delete_pods().await?,
            _ => {}
        }
        let reached = async || -> Result<bool> {
            let network = cluster.get_network("kill").await?;
            Ok(match step {
                "finalizers" => has_finalizer(&network, "patchbay.dev/users"),
                "nad" => cluster.get_nad("kill", "kill").await?.is_some(),
                "status" => network.is_some_and(|it| it["status"]["mtu"] == 1500),
                "label" => cluster.has_label("kill-a", "kill").await?,
                "blocked" => {
                    let network = network.context("deleted while in use")?;
                    condition(&network, "Ready").is_some_and(|it| it["reason"] == "DeletionBlocked")
                }
                "nad deleted" => cluster.get_nad("kill", "kill").await?.is_none(),
                _ => !has_finalizer(&network, "patchbay.dev/users"),
            })
        };
        let started = Instant::now();
        while !reached().await? {
            ensure!(started.elapsed() < TIMEOUT, "step {step:?} was not reached: {}", replica.tail());
        }
        replica.signal(nix::sys::signal::Signal::SIGKILL)?;
        replica.wait_for_exit(TIMEOUT).await?;
        if step == "blocked" {
            ensure!(cluster.get_nad("kill", "kill").await?.is_some(), "the NAD of a pod was deleted");
        }
        replica = cluster.start_leader(&lab).await?;
    }
    cluster.clear_report("kill-a").await?;
    let outcome = async {
        cluster.wait_until_deleted("kill").await?;
        ensure!(cluster.get_nad("kill", "kill").await?.is_none(), "the NAD was not deleted");
        cluster.wait_for_label("kill-a", "kill", false).await
    };
    outcome.await.with_context(|| replica.tail())
}

/// Creates many objects, 32 at a time.
async fn create_many<F: Future<Output = Result<()>>>(
    count: usize,
    create: impl Fn(usize) -> F,
) -> Result<()> {
    let all = futures::stream::iter((0..count).map(create)).buffer_unordered(32);
    all.try_for_each(|()| async { Ok(()) }).await
}

async fn a_controller_with_thousands_of_users_stays_small_and_fast(lab: Lab) -> Result<()> {
    let (vms, pods) = if e2e::soak() { (10_000, 50_000) } else { (100, 200) };
    let (cluster, replica) = start_controller(&lab, "thousands").await?;
    let outcome = async {
        cluster.create_network("thousands", network_spec(&cluster)).await?;
        cluster.wait_for_nad("thousands", "thousands").await?;
        let unused: Vec<String> = (0..10).map(|number| format!("unused-{number}")).collect();
        for name in &unused {
            cluster.create_network(name, network_spec(&cluster)).await?;
            cluster.wait_for_nad("thousands", name).await?;
        }
        create_many(vms, async |n| {
            cluster
                .create_workload(workloads::virtual_machine(&format!("vm-{n}"), "thousands"))
                .await
                .map(drop)
        })
        .await?;
        create_many(pods, async |n| cluster.create_pod(&format!("pod-{n}"), "thousands").await.map(drop))
            .await?;
        let count = vms + pods;
        cluster
            .wait_for("thousands", "all users", |network| network["status"]["users"]["count"] == count)
            .await?;
        let after_watch = replica.rss_mib()?;
        // A new controller has to list all users when it starts.
        drop(replica);
        let replica = cluster.start_leader(&lab).await?;
        cluster.delete_network("thousands").await?;
        cluster.wait_for_reason("thousands", "Ready", "DeletionBlocked").await?;
        let after_list = replica.rss_mib()?;
        let started = Instant::now();
        let deletions = unused.iter().map(async |name| {
            cluster.delete_network(name).await?;
            cluster.wait_until_deleted(name).await
        });
        futures::future::try_join_all(deletions).await?;
        println!(
            "{count} users: {after_watch} MiB after watch events, {after_list} MiB after a list; {} unused networks deleted in {:?}",
            unused.len(),
            started.elapsed()
        );
        ensure!(
            after_watch.max(after_list) <= 150,
            "{after_watch} MiB after watch events, {after_list} MiB after a list"
        );
        let vm_kind = cluster::resource("kubevirt.io", "v1", "VirtualMachine", "virtualmachines");
        cluster.delete_all(&vm_kind).await?;
        cluster.delete_all(&cluster::resource("", "v1", "Pod", "pods")).await?;
        cluster.wait_until_deleted("thousands").await.with_context(|| replica.tail())
    };
    outcome.await
}
