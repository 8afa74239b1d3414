//! Records that the journal lost.

use std::{fs, path::PathBuf};

use serde_json::json;

use super::{
    blue,
    node::{TestNode, on_node, until},
    settled,
};

/// Damages the journal of a daemon that does not run. None of its records is readable.
fn damage(node: &TestNode) {
    fs::write(node.root.join("state/hotplug/journal"), "damaged\n").unwrap();
}

/// The result of a network of the container runtime.
fn cluster_result(node: &TestNode, pod: &str, interface: &str) -> PathBuf {
    let results = node.root.join("results");
    let own = fs::read_to_string(results.join(format!("blue-container-{pod}-net1"))).unwrap();
    let mut result: serde_json::Value = serde_json::from_str(&own).unwrap();
    result.as_object_mut().unwrap().remove("patchbay.dev/network");
    result["ifName"] = interface.into();
    let path = results.join(format!("cbr0-container-{pod}-{interface}"));
    fs::write(&path, result.to_string()).unwrap();
    path
}

#[test]
fn attachments_whose_records_were_lost_are_released_and_those_of_the_runtime_are_not() {
    on_node("lost-records", async |node| {
        let daemon = node.start().await;
        for pod in ["running", "ended", "ending"] {
            node.run_pod(pod);
            node.api.request(pod, &json!([blue("net1")]));
            settled(node, pod, &["net1"]).await;
        }
        node.api.request("running", &json!([blue("net1"), blue("net2")]));
        settled(node, "running", &["net1", "net2"]).await;
        daemon.stop().await;
        let before = node.links("running");
        let cluster = ["ended", "running"].map(|pod| cluster_result(node, pod, "lan0"));
        damage(node);
        node.end_sandbox("ended");
        node.api.delete_pod("ended");
        // A program in the pod replaced the link.
        node.ip_in("ending", "link del net1");
        node.ip_in("ending", "link add net1 type veth peer name other");
        node.api.request("ending", &json!([]));

        let daemon = node.start().await;
        until("the address of ended is free", || node.addresses() == 3).await;
        node.api.request("running", &json!([blue("net2")]));
        settled(node, "running", &["net2"]).await;
        assert_eq!(node.links("running")["net2"], before["net2"]);
        assert_eq!((node.addresses(), node.links("ending").len()), (2, 2));
        assert_eq!(node.calls()[4..], ["DEL net1 released", "DEL net1"]);
        node.end_sandbox("ending");
        node.api.delete_pod("ending");
        until("the address of ending is free", || node.addresses() == 1).await;
        assert!(daemon.health.warnings().concat().contains("damaged"), "{:?}", daemon.health.warnings());
        daemon.stop().await;
        assert_eq!(node.calls()[6..], ["DEL net1 released"]);
        assert!(cluster.iter().all(|path| path.exists()));
    });
}
