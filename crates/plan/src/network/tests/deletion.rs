//! The order of a network's deletion.

use super::*;

#[test]
fn a_network_is_deleted_in_order() {
    let mut state = state([network("blue")]);
    reconcile_until_stable(&mut state, at(0));
    for node in ["a", "b"] {
        report(&mut state, node, "blue", true);
    }
    uses(&mut state, "pod", "blue");
    reconcile_until_stable(&mut state, at(1));
    delete(&mut state, "blue", 2);
    assert_eq!(reconcile_until_stable(&mut state, at(9)), ["status blue"]);
    assert_eq!(condition(&state, "blue", "Ready").1, "DeletionBlocked");
    state.users.delete(WorkloadKind::Pod, "ns", "pod");
    let done = reconcile_until_stable(&mut state, at(10));
    assert_eq!(done, ["delete ns/blue", "status blue", "remove users finalizer", "status blue"]);
    let message = condition(&state, "blue", "Ready").2;
    assert!(message.contains("a (Ready), b (Ready)"), "{message}");
    state.nodes.remove("a");
    state.nodes.get_mut("b").unwrap().not_ready_reason = Some("NodeStatusUnknown".to_owned());
    reconcile_until_stable(&mut state, at(11));
    assert!(
        condition(&state, "blue", "Ready").2.contains("b (NodeNotReady"),
        "{}",
        condition(&state, "blue", "Ready").2
    );
    state.reports.get_mut("b").unwrap().networks.clear();
    let label = format!("label b {READY_LABEL_PREFIX}blue None");
    assert_eq!(reconcile_until_stable(&mut state, at(12)), ["remove nodes finalizer".to_owned(), label]);
    assert!(state.networks.is_empty());
}

#[test]
fn a_failed_live_read_is_reported_until_it_succeeds() {
    let mut state = state([network("blue")]);
    reconcile_until_stable(&mut state, at(0));
    delete(&mut state, "blue", 1);
    let mut delete_first = plan(&state, at(9));
    delete_first.networks[0].status = None;
    apply(&mut state, &delete_first);
    let steps_and_message = |state: &TestState| {
        let network_plan = plan(state, at(9)).networks.remove(0);
        let ready = network_plan.status.map(|status| status.conditions[0].message.clone());
        (network_plan.steps.len(), ready.unwrap_or_default())
    };
    for confirmed in ["no users left", "no node reports links"] {
        assert_eq!(steps_and_message(&state), (1, String::new()));
        state.records.live_read_failed.insert("uid-blue".to_owned(), "etcd is down ".repeat(1000));
        let (steps, message) = steps_and_message(&state);
        assert_eq!(steps, 1, "the step is tried again");
        assert!(
            message.contains(confirmed) && message.contains("etcd is down") && message.len() < 1000,
            "{message}"
        );
        state.records.live_read_failed.clear();
        let next = plan(&state, at(9));
        apply(&mut state, &next);
    }
    assert!(state.networks.is_empty());
}

#[test]
fn nothing_is_removed_during_the_deletion_grace() {
    let mut state = state([network("blue")]);
    reconcile_until_stable(&mut state, at(0));
    delete(&mut state, "blue", 1);
    assert_eq!(reconcile_until_stable(&mut state, at(1)), ["status blue"]);
    assert_eq!(plan(&state, at(1)).requeue_after, Some(DELETION_GRACE));
    assert_eq!(
        reconcile_until_stable(&mut state, at(2)),
        ["delete ns/blue", "remove users finalizer", "remove nodes finalizer"]
    );
}

#[test]
fn a_late_user_restores_the_nad() {
    let mut state = state([network("blue")]);
    reconcile_until_stable(&mut state, at(0));
    delete(&mut state, "blue", 1);
    let first = plan(&state, at(3));
    apply(&mut state, &first);
    assert_eq!(state.nads, Some(SharedMap::default()));
    uses(&mut state, "pod", "blue");
    assert_eq!(reconcile_until_stable(&mut state, at(3)), ["create ns/blue", "status blue"]);
}

#[test]
fn an_invalid_network_can_be_deleted_and_foreign_finalizers_stay() {
    let mut broken = NetworkState { spec: Err("junk".to_owned()), ..network("blue") };
    broken.finalizers.push("foregroundDeletion".to_owned());
    let mut state = state([broken]);
    state.nads = None;
    reconcile_until_stable(&mut state, at(0));
    assert_eq!(condition(&state, "blue", "Ready").1, "InvalidSpec");
    delete(&mut state, "blue", 1);
    let done = reconcile_until_stable(&mut state, at(9));
    assert_eq!(done[..2], ["remove users finalizer", "remove nodes finalizer"]);
    assert_eq!(state.networks["blue"].finalizers, ["foregroundDeletion"]);
}

#[test]
fn orphan_nads_are_deleted_once_unused() {
    let mut state = state([network("blue")]);
    reconcile_until_stable(&mut state, at(0));
    state.networks.clear();
    uses(&mut state, "pod", "blue");
    assert_eq!(reconcile_until_stable(&mut state, at(1)), [""; 0]);
    state.users.delete(WorkloadKind::Pod, "ns", "pod");
    let edits: [fn(&mut NadState); 6] = [
        |nad| nad.config = None,
        |nad| nad.config = nad.config.as_ref().map(|text| text.replace("1500", "1500,\"ipam\":{}")),
        |nad| nad.config = nad.config.as_ref().map(|text| text.replace("blue", "red")),
        |nad| nad.network = Some("red".to_owned()),
        |nad| nad.network = None,
        |nad| nad.origin = Some("elsewhere".to_owned()),
    ];
    let here = NadRef::new("ns", "blue");
    let good = state.nads.as_ref().unwrap()[&here].clone();
    for edit in edits {
        let mut edited = good.clone();
        edit(&mut edited);
        assert_ne!(edited, good);
        state.nads.as_mut().unwrap().insert(here.clone(), edited);
        assert_eq!(plan(&state, at(1)).orphan_nads, [], "a modified NAD stays");
    }
    state.nads.as_mut().unwrap().insert(here, good);
    assert_eq!(reconcile_until_stable(&mut state, at(1)), ["delete orphan ns/blue"]);
}
