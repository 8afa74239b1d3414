use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::RawJson;

fn parse(text: &str) -> NetworkSelection {
    NetworkSelection::parse(Some(text))
}

fn references_in(text: &str) -> Vec<String> {
    let mut found: Vec<NadRef> = parse(text).references("home").collect();
    found.sort();
    found.dedup();
    found.iter().map(NadRef::to_string).collect()
}

fn errors_in(text: &str) -> Vec<String> {
    parse(text).errors().map(|error| error.to_string()).collect()
}

fn named(name: &str) -> NetworkSelectionElement {
    NetworkSelectionElement { name: name.to_owned(), ..NetworkSelectionElement::default() }
}

#[test]
fn parses_every_form_of_a_reference() {
    for (text, expected) in [
        ("", &[][..]),
        (" , ,", &[]),
        ("a", &["home/a"]),
        ("other/a", &["other/a"]),
        ("a@eth1", &["home/a"]),
        ("other/a@eth1", &["other/a"]),
        (" other / a @ eth1 ", &["other/a"]),
        ("/a", &["home/a"]),
        ("a,b , other/c@x", &["home/a", "home/b", "other/c"]),
        ("a,a@eth2", &["home/a"]),
        (r#"[{"name": "a"}]"#, &["home/a"]),
        (r#"[{"name": "a", "namespace": "other"}]"#, &["other/a"]),
        (r#"[{"name": "a", "namespace": ""}]"#, &["home/a"]),
        (r#"[{"Name": "a", "Namespace": "other"}]"#, &["other/a"]),
        (r#"[{"name": "a", "namespace": "other", "Namespace": null}]"#, &["other/a"]),
        (r#"[{"name": "a", "NAME": null, "namespace": "other", "namespace": null}]"#, &["other/a"]),
        (r#"[{"name": "other/a"}]"#, &["other/a"]),
        (r#" [ {"name": "a", "interface": "x"}, {"name": "b"} ] "#, &["home/a", "home/b"]),
        (r#"{"name": "a"}"#, &["home/a"]),
        (r#"["a", "other/b"]"#, &["home/a", "other/b"]),
        ("a.b-c", &["home/a.b-c"]),
        // Other keys of these are invalid.
        (r#"[{"name": "a", "mac": 7}, {"name": "b", "ips": "10.0.0.1"}]"#, &["home/a", "home/b"]),
        ("a@this-name-is-too-long", &["home/a"]),
    ] {
        assert_eq!(references_in(text), expected, "{text}");
    }
}

#[test]
fn of_several_keys_the_last_counts_as_in_go() {
    assert_eq!(references_in(r#"[{"name": "a", "name": "b"}]"#), ["home/b"]);
    assert_eq!(references_in(r#"[{"name": "a", "NAME": "b"}]"#), ["home/b"]);
    assert_eq!(references_in("[{\"name\": \"a\", \"name\u{17f}pace\": \"other\"}]"), ["other/a"]);
}

#[test]
fn valid_elements_are_kept_and_the_first_error_is_reported() {
    for (text, expected, error) in [
        (
            "a,B!,c",
            &["home/a", "home/c"][..],
            "element [1] at line 1 column 3: \"B!\" is not [NAMESPACE/]NAME[@INTERFACE]",
        ),
        ("x/y/z", &[], "element [0] at line 1 column 1: \"x/y/z\" is not [NAMESPACE/]NAME[@INTERFACE]"),
        ("a@b@c", &[], "element [0] at line 1 column 1: \"a@b@c\" is not [NAMESPACE/]NAME[@INTERFACE]"),
        (
            r#"[{"name": "a"}, 7, {"mac": "x"}, {"name": "b"}]"#,
            &["home/a", "home/b"],
            "element [1] at line 1 column 17: expected an object with a name",
        ),
        (
            r#"[{"name": 7}]"#,
            &[],
            "element [0] at line 1 column 11: name: invalid type: integer `7`, expected a string",
        ),
        (r#"{"name": "a"}"#, &["home/a"], "expected a JSON list of objects, each with a name"),
    ] {
        assert_eq!(references_in(text), expected, "{text}");
        assert_eq!(errors_in(text)[0], error, "{text}");
    }
    assert!(matches!(parse("[{").error, Some(Error::Json { .. })));
    assert!(matches!(parse(&"[".repeat(100_000)).error, Some(Error::Json { .. })));
    let many = parse(&"a,".repeat(MAX_ELEMENTS + 1));
    assert_eq!((many.entries.len(), many.error), (MAX_ELEMENTS, Some(Error::TooMany)));
}

#[test]
fn absent_empty_and_an_empty_list_are_told_apart() {
    for (text, form) in [
        (None, SelectionForm::Absent),
        (Some(""), SelectionForm::Empty),
        (Some(" \n"), SelectionForm::Empty),
        (Some("[]"), SelectionForm::Json),
        (Some(" [ ] "), SelectionForm::Json),
        (Some(","), SelectionForm::Names),
    ] {
        let selection = NetworkSelection { form, ..NetworkSelection::default() };
        assert_eq!(NetworkSelection::parse(text), selection, "{text:?}");
        let editor = SelectionEditor::parse(text).unwrap();
        assert_eq!(editor.form(), form);
        assert_eq!(editor.finish(), Ok(text.map(str::to_owned)));
    }
}

#[test]
fn all_keys_of_an_element_are_parsed() {
    let text = r#"[{"name": "a", "namespace": "other", "interface": "net7", "mac": "02:00:00:00:00:01",
        "ips": ["10.0.0.1/24", "fd00::1"], "infiniband-guid": "02:00:00:00:00:00:00:01",
        "portMappings": [{"hostPort": 80, "containerPort": 8080, "protocol": "tcp", "hostIP": "192.0.2.1"}, {"hostPort": 1, "containerPort": 2}],
        "bandwidth": {"ingressRate": 1000, "ingressBurst": 2000, "egressRate": 3000, "egressBurst": 4000},
        "cni-args": {"x": 1.0}, "default-route": ["10.0.0.254", "fd00::ff"], "deviceID": "0000:01:00.0",
        "ipam-claim-reference": "c", "example.com/a": 1e3, "example.com/b": [ 18446744073709551616 ]}]"#;
    let other = |key: &str, value: &str| (key.to_owned(), RawJson::parse(value).unwrap());
    let expected = NetworkSelectionElement {
        namespace: Some("other".to_owned()),
        name: "a".to_owned(),
        interface: Some("net7".parse().unwrap()),
        mac: Some("02:00:00:00:00:01".to_owned()),
        ips: vec!["10.0.0.1/24".to_owned(), "fd00::1".to_owned()],
        infiniband_guid: Some("02:00:00:00:00:00:00:01".to_owned()),
        port_mappings: vec![
            PortMapping {
                host_port: 80,
                container_port: 8080,
                protocol: "tcp".to_owned(),
                host_ip: "192.0.2.1".to_owned(),
            },
            PortMapping { host_port: 1, container_port: 2, ..PortMapping::default() },
        ],
        bandwidth: Some(Bandwidth {
            ingress_rate: 1000,
            ingress_burst: 2000,
            egress_rate: 3000,
            egress_burst: 4000,
        }),
        cni_args: Some(RawObject::parse(r#"{"x": 1.0}"#).unwrap()),
        default_route: vec!["10.0.0.254".parse().unwrap(), "fd00::ff".parse().unwrap()],
        device_id: Some("0000:01:00.0".to_owned()),
        ipam_claim: Some("c".to_owned()),
        other: vec![other("example.com/a", "1e3"), other("example.com/b", "[ 18446744073709551616 ]")],
    };
    assert_eq!(errors_in(text), Vec::<String>::new());
    assert_eq!(parse(text).elements().collect::<Vec<_>>(), [(0, &expected)]);
    let again = format!("[{}]", expected.to_json());
    assert_eq!(parse(&again).elements().collect::<Vec<_>>(), [(0, &expected)]);
}

#[test]
fn interfaces_that_multus_accepts_are_parsed() {
    for (text, interface) in [
        ("net@eth0.100", Some("eth0.100")),
        ("net@Data_1", Some("Data_1")),
        ("net", None),
        (r#"[{"name": "net", "interface": "a"}]"#, Some("a")),
        (r#"[{"name": "net", "interface": "", "interfaceRequest": "b"}]"#, Some("b")),
        (r#"[{"name": "net", "interface": "a", "interfaceRequest": "b"}]"#, Some("a")),
        (r#"[{"name": "net@c"}]"#, Some("c")),
        (r#"[{"name": "net", "interface": null}]"#, None),
    ] {
        let selection = parse(text);
        let (_, element) = selection.elements().next().unwrap();
        assert_eq!(element.interface.as_ref().map(crate::IfName::as_str), interface, "{text}");
    }
}

#[test]
fn addresses_may_come_with_an_ipam_claim() {
    let text = r#"[{"name": "a", "ips": ["10.0.0.1"], "ipam-claim-reference": "c"}]"#;
    assert_eq!((parse(text).elements().count(), errors_in(text)), (1, Vec::new()));
}

#[test]
fn hardware_addresses_have_the_forms_of_go() {
    let twenty = vec!["00"; 20].join(":");
    for (mac, valid) in [
        ("02:00:00:00:00:0A", true),
        ("02-00-00-00-00-0a", true),
        ("0200.0000.000a", true),
        ("02:00:00:00:00:00:00:0a", true),
        (twenty.as_str(), true),
        ("02:00:00:00:00", false),
        ("2:00:00:00:00:0a", false),
        ("02:00-00:00:00:0a", false),
        ("0200.0000.00g0", false),
        ("0200.0000", false),
    ] {
        for key in ["mac", "infiniband-guid"] {
            let text = json!([{"name": "a", key: mac}]).to_string();
            assert_eq!(parse(&text).elements().count() == 1, valid, "{text}");
        }
    }
}

#[test]
fn an_invalid_key_is_reported_with_its_position_and_the_others_are_attached() {
    for (value, column, message) in [
        (r#""ips": ["10.0.0.1", "x"]"#, 8, "ips[1]: \"x\" is not an IP address"),
        (r#""ips": ["10.0.0.1/33"]"#, 8, "ips[0]: \"10.0.0.1/33\" is not an IP address"),
        (r#""ips": "10.0.0.1""#, 8, "ips: invalid type: string \"10.0.0.1\", expected a sequence"),
        (r#""mac": "x""#, 8, "mac: \"x\" is not a MAC address"),
        (r#""infiniband-guid": "x""#, 20, "infiniband-guid: \"x\" is not a GUID"),
        (r#""interface": "a/b""#, 14, "interface: \"a/b\": an interface name cannot contain '/'"),
        (r#""interfaceRequest": 7"#, 21, "interfaceRequest: invalid type: integer `7`, expected a string"),
        (r#""namespace": "A""#, 14, "namespace: \"A\" is not a name of a namespace"),
        (
            r#""portMappings": [{"hostPort": 70000}]"#,
            17,
            "portMappings: invalid value: integer `70000`, expected u16",
        ),
        (
            r#""portMappings": [{"hostPort": 1.0}]"#,
            17,
            "portMappings: invalid type: floating point `1.0`, expected u16",
        ),
        (r#""bandwidth": {"ingressRate": -1}"#, 14, "bandwidth: invalid value: integer `-1`, expected u64"),
        (r#""portMappings": [[1, 2]]"#, 17, "portMappings: expected a list of objects"),
        (r#""portMappings": {}"#, 17, "portMappings: invalid type: map, expected a sequence"),
        (r#""bandwidth": [1, 2, 3, 4]"#, 14, "bandwidth: expected an object"),
        (r#""bandwidth": []"#, 14, "bandwidth: expected an object"),
        (r#""cni-args": []"#, 13, "cni-args: invalid type: sequence, expected an object"),
        (r#""default-route": ["x"]"#, 18, "default-route: invalid IP address syntax"),
        (r#""deviceID": {}"#, 13, "deviceID: invalid type: map, expected a string"),
        (
            r#""ipam-claim-reference": 7"#,
            25,
            "ipam-claim-reference: invalid type: integer `7`, expected a string",
        ),
    ] {
        let text = format!("[{{\"name\": \"a\"}},\n{{\"name\": \"b\",\n{value}}},\n{{\"name\": \"c\"}}]");
        let selection = parse(&text);
        let indexes: Vec<usize> = selection.elements().map(|(index, _)| index).collect();
        assert_eq!(indexes, [0, 2], "{text}");
        assert_eq!(errors_in(&text), [format!("element [1] at line 3 column {column}: {message}")], "{text}");
        let error = selection.entries[1].element.clone().unwrap_err();
        assert!(value.starts_with(&format!("\"{}\"", error.key.unwrap())), "{error:?}");
    }
    assert_eq!(
        errors_in("a, b@a:b"),
        ["element [1] at line 1 column 6: an interface name cannot contain ':'"]
    );
    assert_eq!(errors_in(r#"[{"mac": "x"}]"#), ["element [0] at line 1 column 2: the name is missing"]);
    assert_eq!(
        errors_in("[{\"name\": \"a\"},\n {\"name\" \"b\"}]"),
        ["invalid JSON at line 2 column 10: expected `:`"]
    );
}

#[test]
fn deep_arguments_are_an_error_of_one_element() {
    let deep = format!("{}{}", "[".repeat(10_000), "]".repeat(10_000));
    let text = format!(r#"[{{"name":"a","cni-args":{{"x":{deep}}}}},{{"name":"b","example.com/x":{deep}}}]"#);
    let selection = parse(&text);
    assert_eq!(selection.elements().map(|(_, element)| element.name.as_str()).collect::<Vec<_>>(), ["b"]);
    assert_eq!(selection.references("home").count(), 2);
}

#[test]
fn many_errors_in_a_long_annotation_take_linear_time() {
    let started = std::time::Instant::now();
    let text = format!("[{}7]", format!("7,{}", " ".repeat(1000)).repeat(MAX_ELEMENTS));
    assert_eq!(parse(&text).errors().count(), MAX_ELEMENTS + 1);
    assert!(started.elapsed() < std::time::Duration::from_secs(5), "{:?}", started.elapsed());
}

fn append(text: Option<&str>, element: &NetworkSelectionElement) -> String {
    let mut editor = SelectionEditor::parse(text).unwrap();
    editor.append(element).unwrap();
    editor.finish().unwrap().unwrap()
}

#[test]
fn an_appended_element_follows_the_layout_of_the_annotation() {
    let with_interface = NetworkSelectionElement {
        namespace: Some("ns".to_owned()),
        interface: Some("net9".parse().unwrap()),
        ..named("new")
    };
    for (text, expected) in [
        (None, r#"[{"name":"new","namespace":"ns","interface":"net9"}]"#),
        (Some(""), r#"[{"name":"new","namespace":"ns","interface":"net9"}]"#),
        (Some("[]"), r#"[{"name":"new","namespace":"ns","interface":"net9"}]"#),
        (Some(" [ ]\n"), " [{\"name\":\"new\",\"namespace\":\"ns\",\"interface\":\"net9\"} ]\n"),
        (Some("a"), "a,ns/new@net9"),
        (Some(" a ,b, "), " a ,b ,ns/new@net9"),
        (
            Some(r#"[{ "name" : "a", "x.y/z": 1e3 }]"#),
            r#"[{ "name" : "a", "x.y/z": 1e3 },{"name":"new","namespace":"ns","interface":"net9"}]"#,
        ),
        (
            Some("[\n  {\"name\":\"a\"}\n]"),
            "[\n  {\"name\":\"a\"},\n  {\"name\":\"new\",\"namespace\":\"ns\",\"interface\":\"net9\"}\n]",
        ),
        (
            Some("[{\"name\":\"a\"}, {\"name\":7}]"),
            "[{\"name\":\"a\"}, {\"name\":7}, {\"name\":\"new\",\"namespace\":\"ns\",\"interface\":\"net9\"}]",
        ),
    ] {
        assert_eq!(append(text, &with_interface), expected, "{text:?}");
    }
}

#[test]
fn names_become_json_only_if_the_new_element_needs_it() {
    let with_mac = NetworkSelectionElement { mac: Some("02:00:00:00:00:01".to_owned()), ..named("new") };
    let dotted = NetworkSelectionElement { interface: Some("eth0.5".parse().unwrap()), ..named("new") };
    assert_eq!(
        append(Some("a, ns/b@net2"), &with_mac),
        r#"[{"name":"a"},{"name":"b","namespace":"ns","interface":"net2"},{"name":"new","mac":"02:00:00:00:00:01"}]"#
    );
    assert_eq!(append(Some("a"), &dotted), r#"[{"name":"a"},{"name":"new","interface":"eth0.5"}]"#);
    assert_eq!(append(Some("a, B!"), &named("new")), "a, B!, new");
    let mut editor = SelectionEditor::parse(Some("a, B!")).unwrap();
    let error = editor.append(&with_mac).unwrap_err();
    assert!(error.to_string().starts_with("element [1] at line 1 column 4:"), "{error}");
}

#[test]
fn removed_elements_take_one_separator_with_them() {
    for (text, removed, expected) in [
        ("a, b ,c", "b", "a ,c"),
        ("a, b ,c", "a", "b ,c"),
        ("a, b ,c", "c", "a, b"),
        ("a", "a", ""),
        (" a, a,", "a", ""),
        ("[\n  {\"name\":\"a\"},\n  {\"name\":\"b\"}\n]", "a", "[\n  {\"name\":\"b\"}\n]"),
        ("[\n  {\"name\":\"a\"},\n  {\"name\":\"b\"}\n]", "b", "[\n  {\"name\":\"a\"}\n]"),
        ("[\n  {\"name\":\"a\"}\n]", "a", "[]"),
        (r#"[ {"name":"a"} , 7 , {"name":"a"} ]"#, "a", "[ 7 ]"),
        (r#"[{"name":"a"}]"#, "x", r#"[{"name":"a"}]"#),
    ] {
        let mut editor = SelectionEditor::parse(Some(text)).unwrap();
        editor.remove(|_, element| element.name == removed);
        assert_eq!(editor.finish(), Ok(Some(expected.to_owned())), "{text:?} without {removed}");
    }
}

#[test]
fn a_key_is_set_in_its_place() {
    for (text, expected) in [
        ("a", r#"[{"name":"a","ipam-claim-reference":"c"}]"#),
        (
            r#"[ { "name" : "a", "x.y/z": 1.0 } , {"name":"b"}]"#,
            r#"[ { "name" : "a", "x.y/z": 1.0,"ipam-claim-reference":"c" } , {"name":"b"}]"#,
        ),
        (
            r#"[{"ipam-claim-reference": "old", "name": "a"}]"#,
            r#"[{"ipam-claim-reference": "c", "name": "a"}]"#,
        ),
    ] {
        let mut editor = SelectionEditor::parse(Some(text)).unwrap();
        editor.set(0, "ipam-claim-reference", &json!("c")).unwrap();
        editor.set(9, "mac", &json!("x")).unwrap();
        assert_eq!(
            editor.entries().next().unwrap().element.as_ref().unwrap().ipam_claim.as_deref(),
            Some("c")
        );
        assert_eq!(editor.finish(), Ok(Some(expected.to_owned())));
    }
    let mut editor = SelectionEditor::parse(Some("[7]")).unwrap();
    assert!(editor.set(0, "mac", &json!("x")).is_err());
}

#[test]
fn an_annotation_that_is_invalid_as_a_whole_is_not_edited() {
    for text in ["[{", r#"{"name":"a"}"#, "[] []", &" ".repeat(MAX_LENGTH + 1)] {
        assert!(SelectionEditor::parse(Some(text)).is_err());
    }
    let mut editor = SelectionEditor::parse(Some("a")).unwrap();
    editor.set(0, "x", &Value::from("x".repeat(MAX_LENGTH))).unwrap();
    assert!(matches!(editor.finish(), Err(Error::TooLong(_))));
}

/// Annotations with elements of every kind.
fn annotation() -> impl Strategy<Value = String> {
    let blank = || prop::sample::select(vec!["", " ", "\n  "]);
    let element = prop::sample::select(vec![
        r#"{"name":"a"}"#,
        r#"{ "name" : "b" , "x.y/z" : 1e3 , "x.y/z":1.0 }"#,
        r#"{"Name":"c","interface":"net1","big":18446744073709551616}"#,
        r#"{"name":7}"#,
        "null",
        "[1, 2]",
        r#""d""#,
    ]);
    let list = prop::collection::vec((blank(), element, blank()), 0..6).prop_map(|all| {
        let all: Vec<String> = all.into_iter().map(|(a, element, b)| format!("{a}{element}{b}")).collect();
        format!("[{}]", all.join(","))
    });
    let name = prop::sample::select(vec!["a", "ns/b", "c@net1", "B!", ""]);
    let names = prop::collection::vec((blank(), name, blank()), 0..6).prop_map(|all| {
        let all: Vec<String> = all.into_iter().map(|(a, name, b)| format!("{a}{name}{b}")).collect();
        all.join(",")
    });
    prop_oneof![list, names]
}

proptest! {
    #[test]
    fn never_panics(text in any::<String>(), json in r#"\[[\[\]{}",:a-z/@0-9]*\]?"#) {
        for text in [&text, &json] {
            let _ = parse(text).references("home").count();
            if let Ok(mut editor) = SelectionEditor::parse(Some(text)) {
                prop_assert_eq!(editor.clone().finish(), Ok(Some(text.clone())));
                editor.remove(|_, _| true);
                let _ = editor.append(&named("x"));
                let _ = editor.set(0, "name", &json!("y"));
                let _ = editor.finish();
            }
        }
    }

    #[test]
    fn an_edit_keeps_every_other_element(text in annotation(), remove in any::<[bool; 6]>(), add in any::<bool>()) {
        let before = SelectionEditor::parse(Some(&text)).unwrap();
        prop_assert_eq!(before.clone().finish(), Ok(Some(text.clone())));
        let mut editor = before.clone();
        editor.remove(|index, _| remove[index]);
        if add {
            editor.append(&named("new")).unwrap();
        }
        let form = editor.form();
        let after = editor.finish().unwrap().unwrap();
        let kept = |index: usize, entry: &SelectionEntry| entry.element.is_err() || !remove[index];
        let texts = |text: &str| -> Vec<String> {
            match SelectionForm::of(Some(text)) {
                SelectionForm::Json => list_items(text).unwrap().into_iter().map(str::to_owned).collect(),
                _ => items(text).map(str::to_owned).collect(),
            }
        };
        let mut expected: Vec<String> = texts(&text).into_iter().zip(before.entries().enumerate())
            .filter(|(_, (index, entry))| kept(*index, entry)).map(|(text, _)| text).collect();
        if add {
            expected.push(if form == SelectionForm::Json { r#"{"name":"new"}"#.into() } else { "new".into() });
        }
        prop_assert_eq!(texts(&after), expected);
    }

    #[test]
    fn a_rendered_element_parses_to_itself(
        name in "[a-z]{1,5}", namespace in prop::option::of("[a-z]{1,5}"), interface in prop::option::of("[a-z0-9._-]{3,8}"),
        ips in prop::collection::vec(any::<std::net::IpAddr>(), 0..3), ports in prop::collection::vec(any::<(u16, u16)>(), 0..3),
        rates in prop::option::of(any::<[u64; 4]>()), text in prop::option::of("[a-z\"\\\\é]{1,5}"),
    ) {
        let mappings = ports.into_iter().map(|(host_port, container_port)| PortMapping {
            host_port, container_port, ..PortMapping::default()
        });
        let element = NetworkSelectionElement {
            namespace, name,
            interface: interface.map(|text| text.parse().unwrap()),
            ips: ips.iter().map(ToString::to_string).collect(),
            port_mappings: mappings.collect(),
            bandwidth: rates.map(|[ingress_rate, ingress_burst, egress_rate, egress_burst]| Bandwidth {
                ingress_rate, ingress_burst, egress_rate, egress_burst,
            }),
            default_route: ips,
            device_id: text.clone(),
            ipam_claim: text,
            ..NetworkSelectionElement::default()
        };
        let list = append(None, &element);
        let list = parse(&list);
        prop_assert_eq!(list.elements().collect::<Vec<_>>(), [(0, &element)]);
        let names = append(Some("first"), &element);
        let names = parse(&names);
        prop_assert_eq!(names.elements().nth(1), Some((1, &element)));
    }
}
