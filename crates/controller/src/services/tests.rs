mod events;

use client::{decode::MetadataObject, fence::LeaseFence, watch::StreamEvent};
use futures::stream;
use serde_json::json;

use super::*;
use crate::{
    cache::services::tests::{
        add_labelled_service, add_network_service, add_pod, add_service, add_slice, delete_network_service,
        list_all, remove_service, set_service_spec, unlist_foreign,
    },
    cache::watches::CacheFiller,
    leader::tests::FakeApiServer,
};

/// A leader whose caches are listed, with a Node.
fn start() -> (LeaderContext, Arc<FakeApiServer>, JoinSet<()>) {
    let (context, server) = FakeApiServer::start();
    for source in CacheSource::ALL {
        context.cache.mark_listed(source);
    }
    list_all(context.cache.services());
    context.cache.services().set_node("node-a", None);
    let mut tasks = JoinSet::new();
    tasks.spawn(ServiceController::new(&context).run(CancellationToken::new()));
    (context, server, tasks)
}

/// The writes so far: method and path without the prefix of the API.
fn writes(server: &FakeApiServer) -> Vec<String> {
    let requests = server.requests.lock().unwrap();
    let short = |path: &str| path.split_once("/namespaces/").map_or(path, |(_, rest)| rest).to_owned();
    requests
        .iter()
        .filter(|(method, ..)| method != "GET")
        .map(|(method, path, _)| format!("{method} {}", short(path)))
        .collect()
}

async fn settle() {
    tokio::time::sleep(Duration::from_millis(300)).await;
}

#[tokio::test(start_paused = true)]
async fn the_service_is_created_first_then_its_slices_then_the_status() {
    let (context, server, _tasks) = start();
    let services = context.cache.services();
    add_pod(services, "p", "db", "192.168.9.1");
    add_network_service(services, "ns", "db", "db");
    settle().await;
    assert_eq!(writes(&server), ["POST ns/services"], "the slices need the UID of the Service");
    add_service(services, "ns", "db", &json!({}));
    settle().await;
    let expected = [
        "POST ns/services",
        "POST ns/endpointslices",
        "POST ns/endpointslices",
        "PATCH ns/networkservices/db/status",
    ];
    assert_eq!(writes(&server), expected, "a slice of each family");
    let requests = server.requests.lock().unwrap();
    let slice: serde_json::Value = serde_json::from_str(&requests[1].2).unwrap();
    assert_eq!(slice["metadata"]["generateName"], "db-");
    assert_eq!(slice["endpoints"], json!([]), "the network does not exist, so no address is added");
    let status: serde_json::Value = serde_json::from_str(&requests[3].2).unwrap();
    assert_eq!(status[2]["value"]["conditions"][0]["reason"], "NetworkNotFound");
}

#[tokio::test(start_paused = true)]
async fn slices_are_created_and_updated_before_others_are_deleted() {
    let (context, server, _tasks) = start();
    let services = context.cache.services();
    // One slice of a former Service of this name, and none of this one.
    add_slice(services, "db", "old", "service-old", 1);
    add_service(services, "ns", "db", &json!({}));
    add_network_service(services, "ns", "db", "db");
    settle().await;
    let slices: Vec<String> =
        writes(&server).into_iter().filter(|write| write.contains("endpointslices")).collect();
    let created = "POST ns/endpointslices";
    assert_eq!(slices, [created, created, "DELETE ns/endpointslices/old"]);
    let requests = server.requests.lock().unwrap();
    let delete = requests.iter().find(|(method, ..)| method == "DELETE").unwrap();
    let options: serde_json::Value = serde_json::from_str(&delete.2).unwrap();
    assert_eq!(options["preconditions"], json!({"uid": "uid-old", "resourceVersion": "1"}));
}

#[tokio::test(start_paused = true)]
async fn an_annotated_service_gets_slices_and_a_bad_one_loses_them() {
    let (context, server, _tasks) = start();
    let services = context.cache.services();
    add_service(
        services,
        "ns",
        "own",
        &json!({"patchbay.dev/service-network": "blue", "patchbay.dev/selector": "app=db"}),
    );
    settle().await;
    assert_eq!(writes(&server)[0], "POST ns/endpointslices");
    add_slice(services, "own", "own-1", "service-own", 1);
    add_service(
        services,
        "ns",
        "own",
        &json!({"patchbay.dev/service-network": "blue", "patchbay.dev/selector": "=,"}),
    );
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(writes(&server).contains(&"DELETE ns/endpointslices/own-1".to_owned()), "{:?}", writes(&server));
    let events: Vec<String> =
        writes(&server).into_iter().filter(|write| write.ends_with("/events")).collect();
    assert_eq!(events, ["POST ns/events"; 2], "the NAD is missing, then the annotation is bad");
}

#[tokio::test(start_paused = true)]
async fn a_networkservice_that_is_being_deleted_creates_nothing_and_its_slices_follow_the_pods() {
    let (context, server, _tasks) = start();
    let services = context.cache.services();
    delete_network_service(services, "db");
    settle().await;
    assert_eq!(writes(&server), Vec::<String>::new(), "the Service is not created");
    add_slice(services, "db", "db-1", "service-db", 1);
    add_service(services, "ns", "db", &json!({}));
    settle().await;
    // The slice lacks the annotation of the network.
    assert_eq!(writes(&server), ["PUT ns/endpointslices/db-1"], "no slice of IPv6, and no status");
}

#[tokio::test(start_paused = true)]
async fn services_of_a_namespace_whose_requests_hang_delay_no_other() {
    let (context, server, _tasks) = start();
    server.hanging.lock().unwrap().push(("POST", "/namespaces/slow/"));
    for number in 0..64 {
        add_network_service(context.cache.services(), "slow", &format!("db-{number}"), "db");
    }
    // They take all the workers that they can.
    settle().await;
    for number in 0..20 {
        add_network_service(context.cache.services(), "fast", &format!("db-{number}"), "db");
    }
    settle().await;
    let fast = writes(&server).into_iter().filter(|write| write == "POST fast/services").count();
    assert_eq!(fast, 20);
    let slow = writes(&server).into_iter().filter(|write| write == "POST slow/services").count();
    assert_eq!(slow, MAX_CONCURRENT_PER_NAMESPACE);
}

#[tokio::test(start_paused = true)]
async fn a_failing_service_is_retried_with_growing_delays_without_end() {
    let (context, server, _tasks) = start();
    server.rejections.lock().unwrap().push(("POST", "/services", "no quota".to_owned()));
    add_network_service(context.cache.services(), "ns", "db", "db");
    let attempts = || writes(&server).iter().filter(|write| *write == "POST ns/services").count();
    // At 0, 1, 3, 7, 15, 31, 63, 123, 183 s.
    for (second, expected) in [(2, 2), (8, 4), (40, 6), (130, 8), (190, 9)] {
        let now = tokio::time::Instant::now();
        let until = start_of_test(&context) + Duration::from_secs(second);
        tokio::time::sleep(until.saturating_duration_since(now)).await;
        assert_eq!(attempts(), expected, "after {second} s");
    }
    let status =
        server.requests.lock().unwrap().iter().rev().find(|(_, path, _)| path.ends_with("/status")).cloned();
    assert!(status.unwrap().2.contains("no quota"), "the status says why");
    server.rejections.lock().unwrap().clear();
    tokio::time::sleep(Duration::from_secs(61)).await;
    assert!(attempts() > 9, "it is retried although it failed for minutes");
}

/// The fence of the test context expires an hour after its start.
fn start_of_test(context: &LeaderContext) -> tokio::time::Instant {
    tokio::time::Instant::now() + context.fence.remaining() - Duration::from_hours(1)
}

#[tokio::test(start_paused = true)]
async fn nothing_is_written_after_the_fence() {
    let (context, server) = FakeApiServer::start();
    let context = LeaderContext { fence: LeaseFence::expiring_in(Duration::ZERO), ..context };
    for source in CacheSource::ALL {
        context.cache.mark_listed(source);
    }
    list_all(context.cache.services());
    let mut tasks = JoinSet::new();
    tasks.spawn(ServiceController::new(&context).run(CancellationToken::new()));
    add_network_service(context.cache.services(), "ns", "db", "db");
    settle().await;
    assert_eq!(writes(&server), Vec::<String>::new());
}

#[test]
fn pauses_and_times_of_two_results_are_combined() {
    let (one, two) = (Duration::from_secs(1), Duration::from_secs(2));
    assert_eq!(Next::after(one).merge(Next::after(two)), Next::after(one));
    assert_eq!(Next::ON_CHANGE.merge(Next::after(two)), Next::after(two));
    let strict = Next::after(two).not_before(one);
    assert_eq!(strict.merge(Next::ON_CHANGE), strict);
    assert_eq!(Next::ON_CHANGE.merge(strict), strict);
}

#[tokio::test(start_paused = true)]
async fn a_service_that_another_writer_changes_back_gets_its_slices_and_is_not_ready() {
    let (context, server, _tasks) = start();
    let services = context.cache.services();
    add_nad(&context);
    add_pod(services, "p", "db", "192.168.9.1");
    add_network_service(services, "ns", "db", "db");
    // A policy adds a label to every Service: the patch succeeds and changes nothing.
    add_labelled_service(services, "ns", "db", &json!({}), &json!({"policy": "on"}));
    tokio::time::sleep(Duration::from_secs(30)).await;
    let patches = writes(&server).into_iter().filter(|write| write == "PATCH ns/services/db").count();
    assert!((2..=6).contains(&patches), "{patches} patches in 30 s");
    assert!(writes(&server).contains(&"POST ns/endpointslices".to_owned()), "{:?}", writes(&server));
    let ready = &last_status(&server)["conditions"][0];
    assert_eq!((&ready["status"], &ready["reason"]), (&json!("False"), &json!("NotReady")));
    let message = ready["message"].as_str().unwrap();
    assert!(message.contains("changes metadata.labels of Service db back"), "{message}");
    // The client stops.
    set_service_spec(services, "db", 9, &json!({}));
    tokio::time::sleep(Duration::from_secs(40)).await;
    let message = last_status(&server)["conditions"][0]["message"].take();
    assert_eq!(message, "1 of 1 endpoints are ready");
}

#[tokio::test(start_paused = true)]
async fn nothing_is_created_in_a_namespace_that_is_being_deleted() {
    let (context, server, _tasks) = start();
    context.cache.update(CacheSource::Namespaces, |state| {
        state.namespaces.insert("ns".to_owned(), plan::network::NamespacePhase::Terminating)
    });
    let services = context.cache.services();
    add_pod(services, "p", "db", "192.168.9.1");
    add_network_service(services, "ns", "db", "db");
    settle().await;
    add_service(
        services,
        "ns",
        "own",
        &json!({"patchbay.dev/service-network": "blue", "patchbay.dev/selector": "app=db"}),
    );
    settle().await;
    assert_eq!(writes(&server), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn services_of_a_namespace_that_is_created_again_are_reconciled_when_the_cache_shows_it() {
    let (context, server, _tasks) = start();
    let LeaderContext { client, cache, metrics, .. } = &context;
    let filler = CacheFiller { client: client.clone(), cache: cache.clone(), metrics: metrics.clone() };
    let object = |deleting: Option<&str>| {
        let object = json!({"metadata": {"name": "ns", "uid": "u", "deletionTimestamp": deleting}});
        serde_json::from_value::<MetadataObject>(object).unwrap()
    };
    let old = || object(Some("2026-01-01T00:00:00Z"));
    let mirror = async |events: Vec<StreamEvent<MetadataObject>>| {
        filler.mirror_namespaces(stream::iter(events)).await;
        settle().await;
    };
    mirror(vec![StreamEvent::Applied(old())]).await;
    // The watch of NetworkServices is ahead of the watch of namespaces.
    add_network_service(cache.services(), "ns", "db", "db");
    settle().await;
    assert_eq!(writes(&server), Vec::<String>::new(), "the cache shows the deleted namespace");
    mirror(vec![StreamEvent::Deleted(old()), StreamEvent::Applied(object(None))]).await;
    assert_eq!(count(&server, "POST ns/services"), 1);
    // A list that has the new namespace in place of the old one.
    mirror(vec![StreamEvent::Applied(old())]).await;
    remove_service(cache.services(), "db");
    add_network_service(cache.services(), "ns", "other", "db");
    settle().await;
    let created = count(&server, "POST ns/services");
    mirror(vec![StreamEvent::ListStarted, StreamEvent::Applied(object(None)), StreamEvent::ListDone]).await;
    assert!(count(&server, "POST ns/services") > created, "{:?}", writes(&server));
}

#[tokio::test(start_paused = true)]
async fn a_service_whose_namespace_is_missing_is_retried() {
    let (context, server, _tasks) = start();
    server.missing.lock().unwrap().push(("POST", "/services"));
    add_network_service(context.cache.services(), "ns", "db", "db");
    settle().await;
    server.missing.lock().unwrap().clear();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(count(&server, "POST ns/services"), 2);
}

fn count(server: &FakeApiServer, expected: &str) -> usize {
    writes(server).into_iter().filter(|write| write == expected).count()
}

/// The last status of the NetworkService `db`.
fn last_status(server: &FakeApiServer) -> serde_json::Value {
    let requests = server.requests.lock().unwrap();
    let (.., body) = requests.iter().rev().find(|(_, path, _)| path.ends_with("/db/status")).unwrap();
    serde_json::from_str::<serde_json::Value>(body).unwrap()[2]["value"].take()
}

#[tokio::test(start_paused = true)]
async fn a_writer_that_reacts_to_each_repair_is_answered_less_and_less_often() {
    let (context, server, _tasks) = start();
    let services = context.cache.services();
    add_network_service(services, "ns", "db", "db");
    set_service_spec(services, "db", 1, &json!({}));
    settle().await;
    let (mut version, mut seen) = (2, 0);
    set_service_spec(services, "db", version, &json!({"publishNotReadyAddresses": true}));
    for _ in 0..700 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let patches = count(&server, "PATCH ns/services/db");
        if patches > seen {
            seen = patches;
            version += 2;
            set_service_spec(services, "db", version - 1, &json!({}));
            tokio::time::sleep(Duration::from_millis(50)).await;
            set_service_spec(services, "db", version, &json!({"publishNotReadyAddresses": true}));
        }
    }
    // About 0, 1, 3, 7, 15, 31 and 63 s after the first change.
    assert_eq!(seen, 7);
    // The writer gives up.
    set_service_spec(services, "db", 900, &json!({}));
    tokio::time::sleep(Duration::from_secs(70)).await;
    set_service_spec(services, "db", 901, &json!({"publishNotReadyAddresses": true}));
    settle().await;
    assert_eq!(count(&server, "PATCH ns/services/db"), 8, "a later change is repaired at once");
}

#[tokio::test(start_paused = true)]
async fn a_client_that_deletes_the_service_again_and_again_causes_few_creations() {
    let (context, server, _tasks) = start();
    let services = context.cache.services();
    add_network_service(services, "ns", "db", "db");
    let (mut version, mut seen) = (0, 0);
    for _ in 0..300 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let creates = count(&server, "POST ns/services");
        if creates > seen {
            seen = creates;
            version += 1;
            set_service_spec(services, "db", version, &json!({}));
            tokio::time::sleep(Duration::from_millis(50)).await;
            remove_service(services, "db");
        }
    }
    assert_eq!(seen, 5, "at 0, 1, 3, 7 and 15 s");
    let ready = &last_status(&server)["conditions"][0];
    assert_eq!(ready["reason"], "NotReady");
    assert!(ready["message"].as_str().unwrap().contains("Service db does not exist"), "{ready}");
}

#[tokio::test(start_paused = true)]
async fn a_service_that_keeps_a_selector_or_another_type_loses_its_slices_and_the_status_says_why() {
    for (change, why) in [
        (json!({"selector": {"app": "db"}}), "has a selector"),
        (json!({"type": "ExternalName"}), "ExternalName"),
    ] {
        for refused in [true, false] {
            let (context, server, _tasks) = start();
            let services = context.cache.services();
            if refused {
                server.rejections.lock().unwrap().push(("PATCH", "/services/db", "denied".to_owned()));
            }
            add_pod(services, "p", "db", "192.168.9.1");
            add_slice(services, "db", "db-1", "service-db", 1);
            set_service_spec(services, "db", 2, &change);
            add_network_service(services, "ns", "db", "db");
            // A patch that succeeds and changes nothing is repeated after a delay.
            tokio::time::sleep(Duration::from_secs(3)).await;
            let found = writes(&server);
            assert!(found.contains(&"DELETE ns/endpointslices/db-1".to_owned()), "{found:?}");
            assert!(!found.iter().any(|write| write == "POST ns/endpointslices"), "{found:?}");
            let status = last_status(&server);
            assert_eq!(status["endpoints"]["summary"], "0/0");
            let ready = &status["conditions"][0];
            assert_eq!((&ready["status"], &ready["reason"]), (&json!("False"), &json!("NotReady")));
            let message = ready["message"].as_str().unwrap();
            let cause = if refused { "denied" } else { "another client changes it back" };
            assert!(message.contains(why) && message.contains(cause), "{message}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_selector_that_is_removed_at_once_costs_no_slice() {
    let (context, server, _tasks) = start();
    let services = context.cache.services();
    add_slice(services, "db", "db-1", "service-db", 1);
    set_service_spec(services, "db", 1, &json!({"selector": {"app": "db"}}));
    add_network_service(services, "ns", "db", "db");
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(writes(&server), ["PATCH ns/services/db"]);
    set_service_spec(services, "db", 2, &json!({}));
    settle().await;
    let found = writes(&server);
    assert!(!found.iter().any(|write| write.starts_with("DELETE")), "{found:?}");
    assert!(found.contains(&"PUT ns/endpointslices/db-1".to_owned()), "{found:?}");
}

#[tokio::test(start_paused = true)]
async fn annotated_services_of_a_terminating_namespace_follow_the_pods_without_creates() {
    let (context, server, _tasks) = start();
    context.cache.update(CacheSource::Namespaces, |state| {
        state.namespaces.insert("ns".to_owned(), plan::network::NamespacePhase::Terminating)
    });
    let services = context.cache.services();
    add_slice(services, "own", "own-1", "service-own", 1);
    add_service(
        services,
        "ns",
        "own",
        &json!({"patchbay.dev/service-network": "blue", "patchbay.dev/selector": "app=db"}),
    );
    settle().await;
    // The slice lacks the annotation of the network.
    assert_eq!(writes(&server), ["PUT ns/endpointslices/own-1"], "no slice of IPv6, and no event");
}

#[tokio::test(start_paused = true)]
async fn the_slices_of_a_deleted_networkservice_are_withdrawn_if_the_garbage_collector_is_slow() {
    let (context, server, _tasks) = start();
    let services = context.cache.services();
    add_slice(services, "db", "db-1", "service-db", 1);
    set_service_spec(services, "db", 1, &json!({}));
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(writes(&server), Vec::<String>::new(), "the watch of NetworkServices may be behind");
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(writes(&server), ["DELETE ns/endpointslices/db-1"]);
}

/// Adds the NAD of the services of these tests.
fn add_nad(context: &LeaderContext) {
    let object = json!({
        "metadata": {"namespace": "ns", "name": "blue", "uid": "uid", "resourceVersion": "1"},
        "spec": {"config": json!({"cniVersion": "1.0.0", "type": "macvlan"}).to_string()},
    });
    let (at, nad) = crate::cache::project::nad(serde_json::from_value(object).unwrap()).unwrap();
    context.cache.update(CacheSource::Nads, |state| {
        state.nads.get_or_insert_default().insert(at, nad);
        true
    });
}

#[tokio::test(start_paused = true)]
async fn r33_the_retry_of_a_failed_write_has_the_trigger_time_of_the_first() {
    let (context, server, _tasks) = start();
    let services = context.cache.services();
    add_nad(&context);
    add_pod(services, "p", "db", "192.168.9.1");
    server.rejections.lock().unwrap().push(("POST", "/endpointslices", "no quota".to_owned()));
    set_service_spec(services, "db", 1, &json!({}));
    add_network_service(services, "ns", "db", "db");
    settle().await;
    server.rejections.lock().unwrap().clear();
    tokio::time::sleep(Duration::from_secs(2)).await;
    let requests = server.requests.lock().unwrap();
    let slices =
        requests.iter().filter(|(method, path, _)| method == "POST" && path.ends_with("/endpointslices"));
    let slices = slices.map(|(.., body)| serde_json::from_str::<serde_json::Value>(body).unwrap());
    let times: Vec<String> = slices
        .filter(|slice| slice["addressType"] == "IPv4")
        .map(|slice| {
            slice["metadata"]["annotations"]["endpoints.kubernetes.io/last-change-trigger-time"].to_string()
        })
        .collect();
    assert_eq!(times, ["\"2026-01-01T00:00:00Z\""; 2]);
}

#[tokio::test(start_paused = true)]
async fn endpoints_are_published_before_foreign_objects_are_listed() {
    let (context, server, _tasks) = start();
    let services = context.cache.services();
    unlist_foreign(services);
    set_service_spec(services, "db", 1, &json!({}));
    add_network_service(services, "ns", "db", "db");
    settle().await;
    assert_eq!(count(&server, "POST ns/endpointslices"), 2);
    let status = last_status(&server);
    let kinds: Vec<&str> =
        status["conditions"].as_array().unwrap().iter().filter_map(|one| one["type"].as_str()).collect();
    assert_eq!(kinds, ["Ready", "DuplicateAddress"]);
}
