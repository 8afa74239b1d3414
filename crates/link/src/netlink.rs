//! A blocking rtnetlink socket: dumps, single requests and acknowledgements.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
};

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};
use nix::{
    errno::Errno,
    libc::MSG_DONTWAIT,
    sys::{
        socket::{setsockopt, sockopt},
        time::TimeVal,
    },
};
use plan::nodenetwork::{FloodEntry, KernelState, Link};

use crate::{
    Error,
    message::{self, INET, INET6, NetlinkMessage, Nexthop, RouteOutput},
    request::{NetlinkRequest, address_parts},
};

/// The kernel fills at most 32 KiB per datagram.
const BUFFER_SIZE: usize = 64 * 1024;
/// How often an interrupted dump is tried. Then the last one is used as it is: the change that interrupted it also sends
/// an event, which leads to another observation.
const DUMP_ATTEMPTS: usize = 8;
const RECEIVE_TIMEOUT: TimeVal = TimeVal::new(5, 0);

/// A blocking rtnetlink socket. Asynchronous I/O would gain nothing: the kernel prepares the response inside the send
/// call.
pub struct Netlink {
    socket: Socket,
    sequence: u32,
    buffer: Vec<u8>,
    /// Whether the current observation contains an interrupted dump, which may be incomplete.
    partial: bool,
}

/// Whether a dump is a snapshot of one moment.
enum DumpState {
    Consistent,
    Interrupted,
}

impl Netlink {
    /// Opens the socket in the network namespace of the calling thread.
    pub fn open() -> Result<Self, Error> {
        let mut socket = Socket::new(NETLINK_ROUTE).map_err(Error::Open)?;
        socket.bind_auto().map_err(Error::Open)?;
        setsockopt(&socket, sockopt::ReceiveTimeout, &RECEIVE_TIMEOUT)
            .map_err(|errno| Error::Open(errno.into()))?;
        // The kernel then filters by table. Before Linux 4.20 it cannot, and the parsers filter.
        _ = socket.set_netlink_get_strict_chk(true);
        // Error texts in addition to the errno, since Linux 4.12.
        _ = socket.set_ext_ack(true);
        Ok(Self { socket, sequence: 0, buffer: vec![0; BUFFER_SIZE], partial: false })
    }

    /// The current links, addresses, default routes and flood entries.
    pub fn observe(&mut self) -> Result<KernelState, Error> {
        self.partial = false;
        let mut links = self.dump("list links", message::get_links, |message| {
            (message.kind == message::NEW_LINK).then(|| message::parse_link(message.body)).flatten()
        })?;
        let addresses = self.dump("list addresses", message::get_addresses, |message| {
            (message.kind == message::NEW_ADDRESS)
                .then(|| message::parse_observed_address(message.body))
                .flatten()
        })?;
        let mut routes = Vec::new();
        for family in [INET, INET6] {
            let of_family = self.dump(
                "list routes",
                |sequence| message::get_routes(sequence, family),
                |message| {
                    (message.kind == message::NEW_ROUTE)
                        .then(|| message::parse_default_route(message.body))
                        .flatten()
                },
            );
            routes.extend(empty_if_unsupported(of_family)?);
        }
        let default_routes = self.resolve(routes)?;

        // An address of a link that was created after the link dump is left for the next observation.
        let mut by_link = BTreeMap::new();
        for (index, address) in addresses {
            by_link.entry(index).or_insert_with(Vec::new).push(address);
        }
        for link in &mut links {
            link.addresses = by_link.remove(&link.index).unwrap_or_default();
        }
        let floods = self.floods(&links)?;
        Ok(KernelState { links, default_routes, peer_links: Vec::new(), floods, partial: self.partial })
    }

    /// The output links of the routes to these addresses, of all paths of a multipath route. Addresses without a route are
    /// skipped.
    pub fn route_links(&mut self, addresses: &[IpAddr]) -> Result<Vec<u32>, Error> {
        /// `RTM_F_FIB_MATCH`: return the matching route instead of the path that its hash selects. Since Linux 4.13.
        const FIB_MATCH: u32 = 0x2000;

        let mut routes = Vec::new();
        for &address in addresses {
            let route = self.route(address, FIB_MATCH, message::parse_unicast_route)?;
            routes.extend(route.flatten());
        }
        self.resolve(routes)
    }

    /// Looks up the route to an address. None if there is no route.
    pub fn route<T>(
        &mut self,
        address: IpAddr,
        flags: u32,
        parse: impl Fn(&[u8]) -> T,
    ) -> Result<Option<T>, Error> {
        const RTA_DST: u16 = 1;
        const REQUEST: u16 = 1;
        const NO_ROUTE: [Errno; 6] = [
            Errno::ENETUNREACH,
            Errno::EHOSTUNREACH,
            Errno::EACCES,
            Errno::EINVAL,
            Errno::EAFNOSUPPORT,
            Errno::EOPNOTSUPP,
        ];

        let (family, length, bytes) = address_parts(address);
        let mut header = [family, length, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        header[8..].copy_from_slice(&flags.to_ne_bytes());
        let request = NetlinkRequest::new(message::GET_ROUTE, REQUEST, &header).attribute(RTA_DST, &bytes);
        let route = self.exchange("look up the route to an address", request, |response| {
            (response.kind == message::NEW_ROUTE).then(|| parse(response.body))
        });
        match route {
            Err(Error::Rejected { source, .. })
                if NO_ROUTE.iter().any(|&errno| source.raw_os_error() == Some(errno as i32)) =>
            {
                Ok(None)
            }
            other => other,
        }
    }

    /// The flood entries of Patchbay's VXLAN devices. Other devices can have long lists.
    fn floods(&mut self, links: &[Link]) -> Result<Vec<FloodEntry>, Error> {
        let ours = |link: &&Link| link.vxlan.is_some() && link.alias.starts_with(api::LINK_ALIAS_PREFIX);
        let mut floods = Vec::new();
        for vxlan in links.iter().filter(ours) {
            let found = self.dump(
                "list flood entries",
                |sequence| message::get_forwarding(sequence, vxlan.index),
                |message| {
                    (message.kind == message::NEW_NEIGHBOUR)
                        .then(|| message::parse_flood(message.body))
                        .flatten()
                },
            );
            // The device may have been deleted meanwhile.
            let found = empty_if(found, &[Errno::ENODEV])?;
            // An older kernel does not filter by link.
            floods.extend(found.into_iter().filter(|flood| flood.link == vxlan.index));
        }
        Ok(floods)
    }

    /// The output links of routes. Nexthops are dumped only if a route names nothing but a nexthop.
    fn resolve(&mut self, routes: Vec<RouteOutput>) -> Result<Vec<u32>, Error> {
        let mut nexthops = Vec::new();
        if routes.iter().any(|route| matches!(route, RouteOutput::Nexthop(_))) {
            nexthops = self.dump("list nexthops", message::get_nexthops, |message| {
                (message.kind == message::NEW_NEXTHOP).then(|| message::parse_nexthop(message.body)).flatten()
            })?;
        }
        let nexthops: BTreeMap<u32, Nexthop> = nexthops.into_iter().map(|hop| (hop.id, hop)).collect();
        let mut links = BTreeSet::new();
        for route in routes {
            match route {
                RouteOutput::Links(direct) => links.extend(direct),
                RouteOutput::Nexthop(id) => {
                    let hop = nexthops.get(&id);
                    links.extend(hop.and_then(|hop| hop.link));
                    // The members of a group are never groups.
                    let members = hop.into_iter().flat_map(|hop| &hop.members);
                    links.extend(members.filter_map(|id| nexthops.get(id)?.link));
                }
            }
        }
        Ok(links.into_iter().collect())
    }

    /// Whether a dump was interrupted each time, so that its list may be incomplete.
    pub fn is_partial(&self) -> bool {
        self.partial
    }

    /// Requests a list and parses each message of it. Repeats an interrupted dump.
    pub fn dump<T>(
        &mut self,
        what: &'static str,
        request: impl Fn(u32) -> Vec<u8>,
        parse: impl Fn(&NetlinkMessage<'_>) -> Option<T>,
    ) -> Result<Vec<T>, Error> {
        let mut found = Vec::new();
        for _ in 0..DUMP_ATTEMPTS {
            found.clear();
            if let DumpState::Consistent =
                self.dump_once(what, &request, |message| found.extend(parse(message)))?
            {
                return Ok(found);
            }
        }
        self.partial = true;
        Ok(found)
    }

    fn dump_once(
        &mut self,
        what: &'static str,
        request: &impl Fn(u32) -> Vec<u8>,
        mut each: impl FnMut(&NetlinkMessage<'_>),
    ) -> Result<DumpState, Error> {
        self.drain();
        self.sequence = self.sequence.wrapping_add(1);
        let request = request(self.sequence);
        self.socket
            .send_to(&request, &SocketAddr::new(0, 0), 0)
            .map_err(|source| Error::Send { what, source })?;
        let mut state = DumpState::Consistent;
        loop {
            let (length, from) = match self.socket.recv_from(&mut self.buffer.as_mut_slice(), 0) {
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(source) => return Err(Error::Receive { what, source }),
            };
            if from.port_number() != 0 {
                continue;
            }
            let datagram = self.buffer.get(..length).unwrap_or(&self.buffer);
            for message in
                message::parse_messages(datagram).filter(|message| message.sequence == self.sequence)
            {
                if message.flags & message::INTERRUPTED != 0 {
                    state = DumpState::Interrupted;
                }
                match message.kind {
                    message::DONE | message::ERROR => {
                        return match message::error_code(message.body) {
                            0 => Ok(state),
                            code => Err(Error::Receive { what, source: io::Error::from_raw_os_error(code) }),
                        };
                    }
                    _ => each(&message),
                }
            }
        }
    }

    /// Sends a request and waits for its acknowledgement.
    pub fn execute(&mut self, what: &'static str, request: NetlinkRequest) -> Result<(), Error> {
        self.exchange(what, request, |_| None::<()>).map(|_| ())
    }

    /// Sends a request and parses the response. None if the kernel only acknowledges it.
    pub fn exchange<T>(
        &mut self,
        what: &'static str,
        request: NetlinkRequest,
        parse: impl Fn(&NetlinkMessage<'_>) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        self.drain();
        self.sequence = self.sequence.wrapping_add(1);
        let bytes = request.finish(self.sequence);
        self.socket
            .send_to(&bytes, &SocketAddr::new(0, 0), 0)
            .map_err(|source| Error::Send { what, source })?;
        loop {
            let (length, from) = match self.socket.recv_from(&mut self.buffer.as_mut_slice(), 0) {
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(source) => return Err(Error::Receive { what, source }),
            };
            if from.port_number() != 0 {
                continue;
            }
            let datagram = self.buffer.get(..length).unwrap_or(&self.buffer);
            for response in
                message::parse_messages(datagram).filter(|response| response.sequence == self.sequence)
            {
                if response.kind != message::ERROR {
                    if let Some(parsed) = parse(&response) {
                        return Ok(Some(parsed));
                    }
                    continue;
                }
                return match message::error_code(response.body) {
                    0 => Ok(None),
                    code => Err(Error::Rejected {
                        what,
                        kernel_text: message::error_text(&response),
                        source: io::Error::from_raw_os_error(code),
                    }),
                };
            }
        }
    }

    /// Discards the rest of an abandoned dump. Until it is read, the kernel rejects new requests.
    fn drain(&mut self) {
        while self.socket.recv(&mut self.buffer.as_mut_slice(), MSG_DONTWAIT).is_ok() {}
    }
}

/// Treats the errors of a namespace without routes and of a kernel without IPv6 as an empty list.
pub fn empty_if_unsupported<T>(routes: Result<Vec<T>, Error>) -> Result<Vec<T>, Error> {
    empty_if(routes, &[Errno::ENOENT, Errno::EOPNOTSUPP, Errno::EAFNOSUPPORT])
}

/// Treats these errors as an empty list.
pub fn empty_if<T>(list: Result<Vec<T>, Error>, codes: &[Errno]) -> Result<Vec<T>, Error> {
    match list {
        Err(Error::Receive { source, .. })
            if codes.iter().any(|&errno| source.raw_os_error() == Some(errno as i32)) =>
        {
            Ok(Vec::new())
        }
        other => other,
    }
}

impl Netlink {
    /// Requests one object. None if it does not exist.
    pub fn get<T>(
        &mut self,
        what: &'static str,
        request: NetlinkRequest,
        parse: impl Fn(&NetlinkMessage<'_>) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let mut found = None;
        let bytes = |sequence| request.clone().finish(sequence);
        match self.dump_once(what, &bytes, |message| found = found.take().or_else(|| parse(message))) {
            Ok(_) => Ok(found),
            Err(Error::Receive { source, .. }) if source.raw_os_error() == Some(Errno::ENODEV as i32) => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}
