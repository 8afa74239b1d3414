//! Upgrades the baseline to this version, downgrades it, and upgrades it again, while pods ping each other. Part of
//! `make soak`.
#![allow(clippy::print_stdout, reason = "a test without the standard harness prints its measurements")]

use std::{
    collections::BTreeMap,
    net::IpAddr,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Instant,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use api::{IPAMClaim, IPBlock};
use e2e::{
    Suite,
    baseline::Release,
    bridge::{
        WAIT_TIMEOUT, attached_pod, attachment_for, condition, delete_network, exec_in_pod_netns, networks,
        packets_lost, start_network, wait_deleted,
    },
    patchbay, run_suites, tests,
};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, ResourceExt,
    api::{ListParams, Patch, PatchParams, PostParams},
};
use lab::{
    Lab, Topology,
    test_namespace::{TestNamespace, with_namespace},
    wait,
};
use plan::network::NODE_GONE_GRACE;
use serde_json::{Value, json};

const NETWORK_STATUS_ANNOTATION: &str = "k8s.v1.cni.cncf.io/network-status";
/// Pairs of ADD and DEL on each node: the daemon compacts the journal when it has 4,096 lines more than it needs.
const PAIRS: usize = 1900;
/// Addresses that stay allocated on each node, besides those of pods.
const KEPT: usize = 150;
/// The holder of the blocks of IPAMClaims.
const CLAIMS_HOLDER: &str = "ipamclaims/patchbay";

fn main() -> ExitCode {
    run_suites(&[Suite {
        name: "t-upgrade",
        topology: Topology::Nodes(2),
        set_up: |lab| Box::pin(async move { patchbay::install_release(&lab, &Release::baseline()?).await }),
        tests: tests![an_upgrade_and_a_downgrade_change_no_address_and_lose_no_ping],
    }])
}

/// Pings an address from a pod until it is stopped, and counts sent and lost packets.
struct Pinger {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<(u32, u32)>>,
}

impl Pinger {
    const BATCH: u32 = 20;

    fn start(lab: &Lab, pod: &Pod, address: IpAddr) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (lab, pod, stopped) = (lab.clone(), pod.clone(), Arc::clone(&stop));
        let thread = thread::spawn(move || {
            let (mut sent, mut missing) = (0, 0);
            while !stopped.load(Ordering::Relaxed) {
                let (count, address) = (Self::BATCH.to_string(), address.to_string());
                // `ping` fails if packets are lost; they are counted instead.
                let ping = format!("/usr/bin/ping -q -c {count} -i 0.1 -W 2 {address} || true");
                missing += packets_lost(&exec_in_pod_netns(&lab, &pod, &["sh", "-c", &ping])?)?;
                sent += Self::BATCH;
            }
            Ok((sent, missing))
        });
        Self { stop, thread }
    }

    fn stop(self) -> Result<(u32, u32)> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("a pinger panicked"))?
    }
}

/// The addresses of `net1` of a pod in the kernel, and the network-status annotation.
fn addresses(lab: &Lab, pod: &Pod) -> Result<Value> {
    let links: Vec<Value> =
        serde_json::from_str(&exec_in_pod_netns(lab, pod, &["ip", "-j", "addr", "show", "dev", "net1"])?)?;
    let infos = links.iter().flat_map(|link| link["addr_info"].as_array().into_iter().flatten());
    let global = infos.filter(|info| info["scope"] == "global").map(|info| info["local"].clone());
    let kernel: Vec<Value> = global.collect();
    let status: Value = serde_json::from_str(
        pod.annotations().get(NETWORK_STATUS_ANNOTATION).context("the network-status annotation")?,
    )?;
    Ok(json!({"kernel": kernel, "status": status}))
}

fn first_address(addresses: &Value, six: bool) -> Result<IpAddr> {
    let all = addresses["kernel"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let mut all = all.filter_map(|text| text.parse::<IpAddr>().ok());
    all.find(|address| address.is_ipv6() == six).context("the pod has no address of the family")
}

/// The holder and the number of lent addresses of every block, by name.
async fn blocks(client: &Client) -> Result<BTreeMap<String, (String, usize)>> {
    let all = Api::<IPBlock>::all(client.clone()).list(&ListParams::default()).await?;
    let one = |block: &IPBlock| {
        let lent = block.status.as_ref().map_or(0, |status| status.lent.len());
        (block.name_any(), (block.spec.holder.node.clone(), lent))
    };
    Ok(all.items.iter().map(one).collect())
}

/// Fills the journal of a node with calls of the IPAM plugin.
fn fill_journal(lab: &Lab, node: &str) -> Result<()> {
    let config = json!({"cniVersion": "1.0.0", "name": "fill", "type": "macvlan",
        "ipam": {"type": "patchbay-ipam", "network": "fill"}});
    let script = format!(
        "export CNI_NETNS=/proc/self/ns/net CNI_IFNAME=net1 CNI_PATH=/opt/cni/bin
        call() {{ echo '{config}' | CNI_COMMAND=$1 CNI_CONTAINERID=$2 /opt/cni/bin/patchbay-ipam >/dev/null || exit 1; }}
        for i in $(seq {KEPT}); do call ADD kept-$i; done
        for i in $(seq {PAIRS}); do call ADD pair-$i; call DEL pair-$i; done"
    );
    lab.node(node).output(&["sh", "-c", &script]).map(drop)
}

/// Waits until the status of a network counts this many used IPv4 addresses. Holders report with a delay.
async fn wait_for_used(client: &Client, network: &str, count: i64) -> Result<()> {
    wait::until(WAIT_TIMEOUT, &format!("{count} addresses of {network} to be used"), || async {
        let ipam = networks(client).get(network).await?.status.and_then(|status| status.ipam);
        let used = ipam.and_then(|ipam| ipam.ipv4).map(|family| family.used);
        ensure!(used == Some(count), "{used:?}");
        Ok(Some(()))
    })
    .await
}

/// An address of an IPAMClaim, and the block that has it.
#[derive(Debug, PartialEq, Eq)]
struct Claimed {
    address: IpAddr,
    block: String,
}

/// Creates a claim on the network `dual` unless it exists, and waits for its IPv4 address.
async fn claim_address(ns: &TestNamespace) -> Result<Claimed> {
    let claims: Api<IPAMClaim> = Api::namespaced(ns.client.clone(), &ns.namespace);
    let claim: IPAMClaim = serde_json::from_value(json!({
        "apiVersion": "k8s.cni.cncf.io/v1alpha1", "kind": "IPAMClaim", "metadata": {"name": "kept"},
        "spec": {"network": "dual", "interface": ""},
    }))?;
    wait::until(WAIT_TIMEOUT, "the claim to have addresses", || async {
        // The controller creates the CRD; the baseline drops the field of the network.
        let persistent = Patch::Merge(json!({"spec": {"ipam": {"persistent": true}}}));
        networks(&ns.client).patch("dual", &PatchParams::default(), &persistent).await?;
        let claim = match claims.get_opt("kept").await? {
            Some(claim) => claim,
            None => claims.create(&PostParams::default(), &claim).await?,
        };
        let ips = claim.status.iter().flat_map(|status| &status.ips);
        let mut addresses = ips.filter_map(|ip| ip.split('/').next()?.parse::<IpAddr>().ok());
        let Some(address) = addresses.find(IpAddr::is_ipv4) else { return Ok(None) };
        let blocks = Api::<IPBlock>::all(ns.client.clone()).list(&ListParams::default()).await?;
        let reserves = |block: &&IPBlock| {
            block.status.iter().flat_map(|status| &status.claims).any(|claimed| claimed.address == address)
        };
        let block = blocks.items.iter().find(reserves).map(ResourceExt::name_any);
        Ok(block.map(|block| Claimed { address, block }))
    })
    .await
}

/// Fails if a pod has the address.
async fn check_unused(lab: &Lab, ns: &TestNamespace, address: IpAddr) -> Result<()> {
    for pod in ns.pods().list(&ListParams::default()).await?.items {
        let all = exec_in_pod_netns(lab, &pod, &["ip", "-o", "addr"])?;
        ensure!(!all.contains(&format!(" {address}/")), "{} has {address}: {all}", pod.name_any());
    }
    Ok(())
}

pub async fn an_upgrade_and_a_downgrade_change_no_address_and_lose_no_ping(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    with_namespace(&lab, "upgrade", async |ns: &TestNamespace| {
        let dual = json!({
            "overlay": {"vni": 4001}, "attachment": attachment_for(ns),
            "ipam": {"subnets": ["10.41.0.0/24", "fd00:41::/64"]},
        });
        start_network(&client, "dual", dual).await?;
        // Two addresses and two nodes: one node borrows.
        let tiny = json!({
            "overlay": {"vni": 4002}, "attachment": attachment_for(ns), "ipam": {"subnets": ["10.42.0.0/30"]},
        });
        start_network(&client, "tiny", tiny).await?;
        start_network(&client, "fill", json!({"ipam": {"subnets": ["10.43.0.0/16"]}})).await?;
        for node in ["node-1", "node-2"] {
            fill_journal(&lab, node)?;
        }
        let mut pods = Vec::new();
        for (name, node, network) in [
            ("client", "node-1", "dual"),
            ("server", "node-2", "dual"),
            ("neighbour", "node-1", "dual"),
            ("borrower-1", "node-1", "tiny"),
            ("borrower-2", "node-2", "tiny"),
        ] {
            ns.create_pod(attached_pod(name, node, network)).await?;
            pods.push(name);
        }
        let mut before = BTreeMap::new();
        for name in &pods {
            let pod = ns.wait_pod_ready(name).await?;
            before.insert(*name, (addresses(&lab, &pod)?, pod));
        }
        let old_blocks = blocks(&client).await?;
        println!(
            "{} blocks, {} of them lend addresses",
            old_blocks.len(),
            old_blocks.values().filter(|(_, lent)| *lent > 0).count()
        );

        let mut claimed = None;
        let releases = [
            ("upgrade", Release::current()),
            ("downgrade", Release::baseline()?),
            ("second upgrade", Release::current()),
        ];
        for (what, release) in releases {
            let ping = |from: &str, to: &str, six: bool| {
                anyhow::Ok(Pinger::start(&lab, &before[from].1, first_address(&before[to].0, six)?))
            };
            let pingers = [
                ping("client", "server", false)?,
                ping("client", "server", true)?,
                ping("client", "neighbour", false)?,
                ping("borrower-1", "borrower-2", false)?,
            ];
            let start = Instant::now();
            patchbay::install_release(&lab, &release).await?;
            // The daemon of the installed version gives a new pod a unique address.
            let name = format!("after-{}", what.replace(' ', "-"));
            let new_pod = ns.start_pod(attached_pod(&name, "node-1", "dual")).await?;
            let (mut sent, mut missing) = (0, 0);
            for pinger in pingers {
                let (more, lost) = pinger.stop()?;
                (sent, missing) = (sent + more, missing + lost);
            }
            println!("{what}: {:.0} s, {sent} pings, {missing} lost", start.elapsed().as_secs_f64());
            ensure!(missing == 0, "{what}: {missing} of {sent} pings were lost");
            for name in &pods {
                let pod = ns.wait_pod_ready(name).await?;
                let now = addresses(&lab, &pod)?;
                ensure!(now == before[name].0, "{what}: {name} had {} and has {now}", before[name].0);
            }
            let new = addresses(&lab, &new_pod)?;
            for (name, (old, _)) in &before {
                for six in [false, true] {
                    if let (Ok(one), Ok(other)) = (first_address(old, six), first_address(&new, six)) {
                        ensure!(one != other, "{what}: {name} and the new pod both have {one}");
                    }
                }
            }
            let now = blocks(&client).await?;
            for (name, (holder, lent)) in &old_blocks {
                ensure!(
                    now.get(name).is_some_and(|one| one.0 == *holder && one.1 >= *lent),
                    "{what}: block {name} of {holder} ({lent} lent) is now {:?}",
                    now.get(name)
                );
            }
            for name in ["dual", "tiny", "fill"] {
                let (ready, _, message) = condition(&networks(&client).get(name).await?, "Ready");
                ensure!(ready == "True", "{what}: {name}: {message}");
            }
            wait_for_used(&client, "fill", 2 * i64::try_from(KEPT)?).await?;
            match &claimed {
                None => claimed = Some(claim_address(ns).await?),
                // The baseline knows neither claims nor their holder, and leaves both as they are.
                Some(claimed) if what == "downgrade" => {
                    tokio::time::sleep(NODE_GONE_GRACE + WAIT_TIMEOUT).await;
                    let block = Api::<IPBlock>::all(client.clone()).get(&claimed.block).await?;
                    ensure!(block.spec.holder.node == CLAIMS_HOLDER, "{:?}", block.spec);
                    check_unused(&lab, ns, claimed.address).await?;
                }
                Some(claimed) => {
                    let again = claim_address(ns).await?;
                    ensure!(again == *claimed, "{again:?} is not {claimed:?}");
                }
            }
        }
        Ok(())
    })
    .await?;
    for name in ["dual", "tiny"] {
        delete_network(&client, name).await?;
        wait_deleted(&client, name).await?;
    }
    Ok(())
}
