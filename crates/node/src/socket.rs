//! Opens the sockets of the daemon.

use std::{
    fs, io,
    os::unix::{
        fs::{DirBuilderExt as _, PermissionsExt as _},
        net::UnixListener,
    },
    path::Path,
};

use crate::Error;

/// Binds a temporary name and renames it over the old socket. During a rolling update the old daemon still serves its
/// open connections, and the path exists at all times. Only root may connect.
pub fn bind(run_dir: &Path, name: &str) -> Result<UnixListener, Error> {
    let path = run_dir.join(name);
    let prefix = format!(".{}.", name.strip_suffix(".sock").unwrap_or(name));
    let temporary = run_dir.join(format!("{prefix}{}", std::process::id()));
    let open = || {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(run_dir)?;
        remove_stale(run_dir, &prefix)?;
        let listener = UnixListener::bind(&temporary)?;
        fs::set_permissions(&temporary, fs::Permissions::from_mode(0o600))?;
        fs::rename(&temporary, &path)?;
        Ok(listener)
    };
    open().map_err(|source| Error::Socket { path: path.clone(), source })
}

/// Removes sockets of processes that were killed between bind and rename.
fn remove_stale(run_dir: &Path, prefix: &str) -> io::Result<()> {
    for entry in fs::read_dir(run_dir)? {
        let entry = entry?;
        if entry.file_name().to_str().is_some_and(|name| is_temporary(name, prefix)) {
            match fs::remove_file(entry.path()) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
    }
    Ok(())
}

/// Whether the name is the prefix followed by numbers separated by dots, as [`bind`] names its temporary sockets.
fn is_temporary(name: &str, prefix: &str) -> bool {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    name.strip_prefix(prefix).is_some_and(|rest| rest.split('.').all(number))
}
