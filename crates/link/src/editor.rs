//! Applies the actions of a bridge plan to the kernel.

use std::{
    fs, io,
    net::IpAddr,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
};

use api::{IfName, Mac};
use ipnet::IpNet;
use nix::errno::Errno;
use plan::{
    bridge::{Action, Overlay},
    nodenetwork::AdminState,
};

use crate::{
    Error, message, namespace,
    netlink::Netlink,
    request::{CHANGE, CREATE, NetlinkRequest, address_parts, link_header},
};

const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_MASTER: u16 = 10;
const IFLA_LINKINFO: u16 = 18;
const IFLA_IFALIAS: u16 = 20;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const IFF_UP: u32 = 1;

/// Changes the links of one network namespace. Every call blocks until the kernel has answered.
pub struct LinkEditor {
    netlink: Netlink,
    sysctls: PathBuf,
    /// The namespace to enter for sysctls. None if it is the namespace of the callers.
    namespace: Option<OwnedFd>,
}

impl LinkEditor {
    /// Edits the network namespace of the calling thread. `sysctls` is the path at which `/proc/sys` is mounted.
    pub fn open(sysctls: &Path) -> Result<Self, Error> {
        Ok(Self { netlink: Netlink::open()?, sysctls: sysctls.to_owned(), namespace: None })
    }

    /// Edits another network namespace.
    pub fn open_in(namespace: impl AsFd, sysctls: &Path) -> Result<Self, Error> {
        let owned = namespace.as_fd().try_clone_to_owned().map_err(Error::Enter)?;
        let netlink = namespace::within(&namespace, Netlink::open)??;
        Ok(Self { netlink, sysctls: sysctls.to_owned(), namespace: Some(owned) })
    }

    /// Applies one action. Removing something that does not exist succeeds.
    pub fn apply(&mut self, action: &Action) -> Result<(), Error> {
        match action {
            Action::WriteRecord(_) | Action::RemoveRecord => Err(Error::NotAKernelAction),
            Action::CreateBridge { name, mac, mtu } => {
                let request = create(name, *mac, mtu.saturating_sub(1))
                    .nested(IFLA_LINKINFO, &[], |info| info.text(IFLA_INFO_KIND, "bridge"));
                self.create("bridge", "create the bridge", request)
            }
            Action::CreateVxlan { name, mac, mtu, overlay, local, bridge } => {
                let request = create(name, *mac, *mtu).number(IFLA_MASTER, *bridge).nested(
                    IFLA_LINKINFO,
                    &[],
                    |info| vxlan(info, *overlay, *local),
                );
                self.create("vxlan", "create the VXLAN device", request)
            }
            Action::Delete { link } => {
                let request = NetlinkRequest::new(message::DELETE_LINK, CHANGE, &link_header(*link, 0, 0));
                ok_if(self.netlink.execute("delete the link", request), &[Errno::ENODEV])
            }
            Action::Rename { link, name } => self.rename(*link, name),
            Action::SetAlias { link, alias } => {
                self.set("set the alias of the link", set(*link).attribute(IFLA_IFALIAS, alias.as_bytes()))
            }
            Action::SetMac { link, mac } => {
                self.set("set the MAC address of the link", set(*link).attribute(IFLA_ADDRESS, &mac.octets()))
            }
            Action::SetMtu { link, mtu } => {
                self.set("set the MTU of the link", set(*link).number(IFLA_MTU, *mtu))
            }
            Action::SetAdmin { link, admin } => self.set_admin(*link, *admin),
            // disable_ipv6 last: only this sysctl is observed, so that an interrupted call is repeated.
            Action::DisableIpv6 { name } => {
                self.sysctls("ipv6", name, &[("accept_ra", "0"), ("disable_ipv6", "1")])
            }
            Action::IsolateIpv4 { name } => {
                self.sysctls("ipv4", name, &[("arp_ignore", "8"), ("rp_filter", "1"), ("forwarding", "0")])
            }
            Action::RemoveAddress { link, address } => {
                let removed = self.netlink.execute("remove an address", remove_address(*link, *address));
                ok_if(removed, &[Errno::EADDRNOTAVAIL, Errno::ENODEV])
            }
            Action::SetMaster { link, bridge } => {
                self.set("make the link a bridge port", set(*link).number(IFLA_MASTER, *bridge))
            }
            Action::ClearMaster { link } => {
                let cleared = self.set("remove the port from its bridge", set(*link).number(IFLA_MASTER, 0));
                ok_if(cleared, &[Errno::ENODEV])
            }
            Action::AddFlood { vxlan, to } => {
                /// `NLM_F_CREATE | NLM_F_APPEND`
                const APPEND: u16 = 0xc00;
                let request = flood(message::NEW_NEIGHBOUR, CHANGE | APPEND, *vxlan, *to);
                ok_if(self.netlink.execute("add a flood entry", request), &[Errno::EEXIST])
            }
            Action::RemoveFlood { vxlan, to } => {
                let request = flood(message::DELETE_NEIGHBOUR, CHANGE, *vxlan, *to);
                let removed = self.netlink.execute("remove a flood entry", request);
                ok_if(removed, &[Errno::ENOENT, Errno::ENODEV])
            }
        }
    }

    /// The output link of the route to an address. None if there is no route.
    pub fn route_to(&mut self, address: IpAddr) -> Result<Option<u32>, Error> {
        Ok(self.netlink.route(address, 0, message::route_oif)?.flatten())
    }

    fn create(
        &mut self,
        kind: &'static str,
        what: &'static str,
        request: NetlinkRequest,
    ) -> Result<(), Error> {
        match self.netlink.execute(what, request) {
            Err(Error::Rejected { source, .. }) if is_one_of(&source, &[Errno::EOPNOTSUPP]) => {
                Err(Error::UnsupportedKind { kind, source })
            }
            other => other,
        }
    }

    fn set(&mut self, what: &'static str, request: NetlinkRequest) -> Result<(), Error> {
        self.netlink.execute(what, request)
    }

    fn set_admin(&mut self, link: u32, admin: AdminState) -> Result<(), Error> {
        let flags = if admin == AdminState::Up { IFF_UP } else { 0 };
        let request = NetlinkRequest::new(message::SET_LINK, CHANGE, &link_header(link, flags, IFF_UP));
        self.set("set the link up or down", request)
    }

    /// Renames a link. Before Linux 6.2 the kernel rejects this for a link that is up.
    fn rename(&mut self, link: u32, name: &IfName) -> Result<(), Error> {
        let request = || set(link).text(IFLA_IFNAME, name.as_str());
        match self.set("rename the link", request()) {
            Err(error) if error.errno() == Some(Errno::EBUSY as i32) => {}
            other => return other,
        }
        self.set_admin(link, AdminState::Down)?;
        let renamed = self.set("rename the link", request());
        self.set_admin(link, AdminState::Up).and(renamed)
    }

    /// Writes sysctls of one link and protocol. Does nothing if the kernel does not have the protocol.
    fn sysctls(&self, protocol: &str, name: &str, values: &[(&str, &str)]) -> Result<(), Error> {
        // The name becomes part of a path.
        if name.parse::<IfName>().is_err() {
            return Err(Error::Name { name: name.to_owned() });
        }
        let conf = self.sysctls.join("net").join(protocol).join("conf");
        let write = || {
            if !conf.exists() && self.sysctls.join("net").exists() {
                return Ok(());
            }
            for (key, value) in values {
                let path = conf.join(name).join(key);
                fs::write(&path, value).map_err(|source| Error::Sysctl { path, source })?;
            }
            Ok(())
        };
        match &self.namespace {
            Some(namespace) => namespace::within(namespace, write)?,
            None => write(),
        }
    }
}

/// Starts a request that creates a link. The link has its ownership MAC address from the start.
fn create(name: &IfName, mac: Mac, mtu: u32) -> NetlinkRequest {
    NetlinkRequest::new(message::NEW_LINK, CREATE, &link_header(0, 0, 0))
        .text(IFLA_IFNAME, name.as_str())
        .attribute(IFLA_ADDRESS, &mac.octets())
        .number(IFLA_MTU, mtu)
}

/// Starts a request that changes a link.
fn set(link: u32) -> NetlinkRequest {
    NetlinkRequest::new(message::SET_LINK, CHANGE, &link_header(link, 0, 0))
}

fn vxlan(info: NetlinkRequest, overlay: Overlay, local: IpAddr) -> NetlinkRequest {
    const IFLA_VXLAN_ID: u16 = 1;
    const IFLA_VXLAN_LOCAL: u16 = 4;
    const IFLA_VXLAN_LEARNING: u16 = 7;
    const IFLA_VXLAN_PORT: u16 = 15;
    const IFLA_VXLAN_LOCAL6: u16 = 17;

    let (_, _, bytes) = address_parts(local);
    let attribute = if local.is_ipv4() { IFLA_VXLAN_LOCAL } else { IFLA_VXLAN_LOCAL6 };
    info.text(IFLA_INFO_KIND, "vxlan").nested(IFLA_INFO_DATA, &[], |data| {
        data.number(IFLA_VXLAN_ID, overlay.vni)
            .attribute(attribute, &bytes)
            .attribute(IFLA_VXLAN_PORT, &overlay.port.to_be_bytes())
            .attribute(IFLA_VXLAN_LEARNING, &[1])
    })
}

fn remove_address(link: u32, address: IpNet) -> NetlinkRequest {
    const IFA_ADDRESS: u16 = 1;
    const IFA_LOCAL: u16 = 2;

    let (family, _, bytes) = address_parts(address.addr());
    let mut header = [family, address.prefix_len(), 0, 0, 0, 0, 0, 0];
    header[4..].copy_from_slice(&link.to_ne_bytes());
    let request = NetlinkRequest::new(message::DELETE_ADDRESS, CHANGE, &header).attribute(IFA_LOCAL, &bytes);
    if address.addr().is_ipv4() { request } else { request.attribute(IFA_ADDRESS, &bytes) }
}

/// A request for the all-zero FDB entry of a VXLAN device, which makes it flood to `to`.
fn flood(kind: u16, flags: u16, vxlan: u32, to: IpAddr) -> NetlinkRequest {
    const NDA_DST: u16 = 1;
    const NDA_LLADDR: u16 = 2;
    /// `NUD_NOARP | NUD_PERMANENT`
    const STATE: u16 = 0xc0;
    const NTF_SELF: u8 = 2;

    let mut header = vec![message::BRIDGE, 0, 0, 0];
    header.extend(vxlan.to_ne_bytes());
    header.extend(STATE.to_ne_bytes());
    header.extend([NTF_SELF, 0]);
    let (_, _, bytes) = address_parts(to);
    NetlinkRequest::new(kind, flags, &header).attribute(NDA_LLADDR, &[0; 6]).attribute(NDA_DST, &bytes)
}

fn is_one_of(error: &io::Error, codes: &[Errno]) -> bool {
    codes.iter().any(|&errno| error.raw_os_error() == Some(errno as i32))
}

/// Treats these errors as success.
fn ok_if(result: Result<(), Error>, codes: &[Errno]) -> Result<(), Error> {
    match result {
        Err(Error::Rejected { source, .. }) if is_one_of(&source, codes) => Ok(()),
        other => other,
    }
}
