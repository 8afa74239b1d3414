//! Which pods, addresses, ports and names a service publishes.

use std::{collections::BTreeMap, sync::Arc};

use api::{
    NetworkServiceSpec,
    networkservice::{Hostnames, NetworkServicePort, Protocol, TargetPort},
    selection::NadRef,
};

use super::{
    fixtures::{
        NAMESPACE, address, container_port, desired, desired_on, found, interface, nodes, owner, pod, port,
        spec, time,
    },
    store::Store,
};
use crate::services::{
    DesiredEndpoints, Endpoint, EndpointConditions, EndpointInput, EndpointPort, EndpointPorts, Families,
    Family, FaultReason, Hints, Labels, NetworkAddresses, NetworkState, PodFacts, ServicePort, ServiceSpec,
    TrafficDistribution, endpoints, interfaces,
};

/// The addresses of all endpoints, in order.
fn addresses(desired: &DesiredEndpoints) -> Vec<String> {
    let mut list: Vec<_> =
        desired.groups.iter().flat_map(|group| &group.endpoints).map(|one| one.address).collect();
    list.sort_unstable();
    list.iter().map(ToString::to_string).collect()
}

/// The notes of the faults.
fn notes(desired: &DesiredEndpoints) -> Vec<String> {
    desired.faults.iter().map(ToString::to_string).collect()
}

fn only(desired: &DesiredEndpoints) -> &Endpoint {
    let [group] = &*desired.groups else { panic!("{:?}", desired.groups) };
    let [endpoint] = &*group.endpoints else { panic!("{:?}", group.endpoints) };
    endpoint
}

fn ports(list: &[(&str, Protocol, u16)]) -> EndpointPorts {
    EndpointPorts::new(list.iter().map(|&(name, protocol, port)| EndpointPort {
        name: name.into(),
        protocol,
        port,
        app_protocol: None,
    }))
}

#[test]
fn r13_r22_r24_r25_an_endpoint_is_one_address_with_its_pod_node_and_zone() {
    let desired = desired(&spec(), [&pod("a", &["10.1.0.1"])]);
    let expected = Endpoint {
        address: address("10.1.0.1"),
        hostname: None,
        pod: "a".into(),
        pod_uid: "uid-a".into(),
        node: Some("n1".into()),
        zone: Some("z1".into()),
        conditions: EndpointConditions { ready: true, serving: true, terminating: false },
        hints: Hints::None,
    };
    assert_eq!(*only(&desired), expected);
    assert_eq!(desired.groups[0].family, Family::Ipv4);
    assert_eq!(desired.groups[0].ports, ports(&[("pg", Protocol::Tcp, 5432)]), "R17");
}

#[test]
fn r11_r13_s4_several_addresses_are_endpoints_of_their_own_by_family() {
    let many = pod("a", &["10.1.0.1", "fd00::1", "10.1.0.2", "fd00::2"]);
    let desired = desired(&spec(), [&many]);
    let by_family: Vec<_> =
        desired.groups.iter().map(|group| (group.family, group.endpoints.len())).collect();
    assert_eq!(by_family, [(Family::Ipv4, 2), (Family::Ipv6, 2)]);
    assert_eq!(desired.counts.summary, "4/4");
    assert_eq!((desired.counts.ipv4.total, desired.counts.ipv6.ready), (2, 2));
}

#[test]
fn r12_addresses_of_a_family_that_the_service_does_not_have_are_left_out() {
    let (spec, both) = (spec(), pod("a", &["10.1.0.1", "fd00::1"]));
    for (families, expected) in [(["IPv4"], "10.1.0.1"), (["IPv6"], "fd00::1")] {
        let families = Families::new(families);
        let input =
            EndpointInput { spec: &spec, families, nodes: &nodes(), network: &found(), published: &[] };
        assert_eq!(addresses(&endpoints(&input, [&both])), [expected]);
    }
    assert_eq!(Families::new([]), Families::DUAL);
    assert_eq!(Families::new(["IPv6", "IPv4"]), Families::DUAL);
}

#[test]
fn r25_the_zone_is_omitted_when_it_is_unknown() {
    let elsewhere = PodFacts { node: Some("n3".into()), ..pod("a", &["10.1.0.1"]) };
    assert_eq!(only(&desired(&spec(), [&elsewhere])).zone, None);
}

#[test]
fn r26_a_pod_whose_node_is_missing_is_left_out_unless_not_ready_addresses_are_published() {
    let lost = PodFacts { node: Some("gone".into()), ..pod("a", &["10.1.0.1"]) };
    let unscheduled = PodFacts { node: None, ..pod("c", &["10.1.0.3"]) };
    let pods = [lost, pod("b", &["10.1.0.2"]), unscheduled];
    let without = desired(&spec(), &pods);
    assert_eq!(addresses(&without), ["10.1.0.2"]);
    assert_eq!(without.missing_nodes, [Arc::from("gone")]);
    let publish = ServiceSpec { publish_not_ready: true, ..spec() };
    assert_eq!(addresses(&desired(&publish, &pods)), ["10.1.0.1", "10.1.0.2", "10.1.0.3"]);
}

#[test]
fn pods_on_the_host_network_and_pods_without_the_network_are_absent() {
    let host = PodFacts { host_network: true, ..pod("a", &["10.1.0.1"]) };
    let without = PodFacts { interfaces: Ok(Box::default()), ..pod("b", &[]) };
    let desired = desired(&spec(), [&host, &without]);
    assert_eq!((addresses(&desired), desired.pods, notes(&desired)), (vec![], 2, vec![]));
}

#[test]
fn s5_only_interfaces_of_the_network_count_and_a_filter_selects_one() {
    let mut other = interface("net3", &["10.2.0.1"]);
    other.nad = Arc::new(NadRef::new("other", "blue"));
    let list = vec![interface("net1", &["10.1.0.1"]), interface("net2", &["10.1.0.2"]), other];
    let several = PodFacts { interfaces: Ok(list.into()), ..pod("a", &[]) };
    assert_eq!(addresses(&desired(&spec(), [&several])), ["10.1.0.1", "10.1.0.2"]);
    let filtered = ServiceSpec { interface: Some("net2".parse().unwrap()), ..spec() };
    assert_eq!(addresses(&desired(&filtered, [&several])), ["10.1.0.2"]);
    let absent = ServiceSpec { interface: Some("net3".parse().unwrap()), ..spec() };
    assert_eq!(addresses(&desired(&absent, [&several])), Vec::<String>::new());
}

fn on_addresses(subnets: &[&str], exclude: &[&str], gateways: &[&str]) -> NetworkState {
    let ranges = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
    let gateways = gateways.iter().map(|text| text.parse().unwrap()).collect();
    let addresses = NetworkAddresses { subnets: ranges(subnets), exclude: ranges(exclude), gateways };
    NetworkState::Found { addresses: Some(Arc::new(addresses)) }
}

#[test]
fn gateways_and_excluded_addresses_of_a_bridge_network_do_not_count() {
    let network = on_addresses(&["10.1.0.0/24", "fd00::/64"], &["10.1.0.64/30"], &["10.1.0.1", "fd00::1"]);
    let pods = [pod("a", &["10.1.0.1", "10.1.0.2", "10.1.0.66", "fd00::1", "fd00::2"])];
    let desired = desired_on(&spec(), &network, &[], &pods);
    assert_eq!(addresses(&desired), ["10.1.0.2", "fd00::2"]);
    let reserved = |address: &str| {
        format!(
            "pod a: address {address} is a gateway of the BridgeNetwork or excluded by it and is left out; correct spec.ipam or give the pod another address"
        )
    };
    assert_eq!(notes(&desired), ["10.1.0.1", "10.1.0.66", "fd00::1"].map(reserved));
    assert!(desired.faults.iter().all(|fault| fault.reason.as_str() == "AddressReserved"));
}

#[test]
fn only_addresses_inside_the_subnets_of_a_bridge_network_count() {
    let network = on_addresses(&["10.1.0.0/24", "fd00::/64"], &[], &[]);
    let pods = [pod("a", &["10.1.0.1", "10.96.0.1", "fd00::1", "fd01::1"]), pod("b", &["10.1.1.1"])];
    let desired = desired_on(&spec(), &network, &[], &pods);
    assert_eq!(addresses(&desired), ["10.1.0.1", "fd00::1"]);
    assert_eq!(
        notes(&desired),
        [
            "pod a: address 10.96.0.1 is outside of the subnets of the BridgeNetwork and is left out; add its subnet to spec.ipam.subnets or give the pod another address",
            "pod a: address fd01::1 is outside of the subnets of the BridgeNetwork and is left out; add its subnet to spec.ipam.subnets or give the pod another address",
            "pod b: address 10.1.1.1 is outside of the subnets of the BridgeNetwork and is left out; add its subnet to spec.ipam.subnets or give the pod another address",
        ]
    );
    let none = on_addresses(&[], &[], &[]);
    assert_eq!(addresses(&desired_on(&spec(), &none, &[], &pods)), Vec::<String>::new());
}

#[test]
fn r15_a_bad_text_or_address_removes_only_itself_and_names_the_pod() {
    let text = r#"[{"name":"blue","ips":["10.1.0.1","169.254.0.1"]},{"name":"blue","ips":7}]"#;
    let partly = PodFacts { interfaces: interfaces(Some(text), NAMESPACE), ..pod("partly", &[]) };
    let broken = PodFacts { interfaces: interfaces(Some("[{"), NAMESPACE), ..pod("broken", &[]) };
    let desired = desired(&spec(), [&partly, &broken, &pod("good", &["10.1.0.2"])]);
    assert_eq!(addresses(&desired), ["10.1.0.1", "10.1.0.2"]);
    let notes = notes(&desired);
    let [first, second, third] = &*notes else { panic!("{notes:?}") };
    assert!(
        first.starts_with("pod broken has no endpoint: k8s.v1.cni.cncf.io/network-status is not a JSON list")
    );
    assert_eq!(
        second,
        "pod partly: element [1] has a value of a wrong type in k8s.v1.cni.cncf.io/network-status and is left out"
    );
    assert!(
        third.starts_with("pod partly: \"169.254.0.1\" (a link-local address) in its network-status"),
        "{third}"
    );
    let reasons: Vec<_> = desired.faults.iter().map(|fault| fault.reason.as_str()).collect();
    assert_eq!(reasons, ["BadNetworkStatus", "BadNetworkStatus", "BadAddress"]);
}

#[test]
fn published_endpoints_stay_while_the_nad_is_missing_and_none_is_added() {
    let (spec, owner) = (spec(), owner());
    let mut store = Store::default();
    let mut pods = vec![pod("a", &["10.1.0.1"]), pod("b", &["10.1.0.2"])];
    store.converge(&desired(&spec, &pods), &owner);
    pods.push(pod("c", &["10.1.0.3"]));
    pods[0].ready = false;
    pods[1].interfaces = Ok(Box::new([interface("net1", &["10.1.0.4"])]));
    for missing in [NetworkState::NotFound, NetworkState::KindNotServed] {
        let desired = desired_on(&spec, &missing, &store.slices(), &pods);
        assert_eq!(addresses(&desired), ["10.1.0.1"]);
        assert_eq!(desired.counts.summary, "0/1", "its readiness is still followed");
    }
    assert_eq!(addresses(&desired_on(&spec, &NetworkState::NotFound, &[], &pods)), Vec::<String>::new());
    // Another network in the spec: what was published for the old one does not stay.
    let moved = ServiceSpec { network: NadRef::new(NAMESPACE, "red"), ..spec };
    let red = |one: &PodFacts| {
        let mut pod = one.clone();
        let mut interfaces = pod.interfaces.clone().unwrap();
        interfaces.iter_mut().for_each(|one| one.nad = Arc::new(moved.network.clone()));
        pod.interfaces = Ok(interfaces);
        pod
    };
    let pods: Vec<PodFacts> = pods.iter().map(red).collect();
    let desired = desired_on(&moved, &NetworkState::NotFound, &store.slices(), &pods);
    assert_eq!(addresses(&desired), Vec::<String>::new());
}

#[test]
fn r16_r17_s11_named_target_ports_are_resolved_per_pod_by_name_and_protocol() {
    let named = |name: &str| TargetPort::Name(name.to_owned());
    let mut service = spec();
    service.ports = vec![
        port("pg", 5432, named("pg")),
        ServicePort { protocol: Protocol::Sctp, ..port("sig", 38412, named("sig")) },
        ServicePort {
            app_protocol: Some("kubernetes.io/h2c".to_owned()),
            ..port("web", 80, TargetPort::Number(8080))
        },
    ];
    let with =
        |name: &str, address: &str, ports: Vec<_>| PodFacts { ports: ports.into(), ..pod(name, &[address]) };
    let pods = [
        with(
            "a",
            "10.1.0.1",
            vec![container_port("pg", Protocol::Tcp, 1000), container_port("sig", Protocol::Sctp, 7)],
        ),
        // The second container port of the same name, such as that of a sidecar, does not count.
        with(
            "b",
            "10.1.0.2",
            vec![container_port("pg", Protocol::Tcp, 2000), container_port("pg", Protocol::Tcp, 2001)],
        ),
        // The protocol must match.
        with("c", "10.1.0.3", vec![container_port("pg", Protocol::Udp, 3000)]),
        with(
            "d",
            "10.1.0.4",
            vec![container_port("pg", Protocol::Tcp, 1000), container_port("sig", Protocol::Sctp, 7)],
        ),
    ];
    let desired = desired(&service, &pods);
    let group = |ports: &EndpointPorts| {
        let list: Vec<_> = ports
            .as_slice()
            .iter()
            .map(|one| format!("{}/{}/{}", one.name, one.protocol, one.port))
            .collect();
        list.join(" ")
    };
    let groups: Vec<_> = desired.groups.iter().map(|one| (group(&one.ports), one.endpoints.len())).collect();
    assert_eq!(
        groups,
        [
            ("pg/TCP/1000 sig/SCTP/7 web/TCP/8080".to_owned(), 2),
            ("pg/TCP/2000 web/TCP/8080".to_owned(), 1),
            ("web/TCP/8080".to_owned(), 1),
        ]
    );
    let web = |ports: &EndpointPorts| ports.as_slice().last().unwrap().app_protocol.clone();
    assert_eq!(web(&desired.groups[0].ports).as_deref(), Some("kubernetes.io/h2c"));
}

#[test]
fn r17_the_order_of_ports_does_not_matter_and_no_ports_are_an_empty_list() {
    let (a, b) = (("a", Protocol::Tcp, 1), ("b", Protocol::Udp, 2));
    assert_eq!(ports(&[a, b]), ports(&[b, a]));
    assert_eq!(ports(&[]), EndpointPorts::default());
    let service = ServiceSpec { ports: Vec::new(), ..spec() };
    assert!(desired(&service, [&pod("a", &["10.1.0.1"])]).groups[0].ports.is_empty());
}

#[test]
fn r27_s9_a_hostname_needs_the_subdomain_of_the_service_or_the_opt_in() {
    let named = |hostname: &str, subdomain: &str| PodFacts {
        hostname: (!hostname.is_empty()).then(|| hostname.into()),
        subdomain: (!subdomain.is_empty()).then(|| subdomain.into()),
        ..pod("web-0", &["10.1.0.1"])
    };
    for (hostname, subdomain, expected) in
        [("web-0", "db", Some("web-0")), ("web-0", "web", None), ("web-0", "", None), ("", "db", None)]
    {
        let desired = desired(&spec(), [&named(hostname, subdomain)]);
        assert_eq!(only(&desired).hostname.as_deref(), expected, "{hostname} {subdomain}");
        assert_eq!(notes(&desired), Vec::<String>::new());
    }
    let opt_in = ServiceSpec { hostnames: Hostnames::PodName, ..spec() };
    assert_eq!(only(&desired(&opt_in, [&named("", "")])).hostname.as_deref(), Some("web-0"));
}

#[test]
fn s9_a_pod_name_that_is_no_dns_label_gets_no_hostname_and_an_event() {
    let opt_in = ServiceSpec { hostnames: Hostnames::PodName, ..spec() };
    for name in ["web.example.com".to_owned(), "x".repeat(64)] {
        let desired = desired(&opt_in, [&pod(&name, &["10.1.0.1"])]);
        assert_eq!(only(&desired).hostname, None);
        assert_eq!(desired.faults.len(), 1);
        assert_eq!(desired.faults[0].reason, FaultReason::BadHostname);
        assert!(desired.faults[0].to_string().starts_with(&format!("pod {name} gets no DNS name")));
    }
}

#[test]
fn r28_hints_repeat_zone_and_node_of_ready_endpoints() {
    let unready = PodFacts { ready: false, ..pod("a", &["10.1.0.1"]) };
    let no_zone = PodFacts { node: Some("n3".into()), ..pod("a", &["10.1.0.1"]) };
    let ready = pod("a", &["10.1.0.1"]);
    for (traffic, pod, expected) in [
        (Some(TrafficDistribution::SameZone), &ready, Hints::Zone),
        (Some(TrafficDistribution::SameNode), &ready, Hints::Node),
        (None, &ready, Hints::None),
        (Some(TrafficDistribution::SameZone), &unready, Hints::None),
        (Some(TrafficDistribution::SameZone), &no_zone, Hints::None),
        (Some(TrafficDistribution::SameNode), &no_zone, Hints::Node),
    ] {
        let service = ServiceSpec { traffic, ..spec() };
        assert_eq!(only(&desired(&service, [pod])).hints, expected, "{traffic:?} {pod:?}");
    }
}

#[test]
fn a_service_selects_pods_of_its_namespace_by_labels() {
    let selected = pod("a", &[]);
    assert!(spec().selects(&selected));
    assert!(!spec().selects(&PodFacts { namespace: "other".into(), ..selected.clone() }));
    let labels = Arc::new(Labels::new([("app", "web")]));
    assert!(!spec().selects(&PodFacts { labels, ..selected }));
}

#[test]
fn the_spec_of_a_network_service_is_read_with_its_defaults() {
    let text =
        r#"{"network": "core", "selector": {"app": "db"}, "ports": [{"port": 53, "protocol": "UDP"}]}"#;
    let stored: NetworkServiceSpec = serde_json::from_str(text).unwrap();
    let read = ServiceSpec::from_network_service(NAMESPACE, "db", &stored).unwrap();
    assert_eq!(read.network, NadRef::new(NAMESPACE, "core"));
    assert_eq!(read.ports, [ServicePort { protocol: Protocol::Udp, ..port("", 53, TargetPort::Number(53)) }]);
    assert_eq!((read.hostnames, read.publish_not_ready), (Hostnames::None, false));
    let elsewhere = NetworkServiceSpec { network: "net/core".to_owned(), ..stored.clone() };
    let read = ServiceSpec::from_network_service(NAMESPACE, "db", &elsewhere).unwrap();
    assert_eq!(read.network, NadRef::new("net", "core"));
    let bad_port = NetworkServicePort { port: 0, ..stored.ports[0].clone() };
    for (bad, message) in [
        (NetworkServiceSpec { network: "a/b/c".to_owned(), ..stored.clone() }, "[namespace/]name"),
        (NetworkServiceSpec { selector: BTreeMap::new(), ..stored.clone() }, "spec.selector is empty"),
        (NetworkServiceSpec { ports: vec![bad_port], ..stored }, "port 0 is not in 1-65535"),
    ] {
        let error = ServiceSpec::from_network_service(NAMESPACE, "db", &bad).unwrap_err();
        assert!(error.contains(message), "{error}");
    }
}

#[test]
fn virtual_machines_are_known_by_the_label_of_kubevirt() {
    let labels = |value: &str| Arc::new(Labels::new([("kubevirt.io/created-by", value)]));
    assert_eq!(PodFacts { labels: labels("vm"), ..pod("a", &[]) }.virtual_machine(), Some("vm"));
    assert_eq!(PodFacts { labels: labels(""), ..pod("a", &[]) }.virtual_machine(), None);
    assert!(!PodFacts { deleting: true, created: time(0), ..pod("a", &[]) }.takes_traffic());
}
