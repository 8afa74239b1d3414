//! One CNI call: what it asks, and doing it.

use std::{
    collections::BTreeSet,
    os::fd::{AsFd as _, OwnedFd},
    sync::Arc,
};

use api::{Chain, IfName, Mac, ipam::IPAM_PLUGIN};
use ipnet::IpNet;
use link::attach::{self, Aspect, Attach};
use plan::attachment;
use serde_json::Value;
use tracing::info;
use wire::{
    cni::{self, Args, Code, Config, Error, Interface, Ip, Success, Verb},
    socket::Request,
};

use super::{
    NetworkView, Networks, Shared, State,
    address::{Given, place, requested},
    caller::Caller,
    tombstone,
};

/// A network that a pod can join.
struct Ready<'a> {
    uid: &'a str,
    bridge: u32,
    mtu: u32,
}

/// Whose interface it is.
pub(super) struct Whose<'a> {
    container_id: &'a str,
    ifname: &'a str,
    pub(super) host: IfName,
}

/// A call that can be read.
pub(super) struct Call<'a> {
    pub(super) request: &'a Request,
    pub(super) config: &'a Config,
    pub(super) caller: &'a Caller<'a>,
}

impl Shared {
    /// Does what is asked: what to print, or why not. Waits for the kernel.
    pub(super) fn serve(
        &self,
        request: &Request,
        namespace: Option<&OwnedFd>,
        caller: &Caller<'_>,
    ) -> Result<Vec<u8>, Error> {
        let verb: Verb = request.command.parse()?;
        // What is gone must not depend on a configuration that can still be read.
        match verb {
            Verb::Del => {
                self.delete(request)?;
                self.bury();
                return Ok(Vec::new());
            }
            Verb::Version => return Ok(cni::versions()),
            Verb::Add | Verb::Check | Verb::Status | Verb::Gc => {}
        }
        let config = Config::parse(&request.stdin)?;
        verb.allowed_in(config.version)?;
        let call = Call { request, config: &config, caller };
        if request.plugin == IPAM_PLUGIN {
            return self.serve_addresses(verb, &call);
        }
        match verb {
            Verb::Add => self.add(&call, namespace).map(|made| made.render(config.version)),
            Verb::Check => self.check(request, namespace, &config).map(|()| Vec::new()),
            Verb::Gc => self.collect(&config).map(|()| Vec::new()),
            Verb::Status => self.status(&config).map(|()| Vec::new()),
            Verb::Del | Verb::Version => Ok(Vec::new()),
        }
    }

    fn add(&self, call: &Call<'_>, namespace: Option<&OwnedFd>) -> Result<Success, Error> {
        let Call { request, config, caller } = *call;
        let args = Args::parse(&request.args)?;
        let whose = whose(request)?;
        let inside = inside(request)?;
        let namespace = namespace.ok_or_else(no_namespace)?;
        let asked = config.mac.as_deref().or(args.mac.as_deref()).map(mac).transpose()?;
        let network = network(config)?;
        let asked_for = requested(config, &args)?;
        let leases = hands_out(config)?.then_some(&asked_for);
        if let (None, Some(address)) = (leases, asked_for.first()) {
            let msg = format!(
                "address {} is asked for, but this attachment hands out none: write \"ipam\": {{\"type\": \
                \"{IPAM_PLUGIN}\"}} in its configuration, or ask for none",
                address.addr()
            );
            return Err(Error::new(Code::InvalidConfig, msg));
        }

        let _lock = self.lock(&whose.host);
        // Whoever had the lock may have taken long, and may have been the DEL of this very interface.
        caller.is_there()?;
        let view = self.view();
        let ready = ready(&view, network)?;
        let mtu = mtu(config, network, &ready)?;
        // One that is left would be applied to the new link, and to its addresses.
        tombstone::forget(&self.tombstones, request).map_err(|error| {
            Error::new(Code::Io, "remove the tombstone of an earlier interface").details(error.to_string())
        })?;
        let given = match leases {
            Some(asked) => self.lease(&view, network, call, &args, asked)?,
            None => Given::default(),
        };
        let addresses: Vec<IpNet> = given.ips.iter().map(|ip| ip.address).collect();
        let routes: Vec<attach::Route> =
            given.routes.iter().map(|route| attach::Route { dst: route.dst, gw: route.gw }).collect();
        let wanted = Attach {
            namespace: namespace.as_fd(),
            host: &whose.host,
            inside: &inside,
            mac: asked.unwrap_or_else(|| attachment::mac(whose.container_id, whose.ifname, ready.uid)),
            mtu,
            bridge: ready.bridge,
            alias: &attachment::alias(ready.uid, &config.name, whose.container_id, whose.ifname),
            proc_root: &self.proc_root,
            addresses: &addresses,
            routes: &routes,
        };
        let made = attach::attach(&wanted).map_err(|error| failed(&error))?;
        self.still_joined(&view, network, &whose.host)?;
        info!(
            network,
            container_id = whose.container_id,
            ifname = whose.ifname,
            pod = format!("{}/{}", args.pod.namespace, args.pod.name),
            host = %whose.host,
            mac = %wanted.mac,
            mtu,
            ?addresses,
            before = made == attach::Made::Before,
            "a pod joined"
        );
        let inside = |ip: Ip| Ip { interface: Some(1), ..ip };
        let ips = given.ips.into_iter().map(inside).collect();
        Ok(Success { interfaces: interfaces(request, &wanted), ips, routes: given.routes })
    }

    /// Takes the link away again if the network has gone while it was made. The daemon first says that a network is
    /// being removed and then looks for links of pods, so one of the two sees the other.
    pub(super) fn still_joined(&self, before: &Networks, network: &str, host: &IfName) -> Result<(), Error> {
        let (joined, now) = (ready(before, network)?, self.view());
        let error = match ready(&now, network) {
            Ok(now) if (now.uid, now.bridge) == (joined.uid, joined.bridge) => return Ok(()),
            Ok(_) => Error::new(Code::TryAgainLater, format!("network {network:?} was made anew meanwhile")),
            Err(error) => error,
        };
        attach::detach(host).map_err(|error| failed(&error))?;
        Err(error)
    }

    /// Whatever else the call says, the pair of this sandbox and interface is gone afterwards.
    fn delete(&self, request: &Request) -> Result<(), Error> {
        self.delete_if(request, || true)
    }

    /// The same, if it still is to be done when nobody else does anything to the pair.
    pub(super) fn delete_if(&self, request: &Request, still: impl FnOnce() -> bool) -> Result<(), Error> {
        let whose = whose(request)?;
        let _lock = self.lock(&whose.host);
        if !still() {
            return Ok(());
        }
        let place = place(request);
        if request.plugin == IPAM_PLUGIN {
            return self.ipam.delete(&place).map(drop);
        }
        match attach::detach(&whose.host) {
            Ok(true) => {
                let Whose { container_id, ifname, host } = whose;
                info!(container_id, ifname, %host, "a pod left");
            }
            // What somebody else made under this name is not the pod's.
            Ok(false) | Err(attach::Error::Foreign { .. }) => {}
            Err(error) => return Err(failed(&error)),
        }
        // Not before the link is gone that has them.
        self.ipam.delete(&place).map(drop)
    }

    fn check(&self, request: &Request, namespace: Option<&OwnedFd>, config: &Config) -> Result<(), Error> {
        let args = Args::parse(&request.args)?;
        let whose = whose(request)?;
        let inside = inside(request)?;
        let namespace = namespace.ok_or_else(no_namespace)?;
        let network = network(config)?;
        let asked = config.mac.as_deref().or(args.mac.as_deref()).map(mac).transpose()?;
        let before = answered(config, &request.ifname);
        let text = before.and_then(|interface| interface["mac"].as_str());
        let asked = text.map(mac).transpose()?.or(asked);
        let mtu = before.and_then(|interface| u32::try_from(interface["mtu"].as_u64()?).ok());
        let given = if hands_out(config)? { self.check_lease(request, config)? } else { Vec::new() };

        let _lock = self.lock(&whose.host);
        let view = self.view();
        let ready = ready(&view, network)?;
        let wanted = Attach {
            namespace: namespace.as_fd(),
            host: &whose.host,
            inside: &inside,
            mac: asked.unwrap_or_else(|| attachment::mac(whose.container_id, whose.ifname, ready.uid)),
            mtu: mtu.unwrap_or(ready.mtu),
            bridge: ready.bridge,
            alias: &attachment::alias(ready.uid, &config.name, whose.container_id, whose.ifname),
            proc_root: &self.proc_root,
            addresses: &given,
            routes: &[],
        };
        let mut differences = attach::inspect(&wanted).map_err(|error| failed(&error))?;
        // The host's end may follow a network whose MTU was raised, and only 1.1.0 remembers what the pod was given.
        differences.retain(|one| one.what != Aspect::Mtu || (mtu.is_some() && one.link == inside));
        if differences.is_empty() {
            return Ok(());
        }
        let told: Vec<String> = differences.iter().map(ToString::to_string).collect();
        let msg = format!("the pod's link to network {network:?} is not as it was made");
        Err(Error::new(Code::Differs, msg).details(told.join("; ")))
    }

    /// Removes the links that were made for this configuration and that the runtime does not know any more.
    fn collect(&self, config: &Config) -> Result<(), Error> {
        let network = network(config)?;
        let valid = config.valid_attachments.as_ref().ok_or_else(|| {
            Error::new(
                Code::InvalidConfig,
                "GC needs cni.dev/valid-attachments, or it would remove everything",
            )
        })?;
        let view = self.view();
        let Some(NetworkView { uid, .. }) = view.by_name.get(network) else {
            // A network that there is not has no links here; one that is not known yet may have.
            return read(&view, Code::TryAgainLater);
        };
        let hosts = valid.iter().map(|valid| attachment::host_ifname(&valid.container_id, &valid.ifname));
        let keep: BTreeSet<IfName> = hosts.filter_map(Result::ok).collect();
        let ends =
            attach::ends(&attachment::alias_prefix(uid, &config.name)).map_err(|error| failed(&error))?;
        let names = ends.iter().filter_map(|end| end.name.parse::<IfName>().ok());
        let mut problem = None;
        for host in names.filter(|name| !keep.contains(name)) {
            let _lock = self.lock(&host);
            match attach::detach(&host) {
                Ok(_) => info!(network, %host, "a link that the runtime has forgotten is removed"),
                Err(error) => problem = Some(failed(&error)),
            }
        }
        match problem {
            Some(problem) => Err(problem),
            // Not before the links are gone that have them.
            None => self.collect_addresses(uid, config, valid),
        }
    }

    fn status(&self, config: &Config) -> Result<(), Error> {
        read(&self.view(), Code::NotAvailable)?;
        if hands_out(config)? { self.ipam.status() } else { Ok(()) }
    }

    pub(super) fn view(&self) -> Arc<Networks> {
        Arc::clone(&self.networks.borrow())
    }
}

const UNREAD: &str = "the patchbay node daemon has not yet read the networks from the API server; \
    if this lasts, look at the log of its pod on this node";

/// Refuses as long as the networks are not known.
pub(super) fn read(view: &Networks, code: Code) -> Result<(), Error> {
    if view.synced { Ok(()) } else { Err(Error::new(code, UNREAD)) }
}

fn ready<'a>(view: &'a Networks, name: &str) -> Result<Ready<'a>, Error> {
    let later = |msg: String| Err(Error::new(Code::TryAgainLater, msg));
    match view.by_name.get(name) {
        None if !view.synced => later(UNREAD.to_owned()),
        None => later(format!("there is no BridgeNetwork {name:?}: create it, or correct the configuration")),
        Some(NetworkView { uid, state, .. }) => match state {
            State::Ready { bridge_index, mtu, removing: _ } => {
                Ok(Ready { uid, bridge: *bridge_index, mtu: *mtu })
            }
            State::NotReady { reason, message } => later(format!(
                "network {name:?} is not ready on this node ({reason}): {message}; \
                the pod starts by itself once it is"
            )),
            State::NotSelected => later(format!(
                "this node is not selected by network {name:?}: run the pod on a node with the label \
                network.patchbay.dev/{name}=true, or change spec.nodeSelector of the BridgeNetwork"
            )),
            State::Removing => later(format!(
                "network {name:?} is being removed from this node: take it out of the pod, or create it again"
            )),
        },
    }
}

/// What the pod's link gets. A NetworkAttachmentDefinition can be ahead of this node when an MTU is raised, so more than
/// the network has is no mistake yet.
fn mtu(config: &Config, network: &str, ready: &Ready<'_>) -> Result<u32, Error> {
    match config.mtu {
        Some(asked) if asked > ready.mtu => {
            let has = ready.mtu;
            let msg = format!(
                "mtu {asked} is more than the {has} of network {network:?} on this node: if it has just been raised \
                the node follows by itself, otherwise write {has} or less"
            );
            Err(Error::new(Code::TryAgainLater, msg))
        }
        asked => Ok(asked.unwrap_or(ready.mtu)),
    }
}

pub(super) fn whose(request: &Request) -> Result<Whose<'_>, Error> {
    let refused = |msg: &str| Error::new(Code::InvalidEnvironment, msg);
    let Request { container_id, ifname, .. } = request;
    if container_id.is_empty() {
        return Err(refused("CNI_CONTAINERID is missing"));
    }
    if ifname.is_empty() {
        return Err(refused("CNI_IFNAME is missing"));
    }
    let host = attachment::host_ifname(container_id, ifname).map_err(|error| refused(&error.to_string()))?;
    Ok(Whose { container_id, ifname, host })
}

fn inside(request: &Request) -> Result<IfName, Error> {
    let refused = |error: api::ifname::Error| {
        Error::new(Code::InvalidEnvironment, "CNI_IFNAME is no name of an interface")
            .details(error.to_string())
    };
    request.ifname.parse().map_err(refused)
}

fn no_namespace() -> Error {
    Error::new(Code::InvalidEnvironment, "CNI_NETNS is missing, or cannot be opened")
}

/// Whether the configuration wants addresses of ours.
fn hands_out(config: &Config) -> Result<bool, Error> {
    match &config.ipam {
        None => Ok(false),
        Some(ipam) if ipam.plugin == IPAM_PLUGIN => match (&ipam.network, &config.network) {
            (Some(one), Some(other)) if one != other => {
                let msg = "ipam.network is another one than network: a pod has addresses of the network that it joins";
                Err(Error::new(Code::InvalidConfig, msg))
            }
            _ => Ok(true),
        },
        Some(ipam) => {
            let msg = format!(
                "patchbay-bridge has its addresses from {IPAM_PLUGIN} and from no other plugin, such as {:?}: write \
                \"ipam\": {{\"type\": \"{IPAM_PLUGIN}\"}}, or leave it out",
                ipam.plugin.chars().take(64).collect::<String>()
            );
            Err(Error::new(Code::UnsupportedField, msg))
        }
    }
}

fn network(config: &Config) -> Result<&str, Error> {
    config.network.as_deref().ok_or_else(|| {
        let msg = "the configuration names no network: write \"network\": \"<name of a BridgeNetwork>\"";
        Error::new(Code::InvalidConfig, msg)
    })
}

/// An address that one station can have.
fn mac(text: &str) -> Result<Mac, Error> {
    let refused = |msg: String| Error::new(Code::InvalidConfig, msg);
    let mac: Mac = text.parse().map_err(|error: api::mac::Error| refused(error.to_string()))?;
    if mac.octets()[0] & 1 != 0 {
        return Err(refused(format!(
            "mac {mac} is a multicast address: the first pair of digits must be even"
        )));
    }
    if mac.octets() == [0; 6] {
        return Err(refused(format!("mac {mac} is nobody's address")));
    }
    Ok(mac)
}

/// What ADD had answered about the interface inside.
fn answered<'a>(config: &'a Config, ifname: &str) -> Option<&'a Value> {
    let interfaces = config.prev_result.as_ref()?.get("interfaces")?.as_array()?;
    let inside =
        |interface: &&Value| interface["sandbox"].as_str().is_some_and(|sandbox| !sandbox.is_empty());
    interfaces.iter().filter(inside).find(|interface| interface["name"] == ifname)
}

fn interfaces(request: &Request, made: &Attach<'_>) -> Vec<Interface> {
    let mtu = Some(made.mtu);
    let host = Interface { name: made.host.to_string(), mtu, mac: None, sandbox: None };
    let inside = Interface {
        name: made.inside.to_string(),
        mac: Some(made.mac.to_string()),
        mtu,
        sandbox: Some(request.netns.clone()),
    };
    vec![host, inside]
}

/// The answer about something that the kernel did not do.
fn failed(error: &attach::Error) -> Error {
    use attach::Error as E;
    let code = match error {
        E::Taken { .. } | E::RouteTaken { .. } | E::NoNamespace(_) | E::OwnNamespace => {
            Code::InvalidEnvironment
        }
        E::TooSmallForIpv6 { .. } | E::Families { .. } | E::Gateway { .. } => Code::InvalidConfig,
        E::NoBridge(_) => Code::TryAgainLater,
        E::Foreign { .. } | E::Gone { .. } | E::NoIpv6 | E::Sysctl { .. } | E::Kernel(_) => Code::Io,
    };
    Error::new(code, Chain(error).to_string())
}
