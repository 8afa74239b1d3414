//! How a lab is.

use std::{collections::BTreeMap, fmt};

use crate::{
    control_plane,
    init::State,
    lab::{Lab, NodeRecord},
    switch::{self, Cable},
};

/// How a lab is, for people and for scripts.
#[derive(Clone, Debug)]
pub struct Status {
    lab: String,
    machines: Vec<MachineStatus>,
    door: bool,
    memory: u64,
    kubeconfig: String,
}

#[derive(Clone, Debug)]
struct MachineStatus {
    name: String,
    on: bool,
    cable: Option<Cable>,
    components: BTreeMap<String, Option<State>>,
}

impl Lab {
    /// Looks at everything; changes nothing.
    pub fn status(&self) -> Status {
        let mut machines = vec![self.look(control_plane::NAME, None)];
        for node in self.record().map(|r| r.nodes).unwrap_or_default() {
            machines.push(self.look(&node.name, Some(&node)));
        }
        Status {
            lab: self.name.to_string(),
            machines,
            door: self.forwarder_is_running(),
            memory: self.group.memory(),
            kubeconfig: self.kubeconfig().display().to_string(),
        }
    }

    fn look(&self, name: &str, node: Option<&NodeRecord>) -> MachineStatus {
        let machine = self.node(name);
        let running = machine.components().unwrap_or_default();
        let expected: Vec<String> = match node {
            Some(node) => crate::node::components(&machine, node.address()).map(|c| c.name).into(),
            None => control_plane::foundation()
                .into_iter()
                .chain(control_plane::controllers())
                .map(|c| c.name)
                .collect(),
        };
        MachineStatus {
            name: name.to_owned(),
            on: machine.init().is_some(),
            cable: node.map(|n| switch::cable(&self.control_plane(), n.address())),
            components: expected
                .into_iter()
                .map(|name| (name.clone(), running.get(&name).cloned()))
                .collect(),
        }
    }
}

impl Status {
    /// Whether everything that should run does.
    pub fn is_healthy(&self) -> bool {
        let running = |c: &Option<State>| matches!(c, Some(State::Running { .. }));
        self.door && self.machines.iter().all(|m| m.on && m.components.values().all(running))
    }

    /// Memory of all its processes, in bytes.
    pub fn memory(&self) -> u64 {
        self.memory
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let door = if self.door { "open" } else { "closed" };
        writeln!(
            f,
            "lab {}: memory {} MiB, door {door}, kubeconfig {}",
            self.lab,
            self.memory >> 20,
            self.kubeconfig
        )?;
        for machine in &self.machines {
            let on = if machine.on { "on" } else { "off" };
            let cable = if machine.cable == Some(Cable::Cut) { ", partitioned" } else { "" };
            writeln!(f, "{} ({on}{cable})", machine.name)?;
            for (name, state) in &machine.components {
                let state = match state {
                    Some(State::Running { pid }) => format!("running, pid {pid} inside"),
                    Some(State::Ended { how }) => how.clone(),
                    None => "not started".to_owned(),
                };
                writeln!(f, "  {name:<26} {state}")?;
            }
        }
        Ok(())
    }
}
