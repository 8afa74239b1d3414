//! Which nodes a network selects, and on which of them another one stands in its way.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use api::{BridgeNetworkSpec, bridgenetwork::FINALIZER_USERS};
use jiff::Timestamp;

use super::{Network, World};
use crate::{
    bridge::Overlay,
    clash::{self, Claim, Clash},
};

/// The nodes of one network.
#[derive(Debug, Default)]
pub struct Selected<'a> {
    pub nodes: BTreeSet<&'a str>,
    /// The first node on which it loses, and to whom.
    pub clash: Option<(&'a str, Clash)>,
}

/// The nodes of every network whose spec can be read.
pub fn all(world: &World) -> BTreeMap<&str, Selected<'_>> {
    let networks: Vec<(&Network, Claim)> =
        world.networks.values().filter_map(|network| Some((network, claim_of(network)?))).collect();
    let mut selected: BTreeMap<&str, Selected<'_>> =
        networks.iter().map(|(network, _)| (network.name.as_str(), Selected::default())).collect();
    // Most nodes have the same networks as many others: who loses is found out once for all of them.
    let mut known: HashMap<Vec<usize>, BTreeMap<String, Clash>> = HashMap::new();
    for (name, node) in &world.nodes {
        let mut here: Vec<usize> = Vec::new();
        for (index, (network, _)) in networks.iter().enumerate() {
            let Ok(spec) = &network.spec else { continue };
            if selects(spec, &node.labels) {
                here.push(index);
                selected.entry(&network.name).or_default().nodes.insert(name);
            }
        }
        // What is being undone claims nothing any more.
        here.retain(|index| !released(networks[*index].0));
        let losers = known.entry(here).or_insert_with_key(|here| {
            clash::losers(&here.iter().map(|index| networks[*index].1.clone()).collect::<Vec<_>>())
        });
        for (network, _) in networks.iter().filter(|(network, _)| losers.contains_key(&network.uid)) {
            let entry = selected.entry(&network.name).or_default();
            if let Some(clash) = losers.get(&network.uid).filter(|_| entry.clash.is_none()) {
                entry.clash = Some((name, clash.clone()));
            }
        }
    }
    selected
}

pub fn selects(spec: &BridgeNetworkSpec, labels: &BTreeMap<String, String>) -> bool {
    spec.node_selector.as_ref().is_none_or(|selector| selector.matches(labels))
}

fn released(network: &Network) -> bool {
    network.deleting.is_some() && !network.finalizers.iter().any(|one| one == FINALIZER_USERS)
}

fn claim_of(network: &Network) -> Option<Claim> {
    let spec = network.spec.as_ref().ok()?;
    Some(claim(&network.name, &network.uid, network.created, spec))
}

fn claim(name: &str, uid: &str, created: Timestamp, spec: &BridgeNetworkSpec) -> Claim {
    let vxlan = spec.overlay.as_ref().and_then(|overlay| {
        let overlay = Overlay { vni: overlay.vni.try_into().ok()?, port: overlay.port.try_into().ok()? };
        Some((BridgeNetworkSpec::vxlan_name(name), overlay))
    });
    Claim {
        name: name.to_owned(),
        uid: uid.to_owned(),
        created,
        bridge: spec.bridge_name(name),
        vxlan,
        uplink: spec.uplink.clone(),
    }
}

/// With which other network one that is to be would clash, and on which node. What it clashes with already, as it is, is
/// no reason against an edit: that is decided by age.
pub fn clash_with<'a>(
    world: &'a World,
    name: &str,
    spec: &BridgeNetworkSpec,
    old: Option<&BridgeNetworkSpec>,
) -> Option<(&'a str, Clash)> {
    let before: BTreeSet<&str> = match old {
        Some(old) => clashes(world, name, old).into_iter().map(|(other, ..)| other).collect(),
        None => BTreeSet::new(),
    };
    let new = clashes(world, name, spec).into_iter().filter(|(other, ..)| !before.contains(other));
    new.min_by_key(|(_, node, _)| *node).map(|(_, node, clash)| (node, clash))
}

/// Every other network that wants something that this one wants on a node of both, with the first such node.
fn clashes<'a>(world: &'a World, name: &str, spec: &BridgeNetworkSpec) -> Vec<(&'a str, &'a str, Clash)> {
    // Younger than all, so that it loses wherever there is something to lose.
    let newcomer = claim(name, "", Timestamp::MAX, spec);
    let others = world.networks.values().filter(|other| other.name != name && !released(other));
    others
        .filter_map(|other| {
            let clash = clash::losers(&[claim_of(other)?, newcomer.clone()]).remove("")?;
            let theirs = other.spec.as_ref().ok()?;
            let both = |node: &super::Node| selects(spec, &node.labels) && selects(theirs, &node.labels);
            let (node, _) = world.nodes.iter().find(|(_, node)| both(node))?;
            Some((other.name.as_str(), node.as_str(), clash))
        })
        .collect()
}

/// Another network that keeps an attachment of the same name in one of the same namespaces, and that namespace. What they
/// shared already is no reason against an edit.
pub fn same_attachment<'a>(
    world: &'a World,
    name: &str,
    spec: &'a BridgeNetworkSpec,
    old: Option<&BridgeNetworkSpec>,
) -> Option<(&'a str, &'a str)> {
    let kept = |old: &BridgeNetworkSpec, namespace: &String| {
        old.attachment_name(name) == spec.attachment_name(name) && old.namespaces().contains(namespace)
    };
    let new: Vec<&String> =
        spec.namespaces().iter().filter(|namespace| !old.is_some_and(|old| kept(old, namespace))).collect();
    world.networks.values().filter(|other| other.name != name).find_map(|other| {
        let theirs = other.spec.as_ref().ok()?;
        if theirs.attachment_name(&other.name) != spec.attachment_name(name) {
            return None;
        }
        let shared = new.iter().find(|namespace| theirs.namespaces().contains(namespace))?;
        Some((other.name.as_str(), shared.as_str()))
    })
}
