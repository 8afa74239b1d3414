use super::*;

/// `set:<text>` in every version, `note:<text>` from version 2 on, where it is ignorable.
#[derive(Debug, Clone, PartialEq, Eq)]
enum TestRecord {
    Set(String),
    Note(String),
}

/// The version of the daemon that wrote or reads a journal.
struct Version<const FORMAT: u32, const NOTES: bool>;
/// The daemon of today.
type Current = Version<1, false>;
/// A later daemon with another kind of record, in the same format.
type WithNotes = Version<1, true>;
/// A later daemon with another format.
type NextFormat = Version<2, true>;

impl<const FORMAT: u32, const NOTES: bool> Codec for Version<FORMAT, NOTES> {
    type Record = TestRecord;
    const FORMAT: u32 = FORMAT;

    fn encode(record: &TestRecord) -> String {
        match record {
            TestRecord::Set(text) => format!("set:{text}"),
            TestRecord::Note(text) => format!("note:{text}"),
        }
    }

    fn decode(text: &str) -> Option<TestRecord> {
        if let Some(note) = text.strip_prefix("note:") {
            return NOTES.then(|| TestRecord::Note(note.to_owned()));
        }
        text.strip_prefix("set:").map(|text| TestRecord::Set(text.to_owned()))
    }

    fn is_ignorable(record: &TestRecord) -> bool {
        matches!(record, TestRecord::Note(_))
    }
}

fn set(text: &str) -> TestRecord {
    TestRecord::Set(text.to_owned())
}

fn note(text: &str) -> TestRecord {
    TestRecord::Note(text.to_owned())
}

struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("patchbay-store-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn dir(&self) -> PathBuf {
        self.0.join("state/test")
    }

    fn file(&self) -> PathBuf {
        self.dir().join(FILE)
    }

    fn format(&self) -> PathBuf {
        self.dir().join(FORMAT_FILE)
    }

    fn write(&self, bytes: impl AsRef<[u8]>) {
        fs::create_dir_all(self.dir()).unwrap();
        fs::write(self.file(), bytes).unwrap();
    }

    fn load<C: Codec<Record = TestRecord>>(&self) -> (Journal<C>, Result<Loaded, Error>, Vec<TestRecord>) {
        let mut journal = Journal::<C>::new("test journal", self.dir());
        let mut records = Vec::new();
        let loaded = journal.load(|record| records.push(record));
        (journal, loaded, records)
    }

    /// Loads the journal, which must be intact, as a version of the daemon.
    fn open<C: Codec<Record = TestRecord>>(&self) -> (Journal<C>, Vec<TestRecord>) {
        let (journal, loaded, records) = self.load();
        assert_eq!(loaded.unwrap().damage, Damage::None);
        (journal, records)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn appended_records_are_read_in_order() {
    let scratch = Scratch::new("order");
    let (mut journal, loaded, records) = scratch.load::<Current>();
    assert_eq!(loaded.unwrap(), Loaded { is_empty: true, damage: Damage::None });
    assert!(records.is_empty() && journal.is_loaded());
    journal.append(&[set("a"), set("b")], Vec::new).unwrap();
    journal.append(&[set("c")], || -> Vec<TestRecord> { unreachable!("the file exists") }).unwrap();
    drop(journal);
    let (mut journal, loaded, records) = scratch.load::<Current>();
    assert_eq!(loaded.unwrap(), Loaded { is_empty: false, damage: Damage::None });
    assert_eq!(records, [set("a"), set("b"), set("c")]);
    // The first write of a process replaces the file.
    journal.append(&[set("d")], || [set("abc")]).unwrap();
    drop(journal);
    assert_eq!(scratch.open::<Current>().1, [set("abc"), set("d")]);
}

#[test]
fn each_damaged_journal_is_kept_once_and_none_is_overwritten() {
    let scratch = Scratch::new("keep");
    let contents = ["first", "second"].map(|text| format!("{text} damage\n"));
    for (content, kept) in contents.iter().zip(1..) {
        scratch.write(content);
        // The second daemon finds what the first one kept before it was killed.
        for _ in 0..2 {
            let (journal, loaded, _) = scratch.load::<Current>();
            assert_eq!(loaded.unwrap().damage, Damage::Inside);
            journal.keep_damaged(Damage::Inside).unwrap();
            assert_eq!(journal.damaged_files().len(), kept);
        }
        let (mut journal, _, _) = scratch.load::<Current>();
        journal.replace([set("a")]).unwrap();
        drop(journal);
        assert_eq!(scratch.open::<Current>().1, [set("a")]);
    }
    let (journal, _) = scratch.open::<Current>();
    let files = journal.damaged_files();
    assert_eq!(files, [scratch.dir().join("journal.damaged"), scratch.dir().join("journal.damaged.2")]);
    assert_eq!(files.iter().map(|file| fs::read_to_string(file).unwrap()).collect::<Vec<_>>(), contents);
    for _ in 0..2 * MAX_DAMAGED {
        journal.keep_damaged(Damage::Lost).unwrap();
    }
    assert_eq!(journal.damaged_files().len(), MAX_DAMAGED);
    fs::remove_file(&files[0]).unwrap();
    assert_eq!(journal.damaged_files().len(), MAX_DAMAGED - 1);
}

#[test]
fn a_journal_that_is_gone_is_lost_and_none_that_was_never_written() {
    let scratch = Scratch::new("lost");
    for _ in 0..2 {
        assert_eq!(scratch.load::<Current>().1.unwrap(), Loaded { is_empty: true, damage: Damage::None });
    }
    // A disk that is full at the first start.
    fs::create_dir(scratch.dir().join(SNAPSHOT)).unwrap();
    scratch.open::<Current>().0.append(&[set("a")], Vec::new).unwrap_err();
    assert_eq!(scratch.load::<Current>().1.unwrap().damage, Damage::None);
    fs::remove_dir(scratch.dir().join(SNAPSHOT)).unwrap();
    // One without records is not lost.
    scratch.open::<Current>().0.replace([]).unwrap();
    assert_eq!(scratch.load::<Current>().1.unwrap(), Loaded { is_empty: true, damage: Damage::None });
    fs::remove_file(scratch.file()).unwrap();
    assert_eq!(scratch.load::<Current>().1.unwrap(), Loaded { is_empty: true, damage: Damage::Lost });
}

#[test]
fn the_bytes_of_a_line_do_not_change() {
    assert_eq!(line::<Current>(&set("a")), format!("{:016x} set:a\n", digest(["set:a"])).into_bytes());
    assert_eq!(
        line::<WithNotes>(&note("a")),
        format!("{:016x}?note:a\n", digest(["?", "note:a"])).into_bytes()
    );
}

#[test]
fn nothing_is_written_before_the_journal_was_read() {
    let scratch = Scratch::new("unread");
    scratch.write(line::<Current>(&set("a")));
    let mut journal = Journal::<Current>::new("test journal", scratch.dir());
    assert!(!journal.is_loaded());
    for written in [journal.append(&[set("b")], Vec::new), journal.replace([])] {
        let message = written.unwrap_err().to_string();
        assert_eq!(message, "the test journal cannot be read: it has not been read yet");
    }
    assert_eq!(scratch.open::<Current>().1, [set("a")]);
}

#[test]
fn a_journal_that_is_cut_at_any_byte_has_all_whole_lines_and_continues() {
    let scratch = Scratch::new("cut");
    let records = [set("one"), note("two"), set("three"), set("fo\u{fc}r"), note("five")];
    let lines: Vec<Vec<u8>> = records.iter().map(line::<WithNotes>).collect();
    let whole = lines.concat();
    for length in 0..=whole.len() {
        scratch.write(&whole[..length]);
        let complete = whole[..length].split(|byte| *byte == b'\n').count() - 1;
        let (mut journal, loaded, mut read) = scratch.load::<WithNotes>();
        assert_eq!(read, records[..complete], "{length}");
        // The first line was written in full or not at all, so a part of it is no crash.
        let damage = if complete == 0 && length > 0 { Damage::Inside } else { Damage::None };
        assert_eq!(loaded.unwrap(), Loaded { is_empty: length == 0, damage }, "{length}");
        journal.append(&[set("new")], || read.clone()).unwrap();
        drop(journal);
        read.push(set("new"));
        assert_eq!(scratch.open::<WithNotes>().1, read, "{length}");
        // An earlier version that does not know the ignorable records reads the others.
        scratch.write(&whole[..length]);
        let (_, _, known) = scratch.load::<Current>();
        let expected = records[..complete].iter().filter(|record| matches!(record, TestRecord::Set(_)));
        assert!(known.iter().eq(expected), "{length}: {known:?}");
    }
}

#[test]
fn a_rewrite_that_is_cut_at_any_byte_leaves_the_journal_as_it_was() {
    let scratch = Scratch::new("rewrite");
    let old = [line::<Current>(&set("a")), line::<Current>(&set("b"))].concat();
    let new = [line::<Current>(&set("ab")), line::<Current>(&set("c"))].concat();
    for length in 0..=new.len() {
        scratch.write(&old);
        fs::write(scratch.dir().join(SNAPSHOT), &new[..length]).unwrap();
        fs::write(scratch.dir().join("format.new"), &b"1\n"[..length.min(2)]).unwrap();
        let (mut journal, records) = scratch.open::<Current>();
        assert_eq!(records, [set("a"), set("b")], "{length}");
        journal.append(&[set("c")], || records).unwrap();
        drop(journal);
        assert_eq!(scratch.open::<Current>().1, [set("a"), set("b"), set("c")], "{length}");
    }
}

#[test]
fn a_changed_byte_anywhere_is_damage_and_the_other_lines_are_read() {
    let scratch = Scratch::new("flip");
    let records = [set("one"), note("two"), set("three")];
    let lines: Vec<Vec<u8>> = records.iter().map(line::<WithNotes>).collect();
    let whole = lines.concat();
    for position in 0..whole.len() {
        for bit in [1, 2, 4, 32] {
            let mut bytes = whole.clone();
            bytes[position] ^= bit;
            // A letter in the other case is the same hexadecimal digit.
            let same = bytes[position].eq_ignore_ascii_case(&whole[position]) && {
                let start = whole[..position].iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
                position - start < DIGEST_DIGITS
            };
            // Without its newline the last line is a truncated one.
            let truncated = position + 1 == whole.len();
            scratch.write(&bytes);
            let (_, loaded, read) = scratch.load::<WithNotes>();
            let expected = if same || truncated { Damage::None } else { Damage::Inside };
            assert_eq!(loaded.unwrap().damage, expected, "{position} {bit}");
            assert!(read.len() >= records.len() - if same { 0 } else { 2 }, "{position} {bit}: {read:?}");
            assert!(read.iter().all(|record| records.contains(record)), "{position} {bit}: {read:?}");
        }
    }
}

#[test]
fn an_unknown_record_is_damage_unless_it_is_ignorable() {
    let scratch = Scratch::new("unknown");
    // What a later version would write without the mark.
    let required = format!("{:016x} note:x\n", digest(["note:x"])).into_bytes();
    let known = line::<Current>(&set("a"));
    for bytes in [[&known[..], &required].concat(), [&required[..], &known].concat(), required.clone()] {
        scratch.write(bytes);
        assert_eq!(scratch.load::<Current>().1.unwrap().damage, Damage::Inside);
    }
    let ignorable = line::<WithNotes>(&note("x"));
    for bytes in [[&known[..], &ignorable].concat(), [&ignorable[..], &known].concat(), ignorable.clone()] {
        scratch.write(bytes);
        assert_eq!(scratch.load::<Current>().1.unwrap(), Loaded { is_empty: false, damage: Damage::None });
    }
    // The digest of an ignorable record is not that of a required one.
    for bytes in [required, ignorable] {
        let other = if bytes[DIGEST_DIGITS] == b' ' { b'?' } else { b' ' };
        let mut bytes = [&known[..], &bytes].concat();
        bytes[known.len() + DIGEST_DIGITS] = other;
        scratch.write(bytes);
        assert_eq!(scratch.load::<WithNotes>().1.unwrap().damage, Damage::Inside);
    }
}

#[test]
fn unknown_ignorable_records_stay_verbatim_and_in_order_behind_the_records_of_a_rewrite() {
    let scratch = Scratch::new("kept");
    let written = [note("1"), set("a"), note("2"), note("2"), set("b")];
    let lines: Vec<Vec<u8>> = written.iter().map(line::<WithNotes>).collect();
    // Upper case digits are no reason to write the line anew.
    let mut lines = lines;
    lines[2] = [lines[2][..DIGEST_DIGITS].to_ascii_uppercase(), lines[2][DIGEST_DIGITS..].to_vec()].concat();
    scratch.write(lines.concat());
    let (mut journal, mut records) = scratch.open::<Current>();
    assert_eq!(records, [set("a"), set("b")]);
    let kept = [&lines[0][..], &lines[2], &lines[3]].concat();
    let expect = |records: &[TestRecord], tail: &[TestRecord]| {
        let known: Vec<u8> = records.iter().flat_map(line::<Current>).collect();
        let tail: Vec<u8> = tail.iter().flat_map(line::<Current>).collect();
        assert_eq!(fs::read(scratch.file()).unwrap(), [&known[..], &kept, &tail].concat());
    };
    // At the start, and after a failed write.
    journal.replace(records.clone()).unwrap();
    expect(&records, &[]);
    journal.append(&[set("c")], || -> Vec<TestRecord> { unreachable!() }).unwrap();
    expect(&records, &[set("c")]);
    records.push(set("c"));
    journal.file = None;
    journal.append(&[set("d")], || records.clone()).unwrap();
    expect(&records, &[set("d")]);
    records.push(set("d"));
    // At compaction.
    let before = journal.lines;
    journal.compact_above = 0;
    journal.append(&[], || records.clone()).unwrap();
    expect(&records, &[]);
    assert_eq!((journal.lines, before), (7, 7));
    drop(journal);
    // After another start, and for the version that knows them.
    let (mut journal, again) = scratch.open::<Current>();
    assert_eq!(again, records);
    journal.replace(again).unwrap();
    expect(&records, &[]);
    drop(journal);
    let notes = [note("1"), note("2"), note("2")];
    assert_eq!(scratch.open::<WithNotes>().1, [&records[..], &notes].concat());
}

#[test]
fn a_version_that_knows_an_ignorable_record_keeps_no_line_of_it() {
    let scratch = Scratch::new("own");
    scratch.write([line::<WithNotes>(&note("1")), line::<WithNotes>(&set("a"))].concat());
    let (mut journal, records) = scratch.open::<WithNotes>();
    assert_eq!(records, [note("1"), set("a")]);
    journal.replace([set("a")]).unwrap();
    assert_eq!(fs::read(scratch.file()).unwrap(), line::<WithNotes>(&set("a")));
}

#[test]
fn the_format_number_is_a_file_beside_the_journal() {
    let scratch = Scratch::new("format");
    scratch.write(line::<Current>(&set("a")));
    let (mut journal, records) = scratch.open::<Current>();
    assert!(!scratch.format().exists(), "reading changes nothing");
    journal.append(&[set("b")], || records).unwrap();
    assert_eq!(fs::read_to_string(scratch.format()).unwrap(), "1\n");
    let bytes = [line::<Current>(&set("a")), line::<Current>(&set("b"))].concat();
    assert_eq!(fs::read(scratch.file()).unwrap(), bytes);
    drop(journal);
    // A later version reads the earlier format, and raises the number when it writes.
    let (mut journal, records) = scratch.open::<NextFormat>();
    assert_eq!(records, [set("a"), set("b")]);
    assert_eq!(fs::read_to_string(scratch.format()).unwrap(), "1\n");
    journal.append(&[], || records).unwrap();
    assert_eq!(fs::read_to_string(scratch.format()).unwrap(), "2\n");
}

#[test]
fn a_journal_of_a_newer_or_unreadable_format_is_neither_read_nor_written() {
    let scratch = Scratch::new("newer");
    let bytes = line::<Current>(&set("a"));
    for (content, expected) in [
        (&b"2\n"[..], "says format 2, and this version of Patchbay reads formats up to 1"),
        (b"4294967295", "says format 4294967295"),
        (b"4294967296", "holds no format number"),
        (b"0\n", "holds no format number"),
        (b"", "holds no format number"),
        (b"\xff", "holds no format number"),
        (b"one", "holds no format number"),
    ] {
        scratch.write(&bytes);
        fs::write(scratch.format(), content).unwrap();
        let (mut journal, loaded, records) = scratch.load::<Current>();
        let error = loaded.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert!(records.is_empty() && !journal.is_loaded());
        for written in [journal.append(&[set("b")], Vec::new), journal.replace([set("b")])] {
            let error = written.unwrap_err().to_string();
            assert!(
                error.starts_with("the test journal cannot be read:") && error.contains(expected),
                "{error}"
            );
        }
        assert_eq!(fs::read(scratch.file()).unwrap(), bytes);
        assert_eq!(fs::read(scratch.format()).unwrap(), content);
        // A retry succeeds as soon as the format is a known one.
        fs::remove_file(scratch.format()).unwrap();
        let mut records = Vec::new();
        journal.load(|record| records.push(record)).unwrap();
        assert_eq!(records, [set("a")]);
    }
}
