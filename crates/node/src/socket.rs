//! Opening the sockets of the daemon.

use std::{
    fs, io,
    os::unix::{
        fs::{DirBuilderExt as _, PermissionsExt as _},
        net::UnixListener,
    },
    path::Path,
};

use crate::Error;

/// Opens a socket under a name of its own and renames it over the old one: in a rolling update the older daemon
/// still serves those that it has, and there is no moment without a socket. Only root may use it.
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

/// Removes what processes that were killed between opening and renaming left behind.
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

/// The numbers of a process, and nothing that somebody else could mean.
fn is_temporary(name: &str, prefix: &str) -> bool {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    name.strip_prefix(prefix).is_some_and(|rest| rest.split('.').all(number))
}
