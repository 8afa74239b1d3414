//! The journal of hot-plugged attachments: what was attached, and what the daemon is about to attach.
//!
//! One thread writes it. Records that workers append at the same time share one fsync. The records are also in memory,
//! so that readers never wait for the disk.
//!
//! A journal that cannot be written accepts no intent, so nothing is attached. With an intent, the file system reserves room
//! for the result, so that a disk that becomes full meanwhile does not lose it. What has happened already (an attachment
//! was made or removed) counts in memory, and the next successful write replaces the file with what is in memory.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use api::ErrorChain;
use plan::{
    hotplug::{AttachmentRecord, RecordPhase},
    ipam::AttachmentKey,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::{oneshot, watch};
use tracing::{info, warn};

pub use crate::store::journal::Error;
use crate::store::journal::{self, Codec, Damage};

/// The journal's directory in the state directory of the daemon.
const DIRECTORY: &str = "hotplug";
/// What messages call the journal.
const NAME: &str = "hot-plug journal";
/// What a damaged journal means, and what to do.
const DAMAGED: &str = "the hot-plug journal was damaged or lost: interfaces of which the node has no result are never \
     detached, so create a pod again if it keeps an interface that its annotation does not request";
/// How often a journal that cannot be written is tried again.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// The room that is reserved for the result of an ADD, besides the record of its intent. A result has some hundred bytes.
const RESULT_ROOM: u64 = 32 * 1024;
/// The room that is reserved for the default routes of a pod, if an attachment is going to replace them.
const ROUTES_ROOM: u64 = 16 * 1024;
/// Bounds the records that share an fsync.
const MAX_BATCH: usize = 256;

/// A line of the journal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum JournalEntry {
    /// Replaces the record with the same key.
    Attachment(Arc<AttachmentRecord>),
    /// Also removes the routes.
    Removed(AttachmentKey),
    /// The default routes of the pod before an attachment with `default-route` replaced them. Empty until they are known.
    Routes(AttachmentKey, Vec<Value>),
    /// The attachments of other programs that a pod was seen to request, by the UID that the container runtime uses. Replaces
    /// those of the pod. Versions that do not know it detach by the annotation alone.
    Requested(String, BTreeSet<AttachmentKey>),
}

struct AttachmentCodec;

impl Codec for AttachmentCodec {
    type Record = JournalEntry;
    const FORMAT: u32 = 1;

    fn encode(record: &JournalEntry) -> String {
        // Cannot fail: all map keys of a record serialize as strings.
        serde_json::to_string(record).unwrap_or_default()
    }

    fn decode(text: &str) -> Option<JournalEntry> {
        serde_json::from_str(text).ok()
    }

    fn is_ignorable(record: &JournalEntry) -> bool {
        matches!(record, JournalEntry::Requested(..))
    }
}

#[derive(Debug, Default)]
struct Records {
    attachments: BTreeMap<AttachmentKey, Arc<AttachmentRecord>>,
    routes: BTreeMap<AttachmentKey, Vec<Value>>,
    requested: BTreeMap<String, BTreeSet<AttachmentKey>>,
}

impl Records {
    fn apply(&mut self, entry: JournalEntry) {
        match entry {
            JournalEntry::Attachment(record) => {
                // The routes belong to the attachment that is being made, or was made.
                if matches!(record.phase, RecordPhase::Intent { .. } | RecordPhase::Removed) {
                    self.routes.remove(&record.key);
                }
                self.attachments.insert(record.key.clone(), record);
            }
            JournalEntry::Removed(key) => {
                self.attachments.remove(&key);
                self.routes.remove(&key);
            }
            JournalEntry::Routes(key, routes) => {
                self.routes.insert(key, routes);
            }
            JournalEntry::Requested(pod, keys) if keys.is_empty() => _ = self.requested.remove(&pod),
            JournalEntry::Requested(pod, keys) => _ = self.requested.insert(pod, keys),
        }
    }

    /// The room that the results of running ADDs need, once these entries are written.
    fn room(&self, entries: &[JournalEntry]) -> u64 {
        let room = |record: &Arc<AttachmentRecord>| {
            let intent = matches!(record.phase, RecordPhase::Intent { .. });
            intent.then(|| {
                let entry = JournalEntry::Attachment(Arc::clone(record));
                journal::line::<AttachmentCodec>(&entry).len() as u64 + RESULT_ROOM
            })
        };
        let known = self.attachments.iter().filter_map(|(key, record)| Some((key, room(record)?)));
        let mut rooms: BTreeMap<&AttachmentKey, u64> = known.collect();
        let expected = self.routes.iter().filter(|(_, routes)| routes.is_empty());
        let mut expected: BTreeSet<&AttachmentKey> = expected.map(|(key, _)| key).collect();
        for entry in entries {
            match entry {
                JournalEntry::Attachment(record) => match room(record) {
                    Some(room) => _ = rooms.insert(&record.key, room),
                    None => _ = rooms.remove(&record.key),
                },
                JournalEntry::Removed(key) => _ = rooms.remove(key),
                JournalEntry::Routes(key, routes) if routes.is_empty() => _ = expected.insert(key),
                JournalEntry::Routes(key, _) => _ = expected.remove(key),
                JournalEntry::Requested(..) => {}
            }
        }
        let expected = expected.into_iter().filter(|key| rooms.contains_key(key));
        rooms.values().sum::<u64>() + expected.map(|_| ROUTES_ROOM).sum::<u64>()
    }

    /// Whether room is reserved for an entry: it ends an ADD that was announced, or has the routes that it replaces.
    fn has_room(&self, entry: &JournalEntry) -> bool {
        let key = match entry {
            JournalEntry::Routes(key, routes) => {
                let expected = self.routes.get(key).is_some_and(Vec::is_empty);
                return expected && !routes.is_empty();
            }
            JournalEntry::Attachment(record) if !matches!(record.phase, RecordPhase::Intent { .. }) => {
                &record.key
            }
            JournalEntry::Removed(key) => key,
            JournalEntry::Attachment(_) | JournalEntry::Requested(..) => return false,
        };
        let known = self.attachments.get(key);
        known.is_some_and(|known| matches!(known.phase, RecordPhase::Intent { .. }))
    }

    fn entries(&self) -> Vec<JournalEntry> {
        let attachments = self.attachments.values().cloned().map(JournalEntry::Attachment);
        let routes =
            self.routes.iter().map(|(key, routes)| JournalEntry::Routes(key.clone(), routes.clone()));
        let requested =
            self.requested.iter().map(|(pod, keys)| JournalEntry::Requested(pod.clone(), keys.clone()));
        attachments.chain(routes).chain(requested).collect()
    }
}

/// The attachments of this node. Cheap to clone.
#[derive(Clone)]
pub struct AttachmentJournal {
    records: Arc<Mutex<Records>>,
    queue: mpsc::Sender<PendingWrite>,
    problem: watch::Receiver<Option<String>>,
    loaded: Arc<AtomicBool>,
    damaged: Arc<AtomicBool>,
    dir: Arc<Path>,
}

/// A record that waits to be written.
struct PendingWrite {
    entry: JournalEntry,
    effect: Effect,
    done: oneshot::Sender<Result<(), NotRecorded>>,
}

/// Whether a record that cannot be written counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Effect {
    /// It announces an action, which must not happen without it.
    Announced,
    /// It says what has happened.
    Happened,
}

/// The record is not on disk.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the hot-plug journal of the node cannot be written: {0}; free disk space on the node, or make /var/lib/patchbay writable"
)]
pub struct NotRecorded(String);

impl AttachmentJournal {
    /// Opens the journal and reads what earlier runs recorded. Fails only while another daemon has it open, or if no
    /// thread can be started. Blocks on the disk.
    pub fn open(state_dir: &Path) -> Result<Self, Error> {
        let dir = state_dir.join(DIRECTORY);
        let kept = Arc::from(dir.as_path());
        let records = Arc::<Mutex<Records>>::default();
        let (report, problem) = watch::channel(None);
        let (loaded, damaged) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let mut writer = Writer {
            journal: journal::Journal::new(NAME, dir.clone()),
            records: Arc::clone(&records),
            problem: report,
            loaded: Arc::clone(&loaded),
            damaged: Arc::clone(&damaged),
            damage: None,
        };
        if let Err(error @ Error::Busy(_)) = writer.load() {
            return Err(error);
        }
        let (queue, pending) = mpsc::channel();
        thread::Builder::new()
            .name("hotplug-journal".to_owned())
            .spawn(move || writer.run(&pending))
            .map_err(|source| Error::Disk { what: "start a thread for the journal in", path: dir, source })?;
        Ok(Self { records, queue, problem, loaded, damaged, dir: kept })
    }

    /// Why the journal cannot be written or is incomplete, and every change of that.
    pub fn problem(&self) -> watch::Receiver<Option<String>> {
        self.problem.clone()
    }

    /// The directory of the journal.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Whether it is known what earlier runs recorded.
    pub fn is_loaded(&self) -> bool {
        self.loaded.load(Ordering::Acquire)
    }

    /// Whether records were lost, and no operator has handled that yet.
    pub fn is_damaged(&self) -> bool {
        self.damaged.load(Ordering::Acquire)
    }

    /// The records of a pod, of all its sandboxes, by the UID that the container runtime uses.
    pub fn records_of(&self, runtime_uid: &str) -> Vec<Arc<AttachmentRecord>> {
        let records = lock(&self.records);
        records.attachments.values().filter(|record| record.pod.runtime_uid == runtime_uid).cloned().collect()
    }

    /// The keys of all records.
    pub fn keys(&self) -> BTreeSet<AttachmentKey> {
        lock(&self.records).attachments.keys().cloned().collect()
    }

    /// The pods with records or requested attachments, by the UID that the container runtime uses.
    pub fn pods(&self) -> BTreeSet<String> {
        let records = lock(&self.records);
        let attached = records.attachments.values().map(|record| &record.pod.runtime_uid);
        attached.chain(records.requested.keys()).cloned().collect()
    }

    /// The pods with a record of one of these network namespaces.
    pub fn pods_in(&self, is_gone: impl Fn(&str) -> bool) -> BTreeSet<String> {
        let records = lock(&self.records);
        let gone = records.attachments.values().filter(|record| is_gone(&record.netns));
        gone.map(|record| record.pod.runtime_uid.clone()).collect()
    }

    /// Records what is about to be attached. It is on disk when this succeeds, and does not count otherwise.
    pub async fn announce(&self, record: AttachmentRecord) -> Result<(), NotRecorded> {
        self.write(JournalEntry::Attachment(Arc::new(record)), Effect::Announced).await
    }

    /// Records what has been attached or has changed. It counts, and survives a crash only if this succeeds.
    pub async fn update(&self, record: AttachmentRecord) -> Result<(), NotRecorded> {
        self.write(JournalEntry::Attachment(Arc::new(record)), Effect::Happened).await
    }

    /// Records the default routes of a pod before an attachment replaces them. On disk when this succeeds. Before the ADD,
    /// without routes: they will be replaced, and there is room for them also if the disk is full then.
    pub async fn save_routes(&self, key: AttachmentKey, routes: Vec<Value>) -> Result<(), NotRecorded> {
        if lock(&self.records).routes.get(&key) == Some(&routes) {
            return Ok(());
        }
        self.write(JournalEntry::Routes(key, routes), Effect::Announced).await
    }

    /// The routes of [`Self::save_routes`].
    pub fn saved_routes(&self, key: &AttachmentKey) -> Vec<Value> {
        lock(&self.records).routes.get(key).cloned().unwrap_or_default()
    }

    /// Whether an attachment that is not finished replaces the default routes of its pod, or has begun to.
    pub fn changes_routes(&self, key: &AttachmentKey) -> bool {
        lock(&self.records).routes.contains_key(key)
    }

    /// The attachments of [`Self::set_requested`].
    pub fn requested(&self, runtime_uid: &str) -> BTreeSet<AttachmentKey> {
        lock(&self.records).requested.get(runtime_uid).cloned().unwrap_or_default()
    }

    /// Records which attachments of other programs a pod was seen to request. It counts, and survives a crash only if this
    /// succeeds.
    pub async fn set_requested(
        &self,
        runtime_uid: &str,
        keys: BTreeSet<AttachmentKey>,
    ) -> Result<(), NotRecorded> {
        if self.requested(runtime_uid) == keys {
            return Ok(());
        }
        self.write(JournalEntry::Requested(runtime_uid.to_owned(), keys), Effect::Happened).await
    }

    /// Records that an attachment is gone. It counts, and survives a crash only if this succeeds.
    pub async fn remove(&self, key: AttachmentKey) -> Result<(), NotRecorded> {
        if !lock(&self.records).attachments.contains_key(&key) {
            return Ok(());
        }
        self.write(JournalEntry::Removed(key), Effect::Happened).await
    }

    async fn write(&self, entry: JournalEntry, effect: Effect) -> Result<(), NotRecorded> {
        let exited = || NotRecorded("its thread has exited".to_owned());
        let (done, written) = oneshot::channel();
        self.queue.send(PendingWrite { entry, effect, done }).map_err(|_| exited())?;
        written.await.map_err(|_| exited())?
    }
}

/// Nothing that holds the lock can panic.
fn lock(records: &Mutex<Records>) -> MutexGuard<'_, Records> {
    records.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes the journal. It alone changes the records in memory.
struct Writer {
    journal: journal::Journal<AttachmentCodec>,
    records: Arc<Mutex<Records>>,
    problem: watch::Sender<Option<String>>,
    loaded: Arc<AtomicBool>,
    damaged: Arc<AtomicBool>,
    /// Records were lost, and what to do about it.
    damage: Option<String>,
}

impl Writer {
    fn run(mut self, queue: &mpsc::Receiver<PendingWrite>) {
        loop {
            let first = if self.has_failed() || self.damage.is_some() {
                queue.recv_timeout(RETRY_INTERVAL)
            } else {
                queue.recv().map_err(|mpsc::RecvError| mpsc::RecvTimeoutError::Disconnected)
            };
            match first {
                Ok(first) => {
                    let batch = std::iter::once(first).chain(queue.try_iter()).take(MAX_BATCH).collect();
                    self.write(batch);
                }
                Err(mpsc::RecvTimeoutError::Timeout) => self.retry(),
                Err(mpsc::RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Reads the journal, and replaces the file with what is readable.
    fn load(&mut self) -> Result<(), Error> {
        let mut read = Records::default();
        let loaded = self.journal.load(|entry| read.apply(entry));
        let loaded = match loaded {
            Ok(loaded) => loaded,
            Err(error) => {
                warn!(error = %ErrorChain(&error), "cannot read the hot-plug journal, retrying; nothing is attached");
                self.report(Some(&error));
                return Err(error);
            }
        };
        self.note_damage(loaded.damage);
        // What was recorded while the file could not be read is newer.
        let mut records = lock(&self.records);
        read.attachments.append(&mut records.attachments);
        read.routes.append(&mut records.routes);
        read.requested.append(&mut records.requested);
        *records = read;
        drop(records);
        self.loaded.store(true, Ordering::Release);
        self.save(&[]).inspect_err(|error| {
            warn!(error = %ErrorChain(error), "cannot write the hot-plug journal, retrying; nothing is attached");
        })
    }

    /// Keeps a damaged file. As long as one is kept, the journal counts as damaged, also after a restart.
    fn note_damage(&mut self, damage: Damage) {
        if let Err(error) = self.journal.keep_damaged(damage) {
            warn!(error = %ErrorChain(&error), "cannot keep the damaged hot-plug journal; the next start of the daemon does not report it");
        }
        self.damage = match self.kept_damage() {
            None if damage != Damage::None => Some(DAMAGED.to_owned()),
            kept => kept,
        };
        if let Some(problem) = &self.damage {
            warn!("{problem}");
        }
        self.damaged.store(self.damage.is_some(), Ordering::Release);
    }

    /// What to do about the damaged files that are kept.
    fn kept_damage(&self) -> Option<String> {
        let files: Vec<String> =
            self.journal.damaged_files().iter().map(|file| file.display().to_string()).collect();
        (!files.is_empty()).then(|| format!("{DAMAGED}, then delete {}", files.join(" and ")))
    }

    fn retry(&mut self) {
        let failed = self.has_failed();
        let saved = if self.journal.is_loaded() { self.save(&[]) } else { self.load() };
        if saved.is_ok() && failed {
            info!("the hot-plug journal can be written again");
        }
    }

    /// Whether the journal cannot be read or written.
    fn has_failed(&self) -> bool {
        !self.journal.is_loaded() || *self.problem.borrow() != self.damage
    }

    fn write(&mut self, batch: Vec<PendingWrite>) {
        let entries: Vec<JournalEntry> = batch.iter().map(|write| write.entry.clone()).collect();
        let not_recorded = |error: Error| NotRecorded(ErrorChain(&error).to_string());
        let saved = self.save(&entries).map_err(not_recorded);
        let has_room: Vec<bool> = entries.iter().map(|entry| lock(&self.records).has_room(entry)).collect();
        let results = entries.iter().zip(&has_room).filter(|(_, has_room)| **has_room);
        let results: Vec<JournalEntry> = results.map(|(entry, _)| entry.clone()).collect();
        // Results have room that the other entries do not have.
        let separately = saved.is_err() && (1..batch.len()).contains(&results.len());
        let kept = if separately { self.save(&results).map_err(not_recorded) } else { saved.clone() };
        let mut records = lock(&self.records);
        let mut replies = Vec::new();
        for (PendingWrite { entry, effect, done }, has_room) in batch.into_iter().zip(has_room) {
            let written = if has_room { &kept } else { &saved };
            if written.is_ok() || effect == Effect::Happened {
                records.apply(entry);
            }
            replies.push((done, written.clone()));
        }
        drop(records);
        for (done, saved) in replies {
            // A worker that was aborted does not wait.
            let _ = done.send(saved);
        }
    }

    fn save(&mut self, entries: &[JournalEntry]) -> Result<(), Error> {
        let room = lock(&self.records).room(entries);
        let saved = self.journal.append_with_room(entries, room, || lock(&self.records).entries());
        // A journal that only has reserved room left cannot be written otherwise.
        if saved.is_err() || !self.journal.is_outdated() {
            self.report(saved.as_ref().err());
        }
        saved
    }

    fn report(&mut self, error: Option<&Error>) {
        // Without a file that says so, damage is reported until the daemon stops.
        if self.damage.as_deref().is_some_and(|damage| damage != DAMAGED) {
            self.damage = self.kept_damage();
            self.damaged.store(self.damage.is_some(), Ordering::Release);
        }
        let what = if self.loaded.load(Ordering::Acquire) {
            "the hot-plug journal cannot be written"
        } else {
            "the hot-plug journal cannot be read, interfaces of running pods are not changed"
        };
        let problem = error.map(|error| format!("{what}: {}", ErrorChain(error)));
        let problem = problem.or_else(|| self.damage.clone());
        self.problem.send_if_modified(|current| {
            let changed = *current != problem;
            *current = problem;
            changed
        });
    }
}

#[cfg(test)]
mod tests;
