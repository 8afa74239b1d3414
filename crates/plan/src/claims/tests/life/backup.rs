//! Claims that wait for their virtual machine, for example after a restore.

use super::*;

/// No machine, no pod, and a claim from a backup that was created a day ago.
fn waiting(machine: &mut Machine) {
    machine.claims[0] = restored("vm1.blue", &["10.0.0.7/24", "fd00::7/64"]);
    (machine.vm, machine.vmi, machine.reserved_in) = (None, None, None);
    machine.pods.clear();
    machine.now = at(86_399);
}

#[test]
fn a_claim_without_a_machine_is_kept_for_a_day_after_it_was_created() {
    let mut machine = running();
    waiting(&mut machine);
    let plan = machine.plan();
    assert_eq!((plan.steps.len(), plan.requeue_after), (0, Some(jiff::SignedDuration::from_secs(1))));
    let [(claim, event)] = &plan.kept[..] else { panic!("{plan:?}") };
    assert_eq!((claim, event.reason), (&key("vm1.blue"), "IPAMClaimKept"));
    assert_eq!(
        event.note,
        "virtual machine ns/vm1 does not exist; IPAMClaim ns/vm1.blue is kept until 1970-01-02T00:00:00Z; to keep it for good, \
         set annotation patchbay.dev/keep: \"true\""
    );
    check("unplug ns/vm1.blue", |machine| {
        waiting(machine);
        machine.now = at(86_400);
    });
    check("", |machine| {
        waiting(machine);
        machine.now = at(10 * 86_400);
        machine.claims[0].annotations.keep = true;
    });
    // It is deleted by hand.
    check("off ns/vm1.blue: any VirtualMachine any VirtualMachineInstance", |machine| {
        waiting(machine);
        machine.claims[0].deleting = true;
    });
}

#[test]
fn a_machine_of_its_name_adopts_a_claim_that_no_pod_used() {
    let back = |machine: &mut Machine| {
        waiting(machine);
        machine.vm = Some(vm("v2", &[network("blue")]));
        machine.vmi = Some(vmi("i2", Some(vm_owner("v2")), &[network("blue")]));
    };
    check("owner ns/vm1.blue VirtualMachine v2", back);
    check("owner ns/vm1.blue VirtualMachine v2", |machine| {
        back(machine);
        machine.vmi = None;
    });
    // The restore wrote its status too.
    check("owner ns/vm1.blue VirtualMachine v2", |machine| {
        back(machine);
        machine.claims[0].status.ips = vec!["10.0.0.7/24".to_owned()];
    });
    check("owner ns/vm1.blue VirtualMachineInstance i2", |machine| {
        back(machine);
        machine.vm = None;
        machine.vmi.as_mut().unwrap().controller = None;
    });
    for change in [
        // A launcher of another machine, or any pod, uses it.
        (|machine| machine.pods = vec![launcher("i0", &[("blue", Some("vm1.blue"))])]) as fn(&mut Machine),
        |machine| {
            machine.vmi = None;
            machine.pods = vec![launcher("i0", &[("blue", Some("vm1.blue"))])];
        },
        // It belongs to another owner.
        |machine| machine.claims[0].owner_count = 2,
        // The machine does not have the interface.
        |machine| {
            machine.vm = Some(vm("v2", &[network("red")]));
            machine.vmi = None;
        },
        |machine| {
            machine.vm.as_mut().unwrap().deleting = true;
            machine.vmi = None;
        },
    ] {
        let mut machine = running();
        back(&mut machine);
        change(&mut machine);
        assert!(!machine.steps().iter().any(|step| step.starts_with("owner")), "{:?}", machine.steps());
    }
    // One that was used belongs to the machine before, which had the same name.
    let mut machine = running();
    back(&mut machine);
    machine.claims[0].annotations.recorded.as_mut().unwrap().uid = machine.claims[0].uid.clone();
    assert!(!machine.steps().iter().any(|step| step.starts_with("owner")), "{:?}", machine.steps());
}

#[test]
fn an_adopted_claim_requests_the_addresses_that_it_had() {
    let requested = |change: fn(&mut Machine)| {
        let mut machine = running();
        machine.reserved_in = None;
        machine.claims[0] = ClaimState {
            owner: Some(vm_owner("v1")),
            owner_count: 1,
            ..restored("vm1.blue", &["10.0.0.7/24", "fd00::7/64"])
        };
        change(&mut machine);
        match machine.plan().resolutions.remove(&key("vm1.blue")) {
            Some(Resolution::Allocate { requested, .. }) => requested,
            other => panic!("{other:?}"),
        }
    };
    let both = [ip("10.0.0.7"), ip("fd00::7")];
    assert_eq!(requested(|_| {}), both);
    assert_eq!(requested(|machine| machine.vmi = None), both, "a stopped machine");
    let explicit = |machine: &mut Machine| {
        machine.vmi.as_mut().unwrap().addresses = Some(r#"{"blue": ["10.0.0.9"]}"#.into());
    };
    assert_eq!(requested(explicit), [ip("10.0.0.9"), ip("fd00::7")], "the annotation of the machine wins");
    assert_eq!(requested(|machine| machine.reserved_in = Some("blue")), [] as [IpAddr; 0]);
    // Another claim may have the addresses of a status that was restored too.
    let with_status = |machine: &mut Machine| machine.claims[0].status.ips = vec!["10.0.0.3/24".to_owned()];
    assert_eq!(requested(with_status), both);
    let used = |machine: &mut Machine| {
        machine.claims[0].annotations.recorded.as_mut().unwrap().uid = machine.claims[0].uid.clone();
        machine.claims[0].status.ips = vec!["10.0.0.3/24".to_owned()];
    };
    assert_eq!(requested(used), [] as [IpAddr; 0]);
}
