//! The product's image: a static program on an empty base.

use std::{fs, path::PathBuf};

use anyhow::{Context as _, Result, ensure};
use lab::{image::product_image, say};

use crate::step::{cargo, show};

const LIMIT: u64 = 30 << 20;

/// Builds `target/image/patchbay.tar`.
pub fn build() -> Result<PathBuf> {
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    say("building the static program (a cold build takes some minutes) …");
    // With a target named, these flags are for the program alone, not for build scripts and macros.
    let flags = "-C target-feature=+crt-static";
    show(
        cargo(&["build", "--locked", "--profile", "dist", "-p", "patchbay", "--target", &target])
            .env("RUSTFLAGS", flags),
    )?;
    let program = e2e::repository().join("target").join(&target).join("dist/patchbay");
    let commit = commit(&program)?;
    let out = e2e::patchbay::image();
    product_image(&program, e2e::patchbay::REFERENCE, env!("CARGO_PKG_VERSION"), &commit, &out)?;
    let size = fs::metadata(&out).context("look at the image")?.len();
    ensure!(size <= LIMIT, "the image has {size} bytes; the limit is {LIMIT}");
    say(format!(
        "target/image/patchbay.tar: {} MB, {}, commit {commit}",
        size / 1_000_000,
        e2e::patchbay::REFERENCE
    ));
    Ok(out)
}

/// What the program itself says it was built from.
fn commit(program: &std::path::Path) -> Result<String> {
    let text = lab::machine::capture(std::process::Command::new(program).arg("version"))?;
    let commit = text.lines().find_map(|line| line.strip_prefix("commit "));
    commit.map(str::to_owned).context("the program does not tell its commit")
}
