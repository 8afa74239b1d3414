//! The patchbay binary: the controller, the node daemon and the command line.

mod clean;
mod cli;
mod cluster;
mod convert;
mod install;
mod lifecycle;
mod log;
mod plug;
mod terminal;
mod version;

use std::{
    io::{self, Write},
    process::ExitCode,
};

/// Exit codes: 0 success, 1 failure, 2 usage error (set by clap).
fn main() -> ExitCode {
    let cli = cli::Cli::from_arguments();
    let is_service = cli.is_service();
    let Err(error) = cli.run() else {
        return ExitCode::SUCCESS;
    };
    let error = api::ErrorChain(error.as_ref());
    if is_service {
        tracing::error!(%error, "patchbay failed");
    } else {
        // If stderr is closed, only the exit code reports the failure.
        let _ = writeln!(io::stderr(), "patchbay: {}", terminal::line(&error.to_string()));
    }
    ExitCode::FAILURE
}
