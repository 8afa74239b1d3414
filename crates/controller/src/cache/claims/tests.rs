use std::time::Duration;

use plan::{claims::OwnerRef, users::WorkloadKind};
use serde_json::{Value, json};

use super::{
    project::{self, ClaimObject, MachineObject},
    *,
};
use crate::metrics::ClaimMetricState;

fn instance_spec(networks: &[(&str, &str, Option<&str>)]) -> Value {
    let interfaces =
        networks.iter().map(|(name, _, state)| json!({"name": name, "bridge": {}, "state": state}));
    let multus = networks.iter().map(|(name, nad, _)| json!({"name": name, "multus": {"networkName": nad}}));
    let pod = [
        json!({"name": "default", "pod": {}}),
        json!({"name": "no-interface", "multus": {"networkName": "x"}}),
    ];
    json!({
        "domain": {"devices": {"interfaces": interfaces.collect::<Vec<_>>()}, "resources": {}},
        "networks": multus.chain(pod).collect::<Vec<_>>(),
    })
}

fn vmi_object(networks: &[(&str, &str, Option<&str>)]) -> MachineObject {
    serde_json::from_value(json!({
        "metadata": {"namespace": "ns", "name": "vm1", "uid": "vmi-1", "resourceVersion": "1",
            "annotations": {"network.kubevirt.io/addresses": "{}"},
            "ownerReferences": [{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "vm1", "uid": "vm-1", "controller": true}]},
        "spec": instance_spec(networks),
        "status": {"phase": "Running", "activePods": {"p-1": "node"}, "interfaces": [{"name": "blue", "ipAddress": "10.0.0.4"}, 7]},
    }))
    .unwrap()
}

fn key(name: &str) -> ObjectKey {
    ObjectKey::new("ns", name)
}

fn claim(name: &str, uid: &str, owner: Option<&str>) -> ClaimState {
    let owners = owner.map(|owner| {
        json!([{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": owner, "uid": "vm-1", "controller": true}])
    });
    let object: ClaimObject = serde_json::from_value(json!({
        "metadata": {"namespace": "ns", "name": name, "uid": uid, "resourceVersion": uid, "ownerReferences": owners,
            "labels": {"kubevirt.io/vm": "vm1"}, "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"network": "blue", "interface": ""},
        "status": {"ips": []},
    }))
    .unwrap();
    project::claim(object).unwrap()
}

fn launcher(name: &str, claim: Option<&str>, ips: &[&str]) -> ClaimPod {
    let element = json!([{"name": "blue", "interface": "pod1", "ipam-claim-reference": claim}]).to_string();
    let status = json!([
        {"name": "primary", "interface": "eth0", "ips": ["10.244.0.7"], "default": true},
        {"name": "ns/blue", "interface": "pod1", "ips": ips},
    ]);
    let metadata = json!({
        "namespace": "ns", "name": name, "uid": format!("uid-{name}"), "labels": {"kubevirt.io": "virt-launcher"},
        "annotations": {"k8s.v1.cni.cncf.io/networks": element, "k8s.v1.cni.cncf.io/network-status": status.to_string()},
        "ownerReferences": [{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": "vm1", "uid": "vmi-1", "controller": true}],
    });
    project::claim_pod(&serde_json::from_value(metadata).unwrap()).unwrap()
}

fn taken(cache: &ClaimCache) -> Vec<ClaimWork> {
    let mut work = Vec::new();
    while let Some(key) = cache.queue().take() {
        cache.queue().finish(&key, crate::queue::Pause::Burst);
        work.push(key);
    }
    work.sort();
    work
}

#[test]
fn the_secondary_networks_of_a_machine_are_projected() {
    let object = vmi_object(&[("blue", "blue", None), ("red", "other/red", Some("absent"))]);
    let vmi = project::vmi(&object).unwrap();
    let networks: Vec<_> =
        vmi.networks.iter().map(|it| (&*it.name, it.nad.to_string(), it.absent, it.in_status)).collect();
    assert_eq!(
        networks,
        [("blue", "ns/blue".to_owned(), false, true), ("red", "other/red".to_owned(), true, false)]
    );
    assert_eq!(&*project::pod_interface_name("red"), "podb1f51a511f1", "from the tests of KubeVirt");
    assert_eq!((vmi.active_pods, vmi.finished, vmi.deleting), (1, false, false));
    let controller: OwnerRef = vmi.controller.unwrap();
    assert_eq!((&*controller.name, controller.uid.as_str()), ("vm1", "vm-1"));
    let refs = project::machine_refs(WorkloadKind::VirtualMachineInstance, &object);
    assert_eq!(refs.multus, ["blue", "other/red", "x"]);
    let vm: MachineObject = serde_json::from_value(json!({
        "metadata": {"namespace": "ns", "name": "vm1", "uid": "vm-1"},
        "spec": {"template": {"metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": "green"}},
            "spec": instance_spec(&[("blue", "blue", None)])}},
    }))
    .unwrap();
    assert_eq!(project::vm(&vm).unwrap().networks.len(), 1);
    let refs = project::machine_refs(WorkloadKind::VirtualMachine, &vm);
    assert_eq!(
        (refs.networks.as_deref(), refs.multus),
        (Some("green"), vec!["blue".to_owned(), "x".to_owned()])
    );
}

#[test]
fn a_change_marks_what_it_concerns_and_nothing_else() {
    let cache = ClaimCache::default();
    cache.queue().start();
    let machine = ClaimWork::Machine(key("vm1"));
    cache.set_vmi(&key("vm1"), project::vmi(&vmi_object(&[("blue", "blue", None)])));
    assert_eq!(taken(&cache), std::slice::from_ref(&machine));
    cache.set_vmi(&key("vm1"), project::vmi(&vmi_object(&[("blue", "blue", None)])));
    assert_eq!(taken(&cache), [], "nothing changed");
    cache.mark_nad(&NadRef::new("ns", "blue"));
    assert_eq!(taken(&cache), std::slice::from_ref(&machine));
    cache.mark_nad(&NadRef::new("ns", "red"));
    assert_eq!(taken(&cache), []);
    cache.set_claim(&key("vm1.blue"), Some(claim("vm1.blue", "c-1", Some("vm1"))));
    assert_eq!(taken(&cache), std::slice::from_ref(&machine));
    cache.set_claim(&key("other"), Some(claim("other", "c-2", None)));
    assert_eq!(taken(&cache), [ClaimWork::Lone(key("other"))]);
    let network = ClaimWork::Network("net-1".into());
    let resolution = Resolution::Allocate {
        network: "net-1".to_owned(),
        network_name: "blue".to_owned(),
        nad: NadRef::new("ns", "blue"),
        requested: Vec::new(),
    };
    cache.set_resolutions(&machine, [(key("vm1.blue"), resolution.clone())]);
    assert_eq!(taken(&cache), std::slice::from_ref(&network));
    cache.set_resolutions(&machine, [(key("vm1.blue"), resolution)]);
    assert_eq!(taken(&cache), []);
    let pod = launcher("p", Some("vm1.blue"), &["10.0.0.4"]);
    cache.apply_pod("ns", "p", &pod.uid, Some(&pod));
    assert_eq!(taken(&cache), [machine.clone(), network.clone()]);
    let snapshot = cache.network("net-1");
    assert_eq!(snapshot.wanted.len(), 1);
    assert_eq!(snapshot.wanted[0].shown, ["10.0.0.4".parse::<std::net::IpAddr>().unwrap()]);
    cache.apply_pod("ns", "p", &pod.uid, None);
    assert_eq!(cache.network("net-1").claims[0].1.len(), 1, "it refers to the claim until it is gone");
    taken(&cache);
    cache.delete_pod("ns", "p");
    assert_eq!(taken(&cache), [machine.clone(), network.clone()]);
    cache.set_claim(&key("vm1.blue"), None);
    assert_eq!(taken(&cache), [machine, network]);
    assert!(cache.network("net-1").wanted.is_empty());
}

#[test]
fn a_new_term_knows_no_plan_of_an_earlier_one() {
    let cache = ClaimCache::default();
    let at = key("vm1.blue");
    cache.set_claim(&at, Some(claim("vm1.blue", "c", Some("vm1"))));
    let resolution = Resolution::Allocate {
        network: "uid-blue".to_owned(),
        network_name: "blue".to_owned(),
        nad: NadRef::new("ns", "blue"),
        requested: Vec::new(),
    };
    cache.set_resolutions(&ClaimWork::Machine(key("vm1")), [(at, resolution)]);
    assert_eq!(cache.network("uid-blue").wanted.len(), 1);
    cache.forget_plans();
    assert!(cache.network("uid-blue").wanted.is_empty());
    cache.queue().start();
    cache.mark_all();
    assert_eq!(taken(&cache), [ClaimWork::Machine(key("vm1"))]);
}

#[test]
fn a_list_of_pods_removes_those_that_are_gone() {
    let cache = ClaimCache::default();
    let (one, two) = (launcher("one", None, &[]), launcher("two", None, &[]));
    cache.apply_pod("ns", "one", &one.uid, Some(&one));
    cache.apply_pod("ns", "two", &two.uid, Some(&two));
    cache.start_pod_list();
    cache.apply_pod("ns", "two", &two.uid, Some(&two));
    cache.finish_pod_list();
    let left = cache.read(|index| index.pods_of(&key("vm1"), &[]));
    assert_eq!(left.iter().map(|pod| &*pod.key.name).collect::<Vec<_>>(), ["two"]);
}

/// The daemon reads a reference in any case and with escapes.
#[test]
fn a_reference_in_any_spelling_is_projected() {
    let pod = |networks: &str| {
        let metadata = json!({
            "namespace": "ns", "name": "p", "uid": "p-1",
            "annotations": {"k8s.v1.cni.cncf.io/networks": networks},
        });
        serde_json::from_value(metadata).unwrap()
    };
    for (networks, refers) in [
        (r#"[{"name":"blue","ipam-claim-reference":"c"}]"#, true),
        (r#"[{"name":"blue","IPAM-Claim-Reference":"c"}]"#, true),
        (r#"[{"name":"blue","ipam-claim-\u0072eference":"c"}]"#, true),
        (r#"[{"name":"blue","\u0049PAM-claim-reference":"\u0063"}]"#, true),
        (r#"[{"name":"blue","ipam-claim-reference":""}]"#, false),
        (r#"[{"name":"bl\u0075e"}]"#, false),
        ("blue", false),
    ] {
        let found = project::claim_pod(&pod(networks));
        assert_eq!(found.is_some_and(|pod| pod.references(&key("c"))), refers, "{networks}");
        let any = project::any_pod(&pod(networks)).unwrap();
        assert_eq!(any.references(&key("c")), refers, "{networks}");
    }
}

/// A virtual machine may be created under the name of a claim that a running pod had.
#[test]
fn the_address_of_a_plain_pod_is_not_that_of_a_machines_claim() {
    let cache = ClaimCache::default();
    cache.set_vmi(&key("vm1"), project::vmi(&vmi_object(&[("blue", "blue", None)])));
    cache.set_claim(&key("vm1.blue"), Some(claim("vm1.blue", "c-1", Some("vm1"))));
    let resolution = Resolution::Allocate {
        network: "net-1".to_owned(),
        network_name: "blue".to_owned(),
        nad: NadRef::new("ns", "blue"),
        requested: Vec::new(),
    };
    cache.set_resolutions(&ClaimWork::Machine(key("vm1")), [(key("vm1.blue"), resolution)]);
    let plain =
        ClaimPod { launcher: false, controller: None, ..launcher("plain", Some("vm1.blue"), &["10.0.0.3"]) };
    let shown = || cache.network("net-1").wanted[0].shown.clone();
    cache.apply_pod("ns", "plain", &plain.uid, Some(&plain));
    assert!(shown().is_empty());
    let own = launcher("p", Some("vm1.blue"), &["10.0.0.4"]);
    cache.apply_pod("ns", "p", &own.uid, Some(&own));
    assert_eq!(shown(), ["10.0.0.4".parse::<std::net::IpAddr>().unwrap()]);
}

/// The label of a long name is shortened. A controller that starts may get the claims before the machines.
#[test]
fn an_orphaned_claim_of_a_machine_with_a_long_name_is_found_in_any_order() {
    let long = "a-machine-with-a-name-that-is-too-long-for-the-value-of-a-label-of-kubernetes";
    let label = plan::claims::names::label_value(long);
    let orphan = ClaimState {
        label: Some(label.as_str().into()),
        finalizers: vec!["kubevirt.io/persistent-ipam".to_owned()],
        ..claim("c", "c-1", None)
    };
    let vmi = || project::vmi(&vmi_object(&[("blue", "blue", None)]));
    let of = |cache: &ClaimCache, machine: &str| {
        let claims = cache.read(|index| index.claims_of(&key(machine)));
        claims.iter().map(|claim| claim.key.name.to_string()).collect::<Vec<_>>()
    };
    for claim_first in [true, false] {
        let cache = ClaimCache::default();
        cache.queue().start();
        if claim_first {
            cache.set_claim(&key("c"), Some(orphan.clone()));
            cache.set_vmi(&key(long), vmi());
        } else {
            cache.set_vmi(&key(long), vmi());
            cache.set_claim(&key("c"), Some(orphan.clone()));
        }
        assert!(taken(&cache).contains(&ClaimWork::Machine(key(long))));
        assert_eq!(of(&cache, long), ["c"]);
        assert_eq!(of(&cache, &label), [""; 0], "no machine has this name");
        // The instance goes: the claim is still that of its name, and is deleted.
        cache.set_vmi(&key(long), None);
        assert_eq!(of(&cache, long), ["c"]);
        cache.set_claim(&key("c"), None);
        assert_eq!(of(&cache, long), [""; 0], "nothing is left of the entry");
        assert_eq!(of(&cache, &label), [""; 0]);
        taken(&cache);
        cache.mark_all();
        assert_eq!(taken(&cache), []);
    }
}

#[test]
fn the_metrics_count_claims_by_state_and_age() {
    let cache = ClaimCache::default();
    let work = ClaimWork::Machine(key("vm1"));
    let finalizers = || vec!["kubevirt.io/persistent-ipam".to_owned()];
    let named = |name: &str| ClaimState { finalizers: finalizers(), ..claim(name, name, Some("vm1")) };
    let mut allocated = named("allocated");
    allocated.status.ips = vec!["10.0.0.3/24".to_owned()];
    let deleted = ClaimState { deleting: true, ..named("deleted") };
    let without = ClaimState { deleting: true, finalizers: Vec::new(), ..named("without-finalizer") };
    let all = [allocated, deleted, without, named("pending"), named("failed"), named("ovn")];
    for claim in all {
        cache.set_claim(&claim.key.clone(), Some(claim));
    }
    let failed = Resolution::Failed {
        reason: api::ipamclaim::AllocationReason::InternalError,
        message: "why".to_owned(),
        report: plan::claims::FailureReport::Status,
    };
    cache.set_resolutions(&work, [(key("failed"), failed), (key("ovn"), Resolution::NotOurs)]);
    let created: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
    let totals = cache.read(|index| index.totals(Timestamp::now()));
    let count = |state: ClaimMetricState| totals.states.get(&state).copied().unwrap_or_default();
    assert_eq!(ClaimMetricState::ALL.map(count), [1, 1, 1, 1, 2]);
    assert_eq!(totals.stuck, 0, "deleted a moment ago");
    let later = Timestamp::now() + Duration::from_secs(61);
    let totals = cache.read(|index| index.totals(later));
    assert_eq!(totals.stuck, 1);
    let age = Duration::try_from(later.duration_since(created)).unwrap();
    assert_eq!(totals.oldest_pending, age);
}
