//! Kubernetes Events about BridgeNetworks on this node.

use std::time::Duration;

use api::{BridgeNetwork, ErrorChain};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client, Resource as _,
    runtime::events::{Event, EventType, Recorder, Reporter},
};
use tokio::{sync::mpsc, time::timeout};
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::Error;

/// Bounds the events that wait to be sent. Dropped events are still in the log and the metrics.
const QUEUE_LENGTH: usize = 64;
/// Bounds one request.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);

/// A queue of events. Recording never blocks.
#[derive(Clone)]
pub struct Events(mpsc::Sender<(ObjectReference, Event)>);

/// Sends the queued events.
pub struct EventSender {
    recorder: Recorder,
    queue: mpsc::Receiver<(ObjectReference, Event)>,
}

/// The reasons of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventReason {
    /// Another program changed a link of the network, and the daemon repaired it.
    Repaired,
    /// The network cannot be applied on this node.
    Failed,
    /// The network has no free address.
    AddressesExhausted,
    /// The node no longer holds the block of its pods' addresses; other nodes may allocate them too.
    AddressBlockLost,
    /// The journal does not cover a block of this node, so its allocations are unknown.
    AddressBlockUnverified,
}

impl Events {
    pub fn new(client: Client, node: &str) -> (Self, EventSender) {
        let (sender, queue) = mpsc::channel(QUEUE_LENGTH);
        let reporter = Reporter { controller: "patchbay-node".to_owned(), instance: Some(node.to_owned()) };
        (Self(sender), EventSender { recorder: Recorder::new(client, reporter), queue })
    }

    /// Queues an event about a network.
    pub fn record(&self, name: &str, uid: &str, reason: EventReason, note: String) {
        let (type_, reason, action) = match reason {
            EventReason::Repaired => (EventType::Normal, "Repaired", "Repair"),
            EventReason::AddressesExhausted => (EventType::Warning, "AddressesExhausted", "Allocate"),
            EventReason::AddressBlockLost => (EventType::Warning, "AddressBlockLost", "Allocate"),
            EventReason::AddressBlockUnverified => (EventType::Warning, "AddressBlockUnverified", "Allocate"),
            EventReason::Failed => (EventType::Warning, "NodeFailed", "Configure"),
        };
        let about = ObjectReference {
            api_version: Some(BridgeNetwork::api_version(&()).into_owned()),
            kind: Some(BridgeNetwork::kind(&()).into_owned()),
            name: Some(name.to_owned()),
            uid: Some(uid.to_owned()),
            ..ObjectReference::default()
        };
        let event = Event {
            type_,
            reason: reason.to_owned(),
            note: Some(note.chars().take(1000).collect()),
            action: action.to_owned(),
            secondary: None,
        };
        if self.0.try_send((about, event)).is_err() {
            debug!(network = name, reason, "event queue is full, dropping an event");
        }
    }
}

impl EventSender {
    /// Sends until `stop`. An event that cannot be sent is dropped.
    pub async fn run(mut self, stop: CancellationToken) -> Result<(), Error> {
        while let Some(Some((about, event))) = stop.run_until_cancelled(self.queue.recv()).await {
            match timeout(SEND_TIMEOUT, self.recorder.publish(&event, &about)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => debug!(error = %ErrorChain(&error), "cannot send event"),
                Err(_) => debug!("cannot send event: timeout"),
            }
        }
        stop.cancelled().await;
        Ok(())
    }
}
