//! Which links of an attachment are in another namespace inside the pod.

use std::collections::BTreeSet;

use super::{AttachedRecord, LinkIdentity, ObservedLink, records::normalize_mac};

/// What happened last to a link that left its namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Departure {
    Deleted,
    /// Into another namespace.
    Moved,
    /// It came back. A list of links without it is older than that.
    Returned,
}

/// Records which links of an attachment were moved to another namespace, which of these came back, and which were deleted
/// after that.
///
/// A link that comes back has its old index, unless another link has it: then it has the recorded name and MAC address.
/// `links` are those of the pod's namespace, `owned` the indexes that records have, and `departure` says what the
/// kernel reported last about a link that left.
pub fn track_moved_links(
    attached: &mut AttachedRecord,
    links: &[ObservedLink],
    owned: &BTreeSet<u32>,
    departure: impl Fn(u32) -> Option<Departure>,
) {
    for identity in &mut attached.links {
        let Some(index) = identity.index else { continue };
        if links.iter().any(|link| link.index == index) {
            identity.moved = false;
            continue;
        }
        identity.moved = match departure(index) {
            Some(Departure::Moved | Departure::Returned) => true,
            Some(Departure::Deleted) => false,
            None => identity.moved,
        };
        let returned = links.iter().find(|link| !owned.contains(&link.index) && is_same(identity, link));
        if let Some(link) = returned.filter(|_| identity.moved) {
            (identity.index, identity.moved) = (Some(link.index), false);
        }
    }
}

/// Whether a link has the recorded name, MAC address and end on the host.
fn is_same(identity: &LinkIdentity, link: &ObservedLink) -> bool {
    let mac = |text: &Option<String>| text.as_deref().map(normalize_mac).filter(|mac| !mac.is_empty());
    !link.placeholder
        && link.name == identity.name
        && mac(&identity.mac).is_some()
        && mac(&identity.mac) == mac(&link.mac)
        && (identity.peer.is_none() || identity.peer == link.peer)
}
