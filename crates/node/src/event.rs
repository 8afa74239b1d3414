//! Kubernetes Events about BridgeNetworks on this node.

use std::time::Duration;

use api::BridgeNetwork;
use client::{
    events::{self, EventDraft, EventLimits, EventRecorder, EventSource, Repeats},
    request::{ApiCall, DEFAULT_TIMEOUT},
};
use kube::Client;
use tokio_util::sync::CancellationToken;

use crate::Error;

/// The reporter of all events of the daemon.
pub const REPORTER: &str = "patchbay-node";

/// The same event is not sent again within this time.
const WINDOW: Duration = Duration::from_secs(60);

/// A queue of events. Recording never blocks.
#[derive(Clone)]
pub struct Events(EventRecorder);

/// Sends the queued events.
pub struct EventSender(events::EventSender);

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
        let source = EventSource {
            controller: REPORTER,
            instance: node.to_owned(),
            window: WINDOW,
            repeats: Repeats::Series,
            limits: EventLimits::default(),
        };
        let (recorder, sender) = events::recorder(client, source, ApiCall::new(DEFAULT_TIMEOUT, || ()));
        (Self(recorder), EventSender(sender))
    }

    /// Queues an event about a network.
    pub fn record(&self, name: &str, uid: &str, reason: EventReason, note: String) {
        let (warning, reason, action) = match reason {
            EventReason::Repaired => (false, "Repaired", "Repair"),
            EventReason::AddressesExhausted => (true, "AddressesExhausted", "Allocate"),
            EventReason::AddressBlockLost => (true, "AddressBlockLost", "Allocate"),
            EventReason::AddressBlockUnverified => (true, "AddressBlockUnverified", "Allocate"),
            EventReason::Failed => (true, "NodeFailed", "Configure"),
        };
        let about = events::reference::<BridgeNetwork>(None, name, uid);
        self.0.record(about, EventDraft { warning, reason, action, note });
    }
}

impl EventSender {
    /// Sends until `stop`. An event that cannot be sent is dropped.
    pub async fn run(self, stop: CancellationToken) -> Result<(), Error> {
        self.0.run(stop.clone()).await;
        stop.cancelled().await;
        Ok(())
    }
}
