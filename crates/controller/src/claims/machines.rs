//! One reconcile of the claims of a virtual machine, or of a claim without one.

use std::{sync::Arc, time::Duration};

use api::{ErrorChain, selection::NadRef};
use client::{fence::now, request};
use jiff::{SignedDuration, Timestamp};
use plan::{
    claims::{
        ClaimPod, ClaimState, ClaimStep, Failure, FailureReport, MachineInput, MachinePlan, NadLookup,
        ObjectKey, StatusWrite,
        allocate::reservations,
        machine::{self, DeleteReason, GoneCheck, KindsKnown},
        publish, resolve,
    },
    network::ClusterState,
    shared_map::SharedMap,
};
use tracing::{debug, warn};

use super::{ClaimWorkers, Next, failed, live::LivePods, records::MachineRecord};
use crate::cache::claims::ClaimWork;

/// The delay before a plan on what another writer wrote.
const CONFLICT_RETRY: Duration = Duration::from_millis(50);

/// The delay before the next check whether ipam-extensions still runs.
const FOREIGN_RETRY: Duration = Duration::from_secs(10);

/// What a NAD says about claims.
pub fn nad_lookup(state: &ClusterState, at: &NadRef) -> NadLookup {
    match state.nads.as_ref().and_then(|nads| nads.get(at)) {
        None => NadLookup::Absent,
        Some(nad) if nad.deleting => NadLookup::Absent,
        Some(nad) => match &nad.network_config {
            Ok(config) => NadLookup::Found(config.clone()),
            Err(cause) => NadLookup::Invalid(cause.clone()),
        },
    }
}

impl ClaimWorkers {
    pub(super) async fn machine(
        &self,
        work: &ClaimWork,
        key: &ObjectKey,
        record: &mut MachineRecord,
    ) -> Next {
        record.prune(now());
        let (plan, kinds, claims) = self.plan_machine(key);
        for event in record.new_events(&plan.events) {
            self.events.on_machine(key, &event);
        }
        let failures: Vec<_> =
            plan.resolutions.iter().filter_map(|(key, one)| Some((key.clone(), one.failure()?))).collect();
        record.retain_said(|claim| failures.iter().any(|(failed, _)| failed == claim));
        self.cache.claims().set_resolutions(work, plan.resolutions);
        self.events.on_kept(&record.new_kept(plan.kept));
        let mut next = Next::ON_CHANGE.or_after(plan.requeue_after.map(SignedDuration::unsigned_abs));
        if plan.requeue {
            // A change of the claim wakes the key earlier.
            next = next.or_after(Some(record.requeue_delay()));
        } else {
            record.requeues = 0;
        }
        let mut failure = None;
        let listed = LivePods::default();
        for step in &plan.steps {
            match self.apply_step(key, step, kinds, &listed, record).await {
                Ok(wait) => next = next.or_after(wait),
                Err(error) if error.is_conflict() => {
                    debug!(machine = %key, "conflict with another writer, planning again");
                    next = next.or_after(Some(CONFLICT_RETRY));
                }
                // Everything in the namespace goes with it.
                Err(error) if is_namespace_gone(&error) => {}
                // The other steps do not depend on it: a full quota denies a create, and a delete makes room.
                Err(error) => {
                    self.events.on_rejection(key, step.claim(), &error);
                    failure = Some(error);
                }
            }
        }
        for (claim, (cause, report)) in failures {
            let Some(claim) = claims.iter().find(|one| one.key == claim) else { continue };
            match self.report_failure(claim, &cause, report, record).await {
                Ok(wait) => next = next.or_after(wait),
                Err(error) => {
                    self.events.on_status_rejection(claim, &error);
                    failure = Some(error);
                }
            }
        }
        if let Some(error) = failure {
            warn!(machine = %key, error = %ErrorChain(&error), "could not write an IPAMClaim, retrying");
            record.failed();
            return failed(&mut record.retry);
        }
        record.succeeded();
        next
    }

    /// Plans on the cache. Returns the plan, what is known about KubeVirt's kinds, and the claims of the machine.
    fn plan_machine(&self, key: &ObjectKey) -> (MachinePlan, KindsKnown, Vec<Arc<ClaimState>>) {
        let state = self.cache.snapshot();
        self.cache.claims().read(|index| {
            let claims = index.claims_of(key);
            let pods = index.pods_of(key, &claims);
            let in_namespace = |name: &str| {
                let key = ObjectKey { namespace: key.namespace.clone(), name: name.into() };
                index.claim(&key).map(|claim| ClaimState::clone(claim))
            };
            let input = MachineInput {
                key,
                vm: index.vm(key).map(Arc::as_ref),
                vmi: index.vmi(key).map(Arc::as_ref),
                kinds: index.kinds(),
                claims: &claims.iter().map(Arc::as_ref).collect::<Vec<_>>(),
                in_namespace: &in_namespace,
                pods: &pods.iter().map(Arc::as_ref).collect::<Vec<_>>(),
                nads: &|at: &NadRef| nad_lookup(&state, at),
                networks: &|name: &str| state.networks.get(name).map(|network| network.uid.clone()),
                reserved_in: &|uid: &str| index.reserved_in(uid),
                options: self.options,
                now: Timestamp::now(),
            };
            (machine::plan(&input), index.kinds(), claims)
        })
    }

    /// Applies one step. Returns how long to wait for the watch, if it shows an earlier write of this step late.
    async fn apply_step(
        &self,
        machine: &ObjectKey,
        step: &ClaimStep,
        kinds: KindsKnown,
        listed: &LivePods,
        record: &mut MachineRecord,
    ) -> Result<Option<Duration>, request::Error> {
        let (claim, version) = (step.claim(), step.version());
        if let Some(wait) = record.is_written(claim, version, now()) {
            return Ok(Some(wait));
        }
        match step {
            ClaimStep::Create(draft) => {
                self.writer.create_claim(draft).await?;
                self.events.on_machine(machine, &draft.event);
            }
            ClaimStep::SetOwner { claim, uid, version, owner } => {
                if !self.live.owner_lives(&claim.namespace, owner).await? {
                    // The watch shows it soon.
                    return Ok(Some(CONFLICT_RETRY));
                }
                self.writer.set_owner(claim, uid, version, owner).await?;
            }
            ClaimStep::Mark { claim, uid, version } => self.writer.mark(claim, uid, version).await?,
            ClaimStep::SetNetwork { claim, uid, version, network, event } => {
                self.writer.set_network(claim, uid, version, network).await?;
                self.events.on_machine(machine, event);
            }
            ClaimStep::Delete { claim, uid, version, why, unreserved_in, unchanged, event } => {
                if *why == DeleteReason::Unplugged && self.live.is_used(claim, listed).await? {
                    return Ok(None);
                }
                if let Some(network) = unreserved_in
                    && reservations(&self.live.blocks(network).await?).contains_key(uid)
                {
                    // The watch shows it soon.
                    return Ok(Some(CONFLICT_RETRY));
                }
                // Last, so that little time passes until the deletion.
                if !self.live.are_unchanged(unchanged, kinds).await? {
                    // The watch shows it soon.
                    return Ok(Some(CONFLICT_RETRY));
                }
                self.writer.delete_claim(claim, uid, version).await?;
                self.events.on_deleted(machine, claim, uid, event);
            }
            ClaimStep::RemoveFinalizer { claim, uid, version, left, gone } => {
                if !self.live.are_gone(gone, kinds, listed).await? {
                    // The watch shows it soon, but not that ipam-extensions is gone.
                    let is_foreign = gone.contains(&GoneCheck::NoIpamExtensions);
                    return Ok(Some(if is_foreign { FOREIGN_RETRY } else { CONFLICT_RETRY }));
                }
                self.writer.remove_finalizer(claim, uid, version, left).await?;
            }
        }
        record.wrote(claim, version, now());
        Ok(None)
    }

    /// Reports why a claim gets no addresses, if that is new.
    pub(super) async fn report_failure(
        &self,
        claim: &ClaimState,
        failure: &Failure,
        report: FailureReport,
        record: &mut MachineRecord,
    ) -> Result<Option<Duration>, request::Error> {
        if report == FailureReport::Event || !self.schema().conditions {
            // A claim that has an address is not reported as failed here: its reservation decides.
            let is_served = report == FailureReport::Status && !claim.status.ips.is_empty();
            if !claim.deleting && !is_served && record.says(&claim.key, &failure.message) {
                self.events.on_claim(claim, true, failure.reason.as_str(), &failure.message);
            }
            return Ok(None);
        }
        let pods = self.cache.claims().read(|index| index.pods_of_claim(&claim.key));
        let pods: Vec<&ClaimPod> = pods.iter().map(Arc::as_ref).collect();
        let status = publish::status(claim, Err(failure), &pods, self.schema(), Timestamp::now());
        // A claim that has an address is not reported as failed here: its reservation decides.
        let Some(StatusWrite { status, confirm: false }) = status.filter(|_| !claim.deleting) else {
            return Ok(None);
        };
        if let Some(wait) = record.is_written(&claim.key, Some(&claim.version), now()) {
            return Ok(Some(wait));
        }
        match self.writer.write_claim_status(claim, &status).await {
            Ok(_) => {
                record.wrote(&claim.key, Some(&claim.version), now());
                self.events.on_publish(claim, Err(failure), &status);
                Ok(None)
            }
            Err(error) if error.is_conflict() => Ok(Some(CONFLICT_RETRY)),
            Err(error) => Err(error),
        }
    }

    /// Finds the network of a claim that no virtual machine owns.
    pub(super) async fn lone(&self, work: &ClaimWork, key: &ObjectKey, record: &mut MachineRecord) -> Next {
        record.prune(now());
        let claim = self.cache.claims().read(|index| index.claim(key).cloned());
        let Some(claim) = claim else {
            self.cache.claims().set_resolutions(work, []);
            return Next::ON_CHANGE;
        };
        // It may have got an owner since it was marked.
        if claim.has_machine_owner() {
            self.cache.claims().set_resolutions(work, []);
            return Next::ON_CHANGE;
        }
        let state = self.cache.snapshot();
        let nads = state.nads.iter().flat_map(SharedMap::iter);
        let nads = nads.filter(|(at, nad)| *at.namespace == *key.namespace && !nad.deleting);
        let nads: Vec<_> =
            nads.filter_map(|(at, nad)| Some((at.clone(), nad.network_config.as_ref().ok()?))).collect();
        let networks = |name: &str| state.networks.get(name).map(|network| network.uid.clone());
        let reserved_in = self.cache.claims().read(|index| index.reserved_in(&claim.uid));
        let resolution = resolve::for_lone(&claim, &nads, &networks, reserved_in.as_ref());
        let failure = resolution.failure();
        self.cache.claims().set_resolutions(work, [(key.clone(), resolution)]);
        let (pods, kinds) = self.cache.claims().read(|index| (index.pods_of_claim(key), index.kinds()));
        let pods: Vec<&ClaimPod> = pods.iter().map(Arc::as_ref).collect();
        if let Some(step) = machine::finalizer_step(&claim, &pods) {
            return match self.apply_step(key, &step, kinds, &LivePods::default(), record).await {
                Ok(wait) => {
                    record.succeeded();
                    Next::ON_CHANGE.or_after(wait)
                }
                Err(error) if error.is_conflict() => Next::after(CONFLICT_RETRY),
                Err(error) => {
                    self.events.on_status_rejection(&claim, &error);
                    warn!(claim = %key, error = %ErrorChain(&error), "could not remove the finalizer of an IPAMClaim, retrying");
                    record.failed();
                    failed(&mut record.retry)
                }
            };
        }
        let Some((failure, report)) = failure else {
            record.retain_said(|_| false);
            record.succeeded();
            return Next::ON_CHANGE;
        };
        match self.report_failure(&claim, &failure, report, record).await {
            Ok(wait) => {
                record.succeeded();
                Next::ON_CHANGE.or_after(wait)
            }
            Err(error) => {
                self.events.on_status_rejection(&claim, &error);
                warn!(claim = %key, error = %ErrorChain(&error), "could not write an IPAMClaim, retrying");
                record.failed();
                failed(&mut record.retry)
            }
        }
    }
}

/// Whether a claim was not created because its namespace is being deleted, or does not exist any more. "Not found" without a
/// namespace means that the API server does not serve IPAMClaims now, for example while the CRD is created again.
fn is_namespace_gone(error: &request::Error) -> bool {
    let Some(status) = error.status() else { return false };
    let Some(details) = &status.details else { return false };
    details.causes.iter().any(|cause| cause.reason == "NamespaceTerminating")
        || status.is_not_found() && details.kind == "namespaces"
}

#[cfg(test)]
mod tests {
    use kube::core::Status;
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn only_a_status_about_the_namespace_says_that_it_is_gone() {
        let terminating =
            json!({"causes": [{"reason": "NamespaceTerminating", "field": "metadata.namespace"}]});
        for (code, reason, details, gone) in [
            (404, "NotFound", json!({"name": "ns", "kind": "namespaces"}), true),
            (403, "Forbidden", terminating, true),
            // The CRD was deleted, or is not served yet.
            (404, "NotFound", json!({}), false),
            (404, "NotFound", Value::Null, false),
            (404, "NotFound", json!({"name": "vm1", "kind": "virtualmachines"}), false),
            (403, "Forbidden", json!({"name": "ns", "kind": "namespaces"}), false),
        ] {
            let status = json!({"status": "Failure", "code": code, "reason": reason, "details": details});
            let status: Status = serde_json::from_value(status).unwrap();
            let error = request::Error::Failed(kube::Error::Api(Box::new(status)));
            assert_eq!(is_namespace_gone(&error), gone, "{error:?}");
        }
        assert!(!is_namespace_gone(&request::Error::LeaseExpired));
    }
}
