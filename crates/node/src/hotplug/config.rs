//! The settings of hot-plug: flags, and the configuration file of multus-dynamic-networks-controller, which Patchbay reads
//! so that an installation can keep it.

mod multus;

use std::{
    fs::File,
    io::{self, Read as _},
    path::{Path, PathBuf},
    time::Duration,
};

use api::duration;
pub use multus::{MultusConfigReader, NodeSources, under};
use plan::hotplug::{IsolationSettings, MultusConfig};
use serde::Deserialize;

/// The directory of CNI plugins on most nodes.
pub const DEFAULT_PLUGIN_DIR: &str = "/opt/cni/bin";
/// The default of `--plugin-timeout`.
const DEFAULT_PLUGIN_TIMEOUT: &str = "30s";
/// Bounds `--plugin-timeout`: less kills plugins that work, more keeps the pod of a hanging plugin waiting.
const PLUGIN_TIMEOUT_RANGE: std::ops::RangeInclusive<Duration> =
    Duration::from_secs(1)..=Duration::from_secs(600);
/// Bounds `--hotplug-config`.
const MAX_CONFIG_FILE: u64 = 1024 * 1024;
/// Where multus-dynamic-networks-controller mounts the root of the host.
const HOST_PREFIX: &str = "/host";
const CONTAINERD_SOCKET: &str = "/run/containerd/containerd.sock";
const CRIO_SOCKET: &str = "/run/crio/crio.sock";

/// Whether the daemon plugs interfaces.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum HotplugMode {
    /// Attach and detach interfaces of running pods.
    #[default]
    On,
    /// Attach nothing. Interfaces that the daemon attached earlier are still detached when their pod ends.
    Off,
}

/// Flags of hot-plug.
#[derive(Debug, Clone, clap::Args)]
pub struct HotplugArgs {
    /// Whether the daemon attaches and detaches interfaces of running pods when their networks annotation changes. With
    /// `off`, it still detaches what it attached earlier when the pod ends.
    #[arg(long, env = "PATCHBAY_HOTPLUG", value_enum, value_name = "MODE", default_value = "on")]
    pub hotplug: HotplugMode,

    /// Configuration file of multus-dynamic-networks-controller (JSON), if you want to keep it. The daemon reads
    /// criSocketPath and criType from it, and ignores all other keys. --runtime-socket overrides it.
    #[arg(long, env = "PATCHBAY_HOTPLUG_CONFIG", value_name = "FILE")]
    pub hotplug_config: Option<PathBuf>,

    /// How long one call of a CNI plugin may take, such as 30s. After that the daemon kills the plugin and retries later.
    #[arg(
        long,
        env = "PATCHBAY_PLUGIN_TIMEOUT",
        value_name = "DURATION",
        default_value = DEFAULT_PLUGIN_TIMEOUT,
        value_parser = parse_plugin_timeout
    )]
    pub plugin_timeout: Duration,

    /// Directories of CNI plugins on the host, separated by commas, in the order in which the daemon searches them. By
    /// default the directory that multus uses on the node, and /opt/cni/bin.
    #[arg(long, env = "PATCHBAY_CNI_PLUGIN_DIRS", value_name = "DIRS", value_delimiter = ',', value_parser = directory)]
    pub cni_plugin_dirs: Vec<PathBuf>,

    /// Whether a pod may only attach to networks of its own namespace and of --global-namespaces. By default as the
    /// configuration of multus on the node says (namespaceIsolation), and false on a node without multus.
    #[arg(long, env = "PATCHBAY_NAMESPACE_ISOLATION", value_name = "BOOL", action = clap::ArgAction::Set)]
    pub namespace_isolation: Option<bool>,

    /// Namespaces, separated by commas, whose networks every pod may use while namespace isolation is on. By default as
    /// the configuration of multus on the node says (globalNamespaces), or else the namespace default.
    #[arg(long, env = "PATCHBAY_GLOBAL_NAMESPACES", value_name = "NAMESPACES", value_delimiter = ',')]
    pub global_namespaces: Option<Vec<String>>,

    /// Namespaces besides kube-system, separated by commas, in which multus-dynamic-networks-controller may run. While one
    /// of its pods runs on the node, the daemon attaches and detaches nothing there.
    #[arg(long, env = "PATCHBAY_PEER_NAMESPACES", value_name = "NAMESPACES", value_delimiter = ',')]
    pub peer_namespaces: Vec<String>,
}

/// The settings that result from the flags and the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HotplugSettings {
    pub mode: HotplugMode,
    /// The socket of the container runtime on the host; None if it is to be found.
    pub runtime_socket: Option<PathBuf>,
    pub plugin_timeout: Duration,
    /// Empty if it is to be found: see [`HotplugSettings::plugin_dirs`].
    pub plugin_dirs: Vec<PathBuf>,
    pub isolation: IsolationSettings,
    pub peer_namespaces: Vec<String>,
}

/// Why the settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("read the file {} of --hotplug-config", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("the file {} of --hotplug-config is larger than {MAX_CONFIG_FILE} bytes", path.display())]
    TooLong { path: PathBuf },
    #[error("the file {} of --hotplug-config is not a JSON object", path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    #[error(
        "criType {value:?} in the file {} of --hotplug-config is unknown: set containerd or crio, or remove it",
        path.display()
    )]
    CriType { path: PathBuf, value: String },
    #[error(
        "criSocketPath {value:?} in the file {} of --hotplug-config is not an absolute path of a socket",
        path.display()
    )]
    Socket { path: PathBuf, value: String },
}

/// The keys of the file that are used.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ConfigFile {
    cri_socket_path: Option<String>,
    cri_type: Option<String>,
}

impl HotplugArgs {
    /// The settings. Reads the file of `--hotplug-config`. `runtime_socket` is the value of `--runtime-socket`.
    pub fn settings(self, runtime_socket: Option<PathBuf>) -> Result<HotplugSettings, ConfigError> {
        let Self {
            hotplug,
            hotplug_config,
            plugin_timeout,
            cni_plugin_dirs,
            namespace_isolation,
            global_namespaces,
            peer_namespaces,
        } = self;
        let configured = hotplug_config.map(|path| configured_socket(&path)).transpose()?.flatten();
        let mut plugin_dirs = Vec::new();
        for dir in cni_plugin_dirs {
            if !plugin_dirs.contains(&dir) {
                plugin_dirs.push(dir);
            }
        }
        Ok(HotplugSettings {
            mode: hotplug,
            runtime_socket: runtime_socket.or(configured),
            plugin_timeout,
            plugin_dirs,
            isolation: IsolationSettings {
                enabled: namespace_isolation,
                global_namespaces: global_namespaces.map(names),
            },
            peer_namespaces: names(peer_namespaces),
        })
    }
}

impl HotplugSettings {
    /// The directories of CNI plugins on the host, in the order of the search: those of the flag, or else what multus uses
    /// and the usual one.
    pub fn plugin_dirs(&self, multus: &MultusConfig) -> Vec<PathBuf> {
        if !self.plugin_dirs.is_empty() {
            return self.plugin_dirs.clone();
        }
        let default = PathBuf::from(DEFAULT_PLUGIN_DIR);
        let configured = multus.bin_dir.clone().filter(|dir| *dir != default);
        configured.into_iter().chain([default]).collect()
    }
}

/// Names without blanks around them. Empty ones are left out.
fn names(names: Vec<String>) -> Vec<String> {
    names.iter().map(|name| name.trim()).filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

/// The socket that the file names, or the default one of the runtime that it names.
fn configured_socket(path: &Path) -> Result<Option<PathBuf>, ConfigError> {
    let read = |source| ConfigError::Read { path: path.to_owned(), source };
    let mut text = Vec::new();
    File::open(path).map_err(read)?.take(MAX_CONFIG_FILE + 1).read_to_end(&mut text).map_err(read)?;
    if text.len() as u64 > MAX_CONFIG_FILE {
        return Err(ConfigError::TooLong { path: path.to_owned() });
    }
    parse_socket(path, &text)
}

fn parse_socket(path: &Path, text: &[u8]) -> Result<Option<PathBuf>, ConfigError> {
    let json = |source| ConfigError::Json { path: path.to_owned(), source };
    // serde accepts a list for a struct, too.
    let object: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(text).map_err(json)?;
    let ConfigFile { cri_socket_path, cri_type } = serde_json::from_value(object.into()).map_err(json)?;
    let filled = |text: Option<String>| text.filter(|text| !text.trim().is_empty());
    if let Some(value) = filled(cri_socket_path) {
        let socket = value.trim();
        let socket = host_path(socket.strip_prefix("unix://").unwrap_or(socket));
        if !socket.is_absolute() || socket == Path::new("/") {
            return Err(ConfigError::Socket { path: path.to_owned(), value });
        }
        return Ok(Some(socket));
    }
    match filled(cri_type) {
        None => Ok(None),
        Some(value) => match value.trim().to_ascii_lowercase().as_str() {
            "containerd" => Ok(Some(PathBuf::from(CONTAINERD_SOCKET))),
            "crio" | "cri-o" => Ok(Some(PathBuf::from(CRIO_SOCKET))),
            _ => Err(ConfigError::CriType { path: path.to_owned(), value }),
        },
    }
}

/// The path on the host of a path in a container that mounts the host's root at `/host`, as multus-dynamic-networks-controller does.
fn host_path(path: &str) -> PathBuf {
    match Path::new(path).strip_prefix(HOST_PREFIX) {
        Ok(rest) => Path::new("/").join(rest),
        Err(_) => PathBuf::from(path),
    }
}

/// Parses the value of `--plugin-timeout`.
pub fn parse_plugin_timeout(text: &str) -> Result<Duration, String> {
    let timeout = duration::parse(text).map_err(|error| error.to_string())?;
    if PLUGIN_TIMEOUT_RANGE.contains(&timeout) {
        return Ok(timeout);
    }
    let (min, max) = (PLUGIN_TIMEOUT_RANGE.start().as_secs(), PLUGIN_TIMEOUT_RANGE.end().as_secs());
    Err(format!("must be between {min}s and {max}s"))
}

fn directory(text: &str) -> Result<PathBuf, &'static str> {
    let path = PathBuf::from(text.trim());
    // CNI separates the directories of plugins by colons.
    if path.is_absolute() && !text.contains(':') {
        Ok(path)
    } else {
        Err("must be an absolute path without a colon")
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Parser)]
    struct ArgsCli {
        #[command(flatten)]
        args: HotplugArgs,
    }

    fn parse(args: &[&str]) -> Result<HotplugArgs, clap::Error> {
        ArgsCli::try_parse_from([&["patchbay"], args].concat()).map(|cli| cli.args)
    }

    fn settings(args: &[&str]) -> HotplugSettings {
        parse(args).unwrap().settings(None).unwrap()
    }

    fn socket(text: &str) -> Result<Option<PathBuf>, ConfigError> {
        parse_socket(Path::new("config.json"), text.as_bytes())
    }

    #[test]
    fn hotplug_is_on_and_finds_everything_by_itself() {
        let expected = HotplugSettings {
            mode: HotplugMode::On,
            runtime_socket: None,
            plugin_timeout: Duration::from_secs(30),
            plugin_dirs: Vec::new(),
            isolation: IsolationSettings::default(),
            peer_namespaces: Vec::new(),
        };
        assert_eq!(settings(&[]), expected);
        assert_eq!(expected.plugin_dirs(&MultusConfig::default()), [PathBuf::from(DEFAULT_PLUGIN_DIR)]);
        let bin_dir = |dir| MultusConfig { bin_dir: Some(PathBuf::from(dir)), ..MultusConfig::default() };
        assert_eq!(
            expected.plugin_dirs(&bin_dir("/usr/libexec/cni")),
            ["/usr/libexec/cni", "/opt/cni/bin"].map(PathBuf::from)
        );
        assert_eq!(expected.plugin_dirs(&bin_dir("/opt/cni/bin")), [PathBuf::from("/opt/cni/bin")]);
    }

    #[test]
    fn every_flag_sets_its_setting() {
        let settings = settings(&[
            "--hotplug=off",
            "--plugin-timeout=1m",
            "--cni-plugin-dirs=/a,/b,/a",
            "--namespace-isolation=true",
            "--global-namespaces=a, b,",
            "--peer-namespaces=net",
        ]);
        assert_eq!((settings.mode, settings.plugin_timeout.as_secs()), (HotplugMode::Off, 60));
        assert_eq!(settings.plugin_dirs(&MultusConfig::default()), ["/a", "/b"].map(PathBuf::from));
        let globals = Some(vec!["a".to_owned(), "b".to_owned()]);
        assert_eq!(settings.isolation, IsolationSettings { enabled: Some(true), global_namespaces: globals });
        assert_eq!(settings.peer_namespaces, ["net"]);
        let none = parse(&["--global-namespaces="]).unwrap().settings(None).unwrap();
        assert_eq!(none.isolation.global_namespaces, Some(Vec::new()), "no namespace is global");
    }

    #[test]
    fn invalid_flags_are_rejected() {
        for flag in [
            "--hotplug=maybe",
            "--plugin-timeout=0s",
            "--plugin-timeout=30",
            "--plugin-timeout=11m",
            "--namespace-isolation=yes",
            "--cni-plugin-dirs=bin",
            "--cni-plugin-dirs=/a:/b",
        ] {
            assert!(parse(&[flag]).is_err(), "{flag}");
        }
    }

    #[test]
    fn the_socket_of_the_file_may_have_the_prefix_of_the_original() {
        for (text, expected) in [
            (r#"{"criSocketPath": "/host/run/crio/crio.sock"}"#, Some("/run/crio/crio.sock")),
            (
                r#"{"criSocketPath": "/run/x.sock", "criType": "crio", "multusSocketPath": "/host/run/multus/multus.sock"}"#,
                Some("/run/x.sock"),
            ),
            (r#"{"criSocketPath": "unix:///run/x.sock"}"#, Some("/run/x.sock")),
            (r#"{"criSocketPath": "/hostile.sock"}"#, Some("/hostile.sock")),
            (r#"{"criSocketPath": "", "criType": "crio"}"#, Some(CRIO_SOCKET)),
            (r#"{"criType": "containerd", "other": [1]}"#, Some(CONTAINERD_SOCKET)),
            (r#"{"criType": null}"#, None),
            ("{}", None),
        ] {
            assert_eq!(socket(text).unwrap(), expected.map(PathBuf::from), "{text}");
        }
    }

    #[test]
    fn a_file_that_cannot_be_used_is_an_error_that_names_it() {
        for text in ["", "[]", "{", r#"{"criSocketPath": 7}"#, "\u{0}", "null"] {
            let error = socket(text).unwrap_err();
            assert!(matches!(&error, ConfigError::Json { .. }), "{text}: {error}");
            assert!(error.to_string().contains("config.json"), "{error}");
        }
        for text in [r#"{"criSocketPath": "run/x.sock"}"#, r#"{"criSocketPath": "/host"}"#] {
            assert!(matches!(socket(text), Err(ConfigError::Socket { .. })), "{text}");
        }
        let error = socket(r#"{"criType": "docker"}"#).unwrap_err().to_string();
        assert!(error.contains("set containerd or crio"), "{error}");
        let error = parse(&["--hotplug-config=/nonexistent/x.json"]).unwrap().settings(None).unwrap_err();
        assert_eq!(error.to_string(), "read the file /nonexistent/x.json of --hotplug-config");
    }

    #[test]
    fn the_runtime_socket_of_the_flag_wins_over_the_file() {
        let path = std::env::temp_dir().join(format!("patchbay-hotplug-config-{}.json", std::process::id()));
        std::fs::write(&path, r#"{"criType": "crio"}"#).unwrap();
        let args = parse(&["--hotplug-config", path.to_str().unwrap()]).unwrap();
        let by_file = args.clone().settings(None).unwrap().runtime_socket;
        let by_flag = args.clone().settings(Some(PathBuf::from("/run/my.sock"))).unwrap().runtime_socket;
        std::fs::write(&path, vec![b' '; usize::try_from(MAX_CONFIG_FILE).unwrap() + 1]).unwrap();
        let long = args.settings(None);
        std::fs::remove_file(&path).unwrap();
        assert_eq!((by_file, by_flag), (Some(CRIO_SOCKET.into()), Some("/run/my.sock".into())));
        assert!(matches!(long, Err(ConfigError::TooLong { .. })), "{long:?}");
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in r#"[\[\]{}:",a-z/]{0,40}"#, path in ".{0,20}") {
            _ = socket(&text);
            _ = socket(&serde_json::json!({"criSocketPath": path, "criType": path}).to_string());
            _ = directory(&path);
            _ = parse_plugin_timeout(&path);
        }
    }
}
