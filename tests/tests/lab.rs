//! The lab itself: comes up, goes down without a trace, and survives what is done to it.

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
    Lab, Topology,
    machine::lab_binary,
    snapshot::{HostSnapshot, namespaces_of, processes_in},
    test_namespace::{TestNamespace, pod, with_namespace},
    wait,
};

use serde_json::json;

/// These tests compare what the machine has before and after: one at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A lab that goes away with the test.
struct Guard(Lab);

impl Guard {
    fn new(name: &str) -> Result<Self> {
        let lab = Lab::new(name.parse()?);
        lab.down()?;
        Ok(Self(lab))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let down = self.0.down();
        if !thread::panicking() {
            down.expect("the lab goes down");
        }
    }
}

fn block<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(work)
}

/// Asserts that nothing came and nothing went.
fn same(before: &HostSnapshot) {
    // The kernel ends network namespaces a moment after their last process.
    let settled = wait::blocking(Duration::from_secs(5), "the machine to be as before", || {
        let now = HostSnapshot::take()?;
        let (came, went) = (now.added_since(before), now.removed_since(before));
        ensure!(came.is_empty() && went.is_empty(), "came: {came:#?}\nwent: {went:#?}");
        Ok(Some(()))
    });
    settled.expect("no trace");
}

/// Takes the lab down and asserts that nobody is left in its namespaces, wherever its cgroup put him.
fn down_and_out(lab: &Lab) {
    let namespaces = namespaces_of(&lab.processes());
    lab.down().expect("the lab goes down");
    let left = processes_in(&namespaces);
    assert!(left.is_empty(), "processes {left:?} are left in the lab's namespaces");
}

async fn answers(lab: &Lab) -> Result<usize> {
    let nodes: Api<Node> = Api::all(lab.client().await?);
    Ok(nodes.list(&kube::api::ListParams::default()).await?.items.len())
}

#[test]
fn two_nodes_are_ready_within_20_s_and_1536_mib_and_leave_nothing_even_with_pods_running() {
    let _alone = alone();
    let before = HostSnapshot::take().unwrap();
    let guard = Guard::new("t-trace").unwrap();
    let begun = Instant::now();
    block(guard.0.up(Topology::Nodes(2))).unwrap();
    let took = begun.elapsed();
    let memory = guard.0.status().memory() >> 20;
    println!("two nodes {took:?}, {memory} MiB");
    assert!(took <= Duration::from_secs(20), "{took:?}");
    assert!(memory <= 1536, "{memory} MiB");
    assert!(guard.0.status().is_healthy());
    block(async {
        let outcome = with_namespace(&guard.0, "trace", async |ns: &TestNamespace| {
            ns.start_pod(pod("a").on("node-1")).await?;
            ns.start_pod(pod("b").on("node-2")).await?;
            // The lab goes down with both of them running.
            guard.0.down()
        });
        // The namespace cannot be deleted in a lab that is gone.
        outcome.await.expect_err("the API server is gone");
    });
    same(&before);
    // Once more, with nothing to take down.
    guard.0.down().unwrap();
    same(&before);
}

#[test]
fn a_start_that_is_killed_at_any_moment_leaves_nothing_and_can_be_repeated() {
    let _alone = alone();
    let before = HostSnapshot::take().unwrap();
    let moments =
        if e2e::soak() { (1..15).map(|n| n * 400).collect() } else { vec![100u64, 400, 700, 1200, 3000] };
    let start_and_kill = |lab: &Lab, moment: u64| {
        run_and_kill(&["--name", &lab.name.to_string(), "up", "--nodes", "1"], moment);
    };
    for some in moments.chunks(3) {
        let labs: Vec<(u64, Guard)> =
            some.iter().map(|moment| (*moment, Guard::new(&format!("t-killed-{moment}")).unwrap())).collect();
        // One after another: a moment is as far in a start as it is on a machine that does nothing else.
        for (moment, guard) in &labs {
            start_and_kill(&guard.0, *moment);
            down_and_out(&guard.0);
            same(&before);
        }
        for (moment, guard) in &labs {
            start_and_kill(&guard.0, *moment);
        }
        // Repeated side by side.
        thread::scope(|scope| {
            for (_, guard) in &labs {
                scope.spawn(|| {
                    block(guard.0.up(Topology::Nodes(1))).unwrap();
                    assert!(guard.0.status().is_healthy(), "{}", guard.0.status());
                    assert_eq!(block(answers(&guard.0)).unwrap(), 1);
                });
            }
        });
        // Down when nothing comes up any more: the kernel gives the numbers of dead namespaces to new ones.
        for (_, guard) in &labs {
            down_and_out(&guard.0);
        }
        same(&before);
    }
}

#[test]
fn down_leaves_nothing_after_kill_9_of_anything() {
    let _alone = alone();
    let before = HostSnapshot::take().unwrap();
    let guard = Guard::new("t-kill9").unwrap();
    block(guard.0.up(Topology::Nodes(1))).unwrap();
    assert!(namespaces_of(&guard.0.processes()).len() >= 10, "each machine lives in namespaces of its own");
    // A runtime, the API server, the forwarder, a shim, and the first processes of both machines.
    let kill =
        |pid: i32| assert!(Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success());
    guard.0.kill("node-1/containerd").unwrap();
    guard.0.kill("apiserver").unwrap();
    let door = guard.0.forwarder_processes();
    assert_eq!(door.len(), 1, "{door:?}");
    kill(door[0]);
    kill(guard.0.node("node-1").init().unwrap());
    kill(guard.0.control_plane().init().unwrap());
    guard.0.down().unwrap();
    same(&before);
}

#[test]
fn down_and_reboot_that_are_killed_can_be_repeated() {
    let _alone = alone();
    let before = HostSnapshot::take().unwrap();
    let guard = Guard::new("t-half").unwrap();
    block(guard.0.up(Topology::Nodes(1))).unwrap();
    for moment in if e2e::soak() { vec![20, 60, 100, 200, 400, 800, 1600, 2400] } else { vec![60, 800] } {
        run_and_kill(&["--name", "t-half", "reboot", "node-1"], moment);
        block(guard.0.up(Topology::Nodes(1))).unwrap();
        assert!(guard.0.status().is_healthy(), "{}", guard.0.status());
    }
    for moment in if e2e::soak() { vec![5, 20, 50, 100, 200, 400, 800] } else { vec![20, 150] } {
        run_and_kill(&["--name", "t-half", "down"], moment);
        block(guard.0.up(Topology::Nodes(1))).unwrap();
    }
    run_and_kill(&["--name", "t-half", "down"], 100);
    down_and_out(&guard.0);
    same(&before);
}

/// Runs the lab's program and kills it after some milliseconds, unless it has ended by itself.
fn run_and_kill(arguments: &[&str], moment: u64) {
    let program = lab_binary().expect("the lab is built");
    let mut child =
        Command::new(program).args(arguments).stderr(Stdio::null()).spawn().expect("the lab starts");
    let _ = wait::blocking(Duration::from_millis(moment), "the moment", || Ok(child.try_wait()?));
    child.kill().expect("it is killed");
    child.wait().expect("it ends");
}

#[test]
fn two_labs_run_at_once_and_know_nothing_of_each_other() {
    let _alone = alone();
    let before = HostSnapshot::take().unwrap();
    let (one, two) = (Guard::new("t-one").unwrap(), Guard::new("t-two").unwrap());
    block(async {
        one.0.up(Topology::Nodes(1)).await?;
        two.0.up(Topology::ControlPlaneOnly).await?;
        ensure!(answers(&one.0).await? == 1 && answers(&two.0).await? == 0, "each has its own nodes");
        one.0.down()?;
        ensure!(answers(&two.0).await? == 0, "the other one lives on");
        anyhow::Ok(())
    })
    .unwrap();
    drop((one, two));
    same(&before);
}

fn reaches(lab: &Lab, from: &str, to: &str) -> bool {
    lab.node(from).output(&["ping", "-c", "1", "-W", "1", to]).is_ok()
}

/// What a lab goes through in a day; one lab for all of it.
#[test]
fn nodes_are_cut_off_rebooted_added_and_removed_and_dead_programs_repaired() {
    let _alone = alone();
    let before = HostSnapshot::take().unwrap();
    let guard = Guard::new("t-day").unwrap();
    let lab = &guard.0;
    block(async {
        lab.up(Topology::Nodes(2)).await?;

        // Nothing leads out, and nothing of the lab is in this machine's network.
        let beyond = lab.control_plane().output(&["ip", "route", "get", "192.0.2.1"]);
        ensure!(beyond.is_err(), "the switch leads somewhere: {beyond:?}");
        let routes = lab.node("node-1").output(&["ip", "route", "show", "default"])?;
        ensure!(routes.contains("dev eth0"), "{routes}");
        let now = HostSnapshot::take()?.added_since(&before);
        let here = |line: &&String| line.starts_with("link") || line.starts_with("mount");
        let links: Vec<_> = now.iter().filter(here).collect();
        ensure!(links.is_empty(), "{links:?}");
        let nics = lab.node("node-1").output(&["ls", "/sys/class/net"])?;
        ensure!(nics.split_whitespace().collect::<Vec<_>>() == ["eth0", "eth1", "eth2", "lo"], "{nics}");

        // Cut off and back.
        ensure!(reaches(lab, "node-1", "172.30.0.12"), "nodes reach each other");
        lab.partition("node-2")?;
        ensure!(!reaches(lab, "node-1", "172.30.0.12"), "a cut cable carries nothing");
        let carrier = lab.node("node-2").output(&["cat", "/sys/class/net/eth0/carrier"])?;
        ensure!(carrier.trim() == "1", "the fault is further away than the NIC");
        ensure!(lab.status().to_string().contains("partitioned"), "{}", lab.status());
        lab.heal("node-2")?;
        ensure!(reaches(lab, "node-1", "172.30.0.12"), "a mended cable carries");

        // What a node offers on its default paths.
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

        with_namespace(lab, "attach", async |ns: &TestNamespace| an_attachment(ns).await).await?;
        with_namespace(lab, "day", async |ns: &TestNamespace| a_reboot(ns).await).await?;
        a_third_node(lab).await?;
        dead_programs(lab).await
    })
    .unwrap();
    drop(guard);
    same(&before);
}

/// Multus gives a pod a second interface, and two pods of a node reach each other on it.
async fn an_attachment(ns: &TestNamespace) -> Result<()> {
    let config = r#"{"cniVersion": "1.0.0", "type": "bridge", "bridge": "br-t", "ipam": {"type": "host-local", "subnet": "10.9.0.0/24"}}"#;
    let definition = json!({
        "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
        "metadata": {"name": "second", "namespace": ns.namespace}, "spec": {"config": config},
    });
    let file = ns.lab.kubeconfig().with_file_name("definition.json");
    std::fs::write(&file, definition.to_string())?;
    ns.lab.kubectl(&["apply", "-f", file.to_str().context("a path in UTF-8")?])?;
    let with = |name: &str| pod(name).on("node-1").annotation("k8s.v1.cni.cncf.io/networks", "second");
    let one = ns.start_pod(with("one")).await?;
    ns.start_pod(with("two")).await?;
    let status = one.metadata.annotations.and_then(|a| a.get("k8s.v1.cni.cncf.io/network-status").cloned());
    let status: serde_json::Value = serde_json::from_str(&status.context("multus writes network-status")?)?;
    let ip = status[1]["ips"][0].as_str().context("a second address")?.to_owned();
    ensure!(status[1]["interface"] == "net1", "{status}");
    ns.exec("two", &["ping", "-c", "1", "-W", "2", "-I", "net1", &ip]).map(|_| ())
}

async fn a_reboot(ns: &TestNamespace) -> Result<()> {
    let lab = &ns.lab;
    ns.start_pod(pod("echo").on("node-2").command(&["tool", "echo", "7"])).await?;
    let ask = ns.start_pod(pod("ask").on("node-1")).await?;
    let first_boot = lab.node("node-1").boot_id()?;
    lab.node("node-1").output(&["touch", "/run/volatile", "/var/lib/kept"])?;
    lab.reboot("node-1").await?;
    ensure!(lab.node("node-1").boot_id()? != first_boot, "a boot has an id of its own");
    ensure!(lab.node("node-1").output(&["ls", "/run/volatile"]).is_err(), "/run is gone");
    lab.node("node-1").output(&["ls", "/var/lib/kept"])?;
    // The kubelet notices that the sandbox died with the node.
    let restarts = |p: &k8s_openapi::api::core::v1::Pod| {
        p.status.as_ref()?.container_statuses.as_ref()?.first().map(|c| c.restart_count)
    };
    let back = wait::until(Duration::from_secs(60), "the pod to be back", || async {
        let now = ns.wait_pod_ready("ask").await?;
        Ok((restarts(&now) > restarts(&ask)).then_some(now))
    });
    back.await?;
    let target = ns.wait_pod_ready("echo").await?;
    let ips = target.status.and_then(|s| s.pod_ips).context("the pod has addresses")?;
    ensure!(ips.len() == 2, "dual stack: {ips:?}");
    for ip in ips {
        let host = if ip.ip.contains(':') { format!("[{}]:7", ip.ip) } else { format!("{}:7", ip.ip) };
        for protocol in ["tcp", "udp"] {
            // The node's end of a new pod's link is silent on IPv6 until its address is known to be unique.
            let what = format!("{host} to answer over {protocol}");
            wait::until(Duration::from_secs(10), &what, || async {
                let answer = ns.exec("ask", &["tool", "send", protocol, &host, "hello"])?;
                Ok(answer.contains("hello").then_some(()))
            })
            .await?;
        }
    }
    let resolved = ns.exec("ask", &["nslookup", "kubernetes.default.svc.cluster.local"])?;
    ensure!(resolved.contains("10.96.0.1"), "{resolved}");
    Ok(())
}

async fn a_third_node(lab: &Lab) -> Result<()> {
    let name = lab.add_node().await?;
    ensure!(name == "node-3" && answers(lab).await? == 3, "{name}");
    with_namespace(lab, "third", async |ns: &TestNamespace| {
        let there = ns.start_pod(pod("there").on("node-3")).await?;
        ns.start_pod(pod("here").on("node-1")).await?;
        let ip = there.status.and_then(|s| s.pod_ip).context("an address")?;
        ns.exec("here", &["ping", "-c", "1", "-W", "2", &ip]).map(|_| ())
    })
    .await?;
    lab.remove_node("node-3").await?;
    ensure!(answers(lab).await? == 2, "its Node object is gone");
    ensure!(!Path::new("/sys/fs/cgroup/pids/patchbay-lab.t-day/node-3").exists(), "its cgroup is gone");
    Ok(())
}

async fn dead_programs(lab: &Lab) -> Result<()> {
    for component in
        ["etcd", "apiserver", "scheduler", "node-1/kubelet", "node-2/multus", "node-2/containerd"]
    {
        lab.kill(component)?;
    }
    ensure!(!lab.status().is_healthy(), "the dead are seen");
    lab.up(Topology::Nodes(2)).await?;
    ensure!(lab.status().is_healthy(), "{}", lab.status());
    lab.pause("apiserver")?;
    let silent = tokio::time::timeout(Duration::from_secs(1), answers(lab)).await;
    ensure!(silent.is_err(), "a paused API server says nothing");
    lab.resume("apiserver")?;
    ensure!(answers(lab).await? == 2, "and goes on where it was");
    lab.pause("scheduler")?;
    lab.up(Topology::Nodes(2)).await?;
    let state = lab.control_plane().output(&["sh", "-c", "grep -l kube-scheduler /proc/[0-9]*/comm | head -1 | xargs dirname | xargs -I{} grep State {}/status"]);
    ensure!(state.as_ref().is_ok_and(|s| !s.contains("T (stopped)")), "up wakes what is paused: {state:?}");
    lab.restart("node-1/kubelet")?;

    // Whole machines, one after the other: a node, then the control plane with both switches in it.
    for machine in [lab.node("node-2"), lab.control_plane()] {
        let pid = machine.init().context("it runs")?.to_string();
        ensure!(Command::new("kill").args(["-9", &pid]).status()?.success(), "kill {pid}");
        wait::blocking(Duration::from_secs(5), "the machine to be off", || {
            Ok(machine.init().is_none().then_some(()))
        })?;
        lab.up(Topology::Nodes(2)).await.with_context(|| format!("after the death of {}", machine.name))?;
        ensure!(lab.status().is_healthy(), "{}", lab.status());
        ensure!(reaches(lab, "node-1", "172.30.0.12"), "cables are plugged in again");
    }
    Ok(())
}

#[test]
fn a_control_plane_is_ready_within_5_s_and_what_is_asked_of_it_can_be_counted_by_user_agent() {
    let _alone = alone();
    let guard = Guard::new("t-small").unwrap();
    let begun = Instant::now();
    block(guard.0.up(Topology::ControlPlaneOnly)).unwrap();
    let took = begun.elapsed();
    println!("control plane {took:?}");
    assert!(took <= Duration::from_secs(5), "{took:?}");
    block(async {
        let mark = guard.0.audit_offset()?;
        let nodes: Api<Node> = Api::all(guard.0.client().await?);
        for _ in 0..3 {
            nodes.get_opt("nobody").await?;
        }
        let asked = guard.0.requests_since(mark)?;
        let mine =
            asked.iter().filter(|a| a.user_agent == "lab" && a.resource == "nodes" && a.code == 404).count();
        ensure!(mine == 3, "{asked:#?}");
        anyhow::Ok(())
    })
    .unwrap();
}
