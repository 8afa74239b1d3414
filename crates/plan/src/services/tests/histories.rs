//! S3, S6, S7: random histories of pods, services and slices. The union of the slices always converges to a model that is
//! computed from the history itself, and never contains a primary address.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use api::{
    LabelSelector,
    networkservice::{Hostnames, TargetPort},
    selection::NadRef,
};
use serde_json::{Value, json};

use super::{
    fixtures::{NAMESPACE, SERVICE_UID, container_port, owner, port, spec, time},
    store::Store,
};
use crate::services::{
    DesiredEndpoints, EndpointInput, Families, Labels, NetworkState, NodeZones, ObservedEndpoint, PodFacts,
    PodPhase, ServiceSpec, SliceOwner, SlicePlan, endpoints, interfaces, withdraw,
};

/// A generator of numbers from a seed (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() % u64::try_from(limit).unwrap()).unwrap()
    }

    fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    fn pick<T: Clone>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())].clone()
    }
}

/// A pod as the history makes it, before any of it is parsed.
#[derive(Debug, Clone)]
#[expect(clippy::struct_excessive_bools, reason = "the fields are independent of each other")]
struct Pod {
    generation: usize,
    app: &'static str,
    machine: Option<&'static str>,
    node: &'static str,
    finished: bool,
    deleting: bool,
    ready: bool,
    host_network: bool,
    port: u16,
    /// NAD, interface and addresses.
    attachments: Vec<(&'static str, &'static str, Vec<String>)>,
    /// Whether the annotation is unreadable.
    broken: bool,
}

/// The cluster of one history.
struct World {
    random: Random,
    pods: BTreeMap<usize, Pod>,
    nodes: BTreeSet<&'static str>,
    spec: ServiceSpec,
    owner: SliceOwner,
    store: Store,
    pods_made: usize,
    services_made: usize,
}

const NODES: [&str; 3] = ["n1", "n2", "n3"];

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let store = Store::with_max(random.pick(&[1, 2, 5, 100]));
        Self {
            random,
            pods: BTreeMap::new(),
            nodes: NODES.into(),
            spec: spec(),
            owner: SliceOwner { families: Families::DUAL, ..owner() },
            store,
            pods_made: 0,
            services_made: 0,
        }
    }

    fn random_attachments(&mut self) -> Vec<(&'static str, &'static str, Vec<String>)> {
        let random = &mut self.random;
        let mut attachments = Vec::new();
        for interface in ["net1", "net2"] {
            if random.one_in(4) {
                continue;
            }
            let nad = random.pick(&["shop/blue", "blue", "shop/blue", "shop/red", "other/blue"]);
            let count = random.below(3);
            // Few addresses, so that pods collide.
            let address = |random: &mut Random| match random.below(4) {
                0 => format!("fd00::{}", random.below(40) + 1),
                _ => format!("10.1.0.{}", random.below(40) + 1),
            };
            attachments.push((nad, interface, (0..count).map(|_| address(random)).collect()));
        }
        attachments
    }

    fn create_pod(&mut self, slot: usize) {
        self.pods_made += 1;
        let attachments = self.random_attachments();
        let random = &mut self.random;
        let pod = Pod {
            generation: self.pods_made,
            app: random.pick(&["db", "db", "db", "web"]),
            machine: random.pick(&[None, None, Some("vm1"), Some("vm2")]),
            node: random.pick(&NODES),
            finished: false,
            deleting: false,
            ready: random.one_in(2),
            host_network: random.one_in(12),
            port: random.pick(&[5432, 5432, 6432]),
            attachments,
            broken: random.one_in(12),
        };
        self.pods.insert(slot, pod);
    }

    fn change_pod(&mut self) {
        let slot = self.random.below(12);
        if !self.pods.contains_key(&slot) || self.random.one_in(10) {
            return self.create_pod(slot);
        }
        let attachments = self.random_attachments();
        let choice = self.random.below(9);
        let (node, app) = (self.random.pick(&NODES), self.random.pick(&["db", "web"]));
        let Some(pod) = self.pods.get_mut(&slot) else { return };
        match choice {
            0 | 1 => pod.ready = !pod.ready,
            2 => pod.deleting = true,
            3 => (pod.finished, pod.ready) = (true, false),
            4 => pod.app = app,
            5 => pod.attachments = attachments,
            6 => pod.broken = !pod.broken,
            7 => pod.node = node,
            _ => _ = self.pods.remove(&slot),
        }
    }

    fn change_service(&mut self) {
        let random = &mut self.random;
        match random.below(9) {
            0 => self.spec.network = NadRef::new(NAMESPACE, random.pick(&["blue", "red"])),
            1 => {
                self.spec.interface =
                    random.pick(&[None, Some("net1"), Some("net2")]).map(|name| name.parse().unwrap());
            }
            2 => {
                let labels = BTreeMap::from([("app".to_owned(), random.pick(&["db", "web"]).to_owned())]);
                self.spec.selector = LabelSelector { match_labels: labels, ..LabelSelector::default() };
            }
            3 => self.spec.publish_not_ready = random.one_in(2),
            4 => self.spec.hostnames = random.pick(&[Hostnames::None, Hostnames::PodName]),
            5 => {
                let named = vec![port("pg", 5432, TargetPort::Name("pg".to_owned()))];
                self.spec.ports = random.pick(&[named, spec().ports, Vec::new()]);
            }
            6 => {
                self.owner.families =
                    random.pick(&[Families::DUAL, Families::new(["IPv4"]), Families::new(["IPv6"])]);
            }
            7 => _ = self.owner.labels.insert("team".to_owned(), random.below(3).to_string()),
            // The Service is deleted and created again; its slices are collected later.
            _ => {
                self.services_made += 1;
                self.owner.uid = format!("{SERVICE_UID}-{}", self.services_made).into();
            }
        }
        self.owner.network = self.spec.network.to_string().into();
    }

    /// Another client edits a slice.
    fn edit_slice(&mut self) {
        let count = self.store.slices().len();
        if count == 0 {
            return;
        }
        let (index, choice) = (self.random.below(count), self.random.below(7));
        let slice = self.store.slice(index);
        match choice {
            0 => return self.store.remove(index),
            1 => slice.endpoints.push(ObservedEndpoint::Altered),
            2 => slice.endpoints.clear(),
            3 => slice.labels = Arc::new(Labels::default()),
            4 => slice.ports = None,
            5 => slice.network = None,
            _ => slice.owner = None,
        }
        self.store.touch(index);
    }

    /// A second leader creates what is missing from an empty cache.
    fn double(&mut self) {
        let plan = Store::with_max(self.store.max).plan(&self.desired(), &self.owner);
        let creates = plan.creates.into_iter().take(self.random.below(3));
        for content in creates.collect::<Vec<_>>() {
            self.store.create(&content, &self.owner);
        }
    }

    fn facts(slot: usize, pod: &Pod) -> PodFacts {
        let name = format!("pod-{slot}");
        let machine = pod.machine.map(|machine| ("kubevirt.io/created-by", machine));
        let primary = json!({"name": "cbr0", "interface": "eth0", "ips": [format!("10.244.0.{}", slot + 1)], "default": true});
        let status = pod
            .attachments
            .iter()
            .map(|(nad, interface, ips)| json!({"name": nad, "interface": interface, "ips": ips}));
        let text = if pod.broken {
            "[{".to_owned()
        } else {
            [primary].into_iter().chain(status).collect::<Value>().to_string()
        };
        PodFacts {
            namespace: NAMESPACE.into(),
            name: name.as_str().into(),
            uid: format!("{name}-{}", pod.generation).into(),
            labels: Arc::new(Labels::new([("app", pod.app)].into_iter().chain(machine))),
            node: Some(pod.node.into()),
            phase: if pod.finished { PodPhase::Finished } else { PodPhase::Active },
            deleting: pod.deleting,
            ready: pod.ready,
            ready_since: Some(time(0)),
            created: time(i64::try_from(pod.generation).unwrap()),
            hostname: None,
            subdomain: None,
            host_network: pod.host_network,
            ports: Arc::new([container_port("pg", api::networkservice::Protocol::Tcp, pod.port)]),
            interfaces: interfaces(Some(&text), NAMESPACE),
        }
    }

    fn desired(&self) -> DesiredEndpoints {
        let pods: Vec<PodFacts> = self.pods.iter().map(|(slot, pod)| Self::facts(*slot, pod)).collect();
        let nodes: NodeZones = self.nodes.iter().map(|node| ((*node).into(), None)).collect();
        let input = EndpointInput {
            spec: &self.spec,
            families: self.owner.families,
            nodes: &nodes,
            network: &NetworkState::Found { addresses: None },
            published: &self.store.slices(),
        };
        endpoints(&input, pods.iter().filter(|pod| self.spec.selects(pod)))
    }

    /// What DNS should answer with: each address with its pod, the number of its port and whether it is ready.
    fn model(&self) -> BTreeMap<String, (String, u16, bool)> {
        let app = &self.spec.selector.match_labels["app"];
        let mut claims: BTreeMap<String, BTreeMap<usize, &Pod>> = BTreeMap::new();
        for (slot, pod) in &self.pods {
            let node = self.nodes.contains(pod.node) || self.spec.publish_not_ready;
            if pod.app != app || pod.finished || pod.host_network || pod.broken || !node {
                continue;
            }
            for (nad, interface, ips) in &pod.attachments {
                let nad = if nad.contains('/') { (*nad).to_owned() } else { format!("{NAMESPACE}/{nad}") };
                let wanted = self.spec.interface.as_ref().is_none_or(|wanted| wanted.as_str() == *interface);
                if nad != self.spec.network.to_string() || !wanted {
                    continue;
                }
                for ip in ips {
                    let families = self.owner.families;
                    if (ip.contains(':') && families.ipv6) || (!ip.contains(':') && families.ipv4) {
                        claims.entry(ip.clone()).or_default().insert(*slot, pod);
                    }
                }
            }
        }
        let winner = |claims: &BTreeMap<usize, &Pod>| -> Option<usize> {
            let alive = |pod: &Pod| pod.ready || !pod.deleting;
            let some_alive = claims.values().any(|pod| alive(pod));
            let mut list: Vec<(usize, &Pod)> = claims
                .iter()
                .map(|(slot, pod)| (*slot, *pod))
                .filter(|(_, pod)| !some_alive || alive(pod))
                .collect();
            let machines: BTreeSet<_> = list.iter().map(|(_, pod)| pod.machine).collect();
            if list.len() > 1 && (machines.len() > 1 || machines.contains(&None)) {
                return None;
            }
            list.sort_by_key(|(_, pod)| (pod.ready && !pod.deleting, pod.ready, pod.generation));
            list.last().map(|(slot, _)| *slot)
        };
        let entry = |(address, claims): (String, BTreeMap<usize, &Pod>)| {
            let slot = winner(&claims)?;
            let pod = claims[&slot];
            let named = self.spec.ports.iter().any(|port| matches!(port.target, TargetPort::Name(_)));
            let number = if self.spec.ports.is_empty() {
                0
            } else if named {
                pod.port
            } else {
                5432
            };
            let ready = self.spec.publish_not_ready || (pod.ready && !pod.deleting);
            Some((address, (format!("pod-{slot}-{}", pod.generation), number, ready)))
        };
        claims.into_iter().filter_map(entry).collect()
    }

    /// What the slices contain. An address that is in two slices fails the test.
    fn published(&self) -> BTreeMap<String, (String, u16, bool)> {
        let mut published = BTreeMap::new();
        for slice in self.store.slices() {
            let ports = slice.ports.as_ref().unwrap().as_slice();
            assert!(ports.len() <= 1);
            let number = ports.first().map_or(0, |port| port.port);
            for endpoint in &slice.endpoints {
                let ObservedEndpoint::Known(one) = endpoint else { panic!("an altered endpoint is left") };
                let value = (one.pod_uid.to_string(), number, one.conditions.ready);
                let twice = published.insert(one.address.to_string(), value);
                assert_eq!(twice, None, "{} is in two slices", one.address);
            }
        }
        published
    }

    fn assert_no_primary_address(&self) {
        for slice in self.store.slices() {
            for endpoint in &slice.endpoints {
                if let ObservedEndpoint::Known(one) = endpoint {
                    assert!(!one.address.to_string().starts_with("10.244."), "{one:?}");
                }
            }
        }
    }

    /// A process that ends in the middle of its writes: some of the plan is applied.
    fn apply_a_part(&mut self) {
        let mut plan = self.store.plan(&self.desired(), &self.owner);
        let random = &mut self.random;
        plan.creates.truncate(random.below(3));
        plan.updates.truncate(random.below(3));
        plan.deletes.truncate(random.below(3));
        self.store.apply(&plan, &self.owner);
    }

    fn converge(&mut self) {
        let desired = self.desired();
        self.store.converge(&desired, &self.owner);
        let model = self.model();
        assert_eq!(self.published(), model);
        let ready = model.values().filter(|(.., ready)| *ready).count();
        assert_eq!(desired.counts.summary, format!("{ready}/{}", model.len()));
        // R19, and nothing of a family that the Service does not have.
        let mut families: HashMap<_, usize> = HashMap::new();
        for slice in self.store.slices() {
            *families.entry(slice.family.unwrap()).or_default() += 1;
        }
        assert_eq!(families.keys().copied().collect::<BTreeSet<_>>(), self.owner.families.iter().collect());
        // A fresh create publishes the same.
        let mut fresh = Store::with_max(self.store.max);
        fresh.converge(&desired, &self.owner);
        assert_eq!(fresh.union(), self.store.union());
    }
}

/// Prints the seed of a history that fails.
struct PrintSeed(u64);

impl Drop for PrintSeed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("the history with seed {0} failed: PATCHBAY_SEED={0} runs it alone", self.0);
        }
    }
}

fn run(seed: u64) {
    let _print = PrintSeed(seed);
    let mut world = World::new(seed);
    for slot in 0..world.random.below(12) {
        world.create_pod(slot);
    }
    for _ in 0..60 {
        match world.random.below(20) {
            0..=9 => world.change_pod(),
            10..=12 => world.change_service(),
            13 => {
                let node = world.random.pick(&NODES);
                if !world.nodes.remove(node) {
                    world.nodes.insert(node);
                }
            }
            14 => world.edit_slice(),
            15 => world.double(),
            16 => world.apply_a_part(),
            _ => world.converge(),
        }
        world.assert_no_primary_address();
    }
    world.converge();
    // Without the Service, nothing is left.
    let plan = withdraw(world.store.slices());
    world.store.apply(&plan, &world.owner);
    assert_eq!(withdraw(world.store.slices()), SlicePlan::default());
    assert_eq!(world.store.slices().len(), 0);
}

#[test]
fn s3_s6_s7_random_histories_converge_to_the_model_and_never_publish_a_primary_address() {
    if let Some(seed) = std::env::var("PATCHBAY_SEED").ok().and_then(|seed| seed.parse().ok()) {
        return run(seed);
    }
    let histories = if std::env::var_os("PATCHBAY_SOAK").is_some() { 1000 } else { 50 };
    (0..histories).for_each(run);
}
