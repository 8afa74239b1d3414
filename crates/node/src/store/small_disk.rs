//! A small file system that a test fills. Run these tests as root.

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
};

use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, unshare},
};

/// Runs a test with a directory on a file system of 256 KiB that only this thread sees.
pub fn with_small_disk(name: &str, test: impl FnOnce(&SmallDisk) + Send + 'static) {
    let dir = std::env::temp_dir().join(format!("patchbay-disk-{}-{name}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    let path = dir.clone();
    let thread = thread::spawn(move || {
        let disk = SmallDisk::mount(path);
        test(&disk);
        disk.unmount();
    });
    let ended = thread.join();
    fs::remove_dir_all(dir).unwrap();
    ended.unwrap();
}

pub struct SmallDisk(PathBuf);

impl SmallDisk {
    /// Mounts a file system of 256 KiB on a directory. This thread gets a mount namespace of its own.
    pub fn mount(dir: PathBuf) -> Self {
        unshare(CloneFlags::CLONE_NEWNS).expect("make a mount namespace: run this as root");
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();
        mount(Some("tmpfs"), &dir, Some("tmpfs"), MsFlags::empty(), Some("size=256k")).unwrap();
        Self(dir)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    fn ballast(&self) -> PathBuf {
        self.0.join("ballast")
    }

    /// Leaves no byte free.
    pub fn fill(&self) {
        let _ = fs::write(self.ballast(), vec![0; 512 * 1024]);
    }

    pub fn empty(&self) {
        fs::remove_file(self.ballast()).unwrap();
    }

    /// Covers the directory with a read-only mount of itself, or uncovers it.
    ///
    /// A remount of the file system would fail with EBUSY while a process that another test of this program
    /// is starting has a copy of a descriptor of this one, until it executes its program.
    pub fn set_read_only(&self, read_only: bool) {
        if !read_only {
            return self.unmount();
        }
        mount(Some(&self.0), &self.0, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
        let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        mount(None::<&str>, &self.0, None::<&str>, flags, None::<&str>).unwrap();
    }

    /// Detaches the topmost mount; copies of descriptors, as above, do not delay it.
    fn unmount(&self) {
        umount2(&self.0, MntFlags::MNT_DETACH).unwrap();
    }
}
