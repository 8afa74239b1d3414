//! What this machine has of the things that a lab makes, so that a test can compare before and after.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Result;

use crate::{cgroup::is_zombie, machine::capture, place};

/// Links, mounts, processes, network namespaces, cgroups and files, each in one line of text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostSnapshot {
    lines: BTreeSet<String>,
}

impl HostSnapshot {
    /// Looks at this machine.
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
        // Raw, with what begins with a dot.
        lines.extend(entries(&place::labs()).iter().map(|path| format!("file {}", path.display())));
        // Where a node's programs would leave things if they were let out.
        let astray = [
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
            astray.into_iter().filter(|path| Path::new(path).exists()).map(|path| format!("file {path}")),
        );
        Ok(Self { lines })
    }

    /// What is there now and was not then.
    pub fn added_since(&self, before: &Self) -> Vec<String> {
        self.lines.difference(&before.lines).cloned().collect()
    }

    /// What was there then and is not now.
    pub fn removed_since(&self, before: &Self) -> Vec<String> {
        before.added_since(self)
    }
}

/// Processes of a lab: those in a lab's cgroup, and the lab's own program wherever it is.
fn processes() -> Vec<String> {
    let mut lines = Vec::new();
    for entry in entries(Path::new("/proc")) {
        let read = |file: &str| fs::read_to_string(entry.join(file)).unwrap_or_default();
        let command = read("cmdline").replace('\0', " ");
        let mut words = command.split(' ');
        let lab = words.next().is_some_and(|program| program.ends_with("/lab"))
            && words.next().is_some_and(|verb| ["machine", "init", "forward", "enter"].contains(&verb));
        // The dead belong to this machine's init, which takes note of them when it gets to it.
        let pid = entry.file_name().and_then(|name| name.to_str()?.parse().ok());
        if !pid.is_some_and(is_zombie) && (lab || read("cgroup").contains(place::GROUP)) {
            lines.push(format!("process {} {command}", entry.display()));
        }
    }
    lines
}

/// The namespaces that the given processes live in and this one does not.
pub fn namespaces_of(pids: &[i32]) -> BTreeSet<PathBuf> {
    let links = |pid: &str| -> BTreeSet<PathBuf> {
        let kinds = ["net", "mnt", "pid", "uts", "ipc"].into_iter();
        kinds.filter_map(|kind| fs::read_link(format!("/proc/{pid}/ns/{kind}")).ok()).collect()
    };
    let ours = links("self");
    pids.iter()
        .flat_map(|pid| links(&pid.to_string()))
        .filter(|namespace| !ours.contains(namespace))
        .collect()
}

/// The processes of this machine that live in one of the given namespaces.
pub fn processes_in(of: &BTreeSet<PathBuf>) -> Vec<i32> {
    let pids = entries(Path::new("/proc")).into_iter();
    let pids = pids.filter_map(|path| path.file_name()?.to_str()?.parse::<i32>().ok());
    pids.filter(|pid| !is_zombie(*pid) && !namespaces_of(&[*pid]).is_disjoint(of)).collect()
}

/// The first two levels: hierarchies, and what stands right below their roots. Others make and remove groups inside
/// their own all the time; a lab, and whatever escapes from it, would show here.
fn cgroups() -> Vec<PathBuf> {
    let roots = directories(Path::new("/sys/fs/cgroup"));
    roots.iter().flat_map(|root| directories(root)).chain(roots.clone()).collect()
}

fn directories(dir: &Path) -> Vec<PathBuf> {
    entries(dir).into_iter().filter(|path| path.is_dir() && !path.is_symlink()).collect()
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}
