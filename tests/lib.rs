//! Support for end-to-end tests: a suite brings one lab up, runs its tests in it one after another or side by side, and
//! takes it down.
#![allow(clippy::print_stdout, reason = "a test runner prints what it ran")]

use std::{
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
pub mod fleet;
pub mod patchbay;
pub mod replica;

/// A test: a sentence and what shows it.
pub type Test = (&'static str, fn(Lab) -> BoxFuture<'static, Result<()>>);

/// Tests that run at the same time: they touch different things, and none of them measures what another disturbs.
pub type Group = &'static [Test];

/// Lists async functions as tests, each under its own name. Those joined by `+` run beside each other.
#[macro_export]
macro_rules! tests {
    ($($first:ident $(+ $beside:ident)*),* $(,)?) => {
        &[$(&[
            (stringify!($first), |lab| Box::pin($first(lab))),
            $((stringify!($beside), |lab| Box::pin($beside(lab)))),*
        ]),*]
    };
}

/// Tests that share a lab.
pub struct Suite {
    /// Also the lab's name.
    pub name: &'static str,
    pub topology: Topology,
    /// Runs once, before the first test.
    pub set_up: fn(Lab) -> BoxFuture<'static, Result<()>>,
    pub tests: &'static [Group],
}

/// Why a test failed, and with what in the lab.
type Failure = (&'static str, anyhow::Error);

impl Suite {
    /// The whole of a test program without the standard harness; prints as that does.
    pub fn run(&self) -> ExitCode {
        let words: Vec<String> = env::args().skip(1).collect();
        let all = self.tests.iter().map(|group| group.len()).sum::<usize>();
        if words.iter().any(|w| w == "--list") {
            self.tests.iter().copied().flatten().for_each(|(name, _)| println!("{name}: test"));
            return ExitCode::SUCCESS;
        }
        let filters: Vec<&String> = words.iter().filter(|w| !w.starts_with('-')).collect();
        let wanted = |name: &str| filters.is_empty() || filters.iter().any(|f| name.contains(f.as_str()));
        let groups = self.tests.iter().map(|group| group.iter().filter(|(name, _)| wanted(name)).collect());
        let groups: Vec<Vec<&Test>> = groups.collect();
        let count = groups.iter().map(Vec::len).sum::<usize>();
        println!("\nrunning {count} tests");
        if count == 0 {
            println!("\ntest result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; {all} filtered out");
            return ExitCode::SUCCESS;
        }
        let start = Instant::now();
        let failures = match self.play(&groups) {
            Ok(failures) => failures,
            Err(e) => {
                println!("test result: FAILED. 0 passed; {count} failed; set-up: {e:#}");
                return ExitCode::FAILURE;
            }
        };
        for (name, e) in &failures {
            println!("\n---- {name} ----\n{e:?}");
        }
        println!(
            "\ntest result: {}. {} passed; {} failed; 0 ignored; 0 measured; {} filtered out; finished in {:.2}s",
            if failures.is_empty() { "ok" } else { "FAILED" },
            count - failures.len(),
            failures.len(),
            all - count,
            start.elapsed().as_secs_f64(),
        );
        if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }

    fn play(&self, groups: &[Vec<&Test>]) -> Result<Vec<Failure>> {
        let lab = Lab::new(self.name.parse()?);
        // What a killed run may have left.
        lab.down()?;
        let begun = Instant::now();
        let ready = block(async {
            lab.up(self.topology).await.context("bring the lab up")?;
            (self.set_up)(lab.clone()).await.context("set the suite up")
        });
        if let Err(e) = ready {
            self.leave(&lab)?;
            return Err(e);
        }
        println!("set up in {:.1} s", begun.elapsed().as_secs_f64());
        let mut failures = Vec::new();
        for group in groups {
            // A thread and a runtime for each: what one waits for holds up no other.
            let ended: Vec<Option<Failure>> = thread::scope(|scope| {
                let running: Vec<_> = group.iter().map(|test| scope.spawn(|| play(&lab, test))).collect();
                let outcomes = running.into_iter().zip(group).map(|(thread, (name, _))| {
                    thread.join().unwrap_or_else(|_| Some((*name, anyhow!("the test's thread panicked"))))
                });
                outcomes.collect()
            });
            if ended.iter().any(Option::is_some) {
                // What was left cut or paused must not fail the next ones.
                for node in lab.nodes() {
                    lab.heal(&node)?;
                }
                block(lab.up(self.topology))?;
            }
            failures.extend(ended.into_iter().flatten());
        }
        self.leave(&lab)?;
        Ok(failures)
    }

    /// Takes the lab down, unless a person wants to look at it.
    fn leave(&self, lab: &Lab) -> Result<()> {
        if env::var_os("KEEP_LAB").is_some() {
            println!("KEEP_LAB is set: lab {} stays up; `lab --name {} down` ends it", self.name, self.name);
            return Ok(());
        }
        lab.down()
    }
}

/// Runs one test to its end and says how it went.
fn play(lab: &Lab, (name, test): &Test) -> Option<Failure> {
    let begun = Instant::now();
    let limit = Duration::from_secs(if soak() { 1800 } else { 240 });
    let outcome = block(async {
        let test = AssertUnwindSafe(test(lab.clone())).catch_unwind();
        let ended =
            tokio::time::timeout(limit, test).await.with_context(|| format!("no end after {limit:?}"))?;
        ended.unwrap_or_else(|_| bail!("the test panicked"))
    });
    let spent = begun.elapsed().as_secs_f64();
    match outcome {
        Ok(()) => {
            println!("test {name} ... ok ({spent:.1} s)");
            None
        }
        Err(e) => {
            println!("test {name} ... FAILED ({spent:.1} s)");
            Some((name, e.context(patchbay::dump(lab))))
        }
    }
}

fn block<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let outcome = runtime.block_on(work);
    runtime.shutdown_timeout(Duration::from_secs(5));
    outcome
}

/// Whether the long counts are wanted: `make soak`.
pub fn soak() -> bool {
    env::var_os("PATCHBAY_SOAK").is_some()
}

/// The root of the repository.
pub fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}
