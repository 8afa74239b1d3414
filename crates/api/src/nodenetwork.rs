//! The kind `NodeNetwork`: the observed network state of one node.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

#[cfg(feature = "kube")]
use crate::list_schema;
use crate::{Condition, Mac};

/// The maximum number of listed links of a node. With [`MAX_TOTAL_ADDRESSES`] the largest object stays below 512 KiB,
/// its managedFields included: a third of what the API server stores.
pub const MAX_INTERFACES: usize = 512;
/// The maximum number of listed addresses of one link.
pub const MAX_ADDRESSES: usize = 64;
/// The maximum number of listed addresses of all links together.
pub const MAX_TOTAL_ADDRESSES: usize = 2048;
/// The maximum length of a listed link name. A name of 15 bytes has up to 60 characters if all are escaped.
pub const MAX_INTERFACE_NAME: usize = 63;
/// The maximum number of networks of a node.
pub const MAX_NETWORKS: usize = 512;
/// The maximum length of the message about a network.
pub const MAX_MESSAGE: usize = 1024;
/// The maximum number of addresses of IPAMClaims that a node lists for one network.
pub const MAX_CLAIM_ADDRESSES: usize = 1024;
/// The maximum number of pods that a node lists for a network that is being deleted.
pub const MAX_ADDRESS_USERS: usize = 10;

/// Empty: a NodeNetwork has only a status.
#[cfg(feature = "kube")]
#[derive(
    Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, kube::CustomResource, schemars::JsonSchema,
)]
#[kube(
    group = "patchbay.dev",
    version = "v1alpha1",
    kind = "NodeNetwork",
    plural = "nodenetworks",
    shortname = "nnet",
    category = "patchbay",
    no_spec,
    status = "NodeNetworkStatus",
    derive = "PartialEq",
    doc = "NodeNetwork shows the network state of one node: its links and its bridge networks. The Patchbay daemon of each node writes one with the name of the node, and it is deleted together with the Node. It has no spec; do not edit it.",
    printcolumn = r#"{"name": "VTEP", "type": "string", "jsonPath": ".status.vtep.address", "description": "Address of the VXLAN tunnel endpoint"}"#,
    printcolumn = r#"{"name": "Uplink", "type": "string", "jsonPath": ".status.interfaces[?(@.defaultRoute==true)].name", "description": "Link of the default route"}"#,
    printcolumn = r#"{"name": "Ready", "type": "string", "jsonPath": ".status.conditions[?(@.type==\"Ready\")].status", "description": "Whether the status is complete and current"}"#,
    printcolumn = r#"{"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}"#
)]
pub struct NodeNetworkSpec {}

/// The network state that the daemon of the node observes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct NodeNetworkStatus {
    // Doc comments of CRD fields are not wrapped, because `kubectl explain` keeps the line breaks.
    /// The VXLAN tunnel endpoint (VTEP) of this node, to which other nodes send the traffic of overlay networks. Not set if no link of the node has an InternalIP of the Node; the condition VtepFound then says what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vtep: Option<Vtep>,
    /// The links that a network can use and the links that Patchbay created, sorted by name. The loopback, links of pods and links of other network software are left out (`patchbay node --ignore-interfaces`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(transform = list_schema::map("name", MAX_INTERFACES)))]
    pub interfaces: Vec<Interface>,
    /// The bridge networks that select this node or of which it still has links, sorted by UID. A network is listed from before its first link is created until its last link is deleted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(transform = list_schema::map("uid", MAX_NETWORKS)))]
    pub networks: Vec<NetworkOnNode>,
    /// The bridge networks that are being deleted, sorted by UID, also those that do not select this node. The node allocates no more addresses of a listed network. The deletion continues when all nodes list the network with no address in use.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    // An apply that removes the last item of a map can leave null, which the schema forbids.
    #[cfg_attr(feature = "kube", schemars(transform = list_schema::atomic(MAX_NETWORKS)))]
    pub closed_networks: Vec<ClosedNetwork>,
    /// The addresses of IPAMClaims that interfaces on this node have, sorted by the UID of the network. Not set while the daemon does not know them, or if there are too many to list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(transform = list_schema::atomic(MAX_NETWORKS)))]
    pub claim_addresses: Option<Vec<ClaimAddresses>>,
    /// Ready: the status is complete and current. VtepFound: this node can be part of overlay networks. RuntimeFound: the daemon found the container runtime and releases addresses of deleted sandboxes. StateWritable: the daemon can write to its state directory; while it cannot, pods can be deleted but get no new addresses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(transform = list_schema::map("type", 16)))]
    pub conditions: Vec<Condition>,
}

/// The VXLAN tunnel endpoint of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Vtep {
    /// The first InternalIP of the Node that one of its links has.
    #[cfg_attr(
        feature = "kube",
        schemars(
            with = "String",
            length(max = 45),
            extend("x-kubernetes-validations" = [{"rule": "isIP(self)", "message": "must be an IP address"}])
        )
    )]
    pub address: IpAddr,
    /// The name of the link that has this address.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 63)))]
    pub interface: String,
    /// The MTU of this link, in bytes, or, if this link is the loopback interface, the smallest MTU of the links that lead to the other nodes. An overlay has an MTU that is 50 bytes smaller (70 over IPv6).
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub mtu: i32,
}

/// One link of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Interface {
    /// The name of the link. Bytes that are not printable text are written as \xNN.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 63)))]
    pub name: String,
    /// The kernel's link type, such as bridge, bond, vlan or veth, or physical for a NIC.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 63)))]
    pub kind: String,
    /// The MAC address, if the link has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(
        feature = "kube",
        schemars(with = "Option<String>", regex(pattern = "^([0-9a-f]{2}:){5}[0-9a-f]{2}$"))
    )]
    pub mac: Option<Mac>,
    /// The MTU, in bytes.
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub mtu: i32,
    /// The operational state.
    pub state: LinkState,
    /// The addresses with their prefix length. IPv6 link-local and temporary addresses are left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(with = "Vec<InterfaceAddress>", transform = list_schema::atomic(MAX_ADDRESSES)))]
    pub addresses: Vec<IpNet>,
    /// The name of the bridge, bond or VRF that this link is a port of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 63)))]
    pub master: Option<String>,
    /// True if a default route of the node (IPv4 or IPv6) uses this link.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub default_route: bool,
}

/// The state of a BridgeNetwork on one node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct NetworkOnNode {
    /// The UID of the BridgeNetwork.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 63)))]
    pub uid: String,
    /// The name of the BridgeNetwork.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 63)))]
    pub name: String,
    /// The generation of the BridgeNetwork that the node has acted on.
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub observed_generation: i64,
    /// Whether the network is ready on this node: its bridge is up, and so is the uplink or VXLAN device.
    pub ready: bool,
    /// The reason, as a CamelCase word for programs.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 64)))]
    pub reason: String,
    /// The details of the reason and what to do about it, for people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[cfg_attr(feature = "kube", schemars(length(max = 1024)))]
    pub message: String,
    /// The name of the bridge.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 15)))]
    pub bridge: String,
    /// The MAC address of the bridge, by which Patchbay recognizes it as its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(
        feature = "kube",
        schemars(with = "Option<String>", regex(pattern = "^([0-9a-f]{2}:){5}[0-9a-f]{2}$"))
    )]
    pub mac: Option<Mac>,
    /// The MTU of the bridge, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub mtu: Option<i32>,
    /// The ports that connect the bridge to other nodes: the uplink or the VXLAN device. Ports of pods are left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(with = "Vec<PortName>", transform = list_schema::atomic(8)))]
    pub ports: Vec<String>,
    /// The number of running pods on this node whose interface still has a smaller MTU than the network.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub pods_with_old_mtu: i32,
}

/// A bridge network that is being deleted, on a node that allocates no more addresses of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct ClosedNetwork {
    /// The UID of the BridgeNetwork.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 63)))]
    pub uid: String,
    /// The name of the BridgeNetwork.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 63)))]
    pub name: String,
    /// The number of interfaces on this node that have addresses of the network, those of IPAMClaims included.
    #[serde(default)]
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub interfaces: i32,
    /// The first of their pods, as namespace/name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(with = "Vec<PodName>", transform = list_schema::atomic(MAX_ADDRESS_USERS)))]
    pub pods: Vec<String>,
    /// The number of address blocks of this node of which the daemon does not know what is in use.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub unverified_blocks: i32,
}

impl ClosedNetwork {
    /// Whether no interface on the node has an address of the network.
    pub fn is_unused(&self) -> bool {
        self.interfaces == 0 && self.unverified_blocks == 0
    }
}

/// The addresses of IPAMClaims of one network that interfaces on a node have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct ClaimAddresses {
    /// The UID of the BridgeNetwork.
    #[serde(rename = "networkUID")]
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 63)))]
    pub network_uid: String,
    /// The addresses, sorted.
    #[cfg_attr(feature = "kube", schemars(with = "Vec<IpAddress>", transform = list_schema::atomic(MAX_CLAIM_ADDRESSES)))]
    pub addresses: Vec<IpAddr>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &i32) -> bool {
    *number == 0
}

/// The name of a port.
#[cfg(feature = "kube")]
#[derive(schemars::JsonSchema)]
#[schemars(transparent)]
#[expect(dead_code, reason = "only its schema is used")]
struct PortName(#[schemars(length(min = 1, max = 63))] String);

/// A pod, as namespace/name.
#[cfg(feature = "kube")]
#[derive(schemars::JsonSchema)]
#[schemars(transparent)]
#[expect(dead_code, reason = "only its schema is used")]
struct PodName(#[schemars(length(max = 512))] String);

/// An IP address.
#[cfg(feature = "kube")]
#[derive(schemars::JsonSchema)]
#[schemars(transparent)]
#[expect(dead_code, reason = "only its schema is used")]
struct IpAddress(#[schemars(length(max = 39))] String);

/// The operational state of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum LinkState {
    /// Up and able to carry packets.
    Up,
    /// Administratively down.
    Down,
    /// Administratively up, but without carrier.
    NoCarrier,
    /// Administratively up, but the lower link is down.
    LowerLayerDown,
    /// Administratively up, but waiting for an external event, such as 802.1X authentication.
    Dormant,
    /// In a test mode that passes no packets.
    Testing,
    /// The hardware is missing.
    NotPresent,
    /// Administratively up; this link type does not report more.
    Unknown,
}

/// An address and its prefix length, such as 10.0.0.1/24.
#[cfg(feature = "kube")]
#[derive(schemars::JsonSchema)]
#[schemars(transparent)]
#[expect(dead_code, reason = "only its schema is used")]
struct InterfaceAddress(#[schemars(length(max = 43), extend("format" = "cidr"))] String);

#[cfg(test)]
#[cfg(feature = "kube")]
mod tests {
    use kube::CustomResourceExt as _;
    use serde_json::{Value, json};

    use super::*;

    fn schema() -> Value {
        let crd = serde_json::to_value(NodeNetwork::crd()).unwrap();
        crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone()
    }

    fn status() -> NodeNetworkStatus {
        NodeNetworkStatus {
            vtep: Some(Vtep { address: "10.0.0.1".parse().unwrap(), interface: "eth0".into(), mtu: 1500 }),
            interfaces: vec![Interface {
                name: "eth0".into(),
                kind: "physical".into(),
                mac: Some("02:00:00:00:00:01".parse().unwrap()),
                mtu: 1500,
                state: LinkState::Up,
                addresses: vec!["10.0.0.1/24".parse().unwrap()],
                master: None,
                default_route: true,
            }],
            networks: Vec::new(),
            closed_networks: Vec::new(),
            claim_addresses: None,
            conditions: vec![Condition {
                r#type: "Ready".into(),
                status: crate::ConditionStatus::True,
                reason: "Published".into(),
                message: String::new(),
                last_transition_time: "2026-01-01T00:00:00Z".parse().unwrap(),
                observed_generation: None,
            }],
        }
    }

    #[test]
    fn serializes_as_camel_case_with_metav1_conditions() {
        assert_eq!(
            serde_json::to_value(status()).unwrap(),
            json!({
                "vtep": {"address": "10.0.0.1", "interface": "eth0", "mtu": 1500},
                "interfaces": [{
                    "name": "eth0", "kind": "physical", "mac": "02:00:00:00:00:01", "mtu": 1500, "state": "Up",
                    "addresses": ["10.0.0.1/24"], "defaultRoute": true,
                }],
                "conditions": [{
                    "type": "Ready", "status": "True", "reason": "Published", "message": "",
                    "lastTransitionTime": "2026-01-01T00:00:00Z",
                }],
            })
        );
    }

    #[test]
    fn a_serialized_object_deserializes_to_the_same() {
        let mut object = NodeNetwork::new("node-1", NodeNetworkSpec {});
        object.status = Some(status());
        let text = serde_json::to_string(&object).unwrap();
        assert_eq!(serde_json::from_str::<NodeNetwork>(&text).unwrap(), object);
        assert!(!text.contains("spec"), "{text}");
    }

    #[test]
    fn the_kind_has_the_group_and_version_of_the_api() {
        use kube::Resource as _;

        assert_eq!(NodeNetwork::group(&()), crate::GROUP);
        assert_eq!(NodeNetwork::version(&()), crate::VERSION);
    }

    #[test]
    fn interfaces_and_conditions_are_maps_by_name_and_type() {
        let status = &schema()["properties"]["status"]["properties"];
        for (list, key) in [("interfaces", "name"), ("conditions", "type")] {
            assert_eq!(status[list]["x-kubernetes-list-type"], "map");
            assert_eq!(status[list]["x-kubernetes-list-map-keys"], json!([key]));
        }
    }

    #[test]
    fn the_schema_has_the_limits_that_the_planner_enforces() {
        let interfaces = schema()["properties"]["status"]["properties"]["interfaces"].clone();
        assert_eq!(interfaces["maxItems"], json!(MAX_INTERFACES));
        let fields = &interfaces["items"]["properties"];
        assert_eq!(fields["addresses"]["maxItems"], json!(MAX_ADDRESSES));
        assert_eq!(fields["name"]["maxLength"], json!(MAX_INTERFACE_NAME));
    }
}
