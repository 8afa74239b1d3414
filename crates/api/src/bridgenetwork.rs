//! The kind `BridgeNetwork`: an L2 network on the selected nodes.

use serde::{Deserialize, Serialize};

#[cfg(feature = "kube")]
use crate::list_schema;
use crate::{
    Condition, IfName, LabelSelector,
    digest::digest,
    ipam::{IpamSpec, IpamStatus},
};

/// The maximum length of a BridgeNetwork's name, which becomes part of a label key.
pub const MAX_NETWORK_NAME: usize = 50;
/// The maximum number of users, and of nodes, that the status names.
pub const MAX_STATUS_ENTRIES: usize = 10;
/// The maximum number of conditions, those of other controllers included.
pub const MAX_CONDITIONS: usize = 16;
/// The maximum number of namespaces with a NAD of the network.
pub const MAX_NAMESPACES: usize = 256;
/// The UDP port that IANA assigned to VXLAN.
pub const DEFAULT_VXLAN_PORT: i32 = 4789;

/// Finalizer that the controller keeps while the network has users. When the controller has removed it from a network
/// that is being deleted, nodes delete their links.
pub const FINALIZER_USERS: &str = "patchbay.dev/users";
/// Finalizer that the controller keeps while any node has links of the network.
pub const FINALIZER_NODES: &str = "patchbay.dev/nodes";
/// Prefix of a Node label. The name of the network follows; the label is present while the network is ready on the node.
pub const READY_LABEL_PREFIX: &str = "network.patchbay.dev/";
/// Label on a NAD: the name of the BridgeNetwork that manages it.
pub const NAD_NETWORK_LABEL: &str = "patchbay.dev/network";
/// Annotation on a NAD: the UID of the BridgeNetwork that manages it.
pub const NAD_UID_ANNOTATION: &str = "patchbay.dev/network-uid";
/// Annotation on a NAD: a digest of where the controller created it. It does not match on a copy, which is not managed.
pub const NAD_ORIGIN_ANNOTATION: &str = "patchbay.dev/place";
/// The name of the CNI plugin that attaches pods to a network.
pub const BRIDGE_PLUGIN: &str = "patchbay-bridge";

// Doc comments of CRD fields are not wrapped, because `kubectl explain` keeps the line breaks.
/// The desired state of the network.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::CustomResource, schemars::JsonSchema))]
#[cfg_attr(
    feature = "kube",
    kube(
        group = "patchbay.dev",
        version = "v1alpha1",
        kind = "BridgeNetwork",
        plural = "bridgenetworks",
        shortname = "bnet",
        category = "patchbay",
        status = "BridgeNetworkStatus",
        derive = "PartialEq",
        doc = "BridgeNetwork is an L2 network for pods and virtual machines. Patchbay creates and repairs a Linux bridge on every selected node, manages the NetworkAttachmentDefinitions by which workloads attach to it, and prevents its deletion while it is in use.",
        validation = Rule::new("size(self.metadata.name) <= 50 && self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')").message("the name of a BridgeNetwork has at most 50 characters: a-z, 0-9 and '-', without a dot and without '-' at either end"),
        validation = Rule::new("!has(self.spec.bridge) || !has(self.spec.overlay) || self.spec.bridge != 'vx-' + self.metadata.name").message("spec.bridge is the name of the network's VXLAN device; choose another name"),
        validation = Rule::new("has(self.spec.bridge) || !has(self.spec.uplink) || self.spec.uplink != 'br-' + self.metadata.name").message("spec.uplink is the name of the network's bridge; set spec.bridge to another name"),
        printcolumn = r#"{"name": "Bridge", "type": "string", "jsonPath": ".status.bridge", "description": "Name of the bridge on the nodes"}"#,
        printcolumn = r#"{"name": "MTU", "type": "integer", "jsonPath": ".status.mtu", "description": "Effective MTU in bytes"}"#,
        printcolumn = r#"{"name": "Nodes", "type": "string", "jsonPath": ".status.nodes.summary", "description": "Ready nodes / selected nodes"}"#,
        printcolumn = r#"{"name": "Users", "type": "integer", "jsonPath": ".status.users.count", "description": "Number of pods, virtual machines and workloads that use the network"}"#,
        printcolumn = r#"{"name": "Ready", "type": "string", "jsonPath": ".status.conditions[?(@.type==\"Ready\")].status", "description": "Whether the network is ready on every selected node"}"#,
        printcolumn = r#"{"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}"#
    )
)]
#[cfg_attr(
    feature = "kube",
    schemars(extend("x-kubernetes-validations" = [
        {"rule": "has(self.bridge) == has(oldSelf.bridge) && (!has(self.bridge) || self.bridge == oldSelf.bridge)",
         "message": "spec.bridge cannot be changed, set or unset later; create another BridgeNetwork", "fieldPath": ".bridge"},
        {"rule": "has(self.overlay) == has(oldSelf.overlay)",
         "message": "spec.overlay cannot be set or unset later; create another BridgeNetwork"},
        {"rule": "!has(self.overlay) || !has(oldSelf.overlay) || self.overlay.vni == oldSelf.overlay.vni",
         "message": "spec.overlay.vni cannot be changed; create another BridgeNetwork"},
        {"rule": "(has(self.attachment) && has(self.attachment.name)) == (has(oldSelf.attachment) && has(oldSelf.attachment.name)) && (!has(self.attachment) || !has(self.attachment.name) || self.attachment.name == oldSelf.attachment.name)",
         "message": "spec.attachment.name cannot be changed, set or unset later; create another BridgeNetwork"},
        {"rule": "!has(self.uplink) || !has(self.overlay)",
         "message": "spec.uplink and spec.overlay are mutually exclusive: together they would form a bridging loop"},
        {"rule": "!has(self.uplink) || !has(self.bridge) || self.uplink != self.bridge",
         "message": "spec.uplink and spec.bridge must have different names"},
        {"rule": "!has(self.ipam) || !has(self.mtu) || self.mtu >= 1280 || self.ipam.subnets.all(net, !net.contains(':'))",
         "message": "IPv6 subnets need an mtu of at least 1280", "fieldPath": ".mtu"},
    ]))
)]
#[serde(rename_all = "camelCase")]
pub struct BridgeNetworkSpec {
    /// The name of the Linux bridge on the nodes, at most 15 characters. Defaults to br-NAME, shortened with a hash if it is too long. Immutable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(with = "Option<String>", length(min = 1, max = 15), regex(pattern = r"^[a-zA-Z0-9][a-zA-Z0-9_.-]*$"), extend("x-kubernetes-validations" = [{"rule": "!(self in ['all', 'default', 'lo', 'bonding_masters'])", "message": "this name is reserved by the kernel; choose another name"}])))]
    pub bridge: Option<IfName>,
    /// The desired MTU in bytes. Defaults to 1500, or with an overlay to the largest possible value. The effective value is in status.mtu: an overlay is limited to the MTU of the links between the nodes minus 50 bytes (70 over IPv6).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(range(min = 576, max = 9216)))]
    pub mtu: Option<i32>,
    /// Selects the nodes that get the network by their labels. If not set, all nodes get it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(extend("x-kubernetes-validations" = [{"rule": "(!has(self.matchLabels) || self.matchLabels.all(key, !key.startsWith('network.patchbay.dev/'))) && (!has(self.matchExpressions) || self.matchExpressions.all(one, !one.key.startsWith('network.patchbay.dev/')))", "message": "labels with the prefix network.patchbay.dev/ are set by Patchbay and cannot select nodes; use other labels"}])))]
    pub node_selector: Option<LabelSelector>,
    /// The NIC that becomes a port of the bridge on every selected node, so that pods reach the network behind it. The node must not use this NIC for its own traffic. Mutually exclusive with overlay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(with = "Option<String>", length(min = 1, max = 15), regex(pattern = r"^[a-zA-Z0-9][a-zA-Z0-9_.-]*$"), extend("x-kubernetes-validations" = [{"rule": "self != 'lo'", "message": "the loopback cannot be an uplink"}])))]
    pub uplink: Option<IfName>,
    /// Connects the bridges of the selected nodes by VXLAN over the node network. Traffic is not encrypted. Mutually exclusive with uplink. Cannot be set or unset later.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overlay: Option<Overlay>,
    /// The NetworkAttachmentDefinitions that Patchbay manages for the network, by which pods and virtual machines attach to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attachment: Option<AttachmentSpec>,
    /// The IP addresses that pods get on the network. If not set, Patchbay allocates none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipam: Option<IpamSpec>,
}

/// A VXLAN overlay between the selected nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Overlay {
    /// The VXLAN network identifier (VNI). It must be unique among the networks on the same port. Immutable.
    #[cfg_attr(feature = "kube", schemars(range(min = 1, max = 16_777_215)))]
    pub vni: i32,
    /// The UDP destination port of the VXLAN packets.
    #[serde(default = "default_port")]
    #[cfg_attr(feature = "kube", schemars(range(min = 1, max = 65535)))]
    pub port: i32,
}

fn default_port() -> i32 {
    DEFAULT_VXLAN_PORT
}

/// The NetworkAttachmentDefinitions that Patchbay manages for a network.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct AttachmentSpec {
    /// The name of the NetworkAttachmentDefinitions. Defaults to the name of the network. Immutable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(
        feature = "kube",
        schemars(length(min = 1, max = 63), regex(pattern = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))
    )]
    pub name: Option<String>,
    /// The namespaces that get a NetworkAttachmentDefinition.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(with = "Vec<NamespaceName>", transform = list_schema::set(MAX_NAMESPACES)))]
    pub namespaces: Vec<String>,
}

/// The name of a namespace.
#[cfg(feature = "kube")]
#[derive(schemars::JsonSchema)]
#[schemars(transparent)]
#[expect(dead_code, reason = "only its schema is used")]
struct NamespaceName(
    #[schemars(length(min = 1, max = 63), regex(pattern = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))] String,
);

impl BridgeNetworkSpec {
    /// The name of the bridge on the nodes.
    pub fn bridge_name(&self, network: &str) -> IfName {
        self.bridge.clone().unwrap_or_else(|| link_name("br", network))
    }

    /// The name of the VXLAN device on the nodes.
    pub fn vxlan_name(network: &str) -> IfName {
        link_name("vx", network)
    }

    /// The name of the NetworkAttachmentDefinitions.
    pub fn attachment_name<'a>(&'a self, network: &'a str) -> &'a str {
        self.attachment.as_ref().and_then(|attachment| attachment.name.as_deref()).unwrap_or(network)
    }

    /// The namespaces with a NetworkAttachmentDefinition.
    pub fn namespaces(&self) -> &[String] {
        self.attachment.as_ref().map_or(&[], |attachment| &attachment.namespaces)
    }
}

/// `br-blue`, or for a name that is too long its start and a digest of the whole name.
fn link_name(prefix: &str, network: &str) -> IfName {
    let whole = format!("{prefix}-{network}");
    whole.parse().unwrap_or_else(|_| {
        let head: String = network.chars().filter(char::is_ascii_alphanumeric).take(5).collect();
        let name = format!("{prefix}-{head}-{:06x}", digest([network]) & 0x00ff_ffff);
        name.parse().expect("15 letters, digits and dashes are a valid name")
    })
}

/// The observed state of the network.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct BridgeNetworkStatus {
    /// The generation of the spec that the controller has acted on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub observed_generation: Option<i64>,
    /// The name of the bridge on the nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 15)))]
    pub bridge: Option<String>,
    /// The effective MTU in bytes, of the bridge, the NetworkAttachmentDefinitions and new pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub mtu: Option<i32>,
    /// The request that mtu was fitted from. The MTU of an overlay rises only when spec.mtu differs from it. Absent in a status that an older version wrote: that MTU does not rise either.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu_fitted_from: Option<MtuFittedFrom>,
    /// On how many nodes the network is ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nodes: Option<NodeCounts>,
    /// The first ten nodes on which the network is not ready, with the reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(transform = list_schema::map("node", MAX_STATUS_ENTRIES)))]
    pub not_ready: Vec<NotReadyNode>,
    /// The pods, virtual machines and workloads that use the network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub users: Option<NetworkUsers>,
    /// The number of running pods whose interface still has the smaller MTU that the network had when they started. Recreate them to apply the new MTU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub pods_with_old_mtu: Option<i32>,
    /// How many addresses the network has, by IP family.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipam: Option<IpamStatus>,
    /// Ready: the network is ready on every selected node and its NetworkAttachmentDefinitions are in place. InUse: the network has users, and its deletion waits for them. Conflict: another network or link has a name, NIC or VNI that the network needs. MtuReduced: spec.mtu is larger than status.mtu; the message also says if the nodes can carry more than status.mtu. AddressesExhausted: no address is free. SubnetsDraining: pods still have addresses that spec.ipam no longer contains.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(transform = list_schema::map("type", MAX_CONDITIONS)))]
    pub conditions: Vec<Condition>,
}

/// The request that the MTU of a network was fitted from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct MtuFittedFrom {
    /// The value of spec.mtu; absent if it was not set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub spec_mtu: Option<i32>,
}

/// On how many nodes a network is ready.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct NodeCounts {
    /// The number of selected nodes.
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub desired: i32,
    /// The number of selected nodes on which the network is ready.
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub ready: i32,
    /// Both numbers, as ready/desired.
    #[cfg_attr(feature = "kube", schemars(length(max = 32)))]
    pub summary: String,
}

/// A node on which a network is not ready.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct NotReadyNode {
    /// The name of the node.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 253)))]
    pub node: String,
    /// The reason, as a CamelCase word for programs.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 64)))]
    pub reason: String,
    /// The details of the reason and what to do about it, for people.
    #[cfg_attr(feature = "kube", schemars(length(max = 1024)))]
    pub message: String,
}

/// The pods, virtual machines and workloads that use a network.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct NetworkUsers {
    /// The number of users.
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub count: i32,
    /// The first ten users, as Kind namespace/name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(with = "Vec<NetworkUserName>", transform = list_schema::atomic(MAX_STATUS_ENTRIES)))]
    pub first: Vec<String>,
}

/// A user of a network.
#[cfg(feature = "kube")]
#[derive(schemars::JsonSchema)]
#[schemars(transparent)]
#[expect(dead_code, reason = "only its schema is used")]
struct NetworkUserName(#[schemars(length(min = 1, max = 512))] String);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_named_after_the_network_with_at_most_15_bytes() {
        let spec = BridgeNetworkSpec::default();
        assert_eq!(spec.bridge_name("blue").as_str(), "br-blue");
        assert_eq!(spec.bridge_name("exactly-12-x").as_str(), "br-exactly-12-x");
        assert_eq!(BridgeNetworkSpec::vxlan_name("blue").as_str(), "vx-blue");
        let long = spec.bridge_name("a-network-with-a-long-name");
        assert_eq!((long.as_str().len(), &long.as_str()[..9]), (15, "br-anetw-"));
        assert_ne!(long, spec.bridge_name("a-network-with-a-long-name-too"));
        assert_eq!(spec.bridge_name(&"x".repeat(MAX_NETWORK_NAME)).as_str().len(), 15);
    }

    #[test]
    fn fields_of_the_spec_override_derived_names() {
        let spec: BridgeNetworkSpec = serde_json::from_str(
            r#"{"bridge": "lan", "overlay": {"vni": 7}, "attachment": {"name": "nad", "namespaces": ["a"]}}"#,
        )
        .unwrap();
        assert_eq!(spec.bridge_name("blue").as_str(), "lan");
        assert_eq!(spec.overlay, Some(Overlay { vni: 7, port: 4789 }));
        assert_eq!((spec.attachment_name("blue"), spec.namespaces()), ("nad", &["a".to_owned()][..]));
        assert_eq!(BridgeNetworkSpec::default().attachment_name("blue"), "blue");
    }

    #[cfg(feature = "kube")]
    #[test]
    fn the_cel_rules_use_the_derived_names() {
        use kube::CustomResourceExt as _;
        let text = serde_json::to_string(&BridgeNetwork::crd()).unwrap();
        for rule in [
            "self.spec.bridge != 'vx-' + self.metadata.name",
            "self.spec.uplink != 'br-' + self.metadata.name",
        ] {
            assert!(text.contains(rule), "{rule}");
        }
        assert!(text.contains(&format!("!key.startsWith('{READY_LABEL_PREFIX}')")));
        assert!(text.contains(&format!("!one.key.startsWith('{READY_LABEL_PREFIX}')")));
    }
}
