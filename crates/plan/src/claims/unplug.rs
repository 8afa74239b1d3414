//! Which interfaces a machine has, when the claim of an unplugged one is deleted, and what a deletion must confirm.

use super::{
    ClaimEvent, ClaimPod, ClaimState, MachineInput, MachineNetwork,
    machine::{ClaimStep, DeleteReason, KindsKnown, UnchangedCheck, fits, is_claim_of, is_owned_by},
};

/// Deletes the claim of an interface that was unplugged.
pub(super) fn unplug_step(input: &MachineInput<'_>, claim: &ClaimState) -> Option<ClaimStep> {
    if input.options.keep_unplugged || claim.deleting || input.kinds != KindsKnown::LISTED {
        return None;
    }
    let vm = input.vm.filter(|vm| is_owned_by(claim, &vm.uid) && !vm.deleting)?;
    // That of the primary network, or of an interface that was unplugged while ipam-extensions ran, is not ours.
    if !claim.is_ours() || !claim.has_finalizer() || claim.owner_count != 1 {
        return None;
    }
    if has_interface(input, &vm.networks, claim) {
        return None;
    }
    let published = claim.published();
    let is_used = |pod: &&ClaimPod| pod.uses(&claim.key) || published.iter().any(|net| pod.shows(net.addr()));
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

/// Whether the template or the instance has the interface of a claim.
fn has_interface(input: &MachineInput<'_>, template: &[MachineNetwork], claim: &ClaimState) -> bool {
    let in_template = template.iter().filter(|network| !network.absent);
    let in_instance = input.vmi.iter().flat_map(|vmi| &vmi.networks);
    let in_instance = in_instance.filter(|network| !network.absent || network.in_status);
    in_template.chain(in_instance).any(|network| is_claim_of(input.key, claim, network))
}

/// Whether the owner of a claim has its interface.
pub(super) fn is_in_plan(input: &MachineInput<'_>, claim: &ClaimState) -> bool {
    let vm = input.vm.filter(|vm| is_owned_by(claim, &vm.uid));
    let owns = vm.is_some() || input.vmi.is_some_and(|vmi| fits(claim, vmi));
    owns && has_interface(input, vm.map_or(&[], |vm| &vm.networks), claim)
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
