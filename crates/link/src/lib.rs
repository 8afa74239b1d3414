//! What the kernel has: links, addresses and default routes, word when they change, and changing them.
//!
//! Speaks rtnetlink by itself instead of through a decoder of whole messages, because a link's name and alias are
//! whatever somebody with rights in some namespace once made them, and one unreadable alias must not hide a link.
//! Decides nothing, and knows only what the kernel knows.

pub mod attach;
mod change;
mod dump;
mod message;
mod monitor;
pub mod namespace;
mod request;

pub use change::Changer;
pub use monitor::{Changed, Monitor};

use std::{io, path::PathBuf, time::Duration};

/// Why the kernel could not be asked, or what it refused.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("open a netlink socket")]
    Open(#[source] io::Error),
    #[error("enter the network namespace")]
    Enter(#[source] io::Error),
    #[error("ask the kernel for its {what}")]
    Ask { what: &'static str, source: io::Error },
    #[error("read the kernel's {what}")]
    Read { what: &'static str, source: io::Error },
    #[error("{what}{}", in_words(.said))]
    Refused { what: &'static str, said: String, source: io::Error },
    #[error("make a link: this kernel has no {kind}; load the module of that name, or use another kernel")]
    NoSuchKind { kind: &'static str, source: io::Error },
    #[error("write {}", path.display())]
    Sysctl { path: PathBuf, source: io::Error },
    #[error("{name:?} cannot be the name of a link")]
    Name { name: String },
    #[error("records are not kept by the kernel")]
    NotForTheKernel,
    #[error("the kernel did not show its links within {} s; something on this node holds them locked", limit.as_secs())]
    Deadline { limit: Duration },
    #[error("the runtime stopped in the middle of a look at the kernel")]
    Stopped,
}

/// What the kernel added in words, if it did.
fn in_words(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!(" ({text})") }
}

impl Error {
    /// The number that the kernel gave for its refusal.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Refused { source, .. }
            | Self::Ask { source, .. }
            | Self::Read { source, .. }
            | Self::NoSuchKind { source, .. }
            | Self::Sysctl { source, .. }
            | Self::Open(source)
            | Self::Enter(source) => source.raw_os_error(),
            Self::Name { .. } | Self::NotForTheKernel | Self::Deadline { .. } | Self::Stopped => None,
        }
    }
}
