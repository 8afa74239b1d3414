//! Link records on disk, one file per network, from which uplinks are restored to their original state.

use std::{collections::BTreeMap, io, path::Path};

use api::IfName;
use plan::{
    bridge::{LinkRecord, OriginalLink, Uid},
    nodenetwork::AdminState,
};
use serde::{Deserialize, Serialize};

pub use crate::store::records::Error;
use crate::store::records::{RecordCodec, Records};

/// The directory in the state directory of the daemon.
const DIRECTORY: &str = "networks";
const SUFFIX: &str = ".json";

/// The link records in the state directory.
pub struct LinkRecords(Records<LinkRecordCodec>);

impl LinkRecords {
    /// Reads all records. Malformed files are logged and left in place.
    pub fn open(state_dir: &Path) -> Result<Self, Error> {
        Records::open(state_dir.join(DIRECTORY), SUFFIX).map(Self)
    }

    pub fn all(&self) -> &BTreeMap<Uid, LinkRecord> {
        self.0.all()
    }

    /// Writes a record durably: it survives a power failure once this returns.
    pub fn put(&mut self, record: LinkRecord) -> Result<(), Error> {
        self.0.put(record)
    }

    /// Removes a record durably.
    pub fn remove(&mut self, uid: &str) -> Result<(), Error> {
        self.0.remove(uid)
    }
}

/// Link records as JSON, by the UID of their network.
struct LinkRecordCodec;

impl RecordCodec for LinkRecordCodec {
    type Record = LinkRecord;
    type Error = serde_json::Error;

    fn key(record: &LinkRecord) -> &str {
        &record.uid
    }

    fn encode(record: &LinkRecord) -> io::Result<Vec<u8>> {
        Ok(serde_json::to_vec(&StoredRecord::from(record))?)
    }

    fn decode(bytes: &[u8]) -> Result<LinkRecord, serde_json::Error> {
        serde_json::from_slice::<StoredRecord>(bytes).map(LinkRecord::from)
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
    use std::fs;

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
