//! Claims that were created from a backup, and claims that nothing of KubeVirt owns.

use anyhow::{Context as _, Result, ensure};
use kube::api::DeleteParams;
use lab::{Lab, wait};
use serde_json::{Value, json};

use super::{
    TIMEOUT,
    cluster::{
        NETWORKS, QUIET, TestCluster, addresses, claims, instance_spec, pods, references, resource,
        virtual_machine, vms,
    },
    start_controller,
};

/// What a backup keeps of a claim: no owner, no UID and no status.
fn backup(claim: &Value) -> Value {
    let metadata = &claim["metadata"];
    json!({
        "apiVersion": "k8s.cni.cncf.io/v1alpha1", "kind": "IPAMClaim", "spec": claim["spec"],
        "metadata": {"name": metadata["name"], "labels": metadata["labels"], "annotations": metadata["annotations"],
            "finalizers": metadata["finalizers"]},
    })
}

/// With another address in its record, for the claim of another machine.
fn forged(claim: &Value, vm: &str, address: &str) -> Value {
    let mut forged = backup(claim);
    forged["metadata"]["name"] = json!(format!("{vm}.blue"));
    forged["metadata"]["labels"] = json!({"kubevirt.io/vm": vm});
    forged["metadata"]["annotations"]["patchbay.dev/addresses"] =
        json!(json!({"uid": "x", "ips": [address]}).to_string());
    forged
}

async fn delete_machine(cluster: &TestCluster, name: &str, claim: &Value) -> Result<()> {
    cluster.delete(&vms(), name, &DeleteParams::background()).await?;
    cluster.wait_until_gone(&claims(), &format!("{name}.blue")).await?;
    wait::until(TIMEOUT, "the address to be free", || async {
        Ok(cluster.reservations(&claim["metadata"]["uid"]).await?.is_empty().then_some(()))
    })
    .await
}

pub async fn a_restored_claim_waits_for_its_machine_and_keeps_its_addresses(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "restored").await?;
    let outcome = async {
        cluster.create_network("restored", &["10.85.0.0/24"]).await?;
        let mut before = Vec::new();
        for name in ["vm0", "vm1", "vm2"] {
            cluster.create_vm(&virtual_machine(name, &[("blue", "restored")])).await?;
            before.push(cluster.wait_for_addresses(&format!("{name}.blue"), 1).await?);
        }
        // vm1 and vm2 have addresses that a new claim would not get.
        for (name, claim) in ["vm0", "vm1", "vm2"].into_iter().zip(&before) {
            delete_machine(&cluster, name, claim).await?;
        }
        for claim in &before[1..] {
            cluster.create(&claims(), &backup(claim)).await?;
        }
        let note = cluster.wait_for_event("IPAMClaim", "vm1.blue", "IPAMClaimKept").await?;
        ensure!(
            note.contains("virtual machine restored/vm1 does not exist; IPAMClaim restored/vm1.blue is kept"),
            "{note}"
        );
        tokio::time::sleep(QUIET).await;
        let waiting = cluster.get(&claims(), "vm1.blue").await?.context("the claim is gone")?;
        ensure!(waiting["metadata"].get("deletionTimestamp").is_none(), "{waiting:#}");
        // One machine is running, one is restored in the stopped state.
        cluster.create_vm(&virtual_machine("vm1", &[("blue", "restored")])).await?;
        let mut stopped = virtual_machine("vm2", &[("blue", "restored")]);
        stopped["spec"]["runStrategy"] = json!("Halted");
        let stopped = cluster.create_vm(&stopped).await?;
        for (name, before) in ["vm1.blue", "vm2.blue"].into_iter().zip(&before[1..]) {
            let after = cluster.wait_for_addresses(name, 1).await?;
            ensure!(addresses(&after) == addresses(before), "{after:#} {before:#}");
        }
        let after = cluster.wait_for_addresses("vm1.blue", 1).await?;
        ensure!(after["metadata"]["uid"] == waiting["metadata"]["uid"], "another claim: {after:#}");
        let launcher = cluster.wait_for_launcher("vm1").await?;
        ensure!(references(&launcher)? == ["vm1.blue"], "{launcher:#}");
        let after = cluster.wait_for_addresses("vm2.blue", 1).await?;
        ensure!(after["metadata"]["ownerReferences"][0]["uid"] == stopped["metadata"]["uid"], "{after:#}");
        forged_records(&cluster, &after).await
    };
    outcome.await.with_context(|| replica.tail())
}

/// A record gives no address that another claim has, and none outside of the subnets.
async fn forged_records(cluster: &TestCluster, other: &Value) -> Result<()> {
    let taken = addresses(other).into_iter().next().context("an address")?;
    for (vm, address, reason, text) in [
        ("thief", taken.as_str(), "IPAddressConflict", "belongs to IPAMClaim restored/vm2.blue"),
        (
            "outsider",
            "10.9.9.9/24",
            "InternalError",
            "remove annotation patchbay.dev/addresses of the IPAMClaim",
        ),
    ] {
        cluster.create(&claims(), &forged(other, vm, address)).await?;
        cluster.create_vm(&virtual_machine(vm, &[("blue", "restored")])).await?;
        let message = cluster.wait_for_failure(&format!("{vm}.blue"), reason).await?;
        ensure!(message.contains(text), "{message}");
    }
    // Another machine of the namespace does not get it either.
    let networks = instance_spec(&[("blue", "restored")])["networks"].clone();
    ensure!(networks[1]["multus"]["networkName"] == "restored", "{networks}");
    ensure!(addresses(&cluster.wait_for_addresses("vm2.blue", 1).await?) == addresses(other));
    Ok(())
}

/// Nothing of KubeVirt owns them, and they have the finalizer.
pub async fn claims_without_a_machine_do_not_keep_their_namespace(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "ownerless").await?;
    let outcome = async {
        let owner = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "owner"}});
        let owner = cluster.create(&resource("", "v1", "ConfigMap", "configmaps"), &owner).await?;
        let reference =
            json!({"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner.metadata.uid});
        for (name, metadata) in [
            ("plain", json!({})),
            ("owned", json!({"ownerReferences": [reference]})),
            ("labelled", json!({"ownerReferences": [reference], "labels": {"kubevirt.io/vm": "vm1"}})),
            ("used", json!({})),
        ] {
            let mut claim = json!({"apiVersion": "k8s.cni.cncf.io/v1alpha1", "kind": "IPAMClaim", "metadata": metadata,
                "spec": {"network": "none", "interface": ""}});
            claim["metadata"]["name"] = json!(name);
            claim["metadata"]["finalizers"] = json!(["kubevirt.io/persistent-ipam"]);
            cluster.create(&claims(), &claim).await?;
        }
        let networks = json!([{"name": "none", "ipam-claim-reference": "used"}]).to_string();
        let pod = json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "user", "annotations": {NETWORKS: networks}},
            "spec": {"containers": [{"name": "c", "image": "none"}]}});
        cluster.create(&pods(), &pod).await?;
        cluster.delete(&claims(), "used", &DeleteParams::background()).await?;
        tokio::time::sleep(QUIET).await;
        cluster.get(&claims(), "used").await?.context("the claim of a live pod is gone")?;
        super::life::delete_namespace(&cluster).await?;
        super::life::wait_for_namespace(&cluster).await
    };
    outcome.await.with_context(|| replica.tail())
}
