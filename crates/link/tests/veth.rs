//! Pairs between a bridge and "pods", each test in network namespaces of own.
#![expect(clippy::unwrap_used, reason = "the functions around the tests are test code too")]

mod netns;
mod sandbox;

use std::{
    fs::{self, File},
    net::UdpSocket,
    os::fd::AsFd as _,
    time::Duration,
};

use api::Mac;
use link::veth::{self, AttachOutcome, Error, VethConfig};
use sandbox::{Namespace, name, wanted};

#[test]
fn a_pair_is_made_with_all_it_should_have() {
    let ((host, bridge), pod) = (Namespace::with_bridge(), Namespace::new());
    // A link of the host that has the name of the pod's is nobody's business.
    host.run("ip link add net1 type bridge");
    wanted(&pod, bridge, "vetha", |pair| {
        assert_eq!(host.within(|| veth::attach(&pair)).unwrap(), AttachOutcome::Created);
        assert_eq!(host.within(|| veth::check(&pair)).unwrap(), []);
    });
    let outside = host.says("ip -d link show vetha");
    for part in ["master br0", "mtu 1400", ",UP", "alias pod/uid/container/net1"] {
        assert!(outside.contains(part), "{part}: {outside}");
    }
    let inside = pod.says("ip -d link show net1");
    for part in ["02:00:00:00:00:01", "mtu 1400", ",UP", "veth"] {
        assert!(inside.contains(part), "{part}: {inside}");
    }
    assert_eq!(host.says("ip -6 address show vetha"), "");
    let off = "/proc/sys/net/ipv6/conf/vetha/disable_ipv6";
    assert_eq!(host.within(|| fs::read_to_string(off)).unwrap().trim(), "1");
}

#[test]
fn a_pair_too_small_for_ipv6_is_made_all_the_same() {
    let ((host, bridge), pod) = (Namespace::with_bridge(), Namespace::new());
    wanted(&pod, bridge, "vetha", |pair| {
        let pair = VethConfig { mtu: 576, ..pair };
        assert_eq!(host.within(|| veth::attach(&pair)).unwrap(), AttachOutcome::Created);
        assert_eq!(host.within(|| veth::check(&pair)).unwrap(), []);
    });
}

#[test]
fn two_pods_reach_each_other_over_the_bridge() {
    let ((host, bridge), one, other) = (Namespace::with_bridge(), Namespace::new(), Namespace::new());
    for (pod, end, mac, address) in [(&one, "vetha", 1, "10.9.0.1/24"), (&other, "vethb", 2, "10.9.0.2/24")] {
        wanted(pod, bridge, end, |pair| {
            let pair = VethConfig { mac: Mac::from([2, 0, 0, 0, 0, mac]), ..pair };
            host.within(|| veth::attach(&pair)).unwrap();
        });
        pod.run(&format!("ip address add {address} dev net1"));
    }
    let receiver = other.within(|| UdpSocket::bind("10.9.0.2:7777")).unwrap();
    let sender = one.within(|| UdpSocket::bind("10.9.0.1:0")).unwrap();
    receiver.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    sender.send_to(&[7; 1372], "10.9.0.2:7777").unwrap();
    let (length, from) = receiver.recv_from(&mut [0; 2000]).unwrap();
    assert_eq!((length, from), (1372, sender.local_addr().unwrap()));
}

#[test]
fn a_repeated_call_finds_what_the_first_one_made() {
    let ((host, bridge), pod) = (Namespace::with_bridge(), Namespace::new());
    wanted(&pod, bridge, "vetha", |pair| {
        host.within(|| veth::attach(&pair)).unwrap();
        let before = host.says("ip link show vetha");
        assert_eq!(host.within(|| veth::attach(&pair)).unwrap(), AttachOutcome::Unchanged);
        assert_eq!(host.says("ip link show vetha"), before);
        let other = VethConfig { mac: Mac::from([2, 0, 0, 0, 0, 9]), ..pair };
        assert_eq!(host.within(|| veth::attach(&other)).unwrap(), AttachOutcome::Created);
        assert_eq!(host.within(|| veth::check(&other)).unwrap(), []);
    });
    // What a call left that was cut off right after the pair was made.
    host.run("ip link set vetha alias pod/uid/container/net1 nomaster down");
    wanted(&pod, bridge, "vetha", |pair| {
        assert_eq!(host.within(|| veth::attach(&pair)).unwrap(), AttachOutcome::Created);
        assert_eq!(host.within(|| veth::check(&pair)).unwrap(), []);
    });
}

#[test]
fn a_pod_that_has_an_interface_of_that_name_is_told_so() {
    let ((host, bridge), pod) = (Namespace::with_bridge(), Namespace::new());
    pod.run("ip link add net1 type bridge");
    wanted(&pod, bridge, "vetha", |pair| {
        let error = host.within(|| veth::attach(&pair)).unwrap_err();
        assert!(matches!(error, Error::NameTaken { .. }), "{error:?}");
    });
    assert!(!host.ok("ip link show vetha"));
    assert!(pod.says("ip -d link show net1").contains("bridge"));
}

#[test]
fn a_bridge_that_is_gone_leaves_nothing_behind() {
    let ((host, bridge), pod) = (Namespace::with_bridge(), Namespace::new());
    host.run("ip link del br0");
    wanted(&pod, bridge, "vetha", |pair| {
        let error = host.within(|| veth::attach(&pair)).unwrap_err();
        assert!(matches!(error, Error::BridgeNotFound(_)), "{error:?}");
    });
    assert!(!host.ok("ip link show vetha") && !pod.ok("ip link show net1"));
}

#[test]
fn what_fails_in_the_middle_is_undone() {
    let ((host, bridge), pod) = (Namespace::with_bridge(), Namespace::new());
    wanted(&pod, bridge, "vetha", |pair| {
        // There is no such file, but there is IPv6.
        let root = std::env::temp_dir().join(format!("patchbay-attach-{}", std::process::id()));
        fs::create_dir_all(root.join("sys/net/ipv6")).unwrap();
        let error = host.within(|| veth::attach(&VethConfig { proc_root: &root, ..pair })).unwrap_err();
        assert!(matches!(error, Error::Sysctl { .. }), "{error:?}");
        fs::remove_dir_all(root).unwrap();
    });
    assert!(!host.ok("ip link show vetha") && !pod.ok("ip link show net1"));
}

#[test]
fn a_descriptor_of_anything_else_is_refused() {
    let (host, bridge) = Namespace::with_bridge();
    wanted(&host, bridge, "vetha", |pair| {
        let error = host.within(|| veth::attach(&pair)).unwrap_err();
        assert!(matches!(error, Error::HostNamespace), "{error:?}");
        let file = File::open("/dev/null").unwrap();
        let pair = VethConfig { namespace: file.as_fd(), ..pair };
        let error = host.within(|| veth::attach(&pair)).unwrap_err();
        assert!(matches!(error, Error::NotANamespace(_)), "{error:?}");
    });
    assert!(!host.ok("ip link show vetha"));
}

#[test]
fn a_pair_is_gone_once_and_gone_for_good() {
    let ((host, bridge), pod) = (Namespace::with_bridge(), Namespace::new());
    wanted(&pod, bridge, "vetha", |pair| host.within(|| veth::attach(&pair)).unwrap());
    assert!(host.within(|| veth::detach(&name("vetha"))).unwrap());
    assert!(!pod.ok("ip link show net1"));
    assert!(!host.within(|| veth::detach(&name("vetha"))).unwrap());
    // Somebody else's link is left alone, whatever name.
    let error = host.within(|| veth::detach(&name("br0"))).unwrap_err();
    assert!(matches!(error, Error::NotAVeth { .. }), "{error:?}");
}

#[test]
fn every_difference_is_told() {
    let ((host, bridge), pod) = (Namespace::with_bridge(), Namespace::new());
    let told = |pair: &VethConfig<'_>| {
        let all = host.within(|| veth::check(pair)).unwrap();
        all.iter().map(|one| format!("{} {}", one.link, one.property)).collect::<Vec<_>>()
    };
    wanted(&pod, bridge, "vetha", |pair| {
        assert_eq!(told(&pair), ["vetha kind", "net1 kind"]);
        host.within(|| veth::attach(&pair)).unwrap();
        for (ns, command, difference) in [
            (&pod, "ip link set net1 down", "net1 state"),
            (&pod, "ip link set net1 mtu 1300", "net1 mtu"),
            (&pod, "ip link set net1 address 02:00:00:00:00:07", "net1 address"),
            (&host, "ip link set vetha nomaster", "vetha bridge"),
            (&host, "ip link set vetha down", "vetha state"),
        ] {
            ns.run(command);
            assert!(told(&pair).contains(&difference.to_owned()), "{command}: {:?}", told(&pair));
        }
    });
}

#[test]
fn the_ends_of_a_network_are_found_by_their_alias() {
    let ((host, bridge), one, other) = (Namespace::with_bridge(), Namespace::new(), Namespace::new());
    wanted(&one, bridge, "vetha", |pair| host.within(|| veth::attach(&pair)).unwrap());
    wanted(&other, bridge, "vethb", |pair| {
        let long = format!("pod/other/{}", "c".repeat(245));
        host.within(|| veth::attach(&VethConfig { alias: &long, ..pair })).unwrap();
    });
    host.run("ip link add vethc type bridge");
    host.run("ip link set vethc alias pod/uid/c/net1");
    let names = |alias: &str| {
        let ends = host.within(|| veth::host_veths(alias)).unwrap();
        ends.into_iter().map(|end| (end.name, end.master)).collect::<Vec<_>>()
    };
    assert_eq!(names("pod/uid/"), [("vetha".to_owned(), Some(bridge))]);
    assert_eq!(names("pod/").len(), 2);
}
