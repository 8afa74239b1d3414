//! What multus recorded about pods.

use std::{fs, path::Path};

use serde_json::json;

use super::{
    blue,
    node::{container, on_node, until},
    settled,
};

#[test]
fn records_of_multus_that_are_too_large_are_reported_and_stop_only_their_pod() {
    on_node("large", async |node| {
        let pod = node.unique("a");
        node.run_pod(&pod);
        node.attach_at_start(&pod, "blue", "net1");
        let list = fs::read_to_string(Path::new("/var/lib/cni/multus").join(container(&pod))).unwrap();
        let large = " ".repeat(1024 * 1024 + 1);
        node.record(&container(&pod), &large);
        node.api.request(&pod, &json!([blue("net1"), blue("net2")]));
        let daemon = node.start().await;
        let failed = ["net1", "net2"].map(|interface| (interface.to_owned(), "Failed".to_owned()));
        until("both are reported", || node.api.states(&pod) == failed).await;
        node.run_pod("b");
        node.api.request("b", &json!([blue("net1")]));
        settled(node, "b", &["net1"]).await;
        until("an event", || node.api.event_reasons().contains(&"RecordsUnreadable".to_owned())).await;
        assert!(node.links(&pod).contains_key("net1") && !node.links(&pod).contains_key("net2"));

        node.record(&container(&pod), &list);
        until("net2", || node.links(&pod).contains_key("net2")).await;
        until("the states", || node.api.states(&pod) == [("net2".to_owned(), "Attached".to_owned())]).await;
        assert_eq!(node.calls(), ["ADD net1", "ADD net2"]);
        let reports: Vec<String> =
            node.api.event_notes().into_iter().filter(|note| note.contains("1048577 bytes")).collect();
        assert_eq!(reports.len(), 1, "{reports:?}");
        daemon.stop().await;
    });
}

#[test]
fn a_status_that_multus_could_not_write_is_completed_with_the_default_network_first() {
    on_node("no-status", async |node| {
        let pod = node.unique("a");
        node.run_pod(&pod);
        node.attach_at_start(&pod, "blue", "net1");
        node.record_result(&pod, "cbr0", "eth0");
        node.api.request(&pod, &json!([blue("net1")]));
        let daemon = node.start().await;
        until("the status", || node.api.interfaces(&pod) == ["eth0", "net1"]).await;
        let status = node.api.annotation(&pod, "k8s.v1.cni.cncf.io/network-status");
        assert_eq!(status[0], json!({"name": "cbr0", "interface": "eth0", "default": true, "dns": {}}));
        assert_eq!((node.calls().len(), node.api.writes()), (0, 1));
        daemon.stop().await;
    });
}
