//! What `make` calls: set-up, tests, tour, image, numbers.
#![allow(clippy::print_stdout, reason = "a command line prints what it does")]

mod bench;
mod check;
mod demo;
mod image;
mod packages;
mod step;

use std::process::ExitCode;

use clap::Parser;

/// What to do.
#[derive(Parser)]
enum Stage {
    /// Install packages and build the lab's programs.
    Prepare,
    /// Everything that decides whether a change is good.
    Test,
    /// The same tests with long counts.
    Soak,
    /// The numbers, or a part of them.
    Bench { part: Option<bench::Part> },
    /// The product's image.
    Image,
    /// A walk through what Patchbay does.
    Demo,
    /// Calls a CNI plugin and prints how long each call took; started inside a node by `bench`.
    #[command(hide = true)]
    Plugin(bench::plugin::Calls),
}

fn main() -> ExitCode {
    let outcome = match Stage::parse() {
        Stage::Prepare => packages::prepare(),
        Stage::Test => check::run(check::Length::Short),
        Stage::Soak => check::run(check::Length::Long),
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
