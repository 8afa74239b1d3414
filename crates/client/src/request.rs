//! Requests to the API server: each with a timeout, counted when it fails, and a leader's writes only while its fence
//! holds.
//!
//! ```text
//! let call = ApiCall::new(DEFAULT_TIMEOUT, move || metrics.api_error(ApiCallKind::Secret)).fenced(fence);
//! let secret = call.read(api.get_opt(name)).await?;
//! let written = call.change(api.replace(name, &params, &secret)).await;
//! ```

use std::{fmt, future::Future, sync::Arc, time::Duration};

use kube::core::Status;

use crate::fence::LeaseFence;

/// The timeout of a request that has no shorter one.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no response from the API server within {} ms", .0.as_millis())]
    Timeout(Duration),
    #[error("conflict with another writer")]
    Conflict(#[source] kube::Error),
    #[error("the API server rejected the request or could not be reached")]
    Failed(#[source] kube::Error),
    #[error("lease expired; request not sent")]
    LeaseExpired,
}

impl Error {
    /// Whether another writer was first: read again before the next write.
    pub fn is_conflict(&self) -> bool {
        matches!(self, Self::Conflict(_))
    }

    /// Whether the object, its namespace or its kind does not exist.
    pub fn is_not_found(&self) -> bool {
        self.status().is_some_and(Status::is_not_found)
    }

    /// Whether the API server rejected this very request. Other requests may still succeed.
    pub fn is_rejection(&self) -> bool {
        self.status().is_some_and(|status| {
            (400..500).contains(&status.code) && !matches!(status.code, 401 | 408 | 409 | 410 | 429)
        })
    }

    /// The status with which the API server responded.
    pub fn status(&self) -> Option<&Status> {
        match self {
            Self::Conflict(kube::Error::Api(status)) | Self::Failed(kube::Error::Api(status)) => Some(status),
            Self::Conflict(_) | Self::Failed(_) | Self::Timeout(_) | Self::LeaseExpired => None,
        }
    }
}

/// Sends the requests of one kind.
#[derive(Clone)]
pub struct ApiCall {
    timeout: Duration,
    fence: Option<LeaseFence>,
    /// Counts a failure.
    failed: Arc<dyn Fn() + Send + Sync>,
}

/// Decides which rejections are conflicts.
#[derive(Clone, Copy)]
enum Verb {
    Read,
    Create,
    Change,
}

impl fmt::Debug for ApiCall {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { timeout, fence, failed: _ } = self;
        formatter.debug_struct("ApiCall").field("timeout", timeout).field("fence", fence).finish()
    }
}

impl ApiCall {
    /// Waits for each response at most `timeout`, and calls `failed` once for each failure. A conflict is no failure, and
    /// neither is a write that the fence holds back.
    pub fn new(timeout: Duration, failed: impl Fn() + Send + Sync + 'static) -> Self {
        Self { timeout, fence: None, failed: Arc::new(failed) }
    }

    /// Sends writes only while the fence holds, and waits for none of them longer than that.
    #[must_use]
    pub fn fenced(self, fence: LeaseFence) -> Self {
        Self { fence: Some(fence), ..self }
    }

    /// Reads. The fence does not apply, and no rejection is a conflict.
    pub async fn read<T>(&self, request: impl Future<Output = kube::Result<T>>) -> Result<T, Error> {
        self.send(self.timeout, Verb::Read, request).await
    }

    /// "Already exists" is a conflict. "Not found" is not: it means that the namespace is missing, and reading again
    /// does not create it.
    pub async fn create<T>(&self, request: impl Future<Output = kube::Result<T>>) -> Result<T, Error> {
        self.write(Verb::Create, request).await
    }

    /// Replaces, patches or deletes. "Not found" is a conflict.
    pub async fn change<T>(&self, request: impl Future<Output = kube::Result<T>>) -> Result<T, Error> {
        self.write(Verb::Change, request).await
    }

    /// A future that is never polled sends nothing.
    async fn write<T>(&self, verb: Verb, request: impl Future<Output = kube::Result<T>>) -> Result<T, Error> {
        let remaining = self.fence.as_ref().map_or(Duration::MAX, LeaseFence::remaining);
        if remaining.is_zero() {
            return Err(Error::LeaseExpired);
        }
        self.send(self.timeout.min(remaining), verb, request).await
    }

    async fn send<T>(
        &self,
        timeout: Duration,
        verb: Verb,
        request: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, Error> {
        let error = match tokio::time::timeout(timeout, request).await {
            Ok(Ok(response)) => return Ok(response),
            Ok(Err(error)) if is_conflict(verb, &error) => return Err(Error::Conflict(error)),
            Ok(Err(error)) => Error::Failed(error),
            Err(_) => Error::Timeout(timeout),
        };
        (self.failed)();
        Err(error)
    }
}

fn is_conflict(verb: Verb, error: &kube::Error) -> bool {
    let kube::Error::Api(status) = error else { return false };
    match verb {
        Verb::Read => false,
        Verb::Create => status.is_conflict() || status.is_already_exists(),
        Verb::Change => status.is_conflict() || status.is_not_found(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// A call, and how many failures it counted.
    fn api_call() -> (ApiCall, Arc<AtomicUsize>) {
        let failures = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&failures);
        let count = move || _ = counted.fetch_add(1, Ordering::Relaxed);
        (ApiCall::new(DEFAULT_TIMEOUT, count), failures)
    }

    fn status_error(reason: &str, code: u16) -> kube::Error {
        kube::Error::Api(Box::new(Status::failure("no", reason).with_code(code)))
    }

    #[tokio::test]
    async fn not_found_is_a_conflict_for_a_change_and_an_error_for_a_create() {
        let not_found = async || Err::<(), _>(status_error("NotFound", 404));
        let (call, failures) = api_call();
        let error = call.change(not_found()).await.unwrap_err();
        assert!(error.is_conflict() && error.is_not_found());
        assert_eq!(failures.load(Ordering::Relaxed), 0, "a conflict is not counted");
        for (expected, error) in
            [call.create(not_found()).await, call.read(not_found()).await].into_iter().enumerate()
        {
            let error = error.unwrap_err();
            assert!(!error.is_conflict() && error.is_not_found());
            assert_eq!(failures.load(Ordering::Relaxed), 2, "{expected}");
        }
        let exists = async || Err::<(), _>(status_error("AlreadyExists", 409));
        assert!(call.create(exists()).await.unwrap_err().is_conflict());
        let stale = async || Err::<(), _>(status_error("Conflict", 409));
        assert!(call.change(stale()).await.unwrap_err().is_conflict());
        let forbidden = async || Err::<(), _>(status_error("Forbidden", 403));
        assert!(!call.change(forbidden()).await.unwrap_err().is_conflict());
    }

    #[tokio::test]
    async fn a_rejection_concerns_the_request_and_not_the_server() {
        for (reason, code, rejection) in [
            ("Forbidden", 403, true),
            ("Invalid", 422, true),
            ("Unauthorized", 401, false),
            ("TooManyRequests", 429, false),
            ("Conflict", 409, false),
            ("InternalError", 500, false),
        ] {
            let error = api_call().0.change(async { Err::<(), _>(status_error(reason, code)) }).await;
            assert_eq!(error.unwrap_err().is_rejection(), rejection, "{reason}");
        }
        assert!(!Error::Timeout(DEFAULT_TIMEOUT).is_rejection());
    }

    #[tokio::test(start_paused = true)]
    async fn a_leaders_write_times_out_with_its_fence_and_none_is_sent_afterwards() {
        let (call, failures) = api_call();
        let call = call.fenced(LeaseFence::expiring_in(Duration::from_secs(2)));
        let start = tokio::time::Instant::now();
        let never = call.change(std::future::pending::<kube::Result<()>>()).await;
        assert!(matches!(never, Err(Error::Timeout(_))));
        assert_eq!(start.elapsed().as_secs(), 2);
        let mut polled = false;
        let late = call.create(async {
            polled = true;
            Ok(())
        });
        assert!(matches!(late.await, Err(Error::LeaseExpired)));
        assert!(!polled);
        assert_eq!(failures.load(Ordering::Relaxed), 1, "a request that was not sent did not fail");
        assert!(call.read(async { Ok(()) }).await.is_ok());
    }
}
