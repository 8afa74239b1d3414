//! The CNI commands of `patchbay-ipam`, which other plugins call for addresses of a network.

use std::net::IpAddr;

use ipnet::IpNet;
use plan::ipam::AttachmentKey;
use serde_json::Value;
use wire::{
    cni::{Args, Code, Config, Error, Success, Verb},
    socket::Request,
};

use super::{
    CniHandler,
    commands::{CniCall, attachment_id, ips_and_routes, pod_ref, valid_attachments},
};
use crate::attach::{AddressRequest, AttachmentScope};

impl CniHandler {
    /// Handles a call of `patchbay-ipam`.
    pub(super) fn serve_addresses(&self, verb: Verb, call: &CniCall<'_>) -> Result<Vec<u8>, Error> {
        let CniCall { request, config, caller } = *call;
        match verb {
            Verb::Add => {
                let args = Args::parse(&request.args)?;
                let requested = requested_addresses(config, &args)?;
                let (network, id, pod) = (network(config)?, attachment_id(request)?, pod_ref(args));
                let claim = self.claim(call, &pod, network, &requested)?;
                let allocated = self.attacher.allocate(&AddressRequest {
                    id: &id,
                    pod,
                    network,
                    config: &config.name,
                    plugin: &request.plugin,
                    requested: &requested,
                    claim: claim.as_ref(),
                    caller_alive: &|| caller.check_connected(),
                })?;
                let (ips, routes) = ips_and_routes(allocated, None);
                Ok(Success { ips, routes, ..Success::default() }.render(config.version))
            }
            Verb::Check => {
                let reported = prev_result_addresses(config);
                self.attacher.check_lease(&attachment_key(request), &reported).map(|_| Vec::new())
            }
            Verb::Gc => {
                let msg = "GC needs cni.dev/valid-attachments, or it would release all addresses";
                let valid = valid_attachments(config, msg)?;
                let (network, scope) = (network(config)?, AttachmentScope::Addresses);
                self.attacher.collect_garbage(network, &config.name, valid, scope).map(|()| Vec::new())
            }
            Verb::Status => {
                self.attacher.networks().require_synced(Code::NotAvailable)?;
                self.attacher.ipam().status().map(|()| Vec::new())
            }
            Verb::Del | Verb::Version => Ok(Vec::new()),
        }
    }
}

pub fn attachment_key(request: &Request) -> AttachmentKey {
    AttachmentKey { container: request.container_id.clone(), interface: request.ifname.clone() }
}

/// The addresses that the pod requests, with or without a prefix length.
pub(super) fn requested_addresses(config: &Config, args: &Args) -> Result<Vec<IpNet>, Error> {
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

/// The addresses of `prevResult`, in any CNI version.
pub(super) fn prev_result_addresses(config: &Config) -> Vec<IpNet> {
    let Some(result) = &config.prev_result else { return Vec::new() };
    let ips = result["ips"].as_array().into_iter().flatten().map(|ip| &ip["address"]);
    let old = ["ip4", "ip6"].into_iter().map(|family| &result[family]["ip"]);
    ips.chain(old).filter_map(Value::as_str).filter_map(|text| text.parse().ok()).collect()
}
