//! Reserves addresses for the claims of one network.
//!
//! The plan is a function of the given blocks. A write replaces the status of one block and is valid only for the
//! resourceVersion that the plan was made from, so two controllers cannot reserve one address twice.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    net::IpAddr,
};

use api::{
    IPBlockStatus,
    ipamclaim::AllocationReason,
    ipblock::{ClaimedAddress, HolderRef},
};
use ipnet::IpNet;
use jiff::Timestamp;

use super::{
    ObjectKey,
    lend::{self, LenderAnswer, OwnBlock},
};
use crate::{
    bridge::Uid,
    ipam::{AddressInfo, BlockGrid, BlockKey, Family, ObservedIpBlock, Pool},
    network::BlockState,
};

/// The message of claims that cannot be reserved because the API server does not store reservations.
pub const CLAIMS_DROPPED: &str = "the CRD of IPBlock drops status.claims; apply the CRDs of this version";

/// A claim that gets addresses from the network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    pub claim: ObjectKey,
    pub uid: Uid,
    pub requested: Vec<IpAddr>,
    /// The addresses of `status.ips`.
    pub published: Vec<IpNet>,
    /// The addresses that network-status of the claim's own pods shows: see [`shown`](super::shown).
    pub shown: Vec<IpAddr>,
    pub created: Timestamp,
}

/// What [`plan`] decides from.
#[derive(Debug, Clone, Copy)]
pub struct AllocatorInput<'a> {
    /// The name of the network.
    pub network: &'a str,
    /// The UID of the network.
    pub uid: &'a str,
    /// With all families of `spec.ipam`: a claim gets all its addresses at once, so take the length of blocks from
    /// [`Family::block_length`](crate::ipam::Family::block_length) until the status has it.
    pub pool: &'a Pool,
    /// All IPBlocks of the network, by name, from one list or watch. Blocks of an earlier network of the name are included:
    /// they occupy their names.
    pub blocks: &'a BTreeMap<String, BlockState>,
    pub wanted: &'a [Wanted],
    /// The reservations that live reads confirmed to be releasable, by claim UID and address: see [`release`](super::release).
    pub releasable: &'a BTreeSet<(Uid, IpAddr)>,
    /// The UIDs of nodes that did not answer a request to borrow.
    pub nodes_silent: &'a BTreeSet<Uid>,
    /// Addresses that were tried or refused a moment ago.
    pub tried: &'a BTreeSet<IpAddr>,
    /// The names of own blocks that have been unused for long enough: see [`unused`] and
    /// [`Timings::idle_time`](crate::ipam::Timings::idle_time).
    pub idle: &'a BTreeSet<String>,
    /// Whether a dry run showed that the API server stores `status.claims`. Only then have [`pruned`] blocks lost their
    /// reservations; else the API server may hide them, and the plan writes nothing.
    pub stores_claims: bool,
    /// Spreads new blocks and borrow requests.
    pub seed: u64,
}

/// What to write for the claims of a network, in this order: writes, creates, deletes. Then plan again: a claim is
/// published only when the blocks show its reservation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AllocatorPlan {
    pub writes: Vec<BlockWrite>,
    pub creates: Vec<BlockCreate>,
    pub deletes: Vec<BlockDelete>,
    /// The claims whose addresses are all reserved in the given blocks, by UID.
    pub reserved: BTreeMap<Uid, Reserved>,
    /// The claims that cannot get addresses now, by UID. Plan again soon if a wanted claim is neither here nor reserved.
    pub failed: BTreeMap<Uid, Failure>,
    /// The borrowed addresses whose lender has not answered.
    pub waits: Vec<BlockKey>,
}

impl AllocatorPlan {
    /// Whether there is nothing to write.
    pub fn is_empty(&self) -> bool {
        self.writes.is_empty() && self.creates.is_empty() && self.deletes.is_empty()
    }
}

/// A new status of an own block, for exactly this version of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockWrite {
    pub name: String,
    pub uid: Uid,
    pub version: String,
    pub status: IPBlockStatus,
    /// The claims that get the reservation of an earlier claim of their name. A live read must find each with this UID
    /// before the write.
    pub confirm: Vec<(ObjectKey, Uid)>,
}

/// A block to create for the holder `ipamclaims/patchbay`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockCreate {
    pub range: IpNet,
    /// The holder of the enclosing block, if the range is one borrowed address.
    pub lender: Option<HolderRef>,
}

/// An own block to delete, for exactly this version of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockDelete {
    pub name: String,
    pub uid: Uid,
    pub version: String,
    pub why: BlockDeleteReason,
}

/// Why an own block is deleted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BlockDeleteReason {
    /// It has been unused for long enough.
    Idle,
    /// The lender refused the address, or does not hold it any more.
    Refused { address: IpAddr },
    /// The lender did not answer in time.
    Silent { address: IpAddr, lender: Uid },
}

/// The addresses of a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reserved {
    /// One per family, IPv4 first.
    pub infos: Vec<AddressInfo>,
    /// The names of the IPBlocks that have the reservations, in the same order.
    pub blocks: Vec<String>,
    /// The addresses that no subnet of the network has now. The claim keeps them.
    pub outside: Vec<IpAddr>,
}

/// Why a claim gets no addresses now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    pub reason: AllocationReason,
    pub message: String,
}

/// The reservations in the blocks of the holder `ipamclaims/patchbay`, by the UID of the claim: each address with the name
/// of its block.
pub fn reservations(blocks: &BTreeMap<String, BlockState>) -> BTreeMap<Uid, Vec<(IpAddr, String)>> {
    let mut all: BTreeMap<Uid, Vec<(IpAddr, String)>> = BTreeMap::new();
    for (name, block) in blocks.iter().filter(|(_, block)| block.object.spec.holder.is_claims()) {
        for claimed in &block.object.status.claims {
            all.entry(claimed.uid.clone()).or_default().push((claimed.address, name.clone()));
        }
    }
    all
}

/// The own blocks of a network that count reservations and have none, by name. The CRD of an older version makes the API
/// server hide `status.claims`: the stored object has them until the next write.
pub fn pruned<'a>(
    network_uid: &'a str,
    blocks: &'a BTreeMap<String, BlockState>,
) -> impl Iterator<Item = (&'a String, &'a BlockState)> {
    blocks.iter().filter(move |(_, block)| {
        let ObservedIpBlock { spec, status, .. } = &block.object;
        let is_own = spec.holder.is_claims() && spec.network_uid == network_uid;
        is_own && status.used > 0 && status.claims.is_empty()
    })
}

/// The own blocks that have no reservation and lend nothing, by name. The caller measures how long each has been unused.
pub fn unused(blocks: &BTreeMap<String, BlockState>) -> impl Iterator<Item = (&String, &BlockState)> {
    blocks.iter().filter(|(_, block)| {
        let status = &block.object.status;
        block.object.spec.holder.is_claims() && status.claims.is_empty() && status.lent.is_empty()
    })
}

/// Plans the next writes for the claims of a network.
pub fn plan(input: AllocatorInput<'_>) -> AllocatorPlan {
    let mut allocation = Allocation::new(input);
    allocation.release();
    if !input.stores_claims && pruned(input.uid, input.blocks).next().is_some() {
        return allocation.suspended();
    }
    lend::answer(&mut allocation.own, &allocation.others);
    let mut wanted: Vec<&Wanted> = input.wanted.iter().collect();
    wanted.sort_by_key(|one| (one.created, &one.uid));
    for one in &wanted {
        allocation.keep(one);
    }
    for one in wanted {
        allocation.allocate(one);
    }
    allocation.finish()
}

/// Where a claim gets the address of one family.
pub(super) enum Placement {
    Reserve {
        block: usize,
        address: IpAddr,
    },
    Create(BlockCreate),
    /// A block or a borrowed address is on its way.
    Wait,
    Fail(Failure),
}

/// The state of a plan.
pub(super) struct Allocation<'a> {
    pub(super) input: AllocatorInput<'a>,
    pub(super) own: Vec<OwnBlock<'a>>,
    /// The blocks of the network of other holders.
    pub(super) others: Vec<&'a ObservedIpBlock>,
    /// The reservations in the given blocks that each claim keeps, by UID and family.
    kept: BTreeMap<(&'a str, Family), (IpAddr, String)>,
    /// What is reserved now, by the UID of the claim: each address with the index of its own block. Every change of the
    /// claims of an own block updates it.
    reservations: BTreeMap<Uid, Vec<(IpAddr, usize)>>,
    /// How many addresses are on their way: in planned blocks, and borrowed ones without an answer.
    pub(super) incoming: BTreeMap<Family, usize>,
    /// Claims that get the reservation of an earlier claim of their name, by the name of the block.
    confirm: BTreeMap<String, Vec<(ObjectKey, Uid)>>,
    pub(super) plan: AllocatorPlan,
}

impl<'a> Allocation<'a> {
    fn new(input: AllocatorInput<'a>) -> Self {
        let of_network = input.blocks.iter().filter(|(_, block)| block.object.spec.network_uid == input.uid);
        let (own, others): (Vec<_>, Vec<_>) =
            of_network.partition(|(_, block)| block.object.spec.holder.is_claims());
        let own: Vec<OwnBlock<'_>> =
            own.into_iter().map(|(name, block)| OwnBlock::new(name, block)).collect();
        let others = others.into_iter().map(|(_, block)| &block.object).collect();
        let mut this = Self {
            input,
            own,
            others,
            kept: BTreeMap::new(),
            reservations: BTreeMap::new(),
            incoming: BTreeMap::new(),
            confirm: BTreeMap::new(),
            plan: AllocatorPlan::default(),
        };
        for block in this.own.iter().filter(|block| block.claims.is_empty()) {
            if this.answer_to(block) == LenderAnswer::Pending {
                *this.incoming.entry(Family::of(block.range().addr())).or_default() += 1;
                let key = BlockKey { network: input.uid.to_owned(), range: block.range() };
                this.plan.waits.push(key);
            }
        }
        this
    }

    pub(super) fn answer_to(&self, block: &OwnBlock<'_>) -> LenderAnswer {
        let uid = self.input.uid;
        let of_network = self.input.blocks.values().filter(|one| one.object.spec.network_uid == uid);
        lend::lender_answer(&block.state.object, of_network)
    }

    /// Releases what live reads confirmed to be free, and indexes the rest.
    fn release(&mut self) {
        let AllocatorInput { releasable, wanted, .. } = self.input;
        let published: BTreeSet<(&str, IpAddr)> = wanted
            .iter()
            .flat_map(|one| one.published.iter().map(|net| (one.uid.as_str(), net.addr())))
            .collect();
        let released: BTreeSet<(&str, IpAddr)> =
            releasable.iter().map(|(uid, address)| (uid.as_str(), *address)).collect();
        for (index, block) in self.own.iter_mut().enumerate() {
            block.claims.retain(|address, ClaimedAddress { uid, .. }| {
                let key = (uid.as_str(), *address);
                !released.contains(&key) || published.contains(&key)
            });
            for claimed in block.claims.values() {
                let of_claim = self.reservations.entry(claimed.uid.clone()).or_default();
                of_claim.push((claimed.address, index));
            }
        }
    }

    /// What is reserved for a claim, each address with the index of its own block.
    fn reservations_of(&self, uid: &str) -> &[(IpAddr, usize)] {
        self.reservations.get(uid).map_or(&[], Vec::as_slice)
    }

    /// Decides which reservation of each family a claim keeps, and gives it that of an earlier claim of its name whose
    /// address its pods still have.
    fn keep(&mut self, wanted: &'a Wanted) {
        for family in Family::ALL {
            let rank = |address: IpAddr| {
                (
                    !wanted.published.iter().any(|net| net.addr() == address),
                    !wanted.shown.contains(&address),
                    address,
                )
            };
            let found = self.reservations_of(&wanted.uid).iter().copied();
            let found = found.filter(|(address, _)| Family::of(*address) == family);
            if let Some((address, index)) = found.min_by_key(|(address, _)| rank(*address)) {
                let name = self.own[index].name.to_owned();
                self.kept.insert((&wanted.uid, family), (address, name));
            } else {
                self.transfer(wanted, family);
            }
        }
    }

    fn transfer(&mut self, wanted: &Wanted, family: Family) {
        let shown: BTreeSet<IpAddr> =
            wanted.shown.iter().copied().filter(|address| Family::of(*address) == family).collect();
        if shown.is_empty() {
            return;
        }
        let name = wanted.claim.to_string();
        for (index, block) in self.own.iter_mut().enumerate() {
            let is_ours =
                |address: &&IpAddr| block.claims.get(*address).is_some_and(|claimed| claimed.claim == name);
            let Some(&address) = shown.iter().find(is_ours) else { continue };
            let Some(claimed) = block.claims.get_mut(&address) else { continue };
            let old = mem::replace(&mut claimed.uid, wanted.uid.clone());
            if let Some(of_old) = self.reservations.get_mut(&old) {
                of_old.retain(|(one, at)| (*one, *at) != (address, index));
            }
            self.reservations.entry(wanted.uid.clone()).or_default().push((address, index));
            let confirm = self.confirm.entry(block.name.to_owned()).or_default();
            confirm.push((wanted.claim.clone(), wanted.uid.clone()));
            return;
        }
    }

    fn is_reserved(&self, uid: &str, family: Family) -> bool {
        self.reservations_of(uid).iter().any(|(address, _)| Family::of(*address) == family)
    }

    /// The families that a claim lacks. A claim that has published addresses does not get one of a family that the network
    /// got later: a running machine would not have it.
    fn missing(&self, wanted: &Wanted) -> Vec<Family> {
        let has = |family: Family| self.is_reserved(&wanted.uid, family);
        let published = |family: Family| wanted.published.iter().any(|net| Family::of(net.addr()) == family);
        let mut reserved = self.reservations_of(&wanted.uid).iter();
        let complete = reserved.any(|(address, _)| wanted.published.iter().any(|net| net.addr() == *address));
        let families = self.input.pool.grids.iter().map(BlockGrid::family);
        let families = families.filter(|family| !has(*family) && (!complete || published(*family)));
        families.collect()
    }

    fn allocate(&mut self, wanted: &'a Wanted) {
        if let Some(reserved) = self.reserved(wanted) {
            self.plan.reserved.insert(wanted.uid.clone(), reserved);
            return;
        }
        let missing = self.missing(wanted);
        let pool = self.input.pool;
        let nothing = missing.is_empty() && !Family::ALL.iter().any(|it| self.is_reserved(&wanted.uid, *it));
        let refusal = if !missing.is_empty() && !pool.active {
            Some("is being deleted; use another network")
        } else if nothing {
            Some("has no spec.ipam; add spec.ipam.subnets")
        } else {
            None
        };
        if let Some(refusal) = refusal {
            let message = format!("BridgeNetwork {:?} {refusal}", self.input.network);
            return self.fail(wanted, Failure { reason: AllocationReason::InternalError, message });
        }
        if let Some(failure) = self.invalid_request(wanted, &missing) {
            return self.fail(wanted, failure);
        }
        let placements: Vec<Placement> = missing.iter().map(|family| self.place(wanted, *family)).collect();
        for placement in &placements {
            if let Placement::Fail(failure) = placement {
                return self.fail(wanted, failure.clone());
            }
        }
        let ready = placements.iter().all(|placement| matches!(placement, Placement::Reserve { .. }));
        for (placement, family) in placements.into_iter().zip(missing) {
            match placement {
                Placement::Reserve { block, address } if ready => self.reserve(wanted, block, address),
                Placement::Create(create) => self.create(create, family),
                Placement::Wait => {
                    self.incoming.entry(family).and_modify(|left| *left = left.saturating_sub(1));
                }
                Placement::Reserve { .. } | Placement::Fail(_) => {}
            }
        }
    }

    fn fail(&mut self, wanted: &Wanted, failure: Failure) {
        self.plan.failed.insert(wanted.uid.clone(), failure);
    }

    fn reserve(&mut self, wanted: &Wanted, block: usize, address: IpAddr) {
        let (claim, uid) = (wanted.claim.to_string(), wanted.uid.clone());
        self.reservations.entry(uid.clone()).or_default().push((address, block));
        self.own[block].claims.insert(address, ClaimedAddress { address, claim, uid });
    }

    fn create(&mut self, create: BlockCreate, family: Family) {
        let grid = self.input.pool.grid(family).filter(|_| create.lender.is_none());
        let size =
            grid.map_or(1, |grid| usize::try_from(grid.addresses_in(create.range)).unwrap_or(usize::MAX));
        *self.incoming.entry(family).or_default() += size.saturating_sub(1);
        self.plan.creates.push(create);
    }

    /// The addresses of a claim, if the given blocks have all of them.
    fn reserved(&self, wanted: &Wanted) -> Option<Reserved> {
        if !self.missing(wanted).is_empty() {
            return None;
        }
        let (mut infos, mut blocks, mut outside) = (Vec::new(), Vec::new(), Vec::new());
        for family in Family::ALL {
            if !self.is_reserved(&wanted.uid, family) {
                continue;
            }
            // A reservation that this plan transfers is not in the given blocks.
            let (address, block) = self.kept.get(&(wanted.uid.as_str(), family))?;
            infos.push(self.info(wanted, *address));
            blocks.push(block.clone());
            outside.extend(self.is_outside(*address).then_some(*address));
        }
        (!infos.is_empty()).then_some(Reserved { infos, blocks, outside })
    }

    /// What is published about an address stays, even if the subnet changes.
    fn info(&self, wanted: &Wanted, address: IpAddr) -> AddressInfo {
        let grid = self.input.pool.grid(Family::of(address));
        let info =
            grid.map_or(AddressInfo { net: address.into(), gateway: None }, |it| it.address_info(address));
        let published = wanted.published.iter().find(|net| net.addr() == address);
        let outside = self.is_outside(address);
        AddressInfo { net: published.filter(|_| outside).copied().unwrap_or(info.net), ..info }
    }

    fn is_outside(&self, address: IpAddr) -> bool {
        let grid = self.input.pool.grid(Family::of(address));
        grid.is_none_or(|grid| grid.subnet_of(address).is_none())
    }

    /// The plan that writes nothing. A claim that has published addresses keeps them: its reservation may be hidden.
    fn suspended(mut self) -> AllocatorPlan {
        for wanted in self.input.wanted {
            self.keep(wanted);
            if let Some(reserved) = self.reserved(wanted) {
                self.plan.reserved.insert(wanted.uid.clone(), reserved);
            } else if wanted.published.is_empty() {
                let (reason, message) = (AllocationReason::InternalError, CLAIMS_DROPPED.to_owned());
                self.fail(wanted, Failure { reason, message });
            }
        }
        self.plan
    }

    fn finish(mut self) -> AllocatorPlan {
        for block in &self.own {
            let object = &block.state.object;
            let grid = self.input.pool.grid(Family::of(block.range().addr()));
            let mut status = lend::status(block, grid);
            status.draining = lend::draining(block, grid);
            let (name, uid, version) =
                (block.name.to_owned(), object.uid.clone(), block.state.version.clone());
            if status != object.status {
                let confirm = self.confirm.remove(block.name).unwrap_or_default();
                self.plan.writes.push(BlockWrite { name, uid, version, status, confirm });
            } else if let Some(why) = self.delete_reason(block) {
                self.plan.deletes.push(BlockDelete { name, uid, version, why });
            }
        }
        self.plan
    }

    fn delete_reason(&self, block: &OwnBlock<'_>) -> Option<BlockDeleteReason> {
        if !block.claims.is_empty() || !block.lent.is_empty() {
            return None;
        }
        let idle = self.input.idle.contains(block.name);
        let address = block.range().addr();
        match (self.answer_to(block), &block.state.object.spec.lender) {
            (LenderAnswer::Refused, Some(_)) => Some(BlockDeleteReason::Refused { address }),
            (LenderAnswer::Pending, Some(lender)) if idle => {
                Some(BlockDeleteReason::Silent { address, lender: lender.uid.clone() })
            }
            _ => idle.then_some(BlockDeleteReason::Idle),
        }
    }
}
