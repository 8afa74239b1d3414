//! Arguments of plugins, records, and retries.

use api::{
    attachments::AttachmentState,
    nad_config::NadConfig,
    selection::{NadRef, NetworkSelection, NetworkSelectionElement},
};
use serde_json::json;

use super::*;

fn element(text: &str) -> NetworkSelectionElement {
    let selection = NetworkSelection::parse(Some(&format!("[{text}]")));
    selection.entries[0].element.clone().unwrap()
}

#[test]
fn arguments_equal_those_of_a_cold_attach() {
    let element = element(
        r#"{"name":"a","ips":["10.0.0.5/24","fd00::5"],"mac":"02:00:00:00:00:0A","infiniband-guid":"02:00:00:00:00:00:00:01",
            "portMappings":[{"hostPort":8080,"containerPort":80,"protocol":"tcp"}],"bandwidth":{"ingressRate":1000},
            "deviceID":"0000:01:02.3"}"#,
    );
    let interface = "net1".parse().unwrap();
    assert_eq!(
        json!(capability_args(&element, &nad("a"), "box", &interface)),
        json!({
            "ips": ["10.0.0.5/24", "fd00::5"],
            "mac": "02:00:00:00:00:0A",
            "infinibandGUID": "02:00:00:00:00:00:00:01",
            "portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}],
            "bandwidth": {"ingressRate": 1000, "ingressBurst": 0, "egressRate": 0, "egressBurst": 0},
            "deviceID": "0000:01:02.3",
            "CNIDeviceInfoFile": "/var/run/k8s.cni.cncf.io/devinfo/cni/default-a-box_net1",
        })
    );
    let pod = PodIdentity { runtime_uid: "static-uid".to_owned(), ..SimNode::new().pod };
    let args: Vec<String> =
        cni_args(&pod, "box", &element).into_iter().map(|(key, value)| format!("{key}={value}")).collect();
    assert_eq!(
        args.join(";"),
        "IgnoreUnknown=true;K8S_POD_NAMESPACE=default;K8S_POD_NAME=web;K8S_POD_INFRA_CONTAINER_ID=box;\
         K8S_POD_UID=static-uid;MAC=02:00:00:00:00:0A;IP=10.0.0.5/24,fd00::5"
    );
}

#[test]
fn an_element_without_requests_has_only_the_fixed_arguments() {
    let element = element(r#"{"name":"a"}"#);
    assert_eq!(json!(capability_args(&element, &nad("a"), "box", &"net1".parse().unwrap())), json!({}));
    assert_eq!(cni_args(&SimNode::new().pod, "box", &element).len(), 5);
}

#[test]
fn arguments_of_an_element_are_merged_into_every_plugin() {
    let args = element(r#"{"name":"a","cni-args":{"k":1e3,"K":"x","old":{"n":[1]}}}"#);
    for (config, expected) in [
        (
            r#"{"name":"n","type":"p"}"#,
            json!({"name": "n", "type": "p", "args": {"cni": {"k": 1e3, "K": "x", "old": {"n": [1]}}}}),
        ),
        (
            r#"{"name":"n","type":"p","args":{"other":1,"cni":{"old":2,"keep":3}}}"#,
            json!({"name": "n", "type": "p",
                "args": {"other": 1, "cni": {"k": 1e3, "K": "x", "old": {"n": [1]}, "keep": 3}}}),
        ),
        (
            r#"{"name":"n","plugins":[{"type":"p"},{"type":"q","args":{"a":1}}]}"#,
            json!({"name": "n", "plugins": [
                {"type": "p", "args": {"cni": {"k": 1e3, "K": "x", "old": {"n": [1]}}}},
                {"type": "q", "args": {"a": 1, "cni": {"k": 1e3, "K": "x", "old": {"n": [1]}}}}]}),
        ),
    ] {
        let config = NadConfig::parse(Some(config), "n").unwrap();
        let merged = config_with_args(&config, &args).unwrap();
        assert_eq!(serde_json::from_str::<serde_json::Value>(merged.text()).unwrap(), expected);
        assert_eq!(config_with_args(&config, &element(r#"{"name":"a"}"#)).unwrap(), config);
    }
    let config = NadConfig::parse(Some(r#"{"name":"n","type":"p","args":7}"#), "n").unwrap();
    assert_eq!(config_with_args(&config, &args), Err(ConfigError::NotAnObject("args")));
}

#[test]
fn a_network_whose_arguments_do_not_fit_is_reported() {
    let mut node = SimNode::with(r#"[{"name":"a","cni-args":{"k":1}},{"name":"b"}]"#);
    let config = NadConfig::parse(Some(r#"{"type":"p","args":7}"#), "a").unwrap();
    node.nads.insert(nad("a"), NadState::Ready { config: Box::new(config) });
    node.settle();
    assert_eq!(node.states(), ["default/a@net1 Failed/NetworkInvalid", "default/b@net2 Attached"]);
}

#[test]
fn addresses_are_compared_in_one_form() {
    let first = RequestedAddresses::new(&["FD00::0:5/64", "10.0.0.5"], Some("02-00-00-00-00-0A"));
    let second = RequestedAddresses::new(&["10.0.0.5", "fd00::5/64"], Some("0200.0000.000a"));
    assert_eq!(first, second);
    assert_ne!(first, RequestedAddresses::new(&["10.0.0.5/24", "fd00::5/64"], Some("02:00:00:00:00:0a")));
    assert_eq!(RequestedAddresses::new::<&str>(&[], Some("")), RequestedAddresses::default());
}

#[test]
fn a_record_is_one_line_and_survives_the_journal() {
    let mut node = SimNode::with(r#"[{"name":"a","mac":"02:00:00:00:00:01","cni-args":{"k":1}}]"#);
    let Some(Step::Add(step)) = node.plan().step else { panic!("{:?}", node.plan()) };
    let intent = step.intent(vec![1, 2]);
    node.settle();
    let attached = node.journal.values().next().unwrap().clone();
    node.edit("[]");
    let Some(Step::Remove(step)) = node.plan().step else { panic!("{:?}", node.plan()) };
    assert!(step.intent().unwrap().removing);
    for record in [intent, attached, step.intent().unwrap(), step.removed_record()] {
        let line = serde_json::to_string(&record).unwrap();
        assert!(!line.contains('\n') && line.contains(r#""nad":"default/a""#), "{line}");
        assert_eq!(serde_json::from_str::<AttachmentRecord>(&line).unwrap(), record);
        let newer = line.replacen('{', r#"{"future":1,"#, 1);
        assert_eq!(serde_json::from_str::<AttachmentRecord>(&newer).unwrap(), record);
    }
}

#[test]
fn a_failure_waits_until_its_delay_ends_or_its_inputs_change() {
    let mut node = SimNode::with(r#"[{"name":"a","interface":"net1"}]"#);
    node.broken.insert(nad("a"));
    node.settle();
    let adds = |node: &SimNode| node.calls.iter().filter(|call| call.starts_with("ADD a")).count();
    assert_eq!(adds(&node), 1);
    // Something else changes.
    node.edit(r#"[ {"name":"a","interface":"net1"} ]"#);
    node.settle();
    assert_eq!(adds(&node), 1);
    // The NAD, the element, or another interface of the pod changes.
    node.nads.insert(nad("a"), ready("other"));
    node.settle();
    assert_eq!(adds(&node), 2);
    node.edit(r#"[{"name":"a","interface":"net1","mac":"02:00:00:00:00:01"}]"#);
    node.settle();
    assert_eq!(adds(&node), 3);
    node.edit(r#"[{"name":"a","interface":"net1","mac":"02:00:00:00:00:01"},{"name":"b"}]"#);
    node.settle();
    assert_eq!(adds(&node), 4);
    let failures: Vec<_> = node.failures.attempts().cloned().collect();
    assert_eq!(failures.len(), 1);
    node.pass_backoffs();
    node.settle();
    assert_eq!(adds(&node), 5);
    node.edit("b");
    node.settle();
    assert!(node.failures.is_empty());
}

#[test]
fn an_error_is_one_line_of_bounded_length() {
    let node = SimNode::with("a@net1");
    let Some(Step::Add(step)) = node.plan().step else { panic!("{:?}", node.plan()) };
    let mut failures = Failures::default();
    failures.record(step.attempt.clone(), step.fingerprint, &"ä\n".repeat(100_000), node.now);
    let error = &failures.get(&step.attempt, step.fingerprint).unwrap().error;
    assert!(error.len() <= 512 && !error.contains('\n'));
}

/// A pod with an interface from a NAD of another namespace that Multus attached at its start.
fn with_default_network(networks: &str) -> SimNode {
    let mut node = SimNode::started_unseen("a,b@net2");
    for record in node.multus.values_mut().filter(|record| record.key.interface == "net1") {
        record.nad = NadRef::new("infra", "storage");
    }
    let status = node.server.network_status.as_ref().unwrap().replace("default/a", "infra/storage");
    node.server.network_status = Some(status);
    node.edit("b@net2");
    node.settle();
    node.edit(networks);
    node
}

#[test]
fn a_default_network_of_multus_is_not_removed() {
    for (networks, kept) in [("b@net2", "net1,net2"), ("[]", "net1"), ("", "net1")] {
        let mut node = with_default_network(networks);
        node.settle();
        assert_eq!(node.link_names().join(","), kept, "{networks}");
        assert!(node.server.network_status.as_ref().unwrap().contains("infra/storage"));
        assert_eq!(
            (node.reasons().contains(&"AddedInterface"), node.server.attachments.clone()),
            (false, None)
        );
        node.restart();
        assert_idle(&node);
    }
}

#[test]
fn an_interface_of_another_namespace_is_removed_if_the_annotation_requested_it() {
    let mut node = with_default_network("infra/storage,b@net2");
    node.settle();
    assert!(node.calls.is_empty());
    node.edit("[]");
    node.settle();
    assert_eq!((node.link_names(), node.addresses.len()), (Vec::new(), 0));
}

#[test]
fn what_cannot_be_a_default_network_of_multus_is_reported_as_kept() {
    // Multus gives default networks neither a name nor addresses.
    for (interface, addresses) in [("data1", false), ("net1", true)] {
        let mut node = with_default_network("b@net2");
        let mut records = std::mem::take(&mut node.multus);
        for record in records.values_mut().filter(|record| record.key.interface == "net1") {
            record.requested = addresses.then(|| RequestedAddresses::new(&["10.0.0.5/24"], None));
            record.key.interface = interface.to_owned();
        }
        node.multus = records.into_values().map(|record| (record.key.clone(), record)).collect();
        let plan = node.plan();
        assert_eq!(plan.step, None, "{interface}");
        let [state] = &plan.states[..] else { panic!("{plan:?}") };
        assert_eq!((state.interface.as_str(), state.state), (interface, AttachmentState::Kept));
    }
}

#[test]
fn nothing_is_newly_reported_as_kept_until_the_configuration_of_multus_is_known() {
    // It may be a default network of the pod's own namespace.
    let mut node = SimNode::started_unseen("a");
    node.defaults_known = false;
    node.edit("[]");
    node.settle();
    assert_eq!((node.states().len(), node.events.len(), node.writes), (0, 0, 0));
    node.defaults_known = true;
    node.settle();
    assert_eq!(node.states(), ["default/a@net1 Kept/RemovalNotSeen"]);
    assert_eq!(node.reasons(), ["InterfaceKept"]);
    // A restart of the daemon and of multus is no news.
    node.defaults_known = false;
    node.restart();
    assert_idle(&node);
}

#[test]
fn an_interface_stays_whose_element_was_removed_before_the_daemon_saw_it() {
    for origin in [Origin::PodStart, Origin::Original] {
        let mut node = SimNode::started_unseen("a@net1,b@net2");
        for record in node.multus.values_mut() {
            record.origin = origin;
        }
        node.edit("b@net2");
        node.settle();
        assert_eq!(node.states(), ["default/a@net1 Kept/RemovalNotSeen"]);
        // Another edit does not detach it, and neither does a restart.
        for restarts in [false, true] {
            node.edit("b@net2,c@net3");
            node.settle();
            if restarts {
                node.restart();
                assert_idle(&node);
            }
        }
        assert_eq!(node.calls, ["ADD c net3"]);
        assert_eq!(node.states(), ["default/c@net3 Attached", "default/a@net1 Kept/RemovalNotSeen"]);
        assert_eq!(node.reasons(), ["InterfaceKept", "AddedInterface"]);
        // Once it was requested again, the next edit counts, also if the daemon is down meanwhile.
        node.edit("b@net2,c@net3,a@net1");
        node.settle();
        assert_eq!(node.states(), ["default/c@net3 Attached"]);
        node.server.networks = Some("b@net2,c@net3".to_owned());
        node.restart();
        node.settle();
        assert_eq!(node.calls, ["ADD c net3", "DEL a net1"]);
        assert_eq!(
            (node.link_names(), node.states()),
            (vec!["net2", "net3"], vec!["default/c@net3 Attached".to_owned()])
        );
        node.check();
    }
}

#[test]
fn of_several_unnamed_elements_the_one_that_was_removed_unseen_keeps_its_interface() {
    let mut node = SimNode::started_unseen("a,a");
    node.edit("a");
    node.settle();
    assert_eq!((node.link_names(), node.calls.len()), (vec!["net1", "net2"], 0));
    assert_eq!(node.states(), ["default/a@net2 Kept/RemovalNotSeen"]);
    node.edit("[]");
    node.settle();
    assert_eq!((node.link_names(), node.calls.clone()), (vec!["net2"], vec!["DEL a net1".to_owned()]));
}

#[test]
fn a_request_of_a_pod_that_does_not_run_yet_counts() {
    let mut node = SimNode::started_unseen("a,b");
    node.lifecycle = PodLifecycle::Pending;
    node.settle();
    node.edit("b");
    node.settle();
    node.lifecycle = PodLifecycle::Running;
    node.settle();
    assert_eq!((node.calls.clone(), node.link_names()), (vec!["DEL a net1".to_owned()], vec!["net2"]));
}

#[test]
fn what_a_pod_requests_while_hotplug_is_off_does_not_count() {
    for mode in [PlugMode::Off, PlugMode::StandDown] {
        let mut node = SimNode::started_unseen("a");
        node.mode = mode;
        node.settle();
        node.edit("[]");
        node.settle();
        node.mode = PlugMode::On;
        node.settle();
        assert_eq!(
            (node.calls.len(), node.states()),
            (0, vec!["default/a@net1 Kept/RemovalNotSeen".to_owned()])
        );
    }
}

#[test]
fn what_is_remembered_of_requests_is_bounded() {
    let mut reported = Reported::default();
    let mut desired = SimNode::new().desired();
    for number in 0..100 {
        desired.networks = Some(format!("a@net{number}"));
        reported.note_request(&desired);
        reported.note_request(&desired);
    }
    desired.networks = Some("a".repeat(MAX_REQUEST + 1));
    reported.note_request(&desired);
    assert_eq!((reported.requests.len(), reported.requests[7].as_str()), (MAX_REQUESTS, "a@net99"));
}

#[test]
fn a_device_is_refused() {
    let config = r#"{"cniVersion":"1.0.0","name":"b","type":"host-device","capabilities":{"deviceID":true}}"#;
    let mut node = SimNode::with(r#"[{"name":"a","deviceID":"0000:03:00.0"},{"name":"b"},{"name":"c"}]"#);
    let config = Box::new(NadConfig::parse(Some(config), "b").unwrap());
    node.nads.insert(nad("b"), NadState::Ready { config });
    node.settle();
    assert_eq!(node.calls, ["ADD c net3"]);
    assert_eq!(
        node.states(),
        [
            "default/a@net1 Refused/DeviceRequired",
            "default/b@net2 Refused/DeviceRequired",
            "default/c@net3 Attached"
        ]
    );
    assert_eq!(node.reasons(), ["DeviceRequired", "DeviceRequired", "AddedInterface"]);
}

#[test]
fn what_is_attached_to_a_runtime_with_its_own_network_stack_is_reported_once() {
    // What multus attached when the pod started is not reported.
    let mut node = SimNode::started("a");
    node.sandbox.as_mut().unwrap().own_network_stack = Some("kata".to_owned());
    node.edit("a,b");
    node.settle();
    assert_eq!(node.states(), ["default/b@net2 Attached/OwnNetworkStack"]);
    assert_eq!(node.reasons(), ["AddedInterface", "OwnNetworkStack"]);
    assert!(node.events[1].note.contains("the runtime kata has a network stack"), "{}", node.events[1].note);
    // A damaged element does not end the report.
    node.edit(r#"[{"name":"a"},{"name":"b","interface":"/"}]"#);
    node.settle();
    assert!(
        node.states().contains(&"default/b@net2 Attached/OwnNetworkStack".to_owned()),
        "{:?}",
        node.states()
    );
    node.edit("a,b");
    node.restart();
    node.settle();
    assert_eq!(node.reasons().iter().filter(|reason| **reason == "OwnNetworkStack").count(), 1);
}

#[test]
fn a_nad_that_names_a_device_is_refused() {
    for (plugins, expected) in [
        (r#"[{"type":"sriov","deviceID":"0000:03:00.0"}]"#, "Refused/DeviceRequired"),
        (r#"[{"type":"bridge"},{"type":"x","pciBusID":"0000:03:00.0"}]"#, "Refused/DeviceRequired"),
        // Go reads keys of any case.
        (r#"[{"type":"sriov","deviceid":"0000:03:00.0"}]"#, "Refused/DeviceRequired"),
        (r#"[{"type":"sriov","deviceID":"","pciBusID":null}]"#, "Attached"),
    ] {
        let config = format!(r#"{{"cniVersion":"1.0.0","name":"a","plugins":{plugins}}}"#);
        let mut node = SimNode::with("a@net1");
        let config = Box::new(NadConfig::parse(Some(&config), "a").unwrap());
        node.nads.insert(nad("a"), NadState::Ready { config });
        node.settle();
        assert_eq!(node.states(), [format!("default/a@net1 {expected}")], "{plugins}");
        if expected != "Attached" {
            assert!(node.events[0].note.contains("a device of the node"), "{}", node.events[0].note);
        }
    }
}

/// A pod with an attachment of the original controller from a NAD that nothing names.
fn with_guessed_nad(networks: &str) -> SimNode {
    let mut node = SimNode::started("a@net1");
    for record in node.multus.values_mut() {
        record.origin = Origin::Original;
        record.nad = nad("blue-config");
        record.nad_guessed = true;
        record.config = r#"{"cniVersion":"1.0.0","name":"blue-config","type":"macvlan"}"#.to_owned();
    }
    node.nads.insert(NadRef::new("infra", "blue"), ready("blue-config"));
    node.server.network_status = Some(format!("[{CLUSTER_ENTRY}]"));
    node.edit(networks);
    node
}

#[test]
fn an_attachment_from_an_unknown_nad_is_matched_by_its_network_name() {
    for networks in ["infra/blue", "infra/blue@net1"] {
        let mut node = with_guessed_nad(networks);
        node.settle();
        assert!(node.calls.is_empty(), "{:?}", node.calls);
        assert_eq!(node.reported_attachments(), set(&["infra/blue@net1"]));
        // network-status names the NAD now.
        node.edit("[]");
        node.settle();
        assert_eq!((node.link_names(), node.addresses.len()), (Vec::new(), 0));
    }
}

#[test]
fn an_attachment_from_an_unknown_nad_is_not_removed() {
    for networks in ["[]", "a", "infra/blue@net7"] {
        let mut node = with_guessed_nad(networks);
        node.settle();
        assert!(node.link_names().contains(&"net1"), "{networks}");
        assert!(!node.calls.iter().any(|call| call.starts_with("DEL")), "{:?}", node.calls);
    }
}
