//! Link records on disk, one file per network, from which uplinks are restored to their original state.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use api::IfName;
use plan::{
    bridge::{LinkRecord, OriginalLink, Uid},
    nodenetwork::AdminState,
};
use serde::{Deserialize, Serialize};
use tracing::warn;

/// The link records in the state directory.
pub struct LinkRecords {
    dir: PathBuf,
    all: BTreeMap<Uid, LinkRecord>,
}

/// Why the records could not be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("read the records in {path}")]
    Read { path: PathBuf, source: io::Error },
    #[error("write the record {path}")]
    Write { path: PathBuf, source: io::Error },
    #[error("remove the record {path}")]
    Remove { path: PathBuf, source: io::Error },
}

impl LinkRecords {
    /// Reads all records. Malformed files are logged and left in place.
    pub fn open(state_dir: &Path) -> Result<Self, Error> {
        let dir = state_dir.join("networks");
        // A full or read-only disk must not keep the daemon from starting: writing a record reports it.
        if let Err(error) = fs::create_dir_all(&dir)
            && !dir.is_dir()
        {
            warn!(path = %dir.display(), %error, "cannot create the directory of link records");
            return Ok(Self { dir, all: BTreeMap::new() });
        }
        let failed = |source| Error::Read { path: dir.clone(), source };
        let mut all = BTreeMap::new();
        for entry in fs::read_dir(&dir).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let bytes = fs::read(&path).map_err(failed)?;
            match serde_json::from_slice::<StoredRecord>(&bytes) {
                Ok(stored) => {
                    let record = LinkRecord::from(stored);
                    all.insert(record.uid.clone(), record);
                }
                Err(error) => warn!(path = %path.display(), %error, "ignoring malformed link record"),
            }
        }
        Ok(Self { dir, all })
    }

    pub fn all(&self) -> &BTreeMap<Uid, LinkRecord> {
        &self.all
    }

    /// Writes a record durably: it survives a power failure once this returns.
    pub fn put(&mut self, record: LinkRecord) -> Result<(), Error> {
        let path = self.path(&record.uid);
        let write = || {
            match fs::create_dir(&self.dir) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
            let temporary = path.with_extension("tmp");
            let mut file = File::create(&temporary)?;
            file.write_all(&serde_json::to_vec(&StoredRecord::from(&record))?)?;
            file.sync_all()?;
            fs::rename(&temporary, &path)?;
            File::open(&self.dir)?.sync_all()
        };
        write().map_err(|source| Error::Write { path: path.clone(), source })?;
        self.all.insert(record.uid.clone(), record);
        Ok(())
    }

    /// Removes a record durably.
    pub fn remove(&mut self, uid: &str) -> Result<(), Error> {
        let path = self.path(uid);
        let remove = || match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => File::open(&self.dir)?.sync_all(),
        };
        remove().map_err(|source| Error::Remove { path: path.clone(), source })?;
        self.all.remove(uid);
        Ok(())
    }

    /// UIDs consist of letters, digits and dashes; anything else is replaced by its digest.
    fn path(&self, uid: &str) -> PathBuf {
        let plain = (1..=63).contains(&uid.len())
            && uid.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        let stem = if plain { uid.to_owned() } else { format!("{:016x}", api::digest::digest([uid])) };
        self.dir.join(format!("{stem}.json"))
    }
}

/// The format on disk. Its field names must not change: later versions read the records of earlier ones.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct StoredRecord {
    uid: String,
    name: String,
    boot: String,
    bridge: IfName,
    vxlan: IfName,
    node_uid: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    uplink: Option<StoredLink>,
}

#[derive(Serialize, Deserialize)]
struct StoredLink {
    name: String,
    index: u32,
    up: bool,
    mtu: u32,
}

impl From<&LinkRecord> for StoredRecord {
    fn from(record: &LinkRecord) -> Self {
        let LinkRecord { uid, name, boot, bridge, vxlan, node_uid, uplink } = record.clone();
        let link = |original: OriginalLink| StoredLink {
            name: original.name,
            index: original.index,
            up: original.admin == AdminState::Up,
            mtu: original.mtu,
        };
        Self { uid, name, boot, bridge, vxlan, node_uid, uplink: uplink.map(link) }
    }
}

impl From<StoredRecord> for LinkRecord {
    fn from(stored: StoredRecord) -> Self {
        let StoredRecord { uid, name, boot, bridge, vxlan, node_uid, uplink } = stored;
        let original = |link: StoredLink| OriginalLink {
            name: link.name,
            index: link.index,
            admin: if link.up { AdminState::Up } else { AdminState::Down },
            mtu: link.mtu,
        };
        Self { uid, name, boot, bridge, vxlan, node_uid, uplink: uplink.map(original) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(uid: &str) -> LinkRecord {
        LinkRecord {
            uid: uid.to_owned(),
            name: "blue".to_owned(),
            boot: "boot".to_owned(),
            bridge: "br-blue".parse().unwrap(),
            vxlan: "vx-blue".parse().unwrap(),
            node_uid: "node".to_owned(),
            uplink: Some(OriginalLink {
                name: "eth1".to_owned(),
                index: 3,
                admin: AdminState::Down,
                mtu: 9000,
            }),
        }
    }

    #[test]
    fn records_survive_a_restart_and_malicious_uids_stay_in_the_directory() {
        let state = std::env::temp_dir().join(format!("patchbay-records-{}", std::process::id()));
        let mut records = LinkRecords::open(&state).unwrap();
        for uid in ["0-a", "../../etc/x", ""] {
            records.put(record(uid)).unwrap();
        }
        fs::write(state.join("networks/junk.json"), b"{").unwrap();
        let mut again = LinkRecords::open(&state).unwrap();
        assert_eq!(again.all(), records.all());
        assert_eq!(again.all().len(), 3);
        assert_eq!(fs::read_dir(state.join("networks")).unwrap().count(), 4);
        for uid in ["0-a", "../../etc/x", "", "never written"] {
            again.remove(uid).unwrap();
        }
        assert!(LinkRecords::open(&state).unwrap().all().is_empty());
        fs::remove_dir_all(state).unwrap();
    }

    /// As commit 6841d7b writes it.
    #[test]
    fn the_format_on_disk_is_that_of_earlier_versions() {
        let bytes = concat!(
            r#"{"uid":"0-a","name":"blue","boot":"boot","bridge":"br-blue","vxlan":"vx-blue","nodeUid":"node","#,
            r#""uplink":{"name":"eth1","index":3,"up":false,"mtu":9000}}"#
        );
        assert_eq!(serde_json::to_string(&StoredRecord::from(&record("0-a"))).unwrap(), bytes);
        let parsed: StoredRecord = serde_json::from_str(bytes).unwrap();
        assert_eq!(LinkRecord::from(parsed), record("0-a"));

        let without = bytes.split(r#","uplink""#).next().unwrap().to_owned() + "}";
        let parsed: StoredRecord = serde_json::from_str(&without).unwrap();
        let parsed = LinkRecord::from(parsed);
        assert_eq!(parsed.uplink, None);
        assert_eq!(serde_json::to_string(&StoredRecord::from(&parsed)).unwrap(), without);
    }
}
