//! The controller's part of IPAMClaims: a real controller and KubeVirt's own virt-controller against a real API server. The
//! tests write what kubelets, multus and virt-handlers would.
#![allow(clippy::print_stdout, reason = "a test without the standard harness prints its measurements")]

#[path = "claims/backup.rs"]
mod backup;
#[path = "claims/bad_input.rs"]
mod bad_input;
#[path = "claims/cluster.rs"]
mod cluster;
#[path = "claims/histories.rs"]
mod histories;
#[path = "claims/life.rs"]
mod life;
#[path = "claims/metrics.rs"]
mod metrics;
#[path = "claims/pods.rs"]
mod pods;
#[path = "claims/rbac.rs"]
mod rbac;
#[path = "claims/takeover.rs"]
mod takeover;

use std::{process::ExitCode, time::Duration};

use anyhow::{Context as _, Result, ensure};
use backup::{
    a_restored_claim_waits_for_its_machine_and_keeps_its_addresses,
    claims_without_a_machine_do_not_keep_their_namespace,
};
use bad_input::{
    a_network_without_a_free_address_says_so_and_goes_on_when_one_is_freed, requested_addresses_are_checked,
};
use cluster::{QUIET, TestCluster, addresses, claims, condition, crds, references, virtual_machine};
use e2e::{
    Suite,
    replica::{self, Replica},
    run_suites, tests,
};
use histories::machines_keep_their_addresses_over_random_lives;
use kube::{
    Api,
    api::{DeleteParams, DynamicObject},
};
use lab::{Lab, Topology, kubevirt::pod_interface_name};
use life::{
    a_claim_that_a_user_changes_gets_its_addresses_back, a_deleted_machine_takes_its_claims_along,
    a_deleted_namespace_does_not_hang, a_network_that_loses_its_addresses_for_a_moment_keeps_its_claims,
    a_restarted_controller_writes_nothing, a_restarted_machine_keeps_its_claim,
    an_interface_that_moves_to_another_network_gets_another_claim, an_unplugged_interface_frees_its_address,
    an_unplugged_interface_keeps_its_claim_with_the_flag,
    claims_of_machines_that_went_while_no_controller_ran_are_gone,
};
use metrics::the_metrics_count_the_claims;
use pods::{
    a_forged_reference_is_rejected, a_launcher_whose_instance_does_not_exist_is_rejected,
    broken_nads_affect_only_pods_that_use_them,
};
use rbac::the_controller_creates_only_its_own_crd_and_its_own_blocks;
use serde_json::{Value, json};
use takeover::{
    a_claim_of_the_primary_network_goes_after_ipam_extensions_and_its_pods,
    a_hundred_claims_of_ipam_extensions_are_taken_over_unchanged,
    a_paused_leader_leaves_its_reservation_to_the_next_one,
    the_example_of_ipam_extensions_gets_its_claim_and_reference,
};

/// The timeout for waits that are not about time; generous, since other suites run in parallel.
const TIMEOUT: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    run_suites(&[Suite {
        name: "t-claims",
        topology: Topology::KubeVirt(0),
        set_up: |lab| {
            Box::pin(async move {
                replica::install(&lab, 2)?;
                replica::set_webhook_endpoints(&lab, &[1])
            })
        },
        tests: tests![
            the_crd_of_another_project_is_kept,
            a_machine_gets_a_claim_as_ipam_extensions_names_it_and_addresses,
            a_restarted_machine_keeps_its_claim,
            requested_addresses_are_checked,
            a_network_without_a_free_address_says_so_and_goes_on_when_one_is_freed,
            broken_nads_affect_only_pods_that_use_them,
            a_forged_reference_is_rejected,
            a_launcher_whose_instance_does_not_exist_is_rejected,
            a_claim_of_the_primary_network_goes_after_ipam_extensions_and_its_pods,
            a_restored_claim_waits_for_its_machine_and_keeps_its_addresses,
            claims_without_a_machine_do_not_keep_their_namespace,
            a_network_that_loses_its_addresses_for_a_moment_keeps_its_claims,
            an_unplugged_interface_frees_its_address,
            an_unplugged_interface_keeps_its_claim_with_the_flag,
            an_interface_that_moves_to_another_network_gets_another_claim,
            the_metrics_count_the_claims,
            a_deleted_machine_takes_its_claims_along,
            claims_of_machines_that_went_while_no_controller_ran_are_gone,
            the_example_of_ipam_extensions_gets_its_claim_and_reference,
            a_paused_leader_leaves_its_reservation_to_the_next_one,
            a_hundred_claims_of_ipam_extensions_are_taken_over_unchanged,
            a_deleted_namespace_does_not_hang,
            a_claim_that_a_user_changes_gets_its_addresses_back,
            machines_keep_their_addresses_over_random_lives,
            the_controller_creates_only_its_own_crd_and_its_own_blocks,
            a_restarted_controller_writes_nothing,
        ],
    }])
}

/// Starts a controller that leads, and creates the namespace of this test.
async fn start_controller(lab: &Lab, name: &str) -> Result<(TestCluster, Replica)> {
    let cluster = TestCluster::new(lab, name).await?;
    let replica = cluster.start_leader(lab).await?;
    Ok((cluster, replica))
}

async fn a_machine_gets_a_claim_as_ipam_extensions_names_it_and_addresses(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "basic").await?;
    let outcome = async {
        cluster.create_network("basic", &["10.60.0.0/24", "fd60::/64"]).await?;
        let vm = cluster.create_vm(&virtual_machine("vm1", &[("net_a", "basic")])).await?;
        let claim = cluster.wait_for_addresses("vm1.net.a", 2).await?;
        let metadata = &claim["metadata"];
        ensure!(metadata["labels"] == json!({"kubevirt.io/vm": "vm1"}), "{metadata:#}");
        ensure!(metadata["finalizers"] == json!(["kubevirt.io/persistent-ipam"]), "{metadata:#}");
        let owner = json!([{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "vm1",
            "uid": vm["metadata"]["uid"], "controller": true, "blockOwnerDeletion": true}]);
        ensure!(metadata["ownerReferences"] == owner, "{metadata:#}");
        let spec = json!({"network": "basic", "interface": pod_interface_name("net_a")});
        ensure!(claim["spec"] == spec, "{claim:#}");
        ensure!(condition(&claim)["reason"] == "SuccessfulAllocation", "{claim:#}");
        ensure!(claim["status"].get("ownerPod").is_none(), "no pod has the address yet: {claim:#}");
        let ips = addresses(&claim);
        ensure!(ips[0].ends_with("/24") && ips[1].ends_with("/64"), "{ips:?}");
        let mut bare: Vec<String> =
            ips.iter().map(|ip| ip.split('/').next().unwrap_or_default().to_owned()).collect();
        bare.sort();
        ensure!(cluster.reservations(&metadata["uid"]).await? == bare, "{bare:?}");
        let launcher = cluster.wait_for_launcher("vm1").await?;
        ensure!(references(&launcher)? == ["vm1.net.a"], "{launcher:#}");
        for kind in ["VirtualMachine", "VirtualMachineInstance"] {
            let note = cluster.wait_for_event(kind, "vm1", "SuccessfulAllocation").await?;
            ensure!(note.contains(&ips[0]) && note.contains("reserved in IPBlock"), "{note}");
        }
        let note = cluster.wait_for_event("VirtualMachine", "vm1", "IPAMClaimCreated").await?;
        ensure!(note == "created IPAMClaim basic/vm1.net.a for interface net_a on network basic", "{note}");
        // Once multus reports the address, the claim names the pod.
        let name = launcher["metadata"]["name"].as_str().context("metadata.name")?;
        let status = json!([{"name": "basic/basic", "interface": pod_interface_name("net_a"), "ips": bare}]);
        let annotations = json!({"k8s.v1.cni.cncf.io/network-status": status.to_string()});
        cluster
            .merge_patch(&cluster::pods(), name, &json!({"metadata": {"annotations": annotations}}))
            .await?;
        cluster.wait_for_claim("vm1.net.a", |claim| claim["status"]["ownerPod"]["name"] == name).await?;
        let table = lab.kubectl(&["-n", "basic", "get", "ipamclaims"])?;
        ensure!(table.contains("NETWORK") && table.contains(name) && table.contains(&ips[0]), "{table}");
        Ok(())
    };
    outcome.await.with_context(|| replica.tail())
}

/// Another project's CRD prunes conditions: reasons are in events only, and nothing is written again and again.
async fn the_crd_of_another_project_is_kept(lab: Lab) -> Result<()> {
    let cluster = TestCluster::new(&lab, "foreign").await?;
    let crd = |columns: Value| {
        let status = json!({"type": "object", "required": ["ips"],
            "properties": {"ips": {"type": "array", "items": {"type": "string"}}}});
        let spec = json!({"type": "object", "required": ["network", "interface"],
            "properties": {"network": {"type": "string"}, "interface": {"type": "string"}}});
        json!({
            "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {"name": "ipamclaims.k8s.cni.cncf.io", "annotations": {"made-by": "another project"}},
            "spec": {
                "group": "k8s.cni.cncf.io", "scope": "Namespaced",
                "names": {"plural": "ipamclaims", "singular": "ipamclaim", "kind": "IPAMClaim", "listKind": "IPAMClaimList"},
                "versions": [{"name": "v1alpha1", "served": true, "storage": true, "subresources": {"status": {}},
                    "additionalPrinterColumns": columns,
                    "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec, "status": status}}}}],
            },
        })
    };
    cluster.apply_in(&crds(), None, &crd(json!([]))).await?;
    let replica = cluster.start_leader(&lab).await?;
    let outcome = async {
        cluster.create_network("foreign", &["10.61.0.0/24"]).await?;
        cluster.create_vm(&virtual_machine("vm1", &[("blue", "foreign")])).await?;
        let claim = cluster.wait_for_addresses("vm1.blue", 1).await?;
        ensure!(claim["status"].get("conditions").is_none(), "{claim:#}");
        cluster.wait_for_event("VirtualMachine", "vm1", "SuccessfulAllocation").await?;
        let mut bad = virtual_machine("vm2", &[("blue", "foreign")]);
        bad["spec"]["template"]["metadata"]["annotations"] =
            json!({"network.kubevirt.io/addresses": r#"{"blue": ["10.9.9.9"]}"#});
        cluster.create_vm(&bad).await?;
        let mut malformed = virtual_machine("vm3", &[("blue", "foreign")]);
        malformed["spec"]["template"]["metadata"]["annotations"] =
            json!({"network.kubevirt.io/addresses": r#"{"blue": ["10.61.0.300"]}"#});
        cluster.create_vm(&malformed).await?;
        for kind in ["VirtualMachine", "VirtualMachineInstance"] {
            cluster.wait_for_event(kind, "vm2", "InternalError").await?;
            let note = cluster.wait_for_event(kind, "vm3", "InternalError").await?;
            ensure!(note.contains("\"10.61.0.300\" is not an IP address"), "{note}");
        }
        let offset = TestCluster::wait_until_quiet(&lab).await?;
        tokio::time::sleep(QUIET).await;
        let writes = TestCluster::controller_writes(&lab, offset)?;
        ensure!(writes.is_empty(), "{writes:#?}");
        let api: Api<DynamicObject> = Api::all_with(cluster.client.clone(), &crds());
        let stored = api.get("ipamclaims.k8s.cni.cncf.io").await?;
        let made_by = stored.metadata.annotations.as_ref().and_then(|all| all.get("made-by"));
        ensure!(made_by.is_some(), "the CRD was changed");
        // Without it, the controller creates its own. No other kind may be created with its token.
        for vm in ["vm1", "vm2", "vm3"] {
            cluster.delete(&cluster::vms(), vm, &DeleteParams::background()).await?;
        }
        for vm in ["vm1", "vm2", "vm3"] {
            cluster.wait_until_gone(&claims(), &format!("{vm}.blue")).await?;
        }
        api.delete("ipamclaims.k8s.cni.cncf.io", &DeleteParams::default()).await?;
        lab::wait::until(TIMEOUT, "the CRD of the controller", || async {
            let crd = api.get_opt("ipamclaims.k8s.cni.cncf.io").await?;
            let columns =
                crd.as_ref().map(|crd| crd.data["spec"]["versions"][0]["additionalPrinterColumns"].clone());
            Ok(columns.filter(|columns| columns.as_array().is_some_and(|all| all.len() == 5)).map(drop))
        })
        .await
    };
    outcome.await.with_context(|| replica.tail())
}
