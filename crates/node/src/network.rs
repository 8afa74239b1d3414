//! BridgeNetworks and peers, parsed from the objects of the API server.
//!
//! Both are decoded straight into the fields that the daemon uses: with hundreds of nodes, whole objects would not fit into
//! its memory. One malformed object does not hide the others.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use api::{
    BridgeNetworkSpec, BridgeNetworkStatus, LabelSelector, bridgenetwork::FINALIZER_USERS,
    nodenetwork::MAX_NETWORKS,
};
use client::decode::{Object, Unparsed};
use kube::ResourceExt as _;
use plan::{
    bridge::{Desired, LocalNetwork, Overlay, Peer},
    ipam::{Family, Pool},
};
use serde::Deserialize;

/// A BridgeNetwork of which nothing is parsed.
pub type NetworkObject = Object<Option<Unparsed>, Unparsed>;

/// The labels of a Node.
pub type Labels = BTreeMap<String, String>;

/// A BridgeNetwork, independent of the labels of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParsedNetwork {
    selector: Option<LabelSelector>,
    deletion: Deletion,
    /// With [`Desired::Present`].
    network: LocalNetwork,
    ipam: Option<Arc<Pool>>,
    has_claims: bool,
}

/// A BridgeNetwork of the API server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WatchedNetwork {
    pub name: String,
    pub uid: Option<String>,
    /// Whether it has a deletionTimestamp.
    pub deleted: bool,
    /// None if it cannot be parsed.
    pub parsed: Option<ParsedNetwork>,
}

impl WatchedNetwork {
    pub fn read(object: &NetworkObject) -> Self {
        let deleted = object.metadata.deletion_timestamp.is_some();
        Self { name: object.name_any(), uid: object.uid(), deleted, parsed: ParsedNetwork::read(object) }
    }
}

/// The progress of a deletion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Deletion {
    NotDeleted,
    /// Deleted, but workloads may still use it.
    InUse,
    /// Deleted and unused; the finalizer of the users is removed, so no workload can start to use it.
    Terminating,
}

impl ParsedNetwork {
    /// Parses an object; none if it is not a valid BridgeNetwork.
    fn read(object: &NetworkObject) -> Option<Self> {
        let name = object.name_any();
        let spec: BridgeNetworkSpec = object.spec.as_ref()?.parse().ok()?;
        let status = object.status.as_ref().and_then(|status| status.parse().ok());
        let status: BridgeNetworkStatus = status.unwrap_or_default();
        let overlay = match spec.overlay.as_ref() {
            Some(overlay) => Some(Overlay {
                vni: u32::try_from(overlay.vni).ok()?,
                port: u16::try_from(overlay.port).ok()?,
            }),
            None => None,
        };
        let deletion = match &object.metadata.deletion_timestamp {
            None => Deletion::NotDeleted,
            Some(_) if object.finalizers().iter().any(|finalizer| finalizer == FINALIZER_USERS) => {
                Deletion::InUse
            }
            Some(_) => Deletion::Terminating,
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
        let ipam_status = status.ipam.unwrap_or_default();
        // The first use fixes the length of blocks; before that there are no blocks.
        let length = |family| match family {
            Family::V4 => ipam_status.ipv4.as_ref().map(|family| family.block_length),
            Family::V6 => ipam_status.ipv6.as_ref().map(|family| family.block_length),
        };
        let active = deletion == Deletion::NotDeleted;
        let pool = spec.ipam.as_ref().map(|ipam| Arc::new(Pool::new(&network.name, ipam, length, active)));
        let has_claims = ipam_status.claims > 0;
        Some(Self { selector: spec.node_selector, deletion, network, ipam: pool, has_claims })
    }

    /// The network on a node with these labels.
    pub fn on(&self, labels: &Labels) -> LocalNetwork {
        let desired = match self.deletion {
            Deletion::NotDeleted | Deletion::InUse if self.selects(labels) => Desired::Present,
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

    /// The address pool, if the network has IPAM.
    pub fn ipam(&self) -> Option<Arc<Pool>> {
        self.ipam.clone()
    }

    /// Whether IPAMClaims have addresses of it.
    pub fn has_claims(&self) -> bool {
        self.has_claims
    }

    pub fn mtu(&self) -> Option<u32> {
        self.network.mtu
    }

    /// Whether the object is deleted, in use or not.
    pub fn is_deleted(&self) -> bool {
        self.deletion != Deletion::NotDeleted
    }

    /// Whether nodes remove it.
    pub fn is_terminating(&self) -> bool {
        self.deletion == Deletion::Terminating
    }
}

/// The status of another node's NodeNetwork, without its links, which are most of it.
#[derive(Deserialize, Default)]
struct PeerStatus {
    vtep: Option<PeerVtep>,
    #[serde(default)]
    networks: Vec<PeerNetwork>,
}

#[derive(Deserialize)]
struct PeerVtep {
    address: IpAddr,
}

#[derive(Deserialize)]
struct PeerNetwork {
    uid: String,
    #[serde(default)]
    ports: Ports,
}

/// Whether a list of ports has an element.
#[derive(Deserialize, Default)]
#[serde(from = "Vec<serde::de::IgnoredAny>")]
struct Ports {
    any: bool,
}

impl From<Vec<serde::de::IgnoredAny>> for Ports {
    fn from(ports: Vec<serde::de::IgnoredAny>) -> Self {
        Self { any: !ports.is_empty() }
    }
}

/// The UIDs of networks, each stored once: hundreds of nodes list the same networks.
#[derive(Debug, Default)]
pub struct SharedUids {
    all: BTreeSet<Arc<str>>,
    /// How many were in use when the unused ones were last removed.
    used: usize,
}

impl SharedUids {
    fn share(&mut self, uid: &str) -> Arc<str> {
        if let Some(known) = self.all.get(uid) {
            return Arc::clone(known);
        }
        if self.all.len() > 2 * self.used.max(MAX_NETWORKS) {
            self.all.retain(|uid| Arc::strong_count(uid) > 1);
            self.used = self.all.len();
        }
        let new: Arc<str> = uid.into();
        self.all.insert(Arc::clone(&new));
        new
    }
}

/// Parses another node from its NodeNetwork. A status that cannot be parsed is empty.
pub fn peer(node: String, status: Option<&Unparsed>, uids: &mut SharedUids) -> Peer {
    let status: PeerStatus = status.and_then(|status| status.parse().ok()).unwrap_or_default();
    // A node that lists a network without a port may have another network or a foreign device at that VNI. Frames sent
    // to it would reach the wrong network.
    let connected = status.networks.into_iter().filter(|network| network.ports.any);
    let networks = connected.map(|network| uids.share(&network.uid)).collect();
    Peer { node, vtep: status.vtep.map(|vtep| vtep.address), networks }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn object(metadata: Value, spec: Value) -> NetworkObject {
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
    fn link_names_are_derived_from_the_name_of_the_network() {
        let parsed = ParsedNetwork::read(&object(json!({}), json!({"overlay": {"vni": 7}}))).unwrap();
        let network = parsed.on(&Labels::new());
        assert_eq!((network.bridge.as_str(), network.vxlan.as_str()), ("br-blue", "vx-blue"));
        assert_eq!((network.generation, network.mtu), (3, Some(1450)));
        assert_eq!(network.overlay, Some(Overlay { vni: 7, port: 4789 }));
    }

    #[test]
    fn a_network_is_present_on_selected_nodes_only() {
        let spec = json!({"nodeSelector": {"matchLabels": {"zone": "a"}}});
        assert_eq!(desired(json!({}), json!({}), &[]), Desired::Present);
        assert_eq!(desired(json!({}), spec.clone(), &[("zone", "a")]), Desired::Present);
        assert_eq!(desired(json!({}), spec, &[("zone", "b")]), Desired::Absent);
    }

    #[test]
    fn a_deleted_network_is_absent_once_it_is_unused() {
        let deleted = |finalizers: &[&str]| json!({"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": finalizers});
        let in_use = deleted(&["patchbay.dev/nodes", "patchbay.dev/users"]);
        assert_eq!(desired(in_use, json!({}), &[]), Desired::Present);
        assert_eq!(desired(deleted(&["patchbay.dev/nodes"]), json!({}), &[]), Desired::Absent);
    }

    #[test]
    fn malformed_objects_are_not_parsed() {
        for spec in [json!(7), json!({"bridge": "a/b"}), json!({"overlay": {"vni": -1}}), Value::Null] {
            assert_eq!(ParsedNetwork::read(&object(json!({}), spec)), None);
        }
    }

    #[test]
    fn a_peer_has_a_network_once_it_has_a_port() {
        let entry = |uid: &str, ports: &[&str]| {
            json!({
                "uid": uid, "name": uid, "observedGeneration": 1, "ready": false, "reason": "Conflict",
                "bridge": "br", "ports": ports,
            })
        };
        let status = json!({"networks": [entry("loser", &[]), entry("winner", &["vx-a"])]});
        assert_eq!(read_peer(&status).networks, BTreeSet::from(["winner".into()]));
    }

    fn read_peer(status: &Value) -> Peer {
        peer(
            "b".to_owned(),
            Some(&serde_json::from_value(status.clone()).unwrap()),
            &mut SharedUids::default(),
        )
    }

    #[test]
    fn a_peer_with_an_unreadable_status_has_no_networks() {
        let empty = Peer { node: "b".into(), vtep: None, networks: BTreeSet::new() };
        assert_eq!(read_peer(&json!({"vtep": 7})), empty);
        assert_eq!(peer("b".to_owned(), None, &mut SharedUids::default()), empty);
    }

    #[test]
    fn a_uid_is_stored_once_and_forgotten_when_no_peer_has_it() {
        let mut uids = SharedUids::default();
        let (one, other) = (uids.share("u"), uids.share("u"));
        assert!(Arc::ptr_eq(&one, &other));
        for number in 0..10 * MAX_NETWORKS {
            uids.share(&number.to_string());
        }
        assert!(uids.all.len() <= 2 * MAX_NETWORKS + 1, "{}", uids.all.len());
        assert!(Arc::ptr_eq(&one, &uids.share("u")), "a UID in use is kept");
    }

    #[test]
    fn a_peer_has_the_address_of_its_vtep() {
        let status = json!({"vtep": {"address": "10.0.0.2", "interface": "eth0", "mtu": 1500}});
        assert_eq!(read_peer(&status).vtep, Some("10.0.0.2".parse().unwrap()));
    }
}
