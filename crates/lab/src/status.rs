//! The state of a lab.

use std::{collections::BTreeMap, fmt};

use crate::{
    control_plane,
    init::ComponentState,
    lab::Lab,
    lab_record::NodeRecord,
    switch::{self, CableState},
};

/// The state of a lab; `Display` prints it for people.
#[derive(Clone, Debug)]
pub struct LabStatus {
    lab: String,
    machines: Vec<MachineStatus>,
    forwarder: bool,
    memory: u64,
    kubeconfig: String,
}

#[derive(Clone, Debug)]
struct MachineStatus {
    name: String,
    on: bool,
    cable: Option<CableState>,
    components: BTreeMap<String, Option<ComponentState>>,
}

impl Lab {
    /// Collects the state of all components.
    pub fn status(&self) -> LabStatus {
        let mut machines = vec![self.machine_status(control_plane::NAME, None)];
        for node in self.record().map(|r| r.nodes).unwrap_or_default() {
            machines.push(self.machine_status(&node.name, Some(&node)));
        }
        LabStatus {
            lab: self.name.to_string(),
            machines,
            forwarder: self.forwarder_is_running(),
            memory: self.cgroup.memory(),
            kubeconfig: self.kubeconfig().display().to_string(),
        }
    }

    fn machine_status(&self, name: &str, node: Option<&NodeRecord>) -> MachineStatus {
        let machine = self.node(name);
        let running = machine.components().unwrap_or_default();
        let expected = match node {
            Some(node) => crate::node::components(&machine, node),
            None => self.control_plane_components(),
        };
        MachineStatus {
            name: name.to_owned(),
            on: machine.init().is_some(),
            cable: node.map(|n| switch::cable_state(&self.control_plane(), n.addresses())),
            components: expected
                .into_iter()
                .map(|component| (component.name.clone(), running.get(&component.name).cloned()))
                .collect(),
        }
    }
}

impl LabStatus {
    /// Whether all machines and components are running.
    pub fn is_healthy(&self) -> bool {
        let running = |c: &Option<ComponentState>| matches!(c, Some(ComponentState::Running { .. }));
        self.forwarder && self.machines.iter().all(|m| m.on && m.components.values().all(running))
    }

    /// The resident memory of all processes, in bytes.
    pub fn memory(&self) -> u64 {
        self.memory
    }
}

impl fmt::Display for LabStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let forwarder = if self.forwarder { "running" } else { "not running" };
        writeln!(
            f,
            "lab {}: memory {} MiB, forwarder {forwarder}, kubeconfig {}",
            self.lab,
            self.memory >> 20,
            self.kubeconfig
        )?;
        for machine in &self.machines {
            let on = if machine.on { "on" } else { "off" };
            let cable = if machine.cable == Some(CableState::Partitioned) { ", partitioned" } else { "" };
            writeln!(f, "{} ({on}{cable})", machine.name)?;
            for (name, state) in &machine.components {
                let state = match state {
                    Some(ComponentState::Running { pid }) => format!("running, pid {pid} in the machine"),
                    Some(ComponentState::Exited { reason }) => reason.clone(),
                    None => "not started".to_owned(),
                };
                writeln!(f, "  {name:<26} {state}")?;
            }
        }
        Ok(())
    }
}
