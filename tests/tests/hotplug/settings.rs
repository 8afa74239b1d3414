//! The settings of a node: the configuration file of multus-dynamic-networks-controller, and private mounts.

use anyhow::{Context as _, Result, ensure};
use e2e::{
    bridge::WAIT_TIMEOUT,
    hotplug::{
        create_record_nad, element, network_name, plain_pod, pod_with_networks, start_live_pod,
        start_live_pods,
    },
    patchbay::{self, NAMESPACE, daemon_pid, with_daemon_variable},
};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use lab::{
    Lab,
    test_namespace::{TestNamespace, with_namespace},
    wait,
};
use serde_json::{Value, json};

use crate::NODES;

/// The file of multus-dynamic-networks-controller on the nodes. The daemon sees it below `/host`.
const CONFIG_FILE: &str = "etc/dynamic-networks-config.json";
/// The flag `--hotplug-config`.
const CONFIG_VARIABLE: &str = "PATCHBAY_HOTPLUG_CONFIG";
/// Another path of the socket of containerd.
const OTHER_SOCKET: &str = "/run/original/cri.sock";

fn write_config(lab: &Lab, node: &str, text: &str) -> Result<()> {
    let path = lab.node(node).disk().join(CONFIG_FILE);
    std::fs::write(&path, text).with_context(|| format!("write {}", path.display()))
}

/// The condition `RuntimeFound` of a NodeNetwork: its status and its message.
fn runtime_found(lab: &Lab, node: &str) -> Result<(String, String)> {
    let text = lab.kubectl(&["get", "nodenetwork", node, "-o", "json"])?;
    let object: Value = serde_json::from_str(&text)?;
    let conditions = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let found = conditions.iter().find(|condition| condition["type"] == "RuntimeFound");
    let field =
        |name: &str| found.and_then(|condition| condition[name].as_str()).unwrap_or_default().to_owned();
    Ok((field("status"), field("message")))
}

async fn wait_runtime_found(lab: &Lab, node: &str, status: &str, text: &str) -> Result<String> {
    wait::until(WAIT_TIMEOUT, &format!("RuntimeFound {status} of {node} with {text:?}"), || async {
        let (found, message) = runtime_found(lab, node)?;
        ensure!(found == status && message.contains(text), "{found}: {message}");
        Ok(Some(message))
    })
    .await
}

/// The message of the last container of a pod that exited.
async fn exit_message(pods: &Api<Pod>, name: &str) -> Result<Option<String>> {
    let status = pods.get(name).await?.status.unwrap_or_default();
    let containers = status.container_statuses.into_iter().flatten();
    let mut states = containers.flat_map(|container| [container.state, container.last_state]).flatten();
    Ok(states.find_map(|state| state.terminated?.message))
}

pub async fn the_configuration_file_of_the_original_names_the_runtime_socket(lab: Lab) -> Result<()> {
    let (file, link) =
        (format!("/host/{CONFIG_FILE}"), format!("ln -f /run/containerd/containerd.sock {OTHER_SOCKET}"));
    for (node, prefix) in NODES.into_iter().zip(["/host", ""]) {
        lab.node(node).output(&["sh", "-c", &format!("mkdir -p /run/original && {link}")])?;
        let config = json!({
            "criSocketPath": format!("{prefix}{OTHER_SOCKET}"), "criType": "crio",
            "multusSocketPath": "/host/run/multus/multus.sock", "example.com/unknown": [1],
        });
        write_config(&lab, node, &config.to_string())?;
    }
    let outcome = with_namespace(&lab, "config", async |ns: &TestNamespace| {
        create_record_nad(ns, "blue", "10.184.0.0/24", &json!({})).await?;
        let pods = start_live_pods(ns, NODES.map(|node| plain_pod(node, node))).await?;
        with_daemon_variable(&lab, CONFIG_VARIABLE, &file, async || {
            for pod in &pods {
                let message = wait_runtime_found(&lab, &pod.node, "True", OTHER_SOCKET).await?;
                println!("{}: {message}", pod.node);
                pod.set_networks(&json!([element("blue", "net1")])).await?;
                pod.wait_interfaces(&["net1"]).await?;
                pod.set_networks(&json!([])).await?;
                pod.wait_interfaces(&[]).await?;
            }
            Ok(())
        })
        .await
    })
    .await;
    for node in NODES {
        lab.node(node).output(&["rm", "-r", "/run/original", &format!("/{CONFIG_FILE}")])?;
    }
    outcome
}

pub async fn a_configuration_file_that_cannot_be_used_is_reported(lab: Lab) -> Result<()> {
    const ABSENT: &str = "/run/absent/cri.sock";
    let client = lab.client().await?;
    let set_variable = async |variable: Value| {
        patchbay::patch_daemons(&client, json!({"containers": [{"name": "node", "env": [variable]}]})).await
    };
    // One node has a wrong path, the other one a file that is no JSON.
    write_config(&lab, "node-1", &json!({"criSocketPath": format!("/host{ABSENT}")}).to_string())?;
    write_config(&lab, "node-2", "criSocketPath: /run/containerd/containerd.sock")?;
    let outcome = with_namespace(&lab, "badconfig", async |ns: &TestNamespace| {
        create_record_nad(ns, "blue", "10.185.0.0/24", &json!({})).await?;
        let pod = start_live_pod(ns, plain_pod("p", "node-1")).await?;
        let before = patchbay::daemon_pod(&client, "node-1").await?;
        set_variable(json!({"name": CONFIG_VARIABLE, "value": format!("/host/{CONFIG_FILE}")})).await?;
        let checked = async {
            let message = wait_runtime_found(&lab, "node-1", "False", ABSENT).await?;
            println!("NodeNetwork: {message}");
            ensure!(message.contains("set --runtime-socket"), "{message}");
            pod.set_networks(&json!([element("blue", "net1")])).await?;
            let health = wait::until(WAIT_TIMEOUT, "the health of the daemon to name the path", || async {
                let daemon = patchbay::daemon_pod(&client, "node-1").await?;
                ensure!(daemon != before, "the daemon was not replaced");
                let probe = ["-n", NAMESPACE, "exec", &daemon, "--", "/usr/bin/patchbay", "probe", "ready"];
                let text = lab.kubectl(&probe)?;
                let problem = text.lines().find(|line| line.contains("interfaces of pods are not attached"));
                ensure!(problem.is_some_and(|line| line.contains(ABSENT)), "{text}");
                Ok(Some(text))
            })
            .await?;
            println!("probe: {health}");
            ensure!(pod.plugin_calls()?.is_empty(), "{:?}", pod.plugin_calls()?);
            // A file that cannot be read ends the daemon. `kubectl describe pod` shows why.
            let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
            let message = wait::until(WAIT_TIMEOUT, "the daemon of node-2 to exit", || async {
                let message = exit_message(&pods, &patchbay::daemon_pod(&client, "node-2").await?).await?;
                message.filter(|text| text.contains(CONFIG_FILE)).map(Some).context("no message")
            })
            .await?;
            println!("exit: {message}");
            ensure!(message.contains("--hotplug-config is not a JSON object"), "{message}");
            Ok(())
        }
        .await;
        set_variable(json!({"name": CONFIG_VARIABLE, "$patch": "delete"})).await?;
        patchbay::wait_ready(&lab).await?;
        checked?;
        // The edit is not lost.
        pod.wait_interfaces(&["net1"]).await
    })
    .await;
    for node in NODES {
        lab.node(node).output(&["rm", &format!("/{CONFIG_FILE}")])?;
    }
    outcome
}

/// The names of the files in a directory of a node, as its init sees them.
fn files(lab: &Lab, node: &str, dir: &str) -> Result<Vec<String>> {
    Ok(lab.node(node).output(&["ls", dir])?.lines().map(str::to_owned).collect())
}

pub async fn plugins_write_where_multus_writes_although_mounts_are_private(lab: Lab) -> Result<()> {
    const NODE: &str = "node-1";
    let (client, node) = (lab.client().await?, lab.node(NODE));
    let outcome = with_namespace(&lab, "private", async |ns: &TestNamespace| {
        create_record_nad(ns, "blue", "10.186.0.0/24", &json!({})).await?;
        let network = network_name(ns, "blue");
        let dir = format!("/var/lib/cni/networks/{network}");
        let addresses = || -> Result<Vec<String>> {
            let mut files = files(&lab, NODE, &dir)?;
            files.retain(|name| name.starts_with("10.186."));
            Ok(files)
        };
        // The container of the daemon does not see mounts that are created from now on: neither this one nor the network
        // namespaces of the pods.
        let daemon = daemon_pid(&lab, NODE)?;
        // Its image has no programs; this one needs no libraries.
        let mount = ["/host/usr/bin/busybox", "mount", "--make-rprivate", "/"];
        node.output(&[&["nsenter", "--mount", "--target", &daemon], &mount[..]].concat())?;
        node.output(&["mkdir", "-p", &dir])?;
        node.output(&["mount", "-t", "tmpfs", "tmpfs", &dir])?;
        let outcome = async {
            let networks = json!([element("blue", "net1")]);
            let [cold, hot] =
                start_live_pods(ns, [pod_with_networks("cold", NODE, &networks), plain_pod("hot", NODE)])
                    .await?;
            hot.set_networks(&networks).await?;
            hot.wait_interfaces(&["net1"]).await?;
            let mut expected = vec![cold.address("net1")?, hot.address("net1")?];
            expected.sort();
            let mut held = addresses()?;
            held.sort();
            ensure!(held == expected, "{held:?} instead of {expected:?}");
            let calls = hot.plugin_calls()?;
            let call = calls.first().context("a call")?;
            let init = node.output(&["readlink", "/proc/1/ns/mnt"])?;
            ensure!(call.mount_namespace == init.trim(), "{init}: {call:?}");
            let cached = format!("{network}-{}-net1", call.container());
            let is_cached =
                || -> Result<bool> { Ok(files(&lab, NODE, "/var/lib/cni/results")?.contains(&cached)) };
            ensure!(is_cached()?, "{cached} is not in the result cache");
            hot.set_networks(&json!([])).await?;
            hot.wait_interfaces(&[]).await?;
            ensure!(addresses()? == [cold.address("net1")?], "{:?}", addresses()?);
            ensure!(!is_cached()?, "{cached} is still in the result cache");
            // A deleted pod releases its address there, too.
            hot.set_networks(&networks).await?;
            hot.wait_interfaces(&["net1"]).await?;
            for pod in [&hot, &cold] {
                pod.delete().await?;
            }
            wait::until(WAIT_TIMEOUT, "the addresses to be released", || async {
                let held = addresses()?;
                ensure!(held.is_empty(), "{held:?}");
                Ok(Some(()))
            })
            .await
        }
        .await;
        node.output(&["umount", "--lazy", &dir])?;
        outcome
    })
    .await;
    patchbay::restart_daemon(&lab, &client, NODE).await?;
    outcome
}
