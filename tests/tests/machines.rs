//! Virtual machines keep their addresses: on two nodes, with KubeVirt's own controller.
#![allow(clippy::print_stdout, reason = "a test without the standard harness prints its measurements")]

#[path = "machines/rollout.rs"]
mod rollout;
#[path = "machines/sharing.rs"]
mod sharing;

use std::{process::ExitCode, time::Duration};

use anyhow::{Context as _, Result, ensure};
use e2e::{
    Suite,
    bridge::{
        attached_pod, attachment_for, delete_network, exec_in_pod_netns, networks, start_network,
        wait_deleted, wait_reachable,
    },
    hotplug::create_nad,
    machine::{AttachedNic, TestVm, attached, has_ended},
    patchbay,
    quiet::wait_until_quiet,
    run_suites, tests,
};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Client, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams},
};
use lab::{
    Lab, Topology,
    audit::AuditedRequest,
    kubevirt::{MigrationOutcome, VirtHandler, pod_interface_name, restart_vm},
    test_namespace::{TestNamespace, with_namespace},
    wait,
};
use rollout::no_launcher_is_rejected_during_a_rolling_update;
use serde_json::{Value, json};
use sharing::machines_and_pods_share_a_subnet_to_its_last_address;

/// The timeout for waits that are not about time.
const TIMEOUT: Duration = Duration::from_secs(90);
/// How soon the remaining pod announces an address after the other holder has ended.
const ANNOUNCE_LIMIT: Duration = Duration::from_secs(1);
/// How soon the address of an unplugged NIC can be used again.
const UNPLUG_LIMIT: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    run_suites(&[Suite {
        name: "t-machines",
        topology: Topology::KubeVirt(2),
        set_up: |lab| Box::pin(async move { patchbay::install(&lab).await }),
        tests: tests![
            a_machine_keeps_its_addresses_over_restart_and_migration
                + another_main_plugin_with_patchbay_ipam_keeps_addresses
                + an_instance_without_references_gets_none_until_it_restarts
                + machines_and_pods_share_a_subnet_to_its_last_address,
            a_peer_reaches_the_source_during_a_migration_and_the_target_after_it
                + a_failed_migration_leaves_the_addresses_at_the_source
                + the_address_of_an_unplugged_nic_can_be_used_again,
            a_pod_on_another_network_causes_no_request,
            no_launcher_is_rejected_during_a_rolling_update,
        ],
    }])
}

/// A network over both nodes.
fn spec(ns: &TestNamespace, vni: u32, subnets: [&str; 2], persistent: bool) -> Value {
    let ipam = json!({"subnets": subnets, "persistent": persistent});
    json!({"overlay": {"vni": vni}, "attachment": attachment_for(ns), "ipam": ipam})
}

async fn end_network(client: &Client, name: &str) -> Result<()> {
    delete_network(client, name).await?;
    wait_deleted(client, name).await.map(drop)
}

/// The addresses of a claim, without prefix lengths.
fn claimed(claim: &api::IPAMClaim) -> Vec<String> {
    let ips = claim.status.iter().flat_map(|status| &status.ips);
    ips.filter_map(|net| net.split('/').next()).map(str::to_owned).collect()
}

fn texts(nic: &AttachedNic) -> Vec<String> {
    nic.ips.iter().map(ToString::to_string).collect()
}

/// Waits until the claim names the pod that has its addresses.
async fn wait_owner_pod(vm: &TestVm<'_>, pod: &Pod) -> Result<()> {
    wait::until(TIMEOUT, &format!("ownerPod of the claim of {}", vm.name), || async {
        let claim = vm.claim("blue").await?.context("the claim")?;
        let owner = claim.status.and_then(|status| status.owner_pod);
        Ok((owner.map(|owner| owner.name) == Some(pod.name_any())).then_some(()))
    })
    .await
}

async fn a_machine_keeps_its_addresses_over_restart_and_migration(lab: Lab) -> Result<()> {
    with_namespace(&lab, "machine-kept", async |ns: &TestNamespace| {
        let _handler = VirtHandler::start(&lab, Some(&ns.namespace)).await?;
        let subnets = ["10.71.0.0/24", "fd71::/64"];
        start_network(&ns.client, "kept", spec(ns, 71, subnets, true)).await?;
        Box::pin(ns.start_pod(attached_pod("peer", "node-1", "kept"))).await?;
        let vm = TestVm { ns, name: "kept" };
        vm.create(&[("blue", "kept", None)]).await?;
        let mut instance = vm.wait_running(None).await?;
        let first = vm.wait_attached("blue").await?;
        ensure!(first.ips.len() == 2, "{first:?}");
        let claim = vm.claim("blue").await?.context("the claim")?;
        ensure!(claimed(&claim) == texts(&first), "{claim:?}");
        wait_owner_pod(&vm, &vm.launcher().await?).await?;

        restart_vm(&ns.client, &ns.namespace, vm.name).await?;
        instance = vm.wait_running(Some(&instance)).await?;
        ensure!(vm.wait_attached("blue").await? == first, "a restart keeps addresses and MAC address");
        for address in texts(&first) {
            wait_reachable(ns, "peer", &address).await?;
        }
        vm.stop().await?;
        vm.patch(json!({"runStrategy": "Always"})).await?;
        instance = vm.wait_running(Some(&instance)).await?;
        ensure!(vm.wait_attached("blue").await? == first, "stop and start keep addresses and MAC address");

        for migration in ["there", "back"] {
            let source = vm.launcher().await?;
            vm.start_migration(migration).await?;
            vm.wait_migration(migration, "Succeeded").await?;
            let now = vm.wait_attached("blue").await?;
            ensure!(now.ips == first.ips, "{migration}: {now:?}");
            ensure!(vm.launcher().await?.uid() != source.uid());
            wait_owner_pod(&vm, &vm.launcher().await?).await?;
        }
        let same = vm.instance().await?.context("no instance")?;
        ensure!(same["metadata"]["uid"] == instance["metadata"]["uid"], "a migration keeps the instance");
        let after = vm.claim("blue").await?.context("the claim")?;
        ensure!(after.uid() == claim.uid() && claimed(&after) == texts(&first), "{after:?}");
        Ok(())
    })
    .await?;
    end_network(&lab.client().await?, "kept").await
}

async fn another_main_plugin_with_patchbay_ipam_keeps_addresses(lab: Lab) -> Result<()> {
    with_namespace(&lab, "machine-macvlan", async |ns: &TestNamespace| {
        let _handler = VirtHandler::start(&lab, Some(&ns.namespace)).await?;
        let ipam = json!({"subnets": ["10.72.0.0/24", "fd72::/64"]});
        start_network(&ns.client, "addresses", json!({"ipam": ipam})).await?;
        let plugin = json!({
            "type": "macvlan", "master": "eth1", "mode": "bridge",
            "ipam": {"type": "patchbay-ipam", "network": "addresses"},
        });
        // The flag is a key of the list, which the plugins do not get.
        let config =
            json!({"cniVersion": "1.0.0", "name": "mac", "allowPersistentIPs": true, "plugins": [plugin]});
        create_nad(ns, "mac", &config).await?;
        let vm = TestVm { ns, name: "foreign" };
        vm.create(&[("blue", "mac", None)]).await?;
        let instance = vm.wait_running(None).await?;
        let first = vm.wait_attached("blue").await?;
        ensure!(first.ips.len() == 2, "{first:?}");
        restart_vm(&ns.client, &ns.namespace, vm.name).await?;
        vm.wait_running(Some(&instance)).await?;
        ensure!(vm.wait_attached("blue").await?.ips == first.ips, "a restart keeps the addresses");
        vm.start_migration("move").await?;
        vm.wait_migration("move", "Succeeded").await?;
        ensure!(vm.wait_attached("blue").await?.ips == first.ips, "a migration keeps the addresses");
        let target = vm.launcher().await?;
        let interface = pod_interface_name("blue");
        let shown = exec_in_pod_netns(&lab, &target, &["ip", "address", "show", &interface])?;
        // What macvlan does with the addresses is its own; docs/persistent-ips.md describes it.
        println!("macvlan of the target: {shown}");
        Ok(())
    })
    .await?;
    end_network(&lab.client().await?, "addresses").await
}

/// The references in the networks annotation of a pod.
fn references(pod: &Pod) -> Result<Vec<Option<String>>> {
    let text = pod.annotations().get("k8s.v1.cni.cncf.io/networks").map_or("[]", String::as_str);
    let elements: Vec<Value> = serde_json::from_str(text)?;
    let reference = |element: &Value| element["ipam-claim-reference"].as_str().map(str::to_owned);
    Ok(elements.iter().map(reference).collect())
}

async fn an_instance_without_references_gets_none_until_it_restarts(lab: Lab) -> Result<()> {
    with_namespace(&lab, "machine-later", async |ns: &TestNamespace| {
        let _handler = VirtHandler::start(&lab, Some(&ns.namespace)).await?;
        start_network(&ns.client, "later", spec(ns, 73, ["10.73.0.0/24", "fd73::/64"], false)).await?;
        let vm = TestVm { ns, name: "later" };
        vm.create(&[("blue", "later", None)]).await?;
        let instance = vm.wait_running(None).await?;
        vm.wait_attached("blue").await?;
        let patch = json!({"spec": {"ipam": {"persistent": true}}});
        networks(&ns.client).patch("later", &PatchParams::default(), &Patch::Merge(&patch)).await?;
        wait::until(TIMEOUT, "the NAD to have persistent addresses", || async {
            let arguments = ["get", "net-attach-def", "later", "-o", "jsonpath={.spec.config}"];
            let nad = lab.kubectl(&[&["-n", &ns.namespace], &arguments[..]].concat())?;
            Ok(nad.contains("allowPersistentIPs").then_some(()))
        })
        .await?;
        vm.start_migration("move").await?;
        vm.wait_migration("move", "Succeeded").await?;
        ensure!(references(&vm.launcher().await?)? == [None], "all pods of an instance are alike");
        ensure!(vm.wait_attached("blue").await?.ips.len() == 2 && vm.claim("blue").await?.is_none());
        restart_vm(&ns.client, &ns.namespace, vm.name).await?;
        vm.wait_running(Some(&instance)).await?;
        let kept = vm.wait_attached("blue").await?;
        ensure!(references(&vm.launcher().await?)? == [Some("later.blue".to_owned())]);
        let claim = vm.claim("blue").await?.context("the claim")?;
        ensure!(claimed(&claim) == texts(&kept), "{claim:?}");
        Ok(())
    })
    .await?;
    end_network(&lab.client().await?, "later").await
}

/// The MAC address that a peer resolves an address to, after it forgot the one before.
fn resolve(ns: &TestNamespace, peer: &str, address: &str) -> Result<String> {
    ns.exec(peer, &["ip", "neighbour", "flush", "dev", "net1"])?;
    ns.exec(peer, &["ping", "-c", "1", "-W", "5", address]).with_context(|| format!("ping {address}"))?;
    ns.exec(peer, &["ip", "neighbour", "show", address, "dev", "net1"])
}

async fn a_peer_reaches_the_source_during_a_migration_and_the_target_after_it(lab: Lab) -> Result<()> {
    with_namespace(&lab, "machine-peer", async |ns: &TestNamespace| {
        let handler = VirtHandler::start(&lab, Some(&ns.namespace)).await?;
        start_network(&ns.client, "peers", spec(ns, 74, ["10.74.0.0/24", "fd74::/64"], true)).await?;
        let peers = ["peer-1", "peer-2"];
        for (peer, node) in peers.into_iter().zip(["node-1", "node-2"]) {
            ns.start_pod(attached_pod(peer, node, "peers")).await?;
        }
        let vm = TestVm { ns, name: "moved" };
        vm.create(&[("blue", "peers", None)]).await?;
        vm.wait_running(None).await?;
        let (first, source) = (vm.wait_attached("blue").await?, vm.launcher().await?);
        for address in texts(&first) {
            for peer in peers {
                wait_reachable(ns, peer, &address).await?;
            }
        }
        handler.set_migrations(MigrationOutcome::Hold);
        vm.start_migration("move").await?;
        let (_, target) = vm.wait_target(&source, "blue").await?;
        ensure!(target.ips == first.ips, "both pods have the addresses: {target:?}");
        ensure!(target.mac != first.mac, "they have different MAC addresses");
        for round in 0..10 {
            for address in texts(&first) {
                for peer in peers {
                    let found = resolve(ns, peer, &address)?;
                    ensure!(found.contains(&first.mac), "round {round}, {peer}: {found}, not {}", first.mac);
                }
            }
        }
        // An announcement changes the entry of a neighbour, and creates none.
        for peer in peers {
            for address in texts(&first) {
                ns.exec(peer, &["ping", "-c", "1", "-W", "5", &address])?;
            }
        }
        handler.set_migrations(MigrationOutcome::Succeed);
        vm.wait_migration("move", "Succeeded").await?;
        wait::until(TIMEOUT, "the source pod to end", || async {
            let pod = ns.pods().get_opt(&source.name_any()).await?;
            Ok(pod.is_none_or(|pod| has_ended(&pod)).then_some(()))
        })
        .await?;
        // Without any traffic from the peer.
        let ((), took) = wait::within(ANNOUNCE_LIMIT, "the peers to learn the target", || async {
            for address in texts(&first) {
                for peer in peers {
                    let found = ns.exec(peer, &["ip", "neighbour", "show", &address, "dev", "net1"])?;
                    ensure!(found.contains(&target.mac), "{peer}: {found}, not {}", target.mac);
                }
            }
            Ok(Some(()))
        })
        .await?;
        println!("announced {took:?} after the source ended");
        for address in texts(&first) {
            for peer in peers {
                let found = resolve(ns, peer, &address)?;
                ensure!(found.contains(&target.mac), "{peer}: {found}, not {}", target.mac);
            }
        }
        Ok(())
    })
    .await?;
    end_network(&lab.client().await?, "peers").await
}

async fn a_failed_migration_leaves_the_addresses_at_the_source(lab: Lab) -> Result<()> {
    with_namespace(&lab, "machine-failed", async |ns: &TestNamespace| {
        let handler = VirtHandler::start(&lab, Some(&ns.namespace)).await?;
        start_network(&ns.client, "failed", spec(ns, 75, ["10.75.0.0/24", "fd75::/64"], true)).await?;
        ns.start_pod(attached_pod("peer", "node-1", "failed")).await?;
        let vm = TestVm { ns, name: "stayed" };
        vm.create(&[("blue", "failed", None)]).await?;
        vm.wait_running(None).await?;
        let (first, source) = (vm.wait_attached("blue").await?, vm.launcher().await?);
        handler.set_migrations(MigrationOutcome::Hold);
        vm.start_migration("fail").await?;
        vm.wait_target(&source, "blue").await?;
        handler.set_migrations(MigrationOutcome::Fail);
        vm.wait_migration("fail", "Failed").await?;
        wait::until(TIMEOUT, "the target pod to end", || async {
            Ok(vm.live_pods().await?.iter().all(|pod| pod.uid() == source.uid()).then_some(()))
        })
        .await?;
        ensure!(attached(&vm.launcher().await?, "blue")?.as_ref() == Some(&first), "the source is as before");
        for address in texts(&first) {
            let found = resolve(ns, "peer", &address)?;
            ensure!(found.contains(&first.mac), "{found}, not {}", first.mac);
        }
        let claim = vm.claim("blue").await?.context("the claim")?;
        ensure!(claimed(&claim) == texts(&first), "{claim:?}");
        // The next migration succeeds.
        handler.set_migrations(MigrationOutcome::Succeed);
        vm.start_migration("move").await?;
        vm.wait_migration("move", "Succeeded").await?;
        let moved = vm.wait_attached("blue").await?;
        ensure!(moved.ips == first.ips, "{moved:?}");
        for address in texts(&first) {
            wait_reachable(ns, "peer", &address).await?;
        }
        Ok(())
    })
    .await?;
    end_network(&lab.client().await?, "failed").await
}

async fn the_address_of_an_unplugged_nic_can_be_used_again(lab: Lab) -> Result<()> {
    with_namespace(&lab, "machine-unplug", async |ns: &TestNamespace| {
        let _handler = VirtHandler::start(&lab, Some(&ns.namespace)).await?;
        start_network(&ns.client, "unplugged", spec(ns, 76, ["10.76.0.0/24", "fd76::/64"], true)).await?;
        let vm = TestVm { ns, name: "unplugged" };
        vm.create(&[("blue", "unplugged", None)]).await?;
        vm.wait_running(None).await?;
        let blue = vm.wait_attached("blue").await?;
        // A NIC of the same network is plugged into the running machine.
        vm.set_nics(&[("blue", "unplugged", None), ("green", "unplugged", None)]).await?;
        let green = vm.wait_attached("green").await?;
        ensure!(green.ips.len() == 2 && green.ips != blue.ips, "{green:?}");
        let claim = vm.claim("green").await?.context("the claim of the hot-plugged NIC")?;
        ensure!(claimed(&claim) == texts(&green), "{claim:?}");

        // KubeVirt drops an interface from the instance, and not from the pod, if it is absent before its status shows it.
        wait::until(TIMEOUT, "the instance to show the plugged NIC", || async {
            let instance = vm.instance().await?.context("no instance")?;
            let interfaces = instance["status"]["interfaces"].as_array().cloned().unwrap_or_default();
            Ok(interfaces.iter().any(|interface| interface["name"] == "green").then_some(()))
        })
        .await?;
        vm.set_nics(&[("blue", "unplugged", None), ("green", "unplugged", Some("absent"))]).await?;
        wait::until(TIMEOUT, "the NIC to be unplugged", || async {
            Ok(attached(&vm.launcher().await?, "green")?.is_none().then_some(()))
        })
        .await?;
        let ((), took) = wait::within(UNPLUG_LIMIT, "the claim to be deleted", || async {
            Ok(vm.claim("green").await?.is_none().then_some(()))
        })
        .await?;
        println!("the claim was deleted {took:?} after the NIC was unplugged");
        let element = json!([{"name": "unplugged", "interface": "net1", "ips": texts(&green)}]);
        ns.create_pod(attached_pod("next", "node-1", &element.to_string())).await?;
        let ((), took) = wait::within(UNPLUG_LIMIT, "the address to be used again", || async {
            let ready = ns.pods().get("next").await?;
            let phase = ready.status.and_then(|status| status.phase);
            Ok((phase.as_deref() == Some("Running")).then_some(()))
        })
        .await?;
        println!("the address was used again {took:?} after the claim was deleted");
        ensure!(attached(&vm.launcher().await?, "blue")? == Some(blue), "the other NIC is as before");
        ns.pods().delete("next", &DeleteParams::default().grace_period(0)).await?;
        Ok(())
    })
    .await?;
    end_network(&lab.client().await?, "unplugged").await
}

fn is_daemon_read(request: &AuditedRequest) -> bool {
    let reads = ["pods", "ipamclaims", "virtualmachineinstances", "ipblocks"];
    request.user == "system:serviceaccount:patchbay-system:patchbay-node"
        && matches!(request.verb.as_str(), "get" | "list")
        && reads.contains(&request.resource.as_str())
}

async fn a_pod_on_another_network_causes_no_request(lab: Lab) -> Result<()> {
    with_namespace(&lab, "machine-other", async |ns: &TestNamespace| {
        start_network(&ns.client, "ordinary", spec(ns, 77, ["10.77.0.0/24", "fd77::/64"], false)).await?;
        // One persistent network, so that the daemons watch what they need for it.
        start_network(&ns.client, "persistent", spec(ns, 78, ["10.78.0.0/24", "fd78::/64"], true)).await?;
        // The first pod lets the node acquire its blocks.
        ns.start_pod(attached_pod("first", "node-1", "ordinary")).await?;
        // The daemons list what they watch for the new network.
        let offset = wait_until_quiet(&lab, Duration::from_secs(2), is_daemon_read).await?;
        for name in ["second", "third"] {
            ns.start_pod(attached_pod(name, "node-1", "ordinary")).await?;
        }
        let requests = lab.requests_since(offset)?;
        let found: Vec<_> = requests.iter().filter(|one| is_daemon_read(one)).collect();
        ensure!(found.is_empty(), "{found:#?}");
        Ok(())
    })
    .await?;
    let client = lab.client().await?;
    end_network(&client, "ordinary").await?;
    end_network(&client, "persistent").await
}
