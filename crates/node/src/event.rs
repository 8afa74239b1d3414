//! Events on BridgeNetworks: what this node did that somebody should know of.

use std::time::Duration;

use api::{BridgeNetwork, Chain};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client, Resource as _,
    runtime::events::{Event, EventType, Recorder, Reporter},
};
use tokio::{sync::mpsc, time::timeout};
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::Error;

/// How many wait to be sent. What does not fit is in the log and in the metrics all the same.
const QUEUE_LENGTH: usize = 64;
/// How long the API server may take for one.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);

/// Where to put events. Never waits.
#[derive(Clone)]
pub struct Events(mpsc::Sender<(ObjectReference, Event)>);

/// Who sends them.
pub struct EventSender {
    recorder: Recorder,
    queue: mpsc::Receiver<(ObjectReference, Event)>,
}

/// Why an event is told, in one word for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventReason {
    /// Somebody changed a link of the network by hand, and it was put right.
    Repaired,
    /// The kernel refused what the network needs.
    Failed,
    /// No address is left.
    AddressesExhausted,
    /// Addresses of this node's pods may be given to others too.
    AddressBlockLost,
    /// This node does not know who has addresses of its own.
    AddressBlockUnverified,
}

impl Events {
    pub fn new(client: Client, node: &str) -> (Self, EventSender) {
        let (sender, queue) = mpsc::channel(QUEUE_LENGTH);
        let reporter = Reporter { controller: "patchbay-node".to_owned(), instance: Some(node.to_owned()) };
        (Self(sender), EventSender { recorder: Recorder::new(client, reporter), queue })
    }

    /// Tells of a network.
    pub fn record(&self, name: &str, uid: &str, reason: EventReason, note: String) {
        let (type_, word, action) = match reason {
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
            reason: word.to_owned(),
            note: Some(note.chars().take(1000).collect()),
            action: action.to_owned(),
            secondary: None,
        };
        if self.0.try_send((about, event)).is_err() {
            debug!(network = name, reason = word, "too many events at once, one is not sent");
        }
    }
}

impl EventSender {
    /// Sends until `stop`. An event that cannot be sent is dropped: it is a courtesy.
    pub async fn run(mut self, stop: CancellationToken) -> Result<(), Error> {
        while let Some(Some((about, event))) = stop.run_until_cancelled(self.queue.recv()).await {
            match timeout(SEND_TIMEOUT, self.recorder.publish(&event, &about)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => debug!(error = %Chain(&error), "an event was not sent"),
                Err(_) => debug!("an event was not sent in time"),
            }
        }
        stop.cancelled().await;
        Ok(())
    }
}
