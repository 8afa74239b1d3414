use serde_json::{Value, json};

use super::{
    project::{EndpointPod, NetworkServiceObject},
    *,
};

const SOURCES: [ServiceSource; 6] = [
    ServiceSource::NetworkServices,
    ServiceSource::Services,
    ServiceSource::Slices,
    ServiceSource::ForeignSlices,
    ServiceSource::Endpoints,
    ServiceSource::Pods,
];

pub fn key(name: &str) -> ServiceKey {
    ServiceKey::new("ns", name)
}

pub fn list_all(services: &ServiceCache) {
    for source in SOURCES {
        services.mark_listed(source);
    }
}

/// The watches of foreign slices and of Endpoints have not listed.
pub fn unlist_foreign(services: &ServiceCache) {
    services.clear_foreign(ServiceSource::Endpoints);
    services.clear_foreign(ServiceSource::ForeignSlices);
}

/// A NetworkService on the NAD `blue` that selects this application.
pub fn add_network_service(services: &ServiceCache, namespace: &str, name: &str, app: &str) {
    let (key, observed) = network_service(namespace, name, app, None);
    services.set_network_service(&key, Some(observed));
}

/// A NetworkService that is being deleted.
pub fn delete_network_service(services: &ServiceCache, name: &str) {
    let (key, observed) = network_service("ns", name, name, Some("2026-01-01T00:00:00Z"));
    services.set_network_service(&key, Some(observed));
}

fn network_service(
    namespace: &str,
    name: &str,
    app: &str,
    deleted: Option<&str>,
) -> (ServiceKey, ObservedNetworkService) {
    let object = json!({
        "metadata": {"namespace": namespace, "name": name, "uid": format!("uid-{name}"), "resourceVersion": "1",
            "generation": 1, "deletionTimestamp": deleted},
        "spec": {"network": "blue", "selector": {"app": app}},
    });
    ObservedNetworkService::new(serde_json::from_value::<NetworkServiceObject>(object).unwrap()).unwrap()
}

pub fn remove_network_service(services: &ServiceCache, name: &str) {
    services.set_network_service(&key(name), None);
}

/// A headless Service, which the NetworkService of its name controls unless it has annotations.
pub fn add_service(services: &ServiceCache, namespace: &str, name: &str, annotations: &Value) {
    add_labelled_service(services, namespace, name, annotations, &json!({}));
}

pub fn add_labelled_service(
    services: &ServiceCache,
    namespace: &str,
    name: &str,
    annotations: &Value,
    labels: &Value,
) {
    let mut object = json!({
        "metadata": {"namespace": namespace, "name": name, "uid": format!("service-{name}"), "resourceVersion": "1",
            "annotations": annotations, "labels": labels},
        "spec": {"clusterIP": "None", "ipFamilies": ["IPv4", "IPv6"]},
    });
    if annotations.as_object().is_none_or(serde_json::Map::is_empty) {
        object["metadata"]["ownerReferences"] = json!([{"apiVersion": "patchbay.dev/v1alpha1", "kind": "NetworkService",
            "name": name, "uid": format!("uid-{name}"), "controller": true, "blockOwnerDeletion": true}]);
    }
    set_service_object(services, object);
}

/// The Service of the NetworkService of its name, with this version and with these fields of its spec.
pub fn set_service_spec(services: &ServiceCache, name: &str, version: u32, spec: &Value) {
    let mut object = json!({
        "metadata": {"namespace": "ns", "name": name, "uid": format!("service-{name}"), "resourceVersion": version.to_string(),
            "ownerReferences": [{"apiVersion": "patchbay.dev/v1alpha1", "kind": "NetworkService", "name": name,
                "uid": format!("uid-{name}"), "controller": true, "blockOwnerDeletion": true}]},
        "spec": {"clusterIP": "None", "ipFamilies": ["IPv4", "IPv6"]},
    });
    for (field, value) in spec.as_object().unwrap() {
        object["spec"][field] = value.clone();
    }
    set_service_object(services, object);
}

fn set_service_object(services: &ServiceCache, object: Value) {
    let (key, observed) = project::service(serde_json::from_value(object).unwrap()).unwrap();
    services.set_service(&key, Some(observed));
}

pub fn remove_service(services: &ServiceCache, name: &str) {
    services.set_service(&key(name), None);
}

fn pod_facts(name: &str, labels: &Value, address: Option<&str>, ready: bool) -> PodFacts {
    let status = address
        .map(|address| json!([{"name": "ns/blue", "interface": "net1", "ips": [address]}]).to_string());
    let object = json!({
        "metadata": {"namespace": "ns", "name": name, "uid": format!("uid-{name}"), "labels": labels,
            "annotations": {"k8s.v1.cni.cncf.io/network-status": status.unwrap_or_default()}},
        "spec": {"nodeName": "node-a", "containers": [{"ports": [{"name": "pg", "containerPort": 5432}, {"containerPort": 1}]}],
            "initContainers": [{"ports": [{"name": "init", "containerPort": 1}]},
                {"restartPolicy": "Always", "ports": [{"name": "side", "containerPort": 9, "protocol": "UDP"}]}]},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": if ready { "True" } else { "False" },
            "lastTransitionTime": "2026-01-01T00:00:00Z"}]},
    });
    project::pod(serde_json::from_value::<EndpointPod>(object).unwrap()).unwrap()
}

/// A ready pod of this application with an address on the NAD `blue`.
pub fn add_pod(services: &ServiceCache, name: &str, app: &str, address: &str) {
    services.apply_pod(pod_facts(name, &json!({"app": app}), Some(address), true));
}

/// A slice of IPv4 without endpoints. Its resourceVersion is its generation.
pub fn add_slice(services: &ServiceCache, service: &str, name: &str, owner: &str, generation: i64) {
    let object = json!({
        "addressType": "IPv4", "endpoints": [], "ports": [],
        "metadata": {"namespace": "ns", "name": name, "uid": format!("uid-{name}"), "resourceVersion": generation.to_string(),
            "generation": generation,
            "labels": {"kubernetes.io/service-name": service, "endpointslice.kubernetes.io/managed-by": "networkservice.patchbay.dev"},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Service", "name": service, "uid": owner, "controller": true, "blockOwnerDeletion": true}]},
    });
    let (key, slice) = project::slice(serde_json::from_value(object).unwrap()).unwrap();
    services.apply_slice(&key, slice);
}

/// The services that are due now.
fn due(services: &ServiceCache) -> Vec<String> {
    let mut names = Vec::new();
    while let Some(key) = services.queue().take() {
        services.queue().finish(&key, crate::queue::Pause::Burst);
        names.push(key.name.to_string());
    }
    names.sort();
    names
}

fn cache() -> ServiceCache {
    let services = ServiceCache::default();
    services.queue().start();
    list_all(&services);
    services
}

#[tokio::test(start_paused = true)]
async fn a_pod_marks_only_the_services_that_select_its_old_or_new_labels() {
    let services = cache();
    for app in ["db", "web", "other"] {
        add_network_service(&services, "ns", app, app);
    }
    add_network_service(&services, "elsewhere", "db", "db");
    due(&services);
    add_pod(&services, "p", "db", "192.168.9.1");
    assert_eq!(due(&services), ["db"]);
    add_pod(&services, "p", "db", "192.168.9.1");
    assert!(due(&services).is_empty(), "nothing changed");
    add_pod(&services, "p", "web", "192.168.9.1");
    assert_eq!(due(&services), ["db", "web"]);
    assert!(services.snapshot(&key("db")).unwrap().pods.is_empty());
    assert_eq!(services.snapshot(&key("web")).unwrap().pods.len(), 1);
    services.delete_pod("ns", "p");
    assert_eq!(due(&services), ["web"]);
}

#[tokio::test(start_paused = true)]
async fn a_pod_without_secondary_network_is_only_counted() {
    let services = cache();
    add_network_service(&services, "ns", "db", "db");
    due(&services);
    let labels = json!({"app": "db"});
    services.apply_pod(pod_facts("p", &labels, None, false));
    assert_eq!(due(&services), ["db"], "there is a pod now");
    services.apply_pod(pod_facts("p", &labels, None, true));
    assert!(due(&services).is_empty(), "its readiness does not matter");
    let snapshot = services.snapshot(&key("db")).unwrap();
    assert_eq!((snapshot.pods.len(), snapshot.plain_pods), (0, 1));
    services.apply_pod(pod_facts("p", &labels, Some("192.168.9.1"), true));
    assert_eq!(due(&services), ["db"]);
    let snapshot = services.snapshot(&key("db")).unwrap();
    assert_eq!((snapshot.pods.len(), snapshot.plain_pods), (1, 0));
}

#[test]
fn a_pod_is_projected_to_what_endpoints_depend_on() {
    let pod = pod_facts("p", &json!({"app": "db"}), Some("192.168.9.1"), true);
    let ports: Vec<(&str, u16)> = pod.ports.iter().map(|port| (&*port.name, port.port)).collect();
    assert_eq!(ports, [("pg", 5432), ("side", 9)], "named ports of containers and sidecars");
    assert!(pod.ready && pod.ready_since.is_some() && pod.node.as_deref() == Some("node-a"));
    assert_eq!(pod.interfaces.unwrap()[0].addresses[0].to_string(), "192.168.9.1");
    let broken = pod_facts("p", &json!({}), None, true);
    assert!(broken.interfaces.unwrap().is_empty(), "an empty annotation");
}

#[tokio::test(start_paused = true)]
async fn pods_are_needed_while_a_networkservice_or_an_annotated_service_exists() {
    let services = ServiceCache::default();
    let needed = services.needs_pods();
    assert!(!*needed.borrow());
    add_service(&services, "ns", "plain", &json!({}));
    assert!(!*needed.borrow(), "a Service without annotations");
    add_service(&services, "ns", "own", &json!({"patchbay.dev/selector": "app=db"}));
    assert!(*needed.borrow());
    add_network_service(&services, "ns", "db", "db");
    services.set_service(&key("own"), None);
    assert!(*needed.borrow());
    services.set_network_service(&key("db"), None);
    assert!(!*needed.borrow() && services.len() == 0);
}

#[tokio::test(start_paused = true)]
async fn a_service_waits_until_everything_that_it_reads_is_listed() {
    let services = ServiceCache::default();
    services.queue().start();
    add_network_service(&services, "ns", "db", "db");
    for source in SOURCES {
        assert!(services.snapshot(&key("db")).is_none(), "before {source:?}");
        due(&services);
        services.mark_listed(source);
        assert_eq!(due(&services), ["db"], "{source:?} wakes it");
    }
    assert!(services.snapshot(&key("db")).is_some());
    services.clear_pods();
    assert!(services.snapshot(&key("db")).is_none());
    // A Service without endpoints does not wait for pods.
    add_slice(&services, "gone", "gone-1", "service-gone", 1);
    assert!(services.snapshot(&key("gone")).is_some());
}

#[tokio::test(start_paused = true)]
async fn endpoints_wait_for_the_list_of_pods_and_not_for_those_of_foreign_objects() {
    let services = ServiceCache::default();
    services.queue().start();
    add_network_service(&services, "ns", "db", "db");
    for source in
        [ServiceSource::NetworkServices, ServiceSource::Services, ServiceSource::Slices, ServiceSource::Pods]
    {
        assert!(services.snapshot(&key("db")).is_none(), "before {source:?}");
        services.mark_listed(source);
    }
    assert!(!services.snapshot(&key("db")).unwrap().foreign_listed);
    services.mark_listed(ServiceSource::Endpoints);
    assert!(!services.snapshot(&key("db")).unwrap().foreign_listed);
    due(&services);
    services.mark_listed(ServiceSource::ForeignSlices);
    assert_eq!(due(&services), ["db"], "the condition can be written now");
    assert!(services.snapshot(&key("db")).unwrap().foreign_listed);
}

#[tokio::test(start_paused = true)]
async fn the_own_status_does_not_wake_the_service_and_another_one_does() {
    let services = cache();
    let set = |version: &str, generation: i64, seen: Option<i64>| {
        let (key, mut observed) = network_service("ns", "db", "db", None);
        observed.resource_version = version.to_owned();
        observed.status.observed_generation = seen;
        observed.generation = generation;
        services.set_network_service(&key, Some(observed));
    };
    let written = |seen: i64| NetworkServiceStatus {
        observed_generation: Some(seen),
        ..NetworkServiceStatus::default()
    };
    set("1", 1, None);
    due(&services);
    services.expect_status(&key("db"), written(1));
    set("2", 1, Some(1));
    assert!(due(&services).is_empty(), "the echo of the own write");
    assert_eq!(services.snapshot(&key("db")).unwrap().network_service.unwrap().resource_version, "2");
    set("3", 1, Some(7));
    assert_eq!(due(&services), ["db"], "another writer changed the status");
    services.expect_status(&key("db"), written(1));
    set("4", 2, Some(1));
    assert_eq!(due(&services), ["db"], "the spec changed too");
    // A reconcile waits for the echo.
    services.expect_status(&key("db"), written(2));
    assert!(services.wake_on_status(&key("db"), "4"));
    set("5", 2, Some(2));
    assert_eq!(due(&services), ["db"]);
    assert!(!services.wake_on_status(&key("db"), "4"), "the echo came already");
}

#[tokio::test(start_paused = true)]
async fn a_new_term_expects_nothing_that_an_earlier_one_wrote() {
    let services = cache();
    let set = |version: &str, seen: Option<i64>| {
        let (key, mut observed) = network_service("ns", "db", "db", None);
        observed.resource_version = version.to_owned();
        observed.status.observed_generation = seen;
        services.set_network_service(&key, Some(observed));
    };
    set("1", None);
    let status = NetworkServiceStatus { observed_generation: Some(1), ..NetworkServiceStatus::default() };
    services.expect_status(&key("db"), status);
    services.expect_slice(&key("db"), "db-1", "uid-db-1", 1, client::fence::now());
    assert!(services.snapshot(&key("db")).unwrap().stale);
    due(&services);
    services.forget_own_writes();
    assert!(!services.snapshot(&key("db")).unwrap().stale);
    set("2", Some(1));
    assert_eq!(due(&services), ["db"], "the status may be that of another leader");
}

#[tokio::test(start_paused = true)]
async fn a_replica_that_does_not_lead_queues_nothing() {
    let services = ServiceCache::default();
    list_all(&services);
    for number in 0..9 {
        add_network_service(&services, "ns", &format!("db-{number}"), "db");
        remove_network_service(&services, &format!("db-{number}"));
    }
    add_network_service(&services, "ns", "left", "db");
    services.queue().start();
    services.mark_all();
    assert_eq!(due(&services), ["left"]);
}

/// A pod with the gate of KubeVirt.
fn projected(change: impl FnOnce(&mut Value)) -> PodFacts {
    let mut object = json!({
        "metadata": {"namespace": "ns", "name": "p", "uid": "uid-p"},
        "spec": {"readinessGates": [{"conditionType": "kubevirt.io/virtual-machine-unpaused"}]},
        "status": {"phase": "Running", "conditions": [
            {"type": "ContainersReady", "status": "True"},
            {"type": "kubevirt.io/virtual-machine-unpaused", "status": "False"},
            {"type": "Ready", "status": "False", "reason": "ReadinessGatesNotReady",
                "lastTransitionTime": "2026-01-01T00:00:07Z"},
        ]},
    });
    change(&mut object);
    project::pod(serde_json::from_value::<EndpointPod>(object).unwrap()).unwrap()
}

#[test]
fn readiness_with_gates_deletion_and_phase_of_a_pod_are_projected() {
    let gated = projected(|_| {});
    assert!(!gated.ready && !gated.deleting, "the containers are ready and the gate is not");
    assert_eq!(gated.ready_since, Some("2026-01-01T00:00:07Z".parse().unwrap()));
    let open = projected(|pod| {
        pod["status"]["conditions"][1]["status"] = "True".into();
        pod["status"]["conditions"][2]["status"] = "True".into();
    });
    assert!(open.ready && open.takes_traffic());
    for status in ["Unknown", ""] {
        assert!(!projected(|pod| pod["status"]["conditions"][2]["status"] = status.into()).ready);
    }
    let deleting = projected(|pod| {
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:09Z".into();
        pod["status"]["conditions"][2]["status"] = "True".into();
    });
    assert!(deleting.ready && deleting.deleting && !deleting.takes_traffic());
    for (phase, finished) in [("Pending", false), ("Unknown", false), ("Succeeded", true), ("Failed", true)] {
        let pod = projected(|pod| pod["status"]["phase"] = phase.into());
        assert_eq!(pod.phase == plan::services::PodPhase::Finished, finished, "{phase}");
    }
    let bare = projected(|pod| _ = pod.as_object_mut().unwrap().remove("status"));
    assert!(!bare.ready && bare.ready_since.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_selector_that_changes_selects_the_pods_again() {
    let services = cache();
    for number in 0..3 {
        add_pod(&services, &format!("db-{number}"), "db", "192.168.9.1");
    }
    add_pod(&services, "web", "web", "192.168.9.1");
    add_network_service(&services, "ns", "one", "db");
    assert_eq!(services.snapshot(&key("one")).unwrap().pods.len(), 3);
    add_network_service(&services, "ns", "one", "web");
    assert_eq!(services.snapshot(&key("one")).unwrap().pods.len(), 1);
    services.set_network_service(&key("one"), None);
    assert!(services.snapshot(&key("one")).unwrap().pods.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_relist_removes_the_pods_that_are_gone() {
    let services = cache();
    add_network_service(&services, "ns", "db", "db");
    for name in ["stays", "goes"] {
        add_pod(&services, name, "db", "192.168.9.1");
    }
    due(&services);
    services.start_pod_list();
    add_pod(&services, "stays", "db", "192.168.9.1");
    assert!(due(&services).is_empty());
    services.finish_pod_list();
    assert_eq!(due(&services), ["db"]);
    assert_eq!(services.snapshot(&key("db")).unwrap().pods.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_stale_cache_wakes_the_service_once_it_shows_the_own_writes() {
    let services = cache();
    add_network_service(&services, "ns", "db", "db");
    add_slice(&services, "db", "db-1", "service-db", 1);
    tokio::time::advance(entry::REPAIR_DELAY).await;
    due(&services);
    let now = client::fence::now();
    services.expect_slice(&key("db"), "db-1", "uid-db-1", 2, now);
    services.expect_slice(&key("db"), "db-2", "uid-db-2", 1, now);
    assert!(services.snapshot(&key("db")).unwrap().stale);
    add_slice(&services, "db", "db-1", "service-db", 2);
    assert!(due(&services).is_empty() && services.snapshot(&key("db")).unwrap().stale);
    add_slice(&services, "db", "db-2", "service-db", 1);
    assert_eq!(due(&services), ["db"]);
    assert!(!services.snapshot(&key("db")).unwrap().stale);
    services.expect_slice_deletion(&key("db"), "db-2", "uid-db-2", now);
    assert!(services.snapshot(&key("db")).unwrap().stale);
    services.delete_slice(&key("db"), "db-2", "uid-db-2");
    assert_eq!(due(&services), ["db"]);
    assert!(!services.snapshot(&key("db")).unwrap().stale);
}

#[tokio::test(start_paused = true)]
async fn changes_of_slices_by_others_are_collected_for_a_second() {
    let services = cache();
    add_network_service(&services, "ns", "db", "db");
    add_slice(&services, "db", "db-1", "service-db", 1);
    services.expect_slice(&key("db"), "db-1", "uid-db-1", 2, client::fence::now());
    tokio::time::advance(entry::REPAIR_DELAY).await;
    due(&services);
    add_slice(&services, "db", "db-1", "service-db", 2);
    tokio::time::advance(entry::REPAIR_DELAY).await;
    assert!(due(&services).is_empty(), "an own write");
    add_slice(&services, "db", "db-1", "service-db", 3);
    assert!(due(&services).is_empty());
    tokio::time::advance(entry::REPAIR_DELAY).await;
    assert_eq!(due(&services), ["db"]);
    services.delete_slice(&key("db"), "db-1", "uid-db-1");
    tokio::time::advance(entry::REPAIR_DELAY).await;
    assert_eq!(due(&services), ["db"]);
    // A slice whose label names another Service concerns both.
    add_network_service(&services, "ns", "web", "web");
    add_slice(&services, "db", "db-2", "service-db", 1);
    due(&services);
    add_slice(&services, "web", "db-2", "service-db", 2);
    tokio::time::advance(entry::REPAIR_DELAY).await;
    assert_eq!(due(&services), ["db", "web"]);
    assert!(services.snapshot(&key("db")).unwrap().slices.is_empty());
}

#[tokio::test(start_paused = true)]
async fn foreign_slices_and_endpoints_concern_only_their_service() {
    let services = cache();
    add_network_service(&services, "ns", "db", "db");
    due(&services);
    services.apply_foreign_slice(&key("db"), "left", "endpointslice-controller.k8s.io");
    services.apply_foreign_slice(&key("unrelated"), "other", "endpointslice-controller.k8s.io");
    services.set_endpoints(&key("db"), true);
    services.set_endpoints(&key("unrelated"), true);
    assert_eq!(due(&services), ["db"]);
    let snapshot = services.snapshot(&key("db")).unwrap();
    assert!(snapshot.has_endpoints && snapshot.foreign_slices.len() == 1);
    // The label names another Service now.
    services.apply_foreign_slice(&key("unrelated"), "left", "endpointslice-controller.k8s.io");
    assert_eq!(due(&services), ["db"]);
    services.clear_foreign(ServiceSource::Endpoints);
    services.clear_foreign(ServiceSource::ForeignSlices);
    due(&services);
    services.mark_listed(ServiceSource::Endpoints);
    services.mark_listed(ServiceSource::ForeignSlices);
    let snapshot = services.snapshot(&key("db")).unwrap();
    assert!(!snapshot.has_endpoints && snapshot.foreign_slices.is_empty());
}

#[tokio::test(start_paused = true)]
async fn the_zone_of_a_node_concerns_the_services_with_a_pod_on_it() {
    let services = cache();
    add_network_service(&services, "ns", "db", "db");
    add_network_service(&services, "ns", "web", "web");
    add_pod(&services, "p", "db", "192.168.9.1");
    due(&services);
    services.set_node("node-a", Some("zone-1"));
    assert_eq!(due(&services), ["db"]);
    services.set_node("node-a", Some("zone-1"));
    services.set_node("node-b", Some("zone-1"));
    assert!(due(&services).is_empty());
    assert_eq!(services.snapshot(&key("db")).unwrap().zones["node-a"].as_deref(), Some("zone-1"));
    services.delete_node("node-a");
    assert_eq!(due(&services), ["db"]);
    services.mark_network(&NadRef::new("ns", "blue"));
    assert_eq!(due(&services), ["db", "web"]);
}

#[test]
fn equal_labels_and_texts_of_pods_are_shared() {
    let services = cache();
    add_network_service(&services, "ns", "db", "db");
    add_pod(&services, "a", "db", "192.168.9.1");
    add_pod(&services, "b", "db", "192.168.9.2");
    let pods = services.snapshot(&key("db")).unwrap().pods;
    assert!(Arc::ptr_eq(&pods[0].labels, &pods[1].labels) && Arc::ptr_eq(&pods[0].ports, &pods[1].ports));
    let nads = [0, 1].map(|at: usize| pods[at].interfaces.as_ref().unwrap()[0].nad.clone());
    assert!(Arc::ptr_eq(&nads[0], &nads[1]));
}
