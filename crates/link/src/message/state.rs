//! What one link has in detail: addresses with where they come from, routes, whether it forwards as a port.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;

use super::{INET, INET6, MAIN, UNICAST, attributes, ip, u32_at};

/// An address, and the link that has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placed {
    pub link: u32,
    pub net: IpNet,
    /// Whether somebody gave it for good; what a router or a lease gives ends one day.
    pub permanent: bool,
}

/// An address out of a `NEW_ADDRESS` message.
pub fn placed(body: &[u8]) -> Option<Placed> {
    const IFA_FLAGS: u16 = 8;
    const IFA_F_PERMANENT: u32 = 0x80;

    let (link, address) = super::address(body)?;
    let header = body.get(2).copied().map(u32::from)?;
    let flags = attributes(body.get(8..)?).find(|(kind, _)| *kind == IFA_FLAGS);
    let flags = flags.and_then(|(_, value)| u32_at(value, 0)).unwrap_or(header);
    Some(Placed { link, net: address.net, permanent: flags & IFA_F_PERMANENT != 0 })
}

/// A route, and where it leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Standing {
    pub dst: IpNet,
    pub gw: Option<IpAddr>,
    /// None if it has several hops.
    pub link: Option<u32>,
}

/// A unicast route of the main table out of a `NEW_ROUTE` message. None for other routes.
pub fn standing(body: &[u8]) -> Option<Standing> {
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
    let all: BTreeMap<u16, &[u8]> = attributes(body.get(12..)?).collect();
    let number = |kind| all.get(&kind).and_then(|value| u32_at(value, 0));
    if number(RTA_TABLE).unwrap_or(u32::from(table)) != u32::from(MAIN) {
        return None;
    }
    // A route to everywhere names no destination.
    let everywhere = match family {
        INET => IpAddr::from(Ipv4Addr::UNSPECIFIED),
        INET6 => IpAddr::from(Ipv6Addr::UNSPECIFIED),
        _ => return None,
    };
    let dst = match all.get(&RTA_DST) {
        Some(bytes) => ip(bytes).filter(|dst| dst.is_ipv4() == everywhere.is_ipv4())?,
        None => everywhere,
    };
    // A gateway of the other family comes with its family before it.
    let via = || all.get(&RTA_VIA).and_then(|value| ip(value.get(2..)?));
    let gw = all.get(&RTA_GATEWAY).and_then(|bytes| ip(bytes)).or_else(via);
    Some(Standing { dst: IpNet::new(dst, prefix).ok()?, gw, link: number(RTA_OIF) })
}

/// Whether packets stay here, out of a `NEW_ROUTE` message that answers a question for one address.
pub fn stays(body: &[u8]) -> bool {
    /// `RTN_LOCAL`
    const LOCAL: u8 = 2;
    body.get(7) == Some(&LOCAL)
}

/// Whether a link forwards as a port of a bridge, out of a `NEW_LINK` message. None if it is no port.
pub fn forwards(body: &[u8]) -> Option<bool> {
    const IFLA_LINKINFO: u16 = 18;
    const IFLA_INFO_SLAVE_DATA: u16 = 5;
    const IFLA_BRPORT_STATE: u16 = 1;
    /// `BR_STATE_FORWARDING`
    const FORWARDING: u8 = 3;

    let within = |bytes, wanted| {
        attributes(bytes).find(|(kind, _)| *kind == wanted).map(|(_, value): (u16, &[u8])| value)
    };
    let port = within(within(body.get(16..)?, IFLA_LINKINFO)?, IFLA_INFO_SLAVE_DATA)?;
    within(port, IFLA_BRPORT_STATE)?.first().map(|&state| state == FORWARDING)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn with(mut fixed: Vec<u8>, all: &[(u16, &[u8])]) -> Vec<u8> {
        for (kind, value) in all {
            fixed.extend(u16::try_from(4 + value.len()).unwrap().to_ne_bytes());
            fixed.extend(kind.to_ne_bytes());
            fixed.extend(*value);
            fixed.resize(fixed.len().next_multiple_of(4), 0);
        }
        fixed
    }

    #[test]
    fn an_address_is_permanent_by_its_long_flags_if_it_has_them() {
        let body = |flags, all: &[(u16, &[u8])]| {
            let mut attributes = vec![(2, &[10, 0, 0, 7][..])];
            attributes.extend(all);
            with([vec![INET, 24, flags, 0], 9_u32.to_ne_bytes().to_vec()].concat(), &attributes)
        };
        let permanent =
            |bytes: &[u8]| placed(bytes).map(|one| (one.link, one.net.to_string(), one.permanent));
        let net = || "10.0.0.7/24".to_owned();
        assert_eq!(permanent(&body(0x80, &[])), Some((9, net(), true)));
        assert_eq!(permanent(&body(0, &[])), Some((9, net(), false)));
        assert_eq!(permanent(&body(0x80, &[(8, &0x200_u32.to_ne_bytes())])), Some((9, net(), false)));
        assert_eq!(permanent(&[]), None);
    }

    #[test]
    fn a_route_is_read_with_and_without_its_parts() {
        let header = |family, prefix, table| vec![family, prefix, 0, 0, table, 0, 0, UNICAST, 0, 0, 0, 0];
        let link = 7_u32.to_ne_bytes();
        let told = |bytes: &[u8]| {
            standing(bytes).map(|one| (one.dst.to_string(), one.gw.map(|gw| gw.to_string()), one.link))
        };
        let default = with(header(INET, 0, MAIN), &[(4, &link), (5, &[10, 0, 0, 1])]);
        assert_eq!(told(&default), Some(("0.0.0.0/0".into(), Some("10.0.0.1".into()), Some(7))));
        let other_family = with(header(INET, 8, MAIN), &[(1, &[10, 0, 0, 0]), (18, &[10; 18])]);
        let gateway = Some("a0a:a0a:a0a:a0a:a0a:a0a:a0a:a0a".into());
        assert_eq!(told(&other_family), Some(("10.0.0.0/8".into(), gateway, None)));
        let on_link = with(header(INET6, 64, MAIN), &[(1, &[0xfd; 16]), (4, &link)]);
        assert_eq!(told(&on_link).map(|(_, gw, link)| (gw, link)), Some((None, Some(7))));
        assert_eq!(told(&with(header(INET, 0, 255), &[])), None);
        assert_eq!(told(&with(header(INET, 8, MAIN), &[(1, &[0xfd; 16])])), None);
        assert_eq!(told(&with(header(INET, 200, MAIN), &[])), None);
    }

    proptest! {
        #[test]
        fn no_bytes_make_a_reader_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            placed(&bytes);
            standing(&bytes);
            forwards(&bytes);
            stays(&bytes);
        }
    }
}
