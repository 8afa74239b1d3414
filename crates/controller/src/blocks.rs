//! The leader's controller for abandoned IPBlocks: deletes those whose holder or network is gone.

#[cfg(test)]
pub mod tests;

use std::{collections::BTreeSet, time::Duration};

use api::ErrorChain;
use client::{
    expectations::Expectations,
    fence::now,
    request::{self, ApiCall},
};
use kube::{
    Api, Client,
    api::{DeleteParams, DynamicObject, Preconditions},
};
use plan::network::{self, AbandonedBlock, MissingNodes};
use tracing::{info, warn};

use crate::{
    cache::{CacheSource, ClusterCache, project},
    leader::{EXPECTATION_TTL, LeaderContext, MIN_RETRY, RESYNC, Reconciler},
    live_reads::LiveReader,
    metrics::ApiCallKind,
};

/// Why a block was not deleted.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("list the networks")]
    Networks(#[source] request::Error),
    #[error("read Node {node}")]
    Node {
        node: String,
        #[source]
        source: request::Error,
    },
    #[error("delete IPBlock {name}")]
    Delete {
        name: String,
        #[source]
        source: request::Error,
    },
}

impl Error {
    fn is_conflict(&self) -> bool {
        match self {
            Self::Networks(source) | Self::Node { source, .. } | Self::Delete { source, .. } => {
                source.is_conflict()
            }
        }
    }
}

/// Deletes abandoned IPBlocks.
pub struct BlockController {
    client: Client,
    cache: ClusterCache,
    live_reader: LiveReader,
    call: ApiCall,
    missing: MissingNodes,
    /// By the UID of the block.
    deletions: Expectations<String>,
}

impl BlockController {
    pub fn new(context: &LeaderContext) -> Self {
        let LeaderContext { client, cache, metrics, fence } = context;
        Self {
            live_reader: LiveReader::new(client.clone(), metrics.clone()),
            call: metrics.api_call(ApiCallKind::Block).fenced(fence.clone()),
            client: client.clone(),
            cache: cache.clone(),
            missing: MissingNodes::default(),
            deletions: Expectations::new(EXPECTATION_TTL),
        }
    }

    /// The abandoned blocks whose deletion is not pending, and when to reconcile again.
    fn plan(&mut self) -> (Vec<AbandonedBlock>, Duration) {
        let state = self.cache.snapshot();
        self.missing.track(&state, now());
        let mut requeue_after = self.missing.next_gone.unwrap_or(RESYNC);
        let mut due = network::abandoned_blocks(&state, &self.missing);
        due.retain(|block| {
            let wait = self.deletions.remaining(&block.uid, now(), |()| true);
            requeue_after = requeue_after.min(wait.unwrap_or(RESYNC));
            wait.is_none()
        });
        (due, requeue_after)
    }

    /// Deletes the block, if it has not changed and live reads confirm that its network or its holder is gone. The reads
    /// start after the plan. A UID that is gone does not come back and a finalizer that was removed during a deletion is
    /// not added again, so the list of networks is valid for the whole round.
    async fn delete(
        &self,
        block: &AbandonedBlock,
        networks: &mut Option<BTreeSet<String>>,
    ) -> Result<(), Error> {
        let in_use = match (&block.node, &*networks) {
            (Some(node), _) => {
                let exists = self.live_reader.node_exists(node, &block.holder).await;
                exists.map_err(|source| Error::Node { node: node.clone(), source })?
            }
            (None, Some(networks)) => networks.contains(&block.network),
            (None, None) => {
                let listed = self.live_reader.networks_accepting_pods().await.map_err(Error::Networks)?;
                networks.insert(listed).contains(&block.network)
            }
        };
        if in_use {
            return Ok(());
        }
        let unchanged =
            Preconditions { uid: Some(block.uid.clone()), resource_version: Some(block.version.clone()) };
        let params = DeleteParams::default().preconditions(unchanged);
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &project::blocks());
        let deleted = self.call.change(api.delete(&block.name, &params)).await;
        deleted.map_err(|source| Error::Delete { name: block.name.clone(), source })?;
        info!(block = block.name, node = block.node, "deleted an abandoned IPBlock");
        Ok(())
    }
}

impl Reconciler for BlockController {
    const NAME: &'static str = "blocks";
    const SOURCES: &'static [CacheSource] =
        &[CacheSource::Blocks, CacheSource::Networks, CacheSource::Nodes, CacheSource::NodeNetworks];

    async fn reconcile(&mut self) -> Duration {
        let (due, mut requeue_after) = self.plan();
        let mut networks = None;
        let mut list_failed = false;
        for block in due {
            // One attempt to list the networks serves the round, also a failed one.
            if list_failed && block.node.is_none() {
                continue;
            }
            self.deletions.expect(block.uid.clone(), (), now());
            let Err(error) = self.delete(&block, &mut networks).await else { continue };
            list_failed |= matches!(error, Error::Networks(_));
            if !error.is_conflict() {
                warn!(error = %ErrorChain(&error), "could not delete an abandoned IPBlock, retrying");
            }
            requeue_after = requeue_after.min(MIN_RETRY);
        }
        requeue_after
    }
}
