//! The kind `IPBlock`: addresses of a network that one node hands out.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

#[cfg(feature = "kube")]
use crate::list_schema;

/// The label with the name of the network.
pub const NETWORK_LABEL: &str = "patchbay.dev/network";
/// A block has this label, followed by the UID of a node, for each node that it concerns.
pub const NODE_ROLE_LABEL_PREFIX: &str = "node.patchbay.dev/";
/// The value of that label for the node that holds it.
pub const HOLDER_ROLE: &str = "holds";
/// The value of that label for the node that lends it.
pub const LENDER_ROLE: &str = "lends";
/// The label of single addresses that are borrowed.
pub const BORROWED_LABEL: &str = "patchbay.dev/borrowed";
/// The addresses that are named at most in each list of a status.
pub const MAX_STATUS_ADDRESSES: usize = 1024;
/// The ranges of free addresses that are told at most.
pub const MAX_SPARE_RANGES: usize = 16;
/// The pods of a range that is taken away that are named at most.
pub const MAX_DRAINING_PODS: usize = 10;

/// Who hands out which addresses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::CustomResource, schemars::JsonSchema))]
#[cfg_attr(
    feature = "kube",
    kube(
        group = "patchbay.dev",
        version = "v1alpha1",
        kind = "IPBlock",
        plural = "ipblocks",
        shortname = "ipb",
        category = "patchbay",
        status = "IPBlockStatus",
        derive = "PartialEq",
        doc = "IPBlock is a range of addresses of a BridgeNetwork that one node hands out to its pods. Nodes make and remove them by themselves: making one is how a node takes the range, and as long as it is there nobody else has it. There is nothing to edit.",
        validation = Rule::new("self.metadata.name == self.spec.network + (self.spec.cidr.contains(':') ? '.6-' : '.') + self.spec.cidr.replace(':', '-').replace('/', '-')").message("the name of an IPBlock follows from its network and its range: let nodes make them"),
        printcolumn = r#"{"name": "Network", "type": "string", "jsonPath": ".spec.network", "description": "The BridgeNetwork"}"#,
        printcolumn = r#"{"name": "Range", "type": "string", "jsonPath": ".spec.cidr", "description": "The addresses"}"#,
        printcolumn = r#"{"name": "Holder", "type": "string", "jsonPath": ".spec.holder.node", "description": "The node that hands them out"}"#,
        printcolumn = r#"{"name": "Used", "type": "integer", "jsonPath": ".status.used", "description": "Addresses that pods of the holder have"}"#,
        printcolumn = r#"{"name": "Free", "type": "integer", "jsonPath": ".status.free", "description": "Addresses that nobody has"}"#,
        printcolumn = r#"{"name": "Closed", "type": "boolean", "jsonPath": ".status.closed", "description": "Whether nothing new comes out of it"}"#,
        printcolumn = r#"{"name": "Lender", "type": "string", "jsonPath": ".spec.lender.node", "description": "The node whose block a single address was borrowed from"}"#,
        printcolumn = r#"{"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}"#
    )
)]
#[cfg_attr(
    feature = "kube",
    schemars(extend("x-kubernetes-validations" = [
        {"rule": "self.network == oldSelf.network && self.networkUID == oldSelf.networkUID && self.cidr == oldSelf.cidr && self.holder.node == oldSelf.holder.node",
         "message": "the network, the range and the holder of an IPBlock cannot be changed"},
    ]))
)]
#[serde(rename_all = "camelCase")]
pub struct IPBlockSpec {
    /// The name of the BridgeNetwork.
    #[cfg_attr(
        feature = "kube",
        schemars(length(min = 1, max = 50), regex(pattern = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))
    )]
    pub network: String,
    /// Its UID: a network of the same name that is made later has other blocks.
    #[serde(rename = "networkUID")]
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 63)))]
    pub network_uid: String,
    /// The addresses. Only those of them that lie in the network's subnets are handed out.
    #[cfg_attr(
        feature = "kube",
        schemars(
            with = "String",
            length(min = 3, max = 43),
            extend("x-kubernetes-validations" = [{"rule": "isCIDR(self) && cidr(self) == cidr(self).masked() && string(cidr(self)) == self", "message": "must be a range of addresses in its shortest form"}])
        )
    )]
    pub cidr: IpNet,
    /// The node that hands them out.
    pub holder: NodeRef,
    /// The node that has the range around a single address, and lends it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lender: Option<NodeRef>,
    /// The boot ID of the holder's machine when the holder last recorded the block. Empty in blocks of daemons that do not record it. After a boot, the holder allocates nothing from a block until the block carries the new boot ID. If the holder has lost its journal, another boot ID proves that no running pod has an address of the block.
    #[serde(rename = "bootID", default, skip_serializing_if = "String::is_empty")]
    #[cfg_attr(feature = "kube", schemars(length(max = 63)))]
    pub boot_id: String,
}

/// A node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct NodeRef {
    /// Its name.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 253)))]
    pub node: String,
    /// The UID of its Node.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 63)))]
    pub uid: String,
}

/// How the block is used, as its holder says.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct IPBlockStatus {
    /// Addresses that pods of the holder have. Told now and then, not at each change.
    #[serde(default)]
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub used: i32,
    /// Addresses that nobody has.
    #[serde(default)]
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub free: i32,
    /// Some of those that nobody has, as first-last, for nodes that look for a single one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(with = "Vec<SpareRange>", transform = list_schema::atomic(MAX_SPARE_RANGES)))]
    pub spare: Vec<String>,
    /// Single addresses that other nodes may hand out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(transform = list_schema::atomic(MAX_STATUS_ADDRESSES)))]
    pub lent: Vec<LentAddress>,
    /// The UIDs of IPBlocks that ask for an address which is not to be had.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(with = "Vec<ObjectUid>", transform = list_schema::atomic(MAX_STATUS_ADDRESSES)))]
    pub refused: Vec<String>,
    /// Nothing new comes out of it: its holder does not know which addresses are in use.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub closed: bool,
    /// The first ten pods that have an address which the network does not give any more, as namespace/name address.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(with = "Vec<DrainingPod>", transform = list_schema::atomic(MAX_DRAINING_PODS)))]
    pub draining: Vec<String>,
}

/// An address that another node hands out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct LentAddress {
    /// The address.
    #[cfg_attr(feature = "kube", schemars(with = "String", length(min = 2, max = 39)))]
    pub address: IpAddr,
    /// The UID of the IPBlock that asked for it.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 63)))]
    pub block: String,
}

#[cfg(feature = "kube")]
#[derive(schemars::JsonSchema)]
#[schemars(transparent)]
#[expect(dead_code, reason = "only its schema is used")]
struct SpareRange(#[schemars(length(min = 2, max = 80))] String);

#[cfg(feature = "kube")]
#[derive(schemars::JsonSchema)]
#[schemars(transparent)]
#[expect(dead_code, reason = "only its schema is used")]
struct ObjectUid(#[schemars(length(min = 1, max = 63))] String);

#[cfg(feature = "kube")]
#[derive(schemars::JsonSchema)]
#[schemars(transparent)]
#[expect(dead_code, reason = "only its schema is used")]
struct DrainingPod(#[schemars(length(min = 1, max = 512))] String);

/// The name of the block of a network with this range.
pub fn name(network: &str, range: IpNet) -> String {
    let family = if range.addr().is_ipv6() { ".6-" } else { "." };
    format!("{network}{family}{}", range.to_string().replace([':', '/'], "-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_follows_from_network_and_range_and_no_two_are_the_same() {
        let name = |network, range: &str| name(network, range.parse().unwrap());
        assert_eq!(name("blue", "10.0.0.16/28"), "blue.10.0.0.16-28");
        assert_eq!(name("blue", "fd00:c8::/120"), "blue.6-fd00-c8---120");
        assert_eq!(name("blue", "::/120"), "blue.6----120");
        assert_ne!(name("blue-6", "::/120"), name("blue", "::/120"));
        assert!(name(&"x".repeat(50), "1111:2222:3333:4444:5555:6666:7777:8888/128").len() < 253);
    }
}
