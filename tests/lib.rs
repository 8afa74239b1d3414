//! Support code for end-to-end tests. A suite brings one lab up, runs groups of tests in it, and takes it down.
#![allow(clippy::print_stdout, reason = "a test runner prints its results")]

use std::{
    any::Any,
    env,
    panic::AssertUnwindSafe,
    path::PathBuf,
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, bail};
use futures::{FutureExt as _, future::BoxFuture};
use lab::{Lab, Topology};

pub mod baseline;
pub mod bridge;
pub mod command_line;
pub mod dns;
pub mod fleet;
pub mod flood;
pub mod hotplug;
pub mod machine;
pub mod network_service;
pub mod patchbay;
pub mod quiet;
pub mod random;
pub mod replica;
pub mod status_watch;

/// A test: its name and its function.
pub type Test = (&'static str, fn(Lab) -> BoxFuture<'static, Result<()>>);

/// Tests that run in parallel: they use different objects, and none measures what another one disturbs.
pub type TestGroup = &'static [Test];

/// Lists async functions as tests under their own names. Functions joined by `+` run in parallel.
#[macro_export]
macro_rules! tests {
    ($($first:ident $(+ $parallel:ident)*),* $(,)?) => {
        &[$(&[
            (stringify!($first), |lab| Box::pin($first(lab))),
            $((stringify!($parallel), |lab| Box::pin($parallel(lab)))),*
        ]),*]
    };
}

/// Tests that share a lab.
pub struct Suite {
    /// The name of the suite and of its lab.
    pub name: &'static str,
    pub topology: Topology,
    /// Runs once, before the first test.
    pub set_up: fn(Lab) -> BoxFuture<'static, Result<()>>,
    pub tests: &'static [TestGroup],
}

/// A failed test.
struct TestFailure {
    name: &'static str,
    error: anyhow::Error,
    /// The components of the lab that were not running.
    exited: Vec<String>,
    /// The state of the lab when the test failed.
    lab: String,
}

/// The `main` of a test program without the standard harness; prints in the format of that harness. The suites run in
/// parallel, each on its own lab.
pub fn run_suites(suites: &[Suite]) -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    if arguments.iter().any(|a| a == "--list") {
        let tests = suites.iter().flat_map(|suite| suite.tests.iter().copied().flatten());
        tests.for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    let filters: Vec<&String> = arguments.iter().filter(|a| !a.starts_with('-')).collect();
    let passed = thread::scope(|scope| {
        let running: Vec<_> =
            suites.iter().map(|suite| scope.spawn(|| suite.run_selected(&filters))).collect();
        running.into_iter().all(|suite| suite.join().unwrap_or(false))
    });
    if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

impl Suite {
    /// Runs the tests whose name contains one of the filters; returns whether all of them passed.
    fn run_selected(&self, filters: &[&String]) -> bool {
        let total = self.tests.iter().map(|group| group.len()).sum::<usize>();
        let selected = |name: &str| filters.is_empty() || filters.iter().any(|f| name.contains(f.as_str()));
        let groups = self.tests.iter().map(|group| group.iter().filter(|(name, _)| selected(name)).collect());
        let groups: Vec<Vec<&Test>> = groups.collect();
        let count = groups.iter().map(Vec::len).sum::<usize>();
        println!("\nrunning {count} tests");
        if count == 0 {
            println!("\ntest result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; {total} filtered out");
            return true;
        }
        let start = Instant::now();
        let failures = match self.run_groups(&groups) {
            Ok(failures) => failures,
            Err(e) => {
                println!("test result: FAILED. 0 passed; {count} failed; set-up: {e:#}");
                return false;
            }
        };
        for TestFailure { name, error, exited, lab } in &failures {
            let exited = if exited.is_empty() {
                String::new()
            } else {
                format!("not running: {}; ", exited.join(", "))
            };
            println!("\n---- {name} stdout ----\nError: {exited}{}\n{error:?}\n{lab}", brief(error));
        }
        println!(
            "\ntest result: {}. {} passed; {} failed; 0 ignored; 0 measured; {} filtered out; finished in {:.2}s",
            if failures.is_empty() { "ok" } else { "FAILED" },
            count - failures.len(),
            failures.len(),
            total - count,
            start.elapsed().as_secs_f64(),
        );
        failures.is_empty()
    }

    fn run_groups(&self, groups: &[Vec<&Test>]) -> Result<Vec<TestFailure>> {
        let lab = Lab::new(self.name.parse()?);
        // An interrupted run may have left its lab. One without nodes starts in seconds, and its tests leave objects.
        if !keep_lab() || self.topology == Topology::ControlPlaneOnly {
            lab.down()?;
        }
        let start = Instant::now();
        let ready = block_on(async {
            lab.up(self.topology).await.context("bring the lab up")?;
            (self.set_up)(lab.clone()).await.context("set the suite up")
        });
        if let Err(e) = ready {
            self.take_down(&lab)?;
            return Err(e);
        }
        println!("lab {} set up in {:.1} s", self.name, start.elapsed().as_secs_f64());
        let mut failures = Vec::new();
        for group in groups {
            // Each test has its own thread and runtime, so that a blocking call delays no other test.
            let results: Vec<Option<TestFailure>> = thread::scope(|scope| {
                let running: Vec<_> = group.iter().map(|test| scope.spawn(|| run_test(&lab, test))).collect();
                let outcomes = running.into_iter().zip(group).map(|(thread, (name, _))| {
                    thread.join().unwrap_or_else(|panic| {
                        Some(TestFailure {
                            name,
                            error: panic_error(&*panic),
                            exited: Vec::new(),
                            lab: String::new(),
                        })
                    })
                });
                outcomes.collect()
            });
            if results.iter().any(Option::is_some) {
                // A failed test may leave nodes partitioned or components paused; repair the lab for the next tests.
                for node in lab.nodes() {
                    lab.heal(&node)?;
                }
                block_on(lab.up(self.topology))?;
            }
            failures.extend(results.into_iter().flatten());
        }
        self.take_down(&lab)?;
        Ok(failures)
    }

    /// Takes the lab down, unless it is to be kept.
    fn take_down(&self, lab: &Lab) -> Result<()> {
        if keep_lab() {
            println!("KEEP_LAB is set: lab {} stays up; `make down` removes it", self.name);
            return Ok(());
        }
        lab.down()
    }
}

/// Runs one test and prints its result.
fn run_test(lab: &Lab, (name, test): &Test) -> Option<TestFailure> {
    let start = Instant::now();
    let limit = Duration::from_secs(if soak() { 1800 } else { 240 });
    let outcome = block_on(async {
        let test = AssertUnwindSafe(test(lab.clone())).catch_unwind();
        tokio::select! {
            result = test => result.unwrap_or_else(|panic| Err(panic_error(&*panic))),
            () = lab::wait::expired(limit) => bail!("timeout after {limit:?} without stalls of the machine"),
        }
    });
    let seconds = start.elapsed().as_secs_f64();
    match outcome {
        Ok(()) => {
            println!("test {name} ... ok ({seconds:.1} s)");
            None
        }
        Err(error) => {
            println!("test {name} ... FAILED ({seconds:.1} s)");
            Some(TestFailure { name, error, exited: lab.exited_components(), lab: patchbay::dump(lab) })
        }
    }
}

/// The first line of each cause, the innermost first: the contexts of an error may be logs of many lines, and the summary of
/// the stages has the first lines only.
fn brief(error: &anyhow::Error) -> String {
    let causes: Vec<String> = error.chain().map(ToString::to_string).collect();
    let lines = causes.iter().rev().filter_map(|text| text.lines().find(|line| !line.trim().is_empty()));
    lines.collect::<Vec<_>>().join("\n    while: ")
}

/// The message of a panic. Its place in the code is on stderr.
fn panic_error(panic: &(dyn Any + Send)) -> anyhow::Error {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    anyhow!("the test panicked: {}", text.unwrap_or("no message"))
}

fn block_on<T>(future: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let outcome = runtime.block_on(future);
    runtime.shutdown_timeout(Duration::from_secs(5));
    outcome
}

/// Whether suites keep their labs after the tests, and suites with nodes use a lab that is up.
fn keep_lab() -> bool {
    env::var_os("KEEP_LAB").is_some()
}

/// Whether to run the long variants of the tests (`make soak`).
pub fn soak() -> bool {
    env::var_os("PATCHBAY_SOAK").is_some()
}

/// The root of the repository.
pub fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}
