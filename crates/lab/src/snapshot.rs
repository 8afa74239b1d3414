//! A snapshot of everything on the host that a lab could leave behind, so that a test can compare before and after. Labs in
//! another state directory may come and go meanwhile.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Result;

use crate::{cgroup::is_zombie, machine::capture, paths};

/// Links, mounts, lab processes, cgroups and files of the host, one line of text each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostSnapshot {
    lines: BTreeSet<String>,
}

impl HostSnapshot {
    /// Takes a snapshot.
    pub fn take() -> Result<Self> {
        let mut lines = BTreeSet::new();
        let links = capture(Command::new("ip").args(["-o", "link", "show"]))?;
        let name = |line: &str| line.split(": ").nth(1).unwrap_or(line).to_owned();
        lines.extend(links.lines().map(|line| format!("link {}", name(line))));
        let mounts = fs::read_to_string("/proc/self/mountinfo")?;
        let target = |line: &str| line.split(' ').nth(4).unwrap_or_default().to_owned();
        lines.extend(mounts.lines().map(|line| format!("mount {}", target(line))));
        lines.extend(processes());
        lines.extend(cgroups().into_iter().map(|d| format!("cgroup {}", d.display())));
        // Including hidden files.
        lines.extend(entries(&paths::state_dir()).iter().map(|path| format!("file {}", path.display())));
        // Paths of the host that a node's programs would create if they escaped from their mount namespace.
        let escaped = [
            "/opt/cni",
            "/etc/cni",
            "/var/lib/cni",
            "/var/lib/kubelet",
            "/run/netns",
            "/run/multus",
            "/run/nri",
            "/run/containerd",
        ];
        lines.extend(
            escaped.into_iter().filter(|path| Path::new(path).exists()).map(|path| format!("file {path}")),
        );
        Ok(Self { lines })
    }

    /// Lines of this snapshot that `before` does not have.
    pub fn added_since(&self, before: &Self) -> Vec<String> {
        self.lines.difference(&before.lines).cloned().collect()
    }

    /// Lines of `before` that this snapshot does not have.
    pub fn removed_since(&self, before: &Self) -> Vec<String> {
        before.added_since(self)
    }
}

/// Processes in a lab's cgroup, and processes of the `lab` program in any cgroup.
fn processes() -> Vec<String> {
    let mut lines = Vec::new();
    for entry in entries(Path::new("/proc")) {
        let read = |file: &str| fs::read_to_string(entry.join(file)).unwrap_or_default();
        let command = read("cmdline").replace('\0', " ");
        let mut words = command.split(' ');
        let lab = words.next().is_some_and(|program| program.ends_with("/lab"))
            && words.next().is_some_and(|verb| ["machine", "init", "forward", "enter"].contains(&verb));
        // Zombies are left out: the host's init reaps them at some later time.
        let pid = entry.file_name().and_then(|name| name.to_str()?.parse().ok());
        let cgroups = read("cgroup");
        let foreign = is_foreign(&cgroups);
        if !pid.is_some_and(is_zombie) && !foreign && (lab || cgroups.contains(paths::CGROUP_PREFIX)) {
            lines.push(format!("process {} {command}", entry.display()));
        }
    }
    lines
}

/// Whether a file /proc/…/cgroup names a lab in another state directory.
fn is_foreign(cgroups: &str) -> bool {
    cgroups.split(['/', '\n']).any(paths::is_foreign_cgroup)
}

/// The namespaces of the given processes that are not namespaces of the current process.
pub fn namespaces_of(pids: &[i32]) -> BTreeSet<PathBuf> {
    let links = |pid: &str| -> BTreeSet<PathBuf> {
        let kinds = ["net", "mnt", "pid", "uts", "ipc"].into_iter();
        kinds.filter_map(|kind| fs::read_link(format!("/proc/{pid}/ns/{kind}")).ok()).collect()
    };
    let own = links("self");
    pids.iter().flat_map(|pid| links(&pid.to_string())).filter(|namespace| !own.contains(namespace)).collect()
}

/// The processes of the host that are in one of the given namespaces. Not those of a lab in another state directory: it may
/// have got the inode number of a namespace that was removed.
pub fn processes_in(namespaces: &BTreeSet<PathBuf>) -> Vec<i32> {
    let pids = entries(Path::new("/proc")).into_iter();
    let pids = pids.filter_map(|path| path.file_name()?.to_str()?.parse::<i32>().ok());
    let foreign =
        |pid: i32| fs::read_to_string(format!("/proc/{pid}/cgroup")).is_ok_and(|text| is_foreign(&text));
    pids.filter(|pid| !is_zombie(*pid) && !namespaces_of(&[*pid]).is_disjoint(namespaces))
        .filter(|pid| !foreign(*pid))
        .collect()
}

/// The first two levels: hierarchies and the cgroups directly below their roots. Other programs create and remove
/// deeper cgroups at any time; the cgroups of a lab are on these levels.
fn cgroups() -> Vec<PathBuf> {
    let roots = directories(Path::new("/sys/fs/cgroup"));
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let own = |path: &PathBuf| !paths::is_foreign_cgroup(&name(path));
    roots.iter().flat_map(|root| directories(root)).chain(roots.clone()).filter(own).collect()
}

fn directories(dir: &Path) -> Vec<PathBuf> {
    entries(dir).into_iter().filter(|path| path.is_dir() && !path.is_symlink()).collect()
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}
