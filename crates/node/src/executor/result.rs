//! Results of plugins.

use api::network_status::{self, AttachedInterface, AttachmentResult};
use wire::cni::Success;

/// What the network status of a pod repeats of a result.
pub fn attachment_result(success: &Success) -> AttachmentResult {
    let interface = |interface: &wire::cni::Interface| AttachedInterface {
        name: interface.name.clone(),
        mac: interface.mac.clone().unwrap_or_default(),
        mtu: interface.mtu,
        in_pod: interface.sandbox.is_some(),
    };
    let default_routes = success.routes.iter().filter(|route| route.dst.prefix_len() == 0);
    let dns = &success.dns;
    AttachmentResult {
        interfaces: success.interfaces.iter().map(interface).collect(),
        ips: success.ips.iter().map(|ip| (ip.address.addr(), ip.interface)).collect(),
        gateways: default_routes.filter_map(|route| route.gw).collect(),
        dns: network_status::Dns {
            nameservers: dns.nameservers.clone(),
            domain: dns.domain.clone().unwrap_or_default(),
            search: dns.search.clone(),
            options: dns.options.clone(),
        },
    }
}
