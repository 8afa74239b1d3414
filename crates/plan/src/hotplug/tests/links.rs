//! Links that were deleted, renamed, moved, or that others made.

use std::collections::BTreeMap;

use super::*;

#[test]
fn a_deleted_link_is_attached_again_with_its_recorded_configuration() {
    let mut node = SimNode::with("a@net1,b@net2");
    node.settle();
    node.delete_link("net1");
    node.nads.insert(nad("a"), ready("other"));
    let Some(Step::Remove(step)) = node.plan().step else { panic!("{:?}", node.plan()) };
    assert_eq!(
        (step.purpose, step.mode, step.leftover_links.len()),
        (RemovePurpose::Replug, DelMode::WithNamespace, 0)
    );
    assert!(step.record.config.contains(r#""name":"a""#));
    node.settle();
    assert_eq!(node.calls[2..], ["DEL a net1", "ADD a net1"]);
    assert_eq!(node.linked_attachments(), set(&["default/a@net1", "default/b@net2"]));
    assert_eq!(node.reasons(), ["AddedInterface"; 3]);
    node.check();
}

#[test]
fn a_link_that_is_deleted_again_and_again_is_attached_with_backoff() {
    let mut node = SimNode::with("a@net1");
    node.settle();
    node.delete_link("net1");
    node.settle();
    node.delete_link("net1");
    node.settle();
    assert_eq!((node.calls.len(), node.link_names()), (3, Vec::new()));
    assert_eq!(node.states(), ["default/a@net1 Failed/LinkLost"]);
    assert_eq!(node.reported_attachments(), set(&[]));
    node.pass_backoffs();
    node.settle();
    assert_eq!(node.link_names(), ["net1"]);
}

#[test]
fn a_deleted_link_of_the_pods_start_is_reported_only() {
    let mut node = SimNode::started("a,b");
    node.delete_link("net1");
    node.settle();
    assert_eq!((node.calls.len(), node.writes), (0, 1));
    assert_eq!(node.states(), ["default/a@net1 Failed/LinkLost"]);
    assert_eq!(node.reported_attachments(), set(&["default/b@net2"]));
    // Unplugged and plugged again it is Patchbay's.
    node.edit("b@net2");
    node.settle();
    node.edit("a@net1,b@net2");
    node.settle();
    assert_eq!(node.calls, ["DEL a net1", "ADD a net1"]);
    node.check();
}

#[test]
fn a_deleted_link_of_the_original_controller_is_reported_only() {
    let mut node = SimNode::started("a@net1");
    node.multus.values_mut().next().unwrap().origin = Origin::Original;
    assert_idle(&node);
    node.delete_link("net1");
    node.settle();
    assert_eq!((node.calls.len(), node.addresses.len()), (0, 1));
    assert_eq!(node.states(), ["default/a@net1 Failed/LinkLost"]);
    node.edit("[]");
    node.settle();
    node.edit("a@net1");
    node.settle();
    assert_eq!(node.calls, ["DEL a net1", "ADD a net1"]);
    node.check();
}

/// Gives all links of the pod, and what is recorded about them, the same MAC address.
fn share_mac(node: &mut SimNode, observed: &mut ObservedPod) {
    for link in observed.links.iter_mut().flatten() {
        link.mac = Some("02:00:00:00:00:01".to_owned());
    }
    for record in node.multus.values_mut().chain(&mut observed.records) {
        if let RecordPhase::Attached(attached) = &mut record.phase {
            attached.links[0].mac = Some("02:00:00:00:00:01".to_owned());
        }
    }
}

fn plan_of(desired: &DesiredPod, observed: &ObservedPod) -> PodPlan {
    let failures = Failures::default();
    let input = PlanInput {
        desired,
        observed,
        failures: &failures,
        now: std::time::Instant::now(),
        mode: PlugMode::On,
        running: None,
    };
    plan(input, |_| ready("a"), &mut Reported::default())
}

#[test]
fn a_link_of_another_attachment_with_the_same_mac_is_not_taken_for_a_deleted_one() {
    let mut node = SimNode::started("a@net1,b@net2");
    node.delete_link("net1");
    let mut observed = node.observe();
    // eth0 is not of the same master.
    share_mac(&mut node, &mut observed);
    for link in observed.links.iter_mut().flatten().filter(|link| link.name == "eth0") {
        link.mac = None;
    }
    let lost = plan_of(&node.desired(), &observed);
    let reasons: Vec<&str> = lost.states.iter().map(|state| state.reason.as_str()).collect();
    assert_eq!(reasons, ["LinkLost"]);
    let unplugged = DesiredPod { networks: Some("b@net2".to_owned()), ..node.desired() };
    let Some(Step::Remove(step)) = plan_of(&unplugged, &observed).step else { panic!("no removal") };
    assert_eq!((step.record.key.interface.as_str(), step.leftover_links), ("net1", Vec::new()));
}

#[test]
fn a_link_that_is_found_by_its_mac_only_is_not_deleted_by_its_index() {
    let mut node = SimNode::started("a@net1");
    let index = *node.links().iter().find(|(_, link)| link.name == "net1").unwrap().0;
    node.links_mut().get_mut(&index).unwrap().name = "other".to_owned();
    assert_idle(&node);
    node.edit("[]");
    let Some(Step::Remove(step)) = node.plan().step else { panic!("{:?}", node.plan()) };
    assert_eq!(step.leftover_links, Vec::<u32>::new());
}

#[test]
fn a_link_with_another_mac_is_not_lost() {
    for origin in [Origin::PodStart, Origin::Original] {
        let mut node = SimNode::started("a@net1,b@net2");
        for record in node.multus.values_mut() {
            record.origin = origin;
            let RecordPhase::Attached(attached) = &mut record.phase else { panic!("{record:?}") };
            attached.links[0].mac = Some("02:00:00:00:00:aa".to_owned());
        }
        assert_idle(&node);
        node.edit("a@net1");
        let Some(Step::Remove(step)) = node.plan().step else { panic!("{:?}", node.plan()) };
        assert_eq!((step.mode, step.leftover_links.len()), (DelMode::WithNamespace, 1));
        node.settle();
        assert_eq!(node.link_names(), ["net1"]);
        node.check();
    }
}

#[test]
fn a_virtual_machine_is_never_plugged_again_and_can_be_unplugged() {
    let mut node = SimNode::with("a@net1");
    node.virt_launcher = true;
    node.settle();
    let before = node.server.clone();
    node.delete_link("net1");
    node.settle();
    assert_eq!((node.calls.len(), &node.server), (1, &before));
    node.edit("[]");
    node.settle();
    assert_eq!((node.calls.len(), node.addresses.len()), (2, 0));
}

#[test]
fn a_renamed_link_is_not_lost_and_is_deleted_by_its_index() {
    let mut node = SimNode::with("a@net1");
    node.virt_launcher = true;
    node.settle();
    let index = *node.links().iter().find(|(_, link)| link.name == "net1").unwrap().0;
    node.links_mut().get_mut(&index).unwrap().name = "net1-nic".to_owned();
    // KubeVirt puts a dummy under the old name. A DEL in the namespace would delete that one.
    node.add_foreign_link("net1");
    assert_idle(&node);
    node.edit("[]");
    let Some(Step::Remove(step)) = node.plan().step else { panic!("{:?}", node.plan()) };
    assert_eq!((step.mode, step.leftover_links), (DelMode::ReleaseOnly, vec![index]));
    node.settle();
    assert_eq!((node.link_names(), node.addresses.len()), (vec!["net1"], 0));
}

#[test]
fn the_entry_of_a_renamed_link_counts_for_one_element() {
    let mut node = SimNode::with("a");
    node.settle();
    let link = node.links_mut().values_mut().find(|link| link.name == "net1").unwrap();
    link.name = "net1-nic".to_owned();
    node.add_foreign_link("net1");
    node.edit("a,a");
    node.settle();
    assert_eq!(node.linked_attachments(), set(&["default/a@net1", "default/a@net2"]));
    assert_eq!(node.reported_attachments(), node.linked_attachments());
}

#[test]
fn a_renamed_link_of_the_pods_start_is_found_by_its_peer_or_mac_and_deleted_only_by_its_peer() {
    for peer in [None, Some(40)] {
        let mut node = SimNode::started("a@net1");
        for record in node.multus.values_mut() {
            let RecordPhase::Attached(attached) = &mut record.phase else { panic!("{record:?}") };
            attached.links[0].peer = peer;
            attached.links[0].mac = attached.links[0].mac.take().filter(|_| peer.is_none());
        }
        let index = *node.links().iter().find(|(_, link)| link.name == "net1").unwrap().0;
        node.links_mut().get_mut(&index).unwrap().name = "moved1".to_owned();
        let (desired, mut observed) = (node.desired(), node.observe());
        for link in observed.links.iter_mut().flatten().filter(|link| link.index == index) {
            link.peer = peer;
        }
        let removed = DesiredPod { networks: None, ..desired.clone() };
        for (desired, expected) in
            [(&desired, None), (&removed, Some(peer.map(|_| index).into_iter().collect()))]
        {
            let failures = Failures::default();
            let input = PlanInput {
                desired,
                observed: &observed,
                failures: &failures,
                now: node.now,
                mode: PlugMode::On,
                running: None,
            };
            let step = plan(input, |_| ready("a"), &mut Reported::default()).step;
            let leftover = step.map(|step| match step {
                Step::Remove(step) => step.leftover_links,
                Step::Add(_) | Step::Finish(..) | Step::Forget(_) => panic!("{step:?}"),
            });
            assert_eq!(leftover, expected);
        }
    }
}

/// A pod whose only link is not in its namespace.
fn with_missing_link(moved: bool, peer: Option<u32>) -> SimNode {
    let mut node = SimNode::with("a@net1");
    node.settle();
    node.delete_link("net1");
    for record in node.journal.values_mut() {
        let RecordPhase::Attached(attached) = &mut record.phase else { panic!("{record:?}") };
        (attached.links[0].moved, attached.links[0].peer) = (moved, peer);
        attached.links[0].peer_name = peer.map(|_| "veth40".to_owned());
        attached.links[0].peer_mac = peer.map(|_| "02:00:00:00:00:40".to_owned());
    }
    node
}

fn host_link() -> HostLink {
    HostLink { name: "veth40".to_owned(), mac: Some("02:00:00:00:00:40".to_owned()) }
}

fn host_peer() -> HostPeer {
    let HostLink { name, mac } = host_link();
    HostPeer { index: 40, name: Some(name), mac }
}

#[test]
fn a_link_of_the_host_that_only_has_the_recorded_index_is_of_another_pod() {
    let mac = || Some("02:00:00:00:00:77".to_owned());
    for other in
        [HostLink { name: "veth77".to_owned(), ..host_link() }, HostLink { mac: mac(), ..host_link() }]
    {
        let mut node = with_missing_link(true, Some(40));
        let mut observed = node.observe();
        observed.host_links.insert(40, other);
        // The link was deleted where it was.
        let Some(Step::Remove(step)) = plan_of(&node.desired(), &observed).step else { panic!("no re-plug") };
        assert_eq!((step.purpose, step.moved_links), (RemovePurpose::Replug, MovedLinks::default()));
        // A record of an older version has only the index.
        for record in node.journal.values_mut().chain(&mut observed.records) {
            let RecordPhase::Attached(attached) = &mut record.phase else { panic!("{record:?}") };
            (attached.links[0].peer_name, attached.links[0].peer_mac) = (None, None);
        }
        assert_eq!(plan_of(&node.desired(), &observed).step, None);
    }
}

/// Does what the daemon does with the records of Multus at each observation.
fn identify_all(node: &mut SimNode, host_links: &[(u32, &str)], change: impl Fn(&mut ObservedLink)) {
    let mut links = node.observe().links.unwrap_or_default();
    links.iter_mut().for_each(change);
    let host_link = |name: &str| HostLink { name: name.to_owned(), mac: None };
    let host_links = host_links.iter().map(|(index, name)| (*index, host_link(name))).collect();
    for record in node.multus.values_mut() {
        identify_links(record, &links, &host_links);
    }
}

#[test]
fn the_link_of_a_rebuilt_record_is_certain_by_its_mac_address_or_its_end_on_the_host() {
    let named = |name: &str, mac: Option<&str>| LinkIdentity {
        name: name.to_owned(),
        mac: mac.map(str::to_owned),
        ..LinkIdentity::default()
    };
    let mac = "02:00:00:00:00:0a";
    let host_end = r#"{"interfaces":[{"name":"veth7"},{"name":"net1","sandbox":"/n"}]}"#;
    for (link, result, certain) in [
        (Some(named("net1", Some(mac))), "{}", true),
        (Some(named("net1", Some("02:00:00:00:00:0b"))), "{}", false),
        (Some(named("net2", Some(mac))), "{}", false),
        (Some(named("net1", None)), "{}", false),
        (Some(named("net1", Some(""))), "{}", false),
        (None, "{}", false),
        (Some(named("net1", None)), host_end, true),
        (Some(named("renamed", None)), host_end, true),
    ] {
        let mut node = SimNode::with("a@net1");
        node.settle();
        let record = node.journal.values_mut().next().unwrap();
        let attached = AttachedRecord {
            links: link.clone().into_iter().collect(),
            result: result.to_owned(),
            ..AttachedRecord::default()
        };
        record.phase = RecordPhase::Attached(attached);
        let present = ObservedLink {
            index: 7,
            name: "net1".to_owned(),
            mac: Some(mac.to_owned()),
            peer: Some(3),
            ..ObservedLink::default()
        };
        let host_links = BTreeMap::from([(3, HostLink { name: "veth7".to_owned(), mac: None })]);
        assert_eq!(identify_rebuilt(record, &[present], &host_links), certain, "{link:?} {result}");
    }
}

fn cold_links(node: &mut SimNode) -> &mut Vec<LinkIdentity> {
    let record = node.multus.values_mut().next().unwrap();
    let RecordPhase::Attached(attached) = &mut record.phase else { panic!("not attached") };
    &mut attached.links
}

#[test]
fn a_link_of_the_pods_start_that_is_renamed_after_it_was_seen_is_deleted_by_its_index() {
    for origin in [Origin::PodStart, Origin::Original] {
        let mut node = SimNode::started("a@net1");
        node.multus.values_mut().next().unwrap().origin = origin;
        node.virt_launcher = true;
        identify_all(&mut node, &[], |_| ());
        let index = *node.links().iter().find(|(_, link)| link.name == "net1").unwrap().0;
        node.links_mut().get_mut(&index).unwrap().name = "net1-nic".to_owned();
        node.add_foreign_link("net1");
        identify_all(&mut node, &[], |_| ());
        assert_idle(&node);
        node.edit("[]");
        let Some(Step::Remove(step)) = node.plan().step else { panic!("{:?}", node.plan()) };
        assert_eq!((step.mode, &step.leftover_links), (DelMode::ReleaseOnly, &vec![index]));
        assert_eq!(step.moved_links, MovedLinks::default());
        node.settle();
        assert_eq!((node.link_names(), node.addresses.len()), (vec!["net1"], 0));
    }
}

#[test]
fn a_link_of_the_pods_start_that_was_renamed_before_it_was_seen_keeps_its_address() {
    for placeholder in [false, true] {
        let mut node = SimNode::started("a@net1");
        let link = node.links_mut().values_mut().find(|link| link.name == "net1").unwrap();
        link.name = "net1-nic".to_owned();
        if placeholder {
            node.add_foreign_link("net1");
        }
        let hide = |link: &mut ObservedLink| link.placeholder = link.name == "net1";
        identify_all(&mut node, &[], hide);
        assert_eq!(cold_links(&mut node)[0].index, None);
        node.edit("[]");
        let mut observed = node.observe();
        observed.links.iter_mut().flatten().for_each(hide);
        let Some(Step::Remove(step)) = plan_of(&node.desired(), &observed).step else { panic!("no removal") };
        let unidentified = Some("net1".to_owned());
        assert_eq!(step.moved_links, MovedLinks { unidentified, ..MovedLinks::default() });
        assert_eq!(step.leftover_links, Vec::<u32>::new());
    }
}

#[test]
fn a_link_of_the_pods_start_is_identified_by_its_end_on_the_host_whatever_its_name_is() {
    let mut node = SimNode::started("a@net1");
    let index = *node.links().iter().find(|(_, link)| link.name == "net1").unwrap().0;
    node.links_mut().get_mut(&index).unwrap().name = "net1-nic".to_owned();
    node.add_foreign_link("net1");
    let record = node.multus.values_mut().next().unwrap();
    let RecordPhase::Attached(attached) = &mut record.phase else { panic!("{record:?}") };
    attached.result =
        r#"{"interfaces":[{"name":"br0"},{"name":"veth40"},{"name":"net1","sandbox":"/n"}]}"#.to_owned();
    identify_all(&mut node, &[(40, "veth40"), (41, "veth41")], |link| {
        link.peer = Some(if link.index == index { 40 } else { 41 });
    });
    let identity = &cold_links(&mut node)[0];
    assert_eq!(
        (identity.index, identity.peer, identity.peer_name.as_deref()),
        (Some(index), Some(40), Some("veth40"))
    );
}

#[test]
fn a_result_without_an_interface_of_the_pod_means_the_link_with_the_requested_name() {
    let mut node = SimNode::started("a@net1");
    cold_links(&mut node).clear();
    identify_all(&mut node, &[], |_| ());
    node.edit("[]");
    let Some(Step::Remove(step)) = node.plan().step else { panic!("{:?}", node.plan()) };
    assert_eq!((step.mode, step.leftover_links.len()), (DelMode::WithNamespace, 1));
    node.settle();
    assert_eq!(node.link_names(), Vec::<&str>::new());
    // A plugin that makes no link: it is not lost.
    let mut node = SimNode::started("a@net1");
    cold_links(&mut node).clear();
    node.delete_link("net1");
    identify_all(&mut node, &[], |_| ());
    assert_eq!(cold_links(&mut node).len(), 0);
}

#[test]
fn a_moved_link_is_deleted_by_its_end_on_the_host_or_keeps_its_address() {
    for (peer, exists, expected) in [
        (Some(40), true, MovedLinks { host_peers: vec![host_peer()], ..MovedLinks::default() }),
        (Some(40), false, MovedLinks::default()),
        (None, false, MovedLinks { unreachable: Some("net1".to_owned()), ..MovedLinks::default() }),
    ] {
        let mut node = with_missing_link(true, peer);
        node.edit("[]");
        let (desired, mut observed) = (node.desired(), node.observe());
        observed.host_links = peer.filter(|_| exists).map(|peer| (peer, host_link())).into_iter().collect();
        let Some(Step::Remove(step)) = plan_of(&desired, &observed).step else { panic!("{peer:?}") };
        assert_eq!((step.purpose, step.moved_links), (RemovePurpose::Unplug, expected));
    }
}

#[test]
fn a_link_in_another_namespace_is_not_lost() {
    for (moved, peer) in [(true, Some(40)), (false, Some(40)), (true, None), (false, None)] {
        let node = with_missing_link(moved, peer);
        let desired = node.desired();
        let mut observed = node.observe();
        let plan_of = |observed: &ObservedPod| {
            let failures = Failures::default();
            let input = PlanInput {
                desired: &desired,
                observed,
                failures: &failures,
                now: node.now,
                mode: PlugMode::On,
                running: None,
            };
            plan(input, |_| ready("a"), &mut Reported::default())
        };
        // The end on the host decides if there is one.
        assert_eq!(plan_of(&observed).step.is_some(), !moved || peer.is_some());
        observed.host_links.insert(40, host_link());
        let plan = plan_of(&observed);
        let lost = peer.is_none() && !moved;
        assert_eq!((plan.step.is_some(), plan.annotations.is_some()), (lost, lost));
    }
}

#[test]
fn a_link_of_another_owner_is_never_touched() {
    let mut node = SimNode::with("a@net1,b@eth0,c@net2");
    node.add_foreign_link("net1");
    node.settle();
    assert_eq!(node.calls, ["ADD c net2"]);
    assert_eq!(
        node.states(),
        [
            "default/a@net1 Refused/InterfaceNameTaken",
            "default/b@eth0 Refused/InterfaceNameTaken",
            "default/c@net2 Attached"
        ]
    );
    assert_eq!(node.reasons(), ["InterfaceNameTaken", "InterfaceNameTaken", "AddedInterface"]);
    node.restart();
    assert_idle(&node);
    // The name is free now.
    node.delete_link("net1");
    node.settle();
    assert_eq!(node.states()[0], "default/a@net1 Attached");
}

#[test]
fn an_unfinished_attachment_is_removed_before_it_is_attached_again() {
    for fault in [Fault::CrashAfterIntent, Fault::CrashBeforeResult, Fault::PluginFailsWithLink] {
        let mut node = SimNode::with("a@net1");
        node.work(Some(fault));
        let Some(Step::Remove(step)) = node.plan().step else { panic!("{:?}", node.plan()) };
        assert_eq!((step.purpose, step.mode), (RemovePurpose::Undo, DelMode::WithNamespace));
        assert_eq!(step.removed(), None);
        node.settle_all();
        assert_eq!(node.linked_attachments(), set(&["default/a@net1"]));
        node.check();
    }
}

#[test]
fn a_link_that_was_there_before_an_unfinished_attachment_stays() {
    let mut node = SimNode::with("a@net1");
    node.work(Some(Fault::CrashAfterIntent));
    node.add_foreign_link("net1");
    let index = *node.links().keys().last().unwrap();
    for record in node.journal.values_mut() {
        record.phase = RecordPhase::Intent { links_before: vec![2, index] };
    }
    node.settle();
    assert_eq!(node.calls, ["DEL a net1 without namespace"]);
    assert_eq!(node.states(), ["default/a@net1 Refused/InterfaceNameTaken"]);
    assert_eq!(node.link_names(), ["net1"]);
}

#[test]
fn a_removal_that_began_is_finished_even_if_the_network_is_requested_again() {
    for fault in [Fault::CrashAfterIntent, Fault::PluginFailsWithAddress, Fault::CrashBeforeResult] {
        for mut node in [SimNode::started("a@net1"), SimNode::with("a@net1")] {
            node.settle();
            node.edit("[]");
            node.work(Some(fault));
            node.edit("a@net1");
            node.settle_all();
            assert_eq!(node.calls.last().unwrap(), "ADD a net1");
            assert_eq!(node.addresses.len(), 1);
            node.check();
        }
    }
}

/// A pod whose interface Patchbay attached, and that the original controller attached again while Patchbay stood down.
fn attached_anew_by_another() -> SimNode {
    let mut node = SimNode::with("a@net2");
    node.settle();
    let ours = node.journal.values().next().unwrap().clone();
    node.delete_link("net2");
    let mut other = SimNode::started("a@net2");
    let (key, mut record) = other.multus.pop_first().unwrap();
    record.origin = Origin::Original;
    assert_eq!(key, ours.key);
    let index = node.links().keys().max().unwrap() + 7;
    let link = simulation::SimLink { name: "net2".to_owned(), owner: Some((key.clone(), nad("a"))) };
    node.links_mut().insert(index, link);
    node.multus.insert(key, record);
    node
}

#[test]
fn a_record_is_forgotten_without_del_if_another_program_attached_the_interface_anew() {
    let mut node = attached_anew_by_another();
    let Some(Step::Forget(key)) = node.plan().step else { panic!("{:?}", node.plan()) };
    assert_eq!(key.interface, "net2");
    node.settle();
    assert_eq!((node.calls.len(), node.journal.len(), node.addresses.len()), (1, 0, 1));
    assert_eq!(node.reported_attachments(), set(&["default/a@net2"]));
    node.edit("[]");
    node.settle();
    assert_eq!(node.calls, ["ADD a net2", "DEL a net2"]);
    node.check();
}

#[test]
fn a_record_of_the_journal_counts_if_its_link_exists_or_no_link_has_the_name() {
    let mut node = attached_anew_by_another();
    node.delete_link("net2");
    let Some(Step::Remove(step)) = node.plan().step else { panic!("{:?}", node.plan()) };
    assert_eq!((step.record.origin, step.purpose), (Origin::Hotplug, RemovePurpose::Replug));
    let mut node = SimNode::started("a@net1");
    node.edit("[]");
    node.work(Some(Fault::PluginFailsWithAddress));
    node.edit("a@net1");
    assert_eq!((node.multus.len(), node.journal.len(), node.plan().failing.len()), (1, 1, 1));
}

/// The pod after the daemon has compared the record of its only link with these links and departures.
fn tracked(mut node: SimNode, links: &[ObservedLink], departure: Option<Departure>) -> SimNode {
    let record = node.journal.values_mut().next().unwrap();
    let RecordPhase::Attached(attached) = &mut record.phase else { panic!("{record:?}") };
    let owned = attached.links.iter().filter_map(|link| link.index).collect();
    track_moved_links(attached, links, &owned, |_| departure);
    node
}

/// How the only link of the pod is recorded.
fn recorded_link(node: &SimNode) -> LinkIdentity {
    node.journal.values().next().unwrap().attached().unwrap().links[0].clone()
}

#[test]
fn a_link_that_was_moved_and_came_back_is_lost_when_it_is_deleted() {
    let node = tracked(with_missing_link(false, None), &[], Some(Departure::Moved));
    assert_eq!((recorded_link(&node).moved, node.plan().step), (true, None));
    // The link stays moved as long as nothing is known about it, and a list from before its return proves nothing.
    assert!(recorded_link(&tracked(node.clone(), &[], None)).moved);
    let stale = tracked(with_missing_link(false, None), &[], Some(Departure::Returned));
    assert_eq!(stale.plan().step, None);
    let LinkIdentity { index, name, mac, .. } = recorded_link(&node);
    let back = ObservedLink { index: index.unwrap(), name, mac, ..ObservedLink::default() };
    let seen = tracked(node.clone(), &[back], Some(Departure::Moved));
    assert!(!recorded_link(&seen).moved);
    // Also if the daemon did not see it in between.
    for mut node in
        [tracked(seen, &[], Some(Departure::Deleted)), tracked(node, &[], Some(Departure::Deleted))]
    {
        let Some(Step::Remove(step)) = node.plan().step else { panic!("{:?}", node.plan()) };
        assert_eq!((step.purpose, step.moved_links), (RemovePurpose::Replug, MovedLinks::default()));
        node.settle();
        assert_eq!(node.linked_attachments(), set(&["default/a@net1"]));
        node.check();
    }
}

#[test]
fn a_link_that_comes_back_with_another_index_is_known_by_its_name_and_mac_address() {
    let node = with_missing_link(true, None);
    let LinkIdentity { index, name, mac, .. } = recorded_link(&node);
    let back = ObservedLink { index: 77, name, mac, ..ObservedLink::default() };
    let found = recorded_link(&tracked(node.clone(), std::slice::from_ref(&back), None));
    assert_eq!((found.index, found.moved), (Some(77), false));
    let others = [
        ObservedLink { name: "net9".to_owned(), ..back.clone() },
        ObservedLink { mac: Some("02:00:00:00:09:09".to_owned()), ..back.clone() },
        ObservedLink { mac: None, ..back.clone() },
        ObservedLink { placeholder: true, ..back.clone() },
    ];
    for other in others {
        let found = recorded_link(&tracked(node.clone(), &[other], None));
        assert_eq!((found.index, found.moved), (index, true));
    }
    // A link that was deleted does not come back.
    let deleted = tracked(node, &[back], Some(Departure::Deleted));
    assert_eq!(recorded_link(&deleted).index, index);
}
