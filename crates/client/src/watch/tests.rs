use k8s_openapi::api::core::v1::Node;
use kube::{ResourceExt as _, core::ApiResource};
use tokio::sync::mpsc::UnboundedSender;

use super::*;
use crate::{
    decode::{MetadataObject, Object, Unparsed},
    testing::{Reply, ScriptedServer},
};

fn object(name: &str, version: u32) -> String {
    format!(r#"{{"metadata":{{"name":"{name}","resourceVersion":"{version}"}}}}"#)
}

fn added(name: &str, version: u32) -> String {
    format!(r#"{{"type":"ADDED","object":{}}}"#, object(name, version))
}

fn error(code: u16) -> String {
    format!(r#"{{"type":"ERROR","object":{{"kind":"Status","code":{code},"message":"no","reason":"no"}}}}"#)
}

/// A short form of an event, for comparisons.
fn short(event: &StreamEvent<Node>) -> String {
    match event {
        StreamEvent::ListStarted => "started".to_owned(),
        StreamEvent::Applied(node) => format!("+{}", node.name_any()),
        StreamEvent::Deleted(node) => format!("-{}", node.name_any()),
        StreamEvent::ListDone => "done".to_owned(),
        StreamEvent::Resumed => "resumed".to_owned(),
        StreamEvent::NotServed(_) => "not served".to_owned(),
        StreamEvent::Failed(_) => "failed".to_owned(),
    }
}

type Events = BoxStream<'static, StreamEvent<Node>>;

async fn expect(events: &mut Events, expected: &[&str]) {
    for expected in expected {
        assert_eq!(short(&events.next().await.unwrap()), *expected);
    }
}

/// No event for a while; less than the time after which a silent watch counts as lost.
async fn expect_none(events: &mut Events) {
    let event = timeout(WATCH_TIMEOUT, events.next()).await;
    assert!(event.is_err(), "{event:?}");
}

/// A watch of which the list is done and which is established.
async fn watching(config: WatchConfig) -> (Events, ScriptedServer, UnboundedSender<String>) {
    let (client, server) = ScriptedServer::new();
    server.reply(Reply::page("5", "", &[object("a", 4)]));
    let (reply, sender) = Reply::watch();
    server.reply(reply);
    let mut events = stream(Api::all(client), config);
    expect(&mut events, &["started", "+a", "done"]).await;
    sender.send(added("b", 7)).unwrap();
    expect(&mut events, &["+b"]).await;
    (events, server, sender)
}

/// The query of the last request.
fn last_query(server: &ScriptedServer) -> String {
    server.requests().last().unwrap().1.split_once('?').unwrap().1.to_owned()
}

#[tokio::test(start_paused = true)]
async fn a_list_is_read_page_by_page_and_then_watched() {
    let (client, server) = ScriptedServer::new();
    server.reply(Reply::page("5", "more", &[object("a", 1)]));
    server.reply(Reply::page("5", "", &[object("b", 2)]));
    let (reply, sender) = Reply::watch();
    server.reply(reply);
    let mut events = stream(Api::all(client), WatchConfig::all().page_size(1));
    expect(&mut events, &["started", "+a"]).await;
    assert_eq!(server.requests().len(), 1, "the next page is requested only after this one is consumed");
    expect(&mut events, &["+b", "done"]).await;
    assert!(last_query(&server).contains("limit=1") && last_query(&server).contains("continue=more"));
    sender.send(added("c", 6)).unwrap();
    sender.send(added("a", 7).replace("ADDED", "DELETED")).unwrap();
    expect(&mut events, &["+c", "-a"]).await;
    assert!(last_query(&server).contains("resourceVersion=5"), "{}", last_query(&server));
    assert!(last_query(&server).contains("timeoutSeconds=60"), "every watch ends within a minute");
}

#[tokio::test(start_paused = true)]
async fn the_position_is_known_once_the_list_is_complete() {
    let (client, server) = ScriptedServer::new();
    server.reply(Reply::page("5", "", &[object("a", 1)]));
    let (reply, sender) = Reply::watch();
    server.reply(reply);
    let mut events = positioned(Api::<Node>::all(client), WatchConfig::all());
    sender.send(added("b", 7)).unwrap();
    sender.send(error(500)).unwrap();
    for expected in [("started", None), ("+a", None), ("done", Some(5)), ("+b", Some(7)), ("failed", None)] {
        let (event, position) = events.next().await.unwrap();
        assert_eq!((short(&event).as_str(), position), expected);
    }
}

#[tokio::test(start_paused = true)]
async fn each_page_has_a_deadline_of_its_own() {
    let (client, server) = ScriptedServer::new();
    for page in 0..4 {
        server.reply(Reply::page("5", "more", &[object("a", page)]));
    }
    let mut events = stream(Api::all(client), WatchConfig::all());
    expect(&mut events, &["started"]).await;
    for _ in 0..4 {
        expect(&mut events, &["+a"]).await;
        // The consumer is slow, not the API server.
        tokio::time::advance(Duration::from_secs(30)).await;
    }
    let start = Instant::now();
    expect(&mut events, &["failed"]).await;
    assert_eq!(start.elapsed(), RESPONSE_TIMEOUT);
    expect(&mut events, &["started"]).await;
}

#[tokio::test(start_paused = true)]
async fn an_ended_watch_is_renewed_at_the_last_version_without_an_event() {
    let (mut events, server, sender) = watching(WatchConfig::all()).await;
    let bookmark = r#"{"type":"BOOKMARK","object":{"apiVersion":"v1","kind":"Node","metadata":{"resourceVersion":"9"}}}"#;
    sender.send(bookmark.to_owned()).unwrap();
    let (reply, next) = Reply::watch();
    server.reply(reply);
    drop(sender);
    next.send(added("c", 12)).unwrap();
    expect(&mut events, &["+c"]).await;
    assert!(last_query(&server).contains("resourceVersion=9"), "{}", last_query(&server));
}

#[tokio::test(start_paused = true)]
async fn a_broken_watch_resumes_at_the_last_version_and_reports_the_first_response() {
    let (mut events, server, sender) = watching(WatchConfig::all()).await;
    // The connection is refused, and then works again.
    server.reply(Reply::status(503, "ServiceUnavailable"));
    server.reply(Reply::page("11", "", &[object("b", 7)]));
    let (reply, next) = Reply::watch();
    server.reply(reply);
    drop(sender);
    expect(&mut events, &["failed", "resumed"]).await;
    assert!(last_query(&server).contains("resourceVersion=7"), "{}", last_query(&server));
    expect_none(&mut events).await;
    next.send(added("c", 12)).unwrap();
    expect(&mut events, &["+c"]).await;
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_must_confirm_its_objects_lists_after_each_failure() {
    let config = WatchConfig::all().after_failure(AfterFailure::Relist);
    let (mut events, server, sender) = watching(config).await;
    server.reply(Reply::status(503, "ServiceUnavailable"));
    server.reply(Reply::page("9", "", &[object("b", 7)]));
    let (reply, _next) = Reply::watch();
    server.reply(reply);
    drop(sender);
    expect(&mut events, &["failed", "started", "+b", "done"]).await;
    expect_none(&mut events).await;
}

#[tokio::test(start_paused = true)]
async fn a_version_that_the_server_has_not_reached_is_listed_again() {
    let (mut events, server, sender) = watching(WatchConfig::all()).await;
    server.reply(Reply::status(503, "ServiceUnavailable"));
    // A backup was restored: "Too large resource version".
    server.reply(Reply::status(504, "Timeout"));
    server.reply(Reply::page("3", "", &[object("a", 1)]));
    drop(sender);
    expect(&mut events, &["failed", "failed"]).await;
    assert!(last_query(&server).contains("resourceVersion=7"), "{}", last_query(&server));
    assert!(last_query(&server).contains("resourceVersionMatch=NotOlderThan"), "{}", last_query(&server));
    expect(&mut events, &["started", "+a", "done"]).await;
}

#[tokio::test(start_paused = true)]
async fn an_expired_or_unknown_version_is_listed_again() {
    for answer in [Ok(error(410)), Err(410), Err(504), Err(400)] {
        let (mut events, server, sender) = watching(WatchConfig::all()).await;
        match answer {
            Ok(event) => sender.send(event).unwrap(),
            Err(code) => {
                server.reply(Reply::status(code, "Expired"));
                drop(sender);
            }
        }
        server.reply(Reply::page("20", "", &[object("c", 19)]));
        expect(&mut events, &["failed", "started", "+c", "done"]).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_kind_that_is_not_served_is_reported_and_listed_once_it_is() {
    let (client, server) = ScriptedServer::new();
    server.reply(Reply::status(404, "NotFound"));
    server.reply(Reply::page("5", "", &[]));
    server.reply(Reply::status(404, "NotFound"));
    server.reply(Reply::page("9", "", &[object("a", 8)]));
    let mut events = stream(Api::all(client), WatchConfig::all());
    expect(&mut events, &["started", "not served", "started", "done"]).await;
    // The kind was removed and came back: the objects that it has then are listed.
    expect(&mut events, &["not served", "started", "+a", "done"]).await;
}

#[tokio::test(start_paused = true)]
async fn a_lost_connection_is_a_failure_within_the_detection_time() {
    // The connection of the watch stays open, but nothing arrives any more.
    let (mut events, _server, _sender) = watching(WatchConfig::all()).await;
    let last_contact = Instant::now();
    expect(&mut events, &["failed"]).await;
    assert_eq!(last_contact.elapsed(), DETECTION_TIME);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_ends_each_watch_at_once_is_not_asked_in_a_busy_loop() {
    let (mut events, server, sender) = watching(WatchConfig::all()).await;
    drop(sender);
    for _ in 0..64 {
        server.reply(Reply::watch().0);
    }
    let before = server.requests().len();
    let event = timeout(Duration::from_secs(10), events.next()).await;
    assert!(event.is_err(), "{event:?}");
    let requests = server.requests().len() - before;
    assert!((2..8).contains(&requests), "{requests} requests in 10 s");
}

#[tokio::test(start_paused = true)]
async fn retries_back_off_up_to_the_limit_and_only_a_lasting_watch_resets_them() {
    let (client, server) = ScriptedServer::new();
    let backoff = Backoff::exact(Duration::from_secs(1), Duration::from_secs(4));
    let mut events = stream(Api::all(client), WatchConfig::all().backoff(backoff));
    let mut delays = Vec::new();
    expect(&mut events, &["started"]).await;
    for _ in 0..4 {
        server.reply(Reply::status(500, "InternalError"));
        expect(&mut events, &["failed"]).await;
        let failed = Instant::now();
        expect(&mut events, &["started"]).await;
        delays.push(failed.elapsed().as_secs());
    }
    assert_eq!(delays, [1, 2, 4, 4]);
    // Lists succeed and watches fail: a list in every second would overload the API server further.
    server.reply(Reply::page("5", "", &[]));
    server.reply(Reply::status(500, "InternalError"));
    expect(&mut events, &["done", "failed"]).await;
    let failed = Instant::now();
    expect(&mut events, &["started"]).await;
    assert_eq!(failed.elapsed().as_secs(), 4);
    server.reply(Reply::page("5", "", &[]));
    let (reply, sender) = Reply::watch();
    server.reply(reply);
    sender.send(added("a", 6)).unwrap();
    expect(&mut events, &["done", "+a"]).await;
    server.reply(Reply::status(500, "InternalError"));
    drop(sender);
    expect(&mut events, &["failed"]).await;
    let failed = Instant::now();
    expect(&mut events, &["started"]).await;
    assert_eq!(failed.elapsed().as_secs(), 1);
}

#[tokio::test(start_paused = true)]
async fn selectors_are_in_every_request() {
    for (config, parameter) in [
        (WatchConfig::one("a"), "fieldSelector=metadata.name%3Da"),
        (WatchConfig::labelled("x=y"), "labelSelector=x%3Dy"),
        (WatchConfig::all().fields("status.phase!=Failed"), "fieldSelector=status.phase%21%3DFailed"),
    ] {
        let (_events, server, _sender) = watching(config).await;
        for (_, uri, _) in server.requests() {
            assert!(uri.contains(parameter), "{uri}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_watch_of_metadata_asks_for_nothing_else() {
    let (client, server) = ScriptedServer::new();
    server.reply(Reply::page("5", "", &[object("a", 1)]));
    let api: Api<MetadataObject> = Api::all_with(client, &ApiResource::erase::<Node>(&()));
    let mut events = stream(api, WatchConfig::all());
    assert!(matches!(events.next().await, Some(StreamEvent::ListStarted)));
    assert!(matches!(events.next().await, Some(StreamEvent::Applied(_))));
    assert!(server.requests()[0].1.starts_with("/api/v1/nodes?"), "{:?}", server.requests());
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_call_loses_no_event_and_repeats_no_request() {
    let (mut events, server, sender) = watching(WatchConfig::all()).await;
    let before = server.requests().len();
    for _ in 0..10 {
        assert!(timeout(Duration::from_secs(1), events.next()).await.is_err());
    }
    sender.send(added("c", 8)).unwrap();
    expect(&mut events, &["+c"]).await;
    assert_eq!(server.requests().len(), before);
}

#[tokio::test(start_paused = true)]
async fn a_collected_watch_yields_complete_lists_of_projected_objects() {
    let (client, server) = ScriptedServer::new();
    let kind = ApiResource::erase::<Node>(&());
    let api: Api<Object<crate::decode::Ignored, Unparsed>> = Api::all_with(client, &kind);
    let mut watch = ObjectWatch::projected(api, WatchConfig::all(), |object| object.metadata.name.unwrap());
    // The first list breaks in the middle.
    server.reply(Reply::page("5", "more", &[object("x", 1)]));
    server.reply(Reply::status(500, "InternalError"));
    server.reply(Reply::page("6", "more", &[object("a", 1)]));
    server.reply(Reply::page("6", "", &[object("b", 2)]));
    let (reply, sender) = Reply::watch();
    server.reply(reply);
    assert!(matches!(watch.next().await, ObjectEvent::Failed(Error::List(_))));
    let synced = watch.next().await;
    assert!(matches!(&synced, ObjectEvent::Synced(names) if *names == ["a", "b"]), "{synced:?}");
    sender.send(added("c", 7)).unwrap();
    sender.send(added("a", 8).replace("ADDED", "DELETED")).unwrap();
    assert!(matches!(watch.next().await, ObjectEvent::Changed(name) if name == "c"));
    assert!(matches!(watch.next().await, ObjectEvent::Deleted(name) if name == "a"));
    server.reply(Reply::status(503, "ServiceUnavailable"));
    server.reply(Reply::page("9", "", &[]));
    let (reply, _next) = Reply::watch();
    server.reply(reply);
    drop(sender);
    assert!(matches!(watch.next().await, ObjectEvent::Failed(Error::Start(_))));
    assert!(matches!(watch.next().await, ObjectEvent::Resumed));
}

#[tokio::test(start_paused = true)]
async fn an_unresponsive_server_is_a_failure_after_ten_seconds() {
    let (client, _server) = ScriptedServer::new();
    let mut watch = ObjectWatch::<Node>::new(Api::all(client), WatchConfig::one("a"));
    let start = Instant::now();
    assert!(matches!(watch.next().await, ObjectEvent::Failed(Error::Deadline(_))));
    assert_eq!(start.elapsed().as_secs(), 10);
}
