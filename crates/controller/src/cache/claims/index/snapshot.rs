//! What is read of the index at once: the claims of a network, and the numbers for the metrics.

use std::{net::IpAddr, sync::Arc, time::Duration};

use api::ipamclaim::{FINALIZER, IPS_ALLOCATED};
use jiff::Timestamp;
use plan::claims::{ClaimState, ObjectKey, Resolution, Wanted, shown};

use super::{ClaimIndex, NetworkSnapshot, STUCK_AFTER};
use crate::metrics::{ClaimMetricState, ClaimTotals};

impl ClaimIndex {
    /// What a reconcile of the addresses of a network reads.
    pub fn network(&self, uid: &str) -> NetworkSnapshot {
        let mut snapshot = NetworkSnapshot::default();
        for key in self.on_network.get(uid).into_iter().flatten() {
            let Some(claim) = self.claims.get(key) else { continue };
            let Some(Resolution::Allocate { requested, .. }) = self.resolutions.get(key) else { continue };
            // A claim that is being deleted keeps what it has, and gets nothing new.
            if claim.deleting {
                continue;
            }
            snapshot.wanted.push(Wanted {
                claim: key.clone(),
                uid: claim.uid.clone(),
                requested: requested.clone(),
                published: claim.published(),
                shown: self.shown(claim),
                created: claim.created,
            });
            snapshot.claims.push((Arc::clone(claim), self.pods_of_claim(key)));
        }
        snapshot
    }

    /// The addresses that the own pods of a claim have.
    fn shown(&self, claim: &ClaimState) -> Vec<IpAddr> {
        let pods = self.pods_of_claim.get(&claim.key).into_iter().flatten();
        let pods = pods.filter_map(|key| self.pods.get(key)).map(Arc::as_ref);
        let vmi = |name: &str| {
            let key = ObjectKey { namespace: claim.key.namespace.clone(), name: name.into() };
            self.vmis.get(&key).map(Arc::as_ref)
        };
        shown::addresses(claim, pods, vmi)
    }

    /// The numbers for the metrics.
    pub fn totals(&self, now: Timestamp) -> ClaimTotals {
        let mut totals = ClaimTotals::default();
        let since = |time: Timestamp| Duration::try_from(now.duration_since(time)).unwrap_or_default();
        for (key, claim) in &self.claims {
            let state = self.metric_state(claim);
            *totals.states.entry(state).or_default() += 1;
            let stuck = self.deleting_since.get(key).is_some_and(|time| since(*time) > STUCK_AFTER);
            if claim.deleting && stuck && claim.finalizers.iter().any(|one| one == FINALIZER) {
                totals.stuck += 1;
            }
            if state == ClaimMetricState::Pending {
                totals.oldest_pending = totals.oldest_pending.max(since(claim.created));
            }
        }
        totals
    }

    fn metric_state(&self, claim: &ClaimState) -> ClaimMetricState {
        if claim.deleting {
            return ClaimMetricState::Terminating;
        }
        match self.resolutions.get(&claim.key) {
            Some(Resolution::NotOurs) => return ClaimMetricState::NotOurs,
            Some(Resolution::Failed { .. }) => return ClaimMetricState::Failed,
            Some(Resolution::Allocate { .. }) | None => {}
        }
        if !claim.status.ips.is_empty() {
            return ClaimMetricState::Allocated;
        }
        let failed = claim.status.conditions.iter().any(|condition| condition.r#type == IPS_ALLOCATED);
        if failed { ClaimMetricState::Failed } else { ClaimMetricState::Pending }
    }
}
