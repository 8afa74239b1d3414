//! Nodes with CRI-O, with the thin multus, and without multus.

use anyhow::{Context as _, Result, ensure};
use e2e::{
    bridge::WAIT_TIMEOUT,
    hotplug::{
        LivePod, RELEASE_LIMIT, bridge_config, create_nad, element, host_local_addresses, network_name,
        plain_pod, pod_with_networks, start_live_pods, wait_addresses_within,
    },
    patchbay::{self, daemon_pid, with_daemon_variable},
};
use lab::{
    Lab, Multus, NodeOptions, Runtime,
    test_namespace::{TestNamespace, with_namespace},
    wait,
};
use serde_json::json;

use crate::multus_config::check_first_contact;

/// The kinds of the nodes beyond the first two.
const KINDS: [(&str, NodeOptions); 3] = [
    ("node-3", NodeOptions { runtime: Runtime::CriO, multus: Multus::Thick }),
    ("node-4", NodeOptions { runtime: Runtime::Containerd, multus: Multus::Thin }),
    ("node-5", NodeOptions { runtime: Runtime::CriO, multus: Multus::None }),
];

pub async fn nodes_with_crio_thin_multus_or_no_multus_are_served(lab: Lab) -> Result<()> {
    for (name, options) in KINDS {
        ensure!(lab.add_node_with(options).await? == name, "the nodes are not numbered in order");
    }
    patchbay::wait_ready(&lab).await?;
    // The daemons list the sandboxes every second, so that they notice a runtime that is down.
    let outcome = with_daemon_variable(&lab, "PATCHBAY_GC_INTERVAL", "1s", async || {
        with_namespace(&lab, "kinds", async |ns: &TestNamespace| {
            create_nad(ns, "blue", &bridge_config(ns, "blue", "10.195.0.0/24")).await?;
            create_nad(ns, "red", &bridge_config(ns, "red", "10.195.1.0/24")).await?;
            let checks = KINDS.map(|(node, options)| check_node(ns, node, options));
            futures::future::try_join_all(checks).await?;
            check_first_contact(ns, "node-5").await
        })
        .await
    })
    .await;
    for (name, _) in KINDS {
        lab.remove_node(name).await?;
        let on_node = format!("--field-selector=spec.nodeName={name}");
        lab.kubectl(&["delete", "pods", "-A", &on_node, "--force", "--grace-period=0"])?;
    }
    patchbay::wait_ready(&lab).await?;
    outcome
}

/// Plugs, unplugs and deletes on one node.
async fn check_node(ns: &TestNamespace, node: &str, options: NodeOptions) -> Result<()> {
    let NodeOptions { runtime, multus } = options;
    let lab = &ns.lab;
    let (first, second) = (format!("first-{node}"), format!("second-{node}"));
    let pods = [pod_with_networks(&first, node, &json!([element("blue", "net1")])), plain_pod(&second, node)];
    let [first, second] = start_live_pods(ns, pods).await?;
    // Without multus all networks of a pod arrive by hot-plug.
    first.wait_interfaces(&["net1"]).await.with_context(|| format!("{node}: {multus:?}"))?;
    for pod in [&first, &second] {
        pod.set_networks(&json!([element("blue", "net1"), element("red", "net2")])).await?;
    }
    for pod in [&first, &second] {
        pod.wait_interfaces(&["net1", "net2"]).await?;
    }
    first.wait_reachable(&second.address("net2")?).await?;
    if runtime == Runtime::CriO {
        check_restart(&second).await.context(node.to_owned())?;
    }
    // The first attachment is one of multus, where there is one.
    first.set_networks(&json!([element("red", "net2")])).await?;
    first.wait_interfaces(&["net2"]).await?;
    let held = host_local_addresses(lab, node, &network_name(ns, "blue"));
    ensure!(held.len() == 1, "{node}: {held:?}");
    for pod in [&first, &second] {
        pod.delete().await?;
    }
    for network in ["blue", "red"] {
        wait_addresses_within(RELEASE_LIMIT, lab, node, &network_name(ns, network), 0)
            .await
            .context(node.to_owned())?;
    }
    Ok(())
}

/// Waits until the daemon says whether it can list the sandboxes of the runtime. Without the runtime nothing runs in its
/// container, so this asks from the node.
async fn wait_runtime(pod: &LivePod, answers: bool) -> Result<()> {
    let what = format!("the daemon on {} to find that the runtime answers: {answers}", pod.node);
    wait::until(WAIT_TIMEOUT, &what, || async {
        let health = patchbay::probe_daemon(&pod.ns.lab, &pod.node, "ready")?;
        ensure!(health.contains("list the sandboxes") != answers, "{health}");
        Ok(Some(()))
    })
    .await
}

/// An edit while CRI-O is down, and the daemon knows that, is applied at the latest when it is back, and no other
/// interface changes.
async fn check_restart(pod: &LivePod) -> Result<()> {
    let (lab, crio) = (&pod.ns.lab, format!("{}/crio", pod.node));
    let both = json!([element("blue", "net1"), element("red", "net2")]);
    let (index, daemon) = (pod.link_index("net2")?, daemon_pid(lab, &pod.node)?);
    lab.kill(&crio)?;
    pod.set_networks(&json!([element("red", "net2"), element("blue", "net3")])).await?;
    wait_runtime(pod, false).await?;
    lab.restart(&crio)?;
    wait_runtime(pod, true).await?;
    pod.wait_interfaces(&["net2", "net3"]).await?;
    pod.set_networks(&both).await?;
    pod.wait_interfaces(&["net1", "net2"]).await?;
    ensure!(pod.link_index("net2")? == index, "net2 was made again");
    ensure!(daemon_pid(lab, &pod.node)? == daemon, "the daemon was restarted");
    let held = host_local_addresses(lab, &pod.node, &network_name(&pod.ns, "blue"));
    ensure!(held.len() == 2, "{held:?}");
    Ok(())
}
