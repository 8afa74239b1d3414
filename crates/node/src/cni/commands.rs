//! The CNI commands ADD, DEL, CHECK, GC and STATUS of `patchbay-bridge`: translations of calls into calls of the
//! [`Attacher`](crate::attach::Attacher), and of its results.

use std::{
    os::fd::{AsFd as _, OwnedFd},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use api::{Mac, ipam::IPAM_PLUGIN};
use ipnet::IpNet;
use plan::ipam::PodRef;
use serde_json::Value;
use wire::{
    cni::{self, Args, Attachment, Code, Config, Error, Interface, Ip, Route, Success, Verb},
    socket::{CALL_TIMEOUT, Request},
};

use super::{
    CniHandler,
    address::{attachment_key, prev_result_addresses, requested_addresses},
    caller::Caller,
    thread_pool::MAX_WORKERS,
};
use crate::{
    attach::{
        ADD_TIMEOUT, AllocatedAddresses, AttachRequest, AttachResult, AttachmentId, AttachmentScope,
        CheckRequest,
    },
    claims::{ClaimQuery, LOOKUP_TIMEOUT, ServedClaim},
};

/// How long an ADD waits for a daemon that has just started to read the networks, with the time in which it did not listen.
const FIRST_READ_TIMEOUT: Duration = Duration::from_secs(10);
/// An ADD waits for one thing after the other, and the plugin is there until the last of them.
const _: () = assert!(
    FIRST_READ_TIMEOUT.as_secs() + LOOKUP_TIMEOUT.as_secs() + ADD_TIMEOUT.as_secs() < CALL_TIMEOUT.as_secs()
);
/// How many ADDs wait at a time. Each holds a worker thread; the other threads serve DEL and CHECK meanwhile.
pub(super) const MAX_WAITING_ADDS: usize = 192;
const _: () = assert!(MAX_WAITING_ADDS < MAX_WORKERS);
/// How often a waiting ADD checks whether the networks have been read, and that its client is still connected.
const FIRST_READ_POLL: Duration = Duration::from_millis(50);

/// A call with a valid configuration.
pub(super) struct CniCall<'a> {
    pub(super) request: &'a Request,
    pub(super) config: &'a Config,
    pub(super) caller: &'a Caller<'a>,
}

/// Counts a call that waits while it exists.
struct WaitingAdd<'a>(&'a AtomicUsize);

impl<'a> WaitingAdd<'a> {
    /// None if [`MAX_WAITING_ADDS`] wait.
    fn start(count: &'a AtomicUsize) -> Option<Self> {
        let others = count.fetch_add(1, Ordering::Relaxed);
        let waiting = Self(count);
        (others < MAX_WAITING_ADDS).then_some(waiting)
    }
}

impl Drop for WaitingAdd<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
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
                self.attacher.detach(&attachment_id(request)?, scope(request))?;
                self.apply_tombstones();
                return Ok(Vec::new());
            }
            Verb::Version => return Ok(cni::versions()),
            Verb::Add | Verb::Check | Verb::Status | Verb::Gc => {}
        }
        let config = Config::parse(&request.stdin)?;
        verb.allowed_in(config.version)?;
        let call = CniCall { request, config: &config, caller };
        if verb == Verb::Add {
            self.wait_for_networks(request, caller)?;
        }
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

    /// Waits until the networks have been read from the API server, at most [`FIRST_READ_TIMEOUT`]. Returns at once if too many
    /// calls wait already.
    fn wait_for_networks(&self, request: &Request, caller: &Caller<'_>) -> Result<(), Error> {
        let is_synced = || self.attacher.networks().synced;
        if is_synced() {
            return Ok(());
        }
        let Some(_waiting) = WaitingAdd::start(&self.waiting) else { return Ok(()) };
        let deadline = Instant::now() + FIRST_READ_TIMEOUT.saturating_sub(request.waited());
        while !is_synced() {
            caller.check_connected()?;
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            thread::park_timeout(left.min(FIRST_READ_POLL));
        }
        Ok(())
    }

    fn add(&self, call: &CniCall<'_>, namespace: Option<&OwnedFd>) -> Result<Success, Error> {
        let CniCall { request, config, caller } = *call;
        let args = Args::parse(&request.args)?;
        let id = attachment_id(request)?;
        id.inside()?;
        let namespace = namespace.ok_or_else(missing_namespace)?;
        let mac = config.mac.as_deref().or(args.mac.as_deref()).map(mac).transpose()?;
        let network = network(config)?;
        let requested = requested_addresses(config, &args)?;
        let addresses = uses_patchbay_ipam(config)?.then_some(&requested[..]);
        if let (None, Some(address)) = (addresses, requested.first()) {
            let msg = format!(
                "address {} is requested, but this attachment has no IPAM: set \"ipam\": {{\"type\": \
                \"{IPAM_PLUGIN}\"}} in its configuration, or request no address",
                address.addr()
            );
            return Err(Error::new(Code::InvalidConfig, msg));
        }
        let pod = pod_ref(args);
        let claim = match addresses {
            Some(requested) => self.claim(call, &pod, network, requested)?,
            None => None,
        };
        let attached = self.attacher.attach(&AttachRequest {
            id: &id,
            namespace: namespace.as_fd(),
            pod,
            network,
            config: &config.name,
            plugin: &request.plugin,
            addresses,
            claim: claim.as_ref(),
            mac,
            mtu: config.mtu,
            caller_alive: &|| caller.check_connected(),
        })?;
        Ok(success(&request.netns, attached))
    }

    /// The claim whose addresses the pod gets.
    pub(super) fn claim(
        &self,
        call: &CniCall<'_>,
        pod: &PodRef,
        network: &str,
        requested: &[IpNet],
    ) -> Result<Option<ServedClaim>, Error> {
        let CniCall { request, config, caller } = *call;
        self.claims.resolve(&ClaimQuery {
            pod,
            key: attachment_key(request),
            config: &config.name,
            persistent: config.allow_persistent_ips,
            network,
            requested,
            netns: &request.netns,
            caller_alive: &|| caller.check_connected(),
        })
    }

    fn check(&self, request: &Request, namespace: Option<&OwnedFd>, config: &Config) -> Result<(), Error> {
        let args = Args::parse(&request.args)?;
        let id = attachment_id(request)?;
        id.inside()?;
        let namespace = namespace.ok_or_else(missing_namespace)?;
        let network = network(config)?;
        let requested_mac = config.mac.as_deref().or(args.mac.as_deref()).map(mac).transpose()?;
        let previous = previous_interface(config, &request.ifname);
        let text = previous.and_then(|interface| interface["mac"].as_str());
        let mac = text.map(mac).transpose()?.or(requested_mac);
        let mtu = previous.and_then(|interface| u32::try_from(interface["mtu"].as_u64()?).ok());
        let reported: Option<Vec<IpNet>> = uses_patchbay_ipam(config)?.then(|| prev_result_addresses(config));
        self.attacher.check(&CheckRequest {
            id: &id,
            namespace: namespace.as_fd(),
            network,
            config: &config.name,
            addresses: reported.as_deref(),
            mac,
            mtu,
        })
    }

    /// Deletes links of this configuration that are not among the runtime's valid attachments.
    fn collect_garbage(&self, config: &Config) -> Result<(), Error> {
        let network = network(config)?;
        let msg = "GC needs cni.dev/valid-attachments; without it, it would delete every link";
        let valid = valid_attachments(config, msg)?;
        self.attacher.collect_garbage(network, &config.name, valid, AttachmentScope::Interface)
    }

    fn status(&self, config: &Config) -> Result<(), Error> {
        self.attacher.networks().require_synced(Code::NotAvailable)?;
        if uses_patchbay_ipam(config)? { self.attacher.ipam().status() } else { Ok(()) }
    }
}

pub(super) fn attachment_id(request: &Request) -> Result<AttachmentId<'_>, Error> {
    AttachmentId::new(&request.container_id, &request.ifname)
}

/// What the DEL of a plugin removes.
pub(super) fn scope(request: &Request) -> AttachmentScope {
    if request.plugin == IPAM_PLUGIN { AttachmentScope::Addresses } else { AttachmentScope::Interface }
}

pub(super) fn pod_ref(args: Args) -> PodRef {
    let cni::Pod { namespace, name, uid } = args.pod;
    PodRef { namespace, name, uid }
}

pub(super) fn valid_attachments<'a>(config: &'a Config, missing: &str) -> Result<&'a [Attachment], Error> {
    config.valid_attachments.as_deref().ok_or_else(|| Error::new(Code::InvalidConfig, missing))
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

/// The result of ADD, for the sandbox at this path.
fn success(netns: &str, attached: AttachResult) -> Success {
    let AttachResult { host, inside, mac, mtu, allocated } = attached;
    let mtu = Some(mtu);
    let host = Interface { name: host.to_string(), mtu, ..Interface::default() };
    let inside = Interface {
        name: inside.to_string(),
        mac: Some(mac.to_string()),
        mtu,
        sandbox: Some(netns.to_owned()),
        ..Interface::default()
    };
    let (ips, routes) = ips_and_routes(allocated, Some(1));
    Success { interfaces: vec![host, inside], ips, routes, ..Success::default() }
}

/// The addresses and routes of a result, of the interface with this index.
pub(super) fn ips_and_routes(
    allocated: AllocatedAddresses,
    interface: Option<usize>,
) -> (Vec<Ip>, Vec<Route>) {
    let AllocatedAddresses { addresses, routes, claim: _ } = allocated;
    let ips = addresses.into_iter().map(|info| Ip { address: info.net, gateway: info.gateway, interface });
    let routes = routes.into_iter().map(|route| Route { dst: route.dst, gw: route.gw, ..Route::default() });
    (ips.collect(), routes.collect())
}
