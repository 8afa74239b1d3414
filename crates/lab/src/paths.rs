//! The paths of the lab: a cache of built programs that outlives every lab, and one state directory per lab that
//! `down` removes.

use std::{
    env, fmt, fs,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    str::FromStr,
};

use anyhow::{Context, Result, bail};

use crate::digest::sha256_hex;

/// The name of a lab; part of its paths and cgroup names.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LabName(String);

impl LabName {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for LabName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for LabName {
    type Err = anyhow::Error;

    fn from_str(s: &str) -> Result<Self> {
        let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if s.is_empty() || s.len() > 30 || !s.chars().all(allowed) || s.starts_with('-') {
            bail!(
                "invalid lab name {s:?}; use 1 to 30 characters of a-z, 0-9 and '-', not starting with '-'"
            );
        }
        Ok(Self(s.to_owned()))
    }
}

/// The cache of built programs and images; `PATCHBAY_CACHE` overrides it.
pub fn cache_dir() -> Result<PathBuf> {
    if let Some(dir) = env::var_os("PATCHBAY_CACHE") {
        return Ok(dir.into());
    }
    let home = env::var_os("HOME").context("no cache directory; set HOME or PATCHBAY_CACHE")?;
    Ok(Path::new(&home).join(".cache/patchbay"))
}

/// The parent of all labs' directories; `PATCHBAY_LAB_STATE` overrides it.
pub fn state_dir() -> PathBuf {
    env::var_os("PATCHBAY_LAB_STATE").map_or_else(|| "/var/lib/patchbay-lab".into(), PathBuf::from)
}

/// The name of a lab's cgroup. Labs of the same name in different state directories are different labs.
pub fn cgroup_name(name: &LabName) -> String {
    match state_digest() {
        None => format!("{CGROUP_PREFIX}{name}"),
        Some(digest) => format!("{CGROUP_PREFIX}{name}.{digest}"),
    }
}

/// What distinguishes the cgroups of labs in another state directory than the default one.
fn state_digest() -> Option<String> {
    env::var_os("PATCHBAY_LAB_STATE").map(|dir| sha256_hex(dir.as_encoded_bytes())[..8].to_owned())
}

/// Whether a cgroup with this name belongs to a lab in another state directory.
pub fn is_foreign_cgroup(name: &str) -> bool {
    is_foreign(name, state_digest().as_deref())
}

fn is_foreign(name: &str, own_digest: Option<&str>) -> bool {
    let lab = name.strip_prefix(CGROUP_PREFIX);
    lab.is_some_and(|lab| lab.split_once('.').map(|(_, digest)| digest) != own_digest)
}

/// The prefix of all labs' cgroup names.
pub const CGROUP_PREFIX: &str = "patchbay-lab.";

/// Creates the state directory, accessible to root only.
pub fn create_state_dir() -> std::io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(state_dir())
}

/// Removes a directory atomically: renames it first, so that an interrupted removal leaves no partial lab.
pub fn remove_dir(dir: &Path) -> Result<()> {
    let name = dir.file_name().and_then(|n| n.to_str()).context("the directory has no name")?;
    let renamed = dir.with_file_name(format!(".{name}.gone"));
    delete(&renamed)?;
    match fs::rename(dir, &renamed) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        other => other.with_context(|| format!("remove {}", dir.display()))?,
    }
    delete(&renamed)
}

fn delete(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(e).with_context(|| format!("remove {}", dir.display()))
        }
        _ => Ok(()),
    }
}

/// The directory of one lab.
pub fn lab_dir(name: &LabName) -> PathBuf {
    state_dir().join(name.as_str())
}

/// The names of all labs that have a directory or a cgroup.
pub fn existing_labs() -> Vec<LabName> {
    let listed = |dir: &Path| -> Vec<String> {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        entries.filter_map(|e| e.file_name().into_string().ok()).collect()
    };
    let mut names: Vec<LabName> = listed(&state_dir()).iter().filter_map(|n| n.parse().ok()).collect();
    let hierarchies = Path::new("/sys/fs/cgroup");
    for dir in listed(hierarchies).iter().map(|d| hierarchies.join(d)).chain([hierarchies.into()]) {
        let found = listed(&dir);
        let ours = found
            .iter()
            .filter_map(|n| n.strip_prefix(CGROUP_PREFIX)?.split('.').next()?.parse::<LabName>().ok());
        names.extend(ours.filter(|name| found.contains(&cgroup_name(name))));
    }
    names.sort();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroups_of_labs_in_other_state_directories_are_foreign() {
        for (name, own, foreign) in [
            ("patchbay-lab.demo", None, false),
            ("patchbay-lab.demo.0a1b2c3d", None, true),
            ("patchbay-lab.demo.0a1b2c3d", Some("0a1b2c3d"), false),
            ("patchbay-lab.demo", Some("0a1b2c3d"), true),
            ("system.slice", Some("0a1b2c3d"), false),
        ] {
            assert_eq!(is_foreign(name, own), foreign, "{name} {own:?}");
        }
    }

    #[test]
    fn rejects_names_that_escape_the_state_directory() {
        for bad in ["", "..", "a/b", "-x", "A", "a b", &"x".repeat(31)] {
            assert!(bad.parse::<LabName>().is_err(), "{bad:?}");
        }
        assert_eq!("lab-1".parse::<LabName>().unwrap().as_str(), "lab-1");
    }
}
