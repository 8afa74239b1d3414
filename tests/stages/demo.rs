//! `make demo`: a walk through what Patchbay does. Every command is printed and its output is real.

use std::{
    io::Write as _,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use lab::{Lab, Topology, print_progress, program::Programs, test_namespace::pod, wait};

use crate::{
    image, packages,
    step::{cargo, show},
};

const LAB: &str = "default";

/// Sets up what is missing, starts a lab, installs Patchbay, and shows each chapter.
pub fn run() -> Result<()> {
    packages::prepare()?;
    show(&mut cargo(&["build", "--locked", "-p", "lab"]))?;
    let tar = image::build()?;
    let lab = Lab::new(LAB.parse()?);
    let tour = Tour { lab: lab.clone() };

    chapter("A real Kubernetes on this machine");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let begun = Instant::now();
    print_progress("starting two nodes …");
    runtime.block_on(lab.up(Topology::Nodes(2)))?;
    print_progress(format!("ready after {:.1} s", begun.elapsed().as_secs_f64()));
    tour.kubectl("get nodes -o wide")?;

    chapter("Install Patchbay");
    print_progress("loading the image into the nodes …");
    lab.load_image(&tar)?;
    tour.kubectl("apply -f deploy/install/")?;
    tour.kubectl("-n patchbay-system rollout status deployment/patchbay-controller --timeout=90s")?;
    tour.kubectl("-n patchbay-system rollout status daemonset/patchbay-node --timeout=90s")?;
    tour.kubectl("-n patchbay-system get pods -o wide")?;

    nodes(&tour, &runtime)?;
    network(&tour, &runtime)?;
    addresses(&tour, &runtime)?;
    tour.end();
    Ok(())
}

/// What the nodes have, told by their daemons.
fn nodes(tour: &Tour, runtime: &tokio::runtime::Runtime) -> Result<()> {
    chapter("What the nodes have: NodeNetwork");
    runtime.block_on(e2e::patchbay::wait_ready(&tour.lab))?;
    tour.kubectl("get nodenetworks")?;
    tour.kubectl("get nodenetwork node-1 -o jsonpath={.status} | (pretty)")?;
    println!("A NIC that appears on a node is published at once:");
    // A tour that is run twice on one lab finds the NIC there.
    let _ = tour.lab.node("node-1").output(&["ip", "link", "del", "nic1"]);
    tour.exec("node-1", "ip link add nic1 up type veth peer vethnic1")?;
    let begun = Instant::now();
    runtime.block_on(wait::until(Duration::from_secs(3), "nic1 in NodeNetwork node-1", || async {
        let found = tour.lab.kubectl(&["get", "nodenetwork", "node-1", "-o", NAMES])?;
        Ok(found.contains("nic1").then_some(()))
    }))?;
    println!("seen after {} ms", begun.elapsed().as_millis());
    tour.kubectl(&format!("get nodenetwork node-1 -o {NAMES}"))?;
    tour.exec("node-1", "ip link del nic1")?;

    println!("A NodeNetwork that nobody's node stands for is refused, with a reason:");
    let object =
        r#"{"apiVersion":"patchbay.dev/v1alpha1","kind":"NodeNetwork","metadata":{"name":"nowhere"}}"#;
    tour.refused("create -f -", object)
}

/// An L2 network over both nodes: pods on it, hands off its links, and no deletion while it is used.
fn network(tour: &Tour, runtime: &tokio::runtime::Runtime) -> Result<()> {
    chapter("A network across the nodes: BridgeNetwork");
    let lab = &tour.lab;
    // A tour that is run twice on one lab begins anew.
    let _ = lab.kubectl(&["delete", "pod", "alice", "bob", "--now", "--ignore-not-found"]);
    let _ = lab.kubectl(&["delete", "bnet", "blue", "--ignore-not-found", "--timeout=30s"]);
    let client = runtime.block_on(lab.client())?;
    print!("{}", std::fs::read_to_string(e2e::repository().join("docs/examples/blue.yaml"))?);
    tour.kubectl("apply -f docs/examples/blue.yaml")?;
    let took = runtime.block_on(e2e::bridge::wait_ready(&client, "blue", Duration::from_secs(10)))?;
    println!("ready on both nodes after {} ms", took.as_millis());
    tour.kubectl("get bnet")?;
    tour.kubectl("get net-attach-def")?;
    tour.kubectl("get nodes -L network.patchbay.dev/blue")?;
    tour.exec("node-1", "ip -br link show master br-blue")?;

    println!("Two pods, one on each node; addresses are their own affair on this network:");
    for (name, node, address) in [("alice", "node-1", "10.1.0.1/24"), ("bob", "node-2", "10.1.0.2/24")] {
        let start = format!("ip addr add {address} dev net1 && exec tool pause");
        let pod = e2e::bridge::attached_pod(name, node, "blue").command(&["sh", "-c", &start]).object();
        println!(
            "$ kubectl create -f {name}.json      # on {node}, annotation k8s.v1.cni.cncf.io/networks: blue"
        );
        tour.create(&pod.to_string())?;
    }
    tour.kubectl("wait pod/alice pod/bob --for=condition=Ready --timeout=60s")?;
    tour.kubectl("exec alice -- ip -br addr")?;
    tour.kubectl("exec alice -- ping -c 3 -i 0.3 10.1.0.2")?;

    println!("Somebody deletes the bridge under a running pod:");
    tour.exec("node-1", "ip link del br-blue")?;
    let begun = Instant::now();
    runtime.block_on(wait::until(Duration::from_secs(3), "bob to be reached again", || async {
        lab.kubectl(&["exec", "alice", "--", "ping", "-c", "1", "-W", "1", "10.1.0.2"]).map(Some)
    }))?;
    println!("repaired; alice reaches bob again after {} ms", begun.elapsed().as_millis());

    println!("A network that is used is not deleted:");
    tour.kubectl("delete bnet blue --wait=false")?;
    let in_use = r#"jsonpath={.status.conditions[?(@.type=="InUse")].message}"#;
    runtime.block_on(wait::until(Duration::from_secs(5), "the reason", || async {
        Ok((!lab.kubectl(&["get", "bnet", "blue", "-o", in_use])?.is_empty()).then_some(()))
    }))?;
    tour.kubectl(&format!("get bnet blue -o {in_use}"))?;
    tour.kubectl("exec alice -- ping -c 1 10.1.0.2")?;
    tour.kubectl("delete pod alice bob --now")?;
    let took = runtime.block_on(e2e::bridge::wait_deleted(&client, "blue", Duration::from_secs(10)))?;
    println!("gone {} ms after its last user; on the nodes:", took.as_millis());
    tour.exec("node-1", "ip -br link show type bridge")
}

/// Addresses without a hand on them: on both nodes, to the last one, and a clear word when there is none left.
fn addresses(tour: &Tour, runtime: &tokio::runtime::Runtime) -> Result<()> {
    chapter("Addresses that are given once: IPAM");
    let lab = &tour.lab;
    // A tour that is run twice on one lab begins anew.
    let _ =
        lab.kubectl(&["delete", "pod", "amy", "ben", "one", "two", "three", "--now", "--ignore-not-found"]);
    let _ = lab.kubectl(&["delete", "bnet", "green", "tiny", "--ignore-not-found", "--timeout=30s"]);
    let _ = lab.kubectl(&["delete", "events", "--field-selector", "reason=AddressesExhausted"]);
    let client = runtime.block_on(lab.client())?;
    print!("{}", std::fs::read_to_string(e2e::repository().join("docs/examples/green.yaml"))?);
    tour.kubectl("apply -f docs/examples/green.yaml")?;
    runtime.block_on(e2e::bridge::wait_ready(&client, "green", Duration::from_secs(10)))?;
    for (name, node) in [("amy", "node-1"), ("ben", "node-2")] {
        tour.join(name, node, "green")?;
    }
    tour.kubectl("wait pod/amy pod/ben --for=condition=Ready --timeout=60s")?;
    tour.kubectl("exec amy -- ip -br addr show net1")?;
    for address in tour.addresses("ben")? {
        tour.kubectl(&format!("exec amy -- ping -c 2 -i 0.3 {address}"))?;
    }
    println!("Each node has taken blocks of its own, and hands out their addresses without asking anybody:");
    tour.kubectl("get ipblocks")?;

    println!("A network with two addresses, and three pods; a node borrows what the other one has left:");
    let tiny = r#"{"apiVersion":"patchbay.dev/v1alpha1","kind":"BridgeNetwork","metadata":{"name":"tiny"},"spec":{"attachment":{"namespaces":["default"]},"ipam":{"subnets":["10.21.0.0/30"]}}}"#;
    println!("$ echo '{tiny}' | kubectl create -f -");
    tour.create(tiny)?;
    runtime.block_on(e2e::bridge::wait_ready(&client, "tiny", Duration::from_secs(10)))?;
    for (name, node) in [("one", "node-1"), ("two", "node-2")] {
        tour.join(name, node, "tiny")?;
    }
    tour.kubectl("wait pod/one pod/two --for=condition=Ready --timeout=60s")?;
    tour.join("three", "node-1", "tiny")?;
    let about = "get events --field-selector reason=AddressesExhausted -o jsonpath={.items[*].message}";
    let words: Vec<&str> = about.split(' ').collect();
    runtime.block_on(wait::until(Duration::from_secs(20), "the word that none is left", || async {
        Ok((!lab.kubectl(&words)?.is_empty()).then_some(()))
    }))?;
    tour.kubectl("get ipblocks -l patchbay.dev/network=tiny")?;
    tour.kubectl(about)?;
    tour.kubectl("get pod one two three")?;

    tour.kubectl("delete pod amy ben one two three --now")?;
    tour.kubectl("delete bnet green tiny --timeout=30s")?;
    println!("With the networks their blocks are gone:");
    tour.kubectl("get ipblocks -o name")
}

const NAMES: &str = "jsonpath={.status.interfaces[*].name}";

fn chapter(title: &str) {
    println!("\n=== {title}\n");
}

struct Tour {
    lab: Lab,
}

impl Tour {
    fn program(&self) -> Result<Command> {
        let mut command = Command::new(Programs::prepare()?.path("kubectl")?);
        command.env("KUBECONFIG", self.lab.kubeconfig()).current_dir(e2e::repository());
        Ok(command)
    }

    /// Prints a kubectl command and what it answers; `| (pretty)` formats JSON for the eye.
    fn kubectl(&self, line: &str) -> Result<()> {
        let (words, pretty) = line.strip_suffix(" | (pretty)").map_or((line, false), |words| (words, true));
        println!("$ kubectl {words}");
        if words.contains("rollout") {
            // It takes a while, and tells how far it is.
            show(self.program()?.args(words.split(' ')))?;
            println!();
            return Ok(());
        }
        let output = self.program()?.args(words.split(' ')).output().context("run kubectl")?;
        if !output.status.success() {
            bail!("kubectl {words}: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        let text = if pretty {
            serde_json::to_string_pretty(&serde_json::from_slice::<serde_json::Value>(&output.stdout)?)?
        } else {
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        println!("{}\n", text.trim_end());
        Ok(())
    }

    /// The same for a command that must be refused.
    fn refused(&self, line: &str, input: &str) -> Result<()> {
        println!("$ echo '{input}' | kubectl {line}");
        let mut child = self
            .program()?
            .args(line.split(' '))
            .stdin(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .context("run kubectl")?;
        child.stdin.take().context("kubectl has no input")?.write_all(input.as_bytes())?;
        let output = child.wait_with_output().context("wait for kubectl")?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.success() || !said.contains("there is no Node") {
            bail!("kubectl {line}: this should have been refused by Patchbay, but: {said}");
        }
        println!("{}\n", said.trim());
        Ok(())
    }

    /// Makes an object that is too long to be shown.
    fn create(&self, object: &str) -> Result<()> {
        let mut child =
            self.program()?.args(["create", "-f", "-"]).stdin(std::process::Stdio::piped()).spawn()?;
        child.stdin.take().context("kubectl has no input")?.write_all(object.as_bytes())?;
        if !child.wait().context("wait for kubectl")?.success() {
            bail!("kubectl create failed");
        }
        Ok(())
    }

    /// Makes a pod on a network.
    fn join(&self, name: &str, node: &str, network: &str) -> Result<()> {
        println!(
            "$ kubectl create -f {name}.json      # on {node}, annotation k8s.v1.cni.cncf.io/networks: {network}"
        );
        self.create(
            &pod(name).on(node).annotation("k8s.v1.cni.cncf.io/networks", network).object().to_string(),
        )
    }

    /// The addresses that a pod has beside those of the cluster's own network.
    fn addresses(&self, name: &str) -> Result<Vec<String>> {
        let status = r"jsonpath={.metadata.annotations.k8s\.v1\.cni\.cncf\.io/network-status}";
        let text = self.lab.kubectl(&["get", "pod", name, "-o", status])?;
        let all: Vec<serde_json::Value> = serde_json::from_str(&text).context("read the network-status")?;
        let second = all.iter().filter(|one| one["interface"] == "net1");
        let ips = second.flat_map(|one| one["ips"].as_array().into_iter().flatten());
        Ok(ips.filter_map(serde_json::Value::as_str).map(str::to_owned).collect())
    }

    /// Prints a command on a node and what it answers.
    fn exec(&self, node: &str, line: &str) -> Result<()> {
        println!("$ lab exec {node} -- {line}");
        let text = self.lab.node(node).output(&line.split(' ').collect::<Vec<_>>())?;
        println!("{}", text.trim_end());
        Ok(())
    }

    fn end(&self) {
        println!(
            "\n=== The lab stays up\n\n\
             export KUBECONFIG={}\n\
             kubectl get nodenetworks            any kubectl; or: cargo run -p lab -- kubectl …\n\
             cargo run -p lab -- exec node-1 -- ip addr\n\
             cargo run -p lab -- status          also: logs, kill, reboot, partition, add-node …\n\
             make shell                          a shell on node-1\n\
             make down                           takes everything away",
            self.lab.kubeconfig().display(),
        );
    }
}
