//! Default routes of simulated pods. Each test uses its own network namespaces.
#![expect(clippy::unwrap_used, reason = "the functions around the tests are test code too")]

mod netns;
mod pod;

use std::net::IpAddr;

use link::{
    DefaultRoute, Error, RestoreOutcome, SkipReason, default_routes_in, delete_in, remove_default_routes,
    replace_default_routes, restore_default_routes,
};
use pod::Namespace;

/// A pod with `eth0` and `net1`, and the host that it is connected to.
struct Pod {
    host: Namespace,
    ns: Namespace,
}

impl Pod {
    fn new() -> Self {
        let pod = Self { host: Namespace::new(), ns: Namespace::new() };
        pod.ns.ip("link set lo up");
        pod.add("eth0", 1);
        pod.add("net1", 2);
        pod
    }

    /// Adds a link with addresses in the subnets of this number. Returns its index.
    fn add(&self, name: &str, number: u8) -> u32 {
        self.host.pair(&format!("veth{number}"), &self.ns, name);
        self.host.ip(&format!("link set veth{number} up"));
        self.ns.ip(&format!("link set {name} up"));
        self.ns.ip(&format!("address add 10.0.{number}.2/24 dev {name}"));
        self.ns.ip(&format!("address add fd00:{number}::2/64 dev {name} nodad"));
        self.index(name)
    }

    fn index(&self, name: &str) -> u32 {
        self.host.link_of(&self.ns, name).index
    }

    /// The default routes as `ip` prints them.
    fn routes(&self, family: &str) -> Vec<String> {
        let text = self.ns.ip(&format!("-{family} route show default"));
        let lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
        lines.map(|line| line.trim_end_matches(" pref medium").to_owned()).collect()
    }

    fn replace(&self, gateways: &[&str]) -> Result<Vec<DefaultRoute>, Error> {
        self.replace_by("net1", gateways)
    }

    fn replace_by(&self, name: &str, gateways: &[&str]) -> Result<Vec<DefaultRoute>, Error> {
        let gateways: Vec<IpAddr> = gateways.iter().map(|gateway| gateway.parse().unwrap()).collect();
        replace_default_routes(&self.ns.0, self.index(name), &gateways)
    }

    fn restore(&self, routes: &[DefaultRoute], unplugged: u32) -> RestoreOutcome {
        // As the journal keeps them.
        let text = serde_json::to_string(routes).unwrap();
        let routes: Vec<DefaultRoute> = serde_json::from_str(&text).unwrap();
        restore_default_routes(&self.ns.0, &routes, unplugged).unwrap()
    }
}

#[test]
fn an_unplug_brings_the_replaced_routes_back() {
    let pod = Pod::new();
    pod.ns.ip("route add default via 10.0.1.1 dev eth0");
    pod.ns.ip("-6 route add default via fd00:1::1 dev eth0");
    let before = ["4", "6"].map(|family| pod.routes(family));
    let removed = pod.replace(&["10.0.2.1", "fd00:2::1"]).unwrap();
    assert_eq!(removed.len(), 2, "{removed:?}");
    assert_eq!(pod.routes("4"), ["default via 10.0.2.1 dev net1"]);
    assert_eq!(pod.routes("6"), ["default via fd00:2::1 dev net1 metric 1024"]);
    let net1 = pod.index("net1");
    let outcome = pod.restore(&removed, net1);
    assert_eq!((outcome.restored.len(), outcome.skipped), (2, vec![]));
    assert_eq!(["4", "6"].map(|family| pod.routes(family)), before);
    // Once more, and after the link is gone.
    assert_eq!(pod.restore(&removed, net1).restored.len(), 2);
    delete_in(&pod.ns.0, net1).unwrap();
    assert_eq!(pod.restore(&removed, net1).restored.len(), 2);
    assert_eq!(["4", "6"].map(|family| pod.routes(family)), before);
}

#[test]
fn routes_come_back_after_their_replacement_vanished_with_its_link() {
    let pod = Pod::new();
    pod.ns.ip("route add default via 10.0.1.1 dev eth0");
    let removed = pod.replace(&["10.0.2.1"]).unwrap();
    let net1 = pod.index("net1");
    delete_in(&pod.ns.0, net1).unwrap();
    assert_eq!(pod.routes("4"), [""; 0]);
    pod.restore(&removed, net1);
    assert_eq!(pod.routes("4"), ["default via 10.0.1.1 dev eth0"]);
}

#[test]
fn the_families_are_apart() {
    let pod = Pod::new();
    pod.ns.ip("route add default via 10.0.1.1 dev eth0");
    pod.ns.ip("-6 route add default via fd00:1::1 dev eth0");
    let removed = pod.replace(&["10.0.2.1"]).unwrap();
    assert_eq!(removed.iter().map(|route| route.ipv6).collect::<Vec<_>>(), [false]);
    assert_eq!(pod.routes("6"), ["default via fd00:1::1 dev eth0 metric 1024"]);
    assert_eq!(pod.replace(&[]).unwrap(), []);
    assert_eq!(pod.routes("4"), ["default via 10.0.2.1 dev net1"]);
}

#[test]
fn all_routes_of_all_other_links_are_replaced_and_restored_with_their_attributes() {
    let pod = Pod::new();
    pod.add("eth1", 3);
    for route in [
        "default via 10.0.3.1 dev eth1 metric 50",
        "default proto static metric 100 nexthop via 10.0.1.1 dev eth0 weight 1 nexthop via 10.0.3.1 dev eth1 weight 5",
        "default via 169.254.1.1 dev eth0 proto static src 10.0.1.2 metric 200 mtu 1300 onlink",
        "default dev eth1 scope link metric 300",
    ] {
        pod.ns.ip(&format!("route add {route}"));
    }
    for route in [
        "default via fe80::1 dev eth0 metric 10",
        "default metric 20 nexthop via fd00:1::1 dev eth0 nexthop via fd00:3::1 dev eth1",
    ] {
        pod.ns.ip(&format!("-6 route add {route}"));
    }
    let before = ["4", "6"].map(|family| pod.routes(family));
    let removed = pod.replace(&["10.0.2.1", "fd00:2::1"]).unwrap();
    assert_eq!(removed.len(), 6, "{removed:#?}");
    assert_eq!(pod.routes("4"), ["default via 10.0.2.1 dev net1"]);
    assert_eq!(pod.routes("6"), ["default via fd00:2::1 dev net1 metric 1024"]);
    let outcome = pod.restore(&removed, pod.index("net1"));
    assert_eq!(outcome.skipped, []);
    assert_eq!(["4", "6"].map(|family| pod.routes(family)), before);
}

#[test]
fn a_route_through_a_nexthop_object_comes_back() {
    let pod = Pod::new();
    pod.ns.ip("nexthop add id 12 via 10.0.1.1 dev eth0");
    pod.ns.ip("route add default nhid 12");
    let before = pod.routes("4");
    let removed = pod.replace(&["10.0.2.1"]).unwrap();
    assert_eq!(pod.routes("4"), ["default via 10.0.2.1 dev net1"]);
    pod.restore(&removed, pod.index("net1"));
    assert_eq!(pod.routes("4"), before);
}

#[test]
fn equal_metrics_of_ipv6_routes_become_no_multipath_route() {
    let pod = Pod::new();
    pod.add("eth1", 3);
    pod.ns.ip("-6 route add default via fd00:1::1 dev eth0");
    pod.ns.ip("-6 route append default via fd00:3::1 dev eth1");
    let before = pod.routes("6");
    let removed = pod.replace(&["fd00:2::1"]).unwrap();
    assert_eq!(pod.routes("6"), ["default via fd00:2::1 dev net1 metric 1024"]);
    pod.restore(&removed, pod.index("net1"));
    assert_eq!(pod.routes("6"), before);
}

#[test]
fn a_route_that_the_plugin_set_on_the_link_is_replaced_and_not_recorded() {
    let pod = Pod::new();
    pod.ns.ip("route add default via 10.0.2.254 dev net1");
    pod.ns.ip("-6 route add default via fd00:2::1 dev net1 proto static");
    assert_eq!(pod.replace(&["10.0.2.1", "fd00:2::1"]).unwrap(), []);
    assert_eq!(pod.routes("4"), ["default via 10.0.2.1 dev net1"]);
    // The plugin set the requested one.
    assert_eq!(pod.routes("6"), ["default via fd00:2::1 dev net1 proto static metric 1024"]);
}

#[test]
fn replacing_twice_changes_nothing() {
    let pod = Pod::new();
    pod.ns.ip("route add default via 10.0.1.1 dev eth0");
    assert_eq!(pod.replace(&["10.0.2.1"]).unwrap().len(), 1);
    assert_eq!(pod.replace(&["10.0.2.1"]).unwrap(), []);
    assert_eq!(pod.routes("4"), ["default via 10.0.2.1 dev net1"]);
}

#[test]
fn a_gateway_that_the_kernel_rejects_changes_nothing() {
    let pod = Pod::new();
    pod.ns.ip("route add default via 10.0.1.1 dev eth0");
    pod.ns.ip("-6 route add default via fd00:1::1 dev eth0");
    let before = ["4", "6"].map(|family| pod.routes(family));
    // The IPv6 gateway would be accepted.
    let error = pod.replace(&["fd00:2::1", "192.0.2.1"]).unwrap_err();
    assert!(matches!(error, Error::Rejected { .. }), "{error:?}");
    let error = pod.replace(&["10.0.2.1", "10.0.2.3"]).unwrap_err();
    assert!(matches!(error, Error::SeveralGateways { family: "IPv4" }), "{error:?}");
    assert_eq!(["4", "6"].map(|family| pod.routes(family)), before);
}

#[test]
fn a_route_whose_link_is_gone_is_skipped() {
    let pod = Pod::new();
    pod.add("eth1", 3);
    pod.ns.ip("route add default via 10.0.1.1 dev eth0");
    pod.ns.ip("route add default via 10.0.3.1 dev eth1 metric 50");
    let removed = pod.replace(&["10.0.2.1"]).unwrap();
    let eth1 = pod.index("eth1");
    delete_in(&pod.ns.0, eth1).unwrap();
    let outcome = pod.restore(&removed, pod.index("net1"));
    assert_eq!(pod.routes("4"), ["default via 10.0.1.1 dev eth0"]);
    let reasons: Vec<_> = outcome.skipped.into_iter().map(|skipped| skipped.reason).collect();
    assert_eq!(reasons, [SkipReason::LinkGone { link: eth1 }]);
}

#[test]
fn a_route_that_the_kernel_rejects_is_skipped() {
    let pod = Pod::new();
    pod.ns.ip("route add default via 10.0.1.1 dev eth0");
    let removed = pod.replace(&["10.0.2.1"]).unwrap();
    pod.ns.ip("address flush dev eth0");
    let outcome = pod.restore(&removed, pod.index("net1"));
    let [skipped] = &outcome.skipped[..] else { panic!("{outcome:?}") };
    assert!(matches!(skipped.reason, SkipReason::Rejected { .. }), "{outcome:?}");
    assert_eq!(pod.routes("4"), [""; 0]);
}

#[test]
fn another_default_route_wins_over_the_recorded_ones() {
    let pod = Pod::new();
    let net2 = pod.add("net2", 3);
    pod.ns.ip("route add default via 10.0.1.1 dev eth0");
    pod.ns.ip("-6 route add default via fd00:1::1 dev eth0");
    let removed = pod.replace(&["10.0.2.1", "fd00:2::1"]).unwrap();
    // A later attachment takes over IPv4 only.
    let later = pod.replace_by("net2", &["10.0.3.1"]).unwrap();
    let net1 = pod.index("net1");
    let outcome = pod.restore(&removed, net1);
    assert_eq!(pod.routes("4"), ["default via 10.0.3.1 dev net2"]);
    assert_eq!(pod.routes("6"), ["default via fd00:1::1 dev eth0 metric 1024"]);
    let [skipped] = &outcome.skipped[..] else { panic!("{outcome:?}") };
    assert_eq!(skipped.reason, SkipReason::OtherDefaultRoute { links: vec![net2] });
    delete_in(&pod.ns.0, net1).unwrap();
    // The caller moves the skipped route to the record of the later attachment.
    let routes: Vec<DefaultRoute> = later.into_iter().chain([skipped.route.clone()]).collect();
    let outcome = pod.restore(&routes, net2);
    assert_eq!(pod.routes("4"), ["default via 10.0.1.1 dev eth0"]);
    assert_eq!(outcome.restored, std::slice::from_ref(&skipped.route));
}

#[test]
fn advertised_routes_stay_and_lose_to_the_requested_one() {
    let pod = Pod::new();
    pod.ns.ip("-6 route add default via fd00:1::1 dev eth0 proto ra metric 512");
    pod.ns.ip("-6 route add default via fd00:1::9 dev eth0 metric 600");
    let removed = pod.replace(&["fd00:2::1"]).unwrap();
    assert_eq!(removed.iter().map(|route| route.metric).collect::<Vec<_>>(), [600]);
    let advertised = "default via fd00:1::1 dev eth0 proto ra metric 512";
    assert_eq!(pod.routes("6"), ["default via fd00:2::1 dev net1 metric 511", advertised]);
    let path = pod.ns.ip("-6 route get 2001:db8::1");
    assert!(path.contains("dev net1"), "{path}");
    assert_eq!(pod.replace(&["fd00:2::1"]).unwrap(), []);
    pod.restore(&removed, pod.index("net1"));
    assert_eq!(pod.routes("6"), [advertised, "default via fd00:1::9 dev eth0 metric 600"]);
}

#[test]
fn routes_of_other_tables_and_other_prefixes_stay() {
    let pod = Pod::new();
    pod.ns.ip("route add default via 10.0.1.1 dev eth0 table 77");
    pod.ns.ip("route add 0.0.0.0/1 via 10.0.1.1 dev eth0");
    pod.ns.ip("-6 route add unreachable default metric 4000");
    assert_eq!(pod.replace(&["10.0.2.1", "fd00:2::1"]).unwrap(), []);
    assert_eq!(default_routes_in(&pod.ns.0).unwrap().len(), 2);
    assert!(pod.ns.ip("route show table 77").contains("10.0.1.1"));
    assert!(pod.ns.ip("route").contains("0.0.0.0/1"));
}

#[test]
fn only_the_routes_of_one_link_and_family_are_removed() {
    let pod = Pod::new();
    pod.ns.ip("route add default via 10.0.1.1 dev eth0");
    pod.ns.ip("route add default via 10.0.2.1 dev net1 metric 5");
    pod.ns.ip("-6 route add default via fd00:2::1 dev net1 metric 5");
    let remove = |ipv4, ipv6| {
        let removed = remove_default_routes(&pod.ns.0, pod.index("net1"), ipv4, ipv6).unwrap();
        removed.iter().map(|route| route.ipv6).collect::<Vec<_>>()
    };
    assert_eq!(remove(false, false), [false; 0]);
    assert_eq!(remove(true, false), [false]);
    assert_eq!(pod.routes("4"), ["default via 10.0.1.1 dev eth0"]);
    assert_eq!(pod.routes("6"), ["default via fd00:2::1 dev net1 metric 5"]);
    assert_eq!(remove(true, true), [true]);
    assert_eq!(pod.routes("4"), ["default via 10.0.1.1 dev eth0"]);
    assert_eq!(pod.routes("6"), [""; 0]);
}

#[test]
fn an_invalid_record_changes_nothing() {
    let pod = Pod::new();
    pod.ns.ip("route add default via 10.0.1.1 dev eth0");
    let record = serde_json::to_value(&pod.replace(&["10.0.2.1"]).unwrap()[0]).unwrap();
    let net1 = pod.index("net1");
    let eth0 = pod.index("eth0");
    // A route to a subnet, not hexadecimal, not ASCII, not a whole message.
    for request in ["02180000fe030001000000000800040001000000", "zz", "é", "0", "", "0200"] {
        let mut changed = record.clone();
        changed["request"] = request.into();
        let route: DefaultRoute = serde_json::from_value(changed).unwrap();
        let outcome = restore_default_routes(&pod.ns.0, &[route], net1).unwrap();
        assert_eq!(outcome.skipped[0].reason, SkipReason::Invalid, "{request}");
        assert_eq!(pod.routes("4"), [""; 0]);
    }
    let route: DefaultRoute = serde_json::from_value(record).unwrap();
    assert_eq!(route.links, [eth0]);
    assert_eq!(pod.restore(&[route], net1).skipped, []);
}
