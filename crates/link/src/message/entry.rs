//! Parsers for single addresses, routes and the state of bridge ports.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;

use super::{INET, INET6, MAIN, UNICAST, parse_attributes, parse_ip, u32_at};

/// An address of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddressEntry {
    pub link: u32,
    pub net: IpNet,
    /// Whether it has no lifetime, unlike addresses from router advertisements or DHCP.
    pub permanent: bool,
}

/// Parses a `NEW_ADDRESS` message.
pub fn parse_address(body: &[u8]) -> Option<AddressEntry> {
    const IFA_FLAGS: u16 = 8;
    const IFA_F_PERMANENT: u32 = 0x80;

    let (link, address) = super::parse_observed_address(body)?;
    let short_flags = body.get(2).copied().map(u32::from)?;
    let flags = parse_attributes(body.get(8..)?).find(|(kind, _)| *kind == IFA_FLAGS);
    let flags = flags.and_then(|(_, value)| u32_at(value, 0)).unwrap_or(short_flags);
    Some(AddressEntry { link, net: address.net, permanent: flags & IFA_F_PERMANENT != 0 })
}

/// A route of the main table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouteEntry {
    pub dst: IpNet,
    pub gw: Option<IpAddr>,
    /// The output link. None for a multipath route.
    pub link: Option<u32>,
}

/// Parses a unicast route of the main table from a `NEW_ROUTE` message. None for other routes.
pub fn parse_route(body: &[u8]) -> Option<RouteEntry> {
    const RTA_DST: u16 = 1;
    const RTA_OIF: u16 = 4;
    const RTA_GATEWAY: u16 = 5;
    const RTA_TABLE: u16 = 15;
    const RTA_VIA: u16 = 18;
    const RTM_F_CLONED: u32 = 0x200;

    let &[family, prefix, _src, _tos, table, _protocol, _scope, UNICAST, ..] = body else {
        return None;
    };
    if u32_at(body, 8)? & RTM_F_CLONED != 0 {
        return None;
    }
    let all: BTreeMap<u16, &[u8]> = parse_attributes(body.get(12..)?).collect();
    let number = |kind| all.get(&kind).and_then(|value| u32_at(value, 0));
    if number(RTA_TABLE).unwrap_or(u32::from(table)) != u32::from(MAIN) {
        return None;
    }
    // A default route has no destination attribute.
    let unspecified = match family {
        INET => IpAddr::from(Ipv4Addr::UNSPECIFIED),
        INET6 => IpAddr::from(Ipv6Addr::UNSPECIFIED),
        _ => return None,
    };
    let dst = match all.get(&RTA_DST) {
        Some(bytes) => parse_ip(bytes).filter(|dst| dst.is_ipv4() == unspecified.is_ipv4())?,
        None => unspecified,
    };
    // RTA_VIA holds a gateway of the other family, after two bytes that name the family.
    let via = || all.get(&RTA_VIA).and_then(|value| parse_ip(value.get(2..)?));
    let gw = all.get(&RTA_GATEWAY).and_then(|bytes| parse_ip(bytes)).or_else(via);
    Some(RouteEntry { dst: IpNet::new(dst, prefix).ok()?, gw, link: number(RTA_OIF) })
}

/// Whether the `NEW_ROUTE` response to a lookup of one address means local delivery.
pub fn is_local_route(body: &[u8]) -> bool {
    /// `RTN_LOCAL`
    const LOCAL: u8 = 2;
    body.get(7) == Some(&LOCAL)
}

/// Whether a bridge port forwards, from a `NEW_LINK` message. None if the link is not a bridge port.
pub fn port_forwards(body: &[u8]) -> Option<bool> {
    const IFLA_LINKINFO: u16 = 18;
    const IFLA_INFO_SLAVE_DATA: u16 = 5;
    const IFLA_BRPORT_STATE: u16 = 1;
    /// `BR_STATE_FORWARDING`
    const FORWARDING: u8 = 3;

    let find = |bytes, attribute| {
        parse_attributes(bytes).find(|(kind, _)| *kind == attribute).map(|(_, value): (u16, &[u8])| value)
    };
    let port = find(find(body.get(16..)?, IFLA_LINKINFO)?, IFLA_INFO_SLAVE_DATA)?;
    find(port, IFLA_BRPORT_STATE)?.first().map(|&state| state == FORWARDING)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn with_attributes(mut fixed: Vec<u8>, all: &[(u16, &[u8])]) -> Vec<u8> {
        for (kind, value) in all {
            fixed.extend(u16::try_from(4 + value.len()).unwrap().to_ne_bytes());
            fixed.extend(kind.to_ne_bytes());
            fixed.extend(*value);
            fixed.resize(fixed.len().next_multiple_of(4), 0);
        }
        fixed
    }

    #[test]
    fn the_flags_attribute_of_an_address_overrides_its_header() {
        let body = |flags, all: &[(u16, &[u8])]| {
            let mut attributes = vec![(2, &[10, 0, 0, 7][..])];
            attributes.extend(all);
            with_attributes([vec![INET, 24, flags, 0], 9_u32.to_ne_bytes().to_vec()].concat(), &attributes)
        };
        let permanent = |bytes: &[u8]| {
            parse_address(bytes).map(|entry| (entry.link, entry.net.to_string(), entry.permanent))
        };
        let net = || "10.0.0.7/24".to_owned();
        assert_eq!(permanent(&body(0x80, &[])), Some((9, net(), true)));
        assert_eq!(permanent(&body(0, &[])), Some((9, net(), false)));
        assert_eq!(permanent(&body(0x80, &[(8, &0x200_u32.to_ne_bytes())])), Some((9, net(), false)));
        assert_eq!(permanent(&[]), None);
    }

    #[test]
    fn parses_routes_with_and_without_optional_attributes() {
        let header = |family, prefix, table| vec![family, prefix, 0, 0, table, 0, 0, UNICAST, 0, 0, 0, 0];
        let link = 7_u32.to_ne_bytes();
        let parsed = |bytes: &[u8]| {
            parse_route(bytes)
                .map(|entry| (entry.dst.to_string(), entry.gw.map(|gw| gw.to_string()), entry.link))
        };
        let default = with_attributes(header(INET, 0, MAIN), &[(4, &link), (5, &[10, 0, 0, 1])]);
        assert_eq!(parsed(&default), Some(("0.0.0.0/0".into(), Some("10.0.0.1".into()), Some(7))));
        let other_family = with_attributes(header(INET, 8, MAIN), &[(1, &[10, 0, 0, 0]), (18, &[10; 18])]);
        let gateway = Some("a0a:a0a:a0a:a0a:a0a:a0a:a0a:a0a".into());
        assert_eq!(parsed(&other_family), Some(("10.0.0.0/8".into(), gateway, None)));
        let on_link = with_attributes(header(INET6, 64, MAIN), &[(1, &[0xfd; 16]), (4, &link)]);
        assert_eq!(parsed(&on_link).map(|(_, gw, link)| (gw, link)), Some((None, Some(7))));
        assert_eq!(parsed(&with_attributes(header(INET, 0, 255), &[])), None);
        assert_eq!(parsed(&with_attributes(header(INET, 8, MAIN), &[(1, &[0xfd; 16])])), None);
        assert_eq!(parsed(&with_attributes(header(INET, 200, MAIN), &[])), None);
    }

    proptest! {
        #[test]
        fn parsers_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            parse_address(&bytes);
            parse_route(&bytes);
            port_forwards(&bytes);
            is_local_route(&bytes);
        }
    }
}
