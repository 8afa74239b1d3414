//! Leases of addresses that an IPAMClaim has.

use super::*;

fn claim(uid: &str, shared: bool) -> LeaseClaim {
    LeaseClaim { uid: uid.to_owned(), name: "vm1.blue".to_owned(), shared, netns: String::new() }
}

fn infos(addresses: &[&str]) -> Vec<AddressInfo> {
    addresses.iter().map(|text| AddressInfo { net: net(text), gateway: None }).collect()
}

impl TestNode {
    fn ask(
        &self,
        container: &str,
        claim: Option<LeaseClaim>,
        addresses: &[&str],
    ) -> Result<Grant, AllocationError> {
        let lease = Lease {
            key: key(container),
            pod: PodRef { namespace: "ns".to_owned(), name: container.to_owned(), uid: container.to_owned() },
            network: "net".to_owned(),
            config: "blue".to_owned(),
            boot: self.boot.clone(),
            since: 100,
            addresses: Vec::new(),
            claim,
        };
        self.ledger.serve(lease, infos(addresses))
    }

    fn serve(&mut self, container: &str, uid: &str, addresses: &[&str]) {
        let grant = self.ask(container, Some(claim(uid, false)), addresses).unwrap();
        self.record(LedgerRecord::Leased(grant));
    }
}

const BOTH: [&str; 2] = ["10.0.0.4/24", "fd00::4/64"];

fn in_use(address: &str, container: &str) -> AllocationError {
    let pod = PodRef { namespace: "ns".to_owned(), name: container.to_owned(), uid: container.to_owned() };
    AllocationError::InUse { address: ip(address), pod }
}

#[test]
fn two_attachments_of_one_claim_have_its_addresses_and_each_ends_alone() {
    for order in [["source", "target"], ["target", "source"]] {
        let mut node = TestNode::new(&["10.0.0.0/24", "fd00::/64"]);
        node.serve("source", "claim", &BOTH);
        node.serve("target", "claim", &BOTH);
        assert_eq!(node.ask("thief", Some(claim("other", false)), &BOTH[..1]), {
            Err(in_use("10.0.0.4", "source"))
        });
        let [first, second] = order;
        // The second DEL of an attachment finds nothing.
        for _ in 0..2 {
            node.record(LedgerRecord::Freed(key(first)));
            let left: Vec<&AttachmentKey> = node.ledger.leases().keys().collect();
            assert_eq!(left, [&key(second)]);
            assert_eq!(
                node.ask("thief", Some(claim("other", false)), &BOTH[1..]),
                Err(in_use("fd00::4", second))
            );
        }
        node.record(LedgerRecord::Freed(key(second)));
        let grant = node.ask("next", Some(claim("other", false)), &BOTH).unwrap();
        assert_eq!(grant.lease.addresses, [ip("10.0.0.4"), ip("fd00::4")]);
        assert_eq!(node.ledger, TestNode::new(&["10.0.0.0/24"]).ledger);
    }
}

#[test]
fn a_repeated_request_gets_the_first_grant() {
    let mut node = TestNode::new(&["10.0.0.0/24", "fd00::/64"]);
    let first = node.ask("p", Some(claim("claim", true)), &BOTH).unwrap();
    node.record(LedgerRecord::Leased(first.clone()));
    // Whether the addresses were shared is decided by the first ADD.
    assert_eq!(node.ask("p", Some(claim("claim", false)), &BOTH), Ok(first));
    let current = vec![ip("10.0.0.4"), ip("fd00::4")];
    let other = |requested: &str| {
        Err(AllocationError::OtherAddress { current: current.clone(), requested: ip(requested) })
    };
    assert_eq!(node.ask("p", Some(claim("claim", false)), &["10.0.0.5/24"]), other("10.0.0.5"));
    assert_eq!(node.ask("p", Some(claim("replaced", false)), &BOTH), other("10.0.0.4"));
    assert_eq!(node.ask("p", None, &BOTH), other("10.0.0.4"));
}

#[test]
fn claimed_addresses_neither_count_as_used_nor_are_allocated() {
    let mut node = TestNode::new(&["10.0.0.0/28"]);
    node.acquire("10.0.0.0/28");
    assert_eq!(node.lease("pod"), [ip("10.0.0.1")]);
    assert_eq!(node.ask("vm", Some(claim("claim", false)), &["10.0.0.1/28"]), Err(in_use("10.0.0.1", "pod")));
    // The node lent 10.0.0.2. No claim reserves 10.0.0.3 any more, but a pod still has it.
    let block = block("10.0.0.0/28");
    let lent =
        LedgerRecord::Lent { block: block.clone(), address: ip("10.0.0.2"), object: "single".to_owned() };
    node.record(lent);
    let grid = node.pools["net"].grid(Family::V4).unwrap().clone();
    let free = node.ledger.free_count(&block, &grid);
    node.serve("vm2", "two", &["10.0.0.2/28"]);
    assert_eq!(node.ledger.free_count(&block, &grid), free, "a lent address is counted once");
    node.serve("vm3", "three", &["10.0.0.3/28"]);
    assert_eq!(node.ledger.free_count(&block, &grid), free - 1);
    assert_eq!(node.ledger.used(&block).count(), 1);
    assert_eq!(
        node.request("q", &["10.0.0.3"]),
        Err(Shortage::Rejected(in_use("10.0.0.3", "vm3"))),
        "a pod still has it"
    );
    assert_eq!(node.lease("q"), [ip("10.0.0.4")]);
    // 10.0.0.3 is not lent either, and not among the spare addresses.
    node.object("10.0.0.3/32", "three", other(), Some(me()));
    node.object("10.0.0.2/32", "single", claims(), Some(me()));
    let steps = node.settle();
    let status = steps.iter().find_map(|step| match step {
        BlockStep::UpdateStatus { status, .. } => Some(status),
        _ => None,
    });
    let status = status.unwrap();
    assert_eq!((status.refused.as_slice(), status.used), (["three".to_owned()].as_slice(), 2));
    assert_eq!(status.spare, ["10.0.0.5-10.0.0.14"]);
    node.record(LedgerRecord::Freed(key("vm3")));
    assert_eq!(node.ledger.free_count(&block, &grid), free - 1, "the address of q is used");
}

#[test]
fn a_reboot_and_garbage_collection_release_claim_leases_by_their_key() {
    let mut node = TestNode::new(&["10.0.0.0/24", "fd00::/64"]);
    node.serve("source", "claim", &BOTH);
    node.serve("target", "claim", &BOTH);
    let live = BTreeSet::from(["target".to_owned()]);
    // They are from 100. The runtime lists sandboxes later than that, and a network that is being deleted must not wait long.
    let (ages, any) = (Timings::default(), node.ledger.leases().values().next().unwrap().network.clone());
    let (open, closed) = (ages.min_lease_age.as_secs(), ages.min_closed_lease_age.as_secs());
    assert!(closed < open);
    for (listed, is_closed, collected) in [
        (100 + open, false, false),
        (101 + open, false, true),
        (100 + closed, true, false),
        (101 + closed, true, true),
        (101 + closed, false, false),
    ] {
        let is_closed = |uid: &str| is_closed && uid == any;
        let listed = i64::try_from(listed).unwrap();
        let found = node.ledger.leases_without_sandbox(&live, listed, &ages, is_closed);
        assert_eq!(found, if collected { vec![key("source")] } else { Vec::new() }, "{listed}");
    }
    assert_eq!(node.ledger.leases_outside("net", "blue", &BTreeSet::from([key("target")])), [key("source")]);
    assert_eq!(node.ledger.leases_of_other_boots("next"), [key("source"), key("target")]);
    for gone in node.ledger.leases_of_other_boots("next") {
        node.record(LedgerRecord::Freed(gone));
    }
    assert_eq!(node.ledger, Ledger::default());
}

#[test]
fn records_restore_claim_leases() {
    let mut node = TestNode::new(&["10.0.0.0/24", "fd00::/64"]);
    node.acquire("10.0.0.0/28");
    node.acquire("fd00::/120");
    node.serve("source", "claim", &BOTH);
    node.serve("target", "claim", &BOTH);
    node.lease("pod");
    let mut restored = Ledger::default();
    for record in node.ledger.records() {
        let text = serde_json::to_string(&record).unwrap();
        restored.apply(&serde_json::from_str(&text).unwrap());
    }
    assert_eq!(restored, node.ledger);
    // The lease of an attachment that changes from a claim to an ordinary address, and back.
    let ordinary =
        Lease { claim: None, addresses: vec![ip("10.0.0.9")], ..restored.leases()[&key("source")].clone() };
    restored.apply(&LedgerRecord::Leased(Grant { lease: ordinary, infos: Vec::new() }));
    assert_eq!(restored.holders("net", ip("10.0.0.4")).count(), 1);
    assert_eq!(restored.holders("net", ip("10.0.0.9")).count(), 1);
    restored.apply(&LedgerRecord::Leased(node.ledger.grant(&key("source")).unwrap()));
    assert_eq!(restored.leases(), node.ledger.leases());
    assert_eq!(restored.holders("net", ip("10.0.0.4")).count(), 2);
    assert_eq!(restored.holders("net", ip("10.0.0.9")).count(), 0);
}
