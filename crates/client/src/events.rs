//! Kubernetes Events about any object in any namespace.
//!
//! Recording never blocks: events wait in a bounded queue, and one task sends them. An event that repeats is sent once
//! per window. Events inform people; conditions, logs and metrics report the same, so a lost event is no failure.
//!
//! kube's `Recorder` sends them: it creates events about cluster-scoped objects in the namespace `default`, and it knows
//! series. Its series keep the note of their first event, so they fit only sources whose events of one object and reason
//! say the same: see [`Repeats`].

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use api::ErrorChain;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client, Resource,
    runtime::events::{Event, EventType, Recorder, Reporter},
};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, timeout_at},
};
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::request::ApiCall;

/// The maximum length of a note in bytes. The API server accepts 1024.
const MAX_NOTE: usize = 1000;

/// An event about an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventDraft {
    pub warning: bool,
    /// A CamelCase word for programs.
    pub reason: &'static str,
    /// What the reporter did or tried, as a CamelCase word.
    pub action: &'static str,
    /// For people. Cut off if it is too long.
    pub note: String,
}

/// Who reports the events.
#[derive(Clone, Debug)]
pub struct EventSource {
    /// The program.
    pub controller: &'static str,
    /// The node or the pod on which it runs.
    pub instance: String,
    /// An event with the same object, reason and note as another one in this window is not sent.
    pub window: Duration,
    pub repeats: Repeats,
    pub limits: EventLimits,
}

/// What happens to further events of one object and reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeats {
    /// They extend a series, which shows the note of the first.
    Series,
    /// Each is an event of its own, with its own note. The window throttles warnings only: a Normal event reports a
    /// change, and the same change can happen twice.
    Separate,
}

/// Bounds the memory of a recorder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventLimits {
    /// Events that wait to be sent. Dropped events are still in the log and the metrics.
    pub queue: usize,
    /// Events that are remembered for the throttle. The oldest is forgotten first.
    pub remembered: usize,
}

impl Default for EventLimits {
    fn default() -> Self {
        Self { queue: 64, remembered: 512 }
    }
}

/// Records events. Cheap to clone.
#[derive(Clone)]
pub struct EventRecorder {
    queue: mpsc::Sender<QueuedEvent>,
    repeats: Repeats,
    throttle: Arc<Mutex<Throttle>>,
}

/// Sends the recorded events.
pub struct EventSender {
    client: Client,
    reporter: Reporter,
    /// Knows the series; none for [`Repeats::Separate`].
    series: Option<Recorder>,
    call: ApiCall,
    queue: mpsc::Receiver<QueuedEvent>,
    throttle: Arc<Mutex<Throttle>>,
    /// Work that events wait for, and for how long.
    after: Option<(PriorWork, Duration)>,
}

struct QueuedEvent {
    regarding: ObjectReference,
    event: Event,
    key: EventKey,
    recorded: Instant,
}

/// Counts work that is more urgent than events. Clones share the count.
#[derive(Clone, Debug)]
pub struct PriorWork(watch::Sender<usize>);

/// Counts as work until it is dropped.
#[derive(Debug)]
pub struct PriorWorkGuard(watch::Sender<usize>);

impl Default for PriorWork {
    fn default() -> Self {
        Self(watch::Sender::new(0))
    }
}

impl PriorWork {
    pub fn start(&self) -> PriorWorkGuard {
        self.0.send_modify(|count| *count += 1);
        PriorWorkGuard(self.0.clone())
    }

    async fn finished(&self) {
        // Cannot fail: this sender exists.
        let _ = self.0.subscribe().wait_for(|count| *count == 0).await;
    }
}

impl Drop for PriorWorkGuard {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

/// The events of the last window.
struct Throttle {
    window: Duration,
    max_remembered: usize,
    /// In the order of their times.
    sent: VecDeque<(EventKey, Instant)>,
}

/// Events with the same key are the same.
#[derive(Clone, PartialEq, Eq)]
struct EventKey {
    uid: Option<String>,
    kind: Option<String>,
    namespace: Option<String>,
    name: Option<String>,
    reason: &'static str,
    note: String,
}

/// A recorder, and the sender that must run for it. `call` limits and counts the requests; with a fence, nothing is sent
/// after it has expired.
pub fn recorder(client: Client, source: EventSource, call: ApiCall) -> (EventRecorder, EventSender) {
    let EventSource { controller, instance, window, repeats, limits } = source;
    let (sender, queue) = mpsc::channel(limits.queue.max(1));
    let reporter = Reporter { controller: controller.to_owned(), instance: Some(instance) };
    let throttle = Throttle { window, max_remembered: limits.remembered, sent: VecDeque::new() };
    let throttle = Arc::new(Mutex::new(throttle));
    let series = (repeats == Repeats::Series).then(|| Recorder::new(client.clone(), reporter.clone()));
    let sending =
        EventSender { client, reporter, series, call, queue, throttle: Arc::clone(&throttle), after: None };
    (EventRecorder { queue: sender, repeats, throttle }, sending)
}

/// A reference to an object of a known kind, for [`EventRecorder::record`]. `namespace` is None for cluster-scoped kinds.
pub fn reference<K: Resource<DynamicType = ()>>(
    namespace: Option<&str>,
    name: &str,
    uid: &str,
) -> ObjectReference {
    ObjectReference {
        api_version: Some(K::api_version(&()).into_owned()),
        kind: Some(K::kind(&()).into_owned()),
        namespace: namespace.map(str::to_owned),
        name: Some(name.to_owned()),
        uid: Some(uid.to_owned()),
        ..ObjectReference::default()
    }
}

impl EventRecorder {
    /// Queues an event, unless the same one was recorded in this window. Drops it if the queue is full. Returns false if it
    /// was dropped.
    pub fn record(&self, regarding: ObjectReference, event: EventDraft) -> bool {
        let throttled = event.warning || self.repeats == Repeats::Series;
        self.queue(regarding, event, throttled)
    }

    /// The same, also for an event that was recorded in this window. For events that the caller records once per change of
    /// the object, which the note does not show.
    pub fn record_change(&self, regarding: ObjectReference, event: EventDraft) -> bool {
        self.queue(regarding, event, false)
    }

    fn queue(&self, regarding: ObjectReference, event: EventDraft, throttled: bool) -> bool {
        let EventDraft { warning, reason, action, note } = event;
        let note = note[..note.floor_char_boundary(MAX_NOTE)].to_owned();
        let key = EventKey {
            uid: regarding.uid.clone(),
            kind: regarding.kind.clone(),
            namespace: regarding.namespace.clone(),
            name: regarding.name.clone(),
            reason,
            note: note.clone(),
        };
        let mut throttle = lock(&self.throttle);
        if throttled && throttle.contains(&key, Instant::now()) {
            return true;
        }
        let event = Event {
            type_: if warning { EventType::Warning } else { EventType::Normal },
            reason: reason.to_owned(),
            note: Some(note),
            action: action.to_owned(),
            secondary: None,
        };
        let object = regarding.name.clone();
        let recorded = Instant::now();
        let queued =
            self.queue.try_send(QueuedEvent { regarding, event, key: key.clone(), recorded }).is_ok();
        if !queued {
            debug!(object, reason, "event queue is full, dropping an event");
        } else if throttled {
            throttle.remember(key, recorded);
        }
        queued
    }
}

impl Throttle {
    fn contains(&mut self, key: &EventKey, now: Instant) -> bool {
        while self.sent.front().is_some_and(|(_, at)| now.duration_since(*at) >= self.window) {
            self.sent.pop_front();
        }
        self.sent.iter().any(|(sent, _)| sent == key)
    }

    fn remember(&mut self, key: EventKey, now: Instant) {
        if self.sent.len() >= self.max_remembered {
            self.sent.pop_front();
        }
        self.sent.push_back((key, now));
    }

    fn forget(&mut self, key: &EventKey) {
        self.sent.retain(|(sent, _)| sent != key);
    }
}

/// Nothing that holds the lock can panic.
fn lock(throttle: &Mutex<Throttle>) -> MutexGuard<'_, Throttle> {
    throttle.lock().unwrap_or_else(PoisonError::into_inner)
}

impl EventSender {
    /// Sends each event when the work is finished, but at most `limit` after it was recorded.
    #[must_use]
    pub fn after(self, work: PriorWork, limit: Duration) -> Self {
        Self { after: Some((work, limit)), ..self }
    }

    /// The next event that is due. None if there is no recorder left.
    async fn next(&mut self) -> Option<QueuedEvent> {
        let queued = self.queue.recv().await?;
        if let Some((work, limit)) = &self.after {
            let _ = timeout_at(queued.recorded + *limit, work.finished()).await;
        }
        Some(queued)
    }

    /// Sends until `stop`, or until there is no recorder left. An event that cannot be sent is dropped, and sent when it is
    /// recorded again.
    pub async fn run(mut self, stop: CancellationToken) {
        while let Some(Some(queued)) = stop.run_until_cancelled(self.next()).await {
            let QueuedEvent { regarding, event, key, .. } = queued;
            // A new recorder knows no series and creates an event.
            let new = || Recorder::new(self.client.clone(), self.reporter.clone());
            let recorder = self.series.clone().unwrap_or_else(new);
            if let Err(error) = self.call.create(recorder.publish(&event, &regarding)).await {
                debug!(reason = event.reason, error = %ErrorChain(&error), "cannot send an event");
                lock(&self.throttle).forget(&key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{Node, Pod};
    use serde_json::Value;
    use tokio::task::JoinSet;

    use super::*;
    use crate::{
        fence::LeaseFence,
        request::DEFAULT_TIMEOUT,
        testing::{Reply, ScriptedServer},
    };

    const WINDOW: Duration = Duration::from_mins(1);
    const QUEUE_LENGTH: usize = 64;
    const MAX_REMEMBERED: usize = 512;

    fn scripted() -> (EventRecorder, EventSender, ScriptedServer) {
        scripted_with(Repeats::Series)
    }

    fn scripted_with(repeats: Repeats) -> (EventRecorder, EventSender, ScriptedServer) {
        let (client, server) = ScriptedServer::new();
        let source = EventSource {
            controller: "patchbay-node",
            instance: "node-1".to_owned(),
            window: WINDOW,
            repeats,
            limits: EventLimits::default(),
        };
        let call = ApiCall::new(DEFAULT_TIMEOUT, || ());
        let (recorder, sender) = recorder(client, source, call);
        (recorder, sender, server)
    }

    fn draft(reason: &'static str, note: &str) -> EventDraft {
        EventDraft { warning: true, reason, action: "Attach", note: note.to_owned() }
    }

    fn pod(name: &str) -> ObjectReference {
        reference::<Pod>(Some("ns"), name, &format!("uid-{name}"))
    }

    /// Sends everything that is queued, each event accepted.
    async fn sent(
        recorder: EventRecorder,
        sender: EventSender,
        server: &ScriptedServer,
    ) -> Vec<(String, Value)> {
        drop(recorder);
        for _ in 0..QUEUE_LENGTH {
            server.reply(Reply::Body(201, r#"{"metadata":{"name":"e"},"eventTime":null}"#.to_owned()));
        }
        sender.run(CancellationToken::new()).await;
        let requests = server.requests().into_iter();
        requests.map(|(_, uri, body)| (uri, serde_json::from_str(&body).unwrap())).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn an_event_is_created_in_the_namespace_of_its_object() {
        let (recorder, sender, server) = scripted();
        recorder.record(pod("a"), draft("AttachFailed", "no bridge"));
        recorder.record(reference::<Node>(None, "n", "u"), draft("AttachFailed", "no bridge"));
        let sent = sent(recorder, sender, &server).await;
        let [(in_pod, event), (in_node, _)] = &sent[..] else { panic!("{sent:?}") };
        assert!(in_pod.contains("/namespaces/ns/events"), "{in_pod}");
        assert!(in_node.contains("/namespaces/default/events"), "{in_node}");
        assert_eq!(event["regarding"]["kind"], "Pod");
        assert_eq!(event["regarding"]["uid"], "uid-a");
        assert_eq!(event["reportingController"], "patchbay-node");
        assert_eq!(event["reportingInstance"], "node-1");
        assert_eq!((&event["type"], &event["reason"]), (&"Warning".into(), &"AttachFailed".into()));
        assert_eq!((&event["action"], &event["note"]), (&"Attach".into(), &"no bridge".into()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_repeated_event_is_sent_once_per_window() {
        let (recorder, mut sender, _server) = scripted();
        let mut queued = || std::iter::from_fn(|| sender.queue.try_recv().ok()).count();
        for _ in 0..3 {
            recorder.record(pod("a"), draft("AttachFailed", "no bridge"));
        }
        assert_eq!(queued(), 1);
        recorder.record(pod("b"), draft("AttachFailed", "no bridge"));
        recorder.record(pod("a"), draft("DetachFailed", "no bridge"));
        recorder.record(pod("a"), draft("AttachFailed", "no address"));
        assert_eq!(queued(), 3, "another object, reason or note is another event");
        tokio::time::advance(WINDOW).await;
        recorder.record(pod("a"), draft("AttachFailed", "no bridge"));
        assert_eq!(queued(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn separate_events_of_one_reason_each_show_their_own_note() {
        let (recorder, sender, server) = scripted_with(Repeats::Separate);
        for note in ["net1", "net2", "net1"] {
            recorder.record(pod("a"), EventDraft { warning: false, ..draft("AddedInterface", note) });
            recorder.record(pod("a"), draft("FailedAddingInterface", note));
        }
        let sent = sent(recorder, sender, &server).await;
        let notes = |kind: &str| -> Vec<&str> {
            let of_kind = sent.iter().filter(|(_, event)| event["type"] == kind);
            of_kind.map(|(_, event)| event["note"].as_str().unwrap()).collect()
        };
        assert_eq!(notes("Normal"), ["net1", "net2", "net1"], "every change is reported");
        assert_eq!(notes("Warning"), ["net1", "net2"], "a warning is sent once per window");
        assert!(server.requests().iter().all(|(method, ..)| *method == http::Method::POST));
    }

    #[tokio::test(start_paused = true)]
    async fn an_event_about_a_change_is_sent_each_time() {
        let (recorder, mut sender, _server) = scripted_with(Repeats::Separate);
        for _ in 0..3 {
            recorder.record_change(pod("a"), draft("InterfaceAddRejected", "host network"));
        }
        assert_eq!(std::iter::from_fn(|| sender.queue.try_recv().ok()).count(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn memory_is_bounded_and_a_dropped_event_is_not_remembered() {
        let (recorder, mut sender, _server) = scripted();
        for number in 0..QUEUE_LENGTH {
            assert!(recorder.record(pod(&number.to_string()), draft("AttachFailed", "x")));
        }
        assert!(!recorder.record(pod("late"), draft("AttachFailed", "x")), "the queue is full");
        assert!(recorder.record(pod("0"), draft("AttachFailed", "x")), "it waits already");
        assert_eq!(std::iter::from_fn(|| sender.queue.try_recv().ok()).count(), QUEUE_LENGTH);
        assert!(recorder.record(pod("late"), draft("AttachFailed", "x")));
        assert_eq!(std::iter::from_fn(|| sender.queue.try_recv().ok()).count(), 1);
        for number in 0..2 * MAX_REMEMBERED {
            recorder.record(pod(&format!("more-{number}")), draft("AttachFailed", "x"));
            sender.queue.try_recv().unwrap();
        }
        assert_eq!(recorder.throttle.lock().unwrap().sent.len(), MAX_REMEMBERED);
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_note_is_cut_between_characters() {
        let (recorder, mut sender, _server) = scripted();
        recorder.record(pod("a"), draft("AttachFailed", &"ä".repeat(2000)));
        let queued = sender.queue.try_recv().unwrap();
        assert_eq!(queued.event.note.unwrap(), "ä".repeat(MAX_NOTE / 2));
    }

    #[tokio::test(start_paused = true)]
    async fn events_wait_for_prior_work_up_to_the_limit() {
        let (recorder, sender, server) = scripted();
        let (work, limit) = (PriorWork::default(), Duration::from_secs(2));
        let stop = CancellationToken::new();
        let mut tasks = JoinSet::new();
        tasks.spawn(sender.after(work.clone(), limit).run(stop.clone()));
        let sent_after = async |wait: Duration| {
            tokio::time::sleep(wait).await;
            server.requests().len()
        };
        for _ in 0..4 {
            server.reply(Reply::Body(201, r#"{"metadata":{"name":"e"},"eventTime":null}"#.to_owned()));
        }
        recorder.record(pod("a"), draft("Attached", "x"));
        assert_eq!(sent_after(Duration::from_millis(1)).await, 1, "without work events are sent at once");

        let (first, second) = (work.start(), work.start());
        recorder.record(pod("b"), draft("Attached", "x"));
        assert_eq!(sent_after(Duration::from_millis(500)).await, 1);
        drop(first);
        assert_eq!(sent_after(Duration::from_millis(500)).await, 1, "work is left");
        drop(second);
        assert_eq!(sent_after(Duration::from_millis(1)).await, 2);

        let _endless = work.start();
        recorder.record(pod("c"), draft("Attached", "x"));
        recorder.record(pod("d"), draft("Attached", "x"));
        assert_eq!(sent_after(limit / 2).await, 2);
        assert_eq!(
            sent_after(limit / 2 + Duration::from_millis(1)).await,
            4,
            "the limit counts from the recording"
        );
        stop.cancel();
        tasks.join_next().await.unwrap().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_event_does_not_hold_up_the_next_and_none_is_sent_outside_the_fence() {
        let (recorder, mut sender, server) = scripted();
        sender.call = sender.call.fenced(LeaseFence::expiring_in(Duration::from_secs(8)));
        server.reply(Reply::Silence);
        server.reply(Reply::status(403, "Forbidden"));
        for name in ["a", "b"] {
            recorder.record(pod(name), draft("AttachFailed", "x"));
        }
        let stop = CancellationToken::new();
        let mut tasks = JoinSet::new();
        tasks.spawn(sender.run(stop.clone()));
        tokio::time::sleep(Duration::from_secs(7)).await;
        assert_eq!(server.requests().len(), 2);
        assert!(
            recorder.throttle.lock().unwrap().sent.is_empty(),
            "events that were not sent may be repeated"
        );
        tokio::time::sleep(Duration::from_secs(2)).await;
        recorder.record(pod("c"), draft("AttachFailed", "x"));
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!(server.requests().len(), 2, "the lease has expired");
        stop.cancel();
        tasks.join_next().await.unwrap().unwrap();
    }
}
