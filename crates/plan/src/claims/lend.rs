//! What the holder of claims borrows and lends, and what the status of its blocks says.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use api::{
    IPBlockStatus,
    ipblock::{
        CLAIMS_HOLDER_UID, ClaimedAddress, LentAddress, MAX_DRAINING_PODS, MAX_SPARE_RANGES,
        MAX_STATUS_ADDRESSES,
    },
};
use ipnet::IpNet;

use crate::{
    bridge::Uid,
    ipam::{BlockGrid, ObservedIpBlock},
    network::BlockState,
};

/// An own block in the course of a plan.
#[derive(Debug, Clone)]
pub(super) struct OwnBlock<'a> {
    pub name: &'a str,
    pub state: &'a BlockState,
    pub claims: BTreeMap<IpAddr, ClaimedAddress>,
    pub lent: BTreeMap<IpAddr, Uid>,
    pub refused: Vec<Uid>,
}

impl<'a> OwnBlock<'a> {
    pub fn new(name: &'a str, state: &'a BlockState) -> Self {
        let status = &state.object.status;
        let claims = status.claims.iter().map(|claimed| (claimed.address, claimed.clone()));
        let lent = status.lent.iter().map(|lent| (lent.address, lent.block.clone()));
        let (claims, lent) = (claims.collect(), lent.collect());
        Self { name, state, claims, lent, refused: Vec::new() }
    }

    pub fn range(&self) -> IpNet {
        self.state.object.spec.cidr
    }

    /// Whether it is one address of another holder's block.
    pub fn is_borrowed(&self) -> bool {
        self.state.object.spec.lender.is_some()
    }

    pub fn is_taken(&self, address: IpAddr) -> bool {
        self.claims.contains_key(&address) || self.lent.contains_key(&address)
    }
}

/// How the lender of a borrowed address answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LenderAnswer {
    Granted,
    Refused,
    Pending,
}

/// The block of any holder that contains an address, without single addresses.
pub(super) fn enclosing<'a>(
    blocks: impl IntoIterator<Item = &'a BlockState>,
    address: IpAddr,
) -> Option<&'a ObservedIpBlock> {
    let mut blocks = blocks.into_iter().map(|block| &block.object);
    blocks.find(|block| block.spec.lender.is_none() && block.spec.cidr.contains(&address))
}

/// How the lender answered the request of an own single address. `blocks` are those of the network.
pub(super) fn lender_answer<'a>(
    single: &ObservedIpBlock,
    blocks: impl IntoIterator<Item = &'a BlockState>,
) -> LenderAnswer {
    let Some(lender) = &single.spec.lender else { return LenderAnswer::Granted };
    let address = single.spec.cidr.addr();
    let enclosing = enclosing(blocks, address).filter(|block| block.spec.holder.uid == lender.uid);
    let Some(enclosing) = enclosing else { return LenderAnswer::Refused };
    let status = &enclosing.status;
    if status.lent.iter().any(|lent| lent.address == address && lent.block == single.uid) {
        LenderAnswer::Granted
    } else if status.refused.contains(&single.uid) {
        LenderAnswer::Refused
    } else {
        LenderAnswer::Pending
    }
}

/// Takes back lent addresses whose borrower is gone, and answers the requests of other holders. All blocks come from one
/// watch, so a borrower that is missing was deleted.
pub(super) fn answer(own: &mut [OwnBlock<'_>], others: &[&ObservedIpBlock]) {
    let present: BTreeSet<&Uid> = others.iter().map(|block| &block.uid).collect();
    for block in own.iter_mut() {
        block.lent.retain(|_, borrower| present.contains(borrower));
    }
    let is_request = |block: &&&ObservedIpBlock| {
        let lender = block.spec.lender.as_ref();
        lender.is_some_and(|lender| lender.uid == CLAIMS_HOLDER_UID)
    };
    for request in others.iter().filter(is_request) {
        let address = request.spec.cidr.addr();
        let mut whole = own.iter_mut().filter(|block| !block.is_borrowed());
        let Some(block) = whole.find(|block| block.range().contains(&address)) else { continue };
        if block.lent.get(&address) == Some(&request.uid) {
            continue;
        }
        if !block.is_taken(address) && block.lent.len() < MAX_STATUS_ADDRESSES {
            block.lent.insert(address, request.uid.clone());
        } else if block.refused.len() < MAX_STATUS_ADDRESSES {
            block.refused.push(request.uid.clone());
        }
    }
}

/// The status of an own block. A borrowed address reports nothing until it is used, which saves a write.
pub(super) fn status(block: &OwnBlock<'_>, grid: Option<&BlockGrid>) -> IPBlockStatus {
    let used = block.claims.len();
    let grid = grid.filter(|_| !block.is_borrowed());
    let taken = |address: IpAddr| block.is_taken(address);
    let spans = grid.into_iter().flat_map(|grid| grid.free_spans(block.range(), taken));
    let inside = |address: &&IpAddr| grid.is_some_and(|grid| grid.contains(**address));
    let free = grid.map_or(0, |grid| {
        let taken = block.claims.keys().chain(block.lent.keys()).filter(inside).count();
        let size = usize::try_from(grid.addresses_in(block.range())).unwrap_or(usize::MAX);
        size.saturating_sub(taken)
    });
    let text = |(first, last): (IpAddr, IpAddr)| format!("{first}-{last}");
    let lent = block.lent.iter();
    let lent = lent.map(|(address, block)| LentAddress { address: *address, block: block.clone() });
    IPBlockStatus {
        used: i32::try_from(used).unwrap_or(i32::MAX),
        free: i32::try_from(free).unwrap_or(i32::MAX),
        spare: spans.take(MAX_SPARE_RANGES).map(text).collect(),
        lent: lent.collect(),
        refused: block.refused.clone(),
        closed: false,
        draining: Vec::new(),
        claims: block.claims.values().cloned().collect(),
    }
}

/// The claims with an address that the network no longer has, as text.
pub(super) fn draining(block: &OwnBlock<'_>, grid: Option<&BlockGrid>) -> Vec<String> {
    let outside =
        block.claims.values().filter(|claimed| !grid.is_some_and(|it| it.contains(claimed.address)));
    let text = |claimed: &ClaimedAddress| format!("IPAMClaim {} {}", claimed.claim, claimed.address);
    outside.map(text).take(MAX_DRAINING_PODS).collect()
}
