//! Detects that the wall clock was set.

use std::time::{Duration, Instant, SystemTime};

use client::fence::now;
use plan::certs;

/// How often the clocks are compared. Cheap: no request is sent.
const CHECK_INTERVAL: Duration = Duration::from_mins(1);

/// Compares the wall clock with the monotonic clock.
pub struct WallClockMonitor {
    wall: fn() -> SystemTime,
    last: (SystemTime, Instant),
}

impl WallClockMonitor {
    pub fn new() -> Self {
        Self::with_wall_clock(SystemTime::now)
    }

    fn with_wall_clock(wall: fn() -> SystemTime) -> Self {
        Self { wall, last: (wall(), now()) }
    }

    /// Resolves when the wall clock was set.
    pub async fn stepped(mut self) {
        loop {
            tokio::time::sleep(CHECK_INTERVAL).await;
            let current = ((self.wall)(), now());
            if certs::wall_clock_stepped(self.last, current) {
                return;
            }
            // Compared with the last check, so that a clock that is slewed never adds up to a step.
            self.last = current;
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

    /// How many seconds the wall clock was set ahead.
    static AHEAD: AtomicU64 = AtomicU64::new(0);
    static START: LazyLock<Instant> = LazyLock::new(now);

    fn wall() -> SystemTime {
        let elapsed = now().saturating_duration_since(*START);
        SystemTime::UNIX_EPOCH + elapsed + Duration::from_secs(AHEAD.load(Ordering::Relaxed))
    }

    #[tokio::test(start_paused = true)]
    async fn a_wall_clock_step_is_detected_within_a_minute_and_elapsed_time_is_not_a_step() {
        let mut ahead = std::pin::pin!(WallClockMonitor::with_wall_clock(wall).stepped());
        assert!(tokio::time::timeout(Duration::from_hours(24), ahead.as_mut()).await.is_err());
        AHEAD.store(3600, Ordering::Relaxed);
        assert!(tokio::time::timeout(Duration::from_secs(61), ahead).await.is_ok());
        let back = WallClockMonitor::with_wall_clock(wall);
        AHEAD.store(0, Ordering::Relaxed);
        assert!(tokio::time::timeout(Duration::from_secs(61), back.stepped()).await.is_ok());
    }
}
