//! Bridge networks in the kernel: observe, plan and apply, each test in network namespaces of its own.
#![expect(clippy::unwrap_used, clippy::panic, reason = "the functions around the tests are test code too")]

mod host;

use host::{Host, network, overlay, reaches, two_nodes};
use plan::nodenetwork::Admin;

#[test]
fn two_pods_on_one_node_reach_each_other() {
    let mut host = Host::new("one");
    host.networks = vec![network("blue")];
    host.settle();
    let report = host.report("blue").unwrap();
    assert!(report.ready, "{report:?}");
    assert_eq!(report.mtu, Some(1400));
    let bridge = host.link("br-blue");
    assert_eq!((bridge.admin, bridge.mtu, bridge.ipv6_off), (Admin::Up, 1400, Some(true)));
    assert_eq!((bridge.alias.as_str(), bridge.addresses.len()), ("patchbay/bridge/uid-blue", 0));

    let one = host.pod(&host.networks[0], 1, "10.9.0.1/24");
    let two = host.pod(&host.networks[0], 2, "10.9.0.2/24");
    assert!(reaches(&one.socket("10.9.0.1:7000"), &two.socket("10.9.0.2:7000"), 1372));
    assert_eq!(host.settle(), []);
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
        let one = hosts[0].pod(&hosts[0].networks[0], 1, "10.9.0.1/24");
        let two = hosts[1].pod(&hosts[1].networks[0], 2, "10.9.0.2/24");
        assert!(reaches(&one.socket("10.9.0.1:7000"), &two.socket("10.9.0.2:7000"), 1372));
        assert_eq!((hosts[0].settle(), hosts[1].settle()), (vec![], vec![]));
    }
}
