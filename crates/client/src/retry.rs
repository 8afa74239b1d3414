//! Exponential backoff.

use std::time::{Duration, Instant};

/// The part of a delay that is added at random, so that clients that failed together do not retry together.
const JITTER: f64 = 0.25;

/// The delays between retries: each twice the last one, up to a limit.
#[derive(Clone, Debug)]
pub struct Backoff {
    min: Duration,
    max: Duration,
    /// The next delay, without jitter.
    next: Duration,
    jitter: f64,
}

impl Backoff {
    /// Delays from `min` to `max`, each with up to a quarter added at random.
    pub fn new(min: Duration, max: Duration) -> Self {
        Self { min, max, next: min, jitter: JITTER }
    }

    /// The same delays for everyone, without a random part.
    pub fn exact(min: Duration, max: Duration) -> Self {
        Self { jitter: 0.0, ..Self::new(min, max) }
    }

    /// The delay before the next retry.
    pub fn next_delay(&mut self) -> Duration {
        let delay = self.next;
        self.next = (delay * 2).min(self.max);
        delay + delay.mul_f64(self.jitter * fastrand::f64())
    }

    /// Starts again with the shortest delay.
    pub fn reset(&mut self) {
        self.next = self.min;
    }
}

impl Default for Backoff {
    /// From 0.8 s to 30 s, as Kubernetes clients use it.
    fn default() -> Self {
        Self::new(Duration::from_millis(800), Duration::from_secs(30))
    }
}

/// A failing operation: its backoff, and when it may be tried again.
#[derive(Clone, Debug)]
pub struct Retry {
    backoff: Backoff,
    not_before: Option<Instant>,
}

impl Retry {
    /// An operation that has not failed.
    pub fn new(backoff: Backoff) -> Self {
        Self { backoff, not_before: None }
    }

    /// Records a failure. Returns how long to wait.
    pub fn failed(&mut self, now: Instant) -> Duration {
        let delay = self.backoff.next_delay();
        self.not_before = Some(now + delay);
        delay
    }

    /// Records a success: the operation may be tried at once, and its next failure waits the shortest delay.
    pub fn succeeded(&mut self) {
        self.backoff.reset();
        self.not_before = None;
    }

    /// How long to wait still, if the operation has to wait.
    pub fn remaining(&self, now: Instant) -> Option<Duration> {
        let rest = self.not_before?.saturating_duration_since(now);
        (!rest.is_zero()).then_some(rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(backoff: &mut Backoff, count: usize) -> Vec<u64> {
        (0..count).map(|_| backoff.next_delay().as_secs()).collect()
    }

    #[test]
    fn delays_double_up_to_the_limit_and_start_again_after_a_reset() {
        let mut backoff = Backoff::exact(Duration::from_secs(1), Duration::from_secs(60));
        assert_eq!(seconds(&mut backoff, 8), [1, 2, 4, 8, 16, 32, 60, 60]);
        backoff.reset();
        assert_eq!(seconds(&mut backoff, 2), [1, 2]);
    }

    #[test]
    fn jitter_adds_up_to_a_quarter_and_differs() {
        let delays: Vec<Duration> = (0..32)
            .map(|_| Backoff::new(Duration::from_secs(4), Duration::from_secs(4)).next_delay())
            .collect();
        let bounds = Duration::from_secs(4)..=Duration::from_secs(5);
        assert!(delays.iter().all(|delay| bounds.contains(delay)), "{delays:?}");
        assert!(delays.iter().any(|delay| *delay != delays[0]));
    }

    #[test]
    fn a_failed_operation_waits_and_a_successful_one_does_not() {
        let mut retry = Retry::new(Backoff::exact(Duration::from_secs(1), Duration::from_secs(4)));
        let start = Instant::now();
        assert_eq!(retry.remaining(start), None);
        assert_eq!(retry.failed(start), Duration::from_secs(1));
        assert_eq!(retry.failed(start), Duration::from_secs(2));
        assert_eq!(retry.remaining(start + Duration::from_millis(500)), Some(Duration::from_millis(1500)));
        assert_eq!(retry.remaining(start + Duration::from_secs(2)), None);
        retry.succeeded();
        assert_eq!(retry.remaining(start), None);
        assert_eq!(retry.failed(start), Duration::from_secs(1));
    }
}
