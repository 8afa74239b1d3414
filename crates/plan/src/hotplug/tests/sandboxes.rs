//! Sandboxes, the life of pods, and what each mode allows.

use super::*;

#[test]
fn a_recreated_sandbox_releases_the_old_attachments_and_needs_nothing() {
    let mut node = SimNode::started("a");
    node.edit("a,b@net5");
    node.settle();
    let old = node.journal.keys().next().unwrap().clone();
    node.recreate_sandbox();
    node.watch();
    let Some(Step::Remove(step)) = node.plan().step else { panic!("{:?}", node.plan()) };
    assert_eq!(
        (&step.record.key, step.mode, step.purpose, step.leftover_links.len()),
        (&old, DelMode::ReleaseOnly, RemovePurpose::SandboxEnded, 0)
    );
    assert_eq!(step.removed(), None);
    node.settle();
    assert_eq!(node.calls[1..], ["DEL b net5 without namespace"]);
    assert_eq!(node.linked_attachments(), set(&["default/a@net1", "default/b@net5"]));
    assert_eq!(node.states(), [""; 0]);
    node.check();
}

#[test]
fn a_recreated_sandbox_without_multus_gets_all_networks_anew() {
    let mut node = SimNode::with("a@net1,b@net2");
    node.has_multus = false;
    node.settle();
    node.recreate_sandbox();
    node.server.networks = Some("b@net2".to_owned());
    node.watch();
    node.settle();
    assert_eq!(node.linked_attachments(), set(&["default/b@net2"]));
    node.check();
}

#[test]
fn the_namespace_of_an_old_sandbox_that_still_exists_is_used() {
    let mut node = SimNode::with("a@net1");
    node.settle();
    let netns = node.sandbox.clone().unwrap().netns;
    let links = node.links().clone();
    node.recreate_sandbox();
    node.namespaces.insert(netns, links);
    let Some(Step::Remove(step)) = node.plan().step else { panic!("{:?}", node.plan()) };
    assert_eq!(step.mode, DelMode::WithNamespace);
    node.settle_all();
    node.check();
}

#[test]
fn records_of_another_boot_only_release_addresses() {
    let mut node = SimNode::with("a@net1");
    node.settle();
    node.boot = "boot-2".to_owned();
    let Some(Step::Remove(step)) = node.plan().step else { panic!("{:?}", node.plan()) };
    assert_eq!((step.mode, step.leftover_links.len()), (DelMode::ReleaseOnly, 0));
}

#[test]
fn the_end_of_a_pod_releases_everything_in_every_mode() {
    for mode in [PlugMode::On, PlugMode::Off, PlugMode::StandDown] {
        for lifecycle in [PodLifecycle::Ended, PodLifecycle::Terminating] {
            let mut node = SimNode::started("a");
            node.edit("a,b@net5");
            node.settle();
            node.edit("[]");
            node.work(None);
            node.edit("a,b@net5,c");
            (node.mode, node.lifecycle) = (mode, lifecycle);
            node.end_sandbox();
            node.restart();
            let writes = node.writes;
            node.settle();
            assert_eq!((node.journal.len(), node.addresses.len(), node.writes), (0, 0, writes), "{mode:?}");
        }
    }
}

#[test]
fn attachments_of_the_original_controller_are_released_at_the_end_and_those_of_multus_are_not() {
    let mut node = SimNode::started("a@net1,b@net2");
    for record in node.multus.values_mut().filter(|record| record.nad.name == "b") {
        record.origin = Origin::Original;
    }
    node.lifecycle = PodLifecycle::Ended;
    let keys: Vec<_> = node.multus.keys().cloned().collect();
    node.sandbox = None;
    node.namespaces.clear();
    node.settle();
    assert_eq!(node.calls, ["DEL b net2 without namespace"]);
    assert_eq!(node.multus.keys().collect::<Vec<_>>(), [&keys[0]]);
}

#[test]
fn a_pod_whose_phase_ended_keeps_its_attachments_until_its_sandbox_ends() {
    let mut node = SimNode::with("a@net1");
    node.settle();
    node.lifecycle = PodLifecycle::Ended;
    assert_idle(&node);
}

#[test]
fn a_terminating_pod_is_unplugged_and_not_plugged() {
    let mut node = SimNode::with("a@net1,b@net2");
    node.settle();
    node.lifecycle = PodLifecycle::Terminating;
    node.delete_link("net1");
    node.edit("a@net1,c@net3");
    node.settle();
    assert_eq!(node.calls[2..], ["DEL b net2"]);
    assert_eq!(node.states(), ["default/a@net1 Failed/LinkLost"]);
    assert_eq!(node.reported_attachments(), set(&[]));
}

#[test]
fn an_edit_of_a_pending_pod_is_applied_once_it_runs() {
    let mut node = SimNode::started("a");
    node.lifecycle = PodLifecycle::Pending;
    node.edit("b");
    assert_idle(&node);
    node.lifecycle = PodLifecycle::Running;
    node.settle();
    assert_eq!(node.linked_attachments(), set(&["default/b@net1"]));
}

#[test]
fn a_container_that_restarts_changes_nothing() {
    let node = SimNode::started("a,b");
    assert_idle(&node);
}

#[test]
fn nothing_happens_while_the_runtime_does_not_answer_or_the_namespace_is_unreadable() {
    let mut node = SimNode::with("a@net1");
    node.broken.insert(nad("a"));
    node.settle();
    node.edit("b@net2");
    let (desired, observed) = (node.desired(), node.observe());
    for observed in [
        ObservedPod { sandbox: SandboxState::Unknown, ..observed.clone() },
        ObservedPod { links: None, ..observed.clone() },
    ] {
        let input = PlanInput {
            desired: &desired,
            observed: &observed,
            failures: &node.failures,
            now: node.now,
            mode: PlugMode::On,
            running: None,
        };
        let plan = plan(input, |_| ready("b"), &mut Reported::default());
        assert_eq!((plan.step, plan.annotations, plan.events), (None, None, Vec::new()));
    }
}

#[test]
fn off_and_stand_down_leave_running_pods_alone() {
    for mode in [PlugMode::Off, PlugMode::StandDown] {
        let mut node = SimNode::with("a@net1,b@net2");
        node.settle();
        node.mode = mode;
        node.delete_link("net1");
        node.edit("c@net3");
        assert_idle(&node);
        node.edit("[{");
        assert_idle(&node);
        node.mode = PlugMode::On;
        node.edit("c@net3");
        node.settle();
        assert_eq!(node.linked_attachments(), set(&["default/c@net3"]));
        node.check();
    }
}

#[test]
fn a_host_network_pod_is_reported_once_per_change_of_its_annotation() {
    let mut node = SimNode::with("a");
    node.host_network = true;
    node.sandbox = None;
    node.settle();
    node.settle();
    assert_eq!(node.reasons(), ["InterfaceAddRejected"]);
    assert_eq!(node.events[0].note, "pod [default/web]: will not add interface to host networked pod");
    node.edit("a,b");
    node.settle();
    assert_eq!((node.events.len(), node.writes, node.calls.len()), (2, 0, 0));
    node.edit("[]");
    node.settle();
    assert_eq!(node.events.len(), 2);
}

#[test]
fn a_restart_of_the_daemon_keeps_links_and_plugs_what_is_missing() {
    let mut node = SimNode::with("a@net1,b@net2");
    node.settle();
    let kept = node.links().clone();
    node.delete_link("net2");
    node.restart();
    node.settle();
    assert_eq!(node.calls[2..], ["DEL b net2", "ADD b net2"]);
    assert!(
        kept.iter()
            .filter(|(_, link)| link.name == "net1")
            .all(|(index, _)| node.links().contains_key(index))
    );
}

#[test]
fn an_attachment_with_a_living_link_and_a_known_result_is_finished_after_a_crash() {
    let mut node = SimNode::with("a@net1");
    node.work(Some(Fault::CrashAfterResult));
    let (links, key) = (node.links().clone(), node.journal.keys().next().unwrap().clone());
    assert!(matches!(node.journal[&key].phase, RecordPhase::Intent { .. }));
    let Some(Step::Finish(..)) = node.plan().step else { panic!("{:?}", node.plan()) };
    node.settle();
    assert_eq!((node.calls.as_slice(), node.links()), (&["ADD a net1".to_owned()][..], &links));
    assert_eq!(node.states(), ["default/a@net1 Attached"]);
    node.check();
    node.edit("[]");
    node.settle();
    assert_eq!((node.link_names(), node.addresses.len()), (Vec::new(), 0));
}

/// A typo must not take an interface: DEL would follow, and no ADD.
#[test]
fn an_attachment_with_a_known_result_stays_while_the_annotation_or_another_element_is_invalid() {
    let invalid_sibling = r#"[{"name":"a","interface":"net1/"}]"#;
    for networks in ["[{", r#"[{"name":"a",""#, invalid_sibling] {
        let mut node = SimNode::with("a@net1");
        node.work(Some(Fault::CrashAfterResult));
        let links = node.links().clone();
        node.edit(networks);
        node.restart();
        node.settle();
        assert_eq!((node.calls.len(), node.links()), (1, &links), "{networks}");
        assert_eq!(node.reported_attachments(), set(&["default/a@net1"]), "{networks}");
        node.edit("a@net1");
        node.settle();
        assert_eq!((node.calls.len(), node.links()), (1, &links), "{networks}");
        node.check();
    }
}

#[test]
fn an_attachment_with_a_known_result_that_is_not_requested_any_more_is_unplugged() {
    let mut node = SimNode::with("a@net1");
    node.work(Some(Fault::CrashAfterResult));
    node.edit("b@net2");
    let Some(Step::Remove(step)) = node.plan().step else { panic!("{:?}", node.plan()) };
    assert_eq!(
        (step.purpose, step.intent().map(|record| record.removing)),
        (RemovePurpose::Unplug, Some(true))
    );
    assert!(step.record.attached().is_some());
    node.settle();
    assert_eq!(node.linked_attachments(), set(&["default/b@net2"]));
    node.check();
}

#[test]
fn default_route_of_another_element_filters_the_routes_of_an_attachment_that_is_finished() {
    let with =
        r#"[{"name":"a","interface":"net1"},{"name":"b","interface":"net2","default-route":["10.0.0.1"]}]"#;
    for (networks, filtered) in [(with, true), ("a@net1,b@net2", false)] {
        let mut node = SimNode::with(networks);
        node.work(Some(Fault::CrashAfterResult));
        let Some(Step::Finish(record, routes)) = node.plan().step else { panic!("{:?}", node.plan()) };
        assert_eq!(record.key.interface, "net1");
        assert_eq!(routes, FilteredRoutes { ipv4: filtered, ipv6: filtered });
        node.settle();
        assert_eq!(node.calls, ["ADD a net1", "ADD b net2"]);
        node.check();
    }
}

#[test]
fn an_unfinished_attachment_is_undone_unless_all_of_it_is_certain() {
    type Change = fn(&mut SimNode);
    let changes: [(&str, Change); 4] = [
        ("no result", |node| node.results.clear()),
        ("the link is gone", |node| node.delete_link("net1")),
        ("a result without a link", |node| node.results.values_mut().for_each(|result| result.links.clear())),
        ("a link from before", |node| {
            for record in node.journal.values_mut() {
                record.phase = RecordPhase::Intent { links_before: (0..10).collect() };
            }
        }),
    ];
    for (name, change) in changes {
        let mut node = SimNode::with("a@net1");
        node.work(Some(Fault::CrashAfterResult));
        change(&mut node);
        let Some(Step::Remove(step)) = node.plan().step else { panic!("{name}: {:?}", node.plan()) };
        assert_eq!(step.purpose, RemovePurpose::Undo, "{name}");
    }
    // Routes of its own may be half changed.
    let mut node = SimNode::with(r#"[{"name":"a","interface":"net1","default-route":["10.0.0.1"]}]"#);
    node.work(Some(Fault::CrashAfterResult));
    assert!(matches!(node.plan().step, Some(Step::Remove(_))), "{:?}", node.plan());
}
