//! What the shim writes down when nobody answers it: pods that are gone.

use std::{
    fs::{self, File},
    io::{self, Read as _},
    path::Path,
    time::{Duration, SystemTime},
};

use api::Chain;
use tracing::{info, warn};
use wire::socket::{FrameReader, MAX_FRAME, Message, Request};

/// A file without its final name that is older than this is nobody's any more.
const ABANDONED_AFTER: Duration = Duration::from_secs(600);

/// Gives every tombstone to `apply`, and removes durably those that it has applied.
pub fn apply_all(directory: &Path, apply: impl Fn(&Path, &Request) -> bool) {
    let mut removed = false;
    for name in names(directory).into_iter().filter(|name| !name.starts_with('.')) {
        let path = directory.join(&name);
        match read(&path) {
            Ok(Some(request)) if !apply(&path, &request) => continue,
            Ok(Some(request)) => info!(container_id = request.container_id, "applied a tombstone"),
            Ok(None) => warn!(name, "a tombstone that is none is thrown away"),
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => {
                warn!(name, error = %Chain(&error), "a tombstone cannot be read");
                continue;
            }
        }
        match fs::remove_file(&path) {
            Ok(()) => removed = true,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => warn!(name, error = %Chain(&error), "a tombstone cannot be removed"),
        }
    }
    if removed && let Err(error) = sync(directory) {
        warn!(error = %Chain(&error), "the removal of tombstones cannot be made durable");
    }
}

/// Removes the tombstone of an interface that is about to be made again, durably.
pub fn remove(directory: &Path, request: &Request) -> io::Result<()> {
    match fs::remove_file(directory.join(request.key())) {
        Ok(()) => sync(directory),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

fn sync(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

/// Removes what shims left behind that were killed in the middle of writing.
pub fn remove_abandoned(directory: &Path) {
    for name in names(directory).into_iter().filter(|name| name.starts_with('.')) {
        let path = directory.join(name);
        let written = fs::symlink_metadata(&path).and_then(|metadata| metadata.modified());
        let age = written.ok().and_then(|written| SystemTime::now().duration_since(written).ok());
        if age.is_some_and(|age| age > ABANDONED_AFTER) {
            _ = fs::remove_file(path);
        }
    }
}

/// A directory that is not there has nothing in it.
fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// The request in a file; none if it is something else.
fn read(path: &Path) -> io::Result<Option<Request>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_FRAME as u64 + 1).read_to_end(&mut bytes)?;
    let mut reader = FrameReader::default();
    reader.feed(&bytes);
    match reader.message() {
        Ok(Some(Message::Request(request))) => Ok(Some(request)),
        _ => Ok(None),
    }
}
