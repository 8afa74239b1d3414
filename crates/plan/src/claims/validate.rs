//! Whether a pod may reference the claims that it references.

use api::selection::NETWORKS_ANNOTATION;

use super::{ClaimPod, ClaimState, OwnerKind, VmiFacts, machine::fits};

/// Checks the references of a pod; the error is the message of the denial. `vmi` is the instance that controls the pod,
/// `claims` returns the claim of a name in the pod's namespace.
///
/// A launcher of a later virtual machine of the same name may reference the claim: it waits at ADD until the claim is its
/// own.
pub fn references(
    pod: &ClaimPod,
    vmi: Option<&VmiFacts>,
    claims: &dyn Fn(&str) -> Option<ClaimState>,
) -> Result<(), String> {
    let references = pod.elements.iter().enumerate();
    for (index, claim) in references.filter_map(|(index, element)| Some((index, element.claim.as_ref()?))) {
        let Some(claim) = claims(claim).filter(ClaimState::has_machine_owner) else { continue };
        let Some(owner) = &claim.owner else { continue };
        let instance = pod.controller.as_ref().filter(|_| pod.launcher);
        let instance = instance.filter(|it| it.kind == OwnerKind::VirtualMachineInstance);
        let by_uid =
            instance.is_some_and(|it| owner.uid == it.uid) || vmi.is_some_and(|vmi| fits(&claim, vmi));
        let by_name = instance.is_some_and(|it| it.name == owner.name);
        if instance.is_none() || !(by_uid || by_name) {
            let namespace = &pod.key.namespace;
            return Err(format!(
                "pod is not a launcher of {} {namespace}/{}, which owns IPAMClaim {}; remove ipam-claim-reference from \
                 element [{index}] of {NETWORKS_ANNOTATION}",
                owner.kind, owner.name, claim.key
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use api::{IPAMClaimStatus, ipamclaim::ClaimAnnotations, selection::NadRef};
    use jiff::Timestamp;

    use super::*;
    use crate::claims::{ObjectKey, OwnerRef, PodElement};

    fn owner(kind: OwnerKind, name: &str, uid: &str) -> OwnerRef {
        OwnerRef { kind, name: name.into(), uid: uid.to_owned() }
    }

    fn claim(owner: Option<OwnerRef>) -> ClaimState {
        ClaimState {
            key: ObjectKey::new("a", "vm1.blue"),
            uid: "c".to_owned(),
            version: "1".to_owned(),
            created: Timestamp::UNIX_EPOCH,
            deleting: false,
            owner_count: usize::from(owner.is_some()),
            owner,
            finalizers: Vec::new(),
            label: None,
            network: "blue".into(),
            interface: "".into(),
            annotations: ClaimAnnotations::default(),
            status: IPAMClaimStatus::default(),
        }
    }

    fn pod(launcher: bool, controller: Option<OwnerRef>) -> ClaimPod {
        let element =
            PodElement { interface: None, nad: NadRef::new("a", "blue"), claim: Some("vm1.blue".into()) };
        ClaimPod {
            key: ObjectKey::new("a", "p"),
            uid: String::new(),
            created: Timestamp::UNIX_EPOCH,
            deleting: false,
            launcher,
            controller,
            elements: Box::new([element]),
            attached: Box::default(),
            primary: Box::default(),
            has_status: false,
        }
    }

    #[test]
    fn only_launchers_of_the_owner_may_reference_its_claim() {
        use OwnerKind::{Other, VirtualMachine, VirtualMachineInstance};
        let vm = || Some(owner(VirtualMachine, "vm1", "vm-1"));
        let instance = |name: &str, uid: &str| Some(owner(VirtualMachineInstance, name, uid));
        let lone = || Some(owner(VirtualMachineInstance, "vm1", "vmi-1"));
        for (claim_owner, launcher, controller, allowed) in [
            (vm(), true, instance("vm1", "vmi-1"), true),
            // A later machine of the name waits at ADD.
            (vm(), true, instance("vm1", "vmi-9"), true),
            (vm(), true, instance("vm2", "vmi-2"), false),
            (vm(), false, instance("vm1", "vmi-1"), false),
            (vm(), true, None, false),
            (vm(), true, Some(owner(Other, "vm1", "vm-1")), false),
            (lone(), true, instance("vm1", "vmi-1"), true),
            (lone(), true, instance("vm2", "vmi-2"), false),
            (Some(owner(Other, "set", "s")), false, None, true),
            (None, false, None, true),
        ] {
            let what = format!("{claim_owner:?} {launcher} {controller:?}");
            let claim = claim(claim_owner);
            let checked = references(&pod(launcher, controller), None, &|_: &str| Some(claim.clone()));
            assert_eq!(checked.is_ok(), allowed, "{what}: {checked:?}");
        }
        assert_eq!(references(&pod(false, None), None, &|_: &str| None), Ok(()), "unknown claim");
        let claim = claim(vm());
        assert_eq!(
            references(&pod(false, None), None, &|_: &str| Some(claim.clone())).unwrap_err(),
            "pod is not a launcher of VirtualMachine a/vm1, which owns IPAMClaim a/vm1.blue; remove \
             ipam-claim-reference from element [0] of k8s.v1.cni.cncf.io/networks"
        );
    }
}
