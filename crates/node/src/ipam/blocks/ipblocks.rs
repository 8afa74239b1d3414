//! API requests for IPBlocks: create, list, update boot ID and status, delete.

use std::time::Duration;

use api::{
    IPBlock, IPBlockSpec, IPBlockStatus, NODE_FIELD_MANAGER,
    ipblock::{
        self, BORROWED_LABEL, HOLDER_ROLE, HolderRef, LENDER_ROLE, NETWORK_LABEL, NODE_ROLE_LABEL_PREFIX,
    },
};
use kube::{
    ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions},
};
use plan::ipam::{BlockKey, LedgerRecord, ObservedIpBlock, Stage};
use serde_json::json;
use tokio::time::timeout;
use tracing::{info, warn};

use super::{
    controller::{BlockController, now},
    observed::observed,
};
use crate::ipam::JournalError;

/// The timeout of an API request.
pub const API_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a step failed.
#[derive(Debug, thiserror::Error)]
pub enum BlockError {
    #[error("the API server did not answer within {} s", API_TIMEOUT.as_secs())]
    Timeout,
    #[error(transparent)]
    Api(#[from] kube::Error),
    #[error(transparent)]
    Journal(#[from] JournalError),
}

impl BlockError {
    /// Whether the API server rejected this request. Other requests may still succeed.
    pub fn is_rejection(&self) -> bool {
        match self {
            Self::Api(kube::Error::Api(status)) => {
                (400..500).contains(&status.code) && !matches!(status.code, 401 | 408 | 409 | 410 | 429)
            }
            _ => false,
        }
    }
}

/// The outcome of a create request.
pub enum CreateOutcome {
    Created,
    /// An IPBlock of this name exists.
    Exists,
}

/// Runs a request to the API server.
pub async fn with_timeout<T>(request: impl Future<Output = Result<T, kube::Error>>) -> Result<T, BlockError> {
    Ok(timeout(API_TIMEOUT, request).await.map_err(|_| BlockError::Timeout)??)
}

impl BlockController {
    /// The blocks of a network, from the API server or a recent list.
    pub(super) async fn list_blocks(
        &mut self,
        network: &str,
        name: &str,
    ) -> Result<Vec<ObservedIpBlock>, BlockError> {
        if let Some(all) = self.lists.get(network, now()) {
            return Ok(all);
        }
        // Leaves out borrowed addresses, which may be many: the status of their enclosing block shows them.
        let params = ListParams::default().labels(&format!("{NETWORK_LABEL}={name},!{BORROWED_LABEL}"));
        let all = with_timeout(self.api.list(&params)).await?;
        let all = all.items.into_iter().filter_map(observed).map(|(_, object)| object).collect();
        Ok(self.search.observe_list(network, all))
    }

    /// Writes the current boot ID to the object of a block.
    pub(super) async fn update_boot(&mut self, block: &BlockKey, object: &str) -> Result<bool, BlockError> {
        let network =
            self.ipam.with_ledger(|ledger| ledger.holdings().get(block).map(|one| one.network.clone()));
        let name = ipblock::name(&network.unwrap_or_default(), block.range);
        let boot = Some(self.ipam.boot()).filter(|boot| !boot.is_empty());
        let patch = json!({"metadata": {"uid": object}, "spec": {"bootID": boot}});
        let params =
            PatchParams { field_manager: Some(NODE_FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        match with_timeout(self.api.patch(&name, &params, &Patch::Merge(&patch))).await {
            Ok(updated) => {
                if updated.spec.boot_id != self.ipam.boot() {
                    warn!(
                        block = name,
                        "the API server drops spec.bootID of IPBlocks; apply the CRDs of this version, otherwise blocks stay \
                        closed when the machine is reimaged"
                    );
                    self.boot_ids_dropped = true;
                }
                self.insert(updated);
            }
            // The object was deleted or replaced; the watch reports it.
            Err(BlockError::Api(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => {
                self.objects.remove(&name);
                self.confirm_blocks();
            }
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    pub(super) async fn update_status(
        &mut self,
        block: BlockKey,
        object: &str,
        status: IPBlockStatus,
    ) -> Result<(), BlockError> {
        let network =
            self.ipam.with_ledger(|ledger| ledger.holdings().get(&block).map(|one| one.network.clone()));
        let name = ipblock::name(&network.unwrap_or_default(), block.range);
        let IPBlockStatus { used, free, spare, lent, refused, closed, draining, claims: _ } = &status;
        let patch = json!({"metadata": {"uid": object}, "status": {
            "used": used, "free": free, "spare": spare, "lent": lent, "refused": refused, "closed": closed,
            "draining": draining,
        }});
        let params =
            PatchParams { field_manager: Some(NODE_FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        match with_timeout(self.api.patch_status(&name, &params, &Patch::Merge(&patch))).await {
            Ok(updated) => self.insert(updated),
            // It was deleted or replaced; the watch follows.
            Err(BlockError::Api(kube::Error::Api(answer))) if matches!(answer.code, 404 | 409) => {
                self.objects.remove(&name);
                self.confirm_blocks();
            }
            Err(error) => return Err(error),
        }
        self.reports.mark_written(block, now());
        Ok(())
    }

    /// Creates an IPBlock. The journal records it first, so that a crash leaves no unknown block.
    pub(super) async fn create_block(
        &mut self,
        block: &BlockKey,
        network: &str,
        lender: Option<HolderRef>,
    ) -> Result<CreateOutcome, BlockError> {
        // A create request for a block that this node holds would fail with a conflict and drop the block.
        let free = |stage: Option<Stage>| matches!(stage, None | Some(Stage::Lost));
        if !self.ipam.with_ledger(|ledger| free(ledger.holdings().get(block).map(|one| one.stage))) {
            return Ok(CreateOutcome::Exists);
        }
        self.ipam.record(LedgerRecord::Acquiring { block: block.clone(), network: network.to_owned() })?;
        let name = ipblock::name(network, block.range);
        let spec = IPBlockSpec {
            network: network.to_owned(),
            network_uid: block.network.clone(),
            cidr: block.range,
            holder: self.holder.clone(),
            lender,
            boot_id: self.ipam.boot().to_owned(),
        };
        let mut object = IPBlock::new(&name, spec);
        let labels = object.labels_mut();
        labels.insert(NETWORK_LABEL.to_owned(), network.to_owned());
        labels.insert(format!("{NODE_ROLE_LABEL_PREFIX}{}", self.holder.uid), HOLDER_ROLE.to_owned());
        if let Some(lender) = &object.spec.lender {
            let label = format!("{NODE_ROLE_LABEL_PREFIX}{}", lender.uid);
            object.labels_mut().insert(label, LENDER_ROLE.to_owned());
            object.labels_mut().insert(BORROWED_LABEL.to_owned(), "true".to_owned());
        }
        let params =
            PostParams { field_manager: Some(NODE_FIELD_MANAGER.to_owned()), ..PostParams::default() };
        match with_timeout(self.api.create(&params, &object)).await {
            Ok(created) => {
                info!(block = name, "acquired a block");
                self.insert(created);
                Ok(CreateOutcome::Created)
            }
            Err(BlockError::Api(kube::Error::Api(status))) if status.code == 409 => {
                self.ipam.record(LedgerRecord::Dropped { block: block.clone() })?;
                Ok(CreateOutcome::Exists)
            }
            Err(error) => {
                // A later lookup finds out whether it was created.
                if !error.is_rejection() {
                    self.unanswered_creates.insert(block.clone(), now());
                }
                Err(error)
            }
        }
    }

    /// Deletes the IPBlock of a block if it has this UID.
    pub(super) async fn delete_block(&mut self, block: BlockKey, object: &str) -> Result<(), BlockError> {
        let Some(network) =
            self.ipam.with_ledger(|ledger| ledger.holdings().get(&block).map(|one| one.network.clone()))
        else {
            return Ok(());
        };
        let name = ipblock::name(&network, block.range);
        let only = Preconditions { uid: Some(object.to_owned()), resource_version: None };
        let params = DeleteParams::default().preconditions(only);
        match with_timeout(self.api.delete(&name, &params)).await {
            Ok(_) => {}
            Err(BlockError::Api(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => {}
            Err(error) => return Err(error),
        }
        info!(block = name, "released a block");
        self.objects.mark_deleted(&name, object);
        self.ipam.metrics.released.inc();
        self.ipam.record(LedgerRecord::Dropped { block })?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    #[test]
    fn client_errors_are_rejections_and_other_errors_are_transient() {
        let error = |code| BlockError::Api(kube::Error::Api(Box::new(Status { code, ..Status::default() })));
        for code in [400, 403, 404, 405, 413, 422] {
            assert!(error(code).is_rejection(), "{code}");
        }
        for code in [401, 408, 409, 410, 429, 500, 503, 504] {
            assert!(!error(code).is_rejection(), "{code}");
        }
        assert!(!BlockError::Timeout.is_rejection());
    }
}
