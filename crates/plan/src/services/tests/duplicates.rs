//! S10: several pods with the same address.

use std::sync::Arc;

use super::{
    fixtures::{address, desired, owner, pod, spec, time},
    store::Store,
};
use crate::services::{DesiredEndpoints, Labels, PodFacts, PodPhase};

fn launcher(name: &str, machine: &str, created: i64, ready: bool) -> PodFacts {
    let labels = Labels::new([("app", "db"), ("kubevirt.io/created-by", machine)]);
    PodFacts { labels: Arc::new(labels), created: time(created), ready, ..pod(name, &["10.1.0.5"]) }
}

/// The pod that is published, and whether as ready.
fn published(desired: &DesiredEndpoints) -> Option<(String, bool)> {
    let endpoint = desired.groups.first()?.endpoints.first()?;
    Some((endpoint.pod.to_string(), endpoint.conditions.ready))
}

#[test]
fn s10_an_address_of_two_pods_is_withheld_and_both_are_named() {
    let (a, b, c) = (pod("a", &["10.1.0.5", "10.1.0.6"]), pod("b", &["10.1.0.5"]), pod("c", &["10.1.0.7"]));
    let desired = desired(&spec(), [&b, &a, &c]);
    let addresses: Vec<_> = desired.groups[0].endpoints.iter().map(|one| one.address).collect();
    assert_eq!(addresses, [address("10.1.0.6"), address("10.1.0.7")]);
    let [duplicate] = &*desired.duplicates else { panic!("{:?}", desired.duplicates) };
    assert_eq!(duplicate.to_string(), "10.1.0.5 of the pods a and b");
}

#[test]
fn s10_three_pods_are_counted() {
    let pods = ["c", "a", "b"].map(|name| pod(name, &["10.1.0.5"]));
    let desired = desired(&spec(), &pods);
    assert_eq!(published(&desired), None);
    assert_eq!(desired.duplicates[0].to_string(), "10.1.0.5 of the pods a and b and 1 more");
}

#[test]
fn s10_one_pod_that_reports_an_address_twice_is_no_duplicate() {
    let mut twice = pod("a", &["10.1.0.5"]);
    let interface = twice.interfaces.as_ref().unwrap()[0].clone();
    twice.interfaces = Ok(vec![interface.clone(), interface].into());
    let desired = desired(&spec(), [&twice]);
    assert_eq!((desired.groups[0].endpoints.len(), desired.duplicates.len()), (1, 0));
}

#[test]
fn s10_of_one_machine_the_ready_pod_wins_and_then_the_newer() {
    for (old_ready, new_ready, winner) in [
        (true, false, ("old", true)),
        (false, true, ("new", true)),
        (true, true, ("new", true)),
        (false, false, ("new", false)),
    ] {
        let (old, new) = (launcher("old", "vm1", 0, old_ready), launcher("new", "vm1", 10, new_ready));
        for pods in [[&old, &new], [&new, &old]] {
            let desired = desired(&spec(), pods);
            assert_eq!(published(&desired), Some((winner.0.to_owned(), winner.1)), "{old_ready} {new_ready}");
            assert_eq!(desired.duplicates, []);
        }
    }
}

#[test]
fn s10_pods_of_different_machines_or_with_an_empty_label_are_duplicates() {
    for (a, b) in [("vm1", "vm2"), ("", ""), ("vm1", "")] {
        let pods = [launcher("a", a, 0, true), launcher("b", b, 1, true)];
        let desired = desired(&spec(), &pods);
        assert_eq!((published(&desired), desired.duplicates.len()), (None, 1), "{a:?} {b:?}");
    }
    let pods = [launcher("a", "vm1", 0, true), launcher("b", "vm1", 1, true), pod("c", &["10.1.0.5"])];
    assert_eq!(published(&desired(&spec(), &pods)), None);
}

#[test]
fn s10_a_pod_that_ends_does_not_hold_back_the_pod_that_got_its_address() {
    let mut ending = pod("ending", &["10.1.0.5"]);
    (ending.deleting, ending.ready) = (true, false);
    let next = pod("next", &["10.1.0.5"]);
    let both = desired(&spec(), [&ending, &next]);
    assert_eq!((published(&both), both.duplicates.len()), (Some(("next".to_owned(), true)), 0));
    // While it still answers, the address is ambiguous.
    ending.ready = true;
    assert_eq!(published(&desired(&spec(), [&ending, &next])), None);
    ending.phase = PodPhase::Finished;
    assert_eq!(published(&desired(&spec(), [&ending, &next])), Some(("next".to_owned(), true)));
}

#[test]
fn s10_a_migration_never_goes_dark_and_never_has_two_endpoints() {
    let source = launcher("source", "vm1", 0, true);
    let target = |ready| launcher("target", "vm1", 60, ready);
    let ending = PodFacts { deleting: true, ..source.clone() };
    let ended = PodFacts { phase: PodPhase::Finished, ready: false, ..source.clone() };
    let steps: [Vec<PodFacts>; 8] = [
        vec![source.clone()],
        vec![source.clone(), target(false)],
        vec![source.clone(), target(true)],
        vec![PodFacts { ready: false, ..source.clone() }, target(true)],
        vec![ending.clone(), target(true)],
        vec![PodFacts { ready: false, ..ending }, target(true)],
        vec![ended, target(true)],
        vec![target(true)],
    ];
    let mut store = Store::default();
    for (step, pods) in steps.iter().enumerate() {
        let desired = desired(&spec(), pods);
        store.converge(&desired, &owner());
        let union = store.union();
        assert_eq!(union.len(), 1, "step {step}");
        assert!(union[0].conditions.ready, "step {step}: {:?}", union[0]);
        assert_eq!((union[0].address, desired.duplicates.len()), (address("10.1.0.5"), 0));
    }
}
