//! The addresses that the own pods of a claim have.

use std::{collections::BTreeSet, net::IpAddr};

use super::{ClaimPod, ClaimState, OwnerKind, VmiFacts, machine::fits};

/// The addresses that the own pods of a claim show on the interfaces which reference it. `pods` may contain others. `vmis`
/// returns the instance of a name in the namespace of the claim.
///
/// The own pods of a claim of a virtual machine are launchers of its owner. A plain pod or a pod of another machine may have
/// referenced an earlier claim of the name: its address stays with it.
pub fn addresses<'a>(
    claim: &ClaimState,
    pods: impl IntoIterator<Item = &'a ClaimPod>,
    vmis: impl Fn(&str) -> Option<&'a VmiFacts>,
) -> Vec<IpAddr> {
    let mut shown = BTreeSet::new();
    for pod in pods {
        if pod.key.namespace != claim.key.namespace || !is_own(claim, pod, &vmis) {
            continue;
        }
        let elements = pod.elements.iter().enumerate();
        for (index, element) in elements.filter(|(_, it)| it.claim.as_ref() == Some(&claim.key.name)) {
            let ordinal = format!("net{}", index + 1);
            let interface = element.interface.as_deref().unwrap_or(&ordinal);
            let attached = pod.attached.iter().filter(|attached| &*attached.interface == interface);
            shown.extend(attached.flat_map(|attached| attached.ips.iter().copied()));
        }
    }
    shown.into_iter().collect()
}

fn is_own<'a>(claim: &ClaimState, pod: &ClaimPod, vmis: &impl Fn(&str) -> Option<&'a VmiFacts>) -> bool {
    if !claim.has_machine_owner() {
        return true;
    }
    let controller = pod.controller.as_ref().filter(|it| it.kind == OwnerKind::VirtualMachineInstance);
    let vmi = controller.and_then(|controller| vmis(&controller.name));
    vmi.is_some_and(|vmi| pod.is_launcher_of(&vmi.uid) && fits(claim, vmi))
}
