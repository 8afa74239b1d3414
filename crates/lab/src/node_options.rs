//! What a node runs: its container runtime and its kind of multus.

use serde::{Deserialize, Serialize};

/// The parts of a node that can differ. The default is containerd with the thick multus.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeOptions {
    pub runtime: Runtime,
    pub multus: Multus,
}

/// The container runtime of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Runtime {
    #[default]
    Containerd,
    CriO,
}

/// How multus runs on a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Multus {
    /// A daemon; the CNI plugin is its client.
    #[default]
    Thick,
    /// Only a CNI plugin, with a kubeconfig of its own.
    Thin,
    /// The runtime uses the primary network directly.
    None,
}
