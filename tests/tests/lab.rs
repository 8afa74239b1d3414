//! Tests the lab itself: it starts, is removed without a trace, and recovers from faults.
#![allow(clippy::print_stdout, reason = "tests print what they measured")]

#[path = "lab/kubevirt.rs"]
mod kubevirt;
#[path = "lab/node_kinds.rs"]
mod node_kinds;

use std::{
    path::Path,
    process::{Command, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use lab::{
    Lab, Multus, NodeOptions, Runtime, Topology,
    machine::lab_binary,
    paths::cgroup_name,
    snapshot::{HostSnapshot, namespaces_of, processes_in},
    stall::available_cpu_share,
    test_namespace::{TestNamespace, pod, with_namespace},
    wait,
};

use serde_json::json;

/// Serializes these tests: they compare the state of the host before and after.
fn serialize() -> MutexGuard<'static, ()> {
    static SERIAL: Mutex<()> = Mutex::new(());
    SERIAL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A lab that is removed at the end of the test.
struct LabGuard(Lab);

impl LabGuard {
    fn new(name: &str) -> Result<Self> {
        let lab = Lab::new(name.parse()?);
        lab.down()?;
        Ok(Self(lab))
    }
}

impl Drop for LabGuard {
    fn drop(&mut self) {
        let down = self.0.down();
        if !thread::panicking() {
            down.expect("remove the lab");
        }
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("build a runtime").block_on(future)
}

/// Asserts that the host is in the same state as before.
fn assert_unchanged(before: &HostSnapshot) {
    // The kernel removes network namespaces a moment after their last process has exited.
    let unchanged = wait::blocking(Duration::from_secs(60), "the host to be as before", || {
        let now = HostSnapshot::take()?;
        let (added, removed) = (now.added_since(before), now.removed_since(before));
        ensure!(added.is_empty() && removed.is_empty(), "added: {added:#?}\nremoved: {removed:#?}");
        Ok(Some(()))
    });
    unchanged.expect("the host is unchanged");
}

/// Removes the lab and asserts that no process is left in its namespaces, in whatever cgroup.
fn remove_and_check_namespaces(lab: &Lab) {
    let namespaces = namespaces_of(&lab.processes());
    lab.down().expect("remove the lab");
    let left = processes_in(&namespaces);
    assert!(left.is_empty(), "processes {left:?} are left in the lab's namespaces");
}

/// Starts the lab and asserts that it takes at most `limit`. That limit is about the lab, not about the machine: the first
/// start after a build reads the programs from disk, and other processes delay any start, but what the lab itself spends is
/// in each. So the fastest of five starts counts, and of each only the share of the CPUs that other processes leave; the
/// first one within the limit ends the measurement.
fn assert_starts_within(limit: Duration, lab: &Lab, topology: Topology) {
    let mut durations = Vec::new();
    while durations.len() < 5 && !durations.iter().any(|d| *d <= limit) {
        lab.down().expect("remove the lab");
        let share = available_cpu_share().expect("measure the load");
        let start = Instant::now();
        block_on(lab.up(topology)).expect("start the lab");
        let elapsed = start.elapsed();
        println!("{topology:?} started after {elapsed:?} with {share:.2} of the CPUs");
        durations.push(elapsed.mul_f64(share));
    }
    println!("{topology:?} started after {durations:?}, limit {limit:?}");
    assert!(
        durations.iter().any(|d| *d <= limit),
        "{topology:?} started after {durations:?}, limit {limit:?}"
    );
}

async fn node_count(lab: &Lab) -> Result<usize> {
    let nodes: Api<Node> = Api::all(lab.client().await?);
    Ok(nodes.list(&kube::api::ListParams::default()).await?.items.len())
}

#[test]
fn two_nodes_start_within_20_s_and_1536_mib_and_are_removed_with_running_pods() {
    let _serial = serialize();
    let before = HostSnapshot::take().unwrap();
    let guard = LabGuard::new("t-trace").unwrap();
    assert_starts_within(Duration::from_secs(20), &guard.0, Topology::Nodes(2));
    let memory = guard.0.status().memory() >> 20;
    println!("two nodes: {memory} MiB");
    assert!(memory <= 1536, "{memory} MiB");
    assert!(guard.0.status().is_healthy());
    block_on(async {
        let outcome = with_namespace(&guard.0, "trace", async |ns: &TestNamespace| {
            ns.start_pod(pod("a").on("node-1")).await?;
            ns.start_pod(pod("b").on("node-2")).await?;
            // Remove the lab while both pods run.
            guard.0.down()
        });
        // The Kubernetes namespace cannot be deleted without the API server.
        outcome.await.expect_err("the API server does not exist any more");
    });
    assert_unchanged(&before);
    // Removing a lab that does not exist succeeds.
    guard.0.down().unwrap();
    assert_unchanged(&before);
}

#[test]
fn a_start_that_is_killed_at_any_moment_can_be_cleaned_up_and_repeated() {
    let _serial = serialize();
    let before = HostSnapshot::take().unwrap();
    let moments =
        if e2e::soak() { (1..15).map(|n| n * 400).collect() } else { vec![100u64, 400, 700, 1200, 3000] };
    let start_and_kill = |lab: &Lab, moment: u64| {
        run_and_kill(&["--name", &lab.name.to_string(), "up", "--nodes", "1"], moment);
    };
    for chunk in moments.chunks(3) {
        let labs: Vec<(u64, LabGuard)> = chunk
            .iter()
            .map(|moment| (*moment, LabGuard::new(&format!("t-killed-{moment}")).unwrap()))
            .collect();
        // Sequential: on an idle machine, a start gets equally far in the same time.
        for (moment, guard) in &labs {
            start_and_kill(&guard.0, *moment);
            remove_and_check_namespaces(&guard.0);
            assert_unchanged(&before);
        }
        for (moment, guard) in &labs {
            start_and_kill(&guard.0, *moment);
        }
        // Repeat the starts in parallel.
        thread::scope(|scope| {
            for (_, guard) in &labs {
                scope.spawn(|| {
                    block_on(guard.0.up(Topology::Nodes(1))).unwrap();
                    assert!(guard.0.status().is_healthy(), "{}", guard.0.status());
                    assert_eq!(block_on(node_count(&guard.0)).unwrap(), 1);
                });
            }
        });
        // Remove them after all starts: the kernel reuses the inode numbers of removed namespaces for new ones.
        for (_, guard) in &labs {
            remove_and_check_namespaces(&guard.0);
        }
        assert_unchanged(&before);
    }
}

#[test]
fn down_removes_everything_after_kill_9_of_any_process() {
    let _serial = serialize();
    let before = HostSnapshot::take().unwrap();
    let guard = LabGuard::new("t-kill9").unwrap();
    block_on(guard.0.up(Topology::Nodes(1))).unwrap();
    assert!(namespaces_of(&guard.0.processes()).len() >= 10, "each machine has its own namespaces");
    // The container runtime, the API server, the forwarder, and the init of both machines.
    let kill =
        |pid: i32| assert!(Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success());
    guard.0.kill("node-1/containerd").unwrap();
    guard.0.kill("apiserver").unwrap();
    let forwarder = guard.0.forwarder_processes();
    assert_eq!(forwarder.len(), 1, "{forwarder:?}");
    kill(forwarder[0]);
    kill(guard.0.node("node-1").init().unwrap());
    kill(guard.0.control_plane().init().unwrap());
    guard.0.down().unwrap();
    assert_unchanged(&before);
}

#[test]
fn an_interrupted_down_or_reboot_can_be_repeated() {
    let _serial = serialize();
    let before = HostSnapshot::take().unwrap();
    let guard = LabGuard::new("t-half").unwrap();
    block_on(guard.0.up(Topology::Nodes(1))).unwrap();
    for moment in if e2e::soak() { vec![20, 60, 100, 200, 400, 800, 1600, 2400] } else { vec![60, 800] } {
        run_and_kill(&["--name", "t-half", "reboot", "node-1"], moment);
        block_on(guard.0.up(Topology::Nodes(1))).unwrap();
        assert!(guard.0.status().is_healthy(), "{}", guard.0.status());
    }
    for moment in if e2e::soak() { vec![5, 20, 50, 100, 200, 400, 800] } else { vec![20, 150] } {
        run_and_kill(&["--name", "t-half", "down"], moment);
        block_on(guard.0.up(Topology::Nodes(1))).unwrap();
    }
    run_and_kill(&["--name", "t-half", "down"], 100);
    remove_and_check_namespaces(&guard.0);
    assert_unchanged(&before);
}

/// Runs the lab's program and kills it after some milliseconds, unless it exits earlier.
fn run_and_kill(arguments: &[&str], moment: u64) {
    let program = lab_binary().expect("find the lab program");
    let mut child =
        Command::new(program).args(arguments).stderr(Stdio::null()).spawn().expect("start the lab program");
    let _ = wait::blocking(Duration::from_millis(moment), "the program to exit", || Ok(child.try_wait()?));
    child.kill().expect("kill the lab program");
    child.wait().expect("wait for the lab program");
}

#[test]
fn two_labs_run_in_parallel_and_are_independent() {
    let _serial = serialize();
    let before = HostSnapshot::take().unwrap();
    let (one, two) = (LabGuard::new("t-one").unwrap(), LabGuard::new("t-two").unwrap());
    block_on(async {
        one.0.up(Topology::Nodes(1)).await?;
        two.0.up(Topology::ControlPlaneOnly).await?;
        ensure!(
            node_count(&one.0).await? == 1 && node_count(&two.0).await? == 0,
            "each lab has its own nodes"
        );
        one.0.down()?;
        ensure!(node_count(&two.0).await? == 0, "the other lab keeps running");
        anyhow::Ok(())
    })
    .unwrap();
    drop((one, two));
    assert_unchanged(&before);
}

fn can_ping(lab: &Lab, from: &str, to: &str) -> bool {
    lab.node(from).output(&["ping", "-c", "1", "-W", "1", to]).is_ok()
}

/// All operations on one lab.
#[test]
fn nodes_are_partitioned_rebooted_added_and_removed_and_dead_components_restarted() {
    let _serial = serialize();
    let before = HostSnapshot::take().unwrap();
    let guard = LabGuard::new("t-ops").unwrap();
    let lab = &guard.0;
    block_on(async {
        lab.up(Topology::Nodes(2)).await?;

        // The lab has no route to other networks, and adds nothing to the host's network namespace.
        let outside = lab.control_plane().output(&["ip", "route", "get", "192.0.2.1"]);
        ensure!(outside.is_err(), "the switch has a route to other networks: {outside:?}");
        let routes = lab.node("node-1").output(&["ip", "route", "show", "default"])?;
        ensure!(routes.contains("dev eth0"), "{routes}");
        let now = HostSnapshot::take()?.added_since(&before);
        let on_host = |line: &&String| line.starts_with("link") || line.starts_with("mount");
        let links: Vec<_> = now.iter().filter(on_host).collect();
        ensure!(links.is_empty(), "{links:?}");
        let nics = lab.node("node-1").output(&["ls", "/sys/class/net"])?;
        ensure!(nics.split_whitespace().collect::<Vec<_>>() == ["eth0", "eth1", "eth2", "lo"], "{nics}");

        // Partition and heal.
        ensure!(can_ping(lab, "node-1", "172.30.0.12"), "nodes reach each other");
        lab.partition("node-2")?;
        ensure!(!can_ping(lab, "node-1", "172.30.0.12"), "a partitioned node is unreachable");
        let carrier = lab.node("node-2").output(&["cat", "/sys/class/net/eth0/carrier"])?;
        ensure!(carrier.trim() == "1", "a partitioned NIC keeps its carrier");
        ensure!(lab.status().to_string().contains("partitioned"), "{}", lab.status());
        lab.heal("node-2")?;
        ensure!(can_ping(lab, "node-1", "172.30.0.12"), "a healed node is reachable");

        // Sockets and plugins on their default paths.
        for path in [
            "/run/nri/nri.sock",
            "/run/multus/multus.sock",
            "/run/containerd/containerd.sock",
            "/opt/cni/bin/bridge",
        ] {
            lab.node("node-1").output(&["ls", path])?;
        }
        let version = lab.kubectl(&["version", "-o", "json"])?;
        ensure!(version.matches("\"gitVersion\": \"v1.36.3\"").count() == 2, "{version}");

        with_namespace(lab, "attach", async |ns: &TestNamespace| attach_a_second_interface(ns).await).await?;
        with_namespace(lab, "reboot", async |ns: &TestNamespace| reboot_a_node(ns).await).await?;
        add_and_remove_a_node(lab).await?;
        restart_dead_components(lab).await
    })
    .unwrap();
    drop(guard);
    assert_unchanged(&before);
}

/// Multus attaches two pods of a node to a bridge, and they reach each other on it.
async fn attach_a_second_interface(ns: &TestNamespace) -> Result<()> {
    let config = r#"{"cniVersion": "1.0.0", "type": "bridge", "bridge": "br-t", "ipam": {"type": "host-local", "subnet": "10.9.0.0/24"}}"#;
    let definition = json!({
        "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
        "metadata": {"name": "second", "namespace": ns.namespace}, "spec": {"config": config},
    });
    let file = ns.lab.kubeconfig().with_file_name("definition.json");
    std::fs::write(&file, definition.to_string())?;
    ns.lab.kubectl(&["apply", "-f", file.to_str().context("the path is not UTF-8")?])?;
    let attached = |name: &str| pod(name).on("node-1").annotation("k8s.v1.cni.cncf.io/networks", "second");
    let server = ns.start_pod(attached("server")).await?;
    ns.start_pod(attached("client")).await?;
    let status =
        server.metadata.annotations.and_then(|a| a.get("k8s.v1.cni.cncf.io/network-status").cloned());
    let status: serde_json::Value =
        serde_json::from_str(&status.context("the pod has no network-status annotation")?)?;
    let ip = status[1]["ips"][0].as_str().context("network-status has no second address")?.to_owned();
    ensure!(status[1]["interface"] == "net1", "{status}");
    ns.exec("client", &["ping", "-c", "1", "-W", "2", "-I", "net1", &ip]).map(|_| ())
}

async fn reboot_a_node(ns: &TestNamespace) -> Result<()> {
    let lab = &ns.lab;
    ns.start_pod(pod("server").on("node-2").command(&["tool", "echo", "7"])).await?;
    let client = ns.start_pod(pod("client").on("node-1")).await?;
    let first_boot = lab.node("node-1").boot_id()?;
    lab.node("node-1").output(&["touch", "/run/volatile", "/var/lib/kept"])?;
    lab.reboot("node-1").await?;
    ensure!(lab.node("node-1").boot_id()? != first_boot, "each boot has a new boot id");
    ensure!(lab.node("node-1").output(&["ls", "/run/volatile"]).is_err(), "/run does not survive a reboot");
    lab.node("node-1").output(&["ls", "/var/lib/kept"])?;
    // The kubelet detects that the sandbox does not exist any more and restarts the pod.
    let restarts = |p: &k8s_openapi::api::core::v1::Pod| {
        p.status.as_ref()?.container_statuses.as_ref()?.first().map(|c| c.restart_count)
    };
    let restarted = wait::until(Duration::from_secs(60), "the pod to be restarted", || async {
        let now = ns.wait_pod_ready("client").await?;
        Ok((restarts(&now) > restarts(&client)).then_some(now))
    });
    restarted.await?;
    let target = ns.wait_pod_ready("server").await?;
    let ips = target.status.and_then(|s| s.pod_ips).context("the pod has no addresses")?;
    ensure!(ips.len() == 2, "dual stack: {ips:?}");
    for ip in ips {
        let host = if ip.ip.contains(':') { format!("[{}]:7", ip.ip) } else { format!("{}:7", ip.ip) };
        for protocol in ["tcp", "udp"] {
            // IPv6 on the node's veth works only after duplicate address detection.
            let what = format!("a reply of {host} over {protocol}");
            wait::until(Duration::from_secs(60), &what, || async {
                let reply = ns.exec("client", &["tool", "send", protocol, &host, "hello"])?;
                Ok(reply.contains("hello").then_some(()))
            })
            .await?;
        }
    }
    let resolved = ns.exec("client", &["nslookup", "kubernetes.default.svc.cluster.local"])?;
    ensure!(resolved.contains("10.96.0.1"), "{resolved}");
    Ok(())
}

async fn add_and_remove_a_node(lab: &Lab) -> Result<()> {
    let name = lab.add_node().await?;
    ensure!(name == "node-3" && node_count(lab).await? == 3, "{name}");
    with_namespace(lab, "third", async |ns: &TestNamespace| {
        let server = ns.start_pod(pod("server").on("node-3")).await?;
        ns.start_pod(pod("client").on("node-1")).await?;
        let ip = server.status.and_then(|s| s.pod_ip).context("the pod has no address")?;
        ns.exec("client", &["ping", "-c", "1", "-W", "2", &ip]).map(|_| ())
    })
    .await?;
    lab.remove_node("node-3").await?;
    ensure!(node_count(lab).await? == 2, "the Node object is deleted");
    let cgroup = Path::new("/sys/fs/cgroup/pids").join(cgroup_name(&lab.name));
    ensure!(cgroup.exists() && !cgroup.join("node-3").exists(), "the node's cgroup is removed");
    Ok(())
}

async fn restart_dead_components(lab: &Lab) -> Result<()> {
    for component in
        ["etcd", "apiserver", "scheduler", "node-1/kubelet", "node-2/multus", "node-2/containerd"]
    {
        lab.kill(component)?;
    }
    ensure!(!lab.status().is_healthy(), "the status shows the dead components");
    lab.up(Topology::Nodes(2)).await?;
    ensure!(lab.status().is_healthy(), "{}", lab.status());
    lab.pause("apiserver")?;
    let paused = tokio::time::timeout(Duration::from_secs(1), node_count(lab)).await;
    ensure!(paused.is_err(), "a paused API server does not respond");
    lab.resume("apiserver")?;
    ensure!(node_count(lab).await? == 2, "a resumed API server responds");
    lab.pause("scheduler")?;
    lab.up(Topology::Nodes(2)).await?;
    let state = lab.control_plane().output(&["sh", "-c", "grep -l kube-scheduler /proc/[0-9]*/comm | head -1 | xargs dirname | xargs -I{} grep State {}/status"]);
    ensure!(
        state.as_ref().is_ok_and(|s| !s.contains("T (stopped)")),
        "up resumes paused components: {state:?}"
    );
    lab.restart("node-1/kubelet")?;

    // Kill whole machines: a node, then the control plane with both switches in it.
    for machine in [lab.node("node-2"), lab.control_plane()] {
        let pid = machine.init().context("the machine is not running")?.to_string();
        ensure!(Command::new("kill").args(["-9", &pid]).status()?.success(), "kill {pid}");
        wait::blocking(Duration::from_secs(60), "the machine to be off", || {
            Ok(machine.init().is_none().then_some(()))
        })?;
        lab.up(Topology::Nodes(2)).await.with_context(|| format!("after {} was killed", machine.name))?;
        ensure!(lab.status().is_healthy(), "{}", lab.status());
        ensure!(can_ping(lab, "node-1", "172.30.0.12"), "the nodes are connected again");
    }
    Ok(())
}

#[test]
fn a_control_plane_starts_within_5_s_and_its_requests_are_counted_by_user_agent() {
    let _serial = serialize();
    let guard = LabGuard::new("t-small").unwrap();
    assert_starts_within(Duration::from_secs(5), &guard.0, Topology::ControlPlaneOnly);
    block_on(async {
        let offset = guard.0.audit_offset()?;
        let nodes: Api<Node> = Api::all(guard.0.client().await?);
        for _ in 0..3 {
            nodes.get_opt("missing").await?;
        }
        let requests = guard.0.requests_since(offset)?;
        let own = requests
            .iter()
            .filter(|a| a.user_agent == "lab" && a.resource == "nodes" && a.code == 404)
            .count();
        ensure!(own == 3, "{requests:#?}");
        anyhow::Ok(())
    })
    .unwrap();
}

/// One lab with each kind of node.
#[test]
fn nodes_run_crio_the_thin_multus_or_no_multus_and_record_plugin_calls() {
    let _serial = serialize();
    let before = HostSnapshot::take().unwrap();
    let guard = LabGuard::new("t-kinds").unwrap();
    let lab = &guard.0;
    let node = |runtime, multus| NodeOptions { runtime, multus };
    let nodes = [
        node(Runtime::CriO, Multus::Thick),
        node(Runtime::Containerd, Multus::Thin),
        node(Runtime::CriO, Multus::None),
    ];
    block_on(async {
        lab.up_with(&nodes).await?;
        let versions = lab.kubectl(&["get", "nodes", "-o", "jsonpath={..containerRuntimeVersion}"])?;
        let names: Vec<&str> = versions.split(' ').filter_map(|v| v.split(':').next()).collect();
        ensure!(names == ["cri-o", "containerd", "cri-o"], "{versions}");
        // The nodes keep their kinds, and `up` does not replace them with others.
        lab.up(Topology::Nodes(3)).await?;
        ensure!(lab.up_with(&[node(Runtime::Containerd, Multus::None)]).await.is_err(), "node-1 has multus");
        with_namespace(lab, "kinds", async |ns: &TestNamespace| node_kinds::attach_on_each_kind(ns).await)
            .await?;
        with_namespace(lab, "crio", async |ns: &TestNamespace| node_kinds::kill_and_reboot_crio(ns).await)
            .await?;
        node_kinds::misbehave_on_request(lab)
    })
    .unwrap();
    let outcome = block_on(with_namespace(lab, "crio", async |ns: &TestNamespace| {
        ns.start_pod(pod("last").on("node-1")).await?;
        // Remove the lab while pods of CRI-O run.
        remove_and_check_namespaces(lab);
        Ok(())
    }));
    outcome.expect_err("the API server does not exist any more");
    assert_unchanged(&before);
}

#[test]
fn virtual_machines_restart_migrate_and_change_nics_through_kubevirts_controller() {
    let _serial = serialize();
    let before = HostSnapshot::take().unwrap();
    let guard = LabGuard::new("t-kubevirt").unwrap();
    let lab = &guard.0;
    block_on(async {
        lab.up(Topology::KubeVirt(2)).await?;
        ensure!(lab.status().to_string().contains("virt-controller"), "{}", lab.status());
        ensure!(lab.status().is_healthy(), "{}", lab.status());
        with_namespace(lab, "kubevirt", async |ns: &TestNamespace| kubevirt::run_virtual_machines(ns).await)
            .await
    })
    .unwrap();
    remove_and_check_namespaces(lab);
    assert_unchanged(&before);
}
