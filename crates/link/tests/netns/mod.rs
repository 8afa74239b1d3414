//! Network namespaces for tests: never the host's own.

use std::{fs::File, thread};

use link::namespace;
use nix::{
    sched::{CloneFlags, unshare},
    unistd::geteuid,
};

/// A network namespace that goes when nobody holds it.
pub struct Namespace(pub File);

impl Namespace {
    pub fn new() -> Self {
        assert!(geteuid().is_root(), "kernel tests need root: run them as `sudo -E cargo test -p link`");
        let made = thread::spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET).expect("make a network namespace");
            File::open("/proc/thread-self/ns/net").expect("open the new network namespace")
        });
        Self(made.join().unwrap())
    }

    pub fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        namespace::within(&self.0, work).unwrap()
    }
}
