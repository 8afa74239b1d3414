//! Reads, watches and changes the links, addresses and routes of the kernel over rtnetlink.
//!
//! The crate parses rtnetlink itself instead of using a library that decodes whole messages: a privileged process in any
//! namespace can set a link's name and alias to arbitrary bytes, and one that is not UTF-8 must not hide the link.
//! It makes no decisions and holds no state but the kernel's.

mod editor;
mod message;
mod monitor;
pub mod namespace;
mod netlink;
mod request;
pub mod veth;

pub use editor::LinkEditor;
pub use monitor::{LinkChanges, Monitor};

use std::{io, path::PathBuf, time::Duration};

/// Why a request to the kernel failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("open a netlink socket")]
    Open(#[source] io::Error),
    #[error("enter the network namespace")]
    Enter(#[source] io::Error),
    #[error("{what}: send the netlink request")]
    Send { what: &'static str, source: io::Error },
    #[error("{what}: read the netlink response")]
    Receive { what: &'static str, source: io::Error },
    #[error("{what}{}", in_parentheses(.kernel_text))]
    Rejected { what: &'static str, kernel_text: String, source: io::Error },
    #[error("the kernel does not support {kind} links; load the kernel module {kind}")]
    UnsupportedKind { kind: &'static str, source: io::Error },
    #[error("write {}", path.display())]
    Sysctl { path: PathBuf, source: io::Error },
    #[error("{name:?} is not a valid link name")]
    Name { name: String },
    #[error("link records are not stored in the kernel")]
    NotAKernelAction,
    #[error("the kernel did not list its links within {} s; another process on this node holds the RTNL lock", limit.as_secs())]
    Deadline { limit: Duration },
    #[error("the async runtime stopped while the kernel was listing links")]
    RuntimeStopped,
}

fn in_parentheses(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!(" ({text})") }
}

impl Error {
    /// The errno of the kernel.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Rejected { source, .. }
            | Self::Send { source, .. }
            | Self::Receive { source, .. }
            | Self::UnsupportedKind { source, .. }
            | Self::Sysctl { source, .. }
            | Self::Open(source)
            | Self::Enter(source) => source.raw_os_error(),
            Self::Name { .. } | Self::NotAKernelAction | Self::Deadline { .. } | Self::RuntimeStopped => None,
        }
    }
}
