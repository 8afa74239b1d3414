//! Attaches pods to networks, and detaches them.
//!
//! The CNI server translates its calls into calls of the [`Attacher`]; other callers need no CNI socket. Two calls for one
//! interface never run concurrently, so a daemon has one `Attacher`. All calls block on the kernel and the disk: a lease is on
//! disk before its address is configured, and before the call returns.
//!
//! Errors are those of CNI, because the runtime and the user see them.

mod address;

use std::{
    collections::BTreeSet,
    os::fd::BorrowedFd,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use api::{ErrorChain, IfName, Mac, digest::digest};
use ipnet::IpNet;
use link::veth::{self, Announce, VethConfig, VethProperty};
use plan::{
    attachment,
    ipam::{AttachmentKey, LeaseClaim, PodRef},
};
use tracing::info;
use wire::{
    cni::{Attachment, Code, Error},
    socket::{Request, TOMBSTONE_DIR},
};

pub use address::{ADD_TIMEOUT, AddressRequest, AllocatedAddresses};

use crate::{
    claims::{Announcer, ServedClaim},
    cni::tombstone,
    ipam::Ipam,
    network_snapshot::{NetworkView, Networks, NetworksReader, ReadyNetwork},
};

/// Locks for host interfaces. Calls for one interface never run concurrently; two interfaces rarely share a lock.
const LOCK_SHARDS: usize = 1024;

/// Attaches and detaches the pods of this node.
pub struct Attacher {
    networks: NetworksReader,
    ipam: Arc<Ipam>,
    tombstones: PathBuf,
    /// `/proc` of the host.
    proc_root: PathBuf,
    announcer: Announcer,
    locks: Vec<Mutex<()>>,
}

/// A sandbox's interface and the name of its host end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttachmentId<'a> {
    pub container_id: &'a str,
    pub ifname: &'a str,
    pub host: IfName,
}

/// What a pod gets.
pub struct AttachRequest<'a> {
    pub id: &'a AttachmentId<'a>,
    /// The pod's network namespace.
    pub namespace: BorrowedFd<'a>,
    pub pod: PodRef,
    pub network: &'a str,
    /// The name of the CNI configuration. GC of a configuration covers its attachments only.
    pub config: &'a str,
    /// The CNI plugin whose DEL ends this attachment. Its tombstone of an earlier interface is removed.
    pub plugin: &'a str,
    /// None without IPAM; else the addresses that the pod requests, or none for any.
    pub addresses: Option<&'a [IpNet]>,
    /// The claim whose addresses the pod gets.
    pub claim: Option<&'a ServedClaim>,
    /// None for the MAC address that is derived from the claim, or from the attachment and the network.
    pub mac: Option<Mac>,
    /// None for the MTU of the network.
    pub mtu: Option<u32>,
    /// Fails once the caller has gone. Then nothing is created.
    pub caller_alive: &'a dyn Fn() -> Result<(), Error>,
}

/// What a pod got.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttachResult {
    /// The end of the pair of links on the host.
    pub host: IfName,
    /// The end in the pod.
    pub inside: IfName,
    /// The MAC address in the pod.
    pub mac: Mac,
    pub mtu: u32,
    pub allocated: AllocatedAddresses,
}

/// What an attachment is compared with.
pub struct CheckRequest<'a> {
    pub id: &'a AttachmentId<'a>,
    /// The pod's network namespace.
    pub namespace: BorrowedFd<'a>,
    pub network: &'a str,
    pub config: &'a str,
    /// None without IPAM; else the addresses that the result of attaching contained.
    pub addresses: Option<&'a [IpNet]>,
    pub mac: Option<Mac>,
    /// None if the MTU that the pod got is not known.
    pub mtu: Option<u32>,
}

/// What a call is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttachmentScope {
    /// The links of the pod and its addresses.
    Interface,
    /// The addresses only: another plugin created the link.
    Addresses,
}

impl<'a> AttachmentId<'a> {
    pub fn new(container_id: &'a str, ifname: &'a str) -> Result<Self, Error> {
        let refused = |msg: &str| Error::new(Code::InvalidEnvironment, msg);
        if container_id.is_empty() {
            return Err(refused("CNI_CONTAINERID is missing"));
        }
        if ifname.is_empty() {
            return Err(refused("CNI_IFNAME is missing"));
        }
        let host =
            attachment::host_ifname(container_id, ifname).map_err(|error| refused(&error.to_string()))?;
        Ok(Self { container_id, ifname, host })
    }

    /// The name in the pod. Only what is to be created needs a valid one.
    pub fn inside(&self) -> Result<IfName, Error> {
        let refused = |error: api::ifname::Error| {
            Error::new(Code::InvalidEnvironment, "CNI_IFNAME is not a valid interface name")
                .details(error.to_string())
        };
        self.ifname.parse().map_err(refused)
    }

    pub fn key(&self) -> AttachmentKey {
        AttachmentKey { container: self.container_id.to_owned(), interface: self.ifname.to_owned() }
    }
}

impl Attacher {
    pub fn new(
        networks: NetworksReader,
        ipam: Arc<Ipam>,
        state_dir: &Path,
        proc_root: PathBuf,
        announcer: Announcer,
    ) -> Self {
        let locks = (0..LOCK_SHARDS).map(|_| Mutex::new(())).collect();
        Self { networks, ipam, tombstones: state_dir.join(TOMBSTONE_DIR), proc_root, announcer, locks }
    }

    /// The networks of this node now.
    pub fn networks(&self) -> Arc<Networks> {
        Arc::clone(&self.networks.borrow())
    }

    pub fn ipam(&self) -> &Ipam {
        &self.ipam
    }

    /// The directory where the CNI plugin leaves its tombstones.
    pub fn tombstones(&self) -> &Path {
        &self.tombstones
    }

    /// Connects a pod to a network. A repeated call returns the same result.
    pub fn attach(&self, request: &AttachRequest<'_>) -> Result<AttachResult, Error> {
        let AttachRequest { id, namespace, pod, network, config, plugin, addresses, .. } = request;
        let inside = id.inside()?;

        let _lock = self.lock(&id.host);
        // The previous holder of the lock may have taken long, and may have been the DEL of this interface.
        (request.caller_alive)()?;
        let view = self.networks();
        let ready = view.ready(network)?;
        let mtu = mtu(request.mtu, network, &ready)?;
        // A remaining tombstone would delete the new link and release its addresses.
        self.remove_tombstone(plugin, id).map_err(|error| {
            Error::new(Code::Io, "cannot remove the tombstone of an earlier interface")
                .details(error.to_string())
        })?;
        let allocated = match addresses {
            Some(requested) => {
                let (pod, claim, caller_alive) = (pod.clone(), request.claim, request.caller_alive);
                let wanted =
                    AddressRequest { id, pod, network, config, plugin, requested, claim, caller_alive };
                self.allocate_locked(&view, &wanted)?
            }
            None => AllocatedAddresses::default(),
        };
        let addresses: Vec<IpNet> = allocated.addresses.iter().map(|info| info.net).collect();
        let wanted = VethConfig {
            namespace: *namespace,
            host: &id.host,
            inside: &inside,
            mac: request.mac.unwrap_or_else(|| default_mac(id, ready.uid, allocated.claim.as_ref())),
            mtu,
            bridge: ready.bridge,
            alias: &attachment::alias(ready.uid, config, id.container_id, id.ifname),
            proc_root: &self.proc_root,
            addresses: &addresses,
            routes: &allocated.routes,
            announce: if is_shared(allocated.claim.as_ref()) { Announce::Later } else { Announce::Now },
        };
        let created = veth::attach(&wanted).map_err(|error| link_error(&error))?;
        self.verify_still_ready(&view, network, &id.host)?;
        if let Some(holders) = request.claim.and_then(|claim| claim.holders.clone()) {
            self.announcer.watch(id.key(), holders);
        }
        let mac = wanted.mac;
        info!(
            network,
            container_id = id.container_id,
            ifname = id.ifname,
            pod = format!("{}/{}", pod.namespace, pod.name),
            host = %id.host,
            %mac,
            mtu,
            ?addresses,
            already_existed = created == veth::AttachOutcome::Unchanged,
            "attached a pod"
        );
        Ok(AttachResult { host: id.host.clone(), inside, mac, mtu, allocated })
    }

    /// Deletes the new link again if the network was removed in the meantime. The controller first publishes that a network
    /// is being removed and then lists the links of pods, so one of the two sees the other.
    pub(crate) fn verify_still_ready(
        &self,
        before: &Networks,
        network: &str,
        host: &IfName,
    ) -> Result<(), Error> {
        let (joined, now) = (before.ready(network)?, self.networks());
        let error = match now.ready(network) {
            Ok(now) if (now.uid, now.bridge) == (joined.uid, joined.bridge) => return Ok(()),
            Ok(_) => Error::new(
                Code::TryAgainLater,
                format!("network {network:?} was recreated during the call; the runtime retries"),
            ),
            Err(error) => error,
        };
        veth::detach(host).map_err(|error| link_error(&error))?;
        Err(error)
    }

    /// Removes what an interface has, of whatever network. A repeated call succeeds.
    pub fn detach(&self, id: &AttachmentId<'_>, scope: AttachmentScope) -> Result<(), Error> {
        self.detach_if(id, scope, || true)
    }

    /// Does the same if `still` holds once the pair of links is locked.
    pub fn detach_if(
        &self,
        id: &AttachmentId<'_>,
        scope: AttachmentScope,
        still: impl FnOnce() -> bool,
    ) -> Result<(), Error> {
        let _lock = self.lock(&id.host);
        if !still() {
            return Ok(());
        }
        self.announcer.forget(&id.key());
        if scope == AttachmentScope::Interface {
            match veth::detach(&id.host) {
                Ok(true) => {
                    let AttachmentId { container_id, ifname, host } = id;
                    info!(container_id, ifname, %host, "detached a pod");
                }
                // A foreign link of this name does not belong to the pod.
                Ok(false) | Err(veth::Error::NotAVeth { .. }) => {}
                Err(error) => return Err(link_error(&error)),
            }
        }
        // The addresses are released only after the link that carries them is deleted.
        self.ipam.release(&id.key());
        Ok(())
    }

    /// Compares the links and addresses of an interface with what attaching it created.
    pub fn check(&self, request: &CheckRequest<'_>) -> Result<(), Error> {
        let CheckRequest { id, namespace, network, config, addresses, mac, mtu } = request;
        let inside = id.inside()?;
        let addresses = match addresses {
            Some(reported) => self.check_lease(&id.key(), reported)?,
            None => Vec::new(),
        };

        let _lock = self.lock(&id.host);
        let view = self.networks();
        let ready = view.ready(network)?;
        let wanted = VethConfig {
            namespace: *namespace,
            host: &id.host,
            inside: &inside,
            mac: mac.unwrap_or_else(|| {
                let claim = self.ipam.grant(&id.key()).and_then(|grant| grant.lease.claim);
                default_mac(id, ready.uid, claim.as_ref())
            }),
            mtu: mtu.unwrap_or(ready.mtu),
            bridge: ready.bridge,
            alias: &attachment::alias(ready.uid, config, id.container_id, id.ifname),
            proc_root: &self.proc_root,
            addresses: &addresses,
            routes: &[],
            announce: Announce::Now,
        };
        let mut differences = veth::check(&wanted).map_err(|error| link_error(&error))?;
        // The host end follows a raised MTU of the network, and only CNI 1.1.0 records the MTU that the pod got.
        differences.retain(|difference| {
            difference.property != VethProperty::Mtu || (mtu.is_some() && difference.link == inside)
        });
        if differences.is_empty() {
            return Ok(());
        }
        let list: Vec<String> = differences.iter().map(ToString::to_string).collect();
        let msg = format!("the pod's link to network {network:?} differs from the result of ADD");
        Err(Error::new(Code::Differs, msg).details(list.join("; ")))
    }

    /// Removes what the interfaces of a configuration have that are not valid.
    pub fn collect_garbage(
        &self,
        network: &str,
        config: &str,
        valid: &[Attachment],
        scope: AttachmentScope,
    ) -> Result<(), Error> {
        let view = self.networks();
        let Some(NetworkView { uid, .. }) = view.by_name.get(network) else {
            // A network that does not exist has no links and leases here; one that is not known yet may have some.
            return view.require_synced(Code::TryAgainLater);
        };
        if scope == AttachmentScope::Interface {
            self.delete_unused_links(network, uid, config, valid)?;
        }
        // The addresses are released only after the links that carry them are deleted.
        let key = |valid: &Attachment| AttachmentKey {
            container: valid.container_id.clone(),
            interface: valid.ifname.clone(),
        };
        self.ipam.gc_config(uid, config, &valid.iter().map(key).collect()).map(drop)
    }

    /// Goes on after a failure, and returns the last one.
    fn delete_unused_links(
        &self,
        network: &str,
        uid: &str,
        config: &str,
        valid: &[Attachment],
    ) -> Result<(), Error> {
        let hosts = valid.iter().map(|valid| attachment::host_ifname(&valid.container_id, &valid.ifname));
        let keep: BTreeSet<IfName> = hosts.filter_map(Result::ok).collect();
        let ends =
            veth::host_veths(&attachment::alias_prefix(uid, config)).map_err(|error| link_error(&error))?;
        let names = ends.iter().filter_map(|end| end.name.parse::<IfName>().ok());
        let mut result = Ok(());
        for host in names.filter(|name| !keep.contains(name)) {
            let _lock = self.lock(&host);
            match veth::detach(&host) {
                Ok(_) => info!(network, %host, "deleted a link that the runtime no longer uses"),
                Err(error) => result = Err(link_error(&error)),
            }
        }
        result
    }

    fn remove_tombstone(&self, plugin: &str, id: &AttachmentId<'_>) -> std::io::Result<()> {
        let deleted = Request {
            plugin: plugin.to_owned(),
            container_id: id.container_id.to_owned(),
            ifname: id.ifname.to_owned(),
            ..Request::default()
        };
        tombstone::remove(&self.tombstones, &deleted)
    }

    /// Locks the pair of links with this host end.
    fn lock(&self, host: &IfName) -> Option<MutexGuard<'_, ()>> {
        let shard = usize::try_from(digest([host.as_str()]) % LOCK_SHARDS as u64).ok()?;
        // State behind a poisoned lock stays usable: every change is preceded by a comparison with the kernel.
        Some(self.locks.get(shard)?.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The MAC address of an attachment that requests none. One that shares its addresses has its own: with the MAC address of
/// the other pod, it would draw the frames to that pod.
fn default_mac(id: &AttachmentId<'_>, network_uid: &str, claim: Option<&LeaseClaim>) -> Mac {
    match claim {
        Some(claim) if !claim.shared => attachment::claim_mac(&claim.uid),
        _ => attachment::mac(id.container_id, id.ifname, network_uid),
    }
}

fn is_shared(claim: Option<&LeaseClaim>) -> bool {
    claim.is_some_and(|claim| claim.shared)
}

/// The MTU of the pod's link. While an MTU is being raised, a NetworkAttachmentDefinition can be ahead of this node, so a
/// larger value is retried.
fn mtu(requested: Option<u32>, network: &str, ready: &ReadyNetwork<'_>) -> Result<u32, Error> {
    match requested {
        Some(requested) if requested > ready.mtu => {
            let has = ready.mtu;
            let msg = format!(
                "mtu {requested} exceeds the MTU {has} of network {network:?} on this node: wait if it was just raised, \
                otherwise set {has} or less"
            );
            Err(Error::new(Code::TryAgainLater, msg))
        }
        requested => Ok(requested.unwrap_or(ready.mtu)),
    }
}

/// The CNI error for a failed kernel operation.
fn link_error(error: &veth::Error) -> Error {
    use veth::Error as E;
    let code = match error {
        E::NameTaken { .. } | E::RouteConflict { .. } | E::NotANamespace(_) | E::HostNamespace => {
            Code::InvalidEnvironment
        }
        E::MtuTooSmallForIpv6 { .. } | E::FamilyMismatch { .. } | E::GatewayUnreachable { .. } => {
            Code::InvalidConfig
        }
        E::BridgeNotFound(_) => Code::TryAgainLater,
        E::NotAVeth { .. } | E::LinkGone { .. } | E::NoIpv6 | E::Sysctl { .. } | E::Kernel(_) => Code::Io,
    };
    Error::new(code, ErrorChain(error).to_string())
}
