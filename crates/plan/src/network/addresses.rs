//! The addresses of a network: how many there are, what is wrong with them, and which blocks nobody holds any more.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use api::ipam::{IpFamilyStatus, IpamStatus};

use super::{
    Scene, World,
    status::{Said, list},
};
use crate::ipam::{self, BlockGrid, Family, ObservedIpBlock};

/// How long a Node has been gone before its blocks are free. Its daemon hands out nothing new after five minutes without
/// the API server.
pub const GONE: Duration = Duration::from_mins(10);

const EXHAUSTED: &str = "AddressesExhausted";
const DRAINING: &str = "SubnetsDraining";
/// The conditions of networks with addresses.
pub const CONDITIONS: [&str; 2] = [EXHAUSTED, DRAINING];

/// An IPBlock, as last seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    pub version: String,
    pub object: ObservedIpBlock,
}

/// An IPBlock to delete, if it still is as it was seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Discard {
    pub name: String,
    pub uid: String,
    pub version: String,
    /// The node that is gone, if that is why.
    pub node: Option<String>,
    /// The UID of that node.
    pub holder: String,
    /// The UID of its network.
    pub network: String,
}

impl World {
    /// Notes since when nodes that hold blocks are gone, and which of them have been for long enough.
    pub fn notice(&mut self, now: Instant) {
        let live: BTreeSet<&String> = self.nodes.values().map(|node| &node.uid).collect();
        let holders: BTreeSet<&String> =
            self.blocks.values().map(|block| &block.object.spec.holder.uid).collect();
        self.gone.retain(|uid, _| holders.contains(uid) && !live.contains(uid));
        for uid in holders.difference(&live) {
            self.gone.entry((**uid).clone()).or_insert(now);
        }
        let rest = |since: &Instant| GONE.saturating_sub(now.saturating_duration_since(*since));
        let over = self.gone.iter().filter(|(_, since)| rest(since).is_zero());
        self.lost = over.map(|(uid, _)| uid.clone()).collect();
        self.next_lost = self.gone.values().map(rest).filter(|rest| !rest.is_zero()).min();
    }
}

/// The blocks by the UID of their network.
pub fn by_network(world: &World) -> BTreeMap<&str, Vec<(&str, &Block)>> {
    let mut all: BTreeMap<&str, Vec<(&str, &Block)>> = BTreeMap::new();
    for (name, block) in &world.blocks {
        all.entry(&block.object.spec.network_uid).or_default().push((name, block));
    }
    all
}

fn discard(name: &str, block: &Block, node: Option<String>) -> Discard {
    let (uid, version) = (block.object.uid.clone(), block.version.clone());
    let spec = &block.object.spec;
    let (network, holder) = (spec.network_uid.clone(), spec.holder.uid.clone());
    Discard { name: name.to_owned(), uid, version, node, holder, network }
}

/// The blocks of networks that are no more, of networks that nobody can join any more, and of nodes that are gone.
pub fn discarded(world: &World) -> Vec<Discard> {
    let live: BTreeMap<&str, bool> = world
        .networks
        .values()
        .map(|network| {
            let undone = network.deleting.is_some()
                && !network.finalizers.iter().any(|one| one == api::bridgenetwork::FINALIZER_USERS);
            (network.uid.as_str(), undone)
        })
        .collect();
    let gone = |holder: &api::ipblock::NodeRef| world.lost.contains(&holder.uid);
    let mut all = Vec::new();
    for (uid, blocks) in by_network(world) {
        if live.get(uid).is_none_or(|undone| *undone) {
            all.extend(blocks.iter().map(|(name, block)| discard(name, block, None)));
            continue;
        }
        let objects: Vec<&ObservedIpBlock> = blocks.iter().map(|(_, block)| &block.object).collect();
        let abandoned: BTreeSet<&str> =
            ipam::abandoned(objects, gone).into_iter().map(|object| object.uid.as_str()).collect();
        let left = blocks.iter().filter(|(_, block)| abandoned.contains(block.object.uid.as_str()));
        all.extend(
            left.map(|(name, block)| discard(name, block, Some(block.object.spec.holder.node.clone()))),
        );
    }
    all
}

/// How many addresses a network has. The length of its blocks stays what it once was.
pub fn status(scene: &Scene<'_>) -> Option<IpamStatus> {
    let old = scene.network.status.ipam.clone().unwrap_or_default();
    let new =
        IpamStatus { ipv4: family(scene, Family::V4, old.ipv4), ipv6: family(scene, Family::V6, old.ipv6) };
    (new != IpamStatus::default()).then_some(new)
}

fn family(scene: &Scene<'_>, family: Family, old: Option<IpFamilyStatus>) -> Option<IpFamilyStatus> {
    let Ok(spec) = &scene.network.spec else { return old };
    let said = spec.ipam.as_ref();
    // A status can be lost; blocks that are there have the length all the same.
    let whole = scene.blocks.iter().map(|(_, block)| &block.object.spec).filter(|spec| spec.lender.is_none());
    let there =
        whole.filter(|spec| Family::of(spec.cidr.addr()) == family).map(|spec| spec.cidr.prefix_len());
    let length =
        old.map(|old| old.block_length).or_else(|| there.min()).or_else(|| family.block_length(said?))?;
    let blocks = scene.blocks.iter().map(|(_, block)| (&block.object.spec, &block.object.status));
    let grid = said.and_then(|said| BlockGrid::new(said, family, length));
    Some(ipam::network_status(family, grid.as_ref(), length, blocks))
}

/// What is wrong with the addresses of a network that has any.
pub fn said(scene: &Scene<'_>, status: Option<&IpamStatus>) -> Vec<Said> {
    let Some(status) = status else { return Vec::new() };
    let ipam = scene.network.spec.as_ref().ok().and_then(|spec| spec.ipam.as_ref());
    let has = |family| {
        let subnets = ipam.map_or(&[][..], |ipam| ipam.subnets.as_slice());
        subnets.iter().any(|net| Family::of(net.addr()) == family)
    };
    let full =
        |one: &Option<IpFamilyStatus>, family| one.as_ref().is_some_and(|one| one.free == 0 && has(family));
    let mut which = Vec::new();
    which.extend(full(&status.ipv4, Family::V4).then_some("IPv4"));
    which.extend(full(&status.ipv6, Family::V6).then_some("IPv6"));
    let exhausted = if which.is_empty() {
        Said { kind: EXHAUSTED, holds: false, reason: "Enough", message: String::new() }
    } else {
        let message = format!(
            "no {} address is left: add a subnet to spec.ipam.subnets, or delete pods that use the network",
            which.join(" and no ")
        );
        Said { kind: EXHAUSTED, holds: true, reason: "NoneLeft", message }
    };
    let pods: Vec<&String> =
        scene.blocks.iter().flat_map(|(_, block)| &block.object.status.draining).collect();
    let draining = if pods.is_empty() {
        Said { kind: DRAINING, holds: false, reason: "None", message: String::new() }
    } else {
        let message = format!(
            "pods have addresses that spec.ipam does not name any more, and keep them until they go: {}",
            list(&pods)
        );
        Said { kind: DRAINING, holds: true, reason: "InUse", message }
    };
    vec![exhausted, draining]
}
