//! Which addresses are reserved, borrowed, lent and released.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::Ipv4Addr,
    time::{Duration, Instant},
};

use api::{
    IPBlockSpec, IPBlockStatus,
    ipam::IpamSpec,
    ipblock::{self, ClaimedAddress, HolderRef, LentAddress},
};
use ipnet::IpNet;

use super::{
    super::{
        allocate::{self, BlockCreate, BlockDeleteReason},
        release::{self, Candidate, ReportedAddresses},
    },
    *,
};
use crate::{
    ipam::{Family, ObservedIpBlock, Pool},
    network::{BlockState, ClusterState, NodeReport, NodeState},
};

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

fn node() -> HolderRef {
    HolderRef { node: "a".to_owned(), uid: "uid-a".to_owned() }
}

/// A network with blocks, and claims that want addresses of it.
struct Network {
    pool: Pool,
    blocks: BTreeMap<String, BlockState>,
    wanted: Vec<Wanted>,
    releasable: BTreeSet<(String, IpAddr)>,
    tried: BTreeSet<IpAddr>,
    silent: BTreeSet<String>,
    idle: BTreeSet<String>,
    stores_claims: bool,
}

impl Network {
    fn new(subnets: &[&str]) -> Self {
        let ipam =
            IpamSpec { subnets: subnets.iter().map(|text| net(text)).collect(), ..IpamSpec::default() };
        let length = |family| Some(if family == Family::V4 { 30 } else { 126 });
        Self {
            pool: Pool::new("blue", &ipam, length, true),
            blocks: BTreeMap::new(),
            wanted: Vec::new(),
            releasable: BTreeSet::new(),
            tried: BTreeSet::new(),
            silent: BTreeSet::new(),
            idle: BTreeSet::new(),
            stores_claims: false,
        }
    }

    fn hold(&mut self, range: &str, holder: HolderRef, lender: Option<HolderRef>) -> &mut IPBlockStatus {
        let spec = IPBlockSpec {
            network: "blue".to_owned(),
            network_uid: "net".to_owned(),
            cidr: net(range),
            holder,
            lender,
            boot_id: String::new(),
        };
        let object = ObservedIpBlock { uid: format!("uid-{range}"), spec, status: IPBlockStatus::default() };
        let name = ipblock::name("blue", net(range));
        self.blocks.insert(name.clone(), BlockState { version: "1".to_owned(), object });
        &mut self.blocks.get_mut(&name).unwrap().object.status
    }

    fn want(&mut self, name: &str) -> &mut Wanted {
        self.wanted.push(Wanted {
            claim: key(name),
            uid: format!("uid-{name}"),
            requested: Vec::new(),
            published: Vec::new(),
            shown: Vec::new(),
            created: at(0),
        });
        self.wanted.last_mut().unwrap()
    }

    fn plan(&self) -> AllocatorPlan {
        allocate::plan(AllocatorInput {
            network: "blue",
            uid: "net",
            pool: &self.pool,
            blocks: &self.blocks,
            wanted: &self.wanted,
            releasable: &self.releasable,
            nodes_silent: &self.silent,
            tried: &self.tried,
            idle: &self.idle,
            stores_claims: self.stores_claims,
            seed: 0,
        })
    }

    /// Applies plans until nothing is left to write, and returns the last one.
    fn settle(&mut self) -> AllocatorPlan {
        for _ in 0..10 {
            let plan = self.plan();
            if plan.is_empty() {
                return plan;
            }
            for write in plan.writes {
                self.blocks.get_mut(&write.name).unwrap().object.status = write.status;
            }
            for BlockCreate { range, lender } in plan.creates {
                self.hold(&range.to_string(), HolderRef::claims(), lender);
            }
            for delete in plan.deletes {
                self.blocks.remove(&delete.name);
            }
        }
        panic!("writes never end: {:#?}", self.plan());
    }
}

fn claimed(address: &str, name: &str) -> ClaimedAddress {
    ClaimedAddress { address: ip(address), claim: format!("ns/{name}"), uid: format!("uid-{name}") }
}

fn addresses(plan: &AllocatorPlan, name: &str) -> Vec<String> {
    plan.reserved[&format!("uid-{name}")].infos.iter().map(|info| info.net.to_string()).collect()
}

fn failure(plan: &AllocatorPlan, name: &str) -> (&'static str, String) {
    let failure = &plan.failed[&format!("uid-{name}")];
    (failure.reason.as_str(), failure.message.clone())
}

#[test]
fn a_claim_gets_one_address_of_each_family() {
    let mut network = Network::new(&["10.0.0.0/29", "fd00::/125"]);
    network.want("x");
    let first = network.plan();
    assert_eq!((first.writes.len(), first.creates.len(), first.reserved.len()), (0, 2, 0), "blocks first");
    let plan = network.settle();
    assert_eq!(addresses(&plan, "x"), ["10.0.0.1/29", "fd00::1/125"]);
    assert_eq!(plan.reserved["uid-x"].blocks, ["blue.10.0.0.0-30", "blue.6-fd00---126"]);
    let status = &network.blocks["blue.10.0.0.0-30"].object.status;
    assert_eq!(
        (status.used, status.free, status.spare.as_slice()),
        (1, 2, &["10.0.0.2-10.0.0.3".to_owned()][..])
    );
    assert_eq!(status.claims, [claimed("10.0.0.1", "x")]);
}

#[test]
fn many_claims_share_blocks_and_the_last_ones_fail() {
    let mut network = Network::new(&["10.0.0.0/29"]);
    for number in 0..7 {
        network.want(&format!("x{number}")).created = at(number);
    }
    assert_eq!(network.plan().creates.len(), 2, "a block for as many claims as it has addresses");
    let plan = network.settle();
    assert_eq!(plan.reserved.len(), 6);
    let (reason, message) = failure(&plan, "x6");
    assert_eq!(
        (reason, message.as_str()),
        (
            "SubnetExhausted",
            "network \"blue\" has no free IPv4 address left: add a subnet to spec.ipam.subnets of the BridgeNetwork, or delete \
         pods or virtual machines that use it",
        )
    );
    // No claim loses its address while others wait.
    let before = network.blocks.clone();
    network.settle();
    assert_eq!(network.blocks, before);
}

#[test]
fn no_family_is_reserved_if_one_has_no_address() {
    let mut network = Network::new(&["10.0.0.0/30", "fd00::/126"]);
    network.hold("10.0.0.0/30", HolderRef::claims(), None).claims =
        vec![claimed("10.0.0.1", "y"), claimed("10.0.0.2", "z")];
    network.want("x");
    let plan = network.settle();
    assert_eq!(failure(&plan, "x").0, "SubnetExhausted");
    assert!(!network.blocks.contains_key("blue.6-fd00---126"));
}

#[test]
fn a_reservation_stays_whatever_the_status_of_the_claim_says() {
    let mut network = Network::new(&["10.0.0.0/28"]);
    network.hold("10.0.0.0/30", HolderRef::claims(), None).claims = vec![claimed("10.0.0.2", "x")];
    for published in [vec![], vec![net("10.0.0.9/28")], vec![net("10.0.0.2/28")]] {
        network.wanted.clear();
        network.want("x").published = published;
        assert_eq!(addresses(&network.settle(), "x"), ["10.0.0.2/28"]);
    }
    // Two controllers have each reserved one: the published one counts, then the one that a pod shows, then the lowest.
    network.hold("10.0.0.4/30", HolderRef::claims(), None).claims = vec![claimed("10.0.0.5", "x")];
    network.wanted[0].published.clear();
    assert_eq!(addresses(&network.plan(), "x"), ["10.0.0.2/28"]);
    network.wanted[0].shown = vec![ip("10.0.0.5")];
    assert_eq!(addresses(&network.plan(), "x"), ["10.0.0.5/28"]);
    network.wanted[0].published = vec![net("10.0.0.2/28")];
    assert_eq!(addresses(&network.plan(), "x"), ["10.0.0.2/28"]);
}

#[test]
fn the_address_of_a_removed_subnet_stays_as_it_was_published() {
    let mut network = Network::new(&["10.0.0.0/28"]);
    network.hold("10.9.0.0/30", HolderRef::claims(), None).claims = vec![claimed("10.9.0.2", "x")];
    network.want("x").published = vec![net("10.9.0.2/24")];
    let plan = network.settle();
    assert_eq!(addresses(&plan, "x"), ["10.9.0.2/24"]);
    assert_eq!(network.blocks["blue.10.9.0.0-30"].object.status.draining, ["IPAMClaim ns/x 10.9.0.2"]);
    // A family that the network got later is not added to a claim that has addresses.
    let mut network = Network::new(&["10.0.0.0/28", "fd00::/124"]);
    network.hold("10.0.0.0/30", HolderRef::claims(), None).claims = vec![claimed("10.0.0.2", "x")];
    network.want("x").published = vec![net("10.0.0.2/28")];
    assert_eq!(addresses(&network.settle(), "x"), ["10.0.0.2/28"]);
    let in_part = network.blocks.clone();
    // Its status is empty, or has an address that is not its own.
    for published in [vec![], vec![net("10.0.0.9/28")]] {
        network.blocks.clone_from(&in_part);
        network.wanted[0].published = published;
        assert_eq!(addresses(&network.settle(), "x").len(), 2, "it was reserved in part");
    }
}

/// Another length was chosen for the blocks of this network, so their names do not conflict.
#[test]
fn no_block_overlaps_one_of_an_earlier_network_of_the_name() {
    let mut network = Network::new(&["10.0.0.0/29"]);
    network.hold("10.0.0.0/31", node(), None).used = 1;
    let former = network.blocks.values_mut().next().unwrap();
    former.object.spec.network_uid = "earlier".to_owned();
    network.want("any");
    let plan = network.settle();
    assert_eq!(addresses(&plan, "any"), ["10.0.0.4/29"]);
    network.want("requested").requested = vec![ip("10.0.0.2")];
    let plan = network.settle();
    assert!(!plan.reserved.contains_key("uid-requested"), "the claim waits: {plan:#?}");
}

#[test]
fn a_requested_address_is_validated() {
    let text = |requested: &str| {
        let mut network = Network::new(&["10.0.0.0/29"]);
        network.hold("10.0.0.0/30", HolderRef::claims(), None).claims = vec![claimed("10.0.0.2", "y")];
        network.hold("10.0.0.4/30", node(), None).spare = vec!["10.0.0.5-10.0.0.6".to_owned()];
        network.tried.insert(ip("10.0.0.6"));
        network.want("x").requested = vec![ip(requested)];
        let plan = network.settle();
        plan.failed.get("uid-x").map(|failure| format!("{}: {}", failure.reason.as_str(), failure.message))
    };
    let hint = ": request another one in annotation network.kubevirt.io/addresses, or remove annotation \
                patchbay.dev/addresses of the IPAMClaim";
    for (requested, expected) in [
        ("10.0.0.1", None),
        (
            "10.0.0.2",
            Some(format!(
                "IPAddressConflict: address 10.0.0.2 of network \"blue\" belongs to IPAMClaim ns/y{hint}"
            )),
        ),
        (
            "10.0.0.6",
            Some(format!(
                "IPAddressConflict: address 10.0.0.6 of network \"blue\" is in use on node a{hint}"
            )),
        ),
        // The node does not report it as free.
        (
            "10.0.0.4",
            Some(format!(
                "IPAddressConflict: address 10.0.0.4 of network \"blue\" is in use on node a{hint}"
            )),
        ),
        (
            "fd00::1",
            Some(
                "InternalError: network \"blue\" has no IPv6 subnet: remove fd00::1 from annotation network.kubevirt.io/addresses, \
                 remove annotation patchbay.dev/addresses of the IPAMClaim, or add a subnet to spec.ipam.subnets of the BridgeNetwork"
                    .to_owned(),
            ),
        ),
        ("10.0.0.5", None),
    ] {
        assert_eq!(text(requested), expected, "{requested}");
    }
    // That of a status which was restored with the claim.
    let mut network = Network::new(&["10.0.0.0/29"]);
    network.hold("10.0.0.0/30", HolderRef::claims(), None).claims = vec![claimed("10.0.0.2", "y")];
    let wanted = network.want("x");
    (wanted.published, wanted.requested) = (vec!["10.0.0.2/29".parse().unwrap()], vec![ip("10.0.0.2")]);
    let plan = network.settle();
    assert!(plan.failed["uid-x"].message.contains("belongs to IPAMClaim ns/y"), "{:?}", plan.failed);
    assert!(
        text("10.1.0.1")
            .unwrap()
            .starts_with("InternalError: requested address 10.1.0.1: address 10.1.0.1 is in no subnet")
    );
    assert!(
        text("10.0.0.7")
            .unwrap()
            .starts_with("InternalError: requested address 10.0.0.7: address 10.0.0.7 is reserved")
    );
}

#[test]
fn a_network_that_goes_reserves_nothing_new() {
    let mut network = Network::new(&["10.0.0.0/29"]);
    network.pool.active = false;
    network.hold("10.0.0.0/30", HolderRef::claims(), None).claims = vec![claimed("10.0.0.2", "y")];
    network.want("x");
    network.want("y");
    let plan = network.settle();
    assert_eq!(failure(&plan, "x").1, "BridgeNetwork \"blue\" is being deleted; use another network");
    assert_eq!(addresses(&plan, "y"), ["10.0.0.2/29"]);
    let mut network = Network::new(&[]);
    network.want("x");
    assert_eq!(
        failure(&network.plan(), "x").1,
        "BridgeNetwork \"blue\" has no spec.ipam; add spec.ipam.subnets"
    );
}

#[test]
fn an_address_is_borrowed_once_no_block_is_free() {
    let mut network = Network::new(&["10.0.0.0/30"]);
    network.hold("10.0.0.0/30", node(), None).spare = vec!["10.0.0.2-10.0.0.2".to_owned()];
    network.want("x");
    let plan = network.settle();
    assert_eq!(
        (plan.reserved.len(), plan.failed.len(), plan.waits.len()),
        (0, 0, 1),
        "the lender has not answered"
    );
    let single = "blue.10.0.0.2-32";
    let lent = LentAddress { address: ip("10.0.0.2"), block: "uid-10.0.0.2/32".to_owned() };
    let enclosing = |network: &mut Network, lent: Vec<LentAddress>, refused: &[&str]| {
        let status = &mut network.blocks.get_mut("blue.10.0.0.0-30").unwrap().object.status;
        (status.spare, status.lent) = (Vec::new(), lent);
        (status.used, status.refused) = (1, refused.iter().map(|&uid| uid.to_owned()).collect());
    };
    let mut refused = Network { blocks: network.blocks.clone(), ..Network::new(&["10.0.0.0/30"]) };
    refused.want("x");
    enclosing(&mut refused, Vec::new(), &["uid-10.0.0.2/32"]);
    assert_eq!(refused.plan().deletes[0].why, BlockDeleteReason::Refused { address: ip("10.0.0.2") });
    assert_eq!(failure(&refused.settle(), "x").0, "SubnetExhausted");
    let mut silent = Network { blocks: network.blocks.clone(), ..Network::new(&["10.0.0.0/30"]) };
    silent.want("x");
    silent.idle.insert(single.to_owned());
    let why = BlockDeleteReason::Silent { address: ip("10.0.0.2"), lender: "uid-a".to_owned() };
    assert_eq!(silent.plan().deletes[0].why, why);
    enclosing(&mut network, vec![lent], &[]);
    assert_eq!(addresses(&network.settle(), "x"), ["10.0.0.2/30"]);
    assert_eq!(network.blocks[single].object.status.claims, [claimed("10.0.0.2", "x")]);
    // It is given back when it is not needed any more.
    network.wanted.clear();
    network.releasable.insert(("uid-x".to_owned(), ip("10.0.0.2")));
    network.idle.insert(single.to_owned());
    network.settle();
    assert!(!network.blocks.contains_key(single));
}

#[test]
fn free_addresses_are_lent_and_taken_back() {
    let mut network = Network::new(&["10.0.0.0/30"]);
    network.hold("10.0.0.0/30", HolderRef::claims(), None).claims = vec![claimed("10.0.0.1", "x")];
    network.want("x");
    for range in ["10.0.0.1/32", "10.0.0.2/32"] {
        network.hold(range, node(), Some(HolderRef::claims()));
    }
    network.settle();
    let status = network.blocks["blue.10.0.0.0-30"].object.status.clone();
    let lent = LentAddress { address: ip("10.0.0.2"), block: "uid-10.0.0.2/32".to_owned() };
    assert_eq!((status.lent, status.refused), (vec![lent], vec!["uid-10.0.0.1/32".to_owned()]));
    assert_eq!((status.used, status.free, status.spare), (1, 0, Vec::new()));
    network.want("y").requested = vec![ip("10.0.0.2")];
    assert!(failure(&network.plan(), "y").1.contains("is lent to node a"));
    // The borrower returns it under another UID and asks again.
    network.blocks.get_mut("blue.10.0.0.2-32").unwrap().object.uid = "again".to_owned();
    network.settle();
    assert_eq!(network.blocks["blue.10.0.0.0-30"].object.status.lent[0].block, "again");
    network.blocks.remove("blue.10.0.0.2-32");
    assert_eq!(addresses(&network.settle(), "y"), ["10.0.0.2/30"]);
    // A block that is used or lends is not idle, whatever the caller thinks.
    network.idle.insert("blue.10.0.0.0-30".to_owned());
    assert_eq!(network.plan().deletes, []);
}

#[test]
fn a_new_claim_gets_the_address_that_its_pod_still_has() {
    let mut network = Network::new(&["10.0.0.0/29"]);
    let mut old = claimed("10.0.0.3", "x");
    old.uid = "old".to_owned();
    network.hold("10.0.0.0/30", HolderRef::claims(), None).claims = vec![old];
    network.want("x").shown = vec![ip("10.0.0.3")];
    let plan = network.plan();
    assert_eq!(plan.writes[0].confirm, [(key("x"), "uid-x".to_owned())]);
    assert!(plan.reserved.is_empty(), "not before it is written");
    assert_eq!(addresses(&network.settle(), "x"), ["10.0.0.3/29"]);
    // Another machine of the name shows nothing and gets another address.
    network.blocks.get_mut("blue.10.0.0.0-30").unwrap().object.status.claims[0].uid = "old".to_owned();
    network.wanted[0].shown.clear();
    assert_eq!(addresses(&network.settle(), "x"), ["10.0.0.1/29"]);
}

#[test]
fn a_plan_does_not_compare_each_claim_with_all_others() {
    let mut network = Network::new(&["10.0.0.0/16"]);
    for number in 0..10_000_u32 {
        let first = Ipv4Addr::from(0x0a00_0000 + number * 4);
        let (address, name) =
            (format!("10.0.{}.{}", first.octets()[2], first.octets()[3] + 1), format!("x{number}"));
        network.hold(&format!("{first}/30"), HolderRef::claims(), None).claims =
            vec![claimed(&address, &name)];
        network.want(&name).shown = vec![ip(&address)];
    }
    let start = Instant::now();
    let plan = network.plan();
    assert_eq!(plan.reserved.len(), 10_000);
    let spent = start.elapsed();
    assert!(spent < Duration::from_secs(5), "{spent:?}");
}

#[test]
fn a_reservation_is_due_once_its_claim_is_gone_and_no_pod_holds_it() {
    let mut network = Network::new(&["10.0.0.0/29"]);
    network.hold("10.0.0.0/30", HolderRef::claims(), None).claims = vec![claimed("10.0.0.3", "vm1.blue")];
    let none = ReportedAddresses::default();
    let due = |network: &Network, claims: &[ClaimState], pods: &[ClaimPod]| -> Vec<Candidate> {
        let by_uid = |uid: &str| claims.iter().find(|claim| claim.uid == uid).cloned();
        let named = |key: &ObjectKey| claims.iter().find(|claim| claim.key == *key).cloned();
        let pods: Vec<&ClaimPod> = pods.iter().collect();
        let due = release::due("net", &network.blocks, by_uid, named, &pods, &none);
        for one in &due {
            let current = named(&one.claim);
            assert!(release::confirms(one, "net", &network.blocks, current.as_ref(), &pods, &none));
        }
        due
    };
    let ours = claim("vm1.blue", Some(vm_owner("v1")));
    let newer = ClaimState { uid: "new".to_owned(), ..ours.clone() };
    let referencing = launcher("i1", &[("blue", Some("vm1.blue"))]);
    let shows = showing(launcher("i1", &[]), "p", &["10.0.0.3"]);
    let foreign = ClaimPod { key: ObjectKey::new("other", "p"), ..shows.clone() };
    let elsewhere = showing(referencing.clone(), "q", &["10.0.0.4"]);
    for (claims, pods, free) in [
        (vec![], vec![], true),
        (vec![ours.clone()], vec![], false),
        (vec![], vec![referencing.clone()], false),
        (vec![], vec![shows.clone()], false),
        (vec![], vec![foreign], true),
        // Multus has not written its network-status: it may have the address from the earlier claim.
        (vec![newer.clone()], vec![referencing], false),
        (vec![newer.clone()], vec![elsewhere], true),
        (vec![newer], vec![shows.clone()], false),
    ] {
        assert_eq!(due(&network, &claims, &pods).len(), usize::from(free), "{claims:?} {pods:?}");
    }
    // Of two reservations the published one stays.
    network.hold("10.0.0.4/30", HolderRef::claims(), None).claims = vec![claimed("10.0.0.5", "vm1.blue")];
    assert_eq!(due(&network, std::slice::from_ref(&ours), &[]), []);
    let mut published = ours;
    published.status.ips = vec!["10.0.0.5/29".to_owned()];
    let left: Vec<IpAddr> =
        due(&network, std::slice::from_ref(&published), &[]).iter().map(|it| it.address).collect();
    assert_eq!(left, [ip("10.0.0.3")]);
    let pod = ClaimPod { elements: launcher("i1", &[("blue", Some("vm1.blue"))]).elements, ..shows };
    assert_eq!(due(&network, &[published], &[pod]), [], "a pod has it");
}

/// Tenants write annotations: any number of pods can claim to have any number of addresses.
#[test]
fn the_report_of_a_daemon_decides_whether_an_address_is_in_use_and_annotations_do_not() {
    let mut network = Network::new(&["10.0.0.0/29"]);
    network.hold("10.0.0.0/30", HolderRef::claims(), None).claims = vec![claimed("10.0.0.3", "vm1.blue")];
    let forged = showing(launcher("i1", &[("blue", Some("vm1.blue"))]), "p", &["10.0.0.3"]);
    let node = |addresses: Option<&[&str]>| {
        let listed =
            |all: &[&str]| BTreeMap::from([("net".to_owned(), all.iter().map(|text| ip(text)).collect())]);
        let report = NodeReport { claim_addresses: addresses.map(listed), ..NodeReport::default() };
        let node = NodeState { uid: "n".to_owned(), labels: BTreeMap::new(), not_ready_reason: None };
        let state = ClusterState {
            nodes: [("a".to_owned(), node)].into(),
            reports: [("a".to_owned(), report.clone()), ("gone".to_owned(), report)].into(),
            ..ClusterState::default()
        };
        ReportedAddresses::of(&state, "net")
    };
    let due = |reported: &ReportedAddresses, pods: &[&ClaimPod]| {
        let none = |_: &str| None::<ClaimState>;
        let due = release::due("net", &network.blocks, none, |_| None, pods, reported);
        due.first().map(|one| {
            assert!(release::is_named_by(one, &forged));
            release::confirms(one, "net", &network.blocks, None, pods, reported)
        })
    };
    // None: not due. Some: whether live reads confirm it.
    assert_eq!(due(&node(None), &[&forged]), None, "the daemon does not report, so the annotation counts");
    assert_eq!(due(&node(Some(&["10.0.0.3"])), &[]), None, "an interface has the address");
    assert_eq!(due(&node(Some(&["10.0.0.4"])), &[]), Some(true));
    assert_eq!(due(&node(Some(&[])), &[&forged]), Some(false), "the node of the pod is read before");

    let reports = NodeReport { claim_addresses: Some(BTreeMap::new()), ..NodeReport::default() };
    let none = |_: &str| None::<ClaimState>;
    let [candidate] =
        release::due("net", &network.blocks, none, |_| None, &[], &node(Some(&[]))).try_into().unwrap();
    let referencing = forged.clone();
    let forged = ClaimPod { elements: [].into(), ..forged };
    let (short, long) = (Duration::from_secs(59), Duration::from_secs(60));
    for (pod, report, unused, counts) in [
        (&forged, None, long, true),
        (&forged, Some(&NodeReport::default()), long, true),
        (&forged, Some(&reports), short, false),
        // Its ADD may have begun before the claim was gone.
        (&referencing, Some(&reports), short, true),
        (&referencing, Some(&reports), long, false),
    ] {
        let decide = release::annotations_count(&candidate, pod, report, unused, None);
        assert_eq!(decide, counts, "{pod:?} {report:?} {unused:?}");
    }
    // A pod can name a Node that does not exist.
    for (missing, counts) in [(599, true), (600, false)] {
        let missing = Some(Duration::from_secs(missing));
        assert_eq!(release::annotations_count(&candidate, &forged, None, long, missing), counts);
    }
}

/// An older CRD hides the reservations. A write would erase them.
#[test]
fn blocks_that_count_reservations_and_show_none_are_neither_written_nor_deleted() {
    let mut network = Network::new(&["10.0.0.0/28"]);
    network.hold("10.0.0.0/30", HolderRef::claims(), None).used = 1;
    *network.hold("10.0.0.4/30", HolderRef::claims(), None) =
        IPBlockStatus { used: 1, claims: vec![claimed("10.0.0.5", "shown")], ..IPBlockStatus::default() };
    network.hold("10.0.0.8/30", HolderRef::claims(), None);
    network.idle = network.blocks.keys().cloned().collect();
    network.want("new");
    network.want("hidden").published = vec![net("10.0.0.1/28")];
    network.want("shown");
    let plan = network.plan();
    assert!(plan.is_empty(), "{plan:#?}");
    assert_eq!(failure(&plan, "new"), ("InternalError", allocate::CLAIMS_DROPPED.to_owned()));
    assert!(!plan.failed.contains_key("uid-hidden"), "its published address stays");
    assert_eq!(addresses(&plan, "shown"), ["10.0.0.5/28"]);

    // The CRD stores reservations again, so those of the block are lost: each claim gets back its own address.
    network.stores_claims = true;
    let plan = network.settle();
    assert_eq!(addresses(&plan, "hidden"), ["10.0.0.1/28"]);
    assert_ne!(addresses(&plan, "new"), ["10.0.0.1/28"]);
}

#[test]
fn a_block_of_another_network_or_of_a_node_is_not_taken_for_a_pruned_one() {
    let mut network = Network::new(&["10.0.0.0/28"]);
    network.hold("10.0.0.0/30", node(), None).used = 2;
    network.hold("10.0.0.4/30", HolderRef::claims(), None).used = 1;
    let other = ipblock::name("blue", net("10.0.0.4/30"));
    network.blocks.get_mut(&other).unwrap().object.spec.network_uid = "earlier".to_owned();
    network.want("a");
    assert_eq!(addresses(&network.settle(), "a").len(), 1);
}

/// That of a stopped machine, which requests what it has published.
#[test]
fn a_claim_that_requests_its_published_address_never_gets_another_one() {
    let mut network = Network::new(&["10.0.0.0/28"]);
    let wanted = network.want("stopped");
    wanted.published = vec![net("10.0.0.1/28")];
    wanted.requested = vec![ip("10.0.0.1")];
    assert_eq!(addresses(&network.settle(), "stopped"), ["10.0.0.1/28"]);

    network.blocks.clear();
    *network.hold("10.0.0.0/30", HolderRef::claims(), None) =
        IPBlockStatus { used: 1, claims: vec![claimed("10.0.0.1", "other")], ..IPBlockStatus::default() };
    let plan = network.settle();
    assert_eq!(failure(&plan, "stopped").0, "IPAddressConflict");
}
