//! The status of a network, and the events for its transitions.

use std::{collections::BTreeSet, fmt::Write as _};

use api::{
    BridgeNetworkStatus, Condition, NetworkOnNode,
    bridgenetwork::{MAX_CONDITIONS, MAX_STATUS_ENTRIES, NetworkUsers, NodeCounts, NotReadyNode},
    ipam::{IpFamilyStatus, IpamStatus},
    nodenetwork::MAX_MESSAGE,
};

use super::{
    EventDraft, NetworkContext, NetworkPlan, addresses, mtu,
    mtu::{EffectiveMtu, HigherMtu},
    nads::NadPlan,
};
use crate::{bridge, condition::ConditionDraft};

const READY: &str = "Ready";
const IN_USE: &str = "InUse";
const CONFLICT: &str = "Conflict";
const MTU_REDUCED: &str = "MtuReduced";

/// The conditions that the controller owns, in the order in which it writes them.
const MANAGED_CONDITIONS: [&str; 6] =
    [READY, IN_USE, CONFLICT, MTU_REDUCED, addresses::CONDITIONS[0], addresses::CONDITIONS[1]];

/// Reasons of Ready, by precedence.
const DELETION_BLOCKED: &str = "DeletionBlocked";
const DELETING: &str = "Deleting";
const INVALID_SPEC: &str = "InvalidSpec";
const NO_NODES: &str = "NoNodes";
const WAITING_FOR_VTEP: &str = "WaitingForVtep";
const MTU_TOO_SMALL: &str = "MtuTooSmall";
const NADS_MISSING: &str = "AttachmentsMissing";
const NODES_NOT_READY: &str = "NodesNotReady";

/// The event reason that is not also the reason or type of a condition.
pub const ATTACHMENT_REPAIRED: &str = "AttachmentRepaired";

/// Reasons why a network is not ready on a node whose daemon reports none.
const NO_DAEMON: &str = "NoDaemon";
const PENDING: &str = "Pending";
const NODE_NOT_READY: &str = "NodeNotReady";

/// The API server limits an event's note to 1024 bytes. Names in it can have two bytes per character.
const MAX_NOTE_CHARS: usize = 500;

/// The length of an API server's message that is quoted in a condition.
const MAX_CAUSE_CHARS: usize = 300;

/// The number of names that a message lists.
const MAX_LISTED: usize = 3;

/// Adds the new status to the plan if it differs from the old one, and the events for the transitions.
pub fn write(
    context: &NetworkContext<'_>,
    effective: &EffectiveMtu,
    nad_plan: &NadPlan,
    plan: &mut NetworkPlan,
) {
    let old = &managed(&context.network.status);
    let (nodes, not_ready) = nodes(context);
    let ipam = addresses::status(context);
    let mut drafts = vec![
        ready(context, effective, nad_plan, &nodes, &not_ready),
        in_use(context),
        conflict(context, nad_plan),
        mtu_reduced(context, effective),
    ];
    drafts.extend(addresses::conditions(context, ipam.as_ref()));
    plan.events.extend(nad_plan.events.iter().cloned());
    plan.events.extend(drafts.iter().filter_map(|draft| transition_event(context, draft)));
    let generation = Some(context.network.generation);
    let complete = |draft: ConditionDraft| {
        let old = context.condition(draft.kind);
        draft.into_condition(old, context.now, generation)
    };
    let conditions = drafts.into_iter().map(complete).collect();
    let old_mtu: i32 =
        context.nodes_listing().map(|(_, _, entry)| entry.pods_with_old_mtu).fold(0, i32::saturating_add);
    let mut new = BridgeNetworkStatus {
        ipam,
        observed_generation: generation,
        bridge: match &context.network.spec {
            Ok(spec) => Some(spec.bridge_name(&context.network.name).to_string()),
            Err(_) => old.bridge.clone(),
        },
        mtu: effective.mtu,
        mtu_fitted_from: effective.fitted_from,
        nodes: Some(nodes),
        not_ready,
        users: Some(NetworkUsers {
            count: i32::try_from(context.used_by()).unwrap_or(i32::MAX),
            first: first_users(context),
        }),
        pods_with_old_mtu: (old_mtu > 0).then_some(old_mtu),
        conditions,
    };
    if new == *old {
        return;
    }
    plan.deferrable = plan.steps.is_empty() && only_users_differ(&new, old);
    let free = MAX_CONDITIONS.saturating_sub(new.conditions.len());
    new.conditions.extend(other_conditions(&context.network.status).take(free).cloned());
    plan.status = Some(Box::new(new));
}

/// The part of the status that the controller owns: everything except for the conditions of others.
fn managed(status: &BridgeNetworkStatus) -> BridgeNetworkStatus {
    let by_type = |kind: &str| status.conditions.iter().find(|condition| condition.r#type == kind);
    let conditions = MANAGED_CONDITIONS.into_iter().filter_map(by_type).cloned().collect();
    BridgeNetworkStatus { conditions, ..status.clone() }
}

fn other_conditions(status: &BridgeNetworkStatus) -> impl Iterator<Item = &Condition> {
    status.conditions.iter().filter(|condition| !MANAGED_CONDITIONS.contains(&condition.r#type.as_str()))
}

fn only_users_differ(new: &BridgeNetworkStatus, old: &BridgeNetworkStatus) -> bool {
    let outline =
        |condition: &Condition| (condition.r#type.clone(), condition.status, condition.reason.clone());
    let outlines = |status: &BridgeNetworkStatus| status.conditions.iter().map(outline).collect::<Vec<_>>();
    let rest = |status: &BridgeNetworkStatus| BridgeNetworkStatus {
        users: None,
        conditions: Vec::new(),
        ipam: status.ipam.as_ref().map(lengths),
        ..status.clone()
    };
    outlines(new) == outlines(old) && rest(new) == rest(old)
}

/// Only the block lengths, which daemons wait for, and whether there are claims; the counts may be written late.
fn lengths(ipam: &IpamStatus) -> IpamStatus {
    let length = |family: &Option<IpFamilyStatus>| {
        let block_length = family.as_ref()?.block_length;
        Some(IpFamilyStatus { block_length, ..IpFamilyStatus::default() })
    };
    IpamStatus { ipv4: length(&ipam.ipv4), ipv6: length(&ipam.ipv6), claims: ipam.claims.min(1) }
}

/// A warning event if a condition begins to report a problem.
fn transition_event(context: &NetworkContext<'_>, draft: &ConditionDraft) -> Option<EventDraft> {
    let problem = match draft.kind {
        CONFLICT | MTU_REDUCED => draft.holds(),
        READY => draft.reason == DELETION_BLOCKED,
        _ => false,
    };
    let known = context.condition(draft.kind).is_some_and(|old| old.reason == draft.reason);
    let reason = match draft.kind {
        CONFLICT => CONFLICT,
        MTU_REDUCED => MTU_REDUCED,
        _ => draft.reason,
    };
    (problem && !known).then(|| EventDraft {
        nad: None,
        warning: true,
        reason,
        note: draft.message.chars().take(MAX_NOTE_CHARS).collect(),
    })
}

fn nodes(context: &NetworkContext<'_>) -> (NodeCounts, Vec<NotReadyNode>) {
    let names = context.selected.map(|selected| &selected.nodes);
    let desired = names.map_or(0, BTreeSet::len);
    let not_ready: Vec<NotReadyNode> = names
        .into_iter()
        .flatten()
        .filter_map(|name| Some((*name, not_ready_reason(context, name)?)))
        .map(entry)
        .collect();
    let ready = desired - not_ready.len();
    let number = |count: usize| i32::try_from(count).unwrap_or(i32::MAX);
    let summary = format!("{ready}/{desired}");
    let nodes = NodeCounts { desired: number(desired), ready: number(ready), summary };
    (nodes, not_ready.into_iter().take(MAX_STATUS_ENTRIES).collect())
}

fn entry((node, (reason, message)): (&str, (String, String))) -> NotReadyNode {
    NotReadyNode { node: node.to_owned(), reason, message: truncate(&message) }
}

/// Why the network is not ready on a node: a reason and a message.
fn not_ready_reason(context: &NetworkContext<'_>, name: &str) -> Option<(String, String)> {
    let because = |reason: &str, message: String| Some((reason.to_owned(), message));
    let node = context.state.nodes.get(name)?;
    if let Some(why) = &node.not_ready_reason {
        return because(NODE_NOT_READY, format!("the Node is not ready: {why}"));
    }
    let Some(report) = context.state.reports.get(name) else {
        return because(
            NO_DAEMON,
            "the node has no NodeNetwork; check that the Patchbay daemon runs on it".to_owned(),
        );
    };
    let Some(entry) = report.networks.get(&context.network.uid) else {
        return because(PENDING, "the daemon has not reported this network yet".to_owned());
    };
    if !entry.ready {
        return Some((entry.reason.clone(), entry.message.clone()));
    }
    // A report about an older spec does not count, except during deletion, which needs nothing new of the node.
    if entry.observed_generation < context.network.generation && context.network.deleting.is_none() {
        return because(PENDING, "the daemon has not observed the latest spec yet".to_owned());
    }
    None
}

fn ready(
    context: &NetworkContext<'_>,
    effective: &EffectiveMtu,
    nad_plan: &NadPlan,
    nodes: &NodeCounts,
    not_ready: &[NotReadyNode],
) -> ConditionDraft {
    let no = |reason, message| ConditionDraft::new(READY, false, reason, message);
    if context.network.deleting.is_some() {
        return deletion_progress(context, nad_plan);
    }
    let spec = match &context.network.spec {
        Ok(spec) => spec,
        Err(error) => return no(INVALID_SPEC, format!("the spec cannot be parsed: {error}")),
    };
    let conflict = conflict(context, nad_plan);
    if conflict.holds() {
        return no(CONFLICT, conflict.message);
    }
    if nodes.desired == 0 {
        return no(NO_NODES, "spec.nodeSelector matches no node".to_owned());
    }
    match &effective.limit {
        Some((node, limit)) if *limit < mtu::MIN_MTU => {
            let message = format!(
                "node {node} carries only {limit} bytes and a network needs {}; raise the MTU of the node's link",
                mtu::MIN_MTU
            );
            return no(MTU_TOO_SMALL, message);
        }
        None if spec.overlay.is_some() && effective.mtu.is_none() => {
            let message = "no selected node has a VTEP yet; see the condition VtepFound of the NodeNetworks";
            return no(WAITING_FOR_VTEP, message.to_owned());
        }
        _ => {}
    }
    // NADs come first: in a large cluster some node is always down, but a missing NAD needs a person to act.
    match (nads_missing(nad_plan), nodes_not_ready(nodes, not_ready)) {
        (Some(message), None) => return no(NADS_MISSING, message),
        (Some(message), Some(more)) => return no(NADS_MISSING, format!("{message}; {more}")),
        (None, Some(message)) => return no(NODES_NOT_READY, message),
        (None, None) => {}
    }
    let mut message = format!("ready on {} of {} nodes", nodes.ready, nodes.desired);
    if spec.overlay.is_none() && spec.uplink.is_none() {
        message += ", isolated on each node: the network has neither uplink nor overlay";
    }
    if !nad_plan.used.is_empty() {
        let _ = write!(
            message,
            "; still in use and kept although no longer in spec.attachment.namespaces: {}",
            list(&nad_plan.used)
        );
    }
    ConditionDraft::new(READY, true, READY, message)
}

/// The number of ready nodes, and the reason of the first node that is not ready.
fn nodes_not_ready(nodes: &NodeCounts, not_ready: &[NotReadyNode]) -> Option<String> {
    let NotReadyNode { node, reason, message } = not_ready.first()?;
    let rest = match usize::try_from(nodes.desired - nodes.ready).unwrap_or(0) {
        0 | 1 => String::new(),
        count => format!("; {} more not ready", count - 1),
    };
    Some(format!("{} nodes are ready; node {node}: {reason}: {message}{rest}", nodes.summary))
}

fn nads_missing(nad_plan: &NadPlan) -> Option<String> {
    if nad_plan.kind_missing {
        let message = "the cluster does not serve the kind NetworkAttachmentDefinition; install multus";
        return Some(message.to_owned());
    }
    if !nad_plan.missing.is_empty() {
        return Some(format!("namespace {} does not exist or is terminating", list(&nad_plan.missing)));
    }
    if !nad_plan.deleting.is_empty() {
        return Some(format!("NetworkAttachmentDefinition {} is being deleted", list(&nad_plan.deleting)));
    }
    rejected(nad_plan)
}

/// The first rejection, with a bounded part of the API server's message.
fn rejected(nad_plan: &NadPlan) -> Option<String> {
    let (at, why) = nad_plan.rejected.first()?;
    let more = match nad_plan.rejected.len() - 1 {
        0 => String::new(),
        more => format!("; {more} more failed"),
    };
    let why: String = why.chars().take(MAX_CAUSE_CHARS).collect();
    Some(format!("the API server rejected NetworkAttachmentDefinition {at}: {why}{more}"))
}

fn live_read_failed(context: &NetworkContext<'_>) -> Option<String> {
    let why: String = context.live_read_failed()?.chars().take(MAX_CAUSE_CHARS).collect();
    Some(format!("could not confirm with the API server; retrying: {why}"))
}

/// Ready during deletion: what the deletion waits for.
fn deletion_progress(context: &NetworkContext<'_>, nad_plan: &NadPlan) -> ConditionDraft {
    let no = |reason, message| ConditionDraft::new(READY, false, reason, message);
    if context.has(api::bridgenetwork::FINALIZER_USERS) {
        if context.used_by() > 0 {
            return no(DELETION_BLOCKED, format!("deletion waits for users to go: {}", users(context)));
        }
        if !context.node_users.is_empty() {
            let overdue = context.deleting_since().is_some_and(|since| context.node_users.is_overdue(since));
            let reason = if overdue || context.node_users.is_used() { DELETION_BLOCKED } else { DELETING };
            return no(reason, truncate(&format!("deletion waits: {}", context.node_users.describe())));
        }
        let problem = rejected(nad_plan).or_else(|| live_read_failed(context));
        let problem = problem.map_or_else(String::new, |text| format!("; {text}"));
        return no(DELETING, format!("deletion in progress: no users left{problem}"));
    }
    let waits: Vec<String> = context
        .nodes_listing()
        .map(|(name, node, entry)| match &node.not_ready_reason {
            Some(why) => {
                format!("{name} ({NODE_NOT_READY}: {why}; if it does not come back, delete its Node)")
            }
            None => format!("{name} ({})", entry.reason),
        })
        .collect();
    if let Some(text) = live_read_failed(context).filter(|_| waits.is_empty()) {
        return no(DELETING, format!("deletion in progress: no node reports links; {text}"));
    }
    if waits.is_empty() && !context.blocks.is_empty() {
        let blocks: Vec<String> = context
            .blocks
            .iter()
            .map(|(name, block)| format!("{name} of {}", block.object.spec.holder))
            .collect();
        let note = "the blocks of a deleted Node are deleted 10 minutes after it; for other blocks, check the daemon of the \
            node, and the IPAMClaims in the status of the block";
        return no(
            DELETING,
            truncate(&format!("deletion waits for IPBlocks to go: {}; {note}", list(&blocks))),
        );
    }
    no(DELETING, truncate(&format!("deletion waits for nodes to remove their links: {}", list(&waits))))
}

fn in_use(context: &NetworkContext<'_>) -> ConditionDraft {
    if context.used_by() == 0 {
        if context.node_users.is_empty() {
            return ConditionDraft::new(IN_USE, false, "Unused", "no users");
        }
        let reason = if context.node_users.is_used() { "AddressesInUse" } else { "NotReported" };
        return ConditionDraft::new(IN_USE, true, reason, truncate(&context.node_users.describe()));
    }
    ConditionDraft::new(IN_USE, true, "Used", format!("used by {}", users(context)))
}

fn users(context: &NetworkContext<'_>) -> String {
    let names = first_users(context);
    let more = if context.used_by() > names.len() { ", …" } else { "" };
    format!("{} in total: {}{more}", context.used_by(), names.join(", "))
}

/// The first users, then the first IPAMClaims.
fn first_users(context: &NetworkContext<'_>) -> Vec<String> {
    let users = context.users.first.iter().map(ToString::to_string);
    let claims = context.claims.iter().map(|claim| format!("IPAMClaim {claim}"));
    users.chain(claims).take(MAX_STATUS_ENTRIES).collect()
}

fn conflict(context: &NetworkContext<'_>, nad_plan: &NadPlan) -> ConditionDraft {
    let yes = |reason, message| ConditionDraft::new(CONFLICT, true, reason, message);
    if let Some((node, conflict)) = context.selected.and_then(|selected| selected.conflict.as_ref()) {
        return yes("Network", format!("{conflict} (node {node})"));
    }
    if !nad_plan.foreign.is_empty() {
        let names = list(&nad_plan.foreign);
        let message = format!(
            "NetworkAttachmentDefinition {names} exists and is not managed by Patchbay; delete it or set spec.attachment.name"
        );
        return yes("Attachment", message);
    }
    if let Some((node, entry)) = foreign_link(context) {
        return yes("Link", truncate(&format!("node {node}: {}", entry.message)));
    }
    ConditionDraft::new(CONFLICT, false, "None", "")
}

/// The first selected node where a link that Patchbay does not own has a name that the network needs.
fn foreign_link<'a>(context: &NetworkContext<'a>) -> Option<(&'a str, &'a NetworkOnNode)> {
    let mut nodes = context.selected?.nodes.iter();
    nodes.find_map(|name| {
        let entry = context.state.reports.get(*name)?.networks.get(&context.network.uid)?;
        (!entry.ready && entry.reason == bridge::reason::FOREIGN_LINK).then_some((*name, entry))
    })
}

fn mtu_reduced(context: &NetworkContext<'_>, mtu: &EffectiveMtu) -> ConditionDraft {
    let requested = context.network.spec.as_ref().ok().and_then(|spec| spec.mtu);
    let held = match (mtu.held_by_users, mtu.mtu) {
        (Some(lower), Some(current)) => format!(
            "MTU {current} stays in effect while the network is in use and becomes {lower} once it has no users; until then packets larger than {lower} may be lost"
        ),
        _ => String::new(),
    };
    if let (Some(higher), Some(current)) = (&mtu.higher, mtu.mtu) {
        // An MTU that nothing requested is not reduced.
        let holds = requested.is_some_and(|requested| requested > current);
        let reason = if higher.nodes_without_vtep.is_empty() { "HigherPossible" } else { "NodeUnknown" };
        return ConditionDraft::new(MTU_REDUCED, holds, reason, higher_mtu(higher, current, requested));
    }
    match (&mtu.limit, requested) {
        (Some((node, limit)), Some(requested)) if requested > *limit => {
            let held = if held.is_empty() { held } else { format!("; {held}") };
            let message = format!("spec.mtu is {requested}, but node {node} carries at most {limit}{held}");
            ConditionDraft::new(MTU_REDUCED, true, "NodeLimit", message)
        }
        _ if mtu.held_by_users.is_some() => ConditionDraft::new(MTU_REDUCED, false, "HeldByUsers", held),
        _ => ConditionDraft::new(MTU_REDUCED, false, "Fits", held),
    }
}

/// Why a higher MTU does not apply, and how to get it.
fn higher_mtu(higher: &HigherMtu, current: i32, spec_mtu: Option<i32>) -> String {
    let HigherMtu { mtu, requested, nodes_without_vtep: nodes } = higher;
    let (noun, have) = if nodes.len() == 1 { ("node", "has") } else { ("nodes", "have") };
    match (requested, nodes.is_empty()) {
        (true, _) => format!(
            "MTU {current} stays in effect because {noun} {} may carry no more; it becomes {mtu} once all nodes have \
             reported a VTEP that carries it; see the condition VtepFound of their NodeNetworks",
            list(nodes)
        ),
        (false, false) => format!(
            "MTU is {current}; {noun} {} {have} not reported a VTEP, so it is unknown whether more is possible; see \
             the condition VtepFound of their NodeNetworks",
            list(nodes)
        ),
        (false, true) => {
            // Only a change of spec.mtu raises the MTU, so a value that is already set has to change twice. The controller
            // may not observe the first change if the second follows at once.
            let instruction = if spec_mtu == Some(*mtu) {
                let lower = mtu - 1;
                format!(
                    "to raise it, set spec.mtu to {lower}, wait until status.mtuFittedFrom.specMtu is {lower}, then \
                     set spec.mtu to {mtu}"
                )
            } else {
                format!("set spec.mtu to {mtu} to raise it")
            };
            format!("MTU is {current}; {mtu} is possible on the current nodes; {instruction}")
        }
    }
}

pub fn list(all: &[impl ToString]) -> String {
    let few: Vec<String> = all.iter().take(MAX_LISTED).map(ToString::to_string).collect();
    match all.len().saturating_sub(MAX_LISTED) {
        0 => few.join(", "),
        more => format!("{} and {more} more", few.join(", ")),
    }
}

/// Messages of nodes are bounded, and so are messages that quote them.
fn truncate(text: &str) -> String {
    text.chars().take(MAX_MESSAGE).collect()
}
