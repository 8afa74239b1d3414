//! NADs and their owners.

use super::*;

#[test]
fn a_changed_nad_is_repaired_and_a_foreign_one_is_left_alone() {
    let mut state = state([network("blue")]);
    reconcile_until_stable(&mut state, at(0));
    let here = NadRef::new("ns", "blue");
    let change = |state: &mut TestState, change: fn(&mut NadState)| {
        change(state.nads.as_mut().unwrap().get_mut(&here).unwrap());
        plan(state, at(1))
            .networks
            .into_iter()
            .flat_map(|network_plan| network_plan.steps)
            .collect::<Vec<_>>()
    };
    let edits: [fn(&mut NadState); 4] = [
        |nad| nad.config = Some("{}".to_owned()),
        |nad| nad.network = None,
        |nad| nad.network_uid = None,
        |nad| nad.origin = None,
    ];
    for edit in edits {
        let steps = change(&mut state, edit);
        assert!(matches!(steps[..], [NetworkStep::ApplyNad { repair: true, .. }]), "{steps:?}");
        assert_eq!(reconcile_until_stable(&mut state, at(1)), ["apply ns/blue"]);
    }
    state.nads.as_mut().unwrap().remove(&here);
    let network_plan = plan(&state, at(1)).networks.remove(0);
    assert!(matches!(network_plan.steps[..], [NetworkStep::CreateNad { repair: true, .. }]));
    assert_eq!(network_plan.events[0].reason, "AttachmentRepaired");
    reconcile_until_stable(&mut state, at(1));
    let steps = change(&mut state, |nad| (nad.network, nad.network_uid) = (None, Some("other".to_owned())));
    assert_eq!(steps, []);
    reconcile_until_stable(&mut state, at(2));
    let (status, _, message) = condition(&state, "blue", "Conflict");
    assert_eq!(status, ConditionStatus::True);
    assert!(message.contains("ns/blue"), "{message}");
    assert_eq!(condition(&state, "blue", "Ready").1, "Conflict");
}

#[test]
fn only_a_nad_that_was_in_sync_counts_as_repaired() {
    let mut state = state([network("blue")]);
    let repairs = |state: &TestState| {
        let networks = plan(state, at(5)).networks;
        let steps = networks.iter().flat_map(|network_plan| &network_plan.steps);
        let recorded = networks
            .iter()
            .flat_map(|network_plan| &network_plan.events)
            .any(|it| it.reason == "AttachmentRepaired");
        let repair = steps.map(|step| match step {
            NetworkStep::CreateNad { repair, .. } | NetworkStep::ApplyNad { repair, .. } => *repair,
            _ => false,
        });
        (repair.collect::<Vec<_>>(), recorded)
    };
    reconcile_until_stable(&mut state, at(0));
    // The controller deleted the NAD because it left the spec; then it is back in the spec.
    let blue = state.networks["blue"].spec.clone();
    state.networks.get_mut("blue").unwrap().spec = Ok(BridgeNetworkSpec::default());
    assert_eq!(reconcile_until_stable(&mut state, at(1))[0], "delete ns/blue");
    state.networks.get_mut("blue").unwrap().spec = blue;
    assert_eq!(repairs(&state), (vec![false], false));
    reconcile_until_stable(&mut state, at(2));
    // The namespace is deleted and created again.
    state.nads.as_mut().unwrap().clear();
    state.namespaces.clear();
    reconcile_until_stable(&mut state, at(3));
    state.namespaces.insert("ns".to_owned(), NamespacePhase::Active);
    assert_eq!(repairs(&state), (vec![false], false));
    reconcile_until_stable(&mut state, at(4));
    // The MTU changes.
    state.networks.get_mut("blue").unwrap().spec.as_mut().unwrap().mtu = Some(1400);
    assert_eq!(repairs(&state), (vec![false], false));
    reconcile_until_stable(&mut state, at(5));
    state.nads.as_mut().unwrap().clear();
    for _ in 0..2 {
        assert_eq!(repairs(&state), (vec![true], true), "it stays a repair until it is written");
        let plan = plan(&state, at(5));
        state.record_plan(&plan);
    }
    // Written, and deleted again before the watch delivered it.
    let again = plan(&state, at(5));
    apply(&mut state, &again);
    state.nads.as_mut().unwrap().clear();
    assert_eq!(repairs(&state), (vec![true], true));
}

#[test]
fn a_missing_or_terminating_namespace_is_reported() {
    let mut state = state([network("blue")]);
    report(&mut state, "a", "blue", true);
    report(&mut state, "b", "blue", true);
    state.namespaces.clear();
    assert_eq!(reconcile_until_stable(&mut state, at(0)).first().unwrap(), "status blue");
    assert_eq!(condition(&state, "blue", "Ready").1, "AttachmentsMissing");
    state.namespaces.insert("ns".to_owned(), NamespacePhase::Terminating);
    assert_eq!(reconcile_until_stable(&mut state, at(1)), [""; 0]);
    state.namespaces.insert("ns".to_owned(), NamespacePhase::Active);
    assert_eq!(reconcile_until_stable(&mut state, at(2)), ["create ns/blue", "status blue"]);
    state.nads = None;
    reconcile_until_stable(&mut state, at(3));
    assert!(condition(&state, "blue", "Ready").2.contains("install multus"));
}

#[test]
fn a_rejection_is_reported_until_the_write_succeeds() {
    let mut state = state([network("blue")]);
    for node in ["a", "b"] {
        report(&mut state, node, "blue", true);
    }
    let rejected = BTreeMap::from([(NadRef::new("ns", "blue"), "quota ".repeat(1000))]);
    state.records.rejected.insert("uid-blue".to_owned(), rejected);
    let network_plan = plan(&state, at(0)).networks.remove(0);
    assert!(matches!(network_plan.steps[..], [NetworkStep::CreateNad { .. }]), "the write is retried");
    let status = network_plan.status.unwrap();
    let ready = status.conditions.iter().find(|it| it.r#type == "Ready").unwrap();
    assert_eq!((ready.status, ready.reason.as_str()), (ConditionStatus::False, "AttachmentsMissing"));
    assert!(ready.message.contains("ns/blue") && ready.message.contains("quota"), "{}", ready.message);
    assert!(ready.message.len() < 1000);
    reconcile_until_stable(&mut state, at(0));
    assert_eq!(condition(&state, "blue", "Ready").1, "Ready", "the rejected write succeeded");
    delete(&mut state, "blue", 1);
    let network_plan = plan(&state, at(9)).networks.remove(0);
    let ready = network_plan.status.unwrap().conditions.remove(0);
    assert!(ready.message.contains("quota"), "{}", ready.message);
}

#[test]
fn a_nad_that_left_the_spec_is_deleted_once_unused() {
    let mut state = state([network("blue")]);
    reconcile_until_stable(&mut state, at(0));
    uses(&mut state, "pod", "blue");
    state.networks.get_mut("blue").unwrap().spec = Ok(BridgeNetworkSpec::default());
    assert_eq!(reconcile_until_stable(&mut state, at(1)), ["status blue"]);
    state.users.delete(WorkloadKind::Pod, "ns", "pod");
    let done = reconcile_until_stable(&mut state, at(2));
    assert_eq!(done, ["delete ns/blue", "status blue", "confirm, used: false"]);
    uses(&mut state, "late", "blue");
    assert_eq!(
        reconcile_until_stable(&mut state, at(3)),
        [""; 0],
        "a user of a NAD that is not desired creates nothing"
    );
}

#[test]
fn a_nad_that_left_the_spec_is_restored_for_a_late_user() {
    let here = NadRef::new("ns", "blue");
    let unlisted = || {
        let mut state = state([network("blue")]);
        reconcile_until_stable(&mut state, at(0));
        state.networks.get_mut("blue").unwrap().spec = Ok(BridgeNetworkSpec::default());
        let first = plan(&state, at(1));
        (state, first)
    };
    let (mut state, first) = unlisted();
    apply(&mut state, &first);
    uses(&mut state, "pod", "blue");
    assert_eq!(reconcile_until_stable(&mut state, at(1)), ["create ns/blue", "status blue"]);
    assert_eq!(plan(&state, at(1)), NetworksPlan::default(), "the NAD stays");
    state.users.delete(WorkloadKind::Pod, "ns", "pod");
    let done = reconcile_until_stable(&mut state, at(2));
    assert_eq!(done, ["delete ns/blue", "status blue", "confirm, used: false"]);
    // The response to the deletion was lost, and the cache is stale when the user is observed.
    let (mut state, first) = unlisted();
    state.record_plan(&first);
    uses(&mut state, "pod", "blue");
    let behind = plan(&state, at(1));
    state.record_plan(&behind);
    state.nads.as_mut().unwrap().remove(&here);
    assert_eq!(reconcile_until_stable(&mut state, at(1))[0], "create ns/blue");
    // The network is deleted in the meantime: the nodes still wait for the user.
    let (mut state, first) = unlisted();
    apply(&mut state, &first);
    delete(&mut state, "blue", 1);
    let network_plan = plan(&state, at(9)).networks.remove(0);
    assert!(
        matches!(&network_plan.steps[..], [NetworkStep::RemoveUsersFinalizer { nads, .. }] if nads.contains(&here))
    );
    uses(&mut state, "pod", "blue");
    assert_eq!(reconcile_until_stable(&mut state, at(9)), ["create ns/blue", "status blue"]);
    assert_eq!(condition(&state, "blue", "Ready").1, "DeletionBlocked");
}

#[test]
fn a_copy_of_a_nad_is_not_owned() {
    let mut state = state([network("blue")]);
    state.namespaces.insert("other".to_owned(), NamespacePhase::Active);
    reconcile_until_stable(&mut state, at(0));
    let [here, there] = ["ns", "other"].map(|namespace| NadRef::new(namespace, "blue"));
    let all = state.nads.as_mut().unwrap();
    let copy = NadState { uid: "copy".to_owned(), ..all[&here].clone() };
    all.insert(there.clone(), copy.clone());
    all.insert(NadRef::new("ns", "second"), copy.clone());
    assert_eq!(reconcile_until_stable(&mut state, at(1)), [""; 0], "the copy is not deleted");
    let text = r#"{"attachment": {"namespaces": ["ns", "other"]}}"#;
    state.networks.get_mut("blue").unwrap().spec = Ok(spec(text));
    reconcile_until_stable(&mut state, at(2));
    assert_eq!(state.nads.as_ref().unwrap()[&there], copy, "the copy is not adopted");
    assert!(condition(&state, "blue", "Conflict").2.contains("other/blue"));
    delete(&mut state, "blue", 3);
    reconcile_until_stable(&mut state, at(9));
    assert!(state.networks.is_empty(), "the copy does not block the deletion");
    assert_eq!(state.nads.as_ref().unwrap().len(), 2);
    // Neither the copy nor a modified NAD is deleted as an orphan.
    let theirs =
        NadState { origin: Some(origin_digest("uid-blue", &here)), config: None, joins: None, ..copy };
    state.nads.as_mut().unwrap().insert(here, theirs);
    assert_eq!(plan(&state, at(9)).orphan_nads, []);
}

#[test]
fn nads_of_and_networks_of_agree() {
    let text = r#"{"attachment": {"namespaces": ["ns", "other", "bare"]}}"#;
    let mut state = state([NetworkState { spec: Ok(spec(text)), ..network("blue") }, network("red")]);
    state.namespaces.insert("other".to_owned(), NamespacePhase::Active);
    reconcile_until_stable(&mut state, at(0));
    let [here, other, bare, by_hand, copy, gone] = [
        NadRef::new("ns", "blue"),
        NadRef::new("other", "blue"),
        NadRef::new("bare", "blue"),
        NadRef::new("ns", "hand"),
        NadRef::new("ns", "copy"),
        NadRef::new("gone", "blue"),
    ];
    let all = state.nads.as_mut().unwrap();
    let good = all[&here].clone();
    all.get_mut(&other).unwrap().origin = None;
    all.insert(copy.clone(), NadState { joins: None, ..good.clone() });
    all.insert(by_hand.clone(), NadState { network: None, network_uid: None, origin: None, ..good });
    let deleted = DeletedNad { network: "uid-red".to_owned(), uid: "x".to_owned() };
    state.deleted_nads.insert(gone.clone(), deleted);
    let mut found = 0;
    let rest = [NadRef::new("ns", "red"), NadRef::new("ns", "none")];
    for at in [here, other, bare, by_hand, copy, gone].iter().chain(&rest) {
        let owners: Vec<&str> = networks_of(&state, at).map(|network| network.name.as_str()).collect();
        let of = state.networks.values().filter(|network| nads_of(&state, network).contains(at));
        assert_eq!(owners, of.map(|network| network.name.as_str()).collect::<Vec<_>>(), "{at}");
        found += owners.len();
    }
    assert_eq!(found, 6, "all except for the copy and the unused name");
}

#[test]
fn users_of_foreign_nads_for_the_network_count() {
    let mut state = state([network("blue")]);
    reconcile_until_stable(&mut state, at(0));
    let by_hand = NadState {
        uid: "x".to_owned(),
        version: "1".to_owned(),
        deleting: false,
        network: None,
        network_uid: None,
        origin: None,
        config: None,
        joins: Some("blue".to_owned()),
        network_config: Err("none".to_owned()),
    };
    state.nads.as_mut().unwrap().insert(NadRef::new("ns", "hand"), by_hand);
    uses(&mut state, "pod", "hand");
    let network_plan = plan(&state, at(1)).networks.remove(0);
    assert_eq!(network_plan.status.unwrap().users.unwrap().first, ["Pod ns/pod"]);
}
