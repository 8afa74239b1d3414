//! `make demo`: a guided tour. It prints every command and its real output.

mod persistent_ips;
mod services;

use std::{
    fs,
    io::Write as _,
    os::unix::fs::symlink,
    path::PathBuf,
    process::{Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use lab::{Lab, Topology, print_progress, program::Programs, test_namespace::pod, wait};

use crate::{
    image, packages,
    step::{build_lab, run_command},
};

const LAB: &str = "default";

/// Builds what is missing, starts a lab, installs Patchbay, and runs each chapter.
pub fn run() -> Result<()> {
    let tar = packages::prepare_while(|| {
        build_lab()?;
        image::build()
    })?;
    let lab = Lab::new(LAB.parse()?);
    let tour = Tour { lab: lab.clone(), plugins: kubectl_plugins()? };

    chapter("Start a Kubernetes cluster on this machine");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let start = Instant::now();
    print_progress("starting a control plane and two nodes …");
    runtime.block_on(lab.up(Topology::KubeVirt(2)))?;
    print_progress(format!("the cluster is ready after {:.1} s", start.elapsed().as_secs_f64()));
    tour.kubectl("get nodes -o wide")?;

    chapter("Install Patchbay");
    print_progress("loading the image into the nodes …");
    lab.load_image(&tar)?;
    tour.kubectl("apply -f deploy/install/")?;
    tour.kubectl("-n patchbay-system rollout status deployment/patchbay-controller --timeout=90s")?;
    tour.kubectl("-n patchbay-system rollout status daemonset/patchbay-node --timeout=90s")?;
    tour.kubectl("-n patchbay-system get pods -o wide")?;

    services::remove_leftovers(&tour);
    node_networks(&tour, &runtime)?;
    bridge_network(&tour, &runtime)?;
    ip_addresses(&tour, &runtime)?;
    hot_plug(&tour, &runtime)?;
    services::chapter(&tour, &runtime)?;
    persistent_ips::chapter(&tour, &runtime)?;
    tour.print_next_steps();
    Ok(())
}

/// NodeNetwork: what each daemon reports about its node.
fn node_networks(tour: &Tour, runtime: &tokio::runtime::Runtime) -> Result<()> {
    chapter("See the interfaces of each node: NodeNetwork");
    println!("The daemon on each node publishes the node's interfaces in a NodeNetwork object:");
    runtime.block_on(e2e::patchbay::wait_ready(&tour.lab))?;
    tour.kubectl("get nodenetworks")?;
    tour.kubectl("get nodenetwork node-1 -o jsonpath={.status} | (pretty)")?;
    println!("Add a NIC to a node. The daemon publishes it within milliseconds:");
    // An earlier tour on the same lab may have left the NIC.
    let _ = tour.lab.node("node-1").output(&["ip", "link", "del", "nic1"]);
    tour.exec("node-1", "ip link add nic1 up type veth peer vethnic1")?;
    let start = Instant::now();
    runtime.block_on(wait::until(Duration::from_secs(3), "nic1 in NodeNetwork node-1", || async {
        let names = tour.lab.kubectl(&["get", "nodenetwork", "node-1", "-o", NAMES])?;
        Ok(names.contains("nic1").then_some(()))
    }))?;
    println!("published after {} ms", start.elapsed().as_millis());
    tour.kubectl(&format!("get nodenetwork node-1 -o {NAMES}"))?;
    tour.exec("node-1", "ip link del nic1")?;

    println!(
        "Create a NodeNetwork for a node that does not exist. The admission webhook rejects it with a reason:"
    );
    let object =
        r#"{"apiVersion":"patchbay.dev/v1alpha1","kind":"NodeNetwork","metadata":{"name":"nowhere"}}"#;
    tour.expect_rejected("create -f -", object)
}

/// BridgeNetwork: an L2 network across both nodes, its repair, and its protected deletion.
fn bridge_network(tour: &Tour, runtime: &tokio::runtime::Runtime) -> Result<()> {
    chapter("Connect pods across nodes: BridgeNetwork");
    let lab = &tour.lab;
    // An earlier tour on the same lab may have left its objects.
    let _ = lab.kubectl(&["delete", "pod", "client", "server", "--now", "--ignore-not-found"]);
    let _ = lab.kubectl(&["delete", "bnet", "blue", "--ignore-not-found", "--timeout=30s"]);
    let client = runtime.block_on(lab.client())?;
    println!("Create an L2 network, here a VXLAN overlay between the nodes:\n");
    print!("{}", fs::read_to_string(e2e::repository().join("docs/examples/blue.yaml"))?);
    tour.kubectl("apply -f docs/examples/blue.yaml")?;
    let elapsed = runtime.block_on(e2e::bridge::wait_ready(&client, "blue"))?;
    println!("Ready on both nodes after {} ms\n", elapsed.as_millis());
    tour.kubectl("get bnet")?;
    println!(
        "Patchbay created the NetworkAttachmentDefinition, labelled the nodes, and set up a bridge on each:"
    );
    tour.kubectl("get net-attach-def")?;
    tour.kubectl("get nodes -L network.patchbay.dev/blue")?;
    tour.exec("node-1", "ip -br link show master br-blue")?;

    println!("Start two pods, one on each node. This network has no IPAM, so each pod sets its own address:");
    for (name, node, address) in [("client", "node-1", "10.1.0.1/24"), ("server", "node-2", "10.1.0.2/24")] {
        let script = format!("ip addr add {address} dev net1 && exec tool pause");
        let pod = e2e::bridge::attached_pod(name, node, "blue").command(&["sh", "-c", &script]).object();
        tour.create_pod(name, node, "blue", &pod.to_string())?;
    }
    tour.kubectl("wait pod/client pod/server --for=condition=Ready --timeout=60s")?;
    tour.kubectl("exec client -- ip -br addr")?;
    tour.kubectl("exec client -- ping -c 3 -i 0.3 10.1.0.2")?;

    println!("Delete the bridge while a pod uses it. The daemon creates it again and reattaches the pod:");
    tour.exec("node-1", "ip link del br-blue")?;
    let start = Instant::now();
    runtime.block_on(wait::until(Duration::from_secs(3), "client to reach server again", || async {
        lab.kubectl(&["exec", "client", "--", "ping", "-c", "1", "-W", "1", "10.1.0.2"]).map(Some)
    }))?;
    println!("repaired; client reaches server again after {} ms\n", start.elapsed().as_millis());

    println!("Delete the network while pods use it. The controller waits until the last pod is deleted:");
    tour.kubectl("delete bnet blue --wait=false")?;
    let in_use = r#"jsonpath={.status.conditions[?(@.type=="InUse")].message}"#;
    runtime.block_on(wait::until(Duration::from_secs(5), "the InUse condition", || async {
        Ok((!lab.kubectl(&["get", "bnet", "blue", "-o", in_use])?.is_empty()).then_some(()))
    }))?;
    tour.kubectl(&format!("get bnet blue -o {in_use}"))?;
    tour.kubectl("exec client -- ping -c 1 10.1.0.2")?;
    tour.kubectl("delete pod client server --now")?;
    let elapsed = runtime.block_on(e2e::bridge::wait_deleted(&client, "blue"))?;
    println!(
        "The network was deleted {} ms after its last pod. No bridge is left on the node:",
        elapsed.as_millis()
    );
    tour.exec("node-1", "ip -br link show type bridge")
}

/// IPAM: addresses on both nodes, down to the last free one, and the event when none is left.
fn ip_addresses(tour: &Tour, runtime: &tokio::runtime::Runtime) -> Result<()> {
    chapter("Assign addresses: IPAM");
    let lab = &tour.lab;
    // An earlier tour on the same lab may have left its objects.
    let pods = ["client", "server", "db-0", "db-1", "db-2"];
    let _ = lab.kubectl(&[&["delete", "pod", "--now", "--ignore-not-found"], &pods[..]].concat());
    let _ = lab.kubectl(&["delete", "bnet", "green", "tiny", "--ignore-not-found", "--timeout=30s"]);
    let _ = lab.kubectl(&["delete", "events", "--field-selector", "reason=AddressesExhausted"]);
    let client = runtime.block_on(lab.client())?;
    println!("Create a network with IPv4 and IPv6 subnets. Pods get their addresses from Patchbay:\n");
    print!("{}", fs::read_to_string(e2e::repository().join("docs/examples/green.yaml"))?);
    tour.kubectl("apply -f docs/examples/green.yaml")?;
    runtime.block_on(e2e::bridge::wait_ready(&client, "green"))?;
    for (name, node) in [("client", "node-1"), ("server", "node-2")] {
        tour.attach(name, node, "green")?;
    }
    tour.kubectl("wait pod/client pod/server --for=condition=Ready --timeout=60s")?;
    tour.kubectl("exec client -- ip -br addr show net1")?;
    for address in tour.addresses("server")? {
        tour.kubectl(&format!("exec client -- ping -c 2 -i 0.3 {address}"))?;
    }
    println!(
        "Each node holds its own blocks of addresses and allocates from them without a request to the API server:"
    );
    tour.kubectl("get ipblocks")?;

    println!(
        "Create a network with only two addresses, and start three pods. A node without a free address borrows"
    );
    println!("one from the other node; the third pod gets an event that explains why it does not start:");
    let tiny = r#"{"apiVersion":"patchbay.dev/v1alpha1","kind":"BridgeNetwork","metadata":{"name":"tiny"},"spec":{"attachment":{"namespaces":["default"]},"ipam":{"subnets":["10.21.0.0/30"]}}}"#;
    println!("$ echo '{tiny}' | kubectl create -f -");
    tour.create(tiny)?;
    runtime.block_on(e2e::bridge::wait_ready(&client, "tiny"))?;
    for (name, node) in [("db-0", "node-1"), ("db-1", "node-2")] {
        tour.attach(name, node, "tiny")?;
    }
    tour.kubectl("wait pod/db-0 pod/db-1 --for=condition=Ready --timeout=60s")?;
    tour.attach("db-2", "node-1", "tiny")?;
    let events = "get events --field-selector reason=AddressesExhausted -o jsonpath={.items[*].message}";
    let arguments: Vec<&str> = events.split(' ').collect();
    runtime.block_on(wait::until(Duration::from_secs(20), "an AddressesExhausted event", || async {
        Ok((!lab.kubectl(&arguments)?.is_empty()).then_some(()))
    }))?;
    tour.kubectl("get ipblocks -l patchbay.dev/network=tiny")?;
    tour.kubectl(events)?;
    tour.kubectl("get pod db-0 db-1 db-2")?;

    println!("Delete the pods and the networks. The blocks are deleted with their networks:");
    tour.kubectl(&format!("delete pod {} --now", pods.join(" ")))?;
    tour.kubectl("delete bnet green tiny --timeout=30s")?;
    tour.kubectl("get ipblocks -o name")
}

/// Hot-plug: an interface for running pods, with the command line and with an annotation.
fn hot_plug(tour: &Tour, runtime: &tokio::runtime::Runtime) -> Result<()> {
    chapter("Plug a network into running pods: hot-plug");
    let lab = &tour.lab;
    // An earlier tour on the same lab may have left its objects.
    let _ = lab.kubectl(&["delete", "pod", "web", "db", "--now", "--ignore-not-found"]);
    let _ = lab.kubectl(&["delete", "bnet", "green", "--ignore-not-found", "--timeout=30s"]);
    let client = runtime.block_on(lab.client())?;
    println!("Start two pods without additional networks, and create a network afterwards:");
    for (name, node) in [("web", "node-1"), ("db", "node-2")] {
        println!("$ kubectl create -f {name}.json      # on {node}");
        tour.create(&pod(name).on(node).object().to_string())?;
    }
    tour.kubectl("wait pod/web pod/db --for=condition=Ready --timeout=60s")?;
    tour.kubectl("apply -f docs/examples/green.yaml")?;
    runtime.block_on(e2e::bridge::wait_ready(&client, "green"))?;
    tour.kubectl("exec web -- ip -br addr")?;

    println!("Plug the network into the running pod web, with the command line as a plugin of kubectl:");
    tour.kubectl("patchbay plug web --network green")?;
    println!("The command line edits an annotation, which you can also do yourself, here for db:");
    tour.kubectl("annotate pod db k8s.v1.cni.cncf.io/networks=green")?;
    let start = Instant::now();
    runtime.block_on(wait::until(Duration::from_secs(10), "net1 in network-status of db", || async {
        Ok(tour.addresses("db").ok().filter(|addresses| !addresses.is_empty()))
    }))?;
    println!("network-status of db lists net1 after {} ms\n", start.elapsed().as_millis());
    tour.kubectl("exec web -- ip -br addr show net1")?;
    for address in tour.addresses("db")? {
        tour.kubectl(&format!("exec web -- ping -c 2 -i 0.3 {address}"))?;
    }
    println!("The daemon reports what it attached, or why it cannot:");
    tour.kubectl(r"get pod web -o jsonpath={.metadata.annotations.patchbay\.dev/attachments} | (pretty)")?;
    tour.kubectl("get events --field-selector involvedObject.name=web,reason=AddedInterface")?;

    println!("Unplug the interface. The pod goes on running, and its addresses are free again:");
    tour.kubectl("patchbay unplug web --interface net1")?;
    tour.kubectl("exec web -- ip -br addr")?;
    tour.kubectl("get pod web")?;
    tour.kubectl("delete pod web db --now")?;
    tour.kubectl("delete bnet green --timeout=30s")
}

/// A directory with the command line under the name that makes it a plugin of kubectl.
fn kubectl_plugins() -> Result<PathBuf> {
    let dir = e2e::repository().join("target/demo");
    let link = dir.join("kubectl-patchbay");
    fs::create_dir_all(&dir).with_context(|| format!("create directory {}", dir.display()))?;
    let _ = fs::remove_file(&link);
    symlink(image::program(), &link).with_context(|| format!("create link {}", link.display()))?;
    Ok(dir)
}

/// How long a webhook may be unreachable.
const WEBHOOK_TIMEOUT: Duration = Duration::from_secs(30);

/// Whether kubectl failed because no controller answered the API server: none listens at the address that it called, the
/// machine is overloaded, or the controller asks to retry.
fn is_unreachable_webhook(stderr: &str) -> bool {
    let unreachable = [
        "connection refused",
        "no endpoints available",
        "context deadline exceeded",
        "EOF",
        "connection reset",
        "; retry",
    ];
    stderr.contains("failed calling webhook") && unreachable.iter().any(|cause| stderr.contains(cause))
}

const NAMES: &str = "jsonpath={.status.interfaces[*].name}";

fn chapter(title: &str) {
    println!("\n=== {title}\n");
}

struct Tour {
    lab: Lab,
    /// The directory of kubectl's plugins.
    plugins: PathBuf,
}

impl Tour {
    fn kubectl_command(&self) -> Result<Command> {
        let mut command = Command::new(Programs::prepare()?.path("kubectl")?);
        command.env("KUBECONFIG", self.lab.kubeconfig()).current_dir(e2e::repository());
        let path = std::env::var_os("PATH").unwrap_or_default();
        let dirs = std::iter::once(self.plugins.clone()).chain(std::env::split_paths(&path));
        command.env("PATH", std::env::join_paths(dirs).context("extend PATH")?);
        Ok(command)
    }

    /// Runs kubectl with this input. Repeats the command while no controller answers a webhook, as a user would: the one that
    /// the API server calls is just being replaced.
    #[allow(clippy::disallowed_methods, reason = "a pause between commands with a deadline")]
    fn run(&self, arguments: &[&str], input: &str) -> Result<Output> {
        let start = Instant::now();
        loop {
            let mut command = self.kubectl_command()?;
            command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
            let mut child = command.spawn().context("run kubectl")?;
            // A command that does not read its input closes it.
            let _ = child.stdin.take().context("kubectl has no stdin")?.write_all(input.as_bytes());
            let output = child.wait_with_output().context("wait for kubectl")?;
            let unreachable = is_unreachable_webhook(&String::from_utf8_lossy(&output.stderr));
            if output.status.success() || !unreachable || start.elapsed() > WEBHOOK_TIMEOUT {
                return Ok(output);
            }
            print_progress("the webhook is being replaced; trying again …");
            thread::sleep(Duration::from_secs(1));
        }
    }

    /// Runs kubectl and prints the command and its output. A trailing `| (pretty)` indents JSON output.
    fn kubectl(&self, line: &str) -> Result<()> {
        let (line, pretty) = line.strip_suffix(" | (pretty)").map_or((line, false), |line| (line, true));
        println!("$ kubectl {line}");
        if line.contains("rollout") || line.starts_with("patchbay ") {
            // Takes a while; the command prints its progress.
            run_command(self.kubectl_command()?.args(line.split(' ')))?;
            println!();
            return Ok(());
        }
        let output = self.run(&line.split(' ').collect::<Vec<_>>(), "")?;
        if !output.status.success() {
            bail!("kubectl {line}: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        let text = if pretty {
            serde_json::to_string_pretty(&serde_json::from_slice::<serde_json::Value>(&output.stdout)?)?
        } else {
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        println!("{}\n", text.trim_end());
        Ok(())
    }

    /// Runs a kubectl command that Patchbay's admission webhook must reject, and prints the rejection.
    fn expect_rejected(&self, line: &str, input: &str) -> Result<()> {
        println!("$ echo '{input}' | kubectl {line}");
        let output = self.run(&line.split(' ').collect::<Vec<_>>(), input)?;
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.success() || !stderr.contains("the Patchbay daemon creates the NodeNetwork") {
            bail!("kubectl {line}: expected a rejection by the admission webhook, got: {stderr}");
        }
        println!("{}\n", stderr.trim());
        Ok(())
    }

    /// Creates an object without printing it.
    fn create(&self, object: &str) -> Result<()> {
        let output = self.run(&["create", "-f", "-"], object)?;
        if !output.status.success() {
            bail!("kubectl create: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        println!("{}", String::from_utf8_lossy(&output.stdout).trim_end());
        Ok(())
    }

    /// Creates a pod that is attached to a network.
    fn attach(&self, name: &str, node: &str, network: &str) -> Result<()> {
        let pod = pod(name).on(node).annotation("k8s.v1.cni.cncf.io/networks", network).object();
        self.create_pod(name, node, network, &pod.to_string())
    }

    /// Creates a pod; prints its node and annotation instead of the whole object.
    fn create_pod(&self, name: &str, node: &str, network: &str, object: &str) -> Result<()> {
        println!(
            "$ kubectl create -f {name}.json      # on {node}, annotation k8s.v1.cni.cncf.io/networks: {network}"
        );
        self.create(object)
    }

    /// The addresses of a pod's `net1`, from its network-status annotation.
    fn addresses(&self, name: &str) -> Result<Vec<String>> {
        let status = r"jsonpath={.metadata.annotations.k8s\.v1\.cni\.cncf\.io/network-status}";
        let text = self.lab.kubectl(&["get", "pod", name, "-o", status])?;
        let all: Vec<serde_json::Value> =
            serde_json::from_str(&text).context("parse the network-status annotation")?;
        let net1 = all.iter().filter(|status| status["interface"] == "net1");
        let ips = net1.flat_map(|status| status["ips"].as_array().into_iter().flatten());
        Ok(ips.filter_map(serde_json::Value::as_str).map(str::to_owned).collect())
    }

    /// Runs a command on a node and prints the command and its output.
    fn exec(&self, node: &str, line: &str) -> Result<()> {
        println!("$ lab exec {node} -- {line}");
        let text = self.lab.node(node).output(&line.split(' ').collect::<Vec<_>>())?;
        println!("{}\n", text.trim_end());
        Ok(())
    }

    fn print_next_steps(&self) {
        println!(
            "\n=== Try it yourself: the lab is still running\n\n\
             export KUBECONFIG={}\n\
             kubectl get nodenetworks                    with any kubectl, or `target/debug/lab kubectl …`\n\
             target/debug/lab exec node-1 -- ip addr     run a command on a node\n\
             target/debug/lab status                     see also: logs, kill, reboot, partition, add-node\n\
             make shell                                  open a shell on node-1\n\
             make down                                   stop and delete the lab",
            self.lab.kubeconfig().display(),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_webhook_that_does_not_answer_is_called_again() {
        let failed = "Internal error occurred: failed calling webhook \"bridgenetworks.patchbay.dev\": failed to call webhook: ";
        let post = "Post \"https://patchbay-webhook.patchbay-system.svc:443/validate\": ";
        for cause in [
            "dial tcp 10.0.0.9:443: connect: connection refused",
            "no endpoints available for service \"patchbay-webhook\"",
            "context deadline exceeded",
            "EOF",
            "read tcp 10.0.0.1:5->10.0.0.9:443: read: connection reset by peer",
            "an error on the server (\"too many concurrent requests; retry\") has prevented the request from succeeding",
        ] {
            assert!(is_unreachable_webhook(&format!("{failed}{post}{cause}")), "{cause}");
        }
        for text in
            ["The connection to the server was refused: connection refused", "admission webhook \"x\" denied"]
        {
            assert!(!is_unreachable_webhook(text), "{text}");
        }
    }
}
