mod addresses;
mod attachments;
mod deletion;
mod mtu;
mod status;

use api::{
    ConditionStatus,
    bridgenetwork::{MAX_CONDITIONS, NotReadyNode, Overlay, READY_LABEL_PREFIX},
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
        stirred: BTreeSet::new(),
        blocks: BTreeMap::new(),
        gone: BTreeMap::new(),
        lost: BTreeSet::new(),
        next_lost: None,
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
    let made = |at: &NadRef, config: &String| Attachment {
        uid: "nad".to_owned(),
        version: "1".to_owned(),
        deleting: false,
        network: Some(turn.name.clone()),
        network_uid: Some(turn.uid.clone()),
        place: Some(origin_digest(&turn.uid, at)),
        joins: api::nad::network_of(config),
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

fn delete(world: &mut World, name: &str, now: i64) {
    let network = world.networks.get_mut(name).unwrap();
    (network.deleting, network.generation) = (Some(at(now)), network.generation + 1);
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
                8 => _ = world.attachments.as_mut().unwrap().remove(&NadRef::new("ns", name)),
                _ => {}
            }
            settle_down(&mut world, at(now * 2));
            prop_assert_eq!(plan(&world, at(now * 2)), Plan { look: plan(&world, at(now * 2)).look, ..Plan::default() });
            for network in world.networks.values().filter(|network| network.finalizers.iter().any(|it| it == FINALIZER_USERS)) {
                let here = NadRef::new("ns", network.name.as_str());
                let used = world.users.summary([&here], 1).count > 0;
                prop_assert!(!used || world.attachments.as_ref().unwrap().contains_key(&here), "a pod is stranded");
            }
        }
    }
}
