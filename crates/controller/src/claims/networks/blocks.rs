//! Applies the plan of a network to its IPBlocks.

use client::{fence::now, request};
use plan::claims::{
    AllocatorPlan,
    allocate::{self, BlockDeleteReason, BlockWrite, CLAIMS_DROPPED},
};
use tracing::warn;

use super::{NetworkInput, Round};
use crate::claims::{ClaimWorkers, records::NetworkRecord};

impl ClaimWorkers {
    /// Writes, then creates, then deletes.
    pub(super) async fn apply_blocks(
        &self,
        input: &NetworkInput,
        plan: &AllocatorPlan,
        record: &mut NetworkRecord,
    ) -> Result<Round, request::Error> {
        let mut round = Round::Done;
        for write in &plan.writes {
            round = merge(round, self.write_block(write, record).await)?;
        }
        for create in &plan.creates {
            let created = self.writer.create_block(&input.network, &input.uid, create).await;
            let applied = created.map(|created| {
                if let Some((name, block)) = created {
                    record.overlay.wrote_block(&name, None, Some(block), now());
                }
                Round::Again
            });
            round = merge(round, applied)?;
        }
        for delete in &plan.deletes {
            let deleted = self.writer.delete_block(delete).await.map(|()| {
                record.overlay.wrote_block(&delete.name, Some(&delete.version), None, now());
                record.idle_since.remove(&delete.name);
                record.asked_since.remove(&delete.name);
                match &delete.why {
                    BlockDeleteReason::Idle => {}
                    BlockDeleteReason::Refused { address } => record.try_later(*address, true, now()),
                    BlockDeleteReason::Silent { address, .. } => record.try_later(*address, false, now()),
                }
                Round::Again
            });
            round = merge(round, deleted)?;
        }
        Ok(round)
    }

    /// Whether the API server stores reservations, if a block seems to have lost them. A dry run shows it: a write would
    /// erase what the API server only hides.
    pub(super) async fn stores_claims(
        &self,
        input: &NetworkInput,
        record: &mut NetworkRecord,
    ) -> Result<bool, request::Error> {
        let Some((name, block)) = allocate::pruned(&input.uid, &input.blocks).next() else {
            return Ok(false);
        };
        if record.dropped_until.is_some() {
            return Ok(false);
        }
        match self.writer.stores_claims(name, block).await {
            Ok(true) => {
                // The CRD may have been replaced after the cache was filled. Showing a field does not change the
                // resourceVersion, so a write on the cached block would succeed.
                let live = self.live.blocks(&input.network).await?;
                let shows =
                    |name: &String| live.get(name).is_none_or(|block| !block.object.status.claims.is_empty());
                let lost = !allocate::pruned(&input.uid, &input.blocks).any(|(name, _)| shows(name));
                if !lost {
                    record.dropped(now());
                }
                Ok(lost)
            }
            Ok(false) => {
                warn!(block = name, "{CLAIMS_DROPPED}");
                record.dropped(now());
                Ok(false)
            }
            // The watch shows the other write soon.
            Err(error) if error.is_conflict() => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn write_block(
        &self,
        write: &BlockWrite,
        record: &mut NetworkRecord,
    ) -> Result<Round, request::Error> {
        for (claim, uid) in &write.confirm {
            if self.live.claim(claim).await?.is_none_or(|live| live.uid != *uid) {
                // The watch shows it soon.
                return Ok(Round::Conflict);
            }
        }
        let Some(written) = self.writer.write_block(write).await? else { return Ok(Round::Conflict) };
        let kept = &written.object.status.claims;
        if write.status.claims.iter().any(|claimed| !kept.contains(claimed)) {
            warn!(block = write.name, "{CLAIMS_DROPPED}");
            record.dropped(now());
        }
        record.overlay.wrote_block(&write.name, Some(&write.version), Some(written), now());
        Ok(Round::Again)
    }
}

/// A conflict is planned again, after the rest of this plan.
fn merge(round: Round, applied: Result<Round, request::Error>) -> Result<Round, request::Error> {
    match applied {
        Ok(applied) if round == Round::Conflict || applied == Round::Conflict => Ok(Round::Conflict),
        Ok(applied) => Ok(if round == Round::Again { round } else { applied }),
        Err(error) if error.is_conflict() => Ok(Round::Conflict),
        Err(error) => Err(error),
    }
}
