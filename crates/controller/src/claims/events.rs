//! Events about claims, on the virtual machine and its instance; about other claims on the claim itself.

use std::time::Duration;

use api::{CONTROLLER_FIELD_MANAGER, ErrorChain, IPAMClaim, IPAMClaimStatus, ipamclaim::IPS_ALLOCATED};
use client::events::{self, EventDraft, EventLimits, EventRecorder, EventSender, EventSource, Repeats};
use client::request;
use k8s_openapi::api::core::v1::ObjectReference;
use plan::claims::{ClaimEvent, ClaimState, Failure, ObjectKey, OwnerKind, Reserved, publish};

use crate::{
    cache::{ClusterCache, claims::ClaimIndex},
    leader::LeaderContext,
    metrics::ApiCallKind,
};

/// The same warning is recorded once in this time.
const EVENT_WINDOW: Duration = Duration::from_mins(10);
/// The API server rejects a write: a policy, a quota or another webhook denies it.
const REJECTED: &str = "IPAMClaimRejected";
const EVENT_LIMITS: EventLimits = EventLimits { queue: 1024, remembered: 2048 };

/// Records events about claims.
pub struct ClaimEvents {
    recorder: EventRecorder,
    cache: ClusterCache,
}

pub fn recorder(context: &LeaderContext) -> (ClaimEvents, EventSender) {
    let LeaderContext { client, cache, metrics, fence } = context;
    let source = EventSource {
        controller: CONTROLLER_FIELD_MANAGER,
        instance: "claims".to_owned(),
        window: EVENT_WINDOW,
        repeats: Repeats::Separate,
        limits: EVENT_LIMITS,
    };
    let call = metrics.api_call(ApiCallKind::Event).fenced(fence.clone());
    let (recorder, sender) = events::recorder(client.clone(), source, call);
    (ClaimEvents { recorder, cache: cache.clone() }, sender)
}

/// The VirtualMachine of this name and its instance, as far as they exist.
fn machine_objects(index: &ClaimIndex, key: &ObjectKey) -> Vec<ObjectReference> {
    let vm = index.vm(key).map(|vm| (OwnerKind::VirtualMachine, &vm.uid));
    let vmi = index.vmi(key).map(|vmi| (OwnerKind::VirtualMachineInstance, &vmi.uid));
    vm.into_iter().chain(vmi).map(|(kind, uid)| reference(kind, key, uid)).collect()
}

fn reference(kind: OwnerKind, key: &ObjectKey, uid: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some(OwnerKind::API_VERSION.to_owned()),
        kind: Some(kind.to_string()),
        namespace: Some(key.namespace.to_string()),
        name: Some(key.name.to_string()),
        uid: Some(uid.to_owned()),
        ..ObjectReference::default()
    }
}

fn rejection(claim: &ObjectKey, error: &request::Error) -> String {
    format!("the API server rejected IPAMClaim {claim}: {}; retrying", ErrorChain(error))
}

impl ClaimEvents {
    /// Records an event on the virtual machine of this name.
    pub fn on_machine(&self, key: &ObjectKey, event: &ClaimEvent) {
        for regarding in self.cache.claims().read(|index| machine_objects(index, key)) {
            self.record(regarding, event.warning, event.reason, &event.note);
        }
    }

    /// Records an event about a claim that was deleted, on the virtual machine. On the claim if there is none: it may be
    /// from a backup.
    pub fn on_deleted(&self, machine: &ObjectKey, claim: &ObjectKey, uid: &str, event: &ClaimEvent) {
        let is_orphan = self.cache.claims().read(|index| machine_objects(index, machine)).is_empty();
        if is_orphan {
            let regarding = events::reference::<IPAMClaim>(Some(&claim.namespace), &claim.name, uid);
            self.record(regarding, event.warning, event.reason, &event.note);
        } else {
            self.on_machine(machine, event);
        }
    }

    /// Records that claims without a virtual machine are kept, on the claims.
    pub fn on_kept(&self, kept: &[(ObjectKey, ClaimEvent)]) {
        for (key, event) in kept {
            let claim = self.cache.claims().read(|index| index.claim(key).cloned());
            let Some(claim) = claim else { continue };
            let regarding = events::reference::<IPAMClaim>(Some(&key.namespace), &key.name, &claim.uid);
            self.record(regarding, event.warning, event.reason, &event.note);
        }
    }

    /// Records that the API server rejects a claim of a virtual machine. Other errors are for the log only.
    pub fn on_rejection(&self, machine: &ObjectKey, claim: &ObjectKey, error: &request::Error) {
        if error.is_rejection() {
            let event = ClaimEvent { warning: true, reason: REJECTED, note: rejection(claim, error) };
            self.on_machine(machine, &event);
        }
    }

    /// The same for the status of a claim, on its owner.
    pub fn on_status_rejection(&self, claim: &ClaimState, error: &request::Error) {
        if error.is_rejection() {
            self.on_claim(claim, true, REJECTED, &rejection(&claim.key, error));
        }
    }

    /// Records the outcome of an allocation, if the status says something new.
    pub fn on_publish(
        &self,
        claim: &ClaimState,
        outcome: Result<&Reserved, &Failure>,
        status: &IPAMClaimStatus,
    ) {
        let condition = |status: &IPAMClaimStatus| {
            status.conditions.iter().find(|it| it.r#type == IPS_ALLOCATED).cloned()
        };
        let (old, new) = (condition(&claim.status), condition(status));
        let said = |one: &api::Condition| (one.status, one.reason.clone(), one.message.clone());
        let changed = match (&old, &new) {
            // The CRD keeps no conditions.
            (None, None) => claim.status.ips != status.ips || outcome.is_err(),
            (old, new) => old.as_ref().map(said) != new.as_ref().map(said),
        };
        if !changed {
            if let Some(ClaimEvent { warning, reason, note }) = publish::restored(claim, status) {
                self.on_claim(claim, warning, reason, &note);
            }
            return;
        }
        let reason = match outcome {
            Ok(_) => api::ipamclaim::AllocationReason::SuccessfulAllocation,
            Err(failure) => failure.reason,
        };
        let note = match (new, outcome) {
            (Some(condition), _) => condition.message,
            (None, Ok(_)) => status.ips.join(", "),
            (None, Err(failure)) => failure.message.clone(),
        };
        self.on_claim(claim, outcome.is_err(), reason.as_str(), &note);
    }

    /// Records an event on the owner of a claim; on the claim itself if no virtual machine owns it.
    pub fn on_claim(&self, claim: &ClaimState, warning: bool, reason: &'static str, note: &str) {
        let owner = claim.owner.as_ref().filter(|owner| owner.kind != OwnerKind::Other);
        let mut regarding = owner.map_or_else(Vec::new, |owner| {
            let key = ObjectKey { namespace: claim.key.namespace.clone(), name: owner.name.clone() };
            self.cache.claims().read(|index| machine_objects(index, &key))
        });
        if owner.is_none() {
            let ObjectKey { namespace, name } = &claim.key;
            regarding.push(events::reference::<IPAMClaim>(Some(namespace), name, &claim.uid));
        }
        for regarding in regarding {
            self.record(regarding, warning, reason, note);
        }
    }

    fn record(&self, regarding: ObjectReference, warning: bool, reason: &'static str, note: &str) {
        let draft = EventDraft { warning, reason, action: "Reconcile", note: note.to_owned() };
        self.recorder.record(regarding, draft);
    }
}
