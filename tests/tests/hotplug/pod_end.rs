//! The end of pods, sandboxes and containers: addresses are released, nothing else changes.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use e2e::{
    bridge::WAIT_TIMEOUT,
    hotplug::{
        LivePod, NETWORKS, RELEASE_LIMIT, create_bridge_nad, create_record_nad, element,
        host_local_addresses, network_name, plain_pod, start_live_pod, start_live_pods,
        wait_addresses_within,
    },
    patchbay,
};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use lab::{
    Lab,
    test_namespace::{TestNamespace, pod, with_namespace},
    wait,
};
use serde_json::json;

pub async fn deleting_a_pod_releases_its_addresses_within_30_s(lab: Lab) -> Result<()> {
    with_namespace(&lab, "delete", async |ns: &TestNamespace| {
        create_bridge_nad(ns, "blue", "10.120.0.0/24").await?;
        let [forced, graceful] =
            start_live_pods(ns, [plain_pod("forced", "node-2"), plain_pod("graceful", "node-2")]).await?;
        for pod in [&forced, &graceful] {
            pod.set_networks(&json!([element("blue", "net1"), element("blue", "net2")])).await?;
        }
        for pod in [&forced, &graceful] {
            pod.wait_interfaces(&["net1", "net2"]).await?;
        }
        let network = network_name(ns, "blue");
        ensure!(host_local_addresses(&lab, "node-2", &network).len() == 4, "four addresses are in use");
        forced.delete().await?;
        ns.pods().delete("graceful", &DeleteParams::default()).await?;
        let took = wait_addresses_within(RELEASE_LIMIT, &lab, "node-2", &network, 0).await?;
        println!("released after {took:?}");
        Ok(())
    })
    .await
}

/// Removes the daemon of node-1 until [`start_daemon`].
pub async fn stop_daemon(lab: &Lab) -> Result<()> {
    let client = lab.client().await?;
    lab.kubectl(&["label", "node", "node-2", "lab/daemon=wanted", "--overwrite"])?;
    patchbay::patch_daemons(&client, json!({"nodeSelector": {"lab/daemon": "wanted"}})).await?;
    wait::until(WAIT_TIMEOUT, "node-1 to have no daemon", || async {
        Ok(patchbay::daemon_pod(&client, "node-1").await.is_err().then_some(()))
    })
    .await
}

pub async fn start_daemon(lab: &Lab) -> Result<()> {
    let client = lab.client().await?;
    patchbay::patch_daemons(&client, json!({"nodeSelector": {"lab/daemon": null}})).await?;
    patchbay::wait_ready(lab).await
}

pub async fn addresses_of_pods_deleted_while_the_daemon_was_down_are_released(lab: Lab) -> Result<()> {
    with_namespace(&lab, "down", async |ns: &TestNamespace| {
        create_bridge_nad(ns, "blue", "10.121.0.0/24").await?;
        let pods =
            [plain_pod("deleted", "node-1"), plain_pod("kept", "node-1"), plain_pod("cleared", "node-1")];
        let [deleted, kept, cleared] = start_live_pods(ns, pods).await?;
        for pod in [&deleted, &kept, &cleared] {
            pod.set_networks(&json!([element("blue", "net1")])).await?;
        }
        for pod in [&deleted, &kept, &cleared] {
            pod.wait_interfaces(&["net1"]).await?;
        }
        let (address, index) = (kept.address("net1")?, kept.link_index("net1")?);
        stop_daemon(&lab).await?;
        lab.kubectl(&["-n", &ns.namespace, "delete", "pod", "deleted", "--now", "--timeout=60s"])?;
        cleared.set_networks(&json!([])).await?;
        kept.set_networks(&json!([element("blue", "net1"), element("blue", "net2")])).await?;
        start_daemon(&lab).await?;
        let took = wait_addresses_within(RELEASE_LIMIT, &lab, "node-1", &network_name(ns, "blue"), 2).await?;
        println!("released {took:?} after the daemon was ready");
        kept.wait_interfaces(&["net1", "net2"]).await?;
        cleared.wait_interfaces(&[]).await?;
        ensure!(kept.link_index("net1")? == index && kept.address("net1")? == address, "net1 was made again");
        Ok(())
    })
    .await
}

pub async fn a_reinstalled_patchbay_unplugs_and_releases_what_it_had_plugged(lab: Lab) -> Result<()> {
    let uninstall = || {
        let file = patchbay::manifests_dir().join("10-patchbay.yaml");
        lab.kubectl(&["delete", "-f", file.to_str().context("the path is not UTF-8")?, "--timeout=90s"])
    };
    with_namespace(&lab, "uninstall", async |ns: &TestNamespace| {
        create_bridge_nad(ns, "blue", "10.127.0.0/24").await?;
        let network = network_name(ns, "blue");
        let names = ["kept", "deleted", "cleared"];
        let [kept, deleted, cleared] =
            start_live_pods(ns, names.map(|name| plain_pod(name, "node-1"))).await?;
        for pod in [&kept, &deleted, &cleared] {
            pod.set_networks(&json!([element("blue", "net1")])).await?;
        }
        for pod in [&kept, &deleted, &cleared] {
            pod.wait_interfaces(&["net1"]).await?;
        }
        let (address, index) = (kept.address("net1")?, kept.link_index("net1")?);
        uninstall()?;
        // No program runs DEL while Patchbay is not installed.
        lab.kubectl(&["-n", &ns.namespace, "delete", "pod", "deleted", "--now", "--timeout=60s"])?;
        cleared.set_networks(&json!([])).await?;
        let gone = cleared.link("net1")?.is_none() || kept.link_index("net1")? != index;
        let held = host_local_addresses(&lab, "node-1", &network);
        patchbay::install(&lab).await?;
        ensure!(!gone && held.len() == 3, "links gone: {gone}; addresses {held:?}");
        wait_addresses_within(RELEASE_LIMIT, &lab, "node-1", &network, 1).await?;
        cleared.wait_interfaces(&[]).await?;
        kept.wait_interfaces(&["net1"]).await?;
        ensure!(kept.link_index("net1")? == index && kept.address("net1")? == address, "net1 was made again");
        kept.set_networks(&json!([])).await?;
        kept.wait_interfaces(&[]).await?;
        wait_addresses_within(RELEASE_LIMIT, &lab, "node-1", &network, 0).await.map(drop)
    })
    .await
}

/// The pid of a pod's sandbox on its node.
fn sandbox_pid(lab: &Lab, node: &str, uid: &str) -> Result<String> {
    let filter = format!(r#"labels."io.kubernetes.pod.uid"=={uid},labels."io.cri-containerd.kind"==sandbox"#);
    let list = lab.node(node).output(&["ctr", "-n", "k8s.io", "containers", "ls", "-q", &filter])?;
    let tasks = lab.node(node).output(&["ctr", "-n", "k8s.io", "tasks", "ls"])?;
    let running =
        tasks.lines().find(|line| line.contains("RUNNING") && list.lines().any(|id| line.starts_with(id)));
    let pid = running.and_then(|line| line.split_whitespace().nth(1));
    pid.map(str::to_owned).with_context(|| format!("no sandbox of {uid} runs: {list} {tasks}"))
}

pub async fn a_recreated_sandbox_keeps_no_old_address_and_can_be_edited(lab: Lab) -> Result<()> {
    with_namespace(&lab, "sandbox", async |ns: &TestNamespace| {
        create_bridge_nad(ns, "blue", "10.122.0.0/24").await?;
        create_bridge_nad(ns, "red", "10.122.1.0/24").await?;
        let pod = start_live_pod(ns, plain_pod("p", "node-2")).await?;
        pod.set_networks(&json!([element("blue", "net1")])).await?;
        pod.wait_interfaces(&["net1"]).await?;
        let uid = pod.object().await?.metadata.uid.context("a UID")?;
        let old = sandbox_pid(&lab, "node-2", &uid)?;
        lab.node("node-2").output(&["kill", "-9", &old])?;
        wait::until(WAIT_TIMEOUT, "a new sandbox", || async {
            Ok((sandbox_pid(&lab, "node-2", &uid)? != old).then_some(()))
        })
        .await?;
        let renewed = wait::until(WAIT_TIMEOUT, "the pod to run in the new sandbox", || async {
            let pod = LivePod::find(ns, "p").await?;
            ensure!(pod.link_names()?.contains("net1"), "{:?}", pod.link_names()?);
            Ok(Some(pod))
        })
        .await?;
        renewed.wait_interfaces(&["net1"]).await?;
        // multus attached the new sandbox; the address of the old one is released.
        wait_addresses_within(RELEASE_LIMIT, &lab, "node-2", &network_name(ns, "blue"), 1).await?;
        ensure!(
            renewed.status("net1").await?["ips"] == json!([renewed.address("net1")?]),
            "{:?}",
            renewed.statuses().await?
        );
        renewed.set_networks(&json!([element("red", "net2")])).await?;
        renewed.wait_interfaces(&["net2"]).await?;
        wait_addresses_within(RELEASE_LIMIT, &lab, "node-2", &network_name(ns, "blue"), 0).await.map(drop)
    })
    .await
}

pub async fn a_restarted_container_changes_nothing(lab: Lab) -> Result<()> {
    with_namespace(&lab, "restart", async |ns: &TestNamespace| {
        create_record_nad(ns, "blue", "10.123.0.0/24", &json!({})).await?;
        let pod = start_live_pod(ns, plain_pod("p", "node-1")).await?;
        pod.set_networks(&json!([element("blue", "net1")])).await?;
        pod.wait_interfaces(&["net1"]).await?;
        let index = pod.link_index("net1")?;
        // The container may be gone before kubectl hears of it.
        let _ = pod.exec(&["kill", "1"]);
        wait::until(WAIT_TIMEOUT, "the container to restart", || async {
            let statuses =
                ns.pods().get("p").await?.status.and_then(|s| s.container_statuses).unwrap_or_default();
            Ok(statuses.iter().any(|s| s.restart_count > 0 && s.ready).then_some(()))
        })
        .await?;
        let pod = LivePod::find(ns, "p").await?;
        pod.wait_interfaces(&["net1"]).await?;
        ensure!(pod.link_index("net1")? == index, "net1 was made again");
        ensure!(pod.plugin_commands("net1")? == ["ADD"], "{:?}", pod.plugin_commands("net1")?);
        pod.set_networks(&json!([])).await?;
        pod.wait_interfaces(&[]).await
    })
    .await
}

pub async fn a_terminating_pod_gets_no_new_interface(lab: Lab) -> Result<()> {
    with_namespace(&lab, "ending", async |ns: &TestNamespace| {
        create_record_nad(ns, "blue", "10.124.0.0/24", &json!({})).await?;
        let mut object = plain_pod("p", "node-1").command(&["sh", "-c", "trap '' TERM; sleep 600"]).object();
        object["spec"]["terminationGracePeriodSeconds"] = json!(60);
        let object: Pod = serde_json::from_value(object)?;
        wait::until(WAIT_TIMEOUT, "the pod to be admitted", || async {
            Ok(ns.pods().create(&PostParams::default(), &object).await.map(Some)?)
        })
        .await?;
        let pod = LivePod::find(ns, "p").await?;
        pod.set_networks(&json!([element("blue", "net1")])).await?;
        pod.wait_interfaces(&["net1"]).await?;
        ns.pods().delete("p", &DeleteParams::default()).await?;
        pod.set_networks(&json!([element("blue", "net1"), element("blue", "net2")])).await?;
        tokio::time::sleep(Duration::from_secs(3)).await;
        ensure!(pod.plugin_commands("net2")?.is_empty(), "{:?}", pod.plugin_commands("net2")?);
        ensure!(pod.link_names()?.contains("net1"), "an interface of a terminating pod was removed");
        // An unplug is still done: the pod may live for a long time.
        pod.set_networks(&json!([])).await?;
        wait::until(WAIT_TIMEOUT, "net1 to be removed", || async {
            Ok((!pod.link_names()?.contains("net1")).then_some(()))
        })
        .await
    })
    .await
}

pub async fn a_host_network_pod_is_rejected_once_per_change(lab: Lab) -> Result<()> {
    with_namespace(&lab, "hostnet", async |ns: &TestNamespace| {
        create_bridge_nad(ns, "blue", "10.125.0.0/24").await?;
        let before = lab.node("node-1").output(&["ip", "-br", "link"])?;
        let mut object = pod("p").on("node-1").object();
        object["spec"]["hostNetwork"] = json!(true);
        let object: Pod = serde_json::from_value(object)?;
        wait::until(WAIT_TIMEOUT, "the pod to be admitted", || async {
            Ok(ns.pods().create(&PostParams::default(), &object).await.map(Some)?)
        })
        .await?;
        let pod = LivePod::find(ns, "p").await?;
        pod.set_networks(&json!([element("blue", "net1")])).await?;
        let event =
            pod.wait_event("InterfaceAddRejected", "will not add interface to host networked pod").await?;
        ensure!(event.kind == "Warning", "{event:?}");
        // Other changes of the pod are no reason for another event.
        for number in 0..3 {
            pod.annotate(json!({"test/number": number.to_string()})).await?;
        }
        tokio::time::sleep(Duration::from_secs(2)).await;
        let events = pod.events().await?;
        ensure!(events.len() == 1 && events[0].count == 1, "{events:?}");
        ensure!(!lab.node("node-1").output(&["ip", "-br", "link"])?.contains("net1"), "{before}");
        Ok(())
    })
    .await
}

const MANIFESTS: &str = "/etc/kubernetes/manifests";

pub async fn a_static_pod_is_hot_plugged(lab: Lab) -> Result<()> {
    let node = lab.node("node-2");
    let config = node.disk().join("etc/kubernetes/kubelet.yaml");
    let mut kubelet: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&config)?)?;
    kubelet["staticPodPath"] = json!(MANIFESTS);
    kubelet["fileCheckFrequency"] = json!("1s");
    std::fs::write(&config, kubelet.to_string())?;
    node.output(&["mkdir", "-p", MANIFESTS])?;
    lab.restart("node-2/kubelet")?;
    let outcome = with_namespace(&lab, "static", async |ns: &TestNamespace| {
        create_bridge_nad(ns, "blue", "10.126.0.0/24").await?;
        let mut object = pod("static").capability("NET_ADMIN").object();
        object["metadata"]["namespace"] = json!(ns.namespace);
        let manifest = node.disk().join(MANIFESTS.trim_start_matches('/')).join("static.json");
        std::fs::write(&manifest, object.to_string())?;
        let name = "static-node-2";
        wait::until(WAIT_TIMEOUT, "the mirror pod", || async {
            Ok(ns.pods().get_opt(name).await?.map(drop))
        })
        .await?;
        let pod = LivePod::find(ns, name).await?;
        let patch = json!({"metadata": {"annotations": {NETWORKS: "blue"}}});
        let pods: Api<Pod> = ns.pods();
        pods.patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await?;
        let plugged = pod.wait_interfaces(&["net1"]).await;
        std::fs::remove_file(&manifest)?;
        plugged?;
        wait_addresses_within(RELEASE_LIMIT * 2, &lab, "node-2", &network_name(ns, "blue"), 0).await.map(drop)
    })
    .await;
    // The next `up` writes the file without these keys.
    if let Some(keys) = kubelet.as_object_mut() {
        keys.remove("staticPodPath");
        keys.remove("fileCheckFrequency");
    }
    std::fs::write(&config, kubelet.to_string())?;
    lab.restart("node-2/kubelet")?;
    outcome
}
