//! The command line: what can be asked of the program, and who answers.

use std::{
    fs,
    future::Future,
    io::{self, Write},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context;
use clap::{Parser, Subcommand};
use kube::Client;
use tokio::runtime::Builder;
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::{
    install, lifecycle,
    log::{self, Logged},
    version,
};

/// Worker threads of a program. It mostly waits; a thread per core of a large host would be a waste.
const WORKERS: usize = 2;
/// How long work on threads of its own may take to end when a program is done. A thread that waits for the kernel cannot
/// be ended at all, and must not keep the program from going.
const LAST: Duration = Duration::from_secs(1);

/// Patchbay plugs networks into Kubernetes pods and virtual machines.
#[derive(Debug, Parser)]
#[command(name = "patchbay", version = version::VERSION)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the cluster side: cluster-wide loops and the admission webhook.
    Controller(Logged<controller::Args>),
    /// Run the node side, for the node it runs on.
    Node(Logged<node::Args>),
    /// Ask the node daemon on this node how it is; fails when the answer is not good.
    Probe(node::ProbeArgs),
    /// Print the kinds of Patchbay as CustomResourceDefinitions.
    Crds,
    /// Print the manifests that install Patchbay, for `kubectl apply -f -`.
    Install(Install),
    /// Print version, commit and compiler.
    Version,
}

#[derive(Debug, clap::Args)]
struct Install {
    /// Write the files into this directory instead of printing them.
    #[arg(long)]
    dir: Option<PathBuf>,

    #[command(flatten)]
    options: install::Options,
}

impl Cli {
    /// Whether this is a program that logs, rather than a command that talks to a person.
    pub fn logs(&self) -> bool {
        match self.command {
            Command::Controller(_) | Command::Node(_) => true,
            Command::Probe(_) | Command::Crds | Command::Install(_) | Command::Version => false,
        }
    }

    /// Does what was asked.
    pub fn run(self) -> anyhow::Result<()> {
        // Fails only when a provider is there already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        match self.command {
            Command::Controller(Logged { log, args }) => {
                program("controller", &log, |client, stop| controller::run(client, args, stop))
            }
            Command::Node(Logged { log, args }) => {
                program("node", &log, |client, stop| node::run(client, args, stop))
            }
            Command::Probe(node::ProbeArgs { question, run_dir }) => {
                let answer = finish(Builder::new_current_thread(), node::probe(&run_dir, question))?;
                print(&answer?)
            }
            Command::Crds => print(&install::crds()),
            Command::Install(Install { dir: Some(dir), options }) => write(&dir, &options),
            Command::Install(Install { dir: None, options }) => {
                print(&install::files(&options).map(|file| file.text).join("---\n"))
            }
            Command::Version => print(&version::text()),
        }
    }
}

/// Runs one of the two programs until it ends.
fn program<P, E>(
    name: &str,
    log: &str,
    run: impl FnOnce(Client, CancellationToken) -> P,
) -> anyhow::Result<()>
where
    P: Future<Output = Result<(), E>>,
    anyhow::Error: From<E>,
{
    log::start(log);
    info!(program = name, version = version::VERSION, commit = version::COMMIT, "this is patchbay");
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(WORKERS);
    finish(builder, lifecycle::run(name, run))?
}

/// Does this on a runtime of its own, and waits for nothing else that is left there.
fn finish<T>(mut builder: Builder, work: impl Future<Output = T>) -> anyhow::Result<T> {
    let runtime = builder.enable_all().build().context("start the runtime")?;
    let done = runtime.block_on(work);
    runtime.shutdown_timeout(LAST);
    Ok(done)
}

fn write(dir: &Path, options: &install::Options) -> anyhow::Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("make the directory {}", dir.display()))?;
    for file in install::files(options) {
        let path = dir.join(file.name);
        fs::write(&path, file.text).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}

/// A reader that has seen enough, such as `head`, is not an error.
fn print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error).context("write to stdout"),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, time::Instant};

    use super::*;

    #[test]
    fn a_thread_that_never_ends_keeps_no_program_from_ending() {
        let (_never, wait) = mpsc::channel::<()>();
        let work = async {
            tokio::task::spawn_blocking(move || wait.recv());
            "done"
        };
        let start = Instant::now();
        assert_eq!(finish(Builder::new_multi_thread(), work).unwrap(), "done");
        assert!(start.elapsed() < 5 * LAST);
    }
}
