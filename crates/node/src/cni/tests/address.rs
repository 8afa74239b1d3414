//! Addresses through the socket: for `patchbay-bridge`, and for other plugins that delegate to `patchbay-ipam`.

use std::collections::BTreeMap;
use std::io::Write as _;

use api::ipam::IpamSpec as Spec;
use plan::ipam::Pool;

use super::*;

fn spec(text: Value) -> Spec {
    serde_json::from_value(text).unwrap()
}

impl TestHost {
    /// Sets `spec.ipam` of the network.
    fn set_ipam(&self, ipam: &Spec) {
        let pool = Pool::new("blue", ipam, |family| family.block_length(ipam), true);
        self.networks.send_modify(|networks| {
            Arc::make_mut(networks).by_name.get_mut("blue").unwrap().ipam = Some(Arc::new(pool));
        });
    }
}

fn dual() -> Value {
    json!({
        "subnets": ["10.1.0.0/24", "fd01::/64"], "gateways": ["10.1.0.1", "fd01::1"],
        "routes": [{"dst": "10.9.0.0/16"}, {"dst": "fd09::/64", "gw": "fd01::9"}],
    })
}

/// A call of `patchbay-ipam` by another plugin.
fn delegated(command: &str, id: &str, changes: Value) -> Request {
    let mut config = json!({
        "cniVersion": "1.1.0", "name": "theirs", "type": "macvlan",
        "ipam": {"type": "patchbay-ipam", "network": "blue"},
    });
    for (key, value) in changes.as_object().into_iter().flatten() {
        config[key] = value.clone();
    }
    let (plugin, stdin) = ("patchbay-ipam".to_owned(), config.to_string().into_bytes());
    Request { plugin, stdin, ..request(command, id, json!({})) }
}

const OURS: &str = r#"{"ipam": {"type": "patchbay-ipam"}}"#;

fn ours() -> Value {
    serde_json::from_str(OURS).unwrap()
}

#[test]
fn a_pod_gets_addresses_and_routes_and_del_releases_them() {
    on_server("addresses", async |host| {
        host.set_ipam(&spec(dual()));
        host.ipam.hold("uid-blue", "10.1.0.0/28");
        host.ipam.hold("uid-blue", "fd01::/120");
        let pod = Namespace::new();
        let result = host.done("ADD", "c1", &pod, ours()).await;
        assert_eq!(
            result["ips"],
            json!([
                {"address": "10.1.0.2/24", "gateway": "10.1.0.1", "interface": 1},
                {"address": "fd01::2/64", "gateway": "fd01::1", "interface": 1},
            ])
        );
        assert_eq!(
            result["routes"],
            json!([{"dst": "10.9.0.0/16", "gw": "10.1.0.1"}, {"dst": "fd09::/64", "gw": "fd01::9"}])
        );
        let shown = pod.ip("addr show net1").unwrap();
        assert!(shown.contains("10.1.0.2/24") && shown.contains("fd01::2/64"), "{shown}");
        assert!(pod.ip("route").unwrap().contains("10.9.0.0/16 via 10.1.0.1"));
        assert!(pod.ip("-6 route").unwrap().contains("fd09::/64 via fd01::9"));
        // A repeated ADD returns the same result, and CHECK agrees.
        assert_eq!(host.done("ADD", "c1", &pod, ours()).await, result);
        let mut check = ours();
        check["prevResult"] = result.clone();
        host.done("CHECK", "c1", &pod, check.clone()).await;
        pod.ip("addr del 10.1.0.2/24 dev net1").unwrap();
        assert_eq!(host.refused("CHECK", "c1", &pod, check).await.0, 100);

        let other = Namespace::new();
        let second = host.done("ADD", "c2", &other, ours()).await;
        assert_eq!(second["ips"][0]["address"], "10.1.0.3/24");
        for _ in 0..2 {
            host.done("DEL", "c1", &pod, ours()).await;
        }
        assert_eq!(host.ipam.grant(&key("c1")), None);
        assert!(host.ipam.grant(&key("c2")).is_some());
    });
}

/// The report is made with the ledger locked, and an ADD asks with the ledger locked whether the network is open, so a report
/// of zero that follows the deletion stays true.
#[test]
fn a_network_that_is_being_deleted_allocates_nothing_and_its_leases_are_reported_until_they_are_gone() {
    on_server("closed", async |host| {
        host.set_ipam(&spec(dual()));
        host.ipam.hold("uid-blue", "10.1.0.0/28");
        host.ipam.hold("uid-blue", "fd01::/120");
        let pod = Namespace::new();
        let result = host.done("ADD", "c1", &pod, ours()).await;
        host.networks.send_modify(|networks| {
            Arc::make_mut(networks).by_name.get_mut("blue").unwrap().closed = true;
        });
        for (code, error) in [
            host.call(&delegated("ADD", "c2", json!({})), None).await,
            host.call(&request("ADD", "c3", ours()), Some(&Namespace::new())).await,
        ] {
            assert_eq!(code, 1, "{error}");
            assert!(error["code"] == 11 && error["msg"].to_string().contains("is being deleted"), "{error}");
        }
        // The same attachment gets the same addresses.
        assert_eq!(host.done("ADD", "c1", &pod, ours()).await, result);

        let closed = || BTreeMap::from([("uid-blue".to_owned(), "blue".to_owned())]);
        host.ipam.record_complete();
        assert!(host.ipam.close(closed()) && !host.ipam.close(closed()), "it is new once");
        let report = host.ipam.lease_report();
        let interfaces = || report.borrow().as_ref().map(|current| current.report.closed[0].interfaces);
        assert_eq!(interfaces(), Some(1));
        assert!(host.ipam.is_close_pending());
        host.done("DEL", "c1", &pod, ours()).await;
        assert_eq!(interfaces(), Some(0));
        assert!(!host.ipam.is_close_pending());
    });
}

#[test]
fn a_direct_attach_journals_its_lease_and_detach_releases_it() {
    on_server("direct-addresses", async |host| {
        host.set_ipam(&spec(dual()));
        host.ipam.hold("uid-blue", "10.1.0.0/28");
        host.ipam.hold("uid-blue", "fd01::/120");
        let (pod, id) = (Namespace::new(), AttachmentId::new("c1", "net1").unwrap());
        let requested = ["10.1.0.9/32".parse().unwrap()];
        let request = AttachRequest { addresses: Some(&requested), ..direct(&id, &pod, &|| Ok(())) };
        let attached = host.attacher.attach(&request).unwrap();
        let nets = attached.allocated.addresses.iter().map(|info| info.net.to_string());
        assert_eq!(nets.collect::<Vec<_>>(), ["10.1.0.9/24", "fd01::2/64"]);
        assert_eq!(attached.allocated.routes.len(), 2);
        let journal = fs::read_to_string(host.paths.state_dir.join("ipam/journal")).unwrap();
        assert!(journal.lines().last().unwrap().contains(r#""container":"c1""#), "{journal}");
        assert_eq!(host.attacher.attach(&request).unwrap(), attached);
        // ADD of the same interface returns the same addresses.
        let added = host.done("ADD", "c1", &pod, ours()).await;
        assert_eq!(added["ips"][0]["address"], "10.1.0.9/24");
        host.attacher.detach(&id, AttachmentScope::Interface).unwrap();
        assert_eq!((host.ipam.grant(&key("c1")), pod.links()), (None, 1));
    });
}

#[test]
fn a_repeated_add_and_check_agree_with_the_first_add_after_the_subnet_is_removed() {
    on_server("drained", async |host| {
        host.set_ipam(&spec(dual()));
        host.ipam.hold("uid-blue", "10.1.0.0/28");
        host.ipam.hold("uid-blue", "fd01::/120");
        let pod = Namespace::new();
        let result = host.done("ADD", "c1", &pod, ours()).await;
        let (_, theirs) = host.call(&delegated("ADD", "c2", json!({})), None).await;
        assert_eq!(theirs["ips"][0], json!({"address": "10.1.0.3/24", "gateway": "10.1.0.1"}));
        for subnets in [json!(["10.7.0.0/16", "fd07::/64"]), json!(["10.1.0.0/23"]), json!(["10.7.0.0/16"])] {
            let mut now = dual();
            (now["subnets"], now["gateways"]) = (subnets, json!([]));
            host.set_ipam(&spec(now));
            assert_eq!(host.done("ADD", "c1", &pod, ours()).await, result);
            assert_eq!(host.call(&delegated("ADD", "c2", json!({})), None).await, (0, theirs.clone()));
            let mut check = ours();
            check["prevResult"] = result.clone();
            host.done("CHECK", "c1", &pod, check.clone()).await;
            let same = delegated("CHECK", "c2", json!({"prevResult": theirs}));
            assert_eq!(host.call(&same, None).await, (0, Value::Null));
            check["prevResult"]["ips"][0]["address"] = json!("10.1.0.2/32");
            let (code, msg) = host.refused("CHECK", "c1", &pod, check).await;
            assert!(code == 100 && msg.contains("was given 10.1.0.2/24"), "{code} {msg}");
        }
    });
}

fn key(id: &str) -> plan::ipam::AttachmentKey {
    plan::ipam::AttachmentKey { container: id.to_owned(), interface: "net1".to_owned() }
}

#[test]
fn other_plugins_get_addresses_in_the_result_format_of_their_version() {
    on_server("delegated", async |host| {
        host.set_ipam(&spec(dual()));
        // The bridge need not be on this node.
        host.set("red", NetworkState::NotSelected);
        host.ipam.hold("uid-blue", "10.1.0.0/28");
        host.ipam.hold("uid-blue", "fd01::/120");
        for (number, version) in wire::CNI_VERSIONS.iter().enumerate() {
            let id = format!("c{number}");
            let add = delegated("ADD", &id, json!({"cniVersion": version}));
            let (exit, result) = host.call(&add, None).await;
            assert_eq!((exit, &result["cniVersion"]), (0, &json!(version)), "{result}");
            let four = format!("10.1.0.{}/24", number + 2);
            let address = if number < 2 { &result["ip4"]["ip"] } else { &result["ips"][0]["address"] };
            assert_eq!(address, &json!(four), "{result}");
            assert!(result.get("interfaces").is_none());
            let lease = host.ipam.grant(&key(&id)).unwrap().lease;
            assert_eq!((lease.addresses.len(), lease.config.as_str()), (2, "theirs"));
        }
        let (_, result) = host.call(&delegated("ADD", "c6", json!({})), None).await;
        let check = delegated("CHECK", "c6", json!({"prevResult": result}));
        assert_eq!(host.call(&check, None).await, (0, Value::Null));
        let check = delegated("CHECK", "c99", json!({"prevResult": result}));
        assert_eq!(host.call(&check, None).await.1["code"], 100);
        let valid = json!({"cni.dev/valid-attachments": [{"containerID": "c3", "ifname": "net1"}]});
        assert_eq!(host.call(&delegated("GC", "", valid), None).await.0, 0);
        let left = (0..7).filter(|number| host.ipam.grant(&key(&format!("c{number}"))).is_some());
        assert_eq!(left.collect::<Vec<_>>(), [3]);
        assert_eq!(host.call(&delegated("STATUS", "", json!({})), None).await, (0, Value::Null));
        assert_eq!(host.call(&delegated("DEL", "c3", json!({"ipam": null})), None).await.0, 0);
        assert_eq!(host.ipam.grant(&key("c3")), None);
    });
}

/// multus 4.2 and 4.3 lose the keys of plugins in the DEL of a list that is in a file.
#[test]
fn del_releases_by_container_and_interface_whatever_the_configuration_has_lost() {
    on_server("lost-config", async |host| {
        host.set_ipam(&spec(json!({"subnets": ["10.1.0.0/24"]})));
        host.ipam.hold("uid-blue", "10.1.0.0/24");
        let configs = [
            json!({"cniVersion": "1.0.0", "name": "theirs", "type": "macvlan", "ipam": {"type": "patchbay-ipam"}}).to_string(),
            json!({"cniVersion": "1.0.0", "name": "theirs", "type": "macvlan"}).to_string(),
            json!({"name": "renamed", "ipam": {"type": "patchbay-ipam", "network": "other"}}).to_string(),
            "{}".to_owned(),
            "no json".to_owned(),
            String::new(),
        ];
        for config in configs {
            for id in ["c1", "c2"] {
                assert_eq!(host.call(&delegated("ADD", id, json!({})), None).await.0, 0);
            }
            let del = Request { stdin: config.clone().into_bytes(), ..delegated("DEL", "c1", json!({})) };
            assert_eq!(host.call(&del, None).await.0, 0, "{config:?}");
            let held = ["c1", "c2"].map(|id| host.ipam.grant(&key(id)).is_some());
            assert_eq!(held, [false, true], "{config:?}");
        }
    });
}

#[test]
fn a_requested_address_is_allocated_or_refused_with_a_reason() {
    on_server("requested", async |host| {
        host.set_ipam(&spec(json!({"subnets": ["10.1.0.0/24"], "exclude": ["10.1.0.8/29"]})));
        host.ipam.hold("uid-blue", "10.1.0.0/28");
        let with_ips = |ips: Value| json!({"runtimeConfig": {"ips": ips}});
        let add = |id: &str, changes: Value| delegated("ADD", id, changes);
        let (_, result) = host.call(&add("c1", with_ips(json!(["10.1.0.5/24"]))), None).await;
        assert_eq!(result["ips"][0]["address"], "10.1.0.5/24", "{result}");
        let by_args = json!({"args": {"cni": {"ips": ["10.1.0.6"]}}});
        assert_eq!(host.call(&add("c2", by_args), None).await.1["ips"][0]["address"], "10.1.0.6/24");
        let mut third = add("c3", json!({}));
        third.args.push_str(";IP=10.1.0.7");
        assert_eq!(host.call(&third, None).await.1["ips"][0]["address"], "10.1.0.7/24");
        for (ips, code, text) in [
            (json!(["10.1.0.5"]), 11, "in use by pod default/pod"),
            (json!(["10.1.0.9"]), 7, "excluded"),
            (json!(["10.2.0.9"]), 7, "in no subnet"),
            (json!(["10.1.0.3", "10.1.0.4"]), 7, "two addresses of one family"),
            (json!(["tea"]), 7, "not an IP address"),
            (json!(["10.1.0.3/tea"]), 7, "not an IP address"),
            (json!(["10.1.0.3/33"]), 7, "not an IP address"),
            (
                json!(["10.1.0.3/16"]),
                7,
                "with prefix length /16, but its subnet 10.1.0.0/24 has /24: request 10.1.0.3/24",
            ),
        ] {
            let (_, answer) = host.call(&add("c9", with_ips(ips)), None).await;
            assert_eq!(answer["code"], code, "{answer}");
            assert!(answer["msg"].as_str().unwrap().contains(text), "{answer}");
        }
    });
}

#[test]
fn two_addresses_in_one_variable_are_both_allocated() {
    on_server("two", async |host| {
        host.set_ipam(&spec(json!({"subnets": ["10.1.0.0/24", "fd01::/64"]})));
        host.ipam.hold("uid-blue", "10.1.0.0/28");
        host.ipam.hold("uid-blue", "fd01::/120");
        for (id, text) in [("c1", ";IP=10.1.0.5,fd01::5"), ("c2", ";IP=fd01::6/64, 10.1.0.6/24")] {
            let mut add = delegated("ADD", id, json!({}));
            add.args.push_str(text);
            let (exit, result) = host.call(&add, None).await;
            let end = &id[1..];
            let end: u8 = end.parse::<u8>().unwrap() + 4;
            let expected = [format!("10.1.0.{end}/24"), format!("fd01::{end}/64")];
            let found = [&result["ips"][0]["address"], &result["ips"][1]["address"]];
            assert_eq!((exit, found[0], found[1]), (0, &json!(expected[0]), &json!(expected[1])), "{result}");
        }
        let mut add = delegated("ADD", "c3", json!({}));
        add.args.push_str(";IP=10.1.0.7,10.1.0.8");
        let (_, refused) = host.call(&add, None).await;
        assert!(refused["msg"].as_str().unwrap().contains("two addresses of one family"), "{refused}");
    });
}

/// Every way to request an address, through another plugin and through `patchbay-bridge`.
fn ways(requested: &str, id: &str) -> Vec<Request> {
    let by_config = json!({"runtimeConfig": {"ips": [requested]}});
    let by_args = json!({"args": {"cni": {"ips": [requested]}}});
    let by_variable = format!(";IP={requested}");
    let mut all = Vec::new();
    for (mut changes, more) in [(by_config, ""), (by_args, ""), (json!({}), by_variable.as_str())] {
        let theirs = delegated("ADD", id, changes.clone());
        changes["ipam"] = ours()["ipam"].clone();
        for add in [theirs, request("ADD", id, changes)] {
            all.push(Request { args: format!("{}{more}", add.args), ..add });
        }
    }
    all
}

#[test]
fn a_requested_address_with_another_length_than_its_subnet_is_refused() {
    on_server("length", async |host| {
        host.set_ipam(&spec(json!({"subnets": ["10.1.0.0/24", "fd01::/64"]})));
        host.ipam.hold("uid-blue", "10.1.0.0/28");
        host.ipam.hold("uid-blue", "fd01::/120");
        let pod = Namespace::new();
        for (requested, subnet) in [("10.1.0.5/25", "10.1.0.0/24"), ("fd01::5/48", "fd01::/64")] {
            for add in ways(requested, "c1") {
                let (exit, answer) = host.call(&add, Some(&pod)).await;
                assert_eq!((exit, &answer["code"]), (1, &json!(7)), "{answer}");
                let (address, length) = requested.split_once('/').unwrap();
                let words = format!(
                    "address {address} is requested with prefix length /{length}, but its subnet {subnet}"
                );
                assert!(answer["msg"].as_str().unwrap().contains(&words), "{answer}");
            }
        }
        assert_eq!((host.ipam.leases(), pod.links()), (Vec::new(), 1));
        for (number, requested) in ["10.1.0.5/24", "10.1.0.5/32", "10.1.0.5"].into_iter().enumerate() {
            for add in ways(requested, &format!("d{number}")) {
                let (exit, result) = host.call(&add, Some(&pod)).await;
                assert_eq!((exit, &result["ips"][0]["address"]), (0, &json!("10.1.0.5/24")), "{result}");
                assert_eq!(host.call(&Request { command: "DEL".to_owned(), ..add }, None).await.0, 0);
            }
        }
    });
}

#[test]
fn an_add_without_addresses_fails_with_the_reason() {
    on_server("no-address", async |host| {
        let pod = Namespace::new();
        let why = async |changes: Value, id: &str| host.refused("ADD", id, &pod, changes).await;
        let (code, msg) = why(ours(), "c1").await;
        assert!(code == 11 && msg.contains("set spec.ipam"), "{msg}");
        host.set_ipam(&spec(dual()));
        let (code, msg) = why(ours(), "c1").await;
        assert!(code == 11 && msg.contains("has not yet read its address blocks"), "{msg}");
        host.ipam.hold("uid-blue", "10.1.0.0/28");
        host.ipam.hold("uid-blue", "fd01::/120");
        host.done("ADD", "c1", &pod, ours()).await;
        host.ipam.lose_contact(Duration::from_secs(100));
        let second = Namespace::new();
        host.done("ADD", "c2", &second, ours()).await;
        host.ipam.lose_contact(Duration::from_secs(300));
        let third = Namespace::new();
        let (code, msg) = host.refused("ADD", "c3", &third, ours()).await;
        assert!(code == 11 && msg.contains("no new address"), "{msg}");
        assert_eq!(host.call(&delegated("STATUS", "", json!({})), None).await.1["code"], 50);
        // Existing leases are kept and can be released.
        host.done("ADD", "c1", &pod, ours()).await;
        host.done("DEL", "c1", &pod, ours()).await;
        assert_eq!(host.ipam.grant(&key("c1")), None);
        assert_eq!((third.links(), host.ipam.grant(&key("c3"))), (1, None));
    });
}

/// Sends a request like a plugin that does not wait for the reply.
fn send(host: &TestHost, request: &Request, pod: &Namespace) -> UnixStream {
    let client = UnixStream::connect(path(&host.paths.run_dir)).unwrap();
    frames::send(&client, &request.encode().unwrap(), Some(pod.0.as_fd())).unwrap();
    client
}

/// Far less than an ADD waits for an address.
const PROMPT: Duration = Duration::from_secs(4);

async fn until(what: &str, is_so: impl Fn() -> bool) {
    let wait = async {
        while !is_so() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PROMPT, wait).await.unwrap_or_else(|_| panic!("timed out: {what}"));
}

/// How many ADD calls have finished.
fn finished(host: &TestHost) -> usize {
    let mut registry = Registry::default();
    host.metrics.register(&mut registry);
    let mut text = String::new();
    encode(&mut text, &registry).unwrap();
    let count = |line: &str| line.split_once("duration_seconds_count{command=\"Add\"} ")?.1.parse().ok();
    text.lines().find_map(count).unwrap_or(0)
}

#[test]
fn a_plugin_that_disconnects_while_it_waits_gets_no_address() {
    on_server("hung-up", async |host| {
        host.set_ipam(&spec(json!({"subnets": ["10.1.0.0/24"]})));
        // The API server is reachable, and the network has no block.
        host.ipam.hold("uid-red", "10.9.0.0/28");
        let pod = Namespace::new();
        for add in [delegated("ADD", "c1", json!({})), request("ADD", "c1", ours())] {
            let before = finished(host);
            let client = send(host, &add, &pod);
            until("the pod waits", || host.ipam.has_waiters()).await;
            drop(client);
            until("the call ends", || finished(host) > before).await;
            assert!(!host.ipam.has_waiters());
        }

        // One client disconnects at the last moment, another while it waits for the first.
        let first = send(host, &request("ADD", "c1", ours()), &pod);
        until("the pod waits", || host.ipam.has_waiters()).await;
        drop(send(host, &request("ADD", "c1", json!({})), &pod));
        drop(first);
        host.ipam.hold("uid-blue", "10.1.0.0/28");
        until("all calls end", || finished(host) == 4).await;
        assert_eq!((host.ipam.grant(&key("c1")), pod.links()), (None, 1));

        let result = host.done("ADD", "c1", &pod, ours()).await;
        assert_eq!(result["ips"][0]["address"], "10.1.0.1/24");
    });
}

#[test]
fn a_plugin_that_closes_only_its_write_half_is_answered() {
    use std::net::Shutdown;

    on_server("half-closed", async |host| {
        host.set_ipam(&spec(json!({"subnets": ["10.1.0.0/24"]})));
        host.ipam.hold("uid-red", "10.9.0.0/28");
        let pod = Namespace::new();
        let client = send(host, &delegated("ADD", "c1", json!({})), &pod);
        (&client).write_all(b"and more").unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        until("the pod waits", || host.ipam.has_waiters()).await;
        host.ipam.hold("uid-blue", "10.1.0.0/28");
        until("the call ends", || finished(host) == 1).await;
        assert!(host.ipam.grant(&key("c1")).is_some());
    });
}
