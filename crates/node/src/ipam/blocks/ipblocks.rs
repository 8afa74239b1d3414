//! API requests for IPBlocks: create, read, adopt, update status, delete and list.

use std::net::IpAddr;

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
use plan::ipam::{BlockKey, Holding, LedgerRecord, ObservedIpBlock, Pool, Stage};
use serde_json::json;
use tokio::time::Instant;
use tracing::{info, warn};

use super::{
    BlockController, BlockError, CreateOutcome, LENT_CHECK_INTERVAL, LIST_PAGE, LIST_TTL,
    MAX_REMEMBERED_UIDS, UNANSWERED_CREATE_TTL, observed, with_timeout,
};
use crate::event::EventReason;

impl BlockController {
    /// Reads an IPBlock that the watch does not show. It may carry the label of a deleted Node of this name.
    pub(super) async fn lookup(&mut self, block: BlockKey) -> Result<bool, BlockError> {
        let Some(holding) = self.ipam.with_ledger(|ledger| ledger.holdings().get(&block).cloned()) else {
            return Ok(false);
        };
        let name = ipblock::name(&holding.network, block.range);
        let found = with_timeout(self.api.get_opt(&name)).await?;
        let Some(found) = found else { return self.handle_missing(block, &holding, &name).await };
        self.unanswered_creates.remove(&block);
        let ours = found.spec.network_uid == block.network && found.spec.holder.node == self.holder.node;
        if !ours {
            if !self.ipam.with_ledger(|ledger| ledger.is_empty(&block)) {
                self.report_lost(&block, &holding.network, &name);
            }
            self.ipam.record(LedgerRecord::Lost { block })?;
            return Ok(true);
        }
        let found = if found.spec.holder.uid == self.holder.uid { found } else { self.adopt(&found).await? };
        self.insert(found);
        Ok(true)
    }

    /// Drops a block whose IPBlock does not exist, or creates the IPBlock again if pods use its addresses.
    pub(super) async fn handle_missing(
        &mut self,
        block: BlockKey,
        holding: &Holding,
        name: &str,
    ) -> Result<bool, BlockError> {
        let now = Instant::now();
        // The API server may still process a create request that timed out.
        if self.unanswered_creates.get(&block).is_some_and(|at| *at + UNANSWERED_CREATE_TTL > now) {
            return Ok(false);
        }
        self.unanswered_creates.remove(&block);
        if self.ipam.with_ledger(|ledger| ledger.is_empty(&block)) {
            self.ipam.record(LedgerRecord::Dropped { block })?;
            return Ok(true);
        }
        self.ipam.record(LedgerRecord::Lost { block: block.clone() })?;
        if !self.pools.get(&block.network).is_some_and(|pool| pool.active) {
            return Ok(true);
        }
        warn!(block = name, "an IPBlock in use was deleted; creating it again");
        // A borrowed address needs a new grant: its lender may have allocated it since.
        let lender = match self.enclosing_block(&block, &holding.network) {
            Some(enclosing) => match with_timeout(self.api.get_opt(&enclosing)).await? {
                Some(enclosing) if enclosing.spec.holder.uid != self.holder.uid => {
                    Some(enclosing.spec.holder)
                }
                _ => return Ok(true),
            },
            None => None,
        };
        if let CreateOutcome::Exists = self.create_block(&block, &holding.network, lender).await? {
            self.report_lost(&block, &holding.network, name);
        }
        Ok(true)
    }

    /// Reports that another node holds a block whose addresses pods of this node use.
    fn report_lost(&self, block: &BlockKey, network: &str, name: &str) {
        let note = format!(
            "IPBlock {name} was deleted while pods of node {} used its addresses, and now has another holder: addresses may be \
            in use twice; delete these pods",
            self.holder.node
        );
        warn!("{note}");
        self.events.record(network, &block.network, EventReason::AddressBlockLost, note);
    }

    /// Records the return of a lent address if the borrower's IPBlock is gone. The watch does not show an IPBlock with the
    /// label of an earlier Node of this name, so this reads it.
    pub(super) async fn lookup_lent(
        &mut self,
        block: BlockKey,
        address: IpAddr,
        object: &str,
    ) -> Result<bool, BlockError> {
        let key = (block.clone(), address);
        let now = Instant::now();
        if self
            .lent_checked
            .get(&key)
            .is_some_and(|at| *at + LENT_CHECK_INTERVAL.min(self.timings.gc_interval) > now)
        {
            return Ok(false);
        }
        let Some(network) =
            self.ipam.with_ledger(|ledger| ledger.holdings().get(&block).map(|one| one.network.clone()))
        else {
            return Ok(false);
        };
        let found = with_timeout(self.api.get_opt(&ipblock::name(&network, address.into()))).await?;
        if found.as_ref().is_some_and(|found| found.uid().as_deref() == Some(object)) {
            self.lent_checked.insert(key, now);
            return Ok(false);
        }
        self.lent_checked.remove(&key);
        // The borrower created its IPBlock again, perhaps while a pod uses the address: lend it without a gap.
        let is_request = |found: &IPBlock| {
            let lender = found.spec.lender.as_ref().map(|lender| &lender.uid);
            found.spec.network_uid == block.network && lender == Some(&self.holder.uid)
        };
        if let Some(object) = found.filter(is_request).and_then(|found| found.uid()) {
            self.ipam.record(LedgerRecord::Lent { block, address, object })?;
            return Ok(true);
        }
        if self.returned.len() > MAX_REMEMBERED_UIDS {
            self.returned.clear();
        }
        self.returned.insert(object.to_owned());
        self.ipam.record(LedgerRecord::Returned { block, address })?;
        Ok(true)
    }

    /// Adopts the blocks of earlier Nodes of this name, which a lost journal cannot name.
    pub(super) async fn adopt_former_blocks(&mut self) -> Result<(), BlockError> {
        let mut params = ListParams::default().limit(LIST_PAGE);
        loop {
            let page = with_timeout(self.api.list(&params)).await?;
            let former = |one: &IPBlock| {
                one.spec.holder.node == self.holder.node && one.spec.holder.uid != self.holder.uid
            };
            for block in page.items.iter().filter(|one| former(one)).cloned().collect::<Vec<_>>() {
                let ours = self.adopt(&block).await?;
                self.insert(ours);
            }
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => return Ok(()),
            }
        }
    }

    /// Makes this node the holder of a block of an earlier Node of this name. The machine is the same, and so are its pods.
    pub(super) async fn adopt(&mut self, found: &IPBlock) -> Result<IPBlock, BlockError> {
        let mut labels = found.metadata.labels.clone().unwrap_or_default();
        labels.remove(&format!("{NODE_ROLE_LABEL_PREFIX}{}", found.spec.holder.uid));
        labels.insert(format!("{NODE_ROLE_LABEL_PREFIX}{}", self.holder.uid), HOLDER_ROLE.to_owned());
        let mut new = found.clone();
        new.metadata.labels = Some(labels);
        new.spec.holder.uid.clone_from(&self.holder.uid);
        info!(block = found.name_any(), "adopted an IPBlock of an earlier Node of this name");
        let params =
            PostParams { field_manager: Some(NODE_FIELD_MANAGER.to_owned()), ..PostParams::default() };
        with_timeout(self.api.replace(&found.name_any(), &params, &new)).await
    }

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
        self.deleted_uids.push_back(object.to_owned());
        if self.deleted_uids.len() > MAX_REMEMBERED_UIDS {
            self.deleted_uids.pop_front();
        }
        self.ipam.metrics.released.inc();
        if let Some(objects) = &mut self.objects {
            objects.remove(&name);
        }
        self.ipam.record(LedgerRecord::Dropped { block })?;
        Ok(())
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
                if let Some(objects) = &mut self.objects {
                    objects.remove(&name);
                }
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
        let IPBlockStatus { used, free, spare, lent, refused, closed, draining } = &status;
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
                if let Some(objects) = &mut self.objects {
                    objects.remove(&name);
                }
                self.confirm_blocks();
            }
            Err(error) => return Err(error),
        }
        self.reported.insert(block, Instant::now());
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
                    self.unanswered_creates.insert(block.clone(), Instant::now());
                }
                Err(error)
            }
        }
    }

    /// The blocks of a network, from the API server or a recent list.
    pub(super) async fn list_blocks(
        &mut self,
        network: &str,
        pool: &Pool,
    ) -> Result<Vec<ObservedIpBlock>, BlockError> {
        let now = Instant::now();
        if let Some((_, all)) = self.list_cache.get(network).filter(|(at, _)| *at + LIST_TTL > now) {
            return Ok(all.clone());
        }
        // Leaves out borrowed addresses, which may be many: the status of their enclosing block shows them.
        let params =
            ListParams::default().labels(&format!("{NETWORK_LABEL}={},!{BORROWED_LABEL}", pool.name));
        let all = with_timeout(self.api.list(&params)).await?;
        let all: Vec<ObservedIpBlock> =
            all.items.into_iter().filter_map(observed).map(|(_, object)| object).collect();
        // Blocks of a deleted network of this name occupy names too.
        self.taken_ranges.insert(network.to_owned(), all.iter().map(|object| object.spec.cidr).collect());
        let count = all.len();
        let all: Vec<ObservedIpBlock> =
            all.into_iter().filter(|object| object.spec.network_uid == network).collect();
        if all.len() < count {
            self.reused_names.insert(network.to_owned());
        } else {
            self.reused_names.remove(network);
        }
        Ok(all)
    }
}
