//! What the annotations and events report.

use api::{
    attachments,
    network_status::{NetworkStatus, NetworkStatusList},
};

use super::*;

fn interfaces(node: &SimNode) -> Vec<String> {
    let list = NetworkStatusList::parse(node.server.network_status.as_deref()).unwrap();
    list.entries().iter().filter_map(|entry| Some(entry.status()?.interface.clone())).collect()
}

#[test]
fn new_entries_follow_the_order_of_the_annotation_and_old_ones_keep_their_place() {
    let mut node = SimNode::started("a@net9");
    node.edit("c@zone1,b@data1,a@net9");
    node.settle();
    assert_eq!(interfaces(&node), ["eth0", "net9", "zone1", "data1"]);
    assert_eq!(node.writes, 1);
    node.delete_link("zone1");
    node.settle();
    assert_eq!(interfaces(&node), ["eth0", "net9", "zone1", "data1"]);
    assert_eq!(node.writes, 2);
}

#[test]
fn entries_of_other_writers_keep_every_byte() {
    let mut node = SimNode::new();
    let other = r#"{"name": "other/x","interface":"ext1",  "ips":["10.9.0.1"],"vendor.example/key":1.0}"#;
    node.server.network_status = Some(format!("[{CLUSTER_ENTRY}, {other}, 7]"));
    node.edit("a@net1");
    node.settle();
    node.edit("[]");
    node.settle();
    let status = node.server.network_status.clone().unwrap();
    assert_eq!(status, format!("[{CLUSTER_ENTRY},{other},7]"));
}

#[test]
fn a_lost_status_is_written_again_for_attachments_of_the_pods_start_too() {
    let mut node = SimNode::started("a");
    node.edit("a,b");
    node.settle();
    let before = node.reported_attachments();
    for lost in [None, Some("[]"), Some("not JSON")] {
        node.server.network_status = lost.map(str::to_owned);
        node.server.attachments = None;
        node.watch();
        let calls = node.calls.len();
        node.settle();
        assert_eq!((node.reported_attachments(), node.calls.len()), (before.clone(), calls));
        assert_eq!(node.states(), ["default/b@net2 Attached"]);
    }
}

#[test]
fn a_status_without_the_default_network_gets_it_first() {
    let lost = [None, Some("[]"), Some("no list"), Some(r#"[{"name":"other/x","interface":"ext1"}]"#)];
    for (start, networks) in [("a", "a"), ("a", "a,b"), ("", "b@net2"), ("a", "[{")] {
        for lost in lost {
            let mut node = SimNode::started(start);
            node.server.network_status = lost.map(str::to_owned);
            node.edit(networks);
            node.settle();
            let status = node.server.network_status.clone().unwrap();
            let list = NetworkStatusList::parse(Some(&status)).unwrap();
            let first: NetworkStatus = serde_json::from_str(CLUSTER_ENTRY).unwrap();
            assert_eq!(list.entries()[0].status(), Some(&first), "{status}");
            assert_eq!(interfaces(&node).iter().filter(|name| *name == "eth0").count(), 1);
            assert_eq!(node.writes, 1, "{start} {networks} {lost:?}");
        }
    }
}

#[test]
fn no_default_network_is_added_where_one_is_reported_or_the_pod_does_not_run() {
    for status in [
        PRIMARY_NETWORK,
        r#"[{"name":"ovn-kubernetes","interface":"eth0","dns":{}}]"#,
        r#"[{"name":"other","interface":"x","default":true}]"#,
    ] {
        let mut node = SimNode::new();
        node.server.network_status = Some(status.to_owned());
        node.edit("a@net1");
        node.settle();
        let written = node.server.network_status.clone().unwrap();
        assert!(written.starts_with(status.trim_end_matches(']')), "{written}");
    }
    for lifecycle in [PodLifecycle::Pending, PodLifecycle::Terminating] {
        let mut node = SimNode::started("a");
        node.lifecycle = lifecycle;
        node.server.network_status = None;
        node.watch();
        node.settle();
        assert!(!interfaces(&node).contains(&"eth0".to_owned()), "{lifecycle:?}");
    }
}

#[test]
fn a_report_is_about_the_last_edit_also_if_it_restored_the_annotation() {
    let reported = |node: &SimNode| attachments::confirmed_networks(node.server.attachments.as_deref());
    let mut node = SimNode::started("a");
    node.confirm = Some("first".to_owned());
    node.settle();
    let first = attachments::networks_digest("first", Some("a"));
    assert_eq!(reported(&node).as_ref(), Some(&first));
    node.confirm = Some("removed".to_owned());
    node.edit("[]");
    node.confirm = Some("restored".to_owned());
    node.edit("a");
    assert_eq!(reported(&node).as_ref(), Some(&first), "from before the edits");
    let calls = node.calls.len();
    node.settle();
    assert_eq!(reported(&node), Some(attachments::networks_digest("restored", Some("a"))));
    assert_eq!(node.calls.len(), calls, "the interface stayed");
}

#[test]
fn what_multus_wrote_about_its_attachment_is_not_rewritten() {
    let mut node = SimNode::started("a");
    let status =
        node.server.network_status.clone().unwrap().replace("\"dns\": {}", "\"dns\":{},\"mtu\":9000");
    node.server.network_status = Some(status.clone());
    node.watch();
    assert_idle(&node);
    node.edit("a,b");
    node.settle();
    assert!(node.server.network_status.unwrap().starts_with(status.trim_end_matches(']')));
}

#[test]
fn an_entry_that_differs_from_the_record_leaves_with_the_attachment() {
    let mut node = SimNode::started("a");
    let status = node.server.network_status.clone().unwrap();
    node.server.network_status = Some(status.replace("\"mac\"", "\"mtu\": 9000, \"mac\""));
    node.edit("[]");
    node.settle();
    assert_eq!((node.reported_attachments(), node.link_names()), (set(&[]), Vec::new()));
    node.check();
}

#[test]
fn a_result_with_two_interfaces_is_one_attachment() {
    for origin in [Origin::Hotplug, Origin::PodStart] {
        let mut node =
            if origin == Origin::Hotplug { SimNode::with("a@net1") } else { SimNode::started("a@net1") };
        node.settle();
        let index = {
            node.add_foreign_link("net1b");
            *node.links().keys().last().unwrap()
        };
        let records = node.journal.values_mut().chain(node.multus.values_mut());
        for record in records {
            let owner = Some((record.key.clone(), record.nad.clone()));
            let RecordPhase::Attached(attached) = &mut record.phase else { panic!("{record:?}") };
            attached
                .statuses
                .push(NetworkStatus { interface: "net1b".to_owned(), ..attached.statuses[0].clone() });
            let link =
                LinkIdentity { index: Some(index), name: "net1b".to_owned(), ..LinkIdentity::default() };
            attached.links.push(link);
            let netns = node.sandbox.as_ref().unwrap().netns.clone();
            node.namespaces.get_mut(&netns).unwrap().get_mut(&index).unwrap().owner = owner;
        }
        node.settle();
        assert_eq!(node.reported_attachments(), set(&["default/a@net1", "default/a@net1b"]));
        assert_idle(&node);
        // One deleted link is not reported, and does not lose the attachment.
        let both = node.clone();
        node.delete_link("net1b");
        node.settle();
        assert_eq!((node.reported_attachments(), node.plan().step), (set(&["default/a@net1"]), None));
        node = both;
        node.edit("[]");
        node.settle();
        assert_eq!((node.link_names(), node.reported_attachments()), (Vec::new(), set(&[])));
        assert_eq!(node.calls.last().unwrap(), "DEL a net1");
    }
}

#[test]
fn a_result_without_an_interface_is_attached_once() {
    let mut node = SimNode::with("a@net1");
    node.settle();
    node.delete_link("net1");
    for record in node.journal.values_mut() {
        let RecordPhase::Attached(attached) = &mut record.phase else { panic!("{record:?}") };
        attached.links.clear();
    }
    assert_idle(&node);
    node.edit("[]");
    node.settle();
    assert_eq!((node.calls.len(), node.addresses.len(), node.reported_attachments()), (2, 0, set(&[])));
}

#[test]
fn a_conflicting_write_is_planned_again_from_the_new_values() {
    let mut node = SimNode::with("a@net1");
    node.work(None);
    let other = r#"{"name":"other/x","interface":"ext1","dns":{}}"#;
    node.server.network_status = Some(format!("[{CLUSTER_ENTRY},{other}]"));
    node.settle();
    assert_eq!(interfaces(&node), ["eth0", "ext1", "net1"]);
    assert_eq!(node.writes, 1);
}

#[test]
fn a_removed_attachment_is_remembered_until_a_write_confirms_the_annotations() {
    let mut node = SimNode::started("a@net1");
    let before = node.server.network_status.clone();
    // The cache is older than what Multus wrote.
    node.cache.network_status = Some(format!("[{CLUSTER_ENTRY}]"));
    node.cache.networks = None;
    node.server.networks = None;
    node.work(None);
    assert_eq!(node.server.network_status, before);
    node.settle();
    assert_eq!((node.reported_attachments(), node.journal.len()), (set(&[]), 0));
    node.check();
}

#[test]
fn pending_and_removing_are_reported_only_while_an_attempt_lasts_long() {
    let mut node = SimNode::with("a@net1");
    node.settle();
    node.edit("b@net2,c@net3");
    let (desired, observed) = (node.desired(), node.observe());
    let states = |running: Option<&AttemptKey>, failures: &Failures| {
        let input = PlanInput {
            desired: &desired,
            observed: &observed,
            failures,
            now: node.now,
            mode: PlugMode::On,
            running,
        };
        let plan = plan(input, |nad| ready(&nad.name), &mut Reported::default());
        let states = plan.states.iter();
        states.map(|it| format!("{} {} {}", it.interface, it.state, it.reason)).collect::<Vec<_>>()
    };
    let Some(Step::Remove(step)) = node.plan().step else { panic!("{:?}", node.plan()) };
    let none = Failures::default();
    assert_eq!(states(None, &none), [""; 0]);
    assert_eq!(states(Some(&step.attempt), &none), ["net2 Pending ", "net3 Pending ", "net1 Removing "]);
    // A known error says more than that the next attempt runs.
    let mut failures = Failures::default();
    failures.record(step.attempt.clone(), step.fingerprint, "timeout", node.now);
    assert_eq!(
        states(Some(&step.attempt), &failures),
        ["net2 Pending ", "net3 Pending ", "net1 Failed RemoveFailed"]
    );
}

#[test]
fn a_network_that_waits_for_a_failing_removal_says_so() {
    let mut node = SimNode::with("a@net1");
    node.settle();
    node.edit("b@net1,c@net2");
    node.work(Some(Fault::PluginFails));
    node.settle();
    assert_eq!(
        node.states(),
        [
            "default/b@net1 Failed/RemoveFailed",
            "default/c@net2 Attached",
            "default/a@net1 Failed/RemoveFailed"
        ]
    );
    assert_eq!(node.reported_attachments(), set(&["default/a@net1", "default/c@net2"]));
    assert_eq!(
        node.events[1].note,
        "pod [default/web]: failed removing interface net1 from network: a: no such device"
    );
    node.pass_backoffs();
    node.settle();
    node.check();
    assert_eq!(node.events.last().unwrap().reason, EventReason::AddedInterface);
}

#[test]
fn an_annotation_that_says_the_same_is_not_rewritten() {
    let mut node = SimNode::with("a@net1");
    node.settle();
    let text = node.server.attachments.clone().unwrap().replace("\":\"", "\": \"");
    assert_ne!(Some(&text), node.server.attachments.as_ref());
    node.server.attachments = Some(text);
    node.watch();
    assert_idle(&node);
    assert_eq!(attachments::parse(node.server.attachments.as_deref()).unwrap().len(), 1);
}

#[test]
fn events_have_the_texts_of_the_original_controller() {
    let networks = r#"[{"name":"a","interface":"net1","ips":["10.0.0.5/24","fd00::5/64"],"mac":"02:00:00:00:00:01","cni-args":{"k":"v","b":[1]}},{"name":"b","interface":"net2"}]"#;
    let mut node = SimNode::with(networks);
    let Some(Step::Add(step)) = node.plan().step else { panic!("{:?}", node.plan()) };
    let attributes = "(ips: [10.0.0.5/24 fd00::5/64], mac: 02:00:00:00:00:01, cni-args: &map[b:[1] k:v])";
    assert_eq!(
        step.added().note,
        format!("pod [default/web]: added interface net1 to network: a{attributes}")
    );
    assert_eq!(
        step.failed("no such device").note,
        format!("pod [default/web]: failed adding interface net1 to network: a{attributes}: no such device")
    );
    node.settle();
    assert_eq!(node.events[1].note, "pod [default/web]: added interface net2 to network: b");
    node.edit("[]");
    node.settle();
    assert_eq!(node.events[3].note, "pod [default/web]: removed interface net1 from network: a");
    for (event, warning) in
        [(EventReason::AddedInterface, false), (EventReason::FailedRemovingInterface, true)]
    {
        assert_eq!(event.is_warning(), warning);
    }
}

#[test]
fn one_network_costs_one_write() {
    let mut node = SimNode::new();
    for (number, networks) in ["a@net1", "a@net1,b@net2", "b@net2", "c@net2", "[]"].into_iter().enumerate() {
        node.edit(networks);
        node.settle();
        assert_eq!(node.writes, number + 1, "{networks}");
        node.check();
    }
}

#[test]
fn the_record_of_an_add_that_ran_nothing_keeps_what_network_status_may_report() {
    let mut node = SimNode::with("a@net1");
    node.settle();
    node.edit("b@net1");
    // DEL, then the intent of the ADD. No annotation is written in between.
    node.work(None);
    node.work(Some(Fault::CrashAfterIntent));
    for record in node.journal.values_mut() {
        assert_eq!((record.nad.name.as_str(), record.former_statuses.len()), ("b", 1));
        record.phase = RecordPhase::Removed;
    }
    node.broken.insert(nad("b"));
    node.edit("[]");
    node.add_foreign_link("net1");
    assert!(node.plan().step.is_none(), "{:?}", node.plan());
    node.settle();
    assert_eq!((node.reported_attachments(), node.journal.len()), (set(&[]), 0));
}

#[test]
fn a_note_has_the_error_and_no_control_characters() {
    let args = "\\u001b[31m\\u202e\\n".repeat(300);
    let networks = format!(r#"[{{"name":"a","interface":"net1","cni-args":{{"k":"{args}"}}}}]"#);
    let node = SimNode::with(&networks);
    let Some(Step::Add(step)) = node.plan().step else { panic!("{:?}", node.plan()) };
    for error in ["no such\ndevice\u{2066}", &"e".repeat(5000)] {
        let note = step.failed(error).note;
        assert!(note.len() <= 1000 && note.contains("...)"), "{note}");
        assert!(note.ends_with("...): no such device ") || note.ends_with(&"e".repeat(512)), "{note}");
        let hidden = |c: char| c.is_control() || c == '\u{202e}' || c == '\u{2066}';
        assert!(!note.contains(hidden), "{note}");
    }
    assert!(step.added().note.len() <= 300, "{}", step.added().note);
    let long = PodIdentity { name: "p".repeat(253), namespace: "n".repeat(63), ..step.pod.clone() };
    let nad = api::selection::NadRef::new("default", "a".repeat(253));
    let note = AddStep { pod: long, nad, ..*step }.failed(&"e".repeat(5000)).note;
    assert!(note.len() <= 1000 && note.ends_with(&"e".repeat(300)), "{note}");
}

#[test]
fn an_add_that_waits_for_other_plugins_is_pending_and_no_failed_attempt() {
    let mut node = SimNode::with("a@net1");
    let Some(Step::Add(step)) = node.plan().step else { panic!("{:?}", node.plan()) };
    for attempt in 0..10 {
        let reason =
            format!("plugin macvlan was not started: 8 ADD calls of it are running {attempt}; retrying");
        let failures = &mut node.failures;
        let reported = failures.record_wait(step.attempt.clone(), step.fingerprint, &reason, node.now);
        assert_eq!(
            (reported, failures.next_retry(node.now)),
            (attempt == 0, Some(node.now + MIN_RETRY * 4 / 5))
        );
    }
    node.settle();
    assert_eq!((node.states(), node.calls.len()), (vec!["default/a@net1 Pending".to_owned()], 0));
    assert!(node.server.attachments.as_ref().unwrap().contains("8 ADD calls of it are running"));
    assert!(node.failures.record(step.attempt.clone(), step.fingerprint, "no such device", node.now));
    assert_eq!(node.failures.next_retry(node.now), Some(node.now + MIN_RETRY * 4 / 5));
    node.settle();
    assert_eq!(node.states(), ["default/a@net1 Failed/AddFailed"]);
    node.pass_backoffs();
    node.settle();
    assert_eq!(node.states(), ["default/a@net1 Attached"]);
}
