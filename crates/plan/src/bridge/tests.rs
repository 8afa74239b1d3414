use std::collections::BTreeSet;

use api::{Mac, NetworkOnNode, nodenetwork::MAX_MESSAGE, nodenetwork::MAX_NETWORKS};
use jiff::Timestamp;

use super::{
    simulation::{SimNode, link, name, network},
    *,
};
use crate::nodenetwork::{Address, FloodEntry, Link, Vxlan};

fn overlay(label: &str) -> LocalNetwork {
    LocalNetwork { overlay: Some(Overlay { vni: 7, port: 4789 }), ..network(label) }
}

fn uplink(label: &str, link: &str) -> LocalNetwork {
    LocalNetwork { uplink: Some(name(link)), ..network(label) }
}

fn address(net: &str) -> Address {
    Address { net: net.parse().unwrap(), temporary: false }
}

fn peer(node: &str, vtep: &str, networks: &[&str]) -> Peer {
    let networks = networks.iter().map(|label| format!("uid-{label}").into()).collect();
    Peer { node: node.to_owned(), vtep: vtep.parse().ok(), networks }
}

fn eth1() -> Link {
    Link { admin: AdminState::Down, mtu: 1300, ..link(10, "eth1", "") }
}

/// A node on which these networks are applied.
fn settled(links: &[Link], networks: &[LocalNetwork]) -> SimNode {
    let mut node = SimNode::new(links).with(networks);
    node.settle();
    node
}

fn actions(node: &SimNode) -> Vec<Action> {
    node.plan().steps.into_iter().map(|step| step.action).collect()
}

fn report(node: &SimNode, label: &str) -> NetworkOnNode {
    let found = node.plan().networks.into_iter().find(|report| report.name == label);
    found.unwrap_or_else(|| panic!("the plan does not report {label}"))
}

fn condition(node: &SimNode, label: &str) -> (bool, String, String) {
    let NetworkOnNode { ready, reason, message, .. } = report(node, label);
    (ready, reason, message)
}

fn not_ready(reason: &str, message: &str) -> (bool, String, String) {
    (false, reason.to_owned(), message.to_owned())
}

#[test]
fn an_ownership_mac_is_local_unicast_and_unique_per_network_node_and_kind() {
    let mut macs = BTreeSet::new();
    for network in ["a", "b"] {
        for node in ["a", "b"] {
            for kind in LinkKind::ALL {
                let mac = ownership_mac(network, node, kind);
                assert_eq!(mac.octets()[0] & 0x03, 0x02);
                macs.insert(mac);
            }
        }
    }
    assert_eq!(macs.len(), 8);
    // Links of earlier versions must still be recognized.
    assert_eq!(ownership_mac("uid-blue", "node-uid", LinkKind::Bridge).to_string(), "b2:9b:26:fd:67:79");
}

#[test]
fn pod_ports_are_recognized_by_name() {
    for (name, wanted) in [
        ("veth0123456789a", true),
        ("vethabcdefabcde", true),
        ("veth0123456789A", false),
        ("veth0123456789", false),
        ("veth0123456789ab", false),
        ("vethnet0", false),
        ("eth1", false),
        ("", false),
    ] {
        assert_eq!(is_pod_port(name), wanted, "{name:?}");
    }
}

#[test]
fn malformed_aliases_name_no_network() {
    for alias in
        ["", "patchbay/bridge/", "patchbay/bridge/a/b", "patchbay/bridge/a b", "patchbay/vxlan/x", "bridge/x"]
    {
        assert_eq!(alias_owner(alias, LinkKind::Bridge), None, "{alias:?}");
    }
    assert_eq!(alias_owner(&"patchbay/bridge/x".repeat(9), LinkKind::Bridge), None);
    assert_eq!(alias_owner(&ownership_alias("uid-1", LinkKind::Bridge), LinkKind::Bridge), Some("uid-1"));
    assert_eq!(pod_alias_network(&attachment::alias("uid-1", "nad", "c", "net1")), Some("uid-1"));
    assert_eq!(pod_alias_network("pod/uid-1"), None);
}

#[test]
fn the_record_is_written_before_the_bridge_and_the_link_is_set_up_last() {
    let mut node = SimNode::new(&[]).with(&[network("blue")]);
    let record = LinkRecord {
        uid: "uid-blue".to_owned(),
        name: "blue".to_owned(),
        boot: "boot-1".to_owned(),
        bridge: name("br-blue"),
        vxlan: name("vx-blue"),
        node_uid: "node-uid".to_owned(),
        uplink: None,
    };
    let mac = ownership_mac("uid-blue", "node-uid", LinkKind::Bridge);
    let first = [Action::WriteRecord(record), Action::CreateBridge { name: name("br-blue"), mac, mtu: 1400 }];
    assert_eq!(actions(&node), first);
    assert_eq!(condition(&node, "blue").1, reason::APPLYING);
    for action in &first {
        node.apply("uid-blue", action);
    }
    assert_eq!(
        actions(&node),
        [
            Action::SetAlias { link: 100, alias: "patchbay/bridge/uid-blue".to_owned() },
            Action::SetMtu { link: 100, mtu: 1400 },
            Action::DisableIpv6 { name: "br-blue".to_owned() },
            Action::IsolateIpv4 { name: "br-blue".to_owned() },
            Action::SetAdmin { link: 100, admin: AdminState::Up },
        ]
    );
    node.settle();
    assert_eq!(
        report(&node, "blue"),
        NetworkOnNode {
            uid: "uid-blue".to_owned(),
            name: "blue".to_owned(),
            observed_generation: 1,
            ready: true,
            reason: reason::READY.to_owned(),
            message: String::new(),
            bridge: "br-blue".to_owned(),
            mac: Some(mac),
            mtu: Some(1400),
            ports: Vec::new(),
            pods_with_old_mtu: 0,
        }
    );
}

#[test]
fn no_link_is_created_before_the_mtu_is_set_and_the_network_is_listed() {
    let mut node = SimNode::new(&[]).with(&[LocalNetwork { mtu: None, ..network("blue") }]);
    assert_eq!(actions(&node), []);
    assert_eq!(condition(&node, "blue").1, reason::WAITING);
    node.networks[0].mtu = Some(1400);
    node.unlisted.insert("uid-blue".to_owned());
    assert_eq!(actions(&node), []);
    assert_eq!(condition(&node, "blue").1, reason::LISTING);
    node.unlisted.clear();
    assert_eq!(actions(&node).len(), 2);
    node.settle();
    // A deleted NodeNetwork does not make an applied network unready.
    node.unlisted.insert("uid-blue".to_owned());
    assert!(report(&node, "blue").ready);
}

#[test]
fn all_drift_is_repaired_in_place_and_counted_as_a_repair() {
    type Drift = (&'static str, fn(&mut SimNode), fn(u32, u32) -> Action);
    let peers = vec![peer("two", "10.0.0.2", &["blue"])];
    let node = SimNode { peers, ..SimNode::new(&[]).with(&[overlay("blue")]) };
    let drifts: [Drift; 11] = [
        (
            "mac",
            |node| node.get("br-blue").mac = None,
            |br, _| Action::SetMac { link: br, mac: ownership_mac("uid-blue", "node-uid", LinkKind::Bridge) },
        ),
        (
            "alias",
            |node| node.get("vx-blue").alias.clear(),
            |_, vx| Action::SetAlias { link: vx, alias: "patchbay/vxlan/uid-blue".to_owned() },
        ),
        ("mtu", |node| node.get("br-blue").mtu = 1500, |br, _| Action::SetMtu { link: br, mtu: 1400 }),
        (
            "admin",
            |node| node.get("vx-blue").admin = AdminState::Down,
            |_, vx| Action::SetAdmin { link: vx, admin: AdminState::Up },
        ),
        (
            "port",
            |node| node.get("vx-blue").master = None,
            |br, vx| Action::SetMaster { link: vx, bridge: br },
        ),
        (
            "address",
            |node| node.get("br-blue").addresses = vec![address("10.7.0.1/24")],
            |br, _| Action::RemoveAddress { link: br, address: "10.7.0.1/24".parse().unwrap() },
        ),
        (
            "ipv6",
            |node| node.get("br-blue").ipv6_disabled = Some(false),
            |_, _| Action::DisableIpv6 { name: "br-blue".to_owned() },
        ),
        (
            "ipv4",
            |node| node.get("vx-blue").ipv4_isolated = Some(false),
            |_, _| Action::IsolateIpv4 { name: "vx-blue".to_owned() },
        ),
        (
            "name",
            |node| node.get("br-blue").name = "br-edited".to_owned(),
            |br, _| Action::Rename { link: br, name: name("br-blue") },
        ),
        (
            "missing flood entry",
            |node| node.observed.floods.clear(),
            |_, vx| Action::AddFlood { vxlan: vx, to: "10.0.0.2".parse().unwrap() },
        ),
        (
            "extra flood entry",
            |node| {
                let link = node.get("vx-blue").index;
                node.observed.floods.push(FloodEntry { link, to: "10.0.0.9".parse().unwrap() });
            },
            |_, vx| Action::RemoveFlood { vxlan: vx, to: "10.0.0.9".parse().unwrap() },
        ),
    ];
    for (what, drift, wanted) in drifts {
        let mut node = node.clone();
        node.settle();
        let (br, vx) = (node.get("br-blue").index, node.get("vx-blue").index);
        drift(&mut node);
        let step = BridgeStep { network: "uid-blue".to_owned(), action: wanted(br, vx), repair: true };
        assert_eq!(node.plan().steps, [step], "{what}");
        assert_eq!(condition(&node, "blue").1, reason::APPLYING, "{what}");
        node.settle();
        assert!(report(&node, "blue").ready, "{what}");
    }
}

#[test]
fn a_deleted_bridge_is_recreated_and_its_pods_are_reattached() {
    let mut node = settled(&[], &[network("blue")]);
    let pod = node.pod("blue", 1);
    assert_eq!(actions(&node), []);
    let old = node.get("br-blue").index;
    node.delete(old);
    let steps = node.plan().steps;
    assert!(
        matches!(&steps[..], [BridgeStep { action: Action::CreateBridge { .. }, repair: true, .. }]),
        "{steps:?}"
    );
    node.settle();
    let bridge = node.get("br-blue").index;
    assert_eq!(node.find("veth00000000001").unwrap().master, Some(bridge));

    let other = node.add(link(0, "br-other", "bridge"));
    let port = node.get("veth00000000001");
    (port.master, port.admin) = (Some(other), AdminState::Down);
    assert_eq!(
        actions(&node),
        [Action::SetMaster { link: pod, bridge }, Action::SetAdmin { link: pod, admin: AdminState::Up }]
    );
    assert!(node.plan().steps.iter().all(|step| step.repair));
}

#[test]
fn a_change_of_the_spec_is_not_a_repair() {
    let mut node = settled(&[eth1()], &[network("blue")]);
    node.networks[0].mtu = Some(1450);
    let bridge = node.get("br-blue").index;
    let step = |action| BridgeStep { network: "uid-blue".to_owned(), action, repair: false };
    assert_eq!(node.plan().steps, [step(Action::SetMtu { link: bridge, mtu: 1450 })]);
    node.settle();
    node.peers = vec![peer("two", "10.0.0.2", &["blue"])];
    node.networks[0].uplink = Some(name("eth1"));
    assert!(node.plan().steps.iter().all(|step| !step.repair));
}

#[test]
fn ipv6_is_disabled_again_when_a_larger_mtu_restores_it() {
    let mut node = settled(&[], &[LocalNetwork { mtu: Some(576), ..network("blue") }]);
    assert_eq!(node.get("br-blue").ipv6_disabled, None);
    assert!(report(&node, "blue").ready);
    node.networks[0].mtu = Some(1500);
    let link = node.get("br-blue").index;
    assert_eq!(
        actions(&node),
        [Action::SetMtu { link, mtu: 1500 }, Action::DisableIpv6 { name: "br-blue".to_owned() }]
    );
}

#[test]
fn a_conflicting_network_is_removed_unless_pods_are_attached() {
    let later = Timestamp::from_second(5).unwrap();
    let young = LocalNetwork { created: later, bridge: name("br-red"), ..overlay("young") };
    let mut node = settled(&[], std::slice::from_ref(&young));
    node.networks.push(overlay("red"));
    let sentence = "bridge br-red belongs to BridgeNetwork red, which is older";
    assert_eq!(condition(&node, "young"), not_ready(reason::CONFLICT, sentence));
    assert_eq!(condition(&node, "red").1, reason::FOREIGN_LINK);

    let bridge = node.get("br-red").index;
    let port = Link { master: Some(bridge), ..link(0, "veth00000000001", "veth") };
    let pod = node.add(port);
    assert_eq!(actions(&node), []);
    let in_use = condition(&node, "young");
    assert_eq!(in_use.1, reason::CONFLICT);
    assert!(in_use.2.starts_with(sentence) && in_use.2.contains("1 pod is"), "{}", in_use.2);
    node.delete(pod);
    node.settle();
    assert!(report(&node, "red").ready);
    assert_eq!(condition(&node, "young"), not_ready(reason::CONFLICT, sentence));
    assert_eq!(node.records.keys().collect::<Vec<_>>(), ["uid-red"]);
}

#[test]
fn a_foreign_link_is_reported_and_not_changed() {
    let vxlan = Some(Vxlan { vni: 7, port: 4789, local: None });
    for (foreign, wanted) in [
        (link(10, "br-blue", "bridge"), "link br-blue"),
        (
            Link { alias: "patchbay/bridge/uid-other".to_owned(), ..link(10, "br-blue", "bridge") },
            "link br-blue",
        ),
        (Link { alias: "patchbay/bridge/uid-blue".to_owned(), ..link(10, "br-blue", "") }, "link br-blue"),
        (link(10, "vx-blue", "vxlan"), "link vx-blue"),
        (Link { vxlan, ..link(10, "flannel.1", "vxlan") }, "VXLAN device flannel.1"),
    ] {
        // Leftover links of deleted networks are removed; here the network still exists.
        let other = LocalNetwork { desired: Desired::Present, mtu: None, ..network("other") };
        let mut node = SimNode::new(std::slice::from_ref(&foreign)).with(&[overlay("blue"), other]);
        let plan = node.settle();
        let blue = plan.networks.iter().find(|report| report.name == "blue").unwrap();
        assert_eq!((blue.ready, blue.reason.as_str()), (false, reason::FOREIGN_LINK), "{}", foreign.name);
        assert!(blue.message.contains(wanted), "{}", blue.message);
        assert_eq!(node.find(&foreign.name), Some(&foreign));
        assert_eq!(node.records.contains_key("uid-blue"), !wanted.contains("br-blue"));
    }
}

#[test]
fn an_overlay_needs_a_vtep_and_an_mtu_that_fits_the_vxlan_header() {
    let mut node = SimNode { vtep: None, ..SimNode::new(&[]).with(&[overlay("blue")]) };
    node.settle();
    assert_eq!(condition(&node, "blue").1, reason::NO_VTEP);
    for (address, mtu, fits) in [
        ("10.0.0.1", 1450, true),
        ("10.0.0.1", 1449, false),
        ("fd00::1", 1470, true),
        ("fd00::1", 1469, false),
    ] {
        node.vtep = Some(Vtep { address: address.parse().unwrap(), interface: "eth0".to_owned(), mtu });
        let mut node = node.clone();
        node.settle();
        let (ready, reason, _) = condition(&node, "blue");
        assert_eq!(reason, if fits { reason::READY } else { reason::MTU_TOO_LARGE }, "{address} {mtu}");
        assert_eq!((ready, node.find("vx-blue").is_some()), (fits, fits));
    }
}

#[test]
fn an_mtu_that_is_too_large_names_the_link_or_the_links_to_the_other_nodes() {
    let mut node = SimNode::new(&[]).with(&[overlay("blue")]);
    node.vtep.as_mut().unwrap().mtu = 1400;
    node.settle();
    let message = condition(&node, "blue").2;
    assert_eq!(
        message,
        "the MTU of the network is 1400, but the MTU 1400 of eth0 allows at most 1350; raise the MTU of \
        eth0, or lower spec.mtu"
    );
    node.vtep.as_mut().unwrap().interface = "lo".to_owned();
    let message = condition(&node, "blue").2;
    assert!(message.contains("the MTU 1400 of the links to the other nodes allows"), "{message}");
}

#[test]
fn the_flood_list_has_the_peers_of_the_network_with_the_same_address_family() {
    let mut node = SimNode::new(&[]).with(&[overlay("blue")]);
    node.peers = vec![
        peer("two", "10.0.0.2", &["blue"]),
        peer("same", "10.0.0.2", &["blue"]),
        peer("myself", "10.0.0.1", &["blue"]),
        peer("elsewhere", "10.0.0.3", &["red"]),
        peer("no-vtep", "", &["blue"]),
        peer("six", "fd00::6", &["blue"]),
    ];
    let plan = node.settle();
    let to: Vec<String> = node.observed.floods.iter().map(|flood| flood.to.to_string()).collect();
    assert_eq!(to, ["10.0.0.2"]);
    let [blue] = &plan.networks[..] else { panic!("{plan:?}") };
    assert!(blue.ready && blue.message.starts_with("cannot reach six:"), "{}", blue.message);
    assert_eq!(blue.ports, ["vx-blue"]);
}

#[test]
fn immutable_vxlan_settings_recreate_the_device_and_never_the_bridge() {
    for change in [
        (|node| node.networks[0].overlay = Some(Overlay { vni: 7, port: 4790 })) as fn(&mut SimNode),
        |node| {
            node.vtep.as_mut().unwrap().address = "10.0.0.5".parse().unwrap();
        },
    ] {
        let mut node = settled(&[], &[overlay("blue")]);
        let (bridge, vxlan) = (node.get("br-blue").index, node.get("vx-blue").index);
        change(&mut node);
        let actions = actions(&node);
        assert!(
            matches!(&actions[..], [Action::Delete { link }, Action::CreateVxlan { .. }] if *link == vxlan),
            "{actions:?}"
        );
        node.settle();
        assert_eq!(node.get("br-blue").index, bridge);
        assert!(report(&node, "blue").ready);
    }
}

#[test]
fn an_uplink_that_the_node_uses_is_refused_and_the_bridge_is_still_created() {
    let upper = Link { lower: Some(10), ..link(11, "eth1.5", "vlan") };
    let master = link(11, "bond0", "bond");
    let cases: [(Vec<Link>, &str); 12] = [
        (vec![Link { loopback: true, ..eth1() }], "it is the loopback"),
        (vec![link(10, "eth1", "bridge")], "it is a bridge"),
        (vec![eth1()], "default route"),
        (vec![Link { addresses: vec![address("10.0.0.1/32")], ..eth1() }], "an InternalIP of the node"),
        (vec![eth1()], "API server"),
        (
            vec![Link { addresses: vec![address("192.0.2.5/24")], ..eth1() }],
            "it has the address 192.0.2.5/24",
        ),
        (vec![Link { addresses: vec![address("fd00::5/64")], ..eth1() }], "it has the address fd00::5/64"),
        (vec![Link { master: Some(11), ..eth1() }, master], "it is a port of bond0"),
        (vec![Link { master: Some(99), ..eth1() }], "it is a port of link 99"),
        (vec![eth1(), upper], "link eth1.5 is stacked on it"),
        (vec![Link { alias: "patchbay/x".to_owned(), ..eth1() }], "Patchbay owns it"),
        (
            vec![
                Link { lower: Some(11), ..link(10, "eth1", "veth") },
                Link { lower: Some(10), ..link(11, "eth1.6", "macvlan") },
            ],
            "link eth1.6 is stacked on it",
        ),
    ];
    for (links, why) in cases {
        let mut node = SimNode::new(&links).with(&[uplink("blue", "eth1")]);
        match why {
            "default route" => node.observed.default_routes.push(10),
            "API server" => _ = node.api_links.insert(10),
            _ => {}
        }
        node.settle();
        let (ready, reason, message) = condition(&node, "blue");
        assert_eq!((ready, reason.as_str()), (false, reason::UPLINK_REFUSED), "{why}");
        assert!(message.contains(why), "{why}: {message}");
        assert_eq!(node.find("eth1"), links.iter().find(|link| link.name == "eth1"), "{why}");
        assert_eq!(node.find("br-blue").unwrap().admin, AdminState::Up, "{why}");
        assert_eq!(node.records["uid-blue"].uplink, None, "{why}");
    }
    let mut node = SimNode::new(&[]).with(&[uplink("blue", "eth1")]);
    node.settle();
    assert_eq!(condition(&node, "blue").1, reason::UPLINK_MISSING);
}

#[test]
fn an_uplink_may_have_link_local_addresses_and_a_veth_peer() {
    let eth1 = Link {
        lower: Some(11),
        addresses: vec![address("fe80::1/64"), address("169.254.3.4/16")],
        ..link(10, "eth1", "veth")
    };
    let mut node = SimNode::new(&[eth1, Link { lower: Some(10), ..link(11, "peer", "veth") }])
        .with(&[uplink("blue", "eth1")]);
    node.settle();
    assert!(report(&node, "blue").ready);
    assert_eq!(report(&node, "blue").ports, ["eth1"]);
}

#[test]
fn an_uplink_is_recorded_before_it_changes_and_restored_afterwards() {
    let mut node = settled(&[eth1()], &[network("blue")]);
    node.networks[0].uplink = Some(name("eth1"));
    let bridge = node.get("br-blue").index;
    let [Action::WriteRecord(record), rest @ ..] = &actions(&node)[..] else {
        panic!("{:?}", actions(&node))
    };
    let original = OriginalLink { name: "eth1".to_owned(), index: 10, admin: AdminState::Down, mtu: 1300 };
    assert_eq!(record.uplink, Some(original));
    assert_eq!(
        rest,
        [
            Action::SetMaster { link: 10, bridge },
            Action::SetMtu { link: 10, mtu: 1400 },
            Action::SetAdmin { link: 10, admin: AdminState::Up },
        ]
    );
    node.settle();
    // An address added later does not detach it.
    node.get("eth1").addresses = vec![address("192.0.2.5/24")];
    assert!(report(&node, "blue").ready);
    node.get("eth1").addresses.clear();

    node.networks[0].uplink = None;
    let restored = actions(&node);
    assert_eq!(
        restored[..3],
        [
            Action::SetMtu { link: 10, mtu: 1300 },
            Action::SetAdmin { link: 10, admin: AdminState::Down },
            Action::ClearMaster { link: 10 },
        ]
    );
    assert!(matches!(&restored[3..], [Action::WriteRecord(LinkRecord { uplink: None, .. })]), "{restored:?}");
    node.settle();
    assert_eq!(node.find("eth1"), Some(&eth1()));
}

#[test]
fn an_uplink_of_an_earlier_boot_or_with_another_index_is_not_restored() {
    for invalidate in
        [(|node| node.boot = "boot-2".to_owned()) as fn(&mut SimNode), |node| node.get("eth1").index = 50]
    {
        let mut node = settled(&[eth1()], &[uplink("blue", "eth1")]);
        let uplink = node.get("eth1");
        uplink.master = None;
        invalidate(&mut node);
        let bridge = node.get("br-blue").index;
        node.delete(bridge);
        node.networks.clear();
        assert_eq!(actions(&node), [Action::RemoveRecord]);
    }
}

#[test]
fn an_uplink_is_restored_before_another_network_attaches_it() {
    let mut node = settled(&[eth1()], &[uplink("red", "eth1")]);
    node.networks[0].desired = Desired::Absent;
    node.networks.push(uplink("blue", "eth1"));
    let bridge = node.get("br-red").index;
    // Also if the bridge was deleted meanwhile, so that the uplink seems free.
    node.delete(bridge);
    assert!(condition(&node, "blue").2.contains("red"), "{}", condition(&node, "blue").2);
    node.settle();
    assert!(report(&node, "blue").ready);
    let original = node.records["uid-blue"].uplink.clone().unwrap();
    assert_eq!((original.admin, original.mtu), (AdminState::Down, 1300));
}

#[test]
fn a_network_is_removed_in_order_and_not_while_pods_are_attached() {
    let peers = vec![peer("two", "10.0.0.2", &["over"])];
    let mut node =
        SimNode { peers, ..SimNode::new(&[eth1()]).with(&[overlay("over"), uplink("up", "eth1")]) };
    node.settle();
    let pods = [node.pod("over", 1), node.pod("over", 2), node.pod("up", 3)];
    for deleted in [false, true] {
        let mut node = node.clone();
        if deleted {
            node.networks.clear();
        } else {
            for network in &mut node.networks {
                network.desired = Desired::Absent;
            }
        }
        assert_eq!(actions(&node), []);
        let (ready, reason, message) = condition(&node, "over");
        assert_eq!((ready, reason.as_str()), (!deleted, reason::IN_USE));
        assert!(message.starts_with("2 pods are still attached to the bridge"), "{message}");
        // Drift of a network that still exists is repaired.
        node.get("br-over").admin = AdminState::Down;
        assert_eq!(actions(&node).len(), usize::from(!deleted));

        let (over, up, vxlan) =
            (node.get("br-over").index, node.get("br-up").index, node.get("vx-over").index);
        for pod in pods {
            node.delete(pod);
        }
        assert_eq!(condition(&node, "over").1, reason::TERMINATING);
        assert_eq!(
            actions(&node),
            [
                Action::Delete { link: vxlan },
                Action::Delete { link: over },
                Action::RemoveRecord,
                Action::SetMtu { link: 10, mtu: 1300 },
                Action::SetAdmin { link: 10, admin: AdminState::Down },
                Action::ClearMaster { link: 10 },
                Action::Delete { link: up },
                Action::RemoveRecord,
            ]
        );
        node.settle();
        assert_eq!(node.plan().networks, []);
        assert_eq!(node.observed, SimNode::new(&[eth1()]).observed);
    }
}

#[test]
fn pods_with_a_smaller_mtu_than_the_network_are_counted() {
    let mut node = settled(&[], &[network("blue")]);
    node.pod("blue", 1);
    node.pod("blue", 2);
    node.networks[0].mtu = Some(1450);
    node.settle();
    node.get("veth00000000002").mtu = 1450;
    assert_eq!(report(&node, "blue").pods_with_old_mtu, 1);
    assert_eq!(report(&node, "blue").mtu, Some(1450));
}

#[test]
fn a_failure_is_reported_until_the_network_is_applied() {
    let mut node = SimNode::new(&[]).with(&[network("blue")]);
    let message = "x".repeat(2 * MAX_MESSAGE);
    node.failures
        .insert("uid-blue".to_owned(), ApplyFailure { reason: reason::PORT_IN_USE.to_owned(), message });
    let (ready, reason, message) = condition(&node, "blue");
    assert_eq!((ready, reason.as_str(), message.len()), (false, reason::PORT_IN_USE, MAX_MESSAGE));
    node.settle();
    assert_eq!(condition(&node, "blue"), (true, reason::READY.to_owned(), String::new()));
}

#[test]
fn a_link_keeps_its_mac_when_the_node_is_recreated_and_changes_it_when_the_record_is_lost() {
    let mut node = settled(&[], &[network("blue")]);
    node.node.uid = "another".to_owned();
    assert_eq!(actions(&node), []);
    node.records.clear();
    let link = node.get("br-blue").index;
    let mac: Mac = ownership_mac("uid-blue", "another", LinkKind::Bridge);
    assert_eq!(actions(&node)[1..], [Action::SetMac { link, mac }]);
}

#[test]
fn the_youngest_networks_beyond_the_limit_are_omitted() {
    let all: Vec<LocalNetwork> = (0..=MAX_NETWORKS)
        .map(|n| LocalNetwork {
            created: Timestamp::from_second(i64::try_from(MAX_NETWORKS - n).unwrap()).unwrap(),
            ..network(&format!("n{n}"))
        })
        .collect();
    let mut node = SimNode::new(&[]).with(&all);
    let plan = node.settle();
    assert_eq!((plan.networks.len(), plan.omitted), (MAX_NETWORKS, vec!["n0".to_owned()]));
    assert!(plan.networks.iter().all(|report| report.ready));
}
