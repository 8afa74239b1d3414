//! The wire format of rtnetlink: dump requests, and parsers for links, addresses, routes and FDB entries.
//!
//! Parsers accept arbitrary bytes and never panic. Integers are in host byte order.

mod default_route;
mod entry;
mod namespace;

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use api::Mac;
pub use default_route::{ListedDefaultRoute, parse_listed_default_route};
pub use entry::{RouteEntry, is_local_route, parse_address, parse_route, port_forwards};
use ipnet::IpNet;
pub use namespace::{LinkEvent, ObservedPeer, parse_event, parse_link_event, parse_nsid, parse_peer};
use plan::nodenetwork::{Address, AdminState, FloodEntry, Link, OperState, Vxlan};

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
/// `NLM_F_DUMP_INTR`: the list changed during the dump.
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

const HEADER_LEN: usize = 16;

/// One message of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NetlinkMessage<'a> {
    pub kind: u16,
    pub flags: u16,
    pub sequence: u32,
    pub body: &'a [u8],
}

/// The messages of a datagram. A truncated message at the end is dropped.
pub fn parse_messages(mut datagram: &[u8]) -> impl Iterator<Item = NetlinkMessage<'_>> {
    std::iter::from_fn(move || {
        let length = usize::try_from(u32_at(datagram, 0)?).ok()?;
        let body = datagram.get(HEADER_LEN..length)?;
        let message = NetlinkMessage {
            kind: u16_at(datagram, 4)?,
            flags: u16_at(datagram, 6)?,
            sequence: u32_at(datagram, 8)?,
            body,
        };
        datagram = datagram.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(message)
    })
}

/// The attributes in these bytes.
fn parse_attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::from(u16_at(bytes, 0)?);
        let value = bytes.get(4..length)?;
        // The two highest bits are flags (nested, network byte order).
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

/// The errno of an `ERROR` or `DONE` message. Zero is success.
pub fn error_code(body: &[u8]) -> i32 {
    body.first_chunk().map_or(0, |code| i32::from_ne_bytes(*code).saturating_neg())
}

/// The kernel's error text in an `ERROR` message, if any.
pub fn error_text(message: &NetlinkMessage<'_>) -> String {
    const NLM_F_CAPPED: u16 = 0x100;
    const NLM_F_ACK_TLVS: u16 = 0x200;
    const NLMSGERR_ATTR_MSG: u16 = 1;
    if message.flags & NLM_F_ACK_TLVS == 0 {
        return String::new();
    }
    // The message repeats the request: only its header if it is capped.
    let request_len = if message.flags & NLM_F_CAPPED == 0 {
        u32_at(message.body, 4).and_then(|length| usize::try_from(length).ok()).unwrap_or(HEADER_LEN)
    } else {
        HEADER_LEN
    };
    let rest = message.body.get(4 + request_len.next_multiple_of(4)..).unwrap_or_default();
    parse_attributes(rest)
        .find(|(kind, _)| *kind == NLMSGERR_ATTR_MSG)
        .map(|(_, text)| escape_text(text).chars().take(200).collect())
        .unwrap_or_default()
}

fn dump_request(kind: u16, sequence: u32, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(HEADER_LEN + body.len()).unwrap_or(u32::MAX);
    let mut bytes = Vec::with_capacity(HEADER_LEN + body.len());
    bytes.extend(length.to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(DUMP.to_ne_bytes());
    bytes.extend(sequence.to_ne_bytes());
    bytes.extend(0_u32.to_ne_bytes());
    bytes.extend(body);
    bytes
}

/// Requests all links, without their statistics.
pub fn get_links(sequence: u32) -> Vec<u8> {
    const IFLA_EXT_MASK: u16 = 29;
    const RTEXT_FILTER_SKIP_STATS: u32 = 1 << 3;
    let mut body = vec![0; 16];
    body.extend(8_u16.to_ne_bytes());
    body.extend(IFLA_EXT_MASK.to_ne_bytes());
    body.extend(RTEXT_FILTER_SKIP_STATS.to_ne_bytes());
    dump_request(GET_LINK, sequence, &body)
}

/// Requests the addresses of all links.
pub fn get_addresses(sequence: u32) -> Vec<u8> {
    dump_request(GET_ADDRESS, sequence, &[0; 8])
}

/// Requests the addresses of one link.
pub fn get_addresses_of(sequence: u32, link: u32) -> Vec<u8> {
    dump_request(GET_ADDRESS, sequence, &[[0; 4], link.to_ne_bytes()].concat())
}

/// Requests the unicast routes of the main table.
pub fn get_routes(sequence: u32, family: u8) -> Vec<u8> {
    dump_request(GET_ROUTE, sequence, &[family, 0, 0, 0, MAIN, 0, 0, UNICAST, 0, 0, 0, 0])
}

/// Requests all nexthop objects.
pub fn get_nexthops(sequence: u32) -> Vec<u8> {
    dump_request(GET_NEXTHOP, sequence, &[0; 8])
}

/// Requests the FDB entries of one bridge port or VXLAN device.
pub fn get_forwarding(sequence: u32, link: u32) -> Vec<u8> {
    let mut body = vec![BRIDGE, 0, 0, 0];
    body.extend(link.to_ne_bytes());
    body.extend([0; 4]);
    dump_request(GET_NEIGHBOUR, sequence, &body)
}

/// Parses the link of a `NEW_LINK` message. Its addresses come in other messages.
pub fn parse_link(body: &[u8]) -> Option<Link> {
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

    // A bridge also sends messages of family AF_BRIDGE about its ports, which contain only port state.
    if body.first() != Some(&0) {
        return None;
    }
    let flags = u32_at(body, 8)?;
    let all: BTreeMap<u16, &[u8]> = parse_attributes(body.get(16..)?).collect();
    let number = |kind| all.get(&kind).and_then(|value| u32_at(value, 0));
    let text = |kind| all.get(&kind).map(|value| escape_text(value));
    let info = |attribute| {
        let info = all.get(&IFLA_LINKINFO)?;
        parse_attributes(info).find(|(kind, _)| *kind == attribute).map(|(_, value)| value)
    };
    let kind = info(IFLA_INFO_KIND).map(escape_text);
    let (vxlan, lower) = match (kind.as_deref(), info(IFLA_INFO_DATA)) {
        (Some("vxlan"), Some(data)) => parse_vxlan(data),
        _ => (None, None),
    };
    // The index of a link in another namespace belongs to a different link in this one.
    let same_namespace = !all.contains_key(&IFLA_LINK_NETNSID);
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
        lower: number(IFLA_LINK).or(lower).filter(|&index| same_namespace && index != 0),
        alias: text(IFLA_IFALIAS).unwrap_or_default(),
        addresses: Vec::new(),
        ipv6_disabled: all.get(&IFLA_AF_SPEC).and_then(|families| parse_ipv6_disabled(families)),
        ipv4_isolated: all.get(&IFLA_AF_SPEC).and_then(|families| parse_ipv4_isolated(families)),
        vxlan,
    })
}

/// Whether IPv6 is disabled, from the `IFLA_AF_SPEC` of a link. None if the link has no IPv6 at all: the kernel has none,
/// or the MTU is too small for it.
fn parse_ipv6_disabled(families: &[u8]) -> Option<bool> {
    const IFLA_INET6_CONF: u16 = 2;
    const DEVCONF_DISABLE_IPV6: usize = 26;

    let (_, inet6) = parse_attributes(families).find(|(family, _)| *family == u16::from(INET6))?;
    let (_, settings) = parse_attributes(inet6).find(|(kind, _)| *kind == IFLA_INET6_CONF)?;
    u32_at(settings, 4 * DEVCONF_DISABLE_IPV6).map(|off| off != 0)
}

/// Whether the host is isolated from IPv4 on this link, from the `IFLA_AF_SPEC` of the link.
fn parse_ipv4_isolated(families: &[u8]) -> Option<bool> {
    const IFLA_INET_CONF: u16 = 1;
    /// `IPV4_DEVCONF_FORWARDING`, `IPV4_DEVCONF_RP_FILTER` and `IPV4_DEVCONF_ARP_IGNORE`, counted from 1.
    const EXPECTED: [(usize, u32); 3] = [(1, 0), (8, 1), (19, 8)];

    let (_, inet) = parse_attributes(families).find(|(family, _)| *family == u16::from(INET))?;
    let (_, settings) = parse_attributes(inet).find(|(kind, _)| *kind == IFLA_INET_CONF)?;
    let matches = |(at, value): &(usize, u32)| u32_at(settings, 4 * (at - 1)) == Some(*value);
    Some(EXPECTED.iter().all(matches))
}

/// Parses the settings of a VXLAN device and the index of its lower link.
fn parse_vxlan(data: &[u8]) -> (Option<Vxlan>, Option<u32>) {
    const IFLA_VXLAN_ID: u16 = 1;
    const IFLA_VXLAN_LINK: u16 = 3;
    const IFLA_VXLAN_LOCAL: u16 = 4;
    const IFLA_VXLAN_PORT: u16 = 15;
    const IFLA_VXLAN_LOCAL6: u16 = 17;

    let all: BTreeMap<u16, &[u8]> = parse_attributes(data).collect();
    let number = |kind| all.get(&kind).and_then(|value| u32_at(value, 0));
    let port = all.get(&IFLA_VXLAN_PORT).and_then(|value| <[u8; 2]>::try_from(*value).ok());
    let local = all.get(&IFLA_VXLAN_LOCAL).or_else(|| all.get(&IFLA_VXLAN_LOCAL6));
    let settings = number(IFLA_VXLAN_ID).zip(port).map(|(vni, port)| Vxlan {
        vni,
        port: u16::from_be_bytes(port),
        local: local.and_then(|bytes| parse_ip(bytes)).filter(|local| !local.is_unspecified()),
    });
    (settings, number(IFLA_VXLAN_LINK))
}

/// Parses an IP address; its length determines the family.
fn parse_ip(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).map(|octets| IpAddr::from(Ipv4Addr::from(octets)));
    v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(|octets| IpAddr::from(Ipv6Addr::from(octets)))).ok()
}

/// Parses the flood entry of a `NEW_NEIGHBOUR` message: an all-zero FDB entry, whose destination receives broadcast and
/// unknown unicast frames. None for other entries, such as the learned one of each station.
pub fn parse_flood(body: &[u8]) -> Option<FloodEntry> {
    const NDA_DST: u16 = 1;
    const NDA_LLADDR: u16 = 2;

    if body.first() != Some(&BRIDGE) {
        return None;
    }
    let all: BTreeMap<u16, &[u8]> = parse_attributes(body.get(12..)?).collect();
    let all_zero = all.get(&NDA_LLADDR).is_some_and(|mac| mac.iter().all(|&byte| byte == 0));
    let to = all.get(&NDA_DST).and_then(|bytes| parse_ip(bytes)).filter(|_| all_zero)?;
    Some(FloodEntry { link: u32_at(body, 4)?, to })
}

/// The output link of a `NEW_ROUTE` message that answers a lookup of one address.
pub fn route_oif(body: &[u8]) -> Option<u32> {
    const RTA_OIF: u16 = 4;
    let (_, link) = parse_attributes(body.get(12..)?).find(|(kind, _)| *kind == RTA_OIF)?;
    u32_at(link, 0)
}

/// Parses the link index and the address of a `NEW_ADDRESS` message.
pub fn parse_observed_address(body: &[u8]) -> Option<(u32, Address)> {
    const IFA_ADDRESS: u16 = 1;
    const IFA_LOCAL: u16 = 2;
    const IFA_FLAGS: u16 = 8;
    // The same bit means "secondary" for IPv4.
    const IFA_F_TEMPORARY: u32 = 1;

    let &[family, prefix, flags, _scope, ..] = body else {
        return None;
    };
    let all: BTreeMap<u16, &[u8]> = parse_attributes(body.get(8..)?).collect();
    // On a point-to-point link, ADDRESS is the peer's and LOCAL our own.
    let own = all.get(&IFA_LOCAL).or_else(|| all.get(&IFA_ADDRESS))?;
    let ip = parse_ip(own).filter(|ip| family == if ip.is_ipv4() { INET } else { INET6 })?;
    let flags = all.get(&IFA_FLAGS).and_then(|value| u32_at(value, 0)).unwrap_or(u32::from(flags));
    let temporary = family == INET6 && flags & IFA_F_TEMPORARY != 0;
    Some((u32_at(body, 4)?, Address { net: IpNet::new(ip, prefix).ok()?, temporary }))
}

/// The output of a route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RouteOutput {
    /// The output links.
    Links(Vec<u32>),
    /// The ID of a nexthop object. The route itself names no link (`nexthop_compat_mode=0`).
    Nexthop(u32),
}

/// Parses a default route of the main table from a `NEW_ROUTE` message. None for other routes.
pub fn parse_default_route(body: &[u8]) -> Option<RouteOutput> {
    const RTA_TABLE: u16 = 15;
    const RTM_F_CLONED: u32 = 0x200;

    let &[family, 0, 0, _tos, table, _protocol, _scope, UNICAST, ..] = body else {
        return None;
    };
    let cloned = u32_at(body, 8).is_none_or(|flags| flags & RTM_F_CLONED != 0);
    if cloned || !matches!(family, INET | INET6) {
        return None;
    }
    let attributes = parse_attributes(body.get(12..).unwrap_or_default());
    let number = attributes.filter(|(kind, _)| *kind == RTA_TABLE).find_map(|(_, value)| u32_at(value, 0));
    if number.unwrap_or(u32::from(table)) != u32::from(MAIN) {
        return None;
    }
    route_output(body)
}

/// Parses all outputs of a unicast route from a `NEW_ROUTE` message. None for other types, such as local or unreachable.
pub fn parse_unicast_route(body: &[u8]) -> Option<RouteOutput> {
    (body.get(7) == Some(&UNICAST)).then(|| route_output(body)).flatten()
}

fn route_output(body: &[u8]) -> Option<RouteOutput> {
    const RTA_OIF: u16 = 4;
    const RTA_MULTIPATH: u16 = 9;
    const RTA_NH_ID: u16 = 30;

    let all: BTreeMap<u16, &[u8]> = parse_attributes(body.get(12..)?).collect();
    let number = |kind| all.get(&kind).and_then(|value| u32_at(value, 0));
    let mut links: Vec<u32> = number(RTA_OIF).into_iter().collect();
    links.extend(all.get(&RTA_MULTIPATH).into_iter().flat_map(|hops| multipath_links(hops)));
    match number(RTA_NH_ID) {
        Some(id) if links.is_empty() => Some(RouteOutput::Nexthop(id)),
        _ => Some(RouteOutput::Links(links)),
    }
}

/// A nexthop object, to which routes refer by ID.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nexthop {
    pub id: u32,
    /// The output link. None for a group.
    pub link: Option<u32>,
    /// The IDs of the members, if it is a group.
    pub members: Vec<u32>,
}

/// Parses a `NEW_NEXTHOP` message.
pub fn parse_nexthop(body: &[u8]) -> Option<Nexthop> {
    const NHA_ID: u16 = 1;
    const NHA_GROUP: u16 = 2;
    const NHA_OIF: u16 = 5;
    /// `struct nexthop_grp`: ID, weight, padding.
    const MEMBER_LEN: usize = 8;

    let all: BTreeMap<u16, &[u8]> = parse_attributes(body.get(8..)?).collect();
    let number = |kind| all.get(&kind).and_then(|value| u32_at(value, 0));
    let group = all.get(&NHA_GROUP).into_iter().flat_map(|group| group.chunks_exact(MEMBER_LEN));
    Some(Nexthop {
        id: number(NHA_ID)?,
        link: number(NHA_OIF),
        members: group.filter_map(|member| u32_at(member, 0)).collect(),
    })
}

/// The output links of a multipath route.
fn multipath_links(mut bytes: &[u8]) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let length = usize::from(u16_at(bytes, 0)?);
        let index = u32_at(bytes.get(..length)?, 4)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(index)
    })
}

/// Whether an event can change the observed state. Most route and neighbour events cannot, and they are frequent, for
/// example on nodes that run BGP.
pub fn affects_observed(message: &NetlinkMessage<'_>) -> bool {
    match message.kind {
        NEW_ROUTE | DELETE_ROUTE => message.body.get(1) == Some(&0),
        NEW_NEIGHBOUR | DELETE_NEIGHBOUR => parse_flood(message.body).is_some(),
        _ => true,
    }
}

/// Decodes a string of the kernel. Invalid UTF-8, control characters, white space other than spaces, and the
/// backslash are written as `\xNN`, so that the text is safe on a terminal and two different names never look the same.
fn escape_text(bytes: &[u8]) -> String {
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
    fn names_that_are_not_utf8_are_escaped_and_stay_distinct() {
        for (bytes, expected) in [
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
            assert_eq!(escape_text(bytes), expected);
        }
    }

    #[test]
    fn of_all_route_events_only_those_of_default_routes_are_relevant() {
        let event = |kind, body| affects_observed(&NetlinkMessage { kind, flags: 0, sequence: 0, body });
        assert!(event(NEW_LINK, &[]));
        assert!(event(NEW_ROUTE, &[INET, 0, 0]));
        assert!(event(DELETE_ROUTE, &[INET6, 0, 0]));
        assert!(!event(NEW_ROUTE, &[INET, 24, 0]));
        assert!(!event(NEW_ROUTE, &[]));
    }

    #[test]
    fn of_all_neighbour_events_only_those_of_flood_entries_are_relevant() {
        let event = |family: u8, mac: [u8; 6]| {
            let mut body = vec![family, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0];
            for (kind, value) in [(1_u16, &[10, 0, 0, 7][..]), (2, &mac)] {
                body.extend(u16::try_from(4 + value.len()).unwrap().to_ne_bytes());
                body.extend(kind.to_ne_bytes());
                body.extend(value);
                body.resize(body.len().next_multiple_of(4), 0);
            }
            affects_observed(&NetlinkMessage { kind: NEW_NEIGHBOUR, flags: 0, sequence: 0, body: &body })
        };
        assert!(event(BRIDGE, [0; 6]));
        assert!(!event(BRIDGE, [2, 0, 0, 0, 0, 1]));
        assert!(!event(INET, [0; 6]));
    }

    #[test]
    fn a_multipath_default_route_has_all_its_output_links() {
        let mut body = vec![INET, 0, 0, 0, MAIN, 0, 0, UNICAST, 0, 0, 0, 0];
        body.extend(20_u16.to_ne_bytes());
        body.extend(9_u16.to_ne_bytes());
        for index in [7_u32, 9] {
            body.extend(8_u16.to_ne_bytes());
            body.extend([0, 0]);
            body.extend(index.to_ne_bytes());
        }
        assert_eq!(parse_default_route(&body), Some(RouteOutput::Links(vec![7, 9])));
        body[4] = 255;
        assert_eq!(parse_default_route(&body), None);
    }

    #[test]
    fn a_request_parses_back_to_its_parts() {
        let bytes = get_routes(7, INET6);
        let read: Vec<NetlinkMessage<'_>> = parse_messages(&bytes).collect();
        let body = [INET6, 0, 0, 0, MAIN, 0, 0, UNICAST, 0, 0, 0, 0];
        assert_eq!(read, [NetlinkMessage { kind: GET_ROUTE, flags: DUMP, sequence: 7, body: &body }]);
    }

    proptest! {
        #[test]
        fn parsers_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            for message in parse_messages(&bytes) {
                affects_observed(&message);
            }
            parse_link(&bytes);
            parse_observed_address(&bytes);
            parse_default_route(&bytes);
            parse_unicast_route(&bytes);
            parse_nexthop(&bytes);
            parse_flood(&bytes);
            route_oif(&bytes);
            parse_vxlan(&bytes);
            parse_ipv6_disabled(&bytes);
            parse_ipv4_isolated(&bytes);
            error_code(&bytes);
            escape_text(&bytes);
        }

        #[test]
        fn two_different_names_never_look_the_same(a in "[\\x01-\\u{ff}]{0,6}", b in "[\\x01-\\u{ff}]{0,6}") {
            prop_assert_eq!(escape_text(a.as_bytes()) == escape_text(b.as_bytes()), a == b);
        }
    }
}
