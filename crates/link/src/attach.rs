//! A pair of links between a bridge here and another network namespace.
//!
//! One request makes the pair: the host's end as a port of the bridge, the other directly where it belongs, with its
//! name and address, so that there is no moment at which half of it exists. What fails later is undone.

mod address;
mod events;
mod removal;
mod route;

use std::{
    fmt, fs, io,
    net::IpAddr,
    os::fd::{AsRawFd as _, BorrowedFd},
    path::{Path, PathBuf},
};

use api::{IfName, Mac};
use ipnet::IpNet;
use nix::{
    errno::Errno,
    sys::stat::{FileStat, fstat, stat},
};
use plan::nodenetwork::{AdminState, Link};

use crate::{
    dump::Asker,
    message::{self, GET_LINK, NEW_LINK},
    namespace,
    request::{CHANGE, CREATE, Request, link_header},
};
use events::{Events, Group};
use route::Found;

pub use route::Route;

const SET_LINK: u16 = 19;
/// `NLM_F_REQUEST | NLM_F_ACK`: an answer with one link, then the end.
const GET: u16 = 0x5;
const IFF_UP: u32 = 1;
const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_MASTER: u16 = 10;
const IFLA_LINKINFO: u16 = 18;
const IFLA_IFALIAS: u16 = 20;
const IFLA_NET_NS_FD: u16 = 28;
const IFLA_EXT_MASK: u16 = 29;
const RTEXT_FILTER_SKIP_STATS: u32 = 1 << 3;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const VETH_INFO_PEER: u16 = 1;
const LEAST_IPV6_MTU: u32 = 1280;

/// A pair, as it should be.
#[derive(Debug, Clone, Copy)]
pub struct Attach<'a> {
    /// Where the inner end goes.
    pub namespace: BorrowedFd<'a>,
    /// The name of the host's end.
    pub host: &'a IfName,
    /// The name of the inner end.
    pub inside: &'a IfName,
    /// The address of the inner end.
    pub mac: Mac,
    /// Of both ends.
    pub mtu: u32,
    /// The index of the bridge that the host's end is a port of.
    pub bridge: u32,
    /// On the host's end.
    pub alias: &'a str,
    /// Where `/proc` of the host is.
    pub proc_root: &'a Path,
    /// Of the inner end, each with the length of its subnet's prefix. None: what the sandbox does is its own business.
    pub addresses: &'a [IpNet],
    /// Over the inner end.
    pub routes: &'a [Route],
}

impl Attach<'_> {
    fn needs_ipv6(&self) -> bool {
        let address = |address: &IpNet| address.addr().is_ipv6();
        self.addresses.iter().any(address) || self.routes.iter().any(Route::is_ipv6)
    }
}

/// How the pair came to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Made {
    New,
    /// It was there, exactly as wanted.
    Before,
}

/// What the host's end is called and says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct End {
    pub name: String,
    pub index: u32,
    pub alias: String,
    pub master: Option<u32>,
}

/// Why a pair is not there, or not gone.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("there already is an interface {name} in the sandbox, and it is not ours: give it another name")]
    Taken { name: IfName },
    #[error("the bridge is gone")]
    NoBridge(#[source] crate::Error),
    #[error("the descriptor is no network namespace")]
    NoNamespace(#[source] io::Error),
    #[error("the network namespace is the host's own")]
    OwnNamespace,
    #[error("{name} is no end of a pair, something else has that name")]
    Foreign { name: IfName },
    #[error("interface {name} went away while it was set up")]
    Gone { name: IfName },
    #[error(
        "IPv6 needs an MTU of at least {LEAST_IPV6_MTU} and the link has {mtu}: raise it, or go without IPv6"
    )]
    TooSmallForIpv6 { mtu: u32 },
    #[error("this kernel has no IPv6: go without, or start it without ipv6.disable=1")]
    NoIpv6,
    #[error("the route to {dst} has the gateway {gw}, which is of the other family")]
    Families { dst: IpNet, gw: IpAddr },
    #[error(
        "the gateway {gw} of the route to {dst} is no neighbour on the link: it must be in the subnet of one of the \
        link's addresses, and another station"
    )]
    Gateway { gw: IpAddr, dst: IpNet, source: crate::Error },
    #[error("the sandbox already has a route to {dst}, {leads}: remove one of the two")]
    RouteTaken { dst: IpNet, leads: String },
    #[error("write {}", path.display())]
    Sysctl { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Kernel(#[from] crate::Error),
}

/// What can be different about a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Aspect {
    Kind,
    State,
    Mtu,
    Bridge,
    Alias,
    Address,
    /// Of the network, not the hardware.
    Addresses,
    Route,
}

impl fmt::Display for Aspect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kind => "kind",
            Self::State => "state",
            Self::Mtu => "mtu",
            Self::Bridge => "bridge",
            Self::Alias => "alias",
            Self::Address => "address",
            Self::Addresses => "list of IP addresses",
            Self::Route => "route",
        })
    }
}

/// Something about a pair that is not as it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    pub link: IfName,
    pub what: Aspect,
    pub wanted: String,
    pub found: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { link, what, wanted, found } = self;
        write!(f, "{link}: its {what} should be {wanted} and is {found}")
    }
}

/// Makes the pair, or finds that it is there. A host's end of this name that is not exactly as wanted, say from a call
/// that was cut off or with another address, is deleted and the pair made anew.
///
/// A new pair with addresses is usable at once, and all neighbours are told who has them now.
pub fn attach(wanted: &Attach<'_>) -> Result<Made, Error> {
    refuse_impossible(wanted)?;
    let mut asker = Asker::open()?;
    refuse_own(wanted.namespace)?;
    match asker.change("make the pair", pair(wanted)) {
        Ok(()) => {}
        Err(error) if is(&error, Errno::EEXIST) => match find(&mut asker, wanted.host)? {
            // The other name is taken.
            None => return Err(Error::Taken { name: wanted.inside.clone() }),
            Some(_) if differences(&mut asker, wanted)?.is_empty() => return Ok(Made::Before),
            Some(found) => {
                delete(wanted.host, &found)?;
                asker.change("make the pair", pair(wanted)).map_err(|error| refused(wanted, error))?;
            }
        },
        Err(error) => return Err(refused(wanted, error)),
    }
    finish(&mut asker, wanted).inspect_err(|_| {
        // The first error is the one to tell; the next call begins with deleting what is left.
        _ = remove(&mut asker, wanted.host);
    })?;
    Ok(Made::New)
}

/// Deletes the pair by the name of its host's end. Whether there was one.
pub fn detach(host: &IfName) -> Result<bool, Error> {
    remove(&mut Asker::open()?, host)
}

/// Whether the pair is there and as wanted: what is not.
pub fn inspect(wanted: &Attach<'_>) -> Result<Vec<Difference>, Error> {
    refuse_own(wanted.namespace)?;
    differences(&mut Asker::open()?, wanted)
}

/// The ends of pairs here whose alias begins like this.
pub fn ends(alias: &str) -> Result<Vec<End>, Error> {
    let links = Asker::open()?.collect("links", message::get_links, |message| {
        (message.kind == NEW_LINK).then(|| message::link(message.body)).flatten()
    })?;
    let ours = links.into_iter().filter(|link| is_end(link) && link.alias.starts_with(alias));
    Ok(ours.map(|Link { name, index, alias, master, .. }| End { name, index, alias, master }).collect())
}

/// The request that makes the pair. The kernel refuses to set the inner end up in it.
fn pair(wanted: &Attach<'_>) -> Request {
    let namespace = wanted.namespace.as_raw_fd().to_ne_bytes();
    Request::new(NEW_LINK, CREATE, &link_header(0, 0, 0))
        .text(IFLA_IFNAME, wanted.host.as_str())
        .number(IFLA_MTU, wanted.mtu)
        .number(IFLA_MASTER, wanted.bridge)
        .nested(IFLA_LINKINFO, &[], |info| {
            info.text(IFLA_INFO_KIND, "veth").nested(IFLA_INFO_DATA, &[], |data| {
                data.nested(VETH_INFO_PEER, &link_header(0, 0, 0), |peer| {
                    peer.text(IFLA_IFNAME, wanted.inside.as_str())
                        .attribute(IFLA_ADDRESS, &wanted.mac.octets())
                        .number(IFLA_MTU, wanted.mtu)
                        .attribute(IFLA_NET_NS_FD, &namespace)
                })
            })
        })
}

/// What the one request cannot say.
fn finish(asker: &mut Asker, wanted: &Attach<'_>) -> Result<(), Error> {
    // Before it is up, so that it never has an address.
    disable_ipv6(wanted)?;
    let up = Request::new(SET_LINK, CHANGE, &link_header(0, IFF_UP, IFF_UP));
    // The kernel counts a final NUL as part of an alias.
    let alias = wanted.alias.as_bytes();
    let host = up.clone().text(IFLA_IFNAME, wanted.host.as_str()).attribute(IFLA_IFALIAS, alias);
    asker.change("set the host's end up", host)?;
    let (mut inner, events) = namespace::within(wanted.namespace, || {
        address::prepare(wanted)?;
        Ok::<_, Error>((Asker::open()?, Events::open(Group::Ipv6Routes)?))
    })??;
    inner.change("set the inner end up", up.text(IFLA_IFNAME, wanted.inside.as_str()))?;
    if wanted.addresses.is_empty() && wanted.routes.is_empty() {
        return Ok(());
    }
    let found = find(&mut inner, wanted.inside)?;
    let link = found.ok_or_else(|| Error::Gone { name: wanted.inside.clone() })?.index;
    // On a link that is up: the kernel has no way over one that is not.
    for &address in wanted.addresses {
        address::put(&mut inner, link, address)?;
    }
    for route in wanted.routes {
        route::put(&mut inner, link, route)?;
    }
    // If these take too long the link is as it should be all the same.
    events.until(|| address::all_usable(&mut inner, wanted.addresses))?;
    until_forwarding(asker, wanted.host)?;
    announce(&mut inner, wanted)
}

/// Waits until a port forwards: a bridge hears only later that there is somebody at the other end, and drops what comes
/// before. One that is down never does.
fn until_forwarding(asker: &mut Asker, port: &IfName) -> Result<bool, Error> {
    let forwards = || {
        let found = asker.find("port", by_name(port), |message| {
            (message.kind == NEW_LINK).then(|| message::forwards(message.body)).flatten()
        });
        found.map(|forwards| forwards == Some(true))
    };
    Ok(Events::open(Group::Links)?.until(forwards)?)
}

/// Lets the kernel tell the neighbours once: it does whenever a hardware address is set, also to what it is. When the
/// link came up it had no address yet, and the bridge would not have heard.
fn announce(inner: &mut Asker, wanted: &Attach<'_>) -> Result<(), Error> {
    let same = Request::new(SET_LINK, CHANGE, &link_header(0, 0, 0))
        .text(IFLA_IFNAME, wanted.inside.as_str())
        .attribute(IFLA_ADDRESS, &wanted.mac.octets());
    Ok(inner.change("announce the addresses", same)?)
}

/// Refuses before anything is made.
fn refuse_impossible(wanted: &Attach<'_>) -> Result<(), Error> {
    if wanted.mtu < LEAST_IPV6_MTU && wanted.needs_ipv6() {
        return Err(Error::TooSmallForIpv6 { mtu: wanted.mtu });
    }
    match wanted.routes.iter().find(|route| !route.is_of_one_family()) {
        Some(&Route { dst, gw: Some(gw) }) => Err(Error::Families { dst, gw }),
        _ => Ok(()),
    }
}

/// Says what a refusal to make the pair means.
fn refused(wanted: &Attach<'_>, error: crate::Error) -> Error {
    // The host's end is there first, and only the bridge is looked for by its index.
    if is(&error, Errno::EEXIST) {
        Error::Taken { name: wanted.inside.clone() }
    } else if is(&error, Errno::ENODEV) || (is(&error, Errno::EINVAL) && gone(wanted.bridge)) {
        Error::NoBridge(error)
    } else if let Err(crate::Error::Enter(source)) = namespace::within(wanted.namespace, || ()) {
        Error::NoNamespace(source)
    } else {
        error.into()
    }
}

/// Whether there is no link of this index.
fn gone(index: u32) -> bool {
    let request = Request::new(GET_LINK, GET, &link_header(index, 0, 0));
    let found = Asker::open().and_then(|mut asker| {
        asker.find("bridge", request.number(IFLA_EXT_MASK, RTEXT_FILTER_SKIP_STATS), |message| {
            (message.kind == NEW_LINK).then_some(())
        })
    });
    matches!(found, Ok(None))
}

fn is(error: &crate::Error, errno: Errno) -> bool {
    error.errno() == Some(errno as i32)
}

fn find(asker: &mut Asker, name: &IfName) -> Result<Option<Link>, Error> {
    Ok(asker.find("link", by_name(name), |message| {
        (message.kind == NEW_LINK).then(|| message::link(message.body)).flatten()
    })?)
}

/// Asks for one link.
fn by_name(name: &IfName) -> Request {
    Request::new(GET_LINK, GET, &link_header(0, 0, 0))
        .text(IFLA_IFNAME, name.as_str())
        .number(IFLA_EXT_MASK, RTEXT_FILTER_SKIP_STATS)
}

fn is_end(link: &Link) -> bool {
    link.kind.as_deref() == Some("veth")
}

fn remove(asker: &mut Asker, host: &IfName) -> Result<bool, Error> {
    match find(asker, host)? {
        None => Ok(false),
        Some(found) => delete(host, &found),
    }
}

/// Deletes by index, so that a rename in between hits nobody else.
fn delete(host: &IfName, found: &Link) -> Result<bool, Error> {
    if !is_end(found) {
        return Err(Error::Foreign { name: host.clone() });
    }
    match removal::delete(found.index) {
        Ok(()) => Ok(true),
        // The sandbox went at the same time, and the pair with it.
        Err(error) if is(&error, Errno::ENODEV) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn differences(asker: &mut Asker, wanted: &Attach<'_>) -> Result<Vec<Difference>, Error> {
    let host = find(asker, wanted.host)?;
    let mut inner = namespace::within(wanted.namespace, Asker::open)??;
    let inside = find(&mut inner, wanted.inside)?;
    let mut all = Vec::new();
    let mut compare = |link: &IfName, what, wanted: String, found: String| {
        if wanted != found {
            all.push(Difference { link: link.clone(), what, wanted, found });
        }
    };
    for (name, link) in [(wanted.host, &host), (wanted.inside, &inside)] {
        let kind = link.as_ref().map_or("missing", |link| link.kind.as_deref().unwrap_or("hardware"));
        compare(name, Aspect::Kind, "veth".to_owned(), kind.to_owned());
        let Some(link) = link else { continue };
        let up = |admin| if admin == AdminState::Up { "up" } else { "down" }.to_owned();
        compare(name, Aspect::State, up(AdminState::Up), up(link.admin));
        compare(name, Aspect::Mtu, wanted.mtu.to_string(), link.mtu.to_string());
    }
    if let Some(host) = host {
        let bridge = |index: Option<u32>| index.map_or("none".to_owned(), |index| format!("link {index}"));
        compare(wanted.host, Aspect::Bridge, bridge(Some(wanted.bridge)), bridge(host.master));
        compare(wanted.host, Aspect::Alias, wanted.alias.to_owned(), host.alias);
    }
    if let Some(inside) = inside {
        let mac = inside.mac.map_or("none".to_owned(), |mac| mac.to_string());
        compare(wanted.inside, Aspect::Address, wanted.mac.to_string(), mac);
        if !wanted.addresses.is_empty() {
            let (should, is) = address::compare(wanted.addresses, &address::given(&mut inner, inside.index)?);
            compare(wanted.inside, Aspect::Addresses, should, is);
        }
        for one in wanted.routes {
            let is = match route::look(&mut inner, inside.index, one)? {
                Found::Same => continue,
                Found::Other(leads) => format!("one {leads}"),
                Found::Nothing => "missing".to_owned(),
            };
            compare(wanted.inside, Aspect::Route, one.to_string(), is);
        }
    }
    Ok(all)
}

/// A kernel without IPv6 has nothing to disable, and neither has a link that is too small for it.
fn disable_ipv6(wanted: &Attach<'_>) -> Result<(), Error> {
    let family = wanted.proc_root.join("sys/net/ipv6");
    let path = family.join("conf").join(wanted.host.as_str()).join("disable_ipv6");
    let without = || wanted.mtu < LEAST_IPV6_MTU || !family.exists();
    match fs::write(&path, "1") {
        Err(error) if error.kind() == io::ErrorKind::NotFound && without() => Ok(()),
        result => result.map_err(|source| Error::Sysctl { path, source }),
    }
}

/// A descriptor of our own namespace would put a link of a pod among the host's.
fn refuse_own(namespace: BorrowedFd<'_>) -> Result<(), Error> {
    let place = |stat: FileStat| (stat.st_dev, stat.st_ino);
    let failed = |errno: Errno| Error::NoNamespace(errno.into());
    let own = stat("/proc/thread-self/ns/net").map_err(failed)?;
    if place(own) == place(fstat(namespace).map_err(failed)?) { Err(Error::OwnNamespace) } else { Ok(()) }
}
