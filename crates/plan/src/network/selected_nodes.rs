//! The nodes that each network selects, and its conflicts with other networks on them.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use api::{BridgeNetworkSpec, bridgenetwork::FINALIZER_USERS};
use jiff::Timestamp;

use super::{ClusterState, NetworkState};
use crate::{
    bridge::Overlay,
    conflict::{self, Conflict, NodeResources},
};

/// The nodes that one network selects.
#[derive(Debug, Default)]
pub struct SelectedNodes<'a> {
    pub nodes: BTreeSet<&'a str>,
    /// The first node with a conflict that the network loses.
    pub conflict: Option<(&'a str, Conflict)>,
}

/// The selected nodes of every network whose spec can be parsed.
pub fn all(state: &ClusterState) -> BTreeMap<&str, SelectedNodes<'_>> {
    let networks: Vec<(&NetworkState, NodeResources)> =
        state.networks.values().filter_map(|network| Some((network, resources_of(network)?))).collect();
    let mut selected: BTreeMap<&str, SelectedNodes<'_>> =
        networks.iter().map(|(network, _)| (network.name.as_str(), SelectedNodes::default())).collect();
    // Many nodes share the same set of networks, so conflicts are computed once per set.
    let mut by_networks: HashMap<Vec<usize>, BTreeMap<String, Conflict>> = HashMap::new();
    for (name, node) in state.nodes.iter() {
        let mut here: Vec<usize> = Vec::new();
        for (index, (network, _)) in networks.iter().enumerate() {
            let Ok(spec) = &network.spec else { continue };
            if selects(spec, &node.labels) {
                here.push(index);
                selected.entry(&network.name).or_default().nodes.insert(name);
            }
        }
        // A network whose links are being removed no longer owns anything.
        here.retain(|index| !is_releasing(networks[*index].0));
        let conflicts = by_networks.entry(here).or_insert_with_key(|here| {
            conflict::conflicts(&here.iter().map(|index| networks[*index].1.clone()).collect::<Vec<_>>())
        });
        for (network, _) in networks.iter().filter(|(network, _)| conflicts.contains_key(&network.uid)) {
            let entry = selected.entry(&network.name).or_default();
            if let Some(conflict) = conflicts.get(&network.uid).filter(|_| entry.conflict.is_none()) {
                entry.conflict = Some((name, conflict.clone()));
            }
        }
    }
    selected
}

pub fn selects(spec: &BridgeNetworkSpec, labels: &BTreeMap<String, String>) -> bool {
    spec.node_selector.as_ref().is_none_or(|selector| selector.matches(labels))
}

fn is_releasing(network: &NetworkState) -> bool {
    network.deleting.is_some() && !network.finalizers.iter().any(|one| one == FINALIZER_USERS)
}

fn resources_of(network: &NetworkState) -> Option<NodeResources> {
    let spec = network.spec.as_ref().ok()?;
    Some(resources(&network.name, &network.uid, network.created, spec))
}

fn resources(name: &str, uid: &str, created: Timestamp, spec: &BridgeNetworkSpec) -> NodeResources {
    let vxlan = spec.overlay.as_ref().and_then(|overlay| {
        let overlay = Overlay { vni: overlay.vni.try_into().ok()?, port: overlay.port.try_into().ok()? };
        Some((BridgeNetworkSpec::vxlan_name(name), overlay))
    });
    NodeResources {
        name: name.to_owned(),
        uid: uid.to_owned(),
        created,
        bridge: spec.bridge_name(name),
        vxlan,
        uplink: spec.uplink.clone(),
    }
}

/// The first conflict that a new or changed spec would cause, and its node. A conflict that the old spec already has does
/// not count: the age of the networks decides that one.
pub fn find_conflict<'a>(
    state: &'a ClusterState,
    name: &str,
    spec: &BridgeNetworkSpec,
    old: Option<&BridgeNetworkSpec>,
) -> Option<(&'a str, Conflict)> {
    let before: BTreeSet<&str> = match old {
        Some(old) => conflicts(state, name, old).into_iter().map(|(other, ..)| other).collect(),
        None => BTreeSet::new(),
    };
    let new = conflicts(state, name, spec).into_iter().filter(|(other, ..)| !before.contains(other));
    new.min_by_key(|(_, node, _)| *node).map(|(_, node, conflict)| (node, conflict))
}

/// Every other network that needs the same resource on a common node, with the first such node.
fn conflicts<'a>(
    state: &'a ClusterState,
    name: &str,
    spec: &BridgeNetworkSpec,
) -> Vec<(&'a str, &'a str, Conflict)> {
    // Younger than all others, so that it loses every conflict.
    let candidate = resources(name, "", Timestamp::MAX, spec);
    let others = state.networks.values().filter(|other| other.name != name && !is_releasing(other));
    others
        .filter_map(|other| {
            let conflict = conflict::conflicts(&[resources_of(other)?, candidate.clone()]).remove("")?;
            let theirs = other.spec.as_ref().ok()?;
            let both = |node: &super::NodeState| selects(spec, &node.labels) && selects(theirs, &node.labels);
            let (node, _) = state.nodes.iter().find(|(_, node)| both(node))?;
            Some((other.name.as_str(), node.as_str(), conflict))
        })
        .collect()
}

/// Another network that desires a NAD of the same name in one of the same namespaces, and that namespace. A NAD that both
/// already desired before the change does not count.
pub fn find_nad_conflict<'a>(
    state: &'a ClusterState,
    name: &str,
    spec: &'a BridgeNetworkSpec,
    old: Option<&BridgeNetworkSpec>,
) -> Option<(&'a str, &'a str)> {
    let unchanged = |old: &BridgeNetworkSpec, namespace: &String| {
        old.attachment_name(name) == spec.attachment_name(name) && old.namespaces().contains(namespace)
    };
    let new: Vec<&String> = spec
        .namespaces()
        .iter()
        .filter(|namespace| !old.is_some_and(|old| unchanged(old, namespace)))
        .collect();
    state.networks.values().filter(|other| other.name != name).find_map(|other| {
        let theirs = other.spec.as_ref().ok()?;
        if theirs.attachment_name(&other.name) != spec.attachment_name(name) {
            return None;
        }
        let shared = new.iter().find(|namespace| theirs.namespaces().contains(namespace))?;
        Some((other.name.as_str(), shared.as_str()))
    })
}
