//! Blocks after a reboot or a lost journal.

use super::*;

/// A node whose only block, with an address that is lent, is not in its journal.
fn with_lost_journal(boot_of_block: &str) -> TestNode {
    let mut node = TestNode::new(&["10.0.0.0/28"]);
    node.record(LedgerRecord::Incomplete);
    node.record(LedgerRecord::Booted(node.boot.clone()));
    node.object("10.0.0.0/28", "block", me(), None);
    let object = node.objects.values_mut().next().unwrap();
    object.spec.boot_id = boot_of_block.to_owned();
    object.status.lent = vec![LentAddress { address: ip("10.0.0.3"), block: "borrower".to_owned() }];
    node
}

#[test]
fn a_block_of_an_earlier_boot_is_reused_after_its_journal_was_lost() {
    let mut node = with_lost_journal("an earlier boot");
    let steps = node.settle();
    let whole = block("10.0.0.0/28");
    assert_eq!(node.ledger.holdings()[&whole].stage, Stage::Open);
    assert!(node.ledger.holdings()[&whole].lent.contains_key(&ip("10.0.0.3")), "what is lent stays lent");
    // Nothing is allocated until the block carries the current boot.
    let update = BlockStep::UpdateBoot { block: whole, object: "block".to_owned() };
    assert!(steps.contains(&update), "{steps:?}");
    assert!(node.request("p", &[]).is_err());
    node.objects.values_mut().next().unwrap().spec.boot_id = node.boot.clone();
    assert!(!node.settle().contains(&update));
    assert!(node.request("p", &[]).is_ok());
}

#[test]
fn a_block_of_this_boot_or_of_an_unknown_one_stays_unverified_after_its_journal_was_lost() {
    for (of_block, now) in [("boot", "boot"), ("", "boot"), ("an earlier boot", "")] {
        let mut node = with_lost_journal(of_block);
        node.boot = now.to_owned();
        node.settle();
        assert_eq!(
            node.ledger.holdings()[&block("10.0.0.0/28")].stage,
            Stage::Unverified,
            "{of_block} {now}"
        );
        assert!(node.request("p", &[]).is_err());
    }
}

#[test]
fn an_unverified_block_of_an_earlier_boot_is_reused() {
    // A damaged journal keeps the block, but not whether the machine booted since.
    let mut node = with_lost_journal("an earlier boot");
    let (block, network) = (block("10.0.0.0/28"), "blue".to_owned());
    node.record(LedgerRecord::Unverified { block: block.clone(), network, object: "block".to_owned() });
    node.settle();
    assert_eq!(node.ledger.holdings()[&block].stage, Stage::Open);
}

#[test]
fn after_a_boot_a_block_is_marked_before_it_is_used_and_one_without_a_mark_is_used_at_once() {
    for (of_block, usable) in [("an earlier boot", false), ("", true)] {
        let mut node = TestNode::new(&["10.0.0.0/28"]);
        node.acquire("10.0.0.0/28");
        node.objects.values_mut().next().unwrap().spec.boot_id = of_block.to_owned();
        let steps = node.settle();
        assert!(steps.iter().any(|step| matches!(step, BlockStep::UpdateBoot { .. })), "{steps:?}");
        assert_eq!(node.request("p", &[]).is_ok(), usable, "{of_block:?}");
    }
}

#[test]
fn what_is_lent_stays_lent_although_the_journal_comes_from_an_older_backup() {
    // The journal is complete, and older than the loan or than the whole block.
    for journal_has_block in [true, false] {
        let mut node = TestNode::new(&["10.0.0.0/28"]);
        let whole = block("10.0.0.0/28");
        if journal_has_block {
            node.acquire("10.0.0.0/28");
        } else {
            node.object("10.0.0.0/28", "10.0.0.0/28", me(), None);
        }
        let object = node.objects.values_mut().next().unwrap();
        object.spec.boot_id = "an earlier boot".to_owned();
        object.status.lent = vec![LentAddress { address: ip("10.0.0.3"), block: "borrower".to_owned() }];
        let steps = node.settle();
        assert!(!steps.iter().any(|step| matches!(step, BlockStep::Delete { .. })), "{steps:?}");
        assert_eq!(node.ledger.holdings()[&whole].stage, Stage::Open);
        node.objects.values_mut().next().unwrap().spec.boot_id = node.boot.clone();
        let refused = node.request("p", &["10.0.0.3"]);
        assert_eq!(refused, Err(Shortage::Rejected(AllocationError::Lent(ip("10.0.0.3")))));
    }
}
