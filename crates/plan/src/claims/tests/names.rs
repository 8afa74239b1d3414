use super::{super::names::*, *};

#[test]
fn names_are_those_of_ipam_extensions() {
    for (vmi, network, expected) in [
        ("vm1", "blue", "vm1.blue"),
        ("vm1", "net_a", "vm1.net.a"),
        ("vm1", "Net-A", "vm1.net-a"),
        ("vm1", "-x-", "vm1.x"),
        ("vm.a", "b", "vm.a.b"),
        ("vm", "a_b", "vm.a.b"),
        ("vm", "a--b..c", "vm.a--b.c"),
        ("vm", "__", "vm"),
        ("vm", "ü1", "vm.1"),
    ] {
        assert_eq!(compose_key(vmi, network), expected, "{vmi} {network}");
    }
    assert_eq!(compose_key(&"x".repeat(250), "abcdef").len(), 253);
}

#[test]
fn long_names_and_labels_get_a_digest() {
    let long = "x".repeat(60) + "." + &"y".repeat(60);
    assert_eq!(label_value("vm1"), "vm1");
    let label = label_value(&long);
    assert!(label.len() <= 63 && label.starts_with(&"x".repeat(54)), "{label}");
    assert_ne!(label, label_value(&(long.clone() + "y")));
    let trimmed = label_value(&("x".repeat(50) + "....." + &"y".repeat(60)));
    assert!(trimmed.starts_with(&("x".repeat(50) + "-")), "{trimmed}");
    let name = suffixed(&"z".repeat(253), "ns", "vm1", "blue");
    assert_eq!(name.len(), 253);
    assert_ne!(name, suffixed(&"z".repeat(253), "ns", "vm1", "red"));
}

fn assigned(
    vmi: &VmiFacts,
    pods: &[&ClaimPod],
    claims: &[ClaimState],
) -> Vec<(String, bool, Option<String>)> {
    let by_name = |name: &str| claims.iter().find(|claim| *claim.key.name == *name).cloned();
    let names = assign(&key("vm1"), vmi, pods, &by_name);
    let row = |name: ClaimName| match name {
        ClaimName::Legacy(name) => (name, true, None),
        ClaimName::Suffixed { name, conflict } => (name, false, conflict),
    };
    vmi.networks.iter().map(|network| row(names[&network.name].clone())).collect()
}

#[test]
fn a_name_that_belongs_to_another_claim_gets_a_suffix() {
    let ours = vmi("i1", Some(vm_owner("v1")), &[network("blue")]);
    let legacy = vec![("vm1.blue".to_owned(), true, None)];
    let other = OwnerRef { name: "vm1.x".into(), ..vm_owner("v9") };
    let foreign = OwnerRef { kind: OwnerKind::Other, name: "job".into(), uid: "j".to_owned() };
    let mut unlabelled = claim("vm1.blue", None);
    unlabelled.label = None;
    let with_interface =
        |text: &str| ClaimState { interface: text.into(), ..claim("vm1.blue", Some(vm_owner("v1"))) };
    for (claims, expected) in [
        (vec![], None),
        (vec![claim("vm1.blue", Some(vm_owner("v1")))], None),
        (vec![claim("vm1.blue", Some(vmi_owner("i1")))], None),
        (vec![with_interface(&interface("blue"))], None),
        (vec![with_interface("net1")], None),
        (vec![with_interface(&interface("BLUE"))], Some("another interface of VirtualMachine vm1")),
        // A predecessor of the name: wait.
        (vec![claim("vm1.blue", Some(vm_owner("v0")))], None),
        // A lone instance of the name is not a predecessor of the machine.
        (vec![claim("vm1.blue", Some(vmi_owner("i0")))], Some("VirtualMachineInstance vm1")),
        (vec![claim("vm1.blue", Some(other))], Some("VirtualMachine vm1.x")),
        (vec![claim("vm1.blue", Some(foreign))], Some("object job")),
        (vec![unlabelled], Some("no virtual machine")),
        (vec![used(claim("vm1.blue", None))], Some("no virtual machine")),
        // One from a backup.
        (vec![restored("vm1.blue", &[])], None),
    ] {
        let names = assigned(&ours, &[], &claims);
        let Some(belongs) = expected else {
            assert_eq!(names, legacy, "{claims:?}");
            continue;
        };
        let name = suffixed("vm1.blue", "ns", "vm1", "blue");
        let conflict = format!(
            "IPAMClaim ns/vm1.blue belongs to {belongs}; interface blue uses IPAMClaim ns/{name} instead"
        );
        assert_eq!(names, [(name, false, Some(conflict))], "{claims:?}");
    }
}

#[test]
fn networks_whose_names_collide_keep_their_claims_in_any_order() {
    let names = |order: &[&str], claims: &[ClaimState]| {
        let networks: Vec<MachineNetwork> = order.iter().map(|name| network(name)).collect();
        assigned(&vmi("i1", Some(vm_owner("v1")), &networks), &[], claims)
    };
    let fresh = names(&["N1", "n1"], &[]);
    assert!(
        fresh[0].1
            && !fresh[1].1
            && fresh[1].2.as_ref().unwrap().contains("interface N1 of VirtualMachine vm1")
    );
    let made =
        |name: &str, of: &str| ClaimState { interface: interface(of), ..claim(name, Some(vm_owner("v1"))) };
    let claims = [made(&fresh[0].0, "N1"), made(&fresh[1].0, "n1")];
    let reversed = names(&["n1", "N1"], &claims);
    assert_eq!((&reversed[0].0, &reversed[1].0), (&fresh[1].0, &fresh[0].0));
    // The other one was unplugged.
    assert_eq!(names(&["n1"], &claims[1..])[0].0, fresh[1].0);
    // A claim of ipam-extensions goes to the first network.
    let legacy = names(&["n1", "N1"], &[claim("vm1.n1", Some(vm_owner("v1")))]);
    assert!(legacy[0].1 && !legacy[1].1);
}

#[test]
fn all_pods_of_an_instance_reference_the_same_claim() {
    let name = suffixed("vm1.blue", "ns", "vm1", "blue");
    let ours = vmi("i1", None, &[network("blue")]);
    let pod = launcher("i1", &[("blue", Some(&name))]);
    assert_eq!(assigned(&ours, &[&pod], &[])[0].0, name);
    let earlier = launcher("i0", &[("blue", Some(&name))]);
    assert_eq!(assigned(&ours, &[&earlier], &[])[0].0, "vm1.blue");
    // An instance without its machine keeps the claim that lost its owner.
    let pod = launcher("i1", &[("blue", Some("vm1.blue"))]);
    assert_eq!(assigned(&ours, &[&pod], &[claim("vm1.blue", None)])[0].0, "vm1.blue");
}

#[test]
fn a_referenced_claim_of_another_machine_is_not_used() {
    let ours = vmi("i1", Some(vm_owner("v1")), &[network("blue")]);
    let pod = launcher("i1", &[("blue", Some("vm1.blue"))]);
    let named = |name: &str, owner: OwnerRef| OwnerRef { name: name.into(), ..owner };
    let job = OwnerRef { kind: OwnerKind::Other, ..named("job", vm_owner("j")) };
    for (claims, foreign) in [
        (vec![], None),
        (vec![claim("vm1.blue", Some(vm_owner("v1")))], None),
        (vec![claim("vm1.blue", Some(vm_owner("v0")))], None),
        (vec![claim("vm1.blue", Some(vmi_owner("i0")))], None),
        (vec![claim("vm1.blue", None)], None),
        (vec![claim("vm1.blue", Some(job))], None),
        (vec![claim("vm1.blue", Some(named("vm1.x", vm_owner("v9"))))], Some("VirtualMachine vm1.x")),
        (
            vec![claim("vm1.blue", Some(named("vm1.x", vmi_owner("i9"))))],
            Some("VirtualMachineInstance vm1.x"),
        ),
    ] {
        let names = assigned(&ours, &[&pod], &claims);
        let Some(belongs) = foreign else {
            assert_eq!(names, [("vm1.blue".to_owned(), true, None)], "{claims:?}");
            continue;
        };
        let name = suffixed("vm1.blue", "ns", "vm1", "blue");
        let conflict = format!(
            "IPAMClaim ns/vm1.blue belongs to {belongs}; interface blue uses IPAMClaim ns/{name} instead; restart the VM to \
             use it, because its pod references the claim of another virtual machine"
        );
        assert_eq!(names, [(name.clone(), false, Some(conflict))], "{claims:?}");
        // Its own claim exists then.
        let both = [claims, vec![claim(&name, Some(vm_owner("v1")))]].concat();
        assert_eq!(assigned(&ours, &[&pod], &both), [(name, false, None)]);
    }
}
