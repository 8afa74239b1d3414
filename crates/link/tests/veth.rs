//! Veth pairs between a bridge and simulated pods. Each test uses its own network namespaces.
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
use sandbox::{Namespace, name, with_config};

#[test]
fn attach_creates_a_fully_configured_pair() {
    let ((host, bridge), pod) = (Namespace::with_bridge(), Namespace::new());
    // A link of the host with the name of the pod end does not matter.
    host.run("ip link add net1 type bridge");
    with_config(&pod, bridge, "vetha", |pair| {
        assert_eq!(host.within(|| veth::attach(&pair)).unwrap(), AttachOutcome::Created);
        assert_eq!(host.within(|| veth::check(&pair)).unwrap(), []);
    });
    let outside = host.output("ip -d link show vetha");
    for part in ["master br0", "mtu 1400", ",UP", "alias pod/uid/container/net1"] {
        assert!(outside.contains(part), "{part}: {outside}");
    }
    let inside = pod.output("ip -d link show net1");
    for part in ["02:00:00:00:00:01", "mtu 1400", ",UP", "veth"] {
        assert!(inside.contains(part), "{part}: {inside}");
    }
    assert_eq!(host.output("ip -6 address show vetha"), "");
    let off = "/proc/sys/net/ipv6/conf/vetha/disable_ipv6";
    assert_eq!(host.within(|| fs::read_to_string(off)).unwrap().trim(), "1");
}

#[test]
fn a_pair_with_an_mtu_below_the_ipv6_minimum_is_created() {
    let ((host, bridge), pod) = (Namespace::with_bridge(), Namespace::new());
    with_config(&pod, bridge, "vetha", |pair| {
        let pair = VethConfig { mtu: 576, ..pair };
        assert_eq!(host.within(|| veth::attach(&pair)).unwrap(), AttachOutcome::Created);
        assert_eq!(host.within(|| veth::check(&pair)).unwrap(), []);
    });
}

#[test]
fn two_pods_reach_each_other_over_the_bridge() {
    let ((host, bridge), one, other) = (Namespace::with_bridge(), Namespace::new(), Namespace::new());
    for (pod, end, mac, address) in [(&one, "vetha", 1, "10.9.0.1/24"), (&other, "vethb", 2, "10.9.0.2/24")] {
        with_config(pod, bridge, end, |pair| {
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
fn a_repeated_attach_keeps_the_pair_of_the_first_one() {
    let ((host, bridge), pod) = (Namespace::with_bridge(), Namespace::new());
    with_config(&pod, bridge, "vetha", |pair| {
        host.within(|| veth::attach(&pair)).unwrap();
        let before = host.output("ip link show vetha");
        assert_eq!(host.within(|| veth::attach(&pair)).unwrap(), AttachOutcome::Unchanged);
        assert_eq!(host.output("ip link show vetha"), before);
        let other = VethConfig { mac: Mac::from([2, 0, 0, 0, 0, 9]), ..pair };
        assert_eq!(host.within(|| veth::attach(&other)).unwrap(), AttachOutcome::Created);
        assert_eq!(host.within(|| veth::check(&other)).unwrap(), []);
    });
    // The state after a call that was interrupted right after it created the pair.
    host.run("ip link set vetha alias pod/uid/container/net1 nomaster down");
    with_config(&pod, bridge, "vetha", |pair| {
        assert_eq!(host.within(|| veth::attach(&pair)).unwrap(), AttachOutcome::Created);
        assert_eq!(host.within(|| veth::check(&pair)).unwrap(), []);
    });
}

#[test]
fn attach_fails_if_the_pod_has_an_interface_of_that_name() {
    let ((host, bridge), pod) = (Namespace::with_bridge(), Namespace::new());
    pod.run("ip link add net1 type bridge");
    with_config(&pod, bridge, "vetha", |pair| {
        let error = host.within(|| veth::attach(&pair)).unwrap_err();
        assert!(matches!(error, Error::NameTaken { .. }), "{error:?}");
    });
    assert!(!host.ok("ip link show vetha"));
    assert!(pod.output("ip -d link show net1").contains("bridge"));
}

#[test]
fn attach_to_a_missing_bridge_leaves_nothing_behind() {
    let ((host, bridge), pod) = (Namespace::with_bridge(), Namespace::new());
    host.run("ip link del br0");
    with_config(&pod, bridge, "vetha", |pair| {
        let error = host.within(|| veth::attach(&pair)).unwrap_err();
        assert!(matches!(error, Error::BridgeNotFound(_)), "{error:?}");
    });
    assert!(!host.ok("ip link show vetha") && !pod.ok("ip link show net1"));
}

#[test]
fn a_failure_during_setup_deletes_the_pair() {
    let ((host, bridge), pod) = (Namespace::with_bridge(), Namespace::new());
    with_config(&pod, bridge, "vetha", |pair| {
        // IPv6 seems to exist, but the sysctl file of the link does not.
        let root = std::env::temp_dir().join(format!("patchbay-attach-{}", std::process::id()));
        fs::create_dir_all(root.join("sys/net/ipv6")).unwrap();
        let error = host.within(|| veth::attach(&VethConfig { proc_root: &root, ..pair })).unwrap_err();
        assert!(matches!(error, Error::Sysctl { .. }), "{error:?}");
        fs::remove_dir_all(root).unwrap();
    });
    assert!(!host.ok("ip link show vetha") && !pod.ok("ip link show net1"));
}

#[test]
fn a_descriptor_that_is_not_a_pod_namespace_is_rejected() {
    let (host, bridge) = Namespace::with_bridge();
    with_config(&host, bridge, "vetha", |pair| {
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
fn detach_is_idempotent_and_deletes_only_veths() {
    let ((host, bridge), pod) = (Namespace::with_bridge(), Namespace::new());
    with_config(&pod, bridge, "vetha", |pair| host.within(|| veth::attach(&pair)).unwrap());
    assert!(host.within(|| veth::detach(&name("vetha"))).unwrap());
    assert!(!pod.ok("ip link show net1"));
    assert!(!host.within(|| veth::detach(&name("vetha"))).unwrap());
    // A link that is not a veth is left alone.
    let error = host.within(|| veth::detach(&name("br0"))).unwrap_err();
    assert!(matches!(error, Error::NotAVeth { .. }), "{error:?}");
}

#[test]
fn every_difference_is_reported() {
    let ((host, bridge), pod) = (Namespace::with_bridge(), Namespace::new());
    let drift = |pair: &VethConfig<'_>| {
        let all = host.within(|| veth::check(pair)).unwrap();
        all.iter().map(|one| format!("{} {}", one.link, one.property)).collect::<Vec<_>>()
    };
    with_config(&pod, bridge, "vetha", |pair| {
        assert_eq!(drift(&pair), ["vetha kind", "net1 kind"]);
        host.within(|| veth::attach(&pair)).unwrap();
        for (ns, command, difference) in [
            (&pod, "ip link set net1 down", "net1 state"),
            (&pod, "ip link set net1 mtu 1300", "net1 MTU"),
            (&pod, "ip link set net1 address 02:00:00:00:00:07", "net1 MAC address"),
            (&host, "ip link set vetha nomaster", "vetha bridge"),
            (&host, "ip link set vetha down", "vetha state"),
        ] {
            ns.run(command);
            assert!(drift(&pair).contains(&difference.to_owned()), "{command}: {:?}", drift(&pair));
        }
    });
}

#[test]
fn the_host_veths_of_a_network_are_found_by_alias() {
    let ((host, bridge), one, other) = (Namespace::with_bridge(), Namespace::new(), Namespace::new());
    with_config(&one, bridge, "vetha", |pair| host.within(|| veth::attach(&pair)).unwrap());
    with_config(&other, bridge, "vethb", |pair| {
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
