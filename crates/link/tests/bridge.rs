//! Bridge networks in the kernel: observe, plan, apply. Each test uses its own network namespaces.
#![expect(clippy::unwrap_used, clippy::panic, reason = "the functions around the tests are test code too")]

mod host;
mod netns;

use std::{
    net::{IpAddr, Ipv6Addr, SocketAddrV6},
    os::fd::AsRawFd as _,
    path::Path,
};

use api::{ErrorChain, Mac};
use host::{Host, Namespace, delivers, name, network, overlay, reaches, two_nodes};
use link::Error;
use nix::{
    errno::Errno,
    sys::socket::{
        AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrIn6, sendto, setsockopt, socket,
        sockopt,
    },
};
use plan::{
    bridge::{Action, LinkKind, LocalNetwork, Overlay, Peer, ownership_mac, reason},
    nodenetwork::{AdminState, KernelState, OperState, Vxlan},
};

/// A node with a NIC that is down and has a small MTU, and the namespace behind that NIC.
fn with_uplink() -> (Host, Namespace) {
    let (host, behind) = (Host::new("one"), Namespace::new());
    host.ns.pair("eth1", &behind, "far");
    host.ns.ip("link set eth1 mtu 1300");
    behind.ip("link set far up");
    behind.ip("address add 10.9.0.9/24 dev far");
    (host, behind)
}

fn uplink(label: &str) -> LocalNetwork {
    LocalNetwork { uplink: Some(name("eth1")), ..network(label) }
}

/// The observed state with a stable order, to compare before and after.
fn snapshot(host: &Host) -> KernelState {
    let mut observed = host.observe();
    observed.links.sort_by_key(|link| link.index);
    observed
}

#[test]
fn two_pods_on_one_node_reach_each_other() {
    let mut host = Host::new("one");
    host.networks = vec![network("blue")];
    host.settle();
    let report = host.report("blue").unwrap();
    assert!(report.ready, "{report:?}");
    let bridge = host.link("br-blue");
    assert_eq!((bridge.admin, bridge.mtu, bridge.ipv6_disabled), (AdminState::Up, 1400, Some(true)));
    assert_eq!((bridge.alias.as_str(), bridge.addresses.len()), ("patchbay/bridge/uid-blue", 0));
    assert_eq!(bridge.mac, Some(ownership_mac("uid-blue", "uid-of-one", LinkKind::Bridge)));

    let one = host.pod(&host.networks[0], 1, "10.9.0.1/24");
    let two = host.pod(&host.networks[0], 2, "10.9.0.2/24");
    assert!(reaches(&one.socket("10.9.0.1:7000"), &two.socket("10.9.0.2:7000"), 1372));
    assert_eq!(host.settle(), []);
    // The peers are in other namespaces: a link with the same index here is not their lower link.
    assert_eq!(host.link("veth00000000001").lower, None);
    // A port with a smaller MTU does not change the bridge's.
    host.ns.ip("link set veth00000000001 mtu 1000");
    assert_eq!(host.link("br-blue").mtu, 1400);
    assert_eq!(host.report("blue").unwrap().pods_with_old_mtu, 1);
}

#[test]
fn pods_on_two_nodes_reach_each_other_over_the_overlay() {
    for addresses in [["192.168.9.1/24", "192.168.9.2/24"], ["fd00:9::1/64", "fd00:9::2/64"]] {
        let mut hosts = two_nodes(&[overlay("blue", 4711)], addresses);
        for host in &mut hosts {
            host.settle();
            let report = host.report("blue").unwrap();
            assert!(report.ready, "{report:?}");
            assert_eq!(report.ports, ["vx-blue"]);
        }
        let local = hosts[0].node.internal_ips[0];
        assert_eq!(hosts[0].link("vx-blue").vxlan, Some(Vxlan { vni: 4711, port: 4789, local: Some(local) }));
        let one = hosts[0].pod(&hosts[0].networks[0], 1, "10.9.0.1/24");
        let two = hosts[1].pod(&hosts[1].networks[0], 2, "10.9.0.2/24");
        assert!(reaches(&one.socket("10.9.0.1:7000"), &two.socket("10.9.0.2:7000"), 1372));
        assert_eq!((hosts[0].settle(), hosts[1].settle()), (vec![], vec![]));
    }
}

#[test]
fn pods_reach_hosts_behind_the_uplink_and_the_uplink_is_restored_afterwards() {
    let (mut host, behind) = with_uplink();
    let before = snapshot(&host);
    host.networks = vec![uplink("blue")];
    host.settle();
    let report = host.report("blue").unwrap();
    assert!(report.ready, "{report:?}");
    assert_eq!(report.ports, ["eth1"]);
    let pod = host.pod(&host.networks[0], 1, "10.9.0.1/24");
    let (from, to) = (pod.socket("10.9.0.1:7000"), behind.socket("10.9.0.9:7000"));
    assert!(reaches(&from, &to, 1372));

    host.remove_all();
    assert_eq!(host.settle(), []);
    assert_eq!(host.report("blue").unwrap().reason, reason::IN_USE);
    assert!(reaches(&from, &to, 1372));
    host.ns.ip("link del veth00000000001");
    host.settle();
    assert_eq!((snapshot(&host), host.report("blue")), (before, None));
}

#[test]
fn manual_changes_are_repaired_in_place() {
    let mut hosts = two_nodes(&[overlay("blue", 4711)], ["192.168.9.1/24", "192.168.9.2/24"]);
    let host = &mut hosts[0];
    host.settle();
    let _pod = host.pod(&host.networks[0], 1, "10.9.0.1/24");
    let settled = |host: &Host| {
        let observed = host.observe();
        let mut links: Vec<_> = observed.links.iter().filter(|link| link.name != "eth0").cloned().collect();
        links.sort_by_key(|link| link.index);
        (links, observed.floods)
    };
    let before = settled(host);
    assert_eq!(before.1.len(), 1);
    for by_hand in [
        "ip link set br-blue mtu 1200",
        "ip link set br-blue down",
        "ip link set br-blue address 02:09:09:09:09:09",
        "ip link set br-blue alias mine",
        "ip link set br-blue name br-mine",
        "ip address add 10.9.0.77/24 dev br-blue",
        "ip link set vx-blue mtu 1200",
        "ip link set vx-blue down",
        "ip link set vx-blue nomaster",
        "ip link set vx-blue address 02:09:09:09:09:08",
        "ip link set vx-blue alias mine",
        "ip link set vx-blue name vx-mine",
        "ip address add 10.9.0.78/24 dev vx-blue",
        "bridge fdb del 00:00:00:00:00:00 dev vx-blue dst 192.168.9.2",
        "bridge fdb append 00:00:00:00:00:00 dev vx-blue dst 192.168.9.7",
        "ip link set veth00000000001 nomaster",
        "ip link set veth00000000001 down",
    ] {
        host.changed();
        host.ns.run(by_hand);
        assert!(host.changed(), "no event for {by_hand}");
        let steps = host.settle();
        assert!(!steps.is_empty() && steps[0].repair, "{by_hand}: {steps:?}");
        let mut after = settled(host);
        for (link, was) in after.0.iter_mut().zip(&before.0) {
            // A port that went down and up is not operational at once.
            link.oper = was.oper;
            if link.kind.as_deref() == Some("veth") {
                link.addresses.clone_from(&was.addresses);
            }
        }
        assert_eq!(after, before, "{by_hand}");
        assert!(host.report("blue").unwrap().ready, "{by_hand}");
    }
    // With IPv6 enabled again, the bridge gets a link-local address at once.
    let key = Path::new("/proc/sys/net/ipv6/conf/br-blue/disable_ipv6");
    host.ns.within(|| std::fs::write(key, "0")).unwrap();
    assert!(host.changed());
    assert_eq!(host.settle()[0].action, Action::DisableIpv6 { name: "br-blue".to_owned() });
    assert_eq!(host.link("br-blue").addresses, []);
}

#[test]
fn deleted_links_are_recreated_and_pods_are_attached_again() {
    let mut hosts = two_nodes(&[overlay("blue", 4711)], ["192.168.9.1/24", "192.168.9.2/24"]);
    for host in &mut hosts {
        host.settle();
    }
    let one = hosts[0].pod(&hosts[0].networks[0], 1, "10.9.0.1/24");
    let two = hosts[1].pod(&hosts[1].networks[0], 2, "10.9.0.2/24");
    let (from, to) = (one.socket("10.9.0.1:7000"), two.socket("10.9.0.2:7000"));
    for deleted in ["br-blue", "vx-blue"] {
        hosts[0].ns.ip(&format!("link del {deleted}"));
        assert!(hosts[0].settle()[0].repair);
        assert!(hosts[0].report("blue").unwrap().ready);
        assert!(reaches(&from, &to, 1372), "{deleted}");
    }
}

#[test]
fn a_daemon_killed_after_any_create_step_resumes() {
    for steps in 0.. {
        let (mut host, _behind) = with_uplink();
        host.ns.ip("link add eth0 type veth peer name eth0-far");
        host.ns.ip("address add 192.168.9.1/24 dev eth0");
        host.node.internal_ips = vec!["192.168.9.1".parse().unwrap()];
        host.networks = vec![uplink("up"), overlay("over", 4711)];
        let peer = Some("192.168.9.2".parse().unwrap());
        host.peers = vec![Peer { node: "two".to_owned(), vtep: peer, networks: ["uid-over".into()].into() }];
        let before = snapshot(&host);
        let stopped = host.stop_after(steps);
        host.settle();
        assert!(host.plan().networks.iter().all(|report| report.ready), "{steps}: {:?}", host.plan());
        host.remove_all();
        host.settle();
        assert_eq!((snapshot(&host), host.plan().networks), (before, vec![]), "{steps}");
        if !stopped {
            assert!(steps > 10, "{steps}");
            break;
        }
    }
}

#[test]
fn a_daemon_killed_after_any_delete_step_resumes() {
    for steps in 0.. {
        let (mut host, _behind) = with_uplink();
        let before = snapshot(&host);
        host.networks = vec![uplink("up"), network("local")];
        host.settle();
        host.remove_all();
        let stopped = host.stop_after(steps);
        // Meanwhile the networks were deleted from the API server.
        host.networks.clear();
        host.settle();
        assert_eq!((snapshot(&host), host.plan().networks), (before, vec![]), "{steps}");
        assert!(host.records.is_empty());
        if !stopped {
            assert!(steps > 5, "{steps}");
            break;
        }
    }
}

#[test]
fn a_correct_network_is_left_alone_and_edits_do_not_recreate_links() {
    let (mut host, _behind) = with_uplink();
    host.networks = vec![network("blue")];
    host.settle();
    let _pod = host.pod(&host.networks[0], 1, "10.9.0.1/24");
    let index = host.link("br-blue").index;
    while host.changed() {}
    for _ in 0..100 {
        assert_eq!(host.settle(), []);
    }
    assert!(!host.changed());

    for edit in [
        (|network| network.mtu = Some(1450)) as fn(&mut LocalNetwork),
        |network| network.mtu = Some(576),
        |network| network.mtu = Some(1500),
        |network| network.uplink = Some(name("eth1")),
        |network| network.mtu = Some(1400),
        |network| network.uplink = None,
    ] {
        edit(&mut host.networks[0]);
        let steps = host.settle();
        let rebuilds =
            |action: &Action| matches!(action, Action::Delete { .. } | Action::CreateBridge { .. });
        assert!(
            !steps.is_empty() && !steps.iter().any(|step| step.repair || rebuilds(&step.action)),
            "{steps:?}"
        );
        let bridge = host.link("br-blue");
        assert_eq!((bridge.index, Some(bridge.mtu)), (index, host.networks[0].mtu));
        assert!(bridge.addresses.is_empty() && bridge.ipv6_disabled != Some(false));
        assert!(host.report("blue").unwrap().ready);
    }
    assert_eq!((host.link("eth1").mtu, host.link("eth1").admin), (1300, AdminState::Down));
}

/// Sends a router advertisement that offers a default route and a prefix.
fn advertise(pod: &Namespace, link: &str) {
    pod.within(|| {
        let index = nix::net::if_::if_nametoindex(link).unwrap();
        let raw = socket(AddressFamily::Inet6, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::IcmpV6)
            .unwrap();
        setsockopt(&raw, sockopt::Ipv6MulticastHops, &255).unwrap();
        let mut message = vec![134, 0, 0, 0, 64, 0, 0x07, 0x08, 0, 0, 0, 0, 0, 0, 0, 0];
        message.extend([3, 4, 64, 0xc0, 0, 0, 0x0e, 0x10, 0, 0, 0x0e, 0x10, 0, 0, 0, 0]);
        message.extend("2001:db8:bad::".parse::<Ipv6Addr>().unwrap().octets());
        let all_nodes = SockaddrIn6::from(SocketAddrV6::new("ff02::1".parse().unwrap(), 0, 0, index));
        sendto(raw.as_raw_fd(), &message, &all_nodes, MsgFlags::empty()).unwrap();
    });
}

#[test]
fn a_hostile_router_on_the_network_changes_nothing_on_the_host() {
    let mut host = Host::new("one");
    host.networks = vec![network("blue")];
    host.settle();
    let pod = host.pod(&host.networks[0], 1, "fd00:7::1/64");
    // A control link that does accept router advertisements.
    let control = Namespace::new();
    host.ns.pair("ctl", &control, "net1");
    host.ns.ip("link set ctl up");
    control.ip("link set net1 up");
    for router in [&pod, &control] {
        router.ip("address add fe80::bad/64 dev net1 nodad");
    }
    host.until(|observed| observed.links.iter().any(|link| link.name == "ctl" && link.oper == OperState::Up));
    for _ in 0..3 {
        advertise(&pod, "net1");
        advertise(&control, "net1");
    }
    let observed = host.until(|observed| !observed.default_routes.is_empty());
    let ctl = observed.links.iter().find(|link| link.name == "ctl").unwrap();
    assert_eq!(observed.default_routes, [ctl.index]);
    assert_eq!(host.link("br-blue").addresses, []);
    assert_eq!(host.settle(), []);
}

#[test]
fn pods_cannot_reach_other_addresses_of_the_host() {
    let mut hosts = two_nodes(&[network("blue")], ["192.168.9.1/24", "192.168.9.2/24"]);
    let host = &mut hosts[0];
    host.settle();
    let service = host.ns.socket("192.168.9.1:7000");
    // Through a plain veth pair Linux does answer for all its addresses.
    let control = Namespace::new();
    host.ns.pair("ctl", &control, "net1");
    host.ns.ip("link set ctl up");
    control.ip("link set net1 up");
    control.ip("address add 192.168.9.60/24 dev net1");
    assert!(reaches(&control.socket("192.168.9.60:7000"), &service, 10));
    let pod = host.pod(&host.networks[0], 1, "192.168.9.50/24");
    let from = pod.socket("192.168.9.50:7000");
    assert!(!(0..5).any(|_| delivers(&from, &service, 11)));
    // Not even if the pod knows the MAC address.
    let mac = host.link("br-blue").mac.unwrap();
    pod.ip(&format!("neighbour replace 192.168.9.1 lladdr {mac} dev net1"));
    assert!(!(0..5).any(|_| delivers(&from, &service, 11)));
}

#[test]
fn a_udp_port_in_use_is_reported_as_addr_in_use() {
    let mut hosts = two_nodes(&[overlay("blue", 4711)], ["192.168.9.1/24", "192.168.9.2/24"]);
    let host = &mut hosts[0];
    let _held = host.ns.socket("0.0.0.0:4789");
    let rejected = loop {
        let plan = host.plan();
        assert!(!plan.steps.is_empty());
        if let Some(error) = plan.steps.iter().find_map(|step| host.apply(step).err()) {
            break error;
        }
    };
    assert_eq!(rejected.errno(), Some(Errno::EADDRINUSE as i32), "{}", ErrorChain(&rejected));
}

#[test]
fn another_vxlan_device_with_the_vni_is_reported_and_left_alone() {
    let mut hosts = two_nodes(&[overlay("blue", 4711)], ["192.168.9.1/24", "192.168.9.2/24"]);
    let host = &mut hosts[0];
    host.ns.ip("link add foreign type vxlan id 4711 dstport 4789 dev eth0");
    let foreign = host.link("foreign");
    assert_eq!(foreign.lower, Some(host.link("eth0").index));
    host.settle();
    let report = host.report("blue").unwrap();
    assert_eq!((report.ready, report.reason.as_str()), (false, reason::FOREIGN_LINK));
    assert!(report.message.contains("foreign"), "{}", report.message);
    assert_eq!(host.link("foreign"), foreign);
    assert!(host.find("vx-blue").is_none());
}

#[test]
fn an_uplink_with_an_upper_link_is_rejected() {
    let (mut host, _behind) = with_uplink();
    host.ns.ip("link add on-top link eth1 type macvlan");
    host.networks = vec![uplink("blue")];
    let before = host.link("eth1");
    host.settle();
    let report = host.report("blue").unwrap();
    assert_eq!(report.reason, reason::UPLINK_REFUSED);
    assert!(report.message.contains("link on-top is stacked on it"), "{}", report.message);
    assert_eq!(host.link("eth1"), before);
}

#[test]
fn removing_missing_objects_succeeds_and_impossible_actions_fail() {
    let mut host = Host::new("one");
    let missing = 4242;
    let address = "10.0.0.1/24".parse().unwrap();
    let to: IpAddr = "10.0.0.2".parse().unwrap();
    for action in [
        Action::Delete { link: missing },
        Action::ClearMaster { link: missing },
        Action::RemoveAddress { link: missing, address },
        Action::RemoveFlood { vxlan: missing, to },
    ] {
        host.editor.apply(&action).unwrap_or_else(|error| panic!("{action:?}: {}", ErrorChain(&error)));
    }
    let mac = Mac::from([2, 0, 0, 0, 0, 1]);
    let create = Action::CreateBridge { name: name("br0"), mac, mtu: 1500 };
    host.editor.apply(&create).unwrap();
    assert_eq!(host.editor.apply(&create).unwrap_err().errno(), Some(Errno::EEXIST as i32));
    assert!(matches!(host.editor.apply(&Action::RemoveRecord), Err(Error::NotAKernelAction)));
    for hostile in ["", "..", "../../kernel", "a/b", "all\0"] {
        let error = host.editor.apply(&Action::DisableIpv6 { name: hostile.to_owned() }).unwrap_err();
        assert!(matches!(error, Error::Name { .. }), "{hostile:?}: {error}");
    }
    let error = host.editor.apply(&Action::DisableIpv6 { name: "missing".to_owned() }).unwrap_err();
    assert_eq!(error.errno(), Some(Errno::ENOENT as i32));
    let overlay = Overlay { vni: 1, port: 4789 };
    let error = host
        .editor
        .apply(&Action::CreateVxlan {
            name: name("vx0"),
            mac,
            mtu: 1400,
            overlay,
            local: to,
            bridge: missing,
        })
        .unwrap_err();
    assert!(error.errno().is_some(), "{error}");
    assert!(host.find("vx0").is_none(), "a VXLAN device that cannot be a port is not created");
}

#[test]
fn route_to_finds_the_link_and_a_missing_route_is_not_an_error() {
    let mut hosts = two_nodes(&[], ["192.168.9.1/24", "192.168.9.2/24"]);
    let host = &mut hosts[0];
    let eth0 = host.link("eth0").index;
    let lo = host.link("lo").index;
    for (address, expected) in
        [("192.168.9.2", Some(eth0)), ("127.0.0.1", Some(lo)), ("203.0.113.1", None), ("2001:db8::1", None)]
    {
        assert_eq!(host.editor.route_to(address.parse().unwrap()).unwrap(), expected, "{address}");
    }
    host.ns.ip("route add default via 192.168.9.2");
    assert_eq!(host.editor.route_to("203.0.113.1".parse().unwrap()).unwrap(), Some(eth0));
}

#[test]
fn neighbour_entries_do_not_count_as_changes() {
    let hosts = two_nodes(&[], ["192.168.9.1/24", "192.168.9.2/24"]);
    let host = &hosts[0];
    while host.changed() {}
    assert!(reaches(&host.ns.socket("192.168.9.1:7000"), &hosts[1].ns.socket("192.168.9.2:7000"), 10));
    host.ns.ip("neighbour add 192.168.9.77 lladdr 02:00:00:00:00:77 dev eth0");
    assert!(!host.changed());
}
