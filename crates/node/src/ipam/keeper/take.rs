//! Taking blocks, and borrowing single addresses when none is left.

use std::{collections::BTreeSet, net::IpAddr};

use api::{digest::digest, ipblock};
use ipnet::IpNet;
use plan::ipam::{Block, Family, Object, Rules, Space, Stage, candidate};
use tokio::time::Instant;
use tracing::debug;

use super::{
    BELIEVED, BETWEEN_EVENTS, COLLISIONS, CROWDED, Created, Crowded, FIRST_WORD, Failure, IN_VAIN, Keeper,
    LISTED, Silent, TRIES, call,
};
use crate::{event::EventReason, ipam::Want};

impl Keeper {
    pub(super) async fn take(
        &mut self,
        network: &str,
        family: Family,
        missing: usize,
    ) -> Result<bool, Failure> {
        let Some(rules) = self.rules.get(network).cloned() else { return Ok(false) };
        let Some(space) = rules.space(family) else { return Ok(false) };
        let key = (network.to_owned(), family);
        let waiting = self.ipam.lock().wants.contains_key(&Want::Any(network.to_owned(), family));
        let full = self.full.contains_key(&key);
        let crowded = self.crowded.get(&key).is_some_and(|one| one.until > Instant::now());
        if full && (!waiting || crowded) {
            return Ok(false);
        }
        let mut listed = if full { Some(self.list(network, &rules).await?) } else { None };
        for _ in 0..TRIES {
            let Some(range) = self.choose(network, space) else {
                if listed.is_some() {
                    break;
                }
                // What was seen before may have been given back.
                listed = Some(self.list(network, &rules).await?);
                continue;
            };
            let block = Block { network: network.to_owned(), range };
            if let Created::Ours = self.create(&block, &rules.name, None).await? {
                self.ipam.metrics.taken.inc();
                self.tell_soon(block);
                return Ok(true);
            }
            self.known.entry(network.to_owned()).or_default().insert(range);
            if listed.is_none() {
                listed = Some(self.list(network, &rules).await?);
            }
        }
        self.full.insert(key, Instant::now() + BELIEVED);
        debug!(network = rules.name, ?family, "no block is left");
        // Blocks of an earlier network of this name are on their way out: no reason to say that all is used up.
        if waiting && self.earlier.contains(network) {
            self.full.remove(&(network.to_owned(), family));
            self.ipam.answer(Want::Any(network.to_owned(), family), earlier(&rules.name));
            return Ok(false);
        }
        match listed.filter(|_| waiting) {
            Some(listed) => self.borrow(network, &rules, space, listed, missing).await,
            None => Ok(false),
        }
    }

    /// Pods come in bursts: how a new block is used is told after the first of them.
    pub(super) fn tell_soon(&mut self, block: Block) {
        let now = Instant::now();
        let earlier = self.pace.tell.saturating_sub(FIRST_WORD);
        self.told.insert(block, now.checked_sub(earlier).unwrap_or(now));
    }

    /// A block that is not known to be taken, another one on each node.
    pub(super) fn choose(&mut self, network: &str, space: &Space) -> Option<IpNet> {
        let known = self.known.get(network);
        let held: BTreeSet<IpNet> =
            self.ipam.look(|ledger| ledger.of_network(network).map(|(block, _)| block.range).collect());
        self.tries += 1;
        let start = digest([self.me.uid.as_str(), network, &self.tries.to_string()]);
        let taken = |range: IpNet| held.contains(&range) || known.is_some_and(|known| known.contains(&range));
        space.free_block(u128::from(start), taken)
    }

    /// Asks others for addresses. What they have to spare is listed, and one that was listed a moment ago may be somebody's
    /// by now: after a few of these the list is too old, and the next one is asked for a moment later.
    pub(super) async fn borrow(
        &mut self,
        network: &str,
        rules: &Rules,
        space: &Space,
        listed: Vec<Object>,
        missing: usize,
    ) -> Result<bool, Failure> {
        let family = space.family();
        let (mut asked, mut collisions) = (0, 0);
        while asked < missing.min(TRIES) && collisions < COLLISIONS {
            let Some((address, around)) = self.lendable(network, space, &listed) else { break };
            let block = Block { network: network.to_owned(), range: address.into() };
            // Tried once only, whatever comes of it: what the list says of it is old by then.
            self.refused.insert((network.to_owned(), address), Instant::now() + IN_VAIN);
            if let Created::Ours = self.create(&block, &rules.name, Some(around.spec.holder)).await? {
                self.ipam.metrics.borrowed.inc();
                self.tell_soon(block.clone());
                self.asked.insert(block, Instant::now());
                asked += 1;
            } else {
                collisions += 1;
            }
        }
        let key = (network.to_owned(), family);
        if asked >= missing {
            self.crowded.remove(&key);
            return Ok(true);
        }
        let coming = |block: &Block, stage| stage == Stage::Asked && Family::of(block.range.addr()) == family;
        let coming =
            self.ipam.look(|ledger| ledger.of_network(network).any(|(block, one)| coming(block, one.stage)));
        let tried =
            self.refused.keys().any(|(uid, address)| uid == network && Family::of(*address) == family);
        if tried || coming {
            self.wait_in_the_crowd(key);
        } else {
            self.crowded.remove(&key);
            let holders: BTreeSet<String> = listed.iter().map(|one| one.spec.holder.uid.clone()).collect();
            // Others who come for an address in the same moment need no list of their own.
            let now = Instant::now();
            let listing = self.lists.entry(network.to_owned()).or_insert((now, Vec::new()));
            if listing.0 + LISTED <= now || listing.0 == now {
                *listing = (now, listed);
            }
            self.exhausted(network, rules, family, &holders);
        }
        Ok(asked > 0)
    }

    /// An address that somebody else may lend, and the block that it is in.
    fn lendable(&mut self, network: &str, space: &Space, listed: &[Object]) -> Option<(IpAddr, Object)> {
        let now = Instant::now();
        let tried = self.refused.keys().filter(|(uid, _)| uid == network);
        let tried = tried.map(|(_, address)| *address).collect();
        let silent = self.silent.iter().filter(|(_, one)| one.until > now).map(|(uid, _)| uid.clone());
        let silent = silent.collect();
        self.tries += 1;
        let seed = digest([self.me.uid.as_str(), network, &self.tries.to_string()]);
        candidate(listed, space, &self.me, &tried, &silent, seed)
    }

    /// Each node waits a little longer every time, and none as long as the others.
    fn wait_in_the_crowd(&mut self, key: (String, Family)) {
        let (first, longest) = CROWDED;
        let pause = self.crowded.get(&key).map_or(first, |one| (one.pause * 2).min(longest));
        let spread = digest([self.me.uid.as_str(), &key.0, &self.tries.to_string()]) % 100;
        let spread = u32::try_from(spread).unwrap_or(0);
        self.crowded.insert(key, Crowded { until: Instant::now() + pause * (50 + spread) / 100, pause });
    }

    pub(super) fn exhausted(
        &mut self,
        network: &str,
        rules: &Rules,
        family: Family,
        holders: &BTreeSet<String>,
    ) {
        let which = match family {
            Family::V4 => "IPv4",
            Family::V6 => "IPv6",
        };
        let mut why = format!(
            "network {:?} has no free {which} address left: add a subnet to spec.ipam.subnets of the BridgeNetwork, or \
            delete pods that use it",
            rules.name
        );
        let now = Instant::now();
        let mut silent = self.silent.iter().filter(|(uid, one)| one.until > now && holders.contains(*uid));
        if let Some((_, Silent { node, .. })) = silent.next() {
            why = format!(
                "{why}; node {node} may have some and does not answer: is it up? If it is gone for good, delete its Node"
            );
        }
        self.ipam.metrics.exhausted.inc();
        let last = self.events_told.get(network);
        if last.is_none_or(|last| *last + BETWEEN_EVENTS <= now) {
            self.events_told.insert(network.to_owned(), now);
            self.events.record(&rules.name, network, EventReason::AddressesExhausted, why.clone());
        }
        self.ipam.answer(Want::Any(network.to_owned(), family), why);
    }

    pub(super) async fn take_address(&mut self, network: &str, address: IpAddr) -> Result<bool, Failure> {
        let Some(rules) = self.rules.get(network).cloned() else { return Ok(false) };
        let space = rules.space(Family::of(address));
        let Some(range) = space.and_then(|space| space.block_of(address)) else { return Ok(false) };
        let block = Block { network: network.to_owned(), range };
        let held = self.ipam.look(|ledger| Some(ledger.holding_of(network, address)?.1.stage));
        if let Some(stage @ (Stage::Doubtful | Stage::Lost)) = held {
            let state =
                if stage == Stage::Lost { "was taken from this node" } else { "is not known in full" };
            let why = format!(
                "address {address} of network {:?} lies in a block of this node that {state}, so it may be in use: ask \
                for another",
                rules.name
            );
            self.ipam.answer(Want::Address(network.to_owned(), address), why);
            return Ok(false);
        }
        let whole = self.ipam.look(|ledger| ledger.holdings().contains_key(&block));
        if !whole && let Created::Ours = self.create(&block, &rules.name, None).await? {
            self.ipam.metrics.taken.inc();
            self.tell_soon(block);
            return Ok(true);
        }
        let single = Block { network: network.to_owned(), range: address.into() };
        let around = call(self.api.get_opt(&ipblock::name(&rules.name, range))).await?;
        if around.as_ref().is_some_and(|around| around.spec.network_uid != network) {
            let want = Want::Address(network.to_owned(), address);
            self.ipam.answer(want, earlier(&rules.name));
            return Ok(false);
        }
        let holder = around.map(|around| around.spec.holder);
        let in_vain = self.refused.contains_key(&(network.to_owned(), address));
        let want = Want::Address(network.to_owned(), address);
        if single == block || in_vain || whole {
            let node =
                holder.map_or_else(|| "another node".to_owned(), |holder| format!("node {}", holder.node));
            self.ipam
                .answer(want, format!("address {address} of network {:?} belongs to {node}", rules.name));
            return Ok(false);
        }
        // It has just gone: looked at again.
        let Some(holder) = holder else { return Ok(true) };
        if let Created::Ours = self.create(&single, &rules.name, Some(holder)).await? {
            self.ipam.metrics.borrowed.inc();
            self.tell_soon(single.clone());
            self.asked.insert(single, Instant::now());
            return Ok(true);
        }
        let found = call(self.api.get_opt(&ipblock::name(&rules.name, single.range))).await?;
        let node = found.map_or_else(String::new, |found| format!(" node {}", found.spec.holder.node));
        self.ipam.answer(want, format!("address {address} of network {:?} is lent to{node}", rules.name));
        Ok(false)
    }
}

fn earlier(network: &str) -> String {
    format!("address blocks of an earlier network {network:?} are still being freed: tried again")
}
