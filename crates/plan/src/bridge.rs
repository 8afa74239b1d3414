//! The bridge networks of one node: what to change in the kernel, and what to say about it.
//!
//! [`plan`] compares what is wanted with what was seen and returns the next steps. Steps of one plan do not depend on
//! each other's outcome across networks: one that fails holds up its own network and no other. After a plan was
//! applied the kernel is looked at again and planned for again, until nothing is left to do; so a crash between any
//! two steps is nothing special.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use api::{IfName, Mac, NetworkOnNode, Vtep};
use jiff::Timestamp;

use crate::nodenetwork::{Admin, Facts, Observed};

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
}

/// What to do, and what to say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    pub steps: Vec<Step>,
    /// For every network that this node takes part in or has links of, sorted by UID.
    pub networks: Vec<NetworkOnNode>,
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
    /// Makes a bridge that is down, with its mark.
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
