//! IPAM on two nodes: unique addresses, exhausted subnets, other CNI plugins, killed daemons and a damaged journal.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use api::{BridgeNetwork, IPBlock};
pub use e2e::bridge::{blocks, wait_for_used};
use e2e::{
    bridge::{
        attached_pod, attachment_for, condition, delete_network, exec_in_pod_netns, networks, start_network,
        wait_deleted, wait_for_event,
    },
    patchbay,
};
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::{
    Api, Client, ResourceExt as _,
    api::{ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, PostParams},
};
use lab::{
    Lab,
    test_namespace::{PodBuilder, TestNamespace, pod, with_namespace},
    wait,
};
use serde_json::{Value, json};

use crate::NODES;

const NETWORKS_ANNOTATION: &str = "k8s.v1.cni.cncf.io/networks";
const NETWORK_STATUS_ANNOTATION: &str = "k8s.v1.cni.cncf.io/network-status";
/// Long enough for a retry of the container runtime.
const RETRY_TIMEOUT: Duration = Duration::from_secs(60);

fn pod_on(name: &str, node: &str, attachment: &str) -> PodBuilder {
    pod(name).on(node).annotation(NETWORKS_ANNOTATION, attachment)
}

/// The addresses of `net1` in the network-status annotation of the pod.
pub fn net1_addresses(pod: &Pod) -> Result<Vec<IpAddr>> {
    let text = pod.annotations().get(NETWORK_STATUS_ANNOTATION).context("the network-status annotation")?;
    let all: Vec<Value> = serde_json::from_str(text)?;
    let net1 = all.iter().find(|status| status["interface"] == "net1").context("net1")?;
    let ips = net1["ips"].as_array().cloned().unwrap_or_default();
    ips.iter().filter_map(Value::as_str).map(|ip| Ok(ip.parse()?)).collect()
}

/// Kills the daemon of a node by deleting its pod: the kubelet would back off from a container that crashes repeatedly.
async fn kill_daemon(lab: &Lab, client: &Client, node: &str) -> Result<()> {
    let name = patchbay::daemon_pod(client, node).await?;
    lab.kubectl(&["-n", patchbay::NAMESPACE, "delete", "pod", &name, "--force", "--grace-period=0"]).map(drop)
}

/// The addresses that do not answer a ping of the pod; it pings all of them at the same time.
fn unreachable(lab: &Lab, pod: &Pod, all: &[IpAddr]) -> Result<String> {
    let list: Vec<String> = all.iter().map(ToString::to_string).collect();
    let script = format!(
        "for address in {}; do {{ {ping} $address >/dev/null || {ping} $address >/dev/null || echo $address; }} & done; wait",
        list.join(" "),
        ping = "/usr/bin/ping -n -q -c 1 -W 3",
    );
    exec_in_pod_netns(lab, pod, &["sh", "-c", &script])
}

/// Flushes the neighbour tables of all pods, multicast entries too. The kernel allows 1024 entries per family for all
/// namespaces of a machine together, and all lab nodes share one machine.
fn flush_neighbours(lab: &Lab) -> Result<()> {
    let script = "for netns in /var/run/netns/*; do nsenter --net=$netns ip neigh flush nud all dev net1; done >/dev/null 2>&1; true";
    NODES.iter().try_for_each(|node| lab.node(node).output(&["sh", "-c", script]).map(drop))
}

pub async fn pods_get_unique_reachable_addresses_even_if_a_daemon_is_killed(lab: Lab) -> Result<()> {
    let count = if e2e::soak() { 100 } else { 24 };
    with_namespace(&lab, "unique", async |ns: &TestNamespace| {
        let client = &ns.client;
        let spec = json!({
            "overlay": {"vni": 50}, "attachment": attachment_for(ns),
            "ipam": {"subnets": ["10.50.0.0/22", "fd50::/64"], "gateways": ["10.50.0.1"], "routes": [{"dst": "10.51.0.0/16"}]},
        });
        start_network(client, "unique", spec).await?;
        let started = Instant::now();
        for number in 0..count {
            ns.create_pod(pod_on(&format!("pod-{number}"), NODES[number % 2], "unique")).await?;
            if number == count / 2 {
                kill_daemon(&lab, client, "node-1").await?;
            }
        }
        let names: Vec<String> = (0..count).map(|number| format!("pod-{number}")).collect();
        let pods = try_join_all(names.iter().map(|name| ns.wait_pod_ready(name))).await?;
        println!("{count} pods have addresses after {:?}", started.elapsed());
        let mut owners: BTreeMap<IpAddr, String> = BTreeMap::new();
        for pod in &pods {
            let assigned = net1_addresses(pod)?;
            ensure!(
                assigned.len() == 2 && assigned[0].is_ipv4() && assigned[1].is_ipv6(),
                "{}: {assigned:?}",
                pod.name_any()
            );
            for address in assigned {
                if let Some(other) = owners.insert(address, pod.name_any()) {
                    bail!("{address} is assigned to {other} and to {}", pod.name_any());
                }
            }
        }
        let route = exec_in_pod_netns(&lab, &pods[0], &["ip", "route", "show", "10.51.0.0/16"])?;
        ensure!(route.contains("via 10.50.0.1 dev net1"), "{route}");
        let all: Vec<IpAddr> = owners.keys().copied().collect();
        let started = Instant::now();
        for pod in &pods {
            let lost = unreachable(&lab, pod, &all)?;
            ensure!(lost.trim().is_empty(), "{} cannot reach {lost}", pod.name_any());
            flush_neighbours(&lab)?;
        }
        println!("each of {count} pods reached all {} addresses in {:?}", all.len(), started.elapsed());
        let table = lab.kubectl(&["get", "ipblocks"])?;
        println!("{table}");
        wait_for_used(client, "unique", i32::try_from(2 * count)?).await?;
        let object = networks(client).get("unique").await?;
        let ipam = object.status.context("status")?.ipam.context("status.ipam")?;
        println!("{}", serde_json::to_string(&ipam)?);
        // All addresses are released, although a daemon was killed.
        for name in &names {
            ns.pods().delete(name, &DeleteParams::default().grace_period(0)).await?;
        }
        wait_for_used(client, "unique", 0).await?;
        delete_network(client, "unique").await?;
        wait_deleted(client, "unique").await?;
        ensure!(blocks(client, "unique").await?.is_empty(), "blocks were not deleted");
        Ok(())
    })
    .await
}

/// An admission policy that rejects the IPBlocks of one network.
fn rejecting_policy(network: &str) -> Value {
    let kind = |kind: &str, spec: Value| {
        json!({
            "apiVersion": "admissionregistration.k8s.io/v1", "kind": kind,
            "metadata": {"name": "test-rejected"}, "spec": spec,
        })
    };
    // A ConfigMap shows whether the policy is in force. A test IPBlock would not: other policies reject it too.
    let rules = [("patchbay.dev", "ipblocks"), ("", "configmaps")].map(|(group, kind)| {
        json!({"apiGroups": [group], "apiVersions": ["*"], "operations": ["CREATE"], "resources": [kind]})
    });
    let expression = format!(
        "request.resource.resource == 'configmaps' ? object.metadata.name != '{network}' : object.spec.network != '{network}'"
    );
    let policy = kind(
        "ValidatingAdmissionPolicy",
        json!({
            "matchConstraints": {"resourceRules": rules},
            "validations": [{"expression": expression, "message": "rejected by test policy"}],
        }),
    );
    let binding = kind(
        "ValidatingAdmissionPolicyBinding",
        json!({"policyName": "test-rejected", "validationActions": ["Deny"]}),
    );
    json!({"apiVersion": "v1", "kind": "List", "items": [policy, binding]})
}

pub async fn a_network_with_rejected_blocks_does_not_delay_other_networks(lab: Lab) -> Result<()> {
    with_namespace(&lab, "rejected", async |ns: &TestNamespace| {
        let client = &ns.client;
        let file = lab.kubeconfig().with_file_name("rejected.json");
        std::fs::write(&file, rejecting_policy("rejected").to_string())?;
        let file = file.to_str().context("the path is not UTF-8")?;
        lab.kubectl(&["apply", "-f", file])?;
        // The API server enforces a new policy with a delay.
        let probe = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "rejected"}});
        let probe: ConfigMap = serde_json::from_value(probe)?;
        wait::until(RETRY_TIMEOUT, "the policy to be in force", || async {
            let dry = PostParams { dry_run: true, ..PostParams::default() };
            let created =
                Api::<ConfigMap>::namespaced(client.clone(), &ns.namespace).create(&dry, &probe).await;
            Ok(created
                .is_err_and(|error| error.to_string().contains("rejected by test policy"))
                .then_some(()))
        })
        .await?;
        for (network, subnet) in [("rejected", "10.59.0.0/24"), ("allowed", "10.59.1.0/24")] {
            let spec = json!({"attachment": attachment_for(ns), "ipam": {"subnets": [subnet]}});
            start_network(client, network, spec).await?;
        }
        ns.create_pod(pod_on("pending", "node-1", "rejected")).await?;
        wait_for_event(ns, "rejected by test policy").await?;
        let started = Instant::now();
        ns.create_pod(pod_on("client", "node-1", "allowed")).await?;
        ns.wait_pod_ready("client").await?;
        println!("a pod on another network was ready after {:?}", started.elapsed());
        let events = ["-n", &ns.namespace, "get", "events", "--field-selector", "involvedObject.name=client"];
        let events = lab.kubectl(&events)?;
        ensure!(!events.contains("address block"), "{events}");
        lab.kubectl(&["delete", "-f", file])?;
        ensure!(net1_addresses(&ns.wait_pod_ready("pending").await?)?.len() == 1);
        Ok(())
    })
    .await?;
    for network in ["rejected", "allowed"] {
        delete_and_wait(&lab, network).await?;
    }
    Ok(())
}

pub async fn a_damaged_journal_assigns_no_address_twice_and_is_reported(lab: Lab) -> Result<()> {
    with_namespace(&lab, "damaged", async |ns: &TestNamespace| {
        let client = &ns.client;
        let spec = json!({"attachment": attachment_for(ns), "ipam": {"subnets": ["10.58.0.0/24"]}});
        start_network(client, "damaged", spec).await?;
        let start_pod = |name: &'static str| async move {
            ns.create_pod(pod_on(name, "node-1", "damaged")).await?;
            net1_addresses(&ns.wait_pod_ready(name).await?)
        };
        let before = [start_pod("first").await?, start_pod("second").await?].concat();
        // Simulates a disk failure. The daemon has the journal open and is killed at once.
        let truncate = "truncate -s 0 /var/lib/patchbay/ipam/journal";
        let daemon = patchbay::daemon_pod(client, "node-1").await?;
        lab.node("node-1").output(&["sh", "-c", truncate])?;
        lab.kubectl(&["-n", patchbay::NAMESPACE, "delete", "pod", &daemon, "--force", "--grace-period=0"])?;
        wait::until(RETRY_TIMEOUT, "a new daemon", || async {
            Ok((patchbay::daemon_pod(client, "node-1").await? != daemon).then_some(()))
        })
        .await?;
        let after = start_pod("third").await?;
        ensure!(!before.contains(&after[0]), "{after:?} was assigned twice: {before:?}");
        let expected = "has lost its record of which pods have the addresses of 10.58.0.";
        wait::until(RETRY_TIMEOUT, "an event about the lost record", || async {
            let events = ["get", "events", "-A", "-o", "jsonpath={.items[*].message}"];
            Ok(lab.kubectl(&events)?.contains(expected).then_some(()))
        })
        .await?;
        let is_closed = |block: &IPBlock| block.status.as_ref().is_some_and(|status| status.closed);
        wait::until(RETRY_TIMEOUT, "the block to be closed", || async {
            let all = blocks(client, "damaged").await?;
            ensure!(all.len() == 2, "{} blocks", all.len());
            Ok(all.iter().any(is_closed).then_some(()))
        })
        .await?;
        for address in &before {
            exec_in_pod_netns(
                &lab,
                &ns.wait_pod_ready("third").await?,
                &["ping", "-c", "1", "-W", "3", &address.to_string()],
            )?;
        }
        Ok(())
    })
    .await?;
    // Sandboxes from before may have addresses of the block. No other source says that they have none.
    let client = lab.client().await?;
    delete_network(&client, "damaged").await?;
    wait::until(RETRY_TIMEOUT, "the unverified block to hold the deletion", || async {
        let (_, reason, message) = condition(&networks(&client).get("damaged").await?, "InUse");
        let expected = "node node-1 with 1 unverified address blocks (drain and reboot the node)";
        Ok((reason == "AddressesInUse" && message.contains(expected)).then_some(()))
    })
    .await?;
    lab.reboot("node-1").await?;
    patchbay::wait_ready(&lab).await?;
    wait_deleted(&client, "damaged").await.map(drop)
}

pub async fn two_nodes_use_a_small_subnet_to_its_last_address(lab: Lab) -> Result<()> {
    with_namespace(&lab, "exhausted", async |ns: &TestNamespace| {
        let client = &ns.client;
        let spec = json!({"attachment": attachment_for(ns), "ipam": {"subnets": ["10.52.0.0/28"]}});
        start_network(client, "exhausted", spec).await?;
        let names: Vec<String> = (0..14).map(|number| format!("pod-{number}")).collect();
        for (number, name) in names.iter().enumerate() {
            ns.create_pod(pod_on(name, NODES[number % 2], "exhausted")).await?;
        }
        let pods = try_join_all(names.iter().map(|name| ns.wait_pod_ready(name))).await?;
        let found: BTreeSet<IpAddr> =
            pods.iter().map(net1_addresses).collect::<Result<Vec<_>>>()?.into_iter().flatten().collect();
        ensure!(found.len() == 14, "{found:?}");
        ns.create_pod(pod_on("waiting", "node-1", "exhausted")).await?;
        wait_for_event(ns, "has no free IPv4 address left").await?;
        wait::until(RETRY_TIMEOUT, "condition AddressesExhausted", || async {
            let object = networks(client).get("exhausted").await?;
            Ok((condition(&object, "AddressesExhausted").0 == "True").then_some(()))
        })
        .await?;
        let events = lab.kubectl(&["get", "events", "-A", "-o", "jsonpath={.items[*].reason}"])?;
        ensure!(events.contains("AddressesExhausted"), "{events}");
        // The pod starts when a subnet is added.
        let patch = json!({"spec": {"ipam": {"subnets": ["10.52.0.0/28", "10.53.0.0/28"]}}});
        networks(client).patch("exhausted", &PatchParams::default(), &Patch::Merge(&patch)).await?;
        let waiting = ns.wait_pod_ready("waiting").await?;
        let assigned = net1_addresses(&waiting)?;
        ensure!(assigned.len() == 1 && assigned[0].to_string().starts_with("10.53.0."), "{assigned:?}");
        // The subnet is removed: its pods keep their addresses, and the condition names them.
        let patch = json!({"spec": {"ipam": {"subnets": ["10.52.0.0/28"]}}});
        networks(client).patch("exhausted", &PatchParams::default(), &Patch::Merge(&patch)).await?;
        wait::until(RETRY_TIMEOUT, "condition SubnetsDraining", || async {
            let object = networks(client).get("exhausted").await?;
            let (status, _, message) = condition(&object, "SubnetsDraining");
            Ok((status == "True" && message.contains("/waiting 10.53.0.")).then_some(()))
        })
        .await
    })
    .await?;
    delete_and_wait(&lab, "exhausted").await
}

/// Deletes a network that has no pods.
async fn delete_and_wait(lab: &Lab, name: &str) -> Result<()> {
    let client = lab.client().await?;
    delete_network(&client, name).await?;
    wait_deleted(&client, name).await.map(drop)
}

pub async fn other_cni_plugins_and_requested_addresses_are_served(lab: Lab) -> Result<()> {
    let test = with_namespace(&lab, "requested", async |ns: &TestNamespace| {
        let client = &ns.client;
        let spec =
            json!({"attachment": attachment_for(ns), "ipam": {"subnets": ["10.54.0.0/24", "fd54::/64"]}});
        start_network(client, "requested", spec).await?;
        // A hand-written NAD with another main plugin.
        let config = json!({
            "cniVersion": "1.0.0", "name": "mac", "type": "macvlan", "master": "eth1", "mode": "bridge",
            "ipam": {"type": "patchbay-ipam", "network": "requested"},
        });
        let nad = json!({
            "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
            "metadata": {"name": "mac", "namespace": ns.namespace}, "spec": {"config": config.to_string()},
        });
        let file = lab.kubeconfig().with_file_name("mac.json");
        std::fs::write(&file, nad.to_string())?;
        lab.kubectl(&["apply", "-f", file.to_str().context("the path is not UTF-8")?])?;
        let requesting = |name: &str, ip: &str| {
            let attachment = json!([{"name": "requested", "interface": "net1", "ips": [ip]}]).to_string();
            pod_on(name, "node-1", &attachment)
        };
        ns.create_pod(pod_on("mac-1", "node-1", "mac")).await?;
        ns.create_pod(pod_on("mac-2", "node-1", "mac")).await?;
        ns.create_pod(requesting("db-0", "10.54.0.200/24")).await?;
        let [mac_1, mac_2, db_0] = [
            ns.wait_pod_ready("mac-1").await?,
            ns.wait_pod_ready("mac-2").await?,
            ns.wait_pod_ready("db-0").await?,
        ];
        ensure!(net1_addresses(&db_0)?.contains(&"10.54.0.200".parse()?), "{:?}", net1_addresses(&db_0)?);
        let remote = net1_addresses(&mac_2)?;
        ensure!(remote.len() == 2, "{remote:?}");
        let lost = unreachable(&lab, &mac_1, &remote)?;
        ensure!(lost.trim().is_empty(), "{lost}");
        // The same address requested on the other node: the error names the node that uses it.
        ns.create_pod(requesting("duplicate", "10.54.0.200").on("node-2")).await?;
        wait_for_event(ns, "address 10.54.0.200 of network \"requested\" is in use on node node-1").await?;
        ns.create_pod(requesting("outside", "10.99.0.1")).await?;
        wait_for_event(ns, "10.99.0.1 is in no subnet").await?;
        // Pods that use another main plugin block deletion too.
        for name in ["duplicate", "outside", "db-0", "mac-2"] {
            ns.pods().delete(name, &DeleteParams::default().grace_period(0)).await?;
        }
        wait_for_used(client, "requested", 2).await?;
        delete_network(client, "requested").await?;
        wait::until(RETRY_TIMEOUT, "the network to wait for mac-1", || async {
            let object = networks(client).get("requested").await?;
            Ok(condition(&object, "InUse").2.contains("/mac-1").then_some(()))
        })
        .await?;
        ns.pods().delete("mac-1", &DeleteParams::default().grace_period(0)).await?;
        wait_deleted(client, "requested").await.map(drop)
    });
    Box::pin(test).await
}

/// The error of a network that must be rejected.
async fn create_error(client: &Client, spec: Value) -> Result<String> {
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &ApiResource::erase::<BridgeNetwork>(&()));
    let object = serde_json::from_value(json!({
        "apiVersion": "patchbay.dev/v1alpha1", "kind": "BridgeNetwork", "metadata": {"name": "bad"}, "spec": spec,
    }))?;
    let created = api.create(&PostParams::default(), &object).await;
    Ok(created.err().with_context(|| format!("{spec} was admitted"))?.to_string())
}

pub async fn only_the_holder_can_write_an_address_block(lab: Lab) -> Result<()> {
    with_namespace(&lab, "block", async |ns: &TestNamespace| {
        let client = &ns.client;
        let spec = json!({"attachment": attachment_for(ns), "ipam": {"subnets": ["10.56.0.0/24"]}});
        start_network(client, "block", spec).await?;
        ns.start_pod(attached_pod("client", "node-1", "block")).await?;
        let all = blocks(client, "block").await?;
        let name = all.first().context("no IPBlock")?.name_any();
        let error = lab.kubectl(&["delete", "ipblock", &name]).err().context("the IPBlock was deleted")?;
        ensure!(format!("{error:#}").contains("delete the Node"), "{error:#}");
        for (expected, ipam) in [
            ("overlap", json!({"subnets": ["10.0.0.0/8", "10.1.0.0/16"]})),
            ("has host bits set", json!({"subnets": ["10.0.0.1/8"]})),
            ("must be a CIDR", json!({"subnets": ["ten"]})),
            ("is not in any of the subnets", json!({"subnets": ["10.0.0.0/8"], "gateways": ["11.0.0.1"]})),
            (
                "two gateways of the same IP family",
                json!({"subnets": ["10.0.0.0/8"], "gateways": ["10.0.0.1", "10.0.0.2"]}),
            ),
            (
                "different families",
                json!({"subnets": ["10.0.0.0/8"], "routes": [{"dst": "fd00::/8", "gw": "10.0.0.1"}]}),
            ),
            ("subnets", json!({})),
        ] {
            let text = create_error(client, json!({"ipam": ipam})).await?;
            ensure!(text.contains(expected), "{ipam}: {text}");
        }
        let text = create_error(client, json!({"mtu": 1000, "ipam": {"subnets": ["fd00::/64"]}})).await?;
        ensure!(text.contains("1280"), "{text}");
        Ok(())
    })
    .await?;
    delete_and_wait(&lab, "block").await
}
