//! The program behind the Makefile: set-up, tests, tour, image, benchmarks.
#![allow(clippy::print_stdout, reason = "a command line tool prints its results")]

mod bench;
mod check;
mod demo;
mod image;
mod packages;
mod step;
mod test_program;

use std::process::ExitCode;

use clap::Parser;

/// Builds, tests and measures Patchbay.
#[derive(Parser)]
enum Stage {
    /// Install Debian packages and build the third-party programs of the lab.
    Prepare,
    /// Run all checks and tests.
    Test,
    /// Run the long variants of the tests.
    Soak,
    /// Measure everything, or one part.
    Bench { part: Option<bench::BenchPart> },
    /// Build the image.
    Image,
    /// Run the guided tour on a two-node lab.
    Demo,
    /// Call a CNI plugin and print the duration of each call; `bench` runs this inside a node.
    #[command(hide = true)]
    Plugin(bench::plugin::PluginCalls),
}

fn main() -> ExitCode {
    let outcome = match Stage::parse() {
        Stage::Prepare => packages::prepare(),
        Stage::Test => check::run(check::TestLength::Short),
        Stage::Soak => check::run(check::TestLength::Long),
        Stage::Bench { part } => bench::run(part),
        Stage::Image => image::build().map(|_| ()),
        Stage::Demo => demo::run(),
        Stage::Plugin(calls) => bench::plugin::run(&calls),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            lab::print_progress(format!("{e:#}"));
            ExitCode::FAILURE
        }
    }
}
