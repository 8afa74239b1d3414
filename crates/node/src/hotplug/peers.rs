//! Stands down while multus-dynamic-networks-controller runs on this node: two controllers would undo each other's work.

use std::{sync::Arc, time::Duration};

use client::events::{self, EventDraft, EventRecorder};
use k8s_openapi::api::core::v1::Node;
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    Error,
    pods::{APP_LABEL, OwnPod, OwnPods, PodPhase},
};

/// The value of [`APP_LABEL`] of the controller's pods.
const PEER_APP: &str = "dynamic-networks-controller";
/// The namespace of the controller in its own manifests.
const PEER_NAMESPACE: &str = "kube-system";
/// How long after the last pod of the controller has left this node, plugging starts.
const RESUME_DELAY: Duration = Duration::from_secs(5);

/// Whether the controller runs on this node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum PeerState {
    /// The pods of this node have not been listed yet. Nothing may be plugged.
    #[default]
    Unknown,
    /// It runs, or left less than [`RESUME_DELAY`] ago. Nothing may be plugged.
    Present,
    /// It does not run.
    Absent,
}

/// Finds out whether the controller runs on this node.
pub struct PeerWatch {
    pods: OwnPods,
    /// The namespaces in which the controller may run. A pod of its label elsewhere is a tenant's and means nothing.
    namespaces: Vec<String>,
    node: String,
    events: EventRecorder,
    state: watch::Sender<PeerState>,
}

/// A watch of the pods of the controller in `kube-system` and in these namespaces, and the state that it publishes.
pub fn peers(
    pods: OwnPods,
    namespaces: Vec<String>,
    node: &str,
    events: EventRecorder,
) -> (PeerWatch, watch::Receiver<PeerState>) {
    let (state, receiver) = watch::channel(PeerState::default());
    (PeerWatch { pods, namespaces, node: node.to_owned(), events, state }, receiver)
}

impl PeerWatch {
    /// Publishes the state until `stop`.
    pub async fn run(self, stop: CancellationToken) -> Result<(), Error> {
        let mut changes = self.pods.subscribe();
        let mut resume: Option<Instant> = None;
        loop {
            let peers = self.peers();
            match peers.as_deref() {
                None => {}
                Some([peer, ..]) => {
                    resume = None;
                    self.stand_down(peer);
                }
                // A daemon that starts beside no controller need not wait.
                Some([]) if *self.state.borrow() != PeerState::Present => self.plug(),
                Some([]) => {
                    let at = *resume.get_or_insert_with(|| Instant::now() + RESUME_DELAY);
                    if at <= Instant::now() {
                        resume = None;
                        self.plug();
                    }
                }
            }
            let wake = async {
                match resume {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                _ = changes.next() => {}
                () = wake => {}
            }
        }
    }

    /// The running pods of the controller; None if the pods have not been listed.
    fn peers(&self) -> Option<Vec<Arc<OwnPod>>> {
        let pods = self.pods.snapshot()?;
        Some(pods.into_values().filter(|pod| self.is_peer(pod)).collect())
    }

    fn is_peer(&self, pod: &OwnPod) -> bool {
        let runs = !matches!(pod.phase, PodPhase::Succeeded | PodPhase::Failed);
        let trusted = pod.namespace == PEER_NAMESPACE || self.namespaces.contains(&pod.namespace);
        runs && trusted && pod.label(APP_LABEL) == Some(PEER_APP)
    }

    fn stand_down(&self, peer: &OwnPod) {
        if self.state.send_replace(PeerState::Present) == PeerState::Present {
            return;
        }
        let OwnPod { namespace, name, .. } = peer;
        warn!(
            namespace,
            pod = name,
            "multus-dynamic-networks-controller runs on this node; hot-plug stands down"
        );
        let note = format!(
            "multus-dynamic-networks-controller (pod {namespace}/{name}) runs on this node, so Patchbay attaches and \
             detaches no interfaces of running pods here; delete its DaemonSet to let Patchbay take over"
        );
        self.record(true, "HotplugStandDown", note);
    }

    fn plug(&self) {
        match self.state.send_replace(PeerState::Absent) {
            PeerState::Absent | PeerState::Unknown => {}
            PeerState::Present => {
                info!("multus-dynamic-networks-controller has left this node; hot-plug resumes");
                let note = "multus-dynamic-networks-controller has left this node; Patchbay attaches and detaches \
                            interfaces of running pods again";
                self.record(false, "HotplugResumed", note.to_owned());
            }
        }
    }

    fn record(&self, warning: bool, reason: &'static str, note: String) {
        // Like the kubelet, which uses the name as the UID: `kubectl describe node` shows both.
        let node = events::reference::<Node>(None, &self.node, &self.node);
        self.events.record(node, EventDraft { warning, reason, action: "StandDown", note });
    }
}

#[cfg(test)]
mod tests;
