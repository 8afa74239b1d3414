//! What a network's status says.

use std::{collections::BTreeSet, fmt::Write as _};

use api::{
    BridgeNetworkStatus, Condition, ConditionStatus, NetworkOnNode,
    bridgenetwork::{MAX_CONDITIONS, MAX_STATUS_ENTRIES, NetworkUsers, NodeCounts, NotReadyNode},
    ipam::{IpFamilyStatus, IpamStatus},
    nodenetwork::MAX_MESSAGE,
};

use jiff::Timestamp;

use crate::bridge;

use super::{Event, Scene, Turn, addresses, attachments::Kept, mtu, mtu::Fit};

const READY: &str = "Ready";
const IN_USE: &str = "InUse";
const CONFLICT: &str = "Conflict";
const MTU_REDUCED: &str = "MtuReduced";

/// The conditions that are decided here, and how many more an object may have.
const OURS: [&str; 6] =
    [READY, IN_USE, CONFLICT, MTU_REDUCED, addresses::CONDITIONS[0], addresses::CONDITIONS[1]];

/// Reasons of Ready, in the order in which they count.
const DELETION_BLOCKED: &str = "DeletionBlocked";
const DELETING: &str = "Deleting";
const INVALID_SPEC: &str = "InvalidSpec";
const NO_NODES: &str = "NoNodes";
const NO_VTEP: &str = "WaitingForVtep";
const MTU_TOO_SMALL: &str = "MtuTooSmall";
const ATTACHMENTS: &str = "AttachmentsMissing";
const NODES_NOT_READY: &str = "NodesNotReady";
const WORKS: &str = "Works";

/// Reasons of events beside those that are also reasons of conditions.
pub const ATTACHMENT_REPAIRED: &str = "AttachmentRepaired";

/// Reasons why a network does not work on a node, as far as the daemon there has not said one.
const NO_DAEMON: &str = "NoDaemon";
const PENDING: &str = "Pending";
const NODE_NOT_READY: &str = "NodeNotReady";

/// An event takes 1024 bytes, and a name of somebody else's may need two for a character.
const LONGEST_NOTE: usize = 500;

/// What is repeated of a refusal.
const LONGEST_REFUSAL: usize = 300;

/// Names at most so many of a list in a sentence.
const FEW: usize = 3;

/// A condition without its times.
pub struct Said {
    pub kind: &'static str,
    pub holds: bool,
    pub reason: &'static str,
    pub message: String,
}

/// Puts the new status into the turn, unless it is the old one, and what is told about the change.
pub fn write(scene: &Scene<'_>, fit: &Fit, kept: &Kept, turn: &mut Turn) {
    let old = &ours(&scene.network.status);
    let (nodes, not_ready) = nodes(scene);
    let ipam = addresses::status(scene);
    let mut said = vec![
        ready(scene, fit, kept, &nodes, &not_ready),
        in_use(scene),
        conflict(scene, kept),
        reduced(scene, fit),
    ];
    said.extend(addresses::said(scene, ipam.as_ref()));
    turn.events.extend(kept.events.iter().cloned());
    turn.events.extend(said.iter().filter_map(|said| told(scene, said)));
    let conditions = said.into_iter().map(|said| condition(scene, said)).collect();
    let old_mtu: i32 =
        scene.listing().map(|(_, _, entry)| entry.pods_with_old_mtu).fold(0, i32::saturating_add);
    let mut new = BridgeNetworkStatus {
        ipam,
        observed_generation: Some(scene.network.generation),
        bridge: match &scene.network.spec {
            Ok(spec) => Some(spec.bridge_name(&scene.network.name).to_string()),
            Err(_) => old.bridge.clone(),
        },
        mtu: fit.mtu,
        nodes: Some(nodes),
        not_ready,
        users: Some(NetworkUsers {
            count: i32::try_from(scene.users.count).unwrap_or(i32::MAX),
            first: scene.users.first.iter().map(ToString::to_string).collect(),
        }),
        pods_with_old_mtu: (old_mtu > 0).then_some(old_mtu),
        conditions,
    };
    if new == *old {
        return;
    }
    turn.patient = turn.steps.is_empty() && only_users_differ(&new, old);
    let room = MAX_CONDITIONS.saturating_sub(new.conditions.len());
    new.conditions.extend(foreign(&scene.network.status).take(room).cloned());
    turn.status = Some(Box::new(new));
}

/// The status as far as it is decided here: others may add conditions of their own, which stay. All else is ours, whoever
/// wrote it.
fn ours(status: &BridgeNetworkStatus) -> BridgeNetworkStatus {
    let of_kind = |kind: &str| status.conditions.iter().find(|condition| condition.r#type == kind);
    let conditions = OURS.into_iter().filter_map(of_kind).cloned().collect();
    BridgeNetworkStatus { conditions, ..status.clone() }
}

fn foreign(status: &BridgeNetworkStatus) -> impl Iterator<Item = &Condition> {
    status.conditions.iter().filter(|condition| !OURS.contains(&condition.r#type.as_str()))
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

/// What nodes wait for, without the counts.
fn lengths(ipam: &IpamStatus) -> IpamStatus {
    let length = |family: &Option<IpFamilyStatus>| {
        let block_length = family.as_ref()?.block_length;
        Some(IpFamilyStatus { block_length, ..IpFamilyStatus::default() })
    };
    IpamStatus { ipv4: length(&ipam.ipv4), ipv6: length(&ipam.ipv6) }
}

/// The time moves only when the status does.
fn condition(scene: &Scene<'_>, said: Said) -> Condition {
    let status = if said.holds { ConditionStatus::True } else { ConditionStatus::False };
    let old = scene.condition(said.kind).filter(|old| old.status == status);
    let since = old.map_or(scene.now, |old| old.last_transition_time);
    Condition {
        r#type: said.kind.to_owned(),
        status,
        reason: said.reason.to_owned(),
        message: said.message,
        // Times of Kubernetes have whole seconds.
        last_transition_time: Timestamp::from_second(since.as_second()).unwrap_or(since),
        observed_generation: Some(scene.network.generation),
    }
}

/// An event where a condition begins to tell of a trouble that it did not tell of before.
fn told(scene: &Scene<'_>, said: &Said) -> Option<Event> {
    let trouble = match said.kind {
        CONFLICT | MTU_REDUCED => said.holds,
        READY => said.reason == DELETION_BLOCKED,
        _ => false,
    };
    let known = scene.condition(said.kind).is_some_and(|old| old.reason == said.reason);
    let reason = match said.kind {
        CONFLICT => CONFLICT,
        MTU_REDUCED => MTU_REDUCED,
        _ => said.reason,
    };
    (trouble && !known).then(|| Event {
        about: None,
        warning: true,
        reason,
        note: said.message.chars().take(LONGEST_NOTE).collect(),
    })
}

fn nodes(scene: &Scene<'_>) -> (NodeCounts, Vec<NotReadyNode>) {
    let names = scene.selected.map(|selected| &selected.nodes);
    let desired = names.map_or(0, BTreeSet::len);
    let not_ready: Vec<NotReadyNode> = names
        .into_iter()
        .flatten()
        .filter_map(|name| Some((*name, trouble(scene, name)?)))
        .map(entry)
        .collect();
    let ready = desired - not_ready.len();
    let number = |count: usize| i32::try_from(count).unwrap_or(i32::MAX);
    let summary = format!("{ready}/{desired}");
    let nodes = NodeCounts { desired: number(desired), ready: number(ready), summary };
    (nodes, not_ready.into_iter().take(MAX_STATUS_ENTRIES).collect())
}

fn entry((node, (reason, message)): (&str, (String, String))) -> NotReadyNode {
    NotReadyNode { node: node.to_owned(), reason, message: cut(&message) }
}

/// Why the network does not work on a node, if it does not.
fn trouble(scene: &Scene<'_>, name: &str) -> Option<(String, String)> {
    let say = |reason: &str, message: String| Some((reason.to_owned(), message));
    let node = scene.world.nodes.get(name)?;
    if let Some(why) = &node.silent {
        return say(NODE_NOT_READY, format!("the node does not answer: {why}"));
    }
    let Some(report) = scene.world.reports.get(name) else {
        return say(
            NO_DAEMON,
            "there is no NodeNetwork of this node: is the Patchbay daemon running on it?".to_owned(),
        );
    };
    let Some(entry) = report.networks.get(&scene.network.uid) else {
        return say(PENDING, "the daemon has not taken it up yet".to_owned());
    };
    if !entry.ready {
        return Some((entry.reason.clone(), entry.message.clone()));
    }
    // What a node says of an older spec is no answer to this one. A deletion asks for nothing new.
    if entry.observed_generation < scene.network.generation && scene.network.deleting.is_none() {
        return say(PENDING, "the daemon has not seen the last change yet".to_owned());
    }
    None
}

fn ready(scene: &Scene<'_>, fit: &Fit, kept: &Kept, nodes: &NodeCounts, not_ready: &[NotReadyNode]) -> Said {
    let no = |reason, message| Said { kind: READY, holds: false, reason, message };
    if scene.network.deleting.is_some() {
        return going(scene, kept);
    }
    let spec = match &scene.network.spec {
        Ok(spec) => spec,
        Err(error) => return no(INVALID_SPEC, format!("the spec cannot be read: {error}")),
    };
    let clash = conflict(scene, kept);
    if clash.holds {
        return no(CONFLICT, clash.message);
    }
    if nodes.desired == 0 {
        return no(NO_NODES, "spec.nodeSelector selects no node".to_owned());
    }
    match &fit.limit {
        Some((node, limit)) if *limit < mtu::SMALLEST => {
            let smallest = mtu::SMALLEST;
            let message =
                format!("node {node} leaves packets of {limit} bytes, and a network needs {smallest}");
            return no(MTU_TOO_SMALL, message);
        }
        None if spec.overlay.is_some() && fit.mtu.is_none() => {
            let message =
                "no selected node has a tunnel end point yet: see the condition VtepFound of its NodeNetwork";
            return no(NO_VTEP, message.to_owned());
        }
        _ => {}
    }
    // In a large cluster some node is always away; an attachment is missing until somebody does something about it.
    match (unattached(kept), out_of_order(nodes, not_ready)) {
        (Some(message), None) => return no(ATTACHMENTS, message),
        (Some(message), Some(more)) => return no(ATTACHMENTS, format!("{message}; {more}")),
        (None, Some(message)) => return no(NODES_NOT_READY, message),
        (None, None) => {}
    }
    let mut message = format!("works on {} of {} nodes", nodes.ready, nodes.desired);
    if spec.overlay.is_none() && spec.uplink.is_none() {
        message += ", on each by itself: it has neither uplink nor overlay";
    }
    if !kept.used.is_empty() {
        let _ = write!(
            message,
            "; kept although not listed any more, because somebody uses it: {}",
            list(&kept.used)
        );
    }
    Said { kind: READY, holds: true, reason: WORKS, message }
}

/// On how many nodes it works, and why not on the first of the others.
fn out_of_order(nodes: &NodeCounts, not_ready: &[NotReadyNode]) -> Option<String> {
    let NotReadyNode { node, reason, message } = not_ready.first()?;
    let rest = match usize::try_from(nodes.desired - nodes.ready).unwrap_or(0) {
        0 | 1 => String::new(),
        count => format!(", and so it is on {} more", count - 1),
    };
    Some(format!("{} nodes are ready; node {node}: {reason}: {message}{rest}", nodes.summary))
}

fn unattached(kept: &Kept) -> Option<String> {
    if kept.unknown {
        let message = "the cluster does not have the kind NetworkAttachmentDefinition yet: install multus";
        return Some(message.to_owned());
    }
    if !kept.missing.is_empty() {
        return Some(format!("there is no namespace {}, or it is about to go", list(&kept.missing)));
    }
    if !kept.going.is_empty() {
        return Some(format!("somebody deletes NetworkAttachmentDefinition {}", list(&kept.going)));
    }
    refused(kept)
}

/// The first refusal, in words that are bounded whatever the API server says.
fn refused(kept: &Kept) -> Option<String> {
    let (at, why) = kept.refused.first()?;
    let more = match kept.refused.len() - 1 {
        0 => String::new(),
        more => format!(" (and so it is with {more} more)"),
    };
    let why: String = why.chars().take(LONGEST_REFUSAL).collect();
    Some(format!("the API server does not let NetworkAttachmentDefinition {at} be written: {why}{more}"))
}

fn unanswered(scene: &Scene<'_>) -> Option<String> {
    let why: String = scene.unanswered()?.chars().take(LONGEST_REFUSAL).collect();
    Some(format!("the API server, asked whether that is so, gives no answer, and is asked again: {why}"))
}

/// What the deletion waits for.
fn going(scene: &Scene<'_>, kept: &Kept) -> Said {
    let no = |reason, message| Said { kind: READY, holds: false, reason, message };
    if scene.has(api::bridgenetwork::FINALIZER_USERS) {
        if scene.users.count > 0 {
            return no(DELETION_BLOCKED, format!("deletion waits for its users: {}", users(scene)));
        }
        let stuck = refused(kept).or_else(|| unanswered(scene));
        let stuck = stuck.map_or_else(String::new, |text| format!(", but {text}"));
        return no(DELETING, format!("deletion is under way: nobody uses the network{stuck}"));
    }
    let waits: Vec<String> = scene
        .listing()
        .map(|(name, node, entry)| match &node.silent {
            Some(why) => format!("{name} ({NODE_NOT_READY}: {why}; if it is gone for good, delete its Node)"),
            None => format!("{name} ({})", entry.reason),
        })
        .collect();
    if let Some(text) = unanswered(scene).filter(|_| waits.is_empty()) {
        return no(DELETING, format!("deletion is under way: no node has links of the network, but {text}"));
    }
    no(DELETING, cut(&format!("deletion waits for nodes to remove their links: {}", list(&waits))))
}

fn in_use(scene: &Scene<'_>) -> Said {
    if scene.users.count == 0 {
        return Said { kind: IN_USE, holds: false, reason: "Unused", message: "nobody uses it".to_owned() };
    }
    Said { kind: IN_USE, holds: true, reason: "Used", message: format!("used by {}", users(scene)) }
}

fn users(scene: &Scene<'_>) -> String {
    let names: Vec<String> = scene.users.first.iter().map(ToString::to_string).collect();
    let more = if scene.users.count > names.len() { ", …" } else { "" };
    format!("{} in all: {}{more}", scene.users.count, names.join(", "))
}

fn conflict(scene: &Scene<'_>, kept: &Kept) -> Said {
    let yes = |reason, message| Said { kind: CONFLICT, holds: true, reason, message };
    if let Some((node, clash)) = scene.selected.and_then(|selected| selected.clash.as_ref()) {
        return yes("Network", format!("{clash} (node {node})"));
    }
    if !kept.foreign.is_empty() {
        let names = list(&kept.foreign);
        let message = format!(
            "NetworkAttachmentDefinition {names} is somebody else's and stays as it is: delete or rename it, or choose another spec.attachment.name"
        );
        return yes("Attachment", message);
    }
    if let Some((node, entry)) = foreign_link(scene) {
        return yes("Link", cut(&format!("node {node}: {}", entry.message)));
    }
    Said { kind: CONFLICT, holds: false, reason: "None", message: String::new() }
}

/// The first selected node that has a link of somebody else's where the network wants one.
fn foreign_link<'a>(scene: &Scene<'a>) -> Option<(&'a str, &'a NetworkOnNode)> {
    let mut nodes = scene.selected?.nodes.iter();
    nodes.find_map(|name| {
        let entry = scene.world.reports.get(*name)?.networks.get(&scene.network.uid)?;
        (!entry.ready && entry.reason == bridge::reason::FOREIGN_LINK).then_some((*name, entry))
    })
}

fn reduced(scene: &Scene<'_>, fit: &Fit) -> Said {
    let wanted = scene.network.spec.as_ref().ok().and_then(|spec| spec.mtu);
    let held = match (fit.held, fit.mtu) {
        (Some(held), Some(mtu)) => format!(
            "{mtu} stays in force because the network is used; it becomes {held} once nobody uses it, until then larger packets may be lost"
        ),
        _ => String::new(),
    };
    if let (Some((most, nodes)), Some(mtu)) = (&fit.unheard, fit.mtu) {
        let (who, whose) = match nodes.len() {
            1 => ("node", "its NodeNetwork"),
            _ => ("nodes", "their NodeNetworks"),
        };
        let message = format!(
            "{mtu} stays in force because {who} {} may carry no more: it becomes {most} once that is known, see the \
             condition VtepFound of {whose}",
            list(nodes)
        );
        // Only what somebody asked for is reduced.
        let holds = wanted.is_some_and(|wanted| wanted > mtu);
        return Said { kind: MTU_REDUCED, holds, reason: "NodeUnknown", message };
    }
    match (&fit.limit, wanted) {
        (Some((node, limit)), Some(wanted)) if wanted > *limit => {
            let held = if held.is_empty() { held } else { format!("; {held}") };
            let message = format!("spec.mtu is {wanted}, but node {node} can carry {limit}{held}");
            Said { kind: MTU_REDUCED, holds: true, reason: "NodeLimit", message }
        }
        _ if fit.held.is_some() => {
            Said { kind: MTU_REDUCED, holds: false, reason: "HeldByUsers", message: held }
        }
        _ => Said { kind: MTU_REDUCED, holds: false, reason: "Fits", message: held },
    }
}

pub fn list(all: &[impl ToString]) -> String {
    let few: Vec<String> = all.iter().take(FEW).map(ToString::to_string).collect();
    match all.len().saturating_sub(FEW) {
        0 => few.join(", "),
        more => format!("{} and {more} more", few.join(", ")),
    }
}

/// Messages of nodes are bounded, and so is what is made of them.
fn cut(text: &str) -> String {
    text.chars().take(MAX_MESSAGE).collect()
}
