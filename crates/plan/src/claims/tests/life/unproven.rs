//! What cached objects and names do not prove.

use super::{super::super::machine::UnchangedCheck, *};

/// The cached machine may be older than the claim.
#[test]
fn a_claim_is_deleted_only_if_the_machine_is_still_what_the_plan_used() {
    let checked = |change: fn(&mut Machine)| {
        let mut machine = running();
        change(&mut machine);
        let [ClaimStep::Delete { unchanged, .. }] = &machine.plan().steps[..] else { panic!() };
        let vm = UnchangedCheck::Vm { key: key("vm1"), cached: machine.vm };
        let vmi = UnchangedCheck::Vmi { key: key("vm1"), cached: machine.vmi };
        (unchanged.clone(), vm, vmi)
    };
    // Unplugged while it runs, and while it is stopped; left behind without an owner.
    for change in [
        (|machine| {
            machine.vm.as_mut().unwrap().networks.clear();
            machine.vmi.as_mut().unwrap().networks.clear();
            machine.pods.clear();
        }) as fn(&mut Machine),
        |machine| {
            (machine.vm, machine.vmi) = (Some(vm("v1", &[])), None);
            machine.pods.clear();
        },
        |machine| {
            owned_by(machine, None);
            (machine.vm, machine.vmi) = (None, None);
            machine.pods.clear();
        },
    ] {
        let (unchanged, vm, vmi) = checked(change);
        assert_eq!(unchanged, [vm, vmi]);
    }
    // Replaced: the template does not matter.
    let (unchanged, _, vmi) =
        checked(|machine| machine.nad = NadLookup::Found(config("red", patchbay("red"))));
    assert_eq!(unchanged, [vmi]);
}

/// Only the name connects such an instance to the claim: the user may have created it.
#[test]
fn a_claim_does_not_follow_an_instance_of_its_name_that_no_launcher_connects() {
    for pods in [vec![], vec![launcher("i0", &[("blue", Some("vm1.blue"))])]] {
        let steps = |change: fn(&mut Machine)| {
            let mut machine = running();
            machine.vm = None;
            machine.vmi = Some(vmi("i2", None, &[network("blue")]));
            machine.pods.clone_from(&pods);
            change(&mut machine);
            let mut steps = machine.steps();
            let create = steps.remove(0);
            let suffixed = create.starts_with("create ns/vm1.blue-");
            assert!(suffixed && create.ends_with("VirtualMachineInstance i2"), "{create}");
            steps
        };
        assert_eq!(steps(|_| {}), ["off ns/vm1.blue: VMI of v1 VM v1"]);
        assert_eq!(steps(|machine| owned_by(machine, None)), [""; 0]);
        // While the VirtualMachine is deleted alone, the claim keeps its finalizer, by which it is deleted later.
        let deleting = |machine: &mut Machine| {
            machine.vm = Some(VmFacts { deleting: true, ..vm("v1", &[network("blue")]) });
        };
        assert_eq!(steps(deleting), [""; 0]);
        let ending = |machine: &mut Machine| {
            machine.vm = Some(VmFacts { deleting: true, ..vm("v1", &[network("blue")]) });
            deleted(machine);
        };
        assert_eq!(steps(ending), ["off ns/vm1.blue: VMI of v1"]);
    }
}
