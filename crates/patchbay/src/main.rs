//! The one program: the controller, the node daemon and the command line.

mod cli;
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
    match cli.run() {
        Ok(()) => return ExitCode::SUCCESS,
        Err(error) if logs => tracing::error!(error = format!("{error:#}"), "stopped"),
        // With nowhere left to write to, the exit code alone must do.
        Err(error) => drop(writeln!(io::stderr(), "patchbay: {error:#}")),
    }
    ExitCode::FAILURE
}
