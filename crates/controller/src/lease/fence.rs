//! Until when this replica may act as leader.
//!
//! `CLOCK_MONOTONIC`, which this is measured by, stands still while a machine is suspended: one that wakes up believes for up
//! to two thirds of a term that it still leads. What it then writes is fenced by the API server: every leader's write carries the
//! resourceVersion (or, for a delete, the UID as well) of what it has read, and the new leader has written since.

use std::time::{Duration, Instant};

use tokio::sync::watch;

/// Until when a leader's loops may write. Asked before each single write, because a process that was stopped for a while wakes up
/// in the middle of anything.
#[derive(Clone, Debug)]
pub struct Tenure(watch::Receiver<Instant>);

impl Tenure {
    pub fn new(until: &watch::Sender<Instant>) -> Self {
        Self(until.subscribe())
    }

    /// How long it lasts yet; zero when it is over.
    pub fn rest(&self) -> Duration {
        self.0.borrow().saturating_duration_since(now())
    }
}

/// tokio's clock, so that a test can stop it.
pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A tenure of this length. It is not renewed, and outlives its sender.
    pub fn tenure(length: Duration) -> Tenure {
        Tenure::new(&watch::Sender::new(now() + length))
    }

    #[tokio::test(start_paused = true)]
    async fn a_tenure_ends_by_itself() {
        let tenure = tenure(Duration::from_secs(6));
        assert_eq!(tenure.rest(), Duration::from_secs(6));
        tokio::time::advance(Duration::from_secs(7)).await;
        assert_eq!(tenure.rest(), Duration::ZERO);
    }
}
