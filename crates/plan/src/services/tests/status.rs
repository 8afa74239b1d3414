//! Conditions, counts and the times of their writes.

use std::time::Duration;

use api::{Condition, ConditionStatus, NetworkServiceStatus, networkservice::FamilyCounts};

use super::fixtures::{blue, desired, desired_on, found, pod, pods, spec, time};
use crate::services::{
    COUNTS_INTERVAL, DesiredEndpoints, ForeignKind, ForeignObject, NetworkState, PodFacts, ServiceState,
    StatusInput, StatusPlan, StatusWrite, WriteFault, changed_back, decide_status_write, interfaces, status,
};

fn planned<'a>(
    desired: &'a DesiredEndpoints,
    network: &'a NetworkState,
    failed: Option<&'a str>,
) -> StatusPlan {
    let network = (&blue(), network);
    let fault = failed.map(WriteFault::Failed);
    status_of(ServiceState::Planned { network, desired, fault }, &[], &NetworkServiceStatus::default())
}

fn status_of(state: ServiceState<'_>, foreign: &[ForeignObject], old: &NetworkServiceStatus) -> StatusPlan {
    status(&StatusInput { generation: 3, old, state, foreign: Some(foreign), now: time(10) })
}

fn condition<'a>(status: &'a NetworkServiceStatus, kind: &str) -> &'a Condition {
    status.conditions.iter().find(|condition| condition.r#type == kind).unwrap()
}

fn ready(plan: &StatusPlan) -> (ConditionStatus, &str, &str) {
    let condition = condition(&plan.status, "Ready");
    (condition.status, &condition.reason, &condition.message)
}

#[test]
fn ready_needs_the_plan_and_one_ready_endpoint() {
    let mut pods = pods(3);
    pods[0].ready = false;
    let plan = planned(&desired(&spec(), &pods), &found(), None);
    assert_eq!(ready(&plan), (ConditionStatus::True, "Ready", "2 of 3 endpoints are ready"));
    let counts = plan.status.endpoints.as_ref().unwrap();
    assert_eq!((counts.ipv4, counts.ipv6), (FamilyCounts { ready: 2, total: 3 }, FamilyCounts::default()));
    assert_eq!(counts.summary, "2/3");
    assert_eq!((plan.status.observed_generation, plan.events), (Some(3), vec![]));
}

#[test]
fn a_service_that_another_client_changes_back_is_not_ready_and_the_message_names_the_fields() {
    let desired = desired(&spec(), &pods(1));
    let patch = serde_json::json!({
        "metadata": {"labels": {"team": null}, "uid": "u", "resourceVersion": "7"},
        "spec": {"ports": []},
    });
    let message = changed_back("db", &patch);
    let (network, fault) = ((&blue(), &found()), Some(WriteFault::ChangedBack(&message)));
    let state = ServiceState::Planned { network, desired: &desired, fault };
    let plan = status_of(state, &[], &NetworkServiceStatus::default());
    let expected = "another client changes metadata.labels, spec.ports of Service db back; find the client in metadata.managedFields of the Service and stop it";
    assert_eq!(ready(&plan), (ConditionStatus::False, "NotReady", expected));
    assert_eq!(plan.status.endpoints.unwrap().summary, "1/1", "the endpoints are published");
}

#[test]
fn every_reason_of_a_service_that_is_not_ready_says_what_to_do() {
    let no_pods = desired(&spec(), &[]);
    let without = [PodFacts { interfaces: Ok(Box::default()), ..pod("a", &[]) }];
    let broken = [PodFacts { interfaces: interfaces(Some("{}"), "shop"), ..pod("a", &[]) }];
    let lost = [PodFacts { node: Some("gone".into()), ..pod("a", &["10.1.0.1"]) }];
    let doubled = [pod("a", &["10.1.0.1"]), pod("b", &["10.1.0.1"])];
    let unready = [PodFacts { ready: false, ..pod("a", &["10.1.0.1"]) }];
    let of = |pods: &[PodFacts]| desired(&spec(), pods);
    let missing = |state: &NetworkState| desired_on(&spec(), state, &[], &pods(1));
    let (gone, unserved) = (NetworkState::NotFound, NetworkState::KindNotServed);
    let no_bridge = NetworkState::NoBridgeNetwork("lan".into());
    for (desired, network, failed, reason, message) in [
        (
            &no_pods,
            &found(),
            None,
            "NoPods",
            "the selector matches no running pod of the namespace; check spec.selector and the labels of the pods",
        ),
        (
            &of(&without),
            &found(),
            None,
            "NoAddresses",
            "none of 1 pods has an address on network shop/blue in its",
        ),
        (
            &of(&broken),
            &found(),
            None,
            "NoAddresses",
            "pod a has no endpoint: k8s.v1.cni.cncf.io/network-status",
        ),
        (&of(&lost), &found(), None, "NoAddresses", "Node gone of a pod does not exist"),
        (&of(&doubled), &found(), None, "NoAddresses", "duplicate 10.1.0.1 of the pods a and b"),
        (&of(&unready), &found(), None, "NotReady", "none of 1 endpoints is ready; check the readiness"),
        (&of(&pods(1)), &found(), Some("quota"), "NotReady", "could not be written: quota; retrying"),
        (
            &missing(&gone),
            &gone,
            None,
            "NetworkNotFound",
            "NetworkAttachmentDefinition shop/blue does not exist",
        ),
        (
            &missing(&unserved),
            &unserved,
            None,
            "NetworkNotFound",
            "does not serve the kind NetworkAttachment",
        ),
        (&no_pods, &gone, None, "NetworkNotFound", "create it or correct spec.network"),
        (
            &missing(&no_bridge),
            &no_bridge,
            None,
            "NetworkNotFound",
            "BridgeNetwork lan of NetworkAttachmentDefinition",
        ),
    ] {
        let plan = planned(desired, network, failed);
        let (status, found, text) = ready(&plan);
        assert_eq!((status, found), (ConditionStatus::False, reason), "{text}");
        assert!(text.contains(message), "{reason}: {text}");
    }
}

#[test]
fn a_taken_service_and_an_invalid_spec_are_reported_with_an_event() {
    let old = NetworkServiceStatus::default();
    for (state, reason) in [
        (ServiceState::Taken("Service db is controlled by NetService db"), "ServiceTaken"),
        (ServiceState::Invalid("spec.selector is empty"), "InvalidSpec"),
    ] {
        let plan = status_of(state, &[], &old);
        assert_eq!(ready(&plan).1, reason);
        assert_eq!(plan.events.iter().map(|event| event.reason).collect::<Vec<_>>(), [reason]);
        // Only the transition is an event.
        assert_eq!(status_of(state, &[], &plan.status).events, []);
    }
    let taken = status_of(ServiceState::Taken("x"), &[], &old);
    assert_eq!(taken.status.endpoints.unwrap().summary, "0/0");
}

#[test]
fn a_missing_network_keeps_a_service_with_ready_endpoints_ready_and_says_so() {
    let endpoints = desired(&spec(), &pods(2));
    let plan = planned(&endpoints, &NetworkState::NotFound, None);
    let (status, reason, message) = ready(&plan);
    assert_eq!((status, reason), (ConditionStatus::True, "Ready"));
    assert!(
        message.starts_with("2 of 2 endpoints are ready, and none is added: NetworkAttachmentDefinition")
    );
}

#[test]
fn r9_s15_foreign_slices_and_endpoints_are_named_up_to_ten() {
    let foreign = |index: usize| ForeignObject {
        kind: ForeignKind::EndpointSlice,
        name: format!("db-{index:02}"),
        manager: Some("endpointslice-controller.k8s.io".to_owned()),
    };
    let endpoints = ForeignObject { kind: ForeignKind::Endpoints, name: "db".to_owned(), manager: None };
    let desired = desired(&spec(), &pods(1));
    let network = (&blue(), &found());
    let state = ServiceState::Planned { network, desired: &desired, fault: None };
    let plan = status_of(state, &[endpoints, foreign(1)], &NetworkServiceStatus::default());
    let reported = condition(&plan.status, "ForeignEndpoints");
    assert_eq!((reported.status, reported.reason.as_str()), (ConditionStatus::True, "ForeignEndpoints"));
    assert!(
        reported
            .message
            .contains("EndpointSlice db-01 (managed by endpointslice-controller.k8s.io), Endpoints db;"),
        "{}",
        reported.message
    );
    assert_eq!(plan.events[0].reason, "ForeignEndpoints");
    assert_eq!(ready(&plan).0, ConditionStatus::True, "DNS answers with our endpoints too");
    let many: Vec<ForeignObject> = (0..13).map(foreign).collect();
    let plan = status_of(state, &many, &plan.status);
    let message = &condition(&plan.status, "ForeignEndpoints").message;
    assert!(
        message.contains("db-09 ") && !message.contains("db-10") && message.contains(" and 3 more"),
        "{message}"
    );
    let plan = status_of(state, &[], &plan.status);
    assert_eq!(condition(&plan.status, "ForeignEndpoints").status, ConditionStatus::False);
}

#[test]
fn the_condition_about_foreign_endpoints_stays_until_they_are_listed() {
    let (desired, network) = (desired(&spec(), &pods(1)), found());
    let state = ServiceState::Planned { network: (&blue(), &network), desired: &desired, fault: None };
    let unlisted = |old: &NetworkServiceStatus| {
        status(&StatusInput { generation: 4, old, state, foreign: None, now: time(20) })
    };
    let plan = unlisted(&NetworkServiceStatus::default());
    let kinds: Vec<&str> = plan.status.conditions.iter().map(|one| one.r#type.as_str()).collect();
    assert_eq!(kinds, ["Ready", "DuplicateAddress"]);
    let left = ForeignObject { kind: ForeignKind::Endpoints, name: "db".to_owned(), manager: None };
    let old = status_of(state, &[left], &NetworkServiceStatus::default()).status;
    let plan = unlisted(&old);
    assert_eq!(condition(&plan.status, "ForeignEndpoints"), condition(&old, "ForeignEndpoints"));
    assert_eq!((plan.status.conditions.len(), plan.events), (3, vec![]));
    assert_eq!(condition(&plan.status, "Ready").observed_generation, Some(4));
}

#[test]
fn withdrawn_endpoints_are_not_counted_and_the_message_says_why() {
    let plan = status_of(
        ServiceState::Withdrawn("Service db has a selector"),
        &[],
        &NetworkServiceStatus::default(),
    );
    let message = "no endpoints are published: Service db has a selector; retrying";
    assert_eq!(ready(&plan), (ConditionStatus::False, "NotReady", message));
    assert_eq!(plan.status.endpoints.unwrap().summary, "0/0");
}

#[test]
fn s10_a_duplicate_address_is_a_condition_and_an_event_with_both_pods() {
    let doubled =
        desired(&spec(), &[pod("a", &["10.1.0.1"]), pod("b", &["10.1.0.1"]), pod("c", &["10.1.0.2"])]);
    let plan = planned(&doubled, &found(), None);
    let reported = condition(&plan.status, "DuplicateAddress");
    assert_eq!(reported.status, ConditionStatus::True);
    assert!(reported.message.contains("10.1.0.1 of the pods a and b"), "{}", reported.message);
    assert_eq!(plan.events[0].reason, "DuplicateAddress");
    assert!(plan.events[0].note.contains("pods a and b"));
    assert_eq!(ready(&plan).0, ConditionStatus::True, "c is published");
}

#[test]
fn transition_times_move_with_the_status_and_conditions_of_others_stay() {
    let network = found();
    let (one, none) = (desired(&spec(), &pods(1)), desired(&spec(), &[]));
    let mut old = planned(&one, &network, None).status;
    let others = Condition { r#type: "Other".to_owned(), ..old.conditions[0].clone() };
    old.conditions.push(others.clone());
    let at = |second, desired, old: &NetworkServiceStatus| {
        let state = ServiceState::Planned { network: (&blue(), &network), desired, fault: None };
        status(&StatusInput { generation: 3, old, state, foreign: Some(&[]), now: time(second) }).status
    };
    assert_eq!(at(20, &one, &old), old);
    let changed = at(20, &none, &old);
    assert_eq!(condition(&changed, "Ready").last_transition_time, time(20));
    assert_eq!(condition(&changed, "ForeignEndpoints").last_transition_time, time(10));
    assert_eq!(changed.conditions.last(), Some(&others));
}

#[test]
fn counts_are_written_every_five_seconds_and_conditions_at_once() {
    let status_with = |pods: &[PodFacts]| planned(&desired(&spec(), pods), &found(), None).status;
    let (two, three, none) = (status_with(&pods(2)), status_with(&pods(3)), status_with(&[]));
    let seconds = Duration::from_secs;
    for (old, new, since, expected) in [
        (&two, &two, None, StatusWrite::None),
        (&two, &three, None, StatusWrite::Now),
        (&two, &three, Some(seconds(0)), StatusWrite::After(COUNTS_INTERVAL)),
        (&two, &three, Some(seconds(4)), StatusWrite::After(seconds(1))),
        (&two, &three, Some(seconds(5)), StatusWrite::Now),
        (&two, &three, Some(seconds(900)), StatusWrite::Now),
        (&two, &none, Some(seconds(0)), StatusWrite::Now),
        (&none, &two, Some(seconds(0)), StatusWrite::Now),
    ] {
        assert_eq!(decide_status_write(old, new, since, false), expected);
    }
    // Another generation, or another duplicate, is no count.
    let newer = NetworkServiceStatus { observed_generation: Some(4), ..two.clone() };
    assert_eq!(decide_status_write(&two, &newer, Some(seconds(0)), true), StatusWrite::Now);
    let doubled = status_with(&[pod("a", &["10.1.0.1"]), pod("b", &["10.1.0.1"]), pod("c", &["10.1.0.2"])]);
    assert_eq!(decide_status_write(&two, &doubled, Some(seconds(0)), true), StatusWrite::Now);
    // The names in a message change often during a rolling restart.
    let other = status_with(&[pod("a", &["10.1.0.1"]), pod("d", &["10.1.0.1"]), pod("c", &["10.1.0.2"])]);
    let later = StatusWrite::After(COUNTS_INTERVAL);
    assert_eq!(decide_status_write(&doubled, &other, Some(seconds(0)), false), later);
    // A reconcile that wrote slices leaves counts to a later one: the next change of a pod does not wait for the status.
    let soon = StatusWrite::After(Duration::from_millis(500));
    for (since, expected) in [(None, soon), (Some(seconds(900)), soon), (Some(seconds(0)), later)] {
        assert_eq!(decide_status_write(&two, &three, since, true), expected);
    }
    assert_eq!(decide_status_write(&two, &two, None, true), StatusWrite::None);
}
