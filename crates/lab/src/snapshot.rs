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
        lines.extend(directories(Path::new("/sys/fs/cgroup")).into_iter().map(|d| format!("cgroup {}", d.display())));
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

/// Every namespace that a process lives in, with the programs of the namespaces that are not ours. Processes of our own
/// namespaces come and go with the tests themselves; those of a lab are told by where they live or by their program.
fn namespaces() -> Vec<String> {
    let mut lines = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<i32>().ok()) else { continue };
        let read = |path: PathBuf| fs::read_link(path).ok();
        for kind in ["net", "mnt", "pid", "uts", "ipc"] {
            let Some(theirs) = read(entry.path().join("ns").join(kind)) else { continue };
            if read(Path::new("/proc/self/ns").join(kind)).is_some_and(|ours| ours != theirs) {
                lines.push(format!("namespace {}", theirs.display()));
            }
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

fn directories(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            found.extend(directories(&entry.path()));
            found.push(entry.path());
        }
    }
    found
}
