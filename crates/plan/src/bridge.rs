//! The bridge networks of one node: which kernel changes they need, and their status in the NodeNetwork.
//!
//! [`plan`] compares the desired networks with the observed links and returns the next steps. A step that fails stops
//! its own network and no other. The daemon applies the steps, observes the kernel again and plans again, until a plan
//! has no steps. A crash between two steps therefore needs no special handling.

mod decide;
mod drift;
mod index;
mod overlay;
mod uplink;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use api::{IfName, Mac, NetworkOnNode, Vtep, digest::digest};
use jiff::Timestamp;

use crate::{
    attachment,
    nodenetwork::{AdminState, KernelState, NodeInfo},
};

pub use decide::plan;

/// The reasons of a network on a node, in the NodeNetwork's status. The list is closed.
pub mod reason {
    pub const READY: &str = "Ready";
    /// The daemon has steps left to apply.
    pub const APPLYING: &str = "Applying";
    /// An older network holds a resource that this one needs.
    pub const CONFLICT: &str = "Conflict";
    /// The controller has not set the MTU yet.
    pub const WAITING: &str = "WaitingForController";
    /// This node's NodeNetwork at the API server does not list the network yet.
    pub const LISTING: &str = "Listing";
    /// This node has no VTEP address.
    pub const NO_VTEP: &str = "NoVtep";
    /// The MTU of the underlay is too small for the MTU of the network.
    pub const MTU_TOO_LARGE: &str = "MtuTooLarge";
    /// A link that Patchbay does not own has a name or a VNI that the network needs.
    pub const FOREIGN_LINK: &str = "ForeignLink";
    pub const UPLINK_MISSING: &str = "UplinkMissing";
    /// The node itself uses the link that is to be the uplink.
    pub const UPLINK_REFUSED: &str = "UplinkRefused";
    /// The network is to be removed, but pods are attached to it.
    pub const IN_USE: &str = "InUse";
    /// The daemon removes the network's links.
    pub const TERMINATING: &str = "Terminating";
    /// For an [`ApplyFailure`](super::ApplyFailure): another program uses the UDP port of the VXLAN.
    pub const PORT_IN_USE: &str = "PortInUse";
    /// For an [`ApplyFailure`](super::ApplyFailure): the kernel rejected a step.
    pub const REFUSED: &str = "KernelRefused";
    /// For an [`ApplyFailure`](super::ApplyFailure): the link record could not be written or removed.
    pub const RECORD: &str = "RecordFailed";
    /// For an [`ApplyFailure`](super::ApplyFailure): another program keeps changing the network's links.
    pub const LINK_CONTENTION: &str = "LinkContention";
}

/// The UID of a BridgeNetwork.
pub type Uid = String;

/// A BridgeNetwork as one node applies it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalNetwork {
    pub name: String,
    pub uid: Uid,
    pub generation: i64,
    pub created: Timestamp,
    pub bridge: IfName,
    /// The name of the VXLAN device; unused without an overlay.
    pub vxlan: IfName,
    /// The effective MTU, which the controller sets for all nodes; none until it has.
    pub mtu: Option<u32>,
    pub uplink: Option<IfName>,
    pub overlay: Option<Overlay>,
    pub desired: Desired,
}

/// Whether this node should have a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Desired {
    Present,
    /// The node is not selected, or the network is deleted and unused: remove all links and the record.
    Absent,
}

/// The VXLAN of a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Overlay {
    pub vni: u32,
    pub port: u16,
}

/// Another node, from its NodeNetwork.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    pub node: String,
    pub vtep: Option<IpAddr>,
    /// The networks that it has a port for. Shared by all peers: hundreds of them list the same networks.
    pub networks: BTreeSet<Arc<str>>,
}

/// The state of a network on disk. Written before the daemon creates or changes the network's first link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkRecord {
    pub uid: Uid,
    pub name: String,
    /// The boot ID at the time of writing. Link indexes are valid for that boot only.
    pub boot: String,
    pub bridge: IfName,
    pub vxlan: IfName,
    /// The Node UID from which the ownership MACs of the links are derived.
    pub node_uid: String,
    /// The uplink as it was before the daemon changed it.
    pub uplink: Option<OriginalLink>,
}

/// The state of a link that Patchbay does not own, before the daemon changed it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OriginalLink {
    pub name: String,
    pub index: u32,
    pub admin: AdminState,
    pub mtu: u32,
}

/// The failure of a network at the last attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApplyFailure {
    pub reason: String,
    pub message: String,
}

/// The input of [`plan`].
#[derive(Debug, Clone, Copy)]
pub struct BridgeInput<'a> {
    pub node: &'a NodeInfo,
    /// The ID of the current boot.
    pub boot: &'a str,
    pub vtep: Option<&'a Vtep>,
    /// All BridgeNetworks of the cluster.
    pub networks: &'a [LocalNetwork],
    /// All other nodes.
    pub peers: &'a [Peer],
    pub observed: &'a KernelState,
    pub records: &'a BTreeMap<Uid, LinkRecord>,
    /// The networks that the node's own NodeNetwork lists at the API server. The plan creates links for no others.
    pub listed: &'a BTreeSet<Uid>,
    pub failures: &'a BTreeMap<Uid, ApplyFailure>,
    /// The links that carry the connection to the API server.
    pub api_links: &'a BTreeSet<u32>,
    /// [`BridgePlan::settled`] of the previous plan.
    pub settled: &'a BTreeMap<Uid, Settled>,
}

/// The desired state of a network at the time when the kernel matched it. Drift from the same desired state was caused
/// by another program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settled {
    bridge: IfName,
    vxlan: IfName,
    mtu: Option<u32>,
    uplink: Option<IfName>,
    overlay: Option<Overlay>,
    local: Option<IpAddr>,
    floods: BTreeSet<IpAddr>,
}

/// The steps for all bridge networks of a node, and their status.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BridgePlan {
    pub steps: Vec<BridgeStep>,
    /// Every network that this node should have or has links of, sorted by UID.
    pub networks: Vec<NetworkOnNode>,
    /// The names of the youngest networks, beyond the limit of networks per node.
    pub omitted: Vec<String>,
    /// The networks whose links match; input of the next plan.
    pub settled: BTreeMap<Uid, Settled>,
}

/// One change for one network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BridgeStep {
    pub network: Uid,
    pub action: Action,
    /// Whether the step repairs drift of a network that had settled.
    pub repair: bool,
}

/// A change to the kernel or to the record on disk. Links are named by index, so a rename never redirects a step to
/// another link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Writes the record durably.
    WriteRecord(LinkRecord),
    /// Removes the record durably.
    RemoveRecord,
    /// Creates a bridge that is down, with its ownership MAC and with `mtu - 1`. The kernel derives the MTU of a bridge
    /// from its ports until the MTU changes for the first time, and setting the present value is no change.
    CreateBridge {
        name: IfName,
        mac: Mac,
        mtu: u32,
    },
    /// Creates a VXLAN device that is down and a port of the bridge, with its ownership MAC.
    CreateVxlan {
        name: IfName,
        mac: Mac,
        mtu: u32,
        overlay: Overlay,
        local: IpAddr,
        bridge: u32,
    },
    /// Deletes a link that Patchbay owns.
    Delete {
        link: u32,
    },
    Rename {
        link: u32,
        name: IfName,
    },
    SetAlias {
        link: u32,
        alias: String,
    },
    SetMac {
        link: u32,
        mac: Mac,
    },
    SetMtu {
        link: u32,
        mtu: u32,
    },
    SetAdmin {
        link: u32,
        admin: AdminState,
    },
    /// Disables IPv6 on a link: no addresses, and router advertisements are ignored.
    DisableIpv6 {
        name: String,
    },
    /// Isolates the host's IPv4 from a link: the host answers no ARP on it, which it does by default for the addresses
    /// of all its links, and forwards nothing from it.
    IsolateIpv4 {
        name: String,
    },
    /// Removes an address that another program added to a link of ours.
    RemoveAddress {
        link: u32,
        address: ipnet::IpNet,
    },
    /// Makes a link a port of the bridge.
    SetMaster {
        link: u32,
        bridge: u32,
    },
    /// Detaches a port from its bridge.
    ClearMaster {
        link: u32,
    },
    /// Adds a node's VTEP to the flood list: broadcast, unknown and multicast frames are copied to it.
    AddFlood {
        vxlan: u32,
        to: IpAddr,
    },
    RemoveFlood {
        vxlan: u32,
        to: IpAddr,
    },
}

/// The kinds of links that the daemon creates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LinkKind {
    Bridge,
    Vxlan,
}

impl LinkKind {
    /// The kernel's name of the kind (`IFLA_INFO_KIND`).
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Bridge => "bridge",
            Self::Vxlan => "vxlan",
        }
    }

    const ALL: [Self; 2] = [Self::Bridge, Self::Vxlan];
}

/// The MAC that marks a link as created for a network on a node. It is set in the request that creates the link, so the
/// link is recognized even if the daemon crashes right after. Locally administered, unicast.
pub fn ownership_mac(network_uid: &str, node_uid: &str, kind: LinkKind) -> Mac {
    let digest = digest(["patchbay mark", kind.as_str(), network_uid, node_uid]).to_be_bytes();
    let mut octets = [0; 6];
    octets.copy_from_slice(&digest[2..]);
    octets[0] = octets[0] & 0xfc | 0x02;
    Mac::from(octets)
}

/// The alias that marks a link as created for a network.
pub fn ownership_alias(network_uid: &str, kind: LinkKind) -> String {
    format!("{}{}/{network_uid}", api::LINK_ALIAS_PREFIX, kind.as_str())
}

/// Whether a link of this name is the host end of a pod's veth pair: `veth` and eleven hexadecimal digits.
pub fn is_pod_port(name: &str) -> bool {
    name.strip_prefix("veth").is_some_and(|digits| {
        digits.len() == 11 && digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    })
}

/// The network in the alias of the host end of a pod's veth pair.
fn pod_alias_network(alias: &str) -> Option<&str> {
    alias
        .strip_prefix(attachment::POD_ALIAS_PREFIX)?
        .split_once('/')
        .map(|(uid, _)| uid)
        .filter(|uid| is_uid(uid))
}

/// The network in the alias of a link of this kind.
fn alias_owner(alias: &str, kind: LinkKind) -> Option<&str> {
    let uid = alias.strip_prefix(api::LINK_ALIAS_PREFIX)?.strip_prefix(kind.as_str())?.strip_prefix('/')?;
    Some(uid).filter(|uid| is_uid(uid))
}

/// Whether a text can be the UID of an object. Any privileged program can set an alias.
fn is_uid(text: &str) -> bool {
    (1..=63).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
