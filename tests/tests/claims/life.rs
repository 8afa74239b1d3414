//! Claims over the life of their virtual machines.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kube::{
    Api,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams},
};
use lab::{Lab, kubevirt::restart_vm, wait};
use serde_json::{Value, json};

use super::{
    TIMEOUT,
    cluster::{
        QUIET, TestCluster, addresses, bridge_networks, claims, condition, instance_spec, pods, references,
        resource, virtual_machine, vmis, vms,
    },
    start_controller,
};

/// How soon after its start a controller has removed the claims of machines that are gone.
const RECOVERY_LIMIT: Duration = Duration::from_secs(30);

pub async fn a_restarted_machine_keeps_its_claim(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "restart").await?;
    let outcome = async {
        cluster.create_network("restart", &["10.62.0.0/24"]).await?;
        cluster.create_vm(&virtual_machine("vm1", &[("blue", "restart")])).await?;
        let before = cluster.wait_for_addresses("vm1.blue", 1).await?;
        let first = cluster.wait_for_launcher("vm1").await?;
        restart_vm(&cluster.client, &cluster.namespace, "vm1").await?;
        let second = wait::until(TIMEOUT, "another launcher", || async {
            let pod = cluster.wait_for_launcher("vm1").await?;
            Ok((pod["metadata"]["uid"] != first["metadata"]["uid"]).then_some(pod))
        })
        .await?;
        ensure!(references(&second)? == ["vm1.blue"], "{second:#}");
        // Stopped, it keeps its claim as well.
        cluster.merge_patch(&vms(), "vm1", &json!({"spec": {"runStrategy": "Halted"}})).await?;
        cluster.wait_until_gone(&vmis(), "vm1").await?;
        tokio::time::sleep(QUIET).await;
        let after = cluster.wait_for_addresses("vm1.blue", 1).await?;
        ensure!(after["metadata"]["uid"] == before["metadata"]["uid"], "{after:#}");
        ensure!(addresses(&after) == addresses(&before), "{after:#}");
        Ok(())
    };
    outcome.await.with_context(|| replica.tail())
}

/// Background, foreground and orphan; also an instance without a VirtualMachine.
pub async fn a_deleted_machine_takes_its_claims_along(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "deleted").await?;
    let outcome = async {
        cluster.create_network("deleted", &["10.63.0.0/24"]).await?;
        let networks = [("blue", "deleted"), ("green", "deleted")];
        for (vm, params) in
            [("background", DeleteParams::background()), ("foreground", DeleteParams::foreground())]
        {
            cluster.create_vm(&virtual_machine(vm, &networks)).await?;
            for network in ["blue", "green"] {
                cluster.wait_for_addresses(&format!("{vm}.{network}"), 1).await?;
            }
            cluster.delete(&vms(), vm, &params).await?;
            cluster.wait_until_gone(&vms(), vm).await?;
            for network in ["blue", "green"] {
                cluster.wait_until_gone(&claims(), &format!("{vm}.{network}")).await?;
            }
        }
        let lone = json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
            "metadata": {"name": "lone"}, "spec": instance_spec(&networks)});
        let created = cluster.create(&vmis(), &lone).await?;
        let claim = cluster.wait_for_addresses("lone.blue", 1).await?;
        let owner = &claim["metadata"]["ownerReferences"][0];
        ensure!(
            owner["kind"] == "VirtualMachineInstance" && owner["uid"] == json!(created.metadata.uid),
            "{owner}"
        );
        cluster.delete(&vmis(), "lone", &DeleteParams::foreground()).await?;
        cluster.wait_until_gone(&claims(), "lone.blue").await?;
        cluster.wait_until_gone(&claims(), "lone.green").await?;
        orphan(&cluster).await
    };
    outcome.await.with_context(|| replica.tail())
}

/// The instance of an orphaned machine keeps its claim and its address, and takes them along.
async fn orphan(cluster: &TestCluster) -> Result<()> {
    cluster.create_vm(&virtual_machine("orphan", &[("blue", "deleted")])).await?;
    let before = cluster.wait_for_addresses("orphan.blue", 1).await?;
    cluster.wait_for_launcher("orphan").await?;
    let params = DeleteParams {
        propagation_policy: Some(kube::api::PropagationPolicy::Orphan),
        ..DeleteParams::default()
    };
    cluster.delete(&vms(), "orphan", &params).await?;
    cluster.wait_until_gone(&vms(), "orphan").await?;
    let vmi = cluster.get(&vmis(), "orphan").await?.context("the instance is gone")?;
    let after = cluster
        .wait_for_claim("orphan.blue", |claim| {
            claim["metadata"]["ownerReferences"][0]["uid"] == vmi["metadata"]["uid"]
        })
        .await?;
    ensure!(after["metadata"]["uid"] == before["metadata"]["uid"], "{after:#}");
    ensure!(addresses(&after) == addresses(&before), "{after:#}");
    cluster.delete(&vmis(), "orphan", &DeleteParams::background()).await?;
    cluster.wait_until_gone(&claims(), "orphan.blue").await
}

pub async fn claims_of_machines_that_went_while_no_controller_ran_are_gone(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "down").await?;
    cluster.create_network("down", &["10.64.0.0/24"]).await?;
    for vm in ["vm1", "vm2"] {
        cluster.create_vm(&virtual_machine(vm, &[("blue", "down")])).await?;
        cluster.wait_for_addresses(&format!("{vm}.blue"), 1).await?;
        cluster.wait_for_launcher(vm).await?;
    }
    let claim = cluster.wait_for_addresses("vm1.blue", 1).await?;
    drop(replica);
    cluster.delete(&vms(), "vm1", &DeleteParams::background()).await?;
    cluster.delete(&vms(), "vm2", &DeleteParams::foreground()).await?;
    cluster.wait_until_gone(&vmis(), "vm1").await?;
    cluster.wait_until_gone(&vmis(), "vm2").await?;
    let replica = cluster.start_leader(&lab).await?;
    let outcome = async {
        let ((), took) = wait::within(RECOVERY_LIMIT, "the claims to be gone", || async {
            let left = cluster.api(&claims()).list(&ListParams::default()).await?.items;
            ensure!(left.is_empty(), "{left:#?}");
            Ok(Some(()))
        })
        .await?;
        println!("the claims were gone {took:?} after the start of the controller");
        wait::until(TIMEOUT, "the address to be free", || async {
            let left = cluster.reservations(&claim["metadata"]["uid"]).await?;
            ensure!(left.is_empty(), "{left:?}");
            Ok(Some(()))
        })
        .await
    };
    outcome.await.with_context(|| replica.tail())
}

/// With a controller, and with one that starts afterwards.
pub async fn a_deleted_namespace_does_not_hang(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "gone").await?;
    for vm in ["vm1", "vm2"] {
        if vm == "vm1" {
            cluster.create_network("gone", &["10.74.0.0/24"]).await?;
        }
        cluster.create_vm(&virtual_machine(vm, &[("blue", "gone")])).await?;
        cluster.wait_for_addresses(&format!("{vm}.blue"), 1).await?;
    }
    let other = TestCluster::new(&lab, "gone-later").await?;
    other.create_network("gone-later", &["10.75.0.0/24"]).await?;
    other.create_vm(&virtual_machine("vm1", &[("blue", "gone-later")])).await?;
    let claim = other.wait_for_addresses("vm1.blue", 1).await?;
    delete_namespace(&cluster).await?;
    wait_for_namespace(&cluster).await.with_context(|| replica.tail())?;
    drop(replica);
    delete_namespace(&other).await?;
    other.wait_until_gone(&vmis(), "vm1").await?;
    let replica = other.start_leader(&lab).await?;
    let started = std::time::Instant::now();
    let outcome = async {
        wait_for_namespace(&other).await?;
        println!("the namespace was gone {:?} after the start of the controller", started.elapsed());
        wait::until(TIMEOUT, "the address to be free", || async {
            Ok(other.reservations(&claim["metadata"]["uid"]).await?.is_empty().then_some(()))
        })
        .await
    };
    outcome.await.with_context(|| replica.tail())
}

fn namespaces(cluster: &TestCluster) -> Api<DynamicObject> {
    Api::all_with(cluster.client.clone(), &resource("", "v1", "Namespace", "namespaces"))
}

pub async fn delete_namespace(cluster: &TestCluster) -> Result<()> {
    let deleted = namespaces(cluster).delete(&cluster.namespace, &DeleteParams::background()).await;
    deleted.map(drop).context("delete the namespace")
}

pub async fn wait_for_namespace(cluster: &TestCluster) -> Result<()> {
    wait::until(TIMEOUT, &format!("namespace {} to be gone", cluster.namespace), || async {
        let left = namespaces(cluster).get_opt(&cluster.namespace).await?;
        ensure!(left.is_none(), "{:#}", serde_json::to_value(left)?["status"]);
        Ok(Some(()))
    })
    .await
}

/// The claim, and with it the MAC address, stays while the network has no addresses, also over a restart of the controller.
pub async fn a_network_that_loses_its_addresses_for_a_moment_keeps_its_claims(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "dropped").await?;
    let api: Api<DynamicObject> = Api::all_with(cluster.client.clone(), &bridge_networks());
    let set_ipam = async |ipam: Value| {
        let patch = json!({"spec": {"ipam": ipam}});
        api.patch("dropped", &PatchParams::default(), &Patch::Merge(&patch))
            .await
            .context("patch the network")
    };
    cluster.create_network("dropped", &["10.86.0.0/24"]).await?;
    for (vm, strategy) in [("vm1", "Always"), ("vm2", "Halted")] {
        cluster.create_vm(&virtual_machine(vm, &[("blue", "dropped")])).await?;
        cluster.wait_for_addresses(&format!("{vm}.blue"), 1).await?;
        cluster.wait_for_launcher(vm).await?;
        cluster.merge_patch(&vms(), vm, &json!({"spec": {"runStrategy": strategy}})).await?;
    }
    cluster.wait_until_gone(&vmis(), "vm2").await?;
    let mut before = Vec::new();
    for claim in ["vm1.blue", "vm2.blue"] {
        before.push(cluster.wait_for_addresses(claim, 1).await?);
    }
    let has_lost = |claim: &Value| {
        condition(claim)["message"]
            .as_str()
            .is_some_and(|text| text.contains("the network has no subnet with"))
    };
    let is_kept = async |lost: bool| {
        for (name, before) in ["vm1.blue", "vm2.blue"].into_iter().zip(&before) {
            let now = cluster.wait_for_claim(name, |claim| has_lost(claim) == lost).await?;
            ensure!(now["metadata"]["uid"] == before["metadata"]["uid"], "{now:#}");
            ensure!(now["metadata"].get("deletionTimestamp").is_none(), "{now:#}");
            ensure!(addresses(&now) == addresses(before) && condition(&now)["status"] == "True", "{now:#}");
        }
        anyhow::Ok(())
    };
    let dropped = async {
        set_ipam(Value::Null).await?;
        is_kept(true).await?;
        let note = cluster.wait_for_event("VirtualMachine", "vm1", "IPAMClaimKept").await?;
        ensure!(note.contains("set spec.ipam and spec.ipam.persistent of BridgeNetwork dropped"), "{note}");
        tokio::time::sleep(QUIET).await;
        is_kept(true).await
    };
    dropped.await.with_context(|| replica.tail())?;
    drop(replica);
    let replica = cluster.start_leader(&lab).await?;
    let outcome = async {
        TestCluster::wait_until_quiet(&lab).await?;
        is_kept(true).await?;
        set_ipam(json!({"subnets": ["10.86.0.0/24"]})).await?;
        is_kept(false).await?;
        TestCluster::wait_until_quiet(&lab).await?;
        is_kept(false).await?;
        set_ipam(json!({"subnets": ["10.86.0.0/24"], "persistent": true})).await?;
        TestCluster::wait_until_quiet(&lab).await?;
        is_kept(false).await
    };
    outcome.await.with_context(|| replica.tail())
}

/// A user clears the status, edits the network, deletes the claim, and creates the machine again under its name.
pub async fn a_claim_that_a_user_changes_gets_its_addresses_back(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "edited").await?;
    let outcome = async {
        cluster.create_network("edited", &["10.76.0.0/24", "fd76::/64"]).await?;
        let vm = virtual_machine("vm1", &[("blue", "edited")]);
        cluster.create_vm(&vm).await?;
        let before = cluster.wait_for_addresses("vm1.blue", 2).await?;
        cluster.wait_for_launcher("vm1").await?;
        for ips in [json!([]), json!(["10.76.0.99/24"])] {
            let status = json!({"status": {"ips": ips}});
            let params = PatchParams::default();
            cluster.api(&claims()).patch_status("vm1.blue", &params, &Patch::Merge(&status)).await?;
            cluster.wait_for_claim("vm1.blue", |claim| addresses(claim) == addresses(&before)).await?;
        }
        let note = cluster.wait_for_event("VirtualMachine", "vm1", "IPAMClaimConflict").await?;
        ensure!(note.starts_with("status.ips of IPAMClaim edited/vm1.blue was changed, and is "), "{note}");
        // The network of the claim of a stopped machine: it is corrected when the machine starts.
        cluster.create_vm(&virtual_machine("vm2", &[("blue", "edited")])).await?;
        let stopped = cluster.wait_for_addresses("vm2.blue", 2).await?;
        cluster.merge_patch(&vms(), "vm2", &json!({"spec": {"runStrategy": "Halted"}})).await?;
        cluster.wait_until_gone(&vmis(), "vm2").await?;
        cluster.merge_patch(&claims(), "vm2.blue", &json!({"spec": {"network": "green"}})).await?;
        cluster.merge_patch(&vms(), "vm2", &json!({"spec": {"runStrategy": "Always"}})).await?;
        let corrected =
            cluster.wait_for_claim("vm2.blue", |claim| claim["spec"]["network"] == "edited").await?;
        ensure!(corrected["metadata"]["uid"] == stopped["metadata"]["uid"], "{corrected:#}");
        ensure!(addresses(&corrected) == addresses(&stopped), "{corrected:#}");
        let note = cluster.wait_for_event("VirtualMachine", "vm2", "IPAMClaimConflict").await?;
        ensure!(note.contains("was edited: spec.network was \"green\""), "{note}");
        // The finalizer keeps a deleted claim, its addresses and its machine.
        cluster.delete(&claims(), "vm1.blue", &DeleteParams::background()).await?;
        tokio::time::sleep(QUIET).await;
        let kept = cluster.get(&claims(), "vm1.blue").await?.context("the claim is gone")?;
        ensure!(addresses(&kept) == addresses(&before), "{kept:#}");
        // Another machine of the same name never shares a claim.
        cluster.delete(&vms(), "vm1", &DeleteParams::background()).await?;
        cluster.wait_until_gone(&vms(), "vm1").await?;
        let created = cluster.create_vm(&vm).await?;
        let claim = cluster
            .wait_for_claim("vm1.blue", |claim| {
                claim["metadata"]["ownerReferences"][0]["uid"] == created["metadata"]["uid"]
                    && addresses(claim).len() == 2
            })
            .await?;
        ensure!(claim["metadata"]["uid"] != before["metadata"]["uid"], "{claim:#}");
        Ok(())
    };
    outcome.await.with_context(|| replica.tail())
}

pub async fn an_unplugged_interface_frees_its_address(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "unplug").await?;
    let outcome = async {
        cluster.create_network("unplug", &["10.65.0.0/24"]).await?;
        let networks = [("blue", "unplug"), ("green", "unplug")];
        cluster.create_vm(&virtual_machine("vm1", &networks)).await?;
        let blue = cluster.wait_for_addresses("vm1.blue", 1).await?;
        let green = cluster.wait_for_addresses("vm1.green", 1).await?;
        let launcher = cluster.wait_for_launcher("vm1").await?;
        ensure!(references(&launcher)? == ["vm1.blue", "vm1.green"], "the same NAD twice: {launcher:#}");
        // While a pod refers to it, it stays.
        let template = json!({"spec": {"template": {"spec": instance_spec(&networks[..1])}}});
        cluster.merge_patch(&vms(), "vm1", &template).await?;
        tokio::time::sleep(QUIET).await;
        cluster.wait_for_addresses("vm1.green", 1).await?;
        cluster.merge_patch(&vms(), "vm1", &json!({"spec": {"runStrategy": "Halted"}})).await?;
        cluster.wait_until_gone(&vmis(), "vm1").await?;
        cluster.wait_until_gone(&claims(), "vm1.green").await?;
        let note = cluster.wait_for_event("VirtualMachine", "vm1", "IPAMClaimReleased").await?;
        ensure!(note.contains("interface green was unplugged"), "{note}");
        wait::until(TIMEOUT, "the address to be free", || async {
            let left = cluster.reservations(&green["metadata"]["uid"]).await?;
            ensure!(left.is_empty(), "{left:?}");
            Ok(Some(()))
        })
        .await?;
        let kept = cluster.wait_for_addresses("vm1.blue", 1).await?;
        ensure!(kept["metadata"]["uid"] == blue["metadata"]["uid"], "{kept:#}");
        Ok(())
    };
    outcome.await.with_context(|| replica.tail())
}

/// `--keep-unplugged-claims`
pub async fn an_unplugged_interface_keeps_its_claim_with_the_flag(lab: Lab) -> Result<()> {
    let cluster = TestCluster::new(&lab, "kept-claims").await?;
    let replica = cluster.start_leader_with(&lab, &["--keep-unplugged-claims"]).await?;
    let outcome = async {
        cluster.create_network("kept-claims", &["10.83.0.0/24"]).await?;
        let networks = [("blue", "kept-claims"), ("green", "kept-claims")];
        cluster.create_vm(&virtual_machine("vm1", &networks)).await?;
        let green = cluster.wait_for_addresses("vm1.green", 1).await?;
        cluster.wait_for_launcher("vm1").await?;
        let template = json!({"spec": {"template": {"spec": instance_spec(&networks[..1])}}});
        cluster.merge_patch(&vms(), "vm1", &template).await?;
        restart_vm(&cluster.client, &cluster.namespace, "vm1").await?;
        wait::until(TIMEOUT, "a launcher without the interface", || async {
            Ok((references(&cluster.wait_for_launcher("vm1").await?)? == ["vm1.blue"]).then_some(()))
        })
        .await?;
        tokio::time::sleep(QUIET).await;
        let kept = cluster.wait_for_addresses("vm1.green", 1).await?;
        ensure!(kept["metadata"]["uid"] == green["metadata"]["uid"], "{kept:#}");
        ensure!(addresses(&kept) == addresses(&green), "{kept:#}");
        cluster.delete(&vms(), "vm1", &DeleteParams::background()).await?;
        cluster.wait_until_gone(&claims(), "vm1.green").await
    };
    outcome.await.with_context(|| replica.tail())
}

/// The NAD of an interface of a running machine changes.
pub async fn an_interface_that_moves_to_another_network_gets_another_claim(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "moves").await?;
    let outcome = async {
        cluster.create_network("moves-a", &["10.84.0.0/24"]).await?;
        cluster.create_network("moves-b", &["10.85.0.0/24"]).await?;
        cluster.create_vm(&virtual_machine("vm1", &[("blue", "moves-a")])).await?;
        let old = cluster.wait_for_addresses("vm1.blue", 1).await?;
        let launcher = cluster.wait_for_launcher("vm1").await?;
        let template = json!({"spec": {"template": {"spec": instance_spec(&[("blue", "moves-b")])}}});
        cluster.merge_patch(&vms(), "vm1", &template).await?;
        let networks = instance_spec(&[("blue", "moves-b")])["networks"].clone();
        cluster.merge_patch(&vmis(), "vm1", &json!({"spec": {"networks": networks}})).await?;
        let new = cluster
            .wait_for_claim("vm1.blue", |claim| {
                claim["spec"]["network"] == "moves-b" && addresses(claim).len() == 1
            })
            .await?;
        ensure!(new["metadata"]["uid"] != old["metadata"]["uid"], "{new:#}");
        let note = cluster.wait_for_event("VirtualMachine", "vm1", "IPAMClaimReplaced").await?;
        ensure!(note.contains("interface blue moved to network moves-b"), "{note}");
        let reserved = cluster.reservations(&old["metadata"]["uid"]).await?;
        ensure!(reserved.len() == 1, "the old pod has the address: {reserved:?}");
        restart_vm(&cluster.client, &cluster.namespace, "vm1").await?;
        let name = launcher["metadata"]["name"].as_str().context("metadata.name")?;
        cluster.wait_until_gone(&pods(), name).await?;
        wait::until(TIMEOUT, "the old address to be free", || async {
            let left = cluster.reservations(&old["metadata"]["uid"]).await?;
            ensure!(left.is_empty(), "{left:?}");
            Ok(Some(()))
        })
        .await
    };
    outcome.await.with_context(|| replica.tail())
}

/// Claims of ours and of ipam-extensions.
pub async fn a_restarted_controller_writes_nothing(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "again").await?;
    cluster.create_network("again", &["10.66.0.0/24", "fd66::/64"]).await?;
    for number in 0..20 {
        cluster.create_vm(&virtual_machine(&format!("vm{number}"), &[("blue", "again")])).await?;
    }
    for number in 0..20 {
        cluster.wait_for_addresses(&format!("vm{number}.blue"), 2).await?;
        cluster.wait_for_launcher(&format!("vm{number}")).await?;
    }
    // As ipam-extensions writes it: without the name of the interface.
    let vm = cluster.get(&vms(), "vm0").await?.context("vm0")?;
    ensure!(vm["metadata"]["uid"].is_string());
    let list = cluster.api(&claims()).list(&ListParams::default()).await?;
    ensure!(list.items.len() == 20, "{}", list.items.len());
    let patch = json!({"spec": {"interface": ""}});
    for claim in &list.items {
        let name = claim.metadata.name.as_deref().context("metadata.name")?;
        cluster.api(&claims()).patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await?;
    }
    // The last write that the claims cause.
    let networks: Api<DynamicObject> = Api::all_with(cluster.client.clone(), &bridge_networks());
    wait::until(TIMEOUT, "the network to count its claims", || async {
        let network = networks.get("again").await?;
        Ok((network.data["status"]["ipam"]["claims"] == 20).then_some(()))
    })
    .await?;
    TestCluster::wait_until_quiet(&lab).await?;
    let before = claim_versions(&cluster).await?;
    drop(replica);
    let offset = lab.audit_offset()?;
    let replica = cluster.start_leader(&lab).await?;
    let outcome = async {
        tokio::time::sleep(QUIET * 2).await;
        let mut writes = TestCluster::controller_writes(&lab, offset)?;
        // The objects of other tests do not count.
        writes.retain(|write| write.contains(" again/") || write.contains(" /again"));
        ensure!(writes.is_empty(), "{writes:#?}");
        ensure!(claim_versions(&cluster).await? == before);
        Ok(())
    };
    outcome.await.with_context(|| replica.tail())
}

async fn claim_versions(cluster: &TestCluster) -> Result<Vec<(Option<String>, Option<String>, Value)>> {
    let list = cluster.api(&claims()).list(&ListParams::default()).await?;
    let versions = list.items.into_iter().map(|claim| {
        (claim.metadata.name, claim.metadata.resource_version, claim.data["status"]["ips"].clone())
    });
    Ok(versions.collect())
}
