//! The bytes of rtnetlink: headers, attributes, and the four messages that matter here.
//!
//! Every reader takes any bytes and never panics. Numbers are in the byte order of the machine.

mod state;

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use api::Mac;
use ipnet::IpNet;
use plan::nodenetwork::{Address, AdminState, FloodEntry, Link, OperState, Vxlan};
pub use state::{Standing, forwards, placed, standing, stays};

pub const DONE: u16 = 3;
pub const ERROR: u16 = 2;
pub const NEW_LINK: u16 = 16;
pub const DELETE_LINK: u16 = 17;
pub const GET_LINK: u16 = 18;
pub const SET_LINK: u16 = 19;
pub const NEW_ADDRESS: u16 = 20;
pub const DELETE_ADDRESS: u16 = 21;
pub const GET_ADDRESS: u16 = 22;
pub const NEW_ROUTE: u16 = 24;
pub const DELETE_ROUTE: u16 = 25;
pub const GET_ROUTE: u16 = 26;
pub const NEW_NEIGHBOUR: u16 = 28;
pub const DELETE_NEIGHBOUR: u16 = 29;
pub const GET_NEIGHBOUR: u16 = 30;
pub const NEW_NEXTHOP: u16 = 104;
pub const GET_NEXTHOP: u16 = 106;

/// `NLM_F_REQUEST | NLM_F_DUMP`
const DUMP: u16 = 0x301;
/// `NLM_F_DUMP_INTR`: something changed while the kernel was counting up.
pub const INTERRUPTED: u16 = 0x10;

/// `AF_INET`
pub const INET: u8 = 2;
/// `AF_INET6`
pub const INET6: u8 = 10;
/// `AF_BRIDGE`
pub const BRIDGE: u8 = 7;
/// `RT_TABLE_MAIN`
pub const MAIN: u8 = 254;
/// `RTN_UNICAST`
pub const UNICAST: u8 = 1;

const HEADER: usize = 16;

/// One message out of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message<'a> {
    pub kind: u16,
    pub flags: u16,
    pub sequence: u32,
    pub body: &'a [u8],
}

/// The messages of a datagram. What is cut off at its end is dropped.
pub fn messages(mut datagram: &[u8]) -> impl Iterator<Item = Message<'_>> {
    std::iter::from_fn(move || {
        let length = usize::try_from(u32_at(datagram, 0)?).ok()?;
        let body = datagram.get(HEADER..length)?;
        let message = Message {
            kind: u16_at(datagram, 4)?,
            flags: u16_at(datagram, 6)?,
            sequence: u32_at(datagram, 8)?,
            body,
        };
        datagram = datagram.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(message)
    })
}

/// The attributes in a stretch of bytes, in the kernel's order.
fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::from(u16_at(bytes, 0)?);
        let value = bytes.get(4..length)?;
        // The two highest bits say how the value is to be read, not what it is.
        let kind = u16_at(bytes, 2)? & 0x3fff;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// The error code of an `ERROR` or `DONE` message; zero is success.
pub fn error_code(body: &[u8]) -> i32 {
    body.first_chunk().map_or(0, |code| i32::from_ne_bytes(*code).saturating_neg())
}

/// What the kernel added in words to an `ERROR` message.
pub fn error_text(message: &Message<'_>) -> String {
    const NLM_F_CAPPED: u16 = 0x100;
    const NLM_F_ACK_TLVS: u16 = 0x200;
    const NLMSGERR_ATTR_MSG: u16 = 1;
    if message.flags & NLM_F_ACK_TLVS == 0 {
        return String::new();
    }
    // The error repeats the request: its header alone, or all of it.
    let repeated = if message.flags & NLM_F_CAPPED == 0 {
        u32_at(message.body, 4).and_then(|length| usize::try_from(length).ok()).unwrap_or(HEADER)
    } else {
        HEADER
    };
    let rest = message.body.get(4 + repeated.next_multiple_of(4)..).unwrap_or_default();
    attributes(rest)
        .find(|(kind, _)| *kind == NLMSGERR_ATTR_MSG)
        .map(|(_, text)| readable(text).chars().take(200).collect())
        .unwrap_or_default()
}

fn request(kind: u16, sequence: u32, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(HEADER + body.len()).unwrap_or(u32::MAX);
    let mut bytes = Vec::with_capacity(HEADER + body.len());
    bytes.extend(length.to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(DUMP.to_ne_bytes());
    bytes.extend(sequence.to_ne_bytes());
    bytes.extend(0_u32.to_ne_bytes());
    bytes.extend(body);
    bytes
}

/// Asks for every link, without its counters.
pub fn get_links(sequence: u32) -> Vec<u8> {
    const IFLA_EXT_MASK: u16 = 29;
    const RTEXT_FILTER_SKIP_STATS: u32 = 1 << 3;
    let mut body = vec![0; 16];
    body.extend(8_u16.to_ne_bytes());
    body.extend(IFLA_EXT_MASK.to_ne_bytes());
    body.extend(RTEXT_FILTER_SKIP_STATS.to_ne_bytes());
    request(GET_LINK, sequence, &body)
}

/// Asks for the addresses of every link.
pub fn get_addresses(sequence: u32) -> Vec<u8> {
    request(GET_ADDRESS, sequence, &[0; 8])
}

/// Asks for the addresses of one link.
pub fn get_addresses_of(sequence: u32, link: u32) -> Vec<u8> {
    request(GET_ADDRESS, sequence, &[[0; 4], link.to_ne_bytes()].concat())
}

/// Asks for the unicast routes of the main table.
pub fn get_routes(sequence: u32, family: u8) -> Vec<u8> {
    request(GET_ROUTE, sequence, &[family, 0, 0, 0, MAIN, 0, 0, UNICAST, 0, 0, 0, 0])
}

/// Asks for every nexthop.
pub fn get_nexthops(sequence: u32) -> Vec<u8> {
    request(GET_NEXTHOP, sequence, &[0; 8])
}

/// Asks for the forwarding entries of one port or VXLAN device.
pub fn get_forwarding(sequence: u32, link: u32) -> Vec<u8> {
    let mut body = vec![BRIDGE, 0, 0, 0];
    body.extend(link.to_ne_bytes());
    body.extend([0; 4]);
    request(GET_NEIGHBOUR, sequence, &body)
}

/// A link out of a `NEW_LINK` message, without its addresses.
pub fn link(body: &[u8]) -> Option<Link> {
    const IFLA_ADDRESS: u16 = 1;
    const IFLA_IFNAME: u16 = 3;
    const IFLA_MTU: u16 = 4;
    const IFLA_LINK: u16 = 5;
    const IFLA_MASTER: u16 = 10;
    const IFLA_OPERSTATE: u16 = 16;
    const IFLA_LINKINFO: u16 = 18;
    const IFLA_IFALIAS: u16 = 20;
    const IFLA_AF_SPEC: u16 = 26;
    const IFLA_LINK_NETNSID: u16 = 37;
    const IFLA_INFO_KIND: u16 = 1;
    const IFLA_INFO_DATA: u16 = 2;
    const IFF_UP: u32 = 1;
    const IFF_LOOPBACK: u32 = 8;

    // A bridge also tells of its ports in messages of its own family, which hold only that.
    if body.first() != Some(&0) {
        return None;
    }
    let flags = u32_at(body, 8)?;
    let all: BTreeMap<u16, &[u8]> = attributes(body.get(16..)?).collect();
    let number = |kind| all.get(&kind).and_then(|value| u32_at(value, 0));
    let text = |kind| all.get(&kind).map(|value| readable(value));
    let info = |wanted| {
        let info = all.get(&IFLA_LINKINFO)?;
        attributes(info).find(|(kind, _)| *kind == wanted).map(|(_, value)| value)
    };
    let kind = info(IFLA_INFO_KIND).map(readable);
    let (vxlan, below) = match (kind.as_deref(), info(IFLA_INFO_DATA)) {
        (Some("vxlan"), Some(data)) => vxlan(data),
        _ => (None, None),
    };
    // The number of a link in another namespace means another link here.
    let here = !all.contains_key(&IFLA_LINK_NETNSID);
    Some(Link {
        index: u32_at(body, 4)?,
        name: text(IFLA_IFNAME)?,
        kind,
        mac: all.get(&IFLA_ADDRESS).and_then(|value| <[u8; 6]>::try_from(*value).ok()).map(Mac::from),
        mtu: number(IFLA_MTU).unwrap_or(0),
        admin: if flags & IFF_UP == 0 { AdminState::Down } else { AdminState::Up },
        oper: match all.get(&IFLA_OPERSTATE).and_then(|value| value.first()) {
            Some(1) => OperState::NotPresent,
            Some(2) => OperState::Down,
            Some(3) => OperState::LowerLayerDown,
            Some(4) => OperState::Testing,
            Some(5) => OperState::Dormant,
            Some(6) => OperState::Up,
            _ => OperState::Unknown,
        },
        loopback: flags & IFF_LOOPBACK != 0,
        master: number(IFLA_MASTER).filter(|&index| index != 0),
        lower: number(IFLA_LINK).or(below).filter(|&index| here && index != 0),
        alias: text(IFLA_IFALIAS).unwrap_or_default(),
        addresses: Vec::new(),
        ipv6_disabled: all.get(&IFLA_AF_SPEC).and_then(|families| ipv6_disabled(families)),
        ipv4_isolated: all.get(&IFLA_AF_SPEC).and_then(|families| ipv4_isolated(families)),
        vxlan,
    })
}

/// Whether IPv6 is off, out of what a link says of its protocols. A link that says nothing of IPv6 has none: the
/// kernel has no IPv6, or the MTU is too small for it.
fn ipv6_disabled(families: &[u8]) -> Option<bool> {
    const IFLA_INET6_CONF: u16 = 2;
    const DEVCONF_DISABLE_IPV6: usize = 26;

    let (_, inet6) = attributes(families).find(|(family, _)| *family == u16::from(INET6))?;
    let (_, settings) = attributes(inet6).find(|(kind, _)| *kind == IFLA_INET6_CONF)?;
    u32_at(settings, 4 * DEVCONF_DISABLE_IPV6).map(|off| off != 0)
}

/// Whether the host is deaf to IPv4, out of what a link says of its protocols.
fn ipv4_isolated(families: &[u8]) -> Option<bool> {
    const IFLA_INET_CONF: u16 = 1;
    /// `IPV4_DEVCONF_FORWARDING`, `IPV4_DEVCONF_RP_FILTER` and `IPV4_DEVCONF_ARP_IGNORE`, which count from one.
    const WANTED: [(usize, u32); 3] = [(1, 0), (8, 1), (19, 8)];

    let (_, inet) = attributes(families).find(|(family, _)| *family == u16::from(INET))?;
    let (_, settings) = attributes(inet).find(|(kind, _)| *kind == IFLA_INET_CONF)?;
    let is = |(at, value): &(usize, u32)| u32_at(settings, 4 * (at - 1)) == Some(*value);
    Some(WANTED.iter().all(is))
}

/// What a VXLAN device is set to, and the link that it is bound to.
fn vxlan(data: &[u8]) -> (Option<Vxlan>, Option<u32>) {
    const IFLA_VXLAN_ID: u16 = 1;
    const IFLA_VXLAN_LINK: u16 = 3;
    const IFLA_VXLAN_LOCAL: u16 = 4;
    const IFLA_VXLAN_PORT: u16 = 15;
    const IFLA_VXLAN_LOCAL6: u16 = 17;

    let all: BTreeMap<u16, &[u8]> = attributes(data).collect();
    let number = |kind| all.get(&kind).and_then(|value| u32_at(value, 0));
    let port = all.get(&IFLA_VXLAN_PORT).and_then(|value| <[u8; 2]>::try_from(*value).ok());
    let local = all.get(&IFLA_VXLAN_LOCAL).or_else(|| all.get(&IFLA_VXLAN_LOCAL6));
    let settings = number(IFLA_VXLAN_ID).zip(port).map(|(vni, port)| Vxlan {
        vni,
        port: u16::from_be_bytes(port),
        local: local.and_then(|bytes| ip(bytes)).filter(|local| !local.is_unspecified()),
    });
    (settings, number(IFLA_VXLAN_LINK))
}

/// An address of either family, by its length.
fn ip(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).map(|octets| IpAddr::from(Ipv4Addr::from(octets)));
    v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(|octets| IpAddr::from(Ipv6Addr::from(octets)))).ok()
}

/// An entry of a flood list, out of a `NEW_NEIGHBOUR` message: frames for everybody go to that address too. None for
/// other entries, of which a bridge learns one for every station.
pub fn flood(body: &[u8]) -> Option<FloodEntry> {
    const NDA_DST: u16 = 1;
    const NDA_LLADDR: u16 = 2;

    if body.first() != Some(&BRIDGE) {
        return None;
    }
    let all: BTreeMap<u16, &[u8]> = attributes(body.get(12..)?).collect();
    let everybody = all.get(&NDA_LLADDR).is_some_and(|mac| mac.iter().all(|&byte| byte == 0));
    let to = all.get(&NDA_DST).and_then(|bytes| ip(bytes)).filter(|_| everybody)?;
    Some(FloodEntry { link: u32_at(body, 4)?, to })
}

/// The link that a route leads to, out of a `NEW_ROUTE` message that answers a question for one address.
pub fn way(body: &[u8]) -> Option<u32> {
    const RTA_OIF: u16 = 4;
    let (_, link) = attributes(body.get(12..)?).find(|(kind, _)| *kind == RTA_OIF)?;
    u32_at(link, 0)
}

/// The index of a link and one of its addresses, out of a `NEW_ADDRESS` message.
pub fn address(body: &[u8]) -> Option<(u32, Address)> {
    const IFA_ADDRESS: u16 = 1;
    const IFA_LOCAL: u16 = 2;
    const IFA_FLAGS: u16 = 8;
    // The same bit means "secondary" for IPv4.
    const IFA_F_TEMPORARY: u32 = 1;

    let &[family, prefix, flags, _scope, ..] = body else {
        return None;
    };
    let all: BTreeMap<u16, &[u8]> = attributes(body.get(8..)?).collect();
    // On a point-to-point link ADDRESS is the other side's and LOCAL ours.
    let own = all.get(&IFA_LOCAL).or_else(|| all.get(&IFA_ADDRESS))?;
    let ip = ip(own).filter(|ip| family == if ip.is_ipv4() { INET } else { INET6 })?;
    let flags = all.get(&IFA_FLAGS).and_then(|value| u32_at(value, 0)).unwrap_or(u32::from(flags));
    let temporary = family == INET6 && flags & IFA_F_TEMPORARY != 0;
    Some((u32_at(body, 4)?, Address { net: IpNet::new(ip, prefix).ok()?, temporary }))
}

/// Where a default route leads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Way {
    /// Over these links.
    Links(Vec<u32>),
    /// Where the nexthop of this number leads; the route itself does not say (`nexthop_compat_mode=0`).
    Nexthop(u32),
}

/// Where a default route of the main table leads, out of a `NEW_ROUTE` message. None for other routes.
pub fn default_route(body: &[u8]) -> Option<Way> {
    const RTA_OIF: u16 = 4;
    const RTA_MULTIPATH: u16 = 9;
    const RTA_TABLE: u16 = 15;
    const RTA_NH_ID: u16 = 30;
    const RTM_F_CLONED: u32 = 0x200;

    let &[family, 0, 0, _tos, table, _protocol, _scope, UNICAST, ..] = body else {
        return None;
    };
    let cloned = u32_at(body, 8).is_none_or(|flags| flags & RTM_F_CLONED != 0);
    if cloned || !matches!(family, INET | INET6) {
        return None;
    }
    let all: BTreeMap<u16, &[u8]> = attributes(body.get(12..).unwrap_or_default()).collect();
    let number = |kind| all.get(&kind).and_then(|value| u32_at(value, 0));
    if number(RTA_TABLE).unwrap_or(u32::from(table)) != u32::from(MAIN) {
        return None;
    }
    let mut links: Vec<u32> = number(RTA_OIF).into_iter().collect();
    links.extend(all.get(&RTA_MULTIPATH).into_iter().flat_map(|hops| next_hops(hops)));
    match number(RTA_NH_ID) {
        Some(id) if links.is_empty() => Some(Way::Nexthop(id)),
        _ => Some(Way::Links(links)),
    }
}

/// A nexthop: an object of its own that routes name by its number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nexthop {
    pub id: u32,
    /// The link that it leads to; none for a group.
    pub link: Option<u32>,
    /// The numbers of the nexthops that it is a group of.
    pub members: Vec<u32>,
}

/// A nexthop out of a `NEW_NEXTHOP` message.
pub fn nexthop(body: &[u8]) -> Option<Nexthop> {
    const NHA_ID: u16 = 1;
    const NHA_GROUP: u16 = 2;
    const NHA_OIF: u16 = 5;
    /// `struct nexthop_grp`: a number, a weight, and room.
    const MEMBER: usize = 8;

    let all: BTreeMap<u16, &[u8]> = attributes(body.get(8..)?).collect();
    let number = |kind| all.get(&kind).and_then(|value| u32_at(value, 0));
    let group = all.get(&NHA_GROUP).into_iter().flat_map(|group| group.chunks_exact(MEMBER));
    Some(Nexthop {
        id: number(NHA_ID)?,
        link: number(NHA_OIF),
        members: group.filter_map(|member| u32_at(member, 0)).collect(),
    })
}

/// The links of the hops of a route with several.
fn next_hops(mut bytes: &[u8]) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let length = usize::from(u16_at(bytes, 0)?);
        let index = u32_at(bytes.get(..length)?, 4)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(index)
    })
}

/// Whether an event can change anything that is looked at here. Nodes that speak BGP change routes all day, and every
/// node meets neighbours.
pub fn matters(message: &Message<'_>) -> bool {
    match message.kind {
        NEW_ROUTE | DELETE_ROUTE => message.body.get(1) == Some(&0),
        NEW_NEIGHBOUR | DELETE_NEIGHBOUR => flood(message.body).is_some(),
        _ => true,
    }
}

/// Text of the kernel, which is bytes. What is no text, and what would end or move a line on a terminal, is written as
/// `\xNN`, and so is the backslash: two different names never look the same.
fn readable(bytes: &[u8]) -> String {
    use std::fmt::Write as _;

    let bytes = bytes.split(|&byte| byte == 0).next().unwrap_or_default();
    let mut text = String::with_capacity(bytes.len());
    let escape = |text: &mut String, bytes: &[u8]| {
        for byte in bytes {
            // Writing to a String cannot fail.
            _ = write!(text, "\\x{byte:02x}");
        }
    };
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            if c.is_control() || c.is_whitespace() && c != ' ' || c == '\\' {
                escape(&mut text, c.encode_utf8(&mut [0; 4]).as_bytes());
            } else {
                text.push(c);
            }
        }
        escape(&mut text, chunk.invalid());
    }
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_that_are_no_text_are_escaped_and_stay_different() {
        for (bytes, wanted) in [
            (&b"eth0\0"[..], "eth0"),
            (b"eth0", "eth0"),
            (b"a\xffb\0", "a\\xffb"),
            (b"a\\xffb", "a\\x5cxffb"),
            (b"\x1b[31m", "\\x1b[31m"),
            ("ethø".as_bytes(), "ethø"),
            ("a\u{2028}b".as_bytes(), "a\\xe2\\x80\\xa8b"),
            (b"some free text", "some free text"),
            (b"", ""),
        ] {
            assert_eq!(readable(bytes), wanted);
        }
    }

    #[test]
    fn only_events_about_default_routes_count_among_routes() {
        let event = |kind, body| matters(&Message { kind, flags: 0, sequence: 0, body });
        assert!(event(NEW_LINK, &[]));
        assert!(event(NEW_ROUTE, &[INET, 0, 0]));
        assert!(event(DELETE_ROUTE, &[INET6, 0, 0]));
        assert!(!event(NEW_ROUTE, &[INET, 24, 0]));
        assert!(!event(NEW_ROUTE, &[]));
    }

    #[test]
    fn only_flood_entries_count_among_neighbours() {
        let event = |family: u8, mac: [u8; 6]| {
            let mut body = vec![family, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0];
            for (kind, value) in [(1_u16, &[10, 0, 0, 7][..]), (2, &mac)] {
                body.extend(u16::try_from(4 + value.len()).unwrap().to_ne_bytes());
                body.extend(kind.to_ne_bytes());
                body.extend(value);
                body.resize(body.len().next_multiple_of(4), 0);
            }
            matters(&Message { kind: NEW_NEIGHBOUR, flags: 0, sequence: 0, body: &body })
        };
        assert!(event(BRIDGE, [0; 6]));
        assert!(!event(BRIDGE, [2, 0, 0, 0, 0, 1]));
        assert!(!event(INET, [0; 6]));
    }

    #[test]
    fn a_default_route_with_several_hops_leads_to_all_of_their_links() {
        let mut body = vec![INET, 0, 0, 0, MAIN, 0, 0, UNICAST, 0, 0, 0, 0];
        body.extend(20_u16.to_ne_bytes());
        body.extend(9_u16.to_ne_bytes());
        for index in [7_u32, 9] {
            body.extend(8_u16.to_ne_bytes());
            body.extend([0, 0]);
            body.extend(index.to_ne_bytes());
        }
        assert_eq!(default_route(&body), Some(Way::Links(vec![7, 9])));
        body[4] = 255;
        assert_eq!(default_route(&body), None);
    }

    #[test]
    fn a_request_is_read_back_as_it_was_written() {
        let bytes = get_routes(7, INET6);
        let read: Vec<Message<'_>> = messages(&bytes).collect();
        let body = [INET6, 0, 0, 0, MAIN, 0, 0, UNICAST, 0, 0, 0, 0];
        assert_eq!(read, [Message { kind: GET_ROUTE, flags: DUMP, sequence: 7, body: &body }]);
    }

    proptest! {
        #[test]
        fn no_bytes_make_a_reader_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            for message in messages(&bytes) {
                matters(&message);
            }
            link(&bytes);
            address(&bytes);
            default_route(&bytes);
            nexthop(&bytes);
            flood(&bytes);
            way(&bytes);
            vxlan(&bytes);
            ipv6_disabled(&bytes);
            ipv4_isolated(&bytes);
            error_code(&bytes);
            readable(&bytes);
        }

        #[test]
        fn two_different_names_never_look_the_same(a in "[\\x01-\\u{ff}]{0,6}", b in "[\\x01-\\u{ff}]{0,6}") {
            prop_assert_eq!(readable(a.as_bytes()) == readable(b.as_bytes()), a == b);
        }
    }
}
