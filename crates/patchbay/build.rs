//! Tells the program which commit it is built from, for `patchbay version`.
//!
//! `PATCHBAY_COMMIT` wins; otherwise git is asked; without either the commit is `unknown`. A build never fails over it.

use std::{env, ffi::OsStr, fs, path::Path, process::Command};

/// From this package to the root of the workspace.
const ROOT: &str = "../..";

fn main() {
    println!("cargo::rerun-if-env-changed=PATCHBAY_COMMIT");
    println!("cargo::rerun-if-changed=build.rs");
    let given = env::var("PATCHBAY_COMMIT").ok().filter(|commit| !commit.trim().is_empty());
    let commit = given.or_else(commit_by_git).unwrap_or_else(|| String::from("unknown"));
    println!("cargo::rustc-env=PATCHBAY_COMMIT={}", commit.trim());

    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let rustc = output(Command::new(rustc).arg("--version")).unwrap_or_else(|| String::from("unknown rustc"));
    let target = env::var("TARGET").unwrap_or_default();
    println!("cargo::rustc-env=PATCHBAY_BUILT_WITH={rustc}, {target}");
}

/// The commit, with `-dirty` when the sources differ from it.
fn commit_by_git() -> Option<String> {
    // Source that was unpacked inside somebody else's repository must not report that repository's commit.
    if git(&["rev-parse", "--show-prefix"])? != "crates/patchbay/" {
        return None;
    }
    watch_commit();
    let sources = watch_sources();
    let commit = git(&["rev-parse", "HEAD"])?;
    let mut status = vec!["--no-optional-locks", "status", "--porcelain", "--"];
    status.extend(sources.iter().map(String::as_str));
    let clean = git(&status)?.is_empty();
    Some(if clean { commit } else { format!("{commit}-dirty") })
}

/// Asks for another look when HEAD moves: by a checkout, a commit, or a fetch that packs refs. `--git-path` knows where
/// these are in a linked worktree too. A missing path is left out, because cargo would then rebuild every time.
fn watch_commit() {
    for name in ["HEAD", "refs/heads", "packed-refs"] {
        if let Some(path) = git(&["rev-parse", "--git-path", name]) {
            watch(&path);
        }
    }
}

/// Asks for another look when a source changes, and returns what counts as one: every room but the lab, which is no
/// part of the program, and the workspace's own files.
fn watch_sources() -> Vec<String> {
    let mut sources: Vec<String> = ["Cargo.toml", "Cargo.lock", "rust-toolchain.toml"]
        .iter()
        .map(|name| format!("{ROOT}/{name}"))
        .collect();
    let rooms = fs::read_dir(format!("{ROOT}/crates")).into_iter().flatten().flatten();
    let rooms = rooms.filter(|room| room.file_name() != OsStr::new("lab"));
    sources.extend(rooms.filter_map(|room| room.path().to_str().map(str::to_owned)));
    sources.sort();
    for path in &sources {
        watch(path);
    }
    sources
}

fn watch(path: &str) {
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
