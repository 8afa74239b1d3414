//! The leader's controller for Node labels: they name the networks that are ready on each Node.

#[cfg(test)]
pub mod tests;

use std::time::Duration;

use api::{CONTROLLER_FIELD_MANAGER, ErrorChain};
use client::{
    expectations::Expectations,
    fence::now,
    request::{self, ApiCall},
};
use kube::{
    Api, Client,
    api::{DynamicObject, Patch, PatchParams},
};
use plan::network::{self, NodeLabelPatch};
use serde_json::json;
use tracing::{info, warn};

use crate::{
    cache::{CacheSource, ClusterCache, project},
    leader::{EXPECTATION_TTL, LeaderContext, MIN_RETRY, RESYNC, Reconciler},
    metrics::ApiCallKind,
};

/// Why the labels of a Node were not patched.
#[derive(Debug, thiserror::Error)]
#[error("patch the labels of Node {name}")]
struct Error {
    name: String,
    #[source]
    source: request::Error,
}

/// Patches the labels of Nodes.
pub struct NodeLabelController {
    client: Client,
    cache: ClusterCache,
    call: ApiCall,
    /// By the name of the Node.
    patches: Expectations<String, NodeLabelPatch>,
}

impl NodeLabelController {
    pub fn new(context: &LeaderContext) -> Self {
        let LeaderContext { client, cache, metrics, fence } = context;
        Self {
            call: metrics.api_call(ApiCallKind::Node).fenced(fence.clone()),
            client: client.clone(),
            cache: cache.clone(),
            patches: Expectations::new(EXPECTATION_TTL),
        }
    }

    /// The UID protects a Node that was recreated under the same name.
    async fn patch(&self, labels: &NodeLabelPatch) -> Result<(), Error> {
        let patch = json!({"metadata": {"uid": labels.uid, "labels": labels.labels}});
        let params = PatchParams {
            field_manager: Some(CONTROLLER_FIELD_MANAGER.to_owned()),
            ..PatchParams::default()
        };
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &project::nodes());
        let patched = self.call.change(api.patch(&labels.node, &params, &Patch::Merge(&patch))).await;
        patched.map_err(|source| Error { name: labels.node.clone(), source })?;
        info!(node = labels.node, labels = ?labels.labels, "patched the labels of a Node");
        Ok(())
    }
}

impl Reconciler for NodeLabelController {
    const NAME: &'static str = "node labels";
    const SOURCES: &'static [CacheSource] =
        &[CacheSource::Networks, CacheSource::Nodes, CacheSource::NodeNetworks];

    async fn reconcile(&mut self) -> Duration {
        let mut requeue_after = RESYNC;
        for patch in network::node_labels(&self.cache.snapshot()) {
            // Exactly these labels were written, and the watch has not had time to deliver them.
            if let Some(wait) = self.patches.remaining(&patch.node, now(), |last| *last == patch) {
                requeue_after = requeue_after.min(wait);
                continue;
            }
            match self.patch(&patch).await {
                Ok(()) => self.patches.expect(patch.node.clone(), patch, now()),
                Err(error) => {
                    if !error.source.is_conflict() {
                        warn!(error = %ErrorChain(&error), "could not set the labels of a Node, retrying");
                    }
                    requeue_after = requeue_after.min(MIN_RETRY);
                }
            }
        }
        requeue_after
    }
}
