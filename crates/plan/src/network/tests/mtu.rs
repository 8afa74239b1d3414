//! How large packets may be.

use super::*;

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
    let config = world.attachments.as_ref().unwrap()[&NadRef::new("ns", "blue")].config.clone().unwrap();
    assert!(config.contains("\"mtu\":1300"), "{config}");
}
