//! What pods ask for and are told.

use super::*;

#[test]
fn an_address_that_is_asked_for_is_given_or_it_is_said_why_not() {
    let mut node = Node::new(&["10.0.0.0/24"]);
    node.acquire("10.0.0.0/28");
    assert_eq!(node.ask("p", &["10.0.0.9"]).unwrap().lease.addresses, [ip("10.0.0.9")]);
    let taken = node.ask("p", &["10.0.0.9"]).unwrap();
    node.record(LedgerRecord::Leased(taken));
    let pod = PodRef { namespace: "ns".to_owned(), name: "p".to_owned(), uid: "p".to_owned() };
    let refused = |container: &str, asked: &[&str]| match node.ask(container, asked) {
        Err(Shortage::Rejected(refusal)) => refusal,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused("q", &["10.0.0.9"]), AllocationError::InUse { address: ip("10.0.0.9"), pod });
    assert_eq!(refused("q", &["10.0.1.9"]), AllocationError::OutsideSubnets(ip("10.0.1.9")));
    assert_eq!(refused("q", &["fd00::1"]), AllocationError::OutsideSubnets(ip("fd00::1")));
    assert_eq!(refused("q", &["10.0.0.0"]), AllocationError::Reserved(ip("10.0.0.0")));
    assert_eq!(
        refused("q", &["10.0.0.2", "10.0.0.3"]),
        AllocationError::SameFamily(ip("10.0.0.2"), ip("10.0.0.3"))
    );
    let other = AllocationError::OtherAddress { current: vec![ip("10.0.0.9")], requested: ip("10.0.0.8") };
    assert_eq!(refused("p", &["10.0.0.8"]), other);
    assert!(other.to_string().contains("10.0.0.9"), "{other}");
    assert_eq!(node.ask("q", &["10.0.0.77"]), Err(Shortage::Address(ip("10.0.0.77"))));
}

#[test]
fn an_address_is_asked_for_alone_or_with_the_length_of_its_subnet() {
    let mut node = Node::new(&["10.0.0.0/24", "10.1.0.0/16", "fd00::/64"]);
    for range in ["10.0.0.0/28", "10.1.0.0/28", "fd00::/120"] {
        node.acquire(range);
    }
    for (asked, subnet) in [
        ("10.0.0.5", None),
        ("10.0.0.5/32", None),
        ("10.0.0.5/24", None),
        ("10.1.0.5/16", None),
        ("fd00::5/128", None),
        ("fd00::5/64", None),
        ("10.0.0.5/16", Some("10.0.0.0/24")),
        ("10.0.0.5/0", Some("10.0.0.0/24")),
        ("10.1.0.5/24", Some("10.1.0.0/16")),
        ("fd00::5/32", Some("fd00::/64")),
    ] {
        let answer = node.ask("p", &[asked]);
        let Some(subnet) = subnet else {
            assert!(answer.is_ok(), "{asked}: {answer:?}");
            continue;
        };
        let (requested, subnet) = (net(asked), net(subnet));
        let refusal = AllocationError::PrefixLength {
            address: requested.addr(),
            requested: requested.prefix_len(),
            subnet,
        };
        assert_eq!(answer, Err(Shortage::Rejected(refusal)), "{asked}");
    }
    let refusal =
        AllocationError::PrefixLength { address: ip("10.0.0.5"), requested: 16, subnet: net("10.0.0.0/24") };
    assert_eq!(
        refusal.to_string(),
        "address 10.0.0.5 is asked for with length /16, but its subnet 10.0.0.0/24 has /24: \
        ask for 10.0.0.5/24, or for 10.0.0.5 without a length"
    );
}

/// The network says something else from now on.
fn set_spec(node: &mut Node, ipam: &IpamSpec) {
    let pools = Pool::new("blue", ipam, |family| family.block_length(ipam), true);
    node.pools.insert("net".to_owned(), Arc::new(pools));
}

#[test]
fn an_interface_that_asks_again_is_told_the_same_whatever_became_of_its_subnet() {
    let mut node = Node::new(&[]);
    set_spec(&mut node, &ipam(&["10.0.0.0/24", "fd00::/64"], &[], &["10.0.0.1"]));
    node.acquire("10.0.0.0/28");
    node.acquire("fd00::/120");
    let first = node.ask("p", &[]).unwrap();
    let four = AddressInfo { net: net("10.0.0.2/24"), gateway: Some(ip("10.0.0.1")) };
    let six = AddressInfo { net: net("fd00::1/64"), gateway: None };
    assert_eq!(first.infos, [four, six]);
    node.record(LedgerRecord::Leased(first.clone()));
    for today in [
        ipam(&["10.0.0.0/23", "fd00::/48"], &[], &["10.0.1.1", "fd00::7"]),
        ipam(&["10.7.0.0/16", "fd07::/64"], &[], &["10.7.0.1"]),
        ipam(&["10.7.0.0/16"], &[], &[]),
    ] {
        set_spec(&mut node, &today);
        for asked in [&[][..], &["10.0.0.2"], &["10.0.0.2/24", "fd00::1/64"]] {
            assert_eq!(node.ask("p", asked), Ok(first.clone()), "{today:?} {asked:?}");
        }
    }
    let refusal =
        AllocationError::PrefixLength { address: ip("10.0.0.2"), requested: 16, subnet: net("10.0.0.0/24") };
    assert_eq!(node.ask("p", &["10.0.0.2/16"]), Err(Shortage::Rejected(refusal)));
    node.record(LedgerRecord::Freed(key("p")));
    assert_eq!(node.ledger.grant(&key("p")), None);
}

#[test]
fn an_interface_of_which_nobody_knows_what_it_was_told_is_told_what_holds_today() {
    let mut node = Node::new(&["10.0.0.0/24", "fd00::/64"]);
    node.acquire("10.0.0.0/28");
    node.acquire("fd00::/120");
    let first = node.ask("p", &[]).unwrap();
    let lease = first.lease.clone();
    node.record(LedgerRecord::Leased(Grant { lease, infos: Vec::new() }));
    assert_eq!(node.ask("p", &[]), Ok(first));
    set_spec(&mut node, &ipam(&["10.7.0.0/16"], &[], &["10.7.0.1"]));
    let alone = AddressInfo { net: net("10.0.0.1/32"), gateway: Some(ip("10.7.0.1")) };
    assert_eq!(
        node.ask("p", &["10.0.0.1/24"]).unwrap().infos,
        [alone, AddressInfo { net: net("fd00::1/128"), gateway: None }]
    );
}
