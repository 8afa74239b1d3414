//! Claims of other controllers.

use super::*;

/// A claim of ipam-extensions for the primary network, or for an interface that the machine does not have any more.
fn foreign(machine: &mut Machine) {
    machine.claims[0] = claim("vm1.default", Some(vm_owner("v1")));
    machine.claims[0].annotations.managed = false;
    machine.claims[0].status.ips = vec!["10.0.0.3/24".to_owned()];
    machine.vm = Some(vm("v1", &[]));
    machine.vmi = Some(vmi("i1", Some(vm_owner("v1")), &[]));
    machine.pods = vec![launcher("i1", &[])];
    machine.reserved_in = None;
}

#[test]
fn a_claim_that_no_plan_contained_is_never_deleted() {
    for change in [
        (|_| {}) as fn(&mut Machine),
        |machine| machine.pods.clear(),
        |machine| {
            machine.pods.clear();
            machine.vmi = None;
        },
        |machine| machine.nad = NadLookup::Found(config("red", NadIpam::Ovn)),
        // The finalizer stays until the garbage collector deletes it.
        |machine| {
            machine.pods.clear();
            (machine.vm, machine.vmi) = (None, None);
        },
        |machine| {
            machine.pods.clear();
            (machine.vm, machine.vmi) = (None, None);
            (machine.claims[0].owner, machine.claims[0].owner_count) = (None, 0);
        },
    ] {
        check("", |machine| {
            foreign(machine);
            change(machine);
        });
    }
}

#[test]
fn its_finalizer_goes_once_it_is_being_deleted_and_no_pod_uses_it() {
    let deleting = |machine: &mut Machine| {
        foreign(machine);
        machine.claims[0].deleting = true;
    };
    let off = "off ns/vm1.default: pods of ns/vm1.default ipam-extensions";
    check(off, deleting);
    check(off, |machine| {
        deleting(machine);
        machine.kinds = KindsKnown { vm: KindState::NotServed, vmi: KindState::NotServed };
        (machine.vm, machine.vmi) = (None, None);
    });
    // A pod names it for its primary network.
    check("", |machine| {
        deleting(machine);
        machine.pods[0].primary = Box::new(["vm1.default".into()]);
    });
    // The claims of ipam-extensions have the owner or the label of a machine.
    let lone = |change: fn(&mut ClaimState)| {
        let mut claim = ClaimState { deleting: true, label: None, ..claim("x", None) };
        claim.annotations.managed = false;
        change(&mut claim);
        match machine::finalizer_step(&claim, &[]) {
            Some(ClaimStep::RemoveFinalizer { gone, .. }) => gone.len(),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(lone(|_| {}), 1);
    assert_eq!(lone(|claim| claim.owner_count = 2), 1);
    assert_eq!(lone(|claim| claim.label = Some("vm1".into())), 2);
    let other = |claim: &mut ClaimState| {
        claim.owner = Some(OwnerRef { kind: OwnerKind::Other, ..vm_owner("x") });
        claim.label = Some("vm1".into());
    };
    assert_eq!(lone(other), 1);
}

#[test]
fn a_claim_becomes_ours_when_the_machine_has_its_interface() {
    let unmarked = |machine: &mut Machine| machine.claims[0].annotations.managed = false;
    check("mark ns/vm1.blue", unmarked);
    check("mark ns/vm1.blue", |machine| {
        unmarked(machine);
        machine.vmi = None;
    });
    // A version without the mark created it.
    check("mark ns/vm1.blue", |machine| {
        unmarked(machine);
        machine.claims[0].interface = interface("blue");
    });
    for change in [(|machine| machine.claims[0].finalizers.clear()) as fn(&mut Machine), |machine| {
        machine.claims[0].owner = Some(vm_owner("v0"));
    }] {
        let mut machine = running();
        unmarked(&mut machine);
        change(&mut machine);
        assert!(!machine.steps().iter().any(|step| step.starts_with("mark")), "{:?}", machine.steps());
    }
    // It was unplugged while no controller ran.
    check("unplug ns/vm1.blue", |machine| {
        machine.claims[0].interface = interface("blue");
        unmarked(machine);
        (machine.vm, machine.vmi) = (Some(vm("v1", &[])), None);
        machine.pods.clear();
    });
    // Another tool fills in the interface too.
    for change in [
        (|claim| claim.label = None) as fn(&mut ClaimState),
        |claim| claim.finalizers.clear(),
        |claim| (claim.owner, claim.owner_count) = (None, 0),
        |claim| claim.owner.as_mut().unwrap().kind = OwnerKind::Other,
    ] {
        let mut other = claim("vm1.blue", Some(vm_owner("v1")));
        (other.annotations.managed, other.interface) = (false, interface("blue"));
        assert!(other.is_ours());
        change(&mut other);
        assert!(!other.is_ours(), "{other:?}");
    }
}
