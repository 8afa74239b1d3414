//! The webhooks on pods.

use anyhow::{Context as _, Result, ensure};
use lab::{Lab, kubevirt::pod_interface_name};
use serde_json::{Value, json};

use super::{
    cluster::{NETWORKS, claims, pods, references, virtual_machine},
    start_controller,
};

fn pod(name: &str, networks: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "annotations": {NETWORKS: networks}},
        "spec": {"containers": [{"name": "c", "image": "none"}]}})
}

pub async fn a_forged_reference_is_rejected(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "forged").await?;
    let outcome = async {
        cluster.create_network("forged", &["10.69.0.0/24"]).await?;
        cluster.create_vm(&virtual_machine("vm1", &[("blue", "forged")])).await?;
        cluster.wait_for_addresses("vm1.blue", 1).await?;
        let refer = |claim: &str| json!([{"name": "forged", "ipam-claim-reference": claim}]).to_string();
        let error =
            cluster.create(&pods(), &pod("thief", &refer("vm1.blue"))).await.err().context("accepted")?;
        let text = error.to_string();
        ensure!(
            text.contains(
                "pod is not a launcher of VirtualMachine forged/vm1, which owns IPAMClaim forged/vm1.blue; remove \
                 ipam-claim-reference from element [0] of k8s.v1.cni.cncf.io/networks"
            ),
            "{text}"
        );
        // A claim that does not exist yet, and one without a virtual machine, are no reason to reject a pod.
        cluster.create(&pods(), &pod("early", &refer("none"))).await?;
        let lone = json!({"apiVersion": "k8s.cni.cncf.io/v1alpha1", "kind": "IPAMClaim",
            "metadata": {"name": "lone"}, "spec": {"network": "forged", "interface": ""}});
        cluster.create(&claims(), &lone).await?;
        cluster.wait_for_addresses("lone", 1).await?;
        cluster.create(&pods(), &pod("user", &refer("lone"))).await?;
        Ok(())
    };
    outcome.await.with_context(|| replica.tail())
}

pub async fn broken_nads_affect_only_pods_that_use_them(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "broken").await?;
    let outcome = async {
        cluster.create_network("broken", &["10.70.0.0/24"]).await?;
        for number in 0..50 {
            let config = ["no JSON", "", "[1]", r#"{"name": 7, "subnets": ["a"]}"#][number % 4];
            cluster.create_nad(&format!("bad{number}"), config).await?;
        }
        let ovn = json!({"cniVersion": "0.4.0", "name": "tenant", "type": "ovn-k8s-cni-overlay", "topology": "layer2",
            "subnets": "192.168.0.0/24", "netAttachDefName": "broken/ovn", "allowPersistentIPs": true});
        cluster.create_nad("ovn", &ovn.to_string()).await?;
        cluster.create_vm(&virtual_machine("plain", &[])).await?;
        cluster
            .create_vm(&virtual_machine("vm1", &[("bad", "bad0"), ("good", "broken"), ("tenant", "ovn")]))
            .await?;
        cluster.wait_for_launcher("plain").await?;
        let launcher = cluster.wait_for_launcher("vm1").await?;
        ensure!(references(&launcher)? == ["vm1.good", "vm1.tenant"], "{launcher:#}");
        let text = launcher["metadata"]["annotations"][NETWORKS].as_str().context("annotation")?;
        let elements: Vec<Value> = serde_json::from_str(text)?;
        ensure!(elements[0]["interface"] == pod_interface_name("bad"), "{text}");
        cluster.wait_for_addresses("vm1.good", 1).await?;
        let note = cluster.wait_for_event("VirtualMachine", "vm1", "NetworkConfigInvalid").await?;
        ensure!(note.starts_with("NAD broken/bad0 of interface bad: "), "{note}");
        // The status of a claim on a network of OVN-Kubernetes is not ours.
        let claim =
            cluster.wait_for_claim("vm1.tenant", |claim| claim["spec"]["network"] == "tenant").await?;
        ensure!(claim.get("status").is_none(), "{claim:#}");
        let error = cluster
            .create(&pods(), &launcher_like("vm1", &launcher, "{not json"))
            .await
            .err()
            .context("accepted")?;
        ensure!(error.to_string().contains("failed to parse pod network selection elements"), "{error}");
        Ok(())
    };
    outcome.await.with_context(|| replica.tail())
}

/// It would run with an address that no claim has.
pub async fn a_launcher_whose_instance_does_not_exist_is_rejected(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "no-instance").await?;
    let outcome = async {
        cluster.create_network("no-instance", &["10.84.0.0/24"]).await?;
        cluster.create_vm(&virtual_machine("vm1", &[("blue", "no-instance")])).await?;
        let launcher = cluster.wait_for_launcher("vm1").await?;
        let networks = json!([{"name": "no-instance", "interface": pod_interface_name("blue")}]).to_string();
        let mut forged = launcher_like("vm1", &launcher, &networks);
        forged["metadata"]["ownerReferences"][0]["uid"] = json!("00000000-0000-0000-0000-000000000000");
        let error = cluster.create(&pods(), &forged).await.err().context("accepted")?.to_string();
        ensure!(
            error.contains(
                "VirtualMachineInstance no-instance/vm1 (UID 00000000-0000-0000-0000-000000000000), which owns this \
                 launcher pod, does not exist"
            ),
            "{error}"
        );
        // No instance owns it, so no webhook adds the reference that another one would reject.
        let mut unowned = launcher_like("vm1", &launcher, &networks);
        unowned["metadata"].as_object_mut().context("metadata")?.remove("ownerReferences");
        let created = serde_json::to_value(cluster.create(&pods(), &unowned).await?)?;
        ensure!(references(&created)?.is_empty(), "{created:#}");
        Ok(())
    };
    outcome.await.with_context(|| replica.tail())
}

/// A pod like the launcher, with other networks.
fn launcher_like(vm: &str, launcher: &Value, networks: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": format!("{vm}-copy"), "labels": launcher["metadata"]["labels"],
            "annotations": {"kubevirt.io/domain": vm, NETWORKS: networks},
            "ownerReferences": launcher["metadata"]["ownerReferences"]},
        "spec": {"containers": [{"name": "c", "image": "none"}]}})
}
