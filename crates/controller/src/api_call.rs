//! Requests to the API server: each with a timeout, counted when it fails, and a leader's writes only while its fence
//! holds.

use std::{future::Future, sync::Arc, time::Duration};

use crate::{
    lease::fence::LeaseFence,
    metrics::{ApiCallKind, Metrics},
};

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
}

/// Sends the requests of one kind.
pub struct ApiCall {
    metrics: Arc<Metrics>,
    kind: ApiCallKind,
    timeout: Duration,
    fence: Option<LeaseFence>,
}

/// Decides which rejections are conflicts.
#[derive(Clone, Copy)]
enum Verb {
    Read,
    Create,
    Change,
}

impl ApiCall {
    pub fn new(metrics: Arc<Metrics>, kind: ApiCallKind, timeout: Duration) -> Self {
        Self { metrics, kind, timeout, fence: None }
    }

    /// Sends writes only while the fence holds, and waits for none of them longer than that.
    pub fn fenced(metrics: Arc<Metrics>, kind: ApiCallKind, fence: LeaseFence) -> Self {
        Self { fence: Some(fence), ..Self::new(metrics, kind, DEFAULT_TIMEOUT) }
    }

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

    /// Conflicts are not counted as errors.
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
        self.metrics.api_error(self.kind);
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
    use kube::core::Status;

    use super::*;
    use crate::lease::fence::tests::fence;

    fn api_call() -> ApiCall {
        ApiCall::new(Arc::default(), ApiCallKind::Secret, DEFAULT_TIMEOUT)
    }

    fn status_error(reason: &str, code: u16) -> kube::Error {
        kube::Error::Api(Box::new(Status::failure("no", reason).with_code(code)))
    }

    fn counted(call: &ApiCall) -> bool {
        call.metrics.text().unwrap().contains("patchbay_api_errors_total{call=\"Secret\"} 1")
    }

    #[tokio::test]
    async fn not_found_is_a_conflict_for_a_change_and_an_error_for_a_create() {
        let not_found = async || Err::<(), _>(status_error("NotFound", 404));
        let (change, create, read) = (api_call(), api_call(), api_call());
        assert!(change.change(not_found()).await.unwrap_err().is_conflict() && !counted(&change));
        assert!(!create.create(not_found()).await.unwrap_err().is_conflict() && counted(&create));
        assert!(!read.read(not_found()).await.unwrap_err().is_conflict() && counted(&read));
        let exists = async || Err::<(), _>(status_error("AlreadyExists", 409));
        assert!(api_call().create(exists()).await.unwrap_err().is_conflict());
        let stale = async || Err::<(), _>(status_error("Conflict", 409));
        assert!(api_call().change(stale()).await.unwrap_err().is_conflict());
        let forbidden = async || Err::<(), _>(status_error("Forbidden", 403));
        assert!(!api_call().change(forbidden()).await.unwrap_err().is_conflict());
    }

    #[tokio::test(start_paused = true)]
    async fn a_leaders_write_times_out_with_its_fence_and_none_is_sent_afterwards() {
        let metrics = Arc::new(Metrics::default());
        let call = ApiCall::fenced(metrics, ApiCallKind::Secret, fence(Duration::from_secs(2)));
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
        assert!(call.read(async { Ok(()) }).await.is_ok());
    }
}
