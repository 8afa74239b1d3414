//! Random sequences of edits, events and faults on a simulated node.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    super::{AttachedRecord, NadState, PodLifecycle, SandboxState},
    CLUSTER_ENTRY, FAULTS, SimNode, nad, ready,
};

/// A generator of numbers from a seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() % u64::try_from(limit).unwrap()).unwrap()
    }

    fn one_in(&mut self, chance: usize) -> bool {
        self.below(chance) == 0
    }

    fn pick<'a, T: ?Sized>(&mut self, list: &[&'a T]) -> &'a T {
        list[self.below(list.len())]
    }
}

/// Prints the seed of a sequence that fails.
struct SeedOnFailure(u64);

impl Drop for SeedOnFailure {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("the sequence with seed {} failed: PATCHBAY_SEED={} runs it alone", self.0, self.0);
        }
    }
}

/// An annotation with up to four elements.
fn random_networks(random: &mut Random) -> String {
    if random.one_in(25) {
        return random.pick(&["", "[]", "[{", "{\"name\":\"a\"}"]).to_owned();
    }
    let count = random.below(5);
    if random.one_in(4) {
        let items: Vec<&str> =
            (0..count).map(|_| random.pick(&["a", "b", "c", "a@net1", "b@net1", "c@data1", "d"])).collect();
        return items.join(",");
    }
    let elements: Vec<String> = (0..count)
        .map(|_| {
            let name = random.pick(&["a", "a", "b", "b", "c", "d"]);
            let interface = random.pick(&[
                "",
                "",
                r#","interface":"net1""#,
                r#","interface":"net2""#,
                r#","interface":"data1""#,
            ]);
            let extra = match random.below(30) {
                0 => r#","mac":"02:00:00:00:00:99""#,
                1 => r#","interface":"eth0""#,
                2 => r#","ips":["bad"]"#,
                3 => r#","interface":"a/b""#,
                _ => "",
            };
            format!(r#"{{"name":"{name}"{interface}{extra}}}"#)
        })
        .collect();
    format!("[{}]", elements.join(","))
}

/// One event outside of the daemon.
fn happen(node: &mut SimNode, random: &mut Random) {
    let linked: Vec<String> = node
        .sandbox
        .as_ref()
        .map(|_| {
            node.links().values().filter(|link| link.owner.is_some()).map(|link| link.name.clone()).collect()
        })
        .unwrap_or_default();
    match random.below(16) {
        0..=5 => {
            node.server.networks = Some(random_networks(random));
            if !random.one_in(3) {
                node.watch();
            }
        }
        6 => {
            let name = nad(random.pick(&["a", "b", "c", "d"]));
            match random.below(4) {
                0 => _ = node.nads.remove(&name),
                1 => _ = node.nads.insert(name, NadState::Invalid { message: "not JSON".to_owned() }),
                _ => _ = node.nads.insert(name.clone(), ready(&name.name)),
            }
        }
        7 => {
            let name = nad(random.pick(&["a", "b", "c", "d"]));
            if !node.broken.remove(&name) {
                node.broken.insert(name);
            }
        }
        8 | 9 => {
            if let Some(name) = linked.get(random.below(linked.len().max(1))) {
                node.delete_link(name);
            }
        }
        10 => {
            // A link without a recorded index that is renamed is not found again: no record identifies it.
            let recorded = |name: &str| {
                let has_index =
                    |attached: &AttachedRecord| attached.links.iter().all(|link| link.index.is_some());
                let observed = node.observe();
                let SandboxState::Ready(sandbox) = &observed.sandbox else { return false };
                let mut records = observed
                    .records
                    .iter()
                    .filter(|record| record.key.interface == name && record.key.container == sandbox.id);
                records.clone().any(|record| record.attached().is_some_and(has_index))
                    && records.all(|record| record.attached().is_none_or(has_index))
            };
            let name = linked.get(random.below(linked.len().max(1))).filter(|name| recorded(name)).cloned();
            if let Some(name) = name
                && !node.links().values().any(|link| link.name == format!("{name}-x"))
            {
                let link = node.links_mut().values_mut().find(|link| link.name == name);
                link.unwrap().name = format!("{name}-x");
            }
        }
        11 => {
            let name = random.pick(&["net1", "net2", "net3", "data1"]);
            let intent = node
                .journal
                .values()
                .any(|record| record.key.interface == name && record.attached().is_none());
            // Without a recorded index, a link of the recorded name is the attachment's.
            let by_name = node.multus.keys().any(|key| key.interface == name);
            if node.sandbox.is_some()
                && !intent
                && !by_name
                && !node.links().values().any(|link| link.name == name)
            {
                node.add_foreign_link(name);
            }
        }
        12 => {
            let foreign: Vec<String> = node
                .sandbox
                .as_ref()
                .map(|_| node.link_names().into_iter().map(str::to_owned).collect())
                .unwrap_or_default();
            for name in foreign {
                if node.links().values().any(|link| link.name == name && link.owner.is_none()) {
                    node.delete_link(&name);
                }
            }
        }
        13 => {
            if node.sandbox.is_some() && node.lifecycle == PodLifecycle::Running {
                node.recreate_sandbox();
            }
        }
        14 => {
            // The annotation that the daemon wrote is lost.
            node.server.network_status = Some(format!("[{CLUSTER_ENTRY}]"));
            if random.one_in(2) {
                node.server.attachments = None;
            }
        }
        15 => node.restart(),
        _ => unreachable!(),
    }
}

fn run_sequence(seed: u64) {
    let _printer = SeedOnFailure(seed);
    let mut random = Random(seed);
    let mut node = if random.one_in(2) {
        SimNode::started(&random_networks(&mut random))
    } else {
        let mut node = SimNode::with(&random_networks(&mut random));
        node.has_multus = random.one_in(2);
        node
    };
    for _ in 0..10 + random.below(30) {
        if random.one_in(3) {
            happen(&mut node, &mut random);
        }
        let fault = random.one_in(3).then(|| FAULTS[random.below(FAULTS.len())]);
        node.work(fault);
        if random.one_in(4) {
            node.pass_backoffs();
        }
        if random.one_in(8) {
            node.settle_all();
            node.check();
            node.check_annotation();
        }
    }
    node.settle_all();
    node.check();
    node.check_annotation();
    // A restart changes nothing, other than that failing networks are tried again.
    let before = (node.server.clone(), node.namespaces.clone());
    node.restart();
    node.settle();
    assert_eq!((&node.server, &node.namespaces), (&before.0, &before.1), "after a restart");
    // The pod is deleted while the daemon is down.
    node.lifecycle = PodLifecycle::Ended;
    node.end_sandbox();
    node.restart();
    node.settle_all();
    assert_eq!((&node.journal, &node.addresses), (&BTreeMap::new(), &BTreeSet::new()), "after the pod's end");
}

#[test]
fn status_links_and_annotation_agree_after_any_sequence_of_edits_and_faults() {
    if let Some(seed) = std::env::var("PATCHBAY_SEED").ok().and_then(|seed| seed.parse().ok()) {
        return run_sequence(seed);
    }
    let sequences = if std::env::var_os("PATCHBAY_SOAK").is_some() { 10_000 } else { 200 };
    for seed in 0..sequences {
        run_sequence(seed);
    }
}
