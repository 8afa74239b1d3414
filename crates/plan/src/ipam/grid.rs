//! The addresses of a network that pods can get, for one family, and the grid of blocks over them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use api::ipam::IpamSpec;
use ipnet::IpNet;

use super::AddressInfo;

/// An address family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    V4,
    V6,
}

impl std::fmt::Display for Family {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        })
    }
}

impl Family {
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    pub fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    /// The length of an address in bits.
    pub fn bits(self) -> u8 {
        match self {
            Self::V4 => 32,
            Self::V6 => 128,
        }
    }

    /// The address with this number, truncated to the length of the family.
    fn address(self, number: u128) -> IpAddr {
        match self {
            Self::V4 => {
                IpAddr::V4(Ipv4Addr::from_bits(u32::try_from(number & 0xffff_ffff).unwrap_or(u32::MAX)))
            }
            Self::V6 => IpAddr::V6(Ipv6Addr::from_bits(number)),
        }
    }

    /// The block length of these subnets: small subnets have a few blocks, and blocks of large subnets have enough addresses
    /// that nodes seldom acquire another.
    pub fn block_length(self, ipam: &IpamSpec) -> Option<u8> {
        let subnets = ipam.subnets.iter().filter(|net| Self::of(net.addr()) == self);
        let largest = subnets.map(IpNet::prefix_len).min()?;
        let specified = ipam.block_length.and_then(|length| match self {
            Self::V4 => length.ipv4,
            Self::V6 => length.ipv6,
        });
        let default = match self {
            Self::V4 => largest.saturating_add(4).clamp(26, 30),
            Self::V6 => largest.saturating_add(8).clamp(120, 126),
        };
        Some(specified.unwrap_or(default).max(largest).min(self.bits()))
    }
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(four) => u128::from(four.to_bits()),
        IpAddr::V6(six) => six.to_bits(),
    }
}

/// First and last, inclusive.
type Span = (u128, u128);

/// The allocatable addresses of one family. It grows with the number of subnets and exclusions, not with
/// their sizes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockGrid {
    family: Family,
    length: u8,
    /// Sorted and disjoint.
    spans: Vec<Span>,
    /// The blocks that contain allocatable addresses, by their index in the whole family: sorted and disjoint.
    cells: Vec<Span>,
    subnets: Vec<IpNet>,
    gateway: Option<IpAddr>,
}

impl BlockGrid {
    /// The grid of a family; `None` if the network has no subnet of it.
    pub fn new(ipam: &IpamSpec, family: Family, length: u8) -> Option<Self> {
        let in_family = |address: IpAddr| Family::of(address) == family;
        let subnets: Vec<IpNet> =
            ipam.subnets.iter().filter(|net| in_family(net.addr())).map(IpNet::trunc).collect();
        if subnets.is_empty() {
            return None;
        }
        let length = length.min(family.bits());
        let mut spans: Vec<Span> = subnets.iter().map(|net| hosts(net, family)).collect();
        let gateway = ipam.gateways.iter().copied().find(|gateway| in_family(*gateway));
        let excluded = ipam.exclude.iter().filter(|net| in_family(net.addr())).map(whole);
        for hole in excluded.chain(gateway.map(number).map(|gateway| (gateway, gateway))) {
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

    /// What a CNI result says about an address. An address without a subnet gets the full prefix length.
    pub fn address_info(&self, address: IpAddr) -> AddressInfo {
        let length = self.subnet_of(address).map_or(self.family.bits(), |net| net.prefix_len());
        let net = IpNet::new(address, length).unwrap_or_else(|_| address.into());
        AddressInfo { net, gateway: self.gateway }
    }

    /// Whether a pod can get this address.
    pub fn contains(&self, address: IpAddr) -> bool {
        Family::of(address) == self.family && self.span_at(number(address)).is_some()
    }

    /// The subnet of an address, allocatable or not.
    pub fn subnet_of(&self, address: IpAddr) -> Option<IpNet> {
        self.subnets.iter().find(|net| net.contains(&address)).copied()
    }

    fn span_at(&self, number: u128) -> Option<Span> {
        let at = self.spans.partition_point(|&(_, last)| last < number);
        self.spans.get(at).copied().filter(|&(first, _)| first <= number)
    }

    /// How many addresses pods can get.
    pub fn addresses(&self) -> u128 {
        total(&self.spans)
    }

    /// How many of these are in a range.
    pub fn addresses_in(&self, range: IpNet) -> u128 {
        let (first, last) = whole(&range);
        total(&self.within(first, last))
    }

    /// The allocatable spans between two numbers.
    fn within(&self, first: u128, last: u128) -> Vec<Span> {
        let from = self.spans.partition_point(|&(_, end)| end < first);
        let rest = self.spans.get(from..).unwrap_or_default().iter();
        let inside = rest.take_while(|&&(start, _)| start <= last);
        inside.map(|&(start, end)| (start.max(first), end.min(last))).collect()
    }

    /// The first free address of a range, searched from `from` and then from the start of the range. Tests no more addresses
    /// than are taken, plus one.
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
        spans.find_map(|(start, end)| {
            let mut number = start;
            loop {
                let address = self.family.address(number);
                if !taken(address) {
                    return Some(address);
                }
                if number == end {
                    return None;
                }
                number += 1;
            }
        })
    }

    /// The free spans of a range, in order.
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
                let (mut start, end) = rest.take().or_else(|| spans.next())?;
                while start <= end && taken(self.family.address(start)) {
                    start = start.checked_add(1)?;
                }
                if start > end {
                    continue;
                }
                let mut stop = start;
                while stop < end && !taken(self.family.address(stop + 1)) {
                    stop += 1;
                }
                rest = (stop < end).then(|| (stop + 1, end));
                return Some((self.family.address(start), self.family.address(stop)));
            }
        })
    }

    /// The number of addresses of a whole block.
    pub fn block_size(&self) -> usize {
        1_usize.checked_shl(u32::from(self.family.bits() - self.length)).unwrap_or(usize::MAX)
    }

    /// The number of blocks.
    pub fn blocks(&self) -> u128 {
        total(&self.cells)
    }

    /// The block with this index among those that contain allocatable addresses.
    pub fn block(&self, mut index: u128) -> Option<IpNet> {
        for &(first, last) in &self.cells {
            let size = last - first;
            if index <= size {
                let shift = self.family.bits() - self.length;
                let address = self.family.address((first + index).checked_shl(shift.into()).unwrap_or(0));
                return IpNet::new(address, self.length).ok();
            }
            index -= size + 1;
        }
        None
    }

    /// The block of an address.
    pub fn block_of(&self, address: IpAddr) -> Option<IpNet> {
        IpNet::new(address, self.length).ok().map(|net| net.trunc())
    }

    /// The first free block, searched from index `from` and then from the start. Tests no more blocks than are taken, plus one.
    pub fn free_block(&self, from: u128, taken: impl Fn(IpNet) -> bool) -> Option<IpNet> {
        let count = self.blocks();
        let start = if count == 0 { return None } else { from % count };
        let indices = (start..count).chain(0..start);
        indices.map_while(|index| self.block(index)).find(|block| !taken(*block))
    }
}

/// The host addresses of a subnet: without the first one (the network, or in IPv6 the subnet-router anycast address) and
/// without the last one of IPv4 (broadcast), unless the subnet has only one or two addresses.
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

/// What remains of a span without another.
fn without((first, last): Span, (from, to): Span) -> Vec<Span> {
    if to < first || last < from {
        return vec![(first, last)];
    }
    let before = (first < from).then(|| (first, from - 1));
    let behind = (to < last).then(|| (to + 1, last));
    before.into_iter().chain(behind).collect()
}

/// Sorts spans and joins those that touch.
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
