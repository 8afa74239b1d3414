//! The diagnostics that a failed test prints.

use std::{fmt::Write as _, fs};

use anyhow::Result;

use crate::{init::ComponentState, lab::Lab, machine::Machine};

impl Lab {
    /// Status, objects, events, links, and the last lines of every log.
    pub fn dump(&self) -> String {
        let mut text = format!("dump of lab {}:\n{}", self.name, self.status());
        let mut section = |what: &str, found: Result<String>| {
            let found = found.unwrap_or_else(|e| format!("{e:#}"));
            let _ = writeln!(text, "--- {what}\n{}", found.trim_end());
        };
        for what in ["nodes", "pods", "events", "network-attachment-definitions"] {
            section(what, self.kubectl(&["get", what, "-A", "-o", "wide", "--request-timeout=5s"]));
        }
        section("pods in full", self.kubectl(&["get", "pods", "-A", "-o", "yaml", "--request-timeout=5s"]));
        let names = self.nodes();
        for machine in names.iter().map(|name| self.node(name)).chain([self.control_plane()]) {
            section(&format!("links of {}", machine.name), machine.output(&["ip", "-br", "addr"]));
            for component in machine.components().unwrap_or_default().keys() {
                section(
                    &format!("last lines of the log of {component} on {}", machine.name),
                    Ok(machine.tail(component)),
                );
            }
        }
        text
    }

    /// The components that are not running, with their machine and how they ended.
    pub fn exited_components(&self) -> Vec<String> {
        let machines = self.nodes().into_iter().map(|name| self.node(&name)).chain([self.control_plane()]);
        machines
            .flat_map(|machine| {
                let components = machine.components().unwrap_or_default();
                components.into_iter().filter_map(move |(name, state)| match state {
                    ComponentState::Exited { reason } => Some(format!("{}/{name} {reason}", machine.name)),
                    ComponentState::Running { .. } => None,
                })
            })
            .collect()
    }
}

impl Machine {
    /// The last lines of a component's log.
    pub fn tail(&self, component: &str) -> String {
        let text = fs::read_to_string(self.log(component)).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }
}
