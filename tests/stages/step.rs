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

/// What test runners print about their tests.
#[derive(Debug, Default)]
pub struct TestResults {
    pub passed: usize,
    pub failed: usize,
    /// For each failed test its name and the first lines from its panic or error on.
    pub failures: Vec<String>,
    /// How many more lines of the current panic, error or cause the summary repeats.
    panic_lines: usize,
}

/// How much of a panic message, an error and its causes the summary repeats.
const PANIC_LINES: usize = 6;
const PANIC_LINE_LENGTH: usize = 400;

impl TestResults {
    /// Reads the next line of a test runner's output.
    fn read(&mut self, line: &str) {
        if let Some(rest) = line.strip_prefix("test result: ") {
            self.passed += number_before(rest, " passed");
            self.failed += number_before(rest, " failed");
            self.failures.extend(rest.split_once("; set-up: ").map(|(_, error)| format!("set-up: {error}")));
            self.panic_lines = 0;
        } else if let Some(name) =
            line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----"))
        {
            self.failures.push(name.to_owned());
            self.panic_lines = 0;
        } else if let Some(failure) = self.failures.last_mut() {
            // Logs may stand between an error and its causes.
            if line.starts_with("Error: ")
                || line == "Caused by:"
                || line.starts_with("thread '") && line.contains("panicked at")
            {
                self.panic_lines = PANIC_LINES;
            }
            if line == "failures:" {
                self.panic_lines = 0;
            }
            if self.panic_lines > 0 && !line.is_empty() {
                let line: String = line.chars().take(PANIC_LINE_LENGTH).collect();
                failure.push_str("\n    ");
                failure.push_str(&line);
                self.panic_lines -= 1;
            }
        }
    }

    pub fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.failures.extend(other.failures);
    }
}

/// Runs tests, shows their output with a prefix, and reads the results that the test runners print.
pub fn run_tests(command: &mut Command, prefix: &str) -> Result<(bool, TestResults)> {
    let mut child = command.stdout(Stdio::piped()).spawn().with_context(|| format!("run {command:?}"))?;
    let output = child.stdout.take().context("the child has no stdout")?;
    let mut results = TestResults::default();
    for line in BufReader::new(output).lines() {
        let line = line.context("read the tests' output")?;
        println!("{prefix}{line}");
        results.read(&line);
    }
    let status = child.wait().with_context(|| format!("wait for {command:?}"))?;
    Ok((status.success(), results))
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

    #[test]
    fn keeps_the_panics_of_failed_tests() {
        let output = "test a ... ok\ntest b ... FAILED\n\nfailures:\n\n---- b stdout ----\nlong log\n\n\
            thread 'b' (7) panicked at tests/b.rs:1:2:\nnot ready\n---- c stdout ----\n\
            Error: no pod\nlog 1\nlog 2\nlog 3\nlog 4\nlog 5\nlog 6\n\nCaused by:\n    timeout\n\nfailures:\n    b\n    c\n\ntest result: FAILED. 1 passed; 2 failed; 0 ignored";
        let mut results = TestResults::default();
        output.lines().for_each(|line| results.read(line));
        assert_eq!((results.passed, results.failed), (1, 2));
        let panic = "b\n    thread 'b' (7) panicked at tests/b.rs:1:2:\n    not ready";
        let cause = "c\n    Error: no pod\n    log 1\n    log 2\n    log 3\n    log 4\n    log 5\n    Caused by:\n        timeout";
        assert_eq!(results.failures, [panic, cause]);
    }
}
