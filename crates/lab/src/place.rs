//! Where the lab keeps things: built programs in a cache that outlives every lab, and one directory per lab
//! that `down` removes.

use std::{
    env, fmt, fs,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    str::FromStr,
};

use anyhow::{Context, Result, bail};

use crate::digest::sha256_hex;

/// The name of a lab: it becomes part of paths and cgroup names.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Name(String);

impl Name {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Name {
    type Err = anyhow::Error;

    fn from_str(s: &str) -> Result<Self> {
        let good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if s.is_empty() || s.len() > 30 || !s.chars().all(good) || s.starts_with('-') {
            bail!("lab name {s:?}: use 1 to 30 of a-z, 0-9 and '-', not starting with '-'");
        }
        Ok(Self(s.to_owned()))
    }
}

/// The cache for built programs and images; `PATCHBAY_CACHE` overrides it.
pub fn cache() -> Result<PathBuf> {
    if let Some(dir) = env::var_os("PATCHBAY_CACHE") {
        return Ok(dir.into());
    }
    let home = env::var_os("HOME").context("find the cache: set HOME or PATCHBAY_CACHE")?;
    Ok(Path::new(&home).join(".cache/patchbay"))
}

/// The directory that holds one directory per lab; `PATCHBAY_LAB_STATE` overrides it.
pub fn labs() -> PathBuf {
    env::var_os("PATCHBAY_LAB_STATE").map_or_else(|| "/var/lib/patchbay-lab".into(), PathBuf::from)
}

/// The name of a lab's cgroup. Labs of the same name in different places are different labs.
pub fn group(name: &Name) -> String {
    match env::var_os("PATCHBAY_LAB_STATE") {
        None => format!("{GROUP}{name}"),
        Some(dir) => format!("{GROUP}{name}.{}", &sha256_hex(dir.as_encoded_bytes())[..8]),
    }
}

/// What the cgroups of all labs begin with.
pub const GROUP: &str = "patchbay-lab.";

/// Makes the directory of labs; nobody else can write there.
pub fn make_labs() -> std::io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(labs())
}

/// Removes a directory so that no half of it is ever taken for a whole: renamed first, then deleted.
pub fn remove(dir: &Path) -> Result<()> {
    let name = dir.file_name().and_then(|n| n.to_str()).context("a directory has a name")?;
    let gone = dir.with_file_name(format!(".{name}.gone"));
    delete(&gone)?;
    match fs::rename(dir, &gone) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        other => other.with_context(|| format!("remove {}", dir.display()))?,
    }
    delete(&gone)
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
pub fn lab(name: &Name) -> PathBuf {
    labs().join(name.as_str())
}

/// The names of all labs that have left a directory or a cgroup.
pub fn known() -> Vec<Name> {
    let listed = |dir: &Path| -> Vec<String> {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        entries.filter_map(|e| e.file_name().into_string().ok()).collect()
    };
    let mut names: Vec<Name> = listed(&labs()).iter().filter_map(|n| n.parse().ok()).collect();
    let hierarchies = Path::new("/sys/fs/cgroup");
    for dir in listed(hierarchies).iter().map(|d| hierarchies.join(d)).chain([hierarchies.into()]) {
        let found = listed(&dir);
        let ours =
            found.iter().filter_map(|n| n.strip_prefix(GROUP)?.split('.').next()?.parse::<Name>().ok());
        names.extend(ours.filter(|name| found.contains(&group(name))));
    }
    names.sort();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_would_leave_their_directory_are_refused() {
        for bad in ["", "..", "a/b", "-x", "A", "a b", &"x".repeat(31)] {
            assert!(bad.parse::<Name>().is_err(), "{bad:?}");
        }
        assert_eq!("lab-1".parse::<Name>().unwrap().as_str(), "lab-1");
    }
}
