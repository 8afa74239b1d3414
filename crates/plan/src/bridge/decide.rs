//! The decision about each network of the node: its steps, their order, and its status.

use std::collections::{BTreeMap, BTreeSet};

use api::{
    NetworkOnNode,
    nodenetwork::{MAX_MESSAGE, MAX_NETWORKS},
};

use super::{
    Action, BridgeInput, BridgePlan, BridgeStep, Desired, LinkKind, LinkRecord, LocalNetwork, Settled,
    drift::{DesiredLink, link_drift},
    index::LinkIndex,
    overlay, ownership_mac, reason, uplink,
};
use crate::{
    conflict::{self, Conflict, NodeResources},
    nodenetwork::{AdminState, Link},
};

/// Why a network is not ready.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkProblem {
    reason: String,
    message: String,
}

impl NetworkProblem {
    pub fn new(reason: &str, message: impl Into<String>) -> Self {
        Self { reason: reason.to_owned(), message: message.into() }
    }
}

/// The decision about one network.
#[derive(Default)]
struct NetworkDecision {
    actions: Vec<Action>,
    problem: Option<NetworkProblem>,
    /// The message of a network that is ready.
    note: Option<String>,
    /// Whether pods can use the network once no actions are left. A network that is in use can be ready although it has
    /// a problem.
    ready: bool,
}

/// Plans the next steps for all bridge networks of a node, and their status.
///
/// The input must contain every BridgeNetwork of the cluster: the plan removes the links of all others.
pub fn plan(input: &BridgeInput<'_>) -> BridgePlan {
    let links = LinkIndex::new(input);
    let networks: BTreeMap<&str, &LocalNetwork> =
        input.networks.iter().map(|network| (network.uid.as_str(), network)).collect();
    let conflicts = conflict::conflicts(&desired_resources(input));
    let (uids, omitted) = selected(&links, &networks);
    let mut plan = BridgePlan { omitted, ..BridgePlan::default() };
    for uid in uids {
        plan_network(&links, uid, networks.get(uid).copied(), conflicts.get(uid), &mut plan);
    }
    plan
}

fn desired_resources(input: &BridgeInput<'_>) -> Vec<NodeResources> {
    let wanted = input.networks.iter().filter(|network| network.desired == Desired::Present);
    wanted.map(NodeResources::of).collect()
}

/// The networks to plan, and the names of those beyond [`MAX_NETWORKS`]: the youngest that have neither a link nor a
/// record on this node.
fn selected<'a>(
    links: &LinkIndex<'a>,
    networks: &BTreeMap<&'a str, &'a LocalNetwork>,
) -> (BTreeSet<&'a str>, Vec<String>) {
    let records = links.input.records.keys().map(String::as_str);
    let mut selected: BTreeSet<&str> = links.networks().chain(records).collect();
    let mut rest: Vec<&LocalNetwork> = networks
        .values()
        .copied()
        .filter(|network| network.desired == Desired::Present && !selected.contains(network.uid.as_str()))
        .collect();
    rest.sort_by_key(|network| (network.created, &network.name));
    let free = MAX_NETWORKS.saturating_sub(selected.len()).min(rest.len());
    let omitted = rest.split_off(free);
    selected.extend(rest.into_iter().map(|network| network.uid.as_str()));
    (selected, omitted.into_iter().map(|network| network.name.clone()).collect())
}

fn plan_network<'a>(
    links: &LinkIndex<'a>,
    uid: &'a str,
    network: Option<&'a LocalNetwork>,
    conflict: Option<&Conflict>,
    plan: &mut BridgePlan,
) {
    let wanted = network.filter(|network| network.desired == Desired::Present && conflict.is_none());
    let mut decision = match wanted {
        Some(network) => ensure_present(links, network),
        None => ensure_absent(links, uid, network, conflict),
    };
    let pending = !decision.actions.is_empty();
    let settled = wanted.map(|network| settled(links, network));
    if wanted.is_some() && pending && !links.input.listed.contains(uid) {
        decision.actions.clear();
        decision.problem = Some(NetworkProblem::new(
            reason::LISTING,
            "waiting until the NodeNetwork of this node lists the network at the API server",
        ));
    }
    let repair = settled.is_some() && links.input.settled.get(uid) == settled.as_ref();
    let step = |action| BridgeStep { network: uid.to_owned(), action, repair };
    plan.steps.extend(decision.actions.into_iter().map(step));

    let failure = links.input.failures.get(uid).filter(|_| pending);
    let failure = failure.map(|failure| NetworkProblem::new(&failure.reason, failure.message.clone()));
    let applying =
        || NetworkProblem::new(reason::APPLYING, "the daemon is changing the links of this network");
    let ready = decision.ready && !pending;
    let problem = failure.or(decision.problem).or_else(|| pending.then(applying));
    if problem.is_none()
        && let Some(settled) = settled
    {
        plan.settled.insert(uid.to_owned(), settled);
    }
    if plan.networks.len() < MAX_NETWORKS {
        plan.networks.push(report(links, uid, network, ready, problem, decision.note));
    }
}

/// Creates the links of a network and repairs their drift.
fn ensure_present(links: &LinkIndex<'_>, network: &LocalNetwork) -> NetworkDecision {
    let uid = network.uid.as_str();
    let Some(mtu) = network.mtu else {
        let message = "waiting for the controller to set the MTU of this network";
        return NetworkDecision {
            problem: Some(NetworkProblem::new(reason::WAITING, message)),
            ..NetworkDecision::default()
        };
    };
    if let Some(problem) = foreign_bridge(links, network) {
        return NetworkDecision { problem: Some(problem), ..NetworkDecision::default() };
    }
    let bridge = links.owned_link(uid, LinkKind::Bridge, network.bridge.as_str());
    let uplink = uplink::decide(links, network, mtu, bridge);
    let mut actions = uplink.release;
    let record = record(links, network, uplink.original);
    let node_uid = record.node_uid.clone();
    if links.input.records.get(uid) != Some(&record) {
        actions.push(Action::WriteRecord(record));
    }
    let Some(bridge) = bridge else {
        let mac = ownership_mac(uid, &node_uid, LinkKind::Bridge);
        actions.push(Action::CreateBridge { name: network.bridge.clone(), mac, mtu });
        return NetworkDecision { actions, problem: uplink.problem, ..NetworkDecision::default() };
    };
    let desired = DesiredLink {
        uid,
        node_uid: &node_uid,
        kind: LinkKind::Bridge,
        name: &network.bridge,
        mtu,
        master: None,
    };
    actions.extend(link_drift(bridge, &desired));
    actions.extend(reattach_pods(links, uid, bridge));
    let overlay = overlay::decide(links, network, &node_uid, mtu, bridge);
    actions.extend(overlay.actions);
    actions.extend(uplink.attach);
    let problem = overlay.problem.or(uplink.problem);
    NetworkDecision { ready: problem.is_none(), actions, problem, note: overlay.note }
}

fn foreign_bridge(links: &LinkIndex<'_>, network: &LocalNetwork) -> Option<NetworkProblem> {
    let link = links.by_name(network.bridge.as_str())?;
    if links.owner(link) == Some((network.uid.as_str(), LinkKind::Bridge)) {
        return None;
    }
    let message = format!(
        "link {} exists and does not belong to this network; rename or delete it, or create a network with another \
         spec.bridge",
        link.name
    );
    Some(NetworkProblem::new(reason::FOREIGN_LINK, message))
}

/// The desired record.
fn record(links: &LinkIndex<'_>, network: &LocalNetwork, uplink: Option<super::OriginalLink>) -> LinkRecord {
    let input = links.input;
    // Existing links keep their ownership MACs when the Node object is recreated with another UID.
    let old = input.records.get(&network.uid).filter(|record| record.boot == input.boot);
    LinkRecord {
        uid: network.uid.clone(),
        name: network.name.clone(),
        boot: input.boot.to_owned(),
        bridge: network.bridge.clone(),
        vxlan: network.vxlan.clone(),
        node_uid: old.map_or(&input.node.uid, |record| &record.node_uid).clone(),
        uplink,
    }
}

/// Makes the host ends of pods ports of their bridge again, after the bridge or their master was changed.
fn reattach_pods(links: &LinkIndex<'_>, uid: &str, bridge: &Link) -> Vec<Action> {
    let mut actions = Vec::new();
    for pod in links.pod_links(uid) {
        if pod.master != Some(bridge.index) {
            actions.push(Action::SetMaster { link: pod.index, bridge: bridge.index });
        }
        if pod.admin == AdminState::Down {
            actions.push(Action::SetAdmin { link: pod.index, admin: AdminState::Up });
        }
    }
    actions
}

/// Removes the links and the record of a network, unless pods are attached to it.
fn ensure_absent(
    links: &LinkIndex<'_>,
    uid: &str,
    network: Option<&LocalNetwork>,
    conflict: Option<&Conflict>,
) -> NetworkDecision {
    let owned = links.owned_links(uid);
    let bridges = owned.iter().filter(|(kind, _)| *kind == LinkKind::Bridge).map(|(_, link)| *link);
    let pods: usize = bridges.clone().map(|bridge| links.pod_ports(bridge).count()).sum();
    if pods > 0 {
        return in_use(links, network, conflict, pods);
    }
    let of = |wanted: LinkKind| owned.iter().filter(move |(kind, _)| *kind == wanted);
    let delete = |(_, link): &(LinkKind, &Link)| Action::Delete { link: link.index };
    let mut actions: Vec<Action> = of(LinkKind::Vxlan).map(delete).collect();
    if let Some(original) = uplink::recorded(links, uid) {
        let bridge = bridges
            .clone()
            .find(|bridge| links.ports(bridge).iter().any(|port| port.index == original.index));
        actions.extend(uplink::restore(links, uid, original, bridge));
    }
    actions.extend(of(LinkKind::Bridge).map(delete));
    if links.input.records.contains_key(uid) {
        actions.push(Action::RemoveRecord);
    }
    let problem = match conflict {
        Some(conflict) => NetworkProblem::new(reason::CONFLICT, conflict.to_string()),
        None => NetworkProblem::new(reason::TERMINATING, "the daemon is removing the links of this network"),
    };
    NetworkDecision { actions, problem: Some(problem), ..NetworkDecision::default() }
}

/// Keeps a network that is to be removed while pods are attached to it. Drift of its links is repaired, but no link is
/// created for it.
fn in_use(
    links: &LinkIndex<'_>,
    network: Option<&LocalNetwork>,
    conflict: Option<&Conflict>,
    pods: usize,
) -> NetworkDecision {
    let pods = if pods == 1 { "1 pod is".to_owned() } else { format!("{pods} pods are") };
    if let Some(conflict) = conflict {
        let message = format!(
            "{conflict}; {pods} still attached to the bridge of this network, which is removed when they exit"
        );
        return NetworkDecision {
            problem: Some(NetworkProblem::new(reason::CONFLICT, message)),
            ..NetworkDecision::default()
        };
    }
    let message = format!("{pods} still attached to the bridge; it is removed from this node when they exit");
    let problem = Some(NetworkProblem::new(reason::IN_USE, message));
    let repaired = network.map(|network| ensure_present(links, network)).unwrap_or_default();
    let creates = |action: &Action| {
        matches!(action, Action::WriteRecord(_) | Action::CreateBridge { .. } | Action::CreateVxlan { .. })
    };
    if repaired.actions.iter().any(creates) {
        return NetworkDecision { problem, ..NetworkDecision::default() };
    }
    NetworkDecision { problem, ..repaired }
}

/// The desired state of a network, for comparison with later plans.
fn settled(links: &LinkIndex<'_>, network: &LocalNetwork) -> Settled {
    Settled {
        bridge: network.bridge.clone(),
        vxlan: network.vxlan.clone(),
        mtu: network.mtu,
        uplink: network.uplink.clone(),
        overlay: network.overlay,
        local: links.input.vtep.map(|vtep| vtep.address),
        floods: overlay::desired_floods(links, network),
    }
}

fn report(
    links: &LinkIndex<'_>,
    uid: &str,
    network: Option<&LocalNetwork>,
    ready: bool,
    problem: Option<NetworkProblem>,
    note: Option<String>,
) -> NetworkOnNode {
    let record = links.input.records.get(uid);
    let name = network.map(|network| network.name.as_str()).or(record.map(|record| record.name.as_str()));
    let wanted = network.map(|network| &network.bridge).or(record.map(|record| &record.bridge));
    let wanted = wanted.map_or("", api::IfName::as_str);
    let bridge = links.owned_link(uid, LinkKind::Bridge, wanted);
    let bridge_name =
        [wanted, bridge.map_or("", |link| &link.name), uid].into_iter().find(|name| !name.is_empty());
    let number = |mtu: u32| i32::try_from(mtu).unwrap_or(i32::MAX);
    let old_mtu = |pod: &&Link| network.and_then(|network| network.mtu).is_some_and(|mtu| pod.mtu < mtu);
    let (reason, message) = match problem {
        Some(problem) => (problem.reason, problem.message),
        None => (reason::READY.to_owned(), note.unwrap_or_default()),
    };
    NetworkOnNode {
        uid: uid.to_owned(),
        name: name.unwrap_or(uid).to_owned(),
        observed_generation: network.map_or(0, |network| network.generation),
        ready,
        reason,
        message: message.chars().take(MAX_MESSAGE).collect(),
        bridge: bridge_name.unwrap_or_default().chars().take(api::IfName::MAX).collect(),
        mac: bridge.and_then(|link| link.mac),
        mtu: bridge.map(|link| number(link.mtu)),
        ports: bridge.map(|bridge| ports(links, uid, network, bridge)).unwrap_or_default(),
        pods_with_old_mtu: bridge.map_or(0, |bridge| {
            i32::try_from(links.pod_ports(bridge).filter(old_mtu).count()).unwrap_or(i32::MAX)
        }),
    }
}

/// The ports that connect a bridge to other nodes.
fn ports(links: &LinkIndex<'_>, uid: &str, network: Option<&LocalNetwork>, bridge: &Link) -> Vec<String> {
    let recorded = uplink::recorded(links, uid).map(|original| original.index);
    let wanted = network.and_then(|network| network.uplink.as_ref());
    let connects = |port: &&&Link| {
        links.owner(port) == Some((uid, LinkKind::Vxlan))
            || recorded == Some(port.index)
            || wanted.is_some_and(|name| name.as_str() == port.name)
    };
    let mut names: Vec<String> =
        links.ports(bridge).iter().filter(connects).map(|port| port.name.clone()).collect();
    names.sort();
    names.truncate(8);
    names
}
