//! When the claim of an unplugged interface is deleted, and what a deletion must confirm.

use api::ipamclaim::FINALIZER;

use super::{
    ClaimEvent, ClaimPod, ClaimState, MachineInput,
    machine::{ClaimStep, DeleteReason, KindsKnown, UnchangedCheck, is_claim_of, is_owned_by},
};

/// Deletes the claim of an interface that was unplugged.
pub(super) fn unplug_step(input: &MachineInput<'_>, claim: &ClaimState) -> Option<ClaimStep> {
    if input.options.keep_unplugged || claim.deleting || input.kinds != KindsKnown::LISTED {
        return None;
    }
    let vm = input.vm.filter(|vm| is_owned_by(claim, &vm.uid) && !vm.deleting)?;
    // A claim that nothing here created is not deleted.
    if !claim.finalizers.iter().any(|one| one == FINALIZER) || claim.owner_count != 1 {
        return None;
    }
    let in_template = vm.networks.iter().filter(|network| !network.absent);
    let in_instance = input.vmi.iter().flat_map(|vmi| &vmi.networks);
    let in_instance = in_instance.filter(|network| !network.absent || network.in_status);
    if in_template.chain(in_instance).any(|network| is_claim_of(input.key, claim, network)) {
        return None;
    }
    let published = claim.published();
    let is_used =
        |pod: &&ClaimPod| pod.references(&claim.key) || published.iter().any(|net| pod.shows(net.addr()));
    if input.pods.iter().any(is_used) {
        return None;
    }
    let interface = claim.key.name.strip_prefix(&format!("{}.", input.key.name)).unwrap_or(&claim.key.name);
    let note = format!(
        "interface {interface} was unplugged; deleted IPAMClaim {}, its addresses become free",
        claim.key
    );
    Some(delete(input, claim, DeleteReason::Unplugged, note))
}

pub(super) fn delete(
    input: &MachineInput<'_>,
    claim: &ClaimState,
    why: DeleteReason,
    note: String,
) -> ClaimStep {
    let vm = || UnchangedCheck::Vm { key: input.key.clone(), cached: input.vm.cloned() };
    let vmi = UnchangedCheck::Vmi { key: input.key.clone(), cached: input.vmi.cloned() };
    let (reason, unchanged) = match why {
        DeleteReason::Unplugged => ("IPAMClaimReleased", vec![vm(), vmi]),
        // The instance alone decides, also while VirtualMachines are not served.
        DeleteReason::Replaced => ("IPAMClaimReplaced", vec![vmi]),
    };
    let event = ClaimEvent { warning: false, reason, note };
    let (uid, version) = (claim.uid.clone(), claim.version.clone());
    ClaimStep::Delete { claim: claim.key.clone(), uid, version, why, unreserved_in: None, unchanged, event }
}
