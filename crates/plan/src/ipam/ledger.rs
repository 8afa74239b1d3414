//! The ledger of one node: the blocks that it holds, and who has which address.
//!
//! It changes by [`Record`]s only, so a journal of them is all that has to be kept. A record that does not fit changes
//! nothing: whatever a disk may bring back, there is a ledger.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use api::ipblock;
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::{
    Ask, Family, Lack, Refusal, Space,
    ask::{again, check},
};
use crate::bridge::Uid;

/// A range of a network.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Block {
    /// The UID of the network.
    pub network: Uid,
    pub range: IpNet,
}

impl Block {
    /// Whether it is one address, which may be a part of somebody else's block.
    pub fn is_single(&self) -> bool {
        self.range.prefix_len() == self.range.max_prefix_len()
    }
}

/// An interface of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Place {
    pub container: String,
    pub interface: String,
}

/// Whose sandbox it is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pod {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

/// Addresses of an interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    pub place: Place,
    pub pod: Pod,
    /// The UID of the network.
    pub network: Uid,
    /// The name of the configuration that asked.
    pub config: String,
    /// The boot of the node in which it was made: none of its sandboxes outlives it.
    pub boot: String,
    /// When it was made, in seconds since that boot.
    pub since: i64,
    pub addresses: Vec<IpAddr>,
}

/// What a pod is told about one of its addresses, for as long as it has it: whatever becomes of the subnet meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Told {
    /// The address with the length of its subnet.
    pub net: IpNet,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<IpAddr>,
}

/// A lease with what the pod is told about it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    #[serde(flatten)]
    pub lease: Lease,
    /// Nothing in journals of the time before it was kept.
    #[serde(default)]
    pub told: Vec<Told>,
}

impl Grant {
    /// What was told about an address.
    pub fn told(&self, address: IpAddr) -> Option<Told> {
        self.told.iter().find(|told| told.net.addr() == address).copied()
    }
}

/// How a block stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// It is being made: perhaps it is there, perhaps it will never be.
    Asked,
    /// Addresses are handed out of it.
    Open,
    /// It is being given back.
    Closing,
    /// It is not there any more, or not as it was.
    Lost,
    /// It is this node's, and it is not known which of its addresses are in use.
    Doubtful,
}

/// A block that this node holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holding {
    /// The name of the network.
    pub network: String,
    pub stage: Stage,
    /// The UID of the object, once it is known.
    pub object: Option<Uid>,
    /// Where the next search for a free address begins.
    pub next: Option<IpAddr>,
    /// Single addresses that others hand out, each with the UID of the object that asked for it.
    pub lent: BTreeMap<IpAddr, Uid>,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Record {
    /// The object of a block is about to be created.
    Asked {
        block: Block,
        network: String,
    },
    /// The block is held, and this is its object.
    Took {
        block: Block,
        object: Uid,
    },
    /// The same, but nobody knows which of its addresses are in use.
    Doubted {
        block: Block,
        network: String,
        object: Uid,
    },
    Closing {
        block: Block,
    },
    Lost {
        block: Block,
    },
    /// It is held no more.
    Dropped {
        block: Block,
    },
    Lent {
        block: Block,
        address: IpAddr,
        object: Uid,
    },
    Returned {
        block: Block,
        address: IpAddr,
    },
    Leased(Grant),
    Freed(Place),
    /// The node was started. What sandboxes had before is free, known or not.
    Booted(String),
    /// Something that happened before may not be known: the journal was lost, or is damaged. Holds until [`Self::Sure`],
    /// however often the daemon is started meanwhile.
    Unsure,
    /// All blocks of this node are known again, if only as doubtful.
    Sure,
    /// A holding as it stood when the journal was written anew.
    Holding {
        block: Block,
        holding: Holding,
    },
}

/// All that one node knows about addresses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ledger {
    /// The boot of the node that was last seen; empty if none was.
    boot: String,
    /// Whether this node may hold blocks that are not known here.
    unsure: bool,
    holdings: BTreeMap<Block, Holding>,
    leases: BTreeMap<Place, Lease>,
    /// What those who have addresses were told about them, as far as that is known.
    told: BTreeMap<Place, Vec<Told>>,
    /// Who has an address, by the network's UID.
    owners: BTreeMap<Uid, BTreeMap<IpAddr, Place>>,
}

impl Ledger {
    pub fn holdings(&self) -> &BTreeMap<Block, Holding> {
        &self.holdings
    }

    /// The boot of the node that was last seen.
    pub fn boot(&self) -> &str {
        &self.boot
    }

    /// Whether all blocks of this node are known here: nothing was ever handed out of another one.
    pub fn is_sure(&self) -> bool {
        !self.unsure
    }

    pub fn leases(&self) -> &BTreeMap<Place, Lease> {
        &self.leases
    }

    /// What an interface has, and was told about it.
    pub fn grant(&self, place: &Place) -> Option<Grant> {
        let lease = self.leases.get(place)?.clone();
        Some(Grant { lease, told: self.told.get(place).cloned().unwrap_or_default() })
    }

    /// The addresses of a block that pods of this node have.
    pub fn used(&self, block: &Block) -> impl Iterator<Item = (IpAddr, &Place)> {
        let owners = self.owners.get(&block.network).into_iter();
        let range = block.range.network()..=block.range.broadcast();
        owners.flat_map(move |owners| owners.range(range.clone())).map(|(address, place)| (*address, place))
    }

    /// Whether nobody has anything of a block.
    pub fn is_empty(&self, block: &Block) -> bool {
        self.used(block).next().is_none() && self.holdings.get(block).is_none_or(|one| one.lent.is_empty())
    }

    /// What becomes of a block that is asked for in vain. One that was asked for again while a pod has of it keeps its
    /// object: as long as it is there, no other node gets the address.
    pub fn given_up(&self, block: &Block) -> Record {
        let block = block.clone();
        if self.is_empty(&block) { Record::Closing { block } } else { Record::Lost { block } }
    }

    /// The holding that an address is in: a single one before the block around it.
    pub fn holding_of(&self, network: &str, address: IpAddr) -> Option<(&Block, &Holding)> {
        let mut all = self.of_network(network).filter(|(block, _)| block.range.contains(&address));
        let first = all.next()?;
        Some(all.fold(
            first,
            |best, one| {
                if one.0.range.prefix_len() > best.0.range.prefix_len() { one } else { best }
            },
        ))
    }

    /// The holdings of a network.
    pub fn of_network(&self, network: &str) -> impl Iterator<Item = (&Block, &Holding)> {
        let first = Block { network: network.to_owned(), range: IpNet::default() };
        let network = network.to_owned();
        self.holdings.range(first..).take_while(move |(block, _)| block.network == network)
    }

    /// How many addresses of a block can be handed out now.
    pub fn free(&self, block: &Block, space: &Space) -> usize {
        let Some(holding) = self.holdings.get(block).filter(|one| one.stage == Stage::Open) else { return 0 };
        let all = usize::try_from(space.addresses_in(block.range)).unwrap_or(usize::MAX);
        let used = self.used(block).filter(|(address, _)| space.contains(*address)).count();
        let lent = holding.lent.keys().filter(|address| space.contains(**address)).count();
        all.saturating_sub(used).saturating_sub(lent)
    }

    /// The lease that a pod gets. Asked again for the same interface it is the same, and the same is told.
    pub fn offer(&self, ask: Ask<'_>) -> Result<Grant, Lack> {
        let Ask { mut lease, spaces, seen, requested } = ask;
        if let Some(before) = self.grant(&lease.place).filter(|one| one.lease.is_same(&lease)) {
            return again(before, spaces, requested).map_err(Lack::Refused);
        }
        check(requested, spaces).map_err(Lack::Refused)?;
        let (mut told, mut lacking) = (Vec::new(), Vec::new());
        for space in spaces {
            let family = space.family();
            let found = match requested.iter().map(IpNet::addr).find(|address| Family::of(*address) == family)
            {
                Some(address) => Some(self.requested(&lease, address, seen)?),
                None => self.any(&lease.network, space, seen),
            };
            match found {
                Some(address) => {
                    lease.addresses.push(address);
                    told.push(space.told(address));
                }
                None => lacking.push(family),
            }
        }
        if lacking.is_empty() { Ok(Grant { lease, told }) } else { Err(Lack::Families(lacking)) }
    }

    fn requested(
        &self,
        lease: &Lease,
        address: IpAddr,
        seen: &BTreeMap<String, Uid>,
    ) -> Result<IpAddr, Lack> {
        let owner = self.owners.get(&lease.network).and_then(|owners| owners.get(&address));
        if let Some(owner) = owner.filter(|owner| **owner != lease.place) {
            let pod = self.leases.get(owner).map(|lease| lease.pod.clone()).unwrap_or_default();
            return Err(Lack::Refused(Refusal::Used { address, pod }));
        }
        match self.holding_of(&lease.network, address) {
            Some((_, holding)) if holding.lent.contains_key(&address) => {
                Err(Lack::Refused(Refusal::Lent(address)))
            }
            Some((block, holding)) if holding.serves(block, seen) => Ok(address),
            _ => Err(Lack::Address(address)),
        }
    }

    /// Borrowed ones first: they are of no use otherwise. Then the block with the fewest left, so that others become empty.
    fn any(&self, network: &str, space: &Space, seen: &BTreeMap<String, Uid>) -> Option<IpAddr> {
        let ours = |block: &Block| Family::of(block.range.addr()) == space.family();
        let open = self.of_network(network).filter(|(block, one)| one.serves(block, seen) && ours(block));
        let mut open: Vec<_> = open.map(|(block, one)| (self.free(block, space), block, one)).collect();
        open.retain(|(free, ..)| *free > 0);
        let (_, block, holding) =
            open.into_iter().min_by_key(|(free, block, _)| (!block.is_single(), *free))?;
        let owners = self.owners.get(network);
        let taken = |address: IpAddr| {
            holding.lent.contains_key(&address) || owners.is_some_and(|owners| owners.contains_key(&address))
        };
        space.free_in(block.range, holding.next, taken)
    }

    /// The leases of sandboxes that an earlier boot of the node had.
    pub fn of_other_boots(&self, boot: &str) -> Vec<Place> {
        let other = |lease: &&Lease| !same_boot(&lease.boot, boot);
        self.leases.values().filter(other).map(|lease| lease.place.clone()).collect()
    }

    /// The leases of sandboxes that are not there, but for young ones: a sandbox is listed a little after it has its
    /// addresses.
    pub fn left_over(&self, live: &BTreeSet<String>, before: i64) -> Vec<Place> {
        let dead = |lease: &&Lease| lease.since < before && !live.contains(&lease.place.container);
        self.leases.values().filter(dead).map(|lease| lease.place.clone()).collect()
    }

    /// The leases of a configuration of a network, but for these places.
    pub fn not_among(&self, network: &str, config: &str, valid: &BTreeSet<Place>) -> Vec<Place> {
        let of_it = |lease: &Lease| lease.config == config && lease.network == network;
        let other = |lease: &&Lease| of_it(lease) && !valid.contains(&lease.place);
        self.leases.values().filter(other).map(|lease| lease.place.clone()).collect()
    }

    pub fn apply(&mut self, record: &Record) {
        match record {
            Record::Asked { block, network } => self.set(block, network, Stage::Asked, None),
            Record::Took { block, object } => {
                if let Some(holding) = self.holdings.get_mut(block) {
                    (holding.stage, holding.object) = (Stage::Open, Some(object.clone()));
                }
            }
            Record::Doubted { block, network, object } => {
                self.set(block, network, Stage::Doubtful, Some(object.clone()));
            }
            Record::Closing { block } => self.stage(block, Stage::Closing),
            Record::Lost { block } => self.stage(block, Stage::Lost),
            Record::Dropped { block } => _ = self.holdings.remove(block),
            Record::Lent { block, address, object } => {
                if let Some(holding) = self.holdings.get_mut(block) {
                    holding.lent.insert(*address, object.clone());
                }
            }
            Record::Returned { block, address } => {
                if let Some(holding) = self.holdings.get_mut(block) {
                    holding.lent.remove(address);
                }
            }
            Record::Leased(grant) => self.lease(grant),
            Record::Freed(place) => self.free_place(place),
            Record::Booted(boot) => self.booted(boot),
            Record::Unsure => self.unsure = true,
            Record::Sure => self.unsure = false,
            Record::Holding { block, holding } => {
                self.holdings.insert(block.clone(), holding.clone());
            }
        }
    }

    fn set(&mut self, block: &Block, network: &str, stage: Stage, object: Option<Uid>) {
        let holding =
            Holding { network: network.to_owned(), stage, object, next: None, lent: BTreeMap::new() };
        // What was lent stays lent, whatever becomes of the object.
        let lent = self.holdings.remove(block).map(|old| old.lent).unwrap_or_default();
        self.holdings.insert(block.clone(), Holding { lent, ..holding });
    }

    /// Nobody can have anything that is not known: all who could are gone. What is doubtful is as good as just asked for;
    /// a borrowed address may never have been lent.
    fn booted(&mut self, boot: &str) {
        if !same_boot(&self.boot, boot) {
            let doubtful = self.holdings.values_mut().filter(|one| one.stage == Stage::Doubtful);
            doubtful.for_each(|one| one.stage = Stage::Asked);
        }
        boot.clone_into(&mut self.boot);
    }

    fn stage(&mut self, block: &Block, stage: Stage) {
        if let Some(holding) = self.holdings.get_mut(block) {
            holding.stage = stage;
        }
    }

    fn lease(&mut self, grant: &Grant) {
        let Grant { lease, told } = grant;
        // One interface, one lease: what it had before is gone.
        self.free_place(&lease.place);
        let owners = self.owners.entry(lease.network.clone()).or_default();
        for address in &lease.addresses {
            owners.insert(*address, lease.place.clone());
        }
        for address in &lease.addresses {
            let block = self.holding_of(&lease.network, *address).map(|(block, _)| block.clone());
            if let Some(holding) = block.and_then(|block| self.holdings.get_mut(&block)) {
                holding.next = Some(following(*address));
            }
        }
        self.leases.insert(lease.place.clone(), lease.clone());
        if !told.is_empty() {
            self.told.insert(lease.place.clone(), told.clone());
        }
    }

    fn free_place(&mut self, place: &Place) {
        self.told.remove(place);
        let Some(lease) = self.leases.remove(place) else { return };
        let Some(owners) = self.owners.get_mut(&lease.network) else { return };
        for address in &lease.addresses {
            if owners.get(address) == Some(place) {
                owners.remove(address);
            }
        }
        if owners.is_empty() {
            self.owners.remove(&lease.network);
        }
    }

    /// How many records it takes to make this ledger.
    pub fn size(&self) -> usize {
        self.holdings.len() + self.leases.len()
    }

    /// Records that make this ledger out of an empty one.
    pub fn records(&self) -> impl Iterator<Item = Record> {
        // Leases first: each of them moves the place where the next search begins.
        let boot = (!self.boot.is_empty()).then(|| Record::Booted(self.boot.clone()));
        let leases = self.leases.keys().filter_map(|place| self.grant(place)).map(Record::Leased);
        let holding = |(block, holding): (&Block, &Holding)| Record::Holding {
            block: block.clone(),
            holding: holding.clone(),
        };
        let unsure = self.unsure.then_some(Record::Unsure);
        boot.into_iter().chain(unsure).chain(leases).chain(self.holdings.iter().map(holding))
    }
}

impl Lease {
    /// Whether two are of one sandbox, interface and network.
    fn is_same(&self, other: &Self) -> bool {
        let same_pod = self.pod.uid.is_empty() || other.pod.uid.is_empty() || self.pod.uid == other.pod.uid;
        let same_boot = same_boot(&self.boot, &other.boot);
        self.place == other.place && self.network == other.network && same_boot && same_pod
    }
}

impl Holding {
    /// Whether addresses are handed out of it: the API server must be known to have just this object.
    fn serves(&self, block: &Block, seen: &BTreeMap<String, Uid>) -> bool {
        let there = || seen.get(&ipblock::name(&self.network, block.range));
        self.stage == Stage::Open && self.object.is_some() && there() == self.object.as_ref()
    }
}

/// A boot that nobody knows is not another one.
fn same_boot(one: &str, other: &str) -> bool {
    one == other || one.is_empty() || other.is_empty()
}

/// The address after this one, around the end.
pub fn following(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(four) => IpAddr::V4(four.to_bits().wrapping_add(1).into()),
        IpAddr::V6(six) => IpAddr::V6(six.to_bits().wrapping_add(1).into()),
    }
}
