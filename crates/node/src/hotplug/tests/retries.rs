//! When failed attempts are tried again.

use std::time::{Duration, Instant};

use serde_json::json;

use super::{
    blue,
    node::{TestNode, on_node, until},
    settled,
};

/// How many ADDs there were.
fn adds(node: &TestNode) -> usize {
    node.calls().iter().filter(|call| call.starts_with("ADD")).count()
}

#[test]
fn a_released_address_brings_a_retry_forward() {
    on_node("repair", async |node| {
        node.run_pod("a");
        let daemon = node.start().await;
        node.set_fault("fail-add", true);
        node.api.request("a", &json!([blue("net1")]));
        // After the fourth ADD the daemon waits 6.4 to 8 s.
        until("four ADDs", || adds(node) == 4).await;
        let failed = Instant::now();
        daemon.repairs.signal();
        until("the fifth ADD", || adds(node) == 5).await;
        assert!(failed.elapsed() > Duration::from_millis(900), "{:?}", failed.elapsed());
        assert!(failed.elapsed() < Duration::from_secs(6), "{:?}", failed.elapsed());
        daemon.stop().await;
    });
}

#[test]
fn links_and_cleanups_of_a_failing_pod_wake_it_at_most_once_a_second_and_varying_errors_are_one_event() {
    on_node("self-wake", async |node| {
        node.run_pod("a");
        let daemon = node.start().await;
        node.set_fault("fail-link", true);
        node.api.request("a", &json!([blue("net1")]));
        until("an ADD", || adds(node) == 1).await;
        let started = Instant::now();
        until("further ADDs", || adds(node) == 5).await;
        // The first retry comes 0.8 to 1 s after the first failure.
        assert!(started.elapsed() > Duration::from_millis(3600), "{:?}", started.elapsed());
        let failures = |note: &String| note.contains("failed adding");
        assert_eq!(node.api.event_notes().into_iter().filter(failures).count(), 1);
        node.set_fault("fail-link", false);
        settled(node, "a", &["net1"]).await;
        daemon.stop().await;
    });
}
