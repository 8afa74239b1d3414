use serde_json::{Value, json};

use super::*;

const NOW: &str = "2026-11-17T12:00:00Z";

fn pod(name: &str, node: &str, state: LauncherState, interfaces: &[&str]) -> LauncherPod {
    let network = |(index, interface): (usize, &&str)| PodNetwork {
        interface: (*interface).to_owned(),
        ips: vec![format!("10.9.0.{index}")],
        mac: format!("02:00:00:00:00:0{index}"),
        default: index == 0,
    };
    LauncherPod {
        uid: format!("uid-{name}"),
        name: name.to_owned(),
        instance: "uid".to_owned(),
        node: node.to_owned(),
        host_ip: "172.30.0.12".to_owned(),
        state,
        networks: interfaces.iter().enumerate().map(network).collect(),
    }
}

fn instance(phase: &str) -> Value {
    json!({
        "metadata": {"name": "vm", "uid": "uid", "labels": {"kubevirt.io/nodeName": "node-1"}},
        "spec": {
            "domain": {"devices": {"interfaces": [
                {"name": "default", "masquerade": {}}, {"name": "blue", "bridge": {}},
            ]}},
            "networks": [{"name": "default", "pod": {}}, {"name": "blue", "multus": {"networkName": "blue"}}],
        },
        "status": {"phase": phase, "nodeName": "node-1", "interfaces": [
            {"name": "default", "podInterfaceName": "eth0"},
            {"name": "blue", "podInterfaceName": "pod16477688c0e", "infoSource": "multus-status"},
        ]},
    })
}

fn source(state: LauncherState) -> LauncherPod {
    pod("source", "node-1", state, &["eth0", "pod16477688c0e"])
}

fn step(instance: &Value, pods: &[LauncherPod]) -> Option<Value> {
    next_step(instance, pods, MigrationOutcome::Succeed, NOW).instance
}

/// The running instance, which needs no further step.
fn running() -> Value {
    let pods = [source(LauncherState::Running)];
    let running = step(&instance("Scheduled"), &pods).unwrap();
    assert_eq!(step(&running, &pods), None);
    running
}

/// The running instance after virt-controller handed a migration over.
fn handed_over() -> (Value, [LauncherPod; 2]) {
    let mut instance = running();
    instance["metadata"]["labels"][TARGET_NODE] = json!("node-2");
    instance["status"]["migrationState"] = json!({
        "migrationUid": "m", "sourceNode": "node-1", "sourcePod": "source", "targetNode": "node-2", "targetPod": "target",
    });
    let target = pod("target", "node-2", LauncherState::Running, &["eth0", "pod16477688c0e"]);
    (instance, [source(LauncherState::Running), target])
}

/// Takes steps until there is none; returns all instances that were written, and the pods that ended last.
fn play(mut instance: Value, pods: &[LauncherPod], outcome: MigrationOutcome) -> (Vec<Value>, Vec<String>) {
    let mut written = Vec::new();
    loop {
        let step = next_step(&instance, pods, outcome, NOW);
        let Some(next) = step.instance else { return (written, step.ended) };
        assert!(written.len() < 10, "{written:#?}");
        written.push(next.clone());
        instance = next;
    }
}

#[test]
fn a_guest_runs_when_its_pod_is_ready_and_reports_its_nics() {
    assert_eq!(step(&instance("Scheduling"), &[source(LauncherState::Running)]), None);
    assert_eq!(step(&instance("Scheduled"), &[source(LauncherState::Starting)]), None);
    let running = running();
    assert_eq!(running["status"]["phase"], "Running");
    let blue = &running["status"]["interfaces"][1];
    assert_eq!(blue["infoSource"], "domain, multus-status");
    assert_eq!((&blue["mac"], &blue["ipAddress"]), (&json!("02:00:00:00:00:01"), &json!("10.9.0.1")));
    assert_eq!(running["status"]["conditions"][0]["status"], "True");
}

#[test]
fn a_bridge_on_the_pod_network_cannot_migrate() {
    let mut bridged = instance("Scheduled");
    bridged["spec"]["domain"]["devices"]["interfaces"][0] = json!({"name": "default", "bridge": {}});
    let running = step(&bridged, &[source(LauncherState::Running)]).unwrap();
    assert_eq!(running["status"]["conditions"][0]["reason"], "InterfaceNotLiveMigratable");
}

#[test]
fn the_phase_follows_deletion_and_the_end_of_the_launcher() {
    let phase =
        |instance: &Value, state| step(instance, &[source(state)]).map(|i| i["status"]["phase"].clone());
    assert_eq!(phase(&running(), LauncherState::Succeeded), Some(json!("Succeeded")));
    assert_eq!(phase(&running(), LauncherState::Failed), Some(json!("Failed")));
    assert_eq!(phase(&running(), LauncherState::Deleted), None);
    let mut deleted = running();
    deleted["metadata"]["deletionTimestamp"] = json!(NOW);
    assert_eq!(phase(&deleted, LauncherState::Running), Some(json!("Succeeded")));
}

#[test]
fn a_nic_is_plugged_after_its_pod_interface_and_unplugged_before_it() {
    let pods = [source(LauncherState::Running)];
    let mut plugged = running();
    plugged["status"]["interfaces"].as_array_mut().unwrap().pop();
    assert_eq!(step(&plugged, &pods), None, "the pod has no interface yet");
    let mut absent = running();
    absent["spec"]["domain"]["devices"]["interfaces"][1]["state"] = json!("absent");
    let mut detached = step(&absent, &pods).unwrap();
    assert_eq!(detached["status"]["interfaces"][1]["infoSource"], "multus-status");
    // virt-controller does this when the pod interface is gone.
    detached["status"]["interfaces"][1]["infoSource"] = json!("");
    let gone = step(&detached, &pods).unwrap();
    assert_eq!(gone["status"]["interfaces"].as_array().map(Vec::len), Some(1));
}

#[test]
fn a_migration_moves_the_instance_and_ends_the_source() {
    let (instance, pods) = handed_over();
    let (written, ended) = play(instance, &pods, MigrationOutcome::Succeed);
    let state = |index: usize| &written[index]["status"]["migrationState"];
    assert_eq!(state(0)["targetNodeAddress"], "172.30.0.12");
    assert_eq!(state(1)["startTimestamp"], NOW);
    assert_eq!(state(2)["targetNodeDomainReadyTimestamp"], NOW);
    assert_eq!(written[2]["status"]["nodeName"], "node-1");
    assert_eq!(state(3)["endTimestamp"], NOW);
    assert_eq!(
        (&written[3]["status"]["nodeName"], &written[3]["metadata"]["labels"][NODE_NAME]),
        (&json!("node-2"), &json!("node-2"))
    );
    let last = written.last().unwrap();
    assert_eq!(last["status"]["migrationState"]["completed"], true);
    assert!(last["metadata"]["labels"][TARGET_NODE].is_null());
    assert_eq!(ended, ["uid-source"]);
    assert_eq!(last["status"]["interfaces"][1]["mac"], "02:00:00:00:00:01");
}

#[test]
fn a_held_migration_runs_until_it_is_aborted_or_its_target_ends() {
    let (instance, pods) = handed_over();
    let (written, ended) = play(instance, &pods, MigrationOutcome::Hold);
    let held = written.last().unwrap();
    assert!(held["status"]["migrationState"]["startTimestamp"].is_string() && ended.is_empty());
    let mut aborted = held.clone();
    aborted["status"]["migrationState"]["abortRequested"] = json!(true);
    let (written, ended) = play(aborted, &pods, MigrationOutcome::Hold);
    let last = written.last().unwrap();
    assert_eq!(last["status"]["migrationState"]["abortStatus"], "Succeeded");
    assert_eq!((&last["status"]["nodeName"], ended), (&json!("node-1"), vec!["uid-target".to_owned()]));
    let [source, mut target] = pods;
    target.state = LauncherState::Failed;
    let (written, _) = play(held.clone(), &[source.clone(), target], MigrationOutcome::Hold);
    assert_eq!(written.last().unwrap()["status"]["migrationState"]["failed"], true);
    assert_eq!(step(held, &[source]), None, "the event of the target pod has not arrived");
}

#[test]
fn a_failed_migration_keeps_the_instance_on_its_node() {
    let (instance, pods) = handed_over();
    let (written, ended) = play(instance, &pods, MigrationOutcome::Fail);
    let last = written.last().unwrap();
    assert_eq!(last["status"]["migrationState"]["failed"], true);
    assert_eq!((&last["status"]["nodeName"], ended), (&json!("node-1"), vec!["uid-target".to_owned()]));
    assert_eq!(last["status"]["phase"], "Running");
}

#[test]
fn the_next_migration_does_not_end_its_own_target() {
    let (instance, pods) = handed_over();
    let (written, _) = play(instance, &pods, MigrationOutcome::Succeed);
    let [mut source, target] = pods;
    source.state = LauncherState::Succeeded;
    let next = pod("next", "node-1", LauncherState::Running, &["eth0"]);
    let step = next_step(written.last().unwrap(), &[source, target, next], MigrationOutcome::Succeed, NOW);
    assert_eq!(step, GuestStep::default());
}
