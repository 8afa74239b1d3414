//! What a node reports about its leases: whether pods still have addresses of a network that is being deleted, and which
//! addresses of IPAMClaims they have.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use api::{
    ClaimAddresses, ClosedNetwork,
    nodenetwork::{MAX_ADDRESS_USERS, MAX_CLAIM_ADDRESSES, MAX_NETWORKS},
};

use super::{Lease, Ledger, PodRef, Stage};
use crate::bridge::Uid;

/// The length of a namespace, a slash and the name of a pod.
const MAX_POD_NAME: usize = 63 + 1 + 253;

/// The leases of a node, as its NodeNetwork lists them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LeaseReport {
    pub closed: Vec<ClosedNetwork>,
    /// None if the ledger may not know all of them, or if there are too many to list. Annotations of pods count then.
    pub claims: Option<Vec<ClaimAddresses>>,
}

impl LeaseReport {
    /// Whether an interface still has an address of a closed network.
    pub fn is_waiting(&self) -> bool {
        !self.closed.iter().all(ClosedNetwork::is_unused)
    }
}

impl Ledger {
    /// The report about all leases. `closed` are the names of the networks of which the node allocates no more addresses, by
    /// UID. It is empty while the node may hold blocks that the ledger does not know.
    pub fn report(&self, closed: &BTreeMap<Uid, String>) -> LeaseReport {
        if !self.is_complete() {
            return LeaseReport::default();
        }
        let mut users: BTreeMap<&str, Vec<&Lease>> = BTreeMap::new();
        if !closed.is_empty() {
            for lease in self.leases().values().filter(|lease| closed.contains_key(&lease.network)) {
                users.entry(&lease.network).or_default().push(lease);
            }
        }
        let entry = |(uid, name): (&Uid, &String)| {
            let leases = users.get(uid.as_str()).map_or(&[][..], Vec::as_slice);
            let pods: BTreeSet<String> = leases.iter().map(|lease| pod_name(&lease.pod)).collect();
            let unverified = self.holdings_of(uid).filter(|(_, one)| one.stage == Stage::Unverified);
            ClosedNetwork {
                uid: uid.clone(),
                name: name.clone(),
                interfaces: count(leases.len()),
                pods: pods.into_iter().take(MAX_ADDRESS_USERS).collect(),
                unverified_blocks: count(unverified.count()),
            }
        };
        // Networks in use come first: they are what an administrator looks for, and an unused one beyond the limit follows
        // when others are gone.
        let mut all: Vec<ClosedNetwork> = closed.iter().map(entry).collect();
        all.sort_by_cached_key(|one| (one.is_unused(), one.uid.clone()));
        all.truncate(MAX_NETWORKS);
        all.sort_by(|one, other| one.uid.cmp(&other.uid));
        LeaseReport { closed: all, claims: self.claim_addresses() }
    }

    fn claim_addresses(&self) -> Option<Vec<ClaimAddresses>> {
        if self.may_lack_claims() {
            return None;
        }
        let listed =
            |(uid, addresses): (&Uid, Vec<IpAddr>)| ClaimAddresses { network_uid: uid.clone(), addresses };
        let networks: Vec<ClaimAddresses> = self.claimed().by_network().map(listed).collect();
        let fits = networks.len() <= MAX_NETWORKS
            && networks.iter().all(|network| network.addresses.len() <= MAX_CLAIM_ADDRESSES);
        fits.then_some(networks)
    }
}

/// The name of a pod, within the limits of the schema: a call by hand can name any pod.
fn pod_name(pod: &PodRef) -> String {
    format!("{}/{}", pod.namespace, pod.name).chars().take(MAX_POD_NAME).collect()
}

fn count(number: usize) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests {
    use super::{super::tests::*, *};
    use crate::ipam::{AttachmentKey, BlockKey, Grant, LeaseClaim, LedgerRecord};

    fn key(container: &str) -> AttachmentKey {
        AttachmentKey { container: container.to_owned(), interface: "net1".to_owned() }
    }

    fn leased(container: &str, address: &str, claim: Option<&str>) -> LedgerRecord {
        let claim = claim.map(|name| LeaseClaim {
            uid: format!("uid-{name}"),
            name: name.to_owned(),
            shared: false,
            netns: String::new(),
        });
        let pod =
            PodRef { namespace: "ns".to_owned(), name: container.to_owned(), uid: container.to_owned() };
        let lease = Lease {
            key: key(container),
            pod,
            network: "net".to_owned(),
            config: "lan".to_owned(),
            boot: String::new(),
            since: 0,
            addresses: vec![ip(address)],
            claim,
        };
        LedgerRecord::Leased(Grant { lease, infos: Vec::new() })
    }

    fn closed() -> BTreeMap<Uid, String> {
        BTreeMap::from([("net".to_owned(), "blue".to_owned())])
    }

    #[test]
    fn a_closed_network_is_reported_with_every_interface_that_has_an_address_of_it() {
        let mut ledger = Ledger::default();
        for record in [leased("a", "10.0.0.1", None), leased("b", "10.0.0.2", Some("vm"))] {
            ledger.apply(&record);
        }
        let report = ledger.report(&closed());
        let expected = ClosedNetwork {
            uid: "net".to_owned(),
            name: "blue".to_owned(),
            interfaces: 2,
            pods: vec!["ns/a".to_owned(), "ns/b".to_owned()],
            unverified_blocks: 0,
        };
        assert_eq!(report.closed, [expected]);
        assert!(report.is_waiting());
        for container in ["a", "b"] {
            ledger.apply(&LedgerRecord::Freed(key(container)));
        }
        let report = ledger.report(&closed());
        assert!(report.closed[0].is_unused() && !report.is_waiting());
        assert_eq!(ledger.report(&BTreeMap::new()).closed, []);
    }

    #[test]
    fn an_unverified_block_of_a_closed_network_counts_as_used() {
        let mut ledger = Ledger::default();
        let unverified = |range: &str| LedgerRecord::Unverified {
            block: block(range),
            network: "blue".to_owned(),
            object: "object".to_owned(),
        };
        ledger.apply(&unverified("10.0.0.0/28"));
        let report = ledger.report(&closed());
        assert_eq!((report.closed[0].interfaces, report.closed[0].unverified_blocks), (0, 1));
        assert!(report.is_waiting());
        let block = BlockKey { network: "other".to_owned(), ..block("10.0.0.16/28") };
        ledger.apply(&LedgerRecord::Dropped { block: self::block("10.0.0.0/28") });
        ledger.apply(&LedgerRecord::Unverified { block, network: "b".to_owned(), object: "o".to_owned() });
        assert!(!ledger.report(&closed()).is_waiting(), "it is of another network");
    }

    #[test]
    fn nothing_is_reported_while_the_node_may_hold_unknown_blocks() {
        let mut ledger = Ledger::default();
        ledger.apply(&LedgerRecord::Incomplete);
        assert_eq!(ledger.report(&closed()), LeaseReport::default());
        ledger.apply(&LedgerRecord::Complete);
        assert!(ledger.report(&closed()).claims.is_some());
    }

    #[test]
    fn addresses_of_claims_are_reported_until_the_last_interface_is_gone() {
        let mut ledger = Ledger::default();
        for container in ["source", "target"] {
            ledger.apply(&leased(container, "10.0.0.2", Some("vm")));
        }
        ledger.apply(&leased("pod", "10.0.0.1", None));
        let claims = |ledger: &Ledger| ledger.report(&BTreeMap::new()).claims.unwrap();
        let expected = ClaimAddresses { network_uid: "net".to_owned(), addresses: vec![ip("10.0.0.2")] };
        assert_eq!(claims(&ledger), std::slice::from_ref(&expected));
        ledger.apply(&LedgerRecord::Freed(key("source")));
        assert_eq!(claims(&ledger), [expected]);
        ledger.apply(&LedgerRecord::Freed(key("target")));
        assert_eq!(claims(&ledger), []);
    }

    /// A damaged journal may lack a lease of a claim, which no block of the node shows.
    #[test]
    fn a_damaged_journal_reports_no_claims_until_the_machine_boots() {
        let mut ledger = Ledger::default();
        let claims = |ledger: &Ledger| ledger.report(&BTreeMap::new()).claims;
        ledger.apply(&LedgerRecord::Booted("one".to_owned()));
        assert!(claims(&ledger).is_some());
        ledger.apply(&LedgerRecord::Booted(String::new()));
        ledger.apply(&LedgerRecord::Booted("one".to_owned()));
        assert_eq!(claims(&ledger), None);
        let mut compacted = Ledger::default();
        ledger.records().for_each(|record| compacted.apply(&record));
        assert_eq!(compacted, ledger);
        compacted.apply(&LedgerRecord::Booted("two".to_owned()));
        assert_eq!(claims(&compacted), Some(Vec::new()));
    }

    #[test]
    fn claims_beyond_the_limit_are_not_reported_at_all() {
        let mut ledger = Ledger::default();
        for number in 0..=MAX_CLAIM_ADDRESSES {
            let address = format!("10.0.{}.{}", number / 256, number % 256);
            ledger.apply(&leased(&number.to_string(), &address, Some("vm")));
        }
        assert_eq!(ledger.report(&BTreeMap::new()).claims, None);
    }
}
