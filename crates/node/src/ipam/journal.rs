//! The ledger on disk: a file of records, one per line, each with a digest in front.
//!
//! Records survive a power cut once [`Journal::append`] has returned. A truncated last line was never acknowledged and is
//! dropped. A line that was damaged later makes all held blocks unverified.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use api::{ErrorChain, digest::digest};
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
};
use plan::ipam::{Ledger, LedgerRecord};
use tracing::warn;

/// The journal's directory in the state directory of the daemon.
const DIRECTORY: &str = "ipam";
const FILE: &str = "journal";
const SNAPSHOT: &str = "journal.new";
const LOCK: &str = "lock";
/// How long the previous daemon may take to exit and unlock the journal.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
const LOCK_RETRY: Duration = Duration::from_millis(20);
/// A journal is compacted when it has this many lines more than needed.
const COMPACT_AFTER: usize = 4096;
/// The hexadecimal digits of a digest.
const DIGEST_DIGITS: usize = 16;

/// Why the journal cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{what} {}", path.display())]
    Disk { what: &'static str, path: PathBuf, source: io::Error },
    #[error("another patchbay node daemon holds the journal lock {}; stop it first", .0.display())]
    Busy(PathBuf),
    #[error("the address journal cannot be read: {0}")]
    Unavailable(String),
}

/// The journal file.
///
/// A journal that cannot be written, because the disk is full or read-only, is no reason not to start: everything that was
/// recorded is known, and only new records fail. One that cannot even be read knows nothing until [`Self::load`] succeeds.
pub struct Journal {
    state_dir: PathBuf,
    dir: PathBuf,
    /// None after a failed write: what the file then holds is unknown, and the next write replaces it.
    file: Option<File>,
    lines: usize,
    /// Compaction is tried above this many lines.
    compact_above: usize,
    length: u64,
    /// Why the journal could not be loaded.
    unavailable: Option<String>,
    /// Held as long as the journal is open.
    lock: Option<Flock<File>>,
}

impl Journal {
    /// Opens the journal and reads what earlier runs recorded. Fails only while another daemon has it open.
    pub fn open(state_dir: &Path) -> Result<(Self, Ledger), Error> {
        let mut journal = Self {
            state_dir: state_dir.to_owned(),
            dir: state_dir.join(DIRECTORY),
            file: None,
            lines: 0,
            compact_above: 0,
            length: 0,
            unavailable: None,
            lock: None,
        };
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
        } else if let Err(error) = journal.replace(&ledger) {
            warn!(error = %ErrorChain(&error), "cannot write the address journal, retrying; no address is allocated");
        }
        Ok((journal, ledger))
    }

    /// Reads what earlier runs recorded. The journal belongs to this process once this succeeds.
    pub fn load(&mut self) -> Result<Ledger, Error> {
        let loaded = self.lock_and_read();
        self.unavailable = loaded.as_ref().err().map(|error| ErrorChain(error).to_string());
        loaded
    }

    /// Whether [`Self::load`] has succeeded.
    pub fn is_loaded(&self) -> bool {
        self.unavailable.is_none()
    }

    fn lock_and_read(&mut self) -> Result<Ledger, Error> {
        // On a read-only disk the directory and the lock of an earlier run are enough.
        let created = self.create_dir();
        if self.lock.is_none() {
            self.lock = match lock(&self.dir.join(LOCK)) {
                Ok(lock) => Some(lock),
                Err(error @ Error::Busy(_)) => return Err(error),
                Err(error) => return Err(created.err().unwrap_or(error)),
            };
        }
        let path = self.dir.join(FILE);
        let read = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            other => Some(other.map_err(failed("read", &path))?),
        };
        let mut ledger = Ledger::default();
        // A journal that was ever written is not empty.
        if read.as_ref().is_none_or(Vec::is_empty) {
            ledger.apply(&LedgerRecord::Incomplete);
        }
        if replay(&read.unwrap_or_default(), &mut ledger) == Damage::Inside {
            warn!(path = %path.display(), "the address journal is damaged; its blocks are unverified and allocate nothing");
            mark_unverified(&mut ledger);
        }
        Ok(ledger)
    }

    fn create_dir(&self) -> Result<(), Error> {
        fs::create_dir_all(&self.dir).map_err(failed("create directory", &self.dir))?;
        // A directory entry that is lost in a power cut takes everything below it with it.
        for parent in [Some(self.state_dir.as_path()), self.state_dir.parent()].into_iter().flatten() {
            let sync = File::open(parent).and_then(|directory| directory.sync_all());
            sync.map_err(failed("sync directory", parent))?;
        }
        Ok(())
    }

    /// When this succeeds, the records survive a power cut. When it fails, they may or may not be on disk, and the next
    /// write replaces the whole file with `before` first.
    pub fn append(&mut self, records: &[LedgerRecord], before: &Ledger) -> Result<(), Error> {
        if let Some(reason) = &self.unavailable {
            return Err(Error::Unavailable(reason.clone()));
        }
        if self.file.is_none() {
            self.replace(before)?;
        } else if self.lines > self.compact_above {
            self.compact(before)?;
        }
        let text: Vec<u8> = records.iter().flat_map(line).collect();
        let Some(file) = self.file.as_mut().filter(|_| !text.is_empty()) else { return Ok(()) };
        if let Err(source) = file.write_all(&text).and_then(|()| file.sync_data()) {
            let _ = file.set_len(self.length);
            self.file = None;
            return Err(failed("write", &self.dir.join(FILE))(source));
        }
        self.length += text.len() as u64;
        self.lines += records.len();
        Ok(())
    }

    /// Replaces a file that has grown. A disk with room for a record but not for a second file is no reason to fail.
    fn compact(&mut self, ledger: &Ledger) -> Result<(), Error> {
        match Snapshot::write(&self.dir, ledger) {
            Ok(snapshot) => self.install(snapshot),
            Err(error) => {
                warn!(error = %ErrorChain(&error), "cannot compact the address journal, trying again later");
                self.compact_above = self.lines + COMPACT_AFTER;
                Ok(())
            }
        }
    }

    /// Replaces the file with one that holds this ledger and nothing else.
    fn replace(&mut self, ledger: &Ledger) -> Result<(), Error> {
        let snapshot = Snapshot::write(&self.dir, ledger)?;
        self.install(snapshot)
    }

    fn install(&mut self, snapshot: Snapshot) -> Result<(), Error> {
        let path = self.dir.join(FILE);
        // From here on the old file may have lost its name.
        self.file = None;
        let install = || fs::rename(&snapshot.path, &path).and_then(|()| File::open(&self.dir)?.sync_all());
        install().map_err(failed("replace", &path))?;
        self.compact_above = COMPACT_AFTER + 2 * snapshot.lines;
        (self.file, self.length, self.lines) = (Some(snapshot.file), snapshot.length, snapshot.lines);
        Ok(())
    }
}

/// A whole ledger in a file that does not have the journal's name yet.
struct Snapshot {
    path: PathBuf,
    file: File,
    length: u64,
    lines: usize,
}

impl Snapshot {
    fn write(dir: &Path, ledger: &Ledger) -> Result<Self, Error> {
        let path = dir.join(SNAPSHOT);
        let (mut text, mut lines) = (Vec::new(), 0);
        for record in ledger.records() {
            text.extend(line(&record));
            lines += 1;
        }
        let write = || {
            let mut file = File::options().create(true).truncate(true).write(true).mode(0o600).open(&path)?;
            file.write_all(&text)?;
            file.sync_all()?;
            Ok(file)
        };
        match write() {
            Ok(file) => Ok(Self { path, file, length: text.len() as u64, lines }),
            Err(source) => {
                // A part of it must not take the last of a full disk.
                let _ = fs::remove_file(&path);
                Err(failed("write", &path)(source))
            }
        }
    }
}

fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Disk { what, path, source }
}

fn lock(path: &Path) -> Result<Flock<File>, Error> {
    let create = || File::options().create(true).truncate(false).write(true).mode(0o600).open(path);
    let mut file =
        create().or_else(|error| File::open(path).map_err(|_| error)).map_err(failed("open", path))?;
    let started = Instant::now();
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((_, errno)) if !matches!(errno, Errno::EWOULDBLOCK | Errno::EINTR) => {
                return Err(failed("lock", path)(errno.into()));
            }
            Err((back, _)) if started.elapsed() < LOCK_TIMEOUT => file = back,
            Err(_) => return Err(Error::Busy(path.to_owned())),
        }
        std::thread::park_timeout(LOCK_RETRY);
    }
}

fn line(record: &LedgerRecord) -> Vec<u8> {
    // Cannot fail: all map keys of a record serialize as strings.
    let text = serde_json::to_string(record).unwrap_or_default();
    format!("{:016x} {text}\n", digest([text.as_str()])).into_bytes()
}

/// What replay found wrong with a journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Damage {
    None,
    /// A line other than a truncated last one is invalid.
    Inside,
}

fn replay(bytes: &[u8], ledger: &mut Ledger) -> Damage {
    let (mut damage, mut bad, mut good) = (Damage::None, false, false);
    for line in bytes.split_inclusive(|byte| *byte == b'\n') {
        match parse(line) {
            Some(record) => {
                if bad {
                    damage = Damage::Inside;
                }
                good = true;
                ledger.apply(&record);
            }
            None => bad = true,
        }
    }
    // A truncated line is a non-empty part of a line without a newline and without zeros. The first line was written in
    // full or not at all.
    let whole = bytes.last() == Some(&b'\n') || bytes.contains(&0);
    if bad && (!good || whole) { Damage::Inside } else { damage }
}

fn parse(line: &[u8]) -> Option<LedgerRecord> {
    let text = str::from_utf8(line).ok()?.strip_suffix('\n')?;
    let (expected, rest) = text.split_at_checked(DIGEST_DIGITS)?;
    let rest = rest.strip_prefix(' ')?;
    if u64::from_str_radix(expected, 16).ok()? != digest([rest]) {
        return None;
    }
    serde_json::from_str(rest).ok()
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
    use std::{collections::BTreeSet, net::IpAddr};

    use ipnet::IpNet;
    use plan::ipam::{AddressInfo, AttachmentKey, BlockKey, Grant, Lease, PodRef, Stage};

    use super::*;

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
