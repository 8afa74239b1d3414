//! What pods ask for and are told.

use super::*;

#[test]
fn an_address_that_is_asked_for_is_given_or_it_is_said_why_not() {
    let mut node = Node::new(&["10.0.0.0/24"]);
    node.take("10.0.0.0/28");
    assert_eq!(node.ask("p", &["10.0.0.9"]).unwrap().lease.addresses, [ip("10.0.0.9")]);
    let taken = node.ask("p", &["10.0.0.9"]).unwrap();
    node.note(Record::Leased(taken));
    let pod = Pod { namespace: "ns".to_owned(), name: "p".to_owned(), uid: "p".to_owned() };
    let refused = |container: &str, asked: &[&str]| match node.ask(container, asked) {
        Err(Lack::Refused(refusal)) => refusal,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused("q", &["10.0.0.9"]), Refusal::Used { address: ip("10.0.0.9"), pod });
    assert_eq!(refused("q", &["10.0.1.9"]), Refusal::Outside(ip("10.0.1.9")));
    assert_eq!(refused("q", &["fd00::1"]), Refusal::Outside(ip("fd00::1")));
    assert_eq!(refused("q", &["10.0.0.0"]), Refusal::Reserved(ip("10.0.0.0")));
    assert_eq!(refused("q", &["10.0.0.2", "10.0.0.3"]), Refusal::Two(ip("10.0.0.2"), ip("10.0.0.3")));
    let other = Refusal::Other { has: vec![ip("10.0.0.9")], asked: ip("10.0.0.8") };
    assert_eq!(refused("p", &["10.0.0.8"]), other);
    assert!(other.to_string().contains("10.0.0.9"), "{other}");
    assert_eq!(node.ask("q", &["10.0.0.77"]), Err(Lack::Address(ip("10.0.0.77"))));
}

#[test]
fn an_address_is_asked_for_alone_or_with_the_length_of_its_subnet() {
    let mut node = Node::new(&["10.0.0.0/24", "10.1.0.0/16", "fd00::/64"]);
    for range in ["10.0.0.0/28", "10.1.0.0/28", "fd00::/120"] {
        node.take(range);
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
        let (wish, subnet) = (net(asked), net(subnet));
        let refusal = Refusal::Length { address: wish.addr(), asked: wish.prefix_len(), subnet };
        assert_eq!(answer, Err(Lack::Refused(refusal)), "{asked}");
    }
    let refusal = Refusal::Length { address: ip("10.0.0.5"), asked: 16, subnet: net("10.0.0.0/24") };
    assert_eq!(
        refusal.to_string(),
        "address 10.0.0.5 is asked for with length /16, but its subnet 10.0.0.0/24 has /24: \
        ask for 10.0.0.5/24, or for 10.0.0.5 without a length"
    );
}

/// The network says something else from now on.
fn say(node: &mut Node, ipam: &IpamSpec) {
    let rules = Rules::new("blue", ipam, |family| family.block_length(ipam), true);
    node.rules.insert("net".to_owned(), Arc::new(rules));
}

#[test]
fn an_interface_that_asks_again_is_told_the_same_whatever_became_of_its_subnet() {
    let mut node = Node::new(&[]);
    say(&mut node, &ipam(&["10.0.0.0/24", "fd00::/64"], &[], &["10.0.0.1"]));
    node.take("10.0.0.0/28");
    node.take("fd00::/120");
    let first = node.ask("p", &[]).unwrap();
    let four = Told { net: net("10.0.0.2/24"), gateway: Some(ip("10.0.0.1")) };
    let six = Told { net: net("fd00::1/64"), gateway: None };
    assert_eq!(first.told, [four, six]);
    node.note(Record::Leased(first.clone()));
    for today in [
        ipam(&["10.0.0.0/23", "fd00::/48"], &[], &["10.0.1.1", "fd00::7"]),
        ipam(&["10.7.0.0/16", "fd07::/64"], &[], &["10.7.0.1"]),
        ipam(&["10.7.0.0/16"], &[], &[]),
    ] {
        say(&mut node, &today);
        for asked in [&[][..], &["10.0.0.2"], &["10.0.0.2/24", "fd00::1/64"]] {
            assert_eq!(node.ask("p", asked), Ok(first.clone()), "{today:?} {asked:?}");
        }
    }
    let refusal = Refusal::Length { address: ip("10.0.0.2"), asked: 16, subnet: net("10.0.0.0/24") };
    assert_eq!(node.ask("p", &["10.0.0.2/16"]), Err(Lack::Refused(refusal)));
    node.note(Record::Freed(place("p")));
    assert_eq!(node.ledger.grant(&place("p")), None);
}

#[test]
fn an_interface_of_which_nobody_knows_what_it_was_told_is_told_what_holds_today() {
    let mut node = Node::new(&["10.0.0.0/24", "fd00::/64"]);
    node.take("10.0.0.0/28");
    node.take("fd00::/120");
    let first = node.ask("p", &[]).unwrap();
    let lease = first.lease.clone();
    node.note(Record::Leased(Grant { lease, told: Vec::new() }));
    assert_eq!(node.ask("p", &[]), Ok(first));
    say(&mut node, &ipam(&["10.7.0.0/16"], &[], &["10.7.0.1"]));
    let alone = Told { net: net("10.0.0.1/32"), gateway: Some(ip("10.7.0.1")) };
    assert_eq!(
        node.ask("p", &["10.0.0.1/24"]).unwrap().told,
        [alone, Told { net: net("fd00::1/128"), gateway: None }]
    );
}
