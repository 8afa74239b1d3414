use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use proptest::prelude::*;

use super::*;

fn refs(name: &str) -> WorkloadRefs {
    WorkloadRefs { namespace: "home".to_owned(), name: name.to_owned(), ..WorkloadRefs::default() }
}

fn annotated(name: &str, networks: &str) -> WorkloadRefs {
    WorkloadRefs { networks: Some(networks.to_owned()), ..refs(name) }
}

fn blue() -> NadRef {
    NadRef::new("home", "blue")
}

fn summary(index: &UserIndex, nads: &[NadRef]) -> (usize, Vec<String>) {
    let summary = index.summary(nads, 10);
    (summary.count, summary.first.iter().map(User::to_string).collect())
}

/// Whether this object uses home/blue.
fn uses(kind: WorkloadKind, refs: &WorkloadRefs) -> bool {
    let mut index = UserIndex::default();
    index.apply(kind, refs);
    let used = index.summary(&[blue()], 1).count == 1;
    index.delete(kind, &refs.namespace, &refs.name);
    assert!(index.is_empty() && index.nads.is_empty(), "a deleted object leaves nothing behind");
    used
}

#[test]
fn every_form_of_reference_counts() {
    let default = |text: &str| WorkloadRefs { default_network: Some(text.to_owned()), ..refs("x") };
    let multus = |text: &str| WorkloadRefs { multus: vec!["red".to_owned(), text.to_owned()], ..refs("x") };
    let from = |namespace: &str, refs: WorkloadRefs| WorkloadRefs { namespace: namespace.to_owned(), ..refs };
    let rows = [
        (annotated("x", "blue"), true),
        (annotated("x", "home/blue"), true),
        (annotated("x", "blue@eth1"), true),
        (annotated("x", "home/blue@eth1"), true),
        (annotated("x", " red , blue "), true),
        (annotated("x", "red,green"), false),
        (annotated("x", "blue2"), false),
        (annotated("x", "other/blue"), false),
        (annotated("x", "blue,"), true),
        (annotated("x", "B!,blue"), true),
        (annotated("x", ""), false),
        (annotated("x", r#"[{"name": "blue"}]"#), true),
        (annotated("x", r#"[{"name": "blue", "namespace": "home"}]"#), true),
        (annotated("x", r#"[{"name": "blue", "namespace": "other"}]"#), false),
        (
            annotated(
                "x",
                r#"[{"name": "red"}, {"name": "blue", "interface": "n", "mac": "02:00:00:00:00:01"}]"#,
            ),
            true,
        ),
        (annotated("x", r#"[{"name": "blue", "ips": ["10.0.0.1"], "cni-args": {"a": 1}}]"#), true),
        (annotated("x", r#"[7, {"name": "blue"}]"#), true),
        (annotated("x", r#"[{"name": "blue""#), false),
        (from("other", annotated("x", "blue")), false),
        (from("other", annotated("x", "home/blue")), true),
        (from("other", annotated("x", r#"[{"name": "blue", "namespace": "home"}]"#)), true),
        (default("blue"), true),
        (default("home/blue"), true),
        (default(r#"[{"name": "blue", "namespace": "home"}]"#), true),
        (from("other", default("blue")), false),
        (from("other", default("home/blue")), true),
        (multus("blue"), true),
        (multus("home/blue"), true),
        (multus("other/blue"), false),
        (from("other", multus("blue")), false),
        (from("other", multus("home/blue")), true),
    ];
    for (refs, wanted) in rows {
        for kind in WorkloadKind::ALL {
            assert_eq!(uses(kind, &refs), wanted, "{} {refs:?}", kind.name());
        }
    }
    let mut index = UserIndex::default();
    index.apply(WorkloadKind::Pod, &WorkloadRefs { namespace: "other".to_owned(), ..default("blue") });
    assert_eq!(index.summary(&[NadRef::new("kube-system", "blue")], 1).count, 1);
}

#[test]
fn finished_and_owned_objects_do_not_count_but_running_pods_do() {
    let owned = |owner| WorkloadRefs { owner: Some((owner, "o".to_owned())), ..annotated("x", "blue") };
    let finished = WorkloadRefs { finished: true, ..annotated("x", "blue") };
    assert!(!uses(WorkloadKind::Pod, &finished) && !uses(WorkloadKind::Job, &finished));
    assert!(!uses(WorkloadKind::ReplicaSet, &owned(WorkloadKind::Deployment)));
    assert!(!uses(WorkloadKind::Job, &owned(WorkloadKind::CronJob)));
    assert!(!uses(WorkloadKind::VirtualMachineInstance, &owned(WorkloadKind::VirtualMachine)));
    assert!(
        uses(WorkloadKind::Pod, &owned(WorkloadKind::ReplicaSet))
            && uses(WorkloadKind::Pod, &owned(WorkloadKind::VirtualMachineInstance))
    );
}

#[test]
fn users_are_counted_once_and_listed_in_order() {
    let mut index = UserIndex::default();
    let both = [blue(), NadRef::new("home", "red")];
    for name in ["b", "a"] {
        index.apply(WorkloadKind::Pod, &annotated(name, "blue,red"));
    }
    index.apply(WorkloadKind::Deployment, &annotated("z", "red"));
    assert_eq!(
        summary(&index, &both),
        (3, vec!["Deployment home/z".into(), "Pod home/a".into(), "Pod home/b".into()])
    );
    assert_eq!(summary(&index, &[blue()]), (2, vec!["Pod home/a".into(), "Pod home/b".into()]));
    index.apply(WorkloadKind::Pod, &annotated("a", "red"));
    assert_eq!(summary(&index, &[blue()]), (1, vec!["Pod home/b".into()]));
    assert_eq!(summary(&index, &both).0, 3);
    for number in 0..12 {
        index.apply(WorkloadKind::Job, &annotated(&format!("j{number:02}"), "blue"));
    }
    let (count, first) = summary(&index, &both);
    assert_eq!((count, first.len(), first[1].as_str()), (15, 10, "Job home/j00"));
}

#[test]
fn objects_missing_from_a_relist_are_removed() {
    let mut index = UserIndex::default();
    for name in ["a", "b"] {
        index.apply(WorkloadKind::Pod, &annotated(name, "blue"));
        index.apply(WorkloadKind::Job, &annotated(name, "blue"));
    }
    index.start_relist(WorkloadKind::Pod);
    index.apply(WorkloadKind::Pod, &annotated("b", "blue"));
    assert_eq!(summary(&index, &[blue()]).0, 4, "objects stay until the relist is complete");
    index.finish_relist(WorkloadKind::Pod);
    assert_eq!(
        summary(&index, &[blue()]),
        (3, vec!["Job home/a".into(), "Job home/b".into(), "Pod home/b".into()])
    );
    index.clear(WorkloadKind::Job);
    assert_eq!(summary(&index, &[blue()]), (1, vec!["Pod home/b".into()]));
}

#[test]
fn batches_give_the_same_result_as_one_pass() {
    let index = || {
        let mut index = UserIndex::default();
        for number in 0..100 {
            let nets = ["blue,red", "blue", "red,green", "blue,red,green"][number % 4];
            index.apply(WorkloadKind::Pod, &annotated(&format!("p{number}"), nets));
            index.apply(WorkloadKind::Job, &annotated(&format!("j{number}"), "blue"));
        }
        index
    };
    let nads = ["blue", "red", "green", "none"].map(|name| NadRef::new("home", name));
    let whole = index().summary(&nads, 10);
    assert_eq!(whole.count, 200);
    for limit in [1, 7, 1000] {
        let (mut index, mut query, mut batches) = (index(), SummaryQuery::new(&nads, 10), 1);
        while !index.advance(&mut query, limit) {
            query.count_visited();
            batches += 1;
        }
        assert_eq!(query.summary(), whole, "{limit}");
        assert!(limit > 1 || batches >= 175, "{batches} batches");
        index.start_relist(WorkloadKind::Pod);
        for number in (0..100).step_by(2) {
            index.apply(WorkloadKind::Pod, &annotated(&format!("p{number}"), "blue"));
        }
        let (mut after, mut batches) = (None, 0);
        loop {
            batches += 1;
            after = index.remove_unlisted(WorkloadKind::Pod, after.as_ref(), limit).next;
            if after.is_none() {
                break;
            }
        }
        assert_eq!((index.len(), batches), (150, 100_usize.div_ceil(limit)), "{limit}");
    }
}

#[test]
fn an_owner_is_indexed_even_if_it_does_not_count() {
    let mut index = UserIndex::default();
    let set =
        WorkloadRefs { owner: Some((WorkloadKind::Deployment, "d".to_owned())), ..annotated("set", "blue") };
    index.apply(WorkloadKind::ReplicaSet, &set);
    assert_eq!(index.references_of(WorkloadKind::ReplicaSet, "home", "set").collect::<Vec<_>>(), [&blue()]);
    assert_eq!(index.references_of(WorkloadKind::ReplicaSet, "other", "set").count(), 0);
    assert_eq!(summary(&index, &[blue()]).0, 0);
}

#[test]
fn a_decision_among_60_000_objects_takes_less_than_a_millisecond() {
    let mut index = UserIndex::default();
    for number in 0..10_000 {
        let refs =
            WorkloadRefs { multus: vec![format!("net-{}", number % 100)], ..refs(&format!("vm-{number}")) };
        index.apply(WorkloadKind::VirtualMachine, &refs);
    }
    for number in 0..50_000 {
        index.apply(
            WorkloadKind::Pod,
            &annotated(&format!("pod-{number}"), &format!("net-{},net-x", number % 100)),
        );
    }
    let nads = [NadRef::new("home", "net-7"), NadRef::new("home", "net-none")];
    // The best of several runs, to measure the index and not the load of the machine.
    let best = (0..20).map(|_| {
        let started = Instant::now();
        assert_eq!(index.summary(&nads, 10).count, 600);
        started.elapsed()
    });
    assert!(best.min().unwrap() < Duration::from_millis(1));
    let all = NadRef::new("home", "net-x");
    let best = (0..20).map(|_| {
        let started = Instant::now();
        assert_eq!(index.summary([&all], 10).count, 50_000);
        started.elapsed()
    });
    assert!(best.min().unwrap() < Duration::from_millis(1));
}

#[test]
fn hostile_objects_take_bounded_memory() {
    let mut index = UserIndex::default();
    for object in 0..100 {
        let names = |kind: &str| (0..4096).map(|it| format!("{kind}-{object}-{it}")).collect::<Vec<_>>();
        let hostile = WorkloadRefs {
            default_network: Some(names("d").join(",")),
            multus: names("m"),
            ..annotated(&format!("x{object}"), &names("n").join(","))
        };
        index.apply(WorkloadKind::Deployment, &hostile);
    }
    assert_eq!((index.len(), index.nads.len()), (100, 100 * MAX_NAD_REFS));
    for object in 0..100 {
        index.delete(WorkloadKind::Deployment, "home", &format!("x{object}"));
    }
    assert!(index.is_empty() && index.nads.is_empty());
}

fn references_in(networks: &str) -> Vec<String> {
    nad_refs(Some(networks), None, "home").iter().map(NadRef::to_string).collect()
}

#[test]
fn the_number_of_references_of_one_object_is_limited_without_duplicates() {
    let many: Vec<String> = (0..10_000).map(|number| format!("n{number}")).collect();
    assert_eq!(references_in(&many.join(",")).len(), MAX_NAD_REFS);
    assert_eq!(nad_refs(Some(&many.join(",")), Some(&many.join(",")), "home").len(), MAX_NAD_REFS);
    let one = format!("{}blue", "red,".repeat(MAX_NAD_REFS + 1));
    assert_eq!(references_in(&one), ["home/blue", "home/red"]);
}

#[test]
fn a_default_network_counts_in_the_namespaces_of_multus_and_of_the_pod() {
    let found = |text| nad_refs(None, Some(text), "home");
    let [here, there] = ["home", "kube-system"].map(|namespace| NadRef::new(namespace, "a"));
    assert_eq!(found("a"), [here.clone(), there.clone()]);
    assert_eq!(found(r#"[{"name": "a"}]"#), [here, there]);
    assert_eq!(found("other/a"), [NadRef::new("other", "a")]);
}

proptest! {
    #[test]
    fn the_index_agrees_with_a_scan_of_every_object(
        changes in proptest::collection::vec((0..4_u8, proptest::collection::btree_set(0..3_u8, 0..3)), 1..40),
    ) {
        let mut index = UserIndex::default();
        let mut model: BTreeMap<String, BTreeSet<u8>> = BTreeMap::new();
        for (object, references) in changes {
            let name = format!("x{object}");
            let networks: Vec<String> = references.iter().map(|net| format!("net-{net}")).collect();
            index.apply(WorkloadKind::Pod, &annotated(&name, &networks.join(",")));
            model.insert(name, references);
            for queried in [vec![0], vec![0, 1], vec![0, 1, 2]] {
                let uses = |all: &BTreeSet<u8>| queried.iter().any(|net| all.contains(net));
                let users = model.iter().filter(|(_, all)| uses(all)).map(|(name, _)| format!("Pod home/{name}"));
                let users: Vec<String> = users.collect();
                let queried: Vec<NadRef> =
                    queried.iter().map(|net| NadRef::new("home", format!("net-{net}"))).collect();
                prop_assert_eq!(summary(&index, &queried), (users.len(), users));
            }
        }
        for name in model.keys() {
            index.delete(WorkloadKind::Pod, "home", name);
        }
        prop_assert!(index.is_empty() && index.nads.is_empty());
    }
}
