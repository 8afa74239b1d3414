//! Observation of the kernel. Each test uses its own network namespace.
#![expect(clippy::unwrap_used, reason = "the functions around the tests are test code too")]

mod netns;

use std::{
    ffi::{OsStr, OsString},
    fmt::Write as _,
    fs,
    io::Write as _,
    os::unix::ffi::OsStrExt as _,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use link::{LinkChanges, Monitor};
use netns::Namespace;
use plan::nodenetwork::{AdminState, KernelState, Link, OperState};
use tokio::time::timeout;

const TIMEOUT: Duration = Duration::from_secs(10);

impl Namespace {
    /// Runs `ip` with these arguments in the namespace.
    fn ip(&self, arguments: &str) {
        self.ip_os(arguments.split_whitespace().map(OsString::from).collect());
    }

    fn ip_os(&self, arguments: Vec<OsString>) {
        let status = self.within(|| Command::new("ip").args(&arguments).status());
        let status = status.expect("run ip: install the package iproute2");
        assert!(status.success(), "ip {arguments:?}");
    }

    /// Runs many `ip` commands in one process.
    fn batch(&self, lines: &str) {
        let run = || {
            let mut ip = Command::new("ip").args(["-batch", "-"]).stdin(Stdio::piped()).spawn()?;
            ip.stdin.take().unwrap().write_all(lines.as_bytes())?;
            ip.wait()
        };
        assert!(self.within(run).unwrap().success());
    }

    fn monitor(&self) -> Monitor {
        Monitor::open_in(&self.0).unwrap()
    }
}

async fn changed(monitor: &Monitor) -> LinkChanges {
    timeout(TIMEOUT, monitor.changed()).await.expect("an event within ten seconds").unwrap()
}

/// Observes after each event until the condition holds: the kernel reaches a state in several steps.
async fn observe_until(monitor: &Monitor, condition: impl Fn(&KernelState) -> bool) -> KernelState {
    let observe = async {
        loop {
            let observed = monitor.observe().await.unwrap();
            if condition(&observed) {
                return observed;
            }
            changed(monitor).await;
        }
    };
    timeout(TIMEOUT, observe).await.expect("the condition holds within ten seconds")
}

fn find<'a>(observed: &'a KernelState, name: &str) -> Option<&'a Link> {
    observed.links.iter().find(|link| link.name == name)
}

fn nets(link: &Link) -> Vec<String> {
    let mut nets: Vec<String> = link.addresses.iter().map(|address| address.net.to_string()).collect();
    nets.retain(|net| !net.starts_with("fe80"));
    nets.sort();
    nets
}

#[tokio::test]
async fn a_new_namespace_has_a_loopback_and_no_default_route() {
    let observed = Namespace::new().monitor().observe().await.unwrap();
    let lo = find(&observed, "lo").unwrap();
    assert!(lo.loopback);
    assert_eq!((lo.admin, lo.kind.as_deref()), (AdminState::Down, None));
    assert_eq!(observed.default_routes, Vec::<u32>::new());
}

#[tokio::test]
async fn a_veth_pair_sends_events_and_is_observed_with_all_properties() {
    let ns = Namespace::new();
    let monitor = ns.monitor();
    ns.ip("link add br0 type bridge");
    ns.ip("link add eth0 address 02:00:00:00:00:0a mtu 1400 type veth peer name eth1");
    assert!(changed(&monitor).await.events > 0);

    ns.ip("link set eth0 master br0");
    ns.ip("link set eth0 alias patchbay/test");
    ns.ip("link set eth0 up");
    ns.ip("address add 10.1.2.3/24 dev eth0");
    ns.ip("address add 10.1.2.4/24 dev eth0");
    ns.ip("address add fd00::3/64 dev eth0");
    let observed =
        observe_until(&monitor, |observed| find(observed, "eth0").is_some_and(|link| nets(link).len() == 3))
            .await;

    let (eth0, br0) = (find(&observed, "eth0").unwrap(), find(&observed, "br0").unwrap());
    assert_eq!(eth0.kind.as_deref(), Some("veth"));
    assert_eq!(eth0.mac.unwrap().to_string(), "02:00:00:00:00:0a");
    assert_eq!(eth0.mtu, 1400);
    assert_eq!(eth0.alias, "patchbay/test");
    assert_eq!(eth0.master, Some(br0.index));
    assert_eq!((eth0.admin, eth0.oper), (AdminState::Up, OperState::LowerLayerDown));
    assert_eq!(nets(eth0), ["10.1.2.3/24", "10.1.2.4/24", "fd00::3/64"]);
    assert!(eth0.addresses.iter().all(|address| !address.temporary));
    assert_eq!((br0.kind.as_deref(), br0.admin), (Some("bridge"), AdminState::Down));

    ns.ip("link set eth1 up");
    observe_until(&monitor, |observed| find(observed, "eth0").is_some_and(|link| link.oper == OperState::Up))
        .await;
    ns.ip("link set eth0 nomaster");
    observe_until(&monitor, |observed| find(observed, "eth0").is_some_and(|link| link.master.is_none()))
        .await;
}

#[tokio::test]
async fn only_default_routes_are_observed_of_both_families() {
    let ns = Namespace::new();
    let monitor = ns.monitor();
    for line in [
        "link add eth0 type veth peer name peer0",
        "link add eth1 type veth peer name peer1",
        "link add eth2 type veth peer name peer2",
        "address add 10.0.0.2/24 dev eth0",
        "address add fd00::2/64 dev eth1 nodad",
        "link set eth0 up",
        "link set eth1 up",
        "link set eth2 up",
        "link set peer0 up",
        "link set peer1 up",
        "link set peer2 up",
        "route add default dev eth2 table 100",
        "route add 192.168.0.0/16 dev eth2",
        "route add blackhole default metric 4000",
    ] {
        ns.ip(line);
    }
    assert_eq!(monitor.observe().await.unwrap().default_routes, Vec::<u32>::new());

    ns.ip("route add default via 10.0.0.1 dev eth0");
    let observed = observe_until(&monitor, |observed| !observed.default_routes.is_empty()).await;
    let (eth0, eth1) = (find(&observed, "eth0").unwrap().index, find(&observed, "eth1").unwrap().index);
    assert_eq!(observed.default_routes, [eth0]);

    ns.ip("-6 route add default via fd00::1 dev eth1");
    let observed = observe_until(&monitor, |observed| observed.default_routes.len() == 2).await;
    assert_eq!(observed.default_routes, [eth0, eth1]);

    ns.ip("route del default via 10.0.0.1 dev eth0");
    let observed = observe_until(&monitor, |observed| observed.default_routes.len() == 1).await;
    assert_eq!(observed.default_routes, [eth1]);
    ns.ip("route add default nexthop via 10.0.0.1 dev eth0 nexthop via 192.168.0.1 dev eth2 onlink");
    observe_until(&monitor, |observed| observed.default_routes.len() == 3).await;
}

/// In this mode a route contains only the ID of its nexthop, and a nexthop can change without a route event.
#[tokio::test]
async fn a_default_route_with_only_a_nexthop_id_resolves_to_its_links() {
    let ns = Namespace::new();
    let monitor = ns.monitor();
    let mode = "/proc/sys/net/ipv4/nexthop_compat_mode";
    ns.within(|| fs::write(mode, "0")).unwrap();
    for line in [
        "link add eth0 type veth peer name peer0",
        "link add eth1 type veth peer name peer1",
        "address add 10.0.0.2/24 dev eth0",
        "address add 10.0.1.2/24 dev eth1",
        "link set eth0 up",
        "link set eth1 up",
        "link set peer0 up",
        "link set peer1 up",
        "nexthop add id 1 via 10.0.0.1 dev eth0",
        "nexthop add id 2 via 10.0.1.1 dev eth1",
        "nexthop add id 3 group 1/2",
        "route add default nhid 1",
    ] {
        ns.ip(line);
    }
    let observed = observe_until(&monitor, |observed| !observed.default_routes.is_empty()).await;
    let (eth0, eth1) = (find(&observed, "eth0").unwrap().index, find(&observed, "eth1").unwrap().index);
    assert_eq!(observed.default_routes, [eth0]);
    ns.ip("nexthop replace id 1 via 10.0.1.1 dev eth1");
    observe_until(&monitor, |observed| observed.default_routes == [eth1]).await;
    ns.ip("nexthop replace id 1 via 10.0.0.1 dev eth0");
    ns.ip("route replace default nhid 3");
    observe_until(&monitor, |observed| observed.default_routes == [eth0, eth1]).await;
}

#[tokio::test]
async fn routes_to_addresses_use_the_links_of_all_their_paths() {
    let ns = Namespace::new();
    let monitor = ns.monitor();
    ns.within(|| fs::write("/proc/sys/net/ipv4/nexthop_compat_mode", "0")).unwrap();
    for line in [
        "link set lo up",
        "address add 10.9.0.1/32 dev lo",
        "link add eth0 type veth peer name peer0",
        "link add eth1 type veth peer name peer1",
        "link add eth2 type veth peer name peer2",
        "link set eth0 up",
        "link set eth1 up",
        "link set eth2 up",
        "link set peer0 up",
        "link set peer1 up",
        "link set peer2 up",
        "address add fd00::1/64 dev eth0 nodad",
        "address add fd01::1/64 dev eth1 nodad",
        // As with BGP unnumbered: gateways are link-local addresses of the other family.
        "route add 10.9.0.2/32 nexthop via inet6 fe80::2 dev eth0 nexthop via inet6 fe80::2 dev eth1",
        "route add 10.9.0.3/32 via inet6 fe80::2 dev eth2",
        "-6 route add fd09::2/128 nexthop via fd00::2 dev eth0 nexthop via fd01::2 dev eth1",
        "nexthop add id 1 via fe80::2 dev eth1",
        "nexthop add id 2 via fe80::2 dev eth2",
        "nexthop add id 3 group 1/2",
        "route add 10.9.0.4/32 nhid 3",
        "-6 route add fd09::4/128 nhid 3",
        "route add unreachable 10.9.0.5/32",
    ] {
        ns.ip(line);
    }
    let observed = monitor.observe().await.unwrap();
    for (addresses, names) in [
        (&["10.9.0.2"][..], &["eth0", "eth1"][..]),
        (&["10.9.0.3"], &["eth2"]),
        (&["10.9.0.3", "10.9.0.2", "10.9.0.6"], &["eth0", "eth1", "eth2"]),
        (&["fd09::2"], &["eth0", "eth1"]),
        (&["10.9.0.4"], &["eth1", "eth2"]),
        (&["fd09::4"], &["eth1", "eth2"]),
        // The own address, an unreachable route, and no route.
        (&["10.9.0.1", "10.9.0.5", "10.9.0.6", "fd09::6"], &[]),
    ] {
        let targets = addresses.iter().map(|address| address.parse().unwrap()).collect();
        let links = monitor.route_links(targets).await.unwrap();
        let mut found: Vec<&str> = observed
            .links
            .iter()
            .filter(|link| links.contains(&link.index))
            .map(|link| link.name.as_str())
            .collect();
        found.sort_unstable();
        assert_eq!(found, names, "{addresses:?}");
    }
}

#[tokio::test]
async fn a_deleted_link_sends_an_event_and_is_no_longer_observed() {
    let ns = Namespace::new();
    ns.ip("link add eth0 type veth peer name eth1");
    let monitor = ns.monitor();
    assert!(find(&monitor.observe().await.unwrap(), "eth0").is_some());
    ns.ip("link del eth0");
    let observed = observe_until(&monitor, |observed| find(observed, "eth0").is_none()).await;
    assert!(find(&observed, "eth1").is_none());
}

#[tokio::test]
async fn other_routes_do_not_count_as_changes() {
    let ns = Namespace::new();
    ns.ip("link set lo up");
    let monitor = ns.monitor();
    while timeout(Duration::from_millis(50), monitor.changed()).await.is_ok() {}
    ns.ip("route add 192.168.0.0/16 dev lo");
    ns.ip("-6 route add fd00:1::/64 dev lo");
    ns.ip("route del 192.168.0.0/16 dev lo");
    assert!(timeout(Duration::from_millis(200), monitor.changed()).await.is_err());
}

#[tokio::test]
async fn links_with_names_and_aliases_that_are_not_utf8_are_observed() {
    let ns = Namespace::new();
    ns.ip("link add eth0 type veth peer name eth1");
    let arguments = |parts: &[&[u8]]| parts.iter().map(|part| OsStr::from_bytes(part).to_owned()).collect();
    ns.ip_os(arguments(&[b"link", b"set", b"eth0", b"alias", b"patchbay/\xff\xfe\n"]));
    ns.ip_os(arguments(&[b"link", b"set", b"eth1", b"name", b"\xff\x1b[31m\\"]));
    let observed = ns.monitor().observe().await.unwrap();
    assert_eq!(find(&observed, "eth0").unwrap().alias, "patchbay/\\xff\\xfe\\x0a");
    assert!(find(&observed, "\\xff\\x1b[31m\\x5c").is_some(), "{observed:?}");
}

#[tokio::test]
async fn an_overflow_of_the_event_queue_is_reported_as_a_change() {
    let ns = Namespace::new();
    ns.ip("link add eth0 type veth peer name eth1");
    let monitor = ns.monitor();
    let mut lines = String::new();
    for mtu in 0..2000 {
        writeln!(lines, "link set eth0 mtu {}", 1000 + mtu % 400).unwrap();
    }
    ns.batch(&lines);

    let first = changed(&monitor).await;
    assert!(first.overruns > 0, "{first:?}");
    ns.ip("link add eth2 type veth peer name eth3");
    observe_until(&monitor, |observed| find(observed, "eth2").is_some()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn three_hundred_links_are_observed_completely_while_others_change() {
    let ns = Namespace::new();
    let mut lines = String::new();
    for index in 0..150 {
        writeln!(lines, "link add a{index} type veth peer name b{index}").unwrap();
        writeln!(lines, "address add 10.0.{index}.1/24 dev a{index}").unwrap();
    }
    ns.batch(&lines);
    let monitor = ns.monitor();

    let mut churn = String::new();
    for _ in 0..20 {
        churn += "link add x type veth peer name y\nlink del x\n";
    }
    thread::scope(|scope| {
        let churn = scope.spawn(|| ns.batch(&churn));
        tokio::task::block_in_place(|| {
            while !churn.is_finished() {
                let observed = tokio::runtime::Handle::current().block_on(monitor.observe()).unwrap();
                let steady = observed.links.iter().filter(|link| link.name.starts_with(['a', 'b']));
                assert_eq!(steady.count(), 300);
            }
        });
    });
    let observed = monitor.observe().await.unwrap();
    assert_eq!(observed.links.len(), 301);
    assert_eq!(observed.links.iter().filter(|link| nets(link).len() == 1).count(), 150);
}

#[tokio::test]
async fn a_cancelled_observation_does_not_disturb_the_next() {
    let ns = Namespace::new();
    ns.ip("link add eth0 type veth peer name eth1");
    let monitor = ns.monitor();
    for _ in 0..20 {
        let cancelled = timeout(Duration::ZERO, monitor.observe()).await;
        drop(cancelled);
    }
    assert_eq!(monitor.observe().await.unwrap().links.len(), 3);
}

#[tokio::test]
async fn a_monitor_does_not_see_other_namespaces() {
    let (one, other) = (Namespace::new(), Namespace::new());
    let monitor = one.monitor();
    other.ip("link add eth0 type veth peer name eth1");
    assert!(timeout(Duration::from_millis(200), monitor.changed()).await.is_err());
    assert_eq!(monitor.observe().await.unwrap().links.len(), 1);
}
