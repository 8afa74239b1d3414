//! Calls to the API server: each with a deadline, counted when it fails, and a leader's only while it leads.

use std::{future::Future, sync::Arc, time::Duration};

use crate::{
    metrics::{Call, Metrics},
    tenure::Tenure,
};

/// The deadline of a call that nothing more pressing limits.
pub const DEADLINE: Duration = Duration::from_secs(5);

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no answer from the API server within {} ms", .0.as_millis())]
    Deadline(Duration),
    #[error("another writer was quicker")]
    Conflict(#[source] kube::Error),
    #[error("the API server refused, or could not be asked")]
    Refused(#[source] kube::Error),
    #[error("the time in office is over, nothing was sent")]
    Over,
}

impl Error {
    /// Somebody else was quicker: look again.
    pub fn is_conflict(&self) -> bool {
        matches!(self, Self::Conflict(_))
    }
}

/// How the calls of one kind are made.
pub struct Line {
    metrics: Arc<Metrics>,
    kind: Call,
    deadline: Duration,
    tenure: Option<Tenure>,
}

/// What a call does, which is what its refusal means.
#[derive(Clone, Copy)]
enum Verb {
    Read,
    Create,
    Change,
}

impl Line {
    pub fn new(metrics: Arc<Metrics>, kind: Call, deadline: Duration) -> Self {
        Self { metrics, kind, deadline, tenure: None }
    }

    /// Writes go out only while the tenure lasts, and none is waited for longer than that.
    pub fn of_leader(metrics: Arc<Metrics>, kind: Call, tenure: Tenure) -> Self {
        Self { tenure: Some(tenure), ..Self::new(metrics, kind, DEADLINE) }
    }

    pub async fn read<T>(&self, call: impl Future<Output = kube::Result<T>>) -> Result<T, Error> {
        self.within(self.deadline, Verb::Read, call).await
    }

    /// That it exists already is a conflict. That the namespace does not is none: looking again does not make it.
    pub async fn create<T>(&self, call: impl Future<Output = kube::Result<T>>) -> Result<T, Error> {
        self.write(Verb::Create, call).await
    }

    /// Replaces, patches or deletes. That it has gone is a conflict.
    pub async fn change<T>(&self, call: impl Future<Output = kube::Result<T>>) -> Result<T, Error> {
        self.write(Verb::Change, call).await
    }

    /// A future that is never polled sends nothing.
    async fn write<T>(&self, verb: Verb, call: impl Future<Output = kube::Result<T>>) -> Result<T, Error> {
        let rest = self.tenure.as_ref().map_or(Duration::MAX, Tenure::rest);
        if rest.is_zero() {
            return Err(Error::Over);
        }
        self.within(self.deadline.min(rest), verb, call).await
    }

    /// A conflict is an answer and not counted as an error.
    async fn within<T>(
        &self,
        deadline: Duration,
        verb: Verb,
        call: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, Error> {
        let error = match tokio::time::timeout(deadline, call).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) if lost(verb, &error) => return Err(Error::Conflict(error)),
            Ok(Err(error)) => Error::Refused(error),
            Err(_) => Error::Deadline(deadline),
        };
        self.metrics.api_error(self.kind);
        Err(error)
    }
}

fn lost(verb: Verb, error: &kube::Error) -> bool {
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
    use crate::tenure::tests::tenure;

    fn line() -> Line {
        Line::new(Arc::default(), Call::Secret, DEADLINE)
    }

    fn refusal(reason: &str, code: u16) -> kube::Error {
        kube::Error::Api(Box::new(Status::failure("no", reason).with_code(code)))
    }

    fn errors(line: &Line) -> bool {
        line.metrics.text().unwrap().contains("patchbay_api_errors_total{call=\"Secret\"} 1")
    }

    #[tokio::test]
    async fn what_does_not_exist_is_a_conflict_for_a_change_and_an_error_for_a_create() {
        let gone = async || Err::<(), _>(refusal("NotFound", 404));
        let (change, create, read) = (line(), line(), line());
        assert!(change.change(gone()).await.unwrap_err().is_conflict() && !errors(&change));
        assert!(!create.create(gone()).await.unwrap_err().is_conflict() && errors(&create));
        assert!(!read.read(gone()).await.unwrap_err().is_conflict() && errors(&read));
        let exists = async || Err::<(), _>(refusal("AlreadyExists", 409));
        assert!(line().create(exists()).await.unwrap_err().is_conflict());
        let stale = async || Err::<(), _>(refusal("Conflict", 409));
        assert!(line().change(stale()).await.unwrap_err().is_conflict());
        let forbidden = async || Err::<(), _>(refusal("Forbidden", 403));
        assert!(!line().change(forbidden()).await.unwrap_err().is_conflict());
    }

    #[tokio::test(start_paused = true)]
    async fn a_leaders_write_ends_with_its_tenure_and_none_begins_after_it() {
        let metrics = Arc::new(Metrics::default());
        let line = Line::of_leader(metrics, Call::Secret, tenure(Duration::from_secs(2)));
        let begun = tokio::time::Instant::now();
        let never = line.change(std::future::pending::<kube::Result<()>>()).await;
        assert!(matches!(never, Err(Error::Deadline(_))));
        assert_eq!(begun.elapsed().as_secs(), 2);
        let mut polled = false;
        let late = line.create(async {
            polled = true;
            Ok(())
        });
        assert!(matches!(late.await, Err(Error::Over)));
        assert!(!polled);
        assert!(line.read(async { Ok(()) }).await.is_ok());
    }
}
