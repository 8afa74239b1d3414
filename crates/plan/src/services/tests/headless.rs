//! The headless Service of a NetworkService.

use std::collections::BTreeMap;

use api::networkservice::{ADOPT_ANNOTATION, Protocol, TargetPort};
use serde_json::{Value, json};

use super::fixtures::{NAMESPACE, port, spec, time};
use crate::services::{
    ClusterIp, Families, NetworkServiceFacts, ObservedService, OwnerRef, ServiceDecision, ServicePort,
    ServiceSpec, ServiceType, decide_service, is_controlled_by, why_no_slices, withheld,
};

const UID: &str = "nsvc-uid";

fn labels() -> BTreeMap<String, String> {
    BTreeMap::from([("team".to_owned(), "storage".to_owned())])
}

fn own_reference() -> OwnerRef {
    OwnerRef {
        api_version: "patchbay.dev/v1alpha1".to_owned(),
        kind: "NetworkService".to_owned(),
        name: "db".to_owned(),
        uid: UID.to_owned(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}

/// The Service as the API server stores it after it was created.
pub fn service() -> ObservedService {
    ObservedService {
        uid: "svc-uid".to_owned(),
        resource_version: "7".to_owned(),
        created: time(0),
        deleting: false,
        labels: labels(),
        annotations: BTreeMap::new(),
        owners: vec![own_reference()],
        r#type: ServiceType::ClusterIp,
        cluster_ip: ClusterIp::None,
        selector: BTreeMap::new(),
        ports: spec().ports,
        publish_not_ready: false,
        families: Families::DUAL,
        traffic_distribution: None,
    }
}

fn decide_for(spec: &ServiceSpec, observed: Option<&ObservedService>) -> ServiceDecision {
    decide_service(&NetworkServiceFacts { uid: UID, labels: &labels(), spec }, observed)
}

fn decide(observed: &ObservedService) -> ServiceDecision {
    decide_for(&spec(), Some(observed))
}

/// The spec and the metadata of a patch, without UID and resource version, which it must carry.
fn patch_of(decision: ServiceDecision) -> (Value, Value, bool) {
    let ServiceDecision::Patch { mut patch, adopt } = decision else { panic!("{decision:?}") };
    let metadata = patch["metadata"].as_object_mut().unwrap();
    assert_eq!(metadata.remove("uid"), Some("svc-uid".into()));
    assert_eq!(metadata.remove("resourceVersion"), Some("7".into()));
    (patch["spec"].take(), patch["metadata"].take(), adopt)
}

fn message(decision: ServiceDecision) -> String {
    let ServiceDecision::Taken { message } = decision else { panic!("{decision:?}") };
    message
}

#[test]
fn the_service_is_created_without_selector_and_with_labels_ports_and_owner() {
    let mut wanted = spec();
    wanted.publish_not_ready = true;
    wanted.ports.push(ServicePort {
        protocol: Protocol::Sctp,
        app_protocol: Some("ngap".to_owned()),
        ..port("sig", 38412, TargetPort::Name("sig".to_owned()))
    });
    let expected = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": "db",
            "namespace": NAMESPACE,
            "labels": {"team": "storage"},
            "ownerReferences": [{
                "apiVersion": "patchbay.dev/v1alpha1", "kind": "NetworkService", "name": "db", "uid": UID,
                "controller": true, "blockOwnerDeletion": true,
            }],
        },
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            "publishNotReadyAddresses": true,
            "ports": [
                {"name": "pg", "port": 5432, "protocol": "TCP", "targetPort": 5432},
                {"name": "sig", "port": 38412, "protocol": "SCTP", "targetPort": "sig", "appProtocol": "ngap"},
            ],
        },
    });
    assert_eq!(decide_for(&wanted, None), ServiceDecision::Create(expected));
}

#[test]
fn a_service_as_planned_is_kept() {
    assert_eq!(decide(&service()), ServiceDecision::Keep);
    // Annotations, and owners that do not control it, belong to others.
    let mut annotated = service();
    annotated.annotations.insert("example.com/note".to_owned(), "x".to_owned());
    annotated.owners.push(OwnerRef { uid: "app".to_owned(), controller: None, ..own_reference() });
    assert_eq!(decide(&annotated), ServiceDecision::Keep);
}

#[test]
fn r8_edits_of_others_are_reverted_by_a_patch_of_what_differs() {
    let mut edited = service();
    edited.selector.insert("app".to_owned(), "db".to_owned());
    edited.labels =
        BTreeMap::from([("extra".to_owned(), "1".to_owned()), ("team".to_owned(), "x".to_owned())]);
    edited.publish_not_ready = true;
    edited.ports.clear();
    let (spec, metadata, adopt) = patch_of(decide(&edited));
    let ports = json!([{"name": "pg", "port": 5432, "protocol": "TCP", "targetPort": 5432}]);
    assert_eq!(spec, json!({"selector": null, "publishNotReadyAddresses": false, "ports": ports}));
    assert_eq!(metadata, json!({"labels": {"extra": null, "team": "storage"}}));
    assert!(!adopt);
}

#[test]
fn a_service_that_became_an_external_name_becomes_headless_again() {
    let edited =
        ObservedService { r#type: ServiceType::ExternalName, cluster_ip: ClusterIp::Unset, ..service() };
    let (spec, ..) = patch_of(decide(&edited));
    let expected =
        json!({"type": "ClusterIP", "externalName": null, "clusterIP": "None", "clusterIPs": ["None"]});
    assert_eq!(spec, expected);
}

#[test]
fn r12_a_service_of_one_family_gets_both_as_one_that_is_created_has() {
    for families in [Families::new(["IPv4"]), Families::new(["IPv6"])] {
        let (spec, ..) = patch_of(decide(&ObservedService { families, ..service() }));
        assert_eq!(spec, json!({"ipFamilyPolicy": "RequireDualStack"}));
    }
}

#[test]
fn an_own_service_with_a_cluster_ip_is_deleted_because_the_field_is_immutable() {
    for r#type in [ServiceType::ClusterIp, ServiceType::Other] {
        let cluster_ip = ClusterIp::Assigned("10.96.0.7".to_owned());
        let edited = ObservedService { r#type, cluster_ip, ..service() };
        let expected =
            ServiceDecision::Delete { uid: "svc-uid".to_owned(), resource_version: "7".to_owned() };
        assert_eq!(decide(&edited), expected);
    }
}

#[test]
fn an_own_service_that_is_being_deleted_is_waited_for() {
    assert_eq!(decide(&ObservedService { deleting: true, ..service() }), ServiceDecision::Wait);
}

#[test]
fn a_service_without_owner_is_never_taken_over() {
    let message = message(decide(&ObservedService { owners: Vec::new(), ..service() }));
    assert_eq!(
        message,
        "Service db exists and is not controlled by this NetworkService; delete it, rename the NetworkService, or annotate the Service with patchbay.dev/adopt=nsvc-uid to hand it over"
    );
}

#[test]
fn a_service_of_another_controller_is_never_taken_over() {
    let net_service = OwnerRef { kind: "NetService".to_owned(), uid: "other".to_owned(), ..own_reference() };
    // The same name, but created again: another UID.
    let earlier = OwnerRef { uid: "earlier-uid".to_owned(), ..own_reference() };
    let not_controlling = OwnerRef { controller: None, ..own_reference() };
    for (owner, expected) in [
        (net_service, "Service db is controlled by NetService db; delete it"),
        (earlier, "Service db is controlled by NetworkService db; delete it"),
        (not_controlling, "Service db exists and is not controlled by this NetworkService; delete it"),
    ] {
        let message = message(decide(&ObservedService { owners: vec![owner], ..service() }));
        assert!(message.starts_with(expected), "{message}");
    }
}

#[test]
fn a_service_with_the_annotation_is_adopted_in_place() {
    let net_service = OwnerRef { kind: "NetService".to_owned(), uid: "other".to_owned(), ..own_reference() };
    let bystander = OwnerRef { uid: "app".to_owned(), controller: Some(false), ..own_reference() };
    let mut other = ObservedService { owners: vec![net_service, bystander], ..service() };
    other.labels.clear();
    other.selector.insert("app".to_owned(), "db".to_owned());
    other.annotations.insert(ADOPT_ANNOTATION.to_owned(), UID.to_owned());
    let (spec, metadata, adopt) = patch_of(decide(&other));
    assert!(adopt);
    // The Service keeps its UID, so DNS has no gap.
    assert_eq!(spec, json!({"selector": null}));
    let owners = metadata["ownerReferences"].as_array().unwrap();
    let uids: Vec<_> =
        owners.iter().map(|owner| (owner["uid"].clone(), owner["controller"].clone())).collect();
    assert_eq!(uids, [("app".into(), false.into()), (UID.into(), true.into())]);
    assert_eq!(metadata["labels"], json!({"team": "storage"}));
}

#[test]
fn the_annotation_must_name_this_network_service_and_the_service_must_be_headless() {
    let annotated = |uid: &str| ObservedService {
        owners: Vec::new(),
        annotations: BTreeMap::from([(ADOPT_ANNOTATION.to_owned(), uid.to_owned())]),
        ..service()
    };
    assert!(message(decide(&annotated("another-uid"))).contains("patchbay.dev/adopt=nsvc-uid"));
    let with_ip =
        ObservedService { cluster_ip: ClusterIp::Assigned("10.96.0.7".to_owned()), ..annotated(UID) };
    assert_eq!(
        message(decide(&with_ip)),
        "Service db exists and is not controlled by this NetworkService and is not headless; delete it or rename the NetworkService"
    );
    let deleting = ObservedService { deleting: true, ..annotated(UID) };
    assert!(message(decide(&deleting)).ends_with("it is created again once it is gone"));
}

#[test]
fn a_patch_that_was_applied_leaves_nothing_to_do() {
    let mut edited = service();
    edited.owners.clear();
    edited.annotations.insert(ADOPT_ANNOTATION.to_owned(), UID.to_owned());
    assert!(matches!(decide(&edited), ServiceDecision::Patch { adopt: true, .. }));
    edited.owners = service().owners;
    assert_eq!(decide(&edited), ServiceDecision::Keep);
}

#[test]
fn r6_r12_the_slices_get_families_labels_and_the_network_from_the_service() {
    let owner = service().slice_owner(&spec());
    assert_eq!((&*owner.uid, &*owner.service, &*owner.network), ("svc-uid", "db", "shop/blue"));
    assert_eq!((owner.families, owner.headless, owner.labels), (Families::DUAL, true, labels()));
}

#[test]
fn r7_r8_a_service_with_a_selector_a_cluster_ip_or_another_type_takes_no_slices() {
    assert_eq!(why_no_slices(&service()), None);
    assert!(is_controlled_by(UID, &service()) && !is_controlled_by("other", &service()));
    // Labels, ports and families do not matter.
    let other = ObservedService { ports: Vec::new(), labels: BTreeMap::new(), ..service() };
    assert_eq!(why_no_slices(&other), None);
    let assigned = ClusterIp::Assigned("10.96.0.7".to_owned());
    let selector = BTreeMap::from([("app".to_owned(), "db".to_owned())]);
    let (external, other) = (ServiceType::ExternalName, ServiceType::Other);
    for (service, expected) in [
        (ObservedService { selector, ..service() }, "has a selector, so Kubernetes publishes the primary"),
        (ObservedService { cluster_ip: assigned, ..service() }, "has a cluster IP"),
        (ObservedService { cluster_ip: ClusterIp::Unset, ..service() }, "is not headless"),
        (ObservedService { r#type: external, ..service() }, "has the type ExternalName"),
        (ObservedService { r#type: other, ..service() }, "is not of the type ClusterIP"),
    ] {
        let why = why_no_slices(&service).unwrap();
        assert!(why.starts_with(expected), "{why}");
    }
}

#[test]
fn the_reason_for_missing_endpoints_names_the_service_and_the_cause() {
    let external = ObservedService { r#type: ServiceType::ExternalName, ..service() };
    let deleting = ObservedService { deleting: true, ..external.clone() };
    let ownerless = ObservedService { owners: Vec::new(), ..service() };
    for (service, failure, expected) in [
        (None, Some("no quota"), "Service db does not exist; it could not be written: no quota"),
        (
            None,
            None,
            "Service db does not exist; another client deletes it; find the client in the audit log of the API server and stop it",
        ),
        (
            Some(&external),
            None,
            "Service db has the type ExternalName; another client changes it back; find the client in metadata.managedFields of the Service and stop it",
        ),
        (
            Some(&external),
            Some("denied"),
            "Service db has the type ExternalName; it could not be written: denied",
        ),
        (
            Some(&deleting),
            Some("denied"),
            "Service db has the type ExternalName; it is being deleted and is created again once it is gone",
        ),
        (
            Some(&ownerless),
            Some("denied"),
            "Service db is not handed over yet; it could not be written: denied",
        ),
    ] {
        assert_eq!(withheld("db", service, failure), expected);
    }
}
