//! The routes over the inner end.

use std::{fmt, net::IpAddr};

use ipnet::IpNet;
use nix::errno::Errno;

use super::{Error, is};
use crate::{
    dump::{Asker, none_if_unknown},
    message::{self, INET, INET6, MAIN, NEW_ROUTE, Standing, UNICAST},
    request::{CREATE, Request, link_header, wire},
};

/// A way to other networks over the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    pub dst: IpNet,
    /// None: everybody there is on the link.
    pub gw: Option<IpAddr>,
}

impl Route {
    /// Whether destination and gateway are of one family.
    pub(super) fn is_of_one_family(&self) -> bool {
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

/// Adds a route over the link, which must be up. One that is there is fine; one to the same place that leads elsewhere
/// is not.
pub fn put(inner: &mut Asker, link: u32, route: &Route) -> Result<(), Error> {
    const NO_SUCH_GATEWAY: [Errno; 3] = [Errno::ENETUNREACH, Errno::EHOSTUNREACH, Errno::EINVAL];

    match (inner.change("add a route", request(link, route)), route.gw) {
        (Err(error), _) if is(&error, Errno::EEXIST) => match look(inner, link, route)? {
            Found::Same => Ok(()),
            Found::Other(leads) => Err(Error::RouteTaken { dst: route.dst.trunc(), leads }),
            // It went in between.
            Found::Nothing => Err(error.into()),
        },
        (Err(source), Some(gw)) if NO_SUCH_GATEWAY.iter().any(|&errno| is(&source, errno)) => {
            Err(Error::Gateway { gw, dst: route.dst.trunc(), source })
        }
        (result, _) => Ok(result?),
    }
}

fn request(link: u32, route: &Route) -> Request {
    const RTA_DST: u16 = 1;
    const RTA_OIF: u16 = 4;
    const RTA_GATEWAY: u16 = 5;
    /// `RTPROT_STATIC`
    const STATIC: u8 = 4;
    /// `RT_SCOPE_LINK`
    const ON_LINK: u8 = 253;

    let dst = route.dst.trunc();
    let (family, _, bytes) = wire(dst.addr());
    let scope = if route.gw.is_none() && family == INET { ON_LINK } else { 0 };
    let header = [family, dst.prefix_len(), 0, 0, MAIN, STATIC, scope, UNICAST, 0, 0, 0, 0];
    let request = Request::new(NEW_ROUTE, CREATE, &header).attribute(RTA_DST, &bytes).number(RTA_OIF, link);
    match route.gw {
        Some(gw) => request.attribute(RTA_GATEWAY, &wire(gw).2),
        None => request,
    }
}

/// What is there where a route should be.
pub enum Found {
    Same,
    /// One to the same place that leads elsewhere: where, in words.
    Other(String),
    Nothing,
}

/// Looks for a route over the link.
pub fn look(inner: &mut Asker, link: u32, route: &Route) -> Result<Found, crate::Error> {
    let dst = route.dst.trunc();
    let family = if route.is_ipv6() { INET6 } else { INET };
    let all = none_if_unknown(inner.collect(
        "routes",
        |sequence| message::get_routes(sequence, family),
        |message| {
            let standing = (message.kind == NEW_ROUTE).then(|| message::standing(message.body)).flatten()?;
            (standing.dst == dst).then_some(standing)
        },
    ))?;
    if all.iter().any(|one| (one.link, one.gw) == (Some(link), route.gw)) {
        return Ok(Found::Same);
    }
    // Among several the kernel takes the first.
    match all.first() {
        Some(other) => Ok(Found::Other(leads(inner, other)?)),
        None => Ok(Found::Nothing),
    }
}

/// Where a route leads, in words.
fn leads(inner: &mut Asker, route: &Standing) -> Result<String, crate::Error> {
    let gateway = route.gw.map_or_else(|| "without gateway".to_owned(), |gw| format!("via {gw}"));
    let Some(link) = route.link else { return Ok("over several gateways".to_owned()) };
    let request = Request::new(message::GET_LINK, super::GET, &link_header(link, 0, 0));
    let name = inner.find("link", request, |message| {
        (message.kind == message::NEW_LINK).then(|| message::link(message.body)).flatten()
    })?;
    Ok(format!("{gateway} over {}", name.map_or_else(|| format!("link {link}"), |link| link.name)))
}
