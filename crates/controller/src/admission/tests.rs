//! Networks and their users before the webhook.

use jiff::Timestamp;
use plan::{
    network::{Network, Node, World},
    users::Facts,
};
use serde_json::{Map, Value, json};

use super::*;

fn network(name: &str, spec: &Value, deleting: bool) -> Network {
    Network {
        name: name.to_owned(),
        uid: format!("uid-{name}"),
        version: "1".to_owned(),
        generation: 1,
        created: Timestamp::UNIX_EPOCH,
        deleting: deleting.then_some(Timestamp::UNIX_EPOCH),
        finalizers: vec![api::bridgenetwork::FINALIZER_USERS.to_owned()],
        spec: Ok(serde_json::from_value(spec.clone()).unwrap()),
        status: serde_json::from_value(json!({"mtu": 1500})).unwrap(),
    }
}

/// One node, and a network that stays and one that goes.
fn world() -> World {
    let attachment = json!({"bridge": "br-blue", "attachment": {"namespaces": ["ns"]}});
    let networks = [
        network("blue", &attachment, false),
        network("old", &json!({"attachment": {"namespaces": ["ns"]}}), true),
    ];
    World {
        networks: networks.map(|network| (network.name.clone(), network)).into(),
        nodes: [("n".to_owned(), Node { uid: "n".to_owned(), labels: [].into(), silent: None })].into(),
        attachments: Some([].into()),
        ..World::default()
    }
}

fn map(value: Value) -> Map<String, Value> {
    serde_json::from_value(value).unwrap()
}

fn bridge(name: &str, spec: &Value, old: Option<&Value>) -> Verdict {
    let object = map(json!({"metadata": {"name": name}, "spec": spec}));
    let old = old.map(|spec| map(json!({"metadata": {"name": name}, "spec": spec})));
    network::judge(&world(), name, Some(&object), old.as_ref())
}

fn refuses(verdict: &Verdict, sentence: &str) {
    assert!(matches!(verdict, Verdict::Deny(told) if told.contains(sentence)), "{verdict:?}");
}

#[test]
fn a_network_that_clashes_is_refused_and_one_that_shares_no_node_is_not() {
    refuses(&bridge("red", &json!({"bridge": "br-blue"}), None), "belongs to BridgeNetwork blue");
    let elsewhere = json!({"bridge": "br-blue", "nodeSelector": {"matchLabels": {"no": "such"}}});
    assert_eq!(bridge("red", &elsewhere, None), Verdict::Allow);
    let same = json!({"attachment": {"name": "blue", "namespaces": ["other", "ns"]}});
    refuses(&bridge("red", &same, None), "BridgeNetwork blue keeps NetworkAttachmentDefinition ns/blue");
}

#[test]
fn an_update_that_changes_nothing_of_the_spec_or_of_what_goes_is_never_refused() {
    let clash = json!({"bridge": "br-blue"});
    assert_eq!(bridge("red", &clash, Some(&clash)), Verdict::Allow);
    refuses(&bridge("red", &clash, Some(&json!({}))), "belongs to");
    let going = map(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}, "spec": clash}));
    assert_eq!(network::judge(&world(), "red", Some(&going), None), Verdict::Allow);
    for junk in [json!({"spec": 7}), json!({"spec": {"mtu": "x"}}), json!({})] {
        assert_eq!(network::judge(&world(), "red", Some(&map(junk)), None), Verdict::Allow);
    }
}

#[test]
fn the_mtu_of_a_used_network_goes_up_only() {
    let mut world = world();
    let judge = |world: &World, mtu: i32| {
        let object =
            map(json!({"spec": {"bridge": "br-blue", "mtu": mtu, "attachment": {"namespaces": ["ns"]}}}));
        network::judge(world, "blue", Some(&object), Some(&map(json!({"spec": {"bridge": "br-blue"}}))))
    };
    assert_eq!(judge(&world, 1400), Verdict::Allow);
    world.users.apply(Kind::Pod, &pod("blue"));
    refuses(&judge(&world, 1400), "cannot go from 1500 down to 1400");
    assert_eq!(judge(&world, 9000), Verdict::Allow);
}

#[test]
fn an_edit_is_not_refused_for_what_it_leaves_as_it_was() {
    let spec = |selector: &str, namespaces: &[&str]| json!({"nodeSelector": {"matchLabels": {"zone": selector}}, "attachment": {"name": "blue", "namespaces": namespaces}});
    let old = spec("a", &["ns"]);
    assert_eq!(bridge("red", &spec("b", &["ns", "other"]), Some(&old)), Verdict::Allow);
    refuses(
        &bridge("red", &spec("b", &["ns"]), Some(&spec("a", &["other"]))),
        "keeps NetworkAttachmentDefinition",
    );
    let mut world = world();
    world.users.apply(Kind::Pod, &pod("blue"));
    let judge = |new: Value| {
        let old =
            map(json!({"spec": {"bridge": "br-blue", "mtu": 1400, "attachment": {"namespaces": ["ns"]}}}));
        network::judge(&world, "blue", Some(&map(json!({"spec": new}))), Some(&old))
    };
    let more = json!({"bridge": "br-blue", "mtu": 1400, "attachment": {"namespaces": ["ns", "other"]}});
    assert_eq!(judge(more), Verdict::Allow, "1500 is held by its users, and nothing is said about the MTU");
    refuses(&judge(json!({"bridge": "br-blue", "mtu": 1300})), "cannot go from 1500 down to 1300");
}

fn object(kind: Kind, value: Value) -> Facts {
    user::read(kind, "ns", Some(&map(value)))
}

fn pod(networks: &str) -> Facts {
    let annotations = json!({"k8s.v1.cni.cncf.io/networks": networks});
    object(Kind::Pod, json!({"metadata": {"name": "p", "annotations": annotations}, "spec": {}}))
}

fn judge_user(world: &World, kind: Kind, new: &Facts, old: &Facts) -> Verdict {
    user::judge(world, kind, new, &user::added(new, old))
}

fn nobody() -> Facts {
    user::read(Kind::Pod, "ns", None)
}

#[test]
fn a_new_reference_to_what_goes_is_refused_in_every_kind() {
    let annotated = json!({"metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": "old"}}});
    let machine = json!({"networks": [{"multus": {"networkName": "ns/old"}}]});
    for kind in Kind::ALL {
        let value = match kind {
            Kind::Pod => json!({"metadata": annotated["metadata"]}),
            Kind::CronJob => json!({"spec": {"jobTemplate": {"spec": {"template": annotated}}}}),
            Kind::VirtualMachine => json!({"spec": {"template": {"spec": machine}}}),
            Kind::VirtualMachineInstance => json!({"spec": machine}),
            Kind::DaemonSet | Kind::Deployment | Kind::Job | Kind::ReplicaSet | Kind::StatefulSet => {
                json!({"spec": {"template": annotated}})
            }
        };
        let mut value = value;
        if value.get("metadata").is_none() {
            value["metadata"] = json!({"name": "x"});
        }
        refuses(
            &judge_user(&world(), kind, &object(kind, value), &nobody()),
            "BridgeNetwork old, which is being deleted",
        );
    }
}

#[test]
fn whoever_had_the_reference_keeps_it_and_what_an_old_user_makes_is_let_in() {
    let judge = |world: &World, new: &Facts, old: &Facts| judge_user(world, Kind::Pod, new, old);
    assert_eq!(judge(&world(), &pod("blue"), &nobody()), Verdict::Allow);
    assert_eq!(judge(&world(), &pod("old"), &pod("blue,old")), Verdict::Allow);
    refuses(&judge(&world(), &pod("blue,old"), &pod("blue")), "ns/old");
    let owner = json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "set", "uid": "u", "controller": true}]);
    let owned = object(
        Kind::Pod,
        json!({"metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": "old"}, "ownerReferences": owner}}),
    );
    refuses(&judge(&world(), &owned, &nobody()), "old");
    let mut world = world();
    let set = json!({"metadata": {"name": "set", "namespace": "ns"}, "spec": {"template": {"metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": "old"}}}}});
    world.users.apply(Kind::ReplicaSet, &object(Kind::ReplicaSet, set));
    assert_eq!(judge(&world, &owned, &nobody()), Verdict::Allow);
}

#[test]
fn an_object_that_cannot_be_read_names_nothing() {
    for junk in
        [json!({"spec": 7}), json!({"metadata": 7}), json!({"metadata": {}, "spec": {"template": []}})]
    {
        for kind in Kind::ALL {
            let facts = object(kind, junk.clone());
            assert_eq!(judge_user(&world(), kind, &facts, &nobody()), Verdict::Allow, "{junk}");
        }
    }
}

#[test]
fn a_judgement_costs_no_more_however_many_attachments_there_are() {
    let mut world = world();
    for number in 0..1000 {
        let name = format!("going-{number}");
        world.networks.insert(name.clone(), network(&name, &json!({}), true));
        let marked = plan::network::Attachment {
            uid: name.clone(),
            version: "1".to_owned(),
            deleting: false,
            network: Some(name.clone()),
            network_uid: Some(format!("uid-{name}")),
            place: None,
            config: None,
            joins: None,
        };
        let all = world.attachments.as_mut().unwrap();
        for namespace in 0..10 {
            let at = api::selection::NadRef::new(format!("n{namespace}"), name.as_str());
            let place = Some(api::nad::origin_digest(&format!("uid-{name}"), &at));
            all.insert(at, plan::network::Attachment { place, ..marked.clone() });
        }
    }
    let named = pod("blue");
    // The best of several: what is measured is the judgement, not this machine's other work.
    let best = (0..20).map(|_| {
        let begun = std::time::Instant::now();
        assert_eq!(judge_user(&world, Kind::Pod, &named, &nobody()), Verdict::Allow);
        begun.elapsed()
    });
    let best = best.min().unwrap();
    assert!(best.as_micros() < 2000, "{best:?}");
    refuses(&judge_user(&world, Kind::Pod, &pod("n7/going-7"), &nobody()), "going-7");
}
