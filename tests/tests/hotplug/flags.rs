//! The flags of hot-plug. All of them are set at once, because each change replaces the daemons.

use anyhow::{Result, ensure};
use e2e::{
    bridge::WAIT_TIMEOUT,
    hotplug::{LivePod, create_nad, create_record_nad, element, plain_pod, record_config, start_live_pods},
    patchbay::with_daemon_variables,
};
use kube::api::DeleteParams;
use lab::{
    Lab,
    test_namespace::{TestNamespace, with_namespace},
    wait,
};
use serde_json::json;

use crate::multus_attachments::{ORIGINAL, create_original, node_event};

/// A directory of plugins that no other program knows, and the plugin in it.
const PLUGIN_DIR: &str = "/opt/lab/plugins";
const PLUGIN: &str = "only-there";

pub async fn flags_of_hot_plug_are_honoured(lab: Lab) -> Result<()> {
    with_namespace(&lab, "global", async |global: &TestNamespace| {
        with_namespace(&lab, "other", async |other: &TestNamespace| {
            with_namespace(&lab, "flags", async |ns: &TestNamespace| {
                create_record_nad(global, "blue", "10.181.0.0/24", &json!({})).await?;
                create_record_nad(other, "red", "10.181.1.0/24", &json!({})).await?;
                create_record_nad(ns, "own", "10.181.2.0/24", &json!({})).await?;
                create_record_nad(ns, "slow", "10.181.3.0/24", &json!({"add": {"hang": 600}})).await?;
                let mut config = record_config(ns, "extra", "10.181.4.0/24", &json!({}));
                config["type"] = json!(PLUGIN);
                create_nad(ns, "extra", &config).await?;
                let script =
                    format!("mkdir -p {PLUGIN_DIR} && ln -f /opt/cni/bin/lab-record {PLUGIN_DIR}/{PLUGIN}");
                lab.node("node-1").output(&["sh", "-c", &script])?;
                let pods = [plain_pod("p", "node-1"), plain_pod("peer", "node-2")];
                let [pod, peer] = start_live_pods(ns, pods).await?;
                let of = |owner: &TestNamespace, name: &str, interface: &str| {
                    json!({"name": name, "namespace": owner.namespace, "interface": interface})
                };
                let quick = [
                    of(global, "blue", "net1"),
                    of(other, "red", "net2"),
                    element("own", "net3"),
                    element("extra", "net4"),
                ];
                let all = [&quick[..], &[element("slow", "net5")]].concat();
                // Without the flag the daemon does not know the directory.
                pod.set_networks(&json!([element("extra", "net4")])).await?;
                let failed = pod.wait_state("extra", "Failed", "AddFailed").await?;
                ensure!(failed["message"].as_str().is_some_and(|text| text.contains(PLUGIN)), "{failed}");
                let flags = [
                    ("PATCHBAY_NAMESPACE_ISOLATION", "true"),
                    ("PATCHBAY_GLOBAL_NAMESPACES", &global.namespace),
                    ("PATCHBAY_PEER_NAMESPACES", &other.namespace),
                    ("PATCHBAY_PLUGIN_TIMEOUT", "3s"),
                    ("PATCHBAY_CNI_PLUGIN_DIRS", &format!("{PLUGIN_DIR},/opt/cni/bin")),
                ];
                with_daemon_variables(&lab, &flags, async || {
                    create_original(&lab, &other.namespace, "node-2").await?;
                    node_event(&lab, "node-2", "HotplugStandDown").await?;
                    pod.set_networks(&json!(all)).await?;
                    peer.set_networks(&json!([element("own", "net1")])).await?;
                    check_flags(&pod, &other.namespace).await?;
                    ensure!(peer.link_names()?.is_empty(), "{:?}", peer.link_names()?);
                    other.pods().delete(ORIGINAL, &DeleteParams::default().grace_period(0)).await?;
                    pod.set_networks(&json!(quick)).await?;
                    peer.wait_interfaces(&["net1"]).await
                })
                .await?;
                // Without isolation, as multus is configured on the lab, the network of the other namespace is attached.
                pod.wait_interfaces(&["net1", "net2", "net3", "net4"]).await?;
                let there = format!("{PLUGIN_DIR}/{PLUGIN}");
                let here = format!("/opt/cni/bin/{PLUGIN}");
                lab.node("node-1").output(&["mv", &there, &here])?;
                pod.set_networks(&json!([])).await?;
                pod.wait_interfaces(&[]).await?;
                lab.node("node-1").output(&["rm", "-r", &here, PLUGIN_DIR]).map(drop)
            })
            .await
        })
        .await
    })
    .await
}

/// Every element of the pod is as the flags say.
async fn check_flags(pod: &LivePod, other: &str) -> Result<()> {
    wait::until(WAIT_TIMEOUT, "the networks that are allowed and quick", || async {
        let names: Vec<String> = pod.link_names()?.into_iter().collect();
        ensure!(names == ["net1", "net3", "net4"], "{names:?} {:?}", pod.attachments().await?);
        Ok(Some(()))
    })
    .await?;
    pod.wait_event("NamespaceForbidden", other).await?;
    pod.wait_state("red", "Refused", "NamespaceForbidden").await?;
    let slow = pod.wait_state("slow", "Failed", "AddFailed").await?;
    ensure!(slow["message"].as_str().is_some_and(|text| text.contains("within 3 s")), "{slow}");
    Ok(())
}
