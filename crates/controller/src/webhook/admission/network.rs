//! Validates a BridgeNetwork against the other networks and its users.

use api::BridgeNetworkSpec;
use plan::{
    network::{self, ClusterState},
    users::UserLookup,
};
use serde_json::{Map, Value};

use super::AdmissionDecision;

/// Allows every update that does not change the spec, and every update of a network that is being deleted.
pub fn validate(
    cluster: &ClusterState,
    users: &dyn UserLookup,
    name: &str,
    object: Option<&Map<String, Value>>,
    old: Option<&Map<String, Value>>,
) -> AdmissionDecision {
    let Some(object) = object else { return AdmissionDecision::Allow };
    if object.get("metadata").is_some_and(|metadata| metadata.get("deletionTimestamp").is_some()) {
        return AdmissionDecision::Allow;
    }
    // The CRD schema rejects a spec that cannot be parsed.
    let Some(spec) = spec(object) else { return AdmissionDecision::Allow };
    let old = old.and_then(self::spec);
    if old.as_ref() == Some(&spec) {
        return AdmissionDecision::Allow;
    }
    match denial(cluster, users, name, &spec, old.as_ref()) {
        Some(message) => AdmissionDecision::Deny(message),
        None => AdmissionDecision::Allow,
    }
}

fn spec(object: &Map<String, Value>) -> Option<BridgeNetworkSpec> {
    let spec = object.get("spec").cloned().unwrap_or_else(|| Value::Object(Map::new()));
    serde_json::from_value(spec).ok()
}

fn denial(
    cluster: &ClusterState,
    users: &dyn UserLookup,
    name: &str,
    spec: &BridgeNetworkSpec,
    old: Option<&BridgeNetworkSpec>,
) -> Option<String> {
    if let Some((node, conflict)) = network::find_conflict(cluster, name, spec, old) {
        return Some(format!(
            "on node {node}, {conflict}; choose another, or a spec.nodeSelector that shares no node with it"
        ));
    }
    if let Some((other, namespace)) = network::find_nad_conflict(cluster, name, spec, old) {
        return Some(format!(
            "BridgeNetwork {other} already manages NetworkAttachmentDefinition {namespace}/{}; set spec.attachment.name to another name, or remove that namespace from spec.attachment.namespaces",
            spec.attachment_name(name)
        ));
    }
    // A network whose MTU its users hold higher may still be edited in everything else.
    if old.is_some_and(|old| network::desired_mtu(old) == network::desired_mtu(spec)) {
        return None;
    }
    mtu_decrease(cluster, users, name, spec)
}

/// Denies a lower MTU while pods run: they would keep sending packets that are too large.
fn mtu_decrease(
    cluster: &ClusterState,
    users: &dyn UserLookup,
    name: &str,
    spec: &BridgeNetworkSpec,
) -> Option<String> {
    let network = cluster.networks.get(name)?;
    let (old, new) = (network.status.mtu?, network::desired_mtu(spec)?);
    if new >= old {
        return None;
    }
    let users = users.summary(&network::nads_of(cluster, network), 1);
    users.first.first().map(|first| {
        format!(
            "the MTU cannot be lowered from {old} to {new} while the network is in use (users: {}, such as {first}); stop them first",
            users.count
        )
    })
}
