//! Whether a BridgeNetwork may be as somebody wants it, beside the others.

use api::BridgeNetworkSpec;
use plan::network::{self, ClusterState};
use serde_json::{Map, Value};

use super::Verdict;

/// What changes nothing of the spec is let through, and so is everything about a network that is being deleted.
pub fn judge(
    world: &ClusterState,
    name: &str,
    object: Option<&Map<String, Value>>,
    old: Option<&Map<String, Value>>,
) -> Verdict {
    let Some(object) = object else { return Verdict::Allow };
    if object.get("metadata").is_some_and(|metadata| metadata.get("deletionTimestamp").is_some()) {
        return Verdict::Allow;
    }
    // What cannot be read is the business of the kind's own rules.
    let Some(spec) = spec(object) else { return Verdict::Allow };
    let old = old.and_then(self::spec);
    if old.as_ref() == Some(&spec) {
        return Verdict::Allow;
    }
    match refusal(world, name, &spec, old.as_ref()) {
        Some(sentence) => Verdict::Deny(sentence),
        None => Verdict::Allow,
    }
}

fn spec(object: &Map<String, Value>) -> Option<BridgeNetworkSpec> {
    let spec = object.get("spec").cloned().unwrap_or_else(|| Value::Object(Map::new()));
    serde_json::from_value(spec).ok()
}

fn refusal(
    world: &ClusterState,
    name: &str,
    spec: &BridgeNetworkSpec,
    old: Option<&BridgeNetworkSpec>,
) -> Option<String> {
    if let Some((node, clash)) = network::find_conflict(world, name, spec, old) {
        return Some(format!(
            "on node {node}, {clash}: choose another, or a spec.nodeSelector that shares no node with it"
        ));
    }
    if let Some((other, namespace)) = network::find_nad_conflict(world, name, spec, old) {
        return Some(format!(
            "BridgeNetwork {other} keeps NetworkAttachmentDefinition {namespace}/{} already: set spec.attachment.name to another name, or leave that namespace out",
            spec.attachment_name(name)
        ));
    }
    // One that was held higher by its users may be edited in everything else.
    if old.is_some_and(|old| network::desired_mtu(old) == network::desired_mtu(spec)) {
        return None;
    }
    lowered(world, name, spec)
}

/// Pods that run would go on sending packets that are too large now.
fn lowered(world: &ClusterState, name: &str, spec: &BridgeNetworkSpec) -> Option<String> {
    let network = world.networks.get(name)?;
    let (old, new) = (network.status.mtu?, network::desired_mtu(spec)?);
    let users = world.users.summary(&network::nads_of(world, network), 1);
    let first = users.first.first()?;
    (new < old).then(|| {
        format!(
            "the MTU cannot go from {old} down to {new} while the network is used, by {} in all, such as {first}: stop them first",
            users.count
        )
    })
}
