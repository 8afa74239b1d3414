//! Tombstones: DEL requests that the plugin saved while the daemon did not answer.

use std::{fs, io, path::Path, time::Duration};

use api::ErrorChain;
use tracing::{info, warn};
use wire::socket::{FrameReader, MAX_FRAME, Message, Request};

use crate::store::records::RecordDir;

/// Age after which a temporary file has no writer any more.
const ABANDONED_AFTER: Duration = Duration::from_secs(600);

/// The plugin writes the files, each under [`Request::key`].
fn records(directory: &Path) -> RecordDir {
    RecordDir::new(directory.to_owned(), "")
}

/// Calls `apply` for every tombstone and durably removes those for which it returns true.
pub fn apply_all(directory: &Path, apply: impl Fn(&Path, &Request) -> bool) {
    let (records, mut removed) = (records(directory), false);
    let names = records.names().unwrap_or_else(|error| {
        // The directory need not exist.
        if error.kind() != io::ErrorKind::NotFound {
            warn!(error = %ErrorChain(&error), "cannot list the tombstones; retrying");
        }
        Vec::new()
    });
    for name in names {
        let path = records.file(&name);
        match read(&records, &name) {
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
    // One sync for all of them: a tombstone that comes back is applied again.
    if removed && let Err(error) = records.sync() {
        warn!(error = %ErrorChain(&error), "cannot sync the tombstone directory");
    }
}

/// Durably removes the tombstone of an interface before the interface is created again.
pub fn remove(directory: &Path, request: &Request) -> io::Result<()> {
    records(directory).remove(&request.key()).map(drop)
}

/// Removes temporary files of plugins that were killed while they wrote.
pub fn remove_abandoned(directory: &Path) {
    records(directory).remove_abandoned(ABANDONED_AFTER);
}

/// Reads the request in a file; `None` if the file holds something else.
fn read(records: &RecordDir, name: &str) -> io::Result<Option<Request>> {
    let mut reader = FrameReader::default();
    reader.feed(&records.read(name, MAX_FRAME as u64 + 1)?);
    match reader.message() {
        Ok(Some(Message::Request(request))) => Ok(Some(request)),
        _ => Ok(None),
    }
}
