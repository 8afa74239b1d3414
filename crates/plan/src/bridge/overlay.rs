//! The VXLAN device of a network, which connects the bridges of all nodes, and its flood list.

use std::{collections::BTreeSet, net::IpAddr};

use super::{
    Action, LinkKind, LocalNetwork, Overlay,
    decide::NetworkProblem,
    drift::{DesiredLink, link_drift},
    index::LinkIndex,
    ownership_mac, reason,
};
use crate::nodenetwork::{self, Link, Vxlan};

/// The decision about the overlay of one network.
#[derive(Default)]
pub struct OverlayDecision {
    pub actions: Vec<Action>,
    pub problem: Option<NetworkProblem>,
    /// A message that is not a failure.
    pub note: Option<String>,
}

/// Creates, repairs or deletes the VXLAN device of a network whose bridge exists.
pub fn decide(
    links: &LinkIndex<'_>,
    network: &LocalNetwork,
    node_uid: &str,
    mtu: u32,
    bridge: &Link,
) -> OverlayDecision {
    let mut decision = OverlayDecision::default();
    let own = links.owned_link(&network.uid, LinkKind::Vxlan, network.vxlan.as_str());
    let Some(overlay) = network.overlay else {
        decision.actions.extend(own.map(|link| Action::Delete { link: link.index }));
        return decision;
    };
    let Some(vtep) = links.input.vtep else {
        decision.problem = Some(NetworkProblem::new(
            reason::NO_VTEP,
            "this node has no VTEP address; see the condition VtepFound of its NodeNetwork",
        ));
        return decision;
    };
    if let Some(foreign) = foreign(links, network, overlay) {
        decision.problem = Some(foreign);
        return decision;
    }
    decision.note = other_family_peers(links, network, vtep.address);
    decision.problem = mtu_too_large(links, mtu, vtep);
    let wanted = Vxlan { vni: overlay.vni, port: overlay.port, local: Some(vtep.address) };
    let create = Action::CreateVxlan {
        name: network.vxlan.clone(),
        mac: ownership_mac(&network.uid, node_uid, LinkKind::Vxlan),
        mtu,
        overlay,
        local: vtep.address,
        bridge: bridge.index,
    };
    match own {
        // The kernel cannot change these settings in place.
        Some(link) if link.vxlan.is_some_and(|settings| settings != wanted) => {
            decision.actions.push(Action::Delete { link: link.index });
            decision.actions.push(create);
        }
        Some(link) => {
            let desired = DesiredLink {
                uid: &network.uid,
                node_uid,
                kind: LinkKind::Vxlan,
                name: &network.vxlan,
                mtu,
                master: Some(bridge.index),
            };
            // The flood list comes first, so that a device that is up reaches all peers.
            decision.actions.extend(flood_drift(links, link, &desired_floods(links, network)));
            decision.actions.extend(link_drift(link, &desired));
        }
        None if decision.problem.is_some() => {}
        None => decision.actions.push(create),
    }
    decision
}

/// A link that Patchbay does not own and that has the device name, or the VNI and port, of the network.
fn foreign(links: &LinkIndex<'_>, network: &LocalNetwork, overlay: Overlay) -> Option<NetworkProblem> {
    let ours = |link: &&Link| links.owner(link) == Some((network.uid.as_str(), LinkKind::Vxlan));
    if let Some(link) = links.by_name(network.vxlan.as_str()).filter(|link| !ours(link)) {
        let message =
            format!("link {} exists and does not belong to this network; rename or delete it", link.name);
        return Some(NetworkProblem::new(reason::FOREIGN_LINK, message));
    }
    let link = links.vxlans(overlay).iter().find(|link| !ours(link))?;
    let Overlay { vni, port } = overlay;
    let message = format!(
        "VXLAN device {} of this node already uses VNI {vni} on port {port}; delete it, or create a network with \
         another VNI or port",
        link.name
    );
    Some(NetworkProblem::new(reason::FOREIGN_LINK, message))
}

fn mtu_too_large(links: &LinkIndex<'_>, mtu: u32, vtep: &api::Vtep) -> Option<NetworkProblem> {
    let overhead = if vtep.address.is_ipv4() { 50 } else { 70 };
    let max = u32::try_from(vtep.mtu).unwrap_or(0).saturating_sub(overhead);
    // A VTEP on a loopback interface has the MTU of the links that lead to the peers.
    let underlay = if nodenetwork::is_loopback(links.input.observed, vtep) {
        "the links to the other nodes"
    } else {
        &vtep.interface
    };
    (mtu > max).then(|| {
        let message = format!(
            "the MTU of the network is {mtu}, but the MTU {} of {underlay} allows at most {max}; raise the MTU of \
             {underlay}, or lower spec.mtu",
            vtep.mtu
        );
        NetworkProblem::new(reason::MTU_TOO_LARGE, message)
    })
}

/// The desired flood list: the VTEPs of all peers that have a port for the network.
pub fn desired_floods(links: &LinkIndex<'_>, network: &LocalNetwork) -> BTreeSet<IpAddr> {
    let Some(own) = links.input.vtep.map(|vtep| vtep.address).filter(|_| network.overlay.is_some()) else {
        return BTreeSet::new();
    };
    let peers = links.input.peers.iter().filter(|peer| peer.networks.contains(network.uid.as_str()));
    peers
        .filter_map(|peer| peer.vtep)
        .filter(|vtep| *vtep != own && vtep.is_ipv4() == own.is_ipv4())
        .collect()
}

/// A message that names the peers whose VTEP is of the other address family.
fn other_family_peers(links: &LinkIndex<'_>, network: &LocalNetwork, own: IpAddr) -> Option<String> {
    const NAMED: usize = 5;
    let peers = links.input.peers.iter().filter(|peer| peer.networks.contains(network.uid.as_str()));
    let names: Vec<&str> = peers
        .filter(|peer| peer.vtep.is_some_and(|vtep| vtep.is_ipv4() != own.is_ipv4()))
        .map(|peer| peer.node.as_str())
        .collect();
    let (shown, rest) = names.split_at(names.len().min(NAMED));
    let more = if rest.is_empty() { String::new() } else { format!(" and {} more", rest.len()) };
    (!shown.is_empty()).then(|| {
        format!(
            "cannot reach {}{more}: their VTEP and {own} are of different address families; give all nodes a first \
             InternalIP of the same family",
            shown.join(", ")
        )
    })
}

fn flood_drift(links: &LinkIndex<'_>, vxlan: &Link, wanted: &BTreeSet<IpAddr>) -> Vec<Action> {
    let current = links.floods(vxlan);
    let add = wanted.difference(&current).map(|&to| Action::AddFlood { vxlan: vxlan.index, to });
    let remove = current.difference(wanted).map(|&to| Action::RemoveFlood { vxlan: vxlan.index, to });
    add.chain(remove).collect()
}
