//! The wall clock, watched for being set.

use std::time::{Duration, Instant, SystemTime};

use plan::certs;

use crate::tenure::now;

/// How soon a step is noticed. A look costs nothing: it asks nobody.
const LOOK: Duration = Duration::from_mins(1);

/// Both clocks at one moment.
pub struct Clock {
    wall: fn() -> SystemTime,
    last: (SystemTime, Instant),
}

impl Clock {
    pub fn new() -> Self {
        Self::of(SystemTime::now)
    }

    fn of(wall: fn() -> SystemTime) -> Self {
        Self { wall, last: (wall(), now()) }
    }

    /// Resolves when the wall clock was set.
    pub async fn was_set(mut self) {
        loop {
            tokio::time::sleep(LOOK).await;
            let seen = ((self.wall)(), now());
            if certs::clock_was_set(self.last, seen) {
                return;
            }
            // From look to look, so that a clock that is merely slewed never adds up to a step.
            self.last = seen;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
    };

    use super::*;

    /// How far the wall clock was set ahead.
    static AHEAD: AtomicU64 = AtomicU64::new(0);
    static START: LazyLock<Instant> = LazyLock::new(now);

    fn wall() -> SystemTime {
        let passed = now().saturating_duration_since(*START);
        SystemTime::UNIX_EPOCH + passed + Duration::from_secs(AHEAD.load(Ordering::Relaxed))
    }

    #[tokio::test(start_paused = true)]
    async fn a_clock_that_is_set_is_noticed_within_a_minute_and_one_that_runs_is_not() {
        let mut set = std::pin::pin!(Clock::of(wall).was_set());
        assert!(tokio::time::timeout(Duration::from_hours(24), set.as_mut()).await.is_err());
        AHEAD.store(3600, Ordering::Relaxed);
        assert!(tokio::time::timeout(Duration::from_secs(61), set).await.is_ok());
        let back = Clock::of(wall);
        AHEAD.store(0, Ordering::Relaxed);
        assert!(tokio::time::timeout(Duration::from_secs(61), back.was_set()).await.is_ok());
    }
}
