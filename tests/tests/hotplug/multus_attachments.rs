//! Attachments that multus or multus-dynamic-networks-controller made.

use std::{
    io::{Read as _, Write as _},
    os::unix::net::UnixStream,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use e2e::{
    bridge::WAIT_TIMEOUT,
    hotplug::{
        LivePod, NETWORK_STATUS, NETWORKS, RELEASE_LIMIT, bridge_config, create_bridge_nad, delete_nad,
        element, host_local_addresses, network_name, plain_pod, pod_with_networks, start_live_pod,
        start_live_pods, wait_addresses_within,
    },
    patchbay,
};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, PostParams},
};
use lab::{
    Lab,
    test_namespace::{TestNamespace, pod, with_namespace},
    wait,
};
use serde_json::{Value, json};

use crate::{
    multus_config::with_multus_keys,
    pod_end::{start_daemon, stop_daemon},
};

pub async fn attachments_of_pod_start_are_unplugged(lab: Lab) -> Result<()> {
    with_namespace(&lab, "cold", async |ns: &TestNamespace| {
        create_bridge_nad(ns, "blue", "10.160.0.0/24").await?;
        create_bridge_nad(ns, "red", "10.160.1.0/24").await?;
        let networks = json!([element("blue", "net1"), element("red", "net2")]);
        let pod = start_live_pod(ns, pod_with_networks("p", "node-2", &networks)).await?;
        let index = pod.link_index("net2")?;
        pod.set_networks(&json!([element("red", "net2")])).await?;
        pod.wait_interfaces(&["net2"]).await?;
        ensure!(pod.link_index("net2")? == index, "net2 was made again");
        let held = host_local_addresses(&lab, "node-2", &network_name(ns, "blue"));
        ensure!(held.is_empty(), "{held:?}");
        pod.wait_event("RemovedInterface", "removed interface net1 from network: blue").await?;
        pod.set_networks(&networks).await?;
        pod.wait_interfaces(&["net1", "net2"]).await?;
        // multus releases what it made, and Patchbay what it plugged; the second DEL for net1 by multus harms nothing.
        pod.delete().await?;
        for network in ["blue", "red"] {
            wait_addresses_within(RELEASE_LIMIT, &lab, "node-2", &network_name(ns, network), 0).await?;
        }
        Ok(())
    })
    .await
}

pub async fn default_networks_of_multus_stay(lab: Lab) -> Result<()> {
    const NODE: &str = "node-2";
    let client = lab.client().await?;
    let system = TestNamespace { lab: lab.clone(), client, namespace: "kube-system".to_owned() };
    create_bridge_nad(&system, "lab-default", "10.163.0.0/24").await?;
    let keys = json!({"defaultNetworks": ["lab-default"]});
    let outcome = with_multus_keys(&lab, NODE, &keys, async || {
        with_namespace(&lab, "defaults", async |ns: &TestNamespace| {
            edits_keep_the_default_network(ns, &system, NODE).await
        })
        .await
    })
    .await;
    outcome.and(delete_nad(&system, "lab-default").await)
}

async fn edits_keep_the_default_network(
    ns: &TestNamespace,
    system: &TestNamespace,
    node: &str,
) -> Result<()> {
    create_bridge_nad(ns, "blue", "10.163.1.0/24").await?;
    let networks = json!([element("blue", "lan")]);
    let pod = start_live_pod(ns, pod_with_networks("p", node, &networks)).await?;
    ensure!(pod.link_names()?.into_iter().eq(["lan", "net1"]), "{:?}", pod.link_names()?);
    let index = pod.link_index("net1")?;
    let without = async |round: &str| {
        pod.set_networks(&json!([])).await?;
        pod.wait_interfaces(&["net1"]).await.with_context(|| round.to_owned())?;
        ensure!(pod.link_index("net1")? == index, "{round}: net1 was made again");
        anyhow::Ok(())
    };
    without("the network of the annotation").await?;
    // Another daemon has not seen what the annotation named at the start of the pod.
    patchbay::restart_daemon(&ns.lab, &ns.client, node).await?;
    pod.set_networks(&networks).await?;
    pod.wait_interfaces(&["lan", "net1"]).await?;
    without("after a restart of the daemon").await?;
    let events = pod.events().await?;
    ensure!(!events.iter().any(|event| event.message.contains("net1")), "{events:?}");
    pod.delete().await?;
    for network in [network_name(ns, "blue"), network_name(system, "lab-default")] {
        wait_addresses_within(RELEASE_LIMIT, &ns.lab, node, &network, 0).await?;
    }
    Ok(())
}

fn base64(text: &str) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut encoded = String::new();
    for chunk in text.as_bytes().chunks(3) {
        let byte = |index: usize| u32::from(chunk.get(index).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for digit in 0..4 {
            let value = usize::try_from(bits >> (18 - 6 * digit) & 63).unwrap_or(0);
            encoded.push(if digit <= chunk.len() { char::from(DIGITS[value]) } else { '=' });
        }
    }
    encoded
}

/// Plugs an interface as multus-dynamic-networks-controller does: by a request to multus, which does not write the pod's status.
async fn plug_by_multus(pod: &LivePod, interface: &str, config: &Value) -> Result<()> {
    let lab = &pod.ns.lab;
    let uid = pod.object().await?.metadata.uid.context("a UID")?;
    let filter = format!(r#"labels."io.kubernetes.pod.uid"=={uid},labels."io.cri-containerd.kind"==sandbox"#);
    let sandbox = lab.node(&pod.node).output(&["ctr", "-n", "k8s.io", "containers", "ls", "-q", &filter])?;
    let netns = pod.run(&["ip", "netns", "identify"])?;
    let body = json!({
        "env": {
            "CNI_COMMAND": "ADD", "CNI_CONTAINERID": sandbox.trim(),
            "CNI_NETNS": format!("/var/run/netns/{}", netns.trim()), "CNI_IFNAME": interface,
            "CNI_ARGS": format!(
                "K8S_POD_NAMESPACE={};K8S_POD_NAME={};K8S_POD_UID={uid}", pod.ns.namespace, pod.name
            ),
        },
        "config": base64(&config.to_string()),
    })
    .to_string();
    let init = lab.node(&pod.node).init().context("the node is off")?;
    let socket = format!("/proc/{init}/root/run/multus/multus.sock");
    let mut stream = UnixStream::connect(&socket).with_context(|| format!("connect to {socket}"))?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    let head = format!(
        "POST /delegate HTTP/1.1\r\nHost: dummy\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())?;
    let mut response = String::new();
    stream.read_to_string(&mut response)?;
    ensure!(response.starts_with("HTTP/1.1 200"), "{response}");
    let address = pod.address(interface)?;
    let entry = json!({
        "name": format!("{}/{}", pod.ns.namespace, "blue"), "interface": interface, "ips": [address], "dns": {},
    });
    let object = pod.object().await?;
    let text = object.annotations().get(NETWORK_STATUS).context("the pod has no network-status")?;
    let mut list: Vec<Value> = serde_json::from_str(text)?;
    list.push(entry);
    pod.annotate(json!({
        NETWORKS: json!([element("blue", interface)]).to_string(), NETWORK_STATUS: Value::Array(list).to_string(),
    }))
    .await
}

pub async fn attachments_of_the_original_are_unplugged_and_released(lab: Lab) -> Result<()> {
    with_namespace(&lab, "original", async |ns: &TestNamespace| {
        create_bridge_nad(ns, "blue", "10.161.0.0/24").await?;
        let pods = [plain_pod("unplugged", "node-1"), plain_pod("deleted", "node-1")];
        let [unplugged, deleted] = start_live_pods(ns, pods).await?;
        stop_daemon(&lab).await?;
        let config = bridge_config(ns, "blue", "10.161.0.0/24");
        for pod in [&unplugged, &deleted] {
            plug_by_multus(pod, "net1", &config).await?;
        }
        let index = unplugged.link_index("net1")?;
        start_daemon(&lab).await?;
        tokio::time::sleep(Duration::from_secs(3)).await;
        ensure!(
            unplugged.link_index("net1")? == index,
            "an attachment of multus-dynamic-networks-controller was replaced"
        );
        let network = network_name(ns, "blue");
        ensure!(host_local_addresses(&lab, "node-1", &network).len() == 2, "two addresses are in use");
        unplugged.set_networks(&json!([])).await?;
        unplugged.wait_interfaces(&[]).await?;
        wait_addresses_within(RELEASE_LIMIT, &lab, "node-1", &network, 1).await?;
        deleted.delete().await?;
        let took = wait_addresses_within(RELEASE_LIMIT, &lab, "node-1", &network, 0).await?;
        println!("released {took:?} after the pod was deleted");
        Ok(())
    })
    .await
}

/// The name of the pod of [`create_original`].
pub const ORIGINAL: &str = "dynamic-networks-controller-ds-t";

/// Waits for an event of a Node that its daemon reported.
pub async fn node_event(lab: &Lab, node: &str, reason: &str) -> Result<()> {
    let fields =
        format!("--field-selector=involvedObject.kind=Node,involvedObject.name={node},reason={reason}");
    let lines = "jsonpath={range .items[*]}{.reportingComponent} {.message}{\"\\n\"}{end}";
    wait::until(WAIT_TIMEOUT, &format!("event {reason} of {node}"), || async {
        let events = lab.kubectl(&["get", "events", "-A", &fields, "-o", lines])?;
        let event = events.lines().find(|line| line.starts_with("patchbay-node"));
        Ok(event.map(|line| println!("{line}")))
    })
    .await
}

/// A pod with the label of multus-dynamic-networks-controller.
pub async fn create_original(lab: &Lab, namespace: &str, node: &str) -> Result<()> {
    let object = pod(ORIGINAL).on(node).label("app", "dynamic-networks-controller");
    let object: Pod = serde_json::from_value(object.object())?;
    let pods: Api<Pod> = Api::namespaced(lab.client().await?, namespace);
    wait::until(WAIT_TIMEOUT, "the pod to be admitted", || async {
        Ok(pods.create(&PostParams::default(), &object).await.map(Some)?)
    })
    .await?;
    wait::until(WAIT_TIMEOUT, "the pod to run", || async {
        let phase = pods.get(ORIGINAL).await?.status.and_then(|s| s.phase);
        Ok((phase.as_deref() == Some("Running")).then_some(()))
    })
    .await
}

pub async fn nothing_is_plugged_while_the_original_runs_on_the_node(lab: Lab) -> Result<()> {
    with_namespace(&lab, "standby", async |ns: &TestNamespace| {
        create_bridge_nad(ns, "blue", "10.162.0.0/24").await?;
        let pods =
            [plain_pod("plugged", "node-1"), plain_pod("deleted", "node-1"), plain_pod("other", "node-2")];
        let [plugged, deleted, other] = start_live_pods(ns, pods).await?;
        // A tenant's pod of that label means nothing.
        create_original(&lab, &ns.namespace, "node-1").await?;
        deleted.set_networks(&json!([element("blue", "net1")])).await?;
        deleted.wait_interfaces(&["net1"]).await?;
        create_original(&lab, "kube-system", "node-1").await?;
        let system: Api<Pod> = Api::namespaced(lab.client().await?, "kube-system");
        let outcome = async {
            node_event(&lab, "node-1", "HotplugStandDown").await?;
            plugged.set_networks(&json!([element("blue", "net1")])).await?;
            other.set_networks(&json!([element("blue", "net1")])).await?;
            other.wait_interfaces(&["net1"]).await.context("the other node")?;
            tokio::time::sleep(Duration::from_secs(3)).await;
            ensure!(plugged.link_names()?.is_empty(), "{:?}", plugged.link_names()?);
            // Teardown of our own attachments goes on.
            deleted.delete().await?;
            wait_addresses_within(RELEASE_LIMIT, &lab, "node-1", &network_name(ns, "blue"), 0).await
        }
        .await;
        let params = DeleteParams::default().grace_period(0);
        let left = Instant::now();
        system.delete(ORIGINAL, &params).await?;
        outcome?;
        plugged.wait_interfaces_within(Duration::from_secs(10), &["net1"]).await?;
        let took = left.elapsed();
        println!("plugged {took:?} after multus-dynamic-networks-controller left");
        ensure!(took >= Duration::from_secs(4), "plugging resumed at once");
        Ok(())
    })
    .await
}
