//! The bridge networks of the cluster: their attachments, their status, and the order in which they go.
//!
//! [`plan`] looks at everything there is and says what to write next. Nothing is remembered between two looks: whatever
//! was written, by this leader or the one before, is seen the next time.

mod addresses;
mod attachments;
mod mtu;
mod selected;
mod status;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use api::{
    BridgeNetworkSpec, BridgeNetworkStatus, Condition, NetworkOnNode, Vtep,
    bridgenetwork::{FINALIZER_NODES, FINALIZER_USERS, MAX_STATUS_ENTRIES, READY_LABEL_PREFIX},
    digest::digest,
    nad::origin_digest,
    selection::NadRef,
};
use jiff::{SignedDuration, Timestamp};

pub use self::{
    addresses::{Block, Discard, GONE},
    mtu::wanted as wanted_mtu,
    selected::{clash_with, same_attachment},
};
use self::{attachments::Attachments, selected::Selected};
use crate::users::{Index, Summary};

/// From the beginning of a deletion until anything is taken away: a pod that was admitted before anybody knew of the
/// deletion has this long to be seen.
pub const SETTLE: Duration = Duration::from_secs(1);

/// A BridgeNetwork, as last seen.
#[derive(Debug, Clone, PartialEq)]
pub struct Network {
    pub name: String,
    pub uid: String,
    pub version: String,
    pub generation: i64,
    pub created: Timestamp,
    /// When its deletion was first seen here.
    pub deleting: Option<Timestamp>,
    pub finalizers: Vec<String>,
    /// What it asks for, or why that cannot be read.
    pub spec: Result<BridgeNetworkSpec, String>,
    pub status: BridgeNetworkStatus,
}

/// A Node, as last seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    pub uid: String,
    pub labels: BTreeMap<String, String>,
    /// Why the node does not answer, if it does not.
    pub silent: Option<String>,
}

/// A NodeNetwork, as last seen.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    pub vtep: Option<Vtep>,
    /// By the network's UID.
    pub networks: BTreeMap<String, NetworkOnNode>,
}

/// A NetworkAttachmentDefinition, as last seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attachment {
    pub uid: String,
    pub version: String,
    pub deleting: bool,
    /// The mark on those that Patchbay keeps: the network's name and UID.
    pub network: Option<String>,
    pub network_uid: Option<String>,
    /// Where it was made, as its mark says: see [`api::nad::origin_digest`].
    pub place: Option<String>,
    pub config: Option<String>,
    /// The network of ours that its config joins pods to.
    pub joins: Option<String>,
}

impl Attachment {
    /// The UID of the network that made it here. A copy that somebody made of it elsewhere is nobody's but theirs.
    pub fn made_by(&self, at: &NadRef) -> Option<&str> {
        let uid = self.network_uid.as_deref()?;
        (self.place.as_ref() == Some(&origin_digest(uid, at))).then_some(uid)
    }
}

/// A namespace, as last seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Namespace {
    Active,
    Terminating,
}

/// All that is known when something has to be decided.
#[derive(Debug, Default)]
pub struct World {
    pub networks: BTreeMap<String, Network>,
    pub nodes: BTreeMap<String, Node>,
    pub reports: BTreeMap<String, Report>,
    /// None while the cluster does not have the kind.
    pub attachments: Option<BTreeMap<NadRef, Attachment>>,
    pub namespaces: BTreeMap<String, Namespace>,
    pub users: Index,
    /// The attachments that the API server refused to write, with its words, by the UID of the network.
    pub refused: BTreeMap<String, BTreeMap<NadRef, String>>,
    /// What the API server said instead of an answer when it was asked whether a network may go, by the network's UID.
    pub unanswered: BTreeMap<String, String>,
    /// The attachments that were seen in place, by a digest of what they said: see [`World::remember`].
    pub in_place: BTreeMap<NadRef, u64>,
    pub blocks: BTreeMap<String, Block>,
    /// Since when nodes that hold blocks are gone, by their UID: see [`World::notice`].
    pub gone: BTreeMap<String, Instant>,
    /// Those of them that have been for so long that their blocks are free.
    pub lost: BTreeSet<String>,
    /// When the next one will have been.
    pub next_lost: Option<Duration>,
    /// The attachments that came, changed or went since the last plan.
    pub stirred: BTreeSet<NadRef>,
    /// The attachments that we took away, until it is known that nobody had begun to use them: see [`Step::Confirm`].
    pub withdrawn: BTreeMap<NadRef, Withdrawn>,
}

/// An attachment that we took away.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Withdrawn {
    /// The UID of its network.
    pub network: String,
    /// Its own.
    pub uid: String,
}

impl World {
    /// Notes which attachments are in place. What a plan has to write is noted as it was before somebody changed it, until
    /// it is written.
    pub fn remember(&mut self, plan: &Plan) {
        let open: BTreeSet<&NadRef> = plan.turns.iter().flat_map(Turn::places).collect();
        let mut in_place = std::mem::take(&mut self.in_place);
        in_place.retain(|at, _| open.contains(at));
        for (at, one) in self.attachments.iter().flatten().filter(|(at, _)| !open.contains(at)) {
            if let (Some(_), Some(uid), Some(config)) = (&one.network, &one.network_uid, &one.config) {
                in_place.insert(at.clone(), digest([uid.as_str(), config]));
            }
        }
        self.in_place = in_place;
        self.remember_withdrawn(plan);
    }

    /// Noted before it is done: an answer that is lost does not undo a deletion.
    fn remember_withdrawn(&mut self, plan: &Plan) {
        for turn in &plan.turns {
            let deletions = turn.steps.iter().filter_map(|step| match step {
                Step::Delete(all) => Some(all),
                _ => None,
            });
            for (at, one) in deletions.flatten() {
                let withdrawn = Withdrawn { network: turn.uid.clone(), uid: one.uid.clone() };
                self.withdrawn.insert(at.clone(), withdrawn);
            }
        }
        let live: BTreeSet<&str> = self.networks.values().map(|network| network.uid.as_str()).collect();
        let there = |at: &NadRef| self.attachments.as_ref().and_then(|all| all.get(at));
        self.withdrawn.retain(|at, it| {
            live.contains(it.network.as_str()) && there(at).is_none_or(|found| found.uid == it.uid)
        });
    }

    /// The API server itself has said that nobody uses these.
    pub fn confirmed(&mut self, attachments: &BTreeSet<NadRef>) {
        self.withdrawn.retain(|at, _| !attachments.contains(at));
    }

    /// Notes what we wrote, before it is seen: whoever changes it at once has changed it all the same. What was removed by
    /// us, nobody else took away.
    pub fn wrote(&mut self, uid: &str, step: &Step, written: impl Fn(&NadRef) -> bool) {
        match step {
            Step::Create { at, config, .. } | Step::Apply { at, config, .. } if written(at) => {
                self.in_place.insert(at.clone(), digest([uid, config]));
            }
            Step::Delete(all) => all.iter().for_each(|(at, _)| _ = self.in_place.remove(at)),
            _ => {}
        }
    }
}

/// What to write next.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Plan {
    /// For the networks about which there is something to do.
    pub turns: Vec<Turn>,
    /// Attachments that a network left which is no more.
    pub orphans: Vec<(NadRef, Attachment)>,
    pub labels: Vec<Relabel>,
    /// Address blocks that nobody holds any more.
    pub discarded: Vec<Discard>,
    /// When to look again although nothing has happened.
    pub look: Option<Duration>,
}

/// What to write for one network. Its steps first. An attachment that cannot be written keeps none of the others from
/// being written; the status waits until the refusal is known here, and tells of it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Turn {
    pub name: String,
    pub uid: String,
    pub version: String,
    pub steps: Vec<Step>,
    pub status: Option<Box<BridgeNetworkStatus>>,
    /// Only the users have changed, which may wait a little.
    pub patient: bool,
    pub events: Vec<Event>,
}

impl Turn {
    /// The attachments that its steps are about, one by one.
    pub fn places(&self) -> impl Iterator<Item = &NadRef> {
        self.steps.iter().flat_map(Step::places)
    }

    /// Whether it lets the nodes go, or the network itself.
    pub fn lets_go(&self) -> bool {
        self.steps.iter().any(|step| matches!(step, Step::Release { .. } | Step::Finish { .. }))
    }

    /// Whether the API server itself has to be asked before it is done.
    pub fn asks(&self) -> bool {
        self.steps.iter().any(|step| match step {
            Step::Delete(_) | Step::Confirm(_) | Step::Release { .. } | Step::Finish { .. } => true,
            Step::Finalizers(_) | Step::Create { .. } | Step::Apply { .. } => false,
        })
    }
}

/// One change.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// Sets the finalizers to these.
    Finalizers(Vec<String>),
    Create {
        at: NadRef,
        config: String,
        repair: bool,
    },
    /// Puts an attachment of ours right.
    Apply {
        at: NadRef,
        uid: String,
        version: String,
        config: String,
        repair: bool,
    },
    /// Deletes attachments of ours, if the API server itself knows of no user of any of them.
    Delete(Vec<(NadRef, Attachment)>),
    /// Asks the API server itself whether anybody began to use these, which are gone, before they went: then they have to
    /// come back.
    Confirm(BTreeSet<NadRef>),
    /// Lets the nodes undo, if the API server itself knows of no attachment of the network and of no user of these.
    Release {
        attachments: BTreeSet<NadRef>,
        finalizers: Vec<String>,
    },
    /// Lets the network go, if the API server itself knows of no node that lists it.
    Finish {
        finalizers: Vec<String>,
    },
}

impl Step {
    /// The attachments that it is about, one by one.
    pub fn places(&self) -> Vec<&NadRef> {
        match self {
            Self::Create { at, .. } | Self::Apply { at, .. } => vec![at],
            Self::Delete(all) => all.iter().map(|(at, _)| at).collect(),
            Self::Confirm(all) => all.iter().collect(),
            Self::Finalizers(_) | Self::Release { .. } | Self::Finish { .. } => Vec::new(),
        }
    }
}

/// Labels of one Node to set, or to remove.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Relabel {
    pub node: String,
    pub uid: String,
    pub labels: BTreeMap<String, Option<&'static str>>,
}

/// Something to tell whoever looks at the network's events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The attachment that it is about: told only if that was written.
    pub about: Option<NadRef>,
    pub warning: bool,
    pub reason: &'static str,
    pub note: String,
}

/// Decides what to write next.
pub fn plan(world: &World, now: Timestamp) -> Plan {
    let attachments = Attachments::new(world);
    let selected = selected::all(world);
    let blocks = addresses::by_network(world);
    let mut plan = Plan::default();
    for network in world.networks.values() {
        let blocks = blocks.get(network.uid.as_str()).map_or(&[][..], Vec::as_slice);
        let scene = Scene { blocks, ..Scene::new(world, network, &attachments, &selected, now) };
        let turn = scene.turn();
        if network.deleting.is_some() && !settled(network, now) {
            plan.look = Some(SETTLE);
        }
        if !turn.steps.is_empty() || turn.status.is_some() {
            plan.turns.push(turn);
        }
    }
    plan.orphans = attachments.orphans(world);
    plan.labels = relabel(world);
    plan.discarded = addresses::discarded(world);
    if let Some(rest) = world.next_lost {
        plan.look = Some(plan.look.map_or(rest, |look| look.min(rest)));
    }
    plan
}

/// The attachments that pods of a network name: those that it keeps or would keep, and those that others wrote for it.
pub fn attachments_of(world: &World, network: &Network) -> BTreeSet<NadRef> {
    Attachments::new(world).of(world, network)
}

/// The networks of which [`attachments_of`] names this one, for the price of one look at it and at each network.
pub fn networks_of<'a>(world: &'a World, at: &'a NadRef) -> impl Iterator<Item = &'a Network> {
    let concern = attachments::Concern::new(world, at);
    world.networks.values().filter(move |network| concern.is_of(network))
}

fn settled(network: &Network, now: Timestamp) -> bool {
    // A clock that was set back must not hold anything up.
    network.deleting.is_none_or(|since| now < since || now.duration_since(since) >= settle())
}

fn settle() -> SignedDuration {
    SignedDuration::try_from(SETTLE).unwrap_or(SignedDuration::ZERO)
}

/// One network among all there is.
struct Scene<'a> {
    world: &'a World,
    network: &'a Network,
    now: Timestamp,
    attachments: &'a Attachments<'a>,
    /// The attachments that its users name.
    references: BTreeSet<NadRef>,
    users: Summary,
    selected: Option<&'a Selected<'a>>,
    blocks: &'a [(&'a str, &'a Block)],
}

impl<'a> Scene<'a> {
    fn new(
        world: &'a World,
        network: &'a Network,
        attachments: &'a Attachments<'a>,
        selected: &'a BTreeMap<&'a str, Selected<'a>>,
        now: Timestamp,
    ) -> Self {
        let references = attachments.of(world, network);
        let users = world.users.summary(&references, MAX_STATUS_ENTRIES);
        Self {
            world,
            network,
            now,
            attachments,
            references,
            users,
            selected: selected.get(network.name.as_str()),
            blocks: &[],
        }
    }

    fn turn(&self) -> Turn {
        let network = self.network;
        let turn = Turn {
            name: network.name.clone(),
            uid: network.uid.clone(),
            version: network.version.clone(),
            ..Turn::default()
        };
        if network.deleting.is_some() { self.going(turn) } else { self.staying(turn) }
    }

    fn staying(&self, mut turn: Turn) -> Turn {
        let missing = [FINALIZER_USERS, FINALIZER_NODES].into_iter().filter(|one| !self.has(one));
        let missing: Vec<String> = missing.map(str::to_owned).collect();
        if !missing.is_empty() {
            let all = self.network.finalizers.iter().cloned().chain(missing).collect();
            turn.steps.push(Step::Finalizers(all));
            return turn;
        }
        let fit = mtu::fit(self);
        let kept = self.attachments.keep(self, fit.mtu);
        turn.steps.clone_from(&kept.steps);
        status::write(self, &fit, &kept, &mut turn);
        turn
    }

    fn going(&self, mut turn: Turn) -> Turn {
        if self.has(FINALIZER_USERS) {
            let fit = mtu::fit(self);
            let used = self.users.count > 0;
            let mut kept =
                if used { self.attachments.keep(self, fit.mtu) } else { attachments::Kept::default() };
            if !used && settled(self.network, self.now) {
                kept.steps.extend(self.let_go());
                kept.refused = self.refused(&kept.steps);
            }
            turn.steps.clone_from(&kept.steps);
            let last = matches!(turn.steps.first(), Some(Step::Release { .. }));
            if !last || self.unanswered().is_some() {
                status::write(self, &fit, &kept, &mut turn);
            }
            return turn;
        }
        turn.steps.extend(deletable(self.attachments.marked(self.network)));
        // Its addresses are free before its name is.
        if self.has(FINALIZER_NODES) && self.listing().next().is_none() && self.blocks.is_empty() {
            turn.steps.push(Step::Finish { finalizers: self.without(FINALIZER_NODES) });
            if self.unanswered().is_none() {
                return turn;
            }
        }
        let refused = self.refused(&turn.steps);
        let kept = attachments::Kept { refused, ..attachments::Kept::default() };
        status::write(self, &mtu::fit(self), &kept, &mut turn);
        turn
    }

    /// Those of these changes that the API server refused the last time, with its words.
    fn refused(&self, steps: &[Step]) -> Vec<(NadRef, String)> {
        let Some(refused) = self.world.refused.get(&self.network.uid) else { return Vec::new() };
        let places = steps.iter().flat_map(Step::places);
        places.filter_map(|at| Some((at.clone(), refused.get(at)?.clone()))).collect()
    }

    /// Why nobody knows whether it may go, in the API server's words.
    fn unanswered(&self) -> Option<&'a str> {
        self.world.unanswered.get(&self.network.uid).map(String::as_str)
    }

    /// Nobody uses it, as far as is known: attachments go first, and once they have gone the nodes are let loose.
    fn let_go(&self) -> Option<Step> {
        let left = self.attachments.marked(self.network);
        if left.is_empty() {
            let finalizers = self.without(FINALIZER_USERS);
            return Some(Step::Release { attachments: self.references.clone(), finalizers });
        }
        deletable(left)
    }

    fn has(&self, finalizer: &str) -> bool {
        self.network.finalizers.iter().any(|one| one == finalizer)
    }

    fn without(&self, finalizer: &str) -> Vec<String> {
        self.network.finalizers.iter().filter(|one| *one != finalizer).cloned().collect()
    }

    /// The nodes that have, or may have, links of it. A NodeNetwork without a Node is about to go.
    fn listing(&self) -> impl Iterator<Item = (&'a str, &'a Node, &'a NetworkOnNode)> + use<'a> {
        let (world, uid) = (self.world, &self.network.uid);
        world.nodes.iter().filter_map(move |(name, node)| {
            let entry = world.reports.get(name)?.networks.get(uid)?;
            Some((name.as_str(), node, entry))
        })
    }

    fn condition(&self, kind: &str) -> Option<&'a Condition> {
        self.network.status.conditions.iter().find(|condition| condition.r#type == kind)
    }
}

/// What is about to go already is waited for.
fn deletable(mut left: Vec<(NadRef, Attachment)>) -> Option<Step> {
    left.retain(|(_, one)| !one.deleting);
    (!left.is_empty()).then_some(Step::Delete(left))
}

/// The labels by which a scheduler finds nodes on which a network works, as the daemon there says. A node that does not
/// answer keeps them: nothing is scheduled to it anyway, and it has its links.
fn relabel(world: &World) -> Vec<Relabel> {
    let live = |entry: &NetworkOnNode| {
        let network = world.networks.get(&entry.name).filter(|network| network.uid == entry.uid);
        entry.ready && network.is_some()
    };
    let mut all = Vec::new();
    for (name, node) in &world.nodes {
        let report = world.reports.get(name);
        let entries = report.into_iter().flat_map(|report| report.networks.values());
        let wanted: BTreeSet<String> = entries
            .filter(|entry| live(entry))
            .map(|entry| format!("{READY_LABEL_PREFIX}{}", entry.name))
            .collect();
        let missing =
            wanted.iter().filter(|label| node.labels.get(*label).is_none_or(|value| value != "true"));
        let mut labels: BTreeMap<String, Option<&str>> =
            missing.map(|label| (label.clone(), Some("true"))).collect();
        let old = node
            .labels
            .keys()
            .filter(|label| label.starts_with(READY_LABEL_PREFIX) && !wanted.contains(*label));
        labels.extend(old.map(|label| (label.clone(), None)));
        if !labels.is_empty() {
            all.push(Relabel { node: name.clone(), uid: node.uid.clone(), labels });
        }
    }
    all
}
