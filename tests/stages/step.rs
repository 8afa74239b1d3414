//! Runs commands with their output shown.

use std::{
    io::{BufRead as _, BufReader},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail};

/// A cargo command at the repository's root.
pub fn cargo(arguments: &[&str]) -> Command {
    cargo_with(Command::new("cargo"), arguments)
}

/// The same for builds beside tests: what the tests do comes first.
pub fn low_priority_cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new("nice");
    command.args(["-n", "10", "cargo"]);
    cargo_with(command, arguments)
}

fn cargo_with(mut command: Command, arguments: &[&str]) -> Command {
    // No progress bar: other builds may print at the same time.
    command.args(arguments).current_dir(e2e::repository()).env("CARGO_TERM_PROGRESS_WHEN", "never");
    // The outer `cargo run` sets these for this package; an inner cargo would see them as changed and run build scripts again.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_"].iter().any(|p| text.starts_with(p))
        {
            command.env_remove(&name);
        }
    }
    command
}

/// Builds the `lab` program. The selection of packages unifies features as in the build of this program, so that both share
/// all dependencies; `-p lab` alone would compile them again.
pub fn build_lab() -> Result<()> {
    run_command(&mut cargo(&["build", "--locked", "-p", "e2e", "-p", "lab", "--bin", "lab"]))
}

/// Runs a command to completion and shows its output.
pub fn run_command(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("run {command:?}"))?;
    if !status.success() {
        bail!("{command:?}: {status}");
    }
    Ok(())
}

/// The number of passed and failed tests.
#[derive(Clone, Copy, Debug, Default)]
pub struct TestCount {
    pub passed: usize,
    pub failed: usize,
}

/// Runs tests, shows their output with a prefix, and adds up the counts that the test runners print.
pub fn run_tests(command: &mut Command, prefix: &str) -> Result<(bool, TestCount)> {
    let mut child = command.stdout(Stdio::piped()).spawn().with_context(|| format!("run {command:?}"))?;
    let output = child.stdout.take().context("the child has no stdout")?;
    let mut count = TestCount::default();
    for line in BufReader::new(output).lines() {
        let line = line.context("read the tests' output")?;
        println!("{prefix}{line}");
        if let Some(rest) = line.strip_prefix("test result: ") {
            count.passed += number_before(rest, " passed");
            count.failed += number_before(rest, " failed");
        }
    }
    let status = child.wait().with_context(|| format!("wait for {command:?}"))?;
    Ok((status.success(), count))
}

fn number_before(text: &str, word: &str) -> usize {
    let Some((left, _)) = text.split_once(word) else {
        return 0;
    };
    left.rsplit(|c: char| !c.is_ascii_digit()).next().and_then(|digits| digits.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_the_counts_of_a_test_runner() {
        let line = "FAILED. 12 passed; 3 failed; 0 ignored";
        assert_eq!((number_before(line, " passed"), number_before(line, " failed")), (12, 3));
        assert_eq!(number_before("nothing", " passed"), 0);
    }
}
