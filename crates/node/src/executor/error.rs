//! Why a plugin call failed, in words for events.

use std::{io, path::PathBuf, time::Duration};

use wire::cni::PluginError;

use super::join_dirs;

/// Why ADD or DEL failed. The text is shown in events of the pod.
#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    /// The request cannot be passed to a plugin.
    #[error("invalid CNI request: {0}")]
    Invalid(String),
    /// The plugin reported an error, or its output is not a result.
    #[error("plugin {plugin} failed: {error}")]
    Plugin { plugin: String, error: PluginError },
    #[error(
        "plugin {plugin} is not in {} of the node; install it there or correct the type in the NAD",
        join_dirs(dirs)
    )]
    PluginMissing { plugin: String, dirs: Vec<PathBuf> },
    #[error(
        "plugin {plugin} did not finish within {} s and was killed; check what it waits for, or raise --plugin-timeout",
        limit.as_secs_f32()
    )]
    Timeout { plugin: String, limit: Duration },
    #[error("plugin {plugin} printed more than {} KiB and was killed", limit / 1024)]
    TooLong { plugin: String, limit: usize },
    #[error("plugin {plugin} was killed by signal {signal}{}{stderr}", signal_hint(*signal))]
    Signaled { plugin: String, signal: i32, stderr: String },
    /// The limits do not let the call start.
    #[error("plugin {plugin} was not started: {reason}; retrying")]
    Busy { plugin: String, reason: String },
    #[error("the daemon is stopping; no plugin was started")]
    Stopping,
    /// The daemon cannot run the plugin.
    #[error("cannot run plugin {plugin}: {source}")]
    Host { plugin: String, source: io::Error },
}

fn signal_hint(signal: i32) -> &'static str {
    if signal == nix::libc::SIGKILL {
        " (SIGKILL; if the node or the daemon is out of memory, the kernel kills plugins: see the kernel log)"
    } else {
        ""
    }
}
