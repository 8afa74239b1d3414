//! What ends a controller.

use std::{io, net::SocketAddr};

use crate::{args, election};

/// Why [`run`](crate::run) ended although nobody asked it to.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the settings cannot work")]
    Settings(#[source] args::Error),
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
