//! An append-only journal of records, one per line, each with a digest in front.
//!
//! Records survive a power cut once [`Journal::append`] has returned. A truncated last line was never acknowledged and is
//! dropped. A line that was damaged later is reported as [`Damage`], and the owner of the journal decides what it means.
//! [`Journal::keep_damaged`] keeps the file beside the journal until an operator has handled it and deletes it.
//!
//! # Lines
//!
//! `<digest> <record>` is a record that every reader must understand: an unknown one is damage. `<digest>?<record>` is an
//! ignorable record: a reader that does not know it skips it, and keeps its line verbatim when it rewrites the journal.
//! The kept lines follow the records of the owner, in the order in which they were written, so an ignorable record must
//! not depend on its position among the others. The digest of an ignorable line covers the mark.
//!
//! # Format
//!
//! The number of the format is in the file `format` beside the journal, never in the journal. A journal without that file
//! has format 1. A version reads every format up to its own, and writes its own number before the first line of that
//! format. A journal of a newer format is neither read nor written: it is unavailable like one on a broken disk, until a
//! newer version takes it over or the file is gone.

use std::{
    fs::{self, File},
    io::{self, BufRead, BufReader, Write as _},
    marker::PhantomData,
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use api::{ErrorChain, digest::digest};
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
};
use tracing::warn;

use super::atomic::{self, StagedFile};

const FILE: &str = "journal";
const SNAPSHOT: &str = "journal.new";
const LOCK: &str = "lock";
const FORMAT_FILE: &str = "format";
/// A damaged journal. Further ones have a number behind the name.
const DAMAGED: &str = "journal.damaged";
/// Bounds the damaged journals that are kept. The first ones stay.
const MAX_DAMAGED: usize = 10;
/// The format of journals without a format file.
const FIRST_FORMAT: u32 = 1;
/// How long the previous daemon may take to exit and unlock the journal.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
const LOCK_RETRY: Duration = Duration::from_millis(20);
/// A journal is compacted when it has this many lines more than needed.
pub const COMPACT_AFTER: usize = 4096;
/// The same in bytes. The file is read at the start.
pub const COMPACT_AFTER_LENGTH: u64 = 8 * 1024 * 1024;
/// The hexadecimal digits of a digest.
const DIGEST_DIGITS: usize = 16;
/// Separates the digest from a record that every reader must understand.
const REQUIRED: char = ' ';
/// Separates the digest from an ignorable record.
const IGNORABLE: char = '?';

/// The records of a journal and their text.
pub trait Codec {
    type Record;
    /// The format that this version writes. It also reads all earlier ones.
    const FORMAT: u32;

    /// The record in one line, without a line break.
    fn encode(record: &Self::Record) -> String;

    /// None if this version does not know such a record.
    fn decode(text: &str) -> Option<Self::Record>;

    /// Whether versions that do not know the record may skip it.
    fn is_ignorable(_record: &Self::Record) -> bool {
        false
    }
}

/// Why a journal cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{what} {}", path.display())]
    Disk { what: &'static str, path: PathBuf, source: io::Error },
    #[error("another patchbay node daemon holds the journal lock {}; stop it first", .0.display())]
    Busy(PathBuf),
    #[error("the {journal} cannot be read: {reason}")]
    Unavailable { journal: &'static str, reason: String },
    #[error(
        "{} says format {found}, and this version of Patchbay reads formats up to {known}: upgrade the node daemon",
        path.display()
    )]
    NewerFormat { path: PathBuf, found: u32, known: u32 },
    #[error("{} holds no format number: restore it, or delete it if the journal has format 1", path.display())]
    MalformedFormat { path: PathBuf },
}

/// What [`Journal::load`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Loaded {
    /// No journal was ever written here, or it was lost: one that was written is not empty.
    pub is_empty: bool,
    pub damage: Damage,
}

/// What is wrong with the lines of a journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Damage {
    None,
    /// A line other than a truncated last one is invalid.
    Inside,
    /// The file is gone, although one was written.
    Lost,
}

/// The journal file in a directory of its own.
///
/// A journal that cannot be written, because the disk is full or read-only, is no reason not to start: everything that was
/// recorded is known, and only new records fail. One that cannot even be read knows nothing until [`Self::load`] succeeds.
pub struct Journal<C> {
    /// What messages call the journal.
    name: &'static str,
    dir: PathBuf,
    /// None after a failed write: what the file then holds is unknown, and the next write replaces it.
    file: Option<File>,
    lines: usize,
    /// Compaction is tried above this many lines.
    compact_above: usize,
    compact_above_length: u64,
    length: u64,
    /// The file system has room for the file up to this length, also if the disk is full.
    reserved: u64,
    /// A write failed, so the owner may have records that the file lacks. The next write replaces it.
    outdated: bool,
    /// The lines of ignorable records that this version does not know.
    kept: KeptLines,
    /// The content of the format file; None if there is none.
    format: Option<u32>,
    /// Why the journal could not be loaded.
    unavailable: Option<String>,
    /// Held as long as the journal is open.
    lock: Option<Flock<File>>,
    codec: PhantomData<fn() -> C>,
}

#[derive(Default)]
struct KeptLines {
    text: Vec<u8>,
    lines: usize,
}

impl<C: Codec> Journal<C> {
    /// A journal in this directory, which is created below an existing or new parent. Nothing is read before
    /// [`Self::load`].
    pub fn new(name: &'static str, dir: PathBuf) -> Self {
        Self {
            name,
            dir,
            file: None,
            lines: 0,
            compact_above: 0,
            compact_above_length: 0,
            length: 0,
            reserved: 0,
            outdated: false,
            kept: KeptLines::default(),
            format: None,
            unavailable: Some("it has not been read yet".to_owned()),
            lock: None,
            codec: PhantomData,
        }
    }

    /// Reads what earlier runs recorded, in the order in which they recorded it. The journal belongs to this process once
    /// this succeeds. [`Error::Busy`] means that another process has it.
    pub fn load(&mut self, apply: impl FnMut(C::Record)) -> Result<Loaded, Error> {
        let loaded = self.lock_and_read(apply);
        self.unavailable = loaded.as_ref().err().map(|error| ErrorChain(error).to_string());
        loaded
    }

    /// Whether [`Self::load`] has succeeded.
    pub fn is_loaded(&self) -> bool {
        self.unavailable.is_none()
    }

    pub fn path(&self) -> PathBuf {
        self.dir.join(FILE)
    }

    fn lock_and_read(&mut self, apply: impl FnMut(C::Record)) -> Result<Loaded, Error> {
        // On a read-only disk the directory and the lock of an earlier run are enough.
        let created = self.create_dir();
        if self.lock.is_none() {
            self.lock = match lock(&self.dir.join(LOCK)) {
                Ok(lock) => Some(lock),
                Err(error @ Error::Busy(_)) => return Err(error),
                Err(error) => return Err(created.err().unwrap_or(error)),
            };
        }
        self.format = read_format(&self.dir.join(FORMAT_FILE), C::FORMAT)?;
        let path = self.path();
        let file = match File::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            file => Some(file.map_err(failed("read", &path))?),
        };
        let is_lost = file.is_none() && self.format.is_some();
        let replayed = match file {
            Some(file) => replay::<C>(BufReader::new(file), apply),
            None => replay::<C>(io::empty(), apply),
        };
        let (kept, loaded) = replayed.map_err(failed("read", &path))?;
        self.kept = kept;
        Ok(if is_lost { Loaded { damage: Damage::Lost, ..loaded } } else { loaded })
    }

    /// Keeps the damaged file under another name, or an empty one in place of a lost file, and never replaces one that was kept
    /// earlier. Call it before the first write, which replaces the journal and makes both changes durable.
    pub fn keep_damaged(&self, damage: Damage) -> Result<(), Error> {
        let path = self.path();
        let inode = |path: &Path| fs::metadata(path).ok().map(|metadata| metadata.ino());
        for name in self.damaged_names() {
            let kept = match damage {
                Damage::None => return Ok(()),
                // The daemon was killed before the first write.
                Damage::Inside if inode(&name).is_some_and(|kept| inode(&path) == Some(kept)) => Ok(()),
                Damage::Inside => fs::hard_link(&path, &name),
                Damage::Lost => File::create_new(&name).map(drop),
            };
            match kept {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                kept => return kept.map_err(failed("keep the damaged journal in", &name)),
            }
        }
        Ok(())
    }

    /// The files of [`Self::keep_damaged`] that exist.
    pub fn damaged_files(&self) -> Vec<PathBuf> {
        self.damaged_names().filter(|name| fs::symlink_metadata(name).is_ok()).collect()
    }

    fn damaged_names(&self) -> impl Iterator<Item = PathBuf> {
        let more = (2..=MAX_DAMAGED).map(|number| format!("{DAMAGED}.{number}"));
        std::iter::once(DAMAGED.to_owned()).chain(more).map(|name| self.dir.join(name))
    }

    fn create_dir(&self) -> Result<(), Error> {
        fs::create_dir_all(&self.dir).map_err(failed("create directory", &self.dir))?;
        // A directory entry that is lost in a power cut takes everything below it with it.
        for parent in self.dir.ancestors().skip(1).take(2) {
            atomic::sync_dir(parent).map_err(failed("sync directory", parent))?;
        }
        Ok(())
    }

    /// When this succeeds, the records survive a power cut. When it fails, they may or may not be on disk, and the next
    /// write replaces the whole file with the records of `before` first. `before` is everything that was recorded earlier.
    pub fn append<I>(&mut self, records: &[C::Record], before: impl FnOnce() -> I) -> Result<(), Error>
    where
        I: IntoIterator<Item = C::Record>,
    {
        self.append_with_room(records, 0, before)
    }

    /// As [`Self::append`]. When this succeeds, later records of `room` bytes can be written also on a full disk, as far as
    /// the file system can reserve blocks. What fits into that room is written although the file cannot be replaced.
    pub fn append_with_room<I>(
        &mut self,
        records: &[C::Record],
        room: u64,
        before: impl FnOnce() -> I,
    ) -> Result<(), Error>
    where
        I: IntoIterator<Item = C::Record>,
    {
        if let Some(reason) = &self.unavailable {
            return Err(Error::Unavailable { journal: self.name, reason: reason.clone() });
        }
        let text: Vec<u8> = records.iter().flat_map(line::<C>).collect();
        let needed = text.len() as u64 + room;
        let has_room = |journal: &Self| {
            journal.file.is_some() && !records.is_empty() && journal.length + needed <= journal.reserved
        };
        if self.file.is_none() {
            self.replace_with_room(before(), needed)?;
        } else if self.outdated {
            let replaced = self.replace_with_room(before(), needed);
            replaced.or_else(|error| if has_room(self) { Ok(()) } else { Err(error) })?;
        } else if self.lines > self.compact_above || self.length > self.compact_above_length {
            self.compact(before(), needed)?;
        }
        let path = self.path();
        let Some(file) = self.file.as_mut() else { return Ok(()) };
        if room > 0 && self.length + needed > self.reserved {
            // Before the first byte is written, so that the file keeps what it has reserved for others.
            if let Err(source) = atomic::reserve(file, self.length, needed) {
                self.outdated = true;
                return Err(failed("reserve room in", &path)(source));
            }
            self.reserved = self.length + needed;
        }
        if text.is_empty() {
            return Ok(());
        }
        if let Err(source) = file.write_all(&text).and_then(|()| file.sync_data()) {
            let _ = file.set_len(self.length);
            self.file = None;
            return Err(failed("write", &path)(source));
        }
        self.length += text.len() as u64;
        self.lines += records.len();
        Ok(())
    }

    /// Whether the file lacks records of its owner, because a write failed and the file could not be replaced since then.
    pub fn is_outdated(&self) -> bool {
        self.outdated
    }

    /// Replaces the file with one that holds these records and the kept lines and nothing else.
    pub fn replace(&mut self, records: impl IntoIterator<Item = C::Record>) -> Result<(), Error> {
        self.replace_with_room(records, 0)
    }

    fn replace_with_room(
        &mut self,
        records: impl IntoIterator<Item = C::Record>,
        room: u64,
    ) -> Result<(), Error> {
        if let Some(reason) = &self.unavailable {
            return Err(Error::Unavailable { journal: self.name, reason: reason.clone() });
        }
        let snapshot = self.stage(records, room)?;
        // The number is on disk before the first line of the format. Until then the journal has lines of an earlier
        // format, which this version reads too.
        if self.format != Some(C::FORMAT) {
            let path = self.dir.join(FORMAT_FILE);
            let content = format!("{}\n", C::FORMAT);
            atomic::replace(&path, path.with_extension("new"), content.as_bytes())
                .map_err(failed("write", &path))?;
            self.format = Some(C::FORMAT);
        }
        self.install(snapshot)
    }

    /// Replaces a file that has grown. A disk with room for a record but not for a second file is no reason to fail.
    fn compact(&mut self, records: impl IntoIterator<Item = C::Record>, room: u64) -> Result<(), Error> {
        match self.stage(records, room) {
            Ok(snapshot) => self.install(snapshot),
            Err(error) => {
                warn!(journal = self.name, error = %ErrorChain(&error), "cannot compact a journal, trying again later");
                self.compact_above = self.lines + COMPACT_AFTER;
                self.compact_above_length = self.length + COMPACT_AFTER_LENGTH;
                Ok(())
            }
        }
    }

    fn stage(&self, records: impl IntoIterator<Item = C::Record>, room: u64) -> Result<Snapshot, Error> {
        let path = self.dir.join(SNAPSHOT);
        let (mut text, mut lines) = (Vec::new(), self.kept.lines);
        for record in records {
            text.extend(line::<C>(&record));
            lines += 1;
        }
        text.extend(&self.kept.text);
        let staged = StagedFile::write(path.clone(), &text, room).map_err(failed("write", &path))?;
        let length = text.len() as u64;
        Ok(Snapshot { staged, length, reserved: length + room, lines })
    }

    fn install(&mut self, snapshot: Snapshot) -> Result<(), Error> {
        let Snapshot { staged, length, reserved, lines } = snapshot;
        let path = self.path();
        // From here on the old file may have lost its name.
        self.file = None;
        let file = staged.install(&path).map_err(failed("replace", &path))?;
        self.compact_above = COMPACT_AFTER + 2 * lines;
        self.compact_above_length = COMPACT_AFTER_LENGTH + 2 * length;
        (self.file, self.length, self.lines) = (Some(file), length, lines);
        (self.reserved, self.outdated) = (reserved, false);
        Ok(())
    }
}

/// All records in a file that does not have the journal's name yet.
struct Snapshot {
    staged: StagedFile,
    length: u64,
    reserved: u64,
    lines: usize,
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

/// The content of the format file, if this version knows the format.
fn read_format(path: &Path, known: u32) -> Result<Option<u32>, Error> {
    let bytes = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.map_err(failed("read", path))?,
    };
    let number = str::from_utf8(&bytes).ok().and_then(|text| text.trim_end().parse::<u32>().ok());
    match number {
        Some(found) if found > known => Err(Error::NewerFormat { path: path.to_owned(), found, known }),
        Some(found) if found >= FIRST_FORMAT => Ok(Some(found)),
        _ => Err(Error::MalformedFormat { path: path.to_owned() }),
    }
}

/// A record as the journal holds it.
pub fn line<C: Codec>(record: &C::Record) -> Vec<u8> {
    let text = C::encode(record);
    let mark = if C::is_ignorable(record) { IGNORABLE } else { REQUIRED };
    format!("{:016x}{mark}{text}\n", line_digest(mark, &text)).into_bytes()
}

fn line_digest(mark: char, text: &str) -> u64 {
    if mark == IGNORABLE { digest(["?", text]) } else { digest([text]) }
}

/// A valid line.
enum Line<R> {
    Record(R),
    /// An ignorable record that this version does not know.
    Ignored,
}

/// Reads one line after the other: the whole journal can be larger than its records.
fn replay<C: Codec>(
    mut journal: impl BufRead,
    mut apply: impl FnMut(C::Record),
) -> io::Result<(KeptLines, Loaded)> {
    let (mut bad, mut good, mut zeros, mut ended) = (false, false, false, false);
    let mut loaded = Loaded { is_empty: true, damage: Damage::None };
    let (mut kept, mut line) = (KeptLines::default(), Vec::new());
    while journal.read_until(b'\n', &mut line)? > 0 {
        loaded.is_empty = false;
        (ended, zeros) = (line.ends_with(b"\n"), zeros || line.contains(&0));
        match parse::<C>(&line) {
            None => bad = true,
            Some(parsed) => {
                if bad {
                    loaded.damage = Damage::Inside;
                }
                good = true;
                match parsed {
                    Line::Record(record) => apply(record),
                    Line::Ignored => {
                        kept.text.extend(&line);
                        kept.lines += 1;
                    }
                }
            }
        }
        line.clear();
    }
    // A truncated line is a non-empty part of a line without a newline and without zeros. The first line was written in
    // full or not at all.
    if bad && (!good || ended || zeros) {
        loaded.damage = Damage::Inside;
    }
    Ok((kept, loaded))
}

/// None if the line is damaged, or holds a record that this version must understand and does not know.
fn parse<C: Codec>(line: &[u8]) -> Option<Line<C::Record>> {
    let text = str::from_utf8(line).ok()?.strip_suffix('\n')?;
    let (expected, rest) = text.split_at_checked(DIGEST_DIGITS)?;
    let mark = rest.chars().next().filter(|mark| [REQUIRED, IGNORABLE].contains(mark))?;
    let text = rest.strip_prefix(mark)?;
    if u64::from_str_radix(expected, 16).ok()? != line_digest(mark, text) {
        return None;
    }
    match C::decode(text) {
        Some(record) => Some(Line::Record(record)),
        None if mark == IGNORABLE => Some(Line::Ignored),
        None => None,
    }
}

/// The record in a line, if this version knows it.
#[cfg(test)]
pub fn parse_record<C: Codec>(line: &[u8]) -> Option<C::Record> {
    match parse::<C>(line)? {
        Line::Record(record) => Some(record),
        Line::Ignored => None,
    }
}

#[cfg(test)]
mod tests;
