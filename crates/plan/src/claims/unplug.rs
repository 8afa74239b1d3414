//! When the claim of an unplugged interface is deleted.

use api::ipamclaim::FINALIZER;

use super::{
    ClaimPod, ClaimState, MachineInput,
    machine::{ClaimStep, DeleteReason, KindsKnown, delete, is_claim_of, is_owned_by},
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
    Some(delete(claim, DeleteReason::Unplugged, note))
}
