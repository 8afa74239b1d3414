//! One rule per test. The rows of the list of known failures come first.

mod backoff;
mod bad_input;
mod fairness;
mod links;
mod reports;
mod requests;
mod sandboxes;

use api::network_status::NetworkStatusList;

use super::{
    simulation::{CLUSTER_ENTRY, Fault, SimNode, nad, ready},
    *,
};

/// Two entries of a pod on a user-defined primary network of OVN-Kubernetes.
const PRIMARY_NETWORK: &str = r#"[{"name":"ovn-kubernetes","interface":"eth0","dns":{}},{"name":"default/udn","interface":"ovn-udn1","default":true,"dns":{}}]"#;

fn set(items: &[&str]) -> BTreeSet<String> {
    items.iter().map(|item| (*item).to_owned()).collect()
}

/// Checks that a pod is left alone.
fn assert_idle(node: &SimNode) {
    let plan = node.plan();
    assert_eq!((plan.step, plan.annotations, plan.events), (None, None, Vec::new()));
}

#[test]
fn a_failing_network_neither_stops_nor_undoes_the_others() {
    let mut node = SimNode::with("a@net1,b@net2,c@net3");
    node.broken.insert(nad("b"));
    node.settle();
    assert_eq!(node.linked_attachments(), set(&["default/a@net1", "default/c@net3"]));
    assert_eq!(node.reported_attachments(), node.linked_attachments());
    assert_eq!(
        node.states(),
        ["default/a@net1 Attached", "default/b@net2 Failed/AddFailed", "default/c@net3 Attached"]
    );
    // b is tried again at once after c: it may need the new interface.
    assert_eq!(
        node.reasons(),
        ["AddedInterface", "FailedAddingInterface", "AddedInterface", "FailedAddingInterface"]
    );
    node.broken.clear();
    node.pass_backoffs();
    node.settle();
    assert_eq!(node.link_names(), ["net1", "net3", "net2"]);
    assert!(node.states().iter().all(|state| state.ends_with(" Attached")));
}

#[test]
fn a_swap_on_the_same_name_removes_before_it_adds() {
    let mut node = SimNode::with("a@net1");
    node.settle();
    node.edit("b@net1");
    node.settle();
    assert_eq!(node.calls, ["ADD a net1", "DEL a net1", "ADD b net1"]);
    assert_eq!(node.linked_attachments(), set(&["default/b@net1"]));
    assert_eq!((node.reported_attachments(), node.writes), (set(&["default/b@net1"]), 2));
    node.check();
}

#[test]
fn networks_are_attached_in_the_order_of_the_annotation() {
    let mut node = SimNode::with("c@data1,a@base0,b@zone9");
    node.settle();
    assert_eq!(node.calls, ["ADD c data1", "ADD a base0", "ADD b zone9"]);
}

#[test]
fn the_primary_network_of_a_pod_is_never_removed() {
    let mut node = SimNode::with("a");
    node.server.network_status = Some(PRIMARY_NETWORK.to_owned());
    node.server.networks = None;
    node.watch();
    assert_idle(&node);
    node.edit("a");
    node.settle();
    assert_eq!(node.calls, ["ADD a net1"]);
    let status = node.server.network_status.clone().unwrap();
    assert!(status.starts_with(PRIMARY_NETWORK.trim_end_matches(']')), "{status}");
    node.edit("[]");
    node.settle();
    assert_eq!(node.calls, ["ADD a net1", "DEL a net1"]);
    assert_eq!(node.server.network_status.as_deref(), Some(PRIMARY_NETWORK));
}

#[test]
fn an_attachment_lands_after_the_plugins_recover_without_an_edit() {
    let mut node = SimNode::with("a@net1");
    node.broken.insert(nad("a"));
    for _ in 0..20 {
        node.settle();
        node.pass_backoffs();
    }
    assert_eq!(node.linked_attachments(), set(&[]));
    node.broken.clear();
    node.settle();
    assert_eq!(node.linked_attachments(), set(&["default/a@net1"]));
    assert_eq!(node.states(), ["default/a@net1 Attached"]);
}

#[test]
fn a_failed_status_write_keeps_the_link_and_is_repeated() {
    let mut node = SimNode::with("a@net1");
    node.work(None);
    assert!(node.work(Some(Fault::PluginFails)));
    assert_eq!((node.linked_attachments(), node.writes), (set(&["default/a@net1"]), 0));
    node.settle();
    assert_eq!((node.reported_attachments(), node.calls.len()), (set(&["default/a@net1"]), 1));
}

#[test]
fn an_untouched_pod_with_unnamed_networks_needs_nothing_and_can_be_plugged() {
    for networks in ["a,b", "a, default/b@net2", r#"[{"name":"a"},{"name":"b","namespace":"default"}]"#] {
        let mut node = SimNode::started(networks);
        let before = node.server.clone();
        node.restart();
        assert_idle(&node);
        node.settle();
        assert_eq!((&node.server, node.events.len()), (&before, 0));
    }
    let mut node = SimNode::started("a,b");
    node.edit("a,b,c");
    node.settle();
    assert_eq!(node.calls, ["ADD c net3"]);
    assert_eq!(node.states(), ["default/c@net3 Attached"]);
}

#[test]
fn a_nad_that_is_created_later_is_attached_at_once() {
    let mut node = SimNode::with("d@net1,a@net2");
    node.settle();
    assert_eq!(node.states(), ["default/d@net1 Failed/NetworkNotFound", "default/a@net2 Attached"]);
    assert_eq!(node.reasons(), ["FailedAddingInterface", "AddedInterface"]);
    node.nads.insert(nad("d"), ready("d"));
    node.settle();
    assert_eq!(node.states(), ["default/d@net1 Attached", "default/a@net2 Attached"]);
}

#[test]
fn two_quick_edits_delete_no_live_link() {
    for run in 0..100_usize {
        let mut node = SimNode::with("a@net1");
        // The watch shows the first edit late, and the plugin is interrupted in every way.
        node.server.networks = Some("a@net1,b@net2".to_owned());
        let fault = (run % 9 < 8).then(|| simulation::FAULTS[run % 9]);
        for _ in 0..run % 5 {
            node.work(fault);
        }
        node.edit("a@net1,b@net2,c@net3");
        node.settle_all();
        node.check();
        assert_eq!(
            node.linked_attachments(),
            set(&["default/a@net1", "default/b@net2", "default/c@net3"]),
            "run {run}"
        );
    }
}

#[test]
fn each_form_of_no_networks_removes_all_secondary_interfaces() {
    for networks in [Some("[]"), Some(""), Some(" "), None] {
        let mut node = SimNode::started("a,b");
        node.edit("a,b,c@data1");
        node.settle();
        node.server.networks = networks.map(str::to_owned);
        node.watch();
        node.settle();
        assert_eq!((node.link_names(), node.addresses.len()), (Vec::new(), 0), "{networks:?}");
        assert_eq!(node.server.network_status, Some(format!("[{CLUSTER_ENTRY}]")));
        assert_eq!(node.server.attachments, None);
        node.check();
    }
}

#[test]
fn several_attachments_of_one_network_are_kept_apart() {
    let mut node = SimNode::with("a,a,a@data1");
    node.settle();
    assert_eq!(node.link_names(), ["net1", "net2", "data1"]);
    node.restart();
    assert_idle(&node);
    node.edit("a,a@data1");
    node.settle();
    assert_eq!(node.link_names(), ["net1", "data1"]);
    node.edit("a@data1,a,a");
    node.settle();
    assert_eq!(node.linked_attachments(), set(&["default/a@net1", "default/a@data1", "default/a@net3"]));
}

#[test]
fn unnamed_elements_are_matched_by_their_addresses_before_their_order() {
    let first = r#"{"name":"a","mac":"02:00:00:00:00:0A"}"#;
    let second = r#"{"name":"a","mac":"02:00:00:00:00:0B"}"#;
    let mut node = SimNode::with(&format!("[{first},{second}]"));
    node.settle();
    node.edit(&format!("[{second},{first}]"));
    node.settle();
    assert_eq!((node.calls.len(), node.states()[0].as_str()), (2, "default/a@net2 Attached"));
    node.edit(&format!("[{second}]"));
    node.settle();
    assert_eq!(node.link_names(), ["net2"]);
}

#[test]
fn a_new_unnamed_element_gets_its_position_or_the_lowest_free_name() {
    let mut node = SimNode::with("a@data1,b,c@net3");
    node.settle();
    assert_eq!(node.link_names(), ["data1", "net2", "net3"]);
    let mut node = SimNode::with("c@net2,a");
    node.add_foreign_link("net1");
    node.settle();
    assert_eq!(node.linked_attachments(), set(&["default/c@net2", "default/a@net3"]));
    // A name that is being removed is not free.
    let mut node = SimNode::with("a@net1");
    node.settle();
    node.edit("b");
    node.settle();
    assert_eq!(node.linked_attachments(), set(&["default/b@net1"]));
    assert_eq!(node.calls, ["ADD a net1", "DEL a net1", "ADD b net1"]);
}

#[test]
fn an_entry_without_a_record_counts_as_attached_and_is_never_removed() {
    let mut node = SimNode::new();
    node.add_foreign_link("net1");
    let entry = r#"{ "name": "default/a", "interface": "net1", "dns": {}, "x": 1.0 }"#;
    node.server.network_status = Some(format!("[{CLUSTER_ENTRY},{entry}]"));
    for networks in ["a", "a@net1", "[]"] {
        node.edit(networks);
        assert_idle(&node);
    }
    node.edit("a,b");
    node.settle();
    assert_eq!(node.calls, ["ADD b net2"]);
    assert!(node.server.network_status.as_ref().unwrap().contains(entry));
}

#[test]
fn an_entry_without_a_record_and_without_a_link_does_not_count() {
    let mut node = SimNode::new();
    let entry = r#"{"name":"default/a","interface":"net1","dns":{}}"#;
    node.server.network_status = Some(format!("[{CLUSTER_ENTRY},{entry}]"));
    node.edit("a@net1");
    node.settle();
    assert_eq!(node.calls, ["ADD a net1"]);
    let list = NetworkStatusList::parse(node.server.network_status.as_deref()).unwrap();
    assert_eq!(list.entries().len(), 2);
}

#[test]
fn names_that_multus_accepts_are_attached() {
    let mut node = SimNode::with("a@eth0.100,b@Data_1");
    node.settle();
    assert_eq!(node.link_names(), ["eth0.100", "Data_1"]);
    let claim = r#"[{"name":"a","interface":"net7","ips":["10.0.0.5/24"],"ipam-claim-reference":"vm"}]"#;
    let mut node = SimNode::with(claim);
    node.settle();
    assert_eq!(node.link_names(), ["net7"]);
}

#[test]
fn unplug_uses_the_recorded_configuration_whatever_the_nad_is_now() {
    for change in [None, Some(NadState::Invalid { message: "not JSON".to_owned() }), Some(ready("other"))] {
        let mut node = SimNode::with("a@net1");
        node.settle();
        let recorded = node.journal.values().next().unwrap().config.clone();
        match change {
            None => _ = node.nads.remove(&nad("a")),
            Some(state) => _ = node.nads.insert(nad("a"), state),
        }
        assert_idle(&node);
        node.edit("[]");
        let Some(Step::Remove(step)) = node.plan().step else { panic!("{:?}", node.plan()) };
        assert_eq!((step.record.config, step.mode), (recorded, DelMode::WithNamespace));
        node.settle();
        assert_eq!(node.addresses.len(), 0);
    }
}
