//! The workers that stand at the socket. Each takes in a call, does it and answers, so that a call wakes one thread and
//! not one after another.

use std::{
    io,
    os::{
        fd::AsRawFd as _,
        unix::net::{UnixListener, UnixStream},
    },
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use api::Chain;
use nix::sys::socket::{Shutdown, shutdown};
use tracing::{error, warn};

/// How many calls are served at a time; others wait in the socket's queue.
const MAX_WORKERS: usize = 256;
/// How many workers stay when there is nothing to do.
const MIN_IDLE_WORKERS: usize = 4;
/// How long to leave the socket alone after it could not be accepted from.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

type Handler = dyn Fn(UnixStream) + Send + Sync;

/// A socket that is served until this is dropped.
pub struct ThreadPool(Arc<PoolState>);

struct PoolState {
    listener: UnixListener,
    handler: Box<Handler>,
    workers: Mutex<WorkerCounts>,
    call_ended: Condvar,
}

#[derive(Debug, Default)]
struct WorkerCounts {
    /// Stand at the socket.
    idle: usize,
    /// Handler a call.
    busy: usize,
    closed: bool,
}

impl ThreadPool {
    /// Lets workers of the caller's namespaces handler the socket.
    pub fn start(
        listener: UnixListener,
        handler: impl Fn(UnixStream) + Send + Sync + 'static,
    ) -> io::Result<Self> {
        listener.set_nonblocking(false)?;
        let (workers, call_ended) = (Mutex::default(), Condvar::new());
        let pool = Self(Arc::new(PoolState { listener, handler: Box::new(handler), workers, call_ended }));
        for _ in 0..MIN_IDLE_WORKERS {
            pool.0.spawn_worker(&mut pool.0.lock())?;
        }
        Ok(pool)
    }

    /// Takes in nobody any more, and waits so long for those who are inside; says whether all have call_ended.
    pub fn drain(self, grace: Duration) -> bool {
        self.0.stop_accepting();
        let until = Instant::now() + grace;
        let mut workers = self.0.lock();
        while workers.busy > 0 {
            let Some(rest) = until.checked_duration_since(Instant::now()) else { return false };
            workers = self.0.call_ended.wait_timeout(workers, rest).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.0.stop_accepting();
    }
}

impl PoolState {
    fn lock(&self) -> MutexGuard<'_, WorkerCounts> {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stop_accepting(&self) {
        self.lock().closed = true;
        // All who wait in `accept` return.
        let _ = shutdown(self.listener.as_raw_fd(), Shutdown::Both);
    }

    /// One thread more at the socket.
    fn spawn_worker(self: &Arc<Self>, workers: &mut WorkerCounts) -> io::Result<()> {
        let pool = Arc::clone(self);
        thread::Builder::new().name("cni".to_owned()).spawn(move || pool.worker())?;
        workers.idle += 1;
        Ok(())
    }

    fn worker(self: Arc<Self>) {
        let mut failing = false;
        loop {
            let accepted = self.listener.accept();
            let mut workers = self.lock();
            if workers.closed {
                workers.idle -= 1;
                return;
            }
            let stream = match accepted {
                Ok((stream, _)) => {
                    failing = false;
                    stream
                }
                Err(error) => {
                    drop(workers);
                    if !failing {
                        warn!(error = %Chain(&error), "cannot accept CNI calls, trying again");
                    }
                    failing = true;
                    thread::park_timeout(ACCEPT_RETRY);
                    continue;
                }
            };
            workers.idle -= 1;
            workers.busy += 1;
            if workers.idle == 0
                && workers.busy < MAX_WORKERS
                && let Err(error) = self.spawn_worker(&mut workers)
            {
                // The next one who is done stands there again.
                warn!(error = %Chain(&error), "cannot start a thread for CNI calls");
            }
            drop(workers);
            // Whatever happens in there, this one stands here again.
            let served = catch_unwind(AssertUnwindSafe(|| (self.handler)(stream)));
            if served.is_err() {
                error!("a CNI call was not answered: see the panic before this line");
            }
            let mut workers = self.lock();
            workers.busy -= 1;
            self.call_ended.notify_all();
            if workers.closed || workers.idle >= MIN_IDLE_WORKERS {
                return;
            }
            workers.idle += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Write as _},
        path::PathBuf,
        sync::Barrier,
    };

    use super::*;

    /// A socket in a directory that goes with it.
    struct Socket(PathBuf);

    impl Socket {
        fn new(name: &str) -> (Self, UnixListener) {
            let path = std::env::temp_dir().join(format!("patchbay-pool-{}-{name}", std::process::id()));
            let listener = UnixListener::bind(&path).unwrap();
            (Self(path), listener)
        }

        /// What is said at the pool.
        fn read_reply(&self) -> io::Result<String> {
            let (mut stream, mut said) = (UnixStream::connect(&self.0)?, String::new());
            stream.read_to_string(&mut said)?;
            Ok(said)
        }
    }

    impl Drop for Socket {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    #[test]
    fn as_many_calls_as_come_are_served_at_once_and_few_threads_stay() {
        const CLIENTS: usize = 40;
        let (socket, listener) = Socket::new("crowd");
        let all = Barrier::new(CLIENTS);
        let pool = ThreadPool::start(listener, move |mut stream| {
            // Nobody leaves before everybody is there.
            all.wait();
            stream.write_all(b"hello").unwrap();
        })
        .unwrap();
        for _ in 0..2 {
            thread::scope(|scope| {
                let callers: Vec<_> =
                    (0..CLIENTS).map(|_| scope.spawn(|| socket.read_reply().unwrap())).collect();
                assert!(callers.into_iter().all(|caller| caller.join().unwrap() == "hello"));
            });
        }
        let started = Instant::now();
        while pool.0.lock().busy > 0 {
            assert!(started.elapsed() < Duration::from_secs(10));
            thread::yield_now();
        }
        assert_eq!(pool.0.lock().idle, MIN_IDLE_WORKERS);
    }

    #[test]
    fn a_closed_door_lets_nobody_in_and_waits_for_those_inside() {
        let (socket, listener) = Socket::new("closed");
        let (enter, leave) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
        let inside = (Arc::clone(&enter), Arc::clone(&leave));
        let pool = ThreadPool::start(listener, move |mut stream| {
            inside.0.wait();
            inside.1.wait();
            stream.write_all(b"bye").unwrap();
        })
        .unwrap();
        let state = Arc::clone(&pool.0);
        thread::scope(|scope| {
            let caller = scope.spawn(|| socket.read_reply());
            enter.wait();
            let closing = scope.spawn(|| pool.drain(Duration::from_secs(10)));
            while !state.lock().closed {
                thread::yield_now();
            }
            leave.wait();
            assert!(closing.join().unwrap());
            assert_eq!(caller.join().unwrap().unwrap(), "bye");
        });
        assert!(socket.read_reply().is_err());
        let started = Instant::now();
        while Arc::strong_count(&state) > 1 {
            assert!(started.elapsed() < Duration::from_secs(10), "workers are call_ended");
            thread::yield_now();
        }
    }

    #[test]
    fn a_call_that_panics_takes_no_place_away() {
        let (socket, listener) = Socket::new("panic");
        let pool = ThreadPool::start(listener, |_| panic!("as a test does")).unwrap();
        for _ in 0..2 * MAX_WORKERS {
            assert_eq!(socket.read_reply().unwrap(), "");
        }
        assert!(pool.drain(Duration::from_secs(10)));
    }

    #[test]
    fn somebody_who_does_not_leave_is_not_waited_for_without_end() {
        let (socket, listener) = Socket::new("stays");
        let (enter, leave) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
        let inside = (Arc::clone(&enter), Arc::clone(&leave));
        let pool = ThreadPool::start(listener, move |_| {
            inside.0.wait();
            inside.1.wait();
        })
        .unwrap();
        thread::scope(|scope| {
            scope.spawn(|| socket.read_reply());
            enter.wait();
            assert!(!pool.drain(Duration::from_millis(50)));
            leave.wait();
        });
    }
}
