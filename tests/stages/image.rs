//! The product's image: a static program on an empty base.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};
use lab::{image::Image, machine::capture, print_progress, tar::TarBuilder};

use crate::step::{cargo, show};

const SHIPPED: &str = "dist";
const LIMIT: u64 = 30_000_000;
/// It is started for each pod that comes or goes.
const SHIM_LIMIT: u64 = 1_500_000;

/// Builds `target/image/patchbay.tar`.
pub fn build() -> Result<PathBuf> {
    // For the inner loop: `PATCHBAY_PROFILE=dev` builds in seconds what is ten times as large.
    let profile = std::env::var("PATCHBAY_PROFILE").unwrap_or_else(|_| SHIPPED.to_owned());
    print_progress("building the static programs (a cold build takes some minutes) …");
    let program = compile("patchbay", "patchbay", &target("gnu"), &profile)?;
    let shim = compile("cni", "patchbay-cni", &quick(), &profile)?;
    let size = fs::metadata(&shim).context("look at the CNI plugin")?.len();
    ensure!(
        profile != SHIPPED || size <= SHIM_LIMIT,
        "the CNI plugin has {size} bytes; the limit is {SHIM_LIMIT}"
    );
    let commit = commit(&program)?;
    let out = e2e::patchbay::image_tar();
    pack(&program, &shim, &commit, &out)?;
    let size = fs::metadata(&out).context("look at the image")?.len();
    ensure!(profile != SHIPPED || size <= LIMIT, "the image has {size} bytes; the limit is {LIMIT}");
    print_progress(format!(
        "target/image/patchbay.tar: {} MB, {}, commit {commit}",
        size / 1_000_000,
        e2e::patchbay::IMAGE_REFERENCE
    ));
    Ok(out)
}

fn target(library: &str) -> String {
    format!("{}-unknown-linux-{library}", std::env::consts::ARCH)
}

/// The target whose programs start soonest. What glibc finds out about the processor before `main` takes half a millisecond
/// on a virtual machine, as long as all that the plugin does; musl asks nothing.
fn quick() -> String {
    let target = target("musl");
    let rustup = |words: &[&str]| {
        capture(Command::new("rustup").arg("target").args(words).current_dir(e2e::repository()))
    };
    let installed =
        rustup(&["list", "--installed"]).is_ok_and(|list| list.lines().any(|line| line == target));
    let added = || rustup(&["add", &target]).map(drop);
    match if installed { Ok(()) } else { added() } {
        Ok(()) => target,
        Err(error) => {
            print_progress(format!(
                "the CNI plugin will start slowly, for Rust's {target} cannot be had: {error:#}"
            ));
            self::target("gnu")
        }
    }
}

/// Builds a program that needs nothing of the system that it runs on.
fn compile(package: &str, program: &str, target: &str, profile: &str) -> Result<PathBuf> {
    let words = ["build", "--locked", "--profile", profile, "-p", package, "--target", target];
    // With a target named, these flags are for the program alone, not for build scripts and macros.
    show(cargo(&words).env("RUSTFLAGS", "-C target-feature=+crt-static"))?;
    let directory = if profile == "dev" { "debug" } else { profile };
    Ok(e2e::repository().join("target").join(target).join(directory).join(program))
}

/// What the program itself says it was built from.
fn commit(program: &Path) -> Result<String> {
    let text = capture(Command::new(program).arg("version"))?;
    let commit = text.lines().find_map(|line| line.strip_prefix("commit "));
    commit.map(str::to_owned).context("the program does not tell its commit")
}

/// The two programs and nothing else, with the commit in the labels.
fn pack(program: &Path, shim: &Path, commit: &str, out: &Path) -> Result<()> {
    let content = fs::read(program).with_context(|| format!("read {}", program.display()))?;
    let mut layer = TarBuilder::default();
    for dir in ["etc", "tmp", "usr", "usr/bin", "host", "opt", "run", "var", "var/lib"] {
        layer.directory(dir, if dir == "tmp" { 0o1777 } else { 0o755 })?;
    }
    let users = b"root:x:0:0:root:/:/sbin/nologin\npatchbay:x:65532:65532:patchbay:/:/sbin/nologin\n";
    layer.file("etc/passwd", 0o644, users)?;
    layer.file("etc/group", 0o644, b"root:x:0:\npatchbay:x:65532:\n")?;
    layer.file("usr/bin/patchbay", 0o755, &content)?;
    layer.file(
        "usr/bin/patchbay-cni",
        0o755,
        &fs::read(shim).with_context(|| format!("read {}", shim.display()))?,
    )?;
    let image = Image {
        reference: e2e::patchbay::IMAGE_REFERENCE,
        layer: layer.finish(),
        entrypoint: &["/usr/bin/patchbay"],
        environment: &["PATH=/usr/bin"],
        user: "65532:65532",
        labels: BTreeMap::from([
            ("org.opencontainers.image.title", "patchbay"),
            ("org.opencontainers.image.licenses", "Apache-2.0"),
            ("org.opencontainers.image.version", env!("CARGO_PKG_VERSION")),
            ("org.opencontainers.image.revision", commit),
        ]),
    };
    let dir = out.parent().context("the image has a directory")?;
    fs::create_dir_all(dir).with_context(|| format!("make {}", dir.display()))?;
    let partial = out.with_extension("partial");
    fs::write(&partial, image.pack()?).context("write the image")?;
    fs::rename(&partial, out).context("put the image in place")
}
