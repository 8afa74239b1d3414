//! BridgeNetworks: their NetworkAttachmentDefinitions (NADs), their status, and the order of their deletion.
//!
//! [`plan`] takes the observed state of the cluster and returns what the controller writes next. The plan is a function of
//! that state: what any leader wrote before shows up in the next observation.

mod addresses;
mod closing;
mod mtu;
mod nads;
mod selected_nodes;
mod status;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use api::{
    BridgeNetworkSpec, BridgeNetworkStatus, ClosedNetwork, Condition, NetworkOnNode, Vtep,
    bridgenetwork::{FINALIZER_NODES, FINALIZER_USERS, MAX_STATUS_ENTRIES, READY_LABEL_PREFIX},
    digest::digest,
    nad::{NadNetwork, origin_digest},
    selection::NadRef,
};
use jiff::{SignedDuration, Timestamp};

pub use self::{
    addresses::{AbandonedBlock, BlockState, MissingNodes, NODE_GONE_GRACE, abandoned as abandoned_blocks},
    mtu::desired as desired_mtu,
    selected_nodes::{find_conflict, find_nad_conflict},
};
use self::{closing::NodeUsers, nads::NadIndex, selected_nodes::SelectedNodes};
use crate::{
    shared_map::SharedMap,
    users::{UserLookup, UserSummary},
};

/// The delay between the start of a network's deletion and the first removal. A pod that was admitted before any webhook
/// knew of the deletion reaches the caches within this time.
pub const DELETION_GRACE: Duration = Duration::from_secs(1);

/// A cached BridgeNetwork.
#[derive(Debug, Clone, PartialEq)]
pub struct NetworkState {
    pub name: String,
    pub uid: String,
    /// The resourceVersion.
    pub version: String,
    pub generation: i64,
    pub created: Timestamp,
    /// When this replica first observed the deletionTimestamp.
    pub deleting: Option<Timestamp>,
    pub finalizers: Vec<String>,
    /// The spec, or why it cannot be parsed.
    pub spec: Result<BridgeNetworkSpec, String>,
    pub status: BridgeNetworkStatus,
}

/// A cached Node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeState {
    pub uid: String,
    pub labels: BTreeMap<String, String>,
    /// The reason of the Ready condition, if that is not True.
    pub not_ready_reason: Option<String>,
}

/// A cached NodeNetwork: what a daemon reports about its node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeReport {
    pub vtep: Option<Vtep>,
    /// By the UID of the network.
    pub networks: BTreeMap<String, NetworkOnNode>,
    /// The networks that are being deleted and of which the node allocates no more addresses, by UID.
    pub closed: BTreeMap<String, ClosedNetwork>,
    /// The addresses of IPAMClaims that interfaces on the node have, by the UID of the network. None if the daemon does not
    /// report them.
    pub claim_addresses: Option<BTreeMap<String, Vec<IpAddr>>>,
}

/// A cached NetworkAttachmentDefinition (NAD).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NadState {
    pub uid: String,
    /// The resourceVersion.
    pub version: String,
    pub deleting: bool,
    /// The network's name in the ownership label.
    pub network: Option<String>,
    /// The network's UID in the ownership annotation.
    pub network_uid: Option<String>,
    /// The annotation that binds the NAD to its namespace and name: see [`api::nad::origin_digest`].
    pub origin: Option<String>,
    pub config: Option<String>,
    /// The BridgeNetwork that the config attaches pods to.
    pub joins: Option<String>,
    /// What the config says about IPAMClaims, or why it cannot be read.
    pub network_config: Result<NadNetwork, String>,
}

impl NadState {
    /// The UID of the network that created this NAD under this name. A copy under another name or in another namespace has
    /// no owner.
    pub fn owner_uid(&self, at: &NadRef) -> Option<&str> {
        let uid = self.network_uid.as_deref()?;
        (self.origin.as_ref() == Some(&origin_digest(uid, at))).then_some(uid)
    }
}

/// The phase of a cached namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NamespacePhase {
    Active,
    Terminating,
}

/// The observed state of the cluster without the users of networks, which [`UserLookup`] answers for. A clone is a cheap
/// snapshot.
#[derive(Debug, Clone, Default)]
pub struct ClusterState {
    pub networks: SharedMap<String, NetworkState>,
    pub nodes: SharedMap<String, NodeState>,
    pub reports: SharedMap<String, NodeReport>,
    /// None while the cluster does not serve the kind.
    pub nads: Option<SharedMap<NadRef, NadState>>,
    pub namespaces: SharedMap<String, NamespacePhase>,
    pub blocks: SharedMap<String, BlockState>,
    /// The NADs that the controller deleted, until a live read confirms that no user named them: see
    /// [`NetworkStep::ConfirmNadsUnused`].
    pub deleted_nads: SharedMap<NadRef, DeletedNad>,
}

/// What the leader remembers of its own writes to networks.
#[derive(Debug, Default)]
pub struct NetworkRecords {
    /// The NADs that the API server refused to write, with its message, by the UID of the network.
    pub rejected: BTreeMap<String, BTreeMap<NadRef, String>>,
    /// Why a live read before the removal of a finalizer failed, by the UID of the network.
    pub live_read_failed: BTreeMap<String, String>,
    /// A digest of each NAD's owner and config when it was last observed or written as desired. Distinguishes a repair from
    /// a change of the spec: see [`NetworkRecords::record_plan`].
    pub synced_nads: BTreeMap<NadRef, u64>,
}

/// A NAD that the controller deleted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeletedNad {
    /// The UID of its network.
    pub network: String,
    /// The UID of the NAD.
    pub uid: String,
}

impl NetworkRecords {
    /// Updates the digests of synced NADs. A NAD with an open step keeps its old digest until the step is done.
    pub fn record_plan(&mut self, state: &ClusterState, plan: &NetworksPlan) {
        let open: BTreeSet<&NadRef> = plan.networks.iter().flat_map(NetworkPlan::nads).collect();
        let mut synced = std::mem::take(&mut self.synced_nads);
        synced.retain(|at, _| open.contains(at));
        for (at, nad) in state.nads.iter().flat_map(SharedMap::iter).filter(|(at, _)| !open.contains(at)) {
            if let (Some(_), Some(uid), Some(config)) = (&nad.network, &nad.network_uid, &nad.config) {
                synced.insert(at.clone(), digest([uid.as_str(), config]));
            }
        }
        self.synced_nads = synced;
    }

    /// Records a successful write before the watch delivers it, so that a foreign change right after it counts as one.
    pub fn record_write(&mut self, uid: &str, step: &NetworkStep, written: impl Fn(&NadRef) -> bool) {
        match step {
            NetworkStep::CreateNad { at, config, .. } | NetworkStep::ApplyNad { at, config, .. }
                if written(at) =>
            {
                self.synced_nads.insert(at.clone(), digest([uid, config]));
            }
            NetworkStep::DeleteNads(all) => {
                for (at, _) in all {
                    self.synced_nads.remove(at);
                }
            }
            _ => {}
        }
    }
}

impl ClusterState {
    /// Updates the list of deleted NADs. Call before a deletion is sent, because its response can be lost.
    pub fn record_deleted_nads(&mut self, plan: &NetworksPlan) {
        for network_plan in &plan.networks {
            let deletions = network_plan.steps.iter().filter_map(|step| match step {
                NetworkStep::DeleteNads(all) => Some(all),
                _ => None,
            });
            for (at, nad) in deletions.flatten() {
                let deleted = DeletedNad { network: network_plan.uid.clone(), uid: nad.uid.clone() };
                self.deleted_nads.insert(at.clone(), deleted);
            }
        }
        let live: BTreeSet<&str> = self.networks.values().map(|network| network.uid.as_str()).collect();
        let current = |at: &NadRef| self.nads.as_ref().and_then(|all| all.get(at));
        let is_open = |at: &NadRef, deleted: &DeletedNad| {
            live.contains(deleted.network.as_str()) && current(at).is_none_or(|nad| nad.uid == deleted.uid)
        };
        let closed = self.deleted_nads.iter().filter(|(at, deleted)| !is_open(at, deleted));
        let closed: BTreeSet<NadRef> = closed.map(|(at, _)| at.clone()).collect();
        self.confirm_unused(&closed);
    }

    /// Forgets deleted NADs that, as a live read confirmed, have no users.
    pub fn confirm_unused(&mut self, nads: &BTreeSet<NadRef>) {
        for at in nads {
            self.deleted_nads.remove(at);
        }
    }
}

/// What the controller writes next for networks and their NADs.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NetworksPlan {
    /// The networks with pending writes.
    pub networks: Vec<NetworkPlan>,
    /// NADs of networks that no longer exist.
    pub orphan_nads: Vec<(NadRef, NadState)>,
    /// When to plan again without a change.
    pub requeue_after: Option<Duration>,
}

/// The writes for one network: first the steps, then the status.
///
/// A rejected NAD does not stop the other steps. The status is held back until the rejection is in [`NetworkRecords`], so
/// that it reports the rejection.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NetworkPlan {
    pub name: String,
    pub uid: String,
    /// The resourceVersion.
    pub version: String,
    pub steps: Vec<NetworkStep>,
    pub status: Option<Box<BridgeNetworkStatus>>,
    /// Only the users changed: the write may be batched with later ones.
    pub deferrable: bool,
    pub events: Vec<EventDraft>,
}

impl NetworkPlan {
    /// The NADs that the steps write, one by one.
    pub fn nads(&self) -> impl Iterator<Item = &NadRef> {
        self.steps.iter().flat_map(NetworkStep::nads)
    }

    /// Whether a step removes a finalizer.
    pub fn removes_finalizer(&self) -> bool {
        self.steps.iter().any(|step| {
            matches!(
                step,
                NetworkStep::RemoveUsersFinalizer { .. } | NetworkStep::RemoveNodesFinalizer { .. }
            )
        })
    }

    /// Whether a step depends on a live read.
    pub fn needs_live_read(&self) -> bool {
        self.steps.iter().any(|step| match step {
            NetworkStep::DeleteNads(_)
            | NetworkStep::ConfirmNadsUnused(_)
            | NetworkStep::RemoveUsersFinalizer { .. }
            | NetworkStep::RemoveNodesFinalizer { .. } => true,
            NetworkStep::SetFinalizers(_) | NetworkStep::CreateNad { .. } | NetworkStep::ApplyNad { .. } => {
                false
            }
        })
    }
}

/// One write.
#[derive(Debug, Clone, PartialEq)]
pub enum NetworkStep {
    /// Replaces the finalizers.
    SetFinalizers(Vec<String>),
    CreateNad {
        at: NadRef,
        config: String,
        repair: bool,
    },
    /// Corrects an owned NAD.
    ApplyNad {
        at: NadRef,
        uid: String,
        version: String,
        config: String,
        repair: bool,
    },
    /// Deletes owned NADs, if a live read finds no user of any of them.
    DeleteNads(Vec<(NadRef, NadState)>),
    /// Checks with a live read that these deleted NADs had no user. A used one is created again.
    ConfirmNadsUnused(BTreeSet<NadRef>),
    /// Lets the nodes remove their links, if a live read finds no NAD of the network and no user of these NADs.
    RemoveUsersFinalizer {
        nads: BTreeSet<NadRef>,
        finalizers: Vec<String>,
    },
    /// Lets the API server remove the network, if a live read finds no node that lists it.
    RemoveNodesFinalizer {
        finalizers: Vec<String>,
    },
}

impl NetworkStep {
    /// The NADs that the step writes or checks, one by one.
    pub fn nads(&self) -> Vec<&NadRef> {
        match self {
            Self::CreateNad { at, .. } | Self::ApplyNad { at, .. } => vec![at],
            Self::DeleteNads(all) => all.iter().map(|(at, _)| at).collect(),
            Self::ConfirmNadsUnused(all) => all.iter().collect(),
            Self::SetFinalizers(_)
            | Self::RemoveUsersFinalizer { .. }
            | Self::RemoveNodesFinalizer { .. } => Vec::new(),
        }
    }
}

/// Labels of one Node to set (Some) or to remove (None).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeLabelPatch {
    pub node: String,
    pub uid: String,
    pub labels: BTreeMap<String, Option<&'static str>>,
}

/// An Event to record for a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventDraft {
    /// The NAD that the event reports on. The event is recorded only if that NAD was written.
    pub nad: Option<NadRef>,
    pub warning: bool,
    pub reason: &'static str,
    pub note: String,
}

/// Plans the next writes of networks and their NADs.
pub fn plan(
    state: &ClusterState,
    users: &dyn UserLookup,
    records: &NetworkRecords,
    now: Timestamp,
) -> NetworksPlan {
    let nads = NadIndex::new(state);
    let selected = selected_nodes::all(state);
    let blocks = addresses::by_network(state);
    let mut plan = NetworksPlan::default();
    for network in state.networks.values() {
        let blocks = blocks.get(network.uid.as_str()).map_or(&[][..], Vec::as_slice);
        let references = nads.used_for(state, network);
        let mut context = NetworkContext {
            state,
            network,
            now,
            nads: &nads,
            users: users.summary(&references, MAX_STATUS_ENTRIES),
            references,
            user_lookup: users,
            records,
            selected: selected.get(network.name.as_str()),
            blocks,
            claims: addresses::claims(blocks),
            node_users: NodeUsers::default(),
        };
        context.node_users = NodeUsers::of(&context);
        let network_plan = context.plan();
        if let Some(wait) = context.deletion_timer() {
            plan.requeue_after = Some(plan.requeue_after.map_or(wait, |other| other.min(wait)));
        }
        if !network_plan.steps.is_empty() || network_plan.status.is_some() {
            plan.networks.push(network_plan);
        }
    }
    plan.orphan_nads = nads.orphans(state, users);
    plan
}

/// The NADs by which pods use a network: those that it owns or should own, and those that others wrote for it.
pub fn nads_of(state: &ClusterState, network: &NetworkState) -> BTreeSet<NadRef> {
    NadIndex::new(state).used_for(state, network)
}

/// The networks whose [`nads_of`] contains this NAD. Costs one lookup per network and builds no index.
pub fn networks_of<'a>(state: &'a ClusterState, at: &'a NadRef) -> impl Iterator<Item = &'a NetworkState> {
    let owners = nads::NadOwners::new(state, at);
    state.networks.values().filter(move |network| owners.include(network))
}

fn grace_is_over(network: &NetworkState, now: Timestamp) -> bool {
    let grace = SignedDuration::try_from(DELETION_GRACE).unwrap_or(SignedDuration::ZERO);
    // A clock that was set back must not delay a deletion.
    network.deleting.is_none_or(|since| now < since || now.duration_since(since) >= grace)
}

/// One network and the state that its plan depends on.
struct NetworkContext<'a> {
    state: &'a ClusterState,
    network: &'a NetworkState,
    now: Timestamp,
    nads: &'a NadIndex<'a>,
    /// The NADs by which pods use it: see [`nads_of`].
    references: BTreeSet<NadRef>,
    users: UserSummary,
    user_lookup: &'a dyn UserLookup,
    records: &'a NetworkRecords,
    selected: Option<&'a SelectedNodes<'a>>,
    blocks: &'a [(&'a str, &'a BlockState)],
    /// The IPAMClaims that have addresses of the network, as namespace/name.
    claims: BTreeSet<&'a str>,
    /// The nodes that the deletion of the network waits for.
    node_users: NodeUsers<'a>,
}

impl<'a> NetworkContext<'a> {
    fn plan(&self) -> NetworkPlan {
        let network = self.network;
        let plan = NetworkPlan {
            name: network.name.clone(),
            uid: network.uid.clone(),
            version: network.version.clone(),
            ..NetworkPlan::default()
        };
        if network.deleting.is_some() { self.finalize(plan) } else { self.reconcile(plan) }
    }

    fn reconcile(&self, mut plan: NetworkPlan) -> NetworkPlan {
        let missing = [FINALIZER_USERS, FINALIZER_NODES].into_iter().filter(|one| !self.has(one));
        let missing: Vec<String> = missing.map(str::to_owned).collect();
        if !missing.is_empty() {
            let all = self.network.finalizers.iter().cloned().chain(missing).collect();
            plan.steps.push(NetworkStep::SetFinalizers(all));
            return plan;
        }
        let mtu = mtu::effective(self);
        let nad_plan = self.nads.plan(self, mtu.mtu);
        plan.steps.clone_from(&nad_plan.steps);
        status::write(self, &mtu, &nad_plan, &mut plan);
        plan
    }

    fn finalize(&self, mut plan: NetworkPlan) -> NetworkPlan {
        if self.has(FINALIZER_USERS) {
            let mtu = mtu::effective(self);
            let used = self.used_by() > 0 || self.node_users.is_used();
            let mut nad_plan = if used { self.nads.plan(self, mtu.mtu) } else { nads::NadPlan::default() };
            if !used && self.node_users.is_empty() && grace_is_over(self.network, self.now) {
                nad_plan.steps.extend(self.next_deletion_step());
                nad_plan.rejected = self.rejected(&nad_plan.steps);
            }
            plan.steps.clone_from(&nad_plan.steps);
            let last = matches!(plan.steps.first(), Some(NetworkStep::RemoveUsersFinalizer { .. }));
            if !last || self.live_read_failed().is_some() {
                status::write(self, &mtu, &nad_plan, &mut plan);
            }
            return plan;
        }
        plan.steps.extend(delete_step(self.nads.owned_by(self.network)));
        // The blocks go before the network, so that a new network of the same name finds its addresses free.
        if self.has(FINALIZER_NODES) && self.nodes_listing().next().is_none() && self.blocks.is_empty() {
            plan.steps.push(NetworkStep::RemoveNodesFinalizer { finalizers: self.without(FINALIZER_NODES) });
            if self.live_read_failed().is_none() {
                return plan;
            }
        }
        let rejected = self.rejected(&plan.steps);
        let nad_plan = nads::NadPlan { rejected, ..nads::NadPlan::default() };
        status::write(self, &mtu::effective(self), &nad_plan, &mut plan);
        plan
    }

    /// When to plan the deletion again without a change.
    fn deletion_timer(&self) -> Option<Duration> {
        let since = self.deleting_since()?;
        if !grace_is_over(self.network, self.now) {
            return Some(DELETION_GRACE);
        }
        (!self.node_users.is_empty() && !self.node_users.is_overdue(since)).then_some(closing::REPORT_TIME)
    }

    /// How long this replica has known of the deletion.
    fn deleting_since(&self) -> Option<SignedDuration> {
        Some(self.now.duration_since(self.network.deleting?))
    }

    /// How many objects use the network or have addresses of it.
    fn used_by(&self) -> usize {
        self.users.count + self.claims.len()
    }

    /// The NADs of these steps that the API server rejected the last time, with its message.
    fn rejected(&self, steps: &[NetworkStep]) -> Vec<(NadRef, String)> {
        let Some(rejected) = self.records.rejected.get(&self.network.uid) else { return Vec::new() };
        let nads = steps.iter().flat_map(NetworkStep::nads);
        nads.filter_map(|at| Some((at.clone(), rejected.get(at)?.clone()))).collect()
    }

    /// Why the last live read for the network's deletion failed.
    fn live_read_failed(&self) -> Option<&'a str> {
        self.records.live_read_failed.get(&self.network.uid).map(String::as_str)
    }

    /// The next step for a network without known users: its NADs are deleted first, then the nodes may remove their links.
    fn next_deletion_step(&self) -> Option<NetworkStep> {
        let left = self.nads.owned_by(self.network);
        if left.is_empty() {
            let finalizers = self.without(FINALIZER_USERS);
            return Some(NetworkStep::RemoveUsersFinalizer { nads: self.references.clone(), finalizers });
        }
        delete_step(left)
    }

    fn has(&self, finalizer: &str) -> bool {
        self.network.finalizers.iter().any(|one| one == finalizer)
    }

    fn without(&self, finalizer: &str) -> Vec<String> {
        self.network.finalizers.iter().filter(|one| *one != finalizer).cloned().collect()
    }

    /// The nodes that report the network, so may have links of it. A NodeNetwork without a Node does not count: it is about
    /// to be garbage collected.
    fn nodes_listing(&self) -> impl Iterator<Item = (&'a str, &'a NodeState, &'a NetworkOnNode)> + use<'a> {
        let (state, uid) = (self.state, &self.network.uid);
        state.nodes.iter().filter_map(move |(name, node)| {
            let entry = state.reports.get(name)?.networks.get(uid)?;
            Some((name.as_str(), node, entry))
        })
    }

    fn condition(&self, kind: &str) -> Option<&'a Condition> {
        self.network.status.conditions.iter().find(|condition| condition.r#type == kind)
    }
}

/// Deletes these NADs, except for those that are being deleted already.
fn delete_step(mut nads: Vec<(NadRef, NadState)>) -> Option<NetworkStep> {
    nads.retain(|(_, nad)| !nad.deleting);
    (!nads.is_empty()).then_some(NetworkStep::DeleteNads(nads))
}

/// The labels by which the scheduler finds the nodes where a network is ready, as their daemons report. A node that is not
/// ready keeps its labels: the scheduler avoids it anyway, and its links exist.
pub fn node_labels(state: &ClusterState) -> Vec<NodeLabelPatch> {
    let ready = |entry: &NetworkOnNode| {
        let network = state.networks.get(&entry.name).filter(|network| network.uid == entry.uid);
        entry.ready && network.is_some()
    };
    let mut patches = Vec::new();
    for (name, node) in state.nodes.iter() {
        let report = state.reports.get(name);
        let entries = report.into_iter().flat_map(|report| report.networks.values());
        let desired: BTreeSet<String> = entries
            .filter(|entry| ready(entry))
            .map(|entry| format!("{READY_LABEL_PREFIX}{}", entry.name))
            .collect();
        let missing =
            desired.iter().filter(|label| node.labels.get(*label).is_none_or(|value| value != "true"));
        let mut labels: BTreeMap<String, Option<&str>> =
            missing.map(|label| (label.clone(), Some("true"))).collect();
        let stale = node
            .labels
            .keys()
            .filter(|label| label.starts_with(READY_LABEL_PREFIX) && !desired.contains(*label));
        labels.extend(stale.map(|label| (label.clone(), None)));
        if !labels.is_empty() {
            patches.push(NodeLabelPatch { node: name.clone(), uid: node.uid.clone(), labels });
        }
    }
    patches
}
