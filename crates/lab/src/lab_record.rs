//! What a lab consists of, on disk.

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use crate::{
    address::{MAX_NODES, NodeAddresses},
    node_options::NodeOptions,
    program::{ProgramSet, Programs},
};

/// The contents of `lab.json`: which nodes a lab has, and whether it has KubeVirt.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct LabRecord {
    pub nodes: Vec<NodeRecord>,
    #[serde(default)]
    pub kubevirt: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NodeRecord {
    pub name: String,
    pub number: u8,
    /// The node is disconnected from the network; reboots do not change that.
    #[serde(default, rename = "cut")]
    pub partitioned: bool,
    #[serde(default)]
    pub options: NodeOptions,
}

impl NodeRecord {
    pub fn addresses(&self) -> NodeAddresses {
        NodeAddresses(self.number)
    }
}

impl LabRecord {
    /// The programs that the lab needs.
    pub fn programs(&self) -> Result<Programs> {
        Programs::prepare_set(if self.kubevirt { ProgramSet::WithKubeVirt } else { ProgramSet::Base })
    }

    /// Adds a node with the lowest free number.
    pub fn add(&mut self, options: impl FnOnce(u8) -> NodeOptions) -> Result<NodeRecord> {
        let number = (1..=MAX_NODES).find(|n| self.nodes.iter().all(|node| node.number != *n));
        let number = number.with_context(|| format!("a lab has at most {MAX_NODES} nodes"))?;
        let name = format!("node-{number}");
        let node = NodeRecord { name, number, partitioned: false, options: options(number) };
        self.nodes.push(node.clone());
        Ok(node)
    }
}
