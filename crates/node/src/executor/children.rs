//! The processes below the daemon: which of them a call of a plugin started, and which outlived their parents.
//!
//! The daemon is a subreaper: a process whose parent ended becomes its child. Plugins are children too, and tokio waits for
//! those. So only the others are reaped here, each by its number.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    sync::{
        Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use nix::{
    errno::Errno,
    sys::{
        prctl::set_child_subreaper,
        signal::{Signal, kill},
        wait::{Id, WaitPidFlag, waitid, waitpid},
    },
    unistd::Pid,
};
use tokio::{
    signal::unix::{SignalKind, signal},
    time::sleep,
};
use tracing::warn;

/// The variable that has the number of the call in the environment of its processes.
pub const CALL_VARIABLE: &str = "PATCHBAY_CALL";
/// How often the processes of a call are searched for new ones. One that was stopped starts no other.
const MAX_SEARCHES: usize = 64;
/// When to look again for ended processes, after one that tokio had not reaped yet.
const REAP_RETRY: Duration = Duration::from_secs(1);

/// Identifies one call of a plugin among those of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallId(u64);

impl CallId {
    pub fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// The value of [`CALL_VARIABLE`].
    pub fn value(self) -> String {
        self.0.to_string()
    }
}

/// The children of this process.
pub static CHILDREN: Children = Children { starting: RwLock::new(()), plugins: Mutex::new(BTreeSet::new()) };

/// The children that tokio waits for.
#[derive(Debug)]
pub struct Children {
    /// Shared by those that start a plugin, until it is in `plugins`.
    starting: RwLock<()>,
    plugins: Mutex<BTreeSet<i32>>,
}

impl Children {
    /// Starts a plugin. `pid` returns its number.
    pub fn start<T, E>(
        &self,
        start: impl FnOnce() -> Result<T, E>,
        pid: impl FnOnce(&T) -> Option<Pid>,
    ) -> Result<T, E> {
        let _starting = self.starting.read().unwrap_or_else(PoisonError::into_inner);
        let started = start()?;
        self.plugins().extend(pid(&started).map(Pid::as_raw));
        Ok(started)
    }

    /// Forgets a plugin that tokio has reaped.
    pub fn ended(&self, pid: Pid) {
        self.plugins().remove(&pid.as_raw());
    }

    /// Makes this process the parent of what plugins leave behind, and reaps it. Without this, a plugin is killed only with
    /// the children whose parents still run and with those in its process group. Never returns.
    ///
    /// No other part of the process may start children.
    pub async fn reap(&self) {
        let started = set_child_subreaper(true).map_err(std::io::Error::from);
        let mut ended = match started.and_then(|()| signal(SignalKind::child())) {
            Ok(ended) => ended,
            Err(error) => {
                warn!(error = %error, "children of a killed plugin that started a session of their own are not killed");
                return std::future::pending().await;
            }
        };
        loop {
            while !self.reap_ended() {
                sleep(REAP_RETRY).await;
            }
            ended.recv().await;
        }
    }

    /// Reaps the processes that ended and that tokio does not wait for. Returns whether no ended process is left.
    fn reap_ended(&self) -> bool {
        // A plugin that is being started may have ended and is not in the list yet.
        let Ok(_starting) = self.starting.try_write() else { return false };
        loop {
            // This only looks.
            let ended = waitid(Id::All, WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT);
            match ended.map(|status| status.pid()) {
                Ok(Some(pid)) if self.plugins().contains(&pid.as_raw()) => return false,
                Ok(Some(pid)) => _ = waitpid(pid, Some(WaitPidFlag::WNOHANG)),
                Err(Errno::EINTR) => {}
                Ok(None) | Err(_) => return true,
            }
        }
    }

    fn plugins(&self) -> MutexGuard<'_, BTreeSet<i32>> {
        self.plugins.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Kills the processes of a call, also those that left its process group. `plugin` is its first process, unless that is
/// reaped.
///
/// They are stopped first: a process that starts others must not die before these are known by it.
pub fn kill_call(plugin: Option<Pid>, call: CallId) {
    let mut found = BTreeSet::new();
    for _ in 0..MAX_SEARCHES {
        let new: Vec<Pid> = processes_of(plugin, call).into_iter().filter(|pid| found.insert(*pid)).collect();
        if new.is_empty() {
            break;
        }
        for pid in new {
            let _ = kill(pid, Signal::SIGSTOP);
        }
    }
    for pid in found {
        let _ = kill(pid, Signal::SIGKILL);
    }
}

/// The processes below the plugin, and below those children of the daemon that have the mark of the call.
fn processes_of(plugin: Option<Pid>, call: CallId) -> Vec<Pid> {
    let mut children: BTreeMap<i32, Vec<i32>> = BTreeMap::new();
    for (pid, parent) in processes() {
        children.entry(parent).or_default().push(pid);
    }
    let own = Pid::this().as_raw();
    let orphans = children.get(&own).into_iter().flatten().copied().filter(|pid| is_marked(*pid, call));
    let mut left: Vec<i32> = plugin.map(Pid::as_raw).into_iter().chain(orphans).collect();
    let mut found = Vec::new();
    while let Some(pid) = left.pop() {
        found.push(Pid::from_raw(pid));
        left.extend(children.remove(&pid).unwrap_or_default());
    }
    found
}

/// All processes that have not ended, each with its parent.
fn processes() -> impl Iterator<Item = (i32, i32)> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| {
        let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
        let stat = fs::read(entry.path().join("stat")).ok()?;
        Some((pid, parent(&stat)?))
    })
}

/// The parent in `/proc/PID/stat`. None of a process that has ended. The name of a program may contain anything.
fn parent(stat: &[u8]) -> Option<i32> {
    let name_end = stat.iter().rposition(|byte| *byte == b')')?;
    let mut fields = str::from_utf8(&stat[name_end + 1..]).ok()?.split_ascii_whitespace();
    let state = fields.next()?;
    fields.next()?.parse().ok().filter(|_| !matches!(state, "Z" | "X"))
}

/// Whether a process was started with the environment of the call.
fn is_marked(pid: i32, call: CallId) -> bool {
    let mark = format!("{CALL_VARIABLE}={}", call.value());
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parent_of_a_process_is_read_whatever_its_name_is() {
        for (stat, expected) in [
            (&b"12 (sh) S 7 12 12 0 -1"[..], Some(7)),
            (b"12 (a) Z 9 (b) R 7 12 12 0 -1", Some(7)),
            (b"12 (\xff) D 7 12", Some(7)),
            (b"12 (sh) Z 7 12 12 0 -1", None),
            (b"12 (sh) S", None),
            (b"", None),
        ] {
            assert_eq!(parent(stat), expected, "{}", String::from_utf8_lossy(stat));
        }
    }
}
