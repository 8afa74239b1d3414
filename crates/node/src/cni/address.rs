//! Addresses for pods: what `patchbay-ipam` answers, and what `patchbay-bridge` asks in process.

use std::{
    collections::BTreeSet,
    net::IpAddr,
    time::{Duration, Instant},
};

use ipnet::IpNet;
use plan::ipam::{AddressInfo, AttachmentKey, Family, Grant, Lease, PodRef, Pool};
use serde_json::Value;
use tracing::info;
use wire::{
    cni::{Args, Attachment, Code, Config, Error, Ip, Route, Success, Verb},
    socket::Request,
};

use super::{
    CniHandler, NetworkState, NetworkView, Networks,
    commands::{self, CniCall},
    tombstone,
};
use crate::{
    bridges::UNREADABLE,
    ipam::{CallerWait, uptime},
};

/// How long a pod waits for an address before the runtime tries again.
const ADD_TIMEOUT: Duration = Duration::from_secs(8);

/// What a pod was given.
#[derive(Debug, Default)]
pub struct AllocatedIps {
    pub ips: Vec<Ip>,
    pub routes: Vec<Route>,
}

impl CniHandler {
    /// The address plugin.
    pub(super) fn serve_addresses(&self, verb: Verb, call: &CniCall<'_>) -> Result<Vec<u8>, Error> {
        let CniCall { request, config, caller } = *call;
        match verb {
            Verb::Add => {
                let args = Args::parse(&request.args)?;
                let requested = requested_addresses(config, &args)?;
                let network = network(config)?;
                let host = commands::attachment_id(request)?.host;
                let _lock = self.lock(&host);
                caller.check_connected()?;
                tombstone::remove(&self.tombstones, request).map_err(|error| {
                    Error::new(Code::Io, "remove the tombstone of earlier addresses")
                        .details(error.to_string())
                })?;
                let allocated = self.allocate(&self.view(), network, call, &args, &requested)?;
                let made = Success { ips: allocated.ips, routes: allocated.routes, ..Success::default() };
                Ok(made.render(config.version))
            }
            Verb::Check => self.check_lease(request, config).map(|_| Vec::new()),
            Verb::Gc => {
                let valid = config.valid_attachments.as_ref().ok_or_else(|| {
                    let msg = "GC needs cni.dev/valid-attachments, or it would free everything";
                    Error::new(Code::InvalidConfig, msg)
                })?;
                let view = self.view();
                match view.by_name.get(network(config)?) {
                    Some(NetworkView { uid, .. }) => self.gc_addresses(uid, config, valid)?,
                    // A network that there is not has given nothing; one that is not known yet may have.
                    None => commands::require_synced(&view, Code::TryAgainLater)?,
                }
                Ok(Vec::new())
            }
            Verb::Status => {
                commands::require_synced(&self.view(), Code::NotAvailable)?;
                self.ipam.status().map(|()| Vec::new())
            }
            Verb::Del | Verb::Version => Ok(Vec::new()),
        }
    }

    /// Gives an interface its addresses.
    pub(super) fn allocate(
        &self,
        view: &Networks,
        network: &str,
        call: &CniCall<'_>,
        args: &Args,
        requested: &[IpNet],
    ) -> Result<AllocatedIps, Error> {
        let CniCall { request, config, caller } = *call;
        let (uid, pool) = pool(view, network)?;
        let pod = &args.pod;
        let lease = Lease {
            key: attachment_key(request),
            pod: PodRef { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: pod.uid.clone() },
            network: uid.to_owned(),
            config: config.name.clone(),
            boot: self.ipam.boot().to_owned(),
            since: uptime(),
            addresses: Vec::new(),
        };
        let wait =
            CallerWait { deadline: Instant::now() + ADD_TIMEOUT, caller_alive: &|| caller.check_connected() };
        let grant = self.ipam.allocate(pool, lease, requested, &wait)?;
        info!(
            network,
            container_id = request.container_id,
            ifname = request.ifname,
            pod = format!("{}/{}", pod.namespace, pod.name),
            addresses = ?grant.lease.addresses,
            "a pod has its addresses"
        );
        Ok(allocated_ips(pool, &grant))
    }

    /// Whether the interface has what ADD said; says what that is.
    pub(super) fn check_lease(&self, request: &Request, config: &Config) -> Result<Vec<IpNet>, Error> {
        let differs = |msg: String| Err(Error::new(Code::Differs, msg));
        let Some(grant) = self.ipam.grant(&attachment_key(request)) else {
            return differs("the interface has no address of patchbay-ipam any more".to_owned());
        };
        let mut all = Vec::new();
        for address in &grant.lease.addresses {
            let Some(reported) = prev_result_addresses(config).into_iter().find(|net| net.addr() == *address)
            else {
                let msg = format!("the interface has address {address}, which its result does not tell of");
                return differs(msg);
            };
            if let Some(info) = grant.info(*address).filter(|info| info.net != reported) {
                let msg = format!("the interface was given {}, and its result tells of {reported}", info.net);
                return differs(msg);
            }
            all.push(reported);
        }
        Ok(all)
    }

    /// Frees what was given for this configuration and the runtime does not know any more.
    pub(super) fn gc_addresses(
        &self,
        network: &str,
        config: &Config,
        valid: &[Attachment],
    ) -> Result<(), Error> {
        let valid: BTreeSet<AttachmentKey> = valid
            .iter()
            .map(|one| AttachmentKey { container: one.container_id.clone(), interface: one.ifname.clone() })
            .collect();
        self.ipam.gc_config(network, &config.name, &valid).map(drop)
    }
}

pub fn attachment_key(request: &Request) -> AttachmentKey {
    AttachmentKey { container: request.container_id.clone(), interface: request.ifname.clone() }
}

/// The addresses that somebody asks for, with a length or without.
pub fn requested_addresses(config: &Config, args: &Args) -> Result<Vec<IpNet>, Error> {
    let texts = if config.ips.is_empty() { args.ip.as_slice() } else { &config.ips };
    let read = |text: &String| {
        let alone = text.parse::<IpAddr>().map(IpNet::from);
        alone.or_else(|_| text.parse::<IpNet>()).map_err(|_| {
            let text: String = text.chars().take(64).collect();
            Error::new(Code::InvalidConfig, format!("{text:?} is asked for, which is no address"))
        })
    };
    texts.iter().map(read).collect()
}

/// The network whose addresses are asked for.
fn network(config: &Config) -> Result<&str, Error> {
    let named = config.ipam.as_ref().and_then(|ipam| ipam.network.as_deref());
    named.ok_or_else(|| {
        let msg = "the configuration names no network: write \"ipam\": {\"type\": \"patchbay-ipam\", \"network\": \
            \"<name of a BridgeNetwork>\"}";
        Error::new(Code::InvalidConfig, msg)
    })
}

/// What a network says about addresses, with its UID. Its bridge need not be on this node.
fn pool<'a>(view: &'a Networks, name: &str) -> Result<(&'a str, &'a Pool), Error> {
    let later = |msg: String| Err(Error::new(Code::TryAgainLater, msg));
    let Some(network) = view.by_name.get(name) else {
        commands::require_synced(view, Code::TryAgainLater)?;
        return later(format!("there is no BridgeNetwork {name:?}: create it, or correct the configuration"));
    };
    if network.state == NetworkState::Removing {
        return later(format!(
            "network {name:?} is being removed: take it out of the pod, or create it again"
        ));
    }
    match &network.ipam {
        None if matches!(&network.state, NetworkState::NotReady { reason, .. } if reason == UNREADABLE) => {
            later(format!(
                "BridgeNetwork {name:?} cannot be read on this node: is the node daemon older than the kind?"
            ))
        }
        None => later(format!("network {name:?} has no addresses: set spec.ipam of the BridgeNetwork")),
        Some(pool) if pool.grids.is_empty() => later(format!(
            "network {name:?} has no address blocks yet: the patchbay controller decides their length"
        )),
        Some(pool) => Ok((&network.uid, pool)),
    }
}

/// A lease in the words of a result.
fn allocated_ips(pool: &Pool, grant: &Grant) -> AllocatedIps {
    let ip = |info: &AddressInfo| Ip { address: info.net, gateway: info.gateway, interface: None };
    let routes = pool.routes.iter().filter_map(|route| {
        let family = Family::of(route.dst.addr());
        let info = grant.infos.iter().find(|info| Family::of(info.net.addr()) == family)?;
        Some(Route { dst: route.dst, gw: route.gw.or(info.gateway) })
    });
    AllocatedIps { ips: grant.infos.iter().map(ip).collect(), routes: routes.collect() }
}

/// The addresses that ADD had answered, in any version.
fn prev_result_addresses(config: &Config) -> Vec<IpNet> {
    let Some(result) = &config.prev_result else { return Vec::new() };
    let ips = result["ips"].as_array().into_iter().flatten().map(|ip| &ip["address"]);
    let old = ["ip4", "ip6"].into_iter().map(|family| &result[family]["ip"]);
    ips.chain(old).filter_map(Value::as_str).filter_map(|text| text.parse().ok()).collect()
}
