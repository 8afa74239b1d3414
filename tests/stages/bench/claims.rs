//! Measures IPAMClaims: from a virtual machine to its addresses, requests, memory, and the latency of the webhook. The
//! machines are API objects without KubeVirt.

use std::{
    collections::BTreeMap,
    pin::pin,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, ensure};
use api::{NetworkAttachmentDefinition, ipamclaim::IPAMClaim};
use e2e::replica::{self, Replica};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::{
    api::core::v1::Pod, apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, Client, Config, CustomResourceExt as _, ResourceExt as _,
    api::{DeleteParams, DynamicObject, PostParams},
    core::Request,
    runtime::{WatchStreamExt as _, watcher},
};
use lab::{
    Lab,
    audit::{AuditOffset, AuditedRequest},
    kubevirt::{self, instances, pod_interface_name, virtual_machines},
    print_progress, wait,
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tokio::{sync::watch, task::JoinSet};

use super::{BenchRow, percentiles, wait_idle};
use crate::image;

const NAMESPACE: &str = "bench";
const NETWORK: &str = "blue";
/// Machines that are created one after the other, and then all at once.
const ROUNDS: usize = 100;
const MACHINES: usize = 2_000;
const PARALLEL: usize = 32;
const REVIEWS_PER_SECOND: u64 = 200;
const REVIEWS: usize = 4_000;
const TIMEOUT: Duration = Duration::from_secs(300);

/// When a claim was seen first, and when it was seen with addresses.
#[derive(Debug, Clone, Copy)]
struct SeenClaim {
    created: Instant,
    allocated: Option<Instant>,
}

/// The claims of the namespace, through one watch.
struct ClaimWatch {
    seen: watch::Receiver<BTreeMap<String, SeenClaim>>,
    /// Ends with this value.
    _task: JoinSet<()>,
}

impl ClaimWatch {
    fn start(client: Client) -> Self {
        let (sender, seen) = watch::channel(BTreeMap::new());
        let api: Api<IPAMClaim> = Api::namespaced(client, NAMESPACE);
        let mut task = JoinSet::new();
        task.spawn(async move {
            let mut events =
                pin!(watcher(api, watcher::Config::default()).default_backoff().applied_objects());
            while let Some(event) = events.next().await {
                let (Ok(claim), now) = (event, Instant::now()) else { continue };
                let allocated = claim.status.as_ref().is_some_and(|status| !status.ips.is_empty());
                sender.send_modify(|all| {
                    let seen =
                        all.entry(claim.name_any()).or_insert(SeenClaim { created: now, allocated: None });
                    seen.allocated = seen.allocated.or(allocated.then_some(now));
                });
            }
        });
        Self { seen, _task: task }
    }

    /// Waits until this many claims have addresses.
    async fn wait_allocated(&self, count: usize) -> Result<()> {
        let mut seen = self.seen.clone();
        let allocated = |all: &BTreeMap<String, SeenClaim>| {
            all.values().filter(|claim| claim.allocated.is_some()).count() >= count
        };
        tokio::time::timeout(TIMEOUT, seen.wait_for(allocated))
            .await
            .with_context(|| format!("{count} claims with addresses"))?
            .context("the watch of claims ended")?;
        Ok(())
    }

    fn get(&self, name: &str) -> Result<SeenClaim> {
        self.seen.borrow().get(name).copied().with_context(|| format!("claim {name} was not seen"))
    }
}

struct ClaimBench<'a> {
    lab: &'a Lab,
    client: Client,
    watch: ClaimWatch,
}

/// Runs all measurements on a lab without nodes.
pub async fn measure(lab: &Lab, rows: &mut Vec<BenchRow>) -> Result<()> {
    replica::install(lab, 1)?;
    for component in ["kube-scheduler", "coredns"] {
        lab.control_plane().stop_component(component)?;
    }
    let client = lab.client().await?;
    kubevirt::apply_kinds(&client).await?;
    // Multus brings this CRD to a cluster.
    let crds: Api<CustomResourceDefinition> = Api::all(client.clone());
    let crd = NetworkAttachmentDefinition::crd();
    crds.create(&PostParams::default(), &crd).await.context("create the CRD of NADs")?;
    let crd = format!("crd/{}", NetworkAttachmentDefinition::crd_name());
    lab.kubectl(&["wait", "--for=condition=Established", &crd, "--timeout=30s"])?;
    lab.kubectl(&["create", "namespace", NAMESPACE])?;
    let mut replica = Replica::start_program(lab, 1, &image::program(), &[])?;
    replica.wait_ready().await?;
    create_network(lab)?;
    wait::until(Duration::from_secs(60), "the kind of IPAMClaims", || async {
        lab.kubectl(&["wait", "--for=condition=Established", "crd/ipamclaims.k8s.cni.cncf.io"]).map(Some)
    })
    .await?;
    let watch = ClaimWatch::start(client.clone());
    let bench = ClaimBench { lab, client, watch };
    bench.one_by_one(rows).await?;
    let uids = bench.all_at_once(rows, &replica).await?;
    bench.restart(rows, &mut replica).await?;
    bench.webhook(rows, &uids)?;
    bench.delete(rows).await
}

fn create_network(lab: &Lab) -> Result<()> {
    let network = json!({
        "apiVersion": "patchbay.dev/v1alpha1", "kind": "BridgeNetwork", "metadata": {"name": NETWORK},
        "spec": {"attachment": {"namespaces": [NAMESPACE]},
            "ipam": {"subnets": ["10.64.0.0/16", "fd64::/64"], "persistent": true}},
    });
    let file = lab.kubeconfig().with_file_name("network.json");
    std::fs::write(&file, network.to_string())?;
    lab.kubectl(&["apply", "-f", file.to_str().context("the path is not UTF-8")?])?;
    lab.kubectl(&[
        "-n",
        NAMESPACE,
        "wait",
        "--for=create",
        &format!("net-attach-def/{NETWORK}"),
        "--timeout=30s",
    ])
    .map(drop)
}

fn machine_name(number: usize) -> String {
    format!("vm-{number}")
}

/// The name of the claim of a machine.
fn claim_name(number: usize) -> String {
    format!("{}.anet", machine_name(number))
}

impl ClaimBench<'_> {
    /// Creates a running machine with one interface, as KubeVirt does: the VirtualMachine and its instance. Returns the UID of
    /// the instance.
    async fn create_machine(&self, number: usize) -> Result<String> {
        let spec = json!({
            "domain": {"devices": {"interfaces": [{"name": "anet", "bridge": {}}]}},
            "networks": [{"name": "anet", "multus": {"networkName": NETWORK}}],
        });
        let name = machine_name(number);
        let object: DynamicObject = serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": name},
            "spec": {"runStrategy": "Always", "template": {"spec": spec}},
        }))?;
        let created = virtual_machines(&self.client, NAMESPACE).create(&PostParams::default(), &object).await;
        let uid = created.context("create a VirtualMachine")?.uid().context("metadata.uid")?;
        let object: DynamicObject = serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
            "metadata": {"name": name, "ownerReferences": [{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine",
                "name": name, "uid": uid, "controller": true, "blockOwnerDeletion": true}]},
            "spec": spec,
            "status": {"phase": "Running", "activePods": {format!("pod-{number}"): "node-1"}},
        }))?;
        let created = instances(&self.client, NAMESPACE).create(&PostParams::default(), &object).await;
        created.context("create a VirtualMachineInstance")?.uid().context("metadata.uid")
    }

    /// Creates the launcher pod of a machine, through the webhook.
    async fn create_launcher(&self, number: usize, uid: &str) -> Result<()> {
        let pod: Pod = serde_json::from_value(launcher(number, uid, 0))?;
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), NAMESPACE);
        pods.create(&PostParams::default(), &pod).await.map(drop).context("create a launcher pod")
    }

    async fn one_by_one(&self, rows: &mut Vec<BenchRow>) -> Result<()> {
        print_progress(format!("{ROUNDS} machines, one after the other …"));
        if wait_idle().await.is_err() {
            print_progress("the machine is busy with other work; times are upper bounds");
        }
        let (mut from_claim, mut from_machine) = (Vec::new(), Vec::new());
        for number in 0..ROUNDS {
            let start = Instant::now();
            self.create_machine(number).await?;
            self.watch.wait_allocated(number + 1).await?;
            let seen = self.watch.get(&claim_name(number))?;
            let allocated = seen.allocated.context("no addresses")?;
            from_claim.push(micros(allocated.duration_since(seen.created)));
            from_machine.push(micros(allocated.duration_since(start)));
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        for (what, times) in
            [("from a claim to its addresses", from_claim), ("from a machine to its addresses", from_machine)]
        {
            let (p50, p99) = percentiles(times);
            rows.push(BenchRow::new(
                &format!("{what}, dual stack, p50 / p99 of {ROUNDS}"),
                format!("{:.1} / {:.1} ms", p50 as f64 / 1000.0, p99 as f64 / 1000.0),
            ));
        }
        Ok(())
    }

    /// Returns the UIDs of the machines.
    async fn all_at_once(&self, rows: &mut Vec<BenchRow>, replica: &Replica) -> Result<Vec<String>> {
        print_progress(format!("{MACHINES} machines at once …"));
        let (offset, start) = (self.lab.audit_offset()?, Instant::now());
        let uids: Vec<String> = stream::iter(ROUNDS..ROUNDS + MACHINES)
            .map(|number| self.create_machine(number))
            .buffered(PARALLEL)
            .try_collect()
            .await?;
        let created = start.elapsed();
        self.watch.wait_allocated(ROUNDS + MACHINES).await?;
        let all = start.elapsed();
        rows.push(BenchRow::new(
            &format!("{MACHINES} machines at once: created / all claims have addresses after"),
            format!("{:.1} / {:.1} s", created.as_secs_f64(), all.as_secs_f64()),
        ));
        // The API server rejects pods until the namespace has its ServiceAccount.
        self.lab.kubectl(&[
            "-n",
            NAMESPACE,
            "wait",
            "--for=create",
            "serviceaccount/default",
            "--timeout=60s",
        ])?;
        stream::iter(uids.iter().enumerate())
            .map(|(index, uid)| self.create_launcher(ROUNDS + index, uid))
            .buffer_unordered(PARALLEL)
            .try_collect::<()>()
            .await?;
        tokio::time::sleep(Duration::from_secs(10)).await;
        let writes = self.writes(offset)?;
        let per = |resource: &str| {
            let count = writes.iter().filter(|write| write.resource == resource).count();
            count as f64 / MACHINES as f64
        };
        rows.push(BenchRow::new(
            "API writes per machine: claim / its status / IPBlocks / events",
            format!(
                "{:.2} / {:.2} / {:.3} / {:.2}",
                per("ipamclaims"),
                per("ipamclaims/status"),
                per("ipblocks") + per("ipblocks/status"),
                per("events")
            ),
        ));
        rows.push(BenchRow::new(
            &format!("controller: memory with {} machines and {MACHINES} launcher pods", ROUNDS + MACHINES),
            format!("{} MiB (goal: 60)", replica.rss_mib()?),
        ));
        Ok(uids)
    }

    async fn restart(&self, rows: &mut Vec<BenchRow>, replica: &mut Replica) -> Result<()> {
        print_progress("restart of the controller …");
        replica.signal(Signal::SIGTERM)?;
        replica.wait_for_exit(Duration::from_secs(30)).await?;
        let offset = self.lab.audit_offset()?;
        *replica = Replica::start_program(self.lab, 1, &image::program(), &[])?;
        replica.wait_ready().await?;
        tokio::time::sleep(Duration::from_secs(20)).await;
        let writes = self.writes(offset)?;
        rows.push(BenchRow::new(
            &format!("restart of the controller with {} machines: API writes / memory", ROUNDS + MACHINES),
            format!("{} / {} MiB", writes.len(), replica.rss_mib()?),
        ));
        for write in writes.iter().take(3) {
            print_progress(format!("unexpected write: {write:?}"));
        }
        Ok(())
    }

    /// Deletes the machines that have no launcher pod.
    async fn delete(&self, rows: &mut Vec<BenchRow>) -> Result<()> {
        print_progress(format!("deletion of {ROUNDS} machines …"));
        let offset = self.lab.audit_offset()?;
        let machines = virtual_machines(&self.client, NAMESPACE);
        for number in 0..ROUNDS {
            machines.delete(&machine_name(number), &DeleteParams::background()).await?;
        }
        let claims: Api<IPAMClaim> = Api::namespaced(self.client.clone(), NAMESPACE);
        wait::until(TIMEOUT, "the claims to be deleted", || async {
            for number in 0..ROUNDS {
                ensure!(claims.get_opt(&claim_name(number)).await?.is_none(), "{}", claim_name(number));
            }
            Ok(Some(()))
        })
        .await?;
        // Addresses are free 10 s after their claim is gone.
        tokio::time::sleep(Duration::from_secs(20)).await;
        let writes = self.writes(offset)?;
        let per = |resources: &[&str]| {
            let count = writes.iter().filter(|write| resources.contains(&write.resource.as_str())).count();
            count as f64 / ROUNDS as f64
        };
        rows.push(BenchRow::new(
            &format!("API writes per deleted machine, {ROUNDS} machines: claim (finalizer) / IPBlocks"),
            format!(
                "{:.2} / {:.2}",
                per(&["ipamclaims", "ipamclaims/status"]),
                per(&["ipblocks", "ipblocks/status"])
            ),
        ));
        Ok(())
    }

    /// The writes of the controller since the offset, without its Lease and certificates.
    fn writes(&self, offset: AuditOffset) -> Result<Vec<AuditedRequest>> {
        let others =
            ["leases", "secrets", "validatingwebhookconfigurations", "mutatingwebhookconfigurations"];
        let mut requests = self.lab.requests_since(offset)?;
        requests.retain(|request| {
            request.user_agent.starts_with("patchbay-controller")
                && request.is_write()
                && !others.contains(&request.resource.as_str())
        });
        Ok(requests)
    }

    /// Sends launcher pods to the webhook as the API server does, at a constant rate.
    fn webhook(&self, rows: &mut Vec<BenchRow>, uids: &[String]) -> Result<()> {
        print_progress(format!("{REVIEWS_PER_SECOND} launcher pods per second at the webhook …"));
        let machine = self.lab.control_plane();
        let url = format!("https://{}:9443", Replica::address(1)).parse()?;
        let reviews: Vec<Vec<u8>> = (0..REVIEWS)
            .map(|number| {
                let index = number % uids.len();
                review(ROUNDS + index, &uids[index], number).to_string().into_bytes()
            })
            .collect();
        let send = || -> Result<Vec<u64>> {
            machine.enter_netns()?;
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let mut config = Config::new(url);
                config.accept_invalid_certs = true;
                let client = Client::try_from(config)?;
                let mut ticks = tokio::time::interval(Duration::from_micros(1_000_000 / REVIEWS_PER_SECOND));
                let mut running = JoinSet::new();
                for body in reviews {
                    ticks.tick().await;
                    let client = client.clone();
                    running.spawn(async move { send_review(&client, body).await });
                }
                let mut times = Vec::with_capacity(REVIEWS);
                while let Some(sent) = running.join_next().await {
                    times.push(sent.context("the task panicked")??);
                }
                Ok(times)
            })
        };
        let sent = std::thread::scope(|scope| scope.spawn(send).join());
        let times = sent.map_err(|_| anyhow!("the thread of the reviews panicked"))??;
        // The first second opens the connections.
        let warm = times.into_iter().skip(usize::try_from(REVIEWS_PER_SECOND)?).collect();
        let (p50, p99) = percentiles(warm);
        rows.push(BenchRow::new(
            &format!("webhook at {REVIEWS_PER_SECOND} launcher pods per second, p50 / p99 of {REVIEWS}"),
            format!("{:.1} / {:.1} ms (goal for p99: 20)", p50 as f64 / 1000.0, p99 as f64 / 1000.0),
        ));
        Ok(())
    }
}

/// Returns the microseconds from the request to the response.
async fn send_review(client: &Client, body: Vec<u8>) -> Result<u64> {
    let request = Request::new("/mutate-v1-pod").create(&PostParams::default(), body)?;
    let start = Instant::now();
    let text = client.request_text(request).await.context("send an AdmissionReview")?;
    let took = micros(start.elapsed());
    let response: Value = serde_json::from_str(&text)?;
    ensure!(response["response"]["allowed"] == true && response["response"]["patch"].is_string(), "{text}");
    Ok(took)
}

/// A launcher pod, as KubeVirt writes it.
fn launcher(number: usize, machine_uid: &str, suffix: usize) -> Value {
    let (name, machine) = (format!("virt-launcher-vm-{number}-{suffix}"), machine_name(number));
    let networks =
        json!([{"name": NETWORK, "namespace": NAMESPACE, "interface": pod_interface_name("anet")}]);
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": name, "namespace": NAMESPACE,
            "labels": {"kubevirt.io": "virt-launcher", "kubevirt.io/created-by": machine_uid},
            "annotations": {"kubevirt.io/domain": machine, "k8s.v1.cni.cncf.io/networks": networks.to_string()},
            "ownerReferences": [{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": machine,
                "uid": machine_uid, "controller": true, "blockOwnerDeletion": true}],
        },
        "spec": {"containers": [{"name": "compute", "image": "none"}]},
    })
}

/// The admission of a launcher pod.
fn review(number: usize, machine_uid: &str, review: usize) -> Value {
    let pod = launcher(number, machine_uid, review);
    let name = pod["metadata"]["name"].clone();
    json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": format!("review-{review}"), "operation": "CREATE", "namespace": NAMESPACE, "name": name,
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "userInfo": {"username": "kubevirt"}, "object": pod, "oldObject": null, "dryRun": false,
            "requestKind": {"group": "", "version": "v1", "kind": "Pod"},
            "requestResource": {"group": "", "version": "v1", "resource": "pods"},
        },
    })
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
