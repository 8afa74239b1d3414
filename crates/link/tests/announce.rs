//! Quiet links: pods whose addresses another pod still has. Each test uses its own network namespaces.
#![expect(clippy::unwrap_used, reason = "the functions around the tests are test code too")]

mod netns;
mod sandbox;

use std::{
    fs,
    os::fd::AsFd as _,
    path::Path,
    time::{Duration, Instant},
};

use api::Mac;
use ipnet::IpNet;
use link::veth::{self, Announce, AnnounceOutcome, AttachOutcome, Route, VethConfig};
use sandbox::{Namespace, name, with_config};

/// A generous bound: the kernel and neighbours answer in milliseconds.
const TIMEOUT: Duration = Duration::from_secs(10);
const SHARED: [&str; 2] = ["10.9.0.9", "fd00:9::9"];
const SOURCE: &str = "02:00:00:00:00:01";
const TARGET: &str = "02:00:00:00:00:02";

struct Host {
    ns: Namespace,
    bridge: u32,
}

impl Host {
    fn new() -> Self {
        let (ns, bridge) = Namespace::with_bridge();
        Self { ns, bridge }
    }

    fn attach(&self, pod: &Namespace, number: u8, addresses: &[String], announce: Announce) -> AttachOutcome {
        let addresses: Vec<IpNet> = addresses.iter().map(|address| address.parse().unwrap()).collect();
        let route = |dst: &str, gw: &str| Route { dst: dst.parse().unwrap(), gw: Some(gw.parse().unwrap()) };
        let routes = [route("172.16.0.0/12", "10.9.0.254"), route("fd77::/64", "fd00:9::fe")];
        with_config(pod, self.bridge, &format!("veth{number}"), |pair| {
            let mac = Mac::from([2, 0, 0, 0, 0, number]);
            let pair = VethConfig { mac, addresses: &addresses, routes: &routes, announce, ..pair };
            self.ns.within(|| veth::attach(&pair)).unwrap()
        })
    }

    fn pod(&self, number: u8, addresses: &[String], announce: Announce) -> Namespace {
        let pod = Namespace::new();
        assert_eq!(self.attach(&pod, number, addresses, announce), AttachOutcome::Created);
        pod
    }

    fn detach(&self, number: u8) {
        assert!(self.ns.within(|| veth::detach(&name(&format!("veth{number}")))).unwrap());
    }
}

fn shared() -> Vec<String> {
    vec![format!("{}/24", SHARED[0]), format!("{}/64", SHARED[1])]
}

fn peer(host: &Host) -> Namespace {
    host.pod(7, &["10.9.0.7/24".to_owned(), "fd00:9::7/64".to_owned()], Announce::Now)
}

/// Sends one packet, without a retry.
fn pings(from: &Namespace, to: &str) -> bool {
    from.ok(&format!("ping -n -c 1 -W 1 {to}"))
}

/// The MAC address that the peer resolves an address to, after it forgot the one before.
fn resolve(peer: &Namespace, address: &str) -> String {
    peer.ok(&format!("ip neighbour del {address} dev net1"));
    assert!(pings(peer, address), "{address}");
    known(peer, address)
}

/// The peer's neighbour entry of an address.
fn known(peer: &Namespace, address: &str) -> String {
    peer.output(&format!("ip neighbour show {address} dev net1"))
}

fn announce(pod: &Namespace) -> AnnounceOutcome {
    veth::announce(pod.0.as_fd(), &name("net1"), Path::new("/proc")).unwrap()
}

fn sysctl(pod: &Namespace, path: &str) -> String {
    pod.within(|| fs::read_to_string(format!("/proc/sys/net/{path}"))).unwrap().trim().to_owned()
}

#[test]
fn a_quiet_link_does_not_answer_for_the_addresses_of_another_pod() {
    let host = Host::new();
    let peer = peer(&host);
    let _source = host.pod(1, &shared(), Announce::Now);
    for address in SHARED {
        assert!(resolve(&peer, address).contains(SOURCE));
    }
    let target = Namespace::new();
    // A sandbox whose default is to announce.
    for default in ["ipv4/conf/default/arp_notify", "ipv6/conf/default/ndisc_notify"] {
        target.within(|| fs::write(format!("/proc/sys/net/{default}"), "1")).unwrap();
    }
    assert_eq!(host.attach(&target, 2, &shared(), Announce::Later), AttachOutcome::Created);
    assert_eq!(host.attach(&target, 2, &shared(), Announce::Later), AttachOutcome::Unchanged);
    let link = target.output("ip -d link show net1");
    assert!(link.contains("NOARP") && link.contains(",UP"), "{link}");
    for notify in ["ipv4/conf/net1/arp_notify", "ipv6/conf/net1/ndisc_notify"] {
        assert_eq!(sysctl(&target, notify), "0", "{notify}");
    }
    for address in SHARED {
        // What an announcement would have overwritten.
        assert!(known(&peer, address).contains(SOURCE), "{}", known(&peer, address));
        for _ in 0..5 {
            assert!(resolve(&peer, address).contains(SOURCE), "{}", known(&peer, address));
        }
    }
    // Without the other pod nothing answers.
    host.detach(1);
    for address in SHARED {
        peer.ok(&format!("ip neighbour del {address} dev net1"));
        assert!(!pings(&peer, address), "{}", known(&peer, address));
    }
}

#[test]
fn an_announced_link_tells_its_neighbours_and_answers() {
    let host = Host::new();
    let peer = peer(&host);
    let _source = host.pod(1, &shared(), Announce::Now);
    let target = host.pod(2, &shared(), Announce::Later);
    for address in SHARED {
        assert!(resolve(&peer, address).contains(SOURCE));
    }
    let routes =
        |target: &Namespace| [target.output("ip route"), target.output("ip -6 route show proto static")];
    let before = routes(&target);
    host.detach(1);
    for _ in 0..2 {
        assert_eq!(announce(&target), AnnounceOutcome::Announced);
    }
    let since = Instant::now();
    while !SHARED.iter().all(|address| known(&peer, address).contains(TARGET)) {
        assert!(since.elapsed() < TIMEOUT, "{}", peer.output("ip neighbour show dev net1"));
    }
    for address in SHARED {
        assert!(resolve(&peer, address).contains(TARGET));
    }
    assert!(pings(&target, "10.9.0.7") && pings(&target, "fd00:9::7"));
    assert_eq!(routes(&target), before);
    let addresses = target.output("ip address show net1");
    assert!(!addresses.contains("NOARP") && !addresses.contains("tentative"), "{addresses}");
    assert_eq!(host.attach(&target, 2, &shared(), Announce::Later), AttachOutcome::Unchanged);
    // The link-local address answers too.
    let local = target.output("ip -6 -o address show net1 scope link");
    if let Some(address) = local.split_whitespace().nth(3).and_then(|net| net.split('/').next()) {
        assert!(pings(&peer, &format!("{address}%net1")), "{local}");
    }
}

#[test]
fn a_link_that_the_pod_has_moved_is_left_alone() {
    let host = Host::new();
    let target = host.pod(2, &shared(), Announce::Later);
    target.run("ip link set net1 down");
    target.run("ip link set net1 name net1-nic");
    assert_eq!(announce(&target), AnnounceOutcome::NoLink);
    // KubeVirt puts a link of another kind in its place.
    target.run("ip link add net1 type bridge");
    assert_eq!(announce(&target), AnnounceOutcome::NoLink);
    assert!(target.output("ip link show net1-nic").contains("NOARP"));
}

#[test]
fn only_addresses_that_the_link_still_has_are_announced() {
    let host = Host::new();
    let target = host.pod(2, &shared(), Announce::Later);
    target.run("ip address del fd00:9::9/64 dev net1");
    assert_eq!(announce(&target), AnnounceOutcome::Announced);
    let addresses = target.output("ip address show net1");
    assert!(addresses.contains("10.9.0.9/24") && !addresses.contains("fd00:9::9"), "{addresses}");
}
