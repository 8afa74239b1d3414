//! The configuration of multus: that of its running daemon, which only the daemon's container has, and none yet.

use anyhow::{Context as _, Result, ensure};
use e2e::{
    bridge::WAIT_TIMEOUT,
    hotplug::{
        LivePod, bridge_name, create_bridge_nad, element, plain_pod, pod_with_networks, start_live_pod,
        start_live_pods,
    },
    patchbay::{self, NAMESPACE},
};
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::{
    Api,
    api::{DeleteParams, ListParams, PostParams},
};
use lab::{
    Lab, Topology,
    test_namespace::{TestNamespace, with_namespace},
    wait,
};
use serde_json::{Value, json};

const NODE: &str = "node-1";
/// The file in the ConfigMap of multus, on the disk of a node.
const CONFIG_MAP: &str = "opt/lab/multus-daemon-config/daemon-config.json";

/// An element of a network of another namespace.
fn foreign(owner: &TestNamespace, network: &str, interface: &str) -> Value {
    json!({"name": network, "namespace": owner.namespace, "interface": interface})
}

fn write_config_map(lab: &Lab, node: &str, text: &str) -> Result<()> {
    std::fs::write(lab.node(node).disk().join(CONFIG_MAP), text).context("write the ConfigMap of multus")
}

/// Runs a test with keys in the configuration of multus' daemon on a node, and restores it.
pub async fn with_multus_keys(
    lab: &Lab,
    node: &str,
    keys: &Value,
    test: impl AsyncFnOnce() -> Result<()>,
) -> Result<()> {
    let original = std::fs::read_to_string(lab.node(node).disk().join(CONFIG_MAP))?;
    let mut config: Value = serde_json::from_str(&original)?;
    config.as_object_mut().context("an object")?.extend(keys.as_object().cloned().unwrap_or_default());
    let restart = async |text: &str| {
        write_config_map(lab, node, text)?;
        lab.restart(&format!("{node}/multus"))?;
        lab.up(Topology::Nodes(2)).await
    };
    let outcome = async {
        restart(&config.to_string()).await?;
        test().await
    }
    .await;
    outcome.and(restart(&original).await)
}

/// Waits until the health of the daemon says this.
async fn wait_health(lab: &Lab, text: &str) -> Result<()> {
    let client = lab.client().await?;
    wait::until(WAIT_TIMEOUT, &format!("the health of the daemon to say {text:?}"), || async {
        let daemon = patchbay::daemon_pod(&client, NODE).await?;
        let probe = ["-n", NAMESPACE, "exec", &daemon, "--", "/usr/bin/patchbay", "probe", "ready"];
        let output = lab.kubectl(&probe)?;
        ensure!(output.contains(text), "{output}");
        Ok(Some(()))
    })
    .await
}

/// Waits for an event about the node; returns its note.
async fn wait_node_event(lab: &Lab, reason: &str) -> Result<String> {
    let events: Api<Event> = Api::all(lab.client().await?);
    let fields = format!("involvedObject.kind=Node,involvedObject.name={NODE},reason={reason}");
    wait::until(WAIT_TIMEOUT, &format!("event {reason} of {NODE}"), || async {
        let all = events.list(&ListParams::default().fields(&fields)).await?;
        Ok(all.items.into_iter().find_map(|event| event.message))
    })
    .await
}

pub async fn the_configuration_of_the_running_multus_daemon_is_followed(lab: Lab) -> Result<()> {
    let file = lab.node(NODE).disk().join("etc/cni/net.d/multus.d/daemon-config.json");
    ensure!(!file.exists(), "only the container of multus has its configuration");
    with_namespace(&lab, "owner", async |owner: &TestNamespace| {
        create_bridge_nad(owner, "blue", "10.187.0.0/24").await?;
        with_namespace(&lab, "tenant", async |ns: &TestNamespace| {
            create_bridge_nad(ns, "own", "10.187.1.0/24").await?;
            let pods = start_live_pods(ns, [plain_pod("early", NODE), plain_pod("late", NODE)]).await?;
            let [early, late] = &pods;
            early.set_networks(&json!([foreign(owner, "blue", "net1")])).await?;
            early.wait_interfaces(&["net1"]).await?;
            with_multus_keys(&lab, NODE, &json!({"namespaceIsolation": true}), async || {
                // What is attached stays, and is reported as soon as the daemon has read the file again.
                let state = early.wait_state("blue", "Attached", "NamespaceForbidden").await?;
                println!("attached: {state}");
                late.set_networks(&json!([foreign(owner, "blue", "net1"), element("own", "net2")])).await?;
                late.wait_interfaces(&["net2"]).await?;
                late.wait_state("blue", "Refused", "NamespaceForbidden").await?;
                early.wait_event("NamespaceForbidden", "stays attached").await?;
                ensure!(early.link_names()?.contains("net1"), "{:?}", early.link_names()?);
                Ok(())
            })
            .await?;
            late.wait_interfaces(&["net1", "net2"]).await?;
            unreadable_configuration(&lab, owner, late).await
        })
        .await
    })
    .await
}

/// A configuration that cannot be read may have switched isolation on, and stops nothing else.
async fn unreadable_configuration(lab: &Lab, owner: &TestNamespace, pod: &LivePod) -> Result<()> {
    let original = std::fs::read_to_string(lab.node(NODE).disk().join(CONFIG_MAP))?;
    pod.set_networks(&json!([])).await?;
    pod.wait_interfaces(&[]).await?;
    write_config_map(lab, NODE, "{")?;
    let outcome = async {
        wait_health(lab, "the configuration of multus on this node cannot be read").await?;
        let note = wait_node_event(lab, "MultusConfigUnknown").await?;
        println!("Node event: {note}");
        ensure!(note.contains("/etc/cni/net.d/multus.d/daemon-config.json"), "{note}");
        pod.set_networks(&json!([foreign(owner, "blue", "net1"), element("own", "net2")])).await?;
        pod.wait_interfaces(&["net2"]).await?;
        let state = pod.wait_state("blue", "Pending", "IsolationUnknown").await?;
        println!("waiting: {state}");
        Ok(())
    }
    .await;
    write_config_map(lab, NODE, &original)?;
    outcome.and(pod.wait_interfaces(&["net1", "net2"]).await)
}

pub async fn default_networks_of_multus_in_other_namespaces_are_not_detached(lab: Lab) -> Result<()> {
    with_namespace(&lab, "infra", async |infra: &TestNamespace| {
        create_bridge_nad(infra, "extra", "10.188.0.0/24").await?;
        create_bridge_nad(infra, "own", "10.188.1.0/24").await?;
        with_namespace(&lab, "system", async |system: &TestNamespace| {
            create_bridge_nad(system, "own", "10.188.2.0/24").await?;
            let keys = json!({
                "defaultNetworks": ["extra"], "multusNamespace": infra.namespace,
                "systemNamespaces": [system.namespace],
            });
            with_multus_keys(&lab, NODE, &keys, async || {
                // In the namespace of the default network, only the configuration tells it from a request.
                let own = json!([element("own", "own1")]);
                let pod = start_live_pod(infra, pod_with_networks("p", NODE, &own)).await?;
                let bridge = bridge_name(infra, "extra");
                ensure!(pod.link("net1")?.is_some(), "multus attached no default network to {bridge}");
                pod.set_networks(&json!([element("own", "own2")])).await?;
                pod.wait_interfaces(&["net1", "own2"]).await?;
                pod.set_networks(&json!([])).await?;
                pod.wait_interfaces(&["net1"]).await?;
                // A pod of a system namespace gets no default network: this one was requested.
                let requested = json!([foreign(infra, "extra", "net1")]);
                let pod = start_live_pod(system, pod_with_networks("p", NODE, &requested)).await?;
                pod.wait_interfaces(&["net1"]).await?;
                pod.set_networks(&json!([element("own", "own1")])).await?;
                pod.wait_interfaces(&["own1"]).await
            })
            .await
        })
        .await
    })
    .await
}

/// On a node without multus, a pod that is about to install it keeps networks of other namespaces waiting.
pub async fn check_first_contact(ns: &TestNamespace, node: &str) -> Result<()> {
    with_namespace(&ns.lab, "owner", async |owner: &TestNamespace| {
        create_bridge_nad(owner, "blue", "10.189.0.0/24").await?;
        create_bridge_nad(ns, "own", "10.189.1.0/24").await?;
        let installer: Pod = serde_json::from_value(json!({
            "metadata": {"name": "kube-multus", "namespace": "kube-system"},
            "spec": {
                "nodeName": node,
                "containers": [{
                    "name": "kube-multus", "image": "localhost/multus-cni:absent", "imagePullPolicy": "Never",
                    "volumeMounts": [{"name": "cni", "mountPath": "/host/etc/cni/net.d"}],
                }],
                "volumes": [{"name": "cni", "hostPath": {"path": "/etc/cni/net.d"}}],
            },
        }))?;
        let pods: Api<Pod> = Api::namespaced(ns.client.clone(), "kube-system");
        pods.create(&PostParams::default(), &installer).await?;
        let outcome = async {
            let pod = start_live_pod(ns, plain_pod("contact", node)).await?;
            pod.set_networks(&json!([foreign(owner, "blue", "net1"), element("own", "net2")])).await?;
            pod.wait_interfaces(&["net2"]).await?;
            let state = pod.wait_state("blue", "Pending", "IsolationUnknown").await?;
            println!("waiting: {state}");
            let message = state["message"].as_str().unwrap_or_default();
            ensure!(message.contains("pod kube-system/kube-multus"), "{message}");
            Ok(pod)
        }
        .await;
        pods.delete("kube-multus", &DeleteParams::default().grace_period(0)).await?;
        // Without multus, no setting is needed.
        outcome?.wait_interfaces(&["net1", "net2"]).await
    })
    .await
}
