//! The plan itself: who takes part, in which order, and what is said about it.

use std::collections::{BTreeMap, BTreeSet};

use api::{
    NetworkOnNode,
    nodenetwork::{MAX_MESSAGE, MAX_NETWORKS},
};

use super::{
    Action, Made, Network, Plan, Record, Settled, Step, View, Wish,
    keep::{Shape, keep},
    mark, overlay, reason,
    seen::Seen,
    uplink,
};
use crate::{
    conflict::{self, Conflict, NodeResources},
    nodenetwork::{Admin, Link},
};

/// Why a network does not work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    reason: String,
    message: String,
}

impl Problem {
    pub fn new(reason: &str, message: impl Into<String>) -> Self {
        Self { reason: reason.to_owned(), message: message.into() }
    }
}

/// What was decided about one network.
#[derive(Default)]
struct Draft {
    actions: Vec<Action>,
    problem: Option<Problem>,
    note: Option<String>,
    /// Whether all of it is right although the problem says that it should not be there.
    works: bool,
}

/// What to do about all bridge networks of a node, and what to say about them.
///
/// The view must know every BridgeNetwork: what is of a network that is not in it is removed.
pub fn plan(view: &View<'_>) -> Plan {
    let seen = Seen::new(view);
    let networks: BTreeMap<&str, &Network> =
        view.networks.iter().map(|network| (network.uid.as_str(), network)).collect();
    let clashes = conflict::conflicts(&claims(view));
    let (uids, left_out) = chosen(&seen, &networks);
    let mut plan = Plan { left_out, ..Plan::default() };
    for uid in uids {
        one(&seen, uid, networks.get(uid).copied(), clashes.get(uid), &mut plan);
    }
    plan
}

fn claims(view: &View<'_>) -> Vec<NodeResources> {
    let wanted = view.networks.iter().filter(|network| network.wish == Wish::Have);
    wanted.map(NodeResources::of).collect()
}

/// The networks to decide about, and the names of those for which there is no room: the youngest of which this node
/// has nothing.
fn chosen<'a>(
    seen: &Seen<'a>,
    networks: &BTreeMap<&'a str, &'a Network>,
) -> (BTreeSet<&'a str>, Vec<String>) {
    let records = seen.view.records.keys().map(String::as_str);
    let mut chosen: BTreeSet<&str> = seen.networks().chain(records).collect();
    let mut rest: Vec<&Network> = networks
        .values()
        .copied()
        .filter(|network| network.wish == Wish::Have && !chosen.contains(network.uid.as_str()))
        .collect();
    rest.sort_by_key(|network| (network.created, &network.name));
    let room = MAX_NETWORKS.saturating_sub(chosen.len()).min(rest.len());
    let left_out = rest.split_off(room);
    chosen.extend(rest.into_iter().map(|network| network.uid.as_str()));
    (chosen, left_out.into_iter().map(|network| network.name.clone()).collect())
}

fn one<'a>(
    seen: &Seen<'a>,
    uid: &'a str,
    network: Option<&'a Network>,
    conflict: Option<&Conflict>,
    plan: &mut Plan,
) {
    let wanted = network.filter(|network| network.wish == Wish::Have && conflict.is_none());
    let mut draft = match wanted {
        Some(network) => take_part(seen, network),
        None => leave(seen, uid, network, conflict),
    };
    let pending = !draft.actions.is_empty();
    let settled = wanted.map(|network| settled(seen, network));
    if wanted.is_some() && pending && !seen.view.listed.contains(uid) {
        draft.actions.clear();
        draft.problem = Some(Problem::new(
            reason::LISTING,
            "waits until the API server has this network in the NodeNetwork of this node",
        ));
    }
    let repair = settled.is_some() && seen.view.settled.get(uid) == settled.as_ref();
    let step = |action| Step { network: uid.to_owned(), action, repair };
    plan.steps.extend(draft.actions.into_iter().map(step));

    let failure = seen.view.failures.get(uid).filter(|_| pending);
    let failure = failure.map(|failure| Problem::new(&failure.reason, failure.message.clone()));
    let applying = || Problem::new(reason::APPLYING, "the links of this network are being changed");
    let works = draft.works && !pending;
    let problem = failure.or(draft.problem).or_else(|| pending.then(applying));
    if problem.is_none()
        && let Some(settled) = settled
    {
        plan.settled.insert(uid.to_owned(), settled);
    }
    if plan.networks.len() < MAX_NETWORKS {
        plan.networks.push(report(seen, uid, network, works, problem, draft.note));
    }
}

/// Makes and keeps the links of a network.
fn take_part(seen: &Seen<'_>, network: &Network) -> Draft {
    let uid = network.uid.as_str();
    let Some(mtu) = network.mtu else {
        let message = "waits until the controller has decided the MTU of this network";
        return Draft { problem: Some(Problem::new(reason::WAITING, message)), ..Draft::default() };
    };
    if let Some(problem) = foreign_bridge(seen, network) {
        return Draft { problem: Some(problem), ..Draft::default() };
    }
    let bridge = seen.one(uid, Made::Bridge, network.bridge.as_str());
    let uplink = uplink::draft(seen, network, mtu, bridge);
    let mut actions = uplink.back;
    let record = record(seen, network, uplink.found);
    let node_uid = record.node_uid.clone();
    if seen.view.records.get(uid) != Some(&record) {
        actions.push(Action::Record(record));
    }
    let Some(bridge) = bridge else {
        let mac = mark(uid, &node_uid, Made::Bridge);
        actions.push(Action::CreateBridge { name: network.bridge.clone(), mac, mtu });
        return Draft { actions, problem: uplink.problem, ..Draft::default() };
    };
    let shape =
        Shape { uid, node_uid: &node_uid, made: Made::Bridge, name: &network.bridge, mtu, master: None };
    actions.extend(keep(bridge, &shape));
    actions.extend(pods_back(seen, uid, bridge));
    let overlay = overlay::draft(seen, network, &node_uid, mtu, bridge);
    actions.extend(overlay.actions);
    actions.extend(uplink.take);
    let problem = overlay.problem.or(uplink.problem);
    Draft { works: problem.is_none(), actions, problem, note: overlay.note }
}

fn foreign_bridge(seen: &Seen<'_>, network: &Network) -> Option<Problem> {
    let link = seen.named(network.bridge.as_str())?;
    if seen.owner(link) == Some((network.uid.as_str(), Made::Bridge)) {
        return None;
    }
    let message = format!(
        "this node has a link {} that is not of this network; rename or remove it, or make a network with another \
         spec.bridge",
        link.name
    );
    Some(Problem::new(reason::FOREIGN_LINK, message))
}

/// What the record should say.
fn record(seen: &Seen<'_>, network: &Network, uplink: Option<super::Found>) -> Record {
    let view = seen.view;
    // Links that are there keep the marks that they have, also when the Node was deleted and made anew.
    let old = view.records.get(&network.uid).filter(|record| record.boot == view.boot);
    Record {
        uid: network.uid.clone(),
        name: network.name.clone(),
        boot: view.boot.to_owned(),
        bridge: network.bridge.clone(),
        vxlan: network.vxlan.clone(),
        node_uid: old.map_or(&view.facts.uid, |record| &record.node_uid).clone(),
        uplink,
    }
}

/// The host's ends of pods that are not ports of their bridge: it was deleted, or somebody moved them.
fn pods_back(seen: &Seen<'_>, uid: &str, bridge: &Link) -> Vec<Action> {
    let mut actions = Vec::new();
    for pod in seen.pods_of(uid) {
        if pod.master != Some(bridge.index) {
            actions.push(Action::Join { link: pod.index, bridge: bridge.index });
        }
        if pod.admin == Admin::Down {
            actions.push(Action::SetAdmin { link: pod.index, admin: Admin::Up });
        }
    }
    actions
}

/// Removes what was made for a network, unless pods are on it.
fn leave(seen: &Seen<'_>, uid: &str, network: Option<&Network>, conflict: Option<&Conflict>) -> Draft {
    let links = seen.made(uid);
    let bridges = links.iter().filter(|(made, _)| *made == Made::Bridge).map(|(_, link)| *link);
    let pods: usize = bridges.clone().map(|bridge| seen.pods_on(bridge).count()).sum();
    if pods > 0 {
        return in_use(seen, network, conflict, pods);
    }
    let of = |wanted: Made| links.iter().filter(move |(made, _)| *made == wanted);
    let delete = |(_, link): &(Made, &Link)| Action::Delete { link: link.index };
    let mut actions: Vec<Action> = of(Made::Vxlan).map(delete).collect();
    if let Some(found) = uplink::recorded(seen, uid) {
        let bridge =
            bridges.clone().find(|bridge| seen.ports(bridge).iter().any(|port| port.index == found.index));
        actions.extend(uplink::back(seen, uid, found, bridge));
    }
    actions.extend(of(Made::Bridge).map(delete));
    if seen.view.records.contains_key(uid) {
        actions.push(Action::Forget);
    }
    let problem = match conflict {
        Some(conflict) => Problem::new(reason::CONFLICT, conflict.to_string()),
        None => Problem::new(reason::LEAVING, "the links of this network are being removed"),
    };
    Draft { actions, problem: Some(problem), ..Draft::default() }
}

/// A network that should go and cannot, because pods are on it. Their links are kept as they should be, but nothing is
/// made for it any more.
fn in_use(seen: &Seen<'_>, network: Option<&Network>, conflict: Option<&Conflict>, pods: usize) -> Draft {
    let pods = if pods == 1 { "1 pod is".to_owned() } else { format!("{pods} pods are") };
    if let Some(conflict) = conflict {
        let message =
            format!("{conflict}; {pods} still on the bridge of this one, which stays until they are gone");
        return Draft { problem: Some(Problem::new(reason::CONFLICT, message)), ..Draft::default() };
    }
    let message = format!("{pods} still on the bridge; the network goes from this node when they are gone");
    let problem = Some(Problem::new(reason::IN_USE, message));
    let kept = network.map(|network| take_part(seen, network)).unwrap_or_default();
    let makes = |action: &Action| {
        matches!(action, Action::Record(_) | Action::CreateBridge { .. } | Action::CreateVxlan { .. })
    };
    if kept.actions.iter().any(makes) {
        return Draft { problem, ..Draft::default() };
    }
    Draft { problem, ..kept }
}

/// What is wanted of a network, to compare with later.
fn settled(seen: &Seen<'_>, network: &Network) -> Settled {
    Settled {
        bridge: network.bridge.clone(),
        vxlan: network.vxlan.clone(),
        mtu: network.mtu,
        uplink: network.uplink.clone(),
        overlay: network.overlay,
        local: seen.view.vtep.map(|vtep| vtep.address),
        floods: overlay::wanted_floods(seen, network),
    }
}

fn report(
    seen: &Seen<'_>,
    uid: &str,
    network: Option<&Network>,
    works: bool,
    problem: Option<Problem>,
    note: Option<String>,
) -> NetworkOnNode {
    let record = seen.view.records.get(uid);
    let name = network.map(|network| network.name.as_str()).or(record.map(|record| record.name.as_str()));
    let wanted = network.map(|network| &network.bridge).or(record.map(|record| &record.bridge));
    let wanted = wanted.map_or("", api::IfName::as_str);
    let bridge = seen.one(uid, Made::Bridge, wanted);
    let shown = [wanted, bridge.map_or("", |link| &link.name), uid].into_iter().find(|name| !name.is_empty());
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
        ready: works,
        reason,
        message: message.chars().take(MAX_MESSAGE).collect(),
        bridge: shown.unwrap_or_default().chars().take(api::IfName::MAX).collect(),
        mac: bridge.and_then(|link| link.mac),
        mtu: bridge.map(|link| number(link.mtu)),
        ports: bridge.map(|bridge| ports(seen, uid, network, bridge)).unwrap_or_default(),
        pods_with_old_mtu: bridge.map_or(0, |bridge| {
            i32::try_from(seen.pods_on(bridge).filter(old_mtu).count()).unwrap_or(i32::MAX)
        }),
    }
}

/// The ports that connect a bridge with other nodes.
fn ports(seen: &Seen<'_>, uid: &str, network: Option<&Network>, bridge: &Link) -> Vec<String> {
    let recorded = uplink::recorded(seen, uid).map(|found| found.index);
    let wanted = network.and_then(|network| network.uplink.as_ref());
    let connects = |port: &&&Link| {
        seen.owner(port) == Some((uid, Made::Vxlan))
            || recorded == Some(port.index)
            || wanted.is_some_and(|name| name.as_str() == port.name)
    };
    let mut names: Vec<String> =
        seen.ports(bridge).iter().filter(connects).map(|port| port.name.clone()).collect();
    names.sort();
    names.truncate(8);
    names
}
