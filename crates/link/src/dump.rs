//! Asking the kernel for all links, addresses and default routes.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
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
    message::{self, INET, INET6, Message, Nexthop, Way},
    request::Request,
};

/// The kernel fills at most 32 KiB per datagram.
const BUFFER: usize = 64 * 1024;
/// How often a list that changed while it was told is asked for again. After that it is taken as it is: the change
/// that disturbed it is an event, and that leads to another look.
const ATTEMPTS: usize = 8;
const PATIENCE: TimeVal = TimeVal::new(5, 0);

/// A socket that asks and waits. The kernel prepares the answer inside the call that asks, so there is nothing to gain
/// from waiting in any other way.
pub struct Asker {
    socket: Socket,
    sequence: u32,
    buffer: Vec<u8>,
    /// Whether a list was taken that may lack something.
    partial: bool,
}

/// Whether a list is of one moment.
enum Told {
    Whole,
    Interrupted,
}

impl Asker {
    /// Opens the socket in the network namespace of this thread.
    pub fn open() -> Result<Self, Error> {
        let mut socket = Socket::new(NETLINK_ROUTE).map_err(Error::Open)?;
        socket.bind_auto().map_err(Error::Open)?;
        setsockopt(&socket, sockopt::ReceiveTimeout, &PATIENCE).map_err(|errno| Error::Open(errno.into()))?;
        // With it the kernel filters by table; without (Linux before 4.20) we do.
        _ = socket.set_netlink_get_strict_chk(true);
        // Words beside the number of an error; a kernel that knows none (before 4.12) gives the number alone.
        _ = socket.set_ext_ack(true);
        Ok(Self { socket, sequence: 0, buffer: vec![0; BUFFER], partial: false })
    }

    /// Everything that is looked at, as it is now.
    pub fn observe(&mut self) -> Result<KernelState, Error> {
        self.partial = false;
        let mut links = self.collect("links", message::get_links, |message| {
            (message.kind == message::NEW_LINK).then(|| message::link(message.body)).flatten()
        })?;
        let addresses = self.collect("addresses", message::get_addresses, |message| {
            (message.kind == message::NEW_ADDRESS).then(|| message::address(message.body)).flatten()
        })?;
        let mut ways = Vec::new();
        for family in [INET, INET6] {
            let routes = self.collect(
                "routes",
                |sequence| message::get_routes(sequence, family),
                |message| {
                    (message.kind == message::NEW_ROUTE)
                        .then(|| message::default_route(message.body))
                        .flatten()
                },
            );
            ways.extend(none_if_unknown(routes)?);
        }
        let default_routes = self.resolve(ways)?;

        // An address of a link that came after the links were told is left for the next look.
        let mut by_link = BTreeMap::new();
        for (index, address) in addresses {
            by_link.entry(index).or_insert_with(Vec::new).push(address);
        }
        for link in &mut links {
            link.addresses = by_link.remove(&link.index).unwrap_or_default();
        }
        let floods = self.floods(&links)?;
        Ok(KernelState { links, default_routes, floods, partial: self.partial })
    }

    /// The flood lists of our own VXLAN devices. Those of others may be long.
    fn floods(&mut self, links: &[Link]) -> Result<Vec<FloodEntry>, Error> {
        let ours = |link: &&Link| link.vxlan.is_some() && link.alias.starts_with(api::LINK_ALIAS);
        let mut floods = Vec::new();
        for vxlan in links.iter().filter(ours) {
            let found = self.collect(
                "flood lists",
                |sequence| message::get_forwarding(sequence, vxlan.index),
                |message| {
                    (message.kind == message::NEW_NEIGHBOUR).then(|| message::flood(message.body)).flatten()
                },
            );
            // One that was deleted meanwhile has none.
            let found = none_if(found, &[Errno::ENODEV])?;
            // A kernel that cannot filter tells those of all.
            floods.extend(found.into_iter().filter(|flood| flood.link == vxlan.index));
        }
        Ok(floods)
    }

    /// The links that default routes lead to. The nexthops are asked for only if a route says nothing else.
    fn resolve(&mut self, ways: Vec<Way>) -> Result<Vec<u32>, Error> {
        let mut nexthops = Vec::new();
        if ways.iter().any(|way| matches!(way, Way::Nexthop(_))) {
            nexthops = self.collect("nexthops", message::get_nexthops, |message| {
                (message.kind == message::NEW_NEXTHOP).then(|| message::nexthop(message.body)).flatten()
            })?;
        }
        let nexthops: BTreeMap<u32, Nexthop> = nexthops.into_iter().map(|hop| (hop.id, hop)).collect();
        let mut links = BTreeSet::new();
        for way in ways {
            match way {
                Way::Links(over) => links.extend(over),
                Way::Nexthop(id) => {
                    let hop = nexthops.get(&id);
                    links.extend(hop.and_then(|hop| hop.link));
                    // A group has no groups in it.
                    let members = hop.into_iter().flat_map(|hop| &hop.members);
                    links.extend(members.filter_map(|id| nexthops.get(id)?.link));
                }
            }
        }
        Ok(links.into_iter().collect())
    }

    pub fn collect<T>(
        &mut self,
        what: &'static str,
        request: impl Fn(u32) -> Vec<u8>,
        read: impl Fn(&Message<'_>) -> Option<T>,
    ) -> Result<Vec<T>, Error> {
        let mut found = Vec::new();
        for _ in 0..ATTEMPTS {
            found.clear();
            if let Told::Whole = self.dump(what, &request, |message| found.extend(read(message)))? {
                return Ok(found);
            }
        }
        self.partial = true;
        Ok(found)
    }

    fn dump(
        &mut self,
        what: &'static str,
        request: &impl Fn(u32) -> Vec<u8>,
        mut each: impl FnMut(&Message<'_>),
    ) -> Result<Told, Error> {
        self.drain();
        self.sequence = self.sequence.wrapping_add(1);
        let request = request(self.sequence);
        self.socket
            .send_to(&request, &SocketAddr::new(0, 0), 0)
            .map_err(|source| Error::Ask { what, source })?;
        let mut told = Told::Whole;
        loop {
            let (length, from) = match self.socket.recv_from(&mut self.buffer.as_mut_slice(), 0) {
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(source) => return Err(Error::Read { what, source }),
            };
            if from.port_number() != 0 {
                continue;
            }
            let datagram = self.buffer.get(..length).unwrap_or(&self.buffer);
            for message in message::messages(datagram).filter(|message| message.sequence == self.sequence) {
                if message.flags & message::INTERRUPTED != 0 {
                    told = Told::Interrupted;
                }
                match message.kind {
                    message::DONE | message::ERROR => {
                        return match message::error_code(message.body) {
                            0 => Ok(told),
                            code => Err(Error::Read { what, source: io::Error::from_raw_os_error(code) }),
                        };
                    }
                    _ => each(&message),
                }
            }
        }
    }

    /// Changes something, and waits until the kernel has.
    pub fn change(&mut self, what: &'static str, request: Request) -> Result<(), Error> {
        self.exchange(what, request, |_| None::<()>).map(|_| ())
    }

    /// Asks for one thing. None if the kernel says no more than that it has heard.
    pub fn exchange<T>(
        &mut self,
        what: &'static str,
        request: Request,
        read: impl Fn(&Message<'_>) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        self.drain();
        self.sequence = self.sequence.wrapping_add(1);
        let bytes = request.finish(self.sequence);
        self.socket
            .send_to(&bytes, &SocketAddr::new(0, 0), 0)
            .map_err(|source| Error::Ask { what, source })?;
        loop {
            let (length, from) = match self.socket.recv_from(&mut self.buffer.as_mut_slice(), 0) {
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(source) => return Err(Error::Read { what, source }),
            };
            if from.port_number() != 0 {
                continue;
            }
            let datagram = self.buffer.get(..length).unwrap_or(&self.buffer);
            for answer in message::messages(datagram).filter(|answer| answer.sequence == self.sequence) {
                if answer.kind != message::ERROR {
                    if let Some(told) = read(&answer) {
                        return Ok(Some(told));
                    }
                    continue;
                }
                return match message::error_code(answer.body) {
                    0 => Ok(None),
                    code => Err(Error::Refused {
                        what,
                        said: message::error_text(&answer),
                        source: io::Error::from_raw_os_error(code),
                    }),
                };
            }
        }
    }

    /// Reads what an answer that was given up left behind; the kernel refuses a new question before.
    fn drain(&mut self) {
        while self.socket.recv(&mut self.buffer.as_mut_slice(), MSG_DONTWAIT).is_ok() {}
    }
}

/// A namespace without any route has no table to ask, and a kernel without IPv6 no routes of it.
pub fn none_if_unknown<T>(routes: Result<Vec<T>, Error>) -> Result<Vec<T>, Error> {
    none_if(routes, &[Errno::ENOENT, Errno::EOPNOTSUPP, Errno::EAFNOSUPPORT])
}

pub fn none_if<T>(list: Result<Vec<T>, Error>, codes: &[Errno]) -> Result<Vec<T>, Error> {
    match list {
        Err(Error::Read { source, .. })
            if codes.iter().any(|&errno| source.raw_os_error() == Some(errno as i32)) =>
        {
            Ok(Vec::new())
        }
        other => other,
    }
}

impl Asker {
    /// Asks for one thing by a request that is no dump. None if there is no such thing.
    pub fn find<T>(
        &mut self,
        what: &'static str,
        request: Request,
        read: impl Fn(&Message<'_>) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let mut found = None;
        let bytes = |sequence| request.clone().finish(sequence);
        match self.dump(what, &bytes, |message| found = found.take().or_else(|| read(message))) {
            Ok(_) => Ok(found),
            Err(Error::Read { source, .. }) if source.raw_os_error() == Some(Errno::ENODEV as i32) => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}
