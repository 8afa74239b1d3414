//! Tasks of a replica: each has a name and must not end by itself.

use std::future::Future;

use tokio::task::JoinSet;

use crate::Error;

/// A task's name and how it ended.
pub type TaskExit = (&'static str, Result<(), Error>);

pub async fn named(name: &'static str, task: impl Future<Output = Result<(), Error>>) -> TaskExit {
    (name, task.await)
}

/// Resolves when the first task ends, which is always a failure.
pub async fn unexpected_exit(tasks: &mut JoinSet<TaskExit>) -> Error {
    match tasks.join_next().await {
        Some(Ok((_, Err(error)))) => error,
        Some(Ok((name, Ok(())))) => Error::TaskEnded(name),
        Some(Err(panic)) => Error::TaskPanicked(panic),
        None => Error::TaskEnded("all"),
    }
}

pub async fn wait_for_all(tasks: &mut JoinSet<TaskExit>) {
    while tasks.join_next().await.is_some() {}
}
