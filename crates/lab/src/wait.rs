//! Waiting for a condition, with a deadline and a text that tells what was missing. The only place that sleeps.

use std::{
    future::Future,
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow, bail};

const LOOK: Duration = Duration::from_millis(20);

/// Looks again and again until `look` answers `Some`; its last error is part of the failure text.
pub async fn until<T, F, Fut>(deadline: Duration, what: &str, mut look: F) -> Result<T>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<Option<T>>>,
{
    let start = Instant::now();
    loop {
        // At least a moment: a look that is due at the deadline is still a look.
        let rest = deadline.saturating_sub(start.elapsed()).max(Duration::from_millis(200));
        let missing = match tokio::time::timeout(rest, look()).await {
            Ok(Ok(Some(found))) => return Ok(found),
            Ok(Ok(None)) => None,
            Ok(Err(e)) => Some(e),
            Err(_) => Some(anyhow!("the last look got no answer")),
        };
        if start.elapsed() >= deadline {
            return give_up(what, deadline, missing);
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// The same for code that has no runtime.
pub fn blocking<T>(deadline: Duration, what: &str, mut look: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let start = Instant::now();
    loop {
        let missing = match look() {
            Ok(Some(found)) => return Ok(found),
            Ok(None) => None,
            Err(e) => Some(e),
        };
        if start.elapsed() >= deadline {
            return give_up(what, deadline, missing);
        }
        #[allow(clippy::disallowed_methods, reason = "this is the wait on a condition with a deadline")]
        std::thread::sleep(LOOK);
    }
}

fn give_up<T>(what: &str, deadline: Duration, missing: Option<anyhow::Error>) -> Result<T> {
    match missing {
        Some(e) => Err(e.context(format!("waited {deadline:?} for {what}"))),
        None => bail!("waited {deadline:?} for {what}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_wait_says_what_was_missing_and_why() {
        let failed = blocking::<()>(Duration::from_millis(30), "the sun", || bail!("it rains")).unwrap_err();
        assert_eq!(format!("{failed:#}"), "waited 30ms for the sun: it rains");
    }
}
