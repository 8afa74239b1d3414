//! Nodes with CRI-O, the thin multus or no multus, and the recording plugin.

use std::{io::Write as _, process::Stdio, time::Duration};

use anyhow::{Context as _, Result, ensure};
use kube::api::DeleteParams;
use lab::{
    Lab,
    test_namespace::{TestNamespace, pod},
    wait,
};
use serde_json::json;

/// Multus attaches a bridge with a bandwidth limit through the recording plugin, where it runs.
pub async fn attach_on_each_kind(ns: &TestNamespace) -> Result<()> {
    let lab = &ns.lab;
    let config = json!({"cniVersion": "1.0.0", "plugins": [
        {"type": "lab-record", "delegate": {
            "type": "bridge", "bridge": "br-k", "ipam": {"type": "host-local", "subnet": "10.9.0.0/24"},
        }},
        {"type": "bandwidth", "capabilities": {"bandwidth": true}},
        {"type": "lab-record", "capabilities": {"bandwidth": true}},
    ]});
    let definition = json!({
        "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
        "metadata": {"name": "limited", "namespace": ns.namespace}, "spec": {"config": config.to_string()},
    });
    let file = lab.kubeconfig().with_file_name("definition.json");
    std::fs::write(&file, definition.to_string())?;
    lab.kubectl(&["apply", "-f", file.to_str().context("the path is not UTF-8")?])?;
    let limits = json!({"ingressRate": 8_000_000, "ingressBurst": 80_000_000});
    let networks = json!([{"name": "limited", "bandwidth": limits}]).to_string();
    let mut addresses = Vec::new();
    for node in ["node-1", "node-2", "node-3"] {
        ns.create_pod(pod(node).on(node).annotation("k8s.v1.cni.cncf.io/networks", &networks)).await?;
    }
    for (node, caller) in [("node-1", Some("multus-daemon")), ("node-2", Some("multus")), ("node-3", None)] {
        let started = ns.wait_pod_ready(node).await?;
        let address = started.status.and_then(|s| s.pod_ip).context("the pod has no address")?;
        addresses.push(address);
        let links = ns.exec(node, &["ip", "-br", "link"])?;
        ensure!(links.contains("net1") == caller.is_some(), "{node}: {links}");
        let calls = lab.plugin_calls(node)?;
        let Some(caller) = caller else {
            ensure!(calls.is_empty(), "no multus runs on {node}: {calls:?}");
            ensure!(lab.node(node).output(&["ls", "/etc/cni/net.d"])?.trim() == "10-lab.conf", "{node}");
            continue;
        };
        ensure!(calls.len() == 2, "{calls:?}");
        for call in &calls {
            ensure!(call.command == "ADD" && call.interface() == "net1" && call.caller == caller, "{call:?}");
            ensure!(call.exit_code == Some(0) && call.ended > Some(call.started), "{call:?}");
            let mounts = lab.node(node).output(&["readlink", "/proc/1/ns/mnt"])?;
            // The daemon runs in a container.
            ensure!((call.mount_namespace == mounts.trim()) == (caller == "multus"), "{call:?}");
        }
        let last = calls[1].stdin_json()?;
        ensure!(last["runtimeConfig"]["bandwidth"]["ingressRate"] == limits["ingressRate"], "{last}");
        ensure!(last["prevResult"]["interfaces"].as_array().map(Vec::len) == Some(3), "{last}");
        let queues = lab.node(node).output(&["tc", "qdisc", "show"])?;
        ensure!(queues.contains("tbf"), "{node} has no bandwidth limit: {queues}");
    }
    for (pod, address) in ["node-1", "node-2", "node-3"].iter().zip(addresses.iter().cycle().skip(1)) {
        ns.exec(pod, &["ping", "-c", "1", "-W", "2", address])?;
    }
    release_primary_addresses(ns, &["node-1", "node-2", "node-3"]).await?;
    lab.clear_plugin_calls("node-1")?;
    ensure!(lab.plugin_calls("node-1")?.is_empty(), "the calls were deleted");
    Ok(())
}

/// Deletes these pods. Each has the name of its node, which releases the address of the primary network.
async fn release_primary_addresses(ns: &TestNamespace, pods: &[&str]) -> Result<()> {
    for name in pods {
        let status = ns.pods().get(name).await?.status.context("the pod has no status")?;
        let ips: Vec<String> = status.pod_ips.into_iter().flatten().map(|ip| ip.ip).collect();
        ensure!(ips.len() == 2, "{name}: {ips:?}");
        let dir = ns.lab.node(name).disk().join("var/lib/cni/networks/lab");
        // host-local writes the colons of an address as hyphens on some systems.
        let held = || {
            ips.iter().filter(|ip| dir.join(ip).exists() || dir.join(ip.replace(':', "-")).exists()).count()
        };
        ensure!(held() == 2, "host-local on {name} does not hold {ips:?}");
        ns.pods().delete(name, &DeleteParams::default().grace_period(0)).await?;
        wait::until(Duration::from_secs(60), &format!("the addresses of {name} to be released"), || async {
            Ok((held() == 0).then_some(()))
        })
        .await?;
    }
    Ok(())
}

/// A pod survives the death of CRI-O, and starts again after a reboot of its node.
pub async fn kill_and_reboot_crio(ns: &TestNamespace) -> Result<()> {
    let lab = &ns.lab;
    ns.start_pod(pod("server").on("node-1")).await?;
    lab.kill("node-1/crio")?;
    lab.restart("node-1/crio")?;
    wait::until(Duration::from_secs(60), "CRI-O to serve again", || async {
        ns.exec("server", &["true"]).map(Some)
    })
    .await?;
    lab.reboot("node-1").await?;
    wait::until(Duration::from_secs(60), "the pod to be restarted", || async {
        let server = ns.wait_pod_ready("server").await?;
        let containers = server.status.and_then(|s| s.container_statuses).unwrap_or_default();
        Ok(containers.first().is_some_and(|c| c.restart_count > 0).then_some(()))
    })
    .await?;
    ns.exec("server", &["ip", "addr"]).map(drop)
}

/// The recording plugin does what its configuration says.
pub fn misbehave_on_request(lab: &Lab) -> Result<()> {
    let node = lab.node("node-2");
    lab.clear_plugin_calls("node-2")?;
    let call = |options: serde_json::Value| -> Result<(Option<i32>, String)> {
        let previous =
            json!({"cniVersion": "1.0.0", "interfaces": [{"name": "net1", "sandbox": "/run/netns/x"}]});
        let config = json!({
            "cniVersion": "1.0.0", "name": "n", "type": "lab-record", "prevResult": previous, "add": options,
            "runtimeConfig": {"CNIDeviceInfoFile": "/run/device-info.json"},
        });
        let mut plugin = node.command("/opt/cni/bin/lab-record")?;
        plugin.env("CNI_COMMAND", "ADD").env("CNI_IFNAME", "net1").env("CNI_NETNS", "/run/netns/x");
        let mut child = plugin.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        child.stdin.take().context("no stdin")?.write_all(config.to_string().as_bytes())?;
        let output = child.wait_with_output()?;
        Ok((output.status.code(), String::from_utf8(output.stdout)?))
    };
    let (code, text) = call(json!({"fail": {"cniVersion": "1.0.0", "code": 11, "msg": "no $CNI_IFNAME"}}))?;
    ensure!(code == Some(1) && text.contains("no net1"), "{code:?} {text}");
    ensure!(call(json!({"print": "garbage"}))? == (Some(0), "garbage".to_owned()), "garbage");
    ensure!(call(json!({"printBytes": 10_000_000}))?.1.len() == 10_000_000, "10 MB");
    let result = |options| -> Result<serde_json::Value> { Ok(serde_json::from_str(&call(options)?.1)?) };
    ensure!(result(json!({"merge": {"interfaces": []}}))?["interfaces"] == json!([]), "no interfaces");
    let extra = json!([{"name": "$CNI_IFNAME-b", "sandbox": "$CNI_NETNS"}]);
    let two = result(json!({"extraInterfaces": extra, "mtu": 1400, "deviceInfo": {"type": "vdpa"}}))?;
    let expected = json!({"name": "net1-b", "sandbox": "/run/netns/x", "mtu": 1400});
    ensure!(two["interfaces"][1] == expected && two["interfaces"][0]["mtu"] == 1400, "{two}");
    ensure!(node.output(&["cat", "/run/device-info.json"])?.contains("vdpa"), "the device-info file");
    result(json!({"hang": 0.3}))?;
    let calls = lab.plugin_calls("node-2")?;
    let last = calls.last().context("no calls")?;
    let lasted = last.ended.map(|ended| Duration::from_nanos(ended - last.started));
    ensure!(lasted >= Some(Duration::from_millis(300)), "{lasted:?}");
    Ok(())
}
