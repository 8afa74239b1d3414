//! The kind `NodeNetwork`: what the network of one node looks like.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

#[cfg(feature = "kube")]
use crate::list_schema;
use crate::{Condition, Mac};

/// The links of a node that are listed at most. With [`MAX_TOTAL_ADDRESSES`] the largest object stays below 512 KiB, a
/// third of what the API server stores, with what it adds itself to say who wrote which field.
pub const MAX_INTERFACES: usize = 512;
/// The addresses of one link that are listed at most.
pub const MAX_ADDRESSES: usize = 64;
/// The addresses of all links together that are listed at most.
pub const MAX_TOTAL_ADDRESSES: usize = 2048;
/// The longest name shown. A name of 15 bytes has up to 60 characters when all of them had to be escaped.
pub const MAX_INTERFACE_NAME: usize = 63;
/// The networks of a node that are listed at most, which is also how many a node takes part in.
pub const MAX_NETWORKS: usize = 512;
/// The longest message about a network.
pub const MAX_MESSAGE: usize = 1024;

/// A NodeNetwork has nothing to ask for: all of it is status.
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
    doc = "NodeNetwork shows what the network of one node looks like. There is one per node, of the same name; the Patchbay daemon of that node writes it, and it goes away together with its Node. It has no spec: there is nothing to edit.",
    printcolumn = r#"{"name": "VTEP", "type": "string", "jsonPath": ".status.vtep.address", "description": "Address that overlays between the nodes use"}"#,
    printcolumn = r#"{"name": "Uplink", "type": "string", "jsonPath": ".status.interfaces[?(@.defaultRoute==true)].name", "description": "Link that carries the default route"}"#,
    printcolumn = r#"{"name": "Ready", "type": "string", "jsonPath": ".status.conditions[?(@.type==\"Ready\")].status", "description": "Whether what is shown is complete"}"#,
    printcolumn = r#"{"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}"#
)]
pub struct NodeNetworkSpec {}

/// What the daemon of the node sees.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct NodeNetworkStatus {
    // A line of text is a line for `kubectl explain` too, so these are long.
    /// The tunnel end point of this node: where the other nodes send the frames of overlay networks. Missing when no InternalIP of the Node is on one of its links; the condition VtepFound then says what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vtep: Option<Vtep>,
    /// The links of the node that a network can use, and those that Patchbay made, sorted by name. The loopback and links of pods and of other network software are left out (`patchbay node --ignore-interfaces`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(transform = list_schema::map("name", MAX_INTERFACES)))]
    pub interfaces: Vec<Interface>,
    /// The bridge networks that this node takes part in, or still has links of, sorted by UID. A network stands here before its first link is made and until its last link is gone.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(transform = list_schema::map("uid", MAX_NETWORKS)))]
    pub networks: Vec<NetworkOnNode>,
    /// Ready: what is shown here is complete and current. VtepFound: this node can take part in overlay networks. RuntimeFound: the daemon found the container runtime and releases addresses of deleted sandboxes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(transform = list_schema::map("type", 16)))]
    pub conditions: Vec<Condition>,
}

/// The tunnel end point of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Vtep {
    /// The first InternalIP of the Node that is on one of its links.
    #[cfg_attr(
        feature = "kube",
        schemars(
            with = "String",
            length(max = 45),
            extend("x-kubernetes-validations" = [{"rule": "isIP(self)", "message": "must be an IP address"}])
        )
    )]
    pub address: IpAddr,
    /// The link that has this address.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 63)))]
    pub interface: String,
    /// The MTU of this link, in bytes. If this link is the loopback interface: the smallest MTU of the links that lead to the other nodes. An overlay has 50 bytes less (70 over IPv6).
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub mtu: i32,
}

/// One link of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Interface {
    /// The name of the link. Bytes that are no readable text are written as \xNN.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 63)))]
    pub name: String,
    /// What sort of link it is, in the kernel's words, such as bridge, bond, vlan or veth; physical for a NIC.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 63)))]
    pub kind: String,
    /// The hardware address, if the link has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(
        feature = "kube",
        schemars(with = "Option<String>", regex(pattern = "^([0-9a-f]{2}:){5}[0-9a-f]{2}$"))
    )]
    pub mac: Option<Mac>,
    /// The largest packet that the link takes, in bytes.
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub mtu: i32,
    /// Whether the link works.
    pub state: LinkState,
    /// The addresses of the link with their prefix length. IPv6 link-local and temporary addresses are left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(with = "Vec<InterfaceAddress>", transform = list_schema::atomic(MAX_ADDRESSES)))]
    pub addresses: Vec<IpNet>,
    /// The bridge, bond or VRF that this link is a port of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 63)))]
    pub master: Option<String>,
    /// True if the node's default route (IPv4 or IPv6) goes over this link.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub default_route: bool,
}

/// A bridge network on one node.
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
    /// Whether the network works on this node: its bridge is up, and so is what connects it with other nodes.
    pub ready: bool,
    /// Why, in one word for programs.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 64)))]
    pub reason: String,
    /// Why, and what to do about it, for people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[cfg_attr(feature = "kube", schemars(length(max = 1024)))]
    pub message: String,
    /// The name of the bridge.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 15)))]
    pub bridge: String,
    /// The hardware address of the bridge, by which it is known as Patchbay's.
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
    /// The ports that connect the bridge with other nodes: the uplink or the VXLAN device. Ports of pods are left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(with = "Vec<PortName>", transform = list_schema::atomic(8)))]
    pub ports: Vec<String>,
    /// Running pods of this node whose interface still has a smaller MTU than the network.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub pods_with_old_mtu: i32,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_zero(number: &i32) -> bool {
    *number == 0
}

/// The name of a port.
#[cfg(feature = "kube")]
#[derive(schemars::JsonSchema)]
#[schemars(transparent)]
#[expect(dead_code, reason = "only its schema is used")]
struct PortName(#[schemars(length(min = 1, max = 63))] String);

/// Whether a link works.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum LinkState {
    /// Set up, and it can carry packets.
    Up,
    /// Set down by an administrator.
    Down,
    /// Set up, but nothing is connected.
    NoCarrier,
    /// Set up, but the link below it does not work.
    LowerLayerDown,
    /// Set up, and waiting for something, such as a login to the switch.
    Dormant,
    /// In a test, no packets pass.
    Testing,
    /// The hardware is missing.
    NotPresent,
    /// Set up; this sort of link does not say more.
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
    fn users_read_camel_case_and_metav1_conditions() {
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
    fn what_is_written_is_read_back_the_same() {
        let mut object = NodeNetwork::new("node-1", NodeNetworkSpec {});
        object.status = Some(status());
        let text = serde_json::to_string(&object).unwrap();
        assert_eq!(serde_json::from_str::<NodeNetwork>(&text).unwrap(), object);
        assert!(!text.contains("spec"), "{text}");
    }

    #[test]
    fn the_kind_is_of_our_group_and_version() {
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
    fn the_limits_in_the_schema_are_the_ones_that_the_planner_keeps() {
        let interfaces = schema()["properties"]["status"]["properties"]["interfaces"].clone();
        assert_eq!(interfaces["maxItems"], json!(MAX_INTERFACES));
        let fields = &interfaces["items"]["properties"];
        assert_eq!(fields["addresses"]["maxItems"], json!(MAX_ADDRESSES));
        assert_eq!(fields["name"]["maxLength"], json!(MAX_INTERFACE_NAME));
    }
}
