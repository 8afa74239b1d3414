//! The BridgeNetworks and the other nodes, as the API server shows them.
//!
//! Both are read from untyped objects: one that somebody made unreadable must not hide the others.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use api::{
    BridgeNetworkSpec, BridgeNetworkStatus, LabelSelector, NodeNetworkStatus, bridgenetwork::FINALIZER_USERS,
};
use kube::{ResourceExt as _, api::DynamicObject};
use plan::{
    bridge::{Desired, LocalNetwork, Overlay, Peer},
    ipam::{Family, Rules},
};
use serde::de::DeserializeOwned;

/// The labels of a Node.
pub type Labels = BTreeMap<String, String>;

/// A BridgeNetwork, without what depends on the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParsedNetwork {
    selector: Option<LabelSelector>,
    deletion: Deletion,
    /// As if this node were selected.
    network: LocalNetwork,
    ipam: Option<Arc<Rules>>,
}

/// How far a network is on its way out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Deletion {
    No,
    /// Somebody may still use it.
    Waits,
    /// Nobody does, and nobody can begin to.
    Undo,
}

impl ParsedNetwork {
    /// Reads an object; none if it is no BridgeNetwork that anything can be done about.
    pub fn read(object: &DynamicObject) -> Option<Self> {
        let name = object.name_any();
        let spec: BridgeNetworkSpec = part(object, "spec")?;
        let status: BridgeNetworkStatus = part(object, "status").unwrap_or_default();
        let overlay = match spec.overlay.as_ref() {
            Some(overlay) => Some(Overlay {
                vni: u32::try_from(overlay.vni).ok()?,
                port: u16::try_from(overlay.port).ok()?,
            }),
            None => None,
        };
        let deletion = match &object.metadata.deletion_timestamp {
            None => Deletion::No,
            Some(_) if object.finalizers().iter().any(|one| one == FINALIZER_USERS) => Deletion::Waits,
            Some(_) => Deletion::Undo,
        };
        let network = LocalNetwork {
            uid: object.uid()?,
            generation: object.metadata.generation.unwrap_or_default(),
            created: object.creation_timestamp()?.0,
            bridge: spec.bridge_name(&name),
            vxlan: BridgeNetworkSpec::vxlan_name(&name),
            mtu: status.mtu.and_then(|mtu| u32::try_from(mtu).ok()).filter(|&mtu| mtu > 0),
            uplink: spec.uplink,
            overlay,
            desired: Desired::Present,
            name,
        };
        let said = status.ipam.unwrap_or_default();
        // A block has the length that was fixed at the first use; until it is, there are none.
        let length = |family| match family {
            Family::V4 => said.ipv4.as_ref().map(|one| one.block_length),
            Family::V6 => said.ipv6.as_ref().map(|one| one.block_length),
        };
        let live = deletion != Deletion::Undo;
        let rules = spec.ipam.as_ref().map(|ipam| Arc::new(Rules::new(&network.name, ipam, length, live)));
        Some(Self { selector: spec.node_selector, deletion, network, ipam: rules })
    }

    /// What a node with these labels should do about it.
    pub fn on(&self, labels: &Labels) -> LocalNetwork {
        let desired = match self.deletion {
            Deletion::No | Deletion::Waits if self.selects(labels) => Desired::Present,
            _ => Desired::Absent,
        };
        LocalNetwork { desired, ..self.network.clone() }
    }

    pub fn selects(&self, labels: &Labels) -> bool {
        self.selector.as_ref().is_none_or(|selector| selector.matches(labels))
    }

    pub fn name(&self) -> &str {
        &self.network.name
    }

    pub fn uid(&self) -> &str {
        &self.network.uid
    }

    /// What it says about addresses.
    pub fn ipam(&self) -> Option<Arc<Rules>> {
        self.ipam.clone()
    }

    pub fn mtu(&self) -> Option<u32> {
        self.network.mtu
    }

    /// Whether somebody has deleted it.
    pub fn is_deleted(&self) -> bool {
        self.deletion != Deletion::No
    }

    /// Whether nodes undo it.
    pub fn is_undone(&self) -> bool {
        self.deletion == Deletion::Undo
    }
}

/// Another node out of its NodeNetwork.
pub fn peer(object: &DynamicObject) -> Peer {
    let status: NodeNetworkStatus = part(object, "status").unwrap_or_default();
    // One that lists a network without its VXLAN device there has another network's, or a foreign one, at that number:
    // frames sent to it would end up in the wrong network.
    let joined = status.networks.into_iter().filter(|network| !network.ports.is_empty());
    let networks: BTreeSet<String> = joined.map(|network| network.uid).collect();
    Peer { node: object.name_any(), vtep: status.vtep.map(|vtep| vtep.address), networks }
}

fn part<T: DeserializeOwned>(object: &DynamicObject, name: &str) -> Option<T> {
    // Borrowed: the data may be large and is needed nowhere else.
    T::deserialize(object.data.get(name)?).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn object(metadata: Value, spec: Value) -> DynamicObject {
        let mut object = json!({
            "metadata": {"name": "blue", "uid": "u", "generation": 3, "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": spec,
            "status": {"mtu": 1450},
        });
        for (key, value) in metadata.as_object().into_iter().flatten() {
            object["metadata"][key] = value.clone();
        }
        serde_json::from_value(object).unwrap()
    }

    fn desired(metadata: Value, spec: Value, labels: &[(&str, &str)]) -> Desired {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        ParsedNetwork::read(&object(metadata, spec)).unwrap().on(&labels).desired
    }

    #[test]
    fn a_network_is_read_with_what_follows_from_its_name() {
        let parsed = ParsedNetwork::read(&object(json!({}), json!({"overlay": {"vni": 7}}))).unwrap();
        let network = parsed.on(&Labels::new());
        assert_eq!((network.bridge.as_str(), network.vxlan.as_str()), ("br-blue", "vx-blue"));
        assert_eq!((network.generation, network.mtu), (3, Some(1450)));
        assert_eq!(network.overlay, Some(Overlay { vni: 7, port: 4789 }));
    }

    #[test]
    fn a_node_takes_part_while_it_is_selected() {
        let spec = json!({"nodeSelector": {"matchLabels": {"zone": "a"}}});
        assert_eq!(desired(json!({}), json!({}), &[]), Desired::Present);
        assert_eq!(desired(json!({}), spec.clone(), &[("zone", "a")]), Desired::Present);
        assert_eq!(desired(json!({}), spec, &[("zone", "b")]), Desired::Absent);
    }

    #[test]
    fn a_deleted_network_is_undone_when_nobody_uses_it_and_not_before() {
        let deleted = |finalizers: &[&str]| json!({"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": finalizers});
        let waits = deleted(&["patchbay.dev/nodes", "patchbay.dev/users"]);
        assert_eq!(desired(waits, json!({}), &[]), Desired::Present);
        assert_eq!(desired(deleted(&["patchbay.dev/nodes"]), json!({}), &[]), Desired::Absent);
    }

    #[test]
    fn what_cannot_be_read_is_no_network() {
        for spec in [json!(7), json!({"bridge": "a/b"}), json!({"overlay": {"vni": -1}}), Value::Null] {
            assert_eq!(ParsedNetwork::read(&object(json!({}), spec)), None);
        }
    }

    #[test]
    fn a_peer_takes_part_once_its_device_is_there() {
        let entry = |uid: &str, ports: &[&str]| {
            json!({
                "uid": uid, "name": uid, "observedGeneration": 1, "ready": false, "reason": "Conflict",
                "bridge": "br", "ports": ports,
            })
        };
        let object: DynamicObject = serde_json::from_value(json!({
            "metadata": {"name": "b"}, "status": {"networks": [entry("loser", &[]), entry("winner", &["vx-a"])]},
        }))
        .unwrap();
        assert_eq!(peer(&object).networks, BTreeSet::from(["winner".to_owned()]));
    }

    #[test]
    fn a_peer_without_a_readable_status_takes_part_in_nothing() {
        let object: DynamicObject =
            serde_json::from_value(json!({"metadata": {"name": "b"}, "status": {"vtep": 7}})).unwrap();
        assert_eq!(peer(&object), Peer { node: "b".into(), vtep: None, networks: BTreeSet::new() });
    }
}
