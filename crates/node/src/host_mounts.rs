//! Runs code and starts processes in the mount namespace of the host.

use std::{
    collections::VecDeque,
    fmt,
    fs::{self, File},
    io::{self, ErrorKind},
    os::unix::fs::MetadataExt as _,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};

use nix::sched::{CloneFlags, setns, unshare};
use tokio::{sync::oneshot, time::timeout};

/// How long a caller waits. A file on a dead network file system blocks its thread for longer.
const RUN_TIMEOUT: Duration = Duration::from_secs(10);
/// More threads than one exist only while one is blocked.
const MAX_THREADS: usize = 16;
/// A thread without work ends after this time, unless it is the last one.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// The work of these threads is small.
const STACK_SIZE: usize = 256 * 1024;

/// Threads in the mount namespace of the host. Clones share them.
///
/// A process that is started by such a thread is in that namespace too.
#[derive(Clone)]
pub struct HostMounts(Arc<Handle>);

/// Ends the threads when the last clone is dropped.
struct Handle(Arc<Pool>);

struct Pool {
    path: PathBuf,
    /// `None` if the daemon is in that namespace itself.
    namespace: Option<File>,
    state: Mutex<HostThreadsState>,
    queued: Condvar,
}

#[derive(Default)]
struct HostThreadsState {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
    closed: bool,
}

/// Gets an error if its thread could not enter the namespace.
type Job = Box<dyn FnOnce(io::Result<()>) + Send>;

impl HostMounts {
    /// Opens a mount namespace and starts a thread in it. On a node, it is `/proc/1/ns/mnt` of a daemon with hostPID.
    pub fn open(mount_namespace: &Path) -> io::Result<Self> {
        let own = fs::metadata("/proc/self/ns/mnt")?;
        let file = File::open(mount_namespace).map_err(|error| open_error(mount_namespace, &error))?;
        let target = file.metadata()?;
        let namespace = ((own.dev(), own.ino()) != (target.dev(), target.ino())).then_some(file);
        let pool = Pool {
            path: mount_namespace.to_owned(),
            namespace,
            state: Mutex::default(),
            queued: Condvar::new(),
        };
        let host = Self(Arc::new(Handle(Arc::new(pool))));
        host.run_blocking(|| ())?;
        Ok(host)
    }

    /// Runs `work` on a thread in the namespace and waits for up to ten seconds.
    ///
    /// Work that has not started by then does not start any more.
    pub async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
        let (sender, receiver) = oneshot::channel();
        self.submit(Box::new(move |entered| {
            if !sender.is_closed() {
                let _ = sender.send(perform(entered, work));
            }
        }))?;
        match timeout(RUN_TIMEOUT, receiver).await {
            Ok(result) => result.unwrap_or_else(|_| Err(thread_ended())),
            Err(_) => Err(self.timed_out()),
        }
    }

    /// [`HostMounts::run`] for threads that may block.
    pub fn run_blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        let (sender, receiver) = mpsc::channel();
        self.submit(Box::new(move |entered| {
            let _ = sender.send(perform(entered, work));
        }))?;
        match receiver.recv_timeout(RUN_TIMEOUT) {
            Ok(result) => result,
            Err(mpsc::RecvTimeoutError::Timeout) => Err(self.timed_out()),
            Err(mpsc::RecvTimeoutError::Disconnected) => Err(thread_ended()),
        }
    }

    fn submit(&self, job: Job) -> io::Result<()> {
        let pool = &self.0.0;
        let mut state = pool.lock();
        state.jobs.push_back(job);
        if state.jobs.len() <= state.idle {
            pool.queued.notify_one();
        } else if state.threads < MAX_THREADS {
            let worker = Arc::clone(pool);
            let thread = thread::Builder::new().name("host-mounts".to_owned()).stack_size(STACK_SIZE);
            match thread.spawn(move || worker.work()) {
                Ok(_) => state.threads += 1,
                // The other threads do it.
                Err(_) if state.threads > 0 => {}
                Err(error) => {
                    state.jobs.pop_back();
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn timed_out(&self) -> io::Error {
        let (path, limit) = (self.0.0.path.display(), RUN_TIMEOUT.as_secs());
        let text = format!("the file systems of the mount namespace {path} did not respond within {limit} s");
        io::Error::new(ErrorKind::TimedOut, text)
    }
}

impl fmt::Debug for HostMounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HostMounts").field(&self.0.0.path).finish()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.lock().closed = true;
        self.0.queued.notify_all();
    }
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, HostThreadsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The life of a thread.
    fn work(&self) {
        let mut entered = self.enter();
        while let Some(job) = self.next() {
            let failed = entered.is_err();
            job(std::mem::replace(&mut entered, Ok(())));
            if failed {
                self.lock().threads -= 1;
                return;
            }
        }
    }

    /// The next job. `None` ends the thread, which is no longer counted.
    fn next(&self) -> Option<Job> {
        let mut state = self.lock();
        let idle_since = Instant::now();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            let idle = idle_since.elapsed();
            if state.closed || (idle >= IDLE_TIMEOUT && state.threads > 1) {
                state.threads -= 1;
                return None;
            }
            state.idle += 1;
            // The last thread has nothing to end for.
            state = if state.threads > 1 {
                let rest = IDLE_TIMEOUT.saturating_sub(idle);
                self.queued.wait_timeout(state, rest).unwrap_or_else(PoisonError::into_inner).0
            } else {
                self.queued.wait(state).unwrap_or_else(PoisonError::into_inner)
            };
            state.idle -= 1;
        }
    }

    /// Moves the current thread into the namespace. Its root and its working directory become those of the namespace.
    fn enter(&self) -> io::Result<()> {
        let Some(namespace) = &self.namespace else { return Ok(()) };
        // The kernel refuses threads that share their root and working directory with others.
        unshare(CloneFlags::CLONE_FS)?;
        setns(namespace, CloneFlags::CLONE_NEWNS).map_err(|errno| enter_error(&self.path, &errno.into()))
    }
}

fn perform<T>(entered: io::Result<()>, work: impl FnOnce() -> T) -> io::Result<T> {
    entered?;
    catch_unwind(AssertUnwindSafe(work))
        .map_err(|_| io::Error::other("the work on the host's files panicked"))
}

fn thread_ended() -> io::Error {
    io::Error::other("the thread in the host's mount namespace ended")
}

fn open_error(path: &Path, error: &io::Error) -> io::Error {
    let mut text = format!("cannot open the mount namespace {}: {error}", path.display());
    if matches!(error.kind(), ErrorKind::PermissionDenied) {
        text = format!("{text}; {}", missing_capabilities(&[SYS_PTRACE]));
    }
    io::Error::new(error.kind(), text)
}

fn enter_error(path: &Path, error: &io::Error) -> io::Error {
    let mut text = format!("cannot enter the mount namespace {}: {error}", path.display());
    if matches!(error.kind(), ErrorKind::PermissionDenied) {
        text = format!("{text}; {}", missing_capabilities(&[SYS_ADMIN, SYS_CHROOT]));
    }
    io::Error::new(error.kind(), text)
}

/// A capability: its bit and its name.
type Capability = (u32, &'static str);
const SYS_CHROOT: Capability = (18, "SYS_CHROOT");
const SYS_PTRACE: Capability = (19, "SYS_PTRACE");
const SYS_ADMIN: Capability = (21, "SYS_ADMIN");

/// Which of the needed capabilities the daemon does not have.
fn missing_capabilities(needed: &[Capability]) -> String {
    let status = fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
    let missing: Vec<&str> = needed
        .iter()
        .filter(|(bit, _)| effective.is_none_or(|effective| effective & (1 << bit) == 0))
        .map(|(_, name)| *name)
        .collect();
    let needed: Vec<&str> = needed.iter().map(|(_, name)| *name).collect();
    if missing.is_empty() {
        let needed = needed.join(" and ");
        return format!("the daemon has {needed}: a security module or a seccomp profile denies it");
    }
    format!("the daemon does not have the capability {}: add it to its container", missing.join(" and "))
}

#[cfg(test)]
mod tests {
    use std::{
        env,
        process::Command,
        sync::atomic::{AtomicUsize, Ordering},
    };

    use super::*;

    const OWN: &str = "/proc/self/ns/mnt";
    /// The mount namespace for the test that runs in a process with fewer capabilities.
    const TARGET: &str = "PATCHBAY_TEST_MOUNT_NAMESPACE";

    fn own() -> HostMounts {
        HostMounts::open(Path::new(OWN)).unwrap()
    }

    /// Another mount namespace, whose `/` is as ours, while the sender lives.
    fn other() -> (PathBuf, mpsc::Sender<()>) {
        let ((stop, stopped), (ready, path)) = (mpsc::channel::<()>(), mpsc::channel());
        thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNS).expect("make a mount namespace: run this as root");
            let thread = nix::unistd::gettid();
            ready.send(format!("/proc/{}/task/{thread}/ns/mnt", std::process::id())).unwrap();
            let _ = stopped.recv();
        });
        (PathBuf::from(path.recv().unwrap()), stop)
    }

    #[tokio::test]
    async fn work_runs_in_the_namespace() {
        let (path, _stop) = other();
        let link = |path: PathBuf| fs::read_link(path).unwrap();
        let here = PathBuf::from("/proc/thread-self/ns/mnt");
        for target in [path, PathBuf::from(OWN)] {
            let (host, here) = (HostMounts::open(&target).unwrap(), here.clone());
            let entered = host.run(move || link(here)).await.unwrap();
            assert_eq!(entered, link(target));
        }
        assert_eq!(link(here), link(PathBuf::from(OWN)));
    }

    #[tokio::test]
    async fn blocked_work_delays_no_other_and_a_panic_ends_nothing() {
        let host = own();
        let (stop, stopped) = mpsc::channel::<()>();
        let stopped = Arc::new(Mutex::new(stopped));
        let mut blocked: Vec<_> = (0..MAX_THREADS - 1)
            .map(|_| {
                let stopped = Arc::clone(&stopped);
                Box::pin(host.run(move || stopped.lock().unwrap().recv().is_err()))
            })
            .collect();
        for work in &mut blocked {
            assert!(futures::poll!(work).is_pending());
        }
        assert!(host.run(|| panic!("on purpose")).await.is_err());
        assert_eq!(host.run(|| 7).await.unwrap(), 7);
        drop(stop);
        for work in blocked {
            work.await.unwrap();
        }
    }

    #[tokio::test]
    async fn work_of_a_caller_that_left_does_not_start() {
        let host = own();
        let (stop, stopped) = mpsc::channel::<()>();
        let stopped = Arc::new(Mutex::new(stopped));
        let mut blocked: Vec<_> = (0..MAX_THREADS)
            .map(|_| {
                let stopped = Arc::clone(&stopped);
                Box::pin(host.run(move || stopped.lock().unwrap().recv().is_err()))
            })
            .collect();
        for work in &mut blocked {
            assert!(futures::poll!(work).is_pending());
        }
        let ran = Arc::new(AtomicUsize::new(0));
        let count = |ran: &Arc<AtomicUsize>| {
            let ran = Arc::clone(ran);
            move || ran.fetch_add(1, Ordering::SeqCst)
        };
        let mut left = Box::pin(host.run(count(&ran)));
        assert!(futures::poll!(&mut left).is_pending());
        drop(left);
        let mut kept = Box::pin(host.run(count(&ran)));
        assert!(futures::poll!(&mut kept).is_pending());
        drop(stop);
        kept.await.unwrap();
        assert_eq!(ran.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn threads_end_with_the_last_clone() {
        let host = own();
        let pool = Arc::downgrade(&host.0.0);
        let clone = host.clone();
        drop(host);
        assert_eq!(clone.run_blocking(|| 7).unwrap(), 7);
        drop(clone);
        let deadline = Instant::now() + Duration::from_secs(10);
        while pool.strong_count() > 0 {
            assert!(Instant::now() < deadline, "a thread still runs");
            thread::yield_now();
        }
    }

    #[test]
    fn a_missing_file_is_an_error() {
        let error = HostMounts::open(Path::new("/proc/self/ns/away")).unwrap_err();
        assert!(
            error.to_string().starts_with("cannot open the mount namespace /proc/self/ns/away: "),
            "{error}"
        );
    }

    /// Runs [`open_target`] in a process without a capability.
    fn open_without(capability: &str) -> String {
        let (path, _stop) = other();
        let test = "host_mounts::tests::open_target";
        let mut command = Command::new("setpriv");
        command.arg(format!("--bounding-set=-{capability}")).arg(env::current_exe().unwrap());
        let output = command.args(["--exact", test, "--ignored", "--nocapture"]).env(TARGET, path).output();
        let output = output.expect("run setpriv of util-linux");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    #[test]
    #[ignore = "other tests run it in a process with fewer capabilities"]
    fn open_target() {
        let Ok(target) = env::var(TARGET) else { return };
        match HostMounts::open(Path::new(&target)) {
            Ok(_) => println!("opened"),
            Err(error) => println!("{error}"),
        }
    }

    #[test]
    fn the_error_names_the_missing_capability() {
        // The process differs from the daemon of these tests in one capability. That alone needs SYS_PTRACE.
        let output = open_without("net_raw");
        assert!(output.contains("opened"), "{output}");
        for (capability, step, name) in [
            ("sys_ptrace", "cannot open", "SYS_PTRACE"),
            ("sys_chroot", "cannot enter", "SYS_CHROOT"),
            ("sys_admin", "cannot enter", "SYS_ADMIN"),
        ] {
            let output = open_without(capability);
            let expected = format!("the daemon does not have the capability {name}: add it to its container");
            assert!(output.contains(step) && output.contains(&expected), "{capability}: {output}");
        }
    }
}
