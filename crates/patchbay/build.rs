//! Sets the commit and the compiler that `patchbay version` prints.
//!
//! The commit is `PATCHBAY_COMMIT` if set, else git's HEAD, else `unknown`. A missing commit never fails the build.

use std::{env, ffi::OsStr, fs, path::Path, process::Command};

/// The path from this package to the workspace root.
const WORKSPACE_ROOT: &str = "../..";

fn main() {
    println!("cargo::rerun-if-env-changed=PATCHBAY_COMMIT");
    println!("cargo::rerun-if-changed=build.rs");
    let from_env = env::var("PATCHBAY_COMMIT").ok().filter(|commit| !commit.trim().is_empty());
    let commit = from_env.or_else(commit_from_git).unwrap_or_else(|| String::from("unknown"));
    println!("cargo::rustc-env=PATCHBAY_COMMIT={}", commit.trim());

    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let rustc = output(Command::new(rustc).arg("--version")).unwrap_or_else(|| String::from("unknown rustc"));
    let target = env::var("TARGET").unwrap_or_default();
    println!("cargo::rustc-env=PATCHBAY_BUILT_WITH={rustc}, {target}");
}

/// HEAD, with `-dirty` appended when the sources differ from it.
fn commit_from_git() -> Option<String> {
    // Sources unpacked inside an unrelated repository must not report that repository's commit.
    if git(&["rev-parse", "--show-prefix"])? != "crates/patchbay/" {
        return None;
    }
    rerun_if_head_moves();
    let sources = rerun_if_sources_change();
    let commit = git(&["rev-parse", "HEAD"])?;
    let mut status = vec!["--no-optional-locks", "status", "--porcelain", "--"];
    status.extend(sources.iter().map(String::as_str));
    let clean = git(&status)?.is_empty();
    Some(if clean { commit } else { format!("{commit}-dirty") })
}

/// Reruns the build script when HEAD moves: a checkout, a commit, or a fetch that packs refs. `--git-path` resolves these
/// files in a linked worktree too. Missing paths are skipped: cargo would rebuild every time.
fn rerun_if_head_moves() {
    for name in ["HEAD", "refs/heads", "packed-refs"] {
        if let Some(path) = git(&["rev-parse", "--git-path", name]) {
            rerun_if_changed(&path);
        }
    }
}

/// Reruns the build script when a source of the binary changes, and returns those sources: the workspace files and every
/// crate except `lab`, which is not part of the binary.
fn rerun_if_sources_change() -> Vec<String> {
    let mut sources: Vec<String> = ["Cargo.toml", "Cargo.lock", "rust-toolchain.toml"]
        .iter()
        .map(|name| format!("{WORKSPACE_ROOT}/{name}"))
        .collect();
    let crates = fs::read_dir(format!("{WORKSPACE_ROOT}/crates")).into_iter().flatten().flatten();
    let crates = crates.filter(|entry| entry.file_name() != OsStr::new("lab"));
    sources.extend(crates.filter_map(|entry| entry.path().to_str().map(str::to_owned)));
    sources.sort();
    for path in &sources {
        rerun_if_changed(path);
    }
    sources
}

fn rerun_if_changed(path: &str) {
    if Path::new(path).exists() {
        println!("cargo::rerun-if-changed={path}");
    }
}

fn git(args: &[&str]) -> Option<String> {
    output(Command::new("git").args(args))
}

fn output(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}
