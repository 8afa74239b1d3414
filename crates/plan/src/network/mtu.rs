//! The effective MTU of a network.

use api::{BridgeNetworkSpec, bridgenetwork::MtuFittedFrom};

use super::NetworkContext;

/// The bytes that VXLAN adds to a packet, by the address family of the VTEPs.
const VXLAN_OVERHEAD_IPV4: i32 = 50;
const VXLAN_OVERHEAD_IPV6: i32 = 70;
/// The MTU of a network without `spec.mtu` and without an overlay.
const DEFAULT_MTU: i32 = 1500;
/// The smallest MTU of a network. RFC 791 requires every host to accept packets of this size.
pub const MIN_MTU: i32 = 576;
/// The largest MTU that spec.mtu accepts.
const MAX_MTU: i32 = 9216;

/// The effective MTU, and what limits it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EffectiveMtu {
    /// The value for status.mtu; None until it can be computed.
    pub mtu: Option<i32>,
    /// The value for status.mtuFittedFrom.
    pub fitted_from: Option<MtuFittedFrom>,
    /// The selected node with the smallest limit, and that limit.
    pub limit: Option<(String, i32)>,
    /// The lower value that applies once the network has no users.
    pub held_by_users: Option<i32>,
    /// A higher value that does not apply now.
    pub higher: Option<HigherMtu>,
}

/// An MTU that the nodes may carry and that the network does not have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HigherMtu {
    pub mtu: i32,
    /// Whether spec.mtu has changed, so that the MTU rises once all nodes have a VTEP.
    pub requested: bool,
    /// The selected nodes that may carry less.
    pub nodes_without_vtep: Vec<String>,
}

/// The MTU that the spec requests. None for an overlay without spec.mtu: it uses what the nodes carry.
pub fn desired(spec: &BridgeNetworkSpec) -> Option<i32> {
    spec.mtu.or_else(|| spec.overlay.is_none().then_some(DEFAULT_MTU))
}

/// Fits the MTU to the spec and the nodes.
///
/// The MTU of an overlay rises only after a change of spec.mtu. If it followed the nodes, it would rise when a node with a
/// small MTU leaves, and could not come down again for that node's return once pods use the new size. Without a recorded
/// spec.mtu, as in a status of an older version, it does not rise.
pub fn effective(context: &NetworkContext<'_>) -> EffectiveMtu {
    let status = &context.network.status;
    let (old, fitted_from) = (status.mtu, status.mtu_fitted_from);
    let unchanged = EffectiveMtu { mtu: old, fitted_from, ..EffectiveMtu::default() };
    let Ok(spec) = &context.network.spec else { return unchanged };
    let limit = if spec.overlay.is_some() { limit(context) } else { None };
    let desired = match (&spec.overlay, &limit) {
        (None, _) => desired(spec),
        (Some(_), Some((_, limit))) => Some(desired(spec).unwrap_or(*limit).min(*limit)),
        // Without any VTEP, a known MTU can only be lowered.
        (Some(_), None) => old.and(desired(spec)).filter(|_| !nodes_without_vtep(context).is_empty()),
    };
    let Some(desired) = desired.filter(|mtu| *mtu >= MIN_MTU) else {
        return EffectiveMtu { limit, ..unchanged };
    };
    let fitted = EffectiveMtu {
        mtu: Some(desired),
        fitted_from: Some(MtuFittedFrom { spec_mtu: spec.mtu }),
        limit,
        ..EffectiveMtu::default()
    };
    match old {
        Some(old) if desired < old && context.users.count > 0 => {
            EffectiveMtu { mtu: Some(old), held_by_users: Some(desired), ..fitted }
        }
        Some(old) if desired > old && spec.overlay.is_some() => {
            let requested = fitted_from.is_some_and(|fitted_from| fitted_from.spec_mtu != spec.mtu);
            let nodes_without_vtep = nodes_without_vtep(context);
            if requested && nodes_without_vtep.is_empty() {
                return fitted;
            }
            // A node without a VTEP may turn out to have the smallest limit. A requested rise stays pending until then.
            let fitted_from = if requested { fitted_from } else { fitted.fitted_from };
            let higher = Some(HigherMtu { mtu: desired, requested, nodes_without_vtep });
            EffectiveMtu { mtu: Some(old), fitted_from, higher, ..fitted }
        }
        _ => fitted,
    }
}

/// The selected nodes that have not reported a VTEP.
fn nodes_without_vtep(context: &NetworkContext<'_>) -> Vec<String> {
    let nodes = context.selected.iter().flat_map(|selected| &selected.nodes);
    let without_vtep =
        |name: &&&str| context.state.reports.get(**name).is_none_or(|report| report.vtep.is_none());
    nodes.filter(without_vtep).map(|name| (*name).to_owned()).collect()
}

/// The selected node whose VTEP has the smallest limit. Nodes without a VTEP do not count.
fn limit(context: &NetworkContext<'_>) -> Option<(String, i32)> {
    let nodes = context.selected?.nodes.iter();
    let limits = nodes.filter_map(|name| {
        let vtep = context.state.reports.get(*name)?.vtep.as_ref()?;
        let overhead = if vtep.address.is_ipv4() { VXLAN_OVERHEAD_IPV4 } else { VXLAN_OVERHEAD_IPV6 };
        Some(((vtep.mtu - overhead).min(MAX_MTU), *name))
    });
    limits.min().map(|(limit, node)| (node.to_owned(), limit))
}
