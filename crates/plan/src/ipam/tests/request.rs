//! Requested addresses, and what CNI results say about them.

use super::*;

#[test]
fn a_requested_address_is_allocated_or_refused_with_a_reason() {
    let mut node = TestNode::new(&["10.0.0.0/24"]);
    node.acquire("10.0.0.0/28");
    assert_eq!(node.request("p", &["10.0.0.9"]).unwrap().lease.addresses, [ip("10.0.0.9")]);
    let taken = node.request("p", &["10.0.0.9"]).unwrap();
    node.record(LedgerRecord::Leased(taken));
    let pod = PodRef { namespace: "ns".to_owned(), name: "p".to_owned(), uid: "p".to_owned() };
    let refused = |container: &str, text: &[&str]| match node.request(container, text) {
        Err(Shortage::Rejected(error)) => error,
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
    assert_eq!(node.request("q", &["10.0.0.77"]), Err(Shortage::Address(ip("10.0.0.77"))));
}

#[test]
fn an_address_is_requested_alone_or_with_the_length_of_its_subnet() {
    let mut node = TestNode::new(&["10.0.0.0/24", "10.1.0.0/16", "fd00::/64"]);
    for range in ["10.0.0.0/28", "10.1.0.0/28", "fd00::/120"] {
        node.acquire(range);
    }
    for (text, subnet) in [
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
        let answer = node.request("p", &[text]);
        let Some(subnet) = subnet else {
            assert!(answer.is_ok(), "{text}: {answer:?}");
            continue;
        };
        let (requested, subnet) = (net(text), net(subnet));
        let error = AllocationError::PrefixLength {
            address: requested.addr(),
            requested: requested.prefix_len(),
            subnet,
        };
        assert_eq!(answer, Err(Shortage::Rejected(error)), "{text}");
    }
    let error =
        AllocationError::PrefixLength { address: ip("10.0.0.5"), requested: 16, subnet: net("10.0.0.0/24") };
    assert_eq!(
        error.to_string(),
        "address 10.0.0.5 is requested with prefix length /16, but its subnet 10.0.0.0/24 has /24: \
        request 10.0.0.5/24, or 10.0.0.5 without a length"
    );
}

/// Changes the spec of the network.
fn set_spec(node: &mut TestNode, ipam: &IpamSpec) {
    let pools = Pool::new("blue", ipam, |family| family.block_length(ipam), true);
    node.pools.insert("net".to_owned(), Arc::new(pools));
}

#[test]
fn a_repeated_request_gets_the_same_grant_after_the_subnet_changed() {
    let mut node = TestNode::new(&[]);
    set_spec(&mut node, &ipam(&["10.0.0.0/24", "fd00::/64"], &[], &["10.0.0.1"]));
    node.acquire("10.0.0.0/28");
    node.acquire("fd00::/120");
    let first = node.request("p", &[]).unwrap();
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
        for text in [&[][..], &["10.0.0.2"], &["10.0.0.2/24", "fd00::1/64"]] {
            assert_eq!(node.request("p", text), Ok(first.clone()), "{today:?} {text:?}");
        }
    }
    let error =
        AllocationError::PrefixLength { address: ip("10.0.0.2"), requested: 16, subnet: net("10.0.0.0/24") };
    assert_eq!(node.request("p", &["10.0.0.2/16"]), Err(Shortage::Rejected(error)));
    node.record(LedgerRecord::Freed(key("p")));
    assert_eq!(node.ledger.grant(&key("p")), None);
}

#[test]
fn a_repeated_request_without_a_recorded_result_follows_the_current_subnets() {
    let mut node = TestNode::new(&["10.0.0.0/24", "fd00::/64"]);
    node.acquire("10.0.0.0/28");
    node.acquire("fd00::/120");
    let first = node.request("p", &[]).unwrap();
    let lease = first.lease.clone();
    node.record(LedgerRecord::Leased(Grant { lease, infos: Vec::new() }));
    assert_eq!(node.request("p", &[]), Ok(first));
    set_spec(&mut node, &ipam(&["10.7.0.0/16"], &[], &["10.7.0.1"]));
    let alone = AddressInfo { net: net("10.0.0.1/32"), gateway: Some(ip("10.7.0.1")) };
    assert_eq!(
        node.request("p", &["10.0.0.1/24"]).unwrap().infos,
        [alone, AddressInfo { net: net("fd00::1/128"), gateway: None }]
    );
}
