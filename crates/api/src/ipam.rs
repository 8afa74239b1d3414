//! The part of a BridgeNetwork that is about addresses.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

#[cfg(feature = "kube")]
use crate::list_schema;

/// The name of the CNI plugin that hands out addresses.
pub const IPAM_PLUGIN: &str = "patchbay-ipam";
/// The subnets of a network at most.
pub const MAX_SUBNETS: usize = 8;
/// The ranges that are left out of them at most.
pub const MAX_EXCLUDES: usize = 128;

/// The addresses that pods get on a network.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[cfg_attr(
    feature = "kube",
    schemars(extend("x-kubernetes-validations" = [
        {"rule": "self.subnets.all(a, self.subnets.all(b, a == b || !isCIDR(a) || !isCIDR(b) || !cidr(a).containsCIDR(b)))",
         "message": "spec.ipam.subnets overlap: write each address once", "fieldPath": ".subnets"},
        {"rule": "!has(self.gateways) || self.gateways.all(one, !isIP(one) || self.subnets.exists(net, isCIDR(net) && cidr(net).containsIP(one)))",
         "message": "a gateway in spec.ipam.gateways lies in none of the subnets, so that no pod could reach it", "fieldPath": ".gateways"},
        {"rule": "!has(self.gateways) || size(self.gateways) < 2 || !self.gateways.all(one, isIP(one)) || ip(self.gateways[0]).family() != ip(self.gateways[1]).family()",
         "message": "spec.ipam.gateways has two of one family: write at most one for IPv4 and one for IPv6", "fieldPath": ".gateways"},
        {"rule": "has(self.blockLength) == has(oldSelf.blockLength) && (!has(self.blockLength) || self.blockLength == oldSelf.blockLength)",
         "message": "spec.ipam.blockLength cannot be changed, set or unset later: make another BridgeNetwork", "fieldPath": ".blockLength"},
    ]))
)]
#[serde(rename_all = "camelCase")]
pub struct IpamSpec {
    /// Where the addresses are from, at most 8. A pod gets one address of each family. One that is added is used at once; one that is taken away gives no new addresses, and pods that have one of it keep it.
    #[cfg_attr(feature = "kube", schemars(with = "Vec<CidrSchema>", length(min = 1), transform = list_schema::set(MAX_SUBNETS)))]
    pub subnets: Vec<IpNet>,
    /// Ranges and addresses in them that no pod gets.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(with = "Vec<CidrSchema>", transform = list_schema::set(MAX_EXCLUDES)))]
    pub exclude: Vec<IpNet>,
    /// The routers that pods use on this network, at most one of each family. No pod gets their address.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(with = "Vec<IpSchema>", transform = list_schema::set(2)))]
    pub gateways: Vec<IpAddr>,
    /// Routes that pods get. There is no other: a gateway alone makes no default route.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(transform = list_schema::atomic(64)))]
    pub routes: Vec<Route>,
    /// How large the blocks are that nodes take. Derived from the subnets if it is not set. Cannot be changed, set or unset later.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_length: Option<BlockLength>,
}

/// A route of pods.
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
    /// Where it leads to.
    #[cfg_attr(feature = "kube", schemars(with = "CidrSchema"))]
    pub dst: IpNet,
    /// The router; the gateway of the family if it is not set, and if there is none, the network itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(with = "Option<IpSchema>"))]
    pub gw: Option<IpAddr>,
}

/// The length of the prefix of blocks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct BlockLength {
    /// Of IPv4: 28 means blocks of 16 addresses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(with = "Option<i32>", range(min = 22, max = 32)))]
    pub ipv4: Option<u8>,
    /// Of IPv6: 120 means blocks of 256 addresses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(with = "Option<i32>", range(min = 118, max = 128)))]
    pub ipv6: Option<u8>,
}

/// How many addresses there are, by family. Counts of blocks are told by their holders now and then, so these are a little late.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct IpamStatus {
    /// Of IPv4.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv4: Option<IpFamilyStatus>,
    /// Of IPv6.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6: Option<IpFamilyStatus>,
}

/// How many addresses of one family there are.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct IpFamilyStatus {
    /// The length of the prefix of blocks, fixed at the first use.
    #[cfg_attr(feature = "kube", schemars(with = "i32", range(min = 0, max = 128)))]
    pub block_length: u8,
    /// The addresses that pods can have, 9223372036854775807 if there are more.
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub addresses: i64,
    /// Those that pods have.
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub used: i64,
    /// Those that are left.
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub free: i64,
    /// The blocks that nodes hold.
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub blocks: i32,
}

/// A range of addresses that begins where its length says.
#[cfg(feature = "kube")]
#[derive(schemars::JsonSchema)]
#[schemars(transparent)]
#[expect(dead_code, reason = "only its schema is used")]
struct CidrSchema(
    #[schemars(length(min = 3, max = 43), extend("x-kubernetes-validations" = [
        {"rule": "isCIDR(self)", "message": "must be a range of addresses such as 192.168.200.0/24 or fd00:c8::/64"},
        {"rule": "!isCIDR(self) || cidr(self) == cidr(self).masked()", "message": "has bits behind its length: write the first address of the range, such as 192.168.200.0/24"},
    ]))]
    String,
);

/// An address.
#[cfg(feature = "kube")]
#[derive(schemars::JsonSchema)]
#[schemars(transparent)]
#[expect(dead_code, reason = "only its schema is used")]
struct IpSchema(
    #[schemars(length(min = 2, max = 39), extend("x-kubernetes-validations" = [
        {"rule": "isIP(self)", "message": "must be an address such as 192.168.200.1 or fd00:c8::1"},
    ]))]
    String,
);
