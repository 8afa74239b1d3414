//! BridgeNetworks in a lab: making them, joining pods to them, and looking at what is really there.

use std::{
    fmt::Write as _,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use api::{BridgeNetwork, NodeNetwork};
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, PostParams},
};
use lab::{
    Lab,
    test_namespace::{PodBuilder, TestNamespace, pod},
    wait,
};
use serde_json::{Value, json};

/// How soon a network has to work after it was applied.
pub const READY_LIMIT: Duration = Duration::from_secs(2);
/// For what is not about time, amid tests that run at the same time.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(30);

pub fn networks(client: &Client) -> Api<BridgeNetwork> {
    Api::all(client.clone())
}

/// Makes a network.
pub async fn create_network(client: &Client, name: &str, spec: Value) -> Result<BridgeNetwork> {
    let object: BridgeNetwork = serde_json::from_value(json!({
        "apiVersion": "patchbay.dev/v1alpha1", "kind": "BridgeNetwork", "metadata": {"name": name}, "spec": spec,
    }))?;
    networks(client).create(&PostParams::default(), &object).await.with_context(|| format!("create {name}"))
}

/// A condition's status and message.
pub fn condition(object: &BridgeNetwork, kind: &str) -> (String, String, String) {
    let conditions = object.status.iter().flat_map(|status| &status.conditions);
    let text = |value: Value| value.as_str().unwrap_or_default().to_owned();
    conditions
        .filter(|condition| condition.r#type == kind)
        .map(|one| (text(json!(one.status)), one.reason.clone(), one.message.clone()))
        .next()
        .unwrap_or_default()
}

/// Waits until the network works on every node that it selects, and says how long that took.
pub async fn wait_ready(client: &Client, name: &str, within: Duration) -> Result<Duration> {
    let start = Instant::now();
    wait::until(within, &format!("BridgeNetwork {name} to be ready"), || async {
        let object = networks(client).get(name).await?;
        let current =
            object.status.as_ref().and_then(|s| s.observed_generation) == object.metadata.generation;
        match condition(&object, "Ready").0.as_str() {
            "True" if current => Ok(Some(())),
            _ => bail!("{}", serde_json::to_string(&object.status)?),
        }
    })
    .await?;
    Ok(start.elapsed())
}

/// Makes a network and waits until it works.
pub async fn start_network(client: &Client, name: &str, spec: Value) -> Result<()> {
    create_network(client, name, spec).await?;
    wait_ready(client, name, WAIT_TIMEOUT).await.map(drop)
}

/// Deletes a network without waiting.
pub async fn delete_network(client: &Client, name: &str) -> Result<()> {
    networks(client)
        .delete(name, &DeleteParams::default())
        .await
        .with_context(|| format!("delete {name}"))?;
    Ok(())
}

/// Waits until a network is gone.
pub async fn wait_deleted(client: &Client, name: &str, within: Duration) -> Result<Duration> {
    let start = Instant::now();
    wait::until(within, &format!("BridgeNetwork {name} to be gone"), || async {
        match networks(client).get_opt(name).await? {
            None => Ok(Some(())),
            Some(object) => bail!("{}", serde_json::to_string(&object)?),
        }
    })
    .await?;
    Ok(start.elapsed())
}

/// What a node says about a network.
pub async fn node_report(client: &Client, node: &str, network: &str) -> Result<Option<Value>> {
    let object = Api::<NodeNetwork>::all(client.clone()).get(node).await?;
    let found = object.status.iter().flat_map(|status| &status.networks).find(|one| one.name == network);
    Ok(found.map(|one| json!(one)))
}

/// A pod on networks that may set its own addresses.
pub fn attached_pod(name: &str, node: &str, attachments: &str) -> PodBuilder {
    pod(name).on(node).annotation("k8s.v1.cni.cncf.io/networks", attachments).capability("NET_ADMIN")
}

/// The attachment of a network for the pods of a test namespace.
pub fn attachment_for(ns: &TestNamespace) -> Value {
    json!({"namespaces": [ns.namespace]})
}

/// Waits until the events of a test namespace have these words, and returns all of them.
pub async fn wait_for_event(ns: &TestNamespace, words: &str, within: Duration) -> Result<String> {
    let arguments = ["-n", &ns.namespace, "get", "events", "-o", "jsonpath={.items[*].message}"];
    wait::until(within, &format!("an event that says {words:?}"), || async {
        let events = ns.lab.kubectl(&arguments)?;
        Ok(events.contains(words).then_some(events))
    })
    .await
}

/// Starts a pod on one network, as `net1`, with an address.
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

/// The same for several pods, all at the same time.
pub async fn start_pods_with_addresses<const N: usize>(
    ns: &TestNamespace,
    pods: [(&str, &str, &str, &str); N],
) -> Result<[Pod; N]> {
    let all = pods
        .map(|(name, node, attachment, address)| start_pod_with_address(ns, name, node, attachment, address));
    try_join_all(all).await?.try_into().map_err(|_| anyhow!("as many pods as were asked for"))
}

/// Gives a pod's interface an address.
pub fn add_address(ns: &TestNamespace, pod: &str, interface: &str, address: &str) -> Result<()> {
    let mut words = vec!["ip", "addr", "add", address, "dev", interface];
    if address.contains(':') {
        // Usable at once.
        words.push("nodad");
    }
    ns.exec(pod, &words).map(drop)
}

/// Waits until a pod gets an answer from an address.
pub async fn wait_reachable(ns: &TestNamespace, pod: &str, address: &str) -> Result<()> {
    let what = format!("{pod} to reach {address}");
    wait::until(WAIT_TIMEOUT, &what, || async {
        ns.exec(pod, &["ping", "-c", "1", "-W", "1", address]).map(Some)
    })
    .await
    .map(drop)
}

/// A program of the node inside a pod's network.
pub fn exec_in_pod_netns(lab: &Lab, pod: &Pod, argv: &[&str]) -> Result<String> {
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).context("the pod has a node")?;
    let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    let mut ids = statuses.filter_map(|status| status.container_id.as_deref());
    let id = ids.next().context("a container")?;
    let id = id.rsplit('/').next().unwrap_or_default();
    let tasks = lab.node(node).output(&["ctr", "-n", "k8s.io", "tasks", "ls"])?;
    let pid = tasks
        .lines()
        .find(|line| line.starts_with(id))
        .and_then(|line| line.split_whitespace().nth(1))
        .with_context(|| format!("the task of {}: {tasks}", pod.name_any()))?;
    lab.node(node).output(&[&["nsenter", "-t", pid, "-n"], argv].concat())
}

/// A link of a node as `ip` shows it; none if there is no such link.
pub fn link(lab: &Lab, node: &str, name: &str) -> Option<Value> {
    let text = lab.node(node).output(&["ip", "-d", "-j", "link", "show", "dev", name]).ok()?;
    serde_json::from_str::<Vec<Value>>(&text).ok()?.into_iter().next()
}

/// Everything of a node's network that Patchbay could have changed, as text to compare.
pub fn host_state(lab: &Lab, node: &str) -> Result<String> {
    let mut text = String::new();
    let links: Vec<Value> = serde_json::from_str(&lab.node(node).output(&["ip", "-d", "-j", "link"])?)?;
    for link in links {
        let name = link["ifname"].as_str().unwrap_or_default();
        // Ends of pods come and go with the pods.
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

/// The ping of iputils in a pod: how many of `count` packets were lost.
pub fn packets_lost(summary: &str) -> Result<u32> {
    let (sent, rest) = summary.split_once(" packets transmitted, ").context("a summary of ping")?;
    let sent: u32 = sent.rsplit(['\n', ' ']).next().unwrap_or_default().parse()?;
    let received: u32 = rest.split_whitespace().next().unwrap_or_default().parse()?;
    ensure!(received <= sent + 100, "{summary}");
    Ok(sent.saturating_sub(received))
}
