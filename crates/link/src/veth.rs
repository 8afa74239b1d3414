//! A veth pair between a bridge of the host and a pod's network namespace (the sandbox).
//!
//! One request creates the pair: the host end as a port of the bridge, the pod end in its namespace with its name and
//! MAC address. Half a pair is never visible. If a later step fails, the pair is deleted.

mod address;
mod announce;
mod delete;
mod event_wait;
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
    message::{self, GET_LINK, NEW_LINK},
    namespace,
    netlink::Netlink,
    request::{CHANGE, CREATE, NetlinkRequest, link_header},
};
pub(crate) use delete::delete_link;
use event_wait::{EventGroup, EventSocket};
use route::RouteLookup;

pub use announce::{Announce, AnnounceOutcome, announce};
pub use route::Route;

const SET_LINK: u16 = 19;
/// `NLM_F_REQUEST | NLM_F_ACK`: the kernel answers with one link and an acknowledgement.
const GET: u16 = 0x5;
const IFF_UP: u32 = 1;
const IFF_NOARP: u32 = 1 << 7;
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
const MIN_IPV6_MTU: u32 = 1280;

/// The desired state of a veth pair.
#[derive(Debug, Clone, Copy)]
pub struct VethConfig<'a> {
    /// The namespace of the pod end.
    pub namespace: BorrowedFd<'a>,
    /// The name of the host end.
    pub host: &'a IfName,
    /// The name of the pod end.
    pub inside: &'a IfName,
    /// The MAC address of the pod end.
    pub mac: Mac,
    /// The MTU of both ends.
    pub mtu: u32,
    /// The index of the bridge that the host end is a port of.
    pub bridge: u32,
    /// The alias of the host end.
    pub alias: &'a str,
    /// The path at which the host's `/proc` is mounted.
    pub proc_root: &'a Path,
    /// The IP addresses of the pod end, with the prefix length of their subnet. If empty, addresses are not managed.
    pub addresses: &'a [IpNet],
    /// Routes through the pod end.
    pub routes: &'a [Route],
    /// When the addresses are announced. Existing pairs are not compared with it.
    pub announce: Announce,
}

impl VethConfig<'_> {
    fn needs_ipv6(&self) -> bool {
        let address = |address: &IpNet| address.addr().is_ipv6();
        self.addresses.iter().any(address) || self.routes.iter().any(Route::is_ipv6)
    }
}

/// Whether [`attach`] changed anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttachOutcome {
    Created,
    /// The pair existed with the desired configuration.
    Unchanged,
}

/// The host end of a veth pair.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostVeth {
    pub name: String,
    pub index: u32,
    pub alias: String,
    pub master: Option<u32>,
}

/// Why a pair could not be created, checked or deleted.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "interface {name} already exists in the sandbox and is not managed by Patchbay; request another interface name"
    )]
    NameTaken { name: IfName },
    #[error("the bridge does not exist")]
    BridgeNotFound(#[source] crate::Error),
    #[error("the file descriptor is not a network namespace")]
    NotANamespace(#[source] io::Error),
    #[error("the network namespace is the host's own")]
    HostNamespace,
    #[error("link {name} is not a veth; another program uses this name")]
    NotAVeth { name: IfName },
    #[error("interface {name} was deleted during setup")]
    LinkGone { name: IfName },
    #[error(
        "IPv6 needs an MTU of at least {MIN_IPV6_MTU}, the link has {mtu}; raise the MTU or use IPv4 only"
    )]
    MtuTooSmallForIpv6 { mtu: u32 },
    #[error("the kernel has IPv6 disabled; boot without ipv6.disable=1 or use IPv4 only")]
    NoIpv6,
    #[error("the route to {dst} has gateway {gw} of the other IP family")]
    FamilyMismatch { dst: IpNet, gw: IpAddr },
    #[error(
        "gateway {gw} of the route to {dst} is not reachable on the link; use an address in a subnet of the interface \
        that the interface itself does not have"
    )]
    GatewayUnreachable { gw: IpAddr, dst: IpNet, source: crate::Error },
    #[error("the sandbox already has a route to {dst} {via}; remove one of the two routes")]
    RouteConflict { dst: IpNet, via: String },
    #[error("write {}", path.display())]
    Sysctl { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Kernel(#[from] crate::Error),
}

/// A property of a veth pair that [`check`] compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VethProperty {
    Kind,
    State,
    Mtu,
    Bridge,
    Alias,
    Mac,
    IpAddresses,
    Route,
}

impl fmt::Display for VethProperty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kind => "kind",
            Self::State => "state",
            Self::Mtu => "MTU",
            Self::Bridge => "bridge",
            Self::Alias => "alias",
            Self::Mac => "MAC address",
            Self::IpAddresses => "IP address list",
            Self::Route => "route",
        })
    }
}

/// A property of a pair that differs from the desired state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VethDrift {
    pub link: IfName,
    pub property: VethProperty,
    pub desired: String,
    pub observed: String,
}

impl fmt::Display for VethDrift {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { link, property, desired, observed } = self;
        write!(f, "{link}: {property} is {observed}, expected {desired}")
    }
}

/// Creates the pair unless it exists with the desired configuration.
///
/// A veth with the name of the host end that differs, for example left by an interrupted call, is deleted and the pair
/// recreated. When this returns, the addresses of a new pair are usable and announced to all neighbours, or the pair is
/// quiet ([`Announce::Later`]).
pub fn attach(config: &VethConfig<'_>) -> Result<AttachOutcome, Error> {
    validate(config)?;
    let mut netlink = Netlink::open()?;
    reject_own_namespace(config.namespace)?;
    match netlink.execute("create the veth pair", create_request(config)) {
        Ok(()) => {}
        Err(error) if is(&error, Errno::EEXIST) => match find(&mut netlink, config.host)? {
            // Then the name of the pod end is taken.
            None => return Err(Error::NameTaken { name: config.inside.clone() }),
            Some(_) if find_drift(&mut netlink, config)?.is_empty() => return Ok(AttachOutcome::Unchanged),
            Some(found) => {
                delete(config.host, &found)?;
                netlink
                    .execute("create the veth pair", create_request(config))
                    .map_err(|error| classify_create_error(config, error))?;
            }
        },
        Err(error) => return Err(classify_create_error(config, error)),
    }
    finish(&mut netlink, config).inspect_err(|_| {
        // Report the first error. If this fails too, the next call deletes the pair.
        _ = remove(&mut netlink, config.host);
    })?;
    Ok(AttachOutcome::Created)
}

/// Deletes the pair by the name of its host end. Returns whether it existed.
pub fn detach(host: &IfName) -> Result<bool, Error> {
    remove(&mut Netlink::open()?, host)
}

/// Compares the pair with the desired state and returns every difference.
pub fn check(config: &VethConfig<'_>) -> Result<Vec<VethDrift>, Error> {
    reject_own_namespace(config.namespace)?;
    find_drift(&mut Netlink::open()?, config)
}

/// Lists the host ends whose alias starts with `alias`.
pub fn host_veths(alias: &str) -> Result<Vec<HostVeth>, Error> {
    let links = Netlink::open()?.dump("list links", message::get_links, |message| {
        (message.kind == NEW_LINK).then(|| message::parse_link(message.body)).flatten()
    })?;
    let ours = links.into_iter().filter(|link| is_veth(link) && link.alias.starts_with(alias));
    Ok(ours.map(|Link { name, index, alias, master, .. }| HostVeth { name, index, alias, master }).collect())
}

/// The request that creates the pair. The kernel rejects `IFF_UP` for the pod end here.
fn create_request(config: &VethConfig<'_>) -> NetlinkRequest {
    let namespace = config.namespace.as_raw_fd().to_ne_bytes();
    NetlinkRequest::new(NEW_LINK, CREATE, &link_header(0, 0, 0))
        .text(IFLA_IFNAME, config.host.as_str())
        .number(IFLA_MTU, config.mtu)
        .number(IFLA_MASTER, config.bridge)
        .nested(IFLA_LINKINFO, &[], |info| {
            info.text(IFLA_INFO_KIND, "veth").nested(IFLA_INFO_DATA, &[], |data| {
                data.nested(VETH_INFO_PEER, &link_header(0, 0, 0), |peer| {
                    peer.text(IFLA_IFNAME, config.inside.as_str())
                        .attribute(IFLA_ADDRESS, &config.mac.octets())
                        .number(IFLA_MTU, config.mtu)
                        .attribute(IFLA_NET_NS_FD, &namespace)
                })
            })
        })
}

/// Configures what the create request cannot express.
fn finish(netlink: &mut Netlink, config: &VethConfig<'_>) -> Result<(), Error> {
    // Before the link is up, so that it never gets a link-local address.
    disable_ipv6(config)?;
    let up = NetlinkRequest::new(SET_LINK, CHANGE, &link_header(0, IFF_UP, IFF_UP));
    // Without a final NUL: the kernel would make it a part of the alias.
    let alias = config.alias.as_bytes();
    let host = up.text(IFLA_IFNAME, config.host.as_str()).attribute(IFLA_IFALIAS, alias);
    netlink.execute("set the host end up", host)?;
    let (mut pod_netlink, events) = namespace::within(config.namespace, || {
        address::prepare_sysctls(config)?;
        Ok::<_, Error>((Netlink::open()?, EventSocket::open(EventGroup::Ipv6Routes)?))
    })??;
    let flags = match config.announce {
        Announce::Now => IFF_UP,
        Announce::Later => IFF_UP | IFF_NOARP,
    };
    let up = NetlinkRequest::new(SET_LINK, CHANGE, &link_header(0, flags, flags));
    pod_netlink.execute("set the pod end up", up.text(IFLA_IFNAME, config.inside.as_str()))?;
    if config.addresses.is_empty() && config.routes.is_empty() {
        return Ok(());
    }
    let found = find(&mut pod_netlink, config.inside)?;
    let link = found.ok_or_else(|| Error::LinkGone { name: config.inside.clone() })?.index;
    // After the link is up: the kernel rejects routes through a link that is down.
    for &address in config.addresses {
        address::add(&mut pod_netlink, link, address)?;
    }
    for route in config.routes {
        route::add(&mut pod_netlink, link, route)?;
    }
    // A timeout of these two is not an error: the link is configured correctly.
    events.wait_until(|| address::all_usable(&mut pod_netlink, config.addresses))?;
    wait_until_forwarding(netlink, config.host)?;
    match config.announce {
        Announce::Now => announce::announce_new(&mut pod_netlink, config.inside, config.mac),
        Announce::Later => Ok(()),
    }
}

/// Waits until a bridge port forwards, and returns whether it does. The bridge notices the carrier of a new port late
/// and drops frames until then. A port of a bridge that is down never forwards.
fn wait_until_forwarding(netlink: &mut Netlink, port: &IfName) -> Result<bool, Error> {
    let forwards = || {
        let found = netlink.get("get port", get_by_name(port), |message| {
            (message.kind == NEW_LINK).then(|| message::port_forwards(message.body)).flatten()
        });
        found.map(|forwards| forwards == Some(true))
    };
    Ok(EventSocket::open(EventGroup::Links)?.wait_until(forwards)?)
}

/// Rejects impossible configurations before anything is created.
fn validate(config: &VethConfig<'_>) -> Result<(), Error> {
    if config.mtu < MIN_IPV6_MTU && config.needs_ipv6() {
        return Err(Error::MtuTooSmallForIpv6 { mtu: config.mtu });
    }
    match config.routes.iter().find(|route| !route.is_single_family()) {
        Some(&Route { dst, gw: Some(gw) }) => Err(Error::FamilyMismatch { dst, gw }),
        _ => Ok(()),
    }
}

/// Maps the kernel's error for the create request to its cause.
fn classify_create_error(config: &VethConfig<'_>, error: crate::Error) -> Error {
    // The name of the host end is free or was handled, and the bridge is the only link given by index.
    if is(&error, Errno::EEXIST) {
        Error::NameTaken { name: config.inside.clone() }
    } else if is(&error, Errno::ENODEV) || (is(&error, Errno::EINVAL) && is_missing(config.bridge)) {
        Error::BridgeNotFound(error)
    } else if let Err(crate::Error::Enter(source)) = namespace::within(config.namespace, || ()) {
        Error::NotANamespace(source)
    } else {
        error.into()
    }
}

/// Whether no link has this index.
fn is_missing(index: u32) -> bool {
    let request = NetlinkRequest::new(GET_LINK, GET, &link_header(index, 0, 0));
    let found = Netlink::open().and_then(|mut netlink| {
        netlink.get("get bridge", request.number(IFLA_EXT_MASK, RTEXT_FILTER_SKIP_STATS), |message| {
            (message.kind == NEW_LINK).then_some(())
        })
    });
    matches!(found, Ok(None))
}

fn is(error: &crate::Error, errno: Errno) -> bool {
    error.errno() == Some(errno as i32)
}

fn find(netlink: &mut Netlink, name: &IfName) -> Result<Option<Link>, Error> {
    Ok(netlink.get("get link", get_by_name(name), |message| {
        (message.kind == NEW_LINK).then(|| message::parse_link(message.body)).flatten()
    })?)
}

/// A request for one link.
fn get_by_name(name: &IfName) -> NetlinkRequest {
    NetlinkRequest::new(GET_LINK, GET, &link_header(0, 0, 0))
        .text(IFLA_IFNAME, name.as_str())
        .number(IFLA_EXT_MASK, RTEXT_FILTER_SKIP_STATS)
}

fn is_veth(link: &Link) -> bool {
    link.kind.as_deref() == Some("veth")
}

fn remove(netlink: &mut Netlink, host: &IfName) -> Result<bool, Error> {
    match find(netlink, host)? {
        None => Ok(false),
        Some(found) => delete(host, &found),
    }
}

/// Deletes by index, so that a concurrent rename cannot hit another link.
fn delete(host: &IfName, found: &Link) -> Result<bool, Error> {
    if !is_veth(found) {
        return Err(Error::NotAVeth { name: host.clone() });
    }
    match delete_link(found.index) {
        Ok(()) => Ok(true),
        // The namespace was destroyed at the same time, and the pair with it.
        Err(error) if is(&error, Errno::ENODEV) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn find_drift(netlink: &mut Netlink, config: &VethConfig<'_>) -> Result<Vec<VethDrift>, Error> {
    let host = find(netlink, config.host)?;
    let mut pod_netlink = namespace::within(config.namespace, Netlink::open)??;
    let inside = find(&mut pod_netlink, config.inside)?;
    let mut drift = Vec::new();
    let mut compare = |link: &IfName, property, desired: String, observed: String| {
        if desired != observed {
            drift.push(VethDrift { link: link.clone(), property, desired, observed });
        }
    };
    for (name, link) in [(config.host, &host), (config.inside, &inside)] {
        let kind = link.as_ref().map_or("missing", |link| link.kind.as_deref().unwrap_or("hardware"));
        compare(name, VethProperty::Kind, "veth".to_owned(), kind.to_owned());
        let Some(link) = link else { continue };
        let up = |admin| if admin == AdminState::Up { "up" } else { "down" }.to_owned();
        compare(name, VethProperty::State, up(AdminState::Up), up(link.admin));
        compare(name, VethProperty::Mtu, config.mtu.to_string(), link.mtu.to_string());
    }
    if let Some(host) = host {
        let bridge = |index: Option<u32>| index.map_or("none".to_owned(), |index| format!("link {index}"));
        compare(config.host, VethProperty::Bridge, bridge(Some(config.bridge)), bridge(host.master));
        compare(config.host, VethProperty::Alias, config.alias.to_owned(), host.alias);
    }
    if let Some(inside) = inside {
        let mac = inside.mac.map_or("none".to_owned(), |mac| mac.to_string());
        compare(config.inside, VethProperty::Mac, config.mac.to_string(), mac);
        if !config.addresses.is_empty() {
            let permanent = address::list_permanent(&mut pod_netlink, inside.index)?;
            let (desired, observed) = address::describe_lists(config.addresses, &permanent);
            compare(config.inside, VethProperty::IpAddresses, desired, observed);
        }
        for route in config.routes {
            let observed = match route::lookup(&mut pod_netlink, inside.index, route)? {
                RouteLookup::Same => continue,
                RouteLookup::Other(via) => via,
                RouteLookup::Missing => "missing".to_owned(),
            };
            compare(config.inside, VethProperty::Route, route.to_string(), observed);
        }
    }
    Ok(drift)
}

/// Disables IPv6 on the host end. Nothing to do if the kernel has no IPv6 or the MTU is too small for it.
fn disable_ipv6(config: &VethConfig<'_>) -> Result<(), Error> {
    let family = config.proc_root.join("sys/net/ipv6");
    let path = family.join("conf").join(config.host.as_str()).join("disable_ipv6");
    let without = || config.mtu < MIN_IPV6_MTU || !family.exists();
    match fs::write(&path, "1") {
        Err(error) if error.kind() == io::ErrorKind::NotFound && without() => Ok(()),
        result => result.map_err(|source| Error::Sysctl { path, source }),
    }
}

/// Rejects the namespace of this process: the pod end would become a link of the host.
fn reject_own_namespace(namespace: BorrowedFd<'_>) -> Result<(), Error> {
    let identity = |stat: FileStat| (stat.st_dev, stat.st_ino);
    let failed = |errno: Errno| Error::NotANamespace(errno.into());
    let own = stat("/proc/thread-self/ns/net").map_err(failed)?;
    if identity(own) == identity(fstat(namespace).map_err(failed)?) {
        Err(Error::HostNamespace)
    } else {
        Ok(())
    }
}
