//! The root file system of a machine: the host's `/usr` read-only, and its own directories for everything that a
//! node writes. Changes inside a machine do not reach the host.

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

use crate::cgroup::Cgroup;

/// The parts of a machine's root file system.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RootFs {
    /// An empty directory of the host on which to build it.
    pub mount_point: PathBuf,
    /// The directory of `/etc`, `/opt`, `/root` and `/var`, which survive a reboot.
    pub disk: PathBuf,
    /// Directories of the host that are mounted read-only, and where.
    pub read_only: Vec<(PathBuf, PathBuf)>,
    /// Symbolic links in `/usr/local/bin`: name and target.
    pub programs: Vec<(String, PathBuf)>,
    /// The machine's cgroup, which it may write, without leading slash.
    pub cgroup: String,
    /// New for every power cycle.
    pub boot_id: String,
}

/// Sysctls that the kubelet requires and that are not namespaced: files mounted over them show these values, the host's
/// real values do not change.
const MASKED_SYSCTLS: &[(&str, &str)] = &[
    ("vm/overcommit_memory", "1"),
    ("vm/panic_on_oom", "0"),
    ("kernel/panic", "10"),
    ("kernel/panic_on_oops", "1"),
    ("kernel/keys/root_maxkeys", "1000000"),
    ("kernel/keys/root_maxbytes", "25000000"),
];

impl RootFs {
    /// Builds the file system and switches the calling process to it. Called once, by the init of a new mount and pid
    /// namespace.
    pub fn enter(&self) -> Result<()> {
        mount_flags(Path::new("/"), MsFlags::MS_REC | MsFlags::MS_PRIVATE)?;
        fs::create_dir_all(&self.mount_point)
            .with_context(|| format!("create {}", self.mount_point.display()))?;
        mount_new("tmpfs", &self.mount_point, Some("mode=0755,size=1g"))?;
        self.mount_usr()?;
        self.mount_disk()?;
        self.mount_kernel_file_systems()?;
        for (source, target) in &self.read_only {
            bind(source, &self.inside(target), Access::ReadOnly)?;
        }
        let bin = self.inside(Path::new("/usr/local/bin"));
        mount_new("tmpfs", &bin, Some("mode=0755,size=1m"))?;
        for (name, target) in &self.programs {
            symlink(target, bin.join(name)).with_context(|| format!("link {name}"))?;
        }
        self.pivot()?;
        self.set_sysctls()
    }

    fn inside(&self, path: &Path) -> PathBuf {
        self.mount_point.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Mounts `/usr`, and `/bin`, `/lib` and the like as on the host.
    fn mount_usr(&self) -> Result<()> {
        for name in ["usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"] {
            let source = Path::new("/").join(name);
            let target = self.mount_point.join(name);
            match fs::symlink_metadata(&source) {
                Ok(meta) if meta.is_symlink() => {
                    let to = fs::read_link(&source)?;
                    symlink(&to, &target).with_context(|| format!("link {}", target.display()))?;
                }
                Ok(_) => bind(&source, &target, Access::ReadOnly)?,
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(e).with_context(|| format!("stat {}", source.display())),
            }
        }
        Ok(())
    }

    fn mount_disk(&self) -> Result<()> {
        for name in ["etc", "opt", "root", "var"] {
            let source = self.disk.join(name);
            fs::create_dir_all(&source).with_context(|| format!("create {}", source.display()))?;
            bind(&source, &self.mount_point.join(name), Access::ReadWrite)?;
        }
        for name in ["tmp", "run", "run/lab", "run/lock", "mnt", "home"] {
            let dir = self.mount_point.join(name);
            fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
        }
        for (name, target) in [("run", "/run"), ("lock", "/run/lock")] {
            match symlink(target, self.mount_point.join("var").join(name)) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e).context("link /var/run"),
                _ => {}
            }
        }
        for name in ["var/tmp", "var/lib", "var/log", "var/cache"] {
            let dir = self.mount_point.join(name);
            fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
        }
        Ok(())
    }

    fn mount_kernel_file_systems(&self) -> Result<()> {
        self.mount_dev()?;
        // A fresh sysfs shows only the NICs of this network namespace. It hides the cgroup mounts, so bind them again.
        mount_new("sysfs", &self.mount_point.join("sys"), None)?;
        self.mount_cgroups()?;
        mount_new("proc", &self.mount_point.join("proc"), None)
    }

    /// Creates a private `/dev`: a file that a node removes from the host's `/dev` would be removed for the host, too.
    fn mount_dev(&self) -> Result<()> {
        let dev = self.mount_point.join("dev");
        mount_new("tmpfs", &dev, Some("mode=0755,size=1m"))?;
        for dir in ["net", "pts", "shm", "mqueue"] {
            fs::create_dir_all(dev.join(dir)).with_context(|| format!("create /dev/{dir}"))?;
        }
        for name in ["null", "zero", "full", "random", "urandom", "tty", "kmsg", "fuse", "net/tun"] {
            let Ok(meta) = fs::metadata(Path::new("/dev").join(name)) else { continue };
            let mode = Mode::from_bits_truncate(meta.mode());
            mknod(&dev.join(name), SFlag::S_IFCHR, mode, meta.rdev())
                .with_context(|| format!("create /dev/{name}"))?;
            // mknod applies the umask, chmod does not.
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

    /// Mounts all cgroups read-only and the machine's own read-write.
    fn mount_cgroups(&self) -> Result<()> {
        bind(Path::new("/sys/fs/cgroup"), &self.mount_point.join("sys/fs/cgroup"), Access::ReadWrite)?;
        for (hierarchy, own) in Cgroup::at(&self.cgroup).directories()? {
            bind(&own, &self.inside(&own), Access::ReadWrite)?;
            remount_read_only(&self.inside(&hierarchy))?;
        }
        Ok(())
    }

    fn pivot(&self) -> Result<()> {
        std::env::set_current_dir(&self.mount_point).context("enter the new root")?;
        pivot_root(".", ".").context("switch to the new root")?;
        umount2(".", MntFlags::MNT_DETACH).context("unmount the old root")?;
        std::env::set_current_dir("/").context("enter /")?;
        // The kubelet and pods with mount propagation need a shared root; systemd makes it shared on real hosts.
        mount_flags(Path::new("/"), MsFlags::MS_REC | MsFlags::MS_SHARED)
    }

    fn set_sysctls(&self) -> Result<()> {
        mask("sys/kernel/random/boot_id", &format!("{}\n", self.boot_id))?;
        for (name, value) in MASKED_SYSCTLS {
            mask(&format!("sys/{name}"), value)?;
        }
        mask("cgroups", &mounted_controllers()?)?;
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

/// Mounts a file with this content over a file of `/proc`, if that exists.
fn mask(name: &str, content: &str) -> Result<()> {
    let target = Path::new("/proc").join(name);
    if !target.exists() {
        return Ok(());
    }
    let file = Path::new("/run/lab").join(name.trim_start_matches("sys/").replace('/', "."));
    fs::write(&file, content).with_context(|| format!("write {}", file.display()))?;
    mount(Some(&file), &target, None::<&str>, MsFlags::MS_BIND, None::<&str>)
        .with_context(|| format!("mask {} with {content}", target.display()))
}

/// The content of `/proc/cgroups`, with the controllers disabled that have no hierarchy: CRI-O sets limits for each
/// enabled one and fails where it is not mounted. With cgroup v2 alone, no controller has a hierarchy of its own.
fn mounted_controllers() -> Result<String> {
    let text = fs::read_to_string("/proc/cgroups").context("read /proc/cgroups")?;
    Ok(disable_unmounted(&text))
}

fn disable_unmounted(text: &str) -> String {
    let hierarchy = |line: &str| line.split('\t').nth(1).and_then(|id| id.parse::<u32>().ok());
    if !text.lines().any(|line| hierarchy(line).is_some_and(|id| id > 0)) {
        return text.to_owned();
    }
    let disable = |line: &str| match line.strip_suffix("\t1") {
        Some(rest) if hierarchy(line) == Some(0) => format!("{rest}\t0\n"),
        _ => format!("{line}\n"),
    };
    text.lines().map(disable).collect()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    ReadWrite,
    ReadOnly,
}

fn bind(source: &Path, target: &Path, access: Access) -> Result<()> {
    fs::create_dir_all(target).with_context(|| format!("create {}", target.display()))?;
    let flags = MsFlags::MS_BIND | MsFlags::MS_REC;
    mount(Some(source), target, None::<&str>, flags, None::<&str>)
        .with_context(|| format!("bind {} to {}", source.display(), target.display()))?;
    mount_flags(target, MsFlags::MS_REC | MsFlags::MS_PRIVATE)?;
    match access {
        Access::ReadWrite => Ok(()),
        Access::ReadOnly => remount_read_only(target),
    }
}

/// Remounts this mount read-only, without the mounts below it.
fn remount_read_only(target: &Path) -> Result<()> {
    let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    mount(None::<&str>, target, None::<&str>, flags, None::<&str>)
        .with_context(|| format!("make {} read-only", target.display()))
}

fn mount_new(kind: &str, target: &Path, options: Option<&str>) -> Result<()> {
    fs::create_dir_all(target).with_context(|| format!("create {}", target.display()))?;
    mount(Some(kind), target, Some(kind), MsFlags::empty(), options)
        .with_context(|| format!("mount {kind} on {}", target.display()))
}

fn mount_flags(target: &Path, flags: MsFlags) -> Result<()> {
    mount(None::<&str>, target, None::<&str>, flags, None::<&str>)
        .with_context(|| format!("set {flags:?} on {}", target.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn controllers_without_a_hierarchy_are_disabled_unless_all_are() {
        let heading = "#subsys_name\thierarchy\tnum_cgroups\tenabled\n";
        let version_1 = format!("{heading}cpu\t1\t34\t1\nhugetlb\t0\t34\t1\n");
        assert_eq!(disable_unmounted(&version_1), format!("{heading}cpu\t1\t34\t1\nhugetlb\t0\t34\t0\n"));
        let version_2 = format!("{heading}cpu\t0\t34\t1\nhugetlb\t0\t34\t1\n");
        assert_eq!(disable_unmounted(&version_2), version_2);
    }
}
