//! Nodes: they hold blocks, lease addresses to ordinary pods, borrow and lend.

use std::{collections::BTreeMap, net::IpAddr};

use api::{
    IPBlockStatus,
    ipblock::{HolderRef, LentAddress},
};

use super::{
    SplitMix64,
    store::{World, nodes},
};
use crate::{
    claims::lend::{self, LenderAnswer},
    ipam::{BlockGrid, ObservedIpBlock},
    network::BlockState,
};

pub fn act(world: &mut World, random: &mut SplitMix64) {
    for node in nodes() {
        answer(world, &node);
    }
    let Some(node) = random.pick(&nodes()) else { return };
    if world.settling {
        world.down.clear();
    } else if random.one_in(if world.down.contains(&node.node) { 30 } else { 60 })
        && !world.down.remove(&node.node)
    {
        world.down.insert(node.node.clone());
    }
    if world.settling || random.one_in(2) {
        report(world, &node.node);
    }
    let networks: Vec<String> = world.pools.keys().cloned().collect();
    let Some(network) = random.pick(&networks) else { return };
    match random.below(4) {
        0..=1 if !world.settling => lease(world, random, &node, &network),
        2 if !world.settling => free(world, random, &node),
        _ => give_back(world, &node),
    }
}

/// Writes the NodeNetwork: the ADDs whose addresses it lists succeed.
fn report(world: &mut World, node: &str) {
    if world.down.contains(node) {
        return;
    }
    let listed = world.sandboxes.iter_mut().filter(|sandbox| sandbox.node == node).flat_map(|sandbox| {
        sandbox.running = true;
        let network = sandbox.network.clone();
        sandbox.addresses.iter().map(move |address| (network.clone(), *address))
    });
    world.reports.insert(node.to_owned(), listed.collect());
}

fn own<'a>(world: &'a World, node: &'a HolderRef) -> impl Iterator<Item = (&'a String, &'a BlockState)> {
    world.live.blocks.iter().filter(move |(_, block)| block.object.spec.holder == *node)
}

fn grid<'a>(world: &'a World, block: &ObservedIpBlock) -> &'a BlockGrid {
    let grids = &world.pools[&block.spec.network_uid].grids;
    grids.iter().find(|grid| grid.family().bits() == block.spec.cidr.max_prefix_len()).unwrap()
}

fn is_leased(world: &World, block: &ObservedIpBlock, address: IpAddr) -> bool {
    world.leases.contains_key(&(block.spec.network_uid.clone(), address))
}

/// Lends free addresses, and reports.
fn answer(world: &mut World, node: &HolderRef) {
    let whole: Vec<(String, BlockState)> = own(world, node)
        .filter(|(_, block)| block.object.spec.lender.is_none())
        .map(|(name, block)| (name.clone(), block.clone()))
        .collect();
    for (name, block) in whole {
        let object = &block.object;
        let of_network = |one: &&BlockState| {
            one.object.spec.network_uid == object.spec.network_uid && one.object.uid != object.uid
        };
        let singles = || world.live.blocks.values().filter(of_network).map(|one| &one.object);
        let lent = object.status.lent.iter();
        let lent = lent.filter(|lent| singles().any(|single| single.uid == lent.block));
        let mut lent: BTreeMap<IpAddr, String> = lent.map(|it| (it.address, it.block.clone())).collect();
        let mut refused = Vec::new();
        for single in singles() {
            let address = single.spec.cidr.addr();
            let asks = single.spec.lender.as_ref() == Some(node) && object.spec.cidr.contains(&address);
            if !asks || lent.get(&address) == Some(&single.uid) {
                continue;
            }
            if lent.contains_key(&address) || is_leased(world, object, address) {
                refused.push(single.uid.clone());
            } else {
                lent.insert(address, single.uid.clone());
            }
        }
        let taken = |address| lent.contains_key(&address) || is_leased(world, object, address);
        let spans = grid(world, object).free_spans(object.spec.cidr, taken);
        let spare: Vec<String> = spans.map(|(first, last)| format!("{first}-{last}")).collect();
        let used = world.leases.keys().filter(|(network, address)| {
            *network == object.spec.network_uid && object.spec.cidr.contains(address)
        });
        let status = IPBlockStatus {
            used: i32::try_from(used.count()).unwrap(),
            free: i32::from(!spare.is_empty()),
            spare,
            lent: lent.into_iter().map(|(address, block)| LentAddress { address, block }).collect(),
            refused,
            ..IPBlockStatus::default()
        };
        if status != object.status {
            let version = world.version();
            world.change(|objects| {
                let block = objects.blocks.get_mut(&name).unwrap();
                (block.object.status, block.version) = (status, version);
            });
        }
    }
}

/// Whether a node may use a block: it is a whole one, or its lender granted it.
fn is_usable(world: &World, block: &ObservedIpBlock) -> LenderAnswer {
    let of_network = world.live.blocks.values();
    lend::lender_answer(block, of_network.filter(|one| one.object.spec.network_uid == block.spec.network_uid))
}

/// Leases an address, or acquires what a lease needs.
fn lease(world: &mut World, random: &mut SplitMix64, node: &HolderRef, network: &str) {
    let found = own(world, node).filter(|(_, block)| block.object.spec.network_uid == network).find_map(
        |(_, block)| {
            let object = &block.object;
            let lent = |address| object.status.lent.iter().any(|lent| lent.address == address);
            let usable = is_usable(world, object) == LenderAnswer::Granted;
            let taken = |address| is_leased(world, object, address) || lent(address);
            grid(world, object).free_in(object.spec.cidr, None, taken).filter(|_| usable)
        },
    );
    if let Some(address) = found {
        world.leases.insert((network.to_owned(), address), node.uid.clone());
        return;
    }
    let pool = world.pools[network].clone();
    let Some(grid) = random.pick(&pool.grids) else { return };
    let taken = |range| world.live.blocks.contains_key(&api::ipblock::name(&pool.name, range));
    if let Some(range) = grid.free_block(random.below(7) as u128, taken) {
        world.create_block(network, range, node.clone(), None);
        return;
    }
    let ours = world.live.blocks.values().map(|block| &block.object);
    let ours = ours.filter(|it| it.spec.network_uid == network && it.spec.holder.is_claims());
    let whole = ours.filter(|it| it.spec.lender.is_none());
    let spare =
        whole.flat_map(|it| &it.status.spare).filter_map(|range| range.split('-').next()?.parse().ok());
    let spare: Vec<IpAddr> = spare.collect();
    if let Some(address) = random.pick(&spare) {
        world.create_block(network, address.into(), node.clone(), Some(HolderRef::claims()));
    }
}

fn free(world: &mut World, random: &mut SplitMix64, node: &HolderRef) {
    let ours: Vec<_> =
        world.leases.iter().filter(|(_, uid)| **uid == node.uid).map(|(at, _)| at.clone()).collect();
    if let Some(at) = random.pick(&ours) {
        world.leases.remove(&at);
    }
}

/// Deletes an empty block, or a borrowed address that is refused or not used.
fn give_back(world: &mut World, node: &HolderRef) {
    let empty = own(world, node).find(|(_, block)| {
        let object = &block.object;
        let leased = world.leases.keys().any(|(network, address)| {
            *network == object.spec.network_uid && object.spec.cidr.contains(address)
        });
        !leased && object.status.lent.is_empty()
    });
    if let Some(name) = empty.map(|(name, _)| name.clone()) {
        world.change(|objects| objects.blocks.remove(&name));
    }
}
