//! Support for end-to-end tests: a suite brings one lab up, runs its tests in it one after another, and takes it down.
#![allow(clippy::print_stdout, reason = "a test runner prints what it ran")]

use std::{
    env,
    panic::AssertUnwindSafe,
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use futures::{FutureExt as _, future::BoxFuture};
use lab::{Lab, Shape};

pub mod bridge;
pub mod fleet;
pub mod patchbay;
pub mod replica;

/// A test: a sentence and what shows it.
pub type Test = (&'static str, fn(Lab) -> BoxFuture<'static, Result<()>>);

/// Lists async functions as tests, each under its own name.
#[macro_export]
macro_rules! tests {
    ($($test:ident),* $(,)?) => {
        &[$((stringify!($test), |lab| Box::pin($test(lab)))),*]
    };
}

/// Tests that share a lab.
pub struct Suite {
    /// Also the lab's name.
    pub name: &'static str,
    pub shape: Shape,
    /// Runs once, before the first test.
    pub set_up: fn(Lab) -> BoxFuture<'static, Result<()>>,
    pub tests: &'static [Test],
}

impl Suite {
    /// The whole of a test program without the standard harness; prints as that does.
    pub fn run(&self) -> ExitCode {
        let words: Vec<String> = env::args().skip(1).collect();
        if words.iter().any(|w| w == "--list") {
            self.tests.iter().for_each(|(name, _)| println!("{name}: test"));
            return ExitCode::SUCCESS;
        }
        let filters: Vec<&String> = words.iter().filter(|w| !w.starts_with('-')).collect();
        let wanted = |name: &str| filters.is_empty() || filters.iter().any(|f| name.contains(f.as_str()));
        let tests: Vec<&Test> = self.tests.iter().filter(|(name, _)| wanted(name)).collect();
        println!("\nrunning {} tests", tests.len());
        if tests.is_empty() {
            println!(
                "\ntest result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; {} filtered out",
                self.tests.len()
            );
            return ExitCode::SUCCESS;
        }
        match self.play(&tests) {
            Ok(0) => ExitCode::SUCCESS,
            Ok(_) => ExitCode::FAILURE,
            Err(e) => {
                println!("test result: FAILED. 0 passed; {} failed; set-up: {e:#}", tests.len());
                ExitCode::FAILURE
            }
        }
    }

    fn play(&self, tests: &[&Test]) -> Result<usize> {
        let start = Instant::now();
        let lab = Lab::new(self.name.parse()?);
        // What a killed run may have left.
        lab.down()?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let begun = runtime.block_on(async {
            lab.up(self.shape).await.context("bring the lab up")?;
            (self.set_up)(lab.clone()).await.context("set the suite up")
        });
        if let Err(e) = begun {
            self.leave(&lab)?;
            return Err(e);
        }
        let mut failures = Vec::new();
        let limit = Duration::from_secs(if soak() { 1800 } else { 240 });
        for (name, test) in tests {
            let begun = Instant::now();
            let outcome = runtime.block_on(async {
                let test = AssertUnwindSafe(test(lab.clone())).catch_unwind();
                let ended = tokio::time::timeout(limit, test)
                    .await
                    .with_context(|| format!("no end after {limit:?}"))?;
                ended.unwrap_or_else(|_| bail!("the test panicked"))
            });
            let spent = begun.elapsed().as_secs_f64();
            match outcome {
                Ok(()) => println!("test {name} ... ok ({spent:.1} s)"),
                Err(e) => {
                    println!("test {name} ... FAILED ({spent:.1} s)");
                    failures.push((name, e.context(patchbay::dump(&lab))));
                    // What it left cut or paused must not fail the next one.
                    for node in lab.nodes() {
                        lab.heal(&node)?;
                    }
                    runtime.block_on(lab.up(self.shape))?;
                }
            }
        }
        runtime.shutdown_timeout(Duration::from_secs(5));
        self.leave(&lab)?;
        for (name, e) in &failures {
            println!("\n---- {name} ----\n{e:?}");
        }
        let (verdict, passed) =
            (if failures.is_empty() { "ok" } else { "FAILED" }, tests.len() - failures.len());
        println!(
            "\ntest result: {verdict}. {passed} passed; {} failed; 0 ignored; 0 measured; {} filtered out; finished in {:.2}s",
            failures.len(),
            self.tests.len() - tests.len(),
            start.elapsed().as_secs_f64(),
        );
        Ok(failures.len())
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

/// Whether the long counts are wanted: `make soak`.
pub fn soak() -> bool {
    env::var_os("PATCHBAY_SOAK").is_some()
}

/// The root of the repository.
pub fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}
