//! Runs code in another network namespace.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    thread,
};

use nix::sched::{CloneFlags, setns};

use crate::Error;

/// Runs `work` on a new thread in the namespace and waits for it.
///
/// Sockets that it opens stay in that namespace. No shared thread ever changes its namespace.
pub fn within<T: Send>(namespace: impl AsFd, work: impl FnOnce() -> T + Send) -> Result<T, Error> {
    let namespace: BorrowedFd<'_> = namespace.as_fd();
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("netns".to_owned()).spawn_scoped(scope, move || {
            setns(namespace, CloneFlags::CLONE_NEWNET).map_err(|errno| Error::Enter(errno.into()))?;
            Ok(work())
        });
        let thread = thread.map_err(Error::Enter)?;
        thread.join().unwrap_or_else(|_| Err(Error::Enter(io::Error::other("the thread panicked"))))
    })
}
