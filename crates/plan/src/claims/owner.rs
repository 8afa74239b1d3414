//! Who owns a claim, and when the claim loses the finalizer that keeps it.

use api::ipamclaim::{FINALIZER, KEEP_ANNOTATION};
use jiff::{SignedDuration, Timestamp};

use super::{
    ClaimEvent, ClaimPod, ClaimState, ObjectKey, OwnerKind, OwnerRef, VmiFacts,
    machine::{
        ClaimStep, DeleteReason, GoneCheck, KEPT, KindState, MachineInput, desired_owner, fits, is_claim_of,
    },
    names,
    unplug::{delete, is_in_plan},
};

/// How long a claim without a virtual machine is kept after it was created: a backup restores claims before or after their
/// virtual machines.
const ORPHAN_TTL: SignedDuration = SignedDuration::from_hours(24);

/// The step that a claim's owner requires: another owner, or the removal of the finalizer. `replaced` says that the
/// interface of the claim is on another network now.
pub(super) fn life_step(input: &MachineInput<'_>, claim: &ClaimState, replaced: bool) -> Option<ClaimStep> {
    let Some(owner) = &claim.owner else { return unowned(input, claim) };
    if !claim.is_ours() && !is_in_plan(input, claim) {
        return finalizer_step(claim, input.pods);
    }
    match owner.kind {
        OwnerKind::VirtualMachine => owned_by_vm(input, claim, owner, replaced),
        OwnerKind::VirtualMachineInstance => owned_by_vmi(input, claim, owner, replaced),
        OwnerKind::Other => None,
    }
}

/// The removal of the finalizer of a claim that is not ours, or that no virtual machine owns: it is being deleted, and no
/// live pod uses it. `pods` are those that use the claim.
///
/// Claims with the owner or the label of a virtual machine can be of its primary network, and belong to ipam-extensions while
/// that runs.
pub fn finalizer_step(claim: &ClaimState, pods: &[&ClaimPod]) -> Option<ClaimStep> {
    if !claim.deleting || pods.iter().any(|pod| pod.uses(&claim.key)) {
        return None;
    }
    let mut gone = vec![GoneCheck::Unused { claim: claim.key.clone() }];
    let other_owner = claim.owner.as_ref().is_some_and(|owner| owner.kind == OwnerKind::Other);
    if !claim.is_ours() && !other_owner && (claim.owner.is_some() || claim.label.is_some()) {
        gone.push(GoneCheck::NoIpamExtensions);
    }
    remove_finalizer(claim, gone)
}

/// Whether a claim that is being deleted while its owner lives may go: it is replaced, no pod references it, or it has no
/// address that a pod could have. Another one takes its place.
fn may_go(input: &MachineInput<'_>, claim: &ClaimState, replaced: bool) -> bool {
    let is_used = || input.pods.iter().any(|pod| pod.uses(&claim.key));
    claim.deleting && (replaced || !has_addresses(input, claim) || !is_used())
}

pub(super) fn has_addresses(input: &MachineInput<'_>, claim: &ClaimState) -> bool {
    !claim.published().is_empty() || (input.reserved_in)(&claim.uid).is_some()
}

fn owned_by_vm(
    input: &MachineInput<'_>,
    claim: &ClaimState,
    owner: &OwnerRef,
    replaced: bool,
) -> Option<ClaimStep> {
    if !is_known(input.kinds.vm, claim) || !is_known(input.kinds.vmi, claim) {
        return None;
    }
    let vm = input.vm.filter(|vm| vm.uid == owner.uid);
    if vm.is_some_and(|vm| !vm.deleting) {
        return if may_go(input, claim, replaced) { remove_finalizer(claim, Vec::new()) } else { None };
    }
    if let Some(vmi) = input.vmi {
        if vmi.controller.as_ref().is_some_and(|controller| controller.uid == owner.uid) {
            return None;
        }
        // The VirtualMachine was deleted without its instance: the claim follows the instance.
        let uses = || input.pods.iter().any(|pod| pod.is_launcher_of(&vmi.uid) && pod.references(&claim.key));
        let is_alone = vmi.controller.is_none() && !vmi.deleting;
        if is_alone && uses() {
            if claim.deleting {
                return None;
            }
            return set_owner(claim, desired_owner(input.key, vmi));
        }
        // The garbage collector removes the owner. A claim without the finalizer would then stay forever.
        if is_alone && vm.is_some() && !claim.deleting {
            return None;
        }
    }
    let key = owner_key(claim, owner);
    let mut gone = vec![GoneCheck::NoInstanceOf { key: key.clone(), vm: owner.uid.clone() }];
    if vm.is_none() {
        gone.push(GoneCheck::Object { kind: owner.kind, key, uid: owner.uid.clone() });
    }
    remove_finalizer(claim, gone)
}

fn owned_by_vmi(
    input: &MachineInput<'_>,
    claim: &ClaimState,
    owner: &OwnerRef,
    replaced: bool,
) -> Option<ClaimStep> {
    if !is_known(input.kinds.vmi, claim) {
        return None;
    }
    let (key, uid) = (owner_key(claim, owner), owner.uid.clone());
    let Some(vmi) = input.vmi.filter(|vmi| vmi.uid == owner.uid) else {
        return remove_finalizer(claim, vec![GoneCheck::Object { kind: owner.kind, key, uid }]);
    };
    if vmi.deleting && vmi.active_pods == 0 {
        // Waiting for the instance to go would block a foreground deletion, which waits for the claim.
        return remove_finalizer(claim, vec![GoneCheck::Inactive { key, uid }]);
    }
    if may_go(input, claim, replaced) {
        return remove_finalizer(claim, Vec::new());
    }
    let desired = desired_owner(input.key, vmi);
    let changes = !claim.deleting && desired != *owner && fits(claim, vmi) && lives(input, &desired);
    if changes { set_owner(claim, desired) } else { None }
}

/// Whether the instance becomes the owner of a claim without one.
pub(super) fn is_adopted(input: &MachineInput<'_>, claim: &ClaimState, vmi: &VmiFacts) -> bool {
    let may = claim.owner_count == 0 && !vmi.deleting && !claim.deleting;
    let others = input.pods.iter().any(|pod| pod.uses(&claim.key) && !pod.is_launcher_of(&vmi.uid));
    may && !others && names::is_adoptable(input.key, claim, vmi, input.pods)
}

/// The owner that a claim without one gets: an instance or its VirtualMachine, or a stopped VirtualMachine.
fn adopter(input: &MachineInput<'_>, claim: &ClaimState) -> Option<OwnerRef> {
    let has = |networks: &[super::MachineNetwork]| {
        networks.iter().any(|network| !network.absent && is_claim_of(input.key, claim, network))
    };
    if let Some(vmi) = input.vmi {
        let uses = || input.pods.iter().any(|pod| pod.uses(&claim.key));
        let adopts = is_adopted(input, claim, vmi) && (uses() || has(&vmi.networks));
        return adopts.then(|| desired_owner(input.key, vmi));
    }
    let vm = input.vm.filter(|vm| !vm.deleting && has(&vm.networks))?;
    let is_used = input.pods.iter().any(|pod| pod.uses(&claim.key));
    (!claim.deleting && claim.is_unused() && !is_used).then(|| OwnerRef {
        kind: OwnerKind::VirtualMachine,
        name: input.key.name.clone(),
        uid: vm.uid.clone(),
    })
}

/// Whether a claim lost its virtual machine, or waits for it.
fn is_orphan(input: &MachineInput<'_>, claim: &ClaimState) -> bool {
    let known = is_known(input.kinds.vm, claim) && is_known(input.kinds.vmi, claim);
    let ours = claim.is_ours() && claim.has_finalizer() && !claim.deleting && claim.owner.is_none();
    let labelled =
        claim.owner_count == 0 && claim.label.as_deref() == Some(&names::label_value(&input.key.name));
    let is_used = || input.pods.iter().any(|pod| pod.uses(&claim.key));
    known && ours && labelled && input.vm.is_none() && input.vmi.is_none() && !is_used()
}

/// Until when a claim without a virtual machine is kept, and the event that says so. No time means for good.
pub(super) fn keeps_until(
    input: &MachineInput<'_>,
    claim: &ClaimState,
) -> Option<(Option<Timestamp>, ClaimEvent)> {
    if !is_orphan(input, claim) {
        return None;
    }
    let until = claim.created.saturating_add(ORPHAN_TTL).ok()?;
    let (key, keep) = (&claim.key, claim.annotations.keep);
    let limit = if keep {
        format!("for good, by annotation {KEEP_ANNOTATION}")
    } else {
        format!("until {until}; to keep it for good, set annotation {KEEP_ANNOTATION}: \"true\"")
    };
    let note = format!("virtual machine {} does not exist; IPAMClaim {key} is kept {limit}", input.key);
    let event = ClaimEvent { warning: false, reason: KEPT, note };
    (keep || until > input.now).then_some(((!keep).then_some(until), event))
}

/// Whether a future owner exists and is not being deleted. The garbage collector deletes a claim whose owner is gone.
fn lives(input: &MachineInput<'_>, owner: &OwnerRef) -> bool {
    owner.kind != OwnerKind::VirtualMachine || input.vm.is_some_and(|vm| vm.uid == owner.uid && !vm.deleting)
}

/// A claim without any owner and with the label of the machine: its VirtualMachine was deleted alone.
fn unowned(input: &MachineInput<'_>, claim: &ClaimState) -> Option<ClaimStep> {
    if claim.owner_count > 0 {
        return finalizer_step(claim, input.pods);
    }
    if claim.label.as_deref() != Some(&names::label_value(&input.key.name)) {
        return None;
    }
    let is_known = is_known(input.kinds.vm, claim) && is_known(input.kinds.vmi, claim);
    let adopter = adopter(input, claim).filter(|_| is_known);
    if !claim.is_ours() && adopter.is_none() {
        return finalizer_step(claim, input.pods);
    }
    if !is_known {
        return None;
    }
    if let Some(owner) = adopter {
        // While a VirtualMachine is deleted alone, the garbage collector removes it as owner of the claim and of the instance.
        return if lives(input, &owner) { set_owner(claim, owner) } else { None };
    }
    let is_used = input.pods.iter().any(|pod| pod.uses(&claim.key));
    if input.vm.is_some() || input.vmi.is_some() || is_used {
        return if may_go(input, claim, false) { remove_finalizer(claim, Vec::new()) } else { None };
    }
    if !claim.deleting {
        // The garbage collector deletes nothing that has no owner.
        if !claim.has_finalizer() || keeps_until(input, claim).is_some() {
            return None;
        }
        let note = format!(
            "virtual machine {} is gone; deleted IPAMClaim {}, its addresses become free",
            input.key, claim.key
        );
        return Some(delete(input, claim, DeleteReason::Unplugged, note));
    }
    let check = |kind| GoneCheck::Name { kind, key: input.key.clone() };
    let gone = [OwnerKind::VirtualMachine, OwnerKind::VirtualMachineInstance].map(check);
    remove_finalizer(claim, gone.into())
}

/// Whether the absence of an object means that it is gone. If the cluster does not have the kind any more, only claims that
/// are being deleted may go.
fn is_known(kind: KindState, claim: &ClaimState) -> bool {
    match kind {
        KindState::Listed => true,
        KindState::Absent => claim.deleting,
        KindState::NotServed => false,
    }
}

fn owner_key(claim: &ClaimState, owner: &OwnerRef) -> ObjectKey {
    ObjectKey { namespace: claim.key.namespace.clone(), name: owner.name.clone() }
}

/// `None` if other objects own the claim too: the owner is then not ours to change.
fn set_owner(claim: &ClaimState, owner: OwnerRef) -> Option<ClaimStep> {
    let (uid, version) = (claim.uid.clone(), claim.version.clone());
    let step = ClaimStep::SetOwner { claim: claim.key.clone(), uid, version, owner };
    (claim.owner_count <= 1).then_some(step)
}

/// `None` if the claim does not have the finalizer.
fn remove_finalizer(claim: &ClaimState, gone: Vec<GoneCheck>) -> Option<ClaimStep> {
    let left: Vec<String> = claim.finalizers.iter().filter(|one| *one != FINALIZER).cloned().collect();
    let removed = left.len() < claim.finalizers.len();
    let (claim, uid, version) = (claim.key.clone(), claim.uid.clone(), claim.version.clone());
    removed.then_some(ClaimStep::RemoveFinalizer { claim, uid, version, left, gone })
}
