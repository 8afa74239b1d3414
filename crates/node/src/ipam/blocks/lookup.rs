//! Reads IPBlocks that the watch does not show: it finds out what became of them, and adopts those of earlier Nodes.

use std::net::IpAddr;

use api::{
    IPBlock, NODE_FIELD_MANAGER,
    ipblock::{self, HOLDER_ROLE, NODE_ROLE_LABEL_PREFIX},
};
use kube::{
    ResourceExt as _,
    api::{ListParams, PostParams},
};
use plan::ipam::{BlockKey, Holding, LedgerRecord};
use tracing::{info, warn};

use super::{
    controller::{BlockController, now},
    ipblocks::{BlockError, CreateOutcome, with_timeout},
};
use crate::event::EventReason;

/// The page size when the daemon lists all IPBlocks.
const LIST_PAGE: u32 = 500;

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
        if self.unanswered_creates.is_pending(&block, now()) {
            return Ok(false);
        }
        self.unanswered_creates.remove(&block);
        if self.ipam.with_ledger(|ledger| ledger.is_empty(&block)) {
            self.ipam.record(LedgerRecord::Dropped { block })?;
            return Ok(true);
        }
        self.ipam.record(LedgerRecord::Lost { block: block.clone() })?;
        warn!(block = name, "an IPBlock in use was deleted; creating it again");
        // A borrowed address needs a new grant: its lender may have allocated it since.
        let lender = match self.enclosing_block(&block, &holding.network) {
            Some(enclosing) => match with_timeout(self.api.get_opt(&enclosing)).await? {
                Some(IPBlock { spec, .. }) if spec.holder.lends() && spec.holder.uid != self.holder.uid => {
                    Some(spec.holder)
                }
                // This node or a holder that lends no addresses has the block.
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

    /// Records the return of a lent address if the borrower's IPBlock is gone. The watch does not show an IPBlock with the
    /// label of an earlier Node of this name, so this reads it.
    pub(super) async fn lookup_lent(
        &mut self,
        block: BlockKey,
        address: IpAddr,
        object: &str,
    ) -> Result<bool, BlockError> {
        let now = now();
        if !self.lent.is_due(&block, address, &self.timings, now) {
            return Ok(false);
        }
        let Some(network) =
            self.ipam.with_ledger(|ledger| ledger.holdings().get(&block).map(|one| one.network.clone()))
        else {
            return Ok(false);
        };
        let found = with_timeout(self.api.get_opt(&ipblock::name(&network, address.into()))).await?;
        if found.as_ref().is_some_and(|found| found.uid().as_deref() == Some(object)) {
            self.lent.mark_existing(&block, address, now);
            return Ok(false);
        }
        self.lent.mark_gone(&block, address);
        // The borrower created its IPBlock again, perhaps while a pod uses the address: lend it without a gap.
        let is_request = |found: &IPBlock| {
            let lender = found.spec.lender.as_ref().map(|lender| &lender.uid);
            found.spec.network_uid == block.network && lender == Some(&self.holder.uid)
        };
        if let Some(object) = found.filter(is_request).and_then(|found| found.uid()) {
            self.ipam.record(LedgerRecord::Lent { block, address, object })?;
            return Ok(true);
        }
        self.lent.mark_returned(object);
        self.ipam.record(LedgerRecord::Returned { block, address })?;
        Ok(true)
    }
}
