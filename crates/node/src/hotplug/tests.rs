//! Tests of hot-plug on a node with real network namespaces and processes.

mod lost_records;
mod multus_records;
mod node;
mod requests;
mod retries;

use std::{
    fs,
    fs::File,
    time::{Duration, Instant},
};

use link::DefaultRoute;
use node::{TestNode, config, on_node, until};
use plan::hotplug::{AttachmentRecord, RecordPhase};
use serde_json::json;

use super::AttachmentJournal;
use crate::{executor::LimitsConfig, store::small_disk::SmallDisk};

fn attached(node: &TestNode, pod: &str, interfaces: &[&str]) -> bool {
    let links: Vec<String> = node.links(pod).into_keys().collect();
    links == interfaces && node.api.interfaces(pod) == interfaces
}

/// Waits until status and links of the pod are these interfaces.
async fn settled(node: &TestNode, pod: &str, interfaces: &[&str]) {
    until(&format!("{pod} has {interfaces:?}"), || attached(node, pod, interfaces)).await;
}

fn blue(interface: &str) -> serde_json::Value {
    json!({"name": "blue", "interface": interface})
}

#[test]
fn an_edit_plugs_and_the_next_one_unplugs_with_one_write_each() {
    on_node("plug", async |node| {
        node.run_pod("a");
        let daemon = node.start().await;
        node.api.request("a", &json!([blue("net1")]));
        settled(node, "a", &["net1"]).await;
        assert_eq!(node.api.states("a"), [("net1".to_owned(), "Attached".to_owned())]);
        assert_eq!(node.api.writes(), 1);
        let status = node.api.annotation("a", "k8s.v1.cni.cncf.io/network-status");
        assert_eq!((&status[0]["name"], &status[0]["ips"]), (&"ns/blue".into(), &json!(["10.9.0.2"])));

        node.api.request("a", &json!([]));
        settled(node, "a", &[]).await;
        assert_eq!((node.api.writes(), node.addresses()), (2, 0));
        assert_eq!(node.api.annotation("a", "patchbay.dev/attachments"), json!(null));
        until("events", || node.api.event_reasons() == ["AddedInterface", "RemovedInterface"]).await;
        assert_eq!(node.calls(), ["ADD net1", "DEL net1"]);
        daemon.stop().await;
    });
}

#[test]
fn a_restart_changes_nothing() {
    on_node("restart", async |node| {
        node.run_pod("a");
        let daemon = node.start().await;
        node.api.request("a", &json!([blue("net1"), {"name": "blue"}]));
        settled(node, "a", &["net1", "net2"]).await;
        let (links, writes) = (node.links("a"), node.api.writes());
        until("events", || node.api.event_reasons().len() == 2).await;
        daemon.stop().await;
        let daemon = node.start().await;
        // The daemon has handled everything else when it has handled the last pod.
        node.run_pod("b");
        node.api.request("b", &json!([blue("net1")]));
        settled(node, "b", &["net1"]).await;
        daemon.stop().await;
        assert_eq!((node.links("a"), node.api.writes()), (links, writes + 1));
        assert_eq!(node.calls(), ["ADD net1", "ADD net2", "ADD net1"]);
        assert!(node.api.event_reasons().len() <= 3);
    });
}

#[test]
fn an_attachment_without_a_result_is_undone_and_repeated() {
    on_node("crash", async |node| {
        node.run_pod("a");
        let daemon = node.start().await;
        node.set_fault("hang", true);
        node.api.request("a", &json!([blue("net1")]));
        until("the plugin runs", || node.calls() == ["ADD net1"]).await;
        daemon.kill().await;
        // The plugin outlives the daemon.
        node.set_fault("hang", false);
        until("the link", || node.links("a").contains_key("net1")).await;
        assert_eq!(node.api.interfaces("a"), [] as [String; 0]);
        let before = node.links("a")["net1"];

        let daemon = node.start().await;
        settled(node, "a", &["net1"]).await;
        assert_eq!(node.calls(), ["ADD net1", "DEL net1", "ADD net1"]);
        assert_ne!(node.links("a")["net1"], before);
        assert_eq!(node.addresses(), 1);
        daemon.stop().await;
    });
}

#[test]
fn a_disk_that_is_full_when_the_plugin_ends_and_a_restart_take_no_interface() {
    on_node("full-result", async |node| {
        node.run_pod("a");
        let disk = SmallDisk::mount(node.root.join("state"));
        let daemon = node.start().await;
        node.set_fault("hang", true);
        node.api.request("a", &json!([blue("net1")]));
        until("the plugin runs", || node.calls() == ["ADD net1"]).await;
        disk.fill();
        node.set_fault("hang", false);
        settled(node, "a", &["net1"]).await;
        let before = node.links("a");
        daemon.kill().await;
        // Only the journal knows the result.
        fs::remove_dir_all(node.root.join("results")).unwrap();
        let daemon = node.start().await;
        until("the alarm", || daemon.health.warnings().concat().contains("journal")).await;
        disk.empty();
        // The daemon has handled everything else when it has handled the last pod.
        node.run_pod("b");
        node.api.request("b", &json!([blue("net1")]));
        settled(node, "b", &["net1"]).await;
        daemon.stop().await;
        assert_eq!((node.calls(), node.links("a")), (vec!["ADD net1".to_owned(); 2], before));
    });
}

#[test]
fn an_attachment_whose_result_is_in_the_result_cache_only_is_kept() {
    on_node("unrecorded", async |node| {
        node.run_pod("a");
        let daemon = node.start().await;
        node.api.request("a", &json!([blue("net1")]));
        settled(node, "a", &["net1"]).await;
        let before = node.links("a");
        daemon.stop().await;
        // As if the daemon was killed before it could write the result.
        let journal = AttachmentJournal::open(&node.root.join("state")).unwrap();
        let record = journal.records_of("uid-a").pop().unwrap();
        let phase = RecordPhase::Intent { links_before: vec![1] };
        journal.update(AttachmentRecord { phase, ..(*record).clone() }).await.unwrap();
        drop(journal);
        let daemon = node.start().await;
        node.run_pod("b");
        node.api.request("b", &json!([blue("net1")]));
        settled(node, "b", &["net1"]).await;
        daemon.stop().await;
        assert_eq!((node.calls(), node.links("a")), (vec!["ADD net1".to_owned(); 2], before));
        let journal = AttachmentJournal::open(&node.root.join("state")).unwrap();
        assert_eq!(journal.records_of("uid-a"), [record]);
    });
}

#[test]
fn a_failed_attachment_is_cleaned_up_reported_and_retried_beside_the_others() {
    on_node("failed", async |node| {
        node.run_pod("a");
        node.api.set_nad("broken", Some(json!({"cniVersion": "1.0.0", "type": "absent"})));
        let daemon = node.start().await;
        node.set_fault("fail-add", true);
        node.api.request("a", &json!([blue("net1")]));
        let failed = [("net1".to_owned(), "Failed".to_owned())];
        until("net1 failed", || node.api.states("a") == failed).await;
        assert_eq!((node.addresses(), node.links("a").len()), (0, 0));
        until("an event", || node.api.event_notes().iter().any(|note| note.contains("no luck"))).await;

        node.set_fault("fail-add", false);
        node.api.request("a", &json!([{"name": "broken", "interface": "net2"}, blue("net1"), blue("net3")]));
        settled(node, "a", &["net1", "net3"]).await;
        let states: Vec<String> = node.api.states("a").into_iter().map(|(_, state)| state).collect();
        assert_eq!(states, ["Failed", "Attached", "Attached"]);
        daemon.stop().await;
    });
}

#[test]
fn the_end_of_a_pod_releases_its_addresses_also_if_the_daemon_was_down() {
    on_node("end", async |node| {
        for pod in ["a", "b"] {
            node.run_pod(pod);
        }
        let daemon = node.start().await;
        for pod in ["a", "b"] {
            node.api.request(pod, &json!([blue("net1")]));
            settled(node, pod, &["net1"]).await;
        }
        node.end_sandbox("a");
        node.api.delete_pod("a");
        until("the address of a is free", || node.addresses() == 1).await;
        daemon.stop().await;
        node.end_sandbox("b");
        node.api.delete_pod("b");
        let daemon = node.start().await;
        until("the address of b is free", || node.addresses() == 0).await;
        assert_eq!(node.calls()[2..], ["DEL net1 released", "DEL net1 released"]);
        daemon.stop().await;
    });
}

#[test]
fn a_journal_that_cannot_be_written_refuses_to_attach_and_still_detaches() {
    on_node("full", async |node| {
        for pod in ["a", "b"] {
            node.run_pod(pod);
        }
        let daemon = node.start().await;
        node.api.request("a", &json!([blue("net1")]));
        settled(node, "a", &["net1"]).await;
        daemon.stop().await;
        // A directory in the place of the file that replaces the journal: no write succeeds.
        let obstacle = node.root.join("state/hotplug/journal.new");
        fs::create_dir_all(obstacle.join("x")).unwrap();
        let daemon = node.start().await;
        node.api.request("b", &json!([blue("net1")]));
        let failed = [("net1".to_owned(), "Failed".to_owned())];
        until("net1 of b failed", || node.api.states("b") == failed).await;
        let message = node.api.annotation("b", "patchbay.dev/attachments")[0]["message"].to_string();
        assert!(message.contains("journal"), "{message}");
        assert!(daemon.health.warnings().concat().contains("journal"), "{:?}", daemon.health.warnings());
        node.api.request("a", &json!([]));
        settled(node, "a", &[]).await;
        assert_eq!((node.calls(), node.addresses()), (vec!["ADD net1".to_owned(), "DEL net1".to_owned()], 0));

        fs::remove_dir_all(obstacle).unwrap();
        settled(node, "b", &["net1"]).await;
        until("health", || daemon.health.warnings().is_empty()).await;
        daemon.stop().await;
    });
}

#[test]
fn a_deleted_link_is_attached_again_and_a_renamed_or_moved_one_is_not() {
    on_node("lost", async |node| {
        node.run_pod("a");
        node.run_pod("nested");
        let daemon = node.start().await;
        node.api.request("a", &json!([blue("net1")]));
        settled(node, "a", &["net1"]).await;
        let before = node.links("a")["net1"];
        node.ip_in("a", "link del net1");
        until("another net1", || node.links("a").get("net1").is_some_and(|index| *index != before)).await;
        settled(node, "a", &["net1"]).await;
        let calls = node.calls();
        assert_eq!(calls.last().map(String::as_str), Some("ADD net1"));

        node.ip_in("a", "link set net1 name guest");
        node.api.request("a", &json!([blue("net1"), blue("net2")]));
        until("net2", || node.api.interfaces("a") == ["net1", "net2"]).await;
        assert_eq!(node.links("a").into_keys().collect::<Vec<_>>(), ["guest", "net2"]);
        node.api.request("a", &json!([blue("net2")]));
        settled(node, "a", &["net2"]).await;

        node.move_link("a", "net2", "nested");
        node.api.request("a", &json!([blue("net2"), blue("net3")]));
        until("net3", || node.api.interfaces("a") == ["net2", "net3"]).await;
        assert_eq!(node.links("a").into_keys().collect::<Vec<_>>(), ["net3"]);
        assert_eq!(node.calls().iter().filter(|call| *call == "ADD net2").count(), 1);
        daemon.stop().await;
    });
}

#[test]
fn a_nad_that_is_created_later_is_attached() {
    on_node("nad", async |node| {
        node.run_pod("a");
        let daemon = node.start().await;
        node.api.request("a", &json!([{"name": "late", "interface": "net1"}]));
        until("a state", || !node.api.states("a").is_empty()).await;
        node.api.set_nad("late", Some(config("late")));
        settled(node, "a", &["net1"]).await;
        // It is detached with the configuration that was recorded.
        node.api.set_nad("late", None);
        node.api.request("a", &json!([]));
        settled(node, "a", &[]).await;
        assert_eq!(node.addresses(), 0);
        daemon.stop().await;
    });
}

#[test]
fn a_failed_write_of_the_status_is_repeated_and_keeps_the_link() {
    on_node("write", async |node| {
        node.run_pod("a");
        let daemon = node.start().await;
        node.api.fail_writes(2);
        node.api.request("a", &json!([blue("net1")]));
        settled(node, "a", &["net1"]).await;
        assert_eq!((node.calls(), node.api.writes()), (vec!["ADD net1".to_owned()], 3));
        daemon.stop().await;
    });
}

#[test]
fn a_writer_that_reverts_the_status_is_answered_with_growing_delays() {
    on_node("revert", async |node| {
        node.run_pod("a");
        let daemon = node.start().await;
        node.api.request("a", &json!([blue("net1")]));
        settled(node, "a", &["net1"]).await;
        let (started, before) = (Instant::now(), node.api.writes());
        // The first repetition is immediate. The next ones follow after 1 s and 2 s.
        for repetition in 1..=3 {
            node.api.annotate("a", &[("k8s.v1.cni.cncf.io/network-status", "[]")]);
            settled(node, "a", &["net1"]).await;
            assert_eq!(node.api.writes(), before + repetition);
        }
        assert!(started.elapsed() >= Duration::from_secs(2), "{:?}", started.elapsed());
        assert_eq!(node.calls(), ["ADD net1"]);
        daemon.stop().await;
    });
}

#[test]
fn quick_edits_end_with_the_last_one() {
    on_node("edits", async |node| {
        node.run_pod("a");
        node.api.set_nad("red", Some(config("red")));
        let daemon = node.start().await;
        let red = |interface: &str| json!({"name": "red", "interface": interface});
        for edit in [
            json!([blue("net1")]),
            json!([blue("net1"), blue("net2")]),
            json!([red("net1"), blue("net2")]),
            json!([]),
            json!([blue("net3")]),
            json!([red("net3"), blue("net1")]),
            json!([red("net1")]),
        ] {
            node.api.request("a", &edit);
            tokio::time::sleep(Duration::from_millis(15)).await;
        }
        settled(node, "a", &["net1"]).await;
        until("the last edit", || {
            node.api.annotation("a", "k8s.v1.cni.cncf.io/network-status")[0]["name"] == "ns/red"
        })
        .await;
        assert_eq!(node.addresses(), 1);
        daemon.stop().await;
    });
}

#[test]
fn a_slow_plugin_is_reported_as_pending() {
    on_node("slow", async |node| {
        node.run_pod("a");
        let daemon = node.start().await;
        node.set_fault("hang", true);
        node.api.request("a", &json!([blue("net1")]));
        let pending = [("net1".to_owned(), "Pending".to_owned())];
        until("net1 of a is pending", || node.api.states("a") == pending).await;
        node.set_fault("hang", false);
        settled(node, "a", &["net1"]).await;
        assert_eq!(node.api.writes(), 2);
        daemon.stop().await;
    });
}

/// A user who may edit a pod may write the annotations by which the kubelet marks mirror pods.
#[test]
fn a_pod_that_claims_the_uid_of_another_pod_changes_nothing_there() {
    on_node("claim", async |node| {
        node.run_pod("victim");
        node.run_pod("hostile");
        let daemon = node.start().await;
        node.api.request("victim", &json!([blue("net1")]));
        settled(node, "victim", &["net1"]).await;
        let links = node.links("victim");
        node.api.annotate(
            "hostile",
            &[
                ("kubernetes.io/config.hash", "uid-victim"),
                ("kubernetes.io/config.mirror", "uid-victim"),
                ("k8s.v1.cni.cncf.io/networks", "[]"),
            ],
        );
        // The victim is still served, and by its own annotation.
        node.api.request("victim", &json!([blue("net1"), blue("net2")]));
        settled(node, "victim", &["net1", "net2"]).await;
        assert_eq!(node.links("victim")["net1"], links["net1"]);
        node.api.annotate("hostile", &[("k8s.v1.cni.cncf.io/networks", r#"[{"name":"blue"}]"#)]);
        node.run_pod("other");
        node.api.request("other", &json!([blue("net1")]));
        settled(node, "other", &["net1"]).await;
        daemon.stop().await;
        assert_eq!(node.links("victim").keys().collect::<Vec<_>>(), ["net1", "net2"]);
        assert_eq!(node.calls(), ["ADD net1", "ADD net2", "ADD net1"]);
    });
}

#[test]
fn a_list_with_a_missing_plugin_is_undone_and_attached_when_it_is_corrected() {
    on_node("list", async |node| {
        node.run_pod("a");
        let list = |second: &str| json!({"cniVersion": "1.0.0", "name": "list", "plugins": [{"type": "veth"}, {"type": second}]});
        node.api.set_nad("list", Some(list("absent")));
        let daemon = node.start().await;
        node.api.request("a", &json!([{"name": "list", "interface": "net1"}]));
        until("the DEL of veth", || node.calls() == ["ADD net1", "DEL net1"]).await;
        until("no address", || node.addresses() == 0).await;
        node.api.set_nad("list", Some(config("list")));
        settled(node, "a", &["net1"]).await;
        daemon.stop().await;
    });
}

#[test]
fn the_status_of_a_removed_attachment_goes_although_the_next_one_has_no_plugin() {
    on_node("swap", async |node| {
        node.run_pod("a");
        node.api.set_nad("broken", Some(json!({"cniVersion": "1.0.0", "type": "absent"})));
        let daemon = node.start().await;
        node.api.request("a", &json!([blue("net1")]));
        settled(node, "a", &["net1"]).await;
        node.api.request("a", &json!([{"name": "broken", "interface": "net1"}]));
        let failed = [("net1".to_owned(), "Failed".to_owned())];
        until("net1 failed", || node.api.states("a") == failed).await;
        settled(node, "a", &[]).await;
        daemon.stop().await;
    });
}

#[test]
fn a_plugin_that_waits_for_its_turn_is_no_event() {
    on_node("busy", async |node| {
        for pod in ["a", "b"] {
            node.run_pod(pod);
        }
        let limits = LimitsConfig {
            adds_per_plugin: 1,
            add_wait: Duration::from_millis(100),
            ..LimitsConfig::default()
        };
        let daemon = node.start_with(limits).await;
        node.set_fault("hang", true);
        node.api.request("a", &json!([blue("net1")]));
        until("the plugin runs", || node.calls() == ["ADD net1"]).await;
        node.api.request("b", &json!([blue("net1")]));
        until("b waits", || !node.api.states("b").is_empty()).await;
        let message = node.api.annotation("b", "patchbay.dev/attachments")[0]["message"].to_string();
        assert!(message.contains("1 ADD calls of it are running"), "{message}");
        assert_eq!(node.calls(), ["ADD net1"]);
        node.set_fault("hang", false);
        for pod in ["a", "b"] {
            settled(node, pod, &["net1"]).await;
        }
        until("events", || node.api.event_reasons() == ["AddedInterface", "AddedInterface"]).await;
        assert_eq!(node.calls(), ["ADD net1", "ADD net1"]);
        daemon.stop().await;
    });
}

#[test]
fn the_default_route_comes_back_after_a_crash() {
    on_node("route", async |node| {
        node.run_pod("a");
        for command in [
            "link add eth0 type veth peer name peer0",
            "address add 10.0.0.2/24 dev eth0",
            "link set peer0 up",
            "link set eth0 up",
            "route add default via 10.0.0.1",
        ] {
            node.ip_in("a", command);
        }
        let routes = || link::default_routes_in(File::open(node.netns("a")).unwrap()).unwrap();
        let before = routes();
        let daemon = node.start().await;
        node.set_fault("hang", true);
        node.api.request("a", &json!([blue("net1")]));
        until("the plugin runs", || node.calls() == ["ADD net1"]).await;
        daemon.kill().await;
        node.set_fault("hang", false);
        until("the link", || node.links("a").contains_key("net1")).await;
        // The daemon was killed after it had replaced the default route.
        let journal = AttachmentJournal::open(&node.root.join("state")).unwrap();
        let key = journal.keys().pop_first().unwrap();
        let saved = before.iter().map(|route: &DefaultRoute| serde_json::to_value(route).unwrap());
        journal.save_routes(key, saved.collect()).await.unwrap();
        drop(journal);
        for command in [
            "address add 10.9.0.2/24 dev net1",
            "link set net1 up",
            "route replace default via 10.9.0.1 dev net1",
        ] {
            node.ip_in("a", command);
        }
        assert_ne!(routes(), before);

        let daemon = node.start().await;
        until("net1 is attached again", || node.api.interfaces("a") == ["net1"]).await;
        assert_eq!(node.calls(), ["ADD net1", "DEL net1", "ADD net1"]);
        assert_eq!(routes(), before);
        daemon.stop().await;
    });
}

#[test]
fn while_the_journal_cannot_be_read_running_pods_are_not_changed() {
    on_node("unread", async |node| {
        node.run_pod("a");
        let daemon = node.start().await;
        node.api.request("a", &json!([blue("net1")]));
        settled(node, "a", &["net1"]).await;
        daemon.stop().await;
        let (journal, kept) = (node.root.join("state/hotplug/journal"), node.root.join("kept"));
        fs::rename(&journal, &kept).unwrap();
        fs::create_dir(&journal).unwrap();
        let daemon = node.start().await;
        until("health", || daemon.health.warnings().concat().contains("cannot be read")).await;
        node.api.request("a", &json!([blue("net1"), blue("net2")]));
        fs::remove_dir(&journal).unwrap();
        fs::rename(&kept, &journal).unwrap();
        settled(node, "a", &["net1", "net2"]).await;
        assert_eq!(
            (node.calls(), node.api.writes()),
            (vec!["ADD net1".to_owned(), "ADD net2".to_owned()], 2)
        );
        until("health", || daemon.health.warnings().is_empty()).await;
        daemon.stop().await;
    });
}

#[test]
fn a_namespace_that_was_recorded_by_a_process_number_is_not_used_after_the_end_of_the_sandbox() {
    on_node("process", async |node| {
        node.run_pod("a");
        let daemon = node.start().await;
        node.api.request("a", &json!([blue("net1")]));
        settled(node, "a", &["net1"]).await;
        daemon.stop().await;
        // The number is of another process now: of the test.
        let journal = AttachmentJournal::open(&node.root.join("state")).unwrap();
        let record = journal.records_of("uid-a").pop().unwrap();
        let netns = format!("/proc/{}/ns/net", std::process::id());
        journal.update(AttachmentRecord { netns, ..(*record).clone() }).await.unwrap();
        drop(journal);
        node.end_sandbox("a");
        node.api.delete_pod("a");
        let daemon = node.start().await;
        until("the address is free", || node.addresses() == 0).await;
        assert_eq!(node.calls(), ["ADD net1", "DEL net1 released"]);
        daemon.stop().await;
    });
}

/// A user who may edit a pod may claim the hash of a static pod, also before the kubelet creates its mirror pod.
#[test]
fn a_static_pod_is_served_although_other_pods_claim_its_hash() {
    on_node("static", async |node| {
        // The UIDs of the mirror_pods sort before and after that of the mirror pod.
        for pod in ["aaa", "zzz"] {
            node.run_pod(pod);
            node.api.annotate(
                pod,
                &[
                    ("kubernetes.io/config.hash", "hash"),
                    ("kubernetes.io/config.mirror", "hash"),
                    ("k8s.v1.cni.cncf.io/networks", r#"[{"name":"blue","interface":"evil"}]"#),
                ],
            );
        }
        let daemon = node.start().await;
        node.run_static_pod("static", "hash");
        node.api.request("static", &json!([blue("net1")]));
        settled(node, "static", &["net1"]).await;
        for pod in ["aaa", "zzz"] {
            node.api.delete_pod(pod);
        }
        node.api.request("static", &json!([blue("net1"), blue("net2")]));
        settled(node, "static", &["net1", "net2"]).await;
        assert_eq!(node.calls(), ["ADD net1", "ADD net2"]);
        daemon.stop().await;
    });
}

#[test]
fn a_plugin_that_hangs_while_its_pod_ends_leaves_no_address() {
    on_node("hang-end", async |node| {
        node.run_pod("a");
        let daemon = node.start().await;
        node.set_fault("hang", true);
        node.api.request("a", &json!([blue("net1")]));
        until("the plugin has allocated an address", || node.addresses() == 1).await;
        node.end_sandbox("a");
        node.api.delete_pod("a");
        node.set_fault("hang", false);
        until("the address is free", || node.addresses() == 0).await;
        assert_eq!(node.calls(), ["ADD net1", "DEL net1 released"]);
        daemon.stop().await;
    });
}

#[test]
fn the_default_route_comes_back_although_the_del_of_a_deleted_link_fails() {
    on_node("route-lost", async |node| {
        node.run_pod("a");
        for command in [
            "link add eth0 type veth peer name peer0",
            "address add 10.0.0.2/24 dev eth0",
            "link set peer0 up",
            "link set eth0 up",
            "route add default via 10.0.0.1",
        ] {
            node.ip_in("a", command);
        }
        let routes = || link::default_routes_in(File::open(node.netns("a")).unwrap()).unwrap();
        let before = routes();
        let daemon = node.start().await;
        node.api.request("a", &json!([blue("net1")]));
        until("net1 is attached", || node.api.interfaces("a") == ["net1"]).await;
        daemon.stop().await;
        // The attachment replaced the default route, and a program in the pod deleted the link.
        let journal = AttachmentJournal::open(&node.root.join("state")).unwrap();
        let mut record = (*journal.records_of("uid-a").pop().unwrap()).clone();
        let RecordPhase::Attached(attached) = &mut record.phase else { panic!("{record:?}") };
        attached.replaced_routes = before.iter().map(|route| serde_json::to_value(route).unwrap()).collect();
        journal.update(record).await.unwrap();
        drop(journal);
        node.ip_in("a", "route del default");
        node.ip_in("a", "link del net1");
        node.set_fault("fail-del", true);
        let daemon = node.start().await;
        until("the default route is restored", || routes() == before).await;
        until("a DEL", || node.calls().contains(&"DEL net1".to_owned())).await;
        node.set_fault("fail-del", false);
        until("net1 is attached again", || node.links("a").contains_key("net1")).await;
        daemon.stop().await;
    });
}

#[test]
fn metrics_report_attachments_durations_failures_retries_and_writes() {
    on_node("metrics", async |node| {
        node.run_pod("a");
        node.api.set_nad("broken", Some(json!({"cniVersion": "1.0.0", "type": "absent"})));
        let daemon = node.start().await;
        let has = |lines: &[&str]| {
            let metrics = daemon.metrics();
            lines.iter().all(|line| metrics.lines().any(|found| found.starts_with(line)))
        };
        // The daemon then waits: it has handled the write that the test sees.
        let idle = || tokio::time::sleep(Duration::from_millis(300));
        node.api.request("a", &json!([blue("net1")]));
        settled(node, "a", &["net1"]).await;
        idle().await;
        // The time of an edit is measured, and not that of the first request that the daemon sees.
        node.api.request("a", &json!([blue("net1"), blue("net2"), {"name": "broken", "interface": "net3"}]));
        settled(node, "a", &["net1", "net2"]).await;
        until("the metrics of the plug", || {
            has(&[
                r#"patchbay_node_hotplug_attachments{state="Attached"} 2"#,
                r#"patchbay_node_hotplug_attachments{state="Failed"} 1"#,
                r#"patchbay_node_hotplug_duration_seconds_count{operation="Plug"} "#,
                "patchbay_node_hotplug_pending_retries 1",
            ])
        })
        .await;
        let metrics = daemon.metrics();
        assert!(
            metrics.contains(r#"patchbay_node_hotplug_failures_total{reason="PluginMissing"}"#),
            "{metrics}"
        );
        assert!(metrics.contains(r#"patchbay_node_hotplug_status_writes_total{result="Ok"}"#), "{metrics}");
        idle().await;
        node.api.request("a", &json!([]));
        settled(node, "a", &[]).await;
        until("the metrics of the unplug", || {
            has(&[
                r#"patchbay_node_hotplug_attachments{state="Attached"} 0"#,
                r#"patchbay_node_hotplug_attachments{state="Failed"} 0"#,
                r#"patchbay_node_hotplug_duration_seconds_count{operation="Unplug"} 1"#,
                "patchbay_node_hotplug_pending_retries 0",
            ])
        })
        .await;
        daemon.stop().await;
    });
}
