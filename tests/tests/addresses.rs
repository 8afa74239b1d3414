//! Addresses: many nodes against a real API server, in a lab without nodes of its own.
#![allow(clippy::print_stdout, reason = "a test without the standard harness prints what it measured")]

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::{IpAddr, Ipv4Addr},
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use api::ipam::IpamSpec as Spec;
use e2e::{
    Suite,
    fleet::{FAST, Fleet},
    patchbay, tests,
};
use futures::{StreamExt as _, future::join_all};
use kube::Client;
use lab::{Lab, Topology, audit::AuditedRequest, wait};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    Suite {
        name: "t-addresses",
        topology: Topology::ControlPlaneOnly,
        set_up: |lab| Box::pin(async move { install(&lab) }),
        tests: tests![
            nodes_take_blocks_and_hand_out_every_address_once,
            a_small_subnet_is_usable_to_its_last_address_from_any_node,
            an_address_in_somebody_elses_block_is_lent,
            a_holder_that_is_silent_is_named,
            blocks_survive_a_crash_and_a_new_node_object,
            a_thousand_addresses_cost_few_requests,
            random_histories_never_give_an_address_twice_and_leak_none,
        ],
    }
    .run()
}

/// Only the kinds: who may write is another suite's.
fn install(lab: &Lab) -> Result<()> {
    let path = patchbay::manifests_dir().join("00-crds.yaml");
    lab.kubectl(&["apply", "-f", path.to_str().context("a path in UTF-8")?])?;
    lab.kubectl(&["wait", "--for=condition=Established", "crd/ipblocks.patchbay.dev", "--timeout=30s"])?;
    Ok(())
}

fn spec(value: Value) -> Result<Spec> {
    Ok(serde_json::from_value(value)?)
}

async fn clients(lab: &Lab, count: usize) -> Result<Vec<Client>> {
    let mut all = Vec::new();
    for _ in 0..count {
        all.push(lab.client().await?);
    }
    Ok(all)
}

async fn fleet(lab: &Lab, name: &str, ipam: Value, count: usize) -> Result<Fleet> {
    let mut fleet = Fleet::new(clients(lab, count.div_ceil(32)).await?, name, &spec(ipam)?, count, FAST)?;
    fleet.start_all()?;
    Ok(fleet)
}

/// Adds one sandbox, which must succeed.
async fn add(fleet: &Fleet, number: usize, container: &str) -> Result<Vec<IpAddr>> {
    Ok(fleet.add(number, container, Vec::new(), SOON).await??)
}

async fn nodes_take_blocks_and_hand_out_every_address_once(lab: Lab) -> Result<()> {
    let ipam = json!({"subnets": ["10.1.0.0/22", "fd01::/64"], "gateways": ["10.1.0.1"]});
    let fleet = fleet(&lab, "plain", ipam, 5).await?;
    let begun = Instant::now();
    let names: Vec<(usize, String)> = (0..200).map(|pod| (pod % 5, format!("pod-{pod}"))).collect();
    let all = join_all(names.iter().map(|(number, name)| add(&fleet, *number, name))).await;
    for addresses in all {
        let addresses = addresses?;
        ensure!(addresses.len() == 2 && addresses[0].is_ipv4() && addresses[1].is_ipv6(), "{addresses:?}");
    }
    println!("200 pods of 5 nodes after {:?}", begun.elapsed());
    ensure!(fleet.check_no_duplicates()? == 400);
    ensure!(
        !fleet
            .leases()
            .iter()
            .any(|(_, lease)| lease.addresses.contains(&"10.1.0.1".parse().expect("an address")))
    );
    for (number, name) in &names {
        let again = add(&fleet, *number, name).await?;
        let (_, lease) = fleet
            .leases()
            .into_iter()
            .find(|(_, lease)| lease.key.container == *name)
            .context("the lease")?;
        ensure!(again == lease.addresses, "asked again it is {again:?}");
    }
    let table = lab.kubectl(&["get", "ipblocks"])?;
    println!("{}", table.lines().take(4).collect::<Vec<_>>().join("\n"));
    for (number, name) in &names {
        fleet.delete(*number, name)?;
        fleet.delete(*number, name)?;
    }
    fleet.wait_until_released(SOON).await?;
    fleet.shutdown().await;
    Ok(())
}

async fn a_small_subnet_is_usable_to_its_last_address_from_any_node(lab: Lab) -> Result<()> {
    for (subnet, count) in [("10.2.0.0/28", 14), ("10.2.1.0/31", 2), ("10.2.2.0/32", 1), ("fd02::/124", 15)] {
        let mut fleet = fleet(&lab, "small", json!({"subnets": [subnet]}), 3).await?;
        let mut found = BTreeSet::new();
        for pod in 0..count {
            let name = format!("pod-{pod}");
            let addresses =
                add(&fleet, pod % 3, &name).await.with_context(|| format!("{subnet}: pod {pod}"))?;
            found.extend(addresses);
        }
        ensure!(found.len() == count && fleet.check_no_duplicates()? == count, "{found:?}");
        let last = fleet.add(0, "one-too-many", Vec::new(), SOON).await?;
        let error = last.err().context("there is one more than there can be")?;
        ensure!(error.code as u32 == 11 && error.msg.contains("no free"), "{error}");
        // One goes on one node, and comes on another.
        fleet.delete(0, "pod-0")?;
        let begun = Instant::now();
        wait::until(SOON, "the freed address", || async {
            Ok(fleet.add(1, "late", Vec::new(), SOON).await?.ok())
        })
        .await
        .with_context(|| fleet.describe())?;
        println!("{subnet}: {count} addresses, one moved to another node after {:?}", begun.elapsed());
        fleet.check_no_duplicates()?;
        for number in 0..3 {
            for (_, lease) in fleet.leases().into_iter().filter(|(holder, _)| *holder == number) {
                fleet.delete(number, &lease.key.container)?;
            }
        }
        fleet.wait_until_released(SOON).await?;
        fleet.crash(0).await;
        fleet.shutdown().await;
    }
    Ok(())
}

async fn an_address_in_somebody_elses_block_is_lent(lab: Lab) -> Result<()> {
    let fleet = fleet(&lab, "lend", json!({"subnets": ["10.3.0.0/24"]}), 2).await?;
    let first = add(&fleet, 0, "first").await?[0];
    let IpAddr::V4(first) = first else { anyhow::bail!("{first}") };
    let near = |offset: u32| {
        let base = first.to_bits() & !15;
        IpAddr::V4((base + offset).into())
    };
    let wanted = (2..14).map(near).find(|one| *one != IpAddr::V4(first)).context("another one")?;
    let lent = fleet.add(1, "borrower", vec![wanted], SOON).await??;
    ensure!(lent == [wanted], "{lent:?}");
    let objects = fleet.objects().await?;
    let single = objects.iter().find(|one| one.spec.cidr == wanted.into()).context("its block")?;
    ensure!(single.spec.holder.node == "sim-1-lend", "{:?}", single.spec);
    let around =
        objects.iter().find(|one| one.spec.holder.node == "sim-0-lend").context("the block around")?;
    let told = around.status.clone().unwrap_or_default();
    ensure!(told.lent.iter().any(|one| one.address == wanted), "{told:?}");
    // Nobody gets it twice, neither there nor here.
    for number in [0, 1] {
        let again = fleet.add(number, "thief", vec![wanted], SOON).await?;
        let error = again.err().context("it was given twice")?;
        println!("{error}");
    }
    let used = fleet.add(1, "other", vec![IpAddr::V4(first)], SOON).await?;
    let error = used.err().context("it was given twice")?;
    ensure!(error.msg.contains("in use on node sim-0"), "{error}");
    // It comes back when it is free, and the holder can give it again.
    fleet.delete(1, "borrower")?;
    wait::until(SOON, "the address to come back", || async {
        Ok(fleet.add(0, "next", vec![wanted], SOON).await?.ok())
    })
    .await
    .with_context(|| fleet.describe())?;
    for (number, name) in [(0, "first"), (0, "next"), (0, "thief"), (1, "thief"), (1, "other")] {
        fleet.delete(number, name)?;
    }
    fleet.wait_until_released(SOON).await?;
    fleet.shutdown().await;
    Ok(())
}

async fn a_holder_that_is_silent_is_named(lab: Lab) -> Result<()> {
    let mut fleet = fleet(&lab, "silent", json!({"subnets": ["10.4.0.0/24"]}), 3).await?;
    let first = add(&fleet, 0, "first").await?[0];
    let IpAddr::V4(first) = first else { anyhow::bail!("{first}") };
    let near = first.to_bits() ^ 1;
    let wanted: IpAddr = Ipv4Addr::from(if near.trailing_zeros() >= 4 { near ^ 2 } else { near }).into();
    fleet.crash(0).await;
    let asked = fleet.add(1, "borrower", vec![wanted], SOON).await?;
    let error = asked.err().context("it was given without its holder")?;
    ensure!(error.code as u32 == 11 && error.msg.contains("sim-0"), "{error}");
    println!("{error}");
    // Back again, it lends; and gone for good, its block is freed and can be taken.
    fleet.start(0)?;
    wait::until(SOON, "the address", || async {
        Ok(fleet.add(1, "borrower", vec![wanted], SOON).await?.ok())
    })
    .await?;
    fleet.power_off(0).await;
    let gone = BTreeSet::from([fleet.machines[0].holder.uid.clone()]);
    ensure!(fleet.delete_abandoned(&gone).await? == 0, "a block with a lent address was freed");
    fleet.delete(1, "borrower")?;
    wait::until(SOON, "the block of the node that is gone to be freed", || async {
        fleet.delete_abandoned(&gone).await?;
        let left = fleet.objects().await?;
        Ok((!left.iter().any(|one| gone.contains(&one.spec.holder.uid))).then_some(()))
    })
    .await?;
    let taken = fleet.add(2, "heir", vec![IpAddr::V4(first)], SOON).await??;
    ensure!(taken == [IpAddr::V4(first)]);
    fleet.delete(2, "heir")?;
    fleet.wait_until_released(SOON).await?;
    fleet.shutdown().await;
    Ok(())
}

async fn blocks_survive_a_crash_and_a_new_node_object(lab: Lab) -> Result<()> {
    let mut fleet = fleet(&lab, "crash", json!({"subnets": ["10.5.0.0/24"]}), 2).await?;
    let first = add(&fleet, 0, "first").await?;
    fleet.crash(0).await;
    fleet.start(0)?;
    ensure!(add(&fleet, 0, "first").await? == first);
    // A sandbox that vanished without a word is swept; the other stays.
    add(&fleet, 0, "ghost").await?;
    fleet.remove_sandbox(0, "ghost");
    wait::until(SOON, "the ghost to be swept", || async {
        Ok((fleet.check_no_duplicates()? == 1).then_some(()))
    })
    .await?;
    // The Node was deleted and made anew: the machine ran on, and its block is still its own.
    fleet.recreate_node(0, "crash-0-new");
    wait::until(SOON, "the block to be taken over", || async {
        let objects = fleet.objects().await?;
        Ok(objects.iter().any(|one| one.spec.holder.uid == "crash-0-new").then_some(()))
    })
    .await?;
    ensure!(add(&fleet, 0, "first").await? == first);
    add(&fleet, 0, "second").await?;
    // Somebody deletes a block by hand: it is made again, and nothing is lost.
    let name = ipblock(&fleet).await?;
    lab.kubectl(&["delete", "ipblock", &name, "--wait=false"])?;
    wait::until(SOON, "the block to be made again", || async {
        let objects = fleet.objects().await?;
        Ok((objects.len() == 1 && objects[0].metadata.deletion_timestamp.is_none()).then_some(()))
    })
    .await?;
    ensure!(add(&fleet, 0, "first").await? == first);
    add(&fleet, 0, "third").await?;
    // Its journal is lost, and its Node is another one again: what it holds is still its own, and gives nothing new.
    fleet.lose_disk(0).await;
    fleet.recreate_node(0, "crash-0-third");
    fleet.start(0)?;
    wait::until(SOON, "the block to be taken over without a journal", || async {
        let objects = fleet.objects().await?;
        Ok(objects.iter().any(|one| one.spec.holder.uid == "crash-0-third").then_some(()))
    })
    .await?;
    ensure!(fleet.delete_abandoned(&BTreeSet::from(["crash-0-new".to_owned()])).await? == 0, "it was freed");
    ensure!(!first.contains(&add(&fleet, 0, "fourth").await?[0]), "it was given twice");
    // The node is started anew: its sandboxes are gone, and so are their addresses.
    fleet.power_off(0).await;
    fleet.start(0)?;
    ensure!(fleet.check_no_duplicates()? == 0);
    fleet.wait_until_released(SOON).await?;
    fleet.shutdown().await;
    Ok(())
}

async fn ipblock(fleet: &Fleet) -> Result<String> {
    let objects = fleet.objects().await?;
    ensure!(objects.len() == 1, "{objects:?}");
    Ok(kube::ResourceExt::name_any(&objects[0]))
}

async fn a_thousand_addresses_cost_few_requests(lab: Lab) -> Result<()> {
    let spec = spec(json!({"subnets": ["10.6.0.0/16"]}))?;
    let mut fleet = Fleet::new(clients(&lab, 1).await?, "many", &spec, 10, node::ipam::Timings::default())?;
    fleet.start_all()?;
    let mark = lab.audit_offset()?;
    let begun = Instant::now();
    let adds = (0..1000).map(|pod| {
        let fleet = &fleet;
        async move { add(fleet, pod % 10, &format!("pod-{pod}")).await }
    });
    join_all(adds).await.into_iter().collect::<Result<Vec<_>>>()?;
    let took = begun.elapsed();
    ensure!(fleet.check_no_duplicates()? == 1000);
    let blocks = fleet.objects().await?.len();
    let ours = |asked: &AuditedRequest| asked.resource == "ipblocks";
    let requests: Vec<AuditedRequest> = lab.requests_since(mark)?.into_iter().filter(ours).collect();
    let mut verbs: BTreeMap<String, usize> = BTreeMap::new();
    for asked in &requests {
        *verbs.entry(asked.verb.clone()).or_default() += 1;
    }
    let watches = verbs.get("watch").copied().unwrap_or(0);
    println!("1000 addresses on 10 nodes in {took:?}: {blocks} blocks, requests {verbs:?}");
    // The nodes were started in the same moment: each begins its watch with a list, and looks for blocks that it may have
    // held before its journal began.
    let work = requests.len() - watches;
    ensure!(work <= 2 * blocks + 21, "{work} requests for {blocks} blocks");
    fleet.shutdown().await;
    lab.kubectl(&["delete", "ipblocks", "--all"])?;
    Ok(())
}

/// A small generator: the same seed is the same history.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from((self.0 >> 33) % sides as u64).unwrap_or(0)
    }
}

/// How many histories go on at the same time.
const AT_ONCE: usize = 4;

async fn random_histories_never_give_an_address_twice_and_leak_none(lab: Lab) -> Result<()> {
    let (histories, steps) = if e2e::soak() { (100, 1000) } else { (3, 200) };
    let begun = Instant::now();
    // They are of different networks, so they do not meet.
    let all = (0..histories).map(|seed| {
        let lab = &lab;
        async move { history(lab, seed, steps).await.with_context(|| format!("seed {seed}")) }
    });
    let mut all = futures::stream::iter(all).buffer_unordered(AT_ONCE);
    let mut totals: BTreeMap<&'static str, usize> = BTreeMap::new();
    while let Some(counts) = all.next().await {
        for (what, count) in counts? {
            *totals.entry(what).or_default() += count;
        }
    }
    println!("{histories} histories of {steps} steps in {:?}: {totals:?}", begun.elapsed());
    Ok(())
}

async fn history(lab: &Lab, seed: u64, steps: usize) -> Result<BTreeMap<&'static str, usize>> {
    let mut totals: BTreeMap<&'static str, usize> = BTreeMap::new();
    // Few addresses for many: borrowing is the rule.
    let subnets =
        [json!(["10.7.0.0/27"]), json!(["10.7.0.0/28", "10.7.9.0/29"]), json!(["10.7.0.0/27", "fd07::/123"])];
    let mut dice = Dice(seed.wrapping_mul(977).wrapping_add(13));
    let subnets = subnets[dice.roll(3)].clone();
    let name = format!("h{seed}");
    let count = 3 + dice.roll(6);
    let mut fleet = fleet(lab, &name, json!({"subnets": subnets}), count).await?;
    let mut live: Vec<(usize, String)> = Vec::new();
    // What sandboxes really have, whatever a daemon has forgotten.
    let mut truth: BTreeMap<String, Vec<IpAddr>> = BTreeMap::new();
    let mut gone: BTreeSet<String> = BTreeSet::new();
    let mut told: VecDeque<String> = VecDeque::new();
    for step in 0..steps {
        let number = dice.roll(fleet.machines.len());
        let is_gone = gone.contains(&fleet.machines[number].holder.uid);
        let what = match dice.roll(100) {
            0..45 if fleet.is_up(number) => {
                // Several at once, on several nodes.
                let mut adds = Vec::new();
                for _ in 0..=dice.roll(4) {
                    let number = dice.roll(fleet.machines.len());
                    if fleet.is_up(number) {
                        let container = format!("{seed}-{step}-{}", adds.len());
                        let requested = if dice.roll(5) == 0 {
                            vec![IpAddr::from([10, 7, 0, 1 + u8::try_from(dice.roll(14)).unwrap_or(0)])]
                        } else {
                            Vec::new()
                        };
                        adds.push((number, container, requested));
                    }
                }
                let timeout = Duration::from_millis(300);
                let calls = adds.iter().map(|(number, container, requested)| {
                    fleet.add(*number, container, requested.clone(), timeout)
                });
                for ((number, container, _), outcome) in adds.iter().zip(join_all(calls).await) {
                    match outcome? {
                        Ok(addresses) => {
                            let twice =
                                truth.iter().find(|(_, has)| has.iter().any(|one| addresses.contains(one)));
                            ensure!(
                                twice.is_none(),
                                "step {step}: {addresses:?} for {container} on {number}, but {twice:?}\n{told:#?}\n{}",
                                fleet.describe()
                            );
                            truth.insert(container.clone(), addresses);
                            live.push((*number, container.clone()));
                        }
                        // The runtime cleans up after a call that failed.
                        Err(_) => fleet.delete(*number, container)?,
                    }
                }
                "add"
            }
            45..80 if !live.is_empty() => {
                let (number, container) = live.swap_remove(dice.roll(live.len()));
                if fleet.is_up(number) {
                    fleet.delete(number, &container)?;
                } else {
                    // The tombstone of a daemon that is down.
                    fleet.start(number)?;
                    fleet.delete(number, &container)?;
                }
                "delete"
            }
            80..84 if !live.is_empty() => {
                let (number, container) = live.swap_remove(dice.roll(live.len()));
                fleet.remove_sandbox(number, &container);
                "vanish"
            }
            84..87 => {
                fleet.crash(number).await;
                "crash"
            }
            87 => {
                let (first, count) = (dice.roll(1000), 1 + dice.roll(20));
                fleet.damage(number, first, count).await?;
                "damage"
            }
            88 if !is_gone => {
                fleet.lose_disk(number).await;
                "forget"
            }
            89 if !is_gone => {
                let uid = format!("{}-{step}", fleet.machines[number].holder.uid);
                fleet.recreate_node(number, &uid);
                "rename"
            }
            90..92 => {
                fleet.power_off(number).await;
                live.retain(|(holder, _)| *holder != number);
                "reboot"
            }
            92 if is_gone => {
                // Back with what it had on its disk, under a new Node.
                let uid = format!("{}-{step}", fleet.machines[number].holder.uid);
                fleet.recreate_node(number, &uid);
                fleet.start(number)?;
                "return"
            }
            92..94 if gone.len() < 6 && !is_gone => {
                fleet.power_off(number).await;
                live.retain(|(holder, _)| *holder != number);
                gone.insert(fleet.machines[number].holder.uid.clone());
                "lose"
            }
            94..96 => {
                fleet.delete_abandoned(&gone).await?;
                "release"
            }
            _ => {
                if !is_gone {
                    fleet.start(number)?;
                }
                "start"
            }
        };
        *totals.entry(what).or_default() += 1;
        told.push_back(format!("step {step}: {what} on {number}; {live:?}"));
        if told.len() > 40 {
            told.pop_front();
        }
        truth.retain(|container, _| live.iter().any(|(_, one)| one == container));
        fleet
            .check_no_duplicates()
            .with_context(|| format!("step {step}: {what}\n{told:#?}\n{}", fleet.describe()))?;
    }
    for number in 0..fleet.machines.len() {
        if !gone.contains(&fleet.machines[number].holder.uid) {
            fleet.start(number)?;
        }
    }
    for (number, container) in live {
        fleet.delete(number, &container)?;
    }
    // Those that were lost stay lost, with all that an earlier Node of theirs may have held.
    for machine in &fleet.machines {
        gone.extend(machine.former.iter().cloned());
    }
    wait::until(SOON * 2, "nothing to be left", || async {
        fleet.check_no_duplicates()?;
        fleet.delete_abandoned(&gone).await?;
        ensure!(fleet.leases().is_empty(), "{:?}", fleet.leases());
        let left = fleet.objects().await?;
        let names: Vec<String> = left.iter().map(kube::ResourceExt::name_any).collect();
        ensure!(left.is_empty(), "{names:?}");
        Ok(Some(()))
    })
    .await
    .with_context(|| fleet.describe())?;
    fleet.shutdown().await;
    Ok(totals)
}
