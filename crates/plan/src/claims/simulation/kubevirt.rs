//! KubeVirt, the garbage collector of Kubernetes, the mutating webhook and the CNI ADD of the nodes.

use std::{net::IpAddr, sync::Arc};

use api::{
    digest::digest,
    ipamclaim::CLAIM_KEY,
    nad::NadIpam,
    selection::{NadRef, NetworkSelection},
};
use serde_json::{Value, json};

use super::{
    SplitMix64,
    store::{Deletion, NAMESPACE, SandboxAddresses, World, key, node_of},
};
use crate::claims::{
    ClaimOptions, ClaimPod, ClaimState, MachineNetwork, MutateInput, NadLookup, ObjectKey, OwnerKind,
    OwnerRef, PodElement, VmiFacts, mutate,
    serve::{self, ServeInput},
    validate,
};
use crate::ipam::ObservedIpBlock;

pub fn network(name: &str, nad: &NadRef) -> MachineNetwork {
    MachineNetwork {
        name: name.into(),
        nad: nad.clone(),
        pod_interface: format!("pod{:011x}", digest([name]) & 0xfff_ffff_ffff).into(),
        absent: false,
        in_status: false,
    }
}

pub fn act(world: &mut World, random: &mut SplitMix64) {
    match random.below(10) {
        0 => start_instances(world),
        1 => start_pods(world, random),
        2 => update_instances(world),
        3 => update_pods(world),
        4..=5 => attach(world, random),
        6 => end_pods(world, random),
        7 => end_instances(world),
        8 if !world.settling => migrate(world, random),
        _ => collect_garbage(world, random),
    }
}

/// What happens in time without further causes.
pub fn finish(world: &mut World) {
    let pods: Vec<ObjectKey> = world.live.pods.keys().cloned().collect();
    for pod in pods {
        world.show(&pod);
    }
}

fn start_instances(world: &mut World) {
    for (name, vm) in world.live.clone().vms.iter().filter(|(_, vm)| vm.running && vm.deletion.is_none()) {
        if world.live.vmis.contains_key(name) {
            continue;
        }
        let networks = vm.facts.networks.iter().filter(|one| !one.absent).cloned().collect();
        let (kind, uid) = (OwnerKind::VirtualMachine, world.uid());
        world.lives.insert(uid.clone(), vm.facts.uid.clone());
        let vmi = VmiFacts {
            uid,
            controller: Some(OwnerRef { kind, name: name.clone(), uid: vm.facts.uid.clone() }),
            deleting: false,
            finished: false,
            active_pods: 0,
            networks,
            addresses: None,
        };
        world.change(|objects| objects.vmis.insert(name.clone(), vmi));
    }
}

fn launchers(world: &World, vmi: &str) -> Vec<ClaimPod> {
    world.live.pods.values().filter(|pod| pod.is_launcher_of(vmi)).cloned().collect()
}

fn start_pods(world: &mut World, random: &mut SplitMix64) {
    for (name, vmi) in &world.live.clone().vmis {
        if !vmi.deleting && launchers(world, &vmi.uid).is_empty() && !random.one_in(3) {
            create_pod(world, name, vmi);
        }
    }
}

/// Creates a launcher; the webhooks add the references and check them.
fn create_pod(world: &mut World, name: &Arc<str>, vmi: &VmiFacts) {
    let uid = world.uid();
    let (kind, controller) = (OwnerKind::VirtualMachineInstance, vmi.uid.clone());
    let mut pod = ClaimPod {
        key: ObjectKey::new(NAMESPACE, format!("virt-launcher-{name}-{uid}")),
        uid,
        created: world.now(),
        deleting: false,
        launcher: true,
        controller: Some(OwnerRef { kind, name: name.clone(), uid: controller }),
        elements: Box::default(),
        attached: Box::default(),
        primary: Box::default(),
        has_status: false,
    };
    admit(world, name, vmi, &mut pod, None);
    world.change(|objects| objects.pods.insert(pod.key.clone(), pod));
}

/// Gives a launcher the elements that KubeVirt writes for the instance, as the webhooks admit them. `old` are those of the
/// stored pod.
fn admit(world: &World, name: &str, vmi: &VmiFacts, pod: &mut ClaimPod, old: Option<&[PodElement]>) {
    let written = vmi.networks.iter().filter(|one| !one.absent).map(|network| PodElement {
        interface: Some(network.pod_interface.clone()),
        nad: network.nad.clone(),
        claim: None,
    });
    let written = annotation(&written.collect::<Vec<_>>());
    let old = old.map(annotation);
    let launchers = launchers(world, &vmi.uid);
    let claims = |name: &str| world.live.claims.get(&key(name)).cloned();
    let mutated = mutate::references(&MutateInput {
        namespace: NAMESPACE,
        annotation: &written,
        old_annotation: old.as_deref(),
        vmi,
        vmi_name: name,
        launchers: &launchers.iter().collect::<Vec<_>>(),
        nads: &|at| world.live.nads.get(at).map_or(NadLookup::Absent, |it| NadLookup::Found(it.clone())),
        claims: &claims,
        options: ClaimOptions::default(),
    });
    let admitted = mutated.unwrap().unwrap_or(written);
    let elements = NetworkSelection::parse(Some(&admitted)).entries.into_iter().map(|entry| {
        let element = entry.element.unwrap();
        PodElement {
            interface: element.interface.as_ref().map(|name| name.as_str().into()),
            nad: element.reference(NAMESPACE),
            claim: element.ipam_claim.map(Into::into),
        }
    });
    pod.elements = elements.collect();
    assert_eq!(validate::references(pod, Some(vmi), &claims), Ok(()), "rejected after the mutation");
}

fn annotation(elements: &[PodElement]) -> String {
    let element = |PodElement { interface, nad, claim }: &PodElement| {
        let mut element =
            json!({"name": nad.name, "namespace": nad.namespace, "interface": interface.as_deref()});
        if let Some(claim) = claim {
            element[CLAIM_KEY] = json!(&**claim);
        }
        element
    };
    elements.iter().map(element).collect::<Value>().to_string()
}

/// Applies the template of a VirtualMachine to its instance: hot-plug, unplug and another NAD.
fn update_instances(world: &mut World) {
    for (name, vm) in &world.live.clone().vms {
        let controlled = |vmi: &&VmiFacts| vmi.controller.as_ref().is_some_and(|it| it.uid == vm.facts.uid);
        let Some(vmi) = world.live.vmis.get(name).filter(controlled) else {
            // Without an instance, an absent interface goes at once.
            if vm.facts.networks.iter().any(|one| one.absent) {
                world.change(|objects| {
                    objects.vms.get_mut(name).unwrap().facts.networks.retain(|one| !one.absent);
                });
            }
            continue;
        };
        let mut networks = vmi.networks.clone();
        for wanted in &vm.facts.networks {
            match networks.iter_mut().find(|one| one.name == wanted.name) {
                Some(one) => (one.absent, one.nad) = (wanted.absent, wanted.nad.clone()),
                None if !wanted.absent => networks.push(wanted.clone()),
                None => {}
            }
        }
        let pods = launchers(world, &vmi.uid);
        for one in &mut networks {
            let plugged = |pod: &ClaimPod| {
                pod.elements.iter().any(|element| element.interface.as_ref() == Some(&one.pod_interface))
            };
            one.in_status = pods.iter().any(plugged);
        }
        networks.retain(|one| !one.absent || one.in_status);
        let gone = |one: &MachineNetwork| one.absent && !networks.iter().any(|it| it.name == one.name);
        let template_changes = vm.facts.networks.iter().any(gone);
        if networks != vmi.networks || template_changes {
            world.change(|objects| {
                objects.vms.get_mut(name).unwrap().facts.networks.retain(|one| !gone(one));
                objects.vmis.get_mut(name).unwrap().networks = networks.clone();
            });
        }
    }
}

/// Adds hot-plugged elements to the launchers, and removes unplugged ones.
fn update_pods(world: &mut World) {
    for (name, vmi) in &world.live.clone().vmis {
        for pod in launchers(world, &vmi.uid).into_iter().filter(|pod| !pod.deleting) {
            let mut updated = pod.clone();
            admit(world, name, vmi, &mut updated, Some(&pod.elements));
            let elements = updated.elements;
            if elements == pod.elements {
                continue;
            }
            let kept: Vec<Arc<str>> =
                elements.iter().filter_map(|element| element.interface.clone()).collect();
            world.change(|objects| objects.pods.get_mut(&pod.key).unwrap().elements = elements);
            world
                .sandboxes
                .retain(|it| it.pod != pod.key || it.until.is_some() || kept.contains(&it.interface));
            world.show(&pod.key);
        }
    }
}

/// CNI ADD: what the claim says, if the block confirms it.
fn attach(world: &mut World, random: &mut SplitMix64) {
    for pod in world.live.clone().pods.values().filter(|pod| !pod.deleting) {
        for element in &pod.elements {
            if random.one_in(3) {
                continue;
            }
            if let Some(sandbox) = serve(world, pod, element) {
                world.sandboxes.push(sandbox);
            }
        }
        if random.one_in(2) {
            world.show(&pod.key);
        }
    }
}

fn serve(world: &mut World, pod: &ClaimPod, element: &PodElement) -> Option<SandboxAddresses> {
    let interface = element.interface.clone()?;
    let attached = |it: &&SandboxAddresses| it.pod == pod.key && it.interface == interface;
    let node = node_of(pod);
    if world.down.contains(&node) || world.sandboxes.iter().any(|it| attached(&it)) {
        return None;
    }
    let live = world.live.clone();
    let claim = live.claims.get(&key(element.claim.as_ref()?))?;
    let controller = pod.controller.as_ref()?;
    let vmi = live.vmis.get(&controller.name).filter(|vmi| vmi.uid == controller.uid)?;
    let config = live.nads.get(&element.nad)?;
    let NadIpam::Patchbay { network } = &config.ipam else { return None };
    let uid = world.network_uid(network)?;
    let blocks: Vec<ObservedIpBlock> = live.blocks.values().map(|block| block.object.clone()).collect();
    let others: Vec<ClaimPod> = live.pods.values().cloned().collect();
    let served = serve::decide(&ServeInput {
        pod,
        ifname: &interface,
        config_name: &config.name,
        requested: &[],
        claim_name: element.claim.as_ref()?,
        claim: Some(claim),
        vmi: Some(vmi),
        blocks: &blocks,
        network_uid: &uid,
        others: &others,
        known: None,
    });
    let mut addresses: Vec<IpAddr> = served.ok()?.addresses.iter().map(ipnet::IpNet::addr).collect();
    addresses.sort();
    let life = world.lives[&vmi.uid].clone();
    let served = (claim.uid.clone(), addresses.clone());
    let before = world.served.insert((life.clone(), interface.clone()), served);
    if let Some((uid, before)) = before.filter(|(uid, _)| *uid == claim.uid || !world.given_up.contains(uid))
    {
        assert_eq!(
            before, addresses,
            "{} ({}, before {uid}) had other addresses before",
            claim.key, claim.uid
        );
    }
    Some(SandboxAddresses {
        pod: pod.key.clone(),
        interface,
        nad: element.nad.clone(),
        network: uid,
        addresses,
        life,
        node,
        running: false,
        since: world.clock,
        until: None,
    })
}

fn end_pods(world: &mut World, random: &mut SplitMix64) {
    for pod in world.live.clone().pods.values() {
        let owner = pod.controller.as_ref();
        let vmi = owner.and_then(|owner| world.live.vmis.get(&owner.name).filter(|vmi| vmi.uid == owner.uid));
        let ends = vmi.is_none_or(|vmi| vmi.deleting);
        if pod.deleting && !random.one_in(3) {
            world.remove_pod(&pod.key);
        } else if ends && !pod.deleting {
            world.change(|objects| objects.pods.get_mut(&pod.key).unwrap().deleting = true);
        }
    }
}

fn end_instances(world: &mut World) {
    for (name, vmi) in &world.live.clone().vmis {
        let pods = launchers(world, &vmi.uid).len();
        let vm =
            world.live.vms.get(name).filter(|vm| {
                vmi.controller.as_ref().is_some_and(|controller| controller.uid == vm.facts.uid)
            });
        let stops = vm.is_some_and(|vm| !vm.running);
        if vmi.deleting && pods == 0 && vmi.active_pods == 0 {
            world.change(|objects| objects.vmis.remove(name));
        } else if vmi.active_pods != pods || stops && !vmi.deleting {
            world.change(|objects| {
                let vmi = objects.vmis.get_mut(name).unwrap();
                (vmi.active_pods, vmi.deleting) = (pods, vmi.deleting || stops);
            });
        }
    }
}

/// Starts a migration, or ends one in either way.
fn migrate(world: &mut World, random: &mut SplitMix64) {
    let vmis: Vec<_> = world.live.vmis.clone().into_iter().filter(|(_, vmi)| !vmi.deleting).collect();
    let Some((name, vmi)) = random.pick(&vmis) else { return };
    let pods: Vec<ClaimPod> = launchers(world, &vmi.uid).into_iter().filter(|pod| !pod.deleting).collect();
    match pods.len() {
        1 => create_pod(world, &name, &vmi),
        2.. => {
            let ends = random.pick(&pods).map(|pod| pod.key);
            let Some(key) = ends else { return };
            world.change(|objects| objects.pods.get_mut(&key).unwrap().deleting = true);
        }
        0 => {}
    }
}

/// Notes the claims that do not follow an instance whose VirtualMachine is deleted alone: those that no launcher of the
/// instance references yet. Then only the name connects claim and instance. A lone instance that the user creates under that
/// name looks the same, and it must not get the claim of another machine.
fn give_up_unreferenced(world: &mut World, vmi: Option<&VmiFacts>, claims: &[&ClaimState]) {
    let Some(vmi) = vmi else { return };
    let launchers = launchers(world, &vmi.uid);
    let unreferenced = claims.iter().filter(|claim| !launchers.iter().any(|pod| pod.references(&claim.key)));
    world.given_up.extend(unreferenced.map(|claim| claim.uid.clone()));
}

fn collect_garbage(world: &mut World, random: &mut SplitMix64) {
    let live = world.live.clone();
    for (name, vm) in &live.vms {
        let Some(deletion) = vm.deletion else { continue };
        let uid = &vm.facts.uid;
        let owned = |owner: Option<&OwnerRef>| owner.is_some_and(|owner| owner.uid == *uid);
        let vmi = live.vmis.get(name).filter(|vmi| owned(vmi.controller.as_ref()));
        let claims: Vec<_> = live.claims.values().filter(|claim| owned(claim.owner.as_ref())).collect();
        let done = match deletion {
            Deletion::Background => vmi.is_none() || random.one_in(3),
            Deletion::Foreground | Deletion::Orphan => vmi.is_none() && claims.is_empty(),
        };
        if done {
            world.change(|objects| objects.vms.remove(name));
            continue;
        }
        match deletion {
            Deletion::Background => {}
            Deletion::Foreground => {
                if vmi.is_some_and(|vmi| !vmi.deleting) {
                    world.change(|objects| objects.vmis.get_mut(name).unwrap().deleting = true);
                }
                for claim in claims {
                    world.delete_claim(&claim.key);
                }
            }
            Deletion::Orphan if vmi.is_some() && random.one_in(2) => {
                give_up_unreferenced(world, vmi, &claims);
                world.change(|objects| objects.vmis.get_mut(name).unwrap().controller = None);
            }
            Deletion::Orphan => {
                for claim in claims.into_iter().take(1) {
                    give_up_unreferenced(world, vmi, &[claim]);
                    let version = world.version();
                    world.change(|objects| {
                        let Some(claim) = objects.claims.get_mut(&claim.key) else { return };
                        (claim.owner, claim.owner_count, claim.version) = (None, 0, version);
                    });
                }
            }
        }
    }
    let live = world.live.clone();
    let is_gone = |owner: &OwnerRef| match owner.kind {
        OwnerKind::VirtualMachine => !live.vms.values().any(|vm| vm.facts.uid == owner.uid),
        _ => !live.vmis.values().any(|vmi| vmi.uid == owner.uid),
    };
    for (name, vmi) in &live.vmis {
        if vmi.controller.as_ref().is_some_and(is_gone) && !vmi.deleting {
            world.change(|objects| objects.vmis.get_mut(name).unwrap().deleting = true);
        }
    }
    for claim in live.claims.values().filter(|claim| !claim.deleting || claim.finalizers.is_empty()) {
        if claim.owner.as_ref().is_some_and(is_gone) {
            world.delete_claim(&claim.key);
        }
    }
}
