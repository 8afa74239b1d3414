//! The addresses of networks: counts and conditions for the status, and the IPBlocks to delete.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use api::{
    ClosedNetwork,
    ipam::{IpFamilyStatus, IpamStatus},
    ipblock::HolderRef,
};

use super::{ClusterState, NetworkContext, NodeReport, status::list};
use crate::{
    condition::ConditionDraft,
    ipam::{self, BlockGrid, Family, ObservedIpBlock},
};

/// How long a Node must be missing before its blocks are freed. Longer than the five minutes without the API server after
/// which a daemon stops allocating.
pub const NODE_GONE_GRACE: Duration = Duration::from_mins(10);

const EXHAUSTED: &str = "AddressesExhausted";
const DRAINING: &str = "SubnetsDraining";
/// The conditions of networks with spec.ipam.
pub const CONDITIONS: [&str; 2] = [EXHAUSTED, DRAINING];

/// A cached IPBlock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockState {
    /// The resourceVersion.
    pub version: String,
    pub object: ObservedIpBlock,
}

/// An IPBlock to delete, unless it has changed since.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AbandonedBlock {
    pub name: String,
    pub uid: String,
    pub version: String,
    /// The name of the gone node, if that is the reason.
    pub node: Option<String>,
    /// The UID of the holder's Node.
    pub holder: String,
    /// The UID of the block's network.
    pub network: String,
}

/// The Nodes that hold blocks and are missing, by UID.
#[derive(Debug, Default)]
pub struct MissingNodes {
    /// When each was first observed missing.
    since: BTreeMap<String, Instant>,
    /// Those whose grace period is over: their blocks are free.
    gone: BTreeSet<String>,
    /// The time until the next one counts as gone.
    pub next_gone: Option<Duration>,
}

impl MissingNodes {
    /// Records when each Node that holds blocks was first missing, and which are gone for good. A holder that is not a Node
    /// is never missing.
    pub fn track(&mut self, state: &ClusterState, now: Instant) {
        let live: BTreeSet<&String> = state.nodes.values().map(|node| &node.uid).collect();
        let holders = state.blocks.values().map(|block| &block.object.spec.holder);
        let holders: BTreeSet<&String> =
            holders.filter(|holder| holder.is_node()).map(|holder| &holder.uid).collect();
        self.since.retain(|uid, _| holders.contains(uid) && !live.contains(uid));
        for uid in holders.difference(&live) {
            self.since.entry((**uid).clone()).or_insert(now);
        }
        let rest = |since: &Instant| NODE_GONE_GRACE.saturating_sub(now.saturating_duration_since(*since));
        let expired = self.since.iter().filter(|(_, since)| rest(since).is_zero());
        self.gone = expired.map(|(uid, _)| uid.clone()).collect();
        self.next_gone = self.since.values().map(rest).filter(|rest| !rest.is_zero()).min();
    }
}

/// The blocks by the UID of their network.
pub fn by_network(state: &ClusterState) -> BTreeMap<&str, Vec<(&str, &BlockState)>> {
    let mut all: BTreeMap<&str, Vec<(&str, &BlockState)>> = BTreeMap::new();
    for (name, block) in state.blocks.iter() {
        all.entry(&block.object.spec.network_uid).or_default().push((name, block));
    }
    all
}

fn abandoned_block(name: &str, block: &BlockState, node: Option<String>) -> AbandonedBlock {
    let (uid, version) = (block.object.uid.clone(), block.version.clone());
    let spec = &block.object.spec;
    let (network, holder) = (spec.network_uid.clone(), spec.holder.uid.clone());
    AbandonedBlock { name: name.to_owned(), uid, version, node, holder, network }
}

/// The unused blocks of networks that no node has addresses of any more, and all blocks of gone nodes.
///
/// While the network exists without its users finalizer, every node has reported that it has no address. When it does not
/// exist, its finalizers were removed by hand: a node that exists then deletes its blocks itself, because only the node knows
/// its leases. A block that is kept keeps its name, so a new network of the same name does not get its addresses.
pub fn abandoned(state: &ClusterState, missing: &MissingNodes) -> Vec<AbandonedBlock> {
    let networks: BTreeMap<&str, bool> = state
        .networks
        .values()
        .map(|network| {
            let releasing = network.deleting.is_some()
                && !network.finalizers.iter().any(|one| one == api::bridgenetwork::FINALIZER_USERS);
            (network.uid.as_str(), releasing)
        })
        .collect();
    let nodes: BTreeSet<&str> = state.nodes.values().map(|node| node.uid.as_str()).collect();
    let gone = |holder: &HolderRef| missing.gone.contains(&holder.uid);
    let mut all = Vec::new();
    for (uid, blocks) in by_network(state) {
        let objects: Vec<&ObservedIpBlock> = blocks.iter().map(|(_, block)| &block.object).collect();
        let existing: BTreeSet<&str> = objects.iter().map(|object| object.uid.as_str()).collect();
        // The report of a node is newer than the status of its blocks.
        let reported_unused = |holder: &HolderRef| {
            let report = state.reports.get(&holder.node).filter(|_| nodes.contains(holder.uid.as_str()));
            report.and_then(|report| report.closed.get(uid)).is_some_and(ClosedNetwork::is_unused)
        };
        let unused = |block: &BlockState| {
            let ObservedIpBlock { spec, status, .. } = &block.object;
            let is_used = if spec.holder.is_node() {
                status.used > 0 && !reported_unused(&spec.holder)
            } else {
                !status.claims.is_empty()
            };
            !is_used && !status.lent.iter().any(|lent| existing.contains(lent.block.as_str()))
        };
        let deletable = |block: &BlockState| {
            let holder = &block.object.spec.holder;
            // A machine whose Node is missing can still allocate from a block that it reported as unused.
            let is_known = !holder.is_node() || nodes.contains(holder.uid.as_str()) || gone(holder);
            match networks.get(uid) {
                Some(releasing) => *releasing && is_known && unused(block),
                None if holder.is_node() => unused(block) && gone(holder),
                None => !state.reports.values().any(|report| has_claims_of(report, uid)),
            }
        };
        let of_gone_nodes: BTreeSet<&str> =
            ipam::abandoned(objects, gone).into_iter().map(|object| object.uid.as_str()).collect();
        all.extend(blocks.iter().filter_map(|(name, block)| {
            if deletable(block) {
                return Some(abandoned_block(name, block, None));
            }
            let node = block.object.spec.holder.node.clone();
            of_gone_nodes
                .contains(block.object.uid.as_str())
                .then(|| abandoned_block(name, block, Some(node)))
        }));
    }
    all
}

/// Whether interfaces on the node may have addresses of IPAMClaims of a network.
fn has_claims_of(report: &NodeReport, network: &str) -> bool {
    report.claim_addresses.as_ref().is_none_or(|all| all.contains_key(network))
}

/// The IPAMClaims that have addresses in these blocks.
pub fn claims<'a>(blocks: &[(&'a str, &'a BlockState)]) -> BTreeSet<&'a str> {
    let claimed = blocks.iter().flat_map(|(_, block)| &block.object.status.claims);
    claimed.map(|claimed| claimed.claim.as_str()).collect()
}

/// The address counts of a network. The block length is set once and never changes.
pub fn status(context: &NetworkContext<'_>) -> Option<IpamStatus> {
    let old = context.network.status.ipam.clone().unwrap_or_default();
    let new = IpamStatus {
        ipv4: family(context, Family::V4, old.ipv4),
        ipv6: family(context, Family::V6, old.ipv6),
        claims: i64::try_from(claims(context.blocks).len()).unwrap_or(i64::MAX),
    };
    (new != IpamStatus::default()).then_some(new)
}

fn family(
    context: &NetworkContext<'_>,
    family: Family,
    old: Option<IpFamilyStatus>,
) -> Option<IpFamilyStatus> {
    let Ok(spec) = &context.network.spec else { return old };
    let ipam_spec = spec.ipam.as_ref();
    // If the status was lost, existing blocks have the length.
    let whole =
        context.blocks.iter().map(|(_, block)| &block.object.spec).filter(|spec| spec.lender.is_none());
    let existing =
        whole.filter(|spec| Family::of(spec.cidr.addr()) == family).map(|spec| spec.cidr.prefix_len());
    let length = old
        .map(|old| old.block_length)
        .or_else(|| existing.min())
        .or_else(|| family.block_length(ipam_spec?))?;
    let blocks = context.blocks.iter().map(|(_, block)| (&block.object.spec, &block.object.status));
    let grid = ipam_spec.and_then(|ipam| BlockGrid::new(ipam, family, length));
    Some(ipam::network_status(family, grid.as_ref(), length, blocks))
}

/// The conditions of a network with addresses.
pub fn conditions(context: &NetworkContext<'_>, status: Option<&IpamStatus>) -> Vec<ConditionDraft> {
    let Some(status) = status else { return Vec::new() };
    let ipam = context.network.spec.as_ref().ok().and_then(|spec| spec.ipam.as_ref());
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
        ConditionDraft::new(EXHAUSTED, false, "Enough", "")
    } else {
        let message = format!(
            "no free {} addresses: add a subnet to spec.ipam.subnets, or delete pods that use the network",
            which.join(" and ")
        );
        ConditionDraft::new(EXHAUSTED, true, "NoneLeft", message)
    };
    let pods: Vec<&String> =
        context.blocks.iter().flat_map(|(_, block)| &block.object.status.draining).collect();
    let draining = if pods.is_empty() {
        ConditionDraft::new(DRAINING, false, "None", "")
    } else {
        let claims = pods.iter().any(|holder| holder.starts_with("IPAMClaim "));
        let message = format!(
            "{} have addresses outside of spec.ipam and keep them until they are deleted: {}",
            if claims { "pods and IPAMClaims" } else { "pods" },
            list(&pods)
        );
        ConditionDraft::new(DRAINING, true, "InUse", message)
    };
    vec![exhausted, draining]
}
