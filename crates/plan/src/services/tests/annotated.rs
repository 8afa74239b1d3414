//! Services that the user owns.

use std::collections::BTreeMap;

use api::{
    networkservice::{Hostnames, TargetPort},
    selection::NadRef,
};

use super::{
    fixtures::{NAMESPACE, desired, desired_on, found, pod, port},
    headless,
};
use crate::services::{
    AnnotatedService, ClusterIp, ForeignKind, ForeignObject, NetworkState, ObservedService, PodFacts,
    ServiceFault, ServiceType, TrafficDistribution, annotated_service, is_annotated, service_warnings,
};

/// A headless Service without selector and owner, with these annotations.
fn service(annotations: &[(&str, &str)]) -> ObservedService {
    let own = |(key, value): &(&str, &str)| (format!("patchbay.dev/{key}"), (*value).to_owned());
    let annotations: BTreeMap<String, String> = annotations.iter().map(own).collect();
    ObservedService { owners: Vec::new(), annotations, ..headless::service() }
}

fn valid() -> ObservedService {
    service(&[("service-network", "blue"), ("selector", "app=db")])
}

fn read(service: &ObservedService) -> Result<AnnotatedService, ServiceFault> {
    annotated_service(&NAMESPACE.into(), &"db".into(), service).unwrap()
}

#[test]
fn the_annotations_are_read_like_the_spec_of_a_network_service() {
    let mut full = service(&[
        ("service-network", "net/core"),
        ("selector", "app in (db, cache)"),
        ("interface", "net2"),
        ("hostnames", "PodName"),
    ]);
    full.ports = vec![port("pg", 5432, TargetPort::Name("pg".to_owned()))];
    full.publish_not_ready = true;
    let AnnotatedService { spec, owner } = read(&full).unwrap();
    assert_eq!(spec.network, NadRef::new("net", "core"));
    assert!(spec.selects(&pod("a", &[])));
    assert_eq!((spec.interface.unwrap().as_str(), spec.hostnames), ("net2", Hostnames::PodName));
    assert_eq!((spec.ports, spec.publish_not_ready, spec.traffic), (full.ports.clone(), true, None));
    assert_eq!((&*owner.uid, &*owner.network), (full.uid.as_str(), "net/core"));
    let plain = read(&valid()).unwrap();
    assert_eq!(plain.spec.network, NadRef::new(NAMESPACE, "blue"));
    assert_eq!(desired(&plain.spec, [&pod("a", &["10.1.0.1"])]).counts.summary, "1/1");
}

#[test]
fn r7_r8_a_service_that_cannot_work_gets_no_slices_and_a_note_that_says_what_to_change() {
    let selector = BTreeMap::from([("app".to_owned(), "db".to_owned())]);
    let cluster_ip = ClusterIp::Assigned("10.96.0.7".to_owned());
    let external = ObservedService {
        r#type: ServiceType::ExternalName,
        cluster_ip: ClusterIp::Unset,
        selector: selector.clone(),
        ..valid()
    };
    let with = |key: &str, value: &str| {
        let mut service = valid();
        service.annotations.insert(format!("patchbay.dev/{key}"), value.to_owned());
        service
    };
    for (service, reason, note) in [
        (external, "ExternalName", "set spec.type to ClusterIP and spec.clusterIP to None"),
        (ObservedService { selector, ..valid() }, "SelectorSet", "remove spec.selector"),
        (
            ObservedService { cluster_ip, ..valid() },
            "ClusterIPSet",
            "create it again with spec.clusterIP: None",
        ),
        (
            service(&[("selector", "app=db")]),
            "BadAnnotation",
            "patchbay.dev/service-network is missing or empty",
        ),
        (
            service(&[("service-network", "blue")]),
            "BadAnnotation",
            "patchbay.dev/selector is missing or empty",
        ),
        (with("service-network", " "), "BadAnnotation", "patchbay.dev/service-network is missing or empty"),
        (
            with("service-network", "a/b/c"),
            "BadAnnotation",
            "\"a/b/c\" is invalid; set it to [namespace/]name",
        ),
        (with("service-network", "Blue"), "BadAnnotation", "\"Blue\" is invalid; set it to [namespace/]name"),
        (with("service-network", "/"), "BadAnnotation", "\"/\" is invalid; set it to [namespace/]name"),
        (with("selector", ""), "BadAnnotation", "patchbay.dev/selector is missing or empty"),
        (with("selector", "app in db"), "BadAnnotation", "\"app in db\" is not a label selector"),
        (with("interface", "a/b"), "BadAnnotation", "patchbay.dev/interface is invalid"),
        (with("interface", ""), "BadAnnotation", "patchbay.dev/interface is invalid"),
        (
            with("hostnames", "podname"),
            "BadAnnotation",
            "patchbay.dev/hostnames is invalid; set it to None or PodName",
        ),
    ] {
        let fault = read(&service).unwrap_err();
        assert_eq!(fault.reason, reason, "{fault:?}");
        assert!(fault.note.contains(note), "{fault:?}");
    }
}

#[test]
fn a_service_without_annotations_or_of_a_network_service_is_left_alone() {
    assert!(!is_annotated(&service(&[])));
    assert!(!is_annotated(&service(&[("interface", "net1"), ("hostnames", "PodName")])));
    let owned = ObservedService { owners: headless::service().owners, ..valid() };
    assert_eq!(annotated_service(&NAMESPACE.into(), &"db".into(), &owned), None);
}

#[test]
fn r28_hints_follow_the_traffic_distribution_unless_the_user_asks_for_topology_hints() {
    for (text, expected) in [
        (Some("PreferClose"), Some(TrafficDistribution::SameZone)),
        (Some("PreferSameZone"), Some(TrafficDistribution::SameZone)),
        (Some("PreferSameNode"), Some(TrafficDistribution::SameNode)),
        (Some("Later"), None),
        (None, None),
    ] {
        let mut service = valid();
        service.traffic_distribution = text.map(str::to_owned);
        assert_eq!(read(&service).unwrap().spec.traffic, expected, "{text:?}");
        for (key, mode, asks) in [
            ("topology-mode", "Disabled", false),
            ("topology-mode", "", false),
            ("topology-mode", "Auto", true),
            ("topology-aware-hints", "Disabled", false),
            ("topology-aware-hints", "auto", true),
        ] {
            service.annotations.insert(format!("service.kubernetes.io/{key}"), mode.to_owned());
            let traffic = read(&service).unwrap().spec.traffic;
            assert_eq!(traffic, expected.filter(|_| !asks), "{text:?} {key}={mode}");
        }
    }
}

#[test]
fn the_warnings_of_an_annotated_service_say_what_to_do() {
    let spec = read(&valid()).unwrap().spec;
    let notes = |state: &NetworkState, pods: &[PodFacts], foreign: &[ForeignObject]| {
        let desired = desired_on(&spec, state, &[], pods);
        let warnings = service_warnings(&spec, state, &desired, foreign);
        warnings.into_iter().map(|event| format!("{}: {}", event.reason, event.note)).collect::<Vec<_>>()
    };
    for (state, note) in [
        (
            NetworkState::NotFound,
            "NetworkNotFound: NetworkAttachmentDefinition shop/blue does not exist; create it or correct the annotation",
        ),
        (
            NetworkState::NoBridgeNetwork("lan".into()),
            "NetworkNotFound: BridgeNetwork lan of NetworkAttachmentDefinition shop/blue does not exist or cannot be read, so its subnets are not known; create or correct it",
        ),
        (
            NetworkState::KindNotServed,
            "NetworkNotFound: the cluster does not serve the kind NetworkAttachmentDefinition; install multus",
        ),
    ] {
        assert_eq!(notes(&state, &[], &[]), [note]);
    }
    let slice = |name: &str| ForeignObject {
        kind: ForeignKind::EndpointSlice,
        name: name.to_owned(),
        manager: Some("m".to_owned()),
    };
    let one = "ForeignEndpoints: DNS also answers with the addresses of EndpointSlice a (managed by m); list and delete them with `patchbay clean svc/db`";
    assert_eq!(notes(&found(), &[], &[slice("a")]), [one]);
    let many: Vec<ForeignObject> = (10..22).map(|number| slice(&format!("s{number}"))).collect();
    let many = notes(&found(), &[], &many).remove(0);
    assert!(
        many.contains("EndpointSlice s10 (managed by m), ") && many.contains(" and 2 more; list"),
        "{many}"
    );
    let doubled = [pod("a", &["10.1.0.1"]), pod("b", &["10.1.0.1"])];
    let note = "DuplicateAddress: not published, because it is unknown which pod answers: 10.1.0.1 of the pods a and b; give each pod an address of its own";
    assert_eq!(notes(&found(), &doubled, &[]), [note]);
}
