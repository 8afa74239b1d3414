//! Installs the CNI plugin into the runtime's plugin directory.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

/// The plugin is installed once per name.
const PLUGIN_NAMES: [&str; 2] = ["patchbay-bridge", "patchbay-ipam"];
const MODE: u32 = 0o755;
/// Suffix of a copy that is still being written.
const TEMPORARY_SUFFIX: &str = ".patchbay-new";

/// The plugin could not be installed.
#[derive(Debug, thiserror::Error)]
#[error("{action} {}", path.display())]
pub struct Error {
    action: &'static str,
    path: PathBuf,
    source: io::Error,
}

/// Copies the plugin into `bin_dir` under each of its names. Returns whether anything changed. Readers never see a partly
/// written plugin, and running plugins are not disturbed.
pub fn install(shim: &Path, bin_dir: &Path) -> Result<bool, Error> {
    let failed = |action, path: &Path| {
        let path = path.to_owned();
        move |source| Error { action, path, source }
    };
    let wanted = fs::read(shim).map_err(failed("read the CNI plugin", shim))?;
    fs::create_dir_all(bin_dir).map_err(failed("create the CNI plugin directory", bin_dir))?;
    let mut changed = false;
    for name in PLUGIN_NAMES {
        let path = bin_dir.join(name);
        let temporary = bin_dir.join(format!(".{name}{TEMPORARY_SUFFIX}"));
        // Left by a daemon that was killed during the copy.
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
        sync.map_err(failed("sync the CNI plugin directory", bin_dir))?;
    }
    Ok(changed)
}

/// Whether `path` is a regular executable file with this content.
fn is_installed(path: &Path, wanted: &[u8]) -> bool {
    let plain = fs::symlink_metadata(path)
        .is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o7777 == MODE);
    plain && fs::read(path).is_ok_and(|found| found == wanted)
}

fn write(temporary: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::options().write(true).create_new(true).mode(MODE).open(temporary)?;
    file.write_all(bytes)?;
    // The process's umask may have cleared bits.
    file.set_permissions(fs::Permissions::from_mode(MODE))?;
    file.sync_all()?;
    fs::rename(temporary, path)
}
