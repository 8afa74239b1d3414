//! Watches the directories of namespace files on the host.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    ffi::{OsStr, OsString},
    io,
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use nix::{
    errno::Errno,
    sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor},
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::Notify,
    time::{Instant, sleep_until},
};

use crate::host_mounts::HostMounts;

/// How often a directory is looked for that does not exist.
const MISSING_DIRECTORY_RETRY: Duration = Duration::from_secs(1);

/// A change of namespace files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NamespaceEvent {
    /// A file was created at this path. The runtime mounts the namespace on it afterwards.
    Created(String),
    /// The file was deleted: the namespace has ended.
    Deleted(String),
    /// Changes may have been missed: check all namespaces.
    CheckAll,
}

/// Watches the directories of the namespace files that it was given. Clones share the watch; one of them reads the events.
#[derive(Clone)]
pub struct NamespaceWatch(Arc<WatchState>);

struct WatchState {
    host: HostMounts,
    inotify: Inotify,
    /// The same open file, for readiness.
    readable: AsyncFd<OwnedFd>,
    directories: Mutex<Directories>,
    /// When missing directories are looked for. It outlives a caller of `next` that is cancelled.
    retry_at: Mutex<Option<Instant>>,
    /// A directory was added that is not watched yet.
    missing: Notify,
}

#[derive(Default)]
struct Directories {
    /// A directory has several paths if one of them contains a symbolic link, such as /var/run.
    watched: BTreeMap<i32, BTreeSet<PathBuf>>,
    /// They do not exist or cannot be watched now.
    missing: BTreeSet<PathBuf>,
    events: VecDeque<NamespaceEvent>,
}

impl NamespaceWatch {
    /// Watches nothing yet. Must be called in a tokio runtime.
    pub fn new(host: HostMounts) -> io::Result<Self> {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
        let readable = register(inotify.as_fd().try_clone_to_owned()?)?;
        let (directories, retry_at, missing) = (Mutex::default(), Mutex::default(), Notify::new());
        Ok(Self(Arc::new(WatchState { host, inotify, readable, directories, retry_at, missing })))
    }

    /// Watches the directory of this namespace file from now on, also if it does not exist yet. A file that was deleted
    /// before has no event: check it after this call.
    pub async fn add(&self, namespace: &str) {
        // A process is no file that is created or deleted in a watched directory.
        let parent = Path::new(namespace).parent().filter(|parent| !parent.starts_with("/proc"));
        let Some(directory) = parent.filter(|parent| parent.is_absolute()) else { return };
        // A directory that was replaced is another one: it is added again each time.
        self.watch(directory.to_owned()).await;
    }

    /// The next change. Cancel safe.
    pub async fn next(&self) -> NamespaceEvent {
        loop {
            if let Some(event) = self.directories().events.pop_front() {
                return event;
            }
            let missing = self.directories().missing.clone();
            if missing.is_empty() {
                *self.retry_at() = None;
                tokio::select! {
                    () = self.read() => {}
                    () = self.0.missing.notified() => {}
                }
            } else {
                let due = *self.retry_at().get_or_insert_with(|| Instant::now() + MISSING_DIRECTORY_RETRY);
                tokio::select! {
                    () = self.read() => {}
                    () = sleep_until(due) => {
                        self.retry(missing).await;
                        *self.retry_at() = None;
                    }
                }
            }
        }
    }

    async fn retry(&self, missing: BTreeSet<PathBuf>) {
        for directory in missing {
            if self.watch(directory).await {
                // What happened before is unknown.
                self.directories().events.push_back(NamespaceEvent::CheckAll);
            }
        }
    }

    /// Returns whether the directory is watched now.
    async fn watch(&self, directory: PathBuf) -> bool {
        let (state, path) = (Arc::clone(&self.0), directory.clone());
        let flags = AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_MOVED_TO
            | AddWatchFlags::IN_MOVED_FROM
            | AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_DELETE_SELF
            | AddWatchFlags::IN_MOVE_SELF
            | AddWatchFlags::IN_ONLYDIR;
        // The result is recorded on that thread, so that a cancelled caller loses nothing.
        let added = self.0.host.run(move || {
            // Locked first: an event must not be read before its watch is recorded.
            let mut directories = state.directories();
            let watch = state.inotify.add_watch(&path, flags);
            directories.set(path, watch.ok().map(WatchDescriptor::as_raw));
            watch.is_ok()
        });
        if let Ok(true) = added.await {
            return true;
        }
        self.directories().mark_missing(directory);
        self.0.missing.notify_one();
        false
    }

    /// Waits for events of inotify and queues them.
    async fn read(&self) {
        let Ok(mut ready) = self.0.readable.readable().await else { return };
        loop {
            match self.0.inotify.read_events() {
                Ok(events) => self.directories().record(events),
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => {
                    ready.clear_ready();
                    return;
                }
                Err(_) => {
                    // The kernel has no other error for a valid buffer.
                    ready.clear_ready();
                    self.directories().events.push_back(NamespaceEvent::CheckAll);
                    return;
                }
            }
        }
    }

    fn directories(&self) -> MutexGuard<'_, Directories> {
        self.0.directories()
    }

    fn retry_at(&self) -> MutexGuard<'_, Option<Instant>> {
        self.0.retry_at.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An owned descriptor stays open and the same for as long as it is registered.
#[expect(deprecated, reason = "its replacement is unsafe, which the workspace forbids")]
fn register(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(descriptor, Interest::READABLE)
}

impl WatchState {
    fn directories(&self) -> MutexGuard<'_, Directories> {
        self.directories.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Directories {
    /// Records by which watch a directory is watched; None if it is not.
    fn set(&mut self, directory: PathBuf, watch: Option<i32>) {
        for (known, paths) in &mut self.watched {
            if Some(*known) != watch {
                paths.remove(&directory);
            }
        }
        match watch {
            Some(watch) => {
                self.missing.remove(&directory);
                self.watched.entry(watch).or_default().insert(directory);
            }
            None => _ = self.missing.insert(directory),
        }
    }

    fn mark_missing(&mut self, directory: PathBuf) {
        if !self.watched.values().any(|paths| paths.contains(&directory)) {
            self.missing.insert(directory);
        }
    }

    fn record(&mut self, events: Vec<InotifyEvent>) {
        for InotifyEvent { wd, mask, name, .. } in events {
            if mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
                // It replaces all that is queued, so that the queue is bounded by the kernel's.
                self.events.clear();
                self.events.push_back(NamespaceEvent::CheckAll);
            } else if mask.intersects(
                AddWatchFlags::IN_IGNORED
                    | AddWatchFlags::IN_DELETE_SELF
                    | AddWatchFlags::IN_MOVE_SELF
                    | AddWatchFlags::IN_UNMOUNT,
            ) {
                // The directory was deleted, moved or unmounted: look for its successor.
                if let Some(paths) = self.watched.remove(&wd.as_raw()) {
                    self.missing.extend(paths);
                    self.events.push_back(NamespaceEvent::CheckAll);
                }
            } else if let Some(name) = name {
                self.record_file(wd.as_raw(), mask, &name);
            }
        }
    }

    fn record_file(&mut self, watch: i32, mask: AddWatchFlags, name: &OsString) {
        let created = mask.intersects(AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MOVED_TO);
        let deleted = mask.intersects(AddWatchFlags::IN_DELETE | AddWatchFlags::IN_MOVED_FROM);
        if !created && !deleted {
            return;
        }
        for directory in self.watched.get(&watch).into_iter().flatten() {
            let Some(path) = path_text(directory, name) else { continue };
            let event = if created { NamespaceEvent::Created(path) } else { NamespaceEvent::Deleted(path) };
            self.events.push_back(event);
        }
    }
}

/// None if it is not UTF-8: a runtime could not report such a path.
fn path_text(directory: &Path, name: &OsStr) -> Option<String> {
    directory.join(name).to_str().map(str::to_owned)
}
