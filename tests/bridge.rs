//! Helpers for BridgeNetworks in a lab: create networks, attach pods, inspect nodes.

use std::{
    fmt::Write as _,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use api::{BridgeNetwork, IPBlock, NodeNetwork};
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, ListParams, PostParams},
};
use lab::{
    Lab,
    test_namespace::{PodBuilder, TestNamespace, pod},
    wait,
};
use serde_json::{Value, json};

use crate::hotplug::create_nad;

/// How soon a network must be Ready after it was applied.
pub const READY_LIMIT: Duration = Duration::from_secs(2);
/// How soon a network must be deleted after its last user.
pub const DELETION_LIMIT: Duration = Duration::from_secs(3);
/// The timeout for waits that are not about time; generous, since other tests run in parallel.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(90);

pub fn networks(client: &Client) -> Api<BridgeNetwork> {
    Api::all(client.clone())
}

/// Creates a network.
pub async fn create_network(client: &Client, name: &str, spec: Value) -> Result<BridgeNetwork> {
    let object: BridgeNetwork = serde_json::from_value(json!({
        "apiVersion": "patchbay.dev/v1alpha1", "kind": "BridgeNetwork", "metadata": {"name": name}, "spec": spec,
    }))?;
    networks(client).create(&PostParams::default(), &object).await.with_context(|| format!("create {name}"))
}

/// A condition's status, reason and message; empty if the network does not have it.
pub fn condition(object: &BridgeNetwork, kind: &str) -> (String, String, String) {
    let conditions = object.status.iter().flat_map(|status| &status.conditions);
    let text = |value: Value| value.as_str().unwrap_or_default().to_owned();
    conditions
        .filter(|condition| condition.r#type == kind)
        .map(|c| (text(json!(c.status)), c.reason.clone(), c.message.clone()))
        .next()
        .unwrap_or_default()
}

/// Waits until the network is Ready in its current generation; returns how long that took.
pub async fn wait_ready(client: &Client, name: &str) -> Result<Duration> {
    let start = Instant::now();
    wait::until(WAIT_TIMEOUT, &format!("BridgeNetwork {name} to be Ready"), || ready(client, name)).await?;
    Ok(start.elapsed())
}

/// The same within the product's limit.
pub async fn wait_ready_in_time(client: &Client, name: &str) -> Result<Duration> {
    let what = format!("BridgeNetwork {name} to be Ready");
    let ((), took) = wait::within(READY_LIMIT, &what, || ready(client, name)).await?;
    Ok(took)
}

async fn ready(client: &Client, name: &str) -> Result<Option<()>> {
    let object = networks(client).get(name).await?;
    let current = object.status.as_ref().and_then(|s| s.observed_generation) == object.metadata.generation;
    match condition(&object, "Ready").0.as_str() {
        "True" if current => Ok(Some(())),
        _ => bail!("{}", serde_json::to_string(&object.status)?),
    }
}

/// Creates a network and waits until it is Ready.
pub async fn start_network(client: &Client, name: &str, spec: Value) -> Result<()> {
    create_network(client, name, spec).await?;
    wait_ready(client, name).await.map(drop)
}

/// Deletes a network without waiting.
pub async fn delete_network(client: &Client, name: &str) -> Result<()> {
    networks(client)
        .delete(name, &DeleteParams::default())
        .await
        .with_context(|| format!("delete {name}"))?;
    Ok(())
}

/// Waits until a network is deleted; returns how long that took.
pub async fn wait_deleted(client: &Client, name: &str) -> Result<Duration> {
    let start = Instant::now();
    wait::until(WAIT_TIMEOUT, &format!("BridgeNetwork {name} to be deleted"), || deleted(client, name))
        .await?;
    Ok(start.elapsed())
}

/// The same within the product's limit.
pub async fn wait_deleted_in_time(client: &Client, name: &str) -> Result<Duration> {
    let what = format!("BridgeNetwork {name} to be deleted");
    let ((), took) = wait::within(DELETION_LIMIT, &what, || deleted(client, name)).await?;
    Ok(took)
}

async fn deleted(client: &Client, name: &str) -> Result<Option<()>> {
    match networks(client).get_opt(name).await? {
        None => Ok(Some(())),
        Some(object) => bail!("{}", serde_json::to_string(&object)?),
    }
}

/// The entry of a network in a node's NodeNetwork status.
pub async fn node_report(client: &Client, node: &str, network: &str) -> Result<Option<Value>> {
    let object = Api::<NodeNetwork>::all(client.clone()).get(node).await?;
    let entry = object.status.iter().flat_map(|status| &status.networks).find(|entry| entry.name == network);
    Ok(entry.map(|entry| json!(entry)))
}

/// The IPBlocks of a network.
pub async fn blocks(client: &Client, network: &str) -> Result<Vec<IPBlock>> {
    let params = ListParams::default().labels(&format!("patchbay.dev/network={network}"));
    Ok(Api::<IPBlock>::all(client.clone()).list(&params).await?.items)
}

/// Waits until the IPBlocks of a network report this many used addresses.
pub async fn wait_for_used(client: &Client, network: &str, count: i32) -> Result<()> {
    wait::until(WAIT_TIMEOUT, &format!("{count} used addresses of {network}"), || async {
        let all = blocks(client, network).await?;
        let sum: i32 = all.iter().filter_map(|block| block.status.as_ref()).map(|status| status.used).sum();
        ensure!(sum == count, "{sum}");
        Ok(Some(()))
    })
    .await
}

/// A pod that is attached to networks and may configure its own addresses.
pub fn attached_pod(name: &str, node: &str, attachments: &str) -> PodBuilder {
    pod(name).on(node).annotation("k8s.v1.cni.cncf.io/networks", attachments).capability("NET_ADMIN")
}

/// The `spec.attachment` of a network for the pods of a test namespace.
pub fn attachment_for(ns: &TestNamespace) -> Value {
    json!({"namespaces": [ns.namespace]})
}

/// Waits until an event of the test namespace contains the text; returns the messages of all events.
pub async fn wait_for_event(ns: &TestNamespace, text: &str) -> Result<String> {
    let arguments = ["-n", &ns.namespace, "get", "events", "-o", "jsonpath={.items[*].message}"];
    wait::until(WAIT_TIMEOUT, &format!("an event that contains {text:?}"), || async {
        let events = ns.lab.kubectl(&arguments)?;
        Ok(events.contains(text).then_some(events))
    })
    .await
}

/// Starts a pod that is attached to a network as `net1` and has an address there.
pub async fn start_pod_with_address(
    ns: &TestNamespace,
    name: &str,
    node: &str,
    attachment: &str,
    address: &str,
) -> Result<Pod> {
    let pod = ns.start_pod(attached_pod(name, node, attachment)).await?;
    add_address(ns, name, "net1", address)?;
    Ok(pod)
}

/// Starts several pods in parallel, as [`start_pod_with_address`].
pub async fn start_pods_with_addresses<const N: usize>(
    ns: &TestNamespace,
    pods: [(&str, &str, &str, &str); N],
) -> Result<[Pod; N]> {
    let starts = pods
        .map(|(name, node, attachment, address)| start_pod_with_address(ns, name, node, attachment, address));
    try_join_all(starts).await?.try_into().map_err(|_| anyhow!("the number of pods changed"))
}

/// Adds an address to a pod's interface.
pub fn add_address(ns: &TestNamespace, pod: &str, interface: &str, address: &str) -> Result<()> {
    let mut argv = vec!["ip", "addr", "add", address, "dev", interface];
    if address.contains(':') {
        // Usable without waiting for duplicate address detection.
        argv.push("nodad");
    }
    ns.exec(pod, &argv).map(drop)
}

/// Waits until a pod can ping an address.
pub async fn wait_reachable(ns: &TestNamespace, pod: &str, address: &str) -> Result<()> {
    let what = format!("{pod} to reach {address}");
    wait::until(WAIT_TIMEOUT, &what, || async {
        ns.exec(pod, &["ping", "-c", "1", "-W", "1", address]).map(Some)
    })
    .await
    .map(drop)
}

/// Runs a program of the node in a pod's network namespace.
pub fn exec_in_pod_netns(lab: &Lab, pod: &Pod, argv: &[&str]) -> Result<String> {
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).context("the pod has no node")?;
    let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    let mut ids = statuses.filter_map(|status| status.container_id.as_deref());
    let id = ids.next().context("the pod has no container id")?;
    let id = id.rsplit('/').next().unwrap_or_default();
    let tasks = lab.node(node).output(&["ctr", "-n", "k8s.io", "tasks", "ls"])?;
    let pid = tasks
        .lines()
        .find(|line| line.starts_with(id))
        .and_then(|line| line.split_whitespace().nth(1))
        .with_context(|| format!("containerd has no task for {}: {tasks}", pod.name_any()))?;
    lab.node(node).output(&[&["nsenter", "-t", pid, "-n"], argv].concat())
}

/// A link of a node, as `ip -d -j` prints it.
pub fn link(lab: &Lab, node: &str, name: &str) -> Option<Value> {
    let text = lab.node(node).output(&["ip", "-d", "-j", "link", "show", "dev", name]).ok()?;
    serde_json::from_str::<Vec<Value>>(&text).ok()?.into_iter().next()
}

/// The links and addresses of a node that Patchbay could change, as text to compare.
pub fn host_state(lab: &Lab, node: &str) -> Result<String> {
    let mut text = String::new();
    let links: Vec<Value> = serde_json::from_str(&lab.node(node).output(&["ip", "-d", "-j", "link"])?)?;
    for link in links {
        let name = link["ifname"].as_str().unwrap_or_default();
        // Veths of pods.
        if name.starts_with("veth") {
            continue;
        }
        writeln!(
            text,
            "{name} {} mtu {} {} master {} alias {}",
            link["linkinfo"]["info_kind"], link["mtu"], link["flags"], link["master"], link["ifalias"]
        )?;
    }
    let addresses = lab.node(node).output(&["ip", "-o", "addr", "show", "scope", "global"])?;
    for line in addresses.lines().filter(|line| !line.contains(" veth")) {
        writeln!(text, "{line}")?;
    }
    Ok(text)
}

/// The number of lost packets in the summary of iputils' `ping`.
pub fn packets_lost(summary: &str) -> Result<u32> {
    let (sent, rest) = summary.split_once(" packets transmitted, ").context("the output has no summary")?;
    let sent: u32 = sent.rsplit(['\n', ' ']).next().unwrap_or_default().parse()?;
    let received: u32 = rest.split_whitespace().next().unwrap_or_default().parse()?;
    ensure!(received <= sent + 100, "{summary}");
    Ok(sent.saturating_sub(received))
}

/// Starts a pod with an address of a network, and ends it so that `patchbay-ipam` gets no DEL.
pub async fn end_pod_without_del(ns: &TestNamespace, node: &str, network: &str) -> Result<()> {
    let config = json!({
        "cniVersion": "1.0.0", "name": "lan", "type": "macvlan", "master": "eth1", "mode": "bridge",
        "ipam": {"type": "patchbay-ipam", "network": network},
    });
    create_nad(ns, "lan", &config).await?;
    ns.start_pod(attached_pod("lost", node, "lan")).await?;
    wait_for_used(&ns.client, network, 1).await?;
    let sh = |script: &str| ns.lab.node(node).output(&["sh", "-c", script]);
    // The daemon repairs its own plugin, so the one that calls it is replaced.
    sh(
        "cd /opt/cni/bin && mv macvlan macvlan.real && printf '#!/bin/sh\\nexit 0\\n' >macvlan && chmod 755 macvlan",
    )?;
    let deleted = ns.lab.kubectl(&["-n", &ns.namespace, "delete", "pod", "lost", "--now", "--timeout=60s"]);
    sh("cd /opt/cni/bin && mv macvlan.real macvlan")?;
    deleted.map(drop)
}
