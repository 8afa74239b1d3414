//! `make test` and `make soak`: every stage in turn, and a plain summary at the end.

use std::{fmt::Write as _, process::Command, thread, time::Instant};

use anyhow::{Result, bail};
use lab::print_progress;

use crate::{
    image, packages,
    step::{Count, cargo, show, tests},
};

/// How much of the repeated and random tests is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    Short,
    Long,
}

struct Line {
    name: &'static str,
    good: bool,
    count: Option<Count>,
    seconds: f64,
}

/// Some tests, by their name and what cargo is told.
struct Stage(&'static str, &'static [&'static str]);

/// Those of one group run at the same time: they mostly wait, and each has a lab of its own.
const STAGES: &[&[Stage]] = &[
    &[Stage("unit", &["--workspace", "--lib", "--bins"])],
    &[Stage("doc examples", &["--workspace", "--doc"])],
    &[Stage("command line", &["-p", "patchbay", "--test", "*"])],
    &[Stage("dependencies", &["-p", "e2e", "--test", "dependencies"])],
    &[Stage("kernel", &["-p", "link", "-p", "node", "-p", "cni", "--test", "*"])],
    // Looks at the whole machine: nobody else may start anything meanwhile.
    &[Stage("lab", &["-p", "e2e", "--test", "lab", "--", "--test-threads=1"])],
    &[Stage("controller", &["-p", "e2e", "--test", "control_plane"])],
    &[
        Stage("networks", &["-p", "e2e", "--test", "networks"]),
        Stage("addresses", &["-p", "e2e", "--test", "addresses"]),
    ],
    &[Stage("nodes", &["-p", "e2e", "--test", "nodes"])],
];

/// Runs all stages; a stage that fails does not hide the others.
pub fn run(length: Length) -> Result<()> {
    packages::prepare()?;
    let mut lines = Vec::new();
    let mut plain = |name: &'static str, work: &mut dyn FnMut() -> Result<()>| {
        print_progress(format!("stage {name}"));
        let start = Instant::now();
        let outcome = work();
        if let Err(e) = &outcome {
            print_progress(format!("{name}: {e:#}"));
        }
        lines.push(Line { name, good: outcome.is_ok(), count: None, seconds: start.elapsed().as_secs_f64() });
    };
    if length == Length::Short {
        plain("format", &mut || show(&mut cargo(&["fmt", "--all", "--check"])));
        plain("clippy", &mut || {
            show(&mut cargo(&["clippy", "--locked", "--workspace", "--all-targets", "--", "-D", "warnings"]))
        });
    }
    plain("build", &mut || show(&mut cargo(&["build", "--locked", "--workspace", "--all-targets"])));
    plain("image", &mut || image::build().map(|_| ()));

    for group in STAGES {
        lines.extend(side_by_side(length, group)?);
    }
    summary(&lines)
}

impl Stage {
    fn run(&self, length: Length, mark: &str) -> Result<Line> {
        let Self(name, arguments) = *self;
        print_progress(format!("stage {name}"));
        let start = Instant::now();
        let mut command: Command = cargo(&["test", "--locked"]);
        command.args(arguments);
        if length == Length::Long {
            command.env("PATCHBAY_SOAK", "1");
        }
        let (good, count) = tests(&mut command, mark)?;
        Ok(Line { name, good, count: Some(count), seconds: start.elapsed().as_secs_f64() })
    }
}

fn side_by_side(length: Length, stages: &[Stage]) -> Result<Vec<Line>> {
    let mark = |stage: &Stage| if stages.len() > 1 { format!("{}: ", stage.0) } else { String::new() };
    thread::scope(|scope| {
        let start = |stage| scope.spawn(move || Stage::run(stage, length, &mark(stage)));
        let running: Vec<_> = stages.iter().map(start).collect();
        let end =
            |one: thread::ScopedJoinHandle<'_, _>| one.join().unwrap_or_else(|_| bail!("a stage broke off"));
        running.into_iter().map(end).collect()
    })
}

fn summary(lines: &[Line]) -> Result<()> {
    let mut text = String::from("\nstage           result   passed  failed   time\n");
    let mut total = Count::default();
    for line in lines {
        let count = line.count.unwrap_or_default();
        total.passed += count.passed;
        total.failed += count.failed;
        let (passed, failed) = match line.count {
            Some(count) => (count.passed.to_string(), count.failed.to_string()),
            None => ("-".into(), "-".into()),
        };
        let result = if line.good { "ok" } else { "FAILED" };
        let _ =
            writeln!(text, "{:<15} {result:<8} {passed:>6}  {failed:>6}  {:>4.0} s", line.name, line.seconds);
    }
    println!("{text}\n{} passed, {} failed", total.passed, total.failed);
    let bad: Vec<&str> = lines.iter().filter(|l| !l.good).map(|l| l.name).collect();
    let empty: Vec<&str> =
        lines.iter().filter(|l| l.count.is_some_and(|c| c.passed + c.failed == 0)).map(|l| l.name).collect();
    if !bad.is_empty() {
        bail!("failed: {}", bad.join(", "));
    }
    if !empty.is_empty() {
        bail!("ran no test: {}", empty.join(", "));
    }
    Ok(())
}
