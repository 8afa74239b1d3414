//! The events of services.

use super::*;

#[tokio::test(start_paused = true)]
async fn warnings_beyond_the_limit_are_sent_later_without_a_change() {
    let (context, server, _tasks) = start();
    let services = context.cache.services();
    for number in 0..30 {
        add_pod(services, &format!("p-{number}"), "db", "169.254.0.1");
    }
    set_service_spec(services, "db", 1, &json!({}));
    add_network_service(services, "ns", "db", "db");
    let events = || count(&server, "POST ns/events");
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(events(), 25);
    tokio::time::sleep(Duration::from_mins(6)).await;
    assert_eq!(events(), 30);
}

#[tokio::test(start_paused = true)]
async fn warnings_that_the_queue_of_events_did_not_take_are_sent_later() {
    let (context, server, _tasks) = start();
    let services = context.cache.services();
    // Each of these Services has one warning: the NAD is missing.
    let annotations = json!({"patchbay.dev/service-network": "blue", "patchbay.dev/selector": "app=db"});
    server.hanging.lock().unwrap().push(("POST", "/events"));
    let all = EVENT_LIMITS.queue + 40;
    for number in 0..all {
        add_service(services, "ns", &format!("own-{number}"), &annotations);
    }
    tokio::time::sleep(Duration::from_millis(100)).await;
    server.hanging.lock().unwrap().clear();
    tokio::time::sleep(Duration::from_mins(2)).await;
    let requests = server.requests.lock().unwrap();
    let about = |body: &String| {
        let event: serde_json::Value = serde_json::from_str(body).unwrap();
        event["regarding"]["name"].as_str().unwrap().to_owned()
    };
    let events = requests.iter().filter(|(method, path, _)| method == "POST" && path.ends_with("/events"));
    let services: std::collections::HashSet<String> = events.map(|(.., body)| about(body)).collect();
    assert_eq!(services.len(), all);
}

#[tokio::test(start_paused = true)]
async fn a_warning_that_only_events_report_is_repeated_while_it_holds() {
    let (context, server, _tasks) = start();
    let services = context.cache.services();
    let annotations = json!({"patchbay.dev/service-network": "blue", "patchbay.dev/selector": "app=db"});
    add_service(services, "ns", "own", &annotations);
    let events = || count(&server, "POST ns/events");
    settle().await;
    assert_eq!(events(), 1, "the NAD is missing");
    tokio::time::sleep(Duration::from_mins(29)).await;
    assert_eq!(events(), 1);
    tokio::time::sleep(Duration::from_mins(2)).await;
    assert_eq!(events(), 2);
}
