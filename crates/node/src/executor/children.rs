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
    time::{Duration, Instant},
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

/// A process that had not ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Process {
    pid: i32,
    /// In clock ticks since the boot: another process may get the number.
    started: u64,
}

impl Process {
    /// Sends a signal, unless another process has the number by now.
    fn signal(self, signal: Signal) {
        let now = fs::read(format!("/proc/{}/stat", self.pid)).ok().and_then(|stat| parse_stat(&stat));
        if now.is_some_and(|(_, started)| started == self.started) {
            let _ = kill(Pid::from_raw(self.pid), signal);
        }
    }
}

/// Kills the processes of a call, also those that left its process group. `plugin` is its first process, unless that is
/// reaped. Searches until `deadline`.
///
/// They are stopped first: a process that starts others must not die before these are known by it.
pub fn kill_call(plugin: Option<Pid>, call: CallId, deadline: Instant) {
    let mut found = BTreeSet::new();
    while Instant::now() < deadline {
        let processes = processes_of(plugin, call);
        let new: Vec<Process> = processes.into_iter().filter(|process| found.insert(*process)).collect();
        if new.is_empty() {
            break;
        }
        for process in new {
            process.signal(Signal::SIGSTOP);
        }
    }
    for process in found {
        process.signal(Signal::SIGKILL);
    }
}

/// The processes below the plugin, and below those children of the daemon that have the mark of the call.
fn processes_of(plugin: Option<Pid>, call: CallId) -> Vec<Process> {
    let mut children: BTreeMap<i32, Vec<Process>> = BTreeMap::new();
    for (process, parent) in processes() {
        children.entry(parent).or_default().push(process);
    }
    let plugin = plugin.map(Pid::as_raw);
    let own = children.remove(&Pid::this().as_raw()).unwrap_or_default();
    // To read the environment of the plugin of another call may hang as that plugin does.
    let others = CHILDREN.plugins().clone();
    let is_of_call = |process: &Process| {
        Some(process.pid) == plugin || (!others.contains(&process.pid) && is_marked(process.pid, call))
    };
    let mut left: Vec<Process> = own.into_iter().filter(is_of_call).collect();
    let mut found = Vec::new();
    while let Some(process) = left.pop() {
        found.push(process);
        left.extend(children.remove(&process.pid).unwrap_or_default());
    }
    found
}

/// All processes that have not ended, each with its parent.
fn processes() -> impl Iterator<Item = (Process, i32)> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| {
        let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
        let (parent, started) = parse_stat(&fs::read(entry.path().join("stat")).ok()?)?;
        Some((Process { pid, started }, parent))
    })
}

/// The parent and the start time in `/proc/PID/stat`. None of a process that has ended. The name of a program may contain
/// anything.
fn parse_stat(stat: &[u8]) -> Option<(i32, u64)> {
    let name_end = stat.iter().rposition(|byte| *byte == b')')?;
    let mut fields = str::from_utf8(&stat[name_end + 1..]).ok()?.split_ascii_whitespace();
    let state = fields.next()?;
    let parent = fields.next()?.parse().ok()?;
    let started = fields.nth(17)?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then_some((parent, started))
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
    fn the_parent_and_the_start_of_a_process_are_read_whatever_its_name_is() {
        let rest = b" 12 12 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 4711 99 5";
        for (start, expected) in [
            (&b"12 (sh) S 7"[..], Some((7, 4711))),
            (b"12 (a) Z 9 (b) R 7", Some((7, 4711))),
            (b"12 (\xff) D 7", Some((7, 4711))),
            (b"12 (sh) Z 7", None),
            (b"", None),
        ] {
            let stat = [start, rest].concat();
            assert_eq!(parse_stat(&stat), expected, "{}", String::from_utf8_lossy(&stat));
        }
        assert_eq!(parse_stat(b"12 (sh) S 7 12"), None);
        let own = fs::read("/proc/self/stat").unwrap();
        assert!(parse_stat(&own).is_some_and(|(parent, started)| parent > 0 && started > 0));
    }
}
