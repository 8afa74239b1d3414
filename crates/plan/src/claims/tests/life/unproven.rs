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
