//! What a NodeNetwork says about the links of its node.

mod properties;
mod publish;

use super::*;

fn link(index: u32, name: &str) -> Link {
    Link {
        index,
        name: name.to_owned(),
        kind: None,
        mac: Some(Mac::from([2, 0, 0, 0, 0, 1])),
        mtu: 1500,
        admin: AdminState::Up,
        oper: OperState::Up,
        loopback: false,
        master: None,
        lower: None,
        alias: String::new(),
        addresses: Vec::new(),
        ipv6_disabled: None,
        ipv4_isolated: None,
        vxlan: None,
    }
}

fn address(net: &str) -> Address {
    Address { net: net.parse().unwrap(), temporary: false }
}

fn node(ips: &[&str]) -> NodeInfo {
    let internal_ips = ips.iter().map(|ip| ip.parse().unwrap()).collect();
    NodeInfo { name: "node-1".to_owned(), uid: "uid-1".to_owned(), internal_ips }
}

fn ignored() -> IfNamePatterns {
    DEFAULT_IGNORED.parse().unwrap()
}

fn noon() -> Timestamp {
    "2026-01-01T12:00:00Z".parse().unwrap()
}

fn observed(links: &[Link]) -> KernelState {
    KernelState { links: links.to_vec(), ..KernelState::default() }
}

fn plan_status(observed: &KernelState, node: &NodeInfo) -> NodeNetworkStatus {
    let ignored = ignored();
    let input = PublishInput {
        observed,
        node,
        ignored: &ignored,
        server: None,
        written: None,
        last_write: None,
        networks: &[],
        leases: None,
        netfilter: Netfilter::Off,
        runtime: &RuntimeStatus::Unknown,
        state_problem: None,
    };
    status(&input, noon())
}

fn names(status: &NodeNetworkStatus) -> Vec<&str> {
    status.interfaces.iter().map(|interface| interface.name.as_str()).collect()
}

fn condition<'a>(status: &'a NodeNetworkStatus, r#type: &str) -> &'a Condition {
    status.conditions.iter().find(|condition| condition.r#type == r#type).unwrap()
}

#[test]
fn a_link_is_listed_with_all_its_properties() {
    let mut eth0 = link(2, "eth0");
    eth0.master = Some(5);
    eth0.addresses = vec![address("fd00::2/64"), address("10.0.0.2/24"), address("10.0.0.2/24")];
    let mut bridge = link(5, "br0");
    bridge.kind = Some("bridge".to_owned());
    bridge.oper = OperState::Down;
    bridge.mac = None;
    let state =
        KernelState { links: vec![eth0, bridge], default_routes: vec![2, 2], ..KernelState::default() };

    let status = plan_status(&state, &node(&["10.0.0.2"]));

    let vtep = Vtep { address: "10.0.0.2".parse().unwrap(), interface: "eth0".to_owned(), mtu: 1500 };
    assert_eq!(status.vtep, Some(vtep));
    assert_eq!(
        status.interfaces,
        [
            Interface {
                name: "br0".to_owned(),
                kind: "bridge".to_owned(),
                mac: None,
                mtu: 1500,
                state: LinkState::NoCarrier,
                addresses: vec![],
                master: None,
                default_route: false,
            },
            Interface {
                name: "eth0".to_owned(),
                kind: "physical".to_owned(),
                mac: Some(Mac::from([2, 0, 0, 0, 0, 1])),
                mtu: 1500,
                state: LinkState::Up,
                addresses: vec!["10.0.0.2/24".parse().unwrap(), "fd00::2/64".parse().unwrap()],
                master: Some("br0".to_owned()),
                default_route: true,
            },
        ]
    );
    for r#type in ["Ready", "VtepFound"] {
        assert_eq!(condition(&status, r#type).status, ConditionStatus::True);
        assert_eq!(condition(&status, r#type).last_transition_time, noon());
    }
}

#[test]
fn links_of_pods_and_of_other_network_software_are_omitted() {
    let omitted = "veth1a2b cali123 lxc_health eni4f1c9d0a1b2 azv1234 12ab34cd56ef_h 3f5a2b1c9d8e7f6 tap0 vnet3 \
        virbr0 virbr0-nic cni0 cilium_host cilium_vxlan flannel.1 tunl0 vxlan.calico wireguard.cali vxlan-v6.calico \
        genev_sys_6081 vxlan_sys_4789 ovn-k8s-mp0 ovs-system br-int antrea-gw0 kube-ipvs0 kube-bridge nodelocaldns \
        docker0 br-0123456789ab podman1 ifb0 sit0 ip6tnl0 gre0 gretap0 erspan0 ip_vti0 ip6_vti0 ip6gre0 teql0 lo";
    let listed = "bond0 bond0.100 br-blue br-ex dummy0 enp3s0f1np1 ens1f0v3 eth0 ib0 mgmt-bo mgmt-br team0 vlan100 \
        wg0 wlan0";
    let all = omitted.split_whitespace().chain(listed.split_whitespace());
    let links: Vec<Link> = (1..).zip(all).map(|(index, name)| link(index, name)).collect();
    assert_eq!(names(&plan_status(&observed(&links), &node(&[]))).join(" "), listed);
}

#[test]
fn links_owned_by_patchbay_are_omitted() {
    let mut ours = link(1, "br-blue");
    ours.alias = "patchbay/bridge/uid".to_owned();
    let mut foreign = link(2, "br-red");
    foreign.alias = "not patchbay/bridge/uid".to_owned();
    assert_eq!(names(&plan_status(&observed(&[ours, foreign]), &node(&[]))), ["br-red"]);
}

#[test]
fn the_loopback_is_never_listed_even_if_it_is_renamed_or_has_our_alias() {
    let mut lo = link(1, "eth7");
    lo.loopback = true;
    lo.alias = "patchbay/x".to_owned();
    assert_eq!(names(&plan_status(&observed(&[lo]), &node(&[]))), Vec::<&str>::new());
}

#[test]
fn the_vtep_is_the_first_internal_ip_that_is_on_a_link() {
    let mut eth0 = link(2, "eth0");
    eth0.addresses = vec![address("10.0.0.2/24")];
    let mut cni0 = link(3, "cni0");
    cni0.addresses = vec![address("fd00::2/64")];
    cni0.mtu = 9000;
    let state = observed(&[eth0, cni0]);

    let vtep = |ips: &[&str]| plan_status(&state, &node(ips)).vtep.map(|vtep| (vtep.interface, vtep.mtu));
    assert_eq!(vtep(&["10.9.9.9", "fd00::2", "10.0.0.2"]), Some(("cni0".to_owned(), 9000)));
    assert_eq!(vtep(&["10.0.0.2", "fd00::2"]), Some(("eth0".to_owned(), 1500)));
    assert_eq!(vtep(&["10.0.0.3"]), None);
}

#[test]
fn the_vtep_of_an_address_on_two_links_is_the_listed_link() {
    let mut links = [link(1, "lo"), link(2, "kube-ipvs0"), link(3, "eth0")];
    links[0].loopback = true;
    for link in &mut links {
        link.addresses = vec![address("10.0.0.2/32")];
    }
    assert_eq!(plan_status(&observed(&links), &node(&["10.0.0.2"])).vtep.unwrap().interface, "eth0");
    assert_eq!(
        plan_status(&observed(&links[..2]), &node(&["10.0.0.2"])).vtep.unwrap().interface,
        "kube-ipvs0"
    );
    assert_eq!(plan_status(&observed(&links[..1]), &node(&["10.0.0.2"])).vtep.unwrap().interface, "lo");
}

/// A node whose address is on `lo`, with two fabric links that have link-local addresses only (BGP unnumbered), a
/// management link, and links that carry no packets to other nodes.
fn node_with_a_vtep_on_loopback() -> KernelState {
    let mut links = [link(1, "lo"), link(2, "swp1"), link(3, "swp2"), link(4, "mgmt")];
    (links[0].loopback, links[0].mtu) = (true, 65536);
    links[0].addresses = vec![address("127.0.0.1/8"), address("10.0.0.2/32"), address("fd00::2/128")];
    for (link, mtu) in links[1..].iter_mut().zip([9000, 8000, 1500]) {
        link.mtu = mtu;
        link.addresses = vec![address("fe80::1/64")];
    }
    let small =
        |index, name: &str| Link { mtu: 1000, addresses: vec![address("fe80::1/64")], ..link(index, name) };
    let unusable = [
        Link { admin: AdminState::Down, ..small(10, "eth8") },
        Link { oper: OperState::Down, ..small(11, "eth9") },
        Link { addresses: Vec::new(), ..small(12, "eth10") },
        Link { kind: Some("dummy".to_owned()), ..small(13, "anycast0") },
        Link { alias: "patchbay/bridge/uid".to_owned(), ..small(14, "br-blue") },
        small(15, "flannel.1"),
    ];
    observed(&links.into_iter().chain(unusable).collect::<Vec<_>>())
}

fn vtep_mtu(state: &KernelState) -> i32 {
    plan_status(state, &node(&["10.0.0.2"])).vtep.unwrap().mtu
}

#[test]
fn the_mtu_of_a_vtep_on_loopback_is_the_smallest_of_the_links_to_the_peers() {
    let mut state = node_with_a_vtep_on_loopback();
    for (peer_links, mtu) in [(vec![2], 9000), (vec![2, 3], 8000), (vec![3, 1], 8000), (vec![4, 99], 1500)] {
        state.peer_links = peer_links;
        assert_eq!(vtep_mtu(&state), mtu, "{:?}", state.peer_links);
    }
    let status = plan_status(&state, &node(&["10.0.0.2"]));
    assert_eq!(status.vtep.as_ref().unwrap().interface, "lo");
    let message = &condition(&status, "VtepFound").message;
    assert_eq!(message, "overlays use 10.0.0.2 on lo; MTU 1500 is that of the links to the other nodes");

    // The routes do not matter if the address is on another link.
    state.links[1].addresses.push(address("10.0.0.2/31"));
    assert_eq!(vtep_mtu(&state), 9000);
}

#[test]
fn without_routes_to_peers_the_mtu_of_a_vtep_on_loopback_is_the_smallest_of_all_usable_links() {
    let mut state = node_with_a_vtep_on_loopback();
    assert_eq!(vtep_mtu(&state), 1500);
    state.links.retain(|link| link.name != "mgmt");
    assert_eq!(vtep_mtu(&state), 8000);
    // A default route counts on any link.
    state.default_routes = vec![15];
    assert_eq!(vtep_mtu(&state), 1000);
    state.links.truncate(1);
    assert_eq!(vtep_mtu(&state), 1500);
}

#[test]
fn routes_to_peers_are_looked_up_only_for_a_vtep_on_loopback() {
    let peers: Vec<IpAddr> =
        ["10.0.0.2", "10.0.0.3", "fd00::3", "10.0.0.3"].iter().map(|ip| ip.parse().unwrap()).collect();
    let targets = |state: &KernelState, ip: &str| -> Vec<String> {
        let targets = peer_route_targets(state, &node(&[ip]), &ignored(), peers.iter().copied());
        targets.iter().map(ToString::to_string).collect()
    };
    let mut state = node_with_a_vtep_on_loopback();
    assert_eq!(targets(&state, "10.0.0.2"), ["10.0.0.3"]);
    assert_eq!(targets(&state, "fd00::2"), ["fd00::3"]);
    assert_eq!(targets(&state, "10.0.0.9"), Vec::<String>::new());
    state.links[1].addresses.push(address("10.0.0.2/31"));
    assert_eq!(targets(&state, "10.0.0.2"), Vec::<String>::new());
}

#[test]
fn the_condition_of_a_node_without_a_vtep_names_the_remedy() {
    let state = observed(&[link(1, "eth0")]);
    let status = plan_status(&state, &node(&["10.0.0.2", "fd00::2"]));
    let found = condition(&status, "VtepFound");
    assert_eq!((found.status, found.reason.as_str()), (ConditionStatus::False, "AddressNotOnAnyLink"));
    assert!(found.message.contains("10.0.0.2 or fd00::2") && found.message.contains("--node-ip"));

    let status = plan_status(&state, &node(&[]));
    assert_eq!(condition(&status, "VtepFound").reason, "NoInternalIP");
    assert_eq!(condition(&status, "Ready").status, ConditionStatus::True);
}

#[test]
fn link_local_and_temporary_addresses_are_not_listed() {
    let mut eth0 = link(1, "eth0");
    eth0.addresses = vec![
        address("fe80::1/64"),
        Address { net: "2001:db8::1234/64".parse().unwrap(), temporary: true },
        address("2001:db8::1/64"),
        address("169.254.1.1/16"),
    ];
    let status = plan_status(&observed(&[eth0]), &node(&[]));
    let desired: Vec<IpNet> =
        ["169.254.1.1/16", "2001:db8::1/64"].iter().map(|net| net.parse().unwrap()).collect();
    assert_eq!(status.interfaces[0].addresses, desired);
}

#[test]
fn admin_and_operational_state_map_to_one_link_state() {
    for (admin, oper, desired) in [
        (AdminState::Up, OperState::Up, LinkState::Up),
        (AdminState::Up, OperState::Down, LinkState::NoCarrier),
        (AdminState::Up, OperState::LowerLayerDown, LinkState::LowerLayerDown),
        (AdminState::Up, OperState::Dormant, LinkState::Dormant),
        (AdminState::Up, OperState::Testing, LinkState::Testing),
        (AdminState::Up, OperState::Unknown, LinkState::Unknown),
        (AdminState::Up, OperState::NotPresent, LinkState::NotPresent),
        (AdminState::Down, OperState::Down, LinkState::Down),
        (AdminState::Down, OperState::LowerLayerDown, LinkState::Down),
        (AdminState::Down, OperState::Up, LinkState::Down),
    ] {
        assert_eq!(state(admin, oper), desired, "{admin:?} {oper:?}");
    }
}

#[test]
fn duplicate_names_and_missing_masters_are_tolerated() {
    let mut port = link(3, "eth1");
    port.master = Some(99);
    let status = plan_status(&observed(&[link(2, "eth0"), link(1, "eth0"), port, link(4, "")]), &node(&[]));
    assert_eq!(names(&status), ["eth0", "eth1"]);
    assert_eq!(status.interfaces[1].master, None);
}

#[test]
fn links_beyond_the_limit_are_omitted_except_those_that_the_node_needs() {
    let mut links: Vec<Link> = (1..=600).map(|index| link(index, &format!("eth{index:03}"))).collect();
    links[598].addresses = vec![address("10.0.0.2/24")];
    let state = KernelState { links, default_routes: vec![600], ..KernelState::default() };
    let status = plan_status(&state, &node(&["10.0.0.2"]));

    let shown = names(&status);
    assert_eq!(shown.len(), MAX_INTERFACES);
    assert_eq!(shown[508..], ["eth509", "eth510", "eth599", "eth600"]);
    let ready = condition(&status, "Ready");
    assert_eq!((ready.status, ready.reason.as_str()), (ConditionStatus::False, "TooManyLinks"));
    assert!(ready.message.contains("512 of 600"), "{}", ready.message);
}

fn addresses_of(link: u32, count: u32) -> Vec<Address> {
    (0..count)
        .map(|host| address(&format!("fd00:aaaa:bbbb:cccc:dddd:eeee:{link:x}:{:x}/128", 0x1000 + host)))
        .collect()
}

#[test]
fn addresses_beyond_the_limit_are_omitted_and_reported() {
    let mut eth0 = link(1, "eth0");
    eth0.addresses = addresses_of(1, 70);
    let status = plan_status(&observed(&[eth0]), &node(&[]));
    assert_eq!(status.interfaces[0].addresses.len(), MAX_ADDRESSES);
    let ready = condition(&status, "Ready");
    assert_eq!((ready.status, ready.reason.as_str()), (ConditionStatus::False, "TooManyAddresses"));
    assert!(ready.message.starts_with("6 addresses are not listed"), "{}", ready.message);
}

/// The API server stores at most 1.5 MiB per object, including the managed fields.
#[test]
fn the_largest_status_is_far_below_the_size_limit_of_the_api_server() {
    // Fully escaped names are four times as long, and JSON escapes their backslashes again.
    let odd = |index: u32| format!("{}\\x{:02x}\\x{:02x}", "\\x01".repeat(13), index >> 8, index & 0xff);
    let links: Vec<Link> = (1..=600)
        .map(|index| {
            let mut link = link(0x1000 + index, &odd(index));
            link.kind = Some("\\x01".repeat(15));
            link.mtu = u32::MAX;
            link.oper = OperState::LowerLayerDown;
            link.master = Some(0x1001);
            link.addresses = addresses_of(0x1000 + index, 100);
            link
        })
        .collect();
    let default_routes = links.iter().map(|link| link.index).collect();
    let state = KernelState { links, default_routes, ..KernelState::default() };
    let status = plan_status(&state, &node(&[]));

    assert_eq!(status.interfaces.len(), MAX_INTERFACES);
    let addresses: usize = status.interfaces.iter().map(|interface| interface.addresses.len()).sum();
    assert_eq!(addresses, MAX_TOTAL_ADDRESSES);
    assert_eq!(condition(&status, "Ready").reason, "TooManyLinks");
    // The managed fields contain the name and up to eight fields of each link.
    let managed: usize = status.interfaces.iter().map(|interface| 2 * interface.name.len() + 150).sum();
    let size = serde_json::to_string(&status).unwrap().len() + managed;
    assert!(size < 512 * 1024, "{size}");
}

#[test]
fn a_condition_keeps_its_transition_time_until_its_status_changes() {
    let state = observed(&[link(1, "eth0")]);
    let (node, ignored) = (node(&[]), ignored());
    let mut input = PublishInput {
        observed: &state,
        node: &node,
        ignored: &ignored,
        server: None,
        written: None,
        last_write: None,
        networks: &[],
        leases: None,
        netfilter: Netfilter::Off,
        runtime: &RuntimeStatus::Unknown,
        state_problem: None,
    };
    let first = status(&input, noon());
    let record = PublishedState { owners: vec![], status: Some(first.clone()) };
    input.server = Some(&record);
    let later: Timestamp = "2026-01-01T13:00:00.5Z".parse().unwrap();
    assert_eq!(status(&input, later), first);

    let mut flipped = record.clone();
    flipped.status.as_mut().unwrap().conditions[0].status = ConditionStatus::Unknown;
    input.server = Some(&flipped);
    assert_eq!(status(&input, later).conditions[0].last_transition_time.to_string(), "2026-01-01T13:00:00Z");
}
