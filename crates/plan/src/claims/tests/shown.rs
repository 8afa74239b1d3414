//! Which addresses the own pods of a claim have.

use super::{super::shown, *};

#[test]
fn only_launchers_of_the_owner_show_the_addresses_of_a_machines_claim() {
    let instance = vmi("i1", Some(vm_owner("v1")), &[network("blue")]);
    let pod = || showing(launcher("i1", &[("blue", Some("vm1.blue"))]), "p", &["10.0.0.4"]);
    let of_vm = || claim("vm1.blue", Some(vm_owner("v1")));
    let of_set = OwnerRef { kind: OwnerKind::Other, name: "set".into(), uid: "s".to_owned() };
    let elsewhere = ClaimPod { key: ObjectKey::new("other", "p"), ..pod() };
    let mut second = pod();
    second.elements = launcher("i1", &[("red", None), ("blue", Some("vm1.blue"))]).elements;
    (second.elements[1].interface, second.attached[0].interface) = (None, "net2".into());
    for (what, claim, pod, own) in [
        ("a launcher of the VM", of_vm(), pod(), true),
        ("a launcher of the instance", claim("vm1.blue", Some(vmi_owner("i1"))), pod(), true),
        // A VM is created under the name of a claim that a running pod referenced.
        ("a plain pod", of_vm(), ClaimPod { launcher: false, controller: None, ..pod() }, false),
        ("a pod without the label", of_vm(), ClaimPod { launcher: false, ..pod() }, false),
        ("an earlier instance", of_vm(), ClaimPod { controller: Some(vmi_owner("i0")), ..pod() }, false),
        ("an earlier VM", claim("vm1.blue", Some(vm_owner("v0"))), pod(), false),
        ("another namespace", of_vm(), elsewhere, false),
        ("another claim", claim("vm1.red", Some(vm_owner("v1"))), pod(), false),
        ("an interface without a name", of_vm(), second, true),
        ("no owner", claim("vm1.blue", None), ClaimPod { launcher: false, controller: None, ..pod() }, true),
        ("another kind of owner", claim("vm1.blue", Some(of_set)), pod(), true),
    ] {
        let vmis = |name: &str| (name == "vm1").then_some(&instance);
        let shown = shown::addresses(&claim, [&pod], vmis);
        assert_eq!(shown, if own { vec![ip("10.0.0.4")] } else { Vec::new() }, "{what}");
    }
}
