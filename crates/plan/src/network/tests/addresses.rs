//! Addresses in the status of networks, and abandoned blocks.

use api::{
    IPBlockSpec, IPBlockStatus,
    ipblock::{self, HolderRef, LentAddress},
};

use std::time::Instant;

use super::*;
use crate::{
    ipam::ObservedIpBlock,
    network::{AbandonedBlock, BlockState, NODE_GONE_GRACE},
};

fn with_addresses(subnets: &str) -> NetworkState {
    let text = format!(r#"{{"attachment": {{"namespaces": ["ns"]}}, "ipam": {{"subnets": {subnets}}}}}"#);
    NetworkState { spec: Ok(spec(&text)), ..network("blue") }
}

fn hold(state: &mut TestState, range: &str, node: &str, status: IPBlockStatus) {
    let cidr = range.parse().unwrap();
    let spec = IPBlockSpec {
        network: "blue".to_owned(),
        network_uid: "uid-blue".to_owned(),
        cidr,
        holder: HolderRef {
            node: node.to_owned(),
            uid: state.nodes.get(node).map_or("gone".to_owned(), |node| node.uid.clone()),
        },
        lender: None,
        boot_id: String::new(),
    };
    let object = ObservedIpBlock { uid: format!("uid-{range}"), spec, status };
    state.blocks.insert(ipblock::name("blue", cidr), BlockState { version: "1".to_owned(), object });
}

fn used(used: i32) -> IPBlockStatus {
    IPBlockStatus { used, ..IPBlockStatus::default() }
}

fn abandoned(state: &mut TestState, now: Instant) -> Vec<String> {
    state.missing.track(&state.cluster, now);
    abandoned_blocks(state, &state.missing).into_iter().map(|AbandonedBlock { name, .. }| name).collect()
}

#[test]
fn the_block_length_is_set_once_and_addresses_are_counted() {
    let mut state = state([with_addresses(r#"["10.0.0.0/24", "fd00::/64"]"#)]);
    reconcile_until_stable(&mut state, at(0));
    let ipam = state.networks["blue"].status.ipam.clone().unwrap();
    let (four, six) = (ipam.ipv4.unwrap(), ipam.ipv6.unwrap());
    assert_eq!((four.block_length, four.addresses, four.used, four.free, four.blocks), (28, 254, 0, 254, 0));
    assert_eq!((six.block_length, six.addresses), (120, i64::MAX));
    let config = state.nads.as_ref().unwrap()[&NadRef::new("ns", "blue")].config.clone().unwrap();
    assert!(config.contains("patchbay-ipam"), "{config}");
    // A larger subnet does not change the block length.
    state.networks.get_mut("blue").unwrap().spec = with_addresses(r#"["10.0.0.0/16"]"#).spec;
    hold(&mut state, "10.0.0.0/28", "a", used(3));
    hold(&mut state, "fd00::/120", "b", used(2));
    reconcile_until_stable(&mut state, at(1));
    let ipam = state.networks["blue"].status.ipam.clone().unwrap();
    let (four, six) = (ipam.ipv4.unwrap(), ipam.ipv6.unwrap());
    assert_eq!((four.block_length, four.addresses, four.used, four.blocks), (28, 65534, 3, 1));
    assert_eq!((six.block_length, six.addresses, six.used, six.blocks), (120, 0, 2, 1));
    assert_eq!(reconcile_until_stable(&mut state, at(2)), [""; 0]);
}

#[test]
fn a_network_without_ipam_has_no_address_status() {
    let mut state = state([network("blue")]);
    reconcile_until_stable(&mut state, at(0));
    let status = &state.networks["blue"].status;
    assert_eq!(status.ipam, None);
    assert!(status.conditions.iter().all(|it| it.r#type != "AddressesExhausted"));
}

#[test]
fn exhausted_and_draining_addresses_are_reported() {
    let mut state = state([with_addresses(r#"["10.0.0.0/30"]"#)]);
    reconcile_until_stable(&mut state, at(0));
    assert_eq!(condition(&state, "blue", "AddressesExhausted").0, ConditionStatus::False);
    hold(&mut state, "10.0.0.0/30", "a", used(2));
    let draining = IPBlockStatus { draining: vec!["ns/pod 10.9.0.1".to_owned()], ..used(1) };
    hold(&mut state, "10.9.0.0/30", "b", draining);
    reconcile_until_stable(&mut state, at(1));
    let (status, reason, message) = condition(&state, "blue", "AddressesExhausted");
    assert_eq!((status, reason), (ConditionStatus::True, "NoneLeft"));
    assert!(message.contains("IPv4") && message.contains("spec.ipam.subnets"), "{message}");
    let (status, _, message) = condition(&state, "blue", "SubnetsDraining");
    assert_eq!(status, ConditionStatus::True);
    assert!(message.starts_with("pods have addresses") && message.contains("ns/pod 10.9.0.1"), "{message}");
    let claims = IPBlockStatus { draining: vec!["IPAMClaim ns/vm1.blue 10.9.0.5".to_owned()], ..used(1) };
    hold(&mut state, "10.9.0.4/30", "b", claims);
    reconcile_until_stable(&mut state, at(2));
    let (_, _, message) = condition(&state, "blue", "SubnetsDraining");
    assert!(message.starts_with("pods and IPAMClaims have addresses outside of spec.ipam"), "{message}");
    assert!(message.contains("IPAMClaim ns/vm1.blue 10.9.0.5"), "{message}");
}

#[test]
fn blocks_are_freed_ten_minutes_after_their_node_is_gone() {
    let mut state = state([with_addresses(r#"["10.0.0.0/24"]"#)]);
    reconcile_until_stable(&mut state, at(0));
    hold(&mut state, "10.0.0.0/28", "a", used(3));
    hold(&mut state, "10.0.0.16/28", "lost", used(3));
    let lent = LentAddress { address: "10.0.0.33".parse().unwrap(), block: "uid-10.0.0.33/32".to_owned() };
    hold(&mut state, "10.0.0.32/28", "lost", IPBlockStatus { lent: vec![lent], ..used(0) });
    hold(&mut state, "10.0.0.33/32", "b", used(1));
    let first = Instant::now();
    assert_eq!(abandoned(&mut state, first), [""; 0]);
    let requeue_after = state.missing.next_gone.unwrap();
    assert!(requeue_after <= Duration::from_secs(600), "{requeue_after:?}");
    assert_eq!(abandoned(&mut state, first + Duration::from_secs(599)), [""; 0]);
    assert_eq!(
        abandoned(&mut state, first + NODE_GONE_GRACE),
        ["blue.10.0.0.16-28"],
        "a block with lent addresses stays"
    );
    state.blocks.remove("blue.10.0.0.33-32");
    assert_eq!(abandoned(&mut state, first + NODE_GONE_GRACE), ["blue.10.0.0.16-28", "blue.10.0.0.32-28"]);
    // The node is back under the same name and its daemon takes over the block.
    hold(&mut state, "10.0.0.16/28", "a", used(3));
    assert_eq!(abandoned(&mut state, first + NODE_GONE_GRACE), ["blue.10.0.0.32-28"]);
}

#[test]
fn blocks_are_deleted_before_their_network() {
    let mut state = state([with_addresses(r#"["10.0.0.0/24"]"#)]);
    reconcile_until_stable(&mut state, at(0));
    hold(&mut state, "10.0.0.0/28", "a", used(0));
    delete(&mut state, "blue", 1);
    uses(&mut state, "pod", "blue");
    reconcile_until_stable(&mut state, at(3));
    assert_eq!(abandoned(&mut state, Instant::now()), [""; 0], "the network is in use");
    state.users.delete(WorkloadKind::Pod, "ns", "pod");
    for node in ["a", "b"] {
        reconcile_until_stable(&mut state, at(9));
        assert_eq!(abandoned(&mut state, Instant::now()), [""; 0], "not all nodes have reported");
        close(&mut state, node, "blue", 0);
    }
    reconcile_until_stable(&mut state, at(9));
    assert!(state.networks.contains_key("blue"), "its blocks still exist");
    assert_eq!(abandoned(&mut state, Instant::now()), ["blue.10.0.0.0-28"]);
    let blocks = state.blocks.clone();
    state.blocks.clear();
    reconcile_until_stable(&mut state, at(10));
    assert!(!state.networks.contains_key("blue"));
    state.blocks = blocks;
    assert_eq!(abandoned(&mut state, Instant::now()), [""; 0], "only its node knows whether it is in use");
    state.nodes.remove("a");
    let first = Instant::now();
    assert_eq!(abandoned(&mut state, first), [""; 0], "the machine can still allocate from it");
    assert_eq!(abandoned(&mut state, first + NODE_GONE_GRACE), ["blue.10.0.0.0-28"]);
}

#[test]
fn a_deletion_waits_until_no_node_has_an_address() {
    let mut state = state([with_addresses(r#"["10.0.0.0/24"]"#)]);
    reconcile_until_stable(&mut state, at(0));
    hold(&mut state, "10.0.0.0/28", "a", used(1));
    delete(&mut state, "blue", 1);
    close(&mut state, "b", "blue", 0);
    reconcile_until_stable(&mut state, at(3));
    let ready = |state: &TestState| {
        let (_, reason, message) = condition(state, "blue", "Ready");
        (reason.to_owned(), message.to_owned())
    };
    let (reason, message) = ready(&state);
    assert_eq!(reason, "Deleting", "nodes need a moment to report: {message}");
    assert!(message.contains("have not reported") && message.contains("a (check"), "{message}");
    assert_eq!(plan(&state, at(3)).requeue_after, Some(closing::REPORT_TIME));
    reconcile_until_stable(&mut state, at(11));
    assert_eq!(ready(&state).0, "DeletionBlocked");
    assert_eq!(condition(&state, "blue", "InUse").1, "NotReported");
    assert_eq!(plan(&state, at(11)).requeue_after, None);
    close(&mut state, "a", "blue", 2);
    reconcile_until_stable(&mut state, at(12));
    let (_, message) = ready(&state);
    assert!(message.contains("node a: 2 (ns/pod-0, ns/pod-1); unplug"), "{message}");
    let (status, reason, message) = condition(&state, "blue", "InUse");
    assert_eq!((status, reason), (ConditionStatus::True, "AddressesInUse"));
    assert!(message.contains("node a: 2"), "{message}");
    assert!(state.nads.as_ref().unwrap().contains_key(&NadRef::new("ns", "blue")), "the NAD stays");
    assert_eq!(abandoned(&mut state, Instant::now()), [""; 0]);
    close(&mut state, "a", "blue", 0);
    let done = reconcile_until_stable(&mut state, at(13));
    assert!(done.contains(&"remove users finalizer".to_owned()), "{done:?}");
    assert_eq!(
        abandoned(&mut state, Instant::now()),
        ["blue.10.0.0.0-28"],
        "the report is newer than the block's count of used addresses"
    );
}

#[test]
fn a_node_that_was_switched_off_with_addresses_says_what_to_do() {
    let mut state = state([with_addresses(r#"["10.0.0.0/24"]"#)]);
    reconcile_until_stable(&mut state, at(0));
    delete(&mut state, "blue", 1);
    close(&mut state, "a", "blue", 1);
    close(&mut state, "b", "blue", 0);
    state.nodes.get_mut("a").unwrap().not_ready_reason = Some("NodeStatusUnknown".to_owned());
    reconcile_until_stable(&mut state, at(20));
    let (_, reason, message) = condition(&state, "blue", "InUse");
    assert_eq!(reason, "AddressesInUse");
    assert!(message.contains("node a: 1 (ns/pod-0) (the Node is not ready"), "{message}");
    assert!(message.contains("delete its Node"), "{message}");
}

/// The count of an older network of the same name says nothing about this one, and neither does a report of a node that
/// never closed it.
#[test]
fn a_report_about_another_network_of_the_name_does_not_count() {
    let mut state = state([with_addresses(r#"["10.0.0.0/24"]"#)]);
    reconcile_until_stable(&mut state, at(0));
    for node in ["a", "b"] {
        close(&mut state, node, "blue", 0);
        let closed = &mut state.reports.get_mut(node).unwrap().closed;
        let old = ClosedNetwork { uid: "uid-old".to_owned(), ..closed.remove("uid-blue").unwrap() };
        closed.insert("uid-old".to_owned(), old);
    }
    delete(&mut state, "blue", 1);
    reconcile_until_stable(&mut state, at(20));
    assert_eq!(condition(&state, "blue", "Ready").1, "DeletionBlocked");
}

#[test]
fn a_node_that_is_switched_off_blocks_the_deletion_until_its_node_is_deleted() {
    let mut state = state([with_addresses(r#"["10.0.0.0/24"]"#)]);
    reconcile_until_stable(&mut state, at(0));
    hold(&mut state, "10.0.0.0/28", "a", used(1));
    delete(&mut state, "blue", 1);
    close(&mut state, "b", "blue", 0);
    state.nodes.get_mut("a").unwrap().not_ready_reason = Some("NodeStatusUnknown".to_owned());
    reconcile_until_stable(&mut state, at(20));
    let (_, reason, message) = condition(&state, "blue", "InUse");
    assert_eq!(reason, "NotReported");
    assert!(message.contains("a (the Node is not ready") && message.contains("delete its Node"), "{message}");
    let start = Instant::now();
    state.nodes.remove("a");
    state.reports.remove("a");
    reconcile_until_stable(&mut state, at(21));
    let message = condition(&state, "blue", "Ready").2;
    assert!(message.contains("waits for IPBlocks to go: blue.10.0.0.0-28 of node a"), "{message}");
    // The machine may still run, and its pods may use the addresses.
    assert_eq!(abandoned(&mut state, start), [""; 0]);
    assert_eq!(abandoned(&mut state, start + NODE_GONE_GRACE), ["blue.10.0.0.0-28"]);
}

#[test]
fn a_node_that_never_ran_the_daemon_is_not_waited_for() {
    let mut state = state([with_addresses(r#"["10.0.0.0/24"]"#)]);
    reconcile_until_stable(&mut state, at(0));
    delete(&mut state, "blue", 1);
    close(&mut state, "b", "blue", 0);
    state.reports.remove("a");
    hold(&mut state, "10.0.0.0/28", "a", used(1));
    reconcile_until_stable(&mut state, at(20));
    let message = condition(&state, "blue", "InUse").2;
    assert!(message.contains("a (it has address blocks and no NodeNetwork"), "{message}");
    // A Node that was created again: its daemon has not adopted the block yet.
    state.nodes.get_mut("a").unwrap().uid = "uid-new".to_owned();
    reconcile_until_stable(&mut state, at(21));
    assert_eq!(condition(&state, "blue", "InUse").1, "NotReported");
    state.blocks.clear();
    reconcile_until_stable(&mut state, at(22));
    assert!(!state.networks.contains_key("blue"));
}

#[test]
fn the_blocks_of_a_network_without_finalizers_stay_while_a_node_has_addresses_of_claims() {
    let mut state = state([with_addresses(r#"["10.0.0.0/24"]"#)]);
    hold(&mut state, "10.0.0.0/28", "ipamclaims/patchbay", used(1));
    state.networks.clear();
    assert_eq!(abandoned(&mut state, Instant::now()), [""; 0], "the nodes do not report addresses of claims");
    let address = "10.0.0.3".parse().unwrap();
    for (node, addresses) in
        [("a", BTreeMap::from([("uid-blue".to_owned(), vec![address])])), ("b", BTreeMap::new())]
    {
        state.reports.get_mut(node).unwrap().claim_addresses = Some(addresses);
    }
    assert_eq!(abandoned(&mut state, Instant::now()), [""; 0]);
    state.reports.get_mut("a").unwrap().claim_addresses = Some(BTreeMap::new());
    assert_eq!(abandoned(&mut state, Instant::now()), ["blue.10.0.0.0-28"]);
}

#[test]
fn the_blocks_of_a_holder_that_is_not_a_node_stay_until_their_network_is_deleted() {
    let mut state = state([with_addresses(r#"["10.0.0.0/24"]"#)]);
    reconcile_until_stable(&mut state, at(0));
    hold(&mut state, "10.0.0.0/28", "ipamclaims/patchbay", used(3));
    hold(&mut state, "10.0.0.16/28", "lost", used(3));
    let names: Vec<String> = state.blocks.keys().cloned().collect();
    for name in names {
        let holder = &mut state.blocks.get_mut(&name).unwrap().object.spec.holder;
        holder.uid = format!("uid-{}", holder.node.replace('/', "-"));
    }
    let first = Instant::now();
    assert_eq!(abandoned(&mut state, first), [""; 0]);
    assert_eq!(abandoned(&mut state, first + NODE_GONE_GRACE), ["blue.10.0.0.16-28"]);
    assert_eq!(state.missing.next_gone, None, "the other holder is not waited for");
    state.blocks.remove("blue.10.0.0.16-28");
    reconcile_until_stable(&mut state, at(1));
    let four = state.networks["blue"].status.ipam.clone().unwrap().ipv4.unwrap();
    assert_eq!((four.used, four.blocks), (3, 1), "its addresses are counted");
    // The network waits for its users, then for its blocks.
    delete(&mut state, "blue", 2);
    uses(&mut state, "pod", "blue");
    reconcile_until_stable(&mut state, at(3));
    assert_eq!(abandoned(&mut state, first + NODE_GONE_GRACE), [""; 0], "the network is in use");
    state.users.delete(WorkloadKind::Pod, "ns", "pod");
    for node in ["a", "b"] {
        close(&mut state, node, "blue", 0);
    }
    reconcile_until_stable(&mut state, at(9));
    assert!(state.networks.contains_key("blue"), "its blocks still exist");
    assert_eq!(abandoned(&mut state, first + NODE_GONE_GRACE), ["blue.10.0.0.0-28"]);
}

#[test]
fn a_network_with_claims_is_in_use_without_any_pod() {
    let mut state = state([with_addresses(r#"["10.0.0.0/24"]"#)]);
    let claimed = ipblock::ClaimedAddress {
        address: "10.0.0.3".parse().unwrap(),
        claim: "ns/vm1.blue".to_owned(),
        uid: "1".to_owned(),
    };
    hold(&mut state, "10.0.0.0/28", "a", IPBlockStatus { claims: vec![claimed], ..used(1) });
    reconcile_until_stable(&mut state, at(0));
    let users = state.networks["blue"].status.users.clone().unwrap();
    assert_eq!((users.count, users.first), (1, vec!["IPAMClaim ns/vm1.blue".to_owned()]));
    let claims = |state: &TestState| state.networks["blue"].status.ipam.clone().unwrap().claims;
    assert_eq!(claims(&state), 1);
    delete(&mut state, "blue", 1);
    reconcile_until_stable(&mut state, at(9));
    let (_, reason, message) = condition(&state, "blue", "Ready");
    assert_eq!(
        (reason, message),
        ("DeletionBlocked", "deletion waits for users to go: 1 in total: IPAMClaim ns/vm1.blue")
    );
    assert!(state.nads.as_ref().unwrap().contains_key(&NadRef::new("ns", "blue")));
    assert_eq!(abandoned(&mut state, Instant::now()), [""; 0]);
    hold(&mut state, "10.0.0.0/28", "a", used(0));
    for node in ["a", "b"] {
        close(&mut state, node, "blue", 0);
    }
    reconcile_until_stable(&mut state, at(10));
    assert_eq!(abandoned(&mut state, Instant::now()), ["blue.10.0.0.0-28"]);
}
