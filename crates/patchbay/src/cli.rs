//! The command line: subcommands, their flags, and their dispatch.

use std::{
    fs,
    future::Future,
    io::{self, Write},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context;
use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use kube::Client;
use tokio::runtime::Builder;
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::{
    clean::{self, CleanArgs},
    convert::{self, ConvertArgs},
    install, lifecycle,
    log::{self, ServiceArgs},
    plug::{self, PlugArgs, UnplugArgs},
    terminal, version,
};

/// Tokio worker threads of a service. It mostly waits; one thread per core of a large host would be wasted.
const WORKER_THREADS: usize = 2;
/// Threads for work that blocks. The stacks of more of them would stay in memory after many pods change at once.
const BLOCKING_THREADS: usize = 16;
/// How long blocking tasks may take to end after the service has ended. A thread that is blocked in the kernel cannot be
/// interrupted and must not keep the process alive.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);

/// Patchbay plugs networks into Kubernetes pods and virtual machines.
#[derive(Debug, Parser)]
#[command(name = "patchbay", version = version::VERSION)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the controller: cluster-wide reconcilers and the admission webhook.
    Controller(ServiceArgs<controller::Args>),
    /// Run the node daemon, for the node it runs on.
    Node(ServiceArgs<node::Args>),
    /// Query the node daemon on this node: liveness, readiness or metrics. Exits with 1 if the daemon is not ok.
    Probe(node::ProbeArgs),
    /// Drop the record of an attachment whose DEL fails for ever, on the node of this daemon, without DEL. Refuses one that is in
    /// use.
    Forget(node::ForgetArgs),
    /// Plug an interface into a running pod, and wait until it is attached. Exits with 1 if it is not.
    Plug(PlugArgs),
    /// Remove an interface from a running pod, and wait until it is gone. Exits with 1 if it is not.
    Unplug(UnplugArgs),
    /// Convert NetServices, and Services annotated for multus-service, to NetworkServices. Prints the new objects to stdout and
    /// what differs to stderr. Exits with 1 if an object could not be converted.
    Convert(ConvertArgs),
    /// List the EndpointSlices and Endpoints of a Service that Patchbay does not manage, and delete them with --yes. Or list
    /// the IPAMClaims with a finalizer that no controller removes after Patchbay is gone, and remove it with --yes.
    Clean(CleanArgs),
    /// Print the CustomResourceDefinitions of Patchbay.
    Crds,
    /// Print the manifests that install Patchbay, for `kubectl apply -f -`.
    Install(InstallArgs),
    /// Print version, commit and compiler.
    Version,
}

#[derive(Debug, clap::Args)]
struct InstallArgs {
    /// Write the files into this directory instead of printing them.
    #[arg(long)]
    dir: Option<PathBuf>,

    #[command(flatten)]
    options: install::InstallOptions,
}

impl Cli {
    /// Parses the arguments of the process. Exits if they are invalid.
    pub fn from_arguments() -> Self {
        let mut command = Self::command();
        if std::env::args_os().next().is_some_and(|program| is_kubectl_plugin(Path::new(&program))) {
            command = command.bin_name("kubectl patchbay");
        }
        Self::from_arg_matches(&command.get_matches()).unwrap_or_else(|error| error.exit())
    }

    /// Whether this is a long-running service, which reports errors in its log, rather than a one-shot command.
    pub fn is_service(&self) -> bool {
        match self.command {
            Command::Controller(_) | Command::Node(_) => true,
            Command::Probe(_)
            | Command::Forget(_)
            | Command::Plug(_)
            | Command::Unplug(_)
            | Command::Convert(_)
            | Command::Clean(_)
            | Command::Crds
            | Command::Install(_)
            | Command::Version => false,
        }
    }

    /// Runs the subcommand.
    pub fn run(self) -> anyhow::Result<()> {
        // Fails only if a provider is already installed.
        let _ = rustls::crypto::ring::default_provider().install_default();
        match self.command {
            Command::Controller(ServiceArgs { log, args }) => {
                run_service("controller", &log, |client, stop| controller::run(client, args, stop))
            }
            Command::Node(ServiceArgs { log, args }) => {
                run_service("node", &log, |client, stop| node::run(client, args, stop))
            }
            Command::Probe(node::ProbeArgs { probe, run_dir }) => {
                let answer = block_on(Builder::new_current_thread(), node::probe(&run_dir, probe))?;
                print(&answer?)
            }
            Command::Forget(node::ForgetArgs { pod, interface, run_dir }) => {
                let forget = async { node::forget(&run_dir, &pod, interface.as_str()).await };
                print(&block_on(Builder::new_current_thread(), forget)??)
            }
            Command::Plug(args) => block_on(Builder::new_current_thread(), plug::plug(args))?,
            Command::Unplug(args) => block_on(Builder::new_current_thread(), plug::unplug(args))?,
            Command::Convert(args) => convert::convert(args),
            Command::Clean(args) => block_on(Builder::new_current_thread(), clean::clean(args))?,
            Command::Crds => print(&install::crds()),
            Command::Install(InstallArgs { dir: Some(dir), options }) => write_files(&dir, &options),
            Command::Install(InstallArgs { dir: None, options }) => {
                print(&install::files(&options).map(|file| file.text).join("---\n"))
            }
            Command::Version => print(&version::text()),
        }
    }
}

/// Whether kubectl runs the program as its plugin: `kubectl patchbay` runs `kubectl-patchbay` from the PATH.
fn is_kubectl_plugin(program: &Path) -> bool {
    program.file_stem().is_some_and(|name| name == "kubectl-patchbay")
}

/// Runs the controller or the node daemon until it ends.
fn run_service<S, E>(
    name: &str,
    log: &str,
    run: impl FnOnce(Client, CancellationToken) -> S,
) -> anyhow::Result<()>
where
    S: Future<Output = Result<(), E>>,
    anyhow::Error: From<E>,
{
    log::init(log);
    info!(component = name, version = version::VERSION, commit = version::COMMIT, "starting patchbay");
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(WORKER_THREADS).max_blocking_threads(BLOCKING_THREADS);
    block_on(builder, lifecycle::run(name, run))?
}

/// Runs the future on a new runtime. Does not wait for other tasks of that runtime beyond the shutdown timeout.
fn block_on<T>(mut builder: Builder, future: impl Future<Output = T>) -> anyhow::Result<T> {
    let runtime = builder.enable_all().build().context("start the runtime")?;
    let output = runtime.block_on(future);
    runtime.shutdown_timeout(SHUTDOWN_TIMEOUT);
    Ok(output)
}

fn write_files(dir: &Path, options: &install::InstallOptions) -> anyhow::Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("create directory {}", dir.display()))?;
    for file in install::files(options) {
        let path = dir.join(file.name);
        fs::write(&path, file.text).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}

/// Prints to stdout, without control characters. A closed pipe, as with `head`, is not an error.
pub fn print(text: &str) -> anyhow::Result<()> {
    print_to(&mut io::stdout().lock(), text)
}

/// Prints one line to stdout.
pub fn print_line(line: &str) -> anyhow::Result<()> {
    print_line_to(&mut io::stdout().lock(), line)
}

fn print_line_to(out: &mut impl Write, line: &str) -> anyhow::Result<()> {
    print_to(out, &format!("{}\n", terminal::line(line)))
}

fn print_to(out: &mut impl Write, text: &str) -> anyhow::Result<()> {
    match out.write_all(terminal::text(text).as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error).context("write to stdout"),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, time::Instant};

    use super::*;

    #[test]
    fn printed_text_cannot_control_the_terminal_and_a_printed_line_is_one_line() {
        let (mut text, mut line) = (Vec::new(), Vec::new());
        print_to(&mut text, "a\u{1b}[2J\nb\n").unwrap();
        print_line_to(&mut line, "a\u{1b}[2J\nb").unwrap();
        assert_eq!(String::from_utf8(text).unwrap(), "a\\u{1b}[2J\nb\n");
        assert_eq!(String::from_utf8(line).unwrap(), "a\\u{1b}[2J\\nb\n");
    }

    #[test]
    fn a_blocked_thread_does_not_keep_the_process_alive() {
        let (_never, wait) = mpsc::channel::<()>();
        let work = async {
            tokio::task::spawn_blocking(move || wait.recv());
            "done"
        };
        let start = Instant::now();
        assert_eq!(block_on(Builder::new_multi_thread(), work).unwrap(), "done");
        assert!(start.elapsed() < 5 * SHUTDOWN_TIMEOUT);
    }
}
