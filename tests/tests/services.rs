//! The controller's part of NetworkServices: a real controller process against a real API server. The tests write Nodes,
//! pods and network-status in place of kubelets and multus.
#![allow(clippy::print_stdout, reason = "a test without the standard harness prints its measurements")]

#[path = "services/annotated.rs"]
mod annotated;
#[path = "services/cluster.rs"]
mod cluster;
#[path = "services/convergence.rs"]
mod convergence;
#[path = "services/crashes.rs"]
mod crashes;
#[path = "services/histories.rs"]
mod histories;
#[path = "services/ownership.rs"]
mod ownership;
#[path = "services/primary_addresses.rs"]
mod primary_addresses;
#[path = "services/users.rs"]
mod users;

use std::{process::ExitCode, time::Duration};

use annotated::{
    a_bad_service_of_a_user_loses_its_slices_and_says_what_to_change,
    a_service_that_the_user_owns_gets_slices_and_follows_its_annotations,
};
use anyhow::{Context as _, Result, ensure};
use cluster::{TestCluster, TestPod, network_services, network_status, pods};
use convergence::{
    a_thousand_endpoints_are_published_and_a_single_change_writes_one_slice,
    edits_of_the_spec_end_as_a_fresh_create_would, foreign_changes_of_slices_and_services_are_repaired,
    foreign_slices_and_endpoints_are_reported,
};
use crashes::{
    a_leader_killed_while_it_writes_leaves_no_doubled_endpoints, a_restarted_controller_writes_nothing,
    a_standby_goes_on_when_the_leader_is_killed, doubled_slices_become_one,
};
use e2e::{
    Suite,
    replica::{self, Replica},
    run_suites, tests,
};
use histories::random_histories_of_pods_and_services_end_as_the_model;
use lab::{Lab, Topology};
use ownership::{
    a_deleted_namespace_takes_its_services_along, a_deleted_networkservice_takes_its_service_along,
    a_foreign_service_is_never_taken_over_unless_it_says_so,
};
use serde_json::json;
use users::{
    a_user_with_edit_creates_networkservices_and_cannot_write_slices,
    invalid_specs_are_rejected_with_a_reason, kubectl_shows_and_awaits_networkservices,
    the_nad_kind_may_arrive_later, the_watch_of_pods_switches_without_losing_users,
};

/// The timeout for waits that are not about time; generous, since other suites run in parallel.
const TIMEOUT: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    run_suites(&[Suite {
        name: "t-services",
        topology: Topology::ControlPlaneOnly,
        set_up: |lab| {
            Box::pin(async move {
                replica::install(&lab, 2)?;
                replica::set_webhook_endpoints(&lab, &[1])
            })
        },
        tests: tests![
            the_nad_kind_may_arrive_later,
            the_watch_of_pods_switches_without_losing_users,
            a_networkservice_gets_a_headless_service_slices_and_status,
            endpoints_follow_readiness_and_network_status,
            pod_faults_are_reported_and_leave_out_only_that_pod,
            a_forged_address_outside_the_subnets_is_not_published,
            duplicate_addresses_are_withheld_and_reported,
            a_foreign_service_is_never_taken_over_unless_it_says_so,
            a_deleted_networkservice_takes_its_service_along,
            a_deleted_namespace_takes_its_services_along,
            a_service_that_the_user_owns_gets_slices_and_follows_its_annotations,
            a_bad_service_of_a_user_loses_its_slices_and_says_what_to_change,
            edits_of_the_spec_end_as_a_fresh_create_would,
            foreign_changes_of_slices_and_services_are_repaired,
            foreign_slices_and_endpoints_are_reported,
            a_thousand_endpoints_are_published_and_a_single_change_writes_one_slice,
            doubled_slices_become_one,
            a_leader_killed_while_it_writes_leaves_no_doubled_endpoints,
            a_restarted_controller_writes_nothing,
            a_standby_goes_on_when_the_leader_is_killed,
            a_user_with_edit_creates_networkservices_and_cannot_write_slices,
            invalid_specs_are_rejected_with_a_reason,
            kubectl_shows_and_awaits_networkservices,
            random_histories_of_pods_and_services_end_as_the_model,
        ],
    }])
}

/// Starts a controller that leads, and creates the namespace of this test.
async fn start_controller(lab: &Lab, name: &str) -> Result<(TestCluster, Replica)> {
    let cluster = TestCluster::new(lab, name).await?;
    let replica = cluster.start_leader(lab).await?;
    Ok((cluster, replica))
}

async fn a_networkservice_gets_a_headless_service_slices_and_status(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "basic").await?;
    let outcome = async {
        let uid = cluster.create_service("db", TestCluster::service_spec("db")).await?;
        cluster.wait_for_condition("db", "Ready", "False", "NoPods").await?;
        cluster.create_pod(&TestPod::new("db-0", "db", &["192.168.9.1", "fd00:9::1"])).await?;
        cluster.create_pod(&TestPod::new("other", "web", &["192.168.9.2"])).await?;
        cluster
            .wait_for_endpoints("db", &[("192.168.9.1", "db-0", true), ("fd00:9::1", "db-0", true)])
            .await?;
        cluster.wait_for_condition("db", "Ready", "True", "Ready").await?;
        let service = cluster.wait_for_service("db").await?;
        let owner =
            service.metadata.owner_references.as_deref().and_then(|all| all.first()).context("an owner")?;
        ensure!(owner.uid == uid && owner.controller == Some(true), "{owner:?}");
        ensure!(service.metadata.labels.as_ref().is_some_and(|labels| labels["team"] == "db"), "{service:?}");
        let spec = service.spec.context("spec")?;
        ensure!(spec.cluster_ip.as_deref() == Some("None") && spec.selector.is_none(), "{spec:?}");
        let slices = cluster.slices("db").await?;
        ensure!(slices.len() == 2, "one of each family: {slices:?}");
        for slice in &slices {
            let annotations = slice.metadata.annotations.clone().unwrap_or_default();
            ensure!(annotations["patchbay.dev/service-network"] == "basic/blue", "{annotations:?}");
            let owner =
                slice.metadata.owner_references.as_deref().and_then(|all| all.first()).context("an owner")?;
            ensure!(Some(&owner.uid) == service.metadata.uid.as_ref(), "{owner:?}");
            let port = slice.ports.as_deref().and_then(|all| all.first()).context("a port")?;
            ensure!(port.port == Some(5432) && port.name.as_deref() == Some("pg"), "{port:?}");
            let endpoint = slice.endpoints.first().context("an endpoint")?;
            ensure!(endpoint.zone.as_deref() == Some("zone-1"), "{endpoint:?}");
        }
        // Never Endpoints, and never a slice of the built-in controller.
        ensure!(cluster.get(&cluster::resource("", "v1", "Endpoints", "endpoints"), "db").await?.is_none());
        Ok(())
    };
    outcome.await.with_context(|| replica.tail())
}

async fn endpoints_follow_readiness_and_network_status(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "follow").await?;
    let outcome = async {
        cluster.create_service("db", TestCluster::service_spec("db")).await?;
        let mut late = TestPod::new("db-0", "db", &[]).ready(false);
        late.status = None;
        cluster.create_pod(&late).await?;
        cluster.wait_for_condition("db", "Ready", "False", "NoAddresses").await?;
        // The address comes after the pod runs.
        cluster.set_network_status("db-0", Some(&network_status("follow/blue", &["192.168.9.1"]))).await?;
        cluster.wait_for_endpoints("db", &[("192.168.9.1", "db-0", false)]).await?;
        cluster.wait_for_condition("db", "Ready", "False", "NotReady").await?;
        cluster.set_ready("db-0", true).await?;
        cluster.wait_for_endpoints("db", &[("192.168.9.1", "db-0", true)]).await?;
        // Hot-plug without a change of readiness: another address, then none.
        cluster
            .set_network_status("db-0", Some(&network_status("blue", &["192.168.9.5", "192.168.9.6"])))
            .await?;
        cluster
            .wait_for_endpoints("db", &[("192.168.9.5", "db-0", true), ("192.168.9.6", "db-0", true)])
            .await?;
        cluster.set_network_status("db-0", None).await?;
        cluster.wait_for_endpoints("db", &[]).await?;
        cluster.set_network_status("db-0", Some(&network_status("blue", &["192.168.9.5"]))).await?;
        cluster.wait_for_endpoints("db", &[("192.168.9.5", "db-0", true)]).await?;
        // Out of the selector and back.
        cluster.merge_patch(&pods(), "db-0", &json!({"metadata": {"labels": {"app": "web"}}})).await?;
        cluster.wait_for_endpoints("db", &[]).await?;
        cluster.merge_patch(&pods(), "db-0", &json!({"metadata": {"labels": {"app": "db"}}})).await?;
        cluster.wait_for_endpoints("db", &[("192.168.9.5", "db-0", true)]).await?;
        cluster.set_ready("db-0", false).await?;
        cluster.wait_for_endpoints("db", &[("192.168.9.5", "db-0", false)]).await?;
        cluster
            .merge_patch(&network_services(), "db", &json!({"spec": {"publishNotReadyAddresses": true}}))
            .await?;
        cluster.wait_for_endpoints("db", &[("192.168.9.5", "db-0", true)]).await?;
        cluster.delete(&pods(), "db-0").await?;
        cluster.wait_for_endpoints("db", &[]).await
    };
    outcome.await.with_context(|| replica.tail())
}

async fn pod_faults_are_reported_and_leave_out_only_that_pod(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "faults").await?;
    let outcome = async {
        cluster.create_service("db", TestCluster::service_spec("db")).await?;
        cluster.create_pod(&TestPod::new("good", "db", &["192.168.9.1", "169.254.1.1"])).await?;
        cluster.create_pod(&TestPod::new("bad", "db", &[]).status("no JSON")).await?;
        cluster.wait_for_endpoints("db", &[("192.168.9.1", "good", true)]).await?;
        let note = cluster.wait_for_event("NetworkService", "db", "BadNetworkStatus").await?;
        ensure!(note.contains("pod bad"), "{note}");
        let note = cluster.wait_for_event("NetworkService", "db", "BadAddress").await?;
        ensure!(note.contains("pod good") && note.contains("169.254.1.1"), "{note}");
        Ok(())
    };
    outcome.await.with_context(|| replica.tail())
}

/// A user who may edit a pod may edit its annotation. An address of another network must not become an endpoint.
async fn a_forged_address_outside_the_subnets_is_not_published(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "forged").await?;
    let outcome = async {
        let networks = cluster::resource("patchbay.dev", "v1alpha1", "BridgeNetwork", "bridgenetworks");
        let network = json!({"apiVersion": "patchbay.dev/v1alpha1", "kind": "BridgeNetwork", "metadata": {"name": "green"},
            "spec": {"attachment": {"namespaces": ["forged"]}, "ipam": {"subnets": ["10.97.0.0/24", "fd97::/64"]}}});
        cluster.apply_in(&networks, None, &network).await?;
        lab::wait::until(TIMEOUT, "the NAD of the BridgeNetwork", || async {
            cluster.get(&cluster::nads(), "green").await
        })
        .await?;
        let spec = json!({"network": "green", "selector": {"app": "db"}, "ports": [{"port": 5432}]});
        cluster.create_service("db", spec).await?;
        let addresses = ["10.97.0.5", "10.96.0.1", "10.97.1.5", "fd97::5", "fd98::5"];
        let status = network_status("forged/green", &addresses);
        cluster.create_pod(&TestPod::new("db-0", "db", &[]).status(&status)).await?;
        cluster.wait_for_endpoints("db", &[("10.97.0.5", "db-0", true), ("fd97::5", "db-0", true)]).await?;
        let note = cluster.wait_for_event("NetworkService", "db", "AddressOutsideSubnets").await?;
        ensure!(note.contains("pod db-0") && note.contains("10.96.0.1"), "{note}");
        // An edit of the annotation of a running pod.
        let forged = network_status("forged/green", &["10.96.0.1"]);
        cluster.set_network_status("db-0", Some(&forged)).await?;
        cluster.wait_for_endpoints("db", &[]).await?;
        cluster.wait_for_condition("db", "Ready", "False", "NoAddresses").await.map(drop)
    };
    outcome.await.with_context(|| replica.tail())
}

async fn duplicate_addresses_are_withheld_and_reported(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "duplicate").await?;
    let outcome = async {
        cluster.create_service("db", TestCluster::service_spec("db")).await?;
        cluster.create_pod(&TestPod::new("one", "db", &["192.168.9.1"])).await?;
        cluster.wait_for_endpoints("db", &[("192.168.9.1", "one", true)]).await?;
        cluster.create_pod(&TestPod::new("two", "db", &["192.168.9.1", "192.168.9.2"])).await?;
        cluster.wait_for_endpoints("db", &[("192.168.9.2", "two", true)]).await?;
        let found = cluster.wait_for_condition("db", "DuplicateAddress", "True", "DuplicateAddress").await?;
        let message = found["message"].as_str().unwrap_or_default();
        ensure!(message.contains("192.168.9.1 of the pods one and two"), "{message}");
        let note = cluster.wait_for_event("NetworkService", "db", "DuplicateAddress").await?;
        ensure!(note.contains("one and two"), "{note}");
        // The pods of one virtual machine share its address while it migrates.
        for pod in ["one", "two"] {
            let label = json!({"metadata": {"labels": {"kubevirt.io/created-by": "vm-uid"}}});
            cluster.merge_patch(&pods(), pod, &label).await?;
        }
        cluster.wait_for_condition("db", "DuplicateAddress", "False", "None").await?;
        cluster.set_ready("two", false).await?;
        cluster
            .wait_for_endpoints("db", &[("192.168.9.1", "one", true), ("192.168.9.2", "two", false)])
            .await?;
        cluster.set_ready("two", true).await?;
        cluster.set_ready("one", false).await?;
        cluster.wait_for_endpoints("db", &[("192.168.9.1", "two", true), ("192.168.9.2", "two", true)]).await
    };
    outcome.await.with_context(|| replica.tail())
}
