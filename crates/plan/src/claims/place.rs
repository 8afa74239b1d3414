//! Where a claim gets an address: in an own block, in a new one, or borrowed from a node.

use std::{collections::BTreeSet, net::IpAddr};

use api::{
    ipamclaim::{ADDRESSES_ANNOTATION, AllocationReason, RECORD_ANNOTATION},
    ipblock::{self, HolderRef},
};
use ipnet::IpNet;

use super::{
    Failure, Wanted,
    allocate::{Allocation, BlockCreate, Placement},
    lend::{self, LenderAnswer, OwnBlock},
};
use crate::ipam::{BlockGrid, Family, ObservedIpBlock, is_spare, lending_candidate, overlap, validate};

impl Allocation<'_> {
    /// Why the requested addresses of a claim cannot be allocated.
    pub(super) fn invalid_request(&self, wanted: &Wanted, missing: &[Family]) -> Option<Failure> {
        let pool = self.input.pool;
        for address in &wanted.requested {
            let family = Family::of(*address);
            let text = if pool.grid(family).is_none() {
                let name = if family == Family::V4 { "IPv4" } else { "IPv6" };
                format!(
                    "network {:?} has no {name} subnet: remove {address} from annotation {ADDRESSES_ANNOTATION}, remove \
                     annotation {RECORD_ANNOTATION} of the IPAMClaim, or add a subnet to spec.ipam.subnets of the BridgeNetwork",
                    self.input.network
                )
            } else if !missing.contains(&family) {
                continue;
            } else if let Err(error) = validate(&[IpNet::from(*address)], &pool.grids) {
                format!(
                    "requested address {address}: {error}; correct annotation {ADDRESSES_ANNOTATION}, or remove annotation \
                     {RECORD_ANNOTATION} of the IPAMClaim"
                )
            } else {
                continue;
            };
            return Some(Failure { reason: AllocationReason::InternalError, message: text });
        }
        None
    }

    /// Chooses the address of a family: the published one if it is free, else the requested one, else any.
    pub(super) fn place(&self, wanted: &Wanted, family: Family) -> Placement {
        let Some(grid) = self.input.pool.grid(family) else { return self.exhausted(family) };
        let of_family = |address: &IpAddr| Family::of(*address) == family;
        let published = wanted.published.iter().map(IpNet::addr).filter(of_family);
        for address in published.filter(|address| grid.contains(*address)) {
            let placement = self.place_at(address, grid);
            if !matches!(placement, Placement::Fail(_)) {
                return placement;
            }
        }
        match wanted.requested.iter().copied().find(of_family) {
            Some(address) => self.place_at(address, grid),
            None => self.place_any(grid),
        }
    }

    /// Places one specific address.
    fn place_at(&self, address: IpAddr, grid: &BlockGrid) -> Placement {
        let mut own = self.own.iter().enumerate();
        if let Some((block, one)) = own.find(|(_, one)| one.range().contains(&address)) {
            return self.place_in(block, one, address);
        }
        let Some(range) = grid.block_of(address) else { return self.exhausted(grid.family()) };
        let single = ipblock::name(self.input.network, address.into());
        let borrower = self.input.blocks.get(&single).filter(|_| range != IpNet::from(address));
        match lend::enclosing(self.of_network(), address) {
            None => self.new_block(range),
            Some(enclosing) => {
                let holder = &enclosing.spec.holder;
                if let Some(borrower) = borrower {
                    return self.conflict(address, &format!("is lent to {}", borrower.object.spec.holder));
                }
                let is_open = holder.is_node() && !self.input.nodes_silent.contains(&holder.uid);
                // A request for an address that the node uses would be refused again and again.
                let is_free = is_spare(enclosing, grid, address) && !self.input.tried.contains(&address);
                if !is_open || !is_free || range == IpNet::from(address) {
                    return self.in_use(address);
                }
                let planned = self.plan.creates.iter().any(|create| create.range == IpNet::from(address));
                if planned { Placement::Wait } else { borrow_from(address, holder) }
            }
        }
    }

    /// Places an address of an own block.
    fn place_in(&self, block: usize, one: &OwnBlock<'_>, address: IpAddr) -> Placement {
        if let Some(claimed) = one.claims.get(&address) {
            return self.conflict(address, &format!("belongs to IPAMClaim {}", claimed.claim));
        }
        if let Some(borrower) = one.lent.get(&address) {
            let holder = self.others.iter().find(|other| other.uid == *borrower).map(|it| &it.spec.holder);
            let holder = holder.map_or_else(|| "another node".to_owned(), ToString::to_string);
            return self.conflict(address, &format!("is lent to {holder}"));
        }
        match self.answer_to(one) {
            LenderAnswer::Granted => Placement::Reserve { block, address },
            LenderAnswer::Pending => Placement::Wait,
            LenderAnswer::Refused => self.in_use(address),
        }
    }

    fn of_network(&self) -> impl Iterator<Item = &crate::network::BlockState> {
        self.input.blocks.values().filter(|block| block.object.spec.network_uid == self.input.uid)
    }

    /// Whether a block of an earlier network of the name has addresses of a range.
    fn is_shadowed(&self, range: IpNet) -> bool {
        self.input.blocks.values().map(|block| &block.object.spec).any(|spec| {
            spec.network == self.input.network
                && spec.network_uid != self.input.uid
                && overlap(spec.cidr, range)
        })
    }

    fn new_block(&self, range: IpNet) -> Placement {
        let name = ipblock::name(self.input.network, range);
        let planned = self.plan.creates.iter().any(|create| create.range == range);
        // A block of an earlier network of the name is deleted soon, or keeps its addresses.
        if planned || self.input.blocks.contains_key(&name) || self.is_shadowed(range) {
            return Placement::Wait;
        }
        Placement::Create(BlockCreate { range, lender: None })
    }

    /// Places any address: in the fullest own block, in a new block, or borrowed.
    fn place_any(&self, grid: &BlockGrid) -> Placement {
        let family = grid.family();
        let of_family = |block: &OwnBlock<'_>| Family::of(block.range().addr()) == family;
        let mut best: Option<(usize, usize, IpAddr)> = None;
        for (index, block) in self.own.iter().enumerate().filter(|(_, block)| of_family(block)) {
            if self.answer_to(block) != LenderAnswer::Granted {
                continue;
            }
            let Some(address) = grid.free_in(block.range(), None, |address| block.is_taken(address)) else {
                continue;
            };
            // A borrowed address is used first, so that none is kept in vain.
            let fill = if block.is_borrowed() { usize::MAX } else { block.claims.len() };
            if best.is_none_or(|(most, _, _)| fill > most) {
                best = Some((fill, index, address));
            }
        }
        if let Some((_, block, address)) = best {
            return Placement::Reserve { block, address };
        }
        if self.incoming.get(&family).is_some_and(|left| *left > 0) {
            return Placement::Wait;
        }
        let taken = |range: IpNet| {
            let planned = self.plan.creates.iter().any(|create| create.range == range);
            planned
                || self.input.blocks.contains_key(&ipblock::name(self.input.network, range))
                || self.is_shadowed(range)
        };
        if let Some(range) = grid.free_block(self.input.seed.into(), taken) {
            return Placement::Create(BlockCreate { range, lender: None });
        }
        self.borrow_any(grid)
    }

    fn borrow_any(&self, grid: &BlockGrid) -> Placement {
        let objects: Vec<ObservedIpBlock> = self.of_network().map(|block| block.object.clone()).collect();
        let planned: BTreeSet<IpAddr> = self.plan.creates.iter().map(|create| create.range.addr()).collect();
        let skipped: BTreeSet<IpAddr> = self.input.tried.union(&planned).copied().collect();
        let (ours, silent) = (HolderRef::claims(), self.input.nodes_silent);
        let candidate = |skipped| lending_candidate(&objects, grid, &ours, skipped, silent, self.input.seed);
        if let Some((address, lender)) = candidate(&skipped) {
            return borrow_from(address, &lender.spec.holder);
        }
        // An address that was refused a moment ago may be free after all, once its node has reported.
        if candidate(&planned).is_some() { Placement::Wait } else { self.exhausted(grid.family()) }
    }

    fn exhausted(&self, family: Family) -> Placement {
        let name = if family == Family::V4 { "IPv4" } else { "IPv6" };
        let message = format!(
            "network {:?} has no free {name} address left: add a subnet to spec.ipam.subnets of the BridgeNetwork, or \
             delete pods or virtual machines that use it",
            self.input.network
        );
        Placement::Fail(Failure { reason: AllocationReason::SubnetExhausted, message })
    }

    fn in_use(&self, address: IpAddr) -> Placement {
        let holder = lend::enclosing(self.of_network(), address).map(|block| block.spec.holder.to_string());
        self.conflict(
            address,
            &format!("is in use on {}", holder.unwrap_or_else(|| "another node".to_owned())),
        )
    }

    fn conflict(&self, address: IpAddr, cause: &str) -> Placement {
        let message = format!(
            "address {address} of network {:?} {cause}: request another one in annotation {ADDRESSES_ANNOTATION}, or remove annotation \
             {RECORD_ANNOTATION} of the IPAMClaim",
            self.input.network
        );
        Placement::Fail(Failure { reason: AllocationReason::IpAddressConflict, message })
    }
}

fn borrow_from(address: IpAddr, holder: &HolderRef) -> Placement {
    Placement::Create(BlockCreate { range: address.into(), lender: Some(holder.clone()) })
}
