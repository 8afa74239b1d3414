//! Programs of the lab that are compiled from Rust or C source without a package manager.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};

use crate::{digest::sha256_hex, progress::print_progress};

/// A program of one Rust source file without dependencies, linked statically.
pub struct RustProgram {
    pub name: &'static str,
    /// The cache key.
    pub source: &'static str,
}

impl RustProgram {
    pub fn key(&self) -> String {
        format!("{}-{}", self.name, &sha256_hex(self.source.as_bytes())[..16])
    }

    /// Compiles the program into the cache unless it is there.
    pub fn build(&self, cache: &Path) -> Result<()> {
        let dir = cache.join(self.key());
        let program = dir.join(self.name);
        if program.exists() {
            return Ok(());
        }
        print_progress(format!("building {} …", self.name));
        fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
        let source = dir.join("main.rs");
        fs::write(&source, self.source).with_context(|| format!("write the source of {}", self.name))?;
        let partial = dir.join(".partial");
        let mut rustc = Command::new("rustc");
        rustc
            .args(["--edition", "2024", "-O", "-C", "panic=abort", "-C", "strip=symbols"])
            .args(["-C", "target-feature=+crt-static", "-o"])
            .arg(&partial)
            .arg(&source);
        run(&mut rustc, self.name).context("is Rust installed with rustup?")?;
        install(&partial, &program)
    }
}

/// Compiles every C file of a directory into one program.
pub fn build_c_program(name: &str, sources: &Path, program: &Path) -> Result<()> {
    print_progress(format!("building {name} …"));
    let entries = fs::read_dir(sources).with_context(|| format!("list {}", sources.display()))?;
    let mut files: Vec<PathBuf> = entries.flatten().map(|e| e.path()).collect();
    files.retain(|path| path.extension().is_some_and(|e| e == "c"));
    files.sort();
    let partial = program.with_extension("partial");
    let mut cc = Command::new("cc");
    cc.args(["-std=c99", "-Os", "-s", "-static", "-o"]).arg(&partial).args(files);
    run(&mut cc, name).context("is gcc installed?")?;
    install(&partial, program)
}

fn run(compiler: &mut Command, name: &str) -> Result<()> {
    let status = compiler.status().with_context(|| format!("run {compiler:?}"))?;
    if !status.success() {
        bail!("build {name}: {compiler:?}: {status}");
    }
    Ok(())
}

fn install(partial: &Path, program: &Path) -> Result<()> {
    fs::set_permissions(partial, fs::Permissions::from_mode(0o755)).context("make it executable")?;
    fs::rename(partial, program).with_context(|| format!("rename to {}", program.display()))
}
