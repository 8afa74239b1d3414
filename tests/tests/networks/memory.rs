//! The memory of the controller and of a node daemon in a large cluster.

use std::{
    fs,
    path::PathBuf,
    process::{Child, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use e2e::replica;
use futures::StreamExt as _;
use kube::{
    ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use lab::{Lab, wait};
use serde_json::{Value, json};

use crate::{
    cluster::{self, TestCluster},
    create_many, start_controller,
};

const NETWORKS: usize = 100;
/// How many NodeNetworks change while both watch.
const CHANGES: usize = 50;
/// The size of the cluster, and the limits of the daemon and the controller in MiB.
struct Scale {
    nodes: usize,
    max_daemon: u64,
    max_controller: u64,
}

fn scale() -> Scale {
    if e2e::soak() {
        Scale { nodes: 500, max_daemon: 48, max_controller: 128 }
    } else {
        Scale { nodes: 120, max_daemon: 20, max_controller: 64 }
    }
}

/// How long a process may take to read all NodeNetworks.
const LIST_TIMEOUT: Duration = Duration::from_secs(60);
/// The node of the daemon under test.
const OWN_NODE: &str = "memory-own";

/// A `patchbay node` process in the network namespace of the control plane, where no network selects its node; killed on
/// drop.
struct Daemon {
    child: Child,
    dir: PathBuf,
}

impl Daemon {
    fn start(lab: &Lab) -> Result<Self> {
        let dir = lab.kubeconfig().with_file_name("memory-daemon");
        fs::create_dir_all(dir.join("host"))?;
        let mut config: Value = serde_json::from_slice(&fs::read(lab.kubeconfig())?)?;
        config["clusters"][0]["cluster"]["server"] = "https://172.30.0.1:6443".into();
        fs::write(dir.join("kubeconfig"), config.to_string())?;
        let log = fs::File::create(dir.join("log"))?;
        let path = |name: &str| dir.join(name).display().to_string();
        let child = lab
            .control_plane()
            .command_in_netns(replica::program()?)?
            .args(["node", "--node-name", OWN_NODE, "--state-dir", &path("state"), "--run-dir", &path("run")])
            .args(["--host-root", &path("host"), "--cni-bin-dir", &path("bin"), "--shim", &path("none")])
            .env("KUBECONFIG", dir.join("kubeconfig"))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("start a daemon")?;
        Ok(Self { child, dir })
    }

    fn log(&self) -> String {
        let text = fs::read_to_string(self.dir.join("log")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        format!("log of the daemon:\n{}", lines[lines.len().saturating_sub(30)..].join("\n"))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// The peak of the memory of a process, in MiB, without the pages of its program file. The kernel can drop those, and the
/// test build has many more of them than the shipped one.
fn peak_mib(pid: u32) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let field = |name: &str| -> Result<u64> {
        let line = text.lines().find(|line| line.starts_with(name));
        let line = line.with_context(|| format!("no {name} in /proc"))?;
        Ok(line.split_whitespace().nth(1).with_context(|| format!("{name} has no value"))?.parse()?)
    };
    let (peak, file) = (field("VmHWM:")?, field("RssFile:")?);
    println!("process {pid}: peak {} MiB, {} MiB of them from files", peak / 1024, file / 1024);
    Ok(peak.saturating_sub(file).div_ceil(1024))
}

/// The status of a node with a bridge and a VXLAN device for each network, as its daemon writes it.
fn status(node: usize) -> Value {
    let mac = |number: usize| format!("02:{:02x}:{:02x}:00:{:02x}:01", node / 256, node % 256, number % 256);
    let interface = |name: String, kind: &str, mac: String, master: Option<String>| json!({"name": name, "kind": kind, "mac": mac, "mtu": 1450, "state": "Up", "master": master});
    let links = (0..NETWORKS).flat_map(|number| {
        let bridge = format!("br-net-{number}");
        let vxlan = interface(format!("vx-net-{number}"), "vxlan", mac(number + 100), Some(bridge.clone()));
        [interface(bridge, "bridge", mac(number), None), vxlan]
    });
    let mut interfaces: Vec<Value> = links.collect();
    interfaces.sort_by_key(|one| one["name"].as_str().map(str::to_owned));
    let networks = (0..NETWORKS).map(|number| {
        json!({
            "uid": format!("7c9e6679-7425-40de-944b-e07fc1f9{number:04}"), "name": format!("net-{number}"),
            "observedGeneration": 1, "ready": true, "reason": "Ready", "bridge": format!("br-net-{number}"),
            "mac": mac(number), "mtu": 1450, "ports": [format!("vx-net-{number}")],
        })
    });
    let vtep = json!({"address": format!("10.9.{}.{}", node / 250, node % 250 + 1), "interface": "eth0", "mtu": 1500});
    json!({"vtep": vtep, "interfaces": interfaces, "networks": networks.collect::<Vec<_>>()})
}

fn node_networks() -> kube::core::ApiResource {
    cluster::resource("patchbay.dev", "v1alpha1", "NodeNetwork", "nodenetworks")
}

/// Creates the Nodes and their NodeNetworks, in place of kubelets and daemons.
async fn create_nodes(cluster: &TestCluster, count: usize) -> Result<()> {
    let nodes = cluster::resource("", "v1", "Node", "nodes");
    let labels = json!({"test": cluster.namespace});
    let node = |name: &str| json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}});
    cluster.create_object(&nodes, None, &node(OWN_NODE)).await?;
    create_many(count, async |number| {
        let name = format!("memory-{number}");
        cluster.create_object(&nodes, None, &node(&name)).await?;
        let object = json!({"apiVersion": "patchbay.dev/v1alpha1", "kind": "NodeNetwork",
            "metadata": {"name": name, "labels": labels}});
        // The webhook learns of the Node a moment later.
        wait::until(LIST_TIMEOUT, "the NodeNetwork to be admitted", || async {
            Ok(Some(cluster.create_object(&node_networks(), None, &object).await?))
        })
        .await
        .map(drop)
    })
    .await
}

/// Writes the status of all NodeNetworks. Returns the size of one.
async fn write_statuses(cluster: &TestCluster, count: usize) -> Result<usize> {
    let api = cluster.api(&node_networks(), None);
    let all = api.list(&ListParams::default().labels("test=memory")).await?.items;
    ensure!(all.len() == count, "{} NodeNetworks", all.len());
    let params = PostParams { field_manager: Some("patchbay.dev/node".to_owned()), ..PostParams::default() };
    let writes = all.into_iter().enumerate().map(async |(number, mut object)| {
        object.data["status"] = status(number);
        let written = api.replace_status(&object.name_any(), &params, &object).await;
        written.context("write the status of a NodeNetwork")
    });
    // The API server needs much time for each: more at once would not be faster.
    let mut writes = futures::stream::iter(writes).buffer_unordered(8);
    let mut size = 0;
    while let Some(written) = writes.next().await {
        size = serde_json::to_string(&written?)?.len();
    }
    Ok(size)
}

/// Changes NodeNetworks, so that watches deliver them.
async fn change_statuses(cluster: &TestCluster, mtu: i32) -> Result<()> {
    let api = cluster.api(&node_networks(), None);
    let patch = Patch::Merge(json!({"status": {"vtep": {"mtu": mtu}}}));
    for number in 0..CHANGES {
        api.patch_status(&format!("memory-{number}"), &PatchParams::default(), &patch).await?;
    }
    Ok(())
}

pub async fn memory_stays_small_with_many_nodes_of_100_networks(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "memory").await?;
    let Scale { nodes, max_daemon, max_controller } = scale();
    create_nodes(&cluster, nodes).await.with_context(|| replica.tail())?;
    drop(replica);
    let started = Instant::now();
    let size = write_statuses(&cluster, nodes).await?;
    println!("{nodes} NodeNetworks of {} KiB written in {:?}", size / 1024, started.elapsed());

    let started = Instant::now();
    let replica = cluster.start_leader(&lab).await?;
    println!("controller: ready after {:?}", started.elapsed());
    let started = Instant::now();
    let mut daemon = Daemon::start(&lab)?;
    let api = cluster.api(&node_networks(), None);
    // The daemon publishes its NodeNetwork only after it has read those of all others.
    wait::until(LIST_TIMEOUT, "the daemon to publish its NodeNetwork", || async {
        let published = api.get_opt(OWN_NODE).await?;
        Ok(published.filter(|object| !object.data["status"]["conditions"].is_null()))
    })
    .await
    .with_context(|| daemon.log())?;
    println!("daemon: published after {:?}", started.elapsed());
    change_statuses(&cluster, 1400).await?;
    ensure!(daemon.child.try_wait()?.is_none(), "{}", daemon.log());
    let daemon_peak = peak_mib(daemon.child.id())?;
    let controller_peak = peak_mib(u32::try_from(replica.pid()?.as_raw())?)?;
    println!("peak of the controller: {controller_peak} MiB, of the daemon: {daemon_peak} MiB");
    drop(daemon);

    let selector = ListParams::default().labels("test=memory");
    api.delete_collection(&DeleteParams::default(), &selector).await?;
    api.delete(OWN_NODE, &DeleteParams::default()).await?;
    let api = cluster.api(&cluster::resource("", "v1", "Node", "nodes"), None);
    api.delete_collection(&DeleteParams::default(), &selector).await?;
    ensure!(controller_peak < max_controller, "controller: {controller_peak} MiB");
    ensure!(daemon_peak < max_daemon, "daemon: {daemon_peak} MiB");
    Ok(())
}

/// How many pods, and the size of their annotations: an object can have 256 KiB of them.
const LARGE_PODS: usize = 400;
const ANNOTATION_KIB: usize = 255;

/// The memory limit of the controller in the manifests, in MiB.
fn controller_limit() -> Result<u64> {
    let text = fs::read_to_string(e2e::patchbay::manifests_dir().join("10-patchbay.yaml"))?;
    let deployment = text.split("---\n").find(|document| document.contains("kind: Deployment"));
    let limits = deployment.and_then(|it| it.split_once("limits:")).context("no limits in the Deployment")?.1;
    let memory =
        limits.lines().find_map(|line| line.trim().strip_prefix("memory:")).context("no memory limit")?;
    let digits = memory.trim().trim_matches('"').strip_suffix("Mi").context("the limit is not in Mi")?;
    digits.parse().context("parse the memory limit")
}

pub async fn a_page_of_pods_with_large_annotations_fits_into_the_memory_limit(lab: Lab) -> Result<()> {
    let cluster = TestCluster::new(&lab, "large-pods").await?;
    let pods = cluster::resource("", "v1", "Pod", "pods");
    let large = "x".repeat(ANNOTATION_KIB * 1024);
    create_many(LARGE_PODS, async |number| {
        let annotations = json!({"example.dev/large": large, "k8s.v1.cni.cncf.io/networks": "blue"});
        let pod = json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": format!("large-{number}"), "annotations": annotations},
            "spec": {"containers": [{"name": "c", "image": "localhost/lab:1"}]}});
        cluster.create_object(&pods, Some(&cluster.namespace), &pod).await?;
        Ok(())
    })
    .await?;
    let replica = cluster.start_leader(&lab).await?;
    wait::until(LIST_TIMEOUT, "all pods to be listed", || async {
        Ok((replica.metric("patchbay_network_users", "")? >= LARGE_PODS as u64).then_some(()))
    })
    .await
    .with_context(|| replica.tail())?;
    let (peak, limit) = (peak_mib(u32::try_from(replica.pid()?.as_raw())?)?, controller_limit()?);
    println!("peak of the controller with {LARGE_PODS} large pods: {peak} MiB, limit {limit} MiB");
    let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
    cluster.api(&pods, Some(&cluster.namespace)).delete_collection(&now, &ListParams::default()).await?;
    ensure!(peak < limit, "controller: {peak} MiB, more than its limit of {limit} MiB");
    Ok(())
}
