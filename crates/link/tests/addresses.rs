//! Addresses and routes of "pods" on a bridge, each test in network namespaces of its own.
#![expect(clippy::unwrap_used, reason = "the functions around the tests are test code too")]

mod netns;
mod sandbox;

use std::{fs, time::Duration, time::Instant};

use api::{ErrorChain, Mac};
use ipnet::IpNet;
use link::veth::{self, AttachOutcome, Error, Route, VethConfig};
use sandbox::{Namespace, name, wanted};

/// Kernel and neighbours answer in milliseconds.
const PATIENCE: Duration = Duration::from_secs(10);

fn nets(text: &str) -> Vec<IpNet> {
    text.split_whitespace().map(|net| net.parse().unwrap()).collect()
}

/// Routes, as in `10.0.0.0/8=10.9.0.254 fd01::/64`.
fn routes(text: &str) -> Vec<Route> {
    let one = |word: &str| match word.split_once('=') {
        Some((dst, gw)) => Route { dst: dst.parse().unwrap(), gw: Some(gw.parse().unwrap()) },
        None => Route { dst: word.parse().unwrap(), gw: None },
    };
    text.split_whitespace().map(one).collect()
}

/// A host with a bridge, and the number of that.
struct Host {
    ns: Namespace,
    bridge: u32,
}

impl Host {
    fn new() -> Self {
        let (ns, bridge) = Namespace::with_bridge();
        Self { ns, bridge }
    }

    /// Does something with a pair that should have these addresses and routes.
    fn with<T: Send>(
        &self,
        (pod, number): (&Namespace, u8),
        (addresses, ways): (&str, &str),
        work: impl FnOnce(&VethConfig<'_>) -> T + Send,
    ) -> T {
        let (addresses, routes) = (nets(addresses), routes(ways));
        wanted(pod, self.bridge, &format!("veth{number}"), |pair| {
            let mac = Mac::from([2, 0, 0, 0, 0, number]);
            let pair = VethConfig { mac, addresses: &addresses, routes: &routes, ..pair };
            self.ns.within(|| work(&pair))
        })
    }

    fn attach(&self, pod: (&Namespace, u8), has: (&str, &str)) -> Result<Made, Error> {
        self.with(pod, has, veth::attach)
    }

    /// What CHECK would say.
    fn told(&self, pod: (&Namespace, u8), has: (&str, &str)) -> Vec<String> {
        self.with(pod, has, |pair| veth::check(pair).unwrap().iter().map(ToString::to_string).collect())
    }

    /// A pod that has what it should.
    fn pod(&self, number: u8, addresses: &str, ways: &str) -> Namespace {
        let pod = Namespace::new();
        assert_eq!(self.attach((&pod, number), (addresses, ways)).unwrap(), AttachOutcome::Created);
        assert_eq!(self.told((&pod, number), (addresses, ways)), [""; 0]);
        pod
    }
}

/// One packet, and no second try.
fn pings(from: &Namespace, to: &str) -> bool {
    from.ok(&format!("ping -n -c 1 -W 1 {to}"))
}

#[test]
fn pods_reach_each_other_at_once_over_both_families() {
    let host = Host::new();
    let one = host.pod(1, "10.9.0.1/24 fd00:9::1/64", "");
    for number in 2..=20 {
        let pod = host.pod(number, &format!("10.9.0.{number}/24 fd00:9::{number}/64"), "");
        // Both ways, each by the first packet.
        assert!(pings(&one, &format!("10.9.0.{number}")), "IPv4 to {number}");
        assert!(pings(&pod, "fd00:9::1"), "IPv6 from {number}");
    }
    let addresses = one.says("ip address show net1");
    for part in ["inet 10.9.0.1/24 brd 10.9.0.255 scope global", "inet6 fd00:9::1/64 scope global nodad"] {
        assert!(addresses.contains(part), "{part}: {addresses}");
    }
}

#[test]
fn a_sandbox_where_ipv6_is_off_has_it_on_this_link() {
    let (host, pod) = (Host::new(), Namespace::new());
    let other = host.pod(1, "fd00:9::1/64", "");
    for which in ["all", "default"] {
        pod.within(|| fs::write(format!("/proc/sys/net/ipv6/conf/{which}/disable_ipv6"), "1")).unwrap();
    }
    host.attach((&pod, 2), ("fd00:9::2/64", "fd01::/64=fd00:9::1")).unwrap();
    assert!(pings(&other, "fd00:9::2") && pings(&pod, "fd00:9::1"));
    // One that wants none has none.
    let pod = Namespace::new();
    pod.within(|| fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1")).unwrap();
    host.attach((&pod, 3), ("10.9.0.3/24", "")).unwrap();
    assert_eq!(pod.says("ip -6 address show net1"), "");
}

#[test]
fn routes_lead_where_they_should() {
    let host = Host::new();
    let ways = "0.0.0.0/0=10.9.0.254 10.20.0.7/16 192.168.5.0/24=10.20.0.9 ::/0=fd00:9::fe fd01::/64=fe80::1 fd02::/64";
    let pod = host.pod(1, "10.9.0.1/24 fd00:9::1/64", ways);
    let told = pod.says("ip route");
    for part in [
        "default via 10.9.0.254 dev net1 proto static",
        "10.20.0.0/16 dev net1 proto static scope link",
        "192.168.5.0/24 via 10.20.0.9 dev net1 proto static",
        "10.9.0.0/24 dev net1 proto kernel scope link src 10.9.0.1",
    ] {
        assert!(told.contains(part), "{part}: {told}");
    }
    let told = pod.says("ip -6 route");
    for part in ["default via fd00:9::fe dev net1", "fd01::/64 via fe80::1 dev net1", "fd02::/64 dev net1"] {
        assert!(told.contains(part), "{part}: {told}");
    }
    // Through a gateway to somebody behind it.
    let _gateway = host.pod(254, "10.9.0.254/24 fd00:9::fe/64 172.31.0.1/32 fd77::1/128", "");
    for far in ["172.31.0.1", "fd77::1"] {
        assert!(pings(&pod, far), "{far}: {}", pod.says(&format!("ip route get {far}")));
    }
}

#[test]
fn a_repeated_call_changes_nothing_and_another_wish_is_made_anew() {
    let (host, pod) = (Host::new(), Namespace::new());
    let has =
        ("10.9.0.1/24 fd00:9::1/64", "10.0.0.0/8=10.9.0.254 10.9.0.0/24 fd01::/64=fd00:9::fe fd00:9::/64");
    assert_eq!(host.attach((&pod, 1), has).unwrap(), AttachOutcome::Created);
    let before = pod.says("ip link show net1");
    assert_eq!(host.attach((&pod, 1), has).unwrap(), AttachOutcome::Unchanged);
    // In any order, and with one said twice.
    let again = ("fd00:9::1/64 10.9.0.1/24 10.9.0.1/24", "fd01::/64=fd00:9::fe 10.0.0.0/8=10.9.0.254");
    assert_eq!(host.attach((&pod, 1), again).unwrap(), AttachOutcome::Unchanged);
    assert_eq!(pod.says("ip link show net1"), before);

    assert_eq!(
        host.attach((&pod, 1), ("10.9.0.2/24", "10.0.0.0/8=10.9.0.253")).unwrap(),
        AttachOutcome::Created
    );
    let now = pod.says("ip -o address show net1 scope global");
    assert!(now.contains("10.9.0.2/24") && now.lines().count() == 1, "{now}");
    assert!(pod.says("ip route").contains("10.0.0.0/8 via 10.9.0.253"));

    // The same said twice in one call.
    let twice =
        ("10.9.0.3/24 10.9.0.3/24 fd00:9::3/64 fd00:9::3/64", "10.0.0.0/8=10.9.0.1 10.0.0.0/8=10.9.0.1");
    assert_eq!(host.attach((&pod, 1), twice).unwrap(), AttachOutcome::Created);
    assert_eq!(host.attach((&pod, 1), twice).unwrap(), AttachOutcome::Unchanged);
}

#[test]
fn the_smallest_subnets_work() {
    let host = Host::new();
    for (number, one, other, ways) in [
        (1, "10.9.0.0/31", "10.9.0.1/31", ["", ""]),
        (3, "10.9.1.5/32", "10.9.2.6/32", ["10.9.2.6/32", "10.9.1.5/32"]),
        (5, "fd00:9::/127", "fd00:9::1/127", ["", ""]),
        (7, "fd00:1::5/128", "fd00:2::6/128", ["fd00:2::6/128", "fd00:1::5/128"]),
    ] {
        let address = |net: &str| net.split('/').next().unwrap().to_owned();
        let pods = [host.pod(number, one, ways[0]), host.pod(number + 1, other, ways[1])];
        assert!(pings(&pods[0], &address(other)) && pings(&pods[1], &address(one)), "{one}");
    }
    // A gateway that nothing but a route of its own leads to.
    host.pod(9, "10.9.3.1/32 fd00:3::1/128", "10.9.4.1/32 0.0.0.0/0=10.9.4.1 fd00:4::1/128 ::/0=fd00:4::1");
}

#[test]
fn what_cannot_be_is_said_in_a_sentence_and_nothing_is_left() {
    let host = Host::new();
    for (addresses, ways, part) in [
        (
            "10.9.0.1/24",
            "10.0.0.0/8=10.8.0.1",
            "the gateway 10.8.0.1 of the route to 10.0.0.0/8 is no neighbour",
        ),
        (
            "10.9.0.1/24",
            "10.0.0.0/8=10.9.0.255",
            "the gateway 10.9.0.255 of the route to 10.0.0.0/8 is no neighbour",
        ),
        (
            "10.9.0.1/32",
            "0.0.0.0/0=10.9.0.254",
            "the gateway 10.9.0.254 of the route to 0.0.0.0/0 is no neighbour",
        ),
        ("fd00:9::1/64", "::/0=fd00:8::1", "the gateway fd00:8::1 of the route to ::/0 is no neighbour"),
        ("fd00:9::1/64", "::/0=fd00:9::1", "the gateway fd00:9::1 of the route to ::/0 is no neighbour"),
        ("10.9.0.1/24", "10.0.0.0/8=fd00:9::1", "has the gateway fd00:9::1, which is of the other family"),
        (
            "10.9.0.1/24",
            "10.0.0.0/8=10.9.0.2 10.0.0.0/8=10.9.0.3",
            "via 10.9.0.2 over net1: remove one of the two",
        ),
    ] {
        let pod = Namespace::new();
        let error = host.attach((&pod, 1), (addresses, ways)).unwrap_err();
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
fn a_route_that_the_sandbox_has_elsewhere_is_not_taken_over() {
    let host = Host::new();
    for (address, way, ours, part) in [
        (
            "10.1.0.5/24",
            "default via 10.1.0.1",
            "0.0.0.0/0=10.9.0.254",
            "a route to 0.0.0.0/0, via 10.1.0.1 over eth0",
        ),
        ("fd01::5/64", "default via fd01::1", "::/0=fd00:9::fe", "a route to ::/0, via fd01::1 over eth0"),
        (
            "10.1.0.5/24",
            "10.7.0.0/16 dev eth0",
            "10.7.0.0/16",
            "a route to 10.7.0.0/16, without gateway over eth0",
        ),
    ] {
        let pod = Namespace::new();
        pod.run("ip link add eth0 type bridge");
        pod.run("ip link set eth0 up");
        pod.run(&format!("ip address add {address} dev eth0"));
        pod.run(&format!("ip route add {way}"));
        let before = [pod.says("ip route"), pod.says("ip -6 route show dev eth0")];
        let error = host.attach((&pod, 1), ("10.9.0.1/24 fd00:9::1/64", ours)).unwrap_err();
        assert!(matches!(error, Error::RouteConflict { .. }) && error.to_string().contains(part), "{error}");
        assert_eq!([pod.says("ip route"), pod.says("ip -6 route show dev eth0")], before);
    }
}

#[test]
fn what_is_missing_or_foreign_is_told() {
    let host = Host::new();
    let has = ("10.9.0.1/24 fd00:9::1/64", "10.0.0.0/8=10.9.0.254 fd01::/64=fd00:9::fe");
    let pod = host.pod(1, has.0, has.1);
    let told = |command: &str| {
        pod.run(command);
        host.told((&pod, 1), has)
    };
    // What has an end is a router's or a lease's.
    assert_eq!(told("ip address add 10.9.0.8/24 dev net1 valid_lft 100 preferred_lft 100"), [""; 0]);
    assert_eq!(
        told("ip address add 10.9.0.7/24 dev net1"),
        [
            "net1: its list of IP addresses should be 10.9.0.1/24, fd00:9::1/64 and is 10.9.0.1/24, fd00:9::1/64, \
            10.9.0.7/24"
        ]
    );
    pod.run("ip address del 10.9.0.7/24 dev net1");
    assert_eq!(
        told("ip address del fd00:9::1/64 dev net1"),
        ["net1: its list of IP addresses should be 10.9.0.1/24, fd00:9::1/64 and is 10.9.0.1/24"]
    );
    pod.run("ip address add fd00:9::1/64 dev net1 nodad");
    assert_eq!(
        told("ip route replace 10.0.0.0/8 via 10.9.0.253"),
        ["net1: its route should be 10.0.0.0/8 via 10.9.0.254 and is one via 10.9.0.253 over net1"]
    );
    assert_eq!(told("ip route del 10.0.0.0/8").len(), 1);
    assert_eq!(
        told("ip -6 route del fd01::/64")[1],
        "net1: its route should be fd01::/64 via fd00:9::fe and is missing"
    );
    // Who was given none may have any.
    assert_eq!(host.told((&pod, 1), ("", "")), [""; 0]);
}

/// An address that moves from pod to pod, and a neighbour that spoke to the first one.
fn moves(addresses: &str) {
    let host = Host::new();
    let neighbour = host.pod(1, "10.9.0.1/24 fd00:9::1/64", "");
    let known = |mac: &str| {
        let all = neighbour.says("ip neighbour show dev net1");
        nets(addresses).iter().all(|net| {
            let begin = format!("{} ", net.addr());
            all.lines().any(|line| line.starts_with(&begin) && line.contains(mac))
        })
    };
    for number in 2..20 {
        let _pod = host.pod(number, addresses, "");
        if number == 2 {
            assert!(nets(addresses).iter().all(|net| pings(&neighbour, &net.addr().to_string())));
        }
        let (mac, since) = (format!("02:00:00:00:00:{number:02x}"), Instant::now());
        while !known(&mac) {
            assert!(since.elapsed() < PATIENCE, "{mac}: {}", neighbour.says("ip neighbour show dev net1"));
        }
        assert!(host.ns.within(|| veth::detach(&name(&format!("veth{number}")))).unwrap());
    }
}

#[test]
fn a_neighbour_that_knows_the_old_owner_learns_the_new_one_without_a_word_from_it() {
    for addresses in ["10.9.0.9/24", "fd00:9::9/64", "10.9.0.9/24 fd00:9::9/64"] {
        moves(addresses);
    }
}

#[test]
fn a_bridge_that_is_down_does_not_stop_a_pod() {
    let host = Host::new();
    host.ns.run("ip link set br0 down");
    let since = Instant::now();
    host.pod(1, "10.9.0.1/24", "");
    assert!(since.elapsed() < PATIENCE);
}
