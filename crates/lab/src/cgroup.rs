//! The control groups of a machine. Everything that runs in a machine is born inside its groups, so they also are
//! the register of what is alive: no pid file can lie, and nothing that `kill -9` leaves behind is lost.

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
    place::{self, Name},
    wait,
};

const MOUNT: &str = "/sys/fs/cgroup";
/// The leaf that holds a machine's own processes; pods get siblings of it.
const OWN: &str = "host";

/// A path below every hierarchy's root, such as `patchbay-lab.default/node-1`.
#[derive(Clone, Debug)]
pub struct Group {
    path: String,
}

/// One mounted hierarchy.
struct Hierarchy {
    mount: PathBuf,
    version: Version,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Version {
    V1,
    /// The only hierarchy of the machine, with controllers.
    V2,
    /// Version 2 beside version 1: tracks processes, has no controllers.
    Named,
}

fn hierarchies() -> Result<Vec<Hierarchy>> {
    let text = fs::read_to_string("/proc/self/mountinfo").context("read the mounts")?;
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
    let mixed = all.iter().any(|(_, v2)| !v2);
    let version = |v2| match (v2, mixed) {
        (false, _) => Version::V1,
        (true, true) => Version::Named,
        (true, false) => Version::V2,
    };
    Ok(all.into_iter().map(|(mount, v2)| Hierarchy { mount, version: version(v2) }).collect())
}

impl Group {
    /// The group that holds all machines of a lab.
    pub fn of_lab(lab: &Name) -> Self {
        Self { path: place::group(lab) }
    }

    /// The group at a path as [`Group::root`] gives it, without the leading slash.
    pub fn at(path: &str) -> Self {
        Self { path: path.to_owned() }
    }

    /// The group of one machine.
    pub fn child(&self, name: &str) -> Self {
        Self { path: format!("{}/{name}", self.path) }
    }

    /// The path as the kubelet wants it.
    pub fn root(&self) -> String {
        format!("/{}", self.path)
    }

    /// Makes the group in every hierarchy, usable for processes and for the kubelet's pods.
    pub fn create(&self) -> Result<()> {
        for hierarchy in hierarchies()? {
            let mut dir = hierarchy.mount.clone();
            for part in &Path::new(&self.path).join(OWN) {
                if hierarchy.version == Version::V2 {
                    // A controller that is not there or is on already is no reason to stop.
                    for controller in ["+cpu", "+cpuset", "+memory", "+pids", "+io"] {
                        let _ = fs::write(dir.join("cgroup.subtree_control"), controller);
                    }
                }
                let parent = dir.clone();
                dir.push(part);
                make(&dir)?;
                if hierarchy.version == Version::V1 {
                    inherit_cpuset(&parent, &dir)?;
                }
            }
        }
        Ok(())
    }

    /// Moves the calling process into the group; its children are born there.
    pub fn enter(&self) -> Result<()> {
        for hierarchy in hierarchies()? {
            let procs = hierarchy.mount.join(&self.path).join(OWN).join("cgroup.procs");
            fs::write(&procs, "0").with_context(|| format!("enter {}", procs.display()))?;
        }
        Ok(())
    }

    /// Every process of the group and below it.
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
        // 0 stands for a process of another pid namespace that cannot be named here.
        pids.retain(|pid| *pid > 0);
        pids
    }

    /// The first process of the machine's pid namespace, as numbered here.
    pub fn init(&self) -> Option<i32> {
        let own = Self { path: format!("{}/{OWN}", self.path) };
        own.processes().into_iter().find(|pid| is_first(*pid))
    }

    /// Kills everything in the group and removes it. Nothing there is success.
    pub fn destroy(&self) -> Result<()> {
        let mut killed = BTreeSet::new();
        // One loop: something that was just being started may enter while we remove.
        wait::blocking(Duration::from_secs(30), &format!("{} to be empty and gone", self.path), || {
            for pid in self.processes() {
                // Gone already is what we want.
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
                killed.insert(pid);
                // A frozen group would never die.
                self.thaw();
            }
            for hierarchy in hierarchies()? {
                remove(&hierarchy.mount.join(&self.path));
            }
            Ok((!self.exists()).then_some(()))
        })?;
        // The dead leave the group at once but are processes until their parent, this machine's init, has taken note.
        // One that never does so (a container without an init) is no reason to fail.
        let _ = wait::blocking(Duration::from_secs(3), "the dead to be buried", || {
            Ok((!killed.iter().any(|pid| is_zombie(*pid))).then_some(()))
        });
        Ok(())
    }

    /// Memory in use by processes, in bytes, without caches.
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

    /// The group's directory in each hierarchy, with the hierarchy's mount.
    pub fn directories(&self) -> Result<Vec<(PathBuf, PathBuf)>> {
        let all = hierarchies()?.into_iter();
        Ok(all.map(|h| (h.mount.clone(), h.mount.join(&self.path))).collect())
    }

    /// Whether any hierarchy still has the group.
    pub fn exists(&self) -> bool {
        hierarchies().unwrap_or_default().iter().any(|h| h.mount.join(&self.path).exists())
    }
}

/// Whether a process is the first one of a pid namespace below ours.
fn is_first(pid: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let Some(line) = status.lines().find(|l| l.starts_with("NSpid:")) else {
        return false;
    };
    let numbers: Vec<&str> = line.split_whitespace().skip(1).collect();
    !is_zombie(pid) && numbers.len() == 2 && numbers[1] == "1"
}

/// Whether a process has ended and its parent has not taken note yet.
pub fn is_zombie(pid: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.lines().any(|l| l.starts_with("State:") && l.contains('Z'))
}

fn make(dir: &Path) -> Result<()> {
    match fs::create_dir(dir) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
            Err(e).with_context(|| format!("make cgroup {}", dir.display()))
        }
        _ => Ok(()),
    }
}

/// Version 1 leaves a new cpuset empty, and no process can enter an empty one.
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

/// Visits a directory and all below it, deepest first.
fn walk(dir: &Path, visit: &mut impl FnMut(&Path)) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            walk(&entry.path(), visit);
        }
    }
    visit(dir);
}

/// Removes what is empty; a group stays busy for a moment after its last process was reaped.
fn remove(dir: &Path) {
    walk(dir, &mut |d| {
        let _ = fs::remove_dir(d);
    });
}
