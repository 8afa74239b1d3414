//! `make demo`: a walk through what Patchbay does. Every command is printed and its output is real.

use std::{
    io::Write as _,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use lab::{Lab, Shape, program::Programs, say, wait};

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
    say("starting two nodes …");
    runtime.block_on(lab.up(Shape::Nodes(2)))?;
    say(format!("ready after {:.1} s", begun.elapsed().as_secs_f64()));
    tour.kubectl("get nodes -o wide")?;

    chapter("Install Patchbay");
    say("loading the image into the nodes …");
    lab.load_image(&tar)?;
    tour.kubectl("apply -f deploy/install/")?;
    tour.kubectl("-n patchbay-system rollout status deployment/patchbay-controller --timeout=90s")?;
    tour.kubectl("-n patchbay-system rollout status daemonset/patchbay-node --timeout=90s")?;
    tour.kubectl("-n patchbay-system get pods -o wide")?;

    nodes(&tour, &runtime)?;
    tour.end();
    Ok(())
}

/// What the nodes have, told by their daemons.
fn nodes(tour: &Tour, runtime: &tokio::runtime::Runtime) -> Result<()> {
    chapter("What the nodes have: NodeNetwork");
    runtime.block_on(e2e::patchbay::ready(&tour.lab))?;
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
