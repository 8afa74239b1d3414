//! Records with a key, one synced file each.
//!
//! [`RecordDir`] knows files only; the CNI plugin writes the files of one of its directories. [`Records`] also holds the
//! records in memory, for a directory that only the daemon writes.
//!
//! A record that is valid for one boot carries the boot ID, and its owner compares it: only the owner knows whether a record
//! of an earlier boot is to be undone, replaced or dropped.

use std::{
    collections::BTreeMap,
    fmt::Display,
    fs::{self, File},
    io::{self, Read as _},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use tracing::warn;

use super::atomic;

/// The longest key that is used as a file name.
const MAX_NAME: usize = 63;

/// Why records could not be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("read the records in {path}")]
    Read { path: PathBuf, source: io::Error },
    #[error("write the record {path}")]
    Write { path: PathBuf, source: io::Error },
    #[error("remove the record {path}")]
    Remove { path: PathBuf, source: io::Error },
}

/// A directory of records.
#[derive(Debug, Clone)]
pub struct RecordDir {
    path: PathBuf,
    /// The end of the names of records.
    suffix: &'static str,
}

impl RecordDir {
    /// A directory that need not exist. Names that start with a dot are temporary files and never records.
    pub fn new(path: PathBuf, suffix: &'static str) -> Self {
        Self { path, suffix }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file of a record.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}{}", self.suffix))
    }

    /// The names of all records, sorted, without the suffix. A file whose name is not UTF-8 is no record.
    pub fn names(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            let Ok(file) = entry?.file_name().into_string() else { continue };
            let name = file.strip_suffix(self.suffix).filter(|_| !file.starts_with('.'));
            names.extend(name.map(str::to_owned));
        }
        names.sort_unstable();
        Ok(names)
    }

    /// Reads a record, at most `limit` bytes of it.
    pub fn read(&self, name: &str, limit: u64) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        File::open(self.file(name))?.take(limit).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Writes a record durably. Creates the directory in an existing parent.
    pub fn put(&self, name: &str, content: &[u8]) -> io::Result<()> {
        match fs::create_dir(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let file = self.file(name);
        atomic::replace(&file, self.path.join(format!(".{name}.tmp")), content)
    }

    /// Removes a record durably, and returns whether it existed.
    pub fn remove(&self, name: &str) -> io::Result<bool> {
        atomic::remove(&self.file(name))
    }

    /// Makes removals durable that were made without [`Self::remove`].
    pub fn sync(&self) -> io::Result<()> {
        atomic::sync_dir(&self.path)
    }

    /// Removes temporary files that were not written to for this long: their writers were killed.
    pub fn remove_abandoned(&self, age: Duration) {
        let entries = fs::read_dir(&self.path).into_iter().flatten().flatten();
        for entry in entries.filter(|entry| entry.file_name().as_encoded_bytes().starts_with(b".")) {
            let written = entry.metadata().and_then(|metadata| metadata.modified());
            let since = written.ok().and_then(|written| SystemTime::now().duration_since(written).ok());
            if since.is_some_and(|since| since > age) {
                _ = fs::remove_file(entry.path());
            }
        }
    }
}

/// A file name for any key: the key itself if it consists of letters, digits and dashes, else its digest.
pub fn safe_name(key: &str) -> String {
    let plain = (1..=MAX_NAME).contains(&key.len())
        && key.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    if plain { key.to_owned() } else { format!("{:016x}", api::digest::digest([key])) }
}

/// The content of a kind of record.
pub trait RecordCodec {
    type Record;
    type Error: Display;

    fn key(record: &Self::Record) -> &str;

    fn encode(record: &Self::Record) -> io::Result<Vec<u8>>;

    fn decode(bytes: &[u8]) -> Result<Self::Record, Self::Error>;
}

/// The records of a directory that only this process writes, by key.
pub struct Records<C: RecordCodec> {
    dir: RecordDir,
    all: BTreeMap<String, C::Record>,
}

impl<C: RecordCodec> Records<C> {
    /// Reads all records. Malformed ones are logged and left in place.
    pub fn open(path: PathBuf, suffix: &'static str) -> Result<Self, Error> {
        let mut records = Self { dir: RecordDir::new(path, suffix), all: BTreeMap::new() };
        let path = records.dir.path();
        // A full or read-only disk must not keep the daemon from starting: writing a record reports it.
        if let Err(error) = fs::create_dir_all(path)
            && !path.is_dir()
        {
            warn!(path = %path.display(), %error, "cannot create a directory of records");
            return Ok(records);
        }
        let failed = |source| Error::Read { path: path.to_owned(), source };
        for name in records.dir.names().map_err(failed)? {
            let bytes = records.dir.read(&name, u64::MAX).map_err(failed)?;
            match C::decode(&bytes) {
                Ok(record) => _ = records.all.insert(C::key(&record).to_owned(), record),
                Err(error) => {
                    warn!(path = %records.dir.file(&name).display(), %error, "ignoring a malformed record");
                }
            }
        }
        Ok(records)
    }

    pub fn all(&self) -> &BTreeMap<String, C::Record> {
        &self.all
    }

    /// Writes a record durably: it survives a power failure once this returns.
    pub fn put(&mut self, record: C::Record) -> Result<(), Error> {
        let key = C::key(&record).to_owned();
        let name = safe_name(&key);
        C::encode(&record)
            .and_then(|content| self.dir.put(&name, &content))
            .map_err(|source| Error::Write { path: self.dir.file(&name), source })?;
        self.all.insert(key, record);
        Ok(())
    }

    /// Removes a record durably. Fails only if the record may come back after a power failure.
    pub fn remove(&mut self, key: &str) -> Result<(), Error> {
        let name = safe_name(key);
        let removed = self.dir.remove(&name).and_then(|removed| {
            // An earlier call may have removed the file without syncing the directory.
            if removed { Ok(()) } else { self.dir.sync() }
        });
        removed.map_err(|source| Error::Remove { path: self.dir.file(&name), source })?;
        self.all.remove(key);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A record whose content is `key=value`.
    struct Pairs;

    impl RecordCodec for Pairs {
        type Record = (String, String);
        type Error = &'static str;

        fn key(record: &Self::Record) -> &str {
            &record.0
        }

        fn encode(record: &Self::Record) -> io::Result<Vec<u8>> {
            Ok(format!("{}={}", record.0, record.1).into_bytes())
        }

        fn decode(bytes: &[u8]) -> Result<Self::Record, Self::Error> {
            let text = str::from_utf8(bytes).map_err(|_| "not UTF-8")?;
            let (key, value) = text.split_once('=').ok_or("no value")?;
            Ok((key.to_owned(), value.to_owned()))
        }
    }

    fn pair(key: &str, value: &str) -> (String, String) {
        (key.to_owned(), value.to_owned())
    }

    fn scratch(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("patchbay-store-{}-{name}", std::process::id()));
        _ = fs::remove_dir_all(&path);
        path
    }

    #[test]
    fn records_survive_a_restart_for_any_key() {
        let path = scratch("records");
        let long = "x".repeat(64);
        let keys = ["plain-1", "", "../../etc/passwd", "a/b", "a\nb", ".hidden", "\u{fc}", &long];
        let mut records = Records::<Pairs>::open(path.join("dir"), ".pair").unwrap();
        for value in ["old", "new"] {
            for key in keys {
                records.put(pair(key, value)).unwrap();
            }
        }
        let names = records.dir.names().unwrap();
        assert_eq!(names.len(), keys.len());
        assert!(names.contains(&"plain-1".to_owned()), "{names:?}");
        assert_eq!(fs::read_dir(&path).unwrap().count(), 1, "no file is outside of the directory");
        let mut again = Records::<Pairs>::open(path.join("dir"), ".pair").unwrap();
        assert_eq!(again.all(), records.all());
        assert!(again.all().values().all(|(_, value)| value == "new"));
        for key in keys.into_iter().chain(["never written"]) {
            again.remove(key).unwrap();
        }
        assert!(again.all().is_empty());
        assert_eq!(fs::read_dir(path.join("dir")).unwrap().count(), 0);
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn damaged_records_stay_in_place_and_hide_no_other() {
        let path = scratch("damaged");
        let mut records = Records::<Pairs>::open(path.clone(), ".pair").unwrap();
        records.put(pair("a", "1")).unwrap();
        for (name, content) in [
            ("damaged.pair", &b"\xff"[..]),
            ("empty.pair", b""),
            (".crashed.tmp", b"b=2"),
            (".b.pair", b"b=2"),
            ("other.json", b"c=3"),
        ] {
            fs::write(path.join(name), content).unwrap();
        }
        let again = Records::<Pairs>::open(path.clone(), ".pair").unwrap();
        assert_eq!(again.all().values().collect::<Vec<_>>(), [&pair("a", "1")]);
        assert_eq!(fs::read_dir(&path).unwrap().count(), 6);
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn a_record_that_cannot_be_written_is_not_in_memory_either() {
        let path = scratch("unwritten");
        let mut records = Records::<Pairs>::open(path.join("dir"), "").unwrap();
        fs::remove_dir_all(&path).unwrap();
        let error = records.put(pair("a", "1")).unwrap_err();
        assert_eq!(error.to_string(), format!("write the record {}", path.join("dir/a").display()));
        assert!(records.all().is_empty());
    }

    #[test]
    fn a_directory_that_cannot_be_created_has_no_records() {
        let path = scratch("file");
        fs::write(&path, "").unwrap();
        assert!(Records::<Pairs>::open(path.join("dir"), "").unwrap().all().is_empty());
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn only_old_temporary_files_are_abandoned() {
        let path = scratch("abandoned");
        let dir = RecordDir::new(path.clone(), "");
        dir.remove_abandoned(Duration::ZERO);
        dir.put("a", b"1").unwrap_or_else(|error| panic!("{error}"));
        let now = SystemTime::now();
        for (name, age) in [(".old", 700), (".new", 0)] {
            let file = File::create(path.join(name)).unwrap();
            file.set_modified(now - Duration::from_secs(age)).unwrap();
        }
        dir.remove_abandoned(Duration::from_secs(600));
        assert!(path.join("a").exists() && path.join(".new").exists() && !path.join(".old").exists());
        assert_eq!((dir.read("a", 10).unwrap(), dir.read("a", 0).unwrap()), (b"1".to_vec(), Vec::new()));
        assert_eq!(dir.read("b", 10).unwrap_err().kind(), io::ErrorKind::NotFound);
        fs::remove_dir_all(path).unwrap();
    }
}
