//! The bridge networks of one node: what to change in the kernel, and what to say about it.
//!
//! [`plan`] compares what is wanted with what was seen and returns the next steps. Steps of one plan do not depend on
//! each other's outcome across networks: one that fails holds up its own network and no other. After a plan was
//! applied the kernel is looked at again and planned for again, until nothing is left to do; so a crash between any
//! two steps is nothing special.

mod decide;
mod keep;
mod overlay;
mod seen;
mod uplink;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use api::{IfName, Mac, NetworkOnNode, Vtep, digest::digest};
use jiff::Timestamp;

use crate::{
    attachment,
    nodenetwork::{Admin, Facts, Observed},
};

pub use decide::plan;

/// Why a network works on a node or does not, in one word. The list is closed.
pub mod reason {
    pub const READY: &str = "Ready";
    /// Steps are on their way.
    pub const APPLYING: &str = "Applying";
    /// An older network has what this one wants.
    pub const CONFLICT: &str = "Conflict";
    /// The controller has not decided the MTU yet.
    pub const WAITING: &str = "WaitingForController";
    /// The network is not in this node's NodeNetwork at the API server yet.
    pub const LISTING: &str = "Listing";
    /// This node has no address for overlays.
    pub const NO_VTEP: &str = "NoVtep";
    /// The link between the nodes takes smaller packets than the network needs.
    pub const MTU_TOO_LARGE: &str = "MtuTooLarge";
    /// A link of somebody else is in the way.
    pub const FOREIGN_LINK: &str = "ForeignLink";
    pub const UPLINK_MISSING: &str = "UplinkMissing";
    /// The node needs the link that is to be the uplink.
    pub const UPLINK_REFUSED: &str = "UplinkRefused";
    /// It should go, but pods are on it.
    pub const IN_USE: &str = "InUse";
    /// It is being removed.
    pub const LEAVING: &str = "Leaving";
    /// For a [`Failure`](super::Failure): another program holds the UDP port of the VXLAN.
    pub const PORT_IN_USE: &str = "PortInUse";
    /// For a [`Failure`](super::Failure): the kernel refused a step.
    pub const REFUSED: &str = "KernelRefused";
    /// For a [`Failure`](super::Failure): the record could not be written.
    pub const RECORD: &str = "RecordFailed";
}

/// The UID of a BridgeNetwork.
pub type Uid = String;

/// A BridgeNetwork, as far as a node has to know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Network {
    pub name: String,
    pub uid: Uid,
    pub generation: i64,
    pub created: Timestamp,
    pub bridge: IfName,
    /// The name of the VXLAN device, if there is to be one.
    pub vxlan: IfName,
    /// The effective MTU, which the controller decides for all nodes; none until it has.
    pub mtu: Option<u32>,
    pub uplink: Option<IfName>,
    pub overlay: Option<Overlay>,
    pub wish: Wish,
}

/// What this node should do about a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wish {
    /// Take part.
    Have,
    /// The node is not selected (any more), or the network is deleted and nobody uses it: leave no trace.
    Leave,
}

/// The VXLAN of a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Overlay {
    pub vni: u32,
    pub port: u16,
}

/// Another node, as its NodeNetwork shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    pub node: String,
    pub vtep: Option<IpAddr>,
    /// The networks that it lists.
    pub networks: BTreeSet<Uid>,
}

/// What is kept on disk about a network, written before its first link is made or touched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    pub uid: Uid,
    pub name: String,
    /// The boot that it was written in: what it says of links holds for no other.
    pub boot: String,
    pub bridge: IfName,
    pub vxlan: IfName,
    /// The Node's UID that the marks of the links were made with.
    pub node_uid: String,
    /// The uplink, as it was before it was touched.
    pub uplink: Option<Found>,
}

/// A link of somebody else, as it was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    pub name: String,
    pub index: u32,
    pub admin: Admin,
    pub mtu: u32,
}

/// What went wrong with a network at the last attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    pub reason: String,
    pub message: String,
}

/// All that is known when something has to be decided.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    pub facts: &'a Facts,
    /// The boot that this is.
    pub boot: &'a str,
    pub vtep: Option<&'a Vtep>,
    /// Every BridgeNetwork there is.
    pub networks: &'a [Network],
    /// Every other node.
    pub peers: &'a [Peer],
    pub observed: &'a Observed,
    pub records: &'a BTreeMap<Uid, Record>,
    /// The networks that the node's own NodeNetwork lists at the API server: only these may have links made.
    pub listed: &'a BTreeSet<Uid>,
    pub failures: &'a BTreeMap<Uid, Failure>,
    /// The links that the connection to the API server goes over.
    pub api_links: &'a BTreeSet<u32>,
    /// What was right after the last plan: its [`Plan::settled`].
    pub settled: &'a BTreeMap<Uid, Settled>,
}

/// What was wanted of a network when all of it was right. What differs from it later, with the same wishes, somebody
/// changed by hand.
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

/// What to do, and what to say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    pub steps: Vec<Step>,
    /// For every network that this node takes part in or has links of, sorted by UID.
    pub networks: Vec<NetworkOnNode>,
    /// The names of the networks that this node takes no part in because it has too many: the youngest.
    pub left_out: Vec<String>,
    /// What is right now; for the next [`View`].
    pub settled: BTreeMap<Uid, Settled>,
}

/// One change, for one network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    pub network: Uid,
    pub action: Action,
    /// Whether something that had been right is put right again: somebody changed it by hand.
    pub repair: bool,
}

/// A change to the kernel or to the record on disk. Links are named by index, so that a rename never hits another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Writes the record, durably.
    Record(Record),
    /// Removes the record, durably.
    Forget,
    /// Makes a bridge that is down, with its mark and an MTU of one less: the kernel stops to derive the MTU of a bridge
    /// from its ports when it is changed, and setting what is there already is no change.
    CreateBridge {
        name: IfName,
        mac: Mac,
        mtu: u32,
    },
    /// Makes a VXLAN device that is down, a port of the bridge, with its mark.
    CreateVxlan {
        name: IfName,
        mac: Mac,
        mtu: u32,
        overlay: Overlay,
        local: IpAddr,
        bridge: u32,
    },
    /// Deletes a link of ours.
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
        admin: Admin,
    },
    /// No IPv6 on this link: no address, and no router advertisement is listened to.
    DisableIpv6 {
        name: String,
    },
    /// The host hears no IPv4 on this link: it answers no ARP for its other addresses, as it else would on every link,
    /// and forwards nothing.
    DeafenIpv4 {
        name: String,
    },
    /// Removes an address that somebody put on a bridge of ours.
    RemoveAddress {
        link: u32,
        address: ipnet::IpNet,
    },
    /// Makes a link a port of the bridge.
    Join {
        link: u32,
        bridge: u32,
    },
    /// Makes a link a port of nothing.
    Part {
        link: u32,
    },
    /// Frames for everybody also go to this node.
    AddFlood {
        vxlan: u32,
        to: IpAddr,
    },
    RemoveFlood {
        vxlan: u32,
        to: IpAddr,
    },
}

/// What sort of link we made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Made {
    Bridge,
    Vxlan,
}

impl Made {
    /// The kernel's word for it.
    pub fn kind(self) -> &'static str {
        match self {
            Self::Bridge => "bridge",
            Self::Vxlan => "vxlan",
        }
    }

    const ALL: [Self; 2] = [Self::Bridge, Self::Vxlan];
}

/// The hardware address of a link that is made for a network on a node: locally administered, unicast, and by which
/// the link is known as ours from its first moment on.
pub fn mark(network_uid: &str, node_uid: &str, made: Made) -> Mac {
    let digest = digest(["patchbay mark", made.kind(), network_uid, node_uid]).to_be_bytes();
    let mut octets = [0; 6];
    octets.copy_from_slice(&digest[2..]);
    octets[0] = octets[0] & 0xfc | 0x02;
    Mac::from(octets)
}

/// The alias of a link that was made for a network.
pub fn alias(network_uid: &str, made: Made) -> String {
    format!("{}{}/{network_uid}", api::LINK_ALIAS, made.kind())
}

/// Whether a link of this name is the host's end of a pod's pair: `veth` and eleven digits.
pub fn pod_port(name: &str) -> bool {
    name.strip_prefix("veth").is_some_and(|digits| {
        digits.len() == 11 && digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    })
}

/// The network that the host's end of a pod's pair belongs to.
fn pod_network(alias: &str) -> Option<&str> {
    alias
        .strip_prefix(attachment::POD_ALIAS_PREFIX)?
        .split_once('/')
        .map(|(uid, _)| uid)
        .filter(|uid| is_uid(uid))
}

/// The network that a link was made for, by its alias.
fn made_for(alias: &str, made: Made) -> Option<&str> {
    let uid = alias.strip_prefix(api::LINK_ALIAS)?.strip_prefix(made.kind())?.strip_prefix('/')?;
    Some(uid).filter(|uid| is_uid(uid))
}

/// Whether a text can be the UID of an object. Anybody may have written it on a link.
fn is_uid(text: &str) -> bool {
    (1..=63).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
