//! What a network says of itself.

use super::*;

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
    let theirs = NotReadyNode { node: "theirs".to_owned(), ..status.not_ready[0].clone() };
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
