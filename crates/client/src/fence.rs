//! The fence: until when this replica may write as leader.
//!
//! `CLOCK_MONOTONIC` measures the fence and does not advance while a machine is suspended: a leader that resumes still
//! considers itself the leader for up to two thirds of a lease duration. The API server rejects what it then writes: every
//! write of a leader carries the resourceVersion (or, for a delete, the UID as well) of what it has read, and the new
//! leader has written since.

use std::time::{Duration, Instant};

use tokio::sync::watch;

/// Until when a leader's loops may write. Checked before each single write, because a process that was stopped can resume
/// at any point.
#[derive(Clone, Debug)]
pub struct LeaseFence(watch::Receiver<Instant>);

impl LeaseFence {
    /// A fence that expires at the time that `until` holds.
    pub fn new(until: &watch::Sender<Instant>) -> Self {
        Self(until.subscribe())
    }

    /// A fence that expires after `duration` and is never renewed.
    pub fn expiring_in(duration: Duration) -> Self {
        Self::new(&watch::Sender::new(now() + duration))
    }

    /// The remaining time; zero when the fence has expired.
    pub fn remaining(&self) -> Duration {
        self.0.borrow().saturating_duration_since(now())
    }
}

/// Tokio's clock, so that a test can pause it.
pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_fence_expires_by_itself() {
        let fence = LeaseFence::expiring_in(Duration::from_secs(6));
        assert_eq!(fence.remaining(), Duration::from_secs(6));
        tokio::time::advance(Duration::from_secs(7)).await;
        assert_eq!(fence.remaining(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_renewal_moves_the_fence() {
        let until = watch::Sender::new(now());
        let fence = LeaseFence::new(&until);
        assert_eq!(fence.remaining(), Duration::ZERO);
        until.send_replace(now() + Duration::from_secs(4));
        assert_eq!(fence.remaining(), Duration::from_secs(4));
    }
}
