//! What must hold.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use api::ipamclaim::FINALIZER;

use super::{
    leader::{self, View},
    store::{NAMESPACE, World},
};
use crate::{
    claims::{ClaimSchema, ClaimStep, machine, publish},
    ipam::Family,
};

/// The reservations by network and address, each with claim and UID.
fn reservations(world: &World) -> BTreeMap<(String, IpAddr), (String, String)> {
    let mut all = BTreeMap::new();
    for (name, block) in &world.live.blocks {
        for claimed in &block.object.status.claims {
            assert!(
                block.object.spec.holder.is_claims() && block.object.spec.cidr.contains(&claimed.address)
            );
            let at = (block.object.spec.network_uid.clone(), claimed.address);
            let before = all.insert(at, (claimed.claim.clone(), claimed.uid.clone()));
            assert_eq!(before, None, "{name}: {} is reserved twice", claimed.address);
        }
    }
    all
}

pub fn always(world: &World) {
    claims_stay(world);
    let reserved = reservations(world);
    for (at, node) in &world.leases {
        assert!(!reserved.contains_key(at), "{at:?} is leased on {node} and reserved for {:?}", reserved[at]);
    }
    for (name, block) in world.live.blocks.iter().filter(|(_, block)| block.object.spec.holder.is_claims()) {
        let claims = block.object.status.claims.iter().map(|claimed| claimed.address);
        let lent: BTreeSet<IpAddr> = block.object.status.lent.iter().map(|lent| lent.address).collect();
        assert!(!claims.clone().any(|address| lent.contains(&address)), "{name} lends what it reserves");
    }
    let mut lives: BTreeMap<(&str, IpAddr), &str> = BTreeMap::new();
    for sandbox in world.sandboxes.iter().filter(|sandbox| sandbox.running) {
        for address in &sandbox.addresses {
            let life = lives.entry((&sandbox.network, *address)).or_insert(&sandbox.life);
            assert_eq!(*life, sandbox.life, "two machines have {address}: {sandbox:?}");
            let at = (sandbox.network.clone(), *address);
            assert!(reserved.contains_key(&at), "{sandbox:?} has {address}, which is not reserved");
        }
    }
}

/// A VirtualMachine has its claims, also while it is stopped, unless the user gave them up.
fn claims_stay(world: &World) {
    for ((life, interface), (uid, _)) in &world.served {
        let vm = world.live.vms.values().find(|vm| vm.facts.uid == *life && vm.deletion.is_none());
        let Some(vm) = vm.filter(|_| !world.given_up.contains(uid)) else { continue };
        let plugged = vm.facts.networks.iter().any(|it| it.pod_interface == *interface && !it.absent);
        let claim = world.live.claims.values().find(|claim| claim.uid == *uid && !claim.deleting);
        assert!(!plugged || claim.is_some(), "{life} has lost the claim {uid} of {interface}");
    }
}

pub fn at_rest(world: &World) {
    let live = &world.live;
    for ((network, address), (claim, uid)) in reservations(world) {
        let exists = live.claims.values().any(|one| one.uid == uid);
        let shown = live.pods.values().any(|pod| pod.shows(address) || pod.references(&key(&claim)));
        assert!(exists || shown, "{address} of {network} is reserved for {claim} ({uid}), which is gone");
    }
    for claim in live.claims.values() {
        let used = live.pods.values().any(|pod| pod.references(&claim.key));
        let stuck = claim.deleting && claim.finalizers.iter().any(|one| one == FINALIZER) && !used;
        assert!(!stuck, "{} waits for its finalizer", claim.key);
        let owner = claim.owner.as_ref();
        let exists = owner.is_none_or(|owner| {
            let vm = live.vms.values().any(|vm| vm.facts.uid == owner.uid);
            vm || live.vmis.values().any(|vmi| vmi.uid == owner.uid)
        });
        // A claim that was deleted stays while a pod of the instance that its machine left behind references it.
        assert!(exists || claim.deleting && used, "{} of {owner:?} outlives its owner", claim.key);
    }
    let view = View::live(world);
    for name in view.machines() {
        let plan = view.machine(world, &name, machine::plan);
        assert_eq!(plan.steps, Vec::<ClaimStep>::new(), "machine {name}");
    }
    let resolutions = view.resolutions(world);
    for uid in world.pools.keys() {
        let plan = view.network(world, uid, &resolutions, &leader::NetworkMemory::default(), 0);
        assert!(plan.is_empty(), "network {uid}: {plan:?}");
        for (claim, reserved) in &plan.reserved {
            let claim = live.claims.values().find(|one| one.uid == *claim).unwrap();
            let pods = view.pods_of(claim);
            let write = publish::status(claim, Ok(reserved), &pods, ClaimSchema::default(), world.now());
            assert_eq!(write, None, "{} is not published", claim.key);
        }
        for (claim, failure) in &plan.failed {
            // A claim from a backup can request an address that another one has, or that no subnet has.
            let claims = live.claims.values().find(|one| one.uid == *claim);
            if claims.is_some_and(|one| one.annotations.recorded.is_some()) {
                continue;
            }
            assert_eq!(failure.reason.as_str(), "SubnetExhausted", "{claim}: {}", failure.message);
            assert!(is_exhausted(world, uid), "{claim} failed: {}; {:#?}", failure.message, live.blocks);
        }
        let wanted = view.wanted(uid, &resolutions);
        for one in wanted {
            let known = plan.reserved.contains_key(&one.uid) || plan.failed.contains_key(&one.uid);
            assert!(known, "{} is pending: {:#?}", one.claim, live.blocks);
        }
    }
    for pod in live.pods.values().filter(|pod| !pod.deleting) {
        let vmi = pod.controller.as_ref().and_then(|owner| live.vmis.get(&owner.name)).unwrap();
        for element in pod.elements.iter().filter(|element| element.claim.is_some()) {
            let network =
                vmi.networks.iter().find(|it| Some(&it.pod_interface) == element.interface.as_ref());
            // A pod on the NAD before waits for the restart of its machine.
            if network.is_none_or(|network| network.nad != element.nad) {
                continue;
            }
            let claim = element.claim.as_ref().and_then(|name| live.claims.get(&super::store::key(name)));
            let attached = pod.attached.iter().any(|it| Some(&it.interface) == element.interface.as_ref());
            let waits = claim.is_none_or(|claim| claim.status.ips.is_empty() || claim.deleting);
            assert!(attached || waits, "{pod:#?} has no addresses: {vmi:#?} {claim:#?}");
            assert!(claim.is_some(), "{pod:#?} references no claim: {vmi:#?} {:#?}", live.nads);
        }
    }
}

fn key(claim: &str) -> crate::claims::ObjectKey {
    let key = crate::claims::ObjectKey::parse(claim).unwrap();
    assert_eq!(&*key.namespace, NAMESPACE);
    key
}

/// Whether all addresses of a family are in use.
fn is_exhausted(world: &World, uid: &str) -> bool {
    let reserved = reservations(world);
    Family::ALL.iter().any(|family| {
        let Some(grid) = world.pools[uid].grid(*family) else { return false };
        let of_network = |(network, address): &&(String, IpAddr)| {
            network == uid && Family::of(*address) == *family && grid.contains(*address)
        };
        let used =
            reserved.keys().filter(of_network).count() + world.leases.keys().filter(of_network).count();
        u128::try_from(used).unwrap() >= grid.addresses()
    })
}
