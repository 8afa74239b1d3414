//! One reconcile of the addresses of a network: reserves them in IPBlocks, then publishes them in the claims.

mod blocks;
mod publish;
mod release;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use api::{ErrorChain, ipamclaim::AllocationReason, ipblock};
use client::{fence::now, request};
use jiff::Timestamp;
use plan::{
    claims::{
        AllocatorInput, AllocatorPlan, ClaimPod, ClaimState, Failure, Wanted,
        allocate::{self, CLAIMS_DROPPED},
    },
    ipam::{BlockKey, Family, Pool, Timings, limits::LENDER_TIMEOUT},
    network::{BlockState, NetworkState},
};
use tracing::{debug, warn};

use super::{
    ClaimWorkers, Next, failed,
    records::{NetworkRecord, track},
};

/// Plans that follow each other in one reconcile: acquire a block, reserve in it, publish.
const MAX_ROUNDS: usize = 8;
/// The delay before a plan on what another writer wrote.
const CONFLICT_RETRY: Duration = Duration::from_millis(50);

/// The claims of a network and its blocks, with own writes.
struct NetworkInput {
    network: String,
    uid: Arc<str>,
    pool: Pool,
    blocks: BTreeMap<String, BlockState>,
    wanted: Vec<Wanted>,
    claims: Vec<(Arc<ClaimState>, Vec<Arc<ClaimPod>>)>,
}

/// Whether another plan follows at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Round {
    Done,
    Again,
    Conflict,
}

/// The addresses of a network. None while its block lengths are not known, or its spec cannot be read. A network without
/// spec.ipam offers none, but reservations in its blocks are still released.
fn pool(network: &NetworkState) -> Option<Pool> {
    let ipam = network.spec.as_ref().ok()?.ipam.clone().unwrap_or_default();
    let status = network.status.ipam.clone().unwrap_or_default();
    let length = |family| match family {
        Family::V4 => status.ipv4.as_ref().map(|family| family.block_length),
        Family::V6 => status.ipv6.as_ref().map(|family| family.block_length),
    };
    let pool = Pool::new(&network.name, &ipam, length, network.deleting.is_none());
    // A claim gets an address of every family, or none.
    let has = |v6: bool| ipam.subnets.iter().any(|subnet| subnet.addr().is_ipv6() == v6);
    let known = |family: Family, v6: bool| !has(v6) || pool.grid(family).is_some();
    (known(Family::V4, false) && known(Family::V6, true)).then_some(pool)
}

impl ClaimWorkers {
    pub(super) async fn network(&self, uid: &Arc<str>, record: &mut NetworkRecord) -> Next {
        record.prune(now());
        let mut releasable = None;
        for _ in 0..MAX_ROUNDS {
            let Some(input) = self.network_input(uid, record) else {
                self.cache.claims().set_waiting(uid, false);
                return Next::ON_CHANGE;
            };
            let (confirmed, release_after) = match &releasable {
                Some(known) => known,
                None => releasable.insert(self.releasable(&input, record).await),
            };
            let (round, next) = self.plan_network(&input, confirmed, record).await;
            let next = next.or_after(*release_after);
            match round {
                Ok(Round::Again) => {}
                Ok(Round::Done) => {
                    record.succeeded();
                    return next;
                }
                Ok(Round::Conflict) => return next.or_after(Some(CONFLICT_RETRY)),
                Err(error) => {
                    let error = ErrorChain(&error);
                    warn!(network = input.network, %error, "could not write the addresses of IPAMClaims, retrying");
                    record.failed();
                    return failed(&mut record.retry);
                }
            }
        }
        Next::after(CONFLICT_RETRY)
    }

    /// What a plan reads. None if the network does not exist, or is not ready to be allocated from.
    fn network_input(&self, uid: &Arc<str>, record: &mut NetworkRecord) -> Option<NetworkInput> {
        let state = self.cache.snapshot();
        let network = state.networks.values().find(|network| *network.uid == **uid)?;
        let pool = pool(network)?;
        let snapshot = self.cache.claims().network(uid);
        let mut wanted = snapshot.wanted;
        let mut claims = snapshot.claims;
        for (wanted, (claim, _)) in wanted.iter_mut().zip(&mut claims) {
            *claim = record.overlay.claim(claim, now());
            wanted.published = claim.published();
        }
        record.overlay.retain_claims(|uid| wanted.iter().any(|wanted| wanted.uid == uid));
        let blocks = record.overlay.blocks(&state, &network.name, now());
        Some(NetworkInput {
            network: network.name.clone(),
            uid: Arc::clone(uid),
            pool,
            blocks,
            wanted,
            claims,
        })
    }

    /// Plans once, publishes what is reserved, and applies the plan.
    async fn plan_network(
        &self,
        input: &NetworkInput,
        releasable: &BTreeSet<(String, std::net::IpAddr)>,
        record: &mut NetworkRecord,
    ) -> (Result<Round, request::Error>, Next) {
        let stores_claims = match self.stores_claims(input, record).await {
            Ok(stores_claims) => stores_claims,
            Err(error) => return (Err(error), Next::ON_CHANGE),
        };
        let started = now();
        let unused = allocate::unused(&input.blocks).map(|(name, _)| name.clone());
        track(&mut record.idle_since, started, unused);
        let timings = Timings::default();
        let idle_for = |name: &String| {
            let spec = input.blocks.get(name).map(|block| &block.object.spec)?;
            let key = BlockKey { network: spec.network_uid.clone(), range: spec.cidr };
            Some(timings.idle_time(&key))
        };
        let mut idle = BTreeSet::new();
        let mut next = Next::ON_CHANGE;
        for (name, since) in &record.idle_since {
            let Some(limit) = idle_for(name) else { continue };
            match (*since + limit).checked_duration_since(started).filter(|rest| !rest.is_zero()) {
                Some(rest) => next = next.or_after(Some(rest)),
                None => _ = idle.insert(name.clone()),
            }
        }
        next = next.or_after(expire_requests(input, record, started));
        let (silent, tried, seed) = (record.silent(started), record.tried(), seed());
        let allocate = |blocks: &BTreeMap<String, BlockState>| {
            allocate::plan(AllocatorInput {
                network: &input.network,
                uid: &input.uid,
                pool: &input.pool,
                blocks,
                wanted: &input.wanted,
                releasable,
                nodes_silent: &silent,
                tried: &tried,
                idle: &idle,
                stores_claims,
                seed,
            })
        };
        let plan = allocate(&input.blocks);
        track(
            &mut record.asked_since,
            started,
            plan.waits.iter().map(|key| ipblock::name(&input.network, key.range)),
        );
        next = next.or_after(expire_requests(input, record, started));
        if record.dropped_until.is_some() {
            next = next.or_after(record.next_expiry(started));
        }
        let waiting = input.wanted.iter().any(|wanted| !plan.reserved.contains_key(&wanted.uid));
        self.cache.claims().set_waiting(&input.uid, waiting);
        if waiting {
            next = next.or_after(record.next_expiry(started));
        }
        (self.apply_network(input, plan, &allocate, record).await, next)
    }

    async fn apply_network(
        &self,
        input: &NetworkInput,
        mut plan: AllocatorPlan,
        allocate: &(dyn Fn(&BTreeMap<String, BlockState>) -> AllocatorPlan + Sync),
        record: &mut NetworkRecord,
    ) -> Result<Round, request::Error> {
        if record.dropped_until.is_some() {
            suspend(&mut plan, &input.wanted);
        }
        // A claim whose status cannot be written, for example because a policy denies it, stops no other claim.
        let published = self.publish(input, &plan, allocate, record).await;
        let applied = match self.apply_blocks(input, &plan, record).await {
            Err(error) if error.is_rejection() => {
                let message = format!(
                    "the API server rejected an IPBlock of network {:?}: {}; retrying",
                    input.network,
                    ErrorChain(&error)
                );
                let waiting =
                    input.claims.iter().filter(|(claim, _)| !plan.reserved.contains_key(&claim.uid));
                self.publish_failure_to(waiting, &message, record).await?;
                return Err(error);
            }
            applied => applied?,
        };
        Ok(match (published?, applied) {
            (Round::Conflict, _) | (_, Round::Conflict) => Round::Conflict,
            (_, Round::Again) => Round::Again,
            _ => Round::Done,
        })
    }
}

/// Writes nothing while the API server drops reservations. A claim that has published addresses keeps them.
fn suspend(plan: &mut AllocatorPlan, wanted: &[Wanted]) {
    let failure = Failure { reason: AllocationReason::InternalError, message: CLAIMS_DROPPED.to_owned() };
    for wanted in wanted.iter().filter(|wanted| !plan.reserved.contains_key(&wanted.uid)) {
        if wanted.published.is_empty() {
            plan.failed.insert(wanted.uid.clone(), failure.clone());
        } else {
            plan.failed.remove(&wanted.uid);
        }
    }
    plan.writes.clear();
    plan.creates.clear();
    plan.deletes.clear();
}

/// Records the lenders that did not answer in time. Returns when the next one will not have.
fn expire_requests(input: &NetworkInput, record: &mut NetworkRecord, now: Instant) -> Option<Duration> {
    let mut next = None;
    for (name, since) in record.asked_since.clone() {
        let rest = (since + LENDER_TIMEOUT).saturating_duration_since(now);
        if rest.is_zero() {
            record.asked_since.remove(&name);
            if let Some(lender) = input.blocks.get(&name).and_then(|block| block.object.spec.lender.as_ref())
            {
                debug!(block = name, lender = lender.node, "a lender did not answer in time");
                record.lender_silent(&lender.uid, now);
            }
        } else {
            next = Some(next.map_or(rest, |next: Duration| next.min(rest)));
        }
    }
    next
}

/// Another number each time.
fn seed() -> u64 {
    let nanos = Timestamp::now().as_nanosecond();
    u64::try_from(nanos.rem_euclid(i128::from(u64::MAX))).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use plan::claims::{
        ObjectKey, Reserved,
        allocate::{BlockCreate, BlockDelete, BlockDeleteReason, BlockWrite},
    };

    use super::*;

    fn wanted(name: &str, published: &[&str]) -> Wanted {
        Wanted {
            claim: ObjectKey::new("ns", name),
            uid: name.to_owned(),
            requested: Vec::new(),
            published: published.iter().map(|text| text.parse().unwrap()).collect(),
            shown: Vec::new(),
            created: Timestamp::UNIX_EPOCH,
        }
    }

    /// The API server hides reservations, so a block that seems to be unused may have some.
    #[test]
    fn nothing_is_written_or_deleted_while_reservations_are_dropped() {
        let (name, uid, version) = ("b".to_owned(), "u".to_owned(), "1".to_owned());
        let conflict = Failure { reason: AllocationReason::IpAddressConflict, message: "taken".to_owned() };
        let mut plan = AllocatorPlan {
            writes: vec![BlockWrite {
                name: name.clone(),
                uid: uid.clone(),
                version: version.clone(),
                status: api::IPBlockStatus::default(),
                confirm: Vec::new(),
            }],
            creates: vec![BlockCreate { range: IpAddr::from([10, 0, 0, 1]).into(), lender: None }],
            deletes: vec![BlockDelete { name, uid, version, why: BlockDeleteReason::Idle }],
            reserved: [(
                "kept".to_owned(),
                Reserved { infos: Vec::new(), blocks: Vec::new(), outside: Vec::new() },
            )]
            .into(),
            failed: [("hidden".to_owned(), conflict)].into(),
            ..AllocatorPlan::default()
        };
        let all = [wanted("kept", &["10.0.0.3/24"]), wanted("hidden", &["10.0.0.4/24"]), wanted("new", &[])];
        suspend(&mut plan, &all);
        assert!(plan.is_empty(), "{plan:?}");
        let failed: Vec<_> =
            plan.failed.iter().map(|(uid, it)| (uid.as_str(), it.message.as_str())).collect();
        assert_eq!(failed, [("new", CLAIMS_DROPPED)], "published addresses stay");
    }
}
