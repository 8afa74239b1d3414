//! Parsers for namespace IDs, the peer of a link, and link events of other namespaces.

use super::{DELETE_LINK, HEADER_LEN, NEW_LINK, NetlinkMessage, parse_attributes, u16_at, u32_at};

const IFLA_LINK: u16 = 5;
const IFLA_LINK_NETNSID: u16 = 37;
const IFLA_NEW_NETNSID: u16 = 45;
const LINK_HEADER_LEN: usize = 16;

/// The link at the other end, or below, as a `NEW_LINK` message names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ObservedPeer {
    pub index: u32,
    /// The ID of its namespace, as the namespace of the message numbers it. None if it is in the same namespace.
    pub nsid: Option<i32>,
}

/// Parses the peer of a `NEW_LINK` message: the other end of a veth, the lower link of a macvlan.
pub fn parse_peer(body: &[u8]) -> Option<ObservedPeer> {
    let (mut index, mut nsid) = (None, None);
    for (kind, value) in parse_attributes(body.get(LINK_HEADER_LEN..)?) {
        match kind {
            IFLA_LINK => index = u32_at(value, 0),
            IFLA_LINK_NETNSID => nsid = i32_at(value),
            _ => {}
        }
    }
    // Outside another namespace, a link without a peer has its own index there.
    let own = u32_at(body, 4)?;
    let index = index.filter(|&index| index != 0 && (nsid.is_some() || index != own))?;
    Some(ObservedPeer { index, nsid })
}

/// Parses the ID in the answer to `RTM_GETNSID`, or in an event about IDs. None if there is none, or it is not assigned.
pub fn parse_nsid(body: &[u8]) -> Option<i32> {
    const NETNSA_NSID: u16 = 1;
    /// `struct rtgenmsg` with padding.
    const GENERIC_HEADER_LEN: usize = 4;

    let (_, value) =
        parse_attributes(body.get(GENERIC_HEADER_LEN..)?).find(|(kind, _)| *kind == NETNSA_NSID)?;
    i32_at(value).filter(|&nsid| nsid >= 0)
}

/// The message of an event. The kernel sends one per datagram. A truncated one is kept: a process in any namespace can make
/// the events of its links long, by alternative names, which come last.
pub fn parse_event(datagram: &[u8]) -> Option<NetlinkMessage<'_>> {
    let length = usize::try_from(u32_at(datagram, 0)?).ok()?.min(datagram.len());
    Some(NetlinkMessage {
        kind: u16_at(datagram, 4)?,
        flags: u16_at(datagram, 6)?,
        sequence: u32_at(datagram, 8)?,
        body: datagram.get(HEADER_LEN..length)?,
    })
}

/// What an event says about a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkEvent {
    Changed { index: u32 },
    Removed { index: u32, moved: bool },
}

/// Parses a link event. Reads no names, so that it costs little. None for other messages, and for those of a bridge about
/// its ports: a port that leaves its bridge is not a deleted link.
pub fn parse_link_event(message: &NetlinkMessage<'_>) -> Option<LinkEvent> {
    if message.body.first() != Some(&0) {
        return None;
    }
    let index = u32_at(message.body, 4)?;
    match message.kind {
        NEW_LINK => Some(LinkEvent::Changed { index }),
        DELETE_LINK => {
            let mut attributes = parse_attributes(message.body.get(LINK_HEADER_LEN..)?);
            let moved = attributes.any(|(kind, _)| kind == IFLA_NEW_NETNSID);
            Some(LinkEvent::Removed { index, moved })
        }
        _ => None,
    }
}

fn i32_at(value: &[u8]) -> Option<i32> {
    value.first_chunk().map(|bytes| i32::from_ne_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn link(family: u8, attributes: &[(u16, i32)]) -> Vec<u8> {
        let mut body = vec![family, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        for (kind, value) in attributes {
            body.extend(8_u16.to_ne_bytes());
            body.extend(kind.to_ne_bytes());
            body.extend(value.to_ne_bytes());
        }
        body
    }

    #[test]
    fn a_deletion_with_a_new_namespace_is_a_move() {
        let event =
            |kind, body: &[u8]| parse_link_event(&NetlinkMessage { kind, flags: 0, sequence: 0, body });
        assert_eq!(event(NEW_LINK, &link(0, &[])), Some(LinkEvent::Changed { index: 7 }));
        let removed = |moved| Some(LinkEvent::Removed { index: 7, moved });
        assert_eq!(event(DELETE_LINK, &link(0, &[(4, 1500)])), removed(false));
        assert_eq!(event(DELETE_LINK, &link(0, &[(4, 1500), (45, -1)])), removed(true));
        // A bridge port that leaves its bridge.
        assert_eq!(event(DELETE_LINK, &link(7, &[])), None);
        assert_eq!(event(24, &link(0, &[])), None);
    }

    #[test]
    fn a_link_without_another_end_has_no_peer() {
        assert_eq!(parse_peer(&link(0, &[])), None);
        assert_eq!(parse_peer(&link(0, &[(5, 0)])), None);
        assert_eq!(parse_peer(&link(0, &[(5, 7)])), None);
        assert_eq!(parse_peer(&link(0, &[(5, 8)])), Some(ObservedPeer { index: 8, nsid: None }));
        assert_eq!(parse_peer(&link(0, &[(5, 7), (37, 0)])), Some(ObservedPeer { index: 7, nsid: Some(0) }));
    }

    #[test]
    fn an_id_that_is_not_assigned_is_none() {
        let body = |nsid: i32| [&[0; 4][..], &[8, 0, 1, 0], &nsid.to_ne_bytes()].concat();
        assert_eq!(parse_nsid(&body(3)), Some(3));
        assert_eq!(parse_nsid(&body(-1)), None);
        assert_eq!(parse_nsid(&[0; 4]), None);
    }

    proptest! {
        #[test]
        fn parsers_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), kind in 16_u16..18) {
            parse_peer(&bytes);
            parse_nsid(&bytes);
            parse_event(&bytes);
            parse_link_event(&NetlinkMessage { kind, flags: 0, sequence: 0, body: &bytes });
        }
    }
}
