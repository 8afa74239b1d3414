//! What virt-handler writes into a VirtualMachineInstance, as a function of the instance and its launcher pods. Each call
//! does one step of a migration, as virt-handler does.

use serde_json::{Value, json};

use super::{
    api::pod_interface_name,
    launcher_pod::{LauncherPod, LauncherState, PodNetwork},
};

const NODE_NAME: &str = "kubevirt.io/nodeName";
const TARGET_NODE: &str = "kubevirt.io/migrationTargetNodeName";
const FROM_DOMAIN: &str = "domain";
const FROM_MULTUS: &str = "multus-status";

/// How migrations end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MigrationOutcome {
    #[default]
    Succeed,
    /// They keep running, until they are aborted or the outcome is changed.
    Hold,
    Fail,
}

/// What a virt-handler does next.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GuestStep {
    /// The instance to write, if it changes.
    pub instance: Option<Value>,
    /// The UIDs of pods whose guest is gone: their launchers end.
    pub ended: Vec<String>,
}

/// Decides the next step of an instance. `now` is a time in RFC 3339.
pub fn next_step(instance: &Value, pods: &[LauncherPod], outcome: MigrationOutcome, now: &str) -> GuestStep {
    let mut guest = Guest { instance: instance.clone(), pods, now, ended: Vec::new() };
    guest.advance(outcome);
    let changed = guest.instance != *instance;
    GuestStep { instance: changed.then_some(guest.instance), ended: guest.ended }
}

struct Guest<'a> {
    instance: Value,
    pods: &'a [LauncherPod],
    now: &'a str,
    ended: Vec<String>,
}

impl Guest<'_> {
    fn status(&mut self) -> &mut Value {
        &mut self.instance["status"]
    }

    fn advance(&mut self, outcome: MigrationOutcome) {
        // In every other phase virt-controller owns the instance.
        let phase = text(&self.instance["status"]["phase"]);
        if phase != "Scheduled" && phase != "Running" {
            return;
        }
        // The guest shuts down at once. virt-controller deletes the pods.
        if self.instance["metadata"]["deletionTimestamp"].is_string() {
            return self.set_phase("Succeeded");
        }
        let Some(pod) = self.current_pod().cloned() else { return };
        match pod.state {
            LauncherState::Succeeded => return self.end("Succeeded", pod.uid),
            LauncherState::Failed => return self.end("Failed", pod.uid),
            LauncherState::Running if phase == "Scheduled" => self.start(),
            LauncherState::Running => {}
            // virt-controller handles a deleted pod.
            LauncherState::Starting | LauncherState::Deleted => return,
        }
        self.update_interfaces(&pod);
        self.update_migratable();
        self.migrate(outcome);
    }

    /// The pod with the guest. Pods that ended stay beside it after migrations.
    fn current_pod(&self) -> Option<&LauncherPod> {
        let node = text(&self.instance["status"]["nodeName"]);
        let on_node = || self.pods.iter().filter(|pod| pod.node == node);
        on_node().find(|pod| !pod.has_ended()).or_else(|| on_node().next())
    }

    /// The containers with disks outlive the guest until virt-handler ends them.
    fn end(&mut self, phase: &str, pod: String) {
        self.set_phase(phase);
        self.ended.push(pod);
    }

    fn set_phase(&mut self, phase: &str) {
        let transition = json!({"phase": phase, "phaseTransitionTimestamp": self.now});
        let status = self.status();
        status["phase"] = json!(phase);
        push(&mut status["phaseTransitionTimestamps"], transition);
    }

    fn start(&mut self) {
        self.set_phase("Running");
        let status = self.status();
        status["selinuxContext"] = json!("none");
        status["migrationMethod"] = json!("BlockMigration");
    }

    /// The NICs of the domain, then those that only the pod has.
    fn update_interfaces(&mut self, pod: &LauncherPod) {
        let spec = &self.instance["spec"];
        let interfaces = elements(&spec["domain"]["devices"]["interfaces"]);
        let networks = elements(&spec["networks"]);
        let old = elements(&self.instance["status"]["interfaces"]);
        let named = |list: &[Value], name: &Value| list.iter().find(|e| e["name"] == *name).cloned();
        let mut statuses = Vec::new();
        for interface in &interfaces {
            let Some(network) = named(&networks, &interface["name"]) else { continue };
            let primary = network["multus"].is_null() || network["multus"]["default"] == true;
            let old = named(&old, &interface["name"]).unwrap_or_default();
            let from = |source| text(&old["infoSource"]).split(", ").any(|s| s == source);
            if interface["state"] != "absent" && (primary || from(FROM_MULTUS) || from(FROM_DOMAIN)) {
                let attached = pod_network(pod, &old, text(&interface["name"]), primary);
                let mut status = domain_status(interface, &old, attached);
                if from(FROM_MULTUS) {
                    status["infoSource"] = json!(format!("{FROM_DOMAIN}, {FROM_MULTUS}"));
                }
                statuses.insert(if primary { 0 } else { statuses.len() }, status);
            } else if from(FROM_MULTUS) {
                statuses.push(json!({
                    "name": interface["name"], "infoSource": FROM_MULTUS,
                    "podInterfaceName": old["podInterfaceName"],
                }));
            }
        }
        // virt-controller sorts them differently.
        let by_name = |list: &[Value]| {
            let mut list = list.to_vec();
            list.sort_by_key(|e| text(&e["name"]).to_owned());
            list
        };
        if by_name(&statuses) != by_name(&old) {
            self.status()["interfaces"] = json!(statuses);
        }
    }

    /// A bridge binding of the pod network cannot migrate: the guest has the address of its pod.
    fn update_migratable(&mut self) {
        let spec = &self.instance["spec"];
        let networks = elements(&spec["networks"]);
        let is_pod_network =
            |name: &Value| networks.iter().any(|n| n["name"] == *name && n["pod"].is_object());
        let interfaces = elements(&spec["domain"]["devices"]["interfaces"]);
        let bridged = interfaces.iter().any(|i| i["bridge"].is_object() && is_pod_network(&i["name"]));
        let (status, reason) =
            if bridged { ("False", json!("InterfaceNotLiveMigratable")) } else { ("True", Value::Null) };
        let conditions = elements(&self.instance["status"]["conditions"]);
        if conditions.iter().any(|c| c["type"] == "LiveMigratable" && c["status"] == status) {
            return;
        }
        let mut condition = json!({
            "type": "LiveMigratable", "status": status,
            "lastProbeTime": self.now, "lastTransitionTime": self.now,
        });
        if !reason.is_null() {
            condition["reason"] = reason;
        }
        let others = conditions.into_iter().filter(|c| c["type"] != "LiveMigratable");
        self.status()["conditions"] = json!(others.chain([condition]).collect::<Vec<_>>());
    }

    fn migrate(&mut self, outcome: MigrationOutcome) {
        let state = self.instance["status"]["migrationState"].clone();
        if !state.is_object() {
            return;
        }
        let has_ended = state["endTimestamp"].is_string();
        let failed = state["failed"] == true;
        if has_ended {
            let gone = if failed { &state["targetPod"] } else { &state["sourcePod"] };
            let gone = self.pods.iter().find(|pod| json!(pod.name) == *gone && !pod.has_ended());
            self.ended.extend(gone.map(|pod| pod.uid.clone()));
        }
        // virt-controller sets the label when it hands the migration over.
        if !self.instance["metadata"]["labels"][TARGET_NODE].is_string() {
            return;
        }
        if has_ended && (failed || state["completed"] == true) {
            if let Some(labels) = self.instance["metadata"]["labels"].as_object_mut() {
                labels.remove(TARGET_NODE);
            }
            return;
        }
        if has_ended {
            return self.set_migration(json!({"completed": true}));
        }
        // The event of a new pod can arrive after the hand-over.
        let target = self.pods.iter().find(|pod| json!(pod.name) == state["targetPod"]).cloned();
        let Some(target) = target else { return };
        if target.has_ended() {
            return self.fail_migration("the target pod is gone", None);
        }
        if state["abortRequested"] == true {
            return self.fail_migration("Live migration has been aborted", Some("Succeeded"));
        }
        if !state["targetNodeAddress"].is_string() {
            if target.state == LauncherState::Running {
                let ports = json!({"49152": 49152, "49153": 49153});
                self.set_migration(
                    json!({"targetNodeAddress": target.host_ip, "targetDirectMigrationNodePorts": ports}),
                );
            }
        } else if !state["startTimestamp"].is_string() {
            self.set_migration(json!({"startTimestamp": self.now, "mode": "PreCopy"}));
        } else if outcome == MigrationOutcome::Fail {
            self.fail_migration("the lab lets migrations fail", None);
        } else if outcome == MigrationOutcome::Hold {
        } else if state["targetNodeDomainDetected"] != true {
            self.set_migration(
                json!({"targetNodeDomainDetected": true, "targetNodeDomainReadyTimestamp": self.now}),
            );
            let status = self.status();
            let conditions = elements(&status["conditions"]);
            let kept = conditions.into_iter().filter(|c| c["type"] != "MigrationRequired");
            status["conditions"] = json!(kept.collect::<Vec<_>>());
        } else {
            self.move_to(&target);
        }
    }

    /// The virt-handler of the target takes the instance over.
    fn move_to(&mut self, target: &LauncherPod) {
        self.set_migration(json!({"endTimestamp": self.now}));
        self.instance["metadata"]["labels"][NODE_NAME] = json!(target.node);
        let status = self.status();
        status["nodeName"] = json!(target.node);
        status["migrationTransport"] = json!("Unix");
        if let Some(status) = status.as_object_mut() {
            status.remove("evacuationNodeName");
            status.remove("launcherContainerImageVersion");
        }
    }

    fn fail_migration(&mut self, reason: &str, abort: Option<&str>) {
        self.set_migration(json!({"failed": true, "failureReason": reason, "endTimestamp": self.now}));
        let state = &mut self.status()["migrationState"];
        if !state["startTimestamp"].is_string() {
            state["startTimestamp"] = state["endTimestamp"].clone();
        }
        if let Some(abort) = abort {
            state["abortStatus"] = json!(abort);
        }
    }

    fn set_migration(&mut self, fields: Value) {
        let state = &mut self.status()["migrationState"];
        for (name, value) in fields.as_object().into_iter().flatten() {
            state[name.as_str()] = value.clone();
        }
    }
}

/// The pod interface of a network of the instance.
fn pod_network<'a>(
    pod: &'a LauncherPod,
    old: &Value,
    network: &str,
    primary: bool,
) -> Option<&'a PodNetwork> {
    let hashed = pod_interface_name(network);
    let name = old["podInterfaceName"].as_str().unwrap_or(&hashed);
    pod.networks.iter().find(|n| if primary { n.default } else { n.interface == name })
}

fn domain_status(interface: &Value, old: &Value, attached: Option<&PodNetwork>) -> Value {
    let link = if interface["state"] == "down" { "down" } else { "up" };
    let mut status = json!({
        "name": interface["name"], "infoSource": FROM_DOMAIN, "queueCount": 1, "linkState": link,
    });
    if let Some(name) = old["podInterfaceName"].as_str() {
        status["podInterfaceName"] = json!(name);
    }
    // A NIC keeps its MAC address when its guest migrates.
    let mac = interface["macAddress"].as_str().or(old["mac"].as_str()).or(attached.map(|a| a.mac.as_str()));
    if let Some(mac) = mac.filter(|mac| !mac.is_empty()) {
        status["mac"] = json!(mac);
    }
    if let Some(PodNetwork { ips, .. }) = attached
        && let Some(first) = ips.first()
    {
        status["ipAddress"] = json!(first);
        status["ipAddresses"] = json!(ips);
    }
    status
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn elements(value: &Value) -> Vec<Value> {
    value.as_array().cloned().unwrap_or_default()
}

fn push(list: &mut Value, element: Value) {
    match list.as_array_mut() {
        Some(list) => list.push(element),
        None => *list = json!([element]),
    }
}

#[cfg(test)]
#[path = "guest_tests.rs"]
mod tests;
