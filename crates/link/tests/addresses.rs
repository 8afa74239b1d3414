//! Addresses and routes of simulated pods on a bridge. Each test uses its own network namespaces.
#![expect(clippy::unwrap_used, reason = "the functions around the tests are test code too")]

mod netns;
mod sandbox;

use std::{fs, time::Duration, time::Instant};

use api::{ErrorChain, Mac};
use ipnet::IpNet;
use link::veth::{self, AttachOutcome, Error, Route, VethConfig};
use sandbox::{Namespace, name, with_config};

/// A generous bound: the kernel and neighbours answer in milliseconds.
const TIMEOUT: Duration = Duration::from_secs(10);

fn nets(text: &str) -> Vec<IpNet> {
    text.split_whitespace().map(|net| net.parse().unwrap()).collect()
}

/// Parses routes such as `10.0.0.0/8=10.9.0.254 fd01::/64`.
fn routes(text: &str) -> Vec<Route> {
    let one = |word: &str| match word.split_once('=') {
        Some((dst, gw)) => Route { dst: dst.parse().unwrap(), gw: Some(gw.parse().unwrap()) },
        None => Route { dst: word.parse().unwrap(), gw: None },
    };
    text.split_whitespace().map(one).collect()
}

/// A host with a bridge, and the bridge's index.
struct Host {
    ns: Namespace,
    bridge: u32,
}

impl Host {
    fn new() -> Self {
        let (ns, bridge) = Namespace::with_bridge();
        Self { ns, bridge }
    }

    /// Runs `work` in the host namespace with the configuration of a pair with these addresses and routes.
    fn with<T: Send>(
        &self,
        (pod, number): (&Namespace, u8),
        (addresses, routes_text): (&str, &str),
        work: impl FnOnce(&VethConfig<'_>) -> T + Send,
    ) -> T {
        let (addresses, routes) = (nets(addresses), routes(routes_text));
        with_config(pod, self.bridge, &format!("veth{number}"), |pair| {
            let mac = Mac::from([2, 0, 0, 0, 0, number]);
            let pair = VethConfig { mac, addresses: &addresses, routes: &routes, ..pair };
            self.ns.within(|| work(&pair))
        })
    }

    fn attach(&self, pod: (&Namespace, u8), has: (&str, &str)) -> Result<AttachOutcome, Error> {
        self.with(pod, has, veth::attach)
    }

    /// The differences that CHECK reports.
    fn drift(&self, pod: (&Namespace, u8), has: (&str, &str)) -> Vec<String> {
        self.with(pod, has, |pair| veth::check(pair).unwrap().iter().map(ToString::to_string).collect())
    }

    /// Attaches a pod and verifies it.
    fn pod(&self, number: u8, addresses: &str, routes: &str) -> Namespace {
        let pod = Namespace::new();
        assert_eq!(self.attach((&pod, number), (addresses, routes)).unwrap(), AttachOutcome::Created);
        assert_eq!(self.drift((&pod, number), (addresses, routes)), [""; 0]);
        pod
    }
}

/// Sends one packet, without a retry.
fn pings(from: &Namespace, to: &str) -> bool {
    from.ok(&format!("ping -n -c 1 -W 1 {to}"))
}

#[test]
fn pods_reach_each_other_at_once_over_both_families() {
    let host = Host::new();
    let one = host.pod(1, "10.9.0.1/24 fd00:9::1/64", "");
    for number in 2..=20 {
        let pod = host.pod(number, &format!("10.9.0.{number}/24 fd00:9::{number}/64"), "");
        // In both directions, with the first packet.
        assert!(pings(&one, &format!("10.9.0.{number}")), "IPv4 to {number}");
        assert!(pings(&pod, "fd00:9::1"), "IPv6 from {number}");
    }
    let addresses = one.output("ip address show net1");
    for part in ["inet 10.9.0.1/24 brd 10.9.0.255 scope global", "inet6 fd00:9::1/64 scope global nodad"] {
        assert!(addresses.contains(part), "{part}: {addresses}");
    }
}

#[test]
fn ipv6_is_enabled_on_the_link_of_a_sandbox_that_disables_it() {
    let (host, pod) = (Host::new(), Namespace::new());
    let other = host.pod(1, "fd00:9::1/64", "");
    for which in ["all", "default"] {
        pod.within(|| fs::write(format!("/proc/sys/net/ipv6/conf/{which}/disable_ipv6"), "1")).unwrap();
    }
    host.attach((&pod, 2), ("fd00:9::2/64", "fd01::/64=fd00:9::1")).unwrap();
    assert!(pings(&other, "fd00:9::2") && pings(&pod, "fd00:9::1"));
    // A pod without IPv6 addresses keeps it disabled.
    let pod = Namespace::new();
    pod.within(|| fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1")).unwrap();
    host.attach((&pod, 3), ("10.9.0.3/24", "")).unwrap();
    assert_eq!(pod.output("ip -6 address show net1"), "");
}

#[test]
fn pods_get_the_requested_routes() {
    let host = Host::new();
    let routes = "0.0.0.0/0=10.9.0.254 10.20.0.7/16 192.168.5.0/24=10.20.0.9 ::/0=fd00:9::fe fd01::/64=fe80::1 fd02::/64";
    let pod = host.pod(1, "10.9.0.1/24 fd00:9::1/64", routes);
    let listed = pod.output("ip route");
    for part in [
        "default via 10.9.0.254 dev net1 proto static",
        "10.20.0.0/16 dev net1 proto static scope link",
        "192.168.5.0/24 via 10.20.0.9 dev net1 proto static",
        "10.9.0.0/24 dev net1 proto kernel scope link src 10.9.0.1",
    ] {
        assert!(listed.contains(part), "{part}: {listed}");
    }
    let listed = pod.output("ip -6 route");
    for part in ["default via fd00:9::fe dev net1", "fd01::/64 via fe80::1 dev net1", "fd02::/64 dev net1"] {
        assert!(listed.contains(part), "{part}: {listed}");
    }
    // Through the gateway to an address behind it.
    let _gateway = host.pod(254, "10.9.0.254/24 fd00:9::fe/64 172.31.0.1/32 fd77::1/128", "");
    for far in ["172.31.0.1", "fd77::1"] {
        assert!(pings(&pod, far), "{far}: {}", pod.output(&format!("ip route get {far}")));
    }
}

#[test]
fn a_repeated_attach_changes_nothing_and_a_changed_one_recreates_the_pair() {
    let (host, pod) = (Host::new(), Namespace::new());
    let has =
        ("10.9.0.1/24 fd00:9::1/64", "10.0.0.0/8=10.9.0.254 10.9.0.0/24 fd01::/64=fd00:9::fe fd00:9::/64");
    assert_eq!(host.attach((&pod, 1), has).unwrap(), AttachOutcome::Created);
    let before = pod.output("ip link show net1");
    assert_eq!(host.attach((&pod, 1), has).unwrap(), AttachOutcome::Unchanged);
    // In any order, and with a duplicate.
    let again = ("fd00:9::1/64 10.9.0.1/24 10.9.0.1/24", "fd01::/64=fd00:9::fe 10.0.0.0/8=10.9.0.254");
    assert_eq!(host.attach((&pod, 1), again).unwrap(), AttachOutcome::Unchanged);
    assert_eq!(pod.output("ip link show net1"), before);

    assert_eq!(
        host.attach((&pod, 1), ("10.9.0.2/24", "10.0.0.0/8=10.9.0.253")).unwrap(),
        AttachOutcome::Created
    );
    let now = pod.output("ip -o address show net1 scope global");
    assert!(now.contains("10.9.0.2/24") && now.lines().count() == 1, "{now}");
    assert!(pod.output("ip route").contains("10.0.0.0/8 via 10.9.0.253"));

    // Duplicates in one call.
    let twice =
        ("10.9.0.3/24 10.9.0.3/24 fd00:9::3/64 fd00:9::3/64", "10.0.0.0/8=10.9.0.1 10.0.0.0/8=10.9.0.1");
    assert_eq!(host.attach((&pod, 1), twice).unwrap(), AttachOutcome::Created);
    assert_eq!(host.attach((&pod, 1), twice).unwrap(), AttachOutcome::Unchanged);
}

#[test]
fn the_smallest_subnets_work() {
    let host = Host::new();
    for (number, one, other, routes) in [
        (1, "10.9.0.0/31", "10.9.0.1/31", ["", ""]),
        (3, "10.9.1.5/32", "10.9.2.6/32", ["10.9.2.6/32", "10.9.1.5/32"]),
        (5, "fd00:9::/127", "fd00:9::1/127", ["", ""]),
        (7, "fd00:1::5/128", "fd00:2::6/128", ["fd00:2::6/128", "fd00:1::5/128"]),
    ] {
        let address = |net: &str| net.split('/').next().unwrap().to_owned();
        let pods = [host.pod(number, one, routes[0]), host.pod(number + 1, other, routes[1])];
        assert!(pings(&pods[0], &address(other)) && pings(&pods[1], &address(one)), "{one}");
    }
    // A gateway that is reachable only through its own host route.
    host.pod(9, "10.9.3.1/32 fd00:3::1/128", "10.9.4.1/32 0.0.0.0/0=10.9.4.1 fd00:4::1/128 ::/0=fd00:4::1");
}

#[test]
fn impossible_configurations_are_rejected_with_a_reason_and_leave_nothing() {
    let host = Host::new();
    for (addresses, routes, part) in [
        (
            "10.9.0.1/24",
            "10.0.0.0/8=10.8.0.1",
            "gateway 10.8.0.1 of the route to 10.0.0.0/8 is not reachable",
        ),
        (
            "10.9.0.1/24",
            "10.0.0.0/8=10.9.0.255",
            "gateway 10.9.0.255 of the route to 10.0.0.0/8 is not reachable",
        ),
        (
            "10.9.0.1/32",
            "0.0.0.0/0=10.9.0.254",
            "gateway 10.9.0.254 of the route to 0.0.0.0/0 is not reachable",
        ),
        ("fd00:9::1/64", "::/0=fd00:8::1", "gateway fd00:8::1 of the route to ::/0 is not reachable"),
        ("fd00:9::1/64", "::/0=fd00:9::1", "gateway fd00:9::1 of the route to ::/0 is not reachable"),
        ("10.9.0.1/24", "10.0.0.0/8=fd00:9::1", "has gateway fd00:9::1 of the other IP family"),
        (
            "10.9.0.1/24",
            "10.0.0.0/8=10.9.0.2 10.0.0.0/8=10.9.0.3",
            "via 10.9.0.2 dev net1; remove one of the two routes",
        ),
    ] {
        let pod = Namespace::new();
        let error = host.attach((&pod, 1), (addresses, routes)).unwrap_err();
        assert!(ErrorChain(&error).to_string().contains(part), "{}", ErrorChain(&error));
        assert!(!host.ns.ok("ip link show veth1") && !pod.ok("ip link show net1"), "{part}");
    }
    let pod = Namespace::new();
    for has in [("fd00:9::1/64", ""), ("", "fd00::/64")] {
        let error =
            host.with((&pod, 1), has, |pair| veth::attach(&VethConfig { mtu: 576, ..*pair })).unwrap_err();
        assert!(matches!(error, Error::MtuTooSmallForIpv6 { mtu: 576 }), "{error:?}");
    }
    let small = |pair: &VethConfig<'_>| veth::attach(&VethConfig { mtu: 576, ..*pair });
    assert_eq!(host.with((&pod, 1), ("10.9.0.1/24", ""), small).unwrap(), AttachOutcome::Created);
}

#[test]
fn an_existing_route_of_the_sandbox_is_not_replaced() {
    let host = Host::new();
    for (address, existing, requested, part) in [
        (
            "10.1.0.5/24",
            "default via 10.1.0.1",
            "0.0.0.0/0=10.9.0.254",
            "a route to 0.0.0.0/0 via 10.1.0.1 dev eth0",
        ),
        ("fd01::5/64", "default via fd01::1", "::/0=fd00:9::fe", "a route to ::/0 via fd01::1 dev eth0"),
        ("10.1.0.5/24", "10.7.0.0/16 dev eth0", "10.7.0.0/16", "a route to 10.7.0.0/16 dev eth0"),
    ] {
        let pod = Namespace::new();
        pod.run("ip link add eth0 type bridge");
        pod.run("ip link set eth0 up");
        pod.run(&format!("ip address add {address} dev eth0"));
        pod.run(&format!("ip route add {existing}"));
        let before = [pod.output("ip route"), pod.output("ip -6 route show dev eth0")];
        let error = host.attach((&pod, 1), ("10.9.0.1/24 fd00:9::1/64", requested)).unwrap_err();
        assert!(matches!(error, Error::RouteConflict { .. }) && error.to_string().contains(part), "{error}");
        assert_eq!([pod.output("ip route"), pod.output("ip -6 route show dev eth0")], before);
    }
}

#[test]
fn missing_and_unexpected_addresses_and_routes_are_reported() {
    let host = Host::new();
    let has = ("10.9.0.1/24 fd00:9::1/64", "10.0.0.0/8=10.9.0.254 fd01::/64=fd00:9::fe");
    let pod = host.pod(1, has.0, has.1);
    let drift_after = |command: &str| {
        pod.run(command);
        host.drift((&pod, 1), has)
    };
    // An address with a lifetime comes from a router or DHCP and is ignored.
    assert_eq!(drift_after("ip address add 10.9.0.8/24 dev net1 valid_lft 100 preferred_lft 100"), [""; 0]);
    assert_eq!(
        drift_after("ip address add 10.9.0.7/24 dev net1"),
        ["net1: IP address list is 10.9.0.1/24, fd00:9::1/64, 10.9.0.7/24, expected 10.9.0.1/24, \
            fd00:9::1/64"]
    );
    pod.run("ip address del 10.9.0.7/24 dev net1");
    assert_eq!(
        drift_after("ip address del fd00:9::1/64 dev net1"),
        ["net1: IP address list is 10.9.0.1/24, expected 10.9.0.1/24, fd00:9::1/64"]
    );
    pod.run("ip address add fd00:9::1/64 dev net1 nodad");
    assert_eq!(
        drift_after("ip route replace 10.0.0.0/8 via 10.9.0.253"),
        ["net1: route is via 10.9.0.253 dev net1, expected 10.0.0.0/8 via 10.9.0.254"]
    );
    assert_eq!(drift_after("ip route del 10.0.0.0/8").len(), 1);
    assert_eq!(
        drift_after("ip -6 route del fd01::/64")[1],
        "net1: route is missing, expected fd01::/64 via fd00:9::fe"
    );
    // Without managed addresses, the pod may have any.
    assert_eq!(host.drift((&pod, 1), ("", "")), [""; 0]);
}

/// Moves addresses from pod to pod, and checks that a neighbour of the first one learns each new MAC address.
fn move_addresses(addresses: &str) {
    let host = Host::new();
    let neighbour = host.pod(1, "10.9.0.1/24 fd00:9::1/64", "");
    let neighbour_knows = |mac: &str| {
        let all = neighbour.output("ip neighbour show dev net1");
        nets(addresses).iter().all(|net| {
            let prefix = format!("{} ", net.addr());
            all.lines().any(|line| line.starts_with(&prefix) && line.contains(mac))
        })
    };
    for number in 2..20 {
        let _pod = host.pod(number, addresses, "");
        if number == 2 {
            assert!(nets(addresses).iter().all(|net| pings(&neighbour, &net.addr().to_string())));
        }
        let (mac, since) = (format!("02:00:00:00:00:{number:02x}"), Instant::now());
        while !neighbour_knows(&mac) {
            assert!(since.elapsed() < TIMEOUT, "{mac}: {}", neighbour.output("ip neighbour show dev net1"));
        }
        assert!(host.ns.within(|| veth::detach(&name(&format!("veth{number}")))).unwrap());
    }
}

#[test]
fn neighbours_learn_the_new_owner_of_an_address_without_traffic_from_it() {
    for addresses in ["10.9.0.9/24", "fd00:9::9/64", "10.9.0.9/24 fd00:9::9/64"] {
        move_addresses(addresses);
    }
}

#[test]
fn a_pod_attaches_to_a_bridge_that_is_down() {
    let host = Host::new();
    host.ns.run("ip link set br0 down");
    let since = Instant::now();
    host.pod(1, "10.9.0.1/24", "");
    assert!(since.elapsed() < TIMEOUT);
}
