//! Where the lab keeps things: built programs in a cache that outlives every lab, and one directory per lab
//! that `down` removes.

use std::{
    env, fmt,
    path::{Path, PathBuf},
    str::FromStr,
};

use anyhow::{Context, Result, bail};

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
    env::var_os("PATCHBAY_LAB_STATE").map_or_else(|| "/var/tmp/patchbay-lab".into(), PathBuf::from)
}

/// The directory of one lab.
pub fn lab(name: &Name) -> PathBuf {
    labs().join(name.as_str())
}

/// The names of all labs that have left a directory.
pub fn known() -> Vec<Name> {
    let Ok(entries) = std::fs::read_dir(labs()) else {
        return Vec::new();
    };
    let mut names: Vec<Name> =
        entries.flatten().filter_map(|e| e.file_name().to_str().and_then(|n| n.parse().ok())).collect();
    names.sort();
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
