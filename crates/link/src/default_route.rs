//! The default routes of a pod: replaces them at plug, brings them back at unplug.
//!
//! Acts on the unicast default routes of the main table, on each IP family apart. The meaning is that of `default-route` at
//! pod start: the pod has one default route of a requested family, and it leads through this link. Multus also removes the
//! default routes of a family that has no gateway in the request; that leaves a dual-stack pod without one, and is not done
//! here.
//!
//! Routes from router advertisements (`proto ra`) are neither removed nor restored. The kernel owns them, and adds them
//! again at the next advertisement. A requested IPv6 route gets a metric below theirs, so that it is used.

use std::{collections::BTreeSet, net::IpAddr, os::fd::AsFd};

use nix::errno::Errno;
use serde::{Deserialize, Serialize};

use crate::{
    Error,
    message::{self, DELETE_ROUTE, INET, INET6, ListedDefaultRoute, MAIN, NEW_LINK, NEW_ROUTE, UNICAST},
    namespace,
    netlink::{Netlink, empty_if_unsupported},
    request::{CHANGE, NetlinkRequest, address_parts},
};

/// `CHANGE | NLM_F_CREATE`: the new route comes before others of the same metric (IPv4), or next to them (IPv6).
const PREPEND: u16 = 0x405;
/// `RTPROT_BOOT`, as routes of CNI plugins have.
const PROTO_BOOT: u8 = 3;
/// `RTPROT_RA`
const PROTO_RA: u8 = 9;
/// `IP6_RT_PRIO_USER`: the metric of an IPv6 route that asks for none.
const IPV6_METRIC: u32 = 1024;

/// A default route of a pod, with all that is needed to add it again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DefaultRoute {
    pub ipv6: bool,
    /// None for a multipath route, a nexthop object, and a route without a gateway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<IpAddr>,
    /// The indexes of the output links. Empty if the route only names a nexthop object.
    pub links: Vec<u32>,
    pub metric: u32,
    /// Who added it (`RTPROT_*`).
    pub protocol: u8,
    /// The body of the request that adds it, as hexadecimal digits.
    request: String,
}

/// What [`restore_default_routes`] did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RestoreOutcome {
    /// The routes that are there now.
    pub restored: Vec<DefaultRoute>,
    pub skipped: Vec<SkippedRoute>,
}

/// A route that was not restored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SkippedRoute {
    pub route: DefaultRoute,
    pub reason: SkipReason,
}

/// Why a route was not restored.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SkipReason {
    #[error("link {link} of the route does not exist")]
    LinkGone { link: u32 },
    /// If one of the links is another attachment with a default route, the skipped route is what that one replaces now.
    #[error("the pod has another default route through link {}", join(.links))]
    OtherDefaultRoute { links: Vec<u32> },
    #[error("the kernel rejected the route: {message}")]
    Rejected { message: String },
    #[error("the record of the route is invalid")]
    Invalid,
}

fn join(links: &[u32]) -> String {
    links.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

/// Lists the default routes of a network namespace, also those from router advertisements. Blocks.
pub fn default_routes_in(namespace: impl AsFd) -> Result<Vec<DefaultRoute>, Error> {
    let mut netlink = namespace::within(namespace, Netlink::open)??;
    list(&mut netlink)
}

/// Makes each gateway the only default route of its family, through the link, and returns the routes through other links
/// that it removed. Blocks. The link must be up.
///
/// Does nothing for a family without a gateway. Adds first, so that the pod always has a default route, and removes nothing
/// if the kernel rejects a gateway.
pub fn replace_default_routes(
    namespace: impl AsFd,
    link: u32,
    gateways: &[IpAddr],
) -> Result<Vec<DefaultRoute>, Error> {
    for (family, is_family) in [("IPv4", IpAddr::is_ipv4 as fn(&IpAddr) -> bool), ("IPv6", IpAddr::is_ipv6)] {
        if gateways.iter().filter(|gateway| is_family(gateway)).count() > 1 {
            return Err(Error::SeveralGateways { family });
        }
    }
    // Not inside the other namespace: the socket stays there.
    let mut netlink = namespace::within(namespace, Netlink::open)??;
    let present = list(&mut netlink)?;
    let mut change = RouteChange { netlink, added: Vec::new(), removed: Vec::new() };
    match change.replace(&present, link, gateways) {
        Ok(()) => Ok(change.removed.into_iter().filter(|route| !route.is_only_through(link)).collect()),
        Err(error) => {
            change.undo();
            Err(error)
        }
    }
}

/// Removes the default routes of these families that lead only through the link, and returns them. Blocks.
pub fn remove_default_routes(
    namespace: impl AsFd,
    link: u32,
    ipv4: bool,
    ipv6: bool,
) -> Result<Vec<DefaultRoute>, Error> {
    let mut netlink = namespace::within(namespace, Netlink::open)??;
    let mut removed = Vec::new();
    for route in list(&mut netlink)? {
        let of_family = if route.ipv6 { ipv6 } else { ipv4 };
        if of_family && !route.is_advertised() && route.is_only_through(link) {
            remove(&mut netlink, &route)?;
            removed.push(route);
        }
    }
    Ok(removed)
}

/// Adds routes again that [`replace_default_routes`] removed, and removes the default routes through `unplugged`, which may
/// be gone. Blocks. A second call changes nothing.
///
/// Skips a route if its link is gone, or if the pod has another default route of its family that is not one of these.
pub fn restore_default_routes(
    namespace: impl AsFd,
    routes: &[DefaultRoute],
    unplugged: u32,
) -> Result<RestoreOutcome, Error> {
    let mut netlink = namespace::within(namespace, Netlink::open)??;
    let (own, others): (Vec<DefaultRoute>, Vec<DefaultRoute>) = list(&mut netlink)?
        .into_iter()
        .filter(|route| !route.is_advertised())
        .partition(|route| route.is_only_through(unplugged));
    let links = links(&mut netlink)?;
    let mut outcome = RestoreOutcome::default();
    // Each is added before the one before it, which gives the old order.
    for route in routes.iter().rev() {
        match restore(&mut netlink, route, routes, &others, &links)? {
            None => outcome.restored.push(route.clone()),
            Some(reason) => outcome.skipped.push(SkippedRoute { route: route.clone(), reason }),
        }
    }
    for route in &own {
        remove(&mut netlink, route)?;
    }
    Ok(outcome)
}

impl DefaultRoute {
    /// Whether it comes from a router advertisement. The kernel owns such a route.
    pub fn is_advertised(&self) -> bool {
        self.protocol == PROTO_RA
    }

    fn is_only_through(&self, link: u32) -> bool {
        self.links == [link]
    }

    /// Whether it leads through this link to this gateway, with this metric.
    fn leads(&self, link: u32, gateway: IpAddr, metric: u32) -> bool {
        self.is_only_through(link) && self.gateway == Some(gateway) && self.metric == metric
    }

    fn body(&self) -> Option<Vec<u8>> {
        let digits = self.request.as_bytes();
        let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
        let body: Vec<u8> = digits.chunks(2).map(byte).collect::<Option<_>>()?;
        // Only what the parser made: never a request for another kind of route.
        let parsed = DefaultRoute::from(message::parse_listed_default_route(&body)?);
        (parsed.request == self.request).then_some(body)
    }
}

impl From<ListedDefaultRoute> for DefaultRoute {
    fn from(listed: ListedDefaultRoute) -> Self {
        Self {
            ipv6: listed.family == INET6,
            gateway: listed.gateway,
            links: listed.links,
            metric: listed.metric,
            protocol: listed.protocol,
            request: to_hex(&listed.request),
        }
    }
}

fn to_hex(bytes: &[u8]) -> String {
    let digit = |nibble: u8| char::from_digit(nibble.into(), 16);
    bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]).filter_map(digit).collect()
}

/// The changes made so far, to undo them.
struct RouteChange {
    netlink: Netlink,
    added: Vec<NetlinkRequest>,
    removed: Vec<DefaultRoute>,
}

impl RouteChange {
    fn replace(&mut self, present: &[DefaultRoute], link: u32, gateways: &[IpAddr]) -> Result<(), Error> {
        let mut stale = Vec::new();
        for &gateway in gateways {
            let family = || present.iter().filter(move |route| route.ipv6 == gateway.is_ipv6());
            let advertised = family().filter(|route| route.is_advertised()).map(|route| route.metric).min();
            let metric = match (gateway, advertised) {
                (IpAddr::V4(_), _) => 0,
                (IpAddr::V6(_), None) => IPV6_METRIC,
                (IpAddr::V6(_), Some(lowest)) => lowest.saturating_sub(1).clamp(1, IPV6_METRIC),
            };
            if !family().any(|route| route.leads(link, gateway, metric)) {
                let request = |kind, flags| gateway_request(kind, flags, link, gateway, metric);
                self.netlink.execute("add the default route", request(NEW_ROUTE, PREPEND))?;
                self.added.push(request(DELETE_ROUTE, CHANGE));
            }
            let unwanted =
                |route: &&DefaultRoute| !route.is_advertised() && !route.leads(link, gateway, metric);
            stale.extend(family().filter(unwanted));
        }
        for route in stale {
            remove(&mut self.netlink, route)?;
            self.removed.push(route.clone());
        }
        Ok(())
    }

    /// Undoes as much as possible. The first error is the one to report.
    fn undo(&mut self) {
        for route in self.removed.iter().rev() {
            _ = add(&mut self.netlink, route);
        }
        for request in self.added.drain(..) {
            _ = self.netlink.execute("remove the default route", request);
        }
    }
}

fn gateway_request(kind: u16, flags: u16, link: u32, gateway: IpAddr, metric: u32) -> NetlinkRequest {
    const RTA_OIF: u16 = 4;
    const RTA_GATEWAY: u16 = 5;
    const RTA_PRIORITY: u16 = 6;

    let (family, _, bytes) = address_parts(gateway);
    let header = [family, 0, 0, 0, MAIN, PROTO_BOOT, 0, UNICAST, 0, 0, 0, 0];
    let request =
        NetlinkRequest::new(kind, flags, &header).attribute(RTA_GATEWAY, &bytes).number(RTA_OIF, link);
    if metric == 0 { request } else { request.number(RTA_PRIORITY, metric) }
}

fn list(netlink: &mut Netlink) -> Result<Vec<DefaultRoute>, Error> {
    let mut routes = Vec::new();
    for family in [INET, INET6] {
        let of_family = netlink.dump(
            "list routes",
            |sequence| message::get_routes(sequence, family),
            |message| {
                (message.kind == NEW_ROUTE)
                    .then(|| message::parse_listed_default_route(message.body))
                    .flatten()
                    .map(DefaultRoute::from)
            },
        );
        routes.extend(empty_if_unsupported(of_family)?);
    }
    Ok(routes)
}

fn links(netlink: &mut Netlink) -> Result<BTreeSet<u32>, Error> {
    let indexes = netlink.dump("list links", message::get_links, |message| {
        (message.kind == NEW_LINK).then(|| message::parse_link(message.body)).flatten().map(|link| link.index)
    })?;
    Ok(indexes.into_iter().collect())
}

/// Restores one of the recorded routes. Returns the reason if it is skipped.
fn restore(
    netlink: &mut Netlink,
    route: &DefaultRoute,
    recorded: &[DefaultRoute],
    others: &[DefaultRoute],
    links: &BTreeSet<u32>,
) -> Result<Option<SkipReason>, Error> {
    if others.contains(route) {
        return Ok(None);
    }
    if let Some(&link) = route.links.iter().find(|link| !links.contains(link)) {
        return Ok(Some(SkipReason::LinkGone { link }));
    }
    let foreign = |other: &&DefaultRoute| other.ipv6 == route.ipv6 && !recorded.contains(other);
    if let Some(other) = others.iter().find(foreign) {
        return Ok(Some(SkipReason::OtherDefaultRoute { links: other.links.clone() }));
    }
    match add(netlink, route) {
        Some(Ok(())) => Ok(None),
        Some(Err(Error::Rejected { kernel_text, source, .. })) => {
            let message = if kernel_text.is_empty() { source.to_string() } else { kernel_text };
            Ok(Some(SkipReason::Rejected { message }))
        }
        Some(Err(error)) => Err(error),
        None => Ok(Some(SkipReason::Invalid)),
    }
}

/// Adds a recorded route. None if the record is invalid.
fn add(netlink: &mut Netlink, route: &DefaultRoute) -> Option<Result<(), Error>> {
    let request = NetlinkRequest::new(NEW_ROUTE, PREPEND, &route.body()?);
    Some(match netlink.execute("restore the default route", request) {
        Err(error) if error.errno() == Some(Errno::EEXIST as i32) => Ok(()),
        result => result,
    })
}

/// Removes a listed route. Succeeds if it is gone.
fn remove(netlink: &mut Netlink, route: &DefaultRoute) -> Result<(), Error> {
    let Some(body) = route.body() else { return Ok(()) };
    match netlink.execute("remove the default route", NetlinkRequest::new(DELETE_ROUTE, CHANGE, &body)) {
        Err(error) if matches!(error.errno(), Some(errno) if errno == Errno::ESRCH as i32) => Ok(()),
        result => result,
    }
}
