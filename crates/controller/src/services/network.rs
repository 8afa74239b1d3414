//! The network of a service, as the cache has it.

use std::sync::Arc;

use api::selection::NadRef;
use plan::{
    network::{self, ClusterState},
    services::{NetworkAddresses, NetworkState},
};

/// What is known about the NAD of a service.
pub fn network_state(state: &ClusterState, at: &NadRef) -> NetworkState {
    let Some(nads) = &state.nads else { return NetworkState::KindNotServed };
    match nads.get(at) {
        Some(nad) => match &nad.joins {
            None => NetworkState::Found { addresses: None },
            Some(name) => match state.networks.get(name).filter(|network| network.spec.is_ok()) {
                Some(network) => NetworkState::Found { addresses: addresses(network) },
                // Any address would be trusted without the subnets.
                None => NetworkState::NoBridgeNetwork(name.as_str().into()),
            },
        },
        // A NAD that was deleted is created again.
        None => match state.networks.values().find(|network| keeps(network, at)) {
            Some(network) => NetworkState::Found { addresses: addresses(network) },
            None => NetworkState::NotFound,
        },
    }
}

/// Whether the BridgeNetwork creates this NAD.
fn keeps(network: &network::NetworkState, at: &NadRef) -> bool {
    network.deleting.is_none()
        && network.spec.as_ref().is_ok_and(|spec| {
            spec.attachment_name(&network.name) == at.name && spec.namespaces().contains(&at.namespace)
        })
}

/// The addresses of a BridgeNetwork that has subnets.
fn addresses(network: &network::NetworkState) -> Option<Arc<NetworkAddresses>> {
    let ipam = network.spec.as_ref().ok()?.ipam.as_ref()?;
    let addresses = NetworkAddresses {
        subnets: ipam.subnets.clone(),
        exclude: ipam.exclude.clone(),
        gateways: ipam.gateways.clone(),
    };
    (!ipam.subnets.is_empty()).then(|| Arc::new(addresses))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::{cache::project, networks::tests::deleting};

    fn blue() -> NadRef {
        NadRef::new("ns", "blue")
    }

    /// The BridgeNetwork `blue`, which creates the NAD `ns/blue`.
    fn network(ipam: Option<Value>) -> network::NetworkState {
        let spec = json!({"attachment": {"namespaces": ["ns"]}, "ipam": ipam});
        let spec = serde_json::from_value(spec).map_err(|error| error.to_string());
        network::NetworkState { deleting: None, spec, ..deleting("blue", &[]) }
    }

    /// A cluster with the NAD `ns/blue`, if it has a config, and with this BridgeNetwork.
    fn cluster(config: Option<Value>, network: Option<network::NetworkState>) -> ClusterState {
        let nad = config.map(|config| {
            let object = json!({
                "metadata": {"namespace": "ns", "name": "blue", "uid": "uid", "resourceVersion": "1"},
                "spec": {"config": config.to_string()},
            });
            project::nad(serde_json::from_value(object).unwrap()).unwrap()
        });
        let mut state = ClusterState { nads: Some(nad.into_iter().collect()), ..ClusterState::default() };
        if let Some(network) = network {
            state.networks.insert(network.name.clone(), network);
        }
        state
    }

    fn joining() -> Value {
        json!({"cniVersion": "1.0.0", "type": "patchbay-bridge", "network": "blue"})
    }

    fn subnets(state: &NetworkState) -> Vec<String> {
        let NetworkState::Found { addresses: Some(addresses) } = state else { panic!("{state:?}") };
        addresses.subnets.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn only_the_addresses_of_the_bridge_network_count() {
        let ipam = json!({"subnets": ["10.1.0.0/24", "fd00::/64"], "exclude": ["10.1.0.8/29"], "gateways": ["10.1.0.1"]});
        let state = network_state(&cluster(Some(joining()), Some(network(Some(ipam)))), &blue());
        let NetworkState::Found { addresses: Some(addresses) } = &state else { panic!("{state:?}") };
        assert_eq!(subnets(&state), ["10.1.0.0/24", "fd00::/64"]);
        assert_eq!(addresses.exclude, ["10.1.0.8/29".parse::<ipnet::IpNet>().unwrap()]);
        assert_eq!(addresses.gateways, ["10.1.0.1".parse::<std::net::IpAddr>().unwrap()]);
        let smaller = network(Some(json!({"subnets": ["fd00::/64"]})));
        let state = network_state(&cluster(Some(joining()), Some(smaller)), &blue());
        assert_eq!(subnets(&state), ["fd00::/64"], "a subnet was removed");
        let found = NetworkState::Found { addresses: None };
        assert_eq!(
            network_state(&cluster(Some(joining()), Some(network(None))), &blue()),
            found,
            "without IPAM"
        );
        let other = Some(json!({"cniVersion": "1.0.0", "type": "macvlan"}));
        assert_eq!(network_state(&cluster(other, None), &blue()), found, "not of a BridgeNetwork");
    }

    #[test]
    fn a_nad_whose_bridge_network_is_gone_or_unreadable_adds_no_endpoints() {
        let unknown = NetworkState::NoBridgeNetwork("blue".into());
        assert_eq!(network_state(&cluster(Some(joining()), None), &blue()), unknown);
        let unreadable = network::NetworkState { spec: Err("mtu: lots".to_owned()), ..network(None) };
        assert_eq!(network_state(&cluster(Some(joining()), Some(unreadable)), &blue()), unknown);
        let ipam = json!({"type": "patchbay-ipam", "network": "blue"});
        let indirect = Some(json!({"cniVersion": "1.0.0", "type": "macvlan", "ipam": ipam}));
        assert_eq!(network_state(&cluster(indirect, None), &blue()), unknown);
        assert!(!unknown.is_found());
    }

    #[test]
    fn a_deleted_nad_counts_as_found_while_its_bridge_network_creates_it_again() {
        let ipam = json!({"subnets": ["10.1.0.0/24"]});
        let keeps = network(Some(ipam));
        let state = network_state(&cluster(None, Some(keeps.clone())), &blue());
        assert_eq!(subnets(&state), ["10.1.0.0/24"]);
        let leaving = network::NetworkState { deleting: Some(jiff::Timestamp::UNIX_EPOCH), ..keeps.clone() };
        for (state, at) in [
            (cluster(None, None), blue()),
            (cluster(None, Some(leaving)), blue()),
            (cluster(None, Some(keeps.clone())), NadRef::new("elsewhere", "blue")),
            (cluster(None, Some(keeps)), NadRef::new("ns", "red")),
        ] {
            assert_eq!(network_state(&state, &at), NetworkState::NotFound, "{at}");
        }
        let unserved = ClusterState::default();
        assert_eq!(network_state(&unserved, &blue()), NetworkState::KindNotServed);
    }
}
