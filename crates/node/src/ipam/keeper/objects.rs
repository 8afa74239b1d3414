//! The objects of blocks: created, looked for, told about and deleted.

use std::net::IpAddr;

use api::{
    IPBlock, IPBlockSpec, IPBlockStatus, NODE_MANAGER,
    ipblock::{self, BORROWED_LABEL, HOLDS, Holder, LENDS, NETWORK_LABEL, NODE_LABEL_PREFIX},
};
use kube::{
    ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions},
};
use plan::ipam::{Block, Holding, Object, Record, Rules, Stage};
use serde_json::json;
use tokio::time::Instant;
use tracing::{info, warn};

use super::{Created, Failure, Keeper, LENT, LIST_PAGE, LISTED, REMEMBERED, UNCERTAIN, call, read};
use crate::event::EventReason;

impl Keeper {
    /// Finds out what became of a block that is not seen: it may be of a Node of the same name that was deleted.
    pub(super) async fn find(&mut self, block: Block) -> Result<bool, Failure> {
        let Some(holding) = self.ipam.look(|ledger| ledger.holdings().get(&block).cloned()) else {
            return Ok(false);
        };
        let name = ipblock::name(&holding.network, block.range);
        let found = call(self.api.get_opt(&name)).await?;
        let Some(found) = found else { return self.missing(block, &holding, &name).await };
        self.uncertain.remove(&block);
        let ours = found.spec.network_uid == block.network && found.spec.holder.node == self.me.node;
        if !ours {
            if !self.ipam.look(|ledger| ledger.is_empty(&block)) {
                self.tell_lost(&block, &holding.network, &name);
            }
            self.ipam.note(Record::Lost { block })?;
            return Ok(true);
        }
        let found = if found.spec.holder.uid == self.me.uid { found } else { self.adopt(&found).await? };
        self.insert(found);
        Ok(true)
    }

    /// What to do about a block whose object is not there.
    pub(super) async fn missing(
        &mut self,
        block: Block,
        holding: &Holding,
        name: &str,
    ) -> Result<bool, Failure> {
        let now = Instant::now();
        // A create without an answer may still be carried out.
        if self.uncertain.get(&block).is_some_and(|at| *at + UNCERTAIN > now) {
            return Ok(false);
        }
        self.uncertain.remove(&block);
        if self.ipam.look(|ledger| ledger.is_empty(&block)) {
            self.ipam.note(Record::Dropped { block })?;
            return Ok(true);
        }
        self.ipam.note(Record::Lost { block: block.clone() })?;
        if !self.rules.get(&block.network).is_some_and(|rules| rules.live) {
            return Ok(true);
        }
        warn!(block = name, "somebody deleted an address block that is in use: it is made again");
        // A borrowed address is asked for again: its lender may have given it to somebody else.
        let lender = match self.around(&block, &holding.network) {
            Some(around) => match call(self.api.get_opt(&around)).await? {
                Some(around) if around.spec.holder.uid != self.me.uid => Some(around.spec.holder),
                _ => return Ok(true),
            },
            None => None,
        };
        if let Created::Exists = self.create(&block, &holding.network, lender).await? {
            self.tell_lost(&block, &holding.network, name);
        }
        Ok(true)
    }

    /// Tells that somebody else has a block whose addresses pods of this node have.
    fn tell_lost(&self, block: &Block, network: &str, name: &str) {
        let note = format!(
            "IPBlock {name} was deleted while pods of node {} had its addresses, and is somebody else's by now: addresses \
            may be in use twice; delete these pods",
            self.me.node
        );
        warn!("{note}");
        self.events.record(network, &block.network, EventReason::AddressBlockLost, note);
    }

    /// Whether an address that was lent is back. Its object may bear the mark of an earlier Node of this name only.
    pub(super) async fn find_lent(
        &mut self,
        block: Block,
        address: IpAddr,
        object: &str,
    ) -> Result<bool, Failure> {
        let key = (block.clone(), address);
        let now = Instant::now();
        if self.lent_seen.get(&key).is_some_and(|at| *at + LENT.min(self.pace.sweep) > now) {
            return Ok(false);
        }
        let Some(network) =
            self.ipam.look(|ledger| ledger.holdings().get(&block).map(|one| one.network.clone()))
        else {
            return Ok(false);
        };
        let found = call(self.api.get_opt(&ipblock::name(&network, address.into()))).await?;
        if found.as_ref().is_some_and(|found| found.uid().as_deref() == Some(object)) {
            self.lent_seen.insert(key, now);
            return Ok(false);
        }
        self.lent_seen.remove(&key);
        // Its object was made anew, perhaps while a pod has the address: it goes from one to the other without a gap.
        let asks = |found: &IPBlock| {
            let lender = found.spec.lender.as_ref().map(|lender| &lender.uid);
            found.spec.network_uid == block.network && lender == Some(&self.me.uid)
        };
        if let Some(object) = found.filter(asks).and_then(|found| found.uid()) {
            self.ipam.note(Record::Lent { block, address, object })?;
            return Ok(true);
        }
        if self.returned.len() > REMEMBERED {
            self.returned.clear();
        }
        self.returned.insert(object.to_owned());
        self.ipam.note(Record::Returned { block, address })?;
        Ok(true)
    }

    /// Takes over the blocks of earlier Nodes of this name that a lost journal does not tell of.
    pub(super) async fn reclaim(&mut self) -> Result<(), Failure> {
        let mut params = ListParams::default().limit(LIST_PAGE);
        loop {
            let page = call(self.api.list(&params)).await?;
            let former =
                |one: &IPBlock| one.spec.holder.node == self.me.node && one.spec.holder.uid != self.me.uid;
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

    /// The Node was deleted and made anew while the machine ran on: its blocks are still its own.
    pub(super) async fn adopt(&mut self, found: &IPBlock) -> Result<IPBlock, Failure> {
        let mut labels = found.metadata.labels.clone().unwrap_or_default();
        labels.remove(&format!("{NODE_LABEL_PREFIX}{}", found.spec.holder.uid));
        labels.insert(format!("{NODE_LABEL_PREFIX}{}", self.me.uid), HOLDS.to_owned());
        let mut new = found.clone();
        new.metadata.labels = Some(labels);
        new.spec.holder.uid.clone_from(&self.me.uid);
        info!(block = found.name_any(), "the Node is another one than before: its block is taken over");
        let params = PostParams { field_manager: Some(NODE_MANAGER.to_owned()), ..PostParams::default() };
        call(self.api.replace(&found.name_any(), &params, &new)).await
    }

    pub(super) async fn delete(&mut self, block: Block, object: &str) -> Result<(), Failure> {
        let Some(network) =
            self.ipam.look(|ledger| ledger.holdings().get(&block).map(|one| one.network.clone()))
        else {
            return Ok(());
        };
        let name = ipblock::name(&network, block.range);
        let only = Preconditions { uid: Some(object.to_owned()), resource_version: None };
        let params = DeleteParams::default().preconditions(only);
        match call(self.api.delete(&name, &params)).await {
            Ok(_) => {}
            Err(Failure::Refused(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => {}
            Err(error) => return Err(error),
        }
        info!(block = name, "a block was given back");
        self.deleted.push_back(object.to_owned());
        if self.deleted.len() > REMEMBERED {
            self.deleted.pop_front();
        }
        self.ipam.metrics.given_back.inc();
        if let Some(objects) = &mut self.objects {
            objects.remove(&name);
        }
        self.ipam.note(Record::Dropped { block })?;
        Ok(())
    }

    pub(super) async fn tell(
        &mut self,
        block: Block,
        object: &str,
        status: IPBlockStatus,
    ) -> Result<(), Failure> {
        let network = self.ipam.look(|ledger| ledger.holdings().get(&block).map(|one| one.network.clone()));
        let name = ipblock::name(&network.unwrap_or_default(), block.range);
        let IPBlockStatus { used, free, spare, lent, refused, closed, draining } = &status;
        let patch = json!({"metadata": {"uid": object}, "status": {
            "used": used, "free": free, "spare": spare, "lent": lent, "refused": refused, "closed": closed,
            "draining": draining,
        }});
        let params = PatchParams { field_manager: Some(NODE_MANAGER.to_owned()), ..PatchParams::default() };
        match call(self.api.patch_status(&name, &params, &Patch::Merge(&patch))).await {
            Ok(told) => self.insert(told),
            // It is gone, or another one: the watch tells.
            Err(Failure::Refused(kube::Error::Api(answer))) if matches!(answer.code, 404 | 409) => {
                if let Some(objects) = &mut self.objects {
                    objects.remove(&name);
                }
                self.confirm();
            }
            Err(error) => return Err(error),
        }
        self.told.insert(block, Instant::now());
        Ok(())
    }

    /// Creates the object of a block. It is in the journal before, so that a crash leaves nothing that nobody knows.
    pub(super) async fn create(
        &mut self,
        block: &Block,
        network: &str,
        lender: Option<Holder>,
    ) -> Result<Created, Failure> {
        // What is held is not asked for: the answer would be that somebody has it.
        let free = |stage: Option<Stage>| matches!(stage, None | Some(Stage::Lost));
        if !self.ipam.look(|ledger| free(ledger.holdings().get(block).map(|one| one.stage))) {
            return Ok(Created::Exists);
        }
        self.ipam.note(Record::Asked { block: block.clone(), network: network.to_owned() })?;
        let name = ipblock::name(network, block.range);
        let spec = IPBlockSpec {
            network: network.to_owned(),
            network_uid: block.network.clone(),
            cidr: block.range,
            holder: self.me.clone(),
            lender,
        };
        let mut object = IPBlock::new(&name, spec);
        let labels = object.labels_mut();
        labels.insert(NETWORK_LABEL.to_owned(), network.to_owned());
        labels.insert(format!("{NODE_LABEL_PREFIX}{}", self.me.uid), HOLDS.to_owned());
        if let Some(lender) = &object.spec.lender {
            let label = format!("{NODE_LABEL_PREFIX}{}", lender.uid);
            object.labels_mut().insert(label, LENDS.to_owned());
            object.labels_mut().insert(BORROWED_LABEL.to_owned(), "true".to_owned());
        }
        let params = PostParams { field_manager: Some(NODE_MANAGER.to_owned()), ..PostParams::default() };
        match call(self.api.create(&params, &object)).await {
            Ok(made) => {
                info!(block = name, "a block was taken");
                self.insert(made);
                Ok(Created::Ours)
            }
            Err(Failure::Refused(kube::Error::Api(status))) if status.code == 409 => {
                self.ipam.note(Record::Dropped { block: block.clone() })?;
                Ok(Created::Exists)
            }
            Err(error) => {
                // Whether it was made is found out later.
                if !error.is_refusal() {
                    self.uncertain.insert(block.clone(), Instant::now());
                }
                Err(error)
            }
        }
    }

    /// The blocks of a network, from the API server itself.
    pub(super) async fn list(&mut self, network: &str, rules: &Rules) -> Result<Vec<Object>, Failure> {
        let now = Instant::now();
        if let Some((_, all)) = self.lists.get(network).filter(|(at, _)| *at + LISTED > now) {
            return Ok(all.clone());
        }
        // Without what is borrowed, which may be a lot: the blocks around it tell.
        let params =
            ListParams::default().labels(&format!("{NETWORK_LABEL}={},!{BORROWED_LABEL}", rules.name));
        let all = call(self.api.list(&params)).await?;
        let all: Vec<Object> = all.items.into_iter().filter_map(read).map(|(_, object)| object).collect();
        // Blocks of a network of this name that is no more take their names too.
        self.known.insert(network.to_owned(), all.iter().map(|object| object.spec.cidr).collect());
        let count = all.len();
        let all: Vec<Object> = all.into_iter().filter(|object| object.spec.network_uid == network).collect();
        if all.len() < count {
            self.earlier.insert(network.to_owned());
        } else {
            self.earlier.remove(network);
        }
        Ok(all)
    }
}
