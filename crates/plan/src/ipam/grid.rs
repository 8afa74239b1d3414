//! The addresses of a network that pods can have, of one family, and the grid of blocks over them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use api::ipam::IpamSpec;
use ipnet::IpNet;

use super::AddressInfo;

/// A family of addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    V4,
    V6,
}

impl Family {
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    pub fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    /// How long an address is, in bits.
    pub fn bits(self) -> u8 {
        match self {
            Self::V4 => 32,
            Self::V6 => 128,
        }
    }

    /// The address of a number; one that is too large for the family is cut off.
    fn address(self, number: u128) -> IpAddr {
        match self {
            Self::V4 => {
                IpAddr::V4(Ipv4Addr::from_bits(u32::try_from(number & 0xffff_ffff).unwrap_or(u32::MAX)))
            }
            Self::V6 => IpAddr::V6(Ipv6Addr::from_bits(number)),
        }
    }

    /// The length of blocks that fits these subnets: a few blocks in a small one, enough addresses in each of a large one
    /// that nodes seldom ask.
    pub fn block_length(self, ipam: &IpamSpec) -> Option<u8> {
        let subnets = ipam.subnets.iter().filter(|net| Self::of(net.addr()) == self);
        let largest = subnets.map(IpNet::prefix_len).min()?;
        let asked = ipam.block_length.and_then(|length| match self {
            Self::V4 => length.ipv4,
            Self::V6 => length.ipv6,
        });
        let fitting = match self {
            Self::V4 => largest.saturating_add(4).clamp(26, 30),
            Self::V6 => largest.saturating_add(8).clamp(120, 126),
        };
        Some(asked.unwrap_or(fitting).max(largest).min(self.bits()))
    }
}

/// The number of an address.
fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(four) => u128::from(four.to_bits()),
        IpAddr::V6(six) => six.to_bits(),
    }
}

/// From the first to the last, both included.
type Span = (u128, u128);

/// What can be handed out, of one family. However large the subnets are, it is as small as what was written about them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockGrid {
    family: Family,
    length: u8,
    /// In order, and apart from each other.
    spans: Vec<Span>,
    /// The blocks that hold any of it, by their number in the whole family: in order, and apart.
    cells: Vec<Span>,
    subnets: Vec<IpNet>,
    gateway: Option<IpAddr>,
}

impl BlockGrid {
    /// The part of this family; none if the network has no subnet of it.
    pub fn new(ipam: &IpamSpec, family: Family, length: u8) -> Option<Self> {
        let ours = |address: IpAddr| Family::of(address) == family;
        let subnets: Vec<IpNet> =
            ipam.subnets.iter().filter(|net| ours(net.addr())).map(IpNet::trunc).collect();
        if subnets.is_empty() {
            return None;
        }
        let length = length.min(family.bits());
        let mut spans: Vec<Span> = subnets.iter().map(|net| hosts(net, family)).collect();
        let gateway = ipam.gateways.iter().copied().find(|gateway| ours(*gateway));
        let excluded = ipam.exclude.iter().filter(|net| ours(net.addr())).map(whole);
        for hole in excluded.chain(gateway.map(number).map(|one| (one, one))) {
            spans = spans.into_iter().flat_map(|span| without(span, hole)).collect();
        }
        let spans = merged(spans);
        let shift = family.bits() - length;
        let cells =
            merged(spans.iter().map(|&(first, last)| (above(first, shift), above(last, shift))).collect());
        Some(Self { family, length, spans, cells, subnets, gateway })
    }

    pub fn family(&self) -> Family {
        self.family
    }

    /// What a pod is told about an address: the length of its subnet, and the gateway. One whose subnet is gone stands alone.
    pub fn address_info(&self, address: IpAddr) -> AddressInfo {
        let length = self.subnet_of(address).map_or(self.family.bits(), |net| net.prefix_len());
        let net = IpNet::new(address, length).unwrap_or_else(|_| address.into());
        AddressInfo { net, gateway: self.gateway }
    }

    /// Whether a pod can have this address.
    pub fn contains(&self, address: IpAddr) -> bool {
        Family::of(address) == self.family && self.span_at(number(address)).is_some()
    }

    /// The subnet that an address lies in, though perhaps no pod can have it.
    pub fn subnet_of(&self, address: IpAddr) -> Option<IpNet> {
        self.subnets.iter().find(|net| net.contains(&address)).copied()
    }

    fn span_at(&self, one: u128) -> Option<Span> {
        let at = self.spans.partition_point(|&(_, last)| last < one);
        self.spans.get(at).copied().filter(|&(first, _)| first <= one)
    }

    /// How many addresses there are.
    pub fn addresses(&self) -> u128 {
        total(&self.spans)
    }

    /// How many of them are in a range.
    pub fn addresses_in(&self, range: IpNet) -> u128 {
        let (first, last) = whole(&range);
        total(&self.within(first, last))
    }

    /// The part of it between two numbers.
    fn within(&self, first: u128, last: u128) -> Vec<Span> {
        let from = self.spans.partition_point(|&(_, end)| end < first);
        let rest = self.spans.get(from..).unwrap_or_default().iter();
        let inside = rest.take_while(|&&(begin, _)| begin <= last);
        inside.map(|&(begin, end)| (begin.max(first), end.min(last))).collect()
    }

    /// The first address of a range, from a place on and around its end, that is not taken. Looks at no more addresses
    /// than are taken.
    pub fn free_in(
        &self,
        range: IpNet,
        from: Option<IpAddr>,
        taken: impl Fn(IpAddr) -> bool,
    ) -> Option<IpAddr> {
        let (first, last) = whole(&range);
        let middle = from.map_or(first, number).clamp(first, last);
        let before = if middle > first { self.within(first, middle - 1) } else { Vec::new() };
        let mut spans = self.within(middle, last).into_iter().chain(before);
        spans.find_map(|(begin, end)| {
            let mut one = begin;
            loop {
                let address = self.family.address(one);
                if !taken(address) {
                    return Some(address);
                }
                if one == end {
                    return None;
                }
                one += 1;
            }
        })
    }

    /// The free parts of a range, in order, each from its first to its last address.
    pub fn free_spans<'a>(
        &'a self,
        range: IpNet,
        taken: impl Fn(IpAddr) -> bool + 'a,
    ) -> impl Iterator<Item = (IpAddr, IpAddr)> + 'a {
        let (first, last) = whole(&range);
        let mut spans = self.within(first, last).into_iter();
        let mut rest: Option<Span> = None;
        std::iter::from_fn(move || {
            loop {
                let (mut begin, end) = rest.take().or_else(|| spans.next())?;
                while begin <= end && taken(self.family.address(begin)) {
                    begin = begin.checked_add(1)?;
                }
                if begin > end {
                    continue;
                }
                let mut stop = begin;
                while stop < end && !taken(self.family.address(stop + 1)) {
                    stop += 1;
                }
                rest = (stop < end).then(|| (stop + 1, end));
                return Some((self.family.address(begin), self.family.address(stop)));
            }
        })
    }

    /// How many addresses a block has at most.
    pub fn block_size(&self) -> usize {
        1_usize.checked_shl(u32::from(self.family.bits() - self.length)).unwrap_or(usize::MAX)
    }

    /// How many blocks there are.
    pub fn blocks(&self) -> u128 {
        total(&self.cells)
    }

    /// The block of this number, counted from the first that holds any address.
    pub fn block(&self, mut key: u128) -> Option<IpNet> {
        for &(first, last) in &self.cells {
            let size = last - first;
            if key <= size {
                let shift = self.family.bits() - self.length;
                let address = self.family.address((first + key).checked_shl(shift.into()).unwrap_or(0));
                return IpNet::new(address, self.length).ok();
            }
            key -= size + 1;
        }
        None
    }

    /// The block that an address is in.
    pub fn block_of(&self, address: IpAddr) -> Option<IpNet> {
        IpNet::new(address, self.length).ok().map(|net| net.trunc())
    }

    /// The first block from a place on, and around the end, that is not taken. Looks at no more blocks than are taken.
    pub fn free_block(&self, from: u128, taken: impl Fn(IpNet) -> bool) -> Option<IpNet> {
        let count = self.blocks();
        let start = if count == 0 { return None } else { from % count };
        let positions = (start..count).chain(0..start);
        positions.map_while(|key| self.block(key)).find(|block| !taken(*block))
    }
}

/// The addresses of a subnet that hosts can have: not the first one, which means the network or any router, and not the last
/// one of IPv4, which means all; unless there are too few to spare any.
fn hosts(net: &IpNet, family: Family) -> Span {
    let (first, last) = whole(net);
    if last - first < 2 {
        return (first, last);
    }
    (first + 1, if family == Family::V4 { last - 1 } else { last })
}

fn whole(net: &IpNet) -> Span {
    (number(net.network()), number(net.broadcast()))
}

/// What is left of a span.
fn without((first, last): Span, (from, to): Span) -> Vec<Span> {
    if to < first || last < from {
        return vec![(first, last)];
    }
    let before = (first < from).then(|| (first, from - 1));
    let behind = (to < last).then(|| (to + 1, last));
    before.into_iter().chain(behind).collect()
}

/// In order, and joined where they touch.
fn merged(mut spans: Vec<Span>) -> Vec<Span> {
    spans.sort_unstable();
    let mut all: Vec<Span> = Vec::new();
    for (first, last) in spans {
        match all.last_mut() {
            Some((_, end)) if first <= end.saturating_add(1) => *end = last.max(*end),
            _ => all.push((first, last)),
        }
    }
    all
}

fn total(spans: &[Span]) -> u128 {
    spans.iter().fold(0, |sum: u128, (first, last)| sum.saturating_add(last - first).saturating_add(1))
}

/// The bits above the lowest ones.
fn above(number: u128, shift: u8) -> u128 {
    number.checked_shr(shift.into()).unwrap_or(0)
}
