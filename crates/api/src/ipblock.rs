//! The kind `IPBlock`: a range of addresses that one holder allocates, usually a node to its pods.

use std::{fmt, net::IpAddr};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

#[cfg(feature = "kube")]
use crate::list_schema;

/// Label on an IPBlock: the name of its network.
pub const NETWORK_LABEL: &str = "patchbay.dev/network";
/// Prefix of a label on an IPBlock. The UID of a node follows; the value is the node's role.
pub const NODE_ROLE_LABEL_PREFIX: &str = "node.patchbay.dev/";
/// The role of the node that holds the block.
pub const HOLDER_ROLE: &str = "holds";
/// The role of the node that lends a borrowed address.
pub const LENDER_ROLE: &str = "lends";
/// Label on an IPBlock that is a single borrowed address.
pub const BORROWED_LABEL: &str = "patchbay.dev/borrowed";
/// The name of the holder that reserves addresses for IPAMClaims. It is the same for every controller.
pub const CLAIMS_HOLDER: &str = "ipamclaims/patchbay";
/// The UID of that holder.
pub const CLAIMS_HOLDER_UID: &str = "ipamclaims-patchbay";
/// The maximum length of `status.lent`, `status.refused` and `status.claims`.
pub const MAX_STATUS_ADDRESSES: usize = 1024;
/// The maximum length of `status.spare`.
pub const MAX_SPARE_RANGES: usize = 16;
/// The maximum length of `status.draining`.
pub const MAX_DRAINING_PODS: usize = 10;

/// A range of addresses and the holder that allocates them.
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
        doc = "IPBlock is a range of addresses of a BridgeNetwork that one node allocates to its pods. Nodes create and delete IPBlocks themselves: a node acquires a range by creating its IPBlock, and no other node can allocate from it while the object exists. Do not edit IPBlocks.",
        validation = Rule::new("self.metadata.name == self.spec.network + (self.spec.cidr.contains(':') ? '.6-' : '.') + self.spec.cidr.replace(':', '-').replace('/', '-')").message("the name of an IPBlock is derived from its network and CIDR; nodes create IPBlocks"),
        printcolumn = r#"{"name": "Network", "type": "string", "jsonPath": ".spec.network", "description": "BridgeNetwork of the addresses"}"#,
        printcolumn = r#"{"name": "Range", "type": "string", "jsonPath": ".spec.cidr", "description": "Range of addresses"}"#,
        printcolumn = r#"{"name": "Holder", "type": "string", "jsonPath": ".spec.holder.node", "description": "Node that allocates the addresses, or kind/name of a holder that is not a Node"}"#,
        printcolumn = r#"{"name": "Used", "type": "integer", "jsonPath": ".status.used", "description": "Addresses allocated to pods of the holder"}"#,
        printcolumn = r#"{"name": "Free", "type": "integer", "jsonPath": ".status.free", "description": "Free addresses"}"#,
        printcolumn = r#"{"name": "Closed", "type": "boolean", "jsonPath": ".status.closed", "description": "Whether new allocations are disabled"}"#,
        printcolumn = r#"{"name": "Lender", "type": "string", "jsonPath": ".spec.lender.node", "description": "Holder that lends the address, if it is borrowed"}"#,
        printcolumn = r#"{"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}"#
    )
)]
#[cfg_attr(
    feature = "kube",
    schemars(extend("x-kubernetes-validations" = [
        {"rule": "self.network == oldSelf.network && self.networkUID == oldSelf.networkUID && self.cidr == oldSelf.cidr && self.holder.node == oldSelf.holder.node",
         "message": "network, networkUID, cidr and holder.node of an IPBlock cannot be changed"},
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
    /// The UID of the BridgeNetwork. A later network of the same name does not use this block.
    #[serde(rename = "networkUID")]
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 63)))]
    pub network_uid: String,
    /// The range of addresses, in CIDR notation. Only addresses in the network's subnets are allocated.
    #[cfg_attr(
        feature = "kube",
        schemars(
            with = "String",
            length(min = 3, max = 43),
            extend("x-kubernetes-validations" = [{"rule": "isCIDR(self) && cidr(self) == cidr(self).masked() && string(cidr(self)) == self", "message": "must be a CIDR in canonical form"}])
        )
    )]
    pub cidr: IpNet,
    /// Who allocates the addresses: a Node, or a holder that is not a Node.
    pub holder: HolderRef,
    /// Who lends the address. Set only on a single borrowed address, which is part of a block of the lender.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lender: Option<HolderRef>,
    /// The boot ID of the holder's machine when the holder last recorded the block. Empty in blocks of daemons that do not record it. After a boot, the holder allocates nothing from a block until the block carries the new boot ID. If the holder has lost its journal, another boot ID proves that no running pod has an address of the block.
    #[serde(rename = "bootID", default, skip_serializing_if = "String::is_empty")]
    #[cfg_attr(feature = "kube", schemars(length(max = 63)))]
    pub boot_id: String,
}

/// A reference to a Node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeRef {
    /// The name of the Node.
    pub node: String,
    /// The UID of the Node.
    pub uid: String,
}

/// The holder of a block: a Node, or a holder that is not a Node. The name of the latter has the form kind/name, which no Node can have.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct HolderRef {
    /// The name of the Node; kind/name for a holder that is not a Node.
    #[cfg_attr(
        feature = "kube",
        schemars(
            length(min = 1, max = 253),
            regex(pattern = "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$")
        )
    )]
    pub node: String,
    /// The UID of the Node, or of the holder that is not a Node.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 63)))]
    pub uid: String,
}

impl HolderRef {
    /// Whether the holder is a Node. The slash in the name of any other holder keeps versions that know only Nodes from
    /// taking it for a Node: the name of a Node is a DNS subdomain.
    pub fn is_node(&self) -> bool {
        !self.node.contains('/')
    }

    /// The controller, as holder of the addresses of IPAMClaims.
    pub fn claims() -> Self {
        Self { node: CLAIMS_HOLDER.to_owned(), uid: CLAIMS_HOLDER_UID.to_owned() }
    }

    /// Whether it is the holder of the addresses of IPAMClaims.
    pub fn is_claims(&self) -> bool {
        self.node == CLAIMS_HOLDER && self.uid == CLAIMS_HOLDER_UID
    }

    /// Whether the holder answers requests to borrow an address.
    pub fn lends(&self) -> bool {
        self.is_node() || self.is_claims()
    }
}

impl From<NodeRef> for HolderRef {
    fn from(NodeRef { node, uid }: NodeRef) -> Self {
        Self { node, uid }
    }
}

/// The holder as messages name it: `node a`, or `ipamclaims/patchbay`.
impl fmt::Display for HolderRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_node() { write!(f, "node {}", self.node) } else { f.write_str(&self.node) }
    }
}

/// The usage of the block, reported by its holder.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct IPBlockStatus {
    /// The number of addresses allocated to pods of the holder. Reported periodically, not at each change.
    #[serde(default)]
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub used: i32,
    /// The number of free addresses.
    #[serde(default)]
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub free: i32,
    /// Some ranges of free addresses, as first-last. Nodes without a block borrow single addresses from them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(with = "Vec<SpareRange>", transform = list_schema::atomic(MAX_SPARE_RANGES)))]
    pub spare: Vec<String>,
    /// The addresses that are lent to other nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(transform = list_schema::atomic(MAX_STATUS_ADDRESSES)))]
    pub lent: Vec<LentAddress>,
    /// The UIDs of IPBlocks whose request to borrow an address was refused.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(with = "Vec<ObjectUid>", transform = list_schema::atomic(MAX_STATUS_ADDRESSES)))]
    pub refused: Vec<String>,
    /// True if new allocations from the block are disabled, because its holder cannot verify which addresses are in use.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub closed: bool,
    /// The first ten pods with an address that spec.ipam of the network no longer contains, as namespace/name address.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(with = "Vec<DrainingPod>", transform = list_schema::atomic(MAX_DRAINING_PODS)))]
    pub draining: Vec<String>,
    /// The addresses that are reserved for IPAMClaims. Only blocks of the holder ipamclaims/patchbay have them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(transform = list_schema::map("address", MAX_STATUS_ADDRESSES)))]
    pub claims: Vec<ClaimedAddress>,
}

/// An address that is reserved for an IPAMClaim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct ClaimedAddress {
    /// The IP address.
    #[cfg_attr(feature = "kube", schemars(with = "String", length(min = 2, max = 39)))]
    pub address: IpAddr,
    /// The IPAMClaim, as namespace/name.
    #[cfg_attr(feature = "kube", schemars(length(min = 3, max = 317)))]
    pub claim: String,
    /// The UID of the IPAMClaim.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 63)))]
    pub uid: String,
}

/// An address that is lent to another node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct LentAddress {
    /// The IP address.
    #[cfg_attr(feature = "kube", schemars(with = "String", length(min = 2, max = 39)))]
    pub address: IpAddr,
    /// The UID of the borrower's IPBlock.
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

/// The name of the IPBlock of a network and range.
pub fn name(network: &str, range: IpNet) -> String {
    let family = if range.addr().is_ipv6() { ".6-" } else { "." };
    format!("{network}{family}{}", range.to_string().replace([':', '/'], "-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_holder_that_is_not_a_node_keeps_both_fields_and_is_named_as_it_is() {
        let parse = |text: &str| serde_json::from_str::<HolderRef>(text).unwrap();
        let node = parse(r#"{"node": "a.example", "uid": "1"}"#);
        assert_eq!((node.is_node(), node.to_string()), (true, "node a.example".to_owned()));
        let claims = parse(r#"{"node": "ipamclaims/patchbay", "uid": "2"}"#);
        assert!(node.lends() && !claims.lends() && HolderRef::claims().lends());
        assert_eq!((claims.is_node(), claims.to_string()), (false, "ipamclaims/patchbay".to_owned()));
        assert_eq!(
            serde_json::to_string(&claims).unwrap(),
            r#"{"node":"ipamclaims/patchbay","uid":"2"}"#,
            "versions that know only Nodes read both fields"
        );
    }

    #[test]
    fn names_are_derived_from_network_and_range_and_are_unique() {
        let name = |network, range: &str| name(network, range.parse().unwrap());
        assert_eq!(name("blue", "10.0.0.16/28"), "blue.10.0.0.16-28");
        assert_eq!(name("blue", "fd00:c8::/120"), "blue.6-fd00-c8---120");
        assert_eq!(name("blue", "::/120"), "blue.6----120");
        assert_ne!(name("blue-6", "::/120"), name("blue", "::/120"));
        assert!(name(&"x".repeat(50), "1111:2222:3333:4444:5555:6666:7777:8888/128").len() < 253);
    }
}
