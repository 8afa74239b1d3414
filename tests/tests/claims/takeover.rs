//! Claims that another leader or ipam-extensions began: addresses and claims stay as they are.

use anyhow::{Context as _, Result, ensure};
use e2e::replica::{self, Replica};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use lab::{Lab, kubevirt::pod_interface_name, wait};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::{
    TIMEOUT,
    cluster::{
        NETWORKS, QUIET, TestCluster, addresses, claims, pods, references, resource, virtual_machine, vmis,
        vms,
    },
    start_controller,
};

const POLICY: &str = "no-claim-status";

/// Denies all writes to the status of claims in a namespace.
async fn deny_status(cluster: &TestCluster) -> Result<()> {
    let policies = admission("ValidatingAdmissionPolicy", "validatingadmissionpolicies");
    let rule = json!({"apiGroups": ["k8s.cni.cncf.io"], "apiVersions": ["*"], "operations": ["UPDATE"],
        "resources": ["ipamclaims/status"]});
    let labels = json!({"kubernetes.io/metadata.name": cluster.namespace});
    let policy = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": POLICY},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [rule], "namespaceSelector": {"matchLabels": labels}},
            "validations": [{"expression": "false", "message": "no addresses today"}],
        },
    });
    cluster.apply_in(&policies, None, &policy).await?;
    let binding = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": POLICY}, "spec": {"policyName": POLICY, "validationActions": ["Deny"]},
    });
    cluster.apply_in(&bindings(), None, &binding).await?;
    // A claim of a network that nothing allocates from, to see when the policy is in force.
    let probe = json!({"apiVersion": "k8s.cni.cncf.io/v1alpha1", "kind": "IPAMClaim",
        "metadata": {"name": "probe"}, "spec": {"network": "none", "interface": ""}});
    cluster.create(&claims(), &probe).await?;
    wait::until(TIMEOUT, "the policy to be in force", || async {
        let params = PatchParams { dry_run: true, ..PatchParams::default() };
        let status = json!({"status": {"ips": ["192.0.2.1/24"]}});
        let outcome = cluster.api(&claims()).patch_status("probe", &params, &Patch::Merge(&status)).await;
        Ok(outcome.is_err_and(|error| error.to_string().contains("no addresses today")).then_some(()))
    })
    .await
}

fn admission(kind: &str, plural: &str) -> kube::core::ApiResource {
    resource("admissionregistration.k8s.io", "v1", kind, plural)
}

fn bindings() -> kube::core::ApiResource {
    admission("ValidatingAdmissionPolicyBinding", "validatingadmissionpolicybindings")
}

/// The leader reserves an address, cannot publish it, and is paused. The next leader publishes that address.
pub async fn a_paused_leader_leaves_its_reservation_to_the_next_one(lab: Lab) -> Result<()> {
    let (cluster, first) = start_controller(&lab, "paused").await?;
    cluster.create_network("paused", &["10.71.0.0/24", "fd71::/64"]).await?;
    deny_status(&cluster).await?;
    let vm = virtual_machine("vm1", &[("blue", "paused")]);
    cluster.create_vm(&vm).await?;
    let claim = cluster.wait_for_claim("vm1.blue", |_| true).await?;
    let uid = &claim["metadata"]["uid"];
    let reserved = wait::until(TIMEOUT, "a reservation", || async {
        let found = cluster.reservations(uid).await?;
        Ok((found.len() == 2).then_some(found))
    })
    .await?;
    let note = cluster.wait_for_event("VirtualMachine", "vm1", "IPAMClaimRejected").await?;
    ensure!(
        note.starts_with("the API server rejected IPAMClaim paused/vm1.blue: ")
            && note.contains("no addresses today"),
        "{note}"
    );
    // A policy for one namespace stops no claim of another one.
    let other = TestCluster::new(&lab, "unpaused").await?;
    other.create_network("unpaused", &["10.72.0.0/24"]).await?;
    other.create_vm(&virtual_machine("vm1", &[("blue", "unpaused")])).await?;
    other.wait_for_addresses("vm1.blue", 1).await?;

    first.signal(Signal::SIGSTOP)?;
    let outcome = async {
        let api = kube::Api::<kube::api::DynamicObject>::all_with(cluster.client.clone(), &bindings());
        api.delete(POLICY, &DeleteParams::default()).await?;
        replica::set_webhook_endpoints(&lab, &[2])?;
        let second = Replica::start_ready(&lab, 2, &[]).await?;
        // It leads once the Lease of the paused leader has expired.
        let published = cluster.wait_for_addresses("vm1.blue", 2).await.with_context(|| second.tail())?;
        ensure!(published["metadata"]["uid"] == *uid, "{published:#}");
        ensure!(bare(&published) == reserved, "{published:#} does not have {reserved:?}");
        ensure!(cluster.reservations(uid).await? == reserved, "an address was reserved twice");
        // With the new leader stopped as well, only the old one could write.
        TestCluster::wait_until_quiet(&lab).await?;
        second.signal(Signal::SIGSTOP)?;
        let offset = lab.audit_offset()?;
        first.signal(Signal::SIGCONT)?;
        first.wait_until_it_does_not_lead().await?;
        let mut writes = TestCluster::controller_writes(&lab, offset)?;
        // Requests that were on their way when a replica was stopped time out.
        writes.retain(|write| !write.ends_with(" 504"));
        ensure!(writes.is_empty(), "{writes:#?}");
        ensure!(cluster.get(&claims(), "vm1.blue").await?.as_ref() == Some(&published));
        Ok(())
    };
    let outcome = outcome.await;
    drop(first);
    replica::set_webhook_endpoints(&lab, &[1])?;
    outcome
}

/// The addresses of a claim without prefix lengths, sorted.
fn bare(claim: &Value) -> Vec<String> {
    let mut ips: Vec<String> =
        addresses(claim).iter().map(|ip| ip.split('/').next().unwrap_or_default().to_owned()).collect();
    ips.sort();
    ips
}

/// A claim as ipam-extensions v0.6 writes it.
fn foreign_claim(vm: &Value, network: &str) -> Value {
    let name = vm["metadata"]["name"].as_str().unwrap_or_default();
    json!({
        "apiVersion": "k8s.cni.cncf.io/v1alpha1", "kind": "IPAMClaim",
        "metadata": {
            "name": format!("{name}.blue"), "labels": {"kubevirt.io/vm": name},
            "finalizers": ["kubevirt.io/persistent-ipam"],
            "ownerReferences": [{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": name,
                "uid": vm["metadata"]["uid"], "controller": true, "blockOwnerDeletion": true}],
        },
        "spec": {"network": network, "interface": ""},
    })
}

/// A claim that ipam-extensions keeps and that no plan of Patchbay has: of the primary network, or of an interface that was
/// unplugged. OVN-Kubernetes has allocated.
async fn create_kept_claim(cluster: &TestCluster, vm: &Value, interface: &str) -> Result<String> {
    let mut claim = foreign_claim(vm, "tenant");
    let name = format!("{}.{interface}", vm["metadata"]["name"].as_str().unwrap_or_default());
    claim["metadata"]["name"] = json!(name);
    cluster.create(&claims(), &claim).await?;
    let status = json!({"status": {"ips": ["192.168.0.200/24"]}});
    cluster.api(&claims()).patch_status(&name, &PatchParams::default(), &Patch::Merge(&status)).await?;
    Ok(name)
}

/// Half of the machines are on a network of OVN-Kubernetes, which has allocated; the others are on a BridgeNetwork. All have a
/// claim of the primary network, and one of an interface that was unplugged.
pub async fn a_hundred_claims_of_ipam_extensions_are_taken_over_unchanged(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "swap").await?;
    cluster.create_network("swap", &["10.73.0.0/24"]).await?;
    let ovn = json!({"cniVersion": "0.4.0", "name": "tenant", "type": "ovn-k8s-cni-overlay", "topology": "layer2",
        "subnets": "192.168.0.0/24", "netAttachDefName": "swap/ovn", "allowPersistentIPs": true});
    cluster.create_nad("ovn", &ovn.to_string()).await?;
    drop(replica);
    let mut kept = Vec::new();
    for number in 0..100 {
        let (nad, network) = if number % 2 == 0 { ("ovn", "tenant") } else { ("swap", "swap") };
        // A stopped machine: its claim exists before the instance starts.
        let mut vm = virtual_machine(&format!("vm{number}"), &[("blue", nad)]);
        vm["spec"]["runStrategy"] = json!("Halted");
        let vm = cluster.create_vm(&vm).await?;
        cluster.create(&claims(), &foreign_claim(&vm, network)).await?;
        for interface in ["default", "gone"] {
            kept.push(create_kept_claim(&cluster, &vm, interface).await?);
        }
        if nad == "ovn" {
            let status = json!({"status": {"ips": [format!("192.168.0.{}/24", number + 10)],
                "ownerPod": {"name": "virt-launcher-old"}}});
            let name = format!("vm{number}.blue");
            cluster
                .api(&claims())
                .patch_status(&name, &PatchParams::default(), &Patch::Merge(&status))
                .await?;
        }
    }
    // One more machine stays stopped.
    let mut vm = virtual_machine("stopped", &[]);
    vm["spec"]["runStrategy"] = json!("Halted");
    let vm = cluster.create_vm(&vm).await?;
    for interface in ["default", "gone"] {
        kept.push(create_kept_claim(&cluster, &vm, interface).await?);
    }
    let before = claims_without_status(&cluster).await?;
    let mut kept_before = Vec::new();
    for name in &kept {
        kept_before.push(cluster.get(&claims(), name).await?.context("a claim")?);
    }
    let replica = cluster.start_leader(&lab).await?;
    let outcome = async {
        for number in 0..100 {
            let always = json!({"spec": {"runStrategy": "Always"}});
            cluster.merge_patch(&vms(), &format!("vm{number}"), &always).await?;
        }
        for number in 0..100 {
            let name = format!("vm{number}.blue");
            let launcher = cluster.wait_for_launcher(&format!("vm{number}")).await?;
            ensure!(references(&launcher)? == [name.as_str()], "{launcher:#}");
            let claim = cluster.wait_for_addresses(&name, 1).await?;
            if number % 2 == 0 {
                let expected = json!({"ips": [format!("192.168.0.{}/24", number + 10)],
                    "ownerPod": {"name": "virt-launcher-old"}});
                ensure!(claim["status"] == expected, "the status is of OVN-Kubernetes: {claim:#}");
            }
        }
        tokio::time::sleep(QUIET).await;
        let after = claims_without_status(&cluster).await?;
        ensure!(after == before, "a claim was changed");
        for (name, before) in kept.iter().zip(kept_before) {
            let after = cluster.get(&claims(), name).await?;
            ensure!(after.as_ref() == Some(&before), "{name} was changed: {after:#?}");
        }
        Ok(())
    };
    outcome.await.with_context(|| replica.tail())
}

const IPAM_EXTENSIONS: &str = "kubevirt-ipam-controller-mutating-webhook-configuration";

/// While ipam-extensions runs, it removes its finalizer itself. Later a pod that uses the claim keeps it.
pub async fn a_claim_of_the_primary_network_goes_after_ipam_extensions_and_its_pods(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "primary").await?;
    let outcome = async {
        let webhooks = admission("MutatingWebhookConfiguration", "mutatingwebhookconfigurations");
        let webhook = json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration",
            "metadata": {"name": IPAM_EXTENSIONS}, "webhooks": []});
        cluster.apply_in(&webhooks, None, &webhook).await?;
        for (vm, interface, annotation, value) in [
            ("vm1", "default", "k8s.ovn.org/primary-udn-ipamclaim", json!("vm1.default")),
            ("vm2", "default", "v1.multus-cni.io/default-network", json!(
                json!([{"name": "default", "namespace": "ovn-kubernetes", "ipam-claim-reference": "vm2.default"}]).to_string()
            )),
        ] {
            let object = cluster.create_vm(&virtual_machine(vm, &[])).await?;
            let launcher = cluster.wait_for_launcher(vm).await?;
            let pod = launcher["metadata"]["name"].as_str().context("metadata.name")?;
            let annotations = json!({"metadata": {"annotations": {annotation: value}}});
            cluster.merge_patch(&pods(), pod, &annotations).await?;
            let claim = create_kept_claim(&cluster, &object, interface).await?;
            cluster.delete(&claims(), &claim, &DeleteParams::background()).await?;
        }
        let exist = async || {
            for claim in ["vm1.default", "vm2.default"] {
                let found =
                    cluster.get(&claims(), claim).await?.with_context(|| format!("{claim} is gone"))?;
                ensure!(
                    found["metadata"]["finalizers"] == json!(["kubevirt.io/persistent-ipam"]),
                    "{found:#}"
                );
            }
            anyhow::Ok(())
        };
        let api = kube::Api::<kube::api::DynamicObject>::all_with(cluster.client.clone(), &webhooks);
        // ipam-extensions runs, and no pod uses the claim of vm1 any more.
        cluster.merge_patch(&vms(), "vm1", &json!({"spec": {"runStrategy": "Halted"}})).await?;
        cluster.wait_until_gone(&vmis(), "vm1").await?;
        tokio::time::sleep(QUIET).await;
        exist().await?;
        api.delete(IPAM_EXTENSIONS, &DeleteParams::default()).await?;
        cluster.wait_until_gone(&claims(), "vm1.default").await?;
        // A pod uses the claim of vm2.
        let used = cluster.get(&claims(), "vm2.default").await?.context("the claim of vm2 is gone")?;
        ensure!(used["metadata"]["finalizers"] == json!(["kubevirt.io/persistent-ipam"]), "{used:#}");
        cluster.merge_patch(&vms(), "vm2", &json!({"spec": {"runStrategy": "Halted"}})).await?;
        cluster.wait_until_gone(&claims(), "vm2.default").await
    };
    outcome.await.with_context(|| replica.tail())
}

/// All claims without what a write of the status and the annotations of Patchbay change.
async fn claims_without_status(cluster: &TestCluster) -> Result<Vec<Value>> {
    let list = cluster.api(&claims()).list(&ListParams::default()).await?;
    list.items
        .into_iter()
        .map(|mut claim| {
            claim.metadata.managed_fields = None;
            claim.metadata.resource_version = None;
            if let Some(annotations) = &mut claim.metadata.annotations {
                annotations.retain(|key, _| !key.starts_with("patchbay.dev/"));
                if annotations.is_empty() {
                    claim.metadata.annotations = None;
                }
            }
            let mut claim = serde_json::to_value(claim)?;
            claim.as_object_mut().context("an object")?.remove("status");
            Ok(claim)
        })
        .collect()
}

/// The network and the virtual machine of the README of kubevirt-ipam-claims, in the namespace of the test.
pub async fn the_example_of_ipam_extensions_gets_its_claim_and_reference(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "example").await?;
    let outcome = async {
        let config = json!({"cniVersion": "0.3.1", "name": "tenantblue", "netAttachDefName": "example/mynet",
            "topology": "layer2", "type": "ovn-k8s-cni-overlay", "subnets": "192.168.200.0/24",
            "excludeSubnets": "192.168.200.1/32", "allowPersistentIPs": true});
        cluster.create_nad("mynet", &config.to_string()).await?;
        let devices = json!({
            "disks": [{"name": "containerdisk", "disk": {"bus": "virtio"}}, {"name": "cloudinitdisk", "disk": {"bus": "virtio"}}],
            "interfaces": [{"name": "anet", "bridge": {}}], "rng": {},
        });
        let volumes = json!([
            {"name": "containerdisk", "containerDisk": {"image": "localhost/lab:1"}},
            {"name": "cloudinitdisk", "cloudInitNoCloud": {"userData": "#cloud-config\npassword: fedora\n"}},
        ]);
        let spec = json!({
            "domain": {"devices": devices, "resources": {"requests": {"memory": "1024M"}}},
            "networks": [{"name": "anet", "multus": {"networkName": "example/mynet"}}],
            "terminationGracePeriodSeconds": 0, "volumes": volumes,
        });
        let vm = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine",
            "metadata": {"name": "vm-a", "labels": {"kubevirt.io/vm": "vm-a"}},
            "spec": {"running": true, "template": {"metadata": {"name": "vm-a", "namespace": "example"}, "spec": spec}},
        });
        cluster.create_vm(&vm).await?;
        let expected = json!({"network": "tenantblue", "interface": pod_interface_name("anet")});
        let claim = cluster.wait_for_claim("vm-a.anet", |claim| claim["spec"] == expected).await?;
        let launcher = cluster.wait_for_launcher("vm-a").await?;
        ensure!(references(&launcher)? == ["vm-a.anet"], "{launcher:#}");
        let text = launcher["metadata"]["annotations"][NETWORKS].as_str().context("annotation")?;
        let elements: Vec<Value> = serde_json::from_str(text)?;
        ensure!(elements[0]["name"] == "mynet" && elements[0]["namespace"] == "example", "{text}");
        ensure!(claim.get("status").is_none(), "the status is of OVN-Kubernetes: {claim:#}");
        // A pod on the network of another namespace gets no reference: OVN-Kubernetes would not find the claim.
        let other = TestCluster::new(&lab, "example-b").await?;
        other.create_vm(&virtual_machine("vm-b", &[("anet", "example/mynet")])).await?;
        let launcher = other.wait_for_launcher("vm-b").await?;
        ensure!(references(&launcher)?.is_empty(), "{launcher:#}");
        let note = other.wait_for_event("VirtualMachine", "vm-b", "ForeignNamespaceNetwork").await?;
        ensure!(note.contains("example/mynet"), "{note}");
        Ok(())
    };
    outcome.await.with_context(|| replica.tail())
}
