//! `make test` and `make soak`: every stage in turn, and a plain summary at the end.

use std::{fmt::Write as _, process::Command, time::Instant};

use anyhow::{Result, bail};
use lab::say;

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

/// Runs all stages; a stage that fails does not hide the others.
pub fn run(length: Length) -> Result<()> {
    packages::prepare()?;
    let mut lines = Vec::new();
    let mut plain = |name: &'static str, work: &mut dyn FnMut() -> Result<()>| {
        say(format!("stage {name}"));
        let start = Instant::now();
        let outcome = work();
        if let Err(e) = &outcome {
            say(format!("{name}: {e:#}"));
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

    let mut counted = |name: &'static str, arguments: &[&str]| -> Result<()> {
        say(format!("stage {name}"));
        let start = Instant::now();
        let mut command: Command = cargo(&["test", "--locked"]);
        command.args(arguments);
        if length == Length::Long {
            command.env("PATCHBAY_SOAK", "1");
        }
        let (good, count) = tests(&mut command)?;
        lines.push(Line { name, good, count: Some(count), seconds: start.elapsed().as_secs_f64() });
        Ok(())
    };
    counted("unit", &["--workspace", "--lib", "--bins"])?;
    counted("doc examples", &["--workspace", "--doc"])?;
    counted("command line", &["-p", "patchbay", "--test", "*"])?;
    counted("arrows", &["-p", "e2e", "--test", "arrows"])?;
    counted("kernel", &["-p", "link", "-p", "node", "-p", "cni", "--test", "*"])?;
    counted("lab", &["-p", "e2e", "--test", "lab", "--", "--test-threads=1"])?;
    counted("controller", &["-p", "e2e", "--test", "control_plane"])?;
    counted("networks", &["-p", "e2e", "--test", "networks"])?;
    counted("addresses", &["-p", "e2e", "--test", "addresses"])?;
    counted("nodes", &["-p", "e2e", "--test", "nodes"])?;
    summary(&lines)
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
