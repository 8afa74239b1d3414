//! The threads that serve the CNI socket. One worker handles each connection from accept to reply, so that a call wakes
//! only one thread.

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

use api::ErrorChain;
use nix::sys::socket::{Shutdown, shutdown};
use tracing::{error, warn};

/// Calls that are handled concurrently; more wait in the socket's backlog.
pub const MAX_WORKERS: usize = 256;
/// Workers that wait for connections when the socket is idle.
const MIN_IDLE_WORKERS: usize = 4;
/// Pause after a failed `accept`.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

type Handler = dyn Fn(UnixStream) + Send + Sync;

/// Serves a socket until it is dropped.
pub struct ThreadPool(Arc<PoolState>);

struct PoolState {
    listener: UnixListener,
    handler: Box<Handler>,
    workers: Mutex<WorkerCounts>,
    call_ended: Condvar,
}

#[derive(Debug, Default)]
struct WorkerCounts {
    /// Wait in `accept`.
    idle: usize,
    /// Handle a call.
    busy: usize,
    closed: bool,
}

impl ThreadPool {
    /// Starts the workers. They inherit the namespaces of the calling thread.
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

    /// Stops accepting and waits up to `grace` for running calls. Returns whether all of them finished.
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
        // Every blocked `accept` returns.
        let _ = shutdown(self.listener.as_raw_fd(), Shutdown::Both);
    }

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
                        warn!(error = %ErrorChain(&error), "cannot accept CNI connections; retrying");
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
                // The next worker that finishes a call accepts again.
                warn!(error = %ErrorChain(&error), "cannot start a worker thread for CNI calls");
            }
            drop(workers);
            // A panic must not cost the pool a worker.
            let handled = catch_unwind(AssertUnwindSafe(|| (self.handler)(stream)));
            if handled.is_err() {
                error!("a CNI call panicked and got no reply; see the panic logged before this line");
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

    /// Removes the socket on drop.
    struct TestSocket(PathBuf);

    impl TestSocket {
        fn new(name: &str) -> (Self, UnixListener) {
            let path = std::env::temp_dir().join(format!("patchbay-pool-{}-{name}", std::process::id()));
            let listener = UnixListener::bind(&path).unwrap();
            (Self(path), listener)
        }

        /// Connects and reads until the server closes the connection.
        fn read_reply(&self) -> io::Result<String> {
            let (mut stream, mut reply) = (UnixStream::connect(&self.0)?, String::new());
            stream.read_to_string(&mut reply)?;
            Ok(reply)
        }
    }

    impl Drop for TestSocket {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    #[test]
    fn concurrent_calls_are_handled_in_parallel_and_few_workers_remain() {
        const CLIENTS: usize = 40;
        let (socket, listener) = TestSocket::new("concurrent");
        let all = Barrier::new(CLIENTS);
        let pool = ThreadPool::start(listener, move |mut stream| {
            // No call finishes before all of them run.
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
    fn drain_accepts_no_new_calls_and_waits_for_running_ones() {
        let (socket, listener) = TestSocket::new("closed");
        let (entered, finish) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
        let barriers = (Arc::clone(&entered), Arc::clone(&finish));
        let pool = ThreadPool::start(listener, move |mut stream| {
            barriers.0.wait();
            barriers.1.wait();
            stream.write_all(b"bye").unwrap();
        })
        .unwrap();
        let state = Arc::clone(&pool.0);
        thread::scope(|scope| {
            let caller = scope.spawn(|| socket.read_reply());
            entered.wait();
            let draining = scope.spawn(|| pool.drain(Duration::from_secs(10)));
            while !state.lock().closed {
                thread::yield_now();
            }
            finish.wait();
            assert!(draining.join().unwrap());
            assert_eq!(caller.join().unwrap().unwrap(), "bye");
        });
        assert!(socket.read_reply().is_err());
        let started = Instant::now();
        while Arc::strong_count(&state) > 1 {
            assert!(started.elapsed() < Duration::from_secs(10), "worker threads are still running");
            thread::yield_now();
        }
    }

    #[test]
    fn a_panicking_call_costs_no_worker() {
        let (socket, listener) = TestSocket::new("panic");
        let pool = ThreadPool::start(listener, |_| panic!("expected by this test")).unwrap();
        for _ in 0..2 * MAX_WORKERS {
            assert_eq!(socket.read_reply().unwrap(), "");
        }
        assert!(pool.drain(Duration::from_secs(10)));
    }

    #[test]
    fn drain_gives_up_on_a_call_that_does_not_finish() {
        let (socket, listener) = TestSocket::new("stays");
        let (entered, finish) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
        let barriers = (Arc::clone(&entered), Arc::clone(&finish));
        let pool = ThreadPool::start(listener, move |_| {
            barriers.0.wait();
            barriers.1.wait();
        })
        .unwrap();
        thread::scope(|scope| {
            scope.spawn(|| socket.read_reply());
            entered.wait();
            assert!(!pool.drain(Duration::from_millis(50)));
            finish.wait();
        });
    }
}
