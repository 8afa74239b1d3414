//! Atomic and durable changes of files: after a crash, a file has its old or its new content.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{FallocateFlags, fallocate},
};

/// A synced file that does not have its name yet.
#[derive(Debug)]
pub struct StagedFile {
    temporary: PathBuf,
    file: File,
}

impl StagedFile {
    /// Writes the content under a temporary name in the directory of the target, and reserves `room` bytes behind it. A file
    /// that a crash left there is replaced.
    pub fn write(temporary: PathBuf, content: &[u8], room: u64) -> io::Result<Self> {
        let write = || {
            let mut file =
                File::options().create(true).truncate(true).write(true).mode(0o600).open(&temporary)?;
            file.write_all(content)?;
            if room > 0 {
                reserve(&file, content.len() as u64, room)?;
            }
            file.sync_all()?;
            Ok(file)
        };
        match write() {
            Ok(file) => Ok(Self { temporary, file }),
            Err(error) => {
                // A part of the content must not take the last of a full disk.
                let _ = fs::remove_file(&temporary);
                Err(error)
            }
        }
    }

    /// Gives the file its name, and returns it open for writing at its end. After a failure the target has its old or its
    /// new content.
    pub fn install(self, target: &Path) -> io::Result<File> {
        fs::rename(&self.temporary, target)?;
        sync_parent(target)?;
        Ok(self.file)
    }
}

/// Replaces the content of a file, or creates it.
pub fn replace(target: &Path, temporary: PathBuf, content: &[u8]) -> io::Result<()> {
    StagedFile::write(temporary, content, 0)?.install(target).map(drop)
}

/// Reserves blocks of the file system for this part of a file, without a change of the file's length. Succeeds on file systems
/// that cannot do that.
pub fn reserve(file: &File, offset: u64, length: u64) -> io::Result<()> {
    let (Ok(start), Ok(bytes)) = (i64::try_from(offset), i64::try_from(length)) else {
        return Err(io::ErrorKind::FileTooLarge.into());
    };
    loop {
        match fallocate(file, FallocateFlags::FALLOC_FL_KEEP_SIZE, start, bytes) {
            Err(Errno::EINTR) => {}
            Ok(()) | Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Removes a file, and returns whether it existed. Succeeds on a read-only disk if the file does not exist.
pub fn remove(path: &Path) -> io::Result<bool> {
    // On a read-only disk, the removal of a file that does not exist fails too.
    if matches!(fs::symlink_metadata(path), Err(error) if error.kind() == io::ErrorKind::NotFound) {
        return Ok(false);
    }
    match fs::remove_file(path) {
        Ok(()) => sync_parent(path).map(|()| true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Makes the names in a directory durable.
pub fn sync_dir(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

fn sync_parent(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), sync_dir)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("patchbay-atomic-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        path
    }

    #[test]
    fn a_replaced_file_has_the_new_content_and_no_temporary_file_is_left() {
        let dir = scratch("replace");
        let (target, temporary) = (dir.join("a"), dir.join("a.tmp"));
        fs::write(&temporary, "longer content of a crashed write").unwrap();
        for content in ["one", "two", ""] {
            replace(&target, temporary.clone(), content.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(&target).unwrap(), content);
        }
        assert_eq!(fs::metadata(&target).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_staged_file_changes_nothing_before_it_is_installed() {
        let dir = scratch("staged");
        let target = dir.join("a");
        fs::write(&target, "old").unwrap();
        let staged = StagedFile::write(dir.join("a.tmp"), b"new", 0).unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), "old");
        let mut file = staged.install(&target).unwrap();
        file.write_all(b"er").unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), "newer");
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn removal_says_whether_the_file_existed() {
        let dir = scratch("remove");
        fs::write(dir.join("a"), "").unwrap();
        assert!(remove(&dir.join("a")).unwrap());
        assert!(!remove(&dir.join("a")).unwrap());
        assert!(!remove(&dir.join("missing directory/a")).unwrap());
        fs::remove_dir_all(dir).unwrap();
    }
}
