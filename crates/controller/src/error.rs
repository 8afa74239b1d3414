//! What ends a controller.

use std::{fmt, io, net::SocketAddr};

use crate::{args, election};

/// Why [`run`](crate::run) ended although nobody asked it to.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the settings cannot work")]
    Settings(#[source] args::Error),
    #[error("find the API server")]
    Config(#[source] kube::config::InferConfigError),
    #[error("make a client for the API server")]
    Client(#[source] kube::Error),
    #[error("listen for signals")]
    Signals(#[source] io::Error),
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
    #[error("lead")]
    Lead(#[source] election::Error),
    #[error("the task {0} ended, which it never should")]
    Ended(&'static str),
    #[error("a task broke down")]
    Broken(#[source] tokio::task::JoinError),
}

/// An error with all its causes, for the one place where it is logged.
pub struct Chain<'a>(pub &'a (dyn std::error::Error + 'static));

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        let causes = std::iter::successors(self.0.source(), |error| error.source());
        causes.into_iter().try_for_each(|cause| write!(f, ": {cause}"))
    }
}
