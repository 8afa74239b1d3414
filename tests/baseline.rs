//! An earlier version of the product, built once from this repository's history, for upgrade tests and comparisons.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};
use lab::{machine::capture, paths, print_progress};
use nix::fcntl::{Flock, FlockArg};

use crate::repository;

/// The commit that this version is compared with and upgraded from.
pub const COMMIT: &str = "5d412b05578948919c95ada16c62359ff0c6e3bd";

/// A version of the product, ready to be installed.
#[derive(Debug, Clone)]
pub struct Release {
    /// The image as `ctr images import` takes it.
    pub image: PathBuf,
    /// The directory of the install manifests.
    pub manifests: PathBuf,
}

impl Release {
    /// What this tree builds.
    pub fn current() -> Self {
        Self { image: crate::patchbay::image_tar(), manifests: crate::patchbay::manifests_dir() }
    }

    /// The version of [`COMMIT`]. The first call builds it, which takes some minutes; the cache keeps it.
    pub fn baseline() -> Result<Self> {
        let dir = paths::cache_dir()?.join("baseline").join(COMMIT);
        let release = Self { image: dir.join("patchbay.tar"), manifests: dir.join("install") };
        fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
        let lock = File::create(dir.join(".lock")).context("create the lock file of the baseline")?;
        let _held = Flock::lock(lock, FlockArg::LockExclusive)
            .map_err(|(_, error)| error)
            .context("lock the baseline")?;
        if !release.image.exists() || !release.manifests.is_dir() {
            print_progress(format!("building the baseline {COMMIT} (once, takes some minutes) …"));
            release.build(&dir.join("source"))?;
        }
        Ok(release)
    }

    fn build(&self, source: &Path) -> Result<()> {
        if source.exists() {
            fs::remove_dir_all(source).with_context(|| format!("remove {}", source.display()))?;
        }
        let git = |dir: &Path| {
            let mut command = Command::new("git");
            command.arg("-C").arg(dir);
            command
        };
        capture(git(&repository()).args(["clone", "--quiet", "--shared", "--no-checkout", "."]).arg(source))
            .context("clone this repository for the baseline")?;
        capture(git(source).args(["checkout", "--quiet", COMMIT]))
            .context("check out the baseline: this clone needs the repository's full history")?;
        let mut build = Command::new("cargo");
        build.args(["run", "--quiet", "--locked", "-p", "e2e", "--bin", "stages", "--", "image"]);
        build.current_dir(source).env_remove("CARGO_TARGET_DIR").env_remove("PATCHBAY_PROFILE");
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("CARGO_PKG_") {
                build.env_remove(&name);
            }
        }
        let status = build.status().context("run cargo for the baseline")?;
        ensure!(status.success(), "building the baseline failed: {status}");
        if self.manifests.exists() {
            fs::remove_dir_all(&self.manifests).context("remove old manifests of the baseline")?;
        }
        let install = source.join("deploy/install");
        let partial = self.manifests.with_extension("partial");
        capture(Command::new("cp").arg("-rT").arg(&install).arg(&partial)).context("copy the manifests")?;
        fs::rename(&partial, &self.manifests).context("move the manifests into place")?;
        let partial = self.image.with_extension("partial");
        fs::copy(source.join("target/image/patchbay.tar"), &partial).context("copy the image")?;
        fs::rename(&partial, &self.image).context("move the image into place")?;
        fs::remove_dir_all(source).context("remove the sources of the baseline")
    }
}
