//! The command line of the lab.
#![allow(clippy::print_stdout, reason = "a command line prints what it was asked for")]

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
use lab::{Lab, Name, Topology, forward, image, machine, print_progress, program::Programs};

/// A real Kubernetes on this machine: no Docker, nothing left behind.
#[derive(Parser)]
#[command(name = "lab")]
struct Cli {
    /// Which lab; several can run at the same time.
    #[arg(long, global = true, env = "LAB_NAME", default_value = "default")]
    name: Name,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Start it, or repair what is missing.
    Up {
        /// How many nodes, at least.
        #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=200))]
        nodes: u8,
        /// No nodes: an API server and its controllers.
        #[arg(long)]
        control_plane_only: bool,
    },
    /// Take everything away.
    Down {
        /// All labs, not only the named one.
        #[arg(long)]
        all: bool,
    },
    /// Show what runs; exits with 1 unless all of it does.
    Status,
    /// Print the path of an administrator's kubeconfig.
    Kubeconfig,
    /// Run kubectl of the cluster's version against it.
    Kubectl {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Run a command inside a machine.
    Exec {
        /// A node, or control-plane.
        machine: String,
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// Print the log of a component.
    Logs {
        component: String,
        /// Go on as it grows.
        #[arg(short, long)]
        follow: bool,
    },
    /// End a component and start it anew.
    Restart { component: String },
    /// Kill a component; it stays dead until `restart` or `up`.
    Kill { component: String },
    /// Stop a component where it stands.
    Pause { component: String },
    /// Let a paused component go on.
    Resume { component: String },
    /// Power-cycle a node.
    Reboot { node: String },
    /// Add a node.
    AddNode,
    /// Take a node out for good.
    RemoveNode { node: String },
    /// Cut a node off from everything.
    Partition { node: String },
    /// Let a cut-off node back.
    Heal { node: String },
    /// Give an image to all nodes.
    LoadImage { tar: PathBuf },
    /// Build the programs that the lab is made of.
    Prepare,
    #[command(hide = true)]
    Enter {
        group: String,
        init: i32,
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    #[command(hide = true)]
    Machine { group: String, file: PathBuf },
    #[command(hide = true)]
    Init { file: PathBuf },
    #[command(hide = true)]
    Forward { group: String, network: PathBuf, target: SocketAddr, port_file: PathBuf, port: u16 },
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
    match cli.verb {
        // These must run before any thread exists.
        Verb::Machine { group, file } => machine::power_on(&group, &file)?,
        Verb::Enter { group, init, command } => machine::enter(&group, init, &command)?,
        Verb::Init { file } => machine::first_process(&file)?,
        Verb::Forward { group, network, target, port_file, port } => {
            forward::run(&group, &network, target, &port_file, port)?;
        }
        Verb::Up { nodes, control_plane_only } => {
            let shape = if control_plane_only { Topology::ControlPlaneOnly } else { Topology::Nodes(nodes) };
            timed("up", async { lab.up(shape).await })?;
        }
        Verb::Down { all } => {
            let labs = if all { lab::place::known().into_iter().map(Lab::new).collect() } else { vec![lab] };
            // One that resists is no reason to leave the others.
            let failed: Vec<String> =
                labs.iter().filter_map(|lab| lab.down().err().map(|e| format!("{e:#}"))).collect();
            ensure!(failed.is_empty(), "{}", failed.join("; "));
        }
        Verb::Status => {
            let status = lab.status();
            print(&status.to_string())?;
            return Ok(if status.is_healthy() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        Verb::Kubeconfig => print(&format!("{}\n", lab.kubeconfig().display()))?,
        Verb::Kubectl { arguments } => {
            let failed = Command::new(Programs::prepare()?.path("kubectl")?)
                .args(arguments)
                .env("KUBECONFIG", lab.kubeconfig())
                .exec();
            return Err(failed).context("run kubectl");
        }
        Verb::Exec { machine, command } => return exec(&lab, &machine, &command),
        Verb::Logs { component, follow } => {
            let target = lab.target(&component)?;
            let log = target.machine.log(&target.component.name);
            let mut command = Command::new("tail");
            command.args(["-n", "+1"]);
            if follow {
                command.arg("-F");
            }
            return Err(command.arg(log).exec()).context("run tail");
        }
        Verb::Restart { component } => lab.restart(&component)?,
        Verb::Kill { component } => lab.kill(&component)?,
        Verb::Pause { component } => lab.pause(&component)?,
        Verb::Resume { component } => lab.resume(&component)?,
        Verb::Reboot { node } => timed("reboot", async { lab.reboot(&node).await })?,
        Verb::AddNode => {
            let name = timed("add-node", async { lab.add_node().await })?;
            print(&format!("{name}\n"))?;
        }
        Verb::RemoveNode { node } => timed("remove-node", async { lab.remove_node(&node).await })?,
        Verb::Partition { node } => lab.partition(&node)?,
        Verb::Heal { node } => lab.heal(&node)?,
        Verb::LoadImage { tar } => lab.load_image(&tar)?,
        Verb::Prepare => image::lab_image(&Programs::prepare()?).map(|_| ())?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs to the end and says how long it took.
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
        // `lab status | head` is no failure.
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => other.context("write to the terminal"),
    }
}
