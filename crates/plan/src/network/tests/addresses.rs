//! Addresses in the status of networks, and blocks that nobody holds.

use api::{
    IPBlockSpec, IPBlockStatus,
    ipblock::{self, LentAddress, NodeRef},
};

use super::*;
use crate::{
    ipam::ObservedIpBlock,
    network::{Block, Discard, GONE},
};

fn with_addresses(subnets: &str) -> Network {
    let text = format!(r#"{{"attachment": {{"namespaces": ["ns"]}}, "ipam": {{"subnets": {subnets}}}}}"#);
    Network { spec: Ok(spec(&text)), ..network("blue") }
}

fn hold(world: &mut World, range: &str, node: &str, status: IPBlockStatus) {
    let cidr = range.parse().unwrap();
    let spec = IPBlockSpec {
        network: "blue".to_owned(),
        network_uid: "uid-blue".to_owned(),
        cidr,
        holder: NodeRef {
            node: node.to_owned(),
            uid: world.nodes.get(node).map_or("gone".to_owned(), |node| node.uid.clone()),
        },
        lender: None,
        boot_id: String::new(),
    };
    let object = ObservedIpBlock { uid: format!("uid-{range}"), spec, status };
    world.blocks.insert(ipblock::name("blue", cidr), Block { version: "1".to_owned(), object });
}

fn used(used: i32) -> IPBlockStatus {
    IPBlockStatus { used, ..IPBlockStatus::default() }
}

fn discarded(world: &mut World, now: Instant) -> Vec<String> {
    world.notice(now);
    plan(world, at(20)).discarded.into_iter().map(|Discard { name, .. }| name).collect()
}

#[test]
fn the_length_of_blocks_is_fixed_once_and_addresses_are_counted() {
    let mut world = world([with_addresses(r#"["10.0.0.0/24", "fd00::/64"]"#)]);
    settle_down(&mut world, at(0));
    let ipam = world.networks["blue"].status.ipam.clone().unwrap();
    let (four, six) = (ipam.ipv4.unwrap(), ipam.ipv6.unwrap());
    assert_eq!((four.block_length, four.addresses, four.used, four.free, four.blocks), (28, 254, 0, 254, 0));
    assert_eq!((six.block_length, six.addresses), (120, i64::MAX));
    let config = world.attachments.as_ref().unwrap()[&NadRef::new("ns", "blue")].config.clone().unwrap();
    assert!(config.contains("patchbay-ipam"), "{config}");
    // A larger subnet changes no block.
    world.networks.get_mut("blue").unwrap().spec = with_addresses(r#"["10.0.0.0/16"]"#).spec;
    hold(&mut world, "10.0.0.0/28", "a", used(3));
    hold(&mut world, "fd00::/120", "b", used(2));
    settle_down(&mut world, at(1));
    let ipam = world.networks["blue"].status.ipam.clone().unwrap();
    let (four, six) = (ipam.ipv4.unwrap(), ipam.ipv6.unwrap());
    assert_eq!((four.block_length, four.addresses, four.used, four.blocks), (28, 65534, 3, 1));
    assert_eq!((six.block_length, six.addresses, six.used, six.blocks), (120, 0, 2, 1));
    assert_eq!(settle_down(&mut world, at(2)), [""; 0]);
}

#[test]
fn a_network_without_addresses_says_nothing_about_them() {
    let mut world = world([network("blue")]);
    settle_down(&mut world, at(0));
    let status = &world.networks["blue"].status;
    assert_eq!(status.ipam, None);
    assert!(status.conditions.iter().all(|one| one.r#type != "AddressesExhausted"));
}

#[test]
fn what_is_used_up_or_draining_is_told() {
    let mut world = world([with_addresses(r#"["10.0.0.0/30"]"#)]);
    settle_down(&mut world, at(0));
    assert_eq!(told(&world, "blue", "AddressesExhausted").0, ConditionStatus::False);
    hold(&mut world, "10.0.0.0/30", "a", used(2));
    let draining = IPBlockStatus { draining: vec!["ns/pod 10.9.0.1".to_owned()], ..used(1) };
    hold(&mut world, "10.9.0.0/30", "b", draining);
    settle_down(&mut world, at(1));
    let (status, reason, message) = told(&world, "blue", "AddressesExhausted");
    assert_eq!((status, reason), (ConditionStatus::True, "NoneLeft"));
    assert!(message.contains("IPv4") && message.contains("spec.ipam.subnets"), "{message}");
    let (status, _, message) = told(&world, "blue", "SubnetsDraining");
    assert_eq!(status, ConditionStatus::True);
    assert!(message.contains("ns/pod 10.9.0.1"), "{message}");
}

#[test]
fn blocks_of_a_node_are_free_when_its_node_has_been_gone_for_ten_minutes() {
    let mut world = world([with_addresses(r#"["10.0.0.0/24"]"#)]);
    settle_down(&mut world, at(0));
    hold(&mut world, "10.0.0.0/28", "a", used(3));
    hold(&mut world, "10.0.0.16/28", "lost", used(3));
    let lent = LentAddress { address: "10.0.0.33".parse().unwrap(), block: "uid-10.0.0.33/32".to_owned() };
    hold(&mut world, "10.0.0.32/28", "lost", IPBlockStatus { lent: vec![lent], ..used(0) });
    hold(&mut world, "10.0.0.33/32", "b", used(1));
    let first = Instant::now();
    assert_eq!(discarded(&mut world, first), [""; 0]);
    let look = plan(&world, at(20)).look.unwrap();
    assert!(look <= Duration::from_secs(600), "{look:?}");
    assert_eq!(discarded(&mut world, first + Duration::from_secs(599)), [""; 0]);
    assert_eq!(
        discarded(&mut world, first + GONE),
        ["blue.10.0.0.16-28"],
        "one that others have a part of stays"
    );
    world.blocks.remove("blue.10.0.0.33-32");
    assert_eq!(discarded(&mut world, first + GONE), ["blue.10.0.0.16-28", "blue.10.0.0.32-28"]);
    // It is back under the same name, and its daemon takes its blocks over.
    hold(&mut world, "10.0.0.16/28", "a", used(3));
    assert_eq!(discarded(&mut world, first + GONE), ["blue.10.0.0.32-28"]);
}

#[test]
fn blocks_go_with_their_network_and_before_it() {
    let mut world = world([with_addresses(r#"["10.0.0.0/24"]"#)]);
    settle_down(&mut world, at(0));
    hold(&mut world, "10.0.0.0/28", "a", used(0));
    delete(&mut world, "blue", 1);
    uses(&mut world, "pod", "blue");
    settle_down(&mut world, at(3));
    assert_eq!(discarded(&mut world, Instant::now()), [""; 0], "somebody uses it");
    world.users.delete(Kind::Pod, "ns", "pod");
    settle_down(&mut world, at(9));
    assert!(world.networks.contains_key("blue"), "its blocks are still there");
    assert_eq!(discarded(&mut world, Instant::now()), ["blue.10.0.0.0-28"]);
    let kept = world.blocks.clone();
    world.blocks.clear();
    settle_down(&mut world, at(10));
    assert!(!world.networks.contains_key("blue"));
    world.blocks = kept;
    assert_eq!(discarded(&mut world, Instant::now()), ["blue.10.0.0.0-28"], "one that came late");
}
