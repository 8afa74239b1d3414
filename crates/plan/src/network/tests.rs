use api::{
    ConditionStatus,
    bridgenetwork::{MAX_CONDITIONS, NODE_LABEL_PREFIX, NotReady, Overlay},
};
use proptest::prelude::*;

use super::*;
use crate::users::{Facts, Kind};

const START: i64 = 1_000_000;

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(START + seconds).unwrap()
}

fn network(name: &str) -> Network {
    Network {
        name: name.to_owned(),
        uid: format!("uid-{name}"),
        version: "1".to_owned(),
        generation: 1,
        created: at(-100),
        deleting: None,
        finalizers: vec![FINALIZER_USERS.to_owned(), FINALIZER_NODES.to_owned()],
        spec: Ok(spec(r#"{"attachment": {"namespaces": ["ns"]}}"#)),
        status: BridgeNetworkStatus::default(),
    }
}

fn spec(text: &str) -> BridgeNetworkSpec {
    serde_json::from_str(text).unwrap()
}

fn overlay(name: &str, text: &str) -> Network {
    let mut spec = spec(text);
    spec.overlay = Some(Overlay { vni: 7, port: 4789 });
    Network { spec: Ok(spec), ..network(name) }
}

fn vtep(address: &str, mtu: i32) -> Vtep {
    Vtep { address: address.parse().unwrap(), interface: "eth0".to_owned(), mtu }
}

/// Two nodes with a tunnel end point, one namespace, the kind of attachments, and these networks.
fn world(networks: impl IntoIterator<Item = Network>) -> World {
    let node = |name: &str| {
        let labels = BTreeMap::from([("name".to_owned(), name.to_owned())]);
        (name.to_owned(), Node { uid: format!("uid-{name}"), labels, silent: None })
    };
    let report = |name: &str| {
        (name.to_owned(), Report { vtep: Some(vtep("10.0.0.1", 1500)), networks: BTreeMap::new() })
    };
    World {
        networks: networks.into_iter().map(|network| (network.name.clone(), network)).collect(),
        nodes: ["a", "b"].map(node).into(),
        reports: ["a", "b"].map(report).into(),
        attachments: Some(BTreeMap::new()),
        namespaces: BTreeMap::from([("ns".to_owned(), Namespace::Active)]),
        users: Index::default(),
        refused: BTreeMap::new(),
        unanswered: BTreeMap::new(),
        in_place: BTreeMap::new(),
        withdrawn: BTreeMap::new(),
    }
}

fn entry(network: &Network, ready: bool) -> NetworkOnNode {
    NetworkOnNode {
        uid: network.uid.clone(),
        name: network.name.clone(),
        observed_generation: network.generation,
        ready,
        reason: if ready { "Ready" } else { "Broken" }.to_owned(),
        message: "so says the node".to_owned(),
        bridge: "br".to_owned(),
        mac: None,
        mtu: None,
        ports: Vec::new(),
        pods_with_old_mtu: 0,
    }
}

/// The daemon of the node has the network.
fn list(world: &mut World, node: &str, name: &str, ready: bool) {
    let entry = entry(&world.networks[name], ready);
    world.reports.get_mut(node).unwrap().networks.insert(entry.uid.clone(), entry);
}

fn uses(world: &mut World, name: &str, networks: &str) {
    let facts = Facts {
        namespace: "ns".to_owned(),
        name: name.to_owned(),
        networks: Some(networks.to_owned()),
        ..Facts::default()
    };
    world.users.apply(Kind::Pod, &facts);
}

/// Does what the plan says, as the API server would; says what was done.
fn apply(world: &mut World, plan: &Plan) -> Vec<String> {
    let mut done = Vec::new();
    world.remember(plan);
    for turn in &plan.turns {
        for step in &turn.steps {
            world.wrote(&turn.uid, step, |_| true);
            done.push(step_on(world, turn, step));
        }
        if let (Some(status), Some(network)) = (&turn.status, world.networks.get_mut(&turn.name)) {
            network.status = (**status).clone();
            done.push(format!("status {}", turn.name));
        }
    }
    for relabel in &plan.labels {
        let labels = &mut world.nodes.get_mut(&relabel.node).unwrap().labels;
        for (label, value) in &relabel.labels {
            match value {
                Some(value) => _ = labels.insert(label.clone(), (*value).to_owned()),
                None => _ = labels.remove(label),
            }
            done.push(format!("label {} {label} {value:?}", relabel.node));
        }
    }
    for (at, _) in &plan.orphans {
        world.attachments.as_mut().unwrap().remove(at);
        done.push(format!("sweep {at}"));
    }
    done
}

fn step_on(world: &mut World, turn: &Turn, step: &Step) -> String {
    let attachments = world.attachments.as_mut();
    let made = |at: &Reference, config: &String| Attachment {
        uid: "nad".to_owned(),
        version: "1".to_owned(),
        deleting: false,
        network: Some(turn.name.clone()),
        network_uid: Some(turn.uid.clone()),
        place: Some(place(&turn.uid, at)),
        joins: api::attachment::network_of(config),
        config: Some(config.clone()),
    };
    let finalizers = |world: &mut World, all: &Vec<String>| {
        let network = world.networks.get_mut(&turn.name).unwrap();
        network.finalizers.clone_from(all);
        if network.deleting.is_some() && all.is_empty() {
            world.networks.remove(&turn.name);
        }
    };
    match step {
        Step::Finalizers(all) => {
            finalizers(world, all);
            format!("finalizers {}", all.join(" "))
        }
        Step::Create { at, config, .. } => {
            assert!(attachments.unwrap().insert(at.clone(), made(at, config)).is_none(), "made over another");
            format!("create {at}")
        }
        Step::Apply { at, config, uid, .. } => {
            assert_eq!(&attachments.as_ref().unwrap()[at].uid, uid);
            attachments.unwrap().insert(at.clone(), made(at, config));
            format!("apply {at}")
        }
        Step::Delete(all) => {
            let names: Vec<String> = all.iter().map(|(at, _)| at.to_string()).collect();
            let attachments = attachments.unwrap();
            for (at, _) in all {
                assert!(attachments.remove(at).is_some());
            }
            format!("delete {}", names.join(" "))
        }
        Step::Confirm(all) => {
            let used = world.users.summary(all, 1).count > 0;
            if !used {
                world.confirmed(all);
            }
            format!("confirm, used: {used}")
        }
        Step::Release { finalizers: all, .. } => {
            finalizers(world, all);
            "release".to_owned()
        }
        Step::Finish { finalizers: all } => {
            finalizers(world, all);
            "finish".to_owned()
        }
    }
}

/// Plans and applies until nothing is left to do.
fn settle_down(world: &mut World, now: Timestamp) -> Vec<String> {
    let mut all = Vec::new();
    for _ in 0..10 {
        let done = apply(world, &plan(world, now));
        if done.is_empty() {
            return all;
        }
        all.extend(done);
    }
    panic!("no end of it: {all:?}");
}

fn told<'a>(world: &'a World, name: &str, kind: &str) -> (ConditionStatus, &'a str, &'a str) {
    let conditions = &world.networks[name].status.conditions;
    let condition = conditions.iter().find(|condition| condition.r#type == kind).unwrap();
    (condition.status, &condition.reason, &condition.message)
}

#[test]
fn finalizers_come_first_then_attachments_and_status_then_nothing() {
    let mut world = world([Network { finalizers: vec!["theirs".to_owned()], ..network("blue") }]);
    let done = settle_down(&mut world, at(0));
    assert_eq!(
        done,
        ["finalizers theirs patchbay.dev/users patchbay.dev/nodes", "create ns/blue", "status blue"]
    );
    assert_eq!(told(&world, "blue", "Ready").1, "NodesNotReady");
    for node in ["a", "b"] {
        list(&mut world, node, "blue", true);
    }
    let label = |node: &str| format!("label {node} network.patchbay.dev/blue Some(\"true\")");
    assert_eq!(settle_down(&mut world, at(9)), ["status blue".to_owned(), label("a"), label("b")]);
    let (status, reason, message) = told(&world, "blue", "Ready");
    assert_eq!((status, reason), (ConditionStatus::True, "Works"));
    assert_eq!(message, "works on 2 of 2 nodes, on each by itself: it has neither uplink nor overlay");
    let status = &world.networks["blue"].status;
    assert_eq!((status.mtu, status.nodes.as_ref().unwrap().summary.as_str()), (Some(1500), "2/2"));
    let moved: Vec<i64> =
        status.conditions.iter().map(|one| one.last_transition_time.as_second() - START).collect();
    assert_eq!(moved, [9, 0, 0, 0], "only the time of what changed moves");
}

#[test]
fn why_a_node_is_not_ready_is_told_in_its_words_or_ours() {
    let mut world = world([network("blue")]);
    let labels = BTreeMap::new();
    for (name, silent) in [("c", Some("NodeStatusUnknown".to_owned())), ("d", None), ("e", None)] {
        let node = Node { uid: name.to_owned(), labels: labels.clone(), silent };
        world.nodes.insert(name.to_owned(), node);
    }
    world.reports.insert("e".to_owned(), Report::default());
    list(&mut world, "a", "blue", true);
    list(&mut world, "b", "blue", false);
    list(&mut world, "e", "blue", true);
    world.networks.get_mut("blue").unwrap().generation = 2;
    list(&mut world, "a", "blue", true);
    settle_down(&mut world, at(0));
    let status = &world.networks["blue"].status;
    let told: Vec<_> = status.not_ready.iter().map(|one| (one.node.as_str(), one.reason.as_str())).collect();
    assert_eq!(told, [("b", "Broken"), ("c", "NodeNotReady"), ("d", "NoDaemon"), ("e", "Pending")]);
    assert_eq!(status.nodes.as_ref().unwrap().summary, "1/5");
    assert!(world.nodes["e"].labels.contains_key("network.patchbay.dev/blue"), "it works there all the same");
}

#[test]
fn a_selector_that_matches_nothing_empties_the_set_at_once() {
    let mut world = world([network("blue")]);
    list(&mut world, "a", "blue", true);
    settle_down(&mut world, at(0));
    let text = r#"{"nodeSelector": {"matchLabels": {"name": "none"}}, "attachment": {"namespaces": ["ns"]}}"#;
    let blue = world.networks.get_mut("blue").unwrap();
    (blue.spec, blue.generation) = (Ok(spec(text)), 2);
    settle_down(&mut world, at(1));
    assert_eq!(world.networks["blue"].status.nodes.as_ref().unwrap().summary, "0/0");
    assert_eq!(told(&world, "blue", "Ready").1, "NoNodes");
}

#[test]
fn an_overlay_fits_into_the_smallest_link_of_its_nodes() {
    let fits = |text: &str, links: [Option<Vtep>; 2]| {
        let mut world = world([overlay("blue", text)]);
        for (node, link) in ["a", "b"].into_iter().zip(links) {
            world.reports.get_mut(node).unwrap().vtep = link;
        }
        settle_down(&mut world, at(0));
        let reduced = told(&world, "blue", "MtuReduced");
        let (reduced, message) = (reduced.0 == ConditionStatus::True, reduced.2.to_owned());
        (world.networks["blue"].status.mtu, reduced, message, told(&world, "blue", "Ready").1.to_owned())
    };
    let (big, small, six) =
        (Some(vtep("10.0.0.1", 9000)), Some(vtep("10.0.0.2", 1500)), Some(vtep("fd00::1", 1500)));
    let told = |text, links| {
        let (mtu, reduced, _, _) = fits(text, links);
        (mtu, reduced)
    };
    assert_eq!(told("{}", [big.clone(), small.clone()]), (Some(1450), false));
    assert_eq!(told("{}", [big.clone(), six]), (Some(1430), false));
    assert_eq!(told("{}", [big.clone(), None]), (Some(8950), false));
    assert_eq!(told(r#"{"mtu": 1400}"#, [big.clone(), small.clone()]), (Some(1400), false));
    let (mtu, reduced, message, _) = fits(r#"{"mtu": 9000}"#, [big, small]);
    assert_eq!(
        (mtu, reduced, message.as_str()),
        (Some(1450), true, "spec.mtu is 9000, but node b can carry 1450")
    );
    assert_eq!(fits("{}", [None, None]).3, "WaitingForVtep");
    let (mtu, _, _, reason) = fits("{}", [Some(vtep("10.0.0.1", 600)), None]);
    assert_eq!((mtu, reason.as_str()), (None, "MtuTooSmall"));
}

#[test]
fn an_overlay_grows_only_once_every_node_has_said_what_it_carries() {
    let mut world = world([overlay("blue", "{}")]);
    world.reports.get_mut("a").unwrap().vtep = Some(vtep("10.0.0.1", 9000));
    let mtu = |world: &mut World| {
        settle_down(world, at(1));
        world.networks["blue"].status.mtu
    };
    assert_eq!(mtu(&mut world), Some(1450));
    world.reports.get_mut("b").unwrap().vtep = None;
    assert_eq!(mtu(&mut world), Some(1450), "the link of b may be as small as before");
    let report = world.reports.remove("b").unwrap();
    assert_eq!(mtu(&mut world), Some(1450), "a node that is made anew has no report at first");
    world.reports.insert("b".to_owned(), Report { vtep: Some(vtep("10.0.0.2", 9000)), ..report.clone() });
    assert_eq!(mtu(&mut world), Some(8950));
    world.reports.insert("b".to_owned(), Report { vtep: None, ..report });
    world.reports.get_mut("a").unwrap().vtep = Some(vtep("10.0.0.1", 1500));
    assert_eq!(mtu(&mut world), Some(1450), "what is smaller holds at once");
    world.nodes.remove("b");
    world.reports.get_mut("a").unwrap().vtep = Some(vtep("10.0.0.1", 9000));
    assert_eq!(mtu(&mut world), Some(8950), "a node that is gone counts no more");
}

#[test]
fn why_a_larger_mtu_waits_for_a_node_is_told() {
    let mut world = world([overlay("blue", r#"{"mtu": 1400}"#)]);
    settle_down(&mut world, at(0));
    let mtu = |world: &mut World, mtu: Option<i32>| {
        world.networks.get_mut("blue").unwrap().spec.as_mut().unwrap().mtu = mtu;
        settle_down(world, at(1));
        let (status, reason, message) = told(world, "blue", "MtuReduced");
        (world.networks["blue"].status.mtu.unwrap(), status, reason.to_owned(), message.to_owned())
    };
    let report = world.reports.remove("b").unwrap();
    let (now, status, reason, message) = mtu(&mut world, Some(1420));
    assert_eq!((now, status, reason.as_str()), (1400, ConditionStatus::True, "NodeUnknown"));
    assert!(message.starts_with("1400 stays in force because node b may carry no more: it becomes 1420"));
    assert_eq!(mtu(&mut world, None).1, ConditionStatus::False, "nobody asked for more");
    assert_eq!(mtu(&mut world, Some(1300)).2, "Fits", "what is smaller holds at once");
    world.reports.get_mut("a").unwrap().vtep = None;
    assert_eq!(mtu(&mut world, Some(1300)).2, "Fits");
    let (now, _, reason, message) = mtu(&mut world, Some(1310));
    assert_eq!((now, reason.as_str()), (1300, "NodeUnknown"));
    assert!(message.contains("nodes a, b may"), "{message}");
    assert_eq!(mtu(&mut world, Some(1280)).0, 1280);
    world.reports.get_mut("a").unwrap().vtep = Some(vtep("10.0.0.1", 1500));
    for name in ["c", "d", "e", "f"] {
        let node = Node { uid: name.to_owned(), labels: BTreeMap::new(), silent: None };
        world.nodes.insert(name.to_owned(), node);
    }
    let message = mtu(&mut world, Some(9000)).3;
    assert!(message.contains("nodes b, c, d and 2 more"), "{message}");
    for name in ["b", "c", "d", "e", "f"] {
        world.reports.insert(name.to_owned(), report.clone());
    }
    let (now, _, reason, _) = mtu(&mut world, Some(9000));
    assert_eq!((now, reason.as_str()), (1450, "NodeLimit"));
}

#[test]
fn a_used_network_is_never_lowered_and_always_raised() {
    let mut world = world([Network {
        spec: Ok(spec(r#"{"mtu": 1400, "attachment": {"namespaces": ["ns"]}}"#)),
        ..network("blue")
    }]);
    settle_down(&mut world, at(0));
    uses(&mut world, "pod", "blue");
    let set = |world: &mut World, mtu: i32| {
        let blue = world.networks.get_mut("blue").unwrap();
        blue.spec.as_mut().unwrap().mtu = Some(mtu);
        settle_down(world, at(1));
        world.networks["blue"].status.mtu
    };
    assert_eq!(set(&mut world, 1300), Some(1400));
    assert_eq!(told(&world, "blue", "MtuReduced").1, "HeldByUsers");
    assert_eq!(set(&mut world, 1500), Some(1500));
    assert_eq!(set(&mut world, 1300), Some(1500));
    world.users.delete(Kind::Pod, "ns", "pod");
    settle_down(&mut world, at(2));
    assert_eq!(world.networks["blue"].status.mtu, Some(1300));
    let config = world.attachments.as_ref().unwrap()[&Reference::new("ns", "blue")].config.clone().unwrap();
    assert!(config.contains("\"mtu\":1300"), "{config}");
}

#[test]
fn an_attachment_is_put_right_and_one_of_others_is_left_alone() {
    let mut world = world([network("blue")]);
    settle_down(&mut world, at(0));
    let here = Reference::new("ns", "blue");
    let change = |world: &mut World, change: fn(&mut Attachment)| {
        change(world.attachments.as_mut().unwrap().get_mut(&here).unwrap());
        plan(world, at(1)).turns.into_iter().flat_map(|turn| turn.steps).collect::<Vec<_>>()
    };
    let edits: [fn(&mut Attachment); 4] = [
        |one| one.config = Some("{}".to_owned()),
        |one| one.network = None,
        |one| one.network_uid = None,
        |one| one.place = None,
    ];
    for edit in edits {
        let steps = change(&mut world, edit);
        assert!(matches!(steps[..], [Step::Apply { repair: true, .. }]), "{steps:?}");
        assert_eq!(settle_down(&mut world, at(1)), ["apply ns/blue"]);
    }
    world.attachments.as_mut().unwrap().remove(&here);
    let told = plan(&world, at(1)).turns.remove(0);
    assert!(matches!(told.steps[..], [Step::Create { repair: true, .. }]));
    assert_eq!(told.events[0].reason, "AttachmentRepaired");
    settle_down(&mut world, at(1));
    let steps = change(&mut world, |one| (one.network, one.network_uid) = (None, Some("other".to_owned())));
    assert_eq!(steps, []);
    settle_down(&mut world, at(2));
    let (status, _, message) = self::told(&world, "blue", "Conflict");
    assert_eq!(status, ConditionStatus::True);
    assert!(message.contains("ns/blue"), "{message}");
    assert_eq!(self::told(&world, "blue", "Ready").1, "Conflict");
}

#[test]
fn only_what_was_in_place_was_taken_away_by_somebody() {
    let mut world = world([network("blue")]);
    let repairs = |world: &World| {
        let turns = plan(world, at(5)).turns;
        let steps = turns.iter().flat_map(|turn| &turn.steps);
        let told = turns.iter().flat_map(|turn| &turn.events).any(|it| it.reason == "AttachmentRepaired");
        let repair = steps.map(|step| match step {
            Step::Create { repair, .. } | Step::Apply { repair, .. } => *repair,
            _ => false,
        });
        (repair.collect::<Vec<_>>(), told)
    };
    settle_down(&mut world, at(0));
    // Deleted by us, because it was not listed any more, and listed again.
    let blue = world.networks["blue"].spec.clone();
    world.networks.get_mut("blue").unwrap().spec = Ok(BridgeNetworkSpec::default());
    assert_eq!(settle_down(&mut world, at(1))[0], "delete ns/blue");
    world.networks.get_mut("blue").unwrap().spec = blue;
    assert_eq!(repairs(&world), (vec![false], false));
    settle_down(&mut world, at(2));
    // The namespace went, and came back.
    world.attachments.as_mut().unwrap().clear();
    world.namespaces.clear();
    settle_down(&mut world, at(3));
    world.namespaces.insert("ns".to_owned(), Namespace::Active);
    assert_eq!(repairs(&world), (vec![false], false));
    settle_down(&mut world, at(4));
    // The MTU is another.
    world.networks.get_mut("blue").unwrap().spec.as_mut().unwrap().mtu = Some(1400);
    assert_eq!(repairs(&world), (vec![false], false));
    settle_down(&mut world, at(5));
    world.attachments.as_mut().unwrap().clear();
    for _ in 0..2 {
        assert_eq!(repairs(&world), (vec![true], true), "and so it stays until it is written");
        let plan = plan(&world, at(5));
        world.remember(&plan);
    }
    // Written, and taken away again before anybody had a look.
    let again = plan(&world, at(5));
    apply(&mut world, &again);
    world.attachments.as_mut().unwrap().clear();
    assert_eq!(repairs(&world), (vec![true], true));
}

#[test]
fn a_namespace_that_is_missing_or_going_is_told_and_waited_for() {
    let mut world = world([network("blue")]);
    list(&mut world, "a", "blue", true);
    list(&mut world, "b", "blue", true);
    world.namespaces.clear();
    assert_eq!(settle_down(&mut world, at(0)).first().unwrap(), "status blue");
    assert_eq!(told(&world, "blue", "Ready").1, "AttachmentsMissing");
    world.namespaces.insert("ns".to_owned(), Namespace::Terminating);
    assert_eq!(settle_down(&mut world, at(1)), [""; 0]);
    world.namespaces.insert("ns".to_owned(), Namespace::Active);
    assert_eq!(settle_down(&mut world, at(2)), ["create ns/blue", "status blue"]);
    world.attachments = None;
    settle_down(&mut world, at(3));
    assert!(told(&world, "blue", "Ready").2.contains("install multus"));
}

#[test]
fn what_is_wrong_with_attachments_is_told_beside_what_is_wrong_with_nodes() {
    let mut world = world([network("blue")]);
    list(&mut world, "a", "blue", true);
    list(&mut world, "b", "blue", false);
    let ready = |world: &mut World| {
        settle_down(world, at(0));
        let (_, reason, message) = told(world, "blue", "Ready");
        (reason.to_owned(), message.to_owned())
    };
    let nodes = "1/2 nodes are ready; node b: Broken: so says the node";
    assert_eq!(ready(&mut world), ("NodesNotReady".to_owned(), nodes.to_owned()));
    world.namespaces.clear();
    world.attachments = Some(BTreeMap::new());
    let both = format!("there is no namespace ns, or it is about to go; {nodes}");
    assert_eq!(ready(&mut world), ("AttachmentsMissing".to_owned(), both));
    list(&mut world, "b", "blue", true);
    let one = "there is no namespace ns, or it is about to go".to_owned();
    assert_eq!(ready(&mut world), ("AttachmentsMissing".to_owned(), one));
}

#[test]
fn a_refusal_is_told_for_as_long_as_it_stands_in_the_way() {
    let mut world = world([network("blue")]);
    for node in ["a", "b"] {
        list(&mut world, node, "blue", true);
    }
    let refused = BTreeMap::from([(Reference::new("ns", "blue"), "quota ".repeat(1000))]);
    world.refused.insert("uid-blue".to_owned(), refused);
    let turn = plan(&world, at(0)).turns.remove(0);
    assert!(matches!(turn.steps[..], [Step::Create { .. }]), "it is tried again");
    let status = turn.status.unwrap();
    let ready = status.conditions.iter().find(|one| one.r#type == "Ready").unwrap();
    assert_eq!((ready.status, ready.reason.as_str()), (ConditionStatus::False, "AttachmentsMissing"));
    assert!(ready.message.contains("ns/blue") && ready.message.contains("quota"), "{}", ready.message);
    assert!(ready.message.len() < 1000);
    settle_down(&mut world, at(0));
    assert_eq!(told(&world, "blue", "Ready").1, "Works", "what was written is refused no more");
    delete(&mut world, "blue", 1);
    let turn = plan(&world, at(9)).turns.remove(0);
    let ready = turn.status.unwrap().conditions.remove(0);
    assert!(ready.message.contains("quota"), "{}", ready.message);
}

#[test]
fn an_attachment_outside_the_list_goes_once_nobody_uses_it() {
    let mut world = world([network("blue")]);
    settle_down(&mut world, at(0));
    uses(&mut world, "pod", "blue");
    world.networks.get_mut("blue").unwrap().spec = Ok(BridgeNetworkSpec::default());
    assert_eq!(settle_down(&mut world, at(1)), ["status blue"]);
    world.users.delete(Kind::Pod, "ns", "pod");
    let done = settle_down(&mut world, at(2));
    assert_eq!(done, ["delete ns/blue", "status blue", "confirm, used: false"]);
    uses(&mut world, "late", "blue");
    assert_eq!(settle_down(&mut world, at(3)), [""; 0], "who names what is not there has a long wait");
}

#[test]
fn an_attachment_that_was_taken_off_the_list_comes_back_for_a_user_that_slipped_in() {
    let here = Reference::new("ns", "blue");
    let unlisted = || {
        let mut world = world([network("blue")]);
        settle_down(&mut world, at(0));
        world.networks.get_mut("blue").unwrap().spec = Ok(BridgeNetworkSpec::default());
        let first = plan(&world, at(1));
        (world, first)
    };
    let (mut world, first) = unlisted();
    apply(&mut world, &first);
    uses(&mut world, "pod", "blue");
    assert_eq!(settle_down(&mut world, at(1)), ["create ns/blue", "status blue"]);
    let ready = plan(&world, at(1));
    assert_eq!(ready, Plan::default(), "and it stays");
    world.users.delete(Kind::Pod, "ns", "pod");
    let done = settle_down(&mut world, at(2));
    assert_eq!(done, ["delete ns/blue", "status blue", "confirm, used: false"]);
    // The answer to the deletion was lost, and the cache is behind when the user is seen.
    let (mut world, first) = unlisted();
    world.remember(&first);
    uses(&mut world, "pod", "blue");
    let behind = plan(&world, at(1));
    world.remember(&behind);
    world.attachments.as_mut().unwrap().remove(&here);
    assert_eq!(settle_down(&mut world, at(1))[0], "create ns/blue");
    // The network goes in the meantime: its nodes wait for the user all the same.
    let (mut world, first) = unlisted();
    apply(&mut world, &first);
    delete(&mut world, "blue", 1);
    let turn = plan(&world, at(9)).turns.remove(0);
    assert!(matches!(&turn.steps[..], [Step::Release { attachments, .. }] if attachments.contains(&here)));
    uses(&mut world, "pod", "blue");
    assert_eq!(settle_down(&mut world, at(9)), ["create ns/blue", "status blue"]);
    assert_eq!(told(&world, "blue", "Ready").1, "DeletionBlocked");
}

#[test]
fn of_two_that_clash_on_a_node_the_younger_says_so() {
    let with = |name: &str, age: i64, text: &str| Network {
        created: at(-age),
        spec: Ok(spec(text)),
        ..network(name)
    };
    let all = r#"{"bridge": "br0"}"#;
    let only = |node: &str| {
        format!(r#"{{"bridge": "br0", "nodeSelector": {{"matchLabels": {{"name": "{node}"}}}}}}"#)
    };
    let mut both = world([with("old", 9, all), with("new", 1, &only("b"))]);
    settle_down(&mut both, at(0));
    assert_eq!(
        told(&both, "new", "Conflict"),
        (
            ConditionStatus::True,
            "Network",
            "bridge br0 belongs to BridgeNetwork old, which is older (node b)"
        )
    );
    assert_eq!(told(&both, "old", "Conflict").0, ConditionStatus::False);
    let mut apart = world([with("old", 9, &only("a")), with("new", 1, &only("b"))]);
    settle_down(&mut apart, at(0));
    assert_eq!(told(&apart, "new", "Conflict").0, ConditionStatus::False);
    assert_eq!(clash_with(&apart, "third", &spec(all), None).unwrap().1.winner, "old");
    assert_eq!(clash_with(&apart, "third", &spec(r#"{"bridge": "br1"}"#), None), None);
    assert_eq!(clash_with(&apart, "old", &spec(&only("a")), None), None, "nobody clashes with itself");
    assert!(clash_with(&apart, "old", &spec(all), Some(&spec(&only("a")))).is_some(), "a new clash");
    assert_eq!(clash_with(&both, "old", &spec(all), Some(&spec(all))), None, "what is there is there");
}

#[test]
fn a_foreign_link_on_a_selected_node_is_a_conflict() {
    let mut world = world([network("blue")]);
    list(&mut world, "a", "blue", true);
    list(&mut world, "b", "blue", false);
    settle_down(&mut world, at(0));
    assert_eq!(told(&world, "blue", "Conflict").0, ConditionStatus::False);
    let entry = world.reports.get_mut("b").unwrap().networks.get_mut("uid-blue").unwrap();
    (entry.reason, entry.message) = ("ForeignLink".to_owned(), "br-blue is somebody else's".to_owned());
    let turn = plan(&world, at(1)).turns.remove(0);
    assert_eq!(turn.events.iter().map(|event| event.reason).collect::<Vec<_>>(), ["Conflict"]);
    settle_down(&mut world, at(1));
    assert_eq!(
        told(&world, "blue", "Conflict"),
        (ConditionStatus::True, "Link", "node b: br-blue is somebody else's")
    );
    assert_eq!(world.networks["blue"].status.nodes.as_ref().unwrap().summary, "1/2");
    let elsewhere = r#"{"nodeSelector": {"matchLabels": {"name": "a"}}}"#;
    world.networks.get_mut("blue").unwrap().spec = Ok(spec(elsewhere));
    settle_down(&mut world, at(2));
    assert_eq!(told(&world, "blue", "Conflict").0, ConditionStatus::False);
}

fn delete(world: &mut World, name: &str, now: i64) {
    let network = world.networks.get_mut(name).unwrap();
    (network.deleting, network.generation) = (Some(at(now)), network.generation + 1);
}

#[test]
fn a_network_goes_in_order() {
    let mut world = world([network("blue")]);
    settle_down(&mut world, at(0));
    for node in ["a", "b"] {
        list(&mut world, node, "blue", true);
    }
    uses(&mut world, "pod", "blue");
    settle_down(&mut world, at(1));
    delete(&mut world, "blue", 2);
    assert_eq!(settle_down(&mut world, at(9)), ["status blue"]);
    assert_eq!(told(&world, "blue", "Ready").1, "DeletionBlocked");
    world.users.delete(Kind::Pod, "ns", "pod");
    let done = settle_down(&mut world, at(10));
    assert_eq!(done, ["delete ns/blue", "status blue", "release", "status blue"]);
    let waits = told(&world, "blue", "Ready").2;
    assert!(waits.contains("a (Ready), b (Ready)"), "{waits}");
    world.nodes.remove("a");
    world.nodes.get_mut("b").unwrap().silent = Some("NodeStatusUnknown".to_owned());
    settle_down(&mut world, at(11));
    assert!(
        told(&world, "blue", "Ready").2.contains("b (NodeNotReady"),
        "{}",
        told(&world, "blue", "Ready").2
    );
    world.reports.get_mut("b").unwrap().networks.clear();
    let label = format!("label b {NODE_LABEL_PREFIX}blue None");
    assert_eq!(settle_down(&mut world, at(12)), ["finish".to_owned(), label]);
    assert!(world.networks.is_empty());
}

#[test]
fn a_question_without_an_answer_is_told_for_as_long_as_it_is_asked() {
    let mut world = world([network("blue")]);
    settle_down(&mut world, at(0));
    delete(&mut world, "blue", 1);
    let mut delete_first = plan(&world, at(9));
    delete_first.turns[0].status = None;
    apply(&mut world, &delete_first);
    let asked = |world: &World| {
        let turn = plan(world, at(9)).turns.remove(0);
        let ready = turn.status.map(|status| status.conditions[0].message.clone());
        (turn.steps.len(), ready.unwrap_or_default())
    };
    for answered in ["nobody uses", "no node has links"] {
        assert_eq!(asked(&world), (1, String::new()));
        world.unanswered.insert("uid-blue".to_owned(), "etcd is away ".repeat(1000));
        let (steps, told) = asked(&world);
        assert_eq!(steps, 1, "it is asked again");
        assert!(told.contains(answered) && told.contains("etcd is away") && told.len() < 1000, "{told}");
        world.unanswered.clear();
        let next = plan(&world, at(9));
        apply(&mut world, &next);
    }
    assert!(world.networks.is_empty());
}

#[test]
fn nothing_is_taken_away_in_the_first_moment_of_a_deletion() {
    let mut world = world([network("blue")]);
    settle_down(&mut world, at(0));
    delete(&mut world, "blue", 1);
    assert_eq!(settle_down(&mut world, at(1)), ["status blue"]);
    assert_eq!(plan(&world, at(1)).look, Some(SETTLE));
    assert_eq!(settle_down(&mut world, at(2)), ["delete ns/blue", "release", "finish"]);
}

#[test]
fn a_user_that_slipped_in_brings_the_attachment_back() {
    let mut world = world([network("blue")]);
    settle_down(&mut world, at(0));
    delete(&mut world, "blue", 1);
    let first = plan(&world, at(3));
    apply(&mut world, &first);
    assert_eq!(world.attachments, Some(BTreeMap::new()));
    uses(&mut world, "pod", "blue");
    assert_eq!(settle_down(&mut world, at(3)), ["create ns/blue", "status blue"]);
}

#[test]
fn any_spec_can_be_deleted_and_a_foreign_finalizer_is_left_alone() {
    let mut broken = Network { spec: Err("junk".to_owned()), ..network("blue") };
    broken.finalizers.push("foregroundDeletion".to_owned());
    let mut world = world([broken]);
    world.attachments = None;
    settle_down(&mut world, at(0));
    assert_eq!(told(&world, "blue", "Ready").1, "InvalidSpec");
    delete(&mut world, "blue", 1);
    let done = settle_down(&mut world, at(9));
    assert_eq!(done[..2], ["release", "finish"]);
    assert_eq!(world.networks["blue"].finalizers, ["foregroundDeletion"]);
}

#[test]
fn what_a_network_left_that_is_no_more_is_swept_once_nobody_names_it() {
    let mut world = world([network("blue")]);
    settle_down(&mut world, at(0));
    world.networks.clear();
    uses(&mut world, "pod", "blue");
    assert_eq!(settle_down(&mut world, at(1)), [""; 0]);
    world.users.delete(Kind::Pod, "ns", "pod");
    let edits: [fn(&mut Attachment); 6] = [
        |one| one.config = None,
        |one| one.config = one.config.as_ref().map(|text| text.replace("1500", "1500,\"ipam\":{}")),
        |one| one.config = one.config.as_ref().map(|text| text.replace("blue", "red")),
        |one| one.network = Some("red".to_owned()),
        |one| one.network = None,
        |one| one.place = Some("elsewhere".to_owned()),
    ];
    let here = Reference::new("ns", "blue");
    let good = world.attachments.as_ref().unwrap()[&here].clone();
    for edit in edits {
        let mut edited = good.clone();
        edit(&mut edited);
        assert_ne!(edited, good);
        world.attachments.as_mut().unwrap().insert(here.clone(), edited);
        assert_eq!(plan(&world, at(1)).orphans, [], "somebody has changed it since");
    }
    world.attachments.as_mut().unwrap().insert(here, good);
    assert_eq!(settle_down(&mut world, at(1)), ["sweep ns/blue"]);
}

#[test]
fn a_copy_of_an_attachment_is_somebody_elses() {
    let mut world = world([network("blue")]);
    world.namespaces.insert("other".to_owned(), Namespace::Active);
    settle_down(&mut world, at(0));
    let [here, there] = ["ns", "other"].map(|namespace| Reference::new(namespace, "blue"));
    let all = world.attachments.as_mut().unwrap();
    let copy = Attachment { uid: "copy".to_owned(), ..all[&here].clone() };
    all.insert(there.clone(), copy.clone());
    all.insert(Reference::new("ns", "second"), copy.clone());
    assert_eq!(settle_down(&mut world, at(1)), [""; 0], "it is not deleted");
    let text = r#"{"attachment": {"namespaces": ["ns", "other"]}}"#;
    world.networks.get_mut("blue").unwrap().spec = Ok(spec(text));
    settle_down(&mut world, at(2));
    assert_eq!(world.attachments.as_ref().unwrap()[&there], copy, "nor taken over");
    assert!(told(&world, "blue", "Conflict").2.contains("other/blue"));
    delete(&mut world, "blue", 3);
    settle_down(&mut world, at(9));
    assert!(world.networks.is_empty(), "nor does it hold up a deletion");
    assert_eq!(world.attachments.as_ref().unwrap().len(), 2);
    // Nor is it swept; nor is one of ours that somebody has written something else into.
    let theirs = Attachment { place: Some(place("uid-blue", &here)), config: None, joins: None, ..copy };
    world.attachments.as_mut().unwrap().insert(here, theirs);
    assert_eq!(plan(&world, at(9)).orphans, []);
}

#[test]
fn whose_an_attachment_is_can_be_asked_from_either_side() {
    let text = r#"{"attachment": {"namespaces": ["ns", "other", "bare"]}}"#;
    let mut world = world([Network { spec: Ok(spec(text)), ..network("blue") }, network("red")]);
    world.namespaces.insert("other".to_owned(), Namespace::Active);
    settle_down(&mut world, at(0));
    let [here, other, bare, by_hand, copy, gone] = [
        Reference::new("ns", "blue"),
        Reference::new("other", "blue"),
        Reference::new("bare", "blue"),
        Reference::new("ns", "hand"),
        Reference::new("ns", "copy"),
        Reference::new("gone", "blue"),
    ];
    let all = world.attachments.as_mut().unwrap();
    let good = all[&here].clone();
    all.get_mut(&other).unwrap().place = None;
    all.insert(copy.clone(), Attachment { joins: None, ..good.clone() });
    all.insert(by_hand.clone(), Attachment { network: None, network_uid: None, place: None, ..good });
    let withdrawn = Withdrawn { network: "uid-red".to_owned(), uid: "x".to_owned() };
    world.withdrawn.insert(gone.clone(), withdrawn);
    let mut met = 0;
    let rest = [Reference::new("ns", "red"), Reference::new("ns", "none")];
    for at in [here, other, bare, by_hand, copy, gone].iter().chain(&rest) {
        let whose: Vec<&str> = networks_of(&world, at).map(|network| network.name.as_str()).collect();
        let of = world.networks.values().filter(|network| attachments_of(&world, network).contains(at));
        assert_eq!(whose, of.map(|network| network.name.as_str()).collect::<Vec<_>>(), "{at}");
        met += whose.len();
    }
    assert_eq!(met, 6, "all but the copy and what is not there");
}

#[test]
fn users_of_attachments_that_others_wrote_for_the_network_count() {
    let mut world = world([network("blue")]);
    settle_down(&mut world, at(0));
    let by_hand = Attachment {
        uid: "x".to_owned(),
        version: "1".to_owned(),
        deleting: false,
        network: None,
        network_uid: None,
        place: None,
        config: None,
        joins: Some("blue".to_owned()),
    };
    world.attachments.as_mut().unwrap().insert(Reference::new("ns", "hand"), by_hand);
    uses(&mut world, "pod", "hand");
    let turn = plan(&world, at(1)).turns.remove(0);
    assert_eq!(turn.status.unwrap().users.unwrap().first, ["Pod ns/pod"]);
}

#[test]
fn only_more_of_the_same_users_may_wait() {
    let mut world = world([network("blue")]);
    settle_down(&mut world, at(0));
    uses(&mut world, "one", "blue");
    assert!(!plan(&world, at(1)).turns[0].patient);
    settle_down(&mut world, at(1));
    uses(&mut world, "two", "blue");
    assert!(plan(&world, at(1)).turns[0].patient);
}

#[test]
fn a_condition_of_somebody_else_is_no_news_and_times_have_whole_seconds() {
    let mut world = world([network("blue")]);
    let now = at(0) + SignedDuration::from_millis(345);
    settle_down(&mut world, now);
    let conditions = &mut world.networks.get_mut("blue").unwrap().status.conditions;
    assert!(conditions.iter().all(|one| one.last_transition_time == at(0)), "{conditions:?}");
    let theirs = Condition { r#type: "Backup".to_owned(), ..conditions[0].clone() };
    conditions.insert(1, theirs);
    assert_eq!(plan(&world, at(1)), Plan::default());
    uses(&mut world, "one", "blue");
    settle_down(&mut world, at(1));
    assert_eq!(told(&world, "blue", "Backup").1, told(&world, "blue", "Ready").1, "it stays");
    let conditions = &mut world.networks.get_mut("blue").unwrap().status.conditions;
    conditions.reverse();
    uses(&mut world, "two", "blue");
    assert!(plan(&world, at(1)).turns[0].patient);
}

#[test]
fn what_others_write_into_our_part_of_the_status_goes() {
    let mut world = world([network("blue")]);
    settle_down(&mut world, at(0));
    let good = world.networks["blue"].status.clone();
    let status = &mut world.networks.get_mut("blue").unwrap().status;
    let theirs = NotReady { node: "theirs".to_owned(), ..status.not_ready[0].clone() };
    status.not_ready.push(theirs);
    status.pods_with_old_mtu = Some(7);
    let first = status.conditions[0].clone();
    let many = (0..20).map(|n| Condition { r#type: format!("Their{n}"), ..first.clone() });
    status.conditions.splice(0..0, many);
    assert_eq!(settle_down(&mut world, at(1)), ["status blue"]);
    let status = &world.networks["blue"].status;
    assert_eq!((&status.not_ready, status.pods_with_old_mtu), (&good.not_ready, None));
    assert_eq!(status.conditions.len(), MAX_CONDITIONS, "or nothing could be written");
    assert_eq!(status.conditions[..4], good.conditions);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    #[test]
    fn a_plan_applied_twice_is_empty(
        events in proptest::collection::vec((0..9_u8, 0..3_usize), 1..24),
    ) {
        let names = ["blue", "red", "green"];
        let mut world = world([]);
        for (now, (event, which)) in (0..).zip(events) {
            let (name, node) = (names[which], ["a", "b", "a"][which]);
            match event {
                0 | 1 if !world.networks.contains_key(name) => {
                    world.networks.insert(name.to_owned(), Network { finalizers: Vec::new(), ..network(name) });
                }
                2 if world.networks.contains_key(name) => delete(&mut world, name, now),
                3 => uses(&mut world, node, name),
                4 => _ = world.users.delete(Kind::Pod, "ns", node),
                5 | 6 if world.networks.contains_key(name) => list(&mut world, node, name, event == 5),
                7 => world.reports.get_mut(node).unwrap().networks.clear(),
                8 => _ = world.attachments.as_mut().unwrap().remove(&Reference::new("ns", name)),
                _ => {}
            }
            settle_down(&mut world, at(now * 2));
            prop_assert_eq!(plan(&world, at(now * 2)), Plan { look: plan(&world, at(now * 2)).look, ..Plan::default() });
            for network in world.networks.values().filter(|network| network.finalizers.iter().any(|it| it == FINALIZER_USERS)) {
                let here = Reference::new("ns", network.name.as_str());
                let used = world.users.summary([&here], 1).count > 0;
                prop_assert!(!used || world.attachments.as_ref().unwrap().contains_key(&here), "a pod is stranded");
            }
        }
    }
}
