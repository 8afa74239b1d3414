//! A controller: it plans from snapshots that are stale, each kind by itself, and writes one object at a time.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use api::{
    IPAMClaimStatus,
    ipamclaim::{ClaimAnnotations, FINALIZER, RecordedAddresses},
    ipblock::HolderRef,
};

use super::{
    SplitMix64,
    store::{NAMESPACE, Objects, World, key, node_of},
};
use crate::{
    claims::{
        AllocatorInput, AllocatorPlan, ClaimOptions, ClaimPod, ClaimSchema, ClaimState, ClaimStep,
        MachineInput, NadLookup, ObjectKey, OwnerKind, ReservedIn, Resolution, StatusWrite, Wanted,
        allocate::{self, BlockCreate, BlockDelete, BlockDeleteReason, BlockWrite},
        machine::{self, DeleteReason, GoneCheck, KindsKnown, UnchangedCheck},
        names, publish,
        release::{self, Candidate, RELEASE_DELAY, ReportedAddresses},
        shown,
    },
    network::NodeReport,
};

/// How long a refused address is not requested again.
const TRIED: u64 = 5;
/// How long an unused block is kept: a borrowed address, and a whole one.
const IDLE: [u64; 2] = [3, 25];

/// What the caches show, each kind at its own version.
pub struct View {
    vms: Arc<Objects>,
    vmis: Arc<Objects>,
    claims: Arc<Objects>,
    pods: Arc<Objects>,
    blocks: Arc<Objects>,
    nads: Arc<Objects>,
}

/// What a controller remembers about a network.
#[derive(Debug, Default)]
pub struct NetworkMemory {
    releasable: BTreeSet<(String, IpAddr)>,
    due_since: BTreeMap<Candidate, u64>,
    tried: BTreeMap<IpAddr, u64>,
    silent: BTreeMap<String, u64>,
    unused_since: BTreeMap<String, u64>,
    idle: BTreeSet<String>,
}

#[expect(clippy::large_enum_variant, reason = "few exist at once, and only in this simulation")]
enum Write {
    Claim(ClaimStep),
    Block(BlockWrite),
    Create(String, BlockCreate),
    Delete(String, BlockDelete),
    Publish { network: String, claim: ClaimState, record: Option<RecordedAddresses>, write: StatusWrite },
}

#[derive(Default)]
pub struct Controller {
    /// The version of each kind that the caches have.
    seen: [usize; 6],
    pending: VecDeque<Write>,
    view: Option<View>,
    memory: BTreeMap<String, NetworkMemory>,
}

impl View {
    fn at(world: &World, versions: [usize; 6]) -> Self {
        let [vms, vmis, claims, pods, blocks, nads] = versions.map(|version| world.at(version));
        Self { vms, vmis, claims, pods, blocks, nads }
    }

    pub fn live(world: &World) -> Self {
        Self::at(world, [world.revision(); 6])
    }

    pub fn machines(&self) -> BTreeSet<Arc<str>> {
        let owners = self.claims.claims.values();
        let owners = owners.map(|claim| match &claim.owner {
            Some(owner) => owner.name.clone(),
            None => claim.label.clone().unwrap(),
        });
        self.vms.vms.keys().chain(self.vmis.vmis.keys()).cloned().chain(owners).collect()
    }

    pub fn machine<T>(
        &self,
        world: &World,
        name: &Arc<str>,
        decide: impl FnOnce(&MachineInput<'_>) -> T,
    ) -> T {
        let at = ObjectKey::new(NAMESPACE, name.clone());
        let label = names::label_value(name);
        let ours = |claim: &&ClaimState| match &claim.owner {
            Some(owner) => owner.kind != OwnerKind::Other && owner.name == *name,
            None => claim.label.as_deref() == Some(&label),
        };
        let claims: Vec<&ClaimState> = self.claims.claims.values().filter(ours).collect();
        let vmi = self.vmis.vmis.get(name);
        let pods = self.pods.pods.values().filter(|pod| {
            let launcher = vmi.is_some_and(|vmi| pod.is_launcher_of(&vmi.uid));
            launcher || claims.iter().any(|claim| pod.references(&claim.key))
        });
        let pods: Vec<&ClaimPod> = pods.collect();
        decide(&MachineInput {
            key: &at,
            vm: self.vms.vms.get(name).map(|vm| &vm.facts),
            vmi,
            kinds: KindsKnown::LISTED,
            claims: &claims,
            in_namespace: &|name| self.claims.claims.get(&key(name)).cloned(),
            pods: &pods,
            nads: &|at| self.nads.nads.get(at).map_or(NadLookup::Absent, |it| NadLookup::Found(it.clone())),
            networks: &|name| world.network_uid(name),
            reserved_in: &|uid| self.reserved_in(uid),
            options: ClaimOptions::default(),
            now: world.now(),
        })
    }

    fn reserved_in(&self, uid: &str) -> Option<ReservedIn> {
        let mut blocks = self.blocks.blocks.values().map(|block| &block.object);
        let block = blocks.find(|block| block.status.claims.iter().any(|claimed| claimed.uid == uid))?;
        let (network, network_name) = (block.spec.network_uid.clone(), block.spec.network.clone());
        Some(ReservedIn { network, network_name })
    }

    pub fn resolutions(&self, world: &World) -> BTreeMap<ObjectKey, Resolution> {
        let plans = self.machines().into_iter().map(|name| self.machine(world, &name, machine::plan));
        plans.flat_map(|plan| plan.resolutions).collect()
    }

    pub fn pods_of(&self, claim: &ClaimState) -> Vec<&ClaimPod> {
        self.pods.pods.values().filter(|pod| pod.references(&claim.key)).collect()
    }

    pub fn wanted(&self, uid: &str, resolutions: &BTreeMap<ObjectKey, Resolution>) -> Vec<Wanted> {
        let of_network = |claim: &&ClaimState| {
            let resolution = resolutions.get(&claim.key);
            matches!(resolution, Some(Resolution::Allocate { network, .. }) if network == uid)
        };
        let wanted = self.claims.claims.values().filter(of_network).map(|claim| {
            let shown = shown::addresses(claim, self.pods_of(claim), |name| self.vmis.vmis.get(name));
            Wanted {
                claim: claim.key.clone(),
                uid: claim.uid.clone(),
                requested: match &resolutions[&claim.key] {
                    Resolution::Allocate { requested, .. } => requested.clone(),
                    Resolution::NotOurs | Resolution::Failed { .. } => Vec::new(),
                },
                published: claim.published(),
                shown,
                created: claim.created,
            }
        });
        wanted.collect()
    }

    pub fn network(
        &self,
        world: &World,
        uid: &str,
        resolutions: &BTreeMap<ObjectKey, Resolution>,
        memory: &NetworkMemory,
        seed: u64,
    ) -> AllocatorPlan {
        let (silent, tried) =
            (memory.silent.keys().cloned().collect(), memory.tried.keys().copied().collect());
        allocate::plan(AllocatorInput {
            network: &world.pools[uid].name,
            uid,
            pool: &world.pools[uid],
            blocks: &self.blocks.blocks,
            wanted: &self.wanted(uid, resolutions),
            releasable: &memory.releasable,
            nodes_silent: &silent,
            tried: &tried,
            idle: &memory.idle,
            stores_claims: false,
            seed,
        })
    }
}

impl Controller {
    /// One write of the current plan, or another plan from newer snapshots.
    pub fn act(&mut self, world: &mut World, random: &mut SplitMix64) {
        if self.step(world) {
            return;
        }
        let (oldest, newest) = (world.oldest(), world.revision());
        self.seen = self.seen.map(|seen| {
            let from = seen.max(oldest);
            from + random.below(newest - from + 1)
        });
        self.plan(world, random);
    }

    /// Plans from the current state and writes all of it.
    pub fn act_live(&mut self, world: &mut World, random: &mut SplitMix64) {
        self.seen = [world.revision(); 6];
        self.plan(world, random);
        while self.step(world) {}
    }

    fn plan(&mut self, world: &World, random: &mut SplitMix64) {
        let view = View::at(world, self.seen);
        if random.one_in(2) {
            let machines: Vec<Arc<str>> = view.machines().into_iter().collect();
            let Some(name) = random.pick(&machines) else { return };
            self.pending
                .extend(view.machine(world, &name, machine::plan).steps.into_iter().map(Write::Claim));
        } else {
            let networks: Vec<String> = world.pools.keys().cloned().collect();
            let Some(uid) = random.pick(&networks) else { return };
            let memory = self.memory.entry(uid.clone()).or_default();
            memory.update(world, &view, &uid);
            let resolutions = view.resolutions(world);
            let plan = view.network(world, &uid, &resolutions, memory, random.below(100) as u64);
            self.pending.extend(plan.writes.iter().cloned().map(Write::Block));
            self.pending.extend(plan.creates.iter().cloned().map(|it| Write::Create(uid.clone(), it)));
            self.pending.extend(plan.deletes.iter().cloned().map(|it| Write::Delete(uid.clone(), it)));
            for claim in view.claims.claims.values() {
                if let Some(write) = status_write(world, &view, &plan, claim) {
                    let reserved = plan.reserved.get(&claim.uid);
                    let record = reserved.and_then(|reserved| publish::record(claim, reserved));
                    let (network, claim) = (uid.clone(), claim.clone());
                    self.pending.push_back(Write::Publish { network, claim, record, write });
                }
            }
        }
        self.view = Some(view);
    }

    /// The next write. A rejected one ends the plan.
    fn step(&mut self, world: &mut World) -> bool {
        let Some(write) = self.pending.pop_front() else { return false };
        if !self.apply(world, write) {
            self.pending.clear();
        }
        true
    }

    fn apply(&mut self, world: &mut World, write: Write) -> bool {
        match write {
            Write::Claim(step) => apply_step(world, step),
            Write::Block(BlockWrite { name, uid, version, status, confirm }) => {
                let live = world.live.clone();
                let matches = |(key, uid): &(ObjectKey, String)| {
                    live.claims.get(key).is_some_and(|claim| claim.uid == *uid)
                };
                let block = live.blocks.get(&name);
                let current = block.is_some_and(|block| block.object.uid == uid && block.version == version);
                if !current || !confirm.iter().all(matches) {
                    return false;
                }
                let version = world.version();
                world.change(|objects| {
                    let block = objects.blocks.get_mut(&name).unwrap();
                    (block.object.status, block.version) = (status, version);
                });
                true
            }
            Write::Create(network, create) => {
                world.create_block(&network, create.range, HolderRef::claims(), create.lender)
            }
            Write::Delete(network, BlockDelete { name, uid, version, why }) => {
                let memory = self.memory.entry(network).or_default();
                match why {
                    BlockDeleteReason::Idle => {}
                    BlockDeleteReason::Refused { address } => {
                        memory.tried.insert(address, world.clock + TRIED);
                    }
                    BlockDeleteReason::Silent { address, lender } => {
                        memory.tried.insert(address, world.clock + TRIED);
                        memory.silent.insert(lender, world.clock + TRIED);
                    }
                }
                let block = world.live.blocks.get(&name);
                let current = block.is_some_and(|block| block.object.uid == uid && block.version == version);
                if current {
                    world.change(|objects| objects.blocks.remove(&name));
                }
                current
            }
            Write::Publish { network, claim, record, write } => {
                self.publish(world, &network, &claim, record, write)
            }
        }
    }

    fn publish(
        &mut self,
        world: &mut World,
        network: &str,
        claim: &ClaimState,
        record: Option<RecordedAddresses>,
        write: StatusWrite,
    ) -> bool {
        if write.confirm {
            let Some(mut view) = self.view.take() else { return false };
            view.blocks = world.live.clone();
            let resolutions = view.resolutions(world);
            let plan = view.network(world, network, &resolutions, &NetworkMemory::default(), 0);
            let again = status_write(world, &view, &plan, claim);
            if again.is_none_or(|again| again.status.ips != write.status.ips) {
                return false;
            }
        }
        let version = world.version();
        write_claim(world, &claim.key, &claim.uid, &claim.version, |claim| {
            claim.annotations.recorded = record.or(claim.annotations.recorded.take());
            (claim.status, claim.version) = (write.status, version);
        })
    }
}

fn status_write(world: &World, view: &View, plan: &AllocatorPlan, claim: &ClaimState) -> Option<StatusWrite> {
    let outcome = match (plan.reserved.get(&claim.uid), plan.failed.get(&claim.uid)) {
        (Some(reserved), _) => Ok(reserved),
        (None, failed) => Err(failed?),
    };
    publish::status(claim, outcome, &view.pods_of(claim), ClaimSchema::default(), world.now())
}

impl NetworkMemory {
    fn update(&mut self, world: &World, view: &View, uid: &str) {
        let clock = world.clock;
        self.tried.retain(|_, until| *until > clock);
        self.silent.retain(|_, until| *until > clock);
        let unused = allocate::unused(&view.blocks.blocks).map(|(name, block)| {
            let since = *self.unused_since.get(name).unwrap_or(&clock);
            (name.clone(), (since, block.object.spec.lender.is_none()))
        });
        let unused: BTreeMap<String, (u64, bool)> = unused.collect();
        let idle = unused.iter().filter(|(_, (since, whole))| clock >= since + IDLE[usize::from(*whole)]);
        self.idle = idle.map(|(name, _)| name.clone()).collect();
        self.unused_since = unused.into_iter().map(|(name, (since, _))| (name, since)).collect();
        let claims = &view.claims.claims;
        let pods: Vec<&ClaimPod> = view.pods.pods.values().collect();
        let by_uid = |uid: &str| claims.values().find(|claim| claim.uid == uid);
        let reports = reports(world);
        let mut reported = ReportedAddresses::default();
        for report in reports.values() {
            reported.extend(Some(report), uid);
        }
        let due = release::due(uid, &view.blocks.blocks, by_uid, |key| claims.get(key), &pods, &reported);
        let since = due.into_iter().map(|one| {
            let since = *self.due_since.get(&one).unwrap_or(&clock);
            (one, since)
        });
        self.due_since = since.collect();
        let ready = self.due_since.iter().filter(|(_, since)| clock >= **since + RELEASE_DELAY.as_secs());
        // Live reads.
        let confirmed = ready.filter(|(one, since)| {
            let unused = Duration::from_secs(clock - **since);
            let counts = |pod: &&ClaimPod| {
                let report = reports.get(&node_of(pod));
                release::is_named_by(one, pod) && release::annotations_count(one, pod, report, unused, None)
            };
            let pods: Vec<&ClaimPod> = world.live.pods.values().filter(counts).collect();
            let claim = world.live.claims.get(&one.claim);
            release::confirms(one, uid, &view.blocks.blocks, claim, &pods, &reported)
        });
        self.releasable = confirmed.map(|(one, _)| (one.uid.clone(), one.address)).collect();
    }
}

/// What the NodeNetworks say.
fn reports(world: &World) -> BTreeMap<String, NodeReport> {
    let report = |listed: &BTreeSet<(String, IpAddr)>| {
        let mut networks: BTreeMap<String, Vec<IpAddr>> = BTreeMap::new();
        for (network, address) in listed {
            networks.entry(network.clone()).or_default().push(*address);
        }
        NodeReport { claim_addresses: Some(networks), ..NodeReport::default() }
    };
    world.reports.iter().map(|(node, listed)| (node.clone(), report(listed))).collect()
}

/// Changes a claim if it still is this version of it.
fn write_claim(
    world: &mut World,
    key: &ObjectKey,
    uid: &str,
    version: &str,
    change: impl FnOnce(&mut ClaimState),
) -> bool {
    let claim = world.live.claims.get(key);
    if claim.is_none_or(|claim| claim.uid != uid || claim.version != version) {
        return false;
    }
    world.change(|objects| {
        let claim = objects.claims.get_mut(key).unwrap();
        change(claim);
        if claim.deleting && claim.finalizers.is_empty() {
            objects.claims.remove(key);
        }
    });
    true
}

fn apply_step(world: &mut World, step: ClaimStep) -> bool {
    let now = world.version();
    match step {
        ClaimStep::Create(draft) => {
            if world.live.claims.contains_key(&draft.key) {
                return false;
            }
            let claim = ClaimState {
                key: draft.key,
                uid: world.uid(),
                version: now,
                created: world.now(),
                deleting: false,
                owner: Some(draft.owner),
                owner_count: 1,
                finalizers: vec![FINALIZER.to_owned()],
                label: Some(draft.label.into()),
                network: draft.network.into(),
                interface: draft.interface,
                annotations: ClaimAnnotations { managed: true, ..ClaimAnnotations::default() },
                status: IPAMClaimStatus::default(),
            };
            world.change(|objects| objects.claims.insert(claim.key.clone(), claim));
            true
        }
        ClaimStep::SetOwner { claim, uid, version, owner } => {
            write_claim(world, &claim, &uid, &version, |claim| {
                (claim.owner, claim.owner_count, claim.version) = (Some(owner), 1, now);
            })
        }
        ClaimStep::Mark { claim, uid, version } => write_claim(world, &claim, &uid, &version, |claim| {
            (claim.annotations.managed, claim.version) = (true, now);
        }),
        ClaimStep::SetNetwork { claim, uid, version, network, .. } => {
            write_claim(world, &claim, &uid, &version, |claim| {
                (claim.network, claim.version) = (network.into(), now);
            })
        }
        ClaimStep::Delete { claim, uid, version, why, unreserved_in, unchanged, .. } => {
            let mut blocks = world.live.blocks.values().map(|block| &block.object);
            let is_reserved = unreserved_in.is_some_and(|network| {
                blocks.any(|block| {
                    block.spec.network == network && block.status.claims.iter().any(|one| one.uid == uid)
                })
            });
            if is_reserved || !unchanged.iter().all(|check| is_unchanged(&world.live, check)) {
                return false;
            }
            let used = world.live.pods.values().any(|pod| pod.uses(&claim));
            if why == DeleteReason::Unplugged && used {
                return false;
            }
            write_claim(world, &claim, &uid, &version, |claim| (claim.deleting, claim.version) = (true, now))
        }
        ClaimStep::RemoveFinalizer { claim, uid, version, left, gone } => {
            if !gone.iter().all(|check| is_gone(&world.live, check)) {
                return false;
            }
            write_claim(world, &claim, &uid, &version, |claim| {
                (claim.finalizers, claim.version) = (left, now);
            })
        }
    }
}

fn is_unchanged(live: &Objects, check: &UnchangedCheck) -> bool {
    match check {
        UnchangedCheck::Vm { key, cached } => live.vms.get(&key.name).map(|vm| &vm.facts) == cached.as_ref(),
        UnchangedCheck::Vmi { key, cached } => live.vmis.get(&key.name) == cached.as_ref(),
    }
}

fn is_gone(live: &Objects, check: &GoneCheck) -> bool {
    match check {
        GoneCheck::Object { kind: OwnerKind::VirtualMachine, key, uid } => {
            live.vms.get(&key.name).is_none_or(|vm| vm.facts.uid != *uid)
        }
        GoneCheck::Object { key, uid, .. } => live.vmis.get(&key.name).is_none_or(|vmi| vmi.uid != *uid),
        GoneCheck::NoInstanceOf { key, vm } => {
            let vmi = live.vmis.get(&key.name);
            vmi.and_then(|vmi| vmi.controller.as_ref()).is_none_or(|controller| controller.uid != *vm)
        }
        GoneCheck::Inactive { key, uid } => {
            live.vmis.get(&key.name).is_none_or(|vmi| vmi.uid != *uid || vmi.deleting && vmi.active_pods == 0)
        }
        GoneCheck::Name { kind: OwnerKind::VirtualMachine, key } => !live.vms.contains_key(&key.name),
        GoneCheck::Name { key, .. } => !live.vmis.contains_key(&key.name),
        GoneCheck::Unused { claim } => !live.pods.values().any(|pod| pod.uses(claim)),
        GoneCheck::NoIpamExtensions => true,
    }
}
