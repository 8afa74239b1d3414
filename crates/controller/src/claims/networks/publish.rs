//! Copies reserved addresses to the claims, and reports why a claim has none.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
};

use api::ipamclaim::{AllocationReason, RecordedAddresses};
use client::{fence::now, request};
use futures::{StreamExt as _, stream};
use jiff::Timestamp;
use plan::{
    claims::{AllocatorPlan, ClaimPod, ClaimState, Failure, Reserved, StatusWrite, publish},
    network::BlockState,
};

use super::{NetworkInput, Round};
use crate::claims::{ClaimWorkers, records::NetworkRecord};

/// The number of claims that are written at a time.
const MAX_CONCURRENT_CLAIMS: usize = 16;

/// A status to write.
struct Draft {
    claim: Arc<ClaimState>,
    outcome: Result<Reserved, Failure>,
    /// The addresses to record before the status says that the claim has them.
    record: Option<RecordedAddresses>,
    write: Option<StatusWrite>,
}

/// A claim as it is stored after its writes, and its version after the first of two.
struct Stored {
    claim: ClaimState,
    between: Option<String>,
}

impl Draft {
    fn confirms(&self) -> bool {
        self.write.as_ref().is_some_and(|write| write.confirm)
    }
}

/// A claim, the pods that refer to it, and whether it has addresses.
type Outcome<'a> = (&'a Arc<ClaimState>, &'a Vec<Arc<ClaimPod>>, Result<&'a Reserved, &'a Failure>);

/// Plans on other blocks.
type Allocate<'a> = &'a (dyn Fn(&BTreeMap<String, BlockState>) -> AllocatorPlan + Sync);

impl ClaimWorkers {
    /// Publishes what the blocks reserve, and failures.
    pub(super) async fn publish(
        &self,
        input: &NetworkInput,
        plan: &AllocatorPlan,
        allocate: Allocate<'_>,
        record: &mut NetworkRecord,
    ) -> Result<Round, request::Error> {
        let known: HashSet<&str> = input.wanted.iter().map(|wanted| wanted.uid.as_str()).collect();
        record.first_seen.retain(|uid, _| known.contains(uid.as_str()));
        record.said.retain(|uid, _| known.contains(uid.as_str()));
        let outcomes = input.claims.iter().filter_map(|(claim, pods)| {
            if claim.status.ips.is_empty() {
                record.first_seen.entry(claim.uid.clone()).or_insert_with(now);
            }
            let outcome = match (plan.reserved.get(&claim.uid), plan.failed.get(&claim.uid)) {
                (Some(reserved), _) => Ok(reserved),
                (None, Some(failure)) => Err(failure),
                (None, None) => return None,
            };
            Some((claim, pods, outcome))
        });
        let outcomes: Vec<_> = outcomes.collect();
        let drafts = self.drafts(outcomes, record);
        let (confirm, mut drafts): (Vec<_>, Vec<_>) = drafts.into_iter().partition(Draft::confirms);
        if !confirm.is_empty() {
            // The cached blocks may be older than the cached claims.
            let live = allocate(&self.live.blocks(&input.network).await?);
            let is_same = |draft: &Draft| match &draft.outcome {
                Ok(reserved) => live.reserved.get(&draft.claim.uid) == Some(reserved),
                Err(failure) => live.failed.get(&draft.claim.uid) == Some(failure),
            };
            drafts.extend(confirm.into_iter().filter(is_same));
        }
        self.write(drafts, record).await
    }

    /// Reports the same failure to these claims, unless they have addresses.
    pub(super) async fn publish_failure_to(
        &self,
        claims: impl Iterator<Item = &(Arc<ClaimState>, Vec<Arc<ClaimPod>>)>,
        message: &str,
        record: &mut NetworkRecord,
    ) -> Result<(), request::Error> {
        let failure = Failure { reason: AllocationReason::InternalError, message: message.to_owned() };
        let without = claims.filter(|(claim, _)| claim.status.ips.is_empty());
        let outcomes = without.map(|(claim, pods)| (claim, pods, Err(&failure))).collect();
        let mut drafts = self.drafts(outcomes, record);
        drafts.retain(|draft| !draft.confirms());
        self.write(drafts, record).await.map(drop)
    }

    /// The statuses that change.
    fn drafts(&self, outcomes: Vec<Outcome<'_>>, record: &mut NetworkRecord) -> Vec<Draft> {
        let (schema, time) = (self.schema(), Timestamp::now());
        let mut drafts = Vec::new();
        for (claim, pods, outcome) in outcomes {
            let pods: Vec<&ClaimPod> = pods.iter().map(Arc::as_ref).collect();
            let write = publish::status(claim, outcome, &pods, schema, time);
            if let (false, Err(failure)) = (schema.conditions, outcome) {
                // The CRD keeps no conditions: only events say why.
                let said = record.said.insert(claim.uid.clone(), failure.message.clone());
                if said.as_ref() != Some(&failure.message) {
                    self.events.on_claim(claim, true, failure.reason.as_str(), &failure.message);
                }
            } else {
                record.said.remove(&claim.uid);
            }
            let record = outcome.ok().and_then(|reserved| publish::record(claim, reserved));
            if write.is_some() || record.is_some() {
                let (claim, outcome) = (Arc::clone(claim), outcome.cloned().map_err(Failure::clone));
                drafts.push(Draft { claim, outcome, record, write });
            }
        }
        drafts
    }

    async fn write(&self, drafts: Vec<Draft>, record: &mut NetworkRecord) -> Result<Round, request::Error> {
        let written = stream::iter(drafts).map(async |draft: Draft| {
            let written = self.write_claim(&draft).await;
            (draft, written)
        });
        let written: Vec<_> = written.buffer_unordered(MAX_CONCURRENT_CLAIMS).collect().await;
        let mut round = Round::Done;
        let mut failed = None;
        for (Draft { claim, outcome, write, .. }, written) in written {
            match written {
                Ok(stored) => self.published(&claim, outcome.as_ref(), write.as_ref(), stored, record),
                Err(error) if error.is_conflict() => round = Round::Conflict,
                Err(error) => {
                    self.events.on_status_rejection(&claim, &error);
                    failed = Some(error);
                }
            }
        }
        failed.map_or(Ok(round), Err)
    }

    /// Writes a claim: first the record, then the status.
    async fn write_claim(&self, draft: &Draft) -> Result<Option<Stored>, request::Error> {
        let mut recorded = None;
        if let Some(record) = &draft.record {
            let Some(claim) = self.writer.record_addresses(&draft.claim, record).await? else {
                return Ok(None);
            };
            recorded = Some(claim);
        }
        let Some(write) = &draft.write else {
            return Ok(recorded.map(|claim| Stored { claim, between: None }));
        };
        let current = recorded.as_ref().unwrap_or(&draft.claim);
        let stored = self.writer.write_claim_status(current, &write.status).await?;
        Ok(stored.map(|claim| Stored { claim, between: recorded.map(|claim| claim.version) }))
    }

    fn published(
        &self,
        claim: &Arc<ClaimState>,
        outcome: Result<&Reserved, &Failure>,
        write: Option<&StatusWrite>,
        stored: Option<Stored>,
        record: &mut NetworkRecord,
    ) {
        if let Some(StatusWrite { status, .. }) = write
            && (self.schema().conditions || outcome.is_ok())
        {
            self.events.on_publish(claim, outcome, status);
        }
        if outcome.is_ok()
            && let Some(seen) = record.first_seen.remove(&claim.uid)
        {
            self.metrics.claim_allocated(now().saturating_duration_since(seen));
        }
        if let Some(Stored { claim: stored, between }) = stored {
            record.overlay.wrote_claim(claim, between, stored, now());
        }
    }
}
