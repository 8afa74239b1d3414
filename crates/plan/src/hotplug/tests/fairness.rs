//! A step that hangs or fails each time does not keep the others from their turn.

use super::*;

/// Applies this many steps. Removals fail, and each backoff ends before the next step, as if every step took long.
fn work_slowly(node: &mut SimNode, steps: usize, failing_removals: bool) {
    for _ in 0..steps {
        let removes = matches!(node.plan().step, Some(Step::Remove(_)));
        node.work((removes && failing_removals).then_some(Fault::PluginFails));
        node.pass_backoffs();
    }
}

fn adds(node: &SimNode) -> Vec<&str> {
    node.calls.iter().map(String::as_str).filter(|call| call.starts_with("ADD")).collect()
}

#[test]
fn networks_that_hang_do_not_stop_the_next_ones() {
    let mut node = SimNode::with("a@net1,b@net2,c@net3");
    node.broken.extend([nad("a"), nad("b")]);
    while adds(&node).len() < 5 {
        work_slowly(&mut node, 1, false);
    }
    assert_eq!(adds(&node), ["ADD a net1", "ADD b net2", "ADD c net3", "ADD a net1", "ADD b net2"]);
    assert_eq!(node.linked_attachments(), set(&["default/c@net3"]));
}

#[test]
fn a_network_that_hangs_is_tried_again_only_after_those_that_were_not_tried() {
    let mut node = SimNode::with("a@net1,b@net2,c@net3");
    node.broken.insert(nad("a"));
    // A new attachment changes the inputs of the failed one.
    while adds(&node).len() < 4 {
        work_slowly(&mut node, 1, false);
    }
    assert_eq!(adds(&node), ["ADD a net1", "ADD b net2", "ADD c net3", "ADD a net1"]);
}

#[test]
fn removals_that_hang_do_not_stop_an_add() {
    let mut node = SimNode::with("a@net1,b@net2");
    node.settle();
    node.edit("c@net3");
    work_slowly(&mut node, 3, true);
    assert_eq!(node.calls, ["ADD a net1", "ADD b net2", "ADD c net3"]);
    work_slowly(&mut node, 4, true);
    assert_eq!(node.linked_attachments(), set(&["default/a@net1", "default/b@net2", "default/c@net3"]));
    node.settle_all();
    assert_eq!(node.linked_attachments(), set(&["default/c@net3"]));
    node.check();
}

#[test]
fn the_undo_of_a_network_that_hangs_does_not_stop_the_next_ones() {
    let mut node = SimNode::with("a@net1,b@net2,c@net3");
    node.broken.extend([nad("a"), nad("b")]);
    // ADD and DEL of both fail.
    work_slowly(&mut node, 5, true);
    assert_eq!(node.linked_attachments(), set(&["default/c@net3"]));
}

#[test]
fn a_network_that_failed_often_has_its_turn_among_new_ones_that_hang() {
    let mut node = SimNode::with("a@net1");
    node.broken.extend(["a", "b", "c"].map(nad));
    work_slowly(&mut node, 60, false);
    node.edit("a@net1,b@net2,c@net3");
    node.calls.clear();
    while adds(&node).len() < 6 {
        work_slowly(&mut node, 1, false);
    }
    for network in ["a", "b", "c"] {
        let own = adds(&node).iter().filter(|call| call.contains(&format!(" {network} "))).count();
        assert_eq!(own, 2, "{:?}", node.calls);
    }
}

#[test]
fn a_removal_that_has_not_failed_comes_before_an_add() {
    let mut node = SimNode::with("a@net1");
    node.settle();
    node.edit("b@net2");
    node.settle();
    assert_eq!(node.calls, ["ADD a net1", "DEL a net1", "ADD b net2"]);
}

#[test]
fn the_failures_of_a_removal_count_after_its_inputs_change() {
    let mut node = SimNode::with("a@net1,b@net2");
    node.settle();
    node.edit("c@net3");
    work_slowly(&mut node, 1, true);
    // The DEL of what failed runs without a namespace now.
    let Some(Step::Remove(other)) = node.plan().step else { panic!("{:?}", node.plan()) };
    assert_eq!(other.record.key.interface, "net1");
    node.delete_link("net2");
    node.add_foreign_link("net2");
    let Some(Step::Remove(step)) = node.plan().step else { panic!("{:?}", node.plan()) };
    assert_eq!(step.record.key.interface, "net1");
    node.failures.retain(&node.plan().failing.clone());
    assert_eq!(node.failures.attempts().count(), 1);
}
