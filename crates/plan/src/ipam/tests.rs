use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use api::{
    IPBlockSpec, IPBlockStatus,
    ipam::{BlockLength, IpamSpec},
    ipblock::{self, HolderRef, LentAddress},
};
use ipnet::IpNet;
use proptest::prelude::*;

use super::*;

mod boots;
mod claimed;
mod grid;
mod lending;
mod request;

pub(super) fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

pub(super) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

pub(super) fn ipam(subnets: &[&str], exclude: &[&str], gateways: &[&str]) -> IpamSpec {
    IpamSpec {
        subnets: subnets.iter().map(|text| net(text)).collect(),
        exclude: exclude.iter().map(|text| net(text)).collect(),
        gateways: gateways.iter().map(|text| ip(text)).collect(),
        ..IpamSpec::default()
    }
}

pub(super) fn grid(ipam: &IpamSpec) -> BlockGrid {
    let family = Family::of(ipam.subnets[0].addr());
    BlockGrid::new(ipam, family, family.block_length(ipam).unwrap()).unwrap()
}

/// A node with one network.
struct TestNode {
    ledger: Ledger,
    boot: String,
    pools: BTreeMap<String, Arc<Pool>>,
    objects: BTreeMap<String, ObservedIpBlock>,
    lenders: BTreeMap<BlockKey, Option<ObservedIpBlock>>,
    pending: PendingRequests,
    exhausted: BTreeSet<(String, Family)>,
    idle: BTreeSet<BlockKey>,
    reported: BTreeSet<BlockKey>,
}

pub(super) fn me() -> HolderRef {
    HolderRef { node: "a".to_owned(), uid: "uid-a".to_owned() }
}

pub(super) fn other() -> HolderRef {
    HolderRef { node: "b".to_owned(), uid: "uid-b".to_owned() }
}

/// The holder of the addresses of IPAMClaims: it is not a Node, and lends.
pub(super) fn claims() -> HolderRef {
    HolderRef::claims()
}

/// A holder that is not a Node and lends nothing.
pub(super) fn not_lending() -> HolderRef {
    HolderRef { node: "other/holder".to_owned(), uid: "uid-holder".to_owned() }
}

/// An IPBlock of the network, without a status.
pub(super) fn observed(range: &str, uid: &str, holder: HolderRef) -> ObservedIpBlock {
    let spec = IPBlockSpec {
        network: "blue".to_owned(),
        network_uid: "net".to_owned(),
        cidr: net(range),
        holder,
        lender: None,
        boot_id: String::new(),
    };
    ObservedIpBlock { uid: uid.to_owned(), spec, status: IPBlockStatus::default() }
}

pub(super) fn block(range: &str) -> BlockKey {
    BlockKey { network: "net".to_owned(), range: net(range) }
}

fn key(container: &str) -> AttachmentKey {
    AttachmentKey { container: container.to_owned(), interface: "net1".to_owned() }
}

impl TestNode {
    fn new(subnets: &[&str]) -> Self {
        let ipam = ipam(subnets, &[], &[]);
        let pools = Pool::new("blue", &ipam, |family| family.block_length(&ipam), true);
        Self {
            ledger: Ledger::default(),
            boot: "boot".to_owned(),
            pools: BTreeMap::from([("net".to_owned(), Arc::new(pools))]),
            objects: BTreeMap::new(),
            lenders: BTreeMap::new(),
            pending: PendingRequests::default(),
            exhausted: BTreeSet::new(),
            idle: BTreeSet::new(),
            reported: BTreeSet::new(),
        }
    }

    /// The IPBlocks of this node that the API server has.
    fn confirmed(&self) -> BTreeMap<String, String> {
        let ours = self.objects.iter().filter(|(_, one)| one.spec.holder == me());
        let ours = ours.filter(|(_, one)| carries_boot(one, &self.boot));
        ours.map(|(name, one)| (name.clone(), one.uid.clone())).collect()
    }

    fn plan(&self) -> Vec<BlockStep> {
        let me = me();
        blocks::plan(
            &self.ledger,
            BlockPlanInput {
                holder: &me,
                boot: Some(&self.boot),
                networks: &self.pools,
                objects: &self.objects,
                lenders: &self.lenders,
                pending: &self.pending,
                exhausted: &self.exhausted,
                idle: &self.idle,
                reported: &self.reported,
                returned: &BTreeSet::new(),
            },
        )
    }

    fn record(&mut self, record: LedgerRecord) {
        self.ledger.apply(&record);
    }

    /// Applies records until none is planned, and returns the other steps.
    fn settle(&mut self) -> Vec<BlockStep> {
        for _ in 0..10 {
            let steps = self.plan();
            if !steps.iter().any(|step| matches!(step, BlockStep::Record(_))) {
                return steps;
            }
            for step in steps {
                if let BlockStep::Record(record) = step {
                    self.record(record);
                }
            }
        }
        panic!("does not converge: {:?}", self.plan());
    }

    fn object(&mut self, range: &str, uid: &str, holder: HolderRef, lender: Option<HolderRef>) {
        let mut object = observed(range, uid, holder);
        (object.spec.lender, object.spec.boot_id) = (lender, self.boot.clone());
        self.objects.insert(ipblock::name("blue", net(range)), object);
    }

    fn acquire(&mut self, range: &str) {
        self.record(LedgerRecord::Acquiring { block: block(range), network: "blue".to_owned() });
        self.object(range, range, me(), None);
        self.settle();
        assert_eq!(self.ledger.holdings()[&block(range)].stage, Stage::Open);
    }

    fn request(&self, container: &str, requested: &[&str]) -> Result<Grant, Shortage> {
        let lease = Lease {
            key: key(container),
            pod: PodRef { namespace: "ns".to_owned(), name: container.to_owned(), uid: container.to_owned() },
            network: "net".to_owned(),
            config: "blue".to_owned(),
            boot: "boot".to_owned(),
            since: 100,
            addresses: Vec::new(),
            claim: None,
        };
        let parse = |text: &&str| if text.contains('/') { net(text) } else { ip(text).into() };
        let requested: Vec<IpNet> = requested.iter().map(parse).collect();
        let confirmed = self.confirmed();
        self.ledger.offer(AddressRequest {
            lease,
            grids: &self.pools["net"].grids,
            confirmed: &confirmed,
            requested: &requested,
        })
    }

    fn lease(&mut self, container: &str) -> Vec<IpAddr> {
        let grant = self.request(container, &[]).unwrap();
        self.record(LedgerRecord::Leased(grant.clone()));
        grant.lease.addresses
    }
}

#[test]
fn an_interface_gets_one_address_per_family_and_the_same_when_repeated() {
    let mut node = TestNode::new(&["10.0.0.0/24", "fd00::/64"]);
    assert_eq!(node.request("p", &[]), Err(Shortage::Families(vec![Family::V4, Family::V6])));
    node.acquire("10.0.0.0/28");
    assert_eq!(node.request("p", &[]), Err(Shortage::Families(vec![Family::V6])));
    node.acquire("fd00::/120");
    assert_eq!(node.lease("p"), [ip("10.0.0.1"), ip("fd00::1")]);
    assert_eq!(node.lease("p"), [ip("10.0.0.1"), ip("fd00::1")]);
    assert_eq!(node.lease("q"), [ip("10.0.0.2"), ip("fd00::2")]);
    // A released address is not the next to be allocated.
    node.record(LedgerRecord::Freed(key("q")));
    assert_eq!(node.lease("r"), [ip("10.0.0.3"), ip("fd00::3")]);
    assert_eq!(node.ledger.used(&block("10.0.0.0/28")).count(), 2);
}

#[test]
fn a_sandbox_of_another_pod_or_boot_gets_another_address() {
    let mut node = TestNode::new(&["10.0.0.0/24"]);
    node.acquire("10.0.0.0/28");
    let first = node.request("p", &[]).unwrap();
    node.record(LedgerRecord::Leased(first.clone()));
    let first = first.lease;
    let mut again = first.clone();
    again.pod.uid = "another".to_owned();
    again.addresses.clear();
    let request = |lease: Lease| {
        let confirmed = node.confirmed();
        let grids = &node.pools["net"].grids;
        node.ledger
            .offer(AddressRequest { lease, grids, confirmed: &confirmed, requested: &[] })
            .unwrap()
            .lease
    };
    assert_ne!(request(again.clone()).addresses, first.addresses);
    again.pod.uid.clone_from(&first.pod.uid);
    assert_eq!(request(again.clone()).addresses, first.addresses);
    again.boot = "next".to_owned();
    assert_ne!(request(again).addresses, first.addresses);
    assert_eq!(node.ledger.leases_of_other_boots("next"), [key("p")]);
    assert_eq!(node.ledger.leases_of_other_boots("boot"), []);
}

#[test]
fn the_next_block_is_acquired_before_the_last_one_is_full_and_not_earlier() {
    let mut node = TestNode::new(&["10.0.0.0/24"]);
    assert_eq!(node.settle(), []);
    node.pending.any.insert(("net".to_owned(), Family::V4), 1);
    let take = |missing| BlockStep::Acquire { network: "net".to_owned(), family: Family::V4, missing };
    assert_eq!(node.settle(), [take(1)]);
    // While one block is being acquired, no other is.
    node.record(LedgerRecord::Acquiring { block: block("10.0.0.0/28"), network: "blue".to_owned() });
    node.object("10.0.0.0/28", "o", me(), None);
    node.reported.insert(block("10.0.0.0/28"));
    assert_eq!(node.settle(), []);
    node.pending.any.clear();
    for pod in 0..11 {
        node.lease(&pod.to_string());
    }
    assert_eq!(node.settle(), [], "four are left of fifteen");
    node.lease("11");
    assert_eq!(node.settle(), [take(1)]);
    node.exhausted.insert(("net".to_owned(), Family::V4));
    assert_eq!(node.settle(), [], "no reserve is borrowed");
    node.pools.clear();
    assert_eq!(node.settle(), [], "a deleted network acquires nothing");
}

#[test]
fn idle_blocks_are_released_and_blocks_in_use_are_not() {
    let mut node = TestNode::new(&["10.0.0.0/24"]);
    for range in ["10.0.0.0/28", "10.0.0.16/28", "10.0.0.32/28"] {
        node.acquire(range);
        node.reported.insert(block(range));
    }
    node.lease("p");
    node.idle = node.reported.clone();
    let delete = |range: &str| BlockStep::Delete { block: block(range), object: range.to_owned() };
    assert_eq!(node.settle(), [delete("10.0.0.16/28"), delete("10.0.0.32/28")]);
    for range in ["10.0.0.16/28", "10.0.0.32/28"] {
        node.record(LedgerRecord::Dropped { block: block(range) });
        node.objects.remove(&ipblock::name("blue", net(range)));
    }
    assert_eq!(node.ledger.holdings()[&block("10.0.0.0/28")].stage, Stage::Open);
    assert_eq!(node.settle(), []);
    node.record(LedgerRecord::Freed(key("p")));
    assert_eq!(node.settle(), [delete("10.0.0.0/28")]);
    assert!(node.request("q", &[]).is_err(), "a block that is being released serves no address");
}

#[test]
fn a_block_of_a_holder_that_is_not_a_node_is_not_recorded_and_serves_nothing() {
    let mut node = TestNode::new(&["10.0.0.0/28"]);
    let uid_of_this_node = HolderRef { uid: me().uid, ..claims() };
    for holder in [claims(), uid_of_this_node] {
        node.object("10.0.0.0/30", "claims", holder, None);
        assert_eq!(node.plan(), [], "not recorded, released or reported");
    }
    node.pending.addresses.insert(("net".to_owned(), ip("10.0.0.1")));
    let wanted = BlockStep::AcquireAddress { network: "net".to_owned(), address: ip("10.0.0.1") };
    assert_eq!(node.plan(), [wanted], "the step reports who holds it");
    assert_eq!(node.request("p", &[]), Err(Shortage::Families(vec![Family::V4])));
    // A block of the journal that now has such a holder is looked up, and not taken for the own one.
    node.pending = PendingRequests::default();
    node.record(LedgerRecord::Acquiring { block: block("10.0.0.0/30"), network: "blue".to_owned() });
    assert_eq!(node.plan(), [BlockStep::Lookup(block("10.0.0.0/30"))]);
}

#[test]
fn an_unknown_or_deleted_block_serves_nothing() {
    let mut node = TestNode::new(&["10.0.0.0/24"]);
    node.record(LedgerRecord::Incomplete);
    node.object("10.0.0.0/28", "o", me(), None);
    node.reported.insert(block("10.0.0.0/28"));
    node.settle();
    assert_eq!(node.ledger.holdings()[&block("10.0.0.0/28")].stage, Stage::Unverified);
    assert!(node.request("p", &[]).is_err());
    // The ledger is complete now: a block that appears later stems from an abandoned request.
    assert!(node.ledger.is_complete());
    // Its lent addresses stay lent.
    let lent = LentAddress { address: ip("10.0.0.9"), block: "nine".to_owned() };
    node.objects.values_mut().for_each(|one| one.status.lent = vec![lent.clone()]);
    node.settle();
    assert_eq!(node.ledger.holdings()[&block("10.0.0.0/28")].lent[&ip("10.0.0.9")], "nine");
    // After a reboot only lent addresses of it can be in use.
    node.record(LedgerRecord::Booted("one".to_owned()));
    node.record(LedgerRecord::Booted("two".to_owned()));
    node.settle();
    assert_eq!(
        node.request("p", &["10.0.0.9"]),
        Err(Shortage::Rejected(AllocationError::Lent(ip("10.0.0.9"))))
    );
    assert_eq!(node.request("p", &[]).unwrap().lease.addresses, [ip("10.0.0.1")]);
    let mut node = TestNode::new(&["10.0.0.0/24"]);
    node.object("10.0.0.0/28", "o", me(), None);
    assert!(matches!(node.settle()[..], [BlockStep::Delete { .. }]), "it never served an address");
    let mut node = TestNode::new(&["10.0.0.0/24"]);
    node.acquire("10.0.0.0/28");
    node.lease("p");
    node.objects.clear();
    assert!(node.request("q", &[]).is_err(), "another node may hold it by now");
    assert_eq!(node.settle(), [BlockStep::Lookup(block("10.0.0.0/28"))]);
    node.record(LedgerRecord::Lost { block: block("10.0.0.0/28") });
    assert!(node.request("q", &[]).is_err());
    assert_eq!(node.lease("p"), [ip("10.0.0.1")], "the pod keeps its address");
    node.object("10.0.0.0/28", "new", me(), None);
    node.settle();
    assert!(node.request("q", &[]).is_ok());
}

#[test]
fn a_reacquired_address_is_not_released_while_a_pod_uses_it() {
    let mut node = TestNode::new(&["10.0.0.0/24"]);
    let single = block("10.0.0.21/32");
    node.record(LedgerRecord::Acquiring { block: single.clone(), network: "blue".to_owned() });
    node.record(LedgerRecord::Acquired { block: single.clone(), object: "one".to_owned() });
    node.object("10.0.0.21/32", "one", me(), Some(other()));
    assert_eq!(node.lease("p"), [ip("10.0.0.21")]);
    // A user deleted its IPBlock; the lender still has it lent to that one and refuses the new one.
    node.record(LedgerRecord::Lost { block: single.clone() });
    node.record(LedgerRecord::Acquiring { block: single.clone(), network: "blue".to_owned() });
    node.object("10.0.0.21/32", "two", me(), Some(other()));
    node.object("10.0.0.16/28", "theirs", other(), None);
    let mut enclosing = node.objects.remove(&ipblock::name("blue", net("10.0.0.16/28"))).unwrap();
    enclosing.status.refused = vec!["two".to_owned()];
    node.lenders.insert(single.clone(), Some(enclosing));
    let steps = node.settle();
    assert!(!steps.iter().any(|step| matches!(step, BlockStep::Delete { .. })), "{steps:?}");
    assert_eq!(node.ledger.holdings()[&single].stage, Stage::Lost);
    // The IPBlock is deleted after the pod.
    node.record(LedgerRecord::Freed(key("p")));
    assert_eq!(node.settle(), [BlockStep::Delete { block: single, object: "two".to_owned() }]);
}

#[test]
fn a_borrowed_address_of_a_lost_journal_is_used_after_a_reboot_only_if_it_was_lent() {
    let single = block("10.0.0.21/32");
    for lent in [true, false] {
        let mut node = TestNode::new(&["10.0.0.0/24"]);
        node.record(LedgerRecord::Booted("one".to_owned()));
        node.record(LedgerRecord::Incomplete);
        node.object("10.0.0.21/32", "one", me(), Some(other()));
        node.settle();
        assert_eq!(node.ledger.holdings()[&single].stage, Stage::Unverified);
        node.record(LedgerRecord::Booted("two".to_owned()));
        node.object("10.0.0.16/28", "theirs", other(), None);
        let mut enclosing = node.objects.remove(&ipblock::name("blue", net("10.0.0.16/28"))).unwrap();
        if lent {
            enclosing.status.lent = vec![LentAddress { address: ip("10.0.0.21"), block: "one".to_owned() }];
        }
        node.lenders.insert(single.clone(), Some(enclosing));
        node.settle();
        assert_eq!(node.request("p", &[]).is_ok(), lent);
    }
}

#[test]
fn an_unverified_block_is_kept_though_its_network_has_no_ipam() {
    let mut node = TestNode::new(&["10.0.0.0/24"]);
    node.record(LedgerRecord::Incomplete);
    node.object("10.0.0.0/28", "o", me(), None);
    node.reported.insert(block("10.0.0.0/28"));
    node.settle();
    node.pools.clear();
    node.settle();
    assert_eq!(node.ledger.holdings()[&block("10.0.0.0/28")].stage, Stage::Unverified);
    // No pod that could use one of its addresses is left.
    node.idle.insert(block("10.0.0.0/28"));
    assert!(matches!(node.settle()[..], [BlockStep::Delete { .. }]));
}

#[test]
fn a_closed_block_has_no_free_addresses() {
    let node = TestNode::new(&["10.0.0.0/27"]);
    let grid = node.pools["net"].grid(Family::V4).unwrap();
    let spec = |range: &str, lender| IPBlockSpec {
        network: "blue".to_owned(),
        network_uid: "net".to_owned(),
        cidr: net(range),
        holder: me(),
        lender,
        boot_id: String::new(),
    };
    let lent = vec![LentAddress { address: ip("10.0.0.1"), block: "one".to_owned() }];
    let enclosing = IPBlockStatus { used: 1, lent, ..IPBlockStatus::default() };
    let single = IPBlockStatus { used: 1, ..IPBlockStatus::default() };
    let free = |closed| {
        let (whole, one) = (spec("10.0.0.0/30", None), spec("10.0.0.1/32", Some(other())));
        let enclosing = IPBlockStatus { closed, ..enclosing.clone() };
        let status = network_status(Family::V4, Some(grid), 30, [(&whole, &enclosing), (&one, &single)]);
        (status.used, status.free)
    };
    // The first and the last address of the subnet are not allocatable.
    assert_eq!((free(false), free(true)), ((2, 28), (2, 27)));
}

#[test]
fn a_removed_subnet_serves_nothing_new_and_reports_who_uses_it() {
    let mut node = TestNode::new(&["10.0.0.0/24", "10.1.0.0/24"]);
    node.acquire("10.1.0.0/28");
    node.lease("p");
    node.pools = TestNode::new(&["10.0.0.0/24"]).pools;
    assert!(node.request("q", &[]).is_err());
    assert_eq!(node.lease("p"), [ip("10.1.0.1")]);
    let steps = node.settle();
    let status = steps
        .iter()
        .find_map(|step| if let BlockStep::UpdateStatus { status, .. } = step { Some(status) } else { None });
    assert_eq!(status.unwrap().draining, ["ns/p 10.1.0.1"]);
}

proptest! {
    #[test]
    fn a_ledger_never_allocates_an_address_twice_and_its_records_restore_it(steps in prop::collection::vec((0..6_u8, 0..24_u8), 1..300)) {
        let mut node = TestNode::new(&["10.0.0.0/26"]);
        let mut records = Vec::new();
        let mut note = |node: &mut TestNode, record: LedgerRecord| {
            node.record(record.clone());
            records.push(record);
        };
        for (what, which) in steps {
            let range = format!("10.0.0.{}/30", u32::from(which % 16) * 4);
            let holding = node.ledger.holdings().get(&block(&range)).map(|one| one.stage);
            match what {
                0 if holding.is_none() => {
                    note(&mut node, LedgerRecord::Acquiring { block: block(&range), network: "blue".to_owned() });
                    note(&mut node, LedgerRecord::Acquired { block: block(&range), object: range.clone() });
                    node.object(&range, &range, me(), None);
                }
                1 if holding.is_some() && node.ledger.is_empty(&block(&range)) => {
                    note(&mut node, LedgerRecord::Dropped { block: block(&range) });
                }
                2 => note(&mut node, LedgerRecord::Freed(key(&which.to_string()))),
                _ => {
                    let held: BTreeSet<IpAddr> = node.ledger.leases().values().flat_map(|lease| lease.addresses.clone()).collect();
                    let known = node.ledger.leases().contains_key(&key(&which.to_string()));
                    if let Ok(grant) = node.request(&which.to_string(), &[]) {
                        let address = grant.lease.addresses[0];
                        prop_assert!(known || !held.contains(&address));
                        prop_assert!(node.ledger.holding_of("net", address).is_some());
                        note(&mut node, LedgerRecord::Leased(grant));
                    }
                }
            }
        }
        let (mut replayed, mut compacted) = (Ledger::default(), Ledger::default());
        for record in &records {
            replayed.apply(record);
        }
        for record in node.ledger.records() {
            compacted.apply(&record);
        }
        prop_assert_eq!(&replayed, &node.ledger);
        prop_assert_eq!(&compacted, &node.ledger);
    }
}
