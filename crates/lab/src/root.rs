//! The file system of a machine: the programs of this machine read-only, and directories of its own for everything
//! that a host writes. It looks like a host, and what is done in it stays in it.

use std::{
    fs, io,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sys::stat::{Mode, SFlag, mknod},
    unistd::pivot_root,
};
use serde::{Deserialize, Serialize};

use crate::cgroup::Group;

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
    /// The cgroup below which the machine can write, without leading slash.
    pub group: String,
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
        self.devices()?;
        // A fresh sysfs shows the NICs of this network namespace only; it hides the cgroup mounts, so they come back.
        mount_new("sysfs", &self.at.join("sys"), None)?;
        self.control_groups()?;
        mount_new("proc", &self.at.join("proc"), None)
    }

    /// Devices of its own: the real `/dev` is one for the whole kernel, and removing a file there removes it for all.
    fn devices(&self) -> Result<()> {
        let dev = self.at.join("dev");
        mount_new("tmpfs", &dev, Some("mode=0755,size=1m"))?;
        for dir in ["net", "pts", "shm", "mqueue"] {
            fs::create_dir_all(dev.join(dir)).with_context(|| format!("make /dev/{dir}"))?;
        }
        for name in ["null", "zero", "full", "random", "urandom", "tty", "kmsg", "fuse", "net/tun"] {
            let Ok(meta) = fs::metadata(Path::new("/dev").join(name)) else { continue };
            let mode = Mode::from_bits_truncate(meta.mode());
            mknod(&dev.join(name), SFlag::S_IFCHR, mode, meta.rdev())
                .with_context(|| format!("make /dev/{name}"))?;
            // Not masked, unlike mknod's.
            fs::set_permissions(dev.join(name), fs::Permissions::from_mode(meta.mode() & 0o7777))?;
        }
        for (name, target) in [
            ("fd", "/proc/self/fd"),
            ("stdin", "fd/0"),
            ("stdout", "fd/1"),
            ("stderr", "fd/2"),
            ("ptmx", "pts/ptmx"),
        ] {
            symlink(target, dev.join(name)).with_context(|| format!("link /dev/{name}"))?;
        }
        mount_new("devpts", &dev.join("pts"), Some("newinstance,ptmxmode=0666,mode=0620"))?;
        mount_new("mqueue", &dev.join("mqueue"), None)?;
        mount_new("tmpfs", &dev.join("shm"), None)
    }

    /// All groups to read, its own to write.
    fn control_groups(&self) -> Result<()> {
        bind(Path::new("/sys/fs/cgroup"), &self.at.join("sys/fs/cgroup"), Write::Yes)?;
        for (hierarchy, own) in Group::at(&self.group).directories()? {
            bind(&own, &self.inside(&own), Write::Yes)?;
            read_only(&self.inside(&hierarchy))?;
        }
        Ok(())
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
    match write {
        Write::Yes => Ok(()),
        Write::No => read_only(target),
    }
}

/// This mount alone; what is mounted below it keeps its own mode.
fn read_only(target: &Path) -> Result<()> {
    let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    mount(None::<&str>, target, None::<&str>, flags, None::<&str>)
        .with_context(|| format!("make {} read-only", target.display()))
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
