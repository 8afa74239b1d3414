//! The CNI commands: ADD, DEL, CHECK, GC and STATUS.

use std::{
    collections::BTreeSet,
    os::fd::{AsFd as _, OwnedFd},
    sync::Arc,
};

use api::{ErrorChain, IfName, Mac, ipam::IPAM_PLUGIN};
use ipnet::IpNet;
use link::veth::{self, VethConfig, VethProperty};
use plan::attachment;
use serde_json::Value;
use tracing::info;
use wire::{
    cni::{self, Args, Code, Config, Error, Interface, Ip, Success, Verb},
    socket::Request,
};

use super::{
    CniHandler, NetworkState, NetworkView, Networks,
    address::{AllocatedIps, attachment_key, requested_addresses},
    caller::Caller,
    tombstone,
};

/// A network that a pod can join.
struct ReadyNetwork<'a> {
    uid: &'a str,
    bridge: u32,
    mtu: u32,
}

/// A sandbox's interface and the name of its host end.
pub(super) struct AttachmentId<'a> {
    container_id: &'a str,
    ifname: &'a str,
    pub(super) host: IfName,
}

/// A call with a valid configuration.
pub(super) struct CniCall<'a> {
    pub(super) request: &'a Request,
    pub(super) config: &'a Config,
    pub(super) caller: &'a Caller<'a>,
}

impl CniHandler {
    /// Runs a call and returns what the plugin prints. Blocks on the kernel.
    pub(super) fn serve(
        &self,
        request: &Request,
        namespace: Option<&OwnedFd>,
        caller: &Caller<'_>,
    ) -> Result<Vec<u8>, Error> {
        let verb: Verb = request.command.parse()?;
        // DEL must succeed even if the configuration is no longer readable.
        match verb {
            Verb::Del => {
                self.delete(request)?;
                self.apply_tombstones();
                return Ok(Vec::new());
            }
            Verb::Version => return Ok(cni::versions()),
            Verb::Add | Verb::Check | Verb::Status | Verb::Gc => {}
        }
        let config = Config::parse(&request.stdin)?;
        verb.allowed_in(config.version)?;
        let call = CniCall { request, config: &config, caller };
        if request.plugin == IPAM_PLUGIN {
            return self.serve_addresses(verb, &call);
        }
        match verb {
            Verb::Add => self.add(&call, namespace).map(|result| result.render(config.version)),
            Verb::Check => self.check(request, namespace, &config).map(|()| Vec::new()),
            Verb::Gc => self.collect_garbage(&config).map(|()| Vec::new()),
            Verb::Status => self.status(&config).map(|()| Vec::new()),
            Verb::Del | Verb::Version => Ok(Vec::new()),
        }
    }

    fn add(&self, call: &CniCall<'_>, namespace: Option<&OwnedFd>) -> Result<Success, Error> {
        let CniCall { request, config, caller } = *call;
        let args = Args::parse(&request.args)?;
        let id = attachment_id(request)?;
        let inside = inside(request)?;
        let namespace = namespace.ok_or_else(missing_namespace)?;
        let requested_mac = config.mac.as_deref().or(args.mac.as_deref()).map(mac).transpose()?;
        let network = network(config)?;
        let requested_ips = requested_addresses(config, &args)?;
        let leases = uses_patchbay_ipam(config)?.then_some(&requested_ips);
        if let (None, Some(address)) = (leases, requested_ips.first()) {
            let msg = format!(
                "address {} is requested, but this attachment has no IPAM: set \"ipam\": {{\"type\": \
                \"{IPAM_PLUGIN}\"}} in its configuration, or request no address",
                address.addr()
            );
            return Err(Error::new(Code::InvalidConfig, msg));
        }

        let _lock = self.lock(&id.host);
        // The previous holder of the lock may have taken long, and may have been the DEL of this interface.
        caller.check_connected()?;
        let view = self.view();
        let ready = ready(&view, network)?;
        let mtu = mtu(config, network, &ready)?;
        // A remaining tombstone would delete the new link and release its addresses.
        tombstone::remove(&self.tombstones, request).map_err(|error| {
            Error::new(Code::Io, "remove the tombstone of an earlier interface").details(error.to_string())
        })?;
        let given = match leases {
            Some(requested) => self.allocate(&view, network, call, &args, requested)?,
            None => AllocatedIps::default(),
        };
        let addresses: Vec<IpNet> = given.ips.iter().map(|ip| ip.address).collect();
        let routes: Vec<veth::Route> =
            given.routes.iter().map(|route| veth::Route { dst: route.dst, gw: route.gw }).collect();
        let wanted = VethConfig {
            namespace: namespace.as_fd(),
            host: &id.host,
            inside: &inside,
            mac: requested_mac.unwrap_or_else(|| attachment::mac(id.container_id, id.ifname, ready.uid)),
            mtu,
            bridge: ready.bridge,
            alias: &attachment::alias(ready.uid, &config.name, id.container_id, id.ifname),
            proc_root: &self.proc_root,
            addresses: &addresses,
            routes: &routes,
        };
        let created = veth::attach(&wanted).map_err(|error| attach_error(&error))?;
        self.verify_still_ready(&view, network, &id.host)?;
        info!(
            network,
            container_id = id.container_id,
            ifname = id.ifname,
            pod = format!("{}/{}", args.pod.namespace, args.pod.name),
            host = %id.host,
            mac = %wanted.mac,
            mtu,
            ?addresses,
            already_existed = created == veth::AttachOutcome::Unchanged,
            "attached a pod"
        );
        let inside = |ip: Ip| Ip { interface: Some(1), ..ip };
        let ips = given.ips.into_iter().map(inside).collect();
        Ok(Success { interfaces: interfaces(request, &wanted), ips, routes: given.routes })
    }

    /// Deletes the new link again if the network was removed in the meantime. The controller first publishes that a network
    /// is being removed and then lists the links of pods, so one of the two sees the other.
    pub(super) fn verify_still_ready(
        &self,
        before: &Networks,
        network: &str,
        host: &IfName,
    ) -> Result<(), Error> {
        let (joined, now) = (ready(before, network)?, self.view());
        let error = match ready(&now, network) {
            Ok(now) if (now.uid, now.bridge) == (joined.uid, joined.bridge) => return Ok(()),
            Ok(_) => Error::new(
                Code::TryAgainLater,
                format!("network {network:?} was recreated during the call; retrying"),
            ),
            Err(error) => error,
        };
        veth::detach(host).map_err(|error| attach_error(&error))?;
        Err(error)
    }

    /// Deletes the links of this sandbox and interface, whatever else the call contains.
    fn delete(&self, request: &Request) -> Result<(), Error> {
        self.delete_if(request, || true)
    }

    /// Does the same if `still` holds once the pair of links is locked.
    pub(super) fn delete_if(&self, request: &Request, still: impl FnOnce() -> bool) -> Result<(), Error> {
        let id = attachment_id(request)?;
        let _lock = self.lock(&id.host);
        if !still() {
            return Ok(());
        }
        let key = attachment_key(request);
        if request.plugin == IPAM_PLUGIN {
            self.ipam.release(&key);
            return Ok(());
        }
        match veth::detach(&id.host) {
            Ok(true) => {
                let AttachmentId { container_id, ifname, host } = id;
                info!(container_id, ifname, %host, "detached a pod");
            }
            // A foreign link of this name does not belong to the pod.
            Ok(false) | Err(veth::Error::NotAVeth { .. }) => {}
            Err(error) => return Err(attach_error(&error)),
        }
        // The addresses are released only after the link that carries them is deleted.
        self.ipam.release(&key);
        Ok(())
    }

    fn check(&self, request: &Request, namespace: Option<&OwnedFd>, config: &Config) -> Result<(), Error> {
        let args = Args::parse(&request.args)?;
        let id = attachment_id(request)?;
        let inside = inside(request)?;
        let namespace = namespace.ok_or_else(missing_namespace)?;
        let network = network(config)?;
        let requested_mac = config.mac.as_deref().or(args.mac.as_deref()).map(mac).transpose()?;
        let previous = previous_interface(config, &request.ifname);
        let text = previous.and_then(|interface| interface["mac"].as_str());
        let requested_mac = text.map(mac).transpose()?.or(requested_mac);
        let mtu = previous.and_then(|interface| u32::try_from(interface["mtu"].as_u64()?).ok());
        let given = if uses_patchbay_ipam(config)? { self.check_lease(request, config)? } else { Vec::new() };

        let _lock = self.lock(&id.host);
        let view = self.view();
        let ready = ready(&view, network)?;
        let wanted = VethConfig {
            namespace: namespace.as_fd(),
            host: &id.host,
            inside: &inside,
            mac: requested_mac.unwrap_or_else(|| attachment::mac(id.container_id, id.ifname, ready.uid)),
            mtu: mtu.unwrap_or(ready.mtu),
            bridge: ready.bridge,
            alias: &attachment::alias(ready.uid, &config.name, id.container_id, id.ifname),
            proc_root: &self.proc_root,
            addresses: &given,
            routes: &[],
        };
        let mut differences = veth::check(&wanted).map_err(|error| attach_error(&error))?;
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

    /// Deletes links of this configuration that are not among the runtime's valid attachments.
    fn collect_garbage(&self, config: &Config) -> Result<(), Error> {
        let network = network(config)?;
        let valid = config.valid_attachments.as_ref().ok_or_else(|| {
            Error::new(
                Code::InvalidConfig,
                "GC needs cni.dev/valid-attachments; without it, it would delete every link",
            )
        })?;
        let view = self.view();
        let Some(NetworkView { uid, .. }) = view.by_name.get(network) else {
            // An unknown network has no links here once the networks are synced.
            return require_synced(&view, Code::TryAgainLater);
        };
        let hosts = valid.iter().map(|valid| attachment::host_ifname(&valid.container_id, &valid.ifname));
        let keep: BTreeSet<IfName> = hosts.filter_map(Result::ok).collect();
        let ends = veth::host_veths(&attachment::alias_prefix(uid, &config.name))
            .map_err(|error| attach_error(&error))?;
        let names = ends.iter().filter_map(|end| end.name.parse::<IfName>().ok());
        let mut problem = None;
        for host in names.filter(|name| !keep.contains(name)) {
            let _lock = self.lock(&host);
            match veth::detach(&host) {
                Ok(_) => info!(network, %host, "deleted a link that the runtime no longer uses"),
                Err(error) => problem = Some(attach_error(&error)),
            }
        }
        match problem {
            Some(problem) => Err(problem),
            // The addresses are released only after the links that carry them are deleted.
            None => self.gc_addresses(uid, config, valid),
        }
    }

    fn status(&self, config: &Config) -> Result<(), Error> {
        require_synced(&self.view(), Code::NotAvailable)?;
        if uses_patchbay_ipam(config)? { self.ipam.status() } else { Ok(()) }
    }

    pub(super) fn view(&self) -> Arc<Networks> {
        Arc::clone(&self.networks.borrow())
    }
}

const NOT_SYNCED: &str = "the patchbay node daemon has not yet read the networks from the API server; \
    if this persists, see the log of its pod on this node";

/// Fails until the networks have been read from the API server.
pub(super) fn require_synced(view: &Networks, code: Code) -> Result<(), Error> {
    if view.synced { Ok(()) } else { Err(Error::new(code, NOT_SYNCED)) }
}

fn ready<'a>(view: &'a Networks, name: &str) -> Result<ReadyNetwork<'a>, Error> {
    let later = |msg: String| Err(Error::new(Code::TryAgainLater, msg));
    match view.by_name.get(name) {
        None if !view.synced => later(NOT_SYNCED.to_owned()),
        None => later(format!("there is no BridgeNetwork {name:?}: create it, or correct the configuration")),
        Some(NetworkView { uid, state, .. }) => match state {
            NetworkState::Ready { bridge_index, mtu, removing: _ } => {
                Ok(ReadyNetwork { uid, bridge: *bridge_index, mtu: *mtu })
            }
            NetworkState::NotReady { reason, message } => later(format!(
                "network {name:?} is not ready on this node ({reason}): {message}; \
                the pod starts once the network is ready"
            )),
            NetworkState::NotSelected => later(format!(
                "network {name:?} does not select this node: run the pod on a node with the label \
                network.patchbay.dev/{name}=true, or change spec.nodeSelector of the BridgeNetwork"
            )),
            NetworkState::Removing => later(format!(
                "network {name:?} is being removed from this node: remove it from the pod, or create it again"
            )),
        },
    }
}

/// The MTU of the pod's link. While an MTU is being raised, a NetworkAttachmentDefinition can be ahead of this node, so a
/// larger value is retried.
fn mtu(config: &Config, network: &str, ready: &ReadyNetwork<'_>) -> Result<u32, Error> {
    match config.mtu {
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

pub(super) fn attachment_id(request: &Request) -> Result<AttachmentId<'_>, Error> {
    let refused = |msg: &str| Error::new(Code::InvalidEnvironment, msg);
    let Request { container_id, ifname, .. } = request;
    if container_id.is_empty() {
        return Err(refused("CNI_CONTAINERID is missing"));
    }
    if ifname.is_empty() {
        return Err(refused("CNI_IFNAME is missing"));
    }
    let host = attachment::host_ifname(container_id, ifname).map_err(|error| refused(&error.to_string()))?;
    Ok(AttachmentId { container_id, ifname, host })
}

fn inside(request: &Request) -> Result<IfName, Error> {
    let refused = |error: api::ifname::Error| {
        Error::new(Code::InvalidEnvironment, "CNI_IFNAME is not a valid interface name")
            .details(error.to_string())
    };
    request.ifname.parse().map_err(refused)
}

fn missing_namespace() -> Error {
    Error::new(Code::InvalidEnvironment, "CNI_NETNS is missing or cannot be opened")
}

/// Whether the configuration uses Patchbay's IPAM.
fn uses_patchbay_ipam(config: &Config) -> Result<bool, Error> {
    match &config.ipam {
        None => Ok(false),
        Some(ipam) if ipam.plugin == IPAM_PLUGIN => match (&ipam.network, &config.network) {
            (Some(ipam), Some(network)) if ipam != network => {
                let msg =
                    "ipam.network differs from network: a pod gets addresses of the network that it joins";
                Err(Error::new(Code::InvalidConfig, msg))
            }
            _ => Ok(true),
        },
        Some(ipam) => {
            let msg = format!(
                "patchbay-bridge supports only the IPAM plugin {IPAM_PLUGIN}, not {:?}: set \
                \"ipam\": {{\"type\": \"{IPAM_PLUGIN}\"}}, or remove it",
                ipam.plugin.chars().take(64).collect::<String>()
            );
            Err(Error::new(Code::UnsupportedField, msg))
        }
    }
}

fn network(config: &Config) -> Result<&str, Error> {
    config.network.as_deref().ok_or_else(|| {
        let msg = "the configuration names no network: set \"network\": \"<name of a BridgeNetwork>\"";
        Error::new(Code::InvalidConfig, msg)
    })
}

/// Parses a unicast MAC address.
fn mac(text: &str) -> Result<Mac, Error> {
    let refused = |msg: String| Error::new(Code::InvalidConfig, msg);
    let mac: Mac = text.parse().map_err(|error: api::mac::Error| refused(error.to_string()))?;
    if mac.octets()[0] & 1 != 0 {
        return Err(refused(format!("mac {mac} is a multicast address: the first octet must be even")));
    }
    if mac.octets() == [0; 6] {
        return Err(refused(format!("mac {mac} is not a valid address of an interface")));
    }
    Ok(mac)
}

/// The pod's interface in the result of ADD.
fn previous_interface<'a>(config: &'a Config, ifname: &str) -> Option<&'a Value> {
    let interfaces = config.prev_result.as_ref()?.get("interfaces")?.as_array()?;
    let inside =
        |interface: &&Value| interface["sandbox"].as_str().is_some_and(|sandbox| !sandbox.is_empty());
    interfaces.iter().filter(inside).find(|interface| interface["name"] == ifname)
}

fn interfaces(request: &Request, attached: &VethConfig<'_>) -> Vec<Interface> {
    let mtu = Some(attached.mtu);
    let host = Interface { name: attached.host.to_string(), mtu, mac: None, sandbox: None };
    let inside = Interface {
        name: attached.inside.to_string(),
        mac: Some(attached.mac.to_string()),
        mtu,
        sandbox: Some(request.netns.clone()),
    };
    vec![host, inside]
}

/// The CNI error for a failed kernel operation.
fn attach_error(error: &veth::Error) -> Error {
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
