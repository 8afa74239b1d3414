//! Runs the command line against a lab.

use std::{
    io::Write as _,
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result};
use lab::test_namespace::TestNamespace;

/// What a command printed, and its exit code.
pub struct CommandOutput {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

/// The program beside the current one, which is a test or the program behind the Makefile.
pub fn program() -> Result<PathBuf> {
    let current = std::env::current_exe().context("find the current program")?;
    let mut found =
        current.ancestors().skip(1).take(3).map(|dir| dir.join("patchbay")).filter(|p| p.is_file());
    found.next().context("the program is not built: run `cargo build -p patchbay`")
}

/// Runs a command in the test namespace, as administrator; returns its exit code and everything that it printed.
pub fn run(ns: &TestNamespace, arguments: &[&str]) -> Result<(i32, String)> {
    let arguments = [arguments, &["-n", &ns.namespace]].concat();
    let CommandOutput { code, stdout, stderr } = run_with_input(ns, &arguments, "")?;
    Ok((code, stdout + &stderr))
}

/// Runs a command with this standard input.
pub fn run_with_input(ns: &TestNamespace, arguments: &[&str], input: &str) -> Result<CommandOutput> {
    let mut child = Command::new(program()?)
        .args(arguments)
        .env("KUBECONFIG", ns.lab.kubeconfig())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("run patchbay")?;
    // A command that does not read its input closes the pipe.
    let _ = child.stdin.take().context("patchbay has no stdin")?.write_all(input.as_bytes());
    let output = child.wait_with_output().context("wait for patchbay")?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    println!("patchbay {}: {:?}\n{stdout}{stderr}", arguments.join(" "), output.status.code());
    Ok(CommandOutput { code: output.status.code().context("patchbay was killed")?, stdout, stderr })
}
