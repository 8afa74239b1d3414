//! Builds all test programs at once. The stages run them without cargo: `cargo test -p …` unifies features differently for
//! each selection of packages, so it would compile most of the workspace again.

use std::{
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::step::cargo;

/// What a test program tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetKind {
    /// The tests beside the code of a library or binary.
    LibraryOrBinary,
    /// A file in the directory `tests` of a package.
    Test,
}

/// A test program that cargo has built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TestProgram {
    /// The directory of the package, relative to the repository.
    pub package: String,
    pub target: String,
    pub kind: TargetKind,
    path: PathBuf,
}

impl TestProgram {
    /// Runs the program as `cargo test` does, in the directory of its package.
    pub fn command(&self) -> Command {
        let directory = e2e::repository().join(&self.package);
        let mut command = Command::new(&self.path);
        command.current_dir(&directory).env("CARGO_MANIFEST_DIR", &directory);
        command
    }
}

/// Builds all programs and tests of the workspace.
pub fn build_all() -> Result<Vec<TestProgram>> {
    let arguments = ["build", "--locked", "--workspace", "--all-targets"];
    let mut command = cargo(&arguments);
    command.arg("--message-format=json-render-diagnostics").stdout(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("run {command:?}"))?;
    let output = child.stdout.take().context("the child has no stdout")?;
    let repository = e2e::repository().canonicalize().context("find the repository")?;
    let mut programs = Vec::new();
    for line in BufReader::new(output).lines() {
        let message =
            serde_json::from_str(&line.context("read cargo's messages")?).context("parse cargo's message")?;
        programs.extend(parse(&message, &repository));
    }
    let status = child.wait().with_context(|| format!("wait for {command:?}"))?;
    ensure!(status.success(), "{command:?}: {status}");
    // In the order of the source tree, not in the order in which the builds finished.
    programs.sort_by(|one, other| (&one.package, &one.target).cmp(&(&other.package, &other.target)));
    Ok(programs)
}

/// The test program that a message of cargo announces.
fn parse(message: &Value, repository: &Path) -> Option<TestProgram> {
    if message["reason"] != "compiler-artifact" || message["profile"]["test"] != true {
        return None;
    }
    let path = message["executable"].as_str()?.into();
    let package = Path::new(message["manifest_path"].as_str()?).parent()?.strip_prefix(repository).ok()?;
    let kind =
        if message["target"]["kind"][0] == "test" { TargetKind::Test } else { TargetKind::LibraryOrBinary };
    let target = message["target"]["name"].as_str()?.to_owned();
    Some(TestProgram { package: package.to_str()?.to_owned(), target, kind, path })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_test_programs_of_the_workspace_are_taken_from_cargos_messages() {
        let message = |kind: &str, test: bool| {
            json!({
                "reason": "compiler-artifact", "manifest_path": "/repo/crates/plan/Cargo.toml",
                "target": {"kind": [kind], "name": "plan"}, "profile": {"test": test}, "executable": "/repo/target/plan",
            })
        };
        let parsed = |message: &Value| parse(message, Path::new("/repo"));
        let program = |kind| TestProgram {
            package: "crates/plan".into(),
            target: "plan".into(),
            kind,
            path: "/repo/target/plan".into(),
        };
        assert_eq!(parsed(&message("test", true)), Some(program(TargetKind::Test)));
        assert_eq!(parsed(&message("lib", true)), Some(program(TargetKind::LibraryOrBinary)));
        assert_eq!(parsed(&message("lib", false)), None);
        assert_eq!(parsed(&json!({"reason": "build-finished", "success": true})), None);
    }
}
