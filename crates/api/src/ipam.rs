//! `spec.ipam` and `status.ipam` of a BridgeNetwork.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

#[cfg(feature = "kube")]
use crate::list_schema;

/// The name of the CNI plugin that allocates addresses.
pub const IPAM_PLUGIN: &str = "patchbay-ipam";
/// The maximum number of subnets of a network.
pub const MAX_SUBNETS: usize = 8;
/// The maximum number of excluded ranges of a network.
pub const MAX_EXCLUDES: usize = 128;

/// The IP addresses that pods get on a network.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[cfg_attr(
    feature = "kube",
    schemars(extend("x-kubernetes-validations" = [
        {"rule": "self.subnets.all(a, self.subnets.all(b, a == b || !isCIDR(a) || !isCIDR(b) || !cidr(a).containsCIDR(b)))",
         "message": "spec.ipam.subnets must not overlap", "fieldPath": ".subnets"},
        {"rule": "!has(self.gateways) || self.gateways.all(one, !isIP(one) || self.subnets.exists(net, isCIDR(net) && cidr(net).containsIP(one)))",
         "message": "a gateway in spec.ipam.gateways is not in any of the subnets, so pods cannot reach it", "fieldPath": ".gateways"},
        {"rule": "!has(self.gateways) || size(self.gateways) < 2 || !self.gateways.all(one, isIP(one)) || ip(self.gateways[0]).family() != ip(self.gateways[1]).family()",
         "message": "spec.ipam.gateways has two gateways of the same IP family; use at most one for IPv4 and one for IPv6", "fieldPath": ".gateways"},
        {"rule": "has(self.blockLength) == has(oldSelf.blockLength) && (!has(self.blockLength) || self.blockLength == oldSelf.blockLength)",
         "message": "spec.ipam.blockLength cannot be changed, set or unset later; create another BridgeNetwork", "fieldPath": ".blockLength"},
    ]))
)]
#[serde(rename_all = "camelCase")]
pub struct IpamSpec {
    /// The subnets from which pods get addresses, at most 8. A pod gets one address of each IP family. A subnet that you add is used at once. A subnet that you remove gets no new allocations; running pods keep their addresses.
    #[cfg_attr(feature = "kube", schemars(with = "Vec<CidrSchema>", length(min = 1), transform = list_schema::set(MAX_SUBNETS)))]
    pub subnets: Vec<IpNet>,
    /// Ranges that are never allocated, in CIDR notation. Write a single address as /32 or /128.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(with = "Vec<CidrSchema>", transform = list_schema::set(MAX_EXCLUDES)))]
    pub exclude: Vec<IpNet>,
    /// The gateways of the network, at most one of each IP family. Their addresses are never allocated. A gateway alone does not create a route.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(with = "Vec<IpSchema>", transform = list_schema::set(2)))]
    pub gateways: Vec<IpAddr>,
    /// The routes that pods get. Patchbay adds no others, in particular no default route.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(transform = list_schema::atomic(64)))]
    pub routes: Vec<Route>,
    /// The size of the address blocks that nodes acquire. Derived from the largest subnet if it is not set. Immutable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_length: Option<BlockLength>,
    /// Whether virtual machines keep their addresses over restart and migration, with IPAMClaims. A running virtual machine is not affected by a change until it restarts.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub persistent: bool,
}

/// A route that pods get.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[cfg_attr(
    feature = "kube",
    schemars(extend("x-kubernetes-validations" = [
        {"rule": "!has(self.gw) || !isCIDR(self.dst) || !isIP(self.gw) || cidr(self.dst).ip().family() == ip(self.gw).family()",
         "message": "dst and gw of a route are of different families"},
    ]))
)]
#[serde(rename_all = "camelCase")]
pub struct Route {
    /// The destination, in CIDR notation.
    #[cfg_attr(feature = "kube", schemars(with = "CidrSchema"))]
    pub dst: IpNet,
    /// The next hop. Defaults to the gateway of the IP family. Without one, the destination is on the link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(with = "Option<IpSchema>"))]
    pub gw: Option<IpAddr>,
}

/// The prefix length of address blocks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct BlockLength {
    /// The prefix length of IPv4 blocks. For example, 28 means blocks of 16 addresses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(with = "Option<i32>", range(min = 22, max = 32)))]
    pub ipv4: Option<u8>,
    /// The prefix length of IPv6 blocks. For example, 120 means blocks of 256 addresses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(with = "Option<i32>", range(min = 118, max = 128)))]
    pub ipv6: Option<u8>,
}

/// How many addresses a network has, by IP family. Nodes report the usage of their blocks periodically, so the counts lag behind.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct IpamStatus {
    /// The IPv4 addresses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv4: Option<IpFamilyStatus>,
    /// The IPv6 addresses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6: Option<IpFamilyStatus>,
    /// The number of IPAMClaims that have addresses. Pods on this network may have references to them, also after
    /// `spec.ipam.persistent` was switched off.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub claims: i64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &i64) -> bool {
    *number == 0
}

/// How many addresses of one IP family a network has.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct IpFamilyStatus {
    /// The prefix length of blocks. It is fixed when the network first has a subnet of the family.
    #[cfg_attr(feature = "kube", schemars(with = "i32", range(min = 0, max = 128)))]
    pub block_length: u8,
    /// The number of addresses that can be allocated to pods, at most 9223372036854775807.
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub addresses: i64,
    /// The number of allocated addresses.
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub used: i64,
    /// The number of free addresses.
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub free: i64,
    /// The number of blocks that nodes hold.
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub blocks: i32,
}

/// A network prefix without host bits.
#[cfg(feature = "kube")]
#[derive(schemars::JsonSchema)]
#[schemars(transparent)]
#[expect(dead_code, reason = "only its schema is used")]
struct CidrSchema(
    #[schemars(length(min = 3, max = 43), extend("x-kubernetes-validations" = [
        {"rule": "isCIDR(self)", "message": "must be a CIDR such as 192.168.200.0/24 or fd00:c8::/64"},
        {"rule": "!isCIDR(self) || cidr(self) == cidr(self).masked()", "message": "has host bits set; write the first address of the range, such as 192.168.200.0/24"},
    ]))]
    String,
);

/// An IP address.
#[cfg(feature = "kube")]
#[derive(schemars::JsonSchema)]
#[schemars(transparent)]
#[expect(dead_code, reason = "only its schema is used")]
struct IpSchema(
    #[schemars(length(min = 2, max = 39), extend("x-kubernetes-validations" = [
        {"rule": "isIP(self)", "message": "must be an IP address such as 192.168.200.1 or fd00:c8::1"},
    ]))]
    String,
);
