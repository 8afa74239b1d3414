//! The flags of `patchbay install` that configure hot-plug in the node daemon.

use api::names::HOST_ROOT;
use clap::ValueEnum;

use super::{parse_directory, parse_dns_label};

/// Flags for the node daemon. A flag that is not set is not passed on, so that the daemon's default applies.
#[derive(Debug, Default, clap::Args)]
pub struct HotplugOptions {
    /// Whether the node daemon plugs interfaces into running pods. With `off` it still removes those that it plugged
    /// [default: the daemon's, on]
    #[arg(long, value_name = "MODE", ignore_case = true)]
    pub hotplug: Option<HotplugMode>,

    /// Whether pods may use only NetworkAttachmentDefinitions of their own namespace and of the global namespaces
    /// [default: as the Multus configuration of the node says]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub namespace_isolation: Option<bool>,

    /// Namespaces whose NetworkAttachmentDefinitions every pod may use, separated by commas [default: as the Multus
    /// configuration of the node says]. An empty value means none
    #[arg(long, value_name = "NAMESPACES", value_delimiter = ',', value_parser = parse_global_namespace)]
    pub global_namespaces: Option<Vec<String>>,

    /// Namespaces, besides kube-system, in which multus-dynamic-networks-controller may run, separated by commas. The node
    /// daemon plugs nothing on a node where it runs
    #[arg(long, value_name = "NAMESPACES", value_delimiter = ',', value_parser = parse_dns_label)]
    pub peer_namespaces: Option<Vec<String>>,

    /// How long one call of a CNI plugin may take, such as 30s [default: the daemon's]
    #[arg(long, value_name = "DURATION", value_parser = parse_timeout)]
    pub plugin_timeout: Option<String>,

    /// The configuration file of multus-dynamic-networks-controller on the nodes, to read the runtime's socket from
    #[arg(long, value_name = "FILE", value_parser = parse_file)]
    pub hotplug_config: Option<String>,
}

/// Whether hot-plug attaches interfaces.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum HotplugMode {
    On,
    Off,
}

impl HotplugOptions {
    /// The arguments of the node daemon.
    pub fn args(&self) -> Vec<String> {
        let Self {
            hotplug,
            namespace_isolation,
            global_namespaces,
            peer_namespaces,
            plugin_timeout,
            hotplug_config,
        } = self;
        let mode = hotplug.map(|mode| match mode {
            HotplugMode::On => "on".to_owned(),
            HotplugMode::Off => "off".to_owned(),
        });
        let values = [
            ("hotplug", mode),
            ("namespace-isolation", namespace_isolation.map(|isolation| isolation.to_string())),
            ("global-namespaces", global_namespaces.as_ref().map(|names| names.join(","))),
            ("peer-namespaces", peer_namespaces.as_ref().map(|names| names.join(","))),
            ("plugin-timeout", plugin_timeout.clone()),
            // The daemon sees the files of its node there.
            ("hotplug-config", hotplug_config.as_ref().map(|path| format!("{HOST_ROOT}{path}"))),
        ];
        values.into_iter().filter_map(|(flag, value)| Some(format!("--{flag}={}", value?))).collect()
    }
}

/// Accepts what the daemon accepts.
fn parse_timeout(text: &str) -> Result<String, String> {
    node::parse_plugin_timeout(text).map(|_| text.to_owned())
}

fn parse_global_namespace(text: &str) -> Result<String, String> {
    if text.is_empty() { Ok(String::new()) } else { parse_dns_label(text) }
}

fn parse_file(text: &str) -> Result<String, &'static str> {
    parse_directory(text).map_err(|_| "must be an absolute path without '..'")
}
