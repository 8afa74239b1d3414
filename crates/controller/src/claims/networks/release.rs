//! Confirms with live reads which reservations nothing needs any more.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use api::ErrorChain;
use client::{fence::now, request};
use plan::claims::{
    ClaimPod, ObjectKey,
    release::{self, Candidate, RELEASE_DELAY, ReportedAddresses},
};
use tracing::{info, warn};

use super::NetworkInput;
use crate::{
    claims::{
        ClaimWorkers,
        live::LivePods,
        records::{NetworkRecord, track},
    },
    leader::MIN_RETRY,
};

impl ClaimWorkers {
    /// The reservations that can be released now, and when to look again.
    pub(super) async fn releasable(
        &self,
        input: &NetworkInput,
        record: &mut NetworkRecord,
    ) -> (BTreeSet<(String, IpAddr)>, Option<Duration>) {
        let state = self.cache.snapshot();
        record.missing_since.retain(|node, _| !state.nodes.contains_key(&**node));
        let reported = ReportedAddresses::of(&state, &input.uid);
        let candidates: Vec<Candidate> = self.cache.claims().read(|index| {
            let claims = |uid: &str| index.claim_of_uid(uid).cloned();
            let named = |key: &ObjectKey| index.claim(key).cloned();
            let pods: Vec<&ClaimPod> = index.pods().collect();
            release::due(&input.uid, &input.blocks, claims, named, &pods, &reported)
        });
        track(&mut record.unused_since, now(), candidates.iter().cloned());
        track(&mut record.releasable_since, now(), candidates);
        let mut confirmed = BTreeSet::new();
        let mut next: Option<Duration> = None;
        let mut again = |wait: Duration| next = Some(next.map_or(wait, |next| next.min(wait)));
        let listed = LivePods::default();
        for (candidate, since) in &mut record.releasable_since {
            let rest = (*since + RELEASE_DELAY).saturating_duration_since(now());
            if !rest.is_zero() {
                again(rest);
                continue;
            }
            let unused = record.unused_since.get(candidate);
            let unused = unused.map_or(Duration::ZERO, |since| now().saturating_duration_since(*since));
            match self.confirm_release(input, candidate, unused, &mut record.missing_since, &listed).await {
                Ok(true) => {
                    info!(claim = %candidate.claim, address = %candidate.address, "released an address of an IPAMClaim");
                    confirmed.insert((candidate.uid.clone(), candidate.address));
                }
                // The watch shows soon why not, unless a pod without a reference has the address.
                Ok(false) => {
                    *since = now();
                    again(RELEASE_DELAY);
                }
                Err(error) => {
                    warn!(claim = %candidate.claim, error = %ErrorChain(&error), "could not confirm that an address is unused, retrying");
                    again(MIN_RETRY);
                }
            }
        }
        (confirmed, next)
    }

    /// `unused` is for how long the cache has had nothing that needs the reservation.
    async fn confirm_release(
        &self,
        input: &NetworkInput,
        candidate: &Candidate,
        unused: Duration,
        missing_since: &mut BTreeMap<Arc<str>, Instant>,
        listed: &LivePods,
    ) -> Result<bool, request::Error> {
        // The daemons may have reported the address since.
        let state = self.cache.snapshot();
        let mut reported = ReportedAddresses::of(&state, &input.uid);
        if reported.contains(candidate.address) {
            return Ok(false);
        }
        let claim = self.live.claim(&candidate.claim).await?;
        let pods = self.live.scheduled_pods(&candidate.claim.namespace, listed).await?;
        let mut counted = Vec::new();
        for (pod, node) in pods.iter().filter(|(pod, _)| release::is_named_by(candidate, pod)) {
            let exists = state.nodes.contains_key(&**node);
            let missing = (!exists).then(|| missing_since.entry(Arc::clone(node)).or_insert_with(now));
            let missing = missing.map(|since| now().saturating_duration_since(*since));
            // A Node that does not exist has no NodeNetwork.
            let report = if exists { self.live.node_report(node, listed).await? } else { None };
            if release::annotations_count(candidate, pod, report.as_deref(), unused, missing) {
                counted.push(pod);
            }
            reported.extend(report.as_deref(), &input.uid);
            if !release::confirms(candidate, &input.uid, &input.blocks, claim.as_ref(), &counted, &reported) {
                return Ok(false);
            }
        }
        Ok(release::confirms(candidate, &input.uid, &input.blocks, claim.as_ref(), &counted, &reported))
    }
}
