//! Tombstones: DEL requests that the plugin saved while the daemon did not answer.

use std::{
    fs::{self, File},
    io::{self, Read as _},
    path::Path,
    time::{Duration, SystemTime},
};

use api::ErrorChain;
use tracing::{info, warn};
use wire::socket::{FrameReader, MAX_FRAME, Message, Request};

/// Age after which a temporary file has no writer any more.
const ABANDONED_AFTER: Duration = Duration::from_secs(600);

/// Calls `apply` for every tombstone and durably removes those for which it returns true.
pub fn apply_all(directory: &Path, apply: impl Fn(&Path, &Request) -> bool) {
    let mut removed = false;
    for name in names(directory).into_iter().filter(|name| !name.starts_with('.')) {
        let path = directory.join(&name);
        match read(&path) {
            Ok(Some(request)) if !apply(&path, &request) => continue,
            Ok(Some(request)) => info!(container_id = request.container_id, "applied a tombstone"),
            Ok(None) => warn!(name, "removing a file that is not a tombstone"),
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => {
                warn!(name, error = %ErrorChain(&error), "cannot read a tombstone; retrying");
                continue;
            }
        }
        match fs::remove_file(&path) {
            Ok(()) => removed = true,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                warn!(name, error = %ErrorChain(&error), "cannot remove an applied tombstone; retrying");
            }
        }
    }
    if removed && let Err(error) = sync(directory) {
        warn!(error = %ErrorChain(&error), "cannot sync the tombstone directory");
    }
}

/// Durably removes the tombstone of an interface before the interface is created again.
pub fn remove(directory: &Path, request: &Request) -> io::Result<()> {
    let path = directory.join(request.key());
    match fs::symlink_metadata(&path) {
        // On a read-only disk, the removal of a file that does not exist fails too.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        _ => {}
    }
    match fs::remove_file(path) {
        Ok(()) => sync(directory),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

fn sync(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

/// Removes temporary files of plugins that were killed while they wrote.
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

/// File names in the directory; none if it does not exist.
fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// Reads the request in a file; `None` if the file holds something else.
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
