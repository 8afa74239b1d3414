//! The one program: the controller, the node daemon and the command line.

mod cli;
mod cluster;
mod install;
mod log;
mod version;

use std::{
    io::{self, Write},
    process::ExitCode,
};

use clap::Parser;

/// Exit codes: 0 done, 1 failed, 2 (by clap) called wrongly.
fn main() -> ExitCode {
    let cli = cli::Cli::parse();
    let logs = cli.logs();
    let Err(error) = cli.run() else {
        return ExitCode::SUCCESS;
    };
    let error = api::ErrorChain(error.as_ref());
    if logs {
        tracing::error!(%error, "stopped");
    } else {
        // With nowhere left to write to, the exit code alone must do.
        let _ = writeln!(io::stderr(), "patchbay: {error}");
    }
    ExitCode::FAILURE
}
