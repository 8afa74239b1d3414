//! R3, R5, R18-R21, R30, R33, R35: the distribution of endpoints over slices.

use std::{collections::BTreeSet, sync::Arc};

use api::networkservice::TargetPort;

use super::{
    fixtures::{container_port, desired, ipv4, owner, pod, pods, port, spec, time},
    store::Store,
};
use crate::services::{
    DesiredEndpoints, EndpointPorts, Families, Family, Labels, ObservedEndpoint, PackInput, PodFacts,
    SliceContent, SliceOwner, SlicePlan, pack, withdraw,
};

/// The number of creates, updates and deletes.
fn writes(plan: &SlicePlan) -> (usize, usize, usize) {
    (plan.creates.len(), plan.updates.len(), plan.deletes.len())
}

/// A service with these pods, converged.
fn converged(pods: &[PodFacts]) -> Store {
    let mut store = Store::default();
    store.converge(&all(pods), &owner());
    store
}

fn all(pods: &[PodFacts]) -> DesiredEndpoints {
    desired(&spec(), pods)
}

fn dual() -> SliceOwner {
    SliceOwner { families: Families::DUAL, ..owner() }
}

#[test]
fn r18_250_pods_fill_three_slices() {
    let mut store = Store::default();
    let plan = store.converge(&all(&pods(250)), &owner());
    assert_eq!(writes(&plan), (3, 0, 0));
    assert_eq!(store.sizes(), [100, 100, 50]);
}

#[test]
fn r18_more_than_1000_endpoints_are_all_published() {
    let pods: Vec<PodFacts> = (0..1001).map(|index| pod(&format!("p{index}"), &[&ipv4(index)])).collect();
    let store = converged(&pods);
    assert_eq!((store.sizes().len(), store.union().len()), (11, 1001));
}

#[test]
fn r30_equal_slices_are_not_written() {
    let pods = pods(250);
    let store = converged(&pods);
    assert!(store.plan(&all(&pods), &owner()).is_empty());
    // Also not in another order of the pods or of the slices.
    let reversed = desired(&spec(), pods.iter().rev());
    let mut slices = store.slices();
    slices.reverse();
    assert!(pack(&reversed, &PackInput::new(&owner(), &slices)).is_empty());
}

#[test]
fn r20_a_single_change_is_one_write_of_one_slice() {
    let mut pods = pods(250);
    let mut store = converged(&pods);
    pods[120].ready = false;
    assert_eq!(writes(&store.converge(&all(&pods), &owner())), (0, 1, 0));
    pods[120].node = Some("n2".into());
    assert_eq!(writes(&store.converge(&all(&pods), &owner())), (0, 1, 0));
    // The same name and address with another UID.
    pods[120].uid = "uid-again".into();
    assert_eq!(writes(&store.converge(&all(&pods), &owner())), (0, 1, 0));
    let removed = pods.remove(7);
    assert_eq!(writes(&store.converge(&all(&pods), &owner())), (0, 1, 0));
    pods.push(removed);
    assert_eq!(writes(&store.converge(&all(&pods), &owner())), (0, 1, 0));
    assert_eq!(store.union().len(), 250);
}

#[test]
fn r20_endpoints_stay_in_their_slices() {
    let mut pods = pods(250);
    let mut store = converged(&pods);
    let before: Vec<_> = store.slices()[0].endpoints.clone();
    pods.retain(|pod| !(100..200).contains(&pod.name[1..].parse::<usize>().unwrap()));
    store.converge(&all(&pods), &owner());
    assert!(store.slices().iter().any(|slice| slice.endpoints == before), "the slice did not change");
    assert_eq!(store.sizes().iter().sum::<usize>(), 150);
}

#[test]
fn r20_slices_that_are_written_anyway_are_filled_first_and_the_fullest_before_the_others() {
    let mut pods = pods(250);
    let mut store = converged(&pods);
    // 20 leave the first slice, 5 the second; the third stays with 50.
    let in_slice = |store: &Store, index: usize| -> BTreeSet<String> {
        let known = |endpoint: &ObservedEndpoint| match endpoint {
            ObservedEndpoint::Known(endpoint) => endpoint.pod.to_string(),
            ObservedEndpoint::Altered => String::new(),
        };
        store.slices()[index].endpoints.iter().map(known).collect()
    };
    let (first, second) = (in_slice(&store, 0), in_slice(&store, 1));
    let gone: BTreeSet<&String> = first.iter().take(20).chain(second.iter().take(5)).collect();
    pods.retain(|pod| !gone.contains(&pod.name.to_string()));
    pods.extend((300..315).map(|index| pod(&format!("p{index}"), &[&ipv4(index)])));
    let plan = store.converge(&all(&pods), &owner());
    assert_eq!(writes(&plan), (0, 2, 0));
    // The second slice has 95 and takes 5, the first has 80 and takes 10.
    assert_eq!(store.sizes(), [90, 100, 50]);
}

#[test]
fn r20_a_small_rest_goes_into_the_unchanged_slice_that_it_fits_best() {
    let mut pods = pods(250);
    let mut store = converged(&pods);
    pods.drain(..30);
    store.converge(&all(&pods), &owner());
    let sizes = store.sizes();
    assert_eq!(sizes.iter().sum::<usize>(), 220);
    let largest_gap = |sizes: &[usize]| *sizes.iter().filter(|size| **size < 100).max().unwrap();
    let fullest = largest_gap(&sizes);
    pods.push(pod("new", &["10.9.0.1"]));
    let plan = store.converge(&all(&pods), &owner());
    assert_eq!(writes(&plan), (0, 1, 0));
    assert_eq!(plan.updates[0].content.endpoints.len(), fullest + 1);
}

#[test]
fn r20_a_rest_that_fits_into_no_slice_gets_a_new_one_and_unchanged_slices_stay() {
    let mut pods = pods(180);
    let mut store = converged(&pods);
    assert_eq!(store.sizes(), [100, 80]);
    pods.extend((300..330).map(|index| pod(&format!("p{index}"), &[&ipv4(index)])));
    assert_eq!(writes(&store.converge(&all(&pods), &owner())), (1, 0, 0));
    assert_eq!(store.sizes(), [100, 80, 30]);
}

#[test]
fn r20_a_half_empty_slice_is_not_written_only_to_compact() {
    let mut pods = pods(300);
    let mut store = converged(&pods);
    pods.retain(|pod| pod.name[1..].parse::<usize>().unwrap() % 3 == 0);
    store.converge(&all(&pods), &owner());
    assert_eq!(store.sizes().len(), 3, "the three slices stay");
    assert!(store.plan(&all(&pods), &owner()).is_empty());
}

#[test]
fn r20_a_delete_and_a_create_become_an_update() {
    let mut service = spec();
    let pods = pods(150);
    let mut store = Store::default();
    store.converge(&desired(&service, &pods), &owner());
    // Another port: other slices. The two of the old port are used again.
    service.ports = vec![port("pg", 5432, TargetPort::Number(6432))];
    let plan = store.converge(&desired(&service, &pods), &owner());
    assert_eq!(writes(&plan), (0, 2, 0));
    // All pods are replaced: the slices keep their names.
    let names: Vec<Arc<str>> = store.slices().iter().map(|slice| slice.name.clone()).collect();
    let others: Vec<PodFacts> = (400..550).map(|index| pod(&format!("p{index}"), &[&ipv4(index)])).collect();
    let plan = store.converge(&desired(&service, &others), &owner());
    assert_eq!(writes(&plan), (0, 2, 0));
    assert_eq!(store.slices().iter().map(|slice| slice.name.clone()).collect::<Vec<_>>(), names);
}

#[test]
fn r19_a_family_without_endpoints_keeps_one_empty_slice() {
    let mut store = Store::default();
    let plan = store.converge(&all(&[]), &dual());
    assert_eq!(writes(&plan), (2, 0, 0));
    let created = |content: &SliceContent| content.trigger_time == Some(owner().created);
    assert!(plan.creates.iter().all(created), "R33");
    let families: Vec<_> = store.slices().iter().map(|slice| slice.family).collect();
    assert_eq!(families, [Some(Family::Ipv4), Some(Family::Ipv6)]);
    assert!(store.slices().iter().all(|slice| slice.ports.as_ref().is_some_and(EndpointPorts::is_empty)));
    // It becomes the first slice with endpoints, and the last one becomes it.
    let plan = store.converge(&all(&pods(3)), &dual());
    assert_eq!(writes(&plan), (0, 1, 0));
    let plan = store.converge(&all(&[]), &dual());
    assert_eq!(writes(&plan), (0, 1, 0));
    assert_eq!(plan.updates[0].content.trigger_time, None, "R33");
    assert_eq!(store.sizes(), [0, 0]);
}

#[test]
fn r19_of_many_slices_one_becomes_the_placeholder() {
    let mut store = converged(&pods(250));
    assert_eq!(writes(&store.converge(&all(&[]), &owner())), (0, 1, 2));
    assert_eq!(store.sizes(), [0]);
}

#[test]
fn r19_a_service_without_ports_has_one_placeholder_too() {
    let mut service = spec();
    service.ports.clear();
    let mut store = Store::default();
    store.converge(&desired(&service, &[]), &owner());
    assert_eq!(writes(&store.converge(&desired(&service, &pods(2)), &owner())), (0, 1, 0));
    assert_eq!(writes(&store.converge(&desired(&service, &[]), &owner())), (0, 1, 0));
}

#[test]
fn r11_r12_slices_of_a_family_that_the_service_no_longer_has_are_deleted() {
    let both = [pod("a", &["10.1.0.1", "10.1.0.2", "fd00::1", "fd00::2"])];
    let mut store = Store::default();
    assert_eq!(writes(&store.converge(&all(&both), &dual())), (2, 0, 0));
    assert_eq!(store.sizes(), [2, 2]);
    let only_ipv6 = SliceOwner { families: Families { ipv4: false, ipv6: true }, ..owner() };
    assert_eq!(writes(&store.converge(&all(&both), &only_ipv6)), (0, 0, 1));
    assert_eq!(store.slices()[0].family, Some(Family::Ipv6));
}

#[test]
fn r11_a_slice_of_another_address_type_is_deleted() {
    let mut store = converged(&pods(3));
    store.slice(0).family = None;
    assert_eq!(writes(&store.converge(&all(&pods(3)), &owner())), (1, 0, 1));
}

#[test]
fn r3_slices_of_a_service_that_was_created_again_are_deleted_and_never_used_again() {
    let pods = pods(150);
    let mut store = converged(&pods);
    let again = SliceOwner { uid: "service-uid-2".into(), ..owner() };
    let plan = store.plan(&all(&pods), &again);
    assert_eq!(writes(&plan), (2, 0, 2));
    store.apply(&plan, &again);
    assert!(store.slices().iter().all(|slice| slice.owner.as_deref() == Some("service-uid-2")));
    assert!(store.plan(&all(&pods), &again).is_empty());
}

#[test]
fn r3_a_slice_that_lost_its_owner_gets_it_back() {
    let mut store = converged(&pods(3));
    store.slice(0).owner = None;
    assert_eq!(writes(&store.converge(&all(&pods(3)), &owner())), (0, 1, 0));
}

#[test]
fn r1_r2_r5_r6_labels_are_copied_except_for_the_reserved_ones() {
    let mut service = owner();
    for key in [
        "kubernetes.io/service-name",
        "endpointslice.kubernetes.io/managed-by",
        "service.kubernetes.io/headless",
    ] {
        service.labels.insert(key.to_owned(), "wrong".to_owned());
    }
    let expected = Labels::new([
        ("team", "storage"),
        ("kubernetes.io/service-name", "db"),
        ("endpointslice.kubernetes.io/managed-by", "networkservice.patchbay.dev"),
        ("service.kubernetes.io/headless", ""),
    ]);
    assert_eq!(service.slice_labels(), expected);
    service.headless = false;
    assert_eq!(service.slice_labels().get("service.kubernetes.io/headless"), None);
    assert_eq!(service.generate_name(), "db-", "R4");
}

#[test]
fn r5_a_changed_label_is_one_update_of_each_slice_and_a_removed_label_disappears() {
    let pods = pods(150);
    let mut store = converged(&pods);
    let mut changed = owner();
    changed.labels.insert("team".to_owned(), "search".to_owned());
    let plan = store.converge(&all(&pods), &changed);
    assert_eq!(writes(&plan), (0, 2, 0));
    assert_eq!(plan.updates[0].content.trigger_time, None, "no pod changed");
    changed.labels.clear();
    assert_eq!(writes(&store.converge(&all(&pods), &changed)), (0, 2, 0));
    assert!(store.slices().iter().all(|slice| slice.labels.get("team").is_none()));
}

#[test]
fn the_annotation_of_the_network_is_restored() {
    let mut store = converged(&pods(3));
    store.slice(0).network = Some("shop/red".into());
    assert_eq!(writes(&store.converge(&all(&pods(3)), &owner())), (0, 1, 0));
    assert_eq!(store.slices()[0].network.as_deref(), Some("shop/blue"));
}

#[test]
fn r32_edits_and_deletions_of_others_are_repaired() {
    let pods = pods(150);
    let mut store = converged(&pods);
    // An endpoint of a foreign form, one removed, and another port list.
    store.slice(0).endpoints[3] = ObservedEndpoint::Altered;
    store.touch(0);
    assert_eq!(writes(&store.converge(&all(&pods), &owner())), (0, 1, 0));
    store.slice(1).endpoints.pop();
    assert_eq!(writes(&store.converge(&all(&pods), &owner())), (0, 1, 0));
    store.slice(1).ports = None;
    assert_eq!(writes(&store.converge(&all(&pods), &owner())), (0, 1, 0));
    store.remove(0);
    assert_eq!(writes(&store.converge(&all(&pods), &owner())), (1, 0, 0));
    assert_eq!(store.union().len(), 150);
}

#[test]
fn doubled_slices_become_one() {
    let pods = pods(150);
    let mut store = converged(&pods);
    // Two leaders created the same slices.
    let plan = Store::default().plan(&all(&pods), &owner());
    store.apply(&plan, &owner());
    assert_eq!(store.sizes().len(), 4);
    assert_eq!(writes(&store.converge(&all(&pods), &owner())), (0, 0, 2));
    assert_eq!(store.union().len(), 150);
    // Also if one of them has moved on.
    let mut changed = pods.clone();
    changed[0].ready = false;
    store.apply(&Store::default().plan(&all(&pods), &owner()), &owner());
    store.converge(&all(&changed), &owner());
    assert_eq!((store.sizes().len(), store.union().len()), (2, 150));
}

#[test]
fn doubled_placeholders_become_one() {
    let mut store = Store::default();
    let plan = store.plan(&all(&[]), &owner());
    store.apply(&plan, &owner());
    store.apply(&plan, &owner());
    assert_eq!(writes(&store.converge(&all(&[]), &owner())), (0, 0, 1));
}

#[test]
fn r31_a_stale_cache_leads_to_conflicts_and_not_to_lost_endpoints() {
    let mut pods = pods(150);
    let mut store = converged(&pods);
    let stale = store.clone();
    pods[3].ready = false;
    store.converge(&all(&pods), &owner());
    // The plan of the stale cache carries the old resource version, which the API server refuses.
    let plan = stale.plan(&all(&pods), &owner());
    let stored = store.slices();
    let current = stored.iter().find(|slice| slice.name == plan.updates[0].target.name).unwrap();
    assert_ne!(plan.updates[0].target.resource_version, current.resource_version);
    assert_eq!(plan.updates[0].target.uid, current.uid);
}

#[test]
fn a_slice_that_is_being_deleted_counts_as_gone() {
    let mut store = converged(&pods(3));
    store.slice(0).deleting = true;
    let plan = store.plan(&all(&pods(3)), &owner());
    assert_eq!(writes(&plan), (1, 0, 0));
    assert_eq!(withdraw(store.slices()), SlicePlan::default());
}

#[test]
fn r35_no_slice_is_created_while_the_service_is_being_deleted() {
    let deleting = SliceOwner { deleting: true, ..owner() };
    assert!(Store::default().plan(&all(&pods(3)), &deleting).is_empty());
    let store = converged(&pods(3));
    let more: Vec<PodFacts> = (0..150).map(|index| pod(&format!("p{index:03}"), &[&ipv4(index)])).collect();
    // The slice that exists gets what it can hold of the rest; no slice is created.
    assert_eq!(writes(&store.plan(&all(&more), &deleting)), (0, 1, 0));
}

#[test]
fn r7_r8_the_slices_of_an_invalid_service_are_all_deleted() {
    let store = converged(&pods(250));
    assert_eq!(writes(&withdraw(store.slices())), (0, 0, 3));
}

#[test]
fn r16_pods_with_other_ports_are_in_other_slices() {
    let mut service = spec();
    service.ports = vec![port("pg", 5432, TargetPort::Name("pg".to_owned()))];
    let with_port = |name: &str, address: &str, number: u16| PodFacts {
        ports: Arc::new([container_port("pg", api::networkservice::Protocol::Tcp, number)]),
        ..pod(name, &[address])
    };
    let mut list = vec![with_port("a", "10.1.0.1", 1000), with_port("b", "10.1.0.2", 2000)];
    let mut store = Store::default();
    assert_eq!(writes(&store.converge(&desired(&service, &list), &owner())), (2, 0, 0));
    assert_eq!(store.sizes(), [1, 1]);
    // A pod that changes its port changes its slice.
    list[1] = with_port("b", "10.1.0.2", 1000);
    assert_eq!(writes(&store.converge(&desired(&service, &list), &owner())), (0, 1, 1));
    assert_eq!(store.sizes(), [2]);
}

#[test]
fn r33_the_trigger_time_is_the_earliest_readiness_change_that_caused_the_write() {
    let mut pods = pods(150);
    let mut store = Store::default();
    for (index, pod) in (0..).zip(&mut pods) {
        pod.ready_since = Some(time(-1000 + index));
    }
    // Pods that were ready before the Service existed: its creation is the trigger.
    let plan = store.converge(&all(&pods), &owner());
    assert!(plan.creates.iter().all(|content| content.trigger_time == Some(owner().created)));
    let plan_at = |store: &Store, pods: &[PodFacts], second: i64| {
        let (slices, owner) = (store.slices(), owner());
        let input = PackInput { last_planned: Some(time(second)), ..PackInput::new(&owner, &slices) };
        pack(&all(pods), &input)
    };
    // Two changes in one slice, the earlier counts; changes before the last plan do not.
    for (index, second) in [(5, 107), (6, 103)] {
        (pods[index].ready, pods[index].ready_since) = (false, Some(time(second)));
    }
    let plan = plan_at(&store, &pods, 100);
    let times: Vec<_> = plan.updates.iter().map(|update| update.content.trigger_time).collect();
    assert!(times.iter().flatten().min() == Some(&time(103)), "{times:?}");
    store.apply(&plan, &owner());
    pods[7].node = Some("n2".into());
    let plan = plan_at(&store, &pods, 200);
    assert_eq!(plan.updates[0].content.trigger_time, None, "the pod was ready long before");
    // Kubernetes stores whole seconds: a change in the second of the last plan counts.
    (pods[7].ready, pods[7].ready_since) = (false, Some(time(200)));
    let plan = plan_at(&store, &pods, 200);
    assert_eq!(plan.updates[0].content.trigger_time, Some(time(200)));
    assert_eq!(time(200).to_string(), "2023-11-14T22:16:40Z", "RFC 3339");
    // A change of readiness that the watch delivers after another plan still caused the write.
    let plan = plan_at(&store, &pods, 205);
    assert_eq!(plan.updates[0].content.trigger_time, Some(time(200)));
    // So did the readiness of a new pod that the watch delivers in the next second.
    let mut new = pod("new", &["10.1.9.9"]);
    new.ready_since = Some(time(300));
    pods.push(new);
    (pods[7].ready, pods[7].ready_since) = (true, Some(time(-1000)));
    for (planned, expected) in [(300, Some(time(300))), (301, Some(time(300))), (302, None)] {
        let times =
            plan_at(&store, &pods, planned).updates.into_iter().map(|update| update.content.trigger_time);
        assert_eq!(times.flatten().min(), expected, "planned at {planned}");
    }
}
