//! Addresses of pods: serves `patchbay-ipam`, and allocates in process for `patchbay-bridge`.

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

/// How long an ADD waits for an address. The kubelet retries after a failure.
const ADD_TIMEOUT: Duration = Duration::from_secs(8);

/// The addresses and routes of a CNI result.
#[derive(Debug, Default)]
pub struct AllocatedIps {
    pub ips: Vec<Ip>,
    pub routes: Vec<Route>,
}

impl CniHandler {
    /// Handles a call of `patchbay-ipam`.
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
                    Error::new(Code::Io, "cannot remove the tombstone of earlier addresses")
                        .details(error.to_string())
                })?;
                let allocated = self.allocate(&self.view(), network, call, &args, &requested)?;
                let result = Success { ips: allocated.ips, routes: allocated.routes, ..Success::default() };
                Ok(result.render(config.version))
            }
            Verb::Check => self.check_lease(request, config).map(|_| Vec::new()),
            Verb::Gc => {
                let valid = config.valid_attachments.as_ref().ok_or_else(|| {
                    let msg = "GC needs cni.dev/valid-attachments, or it would release all addresses";
                    Error::new(Code::InvalidConfig, msg)
                })?;
                let view = self.view();
                match view.by_name.get(network(config)?) {
                    Some(NetworkView { uid, .. }) => self.gc_addresses(uid, config, valid)?,
                    // A network that does not exist has no leases; one that is not known yet may have some.
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

    /// Allocates the addresses of an attachment.
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
            "allocated addresses"
        );
        Ok(allocated_ips(pool, &grant))
    }

    /// CHECK: compares the lease with the result of ADD, and returns its addresses.
    pub(super) fn check_lease(&self, request: &Request, config: &Config) -> Result<Vec<IpNet>, Error> {
        let differs = |msg: String| Err(Error::new(Code::Differs, msg));
        let Some(grant) = self.ipam.grant(&attachment_key(request)) else {
            self.ipam.require_loaded()?;
            return differs(
                "the interface no longer has an address of patchbay-ipam; delete the pod".to_owned(),
            );
        };
        let mut all = Vec::new();
        for address in &grant.lease.addresses {
            let Some(reported) = prev_result_addresses(config).into_iter().find(|net| net.addr() == *address)
            else {
                let msg = format!("the interface has address {address}, which prevResult does not contain");
                return differs(msg);
            };
            if let Some(info) = grant.info(*address).filter(|info| info.net != reported) {
                let msg = format!("the interface was given {}, but prevResult contains {reported}", info.net);
                return differs(msg);
            }
            all.push(reported);
        }
        Ok(all)
    }

    /// GC: releases the leases of this configuration that the runtime does not list.
    pub(super) fn gc_addresses(
        &self,
        network: &str,
        config: &Config,
        valid: &[Attachment],
    ) -> Result<(), Error> {
        let valid: BTreeSet<AttachmentKey> = valid
            .iter()
            .map(|attachment| AttachmentKey {
                container: attachment.container_id.clone(),
                interface: attachment.ifname.clone(),
            })
            .collect();
        self.ipam.gc_config(network, &config.name, &valid).map(drop)
    }
}

pub fn attachment_key(request: &Request) -> AttachmentKey {
    AttachmentKey { container: request.container_id.clone(), interface: request.ifname.clone() }
}

/// The addresses that the pod requests, with or without a prefix length.
pub fn requested_addresses(config: &Config, args: &Args) -> Result<Vec<IpNet>, Error> {
    let texts = if config.ips.is_empty() { &args.ips } else { &config.ips };
    let parse = |text: &String| {
        let bare = text.parse::<IpAddr>().map(IpNet::from);
        bare.or_else(|_| text.parse::<IpNet>()).map_err(|_| {
            let text: String = text.chars().take(64).collect();
            Error::new(
                Code::InvalidConfig,
                format!("requested address {text:?} is not an IP address; correct it"),
            )
        })
    };
    texts.iter().map(parse).collect()
}

/// The network that the configuration names.
fn network(config: &Config) -> Result<&str, Error> {
    let named = config.ipam.as_ref().and_then(|ipam| ipam.network.as_deref());
    named.ok_or_else(|| {
        let msg = "the configuration names no network: write \"ipam\": {\"type\": \"patchbay-ipam\", \"network\": \
            \"<name of a BridgeNetwork>\"}";
        Error::new(Code::InvalidConfig, msg)
    })
}

/// The UID and the address pool of a network. Its bridge need not be on this node.
fn pool<'a>(view: &'a Networks, name: &str) -> Result<(&'a str, &'a Pool), Error> {
    let later = |msg: String| Err(Error::new(Code::TryAgainLater, msg));
    let Some(network) = view.by_name.get(name) else {
        commands::require_synced(view, Code::TryAgainLater)?;
        return later(format!(
            "BridgeNetwork {name:?} does not exist: create it, or correct the configuration"
        ));
    };
    if network.state == NetworkState::Removing {
        return later(format!(
            "network {name:?} is being deleted: remove it from the pod, or create it again"
        ));
    }
    match &network.ipam {
        None if matches!(&network.state, NetworkState::NotReady { reason, .. } if reason == UNREADABLE) => {
            later(format!(
                "BridgeNetwork {name:?} cannot be parsed on this node: check that the node daemon is not older than the CRD"
            ))
        }
        None => later(format!("network {name:?} has no addresses: set spec.ipam of the BridgeNetwork")),
        Some(pool) if pool.grids.is_empty() => later(format!(
            "network {name:?} has no block length yet: check that the patchbay controller runs"
        )),
        Some(pool) => Ok((&network.uid, pool)),
    }
}

/// The addresses and routes of a grant, for a CNI result.
fn allocated_ips(pool: &Pool, grant: &Grant) -> AllocatedIps {
    let ip = |info: &AddressInfo| Ip { address: info.net, gateway: info.gateway, interface: None };
    let routes = pool.routes.iter().filter_map(|route| {
        let family = Family::of(route.dst.addr());
        let info = grant.infos.iter().find(|info| Family::of(info.net.addr()) == family)?;
        Some(Route { dst: route.dst, gw: route.gw.or(info.gateway) })
    });
    AllocatedIps { ips: grant.infos.iter().map(ip).collect(), routes: routes.collect() }
}

/// The addresses of `prevResult`, in any CNI version.
fn prev_result_addresses(config: &Config) -> Vec<IpNet> {
    let Some(result) = &config.prev_result else { return Vec::new() };
    let ips = result["ips"].as_array().into_iter().flatten().map(|ip| &ip["address"]);
    let old = ["ip4", "ip6"].into_iter().map(|family| &result[family]["ip"]);
    ips.chain(old).filter_map(Value::as_str).filter_map(|text| text.parse().ok()).collect()
}
