//! Command-line flags of `patchbay node` and `patchbay probe`.

use std::{path::PathBuf, time::Duration};

use api::{
    IfName, IfNamePatterns, duration,
    names::{CNI_BIN_DIR, HOST_ROOT, RUN_DIR, STATE_DIR},
};

use crate::{Probe, hotplug::HotplugArgs};

/// The path in the image of the CNI plugin that the daemon installs in [`CNI_BIN_DIR`].
const CNI_SHIM: &str = "/usr/bin/patchbay-cni";

/// Flags of `patchbay node`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Name of the Node that this daemon runs on.
    #[arg(long, env = "NODE_NAME", value_parser = node_name)]
    pub node_name: String,

    /// Links to omit from the NodeNetwork, as globs separated by commas; links of Patchbay are listed by network. Replaces
    /// the built-in list, which omits links of pods, virtual machines and other network software.
    #[arg(
        long,
        env = "PATCHBAY_IGNORE_INTERFACES",
        value_name = "GLOBS",
        default_value = plan::nodenetwork::DEFAULT_IGNORED,
        hide_default_value = true
    )]
    pub ignore_interfaces: IfNamePatterns,

    /// Directory for state that must survive a restart.
    #[arg(long, env = "PATCHBAY_STATE_DIR", value_name = "DIR", default_value = STATE_DIR)]
    pub state_dir: PathBuf,

    /// Directory for sockets.
    #[arg(long, env = "PATCHBAY_RUN_DIR", value_name = "DIR", default_value = RUN_DIR)]
    pub run_dir: PathBuf,

    /// Mount point of the host's root file system.
    #[arg(long, env = "PATCHBAY_HOST_ROOT", value_name = "DIR", default_value = HOST_ROOT)]
    pub host_root: PathBuf,

    /// Directory to install the CNI plugins into.
    #[arg(long, env = "PATCHBAY_CNI_BIN_DIR", value_name = "DIR", default_value = CNI_BIN_DIR)]
    pub cni_bin_dir: PathBuf,

    /// The CNI plugin to install.
    #[arg(long, env = "PATCHBAY_SHIM", value_name = "FILE", default_value = CNI_SHIM)]
    pub shim: PathBuf,

    /// Host of the API server. A link on the route to it is never used as an uplink.
    #[arg(long, env = "KUBERNETES_SERVICE_HOST", value_name = "HOST")]
    pub api_server: Option<String>,

    /// Path of the container runtime's socket on the host. The daemon lists the sandboxes there and releases addresses of
    /// sandboxes that no longer exist. By default it tries the usual paths until one lists its own pod.
    #[arg(long, env = "PATCHBAY_RUNTIME_SOCKET", value_name = "FILE")]
    pub runtime_socket: Option<PathBuf>,

    /// UID of the daemon's own pod, by which it recognizes the container runtime that runs it.
    #[arg(long, env = "PATCHBAY_POD_UID", value_name = "UID")]
    pub pod_uid: Option<String>,

    /// How often the daemon compares its leases with the sandboxes of the container runtime, such as 10m. It releases a
    /// lease without a sandbox only if the lease is older than this interval and older than five minutes.
    #[arg(long, env = "PATCHBAY_GC_INTERVAL", value_name = "DURATION", default_value = "10m", value_parser = gc_interval)]
    pub gc_interval: Duration,

    #[command(flatten)]
    pub hotplug: HotplugArgs,
}

/// Flags of `patchbay probe`.
#[derive(Debug, Clone, clap::Args)]
pub struct ProbeArgs {
    /// What to query.
    pub probe: Probe,

    /// Directory for sockets.
    #[arg(long, env = "PATCHBAY_RUN_DIR", value_name = "DIR", default_value = RUN_DIR)]
    pub run_dir: PathBuf,
}

/// Flags of `patchbay forget`.
#[derive(Debug, Clone, clap::Args)]
pub struct ForgetArgs {
    /// The pod, as NAMESPACE/NAME. It may be gone.
    #[arg(long, value_parser = pod)]
    pub pod: String,

    /// The interface in the pod.
    #[arg(long)]
    pub interface: IfName,

    /// Directory for sockets.
    #[arg(long, env = "PATCHBAY_RUN_DIR", value_name = "DIR", default_value = RUN_DIR)]
    pub run_dir: PathBuf,
}

/// Both names become a part of a URL.
fn pod(text: &str) -> Result<String, String> {
    let is_name = |name: &str| {
        let valid = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.');
        !name.is_empty() && name.chars().all(valid)
    };
    let (namespace, name) = text.split_once('/').unwrap_or_default();
    if is_name(namespace) && is_name(name) {
        Ok(text.to_owned())
    } else {
        Err("expected NAMESPACE/NAME".to_owned())
    }
}

fn gc_interval(text: &str) -> Result<Duration, String> {
    let interval = duration::parse(text).map_err(|error| error.to_string())?;
    if interval < Duration::from_secs(1) {
        return Err("must be at least 1s".to_owned());
    }
    Ok(interval)
}

/// Parses the name of a Node, a DNS subdomain. It is used verbatim in field selectors and object names.
fn node_name(text: &str) -> Result<String, &'static str> {
    let label = |label: &str| {
        let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        !label.is_empty() && label.bytes().all(inner) && !label.starts_with('-') && !label.ends_with('-')
    };
    if text.len() <= 253 && text.split('.').all(label) {
        Ok(text.to_owned())
    } else {
        Err("the name of a Node consists of a-z, 0-9, '-' and '.'; set it from spec.nodeName of the pod")
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct ArgsCli {
        #[command(flatten)]
        args: Args,
    }

    fn parse(args: &[&str]) -> Result<Args, clap::Error> {
        ArgsCli::try_parse_from([&["patchbay"], args].concat()).map(|cli| cli.args)
    }

    #[test]
    fn only_the_node_name_is_required() {
        let args = parse(&["--node-name", "node-1.example.com"]).unwrap();
        assert_eq!(args.node_name, "node-1.example.com");
        assert!(args.ignore_interfaces.matches("veth1234") && !args.ignore_interfaces.matches("eth0"));
        assert_eq!(args.run_dir, PathBuf::from("/run/patchbay"));
        assert_eq!(args.state_dir, PathBuf::from("/var/lib/patchbay"));
        assert_eq!(args.host_root, PathBuf::from("/host"));
    }

    #[test]
    fn invalid_node_names_are_rejected() {
        let long = "a".repeat(254);
        for name in ["", "Node", "a,b", "a=b", "a b", "-a", "a-", "a..b", "a/b", "ä", &long] {
            assert!(parse(&["--node-name", name]).is_err(), "{name:?}");
        }
    }

    #[test]
    fn the_gc_interval_is_a_duration_of_at_least_a_second() {
        let interval =
            |text| parse(&["--node-name", "a", "--gc-interval", text]).map(|args| args.gc_interval);
        assert_eq!(parse(&["--node-name", "a"]).unwrap().gc_interval, Duration::from_secs(600));
        assert_eq!(interval("1m30s").unwrap(), Duration::from_secs(90));
        for text in ["", "600", "0s", "999ms", "-1s"] {
            assert!(interval(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn an_empty_list_of_patterns_omits_no_link() {
        let args = parse(&["--node-name", "a", "--ignore-interfaces", ""]).unwrap();
        assert_eq!(args.ignore_interfaces, IfNamePatterns::default());
        let error = parse(&["--node-name", "a", "--ignore-interfaces", "veth["]).unwrap_err();
        assert!(error.to_string().contains("without a closing"), "{error}");
    }
}
