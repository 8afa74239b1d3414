//! Changing links, one step at a time.

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
    Error,
    dump::Asker,
    message, namespace,
    request::{CHANGE, CREATE, Request, link_header, wire},
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

/// Changes the links of one network namespace. Every call waits for the kernel.
pub struct Changer {
    asker: Asker,
    sysctls: PathBuf,
    /// The namespace, if it is not the one of the threads that call.
    namespace: Option<OwnedFd>,
}

impl Changer {
    /// Changes the network namespace of this thread. The root of the sysctls is `/proc/sys`, wherever it is mounted.
    pub fn open(sysctls: &Path) -> Result<Self, Error> {
        Ok(Self { asker: Asker::open()?, sysctls: sysctls.to_owned(), namespace: None })
    }

    /// Changes another network namespace.
    pub fn open_in(namespace: impl AsFd, sysctls: &Path) -> Result<Self, Error> {
        let kept = namespace.as_fd().try_clone_to_owned().map_err(Error::Enter)?;
        let asker = namespace::within(&namespace, Asker::open)??;
        Ok(Self { asker, sysctls: sysctls.to_owned(), namespace: Some(kept) })
    }

    /// Does one step of a plan. What is undone already is done.
    pub fn apply(&mut self, action: &Action) -> Result<(), Error> {
        match action {
            Action::WriteRecord(_) | Action::RemoveRecord => Err(Error::NotForTheKernel),
            Action::CreateBridge { name, mac, mtu } => {
                let request = create(name, *mac, mtu.saturating_sub(1))
                    .nested(IFLA_LINKINFO, &[], |info| info.text(IFLA_INFO_KIND, "bridge"));
                self.create("bridge", "make a bridge", request)
            }
            Action::CreateVxlan { name, mac, mtu, overlay, local, bridge } => {
                let request = create(name, *mac, *mtu).number(IFLA_MASTER, *bridge).nested(
                    IFLA_LINKINFO,
                    &[],
                    |info| vxlan(info, *overlay, *local),
                );
                self.create("vxlan", "make a VXLAN device", request)
            }
            Action::Delete { link } => {
                let request = Request::new(message::DELETE_LINK, CHANGE, &link_header(*link, 0, 0));
                done_if(self.asker.change("delete a link", request), &[Errno::ENODEV])
            }
            Action::Rename { link, name } => self.rename(*link, name),
            Action::SetAlias { link, alias } => {
                self.set("set the alias of a link", set(*link).attribute(IFLA_IFALIAS, alias.as_bytes()))
            }
            Action::SetMac { link, mac } => self
                .set("set the hardware address of a link", set(*link).attribute(IFLA_ADDRESS, &mac.octets())),
            Action::SetMtu { link, mtu } => {
                self.set("set the MTU of a link", set(*link).number(IFLA_MTU, *mtu))
            }
            Action::SetAdmin { link, admin } => self.set_admin(*link, *admin),
            // Off last: what says so is looked at.
            Action::DisableIpv6 { name } => {
                self.sysctls("ipv6", name, &[("accept_ra", "0"), ("disable_ipv6", "1")])
            }
            Action::IsolateIpv4 { name } => {
                self.sysctls("ipv4", name, &[("arp_ignore", "8"), ("rp_filter", "1"), ("forwarding", "0")])
            }
            Action::RemoveAddress { link, address } => {
                let removed = self.asker.change("remove an address", remove_address(*link, *address));
                done_if(removed, &[Errno::EADDRNOTAVAIL, Errno::ENODEV])
            }
            Action::SetMaster { link, bridge } => {
                self.set("make a link a port", set(*link).number(IFLA_MASTER, *bridge))
            }
            Action::ClearMaster { link } => {
                let parted = self.set("take a port from its bridge", set(*link).number(IFLA_MASTER, 0));
                done_if(parted, &[Errno::ENODEV])
            }
            Action::AddFlood { vxlan, to } => {
                /// `NLM_F_CREATE | NLM_F_APPEND`
                const APPEND: u16 = 0xc00;
                let request = flood(message::NEW_NEIGHBOUR, CHANGE | APPEND, *vxlan, *to);
                done_if(self.asker.change("add to a flood list", request), &[Errno::EEXIST])
            }
            Action::RemoveFlood { vxlan, to } => {
                let request = flood(message::DELETE_NEIGHBOUR, CHANGE, *vxlan, *to);
                let removed = self.asker.change("remove from a flood list", request);
                done_if(removed, &[Errno::ENOENT, Errno::ENODEV])
            }
        }
    }

    /// The link that packets to an address leave by; none if there is no way to it.
    pub fn route_to(&mut self, address: IpAddr) -> Result<Option<u32>, Error> {
        const RTA_DST: u16 = 1;
        const REQUEST: u16 = 1;
        const NO_WAY: [Errno; 6] = [
            Errno::ENETUNREACH,
            Errno::EHOSTUNREACH,
            Errno::EACCES,
            Errno::EINVAL,
            Errno::EAFNOSUPPORT,
            Errno::EOPNOTSUPP,
        ];

        let (family, length, bytes) = wire(address);
        let header = [family, length, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let request = Request::new(message::GET_ROUTE, REQUEST, &header).attribute(RTA_DST, &bytes);
        let way = self.asker.exchange("find the way to an address", request, |answer| {
            (answer.kind == message::NEW_ROUTE).then(|| message::way(answer.body))
        });
        match way {
            Err(Error::Refused { source, .. }) if is_one_of(&source, &NO_WAY) => Ok(None),
            other => Ok(other?.flatten()),
        }
    }

    fn create(&mut self, kind: &'static str, what: &'static str, request: Request) -> Result<(), Error> {
        match self.asker.change(what, request) {
            Err(Error::Refused { source, .. }) if is_one_of(&source, &[Errno::EOPNOTSUPP]) => {
                Err(Error::NoSuchKind { kind, source })
            }
            other => other,
        }
    }

    fn set(&mut self, what: &'static str, request: Request) -> Result<(), Error> {
        self.asker.change(what, request)
    }

    fn set_admin(&mut self, link: u32, admin: AdminState) -> Result<(), Error> {
        let flags = if admin == AdminState::Up { IFF_UP } else { 0 };
        let request = Request::new(message::SET_LINK, CHANGE, &link_header(link, flags, IFF_UP));
        self.set("set a link up or down", request)
    }

    /// Before Linux 6.2 a link must be down for it.
    fn rename(&mut self, link: u32, name: &IfName) -> Result<(), Error> {
        let request = || set(link).text(IFLA_IFNAME, name.as_str());
        match self.set("rename a link", request()) {
            Err(error) if error.errno() == Some(Errno::EBUSY as i32) => {}
            other => return other,
        }
        self.set_admin(link, AdminState::Down)?;
        let renamed = self.set("rename a link", request());
        self.set_admin(link, AdminState::Up).and(renamed)
    }

    /// Sets what the kernel knows about one link and one protocol. A kernel without the protocol has nothing to set.
    fn sysctls(&self, protocol: &str, name: &str, values: &[(&str, &str)]) -> Result<(), Error> {
        // It becomes a part of a path.
        if name.parse::<IfName>().is_err() {
            return Err(Error::Name { name: name.to_owned() });
        }
        let all = self.sysctls.join("net").join(protocol).join("conf");
        let write = || {
            if !all.exists() && self.sysctls.join("net").exists() {
                return Ok(());
            }
            for (key, value) in values {
                let path = all.join(name).join(key);
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

/// The beginning of a request that makes a link. It has its mark from its first moment on.
fn create(name: &IfName, mac: Mac, mtu: u32) -> Request {
    Request::new(message::NEW_LINK, CREATE, &link_header(0, 0, 0))
        .text(IFLA_IFNAME, name.as_str())
        .attribute(IFLA_ADDRESS, &mac.octets())
        .number(IFLA_MTU, mtu)
}

/// The beginning of a request that changes a link.
fn set(link: u32) -> Request {
    Request::new(message::SET_LINK, CHANGE, &link_header(link, 0, 0))
}

fn vxlan(info: Request, overlay: Overlay, local: IpAddr) -> Request {
    const IFLA_VXLAN_ID: u16 = 1;
    const IFLA_VXLAN_LOCAL: u16 = 4;
    const IFLA_VXLAN_LEARNING: u16 = 7;
    const IFLA_VXLAN_PORT: u16 = 15;
    const IFLA_VXLAN_LOCAL6: u16 = 17;

    let (_, _, bytes) = wire(local);
    let attribute = if local.is_ipv4() { IFLA_VXLAN_LOCAL } else { IFLA_VXLAN_LOCAL6 };
    info.text(IFLA_INFO_KIND, "vxlan").nested(IFLA_INFO_DATA, &[], |data| {
        data.number(IFLA_VXLAN_ID, overlay.vni)
            .attribute(attribute, &bytes)
            .attribute(IFLA_VXLAN_PORT, &overlay.port.to_be_bytes())
            .attribute(IFLA_VXLAN_LEARNING, &[1])
    })
}

fn remove_address(link: u32, address: IpNet) -> Request {
    const IFA_ADDRESS: u16 = 1;
    const IFA_LOCAL: u16 = 2;

    let (family, _, bytes) = wire(address.addr());
    let mut header = [family, address.prefix_len(), 0, 0, 0, 0, 0, 0];
    header[4..].copy_from_slice(&link.to_ne_bytes());
    let request = Request::new(message::DELETE_ADDRESS, CHANGE, &header).attribute(IFA_LOCAL, &bytes);
    if address.addr().is_ipv4() { request } else { request.attribute(IFA_ADDRESS, &bytes) }
}

/// An entry for frames to everybody in the list of a VXLAN device.
fn flood(kind: u16, flags: u16, vxlan: u32, to: IpAddr) -> Request {
    const NDA_DST: u16 = 1;
    const NDA_LLADDR: u16 = 2;
    /// `NUD_NOARP | NUD_PERMANENT`
    const STATE: u16 = 0xc0;
    const NTF_SELF: u8 = 2;

    let mut header = vec![message::BRIDGE, 0, 0, 0];
    header.extend(vxlan.to_ne_bytes());
    header.extend(STATE.to_ne_bytes());
    header.extend([NTF_SELF, 0]);
    let (_, _, bytes) = wire(to);
    Request::new(kind, flags, &header).attribute(NDA_LLADDR, &[0; 6]).attribute(NDA_DST, &bytes)
}

fn is_one_of(error: &io::Error, codes: &[Errno]) -> bool {
    codes.iter().any(|&errno| error.raw_os_error() == Some(errno as i32))
}

/// Takes these refusals for success: what was to be done is done.
fn done_if(result: Result<(), Error>, codes: &[Errno]) -> Result<(), Error> {
    match result {
        Err(Error::Refused { source, .. }) if is_one_of(&source, codes) => Ok(()),
        other => other,
    }
}
