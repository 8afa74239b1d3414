//! Which attachments there are, and whose they are.

use super::*;

#[test]
fn an_attachment_is_put_right_and_one_of_others_is_left_alone() {
    let mut world = world([network("blue")]);
    settle_down(&mut world, at(0));
    let here = NadRef::new("ns", "blue");
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
fn a_refusal_is_told_for_as_long_as_it_stands_in_the_way() {
    let mut world = world([network("blue")]);
    for node in ["a", "b"] {
        list(&mut world, node, "blue", true);
    }
    let refused = BTreeMap::from([(NadRef::new("ns", "blue"), "quota ".repeat(1000))]);
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
    let here = NadRef::new("ns", "blue");
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
fn a_copy_of_an_attachment_is_somebody_elses() {
    let mut world = world([network("blue")]);
    world.namespaces.insert("other".to_owned(), Namespace::Active);
    settle_down(&mut world, at(0));
    let [here, there] = ["ns", "other"].map(|namespace| NadRef::new(namespace, "blue"));
    let all = world.attachments.as_mut().unwrap();
    let copy = Attachment { uid: "copy".to_owned(), ..all[&here].clone() };
    all.insert(there.clone(), copy.clone());
    all.insert(NadRef::new("ns", "second"), copy.clone());
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
    let theirs =
        Attachment { place: Some(origin_digest("uid-blue", &here)), config: None, joins: None, ..copy };
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
        NadRef::new("ns", "blue"),
        NadRef::new("other", "blue"),
        NadRef::new("bare", "blue"),
        NadRef::new("ns", "hand"),
        NadRef::new("ns", "copy"),
        NadRef::new("gone", "blue"),
    ];
    let all = world.attachments.as_mut().unwrap();
    let good = all[&here].clone();
    all.get_mut(&other).unwrap().place = None;
    all.insert(copy.clone(), Attachment { joins: None, ..good.clone() });
    all.insert(by_hand.clone(), Attachment { network: None, network_uid: None, place: None, ..good });
    let withdrawn = Withdrawn { network: "uid-red".to_owned(), uid: "x".to_owned() };
    world.withdrawn.insert(gone.clone(), withdrawn);
    let mut met = 0;
    let rest = [NadRef::new("ns", "red"), NadRef::new("ns", "none")];
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
    world.attachments.as_mut().unwrap().insert(NadRef::new("ns", "hand"), by_hand);
    uses(&mut world, "pod", "hand");
    let turn = plan(&world, at(1)).turns.remove(0);
    assert_eq!(turn.status.unwrap().users.unwrap().first, ["Pod ns/pod"]);
}
