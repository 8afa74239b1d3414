//! The VXLAN device that connects the bridges of the nodes, and its flood list.

use std::{collections::BTreeSet, net::IpAddr};

use super::{
    Action, Made, Network, Overlay,
    decide::Problem,
    keep::{Shape, keep},
    mark, reason,
    seen::Seen,
};
use crate::nodenetwork::{Link, Vxlan};

/// What to do about the overlay of one network.
#[derive(Default)]
pub struct Draft {
    pub actions: Vec<Action>,
    pub problem: Option<Problem>,
    /// What is worth saying, but no failure.
    pub note: Option<String>,
}

/// Keeps the VXLAN device of a network whose bridge is there.
pub fn draft(seen: &Seen<'_>, network: &Network, node_uid: &str, mtu: u32, bridge: &Link) -> Draft {
    let mut draft = Draft::default();
    let own = seen.one(&network.uid, Made::Vxlan, network.vxlan.as_str());
    let Some(overlay) = network.overlay else {
        draft.actions.extend(own.map(|link| Action::Delete { link: link.index }));
        return draft;
    };
    let Some(vtep) = seen.view.vtep else {
        draft.problem = Some(Problem::new(
            reason::NO_VTEP,
            "this node has no address for overlays; the condition VtepFound of its NodeNetwork says what to do",
        ));
        return draft;
    };
    if let Some(foreign) = foreign(seen, network, overlay) {
        draft.problem = Some(foreign);
        return draft;
    }
    draft.note = strangers(seen, network, vtep.address);
    draft.problem = too_large(mtu, vtep);
    let wanted = Vxlan { vni: overlay.vni, port: overlay.port, local: Some(vtep.address) };
    let create = Action::CreateVxlan {
        name: network.vxlan.clone(),
        mac: mark(&network.uid, node_uid, Made::Vxlan),
        mtu,
        overlay,
        local: vtep.address,
        bridge: bridge.index,
    };
    match own {
        // What the kernel cannot change in place.
        Some(link) if link.vxlan.is_some_and(|settings| settings != wanted) => {
            draft.actions.push(Action::Delete { link: link.index });
            draft.actions.push(create);
        }
        Some(link) => {
            let shape = Shape {
                uid: &network.uid,
                node_uid,
                made: Made::Vxlan,
                name: &network.vxlan,
                mtu,
                master: Some(bridge.index),
            };
            // The flood list first, so that a device that is up reaches everybody.
            draft.actions.extend(flood(seen, link, &wanted_floods(seen, network)));
            draft.actions.extend(keep(link, &shape));
        }
        None if draft.problem.is_some() => {}
        None => draft.actions.push(create),
    }
    draft
}

/// A link of somebody else that has the name, or the number and the port.
fn foreign(seen: &Seen<'_>, network: &Network, overlay: Overlay) -> Option<Problem> {
    let ours = |link: &&Link| seen.owner(link) == Some((network.uid.as_str(), Made::Vxlan));
    if let Some(link) = seen.named(network.vxlan.as_str()).filter(|link| !ours(link)) {
        let message = format!(
            "link {} is not of this network; rename or remove it, and the network goes on",
            link.name
        );
        return Some(Problem::new(reason::FOREIGN_LINK, message));
    }
    let link = seen.vxlans(overlay).iter().find(|link| !ours(link))?;
    let Overlay { vni, port } = overlay;
    let message = format!(
        "VXLAN device {} of this node has VNI {vni} on port {port} already; remove it, or make a network with \
         another VNI or port",
        link.name
    );
    Some(Problem::new(reason::FOREIGN_LINK, message))
}

fn too_large(mtu: u32, vtep: &api::Vtep) -> Option<Problem> {
    let overhead = if vtep.address.is_ipv4() { 50 } else { 70 };
    let room = u32::try_from(vtep.mtu).unwrap_or(0).saturating_sub(overhead);
    (mtu > room).then(|| {
        Problem::new(
            reason::MTU_TOO_LARGE,
            format!(
                "the network's MTU is {mtu}, but {} takes packets of {} bytes, which leaves {room}; raise the MTU of \
                 {}, or lower spec.mtu",
                vtep.interface, vtep.mtu, vtep.interface
            ),
        )
    })
}

/// The nodes that frames for everybody go to.
pub fn wanted_floods(seen: &Seen<'_>, network: &Network) -> BTreeSet<IpAddr> {
    let Some(own) = seen.view.vtep.map(|vtep| vtep.address).filter(|_| network.overlay.is_some()) else {
        return BTreeSet::new();
    };
    let peers = seen.view.peers.iter().filter(|peer| peer.networks.contains(&network.uid));
    peers
        .filter_map(|peer| peer.vtep)
        .filter(|vtep| *vtep != own && vtep.is_ipv4() == own.is_ipv4())
        .collect()
}

/// Names the nodes that have an address of the other family only.
fn strangers(seen: &Seen<'_>, network: &Network, own: IpAddr) -> Option<String> {
    const NAMED: usize = 5;
    let peers = seen.view.peers.iter().filter(|peer| peer.networks.contains(&network.uid));
    let names: Vec<&str> = peers
        .filter(|peer| peer.vtep.is_some_and(|vtep| vtep.is_ipv4() != own.is_ipv4()))
        .map(|peer| peer.node.as_str())
        .collect();
    let (shown, rest) = names.split_at(names.len().min(NAMED));
    let more = if rest.is_empty() { String::new() } else { format!(" and {} more", rest.len()) };
    (!shown.is_empty()).then(|| {
        format!(
            "cannot reach {}{more}: their address is not of the family of {own}; set the first InternalIP of all \
             nodes to one family",
            shown.join(", ")
        )
    })
}

fn flood(seen: &Seen<'_>, vxlan: &Link, wanted: &BTreeSet<IpAddr>) -> Vec<Action> {
    let there = seen.floods(vxlan);
    let add = wanted.difference(&there).map(|&to| Action::AddFlood { vxlan: vxlan.index, to });
    let remove = there.difference(wanted).map(|&to| Action::RemoveFlood { vxlan: vxlan.index, to });
    add.chain(remove).collect()
}
