//! Who owns a claim, and when the claim loses the finalizer that keeps it.

use api::ipamclaim::FINALIZER;

use super::{
    ClaimState, ObjectKey, OwnerKind, OwnerRef, VmiFacts,
    machine::{ClaimStep, DeleteReason, GoneCheck, KindState, MachineInput, desired_owner, fits},
    names,
    unplug::delete,
};

/// The step that a claim's owner requires: another owner, or the removal of the finalizer. `replaced` says that the
/// interface of the claim is on another network now.
pub(super) fn life_step(input: &MachineInput<'_>, claim: &ClaimState, replaced: bool) -> Option<ClaimStep> {
    let Some(owner) = &claim.owner else { return unowned(input, claim) };
    match owner.kind {
        OwnerKind::VirtualMachine => owned_by_vm(input, claim, owner, replaced),
        OwnerKind::VirtualMachineInstance => owned_by_vmi(input, claim, owner, replaced),
        OwnerKind::Other => None,
    }
}

/// Whether a claim that is being deleted while its owner lives may go: it is replaced, no pod references it, or it has no
/// address that a pod could have. Another one takes its place.
fn may_go(input: &MachineInput<'_>, claim: &ClaimState, replaced: bool) -> bool {
    let is_used = || input.pods.iter().any(|pod| pod.references(&claim.key));
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
    may && names::is_adoptable(input.key, claim, vmi, input.pods)
}

/// Whether a future owner exists and is not being deleted. The garbage collector deletes a claim whose owner is gone.
fn lives(input: &MachineInput<'_>, owner: &OwnerRef) -> bool {
    owner.kind != OwnerKind::VirtualMachine || input.vm.is_some_and(|vm| vm.uid == owner.uid && !vm.deleting)
}

/// A claim without any owner and with the label of the machine: its VirtualMachine was deleted alone.
fn unowned(input: &MachineInput<'_>, claim: &ClaimState) -> Option<ClaimStep> {
    if claim.owner_count > 0 || !is_known(input.kinds.vm, claim) || !is_known(input.kinds.vmi, claim) {
        return None;
    }
    if claim.label.as_deref() != Some(&names::label_value(&input.key.name)) {
        return None;
    }
    if let Some(vmi) = input.vmi.filter(|vmi| is_adopted(input, claim, vmi)) {
        let owner = desired_owner(input.key, vmi);
        // While a VirtualMachine is deleted alone, the garbage collector removes it as owner of the claim and of the instance.
        return if lives(input, &owner) { set_owner(claim, owner) } else { None };
    }
    let is_used = input.pods.iter().any(|pod| pod.references(&claim.key));
    if input.vm.is_some() || input.vmi.is_some() || is_used {
        return if may_go(input, claim, false) { remove_finalizer(claim, Vec::new()) } else { None };
    }
    if !claim.deleting {
        // The garbage collector deletes nothing that has no owner.
        let ours = claim.finalizers.iter().any(|one| one == FINALIZER);
        let note = format!(
            "virtual machine {} is gone; deleted IPAMClaim {}, its addresses become free",
            input.key, claim.key
        );
        return ours.then(|| delete(input, claim, DeleteReason::Unplugged, note));
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
