//! Conflicts between networks that need the same resource of a node.
//!
//! The oldest network wins; among networks of the same age the first by name. A network that loses one resource owns none:
//! its other resources are free for younger networks.

use std::{collections::BTreeMap, fmt};

use api::IfName;
use jiff::Timestamp;

use crate::bridge::{LocalNetwork, Overlay, Uid};

/// The resources of a node that one network needs exclusively.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeResources {
    pub name: String,
    pub uid: Uid,
    pub created: Timestamp,
    pub bridge: IfName,
    /// The name of the VXLAN device, and its VNI and port.
    pub vxlan: Option<(IfName, Overlay)>,
    pub uplink: Option<IfName>,
}

impl NodeResources {
    /// The resources that a network needs on each of its nodes.
    pub fn of(network: &LocalNetwork) -> Self {
        Self {
            name: network.name.clone(),
            uid: network.uid.clone(),
            created: network.created,
            bridge: network.bridge.clone(),
            vxlan: network.overlay.map(|overlay| (network.vxlan.clone(), overlay)),
            uplink: network.uplink.clone(),
        }
    }
}

/// A resource that a network needs and an older one owns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conflict {
    /// The name of the network that owns the resource.
    pub owner: String,
    pub resource: ContestedResource,
}

/// A resource that two networks need.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ContestedResource {
    Bridge(IfName),
    Vxlan(IfName),
    Overlay(Overlay),
    Uplink(IfName),
    /// A link that one network creates and the other uses in another role.
    Link(IfName),
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.resource {
            ContestedResource::Bridge(name) => write!(f, "bridge {name}")?,
            ContestedResource::Vxlan(name) => write!(f, "VXLAN device {name}")?,
            ContestedResource::Overlay(Overlay { vni, port }) => write!(f, "VNI {vni} on port {port}")?,
            ContestedResource::Uplink(name) => write!(f, "uplink {name}")?,
            ContestedResource::Link(name) => write!(f, "link {name}")?,
        }
        write!(f, " belongs to BridgeNetwork {}, which is older", self.owner)
    }
}

/// The networks that lose a conflict, if all of these share a node.
pub fn conflicts(all: &[NodeResources]) -> BTreeMap<Uid, Conflict> {
    let mut by_age: Vec<&NodeResources> = all.iter().collect();
    by_age.sort_by_key(|resources| (resources.created, &resources.name, &resources.uid));
    let mut owned = OwnedResources::default();
    let mut conflicts = BTreeMap::new();
    for resources in by_age {
        match owned.conflict(resources) {
            Some(conflict) => _ = conflicts.insert(resources.uid.clone(), conflict),
            None => owned.add(resources),
        }
    }
    conflicts
}

/// The role of a link in its network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LinkRole {
    Bridge,
    Vxlan,
    Uplink,
}

/// The resources of the older networks.
#[derive(Default)]
struct OwnedResources<'a> {
    links: BTreeMap<&'a IfName, (LinkRole, &'a str)>,
    overlays: BTreeMap<Overlay, &'a str>,
}

impl<'a> OwnedResources<'a> {
    fn conflict(&self, resources: &NodeResources) -> Option<Conflict> {
        let link = links(resources).find_map(|(name, role)| {
            let &(had, owner) = self.links.get(name)?;
            let resource = match (role, had) {
                (LinkRole::Bridge, LinkRole::Bridge) => ContestedResource::Bridge(name.clone()),
                (LinkRole::Vxlan, LinkRole::Vxlan) => ContestedResource::Vxlan(name.clone()),
                (LinkRole::Uplink, LinkRole::Uplink) => ContestedResource::Uplink(name.clone()),
                _ => ContestedResource::Link(name.clone()),
            };
            Some(Conflict { owner: owner.to_owned(), resource })
        });
        link.or_else(|| {
            let (_, overlay) = resources.vxlan.as_ref()?;
            let owner = self.overlays.get(overlay)?;
            Some(Conflict { owner: (*owner).to_owned(), resource: ContestedResource::Overlay(*overlay) })
        })
    }

    fn add(&mut self, resources: &'a NodeResources) {
        for (name, role) in links(resources) {
            self.links.entry(name).or_insert((role, &resources.name));
        }
        if let Some((_, overlay)) = &resources.vxlan {
            self.overlays.insert(*overlay, &resources.name);
        }
    }
}

fn links(resources: &NodeResources) -> impl Iterator<Item = (&IfName, LinkRole)> {
    let vxlan = resources.vxlan.as_ref().map(|(name, _)| (name, LinkRole::Vxlan));
    let uplink = resources.uplink.as_ref().map(|name| (name, LinkRole::Uplink));
    [(&resources.bridge, LinkRole::Bridge)].into_iter().chain(vxlan).chain(uplink)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn resources(name: &str, age: i64) -> NodeResources {
        NodeResources {
            name: name.to_owned(),
            uid: format!("uid-{name}"),
            created: Timestamp::from_second(1_000 - age).unwrap(),
            bridge: format!("br-{name}").parse().unwrap(),
            vxlan: None,
            uplink: None,
        }
    }

    fn vxlan(resources: NodeResources, vni: u32, port: u16) -> NodeResources {
        let name = format!("vx-{}", resources.name).parse().unwrap();
        NodeResources { vxlan: Some((name, Overlay { vni, port })), ..resources }
    }

    fn bridge(resources: NodeResources, name: &str) -> NodeResources {
        NodeResources { bridge: name.parse().unwrap(), ..resources }
    }

    fn uplink(resources: NodeResources, name: &str) -> NodeResources {
        NodeResources { uplink: Some(name.parse().unwrap()), ..resources }
    }

    /// The UID of each loser and the message.
    fn messages(all: &[NodeResources]) -> Vec<(String, String)> {
        conflicts(all).into_iter().map(|(uid, conflict)| (uid, conflict.to_string())).collect()
    }

    fn loser(uid: &str, message: &str) -> Vec<(String, String)> {
        vec![(uid.to_owned(), message.to_owned())]
    }

    #[test]
    fn networks_with_distinct_resources_do_not_conflict() {
        let all = [
            vxlan(resources("a", 1), 1, 4789),
            vxlan(resources("b", 2), 1, 4790),
            vxlan(resources("c", 3), 2, 4789),
            uplink(resources("d", 4), "eth1"),
        ];
        assert_eq!(messages(&all), []);
        assert_eq!(messages(&[]), []);
    }

    #[test]
    fn the_oldest_wins_every_kind_of_conflict() {
        for (old, new, message) in [
            (
                bridge(resources("old", 9), "br0"),
                bridge(resources("new", 1), "br0"),
                "bridge br0 belongs to BridgeNetwork old, which is older",
            ),
            (
                vxlan(resources("old", 9), 7, 4789),
                vxlan(resources("new", 1), 7, 4789),
                "VNI 7 on port 4789 belongs to BridgeNetwork old, which is older",
            ),
            (
                uplink(resources("old", 9), "eth1"),
                uplink(resources("new", 1), "eth1"),
                "uplink eth1 belongs to BridgeNetwork old, which is older",
            ),
            (
                bridge(resources("old", 9), "eth1"),
                uplink(resources("new", 1), "eth1"),
                "link eth1 belongs to BridgeNetwork old, which is older",
            ),
            (
                uplink(resources("old", 9), "eth1"),
                bridge(resources("new", 1), "eth1"),
                "link eth1 belongs to BridgeNetwork old, which is older",
            ),
            (
                vxlan(resources("old", 9), 7, 4789),
                bridge(resources("new", 1), "vx-old"),
                "link vx-old belongs to BridgeNetwork old, which is older",
            ),
        ] {
            let wanted = loser("uid-new", message);
            assert_eq!(messages(&[old.clone(), new.clone()]), wanted);
            assert_eq!(messages(&[new, old]), wanted);
        }
    }

    #[test]
    fn among_networks_of_the_same_age_the_first_by_name_wins() {
        let both = [bridge(resources("b", 1), "br0"), bridge(resources("a", 1), "br0")];
        assert_eq!(messages(&both), loser("uid-b", "bridge br0 belongs to BridgeNetwork a, which is older"));
    }

    #[test]
    fn a_loser_owns_nothing() {
        let all = [
            bridge(resources("first", 9), "br0"),
            uplink(bridge(resources("second", 5), "br0"), "eth1"),
            uplink(resources("third", 1), "eth1"),
        ];
        assert_eq!(
            messages(&all),
            loser("uid-second", "bridge br0 belongs to BridgeNetwork first, which is older")
        );
    }

    proptest! {
        #[test]
        fn winners_share_nothing_and_the_order_does_not_matter(
            wanted in proptest::collection::vec((0..3_i64, 0..3_u8, 0..4_u8, 0..3_u32), 0..8),
            rotation in 0..8_usize,
        ) {
            let mut all: Vec<NodeResources> = wanted
                .into_iter()
                .enumerate()
                .map(|(n, (age, br, up, vni))| {
                    let resources = bridge(resources(&format!("n{n}"), age), &format!("l{br}"));
                    if up > 2 { vxlan(resources, vni, 4789) } else { uplink(resources, &format!("l{}", up + 2)) }
                })
                .collect();
            let losers = conflicts(&all);
            let winners: Vec<&NodeResources> = all.iter().filter(|resources| !losers.contains_key(&resources.uid)).collect();
            for (n, one) in winners.iter().enumerate() {
                for other in &winners[n + 1..] {
                    prop_assert!(links(one).all(|(name, _)| links(other).all(|(theirs, _)| name != theirs)));
                }
            }
            let first = all.iter().min_by_key(|resources| (resources.created, &resources.name));
            prop_assert!(first.is_none_or(|first| !losers.contains_key(&first.uid)));
            let len = all.len().max(1);
            all.rotate_left(rotation % len);
            prop_assert_eq!(conflicts(&all), losers);
        }
    }
}
