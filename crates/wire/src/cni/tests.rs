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
    };
    Success { interfaces: vec![inside], ..Success::default() }
}

fn with_addresses() -> Success {
    let ip = |address: &str, gateway: &str| Ip {
        address: address.parse().unwrap(),
        gateway: gateway.parse().ok(),
        interface: Some(0),
    };
    let route = |dst: &str, gw: &str| Route { dst: dst.parse().unwrap(), gw: gw.parse().ok() };
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
            "cni.dev/valid-attachments":[{"containerID":"c","ifname":"net1"}],"unknown":[1]}"#,
    );
    let wanted = Config {
        version: Version::V1_1_0,
        name: "blue".to_owned(),
        network: Some("blue".to_owned()),
        mtu: Some(1400),
        mac: Some("02:00:00:00:00:01".to_owned()),
        ips: vec!["10.0.0.5".to_owned()],
        ipam: Some(Ipam { plugin: "patchbay-ipam".to_owned(), network: Some("red".to_owned()) }),
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
    ] {
        let config = Config::parse(text.as_bytes()).unwrap();
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
