//! A simulated node with one pod: applies plans with faults and crashes, and checks that they converge.
//!
//! Links are a map. ADD fails if the link exists, and DEL deletes the link of that name, as the reference plugins do.

mod checks;
mod sequences;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use api::{
    nad_config::NadConfig,
    network_status::{NetworkStatus, NetworkStatusList},
    selection::{NadRef, NetworkSelection},
};

use super::{
    AddStep, AttachedRecord, AttachmentKey, AttachmentRecord, DelMode, DesiredPod, Failures, LinkIdentity,
    NadState, ObservedLink, ObservedPod, Origin, PlanInput, PlugMode, PodEvent, PodIdentity, PodLifecycle,
    PodPlan, RecordPhase, RemoveStep, Reported, RequestedAddresses, SandboxRef, SandboxState, Step, plan,
};

/// A pod that still has steps after this many does not converge.
const MAX_STEPS: usize = 300;

/// A link of a simulated namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SimLink {
    pub name: String,
    /// The attachment that made it. `None`: a program in the pod or the cluster network.
    pub owner: Option<(AttachmentKey, NadRef)>,
}

/// Where a step is interrupted. A crash loses everything that is only in the daemon's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The daemon crashes before it writes anything.
    CrashFirst,
    /// The journal cannot be written.
    JournalFails,
    /// The daemon crashes between the intent and the plugin.
    CrashAfterIntent,
    /// The plugin fails before it changes anything.
    PluginFails,
    /// The plugin fails after it allocated or released an address.
    PluginFailsWithAddress,
    /// The plugin fails, or is killed at the timeout, after it created or deleted the link.
    PluginFailsWithLink,
    /// The daemon crashes while the plugin runs; the plugin finishes.
    CrashBeforeResult,
    /// The daemon crashes after the result is in the result cache, and before the journal has it.
    CrashAfterResult,
    /// The daemon crashes after everything is written.
    CrashLast,
}

pub const FAULTS: [Fault; 9] = [
    Fault::CrashFirst,
    Fault::JournalFails,
    Fault::CrashAfterIntent,
    Fault::PluginFails,
    Fault::PluginFailsWithAddress,
    Fault::PluginFailsWithLink,
    Fault::CrashBeforeResult,
    Fault::CrashAfterResult,
    Fault::CrashLast,
];

/// The pod as the API server has it, and as the daemon sees it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Annotations {
    pub networks: Option<String>,
    pub network_status: Option<String>,
    pub attachments: Option<String>,
}

/// A simulated node with one pod.
#[derive(Debug, Clone)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact about the pod or the node")]
pub struct SimNode {
    pub pod: PodIdentity,
    pub lifecycle: PodLifecycle,
    pub host_network: bool,
    pub virt_launcher: bool,
    pub confirm: Option<String>,
    pub has_multus: bool,
    pub mode: PlugMode,
    pub boot: String,
    pub sandbox: Option<SandboxRef>,
    /// The links of each namespace, by its path.
    pub namespaces: BTreeMap<String, BTreeMap<u32, SimLink>>,
    /// The attachments with an allocated address.
    pub addresses: BTreeSet<AttachmentKey>,
    pub nads: BTreeMap<NadRef, NadState>,
    /// The NADs whose plugin fails.
    pub broken: BTreeSet<NadRef>,
    pub journal: BTreeMap<AttachmentKey, AttachmentRecord>,
    /// The result cache of the node.
    pub results: BTreeMap<AttachmentKey, AttachedRecord>,
    /// The attachments in Multus' caches.
    pub multus: BTreeMap<AttachmentKey, AttachmentRecord>,
    /// Multus' caches cannot be used.
    pub unreadable: Option<String>,
    pub defaults_known: bool,
    pub server: Annotations,
    /// What the daemon's watch shows.
    pub cache: Annotations,
    pub confirmed: bool,
    pub failures: Failures,
    pub now: Instant,
    pub reported: Reported,
    /// The attachments of Multus that an element was seen to request.
    pub requested: BTreeSet<AttachmentKey>,
    pub events: Vec<PodEvent>,
    /// The number of writes to the API server.
    pub writes: usize,
    /// The interfaces of ADD and DEL calls, in order.
    pub calls: Vec<String>,
    next_index: u32,
    sandboxes: u32,
}

/// The MAC address of a link. Two of three links have the same, as those of one ipvlan master.
pub fn mac(index: u32) -> String {
    let own = if index.is_multiple_of(3) { index } else { 1 };
    format!("02:00:00:00:00:{own:02x}")
}

pub fn nad(name: &str) -> NadRef {
    NadRef::new("default", name)
}

pub fn ready(name: &str) -> NadState {
    let config = format!(r#"{{"cniVersion":"1.0.0","name":"{name}","type":"macvlan"}}"#);
    NadState::Ready { config: Box::new(NadConfig::parse(Some(&config), name).unwrap()) }
}

pub const CLUSTER_ENTRY: &str = r#"{
    "name": "cbr0",
    "interface": "eth0",
    "ips": [ "10.244.1.5" ],
    "default": true,
    "dns": {}
}"#;

impl SimNode {
    /// A running pod with only the cluster network, and the NADs a, b and c.
    pub fn new() -> Self {
        let mut node = Self {
            pod: PodIdentity {
                namespace: "default".to_owned(),
                name: "web".to_owned(),
                uid: "uid-1".to_owned(),
                runtime_uid: "uid-1".to_owned(),
            },
            lifecycle: PodLifecycle::Running,
            host_network: false,
            virt_launcher: false,
            confirm: None,
            has_multus: true,
            mode: PlugMode::On,
            boot: "boot-1".to_owned(),
            sandbox: None,
            namespaces: BTreeMap::new(),
            addresses: BTreeSet::new(),
            nads: ["a", "b", "c"].into_iter().map(|name| (nad(name), ready(name))).collect(),
            broken: BTreeSet::new(),
            journal: BTreeMap::new(),
            results: BTreeMap::new(),
            multus: BTreeMap::new(),
            unreadable: None,
            defaults_known: true,
            server: Annotations::default(),
            cache: Annotations::default(),
            confirmed: false,
            failures: Failures::default(),
            now: Instant::now(),
            reported: Reported::default(),
            requested: BTreeSet::new(),
            events: Vec::new(),
            writes: 0,
            calls: Vec::new(),
            next_index: 2,
            sandboxes: 0,
        };
        node.start_sandbox();
        node.server.network_status = Some(format!("[{CLUSTER_ENTRY}]"));
        node.watch();
        node
    }

    /// A pod that Multus started with this annotation, and that the daemon has seen.
    pub fn started(networks: &str) -> Self {
        let mut node = Self::started_unseen(networks);
        if let Some(requested) = node.plan().requested {
            node.requested = requested;
        }
        node
    }

    /// A pod that Multus started with this annotation while no daemon ran.
    pub fn started_unseen(networks: &str) -> Self {
        let mut node = Self::new();
        node.server.networks = Some(networks.to_owned());
        node.multus_add();
        node.watch();
        node
    }

    /// A pod whose annotation was then set.
    pub fn with(networks: &str) -> Self {
        let mut node = Self::new();
        node.edit(networks);
        node
    }

    /// Sets the networks annotation, and the daemon sees it.
    pub fn edit(&mut self, networks: &str) {
        self.server.networks = Some(networks.to_owned());
        self.watch();
    }

    /// The daemon sees what the API server has.
    pub fn watch(&mut self) {
        self.cache = self.server.clone();
    }

    fn index(&mut self) -> u32 {
        self.next_index += 1;
        self.next_index
    }

    fn start_sandbox(&mut self) {
        self.sandboxes += 1;
        let sandbox = SandboxRef {
            id: format!("sandbox-{}", self.sandboxes),
            netns: format!("/var/run/netns/cni-{}", self.sandboxes),
            own_network_stack: None,
        };
        let eth0 = SimLink { name: "eth0".to_owned(), owner: None };
        self.namespaces.insert(sandbox.netns.clone(), BTreeMap::from([(2, eth0)]));
        self.sandbox = Some(sandbox);
    }

    /// Ends the sandbox: its namespace is gone, and Multus runs the DELs of what it attached.
    pub fn end_sandbox(&mut self) {
        let Some(sandbox) = self.sandbox.take() else { return };
        self.namespaces.remove(&sandbox.netns);
        let ended: Vec<_> =
            self.multus.values().filter(|record| record.origin == Origin::PodStart).cloned().collect();
        for record in ended.into_iter().filter(|record| record.key.container == sandbox.id) {
            self.addresses.remove(&record.key);
            self.multus.remove(&record.key);
        }
    }

    /// The runtime replaces the sandbox. With Multus, the current annotation is attached and the status written again.
    pub fn recreate_sandbox(&mut self) {
        self.end_sandbox();
        self.start_sandbox();
        if self.has_multus {
            self.server.network_status = Some(format!("[{CLUSTER_ENTRY}]"));
            self.multus_add();
        }
    }

    /// What Multus does when a pod starts: attaches what it can of the annotation, and writes the status.
    fn multus_add(&mut self) {
        let selection = NetworkSelection::parse(self.server.networks.as_deref());
        let sandbox = self.sandbox.clone().unwrap();
        let mut list = NetworkStatusList::parse(self.server.network_status.as_deref()).unwrap();
        for (index, element) in selection.elements() {
            let nad = element.reference("default");
            let name = element.interface.as_ref().map_or(format!("net{}", index + 1), ToString::to_string);
            let key = AttachmentKey { container: sandbox.id.clone(), interface: name.clone() };
            let taken = self.links().values().any(|link| link.name == name);
            let usable = matches!(self.nads.get(&nad), Some(NadState::Ready { .. }));
            if selection.error.is_some() || taken || !usable {
                continue;
            }
            let (_, mut attached) = self.make_link(&key, &nad);
            // Multus' caches do not have the index.
            attached.links[0].index = None;
            self.addresses.insert(key.clone());
            list.replace(|_| false, &attached.statuses);
            let record = AttachmentRecord {
                key: key.clone(),
                pod: self.pod.clone(),
                nad,
                nad_guessed: false,
                origin: Origin::PodStart,
                boot: self.boot.clone(),
                netns: sandbox.netns.clone(),
                requested: Some(RequestedAddresses::of(element)),
                config: "{}".to_owned(),
                cni_args: Vec::new(),
                capability_args: serde_json::Map::new(),
                former_statuses: Vec::new(),
                removing: false,
                phase: RecordPhase::Attached(attached),
            };
            self.multus.insert(key, record);
        }
        self.server.network_status = Some(list.render());
    }

    /// The links of the READY sandbox.
    pub fn links(&self) -> &BTreeMap<u32, SimLink> {
        &self.namespaces[&self.sandbox.as_ref().unwrap().netns]
    }

    pub fn links_mut(&mut self) -> &mut BTreeMap<u32, SimLink> {
        self.namespaces.get_mut(&self.sandbox.as_ref().unwrap().netns).unwrap()
    }

    /// The names of the links that are not the cluster network's.
    pub fn link_names(&self) -> Vec<&str> {
        self.links().values().map(|link| link.name.as_str()).filter(|name| *name != "eth0").collect()
    }

    /// A program in the pod creates a link.
    pub fn add_foreign_link(&mut self, name: &str) {
        let index = self.index();
        self.links_mut().insert(index, SimLink { name: name.to_owned(), owner: None });
    }

    /// A program in the pod deletes a link.
    pub fn delete_link(&mut self, name: &str) {
        self.links_mut().retain(|_, link| link.name != name);
    }

    fn make_link(&mut self, key: &AttachmentKey, nad: &NadRef) -> (u32, AttachedRecord) {
        let index = self.index();
        let mac = mac(index);
        let link = SimLink { name: key.interface.clone(), owner: Some((key.clone(), nad.clone())) };
        self.links_mut().insert(index, link);
        let attached = AttachedRecord {
            result: "{}".to_owned(),
            statuses: vec![NetworkStatus {
                name: nad.to_string(),
                interface: key.interface.clone(),
                mac: mac.clone(),
                ..NetworkStatus::default()
            }],
            links: vec![LinkIdentity {
                index: Some(index),
                name: key.interface.clone(),
                mac: Some(mac),
                ..LinkIdentity::default()
            }],
            replaced_routes: Vec::new(),
        };
        (index, attached)
    }

    pub fn desired(&self) -> DesiredPod {
        DesiredPod {
            pod: self.pod.clone(),
            networks: self.cache.networks.clone(),
            confirm: self.confirm.clone(),
            lifecycle: self.lifecycle,
            host_network: self.host_network,
            virt_launcher: self.virt_launcher,
        }
    }

    pub fn observe(&self) -> ObservedPod {
        let cached = self.multus.values().filter(|_| self.unreadable.is_none());
        let records = self.journal.values().chain(cached).cloned();
        let links = self.sandbox.as_ref().map(|_| {
            let links = self.links().iter().map(|(&index, link)| ObservedLink {
                index,
                name: link.name.clone(),
                mac: Some(link.owner.as_ref().map_or(format!("02:00:00:00:01:{index:02x}"), |_| mac(index))),
                ..ObservedLink::default()
            });
            links.collect()
        });
        ObservedPod {
            sandbox: self.sandbox.clone().map_or(SandboxState::Absent, SandboxState::Ready),
            links,
            host_links: BTreeMap::new(),
            boot: self.boot.clone(),
            records: records.collect(),
            unreadable: self.unreadable.clone(),
            defaults_known: self.defaults_known,
            default_statuses: vec![serde_json::from_str(CLUSTER_ENTRY).unwrap()],
            results: self.results.clone(),
            requested: self.requested.clone(),
            namespaces: self.namespaces.keys().cloned().collect(),
            network_status: self.cache.network_status.clone(),
            attachments: self.cache.attachments.clone(),
            annotations_confirmed: self.confirmed,
        }
    }

    /// A plan without side effects.
    pub fn plan(&self) -> PodPlan {
        self.plan_with(&mut self.reported.clone())
    }

    fn plan_with(&self, reported: &mut Reported) -> PodPlan {
        let (desired, observed) = (self.desired(), self.observe());
        let input = PlanInput {
            desired: &desired,
            observed: &observed,
            failures: &self.failures,
            now: self.now,
            mode: self.mode,
            running: None,
        };
        plan(input, |nad| self.nads.get(nad).cloned().unwrap_or(NadState::Missing), reported)
    }

    /// The daemon starts again: what it had in memory is lost.
    pub fn restart(&mut self) {
        self.failures = Failures::default();
        self.reported = Reported::default();
        self.confirmed = false;
        self.watch();
    }

    /// Applies the next step, or writes the annotations. Returns whether there was something to do.
    pub fn work(&mut self, fault: Option<Fault>) -> bool {
        let mut reported = self.reported.clone();
        let plan = self.plan_with(&mut reported);
        self.reported = reported;
        self.failures.retain(&plan.failing);
        self.events.extend(plan.events);
        if let Some(requested) = plan.requested {
            self.requested = requested;
        }
        match plan.step {
            Some(Step::Add(step)) => self.add(&step, fault),
            Some(Step::Remove(step)) => self.remove(&step, fault),
            Some(Step::Forget(key)) => match fault {
                Some(Fault::CrashFirst) => self.restart(),
                _ => _ = self.journal.remove(&key).expect("only records of the journal are forgotten"),
            },
            Some(Step::Finish(record, _)) => match fault {
                Some(Fault::CrashFirst) => self.restart(),
                _ => _ = self.journal.insert(record.key.clone(), *record),
            },
            None => {
                let Some(update) = plan.annotations else { return false };
                if fault == Some(Fault::PluginFails) {
                    // The API server fails.
                    return true;
                }
                let same = (&self.cache.network_status, &self.cache.attachments)
                    == (&self.server.network_status, &self.server.attachments);
                if same {
                    let changes = update.network_status != self.server.network_status
                        || update.attachments != self.server.attachments;
                    self.writes += usize::from(changes);
                    self.server.network_status = update.network_status;
                    self.server.attachments = update.attachments;
                }
                // The answer to the write, or to the read after a conflict.
                self.watch();
                self.confirmed = true;
            }
        }
        true
    }

    fn add(&mut self, step: &AddStep, fault: Option<Fault>) {
        self.confirmed = false;
        let sandbox = self.sandbox.clone().expect("ADD needs a sandbox");
        assert_eq!((self.lifecycle, self.mode), (PodLifecycle::Running, PlugMode::On));
        assert_eq!(step.sandbox, sandbox);
        let before: Vec<u32> = self.links().keys().copied().collect();
        let intent = step.intent(before);
        let key = intent.key.clone();
        match fault {
            Some(Fault::CrashFirst) => return self.restart(),
            Some(Fault::JournalFails) => return self.fail_add(step, "the journal cannot be written"),
            _ => {}
        }
        // The result of an earlier attachment must not be taken for that of this one.
        self.results.remove(&key);
        self.journal.insert(key.clone(), intent.clone());
        if fault == Some(Fault::CrashAfterIntent) {
            return self.restart();
        }
        self.calls.push(format!("ADD {} {}", step.nad.name, step.interface));
        let exists = self.links().values().any(|link| link.name == key.interface);
        assert!(!exists, "ADD of {key:?} where a link of that name exists");
        if self.broken.contains(&step.nad) || fault == Some(Fault::PluginFails) {
            return self.fail_add(step, "no such device");
        }
        self.addresses.insert(key.clone());
        if fault == Some(Fault::PluginFailsWithAddress) {
            return self.fail_add(step, "cannot create the link");
        }
        let (_, attached) = self.make_link(&key, &step.nad);
        if fault == Some(Fault::PluginFailsWithLink) {
            return self.fail_add(step, "timeout");
        }
        if fault == Some(Fault::CrashBeforeResult) {
            return self.restart();
        }
        if step.default_route.is_empty() {
            self.results.insert(key.clone(), attached.clone());
        }
        if fault == Some(Fault::CrashAfterResult) {
            return self.restart();
        }
        self.journal.insert(key, AttachmentRecord { phase: RecordPhase::Attached(attached), ..intent });
        self.failures.succeed(&Step::Add(Box::new(step.clone())));
        self.events.push(step.added());
        if fault == Some(Fault::CrashLast) {
            self.restart();
        }
    }

    fn fail_add(&mut self, step: &AddStep, error: &str) {
        self.failures.record(step.attempt.clone(), step.fingerprint, error, self.now);
        self.events.push(step.failed(error));
    }

    fn remove(&mut self, step: &RemoveStep, fault: Option<Fault>) {
        let key = &step.record.key;
        self.confirmed = false;
        self.failures.start_replug(step, self.now);
        match fault {
            Some(Fault::CrashFirst) => return self.restart(),
            Some(Fault::JournalFails) => return self.fail_remove(step, "the journal cannot be written"),
            _ => {}
        }
        if let Some(record) = step.intent() {
            self.journal.insert(key.clone(), record);
        }
        match fault {
            Some(Fault::CrashAfterIntent) => return self.restart(),
            Some(Fault::PluginFails) => return self.fail_remove(step, "no such device"),
            _ => {}
        }
        let with = if step.mode == DelMode::ReleaseOnly { " without namespace" } else { "" };
        self.calls.push(format!("DEL {} {}{with}", step.record.nad.name, key.interface));
        self.addresses.remove(key);
        if fault == Some(Fault::PluginFailsWithAddress) {
            return self.fail_remove(step, "cannot delete the link");
        }
        if step.mode == DelMode::WithNamespace {
            let links = self.namespaces.get_mut(&step.record.netns).expect("DEL in a namespace that exists");
            links.retain(|_, link| {
                let deleted = link.name == key.interface;
                let owner = link.owner.as_ref().map(|(owner, _)| owner);
                assert!(!deleted || owner == Some(key), "DEL of {key:?} deletes the link of {owner:?}");
                !deleted
            });
        }
        if fault == Some(Fault::PluginFailsWithLink) {
            return self.fail_remove(step, "timeout");
        }
        for index in &step.leftover_links {
            let links = self.links_mut();
            let owner = links.get(index).and_then(|link| link.owner.clone());
            if links.remove(index).is_some() {
                assert_eq!(owner.map(|(owner, _)| owner).as_ref(), Some(key), "deletes a link by index");
            }
        }
        if matches!(fault, Some(Fault::CrashBeforeResult | Fault::CrashAfterResult)) {
            return self.restart();
        }
        self.multus.remove(key);
        self.results.remove(key);
        self.journal.insert(key.clone(), step.removed_record());
        self.failures.succeed(&Step::Remove(Box::new(step.clone())));
        self.events.extend(step.removed());
        if fault == Some(Fault::CrashLast) {
            self.restart();
        }
    }

    fn fail_remove(&mut self, step: &RemoveStep, error: &str) {
        self.failures.record(step.attempt.clone(), step.fingerprint, error, self.now);
        self.events.push(step.failed(error));
    }

    /// Works until nothing is left to do before a backoff ends.
    pub fn settle(&mut self) {
        for _ in 0..MAX_STEPS {
            if !self.work(None) {
                return;
            }
        }
        panic!("no convergence: {:#?}\n{:#?}", self.plan(), self.calls);
    }

    /// Works until nothing is left to do, also after all backoffs.
    pub fn settle_all(&mut self) {
        self.watch();
        self.settle();
        // One failed attempt is retried at a time, and after a retry that succeeds all others.
        for _ in 0..2 * self.failures.attempts().count() {
            self.pass_backoffs();
            self.settle();
        }
    }

    /// Lets time pass until the backoff has ended.
    pub fn pass_backoffs(&mut self) {
        self.now += Duration::from_mins(5);
    }
}
