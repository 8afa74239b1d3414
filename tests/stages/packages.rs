//! What a fresh Debian machine lacks: packages, and the lab's programs.

use std::{env, path::Path, process::Command};

use anyhow::{Result, bail};
use lab::{image::lab_image, print_progress, program::Programs};

use crate::step::show;

/// A program and the Debian package that brings it.
const NEEDED: &[(&str, &str)] = &[
    ("runc", "runc"),
    ("ip", "iproute2"),
    ("nft", "nftables"),
    ("conntrack", "conntrack"),
    ("ethtool", "ethtool"),
    ("ping", "iputils-ping"),
    ("busybox", "busybox-static"),
    ("nsenter", "util-linux"),
    ("mount", "mount"),
    ("cc", "gcc"),
    ("git", "git"),
];

/// Installs what is missing, then builds or finds the lab's programs.
pub fn prepare() -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        bail!("this makes namespaces, links and mounts: run it as root, for instance with sudo");
    }
    packages()?;
    for (program, advice) in [("go", "install Go 1.26 or later"), ("cargo", "install Rust with rustup")] {
        if !on_path(program) {
            bail!("{program} is not on the PATH: {advice}");
        }
    }
    lab_image(&Programs::prepare()?).map(|_| ())
}

fn packages() -> Result<()> {
    let mut missing: Vec<&str> =
        NEEDED.iter().filter(|(p, _)| !on_path(p)).map(|(_, package)| *package).collect();
    // Static programs link against these.
    if !["/usr/lib/x86_64-linux-gnu/libc.a", "/usr/lib/aarch64-linux-gnu/libc.a"]
        .iter()
        .any(|f| Path::new(f).exists())
    {
        missing.push("libc6-dev");
    }
    if missing.is_empty() {
        return Ok(());
    }
    if !on_path("apt-get") {
        bail!("install the packages {} with this system's package manager", missing.join(", "));
    }
    print_progress(format!("installing {} …", missing.join(", ")));
    let apt = || {
        let mut command = Command::new("apt-get");
        command.env("DEBIAN_FRONTEND", "noninteractive");
        command
    };
    show(apt().args(["-q", "update"]))?;
    show(apt().args(["-q", "install", "-y", "--no-install-recommends"]).args(&missing))
}

fn on_path(program: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/sbin".into(), "/sbin".into()];
    env::split_paths(&path).chain(system).any(|dir| dir.join(program).is_file())
}
