//! The cost of a plan.

use std::{sync::Arc, time::Duration};

use api::networkservice::{Protocol, TargetPort};

use super::{
    fixtures::{container_port, desired, owner, pods, port, spec},
    store::Store,
};

/// The processor time of this thread. Other processes of the machine do not count.
fn processor_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(text.split_whitespace().next().unwrap().parse().unwrap())
}

/// The average time of one change of a service with this many endpoints.
fn single_change(count: usize, runs: u32) -> Duration {
    let (spec, owner, mut pods) = (spec(), owner(), pods(count));
    let mut store = Store::default();
    store.converge(&desired(&spec, &pods), &owner);
    let start = processor_time();
    for index in (0..count).step_by(7).take(runs as usize) {
        let pod = &mut pods[index];
        pod.ready = !pod.ready;
        let plan = store.plan(&desired(&spec, &pods), &owner);
        assert_eq!((plan.creates.len(), plan.updates.len(), plan.deletes.len()), (0, 1, 0), "1 write");
        store.apply(&plan, &owner);
    }
    processor_time().saturating_sub(start) / runs
}

#[test]
fn one_change_of_10_000_endpoints_is_planned_in_linear_time() {
    // The kernel counts processor time in steps of some milliseconds.
    let (small, large) = (single_change(1000, 40), single_change(10_000, 8));
    println!("a single change is planned in {small:?} of 1,000 and in {large:?} of 10,000 endpoints");
    // Ten times the endpoints: a quadratic plan would take a hundred times as long.
    assert!(large < small * 40, "{small:?} for 1,000, {large:?} for 10,000");
}

#[test]
fn ten_thousand_pods_with_one_address_are_reported_in_linear_time() {
    let of = |count: usize| {
        let mut pods = pods(count);
        let same = pods[0].interfaces.clone();
        for pod in &mut pods {
            pod.interfaces = same.clone();
        }
        let runs = 40_000 / u32::try_from(count).unwrap();
        let start = processor_time();
        for _ in 0..runs {
            assert_eq!(desired(&spec(), &pods).duplicates[0].more, count - 2);
        }
        processor_time().saturating_sub(start) / runs
    };
    let (small, large) = (of(1000), of(10_000));
    assert!(large < small * 40, "{small:?} for 1,000, {large:?} for 10,000");
}

#[test]
fn ten_thousand_pods_with_ports_of_their_own_are_packed_in_linear_time() {
    let mut service = spec();
    service.ports = vec![port("pg", 5432, TargetPort::Name("pg".to_owned()))];
    let of = |count: usize| {
        let mut pods = pods(count);
        for (pod, number) in pods.iter_mut().zip(1..) {
            pod.ports = Arc::new([container_port("pg", Protocol::Tcp, number)]);
        }
        let runs = 20_000 / u32::try_from(count).unwrap();
        let mut store = Store::default();
        store.converge(&desired(&service, &pods), &owner());
        let start = processor_time();
        for _ in 0..runs {
            assert!(store.plan(&desired(&service, &pods), &owner()).is_empty());
        }
        processor_time().saturating_sub(start) / runs
    };
    let (small, large) = (of(1000), of(10_000));
    assert!(large < small * 40, "{small:?} for 1,000, {large:?} for 10,000");
}
