//! The observed links and the records, indexed for the rules.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use super::{
    BridgeInput, LinkKind, LinkRecord, Overlay, alias_owner, is_pod_port, ownership_mac, pod_alias_network,
};
use crate::nodenetwork::Link;

/// The links of the node and the networks that own them.
pub struct LinkIndex<'a> {
    pub input: &'a BridgeInput<'a>,
    links: BTreeMap<u32, &'a Link>,
    names: BTreeMap<&'a str, &'a Link>,
    /// Ports by master.
    ports: BTreeMap<u32, Vec<&'a Link>>,
    /// Upper links by lower link.
    uppers: BTreeMap<u32, Vec<&'a Link>>,
    owners: BTreeMap<u32, (&'a str, LinkKind)>,
    /// The links that the daemon created, by network.
    owned: BTreeMap<&'a str, Vec<(LinkKind, &'a Link)>>,
    /// The host ends of pods, by network.
    pods: BTreeMap<&'a str, Vec<&'a Link>>,
    vxlans: BTreeMap<Overlay, Vec<&'a Link>>,
    floods: BTreeMap<u32, BTreeSet<IpAddr>>,
    /// The uplinks in the records of this boot.
    uplinks: BTreeMap<u32, &'a LinkRecord>,
}

impl<'a> LinkIndex<'a> {
    pub fn new(input: &'a BridgeInput<'a>) -> Self {
        let mut index = Self {
            input,
            links: BTreeMap::new(),
            names: BTreeMap::new(),
            ports: BTreeMap::new(),
            uppers: BTreeMap::new(),
            owners: BTreeMap::new(),
            owned: BTreeMap::new(),
            pods: BTreeMap::new(),
            vxlans: BTreeMap::new(),
            floods: BTreeMap::new(),
            uplinks: BTreeMap::new(),
        };
        for record in input.records.values().filter(|record| record.boot == input.boot) {
            index.uplinks.extend(record.uplink.as_ref().map(|original| (original.index, record)));
        }
        for flood in &input.observed.floods {
            index.floods.entry(flood.link).or_default().insert(flood.to);
        }
        let ownership_macs = ownership_macs(input);
        for link in &input.observed.links {
            index.links.insert(link.index, link);
            index.names.insert(&link.name, link);
            if let Some(master) = link.master {
                index.ports.entry(master).or_default().push(link);
            }
            if let Some(lower) = link.lower {
                index.uppers.entry(lower).or_default().push(link);
            }
            if let Some(vxlan) = link.vxlan {
                let overlay = Overlay { vni: vxlan.vni, port: vxlan.port };
                index.vxlans.entry(overlay).or_default().push(link);
            }
            if let Some((uid, kind)) = owner(link, &ownership_macs) {
                index.owners.insert(link.index, (uid, kind));
                index.owned.entry(uid).or_default().push((kind, link));
            }
            if link.kind.as_deref() == Some("veth")
                && let Some(uid) = pod_alias_network(&link.alias)
            {
                index.pods.entry(uid).or_default().push(link);
            }
        }
        index
    }

    pub fn link(&self, index: u32) -> Option<&'a Link> {
        self.links.get(&index).copied()
    }

    pub fn by_name(&self, name: &str) -> Option<&'a Link> {
        self.names.get(name).copied()
    }

    /// The networks that own links.
    pub fn networks(&self) -> impl Iterator<Item = &'a str> {
        self.owned.keys().copied()
    }

    /// The network that owns a link.
    pub fn owner(&self, link: &Link) -> Option<(&'a str, LinkKind)> {
        self.owners.get(&link.index).copied()
    }

    /// All links that a network owns.
    pub fn owned_links(&self, uid: &str) -> &[(LinkKind, &'a Link)] {
        self.owned.get(uid).map_or(&[], Vec::as_slice)
    }

    /// The link of this kind that a network owns; of several, the one with the desired name.
    pub fn owned_link(&self, uid: &str, kind: LinkKind, name: &str) -> Option<&'a Link> {
        let all = self.owned_links(uid).iter().filter(|(other, _)| *other == kind).map(|(_, link)| *link);
        all.min_by_key(|link| (link.name != name, link.index))
    }

    pub fn ports(&self, link: &Link) -> &[&'a Link] {
        self.ports.get(&link.index).map_or(&[], Vec::as_slice)
    }

    /// The ports of a bridge that are host ends of pods.
    pub fn pod_ports(&self, bridge: &Link) -> impl Iterator<Item = &'a Link> {
        let ports = self.ports(bridge).iter().copied();
        ports.filter(|port| is_pod_port(&port.name) || pod_alias_network(&port.alias).is_some())
    }

    /// The host ends of the pods of a network, whatever their master is.
    pub fn pod_links(&self, uid: &str) -> &[&'a Link] {
        self.pods.get(uid).map_or(&[], Vec::as_slice)
    }

    /// The upper links of a link. The other end of a veth pair is not one.
    pub fn upper_links(&self, link: &Link) -> impl Iterator<Item = &'a Link> {
        let pair = link.lower;
        let above = self.uppers.get(&link.index).into_iter().flatten().copied();
        above.filter(move |other| !(other.kind.as_deref() == Some("veth") && pair == Some(other.index)))
    }

    /// The VXLAN devices with these settings.
    pub fn vxlans(&self, overlay: Overlay) -> &[&'a Link] {
        self.vxlans.get(&overlay).map_or(&[], Vec::as_slice)
    }

    /// The record of another network that has yet to restore this link.
    pub fn other_networks_uplink(&self, uid: &str, link: &Link) -> Option<&'a LinkRecord> {
        self.uplinks.get(&link.index).copied().filter(|record| record.uid != uid)
    }

    /// The flood list of a VXLAN device.
    pub fn floods(&self, vxlan: &Link) -> BTreeSet<IpAddr> {
        self.floods.get(&vxlan.index).cloned().unwrap_or_default()
    }
}

/// The ownership MACs of all networks of the cluster and of all records.
fn ownership_macs<'a>(input: &BridgeInput<'a>) -> BTreeMap<api::Mac, (&'a str, LinkKind)> {
    let current = input.networks.iter().map(|network| (network.uid.as_str(), input.node.uid.as_str()));
    // The Node object may have been recreated since.
    let recorded = input.records.iter().map(|(uid, record)| (uid.as_str(), record.node_uid.as_str()));
    let all = current.chain(recorded);
    all.flat_map(|(uid, node)| LinkKind::ALL.map(|kind| (ownership_mac(uid, node, kind), (uid, kind))))
        .collect()
}

/// A link is owned by its ownership MAC or by its alias, and only if it is of a kind that the daemon creates.
fn owner<'a>(
    link: &'a Link,
    ownership_macs: &BTreeMap<api::Mac, (&'a str, LinkKind)>,
) -> Option<(&'a str, LinkKind)> {
    let has_kind = |kind: LinkKind| link.kind.as_deref() == Some(kind.as_str());
    let by_mac =
        link.mac.and_then(|mac| ownership_macs.get(&mac)).copied().filter(|(_, kind)| has_kind(*kind));
    by_mac.or_else(|| {
        LinkKind::ALL
            .into_iter()
            .filter(|kind| has_kind(*kind))
            .find_map(|kind| Some((alias_owner(&link.alias, kind)?, kind)))
    })
}
