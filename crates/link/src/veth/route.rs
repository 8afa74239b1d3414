//! Routes through the pod end.

use std::{fmt, net::IpAddr};

use ipnet::IpNet;
use nix::errno::Errno;

use super::{Error, is};
use crate::{
    message::{self, INET, INET6, MAIN, NEW_ROUTE, RouteEntry, UNICAST},
    netlink::{Netlink, empty_if_unsupported},
    request::{CREATE, NetlinkRequest, address_parts, link_header},
};

/// A route through the pod end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    pub dst: IpNet,
    /// None if the destination is on the link.
    pub gw: Option<IpAddr>,
}

impl Route {
    /// Whether destination and gateway are of the same IP family.
    pub(super) fn is_single_family(&self) -> bool {
        self.gw.is_none_or(|gw| gw.is_ipv4() == self.dst.addr().is_ipv4())
    }

    pub(super) fn is_ipv6(&self) -> bool {
        self.dst.addr().is_ipv6()
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.dst.trunc())?;
        self.gw.map_or(Ok(()), |gw| write!(f, " via {gw}"))
    }
}

/// Adds a route through the link, which must be up. Succeeds if the route exists, and fails if another route to the
/// same destination does.
pub fn add(pod_netlink: &mut Netlink, link: u32, route: &Route) -> Result<(), Error> {
    const UNREACHABLE: [Errno; 3] = [Errno::ENETUNREACH, Errno::EHOSTUNREACH, Errno::EINVAL];

    match (pod_netlink.execute("add a route", request(link, route)), route.gw) {
        (Err(error), _) if is(&error, Errno::EEXIST) => match lookup(pod_netlink, link, route)? {
            RouteLookup::Same => Ok(()),
            RouteLookup::Other(via) => Err(Error::RouteConflict { dst: route.dst.trunc(), via }),
            // Deleted in between.
            RouteLookup::Missing => Err(error.into()),
        },
        (Err(source), Some(gw)) if UNREACHABLE.iter().any(|&errno| is(&source, errno)) => {
            Err(Error::GatewayUnreachable { gw, dst: route.dst.trunc(), source })
        }
        (result, _) => Ok(result?),
    }
}

fn request(link: u32, route: &Route) -> NetlinkRequest {
    const RTA_DST: u16 = 1;
    const RTA_OIF: u16 = 4;
    const RTA_GATEWAY: u16 = 5;
    /// `RTPROT_STATIC`
    const PROTO_STATIC: u8 = 4;
    /// `RT_SCOPE_LINK`
    const SCOPE_LINK: u8 = 253;

    let dst = route.dst.trunc();
    let (family, _, bytes) = address_parts(dst.addr());
    let scope = if route.gw.is_none() && family == INET { SCOPE_LINK } else { 0 };
    let header = [family, dst.prefix_len(), 0, 0, MAIN, PROTO_STATIC, scope, UNICAST, 0, 0, 0, 0];
    let request =
        NetlinkRequest::new(NEW_ROUTE, CREATE, &header).attribute(RTA_DST, &bytes).number(RTA_OIF, link);
    match route.gw {
        Some(gw) => request.attribute(RTA_GATEWAY, &address_parts(gw).2),
        None => request,
    }
}

/// Whether the desired route exists.
pub enum RouteLookup {
    Same,
    /// Another route to the same destination, described like `ip route` does.
    Other(String),
    Missing,
}

/// Looks up the desired route.
pub fn lookup(pod_netlink: &mut Netlink, link: u32, route: &Route) -> Result<RouteLookup, crate::Error> {
    let dst = route.dst.trunc();
    let family = if route.is_ipv6() { INET6 } else { INET };
    let all = empty_if_unsupported(pod_netlink.dump(
        "list routes",
        |sequence| message::get_routes(sequence, family),
        |message| {
            let entry = (message.kind == NEW_ROUTE).then(|| message::parse_route(message.body)).flatten()?;
            (entry.dst == dst).then_some(entry)
        },
    ))?;
    if all.iter().any(|one| (one.link, one.gw) == (Some(link), route.gw)) {
        return Ok(RouteLookup::Same);
    }
    // The kernel uses the first of several.
    match all.first() {
        Some(other) => Ok(RouteLookup::Other(describe_hop(pod_netlink, other)?)),
        None => Ok(RouteLookup::Missing),
    }
}

/// The next hop of a route, such as `via 10.0.0.1 dev eth0`.
fn describe_hop(pod_netlink: &mut Netlink, route: &RouteEntry) -> Result<String, crate::Error> {
    let Some(link) = route.link else { return Ok("with several next hops".to_owned()) };
    let request = NetlinkRequest::new(message::GET_LINK, super::GET, &link_header(link, 0, 0));
    let name = pod_netlink.get("get link", request, |message| {
        (message.kind == message::NEW_LINK).then(|| message::parse_link(message.body)).flatten()
    })?;
    let dev = name.map_or_else(|| format!("link {link}"), |link| link.name);
    Ok(route.gw.map_or_else(|| format!("dev {dev}"), |gw| format!("via {gw} dev {dev}")))
}
