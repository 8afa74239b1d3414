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

/// With which other network one that is to be would clash, and on which node.
pub fn clash_with<'a>(world: &'a World, name: &str, spec: &BridgeNetworkSpec) -> Option<(&'a str, Clash)> {
    // Younger than all, so that it loses wherever there is something to lose.
    let newcomer = claim(name, "", Timestamp::MAX, spec);
    let mut rivals = Vec::new();
    for other in world.networks.values().filter(|other| other.name != name && !released(other)) {
        let Some(claim) = claim_of(other) else { continue };
        if let Some(clash) = clash::losers(&[claim, newcomer.clone()]).remove("") {
            rivals.push((other, clash));
        }
    }
    for (node, facts) in world.nodes.iter().filter(|(_, node)| selects(spec, &node.labels)) {
        let here = |other: &Network| other.spec.as_ref().is_ok_and(|spec| selects(spec, &facts.labels));
        if let Some((_, clash)) = rivals.iter().find(|(other, _)| here(other)) {
            return Some((node, clash.clone()));
        }
    }
    None
}

/// Another network that keeps an attachment of the same name in one of the same namespaces, and that namespace.
pub fn same_attachment<'a>(
    world: &'a World,
    name: &str,
    spec: &'a BridgeNetworkSpec,
) -> Option<(&'a str, &'a str)> {
    world.networks.values().filter(|other| other.name != name).find_map(|other| {
        let theirs = other.spec.as_ref().ok()?;
        if theirs.attachment_name(&other.name) != spec.attachment_name(name) {
            return None;
        }
        let shared = spec.namespaces().iter().find(|namespace| theirs.namespaces().contains(namespace))?;
        Some((other.name.as_str(), shared.as_str()))
    })
}
