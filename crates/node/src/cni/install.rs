//! Putting the shim where the runtime looks for plugins.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

/// The names that the shim goes by.
const PLUGIN_NAMES: [&str; 2] = ["patchbay-bridge", "patchbay-ipam"];
const MODE: u32 = 0o755;
/// The end of the name that a copy has until it is whole.
const TEMPORARY_SUFFIX: &str = ".patchbay-new";

/// Why the shim is not where it should be.
#[derive(Debug, thiserror::Error)]
#[error("{what} {}", path.display())]
pub struct Error {
    what: &'static str,
    path: PathBuf,
    source: io::Error,
}

/// Copies the shim into a directory of plugins under each of its names, and says whether anything had to be done. A
/// plugin is never seen half-written, and one that is running goes on.
pub fn install(shim: &Path, bin_dir: &Path) -> Result<bool, Error> {
    let failed = |what, path: &Path| {
        let path = path.to_owned();
        move |source| Error { what, path, source }
    };
    let wanted = fs::read(shim).map_err(failed("read the CNI shim", shim))?;
    fs::create_dir_all(bin_dir).map_err(failed("make the directory of CNI plugins", bin_dir))?;
    let mut changed = false;
    for name in PLUGIN_NAMES {
        let path = bin_dir.join(name);
        let temporary = bin_dir.join(format!(".{name}{TEMPORARY_SUFFIX}"));
        // Left by a daemon that was killed in the middle of this.
        match fs::remove_file(&temporary) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(failed("remove", &temporary)(error));
            }
            _ => {}
        }
        if is_installed(&path, &wanted) {
            continue;
        }
        write(&temporary, &path, &wanted).map_err(failed("install the CNI plugin", &path))?;
        changed = true;
    }
    if changed {
        let sync = File::open(bin_dir).and_then(|directory| directory.sync_all());
        sync.map_err(failed("make durable the directory of CNI plugins", bin_dir))?;
    }
    Ok(changed)
}

/// Whether the file is a plain one that holds this and can be run.
fn is_installed(path: &Path, wanted: &[u8]) -> bool {
    let plain = fs::symlink_metadata(path)
        .is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o7777 == MODE);
    plain && fs::read(path).is_ok_and(|found| found == wanted)
}

fn write(temporary: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::options().write(true).create_new(true).mode(MODE).open(temporary)?;
    file.write_all(bytes)?;
    // The mask of the process may have taken bits from the mode.
    file.set_permissions(fs::Permissions::from_mode(MODE))?;
    file.sync_all()?;
    fs::rename(temporary, path)
}
