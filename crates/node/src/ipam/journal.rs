//! The journal of the ledger: which records it has, and what a lost or damaged journal means for addresses.
//!
//! The file itself is a [`store::journal`](crate::store::journal). A damaged line makes all held blocks unverified.

use std::path::Path;

use api::ErrorChain;
use plan::ipam::{Ledger, LedgerRecord};
use tracing::warn;

pub use crate::store::journal::Error;
use crate::store::journal::{self, Codec, Damage};

/// The journal's directory in the state directory of the daemon.
const DIRECTORY: &str = "ipam";

/// Records of the ledger as JSON.
struct LedgerCodec;

impl Codec for LedgerCodec {
    type Record = LedgerRecord;
    const FORMAT: u32 = 1;

    fn encode(record: &LedgerRecord) -> String {
        // Cannot fail: all map keys of a record serialize as strings.
        serde_json::to_string(record).unwrap_or_default()
    }

    fn decode(text: &str) -> Option<LedgerRecord> {
        serde_json::from_str(text).ok()
    }
}

/// The ledger on disk.
pub struct Journal(journal::Journal<LedgerCodec>);

impl Journal {
    /// Opens the journal and reads what earlier runs recorded. Fails only while another daemon has it open.
    pub fn open(state_dir: &Path) -> Result<(Self, Ledger), Error> {
        let mut journal = Self(journal::Journal::new("address journal", state_dir.join(DIRECTORY)));
        let mut ledger = match journal.load() {
            Ok(ledger) => ledger,
            Err(error @ Error::Busy(_)) => return Err(error),
            Err(error) => {
                warn!(error = %ErrorChain(&error), "cannot read the address journal, retrying; no address is allocated");
                Ledger::default()
            }
        };
        if !journal.is_loaded() {
            ledger.apply(&LedgerRecord::Incomplete);
        } else if let Err(error) = journal.0.replace(ledger.records()) {
            warn!(error = %ErrorChain(&error), "cannot write the address journal, retrying; no address is allocated");
        }
        Ok((journal, ledger))
    }

    /// Reads what earlier runs recorded. The journal belongs to this process once this succeeds.
    pub fn load(&mut self) -> Result<Ledger, Error> {
        let mut ledger = Ledger::default();
        let loaded = self.0.load(|record| ledger.apply(&record))?;
        if loaded.is_empty {
            ledger.apply(&LedgerRecord::Incomplete);
        }
        if loaded.damage == Damage::Inside {
            let path = self.0.path();
            warn!(path = %path.display(), "the address journal is damaged; its blocks are unverified and allocate nothing");
            mark_unverified(&mut ledger);
        }
        Ok(ledger)
    }

    /// Whether [`Self::load`] has succeeded.
    pub fn is_loaded(&self) -> bool {
        self.0.is_loaded()
    }

    /// When this succeeds, the records survive a power cut. When it fails, they may or may not be on disk, and the next
    /// write replaces the whole file with `before` first.
    pub fn append(&mut self, records: &[LedgerRecord], before: &Ledger) -> Result<(), Error> {
        self.0.append(records, || before.records())
    }
}

/// Marks everything unverified. A lost record may have been a lease of any block, or a boot, so the boot ID is unknown
/// too and the next one does not prove a reboot.
fn mark_unverified(ledger: &mut Ledger) {
    let held = ledger.holdings().iter().map(|(block, one)| LedgerRecord::Unverified {
        block: block.clone(),
        network: one.network.clone(),
        object: one.object.clone().unwrap_or_default(),
    });
    let start = [LedgerRecord::Incomplete, LedgerRecord::Booted(String::new())];
    let records: Vec<LedgerRecord> = start.into_iter().chain(held).collect();
    for record in &records {
        if let LedgerRecord::Unverified { block, network, .. } = record {
            warn!(network, block = %block.range, "block is unverified; the addresses that its pods use are unknown");
        }
        ledger.apply(record);
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs, net::IpAddr, path::PathBuf, time::Duration};

    use api::digest::digest;
    use ipnet::IpNet;
    use plan::ipam::{AddressInfo, AttachmentKey, BlockKey, Grant, Lease, LeaseClaim, PodRef, Stage};

    use super::*;
    use crate::store::journal::COMPACT_AFTER;

    fn line(record: &LedgerRecord) -> Vec<u8> {
        journal::line::<LedgerCodec>(record)
    }

    fn parse(line: &[u8]) -> Option<LedgerRecord> {
        journal::parse_record::<LedgerCodec>(line)
    }

    fn acquired(range: &str) -> [LedgerRecord; 2] {
        let block = BlockKey { network: "net".to_owned(), range: range.parse().unwrap() };
        [
            LedgerRecord::Acquiring { block: block.clone(), network: "blue".to_owned() },
            LedgerRecord::Acquired { block, object: "uid".to_owned() },
        ]
    }

    fn leased(container: &str, address: &str) -> LedgerRecord {
        let address: IpAddr = address.parse().unwrap();
        let lease = Lease {
            key: AttachmentKey { container: container.to_owned(), interface: "net1".to_owned() },
            pod: PodRef::default(),
            network: "net".to_owned(),
            config: "blue".to_owned(),
            boot: "boot".to_owned(),
            since: 7,
            addresses: vec![address],
            claim: None,
        };
        let net = IpNet::new(address, 24).unwrap();
        LedgerRecord::Leased(Grant { lease, infos: vec![AddressInfo { net, gateway: None }] })
    }

    struct JournalDir(PathBuf);

    impl JournalDir {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("patchbay-journal-{}-{name}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn file(&self) -> PathBuf {
            self.0.join("ipam/journal")
        }
    }

    impl Drop for JournalDir {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn filled(dir: &JournalDir) -> Ledger {
        let (mut journal, mut ledger) = Journal::open(&dir.0).unwrap();
        for records in
            [acquired("10.0.0.0/28").to_vec(), vec![leased("a", "10.0.0.1"), leased("b", "10.0.0.2")]]
        {
            journal.append(&records, &ledger).unwrap();
            for record in &records {
                ledger.apply(record);
            }
        }
        ledger
    }

    #[test]
    fn a_ledger_survives_a_restart_and_only_one_daemon_opens_the_journal() {
        let dir = JournalDir::new("survives");
        let ledger = filled(&dir);
        let (journal, again) = Journal::open(&dir.0).unwrap();
        assert_eq!(again, ledger);
        let path = dir.0.clone();
        let other = std::thread::spawn(move || Journal::open(&path).map(|(_, ledger)| ledger));
        std::thread::park_timeout(Duration::from_millis(100));
        assert!(!other.is_finished());
        drop(journal);
        assert_eq!(other.join().unwrap().unwrap(), ledger);
    }

    /// A lease as written by daemons that did not record the CNI result.
    const WITHOUT_INFOS: &str = concat!(
        r#"{"leased":{"place":{"container":"a","interface":"net1"},"pod":{"namespace":"","name":"","uid":""},"#,
        r#""network":"net","config":"blue","boot":"boot","since":7,"addresses":["10.0.0.1"]}}"#,
    );

    #[test]
    fn leases_of_an_older_daemon_are_read_and_it_can_read_new_ones() {
        let dir = JournalDir::new("old");
        fs::create_dir_all(dir.0.join("ipam")).unwrap();
        fs::write(dir.file(), format!("{:016x} {WITHOUT_INFOS}\n", digest([WITHOUT_INFOS]))).unwrap();
        let (_, ledger) = Journal::open(&dir.0).unwrap();
        assert!(ledger.is_complete());
        let LedgerRecord::Leased(Grant { lease, infos }) = leased("a", "10.0.0.1") else { unreachable!() };
        let key = lease.key.clone();
        assert_eq!(ledger.grant(&key), Some(Grant { lease: lease.clone(), infos: Vec::new() }));

        // The older daemon ignores the new field and finds the others.
        let new = serde_json::to_value(leased("a", "10.0.0.1")).unwrap();
        assert_eq!(serde_json::from_value::<Lease>(new["leased"].clone()).unwrap(), lease);
        assert_eq!(new["leased"]["told"], serde_json::to_value(infos).unwrap());
        let mut old = new;
        old["leased"].as_object_mut().unwrap().remove("told");
        assert_eq!(old, serde_json::from_str::<serde_json::Value>(WITHOUT_INFOS).unwrap());
    }

    /// A lease of an IPAMClaim. An older daemon ignores the claim; two of them can have one address.
    #[test]
    fn leases_of_claims_are_read_by_daemons_of_both_versions() {
        let record = |container: &str| {
            let LedgerRecord::Leased(mut grant) = leased(container, "10.0.0.1") else { unreachable!() };
            let (uid, name) = ("6b1c".to_owned(), "vm1.blue".to_owned());
            let netns = "/var/run/netns/x".to_owned();
            grant.lease.claim = Some(LeaseClaim { uid, name, shared: true, netns });
            LedgerRecord::Leased(grant)
        };
        let new = serde_json::to_value(record("a")).unwrap();
        let claim = r#"{"uid":"6b1c","name":"vm1.blue","shared":true,"netns":"/var/run/netns/x"}"#;
        assert_eq!(new["leased"]["claim"], serde_json::from_str::<serde_json::Value>(claim).unwrap());
        let mut old = new;
        old["leased"].as_object_mut().unwrap().remove("claim");
        assert_eq!(old, serde_json::to_value(leased("a", "10.0.0.1")).unwrap());

        // This version restores both; then the older daemon records the end of each.
        let (new, old) = (JournalDir::new("claims"), JournalDir::new("claims-old"));
        let lines = |records: &[LedgerRecord]| records.iter().flat_map(line).collect::<Vec<u8>>();
        let freed = |container: &str| {
            LedgerRecord::Freed(AttachmentKey { container: container.into(), interface: "net1".into() })
        };
        for (dir, records) in [
            (&new, [record("a"), record("b"), LedgerRecord::Complete]),
            (&old, [leased("a", "10.0.0.1"), leased("b", "10.0.0.1"), LedgerRecord::Complete]),
        ] {
            fs::create_dir_all(dir.0.join("ipam")).unwrap();
            fs::write(dir.file(), lines(&records)).unwrap();
            let (mut journal, mut ledger) = Journal::open(&dir.0).unwrap();
            assert_eq!(ledger.leases().len(), 2);
            for container in ["a", "b"] {
                journal.append(&[freed(container)], &ledger).unwrap();
                ledger.apply(&freed(container));
            }
            drop(journal);
            assert!(Journal::open(&dir.0).unwrap().1.leases().is_empty());
        }
    }

    /// Every kind of record and every stage, as commit 6841d7b wrote them.
    const RECORDED: &str = include_str!("../../testdata/journal-6841d7b");

    #[test]
    fn records_of_commit_6841d7b_are_read_and_written_byte_for_byte() {
        let mut tags = BTreeSet::new();
        for text in RECORDED.split_inclusive('\n') {
            let record = parse(text.as_bytes()).unwrap_or_else(|| panic!("{text}"));
            assert_eq!(str::from_utf8(&line(&record)).unwrap(), text);
            let tag = match serde_json::to_value(record).unwrap() {
                serde_json::Value::Object(object) => object.keys().next().unwrap().clone(),
                tag => tag.as_str().unwrap().to_owned(),
            };
            tags.insert(tag);
        }
        assert_eq!(tags.len(), 14, "{tags:?}");
    }

    #[test]
    fn a_journal_of_commit_6841d7b_restores_its_ledger() {
        let dir = JournalDir::new("recorded");
        fs::create_dir_all(dir.0.join("ipam")).unwrap();
        fs::write(dir.file(), RECORDED).unwrap();
        let (_, ledger) = Journal::open(&dir.0).unwrap();
        assert!(ledger.is_complete() && ledger.leases().is_empty());
        assert_eq!(ledger.boot(), "5d4e");
        let stages: Vec<Stage> = ledger.holdings().values().map(|holding| holding.stage).collect();
        assert_eq!(stages, [Stage::Acquiring, Stage::Open, Stage::Releasing, Stage::Lost, Stage::Unverified]);
    }

    #[test]
    fn a_truncated_last_line_is_dropped() {
        let dir = JournalDir::new("cut");
        let ledger = filled(&dir);
        let whole = fs::read(dir.file()).unwrap();
        let last = line(&leased("c", "10.0.0.3"));
        for length in 0..last.len() {
            fs::write(dir.file(), [&whole[..], &last[..length]].concat()).unwrap();
            assert_eq!(Journal::open(&dir.0).unwrap().1, ledger, "{length}");
        }
        fs::write(dir.file(), [&whole[..], &last[..]].concat()).unwrap();
        assert_eq!(Journal::open(&dir.0).unwrap().1.leases().len(), 3);
    }

    #[test]
    fn a_lost_journal_stays_incomplete_across_restarts() {
        let dir = JournalDir::new("incomplete");
        for _ in 0..3 {
            assert!(!Journal::open(&dir.0).unwrap().1.is_complete());
        }
        let (mut journal, ledger) = Journal::open(&dir.0).unwrap();
        journal.append(&[LedgerRecord::Complete, LedgerRecord::Booted("boot".to_owned())], &ledger).unwrap();
        drop(journal);
        for _ in 0..2 {
            assert!(Journal::open(&dir.0).unwrap().1.is_complete());
        }
        for nothing in [&b""[..], &[0; 300], b"garbage"] {
            fs::write(dir.file(), nothing).unwrap();
            assert!(!Journal::open(&dir.0).unwrap().1.is_complete(), "{nothing:?}");
        }
    }

    #[test]
    fn damage_makes_blocks_unverified_and_keeps_readable_records() {
        let dir = JournalDir::new("damage");
        filled(&dir);
        let mut whole = fs::read(dir.file()).unwrap();
        let ends: Vec<usize> = (0..whole.len()).filter(|key| whole[*key] == b'\n').collect();
        whole[ends[2] + 30] ^= 1;
        fs::write(dir.file(), whole).unwrap();
        let (_, ledger) = Journal::open(&dir.0).unwrap();
        assert!(!ledger.is_complete() && !Journal::open(&dir.0).unwrap().1.is_complete());
        assert_eq!(ledger.leases().len(), 1);
        assert!(ledger.holdings().values().all(|one| one.stage == Stage::Unverified), "{ledger:?}");
        assert_eq!(ledger.holdings().len(), 1);
        // The lost record may have been a boot, so the first known boot ID proves nothing.
        let mut later = ledger.clone();
        later.apply(&LedgerRecord::Booted("boot".to_owned()));
        assert!(later.holdings().values().all(|one| one.stage == Stage::Unverified), "{later:?}");
        later.apply(&LedgerRecord::Booted("next".to_owned()));
        assert!(later.holdings().values().all(|one| one.stage == Stage::Acquiring), "{later:?}");
    }

    #[test]
    fn an_unknown_kind_of_record_is_damage_unless_it_is_ignorable() {
        let dir = JournalDir::new("unknown");
        let ledger = filled(&dir);
        let whole = fs::read(dir.file()).unwrap();
        let unknown = r#"{"invented":{"since":"the next version"}}"#;
        let required = format!("{:016x} {unknown}\n", digest([unknown]));
        let ignorable = format!("{:016x}?{unknown}\n", digest(["?", unknown]));

        fs::write(dir.file(), [ignorable.as_bytes(), &whole].concat()).unwrap();
        let (mut journal, read) = Journal::open(&dir.0).unwrap();
        assert_eq!(read, ledger);
        let freed = LedgerRecord::Freed(AttachmentKey { container: "b".into(), interface: "net1".into() });
        journal.append(std::slice::from_ref(&freed), &read).unwrap();
        drop(journal);
        let snapshot: Vec<u8> = ledger.records().flat_map(|record| line(&record)).collect();
        let expected = [&snapshot[..], ignorable.as_bytes(), &line(&freed)].concat();
        assert_eq!(fs::read(dir.file()).unwrap(), expected);

        fs::write(dir.file(), [&whole, required.as_bytes()].concat()).unwrap();
        let (_, read) = Journal::open(&dir.0).unwrap();
        assert!(read.holdings().values().all(|one| one.stage == Stage::Unverified), "{read:?}");
    }

    #[test]
    fn a_journal_is_compacted() {
        let dir = JournalDir::new("grow");
        let (mut journal, ledger) = Journal::open(&dir.0).unwrap();
        for _ in 0..3 * COMPACT_AFTER / 100 {
            journal
                .append(
                    &vec![
                        LedgerRecord::Freed(AttachmentKey { container: "x".into(), interface: "y".into() });
                        100
                    ],
                    &ledger,
                )
                .unwrap();
        }
        assert!(fs::metadata(dir.file()).unwrap().len() < 80 * (COMPACT_AFTER as u64 + 200));
        drop(journal);
        assert_eq!(Journal::open(&dir.0).unwrap().1, ledger);
    }
}
