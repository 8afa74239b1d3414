//! The threads that stand at the socket. Each takes in a call, does it and answers, so that a call wakes one thread and
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

use api::ErrorChain;
use nix::sys::socket::{Shutdown, shutdown};
use tracing::{error, warn};

/// How many calls are served at a time; others wait in the socket's queue.
const CALLS: usize = 256;
/// How many threads stay when there is nothing to do.
const STAY: usize = 4;
/// How long to leave the socket alone after it could not be accepted from.
const PAUSE: Duration = Duration::from_millis(100);

type Serve = dyn Fn(UnixStream) + Send + Sync;

/// A socket that is served until this is dropped.
pub struct Door(Arc<Hall>);

struct Hall {
    listener: UnixListener,
    serve: Box<Serve>,
    threads: Mutex<Threads>,
    left: Condvar,
}

#[derive(Debug, Default)]
struct Threads {
    /// Stand at the socket.
    waiting: usize,
    /// Serve a call.
    busy: usize,
    closed: bool,
}

impl Door {
    /// Lets threads of the caller's namespaces serve the socket.
    pub fn open(
        listener: UnixListener,
        serve: impl Fn(UnixStream) + Send + Sync + 'static,
    ) -> io::Result<Self> {
        listener.set_nonblocking(false)?;
        let (threads, left) = (Mutex::default(), Condvar::new());
        let door = Self(Arc::new(Hall { listener, serve: Box::new(serve), threads, left }));
        for _ in 0..STAY {
            door.0.call(&mut door.0.lock())?;
        }
        Ok(door)
    }

    /// Takes in nobody any more, and waits so long for those who are inside; says whether all have left.
    pub fn close(self, grace: Duration) -> bool {
        self.0.shut();
        let until = Instant::now() + grace;
        let mut threads = self.0.lock();
        while threads.busy > 0 {
            let Some(rest) = until.checked_duration_since(Instant::now()) else { return false };
            threads = self.0.left.wait_timeout(threads, rest).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.0.shut();
    }
}

impl Hall {
    fn lock(&self) -> MutexGuard<'_, Threads> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn shut(&self) {
        self.lock().closed = true;
        // All who wait in `accept` return.
        let _ = shutdown(self.listener.as_raw_fd(), Shutdown::Both);
    }

    /// One thread more at the socket.
    fn call(self: &Arc<Self>, threads: &mut Threads) -> io::Result<()> {
        let hall = Arc::clone(self);
        thread::Builder::new().name("cni".to_owned()).spawn(move || hall.stand())?;
        threads.waiting += 1;
        Ok(())
    }

    fn stand(self: Arc<Self>) {
        let mut failing = false;
        loop {
            let accepted = self.listener.accept();
            let mut threads = self.lock();
            if threads.closed {
                threads.waiting -= 1;
                return;
            }
            let stream = match accepted {
                Ok((stream, _)) => {
                    failing = false;
                    stream
                }
                Err(error) => {
                    drop(threads);
                    if !failing {
                        warn!(error = %ErrorChain(&error), "cannot accept CNI calls, trying again");
                    }
                    failing = true;
                    thread::park_timeout(PAUSE);
                    continue;
                }
            };
            threads.waiting -= 1;
            threads.busy += 1;
            if threads.waiting == 0
                && threads.busy < CALLS
                && let Err(error) = self.call(&mut threads)
            {
                // The next one who is done stands there again.
                warn!(error = %ErrorChain(&error), "cannot start a thread for CNI calls");
            }
            drop(threads);
            // Whatever happens in there, this one stands here again.
            let served = catch_unwind(AssertUnwindSafe(|| (self.serve)(stream)));
            if served.is_err() {
                error!("a CNI call was not answered: see the panic before this line");
            }
            let mut threads = self.lock();
            threads.busy -= 1;
            self.left.notify_all();
            if threads.closed || threads.waiting >= STAY {
                return;
            }
            threads.waiting += 1;
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
            let path = std::env::temp_dir().join(format!("patchbay-door-{}-{name}", std::process::id()));
            let listener = UnixListener::bind(&path).unwrap();
            (Self(path), listener)
        }

        /// What is said at the door.
        fn hear(&self) -> io::Result<String> {
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
        const CROWD: usize = 40;
        let (socket, listener) = Socket::new("crowd");
        let all = Barrier::new(CROWD);
        let door = Door::open(listener, move |mut stream| {
            // Nobody leaves before everybody is there.
            all.wait();
            stream.write_all(b"hello").unwrap();
        })
        .unwrap();
        for _ in 0..2 {
            thread::scope(|scope| {
                let callers: Vec<_> = (0..CROWD).map(|_| scope.spawn(|| socket.hear().unwrap())).collect();
                assert!(callers.into_iter().all(|caller| caller.join().unwrap() == "hello"));
            });
        }
        let begun = Instant::now();
        while door.0.lock().busy > 0 {
            assert!(begun.elapsed() < Duration::from_secs(10));
            thread::yield_now();
        }
        assert_eq!(door.0.lock().waiting, STAY);
    }

    #[test]
    fn a_closed_door_lets_nobody_in_and_waits_for_those_inside() {
        let (socket, listener) = Socket::new("closed");
        let (enter, leave) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
        let inside = (Arc::clone(&enter), Arc::clone(&leave));
        let door = Door::open(listener, move |mut stream| {
            inside.0.wait();
            inside.1.wait();
            stream.write_all(b"bye").unwrap();
        })
        .unwrap();
        let hall = Arc::clone(&door.0);
        thread::scope(|scope| {
            let caller = scope.spawn(|| socket.hear());
            enter.wait();
            let closing = scope.spawn(|| door.close(Duration::from_secs(10)));
            while !hall.lock().closed {
                thread::yield_now();
            }
            leave.wait();
            assert!(closing.join().unwrap());
            assert_eq!(caller.join().unwrap().unwrap(), "bye");
        });
        assert!(socket.hear().is_err());
        let begun = Instant::now();
        while Arc::strong_count(&hall) > 1 {
            assert!(begun.elapsed() < Duration::from_secs(10), "threads are left");
            thread::yield_now();
        }
    }

    #[test]
    fn a_call_that_panics_takes_no_place_away() {
        let (socket, listener) = Socket::new("panic");
        let door = Door::open(listener, |_| panic!("as a test does")).unwrap();
        for _ in 0..2 * CALLS {
            assert_eq!(socket.hear().unwrap(), "");
        }
        assert!(door.close(Duration::from_secs(10)));
    }

    #[test]
    fn somebody_who_does_not_leave_is_not_waited_for_without_end() {
        let (socket, listener) = Socket::new("stays");
        let (enter, leave) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
        let inside = (Arc::clone(&enter), Arc::clone(&leave));
        let door = Door::open(listener, move |_| {
            inside.0.wait();
            inside.1.wait();
        })
        .unwrap();
        thread::scope(|scope| {
            scope.spawn(|| socket.hear());
            enter.wait();
            assert!(!door.close(Duration::from_millis(50)));
            leave.wait();
        });
    }
}
