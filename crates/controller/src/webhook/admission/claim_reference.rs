//! Rejects pods that refer to the IPAMClaim of a virtual machine that they do not run.

use std::sync::Arc;

use plan::claims::{ClaimState, ObjectKey, OwnerKind, validate as references};

use super::{AdmissionDecision, ReviewedRequest, WebhookState, mutate_pod::metadata};
use crate::cache::claims::project;

/// Whether a pod may refer to the claims that it refers to. The cache decides: a claim that it does not have yet is
/// checked again when the pod is attached.
pub fn validate(state: &WebhookState, request: &ReviewedRequest) -> AdmissionDecision {
    let Some(metadata) = metadata(request).filter(|_| request.operation.sets_object()) else {
        return AdmissionDecision::Allow;
    };
    let Some(pod) = project::claim_pod(&metadata) else { return AdmissionDecision::Allow };
    let checked = state.cluster.claims().read(|index| {
        let key = |name: &str| ObjectKey { namespace: pod.key.namespace.clone(), name: name.into() };
        let claims = |name: &str| index.claim(&key(name)).map(|claim| ClaimState::clone(claim));
        let controller = pod.controller.as_ref().filter(|it| it.kind == OwnerKind::VirtualMachineInstance);
        let vmi = controller
            .and_then(|controller| index.vmi(&key(&controller.name)).filter(|vmi| vmi.uid == controller.uid));
        references::references(&pod, vmi.map(Arc::as_ref), &claims)
    });
    match checked {
        Ok(()) => AdmissionDecision::Allow,
        Err(message) => AdmissionDecision::Deny(message),
    }
}
