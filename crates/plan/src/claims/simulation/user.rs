//! The user: creates, deletes and changes virtual machines, networks and claims.

use std::sync::Arc;

use api::{
    IPAMClaimStatus,
    ipamclaim::{ClaimAnnotations, FINALIZER, RecordedAddresses},
};

use super::{
    SplitMix64,
    kubevirt::network,
    store::{Deletion, Vm, World, key, nad},
};
use crate::claims::{ClaimState, VmFacts, VmiFacts, names};

const NAMES: [&str; 3] = ["vm1", "vm2", "vm3"];

pub fn act(world: &mut World, random: &mut SplitMix64) {
    let name: Arc<str> = random.pick(&NAMES).unwrap_or("vm1").into();
    match random.below(16) {
        0..=3 => create(world, random, &name),
        4 => delete(world, random, &name),
        5..=6 => set_running(world, &name),
        7 => hot_plug(world, random, &name),
        8 => unplug(world, random, &name),
        9 => move_network(world, random, &name),
        10 => {
            world.change(|objects| {
                let config = objects.nads.get_mut(&nad("blue")).unwrap();
                config.persistent = !config.persistent;
            });
        }
        11..=12 => change_claim(world, random),
        13 => restore(world, random, &name),
        14 => wipe_annotation(world, random),
        _ => delete_lone(world, &name),
    }
}

fn create(world: &mut World, random: &mut SplitMix64, name: &Arc<str>) {
    if world.live.vms.contains_key(name) || world.live.vmis.contains_key(name) {
        return;
    }
    let uid = world.uid();
    let chosen = world.networks.clone().into_iter().filter(|_| random.one_in(2));
    let networks: Vec<_> = chosen.map(|(name, nad)| network(&name, &nad)).collect();
    if random.one_in(5) {
        world.lives.insert(uid.clone(), uid.clone());
        let vmi = VmiFacts {
            uid,
            controller: None,
            deleting: false,
            finished: false,
            active_pods: 0,
            networks,
            addresses: None,
        };
        world.change(|objects| objects.vmis.insert(name.clone(), vmi));
        return;
    }
    let facts = VmFacts { uid, deleting: false, networks };
    world.change(|objects| {
        objects.vms.insert(name.clone(), Vm { facts, running: true, deletion: None });
    });
}

fn delete(world: &mut World, random: &mut SplitMix64, name: &Arc<str>) {
    let kinds = [Deletion::Background, Deletion::Foreground, Deletion::Orphan];
    let kind = random.pick(&kinds).unwrap_or(Deletion::Background);
    world.change(|objects| {
        if let Some(vm) = objects.vms.get_mut(name).filter(|vm| vm.deletion.is_none()) {
            (vm.deletion, vm.facts.deleting) = (Some(kind), true);
        }
    });
}

/// Deletes an instance, whether a VirtualMachine controls it or not.
fn delete_lone(world: &mut World, name: &Arc<str>) {
    if world.live.vmis.contains_key(name) {
        world.change(|objects| objects.vmis.get_mut(name).unwrap().deleting = true);
    }
}

fn set_running(world: &mut World, name: &Arc<str>) {
    world.change(|objects| {
        if let Some(vm) = objects.vms.get_mut(name) {
            vm.running = !vm.running;
        }
    });
}

fn hot_plug(world: &mut World, random: &mut SplitMix64, name: &Arc<str>) {
    let Some((logical, nad)) = random.pick(&world.networks) else { return };
    world.change(|objects| {
        let Some(vm) = objects.vms.get_mut(name).filter(|vm| vm.deletion.is_none()) else { return };
        if !vm.facts.networks.iter().any(|one| one.name == logical) {
            vm.facts.networks.push(network(&logical, &nad));
        }
    });
}

fn unplug(world: &mut World, random: &mut SplitMix64, name: &Arc<str>) {
    let Some((logical, _)) = random.pick(&world.networks) else { return };
    world.change(|objects| {
        let Some(vm) = objects.vms.get_mut(name) else { return };
        for one in vm.facts.networks.iter_mut().filter(|one| one.name == logical) {
            one.absent = true;
        }
    });
}

/// Moves an interface of a machine to the other network.
fn move_network(world: &mut World, random: &mut SplitMix64, name: &Arc<str>) {
    let to = random.pick(&[nad("blue"), nad("red")]).unwrap_or_else(|| nad("blue"));
    world.change(|objects| {
        let Some(vm) = objects.vms.get_mut(name) else { return };
        if let Some(one) = vm.facts.networks.first_mut() {
            one.nad = to;
        }
    });
}

/// Breaks the networks annotation of a pod. Its interfaces stay.
fn wipe_annotation(world: &mut World, random: &mut SplitMix64) {
    let pods: Vec<_> = world.live.pods.keys().cloned().collect();
    let Some(key) = random.pick(&pods) else { return };
    world.change(|objects| objects.pods.get_mut(&key).unwrap().elements = Box::default());
}

/// Creates a claim from a backup, whose annotation may name an address that is in use.
fn restore(world: &mut World, random: &mut SplitMix64, name: &str) {
    let Some((logical, nad)) = random.pick(&world.networks) else { return };
    let key = key(&names::compose_key(name, &logical));
    if world.live.claims.contains_key(&key) {
        return;
    }
    let (uid, version) = (world.uid(), world.version());
    let ips = vec![format!("10.0.0.{}/28", random.below(18)).parse().unwrap()];
    let claim = ClaimState {
        key: key.clone(),
        uid,
        version,
        created: world.now(),
        deleting: false,
        owner: None,
        owner_count: 0,
        finalizers: vec![FINALIZER.to_owned()],
        label: Some(name.into()),
        network: nad.name.as_str().into(),
        interface: network(&logical, &nad).pod_interface,
        annotations: ClaimAnnotations {
            managed: random.one_in(2),
            keep: false,
            recorded: Some(RecordedAddresses { uid: "before".to_owned(), ips }),
        },
        status: IPAMClaimStatus::default(),
    };
    world.change(|objects| objects.claims.insert(key, claim));
}

/// Clears, edits or deletes a claim by hand.
fn change_claim(world: &mut World, random: &mut SplitMix64) {
    let keys: Vec<_> = world.live.claims.keys().cloned().collect();
    let Some(key) = random.pick(&keys) else { return };
    let uid = world.live.claims[&key].uid.clone();
    let live = world.live.clone();
    let of_claim = live.blocks.values().flat_map(|block| &block.object.status.claims);
    let reserved: Vec<_> = of_claim.filter(|claimed| claimed.uid == uid).collect();
    match random.below(4) {
        0 => {
            world.given_up.insert(uid);
            return world.delete_claim(&key);
        }
        1 => {
            // A claim that is edited before it has an address is replaced.
            if reserved.is_empty() {
                world.given_up.insert(uid);
            }
            let version = world.version();
            return world.change(|objects| {
                let claim = objects.claims.get_mut(&key).unwrap();
                (claim.network, claim.version) = ("green".into(), version);
            });
        }
        _ => {}
    }
    let count = |ipv4| reserved.iter().filter(|claimed| claimed.address.is_ipv4() == ipv4).count();
    // With two reservations and no status, nothing says which one the machine had.
    if count(true) > 1 || count(false) > 1 || world.live.claims[&key].deleting {
        return;
    }
    // A part of its addresses would be served as it is written.
    let own = reserved.iter().any(|claimed| claimed.address.to_string() == "10.0.0.3");
    let edit = !own && !reserved.is_empty() && random.one_in(2);
    let version = world.version();
    world.change(|objects| {
        let claim = objects.claims.get_mut(&key).unwrap();
        claim.status.ips = if edit { vec!["10.0.0.3/28".to_owned()] } else { Vec::new() };
        claim.version = version;
    });
}
