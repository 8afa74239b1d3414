//! The kind `BridgeNetwork`: an L2 network on the nodes.

use serde::{Deserialize, Serialize};

#[cfg(feature = "kube")]
use crate::list_schema;
use crate::{
    Condition, IfName, LabelSelector,
    digest::digest,
    ipam::{IpamSpec, IpamStatus},
};

/// The longest name of a BridgeNetwork; it becomes part of a label's key.
pub const MAX_NETWORK_NAME: usize = 50;
/// The users and the nodes that are named at most.
pub const MAX_STATUS_ENTRIES: usize = 10;
/// The conditions that a network may have, ours and those of others.
pub const MAX_CONDITIONS: usize = 16;
/// The namespaces that a network may keep an attachment in.
pub const MAX_NAMESPACES: usize = 256;
/// The MTU of a network that says nothing and has nothing to fit into.
pub const DEFAULT_MTU: i32 = 1500;
/// The UDP port of VXLAN that IANA gave.
pub const DEFAULT_VXLAN_PORT: i32 = 4789;

/// Held as long as anything uses the network. Once it is gone from an object that is being deleted, nodes undo.
pub const FINALIZER_USERS: &str = "patchbay.dev/users";
/// Held as long as any node has links of the network.
pub const FINALIZER_NODES: &str = "patchbay.dev/nodes";
/// A node has this label, followed by the network's name, while the network is ready on it.
pub const READY_LABEL_PREFIX: &str = "network.patchbay.dev/";
/// The label on an attachment (NAD) that names the network which keeps it.
pub const NAD_NETWORK_LABEL: &str = "patchbay.dev/network";
/// The annotation on an attachment (NAD) with the UID of the network which keeps it.
pub const NAD_UID_ANNOTATION: &str = "patchbay.dev/network-uid";
/// The annotation on an attachment (NAD) that says where it was made: a copy of it elsewhere is somebody else's.
pub const NAD_ORIGIN_ANNOTATION: &str = "patchbay.dev/place";
/// The name of the CNI plugin that joins pods to a network.
pub const BRIDGE_PLUGIN: &str = "patchbay-bridge";

// A line of text is a line for `kubectl explain` too, so these are long.
/// What the network should be.
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
        doc = "BridgeNetwork is an L2 network: a Linux bridge that is kept up on every selected node, the NetworkAttachmentDefinitions by which pods and virtual machines join it, and protection from being deleted while they use it.",
        validation = Rule::new("size(self.metadata.name) <= 50 && self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')").message("the name of a BridgeNetwork has at most 50 characters: a-z, 0-9 and '-', no dot, and no '-' at either end"),
        validation = Rule::new("!has(self.spec.bridge) || !has(self.spec.overlay) || self.spec.bridge != 'vx-' + self.metadata.name").message("spec.bridge has the name of the network's own VXLAN device: choose another"),
        validation = Rule::new("has(self.spec.bridge) || !has(self.spec.uplink) || self.spec.uplink != 'br-' + self.metadata.name").message("spec.uplink has the name of the network's own bridge: set spec.bridge to another name"),
        printcolumn = r#"{"name": "Bridge", "type": "string", "jsonPath": ".status.bridge", "description": "The bridge on the nodes"}"#,
        printcolumn = r#"{"name": "MTU", "type": "integer", "jsonPath": ".status.mtu", "description": "The largest packet that the network carries"}"#,
        printcolumn = r#"{"name": "Nodes", "type": "string", "jsonPath": ".status.nodes.summary", "description": "Ready nodes of selected nodes"}"#,
        printcolumn = r#"{"name": "Users", "type": "integer", "jsonPath": ".status.users.count", "description": "Pods, virtual machines and workloads that use it"}"#,
        printcolumn = r#"{"name": "Ready", "type": "string", "jsonPath": ".status.conditions[?(@.type==\"Ready\")].status", "description": "Whether it works on every selected node"}"#,
        printcolumn = r#"{"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}"#
    )
)]
#[cfg_attr(
    feature = "kube",
    schemars(extend("x-kubernetes-validations" = [
        {"rule": "has(self.bridge) == has(oldSelf.bridge) && (!has(self.bridge) || self.bridge == oldSelf.bridge)",
         "message": "spec.bridge cannot be changed, set or unset later: make another BridgeNetwork", "fieldPath": ".bridge"},
        {"rule": "has(self.overlay) == has(oldSelf.overlay)",
         "message": "spec.overlay cannot be set or unset later: make another BridgeNetwork"},
        {"rule": "!has(self.overlay) || !has(oldSelf.overlay) || self.overlay.vni == oldSelf.overlay.vni",
         "message": "spec.overlay.vni cannot be changed: make another BridgeNetwork"},
        {"rule": "(has(self.attachment) && has(self.attachment.name)) == (has(oldSelf.attachment) && has(oldSelf.attachment.name)) && (!has(self.attachment) || !has(self.attachment.name) || self.attachment.name == oldSelf.attachment.name)",
         "message": "spec.attachment.name cannot be changed, set or unset later: make another BridgeNetwork"},
        {"rule": "!has(self.uplink) || !has(self.overlay)",
         "message": "spec.uplink and spec.overlay exclude each other: frames would come back over the other way"},
        {"rule": "!has(self.uplink) || !has(self.bridge) || self.uplink != self.bridge",
         "message": "spec.uplink and spec.bridge are two links and need two names"},
        {"rule": "!has(self.ipam) || !has(self.mtu) || self.mtu >= 1280 || self.ipam.subnets.all(net, !net.contains(':'))",
         "message": "IPv6 needs an mtu of at least 1280", "fieldPath": ".mtu"},
    ]))
)]
#[serde(rename_all = "camelCase")]
pub struct BridgeNetworkSpec {
    /// The name of the bridge on the nodes, at most 15 characters. Derived from the network's name if it is not set. Cannot be changed, set or unset later.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(with = "Option<String>", length(min = 1, max = 15), regex(pattern = r"^[a-zA-Z0-9][a-zA-Z0-9_.-]*$"), extend("x-kubernetes-validations" = [{"rule": "!(self in ['all', 'default', 'lo', 'bonding_masters'])", "message": "this name means something else to the kernel; choose another"}])))]
    pub bridge: Option<IfName>,
    /// The largest packet that the network should carry, in bytes. The effective value is in status.mtu: an overlay cannot carry more than the link between the nodes less 50 bytes (70 over IPv6).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(range(min = 576, max = 9216)))]
    pub mtu: Option<i32>,
    /// The nodes that get the network, by their labels; every node if it is not set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(extend("x-kubernetes-validations" = [{"rule": "(!has(self.matchLabels) || self.matchLabels.all(key, !key.startsWith('network.patchbay.dev/'))) && (!has(self.matchExpressions) || self.matchExpressions.all(one, !one.key.startsWith('network.patchbay.dev/')))", "message": "labels that begin with network.patchbay.dev/ say where networks work and cannot select nodes for one: choose other labels"}])))]
    pub node_selector: Option<LabelSelector>,
    /// A NIC that every selected node gives to the bridge as a port, so that pods reach what is behind it. It must carry nothing that the node needs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(with = "Option<String>", length(min = 1, max = 15), regex(pattern = r"^[a-zA-Z0-9][a-zA-Z0-9_.-]*$"), extend("x-kubernetes-validations" = [{"rule": "self != 'lo'", "message": "the loopback is no uplink"}])))]
    pub uplink: Option<IfName>,
    /// Connects the bridges of the selected nodes with VXLAN over the nodes' own network. It is not encrypted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overlay: Option<Overlay>,
    /// The NetworkAttachmentDefinitions to keep, by which pods and virtual machines join.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attachment: Option<AttachmentSpec>,
    /// The addresses that pods get. Without it the network hands out none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipam: Option<IpamSpec>,
}

/// A VXLAN between the selected nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Overlay {
    /// The number of the VXLAN, unlike that of any other on the same port. Cannot be changed.
    #[cfg_attr(feature = "kube", schemars(range(min = 1, max = 16_777_215)))]
    pub vni: i32,
    /// The UDP port that nodes send the frames to.
    #[serde(default = "default_port")]
    #[cfg_attr(feature = "kube", schemars(range(min = 1, max = 65535)))]
    pub port: i32,
}

fn default_port() -> i32 {
    DEFAULT_VXLAN_PORT
}

/// The NetworkAttachmentDefinitions of a network.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct AttachmentSpec {
    /// The name of the NetworkAttachmentDefinitions; the network's name if it is not set. Cannot be changed, set or unset later.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(
        feature = "kube",
        schemars(length(min = 1, max = 63), regex(pattern = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))
    )]
    pub name: Option<String>,
    /// The namespaces that get one.
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
    /// The bridge's name on the nodes.
    pub fn bridge_name(&self, network: &str) -> IfName {
        self.bridge.clone().unwrap_or_else(|| link_name("br", network))
    }

    /// The VXLAN device's name on the nodes.
    pub fn vxlan_name(network: &str) -> IfName {
        link_name("vx", network)
    }

    /// The name of the NetworkAttachmentDefinitions.
    pub fn attachment_name<'a>(&'a self, network: &'a str) -> &'a str {
        self.attachment.as_ref().and_then(|attachment| attachment.name.as_deref()).unwrap_or(network)
    }

    /// The namespaces that have one.
    pub fn namespaces(&self) -> &[String] {
        self.attachment.as_ref().map_or(&[], |attachment| &attachment.namespaces)
    }
}

/// `br-blue`, or, for a name that is too long, its beginning and a digest of all of it.
fn link_name(prefix: &str, network: &str) -> IfName {
    let whole = format!("{prefix}-{network}");
    whole.parse().unwrap_or_else(|_| {
        let head: String = network.chars().filter(char::is_ascii_alphanumeric).take(5).collect();
        let name = format!("{prefix}-{head}-{:06x}", digest([network]) & 0x00ff_ffff);
        name.parse().expect("15 letters, digits and dashes are a name")
    })
}

/// What became of the network.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct BridgeNetworkStatus {
    /// The generation of the spec that this status speaks of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub observed_generation: Option<i64>,
    /// The name of the bridge on the nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 15)))]
    pub bridge: Option<String>,
    /// The largest packet that the network carries, in bytes: what the bridge, the attachments and new pods have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub mtu: Option<i32>,
    /// On how many nodes it works.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nodes: Option<NodeCounts>,
    /// The first ten nodes on which it does not work, with the reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(transform = list_schema::map("node", MAX_STATUS_ENTRIES)))]
    pub not_ready: Vec<NotReadyNode>,
    /// Who uses it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub users: Option<NetworkUsers>,
    /// Running pods whose interface still has the smaller MTU that the network had when they started; they get the new one when they are made anew.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub pods_with_old_mtu: Option<i32>,
    /// How many addresses it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipam: Option<IpamStatus>,
    /// Ready: it works on every selected node and its attachments are in place. InUse: somebody uses it, which deletion waits for. Conflict: something else has a name or number that it needs. MtuReduced: spec.mtu is more than the nodes can carry. AddressesExhausted: no address is left. SubnetsDraining: pods still have addresses that spec.ipam does not name any more.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(transform = list_schema::map("type", MAX_CONDITIONS)))]
    pub conditions: Vec<Condition>,
}

/// On how many nodes a network works.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct NodeCounts {
    /// The nodes that the selector selects.
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub desired: i32,
    /// Those of them on which it works.
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub ready: i32,
    /// Both, as ready/desired.
    #[cfg_attr(feature = "kube", schemars(length(max = 32)))]
    pub summary: String,
}

/// A node on which a network does not work.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct NotReadyNode {
    /// The node.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 253)))]
    pub node: String,
    /// Why, in one word for programs.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 64)))]
    pub reason: String,
    /// Why, and what to do about it, for people.
    #[cfg_attr(feature = "kube", schemars(length(max = 1024)))]
    pub message: String,
}

/// Who uses a network.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct NetworkUsers {
    /// How many.
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub count: i32,
    /// The first ten of them, as Kind namespace/name.
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
    fn links_are_named_after_the_network_and_never_over_15_bytes() {
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
    fn what_is_set_wins_over_what_is_derived() {
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
    fn the_rules_know_the_names_that_are_derived() {
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
