//! Crashes and restarts of the daemon and of what it depends on.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use e2e::{
    bridge::WAIT_TIMEOUT,
    hotplug::{
        LivePod, RELEASE_LIMIT, create_bridge_nad, create_record_nad, edit_nad, element,
        host_local_addresses, network_name, plain_pod, record_config, start_live_pod, start_live_pods,
        wait_addresses_within,
    },
    patchbay::{self, NAMESPACE, daemon_pid},
};
use futures::future::try_join_all;
use lab::{
    Lab,
    test_namespace::{TestNamespace, with_namespace},
    wait,
};
use serde_json::json;

/// Kills the daemon of a node with SIGKILL, and waits until the kubelet has started it again.
async fn kill_daemon(lab: &Lab, node: &str) -> Result<()> {
    let old = daemon_pid(lab, node)?;
    lab.node(node).output(&["kill", "-9", &old])?;
    wait_new_daemon(lab, node, &old).await
}

async fn wait_new_daemon(lab: &Lab, node: &str, old: &str) -> Result<()> {
    wait::until(WAIT_TIMEOUT, &format!("a new daemon on {node}"), || async {
        Ok((daemon_pid(lab, node)? != old).then_some(()))
    })
    .await
}

pub async fn a_daemon_killed_at_any_step_converges_without_a_leak(lab: Lab) -> Result<()> {
    with_namespace(&lab, "kill", async |ns: &TestNamespace| {
        let slow = [
            ("before", json!({"add": {"hang": 600}})),
            ("after", json!({"add": {"hangAfter": 600}})),
            ("undo", json!({"del": {"hang": 3}})),
            ("undone", json!({"del": {"hangAfter": 3}})),
            ("still", json!({})),
        ];
        for (number, (name, options)) in slow.iter().enumerate() {
            create_record_nad(ns, name, &format!("10.130.{number}.0/24"), options).await?;
        }
        let pods = start_live_pods(ns, slow.clone().map(|(name, _)| plain_pod(name, "node-1"))).await?;
        let [before, after, undo, undone, still] = &pods;
        for pod in [undo, undone, still] {
            pod.set_networks(&json!([element(&pod.name, "net1")])).await?;
        }
        for pod in [undo, undone, still] {
            pod.wait_interfaces(&["net1"]).await?;
        }
        let kept = (still.link_index("net1")?, still.address("net1")?);
        for pod in [before, after] {
            pod.set_networks(&json!([element(&pod.name, "net1")])).await?;
            pod.wait_plugin_call("net1", "ADD", 1).await?;
        }
        wait::until(WAIT_TIMEOUT, "the link of the second ADD", || async {
            Ok(after.link("net1")?.map(drop))
        })
        .await?;
        for pod in [undo, undone] {
            pod.set_networks(&json!([])).await?;
        }
        for pod in [undo, undone] {
            pod.wait_plugin_call("net1", "DEL", 1).await?;
        }
        // The next ADD does not hang.
        for (number, name) in ["before", "after"].into_iter().enumerate() {
            let config = record_config(ns, name, &format!("10.130.{number}.0/24"), &json!({}));
            edit_nad(ns, name, &config).await?;
        }
        kill_daemon(&lab, "node-1").await?;
        for pod in [before, after] {
            pod.wait_interfaces(&["net1"]).await.with_context(|| pod.name.clone())?;
            let held = host_local_addresses(&lab, "node-1", &network_name(ns, &pod.name));
            ensure!(held == pod.addresses("net1")?, "{} holds {held:?}", pod.name);
            let commands = pod.plugin_commands("net1")?;
            ensure!(commands == ["ADD", "DEL", "ADD"], "{}: {commands:?}", pod.name);
        }
        for pod in [undo, undone] {
            pod.wait_interfaces(&[]).await.with_context(|| pod.name.clone())?;
            wait_addresses_within(RELEASE_LIMIT, &lab, "node-1", &network_name(ns, &pod.name), 0).await?;
        }
        still.wait_interfaces(&["net1"]).await?;
        ensure!(kept == (still.link_index("net1")?, still.address("net1")?), "a live link was replaced");
        ensure!(still.plugin_commands("net1")? == ["ADD"], "{:?}", still.plugin_commands("net1")?);
        patchbay::wait_ready(&lab).await
    })
    .await
}

pub async fn a_stopping_daemon_finishes_or_records_an_add(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    with_namespace(&lab, "term", async |ns: &TestNamespace| {
        create_record_nad(ns, "short", "10.131.0.0/24", &json!({"add": {"hang": 4}})).await?;
        create_record_nad(ns, "long", "10.131.1.0/24", &json!({"add": {"hang": 120}})).await?;
        let [short, long] =
            start_live_pods(ns, [plain_pod("short", "node-1"), plain_pod("long", "node-1")]).await?;
        for pod in [&short, &long] {
            pod.set_networks(&json!([element(&pod.name, "net1")])).await?;
            pod.wait_plugin_call("net1", "ADD", 1).await?;
        }
        edit_nad(ns, "long", &record_config(ns, "long", "10.131.1.0/24", &json!({}))).await?;
        let old = patchbay::daemon_pod(&client, "node-1").await?;
        let start = Instant::now();
        lab.kubectl(&["-n", NAMESPACE, "delete", "pod", &old, "--timeout=60s"])?;
        println!("the daemon stopped after {:?}", start.elapsed());
        // One ADD ends while the daemon waits for it. The other one is undone and done again by the next daemon.
        patchbay::wait_ready(&lab).await?;
        for pod in [&short, &long] {
            pod.wait_interfaces(&["net1"]).await.with_context(|| pod.name.clone())?;
            let held = host_local_addresses(&lab, "node-1", &network_name(ns, &pod.name));
            ensure!(held == pod.addresses("net1")?, "{} holds {held:?}", pod.name);
        }
        ensure!(short.plugin_commands("net1")? == ["ADD"], "{:?}", short.plugin_commands("net1")?);
        let commands = long.plugin_commands("net1")?;
        ensure!(commands == ["ADD", "DEL", "ADD"], "{commands:?}");
        Ok(())
    })
    .await
}

pub async fn an_api_server_that_hangs_for_20_s_loses_nothing(lab: Lab) -> Result<()> {
    with_namespace(&lab, "api", async |ns: &TestNamespace| {
        create_record_nad(ns, "blue", "10.132.0.0/24", &json!({"add": {"hang": 1}})).await?;
        let [plugged, lost] =
            start_live_pods(ns, [plain_pod("plugged", "node-1"), plain_pod("lost", "node-1")]).await?;
        lost.set_networks(&json!([element("blue", "net1")])).await?;
        lost.wait_interfaces(&["net1"]).await?;
        plugged.set_networks(&json!([element("blue", "net1")])).await?;
        plugged.wait_plugin_call("net1", "ADD", 1).await?;
        lab.pause("apiserver")?;
        let paused = Instant::now();
        let outcome = async {
            wait::until(WAIT_TIMEOUT, "the ADD to end without the API server", || async {
                Ok(plugged.link("net1")?.map(drop))
            })
            .await?;
            // A lost link is made again without the API server.
            let index = lost.link_index("net1")?;
            lost.run(&["ip", "link", "delete", "net1"])?;
            wait::until(WAIT_TIMEOUT, "the lost link to be made again", || async {
                let link = lost.link("net1")?;
                Ok(link.filter(|link| link["ifindex"] != index).map(drop))
            })
            .await
        }
        .await;
        tokio::time::sleep(Duration::from_secs(22).saturating_sub(paused.elapsed())).await;
        lab.resume("apiserver")?;
        outcome?;
        for pod in [&plugged, &lost] {
            pod.wait_interfaces(&["net1"]).await?;
        }
        ensure!(plugged.plugin_commands("net1")? == ["ADD"], "{:?}", plugged.plugin_commands("net1")?);
        patchbay::wait_ready(&lab).await
    })
    .await
}

/// Edits a pod, calls an action, and checks that the edit is applied.
async fn edit_around(pod: &LivePod, number: usize, action: impl FnOnce() -> Result<()>) -> Result<()> {
    let name = format!("net{number}");
    pod.set_networks(&json!([element("blue", &name)])).await?;
    action()?;
    pod.wait_interfaces(&[&name]).await
}

pub async fn restarts_of_multus_and_containerd_lose_no_edit(lab: Lab) -> Result<()> {
    let restarts = if e2e::soak() { 20 } else { 5 };
    with_namespace(&lab, "restarts", async |ns: &TestNamespace| {
        create_bridge_nad(ns, "blue", "10.133.0.0/24").await?;
        let pod = start_live_pod(ns, plain_pod("p", "node-2")).await?;
        let daemon = daemon_pid(&lab, "node-2")?;
        for number in 0..restarts {
            edit_around(&pod, number, || lab.restart("node-2/multus")).await?;
        }
        edit_around(&pod, 50, || lab.restart("node-2/containerd")).await?;
        lab.kill("node-2/containerd")?;
        pod.set_networks(&json!([element("blue", "net51")])).await?;
        tokio::time::sleep(Duration::from_secs(2)).await;
        lab.restart("node-2/containerd")?;
        pod.wait_interfaces(&["net51"]).await?;
        ensure!(daemon_pid(&lab, "node-2")? == daemon, "the daemon was restarted");
        let held = host_local_addresses(&lab, "node-2", &network_name(ns, "blue"));
        ensure!(held.len() == 1, "{held:?}");
        lab.up(lab::Topology::Nodes(2)).await
    })
    .await
}

pub async fn a_rebooted_node_leaks_no_address(lab: Lab) -> Result<()> {
    with_namespace(&lab, "reboot", async |ns: &TestNamespace| {
        create_bridge_nad(ns, "blue", "10.134.0.0/24").await?;
        let names = ["one", "two"];
        let pods = start_live_pods(ns, names.map(|name| plain_pod(name, "node-2"))).await?;
        for pod in &pods {
            pod.set_networks(&json!([element("blue", "net1")])).await?;
        }
        try_join_all(pods.iter().map(|pod| pod.wait_interfaces(&["net1"]))).await?;
        lab.reboot("node-2").await?;
        for name in names {
            wait::until(WAIT_TIMEOUT, &format!("pod {name} to restart"), || async {
                let status = ns.pods().get(name).await?.status.unwrap_or_default();
                let restarted =
                    status.container_statuses.iter().flatten().any(|s| s.restart_count > 0 && s.ready);
                Ok(restarted.then_some(()))
            })
            .await?;
        }
        patchbay::wait_ready(&lab).await?;
        let mut expected = BTreeSet::new();
        for name in names {
            let pod = LivePod::find(ns, name).await?;
            pod.wait_interfaces(&["net1"]).await?;
            expected.extend(pod.addresses("net1")?);
        }
        let what = "only the addresses of the new sandboxes to be in use";
        wait::until(WAIT_TIMEOUT, what, || async {
            let held = host_local_addresses(&lab, "node-2", &network_name(ns, "blue"));
            ensure!(held == expected, "{held:?} instead of {expected:?}");
            Ok(Some(()))
        })
        .await
    })
    .await
}
