use super::*;

/// A pod with this annotation, and these interfaces in network-status.
fn pod(networks: Option<&str>, interfaces: &[(&str, &str)]) -> PodView {
    let status = |&(name, interface): &(&str, &str)| NetworkStatus {
        name: name.to_owned(),
        interface: interface.to_owned(),
        default: interface == "eth0",
        ..NetworkStatus::default()
    };
    PodView {
        namespace: "default".to_owned(),
        name: "web".to_owned(),
        networks: networks.map(str::to_owned),
        statuses: [("cbr0", "eth0")].iter().chain(interfaces).map(status).collect(),
        ..PodView::default()
    }
}

fn network(text: &str) -> NetworkName {
    crate::plug::network_name(text).unwrap()
}

fn request(name: &str, interface: Option<&str>) -> PlugRequest {
    PlugRequest {
        network: network(name),
        interface: interface.map(|name| name.parse().unwrap()),
        ips: Vec::new(),
        mac: None,
    }
}

fn edit(changed: bool, annotation: &str, network: &str, interface: &str) -> PlannedEdit {
    PlannedEdit {
        changed,
        annotation: Some(annotation.to_owned()),
        network: network.to_owned(),
        interface: interface.to_owned(),
    }
}

fn by_interface(name: &str) -> UnplugTarget {
    UnplugTarget::Interface(name.parse().unwrap())
}

#[test]
fn the_first_network_of_a_pod_is_written_as_json() {
    assert_eq!(
        plug(&pod(None, &[]), &request("blue", None)).unwrap(),
        edit(true, r#"[{"name":"blue","interface":"net1"}]"#, "default/blue", "net1")
    );
}

#[test]
fn names_stay_names_until_an_address_needs_json() {
    let pod = pod(Some("red"), &[("default/red", "net1")]);
    let mut request = request("other/blue", None);
    assert_eq!(plug(&pod, &request).unwrap(), edit(true, "red,other/blue@net2", "other/blue", "net2"));
    request.ips = vec!["10.1.0.5/24".to_owned()];
    request.mac = Some("02:00:00:00:00:01".to_owned());
    let planned = plug(&pod, &request).unwrap();
    assert_eq!(
        planned.annotation.unwrap(),
        r#"[{"name":"red"},{"name":"blue","namespace":"other","ips":["10.1.0.5/24"],"mac":"02:00:00:00:00:01","interface":"net2"}]"#
    );
}

#[test]
fn other_elements_keep_their_keys() {
    let text = r#"[ {"name":"red", "example.com/x": {"a": 1}} ]"#;
    let planned = plug(&pod(Some(text), &[]), &request("blue", Some("ens4"))).unwrap();
    assert_eq!(
        planned.annotation.unwrap(),
        r#"[ {"name":"red", "example.com/x": {"a": 1}}, {"name":"blue","interface":"ens4"} ]"#
    );
}

#[test]
fn a_free_interface_name_is_the_position_or_the_lowest_free_one() {
    let name = |networks, interfaces: &[(&str, &str)]| {
        plug(&pod(Some(networks), interfaces), &request("blue", None)).unwrap().interface
    };
    assert_eq!(name("red,green", &[("default/red", "net1"), ("default/green", "net2")]), "net3");
    assert_eq!(name("red@net2", &[("default/red", "net2")]), "net1");
    assert_eq!(name("red", &[]), "net2", "the element before will be net1");
    assert_eq!(name("", &[("default/gone", "net1")]), "net2", "it is being removed");
}

#[test]
fn an_element_that_is_there_is_not_added_again() {
    for networks in ["blue@net2", "red,blue@net2"] {
        assert_eq!(
            plug(&pod(Some(networks), &[]), &request("blue", Some("net2"))).unwrap(),
            edit(false, networks, "default/blue", "net2")
        );
    }
    let unnamed = pod(Some("blue"), &[("default/blue", "net1")]);
    assert!(!plug(&unnamed, &request("blue", Some("net1"))).unwrap().changed);
}

#[test]
fn an_interface_of_another_network_or_with_other_addresses_is_an_error() {
    let error =
        |networks, request: &PlugRequest| plug(&pod(Some(networks), &[]), request).unwrap_err().to_string();
    let taken = error("red@net2", &request("blue", Some("net2")));
    assert!(taken.contains("net2") && taken.contains("default/red"), "{taken}");
    let other = PlugRequest { ips: vec!["10.1.0.6".to_owned()], ..request("blue", Some("net2")) };
    let changed = error(r#"[{"name":"blue","interface":"net2","ips":["10.1.0.5"]}]"#, &other);
    assert!(changed.contains("unplug it first"), "{changed}");
    let default = error("", &request("blue", Some("eth0")));
    assert!(default.contains("default network"), "{default}");
}

#[test]
fn an_invalid_annotation_is_not_edited() {
    let error = plug(&pod(Some("[{"), &[]), &request("blue", None)).unwrap_err();
    assert!(format!("{error:#}").contains("line 1 column"), "{error:#}");
}

#[test]
fn an_interface_is_removed_by_its_name_or_its_network() {
    let pod = pod(Some("red,blue@net2"), &[("default/red", "net1"), ("default/blue", "net2")]);
    let removed = edit(true, "red", "default/blue", "net2");
    assert_eq!(unplug(&pod, &by_interface("net2")).unwrap(), removed);
    assert_eq!(unplug(&pod, &UnplugTarget::Network(network("blue"))).unwrap(), removed);
    assert_eq!(unplug(&pod, &by_interface("net1")).unwrap(), edit(true, "blue@net2", "default/red", "net1"));
}

#[test]
fn the_last_network_leaves_an_empty_annotation() {
    assert_eq!(
        unplug(&pod(Some(r#"[{"name":"blue","interface":"net1"}]"#), &[]), &by_interface("net1")).unwrap(),
        edit(true, "[]", "default/blue", "net1")
    );
}

#[test]
fn a_network_with_several_interfaces_is_not_chosen_from() {
    let pod = pod(Some("blue,blue@ens4"), &[("default/blue", "net1"), ("default/blue", "ens4")]);
    let error = unplug(&pod, &UnplugTarget::Network(network("blue"))).unwrap_err().to_string();
    assert!(error.contains("net1 (default/blue), ens4 (default/blue)"), "{error}");
}

#[test]
fn unnamed_elements_that_stay_get_the_names_of_their_interfaces() {
    let pod = pod(Some("blue,red,blue"), &[("default/blue", "net1"), ("default/blue", "net3")]);
    let planned = unplug(&pod, &by_interface("net1")).unwrap();
    assert_eq!(planned.annotation.unwrap(), r#"[{"name":"red"},{"name":"blue","interface":"net3"}]"#);
}

#[test]
fn unnamed_elements_have_the_interface_with_their_addresses() {
    let (with_mac, with_ip) =
        (r#"{"name":"blue","mac":"02-00-00-00-00-0A"}"#, r#"{"name":"blue","ips":["10.1.0.5/24"]}"#);
    let text = format!(r#"[{{"name":"blue"}},{with_ip},{with_mac}]"#);
    let interfaces = [("default/blue", "net1"), ("default/blue", "net2"), ("default/blue", "net3")];
    let mut pod = pod(Some(&text), &interfaces);
    pod.statuses[1].mac = "02:00:00:00:00:0a".to_owned();
    pod.statuses[2].ips = vec!["fd00::5".to_owned(), "10.1.0.5".to_owned()];
    let left = |interface: &str| unplug(&pod, &by_interface(interface)).unwrap().annotation.unwrap();
    let named =
        |element: &str, interface: &str| element.replace('}', &format!(r#","interface":"{interface}"}}"#));
    let (first, ip, mac) =
        (named(r#"{"name":"blue"}"#, "net3"), named(with_ip, "net2"), named(with_mac, "net1"));
    assert_eq!(left("net1"), format!("[{first},{ip}]"));
    assert_eq!(left("net2"), format!("[{first},{mac}]"));
    assert_eq!(left("net3"), format!("[{ip},{mac}]"));
}

#[test]
fn unnamed_elements_have_their_interfaces_in_the_order_of_their_numbers() {
    let pod = pod(Some("blue,blue"), &[("default/blue", "net10"), ("default/blue", "net2")]);
    let planned = unplug(&pod, &by_interface("net2")).unwrap();
    assert_eq!(planned.annotation.unwrap(), r#"[{"name":"blue","interface":"net10"}]"#);
}

#[test]
fn what_is_not_there_cannot_be_removed() {
    let error = |networks, interfaces: &[(&str, &str)], target| {
        unplug(&pod(networks, interfaces), &target).unwrap_err().to_string()
    };
    let none = error(None, &[], by_interface("net1"));
    assert!(none.contains("requests no networks"), "{none}");
    let other = error(Some("red"), &[("default/red", "net1")], by_interface("net2"));
    assert!(other.contains("net1 (default/red)"), "{other}");
    let default = error(Some("red"), &[], by_interface("eth0"));
    assert!(default.contains("cannot be unplugged"), "{default}");
}

#[test]
fn an_interface_that_is_being_removed_is_waited_for() {
    let planned = unplug(&pod(Some("[]"), &[("default/blue", "net1")]), &by_interface("net1")).unwrap();
    assert_eq!(planned, edit(false, "[]", "default/blue", "net1"));
}
