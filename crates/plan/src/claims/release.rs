//! Which reservations nothing needs any more.
//!
//! An address is free when its claim is gone and no interface has it. The daemons report which addresses interfaces have.
//! Annotations, which tenants write, count only for pods of nodes whose daemon does not report.

use std::{
    borrow::Borrow,
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use api::ipblock::ClaimedAddress;

use super::{ClaimPod, ClaimState, ObjectKey};
use crate::{
    bridge::Uid,
    network::{BlockState, ClusterState, NODE_GONE_GRACE, NodeReport},
};

/// How long a reservation must be releasable before it is released. It covers the time between the end of a pod's
/// containers and the CNI DEL of its sandbox, and an ADD that read the claim before it was gone.
pub const RELEASE_DELAY: Duration = Duration::from_secs(10);
/// How long an ADD that read a claim may take, and after it the report of its addresses.
const MAX_REPORT_DELAY: Duration = Duration::from_secs(60);

/// A reservation that the caches show to be releasable. After [`RELEASE_DELAY`] the caller confirms it with live reads:
/// [`confirms`] decides from them.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Candidate {
    /// The name of the IPBlock.
    pub block: String,
    pub address: IpAddr,
    /// The UID of the claim that it is reserved for.
    pub uid: Uid,
    pub claim: ObjectKey,
}

/// What the daemons report about addresses of claims of a network.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReportedAddresses {
    /// Whether any daemon reports.
    any: bool,
    addresses: BTreeSet<IpAddr>,
}

impl ReportedAddresses {
    /// The reports of the nodes that exist.
    pub fn of(state: &ClusterState, network: &str) -> Self {
        let mut all = Self::default();
        for (_, report) in state.reports.iter().filter(|(node, _)| state.nodes.contains_key(*node)) {
            all.extend(Some(report), network);
        }
        all
    }

    /// Whether an interface has the address.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.addresses.contains(&address)
    }

    /// Adds the report of a node.
    pub fn extend(&mut self, report: Option<&NodeReport>, network: &str) {
        if let Some(networks) = report.and_then(|report| report.claim_addresses.as_ref()) {
            self.any = true;
            self.addresses.extend(networks.get(network).into_iter().flatten());
        }
    }
}

/// Whether annotations of a pod on a node decide if it has the address of a candidate: the daemon of the node does not report,
/// or may not have reported an ADD that began before the claim was gone. An ADD succeeds only once the report has its addresses,
/// so an old report lacks none. `unused` is for how long nothing has needed the reservation, `missing` for how long the Node has
/// been missing: a tenant can name any node.
pub fn annotations_count(
    candidate: &Candidate,
    pod: &ClaimPod,
    report: Option<&NodeReport>,
    unused: Duration,
    missing: Option<Duration>,
) -> bool {
    if missing.is_some_and(|time| time >= NODE_GONE_GRACE) {
        return false;
    }
    let is_reported = report.is_some_and(|report| report.claim_addresses.is_some());
    !is_reported || unused < MAX_REPORT_DELAY && pod.references(&candidate.claim)
}

/// Whether annotations of a pod say that it has the address of a candidate, or can get it.
pub fn is_named_by(candidate: &Candidate, pod: &ClaimPod) -> bool {
    let shown = pod.key.namespace == candidate.claim.namespace && pod.shows(candidate.address);
    shown || pod.references(&candidate.claim)
}

/// The reservations of a network that can be released. `claims` returns the claim of a UID, `named` that of a key; `pods`
/// are the live pods of the namespaces of the claims. Their nodes are not known: once a daemon reports, [`confirms`] decides
/// which of them count.
pub fn due<C: Borrow<ClaimState>>(
    network: &str,
    blocks: &BTreeMap<String, BlockState>,
    claims: impl Fn(&str) -> Option<C>,
    named: impl Fn(&ObjectKey) -> Option<C>,
    pods: &[&ClaimPod],
    reported: &ReportedAddresses,
) -> Vec<Candidate> {
    let pods = if reported.any { &[][..] } else { pods };
    let own = || blocks.iter().filter(|(_, block)| is_own(network, block));
    let mut by_claim: BTreeMap<&Uid, BTreeSet<IpAddr>> = BTreeMap::new();
    for (_, block) in own() {
        for claimed in &block.object.status.claims {
            by_claim.entry(&claimed.uid).or_default().insert(claimed.address);
        }
    }
    let mut candidates = Vec::new();
    for (name, block) in own() {
        for ClaimedAddress { address, claim, uid } in &block.object.status.claims {
            let Some(key) = ObjectKey::parse(claim) else { continue };
            let candidate =
                Candidate { block: name.clone(), address: *address, uid: uid.clone(), claim: key };
            let current = claims(uid).or_else(|| named(&candidate.claim));
            let is_free = is_free(&candidate, &by_claim[uid], current.as_ref().map(Borrow::borrow), pods);
            if is_free && !reported.addresses.contains(address) {
                candidates.push(candidate);
            }
        }
    }
    candidates
}

/// Whether live reads confirm that a reservation can be released: `claim` is the claim that has the name now, `pods` are
/// the live pods of its namespace whose annotations count. `blocks` are those of the network that the release will be planned
/// from.
pub fn confirms(
    candidate: &Candidate,
    network: &str,
    blocks: &BTreeMap<String, BlockState>,
    claim: Option<&ClaimState>,
    pods: &[&ClaimPod],
    reported: &ReportedAddresses,
) -> bool {
    let own = blocks.values().filter(|block| is_own(network, block));
    let reserved = own.flat_map(|block| &block.object.status.claims).filter(|it| it.uid == candidate.uid);
    let reserved: BTreeSet<IpAddr> = reserved.map(|claimed| claimed.address).collect();
    let is_reported = reported.addresses.contains(&candidate.address);
    reserved.contains(&candidate.address) && !is_reported && is_free(candidate, &reserved, claim, pods)
}

fn is_own(network: &str, block: &BlockState) -> bool {
    block.object.spec.holder.is_claims() && block.object.spec.network_uid == network
}

/// Whether nothing needs a reservation. `reserved` are all addresses that are reserved for its claim, `current` is the
/// claim of its UID, else of its name.
fn is_free(
    candidate: &Candidate,
    reserved: &BTreeSet<IpAddr>,
    current: Option<&ClaimState>,
    pods: &[&ClaimPod],
) -> bool {
    if let Some(claim) = current.filter(|claim| claim.uid == candidate.uid) {
        // Two controllers may each have reserved an address; the one that is not published is left over.
        let published: Vec<IpAddr> = claim.published().iter().map(ipnet::IpNet::addr).collect();
        let is_twin = |other: &IpAddr| {
            other.is_ipv4() == candidate.address.is_ipv4()
                && published.contains(other)
                && reserved.contains(other)
        };
        let is_shown = || pods.iter().any(|pod| pod.references(&claim.key) && pod.shows(candidate.address));
        return !published.contains(&candidate.address) && published.iter().any(is_twin) && !is_shown();
    }
    let current = current.map(|claim| claim.uid.as_str());
    !pods.iter().any(|pod| holds(pod, candidate.address, &candidate.claim, current))
}

/// Whether a live pod holds an address that was reserved for a claim that is gone. `current` is the UID of the claim that has
/// the name now.
///
/// A pod holds the address if its network-status shows it. Multus writes network-status after all attachments, so a pod that
/// references the claim and has none may have got the address from the earlier claim.
pub fn holds(pod: &ClaimPod, address: IpAddr, claim: &ObjectKey, current: Option<&str>) -> bool {
    let is_shown = pod.key.namespace == claim.namespace && pod.shows(address);
    is_shown || pod.references(claim) && (current.is_none() || !pod.has_status)
}
