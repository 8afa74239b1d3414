//! What was seen, sorted by the questions that the rules ask.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use super::{Made, Overlay, Record, View, made_for, mark, pod_network, pod_port};
use crate::nodenetwork::Link;

/// The links of the node and whose they are.
pub struct Seen<'a> {
    pub view: &'a View<'a>,
    links: BTreeMap<u32, &'a Link>,
    names: BTreeMap<&'a str, &'a Link>,
    /// By the link that they are ports of.
    ports: BTreeMap<u32, Vec<&'a Link>>,
    /// By the link that they lie on.
    on_top: BTreeMap<u32, Vec<&'a Link>>,
    owners: BTreeMap<u32, (&'a str, Made)>,
    made: BTreeMap<&'a str, Vec<(Made, &'a Link)>>,
    /// The host's ends of pods, by their network.
    pods: BTreeMap<&'a str, Vec<&'a Link>>,
    vxlans: BTreeMap<Overlay, Vec<&'a Link>>,
    floods: BTreeMap<u32, BTreeSet<IpAddr>>,
    /// The uplinks that records of this boot speak of, and their networks.
    uplinks: BTreeMap<u32, &'a Record>,
}

impl<'a> Seen<'a> {
    pub fn new(view: &'a View<'a>) -> Self {
        let mut seen = Self {
            view,
            links: BTreeMap::new(),
            names: BTreeMap::new(),
            ports: BTreeMap::new(),
            on_top: BTreeMap::new(),
            owners: BTreeMap::new(),
            made: BTreeMap::new(),
            pods: BTreeMap::new(),
            vxlans: BTreeMap::new(),
            floods: BTreeMap::new(),
            uplinks: BTreeMap::new(),
        };
        for record in view.records.values().filter(|record| record.boot == view.boot) {
            seen.uplinks.extend(record.uplink.as_ref().map(|found| (found.index, record)));
        }
        for flood in &view.observed.floods {
            seen.floods.entry(flood.link).or_default().insert(flood.to);
        }
        let marks = marks(view);
        for link in &view.observed.links {
            seen.links.insert(link.index, link);
            seen.names.insert(&link.name, link);
            if let Some(master) = link.master {
                seen.ports.entry(master).or_default().push(link);
            }
            if let Some(lower) = link.lower {
                seen.on_top.entry(lower).or_default().push(link);
            }
            if let Some(vxlan) = link.vxlan {
                let overlay = Overlay { vni: vxlan.vni, port: vxlan.port };
                seen.vxlans.entry(overlay).or_default().push(link);
            }
            if let Some((uid, made)) = owner(link, &marks) {
                seen.owners.insert(link.index, (uid, made));
                seen.made.entry(uid).or_default().push((made, link));
            }
            if link.kind.as_deref() == Some("veth")
                && let Some(uid) = pod_network(&link.alias)
            {
                seen.pods.entry(uid).or_default().push(link);
            }
        }
        seen
    }

    pub fn link(&self, index: u32) -> Option<&'a Link> {
        self.links.get(&index).copied()
    }

    pub fn named(&self, name: &str) -> Option<&'a Link> {
        self.names.get(name).copied()
    }

    /// The networks that links were made for.
    pub fn networks(&self) -> impl Iterator<Item = &'a str> {
        self.made.keys().copied()
    }

    /// The network that a link was made for.
    pub fn owner(&self, link: &Link) -> Option<(&'a str, Made)> {
        self.owners.get(&link.index).copied()
    }

    /// All links that were made for a network.
    pub fn made(&self, uid: &str) -> &[(Made, &'a Link)] {
        self.made.get(uid).map_or(&[], Vec::as_slice)
    }

    /// The link of this sort that was made for a network; of several the one that has its name.
    pub fn one(&self, uid: &str, made: Made, name: &str) -> Option<&'a Link> {
        let all = self.made(uid).iter().filter(|(sort, _)| *sort == made).map(|(_, link)| *link);
        all.min_by_key(|link| (link.name != name, link.index))
    }

    pub fn ports(&self, link: &Link) -> &[&'a Link] {
        self.ports.get(&link.index).map_or(&[], Vec::as_slice)
    }

    /// The ports of a bridge that belong to pods.
    pub fn pods_on(&self, bridge: &Link) -> impl Iterator<Item = &'a Link> {
        let ports = self.ports(bridge).iter().copied();
        ports.filter(|port| pod_port(&port.name) || pod_network(&port.alias).is_some())
    }

    /// The host's ends of the pods of a network, wherever they are.
    pub fn pods_of(&self, uid: &str) -> &[&'a Link] {
        self.pods.get(uid).map_or(&[], Vec::as_slice)
    }

    /// The links that lie on a link. The other end of a pair does not.
    pub fn on_top(&self, link: &Link) -> impl Iterator<Item = &'a Link> {
        let pair = link.lower;
        let above = self.on_top.get(&link.index).into_iter().flatten().copied();
        above.filter(move |other| !(other.kind.as_deref() == Some("veth") && pair == Some(other.index)))
    }

    /// The VXLAN devices with these settings.
    pub fn vxlans(&self, overlay: Overlay) -> &[&'a Link] {
        self.vxlans.get(&overlay).map_or(&[], Vec::as_slice)
    }

    /// The record of another network that a link has to be given back for.
    pub fn uplink_of_another(&self, uid: &str, link: &Link) -> Option<&'a Record> {
        self.uplinks.get(&link.index).copied().filter(|record| record.uid != uid)
    }

    /// The flood list of a VXLAN device.
    pub fn floods(&self, vxlan: &Link) -> BTreeSet<IpAddr> {
        self.floods.get(&vxlan.index).cloned().unwrap_or_default()
    }
}

/// The marks of every network that is known by more than an alias.
fn marks<'a>(view: &View<'a>) -> BTreeMap<api::Mac, (&'a str, Made)> {
    let now = view.networks.iter().map(|network| (network.uid.as_str(), view.facts.uid.as_str()));
    // The Node object may have been made anew since.
    let then = view.records.iter().map(|(uid, record)| (uid.as_str(), record.node_uid.as_str()));
    let known = now.chain(then);
    known.flat_map(|(uid, node)| Made::ALL.map(|made| (mark(uid, node, made), (uid, made)))).collect()
}

/// A link is ours by its mark, or by its alias; and only if it is what we make.
fn owner<'a>(link: &'a Link, marks: &BTreeMap<api::Mac, (&'a str, Made)>) -> Option<(&'a str, Made)> {
    let is = |made: Made| link.kind.as_deref() == Some(made.kind());
    let marked = link.mac.and_then(|mac| marks.get(&mac)).copied().filter(|(_, made)| is(*made));
    marked.or_else(|| {
        Made::ALL
            .into_iter()
            .filter(|made| is(*made))
            .find_map(|made| Some((made_for(&link.alias, made)?, made)))
    })
}
