//! The order in which networks go.

use super::*;

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
    let label = format!("label b {READY_LABEL_PREFIX}blue None");
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
    let here = NadRef::new("ns", "blue");
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
