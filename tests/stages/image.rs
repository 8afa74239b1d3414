//! Builds Patchbay's image: two static programs on an empty base.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};
use lab::{image::Image, machine::capture, print_progress, tar::TarBuilder};

use crate::step::{low_priority_cargo, run_command};

const RELEASE_PROFILE: &str = "dist";
const MAX_IMAGE_SIZE: u64 = 30_000_000;
/// The runtime starts the plugin for each ADD and DEL, so it must be small.
const MAX_PLUGIN_SIZE: u64 = 1_500_000;

/// Builds `target/image/patchbay.tar`.
pub fn build() -> Result<PathBuf> {
    let profile = profile();
    print_progress("building the static programs (a first build takes several minutes) …");
    let program = compile("patchbay", "patchbay", &target("gnu"), &profile)?;
    let plugin = compile("cni", "patchbay-cni", &plugin_target(), &profile)?;
    let size = fs::metadata(&plugin).context("stat the CNI plugin")?.len();
    ensure!(
        profile != RELEASE_PROFILE || size <= MAX_PLUGIN_SIZE,
        "the CNI plugin has {size} bytes; the limit is {MAX_PLUGIN_SIZE}"
    );
    let commit = commit(&program)?;
    let out = e2e::patchbay::image_tar();
    pack(&program, &plugin, &commit, &out)?;
    let size = fs::metadata(&out).context("stat the image")?.len();
    ensure!(
        profile != RELEASE_PROFILE || size <= MAX_IMAGE_SIZE,
        "the image has {size} bytes; the limit is {MAX_IMAGE_SIZE}"
    );
    print_progress(format!(
        "target/image/patchbay.tar: {} MB, {}, commit {commit}",
        size / 1_000_000,
        e2e::patchbay::IMAGE_REFERENCE
    ));
    Ok(out)
}

/// `PATCHBAY_PROFILE=dev` builds in seconds, for development; the image is ten times as large.
fn profile() -> String {
    std::env::var("PATCHBAY_PROFILE").unwrap_or_else(|_| RELEASE_PROFILE.to_owned())
}

/// The program that [`build`] put into the image. It runs on this machine too.
pub fn program() -> PathBuf {
    built("patchbay", &target("gnu"), &profile())
}

fn built(program: &str, target: &str, profile: &str) -> PathBuf {
    let directory = if profile == "dev" { "debug" } else { profile };
    e2e::repository().join("target").join(target).join(directory).join(program)
}

fn target(library: &str) -> String {
    format!("{}-unknown-linux-{library}", std::env::consts::ARCH)
}

/// The target of the CNI plugin: musl, whose programs start faster. Before `main`, glibc queries the processor with CPUID,
/// which takes 0.5 ms on a virtual machine, as long as the rest of the plugin; musl does not.
fn plugin_target() -> String {
    let target = target("musl");
    let rustup = |arguments: &[&str]| {
        capture(Command::new("rustup").arg("target").args(arguments).current_dir(e2e::repository()))
    };
    let installed =
        rustup(&["list", "--installed"]).is_ok_and(|list| list.lines().any(|line| line == target));
    let add = || rustup(&["add", &target]).map(drop);
    match if installed { Ok(()) } else { add() } {
        Ok(()) => target,
        Err(error) => {
            print_progress(format!(
                "cannot install the Rust target {target}; building the CNI plugin with glibc, which starts slower: {error:#}"
            ));
            self::target("gnu")
        }
    }
}

/// Builds a static program.
fn compile(package: &str, program: &str, target: &str, profile: &str) -> Result<PathBuf> {
    let arguments = ["build", "--locked", "--profile", profile, "-p", package, "--target", target];
    // With an explicit target, RUSTFLAGS does not apply to build scripts and procedural macros.
    run_command(low_priority_cargo(&arguments).env("RUSTFLAGS", "-C target-feature=+crt-static"))?;
    Ok(built(program, target, profile))
}

/// The commit that the program reports.
fn commit(program: &Path) -> Result<String> {
    let text = capture(Command::new(program).arg("version"))?;
    let commit = text.lines().find_map(|line| line.strip_prefix("commit "));
    commit.map(str::to_owned).context("the program reports no commit")
}

/// Packs the two programs; the labels carry the commit.
fn pack(program: &Path, plugin: &Path, commit: &str, out: &Path) -> Result<()> {
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
        &fs::read(plugin).with_context(|| format!("read {}", plugin.display()))?,
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
    let dir = out.parent().context("the image path has no directory")?;
    fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
    let partial = out.with_extension("partial");
    fs::write(&partial, image.pack()?).context("write the image")?;
    fs::rename(&partial, out).context("rename the image")
}
