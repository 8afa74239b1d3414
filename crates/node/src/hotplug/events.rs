//! Events about pods.

use std::time::Duration;

use client::{
    events::{self, EventDraft, EventLimits, EventRecorder, EventSource, PriorWork, PriorWorkGuard, Repeats},
    request::{ApiCall, DEFAULT_TIMEOUT},
};
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use plan::hotplug::{EventReason, PodEvent, PodIdentity};
use tokio_util::sync::CancellationToken;

use crate::{Error, event::REPORTER};

/// The same warning about a pod is not sent again within this time.
const EVENT_WINDOW: Duration = Duration::from_secs(300);
/// A node has up to 500 pods, and all of them may be edited at once.
const EVENT_LIMITS: EventLimits = EventLimits { queue: 1024, remembered: 2048 };

/// The longest time that an event waits for attachments and the writes of their status.
const MAX_DELAY: Duration = Duration::from_secs(2);

/// A queue of events about pods. Recording never blocks.
#[derive(Clone)]
pub struct PodEvents {
    recorder: EventRecorder,
    work: PriorWork,
}

/// Sends the queued events.
pub struct PodEventSender(events::EventSender);

impl PodEvents {
    pub fn new(client: Client, node: &str) -> (Self, PodEventSender) {
        let source = EventSource {
            controller: REPORTER,
            instance: node.to_owned(),
            window: EVENT_WINDOW,
            repeats: Repeats::Separate,
            limits: EVENT_LIMITS,
        };
        let (recorder, sender) = events::recorder(client, source, ApiCall::new(DEFAULT_TIMEOUT, || ()));
        let work = PriorWork::default();
        let sender = sender.after(work.clone(), MAX_DELAY);
        (Self { recorder, work }, PodEventSender(sender))
    }

    /// Delays events while attachments are made: when many pods change at once, their status comes first.
    pub fn delay(&self) -> PriorWorkGuard {
        self.work.start()
    }

    /// For events about other objects.
    pub fn recorder(&self) -> EventRecorder {
        self.recorder.clone()
    }

    pub fn record(&self, pod: &PodIdentity, event: PodEvent) {
        let PodEvent { reason, note } = event;
        let action = match reason {
            EventReason::RemovedInterface
            | EventReason::FailedRemovingInterface
            | EventReason::InterfaceKept => "RemoveInterface",
            EventReason::AddedInterface
            | EventReason::FailedAddingInterface
            | EventReason::InterfaceAddRejected
            | EventReason::AttachmentUpdateRejected
            | EventReason::NamespaceForbidden
            | EventReason::InvalidNetworks
            | EventReason::InterfaceNameTaken
            | EventReason::DeviceRequired
            | EventReason::RecordsUnreadable
            | EventReason::OwnNetworkStack => "AddInterface",
        };
        let regarding = events::reference::<Pod>(Some(&pod.namespace), &pod.name, &pod.uid);
        let draft = EventDraft { warning: reason.is_warning(), reason: reason.as_str(), action, note };
        match reason {
            // The plan reports each change of the annotation once, always with the same note.
            EventReason::InterfaceAddRejected => self.recorder.record_change(regarding, draft),
            _ => self.recorder.record(regarding, draft),
        };
    }
}

impl PodEventSender {
    /// Sends until `stop`. An event that cannot be sent is dropped.
    pub async fn run(self, stop: CancellationToken) -> Result<(), Error> {
        self.0.run(stop.clone()).await;
        stop.cancelled().await;
        Ok(())
    }
}
