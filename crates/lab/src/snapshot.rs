//! What this machine has of the things that a lab makes, so that a test can compare before and after.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Result;

use crate::{machine::capture, place};

/// Links, mounts, processes, network namespaces, cgroups and files, each in one line of text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    lines: BTreeSet<String>,
}

impl Snapshot {
    /// Looks at this machine.
    pub fn take() -> Result<Self> {
        let mut lines = BTreeSet::new();
        let links = capture(Command::new("ip").args(["-o", "link", "show"]))?;
        let name = |line: &str| line.split(": ").nth(1).unwrap_or(line).to_owned();
        lines.extend(links.lines().map(|line| format!("link {}", name(line))));
        let mounts = fs::read_to_string("/proc/self/mountinfo")?;
        let target = |line: &str| line.split(' ').nth(4).unwrap_or_default().to_owned();
        lines.extend(mounts.lines().map(|line| format!("mount {}", target(line))));
        lines.extend(namespaces());
        lines.extend(cgroups().into_iter().map(|d| format!("cgroup {}", d.display())));
        lines.extend(place::known().into_iter().map(|lab| format!("lab {lab}")));
        Ok(Self { lines })
    }

    /// What is there now and was not then.
    pub fn since(&self, before: &Self) -> Vec<String> {
        self.lines.difference(&before.lines).cloned().collect()
    }

    /// What was there then and is not now.
    pub fn missing(&self, before: &Self) -> Vec<String> {
        before.since(self)
    }
}

/// Processes and namespaces that can be a lab's: those with files or pids of their own, and the lab's own program.
/// Other tests make network namespaces at the same time; these are not ours to judge.
fn namespaces() -> Vec<String> {
    let mut lines = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<i32>().ok()) else {
            continue;
        };
        let foreign = |kind: &str| {
            let theirs = fs::read_link(entry.path().join("ns").join(kind)).ok()?;
            let ours = fs::read_link(Path::new("/proc/self/ns").join(kind)).ok()?;
            (ours != theirs).then(|| theirs.display().to_string())
        };
        if foreign("mnt").is_some() || foreign("pid").is_some() {
            lines.push(format!("process {pid}"));
            lines.extend(["net", "mnt", "pid", "uts", "ipc"].into_iter().filter_map(foreign));
        }
        let command = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let mut words = command.split(|b| *b == 0).map(String::from_utf8_lossy);
        let program = words.next().unwrap_or_default().into_owned();
        let verb = words.next().unwrap_or_default().into_owned();
        if program.ends_with("/lab") && ["machine", "init", "forward"].contains(&verb.as_str()) {
            lines.push(format!("process {pid} {program} {verb}"));
        }
    }
    lines
}

/// The first two levels: hierarchies, and what stands right below their roots. Others make and remove groups inside
/// their own all the time; a lab, and whatever escapes from it, would show here.
fn cgroups() -> Vec<PathBuf> {
    let roots = directories(Path::new("/sys/fs/cgroup"));
    roots.iter().flat_map(|root| directories(root)).chain(roots.clone()).collect()
}

fn directories(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter(|e| e.file_type().is_ok_and(|t| t.is_dir())).map(|e| e.path()).collect()
}
