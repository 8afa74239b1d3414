//! Errors that end the controller.

use std::{io, net::SocketAddr, time::Duration};

use crate::args;

/// Why [`run`](crate::run) ended before it was cancelled.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("invalid flags")]
    Args(#[source] args::Error),
    #[error("listen on {addr}")]
    Listen {
        addr: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("serve on {addr}")]
    Serve {
        addr: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("task {0} ended unexpectedly")]
    TaskEnded(&'static str),
    #[error("a loop of the term that ended can still write after {}s; restarting", .0.as_secs())]
    StepDown(Duration),
    #[error("a task panicked")]
    TaskPanicked(#[source] tokio::task::JoinError),
}
