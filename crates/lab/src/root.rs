//! The file system of a machine: the programs of this machine read-only, and directories of its own for everything
//! that a host writes. It looks like a host, and nothing in it can reach this machine's own files.

use std::{
    fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    unistd::pivot_root,
};
use serde::{Deserialize, Serialize};

/// What a machine's file system is made of.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Root {
    /// An empty directory to build it on.
    pub at: PathBuf,
    /// What survives a reboot: `/etc`, `/opt`, `/root` and `/var`.
    pub disk: PathBuf,
    /// Directories of this machine that it can read, and where.
    pub read_only: Vec<(PathBuf, PathBuf)>,
    /// Names in `/usr/local/bin`, and what they point to.
    pub programs: Vec<(String, PathBuf)>,
    /// Set by a power cycle.
    pub boot_id: String,
}

/// Kernel settings that a kubelet insists on and that are not per namespace: a machine sees them as set, and the real
/// ones stay as they are.
const SEEN_AS: &[(&str, &str)] = &[
    ("vm/overcommit_memory", "1"),
    ("vm/panic_on_oom", "0"),
    ("kernel/panic", "10"),
    ("kernel/panic_on_oops", "1"),
    ("kernel/keys/root_maxkeys", "1000000"),
    ("kernel/keys/root_maxbytes", "25000000"),
];

impl Root {
    /// Builds the file system and makes it the calling process's own. Called once, by the first process of a new
    /// mount and pid namespace.
    pub fn enter(&self) -> Result<()> {
        mount_flags(Path::new("/"), MsFlags::MS_REC | MsFlags::MS_PRIVATE)?;
        fs::create_dir_all(&self.at).with_context(|| format!("make {}", self.at.display()))?;
        mount_new("tmpfs", &self.at, Some("mode=0755,size=1g"))?;
        self.system()?;
        self.own_directories()?;
        self.kernel_directories()?;
        for (source, target) in &self.read_only {
            bind(source, &self.inside(target), Write::No)?;
        }
        let bin = self.inside(Path::new("/usr/local/bin"));
        mount_new("tmpfs", &bin, Some("mode=0755,size=1m"))?;
        for (name, target) in &self.programs {
            symlink(target, bin.join(name)).with_context(|| format!("link {name}"))?;
        }
        self.switch()?;
        self.settings()
    }

    fn inside(&self, path: &Path) -> PathBuf {
        self.at.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// `/usr` and its old names.
    fn system(&self) -> Result<()> {
        for name in ["usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"] {
            let source = Path::new("/").join(name);
            let target = self.at.join(name);
            match fs::symlink_metadata(&source) {
                Ok(meta) if meta.is_symlink() => {
                    let to = fs::read_link(&source)?;
                    symlink(&to, &target).with_context(|| format!("link {}", target.display()))?;
                }
                Ok(_) => bind(&source, &target, Write::No)?,
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(e).with_context(|| format!("look at {}", source.display())),
            }
        }
        Ok(())
    }

    fn own_directories(&self) -> Result<()> {
        for name in ["etc", "opt", "root", "var"] {
            let source = self.disk.join(name);
            fs::create_dir_all(&source).with_context(|| format!("make {}", source.display()))?;
            bind(&source, &self.at.join(name), Write::Yes)?;
        }
        for name in ["tmp", "run", "run/lab", "run/lock", "mnt", "home"] {
            let dir = self.at.join(name);
            fs::create_dir_all(&dir).with_context(|| format!("make {}", dir.display()))?;
        }
        for (name, target) in [("run", "/run"), ("lock", "/run/lock")] {
            match symlink(target, self.at.join("var").join(name)) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e).context("link /var/run"),
                _ => {}
            }
        }
        for name in ["var/tmp", "var/lib", "var/log", "var/cache"] {
            let dir = self.at.join(name);
            fs::create_dir_all(&dir).with_context(|| format!("make {}", dir.display()))?;
        }
        Ok(())
    }

    fn kernel_directories(&self) -> Result<()> {
        // A fresh sysfs shows the NICs of this network namespace only; it hides the cgroup mounts, so they come back.
        bind(Path::new("/dev"), &self.at.join("dev"), Write::Yes)?;
        mount_new("tmpfs", &self.at.join("dev/shm"), None)?;
        mount_new("sysfs", &self.at.join("sys"), None)?;
        bind(Path::new("/sys/fs/cgroup"), &self.at.join("sys/fs/cgroup"), Write::Yes)?;
        mount_new("proc", &self.at.join("proc"), None)
    }

    fn switch(&self) -> Result<()> {
        std::env::set_current_dir(&self.at).context("enter the new root")?;
        pivot_root(".", ".").context("switch to the new root")?;
        umount2(".", MntFlags::MNT_DETACH).context("let go of the old root")?;
        std::env::set_current_dir("/").context("enter /")?;
        // The kubelet and pods with mount propagation need it, as on any host with systemd.
        mount_flags(Path::new("/"), MsFlags::MS_REC | MsFlags::MS_SHARED)
    }

    fn settings(&self) -> Result<()> {
        let boot_id = format!("{}\n", self.boot_id);
        let mut seen = vec![("kernel/random/boot_id", boot_id.as_str())];
        seen.extend(SEEN_AS);
        for (name, value) in seen {
            let target = Path::new("/proc/sys").join(name);
            if !target.exists() {
                continue;
            }
            let file = Path::new("/run/lab").join(name.replace('/', "."));
            fs::write(&file, value).with_context(|| format!("write {}", file.display()))?;
            mount(Some(&file), &target, None::<&str>, MsFlags::MS_BIND, None::<&str>)
                .with_context(|| format!("show {} as {value}", target.display()))?;
        }
        for (name, value) in [
            ("net/ipv4/ip_forward", "1"),
            ("net/ipv6/conf/all/forwarding", "1"),
            ("net/ipv6/conf/default/forwarding", "1"),
        ] {
            let path = Path::new("/proc/sys").join(name);
            fs::write(&path, value).with_context(|| format!("write {}", path.display()))?;
        }
        Ok(())
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Write {
    Yes,
    No,
}

fn bind(source: &Path, target: &Path, write: Write) -> Result<()> {
    fs::create_dir_all(target).with_context(|| format!("make {}", target.display()))?;
    let flags = MsFlags::MS_BIND | MsFlags::MS_REC;
    mount(Some(source), target, None::<&str>, flags, None::<&str>)
        .with_context(|| format!("bind {} to {}", source.display(), target.display()))?;
    mount_flags(target, MsFlags::MS_REC | MsFlags::MS_PRIVATE)?;
    if write == Write::No {
        let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        mount(None::<&str>, target, None::<&str>, flags, None::<&str>)
            .with_context(|| format!("make {} read-only", target.display()))?;
    }
    Ok(())
}

fn mount_new(kind: &str, target: &Path, options: Option<&str>) -> Result<()> {
    fs::create_dir_all(target).with_context(|| format!("make {}", target.display()))?;
    mount(Some(kind), target, Some(kind), MsFlags::empty(), options)
        .with_context(|| format!("mount {kind} on {}", target.display()))
}

fn mount_flags(target: &Path, flags: MsFlags) -> Result<()> {
    mount(None::<&str>, target, None::<&str>, flags, None::<&str>)
        .with_context(|| format!("set {flags:?} on {}", target.display()))
}
