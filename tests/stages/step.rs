//! Running a program of this repository's set-up, visibly.

use std::{
    io::{BufRead as _, BufReader},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail};

/// A cargo command at the repository's root.
pub fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new("cargo");
    command.args(arguments).current_dir(e2e::repository());
    // What the outer `cargo run` says about this package would make build scripts believe that their own have changed.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_"].iter().any(|p| text.starts_with(p))
        {
            command.env_remove(&name);
        }
    }
    command
}

/// Runs to the end, output shown.
pub fn show(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("run {command:?}"))?;
    if !status.success() {
        bail!("{command:?}: {status}");
    }
    Ok(())
}

/// How many tests a program ran.
#[derive(Clone, Copy, Debug, Default)]
pub struct Count {
    pub passed: usize,
    pub failed: usize,
}

/// Runs tests, output shown behind a mark, and counts what the runners say at their end.
pub fn tests(command: &mut Command, mark: &str) -> Result<(bool, Count)> {
    let mut child = command.stdout(Stdio::piped()).spawn().with_context(|| format!("run {command:?}"))?;
    let output = child.stdout.take().context("no output")?;
    let mut count = Count::default();
    for line in BufReader::new(output).lines() {
        let line = line.context("read the tests' output")?;
        println!("{mark}{line}");
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
    fn the_counts_of_a_runner_are_read() {
        let line = "FAILED. 12 passed; 3 failed; 0 ignored";
        assert_eq!((number_before(line, " passed"), number_before(line, " failed")), (12, 3));
        assert_eq!(number_before("nothing", " passed"), 0);
    }
}
