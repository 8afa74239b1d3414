//! The cgroups of a machine. Every process of a machine starts inside them, so they also list the processes that are
//! alive: no stale pid files, and no process is lost after `kill -9`.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{
    paths::{self, LabName},
    wait,
};

const MOUNT: &str = "/sys/fs/cgroup";
/// The leaf cgroup of a machine's own processes; the kubelet creates those of pods beside it.
const HOST_LEAF: &str = "host";

/// A cgroup by its path below the root of every hierarchy, such as `patchbay-lab.default/node-1`.
#[derive(Clone, Debug)]
pub struct Cgroup {
    path: String,
}

/// A mounted cgroup hierarchy.
struct CgroupHierarchy {
    mount: PathBuf,
    version: CgroupVersion,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum CgroupVersion {
    V1,
    /// Unified: the only hierarchy of the host, with controllers.
    V2,
    /// Version 2 beside version 1 hierarchies: tracks processes, has no controllers.
    Hybrid,
}

fn hierarchies() -> Result<Vec<CgroupHierarchy>> {
    let text = fs::read_to_string("/proc/self/mountinfo").context("read mountinfo")?;
    let mut all: Vec<(PathBuf, bool)> = Vec::new();
    for line in text.lines() {
        let Some((left, right)) = line.split_once(" - ") else {
            continue;
        };
        let Some(mount) = left.split(' ').nth(4) else {
            continue;
        };
        match right.split(' ').next() {
            Some("cgroup") if mount.starts_with(MOUNT) => all.push((mount.into(), false)),
            Some("cgroup2") if mount.starts_with(MOUNT) => all.push((mount.into(), true)),
            _ => {}
        }
    }
    all.sort();
    all.dedup();
    if all.is_empty() {
        bail!("no cgroup hierarchy is mounted below {MOUNT}");
    }
    let has_v1 = all.iter().any(|(_, v2)| !v2);
    let version = |v2| match (v2, has_v1) {
        (false, _) => CgroupVersion::V1,
        (true, true) => CgroupVersion::Hybrid,
        (true, false) => CgroupVersion::V2,
    };
    Ok(all.into_iter().map(|(mount, v2)| CgroupHierarchy { mount, version: version(v2) }).collect())
}

impl Cgroup {
    /// The parent cgroup of a lab's machines.
    pub fn of_lab(lab: &LabName) -> Self {
        Self { path: paths::cgroup_name(lab) }
    }

    /// The cgroup at a path without leading slash.
    pub fn at(path: &str) -> Self {
        Self { path: path.to_owned() }
    }

    /// The cgroup of one machine.
    pub fn child(&self, name: &str) -> Self {
        Self { path: format!("{}/{name}", self.path) }
    }

    /// The path with a leading slash, as the kubelet's `cgroupRoot` takes it.
    pub fn root(&self) -> String {
        format!("/{}", self.path)
    }

    /// Creates the cgroup in every hierarchy, ready for processes and for the kubelet's pods.
    pub fn create(&self) -> Result<()> {
        for hierarchy in hierarchies()? {
            let mut dir = hierarchy.mount.clone();
            for part in &Path::new(&self.path).join(HOST_LEAF) {
                if hierarchy.version == CgroupVersion::V2 {
                    // Fails for a controller that is missing or already enabled; both are fine.
                    for controller in ["+cpu", "+cpuset", "+memory", "+pids", "+io"] {
                        let _ = fs::write(dir.join("cgroup.subtree_control"), controller);
                    }
                }
                let parent = dir.clone();
                dir.push(part);
                create_dir(&dir)?;
                if hierarchy.version == CgroupVersion::V1 {
                    inherit_cpuset(&parent, &dir)?;
                }
            }
        }
        Ok(())
    }

    /// Moves the calling process into the cgroup; its children start there.
    pub fn enter(&self) -> Result<()> {
        for hierarchy in hierarchies()? {
            let procs = hierarchy.mount.join(&self.path).join(HOST_LEAF).join("cgroup.procs");
            fs::write(&procs, "0").with_context(|| format!("enter {}", procs.display()))?;
        }
        Ok(())
    }

    /// Every process of the cgroup and of its descendants.
    pub fn processes(&self) -> Vec<i32> {
        let mut pids = Vec::new();
        for hierarchy in hierarchies().unwrap_or_default() {
            walk(&hierarchy.mount.join(&self.path), &mut |dir| {
                let text = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
                pids.extend(text.lines().filter_map(|l| l.parse::<i32>().ok()));
            });
        }
        pids.sort_unstable();
        pids.dedup();
        // 0 is a process of a pid namespace that is not visible from here.
        pids.retain(|pid| *pid > 0);
        pids
    }

    /// The init process of the machine's pid namespace, as a pid of the host.
    pub fn init(&self) -> Option<i32> {
        let leaf = Self { path: format!("{}/{HOST_LEAF}", self.path) };
        leaf.processes().into_iter().find(|pid| is_namespace_init(*pid))
    }

    /// Kills every process in the cgroup and removes it. Succeeds if the cgroup does not exist.
    pub fn destroy(&self) -> Result<()> {
        let mut killed = BTreeSet::new();
        // Kill and remove in one loop: a process that is being started may enter the cgroup meanwhile.
        wait::blocking(
            Duration::from_secs(30),
            &format!("cgroup {} to be empty and removed", self.path),
            || {
                for pid in self.processes() {
                    // Fails if the process has already exited.
                    let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
                    killed.insert(pid);
                    // SIGKILL does not take effect in a frozen cgroup.
                    self.thaw();
                }
                for hierarchy in hierarchies()? {
                    remove(&hierarchy.mount.join(&self.path));
                }
                Ok((!self.exists()).then_some(()))
            },
        )?;
        // Zombies have left the cgroup, but stay until the host's init reaps them. An init that never does
        // (a container without one) is no failure.
        let _ = wait::blocking(Duration::from_secs(3), "the killed processes to be reaped", || {
            Ok((!killed.iter().any(|pid| is_zombie(*pid))).then_some(()))
        });
        Ok(())
    }

    /// The resident memory of all processes in bytes, without the page cache.
    pub fn memory(&self) -> u64 {
        let stat = |file: &str| fs::read_to_string(file).unwrap_or_default();
        let page: u64 = 4096;
        self.processes()
            .into_iter()
            .filter_map(|pid| stat(&format!("/proc/{pid}/statm")).split(' ').nth(1)?.parse::<u64>().ok())
            .sum::<u64>()
            * page
    }

    fn thaw(&self) {
        walk(&Path::new(MOUNT).join("freezer").join(&self.path), &mut |dir| {
            let _ = fs::write(dir.join("freezer.state"), "THAWED");
        });
    }

    /// For each hierarchy: its mount point and this cgroup's directory.
    pub fn directories(&self) -> Result<Vec<(PathBuf, PathBuf)>> {
        let all = hierarchies()?.into_iter();
        Ok(all.map(|h| (h.mount.clone(), h.mount.join(&self.path))).collect())
    }

    /// Whether any hierarchy has the cgroup.
    pub fn exists(&self) -> bool {
        hierarchies().unwrap_or_default().iter().any(|h| h.mount.join(&self.path).exists())
    }
}

/// Whether a process is the init of a pid namespace directly below the host's.
fn is_namespace_init(pid: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let Some(line) = status.lines().find(|l| l.starts_with("NSpid:")) else {
        return false;
    };
    let numbers: Vec<&str> = line.split_whitespace().skip(1).collect();
    !is_zombie(pid) && numbers.len() == 2 && numbers[1] == "1"
}

/// Whether a process has exited and is not reaped yet.
pub fn is_zombie(pid: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.lines().any(|l| l.starts_with("State:") && l.contains('Z'))
}

fn create_dir(dir: &Path) -> Result<()> {
    match fs::create_dir(dir) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
            Err(e).with_context(|| format!("create cgroup {}", dir.display()))
        }
        _ => Ok(()),
    }
}

/// Copies the parent's cpuset: cgroup v1 creates it empty, and no process can enter an empty cpuset.
fn inherit_cpuset(parent: &Path, dir: &Path) -> Result<()> {
    for file in ["cpuset.cpus", "cpuset.mems"] {
        let target = dir.join(file);
        if !target.exists() || !fs::read_to_string(&target)?.trim().is_empty() {
            continue;
        }
        let value = fs::read_to_string(parent.join(file))?;
        fs::write(&target, value.trim()).with_context(|| format!("fill {}", target.display()))?;
    }
    Ok(())
}

/// Visits a directory and all its descendants, deepest first.
fn walk(dir: &Path, visit: &mut impl FnMut(&Path)) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            walk(&entry.path(), visit);
        }
    }
    visit(dir);
}

/// Removes the empty cgroups; a cgroup stays busy for a moment after its last process was reaped.
fn remove(dir: &Path) {
    walk(dir, &mut |d| {
        let _ = fs::remove_dir(d);
    });
}
