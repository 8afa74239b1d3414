//! Which single addresses a holder borrows when no block is free, which holder it asks, and how long it waits for the
//! answer.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::{Duration, Instant},
};

use api::ipblock::{HolderRef, MAX_STATUS_ADDRESSES};

use super::{
    AcquireError, BlockGrid, BlockKey, BlockPlanInput, ExhaustedHint, Family, Ledger, ObservedIpBlock, Stage,
    ledger::next_address,
    limits::{BUSY_LENDER_TIMEOUT, CONTENTION_BACKOFF, LENDER_BACKOFF, LENDER_TIMEOUT, REFUSED_TTL},
};
use crate::bridge::Uid;

/// The borrow requests of a holder and how other holders answered earlier ones.
#[derive(Debug, Default)]
pub struct Borrowing {
    /// Addresses that were tried or refused, and until when they are not requested again.
    tried: BTreeMap<(Uid, IpAddr), Instant>,
    /// Since when this holder waits for the lender of a single address.
    waiting_since: BTreeMap<BlockKey, Instant>,
    /// Lenders that did not answer, by UID.
    silent: BTreeMap<Uid, SilentLender>,
    /// Networks whose last addresses several holders borrow at once.
    contended: BTreeMap<(Uid, Family), Contention>,
}

#[derive(Debug)]
struct SilentLender {
    holder: HolderRef,
    /// Until when this holder does not borrow from it.
    until: Instant,
    /// How long that is in total.
    backoff: Duration,
}

#[derive(Debug, Clone, Copy)]
struct Contention {
    until: Instant,
    /// The last wait, before jitter.
    pause: Duration,
}

/// A borrow request that waits for its lender.
#[derive(Debug, Clone, Copy)]
pub struct WaitingRequest<'a> {
    pub block: &'a BlockKey,
    /// The name of the network.
    pub network: &'a str,
    /// The UID of the IPBlock of the request, once it is seen.
    pub object: Option<&'a Uid>,
    /// The enclosing block, once it is read; it may have no holder.
    pub enclosing: Option<&'a ObservedIpBlock>,
    /// When the lender last changed it.
    pub last_update: Option<Instant>,
}

/// Why a borrow request fails.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BorrowFailure {
    pub error: AcquireError,
    /// Whether the holder abandons the request: the lender has not answered it.
    pub abandon: bool,
}

/// What a holder does after it sent its borrow requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BorrowOutcome {
    /// As many addresses are requested as are missing.
    Complete,
    /// Other holders request the same addresses: the holder lists again after a backoff.
    Contended,
    /// No address is left to request.
    Exhausted,
}

impl Borrowing {
    /// Backoffs outlive their wait for a while.
    pub fn expire(&mut self, now: Instant) {
        self.tried.retain(|_, until| *until > now);
        self.silent.retain(|_, one| one.until + LENDER_BACKOFF.longest > now);
        self.contended.retain(|_, one| one.until + CONTENTION_BACKOFF.longest > now);
    }

    /// Forgets requests that no longer wait.
    pub fn retain_requests(&mut self, waits: impl Fn(&BlockKey) -> bool) {
        self.waiting_since.retain(|block, _| waits(block));
    }

    /// Tries each address once per list, whatever the outcome.
    pub fn mark_tried(&mut self, network: &str, address: IpAddr, now: Instant) {
        self.tried.insert((network.to_owned(), address), now + REFUSED_TTL);
    }

    /// Whether an address was tried or refused a moment ago.
    pub fn is_tried(&self, network: &str, address: IpAddr) -> bool {
        self.tried.contains_key(&(network.to_owned(), address))
    }

    /// Records that the IPBlock of a request exists.
    pub fn mark_requested(&mut self, block: BlockKey, now: Instant) {
        self.waiting_since.insert(block, now);
    }

    /// Whether this holder backs off from other borrowers of the network.
    pub fn is_contended(&self, key: &(Uid, Family), now: Instant) -> bool {
        self.contended.get(key).is_some_and(|one| one.until > now)
    }

    /// An address to borrow, and its holder.
    pub fn candidate(
        &self,
        holder: &HolderRef,
        network: &str,
        grid: &BlockGrid,
        listed: &[ObservedIpBlock],
        (seed, now): (u64, Instant),
    ) -> Option<(IpAddr, HolderRef)> {
        let tried = self.tried.keys().filter(|(uid, _)| uid == network).map(|(_, address)| *address);
        let silent = self.silent.iter().filter(|(_, one)| one.until > now).map(|(uid, _)| uid.clone());
        let found = lending_candidate(listed, grid, holder, &tried.collect(), &silent.collect(), seed);
        found.map(|(address, object)| (address, object.spec.holder))
    }

    /// What to do after `requested` of `missing` addresses were requested. The seed spreads the backoffs of the holders.
    pub fn after_requests(
        &mut self,
        key: &(Uid, Family),
        (requested, missing): (usize, usize),
        ledger: &Ledger,
        (seed, now): (u64, Instant),
    ) -> BorrowOutcome {
        let (network, family) = key;
        if requested >= missing {
            self.contended.remove(key);
            return BorrowOutcome::Complete;
        }
        let incoming = ledger.holdings_of(network).any(|(block, holding)| {
            holding.stage == Stage::Acquiring && Family::of(block.range.addr()) == *family
        });
        let tried = self.tried.keys().any(|(uid, address)| uid == network && Family::of(*address) == *family);
        if !tried && !incoming {
            self.contended.remove(key);
            return BorrowOutcome::Exhausted;
        }
        let pause = CONTENTION_BACKOFF.after(self.contended.get(key).map(|one| one.pause));
        let spread = u32::try_from(seed % 100).unwrap_or(0);
        self.contended.insert(key.clone(), Contention { until: now + pause * (50 + spread) / 100, pause });
        BorrowOutcome::Contended
    }

    /// Who may have free addresses of an exhausted network: holders in `listed` that do not answer or do not lend.
    pub fn exhausted_hint(&self, listed: &[ObservedIpBlock], now: Instant) -> ExhaustedHint {
        let holders: BTreeSet<&Uid> = listed.iter().map(|one| &one.spec.holder.uid).collect();
        let mut silent = self.silent.iter().filter(|(uid, one)| one.until > now && holders.contains(uid));
        let mut others = listed.iter().map(|one| &one.spec.holder).filter(|holder| !holder.lends());
        ExhaustedHint {
            silent: silent.next().map(|(_, one)| Box::new(one.holder.clone())),
            other_holder: others.next().cloned(),
        }
    }

    /// Checks a request whose enclosing block is watched. Fails one that is refused or not answered in time.
    pub fn check(&mut self, request: WaitingRequest<'_>, now: Instant) -> Option<BorrowFailure> {
        let WaitingRequest { block, network, object, enclosing, last_update } = request;
        let since = *self.waiting_since.entry(block.clone()).or_insert(now);
        let (object, enclosing) = (object?, enclosing?);
        let address = block.range.addr();
        let granted = enclosing.status.lent.iter().any(|lent| lent.block == *object);
        let refused = enclosing.status.refused.contains(object);
        let silent = !granted && give_up_at(since, last_update) <= now;
        if !refused && !silent {
            return None;
        }
        let ttl = if refused { REFUSED_TTL } else { LENDER_TIMEOUT };
        self.tried.insert((block.network.clone(), address), now + ttl);
        let (network, holder) = (network.to_owned(), enclosing.spec.holder.clone());
        if silent {
            self.mark_silent(&holder, now);
        }
        let error = if refused {
            AcquireError::InUse { address, network, holder }
        } else {
            AcquireError::Silent { address, network, holder }
        };
        Some(BorrowFailure { error, abandon: silent })
    }

    /// One backoff step, however many requests the lender did not answer.
    fn mark_silent(&mut self, lender: &HolderRef, now: Instant) {
        let before = self.silent.get(&lender.uid);
        if before.is_none_or(|one| one.until <= now) {
            let backoff = LENDER_BACKOFF.after(before.map(|one| one.backoff));
            let one = SilentLender { holder: lender.clone(), until: now + backoff, backoff };
            self.silent.insert(lender.uid.clone(), one);
        }
    }

    /// When to look again at requests that wait, and when the backoffs of contended networks end.
    pub fn deadlines(&self) -> impl Iterator<Item = Instant> {
        let waiting =
            self.waiting_since.values().flat_map(|at| [*at + LENDER_TIMEOUT, *at + BUSY_LENDER_TIMEOUT]);
        waiting.chain(self.contended.values().map(|one| one.until))
    }
}

/// When a lender counts as silent. A lender that updates its block is busy and gets more time.
fn give_up_at(since: Instant, last_update: Option<Instant>) -> Instant {
    let last_update = last_update.map_or(since, |at| at.max(since));
    (last_update + LENDER_TIMEOUT).min(since + BUSY_LENDER_TIMEOUT)
}

/// How the lender answered a borrow request.
pub(super) enum LendingAnswer {
    Granted,
    Refused,
    Pending,
}

/// Whether the holder may use a block that it acquires. A whole block is granted by its IPBlock alone.
pub(super) fn lending_answer(
    input: BlockPlanInput<'_>,
    block: &BlockKey,
    object: &ObservedIpBlock,
) -> LendingAnswer {
    let Some(lender) = &object.spec.lender else { return LendingAnswer::Granted };
    let enclosing = match input.lenders.get(block) {
        None => return LendingAnswer::Pending,
        // The enclosing block has no holder now; the next attempt finds out who acquires it.
        Some(None) => return LendingAnswer::Refused,
        Some(Some(enclosing)) => enclosing,
    };
    if enclosing.spec.network_uid != block.network || enclosing.spec.holder.uid != lender.uid {
        return LendingAnswer::Refused;
    }
    let address = block.range.addr();
    if enclosing.status.lent.iter().any(|lent| lent.address == address && lent.block == object.uid) {
        return LendingAnswer::Granted;
    }
    if enclosing.status.refused.contains(&object.uid) {
        LendingAnswer::Refused
    } else {
        LendingAnswer::Pending
    }
}

/// The free addresses that the status of a block reports. Without a status, any address may be free.
fn spare_addresses(object: &ObservedIpBlock, grid: &BlockGrid) -> Vec<IpAddr> {
    let inside = |address: &IpAddr| object.spec.cidr.contains(address) && grid.contains(*address);
    spare_spans(object, grid).into_iter().flat_map(addresses_between).filter(inside).collect()
}

fn spare_spans(object: &ObservedIpBlock, grid: &BlockGrid) -> Vec<(IpAddr, IpAddr)> {
    let status = &object.status;
    if status.closed {
        return Vec::new();
    }
    if status.spare.is_empty() && status.used == 0 && status.free == 0 && status.lent.is_empty() {
        return grid.free_spans(object.spec.cidr, |_| false).collect();
    }
    let spans = status.spare.iter().filter_map(|text| {
        let (first, last) = text.split_once('-')?;
        Some((first.parse().ok()?, last.parse().ok()?))
    });
    spans.collect()
}

/// Whether the status of a block reports this address as free. Without a status, any address may be free.
pub(crate) fn is_spare(object: &ObservedIpBlock, grid: &BlockGrid, address: IpAddr) -> bool {
    spare_spans(object, grid).into_iter().any(|(first, last)| (first..=last).contains(&address))
}

/// The addresses of a range, at most as many as a block may list.
fn addresses_between((first, last): (IpAddr, IpAddr)) -> Vec<IpAddr> {
    let (mut all, mut address) = (Vec::new(), first);
    while address <= last && all.len() < MAX_STATUS_ADDRESSES {
        all.push(address);
        address = next_address(address);
    }
    all
}

/// An address to borrow and the block that it is in: a free address of another holder's block, chosen by the seed. Skips
/// refused addresses, holders that do not answer, and holders that lend no addresses.
pub fn lending_candidate(
    objects: &[ObservedIpBlock],
    grid: &BlockGrid,
    holder: &HolderRef,
    refused: &BTreeSet<IpAddr>,
    silent: &BTreeSet<Uid>,
    seed: u64,
) -> Option<(IpAddr, ObservedIpBlock)> {
    let whole = |object: &&ObservedIpBlock| object.spec.cidr.prefix_len() < object.spec.cidr.max_prefix_len();
    let singles: BTreeSet<IpAddr> =
        objects.iter().filter(|object| !whole(object)).map(|object| object.spec.cidr.addr()).collect();
    let reachable = |object: &&ObservedIpBlock| {
        let other = &object.spec.holder;
        other.lends() && other.uid != holder.uid && !silent.contains(&other.uid)
    };
    let others = objects.iter().filter(whole).filter(reachable);
    let mut all: Vec<(IpAddr, &ObservedIpBlock)> = Vec::new();
    for object in others.filter(|object| Family::of(object.spec.cidr.addr()) == grid.family()) {
        let free = spare_addresses(object, grid);
        let open =
            free.into_iter().filter(|address| !singles.contains(address) && !refused.contains(address));
        all.extend(open.map(|address| (address, object)));
    }
    let index = usize::try_from(seed % u64::try_from(all.len()).ok().filter(|count| *count > 0)?).ok()?;
    all.get(index).map(|(address, object)| (*address, (*object).clone()))
}

#[cfg(test)]
mod tests {
    use api::ipblock::LentAddress;

    use super::{
        super::{
            LedgerRecord,
            tests::{block, claims, grid, ip, ipam, me, not_lending, observed, other},
        },
        *,
    };

    fn key() -> (Uid, Family) {
        ("net".to_owned(), Family::V4)
    }

    fn check(
        borrowing: &mut Borrowing,
        enclosing: &ObservedIpBlock,
        last_update: Option<Instant>,
        now: Instant,
    ) -> Option<BorrowFailure> {
        let (block, object) = (block("10.0.0.3/32"), "request".to_owned());
        let request = WaitingRequest {
            block: &block,
            network: "blue",
            object: Some(&object),
            enclosing: Some(enclosing),
            last_update,
        };
        borrowing.check(request, now)
    }

    #[test]
    fn a_lender_that_does_not_answer_is_silent_after_three_seconds_and_a_busy_one_after_fifteen() {
        let (enclosing, start) = (observed("10.0.0.0/28", "1", other()), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut borrowing = Borrowing::default();
        borrowing.mark_requested(block("10.0.0.3/32"), start);
        assert_eq!(check(&mut borrowing, &enclosing, None, at(2)), None);
        assert_eq!(check(&mut borrowing, &enclosing, Some(at(2)), at(4)), None, "it is busy");
        assert_eq!(check(&mut borrowing, &enclosing, Some(at(14)), at(14)), None);
        let failure = check(&mut borrowing, &enclosing, Some(at(14)), at(15)).unwrap();
        assert!(failure.abandon);
        assert_eq!(
            failure.error.to_string(),
            "node b holds the block of address 10.0.0.3 of network \"blue\" and does not answer: check the node, or delete its \
            Node if it is gone for good"
        );
        let mut borrowing = Borrowing::default();
        assert_eq!(check(&mut borrowing, &enclosing, None, start), None, "the first check starts the wait");
        assert!(check(&mut borrowing, &enclosing, None, at(3)).unwrap().abandon);
        assert!(borrowing.is_tried("net", ip("10.0.0.3")));
    }

    #[test]
    fn a_refusal_fails_at_once_and_a_grant_never() {
        let (mut enclosing, start) = (observed("10.0.0.0/28", "1", other()), Instant::now());
        let mut borrowing = Borrowing::default();
        enclosing.status.refused = vec!["request".to_owned()];
        let failure = check(&mut borrowing, &enclosing, None, start).unwrap();
        assert!(!failure.abandon, "the planner abandons it");
        assert_eq!(failure.error.to_string(), "address 10.0.0.3 of network \"blue\" is in use on node b");
        borrowing.expire(start + REFUSED_TTL);
        assert!(!borrowing.is_tried("net", ip("10.0.0.3")));
        enclosing.status.refused.clear();
        enclosing.status.lent = vec![LentAddress { address: ip("10.0.0.3"), block: "request".to_owned() }];
        assert_eq!(check(&mut borrowing, &enclosing, None, start + Duration::from_secs(60)), None);
        borrowing.retain_requests(|_| false);
        assert_eq!(borrowing.deadlines().count(), 0);
    }

    #[test]
    fn a_silent_lender_is_not_asked_until_its_backoff_ends_and_the_backoff_doubles() {
        let listed = [observed("10.0.0.0/28", "1", other())];
        let grid = grid(&ipam(&["10.0.0.0/24"], &[], &[]));
        let (mut borrowing, start) = (Borrowing::default(), Instant::now());
        let asks = |borrowing: &Borrowing, now| {
            borrowing.candidate(&me(), "net", &grid, &listed, (7, now)).map(|(_, lender)| lender)
        };
        assert_eq!(asks(&borrowing, start), Some(other()));
        let mut now = start;
        for wait in [5, 10, 20, 40, 60, 60].map(Duration::from_secs) {
            borrowing.mark_silent(&other(), now);
            borrowing.mark_silent(&other(), now);
            let last = now + wait.saturating_sub(Duration::from_millis(1));
            assert_eq!(asks(&borrowing, last), None, "{wait:?}");
            assert_eq!(borrowing.exhausted_hint(&listed, last).silent.as_deref(), Some(&other()));
            now += wait;
            assert_eq!(asks(&borrowing, now), Some(other()), "{wait:?}");
        }
        assert_eq!(borrowing.exhausted_hint(&listed, now), ExhaustedHint::default());
        borrowing.expire(now + LENDER_BACKOFF.longest);
        borrowing.mark_silent(&other(), now);
        assert_eq!(asks(&borrowing, now + LENDER_BACKOFF.first), Some(other()), "it is forgotten");
    }

    #[test]
    fn a_holder_that_does_not_lend_is_not_asked_and_is_named_when_the_network_is_exhausted() {
        let listed = [observed("10.0.0.0/28", "1", not_lending())];
        let grid = grid(&ipam(&["10.0.0.0/24"], &[], &[]));
        let (borrowing, now) = (Borrowing::default(), Instant::now());
        assert_eq!(borrowing.candidate(&me(), "net", &grid, &listed, (7, now)), None);
        let hint = borrowing.exhausted_hint(&listed, now);
        assert_eq!(hint.other_holder, Some(not_lending()));
        let error = AcquireError::Exhausted { network: "blue".to_owned(), family: Family::V4, hint };
        assert_eq!(
            error.to_string(),
            "network \"blue\" has no free IPv4 address left: add a subnet to spec.ipam.subnets of the BridgeNetwork, or delete \
            pods that use it; other/holder holds blocks of the network and lends no addresses"
        );
        // It can itself borrow from a node.
        let listed = [observed("10.0.0.0/28", "1", other())];
        let found = borrowing.candidate(&not_lending(), "net", &grid, &listed, (7, now));
        assert_eq!(found.map(|(_, lender)| lender), Some(other()));
    }

    #[test]
    fn the_holder_of_claims_borrows_and_lends() {
        let grid = grid(&ipam(&["10.0.0.0/24"], &[], &[]));
        let (mut borrowing, now) = (Borrowing::default(), Instant::now());
        for (borrower, lender) in [(me(), claims()), (claims(), other())] {
            let listed = [observed("10.0.0.0/28", "1", lender.clone())];
            let found = borrowing.candidate(&borrower, "net", &grid, &listed, (7, now));
            assert_eq!(found.map(|(_, holder)| holder), Some(lender));
        }
        let listed = [observed("10.0.0.0/28", "1", claims())];
        assert_eq!(borrowing.candidate(&claims(), "net", &grid, &listed, (7, now)), None, "not from itself");
        assert_eq!(borrowing.exhausted_hint(&listed, now), ExhaustedHint::default());
        let at = |seconds| now + Duration::from_secs(seconds);
        assert_eq!(check(&mut borrowing, &listed[0], None, now), None);
        let failure = check(&mut borrowing, &listed[0], None, at(3)).unwrap();
        assert_eq!(
            failure.error.to_string(),
            "ipamclaims/patchbay holds the block of address 10.0.0.3 of network \"blue\" and does not answer: check that the \
            patchbay controller runs"
        );
        let hint = borrowing.exhausted_hint(&listed, at(4)).to_string();
        assert_eq!(
            hint,
            "; ipamclaims/patchbay may have free addresses and does not answer: check that the patchbay controller runs"
        );
    }

    #[test]
    fn borrowers_of_the_last_addresses_back_off_with_jitter() {
        let (mut borrowing, now, ledger) = (Borrowing::default(), Instant::now(), Ledger::default());
        let after = |borrowing: &mut Borrowing, counts, seed| {
            borrowing.after_requests(&key(), counts, &ledger, (seed, now))
        };
        assert_eq!(after(&mut borrowing, (0, 1), 0), BorrowOutcome::Exhausted, "nothing was tried");
        borrowing.mark_tried("net", ip("10.0.0.3"), now);
        assert_eq!(after(&mut borrowing, (0, 1), 0), BorrowOutcome::Contended);
        assert!(borrowing.is_contended(&key(), now + Duration::from_millis(49)));
        assert!(!borrowing.is_contended(&key(), now + Duration::from_millis(50)));
        assert_eq!(after(&mut borrowing, (0, 1), 99), BorrowOutcome::Contended);
        assert!(borrowing.is_contended(&key(), now + Duration::from_millis(297)), "twice 100 ms, 149 %");
        assert!(!borrowing.is_contended(&key(), now + Duration::from_millis(298)));
        assert_eq!(after(&mut borrowing, (1, 1), 0), BorrowOutcome::Complete);
        assert!(!borrowing.is_contended(&key(), now));
        // A request that is under way counts too.
        borrowing.expire(now + REFUSED_TTL);
        let mut ledger = Ledger::default();
        ledger.apply(&LedgerRecord::Acquiring { block: block("10.0.0.3/32"), network: "blue".to_owned() });
        let outcome = borrowing.after_requests(&key(), (0, 1), &ledger, (0, now));
        assert_eq!(outcome, BorrowOutcome::Contended);
    }
}
