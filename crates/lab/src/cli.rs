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

use anyhow::{Context as _, Result, ensure};
use clap::{Parser, Subcommand};
use lab::{Lab, LabName, Topology, forward, image, machine, print_progress, program::Programs};

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
        #[arg(long)]
        control_plane_only: bool,
    },
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
    AddNode,
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
        LabCommand::Up { nodes, control_plane_only } => {
            let topology =
                if control_plane_only { Topology::ControlPlaneOnly } else { Topology::Nodes(nodes) };
            timed("up", async { lab.up(topology).await })?;
        }
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
        LabCommand::AddNode => {
            let name = timed("add-node", async { lab.add_node().await })?;
            print(&format!("{name}\n"))?;
        }
        LabCommand::RemoveNode { node } => timed("remove-node", async { lab.remove_node(&node).await })?,
        LabCommand::Partition { node } => lab.partition(&node)?,
        LabCommand::Heal { node } => lab.heal(&node)?,
        LabCommand::LoadImage { tar } => lab.load_image(&tar)?,
        LabCommand::Prepare => image::lab_image(&Programs::prepare()?).map(|_| ())?,
    }
    Ok(ExitCode::SUCCESS)
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
