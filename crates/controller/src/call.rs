//! One call to the API server: with a deadline, and counted when it fails.

use std::{future::Future, time::Duration};

use crate::metrics::{Call, Metrics};

/// The deadline of a call that nothing more pressing limits.
pub const DEADLINE: Duration = Duration::from_secs(5);

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no answer from the API server within {} ms", .0.as_millis())]
    Deadline(Duration),
    #[error("the API server refused, or could not be asked")]
    Refused(#[source] kube::Error),
}

impl Error {
    /// Somebody else was quicker: look again.
    pub fn is_conflict(&self) -> bool {
        match self {
            // A create that lost reports AlreadyExists, an update of something that has gone reports NotFound.
            Self::Refused(kube::Error::Api(status)) => {
                status.is_conflict() || status.is_already_exists() || status.is_not_found()
            }
            Self::Refused(_) | Self::Deadline(_) => false,
        }
    }
}

/// Awaits `call` for at most `deadline`. A conflict is an answer and not counted as an error.
pub async fn within<T>(
    deadline: Duration,
    metrics: &Metrics,
    kind: Call,
    call: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, Error> {
    let result = match tokio::time::timeout(deadline, call).await {
        Ok(result) => result.map_err(Error::Refused),
        Err(_) => Err(Error::Deadline(deadline)),
    };
    if let Err(error) = &result
        && !error.is_conflict()
    {
        metrics.api_error(kind);
    }
    result
}
