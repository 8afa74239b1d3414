//! Random lives of machines, with KubeVirt's own controller. Whatever happens, a machine keeps its addresses while it
//! exists, no address has two claims, and at rest exactly the claims of the machines are left.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, bail, ensure};
use e2e::{random::SplitMix64, replica::Replica};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, DynamicObject, ListParams},
};
use lab::{
    Lab,
    kubevirt::{pod_interface_name, restart_vm},
    wait,
};
use serde_json::{Value, json};

use super::{
    TIMEOUT,
    cluster::{
        TestCluster, addresses, blocks, claims, instance_spec, pods, references, virtual_machine, vmis, vms,
    },
};

/// Names whose claims would collide, `vm.a` + `b` and `vm` + `a_b` among them, and a name longer than a label value.
const MACHINES: [&str; 5] = [
    "vm",
    "vm.a",
    "b-1",
    "x",
    "a-machine-with-a-name-that-is-too-long-for-the-value-of-a-label-of-kubernetes",
];
const INTERFACES: [&str; 4] = ["b", "a_b", "N1", "n1"];
const NETWORKS: [&str; 2] = ["lives-a", "lives-b"];

/// A machine that exists.
struct Machine {
    uid: String,
    /// The NAD of each interface.
    nics: BTreeMap<&'static str, &'static str>,
    running: bool,
    /// The addresses that each interface had when the history was last at rest.
    kept: BTreeMap<&'static str, Vec<String>>,
    /// The interfaces whose claim the user deleted, with its UID: the next claim may have other addresses.
    renewed: BTreeMap<&'static str, String>,
}

/// The UID and the addresses of the claim of each machine and interface.
type FoundClaims = BTreeMap<(&'static str, &'static str), (String, Vec<String>)>;

struct History<'a> {
    lab: &'a Lab,
    cluster: &'a TestCluster,
    machines: BTreeMap<&'static str, Machine>,
    random: SplitMix64,
    log: Vec<String>,
}

fn nics(of: &BTreeMap<&'static str, &'static str>) -> Vec<(&'static str, &'static str)> {
    of.iter().map(|(interface, nad)| (*interface, *nad)).collect()
}

impl History<'_> {
    fn random_nics(&mut self) -> BTreeMap<&'static str, &'static str> {
        let count = 1 + self.random.below(3);
        (0..count).map(|_| (self.random.choose(&INTERFACES), self.random.choose(&NETWORKS))).collect()
    }

    async fn step(&mut self) -> Result<()> {
        let name = self.random.choose(&MACHINES);
        let Some(machine) = self.machines.get(name) else {
            let nics_of = self.random_nics();
            self.log.push(format!("create {name} with {nics_of:?}"));
            let mut vm = virtual_machine(name, &nics(&nics_of));
            // One name is too long for the label.
            vm["spec"]["template"]["metadata"] = json!({});
            let created = self.cluster.create_vm(&vm).await?;
            let uid = created["metadata"]["uid"].as_str().context("metadata.uid")?.to_owned();
            let (kept, renewed) = (BTreeMap::new(), BTreeMap::new());
            let machine = Machine { uid, nics: nics_of, running: true, kept, renewed };
            self.machines.insert(name, machine);
            return Ok(());
        };
        let running = machine.running;
        match self.random.below(6) {
            0 | 1 => {
                let next = if running { "Halted" } else { "Always" };
                self.log.push(format!("{name}: {next}"));
                self.cluster.merge_patch(&vms(), name, &json!({"spec": {"runStrategy": next}})).await?;
                if running {
                    self.cluster.wait_until_gone(&vmis(), name).await?;
                }
                self.machine(name)?.running = !running;
            }
            2 if running => {
                self.log.push(format!("restart {name}"));
                self.cluster.wait_for_launcher(name).await?;
                restart_vm(&self.cluster.client, &self.cluster.namespace, name).await?;
            }
            2 | 3 if !running => {
                let nics_of = self.random_nics();
                self.log.push(format!("{name}: interfaces {nics_of:?}"));
                let template = json!({"spec": {"template": {"spec": instance_spec(&nics(&nics_of))}}});
                self.cluster.merge_patch(&vms(), name, &template).await?;
                let machine = self.machine(name)?;
                // An interface that moves to another network gets another claim.
                machine.kept.retain(|interface, _| machine.nics.get(interface) == nics_of.get(interface));
                machine.nics = nics_of;
            }
            2 | 3 => {}
            4 => {
                let params = if self.random.below(2) == 0 {
                    DeleteParams::background()
                } else {
                    DeleteParams::foreground()
                };
                self.log.push(format!("delete {name}, {:?}", params.propagation_policy));
                self.cluster.delete(&vms(), name, &params).await?;
                self.cluster.wait_until_gone(&vms(), name).await?;
                self.machines.remove(name);
            }
            _ => {
                let interface = self.machine(name)?.nics.keys().next().copied().context("an interface")?;
                self.log.push(format!("delete the claim of {name} {interface} by hand"));
                if let Some(claim) = self.claim(name, interface).await? {
                    let uid = claim.uid().context("metadata.uid")?;
                    self.machine(name)?.renewed.insert(interface, uid);
                    self.cluster.delete(&claims(), &claim.name_any(), &DeleteParams::background()).await?;
                }
            }
        }
        Ok(())
    }

    fn machine(&mut self, name: &str) -> Result<&mut Machine> {
        self.machines.get_mut(name).context("the machine exists")
    }

    async fn all_claims(&self) -> Result<Vec<DynamicObject>> {
        Ok(self.cluster.api(&claims()).list(&ListParams::default()).await?.items)
    }

    async fn claim(&self, name: &str, interface: &str) -> Result<Option<DynamicObject>> {
        let uid = &self.machines[name].uid;
        let interface = pod_interface_name(interface);
        Ok(self.all_claims().await?.into_iter().find(|claim| {
            claim.data["spec"]["interface"] == interface.as_str()
                && claim.owner_references().iter().any(|owner| owner.uid == *uid)
        }))
    }

    /// Waits until claims, addresses and blocks fit the machines. A machine that never ran has no claims.
    async fn check(&mut self) -> Result<()> {
        let found = wait::until(TIMEOUT, "claims and blocks to fit the machines", || self.compare()).await?;
        for ((name, interface), (claim_uid, ips)) in found {
            let machine = self.machine(name)?;
            // A claim that was deleted by hand may stay until its machine stops.
            if machine.renewed.get(interface).is_some_and(|uid| *uid == claim_uid) {
                continue;
            }
            if machine.renewed.remove(interface).is_some() {
                machine.kept.insert(interface, ips.clone());
            }
            let kept = machine.kept.entry(interface).or_insert_with(|| ips.clone());
            ensure!(*kept == ips, "{name} {interface} had {kept:?} and has {ips:?}");
        }
        Ok(())
    }

    async fn compare(&self) -> Result<Option<FoundClaims>> {
        let all = self.all_claims().await?;
        let mut found = BTreeMap::new();
        for (name, machine) in &self.machines {
            for (interface, nad) in &machine.nics {
                let of_interface = all.iter().find(|claim| {
                    claim.data["spec"]["interface"] == pod_interface_name(interface).as_str()
                        && claim.owner_references().iter().any(|owner| owner.uid == machine.uid)
                });
                let Some(claim) = of_interface else {
                    ensure!(!machine.running, "{name} {interface} has no claim");
                    continue;
                };
                if claim.data["spec"]["network"] != *nad && !machine.running {
                    // The claim is replaced when the machine starts.
                    continue;
                }
                ensure!(claim.data["spec"]["network"] == *nad, "{name} {interface}: {}", claim.data["spec"]);
                let value = serde_json::to_value(claim)?;
                let ips = addresses(&value);
                ensure!(ips.len() == 2, "{name} {interface} has {ips:?}: {}", value["status"]);
                found.insert((*name, *interface), (claim.uid().unwrap_or_default(), ips));
            }
        }
        let lives = |claim: &DynamicObject| {
            claim.owner_references().iter().any(|owner| self.machines.values().any(|it| it.uid == owner.uid))
        };
        ensure!(all.iter().all(lives), "a claim has no machine: {:?}", names(&all));
        // A reservation of each address, and no other.
        let claimed: BTreeMap<String, String> = all
            .iter()
            .flat_map(|claim| {
                let uid = claim.uid().unwrap_or_default();
                let value = serde_json::to_value(claim).unwrap_or_default();
                addresses(&value).into_iter().map(move |ip| (bare(&ip), uid.clone()))
            })
            .collect();
        let count: usize =
            all.iter().map(|claim| claim.data["status"]["ips"].as_array().map_or(0, Vec::len)).sum();
        ensure!(claimed.len() == count, "an address has two claims: {claimed:?}");
        let (mut reserved, referenced) = (self.reserved().await?, self.referenced().await?);
        // A pod that has no network-status may have got the address of an earlier claim of the name.
        reserved.retain(|address, (_, claim)| claimed.contains_key(address) || !referenced.contains(claim));
        let reserved: BTreeMap<String, String> =
            reserved.into_iter().map(|(address, (uid, _))| (address, uid)).collect();
        ensure!(reserved == claimed, "reserved {reserved:?}, claimed {claimed:?}");
        Ok(Some(found))
    }

    /// The claims that pods refer to. Without kubelets, no pod has a network-status.
    async fn referenced(&self) -> Result<BTreeSet<String>> {
        let pods = self.cluster.api(&pods()).list(&ListParams::default()).await?;
        let pods = pods.items.into_iter().map(serde_json::to_value).collect::<Result<Vec<_>, _>>()?;
        let names = pods.iter().filter_map(|pod| references(pod).ok()).flatten();
        Ok(names.map(|name| format!("{}/{name}", self.cluster.namespace)).collect())
    }

    /// The UID and the name of the claim of each reserved address of the networks of this test.
    async fn reserved(&self) -> Result<BTreeMap<String, (String, String)>> {
        let api: Api<DynamicObject> = Api::all_with(self.cluster.client.clone(), &blocks());
        let mut reserved = BTreeMap::new();
        for block in api.list(&ListParams::default()).await?.items {
            if !NETWORKS.iter().any(|network| block.data["spec"]["network"] == *network) {
                continue;
            }
            for claimed in block.data["status"]["claims"].as_array().into_iter().flatten() {
                let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
                let claim = (text(&claimed["uid"]), text(&claimed["claim"]));
                if reserved.insert(text(&claimed["address"]), claim).is_some() {
                    bail!("{} is reserved twice", claimed["address"]);
                }
            }
        }
        Ok(reserved)
    }
}

fn bare(ip: &str) -> String {
    ip.split('/').next().unwrap_or_default().to_owned()
}

fn names(claims: &[DynamicObject]) -> BTreeSet<String> {
    claims.iter().map(kube::ResourceExt::name_any).collect()
}

pub async fn machines_keep_their_addresses_over_random_lives(lab: Lab) -> Result<()> {
    let (rounds, steps) = if e2e::soak() { (40, 10) } else { (4, 5) };
    let cluster = TestCluster::new(&lab, "lives").await?;
    let mut replica = Some(cluster.start_leader(&lab).await?);
    cluster.create_network(NETWORKS[0], &["10.81.0.0/24", "fd81::/64"]).await?;
    cluster.create_network(NETWORKS[1], &["10.82.0.0/24", "fd82::/64"]).await?;
    let random = SplitMix64(815);
    let mut history =
        History { lab: &lab, cluster: &cluster, machines: BTreeMap::new(), random, log: Vec::new() };
    for round in 0..rounds {
        let outcome = async {
            for step in 0..steps {
                history.step().await?;
                // A new controller starts in the middle of what the steps before caused.
                if step == 2 && round % 2 == 1 {
                    history.log.push("kill -9 of the controller".to_owned());
                    drop(replica.take());
                    replica = Some(history.cluster.start_leader(history.lab).await?);
                }
            }
            history.check().await
        };
        outcome.await.with_context(|| format!("{}\n{}", history.log.join("\n"), Replica::log(&lab, 1)))?;
    }
    println!("{rounds} rounds of {steps} steps, {} machines left", history.machines.len());
    // Later tests see no late writes.
    for name in history.machines.keys() {
        cluster.delete(&vms(), name, &DeleteParams::background()).await?;
    }
    wait::until(TIMEOUT, "the claims to be gone", || async {
        let left = history.all_claims().await?;
        ensure!(left.is_empty(), "{:?}", names(&left));
        Ok(Some(()))
    })
    .await
}
