//! What users of Patchbay write and read: kinds, names and formats.
//!
//! Plain data that knows no client, clock or kernel. The feature `kube` adds what makes the kinds API
//! resources; without it everything here is serde structs and parsers.
#![warn(missing_docs)]

pub mod attachment;
pub mod bridgenetwork;
pub mod chain;
pub mod condition;
pub mod digest;
pub mod ifname;
pub mod ipam;
pub mod ipblock;
#[cfg(feature = "kube")]
mod list;
pub mod mac;
pub mod names;
pub mod nodenetwork;
pub mod pattern;
pub mod selection;
pub mod selector;

#[cfg(feature = "kube")]
pub use attachment::NetworkAttachmentDefinition;
#[cfg(feature = "kube")]
pub use bridgenetwork::BridgeNetwork;
pub use bridgenetwork::{BridgeNetworkSpec, BridgeNetworkStatus};
pub use chain::Chain;
pub use condition::{Condition, ConditionStatus};
pub use ifname::IfName;
#[cfg(feature = "kube")]
pub use ipblock::IPBlock;
pub use ipblock::{IPBlockSpec, IPBlockStatus};
pub use mac::Mac;
#[cfg(feature = "kube")]
pub use nodenetwork::NodeNetwork;
pub use nodenetwork::{Interface, LinkState, NetworkOnNode, NodeNetworkStatus, Vtep};
pub use pattern::{Pattern, Patterns};
pub use selector::LabelSelector;

/// The API group of every kind of ours.
pub const GROUP: &str = "patchbay.dev";
/// The version of every kind of ours.
pub const VERSION: &str = "v1alpha1";
/// Where the programs run.
pub const NAMESPACE: &str = "patchbay-system";
/// The field manager of `patchbay node`.
pub const NODE_MANAGER: &str = "patchbay.dev/node";
/// The field manager of `patchbay controller`.
pub const CONTROLLER_MANAGER: &str = "patchbay.dev/controller";
/// What the alias of a link made by Patchbay begins with.
pub const LINK_ALIAS: &str = "patchbay/";

/// Every kind of ours, in the order in which the install manifest lists them.
#[cfg(feature = "kube")]
pub fn crds()
-> Vec<k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition> {
    use kube::CustomResourceExt as _;

    vec![BridgeNetwork::crd(), IPBlock::crd(), NodeNetwork::crd()]
}
