//! The effective MTU.

use super::*;

#[test]
fn an_overlay_gets_the_smallest_limit_of_its_nodes() {
    let fits = |text: &str, links: [Option<Vtep>; 2]| {
        let mut state = state([overlay("blue", text)]);
        for (node, link) in ["a", "b"].into_iter().zip(links) {
            state.reports.get_mut(node).unwrap().vtep = link;
        }
        reconcile_until_stable(&mut state, at(0));
        let reduced = condition(&state, "blue", "MtuReduced");
        let (reduced, message) = (reduced.0 == ConditionStatus::True, reduced.2.to_owned());
        (state.networks["blue"].status.mtu, reduced, message, condition(&state, "blue", "Ready").1.to_owned())
    };
    let (big, small, six) =
        (Some(vtep("10.0.0.1", 9000)), Some(vtep("10.0.0.2", 1500)), Some(vtep("fd00::1", 1500)));
    let mtu = |text, links| {
        let (mtu, reduced, _, _) = fits(text, links);
        (mtu, reduced)
    };
    assert_eq!(mtu("{}", [big.clone(), small.clone()]), (Some(1450), false));
    assert_eq!(mtu("{}", [big.clone(), six]), (Some(1430), false));
    assert_eq!(mtu("{}", [big.clone(), None]), (Some(8950), false));
    assert_eq!(mtu(r#"{"mtu": 1400}"#, [big.clone(), small.clone()]), (Some(1400), false));
    let (mtu, reduced, message, _) = fits(r#"{"mtu": 9000}"#, [big, small]);
    assert_eq!(
        (mtu, reduced, message.as_str()),
        (Some(1450), true, "spec.mtu is 9000, but node b carries at most 1450")
    );
    assert_eq!(fits("{}", [None, None]).3, "WaitingForVtep");
    let (mtu, _, _, reason) = fits("{}", [Some(vtep("10.0.0.1", 600)), None]);
    assert_eq!((mtu, reason.as_str()), (None, "MtuTooSmall"));
}

#[test]
fn a_node_without_a_vtep_does_not_change_the_mtu() {
    let mut state = state([overlay("blue", "{}")]);
    state.reports.get_mut("a").unwrap().vtep = Some(vtep("10.0.0.1", 9000));
    assert_eq!(mtu(&mut state), 1450);
    state.reports.get_mut("b").unwrap().vtep = None;
    assert_eq!(mtu(&mut state), 1450, "b may be as limited as before");
    let report = state.reports["b"].clone();
    state.reports.remove("b");
    assert_eq!(mtu(&mut state), 1450, "a recreated node has no report at first");
    assert_eq!(condition(&state, "blue", "MtuReduced").1, "NodeUnknown");
    state.reports.insert("b".to_owned(), NodeReport { vtep: None, ..report });
    state.reports.get_mut("a").unwrap().vtep = Some(vtep("10.0.0.1", 1400));
    assert_eq!(mtu(&mut state), 1350, "a smaller limit applies at once");
}

#[test]
fn nodes_that_hold_back_a_larger_mtu_are_reported() {
    let mut state = state([overlay("blue", r#"{"mtu": 1400}"#)]);
    reconcile_until_stable(&mut state, at(0));
    let mtu = |state: &mut TestState, mtu: Option<i32>| {
        state.networks.get_mut("blue").unwrap().spec.as_mut().unwrap().mtu = mtu;
        reconcile_until_stable(state, at(1));
        let (status, reason, message) = condition(state, "blue", "MtuReduced");
        (state.networks["blue"].status.mtu.unwrap(), status, reason.to_owned(), message.to_owned())
    };
    let report = state.reports["b"].clone();
    state.reports.remove("b");
    let (now, status, reason, message) = mtu(&mut state, Some(1420));
    assert_eq!((now, status, reason.as_str()), (1400, ConditionStatus::True, "NodeUnknown"));
    assert!(
        message.starts_with("MTU 1400 stays in effect because node b may carry no more; it becomes 1420")
    );
    assert_eq!(mtu(&mut state, None).1, ConditionStatus::False, "nothing requested more");
    assert_eq!(mtu(&mut state, Some(1300)).2, "Fits", "a smaller MTU applies at once");
    state.reports.get_mut("a").unwrap().vtep = None;
    assert_eq!(mtu(&mut state, Some(1300)).2, "Fits");
    let (now, _, reason, message) = mtu(&mut state, Some(1310));
    assert_eq!((now, reason.as_str()), (1300, "NodeUnknown"));
    assert!(message.contains("nodes a, b may"), "{message}");
    assert_eq!(mtu(&mut state, Some(1280)).0, 1280);
    state.reports.get_mut("a").unwrap().vtep = Some(vtep("10.0.0.1", 1500));
    for name in ["c", "d", "e", "f"] {
        let node = NodeState { uid: name.to_owned(), labels: BTreeMap::new(), not_ready_reason: None };
        state.nodes.insert(name.to_owned(), node);
    }
    let message = mtu(&mut state, Some(9000)).3;
    assert!(message.contains("nodes b, c, d and 2 more"), "{message}");
    for name in ["b", "c", "d", "e", "f"] {
        state.reports.insert(name.to_owned(), report.clone());
    }
    let (now, _, reason, _) = mtu(&mut state, Some(9000));
    assert_eq!((now, reason.as_str()), (1450, "NodeLimit"));
}

#[test]
fn a_used_network_can_be_raised_and_not_lowered() {
    let mut state = state([NetworkState {
        spec: Ok(spec(r#"{"mtu": 1400, "attachment": {"namespaces": ["ns"]}}"#)),
        ..network("blue")
    }]);
    reconcile_until_stable(&mut state, at(0));
    uses(&mut state, "pod", "blue");
    let set = |state: &mut TestState, mtu: i32| {
        let blue = state.networks.get_mut("blue").unwrap();
        blue.spec.as_mut().unwrap().mtu = Some(mtu);
        reconcile_until_stable(state, at(1));
        state.networks["blue"].status.mtu
    };
    assert_eq!(set(&mut state, 1300), Some(1400));
    assert_eq!(condition(&state, "blue", "MtuReduced").1, "HeldByUsers");
    assert_eq!(set(&mut state, 1500), Some(1500));
    assert_eq!(set(&mut state, 1300), Some(1500));
    state.users.delete(WorkloadKind::Pod, "ns", "pod");
    reconcile_until_stable(&mut state, at(2));
    assert_eq!(state.networks["blue"].status.mtu, Some(1300));
    let config = state.nads.as_ref().unwrap()[&NadRef::new("ns", "blue")].config.clone().unwrap();
    assert!(config.contains("\"mtu\":1300"), "{config}");
}

fn mtu(state: &mut TestState) -> i32 {
    reconcile_until_stable(state, at(1));
    state.networks["blue"].status.mtu.unwrap()
}

fn set_mtu(state: &mut TestState, mtu: Option<i32>) {
    state.networks.get_mut("blue").unwrap().spec.as_mut().unwrap().mtu = mtu;
}

#[test]
fn an_overlay_does_not_rise_when_a_node_with_a_small_mtu_leaves() {
    for (text, kind, instruction) in [
        ("{}", ConditionStatus::False, "set spec.mtu to 1450 to raise it"),
        (r#"{"mtu": 9000}"#, ConditionStatus::True, "set spec.mtu to 1450 to raise it"),
        (
            r#"{"mtu": 1450}"#,
            ConditionStatus::True,
            "to raise it, set spec.mtu to 1449, wait until status.mtuFittedFrom.specMtu is 1449, then set spec.mtu to 1450",
        ),
    ] {
        let mut state = state([overlay("blue", text)]);
        state.reports.get_mut("b").unwrap().vtep = Some(vtep("10.0.0.2", 1400));
        assert_eq!(mtu(&mut state), 1350);
        state.nodes.remove("b");
        assert_eq!(mtu(&mut state), 1350, "{text}");
        let (status, reason, message) = condition(&state, "blue", "MtuReduced");
        assert_eq!((status, reason), (kind, "HigherPossible"), "{text}");
        assert_eq!(message, format!("MTU is 1350; 1450 is possible on the current nodes; {instruction}"));
        let node = state.nodes["a"].clone();
        state.nodes.insert("c".to_owned(), node);
        assert_eq!(mtu(&mut state), 1350, "{text}: the new node has no VTEP");
        let (status, reason, message) = condition(&state, "blue", "MtuReduced");
        assert_eq!((status, reason), (kind, "NodeUnknown"), "{text}");
        assert!(message.starts_with("MTU is 1350; node c has not reported a VTEP"), "{message}");
    }
}

#[test]
fn an_overlay_rises_when_spec_mtu_changes_and_still_comes_down() {
    let mut state = state([overlay("blue", r#"{"mtu": 1450}"#)]);
    state.reports.get_mut("b").unwrap().vtep = Some(vtep("10.0.0.2", 1400));
    assert_eq!(mtu(&mut state), 1350);
    state.nodes.remove("b");
    for (request, expected) in [(Some(1449), 1449), (Some(1450), 1450), (Some(1300), 1300), (None, 1450)] {
        set_mtu(&mut state, request);
        assert_eq!(mtu(&mut state), expected, "{request:?}");
        assert_eq!(state.networks["blue"].status.mtu_fitted_from.unwrap().spec_mtu, request);
    }
    state.reports.get_mut("a").unwrap().vtep = Some(vtep("10.0.0.1", 1300));
    assert_eq!(mtu(&mut state), 1250, "a smaller limit applies at once");
    set_mtu(&mut state, Some(9000));
    assert_eq!(mtu(&mut state), 1250);
    state.reports.get_mut("a").unwrap().vtep = Some(vtep("10.0.0.1", 9000));
    assert_eq!(mtu(&mut state), 1250, "spec.mtu was already fitted");
    assert!(condition(&state, "blue", "MtuReduced").2.contains("8950 is possible"));
}

#[test]
fn a_requested_rise_waits_for_the_vteps_of_all_nodes() {
    let mut state = state([overlay("blue", r#"{"mtu": 1300}"#)]);
    assert_eq!(mtu(&mut state), 1300);
    let report = state.reports["b"].clone();
    state.reports.remove("b");
    set_mtu(&mut state, Some(1400));
    for _ in 0..2 {
        assert_eq!(mtu(&mut state), 1300);
        assert_eq!(condition(&state, "blue", "MtuReduced").1, "NodeUnknown");
    }
    state.reports.insert("b".to_owned(), report);
    assert_eq!(mtu(&mut state), 1400);
}

#[test]
fn the_mtu_of_a_status_of_an_older_version_does_not_rise() {
    for text in ["{}", r#"{"mtu": 1450}"#, r#"{"mtu": 9000}"#] {
        let mut old = overlay("blue", text);
        old.status.mtu = Some(1400);
        let requested = old.spec.as_ref().unwrap().mtu;
        let mut state = state([old]);
        assert_eq!(mtu(&mut state), 1400, "{text}");
        assert_eq!(condition(&state, "blue", "MtuReduced").1, "HigherPossible");
        assert_eq!(state.networks["blue"].status.mtu_fitted_from.unwrap().spec_mtu, requested);
        set_mtu(&mut state, Some(1420));
        assert_eq!(mtu(&mut state), 1420, "{text}");
    }
}

#[test]
fn a_network_without_an_overlay_follows_spec_mtu() {
    let mut old = NetworkState { spec: Ok(spec(r#"{"mtu": 1400}"#)), ..network("blue") };
    old.status.mtu = Some(1300);
    let mut state = state([old]);
    assert_eq!(mtu(&mut state), 1400, "no node limits it");
    set_mtu(&mut state, None);
    assert_eq!(mtu(&mut state), 1500);
}
