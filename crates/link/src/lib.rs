//! Reads, watches and changes the links, addresses and routes of the kernel over rtnetlink.
//!
//! The crate parses rtnetlink itself instead of using a library that decodes whole messages: a privileged process in any
//! namespace can set a link's name and alias to arbitrary bytes, and one that is not UTF-8 must not hide the link.
//! It makes no decisions and holds no state but the kernel's.

mod default_route;
mod editor;
mod message;
mod monitor;
pub mod namespace;
mod namespace_monitor;
mod netlink;
mod nsid;
mod pod_link;
mod request;
pub mod veth;

pub use default_route::{
    DefaultRoute, RestoreOutcome, SkipReason, SkippedRoute, default_routes_in, remove_default_routes,
    replace_default_routes, restore_default_routes,
};
pub use editor::LinkEditor;
pub use monitor::{LinkChanges, Monitor};
pub use namespace_monitor::{NamespaceLinkEvent, NamespaceLinkMonitor};
pub use pod_link::{
    HostLink, LinkPeer, PeerPlace, PodLink, delete_in, delete_veth, existing_links, link_indexes, links_in,
};

use std::{io, path::PathBuf, time::Duration};

/// Why a request to the kernel failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("open a netlink socket")]
    Open(#[source] io::Error),
    #[error("receive link events of all network namespaces; add the capability NET_BROADCAST")]
    AllNamespaces(#[source] io::Error),
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
    #[error("{0}: links changed during each attempt")]
    Interrupted(&'static str),
    #[error("the kernel assigned no ID to the network namespace")]
    NoNamespaceId,
    #[error("more than one {family} gateway for the default route; request one gateway per IP family")]
    SeveralGateways { family: &'static str },
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
            | Self::AllNamespaces(source)
            | Self::Enter(source) => source.raw_os_error(),
            Self::Name { .. }
            | Self::NotAKernelAction
            | Self::Interrupted(_)
            | Self::NoNamespaceId
            | Self::SeveralGateways { .. }
            | Self::Deadline { .. }
            | Self::RuntimeStopped => None,
        }
    }
}
