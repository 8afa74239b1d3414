mod addresses;
mod deletion;
mod mtu;
mod nads;
mod status;

use api::{
    ConditionStatus,
    bridgenetwork::{MAX_CONDITIONS, NotReadyNode, Overlay, READY_LABEL_PREFIX},
};
use proptest::prelude::*;

use super::*;
use crate::users::{UserIndex, WorkloadKind, WorkloadRefs};

const START: i64 = 1_000_000;

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(START + seconds).unwrap()
}

fn network(name: &str) -> NetworkState {
    NetworkState {
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

fn overlay(name: &str, text: &str) -> NetworkState {
    let mut spec = spec(text);
    spec.overlay = Some(Overlay { vni: 7, port: 4789 });
    NetworkState { spec: Ok(spec), ..network(name) }
}

fn vtep(address: &str, mtu: i32) -> Vtep {
    Vtep { address: address.parse().unwrap(), interface: "eth0".to_owned(), mtu }
}

/// A cluster, its users, and the records of one leader.
#[derive(Debug, Default)]
struct TestState {
    cluster: ClusterState,
    users: UserIndex,
    records: NetworkRecords,
    missing: MissingNodes,
}

impl std::ops::Deref for TestState {
    type Target = ClusterState;

    fn deref(&self) -> &ClusterState {
        &self.cluster
    }
}

impl std::ops::DerefMut for TestState {
    fn deref_mut(&mut self) -> &mut ClusterState {
        &mut self.cluster
    }
}

impl TestState {
    fn record_plan(&mut self, plan: &NetworksPlan) {
        self.records.record_plan(&self.cluster, plan);
        self.cluster.record_deleted_nads(plan);
    }
}

fn plan(state: &TestState, now: Timestamp) -> NetworksPlan {
    super::plan(&state.cluster, &state.users, &state.records, now)
}

/// Two nodes with a VTEP, one namespace, the NAD kind without objects, and these networks.
fn state(networks: impl IntoIterator<Item = NetworkState>) -> TestState {
    let node = |name: &str| {
        let labels = BTreeMap::from([("name".to_owned(), name.to_owned())]);
        (name.to_owned(), NodeState { uid: format!("uid-{name}"), labels, not_ready_reason: None })
    };
    let node_report = |name: &str| {
        (name.to_owned(), NodeReport { vtep: Some(vtep("10.0.0.1", 1500)), ..NodeReport::default() })
    };
    let cluster = ClusterState {
        networks: networks.into_iter().map(|network| (network.name.clone(), network)).collect(),
        nodes: ["a", "b"].map(node).into(),
        reports: ["a", "b"].map(node_report).into(),
        nads: Some(SharedMap::default()),
        namespaces: SharedMap::from([("ns".to_owned(), NamespacePhase::Active)]),
        ..ClusterState::default()
    };
    TestState { cluster, ..TestState::default() }
}

fn entry(network: &NetworkState, ready: bool) -> NetworkOnNode {
    NetworkOnNode {
        uid: network.uid.clone(),
        name: network.name.clone(),
        observed_generation: network.generation,
        ready,
        reason: if ready { "Ready" } else { "Broken" }.to_owned(),
        message: "reported by the daemon".to_owned(),
        bridge: "br".to_owned(),
        mac: None,
        mtu: None,
        ports: Vec::new(),
        pods_with_old_mtu: 0,
    }
}

/// Adds the network to the report of the node.
fn report(state: &mut TestState, node: &str, name: &str, ready: bool) {
    let entry = entry(&state.networks[name], ready);
    state.reports.get_mut(node).unwrap().networks.insert(entry.uid.clone(), entry);
}

/// The node reports that it closed the network, and how many interfaces have addresses of it.
fn close(state: &mut TestState, node: &str, name: &str, interfaces: i32) {
    let uid = state.networks[name].uid.clone();
    let closed = ClosedNetwork {
        uid: uid.clone(),
        name: name.to_owned(),
        interfaces,
        pods: (0..interfaces).map(|number| format!("ns/pod-{number}")).collect(),
        unverified_blocks: 0,
    };
    state.reports.get_mut(node).unwrap().closed.insert(uid, closed);
}

fn uses(state: &mut TestState, name: &str, networks: &str) {
    let refs = WorkloadRefs {
        namespace: "ns".to_owned(),
        name: name.to_owned(),
        networks: Some(networks.to_owned()),
        ..WorkloadRefs::default()
    };
    state.users.apply(WorkloadKind::Pod, &refs);
}

/// Applies the plan to the state as the API server would. Returns what was done.
fn apply(state: &mut TestState, plan: &NetworksPlan) -> Vec<String> {
    let mut done = Vec::new();
    state.record_plan(plan);
    for network_plan in &plan.networks {
        for step in &network_plan.steps {
            state.records.record_write(&network_plan.uid, step, |_| true);
            done.push(apply_step(state, network_plan, step));
        }
        if let (Some(status), Some(network)) =
            (&network_plan.status, state.networks.get_mut(&network_plan.name))
        {
            network.status = (**status).clone();
            done.push(format!("status {}", network_plan.name));
        }
    }
    for patch in &node_labels(state) {
        let labels = &mut state.nodes.get_mut(&patch.node).unwrap().labels;
        for (label, value) in &patch.labels {
            match value {
                Some(value) => _ = labels.insert(label.clone(), (*value).to_owned()),
                None => _ = labels.remove(label),
            }
            done.push(format!("label {} {label} {value:?}", patch.node));
        }
    }
    for (at, _) in &plan.orphan_nads {
        state.nads.as_mut().unwrap().remove(at);
        done.push(format!("delete orphan {at}"));
    }
    done
}

fn apply_step(state: &mut TestState, network_plan: &NetworkPlan, step: &NetworkStep) -> String {
    let nad = |at: &NadRef, config: &String| NadState {
        uid: "nad".to_owned(),
        version: "1".to_owned(),
        deleting: false,
        network: Some(network_plan.name.clone()),
        network_uid: Some(network_plan.uid.clone()),
        origin: Some(origin_digest(&network_plan.uid, at)),
        joins: api::nad::network_of(config),
        network_config: NadNetwork::read(Some(config), &at.name).map_err(|error| error.to_string()),
        config: Some(config.clone()),
    };
    let finalizers = |state: &mut TestState, all: &Vec<String>| {
        let network = state.networks.get_mut(&network_plan.name).unwrap();
        network.finalizers.clone_from(all);
        if network.deleting.is_some() && all.is_empty() {
            state.networks.remove(&network_plan.name);
        }
    };
    match step {
        NetworkStep::SetFinalizers(all) => {
            finalizers(state, all);
            format!("finalizers {}", all.join(" "))
        }
        NetworkStep::CreateNad { at, config, .. } => {
            assert!(state.nads.as_mut().unwrap().insert(at.clone(), nad(at, config)), "the NAD existed");
            format!("create {at}")
        }
        NetworkStep::ApplyNad { at, config, uid, .. } => {
            let nads = state.nads.as_mut().unwrap();
            assert_eq!(&nads[at].uid, uid);
            nads.insert(at.clone(), nad(at, config));
            format!("apply {at}")
        }
        NetworkStep::DeleteNads(all) => {
            let names: Vec<String> = all.iter().map(|(at, _)| at.to_string()).collect();
            let nads = state.nads.as_mut().unwrap();
            for (at, _) in all {
                assert!(nads.remove(at));
            }
            format!("delete {}", names.join(" "))
        }
        NetworkStep::ConfirmNadsUnused(all) => {
            let used = state.users.summary(all, 1).count > 0;
            if !used {
                state.confirm_unused(all);
            }
            format!("confirm, used: {used}")
        }
        NetworkStep::RemoveUsersFinalizer { finalizers: all, .. } => {
            finalizers(state, all);
            "remove users finalizer".to_owned()
        }
        NetworkStep::RemoveNodesFinalizer { finalizers: all } => {
            finalizers(state, all);
            "remove nodes finalizer".to_owned()
        }
    }
}

/// Plans and applies until the plan is empty.
fn reconcile_until_stable(state: &mut TestState, now: Timestamp) -> Vec<String> {
    let mut all = Vec::new();
    for _ in 0..10 {
        let done = apply(state, &plan(state, now));
        if done.is_empty() {
            return all;
        }
        all.extend(done);
    }
    panic!("the plan does not converge: {all:?}");
}

fn condition<'a>(state: &'a TestState, name: &str, kind: &str) -> (ConditionStatus, &'a str, &'a str) {
    let conditions = &state.networks[name].status.conditions;
    let condition = conditions.iter().find(|condition| condition.r#type == kind).unwrap();
    (condition.status, &condition.reason, &condition.message)
}

fn delete(state: &mut TestState, name: &str, now: i64) {
    let network = state.networks.get_mut(name).unwrap();
    (network.deleting, network.generation) = (Some(at(now)), network.generation + 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    #[test]
    fn a_plan_applied_twice_is_empty(
        events in proptest::collection::vec((0..9_u8, 0..3_usize), 1..24),
    ) {
        let names = ["blue", "red", "green"];
        let mut state = state([]);
        for (now, (event, which)) in (0..).zip(events) {
            let (name, node) = (names[which], ["a", "b", "a"][which]);
            match event {
                0 | 1 if !state.networks.contains_key(name) => {
                    state.networks.insert(name.to_owned(), NetworkState { finalizers: Vec::new(), ..network(name) });
                }
                2 if state.networks.contains_key(name) => delete(&mut state, name, now),
                3 => uses(&mut state, node, name),
                4 => _ = state.users.delete(WorkloadKind::Pod, "ns", node),
                5 | 6 if state.networks.contains_key(name) => report(&mut state, node, name, event == 5),
                7 => state.reports.get_mut(node).unwrap().networks.clear(),
                8 => _ = state.nads.as_mut().unwrap().remove(&NadRef::new("ns", name)),
                _ => {}
            }
            reconcile_until_stable(&mut state, at(now * 2));
            prop_assert_eq!(plan(&state, at(now * 2)), NetworksPlan { requeue_after: plan(&state, at(now * 2)).requeue_after, ..NetworksPlan::default() });
            for network in state.networks.values().filter(|network| network.finalizers.iter().any(|it| it == FINALIZER_USERS)) {
                let here = NadRef::new("ns", network.name.as_str());
                let used = state.users.summary([&here], 1).count > 0;
                prop_assert!(!used || state.nads.as_ref().unwrap().contains_key(&here), "the NAD of a running pod is missing");
            }
        }
    }
}
