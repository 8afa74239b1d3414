//! Network namespaces for tests, never the host's own.

use std::{fs::File, thread};

use link::namespace;
use nix::{
    sched::{CloneFlags, unshare},
    unistd::geteuid,
};

/// A network namespace. The kernel destroys it when the last reference is dropped.
pub struct Namespace(pub File);

impl Namespace {
    pub fn new() -> Self {
        assert!(geteuid().is_root(), "kernel tests need root: run them as `sudo -E cargo test -p link`");
        let created = thread::spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET).expect("create a network namespace");
            File::open("/proc/thread-self/ns/net").expect("open the new network namespace")
        });
        Self(created.join().unwrap())
    }

    pub fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        namespace::within(&self.0, work).unwrap()
    }
}
