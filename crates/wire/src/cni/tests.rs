use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn read(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).unwrap()
}

fn success() -> Success {
    let inside = Interface {
        name: "net1".to_owned(),
        mac: Some("02:00:5e:10:00:01".to_owned()),
        mtu: Some(1450),
        sandbox: Some("/run/netns/a".to_owned()),
        ..Interface::default()
    };
    Success { interfaces: vec![inside], ..Success::default() }
}

fn with_addresses() -> Success {
    let ip = |address: &str, gateway: &str| Ip {
        address: address.parse().unwrap(),
        gateway: gateway.parse().ok(),
        interface: Some(0),
    };
    let route =
        |dst: &str, gw: &str| Route { dst: dst.parse().unwrap(), gw: gw.parse().ok(), ..Route::default() };
    Success {
        ips: vec![ip("10.1.0.5/16", "10.1.0.1"), ip("fd00::5/64", "")],
        routes: vec![route("0.0.0.0/0", "10.1.0.1"), route("fd01::/64", "")],
        ..success()
    }
}

#[test]
fn a_result_has_the_format_of_its_version() {
    let old = json!({"name": "net1", "mac": "02:00:5e:10:00:01", "sandbox": "/run/netns/a"});
    let mut new = old.clone();
    new["mtu"] = json!(1450);
    for (version, interfaces) in [
        ("0.1.0", None),
        ("0.2.0", None),
        ("0.3.0", Some(&old)),
        ("0.3.1", Some(&old)),
        ("0.4.0", Some(&old)),
        ("1.0.0", Some(&old)),
        ("1.1.0", Some(&new)),
    ] {
        let mut wanted = json!({"cniVersion": version, "dns": {}});
        if let Some(interface) = interfaces {
            wanted["interfaces"] = json!([interface]);
        }
        assert_eq!(read(&success().render(version.parse().unwrap())), wanted);
    }
}

#[test]
fn addresses_are_rendered_in_every_version() {
    let render = |version| read(&with_addresses().render(version));
    let routes = json!([{"dst": "0.0.0.0/0", "gw": "10.1.0.1"}, {"dst": "fd01::/64"}]);
    let first = render(Version::V0_2_0);
    assert_eq!(first["ip4"], json!({"ip": "10.1.0.5/16", "gateway": "10.1.0.1", "routes": [routes[0]]}));
    assert_eq!(first["ip6"], json!({"ip": "fd00::5/64", "routes": [routes[1]]}));

    let mut four = json!({"address": "10.1.0.5/16", "gateway": "10.1.0.1", "interface": 0});
    let mut six = json!({"address": "fd00::5/64", "interface": 0});
    assert_eq!(render(Version::V1_0_0)["ips"], json!([four, six]));
    assert_eq!(render(Version::V1_1_0)["routes"], routes);
    (four["version"], six["version"]) = (json!("4"), json!("6"));
    assert_eq!(render(Version::V0_3_1)["ips"], json!([four, six]));
}

#[test]
fn all_listed_versions_are_supported_and_no_other() {
    for version in crate::CNI_VERSIONS {
        assert_eq!(version.parse::<Version>().unwrap().to_string(), version);
    }
    assert_eq!("".parse(), Ok(Version::V0_1_0));
    for version in ["1", "1.1", "2.0.0", "v1.0.0", " 1.0.0"] {
        assert_eq!(version.parse::<Version>().unwrap_err().code, Code::IncompatibleVersion, "{version:?}");
    }
    let listed = read(&versions());
    assert_eq!(listed["supportedVersions"], json!(crate::CNI_VERSIONS));
    assert_eq!(listed["cniVersion"], "1.1.0");
}

#[test]
fn a_command_that_a_version_lacks_is_rejected() {
    for (verb, version, allowed) in [
        ("ADD", "0.1.0", true),
        ("DEL", "0.1.0", true),
        ("CHECK", "0.3.1", false),
        ("CHECK", "0.4.0", true),
        ("STATUS", "1.0.0", false),
        ("STATUS", "1.1.0", true),
        ("GC", "1.0.0", false),
        ("GC", "1.1.0", true),
    ] {
        let result = verb.parse::<Verb>().unwrap().allowed_in(version.parse().unwrap());
        assert_eq!(result.is_ok(), allowed, "{verb} {version}");
        assert!(result.err().is_none_or(|error| error.code == Code::IncompatibleVersion));
    }
    for verb in ["", "add", "REMOVE"] {
        assert_eq!(verb.parse::<Verb>().unwrap_err().code, Code::InvalidEnvironment);
    }
}

#[test]
fn an_error_renders_its_code_and_message() {
    let error = Error::new(Code::TryAgainLater, "not yet");
    let wanted = json!({"cniVersion": "1.0.0", "code": 11, "msg": "not yet"});
    assert_eq!(read(&error.render(Version::V1_0_0)), wanted);
    let error = error.details("a \"quoted\"\nline");
    assert_eq!(read(&error.render(Version::V1_0_0))["details"], "a \"quoted\"\nline");
    assert_eq!(error.to_string(), "not yet: a \"quoted\"\nline");
}

#[test]
fn a_full_configuration_is_parsed() {
    let config = Config::parse(
        br#"{"cniVersion":"1.1.0","name":"blue","type":"patchbay-bridge","network":"blue","mtu":1400,
            "capabilities":{"mac":true},"runtimeConfig":{"mac":"02:00:00:00:00:01","other":1},
            "args":{"cni":{"mac":"02:00:00:00:00:02","ips":["10.0.0.5"]}},"ipam":{"type":"patchbay-ipam","network":"red","x":1},"prevResult":{"interfaces":[]},
            "cni.dev/valid-attachments":[{"containerID":"c","ifname":"net1"}],"allowPersistentIPs":true,"unknown":[1]}"#,
    );
    let wanted = Config {
        version: Version::V1_1_0,
        name: "blue".to_owned(),
        network: Some("blue".to_owned()),
        mtu: Some(1400),
        mac: Some("02:00:00:00:00:01".to_owned()),
        ips: vec!["10.0.0.5".to_owned()],
        ipam: Some(Ipam { plugin: "patchbay-ipam".to_owned(), network: Some("red".to_owned()) }),
        allow_persistent_ips: true,
        prev_result: Some(json!({"interfaces": []})),
        valid_attachments: Some(vec![Attachment { container_id: "c".to_owned(), ifname: "net1".to_owned() }]),
    };
    assert_eq!(config, Ok(wanted));
}

#[test]
fn a_minimal_configuration_is_parsed() {
    for (text, mac) in [
        ("{}", None),
        (r#"{"mtu":0,"network":"","runtimeConfig":null,"args":null,"ipam":{},"prevResult":null}"#, None),
        (r#"{"runtimeConfig":{"mac":""},"args":{"cni":{"mac":"x"}}}"#, Some("x")),
        (r#"{"args":{"cni":null}}"#, None),
        (r#"{"allowPersistentIPs":"true"}"#, None),
        (r#"{"allowPersistentIPs":false}"#, None),
    ] {
        let config = Config::parse(text.as_bytes()).unwrap();
        assert!(!config.allow_persistent_ips, "{text}");
        assert_eq!((config.version, config.mtu, config.network), (Version::V0_1_0, None, None));
        assert_eq!(config.mac.as_deref(), mac, "{text}");
    }
}

#[test]
fn an_invalid_configuration_is_rejected_with_the_right_code() {
    let deep = format!("{{\"x\":{}", "[".repeat(100_000));
    for (text, code) in [
        ("", Code::Decode),
        ("{", Code::Decode),
        ("\u{1}", Code::Decode),
        (deep.as_str(), Code::Decode),
        ("null", Code::InvalidConfig),
        ("[]", Code::InvalidConfig),
        (r#"{"mtu":"1500"}"#, Code::InvalidConfig),
        (r#"{"mtu":-1}"#, Code::InvalidConfig),
        (r#"{"mtu":67}"#, Code::InvalidConfig),
        (r#"{"mtu":65536}"#, Code::InvalidConfig),
        (r#"{"mtu":1e99}"#, Code::InvalidConfig),
        (r#"{"network":{}}"#, Code::InvalidConfig),
        (r#"{"cni.dev/valid-attachments":{}}"#, Code::InvalidConfig),
        (r#"{"cniVersion":"9.9.9"}"#, Code::IncompatibleVersion),
        (r#"{"ipam":{"type":7}}"#, Code::InvalidConfig),
        (r#"{"ipam":[]}"#, Code::InvalidConfig),
        (r#"{"runtimeConfig":{"ips":"10.0.0.1"}}"#, Code::InvalidConfig),
    ] {
        assert_eq!(Config::parse(text.as_bytes()).unwrap_err().code, code, "{:?}", truncate(text));
    }
}

#[test]
fn the_version_of_an_invalid_configuration_is_found_if_possible() {
    assert_eq!(Version::of(br#"{"cniVersion":"0.4.0","mtu":"x"}"#), Version::V0_4_0);
    assert_eq!(Version::of(b"nonsense"), Version::NEWEST);
    assert_eq!(Version::of(br#"{"cniVersion":"9.9.9"}"#), Version::NEWEST);
}

#[test]
fn cni_args_are_parsed_and_unknown_keys_rejected_unless_ignored() {
    let text = "IgnoreUnknown=1;K8S_POD_NAMESPACE=ns;K8S_POD_NAME=p;K8S_POD_UID=u;X=y;MAC=02:00:00:00:00:01;";
    let args = Args::parse(text).unwrap();
    assert_eq!(
        (args.pod.namespace.as_str(), args.pod.name.as_str(), args.pod.uid.as_str()),
        ("ns", "p", "u")
    );
    assert_eq!(args.mac.as_deref(), Some("02:00:00:00:00:01"));
    assert_eq!(Args::parse(""), Ok(Args::default()));
    assert_eq!(Args::parse("MAC="), Ok(Args::default()));
    for text in ["X=y", "X", "MAC", "IgnoreUnknown=maybe", "IgnoreUnknown=0;X=y", "=;X"] {
        assert_eq!(Args::parse(text).unwrap_err().code, Code::InvalidEnvironment, "{text}");
    }
}

fn parse(text: &str) -> Result<Success, Error> {
    Success::parse(text.as_bytes(), Version::V1_0_0)
}

fn ip(address: &str, gateway: Option<&str>, interface: Option<usize>) -> Ip {
    Ip { address: address.parse().unwrap(), gateway: gateway.map(|it| it.parse().unwrap()), interface }
}

#[test]
fn a_result_of_every_version_is_parsed() {
    // As host-local, bridge and others print them.
    let old = r#"{"cniVersion":"0.2.0","ip4":{"ip":"10.1.0.5/16","gateway":"10.1.0.1","routes":[{"dst":"0.0.0.0/0"}]},
        "ip6":{"ip":"fd00::5/64"},"dns":{"nameservers":["10.1.0.2"],"domain":"a","search":["b"],"options":["c"]}}"#;
    let dns = Dns {
        nameservers: vec!["10.1.0.2".to_owned()],
        domain: Some("a".to_owned()),
        search: vec!["b".to_owned()],
        options: vec!["c".to_owned()],
    };
    let default_route = Route { dst: "0.0.0.0/0".parse().unwrap(), ..Route::default() };
    let expected = Success {
        interfaces: Vec::new(),
        ips: vec![ip("10.1.0.5/16", Some("10.1.0.1"), None), ip("fd00::5/64", None, None)],
        routes: vec![default_route.clone()],
        dns,
    };
    assert_eq!(parse(old), Ok(expected.clone()));
    assert_eq!(parse(&old.replace("0.2.0", "0.1.0")), Ok(expected.clone()));
    // Without a version, that of the configuration counts.
    let unversioned = old.replace(r#""cniVersion":"0.2.0","#, "");
    assert_eq!(Success::parse(unversioned.as_bytes(), Version::V0_1_0), Ok(expected));
    assert_eq!(parse(&unversioned).unwrap().ips, []);

    for version in ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"] {
        let text = r#"{"cniVersion":"VERSION","interfaces":[{"name":"veth1","mac":"02:00:00:00:00:01"},
                {"name":"net1","mac":"","mtu":1400,"sandbox":"/run/netns/a","socketPath":"/run/s","pciID":"0000:01:00.0","x":1}],
            "ips":[{"version":"4","interface":1,"address":"10.1.0.5/16","gateway":"10.1.0.1"},
                {"version":"6","address":"fd00::5/64","gateway":"","interface":-1}],
            "routes":[{"dst":"0.0.0.0/0","gw":"10.1.0.1","mtu":1300,"advmss":1200,"priority":5,"table":0,"scope":253}],
            "dns":{},"unknown":[{}]}"#;
        let result = parse(&text.replace("VERSION", version)).unwrap();
        let newest = ["1.0.0", "1.1.0"].contains(&version);
        let inside = Interface {
            name: "net1".to_owned(),
            mac: None,
            mtu: newest.then_some(1400),
            sandbox: Some("/run/netns/a".to_owned()),
            socket_path: newest.then(|| "/run/s".to_owned()),
            pci_id: newest.then(|| "0000:01:00.0".to_owned()),
        };
        assert_eq!(result.interfaces[0].mac.as_deref(), Some("02:00:00:00:00:01"));
        assert_eq!((result.interfaces[0].sandbox.as_ref(), &result.interfaces[1]), (None, &inside));
        assert_eq!(result.ips, [ip("10.1.0.5/16", Some("10.1.0.1"), Some(1)), ip("fd00::5/64", None, None)]);
        let number = |number| newest.then_some(number);
        let route = Route {
            gw: Some("10.1.0.1".parse().unwrap()),
            mtu: number(1300),
            advmss: number(1200),
            priority: number(5),
            table: number(0),
            scope: number(253),
            ..default_route.clone()
        };
        assert_eq!((result.routes, result.dns), (vec![route], Dns::default()));
    }
}

#[test]
fn null_and_missing_parts_of_a_result_are_empty() {
    for text in [
        "{}",
        r#"{"cniVersion":""}"#,
        r#"{"cniVersion":null,"interfaces":null,"ips":null,"routes":null,"dns":null,"ip4":null}"#,
        r#"{"cniVersion":"0.2.0","ip4":null,"ip6":null,"dns":{"search":null,"domain":null}}"#,
    ] {
        assert_eq!(parse(text), Ok(Success::default()), "{text}");
    }
    let none = parse(
        r#"{"ips":[{"address":"10.0.0.1/8","gateway":null,"interface":null}],"interfaces":[{"mtu":0}]}"#,
    );
    assert_eq!(none.unwrap().ips, [ip("10.0.0.1/8", None, None)]);
}

#[test]
fn an_invalid_result_is_rejected() {
    let deep = format!(r#"{{"ips":{}"#, "[".repeat(100_000));
    for (text, code) in [
        ("", Code::Decode),
        ("7", Code::Decode),
        ("[]", Code::Decode),
        (deep.as_str(), Code::Decode),
        (r#"{"ips":[{"address":"10.0.0.1"}]}"#, Code::Decode),
        (r#"{"ips":[{"address":"10.0.0.1/33"}]}"#, Code::Decode),
        (r#"{"ips":[{}]}"#, Code::Decode),
        (r#"{"ips":[{"address":"10.0.0.1/8","gateway":"x"}]}"#, Code::Decode),
        (r#"{"routes":[{"gw":"10.0.0.1"}]}"#, Code::Decode),
        (r#"{"interfaces":[7]}"#, Code::Decode),
        (r#"{"cniVersion":"0.2.0","ip4":{}}"#, Code::Decode),
        (r#"{"cniVersion":"9.9.9"}"#, Code::IncompatibleVersion),
    ] {
        assert_eq!(parse(text).unwrap_err().code, code, "{:?}", truncate(text));
    }
}

#[test]
fn the_output_of_a_plugin_is_a_result_or_an_error() {
    let result = |stdout: &str| Success::from_output(stdout.as_bytes(), Version::V0_4_0);
    assert_eq!(result(r#" {"cniVersion":"0.4.0"}"#), Ok(Success::default()));
    let error = |code, msg: &str, details: &str| PluginError {
        code,
        msg: msg.to_owned(),
        details: details.to_owned(),
    };
    let printed = r#"{"cniVersion":"0.4.0","code":11,"msg":"not yet","details":"wait"}"#;
    assert_eq!(result(printed), Err(error(Some(11), "not yet", "wait")));
    assert_eq!(PluginError::parse(printed.as_bytes(), b"log line"), error(Some(11), "not yet", "wait"));
    assert_eq!(error(Some(11), "not yet", "wait").to_string(), "not yet: wait");
    assert_eq!(PluginError::parse(br#"{"code":7}"#, b"").to_string(), "the plugin failed with code 7");
    assert_eq!(result(" \n").unwrap_err().to_string(), "the plugin printed no result");
    assert_eq!(
        result("panic: oh\n").unwrap_err().to_string(),
        "the plugin printed something that is not JSON: panic: oh"
    );
    assert!(result("[]").unwrap_err().to_string().starts_with("the plugin printed an invalid result: "));
    for (stdout, stderr, message) in [
        ("", "", "the plugin failed and printed no CNI error"),
        ("", " exec format error\n", "the plugin failed and printed no CNI error: exec format error"),
        ("[7]", "", "the plugin failed and printed no CNI error: [7]"),
        ("panic: oh", "log", "the plugin failed and printed no CNI error: panic: oh"),
        (
            r#"{"cniVersion":"0.4.0"}"#,
            "",
            r#"the plugin failed and printed no CNI error: {"cniVersion":"0.4.0"}"#,
        ),
    ] {
        assert_eq!(PluginError::parse(stdout.as_bytes(), stderr.as_bytes()).to_string(), message);
    }
    let long = PluginError::parse(&vec![0xff; 1 << 20], b"");
    assert_eq!(long.details.chars().count(), 1024);
}

/// What a result still has after it was rendered in a version.
fn reduced(result: &Success, version: Version) -> Success {
    let mut result = result.clone();
    if version < Version::V1_1_0 {
        for interface in &mut result.interfaces {
            (interface.mtu, interface.socket_path, interface.pci_id) = (None, None, None);
        }
        let plain = |route: Route| Route { dst: route.dst, gw: route.gw, ..Route::default() };
        result.routes = result.routes.into_iter().map(plain).collect();
    }
    if version < Version::V0_3_0 {
        let first = |four: bool| {
            let ip = result.ips.iter().find(|ip| ip.address.addr().is_ipv4() == four)?;
            let routes = result.routes.iter().filter(|route| route.dst.addr().is_ipv4() == four);
            Some((Ip { interface: None, ..ip.clone() }, routes.cloned().collect::<Vec<_>>()))
        };
        let (ips, routes): (_, Vec<_>) = [first(true), first(false)].into_iter().flatten().unzip();
        result = Success { ips, routes: routes.concat(), dns: result.dns, interfaces: Vec::new() };
    }
    result
}

fn any_result() -> impl Strategy<Value = Success> {
    let text = || proptest::option::of("[a-z/:\"é]{1,6}");
    let number = || proptest::option::of(1..=u32::MAX);
    let net = || {
        (any::<std::net::IpAddr>(), 0..=32_u8)
            .prop_map(|(addr, length)| ipnet::IpNet::new(addr, length).unwrap())
    };
    let interface = ("[a-z0-9]{0,5}", text(), number(), text(), text(), text()).prop_map(
        |(name, mac, mtu, sandbox, socket_path, pci_id)| Interface {
            name,
            mac,
            mtu,
            sandbox,
            socket_path,
            pci_id,
        },
    );
    let ip = (net(), any::<Option<std::net::IpAddr>>(), proptest::option::of(0..5_usize))
        .prop_map(|(address, gateway, interface)| Ip { address, gateway, interface });
    let route = (
        net(),
        any::<Option<std::net::IpAddr>>(),
        number(),
        number(),
        number(),
        any::<Option<u32>>(),
        any::<Option<u32>>(),
    )
        .prop_map(|(dst, gw, mtu, advmss, priority, table, scope)| Route {
            dst,
            gw,
            mtu,
            advmss,
            priority,
            table,
            scope,
        });
    let list = || proptest::collection::vec("[a-z.]{0,5}", 0..3);
    let dns = (list(), text(), list(), list()).prop_map(|(nameservers, domain, search, options)| Dns {
        nameservers,
        domain,
        search,
        options,
    });
    let many = 0..4_usize;
    (
        proptest::collection::vec(interface, many.clone()),
        proptest::collection::vec(ip, many.clone()),
        proptest::collection::vec(route, many),
        dns,
    )
        .prop_map(|(interfaces, ips, routes, dns)| Success { interfaces, ips, routes, dns })
}

proptest! {
    #[test]
    fn a_rendered_result_is_parsed_again(result in any_result(), version in proptest::sample::select(&Version::ALL[..])) {
        let parsed = Success::parse(&result.render(version), Version::NEWEST).unwrap();
        prop_assert_eq!(&parsed, &reduced(&result, version));
        // A second conversion changes nothing.
        prop_assert_eq!(Success::from_output(&parsed.render(version), version), Ok(parsed));
    }

    #[test]
    fn any_output_of_a_plugin_is_safe(bytes in proptest::collection::vec(any::<u8>(), 0..200), json in r#"\{[\[\]{}",:a-z0-9 ]{0,40}\}"#) {
        for output in [&bytes[..], json.as_bytes()] {
            _ = Success::from_output(output, Version::NEWEST);
            _ = PluginError::parse(output, output).to_string();
        }
    }
}
