//! What a node does next about its blocks.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use super::{Block, Family, Holding, Ledger, Record, Space, Stage};
use crate::bridge::Uid;
use api::{
    IPBlockSpec, IPBlockStatus,
    ipam::{IpFamilyStatus, IpamSpec},
    ipblock::{self, LentAddress, MAX_DRAINING_PODS, MAX_SPARE_RANGES, MAX_STATUS_ADDRESSES, NodeRef},
};

/// An IPBlock, as last seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    pub uid: Uid,
    pub spec: IPBlockSpec,
    pub status: IPBlockStatus,
}

/// What a network says about addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rules {
    pub name: String,
    pub spaces: Vec<Space>,
    pub routes: Vec<api::ipam::Route>,
    /// Whether pods can join: not once it is being taken away.
    pub live: bool,
}

impl Rules {
    /// The rules of a network with these lengths of blocks. A family whose length is not known yet is left out.
    pub fn new(name: &str, ipam: &IpamSpec, lengths: impl Fn(Family) -> Option<u8>, live: bool) -> Self {
        let spaces = Family::ALL.iter().filter_map(|family| Space::new(ipam, *family, lengths(*family)?));
        Self { name: name.to_owned(), spaces: spaces.collect(), routes: ipam.routes.clone(), live }
    }

    pub fn space(&self, family: Family) -> Option<&Space> {
        self.spaces.iter().find(|space| space.family() == family)
    }
}

/// What pods of this node wait for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wants {
    /// Any address of a network, by its UID: how many pods wait.
    pub any: BTreeMap<(Uid, Family), usize>,
    /// Just this address.
    pub addresses: BTreeSet<(Uid, IpAddr)>,
}

/// All that is known when something has to be decided.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    pub me: &'a NodeRef,
    /// By their UID; one that is missing is gone.
    pub networks: &'a BTreeMap<Uid, Arc<Rules>>,
    /// The IPBlocks that this node holds, and those that ask it for an address, by their name.
    pub objects: &'a BTreeMap<String, Object>,
    /// The block around each single address that this node asks for; none if nobody holds it. What is missing has not been
    /// looked at yet.
    pub lenders: &'a BTreeMap<Block, Option<Object>>,
    pub wants: &'a Wants,
    /// The networks and families of which no block is left.
    pub full: &'a BTreeSet<(Uid, Family)>,
    /// The blocks that have been empty for so long that they can be given back.
    pub idle: &'a BTreeSet<Block>,
    /// The blocks whose counts were told a moment ago.
    pub told: &'a BTreeSet<Block>,
    /// The UIDs of objects whose address was lent and is back.
    pub returned: &'a BTreeSet<Uid>,
}

/// Something to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Keep this for good.
    Note(Record),
    /// Ask what became of the object of a block that is not seen any more.
    Find(Block),
    /// Ask whether somebody still has an address that was lent, for an object that is not seen any more.
    FindLent { block: Block, address: IpAddr, object: Uid },
    /// Delete the object of a block, if it is this one.
    Delete { block: Block, object: Uid },
    /// Tell how a block is used.
    Tell { block: Block, object: Uid, status: IPBlockStatus },
    /// Take a block, or borrow so many addresses if none is left.
    Take { network: Uid, family: Family, missing: usize },
    /// Take the block of an address, or borrow it.
    TakeAddress { network: Uid, address: IpAddr },
}

/// What a step asks of the API server. Who is refused one may get another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Plea {
    Find,
    Delete,
    Tell,
    Take,
}

impl Step {
    /// The UID of the network that it is for, and what is asked; of a record, nothing.
    pub fn plea(&self) -> Option<(&str, Plea)> {
        match self {
            Self::Note(_) => None,
            Self::Find(block) | Self::FindLent { block, .. } => Some((&block.network, Plea::Find)),
            Self::Delete { block, .. } => Some((&block.network, Plea::Delete)),
            Self::Tell { block, .. } => Some((&block.network, Plea::Tell)),
            Self::Take { network, .. } | Self::TakeAddress { network, .. } => Some((network, Plea::Take)),
        }
    }
}

/// Decides what to do next. Records come first: what follows from them is decided once they are kept.
pub fn keep(ledger: &Ledger, view: View<'_>) -> Vec<Step> {
    // What is lent is known before anything of the block around it is handed out.
    let mut steps = doubt(ledger, view);
    if steps.is_empty() && !ledger.is_sure() {
        steps.push(Step::Note(Record::Sure));
    }
    for (block, holding) in ledger.holdings() {
        steps.extend(hold(ledger, view, block, holding));
    }
    steps.extend(lend(ledger, view));
    if steps.iter().any(|step| matches!(step, Step::Note(_))) {
        return steps;
    }
    steps.extend(lost(ledger, view));
    for (network, rules) in view.networks {
        steps.extend(close(ledger, view, network, rules));
        steps.extend(take(ledger, view, network, rules));
    }
    for (block, holding) in ledger.holdings() {
        steps.extend(tell(ledger, view, block, holding));
    }
    steps
}

/// The object of a block, if it is this node's.
fn object<'a>(view: View<'a>, block: &Block, holding: &Holding) -> Option<&'a Object> {
    let object = view.objects.get(&ipblock::name(&holding.network, block.range))?;
    let ours = object.spec.network_uid == block.network && object.spec.holder.uid == view.me.uid;
    ours.then_some(object)
}

fn hold(ledger: &Ledger, view: View<'_>, block: &Block, holding: &Holding) -> Option<Step> {
    let found = object(view, block, holding);
    let took =
        |object: &Object| Step::Note(Record::Took { block: block.clone(), object: object.uid.clone() });
    match (holding.stage, found) {
        // Nobody can be asked any more.
        (Stage::Asked, Some(object)) if object.spec.lender.is_some() && !is_wanted(view, block) => {
            Some(Step::Note(ledger.given_up(block)))
        }
        (Stage::Asked, Some(object)) => match answer(view, block, object) {
            Answer::Yes => Some(took(object)),
            Answer::No => Some(Step::Note(ledger.given_up(block))),
            Answer::None => None,
        },
        (Stage::Open, Some(object)) if holding.object.as_ref() != Some(&object.uid) => {
            // Another object of one address is another request, which its lender has to answer.
            let network = holding.network.clone();
            let again = || Step::Note(Record::Asked { block: block.clone(), network });
            Some(if object.spec.lender.is_some() { again() } else { took(object) })
        }
        (Stage::Lost, Some(object)) if object.spec.lender.is_none() => Some(took(object)),
        (Stage::Closing, Some(object)) => {
            Some(Step::Delete { block: block.clone(), object: object.uid.clone() })
        }
        (Stage::Closing, None) => Some(Step::Note(Record::Dropped { block: block.clone() })),
        (Stage::Lost, _) if ledger.is_empty(block) => {
            Some(Step::Note(Record::Dropped { block: block.clone() }))
        }
        (Stage::Asked | Stage::Open | Stage::Doubtful, None) => Some(Step::Find(block.clone())),
        (Stage::Open | Stage::Doubtful, Some(_))
            if !view.networks.contains_key(&block.network)
                && ledger.is_empty(block)
                // Of one that is doubtful pods may have more than is known.
                && (holding.stage == Stage::Open || view.idle.contains(block)) =>
        {
            Some(Step::Note(Record::Closing { block: block.clone() }))
        }
        (Stage::Open | Stage::Lost | Stage::Doubtful, _) => None,
    }
}

/// Whether the network still hands out addresses of this family.
fn is_wanted(view: View<'_>, block: &Block) -> bool {
    let rules = view.networks.get(&block.network).filter(|rules| rules.live);
    rules.is_some_and(|rules| rules.space(Family::of(block.range.addr())).is_some())
}

/// What somebody said who was asked for an address.
enum Answer {
    Yes,
    No,
    None,
}

/// Whether a block that was asked for may be used. A whole one may, as soon as it is there.
fn answer(view: View<'_>, block: &Block, object: &Object) -> Answer {
    let Some(lender) = &object.spec.lender else { return Answer::Yes };
    let around = match view.lenders.get(block) {
        None => return Answer::None,
        // Whoever asks next finds out who holds it now.
        Some(None) => return Answer::No,
        Some(Some(around)) => around,
    };
    if around.spec.network_uid != block.network || around.spec.holder.uid != lender.uid {
        return Answer::No;
    }
    let address = block.range.addr();
    if around.status.lent.iter().any(|lent| lent.address == address && lent.block == object.uid) {
        return Answer::Yes;
    }
    if around.status.refused.contains(&object.uid) { Answer::No } else { Answer::None }
}

/// Objects of this node that it knows nothing about: its journal was lost.
fn doubt(ledger: &Ledger, view: View<'_>) -> Vec<Step> {
    let ours = view.objects.values().filter(|object| object.spec.holder.uid == view.me.uid);
    let blocks = ours.map(|object| {
        let block = Block { network: object.spec.network_uid.clone(), range: object.spec.cidr };
        (block, object)
    });
    let mut steps = Vec::new();
    for (block, object) in blocks {
        let network = object.spec.network.clone();
        match ledger.holdings().get(&block) {
            // What its status says is lent is lent, whatever the journal has forgotten.
            Some(holding) if matches!(holding.stage, Stage::Doubtful | Stage::Asked) => {
                let new = |one: &&LentAddress| {
                    !holding.lent.contains_key(&one.address) && !view.returned.contains(&one.block)
                };
                let lent = object.status.lent.iter().filter(new);
                steps.extend(lent.map(|one| {
                    let (block, address, object) = (block.clone(), one.address, one.block.clone());
                    Step::Note(Record::Lent { block, address, object })
                }));
            }
            Some(_) => {}
            // It came of a request that had been given up.
            None if ledger.is_sure() => {
                steps.push(Step::Note(Record::Asked { block: block.clone(), network }));
                steps.push(Step::Note(Record::Closing { block }));
            }
            None => steps.push(Step::Note(Record::Doubted { block, network, object: object.uid.clone() })),
        }
    }
    steps
}

/// Addresses that were lent for objects that are not seen: perhaps they are given back, perhaps they only bear the mark of
/// an earlier Node of this name.
fn lost(ledger: &Ledger, view: View<'_>) -> Vec<Step> {
    let present: BTreeSet<&Uid> = view.objects.values().map(|object| &object.uid).collect();
    let mut steps = Vec::new();
    for (block, holding) in ledger.holdings() {
        let back = holding.lent.iter().filter(|(_, object)| !present.contains(object));
        steps.extend(back.map(|(address, object)| Step::FindLent {
            block: block.clone(),
            address: *address,
            object: object.clone(),
        }));
    }
    steps
}

/// Those that ask this node for an address.
fn requests(view: View<'_>) -> impl Iterator<Item = &Object> {
    view.objects.values().filter(|object| {
        let asks = object.spec.lender.as_ref().is_some_and(|lender| lender.uid == view.me.uid);
        asks && object.spec.cidr.prefix_len() == object.spec.cidr.max_prefix_len()
    })
}

/// The block of this node that the address of a request is in.
fn asked<'a>(ledger: &'a Ledger, request: &Object) -> Option<(&'a Block, &'a Holding)> {
    let found = ledger.holding_of(&request.spec.network_uid, request.spec.cidr.addr());
    found.filter(|(block, _)| !block.is_single())
}

fn lend(ledger: &Ledger, view: View<'_>) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut promised = BTreeSet::new();
    for request in requests(view) {
        let address = request.spec.cidr.addr();
        let Some((block, holding)) = asked(ledger, request) else { continue };
        if may_lend(ledger, block, holding, address) && promised.insert((block, address)) {
            let (block, object) = (block.clone(), request.uid.clone());
            steps.push(Step::Note(Record::Lent { block, address, object }));
        }
    }
    steps
}

fn may_lend(ledger: &Ledger, block: &Block, holding: &Holding, address: IpAddr) -> bool {
    let used = ledger.used(block).any(|(one, _)| one == address);
    holding.stage == Stage::Open
        && !used
        && !holding.lent.contains_key(&address)
        && holding.lent.len() < MAX_STATUS_ADDRESSES
}

/// How many addresses a node has at hand before it takes another block.
fn reserve(ledger: &Ledger, network: &str, space: &Space) -> usize {
    let mut used = ledger.of_network(network).filter(|(block, _)| is_of(block, space));
    if !used.any(|(block, _)| ledger.used(block).next().is_some()) {
        return 0;
    }
    (space.block_size() / 4).max(1)
}

fn is_of(block: &Block, space: &Space) -> bool {
    Family::of(block.range.addr()) == space.family()
}

/// Gives back a block that nobody needs, one at a time.
fn close(ledger: &Ledger, view: View<'_>, network: &str, rules: &Rules) -> Option<Step> {
    let idle = |block: &&Block| view.idle.contains(*block) && ledger.is_empty(block);
    let closable = |holding: &Holding| matches!(holding.stage, Stage::Open | Stage::Doubtful);
    let mut blocks = ledger.of_network(network).filter(|(_, one)| closable(one)).map(|(block, _)| block);
    let block = blocks.find(|block| idle(block) && spared(ledger, view, network, rules, block))?;
    Some(Step::Note(Record::Closing { block: block.clone() }))
}

/// Whether what is left without a block is enough.
fn spared(ledger: &Ledger, view: View<'_>, network: &str, rules: &Rules, block: &Block) -> bool {
    let family = Family::of(block.range.addr());
    let Some(space) = rules.space(family).filter(|_| rules.live) else { return true };
    if view.wants.any.contains_key(&(network.to_owned(), family)) {
        return false;
    }
    // Nothing is borrowed for later: another node may wait for just this one.
    if block.is_single() && space.block_size() > 1 {
        return true;
    }
    let others = ledger.of_network(network).filter(|(other, _)| *other != block && is_of(other, space));
    let free: usize = others.map(|(other, _)| ledger.free(other, space)).sum();
    free >= reserve(ledger, network, space)
}

fn take(ledger: &Ledger, view: View<'_>, network: &str, rules: &Rules) -> Vec<Step> {
    let mut steps = Vec::new();
    for space in rules.spaces.iter().filter(|_| rules.live) {
        let key = (network.to_owned(), space.family());
        let waiting = view.wants.any.get(&key).copied().unwrap_or(0);
        let all = || ledger.of_network(network).filter(|(block, _)| is_of(block, space));
        let free: usize = all().map(|(block, _)| ledger.free(block, space)).sum();
        let asked = all().filter(|(_, one)| one.stage == Stage::Asked);
        let coming: usize =
            asked.map(|(block, _)| if block.is_single() { 1 } else { space.block_size() }).sum();
        let full = view.full.contains(&key);
        // Nothing is borrowed for later.
        let wanted = waiting + if full { 0 } else { reserve(ledger, network, space) };
        let missing = wanted.saturating_sub(free.saturating_add(coming));
        if missing > 0 {
            steps.push(Step::Take { network: network.to_owned(), family: space.family(), missing });
        }
    }
    let addresses = view.wants.addresses.iter().filter(|(uid, _)| uid == network);
    for (_, address) in addresses.filter(|_| rules.live) {
        // One that is held already is at hand in a moment, or gone; or it is said why not.
        let stage = ledger.holding_of(network, *address).map(|(_, one)| one.stage);
        if matches!(stage, None | Some(Stage::Doubtful | Stage::Lost)) {
            steps.push(Step::TakeAddress { network: network.to_owned(), address: *address });
        }
    }
    steps
}

/// What to say about a block. Who waits for an answer gets it at once; counts are told now and then.
fn tell(ledger: &Ledger, view: View<'_>, block: &Block, holding: &Holding) -> Option<Step> {
    let object = object(view, block, holding)?;
    if !matches!(holding.stage, Stage::Open | Stage::Doubtful) {
        return None;
    }
    let status = status(ledger, view, block, holding);
    let now = &object.status;
    let urgent = (&status.lent, &status.refused) != (&now.lent, &now.refused);
    let due = status != *now && !view.told.contains(block);
    let object = object.uid.clone();
    (urgent || due).then(|| Step::Tell { block: block.clone(), object, status })
}

fn status(ledger: &Ledger, view: View<'_>, block: &Block, holding: &Holding) -> IPBlockStatus {
    let rules = view.networks.get(&block.network);
    let space = rules.and_then(|rules| rules.space(Family::of(block.range.addr())));
    let lent =
        holding.lent.iter().map(|(address, object)| LentAddress { address: *address, block: object.clone() });
    let asking = requests(view).filter(|request| asked(ledger, request).is_some_and(|(one, _)| one == block));
    let refused = asking.filter(|request| holding.lent.get(&request.spec.cidr.addr()) != Some(&request.uid));
    let used: Vec<IpAddr> = ledger.used(block).map(|(address, _)| address).collect();
    let lost = ledger.used(block).filter(|(address, _)| !space.is_some_and(|space| space.contains(*address)));
    let draining = lost.filter_map(|(address, place)| {
        let pod = &ledger.leases().get(place)?.pod;
        Some(format!("{}/{} {address}", pod.namespace, pod.name))
    });
    IPBlockStatus {
        used: i32::try_from(used.len()).unwrap_or(i32::MAX),
        free: space.map_or(0, |space| i32::try_from(ledger.free(block, space)).unwrap_or(i32::MAX)),
        spare: space.map_or_else(Vec::new, |space| spans(ledger, block, holding, space)),
        lent: lent.collect(),
        refused: refused.map(|request| request.uid.clone()).take(MAX_STATUS_ADDRESSES).collect(),
        closed: holding.stage != Stage::Open,
        draining: draining.take(MAX_DRAINING_PODS).collect(),
    }
}

/// The first ranges of free addresses, as text.
fn spans(ledger: &Ledger, block: &Block, holding: &Holding, space: &Space) -> Vec<String> {
    if holding.stage != Stage::Open || block.is_single() {
        return Vec::new();
    }
    let used: BTreeSet<IpAddr> = ledger.used(block).map(|(address, _)| address).collect();
    let taken = |address: IpAddr| used.contains(&address) || holding.lent.contains_key(&address);
    let text = |(first, last): (IpAddr, IpAddr)| format!("{first}-{last}");
    space.free_spans(block.range, taken).take(MAX_SPARE_RANGES).map(text).collect()
}

/// The free addresses that the status of a block tells of. One without a status may have any.
pub fn spare(object: &Object, space: &Space) -> Vec<IpAddr> {
    let told = &object.status;
    if told.closed {
        return Vec::new();
    }
    if told.spare.is_empty() && told.used == 0 && told.free == 0 && told.lent.is_empty() {
        return space.free_spans(object.spec.cidr, |_| false).flat_map(each).collect();
    }
    let spans = told.spare.iter().filter_map(|text| {
        let (first, last) = text.split_once('-')?;
        Some((first.parse().ok()?, last.parse().ok()?))
    });
    let inside = |address: &IpAddr| object.spec.cidr.contains(address) && space.contains(*address);
    spans.flat_map(each).filter(inside).collect()
}

/// The addresses from one to another, never more than a block has.
fn each((first, last): (IpAddr, IpAddr)) -> Vec<IpAddr> {
    let (mut all, mut address) = (Vec::new(), first);
    while address <= last && all.len() < MAX_STATUS_ADDRESSES {
        all.push(address);
        address = super::ledger::following(address);
    }
    all
}

/// An address to borrow, and whom to ask: some free one of those that blocks of others tell of, another one for each seed.
pub fn candidate(
    objects: &[Object],
    space: &Space,
    me: &NodeRef,
    refused: &BTreeSet<IpAddr>,
    silent: &BTreeSet<Uid>,
    seed: u64,
) -> Option<(IpAddr, Object)> {
    let whole = |object: &&Object| object.spec.cidr.prefix_len() < object.spec.cidr.max_prefix_len();
    let singles: BTreeSet<IpAddr> =
        objects.iter().filter(|object| !whole(object)).map(|object| object.spec.cidr.addr()).collect();
    let asked =
        |object: &&Object| object.spec.holder.uid != me.uid && !silent.contains(&object.spec.holder.uid);
    let others = objects.iter().filter(whole).filter(asked);
    let mut all: Vec<(IpAddr, &Object)> = Vec::new();
    for object in others.filter(|object| Family::of(object.spec.cidr.addr()) == space.family()) {
        let free = spare(object, space);
        let open =
            free.into_iter().filter(|address| !singles.contains(address) && !refused.contains(address));
        all.extend(open.map(|address| (address, object)));
    }
    let place = usize::try_from(seed % u64::try_from(all.len()).ok().filter(|count| *count > 0)?).ok()?;
    all.get(place).map(|(address, object)| (*address, (*object).clone()))
}

/// The blocks of nodes that are gone for good, but for those that others have addresses of: these stay until they give
/// them back.
pub fn abandoned<'a>(
    objects: impl IntoIterator<Item = &'a Object> + Clone,
    gone: impl Fn(&NodeRef) -> bool,
) -> Vec<&'a Object> {
    let mut holders: BTreeMap<&Uid, &NodeRef> = BTreeMap::new();
    for object in objects.clone() {
        holders.insert(&object.uid, &object.spec.holder);
    }
    let used = |object: &Object| {
        let lent = object.status.lent.iter();
        // A borrower that is gone too gives nothing back.
        lent.filter_map(|lent| holders.get(&lent.block)).any(|holder| !gone(holder))
    };
    objects.into_iter().filter(|object| gone(&object.spec.holder) && !used(object)).collect()
}

/// How many addresses of a family a network has, out of the blocks that there are.
pub fn network_status<'a>(
    family: Family,
    space: Option<&Space>,
    length: u8,
    blocks: impl IntoIterator<Item = (&'a IPBlockSpec, &'a IPBlockStatus)>,
) -> IpFamilyStatus {
    let (mut used, mut shut, mut count) = (0_i64, 0_i64, 0_i32);
    for (spec, status) in blocks {
        if Family::of(spec.cidr.addr()) == family {
            let size = space.map_or(1, |space| space.addresses_in(spec.cidr));
            // Those of subnets that are gone do not lessen what is left.
            if size > 0 {
                used = used.saturating_add(status.used.into());
            }
            // Of one that gives nothing, nothing is free.
            if status.closed && space.is_some() {
                let lent = i64::try_from(status.lent.len()).unwrap_or(i64::MAX);
                let size = i64::try_from(size).unwrap_or(i64::MAX);
                shut =
                    shut.saturating_add(size.saturating_sub(lent).saturating_sub(status.used.into()).max(0));
            }
            count = count.saturating_add(1);
        }
    }
    let addresses = space.map_or(0, |space| i64::try_from(space.addresses()).unwrap_or(i64::MAX));
    IpFamilyStatus {
        block_length: length,
        addresses,
        used,
        free: addresses.saturating_sub(used).saturating_sub(shut).max(0),
        blocks: count,
    }
}
