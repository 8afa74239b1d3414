//! Waits for a condition with a timeout; the error names the condition and the last failure. The only module that sleeps.

use std::{future::Future, time::Duration};

use anyhow::{Context as _, Result, anyhow, bail};

use crate::stall::StallClock;

const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Polls until `check` returns `Some`. After the timeout, the last error of `check` becomes the cause of the failure. Time in
/// which the machine was overloaded does not count, see [`StallClock`].
pub async fn until<T, F, Fut>(timeout: Duration, what: &str, mut check: F) -> Result<T>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<Option<T>>>,
{
    let clock = StallClock::start();
    loop {
        // The last check still gets a moment when the timeout is nearly over.
        let remaining = timeout.saturating_sub(clock.unstalled()).max(Duration::from_millis(200));
        let cause = match tokio::time::timeout(remaining, check()).await {
            Ok(Ok(Some(found))) => return Ok(found),
            Ok(Ok(None)) => None,
            Ok(Err(e)) => Some(e),
            Err(_) => Some(anyhow!("the last check timed out")),
        };
        if clock.unstalled() >= timeout {
            return timed_out(what, clock.elapsed(), cause);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Returns when the limit is over. Time in which the machine was overloaded does not count.
pub async fn expired(limit: Duration) {
    let clock = StallClock::start();
    while clock.unstalled() < limit {
        tokio::time::sleep(limit.saturating_sub(clock.unstalled()).max(POLL_INTERVAL)).await;
    }
}

/// Polls until `check` returns `Some`, for a change that must happen within `limit`; returns how long it took. Time in which
/// the machine was overloaded does not count, see [`StallClock`].
pub async fn within<T, F, Fut>(limit: Duration, what: &str, mut check: F) -> Result<(T, Duration)>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<Option<T>>>,
{
    let clock = StallClock::start();
    loop {
        let outcome = tokio::time::timeout(limit * 10, check()).await.context("the last check timed out");
        let unstalled = clock.unstalled();
        let cause = match outcome.flatten() {
            Ok(Some(found)) => return Ok((found, clock.elapsed())),
            Ok(None) => None,
            Err(e) => Some(e),
        };
        if unstalled >= limit {
            let what = format!("{what} (limit {limit:?}; {unstalled:?} without stalls of the machine)");
            return timed_out(&what, clock.elapsed(), cause);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// The same as [`until`] for code without a tokio runtime.
pub fn blocking<T>(timeout: Duration, what: &str, mut check: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let clock = StallClock::start();
    loop {
        let cause = match check() {
            Ok(Some(found)) => return Ok(found),
            Ok(None) => None,
            Err(e) => Some(e),
        };
        if clock.unstalled() >= timeout {
            return timed_out(what, clock.elapsed(), cause);
        }
        #[allow(clippy::disallowed_methods, reason = "polls a condition with a timeout")]
        std::thread::sleep(POLL_INTERVAL);
    }
}

fn timed_out<T>(what: &str, waited: Duration, cause: Option<anyhow::Error>) -> Result<T> {
    let failure = format!("waited {:.1} s for {what}", waited.as_secs_f64());
    match cause {
        Some(e) => Err(e.context(failure)),
        None => bail!(failure),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[tokio::test]
    async fn a_change_that_comes_too_late_fails_although_it_comes() {
        let start = Instant::now();
        let late = || async { Ok((start.elapsed() > Duration::from_secs(5)).then_some(())) };
        let failed = within(Duration::from_millis(100), "a Ready node", late).await.unwrap_err();
        assert!(failed.to_string().contains("for a Ready node (limit 100ms; "), "{failed:#}");
        let (found, _) = within(Duration::from_secs(1), "now", || async { Ok(Some(7)) }).await.unwrap();
        assert_eq!(found, 7);
    }

    #[test]
    fn a_timeout_names_the_condition_and_the_last_error() {
        let failed = blocking::<()>(Duration::from_millis(30), "a Ready node", || bail!("kubelet stopped"))
            .unwrap_err();
        let text = format!("{failed:#}");
        assert!(
            text.starts_with("waited 0.") && text.ends_with(" s for a Ready node: kubelet stopped"),
            "{text}"
        );
    }
}
