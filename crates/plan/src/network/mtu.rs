//! The largest packet that a network carries.

use api::{BridgeNetworkSpec, bridgenetwork::DEFAULT_MTU};

use super::Scene;

/// What VXLAN puts around a packet, by the family of the nodes' addresses.
const OVER_IPV4: i32 = 50;
const OVER_IPV6: i32 = 70;
/// What every link of IPv4 must carry; less is no network.
pub const SMALLEST: i32 = 576;
/// The most that a network may ask for.
const LARGEST: i32 = 9216;

/// How large packets may be, and why.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fit {
    /// What holds now; none until it is known.
    pub mtu: Option<i32>,
    /// The node that allows least, and how much that is.
    pub limit: Option<(String, i32)>,
    /// What would hold if nobody used the network.
    pub held: Option<i32>,
    /// What would hold but for nodes that have not said what their link takes, and which these are.
    pub unheard: Option<(i32, Vec<String>)>,
}

/// What a spec alone asks for; an overlay that says nothing takes what there is.
pub fn wanted(spec: &BridgeNetworkSpec) -> Option<i32> {
    spec.mtu.or_else(|| spec.overlay.is_none().then_some(DEFAULT_MTU))
}

pub fn fit(scene: &Scene<'_>) -> Fit {
    let old = scene.network.status.mtu;
    let Ok(spec) = &scene.network.spec else { return Fit { mtu: old, ..Fit::default() } };
    let limit = if spec.overlay.is_some() { limit(scene) } else { None };
    let wanted = match (&spec.overlay, &limit) {
        (None, _) => wanted(spec),
        (Some(_), Some((_, most))) => Some(wanted(spec).unwrap_or(*most).min(*most)),
        // What was fitted once can be made smaller without asking anybody; more than that has to wait.
        (Some(_), None) => old.and(wanted(spec)).filter(|_| !unheard(scene).is_empty()),
    };
    let Some(wanted) = wanted.filter(|mtu| *mtu >= SMALLEST) else {
        return Fit { mtu: old, limit, ..Fit::default() };
    };
    let fit = Fit { mtu: Some(wanted), limit, ..Fit::default() };
    match old {
        Some(old) if wanted < old && scene.users.count > 0 => {
            Fit { mtu: Some(old), held: Some(wanted), ..fit }
        }
        // A node that says nothing may have the smallest link of all: what fitted it the last time goes on to hold.
        Some(old) if wanted > old && spec.overlay.is_some() => match unheard(scene) {
            nodes if nodes.is_empty() => fit,
            nodes => Fit { mtu: Some(old), unheard: Some((wanted, nodes)), ..fit },
        },
        _ => fit,
    }
}

/// The selected nodes that have not said what their link between the nodes takes.
fn unheard(scene: &Scene<'_>) -> Vec<String> {
    let nodes = scene.selected.iter().flat_map(|selected| &selected.nodes);
    let silent = |name: &&&str| scene.world.reports.get(**name).is_none_or(|report| report.vtep.is_none());
    nodes.filter(silent).map(|name| (*name).to_owned()).collect()
}

/// The selected node whose link between the nodes takes least. Nodes that have not said what they have do not count yet.
fn limit(scene: &Scene<'_>) -> Option<(String, i32)> {
    let nodes = scene.selected?.nodes.iter();
    let limits = nodes.filter_map(|name| {
        let vtep = scene.world.reports.get(*name)?.vtep.as_ref()?;
        let around = if vtep.address.is_ipv4() { OVER_IPV4 } else { OVER_IPV6 };
        Some(((vtep.mtu - around).min(LARGEST), *name))
    });
    limits.min().map(|(limit, node)| (node.to_owned(), limit))
}
