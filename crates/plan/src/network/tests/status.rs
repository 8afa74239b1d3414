//! The status of a network.

use super::*;

#[test]
fn finalizers_are_set_first_then_nads_and_status() {
    let mut state = state([NetworkState { finalizers: vec!["theirs".to_owned()], ..network("blue") }]);
    let done = reconcile_until_stable(&mut state, at(0));
    assert_eq!(
        done,
        ["finalizers theirs patchbay.dev/users patchbay.dev/nodes", "create ns/blue", "status blue"]
    );
    assert_eq!(condition(&state, "blue", "Ready").1, "NodesNotReady");
    for node in ["a", "b"] {
        report(&mut state, node, "blue", true);
    }
    let label = |node: &str| format!("label {node} network.patchbay.dev/blue Some(\"true\")");
    assert_eq!(reconcile_until_stable(&mut state, at(9)), ["status blue".to_owned(), label("a"), label("b")]);
    let (status, reason, message) = condition(&state, "blue", "Ready");
    assert_eq!((status, reason), (ConditionStatus::True, "Ready"));
    assert_eq!(
        message,
        "ready on 2 of 2 nodes, isolated on each node: the network has neither uplink nor overlay"
    );
    let status = &state.networks["blue"].status;
    assert_eq!((status.mtu, status.nodes.as_ref().unwrap().summary.as_str()), (Some(1500), "2/2"));
    let moved: Vec<i64> =
        status.conditions.iter().map(|it| it.last_transition_time.as_second() - START).collect();
    assert_eq!(moved, [9, 0, 0, 0], "only the condition that changed has a new time");
}

#[test]
fn the_reason_of_a_node_that_is_not_ready_is_reported() {
    let mut state = state([network("blue")]);
    let labels = BTreeMap::new();
    for (name, not_ready_reason) in [("c", Some("NodeStatusUnknown".to_owned())), ("d", None), ("e", None)] {
        let node = NodeState { uid: name.to_owned(), labels: labels.clone(), not_ready_reason };
        state.nodes.insert(name.to_owned(), node);
    }
    state.reports.insert("e".to_owned(), NodeReport::default());
    report(&mut state, "a", "blue", true);
    report(&mut state, "b", "blue", false);
    report(&mut state, "e", "blue", true);
    state.networks.get_mut("blue").unwrap().generation = 2;
    report(&mut state, "a", "blue", true);
    reconcile_until_stable(&mut state, at(0));
    let status = &state.networks["blue"].status;
    let reasons: Vec<_> = status.not_ready.iter().map(|it| (it.node.as_str(), it.reason.as_str())).collect();
    assert_eq!(reasons, [("b", "Broken"), ("c", "NodeNotReady"), ("d", "NoDaemon"), ("e", "Pending")]);
    assert_eq!(status.nodes.as_ref().unwrap().summary, "1/5");
    assert!(
        state.nodes["e"].labels.contains_key("network.patchbay.dev/blue"),
        "the network still works there"
    );
}

#[test]
fn a_selector_that_matches_nothing_leaves_no_nodes() {
    let mut state = state([network("blue")]);
    report(&mut state, "a", "blue", true);
    reconcile_until_stable(&mut state, at(0));
    let text = r#"{"nodeSelector": {"matchLabels": {"name": "none"}}, "attachment": {"namespaces": ["ns"]}}"#;
    let blue = state.networks.get_mut("blue").unwrap();
    (blue.spec, blue.generation) = (Ok(spec(text)), 2);
    reconcile_until_stable(&mut state, at(1));
    assert_eq!(state.networks["blue"].status.nodes.as_ref().unwrap().summary, "0/0");
    assert_eq!(condition(&state, "blue", "Ready").1, "NoNodes");
}

#[test]
fn problems_with_nads_and_with_nodes_are_both_reported() {
    let mut state = state([network("blue")]);
    report(&mut state, "a", "blue", true);
    report(&mut state, "b", "blue", false);
    let ready = |state: &mut TestState| {
        reconcile_until_stable(state, at(0));
        let (_, reason, message) = condition(state, "blue", "Ready");
        (reason.to_owned(), message.to_owned())
    };
    let nodes = "1/2 nodes are ready; node b: Broken: reported by the daemon";
    assert_eq!(ready(&mut state), ("NodesNotReady".to_owned(), nodes.to_owned()));
    state.namespaces.clear();
    state.nads = Some(SharedMap::default());
    let both = format!("namespace ns does not exist or is terminating; {nodes}");
    assert_eq!(ready(&mut state), ("AttachmentsMissing".to_owned(), both));
    report(&mut state, "b", "blue", true);
    let one = "namespace ns does not exist or is terminating".to_owned();
    assert_eq!(ready(&mut state), ("AttachmentsMissing".to_owned(), one));
}

#[test]
fn the_younger_of_two_conflicting_networks_reports_the_conflict() {
    let with = |name: &str, age: i64, text: &str| NetworkState {
        created: at(-age),
        spec: Ok(spec(text)),
        ..network(name)
    };
    let all = r#"{"bridge": "br0"}"#;
    let only = |node: &str| {
        format!(r#"{{"bridge": "br0", "nodeSelector": {{"matchLabels": {{"name": "{node}"}}}}}}"#)
    };
    let mut both = state([with("old", 9, all), with("new", 1, &only("b"))]);
    reconcile_until_stable(&mut both, at(0));
    assert_eq!(
        condition(&both, "new", "Conflict"),
        (
            ConditionStatus::True,
            "Network",
            "bridge br0 belongs to BridgeNetwork old, which is older (node b)"
        )
    );
    assert_eq!(condition(&both, "old", "Conflict").0, ConditionStatus::False);
    let mut apart = state([with("old", 9, &only("a")), with("new", 1, &only("b"))]);
    reconcile_until_stable(&mut apart, at(0));
    assert_eq!(condition(&apart, "new", "Conflict").0, ConditionStatus::False);
    assert_eq!(find_conflict(&apart, "third", &spec(all), None).unwrap().1.owner, "old");
    assert_eq!(find_conflict(&apart, "third", &spec(r#"{"bridge": "br1"}"#), None), None);
    assert_eq!(
        find_conflict(&apart, "old", &spec(&only("a")), None),
        None,
        "a network does not conflict with itself"
    );
    assert!(find_conflict(&apart, "old", &spec(all), Some(&spec(&only("a")))).is_some(), "a new conflict");
    assert_eq!(
        find_conflict(&both, "old", &spec(all), Some(&spec(all))),
        None,
        "an existing conflict does not count"
    );
}

#[test]
fn a_foreign_link_on_a_selected_node_is_a_conflict() {
    let mut state = state([network("blue")]);
    report(&mut state, "a", "blue", true);
    report(&mut state, "b", "blue", false);
    reconcile_until_stable(&mut state, at(0));
    assert_eq!(condition(&state, "blue", "Conflict").0, ConditionStatus::False);
    let entry = state.reports.get_mut("b").unwrap().networks.get_mut("uid-blue").unwrap();
    (entry.reason, entry.message) =
        ("ForeignLink".to_owned(), "br-blue is not managed by Patchbay".to_owned());
    let network_plan = plan(&state, at(1)).networks.remove(0);
    assert_eq!(network_plan.events.iter().map(|event| event.reason).collect::<Vec<_>>(), ["Conflict"]);
    reconcile_until_stable(&mut state, at(1));
    assert_eq!(
        condition(&state, "blue", "Conflict"),
        (ConditionStatus::True, "Link", "node b: br-blue is not managed by Patchbay")
    );
    assert_eq!(state.networks["blue"].status.nodes.as_ref().unwrap().summary, "1/2");
    let elsewhere = r#"{"nodeSelector": {"matchLabels": {"name": "a"}}}"#;
    state.networks.get_mut("blue").unwrap().spec = Ok(spec(elsewhere));
    reconcile_until_stable(&mut state, at(2));
    assert_eq!(condition(&state, "blue", "Conflict").0, ConditionStatus::False);
}

#[test]
fn only_a_change_of_user_counts_is_deferrable() {
    let mut state = state([network("blue")]);
    reconcile_until_stable(&mut state, at(0));
    uses(&mut state, "one", "blue");
    assert!(!plan(&state, at(1)).networks[0].deferrable);
    reconcile_until_stable(&mut state, at(1));
    uses(&mut state, "two", "blue");
    assert!(plan(&state, at(1)).networks[0].deferrable);
}

#[test]
fn a_foreign_condition_changes_nothing_and_times_have_whole_seconds() {
    let mut state = state([network("blue")]);
    let now = at(0) + SignedDuration::from_millis(345);
    reconcile_until_stable(&mut state, now);
    let conditions = &mut state.networks.get_mut("blue").unwrap().status.conditions;
    assert!(conditions.iter().all(|it| it.last_transition_time == at(0)), "{conditions:?}");
    let theirs = Condition { r#type: "Backup".to_owned(), ..conditions[0].clone() };
    conditions.insert(1, theirs);
    assert_eq!(plan(&state, at(1)), NetworksPlan::default());
    uses(&mut state, "one", "blue");
    reconcile_until_stable(&mut state, at(1));
    assert_eq!(
        condition(&state, "blue", "Backup").1,
        condition(&state, "blue", "Ready").1,
        "the foreign condition stays"
    );
    let conditions = &mut state.networks.get_mut("blue").unwrap().status.conditions;
    conditions.reverse();
    uses(&mut state, "two", "blue");
    assert!(plan(&state, at(1)).networks[0].deferrable);
}

#[test]
fn foreign_changes_to_the_managed_status_are_reverted() {
    let mut state = state([network("blue")]);
    reconcile_until_stable(&mut state, at(0));
    let good = state.networks["blue"].status.clone();
    let status = &mut state.networks.get_mut("blue").unwrap().status;
    let theirs = NotReadyNode { node: "theirs".to_owned(), ..status.not_ready[0].clone() };
    status.not_ready.push(theirs);
    status.pods_with_old_mtu = Some(7);
    let first = status.conditions[0].clone();
    let many = (0..20).map(|n| Condition { r#type: format!("Their{n}"), ..first.clone() });
    status.conditions.splice(0..0, many);
    assert_eq!(reconcile_until_stable(&mut state, at(1)), ["status blue"]);
    let status = &state.networks["blue"].status;
    assert_eq!((&status.not_ready, status.pods_with_old_mtu), (&good.not_ready, None));
    assert_eq!(status.conditions.len(), MAX_CONDITIONS, "the API server accepts no more");
    assert_eq!(status.conditions[..4], good.conditions);
}
