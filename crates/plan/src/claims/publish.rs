//! The status of a claim.

use std::net::IpAddr;

use api::{
    Condition, IPAMClaimStatus,
    ipamclaim::{AllocationReason, IPS_ALLOCATED, OwnerPod, RecordedAddresses},
};
use ipnet::IpNet;
use jiff::Timestamp;

use super::{ClaimEvent, ClaimPod, ClaimSchema, ClaimState, Failure, Reserved, machine::CONFLICT};
use crate::condition::ConditionDraft;

/// A status to write, with the UID and the resourceVersion of the claim that it was computed from.
#[derive(Debug, Clone, PartialEq)]
pub struct StatusWrite {
    pub status: IPAMClaimStatus,
    /// The write takes a published address away. The cached blocks may be older than the cached claim, so the caller first
    /// lists the blocks of the network live and plans again from them; it writes if the result is the same.
    pub confirm: bool,
}

/// The status to write; `None` if it is right as it is. `pods` are the live pods that reference the claim.
pub fn status(
    claim: &ClaimState,
    outcome: Result<&Reserved, &Failure>,
    pods: &[&ClaimPod],
    schema: ClaimSchema,
    now: Timestamp,
) -> Option<StatusWrite> {
    let old = &claim.status;
    let ips: Vec<String> = match outcome {
        Ok(reserved) => reserved.infos.iter().map(|info| info.net.to_string()).collect(),
        Err(_) => Vec::new(),
    };
    let mut new = IPAMClaimStatus { ips, ..old.clone() };
    if schema.owner_pod {
        new.owner_pod = owner_pod(claim, outcome.ok(), pods);
    }
    if schema.conditions {
        let condition = condition(outcome).into_condition(current(old), now, None);
        match new.conditions.iter_mut().find(|one| one.r#type == IPS_ALLOCATED) {
            Some(one) => *one = Condition { observed_generation: one.observed_generation, ..condition },
            None => new.conditions.push(condition),
        }
    }
    if new == *old {
        return None;
    }
    let kept: Vec<IpAddr> =
        outcome.ok().into_iter().flat_map(|it| &it.infos).map(|it| it.net.addr()).collect();
    let confirm = claim.published().iter().any(|net| !kept.contains(&net.addr()));
    Some(StatusWrite { status: new, confirm })
}

/// The addresses to record in an annotation of the claim before they are published; `None` if the record is right.
pub fn record(claim: &ClaimState, reserved: &Reserved) -> Option<RecordedAddresses> {
    let ips = reserved.infos.iter().map(|info| info.net).collect();
    let record = RecordedAddresses { uid: claim.uid.clone(), ips };
    (claim.annotations.recorded.as_ref() != Some(&record)).then_some(record)
}

/// The event about a user who changed the addresses in a status that this status restores. The condition names the reserved
/// addresses, so addresses that differ under the same condition were changed.
pub fn restored(claim: &ClaimState, status: &IPAMClaimStatus) -> Option<ClaimEvent> {
    let text = |status| current(status).map(|one| (one.status, one.reason.clone(), one.message.clone()));
    let is_same = text(&claim.status).is_some() && text(&claim.status) == text(status);
    (is_same && claim.status.ips != status.ips).then(|| {
        let ips = if status.ips.is_empty() { "empty".to_owned() } else { status.ips.join(", ") };
        let note = format!(
            "status.ips of IPAMClaim {} was changed, and is {ips} again; for other addresses, stop the VM and delete the \
             IPAMClaim",
            claim.key
        );
        ClaimEvent::warning(CONFLICT, note)
    })
}

fn current(status: &IPAMClaimStatus) -> Option<&Condition> {
    status.conditions.iter().find(|condition| condition.r#type == IPS_ALLOCATED)
}

fn condition(outcome: Result<&Reserved, &Failure>) -> ConditionDraft {
    match outcome {
        Ok(reserved) => {
            let nets: Vec<String> = reserved.infos.iter().map(|info| info.net.to_string()).collect();
            let verb = if nets.len() == 1 { "is" } else { "are" };
            let mut message =
                format!("{} {verb} reserved in IPBlock {}", nets.join(", "), reserved.blocks.join(", "));
            if !reserved.outside.is_empty() {
                let outside: Vec<String> = reserved.outside.iter().map(ToString::to_string).collect();
                message = format!(
                    "{message}; the network has no subnet with {} now, and the claim keeps what it has until its virtual machine \
                     or interface is gone: if this is a mistake, correct spec.ipam of the BridgeNetwork",
                    outside.join(", ")
                );
            }
            let reason = AllocationReason::SuccessfulAllocation.as_str();
            ConditionDraft::new(IPS_ALLOCATED, true, reason, cut(&message))
        }
        Err(failure) => {
            ConditionDraft::new(IPS_ALLOCATED, false, failure.reason.as_str(), cut(&failure.message))
        }
    }
}

/// The bytes of a condition's message; the CRD allows 32768.
const MAX_MESSAGE: usize = 1024;

/// Cuts a message on the boundary of a character.
fn cut(message: &str) -> String {
    if message.len() <= MAX_MESSAGE {
        return message.to_owned();
    }
    let end = message.floor_char_boundary(MAX_MESSAGE - '…'.len_utf8());
    format!("{}…", &message[..end])
}

/// The pod that has all addresses of the claim: the current one while it shows them, else the oldest that does. Without
/// such a pod the last one stays, so a migration does not flap and a stopped machine keeps the name.
fn owner_pod(claim: &ClaimState, reserved: Option<&Reserved>, pods: &[&ClaimPod]) -> Option<OwnerPod> {
    let current = claim.status.owner_pod.clone();
    let Some(reserved) = reserved.filter(|reserved| !reserved.infos.is_empty()) else { return current };
    let addresses: Vec<IpAddr> = reserved.infos.iter().map(|info| info.net.addr()).collect();
    let shows =
        |pod: &&&ClaimPod| pod.references(&claim.key) && addresses.iter().all(|address| pod.shows(*address));
    let candidates = || pods.iter().filter(shows);
    let is_current = |pod: &&ClaimPod| current.as_ref().is_some_and(|current| *current.name == *pod.key.name);
    if candidates().any(is_current) {
        return current;
    }
    let oldest = candidates().min_by_key(|pod| (pod.created, pod.key.clone()));
    oldest.map(|pod| OwnerPod { name: pod.key.name.to_string() }).or(current)
}

/// The text form of published addresses.
pub fn list(nets: &[IpNet]) -> String {
    nets.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
