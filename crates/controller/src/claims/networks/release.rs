//! Confirms with live reads which reservations nothing needs any more.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc, time::Duration};

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
        let reported = ReportedAddresses::of(&self.cache.snapshot(), &input.uid);
        let candidates = self.cache.claims().read(|index| {
            let claims = |uid: &str| index.claim_of_uid(uid).cloned();
            let named = |key: &ObjectKey| index.claim(key).cloned();
            let pods: Vec<&ClaimPod> = index.pods().collect();
            release::due(&input.uid, &input.blocks, claims, named, &pods, &reported)
        });
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
            match self.confirm_release(input, candidate, &listed).await {
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

    async fn confirm_release(
        &self,
        input: &NetworkInput,
        candidate: &Candidate,
        listed: &LivePods,
    ) -> Result<bool, request::Error> {
        let namespace: &Arc<str> = &candidate.claim.namespace;
        let claim = self.live.claim(&candidate.claim).await?;
        let pods = self.live.pods(namespace, listed).await?;
        // One more look at the reports, then at the nodes of the pods that seem to have the address.
        let state = self.cache.snapshot();
        let mut reported = ReportedAddresses::of(&state, &input.uid);
        let mut counted = Vec::new();
        for pod in pods.iter().filter(|pod| release::is_named_by(candidate, pod)) {
            let node = self.live.node_of(&pod.key, &pod.uid).await?;
            let report = match &node {
                Some(node) => self.live.node_report(node).await?,
                None => None,
            };
            let known = node.as_ref().and_then(|node| state.nodes.get(node));
            let ready = known.is_some_and(|node| node.not_ready_reason.is_none());
            if release::annotations_count(node.as_ref().map(|_| report.as_ref()), ready) {
                counted.push(pod);
            }
            reported.extend(report.as_ref(), &input.uid);
        }
        Ok(release::confirms(candidate, &input.uid, &input.blocks, claim.as_ref(), &counted, &reported))
    }
}
