//! Invalid annotations, NADs and changes. Each is reported, and everything else goes on.

use std::time::Duration;

use super::*;

#[test]
fn an_annotation_that_cannot_be_parsed_changes_nothing() {
    for (networks, place) in
        [("[{\"name\":\"b\"},", "line 1 column 14"), (r#"{"name":"b"}"#, "expected a JSON list")]
    {
        let mut node = SimNode::started("a");
        node.edit("a,c");
        node.settle();
        let before = (node.server.attachments.clone(), node.links().clone(), node.calls.len(), node.writes);
        node.events.clear();
        node.edit(networks);
        node.settle();
        node.settle();
        let after = (node.server.attachments.clone(), node.links().clone(), node.calls.len(), node.writes);
        assert_eq!(before, after);
        assert_eq!(node.reasons(), ["InvalidNetworks"]);
        assert!(node.events[0].note.contains(place), "{}", node.events[0].note);
    }
}

#[test]
fn an_invalid_element_is_refused_with_its_position_and_the_others_go_on() {
    let mut node = SimNode::with(
        r#"[{"name":"a","interface":"net1"},{"name":"b","ips":["x"]},{"name":"c","interface":"net3"}]"#,
    );
    node.settle();
    assert_eq!(node.link_names(), ["net1", "net3"]);
    assert_eq!(
        node.states(),
        ["default/b@ Refused/InvalidNetworks", "default/a@net1 Attached", "default/c@net3 Attached"]
    );
    let note = &node.events[0].note;
    assert!(note.starts_with("pod [default/web]: element [1] at line 1 column "), "{note}");
    node.restart();
    assert_idle(&node);
}

#[test]
fn an_attachment_that_an_invalid_element_may_mean_stays() {
    for (networks, kept) in [
        (r#"[{"name":"a","interface":"a/b"}]"#, "net1"),
        (r#"[{"interface":"net1"},{"name":"b","interface":"net2"}]"#, "net1 net2"),
        (r#"[{"name":"b","mac":"x"}]"#, "net2"),
    ] {
        let mut node = SimNode::with("a@net1,b@net2");
        node.settle();
        node.edit(networks);
        node.settle();
        assert_eq!(node.link_names().join(" "), kept, "{networks}");
        node.check();
    }
}

#[test]
fn a_deleted_link_that_an_invalid_element_may_mean_is_reported() {
    let mut node = SimNode::with("a@net1");
    node.settle();
    node.edit(r#"[{"name":"a","ips":["x"]}]"#);
    node.delete_link("net1");
    node.settle();
    assert_eq!(node.states(), ["default/a@ Refused/InvalidNetworks", "default/a@net1 Failed/LinkLost"]);
    assert_eq!((node.reported_attachments(), node.calls.len()), (set(&[]), 1));
}

#[test]
fn interface_names_that_the_kernel_rejects_are_refused() {
    for name in ["a/b", "longer-than-15-b", "..", "a b"] {
        let mut node = SimNode::with(&format!(r#"[{{"name":"a","interface":"{name}"}},{{"name":"b"}}]"#));
        node.settle();
        assert_eq!(node.states(), ["default/a@ Refused/InvalidNetworks", "default/b@net2 Attached"]);
    }
}

#[test]
fn a_name_that_two_elements_request_belongs_to_the_first_or_to_the_attached_one() {
    let mut node = SimNode::with("a@net1,b@net1,a@net1");
    node.settle();
    assert_eq!(
        node.states(),
        [
            "default/a@net1 Attached",
            "default/b@net1 Refused/InterfaceNameTaken",
            "default/a@net1 Refused/InterfaceNameTaken"
        ]
    );
    node.edit("b@net1,a@net1");
    node.settle();
    assert_eq!(node.states(), ["default/b@net1 Refused/InterfaceNameTaken", "default/a@net1 Attached"]);
    assert_eq!(node.calls, ["ADD a net1"]);
}

#[test]
fn changed_addresses_of_an_attachment_are_rejected_once_per_change() {
    let element =
        |mac: &str, ips: &str| format!(r#"[{{"name":"a","interface":"net1","mac":"{mac}","ips":[{ips}]}}]"#);
    for mut node in [
        SimNode::with(&element("02:00:00:00:00:0a", r#""10.0.0.5/24","fd00::5""#)),
        SimNode::started(&element("02:00:00:00:00:0a", r#""10.0.0.5/24","fd00::5""#)),
    ] {
        node.settle();
        node.events.clear();
        node.edit(&element("02-00-00-00-00-0A", r#""FD00:0::5","10.0.0.5/24""#));
        assert_idle(&node);
        let calls = node.calls.len();
        for (number, mac) in ["02:00:00:00:00:0b", "02:00:00:00:00:0c"].into_iter().enumerate() {
            node.edit(&element(mac, r#""10.0.0.5/24","fd00::5""#));
            node.settle();
            node.restart();
            node.settle();
            assert_eq!(node.states(), ["default/a@net1 Attached/UpdateRejected"]);
            assert_eq!(
                (node.reasons(), node.calls.len()),
                (vec!["AttachmentUpdateRejected"; number + 1], calls)
            );
        }
        let note = &node.events[1].note;
        assert_eq!(
            note,
            "pod [default/web]: interface net1 of network default/a: the annotation requests ips 10.0.0.5/24, fd00::5 and mac \
             02:00:00:00:00:0c, the interface was attached with ips 10.0.0.5/24, fd00::5 and mac 02:00:00:00:00:0a; unplug the \
             interface, then plug it again"
        );
        node.edit(&element("02:00:00:00:00:0a", r#""10.0.0.5/24","fd00::5""#));
        node.settle();
        assert!(node.states().iter().all(|state| state == "default/a@net1 Attached"));
    }
}

fn host_device() -> NadState {
    let config = r#"{"cniVersion":"1.0.0","name":"a","plugins":[{"type":"host-device","device":"eth1"}]}"#;
    NadState::Ready { config: Box::new(api::nad_config::NadConfig::parse(Some(config), "a").unwrap()) }
}

#[test]
fn an_element_that_is_too_long_is_refused_before_anything_is_recorded() {
    let ips: Vec<String> = (0..2_000).map(|n| format!("10.0.{}.{}/16", n / 256, n % 256)).collect();
    let mut node = SimNode::with("");
    node.edit(&serde_json::json!([{"name": "a", "ips": ips}, {"name": "b"}]).to_string());
    node.settle();
    assert_eq!(node.calls, ["ADD b net2"]);
    assert_eq!(node.states(), ["default/a@net1 Refused/InvalidNetworks", "default/b@net2 Attached"]);
    assert!(node.events[0].note.contains("shorten it to at most 16384"), "{}", node.events[0].note);
    let args = "x".repeat(15_000);
    let element = serde_json::json!([{"name": "a", "cni-args": {"k": args}}]).to_string();
    let plugins = vec![r#"{"type":"x"}"#; 100].join(",");
    let config = format!(r#"{{"cniVersion":"1.0.0","name":"a","plugins":[{plugins}]}}"#);
    let config = Box::new(api::nad_config::NadConfig::parse(Some(&config), "a").unwrap());
    let mut node = SimNode::with("");
    node.nads.insert(nad("a"), NadState::Ready { config });
    node.edit(&element);
    node.settle();
    assert_eq!(
        (node.calls.len(), node.states()),
        (0, vec!["default/a@net1 Failed/NetworkInvalid".to_owned()])
    );
}

#[test]
fn a_pod_with_many_links_gets_its_names_quickly() {
    let mut node = SimNode::with("");
    for number in 1..=20_000 {
        node.add_foreign_link(&format!("net{number}"));
    }
    node.edit(&vec!["missing"; 64].join(","));
    let (desired, observed) = (node.desired(), node.observe());
    let failures = Failures::default();
    let input = PlanInput {
        desired: &desired,
        observed: &observed,
        failures: &failures,
        now: node.now,
        mode: PlugMode::On,
        running: None,
    };
    let started = std::time::Instant::now();
    let planned = plan(input, |_| NadState::Missing, &mut Reported::default());
    assert_eq!(planned.states.last().map(|state| state.interface.as_str()), Some("net20064"));
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
}

#[test]
fn a_plugin_that_never_succeeds_without_a_namespace_is_abandoned_after_many_hours() {
    // A plugin that hangs or is not started may succeed the next time.
    for is_plugin_error in [true, false] {
        let mut node = SimNode::with("a@net1");
        node.settle();
        node.end_sandbox();
        let started = node.now;
        for attempt in 0..300 {
            let Some(Step::Remove(step)) = node.plan().step else { panic!("{:?}", node.plan()) };
            let expected = match attempt {
                0..5 => DelErrors::Fail,
                _ if is_plugin_error && node.now - started >= Duration::from_hours(12) => DelErrors::Abandon,
                _ => DelErrors::ReleaseAddresses,
            };
            assert_eq!((step.mode, step.errors), (DelMode::ReleaseOnly, expected), "attempt {attempt}");
            node.failures.record(step.attempt.clone(), step.fingerprint, "no lock file", node.now);
            if is_plugin_error {
                node.failures.note_plugin_error(&step.attempt, node.now);
            }
            assert_eq!(node.plan().step, None, "it waits for the backoff");
            node.now = node.failures.next_retry(node.now).unwrap();
        }
        assert!(node.now - started > Duration::from_hours(14), "{:?}", node.now - started);
    }
}

#[test]
fn a_nad_that_cannot_be_attached_is_reported_with_what_to_do() {
    for (state, expected, reason, message) in [
        (
            NadState::Invalid { message: "not JSON".to_owned() },
            "Failed/NetworkInvalid",
            "FailedAddingInterface",
            "NAD default/a is invalid: not JSON",
        ),
        (
            NadState::DeviceRequired { resource: "vendor/vf".to_owned() },
            "Refused/DeviceRequired",
            "DeviceRequired",
            "NAD default/a needs a device of vendor/vf",
        ),
        (
            NadState::Forbidden { message: "use a NAD of the pod's namespace".to_owned() },
            "Refused/NamespaceForbidden",
            "NamespaceForbidden",
            "NAD default/a is not allowed in namespace default: use a NAD of the pod's namespace",
        ),
        (
            host_device(),
            "Refused/DeviceRequired",
            "DeviceRequired",
            "NAD default/a moves a device of the node into the pod",
        ),
        (
            NadState::Unknown { message: "start multus".to_owned() },
            "Failed/AddFailed",
            "FailedAddingInterface",
            "start multus",
        ),
        (
            NadState::Missing,
            "Failed/NetworkNotFound",
            "FailedAddingInterface",
            "NAD default/a does not exist; create it",
        ),
    ] {
        let mut node = SimNode::with("a@net1,b@net2");
        node.nads.insert(nad("a"), state);
        node.settle();
        assert_eq!(
            node.states(),
            [format!("default/a@net1 {expected}"), "default/b@net2 Attached".to_owned()]
        );
        assert_eq!(node.reasons(), [reason, "AddedInterface"]);
        assert!(node.events[0].note.contains(message), "{}", node.events[0].note);
        // The annotation repeats it, so a restart reports nothing.
        node.restart();
        assert_idle(&node);
    }
}

#[test]
fn a_forbidden_nad_does_not_detach_what_was_attached_and_is_reported() {
    let mut node = SimNode::with("a@net1");
    node.settle();
    node.nads.insert(nad("a"), NadState::Forbidden { message: "no".to_owned() });
    node.settle();
    assert_eq!(node.states(), ["default/a@net1 Attached/NamespaceForbidden"]);
    assert_eq!(node.reasons(), ["AddedInterface", "NamespaceForbidden"]);
    let note = &node.events[1].note;
    assert!(note.contains("no; interface net1 stays attached until you remove it"), "{note}");
    assert!(node.link_names().contains(&"net1"));
    node.restart();
    assert_idle(&node);
}

#[test]
fn an_element_waits_until_it_is_known_whether_isolation_forbids_it() {
    let mut node = SimNode::with("a@net1,b@net2");
    node.nads.insert(nad("a"), NadState::IsolationUnknown { message: "wait for multus".to_owned() });
    node.settle();
    assert_eq!(node.states(), ["default/a@net1 Pending/IsolationUnknown", "default/b@net2 Attached"]);
    assert_eq!(node.reasons(), ["AddedInterface"]);
    node.restart();
    assert_idle(&node);
    // What was attached earlier stays, and is no news.
    node.nads.insert(nad("b"), NadState::IsolationUnknown { message: "wait for multus".to_owned() });
    assert_idle(&node);
    for name in ["a", "b"] {
        node.nads.insert(nad(name), ready(name));
    }
    node.settle();
    assert_eq!(node.states(), ["default/a@net1 Attached", "default/b@net2 Attached"]);
}

#[test]
fn nothing_is_attached_or_detached_while_the_records_of_multus_cannot_be_used() {
    let problem = "/var/lib/cni/multus/x has 2 bytes; create the pod again";
    let mut node = SimNode::started("a@net1,c@net3");
    node.edit("a@net1,b@net2,c@net3");
    node.settle();
    node.unreadable = Some(problem.to_owned());
    let (calls, events, requested) = (node.calls.len(), node.events.len(), node.requested.clone());
    let status = node.server.network_status.clone();
    // An entry without a record shows what is attached.
    node.edit("a@net1,b@net2,b@net4,c");
    node.settle();
    assert_eq!(node.states(), ["default/b@net2 Attached", "default/b@net4 Failed/RecordsUnreadable"]);
    assert_eq!(node.reasons()[events..], ["RecordsUnreadable"]);
    assert!(node.events[events].note.contains(problem), "{}", node.events[events].note);
    node.edit("c@net5,a@net6");
    node.settle();
    assert_eq!(
        node.states(),
        ["default/c@net5 Failed/RecordsUnreadable", "default/a@net6 Failed/RecordsUnreadable"]
    );
    assert_eq!(node.reasons()[events..], ["RecordsUnreadable"], "one event");
    node.restart();
    assert_idle(&node);
    assert_eq!((node.calls.len(), &node.server.network_status), (calls, &status));
    assert_eq!(node.requested, requested, "what was seen to be requested is remembered");
    // What an ended sandbox left behind is released.
    let addresses = node.addresses.len();
    node.end_sandbox();
    node.lifecycle = PodLifecycle::Ended;
    node.settle();
    assert_eq!((addresses, node.addresses.len()), (3, 0));
}

#[test]
fn a_pod_goes_on_once_the_records_of_multus_can_be_used() {
    let mut node = SimNode::started("a@net1");
    node.unreadable = Some("too large".to_owned());
    node.edit("b@net2");
    node.settle();
    assert_eq!(
        (node.calls.len(), node.states()),
        (0, vec!["default/b@net2 Failed/RecordsUnreadable".to_owned()])
    );
    node.unreadable = None;
    node.settle();
    assert_eq!(node.calls, ["DEL a net1", "ADD b net2"]);
    node.check();
}

#[test]
fn a_default_route_goes_over_one_network() {
    let element = |name: &str, route: &str| format!(r#"{{"name":"{name}","default-route":[{route}]}}"#);
    let mut node = SimNode::with(&format!(
        "[{},{},{}]",
        element("a", r#""10.0.0.1","fd00::1""#),
        element("b", r#""10.0.0.2""#),
        element("c", r#""10.0.0.3","10.0.0.4""#)
    ));
    let Some(Step::Add(step)) = node.plan().step else { panic!("{:?}", node.plan()) };
    assert_eq!((step.default_route.len(), step.filtered_routes), (2, FilteredRoutes::default()));
    node.settle();
    assert_eq!(
        node.states(),
        [
            "default/a@net1 Attached",
            "default/b@net2 Refused/InvalidNetworks",
            "default/c@net3 Refused/InvalidNetworks"
        ]
    );
    node.edit(&format!("[{},{}]", element("a", r#""10.0.0.1""#), r#"{"name":"b"}"#));
    let Some(Step::Add(step)) = node.plan().step else { panic!("{:?}", node.plan()) };
    assert_eq!(step.filtered_routes, FilteredRoutes { ipv4: true, ipv6: true });
}

#[test]
fn hostile_annotations_do_no_harm() {
    let many: Vec<String> = (0..3000).map(|number| format!(r#"{{"name":"a","ips":["{number}"]}}"#)).collect();
    for networks in [
        format!("[{}]", many.join(",")),
        "[".repeat(100_000),
        format!("[{}{}]", "[".repeat(100_000), "]".repeat(100_000)),
        r#"[{"name":"a","cni-args":{"k":"v"},"interface":"net1"},{"name":"\u0000"},null,7,"a"]"#.to_owned(),
    ] {
        let mut node = SimNode::with(&networks);
        node.server.network_status = Some(r#"[7,{"name":5},{"name":"x/y"},[]]"#.to_owned());
        node.server.attachments = Some("[{".to_owned());
        node.watch();
        node.settle();
        assert!(node.events.len() < 16);
        assert!(
            node.server.attachments.as_ref().is_none_or(|text| text.len() <= api::attachments::MAX_LENGTH)
        );
        assert_idle(&node);
    }
}

#[test]
fn a_pod_gets_at_most_64_networks() {
    let elements: Vec<String> = (0..200).map(|number| format!("a@x{number}")).collect();
    let mut node = SimNode::with(&elements.join(","));
    node.settle();
    assert_eq!(node.link_names().len(), 64);
    let refused: Vec<_> =
        node.states().into_iter().filter(|state| state.contains("InvalidNetworks")).collect();
    assert_eq!(refused.len(), 64);
    let elements: Vec<String> =
        (0..66).map(|number| format!("{}@x{number}", ["a", "b"][number / 64])).collect();
    let mut node = SimNode::with(&elements.join(","));
    node.settle();
    let refused: Vec<_> = node.states().into_iter().filter(|state| !state.ends_with(" Attached")).collect();
    assert_eq!(refused, ["default/b@ Refused/InvalidNetworks"; 2]);
    let note = &node.events[0].note;
    assert!(note.contains("element [64]: Patchbay handles at most 64 networks"), "{note}");
    // What an element beyond the limit may mean is not removed.
    let before = node.calls.len();
    node.edit(&format!("{},a@x0", vec!["b"; 64].join(",")));
    node.settle();
    assert!(node.calls[before..].iter().all(|call| !call.starts_with("DEL")), "{:?}", node.calls);
}

#[test]
fn a_plan_has_at_most_eight_events() {
    let elements: Vec<String> = (0..40).map(|number| format!("missing{number}")).collect();
    let mut node = SimNode::with(&elements.join(","));
    node.settle();
    assert_eq!((node.events.len(), node.states().len()), (8, 40));
    node.restart();
    assert_idle(&node);
}

#[test]
fn annotations_stay_below_the_limit_of_a_pod() {
    let mut node = SimNode::with("a@net1,missing@net2");
    let entry =
        format!(r#"{{"name":"other/x","interface":"y","dns":{{}},"x":"{}"}}"#, "z".repeat(190 * 1024));
    node.server.network_status = Some(format!("[{CLUSTER_ENTRY},{entry}]"));
    node.watch();
    node.settle();
    let length = |text: &Option<String>| text.as_ref().map_or(0, String::len);
    let server = &node.server;
    assert!(length(&server.network_status) + length(&server.attachments) <= 200 * 1024);
    assert_eq!(node.states().len(), 2);
    assert_idle(&node);
}

#[test]
fn the_records_of_a_pod_are_bounded() {
    // Each plugin of the list gets a copy of the arguments.
    let plugins = [r#"{"type":"tuning"}"#; 8].join(",");
    let list = format!(r#"{{"cniVersion":"1.0.0","name":"a","plugins":[{plugins}]}}"#);
    let config = api::nad_config::NadConfig::parse(Some(&list), "a").unwrap();
    let element = |interface: &str| {
        let args = "x".repeat(15 * 1024);
        format!(r#"{{"name":"a","interface":"{interface}","cni-args":{{"k":"{args}"}}}}"#)
    };
    let mut node = SimNode::new();
    node.nads.insert(nad("a"), NadState::Ready { config: Box::new(config) });
    node.edit(&format!(r#"[{},{},{},{{"name":"b"}}]"#, element("net1"), element("net2"), element("net3")));
    node.settle();
    assert_eq!(
        node.states(),
        [
            "default/a@net1 Attached",
            "default/a@net2 Attached",
            "default/a@net3 Refused/InvalidNetworks",
            "default/b@net4 Attached"
        ]
    );
    let recorded: usize =
        node.journal.values().map(|record| serde_json::to_string(record).unwrap().len()).sum();
    assert!(recorded <= 256 * 1024, "{recorded}");
    let refusals: Vec<_> = node.events.iter().filter(|event| event.reason.is_warning()).collect();
    let [refusal] = refusals[..] else { panic!("{refusals:?}") };
    assert_eq!(refusal.reason, EventReason::InvalidNetworks);
    assert!(refusal.note.contains("shorten cni-args or the configuration of the NAD"), "{}", refusal.note);
    // What is attached is attached again, and room is made by a removal.
    node.delete_link("net1");
    node.settle();
    assert_eq!(node.link_names().len(), 3);
    node.edit(&format!("[{},{}]", element("net1"), element("net3")));
    node.settle();
    assert_eq!(node.states(), ["default/a@net1 Attached", "default/a@net3 Attached"]);
    node.check();
}
