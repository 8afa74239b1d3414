//! S2: the packing cases of the built-in EndpointSlice controller, with its results. In that controller's tests they are named
//! `TestReconcile...`.

use std::sync::Arc;

use api::networkservice::{Protocol, TargetPort};

use super::{
    fixtures::{container_port, desired, ipv4, owner, pod, pods, port, spec},
    store::Store,
};
use crate::services::{DesiredEndpoints, Endpoint, EndpointGroup, PodFacts, SliceContent, SliceOwner};

fn numbered(count: usize) -> Vec<PodFacts> {
    (0..count).map(|index| pod(&format!("pod{index}"), &[&ipv4(index)])).collect()
}

fn sorted_sizes(store: &Store) -> Vec<usize> {
    let mut sizes = store.sizes();
    sizes.sort_unstable();
    sizes
}

/// A slice with these endpoints of the only group.
fn create(store: &mut Store, desired: &DesiredEndpoints, selected: impl Fn(usize) -> bool) {
    let [EndpointGroup { family, ports, endpoints, .. }] = &*desired.groups else { panic!("one group") };
    let endpoints: Vec<Endpoint> =
        (0..endpoints.len()).filter(|index| selected(*index)).map(|index| endpoints[index].clone()).collect();
    let content = SliceContent {
        family: *family,
        labels: Arc::new(owner().slice_labels()),
        network: owner().network,
        trigger_time: None,
        ports: ports.clone(),
        endpoints,
    };
    store.create(&content, &owner());
}

#[test]
fn s2_some_preexisting_slices_are_kept_and_one_takes_the_rest() {
    let desired = desired(&spec(), &numbered(250));
    let mut store = Store::default();
    create(&mut store, &desired, |index| index % 4 == 0);
    create(&mut store, &desired, |index| index % 4 == 2);
    let plan = store.converge(&desired, &owner());
    // 63 and 62 exist, 125 are missing: one new slice of 100, and 25 more in the fuller slice.
    assert_eq!((plan.creates.len(), plan.updates.len(), plan.deletes.len()), (1, 1, 0));
    assert_eq!(sorted_sizes(&store), [62, 88, 100]);
}

#[test]
fn s2_a_rest_that_fits_into_no_preexisting_slice_leaves_them_unchanged() {
    let desired = desired(&spec(), &numbered(300));
    let mut store = Store::default();
    create(&mut store, &desired, |index| index % 4 == 0);
    create(&mut store, &desired, |index| index % 4 == 2);
    let plan = store.converge(&desired, &owner());
    assert_eq!((plan.creates.len(), plan.updates.len(), plan.deletes.len()), (2, 0, 0));
    assert_eq!(sorted_sizes(&store), [50, 75, 75, 100]);
}

#[test]
fn s2_changed_ports_and_labels_update_every_slice() {
    let pods = numbered(250);
    let mut service = spec();
    let mut store = Store::default();
    store.converge(&desired(&service, &pods), &owner());
    service.ports = vec![port("pg", 5432, TargetPort::Number(81))];
    let plan = store.converge(&desired(&service, &pods), &owner());
    assert_eq!((plan.creates.len(), plan.updates.len(), plan.deletes.len()), (0, 3, 0));
    let mut labelled = owner();
    labelled.labels.insert("foo".to_owned(), "bar".to_owned());
    let plan = store.converge(&desired(&service, &pods), &labelled);
    assert_eq!((plan.creates.len(), plan.updates.len(), plan.deletes.len()), (0, 3, 0));
    assert_eq!(sorted_sizes(&store), [50, 100, 100]);
}

#[test]
fn s2_ten_slices_of_other_ports_are_recycled() {
    let pods = numbered(300);
    let mut other = spec();
    other.ports = vec![port("other", 5432, TargetPort::Number(81))];
    let mut store = Store::default();
    let with_other_ports = desired(&other, &pods);
    for tenth in 0..10 {
        create(&mut store, &with_other_ports, |index| index / 30 == tenth);
    }
    let plan = store.converge(&desired(&spec(), &pods), &owner());
    assert_eq!((plan.creates.len(), plan.updates.len(), plan.deletes.len()), (0, 3, 7));
    assert_eq!(sorted_sizes(&store), [100, 100, 100]);
}

#[test]
fn s2_updated_slices_are_filled_before_unchanged_ones() {
    // Two slices lose an endpoint and one does not; the new endpoints go into the two.
    let all = numbered(275);
    let before = desired(&spec(), &all[..250]);
    let mut store = Store::default();
    create(&mut store, &before, |index| index < 80);
    create(&mut store, &before, |index| (80..160).contains(&index));
    create(&mut store, &before, |index| (160..250).contains(&index));
    let after = desired(&spec(), all.iter().filter(|pod| !["pod7", "pod87"].contains(&&*pod.name)));
    let plan = store.converge(&after, &owner());
    assert_eq!((plan.creates.len(), plan.updates.len(), plan.deletes.len()), (0, 2, 0));
    assert_eq!(store.sizes(), [100, 83, 90]);
}

#[test]
fn s2_five_port_mappings_give_five_slices() {
    let mut service = spec();
    service.ports = vec![port("http", 80, TargetPort::Name("http".to_owned()))];
    let numbers: [u16; 5] = [8080, 8081, 8082, 8083, 8084];
    let pods: Vec<PodFacts> = numbered(300)
        .into_iter()
        .enumerate()
        .map(|(index, pod)| PodFacts {
            ports: Arc::new([container_port("http", Protocol::Tcp, numbers[index % 5])]),
            ..pod
        })
        .collect();
    let mut store = Store::default();
    store.converge(&desired(&service, &pods), &owner());
    assert_eq!(store.sizes(), [60, 60, 60, 60, 60]);
}

#[test]
fn s2_the_maximum_per_slice_is_respected() {
    let desired = desired(&spec(), &numbered(250));
    for (max, expected) in [
        (50, vec![50, 50, 50, 50, 50]),
        (80, vec![10, 80, 80, 80]),
        (150, vec![100, 150]),
        (250, vec![250]),
        (500, vec![250]),
    ] {
        let mut store = Store::with_max(max);
        store.converge(&desired, &owner());
        assert_eq!(sorted_sizes(&store), expected, "{max}");
    }
}

#[test]
fn s2_a_service_that_was_created_again_gets_slices_of_its_own() {
    let pods = pods(250);
    let mut store = Store::default();
    store.converge(&desired(&spec(), &pods), &owner());
    let again = SliceOwner { uid: "different".into(), ..owner() };
    let plan = store.converge(&desired(&spec(), &pods), &again);
    assert_eq!((plan.creates.len(), plan.updates.len(), plan.deletes.len()), (3, 0, 3));
}

#[test]
fn s2_a_terminating_pod_stays_until_it_is_deleted_and_its_replacement_joins() {
    let mut pods = numbered(3);
    let mut store = Store::default();
    store.converge(&desired(&spec(), &pods), &owner());
    pods[0].deleting = true;
    pods.push(pod("pod3", &["10.1.9.9"]));
    let plan = store.converge(&desired(&spec(), &pods), &owner());
    assert_eq!((plan.creates.len(), plan.updates.len(), plan.deletes.len()), (0, 1, 0));
    let union = store.union();
    let terminating: Vec<_> = union.iter().filter(|one| one.conditions.terminating).collect();
    assert_eq!((union.len(), terminating.len()), (4, 1));
    assert!(!terminating[0].conditions.ready && terminating[0].conditions.serving);
}
