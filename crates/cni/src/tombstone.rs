//! Records a DEL call for a daemon that does not answer.

use std::{
    env,
    fs::{self, DirBuilder, File},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    process,
};

use wire::socket::{Request, TOMBSTONE_DIR};

const STATE_DIR: &str = "/var/lib/patchbay";

/// Writes the request as a tombstone. Repeated calls use the same file. The file survives a power failure once this returns.
pub fn write(request: &Request, frame: &[u8]) -> io::Result<()> {
    let state = env::var_os("PATCHBAY_STATE_DIR").map_or_else(|| PathBuf::from(STATE_DIR), PathBuf::from);
    let directory = state.join(TOMBSTONE_DIR);
    let created = !directory.exists();
    DirBuilder::new().recursive(true).mode(0o700).create(&directory)?;
    if created {
        sync(&state)?;
        state.parent().map_or(Ok(()), sync)?;
    }
    let key = request.key();
    let temporary = directory.join(format!(".{key}.{}", process::id()));
    let written = write_file(&temporary, frame).and_then(|()| fs::rename(&temporary, directory.join(key)));
    if written.is_err() {
        // The write error is returned, not this one.
        _ = fs::remove_file(&temporary);
    }
    written.and_then(|()| sync(&directory))
}

fn write_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

fn sync(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}
