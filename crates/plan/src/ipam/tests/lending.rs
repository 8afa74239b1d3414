//! Lent and borrowed addresses.

use super::*;

#[test]
fn an_address_is_lent_once_and_returned_when_its_ipblock_is_deleted() {
    let mut node = TestNode::new(&["10.0.0.0/24"]);
    node.acquire("10.0.0.0/28");
    let used = node.lease("p")[0];
    node.object("10.0.0.5/32", "five", other(), Some(me()));
    node.object("10.0.0.1/32", "one", other(), Some(me()));
    assert_eq!(used, ip("10.0.0.1"));
    let steps = node.settle();
    let [BlockStep::UpdateStatus { status, .. }] = &steps[..] else { panic!("{steps:?}") };
    assert_eq!(status.lent, [LentAddress { address: ip("10.0.0.5"), block: "five".to_owned() }]);
    assert_eq!(status.refused, ["one"]);
    assert_eq!((status.used, status.free), (1, 13));
    assert_eq!(status.spare, ["10.0.0.2-10.0.0.4", "10.0.0.6-10.0.0.15"]);
    assert_eq!(
        node.request("q", &["10.0.0.5"]),
        Err(Shortage::Rejected(AllocationError::Lent(ip("10.0.0.5"))))
    );
    node.idle.insert(block("10.0.0.0/28"));
    node.record(LedgerRecord::Freed(key("p")));
    node.objects.remove("blue.10.0.0.1-32");
    assert!(
        matches!(node.settle()[..], [BlockStep::UpdateStatus { .. }]),
        "a block with lent addresses stays"
    );
    // An IPBlock that the watch does not show may still exist.
    node.objects.remove("blue.10.0.0.5-32");
    let steps = node.settle();
    assert!(
        matches!(&steps[..], [BlockStep::LookupLent { object, .. }, BlockStep::UpdateStatus { .. }] if object == "five"),
        "{steps:?}"
    );
    node.record(LedgerRecord::Returned { block: block("10.0.0.0/28"), address: ip("10.0.0.5") });
    assert!(matches!(node.settle()[..], [BlockStep::Delete { .. }]));
    assert!(node.ledger.holdings()[&block("10.0.0.0/28")].lent.is_empty());
}

#[test]
fn all_borrowers_are_answered_with_one_status_update() {
    let mut node = TestNode::new(&["10.0.0.0/22"]);
    node.acquire("10.0.0.0/26");
    for number in 1..=40 {
        let range = format!("10.0.0.{number}/32");
        node.object(&range, &range, other(), Some(me()));
    }
    let steps = node.settle();
    let [BlockStep::UpdateStatus { status, .. }] = &steps[..] else { panic!("{steps:?}") };
    assert_eq!((status.lent.len(), status.refused.len()), (40, 0));
}

#[test]
fn a_borrowed_address_is_used_only_after_the_lender_grants_it() {
    let mut node = TestNode::new(&["10.0.0.0/24"]);
    let single = block("10.0.0.5/32");
    node.record(LedgerRecord::Acquiring { block: single.clone(), network: "blue".to_owned() });
    node.object("10.0.0.5/32", "five", me(), Some(other()));
    assert_eq!(node.settle(), []);
    assert!(node.request("p", &[]).is_err());
    let enclosing = |holder: HolderRef, status: IPBlockStatus| {
        let spec = IPBlockSpec {
            network: "blue".to_owned(),
            network_uid: "net".to_owned(),
            cidr: net("10.0.0.0/28"),
            holder,
            lender: None,
            boot_id: String::new(),
        };
        Some(ObservedIpBlock { uid: "around".to_owned(), spec, status })
    };
    let lent = |uid: &str| IPBlockStatus {
        lent: vec![LentAddress { address: ip("10.0.0.5"), block: uid.to_owned() }],
        ..IPBlockStatus::default()
    };
    node.lenders.insert(single.clone(), enclosing(other(), lent("an earlier one")));
    assert_eq!(node.settle(), []);
    for no in [
        None,
        enclosing(me(), lent("five")),
        enclosing(other(), IPBlockStatus { refused: vec!["five".to_owned()], ..IPBlockStatus::default() }),
    ] {
        let mut refused = TestNode {
            ledger: node.ledger.clone(),
            objects: node.objects.clone(),
            ..TestNode::new(&["10.0.0.0/24"])
        };
        refused.lenders.insert(single.clone(), no);
        assert!(matches!(refused.settle()[..], [BlockStep::Delete { .. }]));
    }
    node.lenders.insert(single, enclosing(other(), lent("five")));
    node.settle();
    assert_eq!(node.request("p", &[]).unwrap().lease.addresses, [ip("10.0.0.5")]);
}

#[test]
fn an_unused_borrowed_address_is_returned_though_the_network_is_exhausted() {
    let mut node = TestNode::new(&["10.0.0.0/24"]);
    node.acquire("10.0.0.0/28");
    for pod in 0..15 {
        node.lease(&pod.to_string());
    }
    let single = block("10.0.0.21/32");
    node.record(LedgerRecord::Acquiring { block: single.clone(), network: "blue".to_owned() });
    node.record(LedgerRecord::Acquired { block: single.clone(), object: "one".to_owned() });
    node.object("10.0.0.21/32", "one", me(), Some(other()));
    node.exhausted.insert(("net".to_owned(), Family::V4));
    node.reported.extend([block("10.0.0.0/28"), single.clone()]);
    node.idle.insert(single.clone());
    node.pending.any.insert(("net".to_owned(), Family::V4), 1);
    assert_eq!(node.settle(), [], "an ADD waits for it");
    node.pending = PendingRequests::default();
    assert_eq!(node.settle(), [BlockStep::Delete { block: single, object: "one".to_owned() }]);
}

#[test]
fn a_holder_that_is_not_a_node_borrows_like_any_other() {
    let mut node = TestNode::new(&["10.0.0.0/28"]);
    node.acquire("10.0.0.0/30");
    node.object("10.0.0.2/32", "request", claims(), Some(me()));
    let steps = node.settle();
    let lent = LentAddress { address: ip("10.0.0.2"), block: "request".to_owned() };
    assert!(
        steps.iter().any(
            |step| matches!(step, BlockStep::UpdateStatus { status, .. } if status.lent == [lent.clone()])
        ),
        "{steps:?}"
    );
}

#[test]
fn lending_candidates_are_free_addresses_of_other_nodes_and_differ_by_seed() {
    let mut node = TestNode::new(&["10.0.0.0/27"]);
    node.object("10.0.0.0/30", "theirs", other(), None);
    node.object("10.0.0.4/30", "mine", me(), None);
    node.object("10.0.0.2/32", "single", other(), Some(me()));
    let grid = node.pools["net"].grid(Family::V4).unwrap().clone();
    let objects: Vec<ObservedIpBlock> = node.objects.values().cloned().collect();
    let pick = |refused: &[&str], seed| {
        let refused = refused.iter().map(|text| ip(text)).collect();
        lending_candidate(&objects, &grid, &me(), &refused, &BTreeSet::new(), seed)
            .map(|(address, _)| address)
    };
    let found: BTreeSet<_> = (0..20).filter_map(|seed| pick(&[], seed)).collect();
    assert_eq!(found, BTreeSet::from([ip("10.0.0.1"), ip("10.0.0.3")]));
    assert_eq!(pick(&["10.0.0.1"], 4), Some(ip("10.0.0.3")));
    assert_eq!(pick(&["10.0.0.1", "10.0.0.3"], 4), None);
}
