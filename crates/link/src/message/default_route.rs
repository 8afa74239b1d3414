//! Default routes as they are listed, in a form that can be sent back to the kernel.

use std::net::IpAddr;

use super::{INET, INET6, RouteOutput, parse_attributes, parse_default_route, parse_ip, u16_at, u32_at};

const ROUTE_HEADER_LEN: usize = 12;
const NEXTHOP_HEADER_LEN: usize = 8;
/// `RTNH_F_ONLINK`: the only flag that a request may have. The others report state.
const ONLINK: u8 = 4;

const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const RTA_PRIORITY: u16 = 6;
const RTA_PREFSRC: u16 = 7;
const RTA_METRICS: u16 = 8;
const RTA_MULTIPATH: u16 = 9;
const RTA_FLOW: u16 = 11;
const RTA_VIA: u16 = 18;
const RTA_PREF: u16 = 20;
const RTA_ENCAP_TYPE: u16 = 21;
const RTA_ENCAP: u16 = 22;
const RTA_NH_ID: u16 = 30;

/// A default route of the main table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedDefaultRoute {
    pub family: u8,
    pub protocol: u8,
    pub metric: u32,
    /// None for a multipath route, a nexthop object, and a route without a gateway.
    pub gateway: Option<IpAddr>,
    /// The output links. Empty if the route only names a nexthop object.
    pub links: Vec<u32>,
    /// The body of a request that adds or deletes exactly this route.
    pub request: Vec<u8>,
}

/// Parses a unicast default route of the main table from a `NEW_ROUTE` message. None for other routes.
pub fn parse_listed_default_route(body: &[u8]) -> Option<ListedDefaultRoute> {
    let output = parse_default_route(body)?;
    let header: [u8; ROUTE_HEADER_LEN] = *body.first_chunk()?;
    let family = header[0];
    let rest = body.get(ROUTE_HEADER_LEN..)?;
    let find = |wanted| parse_attributes(rest).find(|(kind, _)| *kind == wanted).map(|(_, value)| value);
    Some(ListedDefaultRoute {
        family,
        protocol: header[5],
        metric: find(RTA_PRIORITY).and_then(|value| u32_at(value, 0)).unwrap_or(0),
        gateway: find(RTA_GATEWAY).and_then(parse_ip),
        links: match output {
            RouteOutput::Links(links) => links,
            RouteOutput::Nexthop(_) => Vec::new(),
        },
        request: request_body(header, rest).filter(|_| matches!(family, INET | INET6))?,
    })
}

/// Keeps what the kernel accepts in a request: no state flags, no statistics.
fn request_body(header: [u8; ROUTE_HEADER_LEN], rest: &[u8]) -> Option<Vec<u8>> {
    let mut request = header.to_vec();
    // Native byte order, but all known flags of a nexthop are in one byte, and the others are state.
    let flags = u32_at(&header, 8)? & u32::from(ONLINK);
    request.get_mut(8..)?.copy_from_slice(&flags.to_ne_bytes());
    // A route with a nexthop object also lists what the object contains, which a request must not.
    let by_object = parse_attributes(rest).any(|(kind, _)| kind == RTA_NH_ID);
    for (kind, value) in raw_attributes(rest) {
        let value = match kind & 0x3fff {
            RTA_OIF | RTA_GATEWAY | RTA_VIA | RTA_MULTIPATH | RTA_ENCAP_TYPE | RTA_ENCAP if by_object => {
                continue;
            }
            RTA_MULTIPATH => without_state(value)?,
            RTA_OIF | RTA_GATEWAY | RTA_PRIORITY | RTA_PREFSRC | RTA_METRICS | RTA_FLOW | RTA_VIA
            | RTA_PREF | RTA_ENCAP_TYPE | RTA_ENCAP | RTA_NH_ID => value.to_vec(),
            _ => continue,
        };
        request.extend(u16::try_from(4 + value.len()).ok()?.to_ne_bytes());
        request.extend(kind.to_ne_bytes());
        request.extend(value);
        request.resize(request.len().next_multiple_of(4), 0);
    }
    Some(request)
}

/// The next hops of a multipath route without their state flags.
fn without_state(hops: &[u8]) -> Option<Vec<u8>> {
    let mut hops = hops.to_vec();
    let mut at = 0;
    while let Some(length) = u16_at(&hops, at).map(usize::from) {
        if length < NEXTHOP_HEADER_LEN || at + length > hops.len() {
            return None;
        }
        *hops.get_mut(at + 2)? &= ONLINK;
        at += length.next_multiple_of(4);
    }
    Some(hops)
}

/// The attributes with the flag bits of their kinds.
fn raw_attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::from(u16_at(bytes, 0)?);
        let (kind, value) = (u16_at(bytes, 2)?, bytes.get(4..length)?);
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::message::{MAIN, UNICAST};

    fn route(flags: u32, attributes: &[(u16, &[u8])]) -> Vec<u8> {
        let mut body = vec![INET, 0, 0, 0, MAIN, 3, 0, UNICAST];
        body.extend(flags.to_ne_bytes());
        for (kind, value) in attributes {
            body.extend(u16::try_from(4 + value.len()).unwrap().to_ne_bytes());
            body.extend(kind.to_ne_bytes());
            body.extend(*value);
            body.resize(body.len().next_multiple_of(4), 0);
        }
        body
    }

    #[test]
    fn a_request_repeats_the_route_without_its_state() {
        let link = 7_u32.to_ne_bytes();
        let kept: &[(u16, &[u8])] = &[(5, &[10, 0, 0, 1]), (4, &link), (6, &100_u32.to_ne_bytes())];
        // Linkdown and dead, with statistics and the table.
        let mut listed = kept.to_vec();
        let table = 254_u32.to_ne_bytes();
        listed.extend([(15, &table[..]), (12, &[0; 32])]);
        let parsed = parse_listed_default_route(&route(4 | 1 | 16, &listed)).unwrap();
        assert_eq!(parsed.request, route(4, kept));
        assert_eq!((parsed.protocol, parsed.metric, parsed.links), (3, 100, vec![7]));
        assert_eq!(parsed.gateway, Some([10, 0, 0, 1].into()));
    }

    #[test]
    fn the_state_of_each_next_hop_is_left_out() {
        let hop = |flags: u8, link: u8| [8, 0, flags, 0, link, 0, 0, 0];
        let hops = |flags| [hop(flags, 7), hop(flags, 9)].concat();
        let parsed = parse_listed_default_route(&route(0, &[(9, &hops(4 | 16))])).unwrap();
        assert_eq!(parsed.request, route(0, &[(9, &hops(4))]));
        assert_eq!((parsed.gateway, parsed.links), (None, vec![7, 9]));
        assert_eq!(parse_listed_default_route(&route(0, &[(9, &[4, 0, 0, 0, 7, 0, 0, 0])])), None);
    }

    #[test]
    fn a_route_with_a_nexthop_object_names_only_the_object() {
        let id = 12_u32.to_ne_bytes();
        let listed = route(0, &[(30, &id), (5, &[10, 0, 0, 1]), (4, &7_u32.to_ne_bytes())]);
        let parsed = parse_listed_default_route(&listed).unwrap();
        assert_eq!((parsed.request, parsed.links), (route(0, &[(30, &id)]), vec![7]));
    }

    proptest! {
        #[test]
        fn the_parser_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            parse_listed_default_route(&bytes);
            without_state(&bytes);
            parse_listed_default_route(&[route(0, &[]), bytes].concat());
        }
    }
}
