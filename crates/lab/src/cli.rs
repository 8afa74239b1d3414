//! The command line of `lab`.
#![allow(clippy::print_stdout, reason = "a command line tool prints its results")]

use std::{
    io::Write as _,
    net::SocketAddr,
    os::unix::process::{CommandExt as _, ExitStatusExt as _},
    path::PathBuf,
    process::{Command, ExitCode},
    time::Instant,
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Parser, Subcommand};
use lab::{
    Lab, LabName, Multus, NodeOptions, Runtime, forward, image,
    kubevirt::VirtHandler,
    machine, print_progress,
    program::{ProgramSet, Programs},
};

/// A real Kubernetes cluster on this machine, without Docker; `down` removes all of it.
#[derive(Parser)]
#[command(name = "lab")]
struct Cli {
    /// The lab to use; several can run at the same time.
    #[arg(long, global = true, env = "LAB_NAME", default_value = "default")]
    name: LabName,
    #[command(subcommand)]
    command: LabCommand,
}

#[derive(Subcommand)]
enum LabCommand {
    /// Start the lab, or restart the parts that are dead or paused.
    Up {
        /// The minimum number of nodes.
        #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=200))]
        nodes: u8,
        /// Start no nodes, only the control plane.
        #[arg(long, conflicts_with_all = ["crio", "thin_multus", "no_multus"])]
        control_plane_only: bool,
        /// Run CRI-O instead of containerd on this node, such as `node-2`. Can be repeated.
        #[arg(long, value_name = "NODE")]
        crio: Vec<String>,
        /// Run multus without its daemon on this node. Can be repeated.
        #[arg(long, value_name = "NODE")]
        thin_multus: Vec<String>,
        /// Run no multus on this node. Can be repeated.
        #[arg(long, value_name = "NODE")]
        no_multus: Vec<String>,
        /// Run KubeVirt's virt-controller. Later starts of the lab include it.
        #[arg(long)]
        kubevirt: bool,
    },
    /// Stand in for KubeVirt's virt-handlers until interrupted: virtual machines run, stop and migrate.
    VirtHandler,
    /// Stop the lab and delete everything that belongs to it.
    Down {
        /// Delete all labs, not only the named one.
        #[arg(long)]
        all: bool,
    },
    /// Show the state of all components; exit with 1 unless all are running.
    Status,
    /// Print the path of the administrator's kubeconfig.
    Kubeconfig,
    /// Run the cluster's version of kubectl.
    Kubectl {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Run a command inside a node or the control plane.
    Exec {
        /// The name of a node, or `control-plane`.
        machine: String,
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// Print the log of a component.
    Logs {
        component: String,
        /// Keep printing as the log grows.
        #[arg(short, long)]
        follow: bool,
    },
    /// Stop a component and start it again.
    Restart { component: String },
    /// Kill a component with SIGKILL; it stays dead until `restart` or `up`.
    Kill { component: String },
    /// Pause a component with SIGSTOP.
    Pause { component: String },
    /// Continue a paused component.
    Resume { component: String },
    /// Power-cycle a node.
    Reboot { node: String },
    /// Add a node.
    AddNode {
        /// Run CRI-O instead of containerd.
        #[arg(long)]
        crio: bool,
        /// Run multus without its daemon.
        #[arg(long)]
        thin_multus: bool,
        /// Run no multus.
        #[arg(long, conflicts_with = "thin_multus")]
        no_multus: bool,
    },
    /// Remove a node and its disk.
    RemoveNode { node: String },
    /// Disconnect a node from the network.
    Partition { node: String },
    /// Reconnect a partitioned node.
    Heal { node: String },
    /// Load an image archive into all nodes.
    LoadImage { tar: PathBuf },
    /// Build the third-party programs of the lab.
    Prepare,
    #[command(hide = true)]
    Enter {
        cgroup: String,
        init: i32,
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    #[command(hide = true)]
    Machine { cgroup: String, file: PathBuf },
    #[command(hide = true)]
    Init { file: PathBuf },
    #[command(hide = true)]
    Forward { cgroup: String, netns: PathBuf, target: SocketAddr, port_file: PathBuf, port: u16 },
}

pub fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(code) => code,
        Err(e) => {
            print_progress(format!("{e:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<ExitCode> {
    let lab = Lab::new(cli.name);
    match cli.command {
        // These change namespaces and must run before any thread exists.
        LabCommand::Machine { cgroup, file } => machine::run_machine(&cgroup, &file)?,
        LabCommand::Enter { cgroup, init, command } => machine::run_enter(&cgroup, init, &command)?,
        LabCommand::Init { file } => machine::run_init(&file)?,
        LabCommand::Forward { cgroup, netns, target, port_file, port } => {
            forward::run(&cgroup, &netns, target, &port_file, port)?;
        }
        LabCommand::Up { nodes, control_plane_only, crio, thin_multus, no_multus, kubevirt } => {
            let nodes = if control_plane_only { 0 } else { nodes };
            let options = options_of_nodes(nodes, &crio, &thin_multus, &no_multus)?;
            timed("up", async {
                if kubevirt { lab.up_with_kubevirt(&options).await } else { lab.up_with(&options).await }
            })?;
        }
        LabCommand::VirtHandler => run_virt_handler(&lab)?,
        LabCommand::Down { all } => {
            let labs =
                if all { lab::paths::existing_labs().into_iter().map(Lab::new).collect() } else { vec![lab] };
            // A failure to remove one lab must not prevent the removal of the others.
            let failed: Vec<String> =
                labs.iter().filter_map(|lab| lab.down().err().map(|e| format!("{e:#}"))).collect();
            ensure!(failed.is_empty(), "{}", failed.join("; "));
        }
        LabCommand::Status => {
            let status = lab.status();
            print(&status.to_string())?;
            return Ok(if status.is_healthy() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        LabCommand::Kubeconfig => print(&format!("{}\n", lab.kubeconfig().display()))?,
        LabCommand::Kubectl { arguments } => {
            let failed = Command::new(Programs::prepare()?.path("kubectl")?)
                .args(arguments)
                .env("KUBECONFIG", lab.kubeconfig())
                .exec();
            return Err(failed).context("run kubectl");
        }
        LabCommand::Exec { machine, command } => return exec(&lab, &machine, &command),
        LabCommand::Logs { component, follow } => {
            let target = lab.component(&component)?;
            let log = target.machine.log(&target.component.name);
            let mut command = Command::new("tail");
            command.args(["-n", "+1"]);
            if follow {
                command.arg("-F");
            }
            return Err(command.arg(log).exec()).context("run tail");
        }
        LabCommand::Restart { component } => lab.restart(&component)?,
        LabCommand::Kill { component } => lab.kill(&component)?,
        LabCommand::Pause { component } => lab.pause(&component)?,
        LabCommand::Resume { component } => lab.resume(&component)?,
        LabCommand::Reboot { node } => timed("reboot", async { lab.reboot(&node).await })?,
        LabCommand::AddNode { crio, thin_multus, no_multus } => {
            let options = node_options(crio, thin_multus, no_multus);
            let name = timed("add-node", async { lab.add_node_with(options).await })?;
            print(&format!("{name}\n"))?;
        }
        LabCommand::RemoveNode { node } => timed("remove-node", async { lab.remove_node(&node).await })?,
        LabCommand::Partition { node } => lab.partition(&node)?,
        LabCommand::Heal { node } => lab.heal(&node)?,
        LabCommand::LoadImage { tar } => lab.load_image(&tar)?,
        LabCommand::Prepare => {
            image::lab_image(&Programs::prepare_set(ProgramSet::WithKubeVirt)?).map(|_| ())?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The options of `node-1` to `node-NODES`.
fn options_of_nodes(
    nodes: u8,
    crio: &[String],
    thin_multus: &[String],
    no_multus: &[String],
) -> Result<Vec<NodeOptions>> {
    let names: Vec<String> = (1..=nodes).map(|number| format!("node-{number}")).collect();
    for name in crio.iter().chain(thin_multus).chain(no_multus) {
        ensure!(names.contains(name), "no node {name}; this lab would have {}", names.join(", "));
    }
    if let Some(both) = thin_multus.iter().find(|name| no_multus.contains(name)) {
        bail!("{both}: use either --thin-multus or --no-multus");
    }
    let of = |name| node_options(crio.contains(name), thin_multus.contains(name), no_multus.contains(name));
    Ok(names.iter().map(of).collect())
}

#[allow(clippy::fn_params_excessive_bools, reason = "these are flags of the command line")]
fn node_options(crio: bool, thin_multus: bool, no_multus: bool) -> NodeOptions {
    NodeOptions {
        runtime: if crio { Runtime::CriO } else { Runtime::Containerd },
        multus: match (thin_multus, no_multus) {
            (true, _) => Multus::Thin,
            (false, true) => Multus::None,
            (false, false) => Multus::Thick,
        },
    }
}

fn run_virt_handler(lab: &Lab) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let _handler = VirtHandler::start(lab, None).await?;
        print_progress("virt-handler: running; press Ctrl-C to end it");
        tokio::signal::ctrl_c().await.context("wait for Ctrl-C")
    })
}

/// Runs the future to completion and prints how long it took.
fn timed<T>(what: &str, work: impl Future<Output = Result<T>>) -> Result<T> {
    let start = Instant::now();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let out = runtime.block_on(work)?;
    print_progress(format!("{what}: done in {:.1} s", start.elapsed().as_secs_f64()));
    Ok(out)
}

fn exec(lab: &Lab, machine: &str, command: &[String]) -> Result<ExitCode> {
    let Some((program, arguments)) = command.split_first() else {
        return Ok(ExitCode::FAILURE);
    };
    let status = lab.machine(machine)?.command(program)?.args(arguments).status().context("run nsenter")?;
    let code = status.code().or_else(|| status.signal().map(|s| 128 + s)).unwrap_or(1);
    Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)))
}

fn print(text: &str) -> Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        // `lab status | head` closes the pipe early.
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => other.context("write to stdout"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_name_nodes_of_the_lab_and_do_not_contradict() {
        let names = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
        let options =
            options_of_nodes(3, &names(&["node-2"]), &names(&["node-2"]), &names(&["node-3"])).unwrap();
        let node = |runtime, multus| NodeOptions { runtime, multus };
        assert_eq!(
            options,
            [
                NodeOptions::default(),
                node(Runtime::CriO, Multus::Thin),
                node(Runtime::Containerd, Multus::None)
            ]
        );
        assert!(options_of_nodes(2, &names(&["node-3"]), &[], &[]).is_err());
        assert!(options_of_nodes(2, &[], &names(&["node-1"]), &names(&["node-1"])).is_err());
    }
}
