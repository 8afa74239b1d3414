//! `make test` and `make soak`: runs every stage and prints a summary.

use std::{fmt::Write as _, process::Command, thread, time::Instant};

use anyhow::{Result, bail};
use lab::print_progress;

use crate::{
    image, packages,
    step::{TestCount, cargo, run_command, run_tests},
};

/// How long the repeated and randomized tests run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TestLength {
    Short,
    Long,
}

struct StageResult {
    name: &'static str,
    passed: bool,
    count: Option<TestCount>,
    seconds: f64,
}

/// A group of tests: its name and the arguments of `cargo test`.
struct TestStage(&'static str, &'static [&'static str]);

/// The stages of a group run in parallel: they mostly wait, and each has its own lab.
const TEST_STAGES: &[&[TestStage]] = &[
    &[TestStage("unit", &["--workspace", "--lib", "--bins"])],
    &[TestStage("doc examples", &["--workspace", "--doc"])],
    &[TestStage("command line", &["-p", "patchbay", "--test", "*"])],
    &[TestStage("dependencies", &["-p", "e2e", "--test", "dependencies"])],
    &[TestStage("kernel", &["-p", "plan", "-p", "link", "-p", "node", "-p", "cni", "--test", "*"])],
    // Compares the state of the whole host, so nothing else may run meanwhile.
    &[TestStage("lab", &["-p", "e2e", "--test", "lab", "--", "--test-threads=1"])],
    &[TestStage("controller", &["-p", "e2e", "--test", "control_plane"])],
    &[
        TestStage("networks", &["-p", "e2e", "--test", "networks"]),
        TestStage("addresses", &["-p", "e2e", "--test", "addresses"]),
    ],
    &[TestStage("nodes", &["-p", "e2e", "--test", "nodes"])],
];

/// The stages that only `make soak` runs.
const SOAK_STAGES: &[&[TestStage]] = &[&[TestStage("upgrade", &["-p", "e2e", "--test", "upgrade"])]];

/// Runs all stages, also after a failed one.
pub fn run(length: TestLength) -> Result<()> {
    let mut results = packages::prepare_while(|| Ok(run_build_stages(length)))?;
    let soak_stages = if length == TestLength::Long { SOAK_STAGES } else { &[] };
    for group in TEST_STAGES.iter().chain(soak_stages) {
        results.extend(run_parallel(length, group)?);
    }
    print_summary(&results)
}

/// The stages that run no tests.
fn run_build_stages(length: TestLength) -> Vec<StageResult> {
    let mut results = Vec::new();
    let mut stage = |name: &'static str, action: &mut dyn FnMut() -> Result<()>| {
        print_progress(format!("stage {name}"));
        let start = Instant::now();
        let outcome = action();
        if let Err(e) = &outcome {
            print_progress(format!("{name}: {e:#}"));
        }
        let seconds = start.elapsed().as_secs_f64();
        results.push(StageResult { name, passed: outcome.is_ok(), count: None, seconds });
    };
    if length == TestLength::Short {
        stage("format", &mut || run_command(&mut cargo(&["fmt", "--all", "--check"])));
        let clippy = ["clippy", "--locked", "--workspace", "--all-targets", "--", "-D", "warnings"];
        stage("clippy", &mut || run_command(&mut cargo(&clippy)));
    }
    stage("build", &mut || run_command(&mut cargo(&["build", "--locked", "--workspace", "--all-targets"])));
    stage("image", &mut || image::build().map(|_| ()));
    results
}

impl TestStage {
    fn run(&self, length: TestLength, prefix: &str) -> Result<StageResult> {
        let Self(name, arguments) = *self;
        print_progress(format!("stage {name}"));
        let start = Instant::now();
        let mut command: Command = cargo(&["test", "--locked"]);
        command.args(arguments);
        if length == TestLength::Long {
            command.env("PATCHBAY_SOAK", "1");
        }
        let (passed, count) = run_tests(&mut command, prefix)?;
        Ok(StageResult { name, passed, count: Some(count), seconds: start.elapsed().as_secs_f64() })
    }
}

fn run_parallel(length: TestLength, stages: &[TestStage]) -> Result<Vec<StageResult>> {
    let prefix = |stage: &TestStage| if stages.len() > 1 { format!("{}: ", stage.0) } else { String::new() };
    thread::scope(|scope| {
        let start = |stage| scope.spawn(move || TestStage::run(stage, length, &prefix(stage)));
        let running: Vec<_> = stages.iter().map(start).collect();
        let join = |stage: thread::ScopedJoinHandle<'_, _>| {
            stage.join().unwrap_or_else(|_| bail!("the thread of a stage panicked"))
        };
        running.into_iter().map(join).collect()
    })
}

fn print_summary(results: &[StageResult]) -> Result<()> {
    let mut text = String::from("\nstage           result   passed  failed   time\n");
    let mut total = TestCount::default();
    for stage in results {
        let count = stage.count.unwrap_or_default();
        total.passed += count.passed;
        total.failed += count.failed;
        let (passed, failed) = match stage.count {
            Some(count) => (count.passed.to_string(), count.failed.to_string()),
            None => ("-".into(), "-".into()),
        };
        let result = if stage.passed { "ok" } else { "FAILED" };
        let _ = writeln!(
            text,
            "{:<15} {result:<8} {passed:>6}  {failed:>6}  {:>4.0} s",
            stage.name, stage.seconds
        );
    }
    println!("{text}\n{} passed, {} failed", total.passed, total.failed);
    let failed: Vec<&str> = results.iter().filter(|s| !s.passed).map(|s| s.name).collect();
    let empty: Vec<&str> = results
        .iter()
        .filter(|s| s.count.is_some_and(|c| c.passed + c.failed == 0))
        .map(|s| s.name)
        .collect();
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    if !empty.is_empty() {
        bail!("ran no test: {}", empty.join(", "));
    }
    Ok(())
}
