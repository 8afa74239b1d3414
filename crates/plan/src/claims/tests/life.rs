//! Which claims are created, deleted, given to another owner, and freed of their finalizer.

mod backup;
mod foreign;
mod unproven;

use super::{
    super::machine::{self, DeleteReason, GoneCheck, KindState, KindsKnown},
    *,
};

struct Machine {
    vm: Option<VmFacts>,
    vmi: Option<VmiFacts>,
    kinds: KindsKnown,
    claims: Vec<ClaimState>,
    pods: Vec<ClaimPod>,
    nad: NadLookup,
    reserved_in: Option<&'static str>,
    options: ClaimOptions,
    now: Timestamp,
}

/// A running machine with one network and its claim.
fn running() -> Machine {
    Machine {
        vm: Some(vm("v1", &[network("blue")])),
        vmi: Some(vmi("i1", Some(vm_owner("v1")), &[network("blue")])),
        kinds: KindsKnown::LISTED,
        claims: vec![claim("vm1.blue", Some(vm_owner("v1")))],
        pods: vec![launcher("i1", &[("blue", Some("vm1.blue"))])],
        nad: NadLookup::Found(config("blue", patchbay("blue"))),
        reserved_in: Some("blue"),
        options: ClaimOptions::default(),
        now: at(86_401),
    }
}

impl Machine {
    fn plan(&self) -> MachinePlan {
        let claims: Vec<&ClaimState> = self.claims.iter().collect();
        let pods: Vec<&ClaimPod> = self.pods.iter().collect();
        machine::plan(&MachineInput {
            key: &key("vm1"),
            vm: self.vm.as_ref(),
            vmi: self.vmi.as_ref(),
            kinds: self.kinds,
            claims: &claims,
            in_namespace: &|name| self.claims.iter().find(|claim| *claim.key.name == *name).cloned(),
            pods: &pods,
            nads: &|_| self.nad.clone(),
            networks: &|name| Some(format!("uid-{name}")),
            reserved_in: &|_| {
                self.reserved_in
                    .map(|name| ReservedIn { network: format!("uid-{name}"), network_name: name.to_owned() })
            },
            options: self.options,
            now: self.now,
        })
    }

    /// The steps in short.
    fn steps(&self) -> Vec<String> {
        let steps = self.plan().steps.into_iter().map(|step| match step {
            ClaimStep::Create(draft) => {
                format!("create {} for {:?} {}", draft.key, draft.owner.kind, draft.owner.uid)
            }
            ClaimStep::SetOwner { claim, owner, .. } => {
                format!("owner {claim} {:?} {}", owner.kind, owner.uid)
            }
            ClaimStep::Mark { claim, .. } => format!("mark {claim}"),
            ClaimStep::SetNetwork { claim, network, .. } => format!("network {claim} {network}"),
            ClaimStep::Delete { claim, why: DeleteReason::Unplugged, .. } => format!("unplug {claim}"),
            ClaimStep::Delete { claim, why: DeleteReason::Replaced, .. } => format!("replace {claim}"),
            ClaimStep::RemoveFinalizer { claim, left, gone, .. } => {
                assert_eq!(left, [""; 0]);
                let gone = gone.iter().map(|check| match check {
                    GoneCheck::Object { kind: OwnerKind::VirtualMachine, uid, .. } => format!(" VM {uid}"),
                    GoneCheck::Object { uid, .. } => format!(" VMI {uid}"),
                    GoneCheck::NoInstanceOf { vm, .. } => format!(" VMI of {vm}"),
                    GoneCheck::Inactive { uid, .. } => format!(" inactive {uid}"),
                    GoneCheck::Name { kind, .. } => format!(" any {kind}"),
                    GoneCheck::Unused { claim } => format!(" pods of {claim}"),
                    GoneCheck::NoIpamExtensions => " ipam-extensions".to_owned(),
                });
                format!("off {claim}:{}", gone.collect::<String>())
            }
        });
        steps.collect()
    }
}

#[track_caller]
fn check(expected: &str, change: impl FnOnce(&mut Machine)) {
    let mut machine = running();
    change(&mut machine);
    let expected: Vec<&str> = if expected.is_empty() { Vec::new() } else { expected.split("; ").collect() };
    assert_eq!(machine.steps(), expected);
}

/// The claim has addresses, and a user deletes it.
fn deleted(machine: &mut Machine) {
    machine.claims[0].deleting = true;
    machine.claims[0].status.ips = vec!["10.0.0.3/24".to_owned()];
}

#[test]
fn a_claim_that_is_deleted_before_it_has_addresses_goes_at_once() {
    check("", deleted);
    check("off ns/vm1.blue:", |machine| {
        machine.claims[0].deleting = true;
        machine.reserved_in = None;
    });
}

fn owned_by(machine: &mut Machine, owner: Option<OwnerRef>) {
    machine.claims[0] = used(claim("vm1.blue", owner));
}

#[test]
fn a_claim_is_created_as_ipam_extensions_does_with_its_interface() {
    let mut machine = running();
    machine.claims.clear();
    let plan = machine.plan();
    let [ClaimStep::Create(draft)] = plan.steps.as_slice() else { panic!("{plan:?}") };
    assert_eq!(
        (draft.key.clone(), draft.label.as_str(), &draft.owner),
        (key("vm1.blue"), "vm1", &vm_owner("v1"))
    );
    assert_eq!((draft.network.as_str(), &draft.interface), ("blue", &interface("blue")));
    assert_eq!(draft.event.note, "created IPAMClaim ns/vm1.blue for interface blue on network blue");
    assert_eq!(plan.events, []);
}

#[test]
fn claims_are_created_for_running_instances_only() {
    let none = |machine: &mut Machine| machine.claims.clear();
    check("create ns/vm1.blue for VirtualMachine v1", none);
    check("create ns/vm1.blue for VirtualMachineInstance i1", |machine| {
        none(machine);
        (machine.vm, machine.vmi) = (None, Some(vmi("i1", None, &[network("blue")])));
    });
    // A VirtualMachine of the same name that does not control the instance is not its owner.
    check("create ns/vm1.blue for VirtualMachineInstance i1", |machine| {
        none(machine);
        machine.vmi.as_mut().unwrap().controller = None;
    });
    for change in [
        (|machine| machine.vmi = None) as fn(&mut Machine),
        |machine| machine.vmi.as_mut().unwrap().deleting = true,
        |machine| machine.vmi.as_mut().unwrap().finished = true,
        |machine| machine.vmi.as_mut().unwrap().networks[0].absent = true,
        |machine| machine.nad = NadLookup::Absent,
        |machine| machine.nad = NadLookup::Invalid("x".to_owned()),
        |machine| machine.kinds.vmi = KindState::NotServed,
        |machine| machine.pods = vec![launcher("i1", &[("blue", None)])],
        |machine| {
            machine.pods.clear();
            machine.nad =
                NadLookup::Found(NadNetwork { persistent: false, ..config("blue", patchbay("blue")) });
        },
        |machine| {
            machine.vmi.as_mut().unwrap().networks[0].nad = NadRef::new("other", "ovn");
            machine.nad = NadLookup::Found(config("blue", NadIpam::Ovn));
        },
    ] {
        check("", |machine| {
            none(machine);
            change(machine);
        });
    }
    check("create ns/vm1.blue for VirtualMachine v1", |machine| {
        none(machine);
        machine.vmi.as_mut().unwrap().networks[0].nad = NadRef::new("other", "ovn");
        machine.nad = NadLookup::Found(config("blue", NadIpam::Ovn));
        machine.options.reference_foreign_nads = true;
    });
    // The pod has its reference from before persistence was switched off.
    check("create ns/vm1.blue for VirtualMachine v1", |machine| {
        none(machine);
        machine.nad = NadLookup::Found(NadNetwork { persistent: false, ..config("blue", patchbay("blue")) });
    });
    // A launcher of an earlier instance decides nothing.
    check("create ns/vm1.blue for VirtualMachine v1", |machine| {
        none(machine);
        machine.pods = vec![launcher("i0", &[("blue", None)])];
    });
}

#[test]
fn a_claim_keeps_its_finalizer_while_its_virtual_machine_lives() {
    check("", |_| {});
    check("", |machine| machine.vmi = None);
    check("", |machine| machine.claims[0].finalizers.clear());
    check("", deleted);
    check("off ns/vm1.blue:", |machine| {
        deleted(machine);
        machine.pods.clear();
    });
    check("", |machine| {
        machine.kinds.vm = KindState::NotServed;
        machine.vm = None;
    });
    // Other owners are not touched.
    check("", |machine| {
        owned_by(machine, Some(OwnerRef { kind: OwnerKind::Other, ..vm_owner("x") }));
        (machine.vm, machine.vmi) = (None, None);
    });
}

#[test]
fn a_claim_loses_its_finalizer_after_virtual_machine_and_instance() {
    let deleting = |machine: &mut Machine| machine.vm.as_mut().unwrap().deleting = true;
    check("", deleting);
    check("off ns/vm1.blue: VMI of v1", |machine| {
        deleting(machine);
        machine.vmi = None;
    });
    check("", |machine| machine.vm = None);
    check("", |machine| {
        machine.vm = None;
        machine.vmi.as_mut().unwrap().deleting = true;
        machine.pods.clear();
    });
    check("off ns/vm1.blue: VMI of v1 VM v1", |machine| (machine.vm, machine.vmi) = (None, None));
    // The machine was created again under its name: its instance does not count.
    check("off ns/vm1.blue: VMI of v1 VM v1", |machine| {
        machine.vm = Some(vm("v2", &[network("blue")]));
        machine.vmi = Some(vmi("i2", Some(vm_owner("v2")), &[network("blue")]));
    });
    // The CRD of KubeVirt is gone: only what is being deleted may go.
    let absent = |machine: &mut Machine| {
        machine.kinds = KindsKnown { vm: KindState::Absent, vmi: KindState::Absent };
        (machine.vm, machine.vmi) = (None, None);
    };
    check("", absent);
    check("off ns/vm1.blue: VMI of v1 VM v1", |machine| {
        absent(machine);
        deleted(machine);
    });
}

#[test]
fn a_claim_follows_the_instance_that_its_machine_left_behind() {
    let alone = |machine: &mut Machine| {
        machine.vm.as_mut().unwrap().deleting = true;
        machine.vmi.as_mut().unwrap().controller = None;
    };
    check("owner ns/vm1.blue VirtualMachineInstance i1", alone);
    check("owner ns/vm1.blue VirtualMachineInstance i1", |machine| {
        alone(machine);
        machine.vm = None;
        owned_by(machine, None);
    });
    let mut orphan = running();
    alone(&mut orphan);
    orphan.vm = None;
    owned_by(&mut orphan, None);
    assert_eq!(orphan.plan().events, []);
    check("", |machine| {
        alone(machine);
        owned_by(machine, Some(vmi_owner("i1")));
    });
    // The garbage collector has removed the owner of the claim, and not yet that of the instance.
    check("", |machine| {
        owned_by(machine, None);
        machine.vm.as_mut().unwrap().deleting = true;
    });
    check("", |machine| {
        owned_by(machine, None);
        machine.vm = None;
    });
    // A new VirtualMachine adopted the instance.
    check("owner ns/vm1.blue VirtualMachine v1", |machine| owned_by(machine, Some(vmi_owner("i1"))));
}

#[test]
fn a_claim_that_its_machine_left_without_an_owner_is_deleted() {
    let left = |machine: &mut Machine| {
        owned_by(machine, None);
        (machine.vm, machine.vmi) = (None, None);
        machine.pods.clear();
    };
    check("unplug ns/vm1.blue", left);
    check("off ns/vm1.blue: any VirtualMachine any VirtualMachineInstance", |machine| {
        left(machine);
        deleted(machine);
    });
    let mut machine = running();
    left(&mut machine);
    let [ClaimStep::Delete { uid, version, event, .. }] = &machine.plan().steps[..] else { panic!() };
    assert_eq!((uid.as_str(), version.as_str()), ("uid-vm1.blue", "7"));
    assert_eq!(
        event.note,
        "virtual machine ns/vm1 is gone; deleted IPAMClaim ns/vm1.blue, its addresses become free"
    );
    for change in [
        (|machine| machine.vm = Some(vm("v2", &[]))) as fn(&mut Machine),
        |machine| machine.vmi = Some(vmi("i2", None, &[])),
        |machine| machine.pods = vec![launcher("i1", &[("blue", Some("vm1.blue"))])],
        |machine| machine.claims[0].finalizers.clear(),
        |machine| machine.claims[0].label = None,
        |machine| machine.claims[0].owner_count = 2,
        |machine| machine.kinds.vm = KindState::NotServed,
        |machine| machine.kinds.vm = KindState::Absent,
    ] {
        check("", |machine| {
            left(machine);
            change(machine);
        });
    }
}

#[test]
fn a_claim_of_a_lone_instance_goes_with_it() {
    let lone = |machine: &mut Machine| {
        machine.vm = None;
        machine.vmi.as_mut().unwrap().controller = None;
        owned_by(machine, Some(vmi_owner("i1")));
    };
    check("", lone);
    check("", |machine| {
        lone(machine);
        machine.vmi.as_mut().unwrap().deleting = true;
    });
    // A foreground deletion of the instance waits for the claim.
    check("off ns/vm1.blue: inactive i1", |machine| {
        lone(machine);
        let vmi = machine.vmi.as_mut().unwrap();
        (vmi.deleting, vmi.active_pods) = (true, 0);
    });
    check("off ns/vm1.blue: VMI i1", |machine| {
        lone(machine);
        machine.vmi = None;
    });
    check("off ns/vm1.blue: VMI i1", |machine| {
        lone(machine);
        machine.vmi = Some(vmi("i2", None, &[network("blue")]));
    });
}

#[test]
fn the_claim_of_an_unplugged_interface_is_deleted() {
    let unplugged = |machine: &mut Machine| {
        machine.vm.as_mut().unwrap().networks.clear();
        machine.vmi.as_mut().unwrap().networks.clear();
        machine.pods.clear();
    };
    check("unplug ns/vm1.blue", unplugged);
    check("unplug ns/vm1.blue", |machine| {
        unplugged(machine);
        machine.vmi = None;
    });
    check("", |machine| {
        unplugged(machine);
        machine.options.keep_unplugged = true;
    });
    check("", |machine| {
        unplugged(machine);
        machine.pods = vec![launcher("i1", &[("blue", Some("vm1.blue"))])];
    });
    check("", |machine| {
        unplugged(machine);
        machine.claims[0].status.ips = vec!["10.0.0.3/24".to_owned()];
        machine.pods = vec![showing(launcher("i1", &[]), "p", &["10.0.0.3"])];
    });
    // The status of the instance still lists it, or only the instance has it.
    for (absent, in_status) in [(true, true), (false, false)] {
        check("", |machine| {
            unplugged(machine);
            machine.vmi.as_mut().unwrap().networks =
                vec![MachineNetwork { absent, in_status, ..network("blue") }];
        });
    }
    // The template still has it, so it is only not plugged yet.
    check("", |machine| {
        unplugged(machine);
        machine.vm = Some(vm("v1", &[network("blue")]));
    });
    check("", |machine| {
        unplugged(machine);
        machine.vm.as_mut().unwrap().deleting = true;
    });
}

#[test]
fn a_claim_of_another_network_is_replaced() {
    let moved = |machine: &mut Machine| machine.nad = NadLookup::Found(config("red", patchbay("red")));
    check("replace ns/vm1.blue", moved);
    check("off ns/vm1.blue:", |machine| {
        moved(machine);
        deleted(machine);
    });
    // The same config name, another network.
    check("replace ns/vm1.blue", |machine| machine.nad = NadLookup::Found(config("blue", patchbay("red"))));
    check("", |machine| {
        machine.nad = NadLookup::Found(config("blue", patchbay("red")));
        machine.reserved_in = None;
    });
    check("", |machine| machine.nad = NadLookup::Invalid("x".to_owned()));
}

/// The network lost `spec.ipam`, or the NAD its IPAM: the config has its name, and no IPAM of ours.
#[test]
fn a_claim_stays_while_its_network_has_no_addresses() {
    let without = |machine: &mut Machine| {
        machine.nad = NadLookup::Found(NadNetwork { persistent: false, ..config("blue", NadIpam::Other) });
    };
    check("", without);
    let mut machine = running();
    without(&mut machine);
    machine.claims[0].status.ips = vec!["10.0.0.3/24".to_owned()];
    let plan = machine.plan();
    let [event] = &plan.events[..] else { panic!("{plan:?}") };
    assert_eq!((event.warning, event.reason), (true, "IPAMClaimKept"));
    assert!(
        event.note.contains("set spec.ipam and spec.ipam.persistent of BridgeNetwork blue"),
        "{}",
        event.note
    );
    let allocated = |resolution: &Resolution| matches!(resolution, Resolution::Allocate { network, requested, .. } if network == "uid-blue" && requested.is_empty());
    assert!(plan.resolutions.get(&key("vm1.blue")).is_some_and(allocated), "{plan:?}");
    // Only persistence was switched off.
    let mut machine = running();
    machine.nad = NadLookup::Found(NadNetwork { persistent: false, ..config("blue", patchbay("blue")) });
    assert_eq!((machine.steps(), machine.plan().events[0].reason), (vec![], "IPAMClaimKept"));
    // A stopped machine loses its address at the next start unless its user hears of it before.
    machine.vmi = None;
    machine.pods.clear();
    assert_eq!((machine.steps(), machine.plan().events[0].reason), (vec![], "IPAMClaimKept"));
    // The interface moved, the claim was deleted by hand, or the machine was.
    check("replace ns/vm1.blue", |machine| {
        without(machine);
        machine.nad = NadLookup::Found(config("red", NadIpam::Other));
    });
    check("replace ns/vm1.blue", |machine| machine.nad = NadLookup::Found(config("blue", NadIpam::Ovn)));
    check("off ns/vm1.blue:", |machine| {
        without(machine);
        deleted(machine);
        machine.pods.clear();
    });
    check("off ns/vm1.blue: VMI of v1 VM v1", |machine| {
        without(machine);
        (machine.vm, machine.vmi) = (None, None);
    });
}

#[test]
fn an_edited_claim_keeps_its_addresses() {
    let edited = |machine: &mut Machine| machine.claims[0].network = "green".into();
    check("network ns/vm1.blue blue", edited);
    check("network ns/vm1.blue blue", |machine| {
        edited(machine);
        machine.pods.clear();
    });
    // The config of the NAD was renamed.
    check("network ns/vm1.blue azure", |machine| {
        machine.nad = NadLookup::Found(config("azure", patchbay("blue")));
    });
    check("", |machine| {
        edited(machine);
        machine.vmi = None;
    });
    // Edited, and the interface moved.
    check("replace ns/vm1.blue", |machine| {
        edited(machine);
        machine.nad = NadLookup::Found(config("red", patchbay("red")));
    });
    // It has no address to keep, if the blocks say so too.
    let mut unreserved = running();
    edited(&mut unreserved);
    unreserved.reserved_in = None;
    let plan = unreserved.plan();
    let [ClaimStep::Delete { why: DeleteReason::Replaced, unreserved_in, .. }] = &plan.steps[..] else {
        panic!("{plan:?}")
    };
    assert_eq!(unreserved_in.as_deref(), Some("blue"));
    let mut machine = running();
    edited(&mut machine);
    let plan = machine.plan();
    let [ClaimStep::SetNetwork { uid, version, event, .. }] = &plan.steps[..] else { panic!("{plan:?}") };
    assert_eq!((uid.as_str(), version.as_str()), ("uid-vm1.blue", "7"));
    assert_eq!(
        event.note,
        "IPAMClaim ns/vm1.blue was edited: spec.network was \"green\", but interface blue is on network \"blue\" of NAD \
         ns/blue; set spec.network, the addresses stay"
    );
    assert!(matches!(plan.resolutions.get(&key("vm1.blue")), Some(Resolution::Allocate { .. })));
}

#[test]
fn what_the_user_should_know_is_an_event() {
    let event = |change: fn(&mut Machine)| {
        let mut machine = running();
        change(&mut machine);
        let events = machine.plan().events;
        assert_eq!(events.len(), 1, "{events:?}");
        (events[0].reason, events[0].note.clone())
    };
    let (reason, note) = event(|machine| machine.nad = NadLookup::Invalid("it is bad".to_owned()));
    assert_eq!(
        (reason, note.as_str()),
        (
            "NetworkConfigInvalid",
            "NAD ns/blue of interface blue: it is bad; correct the config of the NAD; until then the address is not persistent",
        )
    );
    let (_, note) = event(|machine| owned_by(machine, Some(vm_owner("v0"))));
    assert_eq!(
        note,
        "IPAMClaim ns/vm1.blue of an earlier VirtualMachine vm1 still exists; interface blue waits until it is gone"
    );
    let (_, note) = event(|machine| {
        owned_by(machine, None);
        machine.claims[0].label = None;
    });
    assert_eq!(
        note,
        "IPAMClaim ns/vm1.blue belongs to no virtual machine; interface blue waits until it is gone: delete it if no \
         pod uses it"
    );
    let (_, note) = event(|machine| {
        machine.claims[0].owner.as_mut().unwrap().name = "vm1.x".into();
        machine.claims[0].owner.as_mut().unwrap().uid = "v9".to_owned();
    });
    assert!(
        note.contains("belongs to VirtualMachine vm1.x; ") && note.contains("; restart the VM"),
        "{note}"
    );
    let (reason, _) = event(deleted);
    assert_eq!(reason, "IPAMClaimDeleted");
    let (_, note) = event(|machine| {
        machine.vmi.as_mut().unwrap().addresses = Some(r#"{"blue": ["10.0.0.9"]}"#.into());
        machine.claims[0].status.ips = vec!["10.0.0.3/24".to_owned()];
    });
    assert_eq!(
        note,
        "annotation network.kubevirt.io/addresses requests 10.0.0.9, but IPAMClaim ns/vm1.blue has 10.0.0.3; to change it, \
         stop the VM and delete the IPAMClaim"
    );
    let (reason, _) = event(|machine| {
        machine.claims.clear();
        machine.vmi.as_mut().unwrap().networks[0].nad = NadRef::new("other", "ovn");
        machine.nad = NadLookup::Found(config("blue", NadIpam::Ovn));
    });
    assert_eq!(reason, "ForeignNamespaceNetwork");
}

#[test]
fn a_claim_is_resolved_by_the_nad_of_its_interface() {
    let resolution = |change: fn(&mut Machine)| {
        let mut machine = running();
        change(&mut machine);
        machine.plan().resolutions.remove(&key("vm1.blue"))
    };
    let allocate = |requested: &[&str]| {
        Some(Resolution::Allocate {
            network: "uid-blue".to_owned(),
            network_name: "blue".to_owned(),
            nad: NadRef::new("ns", "blue"),
            requested: requested.iter().map(|text| ip(text)).collect(),
        })
    };
    assert_eq!(resolution(|_| {}), allocate(&[]));
    assert_eq!(resolution(|machine| machine.vmi = None), allocate(&[]), "a stopped machine");
    let stopped = |machine: &mut Machine| {
        machine.vmi = None;
        machine.reserved_in = None;
    };
    assert_eq!(resolution(stopped), None, "a stopped machine whose claim never had an address");
    let lost = |machine: &mut Machine| {
        machine.vmi = None;
        machine.reserved_in = None;
        machine.claims[0].status.ips = vec!["10.0.0.7/24".to_owned(), "fd00::7/64".to_owned()];
    };
    assert_eq!(resolution(lost), allocate(&["10.0.0.7", "fd00::7"]), "its reservation was lost");
    assert_eq!(
        resolution(|machine| {
            machine.vmi = None;
            machine.reserved_in = None;
            machine.claims[0].status.ips = vec!["10.0.0.7/24".to_owned()];
            machine.nad = NadLookup::Found(config("blue", NadIpam::Ovn));
        }),
        None,
        "the addresses of OVN-Kubernetes"
    );
    let requests = |machine: &mut Machine| {
        machine.vmi.as_mut().unwrap().addresses = Some(r#"{"blue": ["10.0.0.9", "fd00::9"]}"#.into());
    };
    assert_eq!(resolution(requests), allocate(&["10.0.0.9", "fd00::9"]));
    let invalid = |machine: &mut Machine| machine.vmi.as_mut().unwrap().addresses = Some("{".into());
    assert_eq!(resolution(invalid), allocate(&[]), "a claim that has addresses keeps them");
    assert!(matches!(
        resolution(|machine| {
            machine.vmi.as_mut().unwrap().addresses = Some(r#"{"blue": ["10.0.0"]}"#.into());
            machine.reserved_in = None;
        }),
        Some(Resolution::Failed { message, .. }) if message ==
            r#"annotation network.kubevirt.io/addresses: "10.0.0" is not an IP address; write {"blue": ["10.0.0.4"]}"#
    ));
    assert_eq!(
        resolution(|machine| {
            machine.nad = NadLookup::Found(config("blue", NadIpam::Ovn));
            machine.reserved_in = None;
        }),
        Some(Resolution::NotOurs)
    );
}
