//! Interfaces of a pod's start whose element was removed.

use serde_json::json;

use super::{
    blue,
    node::{TestNode, on_node, until},
};

fn states(node: &TestNode, pod: &str, expected: &[(&str, &str)]) -> bool {
    let states = node.api.states(pod);
    let states: Vec<_> =
        states.iter().map(|(interface, state)| (interface.as_str(), state.as_str())).collect();
    states == expected
}

/// Whether the last line of the journal about the requests of a pod has `keys` of them.
fn remembers(node: &TestNode, pod: &str, keys: usize) -> bool {
    let lines = node.journal_lines(&format!("{{\"requested\":[\"uid-{pod}\""));
    lines.last().is_some_and(|line| line.matches("container\":").count() == keys)
}

#[test]
fn an_interface_of_pod_start_is_detached_only_after_its_request_was_seen() {
    on_node("unseen", async |node| {
        let pod = node.unique("a");
        node.run_pod(&pod);
        node.attach_at_start(&pod, "blue", "net1");
        // Edited before there was a daemon.
        node.api.request(&pod, &json!([]));
        let link = node.links(&pod)["net1"];
        let daemon = node.start().await;
        until("net1 is kept", || states(node, &pod, &[("net1", "Kept")])).await;
        node.api.request(&pod, &json!([blue("net2")]));
        until("net2", || states(node, &pod, &[("net2", "Attached"), ("net1", "Kept")])).await;
        daemon.stop().await;
        let daemon = node.start().await;
        // The daemon has handled everything else when it has handled the last pod.
        node.run_pod("b");
        node.api.request("b", &json!([blue("net1")]));
        until("net1 of b", || states(node, "b", &[("net1", "Attached")])).await;
        assert_eq!(
            (node.links(&pod)["net1"], node.calls()),
            (link, vec!["ADD net2".to_owned(), "ADD net1".to_owned()])
        );

        node.api.request(&pod, &json!([blue("net2"), blue("net1")]));
        until("the request is seen", || states(node, &pod, &[("net2", "Attached")])).await;
        daemon.stop().await;
        // An edit while the daemon is down counts.
        node.api.request(&pod, &json!([blue("net2")]));
        let daemon = node.start().await;
        until("net1 is detached", || node.calls().last().is_some_and(|call| call == "DEL net1")).await;
        let events = || node.api.event_reasons();
        until("events", || events().contains(&"RemovedInterface".to_owned())).await;
        assert_eq!(events().iter().filter(|reason| *reason == "InterfaceKept").count(), 1);
        until("nothing is remembered of net1", || remembers(node, &pod, 0)).await;
        daemon.stop().await;
    });
}

#[test]
fn requests_that_were_seen_do_not_count_after_hotplug_was_off() {
    on_node("off", async |node| {
        let pod = node.unique("a");
        node.run_pod(&pod);
        node.attach_at_start(&pod, "blue", "net1");
        node.api.request(&pod, &json!([blue("net1")]));
        let daemon = node.start().await;
        until("the request is remembered", || remembers(node, &pod, 1)).await;
        daemon.stop().await;
        assert_eq!(node.api.annotation(&pod, "patchbay.dev/attachments"), json!(null));
        let daemon = node.start_with_flags(&["--hotplug=off"]).await;
        until("nothing is remembered", || remembers(node, &pod, 0)).await;
        node.api.request(&pod, &json!([]));
        daemon.stop().await;
        let daemon = node.start().await;
        until("net1 is kept", || states(node, &pod, &[("net1", "Kept")])).await;
        assert_eq!(node.calls(), [] as [&str; 0]);
        daemon.stop().await;
    });
}

#[test]
fn what_is_remembered_of_requests_goes_with_the_pod() {
    on_node("forget", async |node| {
        let pods = [node.unique("a"), node.unique("b")];
        for pod in &pods {
            node.run_pod(pod);
            node.attach_at_start(pod, "blue", "net1");
            node.api.request(pod, &json!([blue("net1")]));
        }
        let daemon = node.start().await;
        for pod in &pods {
            until("the request is remembered", || remembers(node, pod, 1)).await;
        }
        let [up, down] = &pods;
        node.end_sandbox(up);
        node.api.delete_pod(up);
        until("nothing is remembered", || remembers(node, up, 0)).await;
        daemon.stop().await;
        node.end_sandbox(down);
        node.api.delete_pod(down);
        let daemon = node.start().await;
        until("nothing is remembered", || remembers(node, down, 0)).await;
        assert_eq!(node.calls(), [] as [&str; 0]);
        daemon.stop().await;
    });
}
