//! Address management of many simulated nodes against a real API server, in a lab without nodes.
#![allow(clippy::print_stdout, reason = "a test without the standard harness prints its measurements")]

#[path = "addresses/contact.rs"]
mod contact;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::{IpAddr, Ipv4Addr},
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use api::{IPBlock, ipam::IpamSpec as Spec};
use contact::a_node_cut_off_from_the_api_server_stops_allocating_when_its_time_is_over;
use e2e::{
    Suite,
    fleet::{FAST, Fleet},
    patchbay, run_suites, tests,
};
use futures::{StreamExt as _, future::join_all};
use kube::{
    Api, Client,
    api::{DeleteParams, PostParams},
};
use lab::{Lab, Topology, audit::AuditedRequest, wait};
use serde_json::{Value, json};

/// The timeout of an ADD, and of an expected change.
const TIMEOUT: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    run_suites(&[Suite {
        name: "t-addresses",
        topology: Topology::ControlPlaneOnly,
        set_up: |lab| Box::pin(async move { install(&lab) }),
        tests: tests![
            nodes_acquire_blocks_and_allocate_every_address_once,
            a_small_subnet_is_usable_to_its_last_address_from_any_node,
            an_address_in_the_block_of_another_node_is_lent,
            a_lender_that_does_not_answer_is_named,
            a_block_of_a_holder_that_is_not_a_node_is_left_alone,
            blocks_survive_a_crash_and_a_new_node_object,
            a_thousand_addresses_cost_few_requests,
            a_node_cut_off_from_the_api_server_stops_allocating_when_its_time_is_over,
            random_histories_never_allocate_an_address_twice_and_leak_none,
        ],
    }])
}

/// Installs only the CRDs; another suite tests RBAC.
fn install(lab: &Lab) -> Result<()> {
    let path = patchbay::manifests_dir().join("00-crds.yaml");
    lab.kubectl(&["apply", "-f", path.to_str().context("the path is not UTF-8")?])?;
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
    Ok(fleet.add(number, container, Vec::new(), TIMEOUT).await??)
}

async fn nodes_acquire_blocks_and_allocate_every_address_once(lab: Lab) -> Result<()> {
    let ipam = json!({"subnets": ["10.1.0.0/22", "fd01::/64"], "gateways": ["10.1.0.1"]});
    let fleet = fleet(&lab, "plain", ipam, 5).await?;
    let started = Instant::now();
    let names: Vec<(usize, String)> = (0..200).map(|pod| (pod % 5, format!("pod-{pod}"))).collect();
    let all = join_all(names.iter().map(|(number, name)| add(&fleet, *number, name))).await;
    for addresses in all {
        let addresses = addresses?;
        ensure!(addresses.len() == 2 && addresses[0].is_ipv4() && addresses[1].is_ipv6(), "{addresses:?}");
    }
    println!("200 pods of 5 nodes after {:?}", started.elapsed());
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
        ensure!(again == lease.addresses, "a repeated ADD returned {again:?}");
    }
    let table = lab.kubectl(&["get", "ipblocks"])?;
    println!("{}", table.lines().take(4).collect::<Vec<_>>().join("\n"));
    for (number, name) in &names {
        fleet.delete(*number, name)?;
        fleet.delete(*number, name)?;
    }
    fleet.wait_until_released(TIMEOUT).await?;
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
        let last = fleet.add(0, "one-too-many", Vec::new(), TIMEOUT).await?;
        let error = last.err().context("allocated more addresses than the subnet has")?;
        ensure!(error.code as u32 == 11 && error.msg.contains("no free"), "{error}");
        // An address released on one node is allocated on another.
        fleet.delete(0, "pod-0")?;
        let started = Instant::now();
        wait::until(TIMEOUT, "the released address", || async {
            Ok(fleet.add(1, "late", Vec::new(), TIMEOUT).await?.ok())
        })
        .await
        .with_context(|| fleet.describe())?;
        println!("{subnet}: {count} addresses, one moved to another node after {:?}", started.elapsed());
        fleet.check_no_duplicates()?;
        for number in 0..3 {
            for (_, lease) in fleet.leases().into_iter().filter(|(holder, _)| *holder == number) {
                fleet.delete(number, &lease.key.container)?;
            }
        }
        fleet.wait_until_released(TIMEOUT).await?;
        fleet.crash(0).await;
        fleet.shutdown().await;
    }
    Ok(())
}

async fn an_address_in_the_block_of_another_node_is_lent(lab: Lab) -> Result<()> {
    let fleet = fleet(&lab, "lend", json!({"subnets": ["10.3.0.0/24"]}), 2).await?;
    let first = add(&fleet, 0, "first").await?[0];
    let IpAddr::V4(first) = first else { anyhow::bail!("{first}") };
    let near = |offset: u32| {
        let base = first.to_bits() & !15;
        IpAddr::V4((base + offset).into())
    };
    let wanted = (2..14).map(near).find(|one| *one != IpAddr::V4(first)).context("no other address")?;
    let lent = fleet.add(1, "borrower", vec![wanted], TIMEOUT).await??;
    ensure!(lent == [wanted], "{lent:?}");
    let objects = fleet.objects().await?;
    let single = objects.iter().find(|one| one.spec.cidr == wanted.into()).context("the borrowed IPBlock")?;
    ensure!(single.spec.holder.node == "sim-1-lend", "{:?}", single.spec);
    let enclosing =
        objects.iter().find(|one| one.spec.holder.node == "sim-0-lend").context("the enclosing block")?;
    let status = enclosing.status.clone().unwrap_or_default();
    ensure!(status.lent.iter().any(|one| one.address == wanted), "{status:?}");
    // Neither the lender nor the borrower allocates it twice.
    for number in [0, 1] {
        let again = fleet.add(number, "duplicate", vec![wanted], TIMEOUT).await?;
        let error = again.err().context("it was allocated twice")?;
        println!("{error}");
    }
    let used = fleet.add(1, "other", vec![IpAddr::V4(first)], TIMEOUT).await?;
    let error = used.err().context("it was allocated twice")?;
    ensure!(error.msg.contains("in use on node sim-0"), "{error}");
    // The borrower returns it after its pod, and the lender can allocate it again.
    fleet.delete(1, "borrower")?;
    wait::until(TIMEOUT, "the address to be returned", || async {
        Ok(fleet.add(0, "next", vec![wanted], TIMEOUT).await?.ok())
    })
    .await
    .with_context(|| fleet.describe())?;
    for (number, name) in [(0, "first"), (0, "next"), (0, "duplicate"), (1, "duplicate"), (1, "other")] {
        fleet.delete(number, name)?;
    }
    fleet.wait_until_released(TIMEOUT).await?;
    fleet.shutdown().await;
    Ok(())
}

async fn a_lender_that_does_not_answer_is_named(lab: Lab) -> Result<()> {
    let mut fleet = fleet(&lab, "silent", json!({"subnets": ["10.4.0.0/24"]}), 3).await?;
    let first = add(&fleet, 0, "first").await?[0];
    let IpAddr::V4(first) = first else { anyhow::bail!("{first}") };
    let near = first.to_bits() ^ 1;
    let wanted: IpAddr = Ipv4Addr::from(if near.trailing_zeros() >= 4 { near ^ 2 } else { near }).into();
    fleet.crash(0).await;
    let result = fleet.add(1, "borrower", vec![wanted], TIMEOUT).await?;
    let error = result.err().context("it was allocated without its lender")?;
    ensure!(error.code as u32 == 11 && error.msg.contains("sim-0"), "{error}");
    println!("{error}");
    // After a restart it lends. After its Node is deleted, its block is deleted and another node can acquire it.
    fleet.start(0)?;
    wait::until(TIMEOUT, "the address", || async {
        Ok(fleet.add(1, "borrower", vec![wanted], TIMEOUT).await?.ok())
    })
    .await?;
    fleet.power_off(0).await;
    let deleted_nodes = BTreeSet::from([fleet.machines[0].holder.uid.clone()]);
    ensure!(fleet.delete_abandoned(&deleted_nodes).await? == 0, "a block with a lent address was deleted");
    fleet.delete(1, "borrower")?;
    wait::until(TIMEOUT, "the block of the deleted node to be deleted", || async {
        fleet.delete_abandoned(&deleted_nodes).await?;
        let left = fleet.objects().await?;
        Ok((!left.iter().any(|one| deleted_nodes.contains(&one.spec.holder.uid))).then_some(()))
    })
    .await?;
    let taken = fleet.add(2, "successor", vec![IpAddr::V4(first)], TIMEOUT).await??;
    ensure!(taken == [IpAddr::V4(first)]);
    fleet.delete(2, "successor")?;
    fleet.wait_until_released(TIMEOUT).await?;
    fleet.shutdown().await;
    Ok(())
}

async fn a_block_of_a_holder_that_is_not_a_node_is_left_alone(lab: Lab) -> Result<()> {
    let name = "claims.10.5.1.0-30";
    let api: Api<IPBlock> = Api::all(lab.client().await?);
    let mut object = json!({
        "apiVersion": "patchbay.dev/v1alpha1", "kind": "IPBlock",
        "metadata": {"name": name, "labels": {"patchbay.dev/network": "claims"}},
        "spec": {"network": "claims", "networkUID": "uid-claims", "cidr": "10.5.1.0/30",
            "holder": {"node": "other/holder/x", "uid": "uid-of-the-allocator"}},
    });
    let rejected = api.create(&PostParams::default(), &serde_json::from_value(object.clone())?).await;
    let error = rejected.err().context("a name with two slashes was admitted")?.to_string();
    ensure!(error.contains("spec.holder.node"), "{error}");
    object["spec"]["holder"]["node"] = json!("other/holder");
    let created = api.create(&PostParams::default(), &serde_json::from_value(object)?).await?;
    // The network has no other block.
    let mut fleet = fleet(&lab, "claims", json!({"subnets": ["10.5.1.0/30"]}), 1).await?;
    for start in ["with its journal", "after its journal was lost"] {
        let wanted: IpAddr = "10.5.1.1".parse()?;
        for (requested, expected) in [
            (Vec::new(), "other/holder holds blocks of the network and lends no addresses"),
            (vec![wanted], "other/holder holds the block of address 10.5.1.1"),
        ] {
            let refused = fleet.add(0, "pod", requested, TIMEOUT).await?;
            let error = refused.err().with_context(|| format!("{start}: an address of it was allocated"))?;
            ensure!(error.code as u32 == 11 && error.msg.contains(expected), "{start}: {error}");
        }
        fleet.lose_disk(0).await;
        fleet.start(0)?;
    }
    let deleted_nodes = BTreeSet::from([created.spec.holder.uid.clone()]);
    ensure!(fleet.delete_abandoned(&deleted_nodes).await? == 0, "it was deleted");
    let left = fleet.objects().await?;
    ensure!(left.len() == 1 && left[0].spec == created.spec && left[0].metadata.uid == created.metadata.uid);
    let table = lab.kubectl(&["get", "ipblocks", name])?;
    ensure!(table.contains("other/holder"), "{table}");
    api.delete(name, &DeleteParams::default()).await?;
    add(&fleet, 0, "pod").await.context("the range is free")?;
    fleet.delete(0, "pod")?;
    fleet.wait_until_released(TIMEOUT).await?;
    fleet.shutdown().await;
    Ok(())
}

async fn blocks_survive_a_crash_and_a_new_node_object(lab: Lab) -> Result<()> {
    let mut fleet = fleet(&lab, "crash", json!({"subnets": ["10.5.0.0/24"]}), 2).await?;
    let first = add(&fleet, 0, "first").await?;
    fleet.crash(0).await;
    fleet.start(0)?;
    ensure!(add(&fleet, 0, "first").await? == first);
    // The lease of a sandbox that was removed without DEL is collected; the other stays.
    add(&fleet, 0, "removed").await?;
    fleet.remove_sandbox(0, "removed");
    wait::until(TIMEOUT, "the lease of the removed sandbox to be collected", || async {
        Ok((fleet.check_no_duplicates()? == 1).then_some(()))
    })
    .await?;
    // The Node was deleted and created again while the machine ran: it keeps its block.
    fleet.recreate_node(0, "crash-0-new");
    wait::until(TIMEOUT, "the block to be adopted", || async {
        let objects = fleet.objects().await?;
        Ok(objects.iter().any(|one| one.spec.holder.uid == "crash-0-new").then_some(()))
    })
    .await?;
    ensure!(add(&fleet, 0, "first").await? == first);
    add(&fleet, 0, "second").await?;
    // A user deletes an IPBlock: the daemon creates it again, and no lease is lost.
    let name = ipblock(&fleet).await?;
    lab.kubectl(&["delete", "ipblock", &name, "--wait=false"])?;
    wait::until(TIMEOUT, "the block to be created again", || async {
        let objects = fleet.objects().await?;
        Ok((objects.len() == 1 && objects[0].metadata.deletion_timestamp.is_none()).then_some(()))
    })
    .await?;
    ensure!(add(&fleet, 0, "first").await? == first);
    add(&fleet, 0, "third").await?;
    // The journal is lost and the Node created again: the node keeps its block, which serves no new address.
    fleet.lose_disk(0).await;
    fleet.recreate_node(0, "crash-0-third");
    fleet.start(0)?;
    wait::until(TIMEOUT, "the block to be adopted without a journal", || async {
        let objects = fleet.objects().await?;
        Ok(objects.iter().any(|one| one.spec.holder.uid == "crash-0-third").then_some(()))
    })
    .await?;
    ensure!(
        fleet.delete_abandoned(&BTreeSet::from(["crash-0-new".to_owned()])).await? == 0,
        "its block was deleted"
    );
    ensure!(!first.contains(&add(&fleet, 0, "fourth").await?[0]), "an address was allocated twice");
    // After a reboot the addresses of the earlier sandboxes are free.
    fleet.power_off(0).await;
    fleet.start(0)?;
    ensure!(fleet.check_no_duplicates()? == 0);
    fleet.wait_until_released(TIMEOUT).await?;
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
    let offset = lab.audit_offset()?;
    let started = Instant::now();
    let adds = (0..1000).map(|pod| {
        let fleet = &fleet;
        async move { add(fleet, pod % 10, &format!("pod-{pod}")).await }
    });
    join_all(adds).await.into_iter().collect::<Result<Vec<_>>>()?;
    let elapsed = started.elapsed();
    ensure!(fleet.check_no_duplicates()? == 1000);
    let blocks = fleet.objects().await?.len();
    let of_ipblocks = |request: &AuditedRequest| request.resource == "ipblocks";
    let requests: Vec<AuditedRequest> = lab.requests_since(offset)?.into_iter().filter(of_ipblocks).collect();
    let mut verbs: BTreeMap<String, usize> = BTreeMap::new();
    for request in &requests {
        *verbs.entry(request.verb.clone()).or_default() += 1;
    }
    let watches = verbs.get("watch").copied().unwrap_or(0);
    println!("1000 addresses on 10 nodes in {elapsed:?}: {blocks} blocks, requests {verbs:?}");
    // All nodes have just started: each lists once for its watch, once for blocks that it held before its journal existed, and
    // once for blocks of an earlier network of the name.
    let work = requests.len() - watches;
    ensure!(work <= 2 * blocks + 31, "{work} requests for {blocks} blocks");
    fleet.shutdown().await;
    lab.kubectl(&["delete", "ipblocks", "--all"])?;
    Ok(())
}

/// A small random number generator: the same seed yields the same history.
struct Lcg(u64);

impl Lcg {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from((self.0 >> 33) % bound as u64).unwrap_or(0)
    }
}

/// How many histories run concurrently.
const CONCURRENT_HISTORIES: usize = 4;

async fn random_histories_never_allocate_an_address_twice_and_leak_none(lab: Lab) -> Result<()> {
    let (histories, steps) = if e2e::soak() { (100, 1000) } else { (3, 200) };
    let started = Instant::now();
    // Each has its own network, so they do not interfere.
    let all = (0..histories).map(|seed| {
        let lab = &lab;
        async move { history(lab, seed, steps).await.with_context(|| format!("seed {seed}")) }
    });
    let mut all = futures::stream::iter(all).buffer_unordered(CONCURRENT_HISTORIES);
    let mut totals: BTreeMap<&'static str, usize> = BTreeMap::new();
    while let Some(counts) = all.next().await {
        for (action, count) in counts? {
            *totals.entry(action).or_default() += count;
        }
    }
    println!("{histories} histories of {steps} steps in {:?}: {totals:?}", started.elapsed());
    Ok(())
}

async fn history(lab: &Lab, seed: u64, steps: usize) -> Result<BTreeMap<&'static str, usize>> {
    let mut totals: BTreeMap<&'static str, usize> = BTreeMap::new();
    // Fewer addresses than pods, so that nodes borrow often.
    let subnets =
        [json!(["10.7.0.0/27"]), json!(["10.7.0.0/28", "10.7.9.0/29"]), json!(["10.7.0.0/27", "fd07::/123"])];
    let mut rng = Lcg(seed.wrapping_mul(977).wrapping_add(13));
    let subnets = subnets[rng.below(3)].clone();
    let name = format!("h{seed}");
    let count = 3 + rng.below(6);
    let mut fleet = fleet(lab, &name, json!({"subnets": subnets}), count).await?;
    let mut live: Vec<(usize, String)> = Vec::new();
    // The addresses that sandboxes really have, even if a daemon lost its journal.
    let mut actual: BTreeMap<String, Vec<IpAddr>> = BTreeMap::new();
    let mut deleted_nodes: BTreeSet<String> = BTreeSet::new();
    let mut recent: VecDeque<String> = VecDeque::new();
    for step in 0..steps {
        let number = rng.below(fleet.machines.len());
        let is_deleted = deleted_nodes.contains(&fleet.machines[number].holder.uid);
        let action = match rng.below(100) {
            0..45 if fleet.is_up(number) => {
                // Several concurrent ADDs, on several nodes.
                let mut adds = Vec::new();
                for _ in 0..=rng.below(4) {
                    let number = rng.below(fleet.machines.len());
                    if fleet.is_up(number) {
                        let container = format!("{seed}-{step}-{}", adds.len());
                        let requested = if rng.below(5) == 0 {
                            vec![IpAddr::from([10, 7, 0, 1 + u8::try_from(rng.below(14)).unwrap_or(0)])]
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
                            let owner =
                                actual.iter().find(|(_, has)| has.iter().any(|one| addresses.contains(one)));
                            ensure!(
                                owner.is_none(),
                                "step {step}: {addresses:?} for {container} on {number}, but {owner:?} has it\n{recent:#?}\n{}",
                                fleet.describe()
                            );
                            actual.insert(container.clone(), addresses);
                            live.push((*number, container.clone()));
                        }
                        // The runtime calls DEL after a failed ADD.
                        Err(_) => fleet.delete(*number, container)?,
                    }
                }
                "add"
            }
            45..80 if !live.is_empty() => {
                let (number, container) = live.swap_remove(rng.below(live.len()));
                if fleet.is_up(number) {
                    fleet.delete(number, &container)?;
                } else {
                    // Stands in for the tombstone that the plugin writes while the daemon is down.
                    fleet.start(number)?;
                    fleet.delete(number, &container)?;
                }
                "delete"
            }
            80..84 if !live.is_empty() => {
                let (number, container) = live.swap_remove(rng.below(live.len()));
                fleet.remove_sandbox(number, &container);
                "remove sandbox"
            }
            84..87 => {
                fleet.crash(number).await;
                "crash"
            }
            87 => {
                let (first, count) = (rng.below(1000), 1 + rng.below(20));
                fleet.damage(number, first, count).await?;
                "damage"
            }
            88 if !is_deleted => {
                fleet.lose_disk(number).await;
                "lose disk"
            }
            89 if !is_deleted => {
                let uid = format!("{}-{step}", fleet.machines[number].holder.uid);
                fleet.recreate_node(number, &uid);
                "recreate node"
            }
            90..92 => {
                fleet.power_off(number).await;
                live.retain(|(holder, _)| *holder != number);
                "reboot"
            }
            92 if is_deleted => {
                // Rejoins with its disk, under a new Node.
                let uid = format!("{}-{step}", fleet.machines[number].holder.uid);
                fleet.recreate_node(number, &uid);
                fleet.start(number)?;
                "rejoin"
            }
            92..94 if deleted_nodes.len() < 6 && !is_deleted => {
                fleet.power_off(number).await;
                live.retain(|(holder, _)| *holder != number);
                deleted_nodes.insert(fleet.machines[number].holder.uid.clone());
                "delete node"
            }
            94..96 => {
                fleet.delete_abandoned(&deleted_nodes).await?;
                "delete abandoned"
            }
            _ => {
                if !is_deleted {
                    fleet.start(number)?;
                }
                "start"
            }
        };
        *totals.entry(action).or_default() += 1;
        recent.push_back(format!("step {step}: {action} on {number}; {live:?}"));
        if recent.len() > 40 {
            recent.pop_front();
        }
        actual.retain(|container, _| live.iter().any(|(_, one)| one == container));
        fleet
            .check_no_duplicates()
            .with_context(|| format!("step {step}: {action}\n{recent:#?}\n{}", fleet.describe()))?;
    }
    for number in 0..fleet.machines.len() {
        if !deleted_nodes.contains(&fleet.machines[number].holder.uid) {
            fleet.start(number)?;
        }
    }
    for (number, container) in live {
        fleet.delete(number, &container)?;
    }
    // Deleted nodes stay deleted, with the blocks that their earlier Nodes may have held.
    for machine in &fleet.machines {
        deleted_nodes.extend(machine.former.iter().cloned());
    }
    wait::until(TIMEOUT * 2, "all blocks and leases to be released", || async {
        fleet.check_no_duplicates()?;
        fleet.delete_abandoned(&deleted_nodes).await?;
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
