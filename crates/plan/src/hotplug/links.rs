//! Finds the links of an attachment again. A link keeps its index when it is renamed.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    AttachedRecord, AttachmentRecord, HostLink, HostPeer, LinkIdentity, MovedLinks, ObservedLink,
    RecordPhase, records::normalize_mac,
};

/// The links of the READY sandbox's namespace, and what identifies links on the host.
#[derive(Clone, Copy)]
pub(super) struct PodLinks<'a> {
    pub links: &'a [ObservedLink],
    pub host_links: &'a BTreeMap<u32, HostLink>,
    /// Links of virtual machines are renamed, replaced and moved: none of them counts as lost.
    pub never_lost: bool,
    /// The indexes of the links that a record identifies ([`identified`]).
    pub identified: &'a BTreeSet<u32>,
}

/// The indexes of the links that one of the records identifies.
pub(super) fn identified(links: &[ObservedLink], records: &[&AttachmentRecord]) -> BTreeSet<u32> {
    let (no_hosts, none) = (BTreeMap::new(), BTreeSet::new());
    let links = PodLinks { links, host_links: &no_hosts, never_lost: false, identified: &none };
    let mut identified: BTreeSet<u32> = records.iter().flat_map(|record| links.owned(record)).collect();
    for record in records {
        let named = links.named(&record.key.interface).filter(|link| links.owns(record, link));
        identified.extend(named.map(|link| link.index));
    }
    identified
}

impl<'a> PodLinks<'a> {
    /// The link of this name.
    pub fn named(&self, name: &str) -> Option<&'a ObservedLink> {
        self.links.iter().find(|link| link.name == name)
    }

    /// The link that this is for certain: it has the index or the peer, or, if the index is not known, the name.
    ///
    /// The MAC address does not identify a link: a link can get another one, and links of one master can have the same. But a
    /// link of the name is not meant if it has another one, and a link of another name has the recorded one.
    fn identify(&self, identity: &LinkIdentity) -> Option<&'a ObservedLink> {
        if let Some(index) = identity.index {
            return self.links.iter().find(|link| link.index == index);
        }
        let of_peer = self.links.iter().find(|link| link.peer.is_some() && link.peer == identity.peer);
        of_peer.or_else(|| {
            let other_peer = |link: &ObservedLink| {
                identity.peer.is_some() && link.peer.is_some() && link.peer != identity.peer
            };
            let replaced = |link: &ObservedLink| !same_mac(identity, link) && self.may_be_renamed(identity);
            let named = self.named(&identity.name).filter(|link| !link.placeholder);
            named.filter(|link| !other_peer(link) && !replaced(link))
        })
    }

    /// Whether this may be a link of another name: the only one with its MAC address that no record identifies.
    fn may_be_renamed(&self, identity: &LinkIdentity) -> bool {
        let Some(mac) = identity.mac.as_deref().map(normalize_mac) else { return false };
        let suits = |link: &&ObservedLink| {
            !self.identified.contains(&link.index)
                && link.mac.as_deref().map(normalize_mac).as_ref() == Some(&mac)
        };
        identity.index.is_none() && self.links.iter().filter(suits).count() == 1
    }

    /// The end of a link on the host, if it exists. Another link with its index has another name or MAC address.
    fn host_peer(&self, identity: &LinkIdentity) -> Option<HostPeer> {
        let index = identity.peer?;
        let host = self.host_links.get(&index)?;
        let other_name = identity.peer_name.as_ref().is_some_and(|name| *name != host.name);
        let macs = identity.peer_mac.as_ref().zip(host.mac.as_ref());
        let other_mac = macs.is_some_and(|(recorded, mac)| normalize_mac(recorded) != normalize_mac(mac));
        let (name, mac) = (identity.peer_name.clone(), identity.peer_mac.clone());
        (!other_name && !other_mac).then_some(HostPeer { index, name, mac })
    }

    /// Whether a link was deleted: it is neither renamed nor moved to another namespace.
    fn is_deleted(&self, identity: &LinkIdentity) -> bool {
        // A moved link whose other end is gone was deleted where it is now.
        let exists_elsewhere = match identity.peer {
            Some(_) => self.host_peer(identity).is_some(),
            None => identity.moved,
        };
        !self.never_lost
            && !exists_elsewhere
            && self.identify(identity).is_none()
            && !self.may_be_renamed(identity)
    }

    /// Whether all links of an attachment were deleted.
    pub fn is_lost(&self, attached: &AttachedRecord) -> bool {
        !attached.links.is_empty() && attached.links.iter().all(|link| self.is_deleted(link))
    }

    /// Whether the link that network-status lists under this name was deleted.
    pub fn is_interface_deleted(&self, attached: &AttachedRecord, interface: &str) -> bool {
        attached.links.iter().any(|link| link.name == interface && self.is_deleted(link))
    }

    /// Whether a link belongs to the attachment, as far as the record identifies it.
    pub fn owns(&self, record: &AttachmentRecord, link: &ObservedLink) -> bool {
        match &record.phase {
            RecordPhase::Attached(_) => self.owned(record).contains(&link.index),
            RecordPhase::Intent { links_before } => {
                link.name == record.key.interface && !links_before.contains(&link.index)
            }
            RecordPhase::Removed => false,
        }
    }

    /// The links of the attachment that exist outside the pod's namespace.
    pub fn moved(&self, record: &AttachmentRecord) -> MovedLinks {
        let links = record.attached().map_or(&[][..], |attached| &attached.links);
        let mut moved = MovedLinks::default();
        for identity in links.iter().filter(|identity| self.identify(identity).is_none()) {
            match identity.peer {
                Some(_) => moved.host_peers.extend(self.host_peer(identity)),
                None if identity.moved => moved.unreachable = Some(identity.name.clone()),
                None if self.may_be_renamed(identity) => moved.unidentified = Some(identity.name.clone()),
                None => {}
            }
        }
        moved
    }

    /// The indexes of the links that are the attachment's for certain.
    pub fn owned(&self, record: &AttachmentRecord) -> Vec<u32> {
        let links = record.attached().map_or(&[][..], |attached| &attached.links);
        links.iter().filter_map(|identity| self.identify(identity)).map(|link| link.index).collect()
    }
}

/// Whether a link has the recorded MAC address, as far as both are known.
pub(super) fn same_mac(identity: &LinkIdentity, link: &ObservedLink) -> bool {
    let macs = identity.mac.as_deref().zip(link.mac.as_deref());
    macs.is_none_or(|(recorded, mac)| recorded.is_empty() || normalize_mac(recorded) == normalize_mac(mac))
}
