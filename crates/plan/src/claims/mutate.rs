//! The references to claims that the mutating webhook adds to launcher pods.

use std::collections::HashMap;

use api::{
    ipamclaim::CLAIM_KEY,
    nad::NadIpam,
    selection::{self, NadRef, NetworkSelection, NetworkSelectionElement, SelectionEditor},
};
use serde_json::Value;

use super::{
    ClaimOptions, ClaimPod, ClaimState, MachineNetwork, NadLookup, ObjectKey, VmiFacts,
    machine::{is_element_of, started_without},
    names,
};

/// A launcher pod that is created or updated.
#[derive(Clone, Copy)]
pub struct MutateInput<'a> {
    pub namespace: &'a str,
    /// The networks annotation.
    pub annotation: &'a str,
    /// The networks annotation of the stored pod, on UPDATE.
    pub old_annotation: Option<&'a str>,
    pub vmi: &'a VmiFacts,
    pub vmi_name: &'a str,
    /// The live launchers of the instance.
    pub launchers: &'a [&'a ClaimPod],
    pub nads: &'a dyn Fn(&NadRef) -> NadLookup,
    /// The claim of a name in the namespace.
    pub claims: &'a dyn Fn(&str) -> Option<ClaimState>,
    pub options: ClaimOptions,
}

/// The networks annotation with references; `None` if it stays as it is.
///
/// An element that the stored pod has keeps what it has there: KubeVirt writes the whole annotation again when an interface is
/// plugged or unplugged, and its elements never have a reference.
pub fn references(input: &MutateInput<'_>) -> Result<Option<String>, selection::Error> {
    let mut editor = SelectionEditor::parse(Some(input.annotation))?;
    let elements: Vec<Option<NetworkSelectionElement>> =
        editor.entries().map(|entry| entry.element.clone().ok()).collect();
    let old = NetworkSelection::parse(input.old_annotation);
    let old: Vec<&NetworkSelectionElement> =
        old.entries.iter().filter_map(|entry| entry.element.as_ref().ok()).collect();
    let key = ObjectKey::new(input.namespace, input.vmi_name);
    let networks = &input.vmi.networks;
    let names = names::assign(&key, input.vmi, input.launchers, input.claims);
    let mut changed = false;
    // By NAD: how many elements without a hashed interface came before, and the elements of the stored pod without interface.
    let mut positions: HashMap<NadRef, usize> = HashMap::new();
    let mut unnamed: HashMap<NadRef, Vec<&NetworkSelectionElement>> = HashMap::new();
    for element in old.iter().filter(|element| element.interface.is_none()) {
        unnamed.entry(element.reference(input.namespace)).or_default().push(element);
    }
    for (index, element) in elements.iter().enumerate() {
        let Some(element) = element else { continue };
        let nad = element.reference(input.namespace);
        let position = positions.get(&nad).copied().unwrap_or_default();
        if !is_hashed(element) {
            positions.insert(nad.clone(), position + 1);
        }
        if has_claim(element) {
            continue;
        }
        let stored = match &element.interface {
            Some(_) => old.iter().find(|one| one.interface == element.interface).copied(),
            None => unnamed.get(&nad).and_then(|same| same.get(position).copied()),
        };
        let claim = match stored {
            Some(stored) => stored.ipam_claim.clone().filter(|claim| !claim.is_empty()),
            None => network_of(networks, element, &nad, position)
                .filter(|network| is_persistent(input, element) || started_with(input, network))
                .filter(|network| !started_without(&input.vmi.uid, network, input.launchers))
                .and_then(|network| names.get(&network.name))
                .map(|name| name.as_str().to_owned()),
        };
        if let Some(claim) = claim {
            editor.set(index, CLAIM_KEY, &Value::String(claim))?;
            changed = true;
        }
    }
    if !changed {
        return Ok(None);
    }
    Ok(editor.finish()?.filter(|text| text != input.annotation))
}

fn has_claim(element: &NetworkSelectionElement) -> bool {
    element.ipam_claim.as_ref().is_some_and(|claim| !claim.is_empty())
}

/// Whether the name of an interface is one that KubeVirt derives from the network, not from the position.
fn is_hashed(element: &NetworkSelectionElement) -> bool {
    element.interface.as_ref().is_some_and(|name| name.as_str().starts_with("pod"))
}

/// The network of an element: by the hashed name of its interface, else by its NAD and the order.
fn network_of<'a>(
    networks: &'a [MachineNetwork],
    element: &NetworkSelectionElement,
    nad: &NadRef,
    position: usize,
) -> Option<&'a MachineNetwork> {
    if is_hashed(element) {
        let interface = element.interface.as_ref()?;
        return networks.iter().find(|network| *network.pod_interface == *interface.as_str());
    }
    networks.iter().filter(|network| network.nad == *nad && !network.absent).nth(position)
}

/// Whether a live launcher of the instance references a claim for this network. All pods of one instance are alike, so
/// that a migration keeps the addresses after persistence was switched off.
fn started_with(input: &MutateInput<'_>, network: &MachineNetwork) -> bool {
    let launchers = input.launchers.iter().filter(|pod| pod.is_launcher_of(&input.vmi.uid));
    let mut elements = launchers.flat_map(|pod| &pod.elements);
    elements.any(|element| element.claim.is_some() && is_element_of(element, network))
}

/// Whether the NAD of an element gives persistent addresses, and finds the claim in the namespace of the pod.
fn is_persistent(input: &MutateInput<'_>, element: &NetworkSelectionElement) -> bool {
    let nad = element.reference(input.namespace);
    match (input.nads)(&nad) {
        NadLookup::Found(config) => {
            let foreign = config.ipam == NadIpam::Ovn && nad.namespace != input.namespace;
            config.persistent && (!foreign || input.options.reference_foreign_nads)
        }
        NadLookup::Absent | NadLookup::Invalid(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use api::nad::NadNetwork;
    use jiff::Timestamp;

    use super::*;
    use crate::claims::{OwnerKind, OwnerRef, PodElement};

    fn network(name: &str, nad: &str) -> MachineNetwork {
        let pod_interface = format!("pod{:0>11x}", api::digest::digest([name]) & 0xfff_ffff_ffff);
        let nad = NadRef::parse(nad, "ns").unwrap();
        let pod_interface = pod_interface[..14].into();
        MachineNetwork { name: name.into(), nad, pod_interface, absent: false, in_status: false }
    }

    fn instance(networks: &[(&str, &str)]) -> VmiFacts {
        VmiFacts {
            uid: "vmi-1".to_owned(),
            controller: Some(OwnerRef {
                kind: OwnerKind::VirtualMachine,
                name: "vm1".into(),
                uid: "vm-1".to_owned(),
            }),
            deleting: false,
            finished: false,
            active_pods: 0,
            networks: networks.iter().map(|(name, nad)| network(name, nad)).collect(),
            addresses: None,
        }
    }

    /// NADs by name: `ovn` of OVN-Kubernetes, `off` not persistent, `bad` invalid, `gone` absent; others are ours.
    fn nads(at: &NadRef) -> NadLookup {
        let found = |persistent: bool, ipam: NadIpam| {
            NadLookup::Found(NadNetwork { name: at.name.clone(), persistent, ipam })
        };
        match at.name.as_str() {
            "gone" => NadLookup::Absent,
            "bad" => NadLookup::Invalid("no JSON".to_owned()),
            "off" => found(false, NadIpam::Patchbay { network: "off".to_owned() }),
            "ovn" => found(true, NadIpam::Ovn),
            name => found(true, NadIpam::Patchbay { network: name.to_owned() }),
        }
    }

    fn mutate(vmi: &VmiFacts, old: Option<&str>, pods: &[&ClaimPod], annotation: &str) -> Option<String> {
        let input = MutateInput {
            namespace: "ns",
            annotation,
            old_annotation: old,
            vmi,
            vmi_name: "vm1",
            launchers: pods,
            nads: &nads,
            claims: &|_: &str| None,
            options: ClaimOptions::default(),
        };
        references(&input).unwrap()
    }

    /// What KubeVirt writes for these networks.
    fn elements(vmi: &VmiFacts) -> String {
        let element = |network: &MachineNetwork| {
            let NadRef { namespace, name } = &network.nad;
            let interface = &network.pod_interface;
            format!(r#"{{"name":"{name}","namespace":"{namespace}","interface":"{interface}"}}"#)
        };
        format!("[{}]", vmi.networks.iter().map(element).collect::<Vec<_>>().join(","))
    }

    fn claims_in(annotation: &str) -> Vec<Option<String>> {
        let entries = NetworkSelection::parse(Some(annotation)).entries;
        entries.into_iter().map(|entry| entry.element.unwrap().ipam_claim).collect()
    }

    fn launcher(vmi: &VmiFacts, networks: &[(&MachineNetwork, Option<&str>)]) -> ClaimPod {
        let element = |(network, claim): &(&MachineNetwork, Option<&str>)| PodElement {
            interface: Some(network.pod_interface.clone()),
            nad: network.nad.clone(),
            claim: claim.map(Into::into),
        };
        ClaimPod {
            key: ObjectKey::new("ns", "virt-launcher-vm1"),
            uid: "pod-1".to_owned(),
            created: Timestamp::UNIX_EPOCH,
            deleting: false,
            launcher: true,
            controller: Some(OwnerRef {
                kind: OwnerKind::VirtualMachineInstance,
                name: "vm1".into(),
                uid: vmi.uid.clone(),
            }),
            elements: networks.iter().map(element).collect(),
            attached: Box::default(),
            primary: Box::default(),
            has_status: true,
        }
    }

    #[test]
    fn each_element_gets_the_claim_of_its_network_and_bad_nads_affect_only_their_own() {
        let vmi = instance(&[
            ("a", "blue"),
            ("b", "blue"),
            ("c", "gone"),
            ("d", "bad"),
            ("e", "off"),
            ("f", "ovn"),
            ("g", "other/ovn"),
            ("h", "other/blue"),
        ]);
        let mutated = mutate(&vmi, None, &[], &elements(&vmi)).unwrap();
        let expected = ["vm1.a", "vm1.b", "", "", "", "vm1.f", "", "vm1.h"];
        let expected: Vec<Option<String>> =
            expected.iter().map(|name| (!name.is_empty()).then(|| (*name).to_owned())).collect();
        assert_eq!(claims_in(&mutated), expected);
        assert_eq!(mutate(&vmi, None, &[], &mutated), None, "idempotent");
    }

    #[test]
    fn everything_but_the_reference_keeps_its_bytes() {
        let vmi = instance(&[("a", "blue")]);
        let interface = &vmi.networks[0].pod_interface;
        let text = format!(
            r#"[ {{"vendor": {{"k": 1.50}}, "name":"blue", "deviceID":"0000:1","interfaceRequest":"{interface}" }} ]"#
        );
        let mutated = mutate(&vmi, None, &[], &text).unwrap();
        let (start, rest) = mutated.split_once(r#""ipam-claim-reference":"vm1.a""#).unwrap();
        assert!(text.starts_with(start.trim_end_matches(", ").trim_end_matches(',').trim_end()), "{mutated}");
        assert!(text.ends_with(rest.trim_start()), "{mutated}");
    }

    #[test]
    fn names_separated_by_commas_become_json_and_match_by_nad_and_order() {
        let vmi = instance(&[("a", "blue"), ("b", "red"), ("c", "blue")]);
        let mutated = mutate(&vmi, None, &[], "blue, ns/red@net2,blue@net3").unwrap();
        let claims: Vec<_> = claims_in(&mutated).into_iter().map(Option::unwrap).collect();
        assert_eq!(claims, ["vm1.a", "vm1.b", "vm1.c"]);
        assert!(mutated.starts_with('['), "{mutated}");
        assert_eq!(mutate(&instance(&[]), None, &[], "blue"), None, "no network of the machine");
    }

    /// While a hot-plug is pending, KubeVirt writes the annotation from scratch on every sync.
    #[test]
    fn an_update_restores_the_references_of_the_stored_pod_and_adds_new_networks() {
        let stored_vmi = instance(&[("a", "blue"), ("b", "red")]);
        let stored = mutate(&stored_vmi, None, &[], &elements(&stored_vmi)).unwrap();
        assert_eq!(mutate(&stored_vmi, Some(&stored), &[], &elements(&stored_vmi)), Some(stored.clone()));
        let vmi = instance(&[("a", "blue"), ("b", "red"), ("c", "blue")]);
        let mutated = mutate(&vmi, Some(&stored), &[], &elements(&vmi)).unwrap();
        let claims: Vec<_> = claims_in(&mutated).into_iter().map(Option::unwrap).collect();
        assert_eq!(claims, ["vm1.a", "vm1.b", "vm1.c"]);
        // An interface that started without a reference gets none.
        let plain = elements(&stored_vmi);
        let mutated = mutate(&vmi, Some(&plain), &[], &elements(&vmi)).unwrap();
        assert_eq!(claims_in(&mutated), [None, None, Some("vm1.c".to_owned())]);
    }

    #[test]
    fn a_target_of_an_instance_that_started_without_a_reference_gets_none() {
        let vmi = instance(&[("a", "blue"), ("b", "red")]);
        let (a, b) = (&vmi.networks[0], &vmi.networks[1]);
        let source = launcher(&vmi, &[(a, None), (b, Some("vm1.b"))]);
        let mutated = mutate(&vmi, None, &[&source], &elements(&vmi)).unwrap();
        assert_eq!(claims_in(&mutated), [None, Some("vm1.b".to_owned())]);
        let earlier = ClaimPod {
            controller: Some(OwnerRef {
                kind: OwnerKind::VirtualMachineInstance,
                name: "vm1".into(),
                uid: "vmi-0".to_owned(),
            }),
            ..source
        };
        let mutated = mutate(&vmi, None, &[&earlier], &elements(&vmi)).unwrap();
        assert_eq!(claims_in(&mutated).iter().flatten().count(), 2, "a pod of the instance before");
    }

    #[test]
    fn a_target_keeps_the_reference_after_persistence_was_switched_off() {
        let vmi = instance(&[("a", "off"), ("b", "off")]);
        let (a, b) = (&vmi.networks[0], &vmi.networks[1]);
        let source = launcher(&vmi, &[(a, Some("vm1.a")), (b, None)]);
        let mutated = mutate(&vmi, None, &[&source], &elements(&vmi)).unwrap();
        assert_eq!(claims_in(&mutated), [Some("vm1.a".to_owned()), None]);
        assert_eq!(mutate(&vmi, None, &[], &elements(&vmi)), None, "a new instance gets none");
    }

    #[test]
    fn an_annotation_that_cannot_be_parsed_is_an_error() {
        let vmi = instance(&[("a", "blue")]);
        let input = MutateInput {
            namespace: "ns",
            annotation: "[{",
            old_annotation: None,
            vmi: &vmi,
            vmi_name: "vm1",
            launchers: &[],
            nads: &nads,
            claims: &|_: &str| None,
            options: ClaimOptions::default(),
        };
        assert!(references(&input).is_err());
    }
}
