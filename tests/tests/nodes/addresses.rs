//! Addresses on two nodes: pods that have them by themselves, small subnets, other plugins, and daemons that die.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use api::{BridgeNetwork, IPBlock};
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
    api::{ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
};
use lab::{
    Lab,
    test_namespace::{PodBuilder, TestNamespace, pod, with_namespace},
    wait,
};
use serde_json::{Value, json};

use crate::NODES;

const NETWORKS: &str = "k8s.v1.cni.cncf.io/networks";
const STATUS: &str = "k8s.v1.cni.cncf.io/network-status";
/// For what waits until a runtime tries again.
const PATIENCE: Duration = Duration::from_secs(60);

fn on(name: &str, node: &str, attachment: &str) -> PodBuilder {
    pod(name).on(node).annotation(NETWORKS, attachment)
}

/// The addresses of `net1`, as the pod's annotation tells them.
pub fn addresses(pod: &Pod) -> Result<Vec<IpAddr>> {
    let text = pod.annotations().get(STATUS).context("the status of the pod's networks")?;
    let all: Vec<Value> = serde_json::from_str(text)?;
    let net1 = all.iter().find(|one| one["interface"] == "net1").context("net1")?;
    let ips = net1["ips"].as_array().cloned().unwrap_or_default();
    ips.iter().filter_map(Value::as_str).map(|ip| Ok(ip.parse()?)).collect()
}

async fn blocks(client: &Client, network: &str) -> Result<Vec<IPBlock>> {
    let params = ListParams::default().labels(&format!("patchbay.dev/network={network}"));
    Ok(Api::<IPBlock>::all(client.clone()).list(&params).await?.items)
}

/// Waits until the blocks of a network say that so many addresses are used.
pub async fn used(client: &Client, network: &str, count: i32) -> Result<()> {
    wait::until(PATIENCE, &format!("{count} addresses of {network} to be used"), || async {
        let all = blocks(client, network).await?;
        let sum: i32 = all.iter().filter_map(|block| block.status.as_ref()).map(|status| status.used).sum();
        ensure!(sum == count, "{sum}");
        Ok(Some(()))
    })
    .await
}

/// Kills the daemon of a node. Its pod is deleted too: a kubelet backs off from one that dies again and again.
async fn kill(lab: &Lab, client: &Client, node: &str) -> Result<()> {
    let name = patchbay::daemon_pod(client, node).await?;
    lab.kubectl(&["-n", patchbay::NAMESPACE, "delete", "pod", &name, "--force", "--grace-period=0"]).map(drop)
}

/// What a pod does not reach of these.
fn unreached(lab: &Lab, pod: &Pod, all: &[IpAddr]) -> Result<String> {
    let list: Vec<String> = all.iter().map(ToString::to_string).collect();
    let script = format!(
        "for one in {}; do /usr/bin/ping -n -q -c 1 -W 3 $one >/dev/null || echo $one; done",
        list.join(" ")
    );
    exec_in_pod_netns(lab, pod, &["sh", "-c", &script])
}

/// Lets all pods forget their neighbours, those of multicast too: all namespaces of a machine together may have 1024 of
/// a family, and the nodes of a lab are one machine.
fn forget(lab: &Lab) -> Result<()> {
    let script = "for one in /var/run/netns/*; do nsenter --net=$one ip neigh flush nud all dev net1; done >/dev/null 2>&1; true";
    NODES.iter().try_for_each(|node| lab.node(node).output(&["sh", "-c", script]).map(drop))
}

pub async fn pods_have_distinct_addresses_and_reach_each_other_though_a_daemon_dies(lab: Lab) -> Result<()> {
    let count = if e2e::soak() { 100 } else { 24 };
    with_namespace(&lab, "crowd", async |ns: &TestNamespace| {
        let client = &ns.client;
        let spec = json!({
            "overlay": {"vni": 50}, "attachment": attachment_for(ns),
            "ipam": {"subnets": ["10.50.0.0/22", "fd50::/64"], "gateways": ["10.50.0.1"], "routes": [{"dst": "10.51.0.0/16"}]},
        });
        start_network(client, "crowd", spec).await?;
        let begun = Instant::now();
        for number in 0..count {
            ns.create_pod(on(&format!("pod-{number}"), NODES[number % 2], "crowd")).await?;
            if number == count / 2 {
                kill(&lab, client, "node-1").await?;
            }
        }
        let names: Vec<String> = (0..count).map(|number| format!("pod-{number}")).collect();
        let pods = try_join_all(names.iter().map(|name| ns.wait_pod_ready(name))).await?;
        println!("{count} pods with addresses after {:?}", begun.elapsed());
        let mut owners: BTreeMap<IpAddr, String> = BTreeMap::new();
        for pod in &pods {
            let has = addresses(pod)?;
            ensure!(has.len() == 2 && has[0].is_ipv4() && has[1].is_ipv6(), "{}: {has:?}", pod.name_any());
            for address in has {
                if let Some(other) = owners.insert(address, pod.name_any()) {
                    bail!("{address} belongs to {other} and to {}", pod.name_any());
                }
            }
        }
        let route = exec_in_pod_netns(&lab, &pods[0], &["ip", "route", "show", "10.51.0.0/16"])?;
        ensure!(route.contains("via 10.50.0.1 dev net1"), "{route}");
        let all: Vec<IpAddr> = owners.keys().copied().collect();
        let begun = Instant::now();
        for pod in &pods {
            let lost = unreached(&lab, pod, &all)?;
            ensure!(lost.trim().is_empty(), "{} does not reach {lost}", pod.name_any());
            forget(&lab)?;
        }
        println!("each of {count} reached all {} addresses, in {:?}", all.len(), begun.elapsed());
        let table = lab.kubectl(&["get", "ipblocks"])?;
        println!("{table}");
        used(client, "crowd", i32::try_from(2 * count)?).await?;
        let object = networks(client).get("crowd").await?;
        let ipam = object.status.context("a status")?.ipam.context("addresses")?;
        println!("{}", serde_json::to_string(&ipam)?);
        // Everything is given back, the daemon's death notwithstanding.
        for name in &names {
            ns.pods().delete(name, &DeleteParams::default().grace_period(0)).await?;
        }
        used(client, "crowd", 0).await?;
        delete_network(client, "crowd").await?;
        wait_deleted(client, "crowd", Duration::from_secs(10)).await?;
        ensure!(blocks(client, "crowd").await?.is_empty(), "blocks are left");
        Ok(())
    })
    .await
}

/// A rule of an admin that blocks of one network must not be made.
fn rule(network: &str) -> Value {
    let kind = |kind: &str, spec: Value| {
        json!({
            "apiVersion": "admissionregistration.k8s.io/v1", "kind": kind,
            "metadata": {"name": "test-refused"}, "spec": spec,
        })
    };
    // A ConfigMap tells whether the rule is in force: about blocks there are others too, and one refusal hides another.
    let kinds = [("patchbay.dev", "ipblocks"), ("", "configmaps")].map(|(group, kind)| {
        json!({"apiGroups": [group], "apiVersions": ["*"], "operations": ["CREATE"], "resources": [kind]})
    });
    let expression = format!(
        "request.resource.resource == 'configmaps' ? object.metadata.name != '{network}' : object.spec.network != '{network}'"
    );
    let policy = kind(
        "ValidatingAdmissionPolicy",
        json!({
            "matchConstraints": {"resourceRules": kinds},
            "validations": [{"expression": expression, "message": "not in my cluster"}],
        }),
    );
    let binding = kind(
        "ValidatingAdmissionPolicyBinding",
        json!({"policyName": "test-refused", "validationActions": ["Deny"]}),
    );
    json!({"apiVersion": "v1", "kind": "List", "items": [policy, binding]})
}

pub async fn a_network_whose_blocks_are_refused_stands_in_no_others_way(lab: Lab) -> Result<()> {
    with_namespace(&lab, "refused", async |ns: &TestNamespace| {
        let client = &ns.client;
        let file = lab.kubeconfig().with_file_name("refused.json");
        std::fs::write(&file, rule("refused").to_string())?;
        let file = file.to_str().context("a path in UTF-8")?;
        lab.kubectl(&["apply", "-f", file])?;
        // A rule is not in force at once.
        let probe = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "refused"}});
        let probe: ConfigMap = serde_json::from_value(probe)?;
        wait::until(PATIENCE, "the rule to be in force", || async {
            let dry = PostParams { dry_run: true, ..PostParams::default() };
            let made = Api::<ConfigMap>::namespaced(client.clone(), &ns.namespace).create(&dry, &probe).await;
            Ok(made.is_err_and(|error| error.to_string().contains("not in my cluster")).then_some(()))
        })
        .await?;
        for (network, subnet) in [("refused", "10.59.0.0/24"), ("allowed", "10.59.1.0/24")] {
            let spec = json!({"attachment": attachment_for(ns), "ipam": {"subnets": [subnet]}});
            start_network(client, network, spec).await?;
        }
        ns.create_pod(on("waits", "node-1", "refused")).await?;
        wait_for_event(ns, "not in my cluster", PATIENCE).await?;
        let begun = Instant::now();
        ns.create_pod(on("runs", "node-1", "allowed")).await?;
        ns.wait_pod_ready("runs").await?;
        println!("a pod of another network ran after {:?}", begun.elapsed());
        let events = ["-n", &ns.namespace, "get", "events", "--field-selector", "involvedObject.name=runs"];
        let events = lab.kubectl(&events)?;
        ensure!(!events.contains("address block"), "{events}");
        lab.kubectl(&["delete", "-f", file])?;
        ensure!(addresses(&ns.wait_pod_ready("waits").await?)?.len() == 1);
        Ok(())
    })
    .await?;
    for network in ["refused", "allowed"] {
        remove(&lab, network).await?;
    }
    Ok(())
}

pub async fn a_journal_that_was_damaged_gives_no_address_twice_and_it_is_said(lab: Lab) -> Result<()> {
    with_namespace(&lab, "doubt", async |ns: &TestNamespace| {
        let client = &ns.client;
        let spec = json!({"attachment": attachment_for(ns), "ipam": {"subnets": ["10.58.0.0/24"]}});
        start_network(client, "doubt", spec).await?;
        let one = |name: &'static str| async move {
            ns.create_pod(on(name, "node-1", "doubt")).await?;
            addresses(&ns.wait_pod_ready(name).await?)
        };
        let before = [one("first").await?, one("second").await?].concat();
        // What a disk may make of it; the daemon that has it open is killed at once.
        let damage = "truncate -s 0 /var/lib/patchbay/ipam/journal";
        let daemon = patchbay::daemon_pod(client, "node-1").await?;
        lab.node("node-1").output(&["sh", "-c", damage])?;
        lab.kubectl(&["-n", patchbay::NAMESPACE, "delete", "pod", &daemon, "--force", "--grace-period=0"])?;
        wait::until(PATIENCE, "the next daemon", || async {
            Ok((patchbay::daemon_pod(client, "node-1").await? != daemon).then_some(()))
        })
        .await?;
        let after = one("third").await?;
        ensure!(!before.contains(&after[0]), "{after:?} was given twice: {before:?}");
        let said = "has lost its record of who has the addresses of 10.58.0.";
        wait::until(PATIENCE, "an event about it", || async {
            let events = ["get", "events", "-A", "-o", "jsonpath={.items[*].message}"];
            Ok(lab.kubectl(&events)?.contains(said).then_some(()))
        })
        .await?;
        let closed = |block: &IPBlock| block.status.as_ref().is_some_and(|status| status.closed);
        wait::until(PATIENCE, "the block to be closed", || async {
            let all = blocks(client, "doubt").await?;
            ensure!(all.len() == 2, "{} blocks", all.len());
            Ok(all.iter().any(closed).then_some(()))
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
    remove(&lab, "doubt").await
}

pub async fn a_small_subnet_is_filled_to_its_last_address_from_both_nodes(lab: Lab) -> Result<()> {
    with_namespace(&lab, "few", async |ns: &TestNamespace| {
        let client = &ns.client;
        let spec = json!({"attachment": attachment_for(ns), "ipam": {"subnets": ["10.52.0.0/28"]}});
        start_network(client, "few", spec).await?;
        let names: Vec<String> = (0..14).map(|number| format!("pod-{number}")).collect();
        for (number, name) in names.iter().enumerate() {
            ns.create_pod(on(name, NODES[number % 2], "few")).await?;
        }
        let pods = try_join_all(names.iter().map(|name| ns.wait_pod_ready(name))).await?;
        let found: BTreeSet<IpAddr> =
            pods.iter().map(addresses).collect::<Result<Vec<_>>>()?.into_iter().flatten().collect();
        ensure!(found.len() == 14, "{found:?}");
        ns.create_pod(on("late", "node-1", "few")).await?;
        wait_for_event(ns, "has no free IPv4 address left", PATIENCE).await?;
        wait::until(PATIENCE, "the network to say so", || async {
            let object = networks(client).get("few").await?;
            Ok((condition(&object, "AddressesExhausted").0 == "True").then_some(()))
        })
        .await?;
        let events = lab.kubectl(&["get", "events", "-A", "-o", "jsonpath={.items[*].reason}"])?;
        ensure!(events.contains("AddressesExhausted"), "{events}");
        // A subnet more, and it starts by itself.
        let patch = json!({"spec": {"ipam": {"subnets": ["10.52.0.0/28", "10.53.0.0/28"]}}});
        networks(client).patch("few", &PatchParams::default(), &Patch::Merge(&patch)).await?;
        let late = ns.wait_pod_ready("late").await?;
        let has = addresses(&late)?;
        ensure!(has.len() == 1 && has[0].to_string().starts_with("10.53.0."), "{has:?}");
        // Taken away again: who has one of it keeps it, and it is said who that is.
        let patch = json!({"spec": {"ipam": {"subnets": ["10.52.0.0/28"]}}});
        networks(client).patch("few", &PatchParams::default(), &Patch::Merge(&patch)).await?;
        wait::until(PATIENCE, "the network to say who drains", || async {
            let object = networks(client).get("few").await?;
            let (holds, _, message) = condition(&object, "SubnetsDraining");
            Ok((holds == "True" && message.contains("/late 10.53.0.")).then_some(()))
        })
        .await
    })
    .await?;
    remove(&lab, "few").await
}

/// Deletes a network whose pods are gone.
async fn remove(lab: &Lab, name: &str) -> Result<()> {
    let client = lab.client().await?;
    delete_network(&client, name).await?;
    wait_deleted(&client, name, Duration::from_secs(30)).await.map(drop)
}

pub async fn other_plugins_and_requested_addresses_are_served(lab: Lab) -> Result<()> {
    let play = with_namespace(&lab, "asked", async |ns: &TestNamespace| {
        let client = &ns.client;
        let spec =
            json!({"attachment": attachment_for(ns), "ipam": {"subnets": ["10.54.0.0/24", "fd54::/64"]}});
        start_network(client, "asked", spec).await?;
        // A hand-written attachment with another main plugin.
        let config = json!({
            "cniVersion": "1.0.0", "name": "mac", "type": "macvlan", "master": "eth1", "mode": "bridge",
            "ipam": {"type": "patchbay-ipam", "network": "asked"},
        });
        let nad = json!({
            "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
            "metadata": {"name": "mac", "namespace": ns.namespace}, "spec": {"config": config.to_string()},
        });
        let file = lab.kubeconfig().with_file_name("mac.json");
        std::fs::write(&file, nad.to_string())?;
        lab.kubectl(&["apply", "-f", file.to_str().context("a path in UTF-8")?])?;
        let asked = |name: &str, ip: &str| {
            let attachment = json!([{"name": "asked", "interface": "net1", "ips": [ip]}]).to_string();
            on(name, "node-1", &attachment)
        };
        ns.create_pod(on("mac-1", "node-1", "mac")).await?;
        ns.create_pod(on("mac-2", "node-1", "mac")).await?;
        ns.create_pod(asked("wish", "10.54.0.200/24")).await?;
        let [one, two, wish] = [
            ns.wait_pod_ready("mac-1").await?,
            ns.wait_pod_ready("mac-2").await?,
            ns.wait_pod_ready("wish").await?,
        ];
        ensure!(addresses(&wish)?.contains(&"10.54.0.200".parse()?), "{:?}", addresses(&wish)?);
        let far = addresses(&two)?;
        ensure!(far.len() == 2, "{far:?}");
        let lost = unreached(&lab, &one, &far)?;
        ensure!(lost.trim().is_empty(), "{lost}");
        // The same address again, from the other node: it is said who has it.
        ns.create_pod(asked("greedy", "10.54.0.200").on("node-2")).await?;
        wait_for_event(ns, "address 10.54.0.200 of network \"asked\" is in use on node node-1", PATIENCE)
            .await?;
        ns.create_pod(asked("lost", "10.99.0.1")).await?;
        wait_for_event(ns, "10.99.0.1 is in no subnet", PATIENCE).await?;
        // Pods of the other plugin hold the network too.
        for name in ["greedy", "lost", "wish", "mac-2"] {
            ns.pods().delete(name, &DeleteParams::default().grace_period(0)).await?;
        }
        used(client, "asked", 2).await?;
        delete_network(client, "asked").await?;
        wait::until(PATIENCE, "the network to wait for mac-1", || async {
            let object = networks(client).get("asked").await?;
            Ok(condition(&object, "InUse").2.contains("/mac-1").then_some(()))
        })
        .await?;
        ns.pods().delete("mac-1", &DeleteParams::default().grace_period(0)).await?;
        wait_deleted(client, "asked", Duration::from_secs(30)).await.map(drop)
    });
    Box::pin(play).await
}

/// What the API server says to a network that cannot be.
async fn refusal(client: &Client, spec: Value) -> Result<String> {
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &ApiResource::erase::<BridgeNetwork>(&()));
    let object = serde_json::from_value(json!({
        "apiVersion": "patchbay.dev/v1alpha1", "kind": "BridgeNetwork", "metadata": {"name": "bad"}, "spec": spec,
    }))?;
    let made = api.create(&PostParams::default(), &object).await;
    Ok(made.err().with_context(|| format!("{spec} was taken"))?.to_string())
}

pub async fn address_blocks_are_their_holders(lab: Lab) -> Result<()> {
    with_namespace(&lab, "block", async |ns: &TestNamespace| {
        let client = &ns.client;
        let spec = json!({"attachment": attachment_for(ns), "ipam": {"subnets": ["10.56.0.0/24"]}});
        start_network(client, "block", spec).await?;
        ns.start_pod(attached_pod("pod", "node-1", "block")).await?;
        let all = blocks(client, "block").await?;
        let name = all.first().context("a block")?.name_any();
        let refused = lab.kubectl(&["delete", "ipblock", &name]).err().context("it was deleted")?;
        ensure!(format!("{refused:#}").contains("delete the Node"), "{refused:#}");
        for (words, ipam) in [
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
            let text = refusal(client, json!({"ipam": ipam})).await?;
            ensure!(text.contains(words), "{ipam}: {text}");
        }
        let text = refusal(client, json!({"mtu": 1000, "ipam": {"subnets": ["fd00::/64"]}})).await?;
        ensure!(text.contains("1280"), "{text}");
        Ok(())
    })
    .await?;
    remove(&lab, "block").await
}
