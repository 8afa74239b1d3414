//! Prepares a fresh Debian machine: installs packages and builds the third-party programs of the lab.

use std::{env, path::Path, process::Command, thread};

use anyhow::{Result, anyhow, bail};
use lab::{
    image::lab_image,
    print_progress,
    program::{ProgramSet, Programs},
};

use crate::step::run_command;

/// A required program and the Debian package that provides it.
const REQUIRED: &[(&str, &str)] = &[
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
    ("conmon", "conmon"),
    ("skopeo", "skopeo"),
    ("git", "git"),
];

/// Installs missing packages and builds the third-party programs that are not cached.
pub fn prepare() -> Result<()> {
    prepare_while(|| Ok(()))
}

/// The same as [`prepare`], and runs a build meanwhile: one uses the cores that the other leaves idle during downloads
/// and links. Waits for both, and fails if one fails.
pub fn prepare_while<T: Send>(build: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    if !nix::unistd::geteuid().is_root() {
        bail!("this creates namespaces, links and mounts; run it as root, for example with sudo");
    }
    install_packages()?;
    for (program, advice) in [("go", "install Go 1.26.8 or later"), ("cargo", "install Rust with rustup")] {
        if !on_path(program) {
            bail!("{program} is not on the PATH; {advice}");
        }
    }
    thread::scope(|scope| {
        let programs = scope.spawn(|| {
            let programs = Programs::prepare_set(ProgramSet::WithKubeVirt);
            print_error(programs.and_then(|programs| lab_image(&programs)))
        });
        let built = print_error(build());
        programs.join().map_err(|_| anyhow!("the thread that builds third-party programs panicked"))??;
        built
    })
}

/// Prints an error at once: the other build may take many minutes more.
fn print_error<T>(result: Result<T>) -> Result<T> {
    result.inspect_err(|e| print_progress(format!("{e:#}")))
}

fn install_packages() -> Result<()> {
    let mut missing: Vec<&str> =
        REQUIRED.iter().filter(|(p, _)| !on_path(p)).map(|(_, package)| *package).collect();
    // Static linking needs libc.a.
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
        bail!("apt-get is not available; install {} with your package manager", missing.join(", "));
    }
    print_progress(format!("installing {} …", missing.join(", ")));
    let apt = || {
        let mut command = Command::new("apt-get");
        command.env("DEBIAN_FRONTEND", "noninteractive");
        command
    };
    run_command(apt().args(["-q", "update"]))?;
    run_command(apt().args(["-q", "install", "-y", "--no-install-recommends"]).args(&missing))
}

fn on_path(program: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/sbin".into(), "/sbin".into()];
    env::split_paths(&path).chain(system).any(|dir| dir.join(program).is_file())
}
